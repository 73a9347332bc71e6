"""Recordings: the same in every layout, and against other training loops, right and wrong ones."""

import json
import pathlib
import re

import pytest
import torch
from safetensors.torch import load_file
from test_layouts import VARIANTS, arguments, run_layout

import composition
import harness
from harness import initialize
from proof import compare, differences, recorder
from proof.recorder import summary

STEPS = 3


def record(ranks, text, folder, flags):
    """train.py's recording with these flags: its folder."""
    args = arguments(text, f"--prove 0 --layers 2 --steps {STEPS} --record {folder} {flags}")
    results = ranks(args.dp * args.cp * args.tp * args.pp, run_layout, args)
    assert {code for code, _ in results} == {0}
    return str(folder)


def lines_of(folder):
    return [json.loads(line) for line in open(f"{folder}/record.jsonl")]


# --- the numbers


def test_summaries_of_pieces_add_up():
    torch.manual_seed(0)
    x, y = torch.randn(2, 6, 10, dtype=torch.float64)
    numbers = torch.arange(60).view(6, 10)
    pieces = [summary(x[:, :4], numbers[:, :4]), summary(x[:, 4:], numbers[:, 4:])]
    torch.testing.assert_close(sum(pieces), summary(x))
    torch.testing.assert_close(summary(x)[0], x.square().sum())
    torch.testing.assert_close(summary(2 * x + y)[1:], 2 * summary(x)[1:] + summary(y)[1:])
    assert not torch.allclose(summary(x.t())[1:], summary(x)[1:])


def test_a_distance_is_estimated():
    """The mean over tensors is right, and one of eight projections is rarely far off."""
    torch.manual_seed(0)
    ratios = []
    for _ in range(200):
        x, d = torch.randn(2, 500, dtype=torch.float64)
        estimate = differences.distance(summary(x), summary(x + 1e-3 * d))
        ratios.append((estimate / (1e-3 * d.norm())).item())
    assert sum(ratios) / 200 == pytest.approx(1, rel=0.1)
    assert 0.3 < min(ratios) and max(ratios) < 2.5


# --- train.py --record


@pytest.mark.parametrize(
    "variant, layout",
    [
        ("odd", "--cp 2 --tp 2 --sp --recompute block --microbatches 2"),
        ("gpt2", "--dp 2 --tp 2 --zero 3 --microbatches 3"),
        ("moe", "--dp 2 --ep 2 --pp 2 --microbatches 3"),
    ],
)
def test_no_layout_changes_a_recording(ranks, text, tmp_path, variant, layout):
    flags = f"{VARIANTS[variant]} "
    one = record(ranks, text, tmp_path / "one", flags)
    other = record(ranks, text, tmp_path / "other", flags + layout)
    code, said = compare.report(one, other)
    assert code == 0 and "not compared" not in said, said
    for line in lines_of(other)[1:-1]:
        assert line["outputs"].keys() == {"embed", "blocks.0", "blocks.1"}
        assert len(set(sum(line["batch"]["rows"], []))) == 24
    for step in range(1, STEPS + 1):
        ours, theirs = (load_file(f"{folder}/step-{step}.safetensors") for folder in (one, other))
        assert ours.keys() == theirs.keys() == {"tokens", "targets"}
        assert all(torch.equal(theirs[name], tensor) for name, tensor in ours.items())
    args = arguments(text, f"{flags} --layers 2")
    model = initialize.build(harness.configure(args), args.seed, dtype=torch.float64)
    for name, p in model.named():
        [written] = lines_of(other)[1]["data"][name]
        torch.testing.assert_close(torch.tensor(written, dtype=torch.float64), summary(p))


def test_a_receipt_does_not_see_the_recording(ranks, text, tmp_path):
    """All bytes are as the formulas say: run_layout's exit code is that of the receipt. After a
    resume a recording has the steps that are left."""
    flags = f"--layers 2 --prove 0 --zero 1 --out {tmp_path}/out --lr 0.01"
    for steps, more in (
        (2, f"--record {tmp_path}/begin"),
        (3, f"--resume --record {tmp_path}/end"),
    ):
        args = arguments(text, f"{flags} {more}")
        args.steps = steps
        assert ranks(1, run_layout, args)[0][0] == 0
    assert [line.get("step") for line in lines_of(tmp_path / "begin")] == [None, 1, 2, 3]
    assert [line.get("step") for line in lines_of(tmp_path / "end")] == [None, 3, 4]
    one = record(ranks, text, tmp_path / "one", "")
    for part in ("begin", "end"):
        assert compare.report(f"{tmp_path}/{part}", one)[0] == 0
    other = record(ranks, text, tmp_path / "other", "--lr 0.02")
    assert "all 28 weights: its step is 2 times the right one" in compare.report(one, other)[1]


def test_a_skipped_step_counts_once(ranks, text, tmp_path):
    """A step that is run again, in search of a NaN, adds nothing to the recorded outputs."""

    def second_norm_is_nan():
        right, calls = composition.norm_in_grid, []

        def wrong(*args):
            calls.append(None)
            return right(*args) * (float("nan") if len(calls) == 2 else 1.0)

        composition.norm_in_grid = wrong

    flags = "--layers 2 --steps 3 --prove 0 --skip-nan 1 --lr 1e-6 --min-lr 1e-6"
    ranks(1, run_layout, arguments(text, f"{flags} --record {tmp_path}"), second_norm_is_nan)
    _, first, second, third, last = lines_of(tmp_path)
    assert second["data"] != first["data"] and second["data"] == third["data"] != last["data"]
    for line in (second, third):
        for name, [[squares, *_]] in line["outputs"].items():
            assert squares == pytest.approx(first["outputs"][name][0][0], rel=0.2)


# --- proof.compare


FACTS = '{"dtype": "float64"}'


def weight(*values):
    """Summaries of w: each a norm, and what all projections are."""
    return {"data": {"w": [[norm**2, *[value] * 8] for norm, value in values]}}


ONES = weight((2.0, 1.0))
LINES = {1: ONES | {"scalars": {"loss": [2.0]}, "grad": ONES["data"]}, 2: ONES}
# (a line, the facts): wrong types, and lists within lists
NO_RECORDINGS = [
    (LINES[1] | {"data": {"w": "text"}}, FACTS),
    (LINES[1] | {"grad": [1]}, FACTS),
    (LINES[1] | {"scalars": {"loss": ["2"]}}, FACTS),
    (LINES[1], '{"dtype": "float64", "groups": {"dp": "two"}}'),
    (LINES[1], '{"dtype": ' + 10**5 * "[" + 10**5 * "]" + "}"),
]


def written(path, lines, facts=FACTS):
    rows = [json.dumps({"step": step} | line) for step, line in lines.items()]
    path.write_text("\n".join([facts, *rows]))
    return str(path)


@pytest.mark.parametrize(
    "change, words",
    [
        ({}, "equal to rounding"),
        ({"scalars": {"loss": [4.0]}}, "the loss: off by 1.0e+00; it is 2 times"),
        ({"scalars": {"loss": [float("nan")]}}, "step 1, the loss"),
        (weight((1.0, 0.5)), "before step 1: the weight of w"),
        (weight((0.0, 0.0)), "it is zero"),
        (weight((float("nan"), float("nan"))), "it is not finite"),
        (weight((2.0, 1.0), (2.0, -1.0)), "and one is right: the others never got it"),
        (weight((2.0, 0.5), (2.0, 1.5)), "never averaged over the ranks"),
    ],
)
def test_what_is_said(tmp_path, change, words):
    ours = written(tmp_path / "ours", LINES)
    theirs = written(tmp_path / "theirs", LINES | {1: LINES[1] | change})
    code, said = compare.report(ours, theirs)
    assert code == (words != "equal to rounding") and words in said, said


def test_exit_codes_and_refusals(tmp_path, monkeypatch):
    ours = written(tmp_path / "ours", LINES)
    other = LINES[1] | {"data": {"v": LINES[1]["data"]["w"]}}
    loss = LINES[1] | {"scalars": {"loss": [2.0001]}}
    bad = {
        written(tmp_path / "no steps", {}): "no step in common",
        written(tmp_path / "later", {7: LINES[1]}): "no step in common",
        written(tmp_path / "names", {1: other}): "lacks 1 of the weights",
        written(tmp_path / "none", {1: LINES[1] | {"grad": {}}}): "has no gradients in step 1",
        written(tmp_path / "cut", {}, '{"dtype": "float'): "was cut short",
        written(tmp_path / "facts", {}, "{}"): "is no recording",
        str(tmp_path / "nowhere"): "can't be read",
    }
    for number, (lines, facts) in enumerate(NO_RECORDINGS):
        bad[written(tmp_path / f"bad {number}", {1: lines}, facts)] = "is no recording"

    def code_of(*words):
        monkeypatch.setattr("sys.argv", ["compare", *words])
        with pytest.raises(SystemExit) as stopped:
            compare.main()
        return stopped.value

    theirs = written(tmp_path / "theirs", {1: loss})
    assert code_of(ours, ours).code == 0
    assert code_of(ours, theirs).code == 1
    assert code_of(ours, theirs, "--tolerance", "0.001").code == 0
    for path, words in bad.items():
        refused = code_of(ours, path)
        assert refused.code == 2 and words in str(refused), refused
    assert code_of(ours).code == 2
    assert "is empty" in str(code_of("", ""))


def test_the_recorder_is_short_and_needs_torch_alone():
    """What is promised to those who paste it: under 70 lines of code."""
    source = pathlib.Path(recorder.__file__).read_text()
    assert set(re.findall(r"^import (\w+)", source, re.MULTILINE)) == {"json", "os", "torch"}
    assert "\nfrom " not in source
    code = re.sub(r'""".*?"""', "", source, flags=re.DOTALL)
    assert sum(1 for line in code.splitlines() if line.strip()) < 70
