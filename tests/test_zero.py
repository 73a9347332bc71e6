"""zero.py and fsdp.py against PyTorch's FSDP2; mixed precision; memory."""

import argparse
import copy
import functools
import re
import weakref
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from conftest import ROOT
from reference import CONFIGS, batch, case, make_optimizer, plain_forward, train_rank
from torch.utils._python_dispatch import TorchDispatchMode

import composition
import ddp
import fsdp
import zero
from harness import families, initialize, presets, zero_flags
from proof.ledger import lasting
from receipts import zero as zero_bytes
from receipts.formulas import Group, Sizes
from trainer import zero_options


def rows_of_rank():
    """Unequal shares of the batch's 12 rows."""
    return torch.arange(12).split([5, 7])[dist.get_rank()]


def shard(model, group, stage, *args, **options):
    """A model with ZeRO of that stage; 3 is FSDP."""
    if stage == 3:
        options.pop("bucket_bytes", None)
        return fsdp.FSDP(model, group, *args, **options)
    return zero.ZeRO(model, group, stage, *args, **options)


class LateGather:
    """An all-gather that begins when somebody waits for it."""

    def __init__(self, *args, async_op=False, **options):
        self.args, self.options = args, options
        if not async_op:
            self.wait()

    def wait(self):
        dist.all_gather_into_tensor(*self.args, **self.options)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's own
def test_equals_pytorch(ranks):
    """4 steps. Imported here: once, and not in every rank."""
    from torch.distributed.fsdp import fully_shard

    def theirs():
        model = initialize.build(CONFIGS["gpt2"], 7, dtype=torch.float64)
        for block in model.blocks.values():
            fully_shard(block)
        fully_shard(model)

        def forward(_, *given):
            return 2 * plain_forward(model, *given)  # FSDP2 averages over the ranks: undo it

        weights = train_rank(model, "adamw", rows_of_rank(), forward=forward)
        return {name: p.full_tensor() for name, p in weights.items()}

    def ours(stage, late=False):
        model = initialize.build(CONFIGS["gpt2"], 7, dtype=torch.float64)
        make = functools.partial(make_optimizer, kind="adamw")
        sharded = shard(model, dist.group.WORLD, stage, make, bucket_bytes=20000)
        if late:
            zero_options.wait_in_forward(sharded, fsdp.default_units(model))
        pending = []

        def forward(*given):
            pending.append(sum(bucket.gathering is not None for bucket in sharded.buckets))
            return plain_forward(*given)

        given = dict(optimizer=sharded, finish=sharded.finish, forward=forward)
        given["named"] = lambda: sharded.gather_full(model.named())
        weights = train_rank(model, "adamw", rows_of_rank(), **given)
        assert pending == [0] + 3 * [len(sharded.buckets) if late else 0]
        # state_dict() and load_state_dict() wait for the last step's
        if stage == 1 and late:
            model.load_state_dict(weights, strict=False)
            assert all(bucket.gathering is None for bucket in sharded.buckets)
        shown = model.state_dict() if late else weights
        assert all(torch.equal(shown[name], p) for name, p in weights.items())
        return weights

    def work(rank):
        expected = theirs()
        for stage in range(4):
            with case(stage):
                torch.testing.assert_close(ours(stage), expected, rtol=1e-12, atol=1e-12)
        # Else a module computes with old weights, or no gather hides behind forward
        with mock.patch.object(zero, "all_gather_into_tensor", LateGather):
            for weights in ours(1, late=True), ours(2, late=True):
                torch.testing.assert_close(weights, expected, rtol=1e-12, atol=1e-12)
        # The other weights of its bucket are read without a wait
        two = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        one_waits = zero.ZeRO(two, dist.group.WORLD, 1, torch.optim.SGD)
        zero_options.wait_in_forward(one_waits, two[:1])
        one_waits.update_weights()
        assert all(bucket.gathering is None for bucket in one_waits.buckets)

    ranks(2, work)


@pytest.mark.parametrize("reduce_dtype, accumulate", [(None, 1), (torch.float32, 2)])
def test_mixed_precision(ranks, reduce_dtype, accumulate):
    """bf16 weights and gradients, fp32 masters and moments, against a loop written out here. In
    float32 sums the order of a few terms is left open; in bf16 two terms of one micro-batch each
    are added in one way only."""
    shares = torch.arange(12).split([5, 7])

    def passes(model, step, rows):
        tokens, targets, _, count = batch(step)
        for piece in rows.tensor_split(accumulate):
            model(tokens[piece], targets=targets[piece], target_count=count).backward()
            yield

    def work(rank):
        return [weights_of(rank, stage) for stage in range(4)]

    def weights_of(rank, stage):
        model = initialize.build(CONFIGS["gpt2"], 7)
        make = functools.partial(make_optimizer, kind="adamw")
        dtypes = dict(param_dtype=torch.bfloat16, reduce_dtype=reduce_dtype)
        sharded = shard(model, dist.group.WORLD, stage, make, microbatches=accumulate, **dtypes)
        for step in range(3):
            sharded.zero_grad()
            for _ in passes(model, step, shares[rank]):
                pass
            sharded.finish()
            sharded.step()
        assert {t.dtype for b in sharded.buckets for t in (b.weights, b.shard)} == {torch.bfloat16}
        assert {b.gradient_shard.dtype for b in sharded.buckets} == {reduce_dtype or torch.bfloat16}
        assert {t.dtype for t in lasting(sharded)["optimizer"]} == {torch.float32}
        return {name: p.detach() for name, p in sharded.gather_full(model.named())}

    masters = initialize.build(CONFIGS["gpt2"], 7)
    model = initialize.build(CONFIGS["gpt2"], 7).bfloat16()
    optimizer = make_optimizer(masters.parameters(), "adamw")
    for step in range(3):
        for p in masters.parameters():
            p.grad = torch.zeros_like(p)
        for rows in shares:
            for _ in passes(model, step, rows):
                for master, p in zip(masters.parameters(), model.parameters()):
                    master.grad += p.grad
                model.zero_grad()
        if reduce_dtype is None:
            for master in masters.parameters():
                master.grad = master.grad.bfloat16().float()
        optimizer.step()
        for master, p in zip(masters.parameters(), model.parameters()):
            p.data.copy_(master.data)
    expected = {name: p.detach() for name, p in masters.named()}
    for results in ranks(2, work):
        for stage, ours in enumerate(results):
            # A sum that rounds the other way moves a bf16 weight by one part in 256
            close = 0 if reduce_dtype is None and stage else 1e-3
            with case(stage):
                close = dict(rtol=close, atol=close, check_dtype=False)
                torch.testing.assert_close(ours, expected, **close)


def test_shards_are_the_model_and_differ(ranks):
    """Of a model without memory, which is never whole: values are drawn one at a time."""

    def work(rank):
        with torch.device("meta"):
            model = families.build(CONFIGS["llama"])
        drawn = []

        def draw(name, *given):
            drawn.append(name)
            return initialize.draw(name, *given)

        value = initialize.initial(model, 7, dtype=torch.float64, draw=draw)
        assert all(p.untyped_storage().nbytes() == 8 for p in model.parameters())
        sharded = fsdp.FSDP(model, dist.group.WORLD, torch.optim.SGD, value=value)
        assert len(drawn) == len(list(model.named()))
        assert all(p.untyped_storage().nbytes() == 0 for p in model.parameters())
        assert all(isinstance(p, nn.Parameter) and p.init for p in model.parameters())
        frozen = nn.Parameter(torch.ones(2), False)
        assert composition.norm_in_grid([(frozen, None, 1)], [dist.group.WORLD]) == 0
        whole = dict(sharded.gather_full(model.named()))
        return [bucket.shard for bucket in sharded.buckets], whole

    (first, full), (second, _), (third, _) = ranks(3, work)
    for a, b, c in zip(first, second, third):
        assert len(a) == len(b) == len(c) and not torch.equal(a, b) and not torch.equal(b, c)
    expected = initialize.build(CONFIGS["llama"], 7, dtype=torch.float64)
    assert all(torch.equal(full[name], p) for name, p in expected.named())


# --- copies of shards: HSDP. test_layouts.py trains with them


def test_who_splits_a_copy_and_who_has_another():
    """Ranks of 2 pipeline stages x 8 data-parallel ranks, in groups of 4; experts on 2 of these, or
    on all 8, of which no group of 4 has two copies."""
    copies = torch.arange(16).view(2, 4, 2).transpose(1, 2)
    rows = zero_flags.split_ranks(torch.arange(16).view(2, 8), 4, copies)
    assert rows["inside"][0].tolist() == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert rows["across"][1].tolist() == [[8, 12], [9, 13], [10, 14], [11, 15]]
    assert rows["copies inside"][0].tolist() == [[[0, 2], [4, 6]], [[1, 3], [5, 7]]]
    assert rows["copies across"][0].tolist() == [[[0, 4], [2, 6]], [[1, 5], [3, 7]]]
    rows = zero_flags.split_ranks(torch.arange(16), 4, torch.arange(16).view(2, 8).T)
    assert rows["copies inside"].flatten().sort().values.tolist() == list(range(16))
    assert rows["copies inside"].shape[-1] == 1
    pairs = rows["copies across"].flatten(0, -2)
    assert sorted(pairs.tolist()) == [[i, i + 8] for i in range(8)]


# --- memory


class Watch(TorchDispatchMode):
    """The most bytes of gradients that were in no shard yet, at any operation."""

    def __init__(self, sharded):
        super().__init__()
        self.sharded, self.most = sharded, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        full = [b.gradients.nbytes for b in self.sharded.buckets if b.gradients is not None]
        self.most = max(self.most, sum(full))
        return func(*args, **(kwargs or {}))


def test_stages_2_and_3_hold_the_gradients_of_two_buckets(ranks):
    """One that fills, and one on its way."""

    def work(rank):
        tokens, targets, _, count = batch(0)
        for stage in (2, 3):
            model = initialize.build(CONFIGS["llama"], 7)
            options = dict(microbatches=2, bucket_bytes=20000)
            sharded = shard(model, dist.group.WORLD, stage, torch.optim.AdamW, **options)
            with Watch(sharded) as watch:
                for _ in range(2):
                    model(tokens, targets=targets, target_count=count).backward()
            sharded.finish()
            assert 0 < watch.most <= 2 * 4 * max(len(bucket.weights) for bucket in sharded.buckets)

    ranks(2, work)


def test_the_memory_that_was_there_is_freed(ranks):
    """Else the model is held twice."""

    def work(rank):
        for stage in range(4):
            model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(3)))
            before = [weakref.ref(p.untyped_storage()) for p in model.parameters()]
            sharded = shard(model, dist.group.WORLD, stage, torch.optim.SGD)
            assert sharded.stage == min(stage, 2) and [p() for p in before] == [None] * 6

    ranks(2, work)


def test_the_papers_tables():
    totals = [sum(zero_bytes.model_states(stage, 64)) for stage in range(4)]
    assert [round(t * 7.5, 1) for t in totals] == [120.0, 31.4, 16.6, 1.9]  # GB, 7.5B parameters
    states = [zero_bytes.model_states(s, 4, 4, 4, 8) for s in range(4)]
    assert states == [(4, 4, 8), (4, 4, 2), (4, 1, 2), (1, 1, 2)]


def test_the_formulas_of_bytes_are_the_papers():
    """2P, 2P and 3P times (N-1)/N, with all the sizes here divisible by N. Two micro-batches; the
    head's weights are not gathered again for a backward that follows at once."""
    config, e, r = CONFIGS["llama"], 4, 3 / 4
    p, head = presets.parameter_count(config), config.width * (config.vocab + 1)
    for stage, flags, words in (
        (0, {}, {"all_reduce": 2 * p}),
        (1, {}, {"reduce_scatter": p, "all_gather": p}),
        (2, {}, {"reduce_scatter": 2 * p, "all_gather": p}),
        (2, {"reduce_once": True}, {"reduce_scatter": p, "all_gather": p}),
        (3, {}, {"reduce_scatter": 2 * p, "all_gather": 2 * (2 * p - head)}),
        (3, {"keep_gathered": True}, {"reduce_scatter": 2 * p, "all_gather": 2 * p}),
    ):
        usual = dict(bucket_mb=25, reduce_once=False, keep_gathered=False, offload=False)
        given = argparse.Namespace(**usual | flags), "reduce_scatter", [("F", 0), ("B", 0)] * 2
        group = Group("dp", 4)
        words["all_reduce"] = words.get("all_reduce", 0) + 2 * 2 * 8 / e  # the loss and the norm
        splits = [zero_bytes.Split(group)]
        sent, _ = zero_bytes.expected(Sizes(config, 12, 12, 2, e), group, stage, *given, splits)
        assert {op: size for (op, _), (size, _) in sent.items()} == {
            op: r * elements * e for op, elements in words.items()
        }


def test_what_fits_is_on_the_page():
    page = (ROOT / "docs/learn/memory.md").read_text()
    for stage in range(4):
        each = sum(zero_bytes.model_states(stage, 64))
        assert re.search(rf"^\| {stage} \| .*\| {each:.3g} \| {80 / each:.1f} B \|$", page, re.M)


# --- the pieces it is made of


def test_default_units():
    model = initialize.build(CONFIGS["llama"])
    assert fsdp.default_units(model) == [model.embed, *model.blocks.values(), model.head]
    nested = nn.ModuleDict({"norm": nn.LayerNorm(2), "h": nn.ModuleList([nn.Linear(2, 2)])})
    outer = nn.Module()
    outer.inner, outer.out = nn.Module(), nn.Linear(2, 2)
    outer.inner.layers = nn.ModuleList([nn.Sequential(nn.Linear(2, 2), nn.ReLU()), nested])
    outer.inner.embed = nn.Embedding(2, 2)
    called = [outer.inner.layers[0], nested["norm"], nested["h"][0]]  # a list or dict never is
    assert fsdp.default_units(outer) == [*called, outer.inner.embed, outer.out]
    assert fsdp.default_units(nn.Sequential(nn.Linear(2, 2), nn.ReLU()))[0].in_features == 2


def test_buckets_in_the_order_in_which_they_are_full():
    """A bucket that begins first and is full last, as that of all norms, keeps no other waiting."""
    parameters = [nn.Parameter(torch.zeros(size)) for size in (1, 8, 8, 1)]
    lists = zero.group_parameters(parameters, 32, lambda p: p.numel() == 1)
    assert [[p.numel() for p in members] for members in lists] == [[8], [8], [1, 1]]
    assert lists[0][0] is parameters[2] and lists[2][0] is parameters[3]


# --- the order of messages


class Layer(nn.Linear):
    trained = True

    def forward(self, x):
        return x + F.linear(x, self.weight if self.trained else self.weight.detach())


def test_fsdp_of_what_was_compiled_and_has_run(ranks):
    """Else its code would not call FSDP's hooks, and read weights without memory."""

    def work(rank):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).double()
        x, whole = torch.ones(3, 4, dtype=torch.float64), []
        for i, layer in enumerate(model):
            model[i] = torch.compile(layer, backend="eager")
        (model(x).sum() * 2).backward()
        for p in model.parameters():
            whole.append(p.grad)
            p.grad = None
        sharded = fsdp.FSDP(model, dist.group.WORLD, torch.optim.SGD)
        model(x).sum().backward()
        sharded.finish()
        copies = [p.grad for _, p in sharded.gather_full(model.named_parameters())]
        torch.testing.assert_close(copies, whole)

    ranks(2, work)


def test_fsdp_reduces_in_the_order_of_backward(ranks):
    """Also of units registered in another order, one of them with a gradient on rank 1 only."""
    order = 0, 1, 2, 5, 4, 3  # in which layers run

    def work(rank):
        layers = nn.ModuleList(Layer(4, 4, False, dtype=torch.float64) for _ in order)
        alone, x = copy.deepcopy(layers), torch.randn(2, 3, 4, dtype=torch.float64)
        units = [layers[i] for i in order]
        sharded = fsdp.FSDP(layers, dist.group.WORLD, torch.optim.SGD, units=units)
        sharded.zero_grad()
        layers[4].trained = rank == 1
        nn.Sequential(*units)(x[rank]).square().sum().backward()
        sharded.finish()
        for alone[4].trained, part in zip((False, True), x):
            nn.Sequential(*(alone[i] for i in order))(part).square().sum().backward()
        for (_, ours), theirs in zip(sharded.gather_full(layers.named_parameters()), alone):
            torch.testing.assert_close(ours.grad, theirs.weight.grad)

    ranks(2, work)


# --- what would be a wrong number, or a hang


def test_dtypes_of_masters(ranks):
    """A model in bfloat16 gets float32 masters, and packed 4-bit weights stay as they are."""

    def work(rank):
        for stage in range(4):
            model = nn.Linear(4, 4).bfloat16()
            packed = torch.arange(255, dtype=torch.uint8)
            model.packed = nn.Parameter(packed.clone(), requires_grad=False)
            options = dict(param_dtype=torch.bfloat16)
            sharded = shard(model, dist.group.WORLD, stage, torch.optim.SGD, **options)
            stepped = {p.dtype for settings in sharded.param_groups for p in settings["params"]}
            whole = dict(sharded.gather_full(model.named_parameters()))
            assert stepped == {torch.float32} and whole["packed"].equal(packed)
            assert model.weight.dtype == torch.bfloat16

    ranks(2, work)


def no_decay_for_biases(parameters):
    names = {p: getattr(p, "param_name", None) or p.name_alone for p in parameters}
    biases = [p for p in parameters if names[p] == "1.bias"]
    others = [p for p in parameters if names[p] != "1.bias"]
    groups = [dict(params=biases, weight_decay=0.0), dict(params=others, weight_decay=0.5)]
    return torch.optim.AdamW(groups, lr=0.1)


def test_weight_decay_by_name(ranks):
    """One of two vectors, so not by dim(). Each loss goes through a frozen copy (DPO's reference),
    and the model runs twice before one backward."""

    def step(model, reference, x):
        out = model(x) + model(2 * x) - reference(x)
        out.square().sum().backward()

    def work(rank):
        for stage in range(4):
            torch.manual_seed(0)
            model = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 2)).double()
            alone, frozen = copy.deepcopy(model), copy.deepcopy(model).requires_grad_(False)
            for name, p in alone.named_parameters():
                p.name_alone = name
            optimizer, x = no_decay_for_biases([*alone.parameters()]), torch.randn(2, 4, 3).double()
            options = dict(units=[model]) if stage == 3 else {}
            reference = copy.deepcopy(frozen)
            if stage == 3:
                fsdp.FSDP(reference, dist.group.WORLD, torch.optim.SGD)
            make = no_decay_for_biases
            sharded = shard(model, dist.group.WORLD, stage, make, **options)
            for _ in range(3):
                sharded.zero_grad()
                step(model, reference, x[rank])
                sharded.step()
                optimizer.zero_grad()
                step(alone, frozen, x.flatten(0, 1))
                optimizer.step()
            for name, p in sharded.gather_full(model.named_parameters()):
                torch.testing.assert_close(p, alone.get_parameter(name), rtol=1e-12, atol=1e-12)

    ranks(2, work)


def test_unequal_numbers_of_batches(ranks):
    """The loop of docs/learn/data-parallelism.md, with 3 batches on rank 0 and 1 on rank 1."""
    page = (ROOT / "docs/learn/data-parallelism.md").read_text()
    lines = page.partition("```python\nbatches, batch =")[1:]
    code = "".join(lines).partition("```python\n")[2].partition("```")[0]

    def work(rank):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 5)).double()
        x, y = torch.randn(2, 3, 4, 3).double(), torch.randint(5, (2, 3, 4))
        y[0, 0, :2] = -100
        alone = copy.deepcopy(model)
        sgd = torch.optim.SGD(alone.parameters(), lr=0.1)
        for i, n in enumerate((2, 1, 1)):  # ranks that have a batch
            targets = y[:n, i].flatten()
            sgd.zero_grad()
            loss = F.cross_entropy(alone(x[:n, i].flatten(0, 1)), targets, reduction="sum")
            (loss / (targets != -100).sum()).backward()
            sgd.step()
        names = dict(torch=torch, cross_entropy=F.cross_entropy, group=dist.group.WORLD)
        names |= dict(count_targets=ddp.count_targets)
        for stage in ("ddp", 0, 1, 2, 3):
            trained = copy.deepcopy(model)
            make = functools.partial(torch.optim.SGD, lr=0.1)
            if stage == "ddp":
                sync = ddp.DDP(trained.parameters(), dist.group.WORLD)
                optimizer = make(trained.parameters())
            else:
                sync = optimizer = shard(trained, dist.group.WORLD, stage, make)
            loader = [*zip(x[rank], y[rank])][: (3, 1)[rank]]
            exec(code, names | dict(model=trained, sync=sync, optimizer=optimizer, loader=loader))
            named = trained.named_parameters()
            for name, p in named if stage == "ddp" else sync.gather_full(named):
                torch.testing.assert_close(p, alone.get_parameter(name), rtol=1e-12, atol=1e-12)

    ranks(2, work)
