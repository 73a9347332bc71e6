"""Where a run parts from one process, and why: what a failing receipt says.

The proof knows which tensors are off. When it has failed, every rank sends rank 0 a summary of what
it has. Rank 0 makes two recordings of them, of the run and of one process, and proof/explain.py
says where they part.
"""

import functools
import math
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import _disable_current_modes

import model as gpt
from harness.placement import placement, take
from harness.presets import parameter_shapes
from proof.causes import of_norm, of_rows
from proof.explain import Difference, Recording, differences, explain, limits_of
from proof.recorder import summary
from proof.replay import Replay, as_line
from proof.tolerance import FLOOR

# --- what a run records while it is compared: little, and nothing that the host must wait for


class Notes:
    """What a run notes of the steps that are compared, while it is `on`.

    outputs     of each step: {name: [marks]}
    squares     of each step: the sum of squares of this rank's gradients
    first_gradients, gradients    of the first step, and of the last
    named       the latest function that `check` got
    """

    def __init__(self):
        self.on = False
        self.outputs, self.squares = [], []
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

    def gradients_of(self, named, keep):
        """The gradients of a step, when they are complete. keep: they are compared later."""
        self.named = named
        gradients = {name: p.grad for name, p in named() if p.grad is not None}
        self.squares.append([g.double().square().sum() for g in gradients.values()])
        if keep:
            self.gradients = {name: g.clone() for name, g in gradients.items()}
        if len(self.squares) == 1:
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

    differences  {(kind, name): relative difference} of what it holds. The kinds are "first", a
                 gradient of the first step, "grad", one of the last, and "param", a weight
    summaries    {(kind, name): its piece's part of the tensor's summary}
    cuts         {name: [ranks that hold the pieces, for each cut]} of all its parameters
    groups       {name: ranks} of its process groups
    outputs, squares    as of its Notes, added up and on the host
    """

    differences: dict
    summaries: dict
    cuts: dict
    groups: dict
    outputs: list
    squares: list


def evidence(run, notes, differences, tensors, parameters):
    """This rank's Evidence.

    tensors     {kind: {name: its piece}}
    parameters  {name: parameter} that it holds
    """
    ranks_of = dist.get_process_group_ranks
    groups = {name: ranks_of(group) for name, group in run.named_groups.items()}
    summaries, cuts = {}, {}
    for name, p in parameters.items():
        cuts[name] = [ranks_of(group) for group, _, _ in placement(p)["cuts"].values()]
        for kind in tensors:
            piece = tensors[kind].get(name, torch.zeros_like(p))
            summaries[kind, name] = summary_of_piece(piece, p).tolist()
    outputs = [joined(of_step) for of_step in notes.outputs]
    squares = [float(sum(of_step)) for of_step in notes.squares]
    return Evidence(differences, summaries, cuts, groups, outputs, squares)


def summary_of_piece(piece, parameter):
    """This rank's part of the summary of a whole tensor, without what pads its piece."""
    shape = placement(parameter)["shape"]
    numbers = torch.arange(1, math.prod(shape) + 1, device=piece.device).view(shape)
    numbers = take(numbers, parameter)
    return summary(piece[numbers > 0], numbers[numbers > 0] - 1)


def joined(outputs):
    """{name: the marks of all tokens, on the host} of a step's Notes.outputs."""
    return {name: torch.cat(parts).cpu() for name, parts in outputs.items()}


# --- what rank 0 makes of it


def diagnose(run, everyone, alone):
    """(the first thing that is off, lines about it). everyone: the Evidence of each rank. alone:
    the Trainee of one process."""
    last, floor, limits = len(alone.losses), FLOOR[run.precision], limits_of(run.precision)
    initial = {}
    for name, p in alone.model.named():
        initial[name] = run.draw(name, p.shape, p.init, run.args.seed).to(p)
    ours, theirs = recordings(run, everyone, alone, initial)
    found = list(wrong_outputs(everyone, alone, limits["outputs"]))
    for d in differences(ours, theirs, limits, floor):
        if d.kind == "norm" and d.step not in (1, last):
            d = d._replace(name="backward or the norm")  # this step's gradients are not kept
        found.append(with_rank(d, everyone, last))
    kinds = ["data", "outputs", "loss", "grad", "norm"]
    found.sort(key=lambda d: (d.step, kinds.index(d.kind)))

    def replay():
        [(tokens, targets, _)] = run.microbatches(0, pieces=1)
        return Replay(run.config, run.args, initial, lambda step: (tokens, targets))

    def lines_about(found):
        kinds = (
            {"grad": [of_rows], "loss": [of_rows], "norm": [of_norm]} if found[0].step == 1 else {}
        )
        return explain(ours, theirs, found, floor, replay, kinds)

    off = [d for d in found if not d.error <= d.limit]
    if not off:
        return "the loss or the norm, on another rank than 0", []
    first_off, *lines = lines_about([d for d in found if d.step >= off[0].step])
    # Gradients of the first step say most, because a wrong step makes all that follow wrong
    for kind, step in (("grad", 1), ("data", last + 1)):
        if any((d.kind, d.step) == (kind, step) for d in off):
            place, *more = lines_about([d for d in found if (d.kind, d.step) == (kind, step)])
            return first_off, lines + ([place, *more] if place != first_off else [])
    return first_off, lines


def recordings(run, everyone, alone, initial):
    """Recordings of one process and of the run."""
    groups = everyone[0].groups
    sizes = {name: len(ranks) for name, ranks in groups.items()}
    if list(sizes.values()).count(sizes.get("world")) > 1:  # that has another name, too
        del sizes["world"]
    sizes["micro-batches"] = getattr(run.args, "microbatches", 1)
    facts = {"groups": sizes, "order": ["embed", *parameter_shapes(run.config)]}
    ours, theirs = {}, {}
    for i, (loss, norm) in enumerate(zip(alone.losses, alone.norms)):
        row = run.history[i]
        ours[i + 1] = {"scalars": {"loss": [loss], "norm": [norm]}}
        theirs[i + 1] = {"scalars": {"loss": [row["loss"]], "norm": [row["grad_norm"]]}}
    ours[1]["data"] = theirs[1]["data"] = as_line(initial)
    last = len(ours)
    ours[last + 1], theirs[last + 1] = {}, {}
    for kind, step, key, tensors in (
        ("first", 1, "grad", alone.first_gradients),
        ("grad", last, "grad", alone.gradients),
        ("param", last + 1, "data", alone.weights),
    ):
        ours[step][key] = as_line(tensors)
        theirs[step][key] = {name: values_of(everyone, kind, name) for name in tensors}
    for step in (1, last):  # whose gradients are compared
        squares = [of_rank.squares[step - 1] for of_rank in everyone]
        norms = {"it is that of rank 0's tensors alone, never summed over the ranks": squares[:1]}
        for name, ranks in groups.items():
            words = f"tensors that several ranks of {name} hold are counted once for each"
            norms[words] = [squares[rank] for rank in ranks]
        theirs[step]["norms"] = {words: sum(of_some) ** 0.5 for words, of_some in norms.items()}
    return Recording("", facts, ours), Recording("", facts, theirs)


def values_of(everyone, kind, name):
    """The different summaries that ranks have of a whole tensor."""
    rows = []
    for rank, of_rank in enumerate(everyone):
        if name in of_rank.cuts:
            row = whole(everyone, rank, kind, name, of_rank.cuts[name])
            rows += [row] if row not in rows else []
    return rows


def whole(everyone, rank, kind, name, cuts):
    """The summary of what a rank and those with whom it shares a tensor hold: summaries of pieces
    add up."""
    if not cuts:
        return everyone[rank].summaries[kind, name]
    pieces = [whole(everyone, other, kind, name, cuts[1:]) for other in cuts[0]]
    return [math.fsum(values) for values in zip(*pieces)]


def with_rank(d, everyone, last):
    """A Difference of tensors with the largest error that a rank measured of its piece."""
    kinds = {("grad", last): "grad", ("grad", 1): "first", ("data", last + 1): "param"}
    key = kinds.get((d.kind, d.step)), d.name
    errors = [(of.differences[key], r) for r, of in enumerate(everyone) if key in of.differences]
    if not errors:
        return d
    error, rank = max(errors)
    return d._replace(error=error, place=f", rank {rank}")


def wrong_outputs(everyone, alone, limit):
    """Yield a Difference for each output of embedding and blocks with a token that no rank has."""
    for i, outputs in enumerate(alone.outputs):
        for name, expected in joined(outputs).items():
            held = [of.outputs[i][name] for of in everyone if name in of.outputs[i]]
            if held and not covers(torch.cat(held), expected, min(10 * limit, 0.02)):
                yield Difference(i + 1, "outputs", name, math.inf, 0.0)


def covers(held, expected, limit, rows=1024):
    """Whether each row of `expected` is among those of `held`, but for rounding."""
    scale = expected.abs().max().clamp(min=1e-30)
    for piece in expected.split(rows):
        distances = torch.cdist(piece, held, p=float("inf"))
        if not (distances.min(1).values <= limit * scale).all():
            return False
    return True


# --- the first gradient that is not finite


def first_nonfinite(run, named, blame, group):
    """(the rank that has it, and what it may say), in the order of backward: see Run.check."""
    if blame:
        name, place = blame()
    else:
        bad = [n for n, p in named() if p.grad is not None and not p.grad.isfinite().all()]
        name, place = bad[-1] if bad else None, ""
    with torch.device("meta"):
        whole = gpt.GPT(run.config)
    order = [full for full, _ in whole.named_parameters(remove_duplicate=False)]
    # Backward runs from the last parameter to the first: the largest number comes first
    everyone = [None] * dist.get_world_size(group)
    dist.all_gather_object(everyone, (order.index(name) if name else -1, -run.rank), group=group)
    number, speaker = max(everyone)
    if number < 0:
        return -speaker, "computed again, it was finite on all ranks"
    where = f"on rank {run.rank}{place}"
    return -speaker, f"the first gradient that is not finite is that of {name}, {where}"
