"""What happens to real runs on real machines: killed, stopped, told to stop, cut off, out of disk,
not a number."""

import contextlib
import fcntl
import gc
import os
import random
import re
import resource
import signal
import sys
import termios
import time

import pytest
import torch
from conftest import Script, children, enter, ip
from test_checkpoint import same_tensors, whole
from test_start import Torchrun, gone

import harness
import proof

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
    for number, layout in ((signal.SIGINT, "--dp 2 --pp 2"), (signal.SIGUSR2, "--tp 2")):
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
    checkpoint before. (Without ZeRO: test_train.py.)"""
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
    """Files are limited to less than a rank has to write. The run goes on, and refuses at last.
    What was saved before stays."""
    out = tmp_path / "out"
    run = Training(tmp_path, f"--steps 4 --dp 2 --out {out}", text)
    assert run.end() == 0
    limit = lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, 50_000))  # noqa: E731
    run = Training(tmp_path, f"--steps 9 --dp 2 --out {out} --resume --save-every 2", text, limit)
    assert run.end() == 2 and "receipt: dp 2" in run.output()
    said = run.errors()
    steps = [f"the checkpoint of step {step} can't be written to {out}" for step in (6, 8, 9)]
    assert len(said) == 3 and all(step in line for step, line in zip(steps, said))
    assert ["the run goes on" in line for line in said] == [True, True, False]
    assert [path.name for path in out.iterdir()] == ["step-00000004"]


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
