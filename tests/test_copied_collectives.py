"""The top of collectives.py, copied into an empty folder: on another model, and misused."""

import pathlib
import textwrap

import pytest
import torch
from torch import nn


@pytest.mark.parametrize(
    "name",
    [
        "ring",
        "recursive-doubling",
        "halving-doubling",
        "double-tree",
        "direct",
        "server",
        "sequential",
        "hierarchical",
    ],
)
def test_collectives_copied_add_up_another_models_gradients(copied, name):
    """3 steps on 3 ranks with unequal shares, against one process."""

    def work(rank):
        from collectives import ALL_REDUCE, broadcast

        all_reduce = ALL_REDUCE[name]

        def backward(model, x, y, count):
            (
                nn.functional.cross_entropy(model(x).flatten(0, 1), y.flatten(), reduction="sum")
                / count
            ).backward()

        def make(seed):
            torch.manual_seed(seed)
            layer = nn.TransformerEncoderLayer(6, 2, 8, dropout=0, batch_first=True)
            return nn.Sequential(
                nn.TransformerEncoder(layer, 1, enable_nested_tensor=False), nn.Linear(6, 5)
            ).double()

        model, reference = make(rank), make(0)
        for p in model.parameters():
            broadcast(p, group_src=0)
        optimizers = [torch.optim.AdamW(m.parameters(), lr=0.05) for m in (model, reference)]
        rows = torch.arange(12).split([6, 4, 2])[rank]
        for step in range(3):
            generator = torch.Generator().manual_seed(step)
            x = torch.randn(12, 3, 6, dtype=torch.float64, generator=generator)
            y = torch.randint(5, (12, 3), generator=generator)
            for optimizer in optimizers:
                optimizer.zero_grad()
            count = torch.tensor(float(y[rows].numel()))
            all_reduce(count)
            for piece in rows.tensor_split(2):
                backward(model, x[piece], y[piece], count)
            backward(reference, x, y, y.numel())
            for p, q in zip(model.parameters(), reference.parameters()):
                all_reduce(p.grad)
                torch.testing.assert_close(p.grad, q.grad, rtol=0, atol=1e-10)
            for optimizer in optimizers:
                optimizer.step()
        for p, q in zip(model.parameters(), reference.parameters()):
            torch.testing.assert_close(p, q, rtol=0, atol=1e-10)

    copied("collectives", 3, work)


def test_collectives_copied_outputs_that_lie_in_the_input(copied):
    """In segments, so that a part that is overwritten before it is sent shows."""

    def work(rank):
        import collectives

        n, each = 3, 500

        def whole(r):
            return torch.arange(n * each, dtype=torch.float64) + 10000 * r

        x = whole(rank)
        collectives.all_to_all_single(x, x)
        assert torch.equal(x, torch.cat([whole(r).chunk(n)[rank] for r in range(n)]))
        x = whole(rank)
        sizes = [[700, 500, 300], [300, 700, 500], [500, 300, 700]]
        comes = [sizes[r][rank] for r in range(n)]
        collectives.all_to_all_single(x, x, comes, sizes[rank])
        assert torch.equal(x, torch.cat([whole(r).split(sizes[r])[rank] for r in range(n)]))
        for other in range(n):
            x = whole(rank)
            output = x.chunk(n)[other]  # in place only where it is this rank's own part
            collectives.reduce_scatter_single(output, x)
            assert torch.equal(output, sum(whole(r) for r in range(n)).chunk(n)[rank])
        # Parts of one tensor that don't overlap
        both = torch.stack([whole(rank), torch.zeros(n * each)])
        collectives.all_to_all_single(both[1], both[0])
        assert torch.equal(both[1], torch.cat([whole(r).chunk(n)[rank] for r in range(n)]))
        assert torch.equal(both[0], whole(rank))
        columns = torch.zeros(4, n)  # no two of one memory, though they interleave
        collectives.gather(
            torch.full((4,), rank + 1.0), list(columns.unbind(1)) if rank == 0 else None
        )
        assert rank > 0 or columns[0].tolist() == [1, 2, 3]

    copied("collectives", 3, work)


def test_collectives_copied_reduce_scatter_across_two_parts(copied):
    """The output overlaps the parts that are sent and added to, in segments still to come."""

    def work(rank):
        import collectives

        x = torch.arange(20000.0) * (rank + 1)
        output = x[5000:15000]
        collectives.reduce_scatter_single(output, x)
        assert torch.equal(output, 3 * torch.arange(20000.0).chunk(2)[rank])

    copied("collectives", 2, work)


def test_collectives_copied_gather_into_one_tensor_is_refused(copied):
    def work(rank):
        import collectives

        x = torch.full((3,), float(rank))
        if rank == 0:
            with pytest.raises(ValueError, match="the same tensor several times"):
                collectives.gather(x, [torch.zeros(3)] * 2)
        collectives.gather(x, list(torch.zeros(2, 3)) if rank == 0 else None)

    copied("collectives", 2, work)


def test_collectives_copied_usage_runs_as_printed(copied):
    """The training loop of docs/collectives.md and the other calls of the docstring, with the names
    that they use, on 3 ranks with unequal shares, against one process."""
    page = (pathlib.Path(__file__).parent.parent / "docs" / "collectives.md").read_text()
    loop = page[page.index("    count = torch.tensor") :]
    loop = textwrap.dedent(loop[: loop.index("\n\n")])

    def work(rank):
        import collectives

        def make():
            torch.manual_seed(0)
            return nn.Linear(6, 5).double()

        text = collectives.all_reduce.__doc__
        calls = textwrap.dedent(text[text.index("        all_reduce(x") :])
        torch.manual_seed(1)
        x, y = torch.randn(12, 6, dtype=torch.float64), torch.randint(5, (12,))
        share = torch.arange(12).split([6, 4, 2])[rank]
        names = vars(collectives) | {"F": nn.functional, "group": None, "model": make()}
        names |= {"rows": x[share], "targets": y[share], "x": torch.tensor([rank + 1.0])}
        exec(loop + "\n" + calls, names)
        reference = make()
        nn.functional.cross_entropy(reference(x), y).backward()
        for p, q in zip(names["model"].parameters(), reference.parameters()):
            torch.testing.assert_close(p.grad, q.grad, rtol=0, atol=1e-12)
        assert names["x"].tolist() == [9]  # the maximum of three, added up

    copied("collectives", 3, work)
