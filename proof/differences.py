"""Where two runs part, and why: what `proof.compare` says of two recordings, and a failing receipt
of itself and one process.

`differences` goes through the steps in the order of computation. `explain` takes the first thing
that is off by more than rounding, and tries a short table of relations between the numbers of both:
one is a multiple of the other, the ranks' values add up to the right one, and so on. No cause is
guessed: a relation says what the numbers would be, and is named if they are. If none is, the answer
is the tensor, its ranks and how far it is off.

Tensors are compared by their summaries (proof/recorder.py): the norm, and eight random projections.
The root mean square of the projections' differences estimates the norm of the tensors' difference.
"""

import math
from typing import NamedTuple

import torch

from proof.tolerance import TOLERANCE

MOST = 5  # tensors that are named
PIECES = ("micro", "accum")  # names of groups that are no ranks begin so
# {kind in a line: the tolerance that holds for it}
LIMITS = {"outputs": "grad", "loss": "loss", "grad": "grad", "norm": "grad_norm", "data": "param"}
WORDS = {"outputs": "output", "loss": "loss", "grad": "gradient", "norm": "norm", "data": "weight"}


class Recording(NamedTuple):
    """facts: the first line, as a dict. lines: {step: line}; the last has weights alone."""

    path: str
    facts: dict
    lines: dict


class Difference(NamedTuple):
    """One thing of one step. error: the relative difference. ours, theirs: the values; of a tensor
    a row (9,) for each different one that a rank has. place: on which ranks, in words. cause: why,
    where that is known."""

    step: int
    kind: str
    name: str
    error: float
    limit: float
    ours: object = None
    theirs: object = None
    place: str = ""
    cause: str = ""

    @property
    def is_off(self):
        return not self.error <= self.limit

    @property
    def fit(self):
        """The relative difference up to which a relation fits."""
        return min(max(10 * self.limit, 1e-6), 0.02)


# --- what differs


def limits_of(precision):
    """{kind in a line: what counts as rounding}."""
    return {kind: TOLERANCE[precision][LIMITS[kind]] for kind in LIMITS}


def differences(a, b, limits, floor):
    """Yield the Differences in the order of computation. limits: {kind: what counts as rounding}.
    floor: smaller tensors are compared with this part of the largest norm."""
    first = a.lines[min(a.lines)]
    order = a.facts.get("order") or [*first.get("outputs", ()), *first["data"]]
    for step in sorted(set(a.lines) & set(b.lines)):
        x, y = a.lines[step], b.lines[step]
        yield from tensors(step, "data", x, y, order, limits, floor)
        for kind, name in (("rows", "the batch"), ("targets", "the targets")):
            ours, theirs = (set().union(*of.get("batch", {}).get(kind, ())) for of in (x, y))
            if ours and theirs:
                missing, new = len(ours - theirs), len(theirs - ours)
                cause = f"it lacks {missing} of the {len(ours)} {kind}, and has {new} others"
                yield Difference(step, kind, name, missing + new, 0.0, cause=cause)
        yield from tensors(step, "outputs", x, y, order, limits, floor)
        yield from scalars(step, "loss", x, y, limits)
        yield from tensors(step, "grad", x, y, order[::-1], limits, floor)
        yield from scalars(step, "norm", x, y, limits)


def scalars(step, kind, x, y, limits):
    """The loss or the norm: the mean over the ranks, which have equal parts of the batch."""
    values = [line.get("scalars", {}).get(kind) for line in (x, y)]
    if all(values):
        ours, theirs = (math.fsum(each) / len(each) for each in values)
        error = abs(theirs - ours) / max(abs(ours), 1e-30)
        yield Difference(step, kind, f"the {kind}", error, limits[kind], ours, theirs)


def tensors(step, kind, x, y, order, limits, floor):
    """The weights, gradients or outputs of a step that either has."""
    ours, theirs = ({n: table(rows) for n, rows in line.get(kind, {}).items()} for line in (x, y))
    if not ours or not theirs:
        return
    if kind == "outputs":  # each rank has its own tokens
        common = ours.keys() & theirs.keys()
        ours, theirs = (
            {name: rows.sum(0, keepdim=True) for name, rows in values.items() if name in common}
            for values in (ours, theirs)
        )
    largest = max(norm(row).item() for rows in ours.values() for row in rows)
    place = {name: i for i, name in enumerate(order)}
    for name in sorted({**ours, **theirs}, key=lambda name: place.get(name, len(place))):
        zero = torch.zeros(1, 9, dtype=torch.float64)
        left, right = ours.get(name, zero), theirs.get(name, zero)
        scale = max(norm(left[0]).item(), floor * largest, 1e-30)
        others = torch.cat((right, left[:1]))
        error = distance(left.unsqueeze(1), others).max().item() / scale
        yield Difference(step, kind, name, error, limits[kind], left, right)


def table(rows):
    return torch.tensor(rows, dtype=torch.float64).view(-1, 9)


def norm(value):
    return value[..., 0].sqrt()


def distance(u, v):
    """An estimate of the norm of the difference of two tensors, from their summaries (..., 9)."""
    projected = (u[..., 1:] - v[..., 1:]).square().mean(-1).sqrt()
    return torch.maximum((norm(u) - norm(v)).abs(), projected).nan_to_num(math.inf, math.inf)


# --- what to say of it


def explain(a, b, found):
    """Lines about the first of the Differences `found` that is off, and about others of the same
    kind and step."""
    first = next(d for d in found if d.is_off)
    of_kind = [d for d in found if (d.step, d.kind) == (first.step, first.kind)]
    off = [d for d in of_kind if d.is_off]
    total, words = len({d.name for d in of_kind}), f"{WORDS.get(first.kind)}s"
    lines, alike = [where(a, first)], {}
    for d in off:
        alike.setdefault(d.cause or relation(a, b, d), []).append(d)
    for text, group in alike.items():
        if text and len(group) > 1:
            names = ", ".join(d.name for d in group[:MOST])
            some = f"{len(group)} of {total} {words}, such as {names}"
            who = f"all {total} {words}" if len(group) == total else some
            lines.append(f"{who}: {text}")
            continue
        if len(group) > MOST:
            lines.append(f"{len(group)} of {total} {words} are off, such as")
        for d in sorted(group, key=lambda d: (d is not first, -d.error))[:MOST]:
            off_by = f"off by {d.error:.1e}{d.place}; " if d.limit else ""
            if d.ours is not None and not text:
                ratio_of_norms = norm(d.theirs)[0] / norm(d.ours)[0]
                off_by += f"its norm is {ratio_of_norms:.3g} times the right one"
            if off_by or text:
                lines.append(f"{d.name}: {off_by}{text}")
    return lines


def where(a, d):
    """The place of a difference, in words."""
    if d.kind == "data" and d.step == min(a.lines):
        return f"before step {d.step}: the weight of {d.name}, as the run begins"
    if d.kind == "data":
        return f"step {d.step - 1}, the optimizer: the weight of {d.name} after it"
    if d.kind == "outputs":
        return f"step {d.step}, forward: the output of {d.name}{d.place}"
    if d.kind == "grad":
        return f"step {d.step}, backward: the gradient of {d.name}"
    return f"step {d.step}, {d.name}"


def relation(a, b, d):
    """The relation that fits two values, as a clause, or ""."""
    if d.ours is None:
        return ""
    relations = of_number if d.kind in ("loss", "norm") else of_tensor
    for words, *values in relations(a, b, d):
        observed, predicted = (torch.as_tensor(x, dtype=torch.float64) for x in values)
        if (observed - predicted).norm() <= d.fit * predicted.norm():
            return words
    return ""


def of_number(a, b, d):
    """Yield (words, what is observed, what it would be) for a loss or a norm."""
    if d.kind == "norm":
        norms = b.lines[d.step]["scalars"]["norm"]
        if len(norms) > 1:
            words = "each rank has the norm of its own part: the squares were never summed"
            yield words, math.hypot(*norms), d.ours
    yield multiple(d.theirs / d.ours if d.ours else math.nan, sizes_of(a, b)), 0.0, 0.0


def of_tensor(a, b, d):
    """Yield (words, what is observed, what it would be) for a tensor: rows of projections. (Of
    summaries of partial sums the projections add up, the squares do not.)"""
    ours, of_ranks = d.ours[0, 1:], d.theirs[:, 1:]
    theirs, n, sizes = of_ranks[0], len(of_ranks), sizes_of(a, b)
    if not of_ranks.isfinite().all():
        yield "it is not finite", ours, ours
    if (distance(d.theirs, d.theirs[0]) > d.fit * norm(d.theirs[0])).any():
        text, total = f"the ranks have {n} different values", of_ranks.sum(0)
        fitting = [x for x, size in sizes.items() if size == n and not x.startswith(PIECES)]
        over = " or ".join(fitting) or "the ranks"
        for row in of_ranks:
            words = "the others never got it, or changed it afterwards"
            yield f"{text}, and one is right: {words}", row, ours
        yield f"{text}, which add up to the right one: never summed over {over}", total, ours
        yield f"{text}, whose mean is right: never averaged over {over}", total / n, ours
        yield text, ours, ours
    if distance(d.theirs[0], d.ours[0]) < 1e-5 * d.error * norm(d.ours[0]):
        yield "only its padding is off: what pads a shard must stay zero", theirs, ours
    # The gradient of the step before; the weight as it was before, or the latest that is known
    before = [line[d.kind] for step, line in a.lines.items() if step < d.step and d.kind in line]
    before = table(before[-1][d.name])[0, 1:] if before and d.name in before[-1] else None
    if d.kind == "data" and before is not None:
        yield "it did not move: the optimizer does not have it", theirs, before
        k = ratio(theirs - before, ours - before)
        words = f"its step is {k:.6g} times the right one"
        yield words, theirs - before, k * (ours - before)
        return
    yield "it is zero: it was never computed, or never received", theirs, 0 * ours
    if d.kind == "grad" and before is not None:
        k = ratio(theirs - ours, before)
        words = f"no zero_grad: {k:.4g} times the gradient of the step before is still in it"
        yield words, theirs - ours, k * before
    k = ratio(theirs, ours)
    if k and abs(k - 1) > d.fit:
        yield multiple(k, sizes), theirs, k * ours


def ratio(u, v):
    """k for which k v comes nearest to u, or 0."""
    return (u @ v / (v @ v)).nan_to_num(0.0, 0.0, 0.0).item()


def multiple(k, sizes):
    """That something is k times what it should be, and why it may be. sizes: {what it may be summed
    or averaged over: how many these are}."""
    ways = {
        "summed once too often, or not averaged,": k,
        "averaged once too often, or not summed,": 1 / k if k else 0.0,
    }
    for words, number in ways.items():
        fitting = [name for name, n in sizes.items() if abs(number - n) < 1e-3 * n]
        if fitting:
            over = f"{' or '.join(fitting)} ({round(number)})"
            return f"it is {k:.6g} times the right one: as if {words} over {over}"
    return f"it is {k:.6g} times the right one"


def sizes_of(a, b):
    """{what a tensor may be summed over: how many}: b's groups, and those of a that b has not."""
    sizes = a.facts.get("groups", {}) | b.facts.get("groups", {})
    return {name: n for name, n in sizes.items() if n > 1}
