"""How ranks that a launcher started, such as torchrun or srun, find each other.

`launched` reads and checks the variables that the launcher set. `join` brings the ranks together in
a store: rank 0 opens a round, every rank answers, and rank 0 writes down who came.

torchrun may start ranks again after a failure (--max-restarts). Its store then still has the keys
of the attempt before. torchrun's own count of restarts can't tell the attempts apart: each node
counts for itself, and does not count a restart that another node asked for. So the number of the
round comes from the store, and a rank that was started after its round waits for the next one.
"""

import contextlib
import datetime
import os
import socket
import threading
import time
import uuid
from typing import NamedTuple

import torch.distributed as dist

from harness.files import short
from harness.refusal import Refused

PAUSE = 0.1  # seconds between two questions to the store


# What batch systems and MPI's launchers set: Slurm, Open MPI, MPICH and Intel MPI
SCHEDULERS = {
    "SLURM": "SLURM_PROCID SLURM_NTASKS SLURM_LOCALID SLURM_NTASKS_PER_NODE",
    "OMPI": "OMPI_COMM_WORLD_RANK OMPI_COMM_WORLD_SIZE OMPI_COMM_WORLD_LOCAL_RANK "
    "OMPI_COMM_WORLD_LOCAL_SIZE",
    "PMI": "PMI_RANK PMI_SIZE MPI_LOCALRANKID MPI_LOCALNRANKS",
}


class Launched(NamedTuple):
    """What the launcher says of this rank. By default there is no launcher."""

    rank: int = 0
    world: int = 1
    local_rank: int = 0
    local_world: int = 1  # ranks on this machine


def launched():
    """What a launcher set in RANK, WORLD_SIZE and so on; None if no launcher started us. Refuses
    variables that are missing or wrong."""
    if "RANK" not in os.environ and "WORLD_SIZE" not in os.environ and not take_over():
        return None
    rank, world = number("RANK"), number("WORLD_SIZE")
    local_world = number("LOCAL_WORLD_SIZE", world)  # not all launchers say it
    if not rank < world or not local_world:
        raise Refused(f"RANK is {rank} of {world}, with {local_world} on this machine: unset RANK")
    if world > 1 and "STORE_FILE" not in os.environ:
        number("MASTER_PORT")
        if not os.environ.get("MASTER_ADDR"):
            raise Refused("MASTER_ADDR is not set: set it to the first rank's host")
    return Launched(rank, world, number("LOCAL_RANK", rank % local_world), local_world)


def take_over():
    """Set RANK and so on by what a batch system says of several tasks. Returns whether there are:
    each of them alone would be a complete run, and all would write into one --out."""
    for names in map(str.split, SCHEDULERS.values()):
        rank, world = names[:2]
        if rank not in os.environ or number(world, 1) == 1:
            continue
        lacking = [name for name in ("MASTER_ADDR", "MASTER_PORT") if not os.environ.get(name)]
        if lacking:
            problem = f"{world} is {os.environ[world]}, and {' and '.join(lacking)} not set"
            advice = "set both, the first to the first task's host, or in a single process RANK=0 "
            raise Refused(f"{problem}: {advice}WORLD_SIZE=1 (docs/use/run.md)")
        ours = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
        found = {new: os.environ[name] for new, name in zip(ours, names) if name in os.environ}
        os.environ.update(found)
        return True
    return False


def number(name, default=None):
    """The whole number in a variable of the environment."""
    text = os.environ.get(name, default)
    if not str(text).isdecimal():
        raise Refused(f"{name} is {text!r}: the launcher must set it to a number; or unset RANK")
    return int(text)


def place():
    """Where the ranks meet, in words."""
    return f"{os.environ['MASTER_ADDR']}, port {os.environ['MASTER_PORT']}"


def join(me, seconds):
    """Meet the launcher's other ranks within so many seconds. Returns a store for this round."""
    if me.world == 1:
        return dist.HashStore()
    if "STORE_FILE" in os.environ:
        return dist.FileStore(os.environ["STORE_FILE"], me.world)
    agent_has_store = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    store = connect(me.rank, seconds, is_master=me.rank == 0 and not agent_has_store)
    try:
        if me.rank == 0:
            return open_round(store, me.world, seconds)
        return enter_round(store, me.rank, seconds)
    except RuntimeError as e:  # what a store raises
        raise Refused(f"the store on {place()} went away before all ranks came", me.rank) from e


def connect(rank, seconds, is_master):
    """A client of the store where the ranks meet; on the master, the store itself."""
    address = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    deadline = time.monotonic() + seconds
    # A TCPStore would wait for the listener too, but it writes pages of frames
    while not is_master and not within(seconds, lambda: listens(address)):
        if time.monotonic() > deadline:
            raise Refused(f"nothing answers on {place()}, where the ranks should meet", rank)
        time.sleep(PAUSE)
    options = None, is_master, datetime.timedelta(seconds=seconds)
    # A server that accepts and never answers would keep this waiting for longer than that
    left = max(1, deadline - time.monotonic())
    store = within(left, lambda: dist.TCPStore(*address, *options, wait_for_workers=False))
    if store is None:
        raise Refused(f"no store on {place()}: set MASTER_PORT to a free port", rank)
    return store


def listens(address):
    """True. Raises an OSError if nothing listens there."""
    socket.create_connection(address).close()
    return True


def within(seconds, work):
    """What work() returns; None if it raises, or takes longer, as a store behind a cut link."""
    results = []

    def attempt():
        with contextlib.suppress(Exception):
            results.append(work())

    thread = threading.Thread(target=attempt, daemon=True)
    thread.start()
    thread.join(seconds)
    return results[0] if results else None


def absent(store, key, ranks, seconds):
    """Those of the ranks that have not set their key in the store within so many seconds."""
    deadline = time.monotonic() + seconds
    while ranks and time.monotonic() < deadline:
        time.sleep(PAUSE)
        ranks = [rank for rank in ranks if not store.check([f"{key}{rank}"])]
    return ranks


def open_round(store, world, seconds):
    """Rank 0: open a round and wait for an answer of every other rank. Then write down who came."""
    this_round = dist.PrefixStore(f"round{store.add('round', 1)}", store)
    missing = absent(this_round, "came", range(1, world), seconds)
    if missing:
        came = f"{world - len(missing)} of {world} ranks came to {place()}"
        names = short(", ".join(f"rank {rank}" for rank in missing))
        raise Refused(f"{came} within {seconds:g} s; missing: {names}")
    tokens = [this_round.get(f"came{rank}").decode() for rank in range(1, world)]
    this_round.set("members", " ".join(tokens))
    return this_round


def enter_round(store, rank, seconds):
    """The other ranks: answer the round that is open, and any later one, until rank 0 has written
    down this process and not one that had the same rank before it."""
    token = uuid.uuid4().hex
    answered, this_round = 0, None
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        current = store.add("round", 0)
        if current > answered:
            answered, this_round = current, dist.PrefixStore(f"round{current}", store)
            this_round.set(f"came{rank}", token)
            # Rank 0 opened the round earlier: it gives up first, and says who is missing
            deadline = time.monotonic() + seconds + 2
        if this_round and this_round.check(["members"]):
            if token in this_round.get("members").decode().split():
                return this_round
            if "TORCHELASTIC_RUN_ID" not in os.environ:
                another = f"another rank {rank} has met the others on {place()}"
                advice = "if that is another run, set MASTER_PORT to a free port"
                raise Refused(f"{another}: {advice}", rank)
            # What is left of that round can't go on without the process that this one replaces
            this_round.add("failed", 1)
        time.sleep(PAUSE)
    late = f"the first rank has not come to {place()} within {seconds:g} s"
    raise Refused(late, speaker=0 if answered else rank)
