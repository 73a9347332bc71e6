"""Dry run: what a run of any size would hold, send and take, from the training code itself.

`train` of train.py runs unchanged on one process, as chosen ranks of a job of any size, on meta
tensors and with torch's fake process group. There are shapes, dtypes and storages, but no memory,
no network and no values. The ledger that makes a real run's receipt counts here too. Tests hold
its bytes, held and sent, against those of real runs.

    run.groups(...)   makes the meter (simulator/meter.py), which is the run's ledger too
    run.fill(...)     from here on the meter runs every operation, on meta tensors
    .item()           returns 1; the experts' all-to-alls get sizes as if routing were even
    an operation      the meter counts its bytes, its FLOPs and its seconds (simulator/kernels.py)
    a message         takes its seconds on its link (simulator/links.py)
    an action         of the pipeline: `DryRun.watch` ends a span of the meter before and after it

simulator/estimate.py puts a step together from these spans. docs/reference/estimates.md says where
the constants come from, how far off estimates are, and what they leave out. With nccl RMSNorm is
one operation that keeps its input, as torch's kernel for a GPU is. On a CPU it is many, and keeps
two copies in float32. Messages between stages are held until the step ends; nccl's until they are
sent.

    python train.py --preset llama3-8b --dp 2 --tp 4 --zero 1 --batch 16 --dry-run
"""

import contextlib
import copy
import itertools
import os
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.optim import adam, sgd
from torch.testing._internal.distributed.fake_pg import FakeStore

import context_parallel
import proof
from dualpipe import PairedSchedule
from expert_parallel import ExpertDispatch
from harness import Refused, signals
from proof.ledger import lasting
from receipts import pipeline as schedules
from simulator.devices import RESERVED
from simulator.meter import META, Meter, Part
from trainer.large_vocabulary import CHUNK, LeanCrossEntropy

# A dry run makes the groups of all ranks, a third of a millisecond for each; all rows of a
# schedule, which takes seconds for 1,000 stages; and plays pieces of a step, milliseconds for each
MOST_PIECES = 30_000
MOST = {"ranks": 131_072, "stages": 1024, "micro-batches": 30_000}


def check_counts(ranks, stages=1, microbatches=1):
    """Refuse more than a dry run can lay out."""
    for (what, most), count in zip(MOST.items(), (ranks, stages, microbatches)):
        if count > most:
            raise Refused(f"{count:,} {what}: a dry run takes at most {most:,}, give fewer")


def check_playable(args, config):
    """Refuse a step of so many small pieces that to play it would take minutes."""
    blocks = args.microbatches * -(-config.layers // args.pp)
    tokens = args.batch // args.dp * -(-config.context // args.cp)
    # Of the loss of a whole vocabulary some rows at a time are computed
    pieces = tokens * config.vocab // CHUNK if args.tp == 1 else 0
    pieces += -(-config.context // args.cp) // 2**12  # the numbers of positions have values
    if blocks + pieces > MOST_PIECES:
        each = f"{args.microbatches:,} micro-batches of {tokens // args.microbatches:,} tokens"
        raise Refused(
            f"a dry run plays each of {each}: that is {blocks + pieces:,} pieces of work, more "
            f"than {MOST_PIECES:,}: make --batch, --context or --microbatches smaller"
        )


class DryRun(proof.Run):
    """A Run without values: one step of a training function, as the second of many is."""

    measured = 1

    def __init__(self, args, rank, world, cluster, modes):
        self.cluster, self.modes, self.actions = cluster, modes, []
        super().__init__(args, rank, world, torch.device("cpu"), NoText())

    def make_ledger(self, groups):
        args, dropout = self.args, self.config.dropout > 0
        # A compiled block waits for f's message, but where it gathers again
        hides = getattr(args, "hides", (False, True) if args.gather_again else (False,))
        return Meter(groups, self.cluster, args.kernel, dropout, hides)

    @contextlib.contextmanager
    def watch(self, action):
        """Around each action of the pipeline: the meter makes it a Part of its own."""
        self.ledger.clock()
        yield
        self.ledger.clock()
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
        if self.args.fused:
            for part in model.parts.values():
                fuse(list(part.blocks.values()), self.ledger)
                if isinstance(part.loss, LeanCrossEntropy):
                    fuse([part.loss], self.ledger)
        self.device = META
        self.modes.enter_context(self.ledger)

    def steps(self, optimizer, first=0, reference=None):
        """Of the first step only the optimizer's states are needed. The ledger counts another."""
        optimizer.step()
        self.step, self.lr = self.measured, 0.0
        self.restart_clock()
        self.ledger.watch(itertools.chain(*lasting(optimizer).values()))
        self.ledger.begin()
        self.watching.callback(self.ledger.stop)
        yield self.step
        self.ledger.clock()
        self.end(optimizer)

    def start_check(self, *args):
        self.peak_before_step = self.ledger.peak
        return super().start_check(*args)

    def receipt(self, layout, sent=(), held=(), notes=(), role=None):
        return 0


class NoText:
    """In place of a text."""

    name, tokens, note = "no text", (), ""

    def batch(self, step, rows, length, seed, split):
        windows = torch.zeros(len(rows), length + 1, dtype=torch.int64)
        return windows[:, :-1], windows[:, 1:], torch.zeros(len(rows), dtype=torch.int64)


def no_values(name, shape, init, seed):
    """In place of initialize.draw."""
    return torch.empty(shape)


def fuse(modules, meter):
    """Operations within modules are fused, forward and backward, as torch.compile would."""

    def before(module, inputs):
        meter.fuse(True)
        if module is modules[0] and inputs[0].requires_grad:
            inputs[0].register_hook(lambda gradient: meter.fuse(False))

    def after(module, inputs, output):
        meter.fuse(False)
        if module is modules[-1] and output.requires_grad:
            output.register_hook(lambda gradient: meter.fuse(True))

    for module in modules:
        module.register_forward_pre_hook(before)
        module.register_forward_hook(after)


class Played(NamedTuple):
    """What a rank of a dry run did: its stages, how many parameters they have; the ledger's `sent`
    and `held`; FLOPs; a Part for each action; one for all that is no action's; bytes of a message
    between stages; how many of the held bytes are on the host."""

    rank: int
    stages: tuple
    parameters: int
    sent: dict
    held: dict
    flops: int
    actions: dict
    rest: Part
    message: int
    on_host: int

    @property
    def memory(self):
        """Bytes of the device's tensors at the peak."""
        return sum(self.held.values()) - self.on_host

    @property
    def reserved(self):
        """Bytes that torch's allocator has at the peak."""
        return self.memory + RESERVED * (self.held["gathered"] + self.held["activations_peak"])


def attention(q, k, v, is_causal=False, enable_gqa=False):
    """In place of F.scaled_dot_product_attention."""
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, is_causal)[0]


def ones(tensor, tolist=torch.Tensor.tolist):
    """In place of Tensor.tolist: where there are no values each is 1."""
    if tensor.device != META:
        return tolist(tensor)
    values = 1
    for size in reversed(tensor.shape):
        values = [values] * size
    return values


def even(dispatch, chunks, exchange=ExpertDispatch.exchange_counts):
    """In place of ExpertDispatch.exchange_counts, as if every expert were chosen as often."""
    ends = [0, *itertools.accumulate(dispatch.experts_per_rank)]
    cuts = [[len(chunk) * end // ends[-1] for end in ends] for chunk in chunks]
    send = [[b - a for a, b in zip(cut, cut[1:])] for cut in cuts]
    receive = [[n[dist.get_rank(dispatch.group)]] * len(n) for n in send]
    return send, receive, exchange(dispatch, chunks)[-1]


def play(args, rank, cluster, train, brief=None, routing=even):
    """Play one step of a rank of the layout in `args`. Returns what it did as a Played. Needs a
    process that has no process group.

    train(run, schedule): train.py's own. brief: play of the micro-batches only the first and
    the last, and so many layers of each stage. routing: see `even`."""
    args = copy.copy(args)
    schedule = schedules.find_schedule(args.schedule, args.pp, args.microbatches, args.chunks)
    if brief:
        args.layers = brief * (schedule.last + 1)
        args.shape = args.shape and {**args.shape, "layers": args.layers}
    off = "out", "init_from", "export", "log_to", "profile_to", "record", "wandb"
    vars(args).update(dict.fromkeys(off))
    # Of three steps the second is played: validation comes after the last. Of islands one is
    # played: what joins them is slow, and rare
    vars(args).update(steps=3, prove=0, eval_every=0, sample=0, resume=False, islands=1, quiet=True)
    vars(args).update(fused=args.compile, compile=False)  # no code is compiled, but times are
    if brief and args.microbatches > 2:
        keep = {0: 0, args.microbatches - 1: 1}
        rows = []
        for row in schedule:
            kept = [action for action in row if action.microbatch in keep]
            rows.append([a._replace(microbatch=keep[a.microbatch]) for a in kept])
        schedule = type(schedule)(rows)
        args.batch, args.microbatches = 2 * args.batch // args.microbatches, 2
    if args.schedule == "dualpipev" and args.zero < 3:
        # Pairs are played one action after the other, but their receives are posted together
        pairs = PairedSchedule(schedule.rows)
        rows = [itertools.chain(*pairs.steps(rank)) for rank in range(args.pp)]
        schedule = type(schedule)(rows)
        schedule.receives_before = pairs.receives_before
    world = args.dp * args.cp * args.tp * args.pp
    with contextlib.ExitStack() as modes:
        for place, name, stand_in in stand_ins(args, routing, brief):
            modes.enter_context(mock.patch.object(place, name, stand_in))
        modes.enter_context(mock.patch.dict(dist.Backend.backend_capability, fake=["cpu", "meta"]))
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)
        modes.callback(dist.destroy_process_group)
        run = DryRun(args, rank, world, cluster, modes)
        train(run, schedule)
    meter, actions = run.ledger, run.actions
    held = run.held | {"gathered": meter.gathered_peak}
    if args.offload:  # at the optimizer's step, only the host's memory fills
        held["activations_peak"] = run.peak_before_step
    return Played(
        rank,
        stages=tuple(sorted({action.stage for action in actions})),
        parameters=run.size,
        sent=meter.sent,
        held=held,
        flops=meter.flops,
        actions=dict(zip(actions, meter.parts[1::2])),
        rest=together(meter.parts[::2]),
        message=meter.message,
        on_host=held["optimizer"] if args.offload else 0,
    )


def together(parts):
    """One Part of several that follow each other."""
    *sums, _ = (sum(numbers) for numbers in zip(*parts))
    return Part(*sums, max(part.most for part in parts))


def all_alike(found, own, group=None):
    """In place of all_gather_object: all ranks say what this one says."""
    found[:] = [own] * len(found)


def own_groups(ranks, new_group=dist.new_group):
    """In place of new_group: there is nobody to agree with on the groups of others."""
    own = dist.get_rank() in ranks
    return new_group(ranks) if own else dist.GroupMember.NON_GROUP_MEMBER


def stand_ins(args, routing, brief):
    """(place, name, what takes its place) of functions that need values, or a device."""
    found = [
        (dist, "get_backend", lambda group=None: args.backend),
        (ExpertDispatch, "exchange_counts", routing),
        (dist, "all_gather_object", all_alike),
        (dist, "new_group", own_groups),
        (torch.Tensor, "tolist", ones),
        # What is chosen by a tensor's device: on meta the same as on a CPU
        (F, "scaled_dot_product_attention", attention),
        (context_parallel, "fused_kernel", lambda q: "cpu"),
        (torch, "is_autocast_enabled", lambda *_: False),
        (adam, "_device_dtype_check_for_fused", lambda *_, **__: None),
        (sgd, "_device_dtype_check_for_fused", lambda *_, **__: None),
        (torch, "_fused_sgd_", lambda p, grads, *_, **__: torch._foreach_add_(p, grads)),
    ]
    if brief:
        alike = [range(i, i + brief) for i in range(0, args.layers, brief)]
        found.append((schedules, "stage_layers", lambda config, stages: alike))
    if args.backend == "nccl" and not getattr(args, "many_operations_a_norm", False):
        # An operation that reads, writes and keeps the same
        layer_norm = F.layer_norm
        found.append((F, "rms_norm", lambda x, shape, weight, eps: layer_norm(x, shape, weight)))
    return found


def first_ranks(args, stages):
    """The first rank of each of some pipeline stages."""
    return [stage * args.dp * args.cp * args.tp for stage in sorted(set(stages))]


def play_brief(layouts, cluster, train):
    """[[Played of the first stage's first rank, and of the last's] of each of some layouts], from
    steps of two micro-batches and of two and three layers a stage. Blocks are alike: each has the
    same part of seconds and of bytes."""
    jobs, found = [], []
    for (args, _), layers in itertools.product(layouts, (2, 3)):
        jobs.append((args, first_ranks(args, (0, args.pp - 1)), layers))
    pairs = iter(play_all(jobs, cluster, train))
    for (args, config), short, long in zip(layouts, pairs, pairs):
        schedule = schedules.find_schedule(args.schedule, args.pp, args.microbatches, args.chunks)
        layers = [len(stage) for stage in schedules.stage_layers(config, schedule.last + 1)]
        found.append([])
        for two, three in zip(short, long):
            found[-1].append(stretched(two, three, layers))
            walk(found[-1][-1], schedule[two.rank // (args.dp * args.cp * args.tp)], args.pp)
    return found


def stretched(two, three, layers):
    """The Played of a rank whose stages have so many layers, from those with two and three."""

    def at(count, a, b):
        return a + (b - a) * (count - 2)

    def part_at(count, a, b):
        return Part(*(at(count, *pair) for pair in zip(a, b)))

    count = sum(layers[stage] for stage in two.stages) / len(two.stages)
    actions = {}
    for action, part in two.actions.items():
        actions[action] = part_at(layers[action.stage], part, three.actions[action])
    return two._replace(
        parameters=round(at(count, two.parameters, three.parameters)),
        held={kind: at(count, size, three.held[kind]) for kind, size in two.held.items()},
        actions=actions,
        rest=part_at(count, two.rest, three.rest),
        on_host=at(count, two.on_host, three.on_host),
    )


def part_of(parts, action):
    """An action's Part, of {action: Part}. A backward may have been played as one, or in two."""
    if action in parts:
        return parts[action]
    if action.kind == "B":
        return together([parts[action._replace(kind=kind)] for kind in "IW"])
    whole = parts[action._replace(kind="B")]
    left = whole.left if action.kind == "W" else 0.0  # kept until W
    return whole.scaled(1 / 2)._replace(left=left, most=whole.most)


def walk(played, row, pp):
    """Set the activations' peak of a whole step, from what each kind of action leaves and has."""
    last = max(action.microbatch for action in played.actions)
    # With --offload the optimizer's step fills the memory of the host
    alive, peak = {}, 0 if played.on_host else played.rest.most
    messages = 2 * played.message if pp > 1 else 0  # two are expected
    for action in row:
        key = action.stage, action.microbatch
        alike = action._replace(microbatch=min(action.microbatch, last))
        part = part_of(played.actions, alike)
        peak = max(peak, sum(alive.values()) + part.most + messages)
        alive[key] = alive.get(key, 0) + part.left
        if action.kind in "BW":
            del alive[key]
    played.held["activations_peak"] = peak


def play_all(layouts, cluster, train):
    """[[Played of each rank] of each layout], of triples (flags, ranks, brief), in as many
    processes as there are cores."""
    # Tensors without values need no GPU. The first backward starts a thread for each, and no fork
    # survives these: so it is now, while there are none
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    (2 * torch.ones((), requires_grad=True)).backward()
    jobs = [(args, rank, cluster, train, brief) for args, ranks, brief in layouts for rank in ranks]
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    if len(jobs) == 1:
        played = [play(*jobs[0])]
    else:
        torch.set_num_threads(1)  # a thread pool does not survive a fork
        size, context = min(cores, len(jobs)), get_context("fork")
        with ProcessPoolExecutor(size, context, signals.die_with_parent) as pool:
            played = list(pool.map(play, *zip(*jobs)))
    found = iter(played)
    return [[next(found) for _ in ranks] for _, ranks, _ in layouts]
