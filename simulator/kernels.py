"""How long a device takes for an operation, by what the operation is.

A constant is a public measurement, cited beside it. None is fitted to a run of
benchmarks/published.py. The device's own rates are those of its data sheet.

    matrix product    the longest of: its FLOPs at the rate that large products reach, which is
                      limited by power; its tiles in waves over the device's processors; its bytes
    attention         its FLOPs at the rate of a kernel: FlashAttention 1, 2 or 3, forward or
                      backward, by sequence length and head; or plain: two products and the scores'
                      bytes
    all else          bytes read and written; fused, only those that come from before and stay
"""

import bisect
import functools
import math
from typing import NamedTuple


class Family(NamedTuple):
    """What devices of a generation have in common.

    peak         FLOP/s of dense 16-bit products by data sheet
    large        the part of it that large products reach, on the shapes of language models
    full         the part of it while a wave of tiles runs and power is no limit
    start        a tile's start and end take as long as so many elements of the inner dimension
    side         tiles of which rows x columns / (rows + columns) is less wait for their loads
    copy         the part of the memory's bandwidth that copies and sums of tensors reach
    processors   streaming multiprocessors
    attention    the kernel that torch and others take for it
    forward, backward    FLOP/s of FlashAttention 2 in its plateau, heads of 128, not causal"""

    peak: float
    large: float
    full: float
    start: int
    side: int
    copy: float
    processors: int
    attention: str
    forward: float
    backward: float


# A100, large: the four products of a block of Llama 2 70B with 4,096 tokens, 239.5 TFLOP/s together
# (Vidur, arXiv:2405.05465, data/profiling/compute/a100). Square ones of 8,192 random numbers reach
# 254 (Azure/AI-benchmarking-guide) and 258 (H. He, "Strangely, Matrix Multiplications on GPUs Run
# Faster When Given Predictable Data!"). full: 295, on zeros (H. He). start and side: chosen on the
# table of 11 products of these two sources, mean error 5%.
# H100, large: 720 on the shapes of language models (SemiAnalysis, "MI300X vs H100 vs H200 Benchmark
# Part 1: Training"). full, start, side: chosen on 57 products in OpenXLA's table for sm_90, from
# 256 to 4,096 each way, mean error 4% (xla/service/gpu/model/matmul_interpolator_data.h). B200,
# large: 1,672 (arXiv:2604.23466, table IV); the rest of it as an H100.
# copy: between BabelStream's copy and triad, 1.61 and 1.70 of 2.039 TB/s, 2.90 and 2.97 of 3.35
# (Azure/AI-benchmarking-guide). FlashAttention 2: at most 230 TFLOP/s forward, 63% of the peak
# backward on an A100 (arXiv:2307.08691, section 4.1); 370 and 322 on an H100 (arXiv:2407.08608,
# figures 5 and 6)
FAMILIES = {
    "a100": Family(
        312e12, 239.5 / 312, 295 / 312, 80, 64, 0.81, 108, "flash2", 230e12, 0.63 * 312e12
    ),
    "h100": Family(989e12, 720 / 989, 860 / 989, 160, 80, 0.876, 132, "flash2", 370e12, 322e12),
    "b200": Family(2250e12, 1672 / 2250, 860 / 989, 160, 80, 0.876, 148, "flash2", 370e12, 322e12),
}

# Output tiles of cuBLAS (NVIDIA, "Matrix Multiplication Background User's Guide", table 1)
TILES = ((256, 128), (128, 256), (128, 128), (256, 64), (64, 256), (64, 128), (64, 64))
# Seconds of a product's kernel before its first tile and after its last, from the same tables
KERNEL = 5e-6
# A limit of the power to a part p of the module's leaves p to this power of what large products
# reach: an H100 NVL of 400 W has 62.6% of 835 TFLOP/s at 8192 (TF32, doubled), where 700 W have 720
POWER = 0.57

# FlashAttention on an H100, TFLOP/s by length of the sequence, of 16,384 tokens and 2,048 channels
# (arXiv:2407.08608, figures 5 and 6). {(kernel, head, causal): forward}, {(kernel, head): backward}
LENGTHS = (512, 1024, 2048, 4096, 8192, 16384)
FORWARD = {
    ("flash2", 64, False): (282, 306, 318, 321, 322, 324),
    ("flash3", 64, False): (333, 392, 460, 476, 496, 497),
    ("flash2", 128, False): (309, 350, 362, 368, 370, 370),
    ("flash3", 128, False): (467, 565, 625, 638, 646, 648),
    ("flash2", 128, True): (191, 260, 298, 319, 333, 335),
    ("flash3", 128, True): (292, 423, 521, 579, 602, 616),
}
BACKWARD = {
    ("flash2", 64): (198, 238, 264, 279, 287, 291),
    ("flash3", 64): (272, 363, 422, 453, 472, 474),
    ("flash2", 128): (214, 260, 291, 310, 318, 322),
    ("flash3", 128): (316, 424, 501, 542, 559, 561),
}
# FlashAttention 1 reaches 30 to 50% of an A100's peak forward and 25 to 35% backward
# (arXiv:2307.08691, section 1): the middle
FLASH1 = {False: 0.40, True: 0.30}
# Passes of plain attention over the scores, in their bytes. Forward: the product writes them,
# scale, mask and softmax read and write, the product with the values reads. Backward: two products
# write and read the gradient, the softmax's reads both and writes
PLAIN = {False: 4, True: 7}
# With dropout, one more kernel each way: it reads and writes them, and a mask of a byte
DROPPED = 2.5


def family(device):
    """The Family of a device: by its peak, the nearest."""
    return min(FAMILIES.values(), key=lambda f: abs(math.log(f.peak / device.flops)))


def moving_seconds(device, size):
    """Of reading and writing so many bytes of the device's memory."""
    return size / (device.bandwidth * family(device).copy)


@functools.lru_cache(maxsize=None)
def product_seconds(device, m, n, k, batch=1, itemsize=2):
    """A product (m, k) x (k, n), or a batch of them. 32-bit factors are TF32, at half the rate."""
    kind = family(device)
    peak = device.flops * 2 / max(itemsize, 2)
    flops = 2 * batch * m * n * k
    moved = batch * (m * k + k * n + m * n) * itemsize
    large = peak * kind.large * device.power**POWER
    if device.matmul:
        large = device.matmul * 2 / max(itemsize, 2)
    least = max(flops / large, moving_seconds(device, moved))
    waves = min(wave_seconds(kind, m, n, k, batch, tile) for tile in TILES)
    return max(least, KERNEL + waves * kind.peak / peak)


def wave_seconds(kind, m, n, k, batch, tile):
    """The product in whole waves of tiles. A product with few tiles is cut along k too."""
    rows, columns = tile
    tiles = batch * -(-m // rows) * -(-n // columns)
    cuts = max(1, min(kind.processors // tiles, k // 512))
    waves = -(-tiles * cuts // kind.processors)
    # A processor loads (rows + columns) numbers for rows x columns products: small tiles wait
    speed = kind.full * min(1.0, rows * columns / (rows + columns) / kind.side)
    flops = 2 * rows * columns * (k / cuts + kind.start)
    return waves * flops / (kind.peak / kind.processors * speed)


def attention_seconds(
    device, kernel, shape, keys, causal, backward=False, itemsize=2, dropout=False
):
    """Attention of queries (B, H, n, D) = shape with so many keys each; half of them if causal.
    dropout: of plain attention's scores."""
    batch, heads, length, head = shape
    kind = family(device)
    products = 5 if backward else 2
    if kernel == "plain":
        scores = batch * heads * length * keys
        products = 4 if backward else 2
        one = product_seconds(device, length, keys, head, batch * heads, itemsize)
        passes = PLAIN[backward] + DROPPED * dropout
        return products * one + moving_seconds(device, passes * scores * itemsize)
    flops = products * 2 * batch * heads * length * keys * head / (2 if causal else 1)
    if kernel == "flash1":
        rate, measured_on = FLASH1[backward] * FAMILIES["a100"].peak, FAMILIES["a100"]
    else:
        rate = flash_rate(kernel, keys, head, causal, backward)
        measured_on = FAMILIES["h100"]
    # Other devices: in proportion to FlashAttention 2's plateaus
    rate *= kind.backward / measured_on.backward if backward else kind.forward / measured_on.forward
    return flops / (rate * device.flops / kind.peak * 2 / max(itemsize, 2))


def flash_rate(kernel, length, head, causal, backward):
    """FLOP/s on an H100. Causal kernels that are not in the tables are slower than others as they
    are forward, with heads of 128."""
    head = 64 if head <= 64 else 128

    def at(*table):
        return between(LENGTHS, FORWARD[table], length)

    if not backward and (kernel, head, causal) in FORWARD:
        return 1e12 * at(kernel, head, causal)
    rate = between(LENGTHS, BACKWARD[kernel, head], length) if backward else at(kernel, head, False)
    if causal:
        rate *= at(kernel, 128, True) / at(kernel, 128, False)
    return 1e12 * rate


def between(xs, ys, x):
    """ys at x, straight lines between the xs in their logarithm; at the ends the last value."""
    i = bisect.bisect_left(xs, x)
    if i == 0 or i == len(xs):
        return ys[min(i, len(xs) - 1)]
    share = math.log(x / xs[i - 1]) / math.log(xs[i] / xs[i - 1])
    return ys[i - 1] + share * (ys[i] - ys[i - 1])
