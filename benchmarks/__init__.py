"""Measurements: python -m benchmarks.NAME. Here is what several of them share.

Rivals take turns, A B A B, so that whatever else runs on the machine slows both. A turn is some
whole steps, timed from when all ranks are there until the last is done; shown are the medians, and
the median and the quartiles of the ratio over the turns.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time

import torch
import torch.distributed as dist

import advanced  # noqa: F401  (its lessons have plain names)
import harness

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
LONGEST = 1200  # seconds of a run in a process of its own


def parser(doc, nproc=None, turns=None):
    """The flags of what is measured on ranks of this machine, over gloo."""
    p = harness.Parser(doc)
    p.add_argument("--nproc", **harness.POSITIVE, default=nproc, help="ranks")
    if turns:
        why = "of each rival"
        p.add_argument("--turns", type=harness.count(2), default=turns, metavar="N", help=why)
    p.add_argument("--quiet", action="store_true", help="print nothing but errors")
    p.set_defaults(device="cpu", backend="gloo")
    return p


def turn(step, steps, device="cpu"):
    """Seconds a step, from the moment for which all ranks agreed to start until the last is done:
    all clocks here are one."""
    clock = torch.tensor(time.perf_counter(), dtype=torch.float64, device=device)
    dist.all_reduce(clock, op=dist.ReduceOp.MAX)
    start = clock.item() + 2e-3
    time.sleep(max(0, start - time.perf_counter()))
    for _ in range(steps):
        step()
    if clock.is_cuda:
        torch.cuda.synchronize()
    clock.fill_(time.perf_counter())
    dist.all_reduce(clock, op=dist.ReduceOp.MAX)
    return (clock.item() - start) / steps


def race(rivals, turns, steps=1, device="cpu"):
    """The seconds a step of each rival in each turn, without the first, which is a warm-up."""
    times = [[] for _ in rivals]
    for i in range(turns + 1):
        for step, row in zip(rivals, times):
            seconds = turn(step, steps, device)
            if i > 0:
                row.append(seconds)
    return times


def quartiles(times, others):
    """The lower quartile, the median and the upper one of the ratio of two rivals' turns."""
    ratios = [a / b for a, b in zip(times, others)]
    return statistics.quantiles(ratios, method="inclusive")


def shown(ratio):
    low, middle, high = ratio
    return f"{middle:.2f} ({low:.2f} .. {high:.2f})"


def call(words, passing=(0,)):
    """Run Python with these words, one thread a process, because others may use the cores. A lesson
    of advanced/ is run with -m. Returns what it said. Raises Refused, with the last line of it,
    where the exit code is none of `passing`."""
    if os.path.exists(os.path.join(ROOT, "advanced", words[0])):
        words = ["-m", f"advanced.{words[0].removesuffix('.py')}", *words[1:]]
    with tempfile.TemporaryFile("w+") as output:
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        options = dict(cwd=ROOT, env=environment, stdout=output, stderr=output)
        try:
            code = subprocess.run([sys.executable, *words], timeout=LONGEST, **options).returncode
        except subprocess.TimeoutExpired:
            raise harness.Refused(f"no end within {LONGEST} s", code=1) from None
        output.seek(0)
        said = output.read().strip()
    if code not in passing:
        last = said.rpartition("\n")[2]
        raise harness.Refused(f"{' '.join(words)} ended with exit code {code}: {last}", code=1)
    return said


def receipt(command, passing=(0,)):
    """What a script's run, or another benchmark's, writes to --json."""
    with tempfile.NamedTemporaryFile("r") as file:
        call([*command.split(), "--json", file.name], passing)
        content = file.read()
    if not content:
        raise harness.Refused(f"{command} wrote no receipt", code=1)
    return json.loads(content)
