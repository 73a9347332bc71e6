"""Whether a library of collectives does what torch.distributed does, and how many rounds and bytes
its all-reduces take, counted and by formula. collectives.py comes in as an argument, `library`.

docs/learn/collectives.md has the formulas as a table, and the times that follow from them on links.
"""

import math
import types
from typing import NamedTuple

import torch
import torch.distributed as dist

from harness import flags
from harness.refusal import Refused
from proof.receipt import write_json

EXACT_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.int64)


def parse_args(doc):
    """The flags of collectives.py."""
    p = flags.Parser(doc)
    why = "of the tensor whose all-reduce is counted (default: 1MB)"
    size = flags.quantity(flags.SIZE, "25MB")
    p.add_argument("--size", type=size, default="1MB", metavar="BYTES", help=why)
    why = "ranks that share fast links, for hierarchical (default: 2, or 1 if their number is odd)"
    p.add_argument("--nodes-of", **flags.POSITIVE, help=why)
    flags.running_flags(p)
    return p.parse_args()


def check(args, world):
    """Refuse flags that do not go together on `world` ranks."""
    if args.nodes_of and world % args.nodes_of:
        raise Refused(f"{world} ranks do not divide into nodes of --nodes-of {args.nodes_of}")


# --- beside torch.distributed


def differences(library, run):
    """{a collective in a dtype} of which this rank's result is not torch's, to the bit."""
    different = set()
    for dtype in EXACT_DTYPES:
        torch.manual_seed(run.rank)
        x = torch.randint(-8, 9, (3 * run.world,)).to(run.device, dtype)
        expected = use_all(dist, x, run.rank, run.world)
        results = use_all(library, x, run.rank, run.world)
        for name in library.ALGORITHMS:
            results[name] = x.clone()
            library.all_reduce(results[name], algorithm=name)
            expected[name] = expected["all_reduce"]
        results["the plain ring"] = x.clone()
        library.plain_ring_all_reduce(results["the plain ring"])
        expected["the plain ring"] = expected["all_reduce"]
        for name, result in results.items():
            if not torch.equal(result, expected[name]):
                different.add(f"{name} in {dtype}")
    return different


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


# --- rounds and bytes


class Cost(NamedTuple):
    rounds: int  # the longest chain of messages that each wait for the one before
    sent: float  # bytes, the most that one rank sends
    total: float  # bytes, sent by all


class MessageCounter:
    """To put before a Communicator: class Counting(MessageCounter, Communicator).

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


def counting_communicator(communicator_class):
    """A Communicator, of collectives.py, of all ranks. It counts its messages."""
    return type("Counting", (MessageCounter, communicator_class), {})()


def cost(counts):
    """The Cost of the messages in the `counts` of all ranks."""
    sent = [of_rank.sent for of_rank in counts]
    return Cost(max(of_rank.chain for of_rank in counts), max(sent), sum(sent))


def formulas(n, size, node=1, pieces=1):
    """{algorithm: Cost} of an all-reduce of `size` bytes on n ranks: hierarchical in nodes of
    `node` ranks, a double tree with so many pieces of each half (docs/learn/collectives.md)."""
    p = 1 << (n.bit_length() - 1)  # the ranks that double and halve: a power of two
    levels = p.bit_length() - 1
    fold = int(p < n)  # the other ranks fold into them first
    several = int(n > 1)
    ring_sent, least = 2 * (n - 1) * size / n, 2 * (n - 1) * size
    halving_sent = 2 * (p - 1) * size / p + fold * size
    # A chain runs from rank p+i's tensor over rank i to rank p-1-i, whose bits all differ. It goes
    # on to rank 2p-1-i if there is such a rank: for some i, where N is above 1.5 p
    doubling_rounds = levels + fold + int(2 * n > 3 * p)
    doubling_sent = (levels + fold) * size
    doubling_total = (levels * p + 2 * (n - p)) * size
    ring_rounds, node_rounds = 2 * (n - 1), 2 * (node - 1) + 2 * (n // node - 1)
    # Each link of a rank takes S/2 up or down: at most 3 links in one tree, and 1 in the other
    tree_height = (n - 1).bit_length()
    tree_rounds = 2 * (tree_height + pieces - 1) * several
    tree_sent = several * min(n, 4) * size / 2
    rows = {  # rounds, sent by the busiest rank, sent by all ranks together
        "server": (2 * several, (n - 1) * size, least),
        "direct": (several, (n - 1) * size, n * (n - 1) * size),
        "ring": (ring_rounds, ring_sent, least),
        "recursive-doubling": (doubling_rounds, doubling_sent, doubling_total),
        "halving-doubling": (2 * levels + 2 * fold, halving_sent, least),
        "double-tree": (tree_rounds, tree_sent, least),
        "hierarchical": (node_rounds, ring_sent, least),
    }
    return {name: Cost(*row) for name, row in rows.items()}


class Table:
    """The all-reduces of one tensor of about --size bytes: counted, and by formula."""

    def __init__(self, run, tree_piece):
        self.run, self.node = run, run.args.nodes_of or math.gcd(2, run.world)
        unit = 4 * run.world * (1 << (run.world.bit_length() - 1))  # all chunks come out equal
        self.size = max(1, round(run.args.size / unit)) * unit
        pieces = max(1, math.ceil(self.size / 8 / tree_piece))  # of half a float32 tensor
        self.formulas = formulas(run.world, self.size, self.node, pieces)
        self.counted = {}

    def add_row(self, name, counts):
        """counts: a MessageCounter's, of this rank."""
        self.counted[name] = cost(self.run.gather(counts))

    def verdict(self, differ):
        """Print the table, and write what --json asks for. differ: what is not torch's on this
        rank. Returns the exit code: 0 if all is as expected."""
        run = self.run
        differ = sorted(set().union(*run.gather(differ)))
        found = (
            "differ from torch's: " + ", ".join(differ) if differ else "equal torch's, bit for bit"
        )
        run.print(f"collectives on {run.world} ranks in {len(EXACT_DTYPES)} dtypes {found}")
        text = f"all-reduce of {self.size} bytes, hierarchical in nodes of {self.node}"
        run.print(f"\n{text}: counted / formula")
        run.print(f"{'rounds':>44s}{'busiest rank sends':>24s}{'all ranks send':>24s}")
        for name, counted in self.counted.items():
            line = f"  {name:18s}"
            for number, due in zip(counted, self.formulas[name]):
                wrong = "" if number == due else " WRONG"
                line += f"{f'{number} / {due:.0f}{wrong}':>24s}"
            run.print(line)
        ok = not differ and self.counted == self.formulas
        result = {"ok": ok, "world_size": run.world, "layout": {"node": self.node}}
        result |= {"differ": differ}
        for key, rows in (("counted", self.counted), ("formulas", self.formulas)):
            result[key] = {name: row._asdict() for name, row in rows.items()}
        written = True
        if run.rank == 0 and run.args.json:
            written = write_json(run.args.json, result)
        run.print("  ok" if ok else "  FAILED")
        return 0 if ok and written else 1
