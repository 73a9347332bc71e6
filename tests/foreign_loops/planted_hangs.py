"""Ten hangs, by name: the script's first argument. Three ranks, or more."""

import os
import signal
import sys
import time

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

NAME = sys.argv[1]
STEPS, BAD = 4, 2  # steps, and the one in which it hangs, from 0 on


def model():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.GELU(), torch.nn.Linear(16, 4))


def ddp_loop(rank, skips=(), batches=STEPS):
    """DDP. Ranks in `skips` leave one backward pass out."""
    wrapped = DistributedDataParallel(model())
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1)
    for step in range(batches):
        loss = wrapped(torch.randn(4, 8)).square().mean()
        if step == BAD and rank in skips:
            continue
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def skipped_backward(rank, world):
    ddp_loop(rank, skips=[1])
    dist.barrier()


def if_rank_0(rank, world):
    x = torch.ones(8)
    dist.all_reduce(x)
    if rank == 0:
        dist.all_reduce(x[:2])
    gathered = torch.zeros(8 * world)
    dist.all_gather_into_tensor(gathered, x)


def order_of_groups(rank, world):
    one, two = dist.new_group(), dist.new_group()
    x = torch.ones(8)
    for group in (one, two) if rank == 0 else (two, one):
        dist.all_reduce(x, group=group)


def send_without_receive(rank, world):
    x = torch.ones(8)
    dist.all_reduce(x)
    if rank == 0:
        dist.send(x, 1)
    dist.barrier()


def one_micro_batch_fewer(rank, world):
    """A pipeline in which rank 0 sends one micro-batch less than the others expect."""
    x = torch.ones(8)
    for micro_batch in range(3 if rank == 0 else 4):
        if rank > 0:
            dist.recv(x, rank - 1)
        if rank < world - 1:
            dist.send(x, rank + 1)
    dist.all_reduce(x)


def exception(rank, world):
    wrapped = DistributedDataParallel(model())
    for step in range(STEPS):
        x = torch.randn(4, 8)
        if step == BAD and rank == 1:
            raise ValueError("a row of the data has no target")
        wrapped(x).square().mean().backward()


def unequal_batches(rank, world):
    ddp_loop(rank, batches=STEPS - (rank == 1))
    time.sleep(100 * (rank == 1))  # such as a long validation


def barrier_in_a_branch(rank, world):
    x = torch.ones(8)
    dist.all_reduce(x)
    if x[0] > 0 and rank == 1:  # such as the first to see that a file exists
        dist.barrier()
    dist.all_reduce(x[:4])


def evaluation_on_rank_0(rank, world):
    net = model()
    for layer in (net[0], net[2]):
        fully_shard(layer)
    optimizer = torch.optim.SGD(fully_shard(net).parameters(), lr=0.1)
    for step in range(STEPS):
        net(torch.randn(4, 8)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if step == BAD and rank == 0:
            net(torch.randn(4, 8))
        dist.barrier()


def dead_process(rank, world):
    x = torch.ones(8)
    for step in range(STEPS):
        if step == BAD and rank == 1:
            time.sleep(1)
            os.kill(os.getpid(), signal.SIGKILL)
        dist.all_reduce(x)


if __name__ == "__main__":
    dist.init_process_group("gloo")
    globals()[NAME](dist.get_rank(), dist.get_world_size())
    dist.destroy_process_group()
