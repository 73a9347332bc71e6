"""Every flag of every script can be given behind torchrun, whose own parser reads all arguments."""

import argparse
import importlib
import sys

import pytest
from torch.distributed.run import get_args_parser

WITHOUT_TORCHRUN = {"--help", "--nproc"}  # how many processes to start where torchrun starts none

SCRIPTS = ["train"]


def parser_of(script, monkeypatch):
    """The parser that a script's main() makes."""

    class Caught(Exception):
        pass

    def catch(parser, *_):
        raise Caught(parser)

    with monkeypatch.context() as patch:
        patch.setattr(argparse.ArgumentParser, "parse_args", catch)
        with pytest.raises(Caught) as caught:
            importlib.import_module(script).main()
    [parser] = caught.value.args
    return parser


def flags_of(script, monkeypatch):
    """The flags that a script knows."""
    flags = parser_of(script, monkeypatch)._option_string_actions
    return {flag for flag in flags if flag.startswith("--")}


@pytest.mark.parametrize("script", SCRIPTS)
def test_torchrun_lets_every_flag_through(script, monkeypatch):
    for flag in flags_of(script, monkeypatch) - WITHOUT_TORCHRUN:
        given = get_args_parser().parse_args(["--nproc_per_node=2", f"{script}.py", flag, "1"])
        assert given.training_script_args == [flag, "1"], flag


@pytest.mark.parametrize("script", SCRIPTS)
def test_help_fits_two_screens(script, monkeypatch):
    """-h shows the usual flags, --help-all all."""
    usual = parser_of(script, monkeypatch).format_help()
    monkeypatch.setattr(sys, "argv", [script, "--help-all"])
    everything = parser_of(script, monkeypatch).format_help()
    assert usual.count("\n") < 110 and "--help-all" in usual
    assert "--batch" in usual and "--timeout" not in usual and "--timeout" in everything


def test_one_vocabulary(monkeypatch):
    """What every script has, it has under the same name."""
    flags = [flags_of(script, monkeypatch) for script in SCRIPTS]
    assert set.intersection(*flags) >= {"--json", "--quiet", "--device", "--backend", "--nproc"}
    # Torchrun takes these for abbreviations of its own
    assert not set.union(*flags) & {"--log", "--node"}
