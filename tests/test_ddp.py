"""ddp.py against PyTorch's DistributedDataParallel, and the pieces it is made of. test_copied.py
holds it against one process."""

import re

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from conftest import ROOT
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


def of_page(*words):
    """The blocks of docs/learn/data-parallelism.md with these words, one after the other."""
    page = (ROOT / "docs" / "learn" / "data-parallelism.md").read_text()
    blocks = re.findall(r"^```python\n(.*?)^```$", page, re.M | re.S)
    return "\n".join(next(block for block in blocks if word in block) for word in words)


def contrastive(a, b, temperature):
    scores, pairs = a @ b.mT * temperature.exp(), torch.arange(len(a))
    return (F.cross_entropy(scores, pairs) + F.cross_entropy(scores.mT, pairs)) / 2


def test_a_contrastive_loss(ranks):
    """By the page's lines: two encoders and the temperature get one process's gradients, which they
    do not where the gather has no backward, or where the loss is not divided."""

    images, texts = (torch.randn(8, size, dtype=torch.float64) for size in (5, 6))

    def build():
        torch.manual_seed(0)
        encoders = [nn.Linear(size, 4, dtype=torch.float64) for size in (5, 6)]
        return *encoders, nn.Parameter(torch.tensor(0.5, dtype=torch.float64))

    def train(change, rows):
        image_model, text_model, temperature = build()
        names = dict(torch=torch, dist=dist, contrastive=contrastive, group=dist.group.WORLD)
        names |= dict(image_model=image_model, text_model=text_model, temperature=temperature)
        names |= dict(images=images[rows], texts=texts[rows])
        exec(change(of_page("class Gather", "contrastive(")), names)
        parameters = [*image_model.parameters(), *text_model.parameters(), temperature]
        ddp.sum_gradients(parameters, dist.group.WORLD)
        return [p.grad for p in parameters]

    def work(rank):
        rows = slice(4 * rank, 4 * rank + 4)
        image_model, text_model, temperature = build()
        contrastive(image_model(images), text_model(texts), temperature).backward()
        whole = [*image_model.parameters(), *text_model.parameters(), temperature]
        whole = [p.grad for p in whole]
        torch.testing.assert_close(train(str, rows), whole, rtol=1e-10, atol=1e-10)
        for old, new in (
            (" / dist.get_world_size(group)\n", "\n"),
            ("dist.all_reduce(total, group=ctx.group)", "pass"),
        ):
            wrong = train(lambda code: code.replace(old, new), rows)
            assert (wrong[-1] - whole[-1]).abs() > 1e-3 or (wrong[0] - whole[0]).abs().max() > 1e-3

    ranks(2, work)


def test_batch_norm_of_all_rows(ranks):
    def work(rank):
        torch.manual_seed(0)
        full, weights = torch.randn(2, 6, 3, dtype=torch.float64)
        norms = [nn.BatchNorm1d(3, dtype=torch.float64) for _ in range(2)]
        expected = full.clone().requires_grad_()
        (norms[0](expected) * weights).sum().backward()
        x = full.chunk(2)[rank].clone().requires_grad_()
        names = dict(torch=torch, dist=dist, group=dist.group.WORLD, batch_norm=norms[1], x=x)
        exec(of_page("class Gather", "batch_norm("), names)
        (names["y"] * weights.chunk(2)[rank]).sum().backward()
        ddp.sum_gradients(norms[1].parameters(), dist.group.WORLD)
        torch.testing.assert_close(x.grad, expected.grad.chunk(2)[rank], rtol=1e-10, atol=1e-10)
        for ours, theirs in zip(norms[1].parameters(), norms[0].parameters()):
            torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-10, atol=1e-10)
        assert all(torch.allclose(a, b) for a, b in zip(norms[1].buffers(), norms[0].buffers()))

    ranks(2, work)
