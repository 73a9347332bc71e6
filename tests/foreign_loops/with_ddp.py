"""PyTorch's DDP, two micro-batches."""

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
torch.manual_seed(0)
layers = [torch.nn.Linear(32, 64), torch.nn.GELU(), torch.nn.LayerNorm(64), torch.nn.Linear(64, 8)]
model = DistributedDataParallel(torch.nn.Sequential(*layers))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
torch.manual_seed(dist.get_rank())
for step in range(5):
    x, y = torch.randn(2, 16, 32), torch.randn(2, 16, 8)
    with model.no_sync():
        (model(x[0]) - y[0]).square().mean().backward()
    (model(x[1]) - y[1]).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
dist.destroy_process_group()
