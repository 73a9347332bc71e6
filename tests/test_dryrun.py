"""Dry runs against real ones: what the ledger counts must be the same to the byte, for every
technique."""

from unittest import mock

import pytest
import torch
import torch.distributed as dist

import expert_parallel
import harness
import model as gpt
import train
from benchmarks import published
from trainer import devices, dryrun, planner

BASE = (
    "--layers 2 --width 32 --heads 4 --context 16 --batch 12 --steps 2 --prove 0 --sample 0 "
    "--eval-every 0 --eval-batches 1"
)
BASE += " --quiet --backend gloo"
MIXTURE = "--experts 5 --family llama --kv-heads 2 --balance-loss 0.1 --shared 1"
LAYOUTS = [
    "--dp 3 --microbatches 2 --bucket-mb 0.01 --layers 3",
    "--dp 2 --zero 1 --param-dtype bfloat16 --reduce-dtype float32 --microbatches 3",
    "--dp 2 --pp 2 --zero 2 --schedule zb-h1 --microbatches 3 --dropout 0.1",
    "--dp 2 --tp 2 --zero 3 --family llama --kv-heads 2 --microbatches 2 --recompute block",
    "--tp 2 --pp 2 --schedule interleaved --microbatches 4 --optimizer sgd --layers 5",
    "--tp 2 --sp --gather-again --pp 2 --schedule dualpipev --microbatches 4 --layers 4",
    "--cp 2 --dp 2 --zero 1 --family llama --recompute selective",
    "--dp 4 --zero 3 --zero-ranks 2 --layers 2 --microbatches 1 --offload",
    "--cp 4 --cp-kind ring-ulysses --dtype float64",
    "--cp 2 --cp-kind gather --tp 2 --sp --pp 2 --microbatches 3",
    f"--dp 2 --ep 2 {MIXTURE} --microbatches 2 --expert-chunks 2",
    f"--tp 2 --pp 2 {MIXTURE} --schedule zb-v --microbatches 3 --layers 4",
]
CLUSTER = devices.Cluster(devices.DEVICES["h100"], 8, 450e9, 50e9)


def arguments(flags, base=BASE):
    args = train.flags().parse_args(f"{base} {flags} --dry-run".split())
    args, _ = train.prepare(args)
    return args


def real(rank, args):
    """What a real rank's ledger says, and the sizes of its experts' all-to-alls in the step that it
    watches."""
    reads, read = [], expert_parallel.ExpertDispatch.read

    def recorded(self, *given):
        reads.append(read(self, *given))
        return reads[-1]

    expert_parallel.ExpertDispatch.read = recorded
    run = harness.Run(args, rank, dist.get_world_size(), torch.device("cpu"))
    train.train(run)
    # Two steps and a validation as long
    return run.ledger.sent, run.held, reads[len(reads) // 3 : 2 * len(reads) // 3]


@pytest.mark.parametrize("flags", LAYOUTS)
def test_equals_a_real_run(ranks, text, flags):
    args = arguments(f"{flags} --data {text}")
    world = args.dp * args.cp * args.tp * args.pp
    done = ranks(world, real, args)
    # Ranks of a pipeline differ most; else the last one has the padding
    for rank in (0, world - 1) if args.pp > 1 else [world - 1]:
        sent, held, reads = done[rank]
        routing = (lambda *_: reads.pop(0)) if args.experts else dryrun.even
        dry = dryrun.play(args, rank, CLUSTER, train.train, routing=routing)
        assert not reads and dry.sent == sent
        assert {kind: dry.held[kind] for kind in held} == held


@pytest.mark.parametrize(
    "flags",
    [
        "--pp 3 --layers 17 --microbatches 3 --schedule zb-h2 --dropout 0.1 --tp 2 --sp",
        "--dp 2 --zero 3 --layers 7 --recompute block --bucket-mb 1 --dropout 0.1",
        "--dp 2 --zero 2 --layers 7 --cp 2 --family llama --recompute selective",
        "--dp 2 --zero 1 --layers 13 --tp 2 --sp --pp 2 --microbatches 3 --param-dtype bfloat16",
        f"--dp 2 --ep 2 {MIXTURE} --layers 7 --microbatches 2 --recompute block",
        f"--pp 2 {MIXTURE} --layers 5 --schedule zb-h1 --microbatches 2",  # has no tape
    ],
)
def test_repeated_blocks_equal_played_ones(flags):
    """One block of several that are alike is played. Bytes, FLOPs and messages are those of all."""
    args = arguments(flags)
    rank = args.dp * args.cp * args.tp * args.pp - 1
    played = dryrun.play(args, rank, CLUSTER, train.train, repeats=False)
    repeated = dryrun.play(args, rank, CLUSTER, train.train)
    assert repeated.held == played.held and repeated.sent == played.sent
    assert repeated.flops == played.flops and repeated.formulas == played.formulas
    for action, part in played.actions.items():
        assert tuple(repeated.actions[action]) == pytest.approx(tuple(part), rel=1e-9)


def test_few_blocks_are_played():
    """Of 40 blocks and two micro-batches four: the first, two inner ones, the last."""
    played = []
    forward = gpt.Block.forward

    def counted(block, *inputs):
        played.append(block)
        return forward(block, *inputs)

    args = arguments("--layers 40 --microbatches 2")
    with mock.patch.object(gpt.Block, "forward", counted):
        dryrun.play(args, 0, CLUSTER, train.train)
    assert len(played) == 4


def test_16384_ranks():
    """Layers of Llama 3 405B, on as many ranks: what is sent and held is what the formulas say."""
    flags = (
        "--preset llama3-405b --layers 16 --dp 64 --cp 2 --tp 8 --pp 16 --sp --zero 1 --batch 128 "
        "--microbatches 2"
    )
    args = arguments(
        f"{flags} --param-dtype bfloat16 --reduce-dtype float32 --prove 0 --backend nccl", base=""
    )
    for rank in (0, 16383):
        dry = dryrun.play(args, rank, CLUSTER, train.train)
        sent, held = dry.formulas
        for key, (size, _) in sent.items():
            assert abs(dry.sent.get(key, (0, 0, 0))[2] - size) < 1, key
        for kind in ("parameters", "gradients", "optimizer"):
            assert abs(dry.held[kind] - held[kind][0]) < 1, kind
    assert dry.parameters * 2 <= dry.held["parameters"] < dry.parameters * 2 + 4096  # and padding


def test_experts_are_even_unless_told():
    args = arguments(f"--dp 2 --ep 2 {MIXTURE}")
    dry = dryrun.play(
        args, 1, CLUSTER, train.train
    )  # 2 of the 5 experts: 3/5 of what it has leaves, 2/5 of what the other has comes
    rows = 12 // 2 * 16 * 2
    gone, come = rows - rows * 2 // 5, rows * 2 // 5
    counts = args.microbatches * args.layers * 3 * 8
    # Dispatch and combine, and both again in backward: what leaves comes back, and the other way
    # round
    assert round(dry.sent["all_to_all", "ep"][2]) == pytest.approx(
        2 * args.layers * (gone + come) * 32 * 4 + counts, rel=1e-2
    )


@pytest.mark.parametrize(
    "flags", ["--family llama --kv-heads 2", "--tp 2", "--cp 2", "--pp 2 --schedule zb-h1"]
)
def test_flops(flags):
    """Six for each weight and token, and seven products of attention (flash attention computes one
    again), half of each."""
    args = arguments(f"{flags} --vocab 258")  # divides by 2: no padding
    config, world = harness.configure(args), args.tp * args.cp * args.pp
    flops = sum(dryrun.play(args, rank, CLUSTER, train.train).flops for rank in range(world))
    attention = config.layers * config.context * config.width
    assert (
        flops
        == (config.flops_per_token() - 12 * attention + 7 * attention) * args.batch * config.context
    )


def test_links():
    assert CLUSTER.link(range(8)) == (devices.ALPHA["intra"], 450e9 * devices.EFFICIENCY)
    assert CLUSTER.link([0, 8]) == (devices.ALPHA["inter"], 50e9 * devices.EFFICIENCY)
    assert CLUSTER.link(range(16))[1] == 400e9 * devices.EFFICIENCY  # eight links out of a node


@pytest.mark.parametrize("flags", ["--cp 2", "--tp 2 --pp 2 --schedule zb-h1"])
def test_estimate(flags):
    """Its parts add up; two micro-batches give the times of all; a faster network helps, and a
    bubble is the schedule's."""
    args = arguments(
        f"--preset llama3-8b --layers 3 --batch 16 --microbatches 4 {flags} --prove 0 --backend "
        "nccl",
        base="",
    )
    config = harness.configure(args)
    ranks = [rank * args.dp * args.cp * args.tp for rank in range(args.pp)]

    def step(cluster, brief=True):
        return planner.estimate(
            args,
            config,
            cluster,
            [dryrun.play(args, rank, cluster, train.train, brief) for rank in ranks],
        )

    brief, whole, faster = (
        step(CLUSTER),
        step(CLUSTER, brief=False),
        step(CLUSTER._replace(intra=1e15, inter=1e15)),
    )
    assert sum(brief.parts.values()) == pytest.approx(brief.seconds, rel=1e-9)
    assert brief.seconds == pytest.approx(whole.seconds, rel=1e-3)
    assert faster.seconds < brief.seconds and faster.parts["computing"] == brief.parts["computing"]
    model = config.flops_per_token() * args.batch * config.context
    assert brief.rate == pytest.approx(
        model / brief.seconds / len(ranks) / args.dp / args.cp / args.tp
    )
    assert (brief.parts["pipeline's bubble"] > 0) == (args.pp > 1)


def test_report(capsys):
    flags = "--dry-run --pp 2 --tp 2 --ranks first,3 --tokens 1e9 --gpu x=80GB,989TFLOP/s,3.35TB/s"
    args = train.flags().parse_args(flags.split())
    planner.main(args, train.prepare, train.train)
    out = capsys.readouterr().out
    assert "842,624 parameters, tp 2 pp 2 1f1b, 4 micro-batches: 4 ranks" in out
    assert "all_reduce in tp" in out and "fits x" in out and "days for 1e+09 tokens" in out
    assert [line.split()[0] for line in out.splitlines() if "fits x" in line] == ["0", "3"]


@pytest.mark.parametrize(
    "flags, hint", [("--gpu tpu", "--gpu tpu is not known"), ("--ranks 1,9", "numbers below 2")]
)
def test_refuses(flags, hint):
    with pytest.raises(harness.Refused, match=hint):
        planner.main(
            train.flags().parse_args(f"--dry-run --dp 2 {flags}".split()),
            train.prepare,
            train.train,
        )


def test_plan(capsys):
    flags = (
        "--plan --gpus 16 --preset llama3-8b --layers 8 --batch 32 --dtype float32 --param-dtype "
        "bfloat16"
    )
    planner.main(train.flags().parse_args(flags.split()), train.prepare, train.train)
    rows = [line.split() for line in capsys.readouterr().out.splitlines() if " GB   " in line]
    times = [float(row[1]) for row in rows]
    assert len(rows) == 10 and times == sorted(times)
    with pytest.raises(harness.Refused, match="give more --gpus"):
        planner.main(
            train.flags().parse_args("--plan --preset llama3-405b --gpus 8 --batch 8".split()),
            train.prepare,
            train.train,
        )


def test_what_a_plan_splits_over():
    """All data-parallel ranks, or those of a node; with --zero-ranks that number alone."""

    def splits(flags, ranks, tp):
        return planner.zero_splits(train.flags().parse_args(flags.split()), ranks, tp)

    assert splits("", 64, 2) == [(0, None)] + [(s, n) for s in (1, 2, 3) for n in (None, 4)]
    assert splits("", 4, 2) == [(s, None) for s in range(4)]  # no more than a node's
    assert splits("--nodes-of 4", 64, 8) == [(s, None) for s in range(4)]  # tp leaves a node
    assert splits("--zero-ranks 8", 64, 1) == [(1, 8), (2, 8), (3, 8)]
    assert splits("--zero-ranks 8", 12, 1) == []
    args = train.flags().parse_args("--plan --gpus 6 --zero-ranks 4".split())
    with pytest.raises(harness.Refused, match="--zero-ranks 4 does not divide 6 devices"):
        planner.main(args, train.prepare, train.train)


@pytest.mark.parametrize("table", [published.megatron, published.torchtitan, published.gpt3])
def test_flags_of_the_published_runs(monkeypatch, table):
    """They are layouts that exist: train.py takes them. What they give takes minutes."""

    def taken(args, config, cluster, train):
        raise StopIteration

    monkeypatch.setattr(planner, "step_of", taken)
    with pytest.raises(RuntimeError, match="generator raised StopIteration"):
        next(table())
