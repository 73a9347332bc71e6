r"""The double tree: an all-reduce in few rounds, in which all ranks do about equal work.

Read collectives.py first: this file uses its rounds of messages. A ring takes 2 (N-1) rounds. In a
tree sums go up to the root, and the total comes down again, in 2 log2 N rounds. But half of the
ranks are leaves, which send once, while others send three times. So there are two trees: one half
of the tensor takes the first, the other half its mirror image, with the ranks in reverse. A rank
that has children in one tree is a leaf of the other. (With odd N rank 0 is the root of both, and
has one child in each.) With 6 ranks:

    first half              second half

    0                                 5
     `--------- 4         1 ---------'
         2 ----' `- 5    0 -' `---- 3
        / \                        / \
       1   3                      2   4

And each half is cut into K pieces, which follow each other: while one goes up from a rank, the next
arrives from its children. So only the first piece waits for log2 N rounds.

Sent      A tree has N-1 links, and each carries its part of the tensor up and down: 2 (N-1) S bytes
          by all ranks together, for S bytes. In one tree the busiest rank has three links, and
          sends 3 S. In both trees it has four, of S/2 bytes, and sends 2 S, in
          2 (log2 N + K - 1) rounds. (With N = 3 it sends 2 S in one tree, 1.5 S in both.)
Backward  That of any all-reduce: collectives.py.
Limits    A ring's busiest rank sends 2 (N-1)/N S, a little less: take the ring for large tensors on
          few ranks. nccl takes a double tree between nodes. Times: docs/learn/collectives.md.

    torchrun --nproc_per_node=4 -m advanced.double_tree     (needs model.py and collectives.py)

Sanders, Speck and Traeff 2009, Two-tree algorithms for full bandwidth broadcast.
"""

import argparse
import functools

import torch
import torch.distributed as dist

from collectives import OPERATORS, SUM, communicator_of

# --- the plainest form: one tree, and the whole tensor at once


@torch.no_grad()
def tree_all_reduce(tensor, op=SUM, group=None):
    """The sum of all tensors, in place. Tensors are contiguous, N is any number of ranks."""
    comm = communicator_of(group)
    above, below = {}, {}  # {the parent: tensor}, {each child: tensor}
    for child, parent, _ in tree_links(comm.size):
        if comm.rank == child:
            above[parent] = tensor
        if comm.rank == parent:
            below[child] = tensor
    comm.exchange({}, below, OPERATORS[op])  # add each child's sum, of all ranks below it
    comm.exchange(above, {})
    comm.exchange({}, above)  # the sum of all ranks
    comm.exchange(below, {})


def tree_links(n, mirrored=False):
    """[(child, its parent, its depth)] of the first tree or, mirrored, of the second."""
    links = []
    for place in range(1, n):
        path = path_to_root(place, n)
        child, parent = path[:2]
        if mirrored:  # the ranks in reverse; if n is odd, rank 0 is the root of both
            child, parent = ((n % 2 - 1 - p) % n for p in (child, parent))
        links.append((child, parent, len(path) - 1))
    return links


def path_to_root(place, n):
    """From `place` to the root, place 0. In binary the lowest 1 moves up by one: 001 -> 010 -> 100
    -> 000, and 011 -> 010. Where there is no such place, it falls away: of 6, 101 -> 100."""
    path = [place]
    while place:
        lowest = place & -place
        parent = (place - lowest) | (2 * lowest)
        place = parent if parent < n else place - lowest
        path.append(place)
    return path


# --- two trees, and pieces that follow each other

TREE_PIECE = 1 << 17  # elements, 512 KB of float32


@torch.no_grad()
def double_tree_all_reduce(tensor, op=SUM, group=None, piece_size=TREE_PIECE):
    """The sum of all tensors, in place, with the same bits on all ranks. A rank sends at most two
    pieces of piece_size elements in a round."""
    comm = communicator_of(group)
    rounds = rounds_up(comm, tensor.view(-1), piece_size)
    for from_children, to_parents in rounds:
        comm.exchange(to_parents, from_children, OPERATORS[op])
    for to_children, from_parents in reversed(rounds):  # the same links, the other way
        comm.exchange(to_children, from_parents)


def rounds_up(comm, x, piece_size):
    """For each round of the way up (from children, to parents): which pieces of x this rank
    receives and which it sends, each {rank: piece}. A link at depth d carries piece i in round
    height - d + i: the deepest links begin, and each level follows a round later."""
    n, height = comm.size, (comm.size - 1).bit_length()
    first, second = (half.split(piece_size) for half in x.tensor_split(2))
    rounds = [({}, {}) for _ in range(len(first) + height - 1)]
    for pieces, links in ((first, tree_links(n)), (second, tree_links(n, mirrored=True))):
        for child, parent, depth in links:
            if comm.rank not in (child, parent):
                continue
            for i, piece in enumerate(pieces):
                from_children, to_parents = rounds[height - depth + i]
                if comm.rank == child:
                    to_parents[parent] = piece
                else:
                    from_children[child] = piece
    return rounds


# --- demo ---

if __name__ == "__main__":  # importing this file needs no model.py
    from model import Sent, join_ranks, leave


def main():
    parser = argparse.ArgumentParser(description="run both forms beside torch's all-reduce")
    parser.add_argument("--elements", type=int, default=50000, help="of a tensor, about")
    parser.add_argument("--pieces", type=int, default=4, metavar="K", help="of each half")
    args = parser.parse_args()
    device = join_ranks()
    rank, n, K = dist.get_rank(), dist.get_world_size(), args.pieces
    size = -(-args.elements // (2 * K)) * 2 * K  # all pieces come out equal
    numbers = torch.arange(size, device=device) % 17 * (rank + 1)  # whole: all sums are exact
    S = 8 * size
    two_trees = functools.partial(double_tree_all_reduce, piece_size=size // 2 // K)
    forms = {  # (all-reduce, bytes that the busiest rank sends)
        "one tree": (tree_all_reduce, min(n - 1, 3) * S),
        f"two trees, {K} pieces of each half": (two_trees, min(n, 4) * S // 2 if n > 1 else 0),
    }
    if rank == 0:
        print(f"{n} ranks, {S:,} bytes each, in int64 and float64")
    for name, (all_reduce, busiest) in forms.items():
        for dtype in torch.int64, torch.float64:
            ours, theirs = numbers.to(dtype), numbers.to(dtype)
            dist.all_reduce(theirs)
            with Sent() as sent:
                all_reduce(ours)
            on_ranks = [None] * n
            dist.all_gather_object(on_ranks, (torch.equal(ours, theirs), sent.bytes))
            equal, sent_bytes = zip(*on_ranks)
            counted, due = (max(sent_bytes), sum(sent_bytes)), (busiest, 2 * (n - 1) * S)
            verdict = "proven, to the bit"
            if not all(equal):
                verdict = "NOT proven: the result differs from torch's"
            elif counted != due:
                verdict = "NOT proven: sent and formula differ"
            if "NOT" in verdict:
                break
        if rank == 0:
            print(
                f"{name}: the busiest rank sends {counted[0]:,.0f} = {due[0]:,} bytes, "
                f"all send {counted[1]:,.0f} = {due[1]:,}: {verdict}"
            )
        if "NOT" in verdict:
            leave(1)
    leave()


if __name__ == "__main__":
    main()
