"""Speed beside PyTorch's own, as ratios of two things that take turns in one run: python -m
benchmarks.NAME

Rivals take turns, A B A B, so that whatever else runs on the machine slows both. A turn is some
whole training steps, timed from when all ranks are there until the last is done; shown are the
median tokens/s of both, and the median and the quartiles of the ratio over the turns.
"""

import statistics
import time

import torch
import torch.distributed as dist

HEAD = f"{'':46s}{'ours':>9s}{'theirs':>9s}   ratio"


def turn(step, steps, device="cpu"):
    """Seconds a step, from the moment for which all ranks agreed to start until the last is done:
    all clocks here are one."""
    clock = torch.tensor(time.perf_counter(), dtype=torch.float64, device=device)
    dist.all_reduce(clock, op=dist.ReduceOp.MAX)
    start = clock.item() + 2e-3
    time.sleep(max(0, start - time.perf_counter()))
    for _ in range(steps):
        step()
    if clock.is_cuda:
        torch.cuda.synchronize()
    clock.fill_(time.perf_counter())
    dist.all_reduce(clock, op=dist.ReduceOp.MAX)
    return (clock.item() - start) / steps


def spread(values):
    low, middle, high = statistics.quantiles(values)
    return f"{middle:.2f} ({low:.2f} .. {high:.2f})"


def versus(what, ours, theirs, tokens, steps, turns, device="cpu"):
    """A line of the table: the two functions take a training step of `tokens` tokens each."""
    times = []
    for i in range(turns + 1):
        pair = turn(ours, steps, device), turn(theirs, steps, device)
        times += [pair] * (i > 0)  # the first is a warm-up
    mine, other = (tokens / statistics.median(t) for t in zip(*times))
    return f"{what:46s}{mine:9,.0f}{other:9,.0f}   {spread([y / x for x, y in times]):20s}"
