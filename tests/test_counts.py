"""What a receipt counts and judges, although no number of the training depends on it: overlap,
deferral, the schedule's waits. Each planted bug leaves the proof as it is."""

import sys

import pytest
import torch

import muon
import proof
from receipts import pipeline as schedules

SMALL = "--layers 4 --heads 2 --width 8 --context 8 --batch 8 --steps 2 --dtype float64 --quiet"


def owners_wait():
    muon.Muon._arrived = lambda self, bucket, p: None


CASES = [
    (muon, "", owners_wait, "0 of 19 buckets started during backward"),
]


@pytest.mark.parametrize("technique, flags, bug, words", CASES, ids=[c[2].__name__ for c in CASES])
def test_what_is_only_late_or_lost_fails(ranks, text, monkeypatch, technique, flags, bug, words):
    """Two ranks each, forked, because a receipt is of ranks; without the bug it holds."""
    given = []
    monkeypatch.setattr(proof, "launch", lambda demo, args, **_: given.append(args))
    monkeypatch.setattr(sys, "argv", ["demo", *f"{SMALL} {flags} --data {text}".split()])
    technique.main()
    [args] = given

    def work(rank, plant):
        schedules.find_schedule.cache_clear()  # schedules that tests before this one have made
        plant()
        run = proof.Run(args, rank, 2, torch.device("cpu"))
        return technique.demo(run), getattr(run, "result", None)

    for plant, code in ((lambda: None, 0), (bug, 1)):
        (found, result), (other, _) = ranks(2, work, plant)
        assert found == other == code, result["counts"]
    assert max((result["max_error"] or {"none": 0}).values()) < 1e-10
    assert [row["ok"] for row in result["counts"]].count(False) == 1
    [line] = [row["text"] for row in result["counts"] if not row["ok"]]
    assert words in line and "differs on rank" in line and "expected" in line
