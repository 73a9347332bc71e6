"""Start the ranks, on this machine or among those that torchrun started; and end them in one
sentence when one is gone.

`on_ranks(work, args)` calls work on every rank and ends the process with its exit code. Bad input
is one sentence on stderr and exit code 2 (`Refused`). A rank whose peer dies, hangs or is cut off
calls the roll in the store, and names who is missing.
"""

import contextlib
import ctypes
import datetime
import importlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback

import torch
import torch.distributed as dist

# --- bad input


class Refused(SystemExit):
    """A run that can't begin or go on. The message is one sentence that says what to change; bad
    input is exit code 2.

    Every rank raises it, in the same place; `speaker` prints it."""

    def __init__(self, message, speaker=0, code=2):
        super().__init__(code)
        self.message, self.speaker = message, speaker

    def __str__(self):
        return self.message


@contextlib.contextmanager
def refusing():
    """Turn a technique's ValueError, a sentence about sizes that do not fit, into a refusal."""
    try:
        yield
    except ValueError as e:
        raise Refused(str(e)) from e


def say(message):
    print(f"{os.path.basename(sys.argv[0])}: {message}", file=sys.stderr, flush=True)


def refuse(refused, rank):
    """One rank says why; returns the exit code."""
    if rank == refused.speaker:
        say(refused)
    else:
        # Under torchrun the first rank to leave ends the others: let the speaker speak
        time.sleep(1)
    return refused.code


# --- start-up


def on_ranks(work, args, needed=None, check=lambda world: None):
    """Call work(rank, world size, device) -> exit code on every rank, and end the process with it.

    args: of the flags, nproc, device, backend, timeout and quiet. needed: the number of ranks that
    the layout takes; None means any. check(world size) may refuse a number of ranks. Joins the
    ranks that torchrun (or whatever sets RANK and WORLD_SIZE) started; otherwise, or where it
    started one and more are needed, starts them on this machine.
    """
    joined = "RANK" in os.environ and "WORLD_SIZE" in os.environ
    started = int(os.environ["WORLD_SIZE"]) if joined else 1
    world = needed or (started if joined else args.nproc or 4)
    if needed and args.nproc and args.nproc != needed:
        raise Refused(
            f"this layout needs {needed} processes, not the {args.nproc} of --nproc: leave that flag out"
        )
    check(world)
    use_gpu = args.device == "cuda" or args.device == "auto" and torch.cuda.device_count() > 0
    args.device = "cuda" if use_gpu else "cpu"
    args.backend = args.backend or ("nccl" if use_gpu else "gloo")
    check_devices(args, started if joined and started == world else world)

    if started == world:
        if joined and world > 1:
            finish(one_rank(work, args, int(os.environ["RANK"]), world, join))
        finish(one_rank(work, args, 0, 1, lambda rank, world: dist.HashStore()))
    if started > 1:
        raise Refused(
            f"this layout needs {world} processes and {started} were started: {command(world)}"
        )
    if not args.quiet:
        say(
            f"this layout needs {world} processes: starting them on this machine"
            if needed
            else f"starting {world} processes"
        )
    finish(start_ranks(lambda rank, connect: one_rank(work, args, rank, world, connect), world))


def command(world, nodes=1):
    script = " ".join([os.path.basename(sys.argv[0]), *sys.argv[1:]])
    if nodes == 1:
        return f"torchrun --nproc_per_node={world} {script}"
    rendezvous = "--rdzv-backend=c10d --rdzv-endpoint=FIRST_HOST:29500"
    return f"torchrun --nnodes={nodes} --nproc_per_node={world // nodes} {rendezvous} {script}"


def check_devices(args, world):
    if args.device == "cpu":
        if args.backend == "nccl":
            raise Refused("--backend nccl needs GPUs: use --backend gloo")
        return
    gpus = torch.cuda.device_count()
    here = (
        int(os.environ.get("LOCAL_WORLD_SIZE", world))
        if "RANK" in os.environ and os.environ["WORLD_SIZE"] != "1"
        else world
    )
    if gpus == 0:
        raise Refused("--device cuda, but no GPU is visible here: use --device cpu")
    if args.backend == "nccl" and here > gpus:
        per_node = max(n for n in range(1, gpus + 1) if world % n == 0)
        raise Refused(
            f"this layout needs {world} GPUs and this machine has {gpus}: on each of {world // per_node} nodes run "
            f"{command(world, world // per_node)} (or use CPUs: --device cpu)"
        )


def start_ranks(work, world, patience=1.5, notice=30.0):
    """Run work(rank, connect) -> exit code in `world` processes of this machine; returns 0 if all
    did, else the worst.

    Forked from this one they start ten times faster than afresh, because torch is imported already.
    When a rank fails, the others get `patience` seconds to end by themselves; told to end by
    SIGTERM, they get `notice` seconds, in which train.py saves. The store is a file: nothing
    listens for connections but the backend, and on the loopback interface.
    """
    folder = tempfile.mkdtemp()
    path = os.path.join(folder, "store")
    loopback = next((name for _, name in socket.if_nameindex() if name in ("lo", "lo0")), None)
    for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME") if loopback else ():
        os.environ.setdefault(variable, loopback)
    sys.stdout.flush()
    sys.stderr.flush()
    fork = can_fork()
    if fork:
        torch.set_num_threads(1)  # a thread pool does not survive it
        # Optimizers import it at their first step: once, not in every rank
        importlib.import_module("torch._dynamo")
    ranks, codes, deadline, interrupted, told = {}, {}, None, False, []
    for rank in range(world):
        if fork:
            pid = os.fork()
            if pid == 0:
                die_with_parent(signal.SIGKILL)
                finish(work(rank, lambda rank, world: dist.FileStore(path, world)))
        else:
            own = {
                "RANK": rank,
                "LOCAL_RANK": rank,
                "WORLD_SIZE": world,
                "LOCAL_WORLD_SIZE": world,
                "STORE_FILE": path,
            }
            environment = os.environ | {name: str(value) for name, value in own.items()}
            pid = subprocess.Popen([sys.executable, *sys.argv], env=environment).pid
        ranks[pid] = rank

    def stop(number):
        for pid in ranks:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    before = signal.signal(signal.SIGTERM, lambda *_: told.append(time.monotonic()))
    try:
        while ranks:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if told and deadline is None:
                deadline = told[0] + notice
                stop(signal.SIGTERM)
            if pid == 0:
                time.sleep(0.01)
                if deadline and time.monotonic() > deadline:
                    stop(signal.SIGKILL)
                continue
            rank, code = ranks.pop(pid), os.waitstatus_to_exitcode(status)
            codes[rank] = code
            if code and (deadline is None or told):
                deadline = time.monotonic() + patience
                if code < 0 and not told:
                    say(f"rank {rank} was ended by {signal.Signals(-code).name}; the others stop")
    except KeyboardInterrupt:
        interrupted = True
        stop(signal.SIGTERM)
        time.sleep(0.5)
        stop(signal.SIGKILL)
        while ranks:
            ranks.pop(os.wait()[0])
    finally:
        signal.signal(signal.SIGTERM, before)
        shutil.rmtree(folder, ignore_errors=True)
    failures = set(codes.values()) - {0}
    if interrupted or told and failures:
        say("interrupted")
        return 130 if interrupted else 143
    if failures == {LOST}:
        say("the ranks lost each other; the run ends")
    return 2 if 2 in failures else int(bool(failures))


def can_fork():
    """CUDA does not survive a fork, nor do the libraries of other systems."""
    return sys.platform == "linux" and not torch.cuda.device_count()


ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
# Where this project's code lies
OWN = [ROOT, *(os.path.join(ROOT, folder) for folder in ("harness", "trainer", "benchmarks"))]
# Exit code of a rank whose peer went away: the peer, or who started it, has something to tell
LOST = 75


def die_with_parent(number):
    """Have the kernel send this process a signal when its parent is gone, where it can: no rank
    trains on as an orphan."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(1, number)  # PR_SET_PDEATHSIG


def join(rank, world, timeout):
    """The store of the ranks that someone else started."""
    if "STORE_FILE" in os.environ:
        return dist.FileStore(os.environ["STORE_FILE"], world)
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    hosted = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    try:
        store = dist.TCPStore(
            address, port, world, is_master=rank == 0 and not hosted, timeout=timeout
        )
    except RuntimeError as e:
        if "EADDRINUSE" not in str(e) and "in use" not in str(e):
            raise Refused(
                f"nothing answers on {address}, port {port}, where the first rank should be",
                speaker=rank,
            ) from e
        raise Refused(f"port {port} on {address} is in use: set MASTER_PORT to a free one") from e
    # After a restart the keys of the attempt before are still there, under its own prefix
    return dist.PrefixStore(f"attempt{os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}", store)


def one_rank(work, args, rank, world, connect):
    """One rank's life: connect(rank, world) to a store, work, leave. Returns the exit code, and
    never raises."""
    store, timeout = None, datetime.timedelta(seconds=getattr(args, "timeout", 600))
    try:
        if "TORCHELASTIC_RUN_ID" in os.environ:  # the parent is torchrun's agent
            die_with_parent(signal.SIGTERM)
        local_world = int(os.environ.get("LOCAL_WORLD_SIZE", world)) if connect is join else world
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
        torch.set_num_threads(max(1, cores // local_world))
        if local_world > 1 and hasattr(os, "SCHED_BATCH"):
            # Where ranks share cores, Linux lets gloo's threads wait a whole scheduler tick (4 ms)
            # otherwise
            with contextlib.suppress(OSError):
                os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
        device = torch.device("cpu")
        if args.device == "cuda":
            device = torch.device(
                "cuda", int(os.environ.get("LOCAL_RANK", rank)) % torch.cuda.device_count()
            )
            torch.cuda.set_device(device)
        store = join(rank, world, timeout) if connect is join else connect(rank, world)
        if world > 1:
            threading.Thread(target=answer, args=(store, rank), daemon=True).start()
        dist.init_process_group(
            args.backend, store=store, rank=rank, world_size=world, timeout=timeout
        )
        code = work(rank, world, device) or 0
        dist.barrier()  # nobody leaves while others still talk to it
        dist.destroy_process_group()
    except Refused as e:
        code = refuse(e, rank)
    except KeyboardInterrupt:
        code = 130
    except BrokenPipeError:  # whoever read our output has gone, as `head` does
        code = 141
    except Exception as e:
        code = failed(e, rank, world, store, timeout, forked=connect is not join)
    return code


# --- who is gone? A rank that fails because of another calls the roll in the store


def here(rank):
    """What a rank answers: its host, and the line of this project that its main thread is at."""
    frame = sys._current_frames().get(threading.main_thread().ident)
    while frame and os.path.dirname(frame.f_code.co_filename) not in OWN:
        frame = frame.f_back
    return (
        f"{socket.gethostname()} {os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}"
        if frame
        else "? ?"
    )


def answer(store, rank, every=0.25):
    """A rank's thread: says on which host it is, and answers when the roll is called, whatever the
    main thread waits for."""
    with contextlib.suppress(Exception):  # the store may go first
        store.set(f"host{rank}", socket.gethostname())
        while not store.check(["roll"]):
            time.sleep(every)
        store.set(f"here{rank}", here(rank))


def roll_call(store, rank, world, wait=1.5):
    """Whether this rank is the first to call; {rank: what it answered} of those that answer within
    `wait` seconds, and the hosts of the others, {rank: host}. None if the store itself does not
    answer."""
    found = []

    def call():
        found.append(store.add("roll", 1) == 1)
        store.set(f"here{rank}", here(rank))
        missing, deadline = set(range(world)), time.monotonic() + wait
        while missing and time.monotonic() < deadline:
            missing = {r for r in missing if not store.check([f"here{r}"])}
            time.sleep(0.05)
        read = lambda key: store.get(key).decode() if store.check([key]) else "?"  # noqa: E731
        found.append({r: read(f"here{r}") for r in range(world) if r not in missing})
        found.append({r: read(f"host{r}") for r in sorted(missing)})

    within(wait + 0.5, call)
    return found if len(found) == 3 else None


def within(seconds, work):
    """Do something that may fail, or never return, as a store behind a cut link."""

    def attempt():
        with contextlib.suppress(Exception):
            work()

    thread = threading.Thread(target=attempt, daemon=True)
    thread.start()
    thread.join(seconds)


def failed(error, rank, world, store, timeout, forked):
    """Report an exception, once: the rank that raised it prints it; of ranks that lost or miss a
    peer the first names it."""
    text = str(error).lower()
    late = "timed out" in text or "timeout" in text
    lost = any(
        sign in text
        for sign in ("connection closed", "connection reset", "broken pipe", "connection refused")
    )
    lost = lost or "remote process exited" in text
    if not isinstance(error, (RuntimeError, ConnectionError)) or not (late or lost):
        print(
            f"rank {rank} failed:\n" + "".join(traceback.format_exception(error)),
            file=sys.stderr,
            flush=True,
        )
        return 1
    # Torchrun ends the survivors: not before they have spoken
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if forked and not late:
        within(1, lambda: store.set(f"here{rank}", here(rank)))
        return LOST  # the process that forked the ranks saw who died
    answers = roll_call(store, rank, world)
    if answers is None:
        if int(os.environ.get("LOCAL_RANK", rank)) == 0:
            there = os.environ.get("MASTER_ADDR", "the first rank's host")
            say(
                f"{socket.gethostname()} lost {there}: that host is down, or the link to it is cut; the run ends"
            )
        return 1
    first, present, gone = answers
    if not first:
        time.sleep(2)  # the first still calls the roll, maybe in a store that this process holds
        return LOST
    names, seconds = (
        ", ".join(f"rank {r} on {host}" for r, host in gone.items()),
        timeout.total_seconds(),
    )
    if gone:
        say(
            f"no answer from {names} within {seconds:g} s: it hangs, or the link to it is cut"
            if late
            else f"{names} died"
        )
    elif late:
        at = ", ".join(f"rank {r} at {text.split()[1]}" for r, text in list(present.items())[:8])
        say(f"no progress for {seconds:g} s, though all ranks answer: {at}")
    else:
        say(f"a connection broke ({str(error).splitlines()[0]})")
    return 1


def finish(code):
    """End the process. Past the interpreter's own exit, where gloo's threads can still abort a job
    that is done."""
    with contextlib.suppress(BrokenPipeError):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)


def script(main):
    """Call a script's main() and turn a refusal into one sentence and exit code 2."""
    try:
        main()
    except Refused as e:
        finish(refuse(e, int(os.environ.get("RANK", 0))))
    except KeyboardInterrupt:
        finish(130)
