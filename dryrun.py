"""Dry run: what a training run of any size would hold, send and take, from the training code itself, on one process.

`train.train` runs unchanged, as chosen ranks of a job of any size, on fake tensors and a fake process group: shapes, dtypes and
storages, but no memory, no network and no values. The ledger that a real run's receipt is made of counts here too: bytes held
and sent are those of a real run, by construction, and tests hold eleven layouts against real ones to the byte.

    run.groups(...)    from here on tensors are fake (FakeTensorMode); the groups were made for real, by a fake backend
    a value is read    .item() gives 1; experts' all-to-alls get sizes instead, as if routing were even
    each operation     the ledger counts bytes; the meter counts FLOPs, and seconds of a device and of links as described
    pipeline.play      notes when each action began and ended, by the meter's clock

Time of an operation: max(FLOPs / peak, bytes in and out / memory bandwidth); of a collective on n ranks: alpha log2 n + beta
times what a ring algorithm sends, on the slowest link between its ranks. An action takes max(its computing, its asynchronous
messages) + the messages that it waits for: what the code starts with async_op overlaps with the action that starts it, no
more. (So does a ring's next block of keys.) pipeline.simulate plays the schedule with these times, on all stages; then comes
what follows the last action: gradients still on their way, the norm, the optimizer, ZeRO's new weights.

One constant makes these rates real: EFFICIENCY, the part of a data sheet's figure that large operations reach. It is the same
for all devices, operations and links, and fitted to nothing here. Operations are taken as the code launches them: none fused.
Not in it: the time to launch a kernel, allocators' waste, buffers of nccl, the CUDA context; stragglers, failures, power;
kernels that differ by device (attention is the CPU's: alike in what it keeps, with grouped keys as they are).

MFU counts model FLOPs as PaLM does (6 N_matmul + 12 L T C a token, no discount for causality; nothing for recomputation); the
FLOPs of a stage are those of its operations, a causal attention's as half.

    python train.py --preset llama3-405b --dp 64 --cp 2 --tp 8 --pp 16 --zero 1 --sp --gather-again --param-dtype bfloat16 \\
        --batch 1024 --microbatches 16 --dry-run
    python train.py --preset llama3-70b --gpus 512 --batch 512 --param-dtype bfloat16 --plan
    python train.py --preset llama3-70b --tp 8 --sp --zero 1 --batch 8 --microbatches 8 --param-dtype bfloat16 --dry-run \\
        --plot docs/scaling
    python -m benchmarks.published                                                beside what others measured

Llama 3, arXiv:2407.21783; PaLM, arXiv:2204.02311, appendix B; Hockney 1994 (alpha, beta).
"""

import contextlib
import copy
import itertools
import math
import os
import types
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

import context_parallel
import expert_parallel
import harness
import ledger
import pipeline
import tensor_parallel
import zero
from harness import Refused

# Large bf16 products reach 80% of an H100's data sheet, 86% of an A100's (S. Bekman, ml-engineering, "Maximum Achievable Matmul
# FLOPS"); nccl's large all-reduces about 80% of NVLink's (360 of 450 GB/s, nccl-tests)
EFFICIENCY = 0.8
ALPHA = {"intra": 2e-6, "inter": 5e-6}  # seconds a message


class Device(NamedTuple):
    memory: float  # bytes
    flops: float  # FLOP/s of dense bf16 products
    bandwidth: float  # bytes/s of its memory


# The makers' data sheets, SXM modules; a DGX B200 has 1,440 GB for its 8
DEVICES = {
    "a100": Device(80e9, 312e12, 2.039e12),
    "h100": Device(80e9, 989e12, 3.35e12),
    "h200": Device(141e9, 989e12, 4.8e12),
    "b200": Device(180e9, 2250e12, 8e12),
}


class Cluster(NamedTuple):
    device: Device
    node: int  # devices in a node
    intra: float  # bytes/s of a device's link inside its node, one way
    inter: float  # to other nodes

    def link(self, ranks):
        """(seconds a message, bytes/s) between some ranks. Those of a node share what crosses to others among their links."""
        nodes = len({rank // self.node for rank in ranks})
        if nodes == 1:
            return ALPHA["intra"], self.intra * EFFICIENCY
        return ALPHA["inter"], min(self.intra, self.inter * len(ranks) / nodes) * EFFICIENCY


class Part(NamedTuple):
    """Seconds of computing, of messages beside it, and of messages that are waited for."""

    compute: float = 0.0
    beside: float = 0.0
    waited: float = 0.0

    @property
    def seconds(self):
        return max(self.compute, self.beside) + self.waited


class Meter(TorchDispatchMode):
    """While it is on, gives every operation its time and counts FLOPs; whoever reads a value gets a 1.

    names: {name of a group: what it is called}, as the ledger has them. `parts`: a Part for each span between two calls of
    `clock`; `flops`; `message`: bytes of the largest message between stages."""

    def __init__(self, cluster, names, one_chunk=True):
        super().__init__()
        self.cluster, self.names, self.one_chunk = cluster, names, one_chunk
        self.known, self.links = {}, {}
        self.begin()

    def begin(self):
        self.parts, self.part, self.now, self.flops, self.message = [], [0.0, 0.0, 0.0], 0.0, 0, 0

    def clock(self, device=None):
        """Seconds so far, in place of pipeline.clock."""
        self.parts.append(Part(*self.part))
        self.part = [0.0, 0.0, 0.0]
        self.now += self.parts[-1].seconds
        return self.now

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten._local_scalar_dense.default:
            return 1.0 if args[0].is_floating_point() else 1
        if func is torch.ops.aten._grouped_mm.default:  # PyTorch's own rule for it knows bfloat16 alone
            a, b = args[:2]
            out = a.new_empty(*[len(kwargs["offs"] if "offs" in kwargs else args[2])] * (b.dim() == 2), len(a), b.shape[-1])
        else:
            out = func(*args, **(kwargs or {}))
        if func.namespace == "c10d":
            self.send(func, args)
        elif func.namespace == "aten":
            self.compute(func, args, out)
        return out

    def compute(self, func, args, out):
        if func not in self.known:
            name = func.overloadpacket.__name__
            self.known[func] = (
                func.is_view or name in FREE or name.startswith(("empty", "new_empty")),
                name in LOOKUPS,
                FLOPS.get(name),
            )
        free, lookup, flops = self.known[func]
        if free:
            return
        given, made = (sum(t.nbytes for t in ledger.tensors_in(x)) for x in (args, out))
        moved = (
            2 * made if lookup else given + (made or given)
        )  # a fused optimizer returns nothing, and writes what it is given
        seconds = moved / (self.cluster.device.bandwidth * EFFICIENCY)
        if flops:
            count, result = flops(args, out), next(ledger.tensors_in(out))
            self.flops += count
            rate = self.cluster.device.flops * 2 / result.element_size()  # 32 bits at half the rate of 16, as TF32
            seconds = max(seconds, count / (rate * EFFICIENCY))
        self.part[0] += seconds

    def send(self, func, args):
        name = func.name().removeprefix("c10d::")
        if name not in ledger.OPERATIONS:
            return
        operation, group, payload, wire = ledger.message(name, args)
        axis = self.names.get(group.group_name)
        if axis in ("down", "up"):  # between stages: pipeline.simulate's
            self.message = max(self.message, payload * (operation == "send"))
            return
        if group not in self.links:
            self.links[group] = self.cluster.link(dist.get_process_group_ranks(group))
        alpha, speed = self.links[group]
        rounds = 1 if operation in ("send", "recv") else math.ceil(math.log2(group.size()))
        rounds *= 2 if operation == "all_reduce" else operation != "recv"
        if func not in self.known:
            names = [a.name for a in func._schema.arguments]
            self.known[func] = names.index("async_op") if "async_op" in names else len(names)
        index = self.known[func]
        waited = len(args) > index and not args[index] or axis == "ep" and self.one_chunk  # sent, and waited for at once
        self.part[2 if waited else 1] += rounds * alpha + wire / speed


def attention(products, *args):
    """FLOPs of so many products of queries (B, H, n, D) with keys (B, H_kv, m, D), half of them where causal."""
    q, k, causal = args[0], args[1], args[-1] is True
    return products * 2 * math.prod(q.shape) * k.shape[2] // (2 if causal else 1)


def counted(packet):
    return lambda args, out: flop_registry[packet](*args, out_val=out)


# Operation -> FLOPs, of its arguments and results
FLOPS = {name: counted(getattr(torch.ops.aten, name)) for name in ("mm", "addmm", "bmm", "baddbmm")}
FLOPS["_grouped_mm"] = lambda args, out: 2 * args[0].numel() * args[1].shape[-1]
FLOPS["_scaled_dot_product_flash_attention_for_cpu"] = lambda args, out: attention(2, *args)
FLOPS["_scaled_dot_product_flash_attention_for_cpu_backward"] = lambda args, out: attention(5, *args[1:])
LOOKUPS = ("embedding", "index_select", "index", "gather")  # they read no more than they give
FREE = ("_unsafe_view", "_reshape_alias", "lift_fresh")  # views in all but name


# --- a rank


class DryRun(harness.Run):
    """A Run without values: one step of train.train, as the second of many is. Use it within `without_values`."""

    def __init__(self, args, rank, world, cluster, modes):
        super().__init__(args, rank, world, torch.device("cpu"))
        self.cluster, self.modes, self.record = cluster, modes, []
        self.draw = lambda name, shape, init, seed: torch.empty(shape)

    def load(self):
        self.corpus = types.SimpleNamespace(name="no text", tokens=())

    def same(self, value, what, advice):
        """There is no one to compare with."""

    def print(self, *args, **kwargs):
        """One rank of many is no place to talk."""

    def fill(self, *args):
        self.leave_values()
        return super().fill(*args)

    def initial(self, *args):
        self.leave_values()
        return super().initial(*args)

    def leave_values(self):
        """From the weights on nothing has a value. (What makes the groups still needs some.)"""
        self.meter = Meter(self.cluster, self.ledger.names, self.args.expert_chunks == 1)
        self.modes.enter_context(mock.patch.object(pipeline, "clock", self.meter.clock))
        self.modes.enter_context(FakeTensorMode(allow_non_fake_inputs=True))  # buffers on the meta device
        self.modes.enter_context(self.meter)
        self.modes.enter_context(self.watching)  # modes are left in the reverse order, also where an error ends it all

    def microbatches(self, step, part=0, parts=1, pieces=None, split="train"):
        windows = torch.zeros(self.args.batch // parts, self.config.context + 1, dtype=torch.int64)
        batch = windows[:, :-1], windows[:, 1:], torch.zeros(len(windows), dtype=torch.int64)
        return list(zip(*(t.tensor_split(self.args.microbatches) for t in batch)))

    def update(self, step, model, *args, **kwargs):
        super().update(step, model, *args, **kwargs)
        self.size = sum(p.numel() for _, p in model.named())

    def steps(self, optimizer):
        """Of the first step only the optimizer's states are needed; the second is the one that the ledger watches."""
        optimizer.step()
        self.ledger.watch([t for kind in self.lasting(optimizer).values() for t in kind])
        self.meter.begin()
        self.restart_clock()
        self.watching.enter_context(self.ledger)
        yield self.measured
        self.meter.clock()
        held = {kind: ledger.storage_bytes(tensors) for kind, tensors in self.lasting(optimizer).items()}
        self.held = held | {"gathered": getattr(optimizer, "gathered_peak", 0), "activations_peak": self.ledger.peak}

    def receipt(self, layout, sent=(), held=(), notes=()):
        self.formulas = sent, held
        return 0


class Played(NamedTuple):
    """What a rank of a dry run did: its stages, how many parameters they have; the ledger's `sent` and `held`, and train.py's
    formulas for them; FLOPs; a Part for each action; one for all that is no action's; bytes of a message between stages."""

    rank: int
    stages: tuple
    parameters: int
    sent: dict
    held: dict
    formulas: tuple
    flops: int
    actions: dict
    rest: Part
    message: int

    @property
    def memory(self):
        return sum(self.held.values())


def even(dispatch, sizes, assignments):
    """In place of ExpertDispatch.read: rows to send and to receive, chunks x N each, if every expert is chosen as often."""
    ends = [sum(dispatch.sizes[: r + 1]) for r in range(len(dispatch.sizes))]
    cuts = [[0, *(n * end // ends[-1] for end in ends)] for n in assignments]
    send = [[b - a for a, b in zip(cut, cut[1:])] for cut in cuts]
    return send, [[n[dist.get_rank(dispatch.group)]] * len(n) for n in send]


def play(args, rank, cluster, brief=False, routing=even):
    """Play one step of a rank of the layout in `args`, on tensors without values. Returns what it did as a Played.

    brief: of the micro-batches only the first and the last, for their times. routing(dispatch, sizes, assignments): see `even`.
    Needs a process that has no process group."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    import train  # which imports this file

    args, world, make = copy.copy(args), args.dp * args.cp * args.tp * args.pp, pipeline.make
    # Of three steps the second is played: validation comes after the last
    vars(args).update(steps=3, prove=0, eval_every=0, sample=0, out=None, resume=False, export=None, log=None, wandb=None)
    vars(args).update(profile=None, compile=False, plot=None)
    if brief and args.microbatches > 2:
        whole, keep = make(args.schedule, args.pp, args.microbatches, args.chunks), {0: 0, args.microbatches - 1: 1}
        two = [[a._replace(microbatch=keep[a.microbatch]) for a in row if a.microbatch in keep] for row in whole]
        args.batch, args.microbatches, make = 2 * args.batch // args.microbatches, 2, lambda *_: two
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)
    try:
        with contextlib.ExitStack() as modes:
            modes.enter_context(mock.patch.object(dist, "get_backend", lambda group=None: args.backend))
            modes.enter_context(mock.patch.object(expert_parallel.ExpertDispatch, "read", routing))
            modes.enter_context(mock.patch.object(pipeline, "make", make))
            run = DryRun(args, rank, world, cluster, modes)
            train.train(run)
        meter, actions = run.meter, [action for *_, action in run.record]
        rest = Part(*(sum(seconds) for seconds in zip(*meter.parts[::2])))
        stages = tuple(sorted({action.stage for action in actions}))
        parts = dict(zip(actions, meter.parts[1::2]))
        return Played(rank, stages, run.size, run.ledger.sent, run.held, run.formulas, meter.flops, parts, rest, meter.message)
    finally:
        dist.destroy_process_group()


def play_all(args, ranks, cluster, brief=False):
    """play() for several ranks, in as many processes as there are cores."""
    if len(ranks) == 1:
        return [play(args, ranks[0], cluster, brief)]
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    torch.set_num_threads(1)  # a thread pool does not survive a fork
    with ProcessPoolExecutor(min(cores, len(ranks)), get_context("fork")) as pool:
        return list(pool.map(play, *zip(*[(args, rank, cluster, brief) for rank in ranks])))


def chosen(args):
    """The ranks of --ranks: numbers, or first, middle, last, all, the first rank of such stages."""
    each = args.dp * args.cp * args.tp
    some = args.ranks or ("all" if args.pp <= 4 else "first,middle,last")
    named = {"first": [0], "middle": [args.pp // 2 * each], "last": [(args.pp - 1) * each]}
    named["all"] = [rank * each for rank in range(args.pp)]
    try:
        ranks = [rank for word in some.split(",") for rank in named.get(word) or [int(word)]]
    except ValueError:
        ranks = [-1]
    if not all(0 <= rank < args.pp * each for rank in ranks):
        raise Refused(f"--ranks {some}: give first, middle, last, all, or numbers below {args.pp * each}, with commas between")
    return sorted(set(ranks))


# --- the step


class Estimate(NamedTuple):
    """Seconds of a step, and of the busiest rank's parts of it, which add up to it; model FLOPs a device and second."""

    seconds: float
    parts: dict
    rate: float


def estimate(args, config, cluster, played):
    """The Estimate of a step, from some of its ranks. A stage that none of them played is like the nearest that is no end of
    the model, by its number of layers."""
    schedule = pipeline.make(args.schedule, args.pp, args.microbatches, args.chunks)
    owner, last = pipeline.owners(schedule), args.microbatches - 1
    layers = [len(layers) for layers in pipeline.stage_layers(config, len(owner))]
    known = {}  # (stage, kind, whether of the last micro-batch): Part
    for rank in played:
        end = max(action.microbatch for action in rank.actions)
        for action, part in sorted(rank.actions.items(), key=lambda item: item[0].microbatch):
            known[action.stage, action.kind, action.microbatch == end] = part
            known.setdefault((action.stage, action.kind, action.microbatch != end), part)  # of a single micro-batch
    stages = sorted({stage for stage, *_ in known})

    def parts(action):
        near = action.stage
        if near not in stages:
            near = min(stages, key=lambda s: (s in (0, len(owner) - 1), abs(s - action.stage)))
        found = [known.get((near, kind, action.microbatch == last)) for kind in (action.kind, "I", "W", "B")]
        part, both = found[0], found[1] and found[2]
        if part is None:  # of a backward in two parts where it was played as one, or the other way round
            part = Part(*(a + b for a, b in zip(*found[1:3]))) if both else Part(*(a / 2 for a in found[3]))
        return Part(*(a * layers[action.stage] / layers[near] for a in part)) if near != action.stage else part

    each = args.dp * args.cp * args.tp
    alpha, speed = cluster.link([0, each])
    message = max(rank.message for rank in played)
    # ddp.py waits for the network after the last action, zero.py at the end of it: the stage before waits too
    late = args.zero == 0 and args.dtype == args.param_dtype == args.reduce_dtype

    def seconds_of(action):
        part = parts(action)
        return part.compute + part.waited if late else part.seconds

    spans = pipeline.simulate(schedule, transfer=alpha + message / speed, time=seconds_of)
    over = [sum(max(0.0, part.beside - part.compute) for *_, a in row for part in [parts(a)]) * late for row in spans]
    makespan = max(row[-1][1] + more for row, more in zip(spans, over))
    rest = max((rank.rest for rank in played), key=lambda part: part.seconds)
    busy = max(([parts(action) for *_, action in row] for row in spans), key=lambda row: sum(part.seconds for part in row))
    shown = {"computing": sum(part.compute for part in busy), "waiting for messages": sum(part.waited for part in busy)}
    shown["gradients, weights not hidden"] = sum(max(0, part.beside - part.compute) for part in busy)
    shown["pipeline's bubble"] = makespan - sum(shown.values())
    shown["after the last action"] = rest.seconds
    seconds = makespan + rest.seconds
    flops = config.flops_per_token() * args.batch * config.context
    return Estimate(seconds, shown, flops / seconds / (each * args.pp))


def step_of(args, config, cluster):
    """The Estimate of a layout, from two micro-batches of its first, middle and last stage; and what these ranks played."""
    each = args.dp * args.cp * args.tp
    played = play_all(args, sorted({0, args.pp // 2 * each, (args.pp - 1) * each}), cluster, brief=True)
    return estimate(args, config, cluster, played), played


def cluster_of(args):
    """The Cluster that the flags describe."""
    device = DEVICES.get(args.gpu)
    if device is None:
        try:
            figures = args.gpu.split("=")[1].upper().replace("/S", "").split(",")
            units = ("GB", 1e9), ("TFLOP", 1e12), ("TB", 1e12)
            device = Device(*(float(text.removesuffix(unit)) * size for text, (unit, size) in zip(figures, units, strict=True)))
        except (IndexError, ValueError):
            hint = "or NAME=80GB,989TFLOP/s,3.35TB/s: memory, dense bf16 rate, memory bandwidth"
            raise Refused(f"--gpu {args.gpu} is not known: choose one of {', '.join(DEVICES)}, {hint}") from None
    return Cluster(device, args.nodes_of, args.intra, args.inter)


def main(args):
    """A dry run from train.py's flags."""
    import train

    harness.check_plot(args)
    cluster, config = cluster_of(args), train.configure(args)
    args.backend = args.backend or ("gloo" if args.device == "cpu" else "nccl")
    if args.plan:
        return plan(args, config, cluster)
    train.check(args, config)
    if args.plot:
        return plot(args, config, cluster)
    played = play_all(args, chosen(args), cluster)
    report(args, config, cluster, played, estimate(args, config, cluster, played))


def report(args, config, cluster, played, step):
    """Print what the ranks held and sent, and the step's estimate."""
    world, device = args.dp * args.cp * args.tp * args.pp, args.gpu.split("=")[0]
    schedule = pipeline.make(args.schedule, args.pp, args.microbatches, args.chunks)
    layers = pipeline.stage_layers(config, len(pipeline.owners(schedule)))
    human, kinds = ledger.human, ("parameters", "gradients", "optimizer", "gathered", "activations_peak")
    print(f"dry run: {config.parameters():,} parameters, {layout(args)}, {args.microbatches} micro-batches: {world:,} ranks")
    print(f"weights in {args.param_dtype}, gradients summed in {args.reduce_dtype}, optimizer in {args.dtype}\n")
    heads = ("weights", "gradients", "optimizer", "gathered", "activations", "at the peak", "FLOPs")
    print(f"  {'rank':>6s}{'stage: layers':>20s}{'parameters':>17s}" + "".join(f"{head:>13s}" for head in heads))
    for rank in played:
        stages = " ".join(f"{s}: {layers[s].start}-{layers[s].stop - 1}" for s in rank.stages)
        cells = "".join(f" {human(size)}" for size in (*(rank.held[kind] for kind in kinds), rank.memory))
        fits = f"fits {device}" if rank.memory <= cluster.device.memory else f"too much for {device}"
        print(f"  {rank.rank:6d}{stages:>20s}{rank.parameters:17,}{cells}{rank.flops:13.4g}  {fits}")
    print("\n  sent a step, on a ring (calls)" + "".join(f"{f'rank {rank.rank}':>22s}" for rank in played))
    for op, group in sorted({key for rank in played for key in rank.sent}):
        rows = [rank.sent.get((op, group), (0, 0, 0.0)) for rank in played]
        if any(wire for *_, wire in rows):
            print(f"  {f'{op} in {group}':<30s}" + "".join(f"{f'{human(wire)} ({calls})':>22s}" for calls, _, wire in rows))
    links = f"nodes of {cluster.node}, {cluster.intra / 1e9:g} GB/s inside, {cluster.inter / 1e9:g} GB/s between"
    print(f"\n  a step on {device}, {links}, all at {EFFICIENCY:.0%}")
    for name, seconds in step.parts.items():
        print(f"    {name:<30s}{seconds:10.4g} s{seconds / step.seconds:8.1%}")
    tokens = args.batch * config.context / step.seconds
    rate = f"{step.rate / 1e12:.0f} TFLOP/s a device, MFU {step.rate / cluster.device.flops:.1%}"
    print(f"    {'together':<30s}{step.seconds:10.4g} s   {rate}, {tokens:,.0f} tokens/s")
    days = f", {args.tokens / tokens / 86400:,.1f} days for {args.tokens:.4g} tokens" if args.tokens else ""
    print(f"    {config.flops_per_token() * args.batch * config.context:.4g} model FLOPs a step{days}")


def layout(args):
    """A layout in words."""
    text = " ".join(f"{axis} {getattr(args, axis)}" for axis in ("dp", "cp", "tp", "pp", "ep") if getattr(args, axis) > 1)
    text += " sp" * args.sp + f" zero {args.zero}" * (args.zero > 0)
    text += f" recompute {args.recompute}" * (args.recompute != "none")
    return text + f" {args.schedule}{f' x {args.chunks}' if args.chunks else ''}" * (args.pp > 1) or "one device"


# --- which layout


def candidates(args, config, gpus):
    """Layouts of so many devices that train.py can run, as copies of args."""

    def divisors(n, most):
        return [d for d in range(1, min(n, most) + 1) if n % d == 0]

    schedules = [("1f1b", 1), ("interleaved", 2), ("interleaved", 4), ("zb-h1", 1)]
    for tp in divisors(gpus, 32):
        for pp, cp in itertools.product(divisors(gpus // tp, 64), (1, 2, 4, 8, 16)):
            dp, rest = divmod(gpus, tp * pp * cp)
            if rest or config.kv_heads % tp or config.context % (2 * cp * tp) or args.batch % dp or dp * cp % args.ep:
                continue
            for (schedule, chunks), rows in itertools.product(schedules if pp > 1 else schedules[:1], (1, 2, 4)):
                m, rest = divmod(args.batch // dp, rows)
                if rest or not m or config.layers < pp * chunks or chunks > 1 and m % pp or pp > 1 and m < pp:
                    continue
                sizes = dict(dp=dp, cp=cp, tp=tp, pp=pp, sp=tp > 1, microbatches=m, schedule=schedule, prove=0)
                sizes["chunks"] = chunks if chunks > 1 else None
                stages = (0, 1, 2, 3) if dp * cp > 1 else (0,)
                for stage, recompute in itertools.product(stages, ("none", "selective", "block")):
                    one = copy.copy(args)
                    vars(one).update(sizes | {"zero": stage, "recompute": recompute})
                    yield one


def rough(args, config, cluster):
    """({part of a step: seconds}, bytes held by the first stage), by the papers' formulas: good enough to choose by."""
    dp, cp, tp, pp, m = args.dp, args.cp, args.tp, args.pp, args.microbatches
    e, reduced, master = (harness.DTYPES[d].itemsize for d in (args.param_dtype, args.reduce_dtype, args.dtype))
    chunks, layers, rows, length = args.chunks or 1, -(-config.layers // pp), args.batch // dp, config.context // cp
    speed = {"tp": cluster.link(range(tp))[1], "pp": cluster.link([0, dp * cp * tp])[1]}
    speed |= {"cp": cluster.link(range(0, cp * tp, tp))[1], "dp": cluster.link(range(0, dp * cp * tp, tp))[1]}
    again = 1 / 3 if args.recompute == "block" else 0.0
    rate, memory = cluster.device.flops * EFFICIENCY * 2 / e, cluster.device.bandwidth * EFFICIENCY
    attention = 6 * layers * config.context * config.width * rows * length / tp / rate
    work = config.flops_per_token() * rows * length / tp / pp / rate - attention

    def kept(recompute):
        """Bytes of a block for backward, of all micro-batches."""
        size = harness.activation_bytes(config, 1, e, 1 if args.sp else tp, recompute) / (tp if args.sp else 1)
        return size / config.context * rows * length

    whole = kept("none")
    size = tensor_parallel.parameters_held(config, tp, layers, head=pp == 1)
    # Activations and their gradients written and read, twice with what is not kept; gradients written, read and added up
    work = (work + 8 * layers * whole / memory) * (1 + again) + (args.recompute == "selective") * layers * whole / memory
    parts = {"computing": work + m * size * (2 * e + 2 * reduced) / memory}
    parts["tensor parallel"] = (
        tensor_parallel.bytes_sent(config, tp, rows * length, e, layers, recompute=args.recompute) / speed["tp"]
    )
    heads = config.heads // tp, config.kv_heads // tp, config.width // config.heads
    ring = context_parallel.bytes_sent("ring", cp, 1, rows, length, *heads, e)
    parts["context parallel"] = max(0.0, layers * sum(ring.values()) / speed["cp"] - attention) * (cp > 1)
    third = sum(parts.values()) / m / 3
    parts["bubble"] = pipeline.BUBBLES[args.schedule][1](pp, m, chunks, third, third, third)
    message = rows / m * length * config.width * e / (tp if args.sp else 1) / speed["pp"] + ALPHA["inter"]
    parts["messages between stages"] = 2 * chunks * (m + pp) * message * (pp > 1)
    r, passes = ledger.all_but_one(dp * cp), m if args.zero > 1 and not args.reduce_once else 1
    weights = r * size * e * (0, 1, 1, 2 * m)[args.zero] / speed["dp"]
    gradients = r * size * reduced * (passes if args.zero else 2) / speed["dp"]
    if args.zero == 3:  # all of it beside computing; else gradients beside the backwards that complete them
        parts["data parallel"] = max(0.0, weights + gradients - 3 * third * m)
    else:
        parts["data parallel"] = max(0.0, gradients - 2 * third * passes) + weights
    states = zero.model_states(args.zero, dp * cp, e, reduced, 2 * master + (e != master) * master)
    flying = min(m, pp + (pp - 1) / chunks * (chunks > 1)) if pp > 1 else 1
    held = (layers * flying * kept(args.recompute) + (args.recompute != "none") * whole) / m
    held += (whole / m + 10 * rows / m * length * config.vocab / tp) * (pp == 1)  # logits, in 32 bits, and their gradient
    gathered = 2 * size * e / layers * (args.zero == 3)
    # At the optimizer's step no activations are left, but gradients in the masters' dtype are there too
    copied = (reduced != master) * master * size / (dp * cp if args.zero else 1)
    return parts, sum(states) * size + max(held + gathered, copied)


def plan(args, config, cluster):
    """Search the layouts of --gpus devices by `rough`, print the ten best, and play the best that truly fits."""
    import train

    gpus = args.gpus or args.dp * args.cp * args.tp * args.pp
    args.param_dtype = args.param_dtype or args.dtype
    args.reduce_dtype = args.reduce_dtype or args.param_dtype
    tried = [
        (sum(parts.values()), parts, held, one)
        for one in candidates(args, config, gpus)
        for parts, held in [rough(one, config, cluster)]
    ]
    fitting = sorted((row for row in tried if row[2] <= cluster.device.memory), key=lambda row: row[0])
    if not fitting:
        raise Refused(
            f"none of {len(tried)} layouts on {gpus} devices fits {cluster.device.memory / 1e9:g} GB: give more --gpus"
        )
    print(f"{len(tried)} layouts of {gpus:,} devices, of which {len(fitting)} may fit; by formulas, without some memory:\n")
    best = fitting[0]
    for i, (seconds, parts, held, one) in enumerate(fitting[:10]):
        worse = max(parts, key=lambda key: parts[key] - best[1][key])
        where = " (tp across nodes)" * (worse == "tensor parallel" and one.tp > cluster.node)
        loss = (parts[worse] - best[1][worse]) / best[0]
        why = (f"{worse} +{loss:.0%}{where}" if loss >= 0.005 else "as fast, by formulas") if i else "the best"
        rows = f"{one.batch // one.dp // one.microbatches} a micro-batch"
        print(f"  {i + 1:2d}  {seconds:9.4g} s {held / 1e9:7.1f} GB   {layout(one)}, {rows}: {why}")
    print()
    left_out, plays = 0.0, 0  # bytes: the least that formulas have left out of what was played
    for _, _, formula, one in fitting:
        if formula + left_out > cluster.device.memory:
            continue
        if (plays := plays + 1) > 6:
            break
        train.check(one, config)
        few = copy.copy(one)  # enough micro-batches for as many in flight as there are in the whole
        few.microbatches = min(one.microbatches, 2 * one.pp)
        few.batch = one.batch // one.microbatches * few.microbatches
        played = play_all(few, chosen(few), cluster)
        step, held = estimate(one, config, cluster, played), max(rank.memory for rank in played)
        fits = held <= cluster.device.memory
        rate = f"{step.seconds:.4g} s, MFU {step.rate / cluster.device.flops:.1%}"
        print(f"  played, {layout(one)}: {rate}, {held / 1e9:.1f} GB{'' if fits else ': too much'}")
        if fits:
            return
        left_out = min(left_out or math.inf, held - formula)
    print("  none of these fits when played, which counts what the formulas leave out: lower --batch, or give more --gpus")


def plot(args, config, cluster, sizes=tuple(2**k for k in range(3, 15))):
    """Step time, its parts and MFU from 8 to 16,384 devices: the layout with more data-parallel ranks, once with as many
    sequences for each of them (weak), once with one batch, a micro-batch for each of the most of them (strong)."""
    plt = harness.pyplot()
    figure, axes = plt.subplots(1, 2, figsize=(12, 4.5), layout="constrained")
    each, rows = args.cp * args.tp * args.pp, args.batch // args.dp // args.microbatches
    kinds = {"weak": {}, "strong": {}}
    for n in [n for n in sizes if n % each == 0]:
        one, m = copy.copy(args), {"weak": args.microbatches, "strong": sizes[-1] // n}
        one.dp = n // each
        one.batch = one.dp * args.microbatches * rows
        _, played = step_of(one, config, cluster)
        for kind, steps in kinds.items():
            one.microbatches, one.batch = m[kind], one.dp * m[kind] * rows
            steps[n] = estimate(one, config, cluster, played), n / one.batch
        found = [(kind, steps[n][0]) for kind, steps in kinds.items()]
        text = ", ".join(f"{kind} {s.seconds:9.4g} s, MFU {s.rate / cluster.device.flops:5.1%}" for kind, s in found)
        print(f"{n:6,} devices: {text}", flush=True)
    for ax, (kind, steps) in zip(axes, kinds.items()):
        bottom = [0.0] * len(steps)
        for part in next(iter(steps.values()))[0].parts:
            if not any(step.parts[part] for step, _ in steps.values()):
                continue  # no pipeline, no bubble
            heights = [step.parts[part] * scale for step, scale in steps.values()]
            ax.bar([f"{n:,}" for n in steps], heights, 0.8, bottom, label=part)
            bottom = [a + b for a, b in zip(bottom, heights)]
        for i, (step, _) in enumerate(steps.values()):
            text = f"{step.seconds:,.3g} s" if step.seconds < 1000 else f"{step.seconds:,.0f} s"
            ax.text(i, 0.02 * max(bottom), text, ha="center", va="bottom", rotation=90, color="white", fontsize=8)
        ax.tick_params(axis="x", rotation=45)
        ax.set(xlabel="devices", ylabel="devices x seconds, a sequence (in a bar: a step)", title=f"{kind} scaling")
        right, rates = ax.twinx(), [100 * step.rate / cluster.device.flops for step, _ in steps.values()]
        right.plot(range(len(steps)), rates, "ko-", label="MFU")
        right.set(ylabel="MFU, %", ylim=(0, 100 * EFFICIENCY))
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend([*handles, *right.lines], [*labels, "MFU"], fontsize=8, loc="outside lower center", ncols=6, frameon=False)
    figure.suptitle(f"{args.preset}: {layout(args)}, more devices by dp; {args.gpu.split('=')[0]}, estimated")
    harness.save(figure, args.plot)
