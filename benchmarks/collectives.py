"""collectives.py beside gloo's own, on 4 ranks of this machine: python -m benchmarks.collectives

Each pair of rivals takes turns, A B A B, so that whatever else runs here slows both. A turn lasts
from the moment for which all ranks agreed to start until the last of them is done.
"""

import functools
import os
import statistics
import sys

if not __package__:  # run as a script: python benchmarks/collectives.py
    sys.path[0] = os.path.dirname(sys.path[0])

import torch
import torch.distributed as dist

import collectives
import harness
from benchmarks import spread, turn
from harness.rank import launch

MB = 1_000_000


def loop_broadcast(tensor):
    """The tree's rival: the root sends to one rank after the other."""
    if dist.get_rank() == 0:
        for rank in range(1, dist.get_world_size()):
            dist.send(tensor, rank)
    else:
        dist.recv(tensor, 0)


def gloo_broadcast(tensor):
    dist.broadcast(tensor, 0)


def rivals(world):
    """(name, ours, theirs, bytes, calls a turn, target): our time over theirs should be at most the
    target."""
    ring, halving = collectives.ALL_REDUCE["ring"], collectives.ALL_REDUCE["halving-doubling"]
    doubling = collectives.ALL_REDUCE["recursive-doubling"]
    double_tree = collectives.ALL_REDUCE["double-tree"]
    tree, gloo = collectives.broadcast, dist.all_reduce
    rounds = (world - 1).bit_length() / (world - 1)  # of a tree, beside a loop
    return [
        ("ring / gloo's all_reduce", ring, gloo, 25 * MB, 1, 1 / 0.9),
        ("ring / gloo's all_reduce", ring, gloo, 100 * MB, 1, 1 / 0.9),
        ("halving-doubling / gloo's all_reduce", halving, gloo, 4096, 20, 1.2),
        ("recursive doubling / gloo's all_reduce", doubling, gloo, 4096, 20, 1.2),
        ("tree / loop from the root", tree, loop_broadcast, 4096, 1, rounds),
        ("tree / loop from the root", tree, loop_broadcast, MB, 1, rounds),
        ("tree / loop from the root", tree, loop_broadcast, 25 * MB, 1, rounds),
        ("halving-doubling / gloo's all_reduce", halving, gloo, 25 * MB, 1, None),
        ("double tree / gloo's all_reduce", double_tree, gloo, 4096, 20, None),
        ("double tree / gloo's all_reduce", double_tree, gloo, 25 * MB, 1, None),
        ("tree / gloo's broadcast", tree, gloo_broadcast, 25 * MB, 1, None),
    ]


def demo(run):
    def say(line):
        if run.rank == 0 and not run.args.quiet:
            print(line, flush=True)

    say(f"{run.world} ranks; milliseconds; ratio: median (quartiles)")
    say(f"{'':38s}{'bytes':>11s}{'ours':>9s}{'theirs':>9s}   {'ratio':22s}target")
    for name, ours, theirs, size, calls, target in rivals(run.world):
        tensor, ours_took, theirs_took = torch.zeros(size // 4), [], []
        for i in range(run.args.turns + 1):
            first = turn(functools.partial(ours, tensor), calls)
            second = turn(functools.partial(theirs, tensor), calls)
            if i > 0:  # the first is a warm-up
                ours_took.append(first)
                theirs_took.append(second)
        ratios = [a / b for a, b in zip(ours_took, theirs_took)]
        verdict = ""
        if target is not None:
            verdict = f"{target:.2f}  {'met' if statistics.median(ratios) <= target else 'missed'}"
        line = f"{name:38s}{size:11d}{statistics.median(ours_took) * 1e3:9.2f}"
        line += f"{statistics.median(theirs_took) * 1e3:9.2f}   {spread(ratios):22s}"
        say(line + verdict)


def main():
    p = harness.Parser(__doc__)
    p.add_argument("--nproc", **harness.POSITIVE, help="ranks (default: 4)")
    why = "of each pair of rivals"
    p.add_argument("--turns", type=harness.count(2), default=25, metavar="N", help=why)
    p.add_argument("--quiet", action="store_true", help="print nothing but errors")
    p.set_defaults(device="cpu", backend="gloo")
    launch(demo, p.parse_args(), check=check)


def check(world):
    if world == 1:
        raise harness.Refused("one rank sends nothing: give --nproc 2 or more")


if __name__ == "__main__":
    harness.script(main)
