"""expert_parallel.py: kernels, counts. One process: test_copied.py and the demo."""

from types import SimpleNamespace

import torch
import torch.distributed as dist
from reference import batch

import expert_parallel as ep
import harness
from harness import families, initialize, presets
from proof.ledger import Ledger

SIZES = dict(layers=2, heads=4, width=32, context=12, vocab=61, balance_loss=0.3, z_loss=0.1)
CONFIGS = {
    "gelu": presets.configure(experts=4, **SIZES),
    # Does not divide by 2, 3 or 4
    "swiglu": presets.configure(family="llama", experts=5, shared=1, **SIZES),
    "sigmoid": presets.configure(
        family="llama", experts=6, top_k=3, shared=2, scores="sigmoid", bias_rate=0.01, **SIZES
    ),
}


def build(config, group, chunks=1, dtype=torch.float64):
    with torch.device("meta"):
        model = families.build(config)
    model = ep.parallelize_experts(model, group, chunks=chunks)
    return initialize.fill(model, 7, dtype=dtype, take=harness.take)


def test_float32_takes_the_grouped_kernel(ranks, monkeypatch):
    calls = []
    kernel = torch.nn.functional.grouped_mm
    monkeypatch.setattr(
        torch.nn.functional, "grouped_mm", lambda *a, **k: calls.append(a) or kernel(*a, **k)
    )

    def work(rank):
        whole, dealt = layer(config).float(), dealt_out(config, chunks=2).float()
        x = torch.randn(2, 6, 32, generator=torch.Generator().manual_seed(rank))
        expected = whole(x)
        calls.clear()
        torch.testing.assert_close(dealt(x), expected, rtol=2e-4, atol=2e-4)
        assert len(calls) == 3 * 2  # projections, chunks

    for config in (CONFIGS["swiglu"], CONFIGS["sigmoid"]):
        ranks(2, work)


def layer(config):
    moe = initialize.build(config, 7, dtype=torch.float64).blocks["1"].mlp
    for p in moe.parameters():
        p.data *= 10  # so that the router has a mind of its own
    return moe


def dealt_out(config, chunks=1):
    """The same layer, its experts on all ranks."""
    moe = layer(config)
    model = SimpleNamespace(
        config=config, blocks={"1": SimpleNamespace(mlp=moe)}, parameters=moe.parameters
    )
    return ep.parallelize_experts(model, dist.group.WORLD, chunks=chunks).blocks["1"].mlp


def test_counts_are_read_once_a_layer(ranks, monkeypatch):
    """A read makes the host wait. The receipt holds the bytes that are sent against the counts."""
    reads = []
    tolist, item = torch.Tensor.tolist, torch.Tensor.item
    monkeypatch.setattr(torch.Tensor, "tolist", lambda t: reads.append("tolist") or tolist(t))
    monkeypatch.setattr(torch.Tensor, "item", lambda t: reads.append("item") or item(t))

    def work(rank):
        model = build(CONFIGS["swiglu"], dist.group.WORLD, chunks=2, dtype=torch.float32)
        tokens, targets, samples, count = batch(rank)
        with Ledger({"ep": dist.group.WORLD}) as ledger:
            model(tokens, targets=targets, target_count=count).backward()
        # Layers x (counts, chunks x (dispatch, combine) x (forward, backward))
        assert ledger.sent["all_to_all", "ep"][0] == 2 * (1 + 2 * 4)
        assert reads == ["tolist"] * 2

    ranks(3, work)


def test_no_group_is_the_whole_world(ranks):
    def work(rank):
        model = ep.parallelize_experts(initialize.build(CONFIGS["gelu"], 7), None)
        for name, p in model.named():
            cuts = {0: (dist.group.WORLD, 2 * rank, 2)} if ".experts." in name else {}
            assert getattr(p, "placement", {"cuts": {}})["cuts"] == cuts, name

    ranks(2, work)
