"""The proof: train the same model in one process, and compare every gradient and weight with it."""

import math
from typing import NamedTuple

import torch
import torch.distributed as dist

from harness import documents, initialize
from harness.optimizer import clip, grad_norm, learning_rate, make_optimizer
from harness.placement import take
from harness.presets import parameter_shapes
from mixture import rebalance
from proof.diagnosis import Notes, diagnose, evidence, watch
from proof.tolerance import FLOOR, TOLERANCE


class Trainee:
    """A model that this process trains alone. run: a Run, or what else has its args, config,
    device, dtype and draw; make_optimizer(model, args), if the demo has one of its own.

    losses, norms   of each step
    gradients       {name: gradient} of the latest step, before clipping
    """

    def __init__(self, run):
        self.args, self.losses, self.norms = run.args, [], []
        self.model = initialize.build(run.config, run.args.seed, run.device, run.dtype, run.draw)
        self.parameters = list(self.model.parameters())
        make = getattr(run, "make_optimizer", None)
        if make is not None:
            self.optimizer = make(self.model, run.args)
        else:
            self.optimizer = make_optimizer(self.parameters, run.args)
        self.weights = {name: p.detach() for name, p in self.model.named()}

    def train(self, step, rows, target_count):
        """One step: see `backward`."""
        self.backward(rows, target_count)
        self.update(step)

    def backward(self, rows, target_count):
        """rows: (tokens, targets, samples). target_count: what divides the sum of the losses."""
        tokens, targets, samples = rows
        self.optimizer.zero_grad()
        options = dict(sample_ids=samples, starts=documents.starts_of(tokens, self.args))
        loss = self.model(tokens, targets=targets, target_count=target_count, **options)
        loss.backward()
        self.gradients = {name: p.grad.clone() for name, p in self.model.named()}
        self.losses.append(loss.item())

    def update(self, step):
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(step, self.args)
        norm = grad_norm(self.parameters)
        clip(self.parameters, norm, self.args.grad_clip)
        self.optimizer.step()
        rebalance(self.model)
        self.norms.append(norm.item())


class Proof(NamedTuple):
    """How far a run is from its reference, over so many steps.

    errors     {kind: largest relative difference}
    worst      {kind: the tensor with the largest difference}
    first_off, findings    on rank 0, if that is too much: see diagnosis.diagnose
    """

    steps: int
    errors: dict
    worst: dict
    first_off: str | None = None
    findings: list = []


class OneProcess:
    """The reference of a run: the same training in one process."""

    island, islands = 0, 1  # which of the references this rank is compared with, of how many
    has_diagnosis = True  # a proof that fails says where

    def train(self, run, steps):
        """[Trainee] of each island on rank 0; elsewhere [None]. All ranks call it."""
        return [one_process(run, steps) if run.rank == 0 else None]


def one_process(run, steps):
    """The Trainee of a run's steps. A diagnosis asks for its outputs and first_gradients."""
    alone, notes = Trainee(run), Notes()
    watch(alone.model, notes.output)
    for step in range(steps):
        notes.begin(on=True)
        [rows] = run.microbatches(step, pieces=1)
        alone.train(step, rows, run.target_count)
        if step == 0:
            alone.first_gradients = alone.gradients  # a step makes new ones
    alone.outputs = notes.outputs
    return alone


def prove(run, reference, notes):
    """Compare a run with its reference. All ranks call it, and get a Proof.

    Compared are the loss and norm of every step, all gradients of the last step and all weights
    after it, copies included. Rank 0 trains the reference and broadcasts it parameter by parameter;
    each rank compares the piece that it holds. notes: the run's diagnosis.Notes
    """
    steps = len(run.history)
    parameters = dict(notes.named())
    weights = {name: p.detach() for name, p in parameters.items()}
    tensors = {"grad": notes.gradients, "param": weights}
    trained = reference.train(run, steps)
    differences = {}  # {(kind, name): relative difference} of what this rank holds
    for island, alone in enumerate(trained):
        own = parameters if island == reference.island else {}
        whole = {"grad": alone.gradients, "param": alone.weights} if alone else {}
        for kind in tensors:
            differences |= compare_tensors(run, kind, whole.get(kind), tensors[kind], own)
    curves = [[(alone.losses, alone.norms) for alone in trained] if run.rank == 0 else None]
    dist.broadcast_object_list(curves, 0)
    curve = list(zip(*curves[0][reference.island]))  # (loss, norm) of each step
    for row, expected in zip(run.history, curve):
        for kind, value in zip(("loss", "grad_norm"), expected):
            differences[kind, row["step"]] = larger(abs(row[kind] - value) / abs(value))
    errors, worst = dict.fromkeys(("loss", "grad_norm", "grad", "param"), 0.0), {}
    for of_rank in run.gather(differences):
        for (kind, name), error in of_rank.items():
            if error > errors[kind]:
                errors[kind], worst[kind] = error, name
    worst = {kind: worst.get(kind, "") for kind in tensors}
    limits = TOLERANCE[run.precision]
    if not reference.has_diagnosis or all(errors[kind] <= limits[kind] for kind in errors):
        return Proof(steps, errors, worst)
    tensors["first"], first = notes.first_gradients, alone.first_gradients if alone else None
    differences |= compare_tensors(run, "first", first, tensors["first"], parameters)
    everyone = [None] * run.world if run.rank == 0 else None
    dist.gather_object(evidence(notes, differences, tensors, parameters), everyone)
    if run.rank > 0:
        return Proof(steps, errors, worst)
    return Proof(steps, errors, worst, *diagnose(run, everyone, alone, Trainee(run).weights))


def compare_tensors(run, kind, reference, tensors, parameters):
    """{(kind, name): relative difference} of each tensor that this rank holds from one process's.

    reference  {name: whole tensor} on rank 0, else None
    tensors    {name: this rank's piece}
    parameters {name: parameter}, whose placements say which piece that is
    """
    differences = {}
    largest = max(t.abs().max().item() for t in reference.values()) if reference else 0.0
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


def larger(*values):
    """The largest value. A NaN counts as infinite."""
    return max(math.inf if math.isnan(value) else value for value in values)
