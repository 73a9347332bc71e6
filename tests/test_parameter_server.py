"""parameter_server.py: synchronous against one process, asynchronous against one that replays the
server's history."""

import json
import random
import time
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from conftest import Script, refused
from reference import CONFIGS, batch, case, equals_one_process, make_optimizer, train_rank
from test_harness import SMALL

import parameter_server
from harness import initialize

SHARES = [[0], [1, 2, 3, 4, 5], [6, 7, 8, 9, 10, 11]]  # rows of three ranks


def train_synchronously(config, kind):
    """The server alone has gradients, and steps."""
    model, group = initialize.build(config, 7, dtype=torch.float64), dist.group.WORLD
    parameters, rank = list(model.parameters()), dist.get_rank()
    optimizer = make_optimizer(parameters, kind)
    for p in parameters:
        p.data *= rank == 0  # the weights come from the server

    def pull():
        parameter_server.pull(parameters, group)

    def begin():
        pull()
        optimizer.zero_grad()

    def step(optimizer):
        optimizer.step()
        pull()

    given = dict(optimizer=optimizer, zero_grad=begin, take_step=step)
    given["finish"] = lambda: parameter_server.push(parameters, group)
    (losses, gradients, weights), cuts = train_rank(model, kind, SHARES[rank], **given)
    assert rank == 0 or not optimizer.state and set(gradients.values()) == {None}
    return (losses, gradients if rank == 0 else {}, weights), cuts


test_a_synchronous_server_equals_one_process = equals_one_process(
    train_synchronously, {3: [("dropout", "sgd"), ("dropout", "adamw")]}
)


def backward(model, step):
    tokens, targets, samples, count = batch(step)
    model(tokens, targets=targets, target_count=count, sample_ids=samples).backward()


def train_asynchronously(rank, kind, staleness, steps):
    """Rank 0 returns the gradients of each step, its weights and its history."""
    model, group = initialize.build(CONFIGS["gpt2"], 7, dtype=torch.float64), dist.group.WORLD
    parameters, workers = list(model.parameters()), dist.get_world_size() - 1
    if rank > 0:
        pause = random.Random(rank)
        for step in range(rank - 1, steps, workers):
            parameter_server.pull(parameters, group)
            backward(model, step)
            time.sleep(pause.uniform(0, 0.05))
            parameter_server.push(parameters, group)
        return None
    optimizer, gradients, history = make_optimizer(parameters, kind), [], []
    for turn in parameter_server.serve(parameters, group, steps, staleness):
        history.append(turn)
        gradients.append({name: p.grad.clone() for name, p in model.named()})
        optimizer.step()
    return gradients, {name: p.detach() for name, p in model.named()}, history


def replay(kind, history):
    """The gradients of each step, and the weights, of one process that follows a history."""
    model = initialize.build(CONFIGS["gpt2"], 7, dtype=torch.float64)
    optimizer, before, gradients = make_optimizer(model.parameters(), kind), [], []
    workers = sorted({worker for worker, _ in history})
    batches = {worker: iter(range(worker - 1, 100, len(workers))) for worker in workers}

    def load(step):
        for p, weight in zip(model.parameters(), before[step]):
            p.data.copy_(weight)

    for step, (worker, staleness) in enumerate(history):
        before.append([p.detach().clone() for p in model.parameters()])
        load(step - staleness)
        optimizer.zero_grad()
        backward(model, next(batches[worker]))
        load(step)
        gradients.append({name: p.grad.clone() for name, p in model.named()})
        optimizer.step()
    return gradients, {name: p.detach() for name, p in model.named()}


def test_asynchronous_training_equals_a_replay_of_its_history(ranks):
    """Two workers of uneven speed. Every gradient, and the weights."""
    cases = [("sgd", 0), ("sgd", 1), ("adamw", 4), ("adamw", 99)]

    def work(rank):
        return [train_asynchronously(rank, *of, 7) for of in cases]

    for (kind, staleness), (*ours, history) in zip(cases, ranks(3, work)[0], strict=True):
        with case(kind, staleness):
            torch.testing.assert_close(tuple(ours), replay(kind, history), rtol=1e-10, atol=1e-10)
            assert [worker for worker, _ in history].count(1) == 4
            # Both begin with the same weights, if they may, so the second of them is stale
            found = max(age for _, age in history)
            assert found == 0 if staleness == 0 else 1 <= found <= staleness


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


def test_the_receipt_shows_the_server_and_workers(script, tmp_path):
    """To the byte, in a run of its own: a receipt is what its ranks counted. ddp.py's command is
    the same."""
    flags = "--nproc 3 --batch 6 --layers 2 --width 16 --context 8 --heads 2 --steps 2"
    flags += f" --dtype float64 --json {tmp_path}/x"
    for name in ("parameter_server", "ddp --sync server"):
        name, _, more = name.partition(" ")
        code, said = script(name, f"{flags} {more}")
        assert code == 0 and "proven" in said, said
        receipt = json.loads((tmp_path / "x").read_text())
        assert receipt["layout"] == {"dp": 3, "sync": "server"}
        rows = {row["role"]: row for row in receipt["sent"] if row["op"] == "send"}
        held = {kind: row["bytes"] for kind, row in receipt["held"].items()}
        size = held["parameters"]
        assert held["gradients"] == size and held["optimizer"] == 2 * size
        assert rows["a worker"]["wire_bytes"] == size
        assert rows["the server"]["wire_bytes"] == 2 * size


def test_the_receipt_shows_the_staleness(script, tmp_path):
    flags = [*SMALL, "--steps", "6", "--staleness", "1", "--nproc", "3", "--dtype", "float64"]
    code, said = script("parameter_server", " ".join([*flags, "--json", f"{tmp_path}/x"]))
    assert code == 0 and " proven: " in said, said
    receipt = json.loads((tmp_path / "x").read_text())
    # In turns of two: the first of them is fresh
    assert "staleness 0 in 3, 1 in 3 steps; at most 1" in said and receipt["counts"][0]["ok"]
    rows = {row["role"]: row["wire_bytes"] for row in receipt["sent"]}
    size = receipt["held"]["parameters"]["bytes"]
    assert rows == {"the server": size, "a worker": (size + 8) / 2}
    assert len(receipt["steps"]) == 6 and receipt["max_error"]["param"] < 1e-10


@pytest.mark.parametrize(
    "flags, words",
    [
        ("--staleness 2 --nproc 1", "needs a server and a worker: use --nproc 2"),
        ("--staleness -1", "'-1' is not a whole number of at least 0"),
        ("--staleness 2 --microbatches 3", "does not divide by 1 data-parallel ranks x 3"),
    ],
)
def test_bad_flags(monkeypatch, flags, words):
    assert words in refused(monkeypatch, "parameter_server", flags)


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
