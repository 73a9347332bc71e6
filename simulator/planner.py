"""The search of --plan: layouts are ranked by the formulas of rough.py, and the best are played."""

import copy
import math
from typing import NamedTuple

from harness import Refused, zero_flags
from simulator import layouts, report
from simulator.devices import usable_memory
from simulator.dryrun import check_counts, check_playable, first_ranks, play_all
from simulator.estimate import Estimate, estimate
from simulator.rough import rough

# Of a plan's layouts one device is the beginning: of it the model and the dtypes are taken
ONE_DEVICE = dict(dp=1, cp=1, tp=1, pp=1, ep=1, zero=0, microbatches=1, schedule="1f1b")
ONE_DEVICE |= dict(chunks=None, cp_rings=None, zero_ranks=None, sp=False)
ONE_DEVICE |= dict(gather_again=False, keep_gathered=False, reduce_once=False)


class Candidate(NamedTuple):
    """A layout: its flags, the Estimate of its step, bytes of the fullest rank, and whether these
    fit a device beside nccl's communicators and the CUDA context. By formulas, or played."""

    args: object
    step: Estimate
    held: float
    fits: bool


def plan(args, cluster, prepare, train):
    """Search the layouts of --gpus devices, print the ten best by formulas, and play the best that
    truly fit."""
    gpus = args.gpus or args.dp * args.cp * args.tp * args.pp
    check_counts(gpus)
    zero_flags.check_ranks("--zero-ranks", args.zero_ranks, gpus, f"{gpus:,} devices", 1)
    alone = copy.copy(args)
    vars(alone).update(ONE_DEVICE)
    settled, config = prepare(alone)
    for name in ("param_dtype", "reduce_dtype", "shape"):
        setattr(args, name, getattr(settled, name))
    tried = []
    for layout in layouts.candidates(args, config, gpus):
        parts, held = rough(layout, config, cluster)
        step, fits = Estimate(sum(parts.values()), parts, 0.0), usable_memory(layout, cluster)
        tried.append(Candidate(layout, step, held, held <= fits))
    if not tried:
        what = f"no layout of {gpus:,} devices suits --batch {args.batch:,} and this model"
        raise Refused(f"{what}: change --batch, --gpus or the heads")
    fitting = [one for one in tried if one.fits]
    if not fitting:
        what = f"none of {len(tried)} layouts on {gpus} devices fits"
        raise Refused(f"{what} {cluster.device.memory / 1e9:g} GB: give more --gpus")
    fitting.sort(key=lambda one: one.step.seconds)
    found = f"{len(tried)} layouts of {gpus:,} devices, of which {len(fitting)} may fit"
    print(f"{found}; by formulas, without some memory:\n")
    for i, one in enumerate(fitting[:10]):
        figures = f"{one.step.seconds:9.4g} s {one.held / 1e9:7.1f} GB"
        why = why_it_loses(one, fitting[0], cluster) if i else "the best"
        print(f"  {i + 1:2d}  {figures}   {described(one.args)}: {why}")
    played = play_best(fitting, config, cluster, prepare, train)
    best = played[0]
    if not best.fits:
        what = "none of these fits when played, which counts what the formulas leave out"
        print(f"\n  {what}: lower --batch, or give more --gpus")
        return
    print("\n  played, the best first:\n")
    for i, one in enumerate(played):
        figures = f"{one.step.seconds:9.4g} s  MFU {one.step.rate / cluster.device.flops:5.1%}"
        too_much = ""
        if not one.fits:
            taken = cluster.device.memory - usable_memory(one.args, cluster)
            too_much = f": too much, it needs devices of {(one.held + taken) / 1e9:.0f} GB"
        print(f"  {i + 1}  {figures}  {one.held / 1e9:6.1f} GB   {described(one.args)}{too_much}")
    report.islands_wait(best.args, config, best.step.seconds)


def described(args):
    rows = args.batch // args.dp // args.microbatches
    return f"{layouts.words(args)}, {rows} a micro-batch"


def why_it_loses(one, best, cluster):
    """In which part of a step a layout loses most to the best, by formulas."""
    ours, others = one.step.parts, best.step.parts
    worst = max(ours, key=lambda part: ours[part] - others[part])
    loss = (ours[worst] - others[worst]) / best.step.seconds
    if loss < 0.005:
        return "as fast, by formulas"
    across = worst == "tensor parallel" and one.args.tp > cluster.node
    return f"{worst} +{loss:.0%}{' (tp across nodes)' if across else ''}"


# --- the best, played


def play_best(fitting, config, cluster, prepare, train, wanted=5, most=6):
    """The Candidates, the best first, of layouts that are played in the order of their formulas,
    until `wanted` fit, or `most` are played."""
    candidates = []
    left_out = 0.0  # bytes: the least that formulas have left out of what was played
    different = {}
    for one in fitting:  # of layouts as fast and as large by formulas one is enough
        different.setdefault((one.step.seconds, one.held), one)
    queue = list(different.values())
    while len(candidates) < most:
        missing = wanted - sum(candidate.fits for candidate in candidates)
        batch = []
        while queue and len(batch) < min(missing, most - len(candidates)):
            one = queue.pop(0)
            if one.held + left_out <= usable_memory(one.args, cluster):
                batch.append(one._replace(args=prepare(one.args)[0]))
        if not batch:
            break
        ends = [first_ranks(one.args, (0, one.args.pp - 1)) for one in batch]
        jobs = [few_microbatches(one.args, config) for one in batch]
        for one, ranks in zip(batch, play_all(list(zip(jobs, ends)), cluster, train)):
            held = max(rank.memory for rank in ranks)
            fits = held <= usable_memory(one.args, cluster)
            step = estimate(one.args, config, cluster, ranks)
            candidates.append(Candidate(one.args, step, held, fits))
            if not fits:
                left_out = min(left_out or math.inf, held - one.held)
    return sorted(candidates, key=lambda one: (not one.fits, one.step.seconds))


def few_microbatches(args, config):
    """The flags with enough micro-batches for as many in flight as in the whole step."""
    few = copy.copy(args)
    few.microbatches = min(args.microbatches, 2 * args.pp)
    few.batch = args.batch // args.microbatches * few.microbatches
    check_playable(few, config)
    return few
