"""A layout's seconds and bytes by formulas, to choose by among thousands: planner.py plays the best.

Bytes are those that dryrun.py counts, at the fullest of three moments, on the first rank of a
pipeline and on the last:

    loss       activations of all that is in flight, and the loss's own: logits, their gradient
    backward   the same activations, what one block makes of its own, whole gradients of two units
    step       the gradient in the masters' dtype, where that is another one

Seconds are those of kernels.py and links.py, for a block's products and attention, for all other
tensors by their bytes, and for messages by their sums.

Left out. Bytes: of context parallelism the tiles of a ring and Ulysses' exchanged heads; of
mixtures the routers', and the experts' uneven rows; rotary tables, biases, and all that is small.
A block of a mixture is taken to make as much as an MLP of as many rows. Seconds: launches that take
longer than their kernels, uneven stages' bubbles, experts' all-to-alls.
"""

import functools
import math
from typing import NamedTuple

import harness
import pipeline
from harness import formulas, large_vocabulary, ledger, schedules
from trainer import kernels
from trainer.links import both, spread


class Sizes(NamedTuple):
    """Of a layout, what all of the formulas need. C and V are the model's width and vocabulary.

    e, reduced, master   bytes of an element: weights and activations, summed gradients, optimizer
    tokens               of a micro-batch on this rank, between sequence-parallel regions all of tp's
    stream               bytes of (tokens, C) as it is between layers, where --sp splits it
    entered              bytes of (tokens, C) as projections keep it: gathered, unless again"""

    e: int
    reduced: int
    master: int
    tokens: float
    stream: float
    entered: float


def sizes_of(args, config):
    e, reduced, master = (
        harness.DTYPES[d].itemsize for d in (args.param_dtype, args.reduce_dtype, args.dtype)
    )
    tokens = args.batch // args.dp // args.microbatches * config.context / args.cp
    whole = tokens * config.width * e
    stream = whole / args.tp if args.sp else whole
    return Sizes(e, reduced, master, tokens, stream, stream if args.gather_again else whole)


# --- bytes


def norm_kept(config, sizes):
    """Bytes that a norm keeps beside its result. RMSNorm of 16 bits, on a CPU, which is what a dry
    run plays: its input and its quotient in float32. LayerNorm: its input."""
    if config.norm == "layernorm":
        return sizes.stream
    return 2 * sizes.stream * max(sizes.e, 4) / sizes.e


def hidden_kept(config, sizes, tp):
    """Bytes of (tokens, hidden) of an MLP, or of the rows of a token's experts."""
    passes = config.top_k + config.shared if config.experts else 1
    return passes * sizes.tokens * config.hidden / tp * sizes.e


def block_kept(args, config, sizes, recompute):
    """Bytes that a block keeps of a micro-batch, from forward to backward."""
    if recompute == "block":
        return sizes.stream
    norm, hidden = norm_kept(config, sizes), hidden_kept(config, sizes, args.tp)
    head = config.width // config.heads
    heads = (config.heads + 2 * config.kv_heads) * head  # of q, k and v, which are one tensor
    if config.positions == "rope":
        heads += (config.heads + config.kv_heads) * head  # q and k again, rotated
    heads += config.heads * head  # the result
    logarithms = 4 * config.heads  # of each softmax's denominator
    attention = sizes.tokens / args.tp * (heads * sizes.e + logarithms)
    dropped = 2 * sizes.stream if config.dropout else 0
    if recompute == "none":
        rows = 2 * (norm + sizes.entered) + (4 if config.mlp == "swiglu" else 2) * hidden
    elif config.experts or config.mlp == "swiglu":  # a norm before two products is not run again
        rows = sizes.stream + norm + sizes.entered + hidden * (2 if config.mlp == "swiglu" else 1)
    else:
        rows = 2 * sizes.stream + hidden
    if config.experts:  # a token's rows as they leave, as they arrive, and as they come back
        rows += (3 if args.ep > 1 else 2) * config.top_k * sizes.tokens * config.width * sizes.e
    return rows + attention + dropped


def block_makes(args, config, sizes):
    """Bytes that a block makes in its backward, at most: what it runs again, and gradients."""
    hidden = hidden_kept(config, sizes, args.tp)
    gates = config.mlp == "swiglu"
    if args.recompute == "selective":
        made = (4 if gates else 2) * hidden
    else:
        made = (2 if gates else 1) * hidden
    if args.recompute == "block":
        made += block_kept(args, config, sizes, "none")
    return made + 2 * sizes.stream


def loss_makes(args, config, sizes):
    """Bytes of the head and the loss at their most."""
    width, tp = config.vocab / args.tp, args.tp
    logits = sizes.tokens * width
    kept = norm_kept(config, sizes) + sizes.entered + sizes.stream
    if tp > 1:  # in 32 bits, and shifted by the largest
        copies = 8 if sizes.e < 4 else 4
        return kept + logits * (sizes.e + copies)
    exact = max(sizes.e, 4)
    chunk = min(logits, max(1, large_vocabulary.CHUNK // config.vocab) * config.vocab) * exact
    return kept + 2 * logits * sizes.e + chunk * (3 if sizes.e < exact else 2)


@functools.cache
def in_flight(schedule, pp, microbatches, chunks, rank, layers):
    """The most (blocks x micro-batches, stages x micro-batches) that a rank holds at a time.
    layers: of each stage."""
    if pp == 1:
        return layers[0], 1
    options = {"chunks": chunks} if chunks and schedule == "interleaved" else {}
    # With more micro-batches no more are in flight
    row = pipeline.SCHEDULES[schedule](rank, pp, min(microbatches, 2 * pp), **options)
    return schedules.in_flight(row, lambda stage: layers[stage]), schedules.in_flight(row)


@functools.cache
def stage_lengths(config, stages):
    """How many layers each stage has."""
    return tuple(len(layers) for layers in schedules.stage_layers(config, stages))


def layers_of(args, config):
    """([layers of each stage], [layers of each rank])"""
    stages = args.pp * (args.chunks or (2 if args.schedule in ("zb-v", "dualpipev") else 1))
    lengths = stage_lengths(config, stages)
    ranks = [0] * args.pp
    for stage, length in enumerate(lengths):
        place = stage % (2 * args.pp)
        folded = args.schedule in ("zb-v", "dualpipev") and place >= args.pp
        ranks[2 * args.pp - 1 - place if folded else stage % args.pp] += length
    return lengths, ranks


def states_held(args, config, sizes, layers, ends):
    """(bytes of weights, gradients and optimizer states, parameters, bytes of the gradient in the
    masters' dtype at a step). Experts are split over ep ranks, and their copies over the others."""
    ranks = args.zero_ranks or args.dp * args.cp
    masters = sizes.master if sizes.e != sizes.master or args.offload else 0
    moments = 2 if args.optimizer == "adamw" else 0
    elements = sizes.e, sizes.reduced, moments * sizes.master + masters

    def parameters(experts=None):
        return formulas.parameters_held(config, args.tp, layers, **ends, experts=experts)

    kinds = [(parameters(), ranks)]
    if args.ep > 1:
        plain, experts = parameters(0), -(-config.experts // args.ep)
        kinds = [(plain, ranks), (parameters(experts) - plain, max(1, ranks // args.ep))]
    held = step = 0
    for count, split in kinds:
        states = formulas.model_states(args.zero, split, *elements)
        held += count * sum(states[:2] if args.offload else states)
        step += count / (split if args.zero else 1)
    copied = sizes.reduced != sizes.master and not args.offload
    return held, sum(count for count, _ in kinds), step * sizes.master * copied


def rank_held(args, config, sizes, rank):
    """Bytes that the first rank of a stage holds."""
    lengths, ranks = layers_of(args, config)
    first = rank == 0
    last = rank == (0 if args.schedule in ("zb-v", "dualpipev") else args.pp - 1)
    ends = {"embedding": first, "head": last}
    states, parameters, copied = states_held(args, config, sizes, ranks[rank], ends)
    table = -(-config.vocab // args.tp) * config.width  # elements of an embedding, or of the head
    block = (parameters - table * (first + (last and not (config.tied and first)))) / ranks[rank]
    blocks, passes = in_flight(
        args.schedule, args.pp, args.microbatches, args.chunks, rank, lengths
    )
    activations = blocks * block_kept(args, config, sizes, args.recompute)
    if args.pp > 1:  # each pass's result, and the messages that are expected
        activations += (passes + 2) * sizes.stream
    # Whole gradients: stage 2 has those of two buckets at most, stage 3 those of two units
    unit = block
    if args.zero == 2:
        widest = config.width * -(-config.hidden // args.tp)
        unit = max(args.bucket_mb * 2**20 / sizes.e, widest)
    neighbour = max(unit, table) if last else unit
    whole = sizes.reduced * (unit + neighbour) if args.zero > 1 else 0
    moments = [activations + whole + block_makes(args, config, sizes), copied]
    if last:
        moments.append(activations + loss_makes(args, config, sizes))
        gradient = sizes.e * table + (sizes.reduced * table if args.zero > 1 else 0)
        moments.append(activations + gradient + norm_kept(config, sizes) + 2 * sizes.stream)
    gathered = 0
    if args.zero == 3:
        pair = max(block, table) if first or last else block
        gathered = sizes.e * (block + pair)
    return states + gathered + max(moments)


def bytes_held(args, config):
    """Bytes of the fullest of the ranks that planner.py plays."""
    sizes = sizes_of(args, config)
    return max(rank_held(args, config, sizes, rank) for rank in {0, args.pp - 1})
