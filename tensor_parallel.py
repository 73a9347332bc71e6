"""Tensor parallelism: large matrices are split over the ranks, which all work on the same batch.

    x --f--> up (outputs split) -> gelu -> down (inputs split) --g--> y     here with 2 ranks
             rank 0: units 0..H/2          units 0..H/2
             rank 1: units H/2..H          units H/2..H        partial sums, added by g

A rank is a process with its own device. The first matrix gives each rank half of the H hidden
units. The activation works on each unit by itself, so no rank needs another's half. The second
matrix turns each half into a partial sum of the output. Attention is split alike, by heads, and so
is the vocabulary. Norms, the biases after g and the residual stream are whole on every rank.

Held: 1/t of the matrices on t ranks, of their gradients and optimizer states, and of the
activations inside attention and MLP. For models, or activations, that are too large for a device.

Sent: g adds the partial sums in forward (one all-reduce). f adds the gradients of x in backward
(one all-reduce), because every rank's half used x. A block has an f and a g around attention and
again around its MLP: 4 all-reduces of a tensor (B, T, C), B sequences of T tokens, C wide. Of S
bytes each sends 2 S (t-1)/t (collectives.py). The embedding and the head have one each. Every layer
waits: with t = 8, C = 8192, 16 bits and 400 TFLOP/s for 0.17 of its matmuls' time at 450 GB/s, 1.5
at 50 GB/s. So stay inside a machine. tensor_overlap.py hides those of f.

Backward: g's is the identity, because y is the sum of the partial sums: each of them gets y's
gradient. All ranks compute the same loss from the same y: it is one loss, not t of them. (The
all_reduce of torch.distributed.nn would sum the gradients: t times too much.) f's sum is the
complete gradient of x, so all earlier layers get complete gradients, the same on every rank.

    torchrun --nproc_per_node=4 tensor_parallel.py
    python tensor_parallel.py --family llama --kv-heads 4

Shoeybi et al. 2019, Megatron-LM, arXiv:1909.08053, section 3.
"""

import math

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.autograd.function import once_differentiable  # refuses a gradient of a gradient

# --- f and g
#
#                           forward                       backward
#     f    CopyToGroup      identity                      all-reduce of the gradients
#     g    ReduceFromGroup  all-reduce of partial sums    identity


class CopyToGroup(torch.autograd.Function):
    """f: every rank's part of a layer uses x. Backward sums the gradients of all these uses. What
    reads x itself, such as the residual, is not summed."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return x

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        total = grad.clone(memory_format=torch.contiguous_format)  # grad may have other users
        dist.all_reduce(total, group=ctx.group)
        return total, None


class ReduceFromGroup(torch.autograd.Function):
    """g: the sum over the ranks, in place of x. In backward every rank's x gets its gradient."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.mark_dirty(x)
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        return grad, None


def plain_mlp(x, up, down, group):
    """The picture in three lines: x (B, T, C) -> (B, T, C). torch's weights are (out, in). So rank
    r of t cuts its shards out of the whole up (H, C) and down (C, H) by

        up = up.chunk(t, dim=0)[r]        # (H/t, C). As a parameter: shard(up, 0, group)
        down = down.chunk(t, dim=1)[r]    # (C, H/t)                   shard(down, 1, group)"""
    x = CopyToGroup.apply(x, group)  # f
    hidden = F.gelu(F.linear(x, up))  # (B, T, H/t): this rank's hidden units
    return ReduceFromGroup.apply(F.linear(hidden, down), group)  # g


class Enter(nn.Module):
    """f as a module. Put one right before the split layers that share an input: one for q, k and v
    together. Not before an unsplit layer: its gradient is complete on every rank, and f would
    multiply it by t. function: another f, such as sequence_parallel.py's."""

    def __init__(self, group, function=CopyToGroup):
        super().__init__()
        self.group, self.function = group, function

    def forward(self, x):
        return self.function.apply(x, self.group)


class Leave(nn.Module):
    """g as a module. It overwrites x, a partial sum that nothing else needs, with the sum."""

    def __init__(self, group, function=ReduceFromGroup):
        super().__init__()
        self.group, self.function = group, function

    def forward(self, x):
        return self.function.apply(x, self.group)


# --- the two matrices between f and g, cut by `shard`, below


class ColumnParallelLinear(nn.Module):
    """Splits the outputs: x (..., in) -> this rank's (..., out / t). Put f before it. The paper
    writes Y = X A, so these are columns of A. torch stores A transposed: they are rows of `weight`.

    Attention: a shard must be whole heads. Where t does not divide `out`, zeros fill the last
    shards. The activation must then map 0 to 0, or the padding gets gradients."""

    def __init__(self, linear, group):
        super().__init__()
        self.weight = shard(linear.weight, 0, group)  # (out / t, in)
        self.bias = shard(linear.bias, 0, group)

    def forward(self, x):
        return F.linear(x, self.weight, self.bias)


class RowParallelLinear(nn.Module):
    """Splits the inputs: x (..., in / t) -> the complete (..., out), by g."""

    def __init__(self, linear, group):
        super().__init__()
        self.weight = shard(linear.weight, 1, group)  # (out, in / t)
        self.bias = linear.bias  # (out,)
        self.leave = Leave(group)

    def forward(self, x):
        y = self.leave(F.linear(x, self.weight))
        # After g, or the sum would contain the bias t times
        return y if self.bias is None else y + self.bias


# --- a model of yours. All t ranks, which torchrun starts, have the same weights and tokens
#
#     dist.init_process_group()
#     group = dist.group.WORLD
#     t = dist.get_world_size(group)  # it divides the heads and the kv-heads
#     for block in model.blocks:  # parameters get other names: load weights before
#         attn, mlp = block.attn, block.mlp
#         # A fused qkv with all q, then all k, then all v would be cut wrong, without an error.
#         # First bring each rank's q, k and v together:
#         #     parts = torch.arange(len(attn.qkv.weight)).split([q_size, kv_size, kv_size])
#         #     rows = torch.cat([torch.cat(own) for own in zip(*(p.chunk(t) for p in parts))])
#         #     for p in attn.qkv.parameters():
#         #         p.data = p.data[rows]
#         # Separate q, k and v, or gate and up, share one Enter: put it after the norm before them.
#         # A whole weight that reads this rank's heads, such as q_norm's, needs an f itself:
#         #     nn.utils.parametrize.register_parametrization(attn.q_norm, "weight", Enter(group))
#         attn.qkv = nn.Sequential(Enter(group), ColumnParallelLinear(attn.qkv, group))
#         attn.proj = RowParallelLinear(attn.proj, group)
#         attn.heads //= t  # and what else forward reads: a rank's q, k and v are C/t wide
#         mlp.up = nn.Sequential(Enter(group), ColumnParallelLinear(mlp.up, group))
#         mlp.down = RowParallelLinear(mlp.down, group)
#     model.embed = VocabParallelEmbedding(model.embed, group)
#     model.head = nn.Sequential(Enter(group), ColumnParallelLinear(model.head, group))
#     model.head[1].weight = model.embed.weight  # if they were tied
#     criterion = VocabParallelCrossEntropy(model.embed.vocab, group)
#     optimizer = torch.optim.AdamW(model.parameters())  # after the cut, which makes new ones
#     optimizer.zero_grad()  # each step begins
#     for tokens, targets in microbatches:  # target_count: valid targets of all micro-batches
#         criterion(model(tokens), targets, target_count).backward()
#     check_replicas_agree(model.parameters(), group)  # in the first step
#     norm = grad_norm(model.parameters(), group)  # clip_grad_norm_ sees this rank's shards only
#     nn.utils.clip_grads_with_norm_(model.parameters(), 1.0, norm)
#     optimizer.step()
#
# Then logits = unshard(model(tokens), -1, model.embed.vocab, group) are those of all tokens. To
# save p, unshard it for each dim and its group in placement(p)["cuts"], to placement(p)["shape"].
# Dropout needs equal masks on all ranks in the residual stream, other ones inside attention and
# MLP. Mistakes that nothing catches: docs/fix/not-checked.md.

# --- shards: a rank's part of a parameter, and where it lies


def span(size, index, shards):
    """(start, length, width): shard `index` holds size[start : start + length] of a dimension. All
    shards are `width` wide; beyond `length` there are zeros. 5 rows on 4 ranks: 2, 2, 1 and 0."""
    width = math.ceil(size / shards)
    start = min(index * width, size)
    return start, min(width, size - start), width


def shard_tensor(full, dim, index, shards):
    """Shard `index` of a tensor along `dim`, in memory of its own, padded with zeros."""
    start, length, width = span(full.shape[dim], index, shards)
    part = full.new_zeros([*full.shape[:dim], width, *full.shape[dim + 1 :]])
    part.narrow(dim, 0, length).copy_(full.narrow(dim, start, length))
    return part


def placement(parameter):
    """Where this rank's part of a parameter lies, a dict in the attribute p.placement:

    shape      the shape of the whole parameter
    cuts       {dimension: (group, start, length)}: this rank has whole[start : start + length], the
               other ranks of the group have other parts

    Others are those of later lessons: composition.py has the list."""
    default = dict(shape=tuple(parameter.shape), cuts={}, partial=[], data=None)
    return default | getattr(parameter, "placement", {})


def shard(parameter, dim, group):
    """This rank's shard, a new parameter with a `placement`. None stays None. Raises ValueError if
    this dimension has been cut before, or if the parameter has been cut over this group."""
    if parameter is None:
        return None
    dim, group = dim % parameter.dim(), group or dist.group.WORLD
    cuts = placement(parameter)["cuts"]
    if dim in cuts or group in [over for over, _, _ in cuts.values()]:
        raise ValueError("this parameter is a shard already: cut it once, and tie its shards")
    index, shards = dist.get_rank(group), dist.get_world_size(group)
    full = parameter.detach()
    part = nn.Parameter(shard_tensor(full, dim, index, shards), parameter.requires_grad)
    part.__dict__.update(parameter.__dict__)  # keep other attributes, such as model.py's `init`
    start, length, _ = span(parameter.shape[dim], index, shards)
    part.placement = placement(parameter) | {"cuts": cuts | {dim: (group, start, length)}}
    return part


def unshard(part, dim, size, group):
    """All ranks' shards together, without their padding: `size` along `dim`. Sends no gradient."""
    parts = [torch.empty_like(part) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, part.detach().contiguous(), group=group)
    return torch.cat(parts, dim).narrow(dim, 0, size)


# --- the vocabulary, split too: V/t rows of the embedding and V/t logits per token on each rank


class VocabParallelEmbedding(nn.Module):
    """tokens (B, T) -> (B, T, C). A rank looks up the tokens whose rows it has. For all others it
    makes zeros. g adds up the ranks' results."""

    def __init__(self, embedding, group):
        super().__init__()
        self.vocab = len(embedding.weight)
        self.weight = shard(embedding.weight, 0, group)  # (V / t, C)
        self.start = dist.get_rank(group) * len(self.weight)
        self.leave = Leave(group)
        self.padding_row = None  # padding_idx, if this rank has its row
        if embedding.padding_idx in range(self.start, self.start + len(self.weight)):
            self.padding_row = embedding.padding_idx - self.start

    def forward(self, tokens):
        # Without this a token beyond the vocabulary would get zeros. It makes no host wait
        valid = (tokens >= 0) & (tokens < self.vocab)
        torch._assert_async(valid.all(), f"tokens must be from 0 to {self.vocab - 1}")
        row = tokens - self.start
        outside = (row < 0) | (row >= len(self.weight))
        x = F.embedding(row.masked_fill(outside, 0), self.weight, self.padding_row)
        return self.leave(x.masked_fill(outside.unsqueeze(-1), 0.0))


class CrossEntropyFunction(torch.autograd.Function):
    """-log softmax(logits)[target] of n tokens. A rank's logits (n, V / t) are the columns start to
    start + length of the whole, then padding. Backward, softmax - onehot, sends nothing."""

    @staticmethod
    def forward(ctx, logits, targets, start, length, group):
        ctx.dtype = logits.dtype
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        if length < logits.shape[1]:
            padding = torch.arange(logits.shape[1], device=logits.device) >= length
            logits = logits.masked_fill(padding, float("-inf"))
        largest = logits.amax(dim=1)  # (n,): subtracted so that exp can't overflow; it cancels
        dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group)
        shifted = logits - largest.unsqueeze(1)  # (n, V / t)
        column = targets - start  # (n,): the target's column, if this rank has it
        outside = (column < 0) | (column >= length)
        column = column.masked_fill(outside, 0).unsqueeze(1)  # (n, 1)
        of_target = shifted.gather(1, column).squeeze(1).masked_fill(outside, 0.0)
        exp = shifted.exp_()
        sums = torch.stack((exp.sum(dim=1), of_target))  # (2, n): one message
        dist.all_reduce(sums, group=group)
        total, of_target = sums
        ctx.save_for_backward(exp.div_(total.unsqueeze(1)), column, outside)
        return total.log() - of_target

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        softmax, column, outside = ctx.saved_tensors
        is_here = (~outside).to(softmax.dtype).unsqueeze(1)  # (n, 1): 1 if the target is here
        softmax.scatter_add_(1, column, -is_here)  # in place: nothing else reads it
        return softmax.mul_(grad.unsqueeze(1)).to(ctx.dtype), None, None, None, None


class VocabParallelCrossEntropy(nn.Module):
    """logits (B, T, V / t), targets (B, T) -> summed cross-entropy / target_count, the same scalar
    on every rank. target_count: the number of valid targets of the whole batch, all micro-batches
    together. Targets below zero are not valid: they add nothing."""

    def __init__(self, vocab, group):
        super().__init__()
        self.vocab, self.group = vocab, group
        rank, t = dist.get_rank(group), dist.get_world_size(group)
        self.start, self.length, self.width = span(vocab, rank, t)

    def forward(self, logits, targets, target_count):
        if logits.shape[-1] != self.width:
            why = f"a rank has {self.width} of {self.vocab} logits here, not {logits.shape[-1]}"
            raise ValueError(f"{why}: make the output projection a ColumnParallelLinear")
        logits, targets = logits.flatten(0, -2), targets.flatten()  # (n, V / t), (n,)
        # A larger target is on no rank: its loss would be wrong, silently
        torch._assert_async((targets < self.vocab).all(), f"targets must be below {self.vocab}")
        losses = CrossEntropyFunction.apply(logits, targets, self.start, self.length, self.group)
        return losses.masked_fill(targets < 0, 0.0).sum() / target_count


# --- the gradient's norm


@torch.no_grad()
def grad_norm(parameters, group):
    """The norm of the whole gradient, a float64 scalar, the same on every rank. If c ranks hold a
    gradient alike, each adds a c-th of its square: all of a shard's, 1/t of a whole parameter's."""
    t, gradients = dist.get_world_size(group), {}  # {c: gradients}
    for p in parameters:
        if p.grad is not None:
            cuts = placement(p)["cuts"].values()
            shards = math.prod(dist.get_world_size(over) for over, _, _ in cuts)
            gradients.setdefault(t / shards, []).append(p.grad)
    square = 0.0
    for copies, held in gradients.items():
        norms = torch.stack(torch._foreach_norm(held, dtype=torch.float64))
        square = square + norms.square().sum() / copies
    dist.all_reduce(square, group=group)
    return square.sqrt()


# --- a mistake that would be silent: refused


def check_replicas_agree(parameters, group):
    """Refuse NaN, and gradients of whole parameters that differ between ranks by more than
    rounding: an f or a sum is missing. Call it after backward, in the first step only: it makes the
    host wait."""
    whole = [p for p in parameters if p.grad is not None and not placement(p)["cuts"]]
    if not whole:
        return
    norms = torch.stack(torch._foreach_norm([p.grad for p in whole], dtype=torch.float64))
    of_ranks = [torch.empty_like(norms) for _ in range(dist.get_world_size(group))]
    dist.all_gather(of_ranks, norms, group=group)
    low, high = torch.stack(of_ranks).aminmax(dim=0)  # for each parameter; NaN if a rank has NaN
    differ = ~(high - low <= 5e-4 * high)  # above bfloat16's rounding
    if differ.any():
        i = differ.nonzero()[0].item()
        raise RuntimeError(
            f"the ranks' gradients of whole parameters differ, or are NaN, {differ.sum()} of "
            f"{len(whole)}, the first of shape {list(whole[i].shape)}, in norm {low[i]:.6g} to "
            f"{high[i]:.6g}: give all ranks the same tokens and dropout masks, put Enter before "
            "layers, complete partial gradients"
        )


# --- for model.py's GPT ---


def parallelize_tensors(model, group, whole_experts=False):
    """Cut a GPT over `group`, in place, and return it; on the meta device too. Any of embedding,
    blocks and head may be missing. Make the optimizer afterwards: parameters are replaced. Raises
    ValueError where heads do not divide, and for a model that is cut already. whole_experts: leave
    the experts as they are."""
    check_heads(model.config, dist.get_world_size(group))
    for block in model.blocks.values():
        attn, mlp = block.attn, block.mlp
        attn.enter = Enter(group)
        attn.qkv = ColumnParallelLinear(attn.qkv, group)
        attn.proj = RowParallelLinear(attn.proj, group)
        if model.config.experts:
            if not whole_experts:
                cut_experts(mlp, group)
            mlp = mlp.shared  # None, or an ordinary MLP beside the experts. The router stays whole
        if mlp is not None:
            mlp.enter = Enter(group)
            if mlp.gate is not None:
                mlp.gate = ColumnParallelLinear(mlp.gate, group)
            mlp.up = ColumnParallelLinear(mlp.up, group)
            mlp.down = RowParallelLinear(mlp.down, group)
    if model.embed is not None:
        model.embed.token = VocabParallelEmbedding(model.embed.token, group)
    if model.head is not None:
        model.head.enter = Enter(group)
        model.head.out = ColumnParallelLinear(model.head.out, group)
        model.loss = VocabParallelCrossEntropy(model.config.vocab, group)
        if model.config.tied and model.embed is not None:
            model.head.out.weight = model.embed.token.weight
    return model


def cut_experts(mixture, group):
    mixture.enter = Enter(group)
    mixture.leave = Leave(group)
    experts = mixture.experts  # their weights are (E, out, in)
    experts.gate, experts.up = shard(experts.gate, 1, group), shard(experts.up, 1, group)
    experts.down = shard(experts.down, 2, group)


def check_heads(config, t):
    """Raise ValueError unless each of t ranks gets whole kv-heads."""
    kv_heads = config.kv_heads  # the heads are a multiple of them
    if kv_heads % t:
        fits = " or ".join(str(n) for n in range(1, kv_heads + 1) if kv_heads % n == 0)
        raise ValueError(
            f"{config.heads} heads and {kv_heads} kv-heads do not divide over {t} tensor-parallel "
            f"ranks: use {fits}, or change the numbers of heads"
        )


# --- demo ---

import harness
import proof
import receipts.tensor_parallel
from receipts.formulas import Group, sizes_of


def main():
    args = harness.parser(__doc__).parse_args()
    config = harness.configure(args)
    harness.check_batch(args, 1)
    proof.launch(demo, args, check=lambda world: check_heads(config, world))


def demo(run):  # a proof.Run: batches, log, and the receipt that compares with one process
    args, group = run.args, dist.group.WORLD
    run.groups(tp=group)  # a name for the receipt
    model = run.fill(parallelize_tensors(run.meta_model(), group))
    parameters = list(model.parameters())
    optimizer = harness.make_optimizer(parameters, args)
    for step in run.steps(optimizer):
        optimizer.zero_grad(set_to_none=False)  # gradients stay in memory: the receipt counts them
        loss = run.zero()
        for tokens, targets, samples in run.microbatches(step):  # the whole batch, on every rank
            part = model(tokens, targets=targets, target_count=run.target_count, sample_ids=samples)
            part.backward()
            loss += part.detach()  # the same on every rank
        norm = grad_norm(parameters, group)
        run.check(loss, norm, model.named)
        harness.clip(parameters, norm, args.grad_clip)
        optimizer.step()
        run.log()
    sizes = sizes_of(args, run.config, tp=run.world)
    sent, held = receipts.tensor_parallel.expected(sizes, Group("tp", run.world))
    return run.receipt({"tp": run.world}, sent, held)


if __name__ == "__main__":
    harness.script(main)
