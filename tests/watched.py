"""Runs a script under `python -m proof`, as torchrun would: ranks that are forked from here, and a
store in a process of its own."""

import faulthandler
import json
import os
import signal
import socket
import sys
import time

from conftest import ROOT, usual_signals

from harness import start

LOOPS = ROOT / "tests" / "foreign_loops"


def watch(folder, script, world, flags="", options="", during=None, seconds=150):
    """(exit codes by rank, what was said, what --json has or None). during(pids, said) is called
    while the ranks run, until it returns true: then they are killed."""
    said, written = folder / "said", folder / "found.json"
    said.write_text("")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    sys.stdout.flush()
    store = forked(said, lambda: serve(port))
    words = ["proof", "--json", str(written), *options.split(), str(script), *flags.split()]
    pids = [
        forked(said, lambda rank=rank: one_rank(rank, world, port, words)) for rank in range(world)
    ]
    codes, deadline, stop = {}, time.monotonic() + seconds, False
    while len(codes) < world:
        for rank, pid in enumerate(pids):
            if rank not in codes:
                ended, status = os.waitpid(pid, os.WNOHANG)
                if ended:
                    codes[rank] = os.waitstatus_to_exitcode(status)
        stop = stop or during is not None and during(pids, said.read_text())
        if stop or time.monotonic() > deadline:
            left = set(range(world)) - set(codes)
            for rank in left:
                os.kill(pids[rank], signal.SIGKILL)
            for rank in left:
                os.waitpid(pids[rank], 0)
                codes[rank] = None
        time.sleep(0.01)
    os.kill(store, signal.SIGKILL)
    os.waitpid(store, 0)
    assert stop or None not in codes.values(), said.read_text()
    found = json.loads(written.read_text()) if written.exists() else None
    text = said.read_text()
    assert "a mistake of its own" not in text, text
    return [codes[rank] for rank in range(world)], text, found


def forked(said, work):
    pid = os.fork()
    if pid:
        return pid
    sys.stdout = sys.stderr = open(said, "a", buffering=1)
    for number in (1, 2):
        os.dup2(sys.stdout.fileno(), number)
    usual_signals()
    faulthandler.disable()  # pytest's: some ranks are killed
    start.signals.die_with_parent()
    code = 1
    try:
        work()
        code = 0
    except SystemExit as end:
        code = end.code or 0
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        sys.stdout.flush()
        os.kill(os.getpid(), signal.SIGKILL) if code not in range(256) else os._exit(code)


def serve(port):
    from torch.distributed import TCPStore

    store = TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)  # noqa: F841
    time.sleep(1000)


def one_rank(rank, world, port, words):
    from proof.__main__ import main

    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    os.environ |= {"TORCHELASTIC_USE_AGENT_STORE": "True", "LOCAL_WORLD_SIZE": str(world)}
    sys.argv = words
    main()
