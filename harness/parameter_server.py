"""The parameter server: rank 0 adds up the gradients, takes the step and sends the weights.

Li et al. 2014, Scaling distributed machine learning with the parameter server. The file needs torch
alone. Used with ddp.py's DDP, as `--sync server` does:

    sync = DDP(parameters, group, overlap=False, all_reduce=Push)
    for micro_batches, tokens in batches:
        sync.zero_grad()
        pull(parameters, group)               # rank 0's weights
        for x, y in micro_batches:
            loss = cross_entropy(model(x), y, reduction="sum") / tokens
            loss.backward()
        sync.finish()                         # rank 0 alone has the batch's gradient
        if dist.get_rank(group) == 0:
            optimizer.step()

Between steps the workers' weights are old: pull() before you use them.
"""

import torch
import torch.distributed as dist


class Push:
    """Stands in for an all-reduce: rank 0 gets the sum, the workers keep what they have. It is its
    own work handle: until wait() leave the gradients alone."""

    def __init__(self, gradients, group, async_op=True):
        self.gradients, self.group = gradients, group
        self.worker = dist.get_rank(group) > 0
        if self.worker:
            self.sending = dist.isend(gradients, group=group, group_dst=0)

    def wait(self):
        if self.worker:
            self.sending.wait()
            return
        received = torch.empty_like(self.gradients)
        for worker in range(1, dist.get_world_size(self.group)):
            dist.recv(received, group=self.group, group_src=worker)
            self.gradients += received


@torch.no_grad()
def pull(parameters, group):
    """Fill all parameters that need a gradient with rank 0's: one message for each dtype."""
    kinds = {}
    for p in parameters:
        if p.requires_grad:
            kinds.setdefault((p.dtype, p.device), []).append(p)
    for alike in kinds.values():
        weights = torch.cat([p.flatten() for p in alike])
        if dist.get_rank(group) == 0:
            workers = range(1, dist.get_world_size(group))
            works = [dist.isend(weights, group=group, group_dst=worker) for worker in workers]
            for work in works:
                work.wait()
        else:
            dist.recv(weights, group=group, group_src=0)
            for p, weight in zip(alike, weights.split([p.numel() for p in alike])):
                p.copy_(weight.view_as(p))
