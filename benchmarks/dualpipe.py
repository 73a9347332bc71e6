"""How much of the experts' messages DualPipe hides on a slow link: python -m benchmarks.dualpipe

Two hosts, as of benchmarks.slow_links (root; iproute2), with a rank each, which share the experts:
dualpipe.py with its pairs in turns and overlapped, at each rate of the link. Seconds of a step:

    C       computing: in turns, on a link that is not limited
    W       waiting: what the limit adds in turns. At most min(W, C) can be hidden
    hidden  of min(W, C): W less what the limit adds to an overlapped step
"""

import statistics

import harness
from benchmarks.slow_links import measure, two_hosts

MODEL = "--layers 4 --width 256 --heads 4 --experts 4 --context 64 --batch 64 --microbatches 16"
UNLIMITED = 100_000  # Mbit/s


def seconds(megabits, args):
    """A step's time (in turns, overlapped): medians of runs that take turns."""
    times = []
    with two_hosts(megabits) as hosts:
        for turn in range(args.turns):
            for flags, port in (("--in-turns", 29700 + turn), ("", 29800 + turn)):
                tokens, *_ = measure(hosts, "dualpipe.py", f"{MODEL} {flags}", args.steps, port)
                times.append(64 * 64 / tokens)
    return statistics.median(times[::2]), statistics.median(times[1::2])


def main():
    parser = harness.Parser(__doc__)
    rates = dict(nargs="+", default=[125, 60, 45, 30], help="Mbit/s of the link, several")
    parser.add_argument("--rates", type=harness.real(0.1), **rates)
    parser.add_argument("--steps", **harness.POSITIVE, default=8, help="of a run")
    parser.add_argument("--turns", **harness.POSITIVE, default=3, help="runs of each kind")
    args = parser.parse_args()
    print("| Mbit/s | in turns, s | overlapped | C | W | W / C | hidden |")
    print("|---|---|---|---|---|---|---|")
    computing, unlimited = seconds(UNLIMITED, args)
    print(f"| no limit | {computing:.2f} | {unlimited:.2f} | {computing:.2f} | | | |", flush=True)
    for megabits in args.rates:
        in_turns, overlapped = seconds(megabits, args)
        waiting = in_turns - computing
        hidden = (waiting - (overlapped - unlimited)) / min(waiting, computing)
        cells = " | ".join(f"{s:.2f}" for s in (in_turns, overlapped, computing, waiting))
        print(f"| {megabits:g} | {cells} | {waiting / computing:.2f} | {hidden:.0%} |", flush=True)


if __name__ == "__main__":
    harness.script(main)
