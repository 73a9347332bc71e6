"""What each technique sends and holds by the papers, for the GPT of model.py with all of its
options.

The receipts show these figures beside what was measured. Letters: P parameters, e bytes an element,
n or t ranks, r = (n-1)/n. The formulas of a lesson's plain case, with their sources, stand in its
docstring and in docs/.
"""

import math


def all_reduce_sent(size, n):
    """Bytes that each of n ranks sends in a ring all-reduce of `size` bytes: reduce-scatter, then
    all-gather."""
    return 2 * (n - 1) / n * size


def model_states(stage, n, weights=2, gradients=2, states=12):
    """Bytes a parameter that each of n ranks holds, as (weights, gradients, optimizer): the paper's
    table in section 3."""
    return tuple(
        e / n if stage >= split else e for e, split in ((weights, 3), (gradients, 2), (states, 1))
    )


def tensor_parallel_sent(
    config, t, tokens, element_size, blocks, embedding=True, head=True, recompute="none"
):
    """Bytes a rank sends for `tokens` tokens, forward and backward, with ring all-reduces over t
    ranks: 4 of (tokens, C) a block, one for the embedding, one for the head's input, and three of
    (tokens,) for the loss. In a mixture of experts the gradient of the router's k weights too, and
    as much again as for an MLP if some experts are shared. recompute: as of the model; of whole
    blocks it sends once or twice more a block."""
    ring = 2 * (t - 1) / t
    again = sent_again(config) if recompute == "block" else 0
    wide = ((4 + again) * blocks + embedding + head) * tokens * config.width * element_size
    if config.experts:
        wide += (
            blocks * (config.top_k + 2 * bool(config.shared) * config.width) * tokens * element_size
        )
    return ring * (wide + 3 * head * tokens * max(element_size, 4))


def sent_again(config):
    """All-reduces of a block (reduce-scatters of sequence_parallel.py) that its recomputation sends
    again: those of its forward, but for the last, if nothing that follows it (dropout) needs it to
    run backward."""
    return 1 + (config.dropout > 0) + (config.experts > 0 and config.shared > 0)


def parameters_held(config, t, blocks, embedding=True, head=True, experts=None):
    """How many parameters a rank has of `blocks` blocks and of what else is there, from the sizes
    alone. experts: how many are here, if not all."""
    c, head_size, vocab = config.width, config.width // config.heads, -(-config.vocab // t)
    # Q, k, v
    rows, inner = (
        (config.heads + 2 * config.kv_heads) * head_size // t,
        3 if config.mlp == "swiglu" else 2,
    )
    # Of the MLP that every token passes
    hidden = -(-config.hidden * (config.shared if config.experts else 1) // t)
    matrices = rows * c + c * c // t + inner * hidden * c
    # column-parallel biases are split, row-parallel ones are not; of a SwiGLU's two, gate and up,
    # each
    biases = config.bias * (rows + c + ((inner - 1) * hidden + c) * bool(hidden))
    if config.experts:
        here = config.experts if experts is None else experts
        matrices += config.experts * c + here * inner * -(-config.hidden // t) * c
    norm = c * (2 if config.norm == "layernorm" else 1)
    size = blocks * (matrices + biases + 2 * norm)
    size += embedding * (vocab * c + config.context * c * (config.positions == "learned"))
    return size + head * (norm + vocab * c * (not (config.tied and embedding)))


def sequence_parallel_sent(
    config,
    t,
    sequences,
    length,
    element_size,
    blocks,
    embedding=True,
    head=True,
    keep=True,
    recompute="none",
):
    """Bytes a rank sends for `sequences` sequences of `length` tokens, forward and backward, by
    operation. Without those of the partial gradients: they are sent once a step. recompute: as of
    the model. "selective" gathers inputs of products again where it runs their norms again; "block"
    repeats a block's forward (see sent_again)."""
    r = (t - 1) / t
    wide = r * sequences * -(-length // t) * t * config.width * element_size  # with padding
    gathers = (4 if keep else 6) * blocks + embedding + head * (1 if keep else 2)
    scatters, small, exact = 4 * blocks + embedding + head, 0, max(element_size, 4)
    shared, whole = bool(config.experts and config.shared), recompute == "block"
    reduced = 3 * head * sequences * length * exact
    # Their f keeps what it gathers; a token's k weights and experts' numbers come along
    if config.experts:
        gathers += blocks * (shared * (2 if keep else 3) - (not keep))
        scatters += blocks * shared * 2
        small = r * blocks * sequences * length * config.top_k
        reduced += (
            (1 + whole)
            * blocks
            * (config.balance_loss > 0)
            * sequences
            * (2 * config.experts + 1)
            * exact
        )
    plain = shared or not config.experts  # whether all tokens pass an MLP
    if whole:
        gathers, scatters = gathers + blocks * (2 + shared), scatters + blocks * sent_again(config)
    elif recompute == "selective":
        gathers += blocks * (1 + (plain and config.mlp == "gelu"))
    return {
        "all_gather": gathers * wide + (1 + whole) * small * (element_size + 8),
        "reduce_scatter": scatters * wide + small * element_size,
        "all_reduce": 2 * r * reduced,
    }


def partial_parameters(config, blocks, embedding=True, head=True):
    """How many parameters work on the split stream: norms, row-parallel biases, routers, learned
    positions."""
    c, norm = config.width, config.width * (2 if config.norm == "layernorm" else 1)
    positions = config.context * c * (config.positions == "learned")
    biases = config.bias * c * (1 if config.experts and not config.shared else 2)
    return blocks * (2 * norm + biases + config.experts * c) + embedding * positions + head * norm


def context_parallel_sent(
    kind, ring, ulysses, sequences, tokens, heads, kv_heads, head_size, element_size, forwards=1
):
    """{operation: bytes a rank sends} by one block for `sequences` sequences, forward and backward;
    tokens: those of a rank, with padding. forwards: 2 if backward runs the block's forward again.
    reduce_scatter is all_to_all on gloo."""
    sums = max(element_size, 4)
    sent = {"send": 0.0, "all_gather": 0.0, "reduce_scatter": 0.0, "all_to_all": 0.0}
    if ulysses > 1:
        copies = ulysses // math.gcd(kv_heads, ulysses)
        width = 2 * heads + 2 * kv_heads * copies  # in heads: q and out, k and v
        sent["all_to_all"] = (
            (forwards + 1)
            * (1 - 1 / ulysses)
            * sequences
            * tokens
            * width
            * head_size
            * element_size
        )
        kv_heads, tokens = kv_heads * copies // ulysses, tokens * ulysses
    kv = 2 * sequences * tokens * kv_heads * head_size
    if kind in ("ring", "ring-ulysses") and ring > 1:
        sent["send"] = (forwards + 1) * (ring - 1) * kv * element_size + ring * kv * sums
    if kind == "gather":
        sent["all_gather"] = forwards * (ring - 1) * kv * element_size
        sent["reduce_scatter"] = (ring - 1) * kv * sums
    return sent


def activation_bytes(config, sequences, element_size, tp=1, recompute="none"):
    """What backward needs of one block's forward, for `sequences` full contexts: bytes a rank.
    recompute: as of the model.

    Korthikanti et al. 2022, arXiv:2205.05198, section 4, s b h (10 + 24/t) for GPT in 16 bits, less
    the dropout masks (ours are made again) and the attention scores (flash attention keeps none):
    inputs and outputs of both norms are whole, the heads' q, k, v and result and the MLP's hidden
    values are split.
    """
    head_size = config.width // config.heads
    whole = 4 * config.width
    mlp = (4 if config.mlp == "swiglu" else 2) * config.hidden
    if recompute == "block":
        return sequences * config.context * config.width * element_size
    # Without one norm's output or both, and what lies between up and down
    if recompute == "selective":
        whole -= (1 if config.experts or config.mlp == "swiglu" else 2) * config.width
        mlp //= 2
    if config.experts:  # each token's k rows as they go in and come out, and what lies between
        whole, mlp = whole + 3 * config.top_k * config.width, mlp * (config.top_k + config.shared)
    split = (2 * config.heads + 2 * config.kv_heads) * head_size + mlp
    return sequences * config.context * (whole + split / tp) * element_size


def data_parallel_sent(sync, all_reduce, size, n, rank):
    """{(operation, group): (bytes, formula)}: what a rank sends a step for gradients of `size`
    bytes. sync, all_reduce: as ddp.py's flags."""
    sent = {("all_reduce", "dp"): (all_reduce_sent(size + 8, n), "2 r P e, and the loss, 8 bytes")}
    if sync == "server" or all_reduce != "torch":
        sent["all_reduce", "dp"] = (all_reduce_sent(8, n), "the loss, 8 bytes")
    if sync == "server":
        messages = n - 1 if rank == 0 else 1
        sent["send", "dp"] = (messages * size, "(N-1) P e, the server")
        sent["broadcast", "dp"] = ((n - 1) / n * 8, "the gradient norm, 8 bytes")
    return sent
