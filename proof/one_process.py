"""The proof: train the same model in one process, and compare every gradient and weight with it."""

import math

import torch
import torch.distributed as dist

import model as gpt
from harness.optimizer import clip, grad_norm, learning_rate, make_optimizer
from harness.placement import take
from harness.presets import parameter_shapes
from proof.diagnosis import Replay, diagnose, partial_rows
from proof.tolerance import FLOOR, TOLERANCE


def one_process(run, steps, prepare=lambda model: None, inspect=lambda model: None):
    """Train the run's model in this process alone. Returns (losses, gradient norms, gradients of
    the last step, weights after it). Calls prepare(model), and inspect(model) after each
    backward."""
    args = run.args
    model = gpt.build(run.config, args.seed, run.device, run.dtype, run.draw)
    prepare(model)
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
        inspect(model)
        if step == steps - 1:
            gradients = {name: p.grad.clone() for name, p in model.named()}
        norm = grad_norm(parameters)
        clip(parameters, norm, args.grad_clip)
        optimizer.step()
        gpt.rebalance(model)
        losses.append(loss.item())
        norms.append(norm.item())
    return losses, norms, gradients, {name: p.detach() for name, p in model.named()}


def gradients_of(run, rows):
    """{name: gradient} of one process's first step, from some rows of the batch: their numbers."""
    model = gpt.build(run.config, run.args.seed, run.device, run.dtype, run.draw)
    [(tokens, targets, samples)] = run.microbatches(0, pieces=1)
    chosen = torch.isin(samples, torch.tensor(rows, device=samples.device))
    tokens, targets, samples = tokens[chosen], targets[chosen], samples[chosen]
    model(tokens, targets=targets, count=run.count, samples=samples).backward()
    return {name: p.grad for name, p in model.named()}


def compare(run, named, counts=True):
    """Compare a run with one process: {kind: largest relative difference}, the same on all ranks.

    All ranks call it. It compares the loss and norm of every step, all gradients of the last step
    and all weights after it, copies included. Rank 0 trains the reference and broadcasts it
    parameter by parameter; each rank compares the piece that it holds.

    named()  (full name, parameter) pairs of this rank
    counts   False on a rank without global gradients and new weights: a parameter server's worker
    """
    steps = len(run.history)
    losses, norms, reference = [], [], {"grad": {}, "param": {}}
    if run.rank == 0:
        losses, norms, reference["grad"], reference["param"] = run.reference(steps)
    worst = {"loss": 0.0, "grad_norm": 0.0, "grad": 0.0, "param": 0.0}
    for row, loss, norm in zip(run.history, losses, norms):
        worst["loss"] = larger(worst["loss"], abs(row["loss"] - loss) / abs(loss))
        worst["grad_norm"] = larger(worst["grad_norm"], abs(row["grad_norm"] - norm) / abs(norm))
    parameters = dict(named()) if counts else {}
    tensors = {
        "grad": run.gradients,
        "param": {name: p.detach() for name, p in parameters.items()},
    }
    differences = {}  # {(kind, name): relative difference} of what this rank holds
    for kind in tensors:
        differences |= compare_tensors(run, kind, reference[kind], tensors[kind], parameters)
    for (kind, _), difference in differences.items():
        worst[kind] = larger(worst[kind], difference)
    run.worst = worst_names(run, differences)
    errors = torch.tensor(list(worst.values()), dtype=torch.float64, device=run.device)
    # A NaN counts as the largest difference of all
    errors = torch.where(errors.isnan(), torch.inf, errors)
    dist.all_reduce(errors, op=dist.ReduceOp.MAX)
    errors = dict(zip(worst, errors.tolist()))
    limits = TOLERANCE[run.precision]
    if run.diagnoses and any(not errors[kind] <= limits[kind] for kind in errors):
        replay = Replay()
        rows_of = partial_rows(run)
        if run.rank == 0:
            one_process(run, steps, replay.prepare, replay.inspect)
            reference["first"] = replay.gradients[0]
            replay.partial = {key: gradients_of(run, rows) for key, rows in rows_of.items()}
        else:
            reference["first"] = {}
            replay.partial = dict.fromkeys(rows_of, {})
        tensors["first"] = run.first_gradients
        first = compare_tensors(run, "first", reference["first"], tensors["first"], parameters)
        pairs = [list(zip(losses, norms))]
        dist.broadcast_object_list(pairs, 0)
        [run.reference] = pairs
        run.first_off, run.findings = diagnose(
            run, differences | first, parameters, tensors, reference, replay
        )
    return errors


def compare_tensors(run, kind, reference, tensors, parameters):
    """{(kind, name): relative difference} of each tensor that this rank holds from one process's.

    reference  {name: whole tensor}, on rank 0
    tensors    {name: this rank's piece}
    parameters {name: parameter}, whose placements say which piece that is
    """
    differences = {}
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
        differences[kind, name] = larger((difference / scale).item())
    return differences


def worst_names(run, differences):
    """{kind: name of the tensor with the largest difference on any rank}."""
    largest = {}
    for (kind, name), difference in differences.items():
        largest[kind] = max(largest.get(kind, (0.0, name)), (difference, name))
    everyone = [None] * run.world
    dist.all_gather_object(everyone, largest)
    names = {}
    for kind in ("grad", "param"):
        of_ranks = [of_rank[kind] for of_rank in everyone if kind in of_rank]
        names[kind] = max(of_ranks, default=(0.0, ""))[1]
    return names


def larger(*values):
    """The largest value. A NaN counts as infinite."""
    return max(math.inf if math.isnan(value) else value for value in values)
