"""The flags that every script shares, and what refuses sizes that contradict each other."""

import argparse
import math

import torch

import model as gpt
from harness.start import Refused

DTYPES = {"float64": torch.float64, "float32": torch.float32, "bfloat16": torch.bfloat16}
VOCAB = {"bytes": 257, "gpt2": 50257}


class Parser(argparse.ArgumentParser):
    """Refuses bad flags in one sentence; its help shows the docstring as it is, and every
    default."""

    class Formatter(argparse.RawDescriptionHelpFormatter):
        def _get_help_string(self, action):
            flag = (
                action.default is None
                or action.default is False
                or action.default == argparse.SUPPRESS
            )
            shown = not flag and "default" not in action.help
            return action.help + " (default: %(default)r)" * shown

    def __init__(self, doc):
        super().__init__(
            description=doc,
            usage="%(prog)s [flags]",
            allow_abbrev=False,
            conflict_handler="resolve",
        )
        self.formatter_class = lambda prog: self.Formatter(prog, max_help_position=28, width=120)

    def error(self, message):
        raise Refused(f"{message} (--help lists the flags)")


def count(least):
    """An argument type: a whole number of at least `least`."""

    def parse(text):
        if not text.isdecimal() or int(text) < least:
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least {least}")
        return int(text)

    return parse


def real(least):
    """An argument type: a finite number of at least `least`."""

    def parse(text):
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not least <= value < math.inf:
            raise argparse.ArgumentTypeError(f"{text!r} is not a number of at least {least}")
        return value

    return parse


# Units of the flags that take a quantity
SIZE = {"B": 1, "KB": 1e3, "MB": 1e6, "GB": 1e9}
TIME = {"s": 1, "ms": 1e-3, "us": 1e-6, "ns": 1e-9}
SPEED = {"B/s": 1, "KB/s": 1e3, "MB/s": 1e6, "GB/s": 1e9}


def quantity(units, example):
    """An argument type: a number with one of the units."""

    def parse(text):
        number = text.rstrip("/numsKMGB")
        try:
            value = float(number) * units[text[len(number) :]]
        except (KeyError, ValueError):
            value = 0
        if not 0 < value < math.inf:
            raise argparse.ArgumentTypeError(
                f"{text!r} is not a number with its unit, such as {example}"
            )
        return value

    return parse


POSITIVE = dict(type=count(1), metavar="N")
NATURAL = dict(type=count(0), metavar="N")


def parser(doc, **defaults):
    """The flags that every script knows; `defaults` replaces some of their defaults."""
    p = Parser(doc)
    g = p.add_argument_group("the model")
    g.add_argument("--preset", default="tiny", help="named size: " + ", ".join(gpt.PRESETS))
    g.add_argument(
        "--family",
        choices=["gpt2", "llama"],
        help="turn the preset into this family (tiny is gpt2)",
    )
    for name, why in {
        "layers": "number of blocks",
        "heads": "attention heads a layer",
        "kv-heads": "key/value heads; fewer than heads is grouped-query attention",
        "width": "size of the residual stream",
        "hidden": "inner size of the MLP, or of each expert",
        "context": "tokens a sequence",
        "vocab": "size of the vocabulary, at least the tokenizer's",
    }.items():
        g.add_argument(f"--{name}", **POSITIVE, help=why + " (default: the preset's)")
    for name, why in {
        "experts": "experts in the MLP's place, 0 = a plain MLP",
        "top-k": "experts a token is sent to",
        "shared": "size, in experts, of an MLP that every token passes as well",
    }.items():
        g.add_argument(f"--{name}", **NATURAL, help=why + " (default: the preset's)")
    g.add_argument(
        "--balance-loss",
        type=real(0),
        metavar="X",
        help="factor of the experts' load balance loss: without it a few get all tokens (default: 0)",
    )
    g.add_argument(
        "--z-loss",
        type=real(0),
        metavar="X",
        help="factor of the router's z-loss, which keeps its scores small (default: 0)",
    )
    g.add_argument(
        "--dropout",
        type=real(0),
        default=0.0,
        metavar="P",
        help="probability, on embedding and residual stream",
    )
    g = p.add_argument_group("training")
    g.add_argument("--steps", **POSITIVE, default=10, help="optimizer steps")
    g.add_argument(
        "--batch", **POSITIVE, default=16, help="sequences in the global batch, over all ranks"
    )
    g.add_argument(
        "--microbatches",
        **POSITIVE,
        default=2,
        help="pieces that a rank works off one by one: activations of one are held at a time",
    )
    g.add_argument(
        "--seed", type=int, default=1, metavar="N", help="of weights, batches and dropout"
    )
    why = "sgd shows a gradient of the wrong scale, adamw hides it"
    g.add_argument("--optimizer", choices=["adamw", "sgd"], default="adamw", help=why)
    g.add_argument(
        "--lr", type=real(0), default=1e-3, metavar="X", help="learning rate after warm-up"
    )
    g.add_argument(
        "--warmup", **NATURAL, default=0, help="steps over which the learning rate rises"
    )
    g.add_argument(
        "--weight-decay",
        type=real(0),
        default=0.1,
        metavar="X",
        help="on matrices, not on biases and norms",
    )
    g.add_argument(
        "--grad-clip",
        type=real(0),
        default=1.0,
        metavar="X",
        help="largest global gradient norm; 0 = off",
    )
    why = "of weights, gradients and activations; bfloat16 alone loses small updates: zero.py and train.py have --param-dtype"
    g.add_argument("--dtype", choices=list(DTYPES), default="float32", help=why)
    g = p.add_argument_group("data")
    g.add_argument(
        "--data",
        default="stdlib",
        metavar="PATH",
        help="a text file, a folder of them, stdlib or shakespeare",
    )
    g.add_argument(
        "--tokenizer",
        choices=["bytes", "gpt2"],
        default="bytes",
        help="gpt2's is downloaded once by tiktoken",
    )
    g = p.add_argument_group("running")
    g.add_argument(
        "--nproc",
        **POSITIVE,
        help="processes to start here when torchrun did not (default: 4; train.py: the layout's)",
    )
    g.add_argument(
        "--device",
        choices=["auto", "cpu", "cuda"],
        default="auto",
        help="auto: GPUs where there are any",
    )
    why = "default: nccl on GPUs, else gloo; gloo ranks may share a GPU"
    g.add_argument("--backend", choices=["gloo", "nccl"], help=why)
    why = "how long ranks wait for one that does not answer before the run ends and names it"
    g.add_argument("--timeout", type=real(0.1), default=600, metavar="SECONDS", help=why)
    why = "compare the first N steps with one process (default: 10, or all of them in float64)"
    g.add_argument("--prove", **NATURAL, help=why)
    g.add_argument("--json", metavar="FILE", help="write the receipt as JSON")
    g.add_argument("--quiet", action="store_true", help="print nothing but errors")
    for action in p._actions:
        if action.dest in defaults:  # the help shows the new one
            action.help = action.help.split(" (default:")[0]
    p.set_defaults(**defaults)
    return p


def configure(args):
    """The model's Config from the flags. Refuses sizes that contradict each other."""
    fields = [
        "layers",
        "heads",
        "kv_heads",
        "width",
        "hidden",
        "context",
        "vocab",
        "experts",
        "top_k",
        "shared",
    ]
    fields += ["balance_loss", "z_loss", "bias_rate"]
    overrides = {name: getattr(args, name, None) for name in fields} | {"dropout": args.dropout}
    need = VOCAB[args.tokenizer]
    if args.vocab is None and "vocab" not in gpt.PRESETS.get(args.preset, {}):
        overrides["vocab"] = need
    for name, value in (getattr(args, "shape", None) or {}).items():  # of a trained model
        if overrides.get(name) not in (None, value) and name not in ("context", "vocab"):
            raise Refused(
                f"--{name.replace('_', '-')} {overrides[name]} is not the model's {value}: leave it out"
            )
        if name not in ("context", "vocab") or getattr(args, name) is None:
            overrides[name] = value
    try:
        config = gpt.configure(args.preset, args.family, **overrides)
    except ValueError as e:
        raise Refused(str(e)) from e
    if config.vocab < need:
        raise Refused(
            f"a vocabulary of {config.vocab} is too small for --tokenizer {args.tokenizer}, which has {need} tokens"
        )
    return config


def check_batch(args, parts):
    """Refuse a batch that does not divide into micro-batches on `parts` data-parallel ranks."""
    each = parts * args.microbatches
    if args.batch % each:
        fits = [str(m) for m in range(1, args.batch + 1) if args.batch % (parts * m) == 0]
        hint = (
            f"--microbatches could be {', '.join(fits)}"
            if fits
            else f"--batch could be {each * max(1, round(args.batch / each))}"
        )
        what = f"{parts} data-parallel ranks x {args.microbatches} micro-batches"
        raise Refused(f"--batch {args.batch} does not divide by {what}: {hint}")


def precision_flags(group):
    """--param-dtype and --reduce-dtype, for scripts with mixed precision."""
    why = "of weights, gradients and activations; the optimizer's copy of the weights stays in --dtype (default: --dtype)"
    group.add_argument("--param-dtype", choices=list(DTYPES), help=why)
    why = "in which gradients are added up over ranks and micro-batches (default: --param-dtype)"
    group.add_argument("--reduce-dtype", choices=list(DTYPES), help=why)


def check_files(args):
    """Refuse, before hours of training, a file that can't be written after them."""
    for name in ("json", "log_to", "trace"):
        path = getattr(args, name, None)
        if path:
            try:
                open(path, "a").close()
            except OSError as e:
                flag = name.replace("_", "-")
                raise Refused(
                    f"--{flag} {path} can't be written ({e.strerror}): give another file"
                ) from e
