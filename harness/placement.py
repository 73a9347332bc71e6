"""A parameter's placement says which piece of the whole parameter this rank holds.

A technique that cuts a parameter, or copies it to other ranks, writes

    parameter.placement = {
        "shape":   shape of the whole parameter
        "cuts":    {dimension: (group, start, size)}
                   This rank holds whole[start : start + size] of the dimension. Its tensor may be
                   longer: then zeros follow, as padding
        "partial": groups over which the gradient is still a partial sum after backward
        "data":    the data-parallel group of this parameter, if it has its own (experts)
    }

Each entry may be missing. A second technique extends the placement that the first one wrote.
"""

import math

import torch.distributed as dist


def placement_of(parameter):
    """A parameter's placement, with defaults for the missing entries."""
    whole = {"shape": tuple(parameter.shape), "cuts": {}, "partial": [], "data": None}
    return whole | getattr(parameter, "placement", {})


def take(whole, parameter):
    """This rank's piece of a whole tensor, padded with zeros to the parameter's shape."""
    piece = whole
    for dim, (_, start, size) in placement_of(parameter)["cuts"].items():
        piece = piece.narrow(dim, start, size)
    if piece.shape == parameter.shape:
        return piece
    padded = piece.new_zeros(parameter.shape)
    padded[tuple(slice(size) for size in piece.shape)] = piece
    return padded


def count(groups):
    """The number of ranks in a grid of groups."""
    return math.prod(dist.get_world_size(group) for group in groups)


def is_within(inner, outer):
    """Whether all ranks of a group are in another one."""
    ranks = dist.get_process_group_ranks
    return set(ranks(inner)).issubset(ranks(outer))
