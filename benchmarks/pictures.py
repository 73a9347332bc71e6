"""A picture of a training step: what a rank holds.

    python -m benchmarks.pictures --memory docs/memory-of-a-step      memory of rank 0 by kind

It is measured, on 4 ranks of this machine. It needs matplotlib.
"""

import functools

import torch.distributed as dist

import fsdp
import harness
import proof
import zero
from proof.ledger import Ledger, lasting, storage_bytes

KINDS = ("parameters", "gradients", "optimizer", "activations and buffers")
COLORS = ("#4c78a8", "#f58518", "#54a24b", "#bab0ac")


def main():
    p = harness.parser(__doc__, layers=8, batch=16, microbatches=1, nproc=4)
    p.add_argument("--memory", metavar="NAME", help="draw memory over a step: NAME.png")
    args = p.parse_args()
    if not args.memory:
        raise harness.Refused("nothing to draw: give --memory NAME")
    harness.check_plot(args, "--memory")
    harness.configure(args)
    proof.launch(draw_memory, args, check=lambda world: harness.check_batch(args, world))


# --- memory over a step


class Recorder(Ledger):
    """A ledger that notes after every operation what is held, by kind, in bytes."""

    def __init__(self, optimizer):
        super().__init__({})
        self.kinds, self.rows = lasting(optimizer), []
        self.watch([t for tensors in self.kinds.values() for t in tensors])

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = super().__torch_dispatch__(func, types, args, kwargs)
        self.rows.append([*(storage_bytes(t) for t in self.kinds.values()), self.bytes])
        return out


def memory_of_a_step(run, stage, recompute):
    """Rows (bytes of each kind) of the second step of a run with ZeRO of that stage; 0 is DDP."""
    model = run.meta_model()
    harness.recompute(model, recompute)
    optimizer = functools.partial(harness.make_optimizer, args=run.args)
    options = dict(microbatches=run.args.microbatches, value=run.initial(model))
    if stage == 3:
        sync = fsdp.FSDP(model, dist.group.WORLD, optimizer, **options)
    else:
        options["bucket_bytes"] = 1 << 19
        sync = zero.ZeRO(model, dist.group.WORLD, stage, optimizer, **options)
    for step in range(2):
        recorder = Recorder(sync)
        with recorder:
            train_step(run, step, model, sync)
            sync.step()
    return recorder.rows


def train_step(run, step, model, sync):
    sync.zero_grad()
    for tokens, targets, samples in run.microbatches(step, run.rank, run.world):
        model(tokens, targets=targets, target_count=run.target_count, sample_ids=samples).backward()
    sync.finish()


def draw_memory(run):
    settings = [("data parallel", 0, "none"), ("--recompute block", 0, "block")]
    settings += [(f"ZeRO stage {stage}", stage, "none") for stage in (1, 2, 3)]
    settings += [("stage 3 and recompute", 3, "block")]
    curves = [(title, memory_of_a_step(run, *how)) for title, *how in settings]
    if run.rank:
        return
    plt = harness.pyplot()
    figure, axes = plt.subplots(2, 3, figsize=(12, 6), sharey=True, layout="constrained")
    for ax, (title, rows) in zip(axes.flatten(), curves):
        stacks = [[row[kind] / 1e6 for row in rows] for kind in range(len(KINDS))]
        ax.stackplot(range(len(rows)), stacks, labels=KINDS, colors=COLORS)
        peak = max(sum(row) for row in rows) / 1e6
        ax.set(title=f"{title}: {peak:.1f} MB at the peak", xlabel="operations of the step")
        print(f"{title:24s} peak {peak:7.1f} MB")
    for ax in axes[:, 0]:
        ax.set(ylabel="MB on rank 0")
    handles, labels = axes[0, 0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(KINDS), frameon=False)
    harness.save(figure, run.args.memory)


if __name__ == "__main__":
    harness.script(main)
