"""Collectives: all of them from messages between two ranks, and six ways to all-reduce.

A collective moves tensors between the N ranks of a group. Every technique in this project is one
model, one batch and some of these. The best known is the ring all-reduce. Each rank cuts its tensor
into N chunks and talks to its neighbours only. Here N is 3, and "12" is the sum of ranks 1 and 2:

              start      round 1       round 2        rounds 3 and 4
    rank 0    0  0  0    0   0   01    012  .   .     012 012 012      first a reduce-scatter:
    rank 1    1  1  1    12  1   1     .   012  .     012 012 012      rank r gets the sum of chunk r;
    rank 2    2  2  2    2   02  2     .    .  012    012 012 012      then an all-gather of the sums

Sent: a rank sends 2 (N-1) chunks, 2 S (N-1)/N bytes of a tensor of S bytes: about 2 S, however many
ranks there are. Time: a round takes alpha + beta s seconds for s bytes a rank. The ring sends the
fewest bytes, in 2 (N-1) rounds, and wins for large tensors. A tree or halving-doubling needs about
log2 N or 2 log2 N rounds, and wins for small ones. docs/collectives.md has the table, and more.

Backward: autograd sees none of these messages, so a technique writes its backward by hand. The sum
of one copy for each rank is the gradient of a copy. So broadcast and reduce are each other's
backward, all-gather and reduce-scatter too. All-to-all goes back the way it came.

Don't train with these. They are here to be read; torch.distributed's are as fast or faster.

    torchrun --nproc_per_node=4 collectives.py              python collectives.py --ranks 1024

Patarasuk and Yuan 2009, Bandwidth optimal all-reduce algorithms for clusters of workstations (the
ring). Thakur, Rabenseifner and Gropp 2005, Optimization of collective communication operations in
MPICH, sections 4.2 (trees) and 4.5 (halving and doubling). Cho et al. 2019, BlueConnect
(hierarchical). Hockney 1994 (alpha and beta).
"""

import copy
import functools
import json
import types
import warnings

import torch
import torch.distributed as dist

SUM, PRODUCT = dist.ReduceOp.SUM, dist.ReduceOp.PRODUCT
MIN, MAX = dist.ReduceOp.MIN, dist.ReduceOp.MAX
OPERATORS = {SUM: torch.add, PRODUCT: torch.mul, MIN: torch.minimum, MAX: torch.maximum}

# --- the ring. `await wire.exchange(send, receive)` is a round: it sends a tensor to each rank in
# `send`, receives one from each rank in `receive`, and waits until they have arrived. Class Wire,
# below, shows how. x is a flat tensor, and combine adds two tensors, or takes their maximum, ...


async def ring_all_reduce(wire, x, combine):
    """Every rank gets the sum, in place, and all links are busy all the time."""
    chunks = x.tensor_split(wire.size)
    await ring_reduce_scatter(wire, chunks, combine)
    await ring_all_gather(wire, chunks)


async def ring_reduce_scatter(wire, chunks, combine, sums=None):
    """Rank r ends with the sum of chunk r, which set out at rank r-1. The sums of chunks are in
    `sums`, or in place: then the other chunks hold partial sums."""
    n, left, right = wire.size, (wire.rank - 1) % wire.size, (wire.rank + 1) % wire.size
    sums = sums or chunks
    for step in range(n - 1):
        partial = sums[(wire.rank + step + 1) % n]  # has the terms of `step` other ranks
        added = (wire.rank + step + 2) % n  # the chunk that comes from the right, and is sent next
        await wire.exchange({left: partial}, {right: chunks[added]}, combine, sums[added])


async def ring_all_gather(wire, chunks):
    """Rank r starts with chunk r. Every round passes on the chunk of the round before."""
    n, left, right = wire.size, (wire.rank - 1) % wire.size, (wire.rank + 1) % wire.size
    for step in range(n - 1):
        complete = chunks[(wire.rank + step) % n]
        await wire.exchange({left: complete}, {right: chunks[(wire.rank + step + 1) % n]})


# --- the tree: the root tells one rank, then both tell one more, then these four, ...


async def tree_broadcast(wire, x, root):
    """0 -> 4, then 0 -> 2 and 4 -> 6, then 0 -> 1, 2 -> 3, 4 -> 5 and 6 -> 7. A loop at the root
    would send N-1 messages, one after the other."""
    for children, parents in tree(wire, root):
        await wire.exchange({rank: x for rank in children}, {rank: x for rank in parents})


async def tree_reduce(wire, x, total, root, combine):
    """The same messages backwards, to the root's `total`. A rank adds what its children send to x,
    and sends it on. x stays as it is, unless `total` is x."""
    partial = x
    for children, parents in reversed(tree(wire, root)):
        to_parent, from_child = (
            {rank: partial for rank in parents},
            dict.fromkeys(children, partial),
        )
        await wire.exchange(to_parent, from_child, combine, total)
        partial = total if children else partial


def tree(wire, root):
    """This rank's (children, parents) in each round: lists of one rank or none."""
    place = (wire.rank - root) % wire.size  # the root is at place 0
    rounds = []
    for distance in reversed(powers_of_two(wire.size)):
        children, parents = [], []
        if place % (2 * distance) == 0 and place + distance < wire.size:
            children = [(wire.rank + distance) % wire.size]
        elif place % (2 * distance) == distance:
            parents = [(wire.rank - distance) % wire.size]
        rounds.append((children, parents))
    return rounds


def powers_of_two(n):
    """1, 2, 4, ... below n."""
    return [1 << i for i in range((n - 1).bit_length())]


# --- halving and doubling: log2 N rounds each way


async def halving_doubling_all_reduce(wire, x, combine):
    """Partners at distance 1, 2, 4, ... each keep one half of what is left, and send the other.
    Then they send the sums back, the other way round.

    With p, the largest power of two, below N: rank p+i first gives its tensor to rank i, and gets
    the result at the end."""
    p = 1 << (wire.size.bit_length() - 1)
    if wire.rank >= p:
        await wire.exchange({wire.rank - p: x}, {}, combine)
        await wire.exchange({}, {wire.rank - p: x})
        return
    folded = {wire.rank + p: x} if wire.rank + p < wire.size else {}
    if p < wire.size:
        await wire.exchange({}, folded, combine)

    rest, halvings = x, []
    for distance in powers_of_two(p):
        partner = wire.rank ^ distance
        kept, sent = rest.tensor_split(2)
        if wire.rank & distance:
            kept, sent = sent, kept
        await wire.exchange({partner: sent}, {partner: kept}, combine)
        halvings.append((partner, kept, sent))
        rest = kept
    for partner, kept, sent in reversed(halvings):
        await wire.exchange({partner: kept}, {partner: sent})

    if p < wire.size:
        await wire.exchange(folded, {})


# --- the wire: messages between two ranks


class Wire:
    """All that a collective knows of the network: this rank, the group's size, and a round.

    The ranks that a group's functions take are ranks in the group. Raises ValueError on a rank that
    is not a member.
    """

    def __init__(self, group=None):
        self.group = group or dist.group.WORLD
        self.rank, self.size = dist.get_rank(self.group), dist.get_world_size(self.group)
        self.members = range(self.size)  # rank on this wire -> rank in the group
        if self.rank < 0:
            raise ValueError("this rank is not in the group: only members may call its collectives")
        self.nccl = dist.get_backend(self.group) == "nccl"
        self.device = torch.device("cuda" if self.nccl else "cpu")  # of a tensor to say hello with

    async def exchange(self, send, receive, combine=None, total=None):
        """A round. send, receive: {rank: tensor}. Without `combine` the tensors in `receive` are
        overwritten. With it, what comes is added to them, into `total` or in place, in the order of
        `receive`; the tensors are flat then, and sender and receiver both give `combine`.
        """
        send = {rank: t.contiguous() for rank, t in send.items()}
        incoming = {
            rank: t.new_empty(t.shape) if combine or not t.is_contiguous() else t
            for rank, t in receive.items()
        }
        works = self.post(send, incoming)
        await pause()
        for work in works:
            work.wait()
        for rank, t in receive.items():
            if combine:
                combine(t, incoming[rank], out=t if total is None else total)
            elif incoming[rank] is not t:
                t.copy_(incoming[rank])

    def post(self, send, receive):
        """Start all messages, and return the handles to wait for. Empty tensors are left out."""
        group = self.group
        sends = [(self.members[rank], t) for rank, t in send.items() if t.numel()]
        receives = [(self.members[rank], t) for rank, t in receive.items() if t.numel()]
        if self.nccl:
            # NCCL runs the messages between two ranks one by one. Where both send first, both wait
            # for ever, unless the messages are in a batch.
            ops = [dist.P2POp(dist.isend, t, group=group, group_peer=rank) for rank, t in sends]
            ops += [dist.P2POp(dist.irecv, t, group=group, group_peer=rank) for rank, t in receives]
            return dist.batch_isend_irecv(ops) if ops else []
        works = [dist.isend(t, group=group, group_dst=rank) for rank, t in sends]
        return works + [dist.irecv(t, group=group, group_src=rank) for rank, t in receives]

    def among(self, members):
        """The wire between some of the ranks, numbered in the order of `members`."""
        part = copy.copy(self)
        part.members = [self.members[rank] for rank in members]
        part.rank, part.size = members.index(self.rank), len(members)
        return part

    async def agree(self, call, sends=(), receives=()):
        """Comes before each collective. Class Checked compares the calls here."""


# --- now or later: a collective that waits, or a handle to wait for


@types.coroutine
def pause():
    """Each round pauses here once its messages are posted, also where a rank has none: so the
    collectives in flight take turns alike on all ranks, and messages match by their order."""
    yield


class Work:
    """A collective on its way. Its first round is posted; wait() does the rest.

    So only the first round overlaps with the caller's work. Any number may be in flight, if all
    ranks start them in the same order, and wait for them in the same order. Until wait() the
    tensors must not be read or written, and the group not be used for torch's send and recv.
    Warns if it is dropped before wait(): the tensor is incomplete, and the group of no more use.
    """

    def __init__(self, rounds):
        self.rounds = rounds  # a coroutine
        self.over, self.waited = False, True
        self.resume()
        self.waited = False

    def resume(self):
        """Go on to the next pause, or to the end."""
        try:
            with torch.no_grad():
                self.rounds.send(None)
        except StopIteration:
            self.over = True

    def wait(self):
        self.waited = True
        while not self.over:
            self.resume()

    def __del__(self):
        if not self.waited:
            warnings.warn(
                "a collective was dropped before wait(): "
                "keep what async_op=True returns, and wait for it"
            )


def perform(wire, rounds, async_op, call, sends=(), receives=()):
    """Run a collective, `await rounds()`. call, sends and receives: see Checked."""

    async def checked():
        await wire.agree(call, sends, receives)
        await rounds()

    work = Work(checked())
    if async_op:
        return work
    work.wait()


def wire_of(group):
    """A wire for one collective. A copy, because collectives in flight must not share buffers."""
    return copy.copy(group) if isinstance(group, Wire) else SegmentedWire(group)


# --- the names and arguments of torch.distributed: one to one, one to many, many to one
#
# All ranks of the group must call the same collectives in the same order, with the same shapes and
# dtypes. Only a Checked (below) checks this. Without it gloo fills a buffer in part, or adds up the
# bytes of another tensor, and says nothing. Gradients stop here: autograd knows nothing of these
# functions. Instead of a group they take a Wire too.


def wire_and_root(group, rank, group_rank):
    """The root is given as in torch: by its global rank, or by its rank in the group. By default it
    is the group's first rank."""
    wire = wire_of(group)
    if group_rank is None:
        group_rank = 0 if rank is None else dist.get_group_rank(wire.group, rank)
    if not 0 <= group_rank < wire.size:
        raise ValueError(f"there is no rank {group_rank} in a group of {wire.size}")
    return wire, group_rank


def operator(op):
    if op not in OPERATORS:
        raise ValueError(f"{op} is not one of SUM, PRODUCT, MIN and MAX")
    return OPERATORS[op]


def describe(tensor):
    return f"{str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)}"


def send(tensor, dst=None, group=None, group_dst=None):
    """On gloo it returns when the receiver has called recv. So two ranks must not both send
    first."""
    wire, root = wire_and_root(group, dst, group_dst)
    Work(wire.exchange({root: tensor}, {})).wait()


def recv(tensor, src=None, group=None, group_src=None):
    """Into `tensor`, which must have the dtype and the number of elements of the one that is
    sent."""
    wire, root = wire_and_root(group, src, group_src)
    Work(wire.exchange({}, {root: tensor})).wait()


def broadcast(tensor, src=None, group=None, async_op=False, group_src=None):
    """The root's tensor to all."""
    wire, root = wire_and_root(group, src, group_src)
    call = f"broadcast from {root} of {describe(tensor)}"
    return perform(wire, lambda: tree_broadcast(wire, tensor, root), async_op, call)


def reduce(tensor, dst=None, op=SUM, group=None, async_op=False, group_dst=None):
    """The sum of all tensors, into the root's. The other ranks' stay as they are."""
    wire, root = wire_and_root(group, dst, group_dst)
    combine = operator(op)

    async def rounds():
        x = tensor.contiguous().view(-1)
        total = x if wire.rank == root else torch.empty_like(x)
        await tree_reduce(wire, x, total, root, combine)
        if wire.rank == root and not tensor.is_contiguous():
            tensor.copy_(total.view(tensor.shape))

    return perform(wire, rounds, async_op, f"reduce {op} to {root} of {describe(tensor)}")


def scatter(tensor, scatter_list=None, src=None, group=None, async_op=False, group_src=None):
    """scatter_list[i] of the root into rank i's tensor, straight from the root: a tree would send
    it several times."""
    wire, root = wire_and_root(group, src, group_src)
    pieces = one_each("scatter_list", scatter_list, wire, tensor) if wire.rank == root else []

    async def rounds():
        if wire.rank == root:
            await wire.exchange({i: pieces[i] for i in others(wire)}, {})
            tensor.copy_(pieces[root])
        else:
            await wire.exchange({}, {root: tensor})

    return perform(wire, rounds, async_op, f"scatter from {root} of {describe(tensor)}")


def gather(tensor, gather_list=None, dst=None, group=None, async_op=False, group_dst=None):
    """Rank i's tensor into gather_list[i] of the root."""
    wire, root = wire_and_root(group, dst, group_dst)
    pieces = one_each("gather_list", gather_list, wire, tensor) if wire.rank == root else []
    if tensor.numel() and len({t.data_ptr() for t in pieces}) < len(pieces):
        raise ValueError(
            "gather_list holds the same tensor several times: "
            "make one for each rank, not [tensor] * n"
        )

    async def rounds():
        if wire.rank == root:
            await wire.exchange({}, {i: pieces[i] for i in others(wire)})
            pieces[root].copy_(tensor)
        else:
            await wire.exchange({root: tensor}, {})

    return perform(wire, rounds, async_op, f"gather to {root} of {describe(tensor)}")


def one_each(name, tensors, wire, like):
    """`tensors`, if there is one like `like` for each rank; else ValueError."""
    if [describe(t) for t in tensors or []] != [describe(like)] * wire.size:
        raise ValueError(f"{name} must hold {wire.size} tensors, each {describe(like)}")
    return tensors


def others(wire):
    return [rank for rank in range(wire.size) if rank != wire.rank]


# --- many to many


def all_gather_single(output, input, group=None, async_op=False):
    """Rank i's input into part i of every output. `input` may be its part of `output`."""
    wire = wire_of(group)
    parts, own = equal_parts("output", output, wire.size), input.reshape(-1)
    if parts[0].shape != own.shape or output.dtype != input.dtype:
        raise ValueError(
            f"output is {describe(output)} and must hold {wire.size} times the input, "
            f"{describe(input)}"
        )

    async def rounds():
        parts[wire.rank].copy_(own)
        await ring_all_gather(wire, parts)

    return perform(wire, rounds, async_op, f"all_gather of {describe(own)}")


def reduce_scatter_single(output, input, op=SUM, group=None, async_op=False):
    """The sum of part i of all inputs into rank i's output. `input` stays as it is; `output` may be
    its part."""
    wire, combine = wire_of(group), operator(op)
    parts = equal_parts("input", input.contiguous(), wire.size)
    own = equal_parts("output", output, 1)[0]
    if parts[0].shape != own.shape or output.dtype != input.dtype:
        raise ValueError(
            f"input is {describe(input)} and must hold {wire.size} times the output, "
            f"{describe(output)}"
        )
    if same_memory(output, input) and output.data_ptr() != parts[wire.rank].data_ptr():
        # Or another rank's part would be overwritten before it is sent
        parts = equal_parts("input", input.clone(), wire.size)

    async def rounds():
        first = (wire.rank + 1) % wire.size
        turns = own.new_empty(2, len(own))  # one partial sum is sent, while the next is added up
        sums = [turns[(i - wire.rank) % 2] for i in range(wire.size)]
        sums[first] = parts[first]  # is sent as it is
        sums[wire.rank] = own
        await ring_reduce_scatter(wire, parts, combine, sums)
        if wire.size == 1:
            own.copy_(parts[0])

    return perform(wire, rounds, async_op, f"reduce_scatter {op} of {describe(own)}")


def all_to_all_single(
    output, input, output_split_sizes=None, input_split_sizes=None, group=None, async_op=False
):
    """Part j of rank i's input into part i of rank j's output, in one round. Parts are equal, or
    have as many rows as the split sizes say."""
    wire = wire_of(group)
    if output.dtype != input.dtype or output.shape[1:] != input.shape[1:]:
        raise ValueError(
            f"input is {describe(input)} and output {describe(output)}: their rows must be alike"
        )
    if same_memory(output, input):
        input = input.clone()  # or a part would be overwritten before it is sent

    def split(name, tensor, sizes):
        sizes = sizes or [len(tensor) // wire.size] * wire.size
        if len(sizes) != wire.size or sum(sizes) != len(tensor):
            raise ValueError(
                f"{name} has {len(tensor)} rows, which do not divide among {wire.size} ranks "
                f"as {sizes}"
            )
        return tensor.split(sizes)

    outgoing = split("input", input, input_split_sizes)
    incoming = split("output", output, output_split_sizes)

    async def rounds():
        incoming[wire.rank].copy_(outgoing[wire.rank])
        # Each rank begins with the next one: if all began with rank 0, it would be the bottleneck
        ahead = [(wire.rank + i) % wire.size for i in range(1, wire.size)]
        send = {rank: outgoing[rank] for rank in ahead}
        await wire.exchange(send, {rank: incoming[rank] for rank in reversed(ahead)})

    call = f"all_to_all of {input.dtype}"
    sizes = [[t.numel() for t in parts] for parts in (outgoing, incoming)]
    return perform(wire, rounds, async_op, call, *sizes)


def barrier(group=None, async_op=False):
    """Nobody leaves before all have come. In round k each rank tells the one 2^k further on (Hensgen,
    Finkel and Manber 1988)."""
    wire = wire_of(group)

    async def rounds():
        hello, heard = torch.zeros(2, 1, dtype=torch.uint8, device=wire.device)
        for distance in powers_of_two(wire.size):
            target, source = (wire.rank + distance) % wire.size, (wire.rank - distance) % wire.size
            await wire.exchange({target: hello}, {source: heard})

    return perform(wire, rounds, async_op, "barrier")


def equal_parts(name, tensor, n):
    """Views of a contiguous tensor as n equal flat parts; else ValueError."""
    if not tensor.is_contiguous() or tensor.numel() % n:
        raise ValueError(
            f"{name} must be contiguous and divide into {n} equal parts, but is {describe(tensor)}"
        )
    return tensor.view(-1).tensor_split(n)


def same_memory(a, b):
    return a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()


# --- the other all-reduces


async def server_all_reduce(wire, x, combine):
    """Rank 0 adds up, in the order of the ranks, and sends the sum to all."""
    clients = others(wire)
    if wire.rank == 0:
        await wire.exchange({}, dict.fromkeys(clients, x), combine)
        await wire.exchange(dict.fromkeys(clients, x), {})
    else:
        await wire.exchange({0: x}, {}, combine)
        await wire.exchange({}, {0: x})


async def direct_all_reduce(wire, x, combine):
    """Everybody sends to everybody, and adds up for itself. Holds N S bytes more."""
    rows = x.new_empty(wire.size, x.numel())
    peers = others(wire)
    await wire.exchange(dict.fromkeys(peers, x), {rank: rows[rank] for rank in peers})
    add_rows(wire, x, rows, combine)


async def sequential_all_reduce(wire, x, combine):
    """All send to rank 0, then all to rank 1, ...: nobody starts a round before it is through with
    the last. Holds N S bytes more."""
    rows = x.new_empty(wire.size, x.numel())
    for root in range(wire.size):
        if wire.rank == root:
            await wire.exchange({}, {rank: rows[rank] for rank in others(wire)})
        else:
            await wire.exchange({root: x}, {})
    add_rows(wire, x, rows, combine)


def add_rows(wire, x, rows, combine):
    """x becomes the sum of the ranks' rows, in the order of the ranks: the same bits everywhere."""
    rows[wire.rank] = x
    total = rows[0]
    for row in rows[1:]:
        combine(total, row, out=total)
    x.copy_(total)


async def hierarchical_all_reduce(wire, x, combine, node=None):
    """Three steps, for nodes of `node` neighbouring ranks with fast links inside: reduce-scatter
    inside; all-reduce with the ranks at the same place of the other nodes; all-gather inside.

    That is 2 (N/node - 1) slow rounds instead of 2 (N-1), and a slow link carries 1/node of the
    tensor."""
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
    return max(n for n in range(1, ranks + 1) if ranks % n == 0 and n * n <= ranks)


ALGORITHMS = {
    "server": server_all_reduce,
    "sequential": sequential_all_reduce,
    "direct": direct_all_reduce,
    "ring": ring_all_reduce,
    "halving-doubling": halving_doubling_all_reduce,
    "hierarchical": hierarchical_all_reduce,
}


def all_reduce(tensor, op=SUM, group=None, async_op=False, algorithm="ring", **options):
    """In place of torch.distributed's. The sum has the same bits on all ranks; another algorithm's
    may differ by rounding, because it adds in another order.

    Use, for the gradients of a model, with other rows of the batch on each rank:

        count = torch.tensor(float(targets.numel()))
        all_reduce(count, group=group)                        # the tokens of all ranks
        loss = cross_entropy(model(rows), targets, reduction="sum") / count
        loss.backward()
        for p in model.parameters():
            all_reduce(p.grad, group=group)                   # in place: the sum, on every rank
        work = ALL_REDUCE["halving-doubling"](x, MAX, group, async_op=True)
        work.wait()                                           # not before may x be read or written
        all_reduce(x, group=Checked(group))                   # ValueError where the ranks disagree
    """
    wire, combine = wire_of(group), operator(op)

    async def rounds():
        x = tensor.contiguous().view(-1)
        await ALGORITHMS[algorithm](wire, x, combine, **options)
        if not tensor.is_contiguous():
            tensor.copy_(x.view(tensor.shape))

    how = f"{algorithm} {options or ''}".strip()
    return perform(wire, rounds, async_op, f"all_reduce by {how}, {op} of {describe(tensor)}")


ALL_REDUCE = {name: functools.partial(all_reduce, algorithm=name) for name in ALGORITHMS}

# --- what makes it fast: segments, in buffers that are used again

SEGMENT = 1 << 21  # bytes: large enough for what a message costs, small enough for a cache


class SegmentedWire(Wire):
    """The wire that is used unless another one is given. Sums are equal to Wire's bit for bit.

    What is to be added comes in segments, into two buffers that take turns: one segment arrives
    while the one before is added. The buffers are kept for the next rounds. Fresh memory would
    cost as much as the message, in page faults.
    """

    spare = None  # memory for the buffers

    async def exchange(self, send, receive, combine=None, total=None):
        tensors = [*send.values(), *receive.values()]
        if combine is None or not tensors:
            return await super().exchange(send, receive)
        longest = max(len(t) for t in tensors)
        size = min(longest, SEGMENT // tensors[0].element_size())  # elements of a segment
        needed = 2 * len(receive) * size
        if self.spare is None or len(self.spare) < needed:
            self.spare = tensors[0].new_empty(needed)
        buffers = self.spare[:needed].view(2, len(receive), size)

        def start(i):
            """Post segment i of each tensor. Behind the end of a tensor it is empty."""
            part = slice(i * size, (i + 1) * size)
            into = {}
            for (rank, t), buffer in zip(receive.items(), buffers[i % 2]):
                into[rank] = buffer[: len(t[part])]
            return part, into, self.post({rank: t[part] for rank, t in send.items()}, into)

        started = start(0)
        await pause()
        for i in range(1, 1 + -(-longest // max(1, size))):
            part, arrived, works = started
            started = start(i)
            for work in works:
                work.wait()
            for rank, t in receive.items():
                combine(t[part], arrived[rank], out=(t if total is None else total)[part])


# --- wires that watch


class Counter(SegmentedWire):
    """Logs every message in this rank's order: ("send" or "receive", rank in the group, bytes)."""

    def __init__(self, group=None):
        super().__init__(group)
        self.log = []

    async def exchange(self, send, receive, combine=None, total=None):
        self.note("send", send)
        await super().exchange(send, receive, combine, total)
        self.note("receive", receive)

    def note(self, kind, messages):
        for rank, t in messages.items():
            if t.numel():
                self.log.append((kind, self.members[rank], t.numel() * t.element_size()))


class Checked(SegmentedWire):
    """For finding bugs: before each collective all ranks compare what they are about to do. Where
    it differs all raise the same ValueError. That costs an all-gather each; send and recv are not
    checked."""

    async def agree(self, call, sends=(), receives=()):
        """call: text that must be the same on all ranks. sends[j], receives[j]: elements to and
        from rank j."""
        header = json.dumps([call, list(sends), list(receives)]).encode()
        length = 512 + 32 * self.size
        headers = torch.zeros(self.size, length, dtype=torch.uint8, device=self.device)
        headers[self.rank, : len(header)] = torch.tensor(list(header), dtype=torch.uint8)
        await ring_all_gather(self, headers)
        rows = [json.loads(bytes(header.tolist()).rstrip(b"\0")) for header in headers]
        calls, sends, receives = zip(*rows)
        for rank in range(self.size):
            if calls[rank] != calls[0]:
                raise ValueError(
                    f"the ranks disagree: rank 0 calls {calls[0]}, rank {rank} calls {calls[rank]}"
                )
            for peer, count in enumerate(sends[rank]):
                expected = receives[peer][rank]
                if count != expected:
                    raise ValueError(
                        f"the ranks disagree in {calls[0]}: rank {rank} sends {count} elements "
                        f"to rank {peer}, which expects {expected}"
                    )


# --- demo ---

import sys

import harness
from harness import network


def main():
    p = harness.Parser(__doc__)
    why = "of the tensor whose all-reduce is counted (default: 1MB)"
    size = harness.quantity(harness.SIZE, "25MB")
    p.add_argument("--size", type=size, default="1MB", metavar="BYTES", help=why)
    why = "ranks that share fast links, for hierarchical (default: about the root of their number)"
    p.add_argument("--nodes-of", **harness.POSITIVE, help=why)
    harness.plot_flag(p, "draw time against size")
    why = "run nothing, predict the times on N ranks, by the links below"
    p.add_argument("--ranks", **harness.POSITIVE, help=why)
    latency = dict(type=harness.quantity(harness.TIME, "5us"), metavar="TIME")
    speed = dict(type=harness.quantity(harness.SPEED, "50GB/s"), metavar="SPEED")
    for flag, unit, why in [
        ("--alpha", latency, "latency of a link between nodes, with --ranks (default: 5us)"),
        ("--beta", speed, "bandwidth of a link between nodes, with --ranks (default: 50GB/s)"),
        ("--inside-alpha", latency, "latency inside a node, with --ranks (default: 2us)"),
        ("--inside-beta", speed, "bandwidth inside a node, with --ranks (default: 300GB/s)"),
    ]:
        p.add_argument(flag, **unit, help=why)
    why = "processes to start here when torchrun did not (default: 4)"
    p.add_argument("--nproc", **harness.POSITIVE, help=why)
    why = "auto: GPUs where there are any"
    p.add_argument("--device", choices=["auto", "cpu", "cuda"], default="auto", help=why)
    p.add_argument("--backend", choices=["gloo", "nccl"], help="default: nccl on GPUs, else gloo")
    p.add_argument("--json", metavar="FILE", help="write what was measured as JSON")
    p.add_argument("--quiet", action="store_true", help="print nothing but errors")
    args = p.parse_args()
    harness.check_plot(args)

    def check(world):
        if args.plot and world == 1:
            raise harness.Refused("--plot needs two ranks or more: one sends nothing")
        if args.nodes_of and world % args.nodes_of:
            raise harness.Refused(
                f"{world} ranks do not divide into nodes of --nodes-of {args.nodes_of}"
            )

    links = (args.alpha, args.beta, args.inside_alpha, args.inside_beta)
    if not args.ranks:
        if any(links):
            raise harness.Refused(
                "--alpha, --beta and --inside-... are for a prediction: add --ranks, or leave them out"
            )
        return harness.launch(demo, args, check=check, run=harness.Rank)
    check(args.ranks)
    if args.plot or args.json:
        raise harness.Refused(
            "--ranks runs nothing that --plot or --json could show: leave one of them out"
        )
    between = network.Link(args.alpha or 5e-6, 1 / (args.beta or 50e9))
    inside = network.Link(args.inside_alpha or 2e-6, 1 / (args.inside_beta or 300e9))
    node = args.nodes_of or default_node(args.ranks)
    network.print_predictions(args.ranks, between, inside, node)


def demo(run):
    """Every collective beside torch's; then what each all-reduce sends, and how long it takes."""
    args, n = run.args, run.world
    node = args.nodes_of or default_node(n)
    algorithms = dict(ALL_REDUCE)
    algorithms["hierarchical"] = functools.partial(ALL_REDUCE["hierarchical"], node=node)

    def say(line):
        if run.rank == 0 and not args.quiet:
            print(line)

    ranks = network.from_all(run, network.differences(sys.modules[__name__], run))
    differ = set()
    for differences in ranks:
        for name, dtypes in differences.items():
            differ |= {f"{name} in {dtype}" for dtype in dtypes}
    verdict = "differ from torch's: " + ", ".join(sorted(differ))
    if not differ:
        verdict = "equal torch's, bit for bit"
    say(f"{len(ranks[0])} collectives on {n} ranks in {len(network.EXACT_DTYPES)} dtypes {verdict}")

    unit = 4 * n * (1 << (n.bit_length() - 1))  # the chunks of all algorithms come out equal
    size = max(1, round(args.size / unit)) * unit
    x, counted = torch.zeros(size // 4, device=run.device), {}
    for name, all_reduce_by in algorithms.items():
        counter = Counter()
        all_reduce_by(x, group=counter)
        counted[name] = network.tally(network.from_all(run, counter.log))
    expected = network.formulas(n, size, node)
    title = f"all-reduce of {size} bytes, hierarchical in nodes of {node}: counted / by the formula"
    say(f"\n{title}\n" + network.counted_beside_formulas(counted, expected))

    ok = not differ and counted == expected
    result = {"ok": ok, "world_size": n, "layout": {"node": node}, "differ": sorted(differ)}
    result["counted"] = {name: cost._asdict() for name, cost in counted.items()}
    result["formulas"] = {name: cost._asdict() for name, cost in expected.items()}
    if n > 1:
        wire = Wire()

        def one_round(x, y):
            left, right = (run.rank - 1) % n, (run.rank + 1) % n
            Work(wire.exchange({left: x}, {right: y})).wait()

        result |= network.measure_curve(run, algorithms, one_round, node, say)
    if run.rank == 0 and args.json:
        with open(args.json, "w") as f:
            json.dump(result, f, indent=1)
    if run.rank == 0 and args.plot:
        network.plot_curve(args.plot, result)
    say("  ok" if ok else "  FAILED")
    return 0 if ok else 1


if __name__ == "__main__":
    harness.script(main)
