"""Train a GPT in any layout: five kinds of parallelism from flags, the same curve in all of them.

    torchrun --nproc_per_node=8 train.py --dp 2 --tp 2 --pp 2
    python train.py --dp 2 --cp 2 --tp 2 --pp 2 --ep 4 --experts 8 --sp --zero 1
    python train.py --dp 2 --out runs/a --save-every 50
    python train.py --tp 2 --out runs/a --resume

The order of the ranks: tp innermost, so that tensor parallelism stays inside a node; then cp, dp,
and pp outermost. Here dp 2, tp 2, pp 2 on 8 ranks:

              stage 0         stage 1       groups
            tp 0   tp 1     tp 0   tp 1     tp  pieces of the same layers   0 1 | 2 3 | 4 5 | 6 7
    dp 0     0      1        4      5       dp  same weights, other data    0 2 | 1 3 | 4 6 | 5 7
    dp 1     2      3        6      7       pp  consecutive layers          0 4 | 1 5 | 2 6 | 3 7

cp splits each sequence over ranks that hold the same weights, so data-parallel groups have dp x cp
ranks. ep takes no ranks of its own: the experts are dealt out over ep of these dp x cp ranks, and
each expert has dp cp / ep copies. --islands N is outside all: N such meshes, which average their
weights rarely (trainer/islands.py); batch, loss and norm below are then those of an island.

Batch, loss and gradient norm are global, whatever the layout. --batch is the number of sequences
over all ranks. The loss is the sum over all tokens divided by their number. The norm counts every
parameter once. So another layout gives the same loss curve, to rounding. The first steps are
compared with one process, and the receipt at the end says how far apart they were (--prove).
docs/choosing-a-layout.md says which layout when.
"""

import contextlib
import datetime
import functools
import math

import torch
import torch.distributed as dist

import context_parallel
import ddp
import expert_parallel
import harness
import model as gpt
import pipeline
import proof
import receipts.pipeline
import receipts.train
import sequence_parallel
import tensor_parallel
import trainer.islands as islands
from harness import zero_flags
from receipts.expert_parallel import RowCounter
from simulator import planner
from trainer import faults, pretrained, recording, sampling, saving, tracking, validation
from trainer.composed_zero import ComposedZeRO, ZeRO
from trainer.layout import cp_shape, places, prepare
from trainer.loss_scale import LossScale


def flags():
    p = harness.parser(__doc__, steps=200, lr=3e-3, warmup=20, microbatches=None, tokenizer=None)
    n = harness.POSITIVE
    g = p.add_argument_group("the layout (ranks = islands x dp x cp x tp x pp)")
    g.add_argument("--dp", **n, default=1, help="data parallel: N copies share the batch")
    why = "tensor parallel: each layer is cut N ways; keep it inside a node"
    g.add_argument("--tp", **n, default=1, help=why)
    why = "sequence parallel: tensor-parallel ranks split the tokens between layers, to hold less"
    g.add_argument("--sp", action="store_true", help=why)
    why = "with --sp: hold still less, and send a quarter more"
    g.add_argument("--gather-again", action="store_true", help=why)
    g.add_argument("--pp", **n, default=1, help="pipeline parallel: N stages of consecutive layers")
    why = "context parallel: each sequence is split over N ranks"
    g.add_argument("--cp", **n, default=1, help=why)
    why = "how attention sees the whole sequence"
    g.add_argument("--cp-kind", choices=context_parallel.KINDS, default="ring", help=why)
    why = "ranks of a ring, for ring-ulysses (default: the most square)"
    g.add_argument("--cp-rings", **n, help=why)
    why = "expert parallel: N of the dp x cp ranks deal the --experts out, in the place of copies"
    g.add_argument("--ep", **n, default=1, help=why)
    why = "pieces of a rank's tokens on their way to experts: one travels while another computes"
    g.add_argument("--expert-chunks", **n, default=1, help=why)
    why = "how far a bias on the router's choice moves towards even load after a step; 0 = off"
    g.add_argument("--bias-rate", type=harness.real(0), default=0.0, metavar="X", help=why)
    why = "order of the micro-batches in a pipeline"
    g.add_argument("--schedule", choices=list(pipeline.SCHEDULES), default="1f1b", help=why)
    why = "stages a rank holds, for --schedule interleaved (default: 2)"
    g.add_argument("--chunks", **n, help=why)
    why = "pieces of a replica's share of the batch: more shrink the bubble (default: up to 2 x pp)"
    g.add_argument("--microbatches", **n, help=why)
    why = (
        "what data-parallel ranks split: 1 optimizer states, 2 gradients too, 3 weights too (FSDP)"
    )
    g.add_argument("--zero", type=int, choices=range(4), default=0, help=why)
    zero_flags.add_flags(g, bucket_mb=25, ranks_flag="--zero-ranks", dtypes=list(harness.DTYPES))
    why = "run norms and GELU again in backward, half of the products too, or all: to hold less"
    g.add_argument("--recompute", choices=harness.RECOMPUTATIONS, default="none", help=why)
    why = "torch.compile each block: slow to start (and needs a C++ compiler), faster then"
    g.add_argument("--compile", action="store_true", help=why)
    g = p.add_argument_group("the loop")
    why = "where the cosine ends (default: lr / 10)"
    g.add_argument("--min-lr", type=harness.real(0), metavar="X", help=why)
    why = (
        "leave out up to N steps whose loss or gradient is not finite; else the first ends the run"
    )
    g.add_argument("--skip-nan", **harness.NATURAL, default=0, help=why)
    why = "compare the first N steps with one process (default: 3 below 20M parameters, else 0)"
    g.add_argument("--prove", **harness.NATURAL, help=why)
    for part in (validation, saving, sampling, tracking, recording, pretrained, planner, islands):
        part.add_flags(p)
    return p


def main():
    args = islands.settle(flags().parse_args())
    if args.dry_run or args.plan:
        return planner.main(args, prepare, train)
    args, _ = prepare(args)
    ranks = args.islands * args.dp * args.cp * args.tp * args.pp
    proof.launch(train, args, needed=ranks)


# --- the mesh


def mesh(args, schedule):
    """This rank's process groups, by name. All ranks create all groups, in the same order.

    tp, pp       as in the picture on top; cp likewise: ranks that share sequences
    dp           all ranks with the same weights, dp x cp of them
    ring, ulysses    the two dimensions of the cp ranks, for ring-ulysses
    ep, copies   of the dp ranks: those that deal the experts out, those that hold the same experts
    inside, across    of the dp ranks (and of the copies): those that split one copy, those with the
                 same shards, for --zero-ranks
    tied         of the pp ranks, the one or two that hold a tied matrix
    down, up     activations and their gradients, each to later stages and to earlier ones
    island, islands    all ranks of an island; those with the same place in every island"""
    size = args.islands, args.pp, args.dp, args.cp, args.tp
    ranks = torch.arange(math.prod(size)).view(size)
    dp = ranks.flatten(2, 3).transpose(2, 3)  # (islands, pp, tp, dp cp)
    cp = ranks.transpose(3, 4).unflatten(4, cp_shape(args))  # (islands, pp, dp, tp, ring, ulysses)
    experts = dp.unflatten(3, (-1, args.ep))  # (islands, pp, tp, copies, ep)
    pp = ranks.flatten(2).transpose(1, 2)  # (islands, dp cp tp, pp)
    tied = pp[..., [schedule.owner[0], schedule.owner[schedule.last]]]
    timeout = datetime.timedelta(seconds=args.timeout)

    def own_group(rows):
        """Make a group of each row, in the last dimension. Return this rank's group, or None."""
        own = None
        for row in rows.flatten(0, -2).tolist():
            group = dist.new_group(sorted(set(row)), timeout)  # `tied` may name a rank twice
            if dist.get_rank() in row:
                own = group
        return own

    groups = {"tp": own_group(ranks), "dp": own_group(dp)}
    groups |= {"cp": own_group(cp.flatten(4)), "pp": own_group(pp), "tied": own_group(tied)}
    if args.cp_kind == "ring-ulysses":
        groups |= {"ring": own_group(cp.transpose(4, 5)), "ulysses": own_group(cp)}
    if args.ep > 1:
        groups |= {"ep": own_group(experts), "copies": own_group(experts.transpose(3, 4))}
    if args.zero_ranks:
        rows = zero_flags.split_ranks(dp, args.zero_ranks, args.ep)
        groups |= {name: own_group(ranks) for name, ranks in rows.items()}
    if args.islands > 1:
        groups |= {"island": own_group(ranks.flatten(1)), "islands": own_group(ranks.flatten(1).T)}
    return groups | {"down": [own_group(pp), own_group(pp)], "up": [own_group(pp), own_group(pp)]}


# --- the model


def build(run, schedule, groups):
    """This rank's stages of the model, cut on the meta device: no memory, no weights yet."""
    args, tp, cp = run.args, groups["tp"], groups["cp"]
    stages = schedule.stages(dist.get_rank(groups["pp"]))
    layers = receipts.pipeline.stage_layers(run.config, schedule.last + 1)
    parts = harness.split(run.meta_model, layers, stages, groups["tied"])
    for part in parts.values():
        if args.sp:
            sequence_parallel.parallelize(part, tp, keep=not args.gather_again)
        elif args.tp > 1:
            tensor_parallel.parallelize(part, tp)
        else:
            harness.lean_head(part)
        if args.cp > 1:
            grid = groups.get("ring"), groups.get("ulysses")
            context_parallel.parallelize(part, cp, args.cp_kind, *grid)
        if args.ep > 1:
            copies = groups["copies"]
            expert_parallel.parallelize(part, groups["ep"], None, args.expert_chunks, copies)
        harness.recompute(part, args.recompute)
        if args.compile:
            harness.compile_blocks(part)
    return harness.Stages(parts)


def data_parallel(run, model, groups, draw):
    """Fill the model with the values of `draw`. Returns (what sums the gradients over the ranks,
    what takes the step): DDP and an optimizer of torch's, or ZeRO, which does both. Mixed precision
    takes ZeRO even at stage 0, which splits nothing but keeps the optimizer's own copy of the
    weights."""
    args = run.args
    one_dtype = args.dtype == args.param_dtype == args.reduce_dtype
    if args.zero == 0 and one_dtype and not args.offload:
        run.fill(model, draw)
        bucket_bytes = int(args.bucket_mb * 2**20)
        options = {"all_reduce": harness.all_reduce}
        sync = ddp.DDP(model.uses(), groups["dp"], args.microbatches, bucket_bytes, **options)
        return sync, harness.make_optimizer(model.parameters(), args)
    sharded_optimizer = ZeRO(
        model,
        groups["dp"],
        args.zero,
        lambda pieces: harness.make_optimizer(pieces, args),
        args.microbatches,
        scopes=model.parts.values(),
        splits=zero_flags.splits(groups),
        **zero_flags.options(run, model, args.zero, draw),
    )
    return sharded_optimizer, sharded_optimizer


# --- the loop


class Runner:
    """Runs forward and backward through this rank's stages.

    run: harness's view of this process: flags, device, data, log. sync: DDP or ZeRO.
    scale: a LossScale. watch(action): a context around each of the pipeline's actions."""

    def __init__(self, run, schedule, groups, model, sync, scale, watch):
        self.run, self.schedule, self.groups, self.model = run, schedule, groups, model
        self.sync, self.scale, self.watch = sync, scale, watch
        self.links = groups["down"] + groups["up"]
        self.places = functools.lru_cache(self.places)
        self.places(run.config.context)  # before the first step, which must not wait for the copy
        self.stages = [int(stage) for stage in model.parts]
        blocks = [block for part in model.parts.values() for block in part.blocks.values()]
        self.rows = RowCounter([block.mlp for block in blocks] if run.args.ep > 1 else [])

    def step(self, batches):
        """Forward and backward of a step: leaves complete gradients, and returns this rank's part
        of the loss. batches: micro-batches (tokens, targets, samples) of whole sequences."""
        self.sync.zero_grad()
        self.rows.clear()
        losses = self.run_schedule(self.schedule, batches, self.scale.count(self.run.count))
        self.sync.finish()
        return sum(losses, self.run.zero()) / self.scale.value  # only the last stage has losses

    def places(self, length):
        """The positions of a sequence that this rank holds, on its device. Kept for each length."""
        rank = dist.get_rank(self.groups["cp"])
        return places(self.run.args, length, rank).to(self.run.device)

    def warm_up(self, batches):
        """Before the first step of a pipeline, which would hang on nccl: see pipeline.warm_up."""
        count = self.scale.count(self.run.count)
        self.run_schedule(self.schedule, batches, count, pipeline.warm_up)
        self.sync.zero_grad(give_up=True)
        gpt.rebalance(self.model, move=False)  # the routers counted these tokens

    def forward_only(self, batches, count):
        schedule = pipeline.forward_only(self.schedule, len(batches))
        return self.run_schedule(schedule, batches, count)

    def run_schedule(self, schedule, batches, count, play=None):
        """What the last stage returns for each micro-batch, on its rank: losses divided by count,
        or logits (b, T, V) without targets. Other ranks get []."""
        run, args = self.run, self.run.args
        rows, length = batches[0][0].shape
        where = self.places(length)
        positions = where.clamp(max=length - 1)  # padding must have some position

        def forward(stage, m, x):
            tokens, targets, samples = batches[m]
            if x is None:
                x = context_parallel.shard(tokens, where)
            if targets is not None:
                targets = context_parallel.shard(targets, where, gpt.IGNORE)
            return self.model[stage](x, positions, targets=targets, count=count, samples=samples)

        tokens_held = -(-len(where) // args.tp) if args.sp else len(where)  # rounded up
        shape, dtype = (rows, tokens_held, run.config.width), harness.DTYPES[args.param_dtype]
        play = play or pipeline.play
        return play(schedule, forward, shape, dtype, run.device, self.links, around=self.around)

    @contextlib.contextmanager
    def around(self, action):
        """ZeRO must know which pipeline stage's gradients come, and whether all do: after I not."""
        scope = contextlib.nullcontext()
        if isinstance(self.sync, ComposedZeRO) and action.kind != "F":
            scope_number = self.stages.index(action.stage)
            scope = self.sync.backward(scope_number, complete=action.kind != "I")
        with self.watch(action), scope:
            yield

    def logits_after(self, window):
        """The logits (V,) that follow the tokens (1, T), on a rank that has the last stage and the
        last token; else None."""
        args, groups = self.run.args, self.groups
        results = self.forward_only([(window, None, None)], None)
        where = places(args, window.shape[1], dist.get_rank(groups["cp"]))
        last = (where == window.shape[1] - 1).nonzero().flatten()
        if not results or not len(last):
            return None
        logits = results[0][0, last[0]]
        if args.tp > 1:
            logits = sampling.gather_logits(logits, self.run.config.vocab, groups["tp"])
        return logits


def train(run, schedule=None, watch=contextlib.nullcontext, cold=True):
    """Train on this rank, and return the exit code. A dry run passes a schedule of its own, a
    watch(action), a context around each of the pipeline's actions, and cold=False: it has no
    kernels that must be loaded."""
    args = run.args
    if schedule is None:
        schedule = pipeline.make(args.schedule, args.pp, args.microbatches, args.chunks)
    groups = mesh(args, schedule)
    tp, dp, pp = groups["tp"], groups["dp"], groups["pp"]
    run.groups(**groups)
    open_groups(groups, run.device)
    pipeline.open_links(schedule, groups["down"] + groups["up"], run.device)
    draw = pretrained.Folder(args.init_from, run.config).draw if args.init_from else gpt.draw
    model = build(run, schedule, groups)
    sync, optimizer = data_parallel(run, model, groups, draw)
    scale = LossScale(args, optimizer)
    runner = Runner(run, schedule, groups, model, sync, scale, watch)
    parameters = list(model.parameters())
    uses_zero = isinstance(optimizer, ComposedZeRO)

    def named():
        return scale.unscale(optimizer.whole(model.named())) if uses_zero else model.named()

    # Which part of the batches this rank works on: islands have batches of their own
    island = run.rank // (run.world // args.islands)
    replica = island * args.dp + dist.get_rank(dp) // args.cp
    # The norm adds up pieces over tp and pp. ZeRO 1 to 3 adds up over dp, of which ep is a part
    splitting = [tp, pp]
    if args.ep > 1 and not args.zero:
        splitting.append(groups["ep"])
    tracking.describe(run, schedule)

    outer = islands.outer(run, model, optimizer, groups)
    saver = saving.Saver(run, model, optimizer, groups, scale, outer)
    first, stopped = saver.resume(), None
    outer.go_on(first)
    only_sample = args.only_sample or first == args.steps
    if only_sample:
        first = args.steps  # no step is left
    elif args.pp > 1 and cold:
        runner.warm_up(run.microbatches(first, replica, args.dp))
    positions = runner.places(run.config.context)
    recorded = recording.recorded(run, model, groups, positions, named, first)
    steps = run.steps(optimizer, first, outer.reference)
    with tracking.open_log(run, first) as log, saver, recorded as record:
        for step in tracking.profiled(run, steps, first):
            batches = run.microbatches(step, replica, args.dp)
            loss = runner.step(batches)
            harness.sum_over([dp, pp], loss)
            if uses_zero:
                norm = optimizer.grad_norm(splitting) / scale.value
            else:
                norm = harness.grad_norm(parameters, splitting)
            if step == run.measured:  # the ledger counts bytes in this step
                travelled = runner.rows.travelled
            record(batches, loss, norm, scale)
            again = functools.partial(runner.step, batches)
            blame = functools.partial(faults.blame, model, again)
            taken = run.check(loss, norm, named, blame, scale, groups.get("island"))
            if taken:
                if uses_zero:
                    optimizer.clip(norm, args.grad_clip)
                else:
                    harness.clip(parameters, norm, args.grad_clip)
                optimizer.step()
                run.log(loss, norm, tracking.mfu(run))
            token_groups = [dp, tp] if args.sp else [dp]  # their ranks hold different tokens
            gpt.rebalance(model, functools.partial(harness.sum_over, token_groups), taken)
            outer.after(step)
            log(run.history[-1])
            scale.update(taken)
            stopped = saver.after(step + 1)
            if stopped:
                break
            if validation.due(args, step):
                loss = validation.validate(run, runner.forward_only, replica, (dp, pp))
                log({"step": step + 1, "val_loss": loss})
    if stopped:
        at = f"step {step + 1} is saved in {args.out}"
        run.print(f"stopped by {stopped.name}: {at}, --resume goes on from it")
        return 0
    exported = True
    if args.export:
        exported = pretrained.export(run, model, optimizer, dp, groups.get("island"))
    if args.sample:
        speaker = schedule.owner[schedule.last]
        run.print(f"\nsample:\n{sampling.generate(run, runner.logits_after, groups, speaker)}")
    if only_sample:
        return int(not exported)
    length = len(places(args, run.config.context, dist.get_rank(groups["cp"])))
    rows = receipts.train.expected(args, run.config, schedule, groups, length, travelled)
    notes = []
    if args.zero == 3:
        notes.append(f"ZeRO: gathered weights at the peak {run.ledger.gathered_peak:,} bytes")
    rows = outer.expected(receipts.train.layout(args), *rows, notes)
    return run.receipt(*rows) or int(not exported)


def open_groups(groups, device):
    """Send a first message in each group. nccl connects its ranks then, and waits for the device:
    which must not be within a pipeline's step."""
    one_by_one = [group for group in groups.values() if isinstance(group, dist.ProcessGroup)]
    harness.sum_over(one_by_one, torch.zeros(1, device=device))


if __name__ == "__main__":
    harness.script(main)
