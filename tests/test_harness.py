"""harness.py: the norm, the receipt; and how every script meets bad input."""

import argparse
import contextlib
import math
import os
import re

import pytest
import torch
import torch.distributed as dist
from conftest import Script, refused

import harness
import proof
from proof.diagnosis import Notes
from proof.ledger import Ledger
from proof.one_process import larger

SMALL = "--layers 2 --heads 2 --width 16 --context 16 --batch 4 --steps 2 --microbatches 2".split()


# --- small things


def test_grad_norm_counts_each_element_once(ranks):
    def work(rank):
        tp = [dist.new_group([0, 1]), dist.new_group([2, 3])][rank // 2]
        pp = [dist.new_group([0, 2]), dist.new_group([1, 3])][rank % 2]
        split, whole, tied, frozen = (torch.nn.Parameter(torch.zeros(2)) for _ in range(4))
        for p, value in ((split, rank + 1), (whole, rank // 2 + 1), (tied, 10)):
            p.grad = torch.full((2,), float(value))
        split.placement = {"shape": (4,), "cuts": {0: (tp, rank % 2 * 2, 2)}}
        whole.placement = {"partial": [tp]}
        tied.placement = {"partial": [pp]}
        return harness.grad_norm([split, whole, tied, frozen], [pp]).item()

    expected = 2 * (1 + 4 + 9 + 16) + 2 * (1 + 4) + 2 * 100
    assert ranks(4, work) == [pytest.approx(expected**0.5)] * 4


def test_cudas_own_peak_stands_beside_the_ledgers(monkeypatch):
    calls = []
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", calls.append)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 1000 + len(calls))
    run = proof.Run.__new__(proof.Run)
    run.args = argparse.Namespace(steps=3, lr=1.0, warmup=0, prove=0, dtype="float32")
    run.device, run.history = torch.device("cuda", 0), []
    run.ledger, run.watching, run.notes = Ledger({}), contextlib.ExitStack(), Notes()
    weight = torch.nn.Parameter(torch.ones(5))
    for step in run.steps(torch.optim.SGD([weight])):
        (2 * weight).sum().backward()
        run.watching.close()
        assert len(calls) == min(step, 1)
    assert run.held["cuda_peak"] == 1001 and run.held["activations_peak"] > 0


def test_nan_is_the_largest_difference():
    assert larger(1.0, math.nan, 2.0) == math.inf


def test_learning_rate_warms_up_and_falls():
    args = harness.parser("", min_lr=0.1, lr=1.0, warmup=4, steps=20).parse_args([])
    rates = [harness.learning_rate(s, args) for s in range(20)]
    assert rates[:4] == [0.2, 0.4, 0.6, 0.8] and rates[4] == 1.0 and rates[19] == pytest.approx(0.1)
    assert all(a > b for a, b in zip(rates[4:], rates[5:]))


def test_decay_is_for_matrices():
    args = harness.parser("").parse_args([])
    matrix, bias = torch.nn.Parameter(torch.zeros(2, 2)), torch.nn.Parameter(torch.zeros(2))
    groups = harness.make_optimizer([matrix, bias], args).param_groups
    assert [(g["params"], g["weight_decay"]) for g in groups] == [([matrix], 0.1), ([bias], 0.0)]


# --- bad input: one sentence, exit code 2


REFUSED = r"""
train --family llama --kv-heads 2 --tp 3 -> 2 kv-heads.*3 tensor-parallel.*1 or 2,
train --pp 5 -> 4 layers are too few for 5 pipeline stages
train --tokens 15e12 -> --tokens means nothing without --dry-run
train --dp 2 --microbatches 3 -> --batch 16.*2 data-parallel ranks x 3.*--batch could be 18
train --compile --recompute half -> does not go with --recompute half.*selective
train --preset gpt5 -> unknown preset 'gpt5'.*tiny
train --ep 2 -> --ep 2 with 0 experts.*--experts
train --experts 3 --dp 4 --ep 4 -> --ep 4 with 3 experts.*--experts 4
train --experts 4 --dp 4 --ep 3 -> --ep 3 does not divide the 4 ranks
train --sp -> --sp means nothing without --tp 2 or more
train --tp 2 --ep 2 --experts 4 --fold-experts -> means nothing without --sp, --tp and --ep: add
train --tp 2 --sp --ep 3 --experts 4 --fold-experts -> the 2 ranks of --dp x --cp x --tp
train --experts 4 --cp 3 -> take no padding.*--context 128
train --cp 3 --cp-kind ulysses -> 4 heads do not divide by 3 ranks
train --cp 4 --cp-kind ring-ulysses --cp-rings 3 -> rings of 3 do not divide 4 ranks
train --pp 3 --schedule interleaved --microbatches 4 --layers 6 -> a multiple of 3 micro-batches
train --pp 2 --schedule dualpipev --microbatches 2 -> at least 4 micro-batches
train --pp 2 --chunks 2 -> stages a rank of 1f1b: 1.*leave out --chunks
train --pp 4 --schedule zb-v -> 4 layers are too few for 8 pipeline stages
train --init-from nowhere -> nowhere/config.json can't be read
train --export /proc/x -> --export /proc/x can't be written
train --schedule fastest -> 'fastest'.*1f1b
train --vocab 100 -> vocabulary of 100.*257
train --lr nan -> 'nan' is not a number
train --lr 6 -> at most 1
train --weight-decay 1548805 -> at most 1
train --device cpu --backend nccl -> 1 ranks need 1 GPUs on nccl and this machine has 0
train --tp 3 -> 4 heads.*3 tensor-parallel
train --dp 5 -> --batch 16.*5 data-parallel
train --json /no/such/folder/file -> --json /no/such/folder/file can't be written
train --dp 2 --nproc 3 -> needs 2 processes, not the 3
train --width 100000000 --heads 1 -> the weights take .* GB, this machine has
train --width 10000 --heads 1 --layers 100000 -> the weights take .* GB, this machine has
train --layers 1000000 -> '1000000' is not a whole number of at least 1 and at most 100,000
train --pp 4 --schedule interleaved --chunks 1000000 -> a schedule of
train --ep 2 --dp 2 --experts 2 --expert-chunks 1000000 -> has 2,048 tokens
train --timeout 1e308 -> at most 1,000,000
train --dp 1000000 --batch 2000000 -> 1,000,000 ranks are too many for one machine
train --dry-run --gpu x=0GB,0TFLOP/s,0TB/s -> not known
train --documents <|endoftext|> --cp 2 --cp-kind gather -> each rank uses other keys: use ring
train --plan --gpus 7 --batch 8 -> no layout of 7 devices suits --batch 8
train --data= -> --data is empty
train --json folder -> --json folder can't be written
train --json pipe -> --json pipe can't be written
train --log-to /dev/full -> --log-to /dev/full can't be written
train --param-dtype float16 -> float16 would need a loss scale: use bfloat16, or float32
train --zero 1 --param-dtype float64 -> is finer than --dtype float32
train --zero 3 --dtype bfloat16 --param-dtype float32 -> give a finer --dtype
train --islands 2 --sync-every 2 --stream 3 -> --sync-every 3 or more
train --islands 2 --sync-every 2 --stream-delay 2 -> less than --sync-every 2
train --islands 2 --outer-momentum 1 -> less than 1
train --islands 2 --dp 2 --outer-bits 4 -> does not go with islands of several ranks: use 16
train --only-sample -> needs weights
train --only-sample --sample 0 --out x -> needs weights
train --layers 8 --pp 4 --dp 2 --schedule interleaved --batch 12 -> --batch 16 does
train --experts 4 --cp 2 --context 13 -> a multiple of 4$
train --experts 4 --cp 2 --cp-kind ulysses --context 7 -> a multiple of 2$
train --experts 4 --cp 2 --tp 4 --sp --context 25 -> a multiple of 8$
train --experts 4 --tp 4 --sp --context 13 -> a multiple of 4$
train --zero-ranks 2 --dp 2 -> means nothing in stage 0, which splits nothing: leave it out
train --optimizer muon --dp 2 --zero 2 -> --zero 2 does not go with --optimizer muon.*use --zero 1
train --optimizer muon --dp 4 --zero 1 --zero-ranks 2 -> --zero-ranks does not go with --optimizer
train --optimizer muon --zero 1 --offload -> --offload does not go with --optimizer muon
train --optimizer muon --param-dtype bfloat16 -> mixed precision does not go with --optimizer muon
train --experts 4 --export x -> no family that transformers knows
train --record folder -> has a recording
train --record folder/record.jsonl/x -> can't be written
train --record x --documents -> --documents does not go with --record.*leave one of them out
train --dry-run --documents -> --documents does not go with --dry-run
train --tokenizer none --vocab 9 --documents -> which token begins a text.*--documents 50256
train --experts 4 --cp 2 --documents --context 40 -> a multiple of 16$
train --resume -> need --out
train --save-every 2 -> need --out
train --from-step 2 -> need --out
train --new-data -> means nothing without --resume
train --min-lr 1 --lr 0.1 -> --min-lr 1 is above --lr 0.1
train --out folder -> has checkpoints
train --out /proc/x -> can't be written
train --out folder/record.jsonl -> can't be written
train --sync-every 3 -> means nothing without --islands
train --islands 2 --batch 5 -> use 4
train --islands 2 --stream 60 -> --sync-every 60 or more
train --islands 2 --only-sample --out x -> leave --islands out
train --islands 2 --experts 2 --bias-rate 0.1 -> nobody averages
train --islands 2 --record x -> --record does not go with --islands: leave one of them out
train --dry-run --batch 100000000 --microbatches 100000000 -> micro-batches: a dry run takes at most
train --dry-run --context 100000000 -> pieces of work, more than
train --dry-run --batch 20000 --microbatches 20000 -> pieces of work, more than
train --dry-run --dp 1000000 --batch 1000000 -> 1,000,000 ranks: a dry run takes at most 131,072
train --plan --gpus 1000000 --batch 1000000 -> 1,000,000 ranks: a dry run takes
train --dry-run --pp 100000 --layers 100000 -> 100,000 stages: a dry run takes
train --dry-run --gpu tpu -> --gpu tpu is not known
train --dry-run --gpu x=80GB,500TFLOP/s,2TB/s,150% -> is not known
train --dry-run --matmul 1200TFLOP/s -> more than the device can do.*at most 989TFLOP/s
train --plan --preset llama3-405b --gpus 8 --batch 8 -> give more --gpus
train --plan --gpus 6 --zero-ranks 4 -> --zero-ranks 4 does not divide 6 devices
"""


@pytest.mark.parametrize("row", REFUSED.strip().splitlines())
def test_bad_flags(monkeypatch, tmp_path, row):
    """Before memory is taken, and before any process is started."""
    command, words = row.split(" -> ")
    script, _, flags = command.partition(" ")
    monkeypatch.chdir(tmp_path)
    os.mkfifo("pipe")
    os.makedirs("folder/step-00000001")
    open("folder/record.jsonl", "w").close()
    assert re.search(words, refused(monkeypatch, script, flags))


def test_bad_data_from_outside(tmp_path):
    path, names = tmp_path / "text", [*SMALL, "--dp", "2", "--data"]
    for content, words in (
        (None, "No such file or directory"),
        (b"\xff\0\xfe" * 500, "has no text"),
        (b"short", "needs 17"),
    ):
        if content is not None:
            path.write_bytes(content)
        script = Script(tmp_path, "train", [*names, str(path)])
        assert script.end() == 2 and "Traceback" not in script.output()
        [said] = script.errors()
        assert words in said


def made_run(rank, *flags):
    """(what a run of 3 ranks says where it is refused, who speaks)."""
    args = harness.parser("").parse_args([*SMALL, *flags])
    with pytest.raises(harness.Refused) as e:
        proof.Run(args, rank, 3, torch.device("cpu"))
    return str(e.value), e.value.speaker


def test_what_differs_on_one_rank(ranks, tmp_path):
    def work(rank):
        (tmp_path / f"text{rank // 2}").write_text("some text " * 100 + "x" * (rank // 2))
        texts = [str(tmp_path / name) for name in (f"text{rank // 2}", f"text{rank % 2 * 2}")]
        flags = ["--lr", str(0.1 * (1 + rank // 2))], ["--data", texts[0]], ["--data", texts[1]]
        return [made_run(rank, *words) for words in flags]

    dist_flags, text, missing = zip(*ranks(3, work))
    said = "rank 2 has other flags than rank 0: start every node with the same command"
    assert dist_flags == ((said, 2),) * 3
    for said, speaker in text:
        assert speaker == 2 and "rank 2 has another text than rank 0" in said
    for said, speaker in missing:
        assert speaker == 1 and "No such file" in said
