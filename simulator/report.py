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
from simulator.estimate import LIKELY, estimate, step_of
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
    days = ""
    if args.tokens:
        days = f", {args.tokens / tokens / 86400:,.1f} days for {args.tokens:.4g} tokens"
    print(f"    {flops:.4g} model FLOPs a step{days}")
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
    tokens = args.islands * args.batch * config.context / (seconds + waits)
    ddp = sum(shape.numel() for shape in shapes.values()) * element
    every_step = formulas.all_reduce_sent(ddp, args.islands) / args.between
    tokens_ddp = args.islands * args.batch * config.context / (seconds + every_step)
    largest = human(max(sizes)).strip()
    print(f"\n  {args.islands} islands, {args.between * 8 / 1e6:,.4g} Mbit/s between them")
    print(f"    largest message of an island {largest}, {max(travel):.4g} s on its way")
    if islands.copies(args) > 1:
        print(f"    {islands.copies(args)} ranks send the same numbers: --zero 1 sends them once")
    print(f"    waiting for messages {waits:.4g} s a step, {waits / (seconds + waits):.1%} of it")
    ddp = f"{tokens_ddp:,.0f} if gradients were summed each step"
    print(f"    together {tokens:,.0f} tokens/s; {ddp}")


# --- more devices


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
    words = layouts.words(args)
    title = f"{args.preset}: {words}, more devices by dp; {device_name(args)}, estimated"
    draw_scaling(args.plot, title, kinds, cluster.device.flops)


def draw_scaling(name, title, kinds, peak):
    """Two bar charts beside each other: weak and strong scaling, with the MFU as a line."""
    plt = harness.pyplot()
    figure, axes = plt.subplots(1, 2, figsize=(12, 4.5), layout="constrained")
    for ax, (kind, steps) in zip(axes, kinds.items()):
        names = [f"{n:,}: {step.seconds:.4g} s" for n, (step, _) in steps.items()]
        bottom = [0.0] * len(steps)
        for part in next(iter(steps.values()))[0].parts:
            heights = [step.parts[part] * scale for step, scale in steps.values()]
            ax.bar(names, heights, 0.8, bottom, label=part)
            bottom = [a + b for a, b in zip(bottom, heights)]
        ax.set_xticks(range(len(names)), names, rotation=45, ha="right", rotation_mode="anchor")
        ax.set(xlabel="devices: a step takes", title=f"{kind} scaling")
        ax.set(ylabel="devices x seconds, a sequence")
        right = ax.twinx()
        right.plot([100 * step.rate / peak for step, _ in steps.values()], "ko-")
        right.set(ylabel="MFU, % (line)", ylim=(0, 100))
    axes[0].legend(fontsize=8)
    figure.suptitle(title)
    harness.save(figure, name)
