"""expert_parallel.py against one process."""

import json
import math
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from reference import STEPS, assert_ranks, batch, equals_one_process, train, train_rank

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
    "switch": presets.configure(experts=6, top_k=1, renormalize=False, **SIZES),
    "sigmoid": presets.configure(
        family="llama", experts=6, top_k=3, shared=2, scores="sigmoid", bias_rate=0.01, **SIZES
    ),
    "dropout": presets.configure(experts=4, dropout=0.2, **SIZES),
}


def build(config, group, chunks=1, capacity=None, dtype=torch.float64):
    with torch.device("meta"):
        model = gpt.GPT(config)
    return initialize.fill(
        ep.parallelize(model, group, capacity, chunks), 7, dtype=dtype, take=harness.take
    )


def train_parallel(
    config, kind, chunks=1, accumulate=2, shares=None, dtype=torch.float64, check=True
):
    """shares: how many of the batch's 12 rows each rank has; default as equal as can be. check: the
    gradients' norm is one process's."""
    group = dist.group.WORLD
    model = build(config, group, chunks, dtype=dtype)
    rows = torch.arange(12)
    parts = rows.split(shares) if shares else rows.tensor_split(dist.get_world_size())
    norms = []

    def finish():
        ep.sum_gradients(model.parameters(), group)
        norms.append(harness.grad_norm(list(model.parameters()), [group]))

    def take_step(optimizer):
        optimizer.step()
        gpt.rebalance(model, lambda load: dist.all_reduce(load, group=group))

    given = dict(finish=finish, take_step=take_step)
    result = train_rank(model, kind, parts[dist.get_rank()], accumulate, **given)
    split = {name.split(".")[-1] for name, cuts in result[1].items() if cuts}
    assert split and split <= {"gate", "up", "down"}
    _, gradients, _ = train(config, kind)
    norm = torch.stack([g.norm() for g in gradients.values()]).norm()
    tolerance = 1e-10 if dtype == torch.float64 else 2e-4
    if check:
        torch.testing.assert_close(norms[-1], norm, rtol=tolerance, atol=0, check_dtype=False)
    return result


test_equals_one_process = equals_one_process(
    train_parallel,
    {
        1: [("swiglu", "sgd", 2)],
        2: [("gelu", "adamw"), ("sigmoid", "sgd", 4), ("sigmoid", "adamw", 4)],
        3: [
            ("swiglu", "sgd", 2),
            ("swiglu", "adamw", 2),
            ("dropout", "sgd", 2, 1),  # no accumulation
        ],
        4: [
            ("gelu", "sgd", 3),
            ("switch", "sgd", 2),
            # One rank has no sequence at all, one none in the second micro-batch
            ("swiglu", "adamw", 3, 2, [7, 0, 1, 4]),
        ],
    },
    CONFIGS,
)


def test_float32_takes_the_grouped_kernel(ranks, monkeypatch):
    calls = []
    kernel = torch.nn.functional.grouped_mm
    monkeypatch.setattr(
        torch.nn.functional, "grouped_mm", lambda *a, **k: calls.append(a) or kernel(*a, **k)
    )

    def work(rank):
        result = train_parallel(CONFIGS["swiglu"], "sgd", 2, dtype=torch.float32)
        # Projections, layers, chunks, steps, micro-batches
        assert len(calls) == 3 * 2 * 2 * STEPS * 2
        return result

    losses, grads, weights = train(CONFIGS["swiglu"], "sgd")
    rounded = [{n: t.float() for n, t in d.items()} for d in (grads, weights)]
    assert_ranks(ranks(2, work), (losses, *rounded), 2e-4)


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
    return ep.parallelize(model, dist.group.WORLD, capacity, chunks).blocks["1"].mlp


@pytest.mark.parametrize("chunks", [1, 3])
@pytest.mark.parametrize(
    "tokens, favourite",
    [([1, 0, 0], None), ([0, 0, 7], None), ([5, 3, 4], 4), ([5, 0, 2], 0), ([0, 0, 0], None)],
)
def test_few_tokens_and_a_favourite_expert(ranks, tokens, favourite, chunks):
    """One layer: a single token, none at all, ranks without any, everything to one expert and the
    rest empty."""
    config = presets.configure(**SIZES, experts=5, top_k=1, renormalize=False)
    x = torch.randn(
        sum(tokens), 32, dtype=torch.float64, generator=torch.Generator().manual_seed(0)
    )

    def results(moe, x):
        if favourite is not None:
            moe.router.choice_bias[favourite] = 9.0
        x = x.clone().requires_grad_()
        y = moe(x.unsqueeze(1), max(1, sum(tokens)))
        y.square().sum().backward()
        return (
            y.detach().squeeze(1),
            x.grad,
            {n: p.grad for n, p in moe.named_parameters()},
            moe.router.load.tolist(),
        )

    def work(rank):
        moe = dealt_out(config, chunks=chunks)
        return results(moe, x.split(tokens)[rank])

    y, grad, grads, load = results(layer(config), x)
    ours = ranks(3, work)
    close = dict(rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(torch.cat([r[0] for r in ours]), y, **close)
    torch.testing.assert_close(torch.cat([r[1] for r in ours]), grad, **close)
    for name in grads:
        if name.startswith("experts"):
            torch.testing.assert_close(torch.cat([r[2][name] for r in ours]), grads[name], **close)
        else:
            torch.testing.assert_close(sum(r[2][name] for r in ours), grads[name], **close)
    assert [sum(column) for column in zip(*(r[3] for r in ours))] == load
    assert favourite is None or load[favourite] == sum(tokens)


def test_all_to_all_and_its_backward(ranks):
    table = torch.tensor([[2, 0, 3], [1, 4, 0], [0, 2, 5]])  # table[a][b] rows go from a to b
    torch.manual_seed(0)
    rows = [torch.randn(n, 6, dtype=torch.float64) for n in table.sum(1).tolist()]
    factors = [torch.randn(n, 6, dtype=torch.float64) for n in table.sum(0).tolist()]

    def work(rank):
        x = rows[rank].clone().requires_grad_()
        sizes = table[rank].tolist(), table[:, rank].tolist()
        y = ep.AllToAll.apply(x, *sizes, dist.group.WORLD)
        for _ in range(2):  # each way is as good a second time
            x.grad = None
            (y * factors[rank]).sum().backward(retain_graph=True)
        return y.detach(), x.grad

    pieces = [r.split(t.tolist()) for r, t in zip(rows, table)]
    back = [f.split(t.tolist()) for f, t in zip(factors, table.t())]
    for rank, (y, grad) in enumerate(ranks(3, work)):
        assert torch.equal(y, torch.cat([pieces[a][rank] for a in range(3)]))
        assert torch.equal(grad, torch.cat([back[b][rank] for b in range(3)]))


@pytest.mark.parametrize("chunks", [1, 3])
def test_equals_the_plain_dispatch(ranks, chunks):
    """Two of three ranks have experts that nobody chose, one has no token."""
    sizes, own, k = [2, 1, 3], [5, 0, 7], 2
    g = torch.Generator().manual_seed(0)
    matrices = torch.randn(6, 4, 4, generator=g, dtype=torch.float64)
    inputs = torch.randn(12, 4, generator=g, dtype=torch.float64)
    scores = torch.randn(12, 4, generator=g, dtype=torch.float64)  # of the first 4 experts

    def work(rank):
        results = []
        for plain in (True, False):
            x = inputs.split(own)[rank].clone().requires_grad_()
            shard = matrices.split(sizes)[rank].clone().requires_grad_()
            score = scores.split(own)[rank].clone().requires_grad_()
            weights, chosen = score.topk(k)

            def mlps(rows, counts):
                parts = rows.split(counts.tolist())
                return torch.cat([part @ matrix for part, matrix in zip(parts, shard)])

            if plain:
                y = ep.plain_dispatch(x, weights, chosen, mlps, sizes, dist.group.WORLD)
            else:
                dispatch = ep.ExpertDispatch(sizes, dist.group.WORLD, chunks=chunks)
                y = dispatch(x, weights, chosen, mlps)
            y.square().sum().backward()
            results.append((y.detach(), x.grad, shard.grad, score.grad))
        torch.testing.assert_close(*results, rtol=1e-12, atol=1e-14)

    ranks(3, work)


@pytest.mark.parametrize("capacity", [0.5, 1.0, 8.0, 0.0])
def test_capacity_drops_and_counts(ranks, capacity):
    """What is beyond an expert's capacity on its rank adds nothing: first choices go first, then
    earlier tokens."""
    config = presets.configure(**SIZES, experts=5)
    x = torch.randn(3, 1, 11, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(0))

    def work(rank):
        whole, moe = layer(config), dealt_out(config, capacity, chunks=2)
        rows = experts.RowCounter([moe])
        y = moe(x[rank])
        weights, chosen = whole.router(x[rank])
        room, dropped = [math.ceil(capacity * 2 * 11 / 5)] * 5, 0
        weights = weights[0].detach().clone()
        for choice in range(2):
            for t in range(11):
                e = chosen[0, t, choice]
                room[e] -= 1
                if room[e] < 0:
                    weights[t, choice], dropped = 0.0, dropped + 1
        expected = whole.dispatch(x[rank, 0], weights, chosen[0], whole.experts, lambda: None)
        torch.testing.assert_close(y[0], expected, rtol=1e-10, atol=1e-12)
        y.sum().backward()  # no rank hangs
        assert rows.assignments == 22 and rows.sent == 22 - dropped
        return dropped

    dropped = sum(ranks(3, work))
    assert dropped == 66 if capacity == 0 else dropped == 0 if capacity == 8 else 0 < dropped < 66


def test_sends_what_the_counts_say_and_reads_them_once(ranks, monkeypatch):
    reads = []
    tolist, item = torch.Tensor.tolist, torch.Tensor.item
    monkeypatch.setattr(torch.Tensor, "tolist", lambda t: reads.append("tolist") or tolist(t))
    monkeypatch.setattr(torch.Tensor, "item", lambda t: reads.append("item") or item(t))

    def work(rank):
        group, config = dist.group.WORLD, CONFIGS["swiglu"]
        model = build(config, group, chunks=2, dtype=torch.float32)
        tokens, targets, samples, count = batch(rank)
        ledger = Ledger({"ep": group})
        ledger.watch(model.parameters())
        with ledger:
            model(tokens, targets=targets, target_count=count).backward()
        return (
            ledger.sent["all_to_all", "ep"],
            [b.mlp.router.load for b in model.blocks.values()],
            reads,
        )

    results = ranks(3, work)
    for rank, (sent, _, reads_here) in enumerate(results):
        mine = slice(*[(0, 2), (2, 4), (4, 5)][rank])
        travel = 0
        for layers in zip(*(rows for _, rows, _ in results)):
            out, back = layers[rank].sum(), sum(r[mine].sum() for r in layers)
            travel += (
                2 * (out + back - 2 * layers[rank][mine].sum()) * 32 * 4
                + (5 - (mine.stop - mine.start)) * 2 * 8
            )
        assert abs(sent[2] - travel) < 1e-6
        # Layers x (counts, chunks x (dispatch, combine) x (forward, backward))
        assert sent[0] == 2 * (1 + 2 * 4)
        assert reads_here == ["tolist"] * 2  # once a layer


def test_a_mix_up_of_experts_is_caught(ranks, monkeypatch):
    """The comparison with one process can fail: rows come back unsorted."""
    flat = lambda t, *args, output_size: torch.zeros(output_size, dtype=torch.int64)  # noqa: E731
    monkeypatch.setattr(torch.Tensor, "repeat_interleave", flat)
    results = ranks(2, lambda rank: train_parallel(CONFIGS["gelu"], "sgd", check=False))
    with pytest.raises(AssertionError):
        assert_ranks(results, train(CONFIGS["gelu"], "sgd"))


def test_cuts_real_weights_too(ranks):
    def work(rank):
        model = ep.parallelize(
            initialize.build(CONFIGS["swiglu"], 7, dtype=torch.float64), dist.group.WORLD
        )
        filled = build(CONFIGS["swiglu"], dist.group.WORLD)
        # The whole is freed
        assert all(p.untyped_storage().nbytes() == p.numel() * 8 for p in model.parameters())
        return all(torch.equal(a, b) for (_, a), (_, b) in zip(model.named(), filled.named()))

    assert ranks(2, work) == [True, True]


def test_no_group_is_the_whole_world(ranks):
    def work(rank):
        model = ep.parallelize(initialize.build(CONFIGS["gelu"], 7), None)
        world = dist.group.WORLD
        for name, p in model.named():
            place = ep.placement(p)
            if ".experts." in name:
                assert place["cuts"] == {0: (world, 2 * rank, 2)} and place["copies"] == [], name
            else:
                assert place["cuts"] == {} and place["copies"] == [world], name

    ranks(2, work)


def test_pictures(tmp_path):
    load = torch.tensor([[[6, 0, 3, 3]], [[3, 3, 3, 3]]])  # 2 steps, 1 layer
    assert "  layer   0    150   50  100  100" in experts.load_table(load)
    assert " 0    0    0    0" in experts.load_table(0 * load)  # routers without a gradient
    pytest.importorskip("matplotlib")
    experts.plot(tmp_path / "load", load, [1, 3])
    assert (tmp_path / "load.png").stat().st_size > 1000


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
