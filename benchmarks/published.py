"""The dry run's estimates beside runs that others measured, with the error of each: python -m
benchmarks.published

published.csv has the rows, each with the flags of train.py that describe it.
No constant of simulator/kernels.py and simulator/links.py is fitted to these rows. What of a layout
is not published, and assumed here:

Llama 3, arXiv:2407.21783, table 4. Theirs interleaves 8 chunks of one layer, empty ones at both
ends; here 4 chunks. Their FLOPs' convention is not given: here PaLM's, all of attention.

Megatron-LM, arXiv:2104.04473, table 1, A100s with links of 25 GB/s. They recompute every block and
count it, 96 B s l h^2 (1 + s/6h + V/16lh). The sizes of micro-batches, and which rows interleave,
are not in the table: here one sequence, and 1F1B. It had no FlashAttention: --kernel plain, and its
own fused kernels: --compile. Dropout is 0.1, its default, also of the scores. It sums gradients
after the last backward. Its tensor-parallel ranks share out what goes to the next stage: messages
between stages take 1/t of the time.

Megatron-LM in 2022, arXiv:2205.05198, tables 3 and 5: every block recomputed, and with sequence
parallelism and selective recomputation; 175B and 530B interleave 3 chunks. The 530B on 2,240
devices is in the abstract; eight replicas of the row before. Backward hides tensor parallelism's
messages, because the paper says so, as do those of LLaMA and MegaScale. The other rows wait: no
paper says otherwise, and BLOOM's code (bigscience-workshop/Megatron-DeepSpeed) and MT-NLG's
(deepspeedai/Megatron-DeepSpeed, issue 447) wait too.

MT-NLG, arXiv:2201.11990, section 2.4: seconds a step on 280, 350 and 420 nodes of 8 A100s, tp 8,
pp 35, 1,920 sequences. One sequence a micro-batch. As Megatron-LM.

BLOOM, arXiv:2211.05100: 384 A100s, tp 4, pp 12, dp 8, 2,048 sequences, about 150 TFLOP/s by
Megatron's formula; four links of 100 Gbit/s a node. Two sequences a micro-batch and Megatron-LM's
default dropout (bigscience-workshop/bigscience, train/tr11-176B-ml/tr11-176B-ml.slurm). That script
also sets CUDA_LAUNCH_BLOCKING=1: the host waits for each kernel, which is not in the estimate.

LLaMA, arXiv:2302.13971, section 2.4: 65B, 380 tokens a second and GPU on 2,048 A100s of 80 GB, 4M
tokens a step, model and sequence parallelism, xformers' attention. All else is assumed: tp 8, dp
256, ZeRO-3, 4 sequences a micro-batch.

MegaScale, arXiv:2402.15627: 175B, 12,288 A100-class GPUs, 6,144 sequences, tp 8, pp 8, 6 chunks,
55.2%. Their blocks compute attention and MLP side by side and attention has a window: here not.

MPT: mosaicml/llm-foundry, scripts/train/benchmarking/README.md: tokens/s by size, sequence and
devices, in 2023. FSDP's full shards are ZeRO-3; gradients are summed in float32, those of 70B on
A100s in bfloat16 (its mode PURE). Their attention is FlashAttention 1 in Triton, their blocks are
not compiled. Links between H100 nodes are not given: 50 GB/s a GPU. Large products of that time on
an H100: the mean of 543, 549, 639 and 772 TFLOP/s, torch with more than 2,048 rows and cuBLAS 12.0
and 11.11 in May 2023 (pytorch/pytorch, issue 100850).

TorchTitan, its benchmarks/llama3_h100_202412_torchtitan.md and docs/performance.md: H100s of 96 GB
at 2.4 TB/s and 500 of 700 W; A100s of 80 GB, their links 25 GB/s. Their selective recomputation is
--recompute half; but q, k and v are three products there, so of each token it keeps 23,552 numbers
of a block where ours keeps 20,480. torch's RMSNorm was many operations then, and the loss of all
tokens was computed at once, in 32 bits. Their memory is what torch's allocator reserved.

GPT-3, arXiv:2005.14165: 350 GB are its weights in 16 bits. 355 years is arithmetic for one device
at 28 TFLOP/s (Lambda Labs 2020). Left out: DeepSeek-V3 (float8 products and latent
attention, which the model here does not have).
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
        theirs_beside = (23552 - 20480) * 2 * tokens * config.layers  # see the top
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
