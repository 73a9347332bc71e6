"""tensor_parallel.py against one process, and against PyTorch's DTensor."""

import dataclasses

import torch
import torch.distributed as dist
from reference import CONFIGS, batch, equals_one_process, make_optimizer, piece, train_rank

import harness
import model as gpt
import tensor_parallel as tp
from harness import initialize, presets
from proof.ledger import Ledger
from receipts import tensor_parallel as by_paper
from receipts.formulas import Group, Sizes
from trainer import sampling


def build(config, group, seed=7):
    with torch.device("meta"):
        model = gpt.GPT(config)
    return initialize.fill(
        tp.parallelize(model, group), seed, dtype=torch.float64, take=harness.take
    )


def train_parallel(config, kind, **options):
    return train_rank(build(config, dist.group.WORLD), kind, **options)


test_equals_one_process = equals_one_process(
    train_parallel,
    {
        1: [("llama", "sgd")],
        2: [("grouped", "sgd")],
        3: [("gpt2, 3 kv-heads", "adamw"), ("llama, 3 kv-heads", "adamw")],
        4: [("gpt2", "adamw"), ("llama", "sgd"), ("dropout", "sgd")],
    },
)


def test_a_rank_with_nothing_but_padding(ranks):
    # 5 = 2 + 2 + 1 + 0 tokens; batches of larger ids are folded into them
    config = dataclasses.replace(CONFIGS["gpt2"], vocab=5)

    def work(rank):
        model = build(config, dist.group.WORLD)
        tokens, targets, samples, count = batch(0, vocab=5)
        loss = model(tokens, targets=targets, target_count=count)
        loss.backward()
        return loss.item(), model.embed.token.weight.grad

    whole = initialize.build(config, 7, dtype=torch.float64)
    tokens, targets, samples, count = batch(0, vocab=5)
    loss = whole(tokens, targets=targets, target_count=count)
    loss.backward()
    for rank, (ours, grad) in enumerate(ranks(4, work)):
        assert abs(ours - loss.item()) < 1e-12
        torch.testing.assert_close(
            grad, tp.shard_tensor(whole.embed.token.weight.grad, 0, rank, 4), rtol=1e-10, atol=1e-12
        )


def test_shards_differ_and_padding_stays_zero(ranks):
    def work(rank):
        group = dist.group.WORLD
        model = build(CONFIGS["gpt2"], group)
        optimizer = make_optimizer(model.parameters(), "adamw")
        for step in range(3):
            tokens, targets, samples, count = batch(step)
            optimizer.zero_grad()
            model(tokens, targets=targets, target_count=count).backward()
            optimizer.step()
        return {n: (p.detach(), tp.split_over(p, group)) for n, p in model.named()}

    results = ranks(4, work)
    for name in results[0]:
        values, split = [r[name][0] for r in results], results[0][name][1]
        equal = [torch.equal(values[0], v) for v in values[1:]]
        assert not any(equal) if split else all(equal), name
    # Qkv, up: 2 each; proj, down; and the vocabulary
    assert sum(split for _, split in results[0].values()) == 3 * 6 + 1
    last = results[3]["embed.token.weight"][0]  # 61 rows in pieces of 16: the last has 13
    assert last.shape[0] == 16 and last[:13].abs().min() > 0 and last[13:].abs().max() == 0


def test_four_all_reduces_a_block(ranks):
    """Two forward, two backward, and as many bytes as the formula says."""

    def work(rank, layers, family):
        group = dist.group.WORLD
        config = presets.configure(
            family=family, layers=layers, heads=4, kv_heads=4, width=32, context=12, vocab=61
        )
        model = build(config, group)
        tokens, targets, samples, count = batch(0)
        ledger = Ledger({"tp": group})
        ledger.watch(model.parameters())
        with ledger:
            loss = model(tokens, targets=targets, target_count=count)
        forward = ledger.sent["all_reduce", "tp"][0]
        with ledger:
            loss.backward()
        sizes = Sizes(config, *tokens.shape, e=8, tp=4)
        sent, _ = by_paper.expected(sizes, Group("tp", 4), scalars=0)
        return forward, *ledger.sent["all_reduce", "tp"], sent["all_reduce", "tp"][0]

    for family in ("gpt2", "llama"):
        one, three = (ranks(4, work, layers, family)[0] for layers in (1, 3))
        assert three[0] - one[0] == 2 * 2 and three[1] - one[1] == 2 * 4
        assert one[3] == one[4] and three[3] == three[4]


def test_cuts_real_weights_too(ranks):
    def work(rank):
        model = initialize.build(CONFIGS["llama"], 7, dtype=torch.float64)
        cut = tp.parallelize(model, dist.group.WORLD)
        filled = build(CONFIGS["llama"], dist.group.WORLD)
        return all(torch.equal(a, b) for (_, a), (_, b) in zip(cut.named(), filled.named()))

    assert ranks(2, work) == [True, True]


def test_parameters_held_is_what_is_held(ranks):
    def work(rank, config):
        model = build(config, dist.group.WORLD)
        # The whole is freed
        assert all(p.untyped_storage().nbytes() == p.numel() * 8 for p in model.parameters())
        return sum(p.numel() for p in model.parameters())

    for config in (
        CONFIGS["gpt2"],
        CONFIGS["grouped"],
        dataclasses.replace(CONFIGS["llama"], hidden=51, vocab=7),
    ):
        assert ranks(2, work, config) == [presets.parameters_held(config, 2, config.layers)] * 2
        assert presets.parameters_held(config, 1, config.layers) == presets.parameter_count(config)


def test_full_logits_only_when_asked(ranks):
    config = CONFIGS["gpt2"]

    def work(rank):
        group = dist.group.WORLD
        logits = build(config, group)(batch(0)[0])
        return logits.shape[-1], sampling.gather_logits(logits, config.vocab, group)

    whole = initialize.build(config, 7, dtype=torch.float64)(batch(0)[0])
    for width, logits in ranks(4, work):
        assert width == 16
        torch.testing.assert_close(logits, whole, rtol=1e-12, atol=1e-12)


def test_cross_entropy_of_large_and_16_bit_logits(ranks):
    def work(rank, dtype):
        full = (torch.randn(6, 10, generator=torch.Generator().manual_seed(0)) * 300).to(dtype)
        targets = torch.tensor([0, 9, 4, -1, 7, 5])
        part = tp.shard_tensor(full, 1, rank, 4).requires_grad_()
        loss = tp.VocabParallelCrossEntropy(10, dist.group.WORLD)(
            part.unsqueeze(0), targets.unsqueeze(0), 5
        )
        loss.backward()
        return loss.detach(), part.grad

    for dtype, tolerance in ((torch.float64, 1e-12), (torch.bfloat16, 1e-2)):
        full = (
            (torch.randn(6, 10, generator=torch.Generator().manual_seed(0)) * 300)
            .to(dtype)
            .double()
            .requires_grad_()
        )
        loss = torch.nn.functional.cross_entropy(
            full, torch.tensor([0, 9, 4, -1, 7, 5]), ignore_index=-1
        )
        loss.backward()
        for rank, (ours, grad) in enumerate(ranks(4, work, dtype)):
            torch.testing.assert_close(
                ours.double(), loss.detach(), rtol=1e-6 if dtype != torch.float64 else 1e-12, atol=0
            )
            torch.testing.assert_close(
                grad.double(),
                tp.shard_tensor(full.grad, 1, rank, 4),
                rtol=tolerance,
                atol=tolerance,
            )


def test_equals_dtensor(ranks):
    """The same weights after 5 steps as PyTorch's parallelize_module on the same blocks."""
    # Imported here: once, and not in every rank
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    config = CONFIGS["llama"]

    def theirs(rank):
        model = initialize.build(config, 7, dtype=torch.float64)
        mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (2,))
        plan = {}
        for i in range(config.layers):
            for name in ("attn.qkv", "mlp.gate", "mlp.up"):
                plan[f"blocks.{i}.{name}"] = ColwiseParallel()
            for name in ("attn.proj", "mlp.down"):
                plan[f"blocks.{i}.{name}"] = RowwiseParallel()
        parallelize_module(model, mesh, plan)
        optimizer = make_optimizer(model.parameters(), "sgd")
        for step in range(5):
            tokens, targets, samples, count = batch(step)
            optimizer.zero_grad()
            model(tokens, targets=targets, target_count=count).backward()
            optimizer.step()
        return {
            n: (p.full_tensor() if isinstance(p, DTensor) else p).detach() for n, p in model.named()
        }

    def work(rank):
        (_, _, weights), cuts = train_parallel(config, "sgd", accumulate=1, steps=5)
        return weights, cuts, theirs(rank)

    for weights, cuts, their in ranks(2, work):
        for name, p in weights.items():
            full = piece(their[name], cuts[name])
            torch.testing.assert_close(p, full, rtol=1e-12, atol=1e-12)
