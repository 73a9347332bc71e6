"""Runs micro-batches through this rank's stages of the model: those of a step, a validation or a
sample. A rank takes the rows of its replica, and of each row the positions that --cp gives it."""

import contextlib
import functools

import torch.distributed as dist

import context_parallel
import dualpipe
import harness
import pipeline
import receipts.train
from harness import documents
from model import IGNORE
from trainer import layout


class Runner:
    """run: the flags, device, data and log of this process. groups, model, optimizer, turns: those
    of train.py's `mesh`, `build` and `data_parallel`."""

    def __init__(self, run, schedule, groups, model, turns, optimizer):
        self.run, self.schedule, self.groups, self.model = run, schedule, groups, model
        self.turns, self.optimizer = turns, optimizer
        # Which part of the batches is this rank's: islands have batches of their own
        island = run.rank // (run.world // run.args.islands)
        self.replica = island * run.args.dp + dist.get_rank(groups["dp"]) // run.args.cp
        # Made once: a copy to the device makes the host wait
        self.positions = self.positions_of(run.config.context)
        self.expert_rows = receipts.train.ExpertRows(run, model, turns)

    def batches(self, step, **options):
        """This replica's micro-batches of a step: (tokens, targets, samples) of whole sequences."""
        return self.run.microbatches(step, self.replica, self.run.args.dp, **options)

    def expected(self):
        """(layout, sent, held, notes) of a step's receipt, by the formulas."""
        return receipts.train.of_run(self, context_parallel.used_keys)

    def forward_only(self, batches, target_count):
        schedule = pipeline.forward_only(self.schedule, len(batches))
        return self.run_pipeline(schedule, batches, target_count)

    def run_pipeline(self, schedule, batches, target_count):
        """Run the batches through all stages. Returns for each, on the last stage's rank, a loss,
        or logits (b, T, V) without targets; [] elsewhere. target_count: what divides the sum of the
        losses."""
        run, args = self.run, self.run.args
        rows, length = batches[0][0].shape
        starts = [documents.starts_of(tokens, args) for tokens, _, _ in batches]
        held = [self.positions] * len(batches)
        if args.documents or length != run.config.context:  # they depend on the text; a sample
            held = [self.positions_of(length, of_batch) for of_batch in starts]

        def forward(stage, m, x):
            tokens, targets, samples = batches[m]
            positions = held[m]
            position_ids = positions.clamp(max=length - 1)  # padding must have some position
            if x is None:  # the first stage: this rank's part of each sequence
                x = context_parallel.shard_sequence(tokens, positions)
            if targets is not None:
                targets = context_parallel.shard_sequence(targets, positions, IGNORE)
            return self.model[stage](x, position_ids, targets, target_count, samples, starts[m])

        # Shape and dtype of a message between stages
        tokens_held = len(held[0]) // args.tp if args.sp else len(held[0])
        shape, dtype = (rows, tokens_held, run.config.width), harness.DTYPES[args.param_dtype]
        links = self.groups["down"] + self.groups["up"]
        make = pipeline.Pipeline
        if isinstance(schedule, dualpipe.PairedSchedule):
            make = functools.partial(dualpipe.DualPipe, turns=self.turns)
        return make(schedule, forward, shape, dtype, run.device, links, around=self.around).run()

    def positions_of(self, length, starts=None):
        """The positions (T/cp,) that this rank holds of a sequence, padding at the end. starts: of
        its documents, if they are kept apart."""
        rank = dist.get_rank(self.groups["cp"])
        return layout.positions(self.run.args, length, rank, starts).to(self.run.device)

    @contextlib.contextmanager
    def around(self, action):
        """Around an action of the pipeline: a dry run times it, ZeRO must know its stage."""
        scope = getattr(self.optimizer, "around", contextlib.nullcontext)
        with self.run.watch(action), scope(action):
            yield
