"""What a sequence-parallel rank sends and holds: as much as a tensor-parallel one a block, and a
quarter more where it gathers again; 1/t of the activations."""

from receipts.formulas import SCALAR, WHOLE_BLOCKS, add, held, parameters_of, summed
from receipts.tensor_parallel import repeated, squares


def expected(sizes, group, scatter, scalars=1, partial=True):
    """(sent, held). scatter: the operation that a reduce-scatter is counted as. partial: whether
    whole parameters' gradients are summed here; ZeRO sums its shards of them itself."""
    config, blocks, recompute = sizes.config, sizes.blocks, sizes.recompute
    keep, folded = not sizes.gather_again, sizes.fold_experts
    # Layers of a block whose input may be gathered again: attention, and an MLP or shared experts
    plain = 2 if config.shared or not config.experts else 1
    layers = plain + bool(config.experts and not folded)  # that enter and leave
    tokens = sizes.sequences * sizes.length
    r = (group.ranks - 1) / group.ranks
    # Messages of (tokens, C). A layer enters and leaves, in forward and in backward. Where inputs
    # are not kept, backward gathers them again
    entries = 1 if keep else 2
    each = 2 * layers + (entries - 1) * plain
    gathers, scatters = each * blocks, 2 * layers * blocks
    if sizes.embedding:
        gathers += 1
        scatters += 1
    if sizes.head:
        gathers += entries
        scatters += 1
    if recompute in WHOLE_BLOCKS:
        gathers += layers * blocks
        scatters += repeated(sizes) * blocks
    elif recompute == "selective" and keep and not config.norm_after:  # it runs norms again
        gathers += blocks
        if config.mlp == "gelu" and not config.experts:
            gathers += blocks
    wide = tokens * config.width * sizes.e
    # Small messages: the loss; a token's k weights and the numbers of its experts, with the tokens
    reduced = scalars * SCALAR + squares(sizes)
    if sizes.head:
        reduced += 3 * tokens * sizes.exact
    routed = tokens * config.top_k * blocks if config.experts and not folded else 0
    if config.experts and config.balance_loss > 0:
        sums = blocks * sizes.sequences * 2 * config.experts
        reduced += sizes.forwards * sums * sizes.exact
    gathered = gathers * wide + routed * (sizes.e + 8) * sizes.forwards
    more = "" if recompute == "none" else ", more to recompute"
    ends = f"a block{more}, {1 + entries} r B T C e for both ends"
    sent = {
        ("all_gather", group.name): (r * gathered, f"{each} r B T C e {ends}"),
        (scatter, group.name): (
            r * (scatters * wide + routed * sizes.e),
            f"{2 * layers} r B T C e a block{more}, 2 r B T C e for both ends",
        ),
    }
    sent |= summed(group, reduced, "6 r B T max(e, 4): the loss; the norm")
    if partial:
        whole = sum(p.elements for p in parameters_of(sizes) if not p.cut)
        gradients = summed(group, whole * sizes.reduced, f"2 r P e: P = {whole:,}, not split")
        sent = add(sent, gradients)
    activations = "1/t of one process's of all blocks"
    if keep:
        activations += ", and what f gathered"
    return sent, held(sizes, "(P_whole + P_split / t) e, padded", activations)
