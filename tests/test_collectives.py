"""Every collective against torch.distributed's, every cost against its formula, and the wire."""

import functools
import math
import os
import types

import pytest
import torch
import torch.distributed as dist
from conftest import enter, join

import collectives
import double_tree
from proof.ledger import Ledger

EXACT_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.int64)
DOUBLINGS = {"recursive-doubling", "halving-doubling"}


def all_reduce_ways(n):
    """{name: all-reduce} of all that n ranks can run."""
    names = set(collectives.ALGORITHMS)
    if n & (n - 1):
        names -= DOUBLINGS
    ways = {name: functools.partial(collectives.all_reduce, algorithm=name) for name in names}
    trees = {"tree": double_tree.tree_all_reduce, "double-tree": double_tree.double_tree_all_reduce}
    return ways | trees


def inputs(n, size, dtype=torch.float32):
    """What each of n ranks starts with; every rank can make all of it."""
    generator = torch.Generator().manual_seed(size)
    if dtype == torch.int64:
        return [torch.randint(-100, 100, (size,), generator=generator) for _ in range(n)]
    return [torch.randn(size, generator=generator, dtype=torch.float64).to(dtype) for _ in range(n)]


def use_all(library, x, rank, n, group=None):
    """{name: result} of every collective of a library. x has 3 n elements."""
    pieces, last, results = list(x.chunk(n)), n - 1, {}
    # torch.distributed has these two under the first names from 2.13 on
    all_gather = getattr(library, "all_gather_single", None) or library.all_gather_into_tensor
    reduce_scatter = getattr(library, "reduce_scatter_single", None)
    reduce_scatter = reduce_scatter or library.reduce_scatter_tensor

    def result(name, tensor):
        results[name] = tensor
        return tensor

    library.broadcast(result("broadcast", x.clone()), group=group, group_src=last)
    reduced = x.clone()
    library.reduce(reduced, group=group, group_dst=last)
    # Torch leaves anything in the tensors of the other ranks
    result("reduce", reduced if rank == last else x)
    part = result("scatter", torch.zeros_like(pieces[0]))
    library.scatter(part, pieces if rank == last else None, group=group, group_src=last)
    rows = result("gather", x.new_zeros(n, len(x)))
    library.gather(x, list(rows) if rank == last else None, group=group, group_dst=last)
    all_gather(result("all_gather", x.new_zeros(n * len(x))), x, group=group)
    reduce_scatter(result("reduce_scatter", torch.zeros_like(pieces[0])), x, group=group)
    library.all_to_all_single(result("all_to_all", torch.zeros_like(x)), x, group=group)
    sizes = [(rank + other) % 3 for other in range(n)]
    uneven = result("all_to_all, uneven", x.new_zeros(sum(sizes)))
    library.all_to_all_single(uneven, x[: sum(sizes)], sizes, sizes, group)
    library.all_reduce(result("all_reduce", x.clone()), group=group)
    library.all_reduce(result("all_reduce, maximum", x.clone()), dist.ReduceOp.MAX, group)
    library.barrier(group)
    return results


# --- results


def all_reduces_of_any_size_and_dtype(rank, world):
    results = {}
    ways = {**all_reduce_ways(world), "plain ring": collectives.plain_ring_all_reduce}
    for dtype in EXACT_DTYPES:
        for size in {0, 1, world - 1, world + 1, 101}:
            for name, all_reduce in ways.items():
                x = inputs(world, size, dtype)[rank]
                all_reduce(x)
                results[name, size, dtype] = x
    return results


def sums_in_their_order(rank, world):
    sums = {}
    for name, all_reduce in {"gloo": dist.all_reduce, **all_reduce_ways(world)}.items():
        sums[name] = inputs(world, 960)[rank]
        all_reduce(sums[name])
    return sums


@pytest.mark.parametrize("world", [1, 2, 3, 6, 8])
def test_results(ranks, world):
    """Every collective equals torch's bit for bit; an all-reduce of any size and dtype is the sum;
    and its order of summation is the algorithm's."""

    def work(rank):
        for dtype in EXACT_DTYPES:
            torch.manual_seed(rank)
            x = torch.randint(-8, 9, (3 * world,)).to(dtype)
            theirs = use_all(dist, x, rank, world)
            for name, result in use_all(collectives, x, rank, world).items():
                assert torch.equal(result, theirs[name]), (name, dtype)
        sums = all_reduces_of_any_size_and_dtype(rank, world)
        return sums, sums_in_their_order(rank, world)

    everywhere, ordered = zip(*ranks(world, work))
    for (_, size, dtype), result in everywhere[0].items():
        exact = torch.stack([x.double() for x in inputs(world, size, dtype)])
        error = 0 if dtype == torch.int64 else world * torch.finfo(dtype).eps
        assert ((result.double() - exact.sum(0)).abs() <= error * exact.abs().sum(0)).all()
    for other in everywhere[1:]:  # not one bit may differ, or replicas drift apart
        assert all(torch.equal(result, other[key]) for key, result in everywhere[0].items())
    check_order(ordered[0], world)


def check_order(got, world):
    """Bit for bit: the ring's is gloo's; a server and direct go by rank; recursive
    doubling and halving-doubling by pairs."""
    by_pairs = inputs(world, 960)
    by_rank = functools.reduce(torch.add, by_pairs)
    assert torch.equal(got["ring"], got["gloo"])
    assert all(torch.equal(got[name], by_rank) for name in ("server", "direct"))
    if world & (world - 1) == 0:  # a power of two
        while len(by_pairs) > 1:
            by_pairs = [a + b for a, b in zip(by_pairs[::2], by_pairs[1::2])]
        assert torch.equal(got["halving-doubling"], by_pairs[0])
        assert torch.equal(got["recursive-doubling"], by_pairs[0])
    # Else this test would show nothing
    assert world < 4 or not torch.equal(got["ring"], by_rank)


def operators(rank):
    out = {}
    for op in collectives.OPERATORS:
        theirs = inputs(4, 23, torch.int64)[rank]
        dist.all_reduce(theirs, op)
        for name, all_reduce in all_reduce_ways(4).items():
            ours = inputs(4, 23, torch.int64)[rank]
            all_reduce(ours, op)
            out[name, str(op)] = torch.equal(ours, theirs)
    return out


def test_operators(ranks):
    assert all(all(out.values()) for out in ranks(4, operators))


def views(rank):
    for name, all_reduce in all_reduce_ways(3).items():
        x = torch.zeros(4, 6)
        if name != "tree":
            with pytest.raises(RuntimeError, match="not compatible"):
                all_reduce(x.t())
        all_reduce(x[1:3].add_(rank))
        assert x.tolist() == [[0] * 6, [3] * 6, [3] * 6, [0] * 6]
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
    leaf = torch.ones(3, requires_grad=True)
    collectives.all_reduce(leaf)
    assert leaf.tolist() == [3, 3, 3]


def test_views(ranks):
    ranks(3, views)


def misfits(rank):
    """Mistakes that one rank can see, with few enough bytes that no rank would fail by itself."""
    x, whole = torch.ones(4), torch.zeros(12)
    four = [torch.zeros(4) for _ in range(4)]
    uneven = [torch.zeros(size) for size in (4, 4, 5)]
    reduce_scatter, all_to_all = collectives.reduce_scatter_single, collectives.all_to_all_single
    calls = [
        lambda: collectives.all_reduce(x, algorithm="recursive-doubling"),
        lambda: collectives.all_reduce(x, algorithm="halving-doubling"),
        lambda: collectives.all_gather_single(whole.int(), x),
        lambda: collectives.all_gather_single(torch.zeros(13), x),
        lambda: collectives.all_gather_single(torch.zeros(24), x),
        lambda: reduce_scatter(x.int(), whole),
        lambda: reduce_scatter(x.double(), whole),
        lambda: reduce_scatter(torch.zeros(1), whole),
        lambda: reduce_scatter(x, torch.zeros(13)),
        lambda: all_to_all(whole.int(), whole),
        lambda: all_to_all(whole, whole, [4, 8], [4, 4, 4]),
        lambda: all_to_all(whole, whole, [4, 4, 4], [4, 4, 4, 0]),
        lambda: all_to_all(whole, torch.zeros(13)),
    ]
    for parts in (four, four[:2], uneven, [part.int() for part in four[:3]]):  # the root sees these
        calls.append(functools.partial(collectives.scatter, x, parts, group_src=rank))
        calls.append(functools.partial(collectives.gather, x, parts, group_dst=rank))
    for call in calls:
        with pytest.raises(ValueError, match="must|a power of two, not 3 ranks"):
            call()
    collectives.barrier()  # no message of a refused call is on its way


def test_what_one_rank_can_see_is_refused(ranks):
    ranks(3, misfits)


# --- groups


def subgroups(rank):
    groups = [dist.new_group([0, 2, 5]), dist.new_group([1, 3, 4, 6])]
    members = ([0, 2, 5], [1, 3, 4, 6])
    mine = int(rank not in members[0])
    group, n = groups[mine], len(members[mine])
    x = torch.arange(3 * n) + 10 * rank
    place = dist.get_rank(group)
    ours = use_all(collectives, x, place, n, group)
    theirs = use_all(dist, x, place, n, group)
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    y = torch.tensor([rank])
    collectives.broadcast(y, group_src=1, group=group)
    assert y.item() == members[mine][1]
    for name, all_reduce in all_reduce_ways(n).items():
        y = torch.tensor([1 << rank])
        all_reduce(y, group=group)
        assert y.item() == sum(1 << r for r in members[mine]), name
    with pytest.raises(ValueError, match="not in the group"):
        collectives.all_reduce(y, group=groups[1 - mine])


def test_subgroups(ranks):
    ranks(7, subgroups)


# --- costs


class Counter(collectives.Communicator):
    """A group that counts its messages.

    `counts` has the bytes that this rank has sent, and the longest chain of messages that has
    reached it. Each message's place in its chain is sent ahead of it. A message waits for what its
    sender has received, and for the sender's previous message to the same rank."""

    def __init__(self, group=None):
        super().__init__(group)
        self.counts = types.SimpleNamespace(sent=0, chain=0, latest={})  # shared by its parts

    def exchange(self, send, receive, combine=None):
        counts, places = self.counts, {}
        for rank, t in send.items():
            if rank != self.rank and t.numel():
                peer = self.members[rank]
                place = max(counts.chain, counts.latest.get(peer, 0)) + 1
                counts.latest[peer] = place
                counts.sent += t.nbytes
                places[rank] = torch.tensor([place], device=t.device)
        arriving = {}
        for rank, t in receive.items():
            if rank != self.rank and t.numel():
                arriving[rank] = torch.zeros(1, device=t.device, dtype=torch.int64)
        super().exchange(places, arriving)
        super().exchange(send, receive, combine)
        for place in arriving.values():
            counts.chain = max(counts.chain, place.item())


def cost_of(counts):
    """(rounds, bytes that the busiest rank sends, bytes that all send). Rounds: the longest chain
    of messages that each wait for the one before."""
    sent = [of_rank.sent for of_rank in counts]
    return max(of_rank.chain for of_rank in counts), max(sent), sum(sent)


def rounds_of(n, node, pieces):
    """{algorithm: rounds}: hierarchical in nodes of `node` ranks, a double tree with so many pieces
    of each half (docs/learn/collectives.md)."""
    log2, several = (n - 1).bit_length(), int(n > 1)
    return {
        "server": 2 * several,
        "direct": several,
        "ring": 2 * (n - 1),
        "recursive-doubling": log2,
        "halving-doubling": 2 * log2,
        "tree": 2 * max(depth for *_, depth in [(0, 0, 0), *double_tree.tree_links(n)]),
        "double-tree": 2 * (log2 + pieces - 1) * several,
        "hierarchical": 2 * (node - 1) + 2 * (n // node - 1),
    }


def all_reduces(rank, world, even):
    nodes = [n for n in range(1, world + 1) if world % n == 0]
    known = all_reduce_ways(world)
    hierarchical = known["hierarchical"]
    ways = {(name, None): way for name, way in known.items()}
    ways["double-tree", None] = functools.partial(known["double-tree"], piece_size=10)
    ways |= {("hierarchical", n): functools.partial(hierarchical, node_size=n) for n in nodes}
    counts = {}
    for size in (even, even + 7):
        for key, all_reduce in ways.items():
            x, counter = torch.full((size,), 1 << (rank % 3), dtype=torch.uint8), Counter()
            all_reduce(x, group=counter)
            assert (x == sum(1 << (r % 3) for r in range(world))).all()
            counts[size, *key] = counter.counts
    return counts


@pytest.mark.parametrize("world", [*range(1, 8), 9, 12])
def test_rounds_and_bytes_equal_the_formulas(ranks, world):
    even = 4 * world * (1 << world.bit_length())

    def work(rank):
        others = other_collectives(rank, world)
        return all_reduces(rank, world, even), others

    of_all_reduces, of_others = zip(*ranks(world, work))
    check_all_reduces(of_all_reduces, world, even)
    check_other_collectives(of_others, world)


def check_all_reduces(counts, world, even):
    """Exactly, where chunks come out equal; and in total always."""
    for size, name, node in counts[0]:
        counted = cost_of([of_rank[size, name, node] for of_rank in counts])
        pieces = -(-size // 20)  # of half the tensor
        rounds = rounds_of(world, node or math.gcd(2, world), pieces)[name]
        due = {
            "tree": (min(world - 1, 3) * size, 2 * (world - 1) * size),
            "double-tree": (min(world, 4) * size // 2, 2 * (world - 1) * size),
        }
        busiest, total = (due | collectives.formulas(world, size))[name]
        busiest *= int(world > 1)
        assert counted[::2] == (rounds, total), (name, node)
        assert size > even or counted[1] == busiest, (name, node)


def other_collectives(rank, n):
    """{name: (what was counted, rounds, bytes sent by all)}. x has n bytes."""
    x = torch.zeros(n, dtype=torch.uint8)
    one, log2 = x[:1].clone(), (n - 1).bit_length()
    parts = [x.clone() for _ in range(n)] if rank == 0 else None
    pieces = list(x.split(1)) if rank == 0 else None
    scatter_sum, all_to_all = collectives.reduce_scatter_single, collectives.all_to_all_single
    # The tree's depth: log2 N, or less where N is no power of two
    depth, at_once, all_but_own = max(i.bit_count() for i in range(n)), int(n > 1), (n - 1) * n
    found = {}
    for call, rounds, size in [
        (lambda view: collectives.broadcast(x, group_src=n - 1, group=view), depth, all_but_own),
        (lambda view: collectives.reduce(x, group_dst=n - 1, group=view), depth, all_but_own),
        (lambda view: collectives.gather(x, parts, group=view), at_once, all_but_own),
        (lambda view: collectives.scatter(one, pieces, group=view), at_once, n - 1),
        (lambda view: collectives.all_gather_single(x, one, view), n - 1, all_but_own),
        (lambda view: scatter_sum(one, x, group=view), n - 1, all_but_own),
        (lambda view: all_to_all(x.clone(), x, group=view), at_once, all_but_own),
        (lambda view: collectives.barrier(view), log2, log2 * n),
    ]:
        view = Counter()
        call(view)
        found[len(found)] = view.counts, rounds, size
    return found


def check_other_collectives(found, world):
    for i, (_, rounds, size) in found[0].items():
        assert cost_of([of_rank[i][0] for of_rank in found])[::2] == (rounds, size), i


# --- the wire


def bytes_on_the_wire(rank, nodes, path):
    """What an all-reduce of 25 MB sends from one node to another: the interface's received and sent
    bytes, and the ledger's."""
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
    before, ledger = counters(), Ledger({"wire": dist.group.WORLD})
    with ledger:
        collectives.all_reduce(x)
    dist.barrier()
    received, sent = (b - a for a, b in zip(before, counters()))
    assert (x == 3).all()
    return received, sent, ledger.sent["send", "wire"][2]


def test_bytes_on_the_wire(ranks, two_nodes, tmp_path):
    """25 MB between two nodes. Interfaces count up to 9% more, headers and what TCP sends again;
    a chunk sent twice would be 50%. Ranks of its own, because they move to the nodes."""
    for received, sent, counted in ranks(2, bytes_on_the_wire, two_nodes, str(tmp_path / "met")):
        assert counted == 25_000_000
        assert counted <= sent < 1.25 * counted
        assert counted <= received < 1.25 * counted
