"""What each technique is worth, by its demo's receipts: python -m benchmarks.table

A row a technique: runs its script in float64 on 4 ranks, takes what the rank that sends most sends
a step, and what the rank that holds most holds at the peak, beside one process with the same flags;
and the largest relative difference of any gradient from one process.
"""

import re

import benchmarks
import harness

ROWS = [
    "train.py --microbatches 2 --dp 4",
    "train.py --microbatches 2 --dp 4 --zero 2",
    "train.py --microbatches 2 --dp 4 --zero 3",
    "train.py --microbatches 2 --tp 4",
    "train.py --microbatches 2 --tp 4 --sp",
    "train.py --layers 8 --microbatches 8 --pp 4",
    "train.py --layers 8 --microbatches 8 --pp 4 --schedule zb-v",
    "train.py --microbatches 2 --cp 4",
    "train.py --microbatches 2 --dp 4 --ep 4 --experts 8 --expert-chunks 2",
]


def held(result):
    """Bytes of states and activations, without the weights that stage 3 gathers for a moment."""
    rows = result["held"].items()
    return sum(row["bytes"] for kind, row in rows if kind != "gathered_peak")


def main():
    harness.Parser(__doc__).parse_args()
    print("| | sent a step | held, beside one process | error |\n|---|---|---|---|")
    for command in ROWS:
        flags = "--device cpu --dtype float64 --steps 3 --quiet --nproc"
        flag = r" --(dp|tp|cp|pp|ep|zero|expert-chunks) \d| --sp| --schedule \S+"
        alone = re.sub(flag, "", command)
        one, four = map(benchmarks.receipt, (f"{alone} {flags} 1", f"{command} {flags} 4"))
        sent = sum(row["wire_bytes"] for row in four["sent"]) / 1e6
        size = f"{held(four) / 1e6:.1f} of {held(one) / 1e6:.1f} MB, {held(four) / held(one):.2f}"
        error = four["max_error"]["grad"]
        print(f"| `{command}` | {sent:.2f} MB | {size} | {error:.0e} |", flush=True)


if __name__ == "__main__":
    harness.script(main)
