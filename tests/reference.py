"""One process, in a dozen plain lines: what every technique is held against. It shares nothing with
harness.py."""

import contextlib
import functools

import pytest
import torch
import torch.distributed as dist

import model as gpt
from harness import initialize, presets

SIZES = dict(layers=3, heads=4, width=32, context=12, vocab=61)
CONFIGS = {
    "gpt2": presets.configure(**SIZES),
    "llama": presets.configure(family="llama", kv_heads=4, **SIZES),
    "grouped": presets.configure(family="llama", kv_heads=2, **SIZES),
    "dropout": presets.configure(dropout=0.2, **SIZES),
}

STEPS = 2  # the second meets weights, and moments, that the first has changed


def batch(step, rows=12, vocab=61, context=12):
    """tokens, targets (some of them ignored, unevenly), samples and the number of valid targets."""
    g = torch.Generator().manual_seed(100 + step)
    tokens = torch.randint(vocab, (rows, context + 1), generator=g)
    targets = tokens[:, 1:].clone()
    for row in range(rows):
        targets[row, : row % 5] = gpt.IGNORE
    return tokens[:, :-1], targets, torch.arange(rows) + step * rows, (targets != gpt.IGNORE).sum()


def make_optimizer(parameters, kind):
    if kind == "sgd":
        return torch.optim.SGD(parameters, lr=0.3)
    return torch.optim.AdamW(parameters, lr=1e-2, weight_decay=0.1)


@contextlib.contextmanager
def case(*label):
    """Tell, where a check fails inside, which of a launch's cases it was."""
    try:
        yield
    except Exception as e:
        e.add_note(f"case: {label}")
        raise


@functools.cache
def train(config, kind, steps=STEPS, seed=7):
    """Losses, gradients of the last step and weights after it, by full name, of one process with
    the whole batch at once. Trained once in a process of tests."""
    model = initialize.build(config, seed, dtype=torch.float64)
    optimizer = make_optimizer(model.parameters(), kind)
    losses = []
    for step in range(steps):
        tokens, targets, samples, count = batch(step, context=config.context)
        optimizer.zero_grad()
        loss = model(tokens, targets=targets, target_count=count, sample_ids=samples)
        loss.backward()
        optimizer.step()
        gpt.rebalance(model)
        losses.append(loss.item())
    return losses, {n: p.grad for n, p in model.named()}, {n: p.detach() for n, p in model.named()}


def train_rank(
    model,
    kind,
    rows=None,
    accumulate=2,
    steps=STEPS,
    optimizer=None,
    zero_grad=None,
    forward=None,
    finish=None,
    take_step=None,
    named=None,
):
    """What one rank of a technique has: ((losses, gradients, weights) as train() returns them,
    {name: cuts of the parameter}).

    rows        of the batch that this rank has; default all, of which the loss is then the whole's
    optimizer   default: of the model's parameters, of that kind
    zero_grad() begins a step; default: the optimizer's
    forward(model, tokens, targets, count, samples) gives this rank's part of the loss
    finish()    completes the gradients
    take_step(optimizer); default: optimizer.step()
    named()     (name, parameter) of all that are compared; default: the model's
    """
    optimizer = optimizer or make_optimizer(model.parameters(), kind)
    named, forward, losses = named or model.named, forward or plain_forward, []
    for step in range(steps):
        tokens, targets, samples, count = batch(step, context=model.config.context)
        (zero_grad or optimizer.zero_grad)()
        loss = torch.zeros((), dtype=torch.float64)
        mine = torch.arange(len(tokens)) if rows is None else torch.as_tensor(rows)
        for piece in mine.tensor_split(accumulate):
            part = forward(model, tokens[piece], targets[piece], count, samples[piece])
            part.backward()
            loss += part.detach()
        if finish:
            finish()
        if rows is not None:
            dist.all_reduce(loss)
        if step == steps - 1:
            gradients = {name: p.grad for name, p in named()}
        if take_step:
            take_step(optimizer)
        else:
            optimizer.step()
        losses.append(loss.item())
    found = dict(named())
    weights = {name: p.detach() for name, p in found.items()}
    return (losses, gradients, weights), {name: cuts_of(p) for name, p in found.items()}


def plain_forward(model, tokens, targets, count, samples):
    return model(tokens, targets=targets, target_count=count, sample_ids=samples)


def cuts_of(p):
    """[(dimension, first row, number of rows, rows that are held)] of a rank's shard. Dimension
    None: it is whole, an expert that other ranks lack."""
    cuts = getattr(p, "placement", {}).get("cuts", {}).items()
    return [(dim, start, n, p.shape[dim]) for dim, (_, start, n) in cuts if dim is not None]


def piece(full, cuts):
    """A rank's shard of a whole tensor. Zeros follow the last rows."""
    for dim, start, length, held in cuts:
        shard, shape = full.narrow(dim, start, length), list(full.shape)
        shape[dim] = held - length
        full = torch.cat([shard, shard.new_zeros(shape)], dim)
    return full


def assert_ranks(results, reference, tolerance=1e-10):
    """Each rank's losses, gradients and weights, as train_rank returns them, are one process's."""
    for (losses, *states), cuts in results:
        expected = [reference[0]]
        for held, whole in zip(states, reference[1:]):
            expected.append({name: piece(whole[name], cuts[name]) for name in held})
        torch.testing.assert_close([losses, *states], expected, rtol=tolerance, atol=tolerance)


def equals_one_process(train_parallel, cases, configs=CONFIGS):
    """A test of train_parallel(config, optimizer's kind, ...) on as many ranks as `cases` say:
    {ranks: [(name of the config, kind, ...)]}. One launch has all cases of a number of ranks."""

    @pytest.mark.parametrize("world", cases)
    def test(ranks, world):
        references = [train(configs[name], kind) for name, kind, *_ in cases[world]]

        def work(rank):
            found = []
            for name, *more in cases[world]:
                with case(name, *more):
                    found.append(train_parallel(configs[name], *more))
            return found

        of_cases = zip(*ranks(world, work), strict=True)
        for of, results, reference in zip(cases[world], of_cases, references, strict=True):
            with case(*of):
                assert_ranks(results, reference)
                held = set().union(*(weights for (_, _, weights), _ in results))
                assert held == {*reference[2]}, "a parameter is on no rank"

    return test
