"""What a tensor-parallel rank sends and holds: 8 r B T C e a block, forward and backward."""

from receipts.formulas import SCALAR, WHOLE_BLOCKS, held, summed


def expected(sizes, group, scalars=1):
    """(sent, held), with ring all-reduces over the group's t = sizes.tp ranks.

    Each block has 4 all-reduces of (B T, C); the embedding has one in forward and the head's input
    one in backward; the loss has three of (B T,). A mixture of experts also reduces the gradient of
    the router's k weights, and shared experts need two more all-reduces, as an MLP. scalars: how
    many numbers are summed beside, such as the norm."""
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
    loss = 3 * tokens * sizes.exact if sizes.head else 0
    sent = summed(group, elements * sizes.e + loss + scalars * SCALAR, text)
    activations = "of the blocks alone, not judged: what norms save, and 1/t of the rest"
    return sent, held(sizes, "(P_whole + P_split / t) e, padded", activations)


def repeated(sizes):
    """How many all-reduces of a block its recomputation repeats (with sequence parallelism, how
    many reduce-scatters). Those of its forward except the last one, unless something that follows
    the last one needs it in backward: dropout does, and whole experts."""
    times, config = 1, sizes.config
    if config.dropout > 0 and not sizes.fold_experts:
        times += 1
    if config.experts and config.shared:
        times += 1
    return times
