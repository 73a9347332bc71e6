"""What formulas of several lessons share: the sizes of a step, its activations, sums over ranks.

Each lesson's file has a function

    expected(sizes, group, ...) -> (sent, held)

    sent    {(operation, group's name): (bytes that this rank sends in a step, formula as text)}
    held    {kind: (bytes that it holds, formula as text)}

which the lesson's demo and receipts/train.py call alike. Letters: P parameters, e bytes an element,
B sequences of T tokens, C the width, V the vocabulary, r = (n-1)/n on n ranks.
"""

import functools
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch.distributed as dist

from harness.flags import DTYPES
from harness.presets import ceil, parameter_shapes
from model import Config

SCALAR = 8  # bytes: the loss and the squared norm are summed as one float64 each
WHOLE_BLOCKS = ("half", "block")  # kinds of recomputation that repeat a block's messages


class Group(NamedTuple):
    """A process group, as far as a formula knows it: its name in the receipt, its size, and which
    of its ranks this one is."""

    name: str
    ranks: int
    rank: int = 0


@dataclass(frozen=True)
class Sizes:
    """What one rank has of a step, in numbers."""

    config: Config
    sequences: int  # in all of the step's micro-batches
    length: int  # this rank's tokens of each, padding included
    microbatches: int = 1
    e: int = 4  # bytes of an element: of weights and activations,
    reduced: int = 4  # of a gradient that is summed,
    master: int = 4  # of what the optimizer steps on
    moments: int = 2  # that the optimizer keeps of each parameter
    masters: bool = False  # whether it has a copy of the weights too
    layers: tuple[range, ...] | None = None  # of each of this rank's stages. None: one has all
    embedding: bool = True
    head: bool = True
    experts: int | None = None  # how many it has, if not all of them
    tp: int = 1  # ranks that split each layer
    sp: bool = False  # whether they split the tokens between layers
    gather_again: bool = False  # and do not keep what they gather
    fold_experts: bool = False  # and have whole experts
    recompute: str = "none"
    in_flight: int | None = None  # blocks x micro-batches that wait for backward. None: all blocks

    @property
    def stages(self):
        """The layers of each stage."""
        return self.layers or (range(self.config.layers),)

    @property
    def blocks(self):
        return sum(map(len, self.stages))

    @property
    def forwards(self):
        """How often a block's forward runs for each backward."""
        return 2 if self.recompute in WHOLE_BLOCKS else 1

    @property
    def tokens(self):
        """Of a micro-batch on this rank, those that sequence parallelism splits included."""
        return self.sequences // self.microbatches * self.length

    @property
    def stream(self):
        """Bytes of (tokens, C) as it is between layers, where sequence parallelism splits it."""
        whole = self.tokens * self.config.width * self.e
        return whole / self.tp if self.sp else whole

    @property
    def exact(self):
        """Bytes of an element of sums that are too long for 16 bits."""
        return max(self.e, 4)

    def parameters(self, experts=None):
        """How many parameters the rank has. experts: as if it had so many."""
        sizes = self if experts is None else replace(self, experts=experts)
        return sum(parameter.elements for parameter in parameters_of(sizes))


def sizes_of(args, config, ranks=1, **others):
    """The Sizes of a step whose sequences `ranks` ranks share, by the flags that a script has.
    others: what differs from a whole model and whole sequences."""
    weights = getattr(args, "param_dtype", None) or args.dtype
    gradients = getattr(args, "reduce_dtype", None) or weights
    step = {
        "sequences": args.batch // ranks,
        "length": config.context,
        "microbatches": args.microbatches,
        "e": DTYPES[weights].itemsize,
        "reduced": DTYPES[gradients].itemsize,
        "master": DTYPES[args.dtype].itemsize,
        "moments": {"sgd": 0, "muon": 1, "adamw": 2}[args.optimizer],
        "masters": weights != args.dtype or getattr(args, "offload", False),
    }
    for name in ("tp", "sp", "gather_again", "fold_experts", "recompute"):
        if hasattr(args, name):
            step[name] = getattr(args, name)
    return Sizes(config, **step | others)


def flops_per_token(config):
    """FLOPs of forward and backward per token of a full context: 6 for each weight of a matrix
    that the token passes, and 12 x layers x context x heads x D for the two matmuls of attention,
    without a discount for causality (PaLM, Chowdhery 2022, arXiv:2204.02311, appendix B)."""
    attention = config.width * config.head_dim * (2 * config.heads + 2 * config.kv_heads)
    mlp = config.width * config.hidden * (3 if config.mlp == "swiglu" else 2)
    if config.experts:
        mlp = mlp * (config.top_k + config.shared) + config.width * config.experts
    weights = config.layers * (attention + mlp) + config.width * config.vocab
    return 6 * weights + 12 * config.layers * config.context * config.heads * config.head_dim


# --- sums over ranks


def all_reduce_sent(size, n):
    """Bytes that each of n ranks sends in a ring all-reduce of `size` bytes."""
    return 2 * (n - 1) / n * size


def summed(group, size, text):
    """{(operation, group): (bytes, formula)} of an all-reduce."""
    return {("all_reduce", group.name): (all_reduce_sent(size, group.ranks), text)}


def scatter_operation(group):
    """What a reduce-scatter over a process group is counted as. On gloo it is made of all-to-alls,
    because gloo's own sends as many bytes as an all-reduce."""
    return "all_to_all" if dist.get_backend(group) == "gloo" else "reduce_scatter"


def add(*tables):
    """One table of several {key: (bytes, formula)}: what has the same key adds up."""
    total = {}
    for table in tables:
        for key, (size, text) in table.items():
            before, texts = total.get(key, (0, ""))
            total[key] = before + size, f"{texts}; {text}" if texts else text
    return total


def all_sent(table):
    """The bytes of all that is sent in a lesson's (sent, held)."""
    sent, _ = table
    return sum(size for size, _ in sent.values())


# --- what a rank holds


def held(sizes, text="P e", activations="what backward needs of the blocks"):
    """{kind: (bytes, formula)} of a rank that splits no weights, gradients or optimizer states."""
    p = sizes.parameters()
    return {
        "parameters": (p * sizes.e, text),
        "gradients": (p * sizes.e, "the same"),
        "optimizer": (sizes.moments * p * sizes.master, f"{sizes.moments} x the same"),
        "activations_peak": (activation_bytes(sizes), activations),
    }


class Parameter(NamedTuple):
    name: str
    elements: int  # of the rank's piece, with padding
    cut: bool  # whether tensor-parallel ranks have other pieces of it
    expert: bool
    users: tuple  # the units of the rank that use it


# The dimension that tensor parallelism cuts: an output of the first ones, an input of the others
CUTS = dict(token=0, out=0, qkv=0, gate=0, up=0, proj=1, down=1)


@functools.cache
def parameters_of(sizes):
    """The rank's Parameters, from the first to the last. A tied matrix comes once."""
    config, found = sizes.config, []
    for name, shape in parameter_shapes(config).items():
        users = users_of(sizes, name)
        if not users:
            continue
        shape, words = list(shape), name.split(".")
        expert = "experts" in words
        dimension = CUTS.get(words[-2])
        if config.qk_norm == "all" and words[-2] in ("q_norm", "k_norm"):
            dimension = 0
        if expert:  # (E, out, in)
            dimension = CUTS[words[-1]] + 1
            shape[0] = shape[0] if sizes.experts is None else sizes.experts
        cut = dimension is not None and dimension < len(shape)  # a bias has no inputs
        shards = 1 if expert and sizes.fold_experts else sizes.tp
        elements = 1
        for i, size in enumerate(shape):
            elements *= ceil(size, shards) if cut and i == dimension else size
        found.append(Parameter(name, elements, cut, expert, users))
    return found


def users_of(sizes, name):
    """The units of the rank that use a parameter: blocks, the embedding, the head."""
    part, number, _ = name.split(".", 2)
    if part == "blocks":
        return (f"blocks.{number}",) if any(int(number) in own for own in sizes.stages) else ()
    users = []
    if part == "embed" and sizes.embedding:
        users.append("embed")
    if sizes.head and (part == "head" or sizes.config.tied and number == "token"):
        users.append("head")
    return tuple(users)


# --- activations


def activation_bytes(sizes):
    """Bytes that a rank keeps for backward, of the blocks of all micro-batches in flight."""
    flying = sizes.blocks if sizes.in_flight is None else sizes.in_flight
    size = flying * block_bytes(sizes, sizes.recompute)
    if sizes.recompute in WHOLE_BLOCKS:  # the block that runs again has all of its own
        size += block_bytes(sizes, "none") - block_bytes(sizes, sizes.recompute)
    return size


def block_bytes(sizes, recompute="none"):
    """Bytes that backward needs of one block's forward, for one micro-batch.

    Korthikanti et al. 2022, arXiv:2205.05198, section 4: s b h (10 + 24/t) for a GPT in 16 bits.
    Without the dropout masks, which our model makes again, and the attention scores, which flash
    attention does not keep. Inputs and outputs of both norms are whole; q, k, v, the heads' result
    and the MLP's hidden values are split. Sequence parallelism splits all of it, but for what it
    gathers: the norms' outputs, unless they are gathered again."""
    c, t = sizes.config.width, sizes.tp
    whole, split, gathered = kept_by_a_block(sizes.config, recompute)
    if sizes.sp:
        each = (whole + split) / t
        if not sizes.gather_again:
            each += gathered * c * (t - 1) / t
    else:
        each = whole + split / t
    return sizes.tokens * each * sizes.e


def kept_by_a_block(config, recompute):
    """Elements a token: (whole, split by tensor parallelism), and how many of the whole values (C)
    are inputs of a split product. recompute: as of the model."""
    c, k = config.width, config.top_k
    two_products = bool(config.experts) or config.mlp == "swiglu"  # of the MLP's input
    if recompute == "block":
        return c, 0, 0
    if recompute == "half":
        return *half_kept(config), 0
    whole, gathered = 4 * c, 2
    hidden = (4 if config.mlp == "swiglu" else 2) * config.hidden
    if recompute == "selective":  # without norms' outputs, and what lies between up and down
        gathered = 1 if two_products else 0
        whole = (3 if two_products else 2) * c
        hidden //= 2
    if config.experts:  # each token's k rows as they go in and come out, and what lies between
        whole += 3 * k * c
        hidden *= k + config.shared
    heads = 2 * config.heads + 2 * config.kv_heads
    return whole, heads * config.head_dim + hidden, gathered


def half_kept(config):
    """What recomputation of the kind "half" keeps of a block: elements a token, (whole, split by
    tensor parallelism). The block's input, attention's result, and of its products the first, the
    third and so on, but none that is added to x as it is."""
    c, k, ups = config.width, config.top_k, 2 if config.mlp == "swiglu" else 1
    not_kept = (0, 0)
    products = [(0, (config.heads + 2 * config.kv_heads) * config.head_dim), not_kept]
    if config.experts:
        products.append((config.experts, 0))  # the router
    if config.shared or not config.experts:
        products += ups * [(0, (config.shared or 1) * config.hidden)] + [not_kept]
    if config.experts:
        products += ups * [(0, k * config.hidden)] + [(k * c, 0)]
    kept = [(c, config.heads * config.head_dim), *products[::2]]
    return tuple(sum(sizes) for sizes in zip(*kept))
