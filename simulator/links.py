"""How long a message takes: nccl's own model of its algorithms, with bus bandwidths as nccl-tests
measure them.

A collective takes the fastest of nccl's algorithms (ring, tree) and protocols. A ring has a step
for each rank, most of them inside a node; a tree has log2 of the nodes. What a rank sends goes over
its links at the bus bandwidth. Ranks of a group that share a node share their links to other nodes,
a ring on each. (NVIDIA, nccl, src/graph/tuning.cc.)
"""

import functools
import math
from typing import NamedTuple

from simulator.kernels import between

# Of the link's bandwidth by data sheet. NVLink 3, an A100 in a node of 8: 235 of 300 GB/s, at which
# nccl caps it (tuning.cc, compCap80). NVLink 4, an H100: 360 GB/s reduce-scatter, 350 all-gather
# (NVIDIA/nccl, issue 1281), 476 all-reduce, which the switch adds up (NVIDIA/nccl-tests, issue 290)
BUS = {"reduce_scatter": 360 / 450, "all_gather": 350 / 450, "all_reduce": 360 / 450}
OTHER = 235 / 300
SWITCH = 476 / 450
# Part of it that a message between the 8 devices of a node reaches, by its bytes: all-reduces of 1
# MiB to 4 GiB. A100s, the mean of 729 nodes (microsoft/superbench-results, v0.4.0); H100s, one node
# (Azure/AI-benchmarking-guide)
SIZES = tuple(2**i for i in range(20, 33))
REACHED_3 = (25, 39, 67, 92, 120, 156, 202, 204, 224, 226, 231, 233, 235)
REACHED_4 = (44, 82, 129, 172, 234, 296, 362, 401, 423, 438, 466, 472, 476)
# InfiniBand: 46 to 48 GB/s on a device's link of 50 (NVIDIA/nccl-tests, issue 290)
NETWORK = 47 / 50

# Seconds by tuning.cc, of a ring's protocols: (base, a step inside a node, a step between nodes,
# the part of the bus bandwidth); of a tree's
RING = (
    (3.6e-6, 0.47e-6, 2.7e-6, 0.25),
    (10e-6, 1.9e-6, 4.0e-6, 0.92),
    (8.4e-6, 3.4e-6, 9.6e-6, 1.0),
)
TREE = (
    (4.4e-6, 0.52e-6, 5.0e-6, 0.24),
    (4.4e-6, 1.2e-6, 8.5e-6, 0.8),
    (0.0, 28e-6, 50e-6, 0.9),
)

# While a collective runs beside them, computing kernels take 1.189 times as long: it takes
# processors, memory bandwidth and power (mean of arXiv:2507.03114, on A100s and H100s)
BESIDE = 1.189


class Link(NamedTuple):
    """How a group of ranks lies in a cluster: ranks, nodes they are on; bytes/s of a device's link
    inside its node and of what its group has to other nodes."""

    ranks: int
    nodes: int
    intra: float
    inter: float

    def speed(self, operation):
        """Bus bandwidth, bytes/s that a rank sends."""
        inside = self.intra * BUS.get(operation, OTHER)
        if self.nodes == 1 and operation == "all_reduce" and self.intra >= 400e9:
            inside = self.intra * SWITCH  # since NVLink 4
        if self.intra < 400e9:
            inside = self.intra * OTHER
        return inside if self.nodes == 1 else min(inside, self.inter * NETWORK)

    def reached(self, operation, wire):
        """The part of the bus bandwidth that a collective of this size reaches inside a node. A
        link half as fast as the measured one reaches it with half of the bytes: latencies stay."""
        ways = 2 if operation == "all_reduce" else 1
        each = wire / ways / (self.ranks - 1)  # bytes of a ring's step
        measured, curve = (450e9, REACHED_4) if self.intra >= 400e9 else (300e9, REACHED_3)
        logarithms = [math.log(part) for part in curve]  # straight lines of these: larger is slower
        return math.exp(between(SIZES, logarithms, 8 * each * measured / self.intra)) / curve[-1]

    def seconds(self, operation, wire):
        """Of a message of which each rank sends `wire` bytes."""
        speed = self.speed(operation)
        if operation in ("send", "recv"):
            _, inside_node, between_nodes, _ = RING[2]
            return wire / speed + (inside_node if self.nodes == 1 else between_nodes)

        def fastest(protocols, inner_steps, steps):
            return min(
                base + inner_steps * inside_node + steps * between_nodes + wire / (speed * share)
                for base, inside_node, between_nodes, share in protocols
            )

        ways = 2 if operation == "all_reduce" else 1
        steps = ways * (self.nodes - 1)
        time = fastest(RING, ways * (self.ranks - 1) - steps, steps)
        if operation == "all_reduce":
            inner_steps = 2 * (self.ranks / self.nodes - 1)
            time = min(time, fastest(TREE, inner_steps, 2 * math.log2(self.nodes)))
        if self.nodes == 1 and self.ranks > 1:
            time = max(time, wire / (speed * self.reached(operation, wire)))
        return time


@functools.lru_cache(maxsize=None)
def spread(cluster, count, stride):
    """The Link between so many ranks, each `stride` after the last."""
    return link_of(cluster, range(0, count * stride, stride))


def link_of(cluster, ranks):
    """The Link between some ranks of a cluster."""
    nodes = len({rank // cluster.node for rank in ranks})
    return Link(len(ranks), nodes, cluster.intra, cluster.inter * len(ranks) / nodes)


def both(compute, beside):
    """Seconds of computing with a message beside it, which slows it down while it lasts."""
    return max(beside, compute + (1 - 1 / BESIDE) * beside)
