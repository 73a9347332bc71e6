"""How much of the experts' messages DualPipe hides on a slow link: python -m benchmarks.dualpipe

Two hosts, as of benchmarks.slow_links (root; iproute2), with a rank each. Both run train.py with
--schedule dualpipev, in which they share the experts. Its steps alternate: one runs the pairs one
after the other, the next overlaps them. Shown are seconds of pipeline.run(), medians over the
steps:

    in turns    computing + waiting
    computing   at best an overlapped step takes the longer of computing and waiting: the bound
    waiting     for rows and their counts. Without a limit it is for the other rank, which has more
                rows to compute
    overlapped  at best as long as the bound
    hidden      (in turns - overlapped) / (in turns - bound)
"""

import itertools
import os
import statistics
import sys
import time
import types
from unittest import mock

import torch
import torch.distributed as dist

import dualpipe
import harness
import train
from benchmarks.slow_links import run_on, two_hosts

# A token's expert has as many weights as its attention, so that both compute about equally long
MODEL = "--dp 2 --ep 2 --layers 4 --width 512 --heads 8 --experts 4 --top-k 1 --hidden 1024"
MODEL += " --context 64 --batch 64 --microbatches 16 --prove 0 --quiet --device cpu --timeout 300"
MODEL += " --schedule dualpipev --sample 0 --eval-every 0"
# Else glibc gives a thread's memory back and takes it again, which is not what is measured
KEEP_MEMORY = {"MALLOC_TRIM_THRESHOLD_": "1000000000", "MALLOC_MMAP_THRESHOLD_": "1000000000"}


def measure(megabits, steps):
    """Be a rank of train.py. The first prints a row of the table."""
    runs, waits = [], []  # (seconds of a run, of its waits); seconds of each wait of a run
    overlap = dualpipe.Turns.overlap
    kinds = itertools.cycle([lambda turns, *calls: [call() for call in calls], overlap])
    start, run, demo = dist.all_to_all_single, dualpipe.DualPipeV.run, train.train

    def timed_run(pipeline):
        waits.clear()
        begin = time.perf_counter()
        with mock.patch.object(dualpipe.Turns, "overlap", next(kinds)):
            losses = run(pipeline)
        runs.append((time.perf_counter() - begin, sum(waits)))
        return losses

    def timed_all_to_all(*tensors, async_op=False, **options):
        work = start(*tensors, async_op=True, **options)

        def wait():
            begin = time.perf_counter()
            work.wait()
            waits.append(time.perf_counter() - begin)

        return types.SimpleNamespace(wait=wait) if async_op else wait()

    def shown(run):
        code, medians = demo(run), []
        for of_rank in run.gather(runs[2:]):  # the first of each kind is a warm-up
            columns = *zip(*of_rank[::2]), *zip(*of_rank[1::2])
            medians.append([statistics.median(column) for column in columns])
        in_turns, waiting, overlapped, _ = torch.tensor(medians).mean(0).tolist()
        bound = max(in_turns - waiting, waiting)
        cells = in_turns, in_turns - waiting, waiting, bound, overlapped
        cells = " | ".join(f"{seconds:.2f}" for seconds in cells)
        hidden = (in_turns - overlapped) / (in_turns - bound)
        if run.rank == 0:
            print(
                f"| {f'{megabits:g}' if megabits else 'no limit'} | {cells} | {hidden:.0%} |",
                flush=True,
            )
        return code

    # The hosts share this machine's cores
    os.environ |= {"LOCAL_WORLD_SIZE": "2", "LOCAL_RANK": os.environ["RANK"]}
    sys.argv = ["train.py", *MODEL.split(), "--steps", str(2 * steps + 2)]
    with (
        mock.patch.object(dualpipe.DualPipeV, "run", timed_run),
        mock.patch.object(dist, "all_to_all_single", timed_all_to_all),
        mock.patch.object(train, "train", shown),
    ):
        train.main()


def main():
    parser = harness.Parser(__doc__)
    rates = dict(
        nargs="+", default=[0, 400, 300, 250, 200, 150], help="Mbit/s, several; 0: no limit"
    )
    parser.add_argument("--rates", type=harness.real(0), **rates)
    parser.add_argument("--steps", **harness.POSITIVE, default=4, help="of each kind")
    args = parser.parse_args()
    if "RANK" in os.environ:
        return measure(*args.rates, args.steps)
    os.environ |= KEEP_MEMORY
    print("| Mbit/s | in turns, s | computing | waiting | bound | overlapped | hidden |")
    print("|---|---|---|---|---|---|---|", flush=True)
    for number, rate in enumerate(args.rates):
        with two_hosts(rate) as hosts:
            words = f"-m benchmarks.dualpipe --rates {rate:g} --steps {args.steps}"
            run_on(hosts, words, 29700 + number)


if __name__ == "__main__":
    harness.script(main)
