"""What a rank of train.py should send and hold in a step: the formulas of all lessons together.

The receipt shows these figures beside what the ledger counted. They must agree to the byte, except
for activations.
"""

import torch.distributed as dist

from receipts import (
    context_parallel,
    ddp,
    dualpipe,
    expert_parallel,
    muon,
    pipeline,
    sequence_parallel,
    tensor_parallel,
    zero,
)
from receipts.formulas import Group, add, scatter_operation, sizes_of


class ExpertRows(expert_parallel.RowCounter):
    """Counts rows in `with`, once a step. Of the step that the ledger counts:

    measured         rows that travelled
    waits, switches  of dualpipe.Turns"""

    def __init__(self, run, model, turns):
        blocks = [block for part in model.parts.values() for block in part.blocks.values()]
        super().__init__([block.mlp for block in blocks] if run.args.ep > 1 else [])
        self.run, self.turns, self.measured, self.waits, self.switches = run, turns, 0, 0, 0

    def __enter__(self):
        self.clear()
        self.before = self.turns.waits, self.turns.switches

    def __exit__(self, *error):
        if self.run.step == self.run.measured:
            self.measured = self.travelled
            waits, switches = self.before
            self.waits, self.switches = self.turns.waits - waits, self.turns.switches - switches


def of_run(runner, find_plan=None):
    """(layout, sent, held, notes) of train.py's runner. find_plan: packed_documents.py's."""
    run, schedule, groups = runner.run, runner.schedule, runner.groups
    args, config, notes = run.args, run.config, []
    if args.zero == 3:
        notes.append(f"ZeRO: gathered weights at the peak {run.ledger.gathered_peak:,} bytes")
    scatter = scatter_operation(groups["dp"])
    groups = {
        name: Group(name, dist.get_world_size(group), dist.get_rank(group))
        for name, group in groups.items()
        if isinstance(group, dist.ProcessGroup)
    }
    rank = groups["pp"].rank
    experts = expert_parallel.experts_here(config, groups["ep"]) if args.ep > 1 else None
    own = pipeline.of_rank(config, schedule, rank)
    length = runner.tokens  # of a sequence on this rank
    sizes = sizes_of(args, config, args.dp, length=length, experts=experts, **own)
    one_dtype = args.dtype == args.param_dtype == args.reduce_dtype
    uses_zero = args.zero > 0 or args.offload or not one_dtype
    tables = []
    if args.ep > 1:
        rows, chunks = runner.expert_rows.measured, args.expert_chunks
        tables.append(expert_parallel.expected(sizes, groups["ep"], rows, chunks))
        if args.schedule == "dualpipev" and args.zero < 3:
            passes = pipeline.stage_layers(config, schedule.last + 1), chunks, sizes.forwards
            notes += dualpipe.notes(runner.expert_rows, schedule, rank, *passes)
    if args.cp > 1:
        kind, used = (args.cp_kind, args.cp_rings), None
        if args.documents and args.cp_kind != "ulysses":
            ring, ulysses = context_parallel.grid(args.cp_kind, args.cp, args.cp_rings)
            where = groups["cp"].rank // ulysses, ring, length * ulysses, True
            batches = runner.batches(run.measured)
            used = context_parallel.tokens_used(find_plan, batches, args, *where)
        tables.append(context_parallel.expected(sizes, groups["cp"], *kind, used))
    if args.sp:
        options = groups["tp"], scatter, 1, not uses_zero
        tables.append(sequence_parallel.expected(sizes, *options))
    else:
        tables.append(tensor_parallel.expected(sizes, groups["tp"], 1))
    messages = pipeline.boundaries(schedule, rank)
    tied = None if uses_zero else groups.get("tied")
    tables.append(pipeline.expected(sizes, groups["pp"], messages, tied))
    if args.optimizer == "muon":
        owned = muon.owned_by(runner.optimizer, runner.groups)
        tables.append(muon.expected(sizes, groups, owned))
    elif uses_zero:
        tables.append(of_zero(args, sizes, schedule[rank], groups, scatter))
    else:
        tables.append(ddp.expected(sizes, groups["dp"], groups.get("copies"), scalars=2))
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
    optional = {
        "zero": args.zero,
        "zero-ranks": args.zero_ranks,
        "sp": args.tp if args.sp else 0,
        "recompute": 0 if args.recompute == "none" else args.recompute,
        "ep": args.ep if args.ep > 1 else 0,
        "fold-experts": args.fold_experts,
    }
    shown |= {axis: size for axis, size in optional.items() if size}
    if args.cp > 1:
        shown |= {"cp": args.cp, "cp-kind": args.cp_kind}
    return shown
