"""Devices and their links, by data sheet. What of it they reach: kernels.py and links.py."""

import math
from typing import NamedTuple

from harness import Refused, short
from receipts import expert_parallel as experts


class Device(NamedTuple):
    memory: float  # bytes
    flops: float  # FLOP/s of dense bf16 products
    bandwidth: float  # bytes/s of its memory
    power: float = 1.0  # its limit, as a part of the module's own
    matmul: float | None = None  # FLOP/s that large products reach, where somebody measured it


# The makers' data sheets, SXM modules; a DGX B200 has 1,440 GB for its 8. h100-500w: those of
# Grand Teton, 96 GB at 2.4 TB/s, of whose 700 W TorchTitan's runs had 500 (benchmarks/published.py)
DEVICES = {
    "a100": Device(80e9, 312e12, 2.039e12),
    "h100": Device(80e9, 989e12, 3.35e12),
    "h100-500w": Device(96e9, 989e12, 2.4e12, 500 / 700),
    "h200": Device(141e9, 989e12, 4.8e12),
    "b200": Device(180e9, 2250e12, 8e12),
}


class Cluster(NamedTuple):
    device: Device
    node: int  # devices in a node
    intra: float  # bytes/s of a device's link inside its node, one way
    inter: float  # to other nodes


# What torch's allocator reserves of a device beside tensors, as a part of those that come and go in
# a step: blocks of one size that are free while another size is asked for. Chosen on the three
# published rows of memory (TorchTitan 8B, see benchmarks/published.py): their mean. The rows on 8
# and on 128 devices differ by 14 GiB of lasting states, and not in what is reserved beside them
RESERVED = 0.13
# What a plan leaves free: a row that is estimated by the mean of the other two has reserved at most
# 4.8% more than its estimate (docs/reference/estimates.md)
HEADROOM = 0.05
# What a device holds beside that. A communicator of nccl has a buffer of NCCL_BUFFSIZE = 4 MiB
# for each of up to 32 channels, to send and to receive (NVIDIA, NCCL's environment variables). A
# CUDA context with torch's kernels takes about half a gigabyte
COMMUNICATOR = 2 * 32 * 2**22
CONTEXT = 0.5e9


def beside_allocator(args):
    """Bytes that a device has taken in the layout of `args`, beside what torch's allocator has."""
    sizes = [args.tp, args.dp * args.cp, args.cp, args.pp, args.dp * args.cp * args.tp * args.pp]
    if args.pp > 1:
        sizes += [2] * 5  # the tied matrix's, and two links to each neighbour
    if args.cp_kind == "ring-ulysses":
        sizes += [args.cp] * 2
    if args.ep > 1:
        sizes += [args.ep, experts.ranks_of(args) // args.ep]
    if args.zero_ranks:
        sizes += [args.zero_ranks, args.dp * args.cp // args.zero_ranks]
    return CONTEXT + sum(size > 1 for size in sizes) * COMMUNICATOR


def cluster_of(args):
    """The Cluster that the flags describe."""
    name = args.gpu or "h100"
    try:
        device = DEVICES.get(name.lower()) or described(name)
    except ValueError:
        hint = "NAME=80GB,989TFLOP/s,3.35TB/s: memory, dense bf16 rate, memory bandwidth"
        what = f"--gpu {short(name)} is not known: choose one of {', '.join(DEVICES)}"
        raise Refused(f"{what}, or {hint}, and perhaps a limit of its power, as ,70%") from None
    if args.matmul and args.matmul > device.flops:
        more = f"--matmul {args.matmul / 1e12:g}TFLOP/s is more than the device can do"
        most = f"at most {device.flops / 1e12:g}TFLOP/s"
        raise Refused(f"{more}: give what 16-bit products reach, {most}, or another --gpu")
    device = device._replace(matmul=args.matmul)
    # A usual node of A100s: NVLink 3, and a link of 200 Gbit/s for each (NVIDIA, DGX A100)
    links = (300e9, 25e9) if device.flops < 400e12 else (450e9, 50e9)
    return Cluster(device, args.nodes_of or 8, args.intra or links[0], args.inter or links[1])


def described(text):
    """The Device of NAME=80GB,989TFLOP/s,3.35TB/s, perhaps with ,70%. Raises ValueError."""
    figures = text.partition("=")[2].upper().replace("/S", "").split(",")
    units = [("GB", 1e9), ("TFLOP", 1e12), ("TB", 1e12), ("%", 0.01)]
    if len(figures) < len(units):
        figures.append("100%")
    sizes = []
    for figure, (unit, size) in zip(figures, units, strict=True):
        sizes.append(float(figure.removesuffix(unit)) * size)
    device = Device(*sizes)
    if not all(0 < size < math.inf for size in sizes) or device.power > 1:
        raise ValueError("a device has some of each, and a limit is a part of the whole")
    return device
