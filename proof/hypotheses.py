"""What common mistakes make of a tensor: the hypotheses that explain a wrong one, for the diagnosis
of a receipt (proof/diagnosis.py) and for two recordings (proof/compare.py).

A tensor may stand for itself, or be a row of random projections: a factor is the same in both.
"""

import itertools
import math

MOST = 5  # wrong tensors that are named
NOT_FINITE = "it is not finite"
PADDING = "only its padding is off: what pads a shard must stay zero"
INITIAL = "it still has its initial value: the optimizer has never moved it"
ZERO = "it is zero: it was never computed, or never received"
ON_RANK_0 = "it is right on rank 0 alone: the others never received it"
PARTIAL = "each rank has its own partial sum: it was never all-reduced over {}"
PART = "it is that of {} alone: what the others add to it is lost"


def factor(expected, actual, limit):
    """k where `actual` is k times `expected` to a relative `limit`, or None."""
    square = expected.square().sum().item()
    k = (actual * expected).sum().item() / square if square else 0.0
    rest = (actual - k * expected).norm().item()
    # No k fits a NaN
    return k if k and rest <= limit * abs(k) * math.sqrt(square) else None


def is_other(k, limit):
    """Whether a factor was found that is not 1."""
    return k is not None and abs(k - 1) > limit


def why_scaled(k, sizes):
    """Why a tensor may be k times the right one, as words that follow it, or "". sizes: {what one
    may sum or average over: how many these are}."""
    ways = {
        "summed once too often, or not averaged,": k,
        "averaged once too often, or not summed,": 1 / k if k else 0.0,
    }
    for (words, number), count in itertools.product(ways.items(), (1, 2)):
        fitting = []
        for names in itertools.combinations(sizes, count):
            n = math.prod(sizes[name] for name in names)
            if n > 1 and is_ratio(number, n):
                fitting.append(" x ".join(names))
        if fitting:
            return f": as if {words} over {' or '.join(fitting)} ({round(number)})"
    return ""


def is_ratio(k, n):
    return abs(k - n) < 1e-3 * n
