"""The scripts on a CUDA device that does not exist: nothing is in the wrong place, and the host
waits for the device once a step. fake_cuda.py says what it can see. Skipped without a compiler."""

import json
import pathlib
import shutil
import subprocess
import sys

import pytest
import torch

HERE = pathlib.Path(__file__).parent
SMALL = "--layers 2 --batch 12 --microbatches 2"
TRAIN = f"{SMALL} --steps 3 --sample 0 --eval-every 0"
MIXTURE = "--family llama --kv-heads 2 --experts 8"

# script, flags, rank, ranks, and the most kernels that a step may launch. Lower it where it falls
CASES = [
    ("ddp", SMALL, 1, 3, 700),
    ("ddp", f"{SMALL} --sync naive", 1, 3, 700),
    ("ddp", f"{SMALL} --sync server", 0, 3, 700),
    ("ddp", f"{SMALL} --all-reduce ring", 0, 3, 3000),
    ("zero", f"{SMALL} --stage 1", 1, 3, 700),
    ("zero", f"{SMALL} --stage 2 --param-dtype bfloat16", 1, 3, 900),
    ("zero", f"{SMALL} --stage 3", 1, 3, 900),
    ("tensor_parallel", SMALL, 1, 4, 1200),
    ("sequence_parallel", f"{SMALL} --gather-again", 1, 4, 1500),
    ("pipeline", "--layers 4 --batch 12 --microbatches 3", 1, 4, 1000),
    ("pipeline", "--layers 8 --batch 16 --schedule zb-v", 0, 4, 1500),
    ("context_parallel", SMALL, 1, 4, 4500),
    ("context_parallel", f"{SMALL} --kind gather --family llama", 1, 4, 4500),
    ("train", f"{TRAIN} --cp 2 --family llama --kv-heads 2 --param-dtype bfloat16", 1, 2, 4500),
    ("context_parallel", f"{SMALL} --kind ulysses --family llama --kv-heads 2", 1, 4, 2500),
    ("expert_parallel", f"{SMALL} --experts 5 --shared 1 --chunks 4", 1, 3, 4500),
    ("train", TRAIN, 0, 1, 600),
    ("train", f"{TRAIN} --dp 2 --tp 2 --pp 2", 5, 8, 1000),
    ("train", f"{TRAIN} --dp 2 --tp 2 --sp --pp 2 --zero 1", 0, 8, 1300),
    ("train", f"{TRAIN} --dp 3 --zero 2 --param-dtype bfloat16", 2, 3, 900),
    ("train", f"{TRAIN} --dp 2 --zero 3 --recompute block", 1, 2, 1200),
    ("train", f"{TRAIN} --layers 4 --pp 4 --schedule zb-h1", 2, 4, 700),
    (
        "train",
        f"{TRAIN} --layers 4 --microbatches 4 --pp 2 --schedule dualpipev --zero 2",
        1,
        2,
        1500,
    ),
    ("train", f"{TRAIN} --cp 4 --cp-kind ring-ulysses --param-dtype bfloat16", 2, 4, 4000),
    ("train", f"{TRAIN} --cp 2 --tp 2 --sp --dropout 0.1", 3, 4, 4000),
    ("train", f"{TRAIN} --dp 2 --cp 2 --ep 4 {MIXTURE} --zero 1", 1, 4, 5000),
    ("train", f"{TRAIN} --dp 2 --ep 2 --pp 2 {MIXTURE} --expert-chunks 2", 3, 4, 3500),
    ("train", f"{TRAIN} --family llama --kv-heads 2 --recompute selective", 0, 1, 1200),
]


@pytest.fixture(scope="module")
def played(tmp_path_factory):
    """What fake_cuda.py says of each case."""
    if not shutil.which("g++"):
        pytest.skip("needs g++")
    from torch.utils.cpp_extension import include_paths

    library = tmp_path_factory.mktemp("fakecuda") / "libfakecuda.so"
    torch_libraries = pathlib.Path(torch.__file__).parent / "lib"
    command = ["g++", "-O0", "-fPIC", "-shared", "-std=c++20", str(HERE / "fakecuda.cpp")]
    command += [f"-I{path}" for path in include_paths()]
    command += ["-o", str(library), f"-L{torch_libraries}", f"-Wl,-rpath,{torch_libraries}"]
    subprocess.run([*command, "-ltorch_cpu", "-lc10"], check=True, capture_output=True)
    cases = "\n".join(json.dumps(case[:4]) for case in CASES)
    command = [sys.executable, "-W", "ignore", str(HERE / "fake_cuda.py"), str(library)]
    done = subprocess.run(command, input=cases, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.parametrize("i", range(len(CASES)), ids=[" ".join(case[:2]) for case in CASES])
def test_a_step_on_cuda(played, i):
    result, most = played[i], CASES[i][4]
    assert result["error"] is None, result["error"]
    assert not result["misplaced"]
    if "pipeline" in CASES[i][0] or "--pp" in CASES[i][1]:
        assert not result["late"]
    # The loss and the norm are read together; a dispatch must know how many rows travel
    routed = [wait for wait in result["waits"] if "the experts' sizes" in wait]
    others = {wait: times for wait, times in result["waits"].items() if wait not in routed}
    assert len(others) == 1 and sum(others.values()) == 1, result["waits"]
    assert result["kernels"] <= most
    print(CASES[i][:2], result["kernels"], result["waits"])
