"""sequence_parallel.py against one process, and against plain tensor parallelism."""

import dataclasses

import pytest
import torch
import torch.distributed as dist
from reference import CONFIGS, batch, equals_one_process, train_rank

import harness
import model as gpt
import sequence_parallel as sp
import tensor_parallel as tp
from harness import initialize, presets
from proof.ledger import Ledger, saved_bytes
from receipts import sequence_parallel as by_paper
from receipts import tensor_parallel
from receipts.formulas import Group, Sizes, block_bytes, parameters_of


def build(config, group, keep=True, parallelize=sp.parallelize):
    with torch.device("meta"):
        model = gpt.GPT(config)
    return initialize.fill(
        parallelize(model, group, keep), 7, dtype=torch.float64, take=harness.take
    )


def train_parallel(config, kind, keep, finish=sp.reduce_partial):
    model = build(config, dist.group.WORLD, keep)
    return train_rank(model, kind, finish=lambda: finish(list(model.parameters())))


WAYS = [("sgd", True), ("adamw", False)]
NINE = {"llama, 9 tokens": dataclasses.replace(CONFIGS["llama, 3 kv-heads"], context=9)}
NINE["gpt2, a token each"] = dataclasses.replace(CONFIGS["gpt2, 3 kv-heads"], context=3)

test_equals_one_process = equals_one_process(
    train_parallel,
    {
        1: [("llama", *way) for way in WAYS],
        2: [(name, *way) for name in ("grouped", "dropout") for way in WAYS],
        3: [
            ("gpt2, 3 kv-heads", "sgd", True),
            ("gpt2, a token each", "sgd", False),
            ("llama, 9 tokens", "sgd", False),
        ],
        4: [(name, *way) for name in ("gpt2", "llama") for way in WAYS],
    },
    CONFIGS | NINE,
)


def test_a_partial_gradient_left_so_is_caught(ranks):
    """The comparison above must see each kind of parameter on the split stream whose gradient is
    not completed."""
    names = ["attn_norm.weight", "mlp_norm.bias", "proj.bias", "down.bias", "position", "head.norm"]

    def gradients(name):
        model = build(CONFIGS["gpt2"], dist.group.WORLD)
        forgotten = {p for n, p in model.named() if name in n}
        assert forgotten
        tokens, targets, samples, count = batch(0)
        model(tokens, targets=targets, target_count=count).backward()
        sp.reduce_partial([p for p in model.parameters() if p not in forgotten])
        return {n: p.grad for n, p in model.named() if not p.placement["cuts"]}

    whole = initialize.build(CONFIGS["gpt2"], 7, dtype=torch.float64)
    tokens, targets, samples, count = batch(0)
    whole(tokens, targets=targets, target_count=count).backward()
    for results in ranks(2, lambda rank: [gradients(name) for name in names]):
        for name, grads in zip(names, results, strict=True):
            for n, p in whole.named():
                if n in grads:
                    same = torch.allclose(grads[n], p.grad, rtol=1e-10, atol=1e-10)
                    assert same == (name not in n), (name, n)


@pytest.mark.parametrize("keep", [True, False])
@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_bytes_sent(ranks, family, keep):
    """As many as the formulas say; a block's as in tensor parallelism, and a quarter more where
    inputs are gathered again."""
    tokens, targets, samples, count = batch(0, context=12)

    def work(rank, layers):
        group = dist.group.WORLD
        config = presets.configure(
            family=family, layers=layers, heads=4, kv_heads=4, width=32, context=12, vocab=61
        )
        model = build(config, group, keep)
        ledger = Ledger({"tp": group})
        ledger.watch(model.parameters())
        with ledger:
            loss = model(tokens, targets=targets, target_count=count)
        forward = {op: row[0] for (op, _), row in ledger.sent.items()}
        with ledger:
            loss.backward()
        sent = {op: row[2] for (op, _), row in ledger.sent.items()}
        backward = {op: row[0] - forward[op] for (op, _), row in ledger.sent.items()}
        ledger.watch([])
        with ledger:
            sp.reduce_partial(model.parameters())
        [((op, _), (calls, _, wire))] = ledger.sent.items()
        sizes = Sizes(config, *tokens.shape, e=8, tp=4, sp=True, gather_again=not keep)
        partial = sum(p.elements for p in parameters_of(sizes) if not p.cut)
        assert (op, calls, wire) == ("all_reduce", 1, 2 * 3 / 4 * partial * 8)
        assert partial == sum(p.numel() for p in model.parameters() if not tp.split_over(p, group))
        table, _ = by_paper.expected(sizes, Group("tp", 4), "all_to_all", 0, partial=False)
        return sent, {op: size for (op, _), (size, _) in table.items()}, forward, backward

    (sent, formula, forward, backward), (three, three_formula, *_) = (
        ranks(4, work, layers)[0] for layers in (1, 3)
    )
    for measured, expected in ((sent, formula), (three, three_formula)):
        assert measured == expected
    assert forward == {"all_gather": 3, "all_to_all": 3, "all_reduce": 2}
    assert backward == {"all_gather": 3 if keep else 6, "all_to_all": 3, "all_reduce": 0}
    block = (sum(three.values()) - sum(sent.values())) / 2
    plain = []
    for layers in (2, 1):
        sizes = Sizes(presets.configure(width=32, layers=layers), len(tokens), 12, e=8)
        table, _ = tensor_parallel.expected(sizes, Group("tp", 4))
        plain.append(table["all_reduce", "tp"][0])
    plain = plain[0] - plain[1]
    assert block == plain * (1 if keep else 10 / 8)


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_what_a_block_keeps(ranks, family):
    """The residual stream and the norms' results are kept in pieces; gathered inputs only where
    asked for."""
    config = presets.configure(
        family=family, layers=2, heads=4, kv_heads=4, width=32, context=16, vocab=61
    )
    tokens = batch(0, context=16)[0]

    def work(rank):
        def plain(model, group, keep):
            return tp.parallelize(model, group)

        ways = (plain, None), (sp.parallelize, True), (sp.parallelize, False)
        models = [build(config, dist.group.WORLD, keep, parallelize) for parallelize, keep in ways]
        return [saved_bytes(model, model.blocks["1"], tokens) for model in models]

    plain, kept, again = ranks(4, work)[0]
    each = tokens.numel() * 32 * 8  # (B, T, C)
    # The norms' inputs and results: 4 whole; 2 whole and 2 pieces; 4 pieces. On a CPU RMSNorm keeps
    # its input divided by its size, too; and each norm has one or two statistics a token
    inputs = 2 * each * (2 if family == "llama" else 1)
    assert plain - kept == pytest.approx(inputs * 3 / 4, rel=0.07)
    assert kept - again == 2 * each * 3 / 4
    if family == "gpt2":
        one = block_bytes(Sizes(config, *tokens.shape, e=8))
        assert again == pytest.approx(one / 4, rel=0.05)


def test_gathered_inputs_are_freed(ranks):
    """No tensor of all tokens and the whole width outlives the forward pass, but for those that
    `keep` keeps."""

    def work(rank, keep):
        model, whole = build(CONFIGS["llama"], dist.group.WORLD, keep), []
        tokens, targets, samples, count = batch(0)
        with torch.autograd.graph.saved_tensors_hooks(
            lambda t: whole.append(t.shape) or t, lambda t: t
        ):
            model(tokens, targets=targets, target_count=count)
        return sum(shape.numel() == tokens.numel() * 32 for shape in whole)

    assert ranks(4, work, False) == [0] * 4
    assert min(ranks(4, work, True)) > 0


def test_cuts_real_weights_too_and_names_stay(ranks):
    def work(rank, keep):
        model = initialize.build(CONFIGS["gpt2"], 7, dtype=torch.float64)
        names = [n for n, _ in model.named()]
        cut = sp.parallelize(model, dist.group.WORLD, keep)
        filled = build(CONFIGS["gpt2"], dist.group.WORLD, keep)
        assert sorted(n for n, _ in cut.named()) == sorted(names)
        return all(
            torch.equal(a, b) for (_, a), (_, b) in zip(cut.named(), filled.named(), strict=True)
        )

    for keep in (True, False):
        assert ranks(2, work, keep) == [True, True]


def test_reduce_scatter(ranks, monkeypatch):
    """16-bit numbers are added up like the sum in 32 bits, rounded once; and the call made on other
    backends fits."""
    x = torch.randn(4, 2, 8, 3, generator=torch.Generator().manual_seed(0))

    def work(rank, x):
        return sp.reduce_scatter(x[rank], dist.group.WORLD), tp.shard_tensor(
            x.float().sum(0).to(x.dtype), 1, rank, 4
        )

    for ours, expected in ranks(4, work, x.bfloat16()):
        assert torch.equal(ours, expected)
    monkeypatch.setattr(dist, "get_backend", lambda group: "another")
    for ours, expected in ranks(4, work, x):
        torch.testing.assert_close(ours, expected)


def test_a_sequence_that_does_not_divide_is_refused(script):
    flags = "--nproc 3 --heads 3 --width 24 --layers 1 --context 10 --quiet"
    code, said = script("sequence_parallel", flags)
    assert code == 2 and "--context 10 does not divide over 3 ranks: use --context 12" in said
