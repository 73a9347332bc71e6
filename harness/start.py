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
import math
import os
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
from harness.joining import join, launched
from harness.refusal import Refused, refuse, say

# CUDA reads this when it starts. Kernels that are loaded at their first launch wait for the device,
# which may be waiting for this rank: see pipeline.prepare
os.environ.setdefault("CUDA_MODULE_LOADING", "EAGER")

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
    if "TORCHELASTIC_RUN_ID" in os.environ:  # the parent is torchrun's agent
        die_with_parent(signal.SIGTERM)
    joined = launched()
    started = joined.world if joined else 1
    gpus = torch.cuda.device_count()
    if args.device == "auto":
        args.device = "cuda" if gpus > 0 else "cpu"
    if args.backend is None:
        args.backend = "nccl" if args.device == "cuda" else "gloo"
    usual = min(4, gpus) if args.backend == "nccl" and gpus > 0 else 4
    world = needed or (started if joined else args.nproc or usual)
    if needed and args.nproc and args.nproc != needed:
        raise Refused(
            f"this layout needs {needed} processes, not the {args.nproc} of --nproc: "
            "leave that flag out"
        )
    check(world)
    check_devices(args, world)

    if started == world:
        if joined and world > 1:
            finish(one_rank(work, args, joined.rank, world, join))
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
    joined = launched()
    local_ranks = joined.local_world if joined and joined.world > 1 else world
    if gpus == 0:
        raise Refused("--device cuda, but no GPU is visible here: use --device cpu")
    if args.backend == "nccl" and local_ranks > gpus:
        nodes = world // max(n for n in range(1, gpus + 1) if world % n == 0)
        here = "--backend gloo --device cuda lets ranks share a GPU, --device cpu takes none"
        if args.nproc and not joined:
            here = f"--nproc {gpus} takes one rank a GPU, {here}"
        raise Refused(
            f"{world} ranks need {world} GPUs on nccl and this machine has {gpus}: on each of "
            f"{nodes} nodes run {command(world, nodes)}; or on this machine {here}"
        )


# What a user, a terminal that closes or a batch system sends to end a run
STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def start_ranks(work, world, patience=PATIENCE, notice=30.0):
    """Run work(rank, connect) -> exit code in `world` processes of this machine. Returns 0 if all
    return 0; else 2 if one refused, 1 otherwise; 128 and the signal's number if interrupted.

    Forked processes start ten times faster than fresh ones, because torch is imported already. When
    a rank fails, the others get `patience` seconds to end by themselves. After SIGTERM or SIGHUP
    they get `notice` seconds, in which train.py saves. The store is a file, so only the backend
    listens for connections, on the loopback interface.
    """
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
    ranks = Ranks()
    with tempfile.TemporaryDirectory() as folder, recorded(STOPPING) as (received, old_handlers):
        path = os.path.join(folder, "store")
        try:
            for rank in range(world):
                if received:
                    break
                if fork:
                    ranks.fork(rank, work, old_handlers, path, world)
                else:
                    ranks.start_fresh(rank, path, world)
        except OSError as e:
            ranks.stop(signal.SIGKILL)
            ranks.reap(wait=True)
            raise Refused(
                f"rank {rank} of {world} can't be started ({e.strerror}): start fewer ranks, or "
                "raise the limit of processes (ulimit -u) or of memory"
            ) from e
        ranks.watch(received, patience, notice)
    failures = {code for code in ranks.codes.values() if code}
    lost = ranks.lost(received)
    if lost:
        say(f"{', '.join(lost)}; the others stop")
    if received and (failures or len(ranks.codes) < world):
        say(f"interrupted by {signal.Signals(received[0]).name}")
        return 128 + received[0]
    if failures == {LOST}:
        say("the ranks lost each other; the run ends")
    if 2 in failures:
        return 2
    return 1 if failures else 0


class Ranks:
    """The processes of the ranks, as the process sees them that started them."""

    def __init__(self):
        self.running = {}  # {process id: rank}
        self.codes = {}  # {rank: exit code}, minus a signal's number
        self.killed = set()  # ranks that were still running when `stop` sent them SIGKILL
        self.processes = []  # kept: a Popen that is collected waits for its process itself

    def fork(self, rank, work, old_handlers, path, world):
        """Start a rank as a fork of this process. Raises OSError."""
        parent = os.getpid()
        # A signal that arrives in between must not meet this process's handlers in the new one
        signal.pthread_sigmask(signal.SIG_BLOCK, STOPPING)
        try:
            pid = os.fork()
            if pid == 0:
                try:
                    die_with_parent(signal.SIGKILL)
                    for number, handler in old_handlers.items():
                        ignored = handler == signal.SIG_IGN
                        signal.signal(number, signal.SIG_IGN if ignored else signal.SIG_DFL)
                    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOPPING)
                    if os.getppid() == parent:
                        finish(work(rank, lambda rank, world: dist.FileStore(path, world)))
                finally:
                    os._exit(1)
            self.running[pid] = rank
        finally:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, STOPPING)

    def start_fresh(self, rank, path, world):
        """Start a rank as a fresh process that runs the same command. Raises OSError."""
        environment = dict(os.environ, STORE_FILE=path, LAUNCHER=str(os.getpid()))
        environment |= dict.fromkeys(("RANK", "LOCAL_RANK"), str(rank))
        environment |= dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), str(world))
        # orig_argv still has the -m of `python -m benchmarks.table`; sys.argv has not.
        # Ctrl-C while it imports torch would be a traceback: this process ends it anyway
        process = subprocess.Popen(
            [sys.executable, *sys.orig_argv[1:]],
            env=environment,
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_IGN),
        )
        self.processes.append(process)
        self.running[process.pid] = rank

    def reap(self, wait=False):
        """Take the exit codes of ranks that have ended; wait=True waits for all."""
        for pid in list(self.running):
            ended, status = os.waitpid(pid, 0 if wait else os.WNOHANG)
            if ended:
                self.codes[self.running.pop(pid)] = os.waitstatus_to_exitcode(status)

    def stop(self, number):
        """Send a signal to the ranks that are still running."""
        self.reap()
        for pid, rank in self.running.items():
            if number == signal.SIGKILL:
                self.killed.add(rank)
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    def watch(self, received, patience, notice):
        """Wait until all ranks have ended. received: signals to this process, a list that grows.
        Whoever does not end in time is killed."""
        passed_on, failures, deadline = 0, 0, math.inf
        while True:
            self.reap()
            if not self.running:
                return
            now = time.monotonic()
            if len(received) > passed_on:
                number = received[passed_on]
                passed_on += 1
                self.stop(number)
                deadline = min(deadline, now + (0.5 if number == signal.SIGINT else notice))
            failed_now = sum(code != 0 for code in self.codes.values())
            if failed_now > failures:
                failures = failed_now
                deadline = min(deadline, now + patience)
            if now > deadline:
                self.stop(signal.SIGKILL)
                self.reap(wait=True)
                return
            time.sleep(0.01)

    def lost(self, received):
        """How each rank ended that ended neither by itself nor by a signal from here."""
        found = []
        for rank, code in sorted(self.codes.items()):
            explained = -code in received or rank in self.killed and -code == signal.SIGKILL
            if code < 0 and not explained:
                found.append(f"rank {rank} was ended by {signal.Signals(-code).name}")
            elif code > 0 and code not in EXIT_CODES:
                found.append(f"rank {rank} ended with exit code {code}")
        return found


@contextlib.contextmanager
def recorded(numbers):
    """Append signals to a list instead of acting on them. Gives the list and the old handlers. What
    this process was told to ignore, as under nohup, it still ignores."""
    received, old_handlers = [], {}
    for number in numbers:
        old_handlers[number] = signal.getsignal(number)
        if old_handlers[number] != signal.SIG_IGN:
            signal.signal(number, lambda number, _: received.append(number))
    try:
        yield received, old_handlers
    finally:
        for number, handler in old_handlers.items():
            signal.signal(number, handler)


def can_fork():
    """Whether ranks can be forked: not with CUDA, nor with the libraries of other systems."""
    return sys.platform == "linux" and not torch.cuda.device_count()


def keep_autograd_forkable():
    """Let processes that are forked from this one use autograd, whatever FakeTensorMode does here.

    At the first backward of a process autograd starts a thread for each device but the CPU, and
    none of its forks may use autograd from then on. A CUDA build that finds no GPU has eight
    devices in this count once FakeTensorMode was entered. So the count is taken before, while there
    are none. GPUs are hidden: tensors without values need none."""
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    (2 * torch.ones((), requires_grad=True)).backward()


ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
# Backends with which a rank that lost a peer hangs, where with gloo it gets an exception
WITHOUT_EXCEPTIONS = ["nccl"]
# Exit code of a rank that lost a peer and leaves the explanation to the peer or to the launcher
LOST = 75
# Those of a rank that has explained itself, or need not: 130 after Ctrl-C, 141 if nobody reads on
EXIT_CODES = {0, 1, 2, LOST, 130, 141}


def die_with_parent(number):
    """Have the kernel (on Linux) send this process a signal when its parent ends, so that no rank
    trains on as an orphan."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(1, number)  # PR_SET_PDEATHSIG


def one_rank(work, args, rank, world, connect):
    """The life of a rank: connect(rank, world) to a store, work, leave. Returns the exit code, and
    never raises."""
    store, timeout = None, datetime.timedelta(seconds=getattr(args, "timeout", 600))
    try:
        if "LAUNCHER" in os.environ:  # a fresh process that start_ranks began
            die_with_parent(signal.SIGKILL)
            if os.getppid() != int(os.environ["LAUNCHER"]):
                return 1  # it ended before this process could ask to end with it
            signal.signal(signal.SIGINT, signal.SIG_DFL)  # the launcher has the say
        local_world = launched().local_world if connect is join else world
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
        ranks = {"rank": rank, "world_size": world}
        dist.init_process_group(args.backend, store=store, timeout=backend_timeout, **ranks)
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
        if world == 1:
            say("interrupted by SIGINT")
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
    while frame and not is_own(frame.f_code.co_filename):
        frame = frame.f_back
    if frame is None:
        return "? ?"
    file = os.path.basename(frame.f_code.co_filename)
    return f"{socket.gethostname()} {file}:{frame.f_lineno}"


def is_own(file):
    """Whether a source file is this project's: no test, nor of an environment in its folder."""
    folders = file.removeprefix(ROOT).split(os.sep)
    return file.startswith(ROOT + os.sep) and not {"tests", "site-packages"} & set(folders)


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


def roll_call(store, rank, world, wait):
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

    within(2 * wait + 1, call)  # a busy machine is slow in this too
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

NO_ADDRESS = "unable to find address"  # gloo, of a network interface
# What a CPU's allocator says, and a thread that gets no stack
SIGNS_OF_NO_MEMORY = ("can't allocate memory", "bad_alloc", "can't start new thread")


def failed(error, rank, world, store, timeout, forked):
    """Report an exception once, and return the exit code. A rank prints the exception that it
    raised. If ranks lost a peer, the first one that notices names the peer."""
    text = str(error).lower()
    late = "timed out" in text or "timeout" in text
    lost = any(sign in text for sign in SIGNS_OF_A_LOST_PEER)
    of_a_peer = isinstance(error, (RuntimeError, ConnectionError, TimeoutError)) and (late or lost)
    no_memory = isinstance(error, (torch.OutOfMemoryError, MemoryError))
    no_memory = no_memory or any(sign in text for sign in SIGNS_OF_NO_MEMORY)
    speaks_for_host = int(os.environ.get("LOCAL_RANK", rank)) == 0
    if no_memory or not of_a_peer and NO_ADDRESS not in text:
        within(1, lambda: store.set("failed", str(rank)))
    if no_memory:
        reason = str(error).partition("\n")[0] or "an allocation failed"
        advice = "give it less: more --microbatches, --recompute, --zero, a smaller --batch"
        say(f"rank {rank} is out of memory ({reason}): {advice}")
        return 1
    if NO_ADDRESS in text:
        name = os.environ.get("GLOO_SOCKET_IFNAME", "of this host's name")
        advice = "set GLOO_SOCKET_IFNAME to one that has (`ip address` lists them)"
        if speaks_for_host:
            say(f"the network interface {name} has no address: {advice}")
        return 2
    if not of_a_peer:
        trace = "".join(traceback.format_exception(error))
        print(f"rank {rank} failed:\n{trace}", file=sys.stderr, flush=True)
        return 1
    # torchrun ends the survivors with SIGTERM: they must report first
    with contextlib.suppress(ValueError):  # only the main thread may say so
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if forked and not late:
        within(1, lambda: store.set(f"here{rank}", whereabouts()))
        return LOST  # the process that forked the ranks saw which one died
    # After a time-out there is no hurry, and on a busy machine a rank may take seconds to answer.
    # After a broken connection torchrun may soon end this process
    wait = 6 if late else 1.5
    answers = roll_call(store, rank, world, wait)
    if answers is None:
        peer = os.environ.get("MASTER_ADDR", "the first rank's host")
        problem = "that host is down, or the link to it is cut"
        if speaks_for_host:
            say(f"{socket.gethostname()} lost {peer}: {problem}; the run ends")
        return 1
    first, present, missing = answers
    if not first:
        # The first rank still calls the roll, maybe in a store of this process
        time.sleep(wait + 2)
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
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):  # the reader or the terminal may be gone
            stream.flush()
    os._exit(code)


def script(main):
    """Call a script's main() and turn a refusal into one sentence and exit code 2."""
    streams.steady()
    try:
        main()
    except Refused as e:
        rank = os.environ.get("RANK", "0")
        finish(refuse(e, int(rank) if rank.isdecimal() else e.speaker))
    except KeyboardInterrupt:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # a second one must not cut this short
        say("interrupted by SIGINT")
        finish(130)
    except BrokenPipeError:  # the reader of our output has ended, as `head` does
        finish(141)
