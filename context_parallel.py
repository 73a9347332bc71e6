"""Context parallelism: each rank holds some tokens of every sequence, through the whole model.

Every rank has all weights. Only attention needs other ranks' tokens: the queries stay, and keys and
values go around a ring of N ranks. kv2 are the keys and values of rank 2:

    step       0     1     2     3
    rank 0    kv0   kv3   kv2   kv1
    rank 1    kv1   kv0   kv3   kv2
    rank 2    kv2   kv1   kv0   kv3
    rank 3    kv3   kv2   kv1   kv0

In each step a rank computes one tile of attention, its queries with one rank's keys, while the next
keys travel. The tiles add up to exact attention, each weighted by its share of the softmax's
denominator (add_tile).

Split     A late token sees more keys than an early one. So each rank has an early and a late chunk:
          chunks 0 1 2 3 4 5 6 7 are on ranks 0 1 2 3 3 2 1 0 (a zigzag).
Sent      Per rank and block: K and V make N - 1 hops in forward, and again in backward. dK and dV,
          float32 at least, make N hops. (4 r e + 2 a) B T C_kv bytes for B sequences of T tokens:
          r = (N-1)/N, C_kv is the width of K, e bytes per element, a = max(e, 4).
          Once a step: 2 r P e, to all-reduce the gradients of all P parameters.
Backward  A tile's gradients need no other tile, only two numbers per query. lse is the logarithm of
          its softmax's denominator over all keys: e^(score - lse) is the final probability. And
          softmax's backward subtracts grad . out. So forward keeps lse and out.
Limits    Worth it where one sequence's activations don't fit on a rank. A tile should take longer
          than the next keys take to arrive (docs/learn/long-sequences.md). Two other ways, which
          send less on many ranks, or for few kv-heads: advanced/ulysses.py and gather_context.py.

    torchrun --nproc_per_node=4 context_parallel.py    (needs model.py, to train and prove itself)

Liu et al. 2023, arXiv:2310.01889. The zigzag: zhuzilin/ring-flash-attention, issue 2 (2024).
"""

import argparse
import math
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.autograd.function import once_differentiable  # a second derivative is an error

# --- the ring in its plainest form: consecutive tokens, and nothing overlaps


class PlainRingAttention(torch.autograd.Function):
    """Causal attention of this rank's queries to all keys. q, k, v (B, H, T', D): T' consecutive
    tokens, rank 0's are the first of the sequence. Sums are in q's dtype: give it float32.

        y = PlainRingAttention.apply(q, k, v, group)"""

    @staticmethod
    def forward(ctx, q, k, v, group):
        rank, n = dist.get_rank(group), dist.get_world_size(group)
        kv = torch.stack((k, v))
        out, lse = torch.zeros_like(q), q.new_full(q.shape[:3], -math.inf)
        for step in range(n):
            source = rank - step  # whose keys kv are. Below 0: a higher rank's, which are all later
            if source >= 0:
                add_tile(out, lse, *attention(q, *kv, causal=source == rank))
            if step < n - 1:
                kv = pass_on(kv, group)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.group = group
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        q, k, v, out, lse = ctx.saved_tensors
        rank, n = dist.get_rank(ctx.group), dist.get_world_size(ctx.group)
        kv = torch.stack((k, v))
        dq, dkv = torch.zeros_like(q), torch.zeros_like(kv)
        for step in range(n):
            source = rank - step
            if source >= 0:
                causal = source == rank
                dq_tile, dk, dv = attention_gradients(grad, q, *kv, out, lse, causal)
                dq += dq_tile
                dkv += torch.stack((dk, dv))
            if step < n - 1:
                kv = pass_on(kv, ctx.group)
            dkv = pass_on(dkv, ctx.group)  # gradients travel with their keys
        return dq, *dkv, None  # after n hops they are at home


def attention(q, k, v, causal):
    """Attention to some of the keys: the result (B, H, Tq, D), and for each query the logarithm of
    its softmax's denominator, lse (B, H, Tq)."""
    scores = masked_scores(q, k, causal)
    return scores.softmax(-1) @ v, scores.logsumexp(-1)


def add_tile(out, lse, tile_out, tile_lse):
    """Add attention to other keys, in place. The denominators e^lse and e^tile_lse add up to
    e^total. Each query must see at least one of the tile's keys: otherwise it gets NaN."""
    total = torch.logaddexp(lse, tile_lse)
    out.mul_((lse - total).exp_().unsqueeze(-1))
    out.add_(tile_out * (tile_lse - total).exp_().unsqueeze(-1))
    lse.copy_(total)


def attention_gradients(grad, q, k, v, out, lse, causal):
    """dq, dk and dv of some of the keys (Dao et al. 2022, FlashAttention, arXiv:2205.14135,
    appendix B). grad, out and lse belong to the result over all keys."""
    p = (masked_scores(q, k, causal) - lse.unsqueeze(-1)).exp()  # (B, H, Tq, Tk), final
    dp = grad @ v.mT
    # Softmax's backward subtracts the sum of p dp over all keys: grad . out, since out = sum p v
    ds = p * (dp - (grad * out).sum(-1, keepdim=True)) / math.sqrt(q.shape[-1])
    return ds @ k, ds.mT @ q, p.mT @ grad


def masked_scores(q, k, causal):
    """q k^T / sqrt(D), (B, H, Tq, Tk). causal: queries and keys are of the same tokens; -inf where
    the key is later."""
    scores = q @ k.mT / math.sqrt(q.shape[-1])
    if causal:
        scores += torch.full_like(scores[0, 0], -math.inf).triu(1)
    return scores


def pass_on(tensor, group):
    """Send a tensor to the next rank of the ring. Returns what the rank before has sent."""
    received = torch.empty_like(tensor)
    for message in start_hop(tensor, received, group):
        message.wait()
    return received


def start_hop(sent, received, group):
    """Start to send to the next rank and to receive from the one before. Returns the messages, to
    wait for."""
    rank, n = dist.get_rank(group), dist.get_world_size(group)
    if n == 1:  # gloo connects no rank with itself
        received.copy_(sent)
        return []
    send = dist.P2POp(dist.isend, sent, group=group, group_peer=(rank + 1) % n)
    receive = dist.P2POp(dist.irecv, received, group=group, group_peer=(rank - 1) % n)
    return dist.batch_isend_irecv([send, receive])


# --- for any model: even work, any number of kv-heads, and the next keys travel meanwhile


class Ring(nn.Module):
    """In place of attention's core: ring attention over `group`, q (B, H, T', D), k and v
    (B, H_kv, T', D) -> (B, H, T', D). It has no parameters: one serves all layers.

    1. positions(T): which of a sequence's T positions this rank holds, (T',), for embeddings and
       rotations. Shift the targets, then cut tokens and targets by shard_sequence.
    2. The loss is the sum over this rank's targets, divided by the number of all ranks' targets.
    3. After the last micro-batch sum each gradient over the group. The demo shows all three.

    Attention is causal and scaled by 1/sqrt(D): no dropout, no other mask, no second derivative. B
    and T' must be the same on all ranks: otherwise the group aborts or hangs. Beside another
    technique: docs/use/two-techniques.md. zigzag=False: consecutive tokens per rank, and the last
    rank has most of the work.

    These give wrong numbers without an error:
    - tokens that are cut otherwise, as by chunk(): the rank alone says which keys a query sees
    - q, k and v as (B, T', H, D)
    - in transformers a mask, which a ring never sees, and position_ids that were left out. Have
      your attention function raise for both, as docs/use/transformers.md does"""

    def __init__(self, group, zigzag=True):
        super().__init__()
        self.group, self.rank, self.n = group, dist.get_rank(group), dist.get_world_size(group)
        self.zigzag = zigzag

    def positions(self, length, multiple=1):
        """(T',): positions from `length` on are padding."""
        return held_positions(length, self.rank, self.n, self.zigzag, multiple)

    def forward(self, q, k, v):
        self.check(q, k, v)
        return self.attend(q, k, v, ring_tiles(self.rank, self.n, q.shape[2], self.zigzag))

    def attend(self, q, k, v, tiles):  # gather_context.py has another
        return RingAttention.apply(q, k, v, self.group, tiles)

    def check(self, q, k, v, chunks=2):  # packed_documents.py has 8 chunks
        if q[:, 0].shape != k[:, 0].shape or q.shape[1] % k.shape[1] or q.dtype != k.dtype:
            raise ValueError("give q (B, H, T', D), k, v (B, H_kv, T', D), H a multiple of H_kv")
        if self.zigzag and q.shape[2] % chunks:
            raise ValueError(f"not {chunks} equal chunks: cut sequences by positions()")


def shard_sequence(x, held, fill=0):
    """The columns of x (B, T, ...) at positions `held` (T',) of T -> (B, T', ...), with `fill` for
    padding. For targets `fill` must be the value that the loss ignores."""
    held = held.to(x.device)
    padding = (held >= x.shape[1]).view(-1, *[1] * (x.dim() - 2))
    return x[:, held.clamp(max=x.shape[1] - 1)].masked_fill(padding, fill)


def held_positions(length, rank, n, zigzag=True, multiple=1):
    """The positions that a rank of a ring of n holds. A chunk's number of tokens is rounded up to a
    multiple of `multiple`: so many ranks share it in advanced/ulysses.py."""
    chunks = [rank, 2 * n - 1 - rank] if zigzag else [rank]
    size = math.ceil(length / (n * len(chunks) * multiple)) * multiple  # tokens per chunk
    return torch.cat([torch.arange(chunk * size, (chunk + 1) * size) for chunk in chunks])


class Tile(NamedTuple):
    """Queries of this rank, and keys of one rank. Each query sees all of the keys; if causal, those
    up to its own: then queries and keys are of the same tokens."""

    queries: slice
    keys: slice
    causal: bool


def ring_tiles(rank, n, tokens, zigzag=True):
    """tiles[r]: this rank's queries with the keys of rank r. tokens: T'. In a zigzag each tile has
    half of the T' x T' pairs, so in every step all ranks have equal work."""
    every, early, late = slice(0, tokens), slice(0, tokens // 2), slice(tokens // 2, tokens)
    own = [Tile(every, every, causal=True)]  # a rank's tokens are in order
    if not zigzag:
        return [[Tile(every, every, causal=False)]] * rank + [own] + [[]] * (n - 1 - rank)
    lower = [Tile(every, early, causal=False)]  # their late chunk is later than all queries here
    higher = [Tile(late, every, causal=False)]  # early queries are earlier than all their keys
    return [lower] * rank + [own] + [higher] * (n - 1 - rank)


# --- the ring in full: the plain form in tiles, and what the next step needs travels meanwhile


def attend_to_all(q, kv_by_rank, tiles):
    """Attention of this rank's queries to all keys: the result and its lse. kv_by_rank yields
    (rank, its keys and values). tiles[rank]: the tiles with that rank's keys."""
    sum_dtype = torch.promote_types(q.dtype, torch.float32)  # float32 at least, for lse as well
    out = torch.zeros_like(q, dtype=sum_dtype)
    lse = out.new_full(q.shape[:3], -math.inf)
    for source, kv in kv_by_rank:
        for tile in tiles[source]:
            at = tile.queries
            add_tile(out[:, :, at], lse[:, :, at], *tile_attention(q, kv, tile))
    return out.to(q.dtype), lse


class RingAttention(torch.autograd.Function):
    """q (B, H, T', D), k and v (B, H_kv, T', D) of this rank's T' tokens -> attention to all ranks'
    keys (B, H, T', D). In backward keys and values travel again, and with them the sums of their
    gradients."""

    @staticmethod
    def forward(ctx, q, k, v, group, tiles):
        out, lse = attend_to_all(q, around_the_ring(torch.stack((k, v)), group), tiles)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.group, ctx.tiles = group, tiles
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        q, k, v, out, lse = ctx.saved_tensors
        kv, receive = torch.stack((k, v)), None
        dq, dkv = torch.zeros_like(q, dtype=lse.dtype), torch.zeros_like(kv, dtype=lse.dtype)
        for source, source_kv in around_the_ring(kv, ctx.group):
            # In each step: compute this step's tiles, wait for dkv (the sums of the ranks before),
            # add the tiles to it, send it on. So dkv travels while the next tiles are computed
            dkv_tiles = []
            for tile in ctx.tiles[source]:
                dq_tile, *dkv_tile = tile_gradients(grad, q, source_kv, out, lse, tile)
                dq[:, :, tile.queries] += dq_tile
                dkv_tiles.append(torch.stack(dkv_tile))
            if receive:  # not in the first step: dkv has not travelled, and is zeros
                dkv = receive()
            for tile, dkv_tile in zip(ctx.tiles[source], dkv_tiles):
                dkv[:, :, :, tile.keys] += dkv_tile
            receive = start_passing(dkv, ctx.group)
        dkv = receive()  # after n hops: the sums for this rank's own keys
        return dq.to(q.dtype), *dkv.to(k.dtype), None, None


def around_the_ring(kv, group):
    """Yield (rank, its keys and values) for all ranks, beginning with this one. While the caller
    computes with these, the next ones travel."""
    rank, n = dist.get_rank(group), dist.get_world_size(group)
    spare = torch.empty_like(kv)
    for step in range(n - 1):
        receive = start_passing(kv, group, spare)
        yield (rank - step) % n, kv
        kv, spare = receive(), kv
    yield (rank - (n - 1)) % n, kv


def start_passing(tensor, group, received=None):
    """pass_on in two halves: starts, and returns a function that waits and returns what arrived, in
    `received` or a new tensor."""
    received = torch.empty_like(tensor) if received is None else received
    messages = start_hop(tensor, received, group)

    def wait():
        while messages:  # popped, a message no longer keeps alive what it sent
            messages.pop().wait()
        return received

    return wait


# --- a tile: by PyTorch's fused kernels, which also return lse, or by the plain functions
#
# The kernels are private to PyTorch; these calls were tested in torch 2.11 to 2.13. On a GPU
# "flash" takes 16 bits (docs/use/run.md has runs of it) and "efficient" float32; float64, as in the
# demo, is for the plain functions. On a CPU "cpu" takes all.


def tile_attention(q, kv, tile):
    """attention() of a tile. q (B, H, T', D), kv (2, B, H_kv, T', D): H / H_kv query heads share a
    kv-head. 0.0 below: no dropout."""
    q, (k, v) = q[:, :, tile.queries], kv[:, :, :, tile.keys]
    kernel, aten = fused_kernel(q), torch.ops.aten
    if kernel == "cpu":  # needs contiguous tensors
        q, k, v = (t.contiguous() for t in (q, k, v))
        return aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, tile.causal)
    if kernel == "flash":
        return aten._scaled_dot_product_flash_attention(q, k, v, 0.0, tile.causal)[:2]
    k, v = (t.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for t in (k, v))
    if kernel == "efficient":
        forward = aten._scaled_dot_product_efficient_attention
        out, lse, *_ = forward(q, k, v, None, True, 0.0, tile.causal)  # no mask, with lse
        return out, lse[:, :, : q.shape[2]]  # padded: see below
    sum_dtype = torch.promote_types(q.dtype, torch.float32)  # lse's error scales the whole tile
    return attention(q.to(sum_dtype), k.to(sum_dtype), v.to(sum_dtype), tile.causal)


def tile_gradients(grad, q, kv, out, lse, tile):
    """attention_gradients() of a tile: dq of its queries, dk and dv of its keys."""
    grad, q, out, lse = (t[:, :, tile.queries] for t in (grad, q, out, lse))
    k, v = kv[:, :, :, tile.keys]
    kernel, aten = fused_kernel(q), torch.ops.aten
    if kernel == "cpu":
        tensors = (t.contiguous() for t in (grad, q, k, v, out, lse))
        backward = aten._scaled_dot_product_flash_attention_for_cpu_backward
        return backward(*tensors, 0.0, tile.causal)
    if kernel == "flash":
        seed = torch.zeros(2, dtype=torch.uint64, device=q.device)  # and offset, of no dropout
        lengths = None, None, q.shape[2], k.shape[2]  # None: not several sequences in one
        options = *lengths, 0.0, tile.causal, seed, seed[0]
        backward = aten._scaled_dot_product_flash_attention_backward
        return backward(grad, q, k, v, out, lse.contiguous(), *options)
    kv_heads, copies = k.shape[1], q.shape[1] // k.shape[1]
    k, v = (t.repeat_interleave(copies, dim=1) for t in (k, v))
    if kernel == "efficient":
        # It reads the lse of 32 queries at once. Beyond the end e^(score - lse) must be 0
        lse = nn.functional.pad(lse, (0, -q.shape[2] % 32), value=math.inf)
        seed = torch.empty((), dtype=torch.int64, device=q.device)  # and offset, never read
        options = seed, seed, 0.0, (True, True, True, False), tile.causal  # no mask's gradient
        backward = aten._scaled_dot_product_efficient_attention_backward
        dq, dk, dv, _ = backward(grad, q, k, v, None, out, lse, *options)
    else:
        grad, q, k, v, out = (t.to(lse.dtype) for t in (grad, q, k, v, out))
        dq, dk, dv = attention_gradients(grad, q, k, v, out, lse, tile.causal)
    # The gradient of a kv-head is the sum over its copies
    return dq, *(t.unflatten(1, (kv_heads, copies)).sum(2) for t in (dk, dv))


def fused_kernel(q):
    """Which of PyTorch's kernels takes q: "cpu"; on CUDA "flash", "efficient"; or None."""
    if q.device.type == "cuda" and q.shape[-1] % 8 == 0:
        kernels = {torch.float32: "efficient", torch.float16: "flash", torch.bfloat16: "flash"}
        return kernels.get(q.dtype)
    return "cpu" if q.device.type == "cpu" else None


# --- for model.py's GPT ---


def parallelize_context(model, core):
    """Put the core in the place of every block's, and return the model."""
    for block in model.blocks.values():
        block.attn.core = core
    return model


# --- demo ---

if __name__ == "__main__":  # importing this file needs no model.py
    from model import Config, join_ranks, leave


def main():
    parser = argparse.ArgumentParser(description="train a GPT with each attention, and prove it")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--context", type=int, default=30, help="tokens of a sequence")
    parser.add_argument("--kv-heads", type=int, default=2, help="of 4; the plain form takes 4")
    args = parser.parse_args()
    device, group = join_ranks(), dist.group.WORLD
    sizes = dict(layers=2, heads=4, width=32, context=args.context)
    config = Config(**sizes, kv_heads=args.kv_heads)
    plain = PlainRing(group, zigzag=False)
    train("the plain ring", plain, Config(**sizes), ring_bytes, args.steps, device)
    consecutive = Ring(group, zigzag=False)
    train("the ring, consecutive tokens", consecutive, config, ring_bytes, args.steps, device)
    train("the ring in a zigzag", Ring(group), config, ring_bytes, args.steps, device)
    leave()


class PlainRing(Ring):
    def attend(self, q, k, v, tiles):
        return PlainRingAttention.apply(q, k, v, self.group)


def ring_bytes(config, core, tokens):
    """What a layer sends, as text and in bytes. tokens: B T', of this rank."""
    n = core.n
    hops = 4 * (n - 1) / n + 2 if n > 1 else 0  # with one rank dK and dV are at home
    keys = n * tokens * config.kv_heads * config.head_dim * 8  # B T C_kv e; a is e
    return "(4 r e + 2 a) B T C_kv", hops * keys


def train(name, core, config, formula, steps, device):  # two other lessons' demos call it, too
    from model import GPT, IGNORE, OneProcess, Sent, text_batch

    group, n, context = dist.group.WORLD, dist.get_world_size(), config.context
    torch.manual_seed(0)
    model = GPT(config).to(device, torch.float64)
    one = OneProcess(model, torch.optim.AdamW)
    parallelize_context(model, core)
    optimizer = torch.optim.AdamW(model.parameters())
    held = core.positions(context).to(device)  # (T',)
    positions = held.clamp(max=context - 1)  # padding must have some position
    if dist.get_rank() == 0:
        print(f"{name}, {n} ranks, {context} tokens, {len(held)} on each rank with padding")
    for step in range(steps):
        tokens, targets, count = text_batch(step, 5, context, device)
        x, y = shard_sequence(tokens, held), shard_sequence(targets, held, fill=IGNORE)
        loss = torch.zeros_like(count, dtype=torch.float64)
        optimizer.zero_grad()
        with Sent() as sent:
            for rows in torch.arange(len(x)).tensor_split(2):  # micro-batches, whole sequences
                part = model(x[rows], positions, y[rows], count)  # the sum over y, over count
                part.backward()
                loss += part.detach()
            for p in model.parameters():
                dist.all_reduce(p.grad, group=group)  # each rank has the part of its tokens
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        dist.all_reduce(loss, group=group)
        alone = one.train_step(tokens, targets, count, 0.5)
        one.compare(step, loss, alone, model.named_parameters())
    text, of_layer = formula(config, core, 5 * len(held))
    of_gradients = 2 * (n - 1) / n * sum(p.nbytes for p in model.parameters())
    one.prove(sent, f"L {text} + 2 r P e", config.layers * of_layer + of_gradients)


if __name__ == "__main__":
    main()
