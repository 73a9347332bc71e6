"""How much of the experts' messages DualPipe hides on a slow link: python -m benchmarks.dualpipe

Two hosts, as of benchmarks.slow_links (root; iproute2), with a rank each, which share the experts:
dualpipe.py with its pairs overlapped and in turns, at each rate of the link. Computing is the time
of a step in turns on a link that is not limited; waiting is what a slower link adds to it.
"""

import statistics

import harness
from benchmarks.slow_links import measure, two_hosts

MODEL = "--layers 4 --width 256 --heads 4 --experts 4 --context 64 --batch 32 --microbatches 8"
UNLIMITED = 100_000  # Mbit/s


def seconds(megabits, flags, args, port):
    """The time of a step: the median of some runs."""
    with two_hosts(megabits) as hosts:
        rates = [
            measure(hosts, "dualpipe.py", f"{MODEL} {flags}", args.steps, port + turn)[0]
            for turn in range(args.turns)
        ]
    return 32 * 64 / statistics.median(rates)


def main():
    parser = harness.Parser(__doc__)
    why = "Mbit/s of the link, several"
    rates = [1000, 500, 250, 125]
    parser.add_argument("--rates", type=harness.real(0.1), nargs="+", default=rates, help=why)
    parser.add_argument("--steps", **harness.POSITIVE, default=8, help="of a run")
    parser.add_argument("--turns", **harness.POSITIVE, default=3, help="runs of each kind")
    args = parser.parse_args()
    computing = seconds(UNLIMITED, "--in-turns", args, 29700)
    overlapped = seconds(UNLIMITED, "", args, 29710)
    print(f"a step without a limit: in turns {computing:.3f} s, overlapped {overlapped:.3f} s")
    print("| Mbit/s | computing, s | waiting | in turns | overlapped | hidden of the waiting |")
    print("|---|---|---|---|---|---|")
    for megabits in args.rates:
        in_turns = seconds(megabits, "--in-turns", args, 29720)
        overlapped = seconds(megabits, "", args, 29730)
        waiting = in_turns - computing
        hidden = (in_turns - overlapped) / waiting
        cells = [f"{s:.3f}" for s in (computing, waiting, in_turns, overlapped)]
        print(f"| {megabits:g} | {' | '.join(cells)} | {hidden:.0%} |", flush=True)


if __name__ == "__main__":
    harness.script(main)
