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
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from typing import Callable, NamedTuple
from unittest import mock

import torch

import benchmarks
import harness
import proof
import train
import zero_bubble
from benchmarks import ROOT, nanogpt
from context_parallel import Tile, attend, attend_backward, tile_attention, tile_gradients
from model import grouped_linear
from receipts.formulas import flops_per_token
from trainer import checkpoint, layout, tracking

ALONE = "--sample 0 --eval-every 0 --quiet"  # train.py, without what follows the steps
GPT2 = f"--preset gpt2 --vocab 50304 --param-dtype bfloat16 --nproc 1 --prove 0 {ALONE}"
SMALL = "--width 32 --context 32"  # of the model on CPUs
WARM_UP, STEPS, TURNS = 10, 30, 2  # of speed


# --- the parts and their processes

PARTS = {}


class Part(NamedTuple):
    """title: the question. cases: names of the rows, or a function of the flags that gives them.
    needed: GPUs. measure(case, args): a list of rows of cells."""

    title: str
    columns: str
    cases: list | Callable
    needed: int
    measure: Callable


def part(title, columns, cases, needed=1):
    """Make a function the part of its name."""

    def register(measure):
        PARTS[measure.__name__] = Part(title, columns, cases, needed, measure)
        return measure

    return register


def worker(function, *words, **variables):
    """What a function of this file reports, called as function(report, *words) in a process of its
    own. variables: of the environment."""
    with tempfile.NamedTemporaryFile("r") as file:
        code = f"from benchmarks import gpu; gpu.{function.__name__}(gpu.Report({file.name!r})"
        benchmarks.call(["-c", f"{code}, *{words!r})"], **variables)
        return json.load(file)


class Report(NamedTuple):
    path: str

    def __call__(self, result):
        with open(self.path, "w") as file:
            json.dump(result, file)


# --- launch


@part(
    "Does a kernel's first launch wait for a spinning stream?",
    "CUDA_MODULE_LOADING | known kernel | new kernel | the spin | waited",
    ["LAZY", "EAGER"],
)
def launch(loading, args):
    times = worker(launch_times, CUDA_MODULE_LOADING=loading)
    cells = [f"{1000 * times[name]:.2f} ms" for name in ("known", "new", "spin")]
    return [[loading, *cells, "yes" if times["waited"] else "no"]]


def launch_times(report):
    """Seconds of the host to launch a kernel that this process knows, and a new one, while another
    stream spins for a second or two."""
    x, side = torch.ones(1024, device="cuda"), torch.cuda.Stream()
    x.mul_(2)
    torch.cuda._sleep(1)  # loads the kernel that spins
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        begin.record()
        torch.cuda._sleep(2 * 10**9)  # cycles
        end.record()
    known = host_seconds(lambda: x.mul_(2))
    new = host_seconds(x.atan_)
    waited = side.query()  # the spin has ended
    end.synchronize()
    spin = begin.elapsed_time(end) / 1000
    report({"known": known, "new": new, "spin": spin, "waited": waited})


def host_seconds(work):
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin


# --- kernels

KERNELS = ["attention bfloat16", "attention float16"]
KERNELS += ["products bfloat16", "products float16", "products float32"]
LIMITS = {"bfloat16": 5e-2, "float16": 1e-2, "float32": 1e-5}


@part(
    "Kernels beside float64: largest relative difference",
    "kernel | forward | backward",
    KERNELS,
    needed=0,
)
def kernels(case, args):
    kind, dtype = case.split()
    errors = worker(kernel_errors, kind, dtype, args.device)
    if not all(error <= LIMITS[dtype] for error in errors):  # NaN is not below a limit
        raise harness.Refused("differs by {:.1e} forward, {:.1e} backward".format(*errors))
    return [[case, *(f"{error:.1e}" for error in errors)]]


def kernel_errors(report, kind, dtype, device):
    torch.manual_seed(0)
    errors = {"attention": attention_errors, "products": product_errors}[kind]
    report(errors(getattr(torch, dtype), device))


def attention_errors(dtype, device, tokens=512, heads=8, kv_heads=2):
    """The largest relative difference forward and backward, over the three tiles of a zigzag."""
    whole, half = slice(0, tokens), tokens // 2
    q, grad = torch.randn(2, 2, heads, tokens, 64, dtype=dtype, device=device)
    kv = torch.randn(2, 2, kv_heads, tokens, 64, dtype=dtype, device=device)
    copies = heads // kv_heads
    forward, backward = [], []
    for tile in (
        Tile(whole, whole, True),
        Tile(whole, slice(0, half), False),
        Tile(slice(half, tokens), whole, False),
    ):
        out, lse = torch.zeros_like(q), q.new_zeros(q.shape[:3], dtype=torch.float32)
        out[:, :, tile.queries], lse[:, :, tile.queries] = attend(q, kv, tile)
        gradients = attend_backward(grad, q, kv, out, lse, tile)
        exact_q, exact_grad = (t[:, :, tile.queries].double() for t in (q, grad))
        k, v = kv[:, :, :, tile.keys].double().repeat_interleave(copies, dim=2)
        exact, exact_lse = tile_attention(exact_q, k, v, tile.causal)
        dq, dk, dv = tile_gradients(exact_grad, exact_q, k, v, exact, exact_lse, tile.causal)
        dk, dv = (t.unflatten(1, (kv_heads, copies)).sum(2) for t in (dk, dv))
        forward.append(difference(out[:, :, tile.queries], exact))
        backward += map(difference, gradients, (dq, dk, dv))
    return torch.tensor(forward).max().item(), torch.tensor(backward).max().item()


def product_errors(dtype, device):
    """The largest relative difference forward and backward. The second expert gets no row."""
    ends = torch.tensor([100, 100, 230, 301, 384], dtype=torch.int32, device=device)
    x = torch.randn(384, 128, dtype=dtype, device=device, requires_grad=True)
    weight = torch.randn(5, 256, 128, dtype=dtype, device=device, requires_grad=True)
    grad = torch.randn(384, 256, dtype=dtype, device=device)
    exact_x, exact_weight = (t.detach().double().requires_grad_() for t in (x, weight))
    parts = exact_x.tensor_split(ends[:-1].tolist())
    out = grouped_linear(x, weight, ends)
    exact = torch.cat([part @ matrix.T for part, matrix in zip(parts, exact_weight)])
    gradients = torch.autograd.grad(out, (x, weight), grad)
    exact_gradients = torch.autograd.grad(exact, (exact_x, exact_weight), grad.double())
    backward = list(map(difference, gradients, exact_gradients))
    return difference(out, exact), torch.tensor(backward).max().item()


def difference(x, exact):
    """The largest difference, relative to the largest element; NaN if there is one."""
    return ((x.double() - exact).abs().max() / exact.abs().max()).item()


# --- proofs

RECEIPT = "command | ranks | largest error of a gradient | receipt"
TECHNIQUES = ["collectives.py"]
TECHNIQUES += [f"ddp.py --sync {way}" for way in ("naive", "bucketed", "overlapped", "server")]
TECHNIQUES += [f"zero.py --stage {stage}" for stage in (1, 2)]
TECHNIQUES += ["fsdp.py"]
TECHNIQUES += ["muon.py", "tensor_parallel.py", "sequence_parallel.py", "expert_parallel.py"]
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


@part("Receipts in float64, gloo ranks that share the GPU", RECEIPT, proof_cases, needed=0)
def proofs(case, args):
    """Ranks, the largest error of a gradient, and what the receipt says."""
    words = [case, "--device", args.device, "--quiet"]
    words += [] if "--backend" in case else ["--backend gloo"]
    if not case.startswith("collectives.py"):
        words += ["--dtype float64 --steps 3 --timeout 120"]
        words += [SMALL] if args.device == "cpu" else []
    words += [ALONE] if case.startswith("train.py") else []
    receipt = benchmarks.receipt(" ".join(words), passing=(0, 1))
    errors = receipt.get("max_error")  # collectives.py has none
    worst = f"{errors['grad']:.0e}" if errors else ""
    if not receipt["ok"]:
        raise harness.Refused(f"the receipt: largest error of a gradient {worst or 'unknown'}")
    return [[case, receipt["world_size"], worst, "proven" if errors else "ok"]]


# --- speed

PRODUCT = "one 8192 x 8192 product"
SPEEDS = [PRODUCT, "--batch 16", "--batch 16 --compile"]
SPEEDS += ["--batch 64 --microbatches 4", "--batch 64 --microbatches 4 --compile"]


@part(
    "gpt2 (124M) in bfloat16, tokens/s: median (quartiles)",
    "train.py | ours | MFU | nanoGPT's recipe | MFU | ours / theirs (turns)",
    SPEEDS,
)
def speed(case, args):
    peak = tracking.peak()

    def used(flops):
        return f"{flops / peak:.1%}" if peak else "unknown card"

    if case == PRODUCT:
        rate = worker(product_rate)
        return [[case, f"{rate / 1e12:.0f} TFLOP/s", used(rate), "", "", ""]]
    ours, theirs = [], []
    for _ in range(TURNS):
        ours.append(our_rates(case)[WARM_UP:])
        theirs.append(worker(plain_rates, case)[WARM_UP:])
    flops = flops_per_token(settled(case)[1])
    cells = []
    for turns in ours, theirs:
        low, middle, high = statistics.quantiles(sum(turns, []))
        cells.append(f"{middle:,.0f} ({low:,.0f} .. {high:,.0f})")
        cells.append(used(middle * flops))
    ratios = [statistics.median(a) / statistics.median(b) for a, b in zip(ours, theirs)]
    ratio = f"{statistics.median(ratios):.2f} ({min(ratios):.2f} .. {max(ratios):.2f})"
    return [[case, *cells, ratio]]


def product_rate(report, size=8192):
    """FLOP/s of a product in bfloat16, the median."""
    a = torch.randn(size, size, device="cuda", dtype=torch.bfloat16)
    times = torch.utils.benchmark.Timer("a @ a", globals={"a": a}).blocked_autorange()
    report(2 * size**3 / times.median)


def our_rates(flags):
    """tokens/s of train.py's steps."""
    steps = benchmarks.receipt(f"train.py {GPT2} {flags} --steps {STEPS}")["steps"]
    return [step["tokens_per_s"] for step in steps]


def plain_rates(report, flags):
    report(nanogpt.rates(*settled(flags), STEPS))


def settled(flags):
    """train.py's flags of a run of gpt2, and the model's Config."""
    return layout.prepare(train.flags().parse_args(f"{GPT2} {flags}".split()))


# --- waits


@part(
    "Where the host waits in two steps of gpt2, and the longest kernels of two steps",
    "line or kernel | times | together | of all",
    ["waits", "longest"],
)
def waits(case, args):
    if case == "waits":
        places = worker(waits_by_place)
        if not places:
            raise harness.Refused("no wait was seen, not even the one for the loss")
        return [[f"`{place}`", times, "", ""] for place, times in places.items()]
    with tempfile.TemporaryDirectory() as folder:
        # Not the last step, after which a validation follows
        profile = f"--batch 16 --steps 7 --profile 5-6 --profile-to {folder}"
        benchmarks.call(f"train.py {GPT2} {profile}".split())
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


def project_line():
    """The line of the project that runs, without this file's."""
    frame = sys._getframe()
    this = frame.f_code.co_filename
    while frame:
        file = frame.f_code.co_filename
        own = file.startswith(ROOT + os.sep) and "site-packages" not in file
        if own and file != this:
            return f"{os.path.relpath(file, ROOT)}:{frame.f_lineno}"
        frame = frame.f_back
    return "a thread of autograd's"


@contextlib.contextmanager
def noting_waits(places):
    """Count in `places` the lines at which the host waits, as far as PyTorch's debug mode sees."""

    def note(message, *_):
        if "synchronizing CUDA operation" in str(message):
            places[project_line()] += 1

    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = note
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode("default")


def waits_by_place(report):
    """{line: how often the host waits there} in steps 3 and 4 of train.py. Ends the process."""
    steps = proof.Run.steps

    def watched(run, *args):
        places = collections.Counter()
        for step in steps(run, *args):
            with noting_waits(places) if step in (2, 3) else contextlib.nullcontext():
                yield step
        report(dict(places.most_common()))

    # Step 4 is not the last, after which a validation follows
    args, _ = settled("--batch 16 --steps 5")
    with mock.patch.object(proof.Run, "steps", watched):
        proof.launch(train.train, args, needed=1)


# --- memory


@part(
    "Peak of a step of gpt2: the ledger beside the allocator",
    "train.py | held | activations | sum | allocator | ratio",
    ["--batch 16", "--batch 16 --recompute block"],
)
def memory(case, args):
    held = benchmarks.receipt(f"train.py {GPT2} {case} --steps 3")["held"]
    sizes = {kind: row["bytes"] for kind, row in held.items()}
    allocated, activations = sizes.pop("cuda_peak"), sizes.pop("activations_peak")
    states = sum(sizes.values())
    parts = [states, activations, states + activations, allocated]
    cells = [f"{size / 1e9:.3f} GB" for size in parts]
    return [[case, *cells, f"{(states + activations) / allocated:.3f}"]]


# --- kills

LONG = f"--dtype float64 --prove 0 --steps 200 {ALONE}"


def kill_cases(args):
    return ["--dp 2 --backend gloo"] + ([] if args.device == "cpu" else ["--backend nccl"])


@part(
    "kill -9 of the launcher, then --resume",
    "train.py | kills | until no process is left | largest difference of a loss",
    kill_cases,
    needed=0,
)
def kills(case, args):
    words = f"train.py {case} {LONG} --device {args.device}".split()
    words += SMALL.split() if args.device == "cpu" else []
    with tempfile.TemporaryDirectory() as folder:
        out, log, undisturbed = (os.path.join(folder, name) for name in ("out", "log", "log2"))
        benchmarks.call([*words, "--log-to", undisturbed])
        words += ["--out", out, "--save-every", "10", "--resume", "--log-to", log]
        seconds = [kill(words, out, step) for step in (40, 80, 120)]
        benchmarks.call(words)
        losses, expected = map(logged_losses, (log, undisturbed))
    if len(losses) != len(expected):
        raise harness.Refused(f"{len(losses)} steps instead of {len(expected)}")
    worst = max(abs(a - b) / abs(b) for a, b in zip(losses, expected))
    if not worst <= 1e-10:
        raise harness.Refused(f"the losses differ by {worst:.0e} from those of a run without kills")
    return [[case, len(seconds), f"{max(seconds):.2f} s", f"{worst:.0e}"]]


def kill(words, out, step):
    """Start a run, and kill its launcher once `step` is saved. Returns the seconds until no process
    of the run is left."""
    process = subprocess.Popen([sys.executable, *words], cwd=ROOT, stderr=subprocess.DEVNULL)
    try:
        if not within(120, lambda: last_saved(out) >= step or process.poll() is not None):
            raise harness.Refused(f"step {step} was not saved within 120 s")
        if process.poll() is not None or not alive(out):
            raise harness.Refused(f"the run ended by itself before the kill at step {step}")
    finally:
        process.kill()
        process.wait()
    begin = time.monotonic()
    if not within(20, lambda: not alive(out)):
        raise harness.Refused(
            f"20 s after the kill at step {step} these processes live: {alive(out)}"
        )
    return time.monotonic() - begin


def logged_losses(path):
    with open(path) as file:
        return [json.loads(line)["loss"] for line in file if '"loss"' in line]


def within(seconds, condition):
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


def last_saved(folder):
    steps = map(checkpoint.step_of, checkpoint.checkpoints_in(folder))
    return max(filter(None, steps), default=0)


def alive(word):
    """The processes whose command has the word in it."""
    found = []
    for pid in filter(str.isdecimal, os.listdir("/proc")):
        with contextlib.suppress(OSError), open(f"/proc/{pid}/cmdline") as file:
            if word in file.read():
                found.append(int(pid))
    return found


# --- nccl


def nccl_ranks():
    return 4 if torch.cuda.device_count() >= 4 else 2  # 3 would not divide the model's heads


def nccl_cases(args):
    n = nccl_ranks()
    cases = [*TECHNIQUES, *(f"{PIPELINE} {name}" for name in zero_bubble.ALL_SCHEDULES)]
    cases = [f"{case} --nproc {n} --backend nccl" for case in cases]
    layouts = [f"--dp {n}", f"--tp {n} --sp", f"--pp {n}", f"--cp {n}", f"--dp {n} --zero 3"]
    layouts += ["--dp 2 --tp 2", "--tp 2 --pp 2 --schedule zb-v"] if n == 4 else []
    return cases + [f"train.py {flags} --backend nccl" for flags in layouts]


@part("Receipts in float64 on nccl", RECEIPT, nccl_cases, needed=2)
def nccl(case, args):
    return proofs(case, args)


# --- the tables

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
        except (Exception, harness.Refused) as e:
            ok = False
            reason = str(e) if isinstance(e, harness.Refused) else repr(e)
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
        command = f"-m benchmarks.vs_torch --device cuda --nproc {nccl_ranks()}"
        results.append(subprocess.call([sys.executable, *command.split()], cwd=ROOT) == 0)
    if not all(results):
        raise SystemExit(1)


if __name__ == "__main__":
    harness.script(main)
