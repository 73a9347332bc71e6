"""What a tensor-parallel rank sends and holds: 8 r B T C e a block, forward and backward."""

from receipts.formulas import SCALAR, WHOLE_BLOCKS, held, summed


def expected(sizes, group, scalars=1):
    """(sent, held), with ring all-reduces over the group's t = sizes.tp ranks.

    Each block has 4 all-reduces of (B T, C); the embedding has one in forward and the head's input
    one in backward; the loss has three of (B T,). A mixture of experts also reduces the gradient of
    the router's k weights, and shared experts need two more all-reduces, as an MLP. Norms of heads
    have messages of their own. scalars: how many numbers are summed beside, such as the norm."""
    config, tokens = sizes.config, sizes.sequences * sizes.length
    each = 4
    if sizes.recompute in WHOLE_BLOCKS:
        each += repeated(sizes)
    text = f"{2 * each} r B T C e a block, 4 r B T C e + 6 r B T max(e, 4) for both ends; the norm"
    if config.experts and config.shared:
        each += 2
    elements = (each * sizes.blocks + sizes.embedding + sizes.head) * tokens * config.width
    if config.experts:
        elements += sizes.blocks * tokens * config.top_k
    if config.qk_norm == "each":  # the gradients of both weights, in each backward
        elements += sizes.blocks * 2 * config.head_dim * sizes.microbatches
    loss = 3 * tokens * sizes.exact if sizes.head else 0
    small = loss + squares(sizes) + scalars * SCALAR
    sent = summed(group, elements * sizes.e + small, text)
    activations = "of the blocks alone, not judged: what norms save, and 1/t of the rest"
    return sent, held(sizes, "(P_whole + P_split / t) e, padded", activations)


def squares(sizes):
    """Bytes of the sums of squares that norms of all heads together need, and of their gradients:
    a number for q and one for k, for each token."""
    if sizes.config.qk_norm != "all":
        return 0
    tokens = sizes.sequences * sizes.length
    return sizes.blocks * (sizes.forwards + 1) * 2 * tokens * sizes.exact


def repeated(sizes):
    """How many all-reduces of a block its recomputation repeats (with sequence parallelism, how
    many reduce-scatters). Those of its forward except the last one, unless something that follows
    the last one needs it in backward: dropout does, a norm, and whole experts."""
    times, config = 1, sizes.config
    if (config.dropout > 0 or config.norm_after) and not sizes.fold_experts:
        times += 1
    if config.experts and config.shared:
        times += 1
    return times
