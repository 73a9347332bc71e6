"""What train.py does beside training: traces, logs, samples."""

import json

import pytest
import torch
from test_layouts import arguments, run_layout

import harness
import model as gpt
from harness import initialize, presets
from trainer import large_vocabulary, tracking

SHORT = "--layers 2 --prove 0"


def run(ranks, text, flags):
    args = arguments(text, f"{SHORT} {flags}")
    results = ranks(args.dp * args.cp * args.tp * args.pp, run_layout, args)
    assert {code for code, _ in results} == {0}
    return results[0][1]


def test_traces_of_all_ranks_fit_together(ranks, text, tmp_path):
    folder = tmp_path / "new"
    run(ranks, text, f"--dp 2 --microbatches 3 --steps 3 --profile 2-3 --profile-to {folder}")
    spans = []
    for rank in range(2):
        events = json.loads((folder / f"rank{rank}.json").read_text())["traceEvents"]
        spans.append(sorted(e["ts"] for e in events if e["name"] == "gloo:all_reduce"))
    assert len(spans[0]) == len(spans[1]) > 2
    assert all(abs(a - b) < 1e6 for a, b in zip(*spans))  # microseconds, on one time axis


def test_a_log_goes_on_after_a_resume(ranks, text, tmp_path):
    log = tmp_path / "log"
    flags = f"--out {tmp_path}/out --log-to {log} --eval-every 2 --lr 0.01 --min-lr 0.01"
    first = run(ranks, text, f"--steps 3 {flags}")["steps"]
    rows = list(tracking.read_log(log))
    assert [row for row in rows if "loss" in row] == first  # in full precision
    validated = [(row["step"], row["val_loss"] > 0) for row in rows if "val_loss" in row]
    assert validated == [(2, True), (3, True)]
    with open(log, "a") as f:  # steps that a crash made the run forget, and one that it cut short
        f.write('{"step": 4, "loss": 9.0}\n{"step": 5, "lo\n')
    then = run(ranks, text, f"--steps 5 --resume {flags}")["steps"]
    assert [row["step"] for row in then] == [4, 5]
    # None twice
    assert [row for row in tracking.read_log(log) if "loss" in row] == first + then


def test_the_loss_is_drawn_at_each_validation(ranks, text, tmp_path):
    pytest.importorskip("matplotlib")
    run(ranks, text, f"--steps 2 --eval-every 1 --plot {tmp_path}/loss")
    assert {path.name for path in tmp_path.glob("loss.*")} == {"loss.png", "loss.svg"}


def test_only_a_sample_is_the_same_in_every_layout(ranks, text, tmp_path, capfd):
    out, said, files = tmp_path / "out", [], []
    layouts = ["--dp 1", "--tp 2 --pp 2", "--dp 2 --zero 3", "--optimizer sgd --steps 1"]
    only = [f"--only-sample {flags}" for flags in layouts]
    common = f"{SHORT} --family llama --kv-heads 2 --sample 12 --out {out}"
    for flags in ("--dp 2 --zero 1 --steps 2 --lr 0.1", *only):
        args = arguments(text, f"{common} {flags}")
        args.prompt, args.quiet = "a b", False
        assert {code for code, _ in ranks(args.dp * args.tp * args.pp, run_layout, args)} == {0}
        lines = capfd.readouterr().out.splitlines()
        start = lines.index("sample:")
        said.append(lines[start : start + 2])
        files.append(sorted(out.rglob("*")))
        if args.only_sample:
            assert any("step-00000002" in line for line in lines)
            assert not any(line.startswith(("step ", "receipt")) for line in lines)
    assert said[1:] == said[:-1] and len(said[0][1]) > 12
    assert files[1:] == files[:-1]


@pytest.mark.parametrize("flags", ["", "--out x --sample 0", "--out nowhere"])
def test_a_sample_of_nothing_is_refused(ranks, text, flags):
    def work(rank):
        with pytest.raises(harness.Refused) as refused:
            run_layout(rank, arguments(text, f"{SHORT} --only-sample --sample 5 {flags}"))
        return str(refused.value)

    [said] = ranks(1, work)
    assert (
        "no whole checkpoint in nowhere" in said if "nowhere" in flags else "needs weights" in said
    )


@pytest.mark.parametrize(
    "flags, expected",
    [
        ("--batch 12", 1),
        ("--batch 12 --pp 4", 6),
        ("--batch 12 --pp 4 --schedule interleaved", 4),
        ("--batch 12 --pp 4 --schedule dualpipev", 12),
        ("--batch 12 --pp 2 --dp 2 --schedule interleaved", 2),
        ("--batch 16 --pp 4 --dp 2 --schedule interleaved", 8),
    ],
)
def test_the_default_number_of_microbatches_suits_the_schedule(text, flags, expected):
    assert arguments(text, f"{SHORT} --layers 8 {flags}").microbatches == expected


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_lean_head(dtype, monkeypatch):
    """The padded projection and the loss in chunks beside model.py's: loss and all gradients, with
    targets that are not valid and chunks that do not divide the rows."""
    monkeypatch.setattr(large_vocabulary, "CHUNK", 1000)
    config = presets.configure("tiny", layers=1, width=32, heads=2, context=16)
    tokens = torch.randint(0, config.vocab, (3, 16))
    targets = tokens.roll(1, 1)
    targets[0, :3] = gpt.IGNORE
    found = []
    for lean in (False, True):
        model = initialize.build(config, 1, dtype=dtype)
        names = [name for name, _ in model.named_parameters()]
        if lean:
            large_vocabulary.lean_head(model)
        assert names == [name for name, _ in model.named_parameters()]
        loss = model(tokens, targets=targets, target_count=40)
        loss.backward()
        found.append([loss, *(p.grad for p in model.parameters())])
        logits = model(tokens)
        assert logits.softmax(-1)[..., config.vocab :].eq(0).all()
    assert logits.shape[-1] == (257 if dtype == torch.float64 else 320)
    tolerance = (
        dict(rtol=1e-10, atol=1e-14) if dtype == torch.float64 else dict(rtol=2e-2, atol=1e-4)
    )
    for plain, lean in zip(*found):
        torch.testing.assert_close(lean, plain, **tolerance)


MUON = "does not go with --optimizer muon"
REFUSED = [
    ("--profile 2", "--profile-to"),
    ("--profile 3-2 --profile-to x", "not a step or a range"),
    ("--profile 0 --profile-to x", "not a step or a range"),
    ("--profile 9 --profile-to x", "beyond --steps"),
    ("--log-to x.csv", "JSON lines"),
    ("--layers 8 --pp 4 --dp 2 --schedule interleaved --batch 12", "--batch 16 does"),
    # The lengths that experts take without padding
    ("--experts 4 --cp 2 --context 13", "a multiple of 4$"),
    ("--experts 4 --cp 2 --cp-kind ulysses --context 7", "a multiple of 2$"),
    ("--experts 4 --cp 2 --tp 4 --sp --context 25", "a multiple of 8$"),
    ("--experts 4 --tp 4 --sp --context 13", "a multiple of 4$"),
    ("--optimizer muon --dp 2 --zero 2", f"--zero 2 {MUON}.*use --zero 1"),
    ("--optimizer muon --dp 2 --zero 3", f"--zero 3 {MUON}.*use --zero 1"),
    ("--optimizer muon --dp 4 --zero 1 --zero-ranks 2", f"--zero-ranks {MUON}"),
    ("--optimizer muon --zero 1 --offload", f"--offload {MUON}"),
    ("--optimizer muon --dtype float32 --param-dtype bfloat16", f"mixed precision {MUON}"),
]


@pytest.mark.parametrize("flags, words", REFUSED)
def test_what_is_refused(text, flags, words):
    with pytest.raises(harness.Refused, match=words):
        arguments(text, f"{SHORT} {flags}")


@pytest.mark.parametrize(
    "flags",
    ["--cp 2 --context 12", "--cp 2 --cp-kind ulysses --context 6", "--tp 4 --sp --context 12"],
)
def test_experts_take_lengths_without_padding(text, flags):
    arguments(text, f"{SHORT} --experts 4 {flags}")
