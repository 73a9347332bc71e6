"""Dry runs against real ones: what the ledger counts must be the same to the byte, for every
technique."""

import copy
import itertools
import re
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import expert_parallel
import harness
import proof
import train
from benchmarks import products, published
from receipts.formulas import flops_per_token
from simulator import command, devices, dryrun, kernels, layouts, links, meter, rough
from simulator.estimate import estimate
from trainer import large_vocabulary

BASE = (
    "--layers 2 --width 32 --heads 4 --context 16 --batch 12 --steps 2 --prove 0 --sample 0 "
    "--eval-every 0 --eval-batches 1"
)
BASE += " --quiet --backend gloo"
LLAMA = "--family llama --kv-heads 2"
MIXTURE = "--experts 5 --family llama --kv-heads 2 --balance-loss 0.1 --shared 1"
LAYOUTS = [
    "--dp 2 --zero 1 --param-dtype bfloat16 --reduce-dtype float32 --microbatches 3",
    f"--dp 2 --ep 2 {MIXTURE} --microbatches 2 --expert-chunks 2",
    "--dp 3 --microbatches 2 --bucket-mb 0.01 --layers 3",
    "--dp 2 --pp 2 --zero 2 --schedule zb-h1 --microbatches 3 --dropout 0.1 --recompute half",
    "--dp 2 --tp 2 --zero 3 --family llama --kv-heads 2 --microbatches 2 --recompute block",
    "--tp 2 --pp 2 --schedule interleaved --microbatches 4 --optimizer sgd --layers 5",
    "--tp 2 --sp --gather-again --pp 2 --schedule zb-v --microbatches 4 --layers 4",
    "--tp 2 --pp 2 --schedule dualpipev --microbatches 4 --layers 4",
    "--cp 2 --dp 2 --zero 1 --family llama --recompute selective",
    "--dp 4 --zero 3 --zero-ranks 2 --layers 2 --microbatches 1 --offload",
    "--cp 4 --cp-kind ring-ulysses --dtype float64",
    f"--tp 2 --pp 2 {MIXTURE} --schedule zb-v --microbatches 3 --layers 4 --recompute half",
    "--cp 2 --cp-kind gather --tp 2 --sp --pp 2 --microbatches 3",
    f"--dp 2 --ep 2 --tp 2 --sp --optimizer muon {MIXTURE}",
    f"--dp 2 --ep 4 --tp 2 --sp --fold-experts --zero 2 {MIXTURE}",
]
CLUSTER = devices.Cluster(devices.DEVICES["h100"], 8, 450e9, 50e9)


def arguments(flags, base=BASE):
    args = train.flags().parse_args(f"{base} {flags} --dry-run".split())
    args, _ = train.prepare(args)
    return args


def real(rank, args):
    """What a real rank's ledger says, and the sizes of its experts' all-to-alls in that step."""
    reads, exchange = [], expert_parallel.ExpertDispatch.exchange_counts

    def recorded(self, *given):
        *counts, incoming = exchange(self, *given)
        reads.append(counts)
        return *counts, incoming

    run = proof.Run(args, rank, dist.get_world_size(), torch.device("cpu"))
    with mock.patch.object(expert_parallel.ExpertDispatch, "exchange_counts", recorded):
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

        def routing(dispatch, chunks):
            return *reads.pop(0), dryrun.even(dispatch, chunks)[-1]

        dry = dryrun.play(args, rank, CLUSTER, train.train, routing=routing)
        assert not reads and dry.sent == sent
        assert {kind: dry.held[kind] for kind in held} == held


HIDDEN = {"": 5, "--sp": 5, "--sp --gather-again": 10, "--pp 2 --schedule zb-h1": 0}
HIDDEN |= {"--compile": 1, "--compile --sp --gather-again": 10, "--experts 4": 3}


@pytest.mark.parametrize("flags", HIDDEN)
def test_messages_that_backward_hides(flags):
    """As many as on real ranks, which test_tensor_parallel.py counts: something is computed while
    they travel. A compiled block hides none but what it gathers again; the head is not compiled."""
    args = arguments(f"--tp 2 {LLAMA} {flags}")
    with mock.patch.object(links, "both", return_value=0.0) as both:
        dryrun.play(args, 0, CLUSTER, train.train)
    assert sum(computed > 0 for (computed, _), _ in both.call_args_list) == HIDDEN[flags]


def test_experts_are_even_unless_told():
    args = arguments(f"--dp 2 --ep 2 {MIXTURE}")
    # 2 of the 5 experts: 3/5 of what it has leaves, 2/5 of what the other has comes
    dry = dryrun.play(args, 1, CLUSTER, train.train)
    rows = 12 // 2 * 16 * 2
    gone, come = rows - rows * 2 // 5, rows * 2 // 5
    counts = args.microbatches * args.layers * 3 * 8
    # Dispatch and combine, and both again in backward: what leaves comes back
    wire = 2 * args.layers * (gone + come) * 32 * 4 + counts
    assert dry.sent["all_to_all", "ep"][2] == pytest.approx(wire, rel=1e-2)


@pytest.mark.parametrize(
    "flags", [LLAMA, "--tp 2 --recompute selective", "--cp 2 --pp 2 --schedule zb-h1"]
)
def test_flops(flags):
    """Six for each weight and token, and seven products of attention (flash attention computes one
    again), half of each. Selective recomputation repeats no product."""
    args = arguments(f"{flags} --vocab 258")  # divides by 2: no padding
    config, world = harness.configure(args), args.tp * args.cp * args.pp
    flops = sum(dryrun.play(args, rank, CLUSTER, train.train).flops for rank in range(world))
    attention = config.layers * config.context * config.width
    tokens = args.batch * config.context
    assert flops == (flops_per_token(config) - 12 * attention + 7 * attention) * tokens


LARGE = 2 * 7 / 8 * 2**27  # what each of 8 ranks sends in an all-reduce of 128 MiB
# Bytes/s of a link, ranks, operation, bytes, bus bandwidth
BUSES = [
    (450e9, range(8), "all_gather", 35e9, 350e9),
    (450e9, range(8), "all_reduce", 47.6e9, 476e9),  # the switch adds up
    (450e9, range(8), "all_reduce", LARGE, 401e9),
    (300e9, range(8), "all_reduce", LARGE, 204e9),
    (450e9, [0, 8], "reduce_scatter", 4.7e9, 47e9),  # of 50 GB/s between nodes
    (450e9, range(16), "all_gather", 35e9, 350e9),  # eight links out of a node
]


@pytest.mark.parametrize("intra, ranks, operation, wire, bus", BUSES)
def test_bandwidths_are_those_that_nccl_tests_measure(intra, ranks, operation, wire, bus):
    link = links.link_of(CLUSTER._replace(intra=intra), ranks)
    assert link.seconds(operation, wire) == pytest.approx(wire / bus, rel=2e-3)


def test_small_messages_take_a_latency():
    one, inside, shared = (links.link_of(CLUSTER, range(n)) for n in (1, 8, 16))
    assert one.seconds("all_gather", 0) < 1e-4
    assert shared.seconds("all_gather", 8) > inside.seconds("all_gather", 8) > 5e-6
    # A tree is faster than a ring for a small sum over many nodes
    many = links.link_of(CLUSTER, range(0, 8192, 8))
    assert many.seconds("all_reduce", 1e4) < many.seconds("all_gather", 1e4) / 10


@pytest.mark.parametrize("operation", ["all_reduce", "all_gather"])
def test_larger_messages_take_longer(operation):
    """No jump where the table of sizes begins, be there few ranks or many, slow links or fast."""
    for ranks, speed in itertools.product((2, 3, 8, 72), (64e9, 300e9, 450e9, 900e9)):
        link = links.link_of(CLUSTER._replace(node=72, intra=speed), range(ranks))
        times = [link.seconds(operation, 2 ** (i / 8)) for i in range(8 * 14, 8 * 30)]
        assert all(1 < b / a < 1.1 for a, b in itertools.pairwise(times))


def test_products():
    """What large products reach."""

    def large(device):
        return 2 * 8192**3 / kernels.product_seconds(device, 8192, 8192, 8192)

    h100 = devices.DEVICES["h100"]
    assert large(h100) == pytest.approx(720e12)
    assert large(h100._replace(matmul=600e12)) == pytest.approx(600e12)
    assert 1.1 < large(h100) / large(h100._replace(power=0.714)) < 1.3


def test_products_beside_measured_ones(capsys, monkeypatch):
    """68 products that others measured: the estimates are within 4% on average."""
    monkeypatch.setattr("sys.argv", ["products.py"])
    products.main()
    errors = [float(x) for x in re.findall(r"mean error ([\d.]+)%", capsys.readouterr().out)]
    assert len(errors) == 2 and max(errors) < 4


@pytest.mark.parametrize(
    "name, kernel, causal, backward, reached",
    [
        ("h100", "flash2", False, False, 370),
        ("h100", "flash3", True, False, 616),
        ("h100", "flash3", False, True, 561),
        ("a100", "flash2", False, False, 230),
        ("a100", "flash1", False, False, 0.4 * 312),
    ],
)
def test_attention(name, kernel, causal, backward, reached):
    """The tables of FlashAttention's papers come back; plain attention is far slower."""
    flops = 4 * 16 * 16384**2 * 128 * (2.5 if backward else 1) / (2 if causal else 1)
    about = (1, 16, 16384, 128), 16384, causal, backward
    flash, plain = (
        flops / kernels.attention_seconds(devices.DEVICES[name], kind, *about) / 1e12
        for kind in (kernel, "plain")
    )
    assert flash == pytest.approx(reached) and plain < 0.6 * flash


def test_fused_operations_move_fewer_bytes():
    """With --compile a block's operations take less time, and its bytes held are the same."""
    flags = "--preset llama3-8b --layers 2 --batch 1 --dtype bfloat16 --prove 0 --backend nccl"
    eager, fused = (
        dryrun.play(arguments(flags + more, base=""), 0, CLUSTER, train.train)
        for more in ("", " --compile")
    )
    times = [sum(part.compute for part in rank.actions.values()) for rank in (eager, fused)]
    assert fused.held == eager.held and fused.flops == eager.flops
    assert 0.6 * times[0] < times[1] < 0.99 * times[0]


@pytest.mark.parametrize("fused, most", [(False, 39), (True, 6.1)])
def test_how_often_the_loss_moves_a_logit(fused, most, monkeypatch):
    """In bytes of 16-bit logits, forward and backward."""
    moved, loss = [], large_vocabulary.LeanCrossEntropy()
    counting = meter.Meter({}, CLUSTER)
    monkeypatch.setattr(counting, "count_bytes", moved.append)
    if fused:
        dryrun.fuse([loss], counting)
    logits = torch.empty(4, 512, 8192, dtype=torch.bfloat16, device="meta", requires_grad=True)
    targets = torch.empty(4, 512, dtype=torch.int64, device="meta")
    with counting:
        loss(logits, targets, 2048).backward()
        counting.end_kernel()
    assert 0.75 * most < sum(moved) / logits.numel() < most


@pytest.mark.parametrize("flags", ["--cp 2", "--tp 2 --pp 2 --schedule zb-h1"])
def test_estimate(flags):
    """Its parts add up; two micro-batches and few layers give the times of all; a faster network
    helps, and a bubble is the schedule's."""
    base = "--preset llama3-8b --layers 8 --batch 16 --microbatches 4 --prove 0 --backend nccl"
    args = arguments(flags, base)
    config = harness.configure(args)

    def step(cluster):
        [ranks] = dryrun.play_brief([(args, config)], cluster, train.train)
        return estimate(args, config, cluster, ranks)

    jobs = [(args, dryrun.first_ranks(args, range(args.pp)), None)]
    [ranks] = dryrun.play_all(jobs, CLUSTER, train.train)
    step_brief, whole = step(CLUSTER), estimate(args, config, CLUSTER, ranks)
    faster, parts = step(CLUSTER._replace(intra=1e15, inter=1e15)), step_brief.parts
    assert sum(parts.values()) == pytest.approx(step_brief.seconds, rel=1e-9)
    assert step_brief.seconds == pytest.approx(whole.seconds, rel=1e-3)
    assert faster.seconds < step_brief.seconds and faster.parts["computing"] == parts["computing"]
    model = flops_per_token(config) * args.batch * config.context
    devices_used = args.dp * args.cp * args.tp * args.pp
    assert step_brief.rate == pytest.approx(model / step_brief.seconds / devices_used)
    assert (parts["pipeline's bubble"] > 0) == (args.pp > 1)


def test_report(capsys):
    dry_run("--dry-run --pp 2 --tp 2 --tokens 1e9 --gpu x=80GB,989TFLOP/s,3.35TB/s")
    out = capsys.readouterr().out
    assert "842,624 parameters, tp 2 pp 2 1f1b, 4 micro-batches: 4 ranks" in out
    assert "all_reduce in tp" in out and "fits x" in out and "for 1e+09 tokens" in out
    assert [line.split()[0] for line in out.splitlines() if "fits x" in line] == ["0", "2"]


def dry_run(flags):
    command.main(train.flags().parse_args(flags.split()), train.prepare, train.train)


# Few ways to cut it: two for its heads, two for its sequences
SMALL_8B = "--preset llama3-8b --kv-heads 2 --context 4096"


def test_plan(capsys):
    """Rows by time, with what a user asked for; the command of each is one of train.py's, whose dry
    run takes as much memory."""
    dry_run(f"--plan --gpus 16 {SMALL_8B} --layers 8 --batch 64 --gpu H100 --tokens 1T")
    out = capsys.readouterr().out
    rows = [line.split() for line in out.splitlines() if " micro-batches of " in line]
    safe = [row for row in rows if float(row[6].rstrip("%")) <= 95]
    times = [float(row[1]) for row in safe]
    assert len(rows) >= 5 and times == sorted(times) and times[0] == float(rows[0][1])
    assert rows[0][8] == "days" and out.count("% tokens/s") == 3
    assert "parameters in bfloat16, gradients summed in bfloat16, 64 x 4,096 " in out
    commands = re.findall(r"train\.py (.*)", out)
    assert len(commands) == len(rows) and "--steps 3814698" in commands[0]
    args, config = train.prepare(train.flags().parse_args(commands[0].split()))
    args.backend, args.kernel = "nccl", None
    [ranks] = dryrun.play_brief([(args, config)], CLUSTER, train.train)
    taken = max(rank.reserved for rank in ranks) + devices.beside_allocator(args)
    assert f"{taken / 80e9:.1%}" == rows[0][6]


def test_a_plan_for_several_sizes(capsys):
    """One has a layout. Another one is too small, and says so."""
    flags = f"--plan --gpus 1,2 {SMALL_8B} --layers 4 --batch 8 --gpu x=25GB,989TFLOP/s,3.35TB/s"
    dry_run(flags)
    rows = re.findall(r"^ +(\d+)  (.*)", capsys.readouterr().out, re.M)
    assert [gpus for gpus, _ in rows] == ["1", "2"] and " micro-batches of " in rows[1][1]
    assert re.fullmatch("none of .* layouts on 1 devices fits 25 GB, the least is .*", rows[0][1])


def test_words_of_a_user():
    args = train.flags().parse_args("--gpus 8,16,...,100 --tokens 300B --gpu A100".split())
    assert args.gpus == [8, 16, 32, 64, 100] and args.tokens == 300e9
    cluster = devices.cluster_of(args)
    assert (cluster.intra, cluster.inter) == (300e9, 25e9)


@pytest.mark.parametrize(
    "flags",
    [
        "--dp 16 --zero 3 --recompute none --microbatches 2",
        "--dp 16 --zero 3 --recompute half --microbatches 2",
        "--dp 8 --cp 2 --zero 2 --recompute block --microbatches 1 --param-dtype float32",
        "--dp 2 --tp 8 --sp --zero 1 --recompute selective --microbatches 2 --batch 8",
        "--layers 8 --dp 4 --tp 2 --sp --pp 2 --zero 1 --batch 16 --microbatches 4 "
        "--schedule zb-h1",
        "--tp 2 --sp --pp 2 --zero 3 --batch 4 --microbatches 4 --schedule interleaved --chunks 2",
        "--preset mixtral-8x7b --dp 16 --ep 8 --zero 2 --microbatches 1",
        "--dp 4 --tp 2 --sp --optimizer muon --dtype bfloat16 --microbatches 2",
    ],
)
def test_formulas_of_a_plan(flags):
    """Bytes and seconds by which layouts are chosen are near to those that are played."""
    base = "--preset llama3-8b --layers 4 --batch 32 --param-dtype bfloat16 --backend nccl"
    args = arguments(f"{flags} --prove 0", base=base)
    config = harness.configure(args)
    none = copy.copy(args)
    none.recompute = "none"
    pieces = rough.play_pieces(args, config, [args, none], CLUSTER, train.train)
    parts, held = rough.rough(args, config, CLUSTER, pieces)
    ends = dryrun.first_ranks(args, (0, args.pp - 1))
    [ranks] = dryrun.play_all([(args, ends, None)], CLUSTER, train.train)
    [brief] = dryrun.play_brief([(args, config)], CLUSTER, train.train)
    memory = [max(rank.memory for rank in played) for played in (ranks, brief)]
    assert memory[1] == pytest.approx(memory[0], rel=0.02)
    assert sum(held) == pytest.approx(memory[1], rel=0.1)
    seconds = estimate(args, config, CLUSTER, brief).seconds
    whole = estimate(args, config, CLUSTER, ranks).seconds
    assert seconds == pytest.approx(whole, rel=0.02)
    assert sum(parts.values()) == pytest.approx(seconds, rel=0.15)


def test_stages_that_nobody_played():
    """Stages in the middle are like the first, not like the last, which has the head."""
    args = arguments("--preset gpt2 --layers 9 --pp 4 --batch 4 --microbatches 4", base="--prove 0")
    config = harness.configure(args)
    ranks = [dryrun.play(args, rank, CLUSTER, train.train) for rank in range(4)]
    whole = estimate(args, config, CLUSTER, ranks).seconds
    ends = estimate(args, config, CLUSTER, [ranks[0], ranks[3]]).seconds
    assert ends == pytest.approx(whole, rel=0.1)


def test_what_a_plan_splits_over():
    """All data-parallel ranks, or those of a node; with --zero-ranks that number alone."""

    def splits(flags, ranks, tp, fold=False):
        return layouts.zero_splits(train.flags().parse_args(flags.split()), ranks, tp, fold)

    assert splits("", 64, 2) == [(0, None)] + [(s, n) for s in (1, 2, 3) for n in (None, 4)]
    assert splits("", 4, 2) == [(s, None) for s in range(4)]  # no more than a node's
    assert splits("--nodes-of 4", 64, 8) == [(s, None) for s in range(4)]  # tp leaves a node
    assert splits("--zero-ranks 8", 64, 1) == [(1, 8), (2, 8), (3, 8)]
    assert splits("--zero-ranks 8", 12, 1) == []
    assert splits("--optimizer muon", 64, 2) == [(1, None)]
    assert splits("--ep 4 --zero-ranks 6", 12, 2) == []
    assert splits("--ep 4 --zero-ranks 6", 12, 2, fold=True) == [(s, 6) for s in (1, 2, 3)]


@pytest.mark.parametrize("flags", sorted({run.flags for run in published.published_runs()}))
def test_flags_of_the_published_runs(flags):
    """They are layouts that exist: train.py takes them. What they give takes minutes."""
    train.prepare(train.flags().parse_args([*flags.split(), "--dry-run", "--backend", "nccl"]))
