"""The checkpoints of a run: its flags, when one is written, and how a run goes on from one.
checkpoint.py has the format."""

import dataclasses
import math
import os
import signal
import time

import torch
import torch.distributed as dist

import harness
from harness import Refused, check_folder, say, signals
from trainer import checkpoint

# Fields of model.Config that may change from run to run
FREE = ("dropout", "balance_loss", "z_loss", "bias_rate")


def add_flags(parser):
    g = parser.add_argument_group("checkpoints (see trainer/checkpoint.py)")
    why = "where checkpoints go; one is written at the end at least"
    g.add_argument("--out", metavar="FOLDER", help=why)
    why = "steps between checkpoints; 0 = only at the end"
    g.add_argument("--save-every", **harness.NATURAL, default=0, help=why)
    why = "the newest N checkpoints stay; 0 = all"
    g.add_argument("--keep", **harness.NATURAL, default=3, help=why)
    why = "go on from the newest whole checkpoint in --out, whatever layout wrote it; implied "
    g.add_argument("--resume", action="store_true", help=f"{why}by torchrun --max-restarts")
    why = (
        "go back to the checkpoint of step N, in any layout; later ones are kept under other names"
    )
    g.add_argument("--from-step", **harness.POSITIVE, help=why)
    why = "with --resume: go on with other --data than the checkpoint's, and the optimizer's states"
    g.add_argument("--new-data", action="store_true", help=why)


def check(args):
    """Refuse a folder that can't be written, or where checkpoints of two runs would mix."""
    args.resume = args.resume or args.from_step is not None
    if args.new_data and not args.resume:
        raise Refused("--new-data means nothing without --resume: add that, or leave it out")
    if args.from_step is not None and may_restart():
        why = "torchrun --max-restarts would go back again and again"
        raise Refused(f"--from-step: {why}: leave one of them out")
    if (args.save_every or args.resume) and not args.out:
        raise Refused("--save-every and --resume need --out, the folder of the checkpoints")
    if not args.out or args.only_sample:
        return
    check_folder("--out", args.out)
    try:
        steps = [checkpoint.step_of(name) for name in checkpoint.checkpoints_in(args.out)]
    except OSError as e:
        advice = "give another folder"
        raise Refused(f"--out {args.out} can't be listed ({e.strerror}): {advice}") from e
    if any(step is not None for step in steps) and not args.resume and not may_restart():
        advice = "--resume goes on from the newest, or give another folder"
        raise Refused(f"--out {args.out} has checkpoints: {advice}")


def may_restart():
    """Whether torchrun starts the ranks again when one dies. Which attempt this is, nobody knows:
    on a new node torchrun counts from 0. So each goes on from what is in --out."""
    return int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", 0)) > 0


class Saver:
    """The checkpoints of one run. Without --out it does nothing.

    load_newest() before the first step; save_if_due(step) between two steps, which says whether to
    stop. averaging: what trainer/islands.py adds to a checkpoint."""

    def __init__(self, run, model, optimizer, averaging):
        self.run, self.model, self.optimizer, self.args = run, model, optimizer, run.args
        self.averaging = averaging
        self.owned = set()  # names of checkpoints that this run has written or read
        self.left = []  # names of those after --from-step, until the first one is written
        self.signal_received, self.received_at = 0, math.inf
        self.asked = []  # questions whether any rank received a signal

    def header(self):
        """What resuming compares."""
        args, run = self.args, self.run
        found = {"config": dataclasses.asdict(run.config), "tokenizer": run.corpus.encoding.name}
        if not args.only_sample:
            found |= {"text": run.corpus.digest, "optimizer": args.optimizer, "seed": args.seed}
            found["documents"] = args.documents
        return found

    def pieces(self, index=None, training=True):
        """All that a checkpoint has of this rank: weights, optimizer states, and the routers'
        biases. index: of one to read; training: with the optimizer's states."""
        about = self.model.named(), self.optimizer, index if training else None
        found = checkpoint.pieces_of(*about, self.averaging.beside)
        for part in self.model.parts.values():
            for name, bias in part.named_buffers():
                if name.endswith("choice_bias"):
                    shape = tuple(bias.shape)
                    found.append(checkpoint.Piece(name, "buffer", bias, shape, (0,), shape))
        return self.averaging.arrange(found, index)

    def load_newest(self):
        """Load the newest checkpoint, with --resume. Returns the step to begin with: --steps where
        none is left, as with --only-sample. From here on signals end the run after a step."""
        args = self.args
        first = self.resume() if args.out else 0
        self.averaging.go_on(first)
        if args.only_sample:
            return args.steps
        if args.out and first < args.steps:
            self.run.also_read.append(self.signal_of_any_rank)
            # Preemption sends SIGTERM, and soon SIGKILL; Slurm before its limit what one asks for
            signals.handle(self.receive)
        return first

    def resume(self):
        """With --resume, or where torchrun may have started the ranks again, go on from the newest
        whole checkpoint in --out. Returns its step, or 0."""
        args, run = self.args, self.run
        if not (args.resume or args.only_sample or may_restart()):
            return 0
        free = (*FREE, "text") if args.new_data else FREE
        about = self.header(), free, self.owned, args.from_step
        path, index, passed = checkpoint.newest(args.out, *about)
        passed = f" (passed over {'; '.join(passed)})" if passed else ""
        if path is None:
            what = f"no whole checkpoint in {args.out}"
            if args.from_step is not None:
                there = ", ".join(checkpoint.checkpoints_in(args.out)) or "none"
                raise Refused(f"--from-step {args.from_step}: {what} of it{passed}; there: {there}")
            if args.only_sample and not args.init_from:
                raise Refused(f"--only-sample: there is {what}{passed}; give another --out")
            run.print(f"{what}, starting from the beginning{passed}")
            return 0
        finished = index["step"] >= args.steps
        if finished and not args.only_sample and not may_restart():
            advice = "--only-sample shows its text; more steps go on, at a longer run's rates"
            raise Refused(f"{path} has all of --steps {args.steps}: {advice}")
        training = not (finished or args.only_sample)
        checkpoint.load(path, index, self.pieces(index, training))
        # ZeRO: the weights follow the masters that were just filled
        if hasattr(self.optimizer, "update_weights"):
            self.optimizer.update_weights()
        compared = ": from here on nothing is compared with one process" if training else ""
        run.print(f"resumed from {path}{compared}{passed}")
        if args.from_step is not None and training:
            names = checkpoint.checkpoints_in(args.out)
            self.left = [name for name in names if name > checkpoint.name_of(args.from_step)]
            if self.left:
                later = (
                    f"{', '.join(self.left)} are kept: .left- and the time is added to their names"
                )
                run.print(f"{later} when the next checkpoint is written")
        return index["step"]

    def receive(self, number, frame):
        """End the run after this step. A second Ctrl-C ends it at once; within a second it is the
        first one, which the launcher passes on to the ranks that have it from the terminal."""
        now = time.monotonic()
        if number == signal.SIGINT and now - self.received_at > 1:
            signal.default_int_handler(number, frame)
        if not self.signal_received:
            self.received_at = now
            if self.run.rank == 0:
                say("saving after this step; Ctrl-C again, a second later, ends the run at once")
        self.signal_received = number

    def save_if_due(self, step):
        """Between two steps: write a checkpoint if it is time. Returns whether a rank received a
        signal, which ends the run.

        A checkpoint that can't be written does not end the run: the disk may have room for the
        next, and after the last one there is a receipt and an export to write."""
        args, run = self.args, self.run
        if not args.out:
            return False
        stop = int(run.numbers[-1])  # signal_of_any_rank's, read with the step's loss
        last = stop or step == args.steps
        if last or args.save_every and step % args.save_every == 0:
            try:
                about = self.header(), self.pieces(), args.keep, self.owned, self.left
                checkpoint.write_checkpoint(args.out, step, *about)
                self.left = []
            except Refused as e:
                if last:
                    run.code = e.code
                if run.rank == 0:
                    say(e if last else f"{e}; the run goes on")
            run.restart_clock()
        if stop and not run.code:
            how = f"stopped by {signal.Signals(stop).name}: step {step} is saved in {args.out}"
            run.print(f"{how}, --resume goes on from it")
        return stop > 0

    def signal_of_any_rank(self):
        """The number of a signal that a rank received, or 0, as a tensor. Islands learn of it a
        step later, so that no step waits for a slow link."""
        received = torch.full((), self.signal_received, device=self.run.device)
        if self.run.world == 1:
            return received
        work = dist.all_reduce(received, op=dist.ReduceOp.MAX, async_op=True)
        self.asked.append((work, received))
        if self.args.islands > 1 and len(self.asked) == 1:
            return torch.zeros_like(received)
        work, received = self.asked.pop(0)
        work.wait()
        return received
