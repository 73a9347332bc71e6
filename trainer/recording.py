"""A recording of the run, to hold another training loop against (docs/debugging.md).

    python train.py --dtype float64 --steps 5 --record ours
    python -m proof.compare ours theirs.jsonl

The folder gets record.jsonl, in the format of proof/recorder.py, and step-N.safetensors with each
step's batch. No layout changes a recording: the recorder's random projections are linear, so each
rank projects its piece of a parameter with the piece's own part of the random signs, and the ranks'
sum is the projection of the whole.
"""

import contextlib
import dataclasses
import json
import math
import os

import safetensors.torch
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import _disable_current_modes

from harness import Refused, flags, outputs
from harness.placement import placement
from harness.presets import parameter_count, parameter_shapes
from proof import diagnosis
from proof.recorder import Recorder, summary
from trainer.tracking import read_log

FILE = "record.jsonl"
MOST_KEPT = 20_000_000  # parameters whose first values are written whole


def add_flags(parser):
    g = parser.add_argument_group("recording (see trainer/recording.py)")
    why = "record every step's loss, gradients, weights and outputs in short, to compare runs"
    g.add_argument("--record", metavar="FOLDER", help=why)
    instead = "--record has every parameter in short, and the weights before the first step"
    flags.gone(g, "--record-tensors", instead)


def check(args):
    """Refuse a folder that can't be written or has a recording."""
    if not args.record:
        return
    path = os.path.join(args.record, FILE)
    if os.path.exists(path) and not args.resume:
        raise Refused(
            f"--record {args.record} has a recording, maybe of a run that was cut off: remove it, "
            "or give another folder"
        )
    outputs.check_folder("--record", args.record)


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
        # Of a recording that goes on
        earlier = list(read_log(path, first)) if run.rank == 0 and first else []
        sizes = {name: getattr(args, name) for name in ("dp", "tp", "pp", "cp", "ep")}
        sizes["micro-batches"] = args.microbatches
        order = ["embed", *(f"blocks.{i}" for i in range(run.config.layers))]
        order += parameter_shapes(run.config)
        facts = {"groups": sizes, "order": order, "args": settings(args)}
        if run.config.rope_scaling is None:  # else a function, which can't be written
            facts["config"] = dataclasses.asdict(run.config)
        super().__init__(path, model, dtype=run.precision, **facts)
        for line in earlier:
            print(json.dumps(line), file=self.file)
        self.number, self.noted_step = first, None
        tp, rank = dist.get_world_size(groups["tp"]), dist.get_rank(groups["tp"])
        self.mask = None  # of this rank's tokens those that are no padding
        inside = positions < run.config.context
        if args.sp:
            inside = inside.chunk(tp)[rank]
        if not inside.all():
            self.mask = inside.unsqueeze(1)  # (T, 1)
        # Without sequence parallelism all tensor-parallel ranks hold the same tokens. A compiled
        # block has no hooks
        if not args.compile and (args.sp or rank == 0):
            for part in model.parts.values():
                diagnosis.watch(part, self.note)

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
            tensor = getattr(p, kind)
            if tensor is None:  # no gradient counts as zeros
                tensor = torch.zeros_like(p.data)
            summaries[name] = summary(inside(tensor, p), numbers_of(p))
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
            tokens, targets = (torch.cat([batch[i] for batch in batches]) for i in (0, 1))
            self.step(tokens, targets, loss=loss, norm=norm, lr=self.run.lr, **scale.row())
            self.write_batch()

    def write_batch(self):
        """Write the step's batch. With the first one all weights, if these are few: from them
        proof/replay.py trains the steps again."""
        run, pieces = self.run, []
        if self.number == 1 and parameter_count(run.config) <= MOST_KEPT:
            for name, p in self.parameters.items():
                shape = tuple(placement(p)["shape"])
                pieces.append((f"data.{name}", shape, place_of(p), inside(p.data, p).cpu()))
        everyone = run.gather(pieces)
        if run.rank > 0:
            return
        [(tokens, targets, _)] = run.microbatches(run.step, pieces=1)
        tensors = {"tokens": tokens.contiguous(), "targets": targets.contiguous()}
        for name, shape, place, piece in sum(everyone, []):
            tensors.setdefault(name, torch.zeros(shape, dtype=piece.dtype))[place] = piece
        path = os.path.join(run.args.record, f"step-{self.number}.safetensors")
        with open(path, "wb") as file:
            file.write(safetensors.torch.save(tensors))

    def finish(self):
        """Write the weights after the last step."""
        self.parameters = dict(self.named())
        self.close()
        self.file.close()


def settings(args):
    """The settings that decide a step of the optimizer."""
    names = ("optimizer", "lr", "min_lr", "warmup", "steps", "weight_decay", "grad_clip")
    return {name: getattr(args, name) for name in names}


def inside(tensor, p):
    """This rank's piece of a parameter without the zeros that pad it."""
    for dim, (_, _, size) in placement(p)["cuts"].items():
        tensor = tensor.narrow(dim, 0, size)
    return tensor


def place_of(p):
    """Where this rank's piece of a parameter lies in the whole, as an index."""
    where = [slice(0, length) for length in placement(p)["shape"]]
    for dim, (_, start, size) in placement(p)["cuts"].items():
        where[dim] = slice(start, start + size)
    return tuple(where)


def numbers_of(p):
    """The number in the flattened whole of each element of this rank's piece."""
    shape = placement(p)["shape"]
    return torch.arange(math.prod(shape), device=p.device).view(shape)[place_of(p)]
