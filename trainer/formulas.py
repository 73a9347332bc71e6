"""What a rank of train.py should send and hold in a step: the formulas of all technique files, put
together.

The receipt shows these figures beside what the ledger counted, and they must agree to the byte (but
for activations). Each function here says what one kind of parallelism adds; the formulas
themselves, with their sources, stand in its own file. Letters as in the README: P parameters, b T C
sequences, tokens, width; e bytes an element; r = (n-1)/n on n ranks.
"""

from dataclasses import dataclass

import torch.distributed as dist

import context_parallel
import expert_parallel
import harness
import zero
from harness import formulas as by_paper
from harness import schedules, zero_bytes

SCALAR = 8  # the loss and the squared norm are summed as one float64 each


@dataclass
class Share:
    """What a rank has of a step.

    blocks: how many of its layers; first, last: whether it holds the embedding, the head.
    sequences: of its part of the batch;
    length: tokens that it has of each, with padding; micro: sequences of a micro-batch. element,
    reduced, master: bytes of an element of weights, of reduced gradients, of master weights.
    forwards: of each block, 2 where backward runs it again."""

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

    length: tokens that it has of a sequence; travelled: rows that its tokens took to other ranks'
    experts and back."""
    args, owner = run.args, schedule.owner
    stages, rows = [int(stage) for stage in model.parts], args.batch // args.dp
    sizes = (harness.DTYPES[d].itemsize for d in (args.param_dtype, args.reduce_dtype, args.dtype))
    blocks = sum(len(part.blocks) for part in model.parts.values())
    ends = 0 in stages, schedule.last in stages
    share = Share(
        blocks,
        *ends,
        rows,
        length,
        rows // args.microbatches,
        *sizes,
        1 + (args.recompute == "block"),
    )
    states, sent = data(run, share, optimizer, schedule, groups, stages)
    if args.ep > 1:
        sent |= experts(run, share, groups, travelled)
    if args.cp > 1:
        sent |= context(run, share, groups)
    sent |= tensor(run, share, optimizer, groups["tp"])
    sent |= between_stages(args, run.config, share, schedule, owner[stages[0]])
    kept = 2 * (args.optimizer == "adamw") + (args.param_dtype != args.dtype)
    texts = [
        f"{p} e{' / dp' * (args.zero >= least)}"
        for p, least in (("P", 3), ("P", 2), (f"{kept} P", 1))
    ]
    held = dict(zip(("parameters", "gradients", "optimizer"), zip(states, texts)))
    flying = schedules.in_flight(schedule[owner[stages[0]]], lambda stage: len(model[stage].blocks))
    size = activations(args, run.config, share, flying)
    held["activations_peak"] = size, "blocks x micro-batches in flight, without the head"
    notes = (
        [f"ZeRO: gathered weights at the peak {run.ledger.gathered_peak:,} bytes"]
        if args.zero == 3
        else []
    )
    return layout(args), sent, held, notes


def layout(args):
    shown = {"dp": args.dp, "tp": args.tp, "pp": args.pp}
    shown |= {"schedule": args.schedule, "microbatches": args.microbatches} if args.pp > 1 else {}
    shown |= {"zero": args.zero} if args.zero else {}
    shown |= {"sp": args.tp} if args.sp else {}
    shown |= {"recompute": args.recompute} if args.recompute != "none" else {}
    shown |= {"ep": args.ep} if args.ep > 1 else {}
    return shown | ({"cp": args.cp, "cp-kind": args.cp_kind} if args.cp > 1 else {})


def data(run, share, optimizer, schedule, groups, stages):
    """Bytes of [weights, gradients, optimizer states], and the sums over ranks with the same
    weights. Experts have fewer copies than the rest: their group is `copies`."""
    args, config, sharded = run.args, run.config, isinstance(optimizer, zero.ZeRO1)
    moments = 2 * (args.optimizer == "adamw") * share.master
    sizes = {"dp": by_paper.parameters_held(config, args.tp, *share.layers)}
    if args.ep > 1:
        mine = expert_parallel.expert_counts(config.experts, args.ep)[dist.get_rank(groups["ep"])]
        plain = by_paper.parameters_held(config, args.tp, *share.layers, experts=0)
        sizes = {
            "dp": plain,
            "copies": by_paper.parameters_held(config, args.tp, *share.layers, mine) - plain,
        }
    states, sent = [0, 0, 0], {}
    for name, size in sizes.items():
        group, n = groups[name], dist.get_world_size(groups[name])
        scalars = SCALAR * (name == "dp")  # the loss
        if sharded:
            # Padding
            size += sum(
                b.size - sum(p.numel() for p in b.parameters)
                for b in optimizer.buckets
                if b.group is group
            )
            copies = (args.param_dtype != args.dtype) * share.master
            of_group = [
                size * each
                for each in by_paper.model_states(
                    args.zero, n, share.element, share.reduced, moments + copies
                )
            ]
            actions = [
                (action.kind, stages.index(action.stage))
                for action in schedule[dist.get_rank(groups["pp"])]
            ]
            sent |= {
                (operation, name): formula
                for operation, formula in zero_bytes.sent(optimizer, actions, group).items()
            }
            scalars *= 2 if args.zero else 1  # and the norm, of parts
            amount, text = sent.get(("all_reduce", name), (0, "loss and norm"))
            sent["all_reduce", name] = (amount + by_paper.all_reduce_sent(scalars, n), text)
        else:
            of_group = [size * share.element, size * share.element, size * moments]
            sent["all_reduce", name] = (
                by_paper.all_reduce_sent(size * share.element + scalars, n),
                "2 r P e",
            )
        states = [a + b for a, b in zip(states, of_group)]
    if sharded:
        states[2] -= zero_bytes.padding(optimizer) * moments
    return states, sent


def experts(run, share, groups, travelled):
    """The rows that went to experts and back, and the counts that went before them; at most the
    loss's part of the norm."""
    args, config = run.args, run.config
    mine = expert_parallel.expert_counts(config.experts, args.ep)[dist.get_rank(groups["ep"])]
    passes = share.forwards + 1
    counts = (
        share.forwards
        * share.blocks
        * args.microbatches
        * (config.experts - mine)
        * args.expert_chunks
        * 8
    )
    size = passes * travelled // share.forwards * config.width * share.element + counts
    sent = {("all_to_all", "ep"): (size, f"{passes} (rows out + rows in) C e, and the counts")}
    return (
        sent
        if args.zero
        else sent | {("all_reduce", "ep"): (by_paper.all_reduce_sent(SCALAR, args.ep), "the norm")}
    )


def context(run, share, groups):
    """Keys, values and queries on their way between the ranks that share a sequence."""
    args, config = run.args, run.config
    shape = context_parallel.grid(args.cp_kind, args.cp, args.cp_rings)
    heads = config.heads // args.tp, config.kv_heads // args.tp, config.width // config.heads
    sizes = share.sequences, share.length, *heads, share.element, share.forwards
    sent = {}
    for operation, size in by_paper.context_parallel_sent(args.cp_kind, *shape, *sizes).items():
        group = (
            {"send": "ring", "all_to_all": "ulysses"}.get(operation) if "ring" in groups else "cp"
        )
        if size:
            name = scatter(groups["cp"]) if operation == "reduce_scatter" else operation
            sent[name, group] = (share.blocks * size, f"{args.cp_kind}: see context_parallel.py")
    if config.experts and config.balance_loss:
        sums = (
            share.forwards
            * share.blocks
            * share.sequences
            * (2 * config.experts + 1)
            * max(share.element, 4)
        )
        sent["all_reduce", "cp"] = (
            by_paper.all_reduce_sent(sums, args.cp),
            "the routers' sums over sequences",
        )
    return sent


def tensor(run, share, optimizer, tp):
    """The sums of partial results of every layer, or with --sp its gathers and scatters; and the
    norm of the gradient."""
    args, config, e = run.args, run.config, share.element
    if not args.sp:
        tokens = share.sequences * share.length
        size = by_paper.tensor_parallel_sent(
            config, args.tp, tokens, e, *share.layers, args.recompute
        )
        times = 8 + 2 * (share.forwards - 1) * by_paper.sent_again(config)
        text = f"{times} r b T C e a block, and both ends"
        return {("all_reduce", "tp"): (size + by_paper.all_reduce_sent(SCALAR, args.tp), text)}
    keep = not args.gather_again
    shape = share.sequences, share.length, e, *share.layers
    size = by_paper.sequence_parallel_sent(config, args.tp, *shape, keep, args.recompute)
    partial = by_paper.partial_parameters(config, *share.layers)
    if isinstance(optimizer, zero.ZeRO1):
        partial = sum(b.length for b in optimizer.buckets if tp in b.partial)
    sums = size["all_reduce"] + by_paper.all_reduce_sent(partial * share.reduced + SCALAR, args.tp)
    more = "" if args.recompute == "none" else ", more to recompute,"
    return {
        ("all_gather", "tp"): (
            size["all_gather"],
            f"{4 if keep else 6} r b T C e a block{more} and both ends",
        ),
        (scatter(tp), "tp"): (size["reduce_scatter"], f"4 r b T C e a block{more} and both ends"),
        ("all_reduce", "tp"): (sums, "the loss; the norms' gradients"),
    }


def between_stages(args, config, share, schedule, rank):
    """Activations down the pipeline, their gradients up, and the gradient of a tied matrix between
    its ends."""
    sent = {("all_reduce", "pp"): (by_paper.all_reduce_sent(2 * SCALAR, args.pp), "loss and norm")}
    each = share.sequences * split_length(args, share.length) * config.width * share.element
    for name, messages in zip(("down", "up"), schedules.boundaries(schedule, rank)):
        sent["send", name] = (messages * each, "b T C e a micro-batch and boundary")
    if config.tied and share.first != share.last:
        part = -(-config.vocab // args.tp) * config.width
        part = -(-part // (args.dp * args.cp)) if args.zero else part
        sent["all_reduce", "tied"] = (
            by_paper.all_reduce_sent(part * share.reduced, 2),
            "V/t C e, the tied matrix",
        )
    return sent


def activations(args, config, share, flying):
    """What backward needs of the forward passes in flight: `flying` blocks x micro-batches."""

    def of_block(recompute):
        split = 1 if args.sp else args.tp
        size = (
            harness.activation_bytes(config, share.micro, share.element, split, recompute)
            * share.length
            / config.context
        )
        if not args.sp:
            return size
        # Of what sequence parallelism gathers these stay whole, unless they are gathered again
        whole = {
            "none": 2,
            "selective": bool(config.experts) or config.mlp == "swiglu",
            "block": 0,
        }[recompute]
        gathered = whole * (args.tp - 1) * share.micro * share.length * config.width * share.element
        return (size + (not args.gather_again) * gathered) / args.tp

    return flying * of_block(args.recompute) + (
        of_block("none") if args.recompute == "block" else 0
    )


def split_length(args, length):
    """Tokens of a sequence on a rank, between the layers."""
    return -(-length // args.tp) if args.sp else length


def scatter(group):
    """What a reduce-scatter is counted as: gloo's would send an all-reduce's bytes, so there it is
    made of all-to-alls."""
    return "all_to_all" if dist.get_backend(group) == "gloo" else "reduce_scatter"
