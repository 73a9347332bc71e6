"""Where a rank's piece of a parameter lies in the whole. A technique that cuts a parameter, or
copies it to other ranks, writes

    parameter.placement = {
        "shape":   of the whole parameter
        "cuts":    {dimension: (group, start, size)}: this rank holds whole[start : start + size] of that dimension.
                   Its tensor may be longer: then zeros follow, as padding
        "copies":  groups whose ranks all hold the same piece
        "partial": groups over which the gradient is still a partial sum after backward
        "data":    the data-parallel group of this parameter, if it is not the one of the others (experts)
    }

Each entry may be missing. A technique that comes second extends what the first one wrote.
Initialisation, the gradient norm, checkpoints, exports and the proof read it here, and never ask
which technique it was.
"""

import torch.distributed as dist


def placement(parameter):
    """A parameter's placement, with the entries that are missing filled in."""
    default = {
        "shape": tuple(parameter.shape),
        "cuts": {},
        "copies": [],
        "partial": [],
        "data": None,
    }
    return default | getattr(parameter, "placement", {})


def take(full, parameter):
    """This rank's piece of a full tensor, padded with zeros to the parameter's shape."""
    for dim, (_, start, size) in placement(parameter)["cuts"].items():
        full = full.narrow(dim, start, size)
    if full.shape == parameter.shape:
        return full
    piece = full.new_zeros(parameter.shape)
    piece[tuple(slice(size) for size in full.shape)] = full
    return piece


def is_first(parameter, groups):
    """Whether this rank speaks for a parameter that other ranks hold as well: it is the first rank
    of each of `groups` that holds copies, and of each group over which the gradient was a partial
    sum."""
    where = placement(parameter)
    copied = [group for group in where["copies"] if group in groups] + where["partial"]
    return all(dist.get_rank(group) == 0 for group in copied)
