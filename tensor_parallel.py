"""Tensor parallelism: large matrices are split over the ranks, which all work on the same batch.

    x --Enter--> up (outputs split) -> gelu -> down (inputs split) --Leave--> y    here on 2 ranks
                 rank 0: units 0..H/2          units 0..H/2
                 rank 1: units H/2..H          units H/2..H       partial sums, added by Leave

The first matrix gives each rank half of the H hidden units. The activation works on each unit by
itself, so no rank needs another's half. The second matrix turns each half into a partial sum of the
output. Attention is split alike, by heads, and so is the vocabulary. Norms, the biases after Leave
and the residual stream are whole on every rank.

Sent      Leave adds up the partial sums in forward, by one all-reduce. Enter adds up the gradients
          of x in backward, by another one, because every rank's half used x. Attention and MLP have
          one Enter and one Leave each, the embedding has a Leave, the head an Enter, each of a
          tensor (B, T, C): B sequences of T tokens, C wide. The loss sends 3 numbers per token, a
          maximum and two sums. With L blocks, e bytes per element and r = (t-1)/t on t ranks a rank
          sends 2 r B T e ((4 L + 2) C + 3). (The loss's numbers are float32, even if e is 2.)
Backward  Leave's is the identity: each partial sum is a term of y, so it gets y's gradient. (All
          ranks compute the same loss from the same y. It is one loss, not t losses.) Enter's is a
          sum, which makes the gradient of x complete, and equal on all ranks, for earlier layers.
Limits    Every layer waits for its messages. With t = 8, C = 8192, 16 bits and 400 TFLOP/s, that is
          0.17 of the matmuls' time at 450 GB/s, and 1.5 of it at 50 GB/s: stay within a machine. A
          rank holds 1/t of the matrices, of their gradients and optimizer states, and of the heads
          and hidden units that backward needs. What lies between the layers, (B, T, C), is whole
          everywhere. Dropout in the residual stream needs equal masks on all ranks (model.py's has
          them). On heads and hidden units it would need different ones (model.py has none there).
          More: docs/learn/tensor-parallelism.md.

    torchrun --nproc_per_node=4 tensor_parallel.py     (needs model.py, to train and prove itself)

Shoeybi et al. 2019, Megatron-LM, arXiv:1909.08053, section 3 (there Enter is f, and Leave g).
"""

import argparse
import math

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.autograd.function import once_differentiable  # refuses a gradient of a gradient

# --- the plainest form: an MLP between Enter and Leave


class Enter(torch.autograd.Function):
    """Forward: x itself. Backward: the sum of all ranks' gradients, because each rank's part of a
    layer uses x. The gradient from other users of x, such as the residual, is not summed."""

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


class Leave(torch.autograd.Function):
    """Forward: the sum of all ranks' x. Backward: the gradient itself. (The all_reduce of
    torch.distributed.nn would sum it: t times too much.)"""

    @staticmethod
    def forward(ctx, x, group):
        total = x.clone()  # x may have other users
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        return grad, None


class PlainTensorMLP(nn.Module):
    """x (B, T, C) -> (B, T, C), the same on every rank. up (H, C) and down (C, H) are nn.Linear,
    equal on all t ranks. torch stores a weight as (out, in)."""

    def __init__(self, up, down, group):
        super().__init__()
        self.group = group
        self.up = shard(up.weight, 0, group)  # (H/t, C): a new parameter
        self.up_bias = shard(up.bias, 0, group)  # (H/t,)
        self.down = shard(down.weight, 1, group)  # (C, H/t)
        self.down_bias = down.bias  # (C,)

    def forward(self, x, batch=None):  # batch: model.py's blocks hand it to their MLP
        x = Enter.apply(x, self.group)
        hidden = F.linear(x, self.up, self.up_bias)  # (B, T, H/t): this rank's hidden units
        hidden = F.gelu(hidden, approximate="tanh")  # as in GPT-2
        y = Leave.apply(F.linear(hidden, self.down), self.group)  # (B, T, C)
        return y + self.down_bias  # after Leave, or the sum would contain it t times


# --- shards: a rank's part of a parameter, and where it lies


def shard(parameter, dim, group):
    """This rank's shard, a new parameter with a `placement`. None stays None. Where t does not
    divide the dimension, zeros fill the last shards. Raises ValueError if this dimension has been
    cut before, or if the parameter has been cut over this group."""
    if parameter is None:
        return None
    dim, group = dim % parameter.dim(), group or dist.group.WORLD
    cuts = placement_of(parameter)["cuts"]
    if dim in cuts or group in [over for over, _, _ in cuts.values()]:
        how = "head.weight = embedding.weight after the cut of both"
        raise ValueError(f"this is a shard already: tie shards, not whole matrices ({how})")
    index, shards = dist.get_rank(group), dist.get_world_size(group)
    full = parameter.detach()
    part = nn.Parameter(shard_tensor(full, dim, index, shards), parameter.requires_grad)
    part.__dict__.update(parameter.__dict__)  # keep other attributes, such as model.py's `init`
    start, length, _ = span(parameter.shape[dim], index, shards)
    part.placement = placement_of(parameter) | {"cuts": cuts | {dim: (group, start, length)}}
    return part


def placement_of(parameter):
    """Where this rank's part of a parameter lies, a dict in the attribute p.placement:

    shape            the shape of the whole parameter
    cuts             {dimension: (group, start, length)}, usually one entry: this rank has
                     whole[start : start + length], the other ranks of the group have other parts
    partial, data    other techniques': docs/use/two-techniques.md"""
    default = dict(shape=tuple(parameter.shape), cuts={}, partial=[], data=None)
    return default | getattr(parameter, "placement", {})


def shard_tensor(full, dim, index, shards):
    """Shard `index` of a tensor along `dim`, in memory of its own, padded with zeros."""
    start, length, width = span(full.shape[dim], index, shards)
    part = full.new_zeros([*full.shape[:dim], width, *full.shape[dim + 1 :]])
    part.narrow(dim, 0, length).copy_(full.narrow(dim, start, length))
    return part


def span(size, index, shards):
    """(start, length, width): shard `index` has `length` rows of a dimension, from `start` on, and
    then zeros: all shards are `width` long. 5 rows on 4 ranks: 2, 2, 1 and 0."""
    width = math.ceil(size / shards)
    start = min(index * width, size)
    return start, min(width, size - start), width


def unshard(part, shape, group):
    """The whole tensor of that shape, put together from all ranks' shards: of a parameter, of its
    gradient, or of logits. It has no backward."""
    for dim, size in enumerate(shape):
        if part.shape[dim] != size:
            parts = [torch.empty_like(part) for _ in range(dist.get_world_size(group))]
            dist.all_gather(parts, part.detach().contiguous(), group=group)
            part = torch.cat(parts, dim).narrow(dim, 0, size)  # without the padding
    return part


# --- the layers of any model. In attention q, k and v are cut as `up`, by heads; proj as `down`


class Boundary(nn.Module):
    """Enter or Leave as a module. Put one Enter right before the layers that share an input: one
    for q, k and v together. Not before a layer that isn't split (a router, a norm): the gradient of
    its input is complete on every rank, and Enter would multiply it by t."""

    def __init__(self, function, group):
        super().__init__()
        self.function, self.group = function, group or dist.group.WORLD

    def forward(self, x):
        # x may be a weight, such as a norm of heads, that each rank applies to its own heads
        if isinstance(x, nn.Parameter) and self.group in placement_of(x)["partial"]:
            raise ValueError("Enter and mark_partial would both sum this gradient: leave out Enter")
        return self.function.apply(x, self.group)


class ColumnParallelLinear(nn.Module):
    """Splits the outputs: x (..., in) -> this rank's (..., out / t). Put Enter before it. The paper
    writes Y = X A, so these are columns of A. torch stores A transposed: they are rows of `weight`.

    In attention a shard must be whole heads. Where one layer makes q, k and v, its rows must be
    ordered by heads, q k v | q k v | ..., as model.py's are. GPT-2's are q | k | v: rank 0 would
    get mostly q, without an error. There, and where gate | up is one layer, call order_by_rank.

    Where t does not divide `out`, zeros pad the shards. The activation must map 0 to 0, or the
    padding would learn."""

    def __init__(self, linear, group):
        super().__init__()
        check_plain(linear, nn.Linear)
        self.weight = shard(linear.weight, 0, group)  # (out / t, in)
        self.bias = shard(linear.bias, 0, group)

    def forward(self, x):
        return F.linear(x, self.weight, self.bias)


class RowParallelLinear(nn.Module):
    """Splits the inputs: x (..., in / t) -> the complete (..., out). leave: the function in Leave's
    place, such as sequence_parallel.py's."""

    def __init__(self, linear, group, leave=Leave):
        super().__init__()
        check_plain(linear, nn.Linear)
        self.weight = shard(linear.weight, 1, group)  # (out, in / t)
        self.bias = linear.bias  # (out,)
        self.leave = Boundary(leave, group)

    def forward(self, x):
        y = self.leave(F.linear(x, self.weight))
        # After Leave, or the sum would contain the bias t times
        return y if self.bias is None else y + self.bias


def check_plain(layer, kind):
    """What a subclass adds (LoRA, muP) or how a weight is computed (weight_norm) would be lost."""
    if type(layer) is not kind or "weight" not in layer._parameters:
        name, how = type(layer).__name__, "copy the weight that it uses into one, or use shard()"
        raise ValueError(f"a plain nn.{kind.__name__} is needed, not this {name}: {how}")


def order_by_rank(linear, sizes, t):
    """Before a ColumnParallelLinear reorder the rows of a layer that makes several things, so that
    each rank gets its part of each: q | k | v becomes q k v | q k v | .... In place. A rank splits
    its result into sizes / t. What unshard returns has the new order.

    sizes: the rows of each, as [C, C, C] in GPT-2, [4 * C, 4 * C] of gate | up. t divides them."""
    if any(size % t for size in sizes):
        raise ValueError(f"{t} ranks do not divide blocks of {sizes} rows")
    blocks = torch.arange(len(linear.weight)).split(sizes)
    rows = torch.cat([block.chunk(t)[rank] for rank in range(t) for block in blocks])
    for p in linear.parameters():
        p.data = p.data[rows]


# --- the vocabulary, split too: V/t rows of the embedding and V/t logits per token on each rank


class VocabParallelEmbedding(nn.Module):
    """tokens (B, T) -> (B, T, C). A rank looks up the tokens whose rows it has. For all others it
    makes zeros. Leave adds up the ranks' results."""

    def __init__(self, embedding, group, leave=Leave):
        super().__init__()
        check_plain(embedding, nn.Embedding)
        self.vocab = len(embedding.weight)
        self.weight = shard(embedding.weight, 0, group)  # (V / t, C)
        self.start = dist.get_rank(group) * len(self.weight)
        self.leave = Boundary(leave, group)
        self.padding_row = None  # padding_idx, if this rank has its row
        if embedding.padding_idx in range(self.start, self.start + len(self.weight)):
            self.padding_row = embedding.padding_idx - self.start

    def forward(self, tokens):
        # A token beyond the vocabulary would get zeros. (Checked on the device: no host waits)
        valid = (tokens >= 0) & (tokens < self.vocab)
        torch._assert_async(valid.all(), f"tokens must be from 0 to {self.vocab - 1}")
        row = tokens - self.start
        outside = (row < 0) | (row >= len(self.weight))
        x = F.embedding(row.masked_fill(outside, 0), self.weight, self.padding_row)
        return self.leave(x.masked_fill(outside.unsqueeze(-1), 0.0))


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
        # A larger target is on no rank: its loss would be wrong, without an error
        torch._assert_async((targets < self.vocab).all(), f"targets must be below {self.vocab}")
        losses = CrossEntropyFunction.apply(logits, targets, self.start, self.length, self.group)
        return losses.masked_fill(targets < 0, 0.0).sum() / target_count


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


# --- the gradient's norm


@torch.no_grad()
def grad_norm(parameters, group):
    """The norm of the whole gradient, a float64 scalar, the same on every rank. Adds up the ranks'
    squares: a shard's in full, 1/t of a whole parameter's, because all t ranks have it.

    clip_grad_norm_ would take a rank's shards for the whole. Each rank would get another norm, and
    scale norms and biases by another factor: they would drift apart, without an error."""
    parameters = list(parameters)
    square = torch.zeros((), dtype=torch.float64, device=parameters[0].device)
    for p in parameters:
        if p.grad is not None:
            copies = 1 if placement_of(p)["cuts"] else dist.get_world_size(group)
            square += torch.linalg.vector_norm(p.grad, dtype=torch.float64).square() / copies
    dist.all_reduce(square, group=group)
    return square.sqrt()


# --- for model.py's GPT ---


def parallelize_tensors(model, group, whole_experts=False, enter=Enter, leave=Leave):
    """Cut a GPT over `group`, in place, and return it; on the meta device too. Any of embedding,
    blocks and head may be missing. Make the optimizer afterwards: parameters are replaced. Raises
    ValueError where heads do not divide, and for a model that is cut already.

    whole_experts    leave the experts as they are
    enter, leave     other functions in place of Enter and Leave"""
    check_heads(model.config, dist.get_world_size(group))
    for block in model.blocks.values():
        attn, mlp = block.attn, block.mlp
        attn.enter = Boundary(enter, group)
        attn.qkv = ColumnParallelLinear(attn.qkv, group)
        attn.proj = RowParallelLinear(attn.proj, group, leave)
        if model.config.experts:
            if not whole_experts:
                mlp.enter, mlp.leave = Boundary(enter, group), Boundary(leave, group)
                cut_experts(mlp.experts, group)
            mlp = mlp.shared  # None, or an ordinary MLP beside the experts. The router stays whole
        if mlp is not None:
            mlp.enter = Boundary(enter, group)
            if mlp.gate is not None:
                mlp.gate = ColumnParallelLinear(mlp.gate, group)
            mlp.up = ColumnParallelLinear(mlp.up, group)
            mlp.down = RowParallelLinear(mlp.down, group, leave)
    if model.embed is not None:
        model.embed.token = VocabParallelEmbedding(model.embed.token, group, leave)
    if model.head is not None:
        model.head.enter = Boundary(enter, group)
        model.head.out = ColumnParallelLinear(model.head.out, group)
        model.loss = VocabParallelCrossEntropy(model.config.vocab, group)
        if model.config.tied and model.embed is not None:
            model.head.out.weight = model.embed.token.weight
    return model


def cut_experts(experts, group):  # weights (E, out, in)
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

if __name__ == "__main__":  # importing this file needs no model.py
    from model import GPT, Config, OneProcess, Sent, join_ranks, leave, text_batch


def main():
    parser = argparse.ArgumentParser(description="train a GPT in each form, and prove it")
    parser.add_argument("--steps", type=int, default=4)
    why = "of the MLPs in the last two forms: t need not divide them (default: 101)"
    parser.add_argument("--hidden-units", type=int, default=101, metavar="H", help=why)
    args = parser.parse_args()
    device, t = join_ranks(), dist.get_world_size()
    sizes = dict(layers=2, heads=2 * t, width=8 * t, context=32)  # t divides heads, C and 4 C
    train("plain, MLPs alone", split_mlps, Config(**sizes), args.steps, device)
    sizes["hidden"] = args.hidden_units
    train("gpt2", parallelize_tensors, Config(**sizes), args.steps, device)
    sizes |= dict(positions="rope", norm="rmsnorm", mlp="swiglu", bias=False, tied=False)
    config = Config(**sizes, kv_heads=t)  # two heads share one key/value head
    train("llama", parallelize_tensors, config, args.steps, device)
    leave()


def split_mlps(model, group):
    for block in model.blocks.values():
        block.mlp = PlainTensorMLP(block.mlp.up, block.mlp.down, group)


def train(form, split, config, steps, device):
    group, t = dist.group.WORLD, dist.get_world_size()
    torch.manual_seed(0)  # equal weights on all ranks
    model = GPT(config).to(device, torch.float64)
    one = OneProcess(model, torch.optim.AdamW)
    split(model, group)
    parameters = list(model.parameters())
    names = [name for name, _ in one.model.named_parameters()]  # the plain form has others
    optimizer = torch.optim.AdamW(parameters)  # after the split, which makes new parameters
    if dist.get_rank() == 0:
        print(f"{form}, {t} ranks")
    for step in range(steps):
        tokens, targets, count = text_batch(step, 5, 32, device)  # the whole batch, on every rank
        optimizer.zero_grad()
        loss = torch.zeros_like(count, dtype=torch.float64)
        with Sent() as sent:
            for x, y in zip(tokens.tensor_split(2), targets.tensor_split(2)):  # micro-batches
                part = model(x, targets=y, target_count=count)
                part.backward()
                loss += part.detach()
        norm = grad_norm(parameters, group)
        torch.nn.utils.clip_grads_with_norm_(parameters, 0.5, norm)
        optimizer.step()
        alone = one.train_step(tokens, targets, count, 0.5)
        one.compare(step, loss, alone, zip(names, parameters))
    L, C, r = config.layers, config.width, (t - 1) / t
    text, numbers = "(4 L + 2) C + 3", (4 * L + 2) * C + 3  # numbers per token
    if split is split_mlps:
        text, numbers = "2 L C", 2 * L * C
    one.prove(sent, f"2 r B T e ({text})", 2 * r * tokens.numel() * 8 * numbers)


if __name__ == "__main__":
    main()
