"""Context parallelism: each rank holds a part of every sequence, for the whole model; attention over all of it stays exact.

What is split, on N ranks: the tokens. Norms, projections, MLPs and the loss work on each token alone, and need no other rank.
Attention does: a query looks at keys that other ranks hold. Four ways, `--kind`:

    ring          keys and values travel around the ring while queries stay; N blocks of attention, combined by their
                  log-sum-exps; the next block is on its way while this one is computed (Liu et al. 2023, arXiv:2310.01889)
    gather        every rank gathers all keys and values (Llama 3, arXiv:2407.21783, section 3.3.2): simplest, holds most
    ulysses       two all-to-alls turn "all heads of some tokens" into "some heads of all tokens", attention is local, one turns
                  its result back (Jacobs et al. 2023, arXiv:2309.14509). The ranks must divide the heads
    ring-ulysses  N = R x U: all-to-alls within groups of U, rings of R across (Fang and Zhao 2024, arXiv:2405.07719)

Causal attention on a contiguous split is lopsided: the last rank's queries see everything, the first's next to nothing. So
(zigzag) the sequence is cut into 2 N chunks, and rank i holds chunks i and 2N - 1 - i. What rank i has to do with the keys of
rank j is then one kernel call: without a mask and of the same work for every j but its own, which is causal. (After Ulysses'
exchange every rank sees whole sequences, so that kind alone cuts them in plain order.)

    j = i    its own two chunks: causal          chunk   0 1 2 3 4 5 6 7      rank 1 of 4: q and k of chunks 1 and 6
    j < i    all queries x the first chunk       rank    0 1 2 3 3 2 1 0        j = 0: q 1, 6 x k 0     (7 is later than all)
    j > i    the second chunk's queries x all                                  j = 2: q 6 x k 2, 5     (1 is earlier)

Two blocks' results o1, o2 with log-sum-exps l1, l2 of their scores combine to e^(l1-l) o1 + e^(l2-l) o2, l = log(e^l1 + e^l2)
(Milakov and Gimelshein 2018; Dao et al. 2022, arXiv:2205.14135). Backward needs the final out and l alone: with p = e^(s-l)
each block's gradients are computed as if it were all there is. A rank kept no keys and values but its own, so they go around
once more; dK and dV are sums over the queries of all ranks: they travel on with their K and V, one step behind, and are at home
after N steps. An all-to-all's backward is the all-to-all back.

Sent by a rank, per block and micro-batch, r = (N-1)/N, B sequences of T tokens, C_kv = the width of K, e bytes an element, a
bytes one of the sums (4 at least):

    ring      forward 2 r B T C_kv e        backward the same, and 2 B T C_kv a (dK and dV, N steps)
    gather    forward 2 r B T C_kv e        backward 2 r B T C_kv a
    ulysses   forward 2 r (B T / N) (C + C_kv) e    backward the same (more ranks than kv-heads: copies of these count)
    ring-ulysses   the third with (U-1)/U for r, and the first with (R-1)/R for r and C_kv / U for C_kv
    all but attention: 2 r P e a step, the gradients' all-reduce, as in data parallelism

Grouped queries make C_kv a fraction of C: ring and gather send kv heads alone. The ring hides its traffic if a block of
attention takes longer than the transfer of its keys and values: 2 B (T/N)^2 C flops at F flop/s (half of the pairs are masked)
against 2 B (T/N) C_kv e bytes at W byte/s: T/N > (C_kv / C) e F / W. Held: 1/N of all activations, and all weights; with gather
all keys and values of every block too. For short sequences this is the wrong choice: data parallelism sends less, and what does
not fit there may with sequence_parallel.py.

    torchrun --nproc_per_node=4 context_parallel.py               python context_parallel.py --kind ulysses --family llama
    python context_parallel.py --prefill 4096                     a long prompt over all ranks, and tokens after it
"""

import math

import torch
import torch.distributed as dist
import torch.nn as nn

# torch 2.13 renamed them; older versions know only the second name
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
native_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


# --- who holds what


def positions(length, rank, ring, ulysses=1, zigzag=True):
    """The positions that a rank of ring x ulysses holds of a sequence, (T',) int64: T' is the same on all ranks, and what is
    not below `length` is padding at the end. zigzag: two chunks a ring rank, from the front and from the back."""
    r, u = divmod(rank, ulysses)
    chunks = 2 * ring if zigzag else ring
    size = -(-length // (chunks * ulysses)) * ulysses  # of a chunk: divisible by the ranks that share it
    mine = [r, chunks - 1 - r] if zigzag else [r]
    both = torch.cat([torch.arange(c * size, (c + 1) * size) for c in mine])
    return both.chunk(ulysses)[u]


def shard(x, positions, fill=0):
    """The columns of x (B, T) at some positions -> (B, T'), with `fill` for padding."""
    here = positions.to(x.device).clamp(max=x.shape[1] - 1)
    return x[:, here].masked_fill(positions.to(x.device) >= x.shape[1], fill)


def blocks(rank, source, ring, length, zigzag=True):
    """What queries of a ring rank, `length` of them, see of the keys of another: (queries, keys, causal) as slices, or None."""
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
        block = blocks(rank, source, ring, length, zigzag)
        if block:
            q, k, causal = block
            n, m = q.stop - q.start, k.stop - k.start
            pairs += n * (n + 1) // 2 if causal else n * m
    return pairs


# --- a block of attention, with its log-sum-exp


def attend(q, k, v, causal):
    """q (B, H, n, D), k and v (B, H_kv, m, D) -> softmax(q k^T / sqrt(D)) v (B, H, n, D), the scores' log-sum-exp (B, H, n)."""
    q, k, v = (t.contiguous() for t in (q, k, v))
    if q.device.type == "cpu":  # each backend has a kernel of its own that also returns the log-sum-exp
        return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal)
    k, v = (t.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for t in (k, v))
    if flash(q):
        return torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal)[:2]
    scores = masked_scores(q, k, causal)  # no flash kernel takes them
    return scores.softmax(-1) @ v, scores.logsumexp(-1)


def attend_backward(grad, q, k, v, out, lse, causal):
    """Gradients of q, k and v of a block, given those of all blocks' result: `out` and `lse` are all blocks' too."""
    grad, q, k, v, out, lse = (t.contiguous() for t in (grad, q, k, v, out, lse))
    if q.device.type == "cpu":
        return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(grad, q, k, v, out, lse, 0.0, causal)
    shape, share = k.shape, q.shape[1] // k.shape[1]
    k, v = (t.repeat_interleave(share, dim=1) for t in (k, v))
    if flash(q):
        n, m, none = q.shape[2], k.shape[2], torch.zeros(2, dtype=torch.uint64, device=q.device)
        op = torch.ops.aten._scaled_dot_product_flash_attention_backward
        dq, dk, dv = op(grad, q, k, v, out, lse, None, None, n, m, 0.0, causal, none, none[0])
    else:
        p = (masked_scores(q, k, causal) - lse.unsqueeze(-1)).exp()
        ds = p * (grad @ v.transpose(-1, -2) - (grad * out).sum(-1, keepdim=True)) / math.sqrt(q.shape[-1])
        dq, dk, dv = ds @ k, ds.transpose(-1, -2) @ q, p.transpose(-1, -2) @ grad
    return dq, *(t.view(shape[0], shape[1], share, *shape[2:]).sum(2) for t in (dk, dv))


def flash(q):
    """Whether the GPU's flash kernel takes it."""
    return q.dtype in (torch.float16, torch.bfloat16) and q.shape[-1] % 8 == 0 and q.shape[-1] <= 256


def masked_scores(q, k, causal):
    scores = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
    later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
    return scores.masked_fill(later, float("-inf")) if causal else scores


class Sum:
    """Blocks of attention, combined as they come, in float32 at least: out (B, H, n, D), lse (B, H, n)."""

    def __init__(self, q):
        wide = torch.promote_types(q.dtype, torch.float32)
        self.out = torch.zeros_like(q, dtype=wide)
        self.lse = torch.full(q.shape[:3], float("-inf"), dtype=wide, device=q.device)

    def add(self, queries, out, lse):
        """A block's result, for a slice of the queries."""
        old, lse = self.lse[:, :, queries], lse.to(self.lse.dtype)
        new = torch.logaddexp(old, lse)
        here = self.out[:, :, queries]
        here.mul_((old - new).exp_().unsqueeze(-1)).add_(out * (lse - new).exp_().unsqueeze(-1))
        self.lse[:, :, queries] = new


# --- ring


def rotate(tensor, into, group):
    """Start to send to the next rank of the ring, and to receive from the one before. Returns the works."""
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
    """q (B, H, T', D), k and v (B, H_kv, T', D) of this rank's tokens -> attention to all tokens (B, H, T', D)."""

    @staticmethod
    def forward(ctx, q, k, v, group, zigzag):
        rank, n = dist.get_rank(group), dist.get_world_size(group)
        total, kv = Sum(q), torch.stack((k, v))
        following = torch.empty_like(kv)
        for step in range(n):
            works = rotate(kv, following, group) if step < n - 1 else []
            block = blocks(rank, (rank - step) % n, n, q.shape[2], zigzag)
            if block:
                queries, keys, causal = block
                total.add(queries, *attend(q[:, :, queries], kv[0][:, :, keys], kv[1][:, :, keys], causal))
            finish(works)
            kv, following = following, kv
        out = total.out.to(q.dtype)
        ctx.save_for_backward(q, k, v, out, total.lse)
        ctx.group, ctx.zigzag = group, zigzag
        return out

    @staticmethod
    def backward(ctx, grad):
        q, k, v, out, lse = ctx.saved_tensors
        rank, n = dist.get_rank(ctx.group), dist.get_world_size(ctx.group)
        kv = torch.stack((k, v))
        following, dq = torch.empty_like(kv), torch.zeros_like(q, dtype=lse.dtype)
        dkv, arriving, travelling = torch.empty_like(kv, dtype=lse.dtype), torch.zeros_like(kv, dtype=lse.dtype), []
        for step in range(n):
            works = rotate(kv, following, ctx.group) if step < n - 1 else []
            block, grads = blocks(rank, (rank - step) % n, n, q.shape[2], ctx.zigzag), None
            if block:
                queries, keys, causal = block
                here = [t[:, :, queries] for t in (grad, q, out, lse)]
                grads = attend_backward(*here[:2], *(t[:, :, keys] for t in kv), *here[2:], causal)
                dq[:, :, queries] += grads[0]
            finish(travelling)  # what the ranks before have added to this block's dK and dV
            dkv, arriving = arriving, dkv
            if block:
                dkv[0][:, :, keys] += grads[1]
                dkv[1][:, :, keys] += grads[2]
            travelling = rotate(dkv, arriving, ctx.group)
            finish(works)
            kv, following = following, kv
        finish(travelling)  # home: the last block was the next rank's
        dk, dv = arriving.to(k.dtype)
        return dq.to(q.dtype), dk, dv, None, None


class Ring(nn.Module):
    """In place of AttentionCore: ring attention over `group`."""

    attention = RingAttention

    def __init__(self, group, zigzag=True):
        super().__init__()
        self.group, self.zigzag = group, zigzag

    def forward(self, q, k, v):
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
            block = blocks(rank, source, n, q.shape[2], zigzag)
            if block:
                queries, keys, causal = block
                total.add(queries, *attend(q[:, :, queries], *everyone[source][:, :, :, keys], causal))
        out = total.out.to(q.dtype)
        ctx.save_for_backward(q, everyone, out, total.lse)
        ctx.group, ctx.zigzag = group, zigzag
        return out

    @staticmethod
    def backward(ctx, grad):
        q, everyone, out, lse = ctx.saved_tensors
        rank, n = dist.get_rank(ctx.group), dist.get_world_size(ctx.group)
        dq, sums = torch.zeros_like(q, dtype=lse.dtype), torch.zeros_like(everyone, dtype=lse.dtype)
        for source in range(n):
            block = blocks(rank, source, n, q.shape[2], ctx.zigzag)
            if block:
                queries, keys, causal = block
                here = [t[:, :, queries] for t in (grad, q, out, lse)]
                grads = attend_backward(*here[:2], *everyone[source][:, :, :, keys], *here[2:], causal)
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
    """In place of AttentionCore: attention to gathered keys and values."""

    attention = GatheredAttention


# --- ulysses


def exchange(x, group, cut, join):
    """Cuts dimension `cut` of x into N pieces, one for each rank, and joins what comes along dimension `join`."""
    n = dist.get_world_size(group)
    sent = torch.stack(x.chunk(n, dim=cut))
    got = torch.empty_like(sent)
    dist.all_to_all_single(got, sent, group=group)
    return torch.cat(got.unbind(0), dim=join)


class Exchange(torch.autograd.Function):
    """The all-to-all between "all heads of some tokens" and "some heads of all tokens"; its backward is the way back."""

    @staticmethod
    def forward(ctx, x, group, cut, join):
        ctx.group, ctx.cut, ctx.join = group, cut, join
        return exchange(x, group, cut, join)

    @staticmethod
    def backward(ctx, grad):
        return exchange(grad, ctx.group, ctx.join, ctx.cut), None, None, None


class Ulysses(nn.Module):
    """In place of AttentionCore: heads are dealt out over `group` for attention, which `core` does for all of their tokens.
    With fewer kv-heads than ranks, as many copies of each travel as it takes."""

    def __init__(self, group, core):
        super().__init__()
        self.group, self.core = group, core

    def forward(self, q, k, v):
        n = dist.get_world_size(self.group)
        if q.shape[1] % n:
            raise ValueError(f"Ulysses deals heads out: {q.shape[1]} of them do not divide by {n} ranks")
        copies = n // math.gcd(k.shape[1], n)
        kv = torch.cat((k, v), dim=-1).repeat_interleave(copies, dim=1)  # (B, H_kv copies, T', 2 D)
        q, kv = (Exchange.apply(t, self.group, 1, 2) for t in (q, kv))
        k, v = kv.chunk(2, dim=-1)
        return Exchange.apply(self.core(q, k, v), self.group, 2, 1)


class SumOver(torch.autograd.Function):
    """The sum of all ranks' x. Every rank computes the same loss of it, which counts once: so each term gets the sum's gradient
    as every rank has it, not summed again."""

    @staticmethod
    def forward(ctx, x, group):
        total = x.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx, grad):
        return grad, None


class OverSequence(nn.Module):
    """A router's sums over a sequence, of which each rank has a part."""

    def __init__(self, group):
        super().__init__()
        self.group = group

    def forward(self, sums):
        return SumOver.apply(sums, self.group)


def parallelize(model, group, kind="ring", rings=None, ulysses=None, zigzag=True):
    """Replace every block's attention core, in place, and return the model. Then give it each rank's tokens alone:

        where = positions(T, rank, R, U, zigzag)                   # R x U ranks; U = 1, but for ulysses (R = 1), ring-ulysses
        loss = model(shard(tokens, where), where, targets=shard(targets, where, -1), count=count)

    group: all ranks. rings, ulysses: for kind "ring-ulysses", this rank's two groups (rank = ring's rank x U + ulysses' rank).
    Gradients of all parameters are partial sums over the group, as in data parallelism. Learned positions: pass those of the
    padding clamped to what the model knows. A router must get no padding. Raises ValueError for an unknown kind, and for
    ring-ulysses without its two groups.
    """
    if kind == "ring-ulysses" and None in (rings, ulysses):
        raise ValueError("ring-ulysses needs this rank's two groups, rings and ulysses")
    for block in model.blocks.values():
        if kind == "ring":
            block.attn.core = Ring(group, zigzag)
        elif kind == "gather":
            block.attn.core = Gather(group, zigzag)
        elif kind == "ulysses":
            block.attn.core = Ulysses(group, block.attn.core)
        elif kind == "ring-ulysses":
            block.attn.core = Ulysses(ulysses, Ring(rings, zigzag))
        else:
            raise ValueError(f"there is no context parallelism of kind {kind!r}: choose one of {', '.join(KINDS)}")
        if hasattr(block.mlp, "router"):
            block.mlp.router.over_sequence = nn.Sequential(block.mlp.router.over_sequence, OverSequence(group))
    return model


KINDS = ("ring", "ulysses", "gather", "ring-ulysses")


def shape(kind, n, rings=None):
    """(R, U) of n ranks for a kind; `rings`: R, where it is to be chosen (default: the most square)."""
    if kind != "ring-ulysses":
        return (1, n) if kind == "ulysses" else (n, 1)
    rings = rings or next(r for r in range(math.isqrt(n), 0, -1) if n % r == 0)
    return rings, n // rings


def bytes_sent(kind, ring, ulysses, sequences, tokens, heads, kv_heads, head_size, element_size, forwards=1):
    """{operation: bytes a rank sends} by one block for `sequences` sequences, forward and backward; tokens: those of a rank,
    with padding. forwards: 2 if backward runs the block's forward again. reduce_scatter is all_to_all on gloo."""
    sums = max(element_size, 4)
    sent = {"send": 0.0, "all_gather": 0.0, "reduce_scatter": 0.0, "all_to_all": 0.0}
    if ulysses > 1:
        copies = ulysses // math.gcd(kv_heads, ulysses)
        width = 2 * heads + 2 * kv_heads * copies  # in heads: q and out, k and v
        sent["all_to_all"] = (forwards + 1) * (1 - 1 / ulysses) * sequences * tokens * width * head_size * element_size
        kv_heads, tokens = kv_heads * copies // ulysses, tokens * ulysses
    kv = 2 * sequences * tokens * kv_heads * head_size
    if kind in ("ring", "ring-ulysses") and ring > 1:
        sent["send"] = (forwards + 1) * (ring - 1) * kv * element_size + ring * kv * sums
    if kind == "gather":
        sent["all_gather"] = forwards * (ring - 1) * kv * element_size
        sent["reduce_scatter"] = (ring - 1) * kv * sums
    return sent


# --- inference: a prompt over all ranks, then tokens one by one


class CachedCore(nn.Module):
    """An attention core that keeps keys and values, each rank those of its tokens, and then answers single queries.

    begin(valid): the next forward is the prompt's; valid (T',): which tokens are no padding. Later forwards have one token, the
    same on all ranks: `owner` keeps its key and value; each rank attends to what it has, and the parts are combined."""

    def __init__(self, core, group):
        super().__init__()
        self.core, self.group, self.valid = core, group, None
        self.owner = 0

    def begin(self, valid):
        self.valid = valid

    def forward(self, q, k, v):
        if self.valid is not None:
            self.k, self.v, self.valid = k[:, :, self.valid], v[:, :, self.valid], None
            return self.core(q, k, v)
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


# --- demo ---

import time

import ddp
import harness
import model as gpt
from ledger import human


def main():
    parser = harness.parser(__doc__)
    g = parser.add_argument_group("context parallelism")
    g.add_argument("--kind", choices=KINDS, default="ring", help="see above")
    g.add_argument("--rings", **harness.POSITIVE, help="ring-ulysses: ranks of a ring (default: the most square)")
    g.add_argument("--contiguous", action="store_true", help="one run of tokens a rank: the last ranks have most of the work")
    why = "no training: the text's first N tokens (default: 4096) as a prompt over all ranks, and 16 tokens generated after it"
    g.add_argument("--prefill", **harness.POSITIVE, nargs="?", const=4096, help=why)
    args = parser.parse_args()
    if args.prefill:
        args.context, args.batch, args.microbatches, args.family = args.prefill + 16, 1, 1, args.family or "llama"
    config = harness.configure(args)
    harness.check_batch(args, 1)
    harness.launch(prefill if args.prefill else demo, args, check=lambda world: check(args, config, world))


def check(args, config, world):
    ring, ulysses = shape(args.kind, world, args.rings)
    check_shape(config, ring, ulysses, world)


def check_shape(config, ring, ulysses, world, tp=1):
    """Refuse numbers that do not divide; tp: over how many ranks tensor parallelism has cut the heads."""
    if ring * ulysses != world:
        raise harness.Refused(f"rings of {ring} do not divide {world} ranks: choose another number")
    if config.heads // tp % ulysses:
        have = f"{config.heads // tp} heads"
        raise harness.Refused(f"Ulysses deals heads out, and {have} do not divide by {ulysses} ranks: change one of them")


def make_groups(ring, ulysses):
    """This rank's groups of a two-dimensional world: (ring, ulysses)."""
    ranks = torch.arange(ring * ulysses).view(ring, ulysses)
    made = [[(dist.new_group(row), row) for row in rows.tolist()] for rows in (ranks.T, ranks)]
    return [next(group for group, row in groups if dist.get_rank() in row) for groups in made]


def demo(run):
    args, c, e, n, group = run.args, run.config, run.dtype.itemsize, run.world, dist.group.WORLD
    ring, ulysses = shape(args.kind, n, args.rings)
    zigzag = not args.contiguous and args.kind != "ulysses"
    rings, heads = make_groups(ring, ulysses) if args.kind == "ring-ulysses" else (None, None)
    run.groups(cp=group, **({"ring": rings, "ulysses": heads} if rings else {}))
    model = run.fill(parallelize(run.meta_model(), group, args.kind, rings, heads, zigzag))
    parameters = list(model.parameters())
    sync = ddp.DDP(parameters, group, args.microbatches)
    optimizer = harness.make_optimizer(parameters, args)
    where = positions(c.context, run.rank, ring, ulysses, zigzag).to(run.device)
    for step in run.steps(optimizer):
        sync.zero_grad()
        loss = torch.zeros((), dtype=torch.float64, device=run.device)
        for tokens, targets, samples in run.microbatches(step):  # all sequences, on every rank; of each its part
            tokens, targets = shard(tokens, where), shard(targets, where, -1)
            part = model(tokens, where.clamp(max=c.context - 1), targets=targets, count=run.count, samples=samples)
            part.backward()
            loss += part.detach()
        sync.finish()
        run.update(step, model, optimizer, loss, over=[group])

    size = sum(p.numel() for p in parameters) * e
    each = bytes_sent(args.kind, ring, ulysses, args.batch, len(where), c.heads, c.kv_heads, c.width // c.heads, e)
    texts = {
        "send": "(4 r e + 2 a) B T C_kv a block: K and V twice, dK and dV",
        "all_gather": "2 r B T C_kv e a block",
        "reduce_scatter": "2 r B T C_kv a a block",
        "all_to_all": "4 r (B T / N) (C + C_kv) e a block",
    }
    names = {"send": "ring" if rings else "cp", "all_to_all": "ulysses" if heads else "cp"}
    sent = {("all_reduce", "cp"): (ddp.bytes_sent(size + 8, n), "2 r P e, and the loss, 8 bytes")}
    for operation, amount in each.items():
        name = "all_to_all" if operation == "reduce_scatter" and dist.get_backend(group) == "gloo" else operation
        if amount:
            sent[name, names.get(operation, "cp")] = (c.layers * amount, texts[operation])
    states = 2 if args.optimizer == "adamw" else 0
    one = harness.activation_bytes(c, args.batch // args.microbatches, e) * len(where) / c.context
    held = {
        "parameters": (size, "P e"),
        "gradients": (size, "P e"),
        "optimizer": (states * size, f"{states} P e"),
        "activations_peak": (c.layers * one, "1/N of one process's"),
    }
    pairs = [work(r, ring, len(where) * ulysses, zigzag) for r in range(ring)]
    both = [work(r, ring, 2, z) for z in (True, False) for r in (0, ring - 1)]
    notes = [
        f"{c.context} tokens: {len(where)} a rank, {len(where) * n - c.context} padding in all; r = {n - 1}/{n}",
        f"work of attention, of an even share, by rank of the ring: {' '.join(f'{p * ring / sum(pairs):.0%}' for p in pairs)}",
    ]
    if ring > 1:
        notes.append(f"  first and last rank: zigzag {both[0]} and {both[1]} chunk pairs, contiguous {both[2]} and {both[3]}")
        notes.append("the ring hides its traffic where T/N > (C_kv / C) e F / W, of flop/s and byte/s")
    return run.receipt({"cp": n, "kind": args.kind, "ring": ring, "ulysses": ulysses}, sent, held, notes)


@torch.no_grad()
def prefill(run, generate=16):
    """A long prompt over all ranks, tokens after it from the sharded cache; the same tokens as one process."""
    args, c, group = run.args, run.config, dist.group.WORLD
    ring, ulysses = shape(args.kind, run.world, args.rings)
    zigzag = not args.contiguous and args.kind != "ulysses"
    rings, heads = make_groups(ring, ulysses) if args.kind == "ring-ulysses" else (None, None)
    model = run.fill(parallelize(run.meta_model(), group, args.kind, rings, heads, zigzag))
    cores = []
    for block in model.blocks.values():
        block.attn.core = CachedCore(block.attn.core, group)
        cores.append(block.attn.core)
    prompt = torch.as_tensor(run.corpus.tokens[: args.prefill].astype("int64"), device=run.device).unsqueeze(0)
    length = prompt.shape[1]
    where = positions(length, run.rank, ring, ulysses, zigzag).to(run.device)
    for core in cores:
        core.begin(where < length)
    start = time.perf_counter()
    logits = model(shard(prompt, where), where.clamp(max=length - 1))
    last = (where == length - 1).nonzero()
    token = logits[0, last[0, 0]].argmax().view(1) if len(last) else torch.zeros(1, dtype=torch.int64, device=run.device)
    dist.all_reduce(token, group=group)  # one rank has the prompt's last token
    tokens, middle = [token.item()], time.perf_counter()
    for i in range(generate - 1):
        position = torch.tensor([length + i], device=run.device)
        tokens.append(model(torch.tensor([[tokens[-1]]], device=run.device), position)[0, -1].argmax().item())
    end = time.perf_counter()
    cache = sum(t.nbytes for core in cores for t in (core.k, core.v))
    formula = 2 * c.layers * c.kv_heads * (c.width // c.heads) * run.dtype.itemsize * (length + generate - 1)
    run.print(
        f"prompt: {length:,} tokens on {run.world} ranks in {middle - start:.2f} s, {length / (middle - start):,.0f} tokens/s"
    )
    run.print(f"then {generate - 1} tokens in {end - middle:.2f} s, {(generate - 1) / (end - middle):,.0f} tokens/s")
    total = torch.tensor(cache, device=run.device)
    dist.all_reduce(total)
    whole = human(formula).strip()
    run.print(f"cache: {human(cache).strip()} on this rank; all ranks {total.item():,}, formula {formula:,} ({whole})")
    run.print(f"tokens: {' '.join(map(str, tokens))}")
    code = int(total.item() != formula)
    if length <= 16384 and run.rank == 0:  # one process: the whole sequence anew for each token
        alone = gpt.build(c, args.seed, run.device, run.dtype)
        whole = prompt
        for token in tokens:
            whole = torch.cat((whole, torch.tensor([[token]], device=run.device)), dim=1)
        logits = alone(whole[:, :-1])[0, length - 1 :].double()  # with our tokens before each
        chosen = logits.gather(1, torch.tensor(tokens, device=run.device).unsqueeze(1))
        behind = (logits.amax(1) - chosen.squeeze(1)).max().item()  # logits that near are equal, to rounding
        same = behind <= harness.TOLERANCE[args.dtype]["loss"] * logits.abs().max().item()
        code |= int(not same)
        run.print(
            "one process generates the same tokens" if same else f"one process prefers others by {behind:.1e}  <-- differs"
        )
    return code


if __name__ == "__main__":
    harness.script(main)
