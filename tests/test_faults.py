"""What happens to real runs on real machines: killed, stopped, told to stop, cut off, out of disk,
not a number."""

import contextlib
import errno
import fcntl
import gc
import os
import random
import re
import resource
import signal
import sys
import termios
import threading
import time

import pytest
import torch
import torch.distributed as dist
from conftest import Script, children, enter, ip
from test_checkpoint import same_tensors, whole
from test_start import Torchrun, gone

import harness
import proof
import train
from harness import start
from trainer import saving

SMALL = (
    "--layers 3 --heads 2 --width 16 --context 16 --batch 12 --microbatches 2 --dtype float64 "
    "--sample 0 --eval-every 0"
)
# The curve must not depend on --steps
SMALL = f"{SMALL} --lr 3e-3 --warmup 0 --min-lr 3e-3 --prove 0".split()
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="finds the ranks in /proc")


def Training(folder, flags, text, before=lambda: None):
    return Script(folder, "train", [*SMALL, "--data", text, *flags.split()], before)


def newest(folder):
    return max((p for p in folder.iterdir() if re.fullmatch(r"step-\d+", p.name)), default=None)


STEPS = 40


@pytest.fixture(scope="module")
def undisturbed(text, tmp_path_factory):
    """The last checkpoint of a run that nothing happened to."""
    folder = tmp_path_factory.mktemp("undisturbed")
    run = Training(folder, f"--steps {STEPS} --dp 2 --out {folder / 'out'}", text)
    assert run.end() == 0, run.output()
    return whole(newest(folder / "out"))


def test_told_to_stop_it_saves_and_goes_on(text, tmp_path, undisturbed):
    """By Ctrl-C, which all ranks get, and again from who started them; then by a signal to one
    rank, in another layout; then on to the end."""
    out, last = tmp_path / "out", 0
    for number, layout in ((signal.SIGINT, "--dp 2 --pp 2"), (signal.SIGHUP, "--tp 2")):
        run = Training(tmp_path, f"--steps 100000 {layout} --out {out} --resume", text)
        ranks = run.wait_for(f"step {last + 3:4d}")
        for pid in [run.pid, *ranks] if number == signal.SIGINT else ranks[1:]:
            os.kill(pid, number)
        assert run.end() == 0, run.output()
        last = int(re.search(rf"stopped by {number.name}: step (\d+) is saved", run.output())[1])
        assert newest(out).name == f"step-{last:08d}"
        said = [line for line in run.errors() if "saving after this step; Ctrl-C again" in line]
        assert run.errors() == said and len(said) == (number == signal.SIGINT)
    assert f"resumed from {out}" in run.output()
    steps = max(STEPS, last + 1)
    flags = f"--steps {steps} --cp 2 --out {out} --resume --save-every {STEPS}"
    run = Training(tmp_path, flags, text)
    assert run.end() == 0 and f"resumed from {out}" in run.output()
    if last < STEPS:
        same_tensors(whole(out / f"step-{STEPS:08d}"), undisturbed)


def test_the_terminal_closes(text, tmp_path):
    """As when an ssh connection breaks: SIGHUP, and whatever is printed fails from then on."""
    out = tmp_path / "out"
    terminal, side = os.openpty()

    def before():
        os.setsid()
        fcntl.ioctl(side, termios.TIOCSCTTY, 0)
        os.close(terminal)  # or this process would keep it open
        os.dup2(side, 1)
        os.dup2(side, 2)
        sys.stdout = sys.stderr = open(side, "w", buffering=1)

    run = Training(tmp_path, f"--steps 100000 --dp 2 --out {out}", text, before)
    os.close(side)
    said = b""
    while b"step    5" not in said:
        said += os.read(terminal, 4096)
    ranks = children(run.pid)
    os.close(terminal)
    assert run.end() == 0 and gone(ranks)
    assert newest(out) is not None and (newest(out) / "index.json").exists()


def test_one_run_writes_to_a_folder(text, tmp_path):
    """A second is refused while the first is alive, checkpoints or not, --resume or not."""
    out = tmp_path / "out"
    (tmp_path / "second").mkdir()
    flags = f"--dp 2 --out {out} --timeout 2"  # the lock is waited for half as long
    first = Training(tmp_path, f"--steps 100000 {flags}", text)
    first.wait_for("step    2")
    for resume in ("", "--resume"):
        second = Training(tmp_path / "second", f"--steps 9 {flags} {resume}", text)
        assert second.end() == 2
        [said] = second.errors()
        assert f"another run writes to --out {out}: end it" in said and "step " not in said
    os.kill(first.pid, signal.SIGKILL)
    first.end()
    second = Training(tmp_path / "second", f"--steps 3 {flags}", text)
    assert second.end() == 0, second.output()  # the dead run's lock is gone, its file is not
    assert sorted(p.name for p in out.iterdir()) == [".lock", "step-00000003"]


def test_a_lock_is_waited_for(tmp_path, monkeypatch):
    """The rank 0 of before may still be dying. Locks of a process do not exclude each other, but
    those of two open files do. A file system without locks has none."""
    old = saving.lock(tmp_path, 0)
    assert old and saving.lock(tmp_path, 0.1) is None
    threading.Timer(0.3, old.close).start()
    assert saving.lock(tmp_path, 20)

    def flock(*_):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", flock)
    assert saving.lock(tmp_path, 0.1)


def test_started_again_by_torchrun(text, tmp_path):
    """Whether a run goes on by itself follows from torchrun's store, which knows whether this run
    had --out before. A folder with another run's checkpoints stays refused, also the second time.
    """
    out, other = tmp_path / "out", tmp_path / "other"
    (other / "step-00000001").mkdir(parents=True)
    (other / "step-00000001" / "index.json").touch()

    def attempt(flags):
        pid = os.fork()
        if pid == 0:
            sys.argv[1:] = [*SMALL, "--data", text, *flags.split()]
            harness.script(train.main)
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])

    def agent():
        server = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
        # As on a node whose restarts torchrun does not count
        os.environ |= {"TORCHELASTIC_RUN_ID": "none", "TORCHELASTIC_RESTART_COUNT": "0"}
        os.environ |= {"TORCHELASTIC_USE_AGENT_STORE": "True", "MASTER_ADDR": "127.0.0.1"}
        os.environ["MASTER_PORT"] = str(server.port)
        codes = [attempt(f"--dp 2 --out {out} --steps {steps}") for steps in (4, 6)]
        codes += [attempt(f"--dp 2 --out {other} --steps 6") for _ in range(2)]
        print("codes", codes)
        start.finish(0)

    run = Script(tmp_path, "train", [], agent)
    assert run.end() == 0, run.output()
    assert "codes [0, 0, 2, 2]" in run.output(), run.output()
    assert f"resumed from {out}/step-00000004" in run.output()
    assert [f"--out {other} has checkpoints" in line for line in run.errors()] == [True, True]


def test_a_rank_that_hangs_is_named(text, tmp_path):
    run = Training(tmp_path, "--steps 100000 --timeout 4 --dp 2 --pp 2", text)
    ranks = run.wait_for("step    3")
    os.kill(ranks[1], signal.SIGSTOP)
    assert run.end() == 1 and gone(ranks)
    [said] = run.errors()
    assert re.search(r"no answer from rank 1 on \S+ within 4 s: it hangs", said)


def test_ranks_that_wait_for_each_other_are_told(text, tmp_path):
    def busy():
        check = proof.Run.end_check

        def planted(run, *args, **kwargs):
            if run.step == 3 and run.rank == 1:
                time.sleep(60)
            return check(run, *args, **kwargs)

        proof.Run.end_check = planted

    run = Training(tmp_path, "--steps 6 --timeout 4 --dp 2", text, busy)
    assert run.end() == 1
    [said] = run.errors()
    assert "no progress for 4 s, though all ranks answer" in said


def test_a_gradient_that_is_no_number(text, tmp_path):
    """In one gradient of one rank, at step 4: the run ends before the step, and keeps the
    checkpoint before. (Without ZeRO: test_loss_scale.py.)"""
    layout, name, rank = "--dp 2 --pp 2 --zero 2 --schedule zb-h1", "blocks.2.mlp.up.bias", 3

    def broken():
        batches = proof.Run.microbatches

        def planted(run, step, *args, **kwargs):
            if run.rank == rank and step == 0:
                for model in gc.get_objects():  # other tests may have left some
                    if isinstance(model, harness.Stages) and name in dict(model.named()):
                        p = dict(model.named())[name]
                        p.register_hook(lambda g: g * torch.nan if run.at == 3 else g)
            run.at = step
            return batches(run, step, *args, **kwargs)

        proof.Run.microbatches = planted

    out = tmp_path / "out"
    run = Training(tmp_path, f"--steps 6 {layout} --out {out} --save-every 1", text, broken)
    assert run.end() == 1
    [said] = run.errors()
    assert re.search(
        rf"step 4 has loss 5\.\d+, gradient norm nan; .* of {name}, on rank {rank}, stage 1", said
    ), said
    assert newest(out).name == "step-00000003"
    run = Training(tmp_path, f"--steps 6 {layout} --skip-nan 1", text, broken)
    assert run.end() == 0 and "skipped" in run.errors()[0] and "step    6" in run.output()
    assert "step    4" not in run.output()


def test_kills_lose_no_checkpoint(text, tmp_path, undisturbed):
    """Of a rank, and of who started the ranks, at any moment: what was whole stays, and the end is
    the same. tests/faults.py does it 40 times, start-up included."""
    out, chance, last = tmp_path / "out", random.Random(7), None
    flags = f"--steps {STEPS} --dp 2 --out {out} --resume --save-every 2 --keep 2"

    def slowly():
        log = proof.Run.log

        def slow(*args, **kwargs):
            time.sleep(0.1)
            log(*args, **kwargs)

        proof.Run.log = slow

    for kind in ("rank", "launcher"):
        run = Training(tmp_path, flags, text, slowly)
        ranks = run.wait_for("step " if last else "step    4")
        time.sleep(chance.uniform(0.3, 1))
        os.kill(run.pid if kind == "launcher" else chance.choice(ranks), signal.SIGKILL)
        assert run.end() == (-9 if kind == "launcher" else 1), run.output()
        assert gone(ranks) and len(run.errors()) == (kind == "rank"), run.output()
        resumed = re.search(r"resumed from \S+/(step-\d+)", run.output())
        assert last is None or resumed[1] >= last, run.output()
        last = newest(out).name if newest(out) else None
    run = Training(tmp_path, f"--steps {STEPS} --dp 2 --out {out} --resume", text)
    assert last and run.end() == 0 and f"resumed from {out}/{last}" in run.output()
    same_tensors(whole(newest(out)), undisturbed, 1e-10)


def test_torchrun_starts_a_run_again_as_often_as_it_may(text, tmp_path, undisturbed):
    """kill -9 of a rank, with --max-restarts 1: the run goes on from its last checkpoint by
    itself. At the second kill torchrun names the rank, and nothing stays. On two hosts
    tests/faults.py does it."""
    out = tmp_path / "out"
    flags = f"--steps {STEPS} --dp 2 --out {out}"
    long = f"--data {text} {flags} --save-every 5 --steps 100000"
    agent = Torchrun(tmp_path, "train", *SMALL, *long.split(), ranks=2, restarts=1)
    for wanted in ("step   12", "resumed from"):
        ranks = agent.wait_for(wanted)
        os.kill(ranks[1], signal.SIGKILL)
    assert agent.end() == 1 and gone(ranks), agent.output()
    step = re.search(rf"resumed from {out}/step-(\d+)", agent.output())
    assert step and int(step[1]) >= 5, agent.output()
    assert re.search(r"rank\s*:? 1 ", agent.output())  # torchrun's own report
    if int(newest(out).name[5:]) < STEPS:
        run = Training(tmp_path, f"{flags} --resume", text)
        assert run.end() == 0, run.output()
        same_tensors(whole(newest(out)), undisturbed, 1e-10)


def test_disk_full(text, tmp_path):
    """Files are limited to less than a rank has to write. The run goes on, and refuses at last."""
    out = tmp_path / "out"
    run = Training(tmp_path, f"--steps 4 --dp 2 --out {out}", text)
    assert run.end() == 0
    limit = lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, 50_000))  # noqa: E731
    run = Training(tmp_path, f"--steps 9 --dp 2 --out {out} --resume --save-every 2", text, limit)
    assert run.end() == 2
    said = run.errors()
    assert (
        len(said) == 3
        and all("can't be written" in line for line in said)
        and "the run goes on" in said[1]
    ), said
    assert "step    9" in run.output() and newest(out).name == "step-00000004"


@pytest.fixture
def on_two_nodes(two_nodes, tmp_path, text):
    """A function that starts four ranks of train.py, two on each of two nodes, whose hosts' names
    are theirs."""
    started = []

    def start(flags):
        for rank in range(4):
            node = rank // 2
            own = {"RANK": rank, "LOCAL_RANK": rank % 2, "WORLD_SIZE": 4, "LOCAL_WORLD_SIZE": 2}
            own |= {"MASTER_ADDR": "10.99.0.1", "MASTER_PORT": 29511}
            own |= {"GLOO_SOCKET_IFNAME": f"wire{node}"}

            def before(name=two_nodes[node], own=own):
                enter(name)
                os.environ |= {key: str(value) for key, value in own.items()}

            folder = tmp_path / f"rank{rank}"
            folder.mkdir()
            started.append(Training(folder, flags, text, before))
        return started

    yield start
    for run in started:
        with contextlib.suppress(ProcessLookupError, ChildProcessError):
            os.kill(run.pid, signal.SIGKILL)
            os.waitpid(run.pid, 0)


def test_two_hosts_and_a_cut_link(text, tmp_path, two_nodes, on_two_nodes):
    out, there = tmp_path / "out", two_nodes[1]
    ranks = on_two_nodes(f"--dp 2 --tp 2 --steps 100000 --out {out} --save-every 10 --timeout 4")
    ranks[0].wait_for("step   25")
    ip("-n", there, "link", "set", "wire1", "down")
    assert all(run.end() != 0 for run in ranks)
    said = [line for run in ranks for line in run.errors()]
    assert len(said) == 2, said
    assert f"no answer from rank 2 on {there}, rank 3 on {there} within 4 s" in said[0]
    assert f"{there} lost 10.99.0.1: that host is down, or the link to it is cut" in said[1]
    last = int(newest(out).name[5:])
    run = Training(tmp_path, f"--pp 3 --steps {last + 2} --out {out} --resume", text)
    assert last >= 20 and run.end() == 0 and f"resumed from {newest(out).parent}" in run.output()
