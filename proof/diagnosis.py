"""Where a run parts from one process, and why: what a failing receipt says.

The proof knows which tensors are off. When it has failed, every rank sends rank 0 what it has, and
rank 0 looks for the first thing that went wrong, in the order of computation, and for a hypothesis
(proof/hypotheses.py) that explains the worst tensors.
"""

import functools
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import _disable_current_modes

import model as gpt
from harness.placement import placement, take
from harness.presets import parameter_shapes
from proof import hypotheses
from proof.tolerance import TOLERANCE

MOST_SHARES = 8  # ranks whose own rows are tried as an explanation


# --- what a run records while it is compared: little, and nothing that the host must wait for


class Notes:
    """What a run notes of the steps that are compared, while it is `on`.

    outputs     of each step: {name: [marks]}
    squares     of each step: the sum of squares of this rank's gradients
    first_rows  sample numbers of each micro-batch of this rank's first step
    first_gradients, gradients    of the first step, and of the last
    named       the latest function that `check` got
    """

    def __init__(self):
        self.on = False
        self.outputs, self.squares, self.first_rows = [], [], []
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

    def rows(self, batches):
        """The micro-batches of a step."""
        if self.on and not self.first_rows:
            self.first_rows = [samples.tolist() for *_, samples in batches]

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


# --- the diagnosis: every rank sends what it has to rank 0


def over_ranks(run, differences):
    """{(kind, name): the largest difference on any rank}."""
    largest = {}
    for of_rank in run.gather(differences):
        for key, error in of_rank.items():
            largest[key] = max(error, largest.get(key, 0.0))
    return largest


def worst_tensors(run, differences):
    """The (kind, name) to look at: at most five, the worst first; before them, if a gradient is off
    in the first step, the one to which backward comes first. Gradients of the first step say most,
    because a wrong step makes all that follow wrong."""
    off = {"first": [], "grad": [], "param": []}
    for (kind, name), error in over_ranks(run, differences).items():
        if kind in off and error > limit_of(run, kind):
            off[kind].append((error, name))
    kind = next((kind for kind in off if off[kind]), "param")
    worst = [(kind, name) for _, name in sorted(off[kind], key=lambda pair: -pair[0])]
    first = []
    if kind == "grad" and off["param"]:  # the first step's were right: a weight may say more
        first = [("param", max(off["param"])[1])]
    if kind == "first":
        order = list(parameter_shapes(run.config))  # backward goes through it from the end
        first = [max(worst, key=lambda key: order.index(key[1]))]
    return first + [key for key in worst[: hypotheses.MOST] if key not in first]


class Cut(NamedTuple):
    """A rank holds `size` elements from `start` on, of `whole`. ranks: those that share them."""

    group: str
    ranks: list
    start: int
    size: int
    whole: int


class Evidence(NamedTuple):
    """What rank 0 gets of each rank.

    differences  {(kind, name): relative difference} of what it holds. The kinds are "first", a
                 gradient of the first step, "grad", one of the last, and "param", a weight
    pieces       {(kind, name): its piece, in float64 on the host} of the worst tensors, or None
    cuts         {name: {dimension: Cut}} of all its parameters
    groups       {name: ranks} of its process groups
    first_rows, outputs, squares    as of its Notes, added up and on the host
    """

    differences: dict
    pieces: dict
    cuts: dict
    groups: dict
    first_rows: list
    outputs: list
    squares: list


def evidence(run, notes, differences, tensors, parameters):
    """This rank's Evidence. All ranks call it.

    tensors     {kind: {name: its piece}}
    parameters  {name: parameter} that it holds
    """
    ranks_of = dist.get_process_group_ranks
    groups = {name: ranks_of(group) for name, group in run.named_groups.items()}
    names = {group.group_name: name for name, group in run.named_groups.items()}
    cuts = {}
    for name, p in parameters.items():
        cuts[name] = {}
        for dim, (group, start, size) in placement(p)["cuts"].items():
            axis, whole = names.get(group.group_name, "its group"), placement(p)["shape"][dim]
            cuts[name][dim] = Cut(axis, ranks_of(group), start, size, whole)
    pieces = dict.fromkeys(worst_tensors(run, differences))
    for kind, name in pieces:
        if name in parameters:
            piece = tensors[kind].get(name, torch.zeros_like(parameters[name]))
            pieces[kind, name] = piece.detach().double().cpu()
    outputs = [joined(of_step) for of_step in notes.outputs]
    squares = [float(sum(of_step)) for of_step in notes.squares]
    return Evidence(differences, pieces, cuts, groups, notes.first_rows, outputs, squares)


def joined(outputs):
    """{name: the marks of all tokens, on the host} of a step's Notes.outputs."""
    return {name: torch.cat(parts).cpu() for name, parts in outputs.items()}


def partial_rows(everyone):
    """{part of the batch: its rows} of the first step. A part is the first or the last micro-batch,
    or the rows of one rank, where ranks have different rows."""
    everyone = [evidence.first_rows for evidence in everyone]
    parts = {}
    if min(len(pieces) for pieces in everyone) > 1:
        for key, i in (("the first micro-batch", 0), ("the last micro-batch", -1)):
            parts[key] = sorted({row for of_rank in everyone for row in of_rank[i]})
    shares = [sorted(sum(of_rank, [])) for of_rank in everyone]
    if shares[0] != shares[-1] and all(shares):
        parts |= {rank: rows for rank, rows in enumerate(shares[:MOST_SHARES])}
    return parts


class Diagnosis:
    """What rank 0 says about a proof that failed.

    everyone  the Evidence of each rank
    alone     the Trainee of one process
    partial   {part of the batch: {name: gradient}} of one process's first step: see partial_rows
    """

    def __init__(self, run, everyone, alone, partial):
        self.run, self.everyone, self.alone, self.partial = run, everyone, alone, partial
        self.fit = min(10 * limit_of(run), 0.02)  # up to which difference an explanation fits
        self.reference = {"grad": alone.gradients, "param": alone.weights}
        self.reference["first"] = alone.first_gradients

    def close(self, actual, expected):
        scale = expected.abs().max().clamp(min=1e-30)
        return bool((actual - expected).abs().max() <= self.fit * scale)

    def findings(self):
        """A dict for each of the worst tensors: tensor, kind, rank, piece, error, step, cause."""
        return [self.finding(kind, name) for kind, name in self.everyone[0].pieces]

    def finding(self, kind, name):
        errors = {}
        for rank, evidence in enumerate(self.everyone):
            if evidence.pieces[kind, name] is not None:
                errors[rank] = evidence.differences[kind, name]
        worst, limit = max(errors, key=errors.get), limit_of(self.run, kind)
        bad = [rank for rank in errors if errors[rank] > limit]
        good = [rank for rank in errors if rank not in bad]
        causes = [self.causes(rank, kind, name) for rank in [worst, *bad]]
        words = []
        for dim, cut in self.everyone[worst].cuts[name].items():
            stop = cut.start + cut.size
            words.append(f"{cut.start}:{stop} of dimension {dim}, cut over {cut.group}")
        return {
            "tensor": name,
            "kind": "weight" if kind == "param" else "gradient",
            "rank": worst,
            "piece": "; ".join(words),
            "error": errors[worst],
            "step": {"first": 1, "grad": len(self.alone.losses), "param": None}[kind],
            "cause": common_cause(causes, good),
        }

    # --- why a tensor is off

    def expected(self, whole, rank, kind, name):
        """The piece that a rank should have of a whole tensor."""
        piece = torch.empty_like(self.everyone[rank].pieces[kind, name], device="meta")
        cuts = self.everyone[rank].cuts[name].items()
        piece.placement = {"cuts": {dim: (None, cut.start, cut.size) for dim, cut in cuts}}
        return take(whole.double().cpu(), piece)

    def causes(self, rank, kind, name):
        """The hypotheses that explain a rank's piece of a tensor, the likeliest first."""
        actual = self.everyone[rank].pieces[kind, name]
        expected = self.expected(self.reference[kind][name], rank, kind, name)
        if not actual.isfinite().all():
            return [hypotheses.NOT_FINITE]
        found = []
        if self.padding_only(rank, name, actual, expected):
            found.append(hypotheses.PADDING)
        if kind == "param":
            p = dict(self.alone.model.named())[name]
            initial = self.run.draw(name, p.shape, p.init, self.run.args.seed)
            if self.close(actual, self.expected(initial.to(p.dtype), rank, kind, name)):
                found.append(hypotheses.INITIAL)
        if not actual.any() and expected.any():
            found.append(hypotheses.ZERO)
        k = hypotheses.factor(expected, actual, self.fit)
        if hypotheses.is_other(k, self.fit):
            why = hypotheses.why_scaled(k, self.group_sizes(rank))
            found.append(f"it is {k:.6g} times one process's{why}")
        for group, ranks in self.everyone[rank].groups.items():
            pieces = [self.everyone[member].pieces[kind, name] for member in ranks]
            if all(piece is not None and piece.shape == actual.shape for piece in pieces):
                if self.close(sum(pieces), expected):
                    found.append(hypotheses.PARTIAL.format(group))
        if kind == "first":
            found += self.parts_of_batch(rank, kind, name, actual)
        return found

    def group_sizes(self, rank):
        """{what a tensor may be summed over: how many}. The world, if no group is as large."""
        sizes = {name: len(ranks) for name, ranks in self.everyone[rank].groups.items()}
        world = sizes.pop("world", 1)
        if world not in sizes.values():
            sizes["world"] = world
        return sizes | {"micro-batches": getattr(self.run.args, "microbatches", 1)}

    def padding_only(self, rank, name, actual, expected):
        """Whether only the zeros that pad a rank's piece are off."""
        if self.close(actual, expected):
            return False
        inside, right = actual, expected
        for dim, cut in self.everyone[rank].cuts[name].items():
            inside, right = inside.narrow(dim, 0, cut.size), right.narrow(dim, 0, cut.size)
        return inside.numel() == 0 or inside.shape != actual.shape and self.close(inside, right)

    def parts_of_batch(self, rank, kind, name, actual):
        """The hypothesis that a gradient is of a part of the batch alone, if it is.

        ZeRO's gradients are gathered from shards: each element may be of another rank's rows."""
        found, explained = [], torch.zeros_like(actual, dtype=torch.bool)
        for part, gradients in self.partial.items():
            expected = self.expected(gradients[name], rank, kind, name)
            near = (actual - expected).abs() <= self.fit * expected.abs().max()
            if part in range(self.run.world):
                explained |= near
            elif expected.any() and near.all():
                found.append(hypotheses.PART.format(part))
        if actual.any() and explained.all():
            found.append(hypotheses.PART.format("one rank's rows"))
        return found

    # --- the first thing that is off, in the order of computation

    def first_off(self, findings):
        """A sentence. Gradients are compared in the first step and in the last."""
        run, curve = self.run, list(zip(self.alone.losses, self.alone.norms))
        wrong_gradients = {finding["step"] for finding in findings}
        for i, (row, (loss, norm)) in enumerate(zip(run.history, curve)):
            step = row["step"]
            name = self.first_wrong_output(i)
            if name:
                return f"step {step}, forward: the output of {name}{self.pieces_left_out()}"
            if relative(row["loss"], loss) > limit_of(run, "loss"):
                times = f"{row['loss'] / loss:.6g} times one process's"
                return f"step {step}, the loss: {times}, of outputs that are right"
            if step in wrong_gradients:
                return f"step {step}, backward: the loss is right"
            if relative(row["grad_norm"], norm) > limit_of(run, "grad_norm"):
                times = f"{row['grad_norm'] / norm:.6g} times one process's"
                if step not in (1, len(curve)):
                    return f"step {step}, backward: the loss is right, and the norm {times}"
                cause = self.norm_cause(i, row["grad_norm"])
                return f"step {step}, the norm: {times}, of gradients that are right{cause}"
        return "the optimizer's step: loss, gradients and norm are right"

    def first_wrong_output(self, i):
        """The first of embedding and blocks with a token whose output no rank has, or None."""
        for name, expected in joined(self.alone.outputs[i]).items():
            everyone = [evidence.outputs[i] for evidence in self.everyone]
            held = [of_rank[name] for of_rank in everyone if name in of_rank]
            if held and not self.covers(torch.cat(held), expected):
                return name
        return None

    def covers(self, held, expected, rows=1024):
        """Whether each row of `expected` is among those of `held`, but for rounding."""
        scale = expected.abs().max().clamp(min=1e-30)
        for piece in expected.split(rows):
            distances = torch.cdist(piece, held, p=float("inf"))
            if not (distances.min(1).values <= self.fit * scale).all():
                return False
        return True

    def pieces_left_out(self):
        """Words for the first parameter of which the ranks that cut it leave out a part, or ""."""
        for evidence in self.everyone:
            for name, cuts in evidence.cuts.items():
                for dim, cut in cuts.items():
                    pieces = [self.everyone[rank].cuts[name][dim] for rank in cut.ranks]
                    end = 0
                    for start, size in [*sorted(piece[2:4] for piece in pieces), (cut.whole, 0)]:
                        if start > end:
                            where = f"{end}:{start} of dimension {dim} of {name}"
                            ranks = ", ".join(map(str, cut.ranks))
                            return f"; {where} is on none of ranks {ranks}"
                        end = max(end, start + size)
        return ""

    def norm_cause(self, i, norm):
        """Why the norm of right gradients may be wrong, in words, or ""."""
        squares = [evidence.squares[i] for evidence in self.everyone]
        if relative(squares[0] ** 0.5, norm) <= self.fit:
            return ": as if of rank 0's tensors alone, never summed over the ranks"
        for name, ranks in self.everyone[0].groups.items():
            if relative(sum(squares[rank] for rank in ranks) ** 0.5, norm) <= self.fit:
                return f": as if tensors that several ranks of {name} hold counted once for each"
        return ""


def common_cause(causes, good):
    """What explains the pieces of all wrong ranks, or "". causes: those of the worst, then of each.
    good: the ranks whose piece is right."""
    if hypotheses.NOT_FINITE in causes[0]:
        return hypotheses.NOT_FINITE
    common = [cause for cause in causes[0] if all(cause in others for others in causes)]
    if good == [0] and hypotheses.PADDING not in common:
        return hypotheses.ON_RANK_0
    if common:
        return common[0]
    return f"it is right on ranks {', '.join(map(str, good))}" if good else ""


def limit_of(run, kind="grad"):
    return TOLERANCE[run.precision]["grad" if kind == "first" else kind]


def relative(actual, expected):
    return abs(actual - expected) / max(abs(expected), 1e-30)


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
