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
from harness.start import launch

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


def rivals():
    """(name, ours, theirs, bytes, calls a turn)."""
    ring, halving = collectives.ALL_REDUCE["ring"], collectives.ALL_REDUCE["halving-doubling"]
    doubling = collectives.ALL_REDUCE["recursive-doubling"]
    double_tree = collectives.ALL_REDUCE["double-tree"]
    tree, gloo = collectives.broadcast, dist.all_reduce
    return [
        ("ring / gloo's all_reduce", ring, gloo, 25 * MB, 1),
        ("ring / gloo's all_reduce", ring, gloo, 100 * MB, 1),
        ("halving-doubling / gloo's all_reduce", halving, gloo, 4096, 20),
        ("halving-doubling / gloo's all_reduce", halving, gloo, 25 * MB, 1),
        ("recursive doubling / gloo's all_reduce", doubling, gloo, 4096, 20),
        ("double tree / gloo's all_reduce", double_tree, gloo, 4096, 20),
        ("double tree / gloo's all_reduce", double_tree, gloo, 25 * MB, 1),
        ("tree / loop from the root", tree, loop_broadcast, 4096, 1),
        ("tree / loop from the root", tree, loop_broadcast, MB, 1),
        ("tree / loop from the root", tree, loop_broadcast, 25 * MB, 1),
        ("tree / gloo's broadcast", tree, gloo_broadcast, 25 * MB, 1),
    ]


def demo(run):
    say = run.print
    say(f"{run.world} ranks; milliseconds; ratio: median (quartiles)")
    say(f"{'':38s}{'bytes':>11s}{'ours':>9s}{'theirs':>9s}   ratio")
    for name, ours, theirs, size, calls in rivals():
        tensor = torch.zeros(size // 4)
        pair = functools.partial(ours, tensor), functools.partial(theirs, tensor)
        times = benchmarks.race(pair, run.args.turns, calls)
        ours_ms, theirs_ms = (statistics.median(row) * 1e3 for row in times)
        line = f"{name:38s}{size:11d}{ours_ms:9.2f}{theirs_ms:9.2f}"
        say(f"{line}   {benchmarks.spread(*times)}")


def check(world):
    if world == 1:
        raise harness.Refused("one rank sends nothing: give --nproc 2 or more")


def main():
    launch(demo, benchmarks.parser(__doc__, nproc=4, turns=25).parse_args(), check=check)


if __name__ == "__main__":
    harness.script(main)
