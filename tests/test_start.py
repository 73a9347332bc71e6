"""harness/start.py: ranks started by torchrun and by ourselves, on any number, and how they end."""

import argparse
import faulthandler
import json
import os
import pathlib
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.run
from conftest import ROOT, Script, children, refused, usual_signals
from test_harness import SMALL

import harness
import proof
import train
from harness import host_messages, joining, start


class Torchrun(Script):
    """A script under torchrun, which is forked from here: what its command calls, `main`, runs in a
    process that has imported torch. Its ranks are fresh processes, which import it themselves."""

    def __init__(self, folder, name, *flags, ranks, restarts=0):
        given = [f"--nproc_per_node={ranks}", "--standalone", f"--max-restarts={restarts}"]
        given += [str(ROOT / f"{name}.py"), *flags]

        def run():
            os.chdir(ROOT)
            try:
                torch.distributed.run.main(given)
            except BaseException:  # as Python does at its end
                traceback.print_exc()
                os._exit(1)
            os._exit(0)

        super().__init__(folder, name, [], run)


def test_as_many_ranks_as_gpus(monkeypatch):
    """Without --nproc a script takes 4 ranks, or one a GPU if there are fewer."""
    begun = []

    def launch(*flags):
        args = harness.parser("").parse_args(["--quiet", "--batch", "8", *flags])
        harness.configure(args)
        proof.launch(None, args)

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(start, "start_ranks", lambda work, world: begun.append(world) or 0)
    monkeypatch.setattr(start, "finish", lambda code: None)
    for flags in ([], ["--device", "cuda", "--backend", "gloo"], ["--device", "cpu"]):
        launch(*flags)
    with monkeypatch.context() as one:  # as srun --gpus-per-task=1 shows it
        one.setattr(torch.cuda, "device_count", lambda: 1)
        one.setenv("SLURM_PROCID", "0")
        launch("--nproc", "4")
    assert begun == [2, 4, 4, 4]
    pods = {"RANK": "0", "WORLD_SIZE": "4", "MASTER_ADDR": "::1", "MASTER_PORT": "1"}
    with monkeypatch.context() as one:  # as Kubeflow: nobody says how many ranks a host has
        for name, value in pods.items():
            one.setenv(name, value)
        one.setattr(start, "one_rank", mock.Mock(side_effect=LookupError("a rank began")))
        one.setattr(sys, "argv", ["train.py", "--quiet", "--dp", "4"])
        with pytest.raises(LookupError, match="a rank began"):
            train.main()
    for variables in ({}, pods | {"LOCAL_WORLD_SIZE": "4"}):
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        said = refused(monkeypatch, "train", "--dp 4")
        assert "4 ranks need 4 GPUs on nccl and this machine has 2" in said
        assert "share a GPU by --backend gloo" in said


def test_a_gpu_that_only_rank_1_cannot_use(monkeypatch, capsys, tmp_path):
    why = "The NVIDIA driver on your system is too old (found version 11040). Please update it"
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "set_device", mock.Mock(side_effect=RuntimeError(why)))
    # Forked ranks hang in a pool of threads that this process has begun
    monkeypatch.setattr(start, "share_cores", lambda *_: None)
    args = argparse.Namespace(device="cuda", backend="nccl")
    with mock.patch.dict(os.environ, RANK="1", WORLD_SIZE="2", STORE_FILE=f"{tmp_path}/store"):
        assert start.one_rank(lambda *_: 0, args) == 2
    said = f"cuda:0 can't be used ({why[:-18]}): use --device cpu\n"
    assert capsys.readouterr().err.endswith(said)


def test_under_torchrun(tmp_path):
    file = tmp_path / "receipt.json"
    run = Torchrun(tmp_path, "train", *SMALL, "--dp", "2", "--json", str(file), ranks=2)
    assert run.end() == 0, run.output()
    receipt = json.loads(file.read_text())
    assert receipt["ok"] and "proven" in run.output()
    assert receipt["world_size"] == 2 and len(receipt["steps"]) == 2
    assert receipt["max_error"]["loss"] < 1e-5 and receipt["sent"]
    assert all(row["formula_bytes"] is None or row["ok"] for row in receipt["sent"])


@pytest.mark.skipif(sys.platform != "linux", reason="a rank sees the death of its parent")
def test_torchrun_with_its_default_of_one_process(tmp_path):
    """The layout needs 2: train.py says so and starts them. kill -9 of torchrun's agent: the run
    saves and leaves. A launch, because it is torchrun's own processes that are killed."""
    out = tmp_path / "out"
    long = [*SMALL, "--sample", "0", "--prove", "0", "--steps", "100000", "--tp", "2"]
    run = Torchrun(tmp_path, "train", *long, "--out", str(out), ranks=1)
    [launcher] = run.wait_for("\nstep    5")
    ranks = children(launcher)
    assert len(ranks) == 2
    os.kill(run.pid, signal.SIGKILL)
    assert run.end() == -signal.SIGKILL and gone([launcher, *ranks], 60)
    assert "starting 2 processes" in run.output()
    step = int(re.search(r"stopped by SIGTERM: step (\d+) is saved", run.output())[1])
    assert (out / f"step-{step:08d}" / "index.json").exists()


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


LONG = "--dp 2 --batch 4 --steps 100000 --prove 0 --sample 0 --eval-every 0".split()


@pytest.mark.skipif(sys.platform != "linux", reason="finds the ranks in /proc")
@pytest.mark.parametrize(
    "number, expected",
    [(signal.SIGKILL, 1), (signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGUSR1, 138)],
)
def test_interrupted(tmp_path, number, expected):
    """A rank is killed, or who started the ranks is told to stop."""
    script = Script(tmp_path, "train", [*SMALL[:8], *LONG])
    pids = script.wait_for("step ")
    os.kill(pids[0] if number == signal.SIGKILL else script.pid, number)
    assert script.end() == expected and gone(pids) and "Traceback" not in script.output()
    [said] = script.errors()
    assert ("rank 0 was ended by SIGKILL" if number == signal.SIGKILL else "interrupted") in said


@pytest.mark.parametrize("flags", [["--nproc", "1"], ["--dp", "2"]])
def test_the_clusters_interface(tmp_path, flags):
    """On one machine it does not matter; where the launcher is another, it is a sentence."""
    cluster = lambda: os.environ.update(GLOO_SOCKET_IFNAME="ib0")  # noqa: E731
    script = Script(tmp_path, "train", [*SMALL, "--sample", "0", *flags], cluster)
    assert script.end() == 0, script.output()


def test_an_interface_that_is_not_there(capsys, tmp_path, monkeypatch):
    monkeypatch.setattr(start, "share_cores", lambda *_: None)
    monkeypatch.setattr(dist, "init_process_group", mock.Mock(side_effect=RuntimeError("no\nib0")))
    args = argparse.Namespace(device="cpu", backend="gloo")
    launcher = dict(RANK="0", WORLD_SIZE="1", GLOO_SOCKET_IFNAME="ib0")
    with mock.patch.dict(os.environ, launcher):
        assert start.one_rank(lambda *_: 0, args) == 2
    said = "rank 0 can't connect by gloo (no ib0): set GLOO_SOCKET_IFNAME, now ib0, to an interface"
    assert said in capsys.readouterr().err


def test_no_folder_for_temporary_files(tmp_path):
    def read_only():
        tempfile.gettempdir = mock.Mock(side_effect=FileNotFoundError("No usable directory"))

    script = Script(tmp_path, "train", SMALL, read_only)
    assert script.end() == 2
    assert script.errors() == [
        "train.py: No usable directory: set TMPDIR to a folder that can be written"
    ]


def test_few_threads(monkeypatch):
    monkeypatch.setattr(os, "getuid", lambda: 1000)
    monkeypatch.setattr(start.resource, "getrlimit", lambda _: (20, 20))
    with pytest.raises(harness.Refused, match="2 ranks need 32 threads .* ulimit -u allows 20"):
        start.start_ranks(lambda: 0, 2)


def test_one_process_is_interrupted(tmp_path):
    script = Script(tmp_path, "train", [*SMALL[:8], *LONG[2:]])
    script.wait_for("step ")
    os.kill(script.pid, signal.SIGHUP)
    said = "train.py: interrupted by SIGHUP: nothing was saved, --out FOLDER saves"
    assert script.end() == 129 and script.errors() == [said]


def test_ctrl_c_while_torch_is_imported(tmp_path):
    """And where it is imported by someone who catches everything."""
    raised = "os.kill(os.getpid(), signal.SIGINT)"
    caught = f"import os, signal\ntry:\n    {raised}\nexcept BaseException:\n    pass\n"
    (tmp_path / "torch.py").write_text(caught)
    command, environment = [sys.executable, "train.py"], os.environ | {"PYTHONPATH": str(tmp_path)}
    options = {"cwd": ROOT, "env": environment, "stderr": subprocess.PIPE, "text": True}
    for before in (usual_signals, lambda: (usual_signals(), os.close(1))):
        done = subprocess.run(command, preexec_fn=before, **options)
        assert (done.returncode, done.stderr) == (130, "train.py: interrupted by SIGINT\n")


@pytest.mark.parametrize("flags", [["--nproc", "1"], ["--dp", "2"]])
def test_streams_that_nobody_reads(tmp_path, flags):
    def closed():
        sys.stdout = sys.stderr = None

    def head():
        reader, writer = os.pipe()
        os.close(reader)
        sys.stdout = open(writer, "w")

    for before, code in ((closed, 0), (head, 141)):
        script = Script(tmp_path, "train", [*SMALL, "--sample", "0", *flags], before)
        assert script.end() == code and script.errors() == [], script.output()
        assert "Traceback" not in script.output()


def test_a_picture_of_schedules_on_a_full_disk(tmp_path):
    def full():
        sys.stdout = open("/dev/full", "w")

    script = Script(tmp_path, "receipts.pipeline", ["--nproc", "2"], full)
    assert script.end() == 1 and "Traceback" not in script.output()
    assert script.errors() == [
        "receipts.pipeline.py: what it prints finds no room: the disk is full"
    ]


def test_a_signal_in_the_middle_of_a_print(capfd):
    class Printing:
        def flush(self):
            raise RuntimeError("reentrant call")

    def end():
        sys.stdout = Printing()
        start.finish(143)

    pid = os.fork()
    if pid == 0:
        end()
    assert code_of(pid) == 143


def launch(work, world, before=lambda: None):
    """The process id of a fork that starts ranks: work(rank) on each."""

    def main():
        before()
        start.finish(start.start_ranks(lambda: work(joining.launched().rank), world))

    sys.stdout.flush()
    pid = os.fork()
    if pid == 0:
        try:
            usual_signals()
            start.script(main)
        finally:
            os._exit(3)
    return pid


def code_of(pid):
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def sleep_on(rank):
    time.sleep(60)


forks = pytest.mark.skipif(not start.can_fork(), reason="forks its ranks")


@forks
@pytest.mark.parametrize(
    "ends, said",
    [
        ((None, -signal.SIGHUP, None), "rank 1 was ended by SIGHUP"),
        ((-signal.SIGUSR1, -signal.SIGTERM), "rank 0 was ended by SIGUSR1, rank 1 was ended by SI"),
        # Of those that end by themselves one lost its peer, one said why
        ((start.LOST, 1, -signal.SIGABRT, None), "rank 2 was ended by SIGABRT; the others stop"),
    ],
)
def test_every_rank_that_is_ended_is_named(capfd, ends, said):
    def work(rank):
        code = 0 if ends[rank] is None else ends[rank]
        if code < 0:
            faulthandler.disable()  # pytest's own would show the stack of an abort that is meant
            os.kill(os.getpid(), -code)
        return code or sleep_on(rank)

    assert code_of(launch(work, len(ends))) == 1
    err = capfd.readouterr().err
    assert said in err and len(err.splitlines()) == 1


@forks
def test_ctrl_c_at_any_moment_and_again(capfd, tmp_path):
    """The whole group gets it, as from a terminal; some get it twice, or SIGTERM before."""
    chance, begun = random.Random(3), tmp_path / "begun"
    for trial in range(9):
        pid = launch(sleep_on, 3, lambda: (os.setpgid(0, 0), begun.touch()))
        while not begun.exists():
            time.sleep(0.001)
        time.sleep(chance.uniform(0.0, 0.08))
        if trial % 3 == 2:
            os.killpg(pid, signal.SIGTERM)
        os.killpg(pid, signal.SIGINT)
        if trial % 3 == 1:
            time.sleep(chance.uniform(0, 0.02))
            os.kill(pid, signal.SIGINT)
        code, err = code_of(pid), capfd.readouterr().err
        # SIGTERM may come before the process can handle it: then it ends by that
        assert code in (130, 143, -signal.SIGTERM)
        assert code < 0 or re.fullmatch(r"\S+: interrupted by (SIGINT|SIGTERM)(: .*)?\n", err)
        begun.unlink()


@forks
def test_under_nohup_a_closed_terminal_ends_nothing(capfd):
    ignore = lambda: signal.signal(signal.SIGHUP, signal.SIG_IGN)  # noqa: E731
    pid = launch(lambda rank: time.sleep(0.5) or 0, 2, ignore)
    time.sleep(0.2)
    os.kill(pid, signal.SIGHUP)
    assert code_of(pid) == 0 and capfd.readouterr().err == ""


@forks
def test_a_failing_rank_is_named_once(capfd):
    """The other ranks, which wait for it, end too, and have no word."""

    def work(rank):
        def fail(rank, world, device):
            if rank == 1:
                1 / 0
            dist.all_reduce(torch.zeros(1))

        args = harness.parser("").parse_args("--device cpu --backend gloo".split())
        return start.one_rank(fail, args)

    assert code_of(launch(work, 3)) == 1
    err = capfd.readouterr().err
    assert "rank 1 failed:" in err and "ZeroDivisionError" in err and err.count("rank ") == 1


def test_no_memory_left_is_one_sentence(capfd):
    """Which the machine did not foresee: see rank.check_memory."""
    args = harness.parser("").parse_args("--device cpu --backend gloo".split())
    work = lambda *rank: torch.empty(1 << 60)  # noqa: E731
    assert code_of(launch(lambda rank: start.one_rank(work, args), 1)) == 1
    err = capfd.readouterr().err
    assert "rank 0 found no memory left in <lambda>()" in err and len(err.splitlines()) == 1


def on_one_core():
    """Have a single rank use one thread: two of them wait for each other on a busy machine."""
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, [min(os.sched_getaffinity(0))])


def test_one_rank(tmp_path):
    done = Script(tmp_path, "train", [*SMALL, "--nproc", "1", "--dtype", "float64"], on_one_core)
    assert done.end() == 0 and " proven: " in done.output()


def not_forked(*flags):
    """What makes a Script start its ranks as on GPUs: fresh processes of the same command, which
    find each other by a file."""

    def before():
        os.chdir(ROOT)
        sys.orig_argv = [sys.executable, str(ROOT / "train.py"), *flags]
        start.can_fork = lambda: False

    return before


@pytest.mark.skipif(sys.platform != "linux", reason="finds the ranks in /proc")
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_fresh_ranks_end_with_their_launcher(tmp_path, number):
    """At kill -9 once they run; at Ctrl-C of the group while they import torch, without a word."""
    flags = [*SMALL[:8], "--dp", "2", "--steps", "100000", "--prove", "0"]
    prepare = not_forked(*flags)
    script = Script(tmp_path, "train", flags, lambda: (prepare(), os.setpgid(0, 0)))
    if number == signal.SIGKILL:
        ranks = script.wait_for("step ")
        os.kill(script.pid, number)
    else:
        deadline = time.monotonic() + 60
        while len(ranks := children(script.pid)) < 2 and time.monotonic() < deadline:
            time.sleep(0.01)
        time.sleep(0.3)
        os.killpg(script.pid, number)
    assert len(ranks) == 2 and script.end() == (-9 if number == signal.SIGKILL else 130)
    assert gone(ranks)
    if number == signal.SIGINT:
        [said] = script.errors()
        assert said.startswith("train.py: interrupted by SIGINT"), script.output()
        assert "Traceback" not in script.output()


def through_the_host():
    """As gloo ranks on a GPU: every message between two ranks is staged."""
    host_messages.on_host = lambda tensor: tensor.detach().clone()
    host_messages.install()


@pytest.mark.parametrize(
    "flags",
    [
        "train --cp 3",
        "train --pp 3 --schedule zb-v --layers 6",
    ],
)
def test_messages_through_the_host(tmp_path, flags):
    script, *flags = flags.split()
    flags = [*SMALL, *flags, "--dtype", "float64", "--nproc", "3"]
    done = Script(tmp_path, script, flags, through_the_host)
    assert done.end() == 0 and " proven: " in done.output(), done.output()
