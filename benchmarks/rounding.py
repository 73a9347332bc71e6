"""What rounding does: how far runs are from one process that sums in another order.

    python -m benchmarks.rounding

Trains the same small GPT with train.py in several layouts and dtypes, and compares loss, gradient
norm, gradients and weights with one process after 1, 10 and 100 steps: the receipt's largest
relative differences. The first layout is one process too, with 4 micro-batches: what it shows is
the order of sums alone. proof/tolerance.py takes its tolerances from the column of 10 steps.
"""

import benchmarks
import harness

SMALL = "--layers 4 --heads 4 --width 64 --context 64 --batch 16 --lr 1e-3 --warmup 20 --sample 0"
SMALL += " --eval-every 0 --eval-batches 1 --quiet --device cpu"
DTYPES = {
    "float64": "--dtype float64",
    "float32": "--dtype float32",
    "bfloat16, float32 masters": "--dtype float32 --param-dtype bfloat16",
    "bfloat16": "--dtype bfloat16",
}
LAYOUTS = {
    "1 rank, 4 micro-batches": "--microbatches 4",
    "dp 4": "--dp 4",
    "tp 4": "--tp 4",
    "pp 2, cp 2": "--pp 2 --cp 2",
    "dp 2, tp 2, sp, zero 2": "--dp 2 --tp 2 --sp --zero 2",
}
KINDS = {"loss": "loss", "grad_norm": "norm", "grad": "gradients", "param": "weights"}


def differences(dtype, layout, steps):
    """{kind: largest relative difference} of one run. Exit code 1, out of tolerance, is a result
    too."""
    flags = f"{SMALL} {DTYPES[dtype]} {LAYOUTS[layout]} --steps {steps} --prove {steps}"
    return benchmarks.receipt(f"train.py {flags}", passing=(0, 1))["max_error"]


def main():
    parser = harness.Parser(__doc__)
    parser.add_argument("--steps", type=int, nargs="+", default=[1, 10, 100], help="steps of a run")
    parser.add_argument("--only", nargs="+", choices=list(DTYPES), help="some of the dtypes")
    args = parser.parse_args()
    for dtype in args.only or DTYPES:
        print(f"\n{dtype}\n")
        steps_of = [f"{kind}, {n}" for n in args.steps for kind in KINDS.values()]
        print(f"| layout | {' | '.join(steps_of)} |", flush=True)
        print("|---" * (1 + len(steps_of)) + "|")
        for layout in LAYOUTS:
            cells = []
            for n in args.steps:
                errors = differences(dtype, layout, n)
                cells += [f"{errors[kind]:.0e}" for kind in KINDS]
            print(f"| {layout} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    harness.script(main)
