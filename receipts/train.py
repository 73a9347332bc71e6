"""What a rank of train.py should send and hold in a step: the formulas of all techniques together.

The receipt shows these figures beside what the ledger counted. They must agree to the byte, except
for activations. Each function adds what one kind of parallelism sends; receipts/formulas.py has the
formulas themselves. Letters: P parameters, b T C sequences, tokens, width, e bytes an element,
r = (n-1)/n on n ranks, t tensor-parallel ranks, m micro-batches, V the vocabulary.
"""

from dataclasses import dataclass

import torch.distributed as dist

import harness
from harness import presets
from receipts import context_parallel as long_context
from receipts import formulas as by_paper
from receipts import pipeline as schedules
from receipts import zero as zero_bytes

SCALAR = 8  # the loss and the squared norm are summed as one float64 each


@dataclass
class Share:
    """What a rank has of a step.

    blocks, first, last        how many of its layers; whether it holds the embedding, the head
    sequences, length, micro   its sequences; its tokens of each, padding included; sequences of a
                               micro-batch
    element, reduced, master   bytes of an element of weights, reduced gradients, master weights
    forwards                   of each block: 2 where backward runs it again
    """

    blocks: int
    first: bool
    last: bool
    sequences: int
    length: int
    micro: int
    element: int
    reduced: int
    master: int
    forwards: int

    @property
    def layers(self):
        return self.blocks, self.first, self.last


def expected(run, model, optimizer, schedule, groups, length, travelled):
    """The receipt's layout, `sent`, `held` and notes (see Run.receipt) for this rank.

    length: tokens of a sequence on this rank. travelled: rows that its tokens took to other ranks'
    experts and back."""
    args = run.args
    stages = [int(stage) for stage in model.parts]
    row = schedule[schedule.owner[stages[0]]]
    sequences = args.batch // args.dp
    share = Share(
        blocks=sum(len(part.blocks) for part in model.parts.values()),
        first=0 in stages,
        last=schedule.last in stages,
        sequences=sequences,
        length=length,
        micro=sequences // args.microbatches,
        element=harness.DTYPES[args.param_dtype].itemsize,
        reduced=harness.DTYPES[args.reduce_dtype].itemsize,
        master=harness.DTYPES[args.dtype].itemsize,
        forwards=2 if args.recompute in by_paper.WHOLE_BLOCKS else 1,
    )
    actions = [(action.kind, stages.index(action.stage)) for action in row]
    states, sent = data(run, share, optimizer, actions, groups)
    if args.ep > 1:
        sent |= experts(run, share, groups, travelled)
    if args.cp > 1:
        sent |= context(run, share, groups)
    sent |= tensor(run, share, optimizer, groups["tp"])
    sent |= between_stages(args, run.config, share, schedule, schedule.owner[stages[0]])
    flying = schedules.in_flight(row, lambda stage: len(model[stage].blocks))
    size = activations(args, run.config, share, flying)
    held = held_rows(args, states)
    held["activations_peak"] = size, "blocks x micro-batches in flight, without the head"
    notes = []
    if args.zero == 3:
        peak = f"{run.ledger.gathered_peak:,} bytes"
        notes.append(f"ZeRO: gathered weights at the peak {peak}")
    return layout(args), sent, held, notes


def held_rows(args, states):
    """{kind: (bytes, formula)} of weights, gradients and optimizer states."""
    copies = 2 if args.optimizer == "adamw" else 0  # AdamW's moments
    if args.param_dtype != args.dtype or args.offload:
        copies += 1  # the masters
    kinds = (("parameters", "P e", 3), ("gradients", "P e", 2), ("optimizer", f"{copies} P e", 1))
    rows = {}
    ranks = "zero-ranks" if args.zero_ranks else "dp"
    for (kind, text, stage), size in zip(kinds, states):
        rows[kind] = size, f"{text} / {ranks}" if args.zero >= stage else text
    if args.offload:
        size, text = rows["optimizer"]
        rows["optimizer"] = size, f"{text}, on the host"
    return rows


def layout(args):
    """{axis: size} of what is not 1, for the receipt."""
    shown = {"dp": args.dp, "tp": args.tp, "pp": args.pp}
    if args.pp > 1:
        shown |= {"schedule": args.schedule, "microbatches": args.microbatches}
    if args.zero:
        shown["zero"] = args.zero
    if args.zero_ranks:
        shown["zero-ranks"] = args.zero_ranks
    if args.sp:
        shown["sp"] = args.tp
    if args.recompute != "none":
        shown["recompute"] = args.recompute
    if args.ep > 1:
        shown["ep"] = args.ep
    if args.cp > 1:
        shown |= {"cp": args.cp, "cp-kind": args.cp_kind}
    return shown


# --- data parallelism


def data(run, share, optimizer, actions, groups):
    """Bytes of [weights, gradients, optimizer states], and the sums over ranks with the same
    weights. Experts have fewer copies than the rest: their group is `copies`."""
    args, config = run.args, run.config

    def parameters(experts=None):
        return presets.parameters_held(config, args.tp, *share.layers, experts)

    sizes = {"dp": parameters()}
    if args.ep > 1:
        plain = parameters(experts=0)
        sizes = {"dp": plain, "copies": parameters(experts_here(config, groups["ep"])) - plain}
    if hasattr(optimizer, "buckets"):  # ZeRO
        return of_zero(args, share, optimizer, actions, groups, sizes)
    states, sent = [0, 0, 0], {}
    for name, size in sizes.items():
        n = dist.get_world_size(groups[name])
        gradients = size * share.element
        loss = SCALAR if name == "dp" else 0
        sent["all_reduce", name] = by_paper.all_reduce_sent(gradients + loss, n), "2 r P e"
        states[0] += size * share.element
        states[1] += gradients
        states[2] += size * moments(args, share)
    return states, sent


def moments(args, share):
    """Bytes a parameter of the optimizer's moments."""
    return 2 * share.master if args.optimizer == "adamw" else 0


def of_zero(args, share, optimizer, actions, groups, sizes):
    """The same with ZeRO, whose shards are padded. sizes: {group's name: parameters}."""
    masters = share.master if args.param_dtype != args.dtype or args.offload else 0
    states, sent = [0, 0, 0], {}
    for name, size in sizes.items():
        inside, across = optimizer.split(groups[name])
        n = dist.get_world_size(inside)
        for bucket in optimizer.buckets:
            if bucket.group is inside:
                size += bucket.size - sum(p.numel() for p in bucket.parameters)
        element_sizes = share.element, share.reduced, moments(args, share) + masters
        for i, each in enumerate(by_paper.model_states(args.zero, n, *element_sizes)):
            states[i] += size * each
        prefix = "" if name == "dp" else f"{name} "
        where = name if inside is groups[name] else f"{prefix}inside"
        for operation, row in zero_bytes.sent(optimizer, actions, inside).items():
            sent[operation, where] = row
        if across is not None:
            row = zero_bytes.sent_to_copies(optimizer, across)
            sent["all_reduce", f"{prefix}across"] = row
        scalars = 0
        if name == "dp":  # the loss; and the norm, where ranks have shards of the gradient
            scalars = 2 * SCALAR if args.zero else SCALAR
        amount, text = sent.get(("all_reduce", name), (0, "loss and norm"))
        amount += by_paper.all_reduce_sent(scalars, dist.get_world_size(groups[name]))
        sent["all_reduce", name] = amount, text
    states[2] -= zero_bytes.padding(optimizer) * moments(args, share)  # padding has no moments
    return states, sent


# --- experts, sequences, layers, stages


def experts_here(config, group):
    """How many experts this rank has. Where they don't divide, the first ranks have one more."""
    each, more = divmod(config.experts, dist.get_world_size(group))
    return each + 1 if dist.get_rank(group) < more else each


def experts(run, share, groups, travelled):
    """The rows that went to experts and back, the counts that went before them, and the norm."""
    args, config = run.args, run.config
    passes = share.forwards + 1
    elsewhere = config.experts - experts_here(config, groups["ep"])
    layers = share.forwards * share.blocks * args.microbatches
    counts = layers * elsewhere * args.expert_chunks * 8
    rows = passes * travelled // share.forwards
    size = rows * config.width * share.element + counts
    sent = {("all_to_all", "ep"): (size, f"{passes} (rows out + rows in) C e, and the counts")}
    if not args.zero:
        sent["all_reduce", "ep"] = by_paper.all_reduce_sent(SCALAR, args.ep), "the norm"
    return sent


def context(run, share, groups):
    """Keys, values and queries on their way between the ranks that share a sequence."""
    args, config = run.args, run.config
    shape = long_context.grid(args.cp_kind, args.cp, args.cp_rings)
    heads = config.heads // args.tp, config.kv_heads // args.tp, config.width // config.heads
    sizes = share.sequences, share.length, *heads, share.element, share.forwards
    sent = {}
    for operation, size in by_paper.context_parallel_sent(args.cp_kind, *shape, *sizes).items():
        group = "cp"
        if "ring" in groups:
            group = "ring" if operation == "send" else "ulysses"
        if operation == "reduce_scatter":
            operation = scatter(groups["cp"])
        if size:
            sent[operation, group] = share.blocks * size, f"{args.cp_kind}: see context_parallel.py"
    if config.experts and config.balance_loss:
        layers = share.forwards * share.blocks * share.sequences
        sums = layers * (2 * config.experts + 1) * max(share.element, 4)
        text = "the routers' sums over sequences"
        sent["all_reduce", "cp"] = by_paper.all_reduce_sent(sums, args.cp), text
    return sent


def tensor(run, share, optimizer, tp):
    """The sums of partial results of every layer, or with --sp its gathers and scatters; and the
    norm of the gradient."""
    args, config, e = run.args, run.config, share.element
    if not args.sp:
        shape = share.sequences * share.length, e, *share.layers
        size = by_paper.tensor_parallel_sent(config, args.tp, *shape, args.recompute)
        times = 8
        if args.recompute in by_paper.WHOLE_BLOCKS:
            times += 2 * by_paper.sent_again(config)
        text = f"{times} r b T C e a block, and both ends"
        return {("all_reduce", "tp"): (size + by_paper.all_reduce_sent(SCALAR, args.tp), text)}
    keep = not args.gather_again
    shape = share.sequences, share.length, e, *share.layers
    size = by_paper.sequence_parallel_sent(config, args.tp, *shape, keep, args.recompute)
    partial = by_paper.partial_parameters(config, *share.layers)
    if hasattr(optimizer, "buckets"):  # ZeRO
        partial = sum(bucket.length for bucket in optimizer.buckets if tp in bucket.partial)
    sums = by_paper.all_reduce_sent(partial * share.reduced + SCALAR, args.tp)
    more = "" if args.recompute == "none" else ", more to recompute,"
    gathers = f"{4 if keep else 6} r b T C e a block{more} and both ends"
    scatters = f"4 r b T C e a block{more} and both ends"
    return {
        ("all_gather", "tp"): (size["all_gather"], gathers),
        (scatter(tp), "tp"): (size["reduce_scatter"], scatters),
        ("all_reduce", "tp"): (size["all_reduce"] + sums, "the loss; the norms' gradients"),
    }


def between_stages(args, config, share, schedule, rank):
    """Activations down the pipeline, their gradients up, and the gradient of a tied matrix between
    its ends."""
    sent = {("all_reduce", "pp"): (by_paper.all_reduce_sent(2 * SCALAR, args.pp), "loss and norm")}
    each = share.sequences * split_length(args, share.length) * config.width * share.element
    for name, messages in zip(("down", "up"), schedules.boundaries(schedule, rank)):
        sent["send", name] = messages * each, "b T C e a micro-batch and boundary"
    if config.tied and share.first != share.last:
        matrix = by_paper.ceil(config.vocab, args.tp) * config.width
        if args.zero:
            matrix = by_paper.ceil(matrix, args.zero_ranks or args.dp * args.cp)
        size = by_paper.all_reduce_sent(matrix * share.reduced, 2)
        sent["all_reduce", "tied"] = size, "V/t C e, the tied matrix"
    return sent


def activations(args, config, share, flying):
    """What backward needs of the forward passes in flight: `flying` blocks x micro-batches."""
    size = flying * of_block(args, config, share, args.recompute)
    if args.recompute in by_paper.WHOLE_BLOCKS:  # the block that runs again has all of it
        size += of_block(args, config, share, "none")
        size -= of_block(args, config, share, args.recompute)
    return size


def of_block(args, config, share, recompute):
    """Bytes of one block and micro-batch."""
    split = 1 if args.sp else args.tp
    size = by_paper.activation_bytes(config, share.micro, share.element, split, recompute)
    size *= share.length / config.context
    if not args.sp:
        return size
    # What sequence parallelism gathers stays whole, unless it is gathered again
    whole = 0
    if recompute == "none":
        whole = 2
    elif recompute == "selective" and (config.experts or config.mlp == "swiglu"):
        whole = 1
    if not args.gather_again:
        size += whole * (args.tp - 1) * share.micro * share.length * config.width * share.element
    return size / args.tp


def split_length(args, length):
    """Tokens of a sequence on a rank, between the layers."""
    return by_paper.ceil(length, args.tp) if args.sp else length


def scatter(group):
    """What a reduce-scatter is counted as. On gloo it is made of all-to-alls, because gloo's own
    sends as many bytes as an all-reduce."""
    return "all_to_all" if dist.get_backend(group) == "gloo" else "reduce_scatter"
