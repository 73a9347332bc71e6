"""What an all-reduce costs on a network: rounds and bytes, counted and by formula, and the seconds
that they take on links; and whether a library of collectives does what torch.distributed does.

The alpha-beta model (Hockney 1994): a round in which a rank sends s bytes takes alpha + beta s
seconds. collectives.py comes in as an argument, `library`. benchmarks/collectives.py measures it.
"""

import functools
import math
import types
from typing import NamedTuple

import torch
import torch.distributed as dist

from harness import flags, memory
from harness.flags import POSITIVE, SIZE, SPEED, TIME, quantity
from harness.rank import launch
from harness.refusal import Refused
from proof.receipt import write_json

# --- flags


def parser(doc):
    """The parser of a script that counts or predicts all-reduces."""
    p = flags.Parser(doc)
    why = "of the tensor whose all-reduce is counted (default: 1MB)"
    p.add_argument("--size", type=quantity(SIZE, "25MB"), default="1MB", metavar="BYTES", help=why)
    why = "ranks that share fast links, for hierarchical (default: about the root of their number)"
    p.add_argument("--nodes-of", **POSITIVE, help=why)
    why = "run nothing, predict the times on N ranks, by the links below"
    p.add_argument("--ranks", type=flags.count(1, 10**12), metavar="N", help=why)
    latency = dict(type=quantity(TIME, "5us"), metavar="TIME")
    speed = dict(type=quantity(SPEED, "50GB/s"), metavar="SPEED")
    for flag, unit, why in [
        ("--alpha", latency, "latency of a link between nodes, with --ranks (default: 5us)"),
        ("--beta", speed, "bandwidth of a link between nodes, with --ranks (default: 50GB/s)"),
        ("--inside-alpha", latency, "latency inside a node, with --ranks (default: 2us)"),
        ("--inside-beta", speed, "bandwidth inside a node, with --ranks (default: 300GB/s)"),
    ]:
        p.add_argument(flag, **unit, help=why)
    flags.running_flags(p)
    return p


def check(args, world):
    """Refuse flags that do not go together on `world` ranks."""
    if args.ranks and args.json:
        raise Refused("--ranks runs nothing that --json could show: leave one of them out")
    if not args.ranks:
        for name in ("alpha", "beta", "inside_alpha", "inside_beta"):
            if getattr(args, name) is not None:
                flag = "--" + name.replace("_", "-")
                raise Refused(f"{flag} is for a prediction: add --ranks, or leave it out")
        memory.check_ranks(args, world, int(args.size))
    if args.nodes_of and world % args.nodes_of:
        raise Refused(f"{world} ranks do not divide into nodes of --nodes-of {args.nodes_of}")


# --- rounds and bytes


class Cost(NamedTuple):
    rounds: int  # the longest chain of messages that each wait for the one before
    sent: float  # bytes, the most that one rank sends
    total: float  # bytes, sent by all


class MessageLog:
    """To put before a view of collectives.py: class Counter(MessageLog, RankView). Its `log` has
    every message in this rank's order: ("send" or "receive", rank in the group, bytes)."""

    def __init__(self, group=None):
        super().__init__(group)
        self.log = []

    def exchange(self, send, receive, combine=None):
        self.note("send", send)
        super().exchange(send, receive, combine)
        self.note("receive", receive)

    def note(self, kind, tensors):
        for rank, t in self.crossing(tensors):
            self.log.append((kind, rank, t.numel() * t.element_size()))


def tally(logs):
    """The Cost of the messages in the logs of all ranks. Replays the logs, and stamps each message
    with the length of its chain. A message waits for what its sender has received, and for the
    sender's previous message to the same rank."""
    chain = [0] * len(logs)  # the longest chain that has reached each rank
    latest = {}  # (sender, receiver) -> the stamp of the last message that was sent
    position = [0] * len(logs)  # how much of each log is replayed
    arriving = {}  # (sender, receiver) -> the stamps of the messages on their way
    progress = True
    while progress:
        progress = False
        for rank, log in enumerate(logs):
            for kind, peer, _ in log[position[rank] :]:
                if kind == "send":
                    stamp = max(chain[rank], latest.get((rank, peer), 0)) + 1
                    latest[rank, peer] = stamp
                    arriving.setdefault((rank, peer), []).append(stamp)
                elif arriving.get((peer, rank)):
                    chain[rank] = max(chain[rank], arriving[peer, rank].pop(0))
                else:
                    break  # not sent yet: come back later
                position[rank] += 1
                progress = True
    sent = [sum(size for kind, _, size in log if kind == "send") for log in logs]
    return Cost(max(chain), max(sent), sum(sent))


def formulas(n, size, node=1, pieces=1):
    """{algorithm: Cost} of an all-reduce of `size` bytes on n ranks: hierarchical in nodes of
    `node` ranks, a double tree with so many pieces of each half. docs/collectives.md has the
    table."""
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
    tree_rounds = 2 * (tree_height(n) + pieces - 1) * several
    tree_sent = several * min(n, 4) * size / 2
    rows = {  # rounds, sent by the busiest rank, sent by all ranks together
        "server": (2 * several, (n - 1) * size, least),
        # Both of these: each rank sends its whole tensor to each other rank
        "sequential": (n * several, (n - 1) * size, n * (n - 1) * size),
        "direct": (several, (n - 1) * size, n * (n - 1) * size),
        "ring": (ring_rounds, ring_sent, least),
        "recursive-doubling": (doubling_rounds, doubling_sent, doubling_total),
        "halving-doubling": (2 * levels + 2 * fold, halving_sent, least),
        "double-tree": (tree_rounds, tree_sent, least),
        "hierarchical": (node_rounds, ring_sent, least),
    }
    return {name: Cost(*row) for name, row in rows.items()}


def tree_height(n):
    """log2 n, rounded up: from the root of a tree of n ranks to its deepest rank."""
    return (n - 1).bit_length()


def pieces_of(library, size):
    """How many pieces a double tree makes of half a float32 tensor of `size` bytes."""
    return max(1, math.ceil(size / 8 / library.TREE_PIECE))


def best_pieces(n, size, link):
    """For which the double tree's 2 (log2 n + pieces - 1) (alpha + beta size / pieces) is least."""
    below_the_root = max(0, tree_height(n) - 1)
    latency = max(link.alpha, 1e-12)
    return max(1, round(math.sqrt(below_the_root * size * link.beta / latency)))


def count(library, run, node):
    """{"counted": {algorithm: Cost as a dict}, "formulas": the same by formula} of an all-reduce of
    about --size bytes."""

    class Counter(MessageLog, library.RankView):
        pass

    n, say = run.world, run.print
    unit = 4 * n * (1 << (n.bit_length() - 1))  # the chunks of all algorithms come out equal
    size = max(1, round(run.args.size / unit)) * unit
    costs = formulas(n, size, node, pieces_of(library, size))
    expected = {name: cost._asdict() for name, cost in costs.items()}
    say(f"\nall-reduce of {size} bytes, hierarchical in nodes of {node}: counted / by the formula")
    titles = ("rounds", "busiest rank sends", "all ranks send")
    say(f"{'':20s}" + "".join(f"{title:>24s}" for title in titles))
    x, counted = torch.zeros(size // 4, device=run.device), {}
    for name, algorithm in library.ALGORITHMS.items():
        counter = Counter()
        algorithm(counter, x, torch.add, **({"node": node} if name == "hierarchical" else {}))
        counted[name] = tally(run.gather(counter.log))._asdict()
        line = f"  {name:18s}"
        for key, number in counted[name].items():
            formula = expected[name][key]
            verdict = "" if number == formula else " WRONG"
            line += f"{f'{number} / {formula:.0f}{verdict}':>24s}"
        say(line)
    return {"counted": counted, "formulas": expected}


# --- seconds


class Link(NamedTuple):
    """Between two ranks. A round takes alpha + beta s seconds, both ways at a time."""

    alpha: float  # latency of a round, in seconds
    beta: float  # seconds a byte


def predict(n, size, link, inside=None, node=1, pieces=None):
    """{algorithm: seconds} of an all-reduce of `size` bytes on n ranks. `pieces`: of each half, in
    a double tree; by default as many as are fastest.

    `inside` is the link within nodes of `node` ranks. Only hierarchical gains by it: the rounds of
    the others wait for the slow links. Every rank has a link of its own. Adding up takes no time,
    nor does posting many messages in one round, which flatters server and direct.
    """
    pieces = pieces or best_pieces(n, size, link)
    costs = formulas(n, size, node, pieces)
    # Bytes that wait for each other: more than one rank sends, if others send before or after it
    serial = {name: cost.sent for name, cost in costs.items()}
    serial["server"] *= 2  # in, then out
    serial["sequential"] *= n
    if n & (n - 1):  # no power of two: a tensor more, folded in before the rest
        serial["recursive-doubling"] += size
        serial["halving-doubling"] += size
    # In each round some rank sends or receives two pieces of S/2 by their number; of 2 ranks one
    tree_round = size / pieces / (2 if n == 2 else 1)
    serial["double-tree"] = costs["double-tree"].rounds * tree_round
    times = {
        name: cost.rounds * link.alpha + serial[name] * link.beta for name, cost in costs.items()
    }
    fast, slow = inside or link, link
    within = formulas(node, size)["ring"]
    across = formulas(n // node, size / node)["ring"]
    times["hierarchical"] = within.rounds * fast.alpha + within.sent * fast.beta
    times["hierarchical"] += across.rounds * slow.alpha + across.sent * slow.beta
    return times


def shown(value, units):
    """A value with the unit that suits it."""
    fitting = [unit for unit in units if units[unit] <= value]
    unit = max(fitting, key=units.get) if fitting else min(units, key=units.get)
    return f"{value / units[unit]:.3g} {unit}"


def speed_of(link):
    return f"{shown(link.alpha, TIME)}, {shown(1 / link.beta, SPEED)}"


def print_predictions(args, default_node):
    """The table of --ranks: seconds of an all-reduce by size and algorithm. default_node(n): how
    many of n ranks make a node, without --nodes-of."""
    n = args.ranks
    check(args, n)
    node = args.nodes_of or default_node(n)
    link = Link(args.alpha or 5e-6, 1 / (args.beta or 50e9))
    inside = Link(args.inside_alpha or 2e-6, 1 / (args.inside_beta or 300e9))
    print(f"predicted: all-reduce on {n} ranks; links: {speed_of(link)};")
    print(f"in nodes of {node}, for hierarchical: {speed_of(inside)}")
    rows = {size: predict(n, size, link, inside, node) for size in (10.0**i for i in range(3, 11))}
    widths = {name: max(12, len(name) + 2) for name in formulas(n, 0)}
    print(" " * 8 + "".join(f"{name:>{width}s}" for name, width in widths.items()))
    for size, times in rows.items():
        line = f"{shown(size, SIZE):>8s}"
        for name, seconds in times.items():
            star = "* " if seconds == min(times.values()) else ""
            line += f"{star + shown(seconds, TIME):>{widths[name]}s}"
        print(line)
    print("* the fastest")


def main(library):
    """The script of a library of collectives: with --ranks a prediction, else the demo."""
    args = parser(library.__doc__).parse_args()
    if args.ranks:
        print_predictions(args, library.default_node)
    else:
        demo = functools.partial(compare_and_count, library)
        launch(demo, args, check=functools.partial(check, args))


def compare_and_count(library, run):
    """The demo: every collective beside torch's, and what each all-reduce sends. Writes what
    --json asks for. Returns the exit code: 0 if all is as expected."""
    node = run.args.nodes_of or library.default_node(run.world)
    result = {"differ": compare_with_torch(library, run)}
    result |= count(library, run, node)
    ok = not result["differ"] and result["counted"] == result["formulas"]
    result = {"ok": ok, "world_size": run.world, "layout": {"node": node}} | result
    written = True
    if run.rank == 0 and run.args.json:
        written = write_json(run.args.json, result)
    run.print("  ok" if ok else "  FAILED")
    return 0 if ok and written else 1


# --- beside torch.distributed

EXACT_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.int64)


def torchs():
    """torch.distributed, under the names that two of its functions have from 2.13 on."""
    library = types.SimpleNamespace(**vars(dist))
    gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
    scatter = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)
    library.all_gather_single, library.reduce_scatter_single = gather, scatter
    return library


def use_all(library, x, rank, n, group=None):
    """{name: result} of every collective of a library. x has 3 n elements."""
    pieces, last, results = list(x.chunk(n)), n - 1, {}

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
    whole = result("all_gather", x.new_zeros(n * len(x)))
    library.all_gather_single(whole, x, group=group)
    part = result("reduce_scatter", torch.zeros_like(pieces[0]))
    library.reduce_scatter_single(part, x, group=group)
    library.all_to_all_single(result("all_to_all", torch.zeros_like(x)), x, group=group)
    sizes = [(rank + other) % 3 for other in range(n)]
    uneven = result("all_to_all, uneven", x.new_zeros(sum(sizes)))
    library.all_to_all_single(uneven, x[: sum(sizes)], sizes, sizes, group)
    library.all_reduce(result("all_reduce", x.clone()), group=group)
    library.all_reduce(result("all_reduce, maximum", x.clone()), dist.ReduceOp.MAX, group)
    library.barrier(group)
    return results


def differences(library, run):
    """{collective: dtypes in which this rank's result is not torch's}. Sums of small whole numbers
    are exact."""
    different = {}
    for dtype in EXACT_DTYPES:
        torch.manual_seed(run.rank)
        x = torch.randint(-8, 9, (3 * run.world,)).to(run.device, dtype)
        expected = use_all(torchs(), x, run.rank, run.world)
        results = use_all(library, x, run.rank, run.world)
        for name, all_reduce in library.ALL_REDUCE.items():
            results[name] = x.clone()
            all_reduce(results[name])
            expected[name] = expected["all_reduce"]
        for name, result in results.items():
            dtypes = different.setdefault(name, [])
            if not torch.equal(result, expected[name]):
                dtypes.append(str(dtype))
    return different


def compare_with_torch(library, run):
    """The collectives, with the dtypes, that differ from torch's on any rank."""
    ranks, differ = run.gather(differences(library, run)), set()
    for of_rank in ranks:
        for name, dtypes in of_rank.items():
            differ |= {f"{name} in {dtype}" for dtype in dtypes}
    differ = sorted(differ)
    verdict = "differ from torch's: " + ", ".join(differ)
    if not differ:
        verdict = "equal torch's, bit for bit"
    which = f"{len(ranks[0])} collectives on {run.world} ranks in {len(EXACT_DTYPES)} dtypes"
    run.print(f"{which} {verdict}")
    return differ
