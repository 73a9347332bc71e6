"""A recorder to paste into your own training loop. It needs torch alone (docs/fix/debugging.md).

    recorder = Recorder("theirs.jsonl", model, names, outputs, groups={"dp": 2, "accumulation": 4})
    recorder.step(tokens, targets, loss=loss)   # on every rank, after all backward passes, before
    recorder.close()                            # clipping: its rows (B, T), its mean loss. Close
                                                # after the last step

names    {name to write: (names of your parameters, what makes one tensor of theirs)}
outputs  {name to write: name of your module}: modules whose output is (..., C)

The file has a line of facts, then one a step: {kind: {name: [values]}}, each value once that a rank
has. "data" are the weights before the step, "grad" their gradients; the values: see `summary`.
"""

import json
import os

import torch
import torch.distributed as dist


def hashed(x):
    """A hash of each element of an int64 tensor, as in splitmix64. `>>` copies the sign."""
    x = (x + 1) * -0x61C8864680B583EB
    x = (x ^ (x >> 30)) * -0x40A7B892E31B1A47
    return (x ^ (x >> 27)) * -0x6B2FB644ECCEEE15 >> 20


def summary(x, index=None):
    """(9,), float64: the sum of squares, then 8 sums of x with random signs, which are bits of a
    hash of the element's number in the whole tensor. Summaries of a tensor's pieces add up."""
    x, total = x.detach().flatten(), torch.zeros(9, dtype=torch.float64, device=x.device)
    index = torch.arange(len(x), device=x.device) if index is None else index.flatten()
    for part, numbers in zip(x.split(1 << 20), index.split(1 << 20)):
        bits = hashed(numbers)[:, None] >> torch.arange(8, device=x.device) & 1
        part, signs = part.double(), 1 - 2 * bits.double()
        total += torch.cat(((part @ part)[None], part @ signs))
    return total


def hashes_of(rows):
    """A hash of each row (B, T) of numbers. All negative ones count as the same: no target."""
    places = torch.arange(rows.shape[1], device=rows.device)
    sums = hashed(rows.clamp(min=-1) + hashed(places)).sum(1).tolist()
    return [f"{number & (1 << 64) - 1:016x}" for number in sums]


def whole(x):
    return x.detach().full_tensor() if hasattr(x, "full_tensor") else x.detach()


class Recorder:
    def __init__(self, path, model, names=None, outputs=None, **facts):
        own = {name: ([name], lambda x: x) for name, _ in model.named_parameters()}
        self.model, self.names, self.outputs, self.number = model, names or own, {}, 0
        for name, module in (outputs or {}).items():
            hook = lambda module, x, output, name=name: self.note(name, output)  # noqa: E731
            model.get_submodule(module).register_forward_hook(hook)
        first = not dist.is_initialized() or dist.get_rank() == 0
        self.file = open(path if first else os.devnull, "w")
        dtype = str(next(model.parameters()).dtype).removeprefix("torch.")
        print(json.dumps({"dtype": dtype} | facts), file=self.file, flush=True)

    def note(self, name, output):
        """Add an output to the step's: the sum over its tokens."""
        if torch.is_grad_enabled() and torch._C._current_graph_task_id() < 0:  # not recomputed
            x = whole(output[0] if isinstance(output, tuple) else output).double().flatten(0, -2)
            values = torch.cat((x.square().sum()[None], summary(x.sum(0))[1:]))
            self.outputs[name] = self.outputs.get(name, 0) + values

    def tensors(self, kind):
        """Yield (name to write, summary) of whole parameters: their "data" or their "grad"."""
        parameters = dict(self.model.named_parameters())
        for name, (sources, make) in self.names.items():
            found = [getattr(parameters.get(source), kind, None) for source in sources]
            if all(x is not None for x in found):
                yield name, summary(make(*map(whole, found)))

    @torch.no_grad()
    def step(self, tokens=None, targets=None, kinds=("data", "grad"), **scalars):
        """Write a line, and return it. All ranks call it."""
        own = {kind: {name: s.tolist() for name, s in self.tensors(kind)} for kind in kinds}
        own["outputs"] = {name: values.tolist() for name, values in self.outputs.items()}
        own["scalars"] = {name: float(value) for name, value in scalars.items()}
        if tokens is not None:
            own["batch"] = {"rows": hashes_of(tokens)}
        if targets is not None:
            own["batch"]["targets"] = hashes_of(torch.cat((tokens, targets), 1))
        ranks, self.outputs, self.number = [own], {}, self.number + 1
        if dist.is_initialized():
            ranks *= dist.get_world_size()
            dist.all_gather_object(ranks, own)
        line = {"step": self.number}
        for kind, name, value in ((k, n, v) for r in ranks for k in r for n, v in r[k].items()):
            values = line.setdefault(kind, {}).setdefault(name, [])
            values += [value] if value not in values else []
        print(json.dumps(line), file=self.file, flush=True)
        return line

    def close(self):
        self.step(kinds=["data"])
