"""Collectives: all of them from messages between two ranks, and six ways to all-reduce.

A group is N processes, the ranks 0 to N-1. A collective moves tensors between them. An all-reduce
gives all of them the sum. The ring all-reduce: each rank cuts its tensor into N chunks, and in each
round rank r sends one chunk to rank r-1 (the other way round is as good). Here N is 3, the columns
are chunks 0, 1 and 2, "12" is rank 1's plus rank 2's, and "." has been passed on:

              start      round 1       round 2        rounds 3 and 4
    rank 0    0  0  0    0   .   01    012  .   .     012 012 012     1, 2: a reduce-scatter,
    rank 1    1  1  1    12  1   .     .   012  .     012 012 012     rank r has the sum of chunk r
    rank 2    2  2  2    .   02  2     .    .  012    012 012 012     3, 4: an all-gather

Sent      A rank sends 2 (N-1) chunks, that is 2 S (N-1)/N bytes for a tensor of S bytes: less than
          2 S for any N. In any other algorithm the busiest rank sends as much, or more, unless
          switches add. But each of the 2 (N-1) rounds waits for the one before. So for small
          tensors others are faster: the table above ALGORITHMS has what all six send. (Two trees
          are a lesson of their own: advanced/double_tree.py.)
Backward  Autograd sees none of these messages: the files that use them write their backward by
          hand (tensor_parallel.py has the first two). Where forward copies, backward adds up:
          broadcast and reduce are each other's backward, all-gather and reduce-scatter too.
          All-to-all goes back the way it came. The backward of all-reduce is all-reduce if the
          ranks' losses add up, the identity if all compute the same loss.
Limits    For learning: torch.distributed is as fast or faster. Times: docs/learn/collectives.md.

    torchrun --nproc_per_node=4 collectives.py              (needs model.py, to count and prove)

Patarasuk and Yuan 2009 (ring). Thakur, Rabenseifner and Gropp 2005 (trees, both doublings).
"""

import argparse
import copy
import functools

import torch
import torch.distributed as dist

# --- a ring all-reduce in its plainest form


def plain_ring_all_reduce(x, group=None):
    """Sum x over the group, in place, as dist.all_reduce does. x is contiguous and has at least N
    elements (the form below takes any: it sends no empty chunks)."""
    n, rank = dist.get_world_size(group), dist.get_rank(group)
    left, right = (rank - 1) % n, (rank + 1) % n
    chunks = x.view(-1).tensor_split(n)
    # Reduce-scatter: chunk c starts at rank c-1 and is passed to the left until it reaches rank c.
    # Every rank on its way adds its own part. In the end chunk `rank` is complete here
    for step in range(n - 1):
        passed_on = chunks[(rank + step + 1) % n]  # the sum of step + 1 ranks
        added_to = chunks[(rank + step + 2) % n]  # the next step passes it on
        arriving = torch.empty_like(added_to)
        send_recv(passed_on, left, arriving, right, group)
        added_to.add_(arriving)
    # All-gather: each step passes a complete chunk to the left
    for step in range(n - 1):
        passed_on, arriving = chunks[(rank + step) % n], chunks[(rank + step + 1) % n]
        send_recv(passed_on, left, arriving, right, group)


def send_recv(sent, to, received, source, group):
    """Send one tensor and receive another at the same time. If all ranks of the ring called send
    first and recv second, all would wait for ever."""
    messages = [
        dist.P2POp(dist.isend, sent, group=group, group_peer=to),
        dist.P2POp(dist.irecv, received, group=group, group_peer=source),
    ]
    for work in dist.batch_isend_irecv(messages):
        work.wait()


# --- what all others are built from: a round of messages


class Communicator:
    """Some ranks of a group, numbered 0 to size-1, and rounds of messages between them. All that
    follows knows ranks by these numbers, so it runs on a group and on any part of it alike."""

    def __init__(self, group=None):
        self.group = group or dist.group.WORLD
        self.rank = dist.get_rank(self.group)
        if self.rank < 0:  # else its loops would do nothing, silently
            raise ValueError("this rank is not in the group: only members may call its collectives")
        self.size = dist.get_world_size(self.group)
        self.members = range(self.size)  # members[i]: the rank in the group of rank i here

    def among(self, ranks):
        """The communicator of these ranks of this one, renumbered in this order."""
        part = copy.copy(self)
        part.members = [self.members[rank] for rank in ranks]
        part.rank, part.size = ranks.index(self.rank), len(ranks)
        return part

    @torch.no_grad()
    def exchange(self, send, receive, combine=None):
        """One round: start all its messages at once, then wait for all.

        send, receive: {rank: contiguous tensor}. A tensor that a rank sends to itself is copied.
        Without combine, what arrives overwrites the tensor in `receive`. With it, for example
        torch.add, combine(tensor, arrived, out=tensor)."""
        arrived = receive
        if combine:
            arrived = {rank: torch.empty_like(t) for rank, t in receive.items()}
        messages = []
        for operation, tensors in ((dist.isend, send), (dist.irecv, arrived)):
            for rank, t in tensors.items():
                if rank != self.rank and t.numel() > 0:
                    peer = self.members[rank]
                    messages.append(dist.P2POp(operation, t, group=self.group, group_peer=peer))
        if self.rank in send:
            arrived[self.rank].copy_(send[self.rank])
        if messages:
            for work in dist.batch_isend_irecv(messages):
                work.wait()
        if combine:
            for rank, t in receive.items():
                combine(t, arrived[rank], out=t)


# --- the ring for any operator: the two loops of the plain form, each a function of its own
#
# From here on x is flat, and changes in place. "Sum" and "add" stand for any operator.


def ring_all_reduce(comm, x, combine):
    """Every rank gets the sum (by any operator). All links of the ring are busy all the time."""
    chunks = x.tensor_split(comm.size)
    ring_reduce_scatter(comm, chunks, combine)
    ring_all_gather(comm, chunks)


def ring_reduce_scatter(comm, chunks, combine):
    """Rank r ends with the sum of chunk r. Its other chunks are partial sums then."""
    n, rank = comm.size, comm.rank
    left, right = (rank - 1) % n, (rank + 1) % n
    for step in range(n - 1):
        passed_on, added_to = chunks[(rank + step + 1) % n], chunks[(rank + step + 2) % n]
        comm.exchange({left: passed_on}, {right: added_to}, combine)


def ring_all_gather(comm, chunks):
    """Rank r starts with chunk r and ends with all."""
    n, rank = comm.size, comm.rank
    left, right = (rank - 1) % n, (rank + 1) % n
    for step in range(n - 1):
        passed_on, arriving = chunks[(rank + step) % n], chunks[(rank + step + 1) % n]
        comm.exchange({left: passed_on}, {right: arriving})


# --- all collectives but all-reduce, named as in torch.distributed 2.13 (older:
# all_gather_into_tensor, reduce_scatter_tensor)
#
# All ranks of the group must call the same collectives in the same order, with the same shapes and
# dtypes. A rank refuses an output that does not fit its own input. What differs between ranks is
# not checked, as in torch.distributed: gloo would fill a part of a buffer, or add the bytes of
# another tensor, silently. Tensors are contiguous and share no memory. The root is
# given by its rank in the group. `group` is a group or a Communicator.

SUM, PRODUCT = dist.ReduceOp.SUM, dist.ReduceOp.PRODUCT
MIN, MAX = dist.ReduceOp.MIN, dist.ReduceOp.MAX
OPERATORS = {SUM: torch.add, PRODUCT: torch.mul, MIN: torch.minimum, MAX: torch.maximum}


def communicator_of(group):
    """The communicator of a group, or the one that was given."""
    return group if isinstance(group, Communicator) else Communicator(group)


def check_parts(parts, part, size):
    """Raises ValueError unless `parts` are `size` tensors with as many elements as `part`, and of
    its dtype."""
    found, due = [(t.numel(), t.dtype) for t in parts], [(part.numel(), part.dtype)] * size
    if found != due:
        raise ValueError(f"the parts must be (elements, dtype) {due}, they are {found}")


def broadcast(tensor, *, group=None, group_src=0):
    """The root's tensor to all, down a binomial tree."""
    comm = communicator_of(group)
    for child, parent in binomial_tree(comm, tensor, group_src):
        comm.exchange(child, parent)


@torch.no_grad()
def reduce(tensor, op=SUM, *, group=None, group_dst=0):
    """The sum of all tensors, into the root's: broadcast's messages backwards. A rank adds its
    children's sums to its own. Only the root's tensor changes."""
    comm = communicator_of(group)
    x = tensor if comm.rank == group_dst else tensor.clone()
    for child, parent in reversed(binomial_tree(comm, x, group_dst)):
        comm.exchange(parent, child, OPERATORS[op])


def powers_of_two(n):
    """1, 2, 4, ... below n."""
    return [1 << i for i in range((n - 1).bit_length())]


def binomial_tree(comm, x, root):
    """For each round what this rank sends and what it receives, as `exchange` takes them. With 8
    ranks and root 0: 0 -> 4, then 0 -> 2 and 4 -> 6, then 0 -> 1, 2 -> 3, 4 -> 5 and 6 -> 7. That
    is log2 N rounds. A loop at the root would take N-1."""
    place = (comm.rank - root) % comm.size  # the root is at place 0
    rounds = []
    for distance in reversed(powers_of_two(comm.size)):
        child, parent = {}, {}
        if place % (2 * distance) == 0 and place + distance < comm.size:
            child = {(comm.rank + distance) % comm.size: x}
        elif place % (2 * distance) == distance:
            parent = {(comm.rank - distance) % comm.size: x}
        rounds.append((child, parent))
    return rounds


def scatter(tensor, scatter_list=None, *, group=None, group_src=0):
    """scatter_list[i] of the root into rank i's tensor, straight from the root: a tree would send
    it several times."""
    comm = communicator_of(group)
    parts = []
    if comm.rank == group_src:
        parts = scatter_list
        check_parts(parts, tensor, comm.size)
    comm.exchange(dict(enumerate(parts)), {group_src: tensor})


def gather(tensor, gather_list=None, *, group=None, group_dst=0):
    """Rank i's tensor into gather_list[i] of the root."""
    comm = communicator_of(group)
    parts = []
    if comm.rank == group_dst:
        parts = gather_list
        check_parts(parts, tensor, comm.size)
    comm.exchange({group_dst: tensor}, dict(enumerate(parts)))


@torch.no_grad()
def all_gather_single(output, input, group=None):
    """Rank i's input into part i of every output. `input` may be its part of `output`."""
    comm = communicator_of(group)
    parts = output.view(-1).tensor_split(comm.size)
    check_parts(parts, input, comm.size)
    parts[comm.rank].copy_(input.reshape_as(parts[comm.rank]))
    ring_all_gather(comm, parts)


@torch.no_grad()
def reduce_scatter_single(output, input, op=SUM, group=None):
    """The sum of part i of all inputs into rank i's output. `input` stays as it is, unless `output`
    is a part of it."""
    comm = communicator_of(group)
    sums = input.flatten().clone().tensor_split(comm.size)  # the ring adds in place
    check_parts(sums, output, comm.size)
    ring_reduce_scatter(comm, sums, OPERATORS[op])
    output.copy_(sums[comm.rank].view(output.shape))


def all_to_all_single(output, input, output_split_sizes=None, input_split_sizes=None, group=None):
    """Part j of rank i's input into part i of rank j's output, in one round. Parts are equal, or
    have as many rows as the split sizes say."""
    comm = communicator_of(group)
    outgoing = input.split(input_split_sizes or len(input) // comm.size)
    incoming = output.split(output_split_sizes or len(output) // comm.size)
    if input.dtype != output.dtype or not len(outgoing) == len(incoming) == comm.size:
        raise ValueError(f"input and output must have one dtype and {comm.size} parts each")
    comm.exchange(dict(enumerate(outgoing)), dict(enumerate(incoming)))


def barrier(group=None):
    """No rank leaves before all have come. In round k a rank tells the one 2^k further on: log2 N
    rounds (Hensgen, Finkel and Manber 1988)."""
    comm = communicator_of(group)
    device = "cuda" if dist.get_backend(comm.group) == "nccl" else "cpu"
    hello, heard = torch.zeros(2, 1, device=device, dtype=torch.uint8)
    for distance in powers_of_two(comm.size):
        ahead, behind = (comm.rank + distance) % comm.size, (comm.rank - distance) % comm.size
        comm.exchange({ahead: hello}, {behind: heard})
    heard.item()  # on nccl only the stream has waited so far


# --- five more all-reduces. The two shortest: all to one, and all to all


def server_all_reduce(comm, x, combine):
    """Rank 0 adds up, in the order of the ranks, and sends the sum to all. The others wait."""
    if comm.rank == 0:
        clients = {rank: x for rank in range(1, comm.size)}
        comm.exchange({}, clients, combine)
        comm.exchange(clients, {})
    else:
        comm.exchange({0: x}, {})
        comm.exchange({}, {0: x})


def direct_all_reduce(comm, x, combine):
    """Each rank sends its whole tensor to all others, and adds up for itself. It holds N S bytes
    more."""
    rows = x.new_empty(comm.size, x.numel())
    comm.exchange({rank: x for rank in range(comm.size)}, dict(enumerate(rows)))
    x.copy_(functools.reduce(combine, rows))  # in the order of the ranks: the same bits everywhere


# --- doubling: in round k the partners are the ranks 2^k apart. log2 N rounds


def recursive_doubling_all_reduce(comm, x, combine):
    """The partners swap all that they have, and both add up. So each has the sum of 2 ranks, then
    of 4, of 8, ..."""
    check_power_of_two(comm.size)
    for distance in powers_of_two(comm.size):
        partner = comm.rank ^ distance
        comm.exchange({partner: x}, {partner: x}, combine)


def halving_doubling_all_reduce(comm, x, combine):
    """The partners cut what they have in two. Each keeps one half, and adds the partner's copy.
    The next round halves what it kept. At the end a rank has 1/N of the sum. The same pairs in
    reverse order hand the halves back. The largest messages go to the nearest ranks."""
    check_power_of_two(comm.size)
    current, halvings = x, []
    for distance in powers_of_two(comm.size):
        partner = comm.rank ^ distance
        kept, sent = current.tensor_split(2)
        if comm.rank & distance:
            kept, sent = sent, kept
        comm.exchange({partner: sent}, {partner: kept}, combine)
        halvings.append((partner, kept, sent))
        current = kept
    for partner, kept, sent in reversed(halvings):
        comm.exchange({partner: kept}, {partner: sent})


def check_power_of_two(n):
    """Without a partner a rank would wait for ever. (MPI folds the ranks beyond a power of two into
    others first.)"""
    if n & (n - 1):
        raise ValueError(f"doubling needs a power of two, not {n} ranks: take the ring")


# --- rings inside nodes, and across them


def hierarchical_all_reduce(comm, x, combine, node_size=None):
    """For nodes of node_size neighbouring ranks, with fast links inside. node_size divides N.

    Reduce-scatter inside each node. Then each rank has one chunk of its node's sum, and all-reduces
    it with the ranks at its place in the other nodes: few slow rounds, with 1/node_size of the
    bytes. Last, all-gather inside each node."""
    node_size = node_size or (1 if comm.size % 2 else 2)
    if comm.size % node_size:  # else the last node's ranks would wait for ever
        raise ValueError(f"nodes of {node_size} ranks don't divide {comm.size} ranks")
    place = comm.rank % node_size
    inside = comm.among(range(comm.rank - place, comm.rank - place + node_size))
    across = comm.among(range(place, comm.size, node_size))
    chunks = x.tensor_split(node_size)
    ring_reduce_scatter(inside, chunks, combine)
    ring_all_reduce(across, chunks[place], combine)
    ring_all_gather(inside, chunks)


# --- all-reduce, by any of the six
#
#                       rounds                    the busiest rank sends   all send together
# server                2                         (N-1) S                  2 (N-1) S
# direct                1                         (N-1) S                  N (N-1) S
# ring                  2 (N-1)                   2 (N-1)/N S              2 (N-1) S
# recursive-doubling    log2 N                    S log2 N                 N S log2 N
# halving-doubling      2 log2 N                  2 (N-1)/N S              2 (N-1) S
# hierarchical          2 (k-1) + 2 (N/k-1)       2 (N-1)/N S              2 (N-1) S
#
# S: the tensor's bytes. k: ranks per node. In the two doublings N is a power of two.

ALGORITHMS = {
    "server": server_all_reduce,
    "direct": direct_all_reduce,
    "ring": ring_all_reduce,
    "recursive-doubling": recursive_doubling_all_reduce,
    "halving-doubling": halving_doubling_all_reduce,
    "hierarchical": hierarchical_all_reduce,
}


@torch.no_grad()
def all_reduce(tensor, op=SUM, group=None, algorithm="ring", **options):
    """The sum of all tensors, in place. It has the same bits on all ranks; another algorithm's may
    differ by rounding, because it adds in another order. `options` are that algorithm's."""
    ALGORITHMS[algorithm](communicator_of(group), tensor.view(-1), OPERATORS[op], **options)


# --- demo ---

if __name__ == "__main__":  # importing this file needs no model.py
    from model import Sent, join_ranks, leave


def main():
    parser = argparse.ArgumentParser(description="run every collective beside torch's own")
    parser.add_argument("--elements", type=int, default=50000, help="of a tensor, about")
    parser.add_argument("--node-size", type=int, help="of hierarchical (default: 2, for odd N 1)")
    args = parser.parse_args()
    device = join_ranks()
    rank, n = dist.get_rank(), dist.get_world_size()
    size = -(-args.elements // n) * n  # all chunks come out equal
    numbers = torch.arange(size, device=device) % 17 * (rank + 1)
    x_bytes = 8 * len(numbers)
    expected = formulas(n, x_bytes)
    verdict = f"all {len(expected)} on {n} ranks: proven, to the bit, in int64 and float64"
    if rank == 0:
        print(
            f"{x_bytes:,} bytes          the busiest rank sends = formula      all send = formula"
        )
    for name, due in expected.items():
        for dtype in torch.int64, torch.float64:  # of whole numbers: all sums are exact
            x = numbers.to(dtype)
            ours, theirs, output, run = cases(x, args.node_size)[name]
            result, right = output.clone(), output.clone()
            run(theirs, right)
            if name == "reduce" and rank != n - 1:
                right = x  # torch leaves anything here; ours must leave x as it is
            with Sent() as sent:
                run(ours, result)
            on_ranks = [None] * n
            dist.all_gather_object(on_ranks, (torch.equal(result, right), sent.bytes))
            equal, sent_bytes = zip(*on_ranks)
            counted = max(sent_bytes), sum(sent_bytes)
            if not all(equal):
                verdict = f"NOT proven: the result of {name} differs from torch's"
            elif counted != due:
                verdict = f"{name} NOT proven: sent and formula differ"
        if rank == 0:
            pairs = [f"{count:,.0f} = {formula:,}" for count, formula in zip(counted, due)]
            print(f"{name:22s}{pairs[0]:>27s}{pairs[1]:>31s}")
        if "NOT" in verdict:
            break
    if rank == 0:
        print(verdict)
    leave(int("NOT" in verdict))


def cases(x, node_size):
    """{name: (our function, torch's, an output, run)}: run(f, y) calls either of them so that it
    fills y, which begins as a copy of that output. The root is the last rank."""
    rank, n = dist.get_rank(), dist.get_world_size()
    root, parts = n - 1, list(x.tensor_split(n))
    part = parts[rank]

    def scatter_from_root(f, y):
        f(y, parts if rank == root else None, group_src=root)

    def gather_at_root(f, y):
        f(part, list(y.tensor_split(n)) if rank == root else None, group_dst=root)

    # Their names before torch 2.13
    gather_all = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    scatter_sums = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    found = {
        "plain_ring_all_reduce": (plain_ring_all_reduce, dist.all_reduce, x, lambda f, y: f(y)),
        "broadcast": (broadcast, dist.broadcast, x, lambda f, y: f(y, group_src=root)),
        "reduce": (reduce, dist.reduce, x, lambda f, y: f(y, group_dst=root)),
        "scatter": (scatter, dist.scatter, part, scatter_from_root),
        "gather": (gather, dist.gather, x, gather_at_root),
        "all_gather_single": (all_gather_single, gather_all, x, lambda f, y: f(y, part)),
        "reduce_scatter_single": (reduce_scatter_single, scatter_sums, part, lambda f, y: f(y, x)),
        "all_to_all_single": (all_to_all_single, dist.all_to_all_single, x, lambda f, y: f(y, x)),
        "barrier": (barrier, dist.barrier, x, lambda f, y: f()),
    }
    options = {name: {} for name in ALGORITHMS}
    options["hierarchical"] = {"node_size": node_size}
    for name in ALGORITHMS:
        ours = functools.partial(all_reduce, algorithm=name, **options[name])
        found[name] = ours, dist.all_reduce, x, lambda f, y: f(y)
    return found


def formulas(n, S):
    """{name: (bytes that the busiest rank sends, bytes that all send)}, for tensors of S bytes."""
    log2, chunks, least = (n - 1).bit_length(), (n - 1) * S // n, 2 * (n - 1) * S
    due = {
        "plain_ring_all_reduce": (2 * chunks, least),
        "broadcast": (log2 * S, (n - 1) * S),
        "reduce": (S if n > 1 else 0, (n - 1) * S),
        "scatter": (chunks, chunks),
        "gather": (S // n if n > 1 else 0, chunks),
        "all_gather_single": (chunks, (n - 1) * S),
        "reduce_scatter_single": (chunks, (n - 1) * S),
        "all_to_all_single": (chunks, (n - 1) * S),
        "barrier": (log2, n * log2),
        "server": ((n - 1) * S, least),
        "direct": ((n - 1) * S, n * (n - 1) * S),
        "ring": (2 * chunks, least),
        "hierarchical": (2 * chunks, least),
    }
    if n & (n - 1) == 0:  # a power of two
        due["recursive-doubling"] = log2 * S, log2 * n * S
        due["halving-doubling"] = 2 * chunks, least
    return due


if __name__ == "__main__":
    main()
