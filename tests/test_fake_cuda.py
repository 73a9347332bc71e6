"""The scripts on a CUDA device that does not exist: nothing is in the wrong place, and the host
waits for the device once a step, which still has work then. fake_cuda.py says what it can see.
Skipped without a compiler."""

import json
import pathlib
import shutil
import subprocess
import sys

import pytest
import torch

HERE = pathlib.Path(__file__).parent
SMALL = "--layers 1 --batch 12 --microbatches 2"
TRAIN = f"{SMALL} --steps 3 --sample 0 --eval-every 2 --eval-batches 1"
DUALPIPEV = "--layers 4 --microbatches 4 --pp 2 --schedule dualpipev"
MIXTURE = "--family llama --kv-heads 2 --experts 8"

# script, flags, rank, ranks, and the most kernels that a step may launch: what torch 2.13 launches,
# and 5% for other versions. Lower it where it falls
CASES = [
    ("train", f"{TRAIN} --dp 3", 1, 3, 260),
    ("train", f"{TRAIN} --dp 3 --zero 2 --param-dtype bfloat16 --offload", 1, 3, 230),
    ("train", f"{TRAIN} --tp 4 --sp --gather-again", 1, 4, 305),
    ("train", f"{TRAIN} --cp 4 --context 2048", 1, 4, 420),
    ("train", f"{TRAIN} --cp 2 --family llama --kv-heads 2 --param-dtype bfloat16", 1, 2, 520),
    ("train", f"{TRAIN} --cp 4 --cp-kind ulysses --family llama --kv-heads 2", 1, 4, 430),
    ("train", f"{TRAIN} --dp 3 --ep 3 --experts 5 --shared 1 --expert-chunks 4", 1, 3, 720),
    ("train", f"{TRAIN} --out OUT", 0, 1, 220),
    ("train", f"{TRAIN} --layers 2 --dp 2 --tp 2 --pp 2", 5, 8, 220),
    ("train", f"{TRAIN} --layers 2 --dp 2 --tp 2 --sp --pp 2 --zero 1", 0, 8, 240),
    ("train", f"{TRAIN} --dp 3 --zero 2 --param-dtype bfloat16 --out OUT", 2, 3, 240),
    ("train", f"{TRAIN} --dp 2 --zero 3 --recompute block", 1, 2, 260),
    ("train", f"{TRAIN} --dp 6 --zero 3 --zero-ranks 3 --microbatches 1", 4, 6, 145),
    ("train", f"{TRAIN} --layers 4 --pp 4 --schedule zb-h1", 2, 4, 145),
    ("train", f"{TRAIN} --dp 2 --optimizer muon", 1, 2, 400),
    ("train", f"{TRAIN} {DUALPIPEV} --zero 2", 1, 2, 440),
    ("train", f"{TRAIN} --cp 4 --cp-kind ring-ulysses --param-dtype bfloat16", 2, 4, 350),
    ("train", f"{TRAIN} --cp 2 --tp 2 --sp --dropout 0.1", 3, 4, 640),
    ("train", f"{TRAIN} --dp 2 --cp 2 --ep 4 {MIXTURE} --zero 1", 1, 4, 665),
    ("train", f"{TRAIN} --layers 2 --dp 2 --ep 2 --pp 2 {MIXTURE} --expert-chunks 2", 3, 4, 700),
    ("train", f"{TRAIN} --family llama --kv-heads 2 --recompute selective", 0, 1, 440),
]


def library(folder):
    """fakecuda.cpp, compiled."""
    from torch.utils.cpp_extension import include_paths

    path = folder / "libfakecuda.so"
    torch_libraries = pathlib.Path(torch.__file__).parent / "lib"
    command = ["g++", "-O0", "-fPIC", "-shared", "-std=c++20", str(HERE / "fakecuda.cpp")]
    command += [f"-I{include}" for include in include_paths()]
    command += ["-o", str(path), f"-L{torch_libraries}", f"-Wl,-rpath,{torch_libraries}"]
    subprocess.run([*command, "-ltorch_cpu", "-lc10"], check=True, capture_output=True)
    return path


def problems(case, result):
    """What is wrong with a step on CUDA, as sentences."""
    *_, most = case
    if result["error"]:
        yield result["error"]
        return
    yield from result["misplaced"]
    # A dispatch must know how many rows travel
    waits = {wait for wait in result["waits"] if "the experts' sizes" not in wait}
    # With offload the host's optimizer waits for all gradients at once, and for the norm
    if sum(result["waits"][wait] for wait in waits) != 2 * ("--offload" in case[1]):
        yield f"the host waits: {result['waits']}"
    # The loss and the norm are read together. train.py's device has the optimizer's step then
    least = 15 if case[0] == "train" else 0
    if result["queued"] is None or result["queued"] < least:
        yield f"{result['queued']} kernels are left when the host waits, at least {least} before"
    if result["kernels"] > most:
        yield f"{result['kernels']} kernels a step, {most} before"


@pytest.mark.skipif(not shutil.which("g++"), reason="needs g++")
def test_steps_on_cuda(tmp_path):
    """All cases and the planted mistakes in one process, which imports torch once."""
    path = library(tmp_path)
    command = [sys.executable, "-W", "ignore", str(HERE / "fake_cuda.py"), str(path)]
    cases = "\n".join(json.dumps(case[:4]) for case in CASES)
    cases = cases.replace("OUT", str(tmp_path / "out"))
    done = subprocess.run(command, input=cases, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    planted, *results = [json.loads(line) for line in done.stdout.splitlines()]
    # Three waits, two tensors that nccl would refuse, and scores
    assert planted == [3, 3]
    found = []
    for case, result in zip(CASES, results, strict=True):
        print(case, *(result.get(key) for key in ("kernels", "queued", "waits")))
        found += [f"{case[0]} {case[1]}: {problem}" for problem in problems(case, result)]
    assert not found, "\n".join(found)
