"""Train a GPT in any layout: five kinds of parallelism from flags, the same loss curve in all.

The order of the ranks: tp innermost, so that tensor parallelism stays inside a node; then cp, dp,
and pp outermost. Here dp 2, tp 2, pp 2 on 8 ranks:

              stage 0         stage 1
            tp 0   tp 1     tp 0   tp 1
    dp 0     0      1        4      5
    dp 1     2      3        6      7

    groups   tp  pieces of the same layers   0 1 | 2 3 | 4 5 | 6 7
             dp  same weights, other data    0 2 | 1 3 | 4 6 | 5 7
             pp  consecutive layers          0 4 | 1 5 | 2 6 | 3 7

cp splits each sequence over ranks with the same weights: gradients are summed over dp x cp ranks.
ep deals out experts over the same dp x cp ranks (with --fold-experts over tp, too). --islands N is
outermost: N meshes that average rarely (diloco.py). `mesh` makes all groups.

Batch, loss and gradient norm are global: --batch counts the sequences of all ranks, the loss is the
sum over all tokens divided by their number, and the norm counts every parameter once. So every
layout has the same loss curve, to rounding; only islands have their own. If a model has less than
20 million parameters, three steps are compared with one process (--prove). docs/use/choose.md says
which layout to take. Without torchrun train.py starts the processes itself.

To read: `mesh`, `build`, which cuts the model, `train_step` (its passes: trainer/runner.py).

    torchrun --nproc_per_node=8 train.py --dp 2 --tp 2 --pp 2
    python train.py --dp 2 --cp 2 --tp 2 --pp 2 --ep 4 --experts 8 --sp --zero 1     # 16 ranks
    python train.py --dp 2 --out runs/a --save-every 50
    python train.py --tp 2 --out runs/a --resume --steps 400     # goes on in another layout
"""

import functools
import math

import harness  # first: it handles Ctrl-C

# isort: split
import torch
import torch.distributed as dist

import advanced  # noqa: F401  (after this its lessons are imported by their plain names)
import composition
import ddp
import dualpipe
import expert_parallel
import fsdp
import mixture
import muon
import pipeline
import proof
import receipts.muon
import receipts.pipeline
import sequence_parallel
import tensor_overlap
import tensor_parallel
import zero
from harness import initialize, zero_flags
from simulator import command
from trainer import (
    document_core,
    islands,
    layout,
    pretrained,
    recording,
    sampling,
    saving,
    tracking,
    validation,
    zero_options,
)
from trainer.context import attend_over_ranks, make_core
from trainer.head_norms import cut_head_norms
from trainer.large_vocabulary import lean_head
from trainer.layout import cp_shape, open_groups, prepare, schedule_of
from trainer.runner import Runner
from trainer.tokens_on_gloo import tokens_messages


def train(run, schedule=None):
    """Train on this rank, and return the exit code. run: its flags, device, data, loss curve and
    receipt (proof/run.py). A dry run passes a schedule of its own."""
    args = run.args
    schedule = schedule or schedule_of(args)
    groups = mesh(args, schedule)
    run.groups(**groups)  # the receipt counts by these names
    open_groups(groups, run.device)  # nccl connects ranks at their first message: not in a step
    pipeline.open_links(groups["down"] + groups["up"], schedule, run.device)
    model = build(run, schedule, groups)
    optimizer = data_parallel(run, model, groups)
    runner = Runner(run, schedule, groups, model, optimizer)
    tracking.describe(run, schedule)

    # These do nothing unless their flags ask for it
    averaging = islands.make(run, model, optimizer, groups)
    checkpoints = saving.Saver(run, model, optimizer, averaging)
    first = checkpoints.load_newest()  # with --resume. The step to begin with

    # run.steps yields step numbers. It also sets the learning rate, counts the bytes of one step,
    # and compares the first ones with one process (--prove)
    steps = tracking.profiled(run, run.steps(optimizer, first, averaging.reference))
    with tracking.open_log(run, first) as log_row, recording.recorded(runner, first):
        for step in steps:
            taken = train_step(runner, runner.batches(step))
            if taken:
                run.log(tracking.mfu(run))
            mixture.rebalance(model, runner.sum_load, taken)  # moves routers' biases
            averaging.average_if_due(step)  # --islands
            log_row(run.history[-1])  # run.log's last row; an empty one if the step was skipped
            if checkpoints.save_if_due(step + 1):
                return run.code  # a rank received a signal to stop
            if validation.due(args, step):
                log_row({"step": step + 1, "val_loss": validation.validate(runner)})

    # Each is tried, whatever becomes of the others
    return run.conclude(
        lambda: sampling.show(runner),
        # The receipt, with what islands send. There is none if no step was run
        lambda: first < args.steps and run.receipt(*averaging.expected(*runner.expected())),
        lambda: pretrained.export(run, model, optimizer, groups.get("island")),
    )


def train_step(runner, batches):
    """One step on this rank, in any layout. Returns whether it counts. batches: this replica's
    micro-batches, of whole sequences; its tp, cp and pp ranks all have the same."""
    optimizer, groups = runner.optimizer, runner.groups
    optimizer.zero_grad()
    # Every layout runs through pipeline.py's executor, without --pp as one stage. The loss is a sum
    # over this rank's tokens / the targets of all ranks, and 0 on a rank without the last stage
    loss = runner.forward_backward(batches)
    optimizer.finish()  # waits for the gradients' sums over replicas, which began in backward
    harness.sum_over([groups["dp"], groups["pp"]], loss)  # of all tokens, on every rank
    # The norm of the whole gradient. dp ranks have copies of it, or ZeRO's shards; tp ranks have
    # their rows or columns, pp ranks their layers
    parts, grid = optimizer.gradient_parts(), [groups["dp"], groups["tp"]]
    norm = composition.norm_in_grid(parts, grid, groups["pp"])
    # If loss or norm is not finite, step() must change nothing. It learns that on the device, from
    # a tensor found_inf. So the host queues the step unknowing, and waits for both at the end
    all_finite = runner.check(batches, loss, norm)
    optimizer.clip(norm, runner.run.args.grad_clip)
    optimizer.step()
    return all_finite()


# --- the mesh


def mesh(args, schedule):
    """This rank's process groups, by name. All ranks create all groups, in the same order.

    tp, pp           as in the picture on top
    dp               replicas of the same weights: dp x cp ranks (the picture has cp 1)
    cp               ranks that share sequences; ring, ulysses: its two dimensions, if it has two
    ep, copies       ranks that together hold all experts once; ranks with the same experts
    inside, across   --zero-ranks: ranks that together hold the states once; ranks with the same
                     shard of them
    tied             the pp ranks with a tied matrix, one or two: their gradients of it add up
    island, islands  ranks of one island; ranks with the same place in every island
    down, up         a pipeline's activations and gradients, each to later ranks and to earlier ones
                     (where a rank has an early and a late stage, as in zb-v)"""
    size = args.islands, args.pp, args.dp, args.cp, args.tp
    ranks = torch.arange(math.prod(size)).view(size)  # (islands, pp, dp, cp, tp)
    # In each view the last dimension is one group's ranks. "..." is islands; the numbers are the
    # groups in the picture on top
    dp = ranks.flatten(-3, -2).transpose(-2, -1)  # (..., pp, tp, dp cp): 0 2 | 1 3 | 4 6 | 5 7
    cp = ranks.transpose(-2, -1).unflatten(-1, cp_shape(args))  # (..., pp, dp, tp, ring, ulysses)
    experts = ranks.flatten(-3) if args.fold_experts else dp  # (..., pp, dp cp tp), or as dp
    experts = experts.unflatten(-1, (-1, args.ep))  # (..., copies, ep)
    copies = experts.transpose(-2, -1)
    pp = ranks.flatten(-3).transpose(-2, -1)  # (..., dp cp tp, pp): 0 4 | 1 5 | 2 6 | 3 7
    tied = pp[..., [schedule.owner[0], schedule.owner[schedule.last]]]
    views = {"tp": ranks, "dp": dp, "cp": cp.flatten(-2), "pp": pp, "tied": tied}
    if args.cp_kind == "ring-ulysses":
        views |= {"ring": cp.transpose(-2, -1), "ulysses": cp}
    if args.ep > 1:
        views |= {"ep": experts, "copies": copies}
    if args.zero_ranks:
        views |= zero_flags.split_ranks(dp, args.zero_ranks, copies if args.ep > 1 else None)
    if args.islands > 1:
        views |= {"island": ranks.flatten(1), "islands": ranks.flatten(1).T}
    groups = {name: own_group(view) for name, view in views.items()}
    # nccl sends a group's messages one after the other: in fewer groups two could block each other
    links = [own_group(pp) for _ in range(4)]
    return groups | {"down": links[:2], "up": links[2:]}


def own_group(view):
    """Make a group of each row (..., ranks of a group). Returns this rank's, or None."""
    own = None
    for row in view.flatten(0, -2).tolist():
        group = dist.new_group(sorted(set(row)))  # `tied` may name a rank twice
        if dist.get_rank() in row:
            own = group
    return own


# --- the model


def build(run, schedule, groups):
    """This rank's stages of the model, cut on the meta device: no memory, no weights yet.

    Each technique replaces modules in place, and notes in p.placement which part of p is here, and
    over which ranks its gradient is summed (composition.py). Data parallelism, the norm and
    checkpoints read nothing else of the techniques. The order: first the cuts (stages, tp, the
    loss, cp, ep), then what wraps a whole block: recomputation, then torch.compile."""
    args, tp, cp = run.args, groups["tp"], groups["cp"]
    turns = dualpipe.Turns()  # --schedule dualpipev: while one micro-batch waits another computes
    stages = schedule.stages(dist.get_rank(groups["pp"]))
    layers = receipts.pipeline.stage_layers(run.config, schedule.last + 1)  # balanced by FLOPs
    parts = harness.split(run.meta_model, layers, stages, groups["tied"])
    core = None
    if args.cp > 1:
        core = make_core(args.cp_kind, groups, args.documents)
    for part in parts.values():
        if args.tp > 1:
            cut_head_norms(part, tp, args.sp)
        if args.sp:
            messages = tokens_messages(tp)
            sequence_parallel.parallelize_sequence(part, tp, args.fold_experts, *messages)
        elif args.tp > 1:
            tensor_parallel.parallelize_tensors(part, tp)
        if args.tp > 1:
            tensor_overlap.overlap(part, args.gather_again, harness.reduce_scatter)
        else:  # the whole vocabulary is here: compute the loss a piece at a time, to hold less
            lean_head(part, args.compile)
        if args.cp > 1:
            attend_over_ranks(part, cp, core)
        elif args.documents:
            document_core.attend_by_document(part)  # faster than one process's mask
        if args.ep > 1:
            options = dict(chunks=args.expert_chunks, before_wait=turns.turn)
            copies = zero_flags.data_group(groups, "copies")
            expert_parallel.parallelize_experts(part, groups["ep"], copies, **options)
        harness.recompute(part, args.recompute)
        if args.compile:
            harness.compile_blocks(part)
    model = harness.Stages(parts)
    model.turns, model.core = turns, core
    return model


def data_parallel(run, model, groups):
    """Returns the object that sums gradients over the replicas and takes the step: DDP with an
    optimizer of torch's, Muon, ZeRO or FSDP. All four have the methods of DDPAndOptimizer, below.
    The weights are filled in here too, because ZeRO and FSDP do that piece by piece."""
    args, dp = run.args, zero_flags.data_group(groups, "dp")
    groups_of = composition.groups_in_grid(model.parameters(), dp)
    draw = pretrained.Folder(args.init_from, run.config).draw if args.init_from else initialize.draw
    # Mixed precision takes ZeRO in any case, with --zero 0 its stage 0: it has master weights
    one_dtype = args.dtype == args.param_dtype == args.reduce_dtype
    if args.zero == 0 and one_dtype and not args.offload:
        run.fill(model, draw)
        all_reduce = functools.partial(harness.all_reduce, async_op=True)
        bucket_bytes = int(args.bucket_mb * 2**20)
        # uses() lists a tied matrix twice if this rank has both ends: it gets two gradients
        options = dict(all_reduce=all_reduce, groups_of=groups_of)
        sync = ddp.DDP(model.uses(), dp, args.microbatches, bucket_bytes, **options)
        return DDPAndOptimizer(sync, harness.make_optimizer(model.parameters(), args))

    if args.optimizer == "muon":
        run.fill(model, draw)
        run.make_optimizer = receipts.muon.one_process(muon.PlainMuon)  # --prove trains with it
        blocks = [part.blocks for part in model.parts.values()]
        matrices = [p for part in blocks for p in part.parameters() if p.dim() > 1]
        options = dict(lr=args.lr, weight_decay=args.weight_decay, microbatches=args.microbatches)
        options |= dict(groups_of=groups_of, update=composition.on_whole_matrices(muon.update_of))
        return muon.Muon(model.uses(), dp, matrices, **options)

    # A rank's stages take turns in backward: ZeRO and FSDP count the passes of each
    stages = {int(stage): part for stage, part in model.parts.items()}
    options = dict(
        make_optimizer=functools.partial(harness.make_optimizer, args=args),
        microbatches=args.microbatches,
        groups_of=groups_of,
        **zero_flags.options(run, model, args.zero, draw),
    )
    if args.offload:
        options["bucket_class"] = zero_options.OffloadedBucket
    if args.zero == 3:
        return fsdp.FSDP(stages, dp, **options)
    sharded = zero.ZeRO(stages, dp, args.zero, **options)
    # Overlap: each unit (a block, for example) waits for its new weights only in its next forward.
    # Not with islands, which read all weights before that
    if args.islands == 1:
        units = [unit for part in stages.values() for unit in fsdp.default_units(part)]
        zero_options.wait_in_forward(sharded, units)
    return sharded


class DDPAndOptimizer:
    """DDP and an optimizer of torch's, as one object with the methods that train_step calls."""

    def __init__(self, sync, optimizer):
        self.sync, self.optimizer = sync, optimizer
        self.param_groups = optimizer.param_groups  # for learning rates

    def zero_grad(self):  # begins a step: from here on backward passes start sums
        self.sync.zero_grad()

    def finish(self):  # waits for the sums: p.grad, or ZeRO's shard of it, is then the batch's
        self.sync.finish()

    def gradient_parts(self):  # for the norm
        return composition.whole_gradients(self.sync.parameters)

    def clip(self, norm, limit):
        harness.clip(self.sync.parameters, norm, limit)

    def step(self):  # the others also bring the new weights to all replicas
        self.optimizer.step()

    def gather_full(self, named):  # for the proof: [(name, whole parameter with .grad)]
        return list(named)  # DDP splits nothing


# --- the command line


def flags():
    defaults = dict(steps=200, lr=3e-3, warmup=20, microbatches=None, tokenizer=None)
    parser = harness.parser(__doc__, **defaults)
    for module in (layout, validation, saving, sampling, tracking, recording, pretrained):
        module.add_flags(parser)
    command.add_flags(parser)  # --dry-run, --plan
    islands.add_flags(parser)
    parser.hide_rare()  # -h shows the usual ones, --help-all all
    return parser


def main():
    args = islands.settle(flags().parse_args())  # --batch becomes that of one island
    if args.dry_run or args.plan:
        return command.main(args, prepare, train)
    args, _ = prepare(args)  # fills in defaults, refuses what does not fit
    ranks = args.islands * args.dp * args.cp * args.tp * args.pp
    proof.launch(train, args, needed=ranks)


if __name__ == "__main__":
    harness.script(main)
