"""Hold one recording against another: the first step and tensor in which they part, and why.

    python -m proof.compare OURS THEIRS

OURS is the reference. Each is a folder of `train.py --record` or a file of proof/recorder.py.
Exit code 0: equal to rounding. 1: they part. 2: they can't be compared.

Things are compared in the order of computation: the weights at the start; then of each step the
batch, the outputs of the embedding and the blocks, the loss, the gradients from the last layer to
the first, their norm, and the weights after the step.

Two tensors are compared by their norms and by eight random projections. The root mean square of
the projections' differences estimates the norm of the tensors' difference. It is divided by the
tensor's norm, or by a floor that is a part of the largest norm of the step. The tolerance is that
of a receipt (proof/tolerance.py), in the coarser of the two precisions.
"""

import itertools
import json
import math
import os
import sys
from typing import NamedTuple

import torch

from harness import Refused, script
from harness.flags import Parser, real
from proof import causes, hypotheses
from proof.replay import Replay
from proof.tolerance import FLOOR, TOLERANCE

# {kind in a line: the tolerance that holds for it}
LIMITS = {"outputs": "grad", "loss": "loss", "grad": "grad", "norm": "grad_norm", "data": "param"}
WORDS = {"outputs": "output", "loss": "loss", "grad": "gradient", "norm": "norm", "data": "weight"}


def main():
    p = Parser(__doc__)
    p.add_argument("reference", metavar="OURS", help="the recording that is right")
    p.add_argument("other", metavar="THEIRS", help="the recording in question")
    why = "the relative difference that counts as rounding, in place of the precision's own"
    p.add_argument("--tolerance", type=real(0), metavar="X", help=why)
    args = p.parse_args()
    code, text = report(args.reference, args.other, args.tolerance)
    print(text)
    sys.exit(code)


def report(reference, other, tolerance=None):
    """(exit code, what to print) for two paths."""
    a, b = load(reference), load(other)
    check(a, b)
    coarsest = max(TOLERANCE, key=lambda dtype: TOLERANCE[dtype]["grad"])
    dtypes = [x.facts["dtype"] if x.facts["dtype"] in TOLERANCE else coarsest for x in (a, b)]
    precision = max(dtypes, key=lambda dtype: TOLERANCE[dtype]["grad"])
    limits = {kind: tolerance or TOLERANCE[precision][LIMITS[kind]] for kind in LIMITS}
    found = list(differences(a, b, limits, FLOOR[precision]))
    off = [d for d in found if not d.error <= d.limit]
    steps = len({d.step for d in found if d.kind != "data"})
    sizes = f"{steps} {'step' if steps == 1 else 'steps'}, {len(first_line(a)['data'])} weights"
    text = f"{sizes}, {precision}: tolerance {limits['grad']:.0e} for a gradient"
    if off:
        return 1, "\n".join([text, *explain(a, b, off, found, limits, FLOOR[precision])])
    lines = [text]
    for kind in LIMITS:
        of_kind = [d for d in found if d.kind == kind]
        if of_kind:
            worst = max(of_kind, key=lambda d: d.error)
            at = f"{worst.name}, step {worst.step}" if kind in ("data", "grad") else worst.name
            row = f"  largest difference of {WORDS[kind]:<9s}{worst.error:9.1e}"
            lines.append(f"{row}   tolerance {worst.limit:.0e}  {at}")
        else:
            lines.append(f"  not compared: {WORDS[kind]}, which is not in both")
    return 0, "\n".join([*lines, "equal to rounding"])


# --- reading


class Recording(NamedTuple):
    """facts: the first line, as a dict. lines: {step: line}; the last has weights alone."""

    path: str
    facts: dict
    lines: dict


def load(path):
    """A Recording. Refuses what is none."""
    file = os.path.join(path, "record.jsonl") if os.path.isdir(path) else path
    try:
        with open(file) as f:
            facts, *lines = [json.loads(line) for line in f]
        return Recording(path, {"dtype": facts["dtype"]} | facts, {x["step"]: x for x in lines})
    except OSError as e:
        advice = "give a folder of train.py --record or a file of proof/recorder.py"
        raise Refused(f"{file} can't be read ({e.strerror}): {advice}") from e
    except (ValueError, KeyError, TypeError) as e:
        raise Refused(f"{file} is no recording, or was cut short: record it again") from e


def check(a, b):
    """Refuse two recordings that have nothing to compare, or other weights."""
    if not set(a.lines) & set(b.lines):
        raise Refused(f"{a.path} and {b.path} have no step in common: record the same steps")
    ours, theirs = (set(first_line(x).get("data", ())) for x in (a, b))
    for x, y, missing in ((a, b, ours - theirs), (b, a, theirs - ours)):
        if missing:
            what = f"{len(missing)} of the weights of {x.path}, such as {sorted(missing)[0]}"
            raise Refused(f"{y.path} lacks {what}: give the recorder `names` that make them")

    for step in sorted(set(a.lines) & set(b.lines)):
        trained = all(x.lines[step].get("scalars") for x in (a, b))  # else a last line
        if trained and a.lines[step].get("grad") and not b.lines[step].get("grad"):
            advice = "call its recorder after backward, and before zero_grad"
            raise Refused(f"{b.path} has no gradients in step {step}: {advice}")


def first_line(recording):
    return recording.lines[min(recording.lines)]


# --- what differs


class Difference(NamedTuple):
    """One thing of one step. error: the relative difference. ours, theirs: the values; of a tensor
    a row (9,) for each different one that a rank has."""

    step: int
    kind: str
    name: str
    error: float
    limit: float
    ours: object
    theirs: object


def differences(a, b, limits, floor):
    """Yield the Differences in the order of computation."""
    order = a.facts.get("order") or [*first_line(a).get("outputs", ()), *first_line(a)["data"]]
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
    return torch.tensor(rows, dtype=torch.float64)


def norm(value):
    return value[..., 0].sqrt()


def distance(u, v):
    """An estimate of the norm of the difference of two tensors, from their summaries (..., 9)."""
    projected = (u[..., 1:] - v[..., 1:]).square().mean(-1).sqrt()
    return torch.maximum((norm(u) - norm(v)).abs(), projected).nan_to_num(math.inf, math.inf)


# --- what to say of it


def explain(a, b, off, found, limits, floor):
    """Lines about the first difference, and about others of the same kind and step."""
    first = off[0]
    same = [d for d in off if (d.step, d.kind) == (first.step, first.kind)]
    total = len([d for d in found if (d.step, d.kind) == (first.step, first.kind)])
    lines, alike = [f"first apart: {where(a, first)}"], {}
    for d in same:
        alike.setdefault(cause(a, b, d), []).append(d)
    words = WORDS.get(first.kind)
    settled = first.limit > 0 and all(text and text[-4:] != "ours" for text in alike)
    if not settled:
        named = by_replay(a, b, same, limits, floor) or dropout(first)
        if named:
            count = [f"  {len(same)} of {total} {words}s are off"] if total > 1 else []
            return [*lines, *count, f"  cause: {named}"]
    for text, group in alike.items():
        if text and len(group) > 1:
            some = f"{len(group)} of {total} {words}s, such as {group[0].name}"
            who = f"all {total} {words}s" if len(group) == total else some
            lines.append(f"  {who}: {text}")
            continue
        for d in sorted(group, key=lambda d: (d is not first, -d.error))[: hypotheses.MOST]:
            error = f": off by {d.error:.1e}" if d.limit else ""
            lines.append(f"  {d.name}{error}{'; ' if text else ''}{text}")
    return lines


def by_replay(a, b, same, limits, floor):
    """The cause of differences of one kind, found by training a's steps again, or ""."""
    step, kind, names = same[0].step, same[0].kind, [d.name for d in same]
    try:
        replay = Replay(a.path, a.facts)
    except (KeyError, OSError):  # a file of recorder.py, or a run of another optimizer
        return ""
    if kind in ("rows", "targets"):
        return causes.of_batch(replay, step, kind, b.lines[step])
    case = causes.Case(
        replay, step, kind, a.lines[step], b.lines[step], names, sizes_of(a, b), floor
    )
    found = causes.find(case, limits[kind])
    return f"{found[0]} (then the largest difference is {found[1]:.0e})" if found else ""


def sizes_of(a, b):
    """{what a tensor may be summed over: how many}: b's groups, and those of a that b has not."""
    sizes = a.facts.get("groups", {}) | b.facts.get("groups", {})
    return {name: n for name, n in sizes.items() if n > 1}


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
    if d.kind == "norm":
        norms = b.lines[d.step]["scalars"]["norm"]
        if len(norms) > 1 and abs(math.hypot(*norms) / d.ours - 1) <= fit(d):
            return "each rank has the norm of its own part: the squares were never summed"
    if d.kind in ("loss", "norm"):
        return times_ours(d.theirs / d.ours if d.ours else math.nan, sizes_of(a, b))
    ours, theirs, limit = d.ours[0], d.theirs[0], fit(d)
    if not d.theirs.isfinite().all():
        return hypotheses.NOT_FINITE
    if disagree(d.theirs, limit):
        return why_they_disagree(ours, d.theirs, limit)
    if d.kind == "data" and d.step > min(a.lines):
        before = b.lines.get(d.step - 1, {}).get("data", {}).get(d.name)
        still = before == b.lines[d.step]["data"][d.name]
        return "it did not move in this step: the optimizer does not have it" if still else ""
    if not theirs.any():
        return hypotheses.ZERO
    if d.kind == "data" and unrelated(ours, theirs):
        times = (norm(theirs) / norm(ours)).item()
        return f"it is another draw, {times:.2g} times as large"
    k = hypotheses.factor(ours[1:], theirs[1:], limit)
    same_norm = k and abs(norm(theirs) - abs(k) * norm(ours)) <= limit * norm(theirs)
    return times_ours(k, sizes_of(a, b)) if same_norm and hypotheses.is_other(k, limit) else ""


def dropout(d):
    """Words, if dropout with probability p explains the embedding's output: the squares are then
    1 / (1 - p) times ours, and the sums over tokens vary accordingly. Else ""."""
    if d.name != "embed":
        return ""
    odds = (d.theirs[0, 0] / d.ours[0, 0] - 1).item()  # p / (1 - p)
    varied = (d.theirs - d.ours)[0, 1:].square().mean() / d.ours[0, 0]
    if not 0.01 < odds < 9 or not 0.1 * odds < varied < 6 * odds:
        return ""
    return f"as if dropout were on: it zeroes about {odds / (1 + odds):.1g} of the elements"


def unrelated(ours, theirs):
    """Whether two tensors are as far apart as independent ones are."""
    far = distance(ours, theirs).square() / (ours[0] + theirs[0])
    return bool(ours[0] and 0.2 < far < 4)


def disagree(values, limit):
    """Whether ranks have values that differ by more than rounding."""
    return bool((distance(values, values[0]) > limit * norm(values[0])).any())


def why_they_disagree(ours, theirs, limit):
    """Why ranks may have different values of what should be the same on all."""
    text = f"the ranks have {len(theirs)} different values"
    right = int((distance(theirs, ours) <= limit * norm(ours)).sum())
    if right:
        return f"{text}, and {right} is right: it was never sent to the other ranks"
    # Squares do not add up, the projections do
    k = hypotheses.factor(ours[1:], theirs.sum(0)[1:], limit)
    if k and not hypotheses.is_other(k, limit):
        return f"{text}, which add up to the right one: it was never summed over the ranks"
    if k and hypotheses.is_ratio(k, len(theirs)):
        return f"{text}, whose mean is right: it was never averaged over the ranks"
    return text


def fit(d):
    """The relative difference up to which an explanation fits."""
    return min(max(10 * d.limit, 1e-6), 0.02)


def times_ours(k, sizes):
    """That something is k times what it should be, and why it may be."""
    return f"it is {k:.6g} times ours{hypotheses.why_scaled(k, sizes)}"


if __name__ == "__main__":
    script(main)
