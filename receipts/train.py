"""What a rank of train.py should send and hold in a step: the formulas of all lessons together.

The receipt shows these figures beside what the ledger counted. They must agree to the byte, except
for activations.
"""

import torch.distributed as dist

from receipts import (
    context_parallel,
    ddp,
    expert_parallel,
    muon,
    pipeline,
    sequence_parallel,
    tensor_parallel,
    zero,
)
from receipts.formulas import Group, add, scatter_operation, sizes_of


def of_run(run, schedule, groups, length, travelled, owned):
    """(layout, sent, held, notes) of this rank. groups: of train.py's mesh. length: tokens
    of a sequence on this rank. travelled: rows that its tokens took to other ranks' experts and
    back. owned: with --optimizer muon a receipts.muon.Owned, else None."""
    args, config, notes = run.args, run.config, []
    if args.zero == 3:
        peak = run.ledger.gathered_peak
        notes.append(f"ZeRO: gathered weights at the peak {peak:,} bytes")
    scatter = scatter_operation(groups["dp"])
    groups = {
        name: Group(name, dist.get_world_size(group), dist.get_rank(group))
        for name, group in groups.items()
        if isinstance(group, dist.ProcessGroup)
    }
    rank = groups["pp"].rank
    experts = expert_parallel.experts_here(config, groups["ep"]) if args.ep > 1 else None
    own = pipeline.of_rank(config, schedule, rank)
    sizes = sizes_of(args, config, args.dp, length=length, experts=experts, **own)
    one_dtype = args.dtype == args.param_dtype == args.reduce_dtype
    uses_zero = args.zero > 0 or args.offload or not one_dtype
    tables = []
    if args.ep > 1:
        chunks, scalars = args.expert_chunks, 0 if args.zero else 1  # the norm
        table = expert_parallel.expected(sizes, groups["ep"], travelled, chunks, scalars)
        tables.append(table)
    if args.cp > 1:
        kind = args.cp_kind, args.cp_rings
        tables.append(context_parallel.expected(sizes, groups["cp"], *kind, scatter))
    if args.sp:
        partial = not uses_zero
        table = sequence_parallel.expected(sizes, groups["tp"], scatter, partial=partial)
        tables.append(table)
    else:
        tables.append(tensor_parallel.expected(sizes, groups["tp"]))
    messages = pipeline.boundaries(schedule, rank)
    tied = None if uses_zero else groups.get("tied")
    tables.append(pipeline.expected(sizes, groups["pp"], messages, tied))
    if owned is not None:
        tables.append(muon.expected(sizes, groups, owned))
    elif uses_zero:
        tables.append(of_zero(args, sizes, schedule[rank], groups, scatter))
    else:
        tables.append(ddp.expected(sizes, groups["dp"], groups.get("copies")))
    _, held = tables[-1]  # only these split weights, gradients and states further
    return layout(args), add(*(sent for sent, _ in tables)), held, notes


def of_zero(args, sizes, row, groups, scatter):
    """(sent, held) of ZeRO."""
    stages = sorted({action.stage for action in row})
    passes = [(action.kind, stages.index(action.stage)) for action in row]
    splits = [split_of(groups, "dp", "")]
    if args.ep > 1:
        splits.append(split_of(groups, "copies", "copies "))
    partial = [groups[name] for name in ("tp", "tied") if name in groups]
    return zero.expected(sizes, groups["dp"], args.zero, args, scatter, passes, splits, partial)


def split_of(groups, data, prefix):
    """The zero.Split of a data-parallel group: all of it, or --zero-ranks of it."""
    if f"{prefix}inside" not in groups:
        return zero.Split(groups[data])
    across = groups[f"{prefix}across"]
    return zero.Split(groups[f"{prefix}inside"], across if across.ranks > 1 else None)


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
