"""Who is missing? When a rank dies, hangs or is cut off, one of the others names it.

Each rank's thread answers for it, even if its main thread hangs. A rank that lost a peer calls the
roll through the store, and says who does not answer.
"""

import contextlib
import os
import signal
import socket
import sys
import threading
import time
import traceback

import torch

from harness.joining import within
from harness.refusal import finish, say

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
PATIENCE = 1.5  # seconds that the other ranks get to end by themselves after one has failed
# Exit code of a rank that leaves the explanation to another rank, or to the launcher
LOST = 75
# Backends with which a rank that lost a peer hangs, where with gloo it gets an exception
WITHOUT_EXCEPTIONS = ["nccl"]
# What gloo and the store say of a lost peer, and a CPU's allocator and a thread of no memory
SIGNS_OF_A_LOST_PEER = (
    "connection closed",
    "connection reset",
    "broken pipe",
    "connection refused",
    "remote process exited",
)
SIGNS_OF_NO_MEMORY = ("can't allocate memory", "bad_alloc", "can't start new thread")


def whereabouts():
    """The line of this project that the main thread is at."""
    frame = sys._current_frames()[threading.main_thread().ident]
    for frame, line in traceback.walk_stack(frame):
        if is_own(frame.f_code.co_filename):
            return f"{os.path.basename(frame.f_code.co_filename)}:{line}"
    return "?"


def is_own(file):
    """Whether a source file is this project's: no test, nor of an environment in its folder."""
    folders = file.removeprefix(ROOT).split(os.sep)
    return file.startswith(ROOT + os.sep) and not {"tests", "site-packages"} & set(folders)


def attend(store, me, timeout, backend):
    """Start the threads that answer for a rank. me: joining.Launched; timeout: in seconds."""
    threading.Thread(target=answer, args=(store, me.rank), daemon=True).start()
    if backend in WITHOUT_EXCEPTIONS:
        threading.Thread(target=end_if_stuck, args=(store, me, timeout), daemon=True).start()


def answer(store, rank):
    """Say on which host this rank is, answer a roll call, and end the process if another rank has
    failed: its peers may wait for ever."""
    with contextlib.suppress(Exception):  # the store may end before this rank
        store.set(f"host{rank}", socket.gethostname())
        while not store.check(["roll"]):
            if store.check(["failed"]):
                time.sleep(PATIENCE)  # the main thread may end by itself
                finish(LOST)
            time.sleep(0.25)
        store.set(f"here{rank}", whereabouts())


def end_if_stuck(store, me, timeout):
    """End the process if the main thread stands at one and the same instruction for `timeout`. On
    nccl the device waits for a lost peer, and the main thread for the device's next value."""
    main = threading.main_thread().ident
    place, since = None, time.monotonic()
    while time.monotonic() - since < timeout:
        time.sleep(0.5)
        frame = sys._current_frames()[main]
        if place != (frame.f_code, frame.f_lasti, id(frame)):
            place, since = (frame.f_code, frame.f_lasti, id(frame)), time.monotonic()
    finish(lost_a_peer(TimeoutError("timed out"), store, me, timeout, late=True))


def is_first_failure(store):
    """Tell the other ranks that this one has failed. Returns whether it is the first to do so."""
    return within(1, lambda: store.add("failed", 1)) in (1, None)


def failed(error, store, me, timeout):
    """Report an exception, once for all ranks, and return the exit code."""
    text = str(error).lower()
    late = "timed out" in text or "timeout" in text
    lost = any(sign in text for sign in SIGNS_OF_A_LOST_PEER)
    if isinstance(error, (RuntimeError, ConnectionError, TimeoutError)) and (late or lost):
        return lost_a_peer(error, store, me, timeout, late)
    if not is_first_failure(store):
        return LOST
    no_memory = isinstance(error, (torch.OutOfMemoryError, MemoryError))
    if no_memory or any(sign in text for sign in SIGNS_OF_NO_MEMORY):
        reason = str(error).partition("\n")[0] or "an allocation failed"
        advice = "give it less: more --microbatches, --recompute, --zero, a smaller --batch"
        say(f"rank {me.rank} is out of memory ({reason}): {advice}")
    else:
        trace = "".join(traceback.format_exception(error))
        print(f"rank {me.rank} failed:\n{trace}", file=sys.stderr, flush=True)
    return 1


def lost_a_peer(error, store, me, timeout, late):
    """Name the ranks that this one waits for, if it is the first to notice. Returns the exit code.
    late: whether they were silent, else a connection broke."""
    # torchrun ends the survivors with SIGTERM: they must report first
    with contextlib.suppress(ValueError):  # only the main thread may say so
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if within(1, lambda: store.check(["failed"])):
        return LOST  # that rank has said why
    if "STORE_FILE" in os.environ and not late:
        within(1, lambda: store.set(f"here{me.rank}", whereabouts()))
        return LOST  # the process that started the ranks saw which one died
    # After a time-out there is no hurry, and on a busy machine a rank may take seconds to answer.
    # After a broken connection torchrun may soon end this process
    wait = 6 if late else 1.5
    turn = within(wait, lambda: store.add("roll", 1))
    if turn and turn > 1:
        # The first rank still calls the roll, maybe in a store of this process
        time.sleep(wait + 2)
        return LOST
    answers = within(2 * wait, lambda: roll_call(store, me, wait))
    if answers is None:
        peer = os.environ.get("MASTER_ADDR", "the first rank's host")
        if me.local_rank == 0:
            host = socket.gethostname()
            say(f"{host} lost {peer}: that host is down, or the link to it is cut; the run ends")
        return 1
    present, missing = answers
    names = ", ".join(f"rank {rank} on {host}" for rank, host in missing.items())
    if missing and late:
        say(f"no answer from {names} within {timeout:g} s: it hangs, or the link to it is cut")
    elif missing:
        say(f"{names} died")
    elif late:
        lines = ", ".join(f"rank {rank} at {line}" for rank, line in list(present.items())[:8])
        say(f"no progress for {timeout:g} s, though all ranks answer: {lines}")
    else:
        say(f"a connection broke ({str(error).splitlines()[0]})")
    return 1


def roll_call(store, me, wait):
    """Ask all ranks where they are. Returns {rank: its line of code} of those that answer within
    `wait` seconds, and {rank: its host} of the others."""
    store.set(f"here{me.rank}", whereabouts())
    ranks, deadline = range(me.world), time.monotonic() + wait
    while time.monotonic() < deadline and not store.check([f"here{rank}" for rank in ranks]):
        time.sleep(0.05)
    present, missing = {}, {}
    for rank in ranks:
        if store.check([f"here{rank}"]):
            present[rank] = store.get(f"here{rank}").decode()
        else:
            missing[rank] = store.get(f"host{rank}").decode()
    return present, missing
