"""Who is missing? When a rank hangs or is cut off, one of the others names it.

Two threads of each rank do this: one answers for it, even if its main thread hangs; the other sees
that the main thread hangs. The first rank that waits in vain calls the roll through the store.
"""

import contextlib
import os
import socket
import sys
import threading
import time
import traceback

import torch

from harness.joining import absent, within
from harness.refusal import finish, say

PATIENCE = 1.5  # seconds that the other ranks get to end by themselves after one has failed
ANSWER = 6  # seconds for a rank's answer to a roll call: on a busy machine it may take some
LOST = 75  # exit code of a rank that leaves the explanation to another rank, or to the launcher
# What gloo says of a lost peer
SIGNS_OF_A_LOST_PEER = ("connection closed", "connection reset", "broken pipe")
NO_MEMORY = "can't allocate memory"  # what torch says of it on CPUs


def attend(store, me, timeout):
    """Start the threads of a rank. me: its joining.Launched; timeout: in seconds."""
    store.set(f"host{me.rank}", socket.gethostname())
    threading.Thread(target=answer, args=(store, me.rank), daemon=True).start()
    threading.Thread(target=end_if_stuck, args=(store, me, timeout), daemon=True).start()


def answer(store, rank):
    """Answer a roll call. End the process if another rank has failed: its peers may wait."""
    with contextlib.suppress(Exception):  # the store may end before this rank
        while not store.check(["roll"]):
            if store.check(["failed"]):
                time.sleep(PATIENCE)  # the main thread may end by itself
                finish(LOST)
            time.sleep(0.25)
        store.set(f"here{rank}", "")


def end_if_stuck(store, me, timeout):
    """End the process if the main thread stands at one and the same instruction for `timeout`: it
    waits for a message, or on a GPU, where nothing raises an exception, for the device."""
    main = threading.main_thread().ident
    place, since = None, time.monotonic()
    while time.monotonic() - since < timeout:
        time.sleep(min(0.5, timeout))
        frame = sys._current_frames()[main]
        now = frame.f_code, frame.f_lasti, id(frame)
        del frame  # its tensors would stay in memory while this thread sleeps
        if place != now:
            place, since = now, time.monotonic()
    turn = within(ANSWER, lambda: store.add("roll", 1))
    if turn and turn > 1:  # the first rank still calls the roll, maybe in a store of this process
        time.sleep(ANSWER + 2)
        finish(LOST)
    problem = within(2 * ANSWER, lambda: roll_call(store, me.world, timeout))
    if problem:
        say(problem)
    elif me.local_rank == 0:
        peer = os.environ.get("MASTER_ADDR", "the first rank's host")
        host = socket.gethostname()
        say(f"{host} lost {peer}: that host is down, or the link to it is cut; the run ends")
    finish(1)


def roll_call(store, world, timeout):
    """Ask who is there. Returns a sentence."""
    silent = absent(store, "here", range(world), ANSWER)
    if not silent:
        return f"no progress for {timeout:g} s, though all ranks answer: they wait for each other"
    who = ", ".join(f"rank {rank} on {store.get(f'host{rank}').decode()}" for rank in silent)
    return f"no answer from {who} within {timeout:g} s: it hangs, or the link to it is cut"


def is_first_failure(store):
    """Tell the other ranks that this one has failed. Returns whether it is the first to do so."""
    return within(1, lambda: store.add("failed", 1)) in (1, None)


def lost_a_peer(error):
    """Whether an exception is what gloo says of a peer that has gone."""
    of_gloo = isinstance(error, RuntimeError)  # another library's connection may break too
    return of_gloo and any(sign in str(error).lower() for sign in SIGNS_OF_A_LOST_PEER)


def failed(error, store, rank):
    """Report an exception, once for all ranks. Returns the exit code."""
    lost = lost_a_peer(error)
    # Of ranks on one machine, the process that started them saw which one died
    if (lost and "STORE_FILE" in os.environ) or not is_first_failure(store):
        return LOST
    if lost:
        reason = str(error).partition("\n")[0]
        say(f"rank {rank} lost another one ({reason}); the run ends")
    elif (
        isinstance(error, (MemoryError, torch.OutOfMemoryError)) or NO_MEMORY in str(error).lower()
    ):
        name = traceback.extract_tb(error.__traceback__)[-1].name
        advice = "docs/fix/troubleshooting.md (out of memory) says which flags make a run smaller"
        say(f"rank {rank} found no memory left in {name}(): {advice}")
    else:
        trace = "".join(traceback.format_exception(error))
        print(f"rank {rank} failed:\n{trace}", file=sys.stderr, flush=True)
    return 1
