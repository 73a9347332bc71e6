"""harness/start.py: ranks started by torchrun and by ourselves, on any number, and how they end."""

import json
import os
import pathlib
import random
import re
import resource
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback

import pytest
import torch
import torch.distributed as dist
import torch.distributed.run
from conftest import Script, children, usual_signals
from test_harness import SMALL, refused
from test_house import TECHNIQUES

import ddp
import harness
import proof
from harness import host_messages, start

ROOT = pathlib.Path(__file__).parent.parent


class Torchrun(Script):
    """A script under torchrun, which is forked from here: what its command calls, `main`, runs in a
    process that has imported torch. It starts its ranks as processes, which import it themselves.
    What goes to stderr is in a file of its own."""

    def __init__(self, folder, name, *flags, ranks, restarts=0):
        self.complained = folder / "complained"
        given = [f"--nproc_per_node={ranks}", "--standalone", f"--max-restarts={restarts}"]
        given += [str(ROOT / f"{name}.py"), *flags]

        def run():
            os.chdir(ROOT)
            for key in ("RANK", "WORLD_SIZE"):
                os.environ.pop(key, None)
            # What processes say does not pass through this one's sys.stdout
            sys.stderr = open(self.complained, "w", buffering=1)
            os.dup2(sys.stdout.fileno(), 1)
            os.dup2(sys.stderr.fileno(), 2)
            code = 1
            try:
                torch.distributed.run.main(given)
                code = 0
            except BaseException:  # as Python does at its end
                traceback.print_exc()
            os._exit(code)

        super().__init__(folder, name, [], run)

    def complaints(self):
        return self.complained.read_text()


def test_wrong_number_of_ranks_under_torchrun(capfd, monkeypatch):
    given = {"RANK": "0", "WORLD_SIZE": "4", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    said = refused(capfd, monkeypatch, "train", "--dp", "2", "--tp", "2", "--pp", "2")
    assert "needs 8 processes and 4 were started: torchrun --nproc_per_node=8 train.py" in said


def test_fewer_gpus_than_ranks(capfd, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    said = refused(capfd, monkeypatch, "train", "--dp", "2", "--tp", "2", "--pp", "2")
    assert "8 ranks need 8 GPUs on nccl and this machine has 4" in said
    assert "torchrun --nnodes=2 --nproc_per_node=4" in said
    assert "--backend gloo --device cuda" in said


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
    run = Torchrun(tmp_path, "ddp", *SMALL, "--json", str(file), ranks=2)
    assert run.end() == 0, run.complaints()
    receipt = json.loads(file.read_text())
    assert receipt["ok"] and "proven" in run.output()
    assert receipt["world_size"] == 2 and len(receipt["steps"]) == 2
    assert receipt["max_error"]["loss"] < 1e-5 and receipt["sent"]
    assert all(row["formula_bytes"] is None or row["ok"] for row in receipt["sent"])


@pytest.mark.skipif(sys.platform != "linux", reason="a rank sees the death of its parent")
def test_torchrun_with_its_default_of_one_process(tmp_path):
    """The layout needs 2: train.py says so and starts them; and the curve is that of one process.
    kill -9 of torchrun's agent: the run saves and leaves. A launch, because it is torchrun's own
    processes that are killed."""
    flags = [*SMALL, "--sample", "0", "--dtype", "float64", "--lr", "0.01", "--min-lr", "0.01"]
    flags += ["--warmup", "0", "--prove", "0"]
    out, log = tmp_path / "out", tmp_path / "two.jsonl"
    long = ["--steps", "100000", "--tp", "2", "--out", str(out), "--log-to", str(log)]
    run = Torchrun(tmp_path, "train", *flags, *long, ranks=1)
    [launcher] = run.wait_for("\nstep    5")
    ranks = children(launcher)
    assert len(ranks) == 2
    os.kill(run.pid, signal.SIGKILL)
    assert run.end() == -signal.SIGKILL and gone([launcher, *ranks], 60)
    assert "this layout needs 2 processes: starting them on this machine" in run.complaints()
    step = int(re.search(r"stopped by SIGTERM: step (\d+) is saved", run.output())[1])
    assert (out / f"step-{step:08d}" / "index.json").exists()
    one = [*flags, "--steps", "5", "--log-to", str(tmp_path / "one")]
    script = Script(tmp_path, "train", one, on_one_core)
    assert script.end() == 0 and script.errors() == []
    two, one = ([json.loads(line) for line in open(path)] for path in (log, tmp_path / "one"))
    for a, b in zip(two[:5], one[:5], strict=True):
        assert a["loss"] == pytest.approx(b["loss"], rel=1e-10)
        assert a["grad_norm"] == pytest.approx(b["grad_norm"], rel=1e-10)


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
    [(signal.SIGKILL, 1), (signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)],
)
def test_interrupted(tmp_path, number, expected):
    """A rank is killed, or who started the ranks is told to stop."""
    script = Script(tmp_path, "train", [*SMALL[:8], *LONG])
    pids = script.wait_for("step ")
    os.kill(pids[0] if number == signal.SIGKILL else script.pid, number)
    assert script.end() == expected and gone(pids) and "Traceback" not in script.output()
    [said] = script.errors()
    assert ("rank 0 was ended by SIGKILL" if number == signal.SIGKILL else "interrupted") in said


def launch(work, world=2, before=lambda: None, **options):
    """The process id of a fork that starts ranks: work(rank, connect) on each."""
    sys.stdout.flush()
    pid = os.fork()
    if pid == 0:
        code = 3
        usual_signals()
        try:
            before()
            code = start.start_ranks(work, world, **options)
        except harness.Refused as e:
            code = start.refuse(e, 0)
        except KeyboardInterrupt:  # before it can handle any: as harness.script does
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            start.say("interrupted by SIGINT")
            code = 130
        finally:
            os._exit(code)
    return pid


def code_of(pid):
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def sleep_on(rank, connect):
    time.sleep(60)


def kill(*numbers):
    """Work on which rank r is ended by the r-th of these signals, if that is not None."""

    def work(rank, connect):
        if numbers[rank] is None:
            return sleep_on(rank, connect)
        return os.kill(os.getpid(), numbers[rank])

    return work


@pytest.mark.skipif(not start.can_fork(), reason="forks its ranks")
@pytest.mark.parametrize(
    "numbers, said",
    [
        ((signal.SIGKILL, None), "rank 0 was ended by SIGKILL"),
        ((None, signal.SIGINT), "rank 1 was ended by SIGINT"),
        ((None, signal.SIGHUP, None), "rank 1 was ended by SIGHUP"),
        ((signal.SIGUSR1, signal.SIGTERM), "rank 0 was ended by SIGUSR1, rank 1 was ended by SIGT"),
    ],
)
def test_every_rank_that_is_ended_is_named(capfd, numbers, said):
    assert code_of(launch(kill(*numbers), len(numbers), patience=0.3)) == 1
    err = capfd.readouterr().err
    assert said in err and len(err.splitlines()) == 1


@pytest.mark.skipif(not start.can_fork(), reason="forks its ranks")
def test_a_killed_rank_is_named_after_others_that_ended(capfd):
    """Processes that end at about the same time are seen in any order. One that lost its peer, one
    that failed and said so, one that a library ended."""

    def work(rank, connect):
        if rank < 3:
            return (start.LOST, 1, 7)[rank]
        time.sleep(0.3)
        return os.kill(os.getpid(), signal.SIGKILL)

    assert code_of(launch(work, 4)) == 1
    err = capfd.readouterr().err
    assert "rank 2 ended with exit code 7, rank 3 was ended by SIGKILL; the others stop" in err


@pytest.mark.skipif(not start.can_fork(), reason="forks its ranks")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
@pytest.mark.parametrize("moment", ["before", "after_in_parent", "after_in_child"])
def test_a_signal_while_ranks_are_forked(capfd, number, moment):
    """At-fork hooks are where Python would swallow a KeyboardInterrupt."""

    def before():
        launcher, sent = os.getpid(), []

        def send():
            if not sent:
                os.kill(launcher, number)
            sent.append(number)

        os.register_at_fork(**{moment: send})

    begun = time.monotonic()
    assert code_of(launch(sleep_on, 3, before)) == 128 + number
    assert time.monotonic() - begun < 30  # the ranks sleep for longer
    assert capfd.readouterr().err.endswith(f": interrupted by {number.name}\n")


@pytest.mark.skipif(not start.can_fork(), reason="forks its ranks")
def test_ctrl_c_at_any_moment_and_again(capfd, tmp_path):
    """The whole group gets it, as from a terminal; some get it twice, or SIGTERM before."""
    chance = random.Random(3)

    def work(rank, connect):
        (tmp_path / "begun").touch()
        time.sleep(60)

    for trial in range(12):
        pid = launch(work, 3, lambda: (os.setpgid(0, 0), (tmp_path / "begun").touch()))
        while not (tmp_path / "begun").exists():
            time.sleep(0.001)
        time.sleep(chance.uniform(0.0, 0.08))
        if trial % 3 == 2:
            os.killpg(pid, signal.SIGTERM)
        os.killpg(pid, signal.SIGINT)
        if trial % 3 == 1:
            time.sleep(chance.uniform(0, 0.02))
            os.kill(pid, signal.SIGINT)
        code = code_of(pid)
        err = capfd.readouterr().err
        # Its first signal may come before it can handle any: then it ends by that
        if code > 0:
            assert code in (130, 143) and re.fullmatch(
                r"\S+: interrupted by (SIGINT|SIGTERM)\n", err
            )
        else:
            assert -code in (signal.SIGINT, signal.SIGTERM) or "KeyboardInterrupt" in err
        (tmp_path / "begun").unlink()


@pytest.mark.skipif(not start.can_fork(), reason="forks its ranks")
def test_under_nohup_a_closed_terminal_ends_nothing(capfd):
    def work(rank, connect):
        time.sleep(0.5)
        return 0

    pid = launch(work, 2, lambda: signal.signal(signal.SIGHUP, signal.SIG_IGN))
    time.sleep(0.2)
    os.kill(pid, signal.SIGHUP)
    assert code_of(pid) == 0 and capfd.readouterr().err == ""


@pytest.mark.skipif(not start.can_fork(), reason="forks its ranks")
def test_no_more_processes(capfd):
    """The limit of processes does not bind root: the third fork fails here."""

    def before():
        fork, calls = os.fork, []

        def planted():
            calls.append(None)
            if len(calls) == 3:
                raise OSError(11, "Resource temporarily unavailable")
            return fork()

        os.fork = planted

    assert code_of(launch(sleep_on, 4, before)) == 2
    [said] = capfd.readouterr().err.splitlines()
    assert "rank 2 of 4 can't be started (Resource temporarily unavailable): start fewer" in said


@pytest.mark.skipif(not start.can_fork(), reason="forks its ranks")
@pytest.mark.parametrize("how", ["SIGTERM", "a failing rank", "well"])
def test_the_store_leaves_no_file(tmp_path, how):
    """The ranks do meet in it."""
    (tmp_path / "temporary").mkdir()

    def work(rank, connect):
        store = connect(rank, 2)
        store.set(f"rank{rank}", str(os.getpid()))
        store.wait([f"rank{1 - rank}"])
        (tmp_path / f"met{rank}").touch()
        if how != "well":
            time.sleep(60 if how == "SIGTERM" else 0.1)
        return int(how == "a failing rank")

    def before():
        tempfile.tempdir = str(tmp_path / "temporary")

    pid = launch(work, 2, before)
    deadline = time.monotonic() + 20
    while not (tmp_path / "met0").exists() or not (tmp_path / "met1").exists():
        assert time.monotonic() < deadline
        time.sleep(0.01)
    if how == "SIGTERM":
        os.kill(pid, signal.SIGTERM)
    assert code_of(pid) == {"SIGTERM": 143, "a failing rank": 1, "well": 0}[how]
    assert list((tmp_path / "temporary").iterdir()) == []


def fails_on_one_rank(error, world=3):
    """Work on which rank 1 raises an error while the others wait for it."""

    def work(rank, connect):
        def fail(rank, world, device):
            if rank == 1:
                error()
            dist.all_reduce(torch.zeros(1))

        args = harness.parser("").parse_args([])
        args.device, args.backend = "cpu", "gloo"
        return start.one_rank(fail, args, rank, world, connect)

    return work


def test_a_failing_rank_is_named_once(capfd):
    def error():
        raise ZeroDivisionError("planted")

    assert code_of(launch(fails_on_one_rank(error), 3)) == 1
    assert capfd.readouterr().err.count("rank 1 failed") == 1


@pytest.mark.skipif(sys.platform != "linux", reason="limits the address space")
@pytest.mark.parametrize("allocate", ["torch.zeros(2**31)", "bytearray(2**33)"])
def test_no_more_memory_on_one_rank(capfd, allocate):
    def error():
        resource.setrlimit(resource.RLIMIT_AS, (2**32 + 2**31, 2**32 + 2**31))
        eval(allocate)

    assert code_of(launch(fails_on_one_rank(error), 3)) == 1
    [said] = capfd.readouterr().err.splitlines()
    assert "rank 1 is out of memory (" in said and "more --microbatches" in said


def on_one_core():
    """Have a single rank use one thread: two of them wait for each other on a busy machine."""
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, [min(os.sched_getaffinity(0))])


@pytest.mark.parametrize("script", [*TECHNIQUES[1:], "train"])
def test_every_technique_on_one_rank(tmp_path, script):
    done = Script(tmp_path, script, [*SMALL, "--nproc", "1", "--dtype", "float64"], on_one_core)
    assert done.end() == 0 and done.output().endswith("proven\n")


def not_forked(*flags):
    """What makes a Script start its ranks as on GPUs: fresh processes of the same command, which
    find each other by a file."""

    def before():
        os.chdir(ROOT)
        sys.orig_argv = [sys.executable, "ddp.py", *flags]
        start.can_fork = lambda: False
        # What fresh processes say does not pass through this process's sys.stdout
        os.dup2(sys.stdout.fileno(), 1)
        os.dup2(sys.stderr.fileno(), 2)

    return before


def test_ranks_that_are_not_forked(tmp_path):
    flags = [*SMALL, "--nproc", "2", "--dtype", "float64"]
    script = Script(tmp_path, "ddp", flags, not_forked(*flags))
    assert script.end() == 0, script.output()
    assert "proven" in script.output() and script.errors() == []


@pytest.mark.skipif(sys.platform != "linux", reason="finds the ranks in /proc")
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_fresh_ranks_end_with_their_launcher(tmp_path, number):
    """At kill -9 once they run; at Ctrl-C of the group while they import torch, without a word."""
    flags = [*SMALL[:8], "--nproc", "2", "--steps", "100000", "--prove", "0"]
    prepare = not_forked(*flags)
    script = Script(tmp_path, "ddp", flags, lambda: (prepare(), os.setpgid(0, 0)))
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
        assert script.errors() == ["ddp.py: interrupted by SIGINT"], script.output()
        assert "Traceback" not in script.output()


def test_out_of_memory(tmp_path):
    """One sentence that says what to change; the other ranks end too, and wait for nobody."""

    def full():
        check = proof.Run.check

        def planted(run, *args, **kwargs):
            if run.step == 1 and run.rank == 1:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB\n...")
            return check(run, *args, **kwargs)

        proof.Run.check = planted

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
        "parameter_server --staleness 2",
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


FORKED_AFTER_FAKE_TENSORS = """
import os, sys
os.environ["CUDA_VISIBLE_DEVICES"] = ""
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from harness.start import keep_autograd_forkable

def backward():
    (2 * torch.ones(3, requires_grad=True)).sum().backward()

if sys.argv[1] == "kept":
    keep_autograd_forkable()
with FakeTensorMode():
    backward()
pid = os.fork()
if pid == 0:
    backward()
    os._exit(0)
sys.exit(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
"""


@pytest.mark.parametrize("how", ["kept", "not kept"])
def test_forks_may_use_autograd_after_fake_tensors(how):
    """Without keep_autograd_forkable a CUDA build fails. A CPU build starts no device threads."""
    done = subprocess.run(
        [sys.executable, "-c", FORKED_AFTER_FAKE_TENSORS, how],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    if how == "kept" or torch.version.cuda is None:
        assert done.returncode == 0, done.stderr
    else:
        assert "fork-based multiprocessing" in done.stderr


def test_a_network_interface_without_an_address():
    """In a network namespace of its own, whose loopback interface is down."""
    command = ["unshare", "--net", sys.executable, "ddp.py", "--nproc", "2", "--steps", "1"]
    if not shutil.which("unshare") or os.geteuid() != 0:
        pytest.skip("taking the network away needs root and the command unshare (util-linux)")
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    said = [line for line in done.stderr.splitlines() if "starting" not in line]
    assert done.returncode == 2 and len(said) == 1 and "interface lo has no address" in said[0]
