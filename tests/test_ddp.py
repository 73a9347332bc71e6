"""ddp.py: every way of adding up gradients against one process, and against PyTorch's
DistributedDataParallel."""

import torch
import torch.distributed as dist
from reference import CONFIGS, STEPS, equals_one_process, train_rank

import ddp
from harness import initialize


def rows_of_rank():
    """Unequal shares of the batch of 12."""
    shares = {1: [12], 2: [6, 6], 3: [1, 5, 6], 4: [3, 3, 3, 3]}[dist.get_world_size()]
    return torch.arange(12).split(shares)[dist.get_rank()]


def train_parallel(config, kind, way, accumulate=2, steps=STEPS):
    model = initialize.build(config, 7, dtype=torch.float64)
    bucket_bytes = 0 if way == "naive" else 5000
    given = dist.group.WORLD, accumulate, bucket_bytes
    sync = ddp.DDP(model.parameters(), *given, overlap=way == "overlapped")
    given = dict(zero_grad=sync.zero_grad, finish=sync.finish)
    return train_rank(model, kind, rows_of_rank(), accumulate, steps, **given)


WAYS = ["naive", "bucketed", "overlapped"]

test_equals_one_process = equals_one_process(
    train_parallel,
    {
        1: [("llama", "sgd", way, 2) for way in WAYS],
        3: [("gpt2", kind, way, 2) for kind in ("sgd", "adamw") for way in WAYS],
        4: [("dropout", "sgd", way, 3) for way in WAYS],
    },
)


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
