"""muon.py: its iteration against singular values, its step against PyTorch's Muon, its shards and
owners against one process, on matrices of odd shapes. test_copied.py trains models with it."""

from functools import partial

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from foreign import by_singular_values
from reference import case

import composition
import muon
import tensor_parallel

SHAPES = [(5, 9), (9, 4), (1, 7), (6, 1), (1, 1), (8, 8), (3, 4, 6), (2, 7, 3)]


def matrices(seed=0, shapes=SHAPES):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]


# --- one process


@pytest.mark.parametrize("matrix", matrices(), ids=lambda matrix: str(tuple(matrix.shape)))
def test_the_iteration_is_a_polynomial_of_singular_values(matrix):
    result = muon.orthogonalize(matrix)
    torch.testing.assert_close(result, by_singular_values(matrix), rtol=1e-10, atol=1e-10)
    assert not muon.orthogonalize(0 * matrix).any()


def trained(make, dtype=torch.float64, steps=4):
    """Matrices after some steps. make(parameters): their optimizer."""
    parameters = [nn.Parameter(matrix.to(dtype)) for matrix in matrices(shapes=SHAPES[:6])]
    optimizer = make(parameters, lr=0.02, weight_decay=0.1)
    for step in range(1, steps + 1):
        for p, gradient in zip(parameters, matrices(step)):
            p.grad = gradient.to(dtype)
        optimizer.step()
    return [p.detach() for p in parameters]


def test_equals_pytorchs_muon(monkeypatch):
    """Whose iteration is in bfloat16: to its rounding; with ours in its place exactly."""
    pytorchs = partial(torch.optim.Muon, adjust_lr_fn="match_rms_adamw")
    theirs, ours = trained(pytorchs), trained(muon.PlainMuon)
    for weights in (ours, trained(partial(muon.PlainMuon, dtype=torch.bfloat16))):
        torch.testing.assert_close(weights, theirs, rtol=0, atol=5e-3)
    iteration = "torch.optim._muon._zeropower_via_newtonschulz"
    monkeypatch.setattr(iteration, lambda gradient, *_: muon.orthogonalize(gradient))
    torch.testing.assert_close(ours, trained(pytorchs), rtol=1e-12, atol=1e-12)


def test_heads_are_matrices_of_their_own():
    together = nn.Parameter(torch.cat(matrices(shapes=[(4, 9)] * 3)))
    together.matrix_rows, heads = 4, [nn.Parameter(part) for part in together.detach().split(4)]
    together.grad = torch.cat(matrices(1, [(4, 9)] * 3))
    for head, gradient in zip(heads, together.grad.split(4)):
        head.grad = gradient
    muon.PlainMuon([together]).step()
    muon.PlainMuon(heads).step()
    torch.testing.assert_close(together, torch.cat(heads), rtol=1e-12, atol=1e-12)


# --- shards


@pytest.mark.parametrize("world", [2, 3, 5])
def test_shards_step_as_the_whole(ranks, world):
    """Each matrix is cut in each of its dimensions. Shards have zeros at the end, or nothing else;
    a stack is cut between its matrices, too, and heads between heads."""

    def work(rank):
        for seed, shape in enumerate([*SHAPES, (6 * world, 4)]):
            for dim in range(len(shape)):
                whole, gradients = (nn.Parameter(*matrices(i, [shape])) for i in (seed, seed + 50))
                if seed == len(SHAPES):
                    whole.matrix_rows = 3
                shard = tensor_parallel.shard(whole, dim, dist.group.WORLD)
                shard.grad = tensor_parallel.shard(gradients, dim, dist.group.WORLD).detach()
                whole.grad = gradients.detach()
                update = composition.on_whole_matrices(muon.update_of)
                plain, sharded = muon.PlainMuon([whole]), muon.PlainMuon([shard], update=update)
                for _ in range(2):
                    plain.step()
                    sharded.step()
                expected = tensor_parallel.shard(whole, dim, dist.group.WORLD)
                with case(shape, dim):
                    torch.testing.assert_close(shard, expected, rtol=1e-12, atol=1e-12)

    ranks(world, work)


# --- owners


def test_largest_first_each_to_the_rank_with_the_least(ranks):
    parameters = matrices(shapes=[(8, 8), (8, 32), (4, 4), (8, 32), (2, 8, 8), (8, 16)])

    def work(rank):
        owners = muon.deal_to_owners(parameters, lambda p: (dist.group.WORLD,))
        return [owners[p] for p in parameters]

    assert ranks(3, work) == [[0, 0, 1, 1, 2, 2]] * 3
    assert muon.flops(parameters[1]) == 5 * (4 * 8 * 8 * 32 + 2 * 8**3)
    assert muon.flops(parameters[4]) == 2 * muon.flops(parameters[0])


def test_step_by_owner(ranks):
    """Two steps, with gradients of each rank's own. The third rank owns nothing."""

    def stepped(step_once, ranks_here):
        held = [nn.Parameter(matrix) for matrix in matrices(shapes=SHAPES[:3])]
        optimizers = muon.PlainMuon(held[:2]), torch.optim.AdamW(held[2:])
        for step in (1, 2):
            for i, p in enumerate(held):
                p.grad = sum(matrices(10 * step + rank, SHAPES[:3])[i] for rank in ranks_here)
            step_once(*optimizers)
        return [p.detach() for p in held], len(optimizers[0].state)

    def work(rank):
        return stepped(lambda *both: muon.step_by_owner(*both, dist.group.WORLD), [rank])

    expected, _ = stepped(lambda *both: [optimizer.step() for optimizer in both], range(3))
    weights, owned = zip(*ranks(3, work))
    torch.testing.assert_close(weights, (expected,) * 3, rtol=1e-12, atol=1e-12)
    assert owned == (1, 1, 0)


def test_without_a_matrix_and_without_a_backward(ranks):
    """All of a stage's matrices are frozen. Rank 1 joins rank 0's sums. Settings arrive."""

    def work(rank):
        model = nn.Linear(2, 3)
        model.weight.requires_grad_(False)
        options = dict(momentum=0.5, dtype=torch.bfloat16)
        optimizer = muon.Muon(model.parameters(), dist.group.WORLD, [model.weight], **options)
        assert optimizer.muon.param_groups[0].items() >= options.items()
        if rank == 0:
            model(torch.ones(2)).sum().backward()
            assert optimizer.reductions_started == len(optimizer.buckets)  # within backward
        optimizer.step()
        return model.bias.detach()

    assert torch.equal(*ranks(2, work))


def test_clipping_waits_for_the_sums(ranks):
    """With a norm of the caller's own there is no grad_norm() before clip()."""

    def work(rank):
        model = nn.Linear(2, 3, bias=False)
        optimizer = muon.Muon(model.parameters(), dist.group.WORLD, [model.weight])
        if rank == 0:
            model(torch.ones(2)).sum().backward()
        optimizer.clip(torch.tensor(4.0), 2.0)
        optimizer.gather_full()
        return model.weight.grad

    for gradient in ranks(2, work):
        torch.testing.assert_close(gradient, torch.full((3, 2), 0.5))
