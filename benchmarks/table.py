"""The README's table of results: what each file's demo printed, on 4 ranks, and its speed. python
-m benchmarks.table

A row a technique: runs its script in float64, takes what the rank that sends most sends a step, and
what the rank that holds most holds at the peak, beside one process with the same flags; the largest
relative difference of any gradient from one process; and from benchmarks.vs_torch, on 2 ranks,
tokens/s and peak memory beside PyTorch's own.
"""

import benchmarks
import harness

ROWS = [  # script and flags, the pair of vs_torch
    ("ddp.py", "ddp"),
    ("zero.py --stage 2", "zero-2"),
    ("fsdp.py", "zero-3"),
    ("tensor_parallel.py", "tensor"),
    ("sequence_parallel.py", "sequence"),
    ("pipeline.py --layers 8 --schedule 1f1b", "1f1b"),
    ("pipeline.py --layers 8 --schedule zb-v", "zb-v"),
    ("context_parallel.py", "context"),
    ("expert_parallel.py", "experts"),
    ("muon.py", "muon"),
]


def held(result):
    """Bytes of states and activations, without the weights that stage 3 gathers for a moment."""
    rows = result["held"].items()
    return sum(row["bytes"] for kind, row in rows if kind != "gathered_peak")


def beside(pair, turns):
    """(tokens/s, peak memory) of ours / theirs, as vs_torch shows them."""
    flags = f"--nproc 2 --device cpu --quiet --only {pair} --turns {turns}"
    [row] = benchmarks.receipt(f"-m benchmarks.vs_torch {flags}")
    return benchmarks.shown(row["ratio"]), benchmarks.shown(row["memory"])


def main():
    p = harness.Parser(__doc__)
    benchmarks.turns_flag(p, 15)
    args = p.parse_args()
    columns = "sent a step | held, beside one process | error | tokens/s beside PyTorch's | memory"
    print(f"| | {columns} |\n|---|---|---|---|---|---|")
    for command, pair in ROWS:
        flags = f"{command} --device cpu --dtype float64 --steps 3 --quiet --nproc"
        one, four = (benchmarks.receipt(f"{flags} {ranks}") for ranks in (1, 4))
        sent = sum(row["wire_bytes"] for row in four["sent"]) / 1e6
        speed, memory = beside(pair, args.turns)
        size = f"{held(four) / 1e6:.1f} of {held(one) / 1e6:.1f} MB, {held(four) / held(one):.2f}"
        error = f"{four['max_error']['grad']:.0e}"
        row = f"| `{command}` | {sent:.2f} MB | {size} | {error} | {speed} | {memory} |"
        print(row, flush=True)


if __name__ == "__main__":
    harness.script(main)
