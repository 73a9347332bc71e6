"""Train a GPT in any layout: five kinds of parallelism from flags, and the same curve in all of
them.

    torchrun --nproc_per_node=8 train.py --dp 2 --tp 2 --pp 2        python train.py --dp 2 --tp 2 --pp 2
    python train.py                                                  python train.py --preset gpt2 --dtype bfloat16
    python train.py --dp 2 --cp 2 --tp 2 --pp 2 --ep 4 --experts 8 --sp --zero 1
    python train.py --dp 2 --out runs/a --save-every 50              python train.py --tp 2 --out runs/a --resume

The order of the ranks: tp innermost, so that tensor parallelism stays inside a node; then cp, dp,
and pp outermost. Here dp 2, tp 2, pp 2 on 8 ranks:

              stage 0             stage 1            tp    ranks with pieces of the same layers:       0 1 | 2 3 | 4 5 | 6 7
            tp 0   tp 1         tp 0   tp 1          dp    ranks with the same weights, other data:    0 2 | 1 3 | 4 6 | 5 7
    dp 0     0      1            4      5            pp    ranks with consecutive layers:              0 4 | 1 5 | 2 6 | 3 7
    dp 1     2      3            6      7

cp splits each sequence over ranks that hold the same weights, so data-parallel groups have dp x cp
ranks. ep takes no ranks of its own: the experts are dealt out over ep of these dp x cp ranks, and
each expert has dp cp / ep copies.

Batch, loss and gradient norm are global, whatever the layout. --batch is the number of sequences
over all ranks. The loss is the sum over all tokens divided by their number. The norm counts every
parameter once. So the same flags give the same run on one process and on any number, to rounding.
The first steps are compared with one process, and the receipt at the end says how far apart they
were (--prove).
"""

import contextlib
import copy
import datetime
import functools
import os
import shutil

import torch
import torch.distributed as dist

import context_parallel
import ddp
import expert_parallel
import harness
import model as gpt
import pipeline
import sequence_parallel
import tensor_parallel
import zero
from harness import Refused
from trainer import faults, formulas, planner, pretrained, sampling, saving, tracking


def flags():
    p = harness.parser(__doc__, steps=200, lr=3e-3, warmup=20, microbatches=None)
    n = harness.POSITIVE
    g = p.add_argument_group("the layout (ranks = dp x cp x tp x pp)")
    g.add_argument("--dp", **n, default=1, help="data parallel: N copies share the batch")
    g.add_argument(
        "--tp", **n, default=1, help="tensor parallel: each layer cut N ways; keep it inside a node"
    )
    why = "sequence parallel: tensor-parallel ranks share the tokens between their layers; as much is sent, less is held"
    g.add_argument("--sp", action="store_true", help=why)
    why = "with --sp: hold still less, and send a quarter more"
    g.add_argument("--gather-again", action="store_true", help=why)
    g.add_argument("--pp", **n, default=1, help="pipeline parallel: N stages of consecutive layers")
    why = "context parallel: each sequence is split over N ranks; see context_parallel.py"
    g.add_argument("--cp", **n, default=1, help=why)
    g.add_argument(
        "--cp-kind",
        choices=context_parallel.KINDS,
        default="ring",
        help="how attention sees all of it",
    )
    g.add_argument(
        "--cp-rings", **n, help="ranks of a ring, for ring-ulysses (default: the most square)"
    )
    why = "expert parallel: N of the dp x cp ranks deal the --experts out among them, in place of copies"
    g.add_argument("--ep", **n, default=1, help=why)
    why = "pieces of a rank's tokens on their way to experts: one travels while another is computed"
    g.add_argument("--expert-chunks", **n, default=1, help=why)
    why = "how far a bias on the router's choice moves towards even load after each step: balance without a loss; 0 = off"
    g.add_argument("--bias-rate", type=harness.real(0), default=0.0, metavar="X", help=why)
    why = "order of the micro-batches in a pipeline"
    g.add_argument("--schedule", choices=list(pipeline.SCHEDULES), default="1f1b", help=why)
    g.add_argument(
        "--chunks", **n, help="stages a rank holds, for --schedule interleaved (default: 2)"
    )
    why = "pieces of each data-parallel rank's part: more of them shrink the bubble, the curve stays (default: up to 2 x pp)"
    g.add_argument("--microbatches", **n, help=why)
    why = "size of a gradient bucket: small ones overlap more of backward, large ones send faster"
    g.add_argument("--bucket-mb", type=harness.real(0), default=25, metavar="MB", help=why)
    why = "what data-parallel ranks split: 1 optimizer states, 2 gradients too, 3 weights too (FSDP); see zero.py"
    g.add_argument("--zero", type=int, choices=range(4), default=0, help=why)
    why = "ZeRO 2, 3: reduce gradients once a step, not each micro-batch. Less is sent, all of them are held"
    g.add_argument("--reduce-once", action="store_true", help=why)
    why = "ZeRO 3: keep gathered weights from forward until backward. A third less is sent, all of them are held"
    g.add_argument("--keep-gathered", action="store_true", help=why)
    why = "hold less of each block until backward, which runs it again: norms and activation functions, or all of it"
    g.add_argument("--recompute", choices=["none", "selective", "block"], default="none", help=why)
    why = "torch.compile each block: slow to start (and needs a C++ compiler), faster then"
    g.add_argument("--compile", action="store_true", help=why)
    harness.precision_flags(g)
    g = p.add_argument_group("the loop")
    g.add_argument(
        "--min-lr",
        type=harness.real(0),
        metavar="X",
        help="where the cosine ends (default: lr / 10)",
    )
    g.add_argument(
        "--eval-every",
        **harness.NATURAL,
        default=100,
        help="steps between validations; 0 = only at the end",
    )
    g.add_argument("--eval-batches", **n, default=4, help="global batches that a validation takes")
    why = "leave out up to N steps whose loss or gradient is not finite; without it the first such step ends the run"
    g.add_argument("--skip-nan", **harness.NATURAL, default=0, help=why)
    why = "compare the first N steps with one process (default: 3 for models below 20M parameters, else 0)"
    g.add_argument("--prove", **harness.NATURAL, help=why)
    for part in (saving, sampling, tracking, pretrained, planner):
        part.add_flags(p)
    return p


def main():
    args = flags().parse_args()
    if args.dry_run or args.plan:
        return planner.main(args, prepare, train)
    args, _ = prepare(args)
    harness.launch(train, args, needed=args.dp * args.cp * args.tp * args.pp)


# --- what the flags mean


def prepare(args):
    """(the flags, with what follows from others filled in; the model's Config). Refuses what does
    not fit, before any process is started. Changes nothing."""
    args = copy.copy(args)
    args.shape = pretrained.shape_of(args)
    config = harness.configure(args)
    if args.microbatches is None:
        rows, most = args.batch // args.dp, 2 * args.pp if args.pp > 1 else 1
        args.microbatches = max(m for m in range(1, most + 1) if m == 1 or rows % m == 0)
    args.param_dtype = args.param_dtype or args.dtype
    args.reduce_dtype = args.reduce_dtype or args.param_dtype
    if args.prove is None:
        args.prove = 3 if config.parameters() < 20e6 else 0
    if args.out and saving.restarted():
        args.resume = True
    check(args, config)
    return args, config


def check(args, config):
    """Refuse a layout that does not exist for these sizes, and flags that mean nothing."""
    tensor_parallel.check(config, args.tp)
    pipeline.check_layout(args, config, args.pp)
    if args.ep > 1 and config.experts < args.ep:
        hint = f"--experts {args.ep} or more" if config.experts else "--experts, or leave --ep out"
        raise Refused(
            f"--ep {args.ep} with {config.experts} experts: each rank needs one; use {hint}"
        )
    if args.dp * args.cp % args.ep:
        raise Refused(
            f"--ep {args.ep} does not divide the {args.dp * args.cp} ranks of --dp x --cp, where experts live"
        )
    context_parallel.check_shape(config, *cp_shape(args), args.cp, args.tp)
    length = len(places(args, config.context, 0))
    if config.experts and (length * args.cp != config.context or args.sp and length % args.tp):
        raise Refused(
            f"experts take no padding: --context {config.context} must divide by 2 x --cp, and with --sp by --tp too"
        )
    harness.check_batch(args, args.dp)
    needs = {
        "cp_rings": (args.cp_kind == "ring-ulysses", "--cp-kind ring-ulysses"),
        "gather_again": (args.sp, "--sp"),
        "keep_gathered": (args.zero == 3, "--zero 3"),
        "reduce_once": (args.zero >= 2, "--zero 2 or 3"),
    }
    for name, (there, what) in needs.items():
        if getattr(args, name) and not there:
            raise Refused(
                f"--{name.replace('_', '-')} means nothing without {what}: add that, or leave it out"
            )
    if args.compile and not any(
        map(shutil.which, (os.environ.get("CXX", "g++"), "g++", "clang++"))
    ):
        raise Refused("--compile needs a C++ compiler: install g++, or leave --compile out")
    if args.compile and config.experts:
        raise Refused(
            "--compile does not go with --experts, whose shapes change every step: leave one of them out"
        )
    for part in (saving, sampling, tracking, planner):
        part.check(args)
    pretrained.check(args, config)


# --- the mesh


def cp_shape(args):
    """The context-parallel ranks as ring x ulysses."""
    return context_parallel.grid(args.cp_kind, args.cp, args.cp_rings)


def places(args, length, rank):
    """The positions of a sequence that a context-parallel rank holds, padding at the end."""
    zigzag = args.cp > 1 and args.cp_kind != "ulysses"
    return context_parallel.positions(length, rank, *cp_shape(args), zigzag)


def mesh(args, schedule):
    """This rank's process groups, by name. All ranks create all groups, in the same order.

    tp, cp, pp: as in the picture on top. dp: all ranks with the same weights, dp x cp of them.
    ring, ulysses: of the cp ranks.
    ep: of the dp ranks, those that deal the experts out; copies: those that hold the same experts.
    tied: of the pp ranks, the two that hold a tied matrix; down, up: one group for each queue of
    messages between stages."""
    ranks = torch.arange(args.pp * args.dp * args.cp * args.tp).view(
        args.pp, args.dp, args.cp, args.tp
    )
    dp = ranks.flatten(1, 2).transpose(1, 2)  # (pp, tp, dp cp)
    cp = ranks.transpose(2, 3).unflatten(3, cp_shape(args))  # (pp, dp, tp, ring, ulysses)
    experts = dp.unflatten(2, (-1, args.ep))  # (pp, tp, copies, ep)
    pp = ranks.flatten(1).T
    owner = pipeline.owners(schedule)
    tied = torch.stack((pp[:, owner[0]], pp[:, owner[len(owner) - 1]]), 1)
    timeout = datetime.timedelta(seconds=args.timeout)

    def own(rows):
        """Makes a group of each row, in the last dimension. Returns the one that this rank is in,
        or None."""
        made = [
            (dist.new_group(sorted(set(row)), timeout), row) for row in rows.flatten(0, -2).tolist()
        ]
        return next((group for group, row in made if dist.get_rank() in row), None)

    groups = {
        "tp": own(ranks),
        "dp": own(dp),
        "cp": own(cp.flatten(3)),
        "pp": own(pp),
        "tied": own(tied),
    }
    if args.cp_kind == "ring-ulysses":
        groups |= {"ring": own(cp.transpose(3, 4)), "ulysses": own(cp)}
    if args.ep > 1:
        groups |= {"ep": own(experts), "copies": own(experts.transpose(2, 3))}
    return groups | {"down": [own(pp), own(pp)], "up": [own(pp), own(pp)]}


# --- the model


def build(run, schedule, groups):
    """This rank's stages of the model, cut on the meta device: no memory, no weights yet."""
    args, tp = run.args, groups["tp"]
    owner = pipeline.owners(schedule)
    stages = [stage for stage in sorted(owner) if owner[stage] == dist.get_rank(groups["pp"])]
    parts = pipeline.split(run.meta_model, len(owner), stages, groups["tied"])
    for part in parts.values():
        if args.sp:
            sequence_parallel.parallelize(part, tp, keep=not args.gather_again)
        elif args.tp > 1:
            tensor_parallel.parallelize(part, tp)
        if args.cp > 1:
            context_parallel.parallelize(
                part, groups["cp"], args.cp_kind, groups.get("ring"), groups.get("ulysses")
            )
        if args.ep > 1:
            expert_parallel.parallelize(
                part, groups["ep"], None, args.expert_chunks, groups["copies"]
            )
        gpt.recompute(part, args.recompute)
        if args.compile:
            gpt.compile_blocks(part)
    return pipeline.Stages(parts)


def data_parallel(run, model, groups):
    """Fill the model. Returns (what sums the gradients over the ranks, what takes the step): DDP
    and an optimizer of torch's, or ZeRO, which does both. Every rank draws each parameter whole,
    and keeps its piece."""
    args, bucket_bytes = run.args, int(run.args.bucket_mb * 2**20)
    if args.zero == 0 and args.dtype == args.param_dtype == args.reduce_dtype:
        run.fill(model)
        sync = ddp.DDP(model.uses(), groups["dp"], args.microbatches, bucket_bytes)
        return sync, harness.make_optimizer(model.parameters(), args)
    options = {"reduce_each": not args.reduce_once} if args.zero >= 2 else {}
    options |= {"reshard": not args.keep_gathered} if args.zero == 3 else {}
    sharded = zero.ZeRO(
        model,
        groups["dp"],
        args.zero,
        lambda pieces: harness.make_optimizer(pieces, args),
        args.microbatches,
        scopes=model.parts.values(),
        bucket_bytes=bucket_bytes,
        param_dtype=harness.DTYPES[args.param_dtype],
        reduce_dtype=harness.DTYPES[args.reduce_dtype],
        value=run.initial(model),
        **options,
    )
    return sharded, sharded


# --- the loop


def train(run):
    args, config = run.args, run.config
    schedule = pipeline.make(args.schedule, args.pp, args.microbatches, args.chunks)
    groups = mesh(args, schedule)
    tp, dp, cp, pp, links = (
        groups["tp"],
        groups["dp"],
        groups["cp"],
        groups["pp"],
        groups["down"] + groups["up"],
    )
    run.groups(**groups)
    pipeline.open_links(schedule, links, run.device)
    if args.init_from:
        source = pretrained.Folder(args.init_from, config)
        run.draw = lambda name, shape, init, seed: source.read(name, shape)
    model = build(run, schedule, groups)
    sync, optimizer = data_parallel(run, model, groups)
    parameters, stages = list(model.parameters()), [int(stage) for stage in model.parts]
    mixtures = [
        block.mlp
        for part in model.parts.values()
        for block in part.blocks.values()
        if config.experts
    ]
    replica = dist.get_rank(dp) // args.cp  # which part of the batch this rank works on
    describe(run, schedule)

    def scope(stage, complete):
        """ZeRO must know which stage's gradients come, and whether all of them do."""
        return (
            sync.backward(stages.index(stage), complete)
            if sync is optimizer
            else contextlib.nullcontext()
        )

    def play(schedule, batches, count):
        """The results of this rank's part of a schedule over micro-batches (tokens, targets,
        samples) of whole sequences."""
        length = batches[0][0].shape[1]
        where = places(args, length, dist.get_rank(cp)).to(run.device)
        positions = where.clamp(max=length - 1)  # padding must have some position

        def forward(stage, m, x):
            tokens, targets, samples = batches[m]
            x = context_parallel.shard(tokens, where) if x is None else x
            targets = (
                targets if targets is None else context_parallel.shard(targets, where, gpt.IGNORE)
            )
            return model[stage](x, positions, targets=targets, count=count, samples=samples)

        t = -(-len(where) // args.tp) if args.sp else len(where)
        shape, dtype = (len(batches[0][0]), t, config.width), harness.DTYPES[args.param_dtype]
        return pipeline.play(
            schedule, forward, shape, dtype, run.device, links, scope, getattr(run, "record", None)
        )

    def passes(batches):
        """Forward and backward of a step: leaves complete gradients, and returns this rank's part
        of the loss."""
        sync.zero_grad()
        for mixture in mixtures:
            mixture.dispatch.travelled = 0
        losses = play(schedule, batches, run.count)
        sync.finish()
        return sum(losses, run.zero())  # only the last stage has losses

    named = model.named
    if sync is optimizer:
        named = lambda: optimizer.whole(model.named())  # noqa: E731
    # Over these groups parameters are split or dealt out. ZeRO sums its shards over dp, of which ep
    # is a part
    splitting = [tp, pp] if args.ep == 1 or args.zero else [tp, groups["ep"], pp]
    saver = saving.Saver(run, model, optimizer, groups)
    run.first, stopped = saver.resume(), False
    only_sample = args.only_sample or run.first == args.steps
    if only_sample:
        run.first = args.steps  # no step is left
    with tracking.open_log(run) as log, saver:
        for step in tracking.profiled(run, run.steps(optimizer)):
            batches = run.microbatches(step, replica, args.dp)
            loss = passes(batches)
            for group in (dp, pp):
                dist.all_reduce(loss, group=group)
            norm = (
                optimizer.grad_norm(splitting)
                if sync is optimizer
                else harness.grad_norm(parameters, splitting)
            )
            if step == run.measured:  # the ledger is on
                travelled = sum(mixture.dispatch.travelled for mixture in mixtures)
            taken = run.check(
                loss,
                norm,
                named,
                blame=functools.partial(faults.blame, model, lambda: passes(batches)),
            )
            if taken:
                if sync is optimizer:
                    optimizer.clip(norm, args.grad_clip)
                else:
                    harness.clip(parameters, norm, args.grad_clip)
                optimizer.step()
                run.log(loss, norm, tracking.mfu(run))
            gpt.rebalance(
                model,
                lambda load: [dist.all_reduce(load, group=g) for g in (dp, tp)[: 1 + args.sp]],
                taken,
            )
            log(run.history[-1])
            stopped = saver.after(step + 1)
            if stopped:
                break
            if step + 1 == args.steps or args.eval_every and (step + 1) % args.eval_every == 0:
                loss = evaluate(
                    run,
                    lambda batches, count: play(pipeline.forward_only(schedule), batches, count),
                    replica,
                )
                for group in (dp, pp):
                    dist.all_reduce(loss, group=group)
                run.print(f"validation loss {loss:.4f}")
                run.restart_clock()
                log({"step": step + 1, "val_loss": loss.item()})
    if stopped:
        run.print(
            f"stopped by SIGTERM: step {step + 1} is saved in {args.out}, --resume goes on from it"
        )
        return 0
    if args.export:
        pretrained.export(run, model, optimizer, dp)

    def logits_of(window):
        """The logits after the tokens (1, T), on a rank that has the last stage and the last token;
        else None."""
        results = play(pipeline.forward_only(schedule, 1), [(window, None, None)], None)
        last = (
            (places(args, window.shape[1], dist.get_rank(cp)) == window.shape[1] - 1)
            .nonzero()
            .flatten()
        )
        if not results or not len(last):
            return None
        logits = results[0][0, last[0]]
        return tensor_parallel.gather_logits(logits, config.vocab, tp) if args.tp > 1 else logits

    if args.sample:
        owner = pipeline.owners(schedule)
        run.print(f"\nsample:\n{sampling.generate(run, logits_of, groups, owner[len(owner) - 1])}")
    if only_sample:
        return 0
    length = len(places(args, config.context, dist.get_rank(cp)))
    return run.receipt(
        *formulas.expected(run, model, optimizer, schedule, groups, length, travelled)
    )


def describe(run, schedule):
    """Say what is about to run, and which layers the stages got."""
    args, config = run.args, run.config
    layout = f"dp {args.dp}, tp {args.tp}, pp {args.pp}"
    layout += "".join(f", {axis} {n}" for axis, n in (("cp", args.cp), ("ep", args.ep)) if n > 1)
    text = f"{run.corpus.name}: {len(run.corpus.tokens):,} tokens, {run.count:,} a step"
    run.print(f"{config.parameters():,} parameters, {layout}; {text}")
    if args.pp > 1:
        layers = pipeline.stage_layers(config, len(pipeline.owners(schedule)))
        text = ", ".join(f"{r.start}-{r.stop - 1}" for r in layers)
        bubble = 1 - pipeline.utilisation(pipeline.simulate(schedule))
        run.print(
            f"stages hold layers {text}; {args.schedule}, {args.microbatches} micro-batches: bubble {bubble:.1%}"
        )


@torch.no_grad()
def evaluate(run, play, replica):
    """This rank's part of the mean loss over --eval-batches global batches of the validation
    split."""
    args, loss = run.args, run.zero()
    for i in range(args.eval_batches):
        batches = run.microbatches(i, replica, args.dp, split="val")
        # No samples: no dropout
        batches = [(tokens, targets, None) for tokens, targets, _ in batches]
        loss = sum(play(batches, run.count * args.eval_batches), loss)
    return loss


if __name__ == "__main__":
    harness.script(main)
