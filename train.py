"""Train a GPT in any layout: data (ZeRO 0 to 3) x tensor x pipeline parallelism from flags, the same curve in all of them.

    torchrun --nproc_per_node=8 train.py --dp 2 --tp 2 --pp 2        python train.py --dp 2 --tp 2 --pp 2
    python train.py                                                  python train.py --preset gpt2 --dtype bfloat16

Rank order, tp innermost, so that tensor parallelism stays inside a node (here dp 2, tp 2, pp 2 on 8 ranks):

              stage 0             stage 1            tp    ranks that hold parts of the same layers:   0 1 | 2 3 | 4 5 | 6 7
            tp 0   tp 1         tp 0   tp 1          dp    ranks that hold the same, for other data:   0 2 | 1 3 | 4 6 | 5 7
    dp 0     0      1            4      5            pp    ranks that hold consecutive layers:         0 4 | 1 5 | 2 6 | 3 7
    dp 1     2      3            6      7

"Global batch", "loss" and "gradient norm" are the global ones, whatever the layout: --batch is the number of sequences over
all ranks, the loss is the sum over all tokens divided by their number, the norm counts every parameter once. So the same
flags give the same run on one process and on any number, to rounding; the first steps are compared, and the receipt at the
end says how far apart they were (--prove).
"""

import contextlib
import json
import os

import torch
import torch.distributed as dist

import data
import ddp
import expert_parallel
import harness
import model as gpt
import pipeline
import sequence_parallel
import tensor_parallel
import zero
from harness import Refused

# bfloat16 matrix rate without sparsity, FLOP/s, from the makers' data sheets; where the device is known, so is the MFU
PEAK = {"A100": 312e12, "H100": 989e12, "H200": 989e12, "B200": 2250e12}


def flags():
    p = harness.parser(__doc__, steps=200, lr=3e-3, warmup=20, microbatches=None)
    n = harness.POSITIVE
    g = p.add_argument_group("the layout (ranks = dp x tp x pp)")
    g.add_argument("--dp", **n, default=1, help="data parallel: N copies share the batch")
    g.add_argument("--tp", **n, default=1, help="tensor parallel: each layer cut N ways; keep it inside a node")
    why = "sequence parallel: tensor-parallel ranks share the tokens between their layers; as much is sent, less is held"
    g.add_argument("--sp", action="store_true", help=why)
    why = "with --sp: hold still less, and send a quarter more"
    g.add_argument("--gather-again", action="store_true", help=why)
    g.add_argument("--pp", **n, default=1, help="pipeline parallel: N stages of consecutive layers")
    why = "expert parallel: N of the data-parallel ranks deal the --experts out among them, in place of copies"
    g.add_argument("--ep", **n, default=1, help=why)
    why = "pieces of a rank's tokens on their way to experts: one travels while another is computed"
    g.add_argument("--expert-chunks", **n, default=1, help=why)
    why = "how far a router's bias moves a step towards even load: balance without a loss"
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
    g.add_argument("--keep", action="store_true", help=why)
    harness.precision_flags(g)
    g = p.add_argument_group("the loop")
    g.add_argument("--min-lr", type=harness.real(0), metavar="X", help="where the cosine ends (default: lr / 10)")
    g.add_argument("--eval-every", **harness.NATURAL, default=100, help="steps between validations; 0 = only at the end")
    g.add_argument("--eval-batches", **n, default=4, help="global batches that a validation takes")
    g.add_argument("--sample", **harness.NATURAL, default=200, help="tokens to generate at the end; 0 = none")
    g.add_argument("--prompt", default="\n", help="what the sample starts with")
    g.add_argument(
        "--temperature",
        type=harness.real(0),
        default=0.8,
        metavar="X",
        help="of the sample: lower is safer, higher more varied",
    )
    why = "compare the first N steps with one process (default: 3 for models below 20M parameters, else 0)"
    g.add_argument("--prove", **harness.NATURAL, help=why)
    why = "a JSON object a line: step, loss, grad_norm, lr, tokens_per_s, in full precision"
    g.add_argument("--log", metavar="FILE", help=why)
    g.add_argument("--wandb", metavar="PROJECT", help="log to this Weights & Biases project too")
    return p


def main():
    args = flags().parse_args()
    config = harness.configure(args)
    check(args, config)
    harness.launch(train, args, needed=args.dp * args.tp * args.pp)


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
    if args.dp % args.ep:
        raise Refused(f"--ep {args.ep} does not divide --dp {args.dp}: experts live on data-parallel ranks")
    if args.sp and config.experts and config.context % args.tp:
        raise Refused(f"--sp routes whole tokens: --context {config.context} must divide by --tp {args.tp}")
    harness.check_batch(args, args.dp)
    args.param_dtype = args.param_dtype or args.dtype
    args.reduce_dtype = args.reduce_dtype or args.param_dtype
    if args.min_lr is None:
        args.min_lr = args.lr / 10
    if args.wandb and os.environ.get("WANDB_MODE") not in ("offline", "disabled"):
        import wandb

        if not wandb.login(prompt=False):
            raise Refused("--wandb needs a key: run `wandb login` first, or set WANDB_MODE=offline")
    if args.prove is None:
        args.prove = 3 if config.parameters() < 20e6 else 0


def make_groups(args, schedule):
    """This rank's process groups: tp, dp, pp and, of the pipeline's ranks too, one for each queue of messages (`down`:
    activations, `up`: gradients) and the two that hold a tied matrix; of the data-parallel ranks too, those that deal the
    experts out (ep), and those that hold the same ones (copies). All ranks create all groups, in the same order."""
    ranks = torch.arange(args.pp * args.dp * args.tp).view(args.pp, args.dp, args.tp)
    tp, dp, pp = ranks.flatten(0, 1), ranks.transpose(1, 2).flatten(0, 1), ranks.flatten(1).T
    experts = dp.unflatten(1, (args.dp // args.ep, args.ep))  # (pp tp, copies, ep)
    owner = pipeline.owners(schedule)
    tied = [sorted({row[owner[0]], row[owner[len(owner) - 1]]}) for row in pp.tolist()]

    def mine(rows):
        """Of the groups of all rows, the one that this rank is in, or None."""
        made = [(dist.new_group(row), row) for row in rows]
        return next((group for group, row in made if dist.get_rank() in row), None)

    groups = {"tp": mine(tp.tolist()), "dp": mine(dp.tolist()), "pp": mine(pp.tolist()), "tied": mine(tied)}
    groups |= {"ep": mine(experts.flatten(0, 1).tolist()), "copies": mine(experts.transpose(1, 2).flatten(0, 1).tolist())}
    links = [mine(pp.tolist()) for _ in range(4)]
    return groups | {"down": links[:2], "up": links[2:]}


def train(run):
    args, config = run.args, run.config
    schedule = pipeline.make(args.schedule, args.pp, args.microbatches, args.chunks)
    groups = make_groups(args, schedule)
    tp, dp, pp, links = groups["tp"], groups["dp"], groups["pp"], groups["down"] + groups["up"]
    run.groups(**groups)

    # The model: cut on the meta device, then filled. Every rank draws each parameter whole, and keeps its piece
    owner = pipeline.owners(schedule)
    mine = [stage for stage in sorted(owner) if owner[stage] == dist.get_rank(pp)]
    parts = pipeline.split(run.meta_model, len(owner), mine, groups["tied"])
    for part in parts.values():
        if args.sp:
            sequence_parallel.parallelize(part, tp, keep=not args.gather_again)
        elif args.tp > 1:
            tensor_parallel.parallelize(part, tp)
        if args.ep > 1:
            expert_parallel.parallelize(part, groups["ep"], None, args.expert_chunks, groups["copies"])
    model = pipeline.Stages(parts)
    sync, optimizer = data_parallel(run, model, groups)
    mixtures = [block.mlp for part in parts.values() for block in part.blocks.values() if config.experts]
    describe(run, schedule)

    def scope(stage, complete):
        """ZeRO must know which stage's gradients come, and whether all of them do."""
        return sync.backward(mine.index(stage), complete) if sync is optimizer else contextlib.nullcontext()

    def play(schedule, batches, count):
        """The results of this rank's part of a schedule over micro-batches (tokens, targets, samples)."""

        def forward(stage, m, x):
            tokens, targets, samples = batches[m]
            positions = torch.arange(tokens.shape[1], device=run.device)
            return model[stage](tokens if x is None else x, positions, targets=targets, count=count, samples=samples)

        (b, t), dtype = batches[0][0].shape, harness.DTYPES[args.param_dtype]
        shape = (b, -(-t // args.tp) if args.sp else t, config.width)
        return pipeline.play(schedule, forward, shape, dtype, run.device, links, scope)

    def total(losses):
        """The sum of some losses, of which the last stage has all and the others none."""
        zero = torch.zeros((), dtype=torch.float64, device=run.device)
        return sum((loss.double() for loss in losses), zero)

    with open_log(run) as log:
        for step in run.steps(optimizer):
            sync.zero_grad()
            batches = run.microbatches(step, dist.get_rank(dp), args.dp)
            for mixture in mixtures:
                mixture.dispatch.travelled = 0
            losses = play(schedule, batches, run.count)
            if step == min(1, args.steps - 1):  # the ledger is on
                travelled = sum(mixture.dispatch.travelled for mixture in mixtures)
            sync.finish()
            # Of whole parameters the first rank of a group counts; ZeRO's are never whole on two data-parallel ranks
            split = [tp] if args.zero else [tp, groups["ep"]]
            run.update(step, model, optimizer, total(losses), over=[dp, pp], split=split, dealt=[pp], mfu=mfu(run))
            gpt.rebalance(model, lambda load: [dist.all_reduce(load, group=g) for g in (dp, tp)[: 1 + args.sp]])
            log(run.history[-1])
            if step + 1 == args.steps or args.eval_every and (step + 1) % args.eval_every == 0:
                loss = evaluate(run, pipeline.forward_only(schedule), play, total, dp, pp)
                run.print(f"validation loss {loss:.4f}")
                run.restart_clock()
                log({"step": step + 1, "val_loss": loss})
    if args.sample:
        text = generate(run, pipeline.forward_only(schedule, 1), owner[len(owner) - 1], play, tp, pp)
        run.print(f"\nsample:\n{text}")
    return receipt(run, model, optimizer, schedule, mine, groups, travelled)


def data_parallel(run, model, groups):
    """Fill the model, and say who completes its gradients (zero_grad, finish) and who takes the step: plain data parallelism
    with an optimizer of torch's, or ZeRO, which is both. Every rank draws each parameter whole, and keeps its piece."""
    args, bucket_bytes, dp = run.args, int(run.args.bucket_mb * 2**20), groups["dp"]

    def take(full, parameter):
        """Experts are dealt out whole, as evenly as can be; tensor parallelism cuts with padding."""
        for dim, group in getattr(parameter, "placement", {"split": {}})["split"].items():
            cut = expert_parallel.piece if group is groups["ep"] else tensor_parallel.piece
            full = cut(full, dim, dist.get_rank(group), dist.get_world_size(group))
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
        reshard=not args.keep,
        value=run.initial(model, take),
        device=run.device,
    )
    return sharded, sharded


def describe(run, schedule):
    """What is about to run, and how the stages came out."""
    args, config = run.args, run.config
    layout = f"dp {args.dp}, tp {args.tp}, pp {args.pp}" + f", ep {args.ep}" * (args.ep > 1)
    text = f"{run.corpus.name}: {len(run.corpus.tokens):,} tokens, {run.count:,} a step"
    run.print(f"{config.parameters():,} parameters, {layout}; {text}")
    if args.pp > 1:
        layers = pipeline.stage_layers(config, len(pipeline.owners(schedule)))
        text = ", ".join(f"{r.start}-{r.stop - 1}" for r in layers)
        bubble = 1 - pipeline.utilisation(pipeline.simulate(schedule))
        run.print(f"stages hold layers {text}; {args.schedule}, {args.microbatches} micro-batches: bubble {bubble:.1%}")


def mfu(run):
    """A function of tokens/s that gives the part of the devices' peak that the model's own arithmetic uses, where known."""
    name = torch.cuda.get_device_name() if run.device.type == "cuda" else ""
    peak = next((rate for key, rate in PEAK.items() if key in name), None)
    if peak is None or run.args.param_dtype != "bfloat16":
        return None
    return lambda tokens_per_s: tokens_per_s * run.config.flops_per_token() / (peak * run.world)


@torch.no_grad()
def evaluate(run, schedule, play, total, dp, pp):
    """The mean loss over --eval-batches global batches of the validation split."""
    args = run.args
    loss = torch.zeros((), dtype=torch.float64, device=run.device)
    for i in range(args.eval_batches):
        batches = run.microbatches(i, dist.get_rank(dp), args.dp, split="val")
        batches = [(tokens, targets, None) for tokens, targets, _ in batches]  # no samples: no dropout
        loss += total(play(schedule, batches, run.count * args.eval_batches))
    for group in (dp, pp):
        dist.all_reduce(loss, group=group)
    return loss.item()


@torch.no_grad()
def generate(run, schedule, last, play, tp, pp):
    """--sample tokens after --prompt, drawn from the whole layout's logits. Token i is drawn with a hash of (seed, i), so
    that every layout draws alike. last: the pipeline rank that has the last stage."""
    args, config, encoding = run.args, run.config, run.corpus.encoding
    tokens = encoding.encode_ordinary(args.prompt) or [encoding.eot_token]
    for i in range(args.sample):
        window = torch.tensor([tokens[-config.context :]], device=run.device)
        results = play(schedule, [(window, None, None)], None)
        token = torch.zeros(1, dtype=torch.int64, device=run.device)
        for logits in results:  # on the last stage
            logits = logits[0, -1]
            if args.tp > 1:
                logits = tensor_parallel.gather_logits(logits, config.vocab, tp)
            logits = logits[: encoding.n_vocab].double() / max(args.temperature, 1e-6)
            chance = torch.tensor([data.hash64(args.seed, i) / 2**64], dtype=torch.float64, device=run.device)
            cumulated = logits.softmax(0).cumsum(0)
            token = torch.searchsorted(cumulated, chance * cumulated[-1]).clamp(max=len(cumulated) - 1)
        dist.broadcast(token, group=pp, group_src=last)
        tokens.append(token.item())
    return encoding.decode(tokens)


@contextlib.contextmanager
def open_log(run):
    """Gives a function that writes a dict to --log and --wandb; on rank 0 only."""
    args, places = run.args, []
    with contextlib.ExitStack() as stack:
        if args.log and run.rank == 0:
            file = stack.enter_context(open(args.log, "w"))
            places.append(lambda row: print(json.dumps(row), file=file, flush=True))
        if args.wandb and run.rank == 0:
            import wandb

            tracker = stack.enter_context(wandb.init(project=args.wandb, config=vars(args)))
            places.append(lambda row: tracker.log(row, step=row["step"]))
        yield lambda row: [write(row) for write in places]


def receipt(run, model, optimizer, schedule, mine, groups, travelled):
    args, config, rows, tp = run.args, run.config, run.args.batch // run.args.dp, groups["tp"]
    owner = pipeline.owners(schedule)
    rank, first, last = owner[mine[0]], 0 in mine, len(owner) - 1 in mine
    blocks = {stage: len(model[stage].blocks) for stage in mine}
    e, reduced, master = (harness.DTYPES[d].itemsize for d in (args.param_dtype, args.reduce_dtype, args.dtype))
    tokens, here = rows * config.context, (sum(blocks.values()), first, last)
    scalar = 8  # loss and squared norm are summed as one float64 each
    moments, notes = 2 * (args.optimizer == "adamw") * master, []

    # Parameters, of which data-parallel ranks hold copies, and experts, of which fewer ranks do
    sizes = {"dp": tensor_parallel.parameters_held(config, args.tp, *here, experts=0), "copies": 0}
    experts = expert_parallel.expert_counts(config.experts, args.ep)[dist.get_rank(groups["ep"])]
    sizes["copies" if args.ep > 1 else "dp"] += tensor_parallel.parameters_held(config, args.tp, *here, experts) - sizes["dp"]
    states, sent = [0, 0, 0], {}
    for name, size in sizes.items():
        group, n = groups[name], dist.get_world_size(groups[name])
        scalars = scalar * (name == "dp")  # the loss
        if isinstance(optimizer, zero.ZeRO):
            size += sum(b.size - sum(p.numel() for p in b.parameters) for b in optimizer.buckets if b.group is group)  # padding
            copies = (args.param_dtype != args.dtype) * master
            of_group = [size * each for each in zero.model_states(args.zero, n, e, reduced, moments + copies)]
            actions = [(action.kind, mine.index(action.stage)) for action in schedule[rank]]
            sent |= {(operation, name): formula for operation, formula in optimizer.bytes_sent(actions, group).items()}
            scalars *= 2 if args.zero else 1  # and the norm, of parts
            bytes_, text = sent.get(("all_reduce", name), (0, "loss and norm"))
            sent["all_reduce", name] = (bytes_ + ddp.bytes_sent(scalars, n), text)
        else:
            of_group = [size * e, size * e, size * moments]
            sent["all_reduce", name] = (ddp.bytes_sent(size * e + scalars, n), "2 (N-1)/N P e")
        states = [a + b for a, b in zip(states, of_group)]
    if isinstance(optimizer, zero.ZeRO):
        states[2] -= optimizer.padding() * moments
        notes = [f"ZeRO: gathered weights at the peak {optimizer.gathered_peak:,} bytes"] * (args.zero == 3)
    if args.ep > 1:
        counts = sum(blocks.values()) * args.microbatches * (config.experts - experts) * args.expert_chunks * 8
        size = 2 * travelled * config.width * e + counts
        sent["all_to_all", "ep"] = (size, "2 (rows out + rows in) C e, and the counts")
        if not args.zero:
            sent["all_reduce", "ep"] = (ddp.bytes_sent(scalar, args.ep), "the norm")
    each = config.context
    if args.sp:
        each = -(-each // args.tp)
        keep = not args.gather_again
        size = sequence_parallel.bytes_sent(config, args.tp, rows, config.context, e, *here, keep)
        sent["all_gather", "tp"] = (size["all_gather"], f"{4 if keep else 6} r b T C e a block, and both ends")
        scatter = "all_to_all" if dist.get_backend(tp) == "gloo" else "reduce_scatter"
        sent[scatter, "tp"] = (size["reduce_scatter"], "4 r b T C e a block, and both ends")
        partial = sequence_parallel.partial_parameters(config, *here)
        if isinstance(optimizer, zero.ZeRO):
            partial = sum(b.length for b in optimizer.buckets if tp in b.partial)
        size = size["all_reduce"] + ddp.bytes_sent(partial * reduced + scalar, args.tp)
        sent["all_reduce", "tp"] = (size, "the loss; the norms' gradients")
    else:
        size = tensor_parallel.bytes_sent(config, args.tp, tokens, e, *here)
        sent["all_reduce", "tp"] = (size + ddp.bytes_sent(scalar, args.tp), "8 r b T C e a block, and both ends")
    for name, step in (("down", 1), ("up", -1)):
        away = sum(owner.get(stage + step, rank) != rank for stage in mine)
        sent["send", name] = (away * rows * each * config.width * e, "b T C e a micro-batch and boundary")
    if config.tied and first != last:
        part = -(-config.vocab // args.tp) * config.width
        part = -(-part // args.dp) if args.zero else part
        sent["all_reduce", "tied"] = (ddp.bytes_sent(part * reduced, 2), "V/t C e, the tied matrix")
    flying = pipeline.in_flight(schedule[rank], blocks.get)
    piece = rows // args.microbatches
    activations = flying * harness.activation_bytes(config, piece, e, args.tp)
    if args.sp:
        kept = (not args.gather_again) * (args.tp - 1) * 2 * piece * config.context * config.width * e
        activations = flying * (harness.activation_bytes(config, piece, e) + kept) / args.tp
    texts = [f"P e{' / dp' * (args.zero >= least)}" for least in (3, 2, 1)]
    held = dict(zip(("parameters", "gradients", "optimizer"), zip(states, texts)))
    held["activations_peak"] = activations, "blocks x micro-batches in flight, without the head"
    layout = {"dp": args.dp, "tp": args.tp, "pp": args.pp}
    if args.pp > 1:
        layout |= {"schedule": args.schedule, "microbatches": args.microbatches}
    layout |= {"zero": args.zero} if args.zero else {}
    layout |= {"sp": args.tp} if args.sp else {}
    layout |= {"ep": args.ep} if args.ep > 1 else {}
    return run.receipt(layout, sent, held, notes)


if __name__ == "__main__":
    harness.script(main)
