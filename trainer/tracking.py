"""What train.py writes while it runs: logs, MFU, traces."""

import contextlib
import functools
import importlib.util
import os
import pathlib
import uuid

import torch

import harness
from harness import Refused, check_folder, say
from harness.files import json_text
from receipts import pipeline as schedules
from receipts.formulas import flops_per_token
from trainer import saving


def add_flags(parser):
    g = parser.add_argument_group("watching (see trainer/tracking.py)")
    why = "a JSON object a line, in full precision: step, loss, grad_norm, lr, tokens_per_s"
    g.add_argument("--log-to", metavar="FILE", help=why)
    why = "trace the run's third to fifth step with torch.profiler: a file a rank, which "
    why += "ui.perfetto.dev opens on one time axis"
    g.add_argument("--profile-to", metavar="FOLDER", help=why)
    g.add_argument("--wandb", metavar="PROJECT", help="log to this Weights & Biases project too")
    why = "log there for TensorBoard too (needs tensorboard)"
    g.add_argument("--tensorboard", metavar="FOLDER", help=why)


def check(args):
    """Refuse what can't be written."""
    if args.profile_to:
        check_folder("--profile-to", args.profile_to)
    for name in ("tensorboard", "wandb"):
        if getattr(args, name) and not importlib.util.find_spec(name):
            raise Refused(f"--{name} needs a package: pip install {name}")
    goes_on = args.resume or args.only_sample or saving.may_restart()
    if args.log_to and not goes_on and os.path.exists(args.log_to) and os.path.getsize(args.log_to):
        raise Refused(f"--log-to {args.log_to} has a log: remove it, or give another file")
    if args.tensorboard:
        check_folder("--tensorboard", args.tensorboard)
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
    text += f" ({run.corpus.note})" if run.corpus.note else ""
    text += f"; checkpoints in {args.out}" if args.out else "; nothing is saved without --out"
    run.print(f"{harness.parameter_count(config):,} parameters, {layout}; {text}")
    if args.warmup >= args.steps:
        what = f"--warmup {args.warmup} is not shorter than --steps {args.steps}"
        run.print(f"{what}: the learning rate does not reach --lr")
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


def peak():
    """FLOP/s of this rank's card in 16 bits, or None."""
    name = torch.cuda.get_device_name()
    return next((flops for begin, flops in PEAKS.items() if name.startswith(begin)), None)


def mfu(run):
    """A function of tokens/s that gives the part of the devices' peak that the model's own
    arithmetic uses. None on a device whose peak is not known, and in float32 and float64."""
    if run.device.type != "cuda" or run.precision != "bfloat16" or peak() is None:
        return None
    ranks = run.world // run.args.islands  # an island logs its own tokens
    return lambda tokens_per_s: tokens_per_s * flops_per_token(run.config) / (peak() * ranks)


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


@contextlib.contextmanager
def open_log(run, first):
    """Gives a function that writes a dict to --log-to, --tensorboard and --wandb, on rank 0 only.
    first: the first step."""
    args, places = run.args, []
    if run.rank > 0:
        yield lambda row: None
        return
    with contextlib.ExitStack() as stack:
        if args.log_to:
            # Without a buffer: a row that finds no room does not come back when the file is closed
            file = stack.enter_context(open(args.log_to, "ab", buffering=0))
            places.append(functools.partial(write_line, file))
        if args.tensorboard:
            from torch.utils.tensorboard import SummaryWriter

            # What a crash made the run forget is not shown twice
            board = SummaryWriter(args.tensorboard, purge_step=first + 1 if first else None)
            stack.callback(guard, "tensorboard", board.close)
            places.append(functools.partial(guard, "tensorboard", write_scalars, board))
        if args.wandb:
            import wandb

            about = dict(project=args.wandb, config=vars(args), **wandb_id(args.out, first))
            tracker = wandb.init(**about)
            stack.callback(guard, "wandb", tracker.finish)
            places.append(lambda row: guard("wandb", tracker.log, row, step=row["step"]))
        yield lambda row: [write(row) for write in places]


def guard(name, write, *args, **options):
    """What a log can't take ends no run, and costs no export."""
    try:
        write(*args, **options)
    except Exception as e:  # of any library
        say(f"--{name}: {e}; the run goes on")


def wandb_id(folder, first):
    """wandb.init's options with which a resumed run goes on with its id, which is kept in --out."""
    if not folder:
        return {}
    path = pathlib.Path(folder, "wandb-id")
    if not first or not path.exists():
        path.write_text(uuid.uuid4().hex[:8])
    return {"id": path.read_text(), "resume": "allow"}


def write_line(file, row):
    try:
        file.write(json_text(row).encode() + b"\n")
    except OSError as e:
        say(f"--log-to {file.name} can't be written ({e.strerror}); the run goes on")


def write_scalars(board, row):
    for name, value in row.items():
        if name != "step" and value is not None:  # None in a step that was left out
            board.add_scalar(name, value, row["step"])
