"""A layout's seconds and bytes from a few pieces, to choose by among thousands what is played.

A piece is a block, or the head, on t tensor-parallel and c context-parallel ranks, with one
sequence: played once for each t, c and kind of recomputation. Its seconds and bytes grow with the
rows of a micro-batch. Sums and gathers over replicas, bubbles and states are formulas.

Left out: experts' all-to-alls, how uneven stages wait for each other.
"""

import copy
import functools
from typing import NamedTuple

from proof import ledger
from receipts import formulas, zero
from receipts import pipeline as schedules
from receipts.expert_parallel import ranks_of
from simulator.dryrun import play_all
from simulator.links import both, spread
from simulator.meter import Part


class Piece(NamedTuple):
    """Of a block and of the head, {"F": Part, "B": Part} of a micro-batch of one sequence; seconds
    of the optimizer's step for a parameter; bytes of a message between stages."""

    block: dict
    head: dict
    step: float
    message: int


def play_pieces(args, config, layouts, cluster, train):
    """{piece_of(layout): Piece}, of all that the layouts need."""
    # First those with a head
    keys = sorted({piece_of(one) for one in layouts}, key=lambda key: (key[-1] != "none", key))
    jobs = []
    for tp, cp, fold, kind in keys:
        one = copy.copy(args)
        changed = dict(dp=1, cp=cp, tp=tp, pp=2, ep=1, sp=tp > 1, fold_experts=fold)
        changed |= dict(zero=1 if args.optimizer == "muon" else 0)
        changed |= dict(batch=1, microbatches=1, recompute=kind, schedule="1f1b", chunks=None)
        vars(one).update(changed, islands=1, prove=0, offload=False, zero_ranks=None)
        # The head is the same for each kind: the last stage is played once
        jobs.append((one, [0, tp * cp] if kind == "none" else [0], 2))
    found, heads = {}, {}
    for key, (first, *last) in zip(keys, play_all(jobs, cluster, train)):
        block = {action.kind: of_one(part) for action, part in first.actions.items()}
        if last:
            heads[key[:-1]] = {}
            for action, part in last[0].actions.items():
                of_head = (a - 2 * b for a, b in zip(part, block[action.kind]))
                moment = part.most - max(0, part.left)
                heads[key[:-1]][action.kind] = Part(*of_head)._replace(most=moment)
        step = first.rest.seconds / first.parameters
        found[key] = Piece(block, heads[key[:-1]], step, first.message)
    return found


def piece_of(args):
    return args.tp, args.cp, args.fold_experts, args.recompute


def of_one(part):
    """A block's Part of two. What they have for a moment they have one after the other: once."""
    return part.scaled(1 / 2)._replace(most=part.most - max(0, part.left))


# --- bytes


@functools.cache
def in_flight(schedule, pp, microbatches, chunks, rank, layers):
    """The most blocks x micro-batches that a rank keeps at a time. layers: of each stage."""
    few = min(microbatches, 2 * pp)  # with more micro-batches no more are in flight
    row = schedules.make_row(schedule, rank, pp, few, chunks)
    return schedules.in_flight(row, layers.__getitem__)


@functools.cache
def layers_of(config, ranks, chunks):
    """(layers of each stage, layers of each rank), in the schedules of layouts.py."""
    stages = schedules.stage_layers(config, ranks * (chunks or 1))
    lengths = tuple(len(layers) for layers in stages)
    return lengths, [sum(lengths[rank::ranks]) for rank in range(ranks)]


def state_bytes(sizes):
    """Of weights, gradients and optimizer states, for a parameter that nobody splits."""
    return sizes.e, sizes.reduced, (sizes.moments + sizes.masters) * sizes.master


@functools.cache
def parameters_held(config, tp, layers, experts=None, **ends):
    own = dict(layers=(range(layers),), tp=tp, experts=experts)
    return formulas.Sizes(config, 0, 0, **own, **ends).parameters()


def states_held(args, sizes, layers, ends):
    """(bytes of weights, gradients and optimizer states, parameters). Experts are split over ep
    ranks, and their copies over the others."""
    config, ranks = sizes.config, args.zero_ranks or args.dp * args.cp

    ends = ends | {"fold_experts": args.fold_experts}
    parameters = functools.partial(parameters_held, config, args.tp, **ends)
    kinds = [(parameters(layers), ranks)]
    if args.ep > 1:
        plain, experts = parameters(layers, 0), -(-config.experts // args.ep)
        copies = max(1, ranks * ranks_of(args) // (args.dp * args.cp) // args.ep)
        kinds = [(plain, ranks), (parameters(layers, experts) - plain, copies)]
    held = 0
    for count, split in kinds:
        states = zero.model_states(args.zero, split, *state_bytes(sizes))
        held += count * sum(states[:2] if args.offload else states)
    if args.optimizer == "muon":  # which takes AdamW at both ends
        held += parameters(0) * sizes.master / ranks
    return held, sum(count for count, _ in kinds)


def rank_held(args, sizes, rank, piece, rows):
    """(bytes that last, that come and go) of a stage's first rank. rows: of a micro-batch."""
    config = sizes.config
    lengths, ranks = layers_of(config, args.pp, args.chunks)
    first, last = rank == 0, rank == args.pp - 1
    lasting, parameters = states_held(args, sizes, ranks[rank], dict(embedding=first, head=last))
    table = -(-config.vocab // args.tp) * config.width  # elements of an embedding, or of the head
    block = (parameters - table * (first + (last and not (config.tied and first)))) / ranks[rank]
    flying = in_flight(args.schedule, args.pp, args.microbatches, args.chunks, rank, lengths)
    kept = flying * piece.block["F"].left + (piece.head["F"].left if last else 0)
    moment = max(part.most for part in (piece.head if last else piece.block).values())
    # Whole gradients: stage 2 has those of two buckets at most, stage 3 those of two units
    unit = args.bucket_mb * 2**20 / sizes.e if args.zero == 2 else block
    whole = 2 * sizes.reduced * unit if args.zero > 1 else 0
    pair = max(block, table) if first or last else block
    gathered = sizes.e * (block + pair) if args.zero == 3 else 0
    return lasting, gathered + whole + rows * (kept + moment)


# --- seconds


def rough(args, config, cluster, pieces):
    """({part of a step: seconds}, (bytes that last, bytes that come and go) of the fullest rank)"""
    sizes = formulas.sizes_of(args, config, args.dp, length=config.context // args.cp)
    pp, m, chunks = args.pp, args.microbatches, args.chunks or 1
    piece = pieces[piece_of(args)]
    rows = args.batch // args.dp // m
    _, ranks = layers_of(config, pp, args.chunks)
    most = max(ranks)
    _, parameters = states_held(args, sizes, most, {"embedding": True, "head": pp == 1})

    def passes(layers, last, seconds):
        """Of a micro-batch's forward and backward on a rank. seconds(Part)"""
        blocks = layers * sum(seconds(piece.block[kind]) for kind in "FB")
        return rows * (blocks + last * sum(seconds(piece.head[kind]) for kind in "FB"))

    stages = {(max(ranks[:-1], default=0), False), (ranks[-1], True)}
    parts = {}
    for name, seconds in (
        ("computing", lambda part: part.seconds - part.waited),
        ("waiting for messages", lambda part: part.waited),
    ):
        parts[name] = m * max(passes(*stage, seconds) for stage in stages)
    each = sum(parts.values()) / m / 3
    # The slowest stage sets the pace; the way through the others is as long as they are on average
    average = each * sum(ranks) / pp / most
    bubble = schedules.BUBBLES[args.schedule][1]
    parts["pipeline's bubble"] = bubble(pp, m, chunks, average, average, average)
    if pp > 1:
        link = spread(cluster, 2, args.dp * args.cp * args.tp)
        message = link.seconds("send", piece.message * rows)
        parts["pipeline's bubble"] += 2 * chunks * (m + pp) * message
    weights, gradients, times = data_seconds(args, sizes, cluster, parameters, most)
    # All of it beside computing; else gradients beside the backwards that complete them
    beside, meanwhile, after = gradients, 2 * each * times, weights
    if args.zero == 3:
        beside, meanwhile, after = weights + gradients, 3 * each * m, 0.0
    parts["gradients, weights not hidden"] = both(meanwhile, beside) - meanwhile
    split = (args.zero_ranks or args.dp * args.cp) if args.zero else 1
    parts["after the last action"] = after + piece.step * parameters / split
    held = (rank_held(args, sizes, rank, piece, rows) for rank in {0, pp - 1})
    return parts, max(held, key=sum)


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
