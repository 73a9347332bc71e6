"""Ring attention beside PyTorch's own, on 2 ranks of this machine: python -m benchmarks.context

PyTorch's context_parallel() does not run on a CPU; the ring beneath it does, given a CPU kernel.
Both sides get the same q, k, v of causal attention. PyTorch's takes them contiguous, or balanced (a
zigzag, as ours). Then the memory of a training step of a GPT, on N ranks beside one process.
"""

import functools
import warnings

import torch
import torch.distributed as dist
from torch.distributed.tensor.experimental._context_parallel import _attention as templates

import benchmarks
import context_parallel
import harness
import model as gpt
from harness import initialize, presets
from harness.start import launch
from proof.ledger import Ledger

TOKENS = 4096  # of the sequence that is timed
TRAINED = 8192  # of the sequence whose memory is measured


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
        saved = dict(zip(("query", "key", "value", "out", "logsumexp"), ctx.saved_tensors))
        given = dict(grad_out=grad.contiguous(), grad_out_name="grad_out", **saved)
        grads = templates._templated_ring_attention_backward(
            ctx.group, 2, op, **given, is_causal=True, dropout_p=0.0
        )
        return *grads[:3], None


def demo(run):
    group, say = dist.group.WORLD, run.print
    warnings.simplefilter("ignore")
    here = TOKENS // run.world
    g = torch.Generator().manual_seed(run.rank)
    q, k, v, grad = (torch.randn(1, 8, here, 64, generator=g) for _ in range(4))
    rings = context_parallel.Ring(group), lambda *qkv: TheirRing.apply(*qkv, group)
    say(f"{run.world} ranks, {TOKENS} tokens, 8 heads of 64, float32")
    say(benchmarks.HEAD)

    def attend(ring, backward):
        out = ring(*(t.detach().requires_grad_(backward) for t in (q, k, v)))
        if backward:
            out.backward(grad)

    for what, backward in (("forward", False), ("forward and backward", True)):
        for pieces, balanced in (("contiguous", False), ("balanced", True)):
            templates._cp_options.enable_load_balance = balanced
            sides = (functools.partial(attend, ring, backward) for ring in rings)
            say(benchmarks.versus(f"{what}, theirs {pieces}", *sides, TOKENS, 1, run.args.turns))
    activations(run)


def activations(run):
    """Print what is alive at the peak of forward and backward of four blocks, beyond the
    weights."""
    length, config = TRAINED, presets.configure(family="llama", context=TRAINED)
    model = initialize.build(config)
    g = torch.Generator().manual_seed(0)
    whole = torch.randint(config.vocab, (1, length), generator=g)

    def peak(model, tokens, where):
        ledger = Ledger({})
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        ledger.watch([*model.parameters(), *gradients])
        with ledger:
            model(tokens, where, targets=tokens, target_count=length).backward()
        return ledger.peak

    peak(model, whole[:, :64], torch.arange(64))  # makes the gradients' memory
    alone = peak(model, whole, torch.arange(length))
    for kind in context_parallel.KINDS[:3]:
        context_parallel.parallelize_context(model, dist.group.WORLD, kind)
        where = model.blocks["0"].attn.core.positions(length)
        most = max(run.gather(peak(model, context_parallel.shard_sequence(whole, where), where)))
        share = f"{most / alone * run.world:.2f} of 1/N of one process's {alone / 1e6:.0f} MB"
        what = f"activations at the peak, {length} tokens, {kind}"
        run.print(f"{what}: {most / 1e6:.0f} MB a rank, {share}")
        for block in model.blocks.values():
            block.attn.core = gpt.AttentionCore()


def check(world):
    heads = presets.configure().heads
    if world == 1 or heads % world:
        raise harness.Refused(f"--nproc {world}: give 2 or more that divide {heads} heads")


def main():
    launch(demo, benchmarks.parser(__doc__, nproc=2, turns=9).parse_args(), check=check)


if __name__ == "__main__":
    harness.script(main)
