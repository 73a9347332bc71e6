"""The time of a matrix product, as simulator/kernels.py has it, beside what others measured:
python -m benchmarks.products

H100: OpenXLA's table for sm_90, bfloat16, a batch of up to 4, short runs whose power is no limit
(xla/service/gpu/model/matmul_interpolator_data.h). A100: square products of random numbers
(Azure/AI-benchmarking-guide, ND A100 v4, float16, 10,000 products before the measured ones), and
those of Llama 2 70B with 4,096 tokens (Vidur, arXiv:2405.05465, data/profiling/compute/a100).

These tables chose a family's `full`, `start`, `side` and KERNEL; none of them is a training run.
"""

import os
import sys
from statistics import mean

if not __package__:  # run as a script: python benchmarks/products.py
    sys.path[0] = os.path.dirname(sys.path[0])

import harness
from simulator import devices, kernels

# Batch, rows, columns, inner dimension, TFLOP/s
H100 = """
1 256 256 256 6.45
1 256 2048 2048 215.8
1 512 512 512 40.7
1 512 4096 512 236.3
1 512 4096 4096 644.1
1 1024 1024 1024 236.3
1 1024 1024 4096 470.1
1 1024 2048 4096 653.5
1 1024 4096 512 338.9
1 1024 4096 2048 634.2
1 2048 1024 4096 653.1
1 2048 2048 512 345.5
1 2048 2048 4096 738
1 2048 4096 256 299.3
1 2048 4096 2048 715.4
1 2048 4096 4096 753.6
1 4096 256 256 82.2
1 4096 256 4096 376.2
1 4096 1024 2048 632
1 4096 2048 1024 593.2
1 4096 2048 2048 716.1
1 4096 4096 1024 677.4
2 512 4096 2048 627.2
2 512 4096 4096 734.7
2 1024 512 1024 237.6
2 1024 1024 4096 649.6
2 1024 2048 4096 739
2 1024 4096 256 298.3
2 1024 4096 512 445.9
2 1024 4096 4096 747.7
2 2048 1024 1024 489
2 2048 2048 512 447
2 2048 4096 256 393.9
2 2048 4096 512 542.3
2 2048 4096 2048 729.1
2 2048 4096 4096 779.3
2 4096 1024 2048 713.4
2 4096 2048 2048 733.3
4 256 4096 4096 664
4 512 4096 512 442.2
4 1024 512 4096 642.2
4 1024 1024 4096 735.9
4 1024 2048 512 442.2
4 1024 2048 4096 743.6
4 1024 4096 256 391.3
4 1024 4096 2048 718.7
4 1024 4096 4096 773.5
4 2048 512 4096 730.4
4 2048 1024 256 300.9
4 2048 1024 1024 596.5
4 2048 1024 4096 745
4 2048 2048 256 394.8
4 2048 2048 4096 779.1
4 2048 4096 512 607.3
4 2048 4096 2048 752.5
4 4096 2048 1024 687.9
4 4096 4096 1024 725.5
"""
A100 = """
1 1024 1024 1024 119.4
1 2048 2048 2048 221.8
1 4096 4096 4096 228
1 8192 8192 8192 253.7
1 16384 16384 16384 256.5
1 1024 2145 1024 132.8
1 6144 12288 12288 250.8
1 4096 10240 8192 239.2
1 4096 8192 8192 231.3
1 4096 57344 8192 241.4
1 4096 8192 28672 238.7
"""


def main():
    harness.Parser(__doc__).parse_args()
    for name, table in (("h100", H100), ("a100", A100)):
        device, errors = devices.DEVICES[name], []
        # The power of a device limits products that last; those of the first table are short
        limit = kernels.family(device).full * device.flops if name == "h100" else None
        device = device._replace(matmul=limit)
        print(f"{name.upper()}: batch, rows, columns, inner: measured, estimated TFLOP/s")
        for line in table.split("\n")[1:-1]:
            batch, m, n, k, measured = (float(word) for word in line.split())
            seconds = kernels.product_seconds(device, int(m), int(n), int(k), int(batch))
            rate = 2 * batch * m * n * k / seconds / 1e12
            errors.append(rate / measured - 1)
            sizes = f"{batch:.0f} x {m:6.0f} x {n:6.0f} x {k:6.0f}"
            print(f"  {sizes} {measured:8.1f} {rate:8.1f} {errors[-1]:+5.0%}")
        off = mean(abs(error) for error in errors)
        print(f"  {len(errors)} products, mean error {off:.1%}\n")


if __name__ == "__main__":
    harness.script(main)
