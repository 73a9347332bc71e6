"""collectives.py: every collective against torch.distributed's, every cost against its formula, and
the wire itself."""

import argparse
import functools
import importlib.util
import json
import os
import pathlib
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from conftest import enter, join

import collectives
import ddp
import harness
import proof
from collectives import ALL_REDUCE, Checked
from proof.ledger import Ledger
from receipts import collectives as network

ROOT = pathlib.Path(__file__).parent.parent


class Counter(network.MessageLog, collectives.Wire):
    """A group that logs its messages."""


def power_of_two(n):
    return 1 << (n.bit_length() - 1)


def inputs(n, size, dtype=torch.float32):
    """What each of n ranks starts with; every rank can make all of it."""
    generator = torch.Generator().manual_seed(size)
    if dtype == torch.int64:
        return [torch.randint(-100, 100, (size,), generator=generator) for _ in range(n)]
    return [torch.randn(size, generator=generator, dtype=torch.float64).to(dtype) for _ in range(n)]


# --- results


def every_collective_equals_torchs_bit_for_bit(rank, world):
    run = proof.Rank(None, rank, world, torch.device("cpu"))
    return {
        name: dtypes for name, dtypes in network.differences(collectives, run).items() if dtypes
    }


@pytest.mark.parametrize("world", [1, 2, 3, 4, 6])
def test_every_collective_equals_torchs_bit_for_bit(ranks, world):
    assert ranks(world, every_collective_equals_torchs_bit_for_bit, world) == [{}] * world


def all_reduce_of_any_size_and_dtype(rank, world):
    results = {}
    for dtype in network.EXACT_DTYPES:
        for size in {0, 1, world - 1, world + 1, 101}:
            for name, all_reduce in ALL_REDUCE.items():
                x = inputs(world, size, dtype)[rank]
                all_reduce(x)
                results[name, size, dtype] = x
    return results


@pytest.mark.parametrize("world", [1, 2, 3, 4, 5, 6, 8])
def test_all_reduce_of_any_size_and_dtype(ranks, world):
    everywhere = ranks(world, all_reduce_of_any_size_and_dtype, world)
    for (_, size, dtype), result in everywhere[0].items():
        exact = torch.stack([x.double() for x in inputs(world, size, dtype)])
        error = 0 if dtype == torch.int64 else world * torch.finfo(dtype).eps
        assert ((result.double() - exact.sum(0)).abs() <= error * exact.abs().sum(0)).all()
    for other in everywhere[1:]:  # not one bit may differ, or replicas drift apart
        assert all(torch.equal(result, other[key]) for key, result in everywhere[0].items())


def the_order_of_summation(rank):
    world, out = dist.get_world_size(), {}
    for name, all_reduce in {"gloo": dist.all_reduce, **ALL_REDUCE}.items():
        out[name] = inputs(world, 960)[rank]
        all_reduce(out[name])
    return out


def test_the_order_of_summation(ranks):
    """Bit for bit: the ring's is gloo's; a server, sequential and direct go by rank; recursive
    doubling and halving-doubling by pairs."""

    for world in (2, 3, 4, 8):
        got, x = ranks(world, the_order_of_summation)[0], inputs(world, 960)
        by_rank = functools.reduce(torch.add, x)
        by_pairs = x
        while len(by_pairs) > 1 and world != 3:
            by_pairs = [a + b for a, b in zip(by_pairs[::2], by_pairs[1::2])]
        assert torch.equal(got["ring"], got["gloo"])
        assert all(torch.equal(got[name], by_rank) for name in ("server", "sequential", "direct"))
        if world != 3:
            assert torch.equal(got["halving-doubling"], by_pairs[0])
            assert torch.equal(got["recursive-doubling"], by_pairs[0])
        # Else this test would show nothing
        assert world < 4 or not torch.equal(got["ring"], by_rank)


def the_sign_of_zero_is_the_same_on_all_ranks(rank):
    signs = {}
    for name, all_reduce in ALL_REDUCE.items():
        for op in (collectives.MIN, collectives.MAX):
            for size in (3, 96):  # torch adds long ones by another loop
                x = torch.full((size,), -0.0 if rank % 3 else 0.0)
                all_reduce(x, op)
                assert (x == 0).all()
                signs[name, str(op), size] = torch.signbit(x).tolist()
    return signs


def test_the_sign_of_zero_is_the_same_on_all_ranks(ranks):
    """minimum(0.0, -0.0) is one of both, by their order: ranks must take them in the same one."""

    for world in (2, 6):
        everywhere = ranks(world, the_sign_of_zero_is_the_same_on_all_ranks)
        assert all(signs == everywhere[0] for signs in everywhere)


def operators(rank):
    out = {}
    for op in collectives.OPERATORS:
        theirs = inputs(5, 23, torch.int64)[rank]
        dist.all_reduce(theirs, op)
        for name, all_reduce in ALL_REDUCE.items():
            ours = inputs(5, 23, torch.int64)[rank]
            all_reduce(ours, op)
            out[name, str(op)] = torch.equal(ours, theirs)
    return out


def test_operators(ranks):
    assert all(all(out.values()) for out in ranks(5, operators))


@mock.patch.object(collectives, "SEGMENT", 5)
def segments_change_neither_result_nor_cost(rank):
    world, logs = dist.get_world_size(), {}
    for name, all_reduce in ALL_REDUCE.items():
        counter, x = Counter(), inputs(world, 120 * world, torch.int64)[rank]
        all_reduce(x, group=counter)
        assert torch.equal(x, sum(inputs(world, 120 * world, torch.int64))), name
        logs[name] = counter.log
    x, part = inputs(world, 120 * world, torch.int64)[rank], torch.zeros(120, dtype=torch.int64)
    collectives.reduce_scatter_single(part, x)
    assert torch.equal(part, sum(inputs(world, 120 * world, torch.int64)).chunk(world)[rank])
    assert torch.equal(x, inputs(world, 120 * world, torch.int64)[rank])
    return logs


def test_segments_change_neither_result_nor_cost(ranks):
    for world in (4, 6):
        logs = ranks(world, segments_change_neither_result_nor_cost)
        node = collectives.default_node(world)
        for name, formula in network.formulas(world, 120 * world * 8, node).items():
            assert network.tally([log[name] for log in logs]) == formula


def segments_and_kept_buffers_change_no_bit(rank, world):
    for size in (0, 1, 100 * world, 100 * world + 7):
        results = []
        for segment in (1000, 10):
            wire, result = collectives.Wire(), []
            with mock.patch.object(collectives, "SEGMENT", segment):
                for all_reduce in ALL_REDUCE.values():
                    result.append(inputs(world, size)[rank])
                    all_reduce(result[-1], group=wire)
                result.append(inputs(world, size)[rank])
                collectives.reduce(result[-1], world - 1, group=wire)
                part = torch.zeros(size // world)
                whole = inputs(world, size)[rank][: size // world * world]
                collectives.reduce_scatter_single(part, whole, group=wire)
            results.append([*result, part])
        assert all(torch.equal(plain, fast) for plain, fast in zip(*results)), size


@pytest.mark.parametrize("world", [2, 3, 4, 6])
def test_segments_and_kept_buffers_change_no_bit(ranks, world):
    """Many segments, beside one that holds the whole tensor."""
    ranks(world, segments_and_kept_buffers_change_no_bit, world)


def strides_and_views(rank):
    for all_reduce in ALL_REDUCE.values():
        base = torch.full((4, 6), -1.0)
        x = base[:, ::2]
        x.copy_(torch.arange(12.0).view(4, 3) + rank)
        all_reduce(x)
        assert torch.equal(x, 3 * torch.arange(12.0).view(4, 3) + 3) and (base[:, 1::2] == -1).all()
    x = (torch.arange(12.0).view(3, 4) + rank).t()
    collectives.broadcast(x, 1)
    assert torch.equal(x, (torch.arange(12.0).view(3, 4) + 1).t())
    collectives.reduce(x, 2)
    assert torch.equal(x, (torch.arange(12.0).view(3, 4) + 1).t() * (3 if rank == 2 else 1))
    out = torch.zeros(4, 3).t()
    collectives.all_to_all_single(out, torch.full((4, 3), float(rank)).t())
    assert torch.equal(out, torch.arange(3.0).view(3, 1).expand(3, 4))
    full = torch.zeros(6)
    mine = full[2 * rank : 2 * rank + 2]
    mine += rank + 1
    collectives.all_gather_single(full, mine)  # in place
    assert full.tolist() == [1, 1, 2, 2, 3, 3]
    collectives.reduce_scatter_single(mine, full)  # in place
    assert mine.tolist() == [3 * (rank + 1)] * 2
    full = torch.arange(6.0)
    collectives.reduce_scatter_single(torch.zeros(2), full)
    assert full.tolist() == [0, 1, 2, 3, 4, 5]
    with pytest.raises(ValueError, match="output must be contiguous"):
        collectives.all_gather_single(torch.zeros(12)[::2], mine)
    leaf = torch.ones(3, requires_grad=True)
    collectives.all_reduce(leaf)
    assert leaf.tolist() == [3, 3, 3]


def test_strides_and_views(ranks):
    ranks(3, strides_and_views)


# --- groups, and several at a time


def subgroups_by_either_rank(rank):
    groups = [dist.new_group([0, 2, 5]), dist.new_group([1, 3, 4, 6])]
    members = ([0, 2, 5], [1, 3, 4, 6])
    mine = int(rank not in members[0])
    group, n = groups[mine], len(members[mine])
    x = torch.arange(3 * n) + 10 * rank
    place = dist.get_rank(group)
    ours = network.use_all(collectives, x, place, n, group)
    theirs = network.use_all(network.torchs(), x, place, n, group)
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    y = torch.tensor([rank])
    collectives.broadcast(y, members[mine][1], group)  # a global rank, as in torch
    assert y.item() == members[mine][1]
    for name, all_reduce in ALL_REDUCE.items():
        y = torch.tensor([1 << rank])
        all_reduce(y, group=group)
        assert y.item() == sum(1 << r for r in members[mine]), name
    with pytest.raises(ValueError, match="not in the group"):
        collectives.all_reduce(y, group=groups[1 - mine])


def test_subgroups_by_either_rank(ranks):
    ranks(7, subgroups_by_either_rank)


def many_in_flight(rank, name):
    other = dist.new_group([0, 1, 2, 3, 4])
    works, tensors = [], []
    for i, size in enumerate([7, 100, 1, 0, 33]):
        for group, members in ((None, range(6)), (other, range(5))):
            if rank in members:
                x = torch.full((size,), (i + 1.0) * (rank + 1))
                works.append(ALL_REDUCE[name](x, group=group, async_op=True))
                tensors.append((x, (i + 1) * sum(r + 1 for r in members)))
    for work in reversed(works):
        work.wait()
    return all((x == due).all() for x, due in tensors)


@pytest.mark.parametrize("name", ALL_REDUCE)
def test_many_in_flight(ranks, name):
    """On one group, and on two groups that share ranks; six ranks, so that some are folded in
    halving-doubling."""

    assert all(ranks(6, many_in_flight, name))


def other_collectives_in_flight(rank):
    a, b, c, d = torch.tensor([rank]), torch.zeros(5), torch.zeros(5), torch.tensor([rank])
    works = [
        collectives.broadcast(a, 3, async_op=True),
        collectives.all_gather_single(b, torch.tensor([rank + 1.0]), async_op=True),
        collectives.barrier(async_op=True),
        collectives.all_to_all_single(c, torch.arange(5.0) + 5 * rank, async_op=True),
        collectives.broadcast(d, 1, async_op=True),
    ]
    for work in works:
        work.wait()
    return a.item(), b.tolist(), c.tolist(), d.item()


def test_other_collectives_in_flight(ranks):
    for rank, got in enumerate(ranks(5, other_collectives_in_flight)):
        assert got == (3, [1, 2, 3, 4, 5], [rank + 5 * i for i in range(5)], 1)


def stands_in_for_torchs_in_ddp(rank, name):
    results = []
    for all_reduce in (dist.all_reduce, ALL_REDUCE[name]):
        torch.manual_seed(0)
        model = torch.nn.Sequential(
            torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 4)
        ).double()
        wrapped = ddp.DDP(
            model.parameters(), dist.group.WORLD, bucket_bytes=300, all_reduce=all_reduce
        )
        for step in range(2):
            wrapped.zero_grad()
            x = torch.randn(
                3,
                8,
                dtype=torch.float64,
                generator=torch.Generator().manual_seed(10 * step + rank),
            )
            model(x).square().sum().backward()
            wrapped.finish()
        results.append(torch.cat([p.grad.flatten() for p in model.parameters()]))
    assert wrapped.early > 1
    torch.testing.assert_close(*results, rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("name", ALL_REDUCE)
def test_stands_in_for_torchs_in_ddp(ranks, name):
    ranks(3, stands_in_for_torchs_in_ddp, name)


# --- bad input


def disagreements_are_one_sentence_on_every_rank(rank):
    odd = rank == 2
    ring, last = ALL_REDUCE["ring"], torch.zeros(3)
    calls = {
        "shape": lambda wire: ring(torch.zeros(4 + odd), group=wire),
        "dtype": lambda wire: ring(
            torch.zeros(4, dtype=torch.float64 if odd else torch.float32), group=wire
        ),
        "operator": lambda wire: ring(last, collectives.MAX if odd else collectives.SUM, wire),
        "root": lambda wire: collectives.broadcast(last, int(odd), wire),
        "collective": lambda wire: collectives.barrier(wire) if odd else ring(last, group=wire),
        "splits": lambda wire: collectives.all_to_all_single(
            torch.zeros(3), torch.zeros(3), [1, 1, 1], [2, 1, 0] if odd else [1, 1, 1], wire
        ),
    }
    said = {}
    for name, call in calls.items():
        with pytest.raises(ValueError) as e:
            call(Checked())
        said[name] = str(e.value)
    x = torch.full((4,), rank + 1.0)
    ring(x, group=Checked())  # and where all agree it goes on
    assert x.tolist() == [6.0] * 4
    return said


def test_disagreements_are_one_sentence_on_every_rank(ranks):
    said = ranks(3, disagreements_are_one_sentence_on_every_rank)
    assert said[0] == said[1] == said[2]
    assert (
        "float32 (4,), rank 2 calls all_reduce" in said[0]["shape"]
        and "float32 (5,)" in said[0]["shape"]
    )
    assert "float64 (4,)" in said[0]["dtype"] and "MAX" in said[0]["operator"]
    assert "broadcast from 1" in said[0]["root"] and "rank 2 calls barrier" in said[0]["collective"]
    assert "rank 2 sends 2 elements to rank 0, which expects 1" in said[0]["splits"]


def what_one_rank_can_see_is_refused(rank):
    x, c = torch.zeros(4), collectives
    for message, call in {
        "nodes of 3": lambda: ALL_REDUCE["hierarchical"](x, node=3),
        "is not one of SUM": lambda: c.all_reduce(x, dist.ReduceOp.BAND),
        "hold 2 times the input, float32 (3,), but is float32 (4,)": lambda: c.all_gather_single(
            x, torch.zeros(3)
        ),
        "input must be contiguous and hold 2 times the output": lambda: c.reduce_scatter_single(
            torch.zeros(1), x
        ),
        "hold 2 times the input, float32 (1,), but is float32 (3,)": lambda: c.all_gather_single(
            torch.zeros(3), torch.zeros(1)
        ),
        "which do not divide among 2 ranks": lambda: c.all_to_all_single(
            torch.zeros(3), torch.zeros(3)
        ),
        "as [1, 1]": lambda: c.all_to_all_single(x, x, [1, 1], [2, 2]),
        "must hold 2 tensors, each float32 (4,)": lambda: c.gather(x, [x], group_dst=rank),
        "their rows must be alike": lambda: c.all_to_all_single(x, x.view(2, 2)),
        "no rank 5 in a group of 2": lambda: c.broadcast(x, group_src=5),
    }.items():
        with pytest.raises(ValueError) as e:
            call()
        assert message in str(e.value)


def test_what_one_rank_can_see_is_refused(ranks):
    ranks(2, what_one_rank_can_see_is_refused)


def checked_tells_the_others_of_a_bad_argument(rank):
    odd, c, x = rank == 2, collectives, torch.zeros(6)
    calls = {
        "must hold 3 tensors": lambda wire: c.gather(x, [x] if odd else None, 2, wire),
        "several times": lambda wire: c.gather(x, [x] * 3 if odd else None, 2, wire),
        "scatter_list": lambda wire: c.scatter(x, [x] if odd else None, 2, wire),
        "not one of SUM": lambda wire: c.all_reduce(x, dist.ReduceOp.BAND if odd else c.SUM, wire),
        "not one of": lambda wire: c.reduce(x, 0, dist.ReduceOp.BAND if odd else c.SUM, wire),
        "no rank 7": lambda wire: c.broadcast(x, 7 if odd else 0, wire),
        "output must be": lambda wire: c.all_gather_single(torch.zeros(17 if odd else 18), x, wire),
        "input must be": lambda wire: c.reduce_scatter_single(
            torch.zeros(2), x[: 5 if odd else 6], group=wire
        ),
        "rows must be alike": lambda wire: c.all_to_all_single(
            x.double() if odd else x, x.clone(), group=wire
        ),
        "do not divide": lambda wire: c.all_to_all_single(
            torch.zeros(6), x[: 5 if odd else 6], group=wire
        ),
    }
    said = {}
    for name, call in calls.items():
        with pytest.raises(ValueError) as e:
            call(Checked())
        said[name] = str(e.value)
    with pytest.raises(ValueError, match="no rank 7"):
        c.send(x, 7, Checked())  # the others need not know
    return said


def test_checked_tells_the_others_of_a_bad_argument(ranks):
    """A rank that refuses its arguments must not leave the others in the comparison."""

    said = ranks(3, checked_tells_the_others_of_a_bad_argument)
    assert said[0] == said[1] == said[2]
    for name, sentence in said[0].items():
        assert name in sentence and "rank 2 calls with a bad argument" in sentence


def checked_where_only_some_calls_have_splits(rank):
    with pytest.raises(ValueError, match="rank 0 calls all_to_all .*, rank 1 calls barrier"):
        if rank == 0:
            collectives.all_to_all_single(torch.zeros(4), torch.zeros(4), group=Checked())
        else:
            collectives.barrier(Checked())


def test_checked_where_only_some_calls_have_splits(ranks):
    ranks(2, checked_where_only_some_calls_have_splits)


def a_message_to_oneself_or_to_nobody_is_refused(rank):
    for call in (collectives.send, collectives.recv):
        with pytest.raises(ValueError, match="can't send to itself or receive from itself"):
            call(torch.zeros(2), rank)
        with pytest.raises(ValueError, match="There is no default"):
            call(torch.zeros(2))


def test_a_message_to_oneself_or_to_nobody_is_refused(ranks):
    ranks(2, a_message_to_oneself_or_to_nobody_is_refused)


class NeverAddsIntoSent(collectives.Wire):
    async def exchange(self, send, receive, combine=None):
        sent = {t.data_ptr() for t in send.values()}
        assert not sent & {t.data_ptr() for t in receive.values()}
        await super().exchange(send, receive, combine)


def reduce_scatter_never_adds_into_what_it_sends(rank, world):
    output = torch.zeros(4)
    collectives.reduce_scatter_single(output, torch.ones(4 * world), group=NeverAddsIntoSent())
    assert output.tolist() == [world] * 4


@pytest.mark.parametrize("world", [2, 5, 6, 7])
def test_reduce_scatter_never_adds_into_what_it_sends(ranks, world):
    ranks(world, reduce_scatter_never_adds_into_what_it_sends, world)


# --- costs


def rounds_and_bytes_equal_the_formulas(rank, world, even):
    nodes = [n for n in range(1, world + 1) if world % n == 0]
    ways = {(name, None): way for name, way in ALL_REDUCE.items()}
    ways |= {
        ("hierarchical", n): functools.partial(ALL_REDUCE["hierarchical"], node=n) for n in nodes
    }
    logs = {}
    for size in (even, even + 7):
        for key, all_reduce in ways.items():
            x, counter = torch.full((size,), 1 << (rank % 3), dtype=torch.uint8), Counter()
            all_reduce(x, group=counter)
            assert (x == sum(1 << (r % 3) for r in range(world))).all()
            logs[size, *key] = counter.log
    return logs


@pytest.mark.parametrize("world", [*range(1, 10), 12])
def test_rounds_and_bytes_equal_the_formulas(ranks, world):
    """Exactly, where chunks come out equal; and in total always."""
    even = 4 * world * power_of_two(world)
    logs = ranks(world, rounds_and_bytes_equal_the_formulas, world, even)
    for size, name, node in logs[0]:
        counted = network.tally([log[size, name, node] for log in logs])
        formula = network.formulas(world, size, node or collectives.default_node(world))[name]
        if size == even:
            assert counted == formula, (name, node)
        assert (counted.rounds, counted.total) == (formula.rounds, formula.total), (name, node)


@mock.patch.object(collectives, "PIECE", 10)
def a_double_tree_in_pieces(rank, world):
    most = []  # bytes that this rank sends in a round

    class Watched(Counter):
        async def exchange(self, send, receive, combine=None):
            most.append(sum(t.nbytes for t in send.values()))
            await super().exchange(send, receive, combine)

    logs = {}
    odd = dist.new_group(list(range(1, world, 2)) or [0])
    for size in (0, 1, 7, 20, 31, 160):
        for group in (None, odd) if rank % 2 or world == 1 else (None,):
            theirs = inputs(world, size, torch.float64)[rank].round()
            ours, columns = theirs.clone(), theirs.repeat_interleave(2)[::2]
            all_reduce, wire = ALL_REDUCE["double-tree"], Watched(group)
            all_reduce(ours, group=wire)
            all_reduce(columns, group=group)
            dist.all_reduce(theirs, group=group)
            assert torch.equal(ours, theirs) and torch.equal(columns, theirs)
            if group is None:
                logs[size] = wire.log
    assert max(most) <= 2 * 10 * 8
    return logs


@pytest.mark.parametrize("world", [1, 2, 3, 4, 5, 6, 7, 8, 9])
def test_a_double_tree_in_pieces(ranks, world):
    """Torch's sum in float64, contiguous or not, in the world and in a group of it; the bytes and
    the rounds of the formula, with one piece and with several; and no rank sends more than two
    pieces a round, which is its full bandwidth."""
    logs = ranks(world, a_double_tree_in_pieces, world)
    for size in logs[0]:
        counted = network.tally([log[size] for log in logs])
        pieces = max(1, -(-size // 20))
        formula = network.formulas(world, 8 * size, pieces=pieces)["double-tree"]
        assert counted.total == formula.total
        if size > 1 and world > 1:
            assert counted.rounds == formula.rounds == 2 * ((world - 1).bit_length() + pieces - 1)
        if size > 0 and size % 2 == 0:
            assert counted == formula
        for rank, log in enumerate(logs):  # half of the tensor for each of its links in the trees
            sent = sum(n for kind, _, n in log[size] if kind == "send")
            links = links_in_double_tree(rank, world)
            assert sent == 8 * (links[0] * -(-size // 2) + links[1] * (size // 2))


def links_in_double_tree(rank, world):
    """How many links a rank has in each of the two trees: a tree's node in the middle of `low` to
    `high` has its children in the middles of both sides; rank 0 stands above."""
    links = [[0] * world, [0] * world]

    def build(parent, low, high):
        """Ranks low..high-1, low odd. A node in order splits them at the largest power of two."""
        if low >= high:
            return
        span = power_of_two(high - low)
        node = low + span - 1
        for tree, place_of in enumerate((lambda p: p, lambda p: (world % 2 - 1 - p) % world)):
            links[tree][place_of(node)] += 1
            links[tree][place_of(parent)] += 1
        build(node, low, node)
        build(node, node + 1, high)

    build(0, 1, world)
    return [tree[rank] for tree in links]


def rounds_and_bytes_of_the_other_collectives(rank, world):
    logs, n, x = {}, world, torch.zeros(world, dtype=torch.uint8)
    for name, call in {
        "broadcast": lambda wire: collectives.broadcast(x, n - 1, wire),
        "reduce": lambda wire: collectives.reduce(x, n - 1, group=wire),
        "gather": lambda wire: collectives.gather(
            x, [x.clone() for _ in range(n)] if rank == 0 else None, 0, wire
        ),
        "scatter": lambda wire: collectives.scatter(
            x[:1], list(x.split(1)) if rank == 0 else None, 0, wire
        ),
        "all_gather": lambda wire: collectives.all_gather_single(x, x[:1].clone(), wire),
        "reduce_scatter": lambda wire: collectives.reduce_scatter_single(
            x[:1].clone(), x, group=wire
        ),
        "all_to_all": lambda wire: collectives.all_to_all_single(x.clone(), x, group=wire),
        "barrier": collectives.barrier,
    }.items():
        wire = Counter()
        call(wire)
        logs[name] = wire.log
    return logs


@pytest.mark.parametrize("world", [1, 2, 3, 5, 8, 13])
def test_rounds_and_bytes_of_the_other_collectives(ranks, world):
    logs = ranks(world, rounds_and_bytes_of_the_other_collectives, world)
    n, log2 = world, (world - 1).bit_length()
    # The tree's depth: log2 N, or less where N is no power of two
    chain = max(place.bit_count() for place in range(n))
    expected = {  # rounds, bytes sent by all; x has n bytes
        "broadcast": (chain, (n - 1) * n),
        "reduce": (chain, (n - 1) * n),
        "gather": (int(n > 1), (n - 1) * n),
        "scatter": (int(n > 1), n - 1),
        "all_gather": (n - 1, (n - 1) * n),
        "reduce_scatter": (n - 1, (n - 1) * n),
        "all_to_all": (int(n > 1), (n - 1) * n),
        "barrier": (log2, log2 * n),
    }
    for name, due in expected.items():
        cost = network.tally([log[name] for log in logs])
        assert (cost.rounds, cost.total) == due, name


def test_prediction():
    link, fast = network.Link(5e-6, 1 / 50e9), network.Link(0, 0)
    for n in (2, 3, 8, 12, 1024):
        small, large = (network.predict(n, size, link) for size in (8, 8e9))
        cost = network.formulas(n, 8e9)
        assert large["ring"] == pytest.approx(
            cost["ring"].rounds * 5e-6 + 2 * (n - 1) / n * 8e9 / 50e9
        )
        assert large["ring"] <= min(large.values()) * 1.05
        assert n == 3 or small["ring"] >= small["halving-doubling"]
    assert network.predict(1, 8, link) == dict.fromkeys(ALL_REDUCE, 0)
    # 10 KB on 1,024 ranks: 10 rounds of 5 us, in each 10 KB
    times = network.predict(1024, 10_000, link)
    assert times["recursive-doubling"] == pytest.approx(52e-6) == min(times.values())
    assert times["halving-doubling"] > 100e-6
    # A double tree on 1,024 ranks: 20 rounds with one piece; at best 43.9 ms for 1 GB, where the
    # bytes alone take 40 ms
    assert network.predict(1024, 0, link)["double-tree"] == pytest.approx(100e-6)
    in_pieces = [network.predict(1024, 1e9, link, pieces=k)["double-tree"] for k in range(1, 400)]
    assert network.predict(1024, 1e9, link)["double-tree"] == min(in_pieces)
    assert min(in_pieces) == pytest.approx(43.88e-3, rel=1e-3)
    # No power of two: rank 1029 folds its tensor into rank 5's first, and gets the sum at the end
    assert network.predict(1030, 0, link)["recursive-doubling"] == pytest.approx(11 * 5e-6)
    assert network.predict(2047, 0, link)["recursive-doubling"] == pytest.approx(12 * 5e-6)
    busy = network.Link(0, 1 / 50e9)
    assert network.predict(1030, 1e9, busy)["recursive-doubling"] == pytest.approx(12 * 1e9 / 50e9)
    # Nodes of 8 with nothing to pay inside: 1/8 of the bytes, 1/8 of the ranks
    inside = network.predict(64, 8e9, link, fast, 8)["hierarchical"]
    assert inside == pytest.approx(network.predict(8, 1e9, link)["ring"])


# --- the script


def test_script(script, tmp_path, monkeypatch):
    monkeypatch.setattr(network, "MOST_BYTES", 1 << 20)  # the curve's large sizes take the time
    plots = f"--plot {tmp_path / 'curve'}" if importlib.util.find_spec("matplotlib") else ""
    code, said = script(
        "collectives", f"--nproc 3 --size 6KB --json {tmp_path / 'out.json'} {plots}"
    )
    assert (
        code == 0
        and "equal torch's, bit for bit" in said
        and "the model's error" in said
        and "WRONG" not in said
    ), said
    result = json.loads((tmp_path / "out.json").read_text())
    assert result["ok"] and result["world_size"] == 3 and result["counted"] == result["formulas"]
    assert set(result["curve"][0]["seconds"]) == {"torch", *ALL_REDUCE}
    assert not plots or all(
        (tmp_path / f"curve.{kind}").stat().st_size > 1000 for kind in ("png", "svg")
    )


def test_script_predicts_and_refuses(script):
    code, said = script("collectives", "--ranks 1024 --alpha 5us --beta 50GB/s --nodes-of 8")
    assert code == 0 and "1024 ranks" in said and "* the fastest" in said
    code, said = script("collectives", "--ranks 10 --nodes-of 4")
    assert (
        code == 2 and said == "collectives.py: 10 ranks do not divide into nodes of --nodes-of 4\n"
    )
    for flag in ("--alpha 1us", "--beta 1GB/s", "--inside-alpha 1us", "--inside-beta 1GB/s"):
        code, said = script("collectives", flag)
        assert code == 2 and "is for a prediction: add --ranks, or leave it out" in said
    for text, value in (
        ("5us", 5e-6),
        ("0.5ms", 5e-4),
        ("5", None),
        ("us", None),
        ("-5us", None),
        ("5MB", None),
    ):
        parse = harness.quantity(harness.TIME, "5us")
        if value:
            assert parse(text) == pytest.approx(value)
        else:
            with pytest.raises(argparse.ArgumentTypeError, match="such as 5us"):
                parse(text)


# --- the wire


def bytes_on_the_wire(rank, nodes, path):
    """What an all-reduce of 25 MB sends from one node to another: the interface's received and sent
    bytes, the Counter's, the ledger's."""
    dist.destroy_process_group()
    enter(nodes[rank])
    os.environ["GLOO_SOCKET_IFNAME"] = f"wire{rank}"
    join(path, rank, 2)

    def counters():
        for line in open("/proc/self/net/dev"):
            if line.strip().startswith("wire"):
                numbers = line.split(":")[1].split()
                return int(numbers[0]), int(numbers[8])

    x = torch.full((6_250_000,), rank + 1.0)
    collectives.all_reduce(torch.zeros(8))
    dist.barrier()
    before, counter, ledger = counters(), Counter(), Ledger({"wire": dist.group.WORLD})
    with ledger:
        collectives.all_reduce(x, group=counter)
    dist.barrier()
    received, sent = (b - a for a, b in zip(before, counters()))
    assert (x == 3).all()
    logged = sum(size for kind, _, size in counter.log if kind == "send")
    return received, sent, logged, ledger.sent["send", "wire"][2]


def test_bytes_on_the_wire(ranks, two_nodes, tmp_path):
    """25 MB between two nodes: what the Counter and the ledger say was sent the interfaces counted
    too, within 3%. Ranks of its own, because they move to the nodes."""
    for received, sent, counted, ledger in ranks(
        2, bytes_on_the_wire, two_nodes, str(tmp_path / "met")
    ):
        assert counted == ledger == 25_000_000
        assert abs(sent / counted - 1) < 0.03 and abs(received / counted - 1) < 0.03, (
            sent,
            received,
        )
