"""parameter_server.py by its receipts: of an asynchronous run it replays the server's history.
test_copied.py holds it against one process."""

import json
import random
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from conftest import Script
from test_harness import SMALL

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

    monkeypatch.setattr(dist, "get_world_size", lambda group: 4)
    monkeypatch.setattr(dist, "isend", isend)
    monkeypatch.setattr(dist, "recv", recv)
    monkeypatch.setattr(dist, "get_group_rank", lambda group, rank: rank)
    for bound in range(6):
        most = []
        history = list(parameter_server.serve([torch.nn.Parameter(torch.ones(1))], None, 40, bound))
        assert len(history) == 40 and max(most) == min(3, bound + 1)
        assert max(staleness for _, staleness in history) <= bound


# --- the command


@pytest.mark.parametrize(
    "flags, staleness",
    [
        ("--batch 6", None),  # in step
        ("--optimizer sgd --staleness 0", "0 in 6"),
        ("--optimizer sgd --staleness 1", "0 in 3, 1 in 3"),  # in turns of two: the first is fresh
        ("--optimizer adamw --staleness 9", ""),
    ],
)
def test_the_receipt(script, tmp_path, flags, staleness):
    """Server and workers, to the byte. An asynchronous run's replays the server's history: loss and
    norm of each step, the gradients of the last and the weights after it."""
    flags = f"{' '.join(SMALL)} --steps 6 --nproc 3 --dtype float64 {flags} --json {tmp_path}/x"
    code, said = script("parameter_server", flags)
    assert code == 0 and "proven" in said, said
    receipt = json.loads((tmp_path / "x").read_text())
    sent = {row["role"]: row["wire_bytes"] for row in receipt["sent"] if row["op"] == "send"}
    held = {kind: row["bytes"] for kind, row in receipt["held"].items()}
    size = held["parameters"]
    assert len(receipt["steps"]) == 6 and max(receipt["max_error"].values()) < 1e-10
    if staleness is None:
        assert receipt["layout"] == {"dp": 3, "sync": "server"}
        assert held["gradients"] == size and held["optimizer"] == 2 * size
        assert sent == {"the server": 2 * size, "a worker": size}
    else:
        assert f"staleness {staleness}" in said and f"at most {flags.split('ness ')[1][0]}" in said
        assert receipt["counts"][0]["ok"]
        assert sent == {"the server": size, "a worker": (size + 8) / 2}


@pytest.mark.parametrize("flags", ["", "--staleness 2"])
def test_a_servers_gradient_that_is_not_finite_ends_the_run(tmp_path, flags):
    """Each worker's own gradient is finite: they would go on, or wait for ever."""

    def plant():
        right = parameter_server.set_gradients

        def overflow(parameters, message):
            right(parameters, message)
            parameters[0].grad.view(-1)[0] = torch.inf

        parameter_server.set_gradients = overflow

    small = "--nproc 3 --batch 6 --layers 1 --width 16 --context 8 --steps 4 --quiet"
    script = Script(tmp_path, "parameter_server", f"{small} {flags}".split(), plant)
    assert script.end() == 1
    [error] = script.errors()
    assert "gradient norm inf" in error and "on rank 0" in error
