"""Where a run parts from the one that is right, and why: what `proof.compare` says of two
recordings, and a failing receipt of itself and one process.

Two tensors are compared by their summaries (proof/recorder.py): the norm, and eight random
projections. The root mean square of the projections' differences estimates the norm of the tensors'
difference.

No cause is guessed: each says what the numbers would be, and is named if they are. First come
causes that a tensor's own numbers tell (`causes_of`), then those for which a step is trained again
(proof/causes.py).
"""

import itertools
import math
from typing import NamedTuple

import torch

from proof import causes
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

    def weights_before(self, step):
        """{name: summaries} of the latest weights before those of a step, or {}."""
        earlier = [line["data"] for at, line in self.lines.items() if at < step and "data" in line]
        return earlier[-1] if earlier else {}


class Difference(NamedTuple):
    """One thing of one step. error: the relative difference. ours, theirs: the values; of a tensor
    a row (9,) for each different one that a rank has. place: where it is worst, in words."""

    step: int
    kind: str
    name: str
    error: float
    limit: float
    ours: object = None
    theirs: object = None
    place: str = ""

    @property
    def fit(self):
        """The relative difference up to which an explanation fits."""
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
            rows = [set(itertools.chain(*line.get("batch", {}).get(kind, ()))) for line in (x, y)]
            if all(rows):
                error = len(rows[0] ^ rows[1]) / len(rows[0])
                yield Difference(step, kind, name, error, 0.0, *rows)
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


def explain(a, b, found, floor, make_replay, kinds=causes.OF_KIND):
    """Lines about the first of the Differences `found` that is no rounding, and about others of the
    same kind and step. make_replay() gives a Replay of a's steps, or None; kinds: {kind: causes}
    that are tried with it."""
    off = [d for d in found if not d.error <= d.limit]
    first = off[0]
    same = [d for d in off if (d.step, d.kind) == (first.step, first.kind)]
    total = len([d for d in found if (d.step, d.kind) == (first.step, first.kind)])
    lines, alike, words = [where(a, first)], {}, WORDS.get(first.kind)
    for d in same:
        alike.setdefault(cause(a, b, d), []).append(d)
    settled = first.limit > 0 and all(text and not text.endswith("the right one") for text in alike)
    named, replay = "", None if settled else make_replay()
    if replay:
        lines_of = a.lines[first.step], b.lines[first.step]
        names = [d.name for d in same]
        case = causes.Case(replay, first, *lines_of, names, sizes_of(a, b), floor)
        named = causes.find(case, kinds)
    if not settled:
        named = named or dropout(first)
    if named:
        count = [f"{len(same)} of {total} {words}s are off"] if total > 1 else []
        return [*lines, *count, f"cause: {named}"]
    for text, group in alike.items():
        if text and len(group) > 1:
            names = ", ".join(d.name for d in group[:MOST])
            some = f"{len(group)} of {total} {words}s, such as {names}"
            who = f"all {total} {words}s" if len(group) == total else some
            lines.append(f"{who}: {text}")
            continue
        for d in sorted(group, key=lambda d: (d is not first, -d.error))[:MOST]:
            error = f": off by {d.error:.1e}" if d.limit else ""
            if error or text:
                lines.append(f"{d.name}{d.place}{error}{'; ' if text else ''}{text}")
    return lines


def where(a, d):
    """The place of a difference, in words."""
    if d.kind == "data" and d.step == min(a.lines):
        return f"before step {d.step}: the weight of {d.name}, as the run begins"
    if d.kind == "data":
        return f"step {d.step - 1}, the optimizer: the weight of {d.name} after it"
    if d.kind == "outputs":
        return f"step {d.step}, forward: the output of {d.name}"
    if d.kind == "grad":
        return f"step {d.step}, backward: the gradient of {d.name}"
    return f"step {d.step}, {d.name}"


def cause(a, b, d):
    """Why two things may differ, as a clause, or ""."""
    if d.kind in ("rows", "targets"):
        missing, new = len(d.ours - d.theirs), len(d.theirs - d.ours)
        return f"it lacks {missing} of the {len(d.ours)} {d.kind}, and has {new} others"
    if d.ours is None:
        return ""
    tell = causes_of_number if d.kind in ("loss", "norm") else causes_of
    for words, *values in tell(a, b, d):
        observed, predicted = (torch.as_tensor(x, dtype=torch.float64) for x in values)
        if (observed - predicted).norm() <= d.fit * predicted.norm():
            return words
    return ""


def causes_of_number(a, b, d):
    """Yield (words, what is observed, what it would be) for a loss or a norm."""
    if d.kind == "norm":
        norms = b.lines[d.step]["scalars"]["norm"]
        if len(norms) > 1:
            words = "each rank has the norm of its own part: the squares were never summed"
            yield words, math.hypot(*norms), d.ours
        for words, value in b.lines[d.step].get("norms", {}).items():
            yield words, d.theirs, value
    yield times_ours(d.theirs / d.ours if d.ours else math.nan, sizes_of(a, b)), 0.0, 0.0


def causes_of(a, b, d):
    """Yield (words, what is observed, what it would be) for a tensor: rows of projections. (Of
    summaries of partial sums the projections add up, the squares do not.)"""
    ours, of_ranks = d.ours[0, 1:], d.theirs[:, 1:]
    theirs, n = of_ranks[0], len(of_ranks)
    if not of_ranks.isfinite().all():
        yield "it is not finite", ours, ours
    if (distance(d.theirs, d.theirs[0]) > d.fit * norm(d.theirs[0])).any():
        text, total = f"the ranks have {n} different values", of_ranks.sum(0)
        fitting = [name for name, size in sizes_of(a, b).items() if size == n]
        over = " or ".join(x for x in fitting if not x.startswith(PIECES)) or "the ranks"
        for row in of_ranks:
            yield f"{text}, and one is right: it was never sent to the other ranks", row, ours
        yield f"{text}, which add up to the right one: never summed over {over}", total, ours
        yield f"{text}, whose mean is right: never averaged over {over}", total / n, ours
        yield text, ours, ours
    if distance(d.theirs[0], d.ours[0]) < 1e-5 * d.error * norm(d.ours[0]):
        yield "only its padding is off: what pads a shard must stay zero", theirs, ours
    if d.kind == "data" and d.step > min(a.lines):
        before = b.weights_before(d.step).get(d.name)
        if before:
            words = "it did not move: the optimizer does not have it"
            yield words, theirs, table(before)[0, 1:]
        return
    yield "it is zero: it was never computed, or never received", theirs, 0 * ours
    if d.kind == "data" and unrelated(d.ours[0], d.theirs[0]):
        times = (norm(d.theirs[0]) / norm(d.ours[0])).item()
        yield f"it is another draw, {times:.2g} times as large", ours, ours
    k = (theirs @ ours / (ours @ ours)).nan_to_num().item()
    if k and abs(k - 1) > d.fit:
        yield times_ours(k, sizes_of(a, b)), theirs, k * ours


def times_ours(k, sizes):
    """That something is k times what it should be, and why it may be. sizes: {what it may be summed
    or averaged over: how many these are}."""
    ways = {
        "summed once too often, or not averaged,": k,
        "averaged once too often, or not summed,": 1 / k if k else 0.0,
    }
    for (words, number), count in itertools.product(ways.items(), (1, 2)):
        fitting = []
        for names in itertools.combinations(sizes, count):
            n = math.prod(sizes[name] for name in names)
            if n > 1 and abs(number - n) < 1e-3 * n:
                fitting.append(" x ".join(names))
        if fitting:
            over = f"{' or '.join(fitting)} ({round(number)})"
            return f"it is {k:.6g} times the right one: as if {words} over {over}"
    return f"it is {k:.6g} times the right one"


def sizes_of(a, b):
    """{what a tensor may be summed over: how many}: b's groups, and those of a that b has not."""
    sizes = a.facts.get("groups", {}) | b.facts.get("groups", {})
    return {name: n for name, n in sizes.items() if n > 1}


def unrelated(ours, theirs):
    """Whether two tensors are as far apart as independent ones are."""
    far = distance(ours, theirs).square() / (ours[0] + theirs[0])
    return bool(ours[0] and 0.2 < far < 4)


def dropout(d):
    """Words, if dropout with probability p explains the embedding's output: the squares are then
    1 / (1 - p) times ours, and the sums over tokens vary accordingly. Else ""."""
    if d.name != "embed" or d.ours is None:
        return ""
    odds = (d.theirs[0, 0] / d.ours[0, 0] - 1).item()  # p / (1 - p)
    varied = (d.theirs - d.ours)[0, 1:].square().mean() / d.ours[0, 0]
    if not 0.01 < odds < 9 or not 0.1 * odds < varied < 6 * odds:
        return ""
    return f"as if dropout were on: it zeroes about {odds / (1 + odds):.1g} of the elements"
