"""benchmarks/vs_torch.py: a ratio only where both sides got the same."""

import types

import pytest
import torch

import sequence_parallel
from benchmarks import vs_torch
from harness.rank import Rank


def row(rank, name):
    run = Rank(types.SimpleNamespace(turns=2), rank, 2, torch.device("cpu"))
    found = vs_torch.compare(run, name)
    vs_torch.line(found)
    return found


@pytest.fixture(autouse=True)
def small(monkeypatch):
    model = "tiny", dict(layers=2, heads=4, kv_heads=4, width=32, context=256, vocab=256)
    monkeypatch.setitem(vs_torch.MODELS, "cpu", model)
    monkeypatch.setattr(vs_torch, "STEPS", 1)
    monkeypatch.setitem(vs_torch.PAIRS, "muon", vs_torch.PAIRS["muon"]._replace(fields={}))


def half_a_gradient(monkeypatch):
    finish = vs_torch.ddp.DDP.finish

    def wrong(self):
        finish(self)
        for bucket in self.buckets:
            bucket.flat.mul_(0.5)

    monkeypatch.setattr(vs_torch.ddp.DDP, "finish", wrong)


def partial_gradients(monkeypatch):
    monkeypatch.setattr(sequence_parallel, "reduce_partial", lambda parameters: None)


@pytest.mark.parametrize("name", ["ddp", "muon", "experts"])
def test_a_pair_that_is_equal_gets_a_ratio(ranks, name):
    for found in ranks(2, row, name):
        assert "failed" not in found and len(found["ratio"]) == 3


@pytest.mark.parametrize("name, plant", [("ddp", half_a_gradient), ("sequence", partial_gradients)])
def test_a_wrong_gradient_gets_none(ranks, monkeypatch, name, plant):
    plant(monkeypatch)
    for found in ranks(2, row, name):
        assert "differs, with sgd" in found["failed"] and "ratio" not in found
