"""The top of context_parallel.py alone, on a decoder that is not the project's, and what it
refuses."""

import functools
import inspect

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

CONTEXT_CAUSAL = functools.partial(F.scaled_dot_product_attention, is_causal=True, enable_gqa=True)
CONTEXT_OPTIMIZERS = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.3, momentum=0.9),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=0.01, weight_decay=0.1),
}
CONTEXT_LENGTH = 13  # does not divide by any number of ranks: some hold padding


class ContextLayer(nn.Module):
    """4 heads that share 2 kv-heads, of 4 channels; projections of their own for q, k and v."""

    def __init__(self, core, width=12):
        super().__init__()
        self.core, self.norm = core, nn.LayerNorm(width)
        # k without a bias: softmax does not see it, so its gradient would be nothing but rounding
        self.q, self.k, self.v = (
            nn.Linear(width, 16),
            nn.Linear(width, 8, bias=False),
            nn.Linear(width, 8),
        )
        self.out, self.mlp = (
            nn.Linear(16, width),
            nn.Sequential(nn.Linear(width, 20), nn.ReLU(), nn.Linear(20, width)),
        )

    def forward(self, x):
        y = self.norm(x)
        q, k, v = (f(y).unflatten(-1, (-1, 4)).transpose(1, 2) for f in (self.q, self.k, self.v))
        x = x + self.out(self.core(q, k, v).transpose(1, 2).flatten(2))
        return x + self.mlp(x)


class ContextDecoder(nn.Module):
    def __init__(self, core):
        super().__init__()
        self.token, self.position = nn.Embedding(17, 12), nn.Embedding(CONTEXT_LENGTH, 12)
        self.layers, self.head = (
            nn.Sequential(ContextLayer(core), ContextLayer(core)),
            nn.Linear(12, 17),
        )

    def forward(self, tokens, where):
        return self.head(
            self.layers(self.token(tokens) + self.position(where.clamp(max=CONTEXT_LENGTH - 1)))
        )


def context_train(
    kind, core=CONTEXT_CAUSAL, cut=lambda x, fill: x, where=None, add_up=lambda model: None, steps=3
):
    torch.manual_seed(0)
    model = ContextDecoder(core).double()
    where = torch.arange(CONTEXT_LENGTH) if where is None else where
    optimizer = CONTEXT_OPTIMIZERS[kind](model.parameters())
    for step in range(steps):
        text = torch.randint(
            17, (4, CONTEXT_LENGTH + 1), generator=torch.Generator().manual_seed(step)
        )
        optimizer.zero_grad()
        for rows in text.split((1, 3)):  # 2 micro-batches
            tokens, targets = cut(rows[:, :-1], 0), cut(rows[:, 1:], -100)
            loss = F.cross_entropy(
                model(tokens, where).flatten(0, 1), targets.flatten(), reduction="sum"
            )
            (loss / (4 * CONTEXT_LENGTH)).backward()
        add_up(model)
        optimizer.step()
    return {name: (p.grad, p.detach()) for name, p in model.named_parameters()}


def context_core(kind, group=None):
    import context_parallel

    group = group or dist.group.WORLD
    if kind == "ulysses":
        return context_parallel.Ulysses(group, CONTEXT_CAUSAL)
    if kind == "gather":
        return context_parallel.Gather(group)
    if kind != "ring-ulysses":
        return context_parallel.Ring(group, zigzag=kind == "ring")
    rank, made = (
        dist.get_rank(),
        [dist.new_group(ranks) for ranks in ([0, 1], [2, 3], [0, 2], [1, 3])],
    )
    return context_parallel.Ulysses(made[rank // 2], context_parallel.Ring(made[2 + rank % 2]))


def context_work(rank, kind, optimizer):
    import context_parallel

    core = context_core(kind)
    where = core.positions(CONTEXT_LENGTH)

    def add_up(model):
        for p in model.parameters():
            dist.all_reduce(p.grad)

    return context_train(
        optimizer, core, lambda x, fill: context_parallel.shard(x, where, fill), where, add_up
    )


@pytest.mark.parametrize("optimizer", CONTEXT_OPTIMIZERS)
@pytest.mark.parametrize(
    "kind, world",
    [("ring", 3), ("contiguous", 3), ("gather", 2), ("ulysses", 4), ("ring-ulysses", 4)],
)
def test_foreign_decoder_equals_one_process(copied, kind, world, optimizer):
    alone = context_train(optimizer)
    for ours in copied("context_parallel", world, context_work, kind, optimizer):
        assert ours.keys() == alone.keys()
        for name in ours:
            torch.testing.assert_close(
                ours[name], alone[name], rtol=1e-10, atol=1e-12, msg=lambda text: f"{name}: {text}"
            )


def usage(of):
    """The code in a docstring: its indented lines."""
    lines = inspect.getdoc(of).splitlines()
    return "\n".join(line[4:] for line in lines if line.startswith("    "))


@pytest.mark.parametrize("kind", ["Ring", "Gather", "Ulysses"])
def test_the_usage_blocks_run_as_printed(copied, kind):
    def work(rank):
        import context_parallel as cp

        def decoder(core):
            torch.manual_seed(0)
            return ContextDecoder(core).double()

        torch.manual_seed(1)
        tokens, targets = torch.randint(17, (2, 3, CONTEXT_LENGTH))
        names = dict(vars(cp), group=dist.group.WORLD, Decoder=decoder, T=CONTEXT_LENGTH)
        names |= dict(core=CONTEXT_CAUSAL, tokens=tokens, targets=targets, count=3 * CONTEXT_LENGTH)
        ring = usage(cp.Ring).replace("Ring(", f"{kind}(")
        if kind == "Ulysses":
            ring = usage(cp.Ulysses) + "\n" + ring[ring.index("x = ") :]
        exec(ring, names)
        alone = decoder(CONTEXT_CAUSAL)
        logits = alone(tokens, torch.arange(CONTEXT_LENGTH))
        F.cross_entropy(logits.flatten(0, 1), targets.flatten()).backward()
        for ours, theirs in zip(names["model"].parameters(), alone.parameters()):
            torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-10, atol=1e-12)

    copied("context_parallel", 2, work)


def test_positions_of_a_core_are_its_kinds(copied):
    def work(rank):
        import context_parallel

        positions = context_parallel.positions
        for length in (5, 16, 37):
            for kind, due in [
                ("ring", positions(length, rank, 4)),
                ("gather", positions(length, rank, 4)),
                ("contiguous", positions(length, rank, 4, zigzag=False)),
                ("ulysses", positions(length, rank, 1, 4, zigzag=False)),
                ("ring-ulysses", positions(length, rank, 2, 2)),
            ]:
                assert torch.equal(context_core(kind).positions(length), due)
        for wrong in ((4, 4), (-1, 4), (3, 1, 3)):
            with pytest.raises(ValueError, match=f"no rank {wrong[0]}: give the group's grid"):
                positions(16, *wrong)

    copied("context_parallel", 4, work)


def test_shard_pads_what_has_more_dimensions(copied):
    def work(rank):
        import context_parallel

        x = torch.arange(1.0, 13.0).view(2, 3, 2)
        assert context_parallel.shard(x, torch.tensor([2, 3]), -1).tolist() == [
            [[5, 6], [-1, -1]],
            [[11, 12], [-1, -1]],
        ]

    copied("context_parallel", 1, work)


def context_qkv(q=(2, 4, 6, 8), k=(2, 2, 6, 8), v=None, dtype=torch.float32):
    return torch.randn(q, dtype=dtype), torch.randn(k), torch.randn(v or k)


CONTEXT_WRONG = [
    dict(k=(2, 3, 6, 8)),  # heads do not share kv-heads evenly
    dict(k=(1, 2, 6, 8)),
    dict(k=(2, 2, 5, 8)),
    dict(k=(2, 2, 8, 8)),  # keys of another length
    dict(k=(2, 2, 6, 4)),
    dict(v=(2, 2, 6, 4)),
    dict(v=(2, 1, 6, 8)),
    dict(dtype=torch.float64),
    dict(q=(4, 6, 8), k=(2, 6, 8)),
]


@pytest.mark.parametrize("kind", ["ring", "gather", "ulysses"])
def test_tensors_that_do_not_fit_are_refused(copied, kind):
    def work(rank):
        for wrong in CONTEXT_WRONG:
            with pytest.raises(
                ValueError, match="attention takes q .* not q .*: transpose, cast or repeat heads"
            ):
                context_core(kind)(*context_qkv(**wrong))

    copied("context_parallel", 2, work)


def test_other_calls_are_refused(copied):
    def work(rank):
        import context_parallel

        for kind in ("ring", "gather"):
            with pytest.raises(ValueError, match="a zigzag holds two equal chunks, not 5 tokens"):
                context_core(kind)(*context_qkv((2, 4, 5, 8), (2, 2, 5, 8)))
            with pytest.raises(TypeError, match="is_causal"):
                context_core(kind)(*context_qkv(), is_causal=False)
            with pytest.raises(TypeError, match="attn_mask"):
                context_core(kind)(*context_qkv(), attn_mask=torch.ones(6, 6))
        context_core("contiguous")(*context_qkv((2, 4, 5, 8), (2, 2, 5, 8)))
        with pytest.raises(ValueError, match="3 heads do not divide by 2 ranks"):
            context_core("ulysses")(*context_qkv((2, 3, 6, 8), (2, 1, 6, 8)))
        with pytest.raises(
            ValueError,
            match=r"must return the shape of q \(2, 2, 12, 8\), not \(2, 12, 2, 8\): transpose",
        ):
            core = lambda q, k, v: CONTEXT_CAUSAL(q, k, v).transpose(1, 2)  # noqa: E731
            context_parallel.Ulysses(dist.group.WORLD, core)(*context_qkv())
        first = dist.new_group([0])
        if rank == 1:
            for make in (
                context_parallel.Ring,
                context_parallel.Gather,
                lambda g: context_parallel.Ulysses(g, None),
            ):
                with pytest.raises(ValueError, match="this rank is not in the group"):
                    make(first)

    copied("context_parallel", 2, work)


@pytest.mark.parametrize("kind", ["ring", "gather", "ulysses"])
def test_a_gradient_of_a_gradient_is_refused(copied, kind):
    def work(rank):
        q, k, v = (t.requires_grad_() for t in context_qkv())
        (grad,) = torch.autograd.grad(
            context_core(kind)(q, k, v).square().sum(), q, create_graph=True
        )
        with pytest.raises(RuntimeError, match="once_differentiable"):
            grad.sum().backward()

    copied("context_parallel", 2, work)


class ContextStandIn(nn.Module):
    """Built like the project's GPT, as far as parallelize sees it. It does nothing."""

    def __init__(self):
        super().__init__()
        block = nn.Module()
        block.attn, block.mlp = nn.Module(), nn.Identity()
        block.attn.core = nn.Identity()
        self.blocks = nn.ModuleDict({"0": block})

    def forward(self, x, positions=None):
        return x


def test_parallelize_refuses_other_models_and_groups(copied):
    def work(rank):
        import context_parallel

        group, pair = dist.group.WORLD, [dist.new_group([0, 1]), dist.new_group([2, 3])][rank // 2]
        for model in (nn.Linear(2, 2), nn.Transformer(4, 2, 1, 1, 4), ContextDecoder(None)):
            with pytest.raises(ValueError, match="knows the GPT of model.py alone"):
                context_parallel.parallelize(model, group)
        model = ContextStandIn()
        with pytest.raises(ValueError, match="no context parallelism of kind 'circle'"):
            context_parallel.parallelize(model, group, "circle")
        with pytest.raises(ValueError, match="groups of 2 and 4 do not make the 4 ranks"):
            context_parallel.parallelize(model, group, "ring-ulysses", pair, group)
        context_parallel.parallelize(model, group)
        with pytest.raises(ValueError, match="context-parallel already"):
            context_parallel.parallelize(model, group, "ulysses")

    copied("context_parallel", 4, work)


@pytest.mark.parametrize("kind", ["ring", "contiguous", "ulysses", "ring-ulysses"])
def test_the_gpt_refuses_positions_of_another_kind(copied, kind):
    def work(rank):
        import context_parallel

        group = dist.group.WORLD
        core = context_core(kind)
        groups = (core.core.group, core.group) if kind == "ring-ulysses" else ()
        way = "ring" if kind == "contiguous" else kind
        zigzag = kind != "contiguous"
        kinds = {
            "ring": context_parallel.positions(32, rank, 4),
            "contiguous": torch.arange(32).chunk(4)[rank],
            "ring-ulysses": context_parallel.positions(32, rank, 2, 2),
            "shorter": context_parallel.positions(16, rank, 4),
            "of another group": context_parallel.positions(16, rank % 2, 2),
            "zeros": torch.zeros(8, dtype=torch.int64),
            "none": None,
        }
        right = kinds.pop("contiguous" if kind == "ulysses" else kind)
        for where in kinds.values():
            x = torch.ones(1, 8 if where is None else len(where))
            if kind == "ring" and where is kinds["shorter"]:
                continue  # right, of a sequence of 16
            refused = torch.zeros(())
            model = context_parallel.parallelize(
                ContextStandIn(), group, way, *groups, **dict(zigzag=zigzag)
            )
            try:
                model(x, where)
            except ValueError as e:
                assert "these are not the positions that this rank must hold" in str(e)
                refused += 1
            dist.all_reduce(refused)
            assert refused > 0
        for given in (right, right.clamp(max=29)):
            model = context_parallel.parallelize(
                ContextStandIn(), group, way, *groups, **dict(zigzag=zigzag)
            )
            model(torch.ones(1, 8), positions=given)
            model(torch.ones(1, 1), torch.tensor([32]))  # a later forward is not looked at

    copied("context_parallel", 4, work)
