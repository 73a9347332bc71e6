"""Dry runs against real ones: what the ledger counts must be the same to the byte, for every technique."""

import pytest
import torch
import torch.distributed as dist

import dryrun
import expert_parallel
import harness
import train

BASE = "--layers 5 --width 32 --heads 4 --context 16 --batch 12 --steps 2 --prove 0 --sample 0 --eval-every 0 --eval-batches 1"
BASE += " --quiet --backend gloo"
MIXTURE = "--experts 5 --family llama --kv-heads 2 --balance-loss 0.1 --shared 1"
LAYOUTS = [
    "--dp 3 --microbatches 2 --bucket-mb 0.01",
    "--dp 2 --zero 1 --param-dtype bfloat16 --reduce-dtype float32 --microbatches 3",
    "--dp 2 --pp 2 --zero 2 --schedule zb-h1 --microbatches 3 --dropout 0.1",
    "--dp 2 --tp 2 --zero 3 --family llama --kv-heads 2 --microbatches 2",
    "--tp 2 --pp 2 --schedule interleaved --microbatches 4 --optimizer sgd",
    "--tp 2 --sp --gather-again --pp 2 --schedule dualpipev --microbatches 6",
    "--cp 2 --dp 2 --zero 1 --family llama",
    "--cp 4 --cp-kind ring-ulysses --dtype float64",
    "--cp 2 --cp-kind gather --tp 2 --sp --pp 2 --microbatches 3",
    f"--dp 2 --ep 2 {MIXTURE} --microbatches 2 --expert-chunks 2",
    f"--dp 2 --cp 2 --ep 4 --tp 2 --sp --zero 1 --pp 1 {MIXTURE}",
    f"--tp 2 --dp 1 --pp 2 {MIXTURE} --schedule zb-v --microbatches 3",
]
CLUSTER = dryrun.Cluster(dryrun.DEVICES["h100"], 8, 450e9, 50e9)


def arguments(flags, base=BASE):
    args = train.flags().parse_args(f"{base} {flags}".split())
    train.check(args, harness.configure(args))
    return args


def real(rank, args):
    """What a real rank's ledger says, and the sizes of its experts' all-to-alls in the step that it watches."""
    reads, read = [], expert_parallel.ExpertDispatch.read

    def recorded(self, *given):
        reads.append(read(self, *given))
        return reads[-1]

    expert_parallel.ExpertDispatch.read = recorded
    run = harness.Run(args, rank, dist.get_world_size(), torch.device("cpu"))
    train.train(run)
    return run.ledger.sent, run.held, reads[len(reads) // 3 : 2 * len(reads) // 3]  # two steps and a validation as long


@pytest.mark.parametrize("flags", LAYOUTS)
def test_equals_a_real_run(ranks, text, flags):
    args = arguments(f"{flags} --data {text}")
    world = args.dp * args.cp * args.tp * args.pp
    for rank, (sent, held, reads) in enumerate(ranks(world, real, args)):
        if rank not in (0, world // 2 + 1, world - 1):
            continue
        dry = dryrun.play(args, rank, CLUSTER, routing=lambda *_: reads.pop(0))
        assert not reads
        assert dry.sent == sent
        assert {kind: dry.held[kind] for kind in held} == held
