"""Tensor parallelism: every layer is cut across the ranks; each rank computes its part of every
layer, for the whole batch.

What is split, on t ranks (here 2): the matrices, by heads, by hidden units and by the vocabulary.
Not the batch.

    x --f--> up   (rows cut: column-parallel)  -> gelu -> down (columns cut: row-parallel) --g--> y
    (B,T,C)  [H/2, C]  rank 0                 (B,T,H/2)   [C, H/2]  rank 0    \\
             [H/2, C]  rank 1                 (B,T,H/2)   [C, H/2]  rank 1    + all-reduce    (B,T,C)

(A weight is stored (out, in), so Megatron's "columns" of A in Y = X A are the rows here.) The first
matrix gives each rank some hidden units, or some heads of attention, which it can work on alone;
the second multiplies them by its part and gets a partial sum of the output. (The rows of q, k and v
are grouped by key/value head, q..q k v | q..q k v | ...: a contiguous piece is whole heads.) Norms,
row-parallel biases and the residual stream are whole on every rank. The vocabulary is cut too: each
rank embeds the tokens of its rows (all but one of the terms are zero), and computes the logits of
its rows. A dimension that does not divide by t is padded with zeros at the end: padded hidden units
stay zero, padded logits count as minus infinity, and neither changes a loss or a gradient.

What is sent:

    f   forward: identity      backward: all-reduce        where a block's input enters its projections
    g   forward: all-reduce    backward: identity          where a row-parallel layer has its partial sums

One f stands before all projections that share an input (q, k and v; gate and up): one all-reduce,
not one for each. A row-parallel layer adds its bias after g, once. Cross-entropy over logits that
no rank has in full needs, for each token, the largest logit, the sum of exponentials and the
target's logit: three numbers, reduced; its backward, softmax - onehot, is local.

Backward: g adds up the partial sums; each term enters the sum with factor 1, so the sum's gradient,
which every rank has, is each term's. All ranks go on with the same y and compute the same loss: one
loss, not t of them. (To sum its gradient over the ranks, as the backward of an all-reduce of
different losses does, would make it t times too large.) f is the mirror image: x is used by every
rank's part, so the gradients that reach it through all of them are added up. So what stands before
f gets its whole gradient, the same on each rank, and nothing is sent for it after backward. A loss
is divided by the tokens of the whole batch, so the gradients of micro-batches add up.

What it costs, per rank, e bytes an element, r = (t-1)/t: each block 2 all-reduces forward and 2
backward of the (B, T, C) activations, 8 r B T C e by rings. Once more for the embedding (forward)
and for the head's input (backward); and three (B, T) for the loss. Held: 1/t of the matrices, of
their gradients and optimizer states; of a block's activations T B C (8 + 24/t) bytes (16 bit,
hidden 4C; the paper's 10 has dropout masks, which are made again here): the residual stream stays
whole. Nothing
overlaps: beside the 72 B T C^2 / t flops of a block at f flop/s, its bytes at w bytes/s add (t-1) e
f / (9 C w) of that time.

When it is the wrong choice: where (t-1) e f / (9 C w) is not far below 1: over the links between
nodes, or in narrow models. And where t would have to be more than the key/value heads, or does not
divide them.

On a model of yours. Every rank starts from the same weights and gets the same tokens:

    mlp.norm = nn.Sequential(mlp.norm, Enter(group))  # one f before all layers that share an input
    mlp.up = ColumnParallelLinear(shard(mlp.up.weight, 0, group), shard(mlp.up.bias, 0, group))
    mlp.down = RowParallelLinear(shard(mlp.down.weight, 1, group), mlp.down.bias, group)  # has g
    embed = VocabParallelEmbedding(shard(embed.weight, 0, group), group)
    head = nn.Sequential(Enter(group), ColumnParallelLinear(shard(head.weight, 0, group)))
    criterion = VocabParallelCrossEntropy(vocab, group)  # now the optimizer: it needs the pieces
    for tokens, targets in microbatches:  # loss: sum over these tokens / valid tokens of the batch
        criterion(model(tokens), targets, count).backward()
    clip_grad_norm(model.parameters(), 1.0, group)  # torch's would let whole parameters drift apart

(q, k, v and gate are cut as up is; attention's output projection as down is.)

These mistakes make no error here:
- Different tokens on the ranks. (Where the embedding is whole, `grad_norm` notices.)
- No f before a cut layer (`grad_norm` notices), f twice, or f before a whole layer: the gradients
  of all that stands before it are wrong.
- Ranks that do not divide the heads, or the key/value heads: cuts go through heads. A view that
  counts heads mostly fails on that, not always.
- A fused qkv in the order q | k | v, as in torch's nn.MultiheadAttention: a piece of it is not a
  number of whole heads. Order its rows by head first, w.view(3, heads, D, -1).transpose(0, 1)
  .flatten(0, 2), and read them so; or cut q, k and v one by one.
- Hidden units that do not divide, with an activation whose act(0) is not 0: the padding learns.
- Dropout: on whole tensors all ranks must draw one mask (equal seeds, equally many draws); on heads
  and hidden units each rank draws its own, from another generator.

    torchrun --nproc_per_node=4 tensor_parallel.py          python tensor_parallel.py --family llama --kv-heads 4

Papers: Shoeybi et al. 2019, Megatron-LM, arXiv:1909.08053, section 3; Korthikanti et al. 2022,
arXiv:2205.05198, sections 4.1 and 4.2.1 (activations); Narayanan et al. 2021, arXiv:2104.04473,
section 3.2 (where to use it).
"""

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F


class CopyToGroup(torch.autograd.Function):
    """f: x as it is; in backward the gradients of all ranks' uses of x are summed.

    in_place: sum them in the memory of the gradient that arrives. Right only where x goes into
    products alone: nobody else holds the gradient of a product. The backward of a sum, such as
    CopyToGroup(u) + v, hands one tensor to both of its terms."""

    @staticmethod
    def forward(ctx, x, group, in_place=False):
        ctx.group, ctx.in_place = group, in_place
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        contiguous = torch.contiguous_format
        grad = grad.contiguous() if ctx.in_place else grad.clone(memory_format=contiguous)
        dist.all_reduce(grad, group=ctx.group)
        return grad, None, None


class ReduceFromGroup(torch.autograd.Function):
    """g: the sum of all ranks' partial x; every rank's term gets the sum's gradient as it is.

    in_place: the sum takes the place of x. Right only where nobody else needs the partial sum."""

    @staticmethod
    def forward(ctx, x, group, in_place=False):
        if in_place:
            ctx.mark_dirty(x)
        else:
            x = x.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx, grad):
        return grad, None, None


def piece(full, dim, index, count):
    """Piece `index` of `count` of a tensor along `dim`: ceil(size / count) wide, padded with zeros
    where there is no more."""
    size = -(-full.shape[dim] // count)
    start = min(index * size, full.shape[dim])
    part = full.narrow(dim, start, min(size, full.shape[dim] - start))
    shape = list(full.shape)
    shape[dim] = size - part.shape[dim]
    # A copy, so that the whole can be freed
    return (
        torch.cat((part, part.new_zeros(shape)), dim)
        if shape[dim]
        else part.clone(memory_format=torch.contiguous_format)
    )


def world_if_none(group):
    """The group of all ranks in the place of None, which means that group in torch.distributed."""
    return dist.group.WORLD if group is None else group


def placement(parameter):
    """What a parameter is a piece of: {"shape": of the whole, "cuts": {dimension: (group, start,
    size)} of this rank's piece without its padding, "copies": groups whose ranks hold the same,
    "partial": groups over which its gradient is still to be summed after backward}."""
    default = {"shape": tuple(parameter.shape), "cuts": {}, "copies": [], "partial": []}
    return default | getattr(parameter, "placement", {})


def shard(parameter, dim, group):
    """This rank's piece of a parameter, cut along `dim`; its `placement` says so. Attributes of the
    parameter go along. Works on the meta device too. Raises ValueError for a second cut of the same
    dimension or over the same group."""
    dim, group, whole = dim % parameter.dim(), world_if_none(group), placement(parameter)
    if dim in whole["cuts"] or split_over(parameter, group):
        raise ValueError(
            f"this parameter is a piece already, of a whole of shape {tuple(whole['shape'])}: "
            "shard each parameter once, and use one piece wherever a matrix is shared"
        )
    rank, size = dist.get_rank(group), parameter.shape[dim]
    part = piece(parameter.detach(), dim, rank, dist.get_world_size(group))
    part = nn.Parameter(part, requires_grad=parameter.requires_grad)
    part.__dict__.update(parameter.__dict__)
    start = min(rank * part.shape[dim], size)
    cut = (group, start, min(part.shape[dim], size - start))
    part.placement = whole | {"cuts": whole["cuts"] | {dim: cut}}
    return part


def split_over(parameter, group):
    """Whether each rank of the group holds another piece of the parameter."""
    group = world_if_none(group)
    return any(group is other for other, _, _ in placement(parameter)["cuts"].values())


def require_piece(weight, dim, layer):
    """Raise ValueError for a weight that is not cut: t whole ones would make t times the output."""
    if dim not in placement(weight)["cuts"]:
        call = f"shard(weight, {dim}, group)"
        raise ValueError(f"{layer} takes this rank's piece of a weight: pass {call}")


class Enter(nn.Module):
    """f as a module: stands where an input enters the layers that are split, once before all of
    them, and never before a whole layer. in_place spares a copy in backward: see CopyToGroup."""

    def __init__(self, group, in_place=False):
        super().__init__()
        self.group, self.in_place = group, in_place

    def forward(self, x):
        return CopyToGroup.apply(x, self.group, self.in_place)


class Leave(nn.Module):
    """g as a module: stands where partial sums leave a layer that is split. in_place spares a copy:
    see ReduceFromGroup."""

    def __init__(self, group, in_place=False):
        super().__init__()
        self.group, self.in_place = group, in_place

    def forward(self, x):
        return ReduceFromGroup.apply(x, self.group, self.in_place)


class ColumnParallelLinear(nn.Module):
    """A linear layer whose outputs are split: x (..., in) -> this rank's outputs (..., out / t). x
    must have passed f.

    weight: this rank's (out / t, in), from shard. bias: this rank's (out / t,) or None. A fused
    weight has its rows grouped by head. Padded rows need an activation with act(0) = 0."""

    def __init__(self, weight, bias=None):
        super().__init__()
        require_piece(weight, 0, "ColumnParallelLinear")
        self.weight, self.bias = weight, bias

    def forward(self, x):
        return F.linear(x, self.weight, self.bias)


class RowParallelLinear(nn.Module):
    """A linear layer whose inputs are split: this rank's inputs (..., in / t) -> the whole output
    (..., out), by g.

    weight: this rank's (out, in / t), from shard. bias: the whole (out,), added once, after the
    sum; or None."""

    def __init__(self, weight, bias, group):
        super().__init__()
        require_piece(weight, 1, "RowParallelLinear")
        self.weight, self.bias, self.leave = weight, bias, Leave(group, in_place=True)

    def forward(self, x):
        y = self.leave(F.linear(x, self.weight))
        return y if self.bias is None else y + self.bias


class VocabParallelEmbedding(nn.Module):
    """tokens (B, T), below V -> (B, T, C): each rank looks up the tokens of its rows; g adds up,
    one term is not zero.

    weight: this rank's (V / t, C), from shard. A token outside of 0..V-1 is an error."""

    def __init__(self, weight, group):
        super().__init__()
        require_piece(weight, 0, "VocabParallelEmbedding")
        self.weight, self.leave = weight, Leave(group, in_place=True)
        self.start, self.vocab = dist.get_rank(group) * len(weight), weight.placement["shape"][0]

    def forward(self, tokens):
        # No rank has a row for another token: its vector would be zeros. A GPU is not waited for
        refusal = f"tokens must be from 0 to {self.vocab - 1}"
        torch._assert_async(((tokens >= 0) & (tokens < self.vocab)).all(), refusal)
        row = tokens - self.start
        elsewhere = (row < 0) | (row >= len(self.weight))
        x = F.embedding(row.masked_fill(elsewhere, 0), self.weight)
        return self.leave(x.masked_fill(elsewhere.unsqueeze(-1), 0.0))


class CrossEntropyOfParts(torch.autograd.Function):
    """-log softmax(logits)[target] for each of N tokens, from logits (N, V / t) of which each rank
    has a part.

    `start`: the vocabulary's index of the first logit here; `size`: how many are not padding.
    Megatron-LM's vocab_parallel_cross_entropy, with the two sums in one message."""

    @staticmethod
    def forward(ctx, logits, targets, start, size, group):
        ctx.dtype = logits.dtype
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        if size < logits.shape[1]:
            padding = torch.arange(logits.shape[1], device=logits.device) >= size
            logits = logits.masked_fill(padding, float("-inf"))
        top = logits.amax(dim=1)  # (N,)
        dist.all_reduce(top, op=dist.ReduceOp.MAX, group=group)
        shifted = logits - top.unsqueeze(1)
        row = targets - start
        here = (row >= 0) & (row < size)
        row = row.masked_fill(~here, 0).unsqueeze(1)  # (N, 1)
        target = shifted.gather(1, row).squeeze(1).masked_fill(~here, 0.0)
        exp = shifted.exp_()
        sums = torch.stack((exp.sum(dim=1), target))  # (2, N)
        dist.all_reduce(sums, group=group)
        total, target = sums
        ctx.save_for_backward(exp.div_(total.unsqueeze(1)), row, here)
        return total.log() - target

    @staticmethod
    def backward(ctx, grad):
        softmax, row, here = ctx.saved_tensors
        softmax.scatter_add_(1, row, -here.to(softmax.dtype).unsqueeze(1))  # softmax - onehot
        return softmax.mul_(grad.unsqueeze(1)).to(ctx.dtype), None, None, None, None


class VocabParallelCrossEntropy(nn.Module):
    """The loss on split logits: logits (B, T, V / t), targets (B, T), count -> summed cross-entropy
    / count, a scalar that is the same on every rank. count: the valid targets of the whole batch,
    in all its micro-batches. Targets below zero add nothing. One that is not below `vocab` is an
    error."""

    def __init__(self, vocab, group):
        super().__init__()
        self.group = group
        self.vocab, self.width = vocab, -(-vocab // dist.get_world_size(group))
        self.start = dist.get_rank(group) * self.width
        self.size = max(0, min(self.width, vocab - self.start))

    def forward(self, logits, targets, count):
        if logits.shape[-1] != self.width:
            raise ValueError(
                f"a rank has {self.width} of {self.vocab} logits here, not {logits.shape[-1]}: "
                "cut the output projection by shard(weight, 0, group)"
            )
        targets = targets.flatten()
        # No rank has a logit for a larger target: it would count as the largest logit
        refusal = f"targets must be below {self.vocab}, or -1 for none"
        torch._assert_async((targets < self.vocab).all(), refusal)
        logits = logits.flatten(0, -2)
        losses = CrossEntropyOfParts.apply(logits, targets, self.start, self.size, self.group)
        return losses.masked_fill(targets < 0, 0.0).sum() / count


def gather_logits(logits, vocab, group):
    """All logits (..., V), on every rank, from each rank's (..., V / t). For sampling; training
    never needs them."""
    parts = [torch.empty_like(logits) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, logits.contiguous(), group=group)
    return torch.cat(parts, dim=-1)[..., :vocab]


@torch.no_grad()
def grad_norm(parameters, group):
    """The norm of the whole model's gradient, the same on every rank: a float64 scalar. All pieces
    count. Whole parameters, which every rank has, count once.

    The copies of a whole parameter must have one gradient. Raises RuntimeError where their norms
    differ: a cut layer has no f, a partial gradient is not complete (sequence_parallel.py), or the
    ranks got different inputs."""
    parameters = list(parameters)
    # Sums of squares: of the pieces, and of the whole parameters
    sums = torch.zeros(2, dtype=torch.float64, device=parameters[0].device)
    for p in parameters:
        if p.grad is not None:
            square = torch.linalg.vector_norm(p.grad, dtype=torch.float64).square()
            sums[0 if split_over(p, group) else 1] += square
    all_sums = [torch.empty_like(sums) for _ in range(dist.get_world_size(group))]
    dist.all_gather(all_sums, sums, group=group)
    pieces, copies = torch.stack(all_sums).unbind(1)
    if copies.max() - copies.min() > 1e-3 * copies.max():  # more than rounding
        raise RuntimeError(
            f"the ranks' gradients of whole parameters differ, in norm {copies.sqrt().tolist()}: "
            "give all ranks the same tokens, put Enter before cut layers, complete partial gradients"
        )
    return (pieces.sum() + copies[0]).sqrt()


@torch.no_grad()
def clip_grad_norm(parameters, limit, group):
    """Scale gradients in place so that the whole model's norm is at most `limit`. Returns the norm
    before that. torch.nn.utils.clip_grad_norm_ takes the norm of this rank's pieces alone: each
    rank would scale its copies of whole parameters differently."""
    parameters = list(parameters)
    norm = grad_norm(parameters, group)
    scale = (limit / (norm + 1e-6)).clamp(max=1.0)
    for p in parameters:
        if p.grad is not None:
            p.grad.mul_(scale.to(p.grad.dtype))
    return norm


# --- for model.py's GPT ---


def require_gpt(what, attributes, function):
    """Raise ValueError for a model or a config that is not model.py's."""
    if not all(hasattr(what, name) for name in attributes):
        raise ValueError(
            f"{function} knows model.py's GPT alone, not {type(what).__name__}: "
            "build other models from the parts above this section"
        )


def check_heads(config, t):
    """Raise ValueError where t ranks cannot share the heads evenly."""
    heads, kv_heads = config.heads, config.kv_heads  # heads are a multiple of kv_heads
    if kv_heads % t:
        fits = [str(n) for n in range(1, kv_heads + 1) if kv_heads % n == 0]
        raise ValueError(
            f"{heads} heads and {kv_heads} kv-heads do not divide over {t} tensor-parallel ranks: "
            f"use {' or '.join(fits)}, or change the numbers of heads"
        )


def parallelize(model, group):
    """Cut a GPT across `group`, in place, and return it. Works on the meta device and on real
    weights alike. Parameters are replaced by their pieces: make the optimizer afterwards. The model
    has a module `enter` (nn.Identity) before what is cut, and experts have a `leave` behind it: f
    and g take their places. Attention counts its heads from the rows it gets.

    Any of embedding, blocks and head may be missing. Raises ValueError where heads do not divide by
    the group's size, and for a model that is cut already or is not model.py's.
    """
    require_gpt(model, ("config", "embed", "blocks", "head"), "parallelize")
    require_gpt(model.config, ("kv_heads", "experts", "vocab"), "parallelize")
    check_heads(model.config, dist.get_world_size(group))
    done = {}  # parameter -> its piece: a tied matrix is cut once

    def cut(parameter, dim):
        if parameter is not None and parameter not in done:
            done[parameter] = shard(parameter, dim, group)
        return done.get(parameter)

    def column(linear):
        return ColumnParallelLinear(cut(linear.weight, 0), cut(linear.bias, 0))

    def row(linear):
        return RowParallelLinear(cut(linear.weight, 1), linear.bias, group)

    if model.embed is not None:
        model.embed.token = VocabParallelEmbedding(cut(model.embed.token.weight, 0), group)
    for block in model.blocks.values():
        block.attn.enter = Enter(group, in_place=True)
        block.attn.qkv, block.attn.proj = column(block.attn.qkv), row(block.attn.proj)
        mlp = block.mlp
        # (E, out, in): the hidden units of every expert; the router stays whole
        if model.config.experts:
            mlp.enter, mlp.leave = Enter(group, in_place=True), Leave(group, in_place=True)
            experts = mlp.experts
            for name, dim in (("gate", 1), ("up", 1), ("down", 2)):
                setattr(experts, name, cut(getattr(experts, name), dim))
            mlp = mlp.shared
        if mlp is not None:
            mlp.enter, mlp.up, mlp.down = Enter(group, in_place=True), column(mlp.up), row(mlp.down)
            mlp.gate = column(mlp.gate) if mlp.gate is not None else None
    if model.head is not None:
        model.head.enter, model.head.out = Enter(group, in_place=True), column(model.head.out)
        model.loss = VocabParallelCrossEntropy(model.config.vocab, group)
    for p in model.parameters():
        if not split_over(p, group):
            where = placement(p)
            p.placement = where | {"copies": [*where["copies"], group]}
    return model


# Formulas, which the receipt holds against what was counted


# --- demo ---

import harness
from harness import formulas


def main():
    args = harness.parser(__doc__).parse_args()
    config = harness.configure(args)
    harness.check_batch(args, 1)

    def check(world):
        with harness.refusing():
            check_heads(config, world)

    harness.launch(demo, args, check=check)


def demo(run):
    args, group = run.args, dist.group.WORLD
    run.groups(tp=group)
    model = run.fill(parallelize(run.meta_model(), group))
    parameters = list(model.parameters())
    optimizer = harness.make_optimizer(parameters, args)
    for step in run.steps(optimizer):
        optimizer.zero_grad(set_to_none=False)  # gradients stay in memory: the receipt counts them
        loss = run.zero()
        for tokens, targets, samples in run.microbatches(step):  # the whole batch, on every rank
            # Count: the global batch's tokens
            part = model(tokens, targets=targets, count=run.count, samples=samples)
            part.backward()
            loss += part.detach()
        # Over the pieces of all ranks; the loss is already everyone's
        norm = harness.grad_norm(parameters, [group])
        run.check(loss, norm, model.named)
        harness.clip(parameters, norm, args.grad_clip)
        optimizer.step()
        run.log(loss, norm)

    t, c, e = run.world, run.config, run.dtype.itemsize
    norm = 2 * (t - 1) / t * 8  # the squared gradient norm, one float64
    size = formulas.tensor_parallel_sent(c, t, args.batch * c.context, e, c.layers)
    text = f"8 r B T C e a block, 4 r B T C e + 6 r B T e for both ends; r = {t - 1}/{t}"
    sent = {("all_reduce", "tp"): (size + norm, text)}
    activations = c.layers * harness.activation_bytes(c, args.batch // args.microbatches, e, t)
    held = run.states(
        formulas.parameters_held(c, t, c.layers) * e, "(P_whole + P_split / t) e, padded"
    )
    held["activations_peak"] = (
        activations,
        "norms' values of the blocks, and 1/t of heads' and hidden ones",
    )
    micro = args.microbatches
    blocks, calls = c.layers * micro, run.ledger.sent.get(("all_reduce", "tp"), [0])[0]
    notes = [
        f"{(calls - 1 - 4 * micro) / blocks:g} all-reduces a block and micro-batch: 2 forward, 2 backward",
        f"vocabulary of {c.vocab} in {t} parts of {-(-c.vocab // t)}, {-(-c.vocab // t) * t - c.vocab} of them padding",
    ]
    return run.receipt({"tp": t}, sent, held, notes)


if __name__ == "__main__":
    harness.script(main)
