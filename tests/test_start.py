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

import ddp
import harness
from harness import host_messages, start

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
        "8 ranks need 8 GPUs on nccl and this machine has 4" in said
        and "torchrun --nnodes=2 --nproc_per_node=4" in said
        and "--backend gloo --device cuda" in said
    )


def test_as_many_ranks_as_gpus(capfd, monkeypatch):
    """Without --nproc a demo takes 4 ranks, or one a GPU if there are fewer."""
    begun = []
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(start, "start_ranks", lambda work, world: begun.append(world) or 0)
    monkeypatch.setattr(start, "finish", lambda code: None)
    for flags in ([], ["--device", "cuda", "--backend", "gloo"], ["--device", "cpu"]):
        monkeypatch.setattr(sys, "argv", ["ddp.py", "--quiet", "--batch", "8", *flags])
        ddp.main()
    assert begun == [2, 4, 4]
    said = refused(capfd, monkeypatch, "ddp", "--nproc", "4")
    assert "--nproc 2 takes one rank a GPU" in said


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


@pytest.fixture
def fresh(tmp_path):
    """Begins `python -m fresh FLAGS`: ddp.py as on GPUs, with ranks that are not forked. They are
    fresh processes, which find each other by a file."""
    lines = "import ddp\nfrom harness import start\nstart.can_fork = lambda: False\n"
    (tmp_path / "fresh.py").write_text(lines + "start.script(ddp.main)\n")
    environment = dict(os.environ, PYTHONPATH=str(ROOT))
    command = [sys.executable, "-m", "fresh", *SMALL, "--nproc", "2"]

    def begin(*flags):
        pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        return subprocess.Popen([*command, *flags], cwd=tmp_path, env=environment, **pipes)

    return begin


def test_ranks_that_are_not_forked(fresh):
    code, out, err = end(fresh())
    assert code == 0 and "proven" in out and len(err.splitlines()) == 1, err


@pytest.mark.skipif(sys.platform != "linux", reason="finds the ranks in /proc")
def test_fresh_ranks_end_with_their_launcher(fresh):
    process = fresh("--steps", "100000", "--prove", "0")
    while "step" not in process.stdout.readline():
        assert process.poll() is None, process.stderr.read()
    ranks = children(process.pid)
    assert len(ranks) == 2
    process.kill()
    process.wait()
    assert gone(ranks)


def test_out_of_memory(tmp_path):
    """One sentence that says what to change; the other ranks end too, and wait for nobody."""

    def full():
        check = harness.Run.check

        def planted(run, *args, **kwargs):
            if run.step == 1 and run.rank == 1:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB\n...")
            return check(run, *args, **kwargs)

        harness.Run.check = planted

    done = Script(tmp_path, "ddp", [*SMALL, "--nproc", "2"], full)
    assert done.end() == 1
    [said] = done.errors()
    assert "rank 1 is out of memory" in said and "2.00 GiB" in said and "--microbatches" in said


def through_the_host():
    """As gloo ranks on a GPU: every message between two ranks is staged."""
    host_messages.needs_host = lambda tensor: True
    host_messages.install()


@pytest.mark.parametrize(
    "flags",
    [
        "ddp --sync server --batch 6",
        "ddp --all-reduce halving-doubling --batch 6",
        "context_parallel --kind ring",
        "pipeline --schedule 1f1b --layers 3",
        "pipeline --schedule zb-v --layers 6",
    ],
)
def test_messages_through_the_host(tmp_path, flags):
    script, *flags = flags.split()
    flags = [*SMALL, *flags, "--dtype", "float64", "--nproc", "3"]
    done = Script(tmp_path, script, flags, through_the_host)
    assert done.end() == 0 and done.output().endswith("proven\n"), done.output()


def test_a_message_through_the_host(ranks):
    """Waiting twice does not bring an old message back; a batch, and one that is not staged."""

    def work(rank):
        through_the_host()
        x = torch.full((3,), float(rank))
        got = torch.zeros(3)
        ops = [dist.P2POp(dist.isend, x, 1 - rank), dist.P2POp(dist.irecv, got, 1 - rank)]
        works = dist.batch_isend_irecv(ops)
        x += 10  # the message left with the old values
        for work in works:
            work.wait()
        assert works[1].is_completed() and got.tolist() == [1.0 - rank] * 3
        got += 1
        works[1].wait()
        assert got.tolist() == [2.0 - rank] * 3
        host_messages.needs_host = lambda tensor: False
        if rank == 0:
            dist.send(x, 1)
        else:
            dist.recv(got, 0)
            assert got.tolist() == [10.0] * 3

    ranks(2, work)


def test_a_finished_job_exits_with_zero(script):
    assert script("ddp", " ".join(SMALL) + " --nproc 2 --quiet") == (0, "")
