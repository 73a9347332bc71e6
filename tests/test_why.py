"""The numbers of docs/learn/why.md, and how a described job scales. All in this process."""

import re

import pytest
from conftest import ROOT

from benchmarks import scaling, why
from receipts import formulas

PAGE = (ROOT / "docs" / "learn" / "why.md").read_text()


def printed(module, words, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", [module.__name__, *words.split()])
    module.main()
    return capsys.readouterr().out


@pytest.mark.parametrize("module, words", [(why, ""), (scaling, "--nodes 1,16,128,256")])
def test_the_page_shows_what_its_commands_print(module, words, monkeypatch, capsys):
    command = f"    python -m {module.__name__} {words}".rstrip()
    assert f"{command}\n" in PAGE, "the page must have this command"
    for line in printed(module, words, monkeypatch, capsys).splitlines():
        assert line.strip() in PAGE, line


def test_why_by_hand(monkeypatch, capsys):
    said = printed(why, "", monkeypatch, capsys)
    found = re.findall(r"  ([\d,.]+)(?: [GmyMd].*)?$", said, re.M)  # the last column
    numbers = [float(text.replace(",", "")) for text in found]
    years = 3.14e23 / 28e12 / 365.25 / 86400
    assert years == pytest.approx(355, rel=2e-3)
    expected = [350, 43.75, 2800, 35, years, years * 8766e-6, years * 365.25 / 1024, 14.0625]
    assert numbers == pytest.approx(expected, abs=0.006)


TSM = scaling.Job(4 * 24.3e6, 198e9, 24e6, 8, 6, 50e9, 25e9)


def test_a_job_scales_as_its_messages_let_it():
    job, rate = TSM._replace(size=4), 4e12
    alone = job.total(1, rate)
    steps, compute = 24e6 / 8 / 6, 8 * 198e9 / rate
    # Without messages to speak of (the rounds of one take 10 us to 1 ms) it is ideal
    assert alone == pytest.approx(steps * compute, rel=1e-4)
    assert alone / job.total(256, rate) == pytest.approx(256, rel=1e-3)
    # Messages that take longer than backward, by hand: a ring over 1,536 GPUs at 94% of 1 GB/s,
    # with 2 x 255 steps between nodes and the others inside
    job = TSM._replace(size=1e9, inter=1e9)
    rounds = 8.4e-6 + 2 * 255 * 9.6e-6 + 2 * (1535 - 255) * 3.4e-6
    messages = rounds + formulas.all_reduce_sent(1e9, 1536) / 0.94e9
    step = job.step(256, rate)
    assert step == pytest.approx(compute / 3 + messages) and messages > compute
    slower = alone / job.total(256, rate)
    assert slower == pytest.approx(256 * compute / step, rel=1e-4)


@pytest.mark.parametrize("size, nodes", [(4, 1), (1e8, 1), (4e8, 4), (6e8, 4)])
def test_the_rate_that_a_published_time_implies(size, nodes):
    job = TSM._replace(size=size, inter=5e9)
    seconds = 49.5 * 3600 / nodes
    rate = job.implied_rate(nodes, seconds)
    assert job.total(nodes, rate) == pytest.approx(seconds, rel=1e-9)
