"""What islands are worth on slow links, and what they cost: python -m benchmarks.slow_links

    --links     tokens/s of islands beside data parallelism, on two hosts: network namespaces, whose
                link `tc tbf` limits (root; iproute2). The link's own counter counts the bytes
    --price     the validation loss after the same tokens, for ddp.py and for islands, all played by
                one process (receipts/diloco.py: train.py's receipt shows that it is the same)

Without either it does both. --plot NAME draws the price.
"""

import contextlib
import copy
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import types
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import torch

import harness
from benchmarks import ROOT
from harness import data, initialize
from harness.flags import DTYPES
from harness.presets import parameter_shapes
from receipts import diloco as islands
from receipts import formulas
from trainer.islands import parts_of

# ddp.py is one island that averages with nobody
SETTINGS = {
    "ddp": "--islands 1",
    "H = 10": "--sync-every 10",
    "H = 50": "--sync-every 50",
    "H = 100": "--sync-every 100",
    "H = 50, 5 parts, 5 late": "--sync-every 50 --stream 5 --stream-delay 5",
    "H = 50, 4 bits": "--sync-every 50 --outer-bits 4",
}
SETTINGS["H = 50, 4 bits, 5 parts, 5 late"] = (
    f"{SETTINGS['H = 50, 5 parts, 5 late']} --outer-bits 4"
)

# --- the link

MODEL = "--layers 4 --width 384 --heads 6 --context 32 --batch 4 --microbatches 1 --quiet --prove 0"
MODEL += " --device cpu --timeout 300"
RIVALS = ["ddp", "H = 10", "H = 50", "H = 50, 4 bits", "H = 50, 4 bits, 5 parts, 5 late"]


def ip(*words):
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True, timeout=20)


@contextlib.contextmanager
def two_hosts(megabits=None):
    """Two network namespaces, joined by a link of so many Mbit/s in each direction, or no limit."""
    if os.geteuid() != 0 or not shutil.which("ip") or not shutil.which("tc"):
        raise harness.Refused("two hosts need root, and the commands ip and tc (iproute2)")
    names = [f"host{os.getpid()}{side}" for side in "ab"]
    try:
        try:
            join(names, megabits)
        except (subprocess.SubprocessError, OSError) as e:
            raise harness.Refused(f"no two hosts here: {getattr(e, 'stderr', None) or e}") from e
        yield names
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "delete", name], capture_output=True)


def join(names, megabits):
    for name in names:
        ip("netns", "add", name)
    ends = [("name", f"wire{i}", "netns", name) for i, name in enumerate(names)]
    ip("link", "add", *ends[0], "type", "veth", "peer", *ends[1])
    for i, name in enumerate(names):
        ip("-n", name, "address", "add", f"10.99.0.{i + 1}/24", "dev", f"wire{i}")
        ip("-n", name, "link", "set", f"wire{i}", "mtu", "9000", "up")
        ip("-n", name, "link", "set", "lo", "up")
        if megabits:
            burst = max(20_000, int(megabits * 1e6 / 8 / 250))  # bytes in a tick of 4 ms
            limit = f"rate {megabits}mbit burst {burst} limit {max(burst, 1_000_000)}".split()
            queue = "qdisc", "add", "dev", f"wire{i}", "root", "tbf"
            ip("netns", "exec", name, "tc", *queue, *limit)


def transmitted(name):
    """Bytes that a host has sent over the link."""
    path = "/sys/class/net/wire0/statistics/tx_bytes"
    command = ["ip", "netns", "exec", name, "cat", path]
    return int(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def run_on(hosts, words, port):
    """Run Python with these words, as one rank on each host."""
    processes = []
    for rank, host in enumerate(hosts):
        environment = dict(RANK=str(rank), WORLD_SIZE="2", LOCAL_WORLD_SIZE="1")
        environment |= dict(MASTER_ADDR="10.99.0.1", MASTER_PORT=str(port))
        environment |= dict(GLOO_SOCKET_IFNAME=f"wire{rank}", OMP_NUM_THREADS="1")
        environment["TORCH_CPP_LOG_LEVEL"] = "ERROR"  # the hosts have no names
        command = ["ip", "netns", "exec", host, sys.executable, *words.split()]
        options = dict(cwd=ROOT, env=os.environ | environment)
        processes.append(subprocess.Popen(command, **options))
    if any([process.wait() for process in processes]):
        raise harness.Refused(f"{words} did not end well: see above", code=1)


def measure(hosts, flags, steps, port):
    """(tokens/s of both hosts together, bytes that the first sent, the receipt's formula for them)
    of a run with one rank on each host."""
    before = transmitted(hosts[0])
    with tempfile.TemporaryDirectory() as folder:
        receipt = os.path.join(folder, "receipt.json")
        run_on(hosts, f"train.py --sample 0 {MODEL} {flags} --steps {steps} --json {receipt}", port)
        with open(receipt) as file:
            result = json.load(file)
    rates = [row["tokens_per_s"] for row in result["steps"]][1:]  # the first step is a warm-up
    formula = sum(row["formula_bytes"] for row in result["sent"]) * steps
    return statistics.harmonic_mean(rates), transmitted(hosts[0]) - before, formula


def sent_by_islands(flags, steps):
    """Bytes that one of two islands sends, with what diloco.finish() averages once more after the
    receipt's steps."""
    parser = harness.parser(__doc__)
    islands.add_flags(parser, every=5)
    args = parser.parse_args(f"{MODEL} {flags}".split())
    islands.settle(args, every=5)
    config = harness.configure(args)
    shapes, parts = parameter_shapes(config), []
    for names, offset in zip(*parts_of(args, config)):
        parts.append((sum(shapes[name].numel() for name in names), offset))
    group, size = formulas.Group("islands", 2), DTYPES[args.dtype].itemsize
    sent, _ = islands.expected(parts, group, args, size, range(1, steps + 1), finished=True)
    return steps * sum(mean for mean, _ in sent.values())


def links(args):
    print("| Mbit/s | | tokens/s | beside ddp | bytes sent | formula | apart |")
    print("|---|---|---|---|---|---|---|")
    for megabits in args.rates:
        base = None
        for number, name in enumerate(RIVALS):
            flags, steps = f"--islands 2 {SETTINGS[name]}", args.steps or 100
            if name == "ddp":
                flags, steps = "--dp 2", max(3, steps // 20)
            with two_hosts(megabits) as hosts:
                rate, sent, formula = measure(hosts, flags, steps, 29600 + number)
            if name != "ddp":
                formula = sent_by_islands(SETTINGS[name], steps)
            base = base or rate
            cells = [f"{rate:,.0f}", f"{rate / base:.1f}", f"{sent:,}", f"{formula:,.0f}"]
            cells.append(f"{sent / formula - 1:+.1%}")
            print(f"| {megabits:g} | {name} | {' | '.join(cells)} |", flush=True)


# --- the price

EVERY, BATCHES = 100, 8  # steps between validations, batches of each


def curve(args, seed):
    """[(tokens, validation loss)] of a run: the mean over the islands' own losses."""
    torch.set_num_threads(1)
    args, config, corpus = copy.copy(args), harness.configure(args), data.load(args.data)
    args.seed = seed
    rows = args.batch // args.islands

    def rows_of(number, step, split="train", size=rows):
        where = range(number * size, (number + 1) * size)
        return [corpus.batch(step, where, config.context, seed, split)]

    run = dict(args=args, config=config, islands=args.islands, device=torch.device("cpu"))
    run |= dict(dtype=DTYPES[args.dtype], draw=initialize.draw, rows_of=rows_of)
    player = types.SimpleNamespace(target_count=rows * config.context, **run)
    points = []

    @torch.no_grad()
    def loss_of(model):
        total = 0.0
        for i in range(BATCHES):
            [(tokens, targets, _)] = rows_of(0, i, "val", args.batch)
            total += model(tokens, targets=targets, target_count=targets.numel() * BATCHES).item()
        return total

    def note(step, played):
        if step % EVERY == 0 or step == args.steps:
            loss = statistics.mean(loss_of(island.model) for island in played)
            points.append((step * args.batch * config.context, loss))

    parts, _ = parts_of(args, config)
    played = islands.play(player, args.steps, parts, args.islands > 1, note)
    points[-1] = points[-1][0], loss_of(played[0].model)  # after the last average
    return points


def price(args, settings):
    """settings: {name: the flags of args, with those of a setting}."""
    seeds = range(1, args.seeds + 1)
    data.load(args.data)
    with ProcessPoolExecutor(args.processes, get_context("fork")) as pool:
        jobs = {}
        for seed in seeds:
            for name, flags in settings.items():
                jobs[name, seed] = pool.submit(curve, flags, seed)
        curves = {}
        for (name, seed), job in jobs.items():
            curves[name, seed] = job.result()
            losses = " ".join(f"{loss:.4f}" for _, loss in curves[name, seed])
            print(f"{name}, seed {seed}: {losses}", file=sys.stderr, flush=True)
    tokens, ends = curves["ddp", 1][-1][0], {key: points[-1][1] for key, points in curves.items()}
    print(f"\n| {args.islands} islands, {tokens:,} tokens | validation loss | beside ddp |")
    print("|---|---|---|")
    for name in settings:
        losses = [ends[name, seed] for seed in seeds]
        apart = [ends[name, seed] / ends["ddp", seed] - 1 for seed in seeds]
        print(f"| {name} | {spread(losses, '.4f')} | {spread(apart, '+.1%')} |")
    if args.plot:
        draw(args, curves, seeds)


def spread(numbers, form):
    return f"{statistics.mean(numbers):{form}} ({min(numbers):{form}} .. {max(numbers):{form}})"


def draw(args, curves, seeds):
    plt = harness.pyplot()
    figure, ax = plt.subplots(figsize=(8, 5), layout="constrained")
    for name in SETTINGS:
        runs = [curves[name, seed] for seed in seeds]
        tokens = [point[0] for point in runs[0]]
        losses = [[point[1] for point in points] for points in zip(*runs)]
        [line] = ax.plot(tokens, [statistics.mean(row) for row in losses], label=name, lw=1.5)
        lows, highs = [min(row) for row in losses], [max(row) for row in losses]
        ax.fill_between(tokens, lows, highs, color=line.get_color(), alpha=0.15)
    ax.set(xlabel="tokens", ylabel="validation loss", title=f"{args.islands} islands")
    ax.legend()
    ax.grid(alpha=0.3)
    harness.save(figure, args.plot)


def flags():
    parser = harness.parser(__doc__, batch=16, context=64, lr=3e-3, warmup=50, steps=None)
    islands.add_flags(parser.add_argument_group("the outer step"), every="the table's")
    g = parser.add_argument_group("slow links")
    g.add_argument("--links", action="store_true", help="tokens/s on a limited link")
    g.add_argument("--price", action="store_true", help="validation losses")
    why = "Mbit/s of the link, several"
    g.add_argument("--rates", type=harness.real(0.1), nargs="+", default=[10, 100, 1000], help=why)
    g.add_argument("--islands", **harness.POSITIVE, default=2, help="of the price")
    g.add_argument("--seeds", **harness.POSITIVE, default=3, help="of the price")
    g.add_argument("--processes", **harness.POSITIVE, default=2, help="at a time, of the price")
    why = "of a run (default: 600 of the price, 100 of a link, ddp.py's a twentieth)"
    g.add_argument("--steps", **harness.POSITIVE, help=why)
    harness.plot_flag(g, "draw the price")
    parser.set_defaults(min_lr=None)  # the cosine ends at a tenth
    return parser


def settled(parser, args, words):
    """The flags of a run of the price: args, and those of a setting."""
    args = parser.parse_args(words.split(), copy.copy(args))
    args.steps = args.steps or 600
    islands.settle(args, every=args.steps + 1)
    return args


def main():
    parser = flags()
    args = parser.parse_args()
    harness.check_plot(args)
    if args.links or not args.price:
        links(args)
    if args.price or not args.links:
        price(args, {name: settled(parser, args, words) for name, words in SETTINGS.items()})


if __name__ == "__main__":
    harness.script(main)
