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
Nothing that reads a placement asks which technique wrote it.
"""

import torch.distributed as dist


def placement(parameter):
    """A parameter's placement, with defaults for the missing entries."""
    whole = {"shape": tuple(parameter.shape), "cuts": {}, "partial": [], "data": None}
    return whole | getattr(parameter, "placement", {})


def take(whole, parameter):
    """This rank's piece of a whole tensor, padded with zeros to the parameter's shape."""
    piece = whole
    for dim, (_, start, size) in placement(parameter)["cuts"].items():
        piece = piece.narrow(dim, start, size)
    if piece.shape == parameter.shape:
        return piece
    padded = piece.new_zeros(parameter.shape)
    padded[tuple(slice(size) for size in piece.shape)] = piece
    return padded


def is_first(parameter, copied_over, added_over):
    """Whether this rank counts a parameter that other ranks hold as well: whether it is the first
    of each group in copied_over, and of each part of an `added_over` that made partial sums."""
    groups = [*copied_over]
    for partial in placement(parameter)["partial"]:
        ranks = set(dist.get_process_group_ranks(partial))
        if any(ranks.issubset(dist.get_process_group_ranks(group)) for group in added_over):
            groups.append(partial)
    return all(dist.get_rank(group) == 0 for group in groups)
