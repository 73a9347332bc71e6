"""Models after Llama: what some published families have, and model.py's GPT has not.

    model = build(FamilyConfig(layers=2, embedding_scale=12.0))

`build` makes the GPT and replaces some of its submodules. Parameters keep their names, and a
technique finds all modules in their places. docs/use/fine-tune.md lists the families.
"""

from dataclasses import dataclass, fields, replace
from typing import Literal

import torch
import torch.nn as nn

from model import GPT, MLP, Batch, Block, Config, initial_distribution


@dataclass(frozen=True)
class FamilyConfig(Config):
    """model.py's Config with further fields. By default the model is model.py's GPT."""

    bias: Literal[True, False, "qkv"] = True  # qkv: of q, k and v only (Qwen2)
    # A norm of q and of k: of each head by itself (Qwen3), or of all heads together (OLMo 2)
    qk_norm: Literal["none", "each", "all"] = "none"
    norm_after: bool = False  # of what attention and MLP add to x, not of what they see (OLMo 2)
    no_rope_every: int = 0  # every so many-th layer has no rotary positions (SmolLM3); 0: none
    # frequencies -> (frequencies, factor of cos and sin): for long sequences (Llama 3.1, YaRN)
    rope_scaling: object = None
    # Of a mixture's shared MLP: a learned factor of its result, from 0 to 1 (Qwen2-MoE)
    shared_gate: bool = False
    # Factors (Granite) of the embedding, of q, of what attention and MLP add to x, of the logits
    embedding_scale: float = 1.0
    query_scale: float = 1.0
    residual_scale: float = 1.0
    logits_scale: float = 1.0


def build(config):
    """The GPT of a FamilyConfig. On the meta device it has shapes only, as every module there."""
    plain = {field.name: getattr(config, field.name) for field in fields(Config)}
    plain = Config(**plain | dict(bias=config.bias is True))
    model = GPT(plain)
    model.config = config
    if config.rope_scaling is not None:
        model.rotary_table = stretched_table
    if config.embedding_scale != 1:
        model.embed.drop = Scaled(model.embed.drop, config.embedding_scale)
    for layer in range(config.layers):
        if config.norm_after:
            model.blocks[str(layer)] = NormAfterBlock(plain, layer)
        block = model.blocks[str(layer)]
        if config.no_rope_every and (layer + 1) % config.no_rope_every == 0:
            block.attn.rotary = False
        if config.bias == "qkv":
            block.attn.qkv.bias = nn.Parameter(torch.empty(block.attn.qkv.out_features))
        if config.qk_norm != "none":
            assert config.query_scale == 1, "norms of heads are known without a query_scale"
            block.attn.q_norm = HeadNorm(config, config.heads)
            block.attn.k_norm = HeadNorm(config, config.kv_heads)
        if config.query_scale != 1:
            block.attn.q_norm = Scaled(block.attn.q_norm, config.query_scale)
        if config.residual_scale != 1:
            block.attn_drop = Scaled(block.attn_drop, config.residual_scale)
            block.mlp_drop = Scaled(block.mlp_drop, config.residual_scale)
        if config.experts and config.shared_gate:
            assert config.shared, "without a shared MLP there is nothing for its gate"
            block.mlp.shared_gate = nn.Linear(config.width, 1, bias=False)
            block.mlp.shared = GatedMLP(plain, block.mlp.shared_gate)
    if config.logits_scale != 1:
        assert config.norm == "rmsnorm", "logits_scale is known with RMSNorm only"
        model.head.norm = ScaledNorm(config, config.logits_scale)
    for name, p in model.named_parameters():
        if not hasattr(p, "init"):  # as GPT does for all others
            p.init = initial_distribution(name, config.layers)
            if not p.is_meta:
                nn.init.normal_(p, *p.init)
    return model


class NormAfterBlock(Block):
    """A Block whose norms are of what it adds to x, not of what attention and MLP see."""

    def forward(self, x, batch=Batch()):
        x = x + self.attn_drop(self.attn_norm(self.attn(x, batch)), batch.drop_key)
        x = x + self.mlp_drop(self.mlp_norm(self.mlp(x, batch)), batch.drop_key)
        return x


def stretched_table(positions, config, dtype):
    """model.py's rotary_table, whose frequencies config.rope_scaling changes."""
    exponents = torch.arange(0, config.head_dim, 2, device=positions.device).float()
    frequencies = 1.0 / config.rope_theta ** (exponents / config.head_dim)  # (D/2,)
    frequencies, factor = config.rope_scaling(frequencies)
    angles = positions.float()[..., None, :, None] * frequencies  # (..., 1, T, D/2)
    angles = torch.cat((angles, angles), dim=-1)
    return (factor * angles.cos()).to(dtype), (factor * angles.sin()).to(dtype)


class HeadNorm(nn.RMSNorm):
    """RMSNorm of x (B, T, H, D): of the D numbers of each head, or of all H D of a token."""

    def __init__(self, config, heads):
        size = heads * config.head_dim if config.qk_norm == "all" else config.head_dim
        super().__init__(size, eps=config.norm_eps)
        self.heads = heads

    def forward(self, x):
        assert x.shape[2] == self.heads, "cut_head_norms (trainer/head_norms.py) goes first"
        normed = x.reshape(*x.shape[:2], -1, len(self.weight))  # (B, T, H, D) or (B, T, 1, H D)
        return super().forward(normed).view(x.shape)


class GatedMLP(MLP):
    """A mixture's shared MLP. Each token gets a part of its result: `gate` says how much."""

    def __init__(self, config, gate):
        super().__init__(replace(config, hidden=config.shared * config.hidden))
        self.token_gate = [gate]  # in a list: it is registered under its own name, shared_gate

    def forward(self, x, batch=None):
        [gate] = self.token_gate
        return gate(x).sigmoid() * super().forward(x)


class Scaled(nn.Module):
    """layer(factor * x). For a layer without parameters, because theirs would get other names."""

    def __init__(self, layer, factor):
        super().__init__()
        self.layer, self.factor = layer, factor

    def forward(self, x, *others):
        return self.layer(x * self.factor, *others)


class ScaledNorm(nn.RMSNorm):
    """RMSNorm, times `factor`."""

    def __init__(self, config, factor):
        super().__init__(config.width, eps=config.norm_eps)
        self.factor = factor

    def forward(self, x):
        return super().forward(x) * self.factor
