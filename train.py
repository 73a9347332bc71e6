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

cp splits each sequence over ranks that hold the same weights, so data-parallel groups have dp x cp
ranks. ep takes no ranks of its own: the experts are dealt out over ep of these dp x cp ranks, and
each expert has dp x cp / ep copies. With --fold-experts ep is a part of dp x cp x tp, and tp does
not cut experts. --islands N is outside all: N such meshes, which average their weights rarely.

Batch, loss and gradient norm are global: --batch counts the sequences of all ranks, the loss is the
sum over all tokens divided by their number, and the norm counts every parameter once. So another
layout gives the same loss curve, to rounding. The first steps are compared with one process
(--prove). docs/use/choose.md says which layout when.

    torchrun --nproc_per_node=8 train.py --dp 2 --tp 2 --pp 2
    python train.py --dp 2 --cp 2 --tp 2 --pp 2 --ep 4 --experts 8 --sp --zero 1
    python train.py --dp 2 --out runs/a --save-every 50
    python train.py --tp 2 --out runs/a --resume          without torchrun it starts its processes
"""

import functools
import math

import harness  # before torch: see harness/signals.py

# isort: split
import torch
import torch.distributed as dist

import context_parallel
import ddp
import dualpipe
import expert_parallel
import fsdp
import model as gpt
import muon
import pipeline
import proof
import receipts.muon
import receipts.pipeline
import sequence_parallel
import tensor_parallel
import zero
from harness import initialize, zero_flags
from simulator import command
from trainer import islands, layout, pretrained, recording, sampling, saving, tracking, validation
from trainer.faults import first_nonfinite, skip_where
from trainer.large_vocabulary import lean_head
from trainer.layout import cp_shape, open_groups, prepare, schedule_of
from trainer.runner import Runner

# Each adds its own flags. command: --dry-run and --plan; recording: --record
PARTS = [layout, validation, saving, sampling, tracking, recording, pretrained, command, islands]


def flags():
    p = harness.parser(__doc__, steps=200, lr=3e-3, warmup=20, microbatches=None, tokenizer=None)
    for part in PARTS:
        part.add_flags(p)
    p.hide_rare()
    return p


def main():
    args = islands.settle(flags().parse_args())  # --batch becomes that of one island
    if args.dry_run or args.plan:
        return command.main(args, prepare, train)
    args, _ = prepare(args)  # defaults filled in, what does not fit refused
    ranks = args.islands * args.dp * args.cp * args.tp * args.pp
    proof.launch(train, args, needed=ranks)


# --- the mesh


def mesh(args, schedule, config):
    """This rank's process groups, by name. All ranks create all groups, in the same order.

    tp, pp    as in the picture on top
    cp        ranks that share sequences
    dp        all ranks with the same weights, dp x cp of them
    kv        of the tp ranks, those that have one key/value head together
    tied      of the pp ranks, the one or two that hold a tied matrix: DDP and ZeRO sum over it

    Each view below has the ranks of a group in its last dimension."""
    size = args.islands, args.pp, args.dp, args.cp, args.tp
    ranks = torch.arange(math.prod(size)).view(size)
    dp = ranks.flatten(2, 3).transpose(2, 3)  # (islands, pp, tp, dp cp)
    cp = ranks.transpose(3, 4).unflatten(4, cp_shape(args))  # (islands, pp, dp, tp, ring, ulysses)
    experts = ranks.flatten(2) if args.fold_experts else dp  # with tp's ranks, or without
    experts = experts.unflatten(-1, (-1, args.ep))  # (islands, pp, perhaps tp, copies, ep)
    copies = experts.transpose(-1, -2)
    pp = ranks.flatten(2).transpose(1, 2)  # (islands, dp cp tp, pp)
    tied = pp[..., [schedule.owner[0], schedule.owner[schedule.last]]]

    def own_group(rows):
        """Make a group of each row, in the last dimension. Return this rank's group, or None."""
        own = None
        for row in rows.flatten(0, -2).tolist():
            group = dist.new_group(sorted(set(row)))  # `tied` may name a rank twice
            if dist.get_rank() in row:
                own = group
        return own

    groups = {"tp": own_group(ranks), "dp": own_group(dp)}
    groups |= {"cp": own_group(cp.flatten(4)), "pp": own_group(pp), "tied": own_group(tied)}
    if args.cp_kind == "ring-ulysses":  # the two dimensions of the cp ranks
        groups |= {"ring": own_group(cp.transpose(4, 5)), "ulysses": own_group(cp)}
    if args.tp > config.kv_heads:
        groups["kv"] = own_group(ranks.unflatten(4, (config.kv_heads, -1)))
    if args.ep > 1:  # ranks that share one copy of the experts; those with the same experts
        groups |= {"ep": own_group(experts), "copies": own_group(copies)}
    if args.zero_ranks:  # "inside" splits one copy of the states, "across" has the same shards
        views = zero_flags.split_ranks(dp, args.zero_ranks, copies if args.ep > 1 else None)
        groups |= {name: own_group(view) for name, view in views.items()}
    if args.islands > 1:  # all ranks of an island; those with the same place in every island
        groups |= {"island": own_group(ranks.flatten(1)), "islands": own_group(ranks.flatten(1).T)}
    # Activations and gradients, to later ranks and to earlier ones: see pipeline.make_links
    return groups | {"down": [own_group(pp), own_group(pp)], "up": [own_group(pp), own_group(pp)]}


# --- the model


def build(run, schedule, groups, turns):
    """This rank's stages of the model, cut on the meta device: no memory, no weights yet.

    turns: lets a forward and a backward, in two threads, take turns (dualpipe.py)."""
    args, tp, cp = run.args, groups["tp"], groups["cp"]
    stages = schedule.stages(dist.get_rank(groups["pp"]))
    layers = receipts.pipeline.stage_layers(run.config, schedule.last + 1)
    parts = harness.split(run.meta_model, layers, stages, groups["tied"])
    for part in parts.values():
        if args.sp:
            options = dict(keep_gathered=not args.gather_again, whole_experts=args.fold_experts)
            sequence_parallel.parallelize_sequence(part, tp, kv_group=groups.get("kv"), **options)
        elif args.tp > 1:
            tensor_parallel.parallelize_tensors(part, tp, groups.get("kv"))
        else:
            lean_head(part, args.compile)  # the loss in pieces, for large vocabularies
        if args.cp > 1:
            grid = dict(ring_group=groups.get("ring"), ulysses_group=groups.get("ulysses"))
            context_parallel.parallelize_context(part, cp, args.cp_kind, **grid)
        if args.ep > 1:
            options = dict(chunks=args.expert_chunks, before_wait=turns.turn)
            expert_parallel.parallelize_experts(part, groups["ep"], groups["copies"], **options)
        harness.recompute(part, args.recompute)
        if args.compile:
            harness.compile_blocks(part)
    return harness.Stages(parts)


def data_parallel(run, model, groups):
    """Fill the model with weights. Returns one object that sums the gradients over the replicas and
    takes the step: Muon, DDP with an optimizer of torch's, ZeRO or FSDP. All of them have

        zero_grad()                starts a step. In its backward passes, sums begin
        finish()                   waits until the gradients are summed
        grad_norm(pipeline_group)  of the whole model's gradient, the same on all ranks
        clip(norm, limit)          scales the gradients
        step()                     steps, and brings the new weights to all replicas
        gather_full(named)         [(name, parameter)] that no replica splits, with gradients
        param_groups               for learning rates"""
    args, dp = run.args, groups["dp"]
    # Weights from a Hugging Face folder, or drawn from --seed
    draw = pretrained.Folder(args.init_from, run.config).draw if args.init_from else initialize.draw
    # In a pipeline the backward passes of a rank's stages alternate: they must be told apart
    stages = {int(stage): part for stage, part in model.parts.items()}

    if args.optimizer == "muon":
        run.fill(model, draw)
        # The one process of --prove steps with this optimizer, which splits nothing
        run.make_optimizer = receipts.muon.one_process(muon.PlainMuon)
        matrices = receipts.muon.matrices_of(model)
        return muon.Muon(model, dp, matrices, args.lr, args.weight_decay, args.microbatches, stages)

    # Mixed precision needs ZeRO even at stage 0: it keeps master weights, in --dtype
    one_dtype = args.dtype == args.param_dtype == args.reduce_dtype
    if args.zero == 0 and one_dtype and not args.offload:
        run.fill(model, draw)
        all_reduce = functools.partial(harness.all_reduce, async_op=True)
        bucket_bytes = int(args.bucket_mb * 2**20)
        # uses(): lists a matrix that two stages of this rank share twice. It gets two gradients
        sync = ddp.DDP(model.uses(), dp, args.microbatches, bucket_bytes, all_reduce=all_reduce)
        return DDPAndOptimizer(sync, harness.make_optimizer(model.parameters(), args))

    options = dict(
        make_optimizer=functools.partial(harness.make_optimizer, args=args),
        microbatches=args.microbatches,
        pipeline_stages=stages,
        hsdp=zero_flags.hsdp(groups),
        **zero_flags.options(run, model, args.zero, draw),
    )
    if args.zero == 3:
        return fsdp.FSDP(model, dp, **options)
    sharded = zero.ZeRO(model, dp, args.zero, **options)
    if args.islands == 1:  # islands write averages to the weights between two steps
        # A unit of the model reads only its own weights: it waits for them when its forward begins
        units = [unit for part in stages.values() for unit in fsdp.default_units(part)]
        zero.wait_in_forward(sharded, units)
    return sharded


class DDPAndOptimizer:
    """DDP and an optimizer of torch's, as one object."""

    gather_full = staticmethod(list)  # nothing is split

    def __init__(self, sync, optimizer):
        self.parameters, self.optimizers = sync.parameters, [optimizer]
        self.zero_grad, self.finish = sync.zero_grad, sync.finish
        self.step, self.param_groups = optimizer.step, optimizer.param_groups

    def grad_norm(self, pipeline_group):
        return harness.grad_norm(self.parameters, [pipeline_group])

    def clip(self, norm, limit):
        harness.clip(self.parameters, norm, limit)


# --- training


def forward_backward(runner, batches):
    """Forward and backward of a step on this rank. Leaves the gradients of the whole batch, and
    returns this rank's part of the loss: of its own tokens, and 0 without the last stage."""
    runner.optimizer.zero_grad()
    with runner.expert_rows:  # counts for the receipt
        losses = runner.run_pipeline(runner.schedule, batches, runner.run.target_count)
    runner.optimizer.finish()  # sums over replicas began in backward
    return sum(losses, runner.run.zero())


def train(run, schedule=None):
    """Train on this rank, and return the exit code. A dry run passes a schedule of its own."""
    args = run.args
    if schedule is None:
        schedule = schedule_of(args)

    # What trains: the groups, this rank's part of the model, the optimizer over its replicas
    groups = mesh(args, schedule, run.config)
    run.groups(**groups)  # the receipt counts by these names
    open_groups(groups, run.device)
    pipeline.open_links(groups["down"] + groups["up"], schedule, run.device)
    turns = dualpipe.Turns()
    model = build(run, schedule, groups, turns)
    optimizer = data_parallel(run, model, groups)
    runner = Runner(run, schedule, groups, model, turns, optimizer)
    dp, tp, pp, island = (groups.get(name) for name in ("dp", "tp", "pp", "island"))

    # What goes with it. Each does nothing unless its flags ask for it
    tracking.describe(run, schedule)
    averaging = islands.make(run, model, optimizer, groups)
    checkpoints = saving.Saver(run, model, optimizer, averaging)
    first = checkpoints.first_step()  # 0, or that after a checkpoint's
    sampling.show_untrained(runner, first)
    # Sets the learning rate, counts a step's bytes for the receipt, compares with one process
    steps = tracking.profiled(run, run.steps(optimizer, first, averaging.reference))
    # A function: the parameters that no replica splits, by name, with gradients
    full_weights = functools.partial(optimizer.gather_full, model.named())
    # --sp: the ranks of tp route different tokens, which all count in the experts' load
    sum_load = functools.partial(harness.sum_over, [dp, tp] if args.sp else [dp])

    with (
        tracking.open_log(run, first) as write_row,
        recording.recorded(runner, full_weights, first) as record,
    ):
        # A step: zero_grad, forwards and backwards, sums of gradients, norm, clip, optimizer.step
        for step in steps:
            batches = runner.batches(step)
            loss = forward_backward(runner, batches)
            harness.sum_over([dp, pp], loss)  # of all tokens, on every rank
            # The norm of the whole model's gradient, the same on all ranks: all of them clip alike
            norm = optimizer.grad_norm(pipeline_group=pp)
            record(batches, loss, norm)

            # The device leaves the step out if loss or norm are not finite. So the host queues the
            # step first, and waits for the two numbers while the device computes
            skip_where(run.start_check(loss, norm, full_weights), optimizer)
            optimizer.clip(norm, args.grad_clip)
            optimizer.step()
            # All ranks decide alike. To name the gradient that is not finite, forward and backward
            # run again, with the same weights
            rerun = functools.partial(forward_backward, runner, batches)
            blame = functools.partial(first_nonfinite, model, rerun)
            taken = run.end_check(blame, group=island)
            if taken:
                run.log(loss, norm, tracking.mfu(run))
            gpt.rebalance(model, sum_load, taken)  # moves routers' biases towards an even load
            averaging.average_if_due(step)

            # Between two steps
            write_row(run.history[-1])
            if checkpoints.save_if_due(step + 1):  # and a rank received a signal to stop
                return 0
            if validation.due(args, step):
                val_loss = validation.validate(run, runner, [dp, pp])
                write_row({"step": step + 1, "val_loss": val_loss})

    # After the last step
    sampling.show(runner)
    code = 0
    if first < args.steps:  # without a step there is no receipt
        code = run.receipt(*averaging.expected(*runner.expected()))
    pretrained.export(run, model, optimizer, island)
    return code


if __name__ == "__main__":
    harness.script(main)
