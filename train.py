"""Train a GPT in any layout: five kinds of parallelism from flags, and the same curve in all of them.

    torchrun --nproc_per_node=8 train.py --dp 2 --tp 2 --pp 2        python train.py --dp 2 --tp 2 --pp 2
    python train.py                                                  python train.py --preset gpt2 --dtype bfloat16
    python train.py --dp 2 --cp 2 --tp 2 --pp 2 --ep 4 --experts 8 --sp --zero 1
    python train.py --dp 2 --out runs/a --save-every 50              python train.py --tp 2 --out runs/a --resume

Rank order, tp innermost, so that tensor parallelism stays inside a node; then cp, dp, pp (here dp 2, tp 2, pp 2 on 8 ranks):

              stage 0             stage 1            tp    ranks that hold parts of the same layers:   0 1 | 2 3 | 4 5 | 6 7
            tp 0   tp 1         tp 0   tp 1          dp    ranks that hold the same, for other data:   0 2 | 1 3 | 4 6 | 5 7
    dp 0     0      1            4      5            pp    ranks that hold consecutive layers:         0 4 | 1 5 | 2 6 | 3 7
    dp 1     2      3            6      7

cp shares out each sequence, and so multiplies the ranks that hold the same weights: what is said of data-parallel groups is
about all dp x cp of them. ep takes no ranks of its own: experts are dealt out over ep of those, and have dp cp / ep copies.

"Global batch", "loss" and "gradient norm" are the global ones, whatever the layout: --batch is the number of sequences over
all ranks, the loss is the sum over all tokens divided by their number, the norm counts every parameter once. So the same
flags give the same run on one process and on any number, to rounding; the first steps are compared, and the receipt at the
end says how far apart they were (--prove).
"""

import argparse
import contextlib
import dataclasses
import datetime
import functools
import os
import re
import shutil
import signal
import tempfile

import torch
import torch.distributed as dist

import checkpoint
import collectives
import context_parallel
import data
import ddp
import dryrun
import expert_parallel
import formulas
import harness
import model as gpt
import pipeline
import pretrained
import sequence_parallel
import tensor_parallel
import tracking
import zero
from harness import Refused


def flags():
    p = harness.parser(__doc__, steps=200, lr=3e-3, warmup=20, microbatches=None)
    n = harness.POSITIVE
    g = p.add_argument_group("the layout (ranks = dp x cp x tp x pp)")
    g.add_argument("--dp", **n, default=1, help="data parallel: N copies share the batch")
    g.add_argument("--tp", **n, default=1, help="tensor parallel: each layer cut N ways; keep it inside a node")
    why = "sequence parallel: tensor-parallel ranks share the tokens between their layers; as much is sent, less is held"
    g.add_argument("--sp", action="store_true", help=why)
    why = "with --sp: hold still less, and send a quarter more"
    g.add_argument("--gather-again", action="store_true", help=why)
    g.add_argument("--pp", **n, default=1, help="pipeline parallel: N stages of consecutive layers")
    g.add_argument(
        "--cp", **n, default=1, help="context parallel: each sequence shared out over N ranks; see context_parallel.py"
    )
    g.add_argument("--cp-kind", choices=context_parallel.KINDS, default="ring", help="how attention sees all of it")
    g.add_argument("--cp-rings", **n, help="ranks of a ring, for ring-ulysses (default: the most square)")
    why = "expert parallel: N of the dp x cp ranks deal the --experts out among them, in place of copies"
    g.add_argument("--ep", **n, default=1, help=why)
    why = "pieces of a rank's tokens on their way to experts: one travels while another is computed"
    g.add_argument("--expert-chunks", **n, default=1, help=why)
    why = "how far a bias on the router's choice moves towards even load after each step: balance without a loss; 0 = off"
    g.add_argument("--bias-rate", type=harness.real(0), default=0.0, metavar="X", help=why)
    g.add_argument(
        "--schedule", choices=list(pipeline.SCHEDULES), default="1f1b", help="order of the micro-batches in a pipeline"
    )
    g.add_argument("--chunks", **n, help="stages a rank holds, for --schedule interleaved (default: 2)")
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
    g.add_argument("--min-lr", type=harness.real(0), metavar="X", help="where the cosine ends (default: lr / 10)")
    g.add_argument("--eval-every", **harness.NATURAL, default=100, help="steps between validations; 0 = only at the end")
    g.add_argument("--eval-batches", **n, default=4, help="global batches that a validation takes")
    g.add_argument("--sample", **harness.NATURAL, default=200, help="tokens to generate at the end; 0 = none")
    why = "train nothing: a sample of the newest whole checkpoint in --out, or of --init-from, whatever layout wrote it"
    g.add_argument("--only-sample", action="store_true", help=why)
    g.add_argument("--prompt", default="\n", help="what the sample starts with")
    g.add_argument(
        "--temperature",
        type=harness.real(0),
        default=0.8,
        metavar="X",
        help="of the sample: lower is safer, higher more varied",
    )
    g.add_argument("--out", metavar="FOLDER", help="where checkpoints go, one at the end at least; see checkpoint.py")
    g.add_argument("--save-every", **harness.NATURAL, default=0, help="steps between checkpoints; 0 = only at the end")
    g.add_argument("--keep", **harness.NATURAL, default=3, help="the newest N checkpoints stay; 0 = all")
    why = "leave out up to N steps whose loss or gradient is not finite; without it the first such step ends the run"
    g.add_argument("--skip-nan", **harness.NATURAL, default=0, help=why)
    why = "go on from the newest whole checkpoint in --out, whatever layout wrote it (torchrun's restarts do so by themselves)"
    g.add_argument("--resume", action="store_true", help=why)
    why = "compare the first N steps with one process (default: 3 for models below 20M parameters, else 0)"
    g.add_argument("--prove", **harness.NATURAL, help=why)
    why = "a JSON object a line, or of a FILE.csv a row: step, loss, grad_norm, lr, tokens_per_s, in full precision"
    g.add_argument("--log", metavar="FILE", help=why)
    harness.plot_flag(g, "the loss over the steps, with --resume also over those in --log; with --dry-run how it scales")
    why = "trace these steps with torch.profiler, all ranks: for ui.perfetto.dev"
    g.add_argument("--profile", type=span, metavar="A-B", help=why)
    g.add_argument("--profile-to", metavar="FOLDER", help="where the traces go: one file a rank, and all.json with all of them")
    why = "start from a Hugging Face folder of a GPT-2, Llama or Mixtral model, in any layout"
    g.add_argument("--init-from", metavar="FOLDER", help=why)
    g.add_argument("--export", metavar="FOLDER", help="write the model at the end as a folder that transformers loads")
    g.add_argument("--wandb", metavar="PROJECT", help="log to this Weights & Biases project too")
    g = p.add_argument_group("without running (see dryrun.py)")
    why = "play one step of some ranks without memory or network: what they hold, send and, on a described cluster, take"
    g.add_argument("--dry-run", action="store_true", help=why)
    why = "which: numbers, or first, middle, last, all of the stages (default: all, of more than 4 first,middle,last)"
    g.add_argument("--ranks", metavar="LIST", help=why)
    why = "h100, h200, a100, b200, or NAME=80GB,989TFLOP/s,3.35TB/s: memory, dense bf16 rate, memory bandwidth"
    g.add_argument("--gpu", default="h100", metavar="NAME", help=why)
    g.add_argument("--nodes-of", **n, default=8, help="devices in a node")
    speed = collectives.quantity(collectives.SPEED, "50GB/s")
    why = "bandwidth of a device's link inside its node, one way (default: %(default)s)"
    g.add_argument("--intra", type=speed, default="450GB/s", metavar="SPEED", help=why)
    why = "bandwidth of a device's link to other nodes, one way (default: %(default)s)"
    g.add_argument("--inter", type=speed, default="50GB/s", metavar="SPEED", help=why)
    g.add_argument("--tokens", type=harness.real(0), metavar="X", help="how many days that many tokens take, such as 15e12")
    g.add_argument("--gpus", **n, help="devices for --plan (default: those of the layout)")
    why = "search the layouts that fit, choosing --dp to --recompute itself, and say why each loses to the best"
    g.add_argument("--plan", action="store_true", help=why)
    return p


def span(text):
    """An argument type: "5-7" or "5", steps counted from 1, as a pair."""
    found = re.fullmatch(r"([1-9]\d*)(?:-([1-9]\d*))?", text)
    first, last = (int(n) for n in (found[1], found[2] or found[1])) if found else (1, 0)
    if last < first:
        raise argparse.ArgumentTypeError(f"{text!r} is not a step or a range of steps, such as 5-7")
    return first, last


def main():
    args = flags().parse_args()
    if args.dry_run or args.plan:
        return dryrun.main(args)
    config = configure(args)
    check(args, config)
    harness.launch(train, args, needed=args.dp * args.cp * args.tp * args.pp)


def configure(args):
    """The model's Config, from the flags or from --init-from, whose weights must all be there."""
    try:
        args.shape = pretrained.read_config(args.init_from) if args.init_from else None
        config = harness.configure(args)
        if args.init_from:
            pretrained.Folder(args.init_from, config).check(config.shapes().items())
        if args.export:
            pretrained.write_config(config)
            os.makedirs(args.export, exist_ok=True)
    except ValueError as e:
        raise Refused(str(e)) from e
    except OSError as e:
        raise Refused(f"--export {args.export} can't be written ({e.strerror}): give another folder") from e
    return config


def check(args, config):
    """Refuse what doesn't fit, before any process is started, and settle what follows from other flags."""
    tensor_parallel.check(config, args.tp)
    rows = args.batch // args.dp
    if args.microbatches is None:
        most = 2 * args.pp if args.pp > 1 else 1
        args.microbatches = max(m for m in range(1, most + 1) if m == 1 or rows % m == 0)
    pipeline.check_layout(args, config, args.pp)
    if args.ep > 1 and config.experts < args.ep:
        hint = f"--experts {args.ep} or more" if config.experts else "--experts, or leave --ep out"
        raise Refused(f"--ep {args.ep} with {config.experts} experts: each rank needs one; use {hint}")
    if args.dp * args.cp % args.ep:
        raise Refused(f"--ep {args.ep} does not divide the {args.dp * args.cp} ranks of --dp x --cp, where experts live")
    context_parallel.check_shape(config, *cp_shape(args), args.cp, args.tp)
    held = len(places(args, config.context, 0))
    if config.experts and (held * args.cp != config.context or args.sp and held % args.tp):
        raise Refused(f"experts take no padding: --context {config.context} must divide by 2 x --cp, and with --sp by --tp too")
    harness.check_batch(args, args.dp)
    needs = {"cp_rings": (args.cp_kind == "ring-ulysses", "--cp-kind ring-ulysses")}
    needs |= {"gather_again": (args.sp, "--sp"), "keep_gathered": (args.zero == 3, "--zero 3")}
    dry = args.dry_run or args.plan
    needs |= {"reduce_once": (args.zero >= 2, "--zero 2 or 3"), "gpus": (args.plan, "--plan")}
    needs |= {"tokens": (dry, "--dry-run"), "ranks": (dry, "--dry-run")}
    for name, (there, what) in needs.items():
        if getattr(args, name) and not there:
            raise Refused(f"--{name.replace('_', '-')} means nothing without {what}: add that, or leave it out")
    args.param_dtype = args.param_dtype or args.dtype
    args.reduce_dtype = args.reduce_dtype or args.param_dtype
    if args.min_lr is None:
        args.min_lr = args.lr / 10
    args.resume |= bool(args.out) and restarted()
    if (args.save_every or args.resume) and not args.out:
        raise Refused("--save-every and --resume need --out, the folder of the checkpoints")
    if args.only_sample and not (args.sample and (args.out or args.init_from)):
        raise Refused("--only-sample needs weights, from --out with a checkpoint or from --init-from, and a --sample above 0")
    if args.out and not args.only_sample:
        check_out(args)
    harness.check_plot(args)
    if bool(args.profile) != bool(args.profile_to):
        raise Refused("--profile (which steps) and --profile-to (which folder) need each other: give both")
    if args.profile and args.profile[1] > args.steps:
        raise Refused(f"--profile goes to step {args.profile[1]}, beyond --steps {args.steps}: choose earlier ones")
    if args.profile:
        try:
            os.makedirs(args.profile_to, exist_ok=True)
            tempfile.TemporaryFile(dir=args.profile_to).close()
        except OSError as e:
            raise Refused(f"--profile-to {args.profile_to} can't be written ({e.strerror}): give another folder") from e
    if args.wandb and os.environ.get("WANDB_MODE") not in ("offline", "disabled"):
        import wandb

        if not wandb.login(prompt=False):
            raise Refused("--wandb needs a key: run `wandb login` first, or set WANDB_MODE=offline")
    if args.prove is None:
        args.prove = 3 if config.parameters() < 20e6 else 0
    if args.compile and not any(map(shutil.which, (os.environ.get("CXX", "g++"), "g++", "clang++"))):
        raise Refused("--compile needs a C++ compiler: install g++, or leave --compile out")
    if args.compile and config.experts:
        raise Refused("--compile does not go with --experts, whose rows are other ones each step: leave one of them out")


def restarted():
    """Whether torchrun started these ranks again, after a failure (--max-restarts)."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0)) > 0


def check_out(args):
    """Refuse, before hours of training, a folder that can't be written after them, or whose checkpoints would be mixed up."""
    try:
        os.makedirs(args.out, exist_ok=True)
        tempfile.TemporaryFile(dir=args.out).close()
        there = any(os.path.exists(os.path.join(args.out, name, "index.json")) for name in os.listdir(args.out))
    except OSError as e:
        raise Refused(f"--out {args.out} can't be written ({e.strerror}): give another folder") from e
    if there and not args.resume:
        raise Refused(f"--out {args.out} has checkpoints: --resume goes on from the newest, or give another folder")


def cp_shape(args):
    """The context-parallel ranks as ring x ulysses."""
    return context_parallel.grid(args.cp_kind, args.cp, args.cp_rings)


def places(args, length, rank):
    """The positions of a sequence that a context-parallel rank holds, padding at the end."""
    zigzag = args.cp > 1 and args.cp_kind != "ulysses"
    return context_parallel.positions(length, rank, *cp_shape(args), zigzag)


def make_groups(args, schedule):
    """This rank's process groups, by name; all ranks create all groups, in the same order.

    tp, cp, pp: as in the picture above; dp: all ranks with the same weights, dp x cp of them. Of the cp ranks also rings and
    ulysses; of dp, those that deal the experts out (ep), and those that hold the same ones (copies); of pp, one for each queue
    of messages (down: activations, up: gradients), and the two ranks that hold a tied matrix."""
    ranks = torch.arange(args.pp * args.dp * args.cp * args.tp).view(args.pp, args.dp, args.cp, args.tp)
    dp = ranks.flatten(1, 2).transpose(1, 2)  # (pp, tp, dp cp)
    cp = ranks.transpose(2, 3).unflatten(3, cp_shape(args))  # (pp, dp, tp, ring, ulysses)
    experts = dp.unflatten(2, (-1, args.ep))  # (pp, tp, copies, ep)
    pp = ranks.flatten(1).T
    owner = pipeline.owners(schedule)
    tied = torch.tensor([[row[owner[0]], row[owner[len(owner) - 1]]] for row in pp.tolist()])

    timeout = datetime.timedelta(seconds=args.timeout)

    def mine(rows):
        """Of the groups of all rows, in the last dimension, the one that this rank is in, or None."""
        made = [(dist.new_group(sorted(set(row)), timeout), row) for row in rows.flatten(0, -2).tolist()]
        return next((group for group, row in made if dist.get_rank() in row), None)

    groups = {"tp": mine(ranks), "dp": mine(dp), "cp": mine(cp.flatten(3)), "pp": mine(pp), "tied": mine(tied)}
    groups |= {"ring": mine(cp.transpose(3, 4)), "ulysses": mine(cp)} if args.cp_kind == "ring-ulysses" else {}
    groups |= {"ep": mine(experts), "copies": mine(experts.transpose(2, 3))} if args.ep > 1 else {}
    return groups | {"down": [mine(pp), mine(pp)], "up": [mine(pp), mine(pp)]}


def train(run):
    args, config = run.args, run.config
    schedule = pipeline.make(args.schedule, args.pp, args.microbatches, args.chunks)
    groups = make_groups(args, schedule)
    tp, dp, cp, pp, links = groups["tp"], groups["dp"], groups["cp"], groups["pp"], groups["down"] + groups["up"]
    run.groups(**groups)
    pipeline.open_links(schedule, links, run.device)
    copy = dist.get_rank(dp) // args.cp  # which part of the batch is this rank's

    if args.init_from:
        source = pretrained.Folder(args.init_from, config)
        run.draw = lambda name, shape, init, seed: source.read(name, shape)

    # The model: cut on the meta device, then filled. Every rank draws each parameter whole, and keeps its piece
    owner = pipeline.owners(schedule)
    mine = [stage for stage in sorted(owner) if owner[stage] == dist.get_rank(pp)]
    parts = pipeline.split(run.meta_model, len(owner), mine, groups["tied"])
    for part in parts.values():
        if args.sp:
            sequence_parallel.parallelize(part, tp, keep=not args.gather_again)
        elif args.tp > 1:
            tensor_parallel.parallelize(part, tp)
        if args.cp > 1:
            context_parallel.parallelize(part, cp, args.cp_kind, groups.get("ring"), groups.get("ulysses"))
        if args.ep > 1:
            expert_parallel.parallelize(part, groups["ep"], None, args.expert_chunks, groups["copies"])
        gpt.recompute(part, args.recompute)
        if args.compile:
            gpt.compile_blocks(part)
    model = pipeline.Stages(parts)
    sync, optimizer = data_parallel(run, model, groups)
    mixtures = [block.mlp for part in parts.values() for block in part.blocks.values() if config.experts]
    describe(run, schedule)
    saved = resume(run, parts, model, optimizer, groups)
    if args.only_sample:
        run.first = args.steps  # none is left

    def scope(stage, complete):
        """ZeRO must know which stage's gradients come, and whether all of them do."""
        return sync.backward(mine.index(stage), complete) if sync is optimizer else contextlib.nullcontext()

    def play(schedule, batches, count):
        """The results of this rank's part of a schedule over micro-batches (tokens, targets, samples) of whole sequences."""
        length = batches[0][0].shape[1]
        where = places(args, length, dist.get_rank(cp)).to(run.device)
        positions = where.clamp(max=length - 1)  # padding must have some

        def forward(stage, m, x):
            tokens, targets, samples = batches[m]
            x = context_parallel.shard(tokens, where) if x is None else x
            targets = targets if targets is None else context_parallel.shard(targets, where, gpt.IGNORE)
            return model[stage](x, positions, targets=targets, count=count, samples=samples)

        t, dtype = len(where), harness.DTYPES[args.param_dtype]
        shape = (len(batches[0][0]), -(-t // args.tp) if args.sp else t, config.width)
        return pipeline.play(schedule, forward, shape, dtype, run.device, links, scope, run.record)

    def total(losses):
        """The sum of some losses, of which the last stage has all and the others none."""
        zero = torch.zeros((), dtype=torch.float64, device=run.device)
        return sum((loss.double() for loss in losses), zero)

    def passes(batches):
        """Forward and backward of a step: complete gradients, and the losses that the last stage has."""
        sync.zero_grad()
        for mixture in mixtures:
            mixture.dispatch.travelled = 0
        losses = play(schedule, batches, run.count)
        sync.finish()
        return losses

    told, stop = [], False  # to stop: preemption sends SIGTERM, and some seconds later SIGKILL
    if args.out:
        signal.signal(signal.SIGTERM, lambda *_: told.append(signal.SIGTERM))
    # Of whole parameters the first rank of a group counts; ZeRO's are never whole on two data-parallel ranks
    split = [tp, groups["ep"]] if args.ep > 1 and not args.zero else [tp]
    with tracking.open_log(run) as log, finishing(saved):
        for step in tracking.profiled(run, run.steps(optimizer)):
            batches = run.microbatches(step, copy, args.dp)
            losses = passes(batches)
            if step == run.measured:  # the ledger is on
                travelled = sum(mixture.dispatch.travelled for mixture in mixtures)
            blame = functools.partial(culprit, model, lambda: passes(batches))
            over = dict(over=[dp, pp], split=split, dealt=[pp])
            taken = run.update(step, model, optimizer, total(losses), **over, mfu=tracking.mfu(run), culprit=blame)
            gpt.rebalance(model, lambda load: [dist.all_reduce(load, group=g) for g in (dp, tp)[: 1 + args.sp]], taken)
            log(run.history[-1])
            stop = args.out and run.any(told)
            if args.out:
                save(run, saved, step + 1, parts, model, optimizer, groups, stop)
            if stop:
                break
            if step + 1 == args.steps or args.eval_every and (step + 1) % args.eval_every == 0:
                loss = evaluate(run, pipeline.forward_only(schedule), play, total, copy, [dp, pp])
                run.print(f"validation loss {loss:.4f}")
                run.restart_clock()
                log({"step": step + 1, "val_loss": loss})
    if args.out:
        with refusing():
            saved.finish()
    if stop:
        run.print(f"stopped by SIGTERM: step {step + 1} is saved in {args.out}, --resume goes on from it")
        return 0
    if args.export:
        export(run, model, optimizer, groups)
    if args.sample:
        text = generate(run, pipeline.forward_only(schedule, 1), owner[len(owner) - 1], play, groups)
        run.print(f"\nsample:\n{text}")
    if args.only_sample:
        return 0
    length = len(places(args, config.context, dist.get_rank(cp)))
    return run.receipt(*formulas.expected(run, model, optimizer, schedule, groups, length, travelled))


def data_parallel(run, model, groups):
    """Fill the model, and say who completes its gradients (zero_grad, finish) and who takes the step: plain data parallelism
    with an optimizer of torch's, or ZeRO, which is both. Every rank draws each parameter whole, and keeps its piece."""
    args, bucket_bytes, dp = run.args, int(run.args.bucket_mb * 2**20), groups["dp"]

    def take(full, parameter):
        for dim, group in getattr(parameter, "placement", {"split": {}})["split"].items():
            full = cut(full, dim, group, groups)
        return full

    if args.zero == 0 and args.dtype == args.param_dtype == args.reduce_dtype:
        run.fill(model, take)
        sync = ddp.DDP(model.uses(), dp, args.microbatches, bucket_bytes)
        return sync, harness.make_optimizer(model.parameters(), args)
    sharded = zero.ZeRO(
        model,
        dp,
        args.zero,
        lambda pieces: harness.make_optimizer(pieces, args),
        args.microbatches,
        scopes=model.parts.values(),
        bucket_bytes=bucket_bytes,
        master_dtype=run.dtype,
        param_dtype=harness.DTYPES[args.param_dtype],
        reduce_dtype=harness.DTYPES[args.reduce_dtype],
        reduce_each=not args.reduce_once,
        reshard=not args.keep_gathered,
        value=run.initial(model, take),
        device=run.device,
    )
    return sharded, sharded


def cut(full, dim, group, groups):
    """This rank's part of a tensor. Experts are dealt out whole, as evenly as can be; tensor parallelism cuts with padding."""
    piece = expert_parallel.piece if group is groups.get("ep") else tensor_parallel.piece
    return piece(full, dim, dist.get_rank(group), dist.get_world_size(group))


def extent(size, group, groups):
    """(start, size) of this rank's part, without padding, of a dimension of that size, split over a group."""
    there = cut(torch.arange(1, size + 1), 0, group, groups)  # padding is zero
    there = there[there > 0].tolist()
    return (there[0] - 1 if there else 0), len(there)


@contextlib.contextmanager
def refusing():
    try:
        yield
    except checkpoint.CheckpointError as e:
        raise Refused(str(e)) from e


def pieces(run, parts, model, optimizer, groups, states=None):
    """All that a checkpoint has of this rank: weights, optimizer states, and the routers' biases."""
    tp, dp = groups["tp"], groups["dp"]

    def copies(p):
        placement = getattr(p, "placement", {"split": {}, "partial": []})
        data = [] if run.args.zero else [placement.get("copies", dp)]
        return data + placement["partial"] + [tp] * (tp not in placement["split"].values())

    found = checkpoint.pieces_of(model.named(), optimizer, functools.partial(extent, groups=groups), copies, states)
    first = dist.get_rank(tp) == dist.get_rank(dp) == 0
    for name, buffer in (pair for part in parts.values() for pair in part.named_buffers()):
        if name.endswith("choice_bias"):
            shape = tuple(buffer.shape)
            found.append(checkpoint.Piece(name, "buffer", buffer, shape, (0,), shape, first))
    return found


def resume(run, parts, model, optimizer, groups):
    """Go on from the newest whole checkpoint, with --resume; returns who writes further ones, with --out."""
    args, config = run.args, dataclasses.asdict(run.config)
    if not args.out:
        return None
    kept = {"config": config, "tokenizer": args.tokenizer}
    if not args.only_sample:
        kept |= {"text": run.corpus.digest, "optimizer": args.optimizer, "seed": args.seed}
    if args.resume or args.only_sample:
        with refusing():
            path, index, passed = checkpoint.newest(args.out, kept, ("dropout", "balance_loss", "z_loss", "bias_rate"))
            passed = f" (passed over {'; '.join(passed)})" * bool(passed)
            if path:
                if index["step"] == args.steps and restarted():  # after the last step
                    args.only_sample = True
                if index["step"] >= args.steps and not args.only_sample:
                    raise Refused(f"{path} has all of --steps {args.steps}: give more of them, or --only-sample")
                states = None if args.only_sample else checkpoint.states_in(index)
                checkpoint.load(path, index, pieces(run, parts, model, optimizer, groups, states))
                if isinstance(optimizer, zero.ZeRO):
                    optimizer.reload()
                run.first, args.prove = index["step"], 0  # one process would have to begin at step 0
                compared = "" if args.only_sample else ", not compared with one process"
                run.print(f"resumed from {path}{compared}{passed}")
            elif args.only_sample and not args.init_from:
                raise Refused(f"--only-sample: there is no whole checkpoint in {args.out}{passed}; give another --out")
            else:
                run.print(f"no whole checkpoint in {args.out}, starting from the beginning{passed}")
    layout = {name: getattr(args, name) for name in ("dp", "tp", "pp", "cp", "ep", "sp", "zero", "schedule")}
    return checkpoint.Checkpoints(args.out, kept | {"layout": layout}, args.keep)


def save(run, saved, step, parts, model, optimizer, groups, now):
    """Between two steps: give the checkpoint that is written by now its name, and begin the next if it is time, or `now`. One
    that can't be written does not end the run, unless it is the last: the disk may have room for the next."""
    last = now or step == run.args.steps

    def attempt(work, needed=False):
        try:
            work()
        except checkpoint.CheckpointError as e:
            if needed:
                raise Refused(str(e)) from e
            if run.rank == 0:
                harness.say(f"{e}; the run goes on")

    attempt(saved.poll)
    if last or run.args.save_every and step % run.args.save_every == 0:
        attempt(saved.finish)
        attempt(lambda: saved.save(step, pieces(run, parts, model, optimizer, groups)), needed=last)
        run.restart_clock()


@contextlib.contextmanager
def finishing(saved):
    """Where the run refuses to go on, the checkpoint that is being written is still finished."""
    try:
        yield
    except Refused:
        if saved:
            with contextlib.suppress(checkpoint.CheckpointError):
                saved.finish()
        raise


def culprit(model, passes):
    """The first of this rank's parameters, in the order of backward, whose gradient is not finite, before it is added to other
    ranks': passes() plays the step's forward and backward again to see. Returns (name or None, where it is)."""
    found = []

    def watch(name, where):
        return lambda gradient: None if gradient.isfinite().all() else found.append((name, where))

    watching = []
    for stage, part in model.parts.items():
        named = [(name, p) for name, p in part.named_parameters() if p.requires_grad]
        watching += [p.register_hook(watch(name, f", stage {stage}")) for name, p in named]
    passes()
    for handle in watching:
        handle.remove()
    return found[0] if found else (None, "")


def describe(run, schedule):
    """What is about to run, and how the stages came out."""
    args, config = run.args, run.config
    layout = f"dp {args.dp}, tp {args.tp}, pp {args.pp}"
    layout += "".join(f", {axis} {n}" for axis, n in (("cp", args.cp), ("ep", args.ep)) if n > 1)
    text = f"{run.corpus.name}: {len(run.corpus.tokens):,} tokens, {run.count:,} a step"
    run.print(f"{config.parameters():,} parameters, {layout}; {text}")
    if args.pp > 1:
        layers = pipeline.stage_layers(config, len(pipeline.owners(schedule)))
        text = ", ".join(f"{r.start}-{r.stop - 1}" for r in layers)
        bubble = 1 - pipeline.utilisation(pipeline.simulate(schedule))
        run.print(f"stages hold layers {text}; {args.schedule}, {args.microbatches} micro-batches: bubble {bubble:.1%}")


@torch.no_grad()
def evaluate(run, schedule, play, total, copy, groups):
    """The mean loss over --eval-batches global batches of the validation split."""
    args = run.args
    loss = torch.zeros((), dtype=torch.float64, device=run.device)
    for i in range(args.eval_batches):
        batches = run.microbatches(i, copy, args.dp, split="val")
        batches = [(tokens, targets, None) for tokens, targets, _ in batches]  # no samples: no dropout
        loss += total(play(schedule, batches, run.count * args.eval_batches))
    for group in groups:
        dist.all_reduce(loss, group=group)
    return loss.item()


@torch.no_grad()
def generate(run, schedule, last, play, groups):
    """--sample tokens after --prompt, drawn from the whole layout's logits. Token i is drawn with a hash of (seed, i), so
    that every layout draws alike. last: the pipeline rank that has the last stage."""
    args, config, encoding = run.args, run.config, run.corpus.encoding
    tokens = encoding.encode_ordinary(args.prompt) or [encoding.eot_token]
    for i in range(args.sample):
        window = torch.tensor([tokens[-config.context :]], device=run.device)
        results = play(schedule, [(window, None, None)], None)
        token = torch.zeros(1, dtype=torch.int64, device=run.device)
        here = (places(args, window.shape[1], dist.get_rank(groups["cp"])) == window.shape[1] - 1).nonzero().flatten()
        for logits in results if len(here) else ():  # on the last stage, of who has the last token
            logits = logits[0, here[0]]
            if args.tp > 1:
                logits = tensor_parallel.gather_logits(logits, config.vocab, groups["tp"])
            logits = logits[: encoding.n_vocab].double() / max(args.temperature, 1e-6)
            chance = torch.tensor([data.hash64(args.seed, i) / 2**64], dtype=torch.float64, device=run.device)
            cumulated = logits.softmax(0).cumsum(0)
            token = torch.searchsorted(cumulated, chance * cumulated[-1]).clamp(max=len(cumulated) - 1)
        dist.all_reduce(token, group=groups["cp"])  # all others have zero
        dist.broadcast(token, group=groups["pp"], group_src=last)
        tokens.append(token.item())
    return encoding.decode(tokens)


@torch.no_grad()
def export(run, model, optimizer, groups):
    """Write the whole model from rank 0, parameter by parameter: each rank puts what it alone answers for into zeros, and the
    sum over all ranks is the whole. No rank has more than one parameter, and one file of the folder."""
    mine = {name: p for name, p in model.named()}
    flat = {}  # ZeRO's parts: (first element, values) of the flattened piece that this rank would have without it
    for bucket in optimizer.buckets if isinstance(optimizer, zero.ZeRO) else ():
        for p, at, span in zip(bucket.parameters, bucket.starts, bucket.spans):
            first = bucket.own.start + span.start - at
            answers = bucket.length < bucket.size or dist.get_rank(bucket.group) == 0
            flat[p] = (max(first, 0), bucket.master[span]) if answers else (0, bucket.master[:0])

    def wholes():
        for name, shape in run.config.shapes().items():
            whole = torch.zeros(shape, dtype=run.dtype, device=run.device)
            if name in mine:
                place(whole, mine[name], flat.get(mine[name]), groups)
            dist.all_reduce(whole)
            yield name, whole

    if run.rank == 0:
        pretrained.write(run.args.export, run.config, wholes())
        run.print(f"exported to {run.args.export}")
    else:
        for _ in wholes():
            pass


def place(whole, parameter, flat, groups):
    """Put what this rank answers for of a parameter where it belongs: of copies the first one answers."""
    placement = getattr(parameter, "placement", {"split": {}, "partial": []})
    copies = [*placement["partial"], *([] if flat else [placement.get("copies", groups["dp"])])]
    copies += [groups["tp"]] if groups["tp"] not in placement["split"].values() else []
    if any(dist.get_rank(group) > 0 for group in copies):
        return
    if flat:
        first, values = flat
        local = torch.zeros(parameter.shape, dtype=whole.dtype, device=whole.device).flatten()
        local[first : first + len(values)] = values
        local = local.view(parameter.shape)
    else:
        local = parameter.detach()
    for dim, group in placement["split"].items():
        start, size = extent(whole.shape[dim], group, groups)
        whole, local = whole.narrow(dim, start, size), local.narrow(dim, 0, size)
    whole.copy_(local)


if __name__ == "__main__":
    harness.script(main)
