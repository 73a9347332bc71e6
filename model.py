"""The GPT that every file of this project trains: plain PyTorch on one device.

    tokens (B, T) -> Embedding -> Block x layers -> Head -> logits (B, T, V) -> CrossEntropy -> loss

    Block:   x --+-- norm -- Attention --(+)--+-- norm -- MLP or MoE --(+)-->
                 +------------------------+   +-------------------------+

GPT-2 (learned positions, LayerNorm, GELU, biases, one matrix for embedding and output) and Llama
(rotary positions, RMSNorm, SwiGLU, grouped-query attention, no biases) differ in fields of Config.
With `experts` > 0 a mixture (mixture.py) takes the place of the MLP.

The model itself sends nothing. A technique replaces submodules, or removes them. `enter` is an
identity that marks where tensor parallelism puts a message. `run_block`, `attend` and `finish` are
methods of their own because activation checkpointing runs exactly these again in backward. The end
of the file, from `for the lessons' demos` on, is no part of the model.

    model = GPT(Config(layers=2))
    tokens = torch.randint(model.config.vocab, (4, 129))
    loss = model(tokens[:, :-1], targets=tokens[:, 1:])
    llama = Config(positions="rope", norm="rmsnorm", mlp="swiglu", bias=False, tied=False)

Radford et al. 2019 (GPT-2); Touvron et al. 2023, arXiv:2302.13971 (Llama); Jiang et al. 2024,
arXiv:2401.04088 (Mixtral). Each part below names its own paper.
"""

from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

import torch
import torch.nn as nn
import torch.nn.functional as F

IGNORE = -100  # a target with this value adds nothing to the loss (torch's default, too)


@dataclass(frozen=True)
class Config:
    """The shape of a GPT. kv_heads, head_dim and hidden are 0 for their defaults, which are filled
    in at once. dataclasses.replace would copy the filled-in numbers, so reset them:
    replace(config, width=256, head_dim=0, hidden=0)."""

    layers: int = 4
    heads: int = 4
    kv_heads: int = 0  # 0: as many as heads. Fewer: grouped-query attention (arXiv:2305.13245)
    width: int = 128  # C
    head_dim: int = 0  # D. 0: width / heads
    hidden: int = 0  # inner width of the MLP, or of each expert. 0: 4 x width
    context: int = 128  # the longest sequence
    vocab: int = 257  # 256 bytes, and a mark between documents
    positions: Literal["learned", "rope"] = "learned"
    norm: Literal["layernorm", "rmsnorm"] = "layernorm"
    mlp: Literal["gelu", "swiglu"] = "gelu"
    bias: bool = True  # of linear layers
    tied: bool = True  # one matrix is both the token embedding and the output projection
    # No effect unless forward gets sample_ids. On the embedding, and on what attention and MLP add
    dropout: float = 0.0
    rope_theta: float = 10000.0
    norm_eps: float = 1e-5
    # A mixture of experts, unless experts is 0: see mixture.py
    experts: int = 0
    top_k: int = 2  # experts per token
    shared: int = 0  # width of an MLP that every token passes, in units of `hidden`; 0: none
    scores: Literal["softmax", "sigmoid"] = "softmax"  # of the logits; DeepSeek-V3: sigmoid
    # Divide a token's k weights by their sum (Mixtral; not OLMoE). Not for k = 1 (Switch): a weight
    # that is always 1 gives the router no gradient
    renormalize: bool = True
    # For an even load, see mixture.py
    balance_loss: float = 0.0  # factor of this loss
    z_loss: float = 0.0  # factor of this loss
    bias_rate: float = 0.0  # step of a bias for the choice

    def __post_init__(self):
        head_dim = self.width // self.heads
        defaults = dict(kv_heads=self.heads, head_dim=head_dim, hidden=4 * self.width)
        for name, default in defaults.items():
            object.__setattr__(self, name, getattr(self, name) or default)  # it is frozen
        assert self.heads % self.kv_heads == 0, f"{self.heads} heads, {self.kv_heads} kv-heads"
        assert not self.experts or self.top_k <= self.experts, "a token can't go to so many experts"


class Batch(NamedTuple):
    """What layers need to know of the tokens: GPT.make_batch makes it once per forward."""

    positions: torch.Tensor | None = None  # (T,); of documents (B, T), each from 0 on
    rope: tuple | None = None  # their rotary_table
    documents: tuple = ()  # what the core gets after q, k, v: (starts,) or (). See GPT.forward
    drop_key: torch.Tensor | None = None  # (B, T): see Dropout
    target_count: torch.Tensor | int | None = None  # divides the losses, the routers' too


class Block(nn.Module):
    """One layer, x (B, T, C) -> (B, T, C): attention, then an MLP or a mixture of experts. Each
    sees a norm of x, and its output is added to x."""

    def __init__(self, config, layer):
        super().__init__()
        self.attn_norm = make_norm(config)
        self.attn = Attention(config)
        # Not nn.Dropout: see Dropout. site: its number in the model
        self.attn_drop = Dropout(config.dropout, 2 * layer + 1)
        self.mlp_norm = make_norm(config)
        self.mlp = make_mlp(config)
        self.mlp_drop = Dropout(config.dropout, 2 * layer + 2)

    def forward(self, x, batch=Batch()):
        x = x + self.attn_drop(self.attn(self.attn_norm(x), batch), batch.drop_key)
        x = x + self.mlp_drop(self.mlp(self.mlp_norm(x), batch), batch.drop_key)
        return x


class GPT(nn.Module):
    """The whole model. A pipeline stage sets `embed` or `head` to None, or deletes some of
    `blocks`: forward skips what is missing."""

    def __init__(self, config):
        super().__init__()
        # harness/families.py has more fields, and biases of q, k and v alone
        plain = type(config) is Config and config.bias in (True, False)
        assert plain, "this model has no such fields, or bias: build it with harness/families.py"
        self.config = config
        self.embed = Embedding(config)
        self.blocks = nn.ModuleDict({str(i): Block(config, i) for i in range(config.layers)})
        self.head = Head(config)
        self.loss = CrossEntropy()
        self.rotary_table = rotary_table  # families.py puts another here, for long sequences
        if config.tied:
            self.head.out.weight = self.embed.token.weight
        for name, p in self.named_parameters():
            p.init = initial_distribution(name, config.layers)  # (mean, standard deviation)
            if not p.is_meta:  # a meta model is filled when it has been cut
                nn.init.normal_(p, *p.init)

    def forward(
        self, x, positions=None, targets=None, target_count=None, sample_ids=None, starts=None
    ):
        """Return the loss; without targets the logits (B, T, V); without a head activations.

        x             tokens (B, T), or activations (B, T, C) if this stage has no embedding
        positions     (T,), by default arange(T)
        targets       (B, T)
        target_count  see CrossEntropy. By default the number of valid `targets`. With neither of
                      the two a mixture's load is not balanced
        sample_ids    (B,), a number per row, unique in the whole run: the same number, the same
                      dropout. They alone switch it on: train() and eval() don't
        starts        (B, T), on the host, of whole sequences, even if x is a piece: where each
                      token's document begins, as 0 0 0 3 3. Attention and positions stay within
                      the document"""
        if positions is None:
            positions = torch.arange(x.shape[1], device=x.device)
        if target_count is None and targets is not None:
            target_count = (targets != IGNORE).sum()
        batch = self.make_batch(positions, target_count, sample_ids, starts)
        if self.embed is not None:
            x = self.embed(x, batch)
        for block in self.blocks.values():
            x = self.run_block(block, x, batch)
        if self.head is None:
            return x
        logits = self.head(x)
        return logits if targets is None else self.loss(logits, targets, target_count)

    def make_batch(self, positions, target_count, sample_ids, starts):
        key = None
        if sample_ids is not None and self.config.dropout > 0:
            # Of positions in the whole sequence: below, `starts` makes them those in the document
            key = drop_key(sample_ids, positions)
        if starts is not None:
            positions = positions - starts.to(positions.device)[:, positions]
        rope = None
        if self.config.positions == "rope":
            dtype = next(self.parameters()).dtype
            rope = self.rotary_table(positions, self.config, dtype)
        documents = () if starts is None else (starts,)
        return Batch(positions, rope, documents, key, target_count)

    def run_block(self, block, x, batch):
        return block(x, batch)

    def named(self):
        """As named_parameters(), but a last stage's own copy of a tied matrix has the embedding's
        name."""
        for name, p in self.named_parameters():
            tied = self.config.tied and name == "head.out.weight"
            yield "embed.token.weight" if tied else name, p


class Attention(nn.Module):
    """Causal self-attention, x (B, T, C) -> (B, T, C). One matrix makes q, k and v. Its rows are
    ordered by key/value head: q..q k v | q..q k v | .... So a cut into n equal parts runs between
    heads if n divides the number of key/value heads."""

    def __init__(self, config):
        super().__init__()
        self.head_dim = config.head_dim  # D
        self.queries_per_kv = config.heads // config.kv_heads
        self.rotary = config.positions == "rope"
        self.enter = nn.Identity()
        rows = (config.heads + 2 * config.kv_heads) * config.head_dim
        self.qkv = nn.Linear(config.width, rows, config.bias)
        self.qkv.weight.matrix_rows = config.head_dim  # muon.py takes each head as a matrix
        self.q_norm, self.k_norm = nn.Identity(), nn.Identity()  # some families have norms here
        self.core = AttentionCore()
        self.proj = nn.Linear(config.heads * config.head_dim, config.width, config.bias)

    def forward(self, x, batch=Batch()):
        return self.attend(self.qkv(self.enter(x)), batch)

    def attend(self, qkv, batch):
        n = self.queries_per_kv
        qkv = qkv.unflatten(-1, (-1, n + 2, self.head_dim))  # (B, T, H_kv, n + 2, D)
        q, k, v = qkv.split((n, 1, 1), dim=-2)
        q, k, v = (t.flatten(2, 3) for t in (q, k, v))  # (B, T, H or H_kv, D)
        q, k = self.q_norm(q), self.k_norm(k)
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))  # (B, H or H_kv, T, D)
        if self.rotary:
            q, k = rotate(q, batch.rope), rotate(k, batch.rope)
        y = self.core(q, k, v, *batch.documents)  # (B, H, T, D)
        return self.proj(y.transpose(1, 2).flatten(2))


class AttentionCore(nn.Module):
    """softmax(q k^T / sqrt(D)) v, causal: q (B, H, T, D), k, v (B, H_kv, T, D) -> (B, H, T, D).
    starts (B, T): attention stays within documents. packed_documents.py has a faster form."""

    def forward(self, q, k, v, starts=None):
        grouped = q.shape[1] != k.shape[1]
        if starts is None:
            return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped)
        # A token sees those before it whose document starts where its own does. -1: the padding of
        # a sequence that was cut into equal pieces
        starts = F.pad(starts, (0, q.shape[2] - starts.shape[1]), value=-1).to(q.device)
        mask = (starts[:, None, :, None] == starts[:, None, None, :]).tril()  # (B, 1, T, T)
        return F.scaled_dot_product_attention(q, k, v, mask, enable_gqa=grouped)


class MLP(nn.Module):
    """x (B, T, C) -> (B, T, C).

    gelu    down(gelu(up(x)))
    swiglu  down(silu(gate(x)) * up(x))    (Shazeer 2020, arXiv:2002.05202)"""

    def __init__(self, config):
        super().__init__()
        self.enter = nn.Identity()
        self.gate = None
        if config.mlp == "swiglu":
            self.gate = nn.Linear(config.width, config.hidden, config.bias)
        self.up = nn.Linear(config.width, config.hidden, config.bias)
        self.down = nn.Linear(config.hidden, config.width, config.bias)

    def forward(self, x, batch=None):  # batch: a mixture in its place needs it
        x = self.enter(x)
        # In the order of declaration: ddp.py expects gradients in its reverse
        gate = None if self.gate is None else self.gate(x)
        return self.finish(self.up(x), gate)

    def finish(self, up, gate=None):
        # The approximation that GPT-2 was trained with
        hidden = F.gelu(up, approximate="tanh") if gate is None else F.silu(gate) * up
        return self.down(hidden)


def make_mlp(config):
    """An MLP or a mixture of experts, by the config."""
    if not config.experts:
        return MLP(config)
    from mixture import MoE  # a file that only such configs need

    shared = MLP(replace(config, hidden=config.shared * config.hidden)) if config.shared else None
    return MoE(config, shared)


class Embedding(nn.Module):
    """tokens (B, T) -> (B, T, C): the token's vector, plus the position's if those are learned."""

    def __init__(self, config):
        super().__init__()
        self.token = nn.Embedding(config.vocab, config.width)
        self.position = None
        if config.positions == "learned":
            self.position = nn.Embedding(config.context, config.width)
        self.drop = Dropout(config.dropout, 0)

    def forward(self, tokens, batch):
        x = self.token(tokens)
        if self.position is not None:
            x = x + self.position(batch.positions)
        return self.drop(x, batch.drop_key)


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
    target_count counts the valid targets of the *global* batch. So the losses of its pieces add up
    to the global mean, even if their sizes differ. A target equal to IGNORE is not valid."""

    def forward(self, logits, targets, target_count):
        logits, targets = logits.flatten(0, 1), targets.flatten()
        if logits.dtype.itemsize < 4:
            logits = logits.float()  # softmax over the vocabulary in float32
        return F.cross_entropy(logits, targets, ignore_index=IGNORE, reduction="sum") / target_count


# --- dropout that masks a piece of a batch as the whole is masked


class Dropout(nn.Module):
    """Zero each element of x (B, T, C) with probability p, scale the others by 1 / (1 - p).

    nn.Dropout draws its mask from a stream of random numbers: ranks with other tokens, or other
    layers, would draw other masks than one process. Here a hash decides (the idea of Salmon et al.
    2011, Parallel random numbers): of `key` (B, T), itself a hash of sample and position; of
    `site`, the number of this dropout in the model; and of the channel. There is no seed: give a
    sample a new id in every epoch. Without a key nothing is zeroed, not even in train()."""

    def __init__(self, p, site):
        super().__init__()
        self.p, self.site = p, site

    def forward(self, x, key):
        if key is None or self.p == 0:
            return x
        channel = torch.arange(x.shape[-1], device=x.device)
        channel = hash64(channel + (self.site << 32)).int()  # (C,)
        hashed = hash32_(key.unsqueeze(-1) ^ channel)  # (B, T, C)
        keep = hashed < int((1 - self.p) * 2**32) - 2**31  # uniform in -2^31 .. 2^31 - 1
        return x * keep / (1 - self.p)


def drop_key(sample_ids, positions):
    """A hash of each token's sample and position, (B, T). sample_ids (B,), positions (T,)."""
    return hash64(sample_ids.unsqueeze(1) + hash64(positions)).int()


# Two hashes, element by element, of signed numbers. Products wrap. `>>` fills up with the sign bit:
# the masks clear what it has filled


def hash32_(h):
    """MurmurHash3's finaliser of an int32 tensor (Appleby 2011), in place: of B T C elements."""
    h ^= (h >> 16).bitwise_and_(0xFFFF)
    h *= 0x85EBCA6B - 2**32
    h ^= (h >> 13).bitwise_and_(0x7FFFF)
    h *= 0xC2B2AE35 - 2**32
    h ^= (h >> 16).bitwise_and_(0xFFFF)
    return h


def hash64(x):
    """splitmix64 of an int64 tensor (Steele et al. 2014)."""
    x = x + (0x9E3779B97F4A7C15 - 2**64)
    x = (x ^ ((x >> 30) & ((1 << 34) - 1))) * (0xBF58476D1CE4E5B9 - 2**64)
    x = (x ^ ((x >> 27) & ((1 << 37) - 1))) * (0x94D049BB133111EB - 2**64)
    return x ^ ((x >> 31) & ((1 << 33) - 1))


# --- small parts of a layer, and the initial weights


def make_norm(config):
    kind = nn.LayerNorm if config.norm == "layernorm" else nn.RMSNorm
    return kind(config.width, eps=config.norm_eps)


def rotary_table(positions, config, dtype):
    """cos and sin of the angles of positions (T,) or (B, T), for all heads: (1, T, D) or
    (B, 1, T, D) each (Su et al. 2021, arXiv:2104.09864)."""
    head_dim = config.head_dim
    # Angles in float32 whatever the model's dtype, as in the published models
    exponents = torch.arange(0, head_dim, 2, device=positions.device).float() / head_dim
    frequencies = 1.0 / config.rope_theta**exponents  # (D/2,)
    angles = positions.float()[..., None, :, None] * frequencies  # (..., 1, T, D/2)
    angles = torch.cat((angles, angles), dim=-1)  # i and i + D/2 turn by the same angle
    return angles.cos().to(dtype), angles.sin().to(dtype)


def rotate(x, table):
    """Turn each pair (x[i], x[i + D/2]) of x (..., T, D) by its position's angle. The pairs are
    Hugging Face's; the paper has (x[2i], x[2i + 1])."""
    cos, sin = table
    a, b = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-b, a), dim=-1) * sin


def initial_distribution(name, layers):
    """(mean, standard deviation) of the normal distribution that a parameter is drawn from, by
    GPT-2's rule. A deviation of 0: all elements are the mean."""
    if name.endswith("bias"):
        return 0.0, 0.0
    if name.endswith("norm.weight"):
        return 1.0, 0.0
    if name.endswith(("proj.weight", "down.weight", "experts.down")):
        return 0.0, 0.02 / (2 * layers) ** 0.5  # 2 x layers matrices add to the residual stream
    return 0.0, 0.02


# --- for the lessons' demos ---
# torchrun's ranks, a batch of text, a counter of messages, the same run on one process

import copy
import os
import pathlib
import subprocess
import sys
import sysconfig
from collections import Counter

import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode


def join_ranks():
    """Join torchrun's ranks, over nccl if each has a GPU, else over gloo, on CPUs. Without torchrun
    start four. Returns this rank's device."""
    if "RANK" not in os.environ:
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        spec = sys.modules["__main__"].__spec__  # of a lesson that was started by python -m
        lesson = ["-m", spec.name] if spec else sys.argv[:1]
        sys.exit(subprocess.call([*torchrun, "--nproc_per_node=4", *lesson, *sys.argv[1:]]))
    if torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"]):
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
        dist.init_process_group("nccl", device_id=device)
        return device
    if hasattr(os, "SCHED_BATCH"):  # Linux: ranks that share cores wait less for each other
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    dist.init_process_group("gloo")
    return torch.device("cpu")


def leave(code=0):
    """End this process. At once, because at a usual exit gloo's threads may abort."""
    dist.barrier()
    dist.destroy_process_group()
    sys.stdout.flush()
    os._exit(code)


def text_batch(step, rows, context, device):
    """A step's global batch of Python's own source, in bytes: tokens and targets (rows, context),
    and the number of valid targets. In every third row the first half is IGNORE, as a prompt would
    be, so ranks have unequal numbers of them."""
    files = sorted(pathlib.Path(sysconfig.get_paths()["stdlib"]).glob("a*.py"))
    text = torch.frombuffer(bytearray(b"".join(f.read_bytes() for f in files)), dtype=torch.uint8)
    generator = torch.Generator().manual_seed(step)
    starts = torch.randint(len(text) - context, (rows, 1), generator=generator)
    windows = text[starts + torch.arange(context + 1)].long().to(device)
    tokens, targets = windows[:, :-1], windows[:, 1:].clone()
    targets[::3, : context // 2] = IGNORE
    return tokens, targets, (targets != IGNORE).sum()


class Sent(TorchDispatchMode):
    """Within `with sent:` counts this rank's messages and their sizes, below all code that calls
    torch. What the backend makes of a collective it does not see: bytes are those of a ring.

    calls  {operation: how many}
    bytes  sent, if the n ranks of an operation form a ring: 2 (n-1)/n of an all-reduce's tensor,
           (n-1)/n of the whole tensor of another collective, all of what goes to one rank"""

    def __init__(self):
        super().__init__()
        self.calls, self.bytes = Counter(), 0.0

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        name = operation.name().removeprefix("c10d::").strip("_")
        if operation.namespace == "c10d" and name not in ("barrier", "recv", "recv_any_source"):
            group = next(a for a in args if isinstance(a, torch.ScriptObject))
            group = dist.ProcessGroup.unbox(group)
            n = group.size()
            part = {"allreduce": 2 * (n - 1) / n, "send": 1}.get(name, (n - 1) / n)
            if name == "alltoall_base" and args[4]:  # rows for each rank: its own are not sent
                part = 1 - args[4][group.rank()] / max(sum(args[4]), 1)
            # The whole tensor is the second argument of these two, the first of the others
            whole = args[name in ("reduce_scatter_base", "alltoall_base")]
            self.calls[name] += 1
            self.bytes += part * sum(t.nbytes for t in (whole if type(whole) is list else [whole]))
        return operation(*args, **(kwargs or {}))


class OneProcess:
    """The same run on one process. Every rank does it beside its own, and compares the two."""

    def __init__(self, model, make_optimizer):
        self.model = copy.deepcopy(model)  # so make it before a technique changes the model
        self.optimizer = make_optimizer(self.model.parameters())
        self.worst = 0.0, ""  # the largest difference so far, and of what

    def train_step(self, tokens, targets, count, max_norm):
        """A step with the whole batch. Its clipped gradients stay. Returns the loss."""
        self.optimizer.zero_grad()
        loss = self.model(tokens, targets=targets, target_count=count)
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), max_norm)
        self.optimizer.step()
        return loss.detach()

    def compare(self, step, loss, loss_alone, named):
        """Print the losses, and by how much gradients and weights differ on any rank, relative to
        the largest element of each tensor. named: this rank's (name, parameter). A parameter may be
        a shard, and end in padding: p.placement["cuts"] = {dimension: (group, start, length)} says
        of what. A gradient that is None is another rank's."""
        whole = dict(self.model.named_parameters())
        worst = {"gradient": (0.0, ""), "weight": (0.0, "")}
        for name, p in named:
            q, cuts = whole[name], getattr(p, "placement", {}).get("cuts", {})
            for kind, ours, alone in ("gradient", p.grad, q.grad), ("weight", p.data, q.data):
                if ours is not None:
                    error = difference(ours, alone, cuts), f"{kind} {name}"
                    worst[kind] = max(worst[kind], error)
        worst["loss"] = difference(loss, loss_alone), "loss"
        on_ranks = [None] * dist.get_world_size()
        dist.all_gather_object(on_ranks, worst)
        worst = {kind: max(found[kind] for found in on_ranks) for kind in worst}
        self.worst = max(self.worst, *worst.values())
        if dist.get_rank() == 0:
            text = f"step {step + 1}  loss {loss:.6f}, on one process {loss_alone:.6f}"
            apart = f"gradients by {worst['gradient'][0]:.1e}, weights {worst['weight'][0]:.1e}"
            print(f"{text}, apart: {apart}")

    def prove(self, sent, text, formula):
        """Print the bytes sent and the formula, of the rank where they differ most, and "proven" if
        nothing differs by more than 1e-10 (rounding is 1e-15). Otherwise end with exit code 1."""
        on_ranks = [None] * dist.get_world_size()
        calls = ", ".join(f"{n} {name}" for name, n in sent.calls.items())
        dist.all_gather_object(on_ranks, (abs(sent.bytes - formula), sent.bytes, formula, calls))
        wrong, bytes_sent, expected, calls = max(on_ranks)
        error, name = self.worst
        verdict = f"proven, to {error:.1e} ({name})"
        if error > 1e-10:
            verdict = f"NOT proven: the {name} differs by {error:.1e}"
        elif wrong > 0.5:
            verdict = "NOT proven: sent and formula differ"
        if dist.get_rank() == 0:
            print(f"sent {bytes_sent:,.0f} bytes ({calls}), {text} = {expected:,.0f}: {verdict}\n")
        if verdict.startswith("NOT"):
            leave(1)


def difference(ours, alone, cuts=()):
    """The largest difference of two elements, relative to the largest element. cuts: of `ours`."""
    for dim, (_, start, length) in dict(cuts).items():
        ours, alone = ours.narrow(dim, 0, length), alone.narrow(dim, start, length)
    if alone.numel() == 0:
        return 0.0
    error = (ours - alone).abs().max() / alone.abs().max().clamp(min=1e-30)
    return error.nan_to_num(torch.inf).item()
