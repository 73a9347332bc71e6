"""What train.py does beside training: traces, logs, samples."""

import contextlib
import functools
import json
import os
import pathlib
import re
import shutil
import sys
import types
from unittest import mock
from xml.etree import ElementTree

import pytest
import torch
from conftest import ROOT, Script
from test_checkpoint import history, same_tensors, whole
from test_layouts import arguments, run_layout

import harness
import model as gpt
import proof
import train
from benchmarks import terminal
from harness import initialize, presets
from harness.files import json_text
from trainer import checkpoint, large_vocabulary, sampling
from trainer.runner import Runner

SHORT = "--layers 2 --prove 0"


def run(ranks, text, flags):
    args = arguments(text, f"{SHORT} {flags}")
    results = ranks(args.dp * args.cp * args.tp * args.pp, run_layout, args)
    assert {code for code, _ in results} == {0}
    return results[0][1]


def test_traces_of_all_ranks_fit_together(ranks, text, tmp_path):
    folder = tmp_path / "new"
    run(ranks, text, f"--dp 2 --microbatches 3 --steps 4 --profile-to {folder}")
    spans = []
    for rank in range(2):
        events = json.loads((folder / f"rank{rank}.json").read_text())["traceEvents"]
        spans.append(sorted(e["ts"] for e in events if e["name"] == "gloo:all_reduce"))
    assert len(spans[0]) == len(spans[1]) > 2
    assert all(abs(a - b) < 1e6 for a, b in zip(*spans))  # microseconds, on one time axis


def rows_of(log):
    return [json.loads(line) for line in open(log)]


def test_a_log_goes_on_after_a_resume(ranks, text, tmp_path):
    log = tmp_path / "log"
    flags = f"--out {tmp_path}/out --log-to {log} --eval-every 2 --lr 0.01 --min-lr 0.01"
    first = run(ranks, text, f"--steps 3 {flags}")["steps"]
    rows = rows_of(log)
    assert [row for row in rows if "loss" in row] == first  # in full precision
    validated = [(row["step"], row["val_loss"] > 0) for row in rows if "val_loss" in row]
    assert validated == [(2, True), (3, True)]
    then = run(ranks, text, f"--steps 5 --resume {flags}")["steps"]
    assert [row["step"] for row in then] == [4, 5]
    assert [row for row in rows_of(log) if "loss" in row] == first + then
    with pytest.raises(harness.Refused, match="--log-to .*log has a log: remove it"):
        arguments(text, f"{SHORT} --log-to {log}")


def test_a_validation_that_is_not_a_number(ranks, text, tmp_path, capfd):
    """JSON has no NaN; a sentence and the exit code tell. And a warm-up longer than the run."""

    def broken(run):
        Runner.forward_only = lambda *_: [torch.tensor(torch.nan, dtype=torch.float64)]

    args = arguments(text, f"{SHORT} --steps 2 --warmup 9 --log-to {tmp_path}/log")
    args.quiet = False
    assert ranks(1, history, args, broken)[0][0] == 1
    assert rows_of(tmp_path / "log")[-1] == {"step": 2, "val_loss": None}
    out, err = capfd.readouterr()
    assert "the validation loss is nan: the run goes on, and its exit code is 1" in err
    assert "--warmup 9 is not shorter than --steps 2: the learning rate does not reach" in out
    assert json_text({"a": torch.inf, "b": [1.5, -torch.inf]}) == '{"a": null, "b": [1.5, null]}'


@pytest.mark.parametrize(
    "at_terminal, flags, printed",
    [
        (True, "", [*range(1, 11), 20, 23]),
        (True, "--log-every 7", [*range(1, 11), 14, 21, 23]),
        (False, "", [*range(1, 24)]),
        (False, "--log-every 7 --prove 2", [*range(1, 11), 14, 21, 23]),
    ],
)
def test_lines_of_steps(ranks, text, capfd, at_terminal, flags, printed):
    """A terminal gets fewer, each but the last with the time that is left."""
    args = arguments(text, f"{SHORT} --layers 1 --width 8 --batch 2 --steps 23 {flags}")
    args.quiet = False
    ranks(1, run_layout, args, lambda: setattr(sys.stdout, "isatty", lambda: at_terminal))
    out = capfd.readouterr().out
    assert ("on to step 23 and the receipt" in out) == ("--prove" in flags)
    lines = re.findall(r"^step +(\d+) .*?(  \d:\d\d:\d\d left)?$", out, re.M)
    assert [int(step) for step, _ in lines] == printed
    assert [bool(left) for _, left in lines] == [at_terminal] * (len(lines) - 1) + [False]


def test_tensorboard_and_wandb_get_the_log(ranks, text, tmp_path):
    """After a kill and a resume, too: TensorBoard shows no step twice, wandb's run has one id."""
    module = "tensorboard.backend.event_processing.event_accumulator"
    events, logged = pytest.importorskip(module, reason="tensorboard is not installed"), []

    class Tracker:
        def log(self, row, step):
            with open(tmp_path / "wandb", "a") as file:
                print(json.dumps(row | {"step": step}), file=file)

        def finish(self):
            raise ConnectionError("the end costs nothing")

    def init(project, config, id, resume):
        with open(tmp_path / "ids", "a") as file:
            print(id, resume, file=file)
        return Tracker()

    def in_place_of_wandb():
        sys.modules["wandb"] = types.SimpleNamespace(init=init)

    for steps, resume in ((3, ""), (4, "--resume")):
        shutil.rmtree(tmp_path / "out/step-00000003", ignore_errors=True)
        flags = f"--steps {steps} --eval-every 1 --lr 0.01 --min-lr 0.01 --out {tmp_path}/out"
        flags += " --save-every 2"
        args = arguments(text, f"{SHORT} {flags} {resume} --tensorboard {tmp_path}/board")
        args.wandb = "a project"
        logged += ranks(1, run_layout, args, in_place_of_wandb)[0][1]["steps"]
    rows = rows_of(tmp_path / "wandb")
    assert [row for row in rows if "loss" in row] == logged and len(logged) == 5
    ids = (tmp_path / "ids").read_text().split()
    assert ids == [ids[0], "allow"] * 2 and len(ids[0]) == 8
    board = events.EventAccumulator(str(tmp_path / "board")).Reload()
    for name in {*logged[0], "val_loss"} - {"step"}:
        written = [(event.step, event.value) for event in board.Scalars(name)]
        expected = {row["step"]: pytest.approx(row[name]) for row in rows if name in row}
        assert written == [*expected.items()] and len(written) == 4


def test_a_picture_shows_what_was_printed(tmp_path, monkeypatch):
    pytest.importorskip("rich")
    lines = ["  a <b> & [c]   10", "x " * 100]  # the second takes two lines of the picture
    (tmp_path / "script.py").write_text(f"print(*{lines}, sep='\\n')")
    picture, script = str(tmp_path / "new.svg"), str(tmp_path / "script.py")
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(sys, "argv", ["terminal", picture, script])
    terminal.main()
    shown = "".join(ElementTree.parse(picture).getroot().itertext())
    expected = ["$ python", script, *lines]
    assert "".join(" ".join(expected).split()) in "".join(shown.split())


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


def test_a_sample_of_no_checkpoint_is_refused(ranks, text):
    def work(rank):
        with pytest.raises(harness.Refused, match="no whole checkpoint in nowhere"):
            run_layout(rank, arguments(text, f"{SHORT} --only-sample --sample 5 --out nowhere"))

    ranks(1, work)


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


@pytest.mark.parametrize("dtype, rtol", [(torch.float64, 1e-10), (torch.bfloat16, 2e-2)])
def test_lean_head(dtype, rtol, monkeypatch):
    """The padded projection and the loss in chunks, plain and compiled, beside model.py's: loss and
    all gradients, with targets that are not valid and chunks that do not divide the rows."""
    monkeypatch.setattr(large_vocabulary, "CHUNK", 1000)
    compile = functools.partial(torch.compile, backend="aot_eager")
    monkeypatch.setattr(torch, "compile", compile)
    config = presets.configure("tiny", layers=1, width=32, heads=2, context=16)
    tokens = torch.randint(0, config.vocab, (3, 16))
    targets = tokens.roll(1, 1)
    targets[0, :3] = gpt.IGNORE
    found = []
    for kind in ("plain", "lean", "compiled"):
        model = initialize.build(config, 1, dtype=dtype)
        names = [name for name, _ in model.named_parameters()]
        if kind != "plain":
            large_vocabulary.lean_head(model, kind == "compiled")
        assert names == [name for name, _ in model.named_parameters()]
        loss = model(tokens, targets=targets, target_count=40)
        loss.backward()
        found.append([loss, *(p.grad for p in model.parameters())])
        logits = model(tokens)
        assert logits.softmax(-1)[..., config.vocab :].eq(0).all()
    assert logits.shape[-1] == (257 if dtype == torch.float64 else 320)
    for plain, lean, compiled in zip(*found):
        torch.testing.assert_close(lean, plain, rtol=rtol, atol=rtol / 200)
        torch.testing.assert_close(compiled, lean, rtol=1e-12, atol=0)


@pytest.mark.parametrize(
    "flags",
    ["--cp 2 --context 12", "--cp 2 --cp-kind ulysses --context 6", "--tp 4 --sp --context 12"],
)
def test_experts_take_lengths_without_padding(text, flags):
    arguments(text, f"{SHORT} --experts 4 {flags}")


# --- the end


@pytest.mark.parametrize("full, code", [(True, 2), (False, 141)])
def test_what_fails_at_the_end_costs_nothing_that_comes_after(ranks, text, tmp_path, full, code):
    """The last checkpoint finds no room; the reader of stdout goes away at the sample."""

    def broken(run):
        reader, writer = os.pipe()
        os.close(reader)

        def generate(*_):
            sys.stdout = open(writer, "w")
            return "text"

        sampling.generate = generate
        if full:
            checkpoint.publish = mock.Mock(side_effect=OSError(28, "No space left"))

    flags = f"--steps 2 --sample 3 --dp 2 --out {tmp_path}/out --export {tmp_path}/export"
    args = arguments(text, f"{SHORT} {flags} --json {tmp_path}/receipt.json")
    args.quiet = False

    def work(rank):
        with contextlib.redirect_stdout(sys.stdout):  # the flush at its end would fail
            return history(rank, args, broken)

    ends = ranks(2, work)
    assert ends[0][0] == code and ends[1][0] == (2 if full else 0)
    assert json.loads((tmp_path / "receipt.json").read_text())["ok"]
    assert (tmp_path / "export/config.json").exists()
    assert (tmp_path / "out/step-00000002").exists() == (not full)


def test_what_the_terminal_cannot_show(tmp_path, text):
    """A path and a sample that are not ASCII, where stdout is."""
    (tmp_path / "tëxt").write_bytes(pathlib.Path(text).read_bytes())
    flags = f"{SHORT} --layers 1 --steps 1 --sample 2 --prompt é€ --export {tmp_path}/export"
    said = tmp_path / "said"

    def ascii_only():
        sys.stdout = open(said, "w", buffering=1, encoding="ascii")

    run = Script(tmp_path, "train", [*flags.split(), "--data", f"{tmp_path}/tëxt"], ascii_only)
    assert run.end() == 0, run.output()
    assert f"{tmp_path}/t?xt" in run.output() and "sample:\n??" in run.output()
    assert (tmp_path / "export/config.json").exists()


# --- steps that are left out


def test_a_gradient_that_is_not_finite_ends_the_run(ranks, text):
    """Without ZeRO too it is named, before the step."""

    def broken(run):
        data_parallel = train.data_parallel

        def planted(run, model, *rest):
            result = data_parallel(run, model, *rest)
            bias = dict(model.named())["blocks.1.mlp.down.bias"]
            bias.register_hook(lambda g: g * torch.inf if run.step > 1 else g)
            return result

        train.data_parallel = planted

    [(code, rows, said)] = ranks(1, history, arguments(text, f"{SHORT} --steps 9"), broken)
    assert code == 1 and len(rows) == 2
    assert "step 3 has loss" in said and "blocks.1.mlp.down.bias" in said


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
