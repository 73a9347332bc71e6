"""benchmarks/gpu.py: refused without a GPU, rehearsed on CPUs, and run where there is a GPU."""

import json
import os
import subprocess
import sys

import pytest
from conftest import ROOT

import harness
from benchmarks import gpu, nanogpt

SMALL = "ddp.py --sync naive --nproc 2 --layers 1 --heads 2 --device cpu --backend gloo"


@pytest.mark.parametrize(
    "flags, why",
    [
        ([], "no GPU is visible here: --device cpu rehearses the proofs"),
        (["--device", "cpu", "--only", "speed"], "speed needs at least 1 GPUs, and there are 0"),
        (["--measured", "docs/gpu.json"], "--measured is for --plot NAME"),
    ],
)
def test_it_refuses(monkeypatch, capsys, flags, why):
    """Else half an hour on GPUs begins that cannot end well."""
    monkeypatch.setattr(sys, "argv", ["gpu.py", *flags])
    with pytest.raises(harness.Refused) as e:
        gpu.main()
    assert e.value.code == 2 and str(e.value).startswith(why) and "\n" not in str(e.value)
    assert not capsys.readouterr().out


def test_rehearsed_on_cpus_a_failure_is_a_row_and_the_others_go_on(monkeypatch, tmp_path):
    cases = [SMALL.replace("--nproc 2", "--nproc 3"), SMALL]  # 3 ranks don't divide the batch
    monkeypatch.setitem(gpu.PARTS, "proofs", (lambda *_: cases, gpu.proof, 0))
    found = tmp_path / "gpu.json"
    monkeypatch.setattr(sys, "argv", ["gpu.py", "--device", "cpu", "--json", str(found)])
    with pytest.raises(SystemExit) as end:
        gpu.main()
    wrong, right = json.loads(found.read_text())["proofs"]
    assert end.value.code == 1 and "ended with exit code 2" in wrong["failed"]
    assert right["name"] == SMALL and right["ranks"] == 2 and 0 < right["error"] < 1e-10


@pytest.mark.parametrize(
    "gpus, ranks, train", [(0, 4, 6), (1, 4, 7), (2, 2, 4), (7, 4, 6), (8, 8, 8)]
)
def test_what_is_proven(gpus, ranks, train):
    cases = gpu.proof_cases("cuda", gpus)
    others = [case for case in cases if not case.startswith("train.py")]
    assert len(cases) - len(others) == train and len(others) == len(gpu.TECHNIQUES)
    backend = "nccl" if gpus > 1 else "gloo"
    assert all(f"--nproc {ranks} --device cuda --backend {backend}" in case for case in others)


def test_nanogpt_has_the_parameters_of_gpt2():
    args, config = gpu.settled("--batch 2 --layers 1 --width 32 --heads 2 --context 8")
    args.steps = 2
    assert len(nanogpt.train(args, config, "cpu")) == 2
    count = sum(p.numel() for p in nanogpt.GPT(config).parameters())
    assert count == harness.parameter_count(config)


@pytest.mark.gpu
@pytest.mark.skipif(not os.path.exists("/dev/nvidia0"), reason="there is no GPU here")
def test_on_a_gpu(tmp_path):
    visible = os.environ["USERS_GPUS"]  # see conftest.py
    if visible == "":
        pytest.skip("CUDA_VISIBLE_DEVICES hides all GPUs")
    command = [sys.executable, "-m", "benchmarks.gpu", "--only", "proofs"]
    command += ["--json", str(tmp_path / "gpu.json")]
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": visible}
    if visible == "all":
        del environment["CUDA_VISIBLE_DEVICES"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
