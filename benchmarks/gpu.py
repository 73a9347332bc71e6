"""What a machine with GPUs must show, in one command: a Markdown table a part. python -m
benchmarks.gpu

    launch     does a kernel's first launch wait for a stream that spins?
    kernels    attention and the experts' products beside their plain form in float64
    proofs     every technique's receipt in float64, of gloo ranks that share the GPU
    speed      gpt2's tokens/s and MFU, beside nanoGPT's recipe in plain torch
    waits      where the host waits for the device, and the kernels that take the longest
    memory     the ledger's peak beside the allocator's
    kills      kill -9 of the launcher: no process is left, and --resume goes on
    nccl       with 2 GPUs or more: every technique's receipt on nccl, then benchmarks.vs_torch

Each row is measured by processes of its own. A failure is a row that says so; the others go on, and
the exit code is 1. --device cpu rehearses kernels, proofs and kills. One GPU takes ten to twenty
minutes, by estimate.
"""

import collections
import contextlib
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from typing import Callable, NamedTuple

import torch

import harness
import zero_bubble
from benchmarks.on_gpu import ALONE, GPT2, STEPS, WARM_UP
from harness.missing import ROOT
from trainer import tracking

SMALL = "--width 32 --context 32"  # of the model on CPUs


# --- processes


class Failed(Exception):
    """Why a row could not be measured."""


def call(command, seconds=600, **variables):
    """Run Python with a command's words to the end. Raises Failed with its last words."""
    with tempfile.TemporaryFile("w+") as output:
        options = dict(cwd=ROOT, env=os.environ | variables, stdout=output, stderr=output)
        process = subprocess.Popen([sys.executable, *command], start_new_session=True, **options)
        try:
            code = process.wait(seconds)
        except subprocess.TimeoutExpired:
            raise Failed(f"no end within {seconds} s") from None
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        output.seek(0)
        text = output.read().strip() or "no output"
    if code:
        raise Failed(f"exit code {code}, {text.splitlines()[-1]}")


def worker(name, *words, **variables):
    """What a function of on_gpu.py reports from a process of its own."""
    with tempfile.NamedTemporaryFile("r") as file:
        call(["-m", "benchmarks.on_gpu", name, file.name, *words], **variables)
        return json.load(file)


def logged(path, key):
    """The values of a key in the rows of a --log-to file."""
    with open(path) as file:
        rows = [json.loads(line) for line in file]
    return [row[key] for row in rows if key in row]


# --- launch


def launch(loading, args):
    times = worker("launch_times", CUDA_MODULE_LOADING=loading)
    cells = [f"{1000 * times[name]:.2f} ms" for name in ("known", "new", "spin")]
    return [[loading, *cells, "yes" if times["waited"] else "no"]]


# --- kernels

KERNELS = ["attention bfloat16", "attention float16"]
KERNELS += ["products bfloat16", "products float16", "products float32"]
LIMITS = {"bfloat16": 5e-2, "float16": 1e-2, "float32": 1e-5}


def kernels(case, args):
    kind, dtype = case.split()
    errors = worker("kernel_errors", kind, dtype, args.device)
    if not all(error <= LIMITS[dtype] for error in errors):  # NaN is not below a limit
        raise Failed("differs by {:.1e} forward, {:.1e} backward".format(*errors))
    return [[case, *(f"{error:.1e}" for error in errors)]]


# --- proofs

RECEIPT = "command | ranks | largest error of a gradient | receipt"
TECHNIQUES = ["collectives.py"]
TECHNIQUES += [f"ddp.py --sync {way}" for way in ("naive", "bucketed", "overlapped", "server")]
TECHNIQUES += [f"zero.py --stage {stage}" for stage in (1, 2)]
TECHNIQUES += ["fsdp.py"]
TECHNIQUES += ["tensor_parallel.py", "sequence_parallel.py", "expert_parallel.py"]
TECHNIQUES += ["diloco.py --stream 2 --stream-delay 1 --outer-bits 4"]
TECHNIQUES += [f"context_parallel.py --kind {kind}" for kind in ("ring", "gather", "ulysses")]
PIPELINE = "pipeline.py --layers 8 --schedule"
LAYOUTS = ["--dp 2 --tp 2 --pp 2", "--dp 2 --cp 2 --zero 3 --recompute block"]
LAYOUTS += ["--tp 2 --sp --pp 2 --schedule zb-h1 --zero 1", "--dp 2 --cp 2 --ep 4 --experts 4"]
LAYOUTS += ["--dp 4 --zero 3 --zero-ranks 2 --offload"]


def proof_cases(args):
    cases = [*TECHNIQUES, f"{PIPELINE} 1f1b", f"{PIPELINE} zb-v"]
    cases += [f"train.py {flags}" for flags in LAYOUTS]
    return cases + (["train.py --backend nccl"] if args.device == "cuda" else [])


def nccl_cases(args):
    n = 4 if torch.cuda.device_count() >= 4 else 2  # 3 would not divide the model's heads
    cases = [*TECHNIQUES, *(f"{PIPELINE} {name}" for name in zero_bubble.SCHEDULES)]
    cases = [f"{case} --nproc {n} --backend nccl" for case in cases]
    layouts = [f"--dp {n}", f"--tp {n} --sp", f"--pp {n}", f"--cp {n}", f"--dp {n} --zero 3"]
    layouts += ["--dp 2 --tp 2", "--tp 2 --pp 2 --schedule zb-v"] if n == 4 else []
    return cases + [f"train.py {flags} --backend nccl" for flags in layouts]


def proof(case, args):
    """Ranks, the largest error of a gradient, and what the receipt says."""
    words = [*case.split(), "--device", args.device, "--quiet"]
    words += [] if "--backend" in words else ["--backend", "gloo"]
    if words[0] != "collectives.py":
        words += "--dtype float64 --steps 3 --timeout 120".split()
        words += SMALL.split() if args.device == "cpu" else []
    words += ALONE.split() if words[0] == "train.py" else []
    with tempfile.NamedTemporaryFile("r") as file:
        failure = None
        try:
            call([*words, "--json", file.name])
        except Failed as e:
            failure = e
        text = file.read()
    if not text:
        raise failure or Failed("no receipt")
    receipt = json.loads(text)
    errors = receipt.get("max_error")  # collectives.py has none
    worst = f"{errors['grad']:.0e}" if errors else ""
    if failure or not receipt["ok"]:
        raise Failed(f"the receipt: largest error of a gradient {worst or 'unknown'}")
    return [[case, receipt["world_size"], worst, "proven" if errors else "ok"]]


# --- speed

PRODUCT = "one 8192 x 8192 product"
SPEEDS = [PRODUCT, "--batch 16", "--batch 16 --compile"]
SPEEDS += ["--batch 64 --microbatches 4", "--batch 64 --microbatches 4 --compile"]


def speed(case, args):
    peak = tracking.peak()

    def used(flops):
        return f"{flops / peak:.1%}" if peak else "unknown card"

    if case == PRODUCT:
        rate = worker("product_rate")
        return [[case, f"{rate / 1e12:.0f} TFLOP/s", used(rate), "", "", ""]]
    ours, theirs = [], []
    for _ in range(args.turns):
        ours.append(our_rates(case))
        result = worker("plain_rates", *case.split())
        theirs.append(result["rates"])
    cells = []
    for turns in ours, theirs:
        low, middle, high = statistics.quantiles(sum(turns, []))
        cells.append(f"{middle:,.0f} ({low:,.0f} .. {high:,.0f})")
        cells.append(used(middle * result["flops_per_token"]))
    ratios = [statistics.median(a) / statistics.median(b) for a, b in zip(ours, theirs)]
    ratio = f"{statistics.median(ratios):.2f} ({min(ratios):.2f} .. {max(ratios):.2f})"
    return [[case, *cells, ratio]]


def our_rates(flags):
    """tokens/s of train.py's steps after the warm-up."""
    with tempfile.NamedTemporaryFile() as log:
        call(f"train.py {GPT2} {flags} --steps {STEPS} --log-to {log.name}".split())
        return logged(log.name, "tokens_per_s")[WARM_UP:]


# --- waits


def waits(case, args):
    if case == "waits":
        places = worker("waits_by_place")
        if not places:
            raise Failed("no wait was seen, not even the one for the loss")
        return [[f"`{place}`", times, "", ""] for place, times in places.items()]
    with tempfile.TemporaryDirectory() as folder:
        # Not the last step, after which a validation follows
        profile = f"--batch 16 --steps 7 --profile 5-6 --profile-to {folder}"
        call(f"train.py {GPT2} {profile}".split())
        with open(os.path.join(folder, "rank0.json")) as file:
            events = json.load(file)["traceEvents"]
    on_device = "kernel", "gpu_memcpy", "gpu_memset"
    spans = [event for event in events if event.get("cat") in on_device and "dur" in event]
    return kernel_rows(spans)


def kernel_rows(spans, most=10):
    """Rows of the kernels that take the longest. spans: a trace's events, in microseconds."""
    times = collections.defaultdict(list)
    for event in spans:
        times[event["name"]].append(event["dur"] / 1000)
    total = sum(map(sum, times.values()))
    rows = [["all kernels and copies", len(spans), f"{total:.1f} ms", ""]]
    for name in sorted(times, key=lambda name: -sum(times[name]))[:most]:
        spent = sum(times[name])
        rows.append([f"`{name[:90]}`", len(times[name]), f"{spent:.1f} ms", f"{spent / total:.0%}"])
    return rows


# --- memory


def memory(case, args):
    sizes = worker("peaks", *case.split())
    states = sizes["parameters"] + sizes["gradients"] + sizes["optimizer"]
    parts = [states, sizes["activations_peak"], sizes["gathered_peak"]]
    cells = [f"{size / 1e9:.3f} GB" for size in (*parts, sum(parts), sizes["allocated"])]
    return [[case, *cells, f"{sum(parts) / sizes['allocated']:.3f}"]]


# --- kills

LONG = f"--dtype float64 --prove 0 --steps 200 {ALONE}"


def kill_cases(args):
    return ["--dp 2 --backend gloo"] + ([] if args.device == "cpu" else ["--backend nccl"])


def kills(case, args):
    words = f"train.py {case} {LONG} --device {args.device}".split()
    words += SMALL.split() if args.device == "cpu" else []
    with tempfile.TemporaryDirectory() as folder:
        out, log, undisturbed = (os.path.join(folder, name) for name in ("out", "log", "log2"))
        call([*words, "--log-to", undisturbed])
        words += ["--out", out, "--save-every", "10", "--resume", "--log-to", log]
        seconds = [kill(words, out, step) for step in (40, 80, 120)]
        call(words)
        losses, expected = (logged(path, "loss") for path in (log, undisturbed))
    if len(losses) != len(expected):
        raise Failed(f"{len(losses)} steps instead of {len(expected)}")
    worst = max(abs(a - b) / abs(b) for a, b in zip(losses, expected))
    if not worst <= 1e-10:
        raise Failed(f"the losses differ by {worst:.0e} from those of a run without kills")
    return [[case, len(seconds), f"{max(seconds):.2f} s", f"{worst:.0e}"]]


def kill(words, out, step):
    """Start a run, and kill its launcher once `step` is saved. Returns the seconds until no process
    of the run is left."""
    process = subprocess.Popen([sys.executable, *words], cwd=ROOT, stderr=subprocess.DEVNULL)
    try:
        if not within(120, lambda: last_saved(out) >= step or process.poll() is not None):
            raise Failed(f"step {step} was not saved within 120 s")
        if process.poll() is not None or not alive(out):
            raise Failed(f"the run ended by itself before the kill at step {step}")
    finally:
        process.kill()
        process.wait()
    begin = time.monotonic()
    if not within(20, lambda: not alive(out)):
        raise Failed(f"20 s after the kill at step {step} these processes live: {alive(out)}")
    return time.monotonic() - begin


def within(seconds, condition):
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


def last_saved(folder):
    names = os.listdir(folder) if os.path.exists(folder) else []
    found = [re.fullmatch(r"step-(\d+)", name) for name in names]
    return max((int(match[1]) for match in found if match), default=0)


def alive(word):
    """The processes whose command has the word in it."""
    found = []
    for pid in filter(str.isdecimal, os.listdir("/proc")):
        with contextlib.suppress(OSError), open(f"/proc/{pid}/cmdline") as file:
            if word in file.read():
                found.append(int(pid))
    return found


# --- the tables


class Part(NamedTuple):
    """title: the question. cases: names of the rows, or a function of the flags that gives them.
    measure(case, args): a list of rows of cells. needed: GPUs."""

    title: str
    columns: str
    cases: list | Callable
    measure: Callable
    needed: int = 1


PARTS = {
    "launch": Part(
        "Does a kernel's first launch wait for a spinning stream?",
        "CUDA_MODULE_LOADING | known kernel | new kernel | the spin | waited",
        ["LAZY", "EAGER"],
        launch,
    ),
    "kernels": Part(
        "Kernels beside float64: largest relative difference",
        "kernel | forward | backward",
        KERNELS,
        kernels,
        needed=0,
    ),
    "proofs": Part(
        "Receipts in float64, gloo ranks that share the GPU", RECEIPT, proof_cases, proof, needed=0
    ),
    "speed": Part(
        "gpt2 (124M) in bfloat16, tokens/s: median (quartiles)",
        "train.py | ours | MFU | nanoGPT's recipe | MFU | ours / theirs (turns)",
        SPEEDS,
        speed,
    ),
    "waits": Part(
        "Where the host waits in two steps of gpt2, and the longest kernels of two steps",
        "line or kernel | times | together | of all",
        ["waits", "longest"],
        waits,
    ),
    "memory": Part(
        "Peak of a step of gpt2: the ledger beside the allocator",
        "train.py | held | activations | gathered | sum | allocator | ratio",
        ["--batch 16", "--batch 16 --zero 3", "--batch 16 --recompute block"],
        memory,
    ),
    "kills": Part(
        "kill -9 of the launcher, then --resume",
        "train.py | kills | until no process is left | largest difference of a loss",
        kill_cases,
        kills,
        needed=0,
    ),
    "nccl": Part("Receipts in float64 on nccl", RECEIPT, nccl_cases, proof, needed=2),
}
REHEARSED = ", ".join(name for name, part in PARTS.items() if part.needed == 0)


def chosen_cases(part, args):
    cases = part.cases(args) if callable(part.cases) else part.cases
    return [case for case in cases if any(word in case for word in args.cases)]


def table(part, args):
    """Print a part's table. Returns whether all cases could be measured."""
    columns = part.columns.split(" | ")
    print(f"\n### {part.title}\n\n| {part.columns} |\n|{'---|' * len(columns)}", flush=True)
    ok = True
    for case in chosen_cases(part, args):
        try:
            rows = part.measure(case, args)
        except Exception as e:
            ok = False
            reason = str(e) if isinstance(e, Failed) else repr(e)
            rows = [[case, f"failed: {reason}", *[""] * (len(columns) - 2)]]
        for cells in rows:
            cells = [str(cell).replace("|", "/") for cell in cells]
            print(f"| {' | '.join(cells)} |", flush=True)
    return ok


def main():
    p = harness.Parser(__doc__)
    why = "some of " + ", ".join(PARTS)
    p.add_argument("--only", nargs="+", choices=list(PARTS), metavar="NAME", help=why)
    why = "of these parts the rows whose name has one of these words in it"
    p.add_argument("--cases", nargs="+", metavar="WORD", default=[""], help=why)
    why = f"cpu rehearses {REHEARSED}, with small sizes"
    p.add_argument("--device", choices=["cuda", "cpu"], default="cuda", help=why)
    why = "of each side in speed"
    p.add_argument("--turns", **harness.POSITIVE, default=2, help=why)
    args = p.parse_args()
    gpus = torch.cuda.device_count() if args.device == "cuda" else 0
    if args.device == "cuda" and not gpus:
        raise harness.Refused(f"no GPU is visible here: --device cpu rehearses {REHEARSED}")
    for name in args.only or []:
        if PARTS[name].needed > gpus:
            least = f"at least {PARTS[name].needed} GPU, and there are {gpus}"
            raise harness.Refused(f"{name} needs {least}: leave it out of --only")
    names = args.only or [name for name, part in PARTS.items() if part.needed <= gpus]
    names = [name for name in names if chosen_cases(PARTS[name], args)]
    if not names:
        raise harness.Refused(f"no row has {' or '.join(args.cases)} in its name: see --only")
    where = f"{gpus} x {torch.cuda.get_device_name()}" if gpus else "CPUs"
    print(f"{where}, torch {torch.__version__}")
    results = []
    for name in names:
        results.append(table(PARTS[name], args))
    if "nccl" in names and args.cases == [""]:
        command = [sys.executable, "-m", "benchmarks.vs_torch", "--device", "cuda"]
        results.append(subprocess.call(command, cwd=ROOT) == 0)
    if not all(results):
        raise SystemExit(1)


if __name__ == "__main__":
    harness.script(main)
