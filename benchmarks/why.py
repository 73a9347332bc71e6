"""Why one GPU is not enough, in numbers: python -m benchmarks.why

GPT-3's (Brown et al. 2020, arXiv:2005.14165, table D.1: 3.14e23 FLOP, which is 6 x parameters x
300e9 tokens) at 28 TFLOP/s (Lambda Labs 2020, of a V100), on cards of 80 GB, 8 in a node. The page
docs/learn/why.md says what the numbers mean.
"""

import math

import harness
from receipts import zero

PARAMETERS, FLOP = 175e9, 3.14e23
RATE, CARD = 28e12, 80e9  # FLOP/s, bytes
GPUS = 1024  # to share a job out over
YEAR = 365.25 * 86400


def main():
    harness.Parser(__doc__).parse_args()
    states = sum(zero.model_states(0, 1))  # bytes a parameter
    seconds = FLOP / RATE
    sharing = f"on {GPUS:,} GPUs, if ideal"
    print(f"{PARAMETERS:.4g} parameters")
    row("weights, 2 bytes each", 2 * PARAMETERS / 1e9, "GB")
    row("on each of 8 cards", 2 * PARAMETERS / 8 / 1e9, "GB")
    all_states = f"with gradients and Adam's states, {states:g} bytes each"
    row(all_states, states * PARAMETERS / 1e9, "GB")
    row("cards of 80 GB for these, at least", math.ceil(states * PARAMETERS / CARD), "")
    print(f"{FLOP:.4g} FLOP at {RATE / 1e12:g} TFLOP/s")
    row("on one GPU", seconds / YEAR, "years")
    row("the same", seconds / 3600e6, "million GPU hours")
    row(sharing, seconds / GPUS / 86400, "days")
    print("10 GPU-days")
    row(sharing, 10 * 1440 / GPUS, "minutes")


def row(what, number, unit):
    shown = f"{number:,}" if isinstance(number, int) else f"{number:,.2f}"
    print(f"  {what:<50s}{shown:>10s} {unit}".rstrip())


if __name__ == "__main__":
    harness.script(main)
