"""Context parallelism without a ring: each rank gathers the keys and values of all tokens.

Read context_parallel.py first: this file uses its cut of the tokens, and its tiles. Each of N ranks
holds some tokens of every sequence. In place of N - 1 hops around a ring one all-gather brings
every rank all keys and values, and it attends to them with its own queries:

    rank 0    q0  k0 v0        all-gather    q0  k0 k1 k2  v0 v1 v2      attention of q0
    rank 1    q1  k1 v1      ------------>   q1  k0 k1 k2  v0 v1 v2      attention of q1
    rank 2    q2  k2 v2                      q2  k0 k1 k2  v0 v1 v2      attention of q2

Sent      Per rank and block: K and V in forward, 2 r B T C_kv e bytes for B sequences of T tokens:
          r = (N-1)/N, C_kv is the width of K, e bytes per element. Their gradients in backward,
          2 r B T C_kv e, and in the form in tiles, whose sums are float32 at least, 2 r B T C_kv a
          with a = max(e, 4). A ring sends (4 r e + 2 a) B T C_kv in all. Once a step: 2 r P e, to
          all-reduce the gradients of all P parameters.
Backward  Every rank used every key. So a key's gradient is the sum of all ranks' parts: a
          reduce-scatter adds them up, and gives each rank the gradients of its own keys.
Limits    Each block holds all keys and values from forward to backward. Use it where K and V are
          small: in Llama 3 405B 16 query heads share a kv-head. Nothing overlaps with the messages.

    torchrun --nproc_per_node=4 -m advanced.gather_context  (needs model.py and context_parallel.py)

Llama Team 2024, The Llama 3 Herd of Models, arXiv:2407.21783, section 3.3.2.
"""

import argparse

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.autograd.function import once_differentiable  # a second derivative is an error

from context_parallel import Ring, attend_to_all, tile_gradients

# torch 2.13 renamed them; older versions know only the second name
all_gather_into_tensor = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_tensor = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

# --- the plainest form: consecutive tokens, and one masked attention


def gathered_attention(q, k, v, group):
    """Causal attention of this rank's queries to all keys. q (B, H, T', D), k and v
    (B, H_kv, T', D): T' consecutive tokens, rank 0's are the first -> (B, H, T', D)."""
    k, v = GatherKeys.apply(k, group), GatherKeys.apply(v, group)  # (B, H_kv, N T', D)
    length, first = q.shape[2], dist.get_rank(group) * q.shape[2]
    visible = torch.ones(length, k.shape[2], dtype=torch.bool, device=q.device).tril(first)
    options = dict(attn_mask=visible, enable_gqa=q.shape[1] != k.shape[1])
    return F.scaled_dot_product_attention(q, k, v, **options)


class GatherKeys(torch.autograd.Function):
    """All ranks' x in order: (B, H_kv, T', D) -> (B, H_kv, N T', D)."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        gathered = x.new_empty(dist.get_world_size(group), *x.shape)  # (N, B, H_kv, T', D)
        all_gather_into_tensor(gathered.flatten(0, 1), x.contiguous(), group=group)  # into a view
        return torch.cat(gathered.unbind(0), dim=2)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        parts = torch.stack(grad.chunk(dist.get_world_size(ctx.group), dim=2))
        own = torch.empty_like(parts[0])
        reduce_scatter_tensor(own, parts.flatten(0, 1), group=ctx.group)
        return own, None


# --- in tiles: what no query sees is not computed, work is even, and sums are float32 at least


class Gather(Ring):
    """In place of attention's core: attention to gathered keys and values. Used as Ring is."""

    def attend(self, q, k, v, tiles):
        return GatheredAttention.apply(q, k, v, self.group, tiles)


class GatheredAttention(torch.autograd.Function):
    """As RingAttention. But each rank gathers all keys and values, and keeps them for backward."""

    @staticmethod
    def forward(ctx, q, k, v, group, tiles):
        kv = torch.stack((k, v))
        gathered = kv.new_empty(dist.get_world_size(group), *kv.shape)  # (N, 2, B, H_kv, T', D)
        all_gather_into_tensor(gathered.flatten(0, 1), kv, group=group)
        out, lse = attend_to_all(q, enumerate(gathered), tiles)
        ctx.save_for_backward(q, gathered, out, lse)
        ctx.group, ctx.tiles = group, tiles
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        q, gathered, out, lse = ctx.saved_tensors
        dq = torch.zeros_like(q, dtype=lse.dtype)
        dkv = torch.zeros_like(gathered, dtype=lse.dtype)
        for source, kv in enumerate(gathered):
            for tile in ctx.tiles[source]:
                dq_tile, dk, dv = tile_gradients(grad, q, kv, out, lse, tile)
                dq[:, :, tile.queries] += dq_tile
                dkv[source][:, :, :, tile.keys] += torch.stack((dk, dv))
        own = torch.empty_like(dkv[0])  # the sums, over the ranks, for this rank's keys
        reduce_scatter_tensor(own, dkv.flatten(0, 1), group=ctx.group)
        return dq.to(q.dtype), *own.to(q.dtype), None, None


# --- demo ---

if __name__ == "__main__":  # importing this file needs no model.py
    from context_parallel import train
    from model import Config, join_ranks, leave


def main():
    parser = argparse.ArgumentParser(description="train a GPT with each form, and prove it")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--context", type=int, default=30, help="tokens of a sequence")
    parser.add_argument("--kv-heads", type=int, default=2, help="of 4")
    args = parser.parse_args()
    device, group = join_ranks(), dist.group.WORLD
    sizes = dict(layers=2, heads=4, kv_heads=args.kv_heads, width=32, context=args.context)
    plain, tiles = PlainGather(group, zigzag=False), Gather(group)
    for name, core in ("the plain form", plain), ("in tiles, in a zigzag", tiles):
        # context_parallel.py's training loop
        train(name, core, Config(**sizes), gather_bytes, args.steps, device)
    leave()


class PlainGather(Ring):
    def attend(self, q, k, v, tiles):
        return gathered_attention(q, k, v, self.group)


def gather_bytes(config, core, tokens):
    """What a layer sends, as text and in bytes. tokens: B T', of this rank."""
    n = core.n
    keys = n * tokens * config.kv_heads * config.head_dim * 8  # B T C_kv e; a is e
    return "(2 r e + 2 r a) B T C_kv", 4 * (n - 1) / n * keys


if __name__ == "__main__":
    main()
