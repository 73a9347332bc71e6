"""Named sizes of the GPT, how flags change them, and the parameters that a Config has."""

import functools
import math
from dataclasses import fields, replace
from typing import get_args

import torch

from harness.families import FamilyConfig, build

LLAMA = dict(positions="rope", norm="rmsnorm", mlp="swiglu", bias=False, tied=False)
LLAMA3 = LLAMA | dict(kv_heads=8, context=8192, vocab=128256, rope_theta=500000.0)
LLAMA2 = LLAMA | dict(context=4096, vocab=32000)
LLAMA32 = LLAMA3 | dict(tied=True)
QWEN3 = LLAMA | dict(kv_heads=8, head_dim=128, context=40960, vocab=151936, rope_theta=1e6)
QWEN3 |= dict(norm_eps=1e-6, qk_norm="each")
QWEN3_MOE = QWEN3 | dict(kv_heads=4, experts=128, top_k=8)
OLMO2 = LLAMA | dict(context=4096, vocab=100352, rope_theta=5e5, norm_eps=1e-6)
OLMO2 |= dict(qk_norm="all", norm_after=True)
MIXTRAL = LLAMA | dict(kv_heads=8, context=32768, vocab=32000, rope_theta=1e6, experts=8)
PRESETS = {
    "tiny": dict(),
    "gpt2": dict(layers=12, heads=12, width=768, context=1024, vocab=50257),
    "gpt2-medium": dict(layers=24, heads=16, width=1024, context=1024, vocab=50257),
    "gpt2-large": dict(layers=36, heads=20, width=1280, context=1024, vocab=50257),
    "gpt2-xl": dict(layers=48, heads=25, width=1600, context=1024, vocab=50257),
    "llama-1b": LLAMA2 | dict(layers=22, heads=32, kv_heads=4, width=2048, hidden=5632),
    "llama2-7b": LLAMA2 | dict(layers=32, heads=32, kv_heads=32, width=4096, hidden=11008),
    "llama2-13b": LLAMA2 | dict(layers=40, heads=40, kv_heads=40, width=5120, hidden=13824),
    "llama2-70b": LLAMA2 | dict(layers=80, heads=64, kv_heads=8, width=8192, hidden=28672),
    "llama3-8b": LLAMA3 | dict(layers=32, heads=32, width=4096, hidden=14336),
    "llama3-70b": LLAMA3 | dict(layers=80, heads=64, width=8192, hidden=28672),
    "llama3-405b": LLAMA3 | dict(layers=126, heads=128, width=16384, hidden=53248),
    "mixtral-8x7b": MIXTRAL | dict(layers=32, heads=32, width=4096, hidden=14336),
    "llama3.2-1b": LLAMA32 | dict(layers=16, heads=32, width=2048, hidden=8192),
    "llama3.2-3b": LLAMA32 | dict(layers=28, heads=24, width=3072, hidden=8192),
    "qwen3-0.6b": QWEN3 | dict(layers=28, heads=16, width=1024, hidden=3072, tied=True),
    "qwen3-1.7b": QWEN3 | dict(layers=28, heads=16, width=2048, hidden=6144, tied=True),
    "qwen3-4b": QWEN3 | dict(layers=36, heads=32, width=2560, hidden=9728, tied=True),
    "qwen3-8b": QWEN3 | dict(layers=36, heads=32, width=4096, hidden=12288),
    "qwen3-14b": QWEN3 | dict(layers=40, heads=40, width=5120, hidden=17408),
    "qwen3-32b": QWEN3 | dict(layers=64, heads=64, width=5120, hidden=25600),
    "qwen3-30b-a3b": QWEN3_MOE | dict(layers=48, heads=32, width=2048, hidden=768),
    "olmo2-7b": OLMO2 | dict(layers=32, heads=32, kv_heads=32, width=4096, hidden=11008),
    # Sizes alone are its: no latent attention, and every layer has experts
    "like-deepseek-v2-lite": LLAMA2
    | dict(layers=27, heads=16, kv_heads=16, width=2048, hidden=1408, vocab=102400)
    | dict(experts=64, top_k=6, shared=2),
}
# Llama 3.1 has 3's sizes; its longer sequences have other positions
PRESETS |= {f"llama3.1-{size}": PRESETS[f"llama3-{size}"] for size in ("8b", "70b", "405b")}


def configure(preset="tiny", family=None, **overrides):
    """The FamilyConfig of a preset, turned to `family` ("gpt2" or "llama"), with fields overridden.
    A field that is None is not overridden.

    If the preset has no hidden, or width is overridden and hidden is not: 4 x width for GELU, 8/3 x
    width for SwiGLU, up to a multiple of 32. Likewise kv_heads follows from heads: all of them, or
    half with rotary positions and even heads; and head_dim from both. Raises ValueError, as Config
    does."""
    if preset not in PRESETS:
        raise ValueError(f"unknown preset {preset!r}: choose one of {', '.join(PRESETS)}")
    overrides = {name: value for name, value in overrides.items() if value is not None}
    sizes = dict(PRESETS[preset])
    if family and (family == "llama") != ("positions" in sizes):  # only Llama presets have it
        more = "hidden kv_heads head_dim rope_theta norm_eps qk_norm norm_after"
        for name in (*LLAMA, *more.split()):
            sizes.pop(name, None)
        if family == "llama":
            sizes |= LLAMA
    for name, follow in (("width", ("hidden", "head_dim")), ("heads", ("kv_heads", "head_dim"))):
        for follower in follow if name in overrides else ():
            sizes.pop(follower, None)
    sizes |= overrides
    heads, width = sizes.get("heads", FamilyConfig.heads), sizes.get("width", FamilyConfig.width)
    swiglu, rope = sizes.get("mlp") == "swiglu", sizes.get("positions") == "rope"
    sizes.setdefault("hidden", ceil(8 * width, 3 * 32) * 32 if swiglu else 4 * width)
    sizes.setdefault("kv_heads", heads // 2 if rope and heads % 2 == 0 else heads)
    sizes.setdefault("renormalize", sizes.get("top_k") != 1)  # else its router would learn nothing
    return checked(sizes)


def checked(sizes):
    """FamilyConfig(**sizes). Raises ValueError for values without meaning, or that contradict
    others."""
    defaults = {field.name: field.default for field in fields(FamilyConfig)}
    for field in fields(FamilyConfig):
        value, choices = sizes.get(field.name, field.default), get_args(field.type)  # a Literal's
        if choices and repr(value) not in map(repr, choices):  # 0 == False, but no value of `bias`
            allowed = ", ".join(map(str, choices))
            raise ValueError(f"{field.name} must be one of {allowed}, not {value!r}")
        minimum = 0 if field.default == 0 else 1
        if field.type is int and value < minimum:  # a config.json may hold any number
            raise ValueError(f"{field.name} must be at least {minimum}, not {value}")
    sizes = defaults | sizes
    heads, width = sizes["heads"], sizes["width"]
    if not 0 <= sizes["dropout"] < 1:
        raise ValueError(f"dropout must be at least 0 and below 1, not {sizes['dropout']}")
    if width % heads and not sizes["head_dim"]:
        raise ValueError(f"width {width} is not a multiple of {heads} heads: change one")
    if heads % (sizes["kv_heads"] or heads):
        kv_heads = sizes["kv_heads"]
        raise ValueError(f"{kv_heads} kv-heads can't share {heads} heads: choose a divisor")
    head_dim = sizes["head_dim"] or width // heads
    if sizes["positions"] == "rope" and head_dim % 2:
        raise ValueError(f"rotary positions need an even head size, not {head_dim}")
    if sizes["experts"] and sizes["top_k"] > sizes["experts"]:
        chosen = f"{sizes['top_k']} of {sizes['experts']} experts"
        raise ValueError(f"a token can't go to {chosen}: change top-k")
    return FamilyConfig(**sizes)


@functools.cache
def parameter_shapes(config):
    """{full name: shape} of all parameters of the whole model, a tied matrix once."""
    with torch.device("meta"):
        return {name: p.shape for name, p in build(config).named()}


def parameter_count(config):
    """Of the whole model, from two of its layers: to build 100,000 takes minutes."""
    few = (parameter_shapes(replace(config, layers=layers)) for layers in (1, 2))
    one, two = (sum(map(math.prod, shapes.values())) for shapes in few)
    return one + (config.layers - 1) * (two - one)


def ceil(a, b):
    """a / b, rounded up."""
    return -(-a // b)
