"""Each technique beside PyTorch's own, on the same batch: python -m benchmarks.vs_torch

    ddp                    DistributedDataParallel
    zero-2, zero-3         FSDP2, blocks kept or freed after forward
    muon                   DistributedDataParallel, and torch.optim.Muon on every rank
    tensor, sequence       DTensor's parallelize_module, with loss_parallel; SequenceParallel
    context                context_parallel(); on a CPU, where it does not run, the ring beneath it
    documents              twelve documents packed into a row, beside each of them in a padded row
    grouped, experts       all experts on every rank, or dealt out: beside a loop over all of them
    gpipe .. dualpipev     torch.distributed.pipelining

First both sides take three steps with SGD, which shows a gradient of the wrong scale, then with
AdamW. A loss or a weight that differs by more than rounding means no ratio, and exit code 1. Then
they take turns, with fused AdamW. Shown are tokens/s, with the ratio's median and quartiles of the
turns; megabytes at the peak of a step, of the rank that holds most, with the ratio's median, least
and largest of the ranks; and the largest relative difference of a loss or a weight.
"""

import contextlib
import gc
import itertools
import json
import statistics
import warnings
import weakref
from functools import partial
from types import SimpleNamespace
from typing import Callable, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, schedules
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor import parallel as dtensor
from torch.distributed.tensor.experimental import context_parallel as their_context_parallel
from torch.distributed.tensor.experimental._context_parallel import _attention as templates
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils.rnn import pad_sequence
from torch.optim import _muon
from torch.utils._python_dispatch import TorchDispatchMode

import benchmarks
import context_parallel
import ddp
import expert_parallel
import fsdp
import harness
import model as gpt
import muon
import sequence_parallel
import tensor_overlap
import tensor_parallel
import zero
import zero_bubble
from harness import families, initialize, presets
from harness.start import launch
from proof.ledger import tensors_in
from proof.one_process import larger
from proof.tolerance import FLOOR, TOLERANCE
from receipts.context_parallel import LENGTHS
from receipts.pipeline import find_schedule, stage_layers
from trainer.document_core import attend_by_document
from trainer.tokens_on_gloo import tokens_messages

MICROBATCHES, STEPS = 8, 3  # of a step, of a turn
# The preset on each device, with a vocabulary that divides by the ranks, and keys of its own for
# every head
MODELS = {
    "cpu": ("tiny", dict(vocab=256, kv_heads=4)),
    "cuda": ("gpt2", dict(vocab=50304, kv_heads=12)),
}
# Learning rate, and what counts as rounding in a weight after three steps in float32: AdamW takes
# full steps along gradients that are little but rounding
KINDS = {"sgd": (0.1, 1e-5), "adamw": (1e-3, 5e-3)}


class Side(NamedTuple):
    """step(): takes a training step, returns this rank's part of the loss; the global one is the
    sum over ranks, divided by `copies`. weights(): (name, this rank's part of a weight) pairs, cut
    alike on both sides."""

    step: Callable
    weights: Callable
    copies: int = 1


class Job:
    """What both sides of a pair are given."""

    def __init__(self, run, fields, kind):
        cuda = run.device.type == "cuda"
        self.rank, self.world, self.device = run.rank, run.world, run.device
        self.group = dist.group.WORLD
        preset, same = MODELS[run.device.type]
        self.config = presets.configure(preset, **same | fields)
        self.precision = "bfloat16" if cuda else "float32"
        self.dtype, self.kind = harness.DTYPES[self.precision], kind
        self.tolerance = dict(TOLERANCE[self.precision])
        if not cuda:
            self.tolerance["param"] = KINDS[kind][1]
        size = 16 if cuda else 2048 // self.config.context, self.config.context + 1
        text = torch.randint(self.config.vocab, size, generator=torch.Generator().manual_seed(0))
        self.tokens, self.targets = text[:, :-1].to(self.device), text[:, 1:].to(self.device)
        self.count = self.tokens.numel()

    def model(self, cut=lambda model: model):
        with torch.device("meta"):
            whole = families.build(self.config)
        return initialize.fill(cut(whole), 0, self.device, self.dtype, harness.take)

    def optimizer(self, parameters):
        flags = SimpleNamespace(optimizer=self.kind, lr=KINDS[self.kind][0], weight_decay=0.1)
        optimizer = harness.make_optimizer(parameters, flags)
        if self.kind == "sgd":  # DTensors don't take the fused one
            for group in optimizer.param_groups:
                group["fused"] = False
        return optimizer

    def rows(self, count):
        """What a model takes of this rank's rows of the batch, its loss divided by `count`."""
        tokens, targets = (t.chunk(self.world)[self.rank] for t in (self.tokens, self.targets))
        return tokens, None, targets, count


def stepper(zero_grad, model, inputs, *after):
    """A function that takes a training step."""

    def step():
        zero_grad()
        loss = model(*inputs)
        loss.backward()
        for do in after:
            do()
        return loss.detach()

    return step


# --- data parallelism. Theirs averages over the ranks: so each loss is a mean over its own rows


def our_ddp(job, inputs=None, change=lambda model: model):
    model = job.model(change)
    sync, optimizer = ddp.DDP(model.parameters(), job.group), job.optimizer(model.parameters())
    inputs = inputs or job.rows(job.count)
    step = stepper(sync.zero_grad, model, inputs, sync.finish, optimizer.step)
    return Side(step, model.named)


def documents(padded, job):
    """Documents of skewed lengths: packed into this rank's rows, or each in a padded row."""
    tokens, _, targets, count = job.rows(job.count)
    lengths = [n * job.config.context // sum(LENGTHS) for n in LENGTHS]
    if padded:
        rows = []
        for t, fill in ((tokens, 0), (targets, gpt.IGNORE)):
            alone = [document for row in t for document in row.split(lengths)]
            rows.append(pad_sequence(alone, batch_first=True, padding_value=fill))
        return our_ddp(job, (rows[0], None, rows[1], count))
    starts = [end - n for n, end in zip(lengths, itertools.accumulate(lengths)) for _ in range(n)]
    starts = torch.tensor(starts).expand(len(tokens), -1)
    return our_ddp(job, (tokens, None, targets, count, None, starts), attend_by_document)


def their_ddp(job, model=None):
    model = model or job.model()
    wrapped = DistributedDataParallel(model, gradient_as_bucket_view=True)
    optimizer, inputs = job.optimizer(model.parameters()), job.rows(job.count / job.world)
    step = stepper(optimizer.zero_grad, wrapped, inputs, optimizer.step)
    return Side(step, model.named, job.world)


def our_muon(job):
    model = job.model()
    sync = muon.Muon(model.parameters(), job.group, matrices_of(model))
    step = stepper(sync.zero_grad, model, job.rows(job.count), sync.finish, sync.step)
    return Side(step, model.named)


def their_muon(job):
    """With our iteration, which does not round to bfloat16."""
    _muon._zeropower_via_newtonschulz = lambda gradient, *_: muon.orthogonalize(gradient)
    model = job.model()
    wrapped, matrices = DistributedDataParallel(model), matrices_of(model)
    optimizer = torch.optim.Muon(matrices, adjust_lr_fn="match_rms_adamw")
    others = job.optimizer([p for p in model.parameters() if p not in set(matrices)])
    inputs = job.rows(job.count / job.world)
    step = stepper(wrapped.zero_grad, wrapped, inputs, optimizer.step, others.step)
    return Side(step, model.named, job.world)


def matrices_of(model):
    for p in model.parameters():
        vars(p).pop("matrix_rows", None)  # torch.optim.Muon takes the fused qkv as one matrix
    return [p for p in model.blocks.parameters() if p.dim() > 1]


def our_zero(stage, job):
    model, options = job.model(), dict(reduce_scatter=harness.reduce_scatter)  # gloo's is slow
    kind = fsdp.FSDP if stage == 3 else partial(zero.ZeRO, stage=stage)
    sharded = kind(model, job.group, make_optimizer=job.optimizer, **options)
    step = stepper(sharded.zero_grad, model, job.rows(job.count), sharded.finish, sharded.step)
    return Side(step, lambda: sharded.gather_full(model.named()))


def their_fsdp(reshard, job):
    model = job.model()
    for block in model.blocks.values():
        fully_shard(block, reshard_after_forward=reshard)
    fully_shard(model)
    optimizer, inputs = job.optimizer(model.parameters()), job.rows(job.count / job.world)

    def weights():
        return [(name, p.full_tensor()) for name, p in model.named()]

    return Side(stepper(optimizer.zero_grad, model, inputs, optimizer.step), weights, job.world)


# --- tensor and sequence parallelism: the whole batch on every rank


def our_tensor(parallelize, job):
    def cut(whole):
        part = parallelize(whole, job.group)
        return tensor_overlap.overlap(part, reduce_scatter=harness.reduce_scatter)

    model = job.model(cut)
    parameters = list(model.parameters())
    optimizer, inputs = job.optimizer(parameters), (job.tokens, None, job.targets, job.count)
    complete = partial(sequence_parallel.reduce_partial, parameters)  # without --sp nothing
    work = optimizer.zero_grad, model, inputs, complete, optimizer.step
    return Side(stepper(*work), model.named, job.world)


def our_sequence(whole, group):
    messages = tokens_messages(group)
    return sequence_parallel.parallelize_sequence(whole, group, False, *messages)


def their_tensor(sequence, job):
    """torchtitan's plan for Llama."""
    between = Shard(1) if sequence else Replicate()
    gather = dtensor.PrepareModuleInput(input_layouts=between, desired_input_layouts=Replicate())
    cut = {
        "embed.token": dtensor.RowwiseParallel(input_layouts=Replicate(), output_layouts=between),
        "head.enter": gather,
        "head.out": dtensor.ColwiseParallel(output_layouts=Shard(-1), use_local_output=False),
    }
    for name in ("attn.enter", "mlp.enter"):
        cut[f"blocks.*.{name}"] = gather
    for name in ("attn.qkv", "mlp.gate", "mlp.up"):
        cut[f"blocks.*.{name}"] = dtensor.ColwiseParallel()
    for name in ("attn.proj", "mlp.down"):
        cut[f"blocks.*.{name}"] = dtensor.RowwiseParallel(output_layouts=between)
    if sequence:
        for name in ("blocks.*.attn_norm", "blocks.*.mlp_norm", "head.norm"):
            cut[name] = dtensor.SequenceParallel()
    mesh = init_device_mesh(job.device.type, (job.world,))
    model = dtensor.parallelize_module(job.model(), mesh, cut)
    optimizer = job.optimizer(model.parameters())

    def loss(*inputs):
        value = model(*inputs)
        return value.to_local() if isinstance(value, DTensor) else value

    def weights():
        return [(name, p.to_local() if isinstance(p, DTensor) else p) for name, p in model.named()]

    inputs = job.tokens, None, job.targets, job.count
    step = stepper(optimizer.zero_grad, loss, inputs, optimizer.step)
    step = dtensor.loss_parallel()(step)
    return Side(step, weights, job.world)


# --- pipelines


def stages(job, schedule):
    """This rank's stages, and their numbers."""
    mine, count = schedule.stages(job.rank), schedule.last + 1

    with torch.device("meta"):
        layers = stage_layers(job.config, count)
        parts = harness.split(lambda: families.build(job.config), layers, mine)
    return initialize.fill(harness.Stages(parts), 0, job.device, job.dtype), mine, count


def our_pipeline(name, job):
    schedule = find_schedule(name, job.world, MICROBATCHES)
    model = stages(job, schedule)[0]
    optimizer = job.optimizer(model.parameters())
    tokens, targets = job.tokens.chunk(MICROBATCHES), job.targets.chunk(MICROBATCHES)
    shape = (*tokens[0].shape, job.config.width)

    def forward(stage, m, x):
        return model[stage](tokens[m] if x is None else x, None, targets[m], job.count)

    line = zero_bubble.SplitPipeline(schedule, forward, shape, job.dtype, job.device)

    def step():
        optimizer.zero_grad()
        losses = line.run()
        optimizer.step()
        return sum(losses, torch.zeros((), device=job.device))

    return Side(step, model.named)


def their_pipeline(name, theirs, job):
    model, mine, count = stages(job, find_schedule(name, job.world, MICROBATCHES))
    optimizer = job.optimizer(model.parameters())
    parts = [PipelineStage(model[stage], stage, count, job.device) for stage in mine]

    options = dict(loss_fn=partial(gpt.CrossEntropy(), target_count=job.count), scale_grads=False)
    parts = parts if len(parts) > 1 else parts[0]
    run = getattr(schedules, theirs)(parts, MICROBATCHES, **options)

    def step():
        losses = []
        optimizer.zero_grad()
        last = {"target": job.targets, "losses": losses} if count - 1 in mine else {}
        run.step(*[job.tokens] * (0 in mine), **last)
        optimizer.step()
        return sum((x.detach() for x in losses), torch.zeros((), device=job.device))

    return Side(step, model.named)


# --- context parallelism: all sequences on every rank, of each its part


def our_context(job):
    core = context_parallel.Ring(job.group)
    model = context_parallel.parallelize_context(job.model(), core)
    sync, optimizer = ddp.DDP(model.parameters(), job.group), job.optimizer(model.parameters())
    where = core.positions(job.config.context).to(job.device)
    tokens, targets = (context_parallel.shard_sequence(t, where) for t in (job.tokens, job.targets))
    inputs = tokens, where, targets, job.count
    step = stepper(sync.zero_grad, model, inputs, sync.finish, optimizer.step)
    return Side(step, model.named)


def their_context(job):
    model, where = job.model(), torch.arange(job.config.context, device=job.device)
    tokens, targets = job.tokens.clone(), job.targets.clone()
    context = contextlib.nullcontext
    if job.device.type == "cuda":
        mesh, cut = init_device_mesh("cuda", (job.world,)), [tokens, targets, where]
        context = partial(their_context_parallel, mesh, buffers=cut, buffer_seq_dims=[1, 1, 0])
    else:  # their balanced ring takes the chunks that our zigzag does
        where = context_parallel.held_positions(job.config.context, job.rank, job.world)
        tokens, targets = (context_parallel.shard_sequence(t, where) for t in (tokens, targets))
        for block in model.blocks.values():
            block.attn.core = TheirRing(job.group)
    wrapped = DistributedDataParallel(model, gradient_as_bucket_view=True)
    optimizer = job.optimizer(model.parameters())
    inputs = tokens, where, targets, job.count / job.world
    take_step = stepper(optimizer.zero_grad, wrapped, inputs, optimizer.step)

    def step():
        with context():
            return take_step()

    return Side(step, model.named, job.world)


class TheirRing(torch.nn.Module):
    def __init__(self, group):
        super().__init__()
        self.group = group

    def forward(self, q, k, v):
        return TheirAttention.apply(q, k, v, self.group)


class TheirAttention(torch.autograd.Function):
    """q, k, v (B, H, T / N, D) of this rank's tokens through PyTorch's templates, with a CPU's
    flash kernel."""

    @staticmethod
    def forward(ctx, q, k, v, group):
        q, k, v = (t.contiguous() for t in (q, k, v))
        op = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        out, lse = templates._templated_ring_attention(group, 2, op, q, k, v, is_causal=True)[:2]
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.group = group
        return out

    @staticmethod
    def backward(ctx, grad):
        op = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
        saved = dict(zip(("query", "key", "value", "out", "logsumexp"), ctx.saved_tensors))
        given = dict(grad_out=grad.contiguous(), grad_out_name="grad_out", **saved)
        grads = templates._templated_ring_attention_backward(
            ctx.group, 2, op, **given, is_causal=True, dropout_p=0.0
        )
        return *grads[:3], None


# --- experts


def our_experts(job):
    model = job.model(lambda whole: expert_parallel.parallelize_experts(whole, job.group))
    parameters = list(model.parameters())
    optimizer, inputs = job.optimizer(parameters), job.rows(job.count)
    complete = partial(expert_parallel.sum_replicated_gradients, parameters, job.group)
    step = stepper(optimizer.zero_grad, model, inputs, complete, optimizer.step)
    return Side(step, model.named)


def their_experts(dealt_out, job):
    """dealt_out: compare those weights that a rank has where experts are dealt out."""
    model = job.model()
    for block in model.blocks.values():
        block.mlp.dispatch.combine = loop_over_experts

    def own_weights():
        for name, p in model.named():
            yield name, p.chunk(job.world)[job.rank] if dealt_out and ".experts." in name else p

    return their_ddp(job, model)._replace(weights=own_weights)


def loop_over_experts(sent, experts):
    """In place of Dispatch.combine: each expert computes its own tokens, found by its mask."""
    x, weights, chosen = sent
    y = torch.zeros_like(x)
    for e in range(len(experts.up)):
        token, choice = torch.where(chosen == e)
        hidden = F.gelu(x[token] @ experts.up[e].t(), approximate="tanh")
        rows = hidden @ experts.down[e].t() * weights[token, choice].unsqueeze(1)
        y = y.index_add(0, token, rows)
    return y


# --- the pairs


class Pair(NamedTuple):
    """The name of theirs, two functions of a Job that make a Side, what differs from the model's
    preset, and the optimizers."""

    name: str
    ours: Callable
    theirs: Callable
    fields: dict = {}
    kinds: tuple = tuple(KINDS)


LLAMA = dict(family="llama")  # DTensor and PyTorch's pipelines have nothing for a tied matrix
EXPERTS = dict(experts=8)
LOOP = "loop over all experts"
LONG = dict(context=512)  # a row for each of 4 ranks
PAIRS = {
    "ddp": Pair("DistributedDataParallel", our_ddp, their_ddp),
    "zero-2": Pair("FSDP2, blocks kept", partial(our_zero, 2), partial(their_fsdp, False)),
    "zero-3": Pair("FSDP2, blocks freed", partial(our_zero, 3), partial(their_fsdp, True)),
    "muon": Pair("torch.optim.Muon", our_muon, their_muon, dict(width=256), ("adamw",)),
    "context": Pair("context_parallel", our_context, their_context, LLAMA | dict(context=2048)),
    "documents": Pair("padded rows", partial(documents, False), partial(documents, True), LONG),
    "grouped": Pair(LOOP, our_ddp, partial(their_experts, False), EXPERTS),
    "experts": Pair(LOOP, our_experts, partial(their_experts, True), EXPERTS),
}
for name, theirs, parallelize in (
    ("tensor", "DTensor", tensor_parallel.parallelize_tensors),
    ("sequence", "DTensor, sequence parallel", our_sequence),
):
    both = partial(our_tensor, parallelize), partial(their_tensor, name == "sequence")
    PAIRS[name] = Pair(theirs, *both, LLAMA)
for name, theirs in (
    ("gpipe", "ScheduleGPipe"),
    ("1f1b", "Schedule1F1B"),
    ("interleaved", "ScheduleInterleaved1F1B"),
    ("zb-v", "ScheduleZBVZeroBubble"),
    ("dualpipev", "ScheduleDualPipeV"),
):
    both = partial(our_pipeline, name), partial(their_pipeline, name, theirs)
    PAIRS[name] = Pair(theirs, *both, LLAMA | dict(layers=8))


# --- comparing


class Alive(TorchDispatchMode):
    """While it is on, remembers all memory that operations make, and after each, if `counting`, how
    much is alive: `peak` is the most. Ledger would not see memory that is freed and brought back in
    place, as both FSDPs do."""

    def __init__(self):
        super().__init__()
        self.storages, self.counting, self.peak = weakref.WeakValueDictionary(), False, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(issubclass(kind, (DTensor, AsyncCollectiveTensor)) for kind in types):
            return NotImplemented  # they come back with the tensors that they wrap
        out = func(*args, **(kwargs or {}))
        for storage in (t.untyped_storage() for t in tensors_in(out) if t.device.type != "meta"):
            self.storages[storage._cdata] = storage
        if self.counting:
            self.peak = max(self.peak, sum(storage.nbytes() for storage in self.storages.values()))
        return out


def first_steps(job, build):
    """Build a side and take three steps: (side, losses, bytes at the peak of the third, all that
    the side holds included)."""
    if job.device.type == "cuda":
        before, side = torch.cuda.memory_allocated(), build(job)
        losses = [side.step(), side.step()]
        torch.cuda.reset_peak_memory_stats()
        losses.append(side.step())
        return side, losses, torch.cuda.max_memory_allocated() - before
    with Alive() as alive:
        side = build(job)
        losses = [side.step(), side.step()]
        alive.counting = True
        losses.append(side.step())
    return side, losses, alive.peak


def difference(job, ours, theirs):
    """The largest relative difference, on any rank, of the losses and of the weights. ours, theirs:
    what first_steps gives."""
    sums = [torch.stack(losses).double() / side.copies for side, losses, _ in (ours, theirs)]
    losses = torch.stack(sums)  # (2, steps)
    dist.all_reduce(losses)
    worst = {"loss": ((losses[0] - losses[1]) / losses[1]).abs().max().item(), "param": 0.0}
    mine, other = ({name: p.detach() for name, p in side.weights()} for side, *_ in (ours, theirs))
    assert mine.keys() == other.keys()
    floor = FLOOR[job.precision] * max(p.abs().max().item() for p in other.values())
    for name, p in other.items():
        apart = (mine[name].double() - p.double()).abs().max().item()
        worst["param"] = larger(worst["param"], apart / max(p.abs().max().item(), floor))
    everyone = torch.tensor(list(worst.values()), dtype=torch.float64, device=job.device)
    dist.all_reduce(everyone.nan_to_num_(torch.inf), op=dist.ReduceOp.MAX)
    return dict(zip(worst, everyone.tolist()))


def compare(run, name):
    """A pair's row: what each side needs, or how they differ."""
    pair = PAIRS[name]
    row = {"pair": f"{name} / {pair.name}", "differences": {}}
    for kind in pair.kinds:
        sides = None  # free the ones before
        gc.collect()
        job = Job(run, pair.fields, kind)
        sides = [first_steps(job, build) for build in (pair.ours, pair.theirs)]
        apart = difference(job, *sides)
        row["differences"][kind] = max(apart.values())
        wrong = [key for key, error in apart.items() if error > job.tolerance[key]]
        if wrong:
            values = ", ".join(f"{key} {apart[key]:.1e}" for key in wrong)
            return row | {"failed": f"differs, with {kind}: {values}"}
    times = benchmarks.race([side.step for side, *_ in sides], run.args.turns, STEPS, job.device)
    row["tokens_per_s"] = [job.count / statistics.median(seconds) for seconds in times]
    row["ratio"] = benchmarks.quartiles(times[1], times[0])
    peaks = run.gather([peak for *_, peak in sides])
    row["peak_bytes"] = [max(of_ranks) for of_ranks in zip(*peaks)]
    ratios = [ours / theirs for ours, theirs in peaks]
    row["memory"] = [min(ratios), statistics.median(ratios), max(ratios)]
    return row


def line(row):
    """A row as the table shows it."""
    if "failed" in row:
        return f"| {row['pair']} | {row['failed']} |"
    cells = [row["pair"], *(f"{rate:,.0f}" for rate in row["tokens_per_s"])]
    cells += [benchmarks.shown(row["ratio"]), *(f"{n / 1e6:.1f}" for n in row["peak_bytes"])]
    cells.append(benchmarks.shown(row["memory"]))
    cells.append(", ".join(f"{kind} {error:.0e}" for kind, error in row["differences"].items()))
    return f"| {' | '.join(cells)} |"


def demo(run):
    warnings.simplefilter("ignore")
    kind = "bfloat16, gpt2" if run.device.type == "cuda" else "float32, tiny"
    run.print(f"\n{run.world} ranks, {dist.get_backend()}, {kind}")
    run.print("| | tokens/s | theirs | ratio | peak MB | theirs | ratio | differences |")
    run.print("|---" * 8 + "|")
    rows = []
    for name in run.args.only or PAIRS:
        rows.append(compare(run, name))
        run.print(line(rows[-1]))
    if run.args.json and run.rank == 0:
        with open(run.args.json, "w") as file:
            json.dump(rows, file)
    return int(any("failed" in row for row in rows))


def main():
    p = benchmarks.parser(__doc__, turns=15)
    p.add_argument("--nproc", type=int, choices=[2, 4], default=2, help="ranks")
    p.add_argument("--device", choices=["cpu", "cuda"], default="cpu", help="of the ranks")
    why = "some of " + ", ".join(PAIRS)
    p.add_argument("--only", nargs="+", choices=list(PAIRS), metavar="NAME", help=why)
    p.add_argument("--json", metavar="FILE", help="write the rows as JSON")
    p.set_defaults(backend=None)
    launch(demo, p.parse_args())


if __name__ == "__main__":
    harness.script(main)
