"""A step whose loss or gradient is not finite: it is left out, and the parameter is found."""

import functools

import torch

from muon import PlainMuon
from proof.ledger import optimizers_of


def skip_where(found_inf, optimizer):
    """Have the optimizer leave out its next step where found_inf, a tensor, is 1. The host does not
    wait for it, unless the optimizer's states are the host's."""
    for each in optimizers_of(optimizer):
        first = next((p for group in each.param_groups for p in group["params"]), found_inf)
        each.found_inf = found_inf.to(first.device)  # torch's fused optimizers look at it
        if isinstance(each, PlainMuon):
            each.step_on = functools.partial(step_muon_unless, found_inf, each)


def step_muon_unless(found_inf, muon, p, settings):
    average = muon.state[p].get("average", 0.0)
    # A gradient that equals the average keeps the average, and lr = 0 keeps the weights
    p.grad.copy_(torch.where(found_inf > 0, average, p.grad))
    type(muon).step_on(muon, p, settings | {"lr": settings["lr"] * (1 - found_inf.double())})


def first_nonfinite(runner, batches):
    """The first of this rank's parameters, in the order of backward, whose gradient is not finite
    before it is added to other ranks' gradients. Runs the step's forwards and backwards again.
    Returns (name or None, where it is)."""
    found, handles = [], []

    def look(name, stage, gradient):
        if not gradient.isfinite().all():
            found.append((name, f", stage {stage}"))

    for stage, part in runner.model.parts.items():
        for name, p in part.named_parameters():
            if p.requires_grad:
                handles.append(p.register_hook(functools.partial(look, name, stage)))
    runner.optimizer.zero_grad()
    runner.forward_backward(batches)
    runner.optimizer.finish()
    for handle in handles:
        handle.remove()
    return found[0] if found else (None, "")
