"""float16 and its loss scale: torch's GradScaler on one process, and the same decisions in every
layout. Steps that are left out."""

import copy
import json
from unittest import mock

import pytest
import torch
from test_checkpoint import history, same_tensors, whole
from test_layouts import VARIANTS, arguments

import harness
import proof
import train
from harness import data, initialize
from trainer import loss_scale
from trainer.large_vocabulary import lean_head
from trainer.loss_scale import LossScale

# Products in float16 are slow on CPUs. The curve must not depend on --steps
SMALL = "--layers 2 --width 16 --heads 2 --context 8 --batch 8 --dtype float32 --prove 0"
SMALL += " --param-dtype float16 --min-lr 0.01 --grad-clip 0.1"
STEPS = 14


# A scale that begins too high, and grows again after three steps: it shrinks and grows several
# times in a few steps
eager = mock.patch.multiple(LossScale, INITIAL=2.0**19, INTERVAL=3)


# Kept ranks see no monkeypatch
@eager
def eager_history(rank, args):
    return history(rank, args)


@mock.patch.object(loss_scale, "SCALED", {"float64"})
def history_in_float64(rank, args):
    return history(rank, args)


@eager
def grad_scaler(args):
    """[(scale, whether the step was skipped, loss, norm)] of torch's own GradScaler, in one process
    with float32 masters."""
    corpus = data.load(args.data)
    config = harness.configure(args)
    masters = initialize.build(config, args.seed, dtype=torch.float32)
    half = copy.deepcopy(masters).half()
    lean_head(half)  # a loss in float32
    optimizer = harness.make_optimizer(masters.parameters(), args)
    scaler = torch.amp.GradScaler(
        "cpu", init_scale=LossScale.INITIAL, growth_interval=LossScale.INTERVAL
    )
    rows = []
    for step in range(args.steps):
        batch = corpus.batch(step, range(args.batch), config.context, args.seed)
        tokens, targets, samples = batch
        loss = half(tokens, targets=targets, sample_ids=samples)
        scaler.scale(loss).backward()
        for master, p in zip(masters.parameters(), half.parameters()):
            master.grad, p.grad = p.grad.float(), None
        scaler.unscale_(optimizer)
        norm = torch.nn.utils.clip_grad_norm_(masters.parameters(), args.grad_clip)
        scale = scaler.get_scale()
        scaler.step(optimizer)
        scaler.update()
        rows.append((scale, scaler.get_scale() < scale, loss.item(), norm.item()))
        with torch.no_grad():
            for master, p in zip(masters.parameters(), half.parameters()):
                p.copy_(master)
    return rows


def test_equals_torchs_grad_scaler(ranks, text, tmp_path):
    """The same scales, skipped steps, losses and norms: on one rank, where the sums are in float32
    as GradScaler's; and on 4 ranks in float16, saved and resumed in another layout."""
    args = arguments(text, f"{SMALL} --reduce-dtype float32 --steps {STEPS}")
    expected = grad_scaler(args)
    skipped = [row[1] for row in expected]
    grown = [b[0] > a[0] for a, b in zip(expected, expected[1:])]
    assert skipped[0] and sum(skipped) > 3 and sum(grown) > 1  # shrinks, grows, shrinks again

    [(code, rows, receipt)] = ranks(1, eager_history, args)
    assert code == 0 and receipt["ok"] and len(rows) == STEPS
    for row, (scale, left_out, loss, norm) in zip(rows, expected):
        assert row["loss_scale"] == scale and (row["loss"] is None) == left_out
        if not left_out:
            assert row["loss"] == pytest.approx(loss, rel=1e-4)
            assert row["grad_norm"] == pytest.approx(norm, rel=1e-4)

    out, half = tmp_path / "out", STEPS // 2 + 1  # resumes between two changes of the scale
    joined = []
    for flags in (
        f"--dp 2 --pp 2 --zero 2 --microbatches 2 --steps {half}",
        f"--tp 2 --steps {STEPS} --resume",
    ):
        args = arguments(text, f"{SMALL} {flags} --out {out}")
        results = ranks(args.dp * args.tp * args.pp, eager_history, args)
        assert all(code == 0 and receipt["ok"] for code, _, receipt in results)
        scales = [[row["loss_scale"] for row in rows] for _, rows, _ in results]
        assert all(other == scales[0] for other in scales)  # every rank decides alike
        joined += results[0][1]
    assert [row["loss_scale"] for row in joined] == [scale for scale, *_ in expected]
    assert [row["loss"] is None for row in joined] == skipped
    index = json.loads((out / f"step-{half:08d}/index.json").read_text())
    scale, left_out, _, _ = expected[half]
    assert index["loss_scale"] == {"value": scale, "good_steps": 1}
    for row, (_, left_out, loss, _) in zip(joined, expected):
        assert left_out or row["loss"] == pytest.approx(loss, rel=1e-2)


@pytest.mark.parametrize(
    "variant, flags",
    [
        ("moe-gpt2", "--dp 2 --ep 2 --pp 2 --schedule zb-v --zero 3 --microbatches 3 --layers 4"),
        ("sgd", "--dp 2 --tp 2 --sp --zero 1 --layers 2 --steps 2 --out OUT --record OUT/record"),
    ],
)
def test_the_scale_cancels_out(ranks, text, tmp_path, variant, flags):
    """In float64, where a power of two changes no bit: loss, norm, clipping, every gradient and
    weight are one process's, with routers' losses that begin in the middle of a backward."""
    flags = f"{VARIANTS[variant]} {flags}".replace("OUT", str(tmp_path / "out"))
    args = arguments(text, flags)
    for code, rows, receipt in ranks(4, history_in_float64, args):
        assert code == 0 and receipt["ok"]
        assert max(receipt["max_error"].values()) < 1e-10
        assert [row["loss_scale"] for row in rows] == [2.0**16] * 2
    if args.record:
        lines = (tmp_path / "out/record/record.jsonl").read_text().splitlines()
        assert json.loads(lines[1])["scalars"]["loss_scale"] == [2.0**16]


def test_a_gradient_that_is_never_finite_ends_the_run(ranks, text, monkeypatch):
    """Not scaling is to blame: it is named once the scale has come down to 1."""
    monkeypatch.setattr(LossScale, "INITIAL", 4.0)

    def broken(run):
        data_parallel = train.data_parallel

        def planted(run, model, *rest):
            result = data_parallel(run, model, *rest)
            bias = dict(model.named())["blocks.1.mlp.down.bias"]
            bias.register_hook(lambda g: g * torch.inf if run.step > 0 else g)
            return result

        train.data_parallel = planted

    args = arguments(text, f"{SMALL} --zero 0 --steps 9")
    [(code, rows, said)] = ranks(1, history, args, broken)
    assert code == 1 and "step 4 has loss" in said and "blocks.1.mlp.down.bias" in said
    assert [row["loss_scale"] for row in rows] == [4.0, 4.0, 2.0]


def steps_1_and_3_are_bad(rank, args):
    data_parallel = train.data_parallel

    def planted(run, model, *rest):
        result = data_parallel(run, model, *rest)
        bias = dict(model.named())["blocks.0.mlp.down.bias"]
        bias.register_hook(lambda g: g * torch.nan if run.step in (0, 2) and rank == 1 else g)
        return result

    with mock.patch.object(train, "data_parallel", planted):
        return history(rank, args)


def only_steps_2_and_4(rank, args):
    batches = proof.Run.microbatches

    def planted(run, step, *rest, **options):
        return batches(run, 2 * step + 1, *rest, **options)

    with mock.patch.object(proof.Run, "microbatches", planted):
        return history(rank, args)


@pytest.mark.parametrize(
    "flags", ["", "--optimizer sgd", "--optimizer muon", "--zero 1 --offload", "--zero 3"]
)
def test_a_step_that_is_left_out_changes_nothing(ranks, text, tmp_path, flags):
    """The device leaves it out: weights and states are those of a run without it."""
    flags += " --layers 1 --width 16 --heads 2 --batch 4 --dp 2 --grad-clip 0.1 --prove 0"
    flags += " --warmup 0 --lr 0.01 --min-lr 0.01 --skip-nan 2 --eval-every 0"
    for steps, work, left_out in (
        (4, steps_1_and_3_are_bad, [True, False, True, False]),
        (2, only_steps_2_and_4, [False, False]),
    ):
        args = arguments(text, f"{flags} --steps {steps} --out {tmp_path}/{steps}")
        for code, rows, _ in ranks(2, work, args):
            assert code == 0 and [row["loss"] is None for row in rows] == left_out
    same_tensors(whole(tmp_path / "4/step-00000004"), whole(tmp_path / "2/step-00000002"), 1e-14)
