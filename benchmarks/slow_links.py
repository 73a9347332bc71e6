"""What islands are worth on slow links, and what they cost: python -m benchmarks.slow_links

    --links     tokens/s of diloco.py beside ddp.py, on two hosts with a slow link between them: two
                network namespaces, whose link `tc tbf` limits (root; iproute2). The bytes are those
                that the link's own counter has seen
    --price     the validation loss after the same tokens, for ddp.py and for islands that average
                every 10, 50 and 100 steps; streaming, delayed, in 4 bits. One process plays all
                islands (receipts/diloco.py: diloco.py's receipt shows that it is the same)

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
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context

import torch

import diloco
import harness
from harness import data, initialize
from harness.flags import DTYPES
from harness.presets import parameter_shapes
from receipts import diloco as islands
from trainer.islands import parts_of

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))

# --- the link

MODEL = "--layers 4 --width 384 --heads 6 --context 32 --batch 4 --microbatches 1 --quiet --prove 0"
MODEL += " --device cpu --timeout 300"
RIVALS = {
    "ddp": ("ddp", ""),
    "H = 10": ("diloco", "--sync-every 10"),
    "H = 50": ("diloco", "--sync-every 50"),
    "H = 50, 4 bits": ("diloco", "--sync-every 50 --outer-bits 4"),
    "H = 50, 4 bits, 5 parts, 5 late": (
        "diloco",
        "--sync-every 50 --outer-bits 4 --stream 5 --stream-delay 5",
    ),
}


def ip(*words):
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True, timeout=20)


@contextlib.contextmanager
def two_hosts(megabits):
    """Two network namespaces, joined by a link of so many Mbit/s in each direction."""
    if os.geteuid() != 0 or not shutil.which("ip") or not shutil.which("tc"):
        raise harness.Refused("--links needs root, and the commands ip and tc (iproute2)")
    names = [f"island{os.getpid()}{side}" for side in "ab"]
    try:
        for name in names:
            ip("netns", "add", name)
        ends = [("name", f"wire{i}", "netns", name) for i, name in enumerate(names)]
        ip("link", "add", *ends[0], "type", "veth", "peer", *ends[1])
        for i, name in enumerate(names):
            ip("-n", name, "address", "add", f"10.98.0.{i + 1}/24", "dev", f"wire{i}")
            ip("-n", name, "link", "set", f"wire{i}", "mtu", "9000", "up")
            ip("-n", name, "link", "set", "lo", "up")
            burst = max(20_000, int(megabits * 1e6 / 8 / 250))  # bytes in a tick of 4 ms
            limit = f"rate {megabits}mbit burst {burst} limit {max(burst, 1_000_000)}"
            command = ["ip", "netns", "exec", name, "tc", "qdisc", "add", "dev", f"wire{i}", "root"]
            subprocess.run([*command, "tbf", *limit.split()], check=True, capture_output=True)
        yield names
    except (subprocess.SubprocessError, OSError) as e:
        raise harness.Refused(f"no limited link here: {getattr(e, 'stderr', None) or e}") from e
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "delete", name], capture_output=True)


def transmitted(name):
    """Bytes that a host has sent over the link."""
    path = "/sys/class/net/wire0/statistics/tx_bytes"
    command = ["ip", "netns", "exec", name, "cat", path]
    return int(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def measure(hosts, script, flags, steps, port):
    """(tokens/s of both hosts together, bytes that the first sent, bytes by the formula) of a run
    with one rank on each host."""
    before, processes = transmitted(hosts[0]), []
    with tempfile.TemporaryDirectory() as folder:
        receipt = os.path.join(folder, "receipt.json")
        command = [sys.executable, f"{script}.py", *f"{MODEL} {flags} --steps {steps}".split()]
        for rank, host in enumerate(hosts):
            environment = os.environ | {
                "RANK": str(rank),
                "WORLD_SIZE": "2",
                "LOCAL_WORLD_SIZE": "1",
                "MASTER_ADDR": "10.98.0.1",
                "MASTER_PORT": str(port),
                "GLOO_SOCKET_IFNAME": f"wire{rank}",
                "OMP_NUM_THREADS": "1",
                "TORCH_CPP_LOG_LEVEL": "ERROR",  # the hosts have no names
            }
            enter = ["ip", "netns", "exec", host]
            own = [*enter, *command, "--json", receipt] if rank == 0 else [*enter, *command]
            processes.append(subprocess.Popen(own, cwd=ROOT, env=environment))
        codes = [process.wait() for process in processes]
        if any(codes):
            raise harness.Refused(f"{script}.py {flags} did not end well: see above", code=1)
        with open(receipt) as file:
            result = json.load(file)
    rates = [row["tokens_per_s"] for row in result["steps"]][1:]  # the first step is a warm-up
    rate = len(rates) / sum(1 / rate for rate in rates)
    formula = sum(row["formula_bytes"] for row in result["sent"]) * steps
    if script == "diloco":
        formula += finishing(flags, steps)
    return rate, transmitted(hosts[0]) - before, round(formula)


def finishing(flags, steps):
    """Bytes of diloco.finish(), which the receipt's steps do not have: the parts whose turn the
    last step was not are averaged once more."""
    parser = harness.parser(__doc__)
    islands.add_flags(parser, every=5)
    args = parser.parse_args(f"{MODEL} {flags}".split())
    islands.settle(args, every=5)
    config, total = harness.configure(args), 0
    shapes = parameter_shapes(config)
    for names, offset in zip(*parts_of(args, config)):
        if steps % args.sync_every != offset:
            numbers = sum(shapes[name].numel() for name in names)
            total += islands.message_bytes(numbers, args.outer_bits, DTYPES[args.dtype].itemsize)
    return total


def links(args):
    print("| Mbit/s | | tokens/s | beside ddp | bytes sent | formula | apart |")
    print("|---|---|---|---|---|---|---|")
    for megabits in args.rates:
        base = None
        for number, (name, (script, flags)) in enumerate(RIVALS.items()):
            steps = args.steps if script == "diloco" else max(3, args.steps // 20)
            with two_hosts(megabits) as hosts:
                rate, sent, formula = measure(hosts, script, flags, steps, 29600 + number)
            base = base or rate
            apart = f"{sent / formula - 1:+.1%}" if formula else "no average in so few steps"
            cells = [f"{rate:,.0f}", f"{rate / base:.1f}", f"{sent:,}", f"{formula:,}", apart]
            print(f"| {megabits:g} | {name} | {' | '.join(cells)} |", flush=True)


# --- the price

SETTINGS = {
    "ddp": {"islands": 1},
    "H = 10": {"sync_every": 10},
    "H = 50": {"sync_every": 50},
    "H = 100": {"sync_every": 100},
    "H = 50, 5 parts, 5 late": {"sync_every": 50, "stream": 5, "stream_delay": 5},
    "H = 50, 4 bits": {"sync_every": 50, "outer_bits": 4},
    "H = 50, 4 bits, 5 parts, 5 late": {
        "sync_every": 50,
        "stream": 5,
        "stream_delay": 5,
        "outer_bits": 4,
    },
}


def curve(args, setting, seed):
    """[(tokens, validation loss)] of a run: the mean over the islands' own losses."""
    torch.set_num_threads(1)
    args = copy.copy(args)
    vars(args).update({"islands": args.islands, "seed": seed} | setting)
    islands.settle(args, every=args.steps + 1)  # ddp: nobody to average with
    config = harness.configure(args)
    corpus = data.load(args.data)
    rows = args.batch // args.islands

    def rows_of(number, step, split="train", size=rows):
        where = range(number * size, (number + 1) * size)
        return [corpus.batch(step, where, config.context, seed, split)]

    player = types.SimpleNamespace(
        args=args,
        config=config,
        islands=args.islands,
        count=rows * config.context,
        device=torch.device("cpu"),
        dtype=DTYPES[args.dtype],
        draw=initialize.draw,
        rows_of=rows_of,
    )
    points = []

    @torch.no_grad()
    def loss_of(model):
        total = 0.0
        for i in range(args.eval_batches):
            [(tokens, targets, _)] = rows_of(0, i, "val", args.batch)
            count = targets.numel() * args.eval_batches
            total += model(tokens, targets=targets, target_count=count).item()
        return total

    def note(step, played):
        if step % args.eval_every == 0:
            loss = statistics.mean(loss_of(island.model) for island in played)
            points.append((step * args.batch * config.context, loss))

    shapes = harness.presets.parameter_shapes(config)
    tensors = {torch.empty(shape, device="meta"): name for name, shape in shapes.items()}
    parts = [[tensors[t] for t in part] for part in diloco.consecutive(list(tensors), args.stream)]
    played = islands.play(player, args.steps, parts, args.islands > 1, note)
    points[-1] = points[-1][0], loss_of(played[0].model)  # after the last average
    return points


def price(args):
    seeds = range(1, args.seeds + 1)
    data.load(args.data)
    with ProcessPoolExecutor(args.processes, get_context("fork")) as pool:
        jobs = {}
        for seed in seeds:
            for name, setting in SETTINGS.items():
                jobs[pool.submit(curve, args, setting, seed)] = name, seed
        curves = {}
        for job in as_completed(jobs):
            name, seed = jobs[job]
            curves[name, seed] = job.result()
            losses = " ".join(f"{loss:.4f}" for _, loss in curves[name, seed])
            print(f"{name}, seed {seed}: {losses}", file=sys.stderr, flush=True)
    tokens = args.steps * args.batch * harness.configure(args).context
    print(f"\n| {args.islands} islands, {tokens:,} tokens | validation loss | beside ddp |")
    print("|---|---|---|")
    for name in SETTINGS:
        ends = [curves[name, seed][-1][1] for seed in seeds]
        ratios = [curves[name, seed][-1][1] / curves["ddp", seed][-1][1] for seed in seeds]
        spread = f"({min(ends):.4f} .. {max(ends):.4f})"
        print(f"| {name} | {statistics.mean(ends):.4f} {spread} | {mean_of(ratios)} |")
    if args.plot:
        draw(args, curves, seeds)


def mean_of(ratios):
    apart = [ratio - 1 for ratio in ratios]
    return f"{statistics.mean(apart):+.1%} ({min(apart):+.1%} .. {max(apart):+.1%})"


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


def main():
    parser = harness.parser(__doc__, batch=16, context=64, lr=3e-3, warmup=50)
    islands.add_flags(parser.add_argument_group("the outer step"), every="the table's")
    g = parser.add_argument_group("slow links")
    g.add_argument("--links", action="store_true", help="tokens/s on a limited link")
    g.add_argument("--price", action="store_true", help="validation losses")
    why = "Mbit/s of the link, several"
    g.add_argument("--rates", type=harness.real(0.1), nargs="+", default=[10, 100, 1000], help=why)
    g.add_argument("--islands", **harness.POSITIVE, default=2, help="of the price")
    g.add_argument("--seeds", **harness.POSITIVE, default=3, help="of the price")
    g.add_argument("--processes", **harness.POSITIVE, default=2, help="at a time, of the price")
    why = "steps between validations"
    g.add_argument("--eval-every", **harness.POSITIVE, default=100, help=why)
    g.add_argument("--eval-batches", **harness.POSITIVE, default=8, help="of a validation")
    why = "steps of a run (default: 600 of the price, 100 of a link, ddp.py's a twentieth)"
    g.add_argument("--steps", **harness.POSITIVE, help=why)
    g.add_argument("--min-lr", type=harness.real(0), metavar="X", help="where the cosine ends")
    harness.plot_flag(g, "draw the price")
    args = parser.parse_args()
    harness.check_plot(args)
    both = args.links == args.price
    steps = args.steps
    if args.links or both:
        args.steps = steps or 100
        links(args)
    if args.price or both:
        args.steps = steps or 600
        if args.steps % args.eval_every:
            raise harness.Refused("--steps must be a multiple of --eval-every")
        price(args)


if __name__ == "__main__":
    harness.script(main)
