"""Norms of heads under tensor parallelism: harness/families.py's HeadNorm, where heads are split.

A rank has H / t of the heads. `cut_head_norms` replaces each norm of q and of k by one that works
on these. docs/learn/tensor-parallelism.md, "Norms of heads", says why they send what they send.
"""

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

from tensor_parallel import Enter, Leave, shard


def cut_head_norms(model, group, tokens_split=False):
    """Call it for a GPT, whole or a stage of it, before its layers are cut over `group`.
    tokens_split: parallelize_sequence will cut them, and sum gradients of whole weights."""
    kind = model.config.qk_norm
    for block in model.blocks.values() if kind != "none" else ():
        for name in ("q_norm", "k_norm"):
            norm = getattr(block.attn, name)
            if kind == "all":
                norm = SplitNorm(norm, group)
            elif tokens_split:
                norm.heads //= dist.get_world_size(group)
            else:
                norm = WholeNorm(norm, group)
            setattr(block.attn, name, norm)


class WholeNorm(nn.Module):
    """RMSNorm of each head by itself, x (B, T, H / t, D). The weight (D,) is whole on every rank,
    which applies it to its own heads. So its gradient is a sum over ranks, as that of x is."""

    def __init__(self, norm, group):
        super().__init__()
        self.weight, self.eps, self.group = norm.weight, norm.eps, group

    def forward(self, x):
        weight = Enter.apply(self.weight, self.group)
        return F.rms_norm(x, weight.shape, weight, self.eps)


class SplitNorm(nn.Module):
    """RMSNorm of all heads together, x (B, T, H / t, D). Leave adds up the ranks' squares. What
    every rank makes of the sum depends on it: Enter adds up its gradients."""

    def __init__(self, norm, group):
        super().__init__()
        self.size, self.eps, self.group = len(norm.weight), norm.eps, group  # size: H D
        self.weight = shard(norm.weight, 0, group)  # (H D / t,)

    def forward(self, x):
        heads = x.flatten(2).to(torch.promote_types(x.dtype, torch.float32))
        squares = Leave.apply(heads.square().sum(-1, keepdim=True), self.group)  # (B, T, 1)
        mean = Enter.apply(squares, self.group) / self.size
        normed = heads * (mean + self.eps).rsqrt() * self.weight
        return normed.to(x.dtype).view(x.shape)
