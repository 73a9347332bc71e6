"""Checkpoints: from any layout into any other, whole or not at all; another run's are refused."""

import functools
import itertools
import json
import os
import re
import shutil

import pytest
import safetensors
import torch
import torch.distributed as dist
from conftest import on_ranks
from test_layouts import VARIANTS, arguments

import harness
import proof
import train
from trainer import checkpoint

# The curve must not depend on --steps: a constant learning rate after two steps of warm-up
COMMON = "--warmup 2 --keep 0 --prove 0"


def history(rank, args, broken=None):
    """train.py's own function: (exit code, the history's rows, the receipt or the refusal)."""
    run = proof.Run(args, rank, dist.get_world_size(), torch.device("cpu"))
    if broken:
        broken(run)
    try:
        return train.train(run), run.history, getattr(run, "result", None)
    except harness.Refused as e:
        return e.code, run.history, str(e)


def rows_of(history):
    return [(row["step"], row["loss"], row["grad_norm"]) for row in history if "loss" in row]


def layout(ranks, text, flags, out, broken=None):
    """(exit code, the steps' loss and norm, or the refusal)"""
    args = arguments(text, f"{COMMON} {flags} --out {out}")
    code, rows, said = ranks(args.dp * args.cp * args.tp * args.pp, history, args, broken)[0]
    return code, said if code == 2 else rows_of(rows)


def whole(folder):
    """All of a checkpoint: {(name, kind): tensor}."""
    found = {}
    for name, kind, t in tensors_in(folder):
        full = torch.full(t["shape"], torch.nan, dtype=torch.float64)
        for piece in t["pieces"]:
            with safetensors.safe_open(folder / piece["file"], "pt") as f:
                box = tuple(slice(s, s + n) for s, n in zip(piece["start"], piece["size"]))
                full[box] = f.get_tensor(piece["key"])
        found[name, kind] = full
    return found


def tensors_in(folder):
    """(name, kind, what the index says of it) of all tensors."""
    for name, kinds in checkpoint.read_index(folder)["tensors"].items():
        for kind, t in kinds.items():
            yield name, kind, t


def same_tensors(a, b, tolerance=1e-8):
    assert a.keys() == b.keys()
    for key in a:
        scale = a[key].abs().max().clamp(min=1e-6)
        assert ((a[key] - b[key]).abs().max() / scale).item() < tolerance, key


def same_steps(a, b):
    assert [row[0] for row in a] == [row[0] for row in b]
    for x, y in zip(a, b):
        assert x[1:] == pytest.approx(y[1:], rel=1e-10)


def test_boxes():
    for shape in [(), (7,), (3, 4), (2, 3, 4), (1, 5), (4, 1, 3)]:
        whole = torch.arange(torch.Size(shape).numel()).view(shape)
        for a, b in itertools.combinations(range(whole.numel() + 1), 2):
            parts = []
            for box in checkpoint.boxes(shape, a, b):
                parts.append(whole[tuple(slice(s, s + n) for s, n in zip(*box))].flatten())
            assert torch.cat(parts).tolist() == list(range(a, b))
            assert len(parts) <= max(1, 2 * len(shape))


LAYOUTS = {
    "gpt2": [
        "--tp 2 --pp 2 --microbatches 2",
        "--dp 2 --tp 2 --sp --zero 2",
        "--dp 1",
        "--pp 2 --schedule zb-v --dp 2 --zero 3 --microbatches 3",
    ],
    "moe": [
        "--dp 2 --ep 2",
        "--tp 2 --dp 2 --ep 2 --zero 3",
        "--cp 2 --ep 2 --pp 2 --zero 1 --microbatches 2",
        "--tp 2 --sp --dp 2 --ep 4 --fold-experts --zero 2",
        "--dp 1",
    ],
    "muon-moe": ["--dp 2 --tp 2 --ep 2", "--cp 2 --pp 2 --microbatches 2", "--dp 1"],
}
# 125 does not divide by 2; zb-v has 4 stages
EXTRA = {"gpt2": " --hidden 125 --layers 4", "moe": " --bias-rate 0.01 --layers 2"}
EXTRA["muon-moe"] = EXTRA["moe"]


@pytest.mark.parametrize("variant", LAYOUTS)
def test_a_walk_through_layouts_is_one_undisturbed_run(ranks, text, tmp_path, variant):
    """Each step is another layout's: every layout writes a checkpoint that another reads."""
    flags = VARIANTS[variant] + EXTRA[variant]
    walk = [*LAYOUTS[variant], LAYOUTS[variant][0]]
    code, alone = layout(ranks, text, f"{flags} --steps {len(walk)}", tmp_path / "one")
    assert code == 0
    joined = []
    for i, each in enumerate(walk):
        more = f"{each} --steps {i + 1} --resume"  # from none it begins
        code, steps = layout(ranks, text, f"{flags} {more}", tmp_path / "walk")
        assert code == 0 and len(steps) == 1
        joined += steps
    same_steps(alone, joined)
    last = f"step-{len(walk):08d}"
    one = whole(tmp_path / "one" / last)
    same_tensors(one, whole(tmp_path / "walk" / last))
    kinds = {kind for _, kind in one}
    assert kinds >= {"weight", "exp_avg", "exp_avg_sq", "step"}
    assert ("buffer" in kinds) == (variant != "gpt2")
    assert ("average" in kinds) == (variant == "muon-moe")


def test_mixed_precision_saves_the_masters(ranks, text, tmp_path):
    flags = "--dtype float32 --param-dtype bfloat16 --dp 2"
    alone = layout(ranks, text, f"{flags} --zero 2 --steps 4", tmp_path / "one")[1]
    layout(ranks, text, f"{flags} --zero 2 --steps 2", tmp_path / "two")
    again = layout(ranks, text, f"{flags} --zero 0 --steps 4 --resume", tmp_path / "two")[1]
    assert [row[1] for row in again] == pytest.approx([row[1] for row in alone[2:]], rel=2e-3)
    dtypes = {t["dtype"] for _, _, t in tensors_in(tmp_path / "two/step-00000002")}
    assert dtypes == {"float32"}


def test_sixteen_bits_count_their_steps_in_32(ranks, text, tmp_path):
    for flags in ("--steps 1", "--steps 2 --resume"):
        layout(ranks, text, f"--dtype bfloat16 --layers 1 {flags}", tmp_path)
    dtypes = {(kind, t["dtype"]) for _, kind, t in tensors_in(tmp_path / "step-00000002")}
    assert ("step", "float32") in dtypes and ("weight", "bfloat16") in dtypes
    assert len(dtypes) == 4


# --- what is broken


@pytest.fixture(scope="module")
def saved(text, tmp_path_factory):
    """A folder with checkpoints of steps 1, 2 and 3 by two ranks, and the undisturbed run."""
    out = tmp_path_factory.mktemp("saved") / "out"
    code, steps = layout(on_ranks, text, "--layers 2 --dp 2 --zero 1 --steps 4 --save-every 1", out)
    assert code == 0
    shutil.rmtree(out / "step-00000004")
    return out, steps


def flip(file, place):
    content = bytearray(file.read_bytes())
    content[place] ^= 1
    file.write_bytes(content)


FILE = "rank00001.safetensors"
BROKEN = {
    "crc32 differs": lambda folder: flip(folder / FILE, -5),
    f"{FILE} was changed": lambda folder: os.truncate(folder / FILE, 1000),
    "No such file .* '": lambda folder: os.unlink(folder / FILE),
    "index.json is broken .*No such file": lambda folder: os.unlink(folder / "index.json"),
    "its index.json was changed": lambda folder: flip(folder / "index.json", -3),
    "its index.json is broken .*line 1": lambda folder: os.truncate(folder / "index.json", 99),
    "crc32 or step differs": lambda folder: shutil.copytree(
        folder.parent / "step-00000001", folder, dirs_exist_ok=True
    ),
    "writer did not finish": lambda folder: os.rename(folder, f"{folder}.tmp"),
}


@pytest.mark.parametrize("first", range(0, len(BROKEN), 2))
def test_broken_checkpoints_are_passed_over(ranks, text, tmp_path, capfd, saved, first):
    """The newest two are broken, each in its way."""
    shutil.copytree(saved[0], tmp_path / "out")
    reasons = list(BROKEN)[first : first + 2]
    for reason, step in zip(reasons, (3, 2)):
        BROKEN[reason](tmp_path / f"out/step-{step:08d}")
    args = arguments(text, f"{COMMON} --layers 2 --steps 4 --resume --out {tmp_path / 'out'}")
    args.quiet = False
    [(code, rows, _)] = ranks(1, history, args)
    assert code == 0
    same_steps(rows_of(rows), saved[1][1:])
    *lines, compared, judged, _ = capfd.readouterr().out.splitlines()
    assert compared == "  not compared with one process: it was resumed"
    assert judged == "  ok: bytes sent and held agree with the formulas"
    [said] = [line for line in lines if "resumed from" in line]
    assert "out/step-00000001: " in said
    for reason, step in zip(reasons, (3, 2)):
        assert re.search(rf"step-{step:08d}[^;]*: [^;]*{reason}", said), said


def test_an_index_of_the_second_edition_has_no_checksum(ranks, text, tmp_path, saved):
    shutil.copytree(saved[0], tmp_path / "out")
    path = tmp_path / "out/step-00000003/index.json"
    index = json.loads(path.read_text())
    del index["crc32"]
    path.write_text(json.dumps(index))
    code, steps = layout(ranks, text, "--layers 2 --steps 4 --resume", tmp_path / "out")
    assert code == 0
    same_steps(steps, saved[1][3:])
    index["tensors"]["embed.token.weight"]["weight"]["pieces"][0]["start"] = [1, 0]
    path.write_text(json.dumps(index))
    shutil.rmtree(tmp_path / "out/step-00000004")
    code, said = layout(ranks, text, "--layers 2 --steps 4 --resume", tmp_path / "out")
    assert code == 2 and "does not fit this run: embed.token.weight, weight" in said


def test_copies_that_groups_split(ranks, text, tmp_path, saved):
    """HSDP writes each shard once and reads it on every copy; with masters on the host as well."""
    out, joined = tmp_path / "out", []
    for steps, flags in (
        (2, "--dp 4 --zero 2 --zero-ranks 2 --offload --microbatches 1"),
        (3, "--tp 2 --resume"),
        (4, "--dp 4 --zero 3 --zero-ranks 2 --microbatches 1 --resume"),
    ):
        code, rows = layout(ranks, text, f"--layers 2 --steps {steps} {flags} --keep 2", out)
        assert code == 0
        joined += rows
    same_steps(saved[1], joined)
    assert steps_in(out) == ["step-00000003", "step-00000004"]
    index = checkpoint.read_index(out / "step-00000004")
    assert len(index["files"]) == 2  # of the 4 ranks, the 2 of the first copy write


@pytest.mark.parametrize(
    "flags, reason",
    [
        ("--width 16", "width is 32 there and 16 here"),
        ("--optimizer sgd", "optimizer is 'adamw' there"),
        ("another text", "text is another"),
        ("--steps 3", "has all of --steps 3"),
    ],
)
def test_another_run_is_refused(ranks, text, tmp_path, saved, flags, reason):
    if flags == "another text":
        text, flags = tmp_path / "other.txt", ""
        text.write_text("something else " * 500)
    code, said = layout(ranks, text, f"--layers 2 --steps 4 --resume {flags}", saved[0])
    assert code == 2 and reason in said
    index = checkpoint.read_index(saved[0] / "step-00000003")
    with pytest.raises(harness.Refused, match="tokenizer is 'bytes' there and 'gpt2'"):
        checkpoint.check_header("x", index, {"tokenizer": "gpt2"}, ())
    checkpoint.check_header("x", index, {"seed": 4, "config": {"dropout": 1}}, ("seed", "dropout"))


def test_going_back(ranks, text, tmp_path, saved):
    """In another layout. What comes after it stays, under another name."""
    out = tmp_path / "out"
    shutil.copytree(saved[0], out)
    before = contents(out / "step-00000003")
    flags = "--layers 2 --steps 3 --save-every 1 --from-step"
    code, said = layout(ranks, text, f"{flags} 7", out)
    assert code == 2 and "no whole checkpoint in" in said and "step-00000003, step-00000002" in said
    code, steps = layout(ranks, text, f"{flags} 1 --tp 2", out)
    assert code == 0
    same_steps(steps, saved[1][1:3])
    names = [re.sub(r"left-\d+", "left", name) for name in steps_in(out)]
    last = "step-00000003"
    assert names == ["step-00000001", "step-00000002", "step-00000002.left", last, f"{last}.left"]
    [left] = out.glob(f"{last}.left-*")
    assert [*contents(left).values()] == [*before.values()]


def test_other_data(ranks, text, tmp_path, saved):
    """By a flag of its own: the optimizer's states go on."""
    shutil.copytree(saved[0], tmp_path / "out")
    other = tmp_path / "other.txt"
    other.write_text("something else " * 500)
    flags = "--layers 2 --steps 4 --resume --new-data"
    code, steps = layout(ranks, str(other), flags, tmp_path / "out")
    assert code == 0 and steps[0][0] == 4 and abs(steps[0][1] - saved[1][3][1]) > 0.01
    one = whole(tmp_path / "out/step-00000004")
    assert {t.item() for (_, kind), t in one.items() if kind == "step"} == {4.0}
    code, _ = layout(ranks, str(other), "--layers 2 --steps 5 --resume", tmp_path / "out")
    assert code == 0


def steps_in(folder):
    return sorted(os.listdir(folder))


def contents(folder):
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize(
    "reads, number",
    [("crc_of_file", 13), ("crc_of_file", 5), ("read", 116), ("checkpoints_in", 13)],
)
def test_what_cannot_be_read_is_not_broken(ranks, text, tmp_path, saved, reads, number):
    """No permission, a disk or a server that fails, on one of two ranks: nothing is touched."""
    shutil.copytree(saved[0], tmp_path / "out")
    before = contents(tmp_path / "out")

    def unreadable(run, right=getattr(checkpoint, reads)):
        def read(path):
            if run.rank == 1:
                raise OSError(number, os.strerror(number))
            return right(path)

        setattr(checkpoint, reads, read)

    flags = "--layers 2 --dp 2 --zero 1 --steps 9 --save-every 1 --keep 1 --resume"
    code, said = layout(ranks, text, flags, tmp_path / "out", unreadable)
    assert code == 2 and os.strerror(number) in said and "nothing was changed" in said
    assert contents(tmp_path / "out") == before


def test_a_run_removes_only_what_it_has_written_or_read(ranks, text, tmp_path, saved):
    """Not another run's, nor one that can't be opened, nor one that appears while it runs."""
    out = tmp_path / "out"
    shutil.copytree(saved[0], out)
    index = checkpoint.read_index(out / "step-00000001")
    index["seed"] = 9
    index["crc32"] = checkpoint.crc_of(index)
    (out / "step-00000001/index.json").write_text(json.dumps(index))
    (out / f"step-00000002/{FILE}").unlink()
    (out / "step-00000005").mkdir()
    (out / "step-00000005/index.json").touch()

    def plant(run, read=checkpoint.newest):
        def then(*args):
            found = read(*args)
            (out / "step-00000006").mkdir()
            return found

        checkpoint.newest = then

    flags = "--layers 2 --steps 7 --resume --save-every 1 --keep 1"
    assert layout(ranks, text, flags, out, plant)[0] == 0
    assert steps_in(out) == [f"step-0000000{step}" for step in (1, 2, 6, 7)]


def test_files_follow_the_umask(ranks, text, tmp_path):
    """Checkpoints, exports, logs, recordings and traces."""
    flags = [f"--{name} {tmp_path}/{name}" for name in ("export", "log-to", "record", "profile-to")]
    flags = f"--layers 1 --steps 6 {' '.join(flags)}"
    code, _ = layout(ranks, text, flags, tmp_path / "out", lambda run: os.umask(0o027))
    modes = {path: path.stat().st_mode & 0o777 for path in tmp_path.rglob("*") if path.is_file()}
    assert code == 0 and len(modes) >= 13 and {*modes.values()} == {0o640}, modes


def fails(run, ends):
    """The second rank's file of step 4 is cut short: by a full disk, or (ends) by a kill."""

    def write(path, tensors, right=checkpoint.write_tensors):
        right(path, tensors)
        if "step-00000004" in path and run.rank == 1:
            os.truncate(path, 100)
            if ends:
                os._exit(9)
            raise OSError(28, "No space left on device")

    checkpoint.write_tensors = write


@pytest.mark.parametrize("ends", [False, True], ids=["full", "killed"])
def test_a_save_that_fails_loses_nothing(ranks, text, tmp_path, saved, capfd, ends):
    shutil.copytree(saved[0], tmp_path / "out")
    flags, before = "--layers 2 --dp 2 --zero 1 --steps 4 --resume", steps_in(saved[0])
    broken = functools.partial(fails, ends=ends)
    if ends:
        with pytest.raises(AssertionError, match="rank 1"):
            layout(ranks, text, flags, tmp_path / "out", broken)
        assert steps_in(tmp_path / "out") == [*before, "step-00000004.tmp"]
    else:
        code, _ = layout(ranks, text, flags, tmp_path / "out", broken)
        said = capfd.readouterr().err
        assert code == 2 and "step 4" in said and "No space left on device" in said
        assert steps_in(tmp_path / "out") == before
    code, steps = layout(ranks, text, flags, tmp_path / "out")
    assert code == 0
    same_steps(steps, saved[1][3:])
    assert steps_in(tmp_path / "out") == [*before, "step-00000004"]
