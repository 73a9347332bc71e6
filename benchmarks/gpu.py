"""What a machine with 1 to 8 GPUs shows, in one command: python -m benchmarks.gpu

    proofs      every technique's receipt in float64 on nccl; with one GPU on 4 gloo ranks that
                share it. Attention and experts in bfloat16 too, where they take other kernels
    speed       gpt2's tokens/s on one GPU, plain and compiled, beside nanoGPT's recipe in plain
                torch. The two take turns. Then blocks of Llama 3 8B alone: their MFU
    kernels     where a step's time goes: the part in which the GPU works, the kernels that take
                longest, how often the host waits for the GPU
    vs_torch    with 2 GPUs or more: benchmarks.vs_torch, each technique beside PyTorch's own

Writes each row to --json as soon as it is there. A row that fails says why, the others go on, and
the exit code is 1. One GPU takes ten to twenty minutes, by estimate. Where a GPU is lent for less:
--budget MINUTES, and once more with --go-on. --device cpu rehearses the proofs.
"""

import collections
import json
import math
import os
import statistics
import sys
import tempfile
import time

import torch

import benchmarks
import harness
import train
from benchmarks import nanogpt
from benchmarks.vs_torch import PAIRS
from harness.files import check_file
from receipts.formulas import flops_per_token
from trainer import layout, tracking

ALONE = "--sample 0 --eval-every 0"  # train.py, without what follows the steps
TRAIN = f"--param-dtype bfloat16 --nproc 1 --prove 0 --quiet {ALONE}"
GPT2 = "--preset gpt2 --vocab 50304"
MODELS = [f"{GPT2} --batch 16", f"{GPT2} --batch 16 --compile"]
MODELS += [f"{GPT2} --batch 64 --microbatches 4 --compile"]
MODELS += ["--preset llama3-8b --layers 4 --batch 2 --compile"]
STEPS, WARM_UP, TURNS = 30, 10, 2  # steps, of these not counted, turns of each rival
PROFILED = 3  # steps of a run that train.py --profile-to traces

DOCUMENTS, ISLANDS = "--cp 2 --documents e", "--islands 2 --stream 2 --outer-bits 4"
V = "--pp 4 --layers 8 --microbatches 8 --schedule zb-v"
DUALPIPE = "--dp 2 --pp 2 --ep 2 --experts 4 --microbatches 8 --schedule dualpipev"
LAYOUTS = {  # ranks: flags of train.py
    2: ["--dp 2 --zero 3", "--tp 2 --sp", "--pp 2", "--cp 2 --recompute block", DOCUMENTS, ISLANDS],
    4: ["--tp 2 --sp --pp 2 --schedule zb-h1", "--dp 2 --cp 2 --ep 4 --experts 4", V, DUALPIPE],
    8: ["--dp 2 --tp 2 --pp 2 --zero 1", "--dp 8 --zero 3 --zero-ranks 2 --offload"],
}


# --- the parts: their rows' names, by device and number of GPUs, and what measures a row


def proof_cases(device, gpus):
    ranks, backend = (ranks_of(gpus), "nccl") if gpus > 1 else (4, "gloo")
    commands = []
    for needed, layouts in LAYOUTS.items():
        if needed <= ranks:
            commands += [f"train.py {flags}" for flags in layouts]
    cases = [f"{command} --device {device} --backend {backend}" for command in commands]
    return cases + (["train.py --device cuda --backend nccl"] if gpus == 1 else [])


def ranks_of(gpus):
    """The models' sizes divide by no other numbers."""
    return max(n for n in (1, 2, 4, 8) if n <= gpus)


def proof(case):
    words = [case, "--quiet", "--steps 3 --timeout 120 --heads 8"]
    words += [] if "--dtype" in case else ["--dtype float64"]
    words += ["--width 32 --context 32"] if "--device cpu" in case else []
    words += [ALONE] if case.startswith("train.py") else []
    receipt = benchmarks.receipt(" ".join(words), passing=(0, 1))
    error = receipt.get("max_error", {}).get("grad")
    if not receipt["ok"]:
        raise harness.Refused(f"the receipt: largest error of a gradient {error}")
    return {"ranks": receipt["world_size"], "error": error}


def speed(flags):
    command = f"train.py {TRAIN} {flags} --steps {STEPS}"
    sides = [[], []] if GPT2 in flags else [[]]  # nanoGPT has no Llama
    for _ in range(TURNS):
        steps = benchmarks.receipt(command)["steps"]
        sides[0].append(statistics.median(step["tokens_per_s"] for step in steps[WARM_UP:]))
        if len(sides) > 1:
            said = benchmarks.call(["-c", f"from benchmarks import gpu; gpu.plain({flags!r})"])
            rates = json.loads(said.rpartition("\n")[2])[WARM_UP:]
            sides[1].append(statistics.median(rates))
    row = {"tokens_per_s": [statistics.median(side) for side in sides]}
    if len(sides) > 1:
        row["ratio"] = benchmarks.quartiles(*sides)
    if tracking.peak():
        flops = flops_per_token(settled(flags)[1])
        row["mfu"] = [rate * flops / tracking.peak() for rate in row["tokens_per_s"]]
    return row


def plain(flags):
    """Print the tokens/s of nanoGPT's steps, as JSON."""
    print(json.dumps(nanogpt.train(*settled(flags))))


def settled(flags):
    """train.py's flags of a run, and the model's Config."""
    return layout.prepare(train.flags().parse_args(f"{TRAIN} --steps {STEPS} {flags}".split()))


def kernels(flags):
    with tempfile.TemporaryDirectory() as folder:
        benchmarks.receipt(f"train.py {TRAIN} {flags} --steps 6 --profile-to {folder}")
        with open(os.path.join(folder, "rank0.json")) as file:
            return shares(json.load(file)["traceEvents"], PROFILED)


def shares(events, steps):
    """A step by the events of its trace. ms: from the GPU's first operation to its last. busy: the
    part of it in which the GPU works. waits: of the host for the GPU. largest: milliseconds of the
    operations that take longest."""
    ours = [e for e in events if e.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")]
    ours.sort(key=lambda e: e["ts"])
    times, busy, end = collections.Counter(), 0.0, -math.inf
    for event in ours:
        begin, stop = event["ts"], event["ts"] + event["dur"]
        times[event["name"][:80]] += event["dur"] / 1e3 / steps
        busy, end = busy + max(0.0, stop - max(begin, end)), max(end, stop)
    span = end - ours[0]["ts"]
    waits = sum("Synchronize" in e["name"] for e in events if e.get("cat") == "cuda_runtime")
    row = {"ms": span / 1e3 / steps, "busy": busy / span, "waits": waits / steps}
    return row | {"launches": len(ours) / steps, "largest": dict(times.most_common(15))}


def pair_cases(device, gpus):
    return [f"--nproc {min(4, ranks_of(gpus))} --only {pair}" for pair in PAIRS]


def beside_torch(flags):
    command = f"-m benchmarks.vs_torch --device cuda --quiet {flags}"
    return benchmarks.receipt(command, passing=(0, 1))[0]


# {name: (names of the rows, what measures one, GPUs that it needs)}
PARTS = {
    "proofs": (proof_cases, proof, 0),
    "speed": (lambda *_: MODELS, speed, 1),
    "kernels": (lambda *_: MODELS, kernels, 1),
    "vs_torch": (pair_cases, beside_torch, 2),
}


def measure(part, case):
    """A row, which may say why it could not be measured."""
    try:
        return {"name": case} | PARTS[part][1](case)
    except (Exception, harness.Refused) as e:
        return {"name": case, "failed": str(e) if isinstance(e, harness.Refused) else repr(e)}


def kept(path, device):
    """The rows of another run on the same device that did not fail."""
    with open(path) as file:
        before = json.load(file)
    if before["device"] != device:
        raise harness.Refused(f"--go-on: {path} is of {before['device']}, this is {device}")
    return {part: [row for row in before[part] if "failed" not in row] for part in PARTS}


def main():
    p = harness.Parser(__doc__)
    p.add_argument("--only", nargs="+", choices=list(PARTS), metavar="PART", help="some parts")
    p.add_argument("--json", default="docs/gpu.json", metavar="FILE", help="write the rows as JSON")
    why = "end after so long: a row that is cut off is a failure, those after it are left out"
    p.add_argument("--budget", type=harness.real(0.1), metavar="MINUTES", help=why)
    why = "keep the rows of --json that did not fail, and measure the others"
    p.add_argument("--go-on", action="store_true", help=why)
    why = "cpu rehearses the proofs, with small sizes"
    p.add_argument("--device", choices=["cuda", "cpu"], default="cuda", help=why)
    args = p.parse_args()
    gpus = torch.cuda.device_count() if args.device == "cuda" else 0
    if args.device == "cuda" and not gpus:
        raise harness.Refused("no GPU is visible here: --device cpu rehearses the proofs")
    for part in args.only or []:
        if PARTS[part][2] > gpus:
            least = f"at least {PARTS[part][2]} GPUs, and there are {gpus}"
            raise harness.Refused(f"{part} needs {least}: leave it out of --only")
    check_file("--json", args.json)
    where = f"{gpus} x {torch.cuda.get_device_name()}" if gpus else "CPUs"
    found = {"device": f"{where}, torch {torch.__version__}"} | {part: [] for part in PARTS}
    if args.go_on and os.path.exists(args.json):
        found |= kept(args.json, found["device"])
    print(found["device"])
    deadline = time.monotonic() + 60 * (args.budget or math.inf)
    for part, (cases, _, needed) in PARTS.items():
        if needed > gpus or part not in (args.only or PARTS):
            continue
        done = {row["name"] for row in found[part]}
        for case in cases(args.device, gpus):
            left = deadline - time.monotonic()
            if case in done or left <= 0:
                continue
            benchmarks.LONGEST = min(benchmarks.LONGEST, left)
            row = measure(part, case)
            found[part].append(row)
            print(", ".join(f"{key} {value}" for key, value in row.items()), flush=True)
            with open(args.json, "w") as file:
                json.dump(found, file, indent=1)
    failed = [row for part in PARTS for row in found[part] if "failed" in row]
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    harness.script(main)
