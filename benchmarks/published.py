"""The dry run's estimates beside runs that others measured, with the error of each: python -m
benchmarks.published

published.csv has the rows, each with the flags of train.py that describe it.
No constant of simulator/kernels.py and simulator/links.py is fitted to these rows. What is not
published, and assumed here, says docs/reference/estimates.md.
"""

import csv
import functools
import pathlib
import statistics
from typing import NamedTuple
from unittest import mock

import harness
import train
from receipts.formulas import flops_per_token
from simulator import devices, dryrun
from simulator.estimate import estimate as estimate_step

FILE = pathlib.Path(__file__).with_suffix(".csv")
HIDES = ("korthikanti", "llama1", "megascale")  # tables with messages that backward hides
TIMES = ("TFLOP/s a GPU", "tokens/s a GPU", "seconds a step", "MFU, %")


class Run(NamedTuple):
    """A row of published.csv.

    sums    when gradients are added up: with the last backward pass, or after it
    shared  tensor-parallel ranks that share out what goes to the next stage
    """

    table: str
    run: str
    unit: str
    published: float
    sums: str
    shared: int
    flags: str

    def error(self, estimate):
        return estimate / self.published - 1

    def longer(self, estimate):
        """The measured time over the estimated one."""
        ratio = self.published / estimate
        return ratio if self.unit == "seconds a step" else 1 / ratio


def published_runs():
    """The rows of published.csv."""
    runs = []
    for row in csv.DictReader(FILE.read_text().splitlines()):
        number = float(row["published"]) if "." in row["published"] else int(row["published"])
        runs.append(Run(**row | {"published": number, "shared": int(row["shared"])}))
    return runs


@functools.cache
def played(table, flags, sums, shared, compiled):
    """(args, config, Estimate, a rank of what was played) of train.py's flags. TorchTitan's with
    the many operations of a norm and of the loss that torch had then."""
    words = [*flags.split(), "--dry-run", "--prove", "0", "--backend", "nccl"]
    args, config = train.prepare(train.flags().parse_args(words))
    titan = table == "torchtitan"
    args.hides = (False, True) if table in HIDES else ()
    if titan:
        args.compile, args.many_operations_a_norm = compiled, True
    cluster = devices.cluster_of(args)
    lean_head = (lambda part, compiled: None) if titan else train.lean_head
    with mock.patch.object(train, "lean_head", lean_head):
        [ranks] = dryrun.play_brief([(args, config)], cluster, train.train)
    step = estimate_step(args, config, cluster, ranks, sums, 1 / shared)
    return args, config, step, ranks[0]


def estimate(run):
    """A run's estimate, in its unit."""
    compiled = run.run.endswith(", compiled")
    args, config, step, rank = played(run.table, run.flags, run.sums, run.shared, compiled)
    gpus = args.dp * args.cp * args.tp * args.pp
    if run.unit == "TFLOP/s a GPU" and run.table != "llama":
        return megatron_flops(args.batch, config) / step.seconds / gpus / 1e12
    if run.unit == "TFLOP/s a GPU":
        return step.rate / 1e12
    if run.unit == "tokens/s a GPU":
        return args.batch * config.context / step.seconds / gpus
    if run.unit == "seconds a step":
        return step.seconds
    if run.unit == "MFU, %":
        return 100 * step.rate / 312e12
    if run.unit == "GiB":
        tokens = args.batch // gpus * config.context
        theirs_beside = (23552 - 20480) * 2 * tokens * config.layers  # see the page
        return (rank.reserved + (1 + devices.RESERVED) * theirs_beside) / 2**30
    if run.unit == "GB":
        return rank.held["parameters"] / 1e9
    return 300e9 * flops_per_token(config) / 28e12 / 3600 / 8766  # years


def megatron_flops(batch, config):
    """Of a step of 2,048 tokens a sequence, with every block recomputed."""
    layers, width = config.layers, config.width
    rest = 1 + 2048 / 6 / width + config.vocab / 16 / layers / width
    return 96 * batch * 2048 * layers * width**2 * rest


def summary(rows):
    """Print sentences on the errors of times and of memory. rows: (run, estimate) pairs."""
    times = [(run, run.error(found), run.longer(found)) for run, found in rows if run.unit in TIMES]
    if times:
        errors = [abs(error) for _, error, _ in times]
        within = sum(error <= 0.2 for error in errors)
        median = f"{statistics.median(errors):.0%}"
        print(f"times: median error {median}, {within} of {len(times)} rows within 20%")
        ratios = sorted(longer for *_, longer in times)
        ends = round(len(ratios) / 20)  # of twenty runs, one at either end
        low, high = ratios[ends], ratios[-1 - ends]
        print(f"nine in ten took between {low:.2f} and {high:.2f} times the estimate")
        outside = [f"{run.run} {error:+.0%}" for run, error, _ in times if abs(error) > 0.2]
        print(f"outside: {'; '.join(outside) or 'none'}")
    memory = [run.error(found) for run, found in rows if run.unit == "GiB"]
    if memory:
        print(f"memory: {min(memory):+.1%} to {max(memory):+.1%}")


def main():
    p = harness.Parser(__doc__)
    runs = published_runs()
    tables = list(dict.fromkeys(run.table for run in runs))
    p.add_argument("--only", choices=tables, help="one of the tables")
    only = p.parse_args().only
    print("| run | | published | estimate | error |\n|---|---|---|---|---|")
    rows = []
    for run in runs:
        if only in (None, run.table):
            found = estimate(run)
            rows.append((run, found))
            figures = f"{run.published:,} | {found:,.4g} | {run.error(found):+.0%}"
            print(f"| {run.run} | {run.unit} | {figures} |", flush=True)
    print()
    summary(rows)


if __name__ == "__main__":
    harness.script(main)
