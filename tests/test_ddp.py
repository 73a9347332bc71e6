"""ddp.py: every way of adding up gradients against one process, and against PyTorch's
DistributedDataParallel."""

import json

import pytest
import torch
import torch.distributed as dist
from conftest import Script
from reference import CONFIGS, STEPS, assert_equal, batch, make_optimizer, train

import ddp
import model as gpt
from harness import parameter_server


def rows_of(rank, world, rows=12):
    """Unequal shares of the batch."""
    return (
        [list(r) for r in torch.arange(rows).tensor_split(world)][rank]
        if world != 3
        else [[0], [1, 2, 3, 4, 5], [6, 7, 8, 9, 10, 11]][rank]
    )


def server(parameters, group, microbatches=1):
    push = parameter_server.Push
    return ddp.DDP(parameters, group, microbatches, overlap=False, all_reduce=push)


def train_parallel(rank, config, kind, way, accumulate, world, steps=STEPS):
    model = gpt.build(config, 7, dtype=torch.float64)
    group, parameters = dist.group.WORLD, list(model.parameters())
    sync = {
        "server": lambda: server(parameters, group, accumulate),
        "naive": lambda: ddp.DDP(parameters, group, accumulate, 0, overlap=False),
        "bucketed": lambda: ddp.DDP(parameters, group, accumulate, 5000, overlap=False),
        "overlapped": lambda: ddp.DDP(parameters, group, accumulate, 5000),
    }[way]()
    optimizer, losses, early = make_optimizer(parameters, kind), [], 0
    for step in range(steps):
        tokens, targets, samples, count = batch(step)
        sync.zero_grad()
        if way == "server":
            parameter_server.pull(parameters, group)
        loss = torch.zeros((), dtype=torch.float64)
        for piece in torch.tensor(rows_of(rank, world)).tensor_split(accumulate):
            part = model(tokens[piece], targets=targets[piece], count=count, samples=samples[piece])
            part.backward()
            loss += part.detach()
        sync.finish()
        dist.all_reduce(loss)
        if way != "server" or rank == 0:
            optimizer.step()
        losses.append(loss.item())
        early = getattr(sync, "early", 0)
    if way == "server":
        parameter_server.pull(parameters, group)
    leader = way != "server" or rank == 0
    grads = {n: p.grad.clone() for n, p in model.named()} if leader else {}
    return (losses, grads, {n: p.detach() for n, p in model.named()}), early


@pytest.mark.parametrize("kind", ["sgd", "adamw"])
@pytest.mark.parametrize("way", ["server", "naive", "bucketed", "overlapped"])
def test_equals_one_process(ranks, way, kind):
    cases = [("gpt2", 3, 2), ("dropout", 4, 3), ("llama", 1, 2)]
    for config, world, accumulate in cases if kind == "sgd" else cases[:1]:
        reference = train(CONFIGS[config], kind)
        for ours, _ in ranks(world, train_parallel, CONFIGS[config], kind, way, accumulate, world):
            assert_equal(ours, reference)


def train_with_servers(rank, config, kind, count, steps=STEPS):
    """Two micro-batches of unequal shares on three ranks, of which the first `count` serve."""
    model = gpt.build(config, 7, dtype=torch.float64)
    group, parameters = dist.group.WORLD, list(model.parameters())
    servers = parameter_server.Servers(count, group)
    sync = ddp.DDP(parameters, group, 2, 5000, overlap=False, all_reduce=servers.push)
    servers.deal(sync.buckets)
    served = {id(p) for p in servers.mine}
    for p in parameters:
        if id(p) not in served:
            p.data.zero_()  # comes from its server
    optimizer, losses = make_optimizer(parameters, kind), []
    for step in range(steps):
        tokens, targets, samples, n = batch(step)
        sync.zero_grad()
        servers.pull()
        loss = torch.zeros((), dtype=torch.float64)
        for piece in torch.tensor(rows_of(rank, 3)).tensor_split(2):
            part = model(tokens[piece], targets=targets[piece], count=n, samples=samples[piece])
            part.backward()
            loss += part.detach()
        sync.finish()
        dist.all_reduce(loss)
        norm = servers.norm()
        servers.step(optimizer)
        losses.append(loss.item())
    gradients = {name: p.grad.clone() for name, p in model.named() if id(p) in served}
    states = {id(p) for p in optimizer.state}
    servers.pull()
    return losses, gradients, {n: p.detach() for n, p in model.named()}, norm, states <= served


@pytest.mark.parametrize("kind, count", [("sgd", 1), ("adamw", 2), ("adamw", 3)])
def test_several_servers_equal_one_process(ranks, kind, count):
    losses, gradients, weights = train(CONFIGS["gpt2"], kind)
    norm = torch.stack([g.square().sum() for g in gradients.values()]).sum().sqrt()
    results = ranks(3, train_with_servers, CONFIGS["gpt2"], kind, count)
    for rank, (*ours, our_norm, only_its_own) in enumerate(results):
        its_gradients = {name: gradients[name] for name in ours[1]}
        assert bool(its_gradients) == (rank < count) and only_its_own
        assert_equal(ours, (losses, its_gradients, weights))
        torch.testing.assert_close(our_norm, norm, rtol=1e-10, atol=0)
    # Each parameter has one server
    assert sorted(name for result in results for name in result[1]) == sorted(gradients)


def test_the_receipt_shows_servers_and_workers(script, tmp_path):
    """To the byte, in a run of its own: a receipt is what its ranks counted."""
    flags = (
        "--sync server --nproc 3 --batch 6 --layers 2 --width 16 --context 8 --heads 2 --steps 2"
    )
    size = None
    for servers in (1, 2):
        path = tmp_path / f"{servers}.json"
        more = f"--servers {servers} --bucket-mb 0.003 --dtype float64 --json {path}"
        code, said = script("ddp", f"{flags} {more}")
        assert code == 0 and "proven" in said, said
        receipt = json.loads(path.read_text())
        rows = {row["role"]: row for row in receipt["sent"] if row["op"] == "send"}
        held = {kind: row["bytes"] for kind, row in receipt["held"].items()}
        size = held["parameters"]
        assert rows["a worker"]["wire_bytes"] == size
        share = held["optimizer"] // 2
        assert rows["a server"]["wire_bytes"] == 2 * share + size - share
        assert share == size if servers == 1 else size / 2 <= share < 0.6 * size
    code, said = script("ddp", "--servers 2")
    assert code == 2 and "add --sync server" in said
    code, said = script("ddp", "--sync server --servers 4 --nproc 3 --batch 6")
    assert code == 2 and "--servers 4 needs as many ranks, and there are 3" in said


def test_overlap_starts_before_backward_ends(ranks):
    results = ranks(2, train_parallel, CONFIGS["gpt2"], "sgd", "overlapped", 2, 2)
    assert all(early > 1 for _, early in results)
    results = ranks(2, train_parallel, CONFIGS["gpt2"], "sgd", "bucketed", 2, 2)
    assert all(early == 0 for _, early in results)


def test_equals_pytorch_ddp(ranks):
    def theirs(rank):
        model = gpt.build(CONFIGS["gpt2"], 7, dtype=torch.float64)
        wrapped = torch.nn.parallel.DistributedDataParallel(model)
        optimizer = make_optimizer(model.parameters(), "adamw")
        for step in range(5):
            tokens, targets, samples, count = batch(step)
            optimizer.zero_grad()
            rows = rows_of(rank, 3)
            # DDP averages over the ranks: undo it
            (
                3 * wrapped(tokens[rows], targets=targets[rows], count=count, samples=samples[rows])
            ).backward()
            optimizer.step()
        return {n: p.detach() for n, p in model.named()}

    def work(rank):
        (_, _, mine), _ = train_parallel(
            rank, CONFIGS["gpt2"], "adamw", "overlapped", 1, 3, steps=5
        )
        return mine, theirs(rank)

    for mine, their in ranks(3, work):
        for name, p in mine.items():
            torch.testing.assert_close(p, their[name], rtol=1e-12, atol=1e-12)


def test_buckets_are_the_gradients(ranks):
    def work(rank):
        parameters = [torch.nn.Parameter(torch.zeros(n)) for n in (3, 100, 7, 0, 5)]
        parameters[1].requires_grad_(False)
        wrapped = ddp.DDP(parameters, dist.group.WORLD, bucket_bytes=30)
        sizes = [[p.numel() for p in b.parameters] for b in wrapped.buckets]
        shared = all(
            p.grad.untyped_storage().data_ptr() == b.flat.untyped_storage().data_ptr()
            for b in wrapped.buckets
            for p in b.parameters
        )
        return sizes, shared

    sizes, shared = ranks(1, work)[0]
    assert sizes == [[5, 0], [7], [3]] and shared


def test_parameters_without_a_gradient_and_too_many_passes(ranks):
    def work(rank):
        a, b = torch.nn.Parameter(torch.ones(2)), torch.nn.Parameter(torch.ones(2))
        wrapped = ddp.DDP([a, b], dist.group.WORLD, microbatches=2, bucket_bytes=1)
        for _ in range(2):
            (a.sum() * (rank + 1)).backward()  # b is not used, and its bucket comes first
        wrapped.finish()
        grads = a.grad.tolist(), b.grad.tolist(), wrapped.early
        try:
            a.sum().backward()
        except RuntimeError as e:
            return grads, str(e)

    for grads, error in ranks(2, work):
        assert grads == ([6.0, 6.0], [0.0, 0.0], 0) and "backward() after finish()" in error


def test_a_replaced_gradient_is_noticed(ranks):
    def work(rank):
        p = torch.nn.Parameter(torch.ones(2))
        for sync in (ddp.DDP([p], dist.group.WORLD), server([p], dist.group.WORLD)):
            torch.optim.SGD([p], lr=1.0).zero_grad()  # sets p.grad to None
            with pytest.raises(RuntimeError, match="p.grad was replaced"):
                p.sum().backward()
                sync.finish()

    ranks(1, work)


def test_any_all_reduce_will_do(ranks):
    def work(rank):
        class Doubled:
            def __init__(self, tensor, group, async_op):
                self.tensor, self.work = (
                    tensor,
                    dist.all_reduce(tensor, group=group, async_op=async_op),
                )

            def wait(self):
                self.work.wait()
                self.tensor *= 2

        p = torch.nn.Parameter(torch.ones(2))
        wrapped = ddp.DDP([p], dist.group.WORLD, all_reduce=Doubled)
        p.sum().backward()
        wrapped.finish()
        return p.grad.tolist()

    assert ranks(2, work) == [[4.0, 4.0]] * 2


def test_all_ranks_notice_that_a_servers_sum_is_not_finite(tmp_path):
    """Each worker's own gradient is finite: without the server's norm they would go on alone."""

    def plant():
        finish = ddp.DDP.finish

        def overflow(self):
            finish(self)
            if dist.get_rank(self.group) == 0:
                self.buckets[0].flat[0] = torch.inf

        ddp.DDP.finish = overflow

    flags = "--sync server --nproc 3 --batch 6 --layers 1 --width 16 --context 8 --steps 2 --quiet"
    script = Script(tmp_path, "ddp", flags.split(), plant)
    assert script.end() == 1
    [error] = script.errors()
    assert "gradient norm inf" in error and "on rank 0" in error
