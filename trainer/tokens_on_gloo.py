"""Sequence parallelism's messages on gloo, whose reduce-scatter sends twice the bytes, as many as
an all-reduce. An all-to-all sends each rank its tokens' partial sums, and it adds them up."""

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable

from sequence_parallel import GatherTokens, ReduceScatterTokens, shards_of_tokens


def tokens_messages(group):
    """What takes the place of Enter and of Leave, by the group's backend."""
    if dist.get_backend(group) == "gloo":
        return GatherTokensOnGloo, ReduceScatterTokensOnGloo
    return GatherTokens, ReduceScatterTokens


def exchange_tokens(x, group):
    """As reduce_scatter_tokens: (B, T, C) -> (B, T/t, C)."""
    shards = shards_of_tokens(x, group)
    received = torch.empty_like(shards)
    dist.all_to_all_single(received, shards, group=group)
    return received.sum(0)


class GatherTokensOnGloo(GatherTokens):
    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        return exchange_tokens(grad, ctx.group), None


class ReduceScatterTokensOnGloo(ReduceScatterTokens):
    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return exchange_tokens(x, group)
