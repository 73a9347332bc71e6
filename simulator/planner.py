"""What a layout would take on a described cluster: train.py's --dry-run, --plan, and their report
and picture.

dryrun.py plays some ranks; here their times are put together to a step, and layouts are
searched, by the formulas of rough.py."""

import copy
import itertools
import math
from typing import NamedTuple

import harness
import pipeline
from harness import Refused, large_vocabulary, zero_flags
from harness.presets import parameter_shapes
from proof import ledger
from receipts import diloco, formulas
from receipts import pipeline as schedules
from simulator import timeline
from simulator.devices import cluster_of, usable_memory
from simulator.dryrun import play_all, play_several
from simulator.links import link_of
from simulator.meter import Part
from simulator.rough import rough
from trainer import islands

# Measured time / estimate, of nine in ten of the runs of benchmarks/published.py
LIKELY = 0.87, 1.24
MOST_PIECES = 30_000  # of a step, that a rank plays: each takes milliseconds


def chosen(args):
    """The ranks of --ranks: numbers, or first, middle, last, all, the first rank of such stages."""
    each = args.dp * args.cp * args.tp
    some = args.ranks or ("all" if args.pp <= 4 else "first,middle,last")
    named = {"first": [0], "middle": [args.pp // 2 * each], "last": [(args.pp - 1) * each]}
    named["all"] = [rank * each for rank in range(args.pp)]
    try:
        ranks = [rank for word in some.split(",") for rank in named.get(word) or [int(word)]]
    except ValueError:
        ranks = [-1]
    if not all(0 <= rank < args.pp * each for rank in ranks):
        raise Refused(
            f"--ranks {some}: give first, middle, last, all, or numbers below {args.pp * each}, "
            "with commas between"
        )
    return sorted(set(ranks))


# --- the step


def add_flags(parser):
    g = parser.add_argument_group("without running (see simulator/dryrun.py)")
    why = (
        "play one step of some ranks without memory or network: what they hold, send and, on a "
        "described cluster, take"
    )
    g.add_argument("--dry-run", action="store_true", help=why)
    why = (
        "which: numbers, or first, middle, last, all of the stages (default: all, of more than 4 "
        "first,middle,last)"
    )
    g.add_argument("--ranks", metavar="LIST", help=why)
    why = (
        "h100, h200, a100, b200, or NAME=80GB,989TFLOP/s,3.35TB/s: memory, dense bf16 rate, memory "
        "bandwidth (default: h100)"
    )
    g.add_argument("--gpu", metavar="NAME", help=why)
    g.add_argument("--nodes-of", **harness.POSITIVE, help="devices in a node (default: 8)")
    speed = harness.quantity(harness.SPEED, "50GB/s")
    why = "bandwidth of a device's link inside its node, one way (default: 450GB/s)"
    g.add_argument("--intra", type=speed, metavar="SPEED", help=why)
    why = "bandwidth of a device's link to other nodes, one way (default: 50GB/s)"
    g.add_argument("--inter", type=speed, metavar="SPEED", help=why)
    why = (
        "what large matrix products reach on your devices, if you measured it, such as 650TFLOP/s "
        "(default: by device, see simulator/kernels.py)"
    )
    rate = harness.quantity({"TFLOP/s": 1e12}, "650TFLOP/s")
    g.add_argument("--matmul", type=rate, metavar="RATE", help=why)
    why = "draw one step: NAME.json for ui.perfetto.dev, and with matplotlib NAME.png and NAME.svg"
    g.add_argument("--timeline", metavar="NAME", help=why)
    why = (
        "attention's kernel: FlashAttention 1, 2 or 3, or plain, which holds no less but moves the "
        "scores (default: flash2)"
    )
    g.add_argument("--kernel", choices=["flash1", "flash2", "flash3", "plain"], help=why)
    g.add_argument(
        "--tokens",
        type=harness.real(0),
        metavar="X",
        help="how many days that many tokens take, such as 15e12",
    )
    g.add_argument(
        "--gpus", **harness.POSITIVE, help="devices for --plan (default: those of the layout)"
    )
    why = (
        "search the layouts that fit, choosing --dp to --recompute itself, and say why each loses "
        "to the best"
    )
    g.add_argument("--plan", action="store_true", help=why)


def check_playable(args, config):
    """Refuse a step of so many small pieces that to play it would take minutes."""
    blocks = args.microbatches * -(-config.layers // args.pp)
    tokens = args.batch // args.dp * -(-config.context // args.cp)
    # Of the loss of a whole vocabulary some rows at a time are computed
    pieces = tokens * config.vocab // large_vocabulary.CHUNK if args.tp == 1 else 0
    pieces += -(-config.context // args.cp) // 2**12  # the numbers of positions have values
    if blocks + pieces > MOST_PIECES:
        raise Refused(
            f"a dry run plays each of {args.microbatches:,} micro-batches of "
            f"{tokens // args.microbatches:,} tokens: that is {blocks + pieces:,} pieces of work, "
            f"more than {MOST_PIECES:,}: make --batch, --context or --microbatches smaller"
        )


class Estimate(NamedTuple):
    """Seconds of a step, and of the busiest rank's parts of it, which add up to it; model FLOPs a
    device and second. For a picture: spans of the pipeline's ranks, part_of(action), seconds of a
    message between stages, and the Part after the last action."""

    seconds: float
    parts: dict
    rate: float
    spans: list
    part_of: object
    transfer: float
    rest: Part


def estimate(args, config, cluster, played, sums=None, slower=1.0):
    """The Estimate of a step, from some of its ranks. A stage that none of them played is like the
    nearest that is no end of the model, or else like the first, by its number of layers.

    sums: when the gradients that are on their way are waited for: "each", at the end of the action
    that sends them, as zero.py does, so that the stage before waits too; "last", after the last
    action, as ddp.py does; "after", where they are sent only then. By default as the code that was
    played. slower: how many times as long messages
    between stages take."""
    schedule = pipeline.make(args.schedule, args.pp, args.microbatches, args.chunks)
    last = args.microbatches - 1
    layers = [len(layers) for layers in schedules.stage_layers(config, schedule.last + 1)]
    known = {}  # (stage, kind, whether of the last micro-batch): Part
    for rank in played:
        end = max(action.microbatch for action in rank.actions)
        for action, part in sorted(rank.actions.items(), key=lambda item: item[0].microbatch):
            known[action.stage, action.kind, action.microbatch == end] = part
            # Of a single micro-batch
            known.setdefault((action.stage, action.kind, action.microbatch != end), part)
    stages = sorted({stage for stage, *_ in known})

    def parts(action):
        near = action.stage
        if near not in stages:
            # The head is much work, the embedding is little
            ends = {schedule.last: 2, 0: 1}
            near = min(stages, key=lambda s: (ends.get(s, 0), abs(s - action.stage)))
        found = [
            known.get((near, kind, action.microbatch == last))
            for kind in (action.kind, "I", "W", "B")
        ]
        part, both = found[0], found[1] and found[2]
        # Of a backward in two parts where it was played as one, or the other way round
        if part is None:
            part = (
                Part(*(a + b for a, b in zip(*found[1:3])))
                if both
                else Part(*(a / 2 for a in found[3]))
            )
        return (
            Part(*(a * layers[action.stage] / layers[near] for a in part))
            if near != action.stage
            else part
        )

    each = args.dp * args.cp * args.tp
    message = max(rank.message for rank in played)
    transfer = link_of(cluster, [0, each]).seconds("send", message) * slower if args.pp > 1 else 0.0
    if sums is None:
        plain = args.zero == 0 and args.dtype == args.param_dtype == args.reduce_dtype
        sums = "last" if plain else "each"

    def seconds_of(action):
        part = parts(action)
        return seconds_until(part, sums) + part.waited

    spans = schedules.simulate(schedule, transfer=transfer, time=seconds_of)
    makespan = max(row[-1][1] for row in spans)
    if sums == "last":
        makespan = max(makespan, *(on_their_way(row, parts) for row in spans))
    elif sums == "after":
        makespan += max(sum(parts(action).beside for *_, action in row) for row in spans)
    rest = max((rank.rest for rank in played), key=lambda part: part.seconds)
    busy = max(
        ([parts(action) for *_, action in row] for row in spans),
        key=lambda row: sum(part.seconds for part in row),
    )
    shown = {
        "computing": sum(part.compute for part in busy),
        "waiting for messages": sum(part.waited for part in busy),
    }
    shown["gradients, weights not hidden"] = sum(
        seconds_until(part, sums) - part.compute for part in busy
    )
    bubble = makespan - sum(shown.values())
    shown["pipeline's bubble"] = 0.0 if abs(bubble) < 1e-9 * makespan else bubble  # rounding
    shown["after the last action"] = rest.seconds
    seconds = makespan + rest.seconds
    flops = config.flops_per_token() * args.batch * config.context
    rate = flops / seconds / (each * args.pp)
    return Estimate(seconds, shown, rate, spans, parts, transfer, rest)


def seconds_until(part, sums):
    """Seconds of an action's computing, and of the messages beside it that it waits for."""
    if sums == "after":
        return part.compute
    return part.slowed if sums == "last" else part.seconds - part.waited


def on_their_way(row, parts):
    """When the last message that a rank sends beside its actions is there. They go one by one."""
    end = 0.0
    for start, _, action in row:
        end = max(end, start) + parts(action).beside
    return end


def step_of(args, config, cluster, train, sums=None, slower=1.0):
    """The Estimate of a layout, from two micro-batches of its first, middle and last stage; and
    what these ranks played. sums, slower: see `estimate`."""
    each = args.dp * args.cp * args.tp
    played = play_all(
        args, sorted({0, args.pp // 2 * each, (args.pp - 1) * each}), cluster, train, brief=True
    )
    return estimate(args, config, cluster, played, sums, slower), played


def main(args, prepare, train):
    """A dry run from train.py's flags. prepare(args) and train(run): train.py's own."""
    harness.check_plot(args)
    cluster, args = cluster_of(args), copy.copy(args)
    args.backend = args.backend or ("gloo" if args.device == "cpu" else "nccl")
    if args.plan:
        return plan(args, cluster, prepare, train)
    args, config = prepare(args)
    check_playable(args, config)
    if args.plot:
        return plot(args, config, cluster, train)
    played = play_all(args, chosen(args), cluster, train)
    step = estimate(args, config, cluster, played)
    report(args, config, cluster, played, step)
    if args.timeline:
        schedule = pipeline.make(args.schedule, args.pp, args.microbatches, args.chunks)
        title = f"{layout(args)}, {device_name(args)}: {step.seconds:.4g} s, estimated"
        timeline.write(args.timeline, step, schedule, title)
    report_islands(args, config, step.seconds)


def report_islands(args, config, seconds):
    """Print what the slow link between islands adds to a step of `seconds` seconds."""
    if args.islands == 1 or not args.between:
        return
    shapes, element = parameter_shapes(config), max(4, harness.DTYPES[args.dtype].itemsize)
    sizes = []
    for names in islands.parts_of(args, config)[0]:
        numbers = sum(islands.copies(args, name) * shapes[name].numel() for name in names)
        sizes.append(diloco.message_bytes(numbers, args.outer_bits, element))
    # An island's ranks send their message and receive those of all other islands
    travel = [(args.islands - 1) * size / args.between for size in sizes]
    waits = sum(max(0.0, t - args.stream_delay * seconds) for t in travel) / args.sync_every
    waits = max(waits, sum(travel) / args.sync_every - seconds)  # the link is never idle
    tokens = args.islands * args.batch * config.context / (seconds + waits)
    ddp = sum(shape.numel() for shape in shapes.values()) * element
    every_step = formulas.all_reduce_sent(ddp, args.islands) / args.between
    tokens_ddp = args.islands * args.batch * config.context / (seconds + every_step)
    largest = ledger.human(max(sizes)).strip()
    print(f"\n  {args.islands} islands, {args.between * 8 / 1e6:,.4g} Mbit/s between them")
    print(f"    largest message of an island {largest}, {max(travel):.4g} s on its way")
    if islands.copies(args) > 1:
        print(f"    {islands.copies(args)} ranks send the same numbers: --zero 1 sends them once")
    print(f"    waiting for messages {waits:.4g} s a step, {waits / (seconds + waits):.1%} of it")
    print(
        f"    together {tokens:,.0f} tokens/s; {tokens_ddp:,.0f} if gradients were summed each step"
    )


def report(args, config, cluster, played, step):
    """Print what the ranks held and sent, and the step's estimate."""
    world, device = args.dp * args.cp * args.tp * args.pp, device_name(args)
    schedule = pipeline.make(args.schedule, args.pp, args.microbatches, args.chunks)
    layers = schedules.stage_layers(config, schedule.last + 1)
    human, kinds = (
        ledger.human,
        ("parameters", "gradients", "optimizer", "gathered", "activations_peak"),
    )
    print(
        f"dry run: {harness.parameter_count(config):,} parameters, {layout(args)}, "
        f"{args.microbatches} micro-batches: {world:,} ranks"
    )
    print(
        f"weights in {args.param_dtype}, gradients summed in {args.reduce_dtype}, optimizer in "
        f"{args.dtype}{' on the host' if args.offload else ''}\n"
    )
    heads = ("weights", "gradients", "optimizer", "gathered", "activations", "at the peak", "FLOPs")
    print(
        f"  {'rank':>6s}{'stage: layers':>20s}{'parameters':>17s}"
        + "".join(f"{head:>13s}" for head in heads)
    )
    for rank in played:
        stages = " ".join(f"{s}: {layers[s].start}-{layers[s].stop - 1}" for s in rank.stages)
        cells = "".join(
            f" {human(size)}" for size in (*(rank.held[kind] for kind in kinds), rank.memory)
        )
        fits = (
            f"fits {device}"
            if rank.memory <= usable_memory(args, cluster)
            else f"too much for {device}"
        )
        print(
            f"  {rank.rank:6d}{stages:>20s}{rank.parameters:17,}{cells}{rank.flops:13.4g}  {fits}"
        )
    print(
        "\n  sent a step, on a ring (calls)"
        + "".join(f"{f'rank {rank.rank}':>22s}" for rank in played)
    )
    for op, group in sorted({key for rank in played for key in rank.sent}):
        rows = [rank.sent.get((op, group), (0, 0, 0.0)) for rank in played]
        if any(wire for *_, wire in rows):
            print(
                f"  {f'{op} in {group}':<30s}"
                + "".join(f"{f'{human(wire)} ({calls})':>22s}" for calls, _, wire in rows)
            )
    where = (
        f"nodes of {cluster.node}, {cluster.intra / 1e9:g} GB/s inside, {cluster.inter / 1e9:g} "
        "GB/s between"
    )
    print(f"\n  a step on {device}, {where}")
    for name, seconds in step.parts.items():
        print(f"    {name:<30s}{seconds:10.4g} s{seconds / step.seconds:8.1%}")
    tokens = args.batch * config.context / step.seconds
    rate = f"{step.rate / 1e12:.0f} TFLOP/s a device, MFU {step.rate / cluster.device.flops:.1%}"
    print(f"    {'together':<30s}{step.seconds:10.4g} s   {rate}, {tokens:,.0f} tokens/s")
    print(f"    {'nine runs in ten':<30s}{interval(step.seconds)}")
    cost = world * 1e6 / tokens
    print(f"    {tokens * 86400:.4g} tokens a day, {cost:.4g} device-seconds a million tokens")
    days = (
        f", {args.tokens / tokens / 86400:,.1f} days for {args.tokens:.4g} tokens"
        if args.tokens
        else ""
    )
    print(
        f"    {config.flops_per_token() * args.batch * config.context:.4g} model FLOPs a step{days}"
    )
    if args.offload:
        print("    not in it: the copies to the host and back, and the host's slower optimizer")


def interval(seconds):
    """The time of a step between bounds: the errors of nine published runs in ten were within."""
    low, high = (seconds * factor for factor in LIKELY)
    return f"{low:10.4g} to {high:.4g} s, by the errors beside published runs"


def layout(args):
    """A layout in words."""
    text = " ".join(
        f"{axis} {getattr(args, axis)}"
        for axis in ("dp", "cp", "tp", "pp", "ep")
        if getattr(args, axis) > 1
    )
    text += " sp" * args.sp + f" zero {args.zero}" * (args.zero > 0)
    text += f" in groups of {args.zero_ranks}" if args.zero_ranks else ""
    text += " offload" * args.offload
    text += f" recompute {args.recompute}" * (args.recompute != "none")
    text += f" {args.schedule}{f' x {args.chunks}' if args.chunks else ''}" * (args.pp > 1)
    return text.strip() or "one device"


def device_name(args):
    return (args.gpu or "h100").split("=")[0]


# --- which layout


def candidates(args, config, gpus):
    """Layouts of so many devices that train.py can run, as copies of args."""

    def divisors(n, most):
        return [d for d in range(1, min(n, most) + 1) if n % d == 0]

    schedules = [("1f1b", 1), ("interleaved", 2), ("interleaved", 4), ("zb-h1", 1)]
    kinds = [kind for kind in harness.RECOMPUTATIONS if not (kind == "half" and args.compile)]
    for tp in divisors(gpus, 32):
        for pp, cp in itertools.product(divisors(gpus // tp, 64), (1, 2, 4, 8, 16)):
            dp, rest = divmod(gpus, tp * pp * cp)
            if (
                rest
                or config.kv_heads % tp
                or config.context % (2 * cp * tp)
                or args.batch % dp
                or dp * cp % args.ep
            ):
                continue
            for (schedule, chunks), rows in itertools.product(
                schedules if pp > 1 else schedules[:1], (1, 2, 4)
            ):
                m, rest = divmod(args.batch // dp, rows)
                if (
                    rest
                    or not m
                    or config.layers < pp * chunks
                    or chunks > 1
                    and m % pp
                    or pp > 1
                    and m < pp
                ):
                    continue
                sizes = dict(
                    dp=dp,
                    cp=cp,
                    tp=tp,
                    pp=pp,
                    sp=tp > 1,
                    microbatches=m,
                    schedule=schedule,
                    prove=0,
                )
                sizes["chunks"] = chunks if chunks > 1 else None
                splits = zero_splits(args, dp * cp, tp)
                for split, recompute in itertools.product(splits, kinds):
                    one = copy.copy(args)
                    stage, ranks = split
                    vars(one).update(sizes | {"zero": stage, "zero_ranks": ranks})
                    one.recompute = recompute
                    yield one


def zero_splits(args, ranks, tp):
    """(stage, --zero-ranks) to try on so many data-parallel ranks: all of them, or those of a node.
    With --zero-ranks that size alone."""
    node, rest = divmod(args.nodes_of or 8, tp)
    sizes = [None]
    if args.zero_ranks:
        sizes = [args.zero_ranks]
    elif not rest and 1 < node < ranks:
        sizes.append(node)
    found = [] if args.zero_ranks else [(0, None)]
    for stage, size in itertools.product((1, 2, 3), sizes):
        fits = size is None or ranks % size == 0 and (size % args.ep == 0 or args.ep % size == 0)
        if ranks > 1 and fits:
            found.append((stage, size))
    return found


def no_layout(args, config, gpus):
    """The sentence for a number of devices that the batch can't be dealt out over."""

    def works(batch, gpus):
        one = copy.copy(args)
        one.batch = batch
        return any(True for _ in candidates(one, config, gpus))

    sentence = f"no layout of {gpus:,} devices suits --batch {args.batch:,} and this model"
    fewer = [n for n in range(min(gpus - 1, 4096), 0, -1) if works(args.batch, n)][:3]
    multiples = (-(-args.batch // gpus), args.batch // gpus, 1, 2, 4)
    batches = [k * gpus for k in multiples if k > 0 and k * gpus <= 10**18]
    batches = [batch for batch in batches if works(batch, gpus)]
    hints = []
    if batches:
        hints.append(f"--batch {batches[0]}")
    if fewer:
        hints.append(f"--gpus {', '.join(map(str, fewer))}")
    return f"{sentence}: {' or '.join(hints) or 'change --batch, --gpus or the heads'}"


def plan(args, cluster, prepare, train):
    """Search the layouts of --gpus devices by `rough`, print the ten best, and play the best that
    truly fits."""
    gpus = args.gpus or args.dp * args.cp * args.tp * args.pp
    zero_flags.check_ranks("--zero-ranks", args.zero_ranks, gpus, f"{gpus:,} devices", 1, "--zero")
    alone = copy.copy(args)  # one device: of it the model and the dtypes are taken
    vars(alone).update(
        dp=1,
        cp=1,
        tp=1,
        pp=1,
        ep=1,
        zero=0,
        microbatches=1,
        schedule="1f1b",
        chunks=None,
        cp_rings=None,
        zero_ranks=None,
    )
    vars(alone).update(sp=False, gather_again=False, keep_gathered=False, reduce_once=False)
    settled, config = prepare(alone)
    args.param_dtype, args.reduce_dtype, args.shape = (
        settled.param_dtype,
        settled.reduce_dtype,
        settled.shape,
    )
    tried = [
        (sum(parts.values()), parts, held, one)
        for one in candidates(args, config, gpus)
        for parts, held in [rough(one, config, cluster)]
    ]
    if not tried:
        raise Refused(no_layout(args, config, gpus))
    fitting = sorted(
        (row for row in tried if row[2] <= usable_memory(row[3], cluster)), key=lambda row: row[0]
    )
    if not fitting:
        raise Refused(
            f"none of {len(tried)} layouts on {gpus} devices fits {cluster.device.memory / 1e9:g} "
            "GB: give more --gpus"
        )
    print(
        f"{len(tried)} layouts of {gpus:,} devices, of which {len(fitting)} may fit; by formulas, "
        "without some memory:\n"
    )
    best = fitting[0]
    for i, (seconds, parts, held, one) in enumerate(fitting[:10]):
        worse = max(parts, key=lambda key: parts[key] - best[1][key])
        where = " (tp across nodes)" * (worse == "tensor parallel" and one.tp > cluster.node)
        loss = (parts[worse] - best[1][worse]) / best[0]
        why = (
            (f"{worse} +{loss:.0%}{where}" if loss >= 0.005 else "as fast, by formulas")
            if i
            else "the best"
        )
        rows = f"{one.batch // one.dp // one.microbatches} a micro-batch"
        print(f"  {i + 1:2d}  {seconds:9.4g} s {held / 1e9:7.1f} GB   {layout(one)}, {rows}: {why}")
    played = play_best(fitting, config, cluster, prepare, train)
    if not any(layout.fits for layout in played):
        print(
            "\n  none of these fits when played, which counts what the formulas leave out: lower "
            "--batch, or give more --gpus"
        )
        return
    print("\n  played, the best first:\n")
    for text in compare(played, config, cluster):
        print(f"  {text}")
    best = min((one for one in played if one.fits), key=lambda one: one.step.seconds)
    report_islands(best.args, config, best.step.seconds)


class Candidate(NamedTuple):
    """A layout that was played: its flags, Estimate, ranks, bytes of the fullest, and whether these
    fit a device beside nccl's communicators and the CUDA context."""

    args: object
    step: Estimate
    played: list
    held: float
    fits: bool


def play_best(fitting, config, cluster, prepare, train, wanted=5, most=6):
    """Play layouts in the order of `rough` until `wanted` fit, or `most` are played."""
    candidates = []
    left_out = 0.0  # bytes: the least that formulas have left out of what was played
    alike = set()  # layouts as fast and as large by formulas: one of them is enough
    queue = []
    for seconds, _, formula, one in fitting:
        if (seconds, formula) not in alike:
            queue.append((formula, one))
        alike.add((seconds, formula))
    while queue and len(candidates) < most:
        missing = wanted - sum(candidate.fits for candidate in candidates)
        batch = []
        while queue and len(batch) < min(missing, most - len(candidates)):
            formula, one = queue.pop(0)
            if formula + left_out <= usable_memory(one, cluster):
                batch.append((formula, prepare(one)[0]))
        if not batch:
            break
        jobs = []
        for _, one in batch:
            few = copy.copy(one)  # enough micro-batches for as many in flight as in the whole
            few.microbatches = min(one.microbatches, 2 * one.pp)
            few.batch = one.batch // one.microbatches * few.microbatches
            check_playable(few, config)
            each = one.dp * one.cp * one.tp
            jobs.append((few, sorted({0, (one.pp - 1) * each})))
        for (formula, one), ranks in zip(batch, play_several(jobs, cluster, train)):
            held = max(rank.memory for rank in ranks)
            fits = held <= usable_memory(one, cluster)
            step = estimate(one, config, cluster, ranks)
            candidates.append(Candidate(one, step, ranks, held, fits))
            if not fits:
                left_out = min(left_out or math.inf, held - formula)
    return candidates


def compare(candidates, config, cluster):
    """A line for each: the time, the memory, and what would have to change for the next to win."""
    order = sorted(candidates, key=lambda c: (not c.fits, c.step.seconds))
    for i, candidate in enumerate(order):
        one, step = candidate.args, candidate.step
        figures = f"{step.seconds:9.4g} s  MFU {step.rate / cluster.device.flops:5.1%}"
        rows = f"{one.batch // one.dp // one.microbatches} a micro-batch"
        text = f"{i + 1}  {figures}  {candidate.held / 1e9:6.1f} GB   {layout(one)}, {rows}"
        if not candidate.fits:
            need = candidate.held + cluster.device.memory - usable_memory(one, cluster)
            text += f": too much, it needs devices of {need / 1e9:.0f} GB"
        elif i + 1 < len(order) and order[i + 1].fits:
            text += f": {what_would_change(candidate, order[i + 1], config, cluster)}"
        yield text


def what_would_change(candidate, rival, config, cluster):
    """What would have to change for the rival to be the faster one."""
    for factor in (1.25, 1.5, 2, 3, 4, 8):
        for scale, word in ((1 / factor, "fast"), (factor, "slow")):
            times = []
            for c in (candidate, rival):
                ranks = [slower(rank, scale) for rank in c.played]
                times.append(estimate(c.args, config, cluster, ranks, slower=scale).seconds)
            if times[1] < times[0]:
                return f"the next wins if messages are {factor:g} times as {word}"
    more = rival.step.parts["computing"] - candidate.step.parts["computing"]
    more /= candidate.step.seconds
    if more >= 0.005:
        return f"the next computes {more:.0%} longer, whatever the messages take"
    return "the next loses, whatever the messages take"


def slower(rank, scale):
    """What a rank played, with messages that take so many times as long."""

    def scaled(part):
        return Part(part.compute, scale * part.beside, scale * part.waited)

    actions = {action: scaled(part) for action, part in rank.actions.items()}
    return rank._replace(actions=actions, rest=scaled(rank.rest))


def plot(args, config, cluster, train, sizes=tuple(2**k for k in range(3, 15))):
    """Step time, its parts and MFU from 8 to 16,384 devices, as a picture: the layout with more
    data-parallel ranks. weak: each rank brings as many sequences. strong: all share one batch, of
    one micro-batch for each of the most ranks."""
    each, rows = args.cp * args.tp * args.pp, args.batch // args.dp // args.microbatches
    kinds = {"weak": {}, "strong": {}}  # {devices: (Estimate, devices a sequence)}
    for n in sizes:
        if n % each:
            continue
        one, count = copy.copy(args), {"weak": args.microbatches, "strong": sizes[-1] // n}
        one.dp = n // each
        one.batch = one.dp * args.microbatches * rows
        _, played = step_of(one, config, cluster, train)
        line = f"{n:6,} devices:"
        for kind, steps in kinds.items():
            one.microbatches, one.batch = count[kind], one.dp * count[kind] * rows
            step = estimate(one, config, cluster, played)
            steps[n] = step, n / one.batch
            line += f" {kind} {step.seconds:9.4g} s, MFU {step.rate / cluster.device.flops:5.1%};"
        print(line.rstrip(";"), flush=True)
    title = f"{args.preset}: {layout(args)}, more devices by dp; {device_name(args)}, estimated"
    draw_scaling(args.plot, title, kinds, cluster.device.flops)


def draw_scaling(name, title, kinds, peak):
    """Two bar charts beside each other: weak and strong scaling, with the MFU as a line."""
    plt = harness.pyplot()
    figure, axes = plt.subplots(1, 2, figsize=(12, 4.5), layout="constrained")
    colors = dict(zip(next(iter(kinds["weak"].values()))[0].parts, plt.cm.tab10.colors))
    legend = {}

    def seconds(step):
        return f"{step.seconds:,.0f}" if step.seconds >= 1000 else f"{step.seconds:.3g}"

    for ax, (kind, steps) in zip(axes, kinds.items()):
        names = [f"{n:,}: {seconds(step)} s" for n, (step, _) in steps.items()]
        bottom = [0.0] * len(steps)
        for part, color in colors.items():
            heights = [step.parts[part] * scale for step, scale in steps.values()]
            if max(heights) > 1e-6 * max(bottom):  # without a pipeline there is no bubble
                bars = ax.bar(names, heights, 0.8, bottom, color=color)
                bottom = [a + b for a, b in zip(bottom, heights)]
                legend[part] = bars
        ax.set_xticks(range(len(names)), names, rotation=45, ha="right", rotation_mode="anchor")
        ax.set(xlabel="devices: a step takes", title=f"{kind} scaling")
        ax.set(ylabel="devices x seconds, a sequence")
        right = ax.twinx()
        rates = [100 * step.rate / peak for step, _ in steps.values()]
        [legend["MFU"]] = right.plot(range(len(steps)), rates, "ko-")
        right.set(ylabel="MFU, %", ylim=(0, 100))
    place = dict(fontsize=8, loc="outside lower center", ncols=6, frameon=False)
    figure.legend(list(legend.values()), list(legend), **place)
    figure.suptitle(title)
    harness.save(figure, name)
