"""pipeline.py beside torch.distributed.pipelining, same GPT and schedule: python -m benchmarks.pipeline

AdamW, fused, on both sides, on --nproc ranks of this machine. Then each schedule with stages that sleep in place of work, on 4
ranks, so that few cores carry them: how much of the time its ranks work, beside the simulator's figure for the plan.
"""

import time
import warnings

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.pipelining import PipelineStage, schedules

import benchmarks
import collectives
import harness
import model as gpt
import pipeline

THEIRS = {
    "gpipe": "ScheduleGPipe",
    "1f1b": "Schedule1F1B",
    "interleaved": "ScheduleInterleaved1F1B",
    "zb-v": "ScheduleZBVZeroBubble",
    "dualpipev": "ScheduleDualPipeV",
}


def build(config, schedule, rank):
    """This rank's stages, with the same weights for both sides."""

    def whole():
        with torch.device("meta"):
            return gpt.GPT(config)

    owner = pipeline.owners(schedule)
    mine = [stage for stage in sorted(owner) if owner[stage] == rank]
    return gpt.fill(pipeline.Stages(pipeline.split(whole, len(owner), mine)), 0)


def rivals(name, args, links):
    """Two functions that take a step of the same schedule: ours and PyTorch's. They return the loss, on the last stage."""
    config = gpt.configure(layers=args.layers, family="llama")  # untied: PyTorch has nothing for a tied matrix
    rank, p, m = dist.get_rank(), dist.get_world_size(), args.microbatches
    schedule = pipeline.make(name, p, m)
    owner = pipeline.owners(schedule)
    last = len(owner) - 1
    tokens = torch.randint(config.vocab, (args.batch, config.context), generator=torch.Generator().manual_seed(0))
    pieces, shape, count = tokens.chunk(m), (args.batch // m, config.context, config.width), tokens.numel()
    ours, theirs = build(config, schedule, rank), build(config, schedule, rank)
    optimizers = [harness.make_optimizer(model.parameters(), args) for model in (ours, theirs)]

    def forward(stage, i, x):
        return ours[stage](pieces[i] if x is None else x, targets=pieces[i], count=count)

    def a():
        optimizers[0].zero_grad()
        losses = pipeline.play(schedule, forward, shape, torch.float32, "cpu", links)
        optimizers[0].step()
        return sum(loss.item() for loss in losses)

    def loss(logits, targets):
        return gpt.CrossEntropy()(logits, targets, count)

    mine = [stage for stage in sorted(owner) if owner[stage] == rank]
    stages = [PipelineStage(theirs[stage], stage, len(owner), torch.device("cpu")) for stage in mine]
    run = getattr(schedules, THEIRS[name])(stages if len(stages) > 1 else stages[0], m, loss_fn=loss, scale_grads=False)

    def b():
        losses = []
        optimizers[1].zero_grad()
        run.step(*[tokens] * (0 in mine), **({"target": tokens, "losses": losses} if last in mine else {}))
        optimizers[1].step()
        return sum(x.item() for x in losses)

    for _ in range(2):
        x, y = a(), b()
        assert abs(x - y) <= 1e-5 * abs(y), (x, y)
    return a, b, count


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
    schedule = pipeline.make(name, p, microbatches)
    last, each = len(pipeline.owners(schedule)) - 1, seconds * p / len(pipeline.owners(schedule))
    weight, spans, gradient = torch.ones(4, 4, requires_grad=True), [], pipeline.weight_gradient

    class Slow(torch.autograd.Function):  # without the split, the weight's gradient comes with backward
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            time.sleep(each)
            return grad.clone()

    halved = any(action.kind == "W" for action in schedule[dist.get_rank()])

    def forward(stage, i, x):
        x = torch.ones(2, 4, requires_grad=True) if x is None else x
        whole = (i, stage) not in parts
        y = Sleep.apply(F.linear(Slow.apply(x) if whole else x, weight), each)
        return y.sum() if stage == last else y

    parts = {action[1:] for action in schedule[dist.get_rank()] if action.kind == "W"} if halved else set()

    def slow_gradient(x, grad):
        time.sleep(each)
        return gradient(x, grad)

    pipeline.weight_gradient = slow_gradient
    try:
        dist.barrier()
        pipeline.play(schedule, forward, (2, 4), torch.float32, "cpu", links, record=spans)
    finally:
        pipeline.weight_gradient = gradient
    rows = [None] * p
    dist.all_gather_object(rows, [(start, end) for start, end, _ in spans])
    begin, end = min(row[0][0] for row in rows), max(row[-1][1] for row in rows)
    work = 3 * microbatches * seconds * p
    return work / (p * (end - begin)), pipeline.utilisation(pipeline.simulate(schedule))


def demo(run):
    args = run.args
    warnings.simplefilter("ignore")
    say = print if run.rank == 0 and not args.quiet else lambda *_: None
    links = pipeline.make_links()
    if args.sleep:
        say(
            f"\n{run.world} ranks, 8 micro-batches; a rank's F, I and W of all its layers sleep {args.sleep * 1000:.0f} ms each"
        )
        say(f"{'':14s}{'measured':>10s}{'plan':>10s}   difference (target: 3 points)")
        for name in pipeline.SCHEDULES:
            measured, plan = sleeping(name, args.sleep, 8, links)
            say(f"{name:14s}{measured:10.1%}{plan:10.1%}   {100 * (plan - measured):4.1f} points")
        return
    say(f"{run.world} ranks, {args.layers} layers, {args.microbatches} micro-batches, {args.batch} sequences a step")
    say(benchmarks.HEAD)
    for name in THEIRS:
        a, b, tokens = rivals(name, args, links)
        say(benchmarks.versus(f"{name} / {THEIRS[name]}", a, b, tokens, args.steps, args.turns, 1.1))


def main():
    p = harness.Parser(__doc__)
    p.add_argument("--nproc", **harness.POSITIVE, help="ranks (default: 2)")
    p.add_argument("--layers", **harness.POSITIVE, default=8, help="of the GPT")
    p.add_argument("--batch", **harness.POSITIVE, default=16, help="sequences in a step")
    p.add_argument("--microbatches", **harness.POSITIVE, default=8, help="of a step")
    p.add_argument("--steps", **harness.POSITIVE, default=2, help="of a turn")
    p.add_argument("--turns", type=harness.count(2), default=9, metavar="N", help="of each pair of rivals")
    p.add_argument("--sleep", type=harness.real(0), default=0.0, metavar="SECONDS", help="instead: stages that sleep so long")
    p.add_argument("--quiet", action="store_true", help="print nothing but errors")
    p.set_defaults(device="cpu", backend="gloo", nproc=2, optimizer="adamw", lr=1e-3, weight_decay=0.1)
    harness.launch(demo, p.parse_args(), run=collectives.Rank)


if __name__ == "__main__":
    harness.script(main)
