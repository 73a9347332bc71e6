"""ddp.py against PyTorch's DistributedDataParallel, and the pieces it is made of. test_copied.py
holds it against one process."""

import torch
import torch.distributed as dist
from reference import CONFIGS, plain_forward, train_rank

import ddp
from harness import initialize


def test_equals_pytorch_ddp(ranks):
    def train(rank, wrap):
        model = initialize.build(CONFIGS["gpt2"], 7, dtype=torch.float64)
        rows = torch.arange(12).split([1, 5, 6])[rank]
        return train_rank(model, "adamw", rows, **wrap(model))

    def ours(model):
        sync = ddp.DDP(model.parameters(), dist.group.WORLD, bucket_bytes=5000)
        return dict(zero_grad=sync.zero_grad, finish=sync.finish)

    def theirs(model):
        wrapped = torch.nn.parallel.DistributedDataParallel(model)  # averages over the ranks
        return dict(forward=lambda _, *given: 3 * plain_forward(wrapped, *given))

    def work(rank):
        found = train(rank, ours), train(rank, theirs)
        torch.testing.assert_close(*found, rtol=1e-12, atol=1e-12)

    ranks(3, work)


def test_any_all_reduce_will_do(ranks):
    """Also one without a handle, which is complete when it returns."""

    def doubled(tensor, group):
        dist.all_reduce(tensor, group=group)
        tensor *= 2

    def work(rank):
        p = torch.nn.Parameter(torch.ones(2))
        sync = ddp.DDP([p], dist.group.WORLD, all_reduce=doubled)
        p.sum().backward()
        sync.finish()
        return p.grad.tolist()

    assert ranks(2, work) == [[4.0, 4.0]] * 2


def test_buckets_start_while_backward_goes_on(ranks):
    """All but the first parameters' bucket, and none without overlap."""

    def work(rank):
        for overlap, early in ((True, 3), (False, 0)):
            model = torch.nn.Sequential(*(torch.nn.Linear(4, 4) for _ in range(3)))
            sync = ddp.DDP(model.parameters(), dist.group.WORLD, bucket_bytes=80, overlap=overlap)
            started = []
            model[0].weight.register_hook(lambda _: started.append(len(sync.works)))
            sync.zero_grad()
            model(torch.ones(2, 4)).sum().backward()
            assert len(sync.buckets) == 3 and len(sync.works) == early
            assert started[-1] == (2 if overlap else 0)
            sync.finish()

    ranks(2, work)
