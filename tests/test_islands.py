"""train.py --islands: layouts against one process that plays all islands, its checkpoints, signals
and refusals."""

import math
import os
import shutil
import signal
import sys

import pytest
import torch
import torch.distributed as dist
from conftest import Script
from test_checkpoint import same_tensors, whole

import diloco
import harness
import train
from trainer import checkpoint, islands

# A clip of 0.1 always binds; the constant rate depends on no --steps
SMALL = "--layers 2 --heads 4 --width 16 --context 8 --batch 12 --dtype float64 --grad-clip 0.1"
SMALL += " --lr 0.01 --min-lr 0.01 --warmup 0 --sample 0 --eval-batches 1 --quiet --timeout 60"
SGD = "--optimizer sgd --lr 0.3 --min-lr 0.3"


def rank_of(rank, args, plant):
    """train.py's own function on this rank: (exit code or sentence, receipt)."""
    plant(rank)
    try:
        run = islands.Run(args, rank, dist.get_world_size(), torch.device("cpu"))
        return train.train(run), getattr(run, "result", None)
    except harness.Refused as e:
        return str(e), None


def play(ranks, text, flags, plant=lambda rank: None):
    """What each rank of a run says."""
    args = train.flags().parse_args(f"{SMALL} {flags} --data {text}".split())
    args, _ = train.prepare(islands.settle(args))
    return ranks(args.islands * args.dp * args.cp * args.tp * args.pp, rank_of, args, plant)


LAYOUTS = [
    f"--islands 3 --steps 5 --sync-every 2 {SGD}",
    "--islands 2 --dp 2 --steps 4 --sync-every 3 --dropout 0.1",
    # Norms, which tensor-parallel ranks both hold, must be rounded alike
    f"--islands 2 --tp 2 --steps 6 --sync-every 4 --stream 2 --stream-delay 1 --outer-bits 4 {SGD}",
    "--islands 2 --dp 2 --tp 2 --sp --zero 1 --steps 5 --sync-every 2 --outer-bits 8 --stream 2",
    f"--islands 2 --pp 2 --dp 2 --zero 1 --steps 4 --sync-every 2 --outer-bits 4 {SGD}",
    "--islands 3 --pp 2 --schedule zb-v --layers 4 --microbatches 2 --steps 5 --sync-every 4 "
    "--stream 4 --stream-delay 3",
    "--islands 2 --dp 2 --cp 2 --zero 3 --steps 5 --sync-every 2 --stream-delay 1 --outer-bits 16",
    "--islands 2 --dp 2 --ep 2 --experts 3 --top-k 2 --zero 2 --steps 3 --sync-every 2 "
    "--outer-bits 8",
    "--islands 2 --dp 2 --zero 1 --offload --steps 4 --sync-every 2 --outer-bits 4",
]


@pytest.mark.parametrize("flags", LAYOUTS)
def test_any_layout_is_what_one_process_plays(ranks, text, flags):
    for code, said in play(ranks, text, f"{flags} --prove 99"):
        assert code == 0 and said["ok"], said
        assert max(said["max_error"].values()) < 1e-10
        [row] = [row for row in said["sent"] if row["group"] == "islands"]
        assert row["wire_bytes"] == row["formula_bytes"] > 0
        bits = "outer-bits" in flags
        assert (said["held"]["outer_error"]["bytes"] > 0) == bits


def one_island_stays(rank):
    restart = diloco.Part.restart
    diloco.Part.restart = lambda part, keep=0: restart(part, keep) if rank < 2 else None


def blocks_of_two_pieces(rank):
    islands.Outer.padding = lambda self, stepped: 0


def rows_of_another_island(rank):
    init = islands.Run.__init__

    def all_read_the_first(self, *args):
        init(self, *args)
        self.first_row = 0

    islands.Run.__init__ = all_read_the_first


def weights_stay_behind_the_masters(rank):
    after = islands.Outer.after

    def without_reload(self, step):
        self.inner = None
        after(self, step)

    islands.Outer.after = without_reload


@pytest.mark.parametrize(
    "layout, plant",
    [
        ("--tp 2", one_island_stays),
        ("--tp 2", blocks_of_two_pieces),
        ("--dp 2", rows_of_another_island),
        ("--dp 2 --zero 1", weights_stay_behind_the_masters),
    ],
)
def test_the_receipt_catches(ranks, text, layout, plant):
    flags = f"--islands 2 {layout} --steps 4 --sync-every 2 --outer-bits 8 --prove 3"
    for code, said in play(ranks, text, flags, plant):
        assert code == 1 and max(said["max_error"].values()) > 1e-10


def one_step_is_left_out(rank):
    read = islands.Run.read

    def read_nothing(self, *values):
        return (math.nan, math.nan) if self.step == 1 else read(self, *values)

    if rank > 1:
        islands.Run.read = read_nothing


def test_a_step_that_one_island_leaves_out(ranks, text):
    """The player takes all steps, so nobody is compared with it."""
    flags = "--islands 2 --tp 2 --sync-every 2 --steps 4 --skip-nan 1 --prove 99"
    for code, said in play(ranks, text, flags, one_step_is_left_out):
        assert code == 0 and said["ok"] and said["max_error"] is None


# --- checkpoints


def test_goes_on_in_the_middle_of_a_round(ranks, text, tmp_path):
    """In other layouts: all weights, states and outer states are those of an undisturbed run. Then
    with more islands, with one, and with two again."""
    common = "--sync-every 3 --outer-bits 16 --prove 0 --keep 0 --save-every 4 --steps"
    one = tmp_path / "one"
    play(ranks, text, f"--islands 2 --dp 2 {common} 6 --out {one}")
    middle, end = checkpoint.name_of(4), checkpoint.name_of(6)
    expected = whole(one / end)
    kinds = {kind for _, kind in expected}
    assert {"weight", "island 1 exp_avg", "outer old", "island 1 outer error"} <= kinds
    assert "island 1 outer old" not in kinds
    for i, layout in enumerate(["--tp 2 --zero 1", "--pp 2 --dp 2 --zero 3"]):
        out = tmp_path / str(i)
        shutil.copytree(one / middle, out / middle)
        said = play(ranks, text, f"--islands 2 {layout} {common} 6 --out {out} --resume")
        assert all(code == 0 for code, _ in said)
        same_tensors(whole(out / end), expected)
    shutil.rmtree(one / end)
    for islands_now, steps in ((3, 5), (1, 6), (2, 8)):
        flags = f"{common} {steps}" if islands_now > 1 else f"--prove 0 --keep 0 --steps {steps}"
        said = play(ranks, text, f"--islands {islands_now} {flags} --out {one} --resume")
        assert [row["step"] for row in said[0][1]["steps"]][-1] == steps
        after = whole(one / checkpoint.name_of(steps))
        assert ("head.norm.weight", f"island {islands_now - 1} weight") in after or islands_now == 1
        if islands_now == 3:
            # The third began with the old weights, and its optimizer with zeros
            counts = [after["head.norm.weight", f"island {i} step"].item() for i in (1, 2)]
            assert counts == [5, 1]
            for (name, kind), tensor in after.items():
                assert not kind.endswith("weight") or tensor.equal(after[name, "outer old"])


def test_a_signal_to_any_rank_saves_all_islands(tmp_path, text):
    flags = f"{SMALL} --data {text} --device cpu --islands 2 --sync-every 400 --steps 4000"
    flags = flags.replace("--quiet", "") + f" --prove 0 --out {tmp_path}/out"
    run = Script(tmp_path, "train", flags.split())
    os.kill(run.wait_for("step    3")[1], signal.SIGTERM)
    assert run.end() == 0, run.output()
    assert "stopped by SIGTERM" in run.output()
    index = checkpoint.newest_index(tmp_path / "out")
    assert "island 1 weight" in index["tensors"]["head.norm.weight"]


@pytest.mark.parametrize(
    "flags, words",
    [
        *(
            (f"--islands 2 --{flag}", f"--{flag.split()[0]} is gone")
            for flag in ("island 0", "meet HOST:1", "secret-file S", "island-timeout 5")
        ),
        ("--sync-every 3", "means nothing without --islands"),
        ("--islands 2 --batch 5", "use 4"),
        ("--islands 2 --between 1Gbit/s", "without --dry-run"),
        ("--islands 2 --stream 60", "--sync-every 60 or more"),
        ("--islands 2 --only-sample --out x", "leave --islands out"),
        ("--islands 2 --experts 2 --bias-rate 0.1", "nobody averages"),
        ("--islands 2 --record x", "leave it out"),
    ],
)
def test_refused(flags, words, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["train.py", *flags.split()])
    with pytest.raises(harness.Refused) as refused:
        train.main()
    assert words in str(refused.value)
