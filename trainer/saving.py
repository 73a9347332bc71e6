"""The checkpoints of a run: its flags, when one is written, and how a run goes on from one.
checkpoint.py has the format."""

import dataclasses
import fcntl
import os
import signal
import time

import torch
import torch.distributed as dist

import harness
from harness import Refused, outputs, say
from harness.joining import agent_store
from trainer import checkpoint, hf_config

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
    why = "go on from the newest whole checkpoint in --out, whatever layout wrote it (torchrun's "
    g.add_argument("--resume", action="store_true", help=f"{why}restarts do so by themselves)")


def check(args):
    """Refuse, before hours of training, a folder that can't be written after them, or whose
    checkpoints would be mixed up."""
    if (args.save_every or args.resume) and not args.out:
        raise Refused("--save-every and --resume need --out, the folder of the checkpoints")
    if not args.out or args.only_sample:
        return
    outputs.check_folder("--out", args.out)
    # torchrun may have started this process again: only the ranks together can tell
    if "TORCHELASTIC_RUN_ID" not in os.environ and used(args):
        raise Refused(used(args))


def used(args):
    """A sentence, if a run that begins anew has checkpoints in --out; else None."""
    steps = [checkpoint.step_of(name) for name in checkpoint.checkpoints_in(args.out)]
    if args.resume or steps.count(None) == len(steps):
        return None
    advice = "--resume goes on from the newest, or give another folder"
    return f"--out {args.out} has checkpoints: {advice}"


def lock(folder, patience):
    """Keep a second run out of --out while this process is alive, however it ends. Returns the
    locked file, or None if another run has the lock for `patience` seconds: the rank 0 that
    torchrun replaces may need some to end."""
    file, deadline = open(os.path.join(folder, ".lock"), "a"), time.monotonic() + patience
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return file
        except BlockingIOError:
            if time.monotonic() > deadline:
                return None
            time.sleep(0.1)
        except OSError:  # a file system without locks
            return file


def shape_of(args):
    """The fields of model.Config of a run that began with --init-from, from its newest checkpoint:
    --resume and --only-sample then need no --init-from. None for any other run."""
    if not args.out or not (args.resume or args.only_sample):
        return None
    shape = checkpoint.newest_index(args.out).get("shape")
    if not shape:
        return None
    scaling = shape.get("rope_scaling")
    return shape | {"rope_scaling": scaling and hf_config.RopeScaling(**scaling)}


class Saver:
    """The checkpoints of one run. Without --out it does nothing.

    first_step() before the first step; save_if_due(step) between two steps, which says whether to
    stop; the steps stand within `with saver:`, where a signal does not end the process."""

    def __init__(self, run, model, optimizer, scale, averaging):
        """scale: a LossScale. averaging: what trainer/islands.py adds to a checkpoint."""
        self.run, self.model, self.optimizer, self.args = run, model, optimizer, run.args
        self.scale, self.averaging, self.lock = scale, averaging, None
        self.interrupted = 0.0  # when Ctrl-C came
        self.signal_received, self.asked = 0, []  # asked: questions whether any rank received one
        self.stopped = False  # whether a signal has ended the run

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

    def first_step(self):
        """The step to begin with: 0, that of a checkpoint to go on from, or --steps where none is
        left, as with --only-sample."""
        first = self.resume()
        self.averaging.go_on(first)
        return self.args.steps if self.args.only_sample else first

    def resume(self):
        """With --resume, or started again by torchrun, go on from the newest whole checkpoint in
        --out. Returns its step, or 0."""
        args, run = self.args, self.run
        if not args.out:
            return 0
        restarted = not args.only_sample and self.claim()
        if not (args.resume or restarted or args.only_sample):
            return 0
        path, index, passed = checkpoint.newest(args.out, self.header(), FREE)
        passed = f" (passed over {'; '.join(passed)})" if passed else ""
        if path is None:
            what = f"no whole checkpoint in {args.out}"
            if args.only_sample and not args.init_from:
                raise Refused(f"--only-sample: there is {what}{passed}; give another --out")
            run.print(f"{what}, starting from the beginning{passed}")
            return 0
        finished = index["step"] >= args.steps
        if finished and not args.only_sample and not restarted:
            advice = "--only-sample shows its text; more steps go on, at a longer run's rates"
            raise Refused(f"{path} has all of --steps {args.steps}: {advice}")
        training = not (finished or args.only_sample)
        checkpoint.load(path, index, self.pieces(index, training))
        self.scale.restore(index.get("loss_scale"))
        # ZeRO: the weights follow the masters that were just filled
        if hasattr(self.optimizer, "update_weights"):
            self.optimizer.update_weights()
        compared = ": from here on nothing is compared with one process" if training else ""
        run.print(f"resumed from {path}{compared}{passed}")
        return index["step"]

    def claim(self):
        """Lock --out. Returns whether an earlier attempt of this run had it, before torchrun
        started the ranks again: then its checkpoints are this run's own."""
        args, run = self.args, self.run
        problem, restarted = None, False
        if run.rank == 0:
            self.lock = lock(args.out, patience=min(10.0, args.timeout / 2))
            store, key = agent_store(), f"began {os.path.abspath(args.out)}"
            restarted = store.add(key, 0) > 0
            if self.lock is None:
                problem = f"another run writes to --out {args.out}: end it, or give another folder"
            elif not restarted:
                problem = used(args)
            if not problem:
                store.add(key, 1)
        run.agree(problem)
        return run.any(restarted)

    def __enter__(self):
        if self.args.out:
            self.run.also_read.append(self.signal_of_any_rank)
        # Preemption sends SIGTERM, and soon SIGKILL; a terminal that closes, SIGHUP; Ctrl-C, SIGINT
        for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT) if self.args.out else ():
            if signal.getsignal(number) != signal.SIG_IGN:  # as under nohup
                signal.signal(number, self.receive)
        return self

    def receive(self, number, frame):
        """End the run after this step. A second Ctrl-C ends it at once; within a second it is the
        first one, which the launcher passes on to the ranks that have it from the terminal."""
        now = time.monotonic()
        if number == signal.SIGINT and not self.signal_received:
            self.interrupted = now
            if self.run.rank == 0:
                say("saving after this step; Ctrl-C again, a second later, ends the run at once")
        elif number == signal.SIGINT and now - self.interrupted > 1:
            signal.default_int_handler(number, frame)
        self.signal_received = number

    def save_if_due(self, step):
        """Between two steps: write a checkpoint if it is time. Returns whether a rank received a
        signal, which ends the run.

        A checkpoint that can't be written does not end the run, unless it is the last: the disk may
        have room for the next."""
        args = self.args
        if not args.out:
            return False
        stop = int(self.run.numbers[-1])  # signal_of_any_rank's, read with the step's loss
        last = stop or step == args.steps
        if last or args.save_every and step % args.save_every == 0:
            try:
                self.save(step)
            except Refused as e:
                if last:
                    raise
                if self.run.rank == 0:
                    say(f"{e}; the run goes on")
            self.run.restart_clock()
        if stop:
            how = f"stopped by {signal.Signals(stop).name}: step {step} is saved in {args.out}"
            self.run.print(f"{how}, --resume goes on from it")
            self.stopped = True
        return self.stopped

    def save(self, step):
        config = dataclasses.asdict(self.run.config)
        header = self.header() | {"shape": {name: config[name] for name in self.args.shape or ()}}
        if self.scale.enabled:
            header["loss_scale"] = self.scale.state()
        pieces, out, keep = self.pieces(), self.args.out, self.args.keep
        checkpoint.write_checkpoint(out, step, header, pieces, keep)

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

    def __exit__(self, *error):
        if self.lock:
            self.lock.close()
