"""What a dry run prints: the table of what ranks hold and send, and the step's estimate. What a
plan prints: its table and the commands, and how a job scales."""

import math

import harness
from proof.ledger import human
from receipts import pipeline as schedules
from simulator import layouts
from simulator.devices import HEADROOM, beside_allocator
from simulator.estimate import LIKELY

HEADS = ("weights", "gradients", "optimizer", "gathered", "activations", "at the peak", "FLOPs")
HELD = ("parameters", "gradients", "optimizer", "gathered", "activations_peak")


def report(args, config, cluster, played, step):
    """Print what the ranks held and sent, and the step's estimate."""
    world = device_count(args)
    host = " on the host" if args.offload else ""
    print(
        f"dry run: {harness.parameter_count(config):,} parameters, {layouts.words(args)}, "
        f"{args.microbatches} micro-batches: {world:,} ranks\n"
        f"weights in {args.param_dtype}, gradients summed in {args.reduce_dtype}, optimizer in "
        f"{args.dtype}{host}\n"
    )
    print_held(args, config, cluster, played)
    print_sent(played)
    too_full = any(one.reserved + beside_allocator(args) > cluster.device.memory for one in played)
    print_step(args, config, cluster, step, too_full)


def print_held(args, config, cluster, played):
    schedule = schedules.find_schedule(args.schedule, args.pp, args.microbatches, args.chunks)
    layers = schedules.stage_layers(config, schedule.last + 1)
    device, beside = device_name(args), beside_allocator(args)
    heads = "".join(f"{head:>13s}" for head in HEADS)
    print(f"  {'rank':>6s}{'stage: layers':>20s}{'parameters':>17s}{heads}")
    for rank in played:
        stages = " ".join(f"{s}: {layers[s].start}-{layers[s].stop - 1}" for s in rank.stages)
        sizes = [rank.held[kind] for kind in HELD] + [rank.memory]
        cells = "".join(f" {human(size)}" for size in sizes)
        row = f"{rank.rank:6d}{stages:>20s} {rank.parameters:16,}{cells} {rank.flops:12.4g}"
        taken = rank.reserved + beside  # with what the allocator, nccl and CUDA take
        verdict = "fits" if taken <= cluster.device.memory else "too much for"
        full = f"{taken / 1e9:.2f} of {cluster.device.memory / 1e9:g} GB"
        print(f"  {row}  {full}: {verdict} {device}")


def print_sent(played):
    ranks = "".join(f"{f'rank {rank.rank}':>22s}" for rank in played)
    print(f"\n  sent a step, on a ring (calls){ranks}")
    for op, group in sorted({key for rank in played for key in rank.sent}):
        rows = [rank.sent.get((op, group), (0, 0, 0.0)) for rank in played]
        if any(wire for *_, wire in rows):
            cells = "".join(f"{f'{human(wire)} ({calls})':>22s}" for calls, _, wire in rows)
            print(f"  {f'{op} in {group}':<30s}{cells}")


def print_step(args, config, cluster, step, too_full):
    device = f"{device_name(args)}, if it had the memory" if too_full else device_name(args)
    print(f"\n  a step on {device}, {links_of(args, cluster)}")
    for name, seconds in step.parts.items():
        print(f"    {name:<30s}{seconds:10.4g} s{seconds / step.seconds:8.1%}")
    tokens = args.batch * config.context / step.seconds
    rate = f"{step.rate / 1e12:.0f} TFLOP/s a device, MFU {step.rate / cluster.device.flops:.1%}"
    print(f"    {'together':<30s}{step.seconds:10.4g} s   {rate}, {tokens:,.0f} tokens/s")
    low, high = (step.seconds * factor for factor in LIKELY)
    likely = f"{low:10.4g} to {high:.4g} s, by the errors beside published runs"
    print(f"    {'nine runs in ten':<30s}{likely}")
    cost = device_count(args) * 1e6 / tokens
    print(f"    {tokens * 86400:.4g} tokens a day, {cost:.4g} device-seconds a million tokens")
    if args.tokens:
        print(f"    {days(args, config, step.seconds)} for {args.tokens:.4g} tokens")
    if args.offload:
        print("    not in it: the copies to the host and back, and the host's slower optimizer")


def device_name(args):
    return (args.gpu or "h100").split("=")[0].lower()


def days(args, config, seconds):
    """The days or hours that --tokens take in steps of so many seconds, and the interval."""
    took = args.tokens / (args.batch * config.context) * seconds / 86400
    took, unit = (took, "days") if took >= 1 else (24 * took, "hours")
    each = [f"{x:,.0f}" if x >= 100 else f"{x:.3g}" for x in (took, *(took * f for f in LIKELY))]
    return f"{each[0]} {unit} ({each[1]} to {each[2]})"


# --- a plan

# A part of a step: what is said of a layout that loses by it
WHY = {
    "computing": "smaller products, or more of them",
    "waiting for messages": "waits for messages of --tp, --cp or --ep",
    "gradients, weights not hidden": "gradients and weights on their way are not hidden",
    "pipeline's bubble": "the pipeline's bubble",
    "after the last action": "norm, optimizer and new weights after the last backward",
}


def print_plan(config, rows, cluster):
    """Print the Candidates as a table, the best first; then their commands."""
    args = rows[0].args
    gpus, device, tokens = device_count(args), device_name(args), args.batch * config.context
    print(
        f"{harness.parameter_count(config):,} parameters in {args.param_dtype}, gradients summed "
        f"in {args.reduce_dtype}, {args.batch:,} x {config.context:,} = {tokens:,} tokens a step\n"
        f"{gpus:,} x {device} of {cluster.device.memory / 1e9:g} GB, {links_of(args, cluster)}\n"
    )
    cells = [cells_of(one, config, cluster) for one in rows]
    width = max(map(len, cells))
    print(f"     {head(args)}")
    for i, one in enumerate(rows):
        why = f"  {why_it_loses(one, rows[0])}" if i else ""
        print(f"  {i + 1:2d} {cells[i]:<{width}s}{why}".rstrip())
    if rows[0].safe:
        print(f"\n  1 is the fastest that leaves {HEADROOM:.0%} of the memory free. To run each:")
    else:
        print(f"\n  none leaves {HEADROOM:.0%} of the memory free: an allocator may need that")
    for i, one in enumerate(rows):
        print(f"  {i + 1}:  {command(one.args, config, cluster)}")


def head(args):
    """Over what `cells_of` gives."""
    took = f"  {'for all tokens':<28s}" if args.tokens else ""
    return f"{'s a step (9 of 10 runs)':<25s} {'MFU':>6s} {'memory':>7s}{took}  layout"


def cells_of(one, config, cluster):
    """A Candidate in a row."""
    args, seconds = one.args, one.step.seconds
    low, high = (seconds * factor for factor in LIKELY)
    step = f"{seconds:.4g} ({low:.3g} to {high:.3g})"
    rate = one.step.rate / cluster.device.flops
    took = f"  {days(args, config, seconds):<28s}" if args.tokens else ""
    rows = args.batch // args.dp // args.microbatches
    layout = f"{layouts.words(args)}, micro-batches of {rows}"
    return f"{step:<25s} {rate:6.1%} {one.full:7.1%}{took}  {layout}"


def device_count(args):
    return args.dp * args.cp * args.tp * args.pp


def links_of(args, cluster):
    inside, between = cluster.intra / 1e9, cluster.inter / 1e9
    usual = "" if args.intra or args.inter else " (usual ones: --intra, --inter set yours)"
    return f"nodes of {cluster.node}, {inside:g} GB/s inside, {between:g} GB/s between{usual}"


def why_it_loses(one, best):
    """In which part of a step a layout loses most to the best."""
    if best.safe and not one.safe and one.step.seconds < best.step.seconds:
        return "faster, but too full"
    ours, others = one.step.parts, best.step.parts
    worst = max(ours, key=lambda part: ours[part] - others[part])
    lost = f"{one.step.seconds / best.step.seconds - 1:+.0%}: {WHY[worst]}"
    if worst == "computing" and one.args.recompute != best.args.recompute:
        lost = lost.replace(WHY[worst], "blocks run again in backward")
    return lost if one.safe else f"{lost}; too full"


# What a command says of the model, of numbers, and of the layout; what it need not say
MODEL = "preset family init_from layers heads kv_heads width hidden context vocab experts top_k "
MODEL += "shared dropout optimizer batch dtype param_dtype reduce_dtype compile offload islands "
LAYOUT = "dp cp tp pp ep sp fold_experts zero zero_ranks recompute microbatches schedule chunks"
USUAL = dict.fromkeys(("dp", "cp", "tp", "pp", "ep", "islands"), 1)
USUAL |= dict(preset="tiny", optimizer="adamw", dtype="float32", recompute="none", schedule="1f1b")


def command(args, config, cluster):
    """The command that trains in a layout."""
    nodes = -(-device_count(args) // cluster.node)
    each = device_count(args) // nodes
    words = [f"torchrun --nnodes={nodes} --nproc_per_node={each}"]
    if nodes > 1:
        words.append("--rdzv-backend=c10d --rdzv-endpoint=FIRST_HOST:29500")
    words.append("train.py")
    usual = USUAL | {"reduce_dtype": args.param_dtype}
    for name in (MODEL + LAYOUT).split():
        value = getattr(args, name)
        if value in (usual.get(name), None, False) or value == 0 and name != "experts":
            continue
        flag = f"--{name.replace('_', '-')}"
        words.append(flag if value is True else f"{flag} {value}")
    if args.tokens:
        words.append(f"--steps {math.ceil(args.tokens / (args.batch * config.context))}")
    return " ".join(words)


def print_scaling(args, config, cluster, best):
    """Print a row for each number of devices. best: {devices: Candidate, or why there is none}."""
    print(f"  {'devices':>7s} {'tokens/s a device':>18s}  {head(args)}")
    for gpus, one in best.items():
        row = one
        if not isinstance(one, str):
            each = args.batch * config.context / one.step.seconds / gpus
            row = f"{each:17,.0f}  {cells_of(one, config, cluster)}"
        print(f"  {gpus:7,}  {row}")
    print("\n  one number of --gpus prints the layouts that lose too, and the command of each")
