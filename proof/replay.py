"""A step again, on one process, with one thing changed: what would have been recorded then. So a
cause becomes numbers to compare.

It needs the model's shape, its first weights, the settings, and each step's batch. A recording of
`train.py --record` has these, and so has a run. Gradients up to the step in question are those of
the right run.
"""

import contextlib
import dataclasses
import functools
import os
from types import SimpleNamespace

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from harness import initialize, inputs
from harness.optimizer import learning_rate
from harness.presets import parameter_shapes
from harness.refusal import Refused
from model import Config
from proof.recorder import Recorder, summary


def replay_of(recording):
    """The Replay of a recording, or None: a file of recorder.py and a run of another optimizer have
    none."""
    facts = recording.facts
    if facts.get("config") is None or facts["args"]["optimizer"] != "adamw":
        return None

    def tensors(step):
        path = os.path.join(recording.path, f"step-{step}.safetensors")
        try:
            inputs.check(path)
            return load_file(path)
        except (OSError, SafetensorError) as e:
            raise Refused(f"{path} can't be read: copy the recording's whole folder") from e

    config, first = Config(**facts["config"]), tensors(1)
    names = parameter_shapes(config)
    if f"data.{next(iter(names))}" not in first:  # a large model
        return None
    start = {name: first[f"data.{name}"] for name in names}
    batch = lambda step: [tensors(step)[name] for name in ("tokens", "targets")]  # noqa: E731
    return Replay(config, SimpleNamespace(**facts["args"]), start, batch)


class Replay:
    """start: {name: first weight}. batch: batch(step) gives its (tokens, targets), (B, T). Steps
    count from 1."""

    def __init__(self, config, args, start, batch):
        self.config, self.args, self.start, self.batch = config, args, start, batch
        self.like = next(iter(start.values()))

    def train(self, step, plant=None, batch=None, count=None, backward=True, **config):
        """(model, line) of a step: the gradients, and the line of a recording. May be changed:

        plant     plant(model) changes the model, and may return a context for forward
        batch     (tokens, targets) in place of the step's
        count     what the loss is divided by
        backward  False: without gradients
        config    fields of the model's Config
        """
        weights, config = self.weights(step), dataclasses.replace(self.config, **config)
        draw = lambda name, *_: weights[name]  # noqa: E731
        model = initialize.build(config, 0, self.like.device, self.like.dtype, draw)
        scope = plant(model) if plant else None
        modules = {name: name for name in ("embed", *(f"blocks.{i}" for i in model.blocks))}
        recorder = Recorder(os.devnull, model, None, modules)
        tokens, targets = batch or self.batch(step)
        with scope or contextlib.nullcontext():
            loss = model(tokens, targets=targets, target_count=count)
        if backward:
            loss.backward()
        line = {
            "scalars": {"loss": [loss.item()]},
            "outputs": {name: [values.tolist()] for name, values in recorder.outputs.items()},
            "grad": as_line({n: p.grad for n, p in model.named_parameters() if p.grad is not None}),
        }
        return model, line

    @functools.cache
    def gradients(self, step):
        """{name: gradient} of a step of the right run, before clipping."""
        model, _ = self.train(step)
        return {name: p.grad for name, p in model.named()}

    @functools.cache
    def weights(self, step):
        """{name: value} before a step of the right run."""
        return self.trained(step - 1) if step > 1 else self.start

    def trained(self, steps, **changed):
        """{name: weight} after so many steps of AdamW on the right run's gradients. May be changed:

        lr, beta1, beta2, eps, decay, clip  the settings; lr is a factor of the schedule's
        vectors    weight decay of vectors
        l2         the decay is added to the gradient
        corrected  moments are divided by 1 - beta^step
        late       by how many steps the schedule is late
        norms      norms(gradients): the norm by which each is clipped
        """
        settings = dict(lr=1.0, beta1=0.9, beta2=0.95, eps=1e-8, vectors=0.0, late=0)
        settings |= dict(decay=self.args.weight_decay, clip=self.args.grad_clip)
        settings |= dict(l2=False, corrected=True, norms=of_all)
        s = SimpleNamespace(**settings | changed)
        weights = {name: w.clone() for name, w in self.start.items()}
        first, second = dict.fromkeys(weights, 0.0), dict.fromkeys(weights, 0.0)
        for step in range(1, steps + 1):
            lr = s.lr * learning_rate(max(step - 1 - s.late, 0), self.args)
            of_first = 1 - s.beta1**step if s.corrected else 1.0
            of_second = 1 - s.beta2**step if s.corrected else 1.0
            gradients = self.gradients(step)
            for (name, g), norm in zip(gradients.items(), s.norms(list(gradients.values()))):
                w = weights[name]
                decay = s.decay if w.dim() > 1 else s.vectors
                if s.clip:
                    g = g * (s.clip / (norm + 1e-6)).clamp(max=1.0)
                if s.l2:
                    g = g + decay * w
                else:
                    w *= 1 - lr * decay
                first[name] = s.beta1 * first[name] + (1 - s.beta1) * g
                second[name] = s.beta2 * second[name] + (1 - s.beta2) * g * g
                w -= lr * (first[name] / of_first) / ((second[name] / of_second).sqrt() + s.eps)
        return weights


def norm_of(gradients):
    return torch.stack([g.norm() for g in gradients]).norm()


def of_all(gradients):
    return [norm_of(gradients)] * len(gradients)


def as_line(tensors):
    """{name: whole tensor}, as in a line of a recording."""
    return {name: [summary(x).tolist()] for name, x in tensors.items()}
