"""Two pictures of a training step: what a rank holds, and what runs beside what.

    python -m benchmarks.pictures --memory docs/memory-of-a-step      memory of rank 0 by kind
    python -m benchmarks.pictures --overlap docs/overlap              compute and messages of rank 0

Both are measured, on 4 ranks of this machine. They need matplotlib.
"""

import functools
import time
from unittest import mock

import torch.distributed as dist

import ddp
import fsdp
import harness
import proof
import zero
from proof.ledger import Ledger, lasting, storage_bytes

KINDS = ("parameters", "gradients", "optimizer", "activations and buffers")
COLORS = ("#4c78a8", "#f58518", "#54a24b", "#bab0ac")
WAYS = ("naive", "bucketed", "overlapped")


def main():
    p = harness.parser(__doc__, layers=8, batch=16, microbatches=1, nproc=4)
    p.add_argument("--memory", metavar="NAME", help="draw memory over a step: NAME.png")
    p.add_argument("--overlap", metavar="NAME", help="draw compute and messages: NAME.png")
    args = p.parse_args()
    if not (args.memory or args.overlap):
        raise harness.Refused("nothing to draw: give --memory NAME or --overlap NAME")
    for flag in ("--memory", "--overlap"):
        harness.check_plot(args, flag)
    harness.configure(args)
    proof.launch(draw, args, check=lambda world: harness.check_batch(args, world))


def draw(run):
    if run.args.memory:
        draw_memory(run, run.args.memory)
    if run.args.overlap:
        draw_overlap(run, run.args.overlap)


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


def draw_memory(run, name):
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
    harness.save(figure, name)


# --- what runs beside what


def times_of_a_step(run, way):
    """(middle, end, [(start, end) of each all-reduce]) of rank 0's third step, in milliseconds: its
    forward ends in the middle, its backward at the end."""
    model, all_reduce, spans = run.fill(run.meta_model()), dist.all_reduce, []

    def timed(tensor, group=None, async_op=False):
        span = [time.perf_counter(), None]
        spans.append(span)
        work = all_reduce(tensor, group=group, async_op=True)
        work.get_future().add_done_callback(lambda _: span.__setitem__(1, time.perf_counter()))
        return work if async_op else work.wait()

    with mock.patch.object(dist, "all_reduce", timed):
        group, zero_grad = dist.group.WORLD, model.zero_grad
        if way == "naive":
            finish = functools.partial(ddp.sum_gradients, list(model.parameters()), group)
        else:
            sync = ddp.DDP(model.parameters(), group, 1, 1 << 19, way == "overlapped")
            zero_grad, finish = sync.zero_grad, sync.finish
        for step in range(3):
            zero_grad()
            spans.clear()
            [(tokens, targets, samples)] = run.microbatches(step, run.rank, run.world, pieces=1)
            dist.barrier()
            start = time.perf_counter()
            loss = model(tokens, targets=targets, target_count=run.target_count, sample_ids=samples)
            middle = time.perf_counter()
            loss.backward()
            end = time.perf_counter()
            finish()
    messages = [((a - start) * 1e3, (b - start) * 1e3) for a, b in spans]
    return (middle - start) * 1e3, (end - start) * 1e3, messages


def draw_overlap(run, name):
    rows = [(way, *times_of_a_step(run, way)) for way in WAYS]
    if run.rank:
        return
    plt = harness.pyplot()
    figure, axes = plt.subplots(len(rows), 1, figsize=(11, 4.5), sharex=True, layout="constrained")
    for ax, (way, middle, end, messages) in zip(axes, rows):
        ax.broken_barh([(0, middle)], (0.6, 0.8), color=COLORS[0])
        ax.broken_barh([(middle, end - middle)], (0.6, 0.8), color=COLORS[1])
        for i, (a, b) in enumerate(messages):
            ax.broken_barh([(a, b - a)], (-0.4 + 0.1 * (i % 8), 0.08), color=COLORS[2])
        ax.set(yticks=[0, 1], yticklabels=["messages", "compute"], title=way)
        print(f"{way:12s} {max(end, *(b for _, b in messages)):7.1f} ms")
    what = "blue: forward, orange: backward, green: all-reduces"
    axes[-1].set(xlabel=f"ms of a step on rank 0 ({what})")
    harness.save(figure, name)


if __name__ == "__main__":
    harness.script(main)
