"""Sizes that certainly do not fit, refused before any memory is taken.

What is compared is a lower bound: weights and gradients once over all ranks, the tokens of a batch,
the ranks' processes, the model's Python objects. Whatever is less may run, and may still be too
much: how much a run really takes, --dry-run says.
"""

import os

import torch

from harness.flags import DTYPES, configure
from harness.presets import parameters_held
from harness.refusal import Refused

# Each the least that any run was seen to take, and less
BLOCK = 40_000  # bytes of a block's Python objects, on the meta device too: 69,000
RANK = 4_000_000  # bytes that a forked rank has for itself alone
TOKEN = 8  # bytes of a batch's token, an int64
LARGEST_TENSOR = 2**63  # bytes: torch counts them so
LARGEST_GPU = 2**40  # bytes, beyond any that is made


def of_machine():
    """Bytes of memory that the processes of this machine can have, swap included."""
    try:
        with open("/proc/meminfo") as file:
            lines = dict(line.split(":", 1) for line in file)
        ram, swap = (1024 * int(lines[key].split()[0]) for key in ("MemTotal", "SwapTotal"))
    except (OSError, KeyError, ValueError):  # another system than Linux, which compresses too
        ram, swap = 16 * os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"), 0
    for path in ("memory.max", "memory/memory.limit_in_bytes"):  # a container's, cgroup 2 and 1
        try:
            with open(f"/sys/fs/cgroup/{path}") as file:
                ram = min(ram, int(file.read()))
        except (OSError, ValueError):  # none, or "max"
            pass
    return ram + swap


def check_fits(what, size, memory, advice):
    """Refuse what takes more bytes than there are."""
    if size > memory:
        raise Refused(
            f"{what} at least {shown(size)}, and this machine has {shown(memory)} of memory: "
            f"{advice}"
        )


def check_ranks(args, world, bytes_a_rank=0):
    """Refuse more ranks than this machine can have processes. Returns how many are here, and the
    memory that is left for what they do."""
    joined = "RANK" in os.environ and os.environ.get("WORLD_SIZE") != "1"
    local = int(os.environ.get("LOCAL_WORLD_SIZE", world)) if joined else world
    memory = of_machine()
    advice = "use fewer ranks, or less for each"
    check_fits(f"{local:,} ranks take", local * (RANK + bytes_a_rank), memory, advice)
    return local, memory - local * RANK


def check(args, world, copies=1):
    """Refuse a model or a batch that this machine's memory can't hold. copies: how many times the
    ranks together hold the weights, at least."""
    config = configure(args)
    check_sizes(args, config)
    local, memory = check_ranks(args, world)
    if local < world:  # how much of the model is on this machine, only the layout knows
        return
    memory += RANK * local  # the ranks' own part counts below
    if args.device != "cpu":
        memory += LARGEST_GPU * torch.cuda.device_count()
    names = (getattr(args, name, None) for name in ("dtype", "param_dtype", "reduce_dtype"))
    element = min(DTYPES[name].itemsize for name in names if name)
    parameters = parameters_held(config, 1, config.layers)
    weights, kinds = copies * parameters * element, "weights"
    trains = not (getattr(args, "only_sample", False) or getattr(args, "prefill", None))
    if trains:
        weights, kinds = 2 * weights, "weights and gradients"
    what = f"{kinds} of {parameters:,} parameters take"
    advice = "make --layers, --width, --hidden, --vocab, --context or --experts smaller"
    check_fits(what, weights, memory, advice)
    if trains:
        tokens = args.batch * (config.context + 1) * TOKEN
        what = f"{kinds} and a batch of {args.batch:,} sequences of {config.context:,} tokens take"
        check_fits(what, weights + tokens, memory, "make --batch or --context smaller")


def check_sizes(args, config):
    """Refuse what not even a dry run can play: more layers than Python has memory for, and tensors
    whose bytes can't be counted."""
    what = f"{config.layers:,} layers, as objects alone, take"
    check_fits(what, config.layers * BLOCK, of_machine(), "use fewer --layers")
    parameters = parameters_held(config, 1, config.layers)
    widest = max(3 * config.width, config.hidden, config.vocab)
    tokens = args.batch * (config.context + 1)
    if max(parameters, tokens * widest) * TOKEN >= LARGEST_TENSOR:
        raise Refused(
            f"{parameters:,} parameters and a batch of {tokens:,} tokens are more than tensors can "
            "count: make the sizes smaller"
        )


def shown(size):
    """Bytes with a unit."""
    for unit in ("KB", "MB", "GB", "TB", "PB"):
        size /= 1000
        if size < 1000:
            break
    return f"{size:,.3g} {unit}" if size < 1e6 else f"{float(size):.1e} {unit}"
