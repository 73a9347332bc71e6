"""sequence_parallel.py against one process, and against plain tensor parallelism."""

import pytest
import torch
import torch.distributed as dist
from reference import batch

import harness
import sequence_parallel as sp
import tensor_overlap
import tensor_parallel as tp
from harness import families, initialize, presets
from proof.ledger import storage_bytes
from receipts import sequence_parallel as by_paper
from receipts import tensor_parallel
from receipts.formulas import Group, Sizes, all_sent, block_bytes
from trainer.tokens_on_gloo import exchange_tokens


def saved_bytes(model, block, *args, **kwargs):
    """Bytes without parameters that `block` keeps for backward in model(*args, **kwargs)."""
    saved = []

    def note(tensor):
        saved.append(tensor)
        return tensor

    # Autograd calls `note` for each tensor that it saves while the block runs
    hooks = torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor)
    before = block.register_forward_pre_hook(lambda *_: hooks.__enter__())
    after = block.register_forward_hook(lambda *_: hooks.__exit__())
    model(*args, **kwargs)
    before.remove()
    after.remove()
    parameters = {p.untyped_storage().data_ptr() for p in model.parameters()}
    return storage_bytes(t for t in saved if t.untyped_storage().data_ptr() not in parameters)


def build(config, parallelize, again=False):
    with torch.device("meta"):
        model = families.build(config)
    model = tensor_overlap.overlap(parallelize(model, dist.group.WORLD), again)
    return initialize.fill(model, 7, dtype=torch.float64, take=harness.take)


@pytest.mark.parametrize("gather_again, more", [(False, 1), (True, 10 / 8)])
def test_the_formulas_of_bytes_are_the_papers(gather_again, more):
    """A block sends what it sends in tensor parallelism, and a quarter more where inputs are
    gathered again. Receipts hold what is sent against these formulas, to the byte."""
    plain, split = [], []
    for layers in (2, 1):
        config = presets.configure(layers=layers, heads=4, width=32, context=12, vocab=61)
        sizes = Sizes(config, 12, 12, e=8, tp=4, sp=True, gather_again=gather_again)
        group = Group("tp", 4)
        split.append(all_sent(by_paper.expected(sizes, group, "all_to_all", 0, partial=False)))
        plain.append(all_sent(tensor_parallel.expected(Sizes(config, 12, 12, e=8), group)))
    assert split[0] - split[1] == more * (plain[0] - plain[1])


def test_what_a_block_keeps(ranks):
    """The residual stream and the norms' results are kept in pieces; gathered inputs only where
    asked for."""
    tokens = batch(0, context=16)[0]
    sizes = dict(layers=2, heads=4, kv_heads=4, width=32, context=16, vocab=61)
    configs = {family: presets.configure(family=family, **sizes) for family in ("gpt2", "llama")}

    def work(rank, config):
        models = [build(config, tp.parallelize_tensors)]
        models += [build(config, sp.parallelize_sequence, again) for again in (False, True)]
        return [saved_bytes(model, model.blocks["1"], tokens) for model in models]

    found, *_ = ranks(4, lambda rank: {name: work(rank, c) for name, c in configs.items()})
    each = tokens.numel() * 32 * 8  # (B, T, C)
    for family, (plain, kept, again) in found.items():
        # The norms' inputs and results: 4 whole; 2 whole and 2 pieces; 4 pieces. On a CPU RMSNorm
        # keeps its input divided by its size, too; and each norm has one or two statistics a token
        inputs = 2 * each * (2 if family == "llama" else 1)
        assert plain - kept == pytest.approx(inputs * 3 / 4, rel=0.07)
        assert kept - again == 2 * each * 3 / 4
    one = block_bytes(Sizes(configs["gpt2"], *tokens.shape, e=8))
    assert found["gpt2"][2] == pytest.approx(one / 4, rel=0.05)


def test_reduce_scatters(ranks, monkeypatch):
    """All forms of it give the same tokens. In 16 bits gloo's all-to-all is the sum in 32 bits,
    rounded once."""
    x = torch.randn(4, 2, 8, 3, generator=torch.Generator().manual_seed(0))

    def work(rank, x, *ways):
        expected = tp.shard_tensor(x.float().sum(0).to(x.dtype), 1, rank, 4)
        return [way(x[rank], dist.group.WORLD) for way in ways], expected

    def start(x, group):
        shards = sp.shards_of_tokens(x, group)
        own = torch.empty_like(shards[0])
        harness.reduce_scatter(own, shards.flatten(0, 1), group).wait()
        return own

    for found, expected in ranks(4, work, x.bfloat16(), exchange_tokens, start):
        assert all(torch.equal(ours, expected) for ours in found)
    monkeypatch.setattr(dist, "get_backend", lambda group: "another")
    for found, expected in ranks(4, work, x, sp.reduce_scatter_tokens, start):
        assert all(torch.allclose(ours, expected) for ours in found)
