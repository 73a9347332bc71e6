"""What train.py writes while it runs: a log, a plot of the loss, Weights & Biases, MFU, traces of
chosen steps."""

import argparse
import contextlib
import csv
import json
import os
import re
from typing import NamedTuple

import torch
import torch.distributed as dist

import harness
from harness import Refused, outputs, say, tokenizer
from receipts import pipeline as schedules
from trainer import pretrained, recording


def add_flags(parser):
    g = parser.add_argument_group("watching (see trainer/tracking.py)")
    why = (
        "a JSON object a line, or a row of a FILE.csv: step, loss, grad_norm, lr, tokens_per_s, in "
        "full precision"
    )
    g.add_argument("--log-to", metavar="FILE", help=why)
    harness.plot_flag(
        g,
        "the loss over the steps, with --resume also those in --log-to; with --dry-run how it "
        "scales",
    )
    why = "trace these steps with torch.profiler, all ranks: for ui.perfetto.dev"
    g.add_argument("--profile", type=span, metavar="A-B", help=why)
    g.add_argument(
        "--profile-to",
        metavar="FOLDER",
        help="where the traces go: one file a rank, and all.json with all of them",
    )
    g.add_argument("--wandb", metavar="PROJECT", help="log to this Weights & Biases project too")
    recording.add_flags(parser)


def span(text):
    """An argument type: "5-7" or "5", steps counted from 1, as a pair."""
    found = re.fullmatch(r"([1-9]\d*)(?:-([1-9]\d*))?", text)
    first, last = (int(found[1]), int(found[2] or found[1])) if found else (1, 0)
    if last < first:
        raise argparse.ArgumentTypeError(f"{text!r} is not a step or a range of steps, such as 5-7")
    return first, last


def check(args):
    """Refuse what can't be written, and steps that don't come."""
    harness.check_plot(args)
    if bool(args.profile) != bool(args.profile_to):
        raise Refused(
            "--profile (which steps) and --profile-to (which folder) need each other: give both"
        )
    if args.profile and args.profile[1] > args.steps:
        raise Refused(
            f"--profile goes to step {args.profile[1]}, beyond --steps {args.steps}: choose "
            "earlier ones"
        )
    if args.profile:
        outputs.check_folder("--profile-to", args.profile_to)
    if args.wandb and os.environ.get("WANDB_MODE") not in ("offline", "disabled"):
        import wandb

        if not wandb.login(prompt=False):
            raise Refused("--wandb needs a key: run `wandb login` first, or set WANDB_MODE=offline")


def describe(run, schedule):
    """Say what is about to run, and which layers the stages got."""
    args, config = run.args, run.config
    layout = f"dp {args.dp}, tp {args.tp}, pp {args.pp}"
    if args.cp > 1:
        layout += f", cp {args.cp}"
    if args.ep > 1:
        layout += f", ep {args.ep}"
    if args.islands > 1:
        layout = f"{args.islands} islands of {layout}"
    text = f"{run.corpus.name}: {len(run.corpus.tokens):,} tokens, {run.count:,} a step"
    run.print(f"{harness.parameter_count(config):,} parameters, {layout}; {text}")
    said = tokenizer.describe(args, getattr(run.corpus, "encoding", None))
    for sentence in said + pretrained.describe(args, config):
        run.print(sentence)
    if args.pp > 1:
        layers = schedules.stage_layers(config, schedule.last + 1)
        layers = ", ".join(f"{r.start}-{r.stop - 1}" for r in layers)
        bubble = 1 - schedules.utilisation(schedules.simulate(schedule))
        what = f"{args.schedule}, {args.microbatches} micro-batches: bubble {bubble:.1%}"
        run.print(f"stages hold layers {layers}; {what}")


class Peak(NamedTuple):
    """FLOP/s of dense matrix products, by data sheet."""

    bfloat16: float
    tf32: float
    float32: float

    @property
    def float16(self):
        return self.bfloat16


# By the names that torch.cuda.get_device_name() gives. Cards of one generation differ: an H100 PCIe
# has three quarters of an H100 SXM's rate. A card that is not here gets no MFU
A100 = Peak(312e12, 156e12, 19.5e12)
H100_SXM = Peak(989e12, 494e12, 67e12)
NVL = Peak(835e12, 417e12, 60e12)
PEAKS = {
    "NVIDIA A100-SXM4-40GB": A100,
    "NVIDIA A100-SXM4-80GB": A100,
    "NVIDIA A100-PCIE-40GB": A100,
    "NVIDIA A100 80GB PCIe": A100,
    "NVIDIA H100 80GB HBM3": H100_SXM,
    "NVIDIA H100 PCIe": Peak(756e12, 378e12, 51e12),
    "NVIDIA H100 NVL": NVL,
    "NVIDIA H200": H100_SXM,
    "NVIDIA H200 NVL": NVL,
    "NVIDIA GH200 480GB": H100_SXM,
    "NVIDIA B200": Peak(2250e12, 1125e12, 75e12),
}


def mfu(run):
    """A function of tokens/s that gives the part of the devices' peak that the model's own
    arithmetic uses. None on a device whose peak is not known, and in float64."""
    if run.device.type != "cuda":
        return None
    peaks = PEAKS.get(torch.cuda.get_device_name())
    peak = getattr(peaks, run.precision, None)
    if peak is None:
        return None
    ranks = run.world // run.args.islands  # an island logs its own tokens
    return lambda tokens_per_s: tokens_per_s * run.config.flops_per_token() / (peak * ranks)


def profiled(run, steps, begin):
    """The steps, with torch.profiler on during those of --profile. Each rank writes what it saw,
    under its rank as process number; on one time axis, so that rank 0 can put all files that it
    finds into one. What is compared with one process after a step is in it too: --prove 0 leaves
    that out. begin: the first of the steps."""
    args = run.args
    first, last = args.profile or (0, 0)
    if args.profile and first <= begin:
        raise Refused(
            f"--profile begins with step {first}, and the run goes on with step {begin + 1}: "
            "choose later ones"
        )
    profiler = torch.profiler.profile()
    for step in steps:
        if step + 1 == first:
            profiler.start()
        yield step
        if step + 1 == last:
            profiler.stop()
            write_trace(run, profiler)
            run.restart_clock()


def write_trace(run, profiler):
    """Write this rank's trace, then on rank 0 all of them together."""
    args, rank, whole = run.args, run.rank, False
    with writing_traces(args):
        path = os.path.join(args.profile_to, f"rank{rank}.json")
        profiler.export_chrome_trace(path)
        with open(path) as f:
            trace = json.load(f)
        of_rank(rank, trace)
        with open(path, "w") as f:
            json.dump(trace, f)
        whole = True
    dist.barrier()
    if rank == 0 and whole:
        with writing_traces(args):
            write_all(run, trace)


@contextlib.contextmanager
def writing_traces(args):
    """Where a trace can't be written, or is cut short, say so; the run goes on."""
    with outputs.writing("--profile-to", args.profile_to):
        try:
            yield
        except (ValueError, RuntimeError) as e:
            raise OSError(f"a trace is not whole: {str(e).splitlines()[0]}") from e


def of_rank(rank, trace):
    """Give a trace's events their rank as process number, in place."""
    events = [
        e
        for e in trace["traceEvents"]
        if type(e.get("pid")) is int and not e["name"].startswith("process_")
    ]
    for e in events:
        e["pid"] = rank
        if "id" in e:  # arrows from one event to another: of this rank
            e["id"] = f"{rank}.{e['id']}"
    name = {"ph": "M", "name": "process_name", "pid": rank, "args": {"name": f"rank {rank}"}}
    trace["traceEvents"] = [name, *events]


def write_all(run, trace):
    """Put the other ranks' traces that lie in the folder behind rank 0's, into all.json."""
    folder = run.args.profile_to
    for other in range(1, run.world):
        # Else it is on another machine
        if os.path.exists(path := os.path.join(folder, f"rank{other}.json")):
            with open(path) as f:
                trace["traceEvents"] += json.load(f)["traceEvents"]
    with open(os.path.join(folder, "all.json"), "w") as f:
        json.dump(trace, f)
    run.print(
        f"traces of steps {'-'.join(map(str, run.args.profile))}: "
        f"{os.path.join(folder, 'all.json')}"
    )


# Of --log-to FILE.csv
COLUMNS = ["step", "loss", "grad_norm", "lr", "tokens_per_s", "mfu", "loss_scale", "val_loss"]


def read_log(path):
    """The rows of a --log-to file, as dicts. A line that a crash cut short is passed over."""
    with open(path, newline="") as file:
        lines = csv.DictReader(file) if path.endswith(".csv") else file
        for line in lines:
            with contextlib.suppress(ValueError):
                if path.endswith(".csv"):
                    yield {
                        key: (int if key == "step" else float)(text)
                        for key, text in line.items()
                        if key and text
                    }
                else:
                    yield json.loads(line)


class Log:
    """The file of --log-to: a row a step. Where the disk is full it says so once; rows that found
    no room are written with a later one."""

    def __init__(self, path):
        self.path, self.complete, self.file, self.table = path, True, None, None
        with self.saying():
            self.file = open(path, "w", newline="")
            if path.endswith(".csv"):
                self.table = csv.DictWriter(self.file, COLUMNS, extrasaction="ignore")
                self.table.writeheader()

    @contextlib.contextmanager
    def saying(self):
        try:
            yield
        except OSError as e:
            if self.complete:
                say(f"--log-to {self.path} can't be written ({e.strerror}); the run goes on")
            self.complete = False

    def write(self, row):
        if self.file is None:
            return
        with self.saying():
            if self.table:
                self.table.writerow(row)
            else:
                print(json.dumps(row), file=self.file)
            self.file.flush()

    def close(self):
        if self.file:
            with self.saying():
                self.file.close()


@contextlib.contextmanager
def open_log(run, first):
    """Gives a function that writes a dict to --log-to and --wandb, and at the end to --plot; on
    rank 0 only. first: the first step."""
    args, places, rows = run.args, [], []
    with contextlib.ExitStack() as stack:
        if args.log_to and run.rank == 0:
            if first and os.path.exists(args.log_to):  # the run may have had no log so far
                earlier = read_log(args.log_to)
                rows += [row for row in earlier if row.get("step", first + 1) <= first]
            log = Log(args.log_to)
            stack.callback(log.close)
            places.append(log.write)
            for row in rows:  # of the steps that the checkpoint has; later ones are taken again
                log.write(row)
        if args.wandb and run.rank == 0:
            import wandb

            tracker = stack.enter_context(wandb.init(project=args.wandb, config=vars(args)))
            places.append(lambda row: tracker.log(row, step=row["step"]))
        if args.plot and run.rank == 0:
            places.append(rows.append)
        yield lambda row: [write(row) for write in places]
    if args.plot and run.rank == 0:
        plot(rows, args.plot)


def plot(rows, name):
    """The loss of each step, and those of validations, of rows as in --log-to."""
    pyplot = harness.pyplot()
    figure, axes = pyplot.subplots(figsize=(7, 4))
    for kind, label, style in (("loss", "loss", "-"), ("val_loss", "validation loss", "o-")):
        known = {row["step"]: row[kind] for row in rows if row.get(kind) is not None}
        axes.plot(list(known), list(known.values()), style, label=label, linewidth=1, markersize=4)
    axes.set(xlabel="step", ylabel="loss")
    axes.legend()
    harness.save(figure, name, during_run=True)
