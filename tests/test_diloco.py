"""DiLoCo's parts, and messages of few bits. The demo and test_islands.py prove the rest."""

import pytest
import torch

import diloco
from benchmarks import slow_links
from receipts import diloco as islands
from trainer.outer_bits import decode, encode

# --- messages


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("bits", [16, 8, 4])
def test_messages_mean_what_the_player_says(dtype, bits):
    torch.manual_seed(0)
    for length in (1, 128, 129, 1000):
        x = torch.randn(length, dtype=dtype) ** 5
        message = encode(x, bits)
        assert torch.equal(decode(message, bits, x), islands.rounded(x, bits))
        assert len(message) == islands.message_bytes(length, bits, x.element_size())
        spoilt = encode(torch.full_like(x, torch.nan), bits)
        assert decode(spoilt, bits, x).isnan().all()  # for all to see


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
