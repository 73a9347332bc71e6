"""Context parallelism: each rank holds a part of every sequence, for the whole model.

Every rank has all weights, and only attention looks at other ranks' tokens. In a ring of N
ranks queries stay, and keys and values travel. kv2 are those of rank 2:

    step       0     1     2     3
    rank 0    kv0   kv3   kv2   kv1
    rank 1    kv1   kv0   kv3   kv2
    rank 2    kv2   kv1   kv0   kv3
    rank 3    kv3   kv2   kv1   kv0

In each step a rank computes one tile of attention: its queries with one rank's keys. Meanwhile the
next keys travel. Rescaled, the tiles add up to exact attention. Queries see no later keys: with
consecutive tokens the last rank has the most work. So each has an early and a late chunk, a zigzag:

    chunk   0 1 2 3 4 5 6 7
    rank    0 1 2 3 3 2 1 0

Sent per block: K and V make N - 1 hops in forward and again in backward. There dK and dV, float32
at least, make N hops, back to their owner; dQ stays on its rank. In all (4 r e + 2 a) B T C_kv
bytes: r = (N-1)/N, B sequences of T tokens, K's width C_kv, e bytes per element, a = max(e, 4).
Backward: lse, the logarithm of a query's full softmax denominator, is kept. So e^(score - lse) are
any tile's final probabilities. Weights' gradients are summed: a rank's loss is of its own tokens.
Not for short sequences, where messages take longer than tiles (docs/learn/long-sequences.md).

    torchrun --nproc_per_node=4 context_parallel.py
    python context_parallel.py --kind ulysses --family llama

Liu et al. 2023, Ring attention, arXiv:2310.01889; Jacobs et al. 2023, Ulysses, arXiv:2309.14509.
"""

import bisect
import functools
import itertools
import math
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.autograd.function import once_differentiable  # refuses a gradient of a gradient

# --- the ring in its plainest form: consecutive tokens, no overlap, forward only


@torch.no_grad()
def plain_ring_attention(q, k, v, group):
    """Causal attention of this rank's queries to all keys. q, k and v (B, H, T', D) are of T'
    consecutive tokens, rank 0's first. Sums are in q's dtype: give it float32."""
    rank, n = dist.get_rank(group), dist.get_world_size(group)
    out, lse = torch.zeros_like(q), q.new_full(q.shape[:3], -math.inf)
    kv = torch.stack((k, v))
    for step in range(n):
        if step:  # now this rank has the keys and values of rank - step
            received = torch.empty_like(kv)
            for message in pass_on(kv, received, group):
                message.wait()
            kv = received
        if step > rank:
            continue  # the keys are of later tokens
        scores = q @ kv[0].transpose(-1, -2) / math.sqrt(q.shape[-1])  # (B, H, T', T')
        if step == 0:  # the same tokens: a query must not see later keys
            scores += torch.full_like(scores[0, 0], -math.inf).triu(1)
        # The denominators e^lse of the softmax add up. What was added before shrinks accordingly
        total = torch.logaddexp(lse, scores.logsumexp(-1))  # (B, H, T')
        out = out * (lse - total).exp().unsqueeze(-1)
        out += (scores - total.unsqueeze(-1)).exp() @ kv[1]
        lse = total
    return out


def pass_on(sent, received, group, hops=1):
    """Start to send a tensor to the rank `hops` after this one, and to receive what the rank `hops`
    before sends. Returns the messages to wait for: none to itself, none that are empty."""
    rank, n = dist.get_rank(group), dist.get_world_size(group)
    send = dist.P2POp(dist.isend, sent, group=group, group_peer=(rank + hops) % n)
    receive = dist.P2POp(dist.irecv, received, group=group, group_peer=(rank - hops) % n)
    messages = [message for message in (send, receive) if message.tensor.numel() and hops % n]
    return dist.batch_isend_irecv(messages) if messages else []


# --- a tile: some of a rank's queries with some of a rank's keys


class Tile(NamedTuple):
    """Which queries meet which keys, in which rows of the batch. causal: both are the same tokens,
    and each query sees the keys up to its own."""

    queries: slice
    keys: slice
    causal: bool
    rows: slice = slice(None)


def tile_attention(q, kv, tile):
    """Attention of the tile's queries to its keys: the result (B, H, Tq, D), and for each query the
    logarithm of its softmax's denominator, lse (B, H, Tq).

    q (B, H, T', D), kv (2, B, H_kv, T', D): H / H_kv query heads share a kv-head."""
    q = q[tile.rows, :, tile.queries]
    k, v = kv[:, tile.rows, :, tile.keys]
    if fused_kernel(q):
        return fused_attention(q, k, v, tile.causal)
    k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], dim=1) for t in (k, v))
    scores = masked_scores(q, k, tile.causal)
    return scores.softmax(-1) @ v.to(scores.dtype), scores.logsumexp(-1)


def masked_scores(q, k, causal):
    """q k^T / sqrt(D), (B, H, Tq, Tk); -inf where a key is later than the query. Float32 at least:
    an error of lse would scale the whole tile."""
    dtype = torch.promote_types(q.dtype, torch.float32)
    scores = q.to(dtype) @ k.to(dtype).transpose(-1, -2) / math.sqrt(q.shape[-1])
    if not causal:
        return scores
    later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
    return scores.masked_fill(later, -math.inf)


class OnlineSoftmax:
    """Attention to all keys, added up from tiles that each know some of them.

    The denominators e^lse1 and e^lse2 of two tiles add up to e^lse. Then the results combine to
    out = e^(lse1 - lse) out1 + e^(lse2 - lse) out2. Sums are float32 at least."""

    def __init__(self, q):
        dtype = torch.promote_types(q.dtype, torch.float32)
        self.out = torch.zeros_like(q, dtype=dtype)  # (B, H, T', D)
        self.lse = torch.full(q.shape[:3], -math.inf, dtype=dtype, device=q.device)  # (B, H, T')

    def add(self, out, lse, tile):
        """Add a tile. Each query must see a key: else its lse is -inf, and -inf - -inf is NaN."""
        where = tile.rows, slice(None), tile.queries
        lse_so_far, lse = self.lse[where], lse.to(self.lse.dtype)
        total = torch.logaddexp(lse_so_far, lse)
        sum_so_far = self.out[where]  # a view: what follows changes self.out
        sum_so_far.mul_((lse_so_far - total).exp_().unsqueeze(-1))
        sum_so_far.add_(out * (lse - total).exp_().unsqueeze(-1))
        self.lse[where] = total


# --- the ring: keys and values travel


class DoubleBuffer:
    """A tensor that goes around the ring: send() passes it to the next rank, and receive() puts in
    its place what the rank before has sent. Between the two it can still be read."""

    def __init__(self, tensor, group):
        self.tensor, self.incoming, self.group = tensor, torch.empty_like(tensor), group

    def send(self):
        self.messages = pass_on(self.tensor, self.incoming, self.group)

    def receive(self):
        for message in self.messages:
            message.wait()
        if self.messages:  # in a ring of one there are none
            self.tensor, self.incoming = self.incoming, self.tensor


def around_the_ring(buffer):
    """Yield (rank, its keys and values) for all ranks, beginning with this one. The next keys and
    values travel while the caller computes. This overlap hides the messages."""
    rank, n = dist.get_rank(buffer.group), dist.get_world_size(buffer.group)
    for step in range(n - 1):
        buffer.send()
        yield (rank - step) % n, buffer.tensor
        buffer.receive()
    yield (rank - (n - 1)) % n, buffer.tensor


def attend_to_all(q, kv_by_rank, tiles):
    """Attention of this rank's queries to all keys: the result and its lse. kv_by_rank: pairs
    (rank, its keys and values). tiles: of this rank's queries with each rank's keys."""
    result = OnlineSoftmax(q)
    for source, kv in kv_by_rank:
        for tile in tiles[source]:
            result.add(*tile_attention(q, kv, tile), tile)
    return result.out.to(q.dtype), result.lse


def tile_gradients(grad, q, kv, out, lse, tile):
    """dq of the tile's queries, dk and dv of its keys (Dao et al. 2022, FlashAttention,
    arXiv:2205.14135, appendix B).

    grad, out and lse are of the final result, over all keys. So e^(score - lse) are the final
    probabilities, and the other tiles are not needed."""
    grad, q, out, lse = (t[tile.rows, :, tile.queries] for t in (grad, q, out, lse))
    k, v = kv[:, tile.rows, :, tile.keys]
    if fused_kernel(q):
        return fused_gradients(grad, q, k, v, out, lse, tile.causal)
    kv_heads, copies = k.shape[1], q.shape[1] // k.shape[1]
    k, v = (t.repeat_interleave(copies, dim=1) for t in (k, v))
    grad, q, k, v, out = (t.to(lse.dtype) for t in (grad, q, k, v, out))
    p = (masked_scores(q, k, tile.causal) - lse.unsqueeze(-1)).exp()  # (B, H, Tq, Tk)
    dv = p.transpose(-1, -2) @ grad
    dp = grad @ v.transpose(-1, -2)
    # Softmax's backward subtracts the sum of p dp over all keys: grad . out, since out = sum p v
    ds = p * (dp - (grad * out).sum(-1, keepdim=True)) / math.sqrt(q.shape[-1])
    dq, dk = ds @ k, ds.transpose(-1, -2) @ q
    # The gradient of a kv-head is the sum over its copies
    dk, dv = (t.unflatten(1, (kv_heads, copies)).sum(2) for t in (dk, dv))
    return dq, dk, dv


class RingAttention(torch.autograd.Function):
    """q (B, H, T', D), k and v (B, H_kv, T', D) of this rank's T' tokens -> attention to all ranks'
    keys (B, H, T', D). In backward keys and values travel again, and with them the sums of their
    gradients. buffers: the classes that pass on kv and dkv, with documents two DirectBuffers."""

    @staticmethod
    def forward(ctx, q, k, v, group, tiles, buffers=(DoubleBuffer, DoubleBuffer)):
        kv_buffer = buffers[0](torch.stack((k, v)), group)
        out, lse = attend_to_all(q, around_the_ring(kv_buffer), tiles)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.group, ctx.tiles, ctx.buffers = group, tiles, buffers
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        q, k, v, out, lse = ctx.saved_tensors
        rank, kv = dist.get_rank(ctx.group), torch.stack((k, v))
        dq, dkv = (torch.zeros_like(t, dtype=lse.dtype) for t in (q, kv))
        kv_buffer, dkv_buffer = (make(t, ctx.group) for make, t in zip(ctx.buffers, (kv, dkv)))
        for source, kv_source in around_the_ring(kv_buffer):
            dkv_tiles = []
            for tile in ctx.tiles[source]:
                dq_tile, *dkv_tile = tile_gradients(grad, q, kv_source, out, lse, tile)
                dq[tile.rows, :, tile.queries] += dq_tile
                dkv_tiles.append(torch.stack(dkv_tile))
            # dkv travels one step behind kv: a rank adds its tiles before it sends dkv on. What is
            # received here has travelled while these tiles were computed
            if source != rank:  # in the first step dkv is this rank's own, zeros
                dkv_buffer.receive()
            for tile, dkv_tile in zip(ctx.tiles[source], dkv_tiles):
                dkv_buffer.tensor[:, tile.rows, :, tile.keys] += dkv_tile
            dkv_buffer.send()
        dkv_buffer.receive()  # after n hops a rank has the sums for its own keys
        return dq.to(q.dtype), *dkv_buffer.tensor.to(k.dtype), None, None, None


# --- chunks: who holds which tokens, and so which tiles there are


def deal_chunks(length, n, zigzag=True, multiple=1, starts=None):
    """(tokens per chunk, for each rank the list of its chunks' numbers) in a ring of n ranks: two
    chunks per rank in a zigzag, else one. multiple: pad chunks to a multiple of it, for ranks that
    share a ring's tokens (Ulysses, below). starts (B, T): where each token's document starts."""
    per_rank = chunks_of_rank(zigzag, starts)
    size = math.ceil(length / (n * per_rank * multiple)) * multiple
    if starts is None or not zigzag:
        return size, [[rank, 2 * n - 1 - rank][:per_rank] for rank in range(n)]
    return size, deal_by_work(n, per_rank, size, starts)


def chunks_of_rank(zigzag, starts=None):
    if not zigzag:
        return 1
    return 2 if starts is None else 8  # with documents: see deal_by_work


def held_positions(length, rank, n, zigzag=True, multiple=1, starts=None):
    """The positions in a sequence of the tokens that a rank of a ring of n holds, (T',) int64.
    Those from `length` on are padding. The other arguments are those of deal_chunks."""
    size, chunks = deal_chunks(length, n, zigzag, multiple, starts)
    return (torch.tensor(chunks[rank]).unsqueeze(1) * size + torch.arange(size)).flatten()


@functools.lru_cache(maxsize=32)  # for all layers. starts is hashed by identity: never change it
def ring_tiles(rank, n, length, zigzag=True, starts=None):
    """For each rank of the ring, the tiles of this rank's queries with its keys."""
    size, chunks = deal_chunks(length, n, zigzag, starts=starts)
    borders = [[0, length]]  # of documents, in each row
    if starts is not None:
        borders = [[*row.unique().tolist(), starts.shape[1]] for row in starts]
    return [find_tiles(chunks[rank], others, size, borders) for others in chunks]


def find_tiles(own, others, size, borders):
    """The tiles of the queries in the chunks `own` with the keys in the chunks `others`. A query
    sees its document's keys up to its own. With one document a zigzag has one tile per rank:

    own keys           causal
    an earlier rank's  all queries with its first chunk: its second is later than all of them
    a later rank's     the second chunk's queries with all keys: the first is too early for them"""

    def before(chunks, position):
        """How many tokens of these chunks come before a position."""
        chunk, rest = divmod(position, size)
        return bisect.bisect_left(chunks, chunk) * size + (rest if chunk in chunks else 0)

    tiles = []
    for row, edges in enumerate(borders):
        rows = slice(row, row + 1) if len(borders) > 1 else slice(None)
        for start, end in itertools.pairwise(edges):
            if own == others:
                document = slice(before(own, start), before(own, end))
                if document.start < document.stop:
                    tiles.append(Tile(document, document, True, rows))
                continue
            for chunk in own:
                first, last = max(start, chunk * size), min(end, (chunk + 1) * size)
                keys = slice(before(others, start), before(others, first))
                if first >= last or keys.start == keys.stop:
                    continue
                queries = slice(before(own, first), before(own, last))
                # Neighbouring chunks with the same keys make one tile
                if tiles and tiles[-1].keys == keys and tiles[-1].rows == rows:
                    queries = slice(tiles.pop().queries.start, queries.stop)
                tiles.append(Tile(queries, keys, False, rows))
    return tiles


def shard_sequence(x, held, fill=0):
    """The columns of x (B, T, ...) at positions `held` (T',) of T -> (B, T', ...), with `fill` for
    padding. For targets `fill` is the value that the loss ignores, else padding would count."""
    held = held.to(x.device)
    padding = (held >= x.shape[1]).view(-1, *[1] * (x.dim() - 2))
    return x[:, held.clamp(max=x.shape[1] - 1)].masked_fill(padding, fill)


# --- in a model


class GroupModule(nn.Module):
    """A module that works together with those of the other ranks of a group."""

    def __init__(self, group):
        super().__init__()
        self.group, self.rank, self.n = group, dist.get_rank(group), dist.get_world_size(group)


class Ring(GroupModule):
    """In place of attention's core: ring attention over `group`, q (B, H, T', D), k and v
    (B, H_kv, T', D) -> (B, H, T', D).

        ring = Ring(group)                              # no parameters: one serves all layers
        model = Decoder(ring)                           # yours; each layer calls ring(q, k, v)
        held = ring.positions(T).to(tokens.device)      # (T',): positions held by this rank
        x = shard_sequence(tokens, held)                # (B, T) -> (B, T')
        y = shard_sequence(targets, held, fill=-100)    # targets are shifted before the cut
        logits = model(x, held.clamp(max=T - 1))        # padding needs some position, too
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), y.flatten(), reduction="sum")
        (loss / target_count).backward()                # valid targets of all ranks
        for p in model.parameters():                    # after the last micro-batch
            dist.all_reduce(p.grad, group=group)        # a sum, no mean; then clip and step

    Attention is causal and scaled by 1/sqrt(D), without dropout, other masks or second gradients.
    Cut tokens by `positions`, never by chunk(): tiles follow from the rank. Another cut gives wrong
    numbers without an error; so does q of shape (B, T', H, D). B and T' are the same on all ranks,
    or the group aborts or hangs. Beside another technique: docs/use/two-techniques.md."""

    attention = RingAttention

    def __init__(self, group, zigzag=True):
        super().__init__(group)
        self.zigzag = zigzag

    def positions(self, length, multiple=1, starts=None):
        """The positions of a sequence that this rank must hold."""
        return held_positions(length, self.rank, self.n, self.zigzag, multiple, starts)

    def forward(self, q, k, v, starts=None):
        check_qkv(q, k, v)
        check_chunks(q, self, starts)
        layout = self.rank, self.n, self.n * q.shape[2], self.zigzag, starts
        if starts is None:
            return self.attention.apply(q, k, v, self.group, ring_tiles(*layout))
        used = used_keys(*layout, q.device)
        buffers = [functools.partial(DirectBuffer, used=used, home=home) for home in (False, True)]
        return RingAttention.apply(q, k, v, self.group, ring_tiles(*layout), buffers)


# --- gather: all keys and values at once (Llama 3, arXiv:2407.21783, section 3.3.2)

# torch 2.13 renamed it; older versions know only the second name
all_gather_into_tensor = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class GatheredAttention(torch.autograd.Function):
    """The ring's tiles, with all ranks' keys and values in memory from forward to backward."""

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
                dq[tile.rows, :, tile.queries] += dq_tile
                dkv[source][:, tile.rows, :, tile.keys] += torch.stack((dk, dv))
        # Each rank sums what it gets for its own keys. That is a reduce-scatter: gloo's own sends
        # twice as many bytes
        pieces = torch.empty_like(dkv)
        dist.all_to_all_single(pieces, dkv, group=ctx.group)
        return dq.to(q.dtype), *pieces.sum(0).to(q.dtype), None, None


class Gather(Ring):
    """In place of attention's core: attention to gathered keys and values. Used as Ring is. With
    documents it is a Ring: each rank uses other keys, and an all-gather sends the same to all."""

    attention = GatheredAttention


# --- ulysses: from "all heads of some tokens" to "some heads of all tokens", and back


class Exchange(torch.autograd.Function):
    """An all-to-all: cuts dimension `cut` of x into N pieces, one for each rank, and joins those
    that arrive along dimension `join`. It only moves data, so its backward is the way back."""

    @staticmethod
    def forward(ctx, x, group, cut, join):
        ctx.group, ctx.cut, ctx.join = group, cut, join
        pieces = torch.stack(x.chunk(dist.get_world_size(group), dim=cut))
        received = torch.empty_like(pieces)
        dist.all_to_all_single(received, pieces, group=group)
        return torch.cat(received.unbind(0), dim=join)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        return Exchange.apply(grad, ctx.group, ctx.join, ctx.cut), None, None, None


class Ulysses(GroupModule):
    """In place of attention's core: heads are dealt out over `group`, and `core` computes attention
    of this rank's heads for all tokens. If the n ranks do not divide the kv-heads, copies travel.

        ulysses = Ulysses(group, core)                  # core(q, k, v): causal attention
        model = Decoder(ulysses)
        held = ulysses.positions(T).to(tokens.device)   # one run of tokens a rank
        # the rest as with Ring

    core: functools.partial(F.scaled_dot_product_attention, is_causal=True, enable_gqa=True). It
    gets q (B, H / n, n T', D), k and v, and returns q's shape. Mask, scale and dropout are its own.

    ring-ulysses: Ulysses(group of U ranks, Ring(group of R ranks)). The core is a ring whose rank
    is U ranks that share its tokens, a zigzag (Fang and Zhao 2024, arXiv:2405.07719)."""

    def __init__(self, group, core):
        super().__init__(group)
        self.core = core

    def positions(self, length, starts=None):
        """The positions that this rank must hold: a part of its ring's, or of the sequence's."""
        if not isinstance(self.core, Ring):
            return held_positions(length, self.rank, self.n, zigzag=False)
        return self.core.positions(length, self.n, starts).chunk(self.n)[self.rank]

    def forward(self, q, k, v, starts=None):
        check_qkv(q, k, v)
        copies = self.n // math.gcd(k.shape[1], self.n)
        kv = torch.cat((k, v), dim=-1).repeat_interleave(copies, dim=1)  # (B, H_kv copies, T', 2 D)
        q = Exchange.apply(q, self.group, 1, 2)  # (B, H / n, n T', D)
        k, v = Exchange.apply(kv, self.group, 1, 2).chunk(2, dim=-1)
        documents = () if starts is None else (starts,)
        return Exchange.apply(self.core(q, k, v, *documents), self.group, 2, 1)


# --- documents: other chunks, and keys go straight to the ranks that use them


def deal_by_work(n, per_rank, size, starts):
    """`per_rank` chunks for each rank. A chunk's work is its pairs of a query and a key. The
    heaviest chunk is dealt out first, to the rank with the least work that has room. With one
    document and two chunks per rank this makes the zigzag."""
    pairs = (torch.arange(starts.shape[1]) + 1 - starts).sum(0)  # of each query, in all rows
    pairs = nn.functional.pad(pairs, (0, n * per_rank * size - len(pairs)))
    of_chunk = pairs.view(-1, size).sum(1)
    held, load = [[] for _ in range(n)], [0] * n
    for chunk in of_chunk.argsort(descending=True, stable=True).tolist():
        rank = min((r for r in range(n) if len(held[r]) < per_rank), key=load.__getitem__)
        held[rank].append(chunk)
        load[rank] += of_chunk[chunk].item()
    return [sorted(chunks) for chunks in held]


class DirectBuffer:
    """In place of a DoubleBuffer. In step s a rank sends its own keys straight to the rank s after
    it, but only those that the tiles there use. home=True: for their gradients, which go back the
    same way and are added up at the owner's. used: what used_keys returns."""

    def __init__(self, tensor, group, used, home):
        self.tensor = self.own = tensor
        self.group, self.home = group, home
        given, taken = used
        self.to_send, self.to_receive = (taken, given) if home else (given, taken)
        self.step = -1 if home else 0  # the first step's gradients are of own keys: no message

    def send(self):
        rank, n = dist.get_rank(self.group), dist.get_world_size(self.group)
        self.step += 1
        hops = -self.step if self.home else self.step
        source = self.tensor if self.home else self.own
        self.arriving = self.to_receive[(rank - hops) % n]
        self.incoming = torch.empty_like(source[self.arriving])
        self.sent = source[self.to_send[(rank + hops) % n]]
        self.messages = pass_on(self.sent, self.incoming, self.group, hops)

    def receive(self):
        for message in self.messages:
            message.wait()
        self.tensor = torch.zeros_like(self.own)  # for the next step
        if not self.home:
            self.tensor[self.arriving] = self.incoming  # no tile reads what stays zero
            return
        self.own[self.arriving] += self.incoming
        if self.step == dist.get_world_size(self.group) - 1:  # all are at home
            self.tensor = self.own


@functools.lru_cache(maxsize=32)
def used_keys(rank, n, length, zigzag, starts, device="cpu"):
    """(given, taken), two lists with an entry for each rank of the ring: this rank's keys that the
    other rank uses, and the other's keys that this one uses, as indices into (2, B, H_kv, T', D).
    A rank uses a key if it has a later token of the key's document."""
    size, chunks = deal_chunks(length, n, zigzag, starts=starts)
    held = (torch.tensor(chunks).unsqueeze(2) * size + torch.arange(size)).flatten(1)  # (N, T')
    padding = torch.arange(starts.shape[1], length).expand(len(starts), -1)
    starts = torch.cat((starts, padding), dim=1)  # each token of padding is a document of its own

    def used(user, owner):
        # last[row, s]: the user's last token of the document that starts at s
        positions = held[user].expand(len(starts), -1)
        last = torch.zeros_like(starts).scatter_reduce(1, starts[:, held[user]], positions, "amax")
        later = last.gather(1, starts[:, held[owner]]) > held[owner]
        rows, tokens = (later & (user != owner)).nonzero(as_tuple=True)
        return slice(None), rows.to(device), slice(None), tokens.to(device)

    return [used(other, rank) for other in range(n)], [used(rank, other) for other in range(n)]


# --- a tile by the device's kernels, which are fast and return the log-sum-exp too


def fused_attention(q, k, v, causal):
    if fused_kernel(q) == "cpu":
        kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        return kernel(q.contiguous(), k.contiguous(), v.contiguous(), 0.0, causal)
    if fused_kernel(q) == "flash":
        kernel = torch.ops.aten._scaled_dot_product_flash_attention
        return kernel(q, k, v, 0.0, causal)[:2]  # takes pieces of a tensor, not contiguous
    k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], dim=1) for t in (k, v))
    kernel = torch.ops.aten._scaled_dot_product_efficient_attention
    out, lse, *_ = kernel(q, k, v, None, True, 0.0, causal)  # no mask, with lse, no dropout
    return out, lse[:, :, : q.shape[2]]  # padded: see below


def fused_gradients(grad, q, k, v, out, lse, causal):
    if fused_kernel(q) == "cpu":
        kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
        grad, q, k, v, out, lse = (t.contiguous() for t in (grad, q, k, v, out, lse))
        return kernel(grad, q, k, v, out, lse, 0.0, causal)
    if fused_kernel(q) == "flash":
        kernel = torch.ops.aten._scaled_dot_product_flash_attention_backward
        seed = torch.zeros(2, dtype=torch.uint64, device=q.device)
        # No packed sequences (None, None), the largest T', no dropout (0.0), its seed and offset
        options = None, None, q.shape[2], k.shape[2], 0.0, causal, seed, seed[0]
        return kernel(grad, q, k, v, out, lse.contiguous(), *options)
    kv_heads, copies = k.shape[1], q.shape[1] // k.shape[1]
    k, v = (t.repeat_interleave(copies, dim=1) for t in (k, v))
    # This kernel reads the lse of 32 queries at once. For those beyond the end e^(score - lse) is 0
    lse = nn.functional.pad(lse, (0, -q.shape[2] % 32), value=math.inf)
    kernel = torch.ops.aten._scaled_dot_product_efficient_attention_backward
    seed = torch.empty((), dtype=torch.int64, device=q.device)  # and offset: no dropout reads them
    wanted = True, True, True, False  # no gradient of a mask
    dq, dk, dv, _ = kernel(grad, q, k, v, None, out, lse, seed, seed, 0.0, wanted, causal)
    return dq, *(t.unflatten(1, (kv_heads, copies)).sum(2) for t in (dk, dv))


def fused_kernel(q):
    """Which of PyTorch's kernels takes q: "cpu"; on CUDA "flash", "efficient"; or None."""
    if q.device.type != "cuda":
        return "cpu" if q.device.type == "cpu" else None
    if q.dtype == torch.float32:
        return "efficient" if q.shape[-1] % 4 == 0 else None
    half = q.dtype in (torch.float16, torch.bfloat16)
    fits = half and q.shape[-1] % 8 == 0 and q.shape[-1] <= 256
    ampere_or_later = torch.cuda.get_device_capability(q.device) >= (8, 0)
    return "flash" if fits and ampere_or_later else None


# --- mistakes that would be silent: refused


def check_qkv(q, k, v):
    fits = q.dim() == k.dim() == 4 and k.shape == v.shape and q.dtype == k.dtype == v.dtype
    fits = fits and q[:, 0].shape == k[:, 0].shape and q.shape[1] % k.shape[1] == 0
    if not fits:
        found = ", ".join(f"{name} {tuple(t.shape)} {t.dtype}" for name, t in zip("qkv", (q, k, v)))
        raise ValueError(
            "attention takes q (B, H, T', D), k and v (B, H_kv, T', D) of one dtype, and H a "
            f"multiple of H_kv, not {found}: transpose, cast or repeat heads"
        )


def check_chunks(q, ring, starts):
    per_rank = chunks_of_rank(ring.zigzag, starts)
    if q.shape[2] % per_rank and ring.n > 1:
        chunks = f"a rank holds {per_rank} equal chunks, not {q.shape[2]} tokens"
        raise ValueError(f"{chunks}: cut sequences by positions(), or give zigzag=False")


# --- for model.py's GPT ---

KINDS = ("ring", "ulysses", "gather", "ring-ulysses")


def parallelize_context(
    model, group, kind="ring", ring_group=None, ulysses_group=None, zigzag=True
):
    """Replace every block's attention core, in place, and return the model. Used as Ring is:

        model = parallelize_context(model, group, kind)
        held = model.blocks["0"].attn.core.positions(T).to(tokens.device)
        x, y = shard_sequence(tokens, held), shard_sequence(targets, held, -1)
        loss = model(x, held.clamp(max=T - 1), targets=y, target_count=target_count)
        loss.backward()                                 # target_count: valid targets of all ranks
        # then sum the gradients over the group, as with Ring

    ring_group, ulysses_group: for kind "ring-ulysses". With U ranks in a ulysses_group,
    rank in group = U x rank in ring_group + rank in ulysses_group.
    With experts T must divide into equal chunks, because a router would count padding."""
    for block in model.blocks.values():
        if kind == "ulysses":
            core = Ulysses(group, block.attn.core)
        elif kind == "ring-ulysses":
            core = Ulysses(ulysses_group, Ring(ring_group, zigzag))
        else:
            core = {"ring": Ring, "gather": Gather}[kind](group, zigzag)
        block.attn.core = core
        if model.config.experts:
            router = block.mlp.router
            sums = SumRouterStats(group)
            router.sum_over_sequence = nn.Sequential(router.sum_over_sequence, sums)
    return model


class SumRouterStats(GroupModule):
    """Adds up a router's sums over a sequence, of which each rank has a part. Forward: the total.
    Backward: the identity, as in tensor parallelism's g."""

    def forward(self, sums):
        total = sums.detach().clone()
        dist.all_reduce(total, group=self.group)
        return sums + (total - sums.detach())


# --- demo ---

import ddp
import harness
import proof
import receipts.context_parallel
from harness import documents


def main():
    parser = harness.parser(__doc__)
    g = parser.add_argument_group("context parallelism")
    why = "how queries reach other ranks' keys: ulysses mostly sends least, a ring takes any ranks"
    g.add_argument("--kind", choices=KINDS, default="ring", help=why)
    receipts.context_parallel.flags(g)
    args = parser.parse_args()
    receipts.context_parallel.check(args)
    config = harness.configure(args)
    harness.check_batch(args, 1)

    def check(world):
        receipts.context_parallel.grid(args.kind, world, args.rings, config.heads)

    proof.launch(demo, args, check=check)


def demo(run):
    args, context, group = run.args, run.config.context, dist.group.WORLD
    ring, ulysses = receipts.context_parallel.make_groups(run)  # None but for kind ring-ulysses
    grid = dict(ring_group=ring, ulysses_group=ulysses, zigzag=not args.contiguous)
    model = run.fill(parallelize_context(run.meta_model(), group, args.kind, **grid))
    core = model.blocks["0"].attn.core
    held = core.positions(context).to(run.device)
    parameters = list(model.parameters())
    # Each rank's gradients are those of its own tokens: summed as in data parallelism
    sync = ddp.DDP(parameters, group, args.microbatches)
    optimizer = harness.make_optimizer(parameters, args)
    for step in run.steps(optimizer):
        sync.zero_grad()
        loss = run.zero()
        for tokens, targets, samples in run.microbatches(step):  # whole sequences, on every rank
            starts = documents.starts_of(tokens, args)  # None without --documents
            if args.documents:  # dealt out anew
                held = core.positions(context, starts=starts).to(run.device)
            receipts.context_parallel.check_routers(run, len(held))
            x, y = shard_sequence(tokens, held), shard_sequence(targets, held, -1)
            # The sum over this rank's tokens, divided by the global batch's number of targets
            positions = held.clamp(max=context - 1)  # padding must have some position
            part = model(x, positions, y, run.target_count, samples, starts)
            part.backward()
            loss += part.detach()
        sync.finish()
        dist.all_reduce(loss, group=group)
        norm = harness.grad_norm(parameters)
        run.check(loss, norm, model.named)
        harness.clip(parameters, norm, args.grad_clip)
        optimizer.step()
        run.log(loss, norm)
    return run.receipt(*receipts.context_parallel.of_demo(run, len(held), ring_tiles, used_keys))


if __name__ == "__main__":
    harness.script(main)
