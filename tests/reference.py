"""A training loop of model.py's GPT in a dozen plain lines, for PyTorch's techniques and ours."""

import contextlib

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


def train_rank(
    model,
    kind,
    rows=slice(None),
    steps=4,
    optimizer=None,
    zero_grad=None,
    forward=None,
    finish=None,
    named=None,
):
    """{name: weight} of a rank after some steps.

    rows        of the batch that this rank has
    optimizer   default: of the model's parameters, of that kind
    zero_grad() begins a step; default: the optimizer's
    forward(model, tokens, targets, count, samples) gives this rank's part of the loss
    finish()    completes the gradients
    named()     (name, parameter) of all that are returned; default: the model's
    """
    optimizer = optimizer or make_optimizer(model.parameters(), kind)
    forward = forward or plain_forward
    for step in range(steps):
        tokens, targets, samples, count = batch(step, context=model.config.context)
        (zero_grad or optimizer.zero_grad)()
        forward(model, tokens[rows], targets[rows], count, samples[rows]).backward()
        if finish:
            finish()
        optimizer.step()
    return {name: p.detach() for name, p in (named or model.named)()}


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
