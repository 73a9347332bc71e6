"""A recording of the run, to hold another training loop against (docs/fix/debugging.md).

    python train.py --dtype float64 --steps 5 --record ours
    python -m proof compare ours theirs.jsonl

The folder gets record.jsonl, in the format of proof/recorder.py, and step-N.safetensors with each
step's batch. No layout changes a recording: the recorder's random projections are linear, so each
rank projects its piece of a parameter with the piece's own part of the random signs, and the ranks'
sum is the projection of the whole.
"""

import contextlib
import dataclasses
import os

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import _disable_current_modes

from harness import Refused, check_folder
from harness.placement import placement_of
from harness.presets import parameter_shapes
from proof import diagnosis
from proof.recorder import Recorder
from trainer import checkpoint

FILE = "record.jsonl"


def add_flags(parser):
    g = parser.add_argument_group("recording (see trainer/recording.py)")
    why = "record every step's loss, gradients, weights and outputs in short, to compare runs"
    g.add_argument("--record", metavar="FOLDER", help=why)


def check(args):
    """Refuse a folder that can't be written or has a recording."""
    if not args.record:
        return
    path = os.path.join(args.record, FILE)
    if os.path.exists(path):
        advice = "remove it, or give another folder"
        raise Refused(f"--record {args.record} has a recording: {advice}")
    check_folder("--record", args.record)


@contextlib.contextmanager
def recorded(runner, first):
    """With --record the runner writes each step down. first: the first step."""
    wanted = runner.run.args.record and first < runner.run.args.steps
    if wanted:
        with _disable_current_modes():
            recording = Recording(runner, first)
        runner.record = recording.record
    yield
    if wanted:
        recording.finish()


class Recording(Recorder):
    """A Recorder for a model that is cut: see the top of this file."""

    def __init__(self, runner, first):
        self.run, self.named = runner.run, runner.full_parameters
        run, model, args = self.run, runner.model, self.run.args
        path = os.path.join(args.record, FILE)
        super().__init__(path, model, dtype=run.precision, **facts(run))
        self.number, self.noted_step = first, None
        inside = runner.positions < run.config.context  # beyond its end there is padding
        rank = dist.get_rank(runner.groups["tp"])
        if args.sp:
            inside = inside.chunk(args.tp)[rank]
        self.mask = inside.unsqueeze(1)  # (T, 1): this rank's tokens that are no padding
        # Without sequence parallelism all tensor-parallel ranks hold the same tokens. A compiled
        # block has no hooks
        if not args.compile and (args.sp or rank == 0):
            for part in model.parts.values():
                diagnosis.watch(part, self.note)

    def note(self, name, output):
        """What a step's search for a NaN runs again is dropped when the next step begins."""
        if not torch.is_grad_enabled():  # a validation's or a sample's forward
            return
        if self.noted_step != self.run.step:
            self.noted_step, self.outputs = self.run.step, {}
        output = output.detach()
        with _disable_current_modes():  # the ledger must not count this
            super().note(name, output * self.mask)

    def tensors(self, kind):
        """Yield (name, summary) of whole parameters, of which this rank may hold a piece."""
        summaries, cut_over = {}, {}  # cut_over: {group: names}
        for name, p in self.parameters.items():
            tensor = getattr(p, kind)
            if tensor is None:  # no gradient counts as zeros
                tensor = torch.zeros_like(p.data)
            summaries[name] = diagnosis.summary_of_piece(tensor, p)
            for group, _, _ in placement_of(p)["cuts"].values():
                cut_over.setdefault(group, []).append(name)
        for group, names in cut_over.items():
            sums = torch.stack([summaries[name] for name in names])
            dist.all_reduce(sums, group=group)
            summaries |= dict(zip(names, sums))
        yield from summaries.items()

    def record(self, batches, loss, norm):
        """Write a step: its line, and a file with its batch."""
        run = self.run
        with _disable_current_modes():
            self.parameters = dict(self.named())
            tokens, targets = (torch.cat([batch[i] for batch in batches]) for i in (0, 1))
            self.step(tokens, targets, loss=loss, norm=norm, lr=run.lr)
            if run.rank == 0:
                [(tokens, targets, _)] = run.microbatches(run.step, pieces=1)
                tensors = {"tokens": tokens.contiguous(), "targets": targets.contiguous()}
                path = os.path.join(run.args.record, f"step-{self.number}.safetensors")
                checkpoint.write_tensors(path, tensors)

    def finish(self):
        self.parameters = dict(self.named())  # after the last step
        self.close()
        self.file.close()


def facts(run):
    """What a recording says of the run: sizes, names in order, what decides an optimizer's step."""
    args, config = run.args, run.config
    sizes = {name: getattr(args, name) for name in ("dp", "tp", "pp", "cp", "ep")}
    order = ["embed", *(f"blocks.{i}" for i in range(config.layers)), *parameter_shapes(config)]
    names = ("optimizer", "lr", "min_lr", "warmup", "steps", "weight_decay", "grad_clip")
    found = {"groups": sizes | {"micro-batches": args.microbatches}, "order": order}
    found["args"] = {name: getattr(args, name) for name in names}
    if config.rope_scaling is None:  # else a function, which can't be written
        found["config"] = dataclasses.asdict(config)
    return found
