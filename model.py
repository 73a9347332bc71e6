"""The GPT that every file of this project trains: one device, plain PyTorch, nothing of
parallelism.

    tokens (B, T) -> Embedding -> Block x layers -> Head -> logits (B, T, V) -> CrossEntropy -> loss

Two families by plain config fields: GPT-2 (learned positions, LayerNorm, GELU, biases, tied
embeddings, dropout on the residual stream) and Llama (rotary positions, RMSNorm, SwiGLU,
grouped-query attention, untied, no biases). In either, `experts` > 0 puts a mixture of experts in
the MLP's place.

What makes it easy to cut into pieces, without knowing how:

- Embedding, blocks and head may each be missing: forward skips them, so a pipeline stage is a GPT with the rest removed.
  Blocks keep their numbers: `blocks.7.mlp.up.weight` has that name wherever layer 7 lives.
- The number of heads is read from the shape of the projection, so a layer with half the heads just works.
- `attn.core` (attention proper), `mlp.dispatch` (tokens to experts and back), `model.loss` and the identities `enter` (before
  projections), `leave` (behind experts) and `over_sequence` are submodules, there to be replaced.
  Nothing ever needs a patched method.
- The model is built on the meta device, cut there, and then filled (`fill`): every parameter is drawn from its own
  generator, seeded with (seed, full name), so that the weights depend on nothing else.
- Dropout's mask is a hash of (sample, position, site, channel): whoever holds a piece of the activations makes just that
  piece of the mask, and gets the same bits; and so does whoever runs a block again, to hold less
  (`recompute`).

Sources: Radford et al. 2019 (GPT-2); Touvron et al. 2023, arXiv:2302.13971 (Llama); Su et al. 2021,
arXiv:2104.09864 (rotary embedding); Ainslie et al. 2023, arXiv:2305.13245 (grouped queries);
Shazeer 2020, arXiv:2002.05202 (SwiGLU); Jiang et al. 2024, arXiv:2401.04088 (Mixtral); DeepSeek-AI
2024, arXiv:2412.19437 (shared experts, sequence-wise balance); Zoph et al. 2022, arXiv:2202.08906
(z-loss); Wang et al. 2024, arXiv:2408.15664 (balance without a loss); Chen et al. 2016,
arXiv:1604.06174, and Korthikanti et al. 2022, arXiv:2205.05198 (recomputation); Salmon et al. 2011
(counter-based random numbers); Steele et al. 2014 (splitmix64).
"""

import functools
import hashlib
import math
from dataclasses import dataclass, fields, replace

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

NORMS = {"layernorm": nn.LayerNorm, "rmsnorm": nn.RMSNorm}
IGNORE = -1  # the target of a position that has none: adds nothing to the loss


@dataclass(frozen=True)
class Config:
    """The shape of a GPT. Sizes are counts; `hidden` is the inner width of the MLP, or of each
    expert, `context` the longest sequence."""

    layers: int = 4
    heads: int = 4
    # Fewer than heads: grouped-query attention, each key/value head serves heads / kv_heads queries
    kv_heads: int = 4
    width: int = 128
    hidden: int = 512
    context: int = 128
    vocab: int = 257
    positions: str = "learned"  # or "rope"
    norm: str = "layernorm"  # or "rmsnorm"
    mlp: str = "gelu"  # or "swiglu"
    bias: bool = True
    tied: bool = True  # one matrix serves as the token embedding and as the output projection
    dropout: float = 0.0
    rope_theta: float = 10000.0
    norm_eps: float = 1e-5
    experts: int = 0  # 0: a plain MLP in every block
    top_k: int = 2  # experts a token is sent to
    shared: int = 0  # this many experts' width in one MLP that every token passes
    # Of the router's logits; or "sigmoid", each expert by itself (DeepSeek-V3)
    scores: str = "softmax"
    # The k weights sum to 1, as if top-k came before softmax (Mixtral); False: Switch, OLMoE
    renormalize: bool = True
    # Factors of the two losses that act on the router alone, and the step of its bias
    balance_loss: float = 0.0
    z_loss: float = 0.0
    bias_rate: float = 0.0

    def __post_init__(self):
        """Raise ValueError, in one sentence, where the sizes contradict each other."""
        for f in fields(self):
            least = 0 if f.name in ("experts", "shared") else 1
            if f.type is int and getattr(self, f.name) < least:
                raise ValueError(f"{f.name} must be at least {least}, not {getattr(self, f.name)}")
        choices = {
            "positions": ("learned", "rope"),
            "norm": NORMS,
            "mlp": ("gelu", "swiglu"),
            "scores": ("softmax", "sigmoid"),
        }
        for name, known in choices.items():
            if getattr(self, name) not in known:
                raise ValueError(
                    f"{name} must be one of {', '.join(known)}, not {getattr(self, name)!r}"
                )
        if self.width % self.heads:
            raise ValueError(
                f"width {self.width} is not a multiple of {self.heads} heads: change one of them"
            )
        if self.heads % self.kv_heads:
            raise ValueError(
                f"{self.heads} heads do not share {self.kv_heads} kv-heads evenly: choose a divisor of heads"
            )
        if self.positions == "rope" and self.width // self.heads % 2:
            raise ValueError(
                f"rotary positions need an even head size, not {self.width} / {self.heads}"
            )
        if self.experts and self.top_k > self.experts:
            raise ValueError(
                f"a token can't go to {self.top_k} of {self.experts} experts: lower top-k or have more experts"
            )
        if not 0 <= self.dropout < 1:
            raise ValueError(f"dropout must be at least 0 and below 1, not {self.dropout}")

    @functools.cache
    def shapes(self):
        """{full name: shape} of all parameters, a tied matrix once."""
        with torch.device("meta"):
            return {name: p.shape for name, p in GPT(self).named()}

    def parameters(self):
        """The number of parameters of the whole model."""
        return sum(map(math.prod, self.shapes().values()))

    def flops_per_token(self):
        """FLOPs of forward and backward per token of a full context: 6 for each weight of a matrix,
        and 12 L T C for the two products of attention, without a discount for causality (PaLM,
        Chowdhery et al. 2022, appendix B). Of the experts those count that a token goes to."""
        attention = self.width * self.width // self.heads * (2 * self.heads + 2 * self.kv_heads)
        mlp = self.width * self.hidden * (3 if self.mlp == "swiglu" else 2)
        if self.experts:
            mlp = mlp * (self.top_k + self.shared) + self.width * self.experts
        weights = self.layers * (attention + mlp) + self.width * self.vocab
        return 6 * weights + 12 * self.layers * self.context * self.width


LLAMA = dict(positions="rope", norm="rmsnorm", mlp="swiglu", bias=False, tied=False)
LLAMA3 = LLAMA | dict(kv_heads=8, context=8192, vocab=128256, rope_theta=500000.0)
PRESETS = {
    "tiny": dict(),
    "gpt2": dict(layers=12, heads=12, width=768, context=1024, vocab=50257),
    "gpt2-medium": dict(layers=24, heads=16, width=1024, context=1024, vocab=50257),
    "gpt2-large": dict(layers=36, heads=20, width=1280, context=1024, vocab=50257),
    "gpt2-xl": dict(layers=48, heads=25, width=1600, context=1024, vocab=50257),
    "llama3-8b": LLAMA3 | dict(layers=32, heads=32, width=4096, hidden=14336),
    "llama3-70b": LLAMA3 | dict(layers=80, heads=64, width=8192, hidden=28672),
    "llama3-405b": LLAMA3 | dict(layers=126, heads=128, width=16384, hidden=53248),
    "mixtral-8x7b": LLAMA
    | dict(layers=32, heads=32, kv_heads=8, width=4096, hidden=14336, context=32768, vocab=32000)
    | dict(rope_theta=1e6, experts=8),
}


def configure(preset="tiny", family=None, **overrides):
    """Config of a named preset, turned to `family` ("gpt2" or "llama") if given, with single fields
    overridden.

    Fields that follow from others do so unless given: hidden is 4 x width for GELU and 8/3 x width,
    rounded up to a multiple of 32, for SwiGLU (the same number of parameters); kv_heads is heads,
    or half of them in the Llama family.
    Raises ValueError for an unknown preset or sizes that contradict each other.
    """
    if preset not in PRESETS:
        raise ValueError(f"unknown preset {preset!r}: choose one of {', '.join(PRESETS)}")
    if family not in (None, "gpt2", "llama"):
        raise ValueError(f"unknown family {family!r}: choose gpt2 or llama")
    given = {k: v for k, v in overrides.items() if v is not None}
    chosen = dict(PRESETS[preset])
    # Into the other family
    if family and (family == "llama") != (chosen.get("positions") == "rope"):
        for name in (*LLAMA, "hidden", "kv_heads", "rope_theta"):
            chosen.pop(name, None)
        chosen |= LLAMA if family == "llama" else {}
    chosen |= given
    heads, width = chosen.get("heads", Config.heads), chosen.get("width", Config.width)
    if "hidden" not in chosen or ("width" in given and "hidden" not in given):
        chosen["hidden"] = (
            -(-width * 8 // 3 // 32) * 32 if chosen.get("mlp") == "swiglu" else 4 * width
        )
    if "kv_heads" not in chosen or ("heads" in given and "kv_heads" not in given):
        chosen["kv_heads"] = (
            heads // 2 if chosen.get("positions") == "rope" and heads % 2 == 0 else heads
        )
    return Config(**chosen)


def hash64(x):
    """splitmix64 of an int64 tensor, element by element: the bits of the result look random, and
    depend on x alone."""
    # 64-bit arithmetic that wraps; `>>` copies the sign, so the mask clears what it copied
    x = x + -0x61C8864680B583EB
    x = (x ^ (x >> 30 & (1 << 34) - 1)) * -0x40A7B892E31B1A47
    x = (x ^ (x >> 27 & (1 << 37) - 1)) * -0x6B2FB644ECCEEE15
    return x ^ (x >> 31 & (1 << 33) - 1)


def once(function, *inputs):
    """How a model runs its blocks and their parts, unless `recompute` says otherwise."""
    return function(*inputs)


def twice(function, *inputs):
    """function(*inputs), of which nothing is kept but the inputs: backward runs it again, up to the
    last thing it needs."""
    return checkpoint(function, *inputs, use_reentrant=False, preserve_rng_state=False)


def recompute(model, kind):
    """Hold less of each block from forward to backward, for more work. Gradients stay the same, to
    the bit.

        none       all that backward needs, of a GPT-2 block 16 tensors (B, T, C): what the others are compared with
        selective  10 of them: what is dear to make, the results of matrix products and of attention. Norms and activation
                   functions, cheap and large, run again
        block      its input, 1 of them: the whole block runs again, a third more work (Chen et al. 2016)

    Korthikanti et al. 2022 (section 5) recompute the scores of attention; a flash kernel has none
    to keep, so here it is what lies between. Each part that runs again ends with the product that
    takes its result: backward needs that product's input, not its output, and stops there. So
    nothing is multiplied twice, nor sent. A norm before two products stays (SwiGLU, a mixture's
    router and experts), or the first would be.
    """
    whole, parts = {"none": (once, once), "selective": (once, twice), "block": (twice, once)}[kind]
    model.run = whole
    for module in model.blocks.modules():
        if isinstance(module, (Attention, MLP, Experts)):
            module.run = parts


def compile_blocks(model):
    """Have torch.compile fuse what it can of each block. Where it can't follow (a split backward)
    it breaks off, and goes on behind. A mixture's shapes are other ones each step: not for
    those."""
    # Or dropout's site would have each layer compiled anew
    torch._dynamo.config.allow_unspec_int_on_nn_module = True
    for block in model.blocks.values():
        block.run = torch.compile(once)


class Dropout(nn.Module):
    """Zeroes each element of x (B, T, C) with probability p and scales the rest by 1 / (1 - p).

    `key` (B, T), int64, is a hash of sample and position; with `site`, the number of this dropout
    in the model, and the channel it decides each element's fate. Without a key (evaluation, or p =
    0) x is returned as it is.
    """

    def __init__(self, p, site):
        super().__init__()
        self.p, self.site = p, site

    def forward(self, x, key):
        if key is None:
            return x
        channel = torch.arange(x.shape[-1], device=x.device) + (self.site << 32)
        # (B, T, C); MurmurHash3's finaliser mixes the bits
        h = (key.unsqueeze(-1) ^ hash64(channel)).to(torch.int32)
        h = (h ^ (h >> 16 & 0xFFFF)).mul_(-0x7A143595)
        h = (h ^ (h >> 13 & 0x7FFFF)).mul_(-0x3D4D51CB)
        h ^= h >> 16 & 0xFFFF
        keep = h < int((1 - self.p) * 2**32) - 2**31
        return x * keep.to(x.dtype).mul_(1 / (1 - self.p))


class RotaryTable(nn.Module):
    """cos and sin of the rotary angles for `positions` (T,): two tensors (T, head_dim)."""

    def __init__(self, config):
        super().__init__()
        self.head_dim, self.theta = config.width // config.heads, config.rope_theta

    def forward(self, positions, dtype):
        # Angles in float32 whatever the model's dtype: it is what published weights were trained
        # with
        steps = torch.arange(0, self.head_dim, 2, device=positions.device).float() / self.head_dim
        angles = torch.outer(positions.float(), 1.0 / self.theta**steps)  # (T, D/2)
        angles = torch.cat((angles, angles), dim=-1)  # (T, D)
        return angles.cos().to(dtype), angles.sin().to(dtype)


def rotate(x, table):
    """Turn each pair (x[i], x[i + D/2]) of x (..., T, D) by its position's angle; table is
    RotaryTable's result."""
    cos, sin = table
    a, b = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-b, a), dim=-1) * sin


class AttentionCore(nn.Module):
    """Causal attention: softmax(q k^T / sqrt(D)) v, by the fastest kernel there is; never a (T, T)
    matrix in memory.

    q (B, H, T, D), k and v (B, H_kv, T, D) with H a multiple of H_kv -> (B, H, T, D).
    """

    def forward(self, q, k, v):
        return F.scaled_dot_product_attention(
            q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1]
        )


class Attention(nn.Module):
    """Causal self-attention, x (B, T, C) -> (B, T, C).

    q, k and v come from one projection whose rows are grouped by key/value head: q..q k v | q..q k
    v | ... A contiguous piece of the rows is therefore a whole number of heads, with their keys and
    values.
    """

    def __init__(self, config):
        super().__init__()
        self.head_dim = config.width // config.heads
        self.queries = config.heads // config.kv_heads  # query heads that share a key/value head
        self.enter = nn.Identity()
        rows = (config.heads + 2 * config.kv_heads) * self.head_dim
        self.qkv = nn.Linear(config.width, rows, bias=config.bias)
        self.core = AttentionCore()
        self.proj = nn.Linear(config.width, config.width, bias=config.bias)
        self.run = once

    def project(self, x, norm):
        return self.qkv(self.enter(norm(x)))

    def forward(self, x, rope, norm):
        # (B, T, H_kv, q + 2, D)
        qkv = self.run(self.project, x, norm).unflatten(-1, (-1, self.queries + 2, self.head_dim))
        q, k, v = qkv.split((self.queries, 1, 1), dim=-2)
        # (B, H, T, D), (B, H_kv, T, D) twice
        q, k, v = (y.flatten(2, 3).transpose(1, 2) for y in (q, k, v))
        if rope is not None:
            q, k = rotate(q, rope), rotate(k, rope)
        return self.proj(self.core(q, k, v).transpose(1, 2).flatten(2))


class MLP(nn.Module):
    """Position-wise feed-forward: down(gelu(up(x))), or with a gate down(silu(gate(x)) * up(x))
    (SwiGLU)."""

    def __init__(self, config):
        super().__init__()
        self.enter = nn.Identity()
        self.gate = (
            nn.Linear(config.width, config.hidden, bias=config.bias)
            if config.mlp == "swiglu"
            else None
        )
        self.up = nn.Linear(config.width, config.hidden, bias=config.bias)
        self.down = nn.Linear(config.hidden, config.width, bias=config.bias)
        self.run = once

    def widen(self, x, norm):
        return self.up(self.enter(norm(x)))

    def narrow(self, up, gate=None):
        # GPT-2's own approximation of GELU: its weights expect it
        return self.down(F.gelu(up, approximate="tanh") if gate is None else F.silu(gate) * up)

    def forward(self, x, count=None, norm=nn.Identity()):
        if self.gate is None:
            return self.run(self.narrow, self.run(self.widen, x, norm))
        x = self.enter(norm(x))
        # In the order of the parameters: so buckets of gradients fill one after the other
        gate = self.gate(x)
        return self.run(self.narrow, self.up(x), gate)


class AddLoss(torch.autograd.Function):
    """x as it is; in backward `loss` gets the gradient 1, as if it had been added to the loss that
    backward started from. So a layer has a loss of its own wherever it runs, in a pipeline's stage
    without the head too (Megatron-LM's MoEAuxLossAutoScaler)."""

    @staticmethod
    def forward(ctx, x, loss):
        ctx.save_for_backward(loss)
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        return grad, torch.ones_like(ctx.saved_tensors[0])


class Router(nn.Linear):
    """Chooses experts: x (B, T, C), count -> weights (B, T, k), experts' numbers (B, T, k). Of
    equal scores the first wins.

    Two losses, which have gradients but no part in the loss that is reported, keep experts alike in
    load and logits small. DeepSeek-V3's balance loss, E sum_e f_e P_e with f_e the part of *one
    sequence's* assignments that are e's and P_e e's mean score there (over a batch, it would depend
    on how the batch is cut); and the mean of logsumexp(logits)^2. Each is scaled by tokens / count,
    like cross-entropy, so that pieces add up. A sequence's sums pass `over_sequence`: who holds
    only part of a sequence replaces it by a sum over those who hold the rest.

    Balance without a loss: `choice_bias` is added to the scores, for the choice alone. `load`
    counts assignments, and `rebalance`, once a step, moves the bias by it.
    """

    def __init__(self, config):
        super().__init__(config.width, config.experts, bias=False)
        self.config, self.over_sequence = config, nn.Identity()
        self.register_buffer("choice_bias", torch.zeros(config.experts))
        self.register_buffer("load", torch.zeros(config.experts, dtype=torch.int64))

    def tally(self, load):
        self.load += load

    def forward(self, x, count=None):
        c = self.config
        logits = super().forward(x)  # (B, T, E)
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        scores = logits.softmax(-1) if c.scores == "softmax" else logits.sigmoid()
        best = (scores.detach() + self.choice_bias).sort(dim=-1, descending=True, stable=True)
        chosen = best.indices[..., : c.top_k]
        weights = scores.gather(-1, chosen)
        if c.renormalize:
            weights = weights / weights.sum(-1, keepdim=True)
        if weights.requires_grad and count is not None:  # in training
            sums = torch.zeros_like(scores[:, 0]).scatter_add_(
                1, chosen.flatten(1), torch.ones_like(weights).flatten(1)
            )
            load = sums.sum(0).long()
            # In backward: forward may run twice, see recompute
            weights.register_hook(lambda _: self.tally(load))
            if c.balance_loss:
                mean = scores if c.scores == "softmax" else scores / scores.sum(-1, keepdim=True)
                tokens = sums.new_full((len(x), 1), x.shape[1])
                # (B, 2 E + 1)
                sums = self.over_sequence(torch.cat((sums, mean.sum(1), tokens), dim=1))
                assigned, mean, tokens = sums.split((c.experts, c.experts, 1), dim=1)
                # tokens / count times E sum_e (assigned_e / (k tokens)) (mean_e / tokens)
                loss = (assigned.detach() * mean / tokens).sum() * c.experts / c.top_k / count
                weights = AddLoss.apply(weights, c.balance_loss * loss)
            if c.z_loss:
                weights = AddLoss.apply(
                    weights, c.z_loss * logits.logsumexp(-1).square().sum() / count
                )
        return weights.to(x.dtype), chosen


def grouped_linear(x, weight, ends):
    """Rows ends[e-1] to ends[e] of x (N, in) by the transpose of matrix e of weight (E, out, in),
    for every e -> (N, out)."""
    kernel = getattr(F, "grouped_mm", None)
    aligned = all(size * x.element_size() % 16 == 0 for size in weight.shape[1:])
    old = x.is_cuda and torch.cuda.get_device_capability(x.device) < (8, 0)
    if kernel and aligned and not old and x.dtype in (torch.float32, torch.bfloat16, torch.float16):
        return kernel(x, weight.transpose(1, 2), offs=ends)
    parts = x.tensor_split(ends[:-1].tolist())
    return torch.cat([F.linear(part, matrix) for part, matrix in zip(parts, weight)])


class Experts(nn.Module):
    """E MLPs without biases: rows (N, C) sorted by expert, and how many are each one's (E,) -> (N,
    C).

    One parameter for each projection, of shape (E, out, in): a slice of the first dimension is a
    whole number of experts, and how many there are is read from the shape."""

    def __init__(self, config):
        super().__init__()
        up, down = (
            (config.experts, config.hidden, config.width),
            (config.experts, config.width, config.hidden),
        )
        self.gate = nn.Parameter(torch.empty(up)) if config.mlp == "swiglu" else None
        self.up, self.down = nn.Parameter(torch.empty(up)), nn.Parameter(torch.empty(down))
        self.run = once

    def narrow(self, ends, up, gate=None):
        return grouped_linear(
            F.gelu(up, approximate="tanh") if gate is None else F.silu(gate) * up, self.down, ends
        )

    def forward(self, rows, counts):
        ends = counts.cumsum(0).to(torch.int32)
        gates = [] if self.gate is None else [grouped_linear(rows, self.gate, ends)]
        return self.run(self.narrow, ends, grouped_linear(rows, self.up, ends), *gates)


class Dispatch(nn.Module):
    """Brings tokens to their experts and back: x (N, C), weights and chosen (N, k) -> sum of weight
    x expert(x) (N, C). Nothing is dropped and nothing padded. meanwhile(): what can be done while
    tokens are on their way; here they are not."""

    def forward(self, x, weights, chosen, experts, meanwhile):
        meanwhile()
        # (N k,): assignments by expert, then by token
        order = chosen.flatten().argsort(stable=True)
        # (E,), as bincount, which would have to look at the values first
        counts = order.new_zeros(len(experts.up)).scatter_add_(
            0, chosen.flatten(), torch.ones_like(order)
        )
        token = order // chosen.shape[1]
        rows = experts(x.index_select(0, token), counts) * weights.flatten()[order].unsqueeze(1)
        return torch.zeros_like(x).index_add(0, token, rows)


class MoE(nn.Module):
    """A mixture of experts, x (B, T, C) -> (B, T, C): each token passes k of E experts (Shazeer et
    al. 2017)."""

    def __init__(self, config):
        super().__init__()
        self.enter, self.leave = nn.Identity(), nn.Identity()
        self.router, self.dispatch, self.experts = Router(config), Dispatch(), Experts(config)
        self.shared = (
            MLP(replace(config, hidden=config.shared * config.hidden)) if config.shared else None
        )

    def forward(self, x, count=None, norm=nn.Identity()):
        x, shared = norm(x), []

        def meanwhile():
            if self.shared is not None:
                shared.append(self.shared(x))

        # X, weights, chosen: all that experts need
        routed = [self.enter(t) for t in (x, *self.router(x, count))]
        y = self.dispatch(*(t.flatten(0, 1) for t in routed), self.experts, meanwhile)
        return sum(shared, self.leave(y.view_as(routed[0])))


@torch.no_grad()
def rebalance(model, total=lambda load: None, move=True):
    """After each step: move every router's bias by `bias_rate` towards an even load (if `move`),
    and count anew.

    total(load) adds up, in place, the loads (E,) of all who hold tokens of this step."""
    for router in (m for m in model.modules() if isinstance(m, Router)):
        if router.config.bias_rate and move:
            total(router.load)
            load = router.load.to(router.choice_bias.dtype)
            router.choice_bias += router.config.bias_rate * (load.mean() - load).sign()
        router.load.zero_()


def make_norm(config):
    return NORMS[config.norm](config.width, eps=config.norm_eps)


class Block(nn.Module):
    """One layer, x (B, T, C) -> (B, T, C): attention, then an MLP or a MoE, each behind a norm and
    added to its input."""

    def __init__(self, config, layer):
        super().__init__()
        self.attn_norm, self.attn = make_norm(config), Attention(config)
        self.attn_drop = Dropout(config.dropout, 2 * layer + 1)
        self.mlp_norm, self.mlp = make_norm(config), MoE(config) if config.experts else MLP(config)
        self.mlp_drop = Dropout(config.dropout, 2 * layer + 2)
        self.run = once

    def forward(self, x, rope=None, key=None, count=None):
        return self.run(self.layer, x, rope, key, count)

    def layer(self, x, rope, key, count):
        x = x + self.attn_drop(self.attn(x, rope, self.attn_norm), key)
        return x + self.mlp_drop(self.mlp(x, count, self.mlp_norm), key)


class Embedding(nn.Module):
    """tokens (B, T) -> (B, T, C): the token's vector, plus the position's where positions are
    learned."""

    def __init__(self, config):
        super().__init__()
        self.token = nn.Embedding(config.vocab, config.width)
        self.position = (
            nn.Embedding(config.context, config.width) if config.positions == "learned" else None
        )
        self.drop = Dropout(config.dropout, 0)

    def forward(self, tokens, positions, key):
        x = self.token(tokens)
        if self.position is not None:
            x = x + self.position(positions)
        return self.drop(x, key)


class Head(nn.Module):
    """x (B, T, C) -> logits (B, T, V): the last norm, then the output projection."""

    def __init__(self, config):
        super().__init__()
        self.norm = make_norm(config)
        self.enter = nn.Identity()
        self.out = nn.Linear(config.width, config.vocab, bias=False)

    def forward(self, x):
        return self.out(self.enter(self.norm(x)))


class CrossEntropy(nn.Module):
    """logits (B, T, V), targets (B, T), count -> the sum of -log softmax(logits)[target] / count, a
    scalar.

    Targets equal to IGNORE add nothing. `count` is the number of valid targets of the *global*
    batch: the losses of all its pieces, whatever their sizes, then add up to the global mean.
    """

    def forward(self, logits, targets, count):
        logits = logits.flatten(0, 1)
        if logits.dtype.itemsize < 4:
            logits = logits.float()  # sums of many small terms: 16 bits are too few
        return (
            F.cross_entropy(logits, targets.flatten(), ignore_index=IGNORE, reduction="sum") / count
        )


class GPT(nn.Module):
    """The whole model. Any of `embed`, `head` may be set to None, and any of `blocks` deleted;
    forward skips them."""

    def __init__(self, config):
        super().__init__()
        self.config = config
        self.embed = Embedding(config)
        self.rope = RotaryTable(config) if config.positions == "rope" else None
        self.blocks = nn.ModuleDict({str(i): Block(config, i) for i in range(config.layers)})
        self.head = Head(config)
        self.loss = CrossEntropy()
        self.run = once
        if config.tied:
            self.head.out.weight = self.embed.token.weight
        # What `fill` draws for a parameter is written on the parameter: (mean, standard deviation)
        for module in self.modules():
            for name, p in module.named_parameters(recurse=False):
                matrix = (
                    isinstance(module, (nn.Linear, nn.Embedding))
                    and name == "weight"
                    or isinstance(module, Experts)
                )
                p.init = (0.0, 0.02) if matrix else (0.0 if name == "bias" else 1.0, 0.0)
        # The layers' outputs add up: scaled so that the sum keeps its size (GPT-2)
        for block in self.blocks.values():
            for name, p in block.named_parameters():
                if name.endswith(("proj.weight", "down.weight", "experts.down")):
                    p.init = (0.0, 0.02 / (2 * config.layers) ** 0.5)

    def forward(self, x, positions=None, targets=None, count=None, samples=None):
        """Run what this piece of the model has.

        x: tokens (B, T) int64 if the embedding is here, else activations (B, T, C). positions: (T,)
        int64, default arange(T). targets: (B, T) int64; count: the divisor of the summed loss,
        default the number of valid targets (a piece without head needs it for the losses of its
        routers).
        samples: (B,) int64, an id per sample that is unique in the run: turns dropout on.
        Returns activations (B, T, C) without a head, logits (B, T, V) without targets, else the
        loss, a scalar.
        """
        if positions is None:
            positions = torch.arange(x.shape[1], device=x.device)
        key = None
        if samples is not None and self.config.dropout > 0:
            key = hash64(samples.unsqueeze(1) + hash64(positions))  # (B, T)
        if self.embed is not None:
            x = self.embed(x, positions, key)
        if count is None and targets is not None:
            count = (targets != IGNORE).sum()
        rope = None if self.rope is None else self.rope(positions, x.dtype)
        for block in self.blocks.values():
            x = self.run(block, x, rope, key, count)
        if self.head is None:
            return x
        logits = self.head(x)
        if targets is None:
            return logits
        return self.loss(logits, targets, count)

    def named(self):
        """(full name, parameter) of what is here. A tied output projection goes by its embedding's
        name everywhere."""
        for name, p in self.named_parameters():
            yield (
                ("embed.token.weight" if self.config.tied and name == "head.out.weight" else name),
                p,
            )


def draw(name, shape, init, seed):
    """The initial value of the parameter `name`: a float32 tensor that depends on nothing but the
    arguments."""
    mean, std = init
    if std == 0:
        return torch.full(shape, mean)
    # On the CPU and in float32 always, so that every device and dtype starts from the same weights
    digest = hashlib.sha256(f"{seed} {name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
    return torch.empty(shape).normal_(mean, std, generator=generator)


@torch.no_grad()
def fill(
    model, seed, device="cpu", dtype=torch.float32, take=lambda full, parameter: full, draw=draw
):
    """Give every parameter of a model built on the meta device its memory and its initial value;
    returns the model.

    A parameter that is a piece of a larger one has `parameter.placement["shape"]`, the whole's
    shape: the whole is drawn, and take(whole, parameter) returns the piece. No more than one whole
    parameter exists at a time. Another `draw` may know other values: those of a trained model.
    """
    names = {p: name for name, p in model.named()}
    made = {}
    for module in model.modules():
        for key, p in list(module.named_parameters(recurse=False)):
            if p not in made:
                shape = getattr(p, "placement", {}).get("shape", p.shape)
                value = take(draw(names[p], shape, p.init, seed), p)
                made[p] = nn.Parameter(
                    value.to(device, dtype, copy=True), requires_grad=p.requires_grad
                )
                # What the parameter says of itself (init, placement) stays with it
                made[p].__dict__.update(p.__dict__)
            setattr(module, key, made[p])
    fill_buffers(model, device)
    return model


def fill_buffers(model, device="cpu"):
    """Give what is no parameter (the routers' bias and load) its memory: zeros."""
    for module in model.modules():
        for key, buffer in list(module.named_buffers(recurse=False)):
            setattr(module, key, torch.zeros_like(buffer, device=device))


def build(config, seed=0, device="cpu", dtype=torch.float32, draw=draw):
    """A whole GPT with its initial weights, on one device."""
    with torch.device("meta"):
        model = GPT(config)
    return fill(model, seed, device, dtype, draw=draw)
