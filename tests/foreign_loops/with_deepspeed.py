"""DeepSpeed's ZeRO. Its stage is the script's argument."""

import sys

import deepspeed
import torch

deepspeed.ops.__compatible_ops__.clear()  # it needs no compiler then
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.GELU(), torch.nn.Linear(64, 32))
config = {
    "train_micro_batch_size_per_gpu": 16,
    "gradient_accumulation_steps": 2,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
    "zero_optimization": {"stage": int(sys.argv[1])},
    "zero_allow_untested_optimizer": True,
}
engine, *_ = deepspeed.initialize(model=model, config=config, model_parameters=model.parameters())
torch.manual_seed(torch.distributed.get_rank())
for micro_batch in range(10):
    engine.backward(engine(torch.randn(16, 32)).square().mean())
    engine.step()
torch.distributed.destroy_process_group()
