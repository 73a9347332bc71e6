"""Two files: a lesson and model.py, copied into an empty folder, train and prove themselves."""

import contextlib
import faulthandler
import importlib
import os
import pathlib
import re
import runpy
import signal
import socket
import sys
import time
from collections import Counter

import pytest
from conftest import one_of_two
from tops import lesson_file, without_project

import exercises.__main__ as exercises

COMPOSED = "model mixture context_parallel ddp expert_parallel fsdp pipeline tensor_parallel zero"
COMPOSED += " zero_bubble"
# {lesson: (the files that it takes along, the numbers of ranks that it is run with)}
LESSONS = {
    "collectives": ("model", (2, 3, 4)),
    "ddp": ("model", (2, 3, 4)),
    "double_tree": ("model collectives", (2, 3)),
    "diloco": ("model", (3,)),
    "dualpipe": ("model mixture pipeline zero_bubble expert_parallel", (2, 4)),
    "expert_parallel": ("model mixture", (1, 3, 4)),
    "context_parallel": ("model", (1, 3, 4)),
    "gather_context": ("model context_parallel", (1, 3, 4)),
    "ulysses": ("model context_parallel", (1, 3, 4)),
    "packed_documents": ("model context_parallel", (2, 3)),
    "parameter_server": ("model", (1, 3, 4)),
    "pipeline": ("model", (1, 3, 4)),
    "zero": ("model", (2, 3, 4)),
    "zero_bubble": ("model pipeline", (2, 3)),
    "fsdp": ("model zero", (2, 3, 4)),
    "tensor_overlap": ("model tensor_parallel sequence_parallel", (2, 3)),
    "tensor_parallel": ("model", (1, 3, 4)),
    "sequence_parallel": ("model tensor_parallel", (1, 3, 4)),
    "muon": ("model", (2, 3)),
    "composition": (COMPOSED, (2, 4)),
}
BUGS = [bug for bug in exercises.load() if pathlib.Path(bug.run.split()[0]).stem in LESSONS]


def copy(folder, lesson, bug=None):
    """Copy a lesson and what it names into a folder. bug: an exercise, planted in its file."""
    for name in [lesson, *LESSONS[lesson][0].split()]:
        text = lesson_file(name).read_text()
        if bug is not None and bug.name == name:
            text = bug.planted()
        (folder / f"{name}.py").write_text(text)


@one_of_two()
def run(folder, lesson, ranks, flags=(), timeout=100):
    """Run a copied lesson on forked ranks, as torchrun would start it: ({exit codes}, output).
    Forked, because torch is imported here already: torchrun takes seconds for that."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    said, pids = folder / "said", []
    said.write_text("")
    sys.stdout.flush()
    sys.stderr.flush()
    for rank in range(ranks):
        pid = os.fork()
        if pid == 0:
            code = 1
            with contextlib.suppress(BaseException):
                as_torchrun(folder, lesson, rank, ranks, port, said, flags)
                code = 0
            os._exit(code)
        pids.append(pid)
    deadline, codes = time.monotonic() + timeout, set()
    while pids:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid in pids:
            pids.remove(pid)
            codes.add(os.waitstatus_to_exitcode(status))
            if status:  # torchrun ends the others
                deadline = min(deadline, time.monotonic() + 5)
        elif time.monotonic() > deadline:
            for pid in pids:
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.005)
    return codes, said.read_text()


def as_torchrun(folder, lesson, rank, ranks, port, said, flags):
    faulthandler.disable()  # pytest's. gloo aborts if the rank that found a planted bug has left
    output = os.open(said, os.O_WRONLY | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    sys.stdout, sys.stderr = open(1, "w"), open(2, "w")
    os.environ |= dict(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank))
    os.environ |= dict(LOCAL_RANK=str(rank), WORLD_SIZE=str(ranks), LOCAL_WORLD_SIZE=str(ranks))
    sys.argv = [f"{lesson}.py", *flags]
    with without_project(folder):
        try:
            runpy.run_path(f"{lesson}.py", run_name="__main__")
        except BaseException:
            sys.excepthook(*sys.exc_info())
            raise
        finally:
            sys.stdout.flush()
            sys.stderr.flush()


@pytest.mark.parametrize("lesson, ranks", [(k, n) for k in LESSONS for n in LESSONS[k][1]])
def test_a_copied_lesson_proves_itself(tmp_path, lesson, ranks):
    copy(tmp_path, lesson)
    trains = lesson not in ("collectives", "double_tree")
    fewer = ["--steps", "2"] if ranks < 4 and trains else []
    codes, said = run(tmp_path, lesson, ranks, fewer)
    assert codes == {0}, said
    lines = [line for line in said.splitlines() if line]
    assert ": proven, to " in lines[-1] and "NOT" not in said and "Warning" not in said
    assert max(Counter(lines).values()) <= said.count(": proven, to "), said  # one per form


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: f"{bug.file}-{BUGS.index(bug)}")
def test_a_planted_bug_is_named(tmp_path, bug):
    """By the tensor that differs, or by what was sent."""
    lesson, *flags = bug.run.split()
    lesson = pathlib.Path(lesson).stem
    copy(tmp_path, lesson, bug)
    codes, said = run(tmp_path, lesson, 4, flags)
    assert 1 in codes, said
    what = r"the (gradient|weight|loss|result of) \S* ?differs"
    named = rf"NOT proven: ({what}|sent and formula differ)"
    if bug.name == "dualpipe":  # messages meet others
        named = "RuntimeError: .*gloo"
    assert re.search(named, said), said


@pytest.mark.parametrize("lesson", LESSONS)
def test_importing_a_lesson_needs_no_model(tmp_path, lesson, capfd):
    """But torch and the lessons that it builds on; and it runs nothing."""
    copy(tmp_path, lesson)
    for name in ("model.py", "mixture.py"):
        (tmp_path / name).unlink(missing_ok=True)
    with without_project(tmp_path):
        importlib.import_module(lesson)
    assert capfd.readouterr() == ("", "")
