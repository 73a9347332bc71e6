"""The search of --plan: layouts are ranked by the formulas of rough.py, and the best of each kind
are played."""

import copy
import functools
import sys
from typing import NamedTuple

from harness import Refused, zero_flags
from simulator import layouts, report
from simulator.devices import HEADROOM, RESERVED, beside_allocator
from simulator.dryrun import check_counts, play_brief
from simulator.estimate import Estimate, estimate
from simulator.rough import play_pieces, rough

# Of a plan's layouts one device is the beginning: of it the model and the dtypes are taken
ONE_DEVICE = dict(dp=1, cp=1, tp=1, pp=1, ep=1, zero=0, microbatches=1, schedule="1f1b")
ONE_DEVICE |= dict(chunks=None, cp_rings=None, zero_ranks=None, sp=False)
ONE_DEVICE |= dict(gather_again=False, fold_experts=False, keep_gathered=False, reduce_once=False)
ROWS, MOST = 6, 12  # of the table, and layouts that are played for it at most
say = functools.partial(print, file=sys.stderr, flush=True)  # progress, beside the answer


class Candidate(NamedTuple):
    """A layout: its flags, the Estimate of its step, and the part of a device's memory that it
    takes, with what the allocator, nccl and CUDA take. By formulas, or played."""

    args: object
    step: Estimate
    full: float

    @property
    def safe(self):
        return self.full <= 1 - HEADROOM


def plan(args, cluster, prepare, train):
    """Search the layouts of --gpus devices, and print the best as a table with their commands. For
    several numbers of devices: the best of each."""
    for gpus in args.gpus:
        check_counts(gpus)
        zero_flags.check_ranks("--zero-ranks", args.zero_ranks, gpus, f"{gpus:,} devices", 1)
    if len(args.gpus) > 1:
        return scaling(args, cluster, prepare, train)
    config, pieces, tried, rows = search(args, args.gpus[0], cluster, prepare, train)
    report.print_plan(config, rows, cluster)
    print("\n  what would change the answer, by formulas:")
    print("\n".join(what_would_change(tried, rows[0], config, cluster, pieces)))


def search(args, gpus, cluster, prepare, train):
    """(Config, pieces, all Candidates by formulas, those that were played and fit), the safe ones
    first, and of these the fastest."""
    args, alone = copy.copy(args), copy.copy(args)
    if args.param_dtype is None and args.dtype == "float32" and args.optimizer != "muon":
        alone.param_dtype = "bfloat16"
    vars(alone).update(ONE_DEVICE)
    settled, config = prepare(alone)
    for name in ("param_dtype", "reduce_dtype", "shape", "tokenizer"):
        setattr(args, name, getattr(settled, name))
    found = list(layouts.candidates(args, config, gpus))
    memory = cluster.device.memory / 1e9
    what = f"none of {len(found):,} layouts on {gpus:,} devices"
    if not found:
        what = f"no layout of {gpus:,} devices suits --batch {args.batch:,} and this model"
        raise Refused(f"{what}: change --batch, --gpus or the heads")
    say(f"{len(found):,} layouts of {gpus:,} devices")
    pieces = play_pieces(settled, config, found, cluster, train)
    tried = [by_formulas(layout, config, cluster, pieces) for layout in found]
    # A tie goes to larger micro-batches: formulas know the speed of one sequence only
    tried.sort(key=lambda one: (round(one.step.seconds, 4), one.args.microbatches))
    fitting = [one for one in tried if one.full <= 1]
    if not fitting:
        least = min(one.full for one in tried) * memory
        raise Refused(f"{what} fits {memory:g} GB, the least is {least:.0f}: give more --gpus")
    say(f"{len(fitting):,} of them may fit: the best are played")
    played = play_best(fitting, config, cluster, prepare, train)
    rows = [one for one in played if one.full <= 1]
    if not rows:
        least = min(one.full for one in played) * memory
        what = f"{what} fits {memory:g} GB, the least is {least:.1f}"
        raise Refused(f"{what}: lower --batch, or give more --gpus")
    rows.sort(key=lambda one: (not one.safe, one.step.seconds))
    # Of those that are too full only the faster ones say something
    if rows[0].safe:
        rows = [one for one in rows if one.safe or one.step.seconds < rows[0].step.seconds]
    return config, pieces, tried, rows


def by_formulas(args, config, cluster, pieces):
    parts, (lasting, moving) = rough(args, config, cluster, pieces)
    taken = lasting + (1 + RESERVED) * moving + beside_allocator(args)
    return Candidate(args, Estimate(sum(parts.values()), parts, 0.0), taken / cluster.device.memory)


def play_best(fitting, config, cluster, prepare, train):
    """Candidates that are played: the fastest by formulas, of each kind until two of it are safe,
    until ROWS are safe, or MOST are played."""
    queue, candidates, safe, more = {}, [], {}, {}
    for one in fitting:  # of layouts as fast and as large by formulas one is enough
        queue.setdefault((round(one.step.seconds, 6), round(one.full, 4)), one)
    queue = list(queue.values())

    def kind_of(args):
        return args.tp > 1, args.pp > 1, args.zero, args.recompute

    while queue and len(candidates) < MOST and sum(safe.values()) < ROWS:
        batch, left = [], []
        for one in queue:
            kind = kind_of(one.args)
            # more: what formulas left out of the last of its kind
            if one.full + more.get(kind, 0.0) > 1 or safe.get(kind, 0) > 1:
                continue
            alike = sum(kind_of(other.args) == kind for other in batch)
            enough = len(batch) == 4 or alike
            (left if enough else batch).append(one)
        queue = left
        batch = [one._replace(args=prepare(one.args)[0]) for one in batch]
        for one, ranks in zip(batch, play_brief([(b.args, config) for b in batch], cluster, train)):
            taken = max(rank.reserved for rank in ranks) + beside_allocator(one.args)
            full, kind = taken / cluster.device.memory, kind_of(one.args)
            candidates.append(Candidate(one.args, estimate(one.args, config, cluster, ranks), full))
            more[kind] = full - one.full
            safe[kind] = safe.get(kind, 0) + candidates[-1].safe
        say(f"{len(candidates)} played, {sum(one.full <= 1 for one in candidates)} of them fit")
    return candidates


def what_would_change(tried, best, config, cluster, pieces):
    """Lines: the best layout with more memory, slower links or a larger batch, by formulas."""

    def formulas(args, links=cluster):
        return by_formulas(args, config, links, pieces)

    here = formulas(best.args).step.seconds

    def answer(name, own, others, batches=1):
        """own: the best layout, so changed. Formulas can't tell less than 2% from nothing."""
        first = min(others, key=lambda one: one.step.seconds)
        if first.step.seconds > 0.98 * own.step.seconds:
            first = own
        words = layouts.words(first.args)
        words = "the same layout" if words == layouts.words(best.args) else words
        gain = round(100 * (batches * here / first.step.seconds - 1)) + 0.0
        return f"    {name}: {words}, {gain:+.0f}% tokens/s"

    larger = [one for one in tried if one.full <= 2 * (1 - HEADROOM)]
    found = [answer("twice the memory", formulas(best.args), larger)]
    few = [one.args for one in tried if one.full <= 1 - HEADROOM][:400]
    if report.device_count(best.args) > cluster.node:
        slow = cluster._replace(inter=cluster.inter / 4)
        again = [formulas(args, slow) for args in few]
        found.append(answer("a quarter of --inter", formulas(best.args, slow), again))
    twice = []
    for args in (best.args, *few):
        args = copy.copy(args)
        args.batch, args.microbatches = 2 * args.batch, 2 * args.microbatches
        twice.append(formulas(args))
    return [*found, answer("twice the batch", twice[0], twice, 2)]


def scaling(args, cluster, prepare, train):
    """Print the best safe layout of each number of devices, or why there is none."""
    best = {}
    for gpus in args.gpus:
        try:
            config, _, _, [first, *_] = search(args, gpus, cluster, prepare, train)
            full = f"too full: the fastest layout takes {first.full:.1%} of the memory"
            best[gpus] = first if first.safe else full
        except Refused as problem:
            best[gpus] = str(problem).partition(":")[0]
    if all(isinstance(one, str) for one in best.values()):
        raise Refused(f"{'; '.join(best.values())}: give more --gpus, or another --batch")
    report.print_scaling(args, config, cluster, best)
