"""The time of a matrix product, as simulator/kernels.py has it, beside what others measured:
python -m benchmarks.products

products.csv: on an H100 OpenXLA's (xla/service/gpu/model/matmul_interpolator_data.h), short runs
whose power is no limit; on an A100 square ones (Azure/AI-benchmarking-guide, ND A100 v4), and those
of Llama 2 70B (Vidur, data/profiling/compute/a100). They chose a family's `full`, `start`, `side`
and KERNEL; none of them is a training run.
"""

import csv
import pathlib
from statistics import mean

import harness
from simulator import devices, kernels

TABLE = pathlib.Path(__file__).with_suffix(".csv")


def main():
    harness.Parser(__doc__).parse_args()
    rows = list(csv.DictReader(TABLE.read_text().splitlines()))
    for name in ("h100", "a100"):
        device, errors = devices.DEVICES[name], []
        # The power of a device limits products that last; those of the first table are short
        limit = kernels.family(device).full * device.flops if name == "h100" else None
        device = device._replace(matmul=limit)
        print(f"{name.upper()}: batch, rows, columns, inner: measured, estimated TFLOP/s")
        for row in rows:
            if row["device"] != name:
                continue
            batch, m, n, k = (int(row[key]) for key in ("batch", "rows", "columns", "inner"))
            measured = float(row["tflops"])
            seconds = kernels.product_seconds(device, m, n, k, batch)
            rate = 2 * batch * m * n * k / seconds / 1e12
            errors.append(rate / measured - 1)
            sizes = f"{batch} x {m:6} x {n:6} x {k:6}"
            print(f"  {sizes} {measured:8.1f} {rate:8.1f} {errors[-1]:+5.0%}")
        off = mean(abs(error) for error in errors)
        print(f"  {len(errors)} products, mean error {off:.1%}\n")


if __name__ == "__main__":
    harness.script(main)
