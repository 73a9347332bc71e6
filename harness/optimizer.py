"""The optimizer, its learning rate, and the norm of the whole model's gradient."""

import math

import torch
import torch.distributed as dist

from harness.placement import count, is_within, placement_of

# torch 2.13 renamed it
reduce_scatter_tensor = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


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
    """The norm of the whole model's gradient: a float64 scalar, the same on all ranks. A rank
    divides the square of its part by the number of ranks that have the same one; all add up.
    groups: those whose ranks have other layers."""
    parameters = list(parameters)
    cuts = [[group for group, _, _ in placement_of(p)["cuts"].values()] for p in parameters]
    grid = max(cuts, key=count, default=[])  # over which each parameter is cut, or copied
    gradients = {}  # {number of ranks with the same part: gradients}
    for p, cut_over in zip(parameters, cuts):
        if p.grad is not None:
            # A tied matrix is on two ranks of a group
            twice = [g for g in placement_of(p)["partial"] if any(is_within(g, o) for o in groups)]
            copies = count(grid) / count(cut_over) * count(twice)
            gradients.setdefault(copies, []).append(p.grad)
    device = parameters[0].device if parameters else None
    total = torch.zeros((), dtype=torch.float64, device=device)
    for copies, equal in gradients.items():
        norms = torch.stack(torch._foreach_norm(equal, dtype=torch.float64))
        total += norms.square().sum() / copies
    sum_over([*grid, *groups], total)
    return total.sqrt()


def sum_over(groups, tensor):
    """All-reduce a tensor in place over each group."""
    for group in groups:
        all_reduce(tensor, group)


def all_reduce(tensor, group, async_op=False):
    """dist.all_reduce, but not in a group of one rank, for which nccl would hold a communicator."""
    if dist.get_world_size(group) > 1:
        return dist.all_reduce(tensor, group=group, async_op=async_op)


class GlooReduceScatter:
    """An asynchronous reduce-scatter of all-to-alls, because gloo's own sends as many bytes as an
    all-reduce. Each rank gets the shards that are for it, and wait() adds them up."""

    def __init__(self, shard, full, group):
        self.shard, self.received = shard, torch.empty_like(full)
        self.work = dist.all_to_all_single(self.received, full, group=group, async_op=True)

    def wait(self):
        self.work.wait()
        torch.sum(self.received.view(-1, *self.shard.shape), 0, out=self.shard)


def reduce_scatter(shard, full, group):
    """For zero.py and tensor_overlap.py: starts to sum `full` over the group, of which a rank gets
    its shard. The rest of `full` is of no use afterwards."""
    if dist.get_backend(group) == "gloo":
        return GlooReduceScatter(shard, full, group)
    return reduce_scatter_tensor(shard, full, group=group, async_op=True)


def clip(parameters, norm, limit):
    """Scale the gradients in place, so that their norm is at most `limit`. A limit of 0 is none."""
    grads = [p.grad for p in parameters if p.grad is not None]
    if limit > 0 and grads:
        scale = (limit / (norm + 1e-6)).clamp(max=1.0)
        torch._foreach_mul_(grads, scale.to(grads[0].dtype))
