"""benchmarks/gpu.py: refused without a GPU, rehearsed on CPUs, and run where there is a GPU."""

import json
import os
import subprocess
import sys

import pytest
from conftest import ROOT

import benchmarks
import harness
from benchmarks import gpu, nanogpt

SMALL = "train.py --dp 2 --layers 1 --heads 2 --device cpu --backend gloo"


@pytest.mark.parametrize(
    "flags, why",
    [
        ([], "no GPU is visible here: --device cpu rehearses the proofs"),
        (["--device", "cpu", "--only", "speed"], "speed needs at least 1 GPUs, and there are 0"),
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
    cases = [SMALL.replace("--dp 2", "--dp 3"), SMALL]  # 3 ranks don't divide the batch
    monkeypatch.setitem(gpu.PARTS, "proofs", (lambda *_: cases, gpu.proof, 0))
    found = tmp_path / "gpu.json"
    monkeypatch.setattr(sys, "argv", ["gpu.py", "--device", "cpu", "--json", str(found)])
    with pytest.raises(SystemExit) as end:
        gpu.main()
    wrong, right = json.loads(found.read_text())["proofs"]
    assert end.value.code == 1 and "ended with exit code 2" in wrong["failed"]
    assert right["name"] == SMALL and right["ranks"] == 2 and 0 < right["error"] < 1e-10


@pytest.mark.parametrize("gpus, layouts", [(0, 10), (1, 11), (2, 6), (7, 10), (8, 12)])
def test_what_is_proven(gpus, layouts):
    cases, backend = gpu.proof_cases("cuda", gpus), "nccl" if gpus > 1 else "gloo"
    assert len(cases) == layouts
    assert all(f"--device cuda --backend {backend}" in case for case in cases[: layouts - 1])


def test_a_budget_ends_a_run_and_another_one_goes_on(monkeypatch, tmp_path):
    """The second run measures what the first one left out, or failed at."""
    clock, found, done = [0.0], tmp_path / "gpu.json", []

    def measured(case):
        done.append((case, benchmarks.LONGEST))
        clock[0] += 50
        if case == "b" and len(done) == 2:
            raise OSError("lost")
        return {"ratio": [1.0, 1.0, 1.0]}

    monkeypatch.setattr(benchmarks, "LONGEST", 1200)
    monkeypatch.setattr(gpu.time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(gpu, "PARTS", {"speed": (lambda *_: list("abcd"), measured, 0)})
    words = ["gpu.py", "--device", "cpu", "--json", str(found), "--go-on"]
    for more in (["--budget", "2"], []):
        monkeypatch.setattr(sys, "argv", [*words, *more])
        with pytest.raises(SystemExit) as end:
            gpu.main()
    # Two minutes: the third row begins with 20 seconds left, the fourth does not
    assert done == [("a", 120), ("b", 70), ("c", 20), ("b", 20), ("d", 20)]
    assert [row["name"] for row in json.loads(found.read_text())["speed"]] == list("acbd")
    assert end.value.code == 0


def test_where_a_step_goes():
    def event(cat, name, ts, dur):
        return dict(cat=cat, name=name, ts=ts, dur=dur)

    events = [
        event("kernel", "product", 1000, 4000),
        event("cuda_runtime", "cudaStreamSynchronize", 0, 9000),
        event("kernel", "message", 3000, 3000),  # beside the product
        event("cpu_op", "aten::mm", 0, 50),
        event("gpu_memcpy", "copy", 8000, 1000),
    ]
    row = gpu.shares(events, 2)
    assert (row["ms"], row["busy"], row["waits"], row["launches"]) == (4, 0.75, 0.5, 1.5)
    assert row["largest"] == {"product": 2.0, "message": 1.5, "copy": 0.5}


def test_the_models_that_are_measured(monkeypatch):
    commands = []

    def refuse(command):
        commands.append(command.split()[1:])
        raise harness.Refused("")

    monkeypatch.setattr(benchmarks, "receipt", refuse)
    for part in ("speed", "kernels"):
        assert "failed" in gpu.measure(part, gpu.MODELS[0])
    for command in commands:  # its flags are train.py's
        assert gpu.train.flags().parse_args(command).prove == 0
    settled = [gpu.settled(flags) for flags in gpu.MODELS]
    assert [args.compile for args, _ in settled] == [False, True, True, True]
    assert all(
        args.param_dtype == "bfloat16" and config.vocab % 64 == 0 for args, config in settled
    )


def test_nanogpt_has_the_parameters_of_gpt2():
    args, config = gpu.settled(f"{gpu.GPT2} --batch 2 --layers 1 --width 32 --heads 2 --context 8")
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
