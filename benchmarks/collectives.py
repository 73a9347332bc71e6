"""collectives.py beside gloo's own, on ranks of this machine that take turns: python -m
benchmarks.collectives"""

import functools
import statistics

import torch
import torch.distributed as dist

import benchmarks
import collectives
import harness
from double_tree import double_tree_all_reduce
from harness.start import launch

SMALL, LARGE = (4096, 20), (25_000_000, 1)  # bytes, calls a turn


def demo(run):
    run.print(f"{run.world} ranks; milliseconds; ratio: median (quartiles)")
    run.print(f"{'':38s}{'bytes':>11s}{'ours':>9s}{'theirs':>9s}   ratio")
    rivals = [("broadcast", collectives.broadcast, functools.partial(dist.broadcast, src=0))]
    for name in ("ring", "halving-doubling", "recursive-doubling"):
        all_reduce = functools.partial(collectives.all_reduce, algorithm=name)
        rivals.append((name, all_reduce, dist.all_reduce))
    rivals.append(("double-tree", double_tree_all_reduce, dist.all_reduce))
    for name, ours, theirs in rivals:
        for size, calls in (SMALL, LARGE):
            tensor = torch.zeros(size // 4)
            pair = functools.partial(ours, tensor), functools.partial(theirs, tensor)
            times = benchmarks.race(pair, run.args.turns, calls)
            ours_ms, theirs_ms = (statistics.median(row) * 1e3 for row in times)
            line = f"{name + ' / gloo':38s}{size:11,d}{ours_ms:9.2f}{theirs_ms:9.2f}"
            run.print(f"{line}   {benchmarks.shown(benchmarks.quartiles(*times))}")


def check(world):
    if world == 1 or world & (world - 1):
        raise harness.Refused("give --nproc 2, 4, 8 or another power of two")


def main():
    launch(demo, benchmarks.parser(__doc__, nproc=4, turns=25).parse_args(), check=check)


if __name__ == "__main__":
    harness.script(main)
