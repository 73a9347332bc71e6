"""Collectives: all of them from messages between two ranks, and eight ways to all-reduce.

A collective moves tensors between the N ranks of a group. An all-reduce gives all of them the sum.
On a ring each rank cuts its tensor into N chunks and talks to its neighbours. Here N is 3. The
columns are chunks 0, 1 and 2; "12" is rank 1's plus rank 2's; "." is of no use any more. In each
round rank r sends one chunk to rank r-1:

              start      round 1       round 2        rounds 3 and 4
    rank 0    0  0  0    0   .   01    012  .   .     012 012 012     1, 2: a reduce-scatter,
    rank 1    1  1  1    12  1   .     .   012  .     012 012 012     rank r has the sum of chunk r
    rank 2    2  2  2    .   02  2     .    .  012    012 012 012     3, 4: an all-gather

Sent: a rank sends 2 (N-1) chunks, that is 2 S (N-1)/N bytes for a tensor of S bytes: about 2 S,
however many ranks there are. In no all-reduce does the busiest rank send less. But each of the
2 (N-1) rounds waits for the one before. So small tensors are faster by recursive doubling: log2 N
rounds, in each of which a rank sends all S bytes. Halving-doubling lies between: 2 log2 N rounds
with the ring's bytes, if N is a power of two. Two trees come near to that for any N.
docs/collectives.md has the costs of them all.

Backward: autograd sees none of these messages, so whoever uses them writes it by hand. Where
forward copies, backward adds up: broadcast and reduce are each other's backward, all-gather and
reduce-scatter too. All-to-all goes back the way it came. The backward of all-reduce is all-reduce
if each rank has its own loss and these add up. If all compute the same loss, it is the identity.

Don't train with these: torch.distributed's are as fast or faster. These are here to be read.

    torchrun --nproc_per_node=4 collectives.py
    python collectives.py --ranks 1024              # starts no processes: predicts the times

Patarasuk and Yuan 2009 (ring). Thakur, Rabenseifner and Gropp 2005 (trees, both doublings).
Sanders, Speck and Traeff 2009 (two trees).
"""

import contextlib
import copy
import functools
import math
import types
import warnings

import torch
import torch.distributed as dist

SUM, PRODUCT = dist.ReduceOp.SUM, dist.ReduceOp.PRODUCT
MIN, MAX = dist.ReduceOp.MIN, dist.ReduceOp.MAX
OPERATORS = {SUM: torch.add, PRODUCT: torch.mul, MIN: torch.minimum, MAX: torch.maximum}
SEGMENT = 1 << 19  # elements, 2 MB of float32 (see Wire.exchange_and_combine)
PIECE = 1 << 17  # elements, 512 KB of float32: what a double tree sends at a time

# --- the ring
#
# A wire is the group as this rank sees it. await wire.exchange({left: a}, {right: b}) is a round: a
# goes to the left, and b comes from the right. With `combine` what arrives is added to b (or the
# maximum of both is taken, and so on). An algorithm's x is flat, and changes in place.
#
# The algorithms are coroutines only so that async_op can stop them between rounds (see Work). Read
# `await wire.exchange(...)` as: do this round, and wait for it.


async def ring_all_reduce(wire, x, combine):
    """Every rank gets the sum. All links are busy all the time."""
    chunks = x.tensor_split(wire.size)
    await ring_reduce_scatter(wire, chunks, combine)
    await ring_all_gather(wire, chunks)


async def ring_reduce_scatter(wire, chunks, combine):
    """Chunk r starts at rank r-1 and is passed left until it reaches rank r. Every rank on the way
    adds its own part. In the end only chunk r is a full sum."""
    n, rank = wire.size, wire.rank
    left, right = (rank - 1) % n, (rank + 1) % n
    for step in range(n - 1):
        partial = chunks[(rank + step + 1) % n]  # of step + 1 ranks; at first of this rank alone
        arriving = chunks[(rank + step + 2) % n]  # the next step sends it on
        await wire.exchange({left: partial}, {right: arriving}, combine)


async def ring_all_gather(wire, chunks):
    """Rank r starts with chunk r. Every round passes on the chunk of the round before."""
    n, rank = wire.size, wire.rank
    left, right = (rank - 1) % n, (rank + 1) % n
    for step in range(n - 1):
        arriving = chunks[(rank + step + 1) % n]
        await wire.exchange({left: chunks[(rank + step) % n]}, {right: arriving})


# --- the tree: the root tells one rank, both tell one more, these four tell one more each, ...


async def tree_broadcast(wire, x, root):
    """With 8 ranks and root 0: 0 -> 4, then 0 -> 2 and 4 -> 6, then 0 -> 1, 2 -> 3, 4 -> 5 and
    6 -> 7. That is log2 N rounds. A loop at the root would take N-1."""
    for children, parents in tree(wire, x, root):
        await wire.exchange(children, parents)


async def tree_reduce(wire, x, root, combine):
    """The same messages backwards. A rank adds its children's sums to its x, and sends the result
    to its parent. Only the root's x changes."""
    if wire.rank != root:
        x = x.clone()
    for children, parents in reversed(tree(wire, x, root)):
        await wire.exchange(parents, children, combine)


def tree(wire, x, root):
    """This rank's (children, parents) in each round: {rank: x} of one rank, or {}."""
    place = (wire.rank - root) % wire.size  # the root is at place 0
    rounds = []
    for distance in reversed(powers_of_two(wire.size)):
        children, parents = {}, {}
        if place % (2 * distance) == 0 and place + distance < wire.size:
            children = {(wire.rank + distance) % wire.size: x}
        elif place % (2 * distance) == distance:
            parents = {(wire.rank - distance) % wire.size: x}
        rounds.append((children, parents))
    return rounds


def powers_of_two(n):
    """1, 2, 4, ... below n."""
    return [1 << i for i in range((n - 1).bit_length())]


# --- doubling: in round k a rank and its partner, 2^k further on or back, talk. log2 N rounds


async def recursive_doubling_all_reduce(wire, x, combine):
    """The partners swap all that they have, and both add up. So each has the sum of 2 ranks, then
    of 4, of 8, ... A rank sends S log2 N bytes. N must be a power of two: see `folded`."""
    for distance in powers_of_two(wire.size):
        partner = wire.rank ^ distance
        await wire.exchange({partner: x}, {partner: x}, combine)


async def halving_doubling_all_reduce(wire, x, combine):
    """The partners cut what they have in two. Each keeps one half and adds the other's copy of it.
    The next round halves what it kept. At the end a rank has 1/N of the sum. The same pairs in
    reverse order hand the halves back. N must be a power of two: see `folded`."""
    rest, halvings = x, []
    for distance in powers_of_two(wire.size):
        partner = wire.rank ^ distance
        kept, sent = rest.tensor_split(2)
        if wire.rank & distance:
            kept, sent = sent, kept
        await wire.exchange({partner: sent}, {partner: kept}, combine)
        halvings.append((partner, kept, sent))
        rest = kept
    for partner, kept, sent in reversed(halvings):
        await wire.exchange({partner: kept}, {partner: sent})


async def folded(algorithm, wire, x, combine):
    """Any number N of ranks, for an algorithm that needs a power of two. It runs on p of them, the
    largest such number. Rank p+i first adds its tensor to rank i's, and gets the sum at the end."""
    p = 1 << (wire.size.bit_length() - 1)
    if wire.rank >= p:
        await wire.exchange({wire.rank - p: x}, {}, combine)
        await wire.exchange({}, {wire.rank - p: x})
        return
    extra = {wire.rank + p: x} if wire.rank + p < wire.size else {}
    if p < wire.size:
        await wire.exchange({}, extra, combine)
    await algorithm(wire.among(range(p)), x, combine)
    await wire.exchange(extra, {})


# --- two trees: a ring's bytes in a tree's rounds


async def double_tree_all_reduce(wire, x, combine):
    """Each half of x has a tree of its own. Its pieces travel up to the root, one behind the other,
    and are added on the way. Then the sums travel down. A rank with children in one tree is a leaf
    of the other, so it sends two pieces a round: 2 S bytes in 2 (log2 N + pieces - 1) rounds."""
    rounds = double_tree(wire, x)
    for parents, children in rounds:
        await wire.exchange(parents, children, combine)
    for parents, children in reversed(rounds):
        await wire.exchange(children, parents)


def double_tree(wire, x):
    """This rank's (parents, children) in each round of the way up: {rank: piece of x}."""
    n, height = wire.size, (wire.size - 1).bit_length()
    first, second = (half.split(PIECE) for half in x.tensor_split(2))
    rounds = [({}, {}) for _ in range(len(first) + height - 1)]
    # The second tree is the first one mirrored. If N is odd, rank 0 is the root of both
    trees = (first, lambda place: place), (second, lambda place: (n % 2 - 1 - place) % n)
    for pieces, rank_at in trees:
        place = rank_at(wire.rank)  # mirrored twice, a rank is itself again
        for child in range(1, n):
            path = path_to_root(child, n)
            start = height - (len(path) - 1)  # the deepest ranks begin
            if place == child:
                for (parents, _), piece in zip(rounds[start:], pieces):
                    parents[rank_at(path[1])] = piece
            elif place == path[1]:
                for (_, children), piece in zip(rounds[start:], pieces):
                    children[rank_at(child)] = piece
    return rounds


def path_to_root(place, n):
    """With 6 places: 1, 3 -> 2 and 2, 5 -> 4 -> 0. Odd places are leaves."""
    path = [place]
    while place:
        lowest = place & -place  # its lowest bit moves one up
        place = place - lowest | 2 * lowest
        if place >= n:
            place = path[-1] - lowest
        path.append(place)
    return path


# --- the other all-reduces


async def server_all_reduce(wire, x, combine):
    """Two rounds: rank 0 adds up, in the order of the ranks, and sends the sum to all. It receives
    and sends (N-1) S bytes, while the others wait."""
    is_server = wire.rank == 0
    clients = {rank: x for rank in range(1, wire.size)} if is_server else {}
    server = {} if is_server else {0: x}
    await wire.exchange(server, clients, combine)
    await wire.exchange(clients, server)


async def direct_all_reduce(wire, x, combine):
    """One round: each rank sends its whole tensor to all others, and adds up for itself. A rank
    sends (N-1) S bytes, and holds N S bytes more. All together send N (N-1) S."""
    rows = x.new_empty(wire.size, x.numel())
    await wire.exchange({rank: x for rank in range(wire.size)}, dict(enumerate(rows)))
    x.copy_(functools.reduce(combine, rows))  # in the order of the ranks: the same bits everywhere


async def sequential_all_reduce(wire, x, combine):
    """N rounds: all send their tensors to rank 0, then all to rank 1, ... Each round waits for its
    one receiver. The bytes are those of direct."""
    rows = x.new_empty(wire.size, x.numel())
    for root in range(wire.size):
        await wire.exchange({root: x}, dict(enumerate(rows)) if wire.rank == root else {})
    x.copy_(functools.reduce(combine, rows))


async def hierarchical_all_reduce(wire, x, combine, node=None):
    """Nodes of `node` neighbouring ranks have fast links inside. Reduce-scatter inside; all-reduce
    with the ranks at the same place of the other nodes, which has 2 (N/node - 1) slow rounds with
    1/node of the bytes; all-gather inside."""
    node = node or default_node(wire.size)
    if wire.size % node:
        raise ValueError(f"{wire.size} ranks do not divide into nodes of {node}")
    place = wire.rank % node
    inside = wire.among(range(wire.rank - place, wire.rank - place + node))
    across = wire.among(range(place, wire.size, node))
    chunks = x.tensor_split(node)
    await ring_reduce_scatter(inside, chunks, combine)
    await ring_all_reduce(across, chunks[place], combine)
    await ring_all_gather(inside, chunks)


def default_node(ranks):
    """The largest divisor of `ranks` up to their square root."""
    return max(n for n in range(1, math.isqrt(ranks) + 1) if ranks % n == 0)


ALGORITHMS = {
    "server": server_all_reduce,
    "sequential": sequential_all_reduce,
    "direct": direct_all_reduce,
    "ring": ring_all_reduce,
    "recursive-doubling": functools.partial(folded, recursive_doubling_all_reduce),
    "halving-doubling": functools.partial(folded, halving_doubling_all_reduce),
    "double-tree": double_tree_all_reduce,
    "hierarchical": hierarchical_all_reduce,
}

# --- the wire: messages between two ranks


class Wire:
    """The group as this rank sees it. Ranks count in the group, or in the `members` that were given
    to `among`."""

    def __init__(self, group=None):
        self.group = group or dist.group.WORLD
        self.rank = dist.get_rank(self.group)
        if self.rank < 0:
            raise ValueError("this rank is not in the group: only members may call its collectives")
        self.size = dist.get_world_size(self.group)
        self.members = range(self.size)  # rank on this wire -> rank in the group
        self.buffers = []

    async def exchange(self, send, receive, combine=None):
        """A round. send, receive: {rank: tensor}; a tensor for the rank itself is copied. `combine`
        adds what comes to flat tensors; the sender gives it too, because both use segments."""
        if combine:
            return await self.exchange_and_combine(send, receive, combine)
        send = {rank: t.contiguous() for rank, t in send.items()}
        arrived = {rank: t.contiguous() for rank, t in receive.items()}
        if self.rank in send:
            arrived[self.rank].copy_(send[self.rank])
        works = self.post(send, arrived)
        await pause()
        for work in works:
            work.wait()
        for rank, t in receive.items():
            t.copy_(arrived[rank])  # does nothing if t is contiguous: then both are one tensor

    async def exchange_and_combine(self, send, receive, combine):
        """A round with `combine`. Large tensors come in segments, into two buffers in turn: one
        segment arrives while the one before is added. The buffers are kept for the next rounds.
        Fresh memory would cost as much as the message, in page faults."""
        longest = max([t.numel() for t in (*send.values(), *receive.values())], default=0)
        if len(self.buffers) < len(receive):
            self.buffers = [t.new_empty(2, SEGMENT) for t in receive.values()]

        def start(i):
            """Post segment i of each tensor. Behind the end of a tensor it is empty."""
            part = slice(i * SEGMENT, (i + 1) * SEGMENT)
            arriving = {}
            for (rank, t), buffer in zip(receive.items(), self.buffers):
                arriving[rank] = buffer[i % 2, : len(t[part])]
            works = self.post({rank: t[part] for rank, t in send.items()}, arriving)
            return part, arriving, works

        started = start(0)
        await pause()
        for i in range(1, 1 + math.ceil(longest / SEGMENT)):
            part, arrived, works = started
            started = start(i)
            for work in works:
                work.wait()
            for rank, t in receive.items():
                # The lower rank's first, on both ranks: minimum(0.0, -0.0) depends on the order
                first, second = t[part], arrived[rank]
                if rank < self.rank:
                    first, second = second, first
                combine(first, second, out=t[part])

    def post(self, send, receive):
        """Start all messages, and return the handles to wait for. Empty tensors are left out."""
        ops = []
        for operation, tensors in ((dist.isend, send), (dist.irecv, receive)):
            for rank, t in self.messages(tensors):
                ops.append(dist.P2POp(operation, t, group=self.group, group_peer=rank))
        # One batch. Else, on NCCL, two ranks that both send first would wait for ever
        return dist.batch_isend_irecv(ops) if ops else []

    def messages(self, tensors):
        """(rank in the group, tensor) of what crosses the network."""
        crossing = [(rank, t) for rank, t in tensors.items() if rank != self.rank and t.numel()]
        return [(self.members[rank], t) for rank, t in crossing]

    def among(self, members):
        """The wire between some of the ranks, numbered in the order of `members`."""
        part = copy.copy(self)
        part.members = [self.members[rank] for rank in members]
        part.rank, part.size = members.index(self.rank), len(members)
        return part

    def agree(self, call, sends=(), receives=()):
        """Called before each collective. Only a Checked, below, compares the calls of all ranks."""

    def refuse(self, problem):
        """Raise ValueError. In a Checked the others learn it: they are in `agree`, and wait."""
        self.agree(f"with a bad argument: {problem}")
        raise ValueError(problem)


# --- blocking, or with async_op: because the algorithms are coroutines, one can stop at its first
# `await`, return to the caller, and go on later


@types.coroutine
def pause():
    """Each round pauses here once its messages are posted, even if it has none. So all ranks post
    the messages of collectives in flight in the same order, and messages match."""
    yield


class Work:
    """A collective on its way. Its first messages are posted, and only they overlap with the
    caller's work: wait() does the rest.

    All ranks start Works in one order, and wait for them in one order. Until wait(), leave the
    tensors alone. After a Work is dropped before wait(), don't use the group any more."""

    def __init__(self, rounds):
        self.rounds = rounds
        self.advance()

    def advance(self):
        """Go on until the next pause, or to the end."""
        self.done = True  # unless it pauses
        with torch.no_grad(), contextlib.suppress(StopIteration):
            self.rounds.send(None)
            self.done = False

    def wait(self):
        while not self.done:
            self.advance()

    def __del__(self):
        if not self.done:
            warnings.warn("a collective was dropped before wait(): keep what async_op=True returns")


def perform(rounds, async_op):
    work = Work(rounds)
    if async_op:
        return work
    work.wait()


def wire_of(group):
    """A wire for one collective. A copy, because collectives in flight must not share buffers."""
    return copy.copy(group) if isinstance(group, Wire) else Wire(group)


# --- the names and arguments of torch.distributed: one to one, one to many, many to one
#
# All ranks of the group must call the same collectives in the same order, with the same shapes and
# dtypes. Only a Checked (below) checks this. Without it gloo fills a buffer in part, or adds up the
# bytes of another tensor, and says nothing. Instead of a group these functions take a Wire too.


def wire_and_root(group, rank, group_rank):
    """The root is given by its global rank, or by its rank in the group. By default it is the
    group's first rank (in torch: only in scatter and gather)."""
    wire = wire_of(group)
    try:
        return wire, rank_in_group(wire, rank, group_rank)
    except ValueError as problem:
        wire.refuse(problem)


def wire_and_peer(group, rank, group_rank):
    if rank is None and group_rank is None:
        raise ValueError("which rank to send to, or to receive from? There is no default")
    wire = wire_of(group)
    peer = rank_in_group(wire, rank, group_rank)
    if peer == wire.rank:
        raise ValueError(f"rank {peer} can't send to itself or receive from itself")
    return wire, peer


def rank_in_group(wire, rank, group_rank):
    if group_rank is None:
        group_rank = 0 if rank is None else dist.get_group_rank(wire.group, rank)
    if not 0 <= group_rank < wire.size:
        raise ValueError(f"there is no rank {group_rank} in a group of {wire.size}")
    return group_rank


def send(tensor, dst=None, group=None, group_dst=None):
    """On gloo it returns when the receiver has called recv. So two ranks must not both send
    first."""
    wire, peer = wire_and_peer(group, dst, group_dst)
    perform(wire.exchange({peer: tensor}, {}), async_op=False)


def recv(tensor, src=None, group=None, group_src=None):
    """Into `tensor`, which must have the dtype and the number of elements of what is sent."""
    wire, peer = wire_and_peer(group, src, group_src)
    perform(wire.exchange({}, {peer: tensor}), async_op=False)


def broadcast(tensor, src=None, group=None, async_op=False, group_src=None):
    """The root's tensor to all."""
    wire, root = wire_and_root(group, src, group_src)
    wire.agree(f"broadcast from {root} of {describe(tensor)}")
    return perform(tree_broadcast(wire, tensor, root), async_op)


def reduce(tensor, dst=None, op=SUM, group=None, async_op=False, group_dst=None):
    """The sum of all tensors, into the root's. The other ranks' stay as they are."""
    wire, root = wire_and_root(group, dst, group_dst)
    combine = operator(wire, op)
    wire.agree(f"reduce {op} to {root} of {describe(tensor)}")
    return perform(flat(tensor, lambda x: tree_reduce(wire, x, root, combine)), async_op)


def scatter(tensor, scatter_list=None, src=None, group=None, async_op=False, group_src=None):
    """scatter_list[i] of the root into rank i's tensor, straight from the root: a tree would send
    it several times."""
    wire, root = wire_and_root(group, src, group_src)
    pieces = one_each("scatter_list", scatter_list, wire, tensor) if wire.rank == root else []
    wire.agree(f"scatter from {root} of {describe(tensor)}")
    return perform(wire.exchange(dict(enumerate(pieces)), {root: tensor}), async_op)


def gather(tensor, gather_list=None, dst=None, group=None, async_op=False, group_dst=None):
    """Rank i's tensor into gather_list[i] of the root."""
    wire, root = wire_and_root(group, dst, group_dst)
    pieces = one_each("gather_list", gather_list, wire, tensor) if wire.rank == root else []
    if tensor.numel() and len({t.data_ptr() for t in pieces}) < len(pieces):
        wire.refuse("gather_list holds the same tensor several times: make one for each rank")
    wire.agree(f"gather to {root} of {describe(tensor)}")
    return perform(wire.exchange({root: tensor}, dict(enumerate(pieces))), async_op)


def one_each(name, tensors, wire, like):
    """`tensors`, if there is one like `like` for each rank; else ValueError."""
    if [describe(t) for t in tensors or []] != [describe(like)] * wire.size:
        wire.refuse(f"{name} must hold {wire.size} tensors, each {describe(like)}")
    return tensors


def describe(tensor):
    return f"{str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)}"


def operator(wire, op):
    if op not in OPERATORS:
        wire.refuse(f"{op} is not one of SUM, PRODUCT, MIN and MAX")
    return OPERATORS[op]


async def flat(tensor, algorithm):
    """algorithm(x), for x the tensor in one dimension: a copy where it is not contiguous."""
    x = tensor.contiguous().view(-1)
    await algorithm(x)
    if not tensor.is_contiguous():
        tensor.copy_(x.view(tensor.shape))


# --- many to many


@torch.no_grad()
def all_gather_single(output, input, group=None, async_op=False):
    """Rank i's input into part i of every output. `input` may be its part of `output`."""
    wire = wire_of(group)
    parts = parts_like(wire, "input", input, "output", output)
    wire.agree(f"all_gather of {describe(input)}")
    parts[wire.rank].copy_(input.reshape(-1))
    return perform(ring_all_gather(wire, parts), async_op)


def reduce_scatter_single(output, input, op=SUM, group=None, async_op=False):
    """The sum of part i of all inputs into rank i's output. `input` stays as it is, unless `output`
    is a part of it."""
    wire = wire_of(group)
    combine = operator(wire, op)
    parts = parts_like(wire, "output", output, "input", input.contiguous())
    wire.agree(f"reduce_scatter {op} of {describe(output)}")

    async def rounds():
        sums = [part.clone() for part in parts]  # the ring adds in place
        await ring_reduce_scatter(wire, sums, combine)
        output.copy_(sums[wire.rank].view(output.shape))

    return perform(rounds(), async_op)


def all_to_all_single(
    output, input, output_split_sizes=None, input_split_sizes=None, group=None, async_op=False
):
    """Part j of rank i's input into part i of rank j's output, in one round. Parts are equal, or
    have as many rows as the split sizes say."""
    wire = wire_of(group)
    if output.dtype != input.dtype or output.shape[1:] != input.shape[1:]:
        wire.refuse(f"{describe(input)} into {describe(output)}: their rows must be alike")
    if output.untyped_storage().data_ptr() == input.untyped_storage().data_ptr():
        input = input.clone()  # or a part would be overwritten before it is sent
    outgoing = split_rows(wire, "input", input, input_split_sizes)
    incoming = split_rows(wire, "output", output, output_split_sizes)
    numbers = [[t.numel() for t in parts] for parts in (outgoing, incoming)]
    wire.agree(f"all_to_all of {input.dtype}", *numbers)
    return perform(wire.exchange(dict(enumerate(outgoing)), dict(enumerate(incoming))), async_op)


def barrier(group=None, async_op=False):
    """Nobody leaves before all have come. In round k a rank tells the one 2^k further on: log2 N
    rounds (Hensgen, Finkel and Manber 1988)."""
    wire = wire_of(group)
    wire.agree("barrier")
    device = "cuda" if dist.get_backend(wire.group) == "nccl" else "cpu"

    async def rounds():
        hello, heard = torch.zeros(2, 1, device=device, dtype=torch.uint8)
        for distance in powers_of_two(wire.size):
            ahead, behind = (wire.rank + distance) % wire.size, (wire.rank - distance) % wire.size
            await wire.exchange({ahead: hello}, {behind: heard})
        heard.item()  # on NCCL only the stream has waited so far

    return perform(rounds(), async_op)


def parts_like(wire, name, part, whole_name, whole):
    """`whole` as one flat view for each rank, as large as `part`; else ValueError."""
    fits = whole.numel() == wire.size * part.numel() and whole.dtype == part.dtype
    if not fits or not whole.is_contiguous():
        due = f"contiguous and hold {wire.size} times the {name}, {describe(part)}"
        wire.refuse(f"{whole_name} must be {due}, but is {describe(whole)}")
    return whole.view(-1).tensor_split(wire.size)


def split_rows(wire, name, tensor, sizes):
    """`tensor` in one part for each rank, with so many rows, or all alike; else ValueError."""
    sizes = sizes or [len(tensor) // wire.size] * wire.size
    if len(sizes) != wire.size or sum(sizes) != len(tensor):
        rows = f"{name} has {len(tensor)} rows"
        wire.refuse(f"{rows}, which do not divide among {wire.size} ranks as {sizes}")
    return tensor.split(sizes)


def all_reduce(tensor, op=SUM, group=None, async_op=False, algorithm="ring", **options):
    """Stands in for torch.distributed's. The sum has the same bits on all ranks. Another
    algorithm's may differ by rounding, because it adds in another order.

    docs/collectives.md shows it in a training loop. Other calls:

        work = ALL_REDUCE["halving-doubling"](x, MAX, group, async_op=True)
        work.wait()                                           # until then leave x alone
        all_reduce(x, group=Checked(group))                   # ValueError where the ranks disagree
    """
    wire = wire_of(group)
    combine = operator(wire, op)
    wire.agree(f"all_reduce by {algorithm}{options or ''}, {op} of {describe(tensor)}")
    run = functools.partial(ALGORITHMS[algorithm], wire, combine=combine, **options)
    return perform(flat(tensor, run), async_op)


ALL_REDUCE = {name: functools.partial(all_reduce, algorithm=name) for name in ALGORITHMS}

# --- for finding bugs


class Checked(Wire):
    """Give one as the group: before each collective, but not send and recv, all ranks compare what
    they are about to do. If it differs, all raise the same ValueError."""

    def agree(self, call, sends=(), receives=()):
        """call: text that must be the same on all ranks. sends[j], receives[j]: elements to and
        from rank j."""
        calls = [None] * self.size
        dist.all_gather_object(calls, (call, sends, receives), group=self.group)
        texts, sends, receives = zip(*calls)  # entry i: rank i's
        for rank, text in enumerate(texts):
            if text != texts[0]:
                problem = f"rank 0 calls {texts[0]}, rank {rank} calls {text}"
                raise ValueError(f"the ranks disagree: {problem}")
        for rank, counts in enumerate(sends):
            for peer, count in enumerate(counts):
                expected = receives[peer][rank]
                if count != expected:
                    problem = f"rank {rank} sends {count} elements to rank {peer}, which expects"
                    raise ValueError(f"the ranks disagree in {call}: {problem} {expected}")


# --- demo ---

import sys

import harness
from receipts import collectives as network


def main():
    """Every collective beside torch's; then what each all-reduce sends, and how long it takes."""
    network.main(sys.modules[__name__])


if __name__ == "__main__":
    harness.script(main)
