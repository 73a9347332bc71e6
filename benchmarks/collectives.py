"""collectives.py beside gloo's own, on 4 ranks of this machine: python -m benchmarks.collectives

Each pair of rivals takes turns, A B A B, so that whatever else runs here slows both. A turn lasts
from the moment for which all ranks agreed to start until the last of them is done.
"""

import statistics
import time

import torch
import torch.distributed as dist

import collectives
import harness

MB = 1_000_000


def loop_broadcast(tensor):
    """What the tree is to beat: the root sends to one rank after the other."""
    if dist.get_rank() == 0:
        for rank in range(1, dist.get_world_size()):
            dist.send(tensor, rank)
    else:
        dist.recv(tensor, 0)


def rivals(world):
    """(what, ours, theirs, bytes, calls a turn, target): of our time over theirs, at most the
    target is wanted."""
    tree = (world - 1).bit_length() / (world - 1)
    ring, halving = collectives.ALL_REDUCE["ring"], collectives.ALL_REDUCE["halving-doubling"]
    for size in (25 * MB, 100 * MB):
        yield "ring / gloo's all_reduce", ring, dist.all_reduce, size, 1, 1 / 0.9
    yield "halving-doubling / gloo's all_reduce", halving, dist.all_reduce, 4096, 20, 1.2
    for size in (4096, MB, 25 * MB):
        yield "tree / loop from the root", collectives.broadcast, loop_broadcast, size, 1, tree
    yield "halving-doubling / gloo's all_reduce", halving, dist.all_reduce, 25 * MB, 1, None
    yield (
        "tree / gloo's broadcast",
        collectives.broadcast,
        lambda t: dist.broadcast(t, 0),
        25 * MB,
        1,
        None,
    )


def turn(call, tensor, calls):
    """Seconds a call. All ranks' clocks are one, for they are on one machine."""
    clock = torch.tensor(time.perf_counter(), dtype=torch.float64)
    dist.all_reduce(clock, op=dist.ReduceOp.MAX)
    start = clock.item() + 2e-3
    time.sleep(max(0, start - time.perf_counter()))
    for _ in range(calls):
        call(tensor)
    clock.fill_(time.perf_counter())
    dist.all_reduce(clock, op=dist.ReduceOp.MAX)
    return (clock.item() - start) / calls


def demo(run):
    say = print if run.rank == 0 and not run.args.quiet else lambda *_: None
    say(f"{run.world} ranks; milliseconds; ratio: median (quartiles)")
    say(f"{'':38s}{'bytes':>11s}{'ours':>9s}{'theirs':>9s}   {'ratio':22s}target")
    for what, ours, theirs, size, calls, target in rivals(run.world):
        tensor = torch.zeros(size // 4)
        times = []
        for i in range(run.args.turns + 1):
            pair = turn(ours, tensor, calls), turn(theirs, tensor, calls)
            times += [pair] * (i > 0)  # the first is a warm-up
        mine, other = (statistics.median(t) * 1e3 for t in zip(*times))
        low, middle, high = statistics.quantiles([a / b for a, b in times])
        verdict = (
            "" if target is None else f"{target:.2f}  {'met' if middle <= target else 'missed'}"
        )
        say(
            f"{what:38s}{size:11d}{mine:9.2f}{other:9.2f}   {f'{middle:.2f} ({low:.2f} .. {high:.2f})':22s}{verdict}"
        )


def main():
    p = harness.Parser(__doc__)
    p.add_argument("--nproc", **harness.POSITIVE, help="ranks (default: 4)")
    p.add_argument(
        "--turns", type=harness.count(2), default=25, metavar="N", help="of each pair of rivals"
    )
    p.add_argument("--quiet", action="store_true", help="print nothing but errors")
    p.set_defaults(device="cpu", backend="gloo")
    harness.launch(demo, p.parse_args(), run=harness.Rank)


if __name__ == "__main__":
    harness.script(main)
