"""The README's table of results: what each file's demo printed, on 4 ranks, and its speed. python
-m benchmarks.table

A row a technique: runs its script in float64, takes what the rank that sends most sends a step, and
what the rank that holds most holds at the peak, beside one process with the same flags; the largest
relative difference of any gradient from one process; and from benchmarks.vs_torch, on 2 ranks,
tokens/s and peak memory beside PyTorch's own.
"""

import json
import os
import re
import subprocess
import sys
import tempfile

if not __package__:  # run as a script: python benchmarks/table.py
    sys.path[0] = os.path.dirname(sys.path[0])

import harness

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
ROWS = [  # script and flags, the pair of vs_torch
    ("ddp.py", "ddp"),
    ("zero.py --stage 2", "zero-2"),
    ("zero.py --stage 3", "zero-3"),
    ("tensor_parallel.py", "tensor"),
    ("sequence_parallel.py", "sequence"),
    ("pipeline.py --layers 8 --schedule 1f1b", "1f1b"),
    ("pipeline.py --layers 8 --schedule zb-v", "zb-v"),
    ("context_parallel.py", "context"),
    ("expert_parallel.py", None),
]


def receipt(command, ranks):
    """A script's receipt, as JSON has it. Raises Refused where the script fails: it has said
    why."""
    script, *flags = command.split()
    with tempfile.NamedTemporaryFile("r") as file:
        start = [
            "--device",
            "cpu",
            "--nproc",
            str(ranks),
            "--dtype",
            "float64",
            "--steps",
            "3",
            "--quiet",
            "--json",
            file.name,
        ]
        if subprocess.call([sys.executable, script, *flags, *start], cwd=ROOT):
            raise harness.Refused(f"{command} on {ranks} ranks did not end well: see above", code=1)
        return json.load(file)


def held(result):
    """Bytes of states and activations, without the weights that stage 3 gathers for a moment."""
    rows = result["held"].items()
    return sum(row["bytes"] for kind, row in rows if kind != "gathered_peak")


def beside(pair, turns):
    """(tokens/s, peak memory) of ours / theirs, as vs_torch prints them."""
    command = [
        sys.executable,
        "-m",
        "benchmarks.vs_torch",
        "--nproc",
        "2",
        "--device",
        "cpu",
        "--only",
        pair,
    ]
    done = subprocess.run(
        [*command, "--turns", str(turns)], cwd=ROOT, stdout=subprocess.PIPE, text=True
    )
    if done.returncode:
        raise harness.Refused(f"{pair} differs from PyTorch's own: {done.stdout}", code=1)
    return re.findall(r"\d+\.\d\d \([\d. ]+\)", done.stdout)


def main():
    p = harness.Parser(__doc__)
    p.add_argument(
        "--turns", type=harness.count(2), default=15, metavar="N", help="of each side of a pair"
    )
    args = p.parse_args()
    print(
        "| | sent a step | held, beside one process | error | tokens/s beside PyTorch's | memory "
        "|\n|---|---|---|---|---|---|"
    )
    for command, pair in ROWS:
        one, four = receipt(command, 1), receipt(command, 4)
        sent = sum(row["wire_bytes"] for row in four["sent"]) / 1e6
        speed, memory = beside(pair, args.turns) if pair else ("", "")
        figures = (
            f"{sent:.2f} MB | {held(four) / 1e6:.1f} of {held(one) / 1e6:.1f} MB, "
            f"{held(four) / held(one):.2f}"
        )
        print(
            f"| `{command}` | {figures} | {four['max_error']['grad']:.0e} | {speed} | {memory} |",
            flush=True,
        )


if __name__ == "__main__":
    harness.script(main)
