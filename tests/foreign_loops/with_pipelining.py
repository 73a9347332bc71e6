"""torch.distributed.pipelining: 1F1B, one stage a rank, and stages whose layers have one name."""

import torch
import torch.distributed as dist
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(rank)
layers = torch.nn.Sequential(torch.nn.LayerNorm(32), torch.nn.Linear(32, 32), torch.nn.GELU())
stage = PipelineStage(layers, rank, world, torch.device("cpu"))
schedule = Schedule1F1B(stage, n_microbatches=4, loss_fn=torch.nn.functional.mse_loss)
optimizer = torch.optim.AdamW(layers.parameters(), lr=1e-3)
for step in range(5):
    x, y = torch.randn(2, 16, 32)
    if rank == 0:
        schedule.step(x)
    else:
        schedule.step(target=y if rank == world - 1 else None)
    # The norm of all stages' gradients, as one clips by it
    norm = sum(p.grad.square().sum() for p in layers.parameters())
    dist.all_reduce(norm)
    optimizer.step()
    optimizer.zero_grad()
dist.destroy_process_group()
