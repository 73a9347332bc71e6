"""Strong scaling of a data-parallel job that a few numbers describe, beside published times: python
-m benchmarks.scaling

The defaults are TSM on Summit (Lin, Gan and Han 2019, Training Kinetics in 15 minutes,
arXiv:1910.00932): a ResNet-50 that reads 8 frames of a video. It has 24.3M parameters and 33G
multiplications a forward pass (arXiv:1811.08383), so 6 x 33 GFLOP in training. 1,536 V100s take
12,288 videos a step. Nodes have 6 GPUs and 25 GB/s to the network. Assumed: 8 videos a GPU in all
runs, 100 epochs of 240,000 videos, gradients in 32 bits, NVLinks of 50 GB/s.

A step's time is by the dry run's rules: the gradients' all-reduce takes what nccl's ring or tree
takes (simulator/links.py). It runs beside backward, which is two thirds of the computing, and slows
it down while it lasts. One number is fitted: a GPU's rate,
from the published time on the fewest nodes, if --tflops does not give it. Then the FLOP of a sample
do not matter, and the number of samples only beside the messages. Loading, validation and ranks
that wait for the slowest are left out.
"""

import math
from typing import NamedTuple

import harness
from receipts import formulas
from simulator.devices import Cluster
from simulator.links import spread
from simulator.meter import Part


class Job(NamedTuple):
    size: float  # bytes of the gradients
    flops: float  # FLOP of a sample, forward and backward
    samples: float  # of all epochs together
    batch: int  # samples a GPU and step


def flags():
    p = harness.Parser(__doc__)
    amount = harness.real(1, 1e30)
    for flag, default, metavar, why in [
        ("--parameters", 24.3e6, "P", "of the model"),
        ("--flops", 198e9, "FLOP", "of a sample, forward and backward"),
        ("--samples", 24e6, "N", "of all epochs together"),
    ]:
        p.add_argument(flag, type=amount, default=default, metavar=metavar, help=why)
    few = harness.count(1, 10**6)
    p.add_argument("--batch", type=few, default=8, help="samples a GPU and step")
    p.add_argument("--nodes-of", type=few, default=6, help="GPUs in a node")
    speed = harness.quantity(harness.SPEED, "25GB/s")
    for flag, default, why in [
        ("--intra", 50e9, "of a GPU's link inside its node, one way"),
        ("--inter", 25e9, "of a node to the network, one way"),
    ]:
        p.add_argument(flag, type=speed, default=default, metavar="SPEED", help=why)
    why = "that a GPU reaches (default: what the published time on the fewest nodes implies)"
    p.add_argument("--tflops", type=harness.real(1e-6, 1e9), metavar="TFLOP/s", help=why)
    why = "numbers of nodes, with commas between"
    p.add_argument("--nodes", default="1,2,4,8,16,32,64,128,256", metavar="LIST", help=why)
    why = "published times as NODES=HOURS:MINUTES or NODES=HOURS:MINUTES:SECONDS, or none"
    p.add_argument("--published", default="1=49:50,128=0:28,256=0:14", metavar="LIST", help=why)
    return p


def published_times(text):
    """{nodes: seconds} of --published."""
    times = {}
    for part in text.split(",") if text != "none" else []:
        try:
            nodes, clock = part.split("=")
            hours, minutes, seconds = [int(digits) for digits in f"{clock}:0".split(":")[:3]]
            times[int(nodes)] = 3600 * hours + 60 * minutes + seconds
            if not (0 < int(nodes) <= 10**6 and 0 < times[int(nodes)] < 1e12):
                raise ValueError("out of range")
        except ValueError:
            problem = f"--published {harness.outputs.short(part)} is no time"
            raise harness.Refused(f"{problem}: write it as 128=0:28, or none") from None
    return times


def node_counts(text):
    """The numbers of --nodes, sorted."""
    try:
        counts = sorted({int(part) for part in text.split(",")})
        if not 0 < counts[0] <= counts[-1] <= 10**6:
            raise ValueError("out of range")
    except ValueError:
        problem = f"--nodes {harness.outputs.short(text)} is no list of numbers"
        raise harness.Refused(f"{problem}: write it as 1,128,256, up to 1,000,000") from None
    return counts


def all_reduce_seconds(job, cluster, nodes):
    """Of the gradients over all GPUs of so many nodes, as the dry run's meter has it."""
    gpus = nodes * cluster.node
    if gpus == 1:
        return 0.0
    wire = formulas.all_reduce_sent(job.size, gpus)
    return spread(cluster, gpus, 1).seconds("all_reduce", wire)


def step_seconds(job, cluster, nodes, rate):
    """(seconds of a step, seconds of them in which messages alone are waited for)."""
    compute = job.batch * job.flops / rate
    messages = all_reduce_seconds(job, cluster, nodes)
    seconds = compute / 3 + Part(compute * 2 / 3, messages).seconds
    return seconds, seconds - compute


def total_seconds(job, cluster, nodes, rate):
    steps = job.samples / (job.batch * nodes * cluster.node)
    return steps * step_seconds(job, cluster, nodes, rate)[0]


def implied_rate(job, cluster, nodes, seconds):
    """FLOP/s of a GPU with which the job takes so long on so many nodes."""
    low, high = 1.0, 1e30
    for _ in range(200):
        middle = math.sqrt(low * high)
        if total_seconds(job, cluster, nodes, middle) > seconds:
            low = middle
        else:
            high = middle
    if total_seconds(job, cluster, nodes, high) > seconds * 1.001:
        problem = "the messages alone take longer than the published time on the fewest nodes"
        raise harness.Refused(f"{problem}: give --tflops, or faster links")
    return high


def report(job, cluster, nodes, rate, published):
    """Print the table, and what the published times leave to explain."""
    first = min(published, default=nodes[0])
    nodes = sorted({first, *nodes, *published})
    alone = total_seconds(job, cluster, first, rate)
    names = f"{job.size / 4e6:,.4g}M parameters, {job.flops / 1e9:,.4g} GFLOP a sample"
    print(f"{names}, {job.samples:,.0f} samples, {job.batch:,} a GPU and step")
    print(f"a GPU computes at {rate / 1e12:.3g} TFLOP/s; links as nccl reaches them\n")
    print("| nodes | GPUs | a step | not hidden | whole job | times as fast | published | times |")
    print("|---|---|---|---|---|---|---|---|")
    for n in nodes:
        step, waited = step_seconds(job, cluster, n, rate)
        total = total_seconds(job, cluster, n, rate)
        given = ["", ""]
        if n in published:
            given = [clock(published[n]), f"{published[first] / published[n]:,.4g}"]
        cells = [f"{n:,}", f"{n * cluster.node:,}"]
        cells += [f"{step * 1e3:,.4g} ms", f"{waited * 1e3:,.3g} ms"]
        print("| " + " | ".join([*cells, clock(total), f"{alone / total:,.4g}", *given]) + " |")
    for n, seconds in published.items():
        if n > first:
            gap(job, cluster, first, n, seconds, rate, published)


def gap(job, cluster, first, n, seconds, rate, published):
    """Say what share of the ideal a published time is, and what would explain the rest."""
    share = published[first] * first / (seconds * n)
    steps = job.samples / (job.batch * n * cluster.node)
    missing = seconds / steps - job.batch * job.flops / rate
    line = f"\n{n:,} nodes: published {share:.0%} of ideal, {missing * 1e3:.3g} ms a step more"
    if missing > 0:
        speed = formulas.all_reduce_sent(job.size, n * cluster.node) / missing
        line += ";\nan all-reduce that nothing hides takes as long at "
        line += f"{speed / 1e9:.2g} GB/s a node"
    print(line)


def clock(seconds):
    """49 h 50 min; below an hour, minutes and seconds."""
    hours, minutes = divmod(round(seconds / 60), 60)
    if hours:
        return f"{hours:,} h {minutes} min"
    minutes, seconds = divmod(round(seconds), 60)
    return f"{minutes} min {seconds} s"


def main():
    args = flags().parse_args()
    nodes, published = node_counts(args.nodes), published_times(args.published)
    job = Job(4 * args.parameters, args.flops, args.samples, args.batch)
    # What crosses to other nodes is shared among the node's GPUs
    cluster = Cluster(None, args.nodes_of, args.intra, args.inter / args.nodes_of)
    most = max([*nodes, *published])
    if most * args.nodes_of > 10**6:
        raise harness.Refused(f"{most * args.nodes_of:,} GPUs are too many: give 1,000,000 at most")
    if most * args.nodes_of * args.batch > args.samples:
        taken = f"{most:,} nodes take {most * args.nodes_of * args.batch:,} samples a step"
        raise harness.Refused(f"{taken}, and there are {args.samples:,.4g}: give more --samples")
    if not (args.tflops or published):
        raise harness.Refused("a GPU's rate is not known: give --tflops, or --published")
    rate = (args.tflops or 0) * 1e12
    if not rate:
        rate = implied_rate(job, cluster, min(published), published[min(published)])
    report(job, cluster, nodes, rate, published)


if __name__ == "__main__":
    harness.script(main)
