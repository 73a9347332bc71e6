"""Checkpoints: from any layout into any other, whole or not at all, and refused where they are of
another run."""

import itertools
import json
import os
import pathlib
import shutil
import zlib

import pytest
import torch
import torch.distributed as dist
from conftest import Script
from test_layouts import VARIANTS, arguments

import harness
import proof
import train
from trainer import checkpoint

ROOT = pathlib.Path(__file__).parent.parent
# The curve must not depend on --steps: a constant learning rate after two steps of warm-up
COMMON = "--warmup 2 --keep 0 --prove 0"


def rank_of(rank, args, broken=None):
    """train.py's own function; its exit code or refusal, the steps' loss and norm, and the sums of
    the whole's weights."""
    if broken:
        broken(rank)
    args.prove = args.prove or 0
    try:
        run = proof.Run(args, rank, dist.get_world_size(), torch.device("cpu"))
        return train.train(run), [
            (row["step"], row["loss"], row["grad_norm"]) for row in run.history
        ]
    except harness.Refused as e:
        return e.code, str(e)


def layout(ranks, text, flags, out=None, broken=None):
    args = arguments(text, f"{COMMON} {flags}" + (f" --out {out}" if out else ""))
    results = ranks(args.dp * args.cp * args.tp * args.pp, rank_of, args, broken)
    return results[0]


def whole(folder):
    """All of a checkpoint: {(name, kind): tensor}."""
    index, found = json.loads((folder / "index.json").read_text()), {}
    for name, kinds in index["tensors"].items():
        for kind, t in kinds.items():
            full = torch.full(t["shape"], torch.nan, dtype=torch.float64)
            for piece in t["pieces"]:
                with checkpoint.safetensors.safe_open(folder / piece["file"], "pt") as f:
                    full[tuple(slice(s, s + n) for s, n in zip(piece["start"], piece["size"]))] = (
                        f.get_tensor(piece["key"])
                    )
            found[name, kind] = full
    return found


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
            parts = [
                whole[tuple(slice(s, s + n) for s, n in zip(*box))].flatten()
                for box in checkpoint.boxes(shape, a, b)
            ]
            assert (
                torch.cat(parts).tolist() == list(range(a, b))
                and len(parts) <= 2 * len(shape)
                or shape == ()
            )


LAYOUTS = {
    "gpt2": [
        "--dp 2 --zero 1",
        "--tp 2 --pp 2 --microbatches 2",
        "--dp 2 --tp 2 --sp --zero 2",
        "--dp 1",
        "--pp 2 --schedule zb-v --dp 2 --zero 3 --microbatches 3",
    ],
    "moe": [
        "--dp 2 --ep 2",
        "--tp 2 --dp 2 --ep 2 --zero 3",
        "--cp 2 --ep 2 --pp 2 --zero 1 --microbatches 2",
        "--dp 1",
    ],
}
# 125 does not divide by 2; zb-v has 4 stages
EXTRA = {"gpt2": " --hidden 125 --layers 4", "moe": " --bias-rate 0.01 --layers 2"}


@pytest.mark.parametrize("variant", LAYOUTS)
def test_every_pair_of_layouts_is_one_undisturbed_run(ranks, text, tmp_path, variant):
    """A run of which each step is another layout's: a walk that takes every step from one layout to
    another once."""
    layouts, flags = LAYOUTS[variant], VARIANTS[variant] + EXTRA[variant]
    walk = [x for pair in itertools.combinations(range(len(layouts)), 2) for x in pair] + [0]
    assert len(set(zip(walk, walk[1:]))) == len(walk) - 1 == len(layouts) * (len(layouts) - 1)
    code, alone = layout(ranks, text, f"{flags} --steps {len(walk)}", tmp_path / "one")
    assert code == 0
    joined = []
    for i, each in enumerate(walk):
        resume = "--resume" * (i > 0)
        code, steps = layout(
            ranks, text, f"{flags} {layouts[each]} --steps {i + 1} {resume}", tmp_path / "walk"
        )
        assert code == 0 and len(steps) == 1
        joined += steps
    same_steps(alone, joined)
    last = f"step-{len(walk):08d}"
    same_tensors(whole(tmp_path / "one" / last), whole(tmp_path / "walk" / last))
    kinds = {kind for _, kind in whole(tmp_path / "one" / last)}
    assert kinds >= {"weight", "exp_avg", "exp_avg_sq", "step"} and ("buffer" in kinds) == (
        variant == "moe"
    )


def test_mixed_precision_saves_the_masters(ranks, text, tmp_path):
    flags = "--dtype float32 --param-dtype bfloat16 --dp 2"
    alone = layout(ranks, text, f"{flags} --zero 2 --steps 4", tmp_path / "one")[1]
    layout(ranks, text, f"{flags} --zero 2 --steps 2", tmp_path / "two")
    again = layout(ranks, text, f"{flags} --zero 0 --steps 4 --resume", tmp_path / "two")[1]
    assert [row[1] for row in again] == pytest.approx([row[1] for row in alone[2:]], rel=2e-3)
    index = json.loads((tmp_path / "two/step-00000002/index.json").read_text())
    assert {t["weight"]["dtype"] for t in index["tensors"].values()} == {"float32"}


def test_copies_are_written_once(ranks, text, tmp_path):
    sizes = []
    for flags in ("--dp 1", "--pp 2 --dp 2 --zero 1"):
        out = tmp_path / str(len(sizes))
        assert layout(ranks, text, f"{flags} --steps 1 --layers 2", out)[0] == 0
        index = json.loads((out / "step-00000001/index.json").read_text())
        found = [t["dtype"] for kinds in index["tensors"].values() for t in kinds.values()]
        assert set(found) == {"float64", "float32"}
        pieces = [
            (p, t)
            for kinds in index["tensors"].values()
            for t in kinds.values()
            for p in t["pieces"]
        ]
        sizes.append(
            sum(torch.Size(p["size"]).numel() * int(t["dtype"][5:]) // 8 for p, t in pieces)
        )
    assert len(set(sizes)) == 1


# --- what is broken


@pytest.fixture(scope="module")
def saved(text, tmp_path_factory):
    """A folder with checkpoints of steps 1, 2 and 3, written by two ranks, and the undisturbed
    run."""
    from conftest import on_ranks

    out = tmp_path_factory.mktemp("saved") / "out"
    code, steps = layout(on_ranks, text, "--layers 2 --dp 2 --zero 1 --steps 4 --save-every 1", out)
    assert code == 0
    shutil.rmtree(out / "step-00000004")
    return out, steps


def flip(folder):
    file = folder / "rank00001-000.safetensors"
    content = bytearray(file.read_bytes())
    content[-5] ^= 4
    file.write_bytes(content)


def truncate(folder):
    os.truncate(folder / "rank00000-000.safetensors", 1000)


def half_written(folder):
    os.rename(folder, f"{folder}.tmp")


def change(**new):
    def work(folder):
        index = json.loads((folder / "index.json").read_text())
        (folder / "index.json").write_text(json.dumps(index | new))

    return work


def escape(folder):
    index = json.loads((folder / "index.json").read_text())
    index["files"]["../../secret"] = index["files"].pop("rank00000-000.safetensors")
    (folder / "index.json").write_text(json.dumps(index))


def claims_more(folder):
    """A header that is sound in itself, but has other sizes than the index."""
    file = folder / "rank00000-000.safetensors"
    content = checkpoint.safetensors.torch.save({"x": torch.zeros(5)})
    file.write_bytes(content)
    index = json.loads((folder / "index.json").read_text())
    index["files"][file.name] = {"bytes": len(content), "crc32": zlib.crc32(content)}
    (folder / "index.json").write_text(json.dumps(index))


@pytest.mark.parametrize(
    "broken, reason",
    [
        (flip, "crc32 differs"),
        (truncate, "has 1,000 bytes, not"),
        (lambda folder: os.unlink(folder / "rank00001-000.safetensors"), "is missing"),
        (lambda folder: os.unlink(folder / "index.json"), "no index.json"),
        (half_written, "writer did not finish"),
        (
            change(
                tensors={
                    "x": {
                        "weight": {
                            "shape": [2],
                            "dtype": "float64",
                            "pieces": [{"key": "x", "start": [1], "size": [2]}],
                        }
                    }
                }
            ),
            "outside",
        ),
        (escape, "'../../secret', which is no file of the folder"),
        (claims_more, "than its index says"),
    ],
)
def test_broken_checkpoint_is_passed_over(ranks, text, tmp_path, capfd, saved, broken, reason):
    shutil.copytree(saved[0], tmp_path / "out")
    broken(tmp_path / "out/step-00000003")
    args = arguments(text, f"{COMMON} --layers 2 --steps 4 --resume --out {tmp_path / 'out'}")
    args.quiet = False
    [(code, steps)] = ranks(1, rank_of, args)
    assert code == 0
    same_steps(steps, saved[1][2:])
    said = [line for line in capfd.readouterr().out.splitlines() if "resumed from" in line]
    assert (
        len(said) == 1
        and "step-00000002" in said[0]
        and "step-00000003" in said[0]
        and reason in said[0]
    )


def test_copies_that_groups_split(ranks, text, tmp_path, saved):
    """HSDP writes each shard once and reads it on every copy; with masters on the host as well."""
    out, joined = tmp_path / "out", []
    for steps, flags in (
        (2, "--dp 4 --zero 2 --zero-ranks 2 --offload --microbatches 1"),
        (3, "--tp 2 --resume"),
        (4, "--dp 4 --zero 3 --zero-ranks 2 --microbatches 1 --resume"),
    ):
        code, rows = layout(ranks, text, f"--layers 2 --steps {steps} {flags}", out)
        assert code == 0
        joined += rows
    same_steps(saved[1], joined)
    index = json.loads((out / "step-00000002/index.json").read_text())
    assert len(index["files"]) == 2  # of the 4 ranks, the 2 of the first copy write


def test_none_is_the_beginning(ranks, text, tmp_path, saved):
    code, steps = layout(ranks, text, "--layers 2 --steps 2 --resume", tmp_path / "out")
    assert code == 0
    same_steps(steps, saved[1][:2])


@pytest.mark.parametrize(
    "flags, reason",
    [
        ("--width 16", "width is 32 there and 16 here"),
        ("--family llama", "kv_heads is 4 there and 2 here"),
        ("--optimizer sgd", "optimizer is 'adamw' there"),
        ("text", "text is another"),
        ("tokenizer", "tokenizer is 'bytes' there and 'gpt2' here"),
        ("--steps 3", "has all of --steps 3"),
    ],
)
def test_another_run_is_refused(ranks, text, tmp_path, saved, flags, reason):
    if flags == "text":
        text, flags = tmp_path / "other.txt", ""
        text.write_text("something else " * 500)
    args = arguments(
        text,
        f"{COMMON} --layers 2 --steps 4 --resume --out {saved[0]} {flags.replace('tokenizer', '')}",
    )
    code, said = ranks(1, refused_tokenizer if flags == "tokenizer" else rank_of, args)[0]
    assert code == 2 and reason in said


def refused_tokenizer(rank, args):
    newest = checkpoint.newest
    checkpoint.newest = lambda folder, header, free: newest(
        folder, header | {"tokenizer": "gpt2"}, free
    )
    return rank_of(rank, args)


def steps_in(folder):
    """The names of all but the lock."""
    return sorted(name for name in os.listdir(folder) if name != ".lock")


def test_keep(ranks, text, tmp_path):
    layout(ranks, text, "--layers 2 --steps 5 --save-every 1 --keep 2 --dp 2", tmp_path / "out")
    assert steps_in(tmp_path / "out") == ["step-00000004", "step-00000005"]


def disk_full(rank):
    right = checkpoint.write

    def write(path, content):
        if "step-00000004" in path and "rank00001" in path:
            pathlib.Path(path).write_bytes(content[:100])
            raise OSError(28, "No space left on device")
        right(path, content)

    checkpoint.write = write


def killed(rank):
    def write(path, content, right=checkpoint.write):
        if "step-00000004" in path and rank == 1:
            pathlib.Path(path).write_bytes(content[:100])
            os._exit(9)
        right(path, content)

    checkpoint.write = write


def test_disk_full(ranks, text, tmp_path, saved):
    shutil.copytree(saved[0], tmp_path / "out")
    flags = "--layers 2 --dp 2 --zero 1 --steps 4 --resume"
    code, said = layout(ranks, text, flags, tmp_path / "out", disk_full)
    assert code == 2 and "step 4" in said and "No space left on device" in said
    assert steps_in(tmp_path / "out") == [f"step-0000000{i}" for i in (1, 2, 3)]
    assert layout(ranks, text, flags, tmp_path / "out")[0] == 0


def test_killed_in_mid_write(ranks, text, tmp_path, saved):
    shutil.copytree(saved[0], tmp_path / "out")
    flags = "--layers 2 --dp 2 --zero 1 --steps 4 --resume"
    with pytest.raises(AssertionError, match="rank 1"):
        layout(ranks, text, flags, tmp_path / "out", killed)
    assert "step-00000004.tmp" in os.listdir(tmp_path / "out")
    code, steps = layout(ranks, text, flags, tmp_path / "out")
    assert code == 0
    same_steps(steps, saved[1][3:])
    assert "step-00000004.tmp" not in os.listdir(tmp_path / "out")


def test_flags_are_refused_before_the_start(text, tmp_path, saved):
    for flags, reason in {
        "--resume": "need --out",
        "--save-every 2": "need --out",
        "--out /proc/x": "can't be written",
        f"--out {saved[0]}": "has checkpoints",
        f"--out {text}": "can't be written",
    }.items():
        with pytest.raises(harness.Refused, match=reason):
            arguments(text, flags)


def test_from_the_command_line(text, tmp_path):
    def command(flags):
        base = (
            "--layers 2 --width 32 --context 16 --batch 4 --sample 0 --lr 0.01 --min-lr 0.01 "
            f"--warmup 0 --data {text}"
        )
        flags = f"{base} --dtype float64 --eval-every 0 --eval-batches 1 {flags}".split()
        log = tmp_path / "log"
        done = Script(tmp_path, "train", [*flags, "--log-to", str(log)])
        assert done.end() == 0, done.output()
        rows = map(json.loads, log.read_text().splitlines())
        return done.output(), [
            (row["step"], row["loss"], row["grad_norm"]) for row in rows if "loss" in row
        ]

    command(f"--out {tmp_path}/out --save-every 2 --steps 4 --dp 2")
    assert steps_in(tmp_path / "out") == ["step-00000002", "step-00000004"]
    said, steps = command(f"--out {tmp_path}/out --resume --steps 6 --tp 2")
    assert (
        "resumed from" in said
        and "step-00000004" in said
        and [s for s, *_ in steps] == list(range(1, 7))
    )
    os.unlink(tmp_path / "log")
    same_steps(steps, command("--steps 6")[1])
