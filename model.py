"""The GPT that every file of this project trains: plain PyTorch on one device.

    tokens (B, T) -> Embedding -> Block x layers -> Head -> logits (B, T, V) -> CrossEntropy -> loss

    Block:   x --+-- norm -- Attention --(+)--+-- norm -- MLP or MoE --(+)-->
                 +------------------------+   +-------------------------+

GPT-2 (learned positions, LayerNorm, GELU, biases, one matrix for embedding and output) and Llama
(rotary positions, RMSNorm, SwiGLU, grouped-query attention, no biases) differ in fields of Config.
With `experts` > 0 a mixture of experts takes the place of the MLP.

The model knows nothing of parallelism. A technique removes submodules or replaces them. `enter`,
`leave` and `sum_over_sequence`, identities here, stand where a layer that is cut sends a message.

    model = GPT(Config(layers=2))
    tokens = torch.randint(model.config.vocab, (4, 129))
    loss = model(tokens[:, :-1], targets=tokens[:, 1:])

Radford et al. 2019 (GPT-2); Touvron et al. 2023, arXiv:2302.13971 (Llama); Jiang et al. 2024,
arXiv:2401.04088 (Mixtral). Each part below names its own paper.
"""

import operator
from dataclasses import dataclass, fields, replace
from functools import partial
from itertools import pairwise
from typing import Literal, NamedTuple, get_args

import torch
import torch.nn as nn
import torch.nn.functional as F

IGNORE = -1  # a target with this value adds nothing to the loss (torch's default: -100)


@dataclass(frozen=True)
class Config:
    """The shape of a GPT. harness/presets.py has published ones."""

    layers: int = 4
    heads: int = 4
    kv_heads: int = 4  # fewer than heads: grouped-query attention (Ainslie 2023, arXiv:2305.13245)
    width: int = 128  # C
    hidden: int = 512  # inner width of the MLP, or of each expert
    context: int = 128  # the longest sequence
    vocab: int = 257  # 256 bytes, and a mark between documents
    positions: Literal["learned", "rope"] = "learned"
    norm: Literal["layernorm", "rmsnorm"] = "layernorm"
    mlp: Literal["gelu", "swiglu"] = "gelu"
    bias: Literal[True, False, "qkv"] = True  # qkv: on q, k and v only (Qwen2)
    tied: bool = True  # one matrix is both the token embedding and the output projection
    dropout: float = 0.0  # on the embedding, and on what attention and MLP add to x
    rope_theta: float = 10000.0
    rope_scaling: object = None  # frequencies -> frequencies (Llama 3.1: trainer/hf_config.py)
    norm_eps: float = 1e-5
    # A mixture of experts, unless experts is 0: see MoE and Router
    experts: int = 0
    top_k: int = 2  # experts per token
    shared: int = 0  # width of an MLP that all tokens pass, in experts; 0: none
    scores: Literal["softmax", "sigmoid"] = "softmax"  # of the logits; DeepSeek-V3: sigmoid
    # Divide a token's k weights by their sum (Mixtral). False for OLMoE, and for k = 1 (Switch):
    # a weight that is always 1 gives the router no gradient
    renormalize: bool = True
    balance_loss: float = 0.0  # factor of Router's balance loss
    z_loss: float = 0.0  # factor of Router's z-loss
    bias_rate: float = 0.0  # step of Router's bias

    def __post_init__(self):
        check_config(self)


class Batch(NamedTuple):
    """What GPT.forward tells every block beside x."""

    rope: tuple | None = None  # the rotary_table of the tokens' positions
    drop_key: torch.Tensor | None = None  # (B, T), see Dropout
    target_count: torch.Tensor | int | None = None  # divides the losses, the routers' too
    starts: torch.Tensor | None = None  # (B, T): where each token's document starts


class Block(nn.Module):
    """One layer, x (B, T, C) -> (B, T, C): attention, then an MLP or a mixture of experts. Each
    sees a norm of x, and its output is added to x."""

    def __init__(self, config, layer):
        super().__init__()
        self.attn_norm = make_norm(config)
        self.attn = Attention(config)
        # Dropout that a piece of x can compute alone: see the end of the file
        self.attn_drop = Dropout(config.dropout, site=2 * layer + 1)
        self.mlp_norm = make_norm(config)
        self.mlp = MoE(config) if config.experts else MLP(config)
        self.mlp_drop = Dropout(config.dropout, site=2 * layer + 2)

    def forward(self, x, batch=Batch()):
        x = x + self.attn_drop(self.attn(self.attn_norm(x), batch), batch.drop_key)
        x = x + self.mlp_drop(self.mlp(self.mlp_norm(x), batch), batch.drop_key)
        return x


class GPT(nn.Module):
    """The whole model. A pipeline stage sets `embed` or `head` to None, or deletes some of
    `blocks`: forward skips what is missing."""

    def __init__(self, config):
        super().__init__()
        self.config = config
        self.embed = Embedding(config)
        self.blocks = nn.ModuleDict({str(i): Block(config, i) for i in range(config.layers)})
        self.head = Head(config)
        self.loss = CrossEntropy()
        self.run_block = operator.call  # block(x, batch), until harness/blocks.py replaces it
        if config.tied:
            self.head.out.weight = self.embed.token.weight
        for name, p in self.named_parameters():
            p.init = initial_distribution(name, config.layers)  # (mean, standard deviation)
            if not p.is_meta:  # else harness/initialize.py fills it, once the model is cut
                nn.init.normal_(p, *p.init)

    def forward(
        self, x, positions=None, targets=None, target_count=None, sample_ids=None, starts=None
    ):
        """Return the loss; without targets the logits (B, T, V); without a head activations.

        x             tokens (B, T), or activations (B, T, C) if this stage has no embedding
        positions     (T,), by default arange(T)
        targets       (B, T)
        target_count  divides the sum of the losses: the number of valid targets of the whole batch,
                      for each of its pieces. By default that of `targets`
        sample_ids    (B,), a globally unique id per row; turns dropout on
        starts        (B, T) on the host, the position at which each token's document starts:
                      attention stays within a document, and positions begin anew in it"""
        if positions is None:
            positions = torch.arange(x.shape[1], device=x.device)
        drop_key = None
        if sample_ids is not None and self.config.dropout > 0:
            drop_key = hash64(sample_ids.unsqueeze(1) + hash64(positions)).to(torch.int32)  # (B, T)
        if starts is not None:
            positions = positions - starts.to(x.device)[:, positions]  # (B, T), in the document
        if self.embed is not None:
            x = self.embed(x, positions, drop_key)
        if target_count is None and targets is not None:
            target_count = (targets != IGNORE).sum()
        rope = None
        if self.config.positions == "rope":
            rope = rotary_table(positions, self.config, x.dtype)
        batch = Batch(rope, drop_key, target_count, starts)
        for block in self.blocks.values():
            x = self.run_block(block, x, batch)
        if self.head is None:
            return x
        logits = self.head(x)
        return logits if targets is None else self.loss(logits, targets, target_count)

    def named(self):
        """(full name, parameter) pairs. A tied head has the embedding's name, on every stage."""
        for name, p in self.named_parameters():
            tied = self.config.tied and name == "head.out.weight"
            yield "embed.token.weight" if tied else name, p


class Attention(nn.Module):
    """Causal self-attention, x (B, T, C) -> (B, T, C). One matrix makes q, k and v. Its rows are
    ordered by key/value head, q..q k v | q..q k v | ...: a cut into t equal parts leaves whole
    heads if t divides the number of key/value heads."""

    def __init__(self, config):
        super().__init__()
        self.head_dim = config.width // config.heads  # D
        self.queries_per_kv = config.heads // config.kv_heads
        self.enter = nn.Identity()  # a layer that is cut sums x's gradient here, or gathers x
        rows = (config.heads + 2 * config.kv_heads) * self.head_dim
        self.qkv = nn.Linear(config.width, rows, bias=config.bias is not False)
        self.qkv.weight.matrix_rows = self.head_dim  # muon.py takes each head as a matrix
        self.core = AttentionCore()
        self.proj = nn.Linear(config.width, config.width, bias=config.bias is True)

    def forward(self, x, batch=Batch()):
        return self.attend(self.qkv(self.enter(x)), batch)

    def attend(self, qkv, batch):  # a method: harness/blocks.py may run qkv again, but not this
        by_kv_head = qkv.unflatten(-1, (-1, self.queries_per_kv + 2, self.head_dim))
        # (B, T, H_kv, H/H_kv + 2, D) -> q (B, T, H_kv, H/H_kv, D), k and v (B, T, H_kv, 1, D)
        q, k, v = by_kv_head.split((self.queries_per_kv, 1, 1), dim=-2)
        q, k, v = (t.flatten(2, 3).transpose(1, 2) for t in (q, k, v))  # (B, H or H_kv, T, D)
        if batch.rope is not None:
            q, k = rotate(q, batch.rope), rotate(k, batch.rope)
        y = self.core(q, k, v, batch.starts)  # (B, H, T, D)
        return self.proj(y.transpose(1, 2).flatten(2))


class AttentionCore(nn.Module):
    """softmax(q k^T / sqrt(D)) v, causal: q (B, H, T, D), k, v (B, H_kv, T, D) -> (B, H, T, D).
    starts: None, or where documents start (GPT.forward): attention stays within each."""

    def forward(self, q, k, v, starts=None):
        if starts is not None:
            return attend_to_documents(q, k, v, starts)
        grouped = q.shape[1] != k.shape[1]
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped)


class MLP(nn.Module):
    """x (B, T, C) -> (B, T, C): down(gelu(up(x))), or with a gate down(silu(gate(x)) * up(x)),
    called SwiGLU (Shazeer 2020, arXiv:2002.05202)."""

    def __init__(self, config):
        super().__init__()
        self.enter = nn.Identity()
        self.gate = None
        if config.mlp == "swiglu":
            self.gate = nn.Linear(config.width, config.hidden, bias=config.bias is True)
        self.up = nn.Linear(config.width, config.hidden, bias=config.bias is True)
        self.down = nn.Linear(config.hidden, config.width, bias=config.bias is True)

    def forward(self, x, batch=None):  # batch: for the mixture that may take an MLP's place
        x = self.enter(x)
        # gate first, as declared: ddp.py fills its buckets in the reverse order
        gate = None if self.gate is None else self.gate(x)
        return self.finish(self.up(x), gate)

    def finish(self, up, gate=None):  # a method: harness/blocks.py may run it again in backward
        return self.down(activate(up, gate))


class Embedding(nn.Module):
    """tokens (B, T) -> (B, T, C): the token's vector, plus the position's if those are learned."""

    def __init__(self, config):
        super().__init__()
        self.token = nn.Embedding(config.vocab, config.width)
        self.position = None
        if config.positions == "learned":
            self.position = nn.Embedding(config.context, config.width)
        self.drop = Dropout(config.dropout, site=0)

    def forward(self, tokens, positions, drop_key):
        x = self.token(tokens)
        if self.position is not None:
            x = x + self.position(positions)
        return self.drop(x, drop_key)


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
    """logits (B, T, V), targets (B, T) -> sum of -log softmax(logits)[target] / target_count.
    That is the number of valid targets of the *global* batch, so the losses of its pieces, of
    whatever sizes, add up to the global mean. A target equal to IGNORE is not valid."""

    def forward(self, logits, targets, target_count):
        logits, targets = logits.flatten(0, 1), targets.flatten()
        if logits.dtype.itemsize < 4:
            logits = logits.float()  # softmax over the vocabulary in float32
        return F.cross_entropy(logits, targets, ignore_index=IGNORE, reduction="sum") / target_count


# --- small parts of a layer, and the initial weights


def make_norm(config):
    kind = nn.LayerNorm if config.norm == "layernorm" else nn.RMSNorm
    return kind(config.width, eps=config.norm_eps)


def activate(up, gate=None):
    if gate is None:
        return F.gelu(up, approximate="tanh")  # the approximation that GPT-2 was trained with
    return F.silu(gate) * up


def rotary_table(positions, config, dtype):
    """cos and sin of the angles of positions (T,) or (B, T), for all heads: (1, T, D) or
    (B, 1, T, D) each (Su et al. 2021, arXiv:2104.09864)."""
    head_dim = config.width // config.heads
    # Angles in float32 whatever the model's dtype, as in the published models
    steps = torch.arange(0, head_dim, 2, device=positions.device).float() / head_dim
    frequencies = 1.0 / config.rope_theta**steps  # (D/2,)
    if config.rope_scaling is not None:
        frequencies = config.rope_scaling(frequencies)
    angles = positions.float()[..., None, :, None] * frequencies  # (..., 1, T, D/2)
    angles = torch.cat((angles, angles), dim=-1)  # i and i + D/2 turn by one angle: see rotate
    return angles.cos().to(dtype), angles.sin().to(dtype)


def rotate(x, table):
    """Turn each pair (x[i], x[i + D/2]) of x (..., T, D) by its position's angle. The pairs are
    Hugging Face's; the paper has (x[2i], x[2i + 1])."""
    cos, sin = table
    a, b = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-b, a), dim=-1) * sin


def initial_distribution(name, layers):
    """(mean, standard deviation) of the normal distribution that a parameter is drawn from, by
    GPT-2's rule. A standard deviation of 0 makes a constant."""
    if name.endswith("bias"):
        return 0.0, 0.0
    if name.endswith("norm.weight"):
        return 1.0, 0.0
    if name.endswith(("proj.weight", "down.weight", "experts.down")):
        return 0.0, 0.02 / (2 * layers) ** 0.5  # x is a sum of 2 x layers of them
    return 0.0, 0.02


# --- mixture of experts (Shazeer et al. 2017, arXiv:1701.06538)


class MoE(nn.Module):
    """x (B, T, C) -> (B, T, C): each token passes k of E experts, and a shared MLP if the config
    has one (DeepSeekMoE, arXiv:2401.06066)."""

    def __init__(self, config):
        super().__init__()
        self.enter = nn.Identity()
        self.router = Router(config)
        self.dispatch = Dispatch()
        self.experts = Experts(config)
        self.leave = nn.Identity()  # experts that are cut add their partial results here
        self.shared = None
        if config.shared:
            self.shared = MLP(replace(config, hidden=config.shared * config.hidden))

    def forward(self, x, batch=Batch()):
        shared = None

        def run_shared():  # needs no routed token: expert_parallel.py calls it while tokens travel
            nonlocal shared
            if self.shared is not None:
                shared = self.shared(x)

        weights, chosen = self.router(x, batch.target_count)
        # Where enter gathers tokens, their weights and experts come with them
        entered, weights, chosen = (self.enter(t) for t in (x, weights, chosen))
        rows, weights, chosen = (t.flatten(0, 1) for t in (entered, weights, chosen))  # (B T, ...)
        y = self.dispatch(rows, weights, chosen, self.experts, meanwhile=run_shared)
        y = self.leave(y.view_as(entered))
        return y if shared is None else y + shared


class Router(nn.Linear):
    """Chooses experts: x (B, T, C) -> weights (B, T, k), the experts' numbers (B, T, k). Of equal
    scores the lower number wins. Three fields of the config act on the load or the logits' size:

    balance_loss  factor of E sum_e f_e P_e, which is 1 for an even load. In a sequence, f_e is the
                  share of assignments that go to expert e, P_e its mean score (DeepSeek-V3)
    z_loss        factor of the mean of logsumexp(logits)^2 (Zoph et al. 2022, arXiv:2202.08906)
    bias_rate     step of `choice_bias`, which is added to the scores for the choice only. It goes
                  up where `load`, the assignments, is low (Wang et al. 2024, arXiv:2408.15664)

    The two losses affect gradients, not the reported loss. Like cross-entropy they are sums over
    tokens, divided by target_count, so those of a batch's pieces add up."""

    def __init__(self, config):
        super().__init__(config.width, config.experts, bias=False)
        self.config = config
        self.sum_over_sequence = nn.Identity()  # adds sums over the pieces of a cut sequence
        self.register_buffer("choice_bias", torch.zeros(config.experts))
        self.register_buffer("load", torch.zeros(config.experts, dtype=torch.int64))

    def forward(self, x, target_count=None):
        config = self.config
        logits = super().forward(x)  # (B, T, E)
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))  # at least float32
        scores = logits.softmax(-1) if config.scores == "softmax" else logits.sigmoid()
        best = (scores.detach() + self.choice_bias).sort(dim=-1, descending=True, stable=True)
        chosen = best.indices[..., : config.top_k]  # (B, T, k)
        weights = scores.gather(-1, chosen)
        if config.renormalize:
            weights = weights / weights.sum(-1, keepdim=True)
        if weights.requires_grad and target_count is not None:  # in training
            ones = torch.ones_like(weights).flatten(1)
            assigned = ones.new_zeros(len(x), config.experts)  # (B, E)
            assigned.scatter_add_(1, chosen.flatten(1), ones)
            weights.register_hook(partial(self.add_load, assigned.sum(0).long()))
            weights = self.add_losses(weights, assigned, scores, logits, target_count)
        return weights.to(x.dtype), chosen

    def add_load(self, load, grad):  # in backward, because recomputation runs forward twice
        self.load += load

    def add_losses(self, weights, assigned, scores, logits, target_count):
        """Return the weights. Their backward also runs that of the losses."""
        if self.config.balance_loss:
            loss = self.imbalance(scores, assigned) / target_count
            weights = AddLoss.apply(weights, self.config.balance_loss * loss)
        if self.config.z_loss:
            loss = self.config.z_loss * logits.logsumexp(-1).square().sum() / target_count
            weights = AddLoss.apply(weights, loss)
        return weights

    def imbalance(self, scores, assigned):
        """tokens x E sum_e f_e P_e, summed over sequences. scores (B, T, E), assigned (B, E)."""
        experts, top_k = self.config.experts, self.config.top_k
        if self.config.scores == "sigmoid":
            scores = scores / scores.sum(-1, keepdim=True)
        tokens = assigned.new_full((len(scores), 1), scores.shape[1])
        # One tensor: where a sequence is cut, that is one message
        sums = self.sum_over_sequence(torch.cat((assigned, scores.sum(1), tokens), dim=1))
        assigned_sum, score_sum, token_sum = sums.split((experts, experts, 1), dim=1)
        # tokens x E sum_e f_e P_e, where f = assigned_sum / (k tokens) and P = score_sum / tokens
        return (assigned_sum.detach() * score_sum / token_sum).sum() * experts / top_k


@torch.no_grad()
def rebalance(model, sum_over_devices=None, step_taken=True):
    """After each step: move every router's bias by `bias_rate` towards an even load. A skipped step
    only zeroes the loads. sum_over_devices(load): in place, over the devices with other tokens."""
    for router in [module for module in model.modules() if isinstance(module, Router)]:
        if router.config.bias_rate and step_taken:
            if sum_over_devices is not None:
                sum_over_devices(router.load)
            load = router.load.to(router.choice_bias.dtype)
            router.choice_bias += router.config.bias_rate * (load.mean() - load).sign()
        router.load.zero_()


class AddLoss(torch.autograd.Function):
    """Returns x. In backward `loss` gets the gradient 1, as if it had been added to the model's
    loss, even on a pipeline stage without the head (Megatron-LM's MoEAuxLossAutoScaler). A factor
    on that loss (a GradScaler's) does not multiply this one: divide target_count by it instead."""

    @staticmethod
    def forward(ctx, x, loss):
        ctx.save_for_backward(loss)
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        return grad, torch.ones_like(ctx.saved_tensors[0])


class Dispatch(nn.Module):
    """Brings N tokens to their experts and back: x (N, C), weights and chosen (N, k) -> (N, C), the
    sum of weight x expert(x). No token is dropped, nothing is padded. meanwhile() is called once:
    expert_parallel.py's dispatch does so while tokens travel."""

    def forward(self, x, weights, chosen, experts, meanwhile):
        meanwhile()
        order = chosen.flatten().argsort(stable=True)  # (N k,): by expert, then by token
        # Not bincount: it waits for the device, to know the size of its result
        counts = order.new_zeros(len(experts.up))  # (E,)
        counts = counts.scatter_add_(0, chosen.flatten(), torch.ones_like(order))
        token = order // chosen.shape[1]
        rows = experts(x.index_select(0, token), counts)
        rows = rows * weights.flatten()[order].unsqueeze(1)
        return torch.zeros_like(x).index_add(0, token, rows)


class Experts(nn.Module):
    """E MLPs without biases: rows (R, C) sorted by expert, how many each has (E,) -> (R, C). A
    projection is one parameter (E, out, in), so a slice of its first dimension is whole experts."""

    def __init__(self, config):
        super().__init__()
        experts, hidden, width = config.experts, config.hidden, config.width
        self.gate = None
        if config.mlp == "swiglu":
            self.gate = nn.Parameter(torch.empty(experts, hidden, width))
        self.up = nn.Parameter(torch.empty(experts, hidden, width))
        self.down = nn.Parameter(torch.empty(experts, width, hidden))

    def forward(self, rows, counts):
        ends = counts.cumsum(0).to(torch.int32)
        gate = None if self.gate is None else grouped_linear(rows, self.gate, ends)
        up = grouped_linear(rows, self.up, ends)
        return self.finish(up, gate, ends)

    def finish(self, up, gate, ends):  # as in MLP
        return grouped_linear(activate(up, gate), self.down, ends)


def grouped_linear(x, weight, ends):
    """x (R, in), weight (E, out, in) -> (R, out): x[ends[e-1] : ends[e]] @ weight[e].T."""
    good_input = len(x) > 0 and x.dtype in (torch.float32, torch.bfloat16, torch.float16)
    aligned = all(size * x.element_size() % 16 == 0 for size in weight.shape[1:])
    # grouped_mm needs sm_80. On B200 experts without rows get a nonzero gradient (pytorch #172439)
    good_device = not x.is_cuda or (8, 0) <= torch.cuda.get_device_capability(x.device) < (10, 0)
    if good_input and aligned and good_device:
        return F.grouped_mm(x, weight.transpose(1, 2), offs=ends)
    parts = x.tensor_split(ends[:-1].tolist())
    return torch.cat([F.linear(part, matrix) for part, matrix in zip(parts, weight)])


# --- sequences of several documents


def attend_to_documents(q, k, v, starts):
    """Attention within each document. The causal kernel runs once per document, instead of once
    with a mask that throws most pairs away. FlashAttention (CUDA, 16 bits) needs one call."""
    # A sequence may be padded at its end (trainer/layout.py). The padding is a document, too
    starts = F.pad(starts, (0, q.shape[2] - starts.shape[1]), value=starts.shape[1])  # (B, T)
    edges = (starts == torch.arange(q.shape[2])).flatten().nonzero().flatten().tolist()
    edges.append(starts.numel())  # document i of the batch: its tokens edges[i] to edges[i + 1]
    lengths = [end - begin for begin, end in pairwise(edges)]
    grouped = q.shape != k.shape
    params = torch.backends.cuda.SDPAParams(q, k, v, None, 0.0, True, grouped)
    if torch.backends.cuda.can_use_flash_attention(params):
        rows = (t.transpose(1, 2).flatten(0, 1) for t in (q, k, v))  # (B T, H, D)
        edges = torch.tensor(edges, dtype=torch.int32).pin_memory().to(q.device, non_blocking=True)
        options = 0.0, True, False  # no dropout, causal, no debug mask
        kernel = torch.ops.aten._flash_attention_forward
        y, *_ = kernel(*rows, edges, edges, max(lengths), max(lengths), *options)
        return y.unflatten(0, starts.shape).transpose(1, 2)
    rows = (t.transpose(0, 1).flatten(1, 2) for t in (q, k, v))  # (H, B T, D)
    documents = zip(*(t.unsqueeze(0).split(lengths, dim=2) for t in rows))
    causal = partial(F.scaled_dot_product_attention, is_causal=True, enable_gqa=grouped)
    y = torch.cat([causal(*document) for document in documents], dim=2)  # (1, H, B T, D)
    return y.squeeze(0).unflatten(1, starts.shape).transpose(0, 1)


# --- dropout: a piece of the batch is masked as the whole is (the idea: Salmon et al. 2011)


class Dropout(nn.Module):
    """Zero each element of x (B, T, C) with probability p, scale the others by 1 / (1 - p). A hash
    decides: of `drop_key` (B, T), itself a hash of sample and position; of `site`, the number of
    this dropout in the model; and of the channel. Without a key x stays as it is."""

    def __init__(self, p, site):
        super().__init__()
        self.p, self.site = p, site

    def forward(self, x, drop_key):
        if drop_key is None:
            return x
        key = drop_key.unsqueeze(-1)  # (B, T, 1)
        channel = hash64(torch.arange(x.shape[-1], device=x.device) + (self.site << 32)).int()
        # MurmurHash3's finaliser of key ^ channel, in place, to hold few (B, T, C). Its first step,
        # h ^= h >> 16, runs before the xor: there tensors are small
        h = (key ^ (key >> 16 & 0xFFFF)) ^ (channel ^ (channel >> 16 & 0xFFFF))  # (B, T, C)
        h *= -0x7A143595  # 0x85EBCA6B as a signed number
        h ^= (h >> 13).bitwise_and_(0x7FFFF)
        h *= -0x3D4D51CB
        h ^= (h >> 16).bitwise_and_(0xFFFF)
        limit = int((1 - self.p) * 2**32) - 2**31  # h is uniform in -2^31 .. 2^31 - 1
        keep = torch.lt(h, limit, out=torch.empty_like(x))  # 1 or 0, in x's dtype
        return x * keep.mul_(1 / (1 - self.p))


def hash64(x):
    """splitmix64 of an int64 tensor, element by element (Steele et al. 2014)."""
    # Products wrap at 64 bits. `>>` copies the sign bit: each mask clears the copies
    x = x + -0x61C8864680B583EB
    x = (x ^ (x >> 30 & (1 << 34) - 1)) * -0x40A7B892E31B1A47
    x = (x ^ (x >> 27 & (1 << 37) - 1)) * -0x6B2FB644ECCEEE15
    return x ^ (x >> 31 & (1 << 33) - 1)


# --- sizes that contradict each other: refused


def check_config(config):
    """Raise ValueError for a Config that would train another model than it says."""
    for field in fields(config):
        value, choices = getattr(config, field.name), get_args(field.type)  # a Literal's
        if choices and repr(value) not in map(repr, choices):  # 0 == False, but no value of `bias`
            known = ", ".join(map(str, choices))
            raise ValueError(f"{field.name} must be one of {known}, not {value!r}")
        least = 0 if field.name in ("experts", "shared") else 1
        if field.type is int and value < least:  # a config.json may hold any number
            raise ValueError(f"{field.name} must be at least {least}, not {value}")
    if not 0 <= config.dropout < 1:
        raise ValueError(f"dropout must be at least 0 and below 1, not {config.dropout}")
    heads, kv_heads, head_dim = config.heads, config.kv_heads, config.width // config.heads
    if config.width % heads:
        raise ValueError(f"width {config.width} is not a multiple of {heads} heads: change one")
    if heads % kv_heads:
        raise ValueError(f"{kv_heads} kv-heads can't share {heads} heads: choose a divisor")
    if config.positions == "rope" and head_dim % 2:
        raise ValueError(f"rotary positions need an even head size, not {head_dim}")
    if config.experts and config.top_k > config.experts:
        chosen = f"{config.top_k} of {config.experts} experts"
        raise ValueError(f"a token can't go to {chosen}: change top-k")
