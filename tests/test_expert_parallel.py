"""expert_parallel.py: kernels, capacity, counts. One process: test_copied.py and the demo."""

import json
import math
from types import SimpleNamespace

import torch
import torch.distributed as dist
from reference import batch

import expert_parallel as ep
import harness
import model as gpt
from harness import initialize, presets
from proof.ledger import Ledger
from receipts import expert_parallel as experts

SIZES = dict(layers=2, heads=4, width=32, context=12, vocab=61, balance_loss=0.3, z_loss=0.1)
CONFIGS = {
    "gelu": presets.configure(experts=4, **SIZES),
    # Does not divide by 2, 3 or 4
    "swiglu": presets.configure(family="llama", experts=5, shared=1, **SIZES),
    "sigmoid": presets.configure(
        family="llama", experts=6, top_k=3, shared=2, scores="sigmoid", bias_rate=0.01, **SIZES
    ),
}


def build(config, group, chunks=1, capacity=None, dtype=torch.float64):
    with torch.device("meta"):
        model = gpt.GPT(config)
    model = ep.parallelize_experts(model, group, capacity=capacity, chunks=chunks)
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


def dealt_out(config, capacity=None, chunks=1):
    """The same layer, its experts on all ranks."""
    moe = layer(config)
    model = SimpleNamespace(
        config=config, blocks={"1": SimpleNamespace(mlp=moe)}, parameters=moe.parameters
    )
    options = dict(capacity=capacity, chunks=chunks)
    return ep.parallelize_experts(model, dist.group.WORLD, **options).blocks["1"].mlp


def test_capacity_drops_and_counts(ranks):
    """What is beyond an expert's capacity adds nothing: first choices go first, then tokens."""
    config = presets.configure(**SIZES, experts=5)
    x = torch.randn(3, 1, 11, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(0))

    def dropped(rank, capacity):
        whole, moe = layer(config), dealt_out(config, capacity, chunks=2)
        rows = experts.RowCounter([moe])
        y = moe(x[rank])
        weights, chosen = whole.router(x[rank])
        room, count = [math.ceil(capacity * 2 * 11 / 5)] * 5, 0
        weights = weights[0].detach().clone()
        for choice in range(2):
            for t in range(11):
                e = chosen[0, t, choice]
                room[e] -= 1
                if room[e] < 0:
                    weights[t, choice], count = 0.0, count + 1
        expected = whole.dispatch.combine((x[rank, 0], weights, chosen[0]), whole.experts)
        torch.testing.assert_close(y[0], expected, rtol=1e-10, atol=1e-12)
        y.sum().backward()  # no rank hangs
        assert rows.assignments == 22 and rows.sent == 22 - count
        return count

    found = ranks(3, lambda rank: [dropped(rank, capacity) for capacity in (0.0, 0.5, 1.0, 8.0)])
    all_of_them, most, some, none = (sum(of_ranks) for of_ranks in zip(*found))
    assert all_of_them == 66 > most > some > 0 == none


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


def test_load_table():
    load = torch.tensor([[9, 3, 6, 6]])  # of 1 layer
    assert "  layer   0    150   50  100  100" in experts.load_table(load)
    assert " 0    0    0    0" in experts.load_table(0 * load)  # routers without a gradient


def test_the_script_proves_itself(script, tmp_path):
    out, text = tmp_path / "receipt.json", tmp_path / "text"
    text.write_text("to be or not to be, that is the question. " * 50)
    small = f"--layers 2 --width 32 --context 16 --data {text}"
    flags = "--nproc 3 --batch 12 --steps 3 --dtype float64 --experts 5 --shared 1 --bias-rate 0.01"
    code, said = script("expert_parallel", f"{small} {flags} --json {out}")
    assert code == 0 and "proven" in said and "layer   1" in said, said
    receipt = json.loads(out.read_text())
    assert receipt["ok"] and {r["op"] for r in receipt["sent"]} == {"all_reduce", "all_to_all"}
    assert max(receipt["max_error"].values()) < 1e-10
    code, said = script("expert_parallel", f"{small} --nproc 2 --steps 2 --capacity 1")
    assert code == 0 and "dropped" in said and "not compared" in said, said
    assert script("expert_parallel", f"{small} --nproc 4 --experts 3")[0] == 2
