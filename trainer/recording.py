"""A recording of the run, to hold another training loop against (docs/debugging.md).

    python train.py --dtype float64 --steps 5 --record ours
    python -m proof.compare ours theirs.jsonl

The folder gets record.jsonl, in the format of proof/recorder.py: the loss, the gradient's norm,
and of each step and whole parameter the norm and eight random projections of weight and gradient.
Beside it lies step-N.safetensors: the step's batch, and the tensors that --record-tensors names.

No layout changes a recording. The projections are linear: each rank projects its piece of a
parameter with the piece's own part of the random signs, and the sum over the ranks that share the
parameter is the projection of the whole.
"""

import contextlib
import fnmatch
import json
import os
import shutil

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch.utils._python_dispatch import _disable_current_modes

from harness import Refused
from harness.placement import placement
from harness.presets import parameter_shapes
from proof.recorder import Recorder, summary

FILE = "record.jsonl"


def add_flags(parser):
    g = parser.add_argument_group("recording (see trainer/recording.py)")
    why = "record every step's loss, gradients, weights and outputs in short, to compare runs"
    g.add_argument("--record", metavar="FOLDER", help=why)
    why = "with --record: keep these parameters' weights and gradients whole, such as 'blocks.0.*'"
    g.add_argument("--record-tensors", nargs="+", metavar="NAME", help=why)


def check(args, config):
    """Refuse a folder that can't be written or has a recording, and names of no parameter."""
    for pattern in args.record_tensors or ():
        if not fnmatch.filter(parameter_shapes(config), pattern):
            example = next(iter(parameter_shapes(config)))
            raise Refused(f"--record-tensors {pattern} is no parameter: they are like {example}")
    if not args.record:
        return
    path = os.path.join(args.record, FILE)
    if os.path.exists(path) and not args.resume:
        raise Refused(f"--record {args.record} has a recording: give another folder")
    try:
        os.makedirs(args.record, exist_ok=True)
        open(path, "a").close()
    except OSError as e:
        sentence = f"--record {args.record} can't be written ({e.strerror}): give another folder"
        raise Refused(sentence) from e
    if not os.path.getsize(path):  # a later refusal leaves nothing behind
        os.remove(path)


@contextlib.contextmanager
def recorded(run, model, groups, positions, named, first):
    """Gives a function record(batches, loss, norm, scale), to call when the gradients are complete,
    before they are clipped. Without --record it does nothing.

    positions  the places of a sequence that this rank holds; beyond its end there is padding
    named      named() returns (full name, parameter) pairs, whole over the data-parallel ranks
    first      the first step
    """
    if not run.args.record or first == run.args.steps:
        yield lambda *step: None
        return
    with _disable_current_modes():
        recording = Recording(run, model, groups, positions, named, first)
    yield recording.record
    recording.finish()


class Recording(Recorder):
    """A Recorder for a model that is cut: see the top of this file."""

    def __init__(self, run, model, groups, positions, named, first):
        self.run, self.named, args = run, named, run.args
        path = os.path.join(args.record, FILE)
        earlier = lines_before(path, first) if run.rank == 0 and first else []
        plain = (int, float, str, type(None))
        flags = {k: v if isinstance(v, plain) else str(v) for k, v in sorted(vars(args).items())}
        sizes = {name: getattr(args, name) for name in ("dp", "tp", "pp", "cp", "ep")}
        sizes["micro-batches"] = args.microbatches
        if args.zero_ranks:
            sizes["inside"] = args.zero_ranks
            sizes["across"] = args.dp * args.cp // args.zero_ranks
        order = ["embed", *(f"blocks.{i}" for i in range(run.config.layers))]
        order += parameter_shapes(run.config)
        super().__init__(path, model, dtype=run.precision, groups=sizes, order=order, flags=flags)
        self.file.writelines(earlier)
        self.number, self.noted_step = first, None
        tp, rank = dist.get_world_size(groups["tp"]), dist.get_rank(groups["tp"])
        self.mask = None  # of this rank's tokens those that are no padding
        inside = positions < run.config.context
        if args.sp:
            held = -(-len(inside) // tp)
            inside = torch.nn.functional.pad(inside, (0, held * tp - len(inside)))
            inside = inside[rank * held : (rank + 1) * held]
        if not inside.all():
            self.mask = inside.unsqueeze(1)  # (T, 1)
        # Without sequence parallelism all tensor-parallel ranks hold the same tokens
        if not args.compile and (args.sp or rank == 0):
            self.watch(model)

    def watch(self, model):
        """Note the outputs of the embedding and of each block. A compiled block has no hooks."""

        def hook_for(name):
            return lambda module, inputs, output: self.note(name, output)

        for part in model.parts.values():
            if part.embed is not None:
                part.embed.register_forward_hook(hook_for("embed"))
            for number, block in part.blocks.items():
                block.register_forward_hook(hook_for(f"blocks.{number}"))

    def note(self, name, output):
        """What a step's search for a NaN runs again is dropped when the next step begins."""
        if self.noted_step != self.run.step:
            self.noted_step, self.outputs = self.run.step, {}
        output = output.detach()
        with _disable_current_modes():  # the ledger must not count this
            super().note(name, output if self.mask is None else output * self.mask)

    def tensors(self, kind):
        """Yield (name, summary) of whole parameters, of which this rank may hold a piece."""
        summaries, cut_over = {}, {}  # cut_over: {group: names}
        for name, p in self.parameters.items():
            summaries[name] = summary(inside(tensor_of(p, kind), p), numbers_of(p))
            for group, _, _ in placement(p)["cuts"].values():
                cut_over.setdefault(group, []).append(name)
        for group, names in cut_over.items():
            sums = torch.stack([summaries[name] for name in names])
            dist.all_reduce(sums, group=group)
            summaries |= dict(zip(names, sums))
        yield from summaries.items()

    def record(self, batches, loss, norm, scale):
        """Write a step: its line, and its file. scale: a LossScale."""
        with _disable_current_modes():
            self.parameters = dict(self.named())
            tokens = torch.cat([tokens for tokens, _, _ in batches])
            self.step(tokens, loss=loss, norm=norm, lr=self.run.lr, **scale.row())
            self.write_tensors()

    def write_tensors(self):
        """Write the step's batch, and the tensors that --record-tensors names."""
        run, tensors = self.run, {}
        if run.rank == 0:
            [(tokens, targets, _)] = run.microbatches(run.step, pieces=1)
            tensors |= {"tokens": tokens, "targets": targets}
        patterns = run.args.record_tensors or ()
        if patterns:
            held = [None] * run.world
            dist.all_gather_object(held, list(self.parameters))
        for name, shape in parameter_shapes(run.config).items():
            if not any(fnmatch.fnmatch(name, pattern) for pattern in patterns):
                continue
            owner = next(rank for rank, names in enumerate(held) if name in names)
            for kind in ("data", "grad"):
                whole = torch.zeros(shape, dtype=run.dtype, device=run.device)
                if name in self.parameters:
                    gather(whole, self.parameters[name], kind)
                if owner > 0:
                    dist.broadcast(whole, owner)
                tensors[f"{kind}.{name}"] = whole
        if run.rank == 0:
            path = os.path.join(run.args.record, f"step-{self.number}.safetensors")
            save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path)
            # save_file lets nobody else read it
            shutil.copymode(os.path.join(run.args.record, FILE), path)

    def finish(self):
        """Write the weights after the last step."""
        self.parameters = dict(self.named())
        self.close()
        self.file.close()


def lines_before(path, steps):
    """The lines of the first `steps` steps of a recording that goes on. A line that a crash cut
    short is passed over."""
    lines = []
    if not os.path.exists(path):
        return lines
    with open(path) as file:
        for line in file:
            with contextlib.suppress(ValueError):
                if json.loads(line).get("step", steps + 1) <= steps:
                    lines.append(line)
    return lines


def tensor_of(p, kind):
    """A parameter's weights or gradient. One without a gradient counts as one with zeros."""
    if kind == "grad" and p.grad is None:
        return torch.zeros_like(p.data)
    return p.data if kind == "data" else p.grad


def inside(tensor, p):
    """This rank's piece of a parameter without the zeros that pad it."""
    for dim, (_, _, size) in placement(p)["cuts"].items():
        tensor = tensor.narrow(dim, 0, size)
    return tensor


def numbers_of(p):
    """The number in the flattened whole of each element of this rank's piece."""
    place = placement(p)
    numbers = torch.zeros((), dtype=torch.int64, device=p.device)
    for dim, length in enumerate(place["shape"]):
        _, start, size = place["cuts"].get(dim, (None, 0, length))
        along = torch.arange(start, start + size, device=p.device)
        numbers = numbers.unsqueeze(-1) * length + along
    return numbers


def gather(whole, p, kind):
    """Fill a tensor of zeros with a whole parameter, of which ranks have pieces."""
    cuts, piece = placement(p)["cuts"], whole
    for dim, (_, start, size) in cuts.items():
        piece = piece.narrow(dim, start, size)
    piece.copy_(inside(tensor_of(p, kind), p))
    for group, _, _ in cuts.values():
        dist.all_reduce(whole, group=group)
