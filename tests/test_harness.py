"""harness.py: the ledger, the receipt, start-up; and how every script meets bad input and sudden deaths."""

import json
import math
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

import harness
import launch
from ledger import Ledger

ROOT = pathlib.Path(__file__).parent.parent
SMALL = "--layers 2 --heads 2 --width 16 --context 16 --batch 4 --steps 2 --microbatches 2".split()


# --- the ledger


def test_ledger_counts_every_operation(ranks):
    def work(rank):
        world, pair = dist.group.WORLD, [dist.new_group([0, 1]), dist.new_group([2, 3])][rank // 2]
        ledger = Ledger({"world": world, "pair": pair})
        ledger.watch([])
        x, parts = torch.zeros(12), [torch.zeros(3) for _ in range(4)]
        with ledger:
            dist.all_reduce(x)
            dist.all_reduce(x[:3], group=pair)
            dist.all_reduce(x[:3], group=pair, op=dist.ReduceOp.MAX)
            dist.all_gather(parts, x[:3])
            dist.all_gather_into_tensor(x, x[rank * 3 : rank * 3 + 3].clone())
            dist.reduce_scatter_tensor(parts[0], x)
            dist.all_to_all_single(x, x.clone())
            dist.broadcast(x, 0)
            works = dist.batch_isend_irecv(
                [dist.P2POp(dist.isend, x[:2], (rank + 1) % 4), dist.P2POp(dist.irecv, parts[0][:2], (rank - 1) % 4)]
            )
            for w in works:
                w.wait()
            dist.barrier()
        return ledger.sent

    for sent in ranks(4, work):
        assert sent == {
            ("all_reduce", "world"): [1, 48, 72.0],
            ("all_reduce", "pair"): [2, 24, 24.0],
            ("all_gather", "world"): [2, 96, 72.0],
            ("reduce_scatter", "world"): [1, 48, 36.0],
            ("all_to_all", "world"): [1, 48, 36.0],
            ("broadcast", "world"): [1, 48, 36.0],
            ("send", "world"): [1, 8, 8.0],
            ("recv", "world"): [1, 8, 0.0],
        }


def test_ledger_sees_what_is_alive(ranks):
    def work(rank):
        known = torch.zeros(100)
        ledger = Ledger({})
        ledger.watch([known])
        with ledger:
            known += 1
            a = torch.zeros(1000)
            view = a[10:20]
            b = a * 2  # 8000 bytes alive
            del a
            c = torch.zeros(500)  # `view` still holds all of a: 10000
            del view, c
            d = b + 1  # 8000
        return ledger.peak, ledger.bytes, d.sum().item()

    assert ranks(1, work) == [(10000, 8000, 1000.0)]


# --- small things


def test_grad_norm_counts_each_element_once(ranks):
    def work(rank):
        tp = [dist.new_group([0, 1]), dist.new_group([2, 3])][rank // 2]
        pp = [dist.new_group([0, 2]), dist.new_group([1, 3])][rank % 2]
        ends = pp
        split, whole, tied, frozen = (torch.nn.Parameter(torch.zeros(2)) for _ in range(4))
        split.grad, whole.grad, tied.grad = torch.ones(2) * (rank + 1), torch.ones(2) * (rank // 2 + 1), torch.ones(2) * 10
        split.placement = {"shape": (4,), "split": {0: tp}, "partial": []}
        tied.placement = {"shape": (2,), "split": {}, "partial": [ends]}
        return harness.grad_norm([split, whole, tied, frozen], split=[tp], dealt=[pp]).item()

    expected = 2 * (1 + 4 + 9 + 16) + 2 * (1 + 4) + 2 * 100
    assert ranks(4, work) == [pytest.approx(expected**0.5)] * 4


def test_nan_is_the_largest_difference():
    assert harness.larger(1.0, math.nan, 2.0) == math.inf


def test_learning_rate_warms_up_and_falls():
    args = harness.parser("", min_lr=0.1, lr=1.0, warmup=4, steps=20).parse_args([])
    rates = [harness.learning_rate(s, args) for s in range(20)]
    assert rates[:4] == [0.2, 0.4, 0.6, 0.8] and rates[4] == 1.0 and rates[19] == pytest.approx(0.1)
    assert all(a > b for a, b in zip(rates[4:], rates[5:]))


def test_decay_is_for_matrices():
    args = harness.parser("").parse_args([])
    matrix, bias = torch.nn.Parameter(torch.zeros(2, 2)), torch.nn.Parameter(torch.zeros(2))
    groups = harness.make_optimizer([matrix, bias], args).param_groups
    assert [(g["params"], g["weight_decay"]) for g in groups] == [([matrix], 0.1), ([bias], 0.0)]


# --- bad input: one sentence, exit code 2


def refused(capfd, monkeypatch, script, *flags):
    """The sentence with which a script's main() refuses its flags, before any process is started."""
    monkeypatch.setattr(sys, "argv", [f"{script}.py", *flags])
    monkeypatch.setattr(launch, "start_ranks", lambda *_: pytest.fail("ranks were started"))
    module = __import__(script)
    with pytest.raises(harness.Refused) as e:
        module.main()
    assert e.value.code == 2 and "\n" not in str(e.value)
    return str(e.value)


@pytest.mark.parametrize(
    "script, flags, words",
    [
        ("train", "--tp 3", "4 heads.*3 tensor-parallel ranks.*1 or 2 or 4"),
        ("train", "--family llama --kv-heads 2 --tp 4", "2 kv-heads.*4 tensor-parallel ranks.*1 or 2"),
        ("train", "--pp 5", "4 layers.*5 pipeline stages.*at most 4"),
        ("train", "--dp 3", "--batch 16.*3 data-parallel ranks"),
        ("train", "--dp 2 --microbatches 3", "--batch 16.*2 data-parallel ranks x 3.*--microbatches could be 1, 2, 4, 8"),
        ("train", "--preset gpt5", "unknown preset 'gpt5'.*tiny"),
        ("train", "--zero 4", "--zero.*4"),
        ("zero", "--stage 5", "--stage.*5"),
        ("train", "--ep 2", "--ep 2 with 0 experts.*--experts"),
        ("train", "--experts 3 --dp 4 --ep 4", "--ep 4 with 3 experts.*--experts 4"),
        ("train", "--experts 4 --dp 4 --ep 3", "--ep 3 does not divide the 4 ranks"),
        ("train", "--experts 4 --cp 3", "take no padding.*--context 128"),
        ("train", "--cp 3 --cp-kind ulysses", "4 heads do not divide by 3 ranks"),
        ("train", "--cp 4 --cp-kind ring-ulysses --cp-rings 3", "rings of 3 do not divide 4 ranks"),
        ("train", "--cp 2 --cp-kind circle", "'circle'.*ulysses"),
        ("train", "--pp 3 --schedule interleaved --microbatches 4 --layers 6", "a multiple of 3 micro-batches"),
        ("train", "--pp 2 --schedule dualpipev --microbatches 2", "at least 4 micro-batches"),
        ("train", "--pp 2 --chunks 2", "1f1b has 1 stage a rank.*leave out --chunks"),
        ("train", "--pp 4 --schedule zb-v", "4 layers.*8 pipeline stages.*at most 2 ranks"),
        ("train", "--init-from nowhere", "nowhere/config.json can't be read"),
        ("train", "--export /proc/x", "--export /proc/x can't be written"),
        ("pipeline", "--trace nowhere/x.json", "--trace nowhere/x.json can't be written"),
        ("train", "--schedule fastest", "'fastest'.*1f1b"),
        ("train", "--layer 3", "--layer"),
        ("train", "--steps 0", "'0' is not a whole number"),
        ("train", "--dp two", "'two'"),
        ("train", "--width 100 --heads 3", "width 100.*3 heads"),
        ("train", "--vocab 100", "vocabulary of 100.*257"),
        ("train", "--dropout 1.5", "dropout"),
        ("train", "--lr nan", "'nan' is not a number"),
        ("train", "--grad-clip -1", "--grad-clip"),
        ("ddp", "--bucket-mb inf", "'inf'"),
        ("train", "--device cpu --backend nccl", "nccl needs GPUs"),
        ("tensor_parallel", "--nproc 3", "4 heads.*3 tensor-parallel"),
        ("pipeline", "--nproc 6", "4 layers.*6 pipeline stages"),
        ("pipeline", "--microbatches 5", "--batch 16"),
        ("ddp", "--nproc 5", "--batch 16.*5 data-parallel"),
        ("ddp", "--sync quantum", "'quantum'"),
        ("ddp", "--json /no/such/folder/file", "--json /no/such/folder/file can't be written"),
        ("train", "--dp 2 --nproc 3", "needs 2 processes, not the 3"),
    ],
)
def test_bad_flags(capfd, monkeypatch, script, flags, words):
    assert re.search(words, refused(capfd, monkeypatch, script, *flags.split()))


def test_wrong_number_of_ranks_under_torchrun(capfd, monkeypatch):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "4")
    said = refused(capfd, monkeypatch, "train", "--dp", "2", "--tp", "2", "--pp", "2")
    assert "needs 8 processes and 4 were started: torchrun --nproc_per_node=8 train.py --dp 2" in said


def test_fewer_gpus_than_ranks(capfd, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    said = refused(capfd, monkeypatch, "train", "--dp", "2", "--tp", "2", "--pp", "2")
    assert "needs 8 GPUs and this machine has 4" in said and "torchrun --nnodes=2 --nproc_per_node=4" in said


def start(script, *flags, torchrun=0, restarts=0, **environment):
    launcher = [sys.executable, "-m", "torch.distributed.run", f"--nproc_per_node={torchrun}", "--standalone"]
    launcher.append(f"--max-restarts={restarts}")
    command = [*(launcher if torchrun else [sys.executable]), str(ROOT / f"{script}.py"), *flags]
    clean = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE")}
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT, env=clean | environment
    )


def end(process, timeout=90):
    out, err = process.communicate(timeout=timeout)
    return process.returncode, out, err


@pytest.mark.parametrize(
    "content, words",
    [(None, "does not exist"), ("", "is empty"), (b"\xff\0\xfe" * 500, "not text"), ("short", "needs at least")],
)
def test_bad_data_from_outside(tmp_path, content, words):
    path = tmp_path / "text"
    if content is not None:
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    script = Script(tmp_path, "ddp", [*SMALL, "--nproc", "2", "--data", str(path)])
    assert script.end() == 2 and "Traceback" not in script.output()
    [said] = script.errors()
    assert words in said


def test_port_in_use():
    with socket.socket() as busy:
        busy.bind(("127.0.0.1", 0))
        busy.listen()
        port = str(busy.getsockname()[1])
        environment = dict(RANK="0", WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
        code, out, err = end(start("ddp", *SMALL, **environment))
    assert code == 2 and f"port {port}" in err and "in use" in err and len(err.splitlines()) == 1


def test_different_text_on_one_rank(ranks, tmp_path, capfd):
    def work(rank):
        path = tmp_path / f"text{rank // 2}"
        path.write_text("some text " * 100 + "x" * (rank // 2))
        args = harness.parser("").parse_args([*SMALL, "--data", str(path)])
        try:
            harness.Run(args, rank, 3, torch.device("cpu"))
        except harness.Refused as e:
            return str(e), e.speaker

    for said, speaker in ranks(3, work):
        assert "rank 2 has another text than rank 0" in said and speaker == 0


def test_different_flags_on_one_rank(ranks):
    def work(rank):
        args = harness.parser("").parse_args([*SMALL, "--lr", str(0.1 * (1 + rank // 2))])
        try:
            harness.Run(args, rank, 3, torch.device("cpu"))
        except harness.Refused as e:
            return str(e)

    assert set(ranks(3, work)) == {"rank 2 has other flags than rank 0: start every node with the same command"}


def test_missing_text_on_one_rank(ranks, tmp_path):
    def work(rank):
        path = tmp_path / "text"
        if rank != 1:
            path = tmp_path / "here"
            path.write_text("some text " * 100)
        args = harness.parser("").parse_args([*SMALL, "--data", str(path)])
        try:
            harness.Run(args, rank, 3, torch.device("cpu"))
        except harness.Refused as e:
            return str(e), e.speaker

    results = ranks(3, work)
    assert [speaker for _, speaker in results] == [1, 1, 1] and "does not exist" in results[1][0]


# --- start-up and end


@pytest.mark.parametrize("script, flags", [("ddp", "--sync overlapped"), ("train", "--dp 2 --sample 5")])
def test_under_torchrun(tmp_path, script, flags):
    file = tmp_path / "receipt.json"
    code, out, err = end(start(script, *SMALL, *flags.split(), "--json", str(file), torchrun=2))
    assert code == 0, err
    receipt = json.loads(file.read_text())
    assert receipt["ok"] and receipt["world_size"] == 2 and len(receipt["steps"]) == 2 and "proven" in out
    assert receipt["max_error"]["loss"] < 1e-5 and receipt["sent"] and receipt["held"]["parameters"]["bytes"] > 0
    assert all(row["formula_bytes"] is None or row["ok"] for row in receipt["sent"])


def test_torchrun_with_its_default_of_one_process(tmp_path):
    """The layout needs 2: train.py says so and starts them; and the curve is that of one process."""
    flags = [*SMALL, "--sample", "0", "--dtype", "float64"]
    code, out, err = end(start("train", *flags, "--tp", "2", "--json", str(tmp_path / "two.json"), torchrun=1))
    assert code == 0 and "this layout needs 2 processes: starting them on this machine" in err
    script = Script(tmp_path, "train", [*flags, "--json", str(tmp_path / "one.json"), "--log", str(tmp_path / "log")])
    assert script.end() == 0 and script.errors() == []
    two, one = (json.loads((tmp_path / f"{n}.json").read_text())["steps"] for n in ("two", "one"))
    for a, b in zip(two, one):
        assert a["loss"] == pytest.approx(b["loss"], rel=1e-10) and a["grad_norm"] == pytest.approx(b["grad_norm"], rel=1e-10)
    log = [json.loads(line) for line in (tmp_path / "log").read_text().splitlines()]
    assert [row["loss"] for row in log if "loss" in row] == [step["loss"] for step in one]


def gone(pids, seconds=10):
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if not any(
            pathlib.Path(f"/proc/{p}").exists() and "State:\tZ" not in pathlib.Path(f"/proc/{p}/status").read_text()
            for p in pids
        ):
            return True
        time.sleep(0.05)
    return False


LONG = "--dp 3 --batch 6 --steps 100000 --prove 0 --sample 0 --eval-every 0".split()


@pytest.mark.skipif(sys.platform != "linux", reason="finds the ranks in /proc")
def test_a_rank_is_killed_under_torchrun():
    process = start("train", *SMALL[:8], *LONG, torchrun=3)
    while "step" not in process.stdout.readline():
        assert process.poll() is None, process.stderr.read()
    pids = children(process.pid)
    os.kill(pids[2], signal.SIGKILL)
    assert gone(pids)
    code, out, err = end(process, timeout=20)
    assert code == 1 and re.search(r"rank\s*:? 2 ", err)  # torchrun's own report may be all there is


@pytest.mark.skipif(sys.platform != "linux", reason="finds the ranks in /proc")
@pytest.mark.parametrize("number, expected", [(signal.SIGKILL, 1), (signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_interrupted(tmp_path, number, expected):
    """A rank is killed, or who started the ranks is told to stop."""
    script = Script(tmp_path, "train", [*SMALL[:8], *LONG])
    pids = script.wait_for("step ")
    os.kill(pids[0] if number == signal.SIGKILL else script.pid, number)
    assert script.end() == expected and gone(pids) and "Traceback" not in script.output()
    [said] = script.errors()
    assert ("rank 0 was ended by SIGKILL" if number == signal.SIGKILL else "interrupted") in said


def test_a_failing_rank_is_named_once():
    def work(rank, connect):
        def fail(rank, world, device):
            if rank == 1:
                raise ZeroDivisionError("planted")
            dist.all_reduce(torch.zeros(1))

        args = harness.parser("").parse_args([])
        args.device, args.backend = "cpu", "gloo"
        return launch.one_rank(fail, args, rank, 3, connect)

    pid = os.fork()
    if pid == 0:
        os._exit(launch.start_ranks(work, 3))
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 1


SCRIPTS = "ddp zero tensor_parallel sequence_parallel pipeline context_parallel expert_parallel train".split()


@pytest.mark.parametrize("script", SCRIPTS)
def test_every_technique_on_one_rank(tmp_path, script):
    done = Script(tmp_path, script, [*SMALL, "--nproc", "1", "--dtype", "float64"])
    assert done.end() == 0 and done.output().endswith("proven\n")


def test_ranks_that_are_not_forked():
    """As on GPUs: fresh processes, which find each other by a file."""
    lines = "import sys, launch, train; launch.can_fork = lambda: False; sys.argv = sys.argv[1:]; launch.script(train.main)"
    flags = [str(ROOT / "train.py"), *SMALL, "--dp", "2", "--sample", "0"]
    command = [sys.executable, "-c", lines, *flags]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=90)
    assert done.returncode == 0 and "proven" in done.stdout and len(done.stderr.splitlines()) == 1, done.stderr


def test_a_finished_job_exits_with_zero():
    code, out, err = end(start("ddp", *SMALL, "--nproc", "2", "--quiet"))
    assert (code, out, err) == (0, "", "")
