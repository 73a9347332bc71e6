"""diloco.py's demo: each setting against one process that plays all islands. The exercises show
that this proof catches bugs. The ranks are launched because the exit code is what counts."""

import json

import pytest
import torch
from conftest import Script

import diloco
from benchmarks import slow_links
from receipts import diloco as islands

SMALL = (
    "--layers 1 --heads 2 --width 16 --context 8 --batch 12 --dtype float64 --quiet --device cpu"
)
DATA_PARALLEL = "--sync-every 1 --optimizer sgd --lr 0.3 --outer-lr 1 --outer-momentum 0"
DATA_PARALLEL += " --grad-clip 0 --steps 3"


def receipt(tmp_path, flags, text):
    """(exit code, receipt) of the demo."""
    path = tmp_path / "receipt.json"
    given = f"{SMALL} {flags} --data {text} --json {path}".split()
    return Script(tmp_path, "diloco", given).end(), json.loads(path.read_text())


@pytest.mark.parametrize(
    "flags",
    [
        f"--nproc 3 {DATA_PARALLEL}",
        "--nproc 3 --sync-every 4 --stream 3 --stream-delay 2 --outer-bits 4 --steps 10",
        "--nproc 2 --sync-every 3 --stream-delay 2 --outer-bits 16 --steps 7 --dropout 0.2",
    ],
)
def test_is_what_one_process_plays(tmp_path, text, flags):
    code, said = receipt(tmp_path, flags, text)
    assert code == 0 and said["ok"], said
    assert set(said["max_error"]) == {"loss", "grad_norm", "grad", "param"}
    [row] = said["sent"]
    assert row["op"] == "all_gather" and row["wire_bytes"] == row["formula_bytes"] > 0


# --- messages


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("bits", [None, 16, 8, 4])
def test_messages_mean_what_the_player_says(dtype, bits):
    torch.manual_seed(0)
    for length in (1, 128, 129, 1000):
        x = torch.randn(length, dtype=dtype) ** 5
        message = diloco.encode(x, bits)
        assert torch.equal(diloco.decode(message, bits, x), islands.rounded(x, bits))
        size = islands.message_bytes(length, bits, x.element_size())
        assert len(diloco.header(7, x)) + len(message) == size
        spoilt = diloco.encode(torch.full_like(x, torch.nan), bits)
        assert diloco.decode(spoilt, bits, x).isnan().all()  # for all to see


def test_parts_are_consecutive_and_even():
    parameters = [torch.nn.Parameter(torch.zeros(n)) for n in (5, 30, 30, 5, 40, 10, 0, 1)]
    for parts in range(1, 9):
        lists = diloco.consecutive(parameters, parts)
        assert [p for part in lists for p in part] == parameters
        assert len(lists) <= parts and all(lists)
    sizes = [sum(p.numel() for p in part) for part in diloco.consecutive(parameters, 2)]
    assert sizes == [65, 56]


def test_the_price_of_islands_is_measured(monkeypatch, text):
    """benchmarks/slow_links.py, in this process: with one step between averages of data-parallel
    islands its curve is that of one process."""
    flags = "--steps 4 --layers 1 --width 16 --heads 2 --context 8 --batch 4"
    flags += f" --data {text} --dtype float64 --optimizer sgd --grad-clip 0"
    monkeypatch.setattr(slow_links, "EVERY", 2)
    monkeypatch.setattr(slow_links, "BATCHES", 1)
    parser = slow_links.flags()
    args = parser.parse_args(flags.split())
    settings = "--islands 1", "--sync-every 1 --outer-lr 1 --outer-momentum 0"
    settings += ("--sync-every 2 --stream 2 --outer-bits 4",)
    runs = [slow_links.settled(parser, args, words) for words in settings]
    alone, both, rare = (slow_links.curve(flags, 1) for flags in runs)
    assert [tokens for tokens, _ in rare] == [64, 128]
    for (_, loss), (_, other), (_, third) in zip(alone, both, rare):
        assert abs(loss - other) < 1e-10 < abs(loss - third)


def test_messages_of_few_bits_in_float32(script):
    """A number that rounding moves across a border of the grid is a whole step of it apart."""
    small = "--nproc 2 --layers 1 --width 16 --heads 2 --context 8 --batch 4 --steps 4"
    code, said = script("diloco", f"{small} --sync-every 2 --outer-bits 4")
    assert code == 0 and "tolerance 1e-01" in said and "proven" in said
