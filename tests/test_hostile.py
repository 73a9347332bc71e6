"""Whatever a flag is given, a script refuses it in one sentence or would start; and a run survives
what it can't write."""

import argparse
import importlib
import io
import os
import sys

import pytest

import harness
from harness import start

TOP = ["collectives", "ddp", "zero", "tensor_parallel", "sequence_parallel"]
TOP += ["pipeline", "context_parallel", "expert_parallel", "train"]
BENCHMARKS = ["collectives", "context", "experts", "one_curve", "pictures", "pipeline"]
BENCHMARKS += ["published", "table", "vs_torch", "gpu"]
SCRIPTS = TOP + [f"benchmarks.{name}" for name in BENCHMARKS]

NUMBERS = ["0", "-1", "1", "3", "1e308", "nan", "inf", "1" + "0" * 18, "1" + "0" * 30, "9" * 5000]
TEXTS = ["/dev/full", "PIPE", "FOLDER", "x" * 5000, "FOLDER/" + "ä" * 127, "ä∞", "\udcff", "="]
VALUES = ["", *NUMBERS, *TEXTS]


class Ended(BaseException):
    """Where a process would begin to work."""


def end(*_, **__):
    raise Ended


def parser_of(main, monkeypatch):
    """The parser that a script's main() makes."""
    parsers = []

    def catch(parser, *_):
        parsers.append(parser)
        end()

    with monkeypatch.context() as patch:
        patch.setattr(harness.Parser, "parse_args", catch)
        with pytest.raises(Ended):
            main()
    return parsers[0]


@pytest.fixture
def nothing_starts(monkeypatch, tmp_path):
    """Scripts go as far as their checks: no rank, no other process, no simulation, no picture."""
    from harness import long_context, network, schedules, zero_bytes
    from trainer import planner

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(start, "one_rank", end)
    monkeypatch.setattr(start, "start_ranks", end)
    monkeypatch.setattr(os, "fork", lambda: pytest.fail("forked"))
    monkeypatch.setattr("subprocess.Popen", end)
    monkeypatch.setattr(planner, "play_all", end)
    monkeypatch.setattr(planner, "candidates", lambda *_: [])
    monkeypatch.setattr(planner, "no_layout", lambda *_: "no layout")
    monkeypatch.setattr(zero_bytes, "fit", end)
    monkeypatch.setattr(schedules, "simulate", end)
    monkeypatch.setattr(long_context, "plot", end)
    monkeypatch.setattr(network, "predict", end)
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "pipe")


def tries(name, parser):
    """The command lines to try: every flag with every value, alone."""
    yield []
    if "--device" in parser._option_string_actions:
        yield ["--device=cpu"]
    for action in parser._actions:
        if action.dest == "help":
            continue
        flag = action.option_strings[-1]
        if action.nargs == 0:
            yield [flag]
            continue
        for value in VALUES:
            yield [f"{flag}={value}"]
    for flag in ("--plan", "--dry-run", "--compare", "--fit"):
        if flag in parser._option_string_actions:
            for size in ("--batch", "--layers", "--width", "--microbatches", "--nproc", "--seed"):
                for value in ("0", "3", "1" + "0" * 9, "1" + "0" * 18):
                    yield [flag, size, value]


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_flag_is_refused_in_one_sentence(name, nothing_starts, monkeypatch, text):
    """In this process, up to the point where ranks would start: some thousand command lines."""
    module = importlib.import_module(name)
    monkeypatch.setattr(sys, "argv", [f"{name}.py"])
    parser = parser_of(module.main, monkeypatch)
    if "--preset" in parser._option_string_actions:
        # Made once: a parser of a hundred flags takes longer than all that follows
        monkeypatch.setattr(harness, "parser", lambda *_, **__: parser)
        if hasattr(module, "flags"):
            monkeypatch.setattr(module, "flags", lambda: parser)
        container = argparse._ActionsContainer
        monkeypatch.setattr(container, "add_argument", lambda *_, **__: None)
        monkeypatch.setattr(container, "add_argument_group", lambda self, *_: self)
    if "--data" in parser._option_string_actions:
        parser.set_defaults(data=text)  # a short one
    problems, ends = [], {"started": 0, "refused": 0}
    for words in tries(name, parser):
        words = [w.replace("PIPE", "pipe").replace("FOLDER", "folder") for w in words]
        monkeypatch.setattr(sys, "argv", [f"{name}.py", *words])
        errors, line = io.StringIO(), " ".join(words)[:100]
        monkeypatch.setattr(sys, "stderr", errors)
        monkeypatch.setattr(sys, "stdout", io.StringIO())
        try:
            code = module.main() or 0
        except harness.Refused as e:
            code = e.code
            print(e, file=sys.stderr)
            ends["refused"] += 1
        except Ended:
            code = 0
            ends["started"] += 1
        except Exception as e:
            problems.append(f"{line}: {type(e).__name__}: {str(e)[:200]}")
            continue
        finally:
            said = errors.getvalue()
            monkeypatch.setattr(sys, "stderr", sys.__stderr__)
        sentences = [line for line in said.splitlines() if "starting" not in line]
        if code not in (0, 2) or len(sentences) > (code == 2):
            problems.append(f"{line}: exit code {code}, {said[:300]!r}")
    assert not problems, "\n" + "\n".join(problems)
    assert all(ends.values()), ends
