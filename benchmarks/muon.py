"""muon.py beside ddp.py with torch.optim.Muon on every rank, whose iteration is ours, in float32:
python -m benchmarks.muon"""

from types import SimpleNamespace

import torch
import torch.distributed as dist
from torch.optim import _muon

import benchmarks
import ddp
import harness
import muon
from harness import initialize, presets
from harness.start import launch


def side(run, ours):
    """(a function that takes a training step, the model)."""
    config = presets.configure(layers=4, width=256, heads=4, context=64, vocab=256)
    model = initialize.build(config, 0, run.device)
    generator = torch.Generator().manual_seed(run.rank)
    tokens, targets = torch.randint(256, (2, 4, 64), generator=generator).to(run.device)
    matrices = [p for p in model.blocks.parameters() if p.dim() > 1]
    if ours:
        sync = muon.Muon(model, dist.group.WORLD, matrices)
        optimizers = [sync]
    else:
        sync = ddp.DDP(model.parameters(), dist.group.WORLD)
        others = [p for p in model.parameters() if p not in set(matrices)]
        flags = SimpleNamespace(optimizer="adamw", lr=1e-3, weight_decay=0.1)  # as Muon's
        optimizers = [
            torch.optim.Muon(matrices, adjust_lr_fn="match_rms_adamw"),
            harness.make_optimizer(others, flags),
        ]

    def step():
        sync.zero_grad()
        model(tokens, targets=targets, target_count=tokens.numel() * run.world).backward()
        sync.finish()
        for optimizer in optimizers:
            optimizer.step()

    return step, model


def demo(run):
    _muon._zeropower_via_newtonschulz = lambda gradient, *_: muon.orthogonalize(gradient)
    (ours, model), (theirs, other) = side(run, ours=True), side(run, ours=False)
    run.print(benchmarks.HEAD)
    run.print(benchmarks.versus("tokens/s", ours, theirs, 256 * run.world, 2, run.args.turns))
    torch.testing.assert_close([*model.parameters()], [*other.parameters()], rtol=0, atol=1e-2)


def main():
    launch(demo, benchmarks.parser(__doc__, nproc=2, turns=6).parse_args())


if __name__ == "__main__":
    harness.script(main)
