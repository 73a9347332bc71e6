"""Dry run: what a run of any size would hold, send and take, from the training code itself.

`train` of train.py runs unchanged on one process, as chosen ranks of a job of any size, on fake
tensors and a fake process group. There are shapes, dtypes and storages, but no memory, no network
and no values. The ledger that makes a real run's receipt counts here too, so bytes held and sent
are those of a real run. Tests hold twelve layouts against real runs, to the byte.

    run.groups(...)   before the weights are filled, groups are made by a fake backend
    run.fill(...)     from here on tensors are fake (simulator/fakes.py)
    .item()           returns 1; the experts' all-to-alls get sizes as if routing were even
    an operation      the ledger counts its bytes; the meter counts its FLOPs and its seconds
    an action         of the pipeline: `DryRun.watch` notes the meter's clock before and after it

An operation takes what simulator/kernels.py says of its kind: products by their shape, attention by
its kernel, the rest by bytes moved; or the time in which the host launches it, if that is longer.
With --compile the operations within blocks are fused. A message takes what simulator/links.py says
of its algorithm, size and place. Messages that the code starts with async_op overlap with the
action that starts them, and slow its computing down; they overlap with nothing else. An action
takes the longer of its computing and these messages, plus the messages that it waits for. The
simulator plays the schedule with these times, on all stages. Then comes what follows the last
action: gradients that are still on their way, the norm, the optimizer, ZeRO's new weights.

The constants are public measurements, none fitted to a run of benchmarks/published.py, which shows
how far off the estimates are. Left out: the allocator's waste, stragglers, failures, and what
attention keeps on a GPU beside what the CPU's kernel keeps. nccl's buffers and the CUDA context are
taken off a device's memory before a layout is said to fit (simulator/devices.py). Blocks that are
alike are played once (simulator/repeat.py).

With nccl RMSNorm is one operation, forward and backward, as torch's kernel for a GPU is, and keeps
its input. On a CPU it is many, and keeps two copies in float32. Messages between stages are held
until the step ends; nccl's until they are sent.

MFU counts model FLOPs as PaLM does: 6 N_matmul + 12 L T C a token, without a discount for causality
and nothing for recomputation (arXiv:2204.02311, appendix B). The FLOPs of a stage are those of its
operations, with half of a causal attention's.

    python train.py --preset llama3-8b --dp 2 --tp 4 --zero 1 --batch 16 --dry-run
    python train.py --preset llama3-70b --gpus 512 --batch 512 --param-dtype bfloat16 --plan
    python -m benchmarks.published      estimates beside what others measured
"""

import contextlib
import copy
import os
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensor
from torch.testing._internal.distributed.fake_pg import FakeStore

import expert_parallel
import pipeline
import proof
from harness.start import keep_autograd_forkable
from simulator import meter, repeat
from simulator.fakes import Fakes, KnowsDevices
from simulator.meter import Part


class Meter(KnowsDevices, meter.Meter):
    """simulator/meter.py's."""


class DryRun(proof.Run):
    """A Run without values: one step of train.train, as the second of many is. Use it within
    `without_values`."""

    make_ledger = repeat.Ledger
    measured = 1

    def __init__(self, args, rank, world, cluster, modes, repeats):
        super().__init__(args, rank, world, torch.device("cpu"), NoText())
        self.cluster, self.modes, self.repeats = cluster, modes, repeats
        self.actions = []

    @contextlib.contextmanager
    def watch(self, action):
        """Around each action of the pipeline: the meter makes it a Part of its own."""
        self.meter.clock()
        yield
        self.meter.clock()
        self.actions.append(action)

    def fill(self, model, draw=None):
        self.leave_values(model)
        return super().fill(model, no_values)

    def initial(self, model, draw=None):
        self.leave_values(model)
        return super().initial(model, no_values)

    def leave_values(self, model):
        """From the weights on nothing has a value. (What makes the groups still needs some.)"""
        self.size = sum(p.numel() for _, p in model.named())
        one_chunk, kernel = self.args.expert_chunks == 1, self.args.kernel
        dropout = self.config.dropout > 0
        self.meter = Meter(self.cluster, self.ledger.names, one_chunk, kernel, dropout)
        if self.args.fused:
            for part in model.parts.values():
                fuse_blocks(part, self.meter)
        if self.repeats:
            for part in model.parts.values():
                part.run = repeat.Repeater(part, self.ledger, self.meter)
        # Buffers on the meta device
        self.modes.enter_context(Fakes(allow_non_fake_inputs=True))
        self.modes.enter_context(self.meter)
        # Modes are left in the reverse order, also where an error ends it all
        self.modes.enter_context(self.watching)

    def steps(self, optimizer, first=0, reference=None):
        """Of the first step only the optimizer's states are needed; the second is the one that the
        ledger watches."""
        optimizer.step()
        self.restart_clock()
        self.step = self.measured
        self.begin(optimizer)
        self.meter.begin()
        yield self.step
        self.meter.clock()
        self.end(optimizer)

    def check(self, *args, **options):
        self.peak_before_step = self.ledger.peak
        return super().check(*args, **options)

    def receipt(self, layout, sent=(), held=(), notes=(), role=None):
        self.formulas = sent, held
        return 0


class NoText:
    """In place of a text."""

    name, tokens = "no text", ()

    def batch(self, step, rows, length, seed, split):
        windows = torch.zeros(len(rows), length + 1, dtype=torch.int64)
        return windows[:, :-1], windows[:, 1:], torch.zeros(len(rows), dtype=torch.int64)


def no_values(name, shape, init, seed):
    """In place of model.draw."""
    return torch.empty(shape)


def fuse_blocks(part, meter):
    """Operations within blocks are fused, forward and backward, as torch.compile would."""
    blocks = list(part.blocks.values())

    def before(block, inputs):
        meter.fuse(True)
        if block is blocks[0] and inputs[0].requires_grad:
            inputs[0].register_hook(lambda gradient: meter.fuse(False))

    def after(block, inputs, output):
        meter.fuse(False)
        if block is blocks[-1] and output.requires_grad:
            output.register_hook(lambda gradient: meter.fuse(True))

    for block in blocks:
        block.register_forward_pre_hook(before)
        block.register_forward_hook(after)


class Played(NamedTuple):
    """What a rank of a dry run did: its stages, how many parameters they have; the ledger's `sent`
    and `held`, and train.py's formulas for them; FLOPs; a Part for each action; one for all that is
    no action's; bytes of a message between stages; how many of the held bytes are on the host."""

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
    on_host: int

    @property
    def memory(self):
        """Bytes of the device at the peak."""
        return sum(self.held.values()) - self.on_host


def ones(tensor):
    """In place of FakeTensor.tolist, which makes a tensor of each element, of which each is 1."""
    values = 1
    for size in reversed(tensor.shape):
        values = [values] * size
    return values


def even(dispatch, sizes, assignments):
    """In place of ExpertDispatch.read: rows to send and to receive, chunks x N each, if every
    expert is chosen as often."""
    ends = [sum(dispatch.sizes[: r + 1]) for r in range(len(dispatch.sizes))]
    cuts = [[0, *(n * end // ends[-1] for end in ends)] for n in assignments]
    send = [[b - a for a, b in zip(cut, cut[1:])] for cut in cuts]
    return send, [[n[dist.get_rank(dispatch.group)]] * len(n) for n in send]


def play(args, rank, cluster, train, brief=False, routing=even, repeats=True):
    """Play one step of a rank of the layout in `args`, on tensors without values. Returns what it
    did as a Played.

    train(run, schedule, watch, cold): train.py's own.
    brief: of the micro-batches only the first and the last, for their times. routing(dispatch,
    sizes, assignments): see `even`. repeats: blocks that are alike are played once (repeat.py), if
    routing is even. Needs a process that has no process group."""
    args = copy.copy(args)
    schedule = pipeline.make(args.schedule, args.pp, args.microbatches, args.chunks)
    # Of three steps the second is played: validation comes after the last
    vars(args).update(
        steps=3,
        prove=0,
        eval_every=0,
        sample=0,
        out=None,
        resume=False,
        init_from=None,  # the sizes are in args.shape
        export=None,
        log_to=None,
        wandb=None,
    )
    # Of islands one is played: what joins them is slow, and rare
    vars(args).update(quiet=True, profile=None, plot=None, record=None, islands=1)
    vars(args).update(fused=args.compile, compile=False)  # no code is compiled, but times are
    if brief and args.microbatches > 2:
        keep = {0: 0, args.microbatches - 1: 1}
        rows = []
        for row in schedule:
            kept = [action for action in row if action.microbatch in keep]
            rows.append([a._replace(microbatch=keep[a.microbatch]) for a in kept])
        schedule = pipeline.Schedule(rows)
        args.batch, args.microbatches = 2 * args.batch // args.microbatches, 2
    try:
        run = play_rank(args, rank, cluster, train, schedule, routing, repeats and routing is even)
    except repeat.CannotRepeat:
        run = play_rank(args, rank, cluster, train, schedule, routing, repeats=False)
    meter, actions = run.meter, run.actions
    held = run.held | {"gathered": run.ledger.gathered_peak}
    if args.offload:  # at the optimizer's step, only the host's memory fills
        held["activations_peak"] = run.peak_before_step
    rest = Part(*(sum(seconds) for seconds in zip(*meter.parts[::2])))
    stages = tuple(sorted({action.stage for action in actions}))
    parts = dict(zip(actions, meter.parts[1::2]))
    return Played(
        rank,
        stages,
        run.size,
        run.ledger.sent,
        held,
        run.formulas,
        meter.flops,
        parts,
        rest,
        meter.message,
        held["optimizer"] if args.offload else 0,
    )


def one_operation(x, shape, weight=None, eps=None):
    """In place of F.rms_norm: an operation without values that reads, writes and keeps the same."""
    return F.layer_norm(x, shape, weight)


def play_rank(args, rank, cluster, train, schedule, routing, repeats):
    """The DryRun of a rank, after its step."""
    world = args.dp * args.cp * args.tp * args.pp
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)
    try:
        with contextlib.ExitStack() as modes:
            modes.enter_context(
                mock.patch.object(dist, "get_backend", lambda group=None: args.backend)
            )
            modes.enter_context(mock.patch.object(expert_parallel.ExpertDispatch, "read", routing))
            modes.enter_context(mock.patch.object(FakeTensor, "tolist", ones))
            if args.backend == "nccl" and not getattr(args, "many_operations_a_norm", False):
                modes.enter_context(mock.patch.object(F, "rms_norm", one_operation))
            run = DryRun(args, rank, world, cluster, modes, repeats)
            train(run, schedule, run.watch, cold=False)
            return run
    finally:
        dist.destroy_process_group()


def play_all(args, ranks, cluster, train, brief=False):
    """play() for several ranks, in as many processes as there are cores."""
    return play_several([(args, ranks)], cluster, train, brief)[0]


def play_several(layouts, cluster, train, brief=False):
    """[[Played of each rank] of each layout], of pairs (flags, ranks)."""
    keep_autograd_forkable()
    jobs = [(args, rank, cluster, train, brief) for args, ranks in layouts for rank in ranks]
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    if len(jobs) == 1:
        played = [play(*jobs[0])]
    else:
        torch.set_num_threads(1)  # a thread pool does not survive a fork
        with ProcessPoolExecutor(min(cores, len(jobs)), get_context("fork")) as pool:
            played = list(pool.map(play, *zip(*jobs)))
    found = iter(played)
    return [[next(found) for _ in ranks] for _, ranks in layouts]
