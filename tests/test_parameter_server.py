"""parameter_server.py's bound. test_lessons.py holds both of its forms against one process."""

import random
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

import parameter_server


def test_workers_wait_where_a_gradient_could_become_too_stale(monkeypatch):
    """The server alone, without messages: a worker that has weights answers at any time."""
    chance, computing = random.Random(1), []

    def isend(message, group, group_dst):
        computing.append(group_dst)
        most.append(len(computing))
        return SimpleNamespace(wait=lambda: None)

    def recv(buffer, group):
        return computing.pop(chance.randrange(len(computing)))

    weight, taken = torch.nn.Parameter(torch.ones(1)), []
    server = [lambda: taken.append(1), None]  # what takes a step; its group
    monkeypatch.setattr(dist, "get_world_size", lambda group: 4)
    monkeypatch.setattr(dist, "isend", isend)
    monkeypatch.setattr(dist, "recv", recv)
    monkeypatch.setattr(dist, "get_group_rank", lambda group, rank: rank)
    monkeypatch.setattr(parameter_server, "pull", lambda parameters, group: None)
    for bound in range(6):
        most = []
        history = parameter_server.serve([weight], 40, bound, *server)
        assert len(history) == 40 and max(most) == min(3, bound + 1)
        assert max(staleness for _, staleness in history) <= bound
    assert len(taken) == 6 * 40
    with pytest.raises(ValueError, match="a bound of at least 0"):  # it would hang
        parameter_server.serve([weight], 40, -1, *server)
