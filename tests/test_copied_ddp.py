"""The top of ddp.py and the parameter server, copied into an empty folder: other models, and a
copier's mistakes."""

import copy
import textwrap

import pytest
import torch
import torch.distributed as dist
from torch import nn

FILES = "ddp harness/parameter_server"


def ddp_mlp():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(6, 16),
        nn.Tanh(),
        nn.LayerNorm(16),
        nn.Linear(16, 16),
        nn.GELU(),
        nn.Linear(16, 5),
    ).double()


class DDPTransformer(nn.Module):
    """A tied embedding, and a parameter that is never used."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(5, 8)
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.unused = nn.Parameter(torch.ones(3))
        self.double()

    def forward(self, tokens):
        return self.encoder(self.embedding(tokens)) @ self.embedding.weight.t()


def ddp_batch(step, model):
    """Inputs and targets of 12 samples."""
    generator = torch.Generator().manual_seed(step)
    if isinstance(model, DDPTransformer):
        return torch.randint(5, (12, 4), generator=generator), torch.randint(
            5, (12, 4), generator=generator
        )
    return torch.randn(12, 6, generator=generator, dtype=torch.float64), torch.randint(
        5, (12,), generator=generator
    )


def ddp_backward(model, x, y, count):
    loss = (
        nn.functional.cross_entropy(model(x).flatten(0, -2), y.flatten(), reduction="sum") / count
    )
    loss.backward()


def ddp_rows(rank, world):
    """This rank's samples in 2 micro-batches: as many on each rank, or fewer on the later ones."""
    sizes = {2: [7, 5], 3: [6, 4, 2], 4: [3, 3, 3, 3]}[world]
    return torch.arange(12).split(sizes)[rank].tensor_split(2)


def ddp_optimizer(kind, parameters):
    if kind == "sgd":
        return torch.optim.SGD(parameters, lr=0.3)
    return torch.optim.AdamW(parameters, lr=0.05, weight_decay=0.1)


def ddp_server(parameters, group, microbatches):
    import parameter_server

    import ddp

    class Server(ddp.DDP):
        def zero_grad(self, give_up=False):
            super().zero_grad(give_up)
            self.pull()

        def pull(self):
            parameters = [p for bucket in self.buckets for p in bucket.parameters]
            parameter_server.pull(parameters, self.group)

    push = parameter_server.Push
    return Server(parameters, group, microbatches, overlap=False, all_reduce=push)


def ddp_sync(way, parameters, microbatches=2):
    import ddp

    group = dist.group.WORLD
    return {
        "server": lambda: ddp_server(parameters, group, microbatches),
        "naive": lambda: ddp.DDP(parameters, group, microbatches, 0, overlap=False),
        "bucketed": lambda: ddp.DDP(parameters, group, microbatches, 800, overlap=False),
        "overlapped": lambda: ddp.DDP(parameters, group, microbatches, 800),
    }[way]()


def ddp_train(make, kind, way, rank, world, steps=3, disturb=None):
    """The largest difference of any gradient or weight from one process that has the whole
    batch."""
    model, reference = make(), make()
    for p in reference.parameters():
        p.grad = torch.zeros_like(p)  # an unused parameter gets zeros
    sync = ddp_sync(way, model.parameters())
    optimizers = (
        ddp_optimizer(kind, model.parameters()),
        ddp_optimizer(kind, reference.parameters()),
    )
    leader, error = way != "server" or rank == 0, 0
    for step in range(steps):
        x, y = ddp_batch(step, model)
        optimizers[1].zero_grad(set_to_none=False)
        ddp_backward(reference, x, y, y.numel())
        sync.zero_grad()
        if disturb:
            disturb(step, sync, model, x, y)
        for rows in ddp_rows(rank, world):
            ddp_backward(model, x[rows], y[rows], y.numel())
        sync.finish()
        for p, q in zip(model.parameters(), reference.parameters()):
            error = max(error, (p.grad - q.grad).abs().max().item() if leader else 0)
        optimizers[1].step()
        if leader:
            optimizers[0].step()
    if way == "server":
        sync.pull()
    return max(
        error,
        *((p - q).abs().max().item() for p, q in zip(model.parameters(), reference.parameters())),
    )


@pytest.mark.parametrize("way", ["server", "naive", "bucketed", "overlapped"])
def test_ddp_copied_trains_other_models(copied, way):
    def work(rank, make, kind):
        return ddp_train(make, kind, way, rank, dist.get_world_size())

    for world, make, kind in (
        (3, ddp_mlp, "sgd"),
        (2, DDPTransformer, "adamw"),
        (4, DDPTransformer, "sgd"),
    ):
        assert max(copied(FILES, world, work, make, kind)) < 1e-10


@pytest.mark.parametrize("make", [ddp_mlp, DDPTransformer])
def test_ddp_copied_plainest_form_runs_as_printed(copied, make):
    """The usage block of sum_gradients, with weights that start different."""

    def work(rank):
        import ddp

        _, _, text = ddp.sum_gradients.__doc__.partition("\n\n")
        usage, _, _ = text.partition("\n\n")
        model, reference = make(), make()
        model[0].requires_grad_(False) if make is ddp_mlp else None
        reference[0].requires_grad_(False) if make is ddp_mlp else None
        for p in model.parameters():
            p.data += rank
        batches = []
        for step in range(4):
            x, y = ddp_batch(step, model)
            rows = ddp_rows(rank, 3)
            batches.append([[(x[r], y[r].flatten()) for r in rows], y.numel()])
        cross_entropy = nn.functional.cross_entropy
        names = {
            "dist": dist,
            "group": dist.group.WORLD,
            "model": model,
            "batches": batches,
            "optimizer": ddp_optimizer("adamw", model.parameters()),
            "cross_entropy": lambda x, y, **how: cross_entropy(x.flatten(0, -2), y, **how),
            "sum_gradients": ddp.sum_gradients,
        }
        exec(textwrap.dedent(usage), names)
        optimizer = ddp_optimizer("adamw", reference.parameters())
        for p in reference.parameters():
            p.grad = torch.zeros_like(p) if p.requires_grad else None  # an unused one gets zeros
        for step in range(4):
            optimizer.zero_grad(set_to_none=False)
            x, y = ddp_batch(step, model)
            ddp_backward(reference, x, y, y.numel())
            optimizer.step()
        for p, q in zip(model.parameters(), reference.parameters()):
            torch.testing.assert_close(p, q, rtol=1e-10, atol=1e-10)

    copied(FILES, 3, work)


def test_ddp_copied_sparse_gradients_and_transposed_weights(copied):
    def work(rank):
        import ddp

        torch.manual_seed(0)
        embedding = nn.Embedding(6, 4, sparse=True)
        weight = nn.Parameter(torch.randn(4, 3).t())
        wrapped = ddp.DDP([*embedding.parameters(), weight], dist.group.WORLD)
        (embedding(torch.tensor([rank, 5])) @ weight.t()).sum().backward()
        wrapped.finish()
        expected = torch.zeros(6, 4)
        expected[[0, 1]] += weight.detach().sum(0)
        expected[5] += 2 * weight.detach().sum(0)
        torch.testing.assert_close(embedding.weight.grad, expected)
        torch.testing.assert_close(
            weight.grad, embedding.weight.detach()[[0, 1, 5, 5]].sum(0).expand(3, 4)
        )

    copied(FILES, 2, work)


# --- a step that is given up


class DDPBreaks(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        raise ArithmeticError("broke off")


def ddp_break_off(model, at, x, y):
    """A backward pass that raises below the module `at` of a Sequential."""
    h = x
    for i, module in enumerate(model):
        h = DDPBreaks.apply(h) if i == at else h
        h = module(h)
    with pytest.raises(ArithmeticError):
        nn.functional.cross_entropy(h, y).backward()


@pytest.mark.parametrize("way", ["server", "naive", "bucketed", "overlapped"])
@pytest.mark.parametrize("passes", [0, 1])
def test_ddp_copied_step_given_up_starts_again(copied, way, passes):
    """A backward pass raises on all ranks, elsewhere on each. All-reduces are on their way."""

    def work(rank, world):
        launched = []

        def give_up(step, sync, model, x, y):
            for _ in range(passes):
                ddp_backward(model, x, y, 1)
            ddp_break_off(model, 2 + rank, x, y)
            launched.append(len(getattr(sync, "works", [])))
            with pytest.raises(RuntimeError, match="finish\\(\\) after half a backward"):
                sync.finish()
            sync.zero_grad()

        return ddp_train(ddp_mlp, "sgd", way, rank, world, 3, give_up), launched

    results = copied(FILES, 3, work, 3)
    assert max(error for error, _ in results) < 1e-10
    if way == "overlapped" and passes == 1:  # or this test would show nothing
        assert len({tuple(launched) for _, launched in results}) > 1


def test_ddp_copied_step_given_up_between_two_passes(copied):
    """Or by mistake: zero_grad() in the loop over micro-batches would drop all but the last one."""

    def work(rank):
        for way in ("bucketed", "overlapped"):

            def give_up(step, sync, model, x, y):
                ddp_backward(model, x, y, 1)
                with pytest.raises(RuntimeError, match="zero_grad\\(\\) after backward"):
                    sync.zero_grad()
                sync.zero_grad(give_up=True)

            assert ddp_train(ddp_mlp, "adamw", way, rank, 2, 2, give_up) < 1e-10
        p = nn.Parameter(torch.ones(2))
        naive = ddp_sync("naive", [p])
        p.sum().backward()
        with pytest.raises(RuntimeError, match="zero_grad\\(\\) after backward"):
            naive.zero_grad()
        naive.zero_grad(give_up=True)
        for _ in range(2):
            p.sum().backward()
        naive.finish()
        assert p.grad.tolist() == [4, 4]

    copied(FILES, 2, work)


def test_ddp_copied_step_given_up_by_one_rank(copied):
    """With nothing on its way the others wait. Otherwise they find NaN."""

    def work(rank):
        import ddp

        def step_of_one_bucket(step, sync, model, x, y):
            if rank == 0:
                ddp_break_off(model, 3, x, y)
                sync.zero_grad()

        for way in ("naive", "bucketed"):
            assert ddp_train(ddp_mlp, "sgd", way, rank, 3, 2, step_of_one_bucket) < 1e-10

        model = ddp_mlp()
        x, y = ddp_batch(0, model)
        wrapped = ddp.DDP(model.parameters(), dist.group.WORLD, bucket_bytes=800)
        if rank == 0:
            ddp_break_off(model, 3, x, y)
            assert 0 < len(wrapped.works) < len(wrapped.buckets)
            wrapped.zero_grad()
        else:
            ddp_backward(model, x, y, 12)
            wrapped.finish()
            assert model[0].weight.grad.isnan().all()
        wrapped.zero_grad()
        ddp_backward(model, x, y, 12)
        wrapped.finish()
        assert model[0].weight.grad.isfinite().all()

    copied(FILES, 3, work)


@pytest.mark.parametrize("microbatches", [1, 2])
def test_ddp_copied_step_given_up_before_the_first_bucket(copied, microbatches):
    """Rank 0 raises before its first bucket is full. Rank 1 has started it. Both start again."""

    def work(rank):
        import ddp

        model, reference = ddp_mlp(), ddp_mlp()
        x, y = ddp_batch(0, model)
        # The first of two buckets has both of the later Linears
        wrapped = ddp.DDP(model.parameters(), dist.group.WORLD, microbatches, bucket_bytes=2856)
        for _ in range(3):
            wrapped.zero_grad()
            for _ in range(microbatches - 1):
                ddp_backward(model, x, y, 1)
            ddp_break_off(model, 2 if rank == 1 else 5, x, y)
            assert len(wrapped.works) == rank and len(wrapped.buckets) == 2
        wrapped.zero_grad()
        for _ in range(microbatches):
            ddp_backward(model, x, y, 12 * microbatches)
            ddp_backward(reference, x, y, 6 * microbatches)
        wrapped.finish()
        for p, q in zip(model.parameters(), reference.parameters()):
            torch.testing.assert_close(p.grad, q.grad)

    copied(FILES, 2, work)


# --- steps in the wrong order


@pytest.mark.parametrize("way", ["server", "naive", "bucketed", "overlapped"])
def test_ddp_copied_refuses_steps_in_the_wrong_order(copied, way):
    def work(rank):
        def start(microbatches=1):
            model = DDPTransformer()
            sync = ddp_sync(way, model.parameters(), microbatches)
            sync.zero_grad()
            x, y = ddp_batch(0, model)
            return model, sync, lambda: ddp_backward(model, x, y, y.numel())

        model, sync, backward = start()
        backward()
        with pytest.raises(RuntimeError, match="zero_grad\\(\\) after backward.*give_up=True"):
            sync.zero_grad()
        sync.finish()  # what the message says to do
        sync.zero_grad()
        sync.zero_grad()  # a step without a gradient may start again

        backward()
        sync.finish()
        summed = [p.grad.clone() for p in model.parameters()]
        with pytest.raises(RuntimeError, match="finish\\(\\) after finish"):
            sync.finish()
        assert all(torch.equal(p.grad, g) for p, g in zip(model.parameters(), summed))
        with pytest.raises(RuntimeError, match="backward\\(\\) after finish"):
            backward()

        model, sync, backward = start()
        backward()
        torch.optim.SGD(model.parameters(), lr=0.1).step()
        with pytest.raises(RuntimeError, match="finish\\(\\) after optimizer.step"):
            sync.finish()

    copied(FILES, 2, work)


# --- models that are changed, and what is no list of parameters


@pytest.mark.parametrize("way", ["server", "naive", "bucketed", "overlapped"])
def test_ddp_copied_refuses_replaced_gradients(copied, way):
    def work(rank):
        def cast(model):
            model.to(torch.float32)

        def optimizers_zero_grad(model):
            torch.optim.SGD(model.parameters(), lr=0.1).zero_grad()

        def second_ddp(model):
            ddp_sync("naive", model.parameters())

        def assigned(model):
            for p in model.parameters():
                p.grad = torch.zeros_like(p)

        for change in (cast, optimizers_zero_grad, second_ddp, assigned):
            model = ddp_mlp()
            sync = ddp_sync(way, model.parameters(), 1)
            change(model)
            x, y = ddp_batch(0, model)
            with pytest.raises(
                RuntimeError,
                match="was replaced.*zero_grad.*second DDP.*create_graph.*moved or cast after DDP",
            ):
                ddp_backward(model, x.to(model[0].weight.dtype), y, 12)
                sync.finish()

        model = ddp_mlp()
        sync = ddp_sync(way, model.parameters(), 1)
        x, y = ddp_batch(0, model)
        with pytest.raises(RuntimeError, match="was replaced"):
            nn.functional.cross_entropy(model(x), y).backward(create_graph=True)
            sync.finish()

        model = ddp_mlp()
        sync = ddp_sync(way, model.parameters(), 1)
        ddp_backward(model, x, y, 12)
        model.zero_grad()  # between backward and finish()
        with pytest.raises(RuntimeError, match="was replaced"):
            sync.finish()

        model = ddp_mlp()
        model[0].requires_grad_(False)
        sync = ddp_sync(way, model.parameters(), 1)
        model[0].requires_grad_(True)
        with pytest.raises(RuntimeError, match="unfrozen"):
            ddp_backward(model, x, y, 12)
            sync.finish()

    copied(FILES, 1, work)


def test_ddp_copied_server_fills_replaced_and_different_weights(copied):
    """It writes into the tensors that the model has now, of each dtype; frozen ones are left."""

    def work(rank):
        import parameter_server

        model = ddp_mlp()
        model[0].float()
        model[2].requires_grad_(False)
        expected = [p.detach().clone() for p in model.parameters()]
        for p in model.parameters():
            p.data = p.data.t().contiguous().t() + rank  # replaced, and transposed
        parameter_server.pull(model.parameters(), dist.group.WORLD)
        for p, q in zip(model.parameters(), expected):
            torch.testing.assert_close(p.detach(), q if p.requires_grad else q + rank)

    copied(FILES, 3, work)


def test_ddp_copied_server_with_buckets_that_start_early(copied):
    def work(rank):
        import parameter_server

        import ddp

        model, reference = ddp_mlp(), ddp_mlp()
        push, group = parameter_server.Push, dist.group.WORLD
        sync = ddp.DDP(model.parameters(), group, 1, 800, overlap=True, all_reduce=push)
        x, y = ddp_batch(0, model)
        for _ in range(2):
            sync.zero_grad()
            ddp_backward(model, x[rank::3], y[rank::3], 12)
            sync.finish()
        assert sync.early > 1
        ddp_backward(reference, x, y, 12)
        if rank == 0:
            for p, q in zip(model.parameters(), reference.parameters()):
                torch.testing.assert_close(p.grad, q.grad, rtol=1e-12, atol=1e-12)

    copied(FILES, 3, work)


def test_ddp_copied_several_servers(copied):
    """More servers than buckets, parameters of two dtypes, and one that is frozen."""

    def work(rank, count):
        import parameter_server

        import ddp

        a, b, c = (nn.Parameter(torch.ones(n, dtype=d)) for n, d in ((2, None), (3, None), (4, D)))
        c.requires_grad_(False)
        d = nn.Parameter(torch.ones(5, dtype=D))
        servers = parameter_server.Servers(count, dist.group.WORLD)
        parameters = [a, b, c, d]
        sync = ddp.DDP(parameters, dist.group.WORLD, 1, 0, overlap=False, all_reduce=servers.push)
        servers.deal(sync.buckets)
        optimizer = torch.optim.SGD(parameters, lr=1.0)
        for _ in range(2):
            sync.zero_grad()
            servers.pull()
            ((a.sum() + b.sum() + d.sum()) * (rank + 1)).backward()
            sync.finish()
            assert abs(servers.norm().item() - 6 * 10**0.5) < 1e-12  # 10 gradients of 1 + 2 + 3
            servers.step(optimizer)
        servers.pull()
        assert all((p == -11).all() for p in (a, b, d)) and (c == 1).all()
        return len(servers.mine)

    D = torch.float64
    assert copied(FILES, 3, work, 1) == [3, 0, 0]
    assert copied(FILES, 3, work, 2) == [1, 2, 0]
    assert copied(FILES, 3, work, 3) == [1, 1, 1]


@pytest.mark.parametrize("way", ["server", "naive", "bucketed", "overlapped"])
def test_ddp_copied_refuses_what_is_no_parameter(copied, way):
    def work(rank):
        model = ddp_mlp()
        used_up = model.parameters()
        list(used_up)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for message, given in {
            "model.parameters\\(\\): a Linear is no parameter": model,
            "model.parameters\\(\\): a DDPTransformer is no parameter": DDPTransformer(),
            "a tuple is no parameter": model.named_parameters(),
            "a str is no parameter": model.state_dict(),
            "a dict is no parameter": optimizer.param_groups,
            "a Tensor is no parameter": [p * 2 for p in model.parameters()],
            "used up": used_up,
            "no parameter needs a gradient": [],
            "all are frozen": copy.deepcopy(model).requires_grad_(False).parameters(),
        }.items():
            with pytest.raises(ValueError, match=message):
                ddp_sync(way, given)
        p = nn.Parameter(torch.ones(2))
        sync = ddp_sync(way, nn.ParameterList([p, p]), 1)  # twice the same: summed once
        sync.zero_grad()
        p.sum().backward()
        sync.finish()
        assert rank > 0 and way == "server" or p.grad.tolist() == [2, 2]

    copied(FILES, 2, work)


def test_ddp_copied_mixed_dtypes(copied):
    def work(rank, way):
        a, b = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2, dtype=torch.float64))
        sync = ddp_sync(way, [a, b], 1)
        sync.zero_grad()
        (a.sum() + b.sum()).backward()
        sync.finish()
        if way != "server" or rank == 0:
            assert a.grad.tolist() == b.grad.tolist() == [2, 2] and b.grad.dtype == torch.float64

    for way in ("server", "naive", "bucketed", "overlapped"):
        copied(FILES, 2, work, way)


def test_ddp_copied_refuses_a_pass_too_many(copied):
    """Its gradients would be added to a buffer that is being sent."""

    def work(rank):
        import ddp

        p = nn.Parameter(torch.ones(2))
        ddp.DDP([p], dist.group.WORLD)
        p.sum().backward()
        with pytest.raises(RuntimeError, match="more backward passes than microbatches=1"):
            p.sum().backward()

    copied(FILES, 1, work)
