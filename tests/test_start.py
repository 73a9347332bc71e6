"""harness/start.py: ranks started by torchrun and by ourselves, on any number, and how they end."""

import json
import os
import pathlib
import re
import signal
import socket
import subprocess
import sys
import time

import pytest
import torch
import torch.distributed as dist
from conftest import Script, children
from test_harness import SMALL, refused

import harness
from harness import start

ROOT = pathlib.Path(__file__).parent.parent


def torchrun_of(script, *flags, torchrun, restarts=0):
    """A script under torchrun, as a process."""
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        f"--nproc_per_node={torchrun}",
        "--standalone",
    ]
    command += [f"--max-restarts={restarts}", str(ROOT / f"{script}.py"), *flags]
    clean = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE")}
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT, env=clean
    )


def end(process, timeout=90):
    out, err = process.communicate(timeout=timeout)
    return process.returncode, out, err


def test_wrong_number_of_ranks_under_torchrun(capfd, monkeypatch):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "4")
    said = refused(capfd, monkeypatch, "train", "--dp", "2", "--tp", "2", "--pp", "2")
    assert (
        "needs 8 processes and 4 were started: torchrun --nproc_per_node=8 train.py --dp 2" in said
    )


def test_fewer_gpus_than_ranks(capfd, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    said = refused(capfd, monkeypatch, "train", "--dp", "2", "--tp", "2", "--pp", "2")
    assert (
        "needs 8 GPUs and this machine has 4" in said
        and "torchrun --nnodes=2 --nproc_per_node=4" in said
    )


def test_port_in_use(tmp_path):
    with socket.socket() as busy:
        busy.bind(("127.0.0.1", 0))
        busy.listen()
        port = str(busy.getsockname()[1])
        environment = dict(RANK="0", WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
        done = Script(tmp_path, "ddp", SMALL, lambda: os.environ.update(environment))
        assert done.end() == 2
    [said] = done.output().splitlines()
    assert f"port {port}" in said and "in use" in said


def test_under_torchrun(tmp_path):
    file = tmp_path / "receipt.json"
    code, out, err = end(torchrun_of("ddp", *SMALL, "--json", str(file), torchrun=2))
    assert code == 0, err
    receipt = json.loads(file.read_text())
    assert (
        receipt["ok"]
        and receipt["world_size"] == 2
        and len(receipt["steps"]) == 2
        and "proven" in out
    )
    assert (
        receipt["max_error"]["loss"] < 1e-5
        and receipt["sent"]
        and receipt["held"]["parameters"]["bytes"] > 0
    )
    assert all(row["formula_bytes"] is None or row["ok"] for row in receipt["sent"])


def test_torchrun_with_its_default_of_one_process(tmp_path):
    """The layout needs 2: train.py says so and starts them; and the curve is that of one
    process."""
    flags = [*SMALL, "--sample", "0", "--dtype", "float64"]
    code, out, err = end(
        torchrun_of("train", *flags, "--tp", "2", "--json", str(tmp_path / "two.json"), torchrun=1)
    )
    assert code == 0 and "this layout needs 2 processes: starting them on this machine" in err
    script = Script(
        tmp_path,
        "train",
        [*flags, "--json", str(tmp_path / "one.json"), "--log-to", str(tmp_path / "log")],
    )
    assert script.end() == 0 and script.errors() == []
    two, one = (json.loads((tmp_path / f"{n}.json").read_text())["steps"] for n in ("two", "one"))
    for a, b in zip(two, one):
        assert a["loss"] == pytest.approx(b["loss"], rel=1e-10) and a["grad_norm"] == pytest.approx(
            b["grad_norm"], rel=1e-10
        )
    log = [json.loads(line) for line in (tmp_path / "log").read_text().splitlines()]
    assert [row["loss"] for row in log if "loss" in row] == [step["loss"] for step in one]


def gone(pids, seconds=10):
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if not any(
            pathlib.Path(f"/proc/{p}").exists()
            and "State:\tZ" not in pathlib.Path(f"/proc/{p}/status").read_text()
            for p in pids
        ):
            return True
        time.sleep(0.05)
    return False


LONG = "--dp 3 --batch 6 --steps 100000 --prove 0 --sample 0 --eval-every 0".split()


@pytest.mark.skipif(sys.platform != "linux", reason="finds the ranks in /proc")
def test_a_rank_is_killed_under_torchrun():
    process = torchrun_of("train", *SMALL[:8], *LONG, torchrun=3)
    while "step" not in process.stdout.readline():
        assert process.poll() is None, process.stderr.read()
    pids = children(process.pid)
    os.kill(pids[2], signal.SIGKILL)
    assert gone(pids)
    code, out, err = end(process, timeout=20)
    # Torchrun's own report may be all there is
    assert code == 1 and re.search(r"rank\s*:? 2 ", err)


@pytest.mark.skipif(sys.platform != "linux", reason="finds the ranks in /proc")
@pytest.mark.parametrize(
    "number, expected", [(signal.SIGKILL, 1), (signal.SIGINT, 130), (signal.SIGTERM, 143)]
)
def test_interrupted(tmp_path, number, expected):
    """A rank is killed, or who started the ranks is told to stop."""
    script = Script(tmp_path, "train", [*SMALL[:8], *LONG])
    pids = script.wait_for("step ")
    os.kill(pids[0] if number == signal.SIGKILL else script.pid, number)
    assert script.end() == expected and gone(pids) and "Traceback" not in script.output()
    [said] = script.errors()
    assert ("rank 0 was ended by SIGKILL" if number == signal.SIGKILL else "interrupted") in said


@pytest.mark.skipif(not start.can_fork(), reason="forks its ranks")
def test_a_killed_rank_is_named_after_one_that_lost_it(capfd):
    """Processes that end at about the same time are seen in any order."""

    def work(rank, connect):
        if rank == 1:
            return start.LOST
        time.sleep(0.3)
        return os.kill(os.getpid(), signal.SIGKILL)

    pid = os.fork()
    if pid == 0:
        os._exit(start.start_ranks(work, 2))
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 1
    assert "rank 0 was ended by SIGKILL" in capfd.readouterr().err


def test_a_failing_rank_is_named_once():
    def work(rank, connect):
        def fail(rank, world, device):
            if rank == 1:
                raise ZeroDivisionError("planted")
            dist.all_reduce(torch.zeros(1))

        args = harness.parser("").parse_args([])
        args.device, args.backend = "cpu", "gloo"
        return start.one_rank(fail, args, rank, 3, connect)

    pid = os.fork()
    if pid == 0:
        os._exit(start.start_ranks(work, 3))
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 1


SCRIPTS = ["ddp", "zero", "tensor_parallel", "sequence_parallel", "pipeline"]
SCRIPTS += ["context_parallel", "expert_parallel", "train"]


@pytest.mark.parametrize("script", SCRIPTS)
def test_every_technique_on_one_rank(tmp_path, script):
    done = Script(tmp_path, script, [*SMALL, "--nproc", "1", "--dtype", "float64"])
    assert done.end() == 0 and done.output().endswith("proven\n")


def test_ranks_that_are_not_forked():
    """As on GPUs: fresh processes, which find each other by a file."""
    lines = "import sys, train; from harness import start; start.can_fork = lambda: False; "
    lines += "sys.argv = sys.argv[1:]; start.script(train.main)"
    flags = [str(ROOT / "train.py"), *SMALL, "--dp", "2", "--sample", "0"]
    command = [sys.executable, "-c", lines, *flags]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=90)
    assert (
        done.returncode == 0 and "proven" in done.stdout and len(done.stderr.splitlines()) == 1
    ), done.stderr


def test_a_finished_job_exits_with_zero(script):
    assert script("ddp", " ".join(SMALL) + " --nproc 2 --quiet") == (0, "")
