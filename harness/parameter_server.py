"""Parameter servers: they add up the gradients, take the step and send the weights.

Li et al. 2014, Scaling distributed machine learning with the parameter server. The file needs torch
alone. Used with ddp.py's DDP, as `--sync server` does:

    servers = Servers(2, group)                   # ranks 0 and 1, which are workers too
    sync = DDP(parameters, group, overlap=False, all_reduce=servers.push)
    servers.deal(sync.buckets)                    # each server gets buckets of its own
    for micro_batches, tokens in batches:
        sync.zero_grad()
        servers.pull()                            # each server's weights, to all
        for x, y in micro_batches:
            loss = cross_entropy(model(x), y, reduction="sum") / tokens
            loss.backward()
        sync.finish()                             # a server has the batch's gradient of its share
        servers.step(optimizer)

With N ranks, S servers and P parameters of e bytes, a worker sends its gradients, P e bytes a step,
and gets as many of weights. A server gets and sends (N-1) P e / S. With one server that grows with
N, and all wait for it.

Between steps the workers' weights are old: pull() before you use them.
"""

import torch
import torch.distributed as dist


class Push:
    """Stands in for an all-reduce: the server gets the sum, the workers keep what they have. It is
    its own work handle: until wait() leave the gradients alone.

    at_once=False sends in wait(), for ranks that are servers too: on NCCL two ranks that both send
    first, each to the other, would wait for ever."""

    def __init__(self, gradients, group, async_op=True, server=0, at_once=True):
        self.gradients, self.group, self.server = gradients, group, server
        self.worker = dist.get_rank(group) != server
        self.sending = None
        if self.worker and at_once:
            self.sending = self.send()

    def send(self):
        return dist.isend(self.gradients, group=self.group, group_dst=self.server)

    def wait(self):
        if self.worker:
            (self.sending or self.send()).wait()
            return
        received = torch.empty_like(self.gradients)
        for worker in range(dist.get_world_size(self.group)):
            if worker != self.server:
                dist.recv(received, group=self.group, group_src=worker)
                self.gradients += received


def pull(parameters, group):
    """Fill all parameters that need a gradient with rank 0's, the only server's."""
    pull_shares([parameters], group)


@torch.no_grad()
def pull_shares(shares, group):
    """Fill the parameters in shares[i] with rank i's: one message for each dtype, to each other
    rank. All are sent at a time."""
    rank, ranks = dist.get_rank(group), range(dist.get_world_size(group))
    messages, arriving = [], []
    for server, parameters in enumerate(shares):
        for alike in by_kind(parameters):
            weights = torch.cat([p.flatten() for p in alike])
            if rank != server:
                messages.append(dist.P2POp(dist.irecv, weights, group=group, group_peer=server))
                arriving.append((alike, weights))
                continue
            for worker in ranks:
                if worker != server:
                    messages.append(dist.P2POp(dist.isend, weights, group=group, group_peer=worker))
    for work in dist.batch_isend_irecv(messages) if messages else []:
        work.wait()
    for alike, weights in arriving:
        for p, weight in zip(alike, weights.split([p.numel() for p in alike])):
            p.copy_(weight.view_as(p))


def by_kind(parameters):
    """Lists of the parameters that need a gradient, each of one dtype and device."""
    kinds = {}
    for p in parameters:
        if p.requires_grad:
            kinds.setdefault((p.dtype, p.device), []).append(p)
    return kinds.values()


class Servers:
    """The first `count` ranks of a group as parameter servers of a DDP's buckets."""

    def __init__(self, count, group):
        self.group, self.rank = group, dist.get_rank(group)
        self.shares = [[] for _ in range(count)]  # of each server, its parameters

    def deal(self, buckets):
        """Give each bucket to one server: the next largest to the server with the fewest bytes."""
        load = [0] * len(self.shares)
        self.server_of = {}  # a bucket's flat gradients: its server
        for bucket in sorted(buckets, key=lambda bucket: bucket.flat.nbytes, reverse=True):
            server = load.index(min(load))
            load[server] += bucket.flat.nbytes
            self.server_of[bucket.flat] = server
            self.shares[server] += bucket.parameters

    @property
    def mine(self):
        """The parameters that this rank serves. A worker alone has none."""
        return self.shares[self.rank] if self.rank < len(self.shares) else []

    def push(self, gradients, group, async_op=True):
        server = self.server_of[gradients]
        return Push(gradients, group, async_op, server, at_once=self.rank >= len(self.shares))

    def pull(self):
        pull_shares(self.shares, self.group)

    def norm(self):
        """After finish(): the norm of the whole gradient, a float64 scalar on all ranks."""
        square = torch.zeros((), dtype=torch.float64, device=self.shares[0][0].device)
        mine = [flat for flat, server in self.server_of.items() if server == self.rank]
        if mine:
            square += torch.stack(torch._foreach_norm(mine, dtype=torch.float64)).square().sum()
        dist.all_reduce(square, group=self.group)
        return square.sqrt()

    def step(self, optimizer):
        """The optimizer's step on this rank's share. An optimizer leaves out parameters without a
        gradient, so the others' gradients are put aside."""
        others = [p for share in self.shares if share is not self.mine for p in share]
        gradients = [p.grad for p in others]
        for p in others:
            p.grad = None
        optimizer.step()
        for p, gradient in zip(others, gradients):
            p.grad = gradient
