"""A run: one rank's view of a script. The flags, the text, the model's weights, and the bookkeeping
of the steps.

A demo is a function of a `Run`, which `launch` calls on every rank. The training loop is the demo's
own. It calls:

    for step in run.steps(optimizer):               sets the learning rate; the ledger watches the second step; the proof
        ...                                         forward, backward, sum of the gradients, norm
        run.check(loss, norm, model.named)          stops at a number that is not finite; keeps gradients for the proof
        ...                                         clip, optimizer.step()
        run.log(loss, norm)                         a line, and a row of the history
"""

import argparse
import contextlib
import hashlib
import math
import time
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import _disable_current_modes

import model as gpt
from harness import data, proof, start, zero_bytes
from harness.flags import DTYPES, check_files, configure
from harness.ledger import Ledger, storage_bytes
from harness.optimizer import learning_rate
from harness.placement import placement, take
from harness.receipt import write_receipt
from harness.start import Refused, say


def launch(demo, args, needed=None, check=lambda world: None, run=None):
    """Call demo(Run) on every rank, and end the process with its exit code (see start.py).

    needed: the number of ranks that the layout takes, None for any. check(number of ranks) may
    refuse it. run(args, rank, world, device) makes what demo is given; by default it is a Run."""

    def ready(world):
        check(world)
        check_files(args)

    start.on_ranks(lambda *rank: demo((run or Run)(args, *rank)), args, needed, ready)


class Rank(NamedTuple):
    """What the demo of a script without training is given on each rank."""

    args: argparse.Namespace
    rank: int
    world: int
    device: torch.device


class Run:
    """One rank's view of a script's run: the flags, its rank, the text, and the bookkeeping of the
    steps."""

    def __init__(self, args, rank, world, device):
        self.args, self.rank, self.world, self.device = args, rank, world, device
        self.dtype, self.config = DTYPES[args.dtype], configure(args)
        # Decides how much rounding to expect
        self.precision = getattr(args, "param_dtype", None) or args.dtype
        # Flags in which ranks may differ
        private = ("data", "json", "log_to", "quiet", "wandb", "nproc")
        flags = {name: value for name, value in sorted(vars(args).items()) if name not in private}
        self.same(repr(flags), "other flags", "start every node with the same command")
        self.load()
        # Valid targets of the global batch: every window is full
        self.count = args.batch * self.config.context
        self.history, self.errors, self.held = [], None, {}
        self.first = 0  # the step to begin with: another one after a checkpoint
        self.skipped = 0  # steps whose gradient was not finite
        self.draw = gpt.draw
        self.ledger = Ledger({"world": dist.group.WORLD})
        self.watching = contextlib.ExitStack()

    def load(self):
        """Read the text. Refuses to go on where a rank can't, or has another one."""
        problem = None
        try:
            self.corpus = data.load(self.args.data, self.args.tokenizer)
            self.corpus.split("train", self.config.context)
        except data.DataError as e:
            problem = str(e)
        self.agree(problem)
        advice = "give every node the same --data (stdlib differs between Python versions, shakespeare does not)"
        self.same(self.corpus.digest, "another text", advice)

    # --- ranks

    def agree(self, problem):
        """Go on only if no rank has a problem (a sentence, or None); else the first rank that has
        one says it."""
        first = torch.tensor(self.world if problem is None else self.rank, device=self.device)
        dist.all_reduce(first, op=dist.ReduceOp.MIN)
        if first.item() < self.world:
            raise Refused(problem or "another rank refused", speaker=first.item())

    def any(self, flag):
        """Whether `flag` is set on any rank."""
        flag = torch.tensor(int(bool(flag)), device=self.device)
        dist.all_reduce(flag, op=dist.ReduceOp.MAX)
        return bool(flag)

    def same(self, value, what, advice):
        """Refuse to go on where `value`, a text, is not the same on all ranks: compares a digest of
        it."""
        digest = int(hashlib.sha256(value.encode()).hexdigest()[:15], 16)
        own = torch.tensor([digest], device=self.device)
        digests = [torch.empty_like(own) for _ in range(self.world)]
        dist.all_gather(digests, own)
        other = [rank for rank in range(self.world) if digests[rank].item() != digests[0].item()]
        if other:
            raise Refused(f"rank {other[0]} has {what} than rank 0: {advice}")

    def print(self, *args, **kwargs):
        if self.rank == 0 and not self.args.quiet:
            print(*args, **kwargs, flush=True)

    def groups(self, **groups):
        """Name the process groups, for the ledger."""
        self.ledger = Ledger(groups | {"world": dist.group.WORLD})

    # --- the model

    def meta_model(self):
        """The whole GPT without memory, to be cut and then filled."""
        with torch.device("meta"):
            return gpt.GPT(self.config)

    def fill(self, model):
        """Give a model built on the meta device its weights: each parameter is drawn whole, and
        this rank keeps its piece."""
        return gpt.fill(model, self.args.seed, self.device, self.dtype, take, self.draw)

    def initial(self, model):
        """A function that gives a parameter of `model` its initial value: for ZeRO, which fills it
        piece by piece."""
        gpt.fill_buffers(model, self.device)
        names = {p: name for name, p in model.named()}

        def value(p):
            whole = self.draw(names[p], placement(p)["shape"], p.init, self.args.seed)
            return take(whole, p).to(self.device, self.dtype)

        return value

    # --- steps

    def microbatches(self, step, part=0, parts=1, pieces=None, split="train"):
        """This rank's rows of the step's global batch, in micro-batches: a list of (tokens,
        targets, samples)."""
        size = self.args.batch // parts
        rows = range(part * size, (part + 1) * size)
        batch = self.corpus.batch(step, rows, self.config.context, self.args.seed, split)
        pieces = pieces or self.args.microbatches
        return list(zip(*(t.to(self.device).tensor_split(pieces) for t in batch)))

    def zero(self):
        """Where a step's loss is summed: in float64, so that the sum is not the least exact
        part."""
        return torch.zeros((), dtype=torch.float64, device=self.device)

    def steps(self, optimizer):
        """The numbers of the steps. Sets the learning rate before each, lets the ledger watch the
        second, and holds the run against one process after the last that is to be proven."""
        self.restart_clock()
        for self.step in range(self.first, self.args.steps):
            self.lr = learning_rate(self.step, self.args)
            for group in optimizer.param_groups:
                group["lr"] = self.lr
            measured = self.step == self.measured
            if measured:
                self.ledger.watch([t for kind in lasting(optimizer).values() for t in kind])
                self.watching.enter_context(self.ledger)
            yield self.step
            if measured:
                self.held = {
                    kind: storage_bytes(tensors) for kind, tensors in lasting(optimizer).items()
                }
                self.held["activations_peak"] = self.ledger.peak
            if self.step + 1 == self.proven:
                self.errors, self.proved = proof.compare(self, *self.compared), self.proven
                self.restart_clock()

    def check(self, loss, norm, named, counts=True, blame=None):
        """Look at a step's loss and gradient norm before the optimizer uses them. Returns whether
        the step may be taken.

        loss, norm: scalar tensors, the same on all ranks. A number that is not finite ends the run
        in a sentence, or with --skip-nan leaves the step out. named(): (full name, parameter) pairs
        whose .grad is complete; the proof reads them.
        counts=False: this rank's gradients are not the global ones (a parameter server's worker).
        blame(): (name, place) of the parameter on this rank to blame, or (None, ""). By default the
        gradients are searched.
        """
        if self.step + 1 == self.proven:  # before clipping
            with _disable_current_modes():  # the ledger must not count the proof's messages
                self.gradients = {name: p.grad.clone() for name, p in named() if p.grad is not None}
            self.compared = named, counts
        if math.isfinite(loss.item()) and math.isfinite(norm.item()):
            return True
        self.watching.close()
        self.stumble(loss.item(), norm.item(), named, blame)
        return False

    def stumble(self, loss, norm, named, blame):
        """Name the first gradient, in the order of backward, that is not finite. Skip the step, or
        end the run."""
        with torch.device("meta"):
            order = [
                name for name, _ in gpt.GPT(self.config).named_parameters(remove_duplicate=False)
            ]
        bad = [name for name, p in named() if p.grad is not None and not p.grad.isfinite().all()]
        name, place = blame() if blame else (bad[-1] if bad else None, "")
        found = torch.full((self.world,), -1, device=self.device)
        found[self.rank] = order.index(name) if name else -1
        dist.all_reduce(found, op=dist.ReduceOp.MAX)
        speaker = (found == found.max()).nonzero()[0].item()
        text = f"step {self.step + 1} has loss {loss:g}, gradient norm {norm:g}; "
        if found.max() < 0:
            text += "played again it was finite on all ranks"
        else:
            text += f"the first gradient that is no finite number is of {name}, on rank {self.rank}{place}"
        self.skipped += 1
        allowed = getattr(self.args, "skip_nan", 0)
        if self.skipped > allowed:
            advice = "a lower --lr may help"
            if not allowed:
                advice += ", or --skip-nan N to leave such steps out"
            raise Refused(
                f"{text}: the weights stay those of step {self.step}; {advice}", speaker, code=1
            )
        if self.rank == speaker:
            say(f"{text}: skipped")
        self.history.append(
            {
                "step": self.step + 1,
                "loss": None,
                "grad_norm": None,
                "lr": None,
                "tokens_per_s": None,
            }
        )
        self.restart_clock()

    def log(self, loss, norm, mfu=None):
        """End a step: a line, and a row of the history. mfu(tokens/s), where given, is shown
        too."""
        self.watching.close()
        now = time.perf_counter()
        rate, self.last = self.count / (now - self.last), now
        row = {
            "step": self.step + 1,
            "loss": loss.item(),
            "grad_norm": norm.item(),
            "lr": self.lr,
            "tokens_per_s": rate,
        }
        line = f"step {self.step + 1:4d}  loss {row['loss']:.4f}  grad norm {row['grad_norm']:7.4f}  lr {self.lr:.2e}"
        line += f"  {rate:8,.0f} tokens/s"
        if mfu:
            row["mfu"] = mfu(rate)
            line += f"  MFU {row['mfu']:.1%}"
        self.history.append(row)
        self.print(line)

    def restart_clock(self):
        """What lies between two steps and is no training does not count for tokens/s."""
        self.last = time.perf_counter()

    @property
    def measured(self):
        """The step that the ledger watches: the second, or an only one."""
        return min(self.first + 1, self.args.steps - 1)

    @property
    def proven(self):
        """How many steps are held against one process. By default ten in float32, where rounding
        grows: AdamW takes full steps along gradients that are little but rounding. None after a
        checkpoint or a skipped step: one process would differ."""
        if self.first > 0 or self.skipped:
            return 0
        wanted = self.args.prove
        if wanted is None:
            wanted = self.args.steps if self.args.dtype == "float64" else 10
        return min(wanted, self.args.steps)

    # --- the receipt

    def states(self, size, formula, steps=True):
        """Rows of the receipt's `held`: parameters of `size` bytes, gradients as large, and the
        optimizer's moments.

        formula: as text. steps=False: on a rank that takes no step and so has no moments."""
        moments = 2 if self.args.optimizer == "adamw" and steps else 0
        held = {"parameters": (size, formula), "gradients": (size, "the same")}
        return held | {"optimizer": (moments * size, f"{moments} x the same")}

    def receipt(self, layout, sent=(), held=(), notes=()):
        """Gather, print and write the receipt, and keep it as `result`. Returns the exit code. See
        receipt.py."""
        code, self.result = write_receipt(self, layout, dict(sent), dict(held), notes)
        return code


def lasting(optimizer):
    """{kind: tensors} of what outlives a step: parameters, their gradients, optimizer states. ZeRO
    keeps them in buckets."""
    if hasattr(optimizer, "buckets"):
        return zero_bytes.lasting(optimizer)
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    states = [t for state in optimizer.state.values() for t in state.values() if torch.is_tensor(t)]
    return {
        "parameters": parameters,
        "gradients": [p.grad for p in parameters if p.grad is not None],
        "optimizer": [t for t in states if t.dim()],
    }
