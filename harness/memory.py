"""Sizes that certainly do not fit, refused before any memory is taken.

What is compared is a lower bound: weights and gradients once over all ranks, the tokens of a batch,
the ranks' processes, the model's Python objects. Whatever is less may run, and may still be too
much: how much a run really takes, --dry-run says.
"""

import contextlib
import os
import pathlib

import torch

from harness.flags import DTYPES, configure
from harness.presets import parameters_held
from harness.refusal import Refused

# Each the least that any run was seen to take, and less
BLOCK = 40_000  # bytes of a block's Python objects, on the meta device too: 69,000
RANK = 4_000_000  # bytes that a forked rank has for itself alone
TOKEN = 8  # bytes of a batch's token, an int64


def of_machine():
    """Bytes of memory that this machine has, or the container that this process is in."""
    machine = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    with contextlib.suppress(OSError, ValueError):  # no container, or one without a limit: "max"
        return min(machine, int(pathlib.Path("/sys/fs/cgroup/memory.max").read_text()))
    return machine


def check_fits(what, size, advice):
    """Refuse what takes more bytes than there are."""
    memory = of_machine()
    if size > memory:
        taken, there = (f"{bytes / 1e9:,.0f} GB" for bytes in (size, memory))
        raise Refused(f"{what} at least {taken}, and this machine has {there} of memory: {advice}")


def check_ranks(args, world, bytes_a_rank=0):
    """Refuse more ranks than this machine can have processes. Returns how many are here."""
    joined = "RANK" in os.environ and os.environ.get("WORLD_SIZE") != "1"
    local = int(os.environ.get("LOCAL_WORLD_SIZE", world)) if joined else world
    size = local * (RANK + bytes_a_rank)
    check_fits(f"{local:,} ranks take", size, "use fewer ranks, or less for each")
    return local


def check_layers(config):
    """Refuse more layers than Python has memory for, which not even a dry run can play."""
    what = f"{config.layers:,} layers, as objects alone, take"
    check_fits(what, config.layers * BLOCK, "use fewer --layers")


def check(args, world):
    """Refuse a model or a batch that this machine's memory can't hold."""
    config = configure(args)
    local = check_ranks(args, world)
    if local < world or (args.device != "cpu" and torch.cuda.device_count()):
        return  # how much is on this machine only the layout knows, and GPUs have their own memory
    names = (getattr(args, name, None) for name in ("dtype", "param_dtype", "reduce_dtype"))
    element = min(DTYPES[name].itemsize for name in names if name)
    parameters = parameters_held(config, 1, config.layers)
    advice = "make --layers, --width, --hidden, --vocab, --experts, --context or --batch smaller"
    if getattr(args, "only_sample", False):
        check_fits(f"{parameters:,} parameters take", parameters * element, advice)
        return
    batch = f"a batch of {args.batch:,} sequences of {config.context:,} tokens"
    size = 2 * parameters * element + args.batch * (config.context + 1) * TOKEN
    check_fits(f"{parameters:,} parameters, their gradients and {batch} take", size, advice)
