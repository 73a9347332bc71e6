"""Start the ranks on this machine, or join the ranks that torchrun started. When a rank is lost,
end the others with one sentence.

`on_ranks(work, args)` calls work on every rank and ends the process with its exit code. Bad input
is one sentence on stderr and exit code 2 (`Refused`). If a rank dies, hangs or is cut off, one of
the others calls the roll through the store and names the missing ranks.
"""

import contextlib
import ctypes
import datetime
import functools
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

from harness import host_messages, streams

# CUDA reads this when it starts. Kernels that are loaded at their first launch wait for the device,
# which may be waiting for this rank: see pipeline.warm_up
os.environ.setdefault("CUDA_MODULE_LOADING", "EAGER")

# --- bad input


class Refused(SystemExit):
    """The run can't begin or go on. The message is one sentence that says what to change. Bad input
    is exit code 2. Every rank raises it at the same place, and rank `speaker` prints it; or it is
    `alone`, and the other ranks end because it did."""

    def __init__(self, message, speaker=0, code=2, alone=False):
        super().__init__(code)
        self.message, self.speaker, self.alone = message, speaker, alone

    def __str__(self):
        return self.message


@contextlib.contextmanager
def refusing():
    """Turn a technique's ValueError about sizes that do not fit into a refusal."""
    try:
        yield
    except ValueError as e:
        raise Refused(str(e)) from e


def say(message):
    """Print a sentence on stderr, behind the script's name."""
    print(f"{os.path.basename(sys.argv[0])}: {message}", file=sys.stderr, flush=True)


def refuse(refused, rank):
    """Print the sentence on the rank that speaks. Returns the exit code."""
    if rank == refused.speaker:
        say(refused)
    else:
        # Under torchrun the first rank to leave ends the others: the speaker needs time to print
        time.sleep(1)
    return refused.code


# --- start-up

PATIENCE = 1.5  # seconds that the other ranks get to end by themselves after one has failed


def on_ranks(work, args, needed=None, check=lambda world: None):
    """Call work(rank, world size, device) -> exit code on every rank, and end the process with it.

    args    the flags nproc, device, backend, timeout and quiet
    needed  the number of ranks that the layout takes; None is any: --nproc, or 4, or on nccl as
            many as there are GPUs, if these are fewer
    check   check(world size) may refuse a number of ranks

    If a launcher that sets RANK and WORLD_SIZE, such as torchrun, has started the ranks, this joins
    them. If it has started none, or one and more are needed, this starts them on this machine.
    """
    joined = "RANK" in os.environ and "WORLD_SIZE" in os.environ
    started = int(os.environ["WORLD_SIZE"]) if joined else 1
    gpus = torch.cuda.device_count()
    if args.device == "auto":
        args.device = "cuda" if gpus > 0 else "cpu"
    if args.backend is None:
        args.backend = "nccl" if args.device == "cuda" else "gloo"
    if needed:
        world = needed
    elif joined:
        world = started
    elif args.backend == "nccl" and gpus > 0:
        world = args.nproc or min(4, gpus)
    else:
        world = args.nproc or 4
    if needed and args.nproc and args.nproc != needed:
        raise Refused(
            f"this layout needs {needed} processes, not the {args.nproc} of --nproc: "
            "leave that flag out"
        )
    check(world)
    check_devices(args, world)

    if started == world:
        if joined and world > 1:
            finish(one_rank(work, args, int(os.environ["RANK"]), world, join))
        finish(one_rank(work, args, 0, 1, lambda rank, world: dist.HashStore()))
    if started > 1:
        raise Refused(
            f"this layout needs {world} processes and {started} were started: {command(world)}"
        )
    if not args.quiet and needed:
        say(f"this layout needs {world} processes: starting them on this machine")
    elif not args.quiet:
        say(f"starting {world} processes")
    finish(start_ranks(lambda rank, connect: one_rank(work, args, rank, world, connect), world))


def command(world, nodes=1):
    """The torchrun command that starts this script on so many ranks."""
    script = " ".join([os.path.basename(sys.argv[0]), *sys.argv[1:]])
    if nodes == 1:
        return f"torchrun --nproc_per_node={world} {script}"
    rendezvous = "--rdzv-backend=c10d --rdzv-endpoint=FIRST_HOST:29500"
    return f"torchrun --nnodes={nodes} --nproc_per_node={world // nodes} {rendezvous} {script}"


def check_devices(args, world):
    """Refuse a backend or a number of ranks that this machine's devices can't serve."""
    if args.device == "cpu":
        if args.backend == "nccl":
            raise Refused("--backend nccl needs GPUs: use --backend gloo")
        return
    gpus = torch.cuda.device_count()
    local_ranks = world
    if "RANK" in os.environ and os.environ["WORLD_SIZE"] != "1":
        local_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", world))
    if gpus == 0:
        raise Refused("--device cuda, but no GPU is visible here: use --device cpu")
    if args.backend == "nccl" and local_ranks > gpus:
        nodes = world // max(n for n in range(1, gpus + 1) if world % n == 0)
        here = "--backend gloo --device cuda lets ranks share a GPU, --device cpu takes none"
        if args.nproc and "RANK" not in os.environ:
            here = f"--nproc {gpus} takes one rank a GPU, {here}"
        raise Refused(
            f"{world} ranks need {world} GPUs on nccl and this machine has {gpus}: on each of "
            f"{nodes} nodes run {command(world, nodes)}; or on this machine {here}"
        )


def start_ranks(work, world, patience=PATIENCE, notice=30.0):
    """Run work(rank, connect) -> exit code in `world` processes of this machine. Returns 0 if all
    return 0; else 2 if one refused, 1 otherwise; 130 or 143 if interrupted.

    Forked processes start ten times faster than fresh ones, because torch is imported already. When
    a rank fails, the others get `patience` seconds to end by themselves. After SIGTERM they get
    `notice` seconds, in which train.py saves. The store is a file, so only the backend listens for
    connections, on the loopback interface.
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
        torch.set_num_threads(1)  # a thread pool does not survive a fork
        # Optimizers import it at their first step: import it once instead of in every rank
        importlib.import_module("torch._dynamo")
    ranks, codes = {}, {}  # {process id: rank}, {rank: exit code}
    processes = []  # kept: a Popen that is collected waits for its process itself
    sigterm_times = []
    deadline, interrupted = None, False
    for rank in range(world):
        if fork:
            pid = os.fork()
            if pid == 0:
                die_with_parent(signal.SIGKILL)
                finish(work(rank, lambda rank, world: dist.FileStore(path, world)))
        else:
            environment = dict(os.environ, STORE_FILE=path)
            environment |= dict.fromkeys(("RANK", "LOCAL_RANK"), str(rank))
            environment |= dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), str(world))
            environment["LAUNCHER"] = str(os.getpid())
            # orig_argv still has the -m of `python -m benchmarks.table`; sys.argv has not
            process = subprocess.Popen([sys.executable, *sys.orig_argv[1:]], env=environment)
            processes.append(process)
            pid = process.pid
        ranks[pid] = rank

    def stop(number):
        for pid in ranks:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    old_handler = signal.signal(signal.SIGTERM, lambda *_: sigterm_times.append(time.monotonic()))
    try:
        while ranks:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if sigterm_times and deadline is None:
                deadline = sigterm_times[0] + notice
                stop(signal.SIGTERM)
            if pid == 0:
                time.sleep(0.01)
                if deadline and time.monotonic() > deadline:
                    stop(signal.SIGKILL)
                continue
            rank, code = ranks.pop(pid), os.waitstatus_to_exitcode(status)
            not_by_us = not sigterm_times and (deadline is None or time.monotonic() < deadline)
            unexplained = set(codes.values()) <= {0, LOST}
            codes[rank] = code
            # A rank that lost its peer may be seen to end before the peer that was killed
            if code < 0 and not_by_us and unexplained:
                say(f"rank {rank} was ended by {signal.Signals(-code).name}; the others stop")
            if code and (deadline is None or sigterm_times):
                deadline = time.monotonic() + patience
    except KeyboardInterrupt:
        interrupted = True
        stop(signal.SIGTERM)
        time.sleep(0.5)
        stop(signal.SIGKILL)
        while ranks:
            ranks.pop(os.wait()[0])
    finally:
        signal.signal(signal.SIGTERM, old_handler)
        shutil.rmtree(folder, ignore_errors=True)
    failures = set(codes.values()) - {0}
    if interrupted or (sigterm_times and failures):
        say("interrupted")
        return 130 if interrupted else 143
    if failures == {LOST}:
        say("the ranks lost each other; the run ends")
    if 2 in failures:
        return 2
    return 1 if failures else 0


def can_fork():
    """Whether ranks can be forked: not with CUDA, nor with the libraries of other systems."""
    return sys.platform == "linux" and not torch.cuda.device_count()


ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
# The folders of this project's code
OWN = [ROOT, *(os.path.join(ROOT, folder) for folder in ("harness", "trainer", "benchmarks"))]
# Backends with which a rank that lost a peer hangs, where with gloo it gets an exception
WITHOUT_EXCEPTIONS = ["nccl"]
# Exit code of a rank that lost a peer and leaves the explanation to the peer or to the launcher
LOST = 75


def die_with_parent(number):
    """Have the kernel (on Linux) send this process a signal when its parent ends, so that no rank
    trains on as an orphan."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(1, number)  # PR_SET_PDEATHSIG


def join(rank, world, timeout):
    """Connect to the store of ranks that a launcher started."""
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
    # After a restart by torchrun the store still has the keys of the attempt before
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", 0)
    return dist.PrefixStore(f"attempt{attempt}", store)


def one_rank(work, args, rank, world, connect):
    """The life of a rank: connect(rank, world) to a store, work, leave. Returns the exit code, and
    never raises."""
    store, timeout = None, datetime.timedelta(seconds=getattr(args, "timeout", 600))
    try:
        if "TORCHELASTIC_RUN_ID" in os.environ:  # the parent is torchrun's agent
            die_with_parent(signal.SIGTERM)
        elif "LAUNCHER" in os.environ:  # a fresh process that start_ranks began
            die_with_parent(signal.SIGKILL)
            if os.getppid() != int(os.environ["LAUNCHER"]):
                return 1  # it ended before this process could ask to end with it
        local_world = int(os.environ.get("LOCAL_WORLD_SIZE", world)) if connect is join else world
        share_cores(local_world, args.backend)
        device = torch.device("cpu")
        if args.device == "cuda":
            local_rank = int(os.environ.get("LOCAL_RANK", rank))
            device = torch.device("cuda", local_rank % torch.cuda.device_count())
            torch.cuda.set_device(device)
        store = join(rank, world, timeout) if connect is join else connect(rank, world)
        if args.backend == "gloo" and device.type == "cuda":
            host_messages.install()
        backend_timeout = timeout
        if world > 1:
            threading.Thread(target=answer, args=(store, rank), daemon=True).start()
        if world > 1 and args.backend in WITHOUT_EXCEPTIONS:
            # The backend's own watchdog would end the process and name nobody: it comes second
            backend_timeout += datetime.timedelta(seconds=60)
            watch = functools.partial(end_if_stuck, store, rank, world, timeout)
            threading.Thread(target=watch, daemon=True).start()
        dist.init_process_group(
            args.backend, store=store, rank=rank, world_size=world, timeout=backend_timeout
        )
        code = work(rank, world, device) or 0
        dist.barrier()  # no rank leaves while others still send to it
        dist.destroy_process_group()
    except Refused as e:
        if e.alone and store.add("refused", 1) > 1:
            e.speaker = None  # another rank has said it
        code = refuse(e, rank)
        if e.alone:
            within(1, lambda: store.set("failed", str(rank)))
    except KeyboardInterrupt:
        code = 130
    except BrokenPipeError:  # the reader of our output has ended, as `head` does
        code = 141
    except Exception as e:
        code = failed(e, rank, world, store, timeout, forked=connect is not join)
    return code


def share_cores(local_world, backend):
    """Divide this machine's cores among its ranks."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    torch.set_num_threads(max(1, cores // local_world))
    if backend == "gloo" and local_world > 1 and hasattr(os, "SCHED_BATCH"):
        # With the default scheduler gloo's threads wait a whole tick (4 ms) if ranks share cores
        with contextlib.suppress(OSError):
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))


# --- who is missing? A rank that lost a peer calls the roll through the store


def whereabouts():
    """This rank's answer to a roll call: its host, and the line of this project that its main
    thread is at."""
    frame = sys._current_frames().get(threading.main_thread().ident)
    while frame and os.path.dirname(frame.f_code.co_filename) not in OWN:
        frame = frame.f_back
    if frame is None:
        return "? ?"
    file = os.path.basename(frame.f_code.co_filename)
    return f"{socket.gethostname()} {file}:{frame.f_lineno}"


def answer(store, rank, every=0.25):
    """The work of a rank's thread: say on which host it is, answer a roll call even if the main
    thread hangs, and end the process if another rank has failed: its peers may wait for ever."""
    with contextlib.suppress(Exception):  # the store may end before this rank
        store.set(f"host{rank}", socket.gethostname())
        while not store.check(["roll"]):
            if store.check(["failed"]):
                time.sleep(PATIENCE)  # the main thread may end by itself
                finish(LOST)
            time.sleep(every)
        store.set(f"here{rank}", whereabouts())


def end_if_stuck(store, rank, world, timeout, every=0.5):
    """The work of a second thread, on nccl: end the process if the main thread stands at one and
    the same instruction for `timeout`. There the device waits for a lost peer, and the main thread
    waits where it reads the device's next value."""
    main = threading.main_thread().ident
    place, since = None, time.monotonic()
    while time.monotonic() - since < timeout.total_seconds():
        time.sleep(every)
        frame = sys._current_frames().get(main)
        now = frame and (frame.f_code, frame.f_lasti, id(frame))
        if now != place:
            place, since = now, time.monotonic()
    finish(failed(TimeoutError("timed out"), rank, world, store, timeout, forked=False))


def roll_call(store, rank, world, wait=1.5):
    """Ask all ranks where they are. Returns None if the store does not answer, else

    first    whether this rank is the first to call the roll
    present  {rank: its whereabouts} of the ranks that answer within `wait` seconds
    missing  {rank: its host} of the others
    """
    result = []

    def read(key):
        return store.get(key).decode() if store.check([key]) else "?"

    def call():
        first = store.add("roll", 1) == 1
        store.set(f"here{rank}", whereabouts())
        missing, deadline = set(range(world)), time.monotonic() + wait
        while missing and time.monotonic() < deadline:
            missing = {r for r in missing if not store.check([f"here{r}"])}
            time.sleep(0.05)
        present = {r: read(f"here{r}") for r in range(world) if r not in missing}
        result.extend((first, present, {r: read(f"host{r}") for r in sorted(missing)}))

    within(wait + 0.5, call)
    return result or None


def within(seconds, work):
    """Call something that may fail, or never return, such as a store behind a cut link."""

    def attempt():
        with contextlib.suppress(Exception):
            work()

    thread = threading.Thread(target=attempt, daemon=True)
    thread.start()
    thread.join(seconds)


SIGNS_OF_A_LOST_PEER = (
    "connection closed",
    "connection reset",
    "broken pipe",
    "connection refused",
    "remote process exited",
)


def failed(error, rank, world, store, timeout, forked):
    """Report an exception once, and return the exit code. A rank prints the exception that it
    raised. If ranks lost a peer, the first one that notices names the peer."""
    text = str(error).lower()
    late = "timed out" in text or "timeout" in text
    lost = any(sign in text for sign in SIGNS_OF_A_LOST_PEER)
    if isinstance(error, torch.OutOfMemoryError):
        within(1, lambda: store.set("failed", str(rank)))
        first_line = str(error).splitlines()[0]
        advice = "give it less: more --microbatches, --recompute, --zero, a smaller --batch"
        say(f"rank {rank} is out of memory ({first_line}): {advice}")
        return 1
    if not isinstance(error, (RuntimeError, ConnectionError)) or not (late or lost):
        within(1, lambda: store.set("failed", str(rank)))
        trace = "".join(traceback.format_exception(error))
        print(f"rank {rank} failed:\n{trace}", file=sys.stderr, flush=True)
        return 1
    # torchrun ends the survivors with SIGTERM: they must report first
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if forked and not late:
        within(1, lambda: store.set(f"here{rank}", whereabouts()))
        return LOST  # the process that forked the ranks saw which one died
    answers = roll_call(store, rank, world)
    if answers is None:
        if int(os.environ.get("LOCAL_RANK", rank)) == 0:
            peer = os.environ.get("MASTER_ADDR", "the first rank's host")
            say(
                f"{socket.gethostname()} lost {peer}: that host is down, "
                "or the link to it is cut; the run ends"
            )
        return 1
    first, present, missing = answers
    if not first:
        time.sleep(2)  # the first rank still calls the roll, maybe in a store of this process
        return LOST
    seconds = timeout.total_seconds()
    names = ", ".join(f"rank {r} on {host}" for r, host in missing.items())
    if missing and late:
        say(f"no answer from {names} within {seconds:g} s: it hangs, or the link to it is cut")
    elif missing:
        say(f"{names} died")
    elif late:
        lines = [f"rank {r} at {answer.split()[1]}" for r, answer in list(present.items())[:8]]
        say(f"no progress for {seconds:g} s, though all ranks answer: {', '.join(lines)}")
    else:
        say(f"a connection broke ({str(error).splitlines()[0]})")
    return 1


def finish(code):
    """End the process at once. In the interpreter's own exit gloo's threads can still abort it."""
    with contextlib.suppress(OSError):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)


def script(main):
    """Call a script's main() and turn a refusal into one sentence and exit code 2."""
    streams.steady()
    try:
        main()
    except Refused as e:
        finish(refuse(e, int(os.environ.get("RANK", 0))))
    except KeyboardInterrupt:
        finish(130)
    except BrokenPipeError:  # the reader of our output has ended, as `head` does
        finish(141)
