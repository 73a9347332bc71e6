"""The top of sequence_parallel.py, with that of tensor_parallel.py, on models that are not ours."""

import copy
import functools

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from test_copied_tensor_parallel import (
    VOCAB,
    WIDTH,
    ForeignAttention,
    ForeignMLP,
    UsageModel,
    tensor_parallel_batch,
    tensor_parallel_clip,
    tensor_parallel_cut,
    tensor_parallel_foreign,
    tensor_parallel_optimizer,
    tensor_parallel_sum,
    tensor_parallel_take,
    tensor_parallel_train,
    tensor_parallel_usage,
    tensor_parallel_usage_reference,
)

SEQUENCE_PARALLEL = "tensor_parallel sequence_parallel"


def sequence_parallel_cut(model, group, keep=True):
    """(model, stream): cut it as the usage block says."""
    import sequence_parallel as sp
    import tensor_parallel as tp

    stream, model = sp.Stream(group), tensor_parallel_cut(model, tp, group)
    for layer in model[1:-2]:
        last = "proj" if isinstance(layer, ForeignAttention) else "down"
        getattr(layer, last).leave = sp.Leave(stream)
        layer.norm[1] = sp.Enter(stream)
        if isinstance(layer, ForeignMLP) and not keep:
            layer.up = sp.Projection(0, layer.up)
            layer.norm[1] = sp.EnterAndProject(stream, [layer.up])
    model[0].leave, model[-1][0] = sp.Leave(stream), sp.Enter(stream)
    sp.mark_partial(model.parameters(), group)
    return model, stream


def sequence_parallel_equals(rank, kind, keep):
    import sequence_parallel as sp
    import tensor_parallel as tp

    group, model = dist.group.WORLD, tensor_parallel_foreign()
    cut, _ = sequence_parallel_cut(copy.deepcopy(model), group, keep)

    def clip(parameters):
        parameters = list(parameters)
        sp.reduce_partial(parameters)
        return tensor_parallel_clip(tp, parameters, 0.5, group)

    reference = functools.partial(nn.utils.clip_grad_norm_, max_norm=0.5)
    reference = tensor_parallel_train(model, tensor_parallel_sum, kind, reference)
    criterion = tp.VocabParallelCrossEntropy(VOCAB, group)
    result = tensor_parallel_train(cut, criterion, kind, clip)
    torch.testing.assert_close(result, reference, rtol=1e-10, atol=0)
    for p, whole in zip(cut.parameters(), model.parameters(), strict=True):
        for mine, full in ((p, whole), (p.grad, whole.grad)):
            torch.testing.assert_close(
                mine, tensor_parallel_take(tp, full, p), rtol=1e-10, atol=1e-10
            )


@pytest.mark.parametrize("world, kind, keep", [(2, "adamw", True), (3, "sgd", False)])
def test_foreign_sequences_equal_one_process(copied, world, kind, keep):
    copied(SEQUENCE_PARALLEL, world, sequence_parallel_equals, kind, keep)


def sequence_parallel_without_vocabulary(rank, kind):
    """Layers alone, whose result and loss stay on the split stream. 5 tokens on 4 ranks: 2 + 2 + 1
    + 0."""
    import sequence_parallel as sp
    import tensor_parallel as tp

    group, model = dist.group.WORLD, nn.Sequential(ForeignMLP(), ForeignMLP(hidden=30)).double()
    torch.manual_seed(1)
    for p in model.parameters():
        nn.init.normal_(p, std=0.3)
    cut, stream = copy.deepcopy(model), sp.Stream(group)
    for layer in cut:
        layer.norm = nn.Sequential(layer.norm, sp.Enter(stream))
        layer.up = tp.ColumnParallelLinear(layer.up, group)
        layer.down = tp.RowParallelLinear(layer.down, group)
        layer.down.leave = sp.Leave(stream)
    sp.mark_partial(cut.parameters(), None)
    sp.mark_partial(cut.parameters(), group)  # is told already
    optimizers = [tensor_parallel_optimizer(kind, m.parameters()) for m in (model, cut)]
    stream.length = 5
    valid = stream.shard(torch.ones(5)).unsqueeze(1)
    for _ in range(3):
        for optimizer in optimizers:
            optimizer.zero_grad(set_to_none=False)
        for _ in range(2):
            x, y = torch.randn(2, 3, 5, WIDTH, dtype=torch.float64)
            (model(x) - y).square().sum().div(30 * WIDTH).backward()
            x, y = (tp.shard_tensor(t, 1, rank, 4) for t in (x, y))
            ((cut(x) - y).square() * valid).sum().div(30 * WIDTH).backward()
        sp.reduce_partial(cut.parameters())
        for optimizer in optimizers:
            optimizer.step()
    for p, whole in zip(cut.parameters(), model.parameters(), strict=True):
        for mine, full in ((p, whole), (p.grad, whole.grad)):
            torch.testing.assert_close(
                mine, tensor_parallel_take(tp, full, p), rtol=1e-10, atol=1e-10
            )


@pytest.mark.parametrize("kind", ["sgd", "adamw"])
def test_a_loss_on_the_split_stream(copied, kind):
    copied(SEQUENCE_PARALLEL, 4, sequence_parallel_without_vocabulary, kind)


def sequence_parallel_pass(cut, group, step=0):
    import tensor_parallel as tp

    tokens, targets, count = tensor_parallel_batch(step)
    tp.VocabParallelCrossEntropy(VOCAB, group)(cut(tokens), targets, count).backward()


def sequence_parallel_completed(rank, set_to_none):
    import sequence_parallel as sp
    import tensor_parallel as tp

    group, model = dist.group.WORLD, tensor_parallel_foreign()
    cut, stream = sequence_parallel_cut(copy.deepcopy(model), group)
    optimizer = tensor_parallel_optimizer("sgd", cut.parameters())
    sequence_parallel_pass(cut, group)
    # One of them twice: it counts once
    sp.reduce_partial([*cut.parameters(), cut[1].norm[0].weight])
    for _ in range(2):
        with pytest.raises(
            RuntimeError, match="reduce_partial has completed these gradients already"
        ):
            sp.reduce_partial(cut.parameters())
    # What is refused changes nothing
    tokens, targets, count = tensor_parallel_batch(0)
    tensor_parallel_sum(model(tokens), targets, count).backward()
    for p, whole in zip(cut.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(
            p.grad, tensor_parallel_take(tp, whole.grad, p), rtol=1e-10, atol=1e-10
        )
    with pytest.raises(RuntimeError, match="reduce_partial has completed .* zero_grad"):
        sequence_parallel_pass(cut, group)  # as after each micro-batch
    dist.barrier()
    for _ in range(2):
        optimizer.zero_grad(set_to_none)
        for _ in range(2):
            sequence_parallel_pass(cut, group)
        sp.reduce_partial(cut.parameters())
    for p, whole in zip(cut.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(
            p.grad, 2 * tensor_parallel_take(tp, whole.grad, p), rtol=1e-10, atol=1e-10
        )


@pytest.mark.parametrize("set_to_none", [True, False])
def test_gradients_are_completed_once(copied, set_to_none):
    copied(SEQUENCE_PARALLEL, 2, sequence_parallel_completed, set_to_none)


def sequence_parallel_forgotten(rank, forgotten):
    import sequence_parallel as sp
    import tensor_parallel as tp

    group = dist.group.WORLD
    cut, stream = sequence_parallel_cut(tensor_parallel_foreign(), group)
    sequence_parallel_pass(cut, group)
    if forgotten == "mark_partial":
        for p in cut.parameters():
            p.placement["partial"] = []
        sp.reduce_partial(cut.parameters())
    with pytest.raises(RuntimeError, match="complete partial gradients"):
        tp.grad_norm(cut.parameters(), group)


@pytest.mark.parametrize("forgotten", ["mark_partial", "reduce_partial"])
def test_gradient_norm_notices_partial_gradients(copied, forgotten):
    copied(SEQUENCE_PARALLEL, 2, sequence_parallel_forgotten, forgotten)


def sequence_parallel_lengths(rank):
    import sequence_parallel as sp
    import tensor_parallel as tp

    group = dist.group.WORLD
    cut, stream = sequence_parallel_cut(tensor_parallel_foreign(), group)
    x = torch.randn(2, 4, WIDTH)
    projection = sp.Projection(0, tp.ColumnParallelLinear(nn.Linear(WIDTH, WIDTH), group))
    enters = [sp.Enter(stream), sp.EnterAndProject(stream, [projection])]
    for length in (None, 6, 9, 0):  # two pieces of 4 are of 7 or 8 tokens
        stream.length = length
        for enter in enters:
            with pytest.raises(
                ValueError, match=f"stream.length is {length}, but each of 2 ranks has 4 tokens"
            ):
                enter(x)
        cut(tensor_parallel_batch(0)[0])  # the embedding's g puts it right
        assert stream.length == 7
    stream.length = 8
    assert enters[0](x).shape == (2, 8, WIDTH)
    assert projection(enters[1](x)).shape == (2, 8, WIDTH // 2)
    with pytest.raises(ValueError, match="EnterAndProject"):
        projection(x)
    targets = torch.tensor([[3, 0, 5]])
    assert stream.shard(targets, fill=-1).tolist() == ([[3, 0]] if rank == 0 else [[5, -1]])


def test_a_missing_or_impossible_length_is_refused(copied):
    copied(SEQUENCE_PARALLEL, 2, sequence_parallel_lengths)


def sequence_parallel_no_gradient(rank):
    import sequence_parallel as sp

    group = dist.group.WORLD
    cut, stream = sequence_parallel_cut(tensor_parallel_foreign(), group)
    cut[1].norm[0].weight.requires_grad_(False)
    unused = nn.Parameter(torch.ones(3))
    sp.mark_partial([unused], group)
    sequence_parallel_pass(cut, group)
    before = cut[-2].bias.grad.clone()
    sp.reduce_partial([unused, *cut.parameters()])
    assert unused.grad is None and not torch.equal(cut[-2].bias.grad, before)
    sp.reduce_partial([unused])
    sp.reduce_partial([])


def test_parameters_without_a_gradient_are_left_out(copied):
    copied(SEQUENCE_PARALLEL, 2, sequence_parallel_no_gradient)


def sequence_parallel_other_models(rank):
    import sequence_parallel as sp

    group = dist.group.WORLD
    for model in (nn.Linear(4, 4), tensor_parallel_foreign()):
        with pytest.raises(ValueError, match="parallelize knows model.py's GPT alone, not "):
            sp.parallelize(model, group)


def test_sequence_parallel_refuses_other_models(copied):
    copied(SEQUENCE_PARALLEL, 2, sequence_parallel_other_models)


def sequence_parallel_second_gradients(rank):
    import sequence_parallel as sp
    import tensor_parallel as tp

    group = dist.group.WORLD
    stream = sp.Stream(group)
    projection = sp.Projection(0, tp.ColumnParallelLinear(nn.Linear(WIDTH, WIDTH), group))
    again = nn.Sequential(sp.EnterAndProject(stream, [projection]), projection)
    for module in (sp.Enter(stream), sp.Leave(stream), again):
        stream.length = 8
        x = torch.randn(2, 4, WIDTH, requires_grad=True)
        (grad,) = torch.autograd.grad(module(x).pow(3).sum(), x, create_graph=True)
        with pytest.raises(RuntimeError, match="differentiate twice"):
            grad.square().sum().backward()


def test_a_gradient_of_a_gradient_on_the_stream_is_refused(copied):
    copied(SEQUENCE_PARALLEL, 2, sequence_parallel_second_gradients)


def sequence_parallel_missing(rank):
    """Each rank lacks the gradient of another parameter, as where a layer has no token of it."""
    import sequence_parallel as sp

    group, parameters = dist.group.WORLD, [nn.Parameter(torch.ones(3)) for _ in range(3)]
    sp.mark_partial(parameters, group)
    parameters[2].grad = torch.full((3,), 2.0)
    parameters[rank].grad = torch.full((3,), 10.0 + rank)
    sp.reduce_partial(parameters)
    assert [p.grad.tolist() for p in parameters] == [[10.0] * 3, [11.0] * 3, [4.0] * 3]
    for p in parameters:
        p.grad = None
    if rank == 0:
        parameters[0].grad = torch.ones(3)
    sp.reduce_partial(parameters)
    assert parameters[0].grad.tolist() == [1.0] * 3 and parameters[1].grad is None
    with pytest.raises(RuntimeError, match="reduce_partial has completed these gradients already"):
        sp.reduce_partial(parameters)


def test_a_gradient_that_one_rank_lacks_counts_as_zeros(copied):
    copied(SEQUENCE_PARALLEL, 2, sequence_parallel_missing)


def sequence_parallel_backward_again(rank):
    """A second backward pass that does not reach the first parameter is noticed too, and adds to
    no partial gradient."""
    import sequence_parallel as sp

    group, parameters = dist.group.WORLD, [nn.Parameter(torch.ones(3)) for _ in range(3)]
    sp.mark_partial(parameters, group)
    sum(parameters).sum().backward()
    sp.reduce_partial(parameters)
    with pytest.raises(RuntimeError, match="reduce_partial has completed .* zero_grad"):
        parameters[1].sum().backward()
    assert parameters[1].grad.tolist() == [2.0] * 3


def test_any_backward_pass_after_the_sum_is_refused(copied):
    copied(SEQUENCE_PARALLEL, 2, sequence_parallel_backward_again)


def sequence_parallel_autocast(rank, frozen):
    """Gathering again, under autocast and with frozen weights, equals gathering once."""
    import tensor_parallel as tp

    group, results = dist.group.WORLD, []
    for keep in (True, False):
        cut, _ = sequence_parallel_cut(tensor_parallel_foreign().float(), group, keep)
        for layer in cut[1:-2]:
            if isinstance(layer, ForeignMLP):
                layer.up.weight.requires_grad_(not frozen)
        tokens, targets, count = tensor_parallel_batch(0)
        with torch.autocast("cpu", torch.bfloat16):
            loss = tp.VocabParallelCrossEntropy(VOCAB, group)(cut(tokens), targets, count)
        loss.backward()
        results.append([loss] + [p.grad for p in cut.parameters()])
    for grad, again in zip(*results, strict=True):
        assert (grad is None) == (again is None)
        if grad is not None:
            torch.testing.assert_close(again, grad, rtol=2e-2, atol=1e-3)


@pytest.mark.parametrize("frozen", [False, True])
def test_gathering_again_under_autocast(copied, frozen):
    copied(SEQUENCE_PARALLEL, 2, sequence_parallel_autocast, frozen)


def sequence_parallel_usage_equals(rank):
    import sequence_parallel as sp
    import tensor_parallel as tp

    torch.manual_seed(0)
    whole, group = UsageModel().double(), dist.group.WORLD
    cut, (tokens, targets, count) = copy.deepcopy(whole), tensor_parallel_batch(0)
    cut.local = lambda positions: cut.embed.leave.stream.shard(positions)
    microbatches = list(zip(tokens.split(2), targets.split(2)))
    names = dict(model=cut, group=group, t=2, vocab=VOCAB, microbatches=[], count=count)
    names = tensor_parallel_usage("tensor_parallel", **vars(tp), **names)
    names |= vars(sp) | {"microbatches": microbatches}
    tensor_parallel_usage("sequence_parallel", **names)
    norm = tp.grad_norm(cut.parameters(), group)
    nn.utils.clip_grads_with_norm_(cut.parameters(), 1.0, norm)
    tensor_parallel_usage_reference(whole, microbatches, count)
    for p, full in zip(cut.parameters(), whole.parameters(), strict=True):
        expected = tensor_parallel_take(tp, full.grad, p)
        torch.testing.assert_close(p.grad, expected, rtol=1e-10, atol=1e-10)


def test_the_usage_block_of_both_files_runs_as_printed(copied):
    copied(SEQUENCE_PARALLEL, 2, sequence_parallel_usage_equals)
