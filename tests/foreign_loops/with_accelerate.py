"""Hugging Face's accelerate, with gradient accumulation."""

import accelerate
import torch

accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2)
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.GELU(), torch.nn.Linear(64, 8))
data = torch.utils.data.TensorDataset(torch.randn(320, 32), torch.randn(320, 8))
loader = torch.utils.data.DataLoader(data, batch_size=8)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
for x, y in loader:
    with accelerator.accumulate(model):
        accelerator.backward((model(x) - y).square().mean())
        optimizer.step()
        optimizer.zero_grad()
accelerator.end_training()
