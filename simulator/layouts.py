"""What a plan chooses from: the layouts of a number of devices that train.py can run."""

import copy
import itertools

import harness

# (schedule, stages a rank holds)
SCHEDULES = [("1f1b", None), ("interleaved", 2), ("interleaved", 4), ("zb-h1", None)]


def divisors(n, most):
    return [d for d in range(1, min(n, most) + 1) if n % d == 0]


def candidates(args, config, gpus):
    """The layouts, as copies of args."""
    for tp in divisors(gpus, 32):
        for pp, cp in itertools.product(divisors(gpus // tp, 64), (1, 2, 4, 8, 16)):
            dp, rest = divmod(gpus, tp * pp * cp)
            if rest or config.kv_heads % tp or config.context % (2 * cp * tp):
                continue
            # Shorter pieces of sequences are for batches with fewer sequences than devices
            if cp > 1 and config.context < 2048 * cp and args.batch >= gpus:
                continue
            for fold in (False, True) if tp > 1 and args.ep > 1 else (False,):
                ranks = dict(dp=dp, cp=cp, tp=tp, pp=pp, sp=tp > 1, fold_experts=fold)
                if args.batch % dp == 0 and dp * cp * (tp if fold else 1) % args.ep == 0:
                    yield from of_ranks(args, config, ranks)


def of_ranks(args, config, ranks):
    """The layouts with these --dp to --sp."""
    pp = ranks["pp"]
    schedules = SCHEDULES if pp > 1 else SCHEDULES[:1]
    splits = zero_splits(args, ranks["dp"] * ranks["cp"], ranks["tp"], ranks["fold_experts"])
    kinds = [kind for kind in harness.RECOMPUTATIONS if not (kind == "half" and args.compile)]
    for (schedule, chunks), rows in itertools.product(schedules, (1, 2, 4, 8, 16)):
        m, rest = divmod(args.batch // ranks["dp"], rows)
        if rest or m == 0 or pp > 1 and m < pp:
            continue
        if config.layers < pp * (chunks or 1) or chunks and m % pp:
            continue
        passes = dict(microbatches=m, schedule=schedule, chunks=chunks, prove=0)
        for (stage, size), kind in itertools.product(splits, kinds):
            layout = copy.copy(args)
            vars(layout).update(ranks | passes)
            vars(layout).update(zero=stage, zero_ranks=size, recompute=kind)
            yield layout


def zero_splits(args, ranks, tp, fold):
    """(stage, --zero-ranks) to try on so many data-parallel ranks: all of them, or those of a node.
    With --zero-ranks that size alone."""
    if args.optimizer == "muon":
        return [(1, None)]
    node, rest = divmod(args.nodes_of or 8, tp)
    found, sizes = [(0, None)], [None]
    if args.zero_ranks:
        found, sizes = [], [args.zero_ranks]
    elif rest == 0 and 1 < node < ranks:
        sizes.append(node)
    for stage, size in itertools.product((1, 2, 3), sizes):
        group = (size or ranks) * (tp if fold else 1)  # of experts' ranks
        fits = ranks % (size or ranks) == 0 and (group % args.ep == 0 or args.ep % group == 0)
        if ranks > 1 and fits:
            found.append((stage, size))
    return found


def words(args):
    """A layout in words."""
    axes = ("dp", "cp", "tp", "pp", "ep")
    found = [f"{axis} {getattr(args, axis)}" for axis in axes if getattr(args, axis) > 1]
    for is_set, text in (
        (args.sp, "sp"),
        (args.fold_experts, "fold experts"),
        (args.zero, f"zero {args.zero}"),
        (args.zero_ranks, f"in groups of {args.zero_ranks}"),
        (args.offload, "offload"),
        (args.recompute != "none", f"recompute {args.recompute}"),
        (args.pp > 1, args.schedule),
        (args.pp > 1 and args.chunks, f"x {args.chunks}"),
    ):
        if is_set:
            found.append(text)
    return " ".join(found) or "one device"
