"""The optimizer, its learning rate, and the norm of the whole model's gradient."""

import math

import torch
import torch.distributed as dist

from harness.placement import is_first, placement


def learning_rate(step, args):
    """Linear warm-up to lr. Then lr, or if args has a min_lr, a cosine that ends there at the last
    step. min_lr None is a tenth of lr."""
    if step < args.warmup:
        return args.lr * (step + 1) / (args.warmup + 1)
    if not hasattr(args, "min_lr"):
        return args.lr
    min_lr = args.lr / 10 if args.min_lr is None else args.min_lr
    progress = (step - args.warmup) / max(1, args.steps - 1 - args.warmup)
    return min_lr + (args.lr - min_lr) * 0.5 * (1 + math.cos(math.pi * progress))


def make_optimizer(parameters, args):
    """AdamW or SGD, as args.optimizer says. Only matrices have weight decay."""
    parameters = [p for p in parameters if p.requires_grad]
    matrices = {"params": [p for p in parameters if p.dim() > 1], "weight_decay": args.weight_decay}
    vectors = {"params": [p for p in parameters if p.dim() <= 1], "weight_decay": 0.0}
    groups = [group for group in (matrices, vectors) if group["params"]]
    if args.optimizer == "sgd":
        return torch.optim.SGD(groups, lr=args.lr, fused=True)
    return torch.optim.AdamW(groups, lr=args.lr, betas=(0.9, 0.95), fused=True)


def grad_norm(parameters, groups=()):
    """The norm of the whole model's gradient: a float64 scalar, the same on all ranks. Shards are
    added up over the groups that cut them; of ranks with a whole parameter the first counts it.
    groups: those whose ranks have other layers."""
    parameters = list(parameters)
    device = parameters[0].device if parameters else None
    cuts = [tuple(group for group, _, _ in placement(p)["cuts"].values()) for p in parameters]
    copied_over = next(filter(None, cuts), ())
    shards = {}  # {the groups that are added up: gradients}
    for p, cut_over in zip(parameters, cuts):
        counted = shards.setdefault(cut_over or copied_over, [])
        if p.grad is not None and is_first(p, () if cut_over else copied_over, groups):
            counted.append(p.grad)
    total = torch.zeros((), dtype=torch.float64, device=device)
    for cut_over, counted in shards.items():
        counted = counted or [total.new_zeros(1)]
        dtype = torch.promote_types(counted[0].dtype, torch.float32)
        square = torch.stack(torch._foreach_norm(counted, dtype=dtype)).double().square().sum()
        sum_over(cut_over, square)
        total += square
    sum_over(groups, total)
    return total.sqrt()


def sum_over(groups, tensor):
    """All-reduce a tensor in place over each group."""
    for group in groups:
        all_reduce(tensor, group)


def all_reduce(tensor, group, async_op=False):
    """dist.all_reduce, but not in a group of one rank, for which nccl would hold a communicator."""
    if dist.get_world_size(group) > 1:
        return dist.all_reduce(tensor, group=group, async_op=async_op)


def clip(parameters, norm, limit):
    """Scale the gradients in place, so that their norm is at most `limit`. A limit of 0 is none."""
    grads = [p.grad for p in parameters if p.grad is not None]
    if limit > 0 and grads:
        scale = (limit / (norm + 1e-6)).clamp(max=1.0)
        torch._foreach_mul_(grads, scale.to(grads[0].dtype))
