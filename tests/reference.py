"""One process, in a dozen plain lines: what every technique is held against. It shares nothing with
harness.py."""

import contextlib
import functools

import torch

import model as gpt
from harness import presets

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
    model = gpt.build(config, seed, dtype=torch.float64)
    optimizer = make_optimizer(model.parameters(), kind)
    losses = []
    for step in range(steps):
        tokens, targets, samples, count = batch(step, context=config.context)
        optimizer.zero_grad()
        loss = model(tokens, targets=targets, count=count, samples=samples)
        loss.backward()
        optimizer.step()
        gpt.rebalance(model)
        losses.append(loss.item())
    return losses, {n: p.grad for n, p in model.named()}, {n: p.detach() for n, p in model.named()}


def assert_equal(ours, theirs, take=lambda full, name: full, tolerance=1e-10):
    """Losses, gradients and weights of one rank against the reference's. take(full, name): the
    rank's piece."""
    (losses, grads, weights), (ref_losses, ref_grads, ref_weights) = ours, theirs
    torch.testing.assert_close(
        torch.tensor(losses), torch.tensor(ref_losses), rtol=tolerance, atol=0
    )
    for kind, mine, whole in (("gradient", grads, ref_grads), ("weight", weights, ref_weights)):
        for name in mine:
            torch.testing.assert_close(
                mine[name],
                take(whole[name], name),
                rtol=tolerance,
                atol=tolerance,
                msg=lambda m: f"{kind} of {name}: {m}",
            )
