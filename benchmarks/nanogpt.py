"""GPT-2 and its training step as nanoGPT has them, in plain torch: what benchmarks.gpu sets
train.py's speed beside."""

import time

import torch
import torch.nn as nn
import torch.nn.functional as F


class Block(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):  # (B, T, C)
        qkv = self.qkv(self.norm1(x)).unflatten(2, (3, self.heads, -1))  # (B, T, 3, H, D)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)  # (B, H, T, D) each
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(y.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x)), approximate="tanh"))


class GPT(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.token = nn.Embedding(config.vocab, config.width)  # also the head
        self.position = nn.Embedding(config.context, config.width)
        blocks = [Block(config.width, config.heads) for _ in range(config.layers)]
        self.blocks, self.norm = nn.Sequential(*blocks), nn.LayerNorm(config.width)
        for module in self.modules():
            if isinstance(module, (nn.Linear, nn.Embedding)):
                nn.init.normal_(module.weight, std=0.02)

    def forward(self, tokens, targets):
        """The mean loss."""
        where = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.norm(self.blocks(self.token(tokens) + self.position(where)))
        logits = F.linear(x, self.token.weight)  # (B, T, V)
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def train(args, config, device="cuda"):
    """tokens/s of each step with the sizes of train.py's flags: autocast, fused AdamW."""
    torch.set_float32_matmul_precision("high")
    model = GPT(config).to(device)
    forward = torch.compile(model) if args.compile else model
    matrices = [p for p in model.parameters() if p.dim() > 1]
    vectors = [p for p in model.parameters() if p.dim() <= 1]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=6e-4, betas=(0.9, 0.95), fused=True)
    shape, rates = (2, args.batch // args.microbatches, config.context), []
    for _ in range(args.steps):
        begin = time.perf_counter()
        for _ in range(args.microbatches):
            text = torch.randint(config.vocab, shape)
            text = text.pin_memory() if device == "cuda" else text
            tokens, targets = text.to(device, non_blocking=True)
            with torch.autocast(device, dtype=torch.bfloat16):
                loss = forward(tokens, targets) / args.microbatches
            loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        loss.item()  # waits for the step
        rates.append(args.batch * config.context / (time.perf_counter() - begin))
    return rates
