"""What Ctrl-C, SIGTERM, SIGHUP, SIGUSR1 and SIGUSR2 do: the process ends with a sentence. Imported
before torch."""

import contextlib
import ctypes
import multiprocessing
import os
import pathlib
import signal
import sys

from harness.refusal import finish, say

unsaved = ""  # what train.py adds to the sentence if a run saves nothing
# What a user, a terminal that closes or a batch system sends to end a run
OF_LAUNCHERS = (signal.SIGTERM, signal.SIGHUP)
STOPPING = (*OF_LAUNCHERS, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2)


def handle(handler, numbers=STOPPING):
    """Have `handler` act on signals. What is ignored, as under nohup, stays so."""
    for number in numbers:
        if signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, handler)


def end_by_sentence():
    """Have signals end this process. A launcher sends its ranks SIGTERM where another has failed:
    they leave it and SIGHUP as they are."""
    left = OF_LAUNCHERS if "RANK" in os.environ else ()
    handle(interrupted, [number for number in STOPPING if number not in left])


def interrupted(number, _):
    """Raises no exception: some libraries' imports catch all."""
    handle(signal.SIG_IGN)  # a second one must not cut this short
    if os.environ.get("RANK", "0") == "0" and not multiprocessing.parent_process():
        say(f"interrupted by {signal.Signals(number).name}{unsaved}")
    finish(128 + number)


def die_with_parent(number=signal.SIGKILL):
    """Have the kernel (on Linux) send this process a signal when its parent ends, so that no rank
    trains on as an orphan."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(1, number)  # PR_SET_PDEATHSIG


# A script of the project's own folder, and not a program that imports the harness
main = getattr(sys.modules["__main__"], "__file__", None)
if main and pathlib.Path(main).resolve().parent == pathlib.Path(__file__).resolve().parents[1]:
    end_by_sentence()
