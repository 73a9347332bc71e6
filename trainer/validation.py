"""The validation loss, over batches of the text's held-out end."""

import torch

import harness
from harness import say


def add_flags(parser):
    g = parser.add_argument_group("validation")
    why = "steps between validations; 0 = only at the end"
    g.add_argument("--eval-every", **harness.NATURAL, default=100, help=why)
    why = "global batches that a validation takes"
    g.add_argument("--eval-batches", **harness.POSITIVE, default=4, help=why)


def due(args, step):
    """Whether a validation follows this step, counted from 0: the last one always."""
    done, every = step + 1, args.eval_every
    return done == args.steps or every > 0 and done % every == 0


@torch.no_grad()
def validate(runner):
    """The mean loss over --eval-batches global batches, on every rank. runner: train.py's."""
    run, groups = runner.run, runner.groups
    loss, pieces = run.zero(), run.args.eval_batches
    for i in range(pieces):
        batches = [(x, y, None) for x, y, _ in runner.batches(i, split="val")]  # no dropout
        loss = sum(runner.forward_only(batches, run.target_count * pieces), loss)
    harness.sum_over([groups["dp"], groups["pp"]], loss)
    run.print(f"validation loss {loss:.4f}")
    if not loss.isfinite():
        run.code = 1
        if run.rank == 0:
            say(f"the validation loss is {loss:g}: the run goes on, and its exit code is 1")
    run.restart_clock()
    return loss.item()
