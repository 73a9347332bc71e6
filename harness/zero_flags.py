"""The flags of ZeRO, the options that they mean, and the groups of ranks that split a copy."""

import torch
import torch.distributed as dist

from harness import initialize
from harness.flags import DTYPE, DTYPES, MEGABYTES, count
from harness.optimizer import reduce_scatter
from harness.refusal import Refused


def add_flags(group, bucket_mb, ranks_flag=None):
    """bucket_mb: the default of --bucket-mb; None: no such flag. ranks_flag: what the script calls
    the size of a group that splits a copy."""
    if ranks_flag is not None:
        why = "ZeRO within groups of N ranks, such as a node, and copies across them (HSDP)"
        group.add_argument(ranks_flag, type=count(2), metavar="N", help=why)
    if bucket_mb is not None:
        why = "of a bucket: large ones send faster, small ones start earlier (FSDP, Muon: none)"
        group.add_argument("--bucket-mb", **MEGABYTES, default=bucket_mb, help=why)
    why = "ZeRO 2, 3: reduce gradients once a step, not each micro-batch: sends less, holds more"
    group.add_argument("--reduce-once", action="store_true", help=why)
    why = "ZeRO 3: keep weights from forward until backward: sends a third less, holds all of them"
    group.add_argument("--keep-gathered", action="store_true", help=why)
    why = "type of weights, gradients and activations; the optimizer's weights stay in --dtype"
    group.add_argument("--param-dtype", **DTYPE, help=f"{why} (default: --dtype)")
    why = "type in which gradients are summed over ranks and micro-batches (default: --param-dtype)"
    group.add_argument("--reduce-dtype", **DTYPE, help=why)


def check_ranks(flag, size, ranks, where, stage):
    """Refuse groups of `size` (or None) of the data-parallel ranks that do not exist. where: what
    the ranks are, in words."""
    if size and stage == 0:
        raise Refused(f"{flag} means nothing in stage 0, which splits nothing: leave it out")
    if size and ranks % size:
        raise Refused(f"{flag} {size} does not divide {where}: give a divisor, or leave it out")


def check_types(args):
    """Refuse an optimizer that keeps weights with fewer digits than those that it is to update."""
    names = args.param_dtype or args.dtype, args.dtype
    trained, updated = (torch.finfo(DTYPES[name]).eps for name in names)
    if trained < updated:
        problem = f"is finer than --dtype {args.dtype}, of the optimizer's own weights"
        raise Refused(f"--param-dtype {args.param_dtype} {problem}: give a finer --dtype")


def split_ranks(ranks, size, copies=None):
    """Deal rows of data-parallel ranks out to groups of `size` neighbours: {name: rows of ranks}.

    inside, across    a row of the first splits a copy, one of the second holds the same shards
    copies inside, copies across    the same for `copies`, rows of ranks with the same experts.
                      Where `size` neighbours have no two of them, a copy is whole"""
    inside = ranks.unflatten(-1, (-1, size))
    rows = {"inside": inside, "across": inside.transpose(-1, -2)}
    if copies is not None:
        inside = copies.unflatten(-1, (-1, max(size * copies.shape[-1] // ranks.shape[-1], 1)))
        rows |= {"copies inside": inside, "copies across": inside.transpose(-1, -2)}
    return rows


def data_group(groups, name):
    """groups[name], "dp" or "copies". With --zero-ranks the pair that zero.py takes in its place:
    (the ranks that split a copy, those with the same shard of other copies)."""
    prefix = "" if name == "dp" else f"{name} "
    if f"{prefix}inside" not in groups:
        return groups[name]
    inside, across = groups[f"{prefix}inside"], groups[f"{prefix}across"]
    return (inside, across) if dist.get_world_size(across) > 1 else inside


def options(run, model, stage, draw=initialize.draw):
    """The options of ZeRO(...) that the flags mean. draw: as of Run.initial."""
    args = run.args
    chosen = {
        "value": run.initial(model, draw),
        "param_dtype": DTYPES.get(args.param_dtype) if args.param_dtype != args.dtype else None,
        "reduce_dtype": DTYPES.get(args.reduce_dtype),
        "reduce_scatter": reduce_scatter,
        "reduce_each": not args.reduce_once,
    }
    if stage == 3:
        return chosen | {"reshard": not args.keep_gathered}
    return chosen | {"bucket_bytes": int(args.bucket_mb * 2**20)}
