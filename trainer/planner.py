"""What a layout would take on a described cluster: train.py's --dry-run, --plan, and their report
and picture.

dryrun.py plays some ranks; here their times are put together to a step, and layouts are
searched."""

import copy
import itertools
import math
from typing import NamedTuple

import harness
import pipeline
from harness import Refused, formulas, large_vocabulary, ledger, schedules
from trainer import islands
from trainer.devices import ALPHA, EFFICIENCY, cluster_of, usable_memory
from trainer.dryrun import play_all
from trainer.meter import Part

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
    g = parser.add_argument_group("without running (see trainer/dryrun.py)")
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


def check(args):
    """Refuse flags that mean nothing without a dry run."""
    if not args.plan and args.gpus:
        raise Refused("--gpus means nothing without --plan: add that, or leave it out")
    for name in ("tokens", "ranks", "gpu", "nodes_of", "intra", "inter"):
        if getattr(args, name) is not None and not (args.dry_run or args.plan):
            raise Refused(
                f"--{name.replace('_', '-')} means nothing without --dry-run: add that, or leave "
                "it out"
            )


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
    device and second."""

    seconds: float
    parts: dict
    rate: float


def estimate(args, config, cluster, played):
    """The Estimate of a step, from some of its ranks. A stage that none of them played is like the
    nearest that is no end of the model, by its number of layers."""
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
            near = min(stages, key=lambda s: (s in (0, schedule.last), abs(s - action.stage)))
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
    alpha, speed = cluster.link([0, each])
    message = max(rank.message for rank in played)
    # ddp.py waits for the network after the last action, zero.py at the end of it: the stage before
    # waits too
    late = args.zero == 0 and args.dtype == args.param_dtype == args.reduce_dtype

    def seconds_of(action):
        part = parts(action)
        return part.compute + part.waited if late else part.seconds

    spans = schedules.simulate(schedule, transfer=alpha + message / speed, time=seconds_of)
    over = [
        sum(max(0.0, part.beside - part.compute) for *_, a in row for part in [parts(a)]) * late
        for row in spans
    ]
    makespan = max(row[-1][1] + more for row, more in zip(spans, over))
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
        max(0, part.beside - part.compute) for part in busy
    )
    shown["pipeline's bubble"] = makespan - sum(shown.values())
    shown["after the last action"] = rest.seconds
    seconds = makespan + rest.seconds
    flops = config.flops_per_token() * args.batch * config.context
    return Estimate(seconds, shown, flops / seconds / (each * args.pp))


def step_of(args, config, cluster, train):
    """The Estimate of a layout, from two micro-batches of its first, middle and last stage; and
    what these ranks played."""
    each = args.dp * args.cp * args.tp
    played = play_all(
        args, sorted({0, args.pp // 2 * each, (args.pp - 1) * each}), cluster, train, brief=True
    )
    return estimate(args, config, cluster, played), played


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
    islands.report(args, config, step.seconds)


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
    links = (
        f"nodes of {cluster.node}, {cluster.intra / 1e9:g} GB/s inside, {cluster.inter / 1e9:g} "
        "GB/s between"
    )
    print(f"\n  a step on {device}, {links}, all at {EFFICIENCY:.0%}")
    for name, seconds in step.parts.items():
        print(f"    {name:<30s}{seconds:10.4g} s{seconds / step.seconds:8.1%}")
    tokens = args.batch * config.context / step.seconds
    rate = f"{step.rate / 1e12:.0f} TFLOP/s a device, MFU {step.rate / cluster.device.flops:.1%}"
    print(f"    {'together':<30s}{step.seconds:10.4g} s   {rate}, {tokens:,.0f} tokens/s")
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
    return (
        text + f" {args.schedule}{f' x {args.chunks}' if args.chunks else ''}" * (args.pp > 1)
        or "one device"
    )


def device_name(args):
    return (args.gpu or "h100").split("=")[0]


# --- which layout


def candidates(args, config, gpus):
    """Layouts of so many devices that train.py can run, as copies of args."""

    def divisors(n, most):
        return [d for d in range(1, min(n, most) + 1) if n % d == 0]

    schedules = [("1f1b", 1), ("interleaved", 2), ("interleaved", 4), ("zb-h1", 1)]
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
                for split, recompute in itertools.product(splits, ("none", "selective", "block")):
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


def rough(args, config, cluster):
    """({part of a step: seconds}, bytes held by the first stage), by the papers' formulas: good
    enough to choose by."""
    dp, cp, tp, pp, m = args.dp, args.cp, args.tp, args.pp, args.microbatches
    e, reduced, master = (
        harness.DTYPES[d].itemsize for d in (args.param_dtype, args.reduce_dtype, args.dtype)
    )
    chunks, layers, rows, length = (
        args.chunks or 1,
        -(-config.layers // pp),
        args.batch // dp,
        config.context // cp,
    )
    speed = {"tp": cluster.link(range(tp))[1], "pp": cluster.link([0, dp * cp * tp])[1]}
    split = args.zero_ranks or dp * cp
    speed |= {
        "cp": cluster.link(range(0, cp * tp, tp))[1],
        "inside": cluster.link(range(0, split * tp, tp))[1],
        "across": cluster.link(range(0, dp * cp * tp, split * tp))[1],
    }
    again = 1 / 3 if args.recompute == "block" else 0.0
    rate, memory = cluster.device.flops * EFFICIENCY * 2 / e, cluster.device.bandwidth * EFFICIENCY
    attention = 6 * layers * config.context * config.width * rows * length / tp / rate
    work = config.flops_per_token() * rows * length / tp / pp / rate - attention

    def kept(recompute):
        """Bytes of a block for backward, of all micro-batches."""
        size = harness.activation_bytes(config, 1, e, 1 if args.sp else tp, recompute) / (
            tp if args.sp else 1
        )
        return size / config.context * rows * length

    whole = kept("none")
    size = formulas.parameters_held(config, tp, layers, head=pp == 1)
    # Activations and their gradients written and read, twice with what is not kept; gradients
    # written, read and added up
    work = (work + 8 * layers * whole / memory) * (1 + again) + (
        args.recompute == "selective"
    ) * layers * whole / memory
    parts = {"computing": work + m * size * (2 * e + 2 * reduced) / memory}
    parts["tensor parallel"] = (
        formulas.tensor_parallel_sent(
            config, tp, rows * length, e, layers, recompute=args.recompute
        )
        / speed["tp"]
    )
    heads = config.heads // tp, config.kv_heads // tp, config.width // config.heads
    ring = formulas.context_parallel_sent("ring", cp, 1, rows, length, *heads, e)
    parts["context parallel"] = max(0.0, layers * sum(ring.values()) / speed["cp"] - attention) * (
        cp > 1
    )
    third = sum(parts.values()) / m / 3
    parts["bubble"] = schedules.BUBBLES[args.schedule][1](pp, m, chunks, third, third, third)
    message = (
        rows / m * length * config.width * e / (tp if args.sp else 1) / speed["pp"] + ALPHA["inter"]
    )
    parts["messages between stages"] = 2 * chunks * (m + pp) * message * (pp > 1)
    r, passes = ledger.all_but_one(split), m if args.zero > 1 and not args.reduce_once else 1
    weights = r * size * e * (0, 1, 1, 2 * m)[args.zero] / speed["inside"]
    gradients = r * size * reduced * (passes if args.zero else 2) / speed["inside"]
    sums = formulas.all_reduce_sent(size / split * reduced, dp * cp // split)
    gradients += sums / speed["across"]
    # All of it beside computing; else gradients beside the backwards that complete them
    if args.zero == 3:
        parts["data parallel"] = max(0.0, weights + gradients - 3 * third * m)
    else:
        parts["data parallel"] = max(0.0, gradients - 2 * third * passes) + weights
    states = formulas.model_states(
        args.zero, split, e, reduced, 2 * master + (e != master) * master
    )
    if args.offload:
        states = states[:2]
    flying = min(m, pp + (pp - 1) / chunks * (chunks > 1)) if pp > 1 else 1
    held = (layers * flying * kept(args.recompute) + (args.recompute != "none") * whole) / m
    # Logits, in 32 bits, and their gradient
    held += (whole / m + 10 * rows / m * length * config.vocab / tp) * (pp == 1)
    gathered = 2 * size * e / layers * (args.zero == 3)
    # At the optimizer's step no activations are left, but gradients in the masters' dtype are there
    # too
    copied = (reduced != master) * master * size / (split if args.zero else 1)
    if args.offload:
        copied = 0
    return parts, sum(states) * size + max(held + gathered, copied)


def plan(args, cluster, prepare, train):
    """Search the layouts of --gpus devices by `rough`, print the ten best, and play the best that
    truly fits."""
    gpus = args.gpus or args.dp * args.cp * args.tp * args.pp
    if args.zero_ranks and gpus % args.zero_ranks:
        raise Refused(f"--zero-ranks {args.zero_ranks} does not divide {gpus:,} devices")
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
    print()
    left_out, plays = 0.0, 0  # bytes: the least that formulas have left out of what was played
    for _, _, formula, one in fitting:
        if formula + left_out > usable_memory(one, cluster):
            continue
        if (plays := plays + 1) > 6:
            break
        one, _ = prepare(one)
        few = copy.copy(one)  # enough micro-batches for as many in flight as there are in the whole
        few.microbatches = min(one.microbatches, 2 * one.pp)
        few.batch = one.batch // one.microbatches * few.microbatches
        played = play_all(few, chosen(few), cluster, train)
        step, held = estimate(one, config, cluster, played), max(rank.memory for rank in played)
        fits = held <= usable_memory(one, cluster)
        rate = f"{step.seconds:.4g} s, MFU {step.rate / cluster.device.flops:.1%}"
        print(f"  played, {layout(one)}: {rate}, {held / 1e9:.1f} GB{'' if fits else ': too much'}")
        if fits:
            return islands.report(args, config, step.seconds)
        left_out = min(left_out or math.inf, held - formula)
    print(
        "  none of these fits when played, which counts what the formulas leave out: lower "
        "--batch, or give more --gpus"
    )


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
    for ax, (kind, steps) in zip(axes, kinds.items()):
        bottom = [0.0] * len(steps)
        for part, color in colors.items():
            heights = [step.parts[part] * scale for step, scale in steps.values()]
            if max(heights) > 1e-6 * max(bottom):  # without a pipeline there is no bubble
                bars = ax.bar([f"{n:,}" for n in steps], heights, 0.8, bottom, color=color)
                bottom = [a + b for a, b in zip(bottom, heights)]
                legend[part] = bars
        style = dict(ha="center", va="bottom", rotation=90, color="white", fontsize=8)
        for i, (step, _) in enumerate(steps.values()):
            text = f"{step.seconds:,.3g} s" if step.seconds < 1000 else f"{step.seconds:,.0f} s"
            ax.text(i, 0.02 * max(bottom), text, **style)
        ax.tick_params(axis="x", rotation=45)
        ax.set(xlabel="devices", title=f"{kind} scaling")
        ax.set(ylabel="devices x seconds, a sequence (in a bar: a step)")
        right = ax.twinx()
        rates = [100 * step.rate / peak for step, _ in steps.values()]
        [legend["MFU"]] = right.plot(range(len(steps)), rates, "ko-")
        right.set(ylabel="MFU, %", ylim=(0, 100 * EFFICIENCY))
    place = dict(fontsize=8, loc="outside lower center", ncols=6, frameon=False)
    figure.legend(list(legend.values()), list(legend), **place)
    figure.suptitle(title)
    harness.save(figure, name)
