"""harness/joining.py: the launcher's variables, and how ranks meet in a store. No launches: the
ranks are threads of one process."""

import os
import socket
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch.distributed as dist
from conftest import refused

from harness import joining
from harness.refusal import Refused

GOOD = {"RANK": "1", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
GOOD |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29501"}


@pytest.mark.parametrize(
    "name, value, words",
    [
        ("RANK", "", "RANK is ''"),
        ("RANK", "4", "RANK is 4 of 4"),
        ("WORLD_SIZE", "none", "WORLD_SIZE is 'none': the launcher must set it"),
        ("MASTER_ADDR", "", "MASTER_ADDR is not set"),
        ("MASTER_PORT", None, "MASTER_PORT is None: the launcher must set it"),
        ("WORLD_SIZE", "3", "needs 2 processes and 3 were started: torchrun --nproc_per_node=2 tr"),
    ],
)
def test_wrong_variables(monkeypatch, name, value, words):
    for key, good in (GOOD | {name: value}).items():
        if good is None:
            monkeypatch.delenv(key, raising=False)
        else:
            monkeypatch.setenv(key, good)
    assert words in refused(monkeypatch, "train", "--dp 2")


def test_right_variables(monkeypatch):
    for name in GOOD:
        monkeypatch.delenv(name, raising=False)
    assert joining.launched() is None
    for name, value in GOOD.items():
        monkeypatch.setenv(name, value)
    assert joining.launched() == (1, 4, 1, 2)
    monkeypatch.delenv("LOCAL_WORLD_SIZE")  # some launchers say only RANK and WORLD_SIZE
    monkeypatch.delenv("LOCAL_RANK")
    assert joining.launched() == (1, 4, 1, 4)
    monkeypatch.delenv("RANK")  # else each process of a half-configured job would be a run
    with pytest.raises(Refused, match="RANK is None"):
        joining.launched()


@pytest.mark.parametrize(
    "names",
    [
        "SLURM_PROCID SLURM_NTASKS SLURM_LOCALID",
        "OMPI_COMM_WORLD_RANK OMPI_COMM_WORLD_SIZE OMPI_COMM_WORLD_LOCAL_RANK",
        "PMI_RANK PMI_SIZE MPI_LOCALRANKID",
    ],
)
def test_tasks_of_a_batch_system_are_ranks(monkeypatch, names):
    """Or refused: each would be a run of its own, and all would write into one --out."""
    for name in GOOD:
        monkeypatch.delenv(name, raising=False)
        monkeypatch.setitem(os.environ, name, "")  # so that it is as before at the end
        monkeypatch.delenv(name)
    for name, value in zip(names.split(), ("1", "1", "0")):
        monkeypatch.setenv(name, value)
    assert joining.launched() is None  # one task
    for name, value in zip(names.split(), ("1", "2", "0")):
        monkeypatch.setenv(name, value)
    said = refused(monkeypatch, "train", "--dp 2")
    assert f"{names.split()[1]} is 2, and MASTER_ADDR and MASTER_PORT not set: set both" in said
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.setenv(name, GOOD[name])
    assert joining.launched() == (1, 2, 0, 2)


def alone(function):
    """A test in a process of its own, which forks no others."""

    def test(ranks):
        ranks(1, lambda rank: function())

    return test


def meet_at(port):
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    os.environ.pop("STORE_FILE", None)


def join(rank, world, seconds=0.5):
    return joining.join(joining.Launched(rank, world, local_rank=0, local_world=1), seconds)


class Meeting:
    """Ranks as threads, which meet in a store that this process hosts as torchrun's agent would."""

    def __init__(self, elastic=True):
        self.server = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
        self.pool = ThreadPoolExecutor(8)
        meet_at(self.server.port)
        os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"
        os.environ.pop("TORCHELASTIC_RUN_ID", None)
        if elastic:
            os.environ["TORCHELASTIC_RUN_ID"] = "none"

    def begin(self, rank, world, seconds=20.0):
        return self.pool.submit(join, rank, world, seconds)


def results(*begun):
    """The store that each rank gets, or what it raises."""
    return [rank.exception(30) or rank.result() for rank in begun]


def share_a_key(stores):
    stores[0].set("key", "value")
    return all(store.get("key") == b"value" for store in stores)


def wait_for_key(store, key):
    deadline = time.monotonic() + 20
    while not store.check([key]):
        assert time.monotonic() < deadline
        time.sleep(0.01)


@alone
def test_an_attempt_sees_nothing_of_the_one_before():
    meeting = Meeting()
    first = results(*(meeting.begin(rank, 3) for rank in (2, 0, 1)))
    first[0].set("failed", "2")
    assert all(store.check(["failed"]) for store in first)
    # Rank 2 comes first, and finds the old round
    early = meeting.begin(2, 3)
    wait_for_key(meeting.server, "round1/failed")
    time.sleep(0.1)
    assert not early.done()
    second = results(early, meeting.begin(1, 3), meeting.begin(0, 3))
    assert share_a_key(second) and not any(store.check(["failed"]) for store in second)


@alone
def test_a_rank_that_died_while_the_others_came():
    """Rank 1's first process answers round 1 and is gone. Rank 0 dies too, before rank 2 comes."""
    meeting = Meeting()
    dead = meeting.begin(0, 3, seconds=1.0)
    wait_for_key(meeting.server, "round")
    meeting.server.set("round1/came1", "a process that is gone")
    later = meeting.begin(1, 3)
    results(dead)
    assert share_a_key(results(meeting.begin(0, 3), later, meeting.begin(2, 3)))


@alone
def test_replaced_ranks():
    """With a static rendezvous a node starts its ranks again while others still run: the round that
    can't go on ends."""
    meeting = Meeting()
    old = results(meeting.begin(0, 2), meeting.begin(1, 2))
    new = meeting.begin(1, 2)
    wait_for_key(old[0], "failed")  # which ends the processes of that round: see missing.answer
    assert share_a_key(results(meeting.begin(0, 2), new)) and not old[0].check(["key"])


@alone
def test_a_second_run_at_the_same_port():
    """Without torchrun nobody starts ranks again: the first run must not end for it."""
    meeting = Meeting(elastic=False)
    stores = results(meeting.begin(0, 2), meeting.begin(1, 2))
    [said] = results(meeting.begin(1, 2))
    assert "another rank 1 has met the others" in str(said) and said.speaker == 1
    assert not stores[0].check(["failed"])


@alone
def test_who_has_not_come_is_named():
    meeting = Meeting()
    said, quiet = results(meeting.begin(0, 4, seconds=0.5), meeting.begin(2, 4, seconds=0.5))
    words = f"2 of 4 ranks came to 127.0.0.1, port {meeting.server.port} within 0.5 s; "
    assert str(said) == words + "missing: rank 1, rank 3"
    assert said.speaker == 0 and quiet.speaker == 0  # rank 0 alone speaks
    meeting = Meeting()
    [said] = results(meeting.begin(2, 4, seconds=0.5))
    assert "the first rank has not come to 127.0.0.1" in str(said) and said.speaker == 2


@alone
def test_without_a_store_at_the_port():
    """Nothing listens; or a server that says nothing, for which a client waited for minutes once;
    rank 0, which has the store itself as under srun, finds the port in use."""
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        meet_at(server.getsockname()[1])
        with pytest.raises(Refused, match="nothing answers on 127.0.0.1"):
            join(1, 2)
        server.listen()
        begun = time.monotonic()
        for rank in (0, 1):
            with pytest.raises(Refused, match="no store on 127.0.0.1, port .*: set MASTER_PORT"):
                join(rank, 2)
        assert time.monotonic() - begun < 20
    with pytest.raises(Refused, match="1 of 3 ranks came .*missing: rank 1, rank 2"):
        join(0, 3)


@alone
def test_the_store_goes_away():
    """As when the first rank's host dies while the others wait."""
    meeting = Meeting()
    waiting = meeting.begin(1, 2)
    wait_for_key(meeting.server, "round")
    del meeting.server
    [said] = results(waiting)
    assert "went away before all ranks came" in str(said) and said.speaker == 1
