"""What happens to real runs on real machines: killed, stopped, told to stop, cut off, out of disk,
not a number."""

import gc
import os
import pathlib
import random
import re
import resource
import signal
import subprocess
import sys
import time

import pytest
import torch
from conftest import Script, children, ip
from test_checkpoint import same_tensors, whole
from test_start import end, gone, torchrun_of

import harness
import train
from harness import formulas, start

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


@pytest.fixture(scope="module")
def undisturbed(text, tmp_path_factory):
    """The last checkpoint of 150 steps that nothing happened to."""
    folder = tmp_path_factory.mktemp("undisturbed")
    run = Training(folder, f"--steps 150 --dp 2 --out {folder / 'out'}", text)
    assert run.end() == 0, run.output()
    return whole(newest(folder / "out"))


def test_told_to_stop_it_saves_and_goes_on(text, tmp_path, undisturbed):
    out = tmp_path / "out"
    run = Training(tmp_path, f"--steps 100000 --dp 2 --pp 2 --out {out}", text)
    run.wait_for("step    5")
    os.kill(run.pid, signal.SIGTERM)
    assert run.end() == 0, run.output()
    step = int(re.search(r"stopped by SIGTERM: step (\d+) is saved", run.output())[1])
    assert newest(out).name == f"step-{step:08d}" and run.errors() == []
    run = Training(
        tmp_path, f"--steps {max(150, step + 1)} --tp 2 --out {out} --resume --save-every 150", text
    )
    assert run.end() == 0 and f"resumed from {newest(out).parent}" in run.output()
    if step < 150:
        same_tensors(whole(out / "step-00000150"), undisturbed)


def as_on_nccl():
    """gloo's own time-out comes a minute later: this process must see by itself that it hangs."""
    start.WITHOUT_EXCEPTIONS.append("gloo")


@pytest.mark.parametrize("before", [lambda: None, as_on_nccl], ids=["gloo", "as-on-nccl"])
def test_a_rank_that_hangs_is_named(text, tmp_path, before):
    run = Training(tmp_path, "--steps 100000 --timeout 4 --dp 2 --pp 2", text, before)
    ranks = run.wait_for("step    3")
    os.kill(ranks[1], signal.SIGSTOP)
    assert run.end() == 1 and gone(ranks)
    [said] = run.errors()
    assert re.search(r"no answer from rank 1 on \S+ within 4 s: it hangs", said)


def test_ranks_in_different_places_are_told_apart(text, tmp_path):
    def busy():
        check = harness.Run.check

        def planted(run, *args, **kwargs):
            if run.step == 3 and run.rank == 1:
                time.sleep(60)
            return check(run, *args, **kwargs)

        harness.Run.check = planted

    run = Training(tmp_path, "--steps 6 --timeout 4 --dp 2", text, busy)
    assert run.end() == 1
    [said] = run.errors()
    assert "no progress for 4 s, though all ranks answer: rank 0 at" in said and re.search(
        r"rank 1 at train.py:\d+", said
    )


@pytest.mark.parametrize("layout", ["--dp 2 --pp 2 --zero 2 --schedule zb-h1", "--tp 2 --pp 2"])
def test_a_gradient_that_is_no_number(text, tmp_path, layout):
    """In one gradient of one rank, at step 4: the run ends before the step, and keeps the
    checkpoint before."""
    name, rank = "blocks.2.mlp.up.bias", 3

    def broken():
        batches = harness.Run.microbatches

        def planted(run, step, *args, **kwargs):
            model = next(o for o in gc.get_objects() if isinstance(o, harness.Stages))
            if run.rank == rank and step == 0:
                dict(model.named())[name].register_hook(
                    lambda g: g * torch.nan if run.at == 3 else g
                )
            run.at = step
            return batches(run, step, *args, **kwargs)

        harness.Run.microbatches = planted

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


def test_twenty_kills_lose_no_checkpoint(text, tmp_path, undisturbed):
    """Of a rank, or of who started the ranks, at any moment, saves included: what was whole stays,
    and the end is the same."""
    out, chance, kills, last = tmp_path / "out", random.Random(7), 0, None

    def slowly():
        log = harness.Run.log

        def slow(*args, **kwargs):
            time.sleep(0.1)
            log(*args, **kwargs)

        harness.Run.log = slow

    while kills < 20:
        run = Training(
            tmp_path,
            f"--steps 150 --dp 2 --out {out} --resume --save-every 2 --keep 2",
            text,
            slowly,
        )
        ranks = run.wait_for("step ")
        time.sleep(chance.uniform(0, 1))
        victim = chance.choice([*ranks, run.pid])
        os.kill(victim, signal.SIGKILL)
        assert run.end() == (-9 if victim == run.pid else 1), run.output()
        assert gone(ranks) and (victim == run.pid or len(run.errors()) == 1), run.output()
        kills += 1
        resumed = re.search(r"resumed from \S+/(step-\d+)", run.output())
        assert last is None or resumed[1] >= last, run.output()
        last = newest(out).name if newest(out) else None
    run = Training(tmp_path, f"--steps 150 --dp 2 --out {out} --resume", text)
    assert last and run.end() == 0 and f"resumed from {out}/{last}" in run.output()
    same_tensors(whole(newest(out)), undisturbed, 1e-10)


def test_torchrun_loses_its_agent_then_a_rank(text, tmp_path, undisturbed):
    """kill -9 of the agent: its ranks save and leave. Of a rank, with --max-restarts: the run goes
    on from its last checkpoint by itself."""
    out = tmp_path / "out"
    flags = [
        *SMALL,
        "--data",
        text,
        "--steps",
        "150",
        "--dp",
        "2",
        "--out",
        str(out),
        "--save-every",
        "5",
    ]

    def progress(process, words):
        lines = iter(process.stdout.readline, "")
        assert any(words in line for line in lines), process.stderr.read()
        return children(process.pid)

    agent = torchrun_of("train", *flags, torchrun=2)
    ranks = progress(agent, "step   12")
    agent.kill()
    assert gone(ranks) and "stopped by SIGTERM" in agent.communicate()[0]
    saved = newest(out)
    agent = torchrun_of("train", *flags, "--resume", torchrun=2, restarts=2)
    os.kill(progress(agent, f"step {int(saved.name[5:]) + 12:4d}")[1], signal.SIGKILL)
    code, said, errors = end(agent)
    assert code == 0 and "resumed from" in said, errors
    same_tensors(whole(newest(out)), undisturbed, 1e-10)


def test_disk_full(text, tmp_path):
    """Here every file is limited to less than a rank has to write. The run goes on, and refuses at
    the end."""
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
    assert "step    9" in run.output() and [p.name for p in out.iterdir()] == ["step-00000004"]


@pytest.fixture
def on_two_nodes(two_nodes):
    """A function that starts four ranks of train.py, two on each of two nodes, whose hosts' names
    are theirs."""
    started = []

    def start(*flags):
        for rank in range(4):
            node, here = two_nodes[rank // 2], f"wire{rank // 2}"
            own = {
                "RANK": rank,
                "LOCAL_RANK": rank % 2,
                "WORLD_SIZE": 4,
                "LOCAL_WORLD_SIZE": 2,
                "MASTER_ADDR": "10.99.0.1",
            }
            own |= {"MASTER_PORT": 29511, "GLOO_SOCKET_IFNAME": here}
            command = [
                "ip",
                "netns",
                "exec",
                node,
                "unshare",
                "--uts",
                "sh",
                "-c",
                f'hostname {node} && exec "$@"',
                "sh",
            ]
            command += [sys.executable, str(pathlib.Path(train.__file__)), *flags]
            pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
            environment = os.environ | {name: str(value) for name, value in own.items()}
            started.append(subprocess.Popen(command, env=environment, **pipes))
        return started

    yield start
    for process in started:
        process.kill()
        process.communicate()


def test_two_hosts_and_a_cut_link(text, tmp_path, two_nodes, on_two_nodes):
    out = tmp_path / "out"
    flags = f"--dp 2 --tp 2 --steps 100000 --out {out} --save-every 20 --timeout 5".split()
    ranks = on_two_nodes(*SMALL, "--data", text, *flags)

    def sent():
        return int(
            ip(
                "netns", "exec", two_nodes[0], "cat", "/sys/class/net/wire0/statistics/tx_bytes"
            ).stdout
        )

    def until(step):
        assert any(f"step {step:4d}" in line for line in iter(ranks[0].stdout.readline, "")), ranks[
            0
        ].stderr.read()
        return sent()

    # Tensor parallelism stays on its host: the link carries data parallelism's all-reduces, 2
    # ranks' of half the weights
    before = until(20)
    each = (until(60) - before) / 40
    with torch.device("meta"):
        config = harness.configure(train.flags().parse_args(SMALL))
    half = 2 * formulas.parameters_held(config, 2, 3, True, True) * 8
    assert half < each < 1.3 * half
    ip("-n", two_nodes[1], "link", "set", "wire1", "down")
    ended = [end(process) for process in ranks]
    assert all(code != 0 for code, *_ in ended)
    said = [
        line for _, _, err in ended for line in err.splitlines() if line.startswith("train.py:")
    ]
    assert len(said) == 2, said
    assert (
        f"no answer from rank 2 on {two_nodes[1]}, rank 3 on {two_nodes[1]} within 5 s" in said[0]
    )
    assert f"{two_nodes[1]} lost 10.99.0.1: that host is down, or the link to it is cut" in said[1]
    last = int(newest(out).name[5:])
    run = Training(tmp_path, f"--pp 3 --steps {last + 2} --out {out} --resume", text)
    assert last >= 40 and run.end() == 0 and f"resumed from {newest(out).parent}" in run.output()
