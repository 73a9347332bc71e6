"""Which gradient was the first that is not finite."""

import torch
import torch.distributed as dist

import model as gpt


def first_that_is_not(run, named, blame, group):
    """(the rank that has it, and what it may say), in the order of backward: see Run.check."""
    name, place = blame() if blame else (last_in(named()), "")
    # Backward runs from the last parameter to the first: the largest number comes first
    numbers = torch.full((run.world,), -2, device=run.device)
    numbers[run.rank] = -1
    if name:
        with torch.device("meta"):
            whole = gpt.GPT(run.config)
        order = [full for full, _ in whole.named_parameters(remove_duplicate=False)]
        numbers[run.rank] = order.index(name)
    dist.all_reduce(numbers, op=dist.ReduceOp.MAX, group=group)
    speaker = (numbers == numbers.max()).nonzero()[0].item()
    if numbers.max() < 0:
        return speaker, "computed again, it was finite on all ranks"
    where = f"on rank {run.rank}{place}"
    return speaker, f"the first gradient that is not finite is that of {name}, {where}"


def last_in(named):
    """The name of the last parameter with a gradient that is not finite, or None."""
    last = None
    for name, p in named:
        if p.grad is not None and not p.grad.isfinite().all():
            last = name
    return last
