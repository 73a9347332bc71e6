"""tensor_parallel.py against one process, and against PyTorch's DTensor. Whole trainings:
test_copied.py, test_layouts.py."""

import dataclasses
from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
from reference import CONFIGS, batch, cuts_of, piece, train_rank
from torch.utils._python_dispatch import TorchDispatchMode

import expert_parallel
import harness
import sequence_parallel
import tensor_overlap
import tensor_parallel as tp
import zero_bubble
from harness import families, initialize, presets


def build(config, group, parallelize=tp.parallelize_tensors):
    with torch.device("meta"):
        model = families.build(config)
    model = parallelize(model, group)
    return initialize.fill(model, 7, dtype=torch.float64, take=harness.take)


def test_a_rank_with_nothing_but_padding(ranks):
    # 5 = 2 + 2 + 1 + 0 tokens; batches of larger ids are folded into them
    config = dataclasses.replace(CONFIGS["gpt2"], vocab=5)

    def work(rank):
        model = build(config, dist.group.WORLD)
        tokens, targets, samples, count = batch(0, vocab=5)
        assert model(tokens).shape[-1] == 2  # nobody gathers them
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


def test_cuts_real_weights_as_drawn_ones_and_frees_the_whole(ranks):
    """Of every technique that cuts layers. Names stay as they are."""
    mixture = presets.configure(family="llama", layers=2, heads=4, width=32, vocab=61, experts=5)
    ways = [
        (tp.parallelize_tensors, CONFIGS["llama"]),
        (expert_parallel.parallelize_experts, mixture),
        (sequence_parallel.parallelize_sequence, CONFIGS["gpt2"]),
    ]

    def work(rank):
        for parallelize, config in ways:
            model = initialize.build(config, 7, dtype=torch.float64)
            names = [name for name, _ in model.named()]
            real = dict(parallelize(model, dist.group.WORLD).named())
            with torch.device("meta"):
                drawn = families.build(config)
            drawn = parallelize(drawn, dist.group.WORLD)
            initialize.fill(drawn, 7, dtype=torch.float64, take=harness.take)
            assert sorted(real) == sorted(names) == sorted(name for name, _ in drawn.named())
            assert all(torch.equal(real[name], p) for name, p in drawn.named())
            assert all(p.untyped_storage().nbytes() == p.numel() * 8 for p in real.values())

    ranks(2, work)


def test_whole_norms_of_split_heads_are_refused(ranks):
    """Else each rank's norm of its own heads would drift from the others'."""

    def work(rank):
        for kind in ("each", "all"):
            config = dataclasses.replace(CONFIGS["llama"], qk_norm=kind)
            with pytest.raises(AssertionError, match="head_norms"):
                build(config, dist.group.WORLD)(batch(0)[0])

    ranks(2, work)


def test_cross_entropy_of_large_and_16_bit_logits(ranks):
    logits = torch.randn(6, 10, generator=torch.Generator().manual_seed(0)) * 300
    targets = torch.tensor([0, 9, 4, -1, 7, 5])

    def work(rank):
        criterion = tp.VocabParallelCrossEntropy(10, dist.group.WORLD)
        for dtype, rtol, close in ((torch.float64, 1e-12, 1e-12), (torch.bfloat16, 1e-6, 1e-2)):
            full = logits.to(dtype).double().requires_grad_()
            expected = torch.nn.functional.cross_entropy(full, targets, ignore_index=-1)
            expected.backward()
            part = tp.shard_tensor(full.detach().to(dtype), 1, rank, 4).requires_grad_()
            loss = criterion(part.unsqueeze(0), targets.unsqueeze(0), 5)
            loss.backward()
            torch.testing.assert_close(loss.double(), expected, rtol=rtol, atol=0)
            gradient = tp.shard_tensor(full.grad, 1, rank, 4)
            torch.testing.assert_close(part.grad.double(), gradient, rtol=close, atol=close)

    ranks(4, work)


def test_equals_dtensor(ranks):
    """The same weights after 4 steps as PyTorch's parallelize_module on the same blocks."""
    # Imported here: once, and not in every rank
    from torch.distributed.tensor import DTensor, parallel

    config = CONFIGS["llama"]

    def theirs(rank):
        model = initialize.build(config, 7, dtype=torch.float64)
        mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (2,))
        columns, rows = ("attn.qkv", "mlp.gate", "mlp.up"), ("attn.proj", "mlp.down")
        plan = {f"blocks.*.{name}": parallel.ColwiseParallel() for name in columns}
        plan |= {f"blocks.*.{name}": parallel.RowwiseParallel() for name in rows}
        parallel.parallelize_module(model, mesh, plan)
        weights = train_rank(model, "sgd")
        return {n: p.full_tensor() if isinstance(p, DTensor) else p for n, p in weights.items()}

    def work(rank):
        model = build(config, dist.group.WORLD)
        weights, cuts = train_rank(model, "sgd"), {name: cuts_of(p) for name, p in model.named()}
        return weights, cuts, theirs(rank)

    for weights, cuts, their in ranks(2, work):
        for name, p in weights.items():
            full = piece(their[name], cuts[name])
            torch.testing.assert_close(p, full, rtol=1e-12, atol=1e-12)


class Flights(TorchDispatchMode):
    """`landed`: of each message, in order, whether a matmul ran between its start and its wait."""

    def __init__(self):
        super().__init__()
        self.flying, self.landed = [], []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "c10d":
            self.flying.append(False)
        elif func.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm):
            self.flying = [True] * len(self.flying)
        return func(*args, **(kwargs or {}))

    def wait(self, work, wait=dist.Work.wait):
        self.landed.append(self.flying.pop(0))
        return wait(work)


def test_backward_hides_the_messages_of_enter(ranks, monkeypatch):
    """Two blocks and a head have five Enters. What hides nothing: a split backward, which computes
    no weight's gradient, and sequence parallelism's five messages that gather gradients."""
    config = dataclasses.replace(CONFIGS["llama"], layers=2)
    tokens, targets, _, count = batch(0)

    def work(rank, parallelize, again=False, mode=nullcontext()):
        def overlapped(model, group):
            return tensor_overlap.overlap(parallelize(model, group), again)

        with mode:
            loss = build(config, dist.group.WORLD, overlapped)(tokens, None, targets, count)
        with monkeypatch.context() as patches, Flights() as flights:
            patches.setattr(dist.Work, "wait", lambda work: flights.wait(work))
            loss.backward()
        assert not flights.flying
        return sum(flights.landed), len(flights.landed)

    ways = [
        (tp.parallelize_tensors,),
        (tp.parallelize_tensors, False, zero_bubble.WeightGradStore()),
    ]
    ways += [(sequence_parallel.parallelize_sequence, again) for again in (False, True)]
    results = ranks(2, lambda rank: [work(rank, *way) for way in ways])
    assert results == 2 * [[(5, 5), (0, 5), (5, 10), (10, 15)]]


def test_attention_of_transformers_reads_the_shape_alone(ranks):
    """It gets what EnterAndProject returns in the place of a tensor, and does not know."""
    from transformers.models.llama import modeling_llama as llama

    def work(rank):
        torch.manual_seed(0)
        config = llama.LlamaConfig(hidden_size=8, num_attention_heads=2, num_key_value_heads=1)
        config._attn_implementation = "sdpa"
        attention, x = llama.LlamaAttention(config, 0).double(), torch.randn(2, 3, 8).double()
        angles = torch.ones(1, 3, 4).double(), torch.zeros(1, 3, 4).double()
        expected = attention(x, position_embeddings=angles)[0]
        names = "q_proj", "k_proj", "v_proj"
        layers = [tp.ColumnParallelLinear(getattr(attention, name), None) for name in names]
        enter = tensor_overlap.EnterAndProject(tp.Boundary(tp.Enter, None), layers)
        for name, layer in zip(names, enter.layers):
            setattr(attention, name, layer)
        y = attention(enter(x), position_embeddings=angles)[0]
        torch.testing.assert_close(y, expected, rtol=1e-12, atol=1e-12)

    ranks(1, work)
