"""What a dry run prints: the table of what ranks hold and send, the step's estimate, and a picture
of how a layout scales."""

import copy

import harness
import zero_bubble
from harness.presets import parameter_shapes
from proof.ledger import human
from receipts import diloco, formulas
from receipts import pipeline as schedules
from simulator import layouts
from simulator.devices import usable_memory
from simulator.estimate import LIKELY, step_of
from trainer import islands

HEADS = ("weights", "gradients", "optimizer", "gathered", "activations", "at the peak", "FLOPs")
HELD = ("parameters", "gradients", "optimizer", "gathered", "activations_peak")


def report(args, config, cluster, played, step):
    """Print what the ranks held and sent, and the step's estimate."""
    world = args.dp * args.cp * args.tp * args.pp
    host = " on the host" if args.offload else ""
    print(
        f"dry run: {harness.parameter_count(config):,} parameters, {layouts.words(args)}, "
        f"{args.microbatches} micro-batches: {world:,} ranks\n"
        f"weights in {args.param_dtype}, gradients summed in {args.reduce_dtype}, optimizer in "
        f"{args.dtype}{host}\n"
    )
    print_held(args, config, cluster, played)
    print_sent(played)
    print_step(args, config, cluster, step, world)


def print_held(args, config, cluster, played):
    schedule = zero_bubble.find_schedule(args.schedule, args.pp, args.microbatches, args.chunks)
    layers = schedules.stage_layers(config, schedule.last + 1)
    device, usable = device_name(args), usable_memory(args, cluster)
    heads = "".join(f"{head:>13s}" for head in HEADS)
    print(f"  {'rank':>6s}{'stage: layers':>20s}{'parameters':>17s}{heads}")
    for rank in played:
        stages = " ".join(f"{s}: {layers[s].start}-{layers[s].stop - 1}" for s in rank.stages)
        sizes = [rank.held[kind] for kind in HELD] + [rank.memory]
        cells = "".join(f" {human(size)}" for size in sizes)
        fits = f"fits {device}" if rank.memory <= usable else f"too much for {device}"
        row = f"{rank.rank:6d}{stages:>20s}{rank.parameters:17,}{cells}{rank.flops:13.4g}"
        print(f"  {row}  {fits}")


def print_sent(played):
    ranks = "".join(f"{f'rank {rank.rank}':>22s}" for rank in played)
    print(f"\n  sent a step, on a ring (calls){ranks}")
    for op, group in sorted({key for rank in played for key in rank.sent}):
        rows = [rank.sent.get((op, group), (0, 0, 0.0)) for rank in played]
        if any(wire for *_, wire in rows):
            cells = "".join(f"{f'{human(wire)} ({calls})':>22s}" for calls, _, wire in rows)
            print(f"  {f'{op} in {group}':<30s}{cells}")


def print_step(args, config, cluster, step, world):
    links = f"{cluster.intra / 1e9:g} GB/s inside, {cluster.inter / 1e9:g} GB/s between"
    print(f"\n  a step on {device_name(args)}, nodes of {cluster.node}, {links}")
    for name, seconds in step.parts.items():
        print(f"    {name:<30s}{seconds:10.4g} s{seconds / step.seconds:8.1%}")
    tokens = args.batch * config.context / step.seconds
    rate = f"{step.rate / 1e12:.0f} TFLOP/s a device, MFU {step.rate / cluster.device.flops:.1%}"
    print(f"    {'together':<30s}{step.seconds:10.4g} s   {rate}, {tokens:,.0f} tokens/s")
    low, high = (step.seconds * factor for factor in LIKELY)
    likely = f"{low:10.4g} to {high:.4g} s, by the errors beside published runs"
    print(f"    {'nine runs in ten':<30s}{likely}")
    cost = world * 1e6 / tokens
    print(f"    {tokens * 86400:.4g} tokens a day, {cost:.4g} device-seconds a million tokens")
    flops = formulas.flops_per_token(config) * args.batch * config.context
    print(f"    {flops:.4g} model FLOPs a step")
    if args.tokens:
        print(f"    {args.tokens / tokens / 86400:,.1f} days for {args.tokens:.4g} tokens")
    if args.offload:
        print("    not in it: the copies to the host and back, and the host's slower optimizer")


def device_name(args):
    return (args.gpu or "h100").split("=")[0]


def islands_wait(args, config, seconds):
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
    tokens = args.islands * args.batch * config.context
    gradients = sum(shape.numel() for shape in shapes.values()) * element
    every_step = formulas.all_reduce_sent(gradients, args.islands) / args.between
    largest = human(max(sizes)).strip()
    print(f"\n  {args.islands} islands, {args.between * 8 / 1e6:,.4g} Mbit/s between them")
    print(f"    largest message of an island {largest}, {max(travel):.4g} s on its way")
    if islands.copies(args) > 1:
        print(f"    {islands.copies(args)} ranks send the same numbers: --zero 1 sends them once")
    print(f"    waiting for messages {waits:.4g} s a step, {waits / (seconds + waits):.1%} of it")
    ddp = f"{tokens / (seconds + every_step):,.0f} if gradients were summed each step"
    print(f"    together {tokens / (seconds + waits):,.0f} tokens/s; {ddp}")


# --- more devices


def plot(args, config, cluster, train, sizes=tuple(2**k for k in range(3, 15))):
    """Step time, its parts and MFU from 8 to 16,384 devices, as a picture: the layout with more
    data-parallel ranks, each of which brings as many sequences."""
    each, steps = args.cp * args.tp * args.pp, {}  # steps: {devices: Estimate}
    for n in sizes:
        if n % each:
            continue
        one = copy.copy(args)
        one.dp = n // each
        one.batch = args.batch // args.dp * one.dp
        steps[n], _ = step_of(one, config, cluster, train)
        mfu = steps[n].rate / cluster.device.flops
        print(f"{n:6,} devices: {steps[n].seconds:9.4g} s, MFU {mfu:5.1%}", flush=True)
    figure, axes = harness.pyplot().subplots(figsize=(7, 4.5), layout="constrained")
    names, bottom = [f"{n:,}" for n in steps], [0.0] * len(steps)
    for part in next(iter(steps.values())).parts:
        heights = [step.parts[part] for step in steps.values()]
        axes.bar(names, heights, 0.8, bottom, label=part)
        bottom = [a + b for a, b in zip(bottom, heights)]
    axes.set_xticks(range(len(names)), names, rotation=45, ha="right", rotation_mode="anchor")
    axes.set(xlabel="devices", ylabel="seconds a step")
    axes.legend(fontsize=8)
    right = axes.twinx()
    right.plot([100 * step.rate / cluster.device.flops for step in steps.values()], "ko-")
    right.set(ylabel="MFU, % (line)", ylim=(0, 100))
    more = "more devices by dp, each with as many sequences"
    figure.suptitle(f"{args.preset}: {layouts.words(args)}, {more}; {device_name(args)}, estimated")
    harness.save(figure, args.plot)
