"""ddp.py: every way of adding up gradients against one process, and against PyTorch's
DistributedDataParallel."""

import pytest
import torch
import torch.distributed as dist
from reference import CONFIGS, STEPS, equals_one_process, train_rank

import ddp
from harness import initialize


def rows_of_rank():
    """Unequal shares of the batch of 12."""
    shares = {1: [12], 2: [6, 6], 3: [1, 5, 6], 4: [3, 3, 3, 3]}[dist.get_world_size()]
    return torch.arange(12).split(shares)[dist.get_rank()]


def train_parallel(config, kind, way, accumulate=2, steps=STEPS, started=None):
    """started: a list that gets the number of buckets that started in the last backward."""
    model = initialize.build(config, 7, dtype=torch.float64)
    group, parameters = dist.group.WORLD, list(model.parameters())
    bucket_bytes = 0 if way == "naive" else 5000
    sync = ddp.DDP(parameters, group, accumulate, bucket_bytes, overlap=way == "overlapped")
    given = dict(zero_grad=sync.zero_grad, finish=sync.finish)
    result = train_rank(model, kind, rows_of_rank(), accumulate, steps, **given)
    if started is not None:
        started.append(sync.started_in_backward)
    return result


WAYS = ["naive", "bucketed", "overlapped"]

test_equals_one_process = equals_one_process(
    train_parallel,
    {
        1: [("llama", "sgd", way, 2) for way in WAYS],
        3: [("gpt2", kind, way, 2) for kind in ("sgd", "adamw") for way in WAYS],
        4: [("dropout", "sgd", way, 3) for way in WAYS],
    },
)


def test_overlap_starts_before_backward_ends(ranks):
    def work(rank):
        started = []
        for way in ("overlapped", "bucketed"):
            train_parallel(CONFIGS["gpt2"], "sgd", way, started=started)
        return started

    for overlapped, bucketed in ranks(2, work):
        assert overlapped > 1 and bucketed == 0


def test_equals_pytorch_ddp(ranks):
    def theirs():
        model = initialize.build(CONFIGS["gpt2"], 7, dtype=torch.float64)
        wrapped = torch.nn.parallel.DistributedDataParallel(model)

        def forward(_, tokens, targets, count, samples):
            # It averages over the ranks
            return 3 * wrapped(tokens, targets=targets, target_count=count, sample_ids=samples)

        return train_rank(model, "adamw", rows_of_rank(), 1, steps=5, forward=forward)

    def work(rank):
        ours = train_parallel(CONFIGS["gpt2"], "adamw", "overlapped", 1, steps=5)
        return [weights for (_, _, weights), _ in (ours, theirs())]

    for mine, their in ranks(3, work):
        torch.testing.assert_close(mine, their, rtol=1e-12, atol=1e-12)


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
        grads = a.grad.tolist(), b.grad.tolist(), wrapped.started_in_backward
        try:
            a.sum().backward()
        except RuntimeError as e:
            return grads, str(e)

    for grads, error in ranks(2, work):
        assert grads == ([6.0, 6.0], [0.0, 0.0], 0) and "backward() after finish()" in error


def test_a_replaced_gradient_is_noticed(ranks):
    def work(rank):
        p = torch.nn.Parameter(torch.ones(2))
        sync = ddp.DDP([p], dist.group.WORLD)
        torch.optim.SGD([p], lr=1.0).zero_grad()  # sets p.grad to None
        with pytest.raises(RuntimeError, match="p.grad was replaced"):
            p.sum().backward()
            sync.finish()

    ranks(1, work)


def test_any_all_reduce_will_do(ranks):
    def work(rank):
        class Doubled:
            def __init__(self, tensor, group):
                self.tensor = tensor
                self.work = dist.all_reduce(tensor, group=group, async_op=True)

            def wait(self):
                self.work.wait()
                self.tensor *= 2

        p = torch.nn.Parameter(torch.ones(2))
        wrapped = ddp.DDP([p], dist.group.WORLD, all_reduce=Doubled)
        p.sum().backward()
        wrapped.finish()
        return p.grad.tolist()

    assert ranks(2, work) == [[4.0, 4.0]] * 2
