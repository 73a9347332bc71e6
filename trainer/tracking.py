"""What train.py writes while it runs: logs, TensorBoard, a plot of the loss, MFU, traces."""

import contextlib
import functools
import importlib.util
import json
import os

import torch

import harness
from harness import Refused, flags, outputs, say
from receipts import pipeline as schedules
from receipts.formulas import flops_per_token


def add_flags(parser):
    g = parser.add_argument_group("watching (see trainer/tracking.py)")
    why = "a JSON object a line, in full precision: step, loss, grad_norm, lr, tokens_per_s"
    g.add_argument("--log-to", metavar="FILE", help=why)
    why = "the loss so far, drawn at each validation; with --plan how a job scales"
    harness.plot_flag(g, why)
    why = "trace the run's third to fifth step with torch.profiler: a file a rank, which "
    why += "ui.perfetto.dev opens on one time axis"
    g.add_argument("--profile-to", metavar="FOLDER", help=why)
    flags.gone(g, "--profile", "--profile-to FOLDER traces the third to the fifth step")
    g.add_argument("--wandb", metavar="PROJECT", help="log to this Weights & Biases project too")
    why = "log there for TensorBoard too (needs tensorboard)"
    g.add_argument("--tensorboard", metavar="FOLDER", help=why)


def check(args):
    """Refuse what can't be written."""
    harness.check_plot(args)
    if args.profile_to:
        outputs.check_folder("--profile-to", args.profile_to)
    for name in ("tensorboard", "wandb"):
        if getattr(args, name) and not importlib.util.find_spec(name):
            raise Refused(f"--{name} needs a package: pip install {name}")
    if args.tensorboard:
        outputs.check_folder("--tensorboard", args.tensorboard)
    if args.wandb and os.environ.get("WANDB_MODE") not in ("offline", "disabled"):
        import wandb

        if not wandb.login(prompt=False):
            raise Refused("--wandb needs a key: run `wandb login` first, or set WANDB_MODE=offline")


def describe(run, schedule):
    """Say what is about to run, and which layers the stages got."""
    args, config = run.args, run.config
    sizes = [(axis, getattr(args, axis)) for axis in ("dp", "tp", "pp", "cp", "ep")]
    layout = ", ".join(f"{axis} {n}" for axis, n in sizes if n > 1 or axis not in ("cp", "ep"))
    if args.islands > 1:
        layout = f"{args.islands} islands of {layout}"
    text = f"text {run.corpus.name}: {len(run.corpus.tokens):,} tokens, {run.target_count:,} a step"
    text += f"; checkpoints in {args.out}" if args.out else "; nothing is saved without --out"
    run.print(f"{harness.parameter_count(config):,} parameters, {layout}; {text}")
    if args.pp > 1:
        layers = schedules.stage_layers(config, schedule.last + 1)
        layers = ", ".join(f"{r.start}-{r.stop - 1}" for r in layers)
        bubble = 1 - schedules.utilisation(schedules.simulate(schedule))
        what = f"{args.schedule}, {args.microbatches} micro-batches: bubble {bubble:.1%}"
        run.print(f"stages hold layers {layers}; {what}")


# FLOP/s of dense products in 16 bits by data sheet, by what torch.cuda.get_device_name() begins
# with. A card that is not here gets no MFU
PEAKS = {
    "NVIDIA A100": 312e12,
    "NVIDIA H100 80GB HBM3": 989e12,
    "NVIDIA H100 PCIe": 756e12,
    "NVIDIA H100 NVL": 835e12,
    "NVIDIA H200 NVL": 835e12,
    "NVIDIA H200": 989e12,
    "NVIDIA GH200": 989e12,
    "NVIDIA B200": 2250e12,
}
SHARES = {"bfloat16": 1.0, "float16": 1.0, "tf32": 0.5}  # of 16 bits' rate


def peak():
    """FLOP/s of this rank's card in 16 bits, or None."""
    name = torch.cuda.get_device_name()
    return next((flops for begin, flops in PEAKS.items() if name.startswith(begin)), None)


def mfu(run):
    """A function of tokens/s that gives the part of the devices' peak that the model's own
    arithmetic uses. None on a device whose peak is not known, and in float32 and float64."""
    if run.device.type != "cuda" or run.precision not in SHARES or peak() is None:
        return None
    rate = SHARES[run.precision] * peak()
    ranks = run.world // run.args.islands  # an island logs its own tokens
    return lambda tokens_per_s: tokens_per_s * flops_per_token(run.config) / (rate * ranks)


# --- traces


def profiled(run, steps):
    """The steps, three of them with torch.profiler on. What is compared with one process after a
    step is in the trace too: --prove 0 leaves that out."""
    folder = run.args.profile_to
    if not folder:
        yield from steps
        return

    def save(profiler):
        # Where the disk is full the profiler says so, and the run goes on
        profiler.export_chrome_trace(f"{folder}/rank{run.rank}.json")
        run.print(f"traces of three steps: {folder}")
        run.restart_clock()

    plan = torch.profiler.schedule(wait=1, warmup=1, active=3, repeat=1)
    with torch.profiler.profile(schedule=plan, on_trace_ready=save) as profiler:
        for step in steps:
            yield step
            profiler.step()


# --- the log


def read_log(path, steps=10**18):
    """The rows of the first steps of a --log-to file, as dicts. A line that a crash cut short is
    passed over. Another file of JSON lines will do."""
    if not os.path.exists(path):
        return
    with open(path) as file:
        for line in file:
            with contextlib.suppress(ValueError):
                row = json.loads(line)
                if row.get("step", steps + 1) <= steps:
                    yield row


class Log:
    """The file of --log-to: a row a step. Where the disk is full it says so once; rows that found
    no room are written with a later one."""

    def __init__(self, path, rows=()):
        self.path, self.complete, self.file = path, True, open(path, "w")
        for row in rows:
            self.write(row)

    def write(self, row):
        try:
            print(json.dumps(row), file=self.file, flush=True)
        except OSError as e:
            if self.complete:
                say(f"--log-to {self.path} can't be written ({e.strerror}); the run goes on")
            self.complete = False

    def close(self):
        with contextlib.suppress(OSError):
            self.file.close()


@contextlib.contextmanager
def open_log(run, first):
    """Gives a function that writes a dict to --log-to, --wandb, --tensorboard and --plot, on rank 0
    only. first: the first step."""
    args, places, rows = run.args, [], []
    if run.rank > 0:
        yield lambda row: None
        return
    with contextlib.ExitStack() as stack:
        if args.log_to:
            # Of the steps that the checkpoint has; later ones are taken again
            rows += read_log(args.log_to, first) if first else []
            log = Log(args.log_to, rows)
            stack.callback(log.close)
            places.append(log.write)
        if args.wandb:
            import wandb

            tracker = stack.enter_context(wandb.init(project=args.wandb, config=vars(args)))
            places.append(lambda row: tracker.log(row, step=row["step"]))
        if args.tensorboard:
            from torch.utils.tensorboard import SummaryWriter

            board = stack.enter_context(SummaryWriter(args.tensorboard, purge_step=first + 1))
            places.append(functools.partial(scalars, board))
        if args.plot:

            def draw(row):
                rows.append(row)
                if "val_loss" in row:
                    plot(rows, args.plot)
                    run.restart_clock()

            places.append(draw)
        yield lambda row: [write(row) for write in places]


def scalars(board, row):
    """Write the numbers of a row for TensorBoard, under the names that they have in --log-to."""
    for name, value in row.items():
        if name != "step" and value is not None:
            board.add_scalar(name, value, row["step"])


def plot(rows, name):
    """The loss of each step, and those of validations, of rows as in --log-to."""
    pyplot = harness.pyplot()
    figure, axes = pyplot.subplots(figsize=(7, 4))
    for kind, label, style in (("loss", "loss", "-"), ("val_loss", "validation loss", "o-")):
        known = {row["step"]: row[kind] for row in rows if row.get(kind) is not None}
        axes.plot(list(known), list(known.values()), style, label=label, linewidth=1, markersize=4)
    axes.set(xlabel="step", ylabel="loss")
    axes.legend()
    harness.save(figure, name)
    pyplot.close(figure)
