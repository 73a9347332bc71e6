"""Ring attention beside PyTorch's own, on 2 ranks of this machine: python -m benchmarks.context

PyTorch's context_parallel() does not run on a CPU; the ring beneath it does, given a CPU kernel.
Both sides get the same q, k, v of causal attention. PyTorch's takes them contiguous, or balanced (a
zigzag, as ours). Then the memory of a training step of a GPT, on N ranks beside one process.
"""

import functools
import math
import os
import sys
import warnings

if not __package__:  # run as a script: python benchmarks/context.py
    sys.path[0] = os.path.dirname(sys.path[0])

import torch
import torch.distributed as dist
from torch.distributed.tensor.experimental._context_parallel import _attention as templates

import benchmarks
import context_parallel
import harness
import model as gpt
from harness import memory, presets
from harness.rank import launch
from proof.ledger import Ledger


class TheirRing(torch.autograd.Function):
    """q, k, v (B, H, T / N, D) of this rank's tokens through PyTorch's templates, with a CPU's
    flash kernel."""

    @staticmethod
    def forward(ctx, q, k, v, group):
        q, k, v = (t.contiguous() for t in (q, k, v))
        op = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        out, lse = templates._templated_ring_attention(group, 2, op, q, k, v, is_causal=True)[:2]
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.group = group
        return out

    @staticmethod
    def backward(ctx, grad):
        op = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
        saved = dict(
            zip(("query", "key", "value", "out", "logsumexp"), ctx.saved_tensors),
            is_causal=True,
            dropout_p=0.0,
        )
        grad = grad.contiguous()
        grads = templates._templated_ring_attention_backward(
            ctx.group, 2, op, grad_out=grad, grad_out_name="grad_out", **saved
        )
        return *grads[:3], None


def demo(run):
    args, group = run.args, dist.group.WORLD
    warnings.simplefilter("ignore")
    say = print if run.rank == 0 and not args.quiet else lambda *_: None
    here = args.tokens // run.world
    g = torch.Generator().manual_seed(run.rank)
    q, k, v, grad = (torch.randn(1, 8, here, 64, generator=g) for _ in range(4))
    rings = context_parallel.Ring(group), lambda *qkv: TheirRing.apply(*qkv, group)
    say(f"{run.world} ranks, {args.tokens} tokens, 8 heads of 64, float32")
    say(benchmarks.HEAD)

    def attend(ring, backward):
        out = ring(*(t.detach().requires_grad_(backward) for t in (q, k, v)))
        if backward:
            out.backward(grad)

    for what, backward in (("forward", False), ("forward and backward", True)):
        for pieces, balanced in (("contiguous", False), ("balanced", True)):
            templates._cp_options.enable_load_balance = balanced
            sides = (functools.partial(attend, ring, backward) for ring in rings)
            say(benchmarks.versus(f"{what}, theirs {pieces}", *sides, args.tokens, 1, args.turns))

    # Memory: what is alive at the peak of forward and backward of four blocks, beyond the weights
    config = presets.configure(family="llama", context=args.memory)
    model = gpt.build(config)
    whole = torch.randint(
        config.vocab, (1, args.memory), generator=torch.Generator().manual_seed(0)
    )

    def peak(model, tokens, where):
        ledger = Ledger({})
        known = [*model.parameters(), *(p.grad for p in model.parameters() if p.grad is not None)]
        ledger.watch(known)
        with ledger:
            model(tokens, where, targets=tokens, count=args.memory).backward()
        return ledger.peak

    peak(model, whole[:, :64], torch.arange(64))  # makes the gradients' memory
    alone = peak(model, whole, torch.arange(args.memory))
    for kind in context_parallel.KINDS[:3]:
        context_parallel.parallelize(model, group, kind)
        where = model.blocks["0"].attn.core.positions(args.memory)
        mine = torch.tensor(peak(model, context_parallel.shard(whole, where), where))
        dist.all_reduce(mine, op=dist.ReduceOp.MAX)
        share = mine.item() / alone * run.world
        text = f"activations at the peak, {args.memory} tokens, {kind}"
        say(
            f"{text}: {mine.item() / 1e6:.0f} MB a rank, {share:.2f} of 1/N of one process's "
            f"{alone / 1e6:.0f} MB"
        )
        for block in model.blocks.values():
            block.attn.core = gpt.AttentionCore()


def main():
    p = harness.Parser(__doc__)
    p.add_argument("--nproc", **harness.POSITIVE, help="ranks (default: 2)")
    p.add_argument("--tokens", **harness.POSITIVE, default=4096, help="of the sequence")
    p.add_argument(
        "--memory",
        **harness.POSITIVE,
        default=8192,
        help="tokens of the sequence whose memory is measured",
    )
    p.add_argument(
        "--turns", type=harness.count(2), default=9, metavar="N", help="of each pair of rivals"
    )
    p.add_argument("--quiet", action="store_true", help="print nothing but errors")
    p.set_defaults(device="cpu", backend="gloo", nproc=2)
    args = p.parse_args()

    def check(world):
        heads = presets.configure().heads
        if world == 1 or heads % world:
            raise harness.Refused(f"--nproc {world}: give 2 or more that divide {heads} heads")
        for flag, tokens in (("--tokens", args.tokens), ("--memory", args.memory)):
            if tokens % (2 * world) or tokens < 64:
                unit = math.lcm(64, 2 * world)
                raise harness.Refused(f"{flag} {tokens}: give a multiple of {2 * world}, as {unit}")
        # q, k, v and a gradient of 8 heads of 64, float32
        memory.check_ranks(args, world, max(4 * args.tokens // world * 8 * 64 * 4, args.memory * 8))

    launch(demo, args, check=check)


if __name__ == "__main__":
    harness.script(main)
