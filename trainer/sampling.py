"""A sample of a model that is being trained, drawn from the whole layout's logits."""

import torch
import torch.distributed as dist

import harness
from harness import Refused, data, documents, tokens


def add_flags(parser):
    g = parser.add_argument_group("a sample")
    why = "tokens to generate at the end, up to the first that ends a text; 0 = none"
    g.add_argument("--sample", **harness.NATURAL, default=200, help=why)
    why = "train nothing: a sample of the newest whole checkpoint in --out, or of --init-from, "
    g.add_argument("--only-sample", action="store_true", help=f"{why}whatever layout wrote it")
    why = "what the sample starts with (default: a line's end; of Python's library, def)"
    g.add_argument("--prompt", help=why)
    why = "of the sample: lower is safer, higher more varied"
    g.add_argument("--temperature", type=harness.real(0), default=0.8, metavar="X", help=why)


def check(args):
    if args.prompt is None:
        args.prompt = "\ndef " if args.data == "stdlib" and not args.init_from else "\n"
    if args.only_sample and not (args.sample and (args.out or args.init_from)):
        weights = "from --out with a checkpoint or from --init-from"
        raise Refused(f"--only-sample needs weights, {weights}, and a --sample above 0")
    if args.sample and args.tokenizer not in ("bytes", "gpt2"):
        encoding = tokens.of(args.tokenizer)
        try:
            prompt = encoding.encode_ordinary(args.prompt)
        except (TypeError, ValueError) as e:  # bytes that are no text
            raise Refused(f"--prompt can't be read as text ({e}): give another") from e
        if not prompt and encoding.start is None:
            raise Refused(f"{args.tokenizer} has no token that begins a text: give a --prompt")


def show(runner):
    """Print a sample, if --sample asks for one. runner: train.py's."""
    if runner.run.args.sample:
        runner.run.print(f"\nsample:\n{generate(runner, runner.run.args.sample)}")


@torch.no_grad()
def generate(runner, length):
    """At most `length` tokens after --prompt, as text: a token that ends a text ends the sample.
    Token i is drawn with a hash of (seed, i), so every layout draws alike. runner: train.py's."""
    run, groups, schedule = runner.run, runner.groups, runner.schedule
    args, encoding = run.args, run.corpus.encoding
    sample = encoding.encode_ordinary(args.prompt) or [encoding.start]
    for i in range(length):
        window = torch.tensor([sample[-run.config.context :]], device=run.device)
        logits = logits_after(runner, window)
        token = torch.zeros(1, dtype=torch.int64, device=run.device)
        if logits is not None:
            logits = logits[: encoding.n_vocab].double() / max(args.temperature, 1e-6)
            chance = data.hash64(args.seed, i) / 2**64
            cumulated = logits.softmax(0).cumsum(0)
            token = torch.searchsorted(cumulated, chance * cumulated[-1:])
            token = token.clamp(max=len(cumulated) - 1)
        dist.all_reduce(token, group=groups["cp"])  # the other ranks of the group add zero
        dist.broadcast(token, group=groups["pp"], group_src=schedule.owner[schedule.last])
        if token.item() in encoding.stops:
            break
        sample.append(token.item())
    return encoding.decode(sample)


def logits_after(runner, window):
    """The logits (V,) after the tokens (1, T), where the last stage and token are; else None."""
    results = runner.forward_only([(window, None, None)], None)
    held = runner.positions_of(window.shape[1], documents.starts_of(window, runner.run.args))
    last = (held == window.shape[1] - 1).nonzero().flatten()
    if not results or not len(last):
        return None
    logits = results[0][0, last[0]]
    if runner.run.args.tp > 1:  # a rank has V/t of them
        parts = [torch.empty_like(logits) for _ in range(runner.run.args.tp)]
        dist.all_gather(parts, logits, group=runner.groups["tp"])
        logits = torch.cat(parts)[: runner.run.config.vocab]
    return logits
