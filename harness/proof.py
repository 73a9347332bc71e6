"""The proof: train the same model in one process, and compare every gradient and weight with it."""

import math

import torch
import torch.distributed as dist

import model as gpt
from harness.optimizer import clip, grad_norm, learning_rate, make_optimizer
from harness.placement import take
from harness.presets import parameter_shapes

# The largest relative differences from one process that count as rounding
TOLERANCE = {
    "float64": {"loss": 1e-10, "grad_norm": 1e-10, "grad": 1e-10, "param": 1e-10},
    "float32": {"loss": 1e-5, "grad_norm": 1e-4, "grad": 3e-4, "param": 1e-3},
    "bfloat16": {"loss": 2e-2, "grad_norm": 0.2, "grad": 0.1, "param": 0.1},
}
TOLERANCE["tf32"] = TOLERANCE["bfloat16"]  # has 3 bits more; nobody has measured it here
# A difference is relative to the largest element of its tensor, or to FLOOR x the largest element
# of all tensors if that is more. Some gradients are zero except for rounding: that of a key's bias,
# and in bfloat16 many small ones.
FLOOR = {"float64": 1e-3, "float32": 1e-3, "bfloat16": 1.0, "tf32": 1.0}


def one_process(run, steps):
    """Train the run's model in this process alone. Returns (losses, gradient norms, gradients of
    the last step, weights after it)."""
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
    """Compare a run with one process: {kind: largest relative difference}, the same on all ranks.

    All ranks call it. It compares the loss and norm of every step, all gradients of the last step
    and all weights after it, copies included. Rank 0 trains the reference and broadcasts it
    parameter by parameter; each rank compares the piece that it holds.

    named()  (full name, parameter) pairs of this rank
    counts   False on a rank without global gradients and new weights: a parameter server's worker
    """
    losses, norms, gradients, weights = [], [], {}, {}
    if run.rank == 0:
        losses, norms, gradients, weights = one_process(run, len(run.history))
    worst = {"loss": 0.0, "grad_norm": 0.0, "grad": 0.0, "param": 0.0}
    for row, loss, norm in zip(run.history, losses, norms):
        worst["loss"] = larger(worst["loss"], abs(row["loss"] - loss) / abs(loss))
        worst["grad_norm"] = larger(worst["grad_norm"], abs(row["grad_norm"] - norm) / abs(norm))
    parameters = dict(named()) if counts else {}
    held = {name: p.detach() for name, p in parameters.items()}
    for kind, reference, tensors in (("grad", gradients, run.gradients), ("param", weights, held)):
        largest = max((t.abs().max().item() for t in reference.values()), default=0.0)
        floor = torch.tensor(largest * FLOOR[run.precision], device=run.device)
        dist.broadcast(floor, 0)
        for name, shape in parameter_shapes(run.config).items():
            if run.rank == 0:
                whole = reference[name]
            else:
                whole = torch.empty(shape, dtype=run.dtype, device=run.device)
            dist.broadcast(whole, 0)
            if name not in parameters:
                continue
            expected = take(whole, parameters[name])
            # A parameter without a gradient counts as one with zeros
            actual = tensors.get(name, torch.zeros_like(expected))
            difference = (actual.double() - expected.double()).abs().max()
            scale = torch.maximum(whole.abs().max(), floor)
            worst[kind] = larger(worst[kind], (difference / scale).item())
    errors = torch.tensor(list(worst.values()), dtype=torch.float64, device=run.device)
    # A NaN counts as the largest difference of all
    errors = torch.where(errors.isnan(), torch.inf, errors)
    dist.all_reduce(errors, op=dist.ReduceOp.MAX)
    return dict(zip(worst, errors.tolist()))


def larger(*values):
    """The largest value. A NaN counts as infinite."""
    return max(math.inf if math.isnan(value) else value for value in values)
