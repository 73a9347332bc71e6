"""Every collective, from nothing but messages between two ranks; and six ways to all-reduce,
counted and timed.

What is split: nothing yet. A collective moves tensors between the N ranks of a group, S bytes in
all; every technique in this project is one model, one batch and some of these. What the wire does:
a rank sends a tensor to another one, and receives one.

    one to many     broadcast (a tree: who has it passes it on), scatter
    many to one     reduce (the same tree, upwards), gather
    many to many    all-gather, reduce-scatter (rings), all-to-all, all-reduce, barrier

A ring all-reduce of a tensor in N chunks, here 3 (messages go to rank - 1; nccl's go to rank + 1).
Of each chunk, whose terms are added up in it:

              start      round 1       round 2        rounds 3 and 4
    rank 0    0  0  0    0   0   01    012  .   .     012 012 012       first a reduce-scatter: rank r ends with all of chunk r,
    rank 1    1  1  1    12  1   1     .   012  .     012 012 012       then an all-gather: the chunks go round once more
    rank 2    2  2  2    2   02  2     .    .  012    012 012 012

What is sent: a round ends when its messages are there, and those of the next round wait for it;
"rounds" is the longest chain of messages that each wait for the one before. "Sent by one" is the
most that any rank sends, or receives; r = (N-1)/N.

    collective          rounds                sent by one   sent by all   its backward
    broadcast, reduce   log2 N                log2 N S, S   (N-1) S       each other's
    scatter, gather     1                     r S, S/N      r S           each other's
    all-gather          N-1                   r S           (N-1) S       reduce-scatter
    reduce-scatter      N-1                   r S           (N-1) S       all-gather
    all-to-all          1                     r S           (N-1) S       itself, the other way round

    all-reduce                                                            who adds up, in which order
    server              2                     (N-1) S       2 (N-1) S     rank 0, in the order of the ranks
    sequential          N                     (N-1) S       N (N-1) S     one rank after the other, likewise
    direct              1                     (N-1) S       N (N-1) S     every rank, likewise
    ring                2 (N-1)               2 r S         2 (N-1) S     for chunk c of N: rank c-1, c-2, ..., c
    halving-doubling    2 log2 N              2 r S         2 (N-1) S     pairs, then pairs of pairs, ...
    hierarchical        2 (k-1) + 2 (N/k-1)   2 r S         2 (N-1) S     rings inside nodes of k, then across

Where N is no power of two, p ranks, the largest one below it, halve and double: 2 log2 p + 2
rounds, S more from one.

Use, here for the gradients of a model, with `rows` of a batch on each rank:

    count = torch.tensor(float(targets.numel()))
    all_reduce(count, group=group)                          # the tokens of all ranks
    loss = cross_entropy(model(rows), targets, reduction="sum") / count
    loss.backward()
    for p in model.parameters():
        all_reduce(p.grad, group=group)                     # in place: the sum, on every rank
    work = ALL_REDUCE["halving-doubling"](x, MAX, group, async_op=True)
    work.wait()                                             # x must not be read or written before
    all_reduce(x, group=Checked(group))                     # ValueError where the ranks disagree

All ranks of the group must call the same collectives in the same order, with the same shapes and
dtypes. Only a Checked checks this. Without it gloo fills a buffer in part, or adds up the bytes of
another tensor, and says nothing. Between the start of an async collective and its wait() the group
must not be used for torch's own send and recv.

Backward: these functions write into tensors, and autograd knows nothing of them. The files that
need a gradient through a collective write its backward as the table says. The sum has the same bits
on all ranks; another algorithm's may differ by rounding, because it adds in another order.

What it costs: rounds alpha + bytes that wait for each other beta, in seconds, with a latency of
alpha a round and beta a byte (Hockney 1994). Those bytes are what one rank sends, but for server
(twice that: in, then out) and sequential (N times). Few rounds win for small tensors, few bytes for
large ones: then the ring, for all its O(N) rounds, is as fast as can be, and 2 r S hardly grows
with N. With async_op a collective posts its first round and returns; wait() does the rest. So only
the first round overlaps with what comes in between. Any number may be in flight, if all ranks start
them, and wait for them, in the same order.

When it is the wrong choice: to train with; torch.distributed's own are as fast or faster, and these
are here to be read.

    torchrun --nproc_per_node=4 collectives.py  python collectives.py --plot curve  python collectives.py --ranks 1024

Papers: Thakur, Rabenseifner and Gropp 2005, Optimization of collective communication operations in
MPICH, sections 4.2 (trees) and 4.5 (halving and doubling, from Rabenseifner 2004); Patarasuk and
Yuan 2009, Bandwidth optimal all-reduce algorithms for clusters of workstations (ring); Cho et al.
2019, BlueConnect (hierarchical); Hockney 1994 (alpha, beta).
"""

import copy
import itertools
import json
import warnings

import torch
import torch.distributed as dist

SUM, PRODUCT, MIN, MAX = (
    dist.ReduceOp.SUM,
    dist.ReduceOp.PRODUCT,
    dist.ReduceOp.MIN,
    dist.ReduceOp.MAX,
)
SEGMENT = 1 << 21  # bytes: large enough for what a message costs, small enough for a cache
OPERATORS = {SUM: torch.add, PRODUCT: torch.mul, MIN: torch.minimum, MAX: torch.maximum}


# --- the wire


class Wire:
    """Messages between the ranks of a group: all that the collectives know of the network.

    Where a collective takes a `group` it takes a Wire too: a Counter counts, a Checked checks.
    Raises ValueError on a rank that is not a member.
    """

    def __init__(self, group=None):
        self.group = group or dist.group.WORLD
        self.rank, self.size = dist.get_rank(self.group), dist.get_world_size(self.group)
        self.members = range(self.size)  # rank here -> rank in the group
        if self.rank < 0:
            raise ValueError("this rank is not in the group: only members may call its collectives")
        # NCCL runs the messages between two ranks one by one: where both send first both wait for
        # ever, but in a batch. Gloo has no such order, and posts messages sooner alone. And NCCL's
        # barrier needs a tensor on the GPU.
        self.batched = dist.get_backend(self.group) == "nccl"
        self.device = torch.device("cuda" if self.batched else "cpu")

    def among(self, members):
        """The wire between some of the ranks, numbered in the order of `members`."""
        part = copy.copy(self)
        part.members = [self.members[m] for m in members]
        part.rank, part.size = members.index(self.rank), len(members)
        return part

    def post(self, sends, receives):
        """Start to send and receive (peer, tensor) pairs, contiguous ones; returns what to wait
        for. The tensors must live until then. Empty ones are left out."""
        messages = [(dist.isend, *m) for m in sends] + [(dist.irecv, *m) for m in receives]
        messages = [(op, self.members[peer], t) for op, peer, t in messages if t.numel()]
        if not self.batched:
            where = {dist.isend: "group_dst", dist.irecv: "group_src"}
            return [op(t, group=self.group, **{where[op]: peer}) for op, peer, t in messages]
        ops = [dist.P2POp(op, t, group=self.group, group_peer=peer) for op, peer, t in messages]
        return dist.batch_isend_irecv(ops) if ops else []

    def exchange(self, sends, receives):
        """A round: post all (peer, tensor) of `sends` and `receives`, pause, wait.

        This and all that is made of it are generators that pause where a rank would wait. A rank
        with nothing to say in a round pauses too: so collectives in flight take turns alike on all
        ranks, and messages match by their order.
        """
        sends = [(peer, t.contiguous()) for peer, t in sends]
        buffers = [(peer, t.contiguous()) for peer, t in receives]
        works = self.post(sends, buffers)
        yield
        for work in works:
            work.wait()
        for (_, t), (_, buffer) in zip(receives, buffers):
            if buffer is not t:
                t.copy_(buffer)

    def exchange_adding(self, sends, receives, combine, spare):
        """A round of at most one (peer, tensor) to send and one (peer, tensor, out) to receive,
        flat and contiguous: what comes is reduced with the tensor into `out`.

        It comes in segments, into two buffers that take turns (`spare`): the next arrives while one
        is added, and little fresh memory is taken, whose page faults would cost as much as the
        message.
        """
        outgoing = [(peer, piece) for peer, t in sends for piece in segments(t)]
        incoming = [
            (peer, *pieces)
            for peer, t, out in receives
            for pieces in zip(segments(t), segments(out))
        ]
        works = []
        # Turn i posts segment i and adds segment i - 1. Only the first posting is a pause, as in
        # exchange
        for i in range(max(len(outgoing), len(incoming), 1) + 1):
            into = [(peer, spare[i % 2][: t.numel()]) for peer, t, _ in incoming[i : i + 1]]
            before, works = works, self.post(outgoing[i : i + 1], into)
            if i == 0:
                yield
                continue
            for work in before:
                work.wait()
            for _, t, out in incoming[i - 1 : i]:
                combine(t, spare[(i - 1) % 2][: t.numel()], out=out)

    def agree(self, call, sends=(), receives=()):
        """Comes before each collective; see Checked."""
        yield from ()


def segments(t):
    """A flat tensor in pieces of at most SEGMENT bytes."""
    return t.split(SEGMENT // t.element_size()) if t.numel() * t.element_size() > SEGMENT else (t,)


def spare_for(t):
    """Two buffers for the segments of a flat tensor."""
    return t.new_empty(2, min(t.numel(), SEGMENT // t.element_size())).unbind()


class Counter(Wire):
    """A wire that logs every message: ("send" or "receive", peer, bytes), in this rank's order."""

    def __init__(self, group=None):
        super().__init__(group)
        self.log = []

    def note(self, kind, messages):
        self.log += [
            (kind, self.members[i], t.numel() * t.element_size())
            for i, t, *_ in messages
            if t.numel()
        ]

    def exchange(self, sends, receives):
        self.note("send", sends)
        yield from super().exchange(sends, receives)
        self.note("receive", receives)

    def exchange_adding(self, sends, receives, combine, spare):
        self.note("send", sends)
        yield from super().exchange_adding(sends, receives, combine, spare)
        self.note("receive", receives)


class Checked(Wire):
    """A wire for finding bugs: before each collective all ranks compare what they are about to do,
    and where it differs all raise the same ValueError. That costs an all-gather each; send and recv
    are not checked."""

    def agree(self, call, sends=(), receives=()):
        """call: what must be the same on all ranks. sends[j], receives[j]: elements to and from
        rank j."""
        mine = json.dumps([call, list(sends), list(receives)]).encode()
        headers = torch.zeros(
            self.size, 512 + 32 * self.size, dtype=torch.uint8, device=self.device
        )
        headers[self.rank, : len(mine)] = torch.tensor(list(mine), dtype=torch.uint8)
        yield from ring_all_gather(self, headers)
        calls, sends, receives = zip(
            *(json.loads(bytes(h.tolist()).rstrip(b"\0")) for h in headers)
        )
        for r in range(self.size):
            if calls[r] != calls[0]:
                raise ValueError(
                    f"the ranks disagree: rank 0 calls {calls[0]}, rank {r} calls {calls[r]}"
                )
            for s in range(len(sends[r])):
                if sends[r][s] != receives[s][r]:
                    message = f"rank {r} sends {sends[r][s]} elements to rank {s}, which expects {receives[s][r]}"
                    raise ValueError(f"the ranks disagree in {calls[0]}: {message}")


class Work:
    """A collective on its way: its first round is posted, wait() does what is left.

    Warns if it is dropped before wait(): the tensor is incomplete, and the group of no more use.
    """

    def __init__(self, rounds):
        self.rounds, self.waited = rounds, True
        with torch.no_grad():
            next(self.rounds, None)
        self.waited = False

    def __del__(self):
        if not self.waited:
            warnings.warn(
                "a collective was dropped before wait(): keep what async_op=True returns, and wait for it"
            )

    def wait(self):
        self.waited = True
        with torch.no_grad():
            for _ in self.rounds:
                pass


def perform(async_op, *parts):
    """Run generators one after the other: to the end, or to the first pause. They yield nothing: a
    yield is a pause."""
    work = Work(itertools.chain(*parts))
    if async_op:
        return work
    work.wait()


def wire_of(group):
    return group if isinstance(group, Wire) else Wire(group)


def wire_and_root(group, rank, group_rank):
    """The root is given as in torch, by its global rank or by its rank in the group; by default it
    is the first."""
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


def one_each(name, tensors, wire, like):
    """`tensors`, if there is one like `like` for each rank; else ValueError."""
    if [describe(t) for t in tensors or []] != [describe(like)] * wire.size:
        raise ValueError(f"{name} must hold {wire.size} tensors, each {describe(like)}")
    return tensors


def overlap(a, b):
    """Whether two tensors may share memory, by the first and last element of each."""
    if (
        a.numel() == 0
        or b.numel() == 0
        or a.untyped_storage().data_ptr() != b.untyped_storage().data_ptr()
    ):
        return False
    ends = []
    for t in (a, b):
        last = sum((size - 1) * stride for size, stride in zip(t.shape, t.stride()))
        ends.append((t.data_ptr(), t.data_ptr() + (last + 1) * t.element_size()))
    (first_a, end_a), (first_b, end_b) = ends
    return first_a < end_b and first_b < end_a


def cut(name, tensor, parts):
    """Views of a contiguous tensor as equal flat parts; else ValueError."""
    if not tensor.is_contiguous() or tensor.numel() % parts:
        raise ValueError(
            f"{name} must be contiguous and divide into {parts} equal parts, but is {describe(tensor)}"
        )
    return tensor.view(parts, -1).unbind() if tensor.numel() else [tensor.view(-1)] * parts


# --- one to one, one to many, many to one. The arguments are those of torch.distributed's functions
# of the same name


def send(tensor, dst=None, group=None, group_dst=None):
    """On gloo it returns when the receiver has posted its recv; so two ranks may not both send
    first."""
    wire, to = wire_and_root(group, dst, group_dst)
    perform(False, wire.exchange([(to, tensor)], []))


def recv(tensor, src=None, group=None, group_src=None):
    """Into `tensor`, which must have the sent one's dtype and number of elements."""
    wire, source = wire_and_root(group, src, group_src)
    perform(False, wire.exchange([], [(source, tensor)]))


def tree(wire, root):
    """This rank's part in a binomial tree: for each of ceil(log2 N) rounds, the ranks to send to
    and to receive from, lists of one or none. All that have the message pass it on: 0 -> 4, then 0
    -> 2 and 4 -> 6, then 0 -> 1, ..."""
    place, rounds = (wire.rank - root) % wire.size, []
    for half in reversed([1 << i for i in range((wire.size - 1).bit_length())]):
        to = (
            [(wire.rank + half) % wire.size]
            if place % (2 * half) == 0 and place + half < wire.size
            else []
        )
        rounds.append((to, [(wire.rank - half) % wire.size] if place % (2 * half) == half else []))
    return rounds


def broadcast(tensor, src=None, group=None, async_op=False, group_src=None):
    """The root's tensor to all, in ceil(log2 N) rounds; a loop would send N-1 messages through the
    root's link."""
    wire, root = wire_and_root(group, src, group_src)

    def rounds():
        for to, source in tree(wire, root):
            yield from wire.exchange([(i, tensor) for i in to], [(i, tensor) for i in source])

    return perform(async_op, wire.agree(f"broadcast from {root} of {describe(tensor)}"), rounds())


def reduce(tensor, dst=None, op=SUM, group=None, async_op=False, group_dst=None):
    """All tensors, reduced, into the root's, by broadcast's tree upwards. The other ranks' stay as
    they are."""
    wire, root = wire_and_root(group, dst, group_dst)
    combine = operator(op)

    def rounds():
        partial = tensor
        for children, parent in reversed(tree(wire, root)):
            incoming = [(i, torch.empty_like(tensor)) for i in children]
            yield from wire.exchange([(i, partial) for i in parent], incoming)
            for _, t in incoming:
                partial = combine(partial, t, out=tensor if wire.rank == root else t)

    return perform(async_op, wire.agree(f"reduce {op} to {root} of {describe(tensor)}"), rounds())


def scatter(tensor, scatter_list=None, src=None, group=None, async_op=False, group_src=None):
    """scatter_list[i] of the root into rank i's tensor, straight from the root: a tree would send
    it several times."""
    wire, root = wire_and_root(group, src, group_src)
    pieces = one_each("scatter_list", scatter_list, wire, tensor) if wire.rank == root else []

    def rounds():
        sends = [(i, piece) for i, piece in enumerate(pieces) if i != root]
        yield from wire.exchange(sends, [(root, tensor)] if wire.rank != root else [])
        if wire.rank == root:
            tensor.copy_(pieces[root])

    return perform(async_op, wire.agree(f"scatter from {root} of {describe(tensor)}"), rounds())


def gather(tensor, gather_list=None, dst=None, group=None, async_op=False, group_dst=None):
    """Rank i's tensor into gather_list[i] of the root."""
    wire, root = wire_and_root(group, dst, group_dst)
    pieces = one_each("gather_list", gather_list, wire, tensor) if wire.rank == root else []
    if tensor.numel() and len({t.data_ptr() for t in pieces}) < len(pieces):
        raise ValueError(
            "gather_list holds the same tensor several times: make one for each rank, not [tensor] * n"
        )

    def rounds():
        receives = [(i, piece) for i, piece in enumerate(pieces) if i != root]
        yield from wire.exchange([(root, tensor)] if wire.rank != root else [], receives)
        if wire.rank == root:
            pieces[root].copy_(tensor)

    return perform(async_op, wire.agree(f"gather to {root} of {describe(tensor)}"), rounds())


# --- many to many


def ring_all_gather(wire, chunks):
    """All-gather by a ring: rank r starts with chunks[r], and in each round passes on what came in
    the round before."""
    left, right = (wire.rank - 1) % wire.size, (wire.rank + 1) % wire.size
    for step in range(wire.size - 1):
        ours, theirs = (wire.rank + step) % wire.size, (wire.rank + step + 1) % wire.size
        yield from wire.exchange([(left, chunks[ours])], [(right, chunks[theirs])])


def ring_reduce_scatter(wire, chunks, combine, output=None):
    """Reduce-scatter by a ring: chunk c sets out at rank c-1 and arrives, reduced, at rank c. In
    place: the other chunks hold sums of some ranks then. Or into `output`: the chunks, equal ones,
    stay as they are."""
    n, rank, sent = wire.size, wire.rank, chunks[(wire.rank + 1) % wire.size]
    spare = spare_for(chunks[0])  # no chunk is longer
    turns = chunks[0].new_empty(2, len(chunks[0])) if output is not None else None
    for step in range(n - 1):
        chunk = chunks[(rank + step + 2) % n]
        out = chunk if output is None else output if step == n - 2 else turns[step % 2]
        yield from wire.exchange_adding(
            [((rank - 1) % n, sent)], [((rank + 1) % n, chunk, out)], combine, spare
        )
        sent = out
    if n == 1 and output is not None:
        output.copy_(sent)


def all_gather_single(output, input, group=None, async_op=False):
    """Rank i's input into the i-th part of all outputs, by a ring: N-1 rounds. `input` may be its
    part of `output`."""
    wire = wire_of(group)
    pieces, mine = cut("output", output, wire.size), input.reshape(-1)
    if pieces[0].shape != mine.shape or output.dtype != input.dtype:
        raise ValueError(
            f"output is {describe(output)} and must hold {wire.size} times the input, {describe(input)}"
        )

    def rounds():
        pieces[wire.rank].copy_(mine)
        yield from ring_all_gather(wire, pieces)

    return perform(async_op, wire.agree(f"all_gather of {describe(mine)}"), rounds())


def reduce_scatter_single(output, input, op=SUM, group=None, async_op=False):
    """The i-th part of all inputs, reduced, into rank i's output, by a ring: N-1 rounds. `output`
    may be its part."""
    wire, combine = wire_of(group), operator(op)
    pieces, mine = cut("input", input.contiguous(), wire.size), cut("output", output, 1)[0]
    if pieces[0].shape != mine.shape or output.dtype != input.dtype:
        raise ValueError(
            f"input is {describe(input)} and must hold {wire.size} times the output, {describe(output)}"
        )
    if overlap(output, input) and output.data_ptr() != pieces[wire.rank].data_ptr():
        # Or another rank's part would be overwritten before it is sent
        pieces = cut("input", input.clone(), wire.size)
    agreed = wire.agree(f"reduce_scatter {op} of {describe(pieces[0])}")
    return perform(async_op, agreed, ring_reduce_scatter(wire, pieces, combine, mine))


def all_to_all_single(
    output, input, output_split_sizes=None, input_split_sizes=None, group=None, async_op=False
):
    """The j-th part of rank i's input into the i-th part of rank j's output: one round, everybody
    to everybody. Parts are equal, or have as many rows as the split sizes say."""
    wire = wire_of(group)
    if output.dtype != input.dtype or output.shape[1:] != input.shape[1:]:
        raise ValueError(
            f"input is {describe(input)} and output {describe(output)}: their rows must be alike"
        )
    if overlap(output, input):
        input = input.clone()  # or a part would be overwritten before it is sent

    def parts(name, tensor, sizes):
        sizes = sizes or [len(tensor) // wire.size] * wire.size
        if len(sizes) != wire.size or sum(sizes) != len(tensor):
            raise ValueError(
                f"{name} has {len(tensor)} rows, which do not divide among {wire.size} ranks as {sizes}"
            )
        return tensor.split(sizes)

    to, come = parts("input", input, input_split_sizes), parts("output", output, output_split_sizes)
    others = [(wire.rank + i) % wire.size for i in range(1, wire.size)]  # not rank 0 first for all

    def rounds():
        come[wire.rank].copy_(to[wire.rank])
        yield from wire.exchange(
            [(j, to[j]) for j in others], [(j, come[j]) for j in reversed(others)]
        )

    agreed = wire.agree(
        f"all_to_all of {input.dtype}", [t.numel() for t in to], [t.numel() for t in come]
    )
    return perform(async_op, agreed, rounds())


def barrier(group=None, async_op=False):
    """Nobody leaves before all have come. In round k each rank tells the one 2^k further on:
    ceil(log2 N) rounds (Hensgen, Finkel and Manber 1988)."""
    wire = wire_of(group)

    def rounds():
        told, heard = torch.zeros(2, 1, dtype=torch.uint8, device=wire.device)
        for far in [1 << k for k in range((wire.size - 1).bit_length())]:
            to, source = (wire.rank + far) % wire.size, (wire.rank - far) % wire.size
            yield from wire.exchange([(to, told)], [(source, heard)])

    return perform(async_op, wire.agree("barrier"), rounds())


# --- all-reduce: each algorithm reduces a flat contiguous tensor x in place, on two ranks or more


def server(wire, x, combine):
    """All send to rank 0, which adds up and sends the result to all. Rank 0 holds (N-1) S more."""
    others = range(1, wire.size)
    if wire.rank == 0:
        incoming = x.new_empty(len(others), x.numel())
        yield from wire.exchange([], list(zip(others, incoming)))
        for part in incoming:
            combine(x, part, out=x)
        yield from wire.exchange([(i, x) for i in others], [])
    else:
        yield from wire.exchange([(0, x)], [])
        yield from wire.exchange([], [(0, x)])


def in_order(rank, x, incoming, combine):
    """x of this rank and the other ranks' `incoming`, reduced in the order of the ranks: the same
    bits everywhere."""
    parts = [*incoming[:rank], x, *incoming[rank:]]
    total = combine(parts[0], parts[1])
    for part in parts[2:]:
        combine(total, part, out=total)
    return total


def sequential(wire, x, combine):
    """N reduces, to rank 0, 1, ...: nobody starts the next before it is through with the last.
    Holds N S more."""
    total = x
    for root in range(wire.size):
        if wire.rank == root:
            incoming = x.new_empty(wire.size - 1, x.numel())
            yield from wire.exchange(
                [], list(zip([i for i in range(wire.size) if i != root], incoming))
            )
            total = in_order(root, x, incoming, combine)
        else:
            yield from wire.exchange([(root, x)], [])
    x.copy_(total)


def direct(wire, x, combine):
    """Everybody sends to everybody and adds up for itself. Holds N S more."""
    others = [i for i in range(wire.size) if i != wire.rank]
    incoming = x.new_empty(len(others), x.numel())
    yield from wire.exchange([(i, x) for i in others], list(zip(others, incoming)))
    x.copy_(in_order(wire.rank, x, incoming, combine))


def ring(wire, x, combine):
    """Reduce-scatter, then all-gather, in N chunks; all links are busy all the time."""
    chunks = x.tensor_split(wire.size)
    yield from ring_reduce_scatter(wire, chunks, combine)
    yield from ring_all_gather(wire, chunks)


def halving_doubling(wire, x, combine):
    """Exchange half of what is left with a partner at distance 1, 2, 4, ..., then the same way
    back.

    p is the largest power of two: rank p+i first gives its tensor to rank i, pauses, and gets the
    result at the end.
    """
    p = 1 << (wire.size.bit_length() - 1)
    extra = [wire.rank + p] if wire.rank + p < wire.size else []
    folded = [wire.rank - p] if wire.rank >= p else []
    spare = spare_for(x)
    if p < wire.size:
        yield from wire.exchange_adding(
            [(i, x) for i in folded], [(i, x, x) for i in extra], combine, spare
        )
    low, high, way_back = 0, x.numel(), []
    for distance in [1 << i for i in range(p.bit_length() - 1)]:
        partner = [wire.rank ^ distance] if not folded else []
        halves = [slice(low, (low + high) // 2), slice((low + high) // 2, high)]
        mine, theirs = reversed(halves) if wire.rank & distance else halves
        sends, receives = (
            [(i, x[theirs]) for i in partner],
            [(i, x[mine], x[mine]) for i in partner],
        )
        yield from wire.exchange_adding(sends, receives, combine, spare)
        low, high = mine.start, mine.stop
        way_back.append((partner, mine, theirs))
    for partner, mine, theirs in reversed(way_back):
        yield from wire.exchange([(i, x[mine]) for i in partner], [(i, x[theirs]) for i in partner])
    if p < wire.size:
        yield from wire.exchange([(i, x) for i in extra], [(i, x) for i in folded])


def default_node(ranks):
    """The largest divisor of `ranks` up to their square root."""
    return max(n for n in range(1, ranks + 1) if ranks % n == 0 and n * n <= ranks)


def hierarchical(wire, x, combine, node=None):
    """For nodes of `node` neighbouring ranks, fast inside: reduce-scatter inside, all-reduce of the
    chunk with the ranks in the same place of the other nodes, all-gather inside. 2 (N/node - 1)
    slow rounds instead of 2 (N-1), and only 1/node of the tensor on each rank's slow link.
    ValueError where the ranks do not divide."""
    node = node or default_node(wire.size)
    if wire.size % node:
        raise ValueError(f"{wire.size} ranks do not divide into nodes of {node}")
    place = wire.rank % node
    inside = wire.among(range(wire.rank - place, wire.rank - place + node))
    across = wire.among(range(place, wire.size, node))
    chunks = x.tensor_split(node)
    yield from ring_reduce_scatter(inside, chunks, combine)
    yield from ring(across, chunks[place], combine)
    yield from ring_all_gather(inside, chunks)


def as_all_reduce(algorithm):
    """all_reduce(tensor, op=SUM, group=None, async_op=False, **options), to stand in for
    torch.distributed's."""

    def all_reduce(tensor, op=SUM, group=None, async_op=False, **options):
        wire, combine = wire_of(group), operator(op)

        def rounds():
            x = tensor.contiguous().view(-1)
            if wire.size > 1:
                yield from algorithm(wire, x, combine, **options)
            if not tensor.is_contiguous():
                tensor.copy_(x.view(tensor.shape))

        how = f"{algorithm.__name__} {options or ''}".strip()
        return perform(
            async_op, wire.agree(f"all_reduce by {how}, {op} of {describe(tensor)}"), rounds()
        )

    return all_reduce


ALL_REDUCE = {
    "server": as_all_reduce(server),
    "sequential": as_all_reduce(sequential),
    "direct": as_all_reduce(direct),
    "ring": as_all_reduce(ring),
    "halving-doubling": as_all_reduce(halving_doubling),
    "hierarchical": as_all_reduce(hierarchical),
}
all_reduce = ALL_REDUCE["ring"]


# --- demo ---

import functools
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
            perform(False, wire.exchange([((run.rank - 1) % n, x)], [((run.rank + 1) % n, y)]))

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
