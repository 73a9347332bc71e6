"""Start the ranks on this machine, or join the ranks that a launcher such as torchrun started.

`launch(demo, args)` calls demo on every rank and ends the process with its exit code. Bad input is
one sentence on stderr and exit code 2 (`Refused`). What happens if a rank dies, hangs or is cut off
stands in missing.py.
"""

import contextlib
import datetime
import errno
import importlib
import math
import os
import resource
import signal
import socket
import sys
import tempfile
import time

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from harness import host_messages, missing, signals
from harness.files import check_file, short
from harness.flags import flag_of
from harness.joining import Launched, join, launched
from harness.missing import LOST, PATIENCE
from harness.rank import Rank, check_memory, text_of
from harness.refusal import NOBODY_READS, Refused, finish, refuse, refusing, say

# CUDA reads this when it starts. In fewer hardware queues than streams a message would wait behind
# another one, which may be waiting for it: a middle rank of zb-v sends and receives on 8 streams
os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")

MOST = 1024  # ranks that are started on one machine
THREADS = 16  # of a rank, at least; 33 with eight ranks and three axes


def launch(demo, args, needed=None, check=lambda world: None, make=Rank):
    """Call demo(make(args, rank, world size, device)) -> exit code on every rank, and end the
    process with it.

    args    the flags; at least nproc, device, backend and quiet
    needed  the number of ranks that the layout takes; None is any: --nproc, or 4, or on nccl as
            many as there are GPUs, if these are fewer
    check   check(world size) may refuse a number of ranks; its ValueError becomes a refusal

    This joins the ranks that a launcher has started, such as torchrun. If there are none, or one
    and more are needed, this starts them on this machine."""
    saves_nothing = getattr(args, "out", "") is None
    signals.unsaved = ": nothing was saved, --out FOLDER saves" if saves_nothing else ""
    if "LAUNCHER" in os.environ:
        end_with_launcher()
    elif "TORCHELASTIC_RUN_ID" in os.environ:  # the parent is torchrun's agent
        signals.die_with_parent(signal.SIGTERM)
    joined = launched()
    me, gpus = joined or Launched(), choose_devices(args)
    usual = min(4, gpus or 4) if args.backend == "nccl" else 4
    world = needed or (me.world if joined else args.nproc or usual)
    needs = f"this layout needs {world} processes"
    if args.nproc and needed not in (None, args.nproc):
        raise Refused(f"{needs}, not the {args.nproc} of --nproc: leave that flag out")
    if me.world == 1 and world > MOST:
        raise Refused(f"{world:,} ranks are too many for one machine: use at most {MOST:,}")
    if hasattr(args, "layers"):
        check_memory(args)
    with refusing():
        check(world)
    for name in ("json", "log_to"):
        if getattr(args, name, None):
            check_file(flag_of(name), getattr(args, name))
    local_world = me.local_world if me.world > 1 else world
    # As with srun --gpus-per-task=1, or in a pod that is not told how many ranks are beside it
    one_each = gpus == 1 and "SLURM_PROCID" in os.environ
    one_each |= joined is not None and "LOCAL_WORLD_SIZE" not in os.environ
    if args.backend == "nccl" and local_world > gpus and not one_each:
        problem = f"{world} ranks need {world} GPUs on nccl and this machine has {gpus}"
        advice = "fewer ranks, several nodes (docs/use/run.md), or ranks that share a GPU by"
        raise Refused(f"{problem}: use {advice} --backend gloo")

    if me.world == 1:  # all ranks will be on this machine, whatever the cluster's interface is
        interfaces = {name for _, name in socket.if_nameindex()}
        for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
            if os.environ.get(variable) not in interfaces:
                os.environ[variable] = "lo0" if sys.platform == "darwin" else "lo"
    text = {}

    def work(*rank):
        return demo(make(args, *rank, **text))

    if me.world == world:
        finish(one_rank(work, args))
    if me.world > 1:
        script = " ".join([os.path.basename(sys.argv[0]), *sys.argv[1:]])
        command = f"torchrun --nproc_per_node={world} {script}"
        raise Refused(f"{needs} and {me.world} were started: {command}")
    if can_fork() and hasattr(args, "data"):
        text["corpus"] = text_of(args)  # once: forked ranks share its memory
    if not args.quiet:
        say(f"starting {world} processes")
    finish(start_ranks(lambda: one_rank(work, args), world))


def choose_devices(args):
    """Fill in --device and --backend. Returns the number of GPUs."""
    gpus = torch.cuda.device_count()
    if args.device == "auto":
        args.device = "cuda" if gpus > 0 else "cpu"
    if args.backend is None:
        args.backend = "nccl" if args.device == "cuda" else "gloo"
    if args.device == "cuda" and gpus == 0:
        raise Refused("--device cuda, but no GPU is visible here: use --device cpu")
    return gpus


def start_ranks(work, world):
    """Run work() -> exit code in `world` processes of this machine, in which joining.launched()
    says who they are. Returns an exit code: see verdict. The ranks meet in a file, so only the
    backend listens for connections, on the loopback interface."""
    most, _ = resource.getrlimit(resource.RLIMIT_NPROC)  # -1 is any number, and so is root's
    if os.getuid() and 0 <= most < THREADS * world:
        needs = f"{world} ranks need {THREADS * world} threads or more"
        raise Refused(f"{needs}, and ulimit -u allows {most}: raise it, or use fewer ranks")
    sys.stdout.flush()
    sys.stderr.flush()
    if can_fork():
        torch.set_num_threads(1)  # a thread pool does not survive a fork
        # Optimizers import it at their first step: import it once instead of in every rank
        importlib.import_module("torch._dynamo")
    received, running = [], {}  # signals to this process; {process id: rank}
    signals.handle(lambda number, _: received.append(number))
    with tempfile.TemporaryDirectory() as folder:
        environment = {"STORE_FILE": os.path.join(folder, "store"), "LAUNCHER": str(os.getpid())}
        environment |= dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), str(world))
        # A rank inherits this: a signal waits until it has left this process's handlers behind
        signal.pthread_sigmask(signal.SIG_BLOCK, signals.STOPPING)
        for rank in range(world):
            environment |= dict.fromkeys(("RANK", "LOCAL_RANK"), str(rank))
            with refusing(BlockingIOError, "this user has too many processes, see ulimit -u"):
                running[start_rank(work, environment)] = rank
        signal.pthread_sigmask(signal.SIG_UNBLOCK, signals.STOPPING)
        codes, stopped_by = watch(running, received)
    return verdict(codes, stopped_by, world)


def start_rank(work, environment):
    """Start a rank as a fork of this process, which is ten times faster, or as a fresh process that
    runs the same command. Returns its process id."""
    if not can_fork():
        # orig_argv still has the -m of `python -m benchmarks.table`; sys.argv has not
        command = [sys.executable, *sys.orig_argv[1:]]
        return os.posix_spawn(sys.executable, command, os.environ | environment)
    pid = os.fork()
    if pid == 0:
        try:
            os.environ.update(environment)
            end_with_launcher()
            finish(work())
        finally:
            os._exit(1)
    return pid


def watch(running, received):
    """Wait until the ranks have ended, and pass signals on to them. Returns {rank: exit code, or
    minus a signal's number} and the last signal, or None. A rank that does not end soon after
    another one's failure is killed, and has no exit code."""
    codes, stopped_by, deadline = {}, None, math.inf
    while running and time.monotonic() < deadline:
        for pid in list(running):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                codes[running.pop(pid)] = os.waitstatus_to_exitcode(status)
        if any(codes.values()):
            deadline = min(deadline, time.monotonic() + PATIENCE)
        if received:
            stopped_by = received.pop(0)
            for pid in running:
                os.kill(pid, stopped_by)
        time.sleep(0.01)
    for pid in running:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    return codes, stopped_by


def verdict(codes, stopped_by, world):
    """Name the ranks that could not explain their end themselves. Returns the run's exit code: 0 if
    all ranks returned 0; 128 and the signal's number if it was interrupted; 2 if a rank refused."""
    failures = {code for code in codes.values() if code}
    if stopped_by and (failures or len(codes) < world):
        say(f"interrupted by {signal.Signals(stopped_by).name}{signals.unsaved}")
        return 128 + stopped_by
    killed = {rank: signal.Signals(-code).name for rank, code in codes.items() if code < 0}
    if killed:
        names = [f"rank {rank} was ended by {killed[rank]}" for rank in sorted(killed)]
        say(f"{', '.join(names)}; the others stop")
    elif failures == {LOST}:
        say("the ranks lost each other; the run ends")
    for code in (2, NOBODY_READS):
        if code in failures:
            return code
    return 1 if failures else 0


def can_fork():
    """Whether ranks can be forked: not with CUDA, nor with the libraries of other systems."""
    return sys.platform == "linux" and not torch.cuda.device_count()


def end_with_launcher():
    """In a rank that start_ranks began: end with that process, and let signals act again."""
    signals.die_with_parent()
    signals.handle(signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, signals.STOPPING)
    if os.getppid() != int(os.environ["LAUNCHER"]):
        os._exit(1)  # it ended before this process asked to end with it


def one_rank(work, args):
    """Join the other ranks, work, leave. Returns the exit code."""
    me = launched() or Launched()
    store, seconds = None, getattr(args, "timeout", 600)
    try:
        share_cores(me.local_world, args.backend)
        store = join(me, seconds)
        device = torch.device("cpu")
        if args.device == "cuda":
            device = torch.device("cuda", me.local_rank % torch.cuda.device_count())
            set_device(device)
            if args.backend == "gloo":
                host_messages.install()
        # The backend's own time-out names nobody: it comes later than that of missing.py
        later = datetime.timedelta(seconds=seconds + 60)
        store.set_timeout(later)
        if me.world > 1:
            missing.attend(store.clone(), me, seconds)
        # For every new_group, which does not take the world's
        distributed_c10d.default_pg_timeout = distributed_c10d.default_pg_nccl_timeout = later
        ranks = {"rank": me.rank, "world_size": me.world}
        try:
            dist.init_process_group(args.backend, store=store, timeout=later, **ranks)
        except RuntimeError as e:
            if missing.lost_a_peer(e):
                raise
            interface = os.environ.get("GLOO_SOCKET_IFNAME", "not set")
            problem = f"rank {me.rank} can't connect by {args.backend} ({short(str(e))})"
            advice = f"set GLOO_SOCKET_IFNAME, now {interface}, to an interface that is up"
            raise Refused(" ".join(f"{problem}: {advice}".split()), alone=True) from e
        code = work(me.rank, me.world, device) or 0
        # No rank leaves while others still send to it. A barrier would warn that it guesses a GPU
        last = torch.zeros(1, device=device)
        dist.all_reduce(last)
        last.item()
        dist.destroy_process_group()
        return code
    except Refused as e:
        if e.alone:  # the first to fail says it for all
            e.speaker = me.rank if missing.is_first_failure(store) else None
        return refuse(e, me.rank)
    except BrokenPipeError:
        return NOBODY_READS
    except Exception as e:
        return missing.failed(e, store, me.rank)


def set_device(device):
    """Begin to use a GPU. It is counted even if the driver is too old for this torch."""
    try:
        torch.cuda.set_device(device)
    except (RuntimeError, AssertionError) as e:
        reason = str(e).split("\n")[0].split(". ")[0]  # nccl and CUDA say several lines
        raise Refused(f"{device} can't be used ({reason}): use --device cpu", alone=True) from e


def share_cores(local_world, backend):
    """Divide this machine's cores among its ranks."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    torch.set_num_threads(max(1, cores // local_world))
    if backend == "gloo" and local_world > 1 and hasattr(os, "SCHED_BATCH"):
        # With the default scheduler gloo's threads wait a whole tick (4 ms) if ranks share cores
        with contextlib.suppress(OSError):
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))


def script(main):
    """Call a script's main(). A refusal is one sentence and exit code 2."""
    signals.end_by_sentence()
    sys.stdout = sys.stdout or open(os.devnull, "w")  # closed, as by >&-
    sys.stderr = sys.stderr or open(os.devnull, "w")
    # What a terminal's encoding lacks is a question mark there, and ends no run
    sys.stdout.reconfigure(errors="replace")
    rank = os.environ.get("RANK", "0")
    try:
        with refusing(OSError, "set TMPDIR to a folder that can be written"):
            tempfile.gettempdir()  # torch needs one, too
        main()
        sys.stdout.flush()
    except Refused as e:
        finish(refuse(e, int(rank) if rank.isdecimal() else e.speaker))
    except BrokenPipeError:
        finish(NOBODY_READS)
    except OSError as e:
        if e.errno != errno.ENOSPC:
            raise
        say("what it prints finds no room: the disk is full")
        finish(1)
