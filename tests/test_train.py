"""What train.py does beside training: traces, logs, pictures, samples."""

import json

import pytest
from test_layouts import arguments, run_layout

import harness

SHORT = "--layers 2 --prove 0"


def run(ranks, text, flags):
    args = arguments(text, f"{SHORT} {flags}")
    results = ranks(args.dp * args.cp * args.tp * args.pp, run_layout, args)
    assert {code for code, _ in results} == {0}
    return results[0][1]


def test_traces_of_all_ranks_fit_together(ranks, text, tmp_path):
    folder = tmp_path / "new"
    run(ranks, text, f"--dp 2 --microbatches 3 --profile 2-3 --profile-to {folder}")
    files = [json.loads((folder / f"{name}.json").read_text())["traceEvents"] for name in ("rank0", "rank1", "all")]
    assert files[0] + files[1] == files[2]
    for rank, events in enumerate(files[:2]):
        assert {e["pid"] for e in events} == {rank}
        assert [e["args"]["name"] for e in events if e["name"] == "process_name"] == [f"rank {rank}"]
    spans = [sorted(e["ts"] for e in events if e["name"] == "gloo:all_reduce") for events in files[:2]]
    assert len(spans[0]) == len(spans[1]) > 2
    assert all(abs(a - b) < 1e6 for a, b in zip(*spans))  # microseconds, on one time axis


@pytest.mark.parametrize("flags", ["--profile 2", *(f"--profile {steps} --profile-to x" for steps in ("3-2", "0", "9"))])
def test_profile_is_refused(text, flags):
    with pytest.raises(harness.Refused):
        arguments(text, flags)
