"""How much of the time ranks work in each schedule, beside the simulator's figure for the plan:
python -m benchmarks.pipeline

Stages sleep in place of work, so that few cores carry many ranks.
"""

import time

import torch
import torch.distributed as dist
import torch.nn.functional as F

import benchmarks
import harness
import pipeline
import zero_bubble
from harness.rank import launch
from receipts import pipeline as schedules


class Sleep(torch.autograd.Function):
    """A stage's work, as time: `seconds` forward, and as many for the input's gradient."""

    @staticmethod
    def forward(ctx, x, seconds):
        ctx.seconds = seconds
        time.sleep(seconds)
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        time.sleep(ctx.seconds)
        return grad.clone(), None


def sleeping(name, seconds, microbatches, links):
    """Utilisation of a step whose stages sleep: as measured, and as planned."""
    p = dist.get_world_size()
    schedule = zero_bubble.make_schedule(name, p, microbatches)
    each = seconds * p / len(schedule.owner)  # a stage's F, I and W
    weight, gradient = torch.nn.Parameter(torch.ones(4, 4)), zero_bubble.weight_gradient

    # Without the split, the weight's gradient comes with backward
    class Slow(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            time.sleep(each)
            return grad.clone()

    def forward(stage, i, x):
        x = torch.ones(2, 4, requires_grad=True) if x is None else x
        whole = (i, stage) not in halved
        y = Sleep.apply(F.linear(Slow.apply(x) if whole else x, weight), each)
        return y.sum() if stage == schedule.last else y

    halved = {action[1:] for action in schedule[dist.get_rank()] if action.kind == "W"}

    def slow_gradient(*tensors):
        time.sleep(each)
        return gradient(*tensors)

    zero_bubble.weight_gradient = slow_gradient
    try:
        dist.barrier()
        begin = time.perf_counter()
        pipeline.play(schedule, forward, (2, 4), torch.float32, "cpu", links)
        end = time.perf_counter()
    finally:
        zero_bubble.weight_gradient = gradient
    ends = [None] * p
    dist.all_gather_object(ends, (begin, end))
    begin, end = min(begin for begin, _ in ends), max(end for _, end in ends)
    work = 3 * microbatches * seconds * p
    return work / (p * (end - begin)), schedules.utilisation(schedules.simulate(schedule))


def demo(run):
    args, say = run.args, run.print
    links = pipeline.make_links()
    what = f"a rank's F, I and W of all its layers sleep {args.sleep * 1000:.0f} ms each"
    say(f"\n{run.world} ranks, {args.microbatches} micro-batches; {what}")
    say(f"{'':14s}{'measured':>10s}{'plan':>10s}   difference (target: 3 points)")
    for name in zero_bubble.SCHEDULES:
        measured, plan = sleeping(name, args.sleep, args.microbatches, links)
        say(f"{name:14s}{measured:10.1%}{plan:10.1%}   {100 * (plan - measured):4.1f} points")


def main():
    p = benchmarks.parser(__doc__, nproc=4)
    why = "of a step, at least twice as many as ranks"
    p.add_argument("--microbatches", **harness.POSITIVE, default=8, help=why)
    real, why = harness.real(0, 60), "a rank's F, I and W take so long"
    p.add_argument("--sleep", type=real, default=0.06, metavar="SECONDS", help=why)
    args = p.parse_args()

    def check(world):
        schedules.check_length(world, args.microbatches, 2)
        for name in zero_bubble.SCHEDULES:
            zero_bubble.make_schedule(name, world, args.microbatches)

    launch(demo, args, check=check)


if __name__ == "__main__":
    harness.script(main)
