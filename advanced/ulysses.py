"""Ulysses: context parallelism that trades tokens for heads, around each attention.

Read context_parallel.py first: this file uses its cut of the tokens, and its ring. Each of N ranks
holds T / N tokens of every sequence. Attention works on each head by itself. So all-to-alls bring a
rank all tokens of H / N heads, it computes attention as one process would, and an all-to-all brings
every token's result home. A rank has whole sequences of its heads, so causal work is even without a
zigzag. With 2 ranks, 4 heads (a, b, c, d) and 6 tokens:

                    q, k, v: all heads      all-to-all: all tokens     all-to-all back
                    of 3 tokens             of 2 heads                 all heads of 3 tokens
    rank 0          a0 a1 a2  b0 b1 b2      a0 a1 a2 a3 a4 a5          a0 a1 a2  b0 b1 b2
                    c0 c1 c2  d0 d1 d2      b0 b1 b2 b3 b4 b5          c0 c1 c2  d0 d1 d2
    rank 1          a3 a4 a5  b3 b4 b5      c0 c1 c2 c3 c4 c5          a3 a4 a5  b3 b4 b5
                    c3 c4 c5  d3 d4 d5      d0 d1 d2 d3 d4 d5          c3 c4 c5  d3 d4 d5

Sent      Q, K, V and the result once in forward, and their gradients in backward. Per rank and
          block 4 r (C + C_kv) e B T / N bytes for B sequences of T tokens: r = (N-1)/N, C and C_kv
          are the widths of Q and K (copies of kv-heads included), e bytes per element. A ring sends
          (4 r e + 2 a) C_kv B T. So with many ranks Ulysses sends less, but its messages can't
          overlap with attention. Once a step: 2 r P e, to all-reduce all P parameters' gradients.
Backward  An all-to-all only moves data. So its backward is the all-to-all the other way.
Limits    N must divide the heads. Where it doesn't divide the kv-heads, copies of them travel.
          More ranks than heads: N = R x U. U consecutive ranks (one machine) trade heads, and the
          R ranks with the same place in their groups form a ring. The U ranks of a group share the
          tokens that one rank of the ring would hold.

    torchrun --nproc_per_node=4 -m advanced.ulysses     (needs model.py and context_parallel.py)

Jacobs et al. 2023, DeepSpeed Ulysses, arXiv:2309.14509; with rings: Fang and Zhao 2024, USP,
arXiv:2405.07719.
"""

import argparse
import math

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.autograd.function import once_differentiable

from context_parallel import Ring, held_positions

# --- the plain form: consecutive tokens, and N divides the heads and the kv-heads


def ulysses_attention(q, k, v, attention, group):
    """q (B, H, T', D), k and v (B, H_kv, T', D) of this rank's T' consecutive tokens -> attention
    to all ranks' tokens, (B, H, T', D). attention(q, k, v): that of one process."""
    q, k, v = (Exchange.apply(x, group, 1, 2) for x in (q, k, v))  # (B, H / N, N T', D)
    return Exchange.apply(attention(q, k, v), group, 2, 1)


class Exchange(torch.autograd.Function):
    """An all-to-all: cuts dimension `cut` of x into N pieces, one for each rank, and joins those
    that arrive along dimension `join`."""

    @staticmethod
    def forward(ctx, x, group, cut, join):
        ctx.group, ctx.cut, ctx.join = group, cut, join
        n = dist.get_world_size(group)
        if x.shape[cut] % n:
            raise ValueError(f"{n} ranks do not divide the {x.shape[cut]} heads of a tensor")
        pieces = torch.stack(x.chunk(n, dim=cut))
        received = torch.empty_like(pieces)
        dist.all_to_all_single(received, pieces, group=group)
        return torch.cat(received.unbind(0), dim=join)

    @staticmethod
    @once_differentiable  # a second derivative is an error
    def backward(ctx, grad):
        return Exchange.apply(grad, ctx.group, ctx.join, ctx.cut), None, None, None


def local_attention(q, k, v):
    """Causal attention of one process: q (B, H, T, D), k and v (B, H_kv, T, D) -> (B, H, T, D)."""
    options = dict(is_causal=True, enable_gqa=q.shape[1] != k.shape[1])
    return nn.functional.scaled_dot_product_attention(q, k, v, **options)


# --- any number of kv-heads, one message for k and v, and rings


class Ulysses(nn.Module):
    """In place of attention's core: heads are dealt out over `group`, and `core` computes attention
    of this rank's heads for all tokens. Used as context_parallel.py's Ring is. `core` is one of

    - local_attention or the like: it gets q (B, H / N, N T', D), k and v, and returns q's shape.
      Mask, scale and dropout are its own
    - a ring: with R x U ranks and ulysses_group, ring_group = make_groups(R) this is
      Ulysses(ulysses_group, Ring(ring_group))"""

    def __init__(self, group, core=local_attention):
        super().__init__()
        self.group, self.rank, self.n = group, dist.get_rank(group), dist.get_world_size(group)
        self.core = core

    def positions(self, length, *starts):
        """(T',): T / N consecutive positions; with a ring this rank's 1/U of those that a rank of
        the ring would hold without Ulysses. starts: for a ring of packed_documents.py."""
        if not isinstance(self.core, Ring):
            return held_positions(length, self.rank, self.n, zigzag=False)
        return self.core.positions(length, *starts, multiple=self.n).chunk(self.n)[self.rank]

    def forward(self, q, k, v, *starts):
        copies = self.n // math.gcd(k.shape[1], self.n)  # N divides H_kv * copies
        kv = torch.cat((k, v), dim=-1)  # (B, H_kv, T', 2 D)
        kv = kv.repeat_interleave(copies, dim=1)  # (B, H_kv * copies, T', 2 D)
        q = Exchange.apply(q, self.group, 1, 2)  # (B, H / N, N T', D)
        k, v = Exchange.apply(kv, self.group, 1, 2).chunk(2, dim=-1)
        return Exchange.apply(self.core(q, k, v, *starts), self.group, 2, 1)


def make_groups(ring_ranks):
    """This rank's groups among N = R x U ranks: of U consecutive ranks, to trade heads, and its
    ring of R. All ranks call it."""
    ranks = torch.arange(dist.get_world_size()).view(ring_ranks, -1)  # (R, U)
    ulysses_group, _ = dist.new_subgroups_by_enumeration(ranks.tolist())
    ring_group, _ = dist.new_subgroups_by_enumeration(ranks.T.tolist())
    return ulysses_group, ring_group


# --- demo ---

if __name__ == "__main__":  # importing this file needs no model.py
    from context_parallel import train
    from model import Config, join_ranks, leave


def main():
    parser = argparse.ArgumentParser(description="train a GPT with each form, and prove it")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--context", type=int, default=30, help="tokens of a sequence")
    parser.add_argument("--rings", type=int, default=2, help="ranks of a ring, in the last form")
    args = parser.parse_args()
    device = join_ranks()
    n, group = dist.get_world_size(), dist.group.WORLD
    if n % args.rings and dist.get_rank() == 0:
        print(f"no form with rings: rings of {args.rings} do not divide {n} ranks\n")
    forms = {"the plain form": PlainUlysses(group), "Ulysses": Ulysses(group)}
    if n % args.rings == 0:
        ulysses_group, ring_group = make_groups(args.rings)
        forms[f"Ulysses with rings of {args.rings}"] = Ulysses(ulysses_group, Ring(ring_group))
    for name, core in forms.items():
        kv_heads = 2 * n if name == "the plain form" else 2
        sizes = dict(layers=2, heads=2 * n, kv_heads=kv_heads, width=16 * n, context=args.context)
        name = f"{name}, {2 * n} heads, {kv_heads} kv-heads"
        # context_parallel.py's training loop
        train(name, core, Config(**sizes), ulysses_bytes, args.steps, device)
    leave()


class PlainUlysses(Ulysses):
    def forward(self, q, k, v):
        return ulysses_attention(q, k, v, self.core, self.group)


def ulysses_bytes(config, core, tokens):
    """What a layer sends, as text and in bytes. tokens: B T', of this rank."""
    n, u, e = dist.get_world_size(), core.n, 8
    head = config.head_dim
    c, c_kv = config.heads * head, math.lcm(config.kv_heads, u) * head  # C_kv: with copies
    sent, text = 4 * (u - 1) / u * (c + c_kv) * e * tokens, "(4 r (C + C_kv) e B T / N"
    if isinstance(core.core, Ring):  # r: above (U-1)/U, here (R-1)/R
        hops = 4 * (1 - u / n) + (2 if n > u else 0)  # a ring of one rank sends nothing
        sent += hops * c_kv / u * e * tokens * n
        text += " + (4 r e + 2 a) B T C_kv / U"
    return f"{text})", sent


if __name__ == "__main__":
    main()
