"""zero.py beside PyTorch's DDP and FSDP2, same GPT, on 2 ranks of this machine: python -m benchmarks.zero

AdamW, fused, on both sides."""

import functools
import warnings

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import benchmarks
import collectives
import harness
import model as gpt
import zero


def ours(stage, args, **options):
    """A function that takes one training step."""
    model = gpt.build(gpt.configure(args.preset))
    optimizer = harness.make_optimizer
    sharded = zero.ZeRO(model, dist.group.WORLD, stage, lambda pieces: optimizer(pieces, args), **options)

    def step(tokens, targets, count):
        sharded.zero_grad()
        model(tokens, targets=targets, count=count).backward()
        sharded.finish()
        sharded.step()

    return step


def theirs(args, reshard=None):
    """The same with DistributedDataParallel, or, where `reshard` says whether blocks are freed after forward, with FSDP2."""
    model = wrapped = gpt.build(gpt.configure(args.preset))
    if reshard is None:
        wrapped = DistributedDataParallel(model, gradient_as_bucket_view=True)
    else:
        for block in model.blocks.values():
            fully_shard(block, reshard_after_forward=reshard)
        fully_shard(model)
    optimizer = harness.make_optimizer(model.parameters(), args)

    def step(tokens, targets, count):
        optimizer.zero_grad()
        wrapped(tokens, targets=targets, count=count).backward()
        optimizer.step()

    return step


def demo(run):
    args = run.args
    warnings.simplefilter("ignore")
    say = print if run.rank == 0 and not args.quiet else lambda *_: None
    config = gpt.configure(args.preset)
    tokens = torch.randint(config.vocab, (args.batch // run.world, config.context))
    batch, count = (tokens, tokens, args.batch * config.context), args.batch * config.context
    native = dict(reduce_scatter=zero.native_reduce_scatter)
    rivals = [
        ("stage 0 / DDP", ours(0, args), theirs(args), 1.0),
        ("stage 2 / FSDP2, blocks kept after forward", ours(2, args), theirs(args, False), 1.1),
        ("stage 3 / FSDP2, blocks freed after forward", ours(3, args), theirs(args, True), 1.1),
        ("stage 3, kept / FSDP2, blocks kept", ours(3, args, reshard=False), theirs(args, False), None),
        ("stage 2, direct / gloo's reduce-scatter", ours(2, args), ours(2, args, **native), None),
        ("stage 3, direct / gloo's reduce-scatter", ours(3, args), ours(3, args, **native), None),
        ("stage 1 / stage 0", ours(1, args), ours(0, args), None),
        ("stage 2 / stage 0", ours(2, args), ours(0, args), None),
        ("stage 3 / stage 0", ours(3, args), ours(0, args), None),
    ]
    say(f"{run.world} ranks, {args.preset}: {config.parameters():,} parameters, {count:,} tokens a step")
    say("tokens/s; ratio: median (quartiles)")
    say(benchmarks.HEAD)
    for what, a, b, target in rivals:
        pair = functools.partial(a, *batch), functools.partial(b, *batch)
        say(benchmarks.versus(what, *pair, count, args.steps, args.turns, target))


def main():
    p = harness.Parser(__doc__)
    p.add_argument("--nproc", **harness.POSITIVE, help="ranks (default: 2)")
    p.add_argument("--preset", default="tiny", help="named size: " + ", ".join(gpt.PRESETS))
    p.add_argument("--batch", **harness.POSITIVE, default=16, help="sequences in the global batch")
    p.add_argument("--steps", **harness.POSITIVE, default=3, help="of a turn")
    p.add_argument("--turns", type=harness.count(2), default=15, metavar="N", help="of each pair of rivals")
    p.add_argument("--quiet", action="store_true", help="print nothing but errors")
    p.set_defaults(device="cpu", backend="gloo", nproc=2, optimizer="adamw", lr=1e-3, weight_decay=0.1)
    harness.launch(demo, p.parse_args(), run=collectives.Rank)


if __name__ == "__main__":
    harness.script(main)
