"""harness/joining.py: the launcher's variables, and how ranks meet in a store. No launches: the
ranks are threads of one process."""

import datetime
import os
import re
import socket
import threading
import time

import pytest
import torch.distributed as dist
from test_harness import refused

from harness import joining
from harness.refusal import Refused

GOOD = {
    "RANK": "1",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "29501",
}


@pytest.mark.parametrize(
    "wrong, words",
    [
        ({"RANK": None}, "RANK is not set"),
        ({"WORLD_SIZE": None}, "WORLD_SIZE is not set.*unset RANK"),
        ({"RANK": "4"}, "RANK is '4'.* from 0 to 3"),
        ({"RANK": "-1"}, "RANK is '-1'.* from 0 to 3"),
        ({"RANK": "one"}, "RANK is 'one'"),
        ({"RANK": ""}, "RANK is ''"),
        ({"WORLD_SIZE": "0"}, "WORLD_SIZE is '0'.* from 1"),
        ({"WORLD_SIZE": "2.0"}, "WORLD_SIZE is '2.0'"),
        ({"LOCAL_WORLD_SIZE": "8"}, "LOCAL_WORLD_SIZE is '8'.* from 1 to 4"),
        ({"LOCAL_WORLD_SIZE": "x"}, "LOCAL_WORLD_SIZE is 'x'"),
        ({"LOCAL_RANK": "2"}, "LOCAL_RANK is '2'.* from 0 to 1"),
        ({"MASTER_ADDR": None}, "MASTER_ADDR is not set"),
        ({"MASTER_ADDR": ""}, "MASTER_ADDR is not set"),
        ({"MASTER_PORT": None}, "MASTER_PORT is not set"),
        ({"MASTER_PORT": "http"}, "MASTER_PORT is 'http'"),
        ({"MASTER_PORT": "65536"}, "MASTER_PORT is '65536'"),
    ],
)
def test_wrong_variables(capfd, monkeypatch, wrong, words):
    for name, value in (GOOD | wrong).items():
        if value is None:
            monkeypatch.delenv(name, raising=False)
        else:
            monkeypatch.setenv(name, value)
    assert re.search(words, refused(capfd, monkeypatch, "ddp", "--batch", "8"))


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


@pytest.mark.parametrize("seconds", ["1e13", "1e300", "inf", "nan", "0", "-1"])
def test_a_timeout_that_no_clock_can_count(capfd, monkeypatch, seconds):
    said = refused(capfd, monkeypatch, "ddp", "--timeout", seconds)
    assert re.search("more than 1,000,000|not a number of at least 0.1", said)


def join(rank, world, seconds):
    me = joining.Launched(rank, world, local_rank=0, local_world=1)
    return joining.join(me, datetime.timedelta(seconds=seconds))


class Meeting:
    """Ranks as threads, which meet in a store that this process hosts as torchrun's agent would.
    Call it in a process that forks no others."""

    def __init__(self, elastic=True):
        self.server = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(self.server.port)}
        os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"
        os.environ.pop("STORE_FILE", None)
        os.environ.pop("TORCHELASTIC_RUN_ID", None)
        if elastic:
            os.environ["TORCHELASTIC_RUN_ID"] = "none"

    def begin(self, rank, world, seconds=20.0):
        """A thread, with the store that the rank gets or what it raises."""

        def work():
            try:
                thread.result = join(rank, world, seconds)
            except Refused as e:
                thread.result = e

        thread = threading.Thread(target=work, daemon=True)
        thread.result = None
        thread.start()
        return thread


def results(threads):
    for thread in threads:
        thread.join(30)
    return [thread.result for thread in threads]


def wait_for_key(store, key):
    deadline = time.monotonic() + 20
    while not store.check([key]):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_an_attempt_sees_nothing_of_the_one_before(ranks):
    def work(rank):
        meeting = Meeting()
        first = results([meeting.begin(rank, 3) for rank in (2, 0, 1)])
        first[0].set("failed", "2")
        assert all(store.check(["failed"]) for store in first)
        # Rank 2 comes first, and finds the old round
        early = meeting.begin(2, 3)
        wait_for_key(meeting.server, "round1/failed")
        time.sleep(0.1)
        assert early.result is None
        second = results([early, meeting.begin(1, 3), meeting.begin(0, 3)])
        second[0].set("key", "value")
        assert all(store.get("key") == b"value" and not store.check(["failed"]) for store in second)

    ranks(1, work)


def test_a_rank_that_died_while_the_others_came(ranks):
    """Rank 1's first process answers round 1 and is gone. Rank 0 then dies too, before rank 2 has
    come."""

    def work(rank):
        meeting = Meeting()
        dead = meeting.begin(0, 3, seconds=1.0)
        wait_for_key(meeting.server, "round")
        meeting.server.set("round1/came1", "a process that is gone")
        later = meeting.begin(1, 3)
        results([dead])
        stores = results([meeting.begin(0, 3), later, meeting.begin(2, 3)])
        stores[0].set("key", "value")
        assert all(store.get("key") == b"value" for store in stores)

    ranks(1, work)


def test_a_replaced_rank_ends_the_round_that_can_not_go_on(ranks):
    """With a static rendezvous a node starts its ranks again while others still run."""

    def work(rank):
        meeting = Meeting()
        old = results([meeting.begin(rank, 2) for rank in (0, 1)])
        new = meeting.begin(1, 2)
        wait_for_key(old[0], "failed")  # which ends the processes of that round: see start.answer
        stores = results([meeting.begin(0, 2), new])
        stores[0].set("key", "value")
        assert stores[1].get("key") == b"value" and not old[0].check(["key"])

    ranks(1, work)


def test_an_old_first_rank_gives_way(ranks):
    def work(rank):
        meeting = Meeting()
        old = meeting.begin(0, 2)
        wait_for_key(meeting.server, "round")
        new = meeting.begin(0, 2)
        assert "this one was replaced" in str(results([old])[0])
        stores = results([new, meeting.begin(1, 2)])
        assert all(isinstance(store, dist.Store) for store in stores)

    ranks(1, work)


def test_a_second_run_at_the_same_port(ranks):
    """Without torchrun nobody starts ranks again: the first run must not end for it."""

    def work(rank):
        meeting = Meeting(elastic=False)
        stores = results([meeting.begin(rank, 2) for rank in (0, 1)])
        [said] = results([meeting.begin(1, 2)])
        assert "another rank 1 has met the others" in str(said) and said.speaker == 1
        assert not stores[0].check(["failed"])

    ranks(1, work)


def test_who_has_not_come_is_named(ranks):
    def work(rank):
        meeting = Meeting()
        first, other = meeting.begin(0, 4, seconds=0.5), meeting.begin(2, 4, seconds=0.5)
        said, quiet = results([first, other])
        words = f"2 of 4 ranks came to 127.0.0.1, port {meeting.server.port} within 0.5 s; "
        assert str(said) == words + "missing: rank 1, rank 3"
        assert said.speaker == 0 and quiet.speaker == 0  # rank 0 alone speaks
        meeting = Meeting()
        [said] = results([meeting.begin(2, 4, seconds=0.5)])
        assert "the first rank has not come to 127.0.0.1" in str(said) and said.speaker == 2

    ranks(1, work)


def test_the_first_rank_alone_says_who_is_missing(ranks):
    """As under srun: rank 0 has the store itself."""

    def work(rank):
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
        os.environ.pop("STORE_FILE", None)
        with pytest.raises(Refused, match="1 of 3 ranks came .*missing: rank 1, rank 2"):
            join(0, 3, 0.5)

    ranks(1, work)


@pytest.mark.parametrize("rank, words", [(0, "first agent"), (1, "the first rank")])
def test_nothing_listens(ranks, rank, words):
    def work(_):
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
        os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"
        with pytest.raises(Refused, match=f"nothing answers on 127.0.0.1.*{words}"):
            join(rank, 2, 0.5)
        os.environ["MASTER_ADDR"] = "no-such-host.invalid"
        with pytest.raises(Refused, match="no-such-host.invalid is not the name of a host"):
            join(rank, 2, 0.5)

    ranks(1, work)


def test_a_server_that_says_nothing(ranks):
    def work(rank):
        with socket.socket() as mute:
            mute.bind(("127.0.0.1", 0))
            mute.listen()
            port = str(mute.getsockname()[1])
            os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
            begun = time.monotonic()
            with pytest.raises(Refused, match="does not answer as a store:"):
                join(1, 2, 0.5)
            return time.monotonic() - begun

    [seconds] = ranks(1, work)
    assert seconds < 10  # it waited for minutes once


def test_the_port_is_in_use(ranks):
    def work(rank):
        with socket.socket() as busy:
            busy.bind(("127.0.0.1", 0))
            busy.listen()
            port = str(busy.getsockname()[1])
            os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
            with pytest.raises(Refused, match=f"can't listen on .* port {port} .* in use.*: set"):
                join(0, 2, 0.5)

    ranks(1, work)


def test_the_store_goes_away(ranks):
    """As when the first rank's host dies while the others wait."""

    def work(rank):
        meeting = Meeting()
        waiting = meeting.begin(1, 2)
        wait_for_key(meeting.server, "round")
        del meeting.server
        [said] = results([waiting])
        assert "went away before all ranks came" in str(said) and said.speaker == 1

    ranks(1, work)


def test_torchruns_store_remembers(ranks):
    def work(rank):
        assert joining.agent_store().add("began", 1) == 1
        assert joining.agent_store().add("began", 0) == 0  # there is no torchrun
        meeting = Meeting()
        assert joining.agent_store().add("began", 1) == 1
        assert joining.agent_store().add("began", 0) == 1
        assert meeting.server.get("began") == b"1"

    ranks(1, work)


def free_port():
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]
