"""The flags that every script shares, and checks that refuse contradictory sizes."""

import argparse
import contextlib
import math
import string
import sys
from dataclasses import fields

import torch

from harness import presets, tokens
from harness.families import FamilyConfig
from harness.files import short
from harness.refusal import Refused, refusing

DTYPES = {name: getattr(torch, name) for name in ("float64", "float32", "bfloat16")}

# What a newcomer sets. A lesson's own flags are usual, too. The last line is train.py's
USUAL = "help help_all preset layers width context experts steps batch microbatches optimizer lr "
USUAL += "dtype data tokenizer nproc json dp tp pp cp ep sp zero schedule out resume sample "
USUAL += "init_from export dry_run plan gpus gpu islands"


class Parser(argparse.ArgumentParser):
    """Refuses bad flags in one sentence. Its help shows the docstring unwrapped, and defaults."""

    class Formatter(argparse.RawDescriptionHelpFormatter):
        def _get_help_string(self, action):
            hidden = action.default in (None, argparse.SUPPRESS) or action.default is False
            if hidden or "default" in action.help:
                return action.help
            return action.help + " (default: %(default)r)"

    def __init__(self, doc):
        options = {"allow_abbrev": False, "conflict_handler": "resolve"}
        super().__init__(description=doc, usage="%(prog)s [flags]", **options)
        self.formatter_class = lambda prog: self.Formatter(prog, max_help_position=28, width=120)
        self.add_argument("--help-all", action="help", help="show all flags and exit")

    def hide_rare(self):
        """Have -h show only the usual ones of the flags that there are by now."""
        for action in self._actions:
            if action.dest not in USUAL.split() and "--help-all" not in sys.argv:
                action.help = argparse.SUPPRESS

    def error(self, message):
        raise Refused(f"{short(message, 400)} (-h lists the usual flags, --help-all all)")

    def parse_args(self, args=None, namespace=None):
        """The flags. Refuses an empty text, as of an unset shell variable; but not a prompt."""
        args = super().parse_args(args, namespace)
        for name, value in vars(args).items():
            if value == "" and name != "prompt":
                raise Refused(f"{flag_of(name)} is empty: give it a value, or leave it out")
        return args


def flag_of(name):
    """The flag whose value is args.name."""
    return "--" + name.replace("_", "-")


def count(least, most=10**8):
    """An argument type: a whole number of at least `least`, and at most `most`."""
    return real(least, most, int, "whole number")


def real(least, most=math.inf, convert=float, kind="number"):
    """An argument type: a finite number of at least `least`, and at most `most`."""

    def parse(text):
        with contextlib.suppress(ValueError):
            value = convert(text)
            if least <= value <= most and value < math.inf:
                return value
        limits = f"at least {least}" + (f" and at most {most:,.0f}" if most < math.inf else "")
        raise argparse.ArgumentTypeError(f"{short(text)!r} is not a {kind} of {limits}")

    return parse


# Units that `quantity` accepts
SPEED = {"B/s": 1, "KB/s": 1e3, "MB/s": 1e6, "GB/s": 1e9}


def quantity(units, example):
    """An argument type: a number followed by one of the units, such as "25MB"."""

    def convert(text):
        number = text.rstrip("/" + string.ascii_letters)
        return float(number) * units.get(text[len(number) :], math.nan)

    return real(1, math.inf, convert, f"number with its unit, such as {example},")


def dtype(text):
    """An argument type: a name of DTYPES."""
    if text == "float16":
        instead = "use bfloat16, or float32 on GPUs without it"
        raise argparse.ArgumentTypeError(f"float16 would need a loss scale: {instead}")
    return text


DTYPE = dict(type=dtype, choices=list(DTYPES))
POSITIVE = dict(type=count(1), metavar="N")
NATURAL = dict(type=count(0), metavar="N")
FACTOR = dict(type=real(0), metavar="X")
MEGABYTES = dict(type=real(0, 1e12), metavar="MB")


def parser(doc, **defaults):
    """A parser with the flags that every script has. `defaults` replaces some of their defaults."""
    p = Parser(doc)
    model_flags(p.add_argument_group("the model"))
    training_flags(p.add_argument_group("training"))
    data_flags(p.add_argument_group("data"))
    running_flags(p.add_argument_group("running"))
    for action in p._actions:
        if defaults.get(action.dest) is not None:  # the help then shows the new default
            action.help = action.help.split(" (default:")[0]
    p.set_defaults(**defaults)
    p.hide_rare()
    return p


def model_flags(g):
    g.add_argument("--preset", default="tiny", help="named size: " + ", ".join(presets.PRESETS))
    families = ["gpt2", "llama"]
    g.add_argument("--family", choices=families, help="turn the preset into this one")
    for name, kind, why in [
        ("layers", count(1, 10**5), "number of blocks"),
        ("heads", count(1), "attention heads in a layer"),
        ("kv-heads", count(1), "key/value heads; fewer than heads is grouped-query attention"),
        ("width", count(1), "size of the residual stream"),
        ("hidden", count(1), "inner size of the MLP, or of each expert"),
        ("context", count(1), "tokens in a sequence"),
        ("vocab", count(1), "size of the vocabulary, at least the tokenizer's"),
        ("experts", count(0), "experts in place of the MLP; 0 is a plain MLP"),
        ("top-k", count(0), "experts that a token is sent to"),
        ("shared", count(0), "size, in experts, of an MLP that every token passes as well"),
    ]:
        g.add_argument(f"--{name}", type=kind, metavar="N", help=f"{why} (default: the preset's)")
    why = "factor of the loss that balances the experts' load; without it a few get all tokens"
    g.add_argument("--balance-loss", **FACTOR, help=f"{why} (default: 0)")
    why = "factor of the router's z-loss, which keeps its logits small (default: 0)"
    g.add_argument("--z-loss", **FACTOR, help=why)
    g.add_argument("--dropout", **FACTOR, default=0.0, help="on embedding and residual stream")


def training_flags(g):
    g.add_argument("--steps", **POSITIVE, default=10, help="optimizer steps")
    g.add_argument("--batch", **POSITIVE, default=16, help="sequences a step, over all ranks")
    why = "pieces of a rank's batch, run one after the other to hold fewer activations"
    g.add_argument("--microbatches", **POSITIVE, default=2, help=why)
    why = "of weights, batches and dropout"
    g.add_argument("--seed", type=int, default=1, metavar="N", help=why)
    why = "sgd shows a gradient of the wrong scale, adamw hides it"
    g.add_argument("--optimizer", choices=["adamw", "sgd"], default="adamw", help=why)
    rate = dict(type=real(0, 1), metavar="X")  # with more float32 diverges, on any layout
    g.add_argument("--lr", **rate, default=1e-3, help="learning rate after warm-up")
    g.add_argument("--warmup", **NATURAL, default=0, help="steps over which --lr rises")
    g.add_argument("--weight-decay", **rate, default=0.1, help="of matrices alone")
    g.add_argument("--grad-clip", **FACTOR, default=1.0, help="largest gradient norm; 0 is off")
    why = "type of all tensors; bfloat16 loses small updates (see --param-dtype)"
    g.add_argument("--dtype", **DTYPE, default="float32", help=why)
    why = "compare the first N steps with one process (default: 10, or all steps in float64)"
    g.add_argument("--prove", **NATURAL, help=why)


def data_flags(g):
    why = "a text file, a folder, a pattern, or stdlib; or ready-made tokens, .bin or .npy"
    g.add_argument("--data", default="stdlib", metavar="PATH", help=why)
    why = "bytes; gpt2, downloaded once; a folder with a tokenizer.json; none: ready-made tokens "
    why += "(default: bytes; with --init-from the model's own)"
    g.add_argument("--tokenizer", default="bytes", metavar="NAME", help=why)


def running_flags(g):
    why = "processes to start if torchrun started none (default: 4; train.py: the layout's)"
    g.add_argument("--nproc", **POSITIVE, help=why)
    devices = dict(choices=["auto", "cpu", "cuda"], default="auto")
    g.add_argument("--device", **devices, help="auto: GPUs if there are any")
    why = "default: nccl on GPUs, else gloo; gloo ranks may share a GPU"
    g.add_argument("--backend", choices=["gloo", "nccl"], help=why)
    # At most 11 days: clocks in milliseconds overflow at 25
    seconds = dict(type=real(0.1, 1e6), default=600, metavar="SECONDS")
    why = "how long ranks wait for a silent rank; then the run ends and names it"
    g.add_argument("--timeout", **seconds, help=why)
    g.add_argument("--json", metavar="FILE", help="write the receipt as JSON")
    why = "steps between two printed lines, after the first ten (default: 10 at a terminal, else 1)"
    g.add_argument("--log-every", **POSITIVE, help=why)
    g.add_argument("--quiet", action="store_true", help="print nothing but errors")


def configure(args):
    """The model's FamilyConfig from the flags. Refuses sizes that contradict each other.
    args.shape, if there is one: the fields of a trained model, of which flags may override context
    and vocab."""
    overrides = {field.name: getattr(args, field.name, None) for field in fields(FamilyConfig)}
    for name, value in (getattr(args, "shape", None) or {}).items():
        wanted = overrides.get(name)
        if wanted is None:
            overrides[name] = value
        elif wanted != value and name not in ("context", "vocab"):
            raise Refused(f"{flag_of(name)} {wanted} is not the model's {value}: leave it out")
    needed_vocab = tokens.vocabulary(args.tokenizer or "bytes")
    if overrides["vocab"] is None and "vocab" not in presets.PRESETS.get(args.preset, {}):
        overrides["vocab"] = needed_vocab
    with refusing():
        config = presets.configure(args.preset, args.family, **overrides)
    if config.layers > 10**5:  # of a config.json
        raise Refused(f"{config.layers:,} layers are too many: use at most 100,000")
    if config.vocab < needed_vocab:
        problem = f"a vocabulary of {config.vocab} is too small for --tokenizer {args.tokenizer}"
        advice = f"give --vocab {needed_vocab}, or one with fewer tokens"
        raise Refused(f"{problem}, which has {needed_vocab} tokens: {advice}")
    if args.tokenizer == "none" and config.vocab == needed_vocab:
        raise Refused("--tokenizer none needs --vocab, the number of tokens that there are")
    return config


def check_batch(args, parts):
    """Refuse a batch that does not divide into micro-batches on `parts` data-parallel ranks."""
    pieces = parts * args.microbatches
    if args.batch % pieces:
        where = f"{parts} data-parallel ranks x {args.microbatches} micro-batches"
        fits = pieces * max(1, round(args.batch / pieces))
        raise Refused(f"--batch {args.batch} does not divide by {where}: --batch could be {fits}")
