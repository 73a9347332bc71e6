"""The dry run's estimates beside runs that others measured, with the error of each: python -m
benchmarks.published

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
parallelism and selective recomputation; 175B and 530B interleave 3 chunks. Its backward computes
weights' gradients beside the messages of tensor parallelism, ours waits for them. The 530B on 2,240
devices is in the abstract; eight replicas of the row before.

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
at 28 TFLOP/s (Lambda Labs 2020).

Left out: DeepSeek-V3 (float8 products and latent attention, which the model here does not have).

TSM on Summit is no GPT: benchmarks.scaling has it.
"""

import os
import sys
import time
from typing import NamedTuple
from unittest import mock

if not __package__:  # run as a script: python benchmarks/published.py
    sys.path[0] = os.path.dirname(sys.path[0])

import harness
import train
from simulator import devices, planner

MIXED = "--dtype float32 --param-dtype bfloat16 --reduce-dtype float32"
BFLOAT16 = "--dtype bfloat16"
LLAMA = (
    "--preset llama3-405b --tp 8 --pp 16 --sp --gather-again --zero 1 --schedule interleaved "
    f"--chunks 4 {MIXED}"
)
A100 = "--gpu a100 --intra 300GB/s --inter 25GB/s"
H100_500W = "--gpu x=96GB,989TFLOP/s,2.4TB/s,71.4%"
NO_FLASH = "--kernel plain --compile"
DROPOUT = "--dropout 0.1"
SELECTIVE = "--sp --gather-again --recompute selective"
MATMUL_2023 = "--matmul 626TFLOP/s"
# Billions of parameters: heads, width, layers, tp, pp, GPUs, batch, TFLOP/s a GPU
MEGATRON = {
    "1.7": (24, 2304, 24, 1, 1, 32, 512, 137),
    "3.6": (32, 3072, 30, 2, 1, 64, 512, 138),
    "7.5": (32, 4096, 36, 4, 1, 128, 512, 142),
    "18.4": (48, 6144, 40, 8, 1, 256, 1024, 135),
    "39.1": (64, 8192, 48, 8, 2, 512, 1536, 138),
    "76.1": (80, 10240, 60, 8, 4, 1024, 1792, 140),
    "145.6": (96, 12288, 80, 8, 8, 1536, 2304, 148),
    "310.1": (128, 16384, 96, 8, 16, 1920, 2160, 155),
    "529.6": (128, 20480, 105, 8, 35, 2520, 2520, 163),
    "1008": (160, 25600, 128, 8, 64, 3072, 3072, 163),
}
# Heads, width, layers, pp, sequences, seconds with every block recomputed, with selective
# recomputation and sequence parallelism
KORTHIKANTI = {
    "22B": (64, 6144, 48, 1, 4, 1.42, 1.10),
    "175B": (96, 12288, 96, 8, 64, 18.13, 13.75),
    "530B": (128, 20480, 105, 35, 280, 49.05, 37.83),
    "1T": (160, 25600, 128, 64, 512, 94.42, 71.49),
}
# Name: width, heads, layers
MPT = {
    "350m": (1024, 16, 24),
    "1b": (2048, 16, 24),
    "3b": (2560, 20, 32),
    "7b": (4096, 32, 32),
    "13b": (5120, 40, 40),
    "30b": (7168, 56, 48),
    "70b": (8192, 64, 80),
}
# Name, tokens of a sequence, GPUs, sequences a micro-batch, micro-batches, blocks recomputed,
# tokens/s a GPU
MPT_H100 = [
    ("70b", 2048, 64, 8, 4, True, 1039),
    ("30b", 2048, 32, 14, 3, True, 2308),
    ("30b", 2048, 8, 3, 21, True, 2002),
    ("30b", 4096, 8, 1, 21, True, 1802),
    ("30b", 8192, 8, 1, 21, True, 1384),
    ("13b", 1024, 8, 40, 3, True, 5502),
    ("13b", 2048, 8, 2, 1, False, 4792),
    ("13b", 16384, 8, 3, 3, True, 2985),
    ("7b", 2048, 8, 6, 1, False, 10643),
    ("7b", 8192, 8, 8, 2, True, 6935),
    ("7b", 65536, 8, 1, 2, True, 1956),
    ("3b", 512, 8, 40, 6, False, 27965),
    ("3b", 2048, 32, 6, 3, False, 23021),
    ("3b", 16384, 8, 1, 6, False, 11152),
    ("1b", 2048, 8, 14, 1, False, 45455),
]
MPT_A100 = [
    ("70b", 2048, 64, 8, 4, True, 410),
    ("70b", 2048, 32, 2, 16, True, 373),
    ("30b", 2048, 8, 3, 21, True, 916),
    ("30b", 4096, 8, 1, 21, True, 814),
    ("30b", 8192, 8, 1, 21, True, 574),
    ("13b", 1024, 8, 40, 3, True, 2330),
    ("13b", 2048, 8, 2, 3, False, 2262),
    ("13b", 16384, 8, 3, 3, True, 1431),
    ("13b", 32768, 8, 1, 3, True, 1016),
    ("7b", 2048, 8, 6, 2, False, 4641),
    ("7b", 8192, 8, 8, 2, True, 3206),
    ("7b", 65536, 8, 1, 2, True, 1013),
    ("3b", 512, 8, 40, 6, False, 12127),
    ("3b", 2048, 8, 10, 2, False, 10811),
    ("1b", 2048, 8, 14, 4, False, 20513),
    ("350m", 2048, 8, 32, 2, False, 58782),
]


class Row(NamedTuple):
    """What was measured, in a unit, and what is estimated. The units of a time: see TIMES."""

    run: str
    unit: str
    published: float
    estimate: float

    @property
    def error(self):
        return self.estimate / self.published - 1

    @property
    def longer(self):
        """The measured time over the estimated one."""
        ratio = self.published / self.estimate
        return ratio if self.unit == "seconds a step" else 1 / ratio


TIMES = ("TFLOP/s a GPU", "tokens/s a GPU", "seconds a step", "MFU, %")


def estimate(flags, sums="last", slower=1.0, **more):
    """(args, config, Estimate, what was played) of a command line of train.py. sums, slower: see
    planner.estimate; these runs wait for gradients after the last action. more: attributes of args
    that no flag gives."""
    words = [*flags.split(), "--dry-run", "--prove", "0", "--backend", "nccl"]
    args = train.flags().parse_args(words)
    args, config = train.prepare(args)
    vars(args).update(more)
    cluster = devices.cluster_of(args)
    return args, config, *planner.step_of(args, config, cluster, train.train, sums, slower)


def llama():
    for gpus, flags, theirs in (
        ("8,192 GPUs, dp 64", "--dp 64 --batch 2048 --microbatches 32", 430),
        ("16,384 GPUs, dp 128", "--dp 128 --batch 2048 --microbatches 16", 400),
        (
            "16,384 GPUs, cp 16, 131,072 tokens",
            "--dp 8 --cp 16 --cp-kind gather --context 131072 --batch 128 --microbatches 16",
            380,
        ),
    ):
        *_, step, _ = estimate(f"{LLAMA} {flags}")
        yield Row(f"Llama 3 405B, {gpus}", "TFLOP/s a GPU", theirs, step.rate / 1e12)


def megatron_flops(batch, layers, width, vocab):
    """Of a step of 2,048 tokens a sequence, with every block recomputed."""
    rest = 1 + 2048 / 6 / width + vocab / 16 / layers / width
    return 96 * batch * 2048 * layers * width**2 * rest


def gpt(heads, width, layers, vocab):
    sizes = f"--heads {heads} --width {width} --layers {layers} --context 2048 --vocab {vocab}"
    return f"--preset gpt2 {sizes} {MIXED} {NO_FLASH}"


def megatron():
    for name, (heads, width, layers, tp, pp, gpus, batch, theirs) in MEGATRON.items():
        dp = gpus // tp // pp
        layout = f"--dp {dp} --tp {tp} --pp {pp} --batch {batch} --microbatches {batch // dp}"
        sizes = gpt(heads, width, layers, 51200) + f" --recompute block {DROPOUT}"
        *_, step, _ = estimate(f"{sizes} {A100} {layout}", "after", 1 / tp)
        rate = megatron_flops(batch, layers, width, 51200) / step.seconds / gpus / 1e12
        yield Row(f"Megatron GPT {name}B, {gpus} GPUs", "TFLOP/s a GPU", theirs, rate)


def korthikanti():
    for name, (heads, width, layers, pp, rows, full, less) in KORTHIKANTI.items():
        sizes = gpt(heads, width, layers, 51200) + f" {DROPOUT} {A100} --tp 8"
        microbatches = rows if pp > 1 else 1
        layout = f"--pp {pp} --batch {rows} --microbatches {microbatches}"
        if name in ("175B", "530B"):
            layout += " --schedule interleaved --chunks 3"
        *_, step, _ = estimate(f"{sizes} {layout} --recompute block", "after", 1 / 8)
        run = f"Megatron GPT {name}, {8 * pp} GPUs, 2022"
        yield Row(f"{run}, recomputed", "seconds a step", full, step.seconds)
        *_, step, _ = estimate(f"{sizes} {layout} {SELECTIVE}", "after")
        yield Row(f"{run}, sp, selective", "seconds a step", less, step.seconds)
    sizes = gpt(128, 20480, 105, 51200) + f" {DROPOUT} {A100} --tp 8 --pp 35 --dp 8"
    layout = "--schedule interleaved --chunks 3 --batch 2240 --microbatches 280"
    run = "Megatron GPT 530B, 2240 GPUs, 2022"
    *_, step, _ = estimate(f"{sizes} {layout} --recompute block", "after", 1 / 8)
    yield Row(f"{run}, recomputed", "MFU, %", 42.1, 100 * step.rate / 312e12)
    *_, step, _ = estimate(f"{sizes} {layout} {SELECTIVE}", "after")
    yield Row(f"{run}, sp, selective", "MFU, %", 54.2, 100 * step.rate / 312e12)


def mtnlg():
    for dp, theirs in ((8, 60.1), (10, 50.2), (12, 44.4)):
        sizes = gpt(128, 20480, 105, 50304) + f" --recompute block {DROPOUT}"
        layout = f"--dp {dp} --tp 8 --pp 35 --batch 1920 --microbatches {1920 // dp}"
        *_, step, _ = estimate(f"{sizes} {A100} {layout}", "after", 1 / 8)
        yield Row(f"MT-NLG 530B, {dp * 280} GPUs", "seconds a step", theirs, step.seconds)


def bloom():
    sizes = gpt(112, 14336, 70, 250880) + f" --recompute block {DROPOUT}"
    layout = "--dp 8 --tp 4 --pp 12 --zero 1 --batch 2048 --microbatches 128"
    links = "--gpu a100 --intra 300GB/s --inter 6.25GB/s"
    *_, step, _ = estimate(f"{sizes} {layout} {links}", "after", 1 / 4)
    rate = megatron_flops(2048, 70, 14336, 250880) / step.seconds / 384 / 1e12
    yield Row("BLOOM 176B, 384 GPUs", "TFLOP/s a GPU", 150, rate)


def llama1():
    sizes = "--family llama --layers 80 --heads 64 --width 8192 --hidden 22016 --vocab 32000"
    layout = "--dp 256 --tp 8 --sp --zero 3 --batch 2048 --microbatches 2 --recompute selective"
    args, config, step, _ = estimate(
        f"{sizes} --context 2048 {MIXED} {A100} {layout} --kernel flash1"
    )
    rate = args.batch * config.context / step.seconds / 2048
    yield Row("LLaMA 65B, 2,048 GPUs", "tokens/s a GPU", 380, rate)


def megascale():
    sizes = "--preset gpt2 --layers 96 --heads 128 --width 12288 --context 2048 --vocab 64000"
    layout = "--dp 192 --tp 8 --sp --pp 8 --zero 1 --batch 6144 --microbatches 32"
    order = "--schedule interleaved --chunks 6 --compile"
    *_, step, _ = estimate(f"{sizes} {layout} {order} {MIXED} {A100}")
    yield Row("MegaScale 175B, 12,288 GPUs", "MFU, %", 55.2, 100 * step.rate / 312e12)


def mpt():
    for rows, name, flags in (
        (MPT_H100, "H100", f"--gpu h100 {MATMUL_2023}"),
        (MPT_A100, "A100", A100),
    ):
        for model, length, gpus, rows_each, microbatches, recompute, theirs in rows:
            width, heads, layers = MPT[model]
            sizes = f"--width {width} --heads {heads} --layers {layers} --context {length}"
            batch = gpus * rows_each * microbatches
            layout = f"--dp {gpus} --zero 3 --microbatches {microbatches} --batch {batch}"
            layout += " --recompute block" * recompute
            dtypes = BFLOAT16 if (model, name) == ("70b", "A100") else MIXED
            args, config, step, _ = estimate(
                f"--preset gpt2 {sizes} --vocab 50368 {layout} {dtypes} {flags} --kernel flash1"
            )
            rate = batch * length / step.seconds / gpus
            yield Row(
                f"MPT {model}, {length:,} tokens, {gpus} {name}s", "tokens/s a GPU", theirs, rate
            )


def torchtitan():
    for model, gpus, rows, device, compiled, theirs, memory in (
        ("8b", 8, 2, H100_500W, False, 5762, 82.4),
        ("8b", 8, 2, H100_500W, True, 6667, 77.0),
        ("8b", 128, 2, H100_500W, False, 5605, 67.0),
        ("8b", 128, 2, H100_500W, True, 6514, None),
        ("8b", 64, 1, A100, False, 2973, None),
        ("70b", 64, 1, A100, False, 331, None),
    ):
        layout = f"--dp {gpus} --zero 3 --batch {rows * gpus} --microbatches 1 {MIXED} {device}"
        layout += f" --recompute {'half' if model == '8b' else 'block'}"
        with mock.patch.object(harness, "lean_head", lambda part: None):
            args, config, step, [rank] = estimate(
                f"--preset llama3-{model} {layout}", compile=compiled, many_operations_a_norm=True
            )
        run = f"TorchTitan {model.upper()}, {gpus} {'A' if device == A100 else 'H'}100s"
        run += ", compiled" * compiled
        rate = args.batch * config.context / step.seconds / gpus
        yield Row(run, "tokens/s a GPU", theirs, rate)
        if memory:
            tokens = args.batch // gpus * config.context
            theirs_beside = (23552 - 20480) * 2 * tokens * config.layers  # see the top
            yield Row(run, "GiB", memory, (rank.memory + theirs_beside) / 2**30)


def gpt3():
    sizes = "--preset gpt2 --layers 96 --heads 96 --width 12288 --context 2048"
    _, config, _, [rank] = estimate(f"{sizes} --batch 1 --microbatches 1 --dtype bfloat16")
    yield Row("GPT-3, its weights", "GB", 350, rank.held["parameters"] / 1e9)
    years = 300e9 * config.flops_per_token() / 28e12 / 3600 / 8766
    yield Row("GPT-3, one device at 28 TFLOP/s", "years", 355, years)


TABLES = {
    "llama": llama,
    "megatron": megatron,
    "korthikanti": korthikanti,
    "mtnlg": mtnlg,
    "bloom": bloom,
    "llama1": llama1,
    "megascale": megascale,
    "mpt": mpt,
    "torchtitan": torchtitan,
    "gpt3": gpt3,
}


def summary(rows):
    """Sentences on the errors of times and of memory."""
    times = sorted(abs(row.error) for row in rows if row.unit in TIMES)
    if times:
        median = (times[(len(times) - 1) // 2] + times[len(times) // 2]) / 2
        within = sum(error <= 0.2 for error in times)
        yield f"times: median error {median:.0%}, {within} of {len(times)} rows within 20%"
        ratios = sorted(row.longer for row in rows if row.unit in TIMES)
        ends = round(len(ratios) / 20)  # of twenty runs, one at either end
        low, high = ratios[ends], ratios[-1 - ends]
        yield f"nine in ten took between {low:.2f} and {high:.2f} times the estimate"
        outside = [row for row in rows if row.unit in TIMES and abs(row.error) > 0.2]
        names = "; ".join(f"{row.run} {row.error:+.0%}" for row in outside)
        yield f"outside: {names or 'none'}"
    memory = [abs(row.error) for row in rows if row.unit == "GiB"]
    if memory:
        yield f"memory: at most {max(memory):.0%} off"


def main():
    p = harness.Parser(__doc__)
    p.add_argument("--only", choices=list(TABLES), help="one of the tables")
    only = p.parse_args().only
    print("| run | | published | estimate | error |\n|---|---|---|---|---|")
    start, rows = time.perf_counter(), []
    for table in [TABLES[only]] if only else TABLES.values():
        for row in table():
            rows.append(row)
            figures = f"{row.published:,} | {row.estimate:,.4g} | {row.error:+.0%}"
            print(f"| {row.run} | {row.unit} | {figures} |", flush=True)
    print()
    for sentence in summary(rows):
        print(sentence)
    print(f"{time.perf_counter() - start:.0f} s")


if __name__ == "__main__":
    harness.script(main)
