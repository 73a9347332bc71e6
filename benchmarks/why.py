"""Why one GPU is not enough, in numbers: python -m benchmarks.why

The defaults are GPT-3's (Brown et al. 2020, arXiv:2005.14165, table D.1: 3.14e23 FLOP, which is 6 x
parameters x 300e9 tokens) at 28 TFLOP/s (Lambda Labs 2020, of a V100), on cards of 80 GB. The page
docs/why.md says what the numbers mean.
"""

import math

import harness
from receipts import zero

YEAR = 365.25 * 86400


def flags():
    p = harness.Parser(__doc__)
    amount = harness.real(1e-3, 1e30)
    for flag, default, metavar, why in [
        ("--parameters", 175e9, "P", "of the model"),
        ("--flop", 3.14e23, "FLOP", "of the whole training"),
        ("--tflops", 28, "TFLOP/s", "that one GPU reaches"),
        ("--memory", 80, "GB", "of a card"),
        ("--gpu-days", 10, "DAYS", "of another job, to be shared out"),
    ]:
        p.add_argument(flag, type=amount, default=default, metavar=metavar, help=why)
    for flag, default, why in [
        ("--cards", 8, "of a node"),
        ("--gpus", 1024, "to share a job out over"),
    ]:
        p.add_argument(flag, **harness.POSITIVE, default=default, help=why)
    return p


def report(args):
    """Print the numbers."""
    weights = 2 * args.parameters / 1e9
    each = sum(zero.model_states(0, 1))
    states = each * args.parameters / 1e9
    seconds = args.flop / (args.tflops * 1e12)
    sharing = f"on {args.gpus:,} GPUs, if ideal"
    print(f"{args.parameters:.4g} parameters")
    row("weights, 2 bytes each", weights, "GB")
    row(f"on each of {args.cards:,} cards", weights / args.cards, "GB")
    row(f"with gradients and Adam's states, {each:g} bytes each", states, "GB")
    row(f"cards of {args.memory:g} GB for these, at least", math.ceil(states / args.memory), "")
    print(f"{args.flop:.4g} FLOP at {args.tflops:g} TFLOP/s")
    row("on one GPU", seconds / YEAR, "years")
    row("the same", seconds / 3600e6, "million GPU hours")
    row(sharing, seconds / args.gpus / 86400, "days")
    print(f"{args.gpu_days:g} GPU-days")
    row(sharing, args.gpu_days * 1440 / args.gpus, "minutes")


def row(what, number, unit):
    shown = f"{number:,}" if isinstance(number, int) else f"{number:,.2f}"
    print(f"  {what:<50s}{shown:>10s} {unit}".rstrip())


def main():
    report(flags().parse_args())


if __name__ == "__main__":
    harness.script(main)
