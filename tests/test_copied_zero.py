"""The top of zero.py as somebody has it who copied it: on models that are not ours, and misused."""

import copy
import functools

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F


class ZeroStop(torch.autograd.Function):
    """Identity; its backward raises an exception while `stop` is set."""

    stop = False

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        if ZeroStop.stop:
            raise KeyError("given up")
        return gradient


class ZeroEncoder(nn.Module):
    """torch's own encoder layers, between parameters that belong to no module but the model."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.unused, self.embed = nn.Linear(2, 2), nn.Linear(3, 8)
        self.token, self.position = (
            nn.Parameter(torch.randn(1, 1, 8)),
            nn.Parameter(torch.randn(1, 5, 8)),
        )
        self.encoder = nn.TransformerEncoder(
            nn.TransformerEncoderLayer(8, 2, 12, 0.0, batch_first=True), 3
        )
        self.head = nn.Linear(8, 1)
        self.double()

    def forward(self, x):
        x = torch.cat([self.token.expand(len(x), 1, 8), self.embed(x)], 1) + self.position
        for i, layer in enumerate(self.encoder.layers):
            x = layer(ZeroStop.apply(x) if i == 1 else x)
        return self.head(x[:, 0])


class ZeroTied(nn.Module):
    """A Sequential and a bottleneck; one matrix in two places."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(4)
        self.layers = nn.Sequential(
            nn.Linear(12, 7), nn.Tanh(), nn.Linear(7, 7), nn.Tanh(), nn.Linear(7, 12)
        )
        self.layers[4].weight = nn.Parameter(torch.randn(12, 7) / 3)
        self.again = nn.Linear(7, 12, bias=False)
        self.again.weight = self.layers[4].weight
        self.double()

    def forward(self, x):
        h = ZeroStop.apply(self.layers[:2](x.flatten(1)))
        return (self.layers[2:](h) + self.again(h)).square().sum(1, keepdim=True)


ZERO_OPTIMIZERS = {
    "adamw": functools.partial(torch.optim.AdamW, lr=1e-2, weight_decay=0.1),
    "sgd": functools.partial(torch.optim.SGD, lr=0.05, momentum=0.9),
}


def zero_batch(step):
    generator = torch.Generator().manual_seed(step)
    return torch.randn(12, 4, 3, generator=generator, dtype=torch.float64)


def zero_loss(model, x):
    return (model(x) - 1).square().sum() / 12  # a sum, divided by the rows of the global batch


def gathered(sharded):
    """Bytes of weights that stage 3 has gathered and not freed."""
    units = [bucket for bucket in sharded.buckets if hasattr(bucket, "users")]
    return sum(bucket.flat.untyped_storage().nbytes() for bucket in units)


@functools.cache
def zero_one_process(kind, optimizer, steps=3):
    model = kind()
    optimizer = optimizer(model.parameters())
    for step in range(steps):
        optimizer.zero_grad()
        zero_loss(model, zero_batch(step)).backward()
        for p in model.parameters():
            p.grad = torch.zeros_like(p) if p.grad is None else p.grad
        gradients = {name: p.grad.clone() for name, p in model.named_parameters()}
        optimizer.step()
    return gradients, {name: p.detach() for name, p in model.named_parameters()}


def zero_ranks(rank, kind, optimizer, stage, disturb=None, steps=3, microbatches=2, **options):
    """(gradients of the last step, weights after it). disturb(place, step, model, sharded, x):
    called at places of a step."""
    import zero

    model, world = kind(), dist.get_world_size()
    sharded = zero.ZeRO(
        model, dist.group.WORLD, stage, optimizer, microbatches, **{"bucket_bytes": 1000} | options
    )
    disturb = disturb or (lambda *_: None)
    for step in range(steps):
        x = zero_batch(step).tensor_split(world)[rank]
        disturb("begin", step, model, sharded, x)
        sharded.zero_grad()
        for part in x.tensor_split(microbatches):
            zero_loss(model, part).backward()
            disturb("backward", step, model, sharded, x)
        sharded.finish()
        disturb("finish", step, model, sharded, x)
        if step == steps - 1:
            gradients = {name: p.grad for name, p in sharded.whole(model.named_parameters())}
        sharded.step()
    return gradients, {name: p.detach() for name, p in sharded.whole(model.named_parameters())}


def zero_assert_equal(ours, theirs):
    for mine, whole in zip(ours, theirs):
        assert mine.keys() == whole.keys()
        for name in mine:
            torch.testing.assert_close(
                mine[name], whole[name], rtol=1e-10, atol=1e-10, msg=lambda m: f"{name}: {m}"
            )


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_zero_on_other_models(copied, stage):
    for world, kind, name in ((3, ZeroEncoder, "adamw"), (2, ZeroTied, "sgd")):
        reference = zero_one_process(kind, ZERO_OPTIMIZERS[name])
        for ours in copied("zero", world, zero_ranks, kind, ZERO_OPTIMIZERS[name], stage):
            zero_assert_equal(ours, reference)


def zero_plain(rank, kind, optimizer):
    import zero

    model, world = kind(), dist.get_world_size()
    plain = zero.PlainZeRO1(model, dist.group.WORLD, optimizer)
    assert len(plain.shard) == -(-sum(p.numel() for p in model.parameters()) // world)
    for step in range(3):
        for part in zero_batch(step).tensor_split(world)[rank].tensor_split(2):
            zero_loss(model, part).backward()
        plain.step()
    return {name: p.detach() for name, p in model.named_parameters()}


def test_zero_in_its_plainest_form(copied):
    for world, kind, name in ((3, ZeroEncoder, "adamw"), (2, ZeroTied, "sgd")):
        reference = zero_one_process(kind, ZERO_OPTIMIZERS[name])[1]
        for weights in copied("zero", world, zero_plain, kind, ZERO_OPTIMIZERS[name]):
            zero_assert_equal([weights], [reference])


# --- a step that is given up


def zero_give_up(place, step, model, sharded, x):
    """Give one step up in the middle of a backward, and one between forward and backward."""
    if place == "begin" and step in (1, 2):
        sharded.zero_grad()
        if step == 2 and sharded.microbatches == 2:
            zero_loss(model, x[:1]).backward()
        ZeroStop.stop = True
        with pytest.raises(KeyError):
            zero_loss(model, 5 * x).backward()
        ZeroStop.stop = False
        with pytest.raises(
            RuntimeError, match="an exception ended a backward pass: call zero_grad"
        ):
            sharded.finish()


def zero_give_up_between(place, step, model, sharded, x):
    if place == "begin" and step == 2:
        sharded.zero_grad()
        zero_loss(model, 5 * x).backward()
        model(x)  # an exception comes before its backward
        with pytest.raises(RuntimeError, match=r"no finish\(\)"):
            sharded.zero_grad()
        sharded.zero_grad(give_up=True)


@pytest.mark.parametrize("disturb", [zero_give_up, zero_give_up_between])
@pytest.mark.parametrize(
    "stage, options",
    [
        (0, dict(microbatches=1)),
        (1, dict(microbatches=1)),
        (1, {}),
        (2, dict(microbatches=1)),
        (2, dict(reduce_each=False)),
        (3, {}),
        (3, dict(reshard=False, reduce_each=False)),
    ],
    ids=str,
)
def test_zero_a_step_given_up_leaves_nothing(copied, stage, options, disturb):
    def work(rank):
        return zero_ranks(rank, ZeroEncoder, ZERO_OPTIMIZERS["sgd"], stage, disturb, 4, **options)

    reference = zero_one_process(ZeroEncoder, ZERO_OPTIMIZERS["sgd"], 4)
    for ours in copied("zero", 2, work):
        zero_assert_equal(ours, reference)


def zero_raise(*_):
    raise KeyError("given up")


def zero_give_up_elsewhere(place, step, model, sharded, x):
    """Rank 1 raises late in a backward. Rank 0 raises early in it, then before its first gradient,
    then in forward."""
    if place != "begin" or step == 0:
        return
    sharded.zero_grad()
    if sharded.microbatches == 2 and step != 3:
        zero_loss(model, x[:1]).backward()
    with pytest.raises(KeyError):
        if dist.get_rank() == 1:
            ZeroStop.stop = True
            zero_loss(model, 5 * x).backward()
        elif step == 1:
            result = []
            hook = model.encoder.layers[2].register_forward_hook(lambda *a: result.append(a[2]))
            loss = zero_loss(model, x)
            hook.remove()
            result[0].register_hook(zero_raise)
            loss.backward()
        elif step == 2:
            loss = zero_loss(model, x)
            loss.register_hook(zero_raise)
            loss.backward()
        else:
            zero_raise()
    ZeroStop.stop = False
    sharded.zero_grad(give_up=step > 1)


@pytest.mark.parametrize("microbatches", [1, 2])
@pytest.mark.parametrize("stage", [0, 1, 2])
def test_zero_a_step_given_up_at_different_places(copied, stage, microbatches):
    def work(rank):
        return zero_ranks(
            rank,
            ZeroEncoder,
            ZERO_OPTIMIZERS["sgd"],
            stage,
            zero_give_up_elsewhere,
            5,
            microbatches=microbatches,
        )

    reference = zero_one_process(ZeroEncoder, ZERO_OPTIMIZERS["sgd"], 5)
    for ours in copied("zero", 2, work):
        zero_assert_equal(ours, reference)


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_zero_a_rank_that_gives_up_alone_leaves_nan(copied, stage):
    """The others' sums lack its part. The bucket's first parameter is empty. Needs two ranks."""

    def work(rank):
        import zero

        model = nn.Linear(4, 4)
        model.empty = nn.Parameter(torch.zeros(0))
        sharded = zero.ZeRO(model, dist.group.WORLD, stage, torch.optim.SGD)
        if rank == 0:
            sharded.zero_grad(give_up=True)
            return
        model(torch.ones(1, 4)).sum().backward()
        sharded.finish()
        assert all(bucket.gradient.isnan().all() for bucket in sharded.trained)

    copied("zero", 2, work)


def test_zero_step_frees_what_a_forward_gathered(copied):
    """Parameters outside of any unit included."""

    def forward(place, step, model, sharded, x):
        if place == "finish":
            model(x)  # no backward follows

    def work(rank):
        return zero_ranks(rank, ZeroEncoder, ZERO_OPTIMIZERS["sgd"], 3, forward, reshard=False)

    reference = zero_one_process(ZeroEncoder, ZERO_OPTIMIZERS["sgd"])
    for ours in copied("zero", 2, work):
        zero_assert_equal(ours, reference)


# --- misuse that is refused


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_zero_wants_its_calls_in_order(copied, stage):
    def work(rank):
        import zero

        model = ZeroEncoder()
        sharded = zero.ZeRO(model, dist.group.WORLD, stage, torch.optim.AdamW, bucket_bytes=600)
        x = zero_batch(0)
        for _ in range(2):
            zero_loss(model, x).backward()
            for call in (
                sharded.step,
                sharded.grad_norm,
                lambda: sharded.clip(torch.ones(()), 1.0),
            ):
                with pytest.raises(RuntimeError, match=r"call finish\(\) after the last backward"):
                    call()
            with pytest.raises(RuntimeError, match=r"no finish\(\)"):
                sharded.zero_grad()
            sharded.finish()
            with pytest.raises(RuntimeError, match=r"finish\(\) was called already"):
                sharded.finish()
            sharded.step()
            with pytest.raises(
                RuntimeError, match=r"more backward passes than the 1 .* call zero_grad\(\)"
            ):
                zero_loss(model, x).backward()
            sharded.zero_grad()
            # Or it would take the last step again
            with pytest.raises(RuntimeError, match=r"call finish\(\)"):
                sharded.step()
        assert gathered(sharded) == 0
        assert all(p.grad is None for p in model.parameters())

    copied("zero", 2, work)


def test_zero_refuses_what_is_no_model_or_no_factory(copied):
    def work(rank):
        import zero

        model = ZeroTied()
        make = functools.partial(zero.ZeRO, group=dist.group.WORLD, stage=2)
        for wrong in (
            model.parameters(),
            list(model.parameters()),
            model.named_parameters(),
            dict(model.named_parameters()),
        ):
            with pytest.raises(ValueError, match="give it the model, not a"):
                make(wrong, optimizer=torch.optim.AdamW)
        with pytest.raises(ValueError, match="a function that makes the optimizer"):
            make(model, optimizer=torch.optim.AdamW(model.parameters()))
        with pytest.raises(ValueError, match="another kind of parallelism cut the model"):
            cut = nn.Linear(2, 2)
            cut.bias.placement = {"partial": [dist.group.WORLD]}
            make(cut, optimizer=torch.optim.AdamW)
        for kind in ("Adafactor", "LBFGS", "Muon"):
            with pytest.raises(ValueError, match=f"{kind} needs whole matrices"):
                make(
                    nn.Sequential(nn.Linear(4, 4, bias=False)), optimizer=getattr(torch.optim, kind)
                )

    copied("zero", 1, work)


def zero_to_other_dtype(model):
    model.float()


def zero_move(model):
    model.to("meta")


def zero_replace(model):
    model.layers[0].weight = nn.Parameter(torch.zeros(7, 12, dtype=torch.float64))


@pytest.mark.parametrize("change", [zero_to_other_dtype, zero_move, zero_replace, "again"])
@pytest.mark.parametrize("stage", [0, 2, 3])
def test_zero_notices_that_its_parameters_were_replaced(copied, stage, change):
    def work(rank):
        import zero

        model = ZeroTied()
        sharded = zero.ZeRO(model, dist.group.WORLD, stage, torch.optim.SGD)
        zero_loss(model, zero_batch(0)).backward()
        sharded.finish()
        sharded.step()
        with pytest.raises(
            RuntimeError, match="no longer the one that ZeRO put there|weight that is not here"
        ):
            zero.ZeRO(
                model, dist.group.WORLD, stage, torch.optim.SGD
            ) if change == "again" else change(model)
            sharded.zero_grad()

    copied("zero", 1, work)


# --- optimizers and schedulers


class ZeroCounting(torch.optim.Optimizer):
    """Its rate falls with the steps that it has counted itself, not for each parameter."""

    def __init__(self, parameters):
        super().__init__(parameters, {"lr": 0.3})
        self.steps = 0

    @torch.no_grad()
    def step(self):
        self.steps += 1
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p -= group["lr"] / self.steps * p.grad


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_zero_optimizers_that_count_their_steps(copied, stage):
    reference = zero_one_process(ZeroEncoder, ZeroCounting)
    for ours in copied("zero", 2, zero_ranks, ZeroEncoder, ZeroCounting, stage):
        zero_assert_equal(ours, reference)


def test_zero_schedulers_go_on_its_optimizer(copied):
    schedulers = []

    def scheduled(parameters):
        optimizer = ZERO_OPTIMIZERS["adamw"](parameters)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
        optimizer.register_step_post_hook(lambda *_: scheduler.step())
        schedulers.append(scheduler)
        return optimizer

    def work(rank):
        import zero

        ours = zero_ranks(rank, ZeroEncoder, scheduled, 2)
        model = ZeroTied()
        sharded = zero.ZeRO(model, dist.group.WORLD, 2, torch.optim.SGD)
        with pytest.raises(TypeError, match="ZeRO2 is not an Optimizer"):
            torch.optim.lr_scheduler.StepLR(sharded, 1)
        scheduler = torch.optim.lr_scheduler.StepLR(sharded.optimizer, 1, 0.5)
        sharded.zero_grad()
        sharded.finish()
        sharded.step()
        scheduler.step()
        assert sharded.param_groups[0]["lr"] == 5e-4
        return ours

    reference = zero_one_process(ZeroEncoder, scheduled)
    for ours in copied("zero", 2, work):
        zero_assert_equal(ours, reference)


@pytest.mark.parametrize("offload", [False, True])
def test_zero_gradients_in_another_dtype_than_the_masters(copied, offload):
    """float32 sums of gradients, float64 masters: equal to one process to float32's rounding."""
    options = dict(param_dtype=torch.float32, offload=offload)

    def work(rank):
        def disturb(place, step, model, sharded, x):
            pieces = [piece for bucket in sharded.trained for piece in bucket.pieces]
            assert all(piece.grad is None and piece.dtype == torch.float64 for piece in pieces)

        torch.set_default_dtype(torch.float32)
        return zero_ranks(rank, ZeroFloat, ZERO_OPTIMIZERS["sgd"], 2, disturb, **options)

    reference = zero_one_process(ZeroEncoder, ZERO_OPTIMIZERS["sgd"])
    for ours in copied("zero", 2, work):
        for mine, whole in zip(ours, reference):
            for name in mine:
                torch.testing.assert_close(mine[name], whole[name], rtol=1e-4, atol=1e-5)


class ZeroFloat(ZeroEncoder):
    def forward(self, x):
        return super().forward(x.float()).double()


# --- stage 3: gradients without backward(), and weights that are not here


def test_zero_autograd_grad_is_no_pass(copied):
    """Of inputs and of parameters, in the middle of a step: right, and the step does not notice."""

    def disturb(place, step, model, sharded, x):
        if step != 1:
            return
        alone = ZeroEncoder()
        alone.load_state_dict(
            {name: p.detach() for name, p in sharded.whole(model.named_parameters())}
        )
        for wanted in ("x", "p"):
            found = []
            for m in (model, alone):
                inputs = x.clone().requires_grad_()
                wrt = [inputs] if wanted == "x" else [m.encoder.layers[1].linear1.weight, m.token]
                found.append(torch.autograd.grad(zero_loss(m, inputs), wrt))
            for ours, theirs in zip(*found):
                torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-12)
        assert gathered(sharded) == 0

    def work(rank, stage, **options):
        return zero_ranks(rank, ZeroEncoder, ZERO_OPTIMIZERS["sgd"], stage, disturb, 3, **options)

    reference = zero_one_process(ZeroEncoder, ZERO_OPTIMIZERS["sgd"], 3)
    for stage, options in (1, {}), (3, {}), (3, dict(reshard=False)):
        for ours in copied("zero", 2, functools.partial(work, **options), stage):
            zero_assert_equal(ours, reference)


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_zero_refuses_create_graph(copied, stage):
    def disturb(place, step, model, sharded, x):
        if place == "begin" and step == 1:
            sharded.zero_grad()
            with pytest.raises(RuntimeError, match="create_graph=True"):
                zero_loss(model, x).backward(create_graph=True)
            if stage == 3:
                sharded.zero_grad()
                x = x.clone().requires_grad_()
                with pytest.raises(RuntimeError, match="create_graph=True"):
                    torch.autograd.grad(zero_loss(model, x), x, create_graph=True)

    def work(rank):
        return zero_ranks(rank, ZeroEncoder, ZERO_OPTIMIZERS["sgd"], stage, disturb, 3)

    reference = zero_one_process(ZeroEncoder, ZERO_OPTIMIZERS["sgd"], 3)
    for ours in copied("zero", 2, work):
        zero_assert_equal(ours, reference)


class ZeroOutside(nn.Module):
    """Uses a unit's weight outside of that unit's forward."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(3, 3), nn.Linear(3, 3)])

    def forward(self, x):
        x = self.layers[1](self.layers[0](x))
        return F.linear(x, self.layers[0].weight)


def test_zero_weights_that_are_not_here(copied):
    def work(rank):
        import zero

        model = ZeroEncoder()
        sharded = zero.ZeRO(model, dist.group.WORLD, 3, torch.optim.AdamW)
        p = model.head.weight
        for read in (
            model.state_dict,
            lambda: copy.deepcopy(model),
            model.float,
            lambda: model.load_state_dict(ZeroEncoder().state_dict()),
            lambda: p.sum(),
            lambda: p + 1,
            lambda: p.data,
            lambda: p.T,
            lambda: p[0],
            lambda: repr(p),
            lambda: torch.nn.utils.parameters_to_vector(model.parameters()),
            lambda: model.head.weight.copy_(torch.zeros(1, 8)),
            lambda: torch.save(model, "model.pt"),
        ):
            with pytest.raises(RuntimeError, match="of a weight that is not here"):
                read()
        assert (
            p.shape == (1, 8)
            and p.numel() == 8
            and p.dtype == torch.float64
            and p.requires_grad
            and p.grad is None
        )
        assert isinstance(p, nn.Parameter) and p.is_leaf and p.device.type == "cpu" and p in {p: 1}
        seen = []
        model.head.register_forward_hook(
            lambda module, *_: seen.append(module.weight.sum().item()), prepend=True
        )
        zero_loss(model, zero_batch(0)).backward()
        assert seen == [ZeroEncoder().head.weight.sum().item()]
        sharded.finish()
        sharded.step()
        with pytest.raises(RuntimeError, match="within its unit's forward"):
            sharded = zero.ZeRO(ZeroOutside(), dist.group.WORLD, 3, torch.optim.AdamW)
            sharded.model(torch.ones(2, 3))

    copied("zero", 2, work)
