"""Every flag of every script can be given behind torchrun, whose own parser reads all arguments."""

import argparse
import importlib

import pytest
from test_house import TECHNIQUES
from torch.distributed.run import get_args_parser

WITHOUT_TORCHRUN = {"--help", "--nproc"}  # how many processes to start where torchrun starts none

SCRIPTS = [*TECHNIQUES, "train"]


def flags_of(script, monkeypatch):
    """The flags that a script's main() knows."""

    class Caught(Exception):
        pass

    def catch(parser, *_):
        raise Caught(parser)

    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", catch)
    with pytest.raises(Caught) as caught:
        importlib.import_module(script).main()
    monkeypatch.undo()
    [parser] = caught.value.args
    return [
        flag
        for action in parser._actions
        for flag in action.option_strings
        if flag.startswith("--")
    ]


@pytest.mark.parametrize("script", SCRIPTS)
def test_torchrun_lets_every_flag_through(script, monkeypatch):
    for flag in set(flags_of(script, monkeypatch)) - WITHOUT_TORCHRUN:
        given = get_args_parser().parse_args(["--nproc_per_node=2", f"{script}.py", flag, "1"])
        assert given.training_script_args == [flag, "1"], flag


def test_one_vocabulary(monkeypatch):
    """What every script has, it has under the same name."""
    flags = [set(flags_of(script, monkeypatch)) for script in SCRIPTS]
    assert set.intersection(*flags) >= {"--json", "--quiet", "--device", "--backend", "--nproc"}
    # Torchrun takes these for abbreviations of its own
    assert not set.union(*flags) & {"--log", "--node"}
