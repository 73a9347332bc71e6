"""The proof: the same model trained in one process, and every gradient and weight held against
it."""

import math

import torch
import torch.distributed as dist

import model as gpt
from harness.optimizer import clip, grad_norm, learning_rate, make_optimizer
from harness.placement import take

# What counts as rounding: the largest relative difference from one process
TOLERANCE = {
    "float64": {"loss": 1e-10, "grad_norm": 1e-10, "grad": 1e-10, "param": 1e-10},
    "float32": {"loss": 1e-5, "grad_norm": 1e-4, "grad": 3e-4, "param": 1e-3},
    "bfloat16": {"loss": 2e-2, "grad_norm": 0.2, "grad": 0.1, "param": 0.1},
}
# A tensor's difference is relative to its own largest element, or to this part of the model's
# largest if that is more. The gradient of a key's bias, for example, is zero but for rounding; in
# bfloat16 that is true of many small gradients.
FLOOR = {"float64": 1e-3, "float32": 1e-3, "bfloat16": 1.0}


def one_process(run, steps):
    """Train the run's model in this process alone: (losses, norms, gradients of the last step,
    weights after it)."""
    args = run.args
    model = gpt.build(run.config, args.seed, run.device, run.dtype, run.draw)
    parameters = list(model.parameters())
    optimizer = make_optimizer(parameters, args)
    losses, norms, gradients = [], [], {}
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, args)
        [(tokens, targets, samples)] = run.microbatches(step, pieces=1)
        optimizer.zero_grad()
        loss = model(tokens, targets=targets, count=run.count, samples=samples)
        loss.backward()
        if step == steps - 1:
            gradients = {name: p.grad.clone() for name, p in model.named()}
        norm = grad_norm(parameters)
        clip(parameters, norm, args.grad_clip)
        optimizer.step()
        gpt.rebalance(model)
        losses.append(loss.item())
        norms.append(norm.item())
    return losses, norms, gradients, {name: p.detach() for name, p in model.named()}


def compare(run, named, counts=True):
    """Hold a run against one process: {kind: largest relative difference}, the same on all ranks.
    Called by all of them.

    Compared are loss and norm of every step, all gradients of the last step and all weights after
    it, copies included. Rank 0 trains the reference and broadcasts it parameter by parameter; each
    rank compares the piece that it holds.
    counts=False: this rank holds no global gradients and no new weights (a parameter server's
    worker)."""
    losses, norms, gradients, weights = [], [], {}, {}
    if run.rank == 0:
        losses, norms, gradients, weights = one_process(run, len(run.history))
    worst = {"loss": 0.0, "grad_norm": 0.0, "grad": 0.0, "param": 0.0}
    for row, loss, norm in zip(run.history, losses, norms):
        worst["loss"] = larger(worst["loss"], abs(row["loss"] - loss) / abs(loss))
        worst["grad_norm"] = larger(worst["grad_norm"], abs(row["grad_norm"] - norm) / abs(norm))
    held = dict(named())
    for kind, reference in (("grad", gradients), ("param", weights)):
        largest = max((t.abs().max().item() for t in reference.values()), default=0.0)
        floor = torch.tensor(largest * FLOOR[run.precision], device=run.device)
        dist.broadcast(floor, 0)
        for name, shape in run.config.shapes().items():
            whole = (
                reference[name]
                if run.rank == 0
                else torch.empty(shape, dtype=run.dtype, device=run.device)
            )
            dist.broadcast(whole, 0)
            if name not in held or not counts:
                continue
            expected = take(whole, held[name])
            found = held[name].detach() if kind == "param" else run.gradients.get(name)
            if found is None:
                found = torch.zeros_like(expected)
            difference = (found.double() - expected.double()).abs().max() / torch.maximum(
                whole.abs().max(), floor
            )
            worst[kind] = larger(worst[kind], difference.item())
    errors = torch.tensor(list(worst.values()), dtype=torch.float64, device=run.device)
    # A NaN is the largest difference of all
    errors = torch.where(errors.isnan(), torch.inf, errors)
    dist.all_reduce(errors, op=dist.ReduceOp.MAX)
    return dict(zip(worst, errors.tolist()))


def larger(*values):
    """The largest value, where a NaN counts as infinite."""
    return max(math.inf if math.isnan(value) else value for value in values)
