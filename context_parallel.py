"""Context parallelism: each rank holds a part of every sequence, for the whole model; attention
over all of it stays exact.

What is split, on N ranks: the tokens. Weights are whole on every rank. Norms, projections, MLPs and
the loss work on each token alone, and need no other rank. Attention does: a query looks at keys
that other ranks hold. Four ways, `--kind`:

    ring          keys and values travel around the ring while queries stay; N tiles of attention, combined by their
                  log-sum-exps; the next tile's are on their way while this one is computed (Liu et
                  al. 2023)
    gather        every rank gathers all keys and values: simplest, holds most (Llama 3)
    ulysses       two all-to-alls turn "all heads of some tokens" into "some heads of all tokens", attention is local, one turns
                  its result back (Jacobs et al. 2023). The ranks must divide the heads
    ring-ulysses  N = R x U: all-to-alls within groups of U, rings of R across (Fang and Zhao 2024)

Causal attention on a contiguous split is lopsided: the last rank's queries see everything, the
first's next to nothing. So (zigzag) the sequence is cut into 2 N chunks, and rank i holds chunks i
and 2N - 1 - i. What rank i has to do with the keys of rank j is then one kernel call: without a
mask and of the same work for every j but its own. That one is causal, and the usual mask is right,
because a rank's tokens keep their order. (After Ulysses' exchange every rank sees whole sequences,
so that kind alone cuts them in plain order.)

    j = i    its own two chunks: causal          chunk   0 1 2 3 4 5 6 7      rank 1 of 4: q and k of chunks 1 and 6
    j < i    all queries x the first chunk       rank    0 1 2 3 3 2 1 0        j = 0: q 1, 6 x k 0     (7 is later than all)
    j > i    the second chunk's queries x all                                  j = 2: q 6 x k 2, 5     (1 is earlier)

What is sent: in a ring K and V to the next rank, while they are used; in backward once more, and dK
and dV after them.

    step       0     1     2     3
    rank 0    kv0   kv3   kv2   kv1          backward: what this step adds to dK and dV of kv_j follows kv_j to the next rank,
    rank 1    kv1   kv0   kv3   kv2          one step behind, and after N steps is at home

Of each block of the model, micro-batch and rank, r = (N-1)/N, B sequences of T tokens, C_kv = the
width of K, e bytes an element, a those of one of the sums, max(e, 4):

    ring      forward 2 r B T C_kv e        backward the same, and 2 B T C_kv a (dK and dV, N steps)
    gather    forward 2 r B T C_kv e        backward 2 r B T C_kv a
    ulysses   forward 2 r (B T / N) (C + C_kv) e    backward the same (more ranks than kv-heads: copies of these count)
    ring-ulysses   the third with (U-1)/U for r, and the first with (R-1)/R for r and C_kv / U for C_kv
    all but attention: 2 r P e a step, the gradients' all-reduce, as in data parallelism

Backward: two tiles' results o1, o2 with log-sum-exps l1, l2 of their scores combine to e^(l1-l) o1
+ e^(l2-l) o2, with l = log(e^l1 + e^l2). Backward needs the final out and l alone: with p = e^(s-l)
each tile's gradients are computed as if it were all there is. A rank kept no keys and values but
its own, so they go around once more; dK and dV are sums over the queries of all ranks, so they
travel with them. An all-to-all moves and adds nothing: its backward is the all-to-all back. The
loss is divided by the tokens of the whole batch, so parameters' gradients are added over the ranks,
not averaged. (Targets are shifted before they are cut: a rank's last token has its next one on
another rank.)

What it costs: the bytes above. Grouped queries make C_kv a fraction of C: ring and gather send kv
heads alone. The ring hides its traffic if a tile takes longer than the transfer of its keys and
values: 2 B (T/N)^2 C flops at f flop/s (half of the pairs are masked) against 2 B (T/N) C_kv e
bytes at w byte/s: T/N > (C_kv / C) e f / w. (Backward needs (e + a) / (2.5 e) of that.) Held: all
weights; 1/N of all activations; of the ring two buffers of K and V, 4 B (T/N) C_kv e, and in
backward two of dK and dV; with gather all keys and values of every block. Of the four: ulysses
sends least, if N C_kv > C + C_kv, with nothing to hide it behind, and to no more ranks than heads;
a ring goes to any number, and hides what it sends; gather where B T C_kv is small; ring-ulysses
where N is more than the heads, with U inside a node.

When it is the wrong choice: for sequences shorter than that bound on T/N. Data parallelism sends
less, and what does not fit there may with sequence_parallel.py.

    torchrun --nproc_per_node=4 context_parallel.py               python context_parallel.py --kind ulysses --family llama
    python context_parallel.py --prefill 4096                     a long prompt over all ranks, and tokens after it
    python context_parallel.py --plot zigzag                      who computes what, when: contiguous, and in a zigzag

Papers: Liu et al. 2023, Ring attention, arXiv:2310.01889, section 3; Llama team 2024,
arXiv:2407.21783, section 3.3.2 (gather, two chunks a rank); Jacobs et al. 2023, DeepSpeed Ulysses,
arXiv:2309.14509, section 3; Fang and Zhao 2024, USP, arXiv:2405.07719; Milakov and Gimelshein 2018,
arXiv:1805.02867, section 3 (combining); Dao et al. 2022, FlashAttention, arXiv:2205.14135, appendix
B (backward).
"""

import math

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.autograd.function import once_differentiable  # refuses a gradient of a gradient

# torch 2.13 renamed them; older versions know only the second name
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
native_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


# --- who holds what


def positions(length, rank, ring, ulysses=1, zigzag=True):
    """The positions that a rank of ring x ulysses holds of a sequence, (T',) int64: T' is the same
    on all ranks, and what is not below `length` is padding at the end. zigzag: two chunks a ring
    rank, from the front and from the back.

    Raises ValueError for a rank that ring x ulysses does not have."""
    if not 0 <= rank < ring * ulysses:
        raise ValueError(f"{ring} x {ulysses} ranks have no rank {rank}: give the group's grid")
    r, u = divmod(rank, ulysses)
    chunks = 2 * ring if zigzag else ring
    # Of a chunk: divisible by the ranks that share it
    size = -(-length // (chunks * ulysses)) * ulysses
    mine = [r, chunks - 1 - r] if zigzag else [r]
    both = torch.cat([torch.arange(c * size, (c + 1) * size) for c in mine])
    return both.chunk(ulysses)[u]


def shard(x, positions, fill=0):
    """The columns of x (B, T, ...) at some positions -> (B, T', ...), with `fill` for padding.

    Targets need the value that the loss ignores as `fill`, or padding counts. Positions must be
    made for the T of x."""
    positions = positions.to(x.device)
    padding = (positions >= x.shape[1]).view(-1, *[1] * (x.dim() - 2))
    return x[:, positions.clamp(max=x.shape[1] - 1)].masked_fill(padding, fill)


def tile(rank, source, ring, length, zigzag=True):
    """What queries of a ring rank, `length` of them, see of the keys of another: (queries, keys,
    causal) as slices, or None."""
    half = slice(length // 2, length)
    if source == rank:
        return slice(0, length), slice(0, length), True
    if not zigzag:
        return (slice(0, length), slice(0, length), False) if source < rank else None
    if source < rank:
        return slice(0, length), slice(0, length // 2), False
    return half, slice(0, length), False


def work(rank, ring, length, zigzag=True):
    """How many pairs of a query and a key a ring rank computes; `length` tokens are here."""
    pairs = 0
    for source in range(ring):
        seen = tile(rank, source, ring, length, zigzag)
        if seen:
            q, k, causal = seen
            n, m = q.stop - q.start, k.stop - k.start
            pairs += n * (n + 1) // 2 if causal else n * m
    return pairs


# --- a tile of attention, with its log-sum-exp


def attend(q, k, v, causal):
    """q (B, H, n, D), k and v (B, H_kv, m, D) -> softmax(q k^T / sqrt(D)) v (B, H, n, D), the
    scores' log-sum-exp (B, H, n)."""
    q, k, v = (t.contiguous() for t in (q, k, v))
    # Each backend has a kernel of its own that also returns the log-sum-exp
    if q.device.type == "cpu":
        return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal)
    k, v = (t.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for t in (k, v))
    if flash(q):
        return torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal)[:2]
    scores = masked_scores(q, k, causal)  # no flash kernel takes them
    return scores.softmax(-1) @ v, scores.logsumexp(-1)


def attend_backward(grad, q, k, v, out, lse, causal):
    """Gradients of q, k and v of a tile, given those of all tiles' result: `out` and `lse` are all
    tiles' too."""
    grad, q, k, v, out, lse = (t.contiguous() for t in (grad, q, k, v, out, lse))
    if q.device.type == "cpu":
        return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad, q, k, v, out, lse, 0.0, causal
        )
    shape, share = k.shape, q.shape[1] // k.shape[1]
    k, v = (t.repeat_interleave(share, dim=1) for t in (k, v))
    if flash(q):
        n, m, none = q.shape[2], k.shape[2], torch.zeros(2, dtype=torch.uint64, device=q.device)
        op = torch.ops.aten._scaled_dot_product_flash_attention_backward
        # None: dropout's random state
        dq, dk, dv = op(grad, q, k, v, out, lse, None, None, n, m, 0.0, causal, none, none[0])
    else:
        p = (masked_scores(q, k, causal) - lse.unsqueeze(-1)).exp()
        # Of the softmax: the sum over all keys of p dp
        correction = (grad * out).sum(-1, keepdim=True)
        ds = p * (grad @ v.transpose(-1, -2) - correction) / math.sqrt(q.shape[-1])
        dq, dk, dv = ds @ k, ds.transpose(-1, -2) @ q, p.transpose(-1, -2) @ grad
    # Over the copies of a kv-head
    return dq, *(t.view(shape[0], shape[1], share, *shape[2:]).sum(2) for t in (dk, dv))


def flash(q):
    """Whether the GPU's flash kernel takes it."""
    return (
        q.dtype in (torch.float16, torch.bfloat16) and q.shape[-1] % 8 == 0 and q.shape[-1] <= 256
    )


def masked_scores(q, k, causal):
    scores = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
    later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
    return scores.masked_fill(later, float("-inf")) if causal else scores


class Sum:
    """Tiles of attention, combined as they come, in float32 at least: out (B, H, n, D), lse (B, H,
    n)."""

    def __init__(self, q):
        wide = torch.promote_types(q.dtype, torch.float32)
        self.out = torch.zeros_like(q, dtype=wide)
        self.lse = torch.full(q.shape[:3], float("-inf"), dtype=wide, device=q.device)

    def add(self, queries, out, lse):
        """A tile's result, for a slice of the queries."""
        old, lse = self.lse[:, :, queries], lse.to(self.lse.dtype)
        new = torch.logaddexp(old, lse)
        here = self.out[:, :, queries]
        here.mul_((old - new).exp_().unsqueeze(-1)).add_(out * (lse - new).exp_().unsqueeze(-1))
        self.lse[:, :, queries] = new


# --- what an attention core refuses


def check_group(group):
    """Raise ValueError where this rank has no place in the group."""
    if dist.get_rank(group) < 0:
        raise ValueError("this rank is not in the group: give each rank its own group")


def check_qkv(q, k, v):
    """Raise ValueError unless q is (B, H, T', D), k and v are (B, H_kv, T', D), H is a multiple of
    H_kv, and all have one dtype."""
    fits = q.dim() == k.dim() == 4 and k.shape == v.shape and q.dtype == k.dtype == v.dtype
    fits = fits and q.shape[0] == k.shape[0] and q.shape[2:] == k.shape[2:]
    if not fits or q.shape[1] % k.shape[1]:
        found = ", ".join(f"{name} {tuple(t.shape)} {t.dtype}" for name, t in zip("qkv", (q, k, v)))
        raise ValueError(
            "attention takes q (B, H, T', D), k and v (B, H_kv, T', D) of this rank's tokens, of one "
            f"dtype, and H a multiple of H_kv, not {found}: transpose, cast or repeat heads first"
        )


# --- ring


def rotate(tensor, into, group):
    """Start to send to the next rank of the ring, and to receive from the one before. Returns the
    works."""
    rank, n = dist.get_rank(group), dist.get_world_size(group)
    if n == 1:
        into.copy_(tensor)
        return []
    pair = [
        dist.P2POp(dist.isend, tensor, group=group, group_peer=(rank + 1) % n),
        dist.P2POp(dist.irecv, into, group=group, group_peer=(rank - 1) % n),
    ]
    return dist.batch_isend_irecv(pair)


def finish(works):
    for work in works:
        work.wait()


class RingAttention(torch.autograd.Function):
    """q (B, H, T', D), k and v (B, H_kv, T', D) of this rank's tokens -> attention to all tokens
    (B, H, T', D)."""

    @staticmethod
    def forward(ctx, q, k, v, group, zigzag):
        rank, n = dist.get_rank(group), dist.get_world_size(group)
        total, kv = Sum(q), torch.stack((k, v))
        following = torch.empty_like(kv)
        for step in range(n):
            works = rotate(kv, following, group) if step < n - 1 else []
            seen = tile(rank, (rank - step) % n, n, q.shape[2], zigzag)
            if seen:
                queries, keys, causal = seen
                total.add(
                    queries, *attend(q[:, :, queries], kv[0][:, :, keys], kv[1][:, :, keys], causal)
                )
            finish(works)
            kv, following = following, kv
        out = total.out.to(q.dtype)
        ctx.save_for_backward(q, k, v, out, total.lse)
        ctx.group, ctx.zigzag = group, zigzag
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        q, k, v, out, lse = ctx.saved_tensors
        rank, n = dist.get_rank(ctx.group), dist.get_world_size(ctx.group)
        kv = torch.stack((k, v))
        following, dq = torch.empty_like(kv), torch.zeros_like(q, dtype=lse.dtype)
        # The sums that are here, and where the next ones come in: at first zeros, to which nobody
        # has added yet
        dkv, arriving, travelling = (
            torch.empty_like(kv, dtype=lse.dtype),
            torch.zeros_like(kv, dtype=lse.dtype),
            [],
        )
        for step in range(n):
            works = rotate(kv, following, ctx.group) if step < n - 1 else []
            seen = tile(rank, (rank - step) % n, n, q.shape[2], ctx.zigzag)
            if seen:
                queries, keys, causal = seen
                here = [t[:, :, queries] for t in (grad, q, out, lse)]
                grads = attend_backward(*here[:2], *(t[:, :, keys] for t in kv), *here[2:], causal)
                dq[:, :, queries] += grads[0]
            # What the ranks before have added to the dK and dV of this step's keys
            finish(travelling)
            dkv, arriving = arriving, dkv
            if seen:
                dkv[0][:, :, keys] += grads[1]
                dkv[1][:, :, keys] += grads[2]
            travelling = rotate(dkv, arriving, ctx.group)
            finish(works)
            kv, following = following, kv
        finish(travelling)  # home: the last keys were the next rank's
        dk, dv = arriving.to(k.dtype)
        return dq.to(q.dtype), dk, dv, None, None


class Ring(nn.Module):
    """In place of attention's core: ring attention over `group`.

    q (B, H, T', D), k and v (B, H_kv, T', D) -> (B, H, T', D).

        ring = Ring(group)                      # has no parameters: one serves all layers
        where = ring.positions(T)               # (T',): the positions of a sequence held here
        x = shard(tokens, where)                # (B, T) -> (B, T')
        y = shard(targets, where, fill=-100)    # shift targets before the cut; padding has none
        # in each layer, with q and k rotated by `where`: out = ring(q, k, v)
        loss = F.cross_entropy(logits.flatten(0, 1), y.flatten(), reduction="sum") / count
        loss.backward()                         # count: valid targets of all ranks' tokens
        # after the last micro-batch, once for each parameter:
        dist.all_reduce(p.grad, group=group)    # a sum: nothing is averaged

    Attention is causal and scaled by 1/sqrt(D). It has no mask and no dropout: a call with
    `is_causal` or a mask is a TypeError.
    Cut tokens by `positions`, never by chunk(). Which query sees which key follows from the rank
    alone, so another cut gives wrong numbers without a word. An embedding or a rotation that
    depends on the position gets `where`.
    Heads come before tokens in q, k and v. Swapped dimensions go unnoticed.
    B and T' are the same on all ranks. If they differ, the process group aborts or hangs.
    A gradient of a gradient is a RuntimeError.

    Raises ValueError for q, k and v that do not fit together, for an odd T' in a zigzag, and in a
    group without this rank."""

    attention = RingAttention

    def __init__(self, group, zigzag=True):
        super().__init__()
        check_group(group)
        self.group, self.zigzag = group, zigzag

    def positions(self, length):
        """The positions of a sequence that this rank must hold."""
        rank, n = dist.get_rank(self.group), dist.get_world_size(self.group)
        return positions(length, rank, n, zigzag=self.zigzag)

    def forward(self, q, k, v):
        check_qkv(q, k, v)
        if self.zigzag and q.shape[2] % 2 and dist.get_world_size(self.group) > 1:
            raise ValueError(
                f"a zigzag holds two equal chunks, not {q.shape[2]} tokens: cut sequences by positions(), or give zigzag=False"
            )
        return self.attention.apply(q, k, v, self.group, self.zigzag)


# --- gather


class GatheredAttention(torch.autograd.Function):
    """The same by gathering all keys and values, which are kept for backward."""

    @staticmethod
    def forward(ctx, q, k, v, group, zigzag):
        rank, n = dist.get_rank(group), dist.get_world_size(group)
        mine = torch.stack((k, v))
        everyone = mine.new_empty(n, *mine.shape)  # (N, 2, B, H_kv, T', D)
        all_gather(everyone.flatten(0, 1), mine, group=group)
        total = Sum(q)
        for source in range(n):
            seen = tile(rank, source, n, q.shape[2], zigzag)
            if seen:
                queries, keys, causal = seen
                total.add(
                    queries, *attend(q[:, :, queries], *everyone[source][:, :, :, keys], causal)
                )
        out = total.out.to(q.dtype)
        ctx.save_for_backward(q, everyone, out, total.lse)
        ctx.group, ctx.zigzag = group, zigzag
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        q, everyone, out, lse = ctx.saved_tensors
        rank, n = dist.get_rank(ctx.group), dist.get_world_size(ctx.group)
        dq, sums = torch.zeros_like(q, dtype=lse.dtype), torch.zeros_like(everyone, dtype=lse.dtype)
        for source in range(n):
            seen = tile(rank, source, n, q.shape[2], ctx.zigzag)
            if seen:
                queries, keys, causal = seen
                here = [t[:, :, queries] for t in (grad, q, out, lse)]
                grads = attend_backward(
                    *here[:2], *everyone[source][:, :, :, keys], *here[2:], causal
                )
                dq[:, :, queries] += grads[0]
                sums[source][:, :, :, keys] += torch.stack(grads[1:])
        dk, dv = reduce_scatter(sums, ctx.group).to(q.dtype)
        return dq.to(q.dtype), dk, dv, None, None


def reduce_scatter(x, group):
    """The sum of all ranks' x (N, ...), of which rank i gets x[i]."""
    if dist.get_backend(group) == "gloo":  # its own sends twice the bytes
        pieces = torch.empty_like(x)
        dist.all_to_all_single(pieces, x, group=group)
        return pieces.sum(0)
    mine = torch.empty_like(x[0])
    native_reduce_scatter(mine, x.flatten(0, 1), group=group)
    return mine


class Gather(Ring):
    """In place of attention's core: attention to gathered keys and values. Used like Ring, and
    as causal."""

    attention = GatheredAttention


# --- ulysses


def exchange(x, group, cut, join):
    """Cuts dimension `cut` of x into N pieces, one for each rank, and joins what comes along
    dimension `join`."""
    n = dist.get_world_size(group)
    sent = torch.stack(x.chunk(n, dim=cut))
    got = torch.empty_like(sent)
    dist.all_to_all_single(got, sent, group=group)
    return torch.cat(got.unbind(0), dim=join)


class Exchange(torch.autograd.Function):
    """The all-to-all between "all heads of some tokens" and "some heads of all tokens"; its
    backward is the way back."""

    @staticmethod
    def forward(ctx, x, group, cut, join):
        ctx.group, ctx.cut, ctx.join = group, cut, join
        return exchange(x, group, cut, join)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        return exchange(grad, ctx.group, ctx.join, ctx.cut), None, None, None


class Ulysses(nn.Module):
    """In place of attention's core: heads are dealt out over `group`, and `core` computes attention
    of this rank's heads for all tokens. With fewer kv-heads than ranks, copies of them travel.

        core = functools.partial(F.scaled_dot_product_attention, is_causal=True, enable_gqa=True)
        ulysses = Ulysses(group, core)
        where = ulysses.positions(T)            # one run of tokens a rank
        # the rest as with Ring

    ring-ulysses is Ulysses(group of U ranks, Ring(group of R ranks)), and holds zigzags.
    Mask, scale and dropout are the core's own. It gets q (B, H/n, n T', D), k and v.
    Tokens in another order than `positions` gives are wrong without a word.

    Raises ValueError for q, k and v that do not fit together, for heads that the n ranks do not
    divide, and for a core that does not return the shape of q."""

    def __init__(self, group, core):
        super().__init__()
        check_group(group)
        self.group, self.core = group, core

    def positions(self, length):
        """The positions of a sequence that this rank must hold."""
        u, n = dist.get_rank(self.group), dist.get_world_size(self.group)
        if not isinstance(self.core, Ring):
            return positions(length, u, 1, n, zigzag=False)
        r, rings = dist.get_rank(self.core.group), dist.get_world_size(self.core.group)
        return positions(length, r * n + u, rings, n, self.core.zigzag)

    def forward(self, q, k, v):
        check_qkv(q, k, v)
        n = dist.get_world_size(self.group)
        if q.shape[1] % n:
            raise ValueError(
                f"Ulysses deals heads out: {q.shape[1]} of them do not divide by {n} ranks"
            )
        copies = n // math.gcd(k.shape[1], n)
        kv = torch.cat((k, v), dim=-1).repeat_interleave(copies, dim=1)  # (B, H_kv copies, T', 2 D)
        q, kv = (Exchange.apply(t, self.group, 1, 2) for t in (q, kv))
        k, v = kv.chunk(2, dim=-1)
        out = self.core(q, k, v)
        if out.shape != q.shape:
            shapes = f"the shape of q {tuple(q.shape)}, not {tuple(out.shape)}"
            raise ValueError(f"Ulysses' core must return {shapes}: transpose its result")
        return Exchange.apply(out, self.group, 2, 1)


class SumOver(torch.autograd.Function):
    """The sum of all ranks' x. Every rank computes the same loss of it, which counts once: so each
    term gets the sum's gradient as every rank has it, not summed again."""

    @staticmethod
    def forward(ctx, x, group):
        total = x.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        return grad, None


class OverSequence(nn.Module):
    """A router's sums over a sequence, of which each rank has a part."""

    def __init__(self, group):
        super().__init__()
        self.group = group

    def forward(self, sums):
        return SumOver.apply(sums, self.group)


KINDS = ("ring", "ulysses", "gather", "ring-ulysses")


def grid(kind, n, rings=None):
    """(R, U) of n ranks for a kind; `rings`: R, where it is to be chosen (default: the most
    square)."""
    if kind != "ring-ulysses":
        return (1, n) if kind == "ulysses" else (n, 1)
    rings = rings or next(r for r in range(math.isqrt(n), 0, -1) if n % r == 0)
    return rings, n // rings


# --- inference: a prompt over all ranks, then tokens one by one


class CachedCore(nn.Module):
    """An attention core that keeps keys and values, each rank those of its tokens, and then answers
    single queries.

    begin(valid): the next forward is the prompt's; valid (T',): which tokens are no padding. Later
    forwards have one token, the same on all ranks: `owner` keeps its key and value; each rank
    attends to what it has, and the parts are combined.

    It has no backward. Raises RuntimeError for a prompt without `begin`, and for more than one
    token after it."""

    def __init__(self, core, group):
        super().__init__()
        self.core, self.group, self.valid = core, group, None
        self.k, self.v, self.owner = None, None, 0

    def begin(self, valid):
        self.valid = valid

    def forward(self, q, k, v):
        if self.valid is not None:
            self.k, self.v, self.valid = k[:, :, self.valid], v[:, :, self.valid], None
            return self.core(q, k, v)
        if self.k is None or q.shape[2] != 1:
            raise RuntimeError("call begin(valid) before a prompt; after it, one token at a time")
        if self.owner == dist.get_rank(self.group):
            self.k, self.v = torch.cat((self.k, k), dim=2), torch.cat((self.v, v), dim=2)
        self.owner = (self.owner + 1) % dist.get_world_size(self.group)
        total = Sum(q)
        if self.k.shape[2]:
            total.add(slice(0, 1), *attend(q, self.k, self.v, False))
        top = total.lse.clone()
        dist.all_reduce(top, op=dist.ReduceOp.MAX, group=self.group)
        weight = (total.lse - top).exp().unsqueeze(-1)
        both = torch.cat((total.out * weight, weight), dim=-1)  # (B, H, 1, D + 1)
        dist.all_reduce(both, group=self.group)
        return (both[..., :-1] / both[..., -1:]).to(q.dtype)


# --- for model.py's GPT ---


def parallelize(model, group, kind="ring", ring_group=None, ulysses_group=None, zigzag=True):
    """Replace every block's attention core, in place, and return the model. Then each rank gives it
    its own tokens:

        where = positions(T, rank, R, U, zigzag)    # R x U ranks, see `grid`; ulysses: no zigzag
        x, y = shard(tokens, where), shard(targets, where, -1)
        loss = model(x, where, targets=y, count=count)    # count: the global batch's valid targets
        loss.backward()
        # once a step: the sum over `group` of each parameter's gradient, as in data parallelism

    group: all ranks. ring_group, ulysses_group: for kind "ring-ulysses"; a rank of the group is its
    ring's rank x U + its ulysses' rank. Learned positions: clamp those of the padding to what the
    model knows. A router must get no padding.

    Raises ValueError for another model or one that is parallel already, for an unknown kind, and
    for groups that do not fit. The model's first forward raises it for other positions than the
    kind's."""
    if kind not in KINDS:
        raise ValueError(
            f"there is no context parallelism of kind {kind!r}: choose one of {', '.join(KINDS)}"
        )
    world = dist.get_world_size(group)
    if kind == "ring-ulysses":
        if None in (ring_group, ulysses_group):
            raise ValueError(
                "ring-ulysses needs this rank's two groups, of its ring and of its ulysses ranks"
            )
        rings, ulysses = dist.get_world_size(ring_group), dist.get_world_size(ulysses_group)
        if rings * ulysses != world:
            have = f"groups of {rings} and {ulysses}"
            raise ValueError(f"{have} do not make the {world} ranks of `group`: make others")
    for block in blocks_of(model):
        if kind == "ring":
            core = Ring(group, zigzag)
        elif kind == "gather":
            core = Gather(group, zigzag)
        elif kind == "ulysses":
            core = Ulysses(group, block.attn.core)
        else:
            core = Ulysses(ulysses_group, Ring(ring_group, zigzag))
        block.attn.core = core
        if hasattr(block.mlp, "router"):
            router = block.mlp.router
            router.over_sequence = nn.Sequential(router.over_sequence, OverSequence(group))
    if world > 1 and len(model.blocks):
        check_first_forward(model, core, world)
    return model


def blocks_of(model):
    """The blocks of a GPT whose attention is its own. Raises ValueError for another model."""
    try:
        blocks = [block for block in model.blocks.values() if block.attn.core and block.mlp]
    except AttributeError:
        raise ValueError(
            "parallelize knows the GPT of model.py alone: in another model call Ring(group), "
            "Gather(group) or Ulysses(group, core) where it calls its attention"
        ) from None
    if any(isinstance(block.attn.core, (Ring, Ulysses)) for block in blocks):
        raise ValueError("this model is context-parallel already: parallelize a new one")
    return blocks


def check_first_forward(model, core, world):
    """Have the model's first forward, and no later one, compare its positions with those that
    `core` needs."""

    def check(model, inputs, named):
        handle.remove()
        given = named.get("positions", inputs[1] if len(inputs) > 1 else None)
        if given is None or not same_positions(given, core.positions(len(given) * world)):
            raise ValueError(
                "these are not the positions that this rank must hold: cut tokens by positions() "
                "with parallelize's grid and zigzag, and give them to the model too"
            )

    handle = model.register_forward_pre_hook(check, with_kwargs=True)


def same_positions(given, due):
    """Whether positions are those that are due; padding may be clamped.

    Replace it where tensors have no values (fake)."""
    given = given.cpu()
    return len(given) == len(due) and torch.equal(given, due.clamp(max=int(given.max())))


# --- demo ---

import time

import ddp
import harness
import model as gpt
from harness import data, formulas
from harness.ledger import human


def main():
    parser = harness.parser(__doc__)
    g = parser.add_argument_group("context parallelism")
    why = "how attention reaches other ranks' keys: ulysses mostly sends least, a ring goes to any number of ranks"
    g.add_argument("--kind", choices=KINDS, default="ring", help=why)
    g.add_argument(
        "--rings",
        **harness.POSITIVE,
        help="ring-ulysses: ranks of a ring (default: the most square)",
    )
    why = "one run of tokens a rank in place of the zigzag, to compare: the last rank has most of the work"
    g.add_argument("--contiguous", action="store_true", help=why)
    why = "no training: the text's first N tokens (default: 4096) as a prompt over all ranks, and 16 tokens generated after it"
    g.add_argument("--prefill", **harness.POSITIVE, nargs="?", const=4096, help=why)
    harness.plot_flag(
        g, "run nothing, draw who computes what, and when, in a ring of --nproc ranks"
    )
    args = parser.parse_args()
    harness.check_plot(args)
    if args.plot:
        return plot(args.plot, args.nproc or 4)
    for flag, there, kinds in (
        ("rings", args.rings, "ring-ulysses"),
        ("contiguous", args.contiguous, "ring or gather"),
    ):
        if there and args.kind not in kinds.split(" or "):
            raise harness.Refused(
                f"--{flag} means nothing with --kind {args.kind}: use --kind {kinds}, or leave it out"
            )
    if args.prefill:
        check_prompt(args)
        args.context, args.batch, args.microbatches, args.family = (
            args.prefill + 16,
            1,
            1,
            args.family or "llama",
        )
    config = harness.configure(args)
    harness.check_batch(args, 1)
    harness.launch(
        prefill if args.prefill else demo, args, check=lambda world: check(args, config, world)
    )


def check_prompt(args):
    """Refuse a prompt that is longer than the text."""
    try:
        tokens = len(data.load(args.data, args.tokenizer).tokens)
    except data.DataError as e:
        raise harness.Refused(str(e)) from e
    if tokens < args.prefill:
        raise harness.Refused(
            f"--prefill {args.prefill}, but {args.data} has {tokens} tokens: give less, or another --data"
        )


def check(args, config, world):
    ring, ulysses = grid(args.kind, world, args.rings)
    check_shape(config, ring, ulysses, world)


def check_shape(config, ring, ulysses, world, tp=1):
    """Refuse numbers that do not divide; tp: over how many ranks tensor parallelism has cut the
    heads."""
    if ring * ulysses != world:
        raise harness.Refused(f"rings of {ring} do not divide {world} ranks: choose another number")
    if config.heads // tp % ulysses:
        have = f"{config.heads // tp} heads"
        raise harness.Refused(
            f"Ulysses deals heads out, and {have} do not divide by {ulysses} ranks: change one of them"
        )


def make_groups(ring, ulysses):
    """This rank's groups of a two-dimensional world: that of its ring, that of its ulysses
    ranks."""
    ranks = torch.arange(ring * ulysses).view(ring, ulysses)
    made = [[(dist.new_group(row), row) for row in rows.tolist()] for rows in (ranks.T, ranks)]
    return [next(group for group, row in groups if dist.get_rank() in row) for groups in made]


def demo(run):
    args, c, e, n, group = run.args, run.config, run.dtype.itemsize, run.world, dist.group.WORLD
    ring, ulysses = grid(args.kind, n, args.rings)
    zigzag = not args.contiguous and args.kind != "ulysses"
    two = make_groups(ring, ulysses) if args.kind == "ring-ulysses" else (None, None)
    run.groups(cp=group, **(dict(zip(("ring", "ulysses"), two)) if two[0] else {}))
    model = run.fill(parallelize(run.meta_model(), group, args.kind, *two, zigzag))
    parameters = list(model.parameters())
    # Each rank's gradients are of its own tokens
    sync = ddp.DDP(parameters, group, args.microbatches)
    optimizer = harness.make_optimizer(parameters, args)
    where = positions(c.context, run.rank, ring, ulysses, zigzag).to(run.device)
    for step in run.steps(optimizer):
        sync.zero_grad()
        loss = run.zero()
        # All sequences, on every rank; of each its part
        for tokens, targets, samples in run.microbatches(step):
            tokens, targets = shard(tokens, where), shard(targets, where, -1)
            # count: the global batch's tokens
            part = model(
                tokens,
                where.clamp(max=c.context - 1),
                targets=targets,
                count=run.count,
                samples=samples,
            )
            part.backward()
            loss += part.detach()
        sync.finish()
        dist.all_reduce(loss, group=group)
        norm = harness.grad_norm(parameters)
        run.check(loss, norm, model.named)
        harness.clip(parameters, norm, args.grad_clip)
        optimizer.step()
        run.log(loss, norm)

    size = sum(p.numel() for p in parameters) * e
    heads = c.heads, c.kv_heads, c.width // c.heads
    each = formulas.context_parallel_sent(
        args.kind, ring, ulysses, args.batch, len(where), *heads, e
    )
    texts = {
        "send": "(4 r e + 2 a) B T C_kv a block: K and V twice, dK and dV",
        "all_gather": "2 r B T C_kv e a block",
        "reduce_scatter": "2 r B T C_kv a a block",
        "all_to_all": "4 r (B T / N) (C + C_kv) e a block",
    }
    if two[0]:
        texts["send"] = f"(4 r e + 2 a) B T C_kv / U a block; R = {ring}, r = (R-1)/R"
        texts["all_to_all"] = f"4 r (B T / N) (C + C_kv) e a block; U = {ulysses}, r = (U-1)/U"
    names = {"send": "ring", "all_to_all": "ulysses"} if two[0] else {}
    sent = {
        ("all_reduce", "cp"): (
            harness.formulas.all_reduce_sent(size + 8, n),
            "2 r P e, and the loss, 8 bytes",
        )
    }
    for operation, amount in each.items():
        name = (
            "all_to_all"
            if operation == "reduce_scatter" and dist.get_backend(group) == "gloo"
            else operation
        )
        if amount:
            sent[name, names.get(operation, "cp")] = (c.layers * amount, texts[operation])
    one = harness.activation_bytes(c, args.batch // args.microbatches, e) * len(where) / c.context
    held = run.states(size, "P e") | {"activations_peak": (c.layers * one, "1/N of one process's")}
    pairs = [work(r, ring, len(where) * ulysses, zigzag) for r in range(ring)]
    both = [work(r, ring, 2, z) for z in (True, False) for r in (0, ring - 1)]
    notes = [
        f"{c.context} tokens: {len(where)} a rank, {len(where) * n - c.context} padding in all; r = {n - 1}/{n}",
        f"work of attention, of an even share, by rank of the ring: {' '.join(f'{p * ring / sum(pairs):.0%}' for p in pairs)}",
    ]
    if ring > 1:
        notes.append(
            f"  first and last rank: zigzag {both[0]} and {both[1]} chunk pairs, contiguous {both[2]} and {both[3]}"
        )
        notes.append(
            "the ring hides its traffic where T/N > (C_kv / C) e f / w, of flop/s and byte/s"
        )
    return run.receipt(
        {"cp": n, "kind": args.kind, "ring": ring, "ulysses": ulysses}, sent, held, notes
    )


@torch.no_grad()
def prefill(run, generate=16):
    """A long prompt over all ranks, tokens after it from the sharded cache; the same tokens as one
    process."""
    args, c, group = run.args, run.config, dist.group.WORLD
    ring, ulysses = grid(args.kind, run.world, args.rings)
    zigzag = not args.contiguous and args.kind != "ulysses"
    two = make_groups(ring, ulysses) if args.kind == "ring-ulysses" else (None, None)
    model = run.fill(parallelize(run.meta_model(), group, args.kind, *two, zigzag))
    cores = []
    for block in model.blocks.values():
        block.attn.core = CachedCore(block.attn.core, group)
        cores.append(block.attn.core)
    prompt = torch.as_tensor(
        run.corpus.tokens[: args.prefill].astype("int64"), device=run.device
    ).unsqueeze(0)
    length = prompt.shape[1]
    where = positions(length, run.rank, ring, ulysses, zigzag).to(run.device)
    for core in cores:
        core.begin(where < length)
    start = time.perf_counter()
    logits = model(shard(prompt, where), where.clamp(max=length - 1))
    last = (where == length - 1).nonzero()
    token = (
        logits[0, last[0, 0]].argmax().view(1)
        if len(last)
        else torch.zeros(1, dtype=torch.int64, device=run.device)
    )
    dist.all_reduce(token, group=group)  # one rank has the prompt's last token
    tokens, middle = [token.item()], time.perf_counter()
    for i in range(generate - 1):
        position = torch.tensor([length + i], device=run.device)
        tokens.append(
            model(torch.tensor([[tokens[-1]]], device=run.device), position)[0, -1].argmax().item()
        )
    end = time.perf_counter()
    cache = sum(t.nbytes for core in cores for t in (core.k, core.v))
    formula = (
        2
        * c.layers
        * c.kv_heads
        * (c.width // c.heads)
        * run.dtype.itemsize
        * (length + generate - 1)
    )
    run.print(
        f"prompt: {length:,} tokens on {run.world} ranks in {middle - start:.2f} s, {length / (middle - start):,.0f} tokens/s"
    )
    run.print(
        f"then {generate - 1} tokens in {end - middle:.2f} s, {(generate - 1) / (end - middle):,.0f} tokens/s"
    )
    total = torch.tensor(cache, device=run.device)
    dist.all_reduce(total)
    whole = human(formula).strip()
    run.print(
        f"cache: {human(cache).strip()} on this rank; all ranks {total.item():,}, formula {formula:,} ({whole})"
    )
    run.print(f"tokens: {' '.join(map(str, tokens))}")
    code = int(total.item() != formula)
    if length <= 16384 and run.rank == 0:  # one process: the whole sequence anew for each token
        alone = gpt.build(c, args.seed, run.device, run.dtype)
        whole = prompt
        for token in tokens:
            whole = torch.cat((whole, torch.tensor([[token]], device=run.device)), dim=1)
        logits = alone(whole[:, :-1])[0, length - 1 :].double()  # with our tokens before each
        chosen = logits.gather(1, torch.tensor(tokens, device=run.device).unsqueeze(1))
        # Logits that near are equal, to rounding
        behind = (logits.amax(1) - chosen.squeeze(1)).max().item()
        same = behind <= harness.TOLERANCE[args.dtype]["loss"] * logits.abs().max().item()
        code |= int(not same)
        run.print(
            "one process generates the same tokens"
            if same
            else f"one process prefers others by {behind:.1e}  <-- differs"
        )
    return code


def plot(name, ring):
    """The scores of a sequence, chunk by chunk, without and with the zigzag: a color a rank, in
    each cell the step in which it gets there, because then the keys are at that rank; beside it
    each rank's part of the work."""
    plt = harness.pyplot()
    figure, axes = plt.subplots(
        1, 4, figsize=(13, 3.8), width_ratios=(4, 2, 4, 2), layout="constrained"
    )
    colors, n = plt.get_cmap("tab10").colors, 2 * ring
    for (scores, bars), zigzag in zip((axes[:2], axes[2:]), (False, True)):
        owner = {
            p: rank
            for rank in range(ring)
            for p in positions(n, rank, ring, zigzag=zigzag).tolist()
        }
        for q in range(n):
            for k in range(q + 1):
                corner = (k, q), (k + 1, q), (k, q + 1), (k + 1, q + 1)
                # Of its own keys a chunk sees half
                shape = [corner[i] for i in ((0, 2, 3) if q == k else (0, 1, 3, 2))]
                scores.add_patch(
                    plt.Polygon(shape, color=colors[owner[q] % 10], alpha=0.6, ec="white")
                )
                at = (k + 0.33, q + 0.67) if q == k else (k + 0.5, q + 0.5)
                scores.text(*at, (owner[q] - owner[k]) % ring, ha="center", va="center", fontsize=8)
        chunks = [f"{c} (rank {owner[c]})" for c in range(n)]
        scores.set(
            xlim=(0, n),
            ylim=(n, 0),
            aspect="equal",
            xlabel="chunk of keys",
            yticks=[c + 0.5 for c in range(n)],
        )
        scores.set_yticks([c + 0.5 for c in range(n)], chunks, fontsize=8)
        scores.set_xticks([c + 0.5 for c in range(n)], range(n), fontsize=8)
        scores.set_title("zigzag" if zigzag else "contiguous", loc="left")
        scores.set_ylabel("chunk of queries")
        pairs = [work(rank, ring, 1024, zigzag) for rank in range(ring)]
        share = [p * ring / sum(pairs) for p in pairs]
        bars.barh(range(ring), share, color=[colors[rank % 10] for rank in range(ring)], alpha=0.6)
        bars.set_yticks(range(ring), [f"rank {rank}" for rank in range(ring)], fontsize=8)
        bars.set(xlabel="work, of an even share", xlim=(0, 2))
        bars.invert_yaxis()
        bars.axvline(1, color="gray", linewidth=0.8)
    figure.suptitle(
        f"causal attention on a ring of {ring}: who computes it, and in which step",
        x=0.01,
        ha="left",
        fontsize=11,
    )
    harness.save(figure, name)


if __name__ == "__main__":
    harness.script(main)
