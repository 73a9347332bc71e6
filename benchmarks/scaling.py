"""Strong scaling of a data-parallel job that a few numbers describe, beside published times: python
-m benchmarks.scaling

The defaults are TSM on Summit (docs/learn/why.md). A step's time is by the dry run's rules: the
gradients' all-reduce takes what nccl's ring or tree takes (simulator/links.py). It runs beside
backward, which is two thirds of the computing, and slows it down while it lasts. One number is
fitted: a GPU's rate, from the published time on the fewest nodes, if --tflops does not give it.
Then the FLOP of a sample do not matter, and the number of samples only beside the messages.
Loading, validation and ranks that wait for the slowest are left out.
"""

import argparse
import re
from typing import NamedTuple

import harness
from receipts import formulas
from simulator import links


def flags():
    p = harness.Parser(__doc__)
    amount, few = harness.real(1, 1e30), harness.count(1, 10**6)
    speed = harness.quantity(harness.SPEED, "25GB/s")
    for flag, kind, default, metavar, why in [
        ("--parameters", amount, 24.3e6, "P", "of the model"),
        ("--flops", amount, 198e9, "FLOP", "of a sample, forward and backward"),
        ("--samples", amount, 24e6, "N", "of all epochs together"),
        ("--batch", few, 8, "N", "samples a GPU and step"),
        ("--nodes-of", few, 6, "N", "GPUs in a node"),
        ("--intra", speed, 50e9, "SPEED", "of a GPU's link inside its node, one way"),
        ("--inter", speed, 25e9, "SPEED", "of a node to the network, one way"),
        ("--nodes", node_counts, "1,2,4,8,16,32,64,128,256", "LIST", "numbers of nodes"),
    ]:
        p.add_argument(flag, type=kind, default=default, metavar=metavar, help=why)
    why = "that a GPU reaches (default: what the published time on the fewest nodes implies)"
    p.add_argument("--tflops", type=harness.real(1e-6, 1e9), metavar="TFLOP/s", help=why)
    why = "published times as NODES=HOURS:MINUTES or NODES=HOURS:MINUTES:SECONDS, or none"
    times = dict(type=published_times, default="1=49:50,128=0:28,256=0:14", metavar="LIST")
    p.add_argument("--published", **times, help=why)
    return p


def node_counts(text):
    """An argument type: numbers of nodes with commas between."""
    return {harness.count(1, 10**6)(number) for number in text.split(",")}


def published_times(text):
    """An argument type: {nodes: seconds}."""
    times = {}
    for part in text.split(",") if text != "none" else []:
        match = re.fullmatch(r"([1-9]\d{0,5})=(\d{1,6}):(\d\d?)(?::(\d\d?))?", part)
        nodes, *clock = (int(digits or 0) for digits in match.groups()) if match else [0, 0]
        if not any(clock):
            problem = "is no time: write it as 128=0:28, or none"
            raise argparse.ArgumentTypeError(f"{part!r} {problem}")
        hours, minutes, seconds = clock
        times[nodes] = 3600 * hours + 60 * minutes + seconds
    return times


class Job(NamedTuple):
    """A job by its numbers: bytes of the gradients, FLOP of a sample, samples of all epochs,
    samples a GPU and step; GPUs of a node, bytes/s of a GPU's link inside it, and of the node's to
    the network."""

    size: float
    flops: float
    samples: float
    batch: int
    node: int
    intra: float
    inter: float

    def messages(self, nodes):
        """Seconds of the gradients' all-reduce over all GPUs of so many nodes."""
        gpus = nodes * self.node
        if gpus == 1:
            return 0.0
        wire = formulas.all_reduce_sent(self.size, gpus)
        return links.Link(gpus, nodes, self.intra, self.inter).seconds("all_reduce", wire)

    def steps(self, nodes):
        return self.samples / (self.batch * nodes * self.node)

    def computing(self, rate):
        """Seconds of a step's computing, of GPUs with so many FLOP/s."""
        return self.batch * self.flops / rate

    def step(self, nodes, rate):
        """Seconds of a step."""
        compute = self.computing(rate)
        return compute / 3 + links.both(compute * 2 / 3, self.messages(nodes))

    def total(self, nodes, rate):
        return self.steps(nodes) * self.step(nodes, rate)

    def implied_rate(self, nodes, seconds):
        """FLOP/s of a GPU with which the job takes so long on so many nodes: `step`, solved for
        the computing, where messages end before backward and where they end after it."""
        step, messages = seconds / self.steps(nodes), self.messages(nodes)
        slowed = (1 - 1 / links.BESIDE) * messages
        compute = min(step - slowed, 3 * (step - messages))
        if compute <= 0:
            problem = "the messages alone take longer than the published time on the fewest nodes"
            raise harness.Refused(f"{problem}: give --tflops, or faster links")
        return self.batch * self.flops / compute


def report(job, nodes, rate, published):
    """Print the table, and what the published times leave to explain."""
    first = min(published or nodes)
    print(
        f"{job.size / 4e6:,.4g}M parameters, {job.flops / 1e9:,.4g} GFLOP a sample, "
        f"{job.samples:,.0f} samples, {job.batch:,} a GPU and step\n"
        f"a GPU computes at {rate / 1e12:.3g} TFLOP/s; links as nccl reaches them\n"
    )
    print("| nodes | GPUs | a step | not hidden | whole job | times as fast | published | times |")
    print("|---|---|---|---|---|---|---|---|")
    for n in sorted({first, *nodes, *published}):
        step, total = job.step(n, rate), job.total(n, rate)
        waited = step - job.computing(rate)
        cells = [f"{n:,}", f"{n * job.node:,}", f"{step * 1e3:,.4g} ms", f"{waited * 1e3:,.3g} ms"]
        cells += [clock(total), f"{job.total(first, rate) / total:,.4g}"]
        if n in published:
            cells += [clock(published[n]), f"{published[first] / published[n]:,.4g}"]
        else:
            cells += ["", ""]
        print(f"| {' | '.join(cells)} |")
    for n, seconds in published.items():
        if n == first:
            continue
        share = published[first] * first / (seconds * n)
        missing = seconds / job.steps(n) - job.computing(rate)
        line = f"\n{n:,} nodes: published {share:.0%} of ideal, {missing * 1e3:.3g} ms a step more"
        if missing > 0:
            speed = formulas.all_reduce_sent(job.size, n * job.node) / missing
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
    numbers = args.flops, args.samples, args.batch, args.nodes_of, args.intra, args.inter
    job, published = Job(4 * args.parameters, *numbers), args.published
    if args.tflops:
        rate = args.tflops * 1e12
    elif published:
        rate = job.implied_rate(min(published), published[min(published)])
    else:
        raise harness.Refused("a GPU's rate is not known: give --tflops, or --published")
    report(job, args.nodes, rate, published)


if __name__ == "__main__":
    harness.script(main)
