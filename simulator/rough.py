"""A layout's seconds and bytes by formulas, to choose by among thousands.

Bytes are those that dryrun.py counts, at the fullest of three moments, on the first rank of a
pipeline and on the last:

    loss       activations of all that is in flight, and the loss's own: logits, their gradient
    backward   the same activations, what one block makes of its own, whole gradients of two units
    step       the gradient in the masters' dtype, where that is another one

Seconds are those of kernels.py and links.py, for a block's products and attention, for all other
tensors by their bytes, and for messages by their sums.

A norm is one operation that keeps its input, as on a GPU.

Left out. Bytes: messages that were sent; the tiles of a ring, and Ulysses' exchanged heads; routers
and uneven rows of experts; all that is small. Seconds: launches that outlast their kernels, how
uneven stages wait for each other, experts' all-to-alls, Muon's iterations.
"""

import functools
import operator
from dataclasses import replace

import zero_bubble
from proof import ledger
from receipts import context_parallel, formulas, tensor_parallel, zero
from receipts import pipeline as schedules
from simulator import kernels
from simulator.links import both, spread
from trainer import large_vocabulary

# --- bytes


def entered(sizes):
    """Bytes of (tokens, C) as projections keep it: gathered, unless they gather it again."""
    return sizes.stream if sizes.gather_again else sizes.tokens * sizes.config.width * sizes.e


def hidden_kept(sizes):
    """Bytes of (tokens, hidden) of an MLP, or of the rows of a token's experts."""
    config = sizes.config
    passes = config.top_k + config.shared if config.experts else 1
    return passes * sizes.tokens * config.hidden / sizes.tp * sizes.e


def block_kept(args, sizes, recompute):
    """Bytes that a block keeps of a micro-batch, from forward to backward: the formula's, and what
    that leaves out, rotated queries and keys, softmax's denominators, dropout's masks."""
    config, kept = sizes.config, formulas.block_bytes(sizes, recompute)
    if recompute == "block":
        return kept
    kept += sizes.tokens / sizes.tp * 4 * config.heads  # the denominators' logarithms
    # Rows for experts are of all tokens, also with --sp, and fewer where none travel
    whole, parts = sizes.tokens * sizes.e, sizes.tp if sizes.sp else 1
    if recompute == "half":
        rows = formulas.half_kept(config)[0] - config.width
        return kept + rows * whole * (1 - 1 / parts)
    rows = config.top_k * config.width if config.experts else 0
    kept += rows * whole * ((3 if args.ep > 1 else 2) - 3 / parts)
    if config.positions == "rope":
        turned = (config.heads + config.kv_heads) * config.width // config.heads
        kept += sizes.tokens / sizes.tp * turned * sizes.e
    if config.dropout:
        kept += 2 * sizes.stream
    return kept


def block_puts_off(sizes):
    """Bytes of a block's products whose weights' gradients come later: inputs, and gradients of
    results, which --sp gathers."""
    config, whole = sizes.config, sizes.tokens * sizes.config.width * sizes.e
    head = config.width // config.heads
    heads = sizes.tokens / sizes.tp * (2 * config.heads + 2 * config.kv_heads) * head * sizes.e
    hidden = (3 if config.mlp == "swiglu" else 2) * hidden_kept(sizes)
    return 2 * entered(sizes) + 2 * whole + heads + hidden


def block_makes(args, sizes):
    """Bytes that a block makes in its backward, at most: what it runs again, and gradients."""
    matrices = 2 if sizes.config.mlp == "swiglu" else 1  # into the hidden units
    if args.recompute == "selective":
        matrices *= 2
    made = matrices * hidden_kept(sizes)
    if args.recompute in formulas.WHOLE_BLOCKS:
        made += block_kept(args, sizes, "none")
    if args.recompute == "half":  # a part of it is there already
        made -= block_kept(args, sizes, "half")
    return made + 2 * sizes.stream


def loss_makes(sizes):
    """Bytes of the head and the loss at their most."""
    vocab = sizes.config.vocab
    logits = sizes.tokens * vocab / sizes.tp
    kept = entered(sizes) + 2 * sizes.stream
    if sizes.tp > 1:  # in 32 bits, and shifted by the largest
        copies = 8 if sizes.e < 4 else 4
        return kept + logits * (sizes.e + copies)
    chunk = min(logits, max(1, large_vocabulary.CHUNK // vocab) * vocab) * sizes.exact
    return kept + 2 * logits * sizes.e + chunk * (3 if sizes.e < sizes.exact else 2)


@functools.cache
def in_flight(schedule, pp, microbatches, chunks, rank, layers):
    """What a rank holds in the course of a step, as a set of tuples: blocks x micro-batches and
    stages x micro-batches from forward to backward; the same of those whose weights' gradients are
    put off. layers: of each stage."""
    if pp == 1:
        return [(layers[0], 1, 0, 0)]
    options = {"chunks": chunks} if chunks and schedule == "interleaved" else {}
    # With more micro-batches no more are in flight
    row = zero_bubble.ALL_SCHEDULES[schedule](rank, pp, min(microbatches, 2 * pp), **options)
    now, found = (0, 0, 0, 0), set()
    changes = {"F": (1, 0), "I": (-1, 1), "W": (0, -1), "B": (-1, 0)}
    for action in row:
        blocks, (kept, put_off) = layers[action.stage], changes[action.kind]
        change = kept * blocks, kept, put_off * blocks, put_off
        now = tuple(map(sum, zip(now, change)))
        found.add(now)
    return found


@functools.cache
def layers_of(config, ranks, chunks):
    """(layers of each stage, layers of each rank), in the schedules of layouts.py."""
    stages = schedules.stage_layers(config, ranks * (chunks or 1))
    lengths = tuple(len(layers) for layers in stages)
    return lengths, [sum(lengths[rank::ranks]) for rank in range(ranks)]


def states_held(args, sizes, layers, ends):
    """(bytes of weights, gradients and optimizer states, parameters, bytes of the gradient in the
    masters' dtype at a step). Experts are split over ep ranks, and their copies over the others."""
    config, ranks = sizes.config, args.zero_ranks or args.dp * args.cp
    elements = sizes.e, sizes.reduced, (sizes.moments + sizes.masters) * sizes.master

    def parameters(layers, experts=None):
        own = dict(layers=(range(layers),), tp=args.tp, experts=experts)
        return formulas.Sizes(config, 0, 0, **own, **ends).parameters()

    kinds = [(parameters(layers), ranks)]
    if args.ep > 1:
        plain, experts = parameters(layers, 0), -(-config.experts // args.ep)
        kinds = [(plain, ranks), (parameters(layers, experts) - plain, max(1, ranks // args.ep))]
    held = step = 0
    for count, split in kinds:
        states = zero.model_states(args.zero, split, *elements)
        held += count * sum(states[:2] if args.offload else states)
        step += count / (split if args.zero else 1)
    if args.optimizer == "muon":  # which takes AdamW at both ends
        held += parameters(0) * sizes.master / ranks
    copied = sizes.reduced != sizes.master and not args.offload
    return held, sum(count for count, _ in kinds), step * sizes.master * copied


def activations_held(args, sizes, rank, lengths, last):
    """Bytes of all that is in flight on a rank."""
    kept, later = block_kept(args, sizes, args.recompute), 0
    of_pass, of_pass_later = 0, 0
    if args.pp > 1:
        of_pass = sizes.stream  # its result, which is sent
        later = block_puts_off(sizes)
    if last:
        of_pass_later = entered(sizes) + sizes.tokens * sizes.config.vocab / args.tp * sizes.e
    helds = in_flight(args.schedule, args.pp, args.microbatches, args.chunks, rank, lengths)
    price = kept, of_pass, later, of_pass_later
    most = max(sum(map(operator.mul, held, price)) for held in helds)
    return most + (2 * sizes.stream if args.pp > 1 else 0)  # two messages are expected


def rank_held(args, sizes, rank):
    """Bytes that the first rank of a stage holds."""
    config = sizes.config
    lengths, ranks = layers_of(config, args.pp, args.chunks)
    first, last = rank == 0, rank == args.pp - 1
    ends = {"embedding": first, "head": last}
    states, parameters, copied = states_held(args, sizes, ranks[rank], ends)
    table = -(-config.vocab // args.tp) * config.width  # elements of an embedding, or of the head
    block = (parameters - table * (first + (last and not (config.tied and first)))) / ranks[rank]
    activations = activations_held(args, sizes, rank, lengths, last)
    # Whole gradients: stage 2 has those of two buckets at most, stage 3 those of two units
    unit = block
    if args.zero == 2:
        widest = config.width * -(-config.hidden // args.tp)
        unit = max(args.bucket_mb * 2**20 / sizes.e, widest)
    neighbour = max(unit, table) if last else unit
    whole = sizes.reduced * (unit + neighbour) if args.zero > 1 else 0
    moments = [activations + whole + block_makes(args, sizes), copied]
    if last:
        moments.append(activations + loss_makes(sizes))
        gradient = sizes.e * table + (sizes.reduced * table if args.zero > 1 else 0)
        moments.append(activations + gradient + 3 * sizes.stream)
    gathered = 0
    if args.zero == 3:
        pair = max(block, table) if first or last else block
        gathered = sizes.e * (block + pair)
    return states + gathered + max(moments)


# --- seconds


def rough(args, config, cluster):
    """({part of a step: seconds}, bytes held by the fullest rank)"""
    sizes = formulas.sizes_of(args, config, args.dp, length=config.context // args.cp)
    tp, pp, m, chunks = args.tp, args.pp, args.microbatches, args.chunks or 1
    _, ranks = layers_of(config, args.pp, args.chunks)
    most, device = max(ranks), cluster.device
    memory = 1 / kernels.moving_seconds(device, 1)
    _, parameters, _ = states_held(args, sizes, most, {"embedding": True, "head": pp == 1})
    stages = (max(ranks[:-1], default=0), False), (ranks[-1], True)
    computing = max(compute_seconds(args, sizes, device, *stage) for stage in stages)
    # Gradients are written, read and added up
    computing += m * parameters * (2 * sizes.e + 2 * sizes.reduced) / memory
    parts = {"computing": computing}
    parts["tensor parallel"] = tensor_seconds(sizes, cluster, most)
    parts["context parallel"] = context_seconds(args, sizes, cluster, most)
    third = sum(parts.values()) / m / 3
    # The slowest stage sets the pace; the way through the others is as long as they are on average
    average = third * sum(ranks) / pp / most
    bubble = schedules.BUBBLES[args.schedule][1]
    parts["bubble"] = bubble(pp, m, chunks, average, average, average)
    message = spread(cluster, 2, args.dp * args.cp * tp).seconds("send", sizes.stream)
    parts["messages between stages"] = 2 * chunks * (m + pp) * message * (pp > 1)
    weights, gradients, passes = data_seconds(args, sizes, cluster, parameters, most)
    # All of it beside computing; else gradients beside the backwards that complete them
    if args.zero == 3:
        beside, meanwhile = weights + gradients, 3 * third * m
        weights = 0.0
    else:
        beside, meanwhile = gradients, 2 * third * passes
    parts["data parallel"] = both(meanwhile, beside) - meanwhile + weights
    parts["optimizer"] = step_bytes(args, sizes, parameters) / memory
    # Of the ranks that a plan plays
    return parts, max(rank_held(args, sizes, rank) for rank in {0, pp - 1})


def block_seconds(args, sizes, device):
    """(forward, backward) of a block's products and attention."""
    kernel = args.kernel or kernels.family(device).attention
    rows = sizes.sequences // sizes.microbatches
    shape = rows, sizes.length, sizes.tp, sizes.e
    return kernels.block_seconds(sizes.config, device, kernel, *shape)


def compute_seconds(args, sizes, device, layers, last):
    """Of a rank's blocks, and of the head on the last stage: products, attention, and all other
    operations by the bytes that they read and write."""
    forward, backward = block_seconds(args, sizes, device)
    again = {"block": 1.0, "half": 0.5}.get(args.recompute, 0.0)
    memory = 1 / kernels.moving_seconds(device, 1)
    seconds = layers * (forward * (1 + again) + backward)
    seconds += layers * block_bytes(args, sizes) / memory
    if last:
        vocab = sizes.config.vocab // args.tp
        # Its three products, forward and backward
        product = sizes.tokens, vocab, sizes.config.width
        seconds += 3 * kernels.product_seconds(device, *product, 1, sizes.e)
        # The loss passes over the logits twelve times in 32 bits, and converts them twice
        each = 48 if sizes.e >= 4 else 48 + 2 * (sizes.e + 4)
        seconds += each * sizes.tokens * vocab / memory
    return args.microbatches * seconds


def block_bytes(args, sizes):
    """Bytes that a block's operations beside products and attention read and write, forward and
    backward."""
    config, e = sizes.config, sizes.e
    stream = sizes.stream / e  # elements of (tokens, C) between layers
    head = config.width // config.heads
    turned = sizes.tokens / args.tp * (config.heads + config.kv_heads) * head
    turned *= config.positions == "rope"
    hidden = hidden_kept(sizes)  # bytes
    gates = config.mlp == "swiglu"
    # A norm reads and writes, backward reads two and writes one
    forward = stream * 10 * e + turned * 10 * e + hidden * (5 if gates else 2)
    backward = stream * 12 * e + turned * 12 * e + hidden * (9 if gates else 3)
    again = 0
    if args.recompute in formulas.WHOLE_BLOCKS:
        again = forward
    elif args.recompute == "selective":
        norms = 1 if gates or config.experts else 2
        again = stream * norms * 2 * e + hidden * (5 if gates else 2)
    copies = 0  # of gathers and scatters, whose first dimension must be the tokens
    if args.sp:
        copies = 8 * 2 * sizes.tokens * config.width * e
    if config.experts:  # rows are ordered, and ordered back
        copies += 16 * config.top_k * sizes.tokens * config.width * e
    return forward + backward + again + copies


def tensor_seconds(sizes, cluster, layers):
    """Of tensor parallelism's messages, which are waited for."""
    if sizes.tp == 1:
        return 0.0
    group, step = formulas.Group("", sizes.tp), replace(sizes, layers=(range(layers),))
    sent = formulas.all_sent(tensor_parallel.expected(step, group))
    messages = 8 * layers * sizes.microbatches
    return messages * spread(cluster, sizes.tp, 1).seconds("all_gather", sent / messages)


def context_seconds(args, sizes, cluster, layers):
    """Of a ring's messages, where they take longer than its tiles."""
    if args.cp == 1:
        return 0.0
    group = formulas.Group("", args.cp)
    step = replace(sizes, layers=(range(layers),), recompute="none")
    keys = formulas.all_sent(context_parallel.expected(step, group, "ring", None, ""))
    keys /= spread(cluster, args.cp, args.tp).speed("send")
    tiles = sum(block_seconds(args, sizes, cluster.device))
    return max(0.0, keys - tiles * layers * args.microbatches / 2)


def data_seconds(args, sizes, cluster, parameters, layers):
    """(seconds of gathers of weights, of sums of gradients, passes that these go beside)"""
    split = args.zero_ranks or args.dp * args.cp  # ranks that share out a copy
    shards = spread(cluster, split, args.tp)
    copies = spread(cluster, args.dp * args.cp // split, split * args.tp)
    buckets = layers
    if args.zero < 3:  # a matrix that is larger than a bucket has one of its own
        full = parameters * sizes.e // int(args.bucket_mb * 2**20)
        buckets = max(1, min(full, 5 * layers))

    def takes(link, operation, amount, times):
        """Seconds of so many sums or gathers of all of a rank's parameters."""
        return times * buckets * link.seconds(operation, amount / buckets) if times else 0.0

    m = args.microbatches
    r, passes = ledger.all_but_one(split), m if args.zero > 1 and not args.reduce_once else 1
    gathers = (0, 1, 1, 2 * m)[args.zero]
    weights = takes(shards, "all_gather", r * parameters * sizes.e, gathers)
    whole = parameters * sizes.reduced
    if args.zero:
        gradients = takes(shards, "reduce_scatter", r * whole, passes)
    else:
        gradients = takes(shards, "all_reduce", 2 * r * whole, 1)
    if copies.ranks > 1:
        sums = formulas.all_reduce_sent(whole / split, copies.ranks)
        gradients += takes(copies, "all_reduce", sums, 1)
    return weights, gradients, passes


def step_bytes(args, sizes, parameters):
    """Bytes read and written after the last backward: the norm reads the gradient, clipping reads
    and writes it, the optimizer reads it with three states, and writes those."""
    split = args.zero_ranks or args.dp * args.cp
    each = 3 * sizes.reduced + 7 * sizes.master
    if sizes.reduced != sizes.master:
        each += sizes.reduced + sizes.master
    if sizes.e != sizes.master:
        each += sizes.e + sizes.master
    return parameters / (split if args.zero else 1) * each
