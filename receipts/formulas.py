"""What each technique sends and holds by the papers, for model.py's GPT with all of its options.

The receipts show these figures beside what was measured. Letters: P parameters, e bytes an element,
C width, T tokens of a sequence, n or t ranks, r = (n-1)/n. The formula of a lesson's plain case
stands in its docstring; docs/ has the sources.
"""

import math

from harness.presets import ceil

WHOLE_BLOCKS = ("half", "block")  # kinds of recomputation that repeat a block's messages


# --- data parallelism


def all_reduce_sent(size, n):
    """Bytes that each of n ranks sends in a ring all-reduce of `size` bytes: a reduce-scatter and
    an all-gather."""
    return 2 * (n - 1) / n * size


def data_parallel_sent(all_reduce, size, n, share=None):
    """{(operation, group): (bytes, formula)}: what a rank sends a step for gradients of `size`
    bytes. all_reduce: as ddp.py's flag. share: with parameter servers, the bytes of the parameters
    that this rank serves; a worker serves none."""
    if share is not None:
        # Weights to all others; gradients to the servers of the rest
        text = "(N-1) P_s e of weights, (P - P_s) e of gradients; it serves P_s" if share else "P e"
        if share == size:
            text = "(N-1) P e"
        return {
            ("send", "dp"): ((n - 1) * share + size - share, text),
            ("all_reduce", "dp"): (all_reduce_sent(16, n), "the loss and the norm, 8 bytes each"),
        }
    if all_reduce != "torch":
        return {("all_reduce", "dp"): (all_reduce_sent(8, n), "the loss, 8 bytes")}
    return {("all_reduce", "dp"): (all_reduce_sent(size + 8, n), "2 r P e, and the loss, 8 bytes")}


def islands_message(numbers, bits, element_size):
    """Bytes of one message between islands, of a part of the model with so many numbers: two
    integers, then the numbers as they are (bits None), in bfloat16, or in blocks of 128 with a
    scale of 4 bytes."""
    if bits is None:
        return 16 + numbers * element_size
    if bits == 16:
        return 16 + numbers * 2
    return 16 + ceil(numbers, 128) * (4 + 128 * bits // 8)


def model_states(stage, n, weights=2, gradients=2, states=12):
    """Bytes a parameter that each of n ranks holds, as (weights, gradients, optimizer states), in a
    stage of ZeRO: the table of Rajbhandari et al. 2020, section 3."""
    if stage >= 1:
        states /= n
    if stage >= 2:
        gradients /= n
    if stage >= 3:
        weights /= n
    return weights, gradients, states


# --- tensor parallelism


def tensor_parallel_sent(
    config, t, tokens, element_size, blocks, embedding=True, head=True, recompute="none"
):
    """Bytes a rank sends for `tokens` tokens, forward and backward, with ring all-reduces over t
    ranks.

    Each block has 4 all-reduces of (tokens, C); the embedding has one in forward and the head's
    input one in backward; the loss has three of (tokens,). A mixture of experts also reduces the
    gradient of the router's k weights, and shared experts need two more all-reduces, as an MLP.
    recompute: as of the model; "block" and "half" repeat the all-reduces of a block's
    forward."""
    again = sent_again(config) if recompute in WHOLE_BLOCKS else 0
    all_reduces = (4 + again) * blocks + embedding + head
    elements = all_reduces * tokens * config.width
    if config.experts:
        elements += blocks * tokens * config.top_k
    if config.experts and config.shared:
        elements += blocks * tokens * 2 * config.width
    loss = 3 * tokens * max(element_size, 4) if head else 0
    return all_reduce_sent(elements * element_size + loss, t)


def sent_again(config):
    """How many all-reduces of a block its recomputation repeats (with sequence parallelism, how
    many reduce-scatters). Those of its forward except the last one, unless something that follows
    the last one needs it in backward: dropout does."""
    times = 1
    if config.dropout > 0:
        times += 1
    if config.experts and config.shared:
        times += 1
    return times


# --- sequence parallelism


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
    """{operation: bytes a rank sends} for `sequences` sequences of `length` tokens, forward and
    backward. The sum of the partial gradients, once a step, is not in it.

    keep: whether gathered inputs are kept for backward. recompute: as of the model; "selective"
    gathers kept inputs of products again where it runs their norms again, "block" and "half" repeat
    the block's forward."""
    r, exact = (t - 1) / t, max(element_size, 4)
    padded_length = ceil(length, t) * t
    whole_block = recompute in WHOLE_BLOCKS
    # Messages of (tokens, C). A block's attention and its MLP each enter and leave, in forward and
    # in backward
    gathers = (4 if keep else 6) * blocks
    scatters = 4 * blocks
    if embedding:
        gathers += 1
        scatters += 1
    if head:
        gathers += 1 if keep else 2
        scatters += 1
    # Small messages: a token's k weights and the numbers of its experts, with the tokens
    routed = sequences * length * config.top_k * blocks if config.experts else 0
    reduced = 3 * sequences * length * exact if head else 0
    if config.experts and not keep:
        gathers -= blocks  # the experts' own entry keeps what it gathers
    shared = bool(config.experts and config.shared)
    if shared:
        gathers += (2 if keep else 3) * blocks
        scatters += 2 * blocks
    if config.experts and config.balance_loss > 0:
        forwards = 2 if whole_block else 1
        reduced += forwards * blocks * sequences * (2 * config.experts + 1) * exact
    if whole_block:
        gathers += (3 if shared else 2) * blocks
        scatters += sent_again(config) * blocks
    elif recompute == "selective" and keep:
        gathers += blocks
        if config.mlp == "gelu" and (shared or not config.experts):
            gathers += blocks
    wide = r * sequences * padded_length * config.width * element_size
    gathered_routes = r * routed * (element_size + 8) * (2 if whole_block else 1)
    return {
        "all_gather": gathers * wide + gathered_routes,
        "reduce_scatter": scatters * wide + r * routed * element_size,
        "all_reduce": all_reduce_sent(reduced, t),
    }


def partial_parameters(config, blocks, embedding=True, head=True):
    """How many parameters work on the split stream: norms, row-parallel biases, routers, learned
    positions."""
    c = config.width
    norm = 2 * c if config.norm == "layernorm" else c
    block = 2 * norm + config.experts * c
    if config.bias is True:
        block += c  # attention's output
    if config.bias is True and (config.shared or not config.experts):
        block += c  # the MLP's output
    size = blocks * block
    if embedding and config.positions == "learned":
        size += config.context * c
    if head:
        size += norm
    return size


# --- context parallelism


def context_parallel_sent(
    kind, ring, ulysses, sequences, tokens, heads, kv_heads, head_size, element_size, forwards=1
):
    """{operation: bytes a rank sends} by one block for `sequences` sequences, forward and backward.

    tokens: those of a rank, with padding. forwards: 2 if backward runs the block's forward again.
    The reduce_scatter is an all_to_all on gloo."""
    sum_size = max(element_size, 4)  # gradients of keys and values are summed in 32 bits at least
    sent = {"send": 0.0, "all_gather": 0.0, "reduce_scatter": 0.0, "all_to_all": 0.0}
    if ulysses > 1:
        copies = ulysses // math.gcd(kv_heads, ulysses)
        exchanged_heads = 2 * heads + 2 * kv_heads * copies  # q and the result, k and v
        elements = sequences * tokens * exchanged_heads * head_size
        sent["all_to_all"] = (forwards + 1) * (1 - 1 / ulysses) * elements * element_size
        kv_heads = kv_heads * copies // ulysses
        tokens *= ulysses
    kv = 2 * sequences * tokens * kv_heads * head_size  # elements of keys and values
    if kind in ("ring", "ring-ulysses") and ring > 1:
        keys_and_values = (forwards + 1) * (ring - 1) * kv * element_size
        sent["send"] = keys_and_values + ring * kv * sum_size  # their gradients come home
    if kind == "gather":
        sent["all_gather"] = forwards * (ring - 1) * kv * element_size
        sent["reduce_scatter"] = (ring - 1) * kv * sum_size
    return sent


def ring_hides_from(config, element_size, flops, bandwidth):
    """From how many tokens a rank a tile of ring attention takes longer than the transfer of the
    next keys and values: flops a second on each rank, `bandwidth` bytes a second between them."""
    return config.kv_heads / config.heads * element_size * flops / bandwidth


# --- activations


def activation_bytes(config, sequences, element_size, tp=1, recompute="none"):
    """What backward needs of one block's forward, for `sequences` full contexts: bytes a rank.

    Korthikanti et al. 2022, arXiv:2205.05198, section 4: s b h (10 + 24/t) for a GPT in 16 bits.
    Without the dropout masks, which our model makes again, and the attention scores, which flash
    attention does not keep. Inputs and outputs of both norms are whole; q, k, v, the heads' result
    and the MLP's hidden values are split. recompute: as of the model."""
    tokens = sequences * config.context
    if recompute == "block":  # the block's input
        return tokens * config.width * element_size
    if recompute == "half":
        whole, split = half_kept(config)
        return tokens * (whole + split / tp) * element_size
    head_size = config.width // config.heads
    whole = 4 * config.width
    hidden = (4 if config.mlp == "swiglu" else 2) * config.hidden
    if recompute == "selective":  # without norms' outputs, and what lies between up and down
        two_products = config.experts or config.mlp == "swiglu"
        whole -= config.width if two_products else 2 * config.width
        hidden //= 2
    if config.experts:  # each token's k rows as they go in and come out, and what lies between
        whole += 3 * config.top_k * config.width
        hidden *= config.top_k + config.shared
    split = (2 * config.heads + 2 * config.kv_heads) * head_size + hidden
    return tokens * (whole + split / tp) * element_size


def half_kept(config):
    """What recomputation of the kind "half" keeps of a block: elements a token, (whole, split by
    tensor parallelism). The block's input, attention's result, and of its products the first, the
    third and so on, but none that is added to x as it is."""
    c, k, ups = config.width, config.top_k, 2 if config.mlp == "swiglu" else 1
    not_kept = (0, 0)
    products = [(0, (config.heads + 2 * config.kv_heads) * c // config.heads), not_kept]
    if config.experts:
        products.append((config.experts, 0))  # the router
    if config.shared or not config.experts:
        products += ups * [(0, (config.shared or 1) * config.hidden)] + [not_kept]
    if config.experts:
        products += ups * [(0, k * config.hidden)] + [(k * c, 0)]
    kept = [(c, c), *products[::2]]
    return tuple(sum(sizes) for sizes in zip(*kept))
