"""A run: the bookkeeping of one rank's steps, and their proof.

`launch` calls train.py's `train` on every rank, with a `Run`. It has the training loop, and calls

    for step in run.steps(optimizer):           sets the learning rate, measures step 2, proves
        ...                                     forward, backward, sum of the gradients, norm
        run.check(loss, norm, model.named)      stops at NaN; keeps gradients for the proof
        ...                                     clip, optimizer.step()
        run.log()                               prints a line, adds a row to the history
    return run.receipt(layout, sent, held)      prints the receipt; returns the exit code
"""

import contextlib
import datetime
import functools
import itertools
import math
import statistics
import sys
import time

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import _disable_current_modes

from harness import rank, start
from harness.optimizer import learning_rate
from harness.refusal import Refused, say
from proof import diagnosis, one_process
from proof.ledger import Ledger, lasting, storage_bytes
from proof.receipt import write_receipt
from proof.tolerance import TOLERANCE


class Run(rank.TrainingRank):
    """What one rank knows of its steps.

    history   a dict for each step
    numbers   the latest loss, norm, and what `also_read` adds: read once a step, together
    measured  the step that the ledger counts: the second that is taken, or the last
    held      {kind: bytes} after it
    notes     of the compared steps: see diagnosis.Notes
    proof     one_process.Proof, once the compared steps are over
    result    the receipt, once it is written
    """

    make_ledger = Ledger

    def __init__(self, args, rank, world, device, corpus=None):
        super().__init__(args, rank, world, device, corpus)
        self.history, self.held, self.proof = [], {}, None
        self.notes = diagnosis.Notes()
        self.first = 0  # the first step; not 0 after a checkpoint
        self.measured = min(1, args.steps - 1)
        self.also_read = []  # functions that return one more scalar tensor for `numbers`
        self.not_finite = 0  # steps that the optimizer did not take
        self.watching = contextlib.ExitStack()

    def groups(self, **groups):
        super().groups(**groups)
        self.ledger = self.make_ledger(groups | {"world": dist.group.WORLD})

    def meta_model(self):
        model = super().meta_model()
        if not getattr(self.args, "compile", False):
            diagnosis.watch(model, self.notes.output)
        return model

    # --- steps

    def steps(self, optimizer, first=0, reference=None):
        """Yield the numbers of the steps, from `first` on, and set the learning rate. The ledger
        watches the second. After the last to prove, compare with the reference."""
        self.first = first
        self.measured = min(first + 1, self.args.steps - 1)
        self.restart_clock()
        for self.step in range(first, self.args.steps):
            self.begin(optimizer)
            yield self.step
            self.end(optimizer)
            if self.step + 1 == self.proven:
                # A step that any rank left out (an island may do so alone) is in no reference
                left_out = any(row["loss"] is None for row in self.history)
                if not any(self.gather(left_out)):
                    reference = reference or one_process.OneProcess()
                    steps = "step 1" if self.proven == 1 else f"steps 1 to {self.proven}"
                    self.print(f"now {steps} on one process, to compare")
                    self.proof = one_process.prove(self, reference, self.notes)
                    self.say_what_follows()
                self.restart_clock()

    def say_what_follows(self):
        """After the compared steps, if more are left: whether they agree."""
        errors, limits = self.proof.errors, TOLERANCE[self.precision]
        text = f"equal, gradients to {errors['grad']:.1e}"
        if any(errors[kind] > limits[kind] for kind in errors):
            text = f"NOT equal: the receipt says where, --steps {self.proven} brings it now"
        if self.proven < self.args.steps:
            self.print(f"{text}; on to step {self.args.steps:,} and the receipt")

    def begin(self, optimizer):
        self.lr = learning_rate(self.step, self.args)
        for group in optimizer.param_groups:
            group["lr"] = self.lr
        if self.step == self.measured:
            self.ledger.watch(itertools.chain(*lasting(optimizer).values()))
            if getattr(self.args, "compile", False):
                # Else what torch.compile meets inside the ledger is never compiled again
                self.watching.enter_context(torch.compiler.set_stance("force_eager"))
            self.watching.enter_context(self.ledger)
            if self.device.type == "cuda":
                torch.cuda.reset_peak_memory_stats(self.device)
        self.notes.begin(self.step < self.proven)

    def end(self, optimizer):
        self.notes.on = False
        self.watching.close()
        if self.step == self.measured:
            tensors_of = lasting(optimizer)
            self.held = {kind: storage_bytes(tensors_of[kind]) for kind in tensors_of}
            self.held["activations_peak"] = self.ledger.peak
            if self.device.type == "cuda":  # of all tensors, with those that last
                self.held["cuda_peak"] = torch.cuda.max_memory_allocated(self.device)

    def check(self, loss, norm, named, group=None):
        """End the run with a sentence if the loss or the norm is not finite. Call it before
        clipping: the gradients of the last step to prove are kept. The host waits for the device
        here; train.py calls the two halves, and queues the optimizer's step between them.

        loss, norm  scalar tensors, the same on all ranks of the group
        named       named() returns (full name, parameter) pairs whose .grad is complete
        group       the ranks that train one model, if these are not all
        """
        self.start_check(loss, norm, named)
        self.end_check(functools.partial(diagnosis.last_nonfinite, named), group=group)

    def start_check(self, loss, norm, named):
        """Queue a copy of the numbers to the host. Returns a tensor: 1 if the loss or the norm is
        not finite, else 0."""
        self.notes.on = False
        with _disable_current_modes():  # the ledger must not count the proof's messages
            if self.step in (0, self.proven - 1) and self.proven:
                self.notes.gradients_of(named)
            more = [make() for make in self.also_read]
        numbers = torch.stack([loss, norm, *more])
        self.copy = numbers.to("cpu", non_blocking=True)  # into pinned memory
        if self.device.type == "cuda":
            self.copied = torch.cuda.current_stream().record_event()
        return 1 - numbers[:2].isfinite().all().float()

    def end_check(self, blame, group=None):
        """Wait for the numbers. Returns whether the step counts; --skip-nan leaves some out.

        blame       blame() returns (name, place) of the first parameter on this rank whose gradient
                    is not finite, or (None, "")
        """
        if self.device.type == "cuda":
            self.copied.synchronize()  # what was queued later may still run
        self.numbers = loss, norm, *_ = self.copy.tolist()
        if math.isfinite(loss) and math.isfinite(norm):
            return True
        self.watching.close()
        self.skip_or_stop(loss, norm, blame, group)
        self.leave_out()
        return False

    def skip_or_stop(self, loss, norm, blame, group):
        """Say which gradient is not finite. End the run, if it may skip no more steps."""
        speaker, sentence = diagnosis.first_nonfinite(self, blame, group)
        text = f"step {self.step + 1} has loss {loss:g}, gradient norm {norm:g}; {sentence}"
        self.not_finite += 1
        allowed = getattr(self.args, "skip_nan", 0)
        if self.not_finite > allowed:
            advice = "a lower --lr may help"
            if not allowed and hasattr(self.args, "skip_nan"):  # train.py has that flag
                advice += ", or --skip-nan N to leave such steps out"
            text += f": the weights stay those of step {self.step}; {advice}"
            raise Refused(text, speaker, code=1, alone=dist.get_world_size(group) == 1 < self.world)
        if self.rank == speaker:
            say(f"{text}: skipped")

    def leave_out(self):
        """End a step that the optimizer does not take."""
        if self.step <= self.measured:
            self.measured = min(self.measured + 1, self.args.steps - 1)
        row = {"step": self.step + 1} | dict.fromkeys(("loss", "grad_norm", "lr", "tokens_per_s"))
        self.history.append(row)
        self.restart_clock()

    def log(self, mfu=None):
        """End a step: print the loss and the norm, which check() has read, and add a row to the
        history. Shows mfu(tokens/s) too, if mfu is given."""
        self.watching.close()
        rate = self.target_count / (time.perf_counter() - self.last)
        self.restart_clock()
        loss, norm, *_ = self.numbers
        row = {"step": self.step + 1, "loss": loss, "grad_norm": norm, "lr": self.lr}
        row["tokens_per_s"] = rate
        if mfu:
            row["mfu"] = mfu(rate)
        self.history.append(row)
        self.show(row)

    def show(self, row):
        """Print a step's line: of the first ten steps, of the last, and of each --log-every-th
        between. tokens/s is the mean of the last ten steps, without the run's first, which is
        slow."""
        step, steps, terminal = row["step"], self.args.steps, sys.stdout.isatty()
        every = self.args.log_every or (10 if terminal else 1)
        if step % every and step < steps and step > self.first + 10:
            return
        rows = self.history[1:][-10:] or self.history
        rate = statistics.harmonic_mean(row["tokens_per_s"] for row in rows if row["tokens_per_s"])
        line = f"step {step:4d}  loss {row['loss']:.4f}  grad norm {row['grad_norm']:7.4f}"
        line += f"  lr {row['lr']:.2e}  {rate:8,.0f} tokens/s"
        if "mfu" in row:
            line += f"  MFU {row['mfu']:.1%}"
        if terminal and step < steps:
            left = datetime.timedelta(seconds=round((steps - step) * self.target_count / rate))
            line += f"  {left} left"
        self.print(line)

    def restart_clock(self):
        """Start the time of a step anew: work between two steps does not count for tokens/s."""
        self.last = time.perf_counter()

    @property
    def proven(self):
        """How many steps are compared with one process: --prove, by default all in float64, or 10.
        In float32 rounding grows, because AdamW takes full steps along gradients that are only
        rounding. After a checkpoint it is 0: one process would begin with the first step."""
        if self.first > 0:
            return 0
        wanted = self.args.prove
        if wanted is None:
            wanted = self.args.steps if self.args.dtype == "float64" else 10
        return min(wanted, self.args.steps)

    # --- the receipt

    def receipt(self, layout, sent={}, held={}, notes=(), role=None):
        """Print and write the receipt, and keep it as `result`. Returns the exit code. The
        arguments are those of `write_receipt`."""
        counted = self.ledger.sent, self.held
        if self.history and self.history[-1]["loss"] is None and self.step == self.measured:
            sent, held, counted = {}, {}, ({}, {})
            notes = ["not measured: too few steps were taken"]
        code, self.result = write_receipt(self, layout, counted, sent, held, notes, role)
        return code


launch = functools.partial(start.launch, make=Run)
