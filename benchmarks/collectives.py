"""collectives.py beside gloo's own, on ranks of this machine that take turns: python -m
benchmarks.collectives
"""

import functools
import statistics

import torch
import torch.distributed as dist

import benchmarks
import collectives
import harness
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
    say = run.print
    say(f"{run.world} ranks; milliseconds; ratio: median (quartiles)")
    say(f"{'':38s}{'bytes':>11s}{'ours':>9s}{'theirs':>9s}   {'ratio':22s}target")
    for name, ours, theirs, size, calls, target in rivals(run.world):
        tensor = torch.zeros(size // 4)
        pair = functools.partial(ours, tensor), functools.partial(theirs, tensor)
        times = benchmarks.race(pair, run.args.turns, calls)
        ours_ms, theirs_ms = (statistics.median(row) * 1e3 for row in times)
        verdict = ""
        if target is not None:
            ratio = statistics.median(a / b for a, b in zip(*times))
            verdict = f"{target:.2f}  {'met' if ratio <= target else 'missed'}"
        line = f"{name:38s}{size:11d}{ours_ms:9.2f}{theirs_ms:9.2f}"
        say(f"{line}   {benchmarks.spread(*times):22s}{verdict}")


def check(world):
    if world == 1:
        raise harness.Refused("one rank sends nothing: give --nproc 2 or more")


def main():
    launch(demo, benchmarks.parser(__doc__, nproc=4, turns=25).parse_args(), check=check)


if __name__ == "__main__":
    harness.script(main)
