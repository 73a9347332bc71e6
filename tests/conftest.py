"""Fixtures, and the one thing that makes a test of several ranks cheap: they are forked from this
process, which has imported torch already. That needs a parent whose thread pool was never used."""

import contextlib
import ctypes
import faulthandler
import fcntl
import functools
import gc
import importlib
import os
import pathlib
import pickle
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback

import pytest

# Tests are of CPUs, and ranks are forked, which CUDA does not survive. test_gpu.py alone gives a
# process of its own what the user has set; pytest-xdist's workers inherit both variables
os.environ.setdefault("USERS_GPUS", os.environ.get("CUDA_VISIBLE_DEVICES", "all"))
os.environ["CUDA_VISIBLE_DEVICES"] = ""

ROOT = pathlib.Path(__file__).parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "advanced")]

os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo" if sys.platform == "linux" else "lo0")


def pytest_collectstart():
    """Import what ranks need once, here, and not in every rank: torch, and what it imports at the
    first step of an optimizer, of a ledger and of a trace. The process that hands tests out to
    pytest-xdist's workers collects none, and needs no torch."""
    import torch
    import torch._dynamo
    import torch._subclasses.schema_check_mode

    torch.set_num_threads(1)
    # The first backward starts a thread for each GPU, which no fork survives. A CUDA build that
    # finds none has eight once FakeTensorMode was entered. So it is now, while there are none
    (2 * torch.ones((), requires_grad=True)).backward()
    if device_threads():
        pytest.exit(
            "autograd has started device threads in this process before any test was collected, so "
            "that no rank forked from it could run backward: what has called backward, or made "
            "GPUs visible again?"
        )
    with torch.profiler.record_function("the first imports a module"):
        pass


def device_threads():
    """The names of this process's threads that autograd has started for devices (on Linux)."""
    names = [file.read_text().strip() for file in pathlib.Path("/proc/self/task").glob("*/comm")]
    return [name for name in names if name.startswith("pt_autograd")]


# Real launches, faults and other implementations: worth their time, but not at every change
SLOW_FILES = "hangs watch checkpoint dryrun exercises exports fake_cuda faults gpu islands joining"
SLOW_FILES = {f"test_{name}" for name in f"{SLOW_FILES} recording start vs_torch".split()}
# And those that take seconds, of the other files
SLOW_TESTS = """
test_a_gradient_in_two_pieces_is_refused
test_compiled_blocks
test_equals_pytorch
test_equals_pytorchs_pipelining
test_on_a_gpu
test_sample_and_validation_are_the_same_in_every_layout
test_weight_gradients_come_last_once_and_cost_nothing_twice
test_zero_in_groups_of_ranks
""".split()
# Of several processes none should begin with one of these when the others have nothing left
FIRST = [
    "test_steps_on_cuda",
    "test_torchrun_starts_a_run_again_as_often_as_it_may",
    "test_two_hosts_and_a_cut_link",
]


def pytest_collection_modifyitems(items):
    """Put the longest tests first. Mark as quick the first case of each test function, without
    those of the slow files."""

    def place(item):
        if item.originalname in FIRST:
            return FIRST.index(item.originalname)
        return len(FIRST) + (item.path.stem not in SLOW_FILES)

    items.sort(key=place)
    seen = set()
    for item in items:
        function = item.path, item.originalname
        slow = item.path.stem in SLOW_FILES or item.originalname in SLOW_TESTS
        if not slow and function not in seen:
            item.add_marker("quick")
        seen.add(function)


@contextlib.contextmanager
def one_of_two():
    """Of pytest-xdist's workers two launch ranks at a time, while others wait or do without. Three
    launches on two cores took half as much processor time again, lost to their caches."""
    folders = [os.open(folder, os.O_RDONLY) for folder in (ROOT, ROOT / "tests")]
    while True:
        with contextlib.suppress(BlockingIOError):
            fcntl.flock(folders[0], fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        time.sleep(0.005)
        folders.reverse()
    try:
        yield
    finally:
        for folder in folders:
            os.close(folder)


@one_of_two()
def on_ranks(world, work, *args, timeout=120):
    """[work(rank, *args) for each of `world` ranks], each in a process of its own, joined in a gloo
    group.

    Raises AssertionError with the ranks' tracebacks where one fails, dies or does not end in
    time."""
    sys.stdout.flush()
    sys.stderr.flush()
    # Or the ranks' garbage collectors would touch, and so copy, all of this process's memory
    gc.freeze()
    with tempfile.TemporaryDirectory() as folder:
        pids = {}
        for rank in range(world):
            pid = os.fork()
            if pid == 0:
                child(folder, rank, world, work, args)
            pids[pid] = rank
        deadline, failed = time.monotonic() + timeout, {}
        while pids:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid in pids:
                rank = pids.pop(pid)
                if status:
                    failed[rank] = status
                    deadline = min(deadline, time.monotonic() + 5)
            elif time.monotonic() > deadline:
                failed |= dict.fromkeys(pids.values(), "did not end")
                for p in pids:
                    os.kill(p, signal.SIGKILL)
                    os.waitpid(p, 0)
                break
            else:
                time.sleep(0.002)
        said = [
            f"rank {r} ({failed[r]}): {read(folder, r, 'error') or 'no traceback'}"
            for r in sorted(failed)
        ]
        assert not failed, "\n" + "\n".join(said)
        return [pickle.loads(read(folder, rank, "result")) for rank in range(world)]


def join(path, rank, world):
    """Make this process a rank of a gloo group, whose members meet in the file `path`."""
    import torch.distributed as dist

    if hasattr(os, "SCHED_BATCH"):
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    store = dist.FileStore(path, world)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world)


def child(folder, rank, world, work, args):
    import torch.distributed as dist

    code = 1
    # An abort that a test expects says nothing; another one says what it was
    faulthandler.enable(open(f"{folder}/error{rank}", "w"))
    try:
        join(f"{folder}/store", rank, world)
        result = work(rank, *args)
        pathlib.Path(folder, f"result{rank}").write_bytes(pickle.dumps(result))
        dist.barrier()
        code = 0
    except BaseException:
        pathlib.Path(folder, f"error{rank}").write_text(traceback.format_exc())
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def read(folder, rank, kind):
    path = pathlib.Path(folder, f"{kind}{rank}")
    return (path.read_bytes() if kind == "result" else path.read_text()) if path.exists() else None


@pytest.fixture(scope="session")
def ranks():
    return on_ranks


def write_text(folder):
    from harness import data

    path = folder / "text.txt"
    path.write_text("".join(chr(97 + data.hash64(1, i) % 26) + " " * (i % 3) for i in range(4000)))
    return str(path)


@pytest.fixture(scope="session")
def text(tmp_path_factory):
    return write_text(tmp_path_factory.mktemp("text"))


def ip(*words, check=True):
    return subprocess.run(["ip", *words], check=check, capture_output=True, text=True, timeout=20)


def joined_hosts():
    """Two network namespaces, joined by a wire: the names of both. Root only."""
    from benchmarks import slow_links

    return slow_links.two_hosts()


@pytest.fixture
def two_nodes():
    from harness import Refused

    with contextlib.ExitStack() as stack:
        try:
            names = stack.enter_context(joined_hosts())
        except Refused as e:
            pytest.skip(str(e))
        yield names


def enter(name):
    """Move this process into a network namespace, and call its host by the same name."""
    new_names, new_network = 0x04000000, 0x40000000  # CLONE_NEWUTS, CLONE_NEWNET
    libc = ctypes.CDLL(None, use_errno=True)
    with open(f"/var/run/netns/{name}") as namespace:
        assert libc.setns(namespace.fileno(), new_network) == 0, os.strerror(ctypes.get_errno())
    assert libc.unshare(new_names) == 0, os.strerror(ctypes.get_errno())
    socket.sethostname(name)


def children(pid):
    return [int(p) for p in pathlib.Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def usual_signals():
    """Handle signals as in a shell's foreground, whatever started the tests (nohup, CI)."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


class Script:
    """A script as from the command line, but forked from here, where torch is imported already.
    What it says, on stdout and stderr, goes into a file. before(): what to do in its process
    first."""

    def __init__(self, folder, name, flags, before=lambda: None):
        import harness
        from harness import start

        self.name, self.said = name, folder / "said"
        self.said.write_text("")
        sys.stdout.flush()
        self.pid = os.fork()
        if self.pid == 0:
            faulthandler.disable()
            start.signals.die_with_parent()
            sys.stdout = sys.stderr = open(self.said, "w", buffering=1)
            for number in (1, 2):  # what processes say that it starts
                os.dup2(sys.stdout.fileno(), number)
            usual_signals()
            sys.argv = [f"{name}.py", *flags]
            before()
            harness.script(importlib.import_module(name).main)
            start.finish(0)

    def output(self):
        return self.said.read_text()

    def errors(self):
        return [
            line
            for line in self.output().splitlines()
            if re.match(rf"{self.name}\.py: (?!starting)", line)
        ]

    def wait_for(self, words, seconds=100):
        """The processes of its ranks, in order, once it has said some words."""
        deadline = time.monotonic() + seconds
        while words not in self.output():
            if time.monotonic() > deadline:
                self.fail(f"did not say {words!r}")
            time.sleep(0.01)
        return children(self.pid)

    def end(self, seconds=100):
        """Its exit code."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                return os.waitstatus_to_exitcode(status)
            time.sleep(0.01)
        self.fail("did not end")

    def fail(self, why):
        """Leaves no process that would slow the next tests down."""
        os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)
        pytest.fail(f"{why}: {self.output()}")


def refused(monkeypatch, script, flags):
    """The sentence with which a script's main() refuses its flags, before any process is
    started."""
    import harness
    from harness import start

    monkeypatch.setattr(sys, "argv", [f"{script}.py", *flags.split()])
    monkeypatch.setattr(start, "start_ranks", lambda *_: pytest.fail("ranks were started"))
    with pytest.raises(harness.Refused) as e:
        __import__(script).main()
    assert e.value.code == 2 and "\n" not in str(e.value)
    return str(e.value)


@pytest.fixture
def script(tmp_path):
    """A function that runs a script with flags, a text, to its end: (exit code, what it said)."""

    def run(name, flags):
        done = Script(tmp_path, name, flags.split())
        return done.end(), done.output()

    return run


@pytest.fixture(scope="session")
def copied(tmp_path_factory):
    """copied("ddp", 3, work, *args): work on 3 ranks that see the top of ddp.py alone (tops.py)."""
    import tops

    return functools.partial(tops.on_copied, tmp_path_factory.mktemp("tops"))
