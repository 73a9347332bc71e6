"""How much of the time ranks work in each schedule, beside the simulator's figure for the plan:
python -m benchmarks.pipeline

Stages sleep in place of work, so that few cores carry many ranks.
"""

import time
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn.functional as F

import benchmarks
import harness
import zero_bubble
from harness.start import launch
from receipts import pipeline as schedules

MICROBATCHES, SECONDS = 8, 0.06


class Sleep(torch.autograd.Function):
    """Work, as time: seconds in forward, and in backward."""

    @staticmethod
    def forward(ctx, x, forward, backward):
        ctx.seconds = backward
        time.sleep(forward)
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        time.sleep(ctx.seconds)
        return grad.clone(), None, None


def sleeping(name, run):
    """Utilisation of a step whose stages sleep: as measured, and as planned."""
    schedule = schedules.find_schedule(name, run.world, MICROBATCHES)
    each = SECONDS * run.world / len(schedule.owner)  # a stage's F, I and W
    weight = torch.nn.Parameter(torch.ones(4, 4))
    accumulate = zero_bubble.WeightGradStore.accumulate
    halved = {action[1:] for action in schedule[run.rank] if action.kind == "W"}

    def forward(stage, i, x):
        x = torch.ones(2, 4, requires_grad=True) if x is None else x
        if (i, stage) not in halved:  # the weight's gradient comes with backward
            x = Sleep.apply(x, 0, each)
        y = Sleep.apply(F.linear(x, weight), each, each)
        return y.sum() if stage == schedule.last else y

    def slowly(store):
        time.sleep(each)
        accumulate(store)

    with mock.patch.object(zero_bubble.WeightGradStore, "accumulate", slowly):
        ours = zero_bubble.SplitPipeline(schedule, forward, (2, 4), torch.float32, "cpu")
        dist.barrier()
        begin = time.perf_counter()
        ours.run()
        end = time.perf_counter()
    begins, ends = zip(*run.gather((begin, end)))
    work = 3 * MICROBATCHES * SECONDS
    planned = schedules.utilisation(schedules.simulate(schedule))
    return work / (max(ends) - min(begins)), planned


def demo(run):
    run.print(f"\n{run.world} ranks, {MICROBATCHES} micro-batches, F, I and W of {SECONDS} s each")
    run.print(f"{'':14s}{'measured':>10s}{'plan':>10s}   difference (target: 3 points)")
    for name in schedules.SCHEDULES:
        measured, plan = sleeping(name, run)
        run.print(f"{name:14s}{measured:10.1%}{plan:10.1%}   {100 * (plan - measured):4.1f} points")


def check(world):
    for name in schedules.SCHEDULES:
        schedules.find_schedule(name, world, MICROBATCHES)


def main():
    launch(demo, benchmarks.parser(__doc__, nproc=4).parse_args(), check=check)


if __name__ == "__main__":
    harness.script(main)
