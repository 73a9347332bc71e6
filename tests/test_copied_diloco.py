"""The top of diloco.py, copied into an empty folder: other models and optimizers, and a copier's
mistakes. The reference trains all islands in one process, after the papers' algorithms."""

import textwrap

import pytest
import torch
import torch.distributed as dist
from torch import nn

WORLD = 3


def make_mlp():
    """A frozen layer, and a parameter whose memory is transposed."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.LayerNorm(16), nn.Linear(16, 5)).double()
    model[2].requires_grad_(False)
    model[3].weight = nn.Parameter(model[3].weight.detach().t().clone().t())
    return model


class TiedTransformer(nn.Module):
    """A tied embedding, and a parameter that is never used."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(5, 8)
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)
        self.unused = nn.Parameter(torch.ones(3))
        self.double()

    def forward(self, tokens):
        return self.encoder(self.embedding(tokens)) @ self.embedding.weight.t()


def batch_of(model, step, island):
    generator = torch.Generator().manual_seed(100 * step + island)
    if isinstance(model, TiedTransformer):
        return torch.randint(5, (2, 4, 4), generator=generator).unbind()
    x = torch.randn(4, 6, generator=generator, dtype=torch.float64)
    return x, torch.randint(5, (4,), generator=generator)


def train_step(model, optimizer, x, y):
    optimizer.zero_grad()
    nn.functional.cross_entropy(model(x).flatten(0, -2), y.flatten()).backward()
    optimizer.step()


def optimizer_of(kind, model):
    parameters = [p for p in model.parameters() if p.requires_grad]
    options = {"SGD": {"lr": 0.3}, "AdamW": {"lr": 0.02}, "RMSprop": {"lr": 0.01}}[kind]
    return getattr(torch.optim, kind)(parameters, **options)


def reference(make, kind, steps, every, lr, momentum):
    """The weights of the islands after `steps` steps: DiLoCo's algorithm 1, with all islands in
    this process and PyTorch's own outer optimizer."""
    models = [make() for _ in range(WORLD)]
    optimizers = [optimizer_of(kind, model) for model in models]
    shared = [p.detach().clone() for p in models[0].parameters()]
    outer = torch.optim.SGD(shared, lr=lr, momentum=momentum, nesterov=momentum > 0)
    for step in range(1, steps + 1):
        for island, (model, optimizer) in enumerate(zip(models, optimizers)):
            train_step(model, optimizer, *batch_of(model, step, island))
        if step % every == 0 or step == steps:
            moved = [[s - p.detach() for s, p in zip(shared, m.parameters())] for m in models]
            for s, *of_islands in zip(shared, *moved):
                s.grad = sum(of_islands) / WORLD
            outer.step()
            for model in models:
                for p, s in zip(model.parameters(), shared):
                    p.data.copy_(s)
    return shared


def trained(rank, make, kind, steps=7, **options):
    """(weights after finish(), DiLoCo) of this island."""
    import diloco

    model = make()
    optimizer = optimizer_of(kind, model)
    options = {"every": 3, "optimizer": optimizer} | options
    islands = diloco.DiLoCo(model, dist.group.WORLD, **options)
    for step in range(1, steps + 1):
        train_step(model, optimizer, *batch_of(model, step, rank))
        islands.step()
    islands.finish()
    return [p.detach() for p in model.parameters()], islands


@pytest.mark.parametrize(
    "make, kind, lr, momentum",
    [
        (make_mlp, "SGD", 1.0, 0.0),
        (make_mlp, "RMSprop", 0.7, 0.9),
        (TiedTransformer, "AdamW", 0.7, 0.9),
    ],
)
def test_diloco_copied_is_the_papers_algorithm(copied, make, kind, lr, momentum):
    def work(rank):
        weights, _ = trained(rank, make, kind, lr=lr, momentum=momentum)
        for p, q in zip(weights, reference(make, kind, 7, 3, lr, momentum)):
            torch.testing.assert_close(p, q, rtol=1e-10, atol=1e-10)

    copied("diloco", WORLD, work)


def test_diloco_copied_usage_blocks_run_as_printed(copied):
    """Those of outer_step and of DiLoCo, with a plain list of parameters too."""

    def work(rank):
        import diloco

        results = []
        for owner in (diloco.outer_step, diloco.DiLoCo):
            _, _, text = owner.__doc__.partition("\n\n")
            usage = textwrap.dedent(text.partition("\n\n")[0]).replace("every=50", "every=3")
            model = make_mlp()
            names = {
                "torch": torch,
                "group": dist.group.WORLD,
                "model": model,
                "every": 3,
                "batches": [batch_of(model, step, rank) for step in range(1, 7)],
                "optimizer": optimizer_of("AdamW", model),
                "cross_entropy": nn.functional.cross_entropy,
                "outer_step": diloco.outer_step,
                "DiLoCo": diloco.DiLoCo,
            }
            exec(usage, names)
            results.append([p.detach() for p in model.parameters()])
        expected = reference(make_mlp, "AdamW", 6, 3, 0.7, 0.9)
        for p, q, r in zip(*results, expected):
            torch.testing.assert_close(p, r, rtol=1e-10, atol=1e-10)
            torch.testing.assert_close(q, r, rtol=1e-10, atol=1e-10)

    copied("diloco", WORLD, work)


def test_diloco_copied_ends_equal_bit_by_bit(copied):
    """Streaming, delay, every number of bits, and weights in bfloat16, whose old weights and
    momentum stay in float32."""

    def work(rank):
        results = []
        for options in (
            {"every": 3, "parts": 3, "delay": 2, "bits": 4},
            {"every": 4, "parts": 2, "bits": 8},
            {"every": 2, "delay": 1, "bits": 16},
            {"every": 5, "delay": 4},
        ):
            for make in (make_mlp, TiedTransformer):
                weights, islands = trained(rank, make, "AdamW", **options)
                results.append([w.tolist() for w in weights])
                assert not any(part.receive for part in islands.parts)
        return results

    first, *others = copied("diloco", WORLD, work)
    assert all(other == first for other in others)

    def in_bfloat16(rank):
        import diloco

        p = nn.Parameter(torch.full((3,), 1.0, dtype=torch.bfloat16))
        islands = diloco.DiLoCo([p], dist.group.WORLD, every=1, lr=1.0, momentum=0.0)
        [part] = islands.parts
        assert part.old.dtype == torch.float32
        for _ in range(4):  # one island moves by 2^-7, the mean of three is less than bfloat16 has
            p.data -= 2**-7 * (rank == 0)
            islands.step()
        return part.old.tolist(), p.tolist()

    for old, weights in copied("diloco", WORLD, in_bfloat16):
        assert old == pytest.approx([1 - 4 * 2**-7 / 3] * 3, abs=1e-6)
        assert weights == torch.tensor(old).bfloat16().tolist()


def test_diloco_copied_messages_and_errors(copied):
    """What a message says is near the numbers, to half a step of its block's scale; nothing is
    lost, because the error goes along with the next message."""

    def work(rank):
        import diloco

        torch.manual_seed(0)
        for dtype in (torch.float32, torch.float64):
            x = torch.randn(1000, dtype=dtype) * torch.logspace(-6, 3, 1000, dtype=dtype)
            x[:200] = 0
            for bits, off in ((None, 0), (16, 2**-8), (8, 0.5 / 127), (4, 0.5 / 7)):
                message = diloco.encode(x, bits)
                assert message.dtype == torch.uint8
                read = diloco.decode(message, bits, dtype, 1000)
                largest = nn.functional.pad(x, (0, 24)).view(-1, 128).abs().amax(1)
                scale = x.abs() if bits == 16 else largest.repeat_interleave(128)[:1000]
                assert ((read - x).abs() <= 1.0001 * off * scale).all()
        x[500] = torch.nan
        assert diloco.decode(diloco.encode(x, 4), 4, dtype, 1000).isnan().any()

        p = nn.Parameter(torch.zeros(300))
        islands = diloco.DiLoCo([p], dist.group.WORLD, 1, lr=1.0, momentum=0.0, bits=4)
        [part] = islands.parts
        moved = torch.zeros(300)
        for step in range(20):
            movement = torch.randn(300) * (rank + 1)
            dist.broadcast(movement, 0)
            p.data += movement
            moved += movement
            islands.step()
        # All islands moved alike: what they have not said yet is the error
        torch.testing.assert_close(p.detach() - part.error, moved, rtol=1e-4, atol=1e-4)

    copied("diloco", 2, work)


# --- mistakes


def test_diloco_copied_refuses_steps_in_the_wrong_order(copied):
    def work(rank):
        import diloco

        model = make_mlp()
        optimizer = optimizer_of("SGD", model)
        islands = diloco.DiLoCo(model, dist.group.WORLD, 2, optimizer=optimizer)

        def inner():
            train_step(model, optimizer, *batch_of(model, 0, rank))

        with pytest.raises(RuntimeError, match=r"step\(taken=True\) after 0 optimizer"):
            islands.step()
        inner()
        islands.step()
        with pytest.raises(RuntimeError, match=r"after 0 optimizer"):
            islands.step()
        inner()
        with pytest.raises(RuntimeError, match="optimizer.step.. twice"):
            inner()
        with pytest.raises(RuntimeError, match="after 2 optimizer"):
            islands.step()
        islands.give_up()  # what is left to do
        islands.step(taken=False)  # all islands alike: the second step
        inner()
        islands.step()
        assert islands.steps == 3

    copied("diloco", 2, work)


def test_diloco_copied_refuses_other_parameters(copied):
    def work(rank):
        import diloco

        def replace(model):
            model[0].weight = nn.Parameter(model[0].weight.detach().clone())

        def assign(model):
            model.load_state_dict(make_mlp().state_dict(), assign=True)

        changes = [nn.Module.float, replace, assign, lambda m: m[2].requires_grad_(True)]
        for change in changes:
            model = make_mlp()
            islands = diloco.DiLoCo(model, dist.group.WORLD, 2)
            change(model)
            with pytest.raises(RuntimeError, match="replaced, moved, cast, frozen or unfrozen"):
                islands.step()
        parameters = list(make_mlp().parameters())
        for wrong in (make_mlp().named_parameters(), [p * 2 for p in parameters], [1.0]):
            with pytest.raises(ValueError, match="give a model or its parameters"):
                diloco.DiLoCo(wrong, dist.group.WORLD, 2)
        used_up = iter(parameters)
        list(used_up)
        for nothing in (used_up, [p.detach() for p in parameters]):
            with pytest.raises(ValueError, match="no parameter needs a gradient"):
                diloco.DiLoCo(nothing, dist.group.WORLD, 2)
        for options in ({"every": 0}, {"every": 2, "parts": 3}, {"every": 2, "delay": 2}):
            with pytest.raises(ValueError, match="1 <= parts <= every"):
                diloco.DiLoCo(parameters, dist.group.WORLD, **options)
        with pytest.raises(ValueError, match="choose None, 16, 8 or 4"):
            diloco.DiLoCo(parameters, dist.group.WORLD, 2, bits=32)

    copied("diloco", 1, work)


def test_diloco_copied_refuses_islands_that_differ(copied):
    """At the start by weights and settings; later by their steps, and by weights that somebody
    has changed."""

    def work(rank):
        import diloco

        group = dist.group.WORLD
        model = make_mlp()
        model[2].bias.data += rank  # a frozen one too
        with pytest.raises(RuntimeError, match="different weights at the start"):
            diloco.DiLoCo(model, group, 2)
        for options in ({"every": 2 + rank}, {"every": 2, "lr": 0.1 * rank}):
            with pytest.raises(RuntimeError, match="different settings"):
                diloco.DiLoCo(make_mlp(), group, **options)

    def later(rank):
        """Island 1 believes to be two steps ahead."""
        import diloco

        islands = diloco.DiLoCo(make_mlp(), dist.group.WORLD, 2)
        islands.steps = 2 * rank
        islands.step()
        with pytest.raises(RuntimeError, match=r"different numbers of steps: \[2, 4\]"):
            islands.step()
        with pytest.raises(RuntimeError, match="all islands call give_up"):
            islands.step()
        islands.give_up()
        islands.steps = 0
        islands.parts[0].old[0] += rank  # what no island does by itself
        islands.step()
        with pytest.raises(RuntimeError, match="different weights at the start of the round"):
            islands.step()

    copied("diloco", 2, work)
    copied("diloco", 2, later)


def test_diloco_copied_exception_midway(copied):
    """In a backward pass: this island goes on as if nothing had been. In an outer step: all go
    back to the latest outer step, and then train as if the steps since had never been."""

    def work(rank):
        import diloco

        class Breaks(diloco.DiLoCo):
            broken = False

            def exchange(self, message):
                if self.broken:
                    raise ConnectionError("the link is cut")
                return super().exchange(message)

        model = make_mlp()
        optimizer = optimizer_of("SGD", model)
        islands = Breaks(model, dist.group.WORLD, 3, optimizer=optimizer, bits=8, momentum=0.5)

        def step(number):
            train_step(model, optimizer, *batch_of(model, number, rank))
            islands.step()

        for number in range(1, 4):
            step(number)
        before = [p.detach().clone() for p in model.parameters()]
        error = islands.parts[0].error.clone()
        islands.broken = True
        step(4)
        step(5)
        with pytest.raises(ConnectionError):
            step(6)
        islands.broken = False
        with pytest.raises(RuntimeError, match="all islands call give_up"):
            step(6)
        islands.give_up()
        assert all(torch.equal(p, q) for p, q in zip(model.parameters(), before))
        assert torch.equal(islands.parts[0].error, error)
        if rank == 1:  # its loss has a mistake: nobody else hears of it
            with pytest.raises(RuntimeError):
                model(torch.ones(4, 7, dtype=torch.float64))
        for number in range(7, 10):
            step(number)
        islands.finish()
        assert islands.steps == 9
        return [p.tolist() for p in model.parameters()]

    first, second = copied("diloco", 2, work)
    assert first == second


def test_diloco_copied_transport_may_leave_islands_out(copied):
    """exchange() of a subclass: the mean is over those whose messages come."""

    def work(rank):
        import diloco

        class WithoutIsland2(diloco.DiLoCo):
            def exchange(self, message):
                receive = super().exchange(message)
                return lambda: receive()[:2]

        p = nn.Parameter(torch.zeros(4, dtype=torch.float64))
        islands = WithoutIsland2([p], dist.group.WORLD, 1, lr=1.0, momentum=0.0)
        p.data += torch.tensor([1.0, 2.0, 90.0])[rank]
        islands.step()
        return p.tolist()

    assert copied("diloco", 3, work) == [[1.5] * 4] * 3
