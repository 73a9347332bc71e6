"""The optimizer, its learning rate, and the norm of a gradient whose parameters may be split over ranks."""

import math

import torch
import torch.distributed as dist


def learning_rate(step, args):
    """Linear warm-up, then (where args.min_lr is given) a cosine down to it at the last step."""
    if step < args.warmup:
        return args.lr * (step + 1) / (args.warmup + 1)
    low = getattr(args, "min_lr", None)
    if low is None:
        return args.lr
    progress = (step - args.warmup) / max(1, args.steps - 1 - args.warmup)
    return low + (args.lr - low) * 0.5 * (1 + math.cos(math.pi * progress))


def make_optimizer(parameters, args):
    """AdamW or SGD; weight decay on matrices only."""
    parameters = [p for p in parameters if p.requires_grad]
    matrices, vectors = [p for p in parameters if p.dim() > 1], [p for p in parameters if p.dim() <= 1]
    groups = [{"params": ps, "weight_decay": decay} for ps, decay in ((matrices, args.weight_decay), (vectors, 0.0)) if ps]
    if args.optimizer == "sgd":
        return torch.optim.SGD(groups, lr=args.lr)
    return torch.optim.AdamW(groups, lr=args.lr, betas=(0.9, 0.95), fused=True)


def grad_norm(parameters, split=(), dealt=()):
    """The norm of the whole model's gradient, each element counted once; a float64 scalar tensor.

    split: groups over which parameters may be split (tensor parallel); one that is not is whole on every rank, and counts
    on the first. dealt: groups over which whole parameters are dealt out (pipeline). A parameter whose gradient was summed
    over a group (a tied matrix on two stages) counts on that group's first rank.
    """
    total = torch.zeros((), dtype=torch.float64)
    mine = []
    for p in parameters:
        if p.grad is not None:
            total = total.to(p.grad.device)
            placement = getattr(p, "placement", {"split": {}, "partial": []})
            copies = [g for g in split if g not in placement["split"].values()] + placement["partial"]
            if all(dist.get_rank(g) == 0 for g in copies):
                mine.append(p.grad)
    if mine:
        dtype = torch.promote_types(mine[0].dtype, torch.float32)
        total += torch.stack(torch._foreach_norm(mine, dtype=dtype)).double().square().sum()
    for group in (*split, *dealt):
        dist.all_reduce(total, group=group)
    return total.sqrt()


def clip(parameters, norm, limit):
    """Scale gradients in place so that their global norm is at most `limit` (0: leave them)."""
    if limit > 0:
        grads = [p.grad for p in parameters if p.grad is not None]
        torch._foreach_mul_(grads, (limit / (norm + 1e-6)).clamp(max=1.0).to(grads[0].dtype))
