"""train.py --islands: each layout against one process that plays all islands; islands that die and
come back; strangers. Islands are processes, because each is a job of its own; they are forked, and
so is the meeting point."""

import contextlib
import json
import math
import os
import signal
import socket
import sys
import threading
import time
import types

import pytest
import torch
from conftest import Script

from harness import start
from trainer import islands, meeting

SECRET = b"open sesame, sixteen at least"
SMALL = "--layers 2 --heads 2 --width 16 --context 8 --batch 8 --dtype float64 --device cpu"
SMALL += " --sample 0 --warmup 0 --eval-batches 1 --eval-every 0 --timeout 60 --prove 99"


@pytest.fixture
def meeting_point(tmp_path):
    """HOST:PORT of a meeting point in a process of its own, and the flags of who meets there. What
    it says is in the file `meeting`."""
    (tmp_path / "secret").write_bytes(SECRET)
    listener = meeting.listen(("127.0.0.1", 0))
    pid = os.fork()
    if pid == 0:
        start.die_with_parent(signal.SIGKILL)
        sys.stderr = open(tmp_path / "meeting", "w", buffering=1)
        meeting.MeetingPoint(SECRET).serve(listener)
        os._exit(0)
    where = f"127.0.0.1:{listener.getsockname()[1]}"
    listener.close()
    yield where, f"--meet {where} --secret-file {tmp_path}/secret"
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)


class Island(Script):
    def __init__(self, tmp_path, number, flags, before=lambda: None):
        folder = tmp_path / f"{number}-{time.monotonic_ns()}"
        folder.mkdir()
        self.receipt = folder / "receipt.json"
        given = f"{SMALL} {flags} --island {number} --json {self.receipt}"

        def on_one_core():  # or its two threads wait for each other on a busy machine
            cores = sorted(os.sched_getaffinity(0))
            os.sched_setaffinity(0, [cores[number % len(cores)]])
            before()

        super().__init__(folder, "train", given.split(), on_one_core)


def run_islands(tmp_path, meeting_point, flags, layouts, text):
    """The receipts of islands, each with flags for its layout."""
    _, meet = meeting_point
    flags = f"--islands {len(layouts)} {meet} --data {text} {flags}"
    started = [Island(tmp_path, i, f"{flags} {layout}") for i, layout in enumerate(layouts)]
    for island in started:
        assert island.end() == 0, island.output()
    return [json.loads(island.receipt.read_text()) for island in started]


@pytest.mark.parametrize(
    "flags, layouts",
    [
        ("--sync-every 2 --steps 5", ["--dp 2", "--tp 2"]),
        ("--sync-every 3 --stream 2 --stream-delay 1 --outer-bits 4 --steps 7", ["--pp 2", ""]),
        (
            "--sync-every 2 --outer-bits 8 --steps 4 --optimizer sgd --lr 0.3 --min-lr 0.1",
            ["--dp 2 --zero 3", "--dp 2 --zero 1 --microbatches 1"],
        ),
    ],
)
def test_islands_of_any_layout_are_what_one_process_plays(
    tmp_path, meeting_point, text, flags, layouts
):
    for said in run_islands(tmp_path, meeting_point, flags, layouts, text):
        assert said["ok"], said
        assert max(said["max_error"].values()) < 1e-10
        [row] = [row for row in said["sent"] if row["group"] == "islands"]
        assert row["wire_bytes"] == row["formula_bytes"] > 0


def one_step_is_left_out():
    read = islands.Run.read

    def read_nothing(self, *values):
        return (math.nan, math.nan) if self.step == 1 else read(self, *values)

    islands.Run.read = read_nothing


def test_a_step_that_one_island_leaves_out_is_known_to_all(tmp_path, meeting_point, text):
    """The player takes all steps, so nobody is compared with it."""
    _, meet = meeting_point
    flags = f"--islands 2 {meet} --data {text} --sync-every 2 --steps 4 --skip-nan 1"
    started = [
        Island(tmp_path, 0, f"{flags} --dp 2"),
        Island(tmp_path, 1, flags, one_step_is_left_out),
    ]
    for island in started:
        assert island.end() == 0, island.output()
        said = json.loads(island.receipt.read_text())
        assert said["ok"] and said["max_error"] is None


# --- islands that die, sleep, and come back


def slowly():
    """So that a test can do something between two steps."""

    after = islands.Outer.after

    def after_a_while(self, step):
        time.sleep(0.1)
        after(self, step)

    islands.Outer.after = after_a_while


def saved(folder, kind="weight"):
    """{name: tensor} of the newest checkpoint in a folder, of what one rank has whole."""
    import safetensors.torch

    from trainer import checkpoint

    index = checkpoint.newest_index(folder)
    path = folder / checkpoint.name_of(index["step"])
    found = {}
    for name, kinds in index["tensors"].items():
        [piece] = kinds[kind]["pieces"]
        found[name] = safetensors.torch.load_file(path / piece["file"])[piece["key"]]
    return found


def losses_of(island):
    return [float(line.split()[3]) for line in island.output().splitlines() if "  loss " in line]


def test_an_island_dies_and_another_sleeps(tmp_path, meeting_point, text):
    """In one run of three islands. The others go on, and at the end all have the same weights."""
    where, meet = meeting_point
    flags = f"--islands 3 {meet} --data {text} --batch 12 --sync-every 2 --steps 60 --prove 0"
    flags += f" --island-timeout 6 --out {tmp_path}/out --lr 0.01 --keep 1"

    def begin(number, more=""):
        return Island(tmp_path, number, f"{flags} {more}", slowly)

    started = [begin(0), begin(1, "--dp 2"), begin(2)]
    started[0].wait_for("step    3")
    for pid in [*started[1].wait_for("step    3"), started[1].pid]:
        os.kill(pid, signal.SIGKILL)
    assert started[1].end() == -signal.SIGKILL
    started[0].wait_for("the mean is without island 1")
    started[1] = begin(1, "--tp 2")  # another layout, and no checkpoint
    started[1].wait_for("with the others' weights")
    os.kill(started[2].pid, signal.SIGSTOP)
    started[0].wait_for("the mean is without island 2")
    os.kill(started[2].pid, signal.SIGCONT)
    started[2].wait_for("is done without this island")
    started[2].wait_for("with the others' weights")
    for island in started:
        assert island.end() == 0, island.output()
        assert "the mean is of all again" in island.output()
    weights = saved(tmp_path / "out" / "island-0")
    others = [saved(tmp_path / "out" / f"island-{i}", "outer old") for i in range(3)]
    for other in [*others, saved(tmp_path / "out" / "island-2")]:
        assert all(torch.equal(weight, other[name]) for name, weight in weights.items())
    losses = losses_of(started[0])
    assert len(losses) == 60 and sum(losses[-5:]) < sum(losses[:5]) - 2


def test_the_meeting_point_is_replaced(tmp_path, text):
    """Nothing is lost but the outer step that was under way."""
    (tmp_path / "secret").write_bytes(SECRET)
    listener = meeting.listen(("127.0.0.1", 0))
    where = listener.getsockname()

    def serve():
        pid = os.fork()
        if pid == 0:
            start.die_with_parent(signal.SIGKILL)
            sys.stderr = open(os.devnull, "w")
            meeting.MeetingPoint(SECRET).serve(listener)
        return pid

    flags = f"--islands 2 --meet {where[0]}:{where[1]} --secret-file {tmp_path}/secret --prove 0"
    flags += f" --data {text} --sync-every 4 --steps 24"
    first = serve()
    started = [Island(tmp_path, i, flags, slowly) for i in (0, 1)]
    try:
        started[0].wait_for("step    5")
        os.kill(first, signal.SIGKILL)
        os.waitpid(first, 0)
        second = serve()
        for island in started:
            assert island.end() == 0, island.output()
            assert "the meeting point is lost" in island.output()
            assert "others' weights" not in island.output()  # both were where they were
        os.kill(second, signal.SIGKILL)
        os.waitpid(second, 0)
    finally:
        listener.close()


# --- checkpoints


def test_goes_on_in_another_layout_and_with_more_islands(tmp_path, text, meeting_point):
    _, meet = meeting_point
    common = f"{meet} --data {text} --batch 12 --sync-every 2 --prove 0 --lr 0.01 --min-lr 0.01"
    common += " --outer-bits 8"

    def run(islands, flags, layouts):
        started = [
            Island(tmp_path, i, f"--islands {islands} {common} {flags} {layouts[i]}")
            for i in range(islands)
        ]
        for island in started:
            assert island.end() == 0, island.output()
        return started

    whole = run(2, "--steps 4", ["", ""])
    run(2, f"--steps 2 --out {tmp_path}/out", ["", "--tp 2"])
    rest = run(2, f"--steps 4 --out {tmp_path}/out --resume", ["--dp 2 --zero 2", ""])
    for one, two in zip(whole, rest):
        history = [json.loads(island.receipt.read_text())["steps"] for island in (one, two)]
        expected = {row["step"]: row["loss"] for row in history[0]}
        assert [row["step"] for row in history[1]] == [3, 4]
        for row in history[1]:
            assert abs(row["loss"] / expected[row["step"]] - 1) < 1e-10
    more = run(3, f"--steps 6 --out {tmp_path}/out --resume", ["", "", ""])
    assert "island 2 goes on from step 4 with the others' weights" in more[2].output()
    alone = Script(
        tmp_path,
        "train",
        f"{SMALL} --data {text} --steps 8 --out {tmp_path}/out/island-2 --resume".split(),
    )
    assert alone.end() == 0 and "resumed from" in alone.output()


# --- strangers


def test_strangers_are_turned_away(tmp_path, meeting_point):
    where, _ = meeting_point
    host, port = meeting.address(where)
    said = tmp_path / "meeting"
    with pytest.raises(meeting.LinkLost, match="has another secret"):
        meeting.Link((host, port), b"another secret of enough", patience=60)
    for noise in (b"GET / HTTP/1.1\r\n\r\n", b"\0" * 64, b"\xff" * 4096):
        with socket.create_connection((host, port)) as stranger:
            stranger.sendall(noise)
            stranger.settimeout(10)
            with contextlib.suppress(ConnectionError):
                while stranger.recv(4096):
                    pass  # until it hangs up
    assert said.read_text().count("turned away 127.0.0.1") >= 3
    friend = meeting.Link((host, port), SECRET, patience=1)
    about = dict(island=0, islands=1, step=0, digest=0, settings="s")
    answer, _ = friend.join(**about, island_timeout=9, start_timeout=9)
    assert answer["state"] is False
    other = meeting.Link((host, port), SECRET, patience=1)
    with pytest.raises(SystemExit) as refused:
        other.join(**about | {"settings": "t", "island": 1}, island_timeout=9, start_timeout=9)
    assert "other settings" in str(refused.value)


class Tampered:
    """A socket that changes, repeats or leaves out what goes through it after the greeting."""

    def __init__(self, connection, change):
        self.connection, self.change, self.sent = connection, change, 0

    def sendall(self, data):
        self.sent += 1
        for piece in self.change(self.sent, bytes(data)):
            self.connection.sendall(piece)

    def __getattr__(self, name):
        return getattr(self.connection, name)


@pytest.mark.parametrize(
    "change",
    [
        lambda n, data: [data[:-1] + bytes([data[-1] ^ 1])] if n == 6 else [data],  # the payload
        lambda n, data: [data[:-1] + bytes([data[-1] ^ 1])] if n == 3 else [data],  # its size
        lambda n, data: [] if 3 <= n <= 7 else [data],  # a frame is left out
    ],
)
def test_a_changed_frame_ends_the_connection(change):
    """In this process: the two ends of a pair of sockets."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        there = socket.create_connection(server.getsockname())
        here, _ = server.accept()
    far = []
    thread = threading.Thread(
        target=lambda: far.append(meeting.Wire(Tampered(there, change), SECRET, False))
    )
    thread.start()
    near = meeting.Wire(here, SECRET, True)
    thread.join()
    far[0].send("part", b"payload", step=1)
    far[0].send("part", b"payload", step=2)
    with pytest.raises(meeting.LinkLost, match="changed on its way"):
        near.receive()
        near.receive()


@pytest.mark.parametrize(
    "flags, words",
    [
        ("--sync-every 3", "means nothing without --islands"),
        ("--islands 2 --island 0", "go together"),
        ("--islands 2 --batch 5", "use 4"),
        ("--islands 2 --between 1Gbit/s", "without --dry-run"),
        ("--islands 2 --stream 60", "--sync-every 60 or more"),
        ("--islands 2 --island-timeout 700", "less than --timeout"),
        ("--islands 2 --only-sample --out x", "start again with --islands 1"),
    ],
)
def test_refused(flags, words, monkeypatch):
    import harness
    import train

    monkeypatch.setattr(sys, "argv", ["train.py", *flags.split()])
    with pytest.raises(harness.Refused) as refused:
        train.main()
    assert words in str(refused.value)


def test_an_island_that_can_not_start_ends_the_others(monkeypatch, tmp_path):
    """Of all that one command starts on this machine: here one ends, and one waits for it."""
    waited = tmp_path / "waited"
    flags = "['--island', '0']"
    code = f"import sys, time; sys.exit(2) if sys.argv[1:3] == {flags} else time.sleep(60)"
    code += f"; open('{waited}', 'w')"
    monkeypatch.setattr(sys, "orig_argv", ["python", "-c", code])
    files = dict.fromkeys(["json", "log_to", "record", "profile_to", "plot"])
    assert islands.start_all(types.SimpleNamespace(islands=2, **files)) == 2
    assert not waited.exists()
