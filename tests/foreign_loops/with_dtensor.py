"""DTensor's tensor and sequence parallelism: an MLP between norms, on all ranks."""

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

mesh = init_device_mesh("cpu", (int(__import__("os").environ["WORLD_SIZE"]),))
torch.manual_seed(0)
layers = {"norm": torch.nn.LayerNorm(32), "up": torch.nn.Linear(32, 64)}
layers |= {"act": torch.nn.GELU(), "down": torch.nn.Linear(64, 32), "out": torch.nn.LayerNorm(32)}
model = torch.nn.Sequential()
for name, layer in layers.items():
    model.add_module(name, layer)
plan = {
    "norm": SequenceParallel(),
    "up": ColwiseParallel(input_layouts=Shard(1)),
    "down": RowwiseParallel(output_layouts=Shard(1)),
    "out": SequenceParallel(),
}
parallelize_module(model, mesh, plan)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=True)
for step in range(5):
    x = torch.randn(2, 8, 32)  # the same on all ranks
    model(x).full_tensor().square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
dist.destroy_process_group()
