"""benchmarks/gpu.py: refused without a GPU, rehearsed on CPUs, and run where there is a GPU."""

import os
import pathlib
import subprocess
import sys

import pytest
import torch

import harness
from benchmarks import gpu

ROOT = pathlib.Path(__file__).parent.parent


def measure(*flags, visible=""):
    """Run the command with these GPUs: CUDA_VISIBLE_DEVICES, or "all" where that is not set."""
    command = [sys.executable, "-m", "benchmarks.gpu", *flags]
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": visible}
    if visible == "all":
        del environment["CUDA_VISIBLE_DEVICES"]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)


def table_of(flags, monkeypatch, capsys):
    """What a run prints on CPUs, and whether all rows could be measured."""
    monkeypatch.setattr(sys, "argv", ["gpu.py", "--device", "cpu", *flags.split()])
    try:
        gpu.main()
    except SystemExit as e:
        assert e.code == 1
        return capsys.readouterr().out, False
    return capsys.readouterr().out, True


def test_without_a_gpu_it_refuses():
    done = measure()
    assert done.returncode == 2 and done.stdout == ""
    [sentence] = done.stderr.splitlines()
    assert sentence.startswith("gpu.py: no GPU is visible here: --device cpu rehearses")


def test_a_proof_is_rehearsed_on_cpus(monkeypatch, capsys):
    monkeypatch.setattr(
        gpu,
        "TECHNIQUES",
        ["ddp.py --sync naive --nproc 2 --layers 1 --steps 2 --width 32 --heads 2 --context 16"],
    )
    text, ok = table_of("--only proofs --cases ddp", monkeypatch, capsys)
    [row] = [line for line in text.splitlines() if line.startswith("| ddp.py")]
    assert ok and row.split(" | ")[1] == "2" and row.endswith("| proven |")


def test_a_failure_is_a_row_and_the_others_go_on(monkeypatch, capsys):
    def fail(*_):
        raise harness.Refused("so it is")

    monkeypatch.setitem(gpu.PARTS, "proofs", gpu.PARTS["proofs"]._replace(measure=fail))
    monkeypatch.setattr(gpu, "worker", lambda function, *words: (1e-3, 1.0))
    text, ok = table_of("--only proofs kernels", monkeypatch, capsys)
    assert not ok and "failed: so it is" in text
    assert text.count("| failed: differs by 1.0e-03 forward, 1.0e+00 backward |") == 5


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_kernels_on_cpus(dtype):
    for errors in (gpu.attention_errors, gpu.product_errors):
        found = errors(getattr(torch, dtype), "cpu")
        assert all(0 < error < gpu.LIMITS[dtype] for error in found)


def test_the_longest_kernels():
    spans = [{"name": name, "dur": dur} for name, dur in [("a", 1000), ("b", 3000), ("a", 4000)]]
    assert gpu.kernel_rows(spans, most=1) == [
        ["all kernels and copies", 3, "8.0 ms", ""],
        ["`a`", 2, "5.0 ms", "62%"],
    ]


@pytest.mark.gpu
@pytest.mark.skipif(not os.path.exists("/dev/nvidia0"), reason="there is no GPU here")
def test_on_a_gpu():
    visible = os.environ["USERS_GPUS"]  # see conftest.py
    if visible == "":
        pytest.skip("CUDA_VISIBLE_DEVICES hides all GPUs")
    done = measure("--only", "proofs", "kernels", "waits", visible=visible)
    assert done.returncode == 0, done.stdout + done.stderr
