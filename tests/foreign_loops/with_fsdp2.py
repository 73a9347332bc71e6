"""PyTorch's FSDP2: each layer's parameters are sharded over all ranks."""

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

dist.init_process_group("gloo")
torch.manual_seed(0)
blocks = [torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.Linear(64, 32)) for _ in range(2)]
model = torch.nn.Sequential(*blocks, torch.nn.LayerNorm(32))
for block in blocks:
    fully_shard(block)
fully_shard(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
torch.manual_seed(dist.get_rank())
for step in range(5):
    for micro_batch in range(2):
        model(torch.randn(16, 32)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
dist.destroy_process_group()
