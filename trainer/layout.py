"""What train.py's flags mean together: defaults that follow from other flags, layouts that do not
exist, and the positions of a sequence that a rank holds."""

import contextlib
import copy
import math
import os
import shutil

import context_parallel
import harness
import pipeline
import tensor_parallel
from harness import Refused, memory, tokenizer, zero_flags
from receipts import context_parallel as long_context
from receipts import expert_parallel as experts
from receipts import pipeline as schedules
from trainer import islands, pretrained, recording, sampling, saving, tracking


def prepare(args):
    """(a copy of the flags, with what follows from others filled in; the model's Config). Refuses
    what does not fit, before any process is started."""
    args = copy.copy(args)
    args.shape = pretrained.shape_of(args) or saving.shape_of(args)
    if args.shape:
        pretrained.check_family(args)
    args.tokenizer = tokenizer.choose(args)
    config = harness.configure(args)
    check_memory(args, config)
    if args.microbatches is None:
        args.microbatches = default_microbatches(args)
    args.param_dtype = args.param_dtype or args.dtype
    args.reduce_dtype = args.reduce_dtype or args.param_dtype
    if args.prove is None:
        args.prove = 3 if harness.parameter_count(config) < 20e6 else 0
    check(args, config)
    return args, config


def check_memory(args, config):
    """Refuse what this machine can't hold, before anything is made. A dry run takes no memory for
    tensors, but some for each rank's number."""
    world = args.dp * args.cp * args.tp * args.pp
    if args.dry_run or args.plan:
        memory.check_sizes(args, config)
        memory.check_numbers(world)
        return
    copies = 1
    if args.ep == 1:
        copies = args.dp * args.cp // (args.zero_ranks or (args.dp * args.cp if args.zero else 1))
    memory.check(args, world, copies)


def default_microbatches(args):
    """The largest number up to 2 x pp (1 without a pipeline) that divides a replica's rows and
    suits the schedule. If there is none, the smallest above."""
    rows = max(args.batch // args.dp, 1)
    most = 2 * args.pp if args.pp > 1 else 1
    divisors = [m for m in range(1, min(rows, 10_000) + 1) if rows % m == 0]
    for m in sorted(divisors, key=lambda m: (m > most, abs(m - most))):
        with contextlib.suppress(ValueError):
            pipeline.SCHEDULES[args.schedule](0, args.pp, m)
            return m
    why = f"no number of micro-batches that divides --batch {args.batch} / --dp {args.dp} suits it"
    raise Refused(f"--schedule {args.schedule}: {why}; --batch {args.dp * most} does")


def check(args, config):
    """Refuse a layout that does not exist for these sizes, and flags that mean nothing."""
    with harness.refusing():
        tensor_parallel.check_heads(config, args.tp)
        cp_shape(args, config.heads // args.tp)
    schedules.of_flags(pipeline.make, args, config, args.pp)
    harness.check_batch(args, args.dp)
    ranks, where = args.dp * args.cp, f"the {args.dp * args.cp} ranks of --dp x --cp"
    zero_flags.check_ranks("--zero-ranks", args.zero_ranks, ranks, where, args.zero, "--zero")
    check_experts(args, config, where)
    check_compile(args, config)
    check_needed(args)
    for part in (saving, sampling, tracking, islands):
        part.check(args)
    pretrained.check(args, config)
    recording.check(args, config)


def check_experts(args, config, where):
    """Refuse what does not go with experts. where: the data-parallel ranks in words."""
    if args.ep > 1 and config.experts < args.ep:
        hint = f"--experts {args.ep} or more" if config.experts else "--experts, or leave --ep out"
        have = f"--ep {args.ep} with {config.experts} experts"
        raise Refused(f"{have}: each rank needs one; use {hint}")
    experts.check_chunks("--expert-chunks", args.expert_chunks, args, config)
    if args.dp * args.cp % args.ep:
        raise Refused(f"--ep {args.ep} does not divide {where}, where experts live")
    if args.zero_ranks and args.zero_ranks % args.ep and args.ep % args.zero_ranks:
        why = "a group must have as many copies of each expert"
        advice = f"use --zero-ranks {args.ep}, or a multiple or divisor of it"
        raise Refused(f"--zero-ranks {args.zero_ranks} with --ep {args.ep}: {why}; {advice}")
    length = places_held(args, config.context)
    if config.experts and (length * args.cp != config.context or args.sp and length % args.tp):
        chunks = 2 * args.cp if is_zigzag(args) else args.cp
        unit = math.lcm(chunks, args.cp * args.tp if args.sp else 1)
        what = f"--context {config.context} must be a multiple of {unit}"
        raise Refused(f"experts take no padding: {what}")


def check_compile(args, config):
    """Refuse what does not go with --compile."""
    if not args.compile:
        return
    compilers = (os.environ.get("CXX", "g++"), "g++", "clang++")
    if not (args.dry_run or args.plan or any(map(shutil.which, compilers))):
        raise Refused("--compile needs a C++ compiler: install g++, or leave --compile out")
    if config.experts:
        why = "whose shapes change every step"
        raise Refused(f"--compile does not go with --experts, {why}: leave one of them out")
    if args.recompute == "half":
        why = "compiled code overwrites results that should be kept"
        advice = "use --recompute selective or block, or leave --compile out"
        raise Refused(f"--compile does not go with --recompute half: {why}; {advice}")


def check_needed(args):
    """Refuse flags that mean nothing without another one."""
    simulation = "tokens ranks gpu nodes_of intra inter matmul kernel timeline"
    for names, is_there, what in (
        ("cp_rings", args.cp_kind == "ring-ulysses", "--cp-kind ring-ulysses"),
        ("gather_again", args.sp, "--sp"),
        ("keep_gathered", args.zero == 3, "--zero 3"),
        ("reduce_once", args.zero >= 2, "--zero 2 or 3"),
        ("export_dtype", args.export, "--export"),
        ("record_tensors", args.record, "--record FOLDER"),
        ("profile", args.profile_to, "--profile-to FOLDER"),
        ("profile_to", args.profile, "--profile STEPS"),
        ("gpus", args.plan, "--plan"),
        (simulation, args.dry_run or args.plan, "--dry-run"),
    ):
        for name in names.split():
            if getattr(args, name) not in (None, False) and not is_there:
                flag = f"--{name.replace('_', '-')}"
                raise Refused(f"{flag} means nothing without {what}: add that, or leave it out")


def cp_shape(args, heads=0):
    """The context-parallel ranks as ring x ulysses. Raises ValueError where these do not fit."""
    return long_context.grid(args.cp_kind, args.cp, args.cp_rings, heads)


def is_zigzag(args):
    """Whether a rank of n holds chunks i and 2 n - 1 - i, so that causal work is even."""
    return args.cp > 1 and args.cp_kind != "ulysses"


def places_held(args, length):
    """How many positions `places` gives, which takes memory for them."""
    ring, ulysses = cp_shape(args)
    chunks = 2 * ring if is_zigzag(args) else ring
    return -(-length // (chunks * ulysses)) * chunks // ring


def places(args, length, rank):
    """The positions of a sequence that a context-parallel rank holds, padding at the end."""
    zigzag = is_zigzag(args)
    return context_parallel.positions(length, rank, *cp_shape(args), zigzag)
