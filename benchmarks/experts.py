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
from harness import initialize, memory, presets
from harness.rank import launch


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


def layer(args, shared=0):
    sizes = dict(layers=1, width=args.width, hidden=args.hidden, experts=8, shared=shared)
    return initialize.build(presets.configure(**sizes)).blocks["0"].mlp


def race(rivals, x, turns):
    """{name: milliseconds of each turn} of one forward and backward."""

    def step(moe):
        moe.zero_grad()
        moe(x, x.shape[0] * x.shape[1]).square().mean().backward()

    times = benchmarks.race([functools.partial(step, moe) for moe in rivals.values()], turns)
    return {name: [1e3 * t for t in row] for name, row in zip(rivals, times)}


def demo(run):
    args, say = run.args, run.print
    g = torch.Generator().manual_seed(run.rank)
    x = torch.randn(args.batch, 128, args.width, generator=g).requires_grad_()
    sizes = f"{args.batch * 128} tokens a rank, width {args.width}, hidden {args.hidden}"
    say(f"{sizes}, 8 experts, top 2, float32; forward + backward, ms: median of {args.turns} turns")
    say("ratios: median (quartiles)\n\nexperts as one grouped computation, each rank by itself")
    rivals = {"grouped": layer(args), "masked": layer(args), "gathered": layer(args)}
    rivals["masked"].dispatch, rivals["gathered"].dispatch = Masked(), Gathered()
    outs = [moe(x) for moe in rivals.values()]
    assert all(torch.allclose(outs[0], out, atol=1e-5) for out in outs)
    times = race(rivals, x, args.turns)
    grouped = statistics.median(times["grouped"])
    for name in ("masked", "gathered"):
        loop = f"loop, {name:9s} {statistics.median(times[name]):8.1f}"
        ratio = benchmarks.spread(times[name], times["grouped"])
        say(f"  grouped {grouped:8.1f}   {loop}   loop / grouped {ratio}")
    for shared in (0, 1):
        kind = ", with a shared expert" if shared else ""
        say(f"\n{run.world} ranks{kind}: all experts on every rank, or dealt out")
        rivals = {"all experts here": layer(args, shared)}
        for chunks in (1, 2, 4):
            rivals[f"dealt out, chunks {chunks}"] = dealt_out(layer(args, shared), chunks)
        times = race(rivals, x, args.turns)
        medians = {name: statistics.median(row) for name, row in times.items()}
        here = medians.pop("all experts here")
        say(f"  {'':22s}{'ms':>8s}{'overhead':>10s}   beside chunks 1")
        say(f"  {'all experts here':22s}{here:8.1f}")
        for name, middle in medians.items():
            ratio = benchmarks.spread(times[name], times["dealt out, chunks 1"])
            say(f"  {name:22s}{middle:8.1f}{middle - here:10.1f}   {ratio}")


def dealt_out(part, chunks):
    """The layer with this rank's experts alone."""
    blocks = {"0": SimpleNamespace(mlp=part)}
    config, parameters = part.router.config, part.parameters
    model = SimpleNamespace(config=config, blocks=blocks, parameters=parameters)
    expert_parallel.parallelize(model, dist.group.WORLD, chunks=chunks)
    return part


def main():
    p = benchmarks.parser(__doc__, nproc=2, turns=15)
    p.add_argument("--batch", **harness.POSITIVE, default=8, help="sequences of 128 tokens a rank")
    p.add_argument("--width", **harness.POSITIVE, default=128, help="of the residual stream")
    p.add_argument("--hidden", **harness.POSITIVE, default=512, help="inner size of an expert")
    args = p.parse_args()

    def check(world):
        config = presets.configure(layers=1, width=args.width, hidden=args.hidden, experts=8)
        expert_parallel.expert_counts(config.experts, world)
        size = presets.parameters_held(config, 1, 1) + 128 * args.batch * args.width
        memory.check_ranks(args, world, 4 * size)

    launch(demo, args, check=check)


if __name__ == "__main__":
    harness.script(main)
