"""Sequence parallelism: between the split layers of tensor parallelism, the tokens are split too.

Builds on tensor_parallel.py: read that first, and take it along. There each of t ranks holds all
tokens between the layers, and all do the same work on them: norms, dropout, biases, additions. Each
of these works on every token by itself. So here a rank does it for T/t consecutive tokens. (This is
Megatron's meaning. Attention still sees all tokens on each rank: to split it see
context_parallel.py and advanced/ulysses.py.)

          split tokens   |        all tokens, split matrices         |   split tokens
    x --+----> norm -- gather --> up ---> gelu ---> down -- reduce-scatter --> + bias -> + --> y
        | (B,T/t,C)     (B,T,C)     (B,T,H/t)   (B,T,C) partial     (B,T/t,C)            |
        +--------------------------------------------------------------------------------+

Sent      An all-reduce is a reduce-scatter and then an all-gather. Here the two are apart, and in
          each a rank sends r = (t-1)/t of the tensor. A block has four of each: two in forward, two
          in backward (attention and MLP); embedding and head together have two of each. With the
          loss that is r B T e ((8 L + 4) C + 6), as in tensor parallelism. Norms, positions and the
          biases after the reduce-scatter, P numbers in all, see this rank's tokens only. Summing
          their gradients takes one all-reduce a step, 2 r P e more.
Backward  The backward of the all-gather is a reduce-scatter: every rank has a partial gradient for
          all tokens; they are summed, and each rank keeps its own tokens'. The backward of the
          reduce-scatter is an all-gather: every rank's partial result entered the sum of every
          token, so it needs every token's gradient.
Limits    Use it whenever t > 1 and t divides T. Its layers send the bytes of tensor parallelism, in
          twice as many messages, and it saves memory and repeated work. The gathered inputs of qkv
          and up stay whole for backward here (the paper gathers them again). How much a block
          holds: docs/learn/tensor-parallelism.md.

    torchrun --nproc_per_node=4 sequence_parallel.py     (needs model.py and tensor_parallel.py)

Korthikanti et al. 2022, arXiv:2205.05198, section 4.2.2 (g: the gather, g-bar: the reduce-scatter).
"""

import argparse

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.autograd.function import once_differentiable  # refuses a gradient of a gradient

from tensor_parallel import (
    Boundary,
    ColumnParallelLinear,
    Leave,
    PlainTensorMLP,
    RowParallelLinear,
    grad_norm,
    parallelize_tensors,
    placement_of,
)

# torch 2.13 renamed these two; older versions know only the second name
all_gather_into_tensor = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_tensor = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

# --- the plainest form: two messages in the place of Enter and Leave


def gather_tokens(x, group):
    """All ranks' tokens in order: x (B, T/t, C) -> (B, T, C)."""
    shards = x.new_empty(dist.get_world_size(group), *x.shape)  # (t, B, T/t, C)
    all_gather_into_tensor(shards.flatten(0, 1), x.contiguous(), group=group)  # fills `shards`
    return shards.transpose(0, 1).flatten(1, 2)


def reduce_scatter_tokens(x, group):
    """This rank's tokens of the sum of all ranks' x: (B, T, C) -> (B, T/t, C)."""
    shards = shards_of_tokens(x, group)
    own = torch.empty_like(shards[0])
    reduce_scatter_tensor(own, shards.flatten(0, 1), group=group)
    return own


def shards_of_tokens(x, group):
    """(B, T, C) -> (t, B, T/t, C), as messages need them: each rank's tokens in one piece. With
    tokens first, (T, B, C), as in Megatron, nothing would be copied.

    unflatten raises an error if t does not divide T: pad the tokens at the end, with targets that
    don't count. Causal attention does not look there."""
    shards = x.unflatten(1, (dist.get_world_size(group), -1))
    return shards.transpose(0, 1).contiguous()


class GatherTokens(torch.autograd.Function):
    """In the place of Enter. Every rank gets all tokens."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return gather_tokens(x, group)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        return reduce_scatter_tokens(grad, ctx.group), None


class ReduceScatterTokens(torch.autograd.Function):
    """In the place of Leave. Every rank gets its own tokens of the sum of all ranks' x."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return reduce_scatter_tokens(x, group)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        return gather_tokens(grad, ctx.group), None


class PlainSequenceMLP(PlainTensorMLP):
    """x (B, T/t, C) -> (B, T/t, C), of this rank's tokens. down_bias, like a norm's weight, sees
    these tokens only. So its gradient is a partial sum: add it up once a step."""

    def forward(self, x, batch=None):
        full = GatherTokens.apply(x, self.group)  # (B, T, C)
        hidden = F.linear(full, self.up, self.up_bias)  # (B, T, H/t)
        hidden = F.gelu(hidden, approximate="tanh")
        partial = F.linear(hidden, self.down)  # (B, T, C)
        return ReduceScatterTokens.apply(partial, self.group) + self.down_bias  # (B, T/t, C)


def shard_tokens(full, group):
    """This rank's shard of what has one number per token, as positions: (..., T) -> (..., T/t)."""
    shards = full.unflatten(-1, (dist.get_world_size(group), -1))  # (..., t, T/t)
    return shards[..., dist.get_rank(group), :]


# --- gradients of what isn't split: partial sums, because a rank saw its own tokens only


def mark_partial(parameters, group):
    """For each parameter that is not cut over `group`: note in its placement that its gradient is a
    partial sum, to be added up over `group`. Call it after all cuts. Leave out experts that see all
    ranks' tokens: their gradients are complete."""
    group = group or dist.group.WORLD
    for p in parameters:
        place = placement_of(p)
        cut_over = [over for over, _, _ in place["cuts"].values()]
        if group not in cut_over and group not in place["partial"]:
            p.placement = place | {"partial": [*place["partial"], group]}


def reduce_partial(parameters):
    """Complete the gradients that are partial sums, by one all-reduce per group. Call it once a
    step, after the last backward pass, on all ranks with the same parameters. A rank without a
    gradient adds zeros and gets the sum, so that all ranks take the same step."""
    members_of = {}  # {group: parameters}
    for p in dict.fromkeys(parameters):  # each once
        if p.requires_grad:
            for group in placement_of(p)["partial"]:
                members_of.setdefault(group, []).append(p)
    for group, members in members_of.items():
        for p in members:
            if p.grad is None:
                p.grad = torch.zeros_like(p)
        flat = torch.cat([p.grad.flatten() for p in members])
        dist.all_reduce(flat, group=group)
        for p, total in zip(members, flat.split([p.numel() for p in members])):
            p.grad.copy_(total.view_as(p))


# --- for model.py's GPT ---


def parallelize_sequence(
    model, group, whole_experts=False, enter=GatherTokens, leave=ReduceScatterTokens
):
    """As parallelize_tensors. Give every rank the whole tokens, targets, positions and sample_ids.
    After the last backward pass call reduce_partial. A pipeline stage without an embedding takes
    x (B, T/t, C) of the stage before, and needs positions (T,): the default would have T/t.

    whole_experts: leave the experts as they are. Each rank sends its own tokens to them. So cut
    them with expert_parallel.py over all tensor-parallel ranks, before or after this."""
    parallelize_tensors(model, group, whole_experts, enter, leave)
    if model.embed is not None:
        model.embed.drop = DropoutOfOwnTokens(model.embed.drop, group)
        if model.embed.position is not None:
            model.embed.position = PositionsOfOwnTokens(model.embed.position, group)
    for block in model.blocks.values():
        block.attn_drop = DropoutOfOwnTokens(block.attn_drop, group)
        block.mlp_drop = DropoutOfOwnTokens(block.mlp_drop, group)
        if model.config.experts:
            # The balance loss needs sums over all tokens, and each rank's router saw T/t
            block.mlp.router.sum_over_sequence = Boundary(Leave, group)
    # Experts' gradients are complete: an expert sees all tokens that chose it
    others = [p for name, p in model.named_parameters() if ".experts." not in name]
    mark_partial(others, group)
    return model


class PositionsOfOwnTokens(nn.Module):
    """Learned positions: (T,) of all tokens -> (T/t, C) of this rank's."""

    def __init__(self, embedding, group):
        super().__init__()
        self.weight, self.group = embedding.weight, group

    def forward(self, positions):
        return F.embedding(shard_tokens(positions, self.group), self.weight)


class DropoutOfOwnTokens(nn.Module):
    """x (B, T/t, C) of this rank, and a key (B, T) of all tokens, or None."""

    def __init__(self, dropout, group):
        super().__init__()
        self.dropout, self.group = dropout, group

    def forward(self, x, key):
        return self.dropout(x, None if key is None else shard_tokens(key, self.group))


# --- demo ---

if __name__ == "__main__":  # importing this file needs no model.py
    from model import GPT, IGNORE, Config, OneProcess, Sent, join_ranks, leave, text_batch


def main():
    parser = argparse.ArgumentParser(description="train a GPT in each form, and prove it")
    parser.add_argument("--steps", type=int, default=4)
    why = "T: if t does not divide it, padding follows (default: 30)"
    parser.add_argument("--tokens", type=int, default=30, metavar="T", help=why)
    args = parser.parse_args()
    device, t = join_ranks(), dist.get_world_size()
    sizes = dict(layers=2, heads=2 * t, width=8 * t, context=args.tokens + t)
    train("plain", split_plainly, Config(**sizes), args, device)
    train("gpt2", parallelize_sequence, Config(**sizes), args, device)
    sizes |= dict(positions="rope", norm="rmsnorm", mlp="swiglu", bias=False, tied=False)
    config = Config(**sizes, kv_heads=t)  # two heads share one key/value head
    train("llama", parallelize_sequence, config, args, device)
    leave()


def split_plainly(model, group):
    """The blocks. Embedding, head and loss are whole on each rank, and see its tokens."""
    for block in model.blocks.values():
        block.attn.enter = Boundary(GatherTokens, group)
        block.attn.qkv = ColumnParallelLinear(block.attn.qkv, group)
        block.attn.proj = RowParallelLinear(block.attn.proj, group, ReduceScatterTokens)
        block.mlp = PlainSequenceMLP(block.mlp.up, block.mlp.down, group)


def train(form, split, config, args, device):
    group, t, plain = dist.group.WORLD, dist.get_world_size(), split is split_plainly
    torch.manual_seed(0)  # equal weights on all ranks
    model = GPT(config).to(device, torch.float64)
    one = OneProcess(model, torch.optim.AdamW)
    split(model, group)
    parameters = list(model.parameters())
    names = [name for name, _ in one.model.named_parameters()]  # the plain form has others
    whole = [p for p in parameters if not placement_of(p)["cuts"]]
    optimizer = torch.optim.AdamW(parameters)  # after the split, which makes new parameters
    if dist.get_rank() == 0:
        print(f"{form}, {t} ranks")
    for step in range(args.steps):
        tokens, targets, count = text_batch(step, 5, args.tokens, device)
        alone = one.train_step(tokens, targets, count, 0.5)
        padding = 0, -args.tokens % t  # at the end: causal attention does not look there
        tokens, targets = F.pad(tokens, padding), F.pad(targets, padding, value=IGNORE)
        positions = torch.arange(tokens.shape[1], device=device)
        n_tokens = tokens.numel()
        if plain:  # embedding, head and loss are whole, and see this rank's tokens
            own = (shard_tokens(full, group) for full in (tokens, targets, positions))
            tokens, targets, positions = own
        optimizer.zero_grad()
        loss = torch.zeros_like(count, dtype=torch.float64)
        with Sent() as sent:
            for x, y in zip(tokens.tensor_split(2), targets.tensor_split(2)):  # micro-batches
                part = model(x, positions, y, target_count=count)
                part.backward()
                loss += part.detach()
            if plain:  # whole parameters saw this rank's tokens only
                for p in whole:
                    dist.all_reduce(p.grad, group=group)
            else:
                reduce_partial(parameters)
        if plain:
            dist.all_reduce(loss)  # a rank has the loss of its tokens
        norm = grad_norm(parameters, group)
        torch.nn.utils.clip_grads_with_norm_(parameters, 0.5, norm)
        optimizer.step()
        one.compare(step, loss, alone, zip(names, parameters))
    L, C, r = config.layers, config.width, (t - 1) / t
    text, numbers = "(8 L + 4) C + 6", (8 * L + 4) * C + 6
    if plain:  # in the blocks alone
        text, numbers = "8 L C", 8 * L * C
    formula = r * n_tokens * 8 * numbers + 2 * r * sum(p.nbytes for p in whole)
    one.prove(sent, f"r B T e ({text}) + 2 r P e", formula)


if __name__ == "__main__":
    main()
