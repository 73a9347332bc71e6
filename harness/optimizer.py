"""The optimizer, its learning rate, and the norm of a gradient whose parameters may be split over
ranks."""

import math

import torch
import torch.distributed as dist

from harness.placement import is_first


def learning_rate(step, args):
    """Linear warm-up, then (where args has a min_lr) a cosine down to it at the last step. min_lr
    None: a tenth of lr."""
    if step < args.warmup:
        return args.lr * (step + 1) / (args.warmup + 1)
    if not hasattr(args, "min_lr"):
        return args.lr
    low = args.lr / 10 if args.min_lr is None else args.min_lr
    progress = (step - args.warmup) / max(1, args.steps - 1 - args.warmup)
    return low + (args.lr - low) * 0.5 * (1 + math.cos(math.pi * progress))


def make_optimizer(parameters, args):
    """AdamW or SGD; weight decay on matrices only."""
    parameters = [p for p in parameters if p.requires_grad]
    matrices = {"params": [p for p in parameters if p.dim() > 1], "weight_decay": args.weight_decay}
    vectors = {"params": [p for p in parameters if p.dim() <= 1], "weight_decay": 0.0}
    groups = [group for group in (matrices, vectors) if group["params"]]
    if args.optimizer == "sgd":
        return torch.optim.SGD(groups, lr=args.lr)
    return torch.optim.AdamW(groups, lr=args.lr, betas=(0.9, 0.95), fused=True)


def grad_norm(parameters, groups=()):
    """The norm of the whole model's gradient, each element counted once: a float64 scalar, the same
    on all ranks.

    groups: those over which parameters are split, or dealt out whole. Of a parameter that all ranks
    of such a group hold, the group's first rank counts it (see placement.py).
    """
    parameters = [p for p in parameters if p.grad is not None]
    counted = [p.grad for p in parameters if is_first(p, groups)]
    total = torch.zeros(
        (), dtype=torch.float64, device=parameters[0].device if parameters else None
    )
    if counted:
        dtype = torch.promote_types(counted[0].dtype, torch.float32)
        total += torch.stack(torch._foreach_norm(counted, dtype=dtype)).double().square().sum()
    for group in groups:
        dist.all_reduce(total, group=group)
    return total.sqrt()


def clip(parameters, norm, limit):
    """Scale gradients in place so that their global norm is at most `limit` (0: leave them)."""
    if limit > 0:
        grads = [p.grad for p in parameters if p.grad is not None]
        torch._foreach_mul_(grads, (limit / (norm + 1e-6)).clamp(max=1.0).to(grads[0].dtype))
