"""train.py --islands: layouts against one process that plays all islands, checkpoints, refusals."""

import math
import os
import shutil
import signal

import pytest
import torch.distributed as dist
from conftest import Script
from test_checkpoint import same_tensors, whole
from test_layouts import run_layout

import diloco
import proof
import train
from trainer import checkpoint, islands

# A clip of 0.1 always binds; the constant rate depends on no --steps
SMALL = "--layers 2 --heads 4 --width 16 --context 8 --batch 12 --dtype float64 --grad-clip 0.1"
SMALL += " --lr 0.01 --min-lr 0.01 --warmup 0 --sample 0 --eval-batches 1 --quiet --timeout 60"
SGD = "--optimizer sgd --lr 0.3 --min-lr 0.3"


def play(ranks, text, flags, plant=None):
    """(exit code, receipt) of each rank of a run."""
    args = train.flags().parse_args(f"{SMALL} {flags} --data {text}".split())
    args, _ = train.prepare(islands.settle(args))
    return ranks(args.islands * args.dp * args.cp * args.tp * args.pp, run_layout, args, plant)


LAYOUTS = [
    f"--islands 3 --steps 5 --sync-every 2 {SGD}",
    "--islands 2 --dp 2 --steps 4 --sync-every 3 --dropout 0.1",
    "--islands 3 --sync-every 4 --stream 3 --stream-delay 2 --outer-bits 4 --steps 10",
    # Norms, which tensor-parallel ranks both hold, must be rounded alike
    "--islands 2 --tp 2 --steps 6 --sync-every 4 --stream 2 --stream-delay 1 --outer-bits 16",
    "--islands 2 --dp 2 --tp 2 --sp --zero 1 --steps 5 --sync-every 2 --outer-bits 16 --stream 2",
    f"--islands 2 --pp 2 --dp 2 --zero 1 --steps 4 --sync-every 2 --outer-bits 16 {SGD}",
    "--islands 3 --pp 2 --schedule zb-v --layers 4 --microbatches 2 --steps 5 --sync-every 4 "
    "--stream 4 --stream-delay 3",
    "--islands 2 --dp 2 --cp 2 --zero 3 --steps 5 --sync-every 2 --stream-delay 1 --outer-bits 16",
    "--islands 2 --dp 2 --ep 2 --experts 3 --zero 2 --steps 3 --sync-every 2 --outer-bits 16",
    "--islands 2 --dp 2 --zero 1 --offload --steps 4 --sync-every 2 --outer-bits 16",
    "--islands 2 --dp 2 --tp 2 --optimizer muon --steps 3 --sync-every 2",
]


@pytest.mark.parametrize("flags", LAYOUTS)
def test_any_layout_is_what_one_process_plays(ranks, text, flags):
    for code, said in play(ranks, text, f"{flags} --prove 99"):
        assert code == 0 and said["ok"], said
        assert max(said["max_error"].values()) < 1e-10
        [row] = [row for row in said["sent"] if row["group"] == "islands"]
        assert row["wire_bytes"] == row["formula_bytes"] > 0
        assert (said["held"]["outer_error"]["bytes"] > 0) == ("outer-bits" in flags)


def one_island_stays():
    restart, moves = diloco.Part.restart, dist.get_rank() < 2
    diloco.Part.restart = lambda part, keep: restart(part, keep) if moves else None


def rows_of_another_island():
    """The player asks for its rows with `pieces`."""
    read = proof.Run.microbatches

    def read_the_first(run, step, part=0, parts=1, pieces=None, **options):
        return read(run, step, part if pieces else part % parts, parts, pieces, **options)

    proof.Run.microbatches = read_the_first


def weights_stay_behind_the_masters():
    islands.hasattr = lambda optimizer, name: False


PLANTS = {
    one_island_stays: "--tp 2",
    rows_of_another_island: "--dp 2",
    weights_stay_behind_the_masters: "--dp 2 --zero 1",
}


@pytest.mark.parametrize("plant", PLANTS)
def test_the_receipt_catches(ranks, text, plant):
    flags = f"--islands 2 {PLANTS[plant]} --steps 4 --sync-every 2 --outer-bits 16 --prove 3"
    for code, said in play(ranks, text, flags, plant):
        assert code == 1 and max(said["max_error"].values()) > 1e-10


def one_island_leaves_a_step_out():
    start_check = proof.Run.start_check

    def planted(run, loss, norm, named):
        bad = run.step == run.rank == 1
        return start_check(run, loss * math.nan if bad else loss, norm, named)

    proof.Run.start_check = planted


def test_a_step_that_one_island_leaves_out(ranks, text):
    """The player takes all steps, so nobody is compared with it."""
    flags = "--islands 2 --sync-every 2 --steps 4 --skip-nan 1 --prove 99"
    for code, said in play(ranks, text, flags, one_island_leaves_a_step_out):
        assert code == 0 and said["ok"] and said["max_error"] is None


def test_goes_on_in_the_middle_of_a_round(ranks, text, tmp_path):
    """In other layouts: all weights, states and outer states are those of an undisturbed run. Then
    with more islands, with one, and with two again."""
    common = "--sync-every 3 --outer-bits 16 --prove 0 --keep 0 --save-every 4 --steps"
    one = tmp_path / "one"
    play(ranks, text, f"--islands 2 --dp 2 {common} 6 --out {one}")
    middle, end = checkpoint.name_of(4), checkpoint.name_of(6)
    expected = whole(one / end)
    for layout in ("--tp 2 --zero 1", "--pp 2 --dp 2 --zero 3"):
        out = tmp_path / layout.replace(" ", "")
        shutil.copytree(one / middle, out / middle)
        play(ranks, text, f"--islands 2 {layout} {common} 6 --out {out} --resume")
        same_tensors(whole(out / end), expected)
    shutil.rmtree(one / end)
    play(ranks, text, f"--islands 3 {common} 5 --out {one} --resume")
    after = whole(one / checkpoint.name_of(5))
    # The third began with the old weights, and its optimizer with zeros. At the end all are equal
    assert after["head.norm.weight", "island 1 step"] == 5
    assert after["head.norm.weight", "island 2 step"] == 1
    for (name, kind), tensor in after.items():
        assert not kind.endswith("weight") or tensor.equal(after[name, "outer old"])
    for flags in ("--islands 1 --prove 0 --steps 6", f"--islands 2 {common} 8"):
        play(ranks, text, f"{flags} --out {one} --resume")
    after = whole(one / checkpoint.name_of(8))
    assert after["head.norm.weight", "island 1 step"] == 8


def test_a_signal_to_any_rank_saves_all_islands(tmp_path, text):
    flags = f"{SMALL} --data {text} --islands 2 --steps 4000 --prove 0 --out {tmp_path}/out"
    flags = flags.replace("--quiet", "")
    run = Script(tmp_path, "train", flags.split())
    os.kill(run.wait_for("step    3")[1], signal.SIGTERM)
    assert run.end() == 0 and "stopped by SIGTERM" in run.output()
    [step] = (tmp_path / "out").iterdir()
    index = checkpoint.read_index(step)
    assert "island 1 weight" in index["tensors"]["head.norm.weight"]
