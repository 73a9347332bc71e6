"""Where a run parts from one process, and why: what a failing receipt says.

The proof knows which tensors are off. When it has failed, every rank sends rank 0 a summary of what
it has. Rank 0 makes two recordings of them, of the run and of one process, and
proof/differences.py says where they part.
"""

import functools
import math
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import _disable_current_modes

from harness.placement import placement_of, take
from harness.presets import parameter_shapes
from proof.differences import Difference, Recording, differences, explain, limits_of
from proof.recorder import summary
from proof.tolerance import FLOOR

# --- what a run records while it is compared: little, and nothing that the host must wait for


class Notes:
    """What a run notes of the steps that are compared, while it is `on`.

    outputs     of each step: {name: [marks]}
    first_gradients, gradients    of the first step, and of the last
    named       the latest function that `check` got
    """

    def __init__(self):
        self.on, self.outputs, self.first_gradients = False, [], None
        self.named, self.gradients = lambda: [], {}  # a rank may have no gradients to compare

    def begin(self, on):
        """A step begins; it is compared if `on`."""
        self.on = on
        if on:
            self.outputs.append({})

    def output(self, name, x):
        """The output of the embedding or a block: see `watch`."""
        if self.on:
            with torch.no_grad(), _disable_current_modes():
                self.outputs[-1].setdefault(name, []).append(marks_of(x))

    def gradients_of(self, named):
        """Keep the gradients of a step, when they are complete."""
        self.named = named
        self.gradients = {name: p.grad.clone() for name, p in named() if p.grad is not None}
        if self.first_gradients is None:
            self.first_gradients = self.gradients


def watch(model, note):
    """Call note(name, output) for the embedding and each block, whenever they run."""

    def hook_for(name):
        return lambda module, inputs, output: note(name, output)

    if model.embed is not None:
        model.embed.register_forward_hook(hook_for("embed"))
    for number, block in model.blocks.items():
        block.register_forward_hook(hook_for(f"blocks.{number}"))


def marks_of(x):
    """Four fixed random projections of each token's vector: x (..., C) -> (tokens, 4), float64.

    Tokens with equal marks are equal. So outputs can be compared although each rank holds other
    tokens, or copies of the same ones."""
    return x.detach().flatten(0, -2).double() @ basis(x.shape[-1]).to(x.device)


@functools.cache
def basis(width):
    generator = torch.Generator().manual_seed(0)
    return torch.randn(width, 4, generator=generator, dtype=torch.float64) / width**0.5


# --- what a rank tells rank 0


class Evidence(NamedTuple):
    """What rank 0 gets of each rank.

    errors       {(kind, name): relative difference} of what it holds. The kinds are "first", a
                 gradient of the first step, "grad", one of the last, and "param", a weight
    summaries    {(kind, name): the summary of the whole tensor}
    outputs      as of its Notes, on the host
    """

    errors: dict
    summaries: dict
    outputs: list


def evidence(notes, errors, tensors, parameters):
    """This rank's Evidence. All ranks call it.

    tensors     {kind: {name: its piece}}
    parameters  {name: parameter} that it holds
    """
    summaries = {}
    for name, p in parameters.items():
        for kind, pieces in tensors.items():
            total = summary_of_piece(pieces.get(name, torch.zeros_like(p)), p)
            for group, _, _ in placement_of(p)["cuts"].values():  # summaries of pieces add up
                dist.all_reduce(total, group=group)
            summaries[kind, name] = total.tolist()
    return Evidence(errors, summaries, [joined(of_step) for of_step in notes.outputs])


def summary_of_piece(piece, parameter):
    """This rank's part of the summary of a whole tensor, without what pads its piece."""
    shape = placement_of(parameter)["shape"]
    numbers = torch.arange(1, math.prod(shape) + 1, device=piece.device).view(shape)
    numbers = take(numbers, parameter)
    return summary(piece[numbers > 0], numbers[numbers > 0] - 1)


def joined(outputs):
    """{name: the marks of all tokens, on the host} of a step's Notes.outputs."""
    return {name: torch.cat(parts).cpu() for name, parts in outputs.items()}


# --- what rank 0 makes of it


def diagnose(run, everyone, alone, initial):
    """(the first thing that is off, lines about it). everyone: the Evidence of each rank. alone:
    the Trainee of one process. initial: {name: weight} as its run began."""
    limits, last = limits_of(run.precision), len(alone.losses)
    at = {"first": (1, "grad"), "grad": (last, "grad"), "param": (last + 1, "data")}
    ours, theirs = recordings(run, everyone, alone, at, initial)
    found = list(wrong_outputs(everyone, alone, min(10 * limits["outputs"], 0.02)))
    for d in differences(ours, theirs, limits, FLOOR[run.precision]):
        if d.kind == "norm" and d.step not in (1, last):
            d = d._replace(name="backward or the norm")  # this step's gradients are not kept
        for kind in at:
            if at[kind] == (d.step, d.kind):
                d = on_ranks(d, {r: of.errors.get((kind, d.name)) for r, of in enumerate(everyone)})
        found.append(d)
    kinds = ["outputs", "loss", "grad", "norm"]
    found.sort(key=lambda d: (d.step, kinds.index(d.kind) if d.kind in kinds else -1))
    if not any(d.is_off for d in found):
        return "the loss or the norm, on another rank than 0", []
    first_off, *lines = explain(ours, theirs, found)
    return first_off, lines


def recordings(run, everyone, alone, at, initial):
    """Recordings of one process and of the run. at: {kind of Evidence: (step, kind in a line)}."""
    sizes = {name: dist.get_world_size(group) for name, group in run.named_groups.items()}
    if list(sizes.values()).count(sizes.get("world")) > 1:  # that has another name, too
        del sizes["world"]
    sizes["micro-batches"] = getattr(run.args, "microbatches", 1)
    facts = {"groups": sizes, "order": ["embed", *parameter_shapes(run.config)]}
    ours, theirs = {}, {}
    for i, (loss, norm) in enumerate(zip(alone.losses, alone.norms)):
        row = run.history[i]
        ours[i + 1] = {"scalars": {"loss": [loss], "norm": [norm]}}
        theirs[i + 1] = {"scalars": {"loss": [row["loss"]], "norm": [row["grad_norm"]]}}
    last = len(ours)
    ours[last + 1], theirs[last + 1] = {}, {}
    ours[1]["data"] = theirs[1]["data"] = as_line(initial)
    right = {"first": alone.first_gradients, "grad": alone.gradients, "param": alone.weights}
    for kind, (step, key) in at.items():
        ours[step][key], theirs[step][key] = as_line(right[kind]), {}
        for name in right[kind]:
            values = theirs[step][key].setdefault(name, [])
            for of_rank in everyone:
                value = of_rank.summaries.get((kind, name))
                values += [value] if value and value not in values else []
    return Recording("", facts, ours), Recording("", facts, theirs)


def as_line(tensors):
    """{name: whole tensor}, as in a line of a recording."""
    return {name: [summary(x).tolist()] for name, x in tensors.items()}


def on_ranks(d, errors):
    """A Difference with the largest error that a rank measured of its piece, and the ranks whose
    piece is off. errors: {rank: error, or None}"""
    held = {rank: error for rank, error in errors.items() if error is not None}
    off = [rank for rank, error in held.items() if not error <= d.limit]
    return d._replace(error=max(held.values()), place=in_words(off, len(errors)))


def in_words(ranks, world):
    if len(ranks) == world > 1:
        return " on all ranks"
    return f" on rank {', '.join(map(str, ranks))}" if ranks else ""


def wrong_outputs(everyone, alone, limit):
    """Yield a Difference for each output of embedding and blocks with a token that no rank has."""
    for i, outputs in enumerate(alone.outputs):
        for name, expected in joined(outputs).items():
            held = {
                r: of.outputs[i][name] for r, of in enumerate(everyone) if name in of.outputs[i]
            }
            if held and not covers(torch.cat([*held.values()]), expected, limit):
                off = [rank for rank, x in held.items() if not covers(expected, x, limit)]
                place = in_words(off, len(everyone))
                yield Difference(i + 1, "outputs", name, math.inf, 0.0, place=place)


def covers(held, expected, limit, rows=1024):
    """Whether each row of `expected` is among those of `held`, but for rounding."""
    scale = expected.abs().max().clamp(min=1e-30)
    for piece in expected.split(rows):
        distances = torch.cdist(piece, held, p=float("inf"))
        if not (distances.min(1).values <= limit * scale).all():
            return False
    return True


# --- the first gradient that is not finite


def last_nonfinite(named):
    """(the last parameter whose gradient is not finite, ""), or (None, "")."""
    bad = [name for name, p in named() if p.grad is not None and not p.grad.isfinite().all()]
    return bad[-1] if bad else None, ""


def first_nonfinite(run, blame, group):
    """(the rank that has it, and what it may say), in the order of backward: see Run.check."""
    name, place = blame()
    order = list(parameter_shapes(run.config))
    # Backward runs from the last parameter to the first: the largest number comes first
    everyone = [None] * dist.get_world_size(group)
    dist.all_gather_object(everyone, (order.index(name) if name else -1, -run.rank), group=group)
    number, speaker = max(everyone)
    if number < 0:
        return -speaker, "computed again, it was finite on all ranks"
    where = f"on rank {run.rank}{place}"
    return -speaker, f"the first gradient that is not finite is that of {name}, {where}"
