"""expert_parallel.py and the experts of model.py beside what they replace: python -m
benchmarks.experts

One layer of 8 experts, 2 a token, forward and backward. Rivals take turns. Of several ranks the
slowest counts.
"""

import functools
import statistics
from types import SimpleNamespace

import torch
import torch.distributed as dist
import torch.nn.functional as F

import benchmarks
import expert_parallel
import harness
from harness import initialize, presets
from harness.start import launch

SEQUENCES, LENGTH = 8, 128  # of a rank
WIDTH, HIDDEN, EXPERTS = 128, 512, 8


def run_expert(experts, e, x):
    hidden = F.gelu(x @ experts.up[e].t(), approximate="tanh")  # gpt2's experts have no gate
    return hidden @ experts.down[e].t()


class Masked(torch.nn.Module):
    """The plainest mixture: every expert computes every token, and a mask keeps what was chosen."""

    def forward(self, x, weights, chosen, experts, meanwhile):
        y = torch.zeros_like(x)
        for e in range(len(experts.up)):
            weight = (weights * (chosen == e)).sum(1, keepdim=True)
            y = y + weight * run_expert(experts, e, x)
        return y


class Gathered(torch.nn.Module):
    """A loop over experts in which each computes its own tokens only, found by its mask."""

    def forward(self, x, weights, chosen, experts, meanwhile):
        y = torch.zeros_like(x)
        for e in range(len(experts.up)):
            token, choice = torch.where(chosen == e)
            rows = run_expert(experts, e, x[token]) * weights[token, choice].unsqueeze(1)
            y = y.index_add(0, token, rows)
        return y


def layer(shared=0):
    sizes = dict(layers=1, width=WIDTH, hidden=HIDDEN, experts=EXPERTS, shared=shared)
    return initialize.build(presets.configure(**sizes)).blocks["0"].mlp


def race(rivals, x, turns):
    """{name: milliseconds of each turn} of one forward and backward."""

    def step(moe):
        moe.zero_grad()
        moe(x, x.shape[0] * x.shape[1]).square().mean().backward()

    times = benchmarks.race([functools.partial(step, moe) for moe in rivals.values()], turns)
    return {name: [1e3 * t for t in row] for name, row in zip(rivals, times)}


def demo(run):
    turns, say = run.args.turns, run.print
    g = torch.Generator().manual_seed(run.rank)
    x = torch.randn(SEQUENCES, LENGTH, WIDTH, generator=g).requires_grad_()
    sizes = f"{SEQUENCES * LENGTH} tokens a rank, width {WIDTH}, hidden {HIDDEN}"
    say(f"{sizes}, 8 experts, top 2, float32; forward + backward, ms: median of {turns} turns")
    say("ratios: median (quartiles)\n\nexperts as one grouped computation, each rank by itself")
    rivals = {"grouped": layer(), "masked": layer(), "gathered": layer()}
    rivals["masked"].dispatch, rivals["gathered"].dispatch = Masked(), Gathered()
    outs = [moe(x) for moe in rivals.values()]
    assert all(torch.allclose(outs[0], out, atol=1e-5) for out in outs)
    times = race(rivals, x, turns)
    grouped = statistics.median(times["grouped"])
    for name in ("masked", "gathered"):
        loop = f"loop, {name:9s} {statistics.median(times[name]):8.1f}"
        ratio = benchmarks.spread(times[name], times["grouped"])
        say(f"  grouped {grouped:8.1f}   {loop}   loop / grouped {ratio}")
    for shared in (0, 1):
        kind = ", with a shared expert" if shared else ""
        say(f"\n{run.world} ranks{kind}: all experts on every rank, or dealt out")
        rivals = {"all experts here": layer(shared)}
        for chunks in (1, 2, 4):
            rivals[f"dealt out, chunks {chunks}"] = dealt_out(layer(shared), chunks)
        times = race(rivals, x, turns)
        say(f"  {'':22s}{'ms':>8s}   beside chunks 1")
        for name, row in times.items():
            ratio = benchmarks.spread(row, times["dealt out, chunks 1"])
            say(f"  {name:22s}{statistics.median(row):8.1f}   {ratio}")


def dealt_out(part, chunks):
    """The layer with this rank's experts alone."""
    blocks = {"0": SimpleNamespace(mlp=part)}
    config, parameters = part.router.config, part.parameters
    model = SimpleNamespace(config=config, blocks=blocks, parameters=parameters)
    expert_parallel.parallelize_experts(model, dist.group.WORLD, chunks=chunks)
    return part


def main():
    args = benchmarks.parser(__doc__, nproc=2, turns=15).parse_args()
    launch(demo, args, check=functools.partial(expert_parallel.expert_counts, EXPERTS))


if __name__ == "__main__":
    harness.script(main)
