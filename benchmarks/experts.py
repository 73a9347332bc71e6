"""expert_parallel.py and the experts of model.py beside what they replace: python -m
benchmarks.experts

One layer of 8 experts, 2 a token, forward and backward. Rivals take turns, A B A B, so that
whatever else runs here slows all of them. Of several ranks the slowest counts.
"""

import copy
import os
import statistics
import sys
import time
from types import SimpleNamespace

if not __package__:  # run as a script: python benchmarks/experts.py
    sys.path[0] = os.path.dirname(sys.path[0])

import torch
import torch.distributed as dist
import torch.nn.functional as F

import expert_parallel
import harness
import model as gpt
from harness import memory, presets
from harness.rank import launch
from receipts.expert_parallel import AllToAllClock


def run_expert(experts, e, x):
    up = x @ experts.up[e].t()
    hidden = (
        F.gelu(up, approximate="tanh")
        if experts.gate is None
        else F.silu(x @ experts.gate[e].t()) * up
    )
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
            y = y.index_add(
                0, token, run_expert(experts, e, x[token]) * weights[token, choice].unsqueeze(1)
            )
        return y


def layer(args, shared=0):
    config = presets.configure(
        layers=1, width=args.width, hidden=args.hidden, experts=8, shared=shared
    )
    return gpt.build(config).blocks["0"].mlp


def turn(moe, x):
    """Milliseconds of one forward and backward, on the slowest rank."""
    dist.barrier()
    began = time.perf_counter()
    moe(x, x.shape[0] * x.shape[1]).square().mean().backward()
    took = torch.tensor(time.perf_counter() - began, dtype=torch.float64)
    dist.all_reduce(took, op=dist.ReduceOp.MAX)
    return took.item() * 1e3


def race(rivals, x, turns):
    """{name: milliseconds of each turn}, without the first, a warm-up; and {name: milliseconds a
    turn in which all-to-alls were waited for}, with it."""
    times, clocks = {name: [] for name in rivals}, {name: AllToAllClock() for name in rivals}
    for i in range(turns + 1):
        for name, moe in rivals.items():
            moe.zero_grad()
            clocks[name].start()
            took = turn(moe, x)
            clocks[name].stop()
            times[name] += [took] * (i > 0)
    return times, {name: clock.waited() * 1e3 / (turns + 1) for name, clock in clocks.items()}


def ratio(theirs, ours):
    low, middle, high = statistics.quantiles([a / b for a, b in zip(theirs, ours)])
    return middle, f"{middle:5.2f} ({low:.2f} .. {high:.2f})"


def demo(run):
    args, group = run.args, dist.group.WORLD
    say = print if run.rank == 0 else lambda *_: None
    x = torch.randn(
        args.batch, 128, args.width, generator=torch.Generator().manual_seed(run.rank)
    ).requires_grad_()
    what = (
        f"{args.batch * 128} tokens a rank, width {args.width}, hidden {args.hidden}, 8 experts, "
        "top 2, float32"
    )
    say(
        f"{what}; forward + backward, ms: median of {args.turns} turns; ratios: median "
        "(quartiles)\n"
    )

    say("experts as one grouped computation, each rank by itself")
    rivals = {"grouped": layer(args), "masked": layer(args), "gathered": layer(args)}
    rivals["masked"].dispatch, rivals["gathered"].dispatch = Masked(), Gathered()
    outs = [moe(x) for moe in rivals.values()]
    assert all(torch.allclose(outs[0], out, atol=1e-5) for out in outs)
    times, _ = race(rivals, x, args.turns)
    for name, target in (("masked", 1.5), ("gathered", None)):
        middle, text = ratio(times[name], times["grouped"])
        verdict = (
            ""
            if target is None
            else f"   wanted {target}: {'met' if middle >= target else 'missed'}"
        )
        mine, there = (statistics.median(times[n]) for n in ("grouped", name))
        say(
            f"  grouped {mine:8.1f}   loop, {name:9s} {there:8.1f}   loop / grouped {text}{verdict}"
        )

    for shared in (0, 1):
        say(
            f"\n{run.world} ranks{', with a shared expert' if shared else ''}: all experts on "
            "every rank, or dealt out"
        )
        whole = layer(args, shared)
        rivals = {"all experts here": whole}
        for chunks in (1, 2, 4):
            part = copy.deepcopy(whole)
            model = SimpleNamespace(
                config=whole.router.config,
                blocks={"0": SimpleNamespace(mlp=part)},
                parameters=part.parameters,
            )
            expert_parallel.parallelize(model, group, chunks=chunks)
            rivals[f"dealt out, chunks {chunks}"] = part
        times, waited = race(rivals, x, args.turns)
        here = times["all experts here"]
        say(f"  {'':22s}{'ms':>8s}{'overhead':>10s}{'of it waiting':>15s}   beside chunks 1")
        for name, moe in rivals.items():
            line = f"  {name:22s}{statistics.median(times[name]):8.1f}"
            if moe is not whole:
                extra = statistics.median(times[name]) - statistics.median(here)
                line += f"{extra:10.1f}{waited[name]:15.1f}"
                line += "   " + ratio(times[name], times["dealt out, chunks 1"])[1]
            say(line)


def main():
    p = harness.Parser(__doc__)
    p.add_argument("--nproc", **harness.POSITIVE, default=2, help="ranks")
    p.add_argument("--turns", type=harness.count(2), default=15, metavar="N", help="of each rival")
    p.add_argument("--batch", **harness.POSITIVE, default=8, help="sequences of 128 tokens a rank")
    p.add_argument("--width", **harness.POSITIVE, default=128, help="of the residual stream")
    p.add_argument("--hidden", **harness.POSITIVE, default=512, help="inner size of an expert")
    p.add_argument("--quiet", action="store_true", help="print nothing but errors")
    p.set_defaults(device="cpu", backend="gloo")
    args = p.parse_args()

    def check(world):
        config = presets.configure(layers=1, width=args.width, hidden=args.hidden, experts=8)
        expert_parallel.expert_counts(config.experts, world)
        size = presets.parameters_held(config, 1, 1) + 128 * args.batch * args.width
        memory.check_ranks(args, world, 4 * size)

    launch(demo, args, check=check)


if __name__ == "__main__":
    harness.script(main)
