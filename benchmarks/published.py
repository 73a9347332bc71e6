"""The dry run's estimates beside runs that others measured, with the error of each: python -m
benchmarks.published

Nothing is fitted to these rows: one efficiency for all (devices.EFFICIENCY), devices and links by
their data sheets.

Llama 3, arXiv:2407.21783, table 4. Theirs interleaves 8 chunks of one layer, empty ones at both
ends; here 4 chunks. Their FLOPs' convention is not given: for 131,072 tokens both are shown, PaLM's
and causal attention as half.

Megatron-LM, arXiv:2104.04473, table 1, A100s with links of 25 GB/s. They recompute every block and
count it, 96 B s l h^2 (1 + s/6h + V/16lh). The sizes of micro-batches, and which rows interleave,
are not in the table: here one sequence, and 1F1B. Our gradients are added up in 32 bits after the
products, which costs most where a rank has many weights and a small micro-batch. Their
tensor-parallel ranks share out what goes to the next stage; here --sp does.

TorchTitan, its llama3_h100_202412_torchtitan.md, rows in eager bf16. H100s of 96 GB at 2.4 TB/s and
500 W, which do not reach the data sheet. Their selective recomputation is every other block's, ours
(--recompute selective) what is cheap in each.

GPT-3, arXiv:2005.14165: 175B parameters, 300B tokens. 350 GB are its weights in 16 bits. 355 years,
or 3.1 million hours, is arithmetic for one device at 28 TFLOP/s (Lambda Labs 2020, of a V100): the
row for A100s can't agree, and doesn't.

TSM on Summit is no GPT: benchmarks.scaling has it.
"""

import os
import sys
import time

if not __package__:  # run as a script: python benchmarks/published.py
    sys.path[0] = os.path.dirname(sys.path[0])

import harness
import train
from trainer import devices, planner

MIXED = "--dtype float32 --param-dtype bfloat16 --reduce-dtype float32"
LLAMA = (
    "--preset llama3-405b --tp 8 --pp 16 --sp --gather-again --zero 1 --schedule interleaved "
    f"--chunks 4 {MIXED}"
)
LONG = "--context 131072 --cp 16 --cp-kind gather"
A100 = "--gpu a100 --intra 300GB/s --inter 25GB/s"
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
GPT3 = "--preset gpt2 --layers 96 --heads 96 --width 12288 --context 2048"


def estimate(flags):
    """(args, config, Estimate, what was played) of a command line of train.py."""
    words = [*flags.split(), "--dry-run", "--prove", "0", "--backend", "nccl"]
    args = train.flags().parse_args(words)
    args, config = train.prepare(args)
    return args, config, *planner.step_of(args, config, devices.cluster_of(args), train.train)


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
        _, config, step, _ = estimate(f"{LLAMA} {flags}")
        yield f"Llama 3 405B, {gpus}", "TFLOP/s a GPU", theirs, step.rate / 1e12
        if config.context > 8192:
            half = 1 - 6 * config.layers * config.context * config.width / config.flops_per_token()
            yield (
                "the same, causal attention as half",
                "TFLOP/s a GPU",
                theirs,
                step.rate * half / 1e12,
            )


def megatron():
    for name, (heads, width, layers, tp, pp, gpus, batch, theirs) in MEGATRON.items():
        dp = gpus // tp // pp
        sizes = (
            f"--preset gpt2 --heads {heads} --width {width} --layers {layers} --context 2048 "
            "--vocab 51200"
        )
        flags = (
            f"{sizes} {A100} --dp {dp} --tp {tp} --pp {pp} --batch {batch} --microbatches "
            f"{batch // dp} {MIXED}"
        )
        *_, step, _ = estimate(flags + " --sp" * (tp > 1) + " --recompute block")
        flops = (
            96
            * batch
            * 2048
            * layers
            * width**2
            * (1 + 2048 / 6 / width + 51200 / 16 / layers / width)
        )
        yield (
            f"Megatron GPT {name}B, {gpus} GPUs",
            "TFLOP/s a GPU",
            theirs,
            flops / step.seconds / gpus / 1e12,
        )


def torchtitan():
    for gpus, theirs, memory in ((8, 5762, 82.4), (128, 5605, 67.0)):
        flags = (
            f"--preset llama3-8b --dp {gpus} --zero 3 --batch {2 * gpus} --microbatches 1 "
            f"--recompute selective {MIXED}"
        )
        args, config, step, [rank] = estimate(f"{flags} --gpu x=96GB,989TFLOP/s,2.4TB/s")
        yield (
            f"TorchTitan 8B, {gpus} GPUs",
            "tokens/s a GPU",
            theirs,
            args.batch * config.context / step.seconds / gpus,
        )
        yield f"TorchTitan 8B, {gpus} GPUs", "GiB", memory, rank.memory / 2**30


def gpt3():
    *_, [rank] = estimate(f"{GPT3} --batch 1 --microbatches 1 --dtype bfloat16")
    yield "GPT-3, its weights", "GB", 350, rank.held["parameters"] / 1e9
    args, config, step, _ = estimate(
        f"{GPT3} {A100} --dp 16 --tp 8 --pp 8 --batch 1536 --microbatches 96 {MIXED}"
    )
    flops = 300e9 * config.flops_per_token()
    yield "GPT-3, one device at 28 TFLOP/s", "years", 355, flops / 28e12 / 3600 / 8766
    yield "GPT-3 on 1,024 A100s", "million hours", 3.1, flops / step.rate / 3600 / 1e6


def main():
    p = harness.Parser(__doc__)
    tables = {"llama": llama, "megatron": megatron, "torchtitan": torchtitan, "gpt3": gpt3}
    p.add_argument("--only", choices=list(tables), help="one of the tables")
    only = p.parse_args().only
    print("| run | | published | estimate | error |\n|---|---|---|---|---|")
    start = time.perf_counter()
    for table in [tables[only]] if only else tables.values():
        for run, unit, theirs, ours in table():
            print(
                f"| {run} | {unit} | {theirs:,} | {ours:,.4g} | {ours / theirs - 1:+.0%} |",
                flush=True,
            )
    print(
        f"\n{time.perf_counter() - start:.0f} s, all at {devices.EFFICIENCY:.0%} of the data sheets"
    )


if __name__ == "__main__":
    harness.script(main)
