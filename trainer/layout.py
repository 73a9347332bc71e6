"""The layout of train.py's ranks: its flags, what follows from them, layouts that do not exist, and
the positions of a sequence that a rank holds."""

import contextlib
import copy
import math

import torch
import torch.distributed as dist

import dualpipe
import harness
import packed_documents
import tensor_parallel
from harness import Refused, documents, zero_flags
from receipts import context_parallel as long_context
from receipts import expert_parallel as experts
from receipts import pipeline as schedules
from trainer import context, pretrained, recording, sampling, saving, tokenizer, tracking

# Flags that take a number: 1 by default, or what follows from others
ONES = {
    "dp": "data parallel: N copies share the batch",
    "tp": "tensor parallel: each layer is cut N ways; keep it inside a node",
    "pp": "pipeline parallel: N stages of consecutive layers",
    "cp": "context parallel: each sequence is split over N ranks",
    "ep": "expert parallel: N of the dp x cp ranks deal the --experts out, in the place of copies",
    "expert-chunks": "pieces of a rank's tokens for experts: one travels while another computes",
}
COUNTS = {
    "cp-rings": "ranks of a ring, for ring-ulysses (default: the most square)",
    "chunks": "stages a rank holds, for --schedule interleaved (default: 2)",
    "microbatches": "pieces of a replica's rows: more shrink the bubble (default: up to 2 x pp)",
}
SWITCHES = {
    "sp": "sequence parallel: tensor-parallel ranks split the tokens between layers, to hold less",
    "fold-experts": "with --sp: --ep is a part of dp x cp x tp, whose ranks have whole experts",
    "gather-again": "with --sp: hold still less, and send a quarter more",
    "compile": "torch.compile each block: slow to start (and needs a C++ compiler), faster then",
}


def add_flags(parser):
    g = parser.add_argument_group("the layout (ranks = islands x dp x cp x tp x pp)")
    for name, why in ONES.items():
        g.add_argument(f"--{name}", **harness.POSITIVE, default=1, help=why)
    for name, why in COUNTS.items():
        g.add_argument(f"--{name}", **harness.POSITIVE, help=why)
    for name, why in SWITCHES.items():
        g.add_argument(f"--{name}", action="store_true", help=why)
    why = "how attention sees the whole sequence"
    g.add_argument("--cp-kind", choices=context.KINDS, default="ring", help=why)
    why = "order of the micro-batches in a pipeline. zb-v pays for more than --pp of them"
    g.add_argument("--schedule", choices=list(schedules.SCHEDULES), default="1f1b", help=why)
    why = "what replicas split: 1 optimizer states, 2 gradients too, 3 weights too (FSDP)"
    g.add_argument("--zero", type=int, choices=range(4), default=0, help=why)
    zero_flags.add_flags(g, bucket_mb=25, ranks_flag="--zero-ranks")
    why = "master weights and optimizer states in the host's memory"
    g.add_argument("--offload", action="store_true", help=why)
    why = "run norms and GELU again in backward, half of the products too, or all: to hold less"
    g.add_argument("--recompute", choices=harness.RECOMPUTATIONS, default="none", help=why)
    g = parser.add_argument_group("the loop")
    documents.add_flag(g)
    why = "sgd shows a gradient of the wrong scale; muon: matrices whole (muon.py), with --zero 1"
    g.add_argument("--optimizer", choices=["adamw", "sgd", "muon"], default="adamw", help=why)
    why = "where the cosine ends (default: lr / 10)"
    g.add_argument("--min-lr", type=harness.real(0), metavar="X", help=why)
    why = "leave out up to N steps with a loss or gradient that is not finite; else the run ends"
    g.add_argument("--skip-nan", **harness.NATURAL, default=0, help=why)
    why = "how far a bias on the router's choice moves towards even load after a step; 0 = off"
    g.add_argument("--bias-rate", type=harness.real(0), default=0.0, metavar="X", help=why)
    why = "compare the first N steps with one process (default: 3 below 20M parameters, else 0)"
    g.add_argument("--prove", **harness.NATURAL, help=why)


def prepare(args):
    """(a copy of the flags, with what follows from others filled in; the model's Config). Refuses
    what does not fit, before any process is started."""
    args = copy.copy(args)
    args.shape = pretrained.shape_of(args)
    args.tokenizer = tokenizer.choose(args)
    if args.tokenizer == "none":
        args.sample = 0  # nobody knows what the tokens say
    config = harness.configure(args)
    if args.microbatches is None:
        args.microbatches = default_microbatches(args)
    args.param_dtype = args.param_dtype or args.dtype
    args.reduce_dtype = args.reduce_dtype or args.param_dtype
    if args.optimizer == "muon" and args.zero == 0:
        args.zero = 1  # its owners split the states
    if args.prove is None:
        args.prove = 3 if harness.parameter_count(config) < 20e6 else 0
    check(args, config)
    return args, config


def default_microbatches(args):
    """The largest number up to 2 x pp (1 without a pipeline) that divides a replica's rows and
    suits the schedule. If there is none, the smallest above."""
    rows = max(args.batch // args.dp, 1)
    most = 2 * args.pp if args.pp > 1 else 1
    divisors = [m for m in range(1, min(rows, 10_000) + 1) if rows % m == 0]
    for m in sorted(divisors, key=lambda m: (m > most, abs(m - most))):
        with contextlib.suppress(ValueError):
            schedules.make_row(args.schedule, 0, args.pp, m)
            return m
    why = f"no number of micro-batches that divides --batch {args.batch} / --dp {args.dp} suits it"
    raise Refused(f"--schedule {args.schedule}: {why}; --batch {args.dp * most} does")


def check(args, config):
    """Refuse a layout that does not exist for these sizes, and flags that mean nothing."""
    with harness.refusing():
        tensor_parallel.check_heads(config, args.tp)
        cp_shape(args, config.heads // args.tp)
    harness.check_batch(args, args.dp)  # before a schedule of that many is made
    schedules.check_schedule(args, config, args.pp)
    ranks, where = args.dp * args.cp, f"the {args.dp * args.cp} ranks of --dp x --cp"
    zero_flags.check_types(args)
    zero_flags.check_ranks("--zero-ranks", args.zero_ranks, ranks, where, args.zero)
    check_experts(args, config)
    check_pairs(args, config)
    check_needed(args)
    if args.min_lr is not None and args.min_lr > args.lr:
        raise Refused(f"--min-lr {args.min_lr:g} is above --lr {args.lr:g}: give at most that")
    if args.documents:
        documents.separator(args.documents, args.tokenizer)  # is there one?
    for part in (saving, sampling, tracking, recording):
        part.check(args)
    pretrained.check(args, config)


def check_pairs(args, config):
    """Refuse flags that do not go together."""
    lonely = "leave one of them out"
    one_dtype = args.dtype == args.param_dtype == args.reduce_dtype
    half = args.compile and args.recompute == "half"
    muon, several = args.optimizer == "muon", args.islands > 1
    gather = args.documents and args.cp_kind == "gather"
    # Of 128 numbers that share a scale, ranks of an island may have some each
    blocks_are_cut = several and args.outer_bits in (8, 4)
    blocks_are_cut = blocks_are_cut and args.dp * args.cp * args.tp * args.pp > 1
    for given, one, other, why in (
        (args.compile and config.experts, "--compile", "--experts", "its code is for one shape"),
        (half, "--compile", "--recompute half", "use --recompute selective or block"),
        (args.documents and args.compile, "--documents", "--compile", "its code is for one shape"),
        (args.documents and args.record, "--documents", "--record", lonely),
        (gather, "--documents", "--cp-kind gather", "each rank uses other keys: use ring"),
        (args.documents and args.dry_run, "--documents", "--dry-run", "it reads no text"),
        (args.documents and args.plan, "--documents", "--plan", "it reads no text"),
        (muon and args.zero > 1, f"--zero {args.zero}", "--optimizer muon", "use --zero 1"),
        (muon and args.zero_ranks, "--zero-ranks", "--optimizer muon", lonely),
        (muon and args.offload, "--offload", "--optimizer muon", lonely),
        (muon and not one_dtype, "mixed precision", "--optimizer muon", "use --dtype alone"),
        (several and args.bias_rate, "--bias-rate", "--islands", "nobody averages these biases"),
        (several and args.only_sample, "--only-sample", "--islands", "leave --islands out"),
        (blocks_are_cut, "--outer-bits 8 or 4", "islands of several ranks", "use 16"),
        (several and args.record, "--record", "--islands", lonely),
    ):
        if given:
            raise Refused(f"{one} does not go with {other}: {why}")


def check_experts(args, config):
    """Refuse what does not go with experts."""
    if args.ep > 1 and config.experts < args.ep:
        hint = f"--experts {args.ep} or more" if config.experts else "--experts, or leave --ep out"
        have = f"--ep {args.ep} with {config.experts} experts"
        raise Refused(f"{have}: each rank needs one; use {hint}")
    experts.check_chunks("--expert-chunks", args.expert_chunks, args, config)
    ranks = experts.ranks_of(args)
    if ranks % args.ep:
        where = f"the {ranks} ranks of --dp x --cp" + (" x --tp" if args.fold_experts else "")
        raise Refused(f"--ep {args.ep} does not divide {where}, where experts live")
    group = (args.zero_ranks or ranks) * ranks // (args.dp * args.cp)
    if group % args.ep and args.ep % group:
        why = "a group must have as many copies of each expert"
        advice = f"use --zero-ranks {args.ep}, or a multiple or divisor of it"
        raise Refused(f"--zero-ranks {args.zero_ranks} with --ep {args.ep}: {why}; {advice}")
    unit = token_unit(args)
    if config.experts and config.context % unit:
        what = f"--context {config.context} must be a multiple of {unit}"
        raise Refused(f"experts take no padding: {what}")


def check_needed(args):
    """Refuse flags that mean nothing without another one."""
    several = "sync_every outer_lr outer_momentum stream stream_delay outer_bits"
    simulation = "tokens gpu nodes_of intra inter matmul kernel"
    for names, is_there, what in (
        ("cp_rings", args.cp_kind == "ring-ulysses", "--cp-kind ring-ulysses"),
        ("sp", args.tp > 1, "--tp 2 or more"),
        ("gather_again", args.sp, "--sp"),
        ("fold_experts", args.sp and min(args.tp, args.ep) > 1, "--sp, --tp and --ep"),
        ("keep_gathered", args.zero == 3, "--zero 3"),
        ("reduce_once", args.zero >= 2, "--zero 2 or 3"),
        ("export_dtype", args.export, "--export"),
        ("gpus", args.plan, "--plan"),
        (several, args.islands > 1, "--islands 2 or more"),
        (simulation, args.dry_run or args.plan, "--dry-run"),
    ):
        for name in names.split():
            if getattr(args, name) not in (None, False) and not is_there:
                flag = f"--{name.replace('_', '-')}"
                raise Refused(f"{flag} means nothing without {what}: add that, or leave it out")


def schedule_of(args):
    """The pipeline's schedule. FSDP can't run pairs: it looks one unit ahead, not two."""
    schedule = schedules.find_schedule(args.schedule, args.pp, args.microbatches, args.chunks)
    pairs = args.schedule == "dualpipev" and args.zero < 3
    return dualpipe.PairedSchedule(schedule.rows) if pairs else schedule


def open_groups(groups, device):
    """Send a first message in each group. nccl connects its ranks then, and waits for the device:
    which must not be within a pipeline's step."""
    one_by_one = [group for group in groups.values() if isinstance(group, dist.ProcessGroup)]
    harness.sum_over(one_by_one, torch.zeros(1, device=device))


def cp_shape(args, heads=0):
    """The context-parallel ranks as ring x ulysses. Raises ValueError where these do not fit."""
    return long_context.grid(args.cp_kind, args.cp, args.cp_rings, heads)


def padded(length, args):
    """The length of a sequence with its padding."""
    return length + -length % token_unit(args)


def token_unit(args):
    """What a sequence is padded to a multiple of: context parallelism deals out chunks of one size,
    sequence parallelism splits each rank's tokens evenly."""
    chunks = args.cp
    if args.cp > 1 and args.cp_kind != "ulysses":  # a rank of a ring has several
        chunks *= packed_documents.DocumentRing.chunks if args.documents else 2
    return math.lcm(chunks, args.cp * args.tp if args.sp else 1)
