"""Runs the micro-batches of a step, a validation or a sample through this rank's stages."""

import contextlib
import functools

import torch
import torch.distributed as dist

import dualpipe
import harness
import packed_documents
import pipeline
import receipts.train
import zero_bubble
from context_parallel import shard_sequence
from harness import documents
from model import IGNORE
from trainer import layout
from trainer.faults import first_nonfinite, skip_where
from trainer.split_backward import FullStore


class Runner:
    """This rank's stages, its share of each batch, and the pipeline that plays both."""

    def __init__(self, run, schedule, groups, model, optimizer):
        self.run, self.schedule, self.groups = run, schedule, groups
        self.model, self.optimizer = model, optimizer
        self.record = lambda batches, loss, norm: None  # with --record: trainer/recording.py's
        # Which part of the batches is this rank's: islands have batches of their own
        island = run.rank // (run.world // run.args.islands)
        self.replica = island * run.args.dp + dist.get_rank(groups["dp"]) // run.args.cp
        # Of a sequence on this rank
        self.tokens = layout.padded(run.config.context, run.args) // run.args.cp
        if not run.args.documents:  # made once: a copy to the device makes the host wait
            self.positions = self.positions_of(run.config.context)
        routing = [groups["dp"], groups["tp"]] if run.args.sp else [groups["dp"]]
        self.sum_load = functools.partial(harness.sum_over, routing)  # of all ranks' tokens
        self.expert_rows = receipts.train.ExpertRows(run, model, model.turns)

    def batches(self, step, **options):
        """This replica's micro-batches of a step: (tokens, targets, samples) of whole sequences."""
        return self.run.microbatches(step, self.replica, self.run.args.dp, **options)

    def expected(self):
        """(layout, sent, held, notes) of a step's receipt, by the formulas."""
        return receipts.train.of_run(self, packed_documents.find_plan)

    def check(self, batches, loss, norm):
        """Before gradients are clipped. Has the optimizer skip its next step if loss or norm is not
        finite. Returns a function that waits for both, and returns whether they are. If not, it
        runs the step's passes again, to name the first gradient that is not finite."""
        self.record(batches, loss, norm)
        skip_where(self.run.start_check(loss, norm, self.full_parameters), self.optimizer)
        find_culprit = functools.partial(first_nonfinite, self, batches)
        return functools.partial(self.run.end_check, find_culprit, self.groups.get("island"))

    def full_parameters(self):  # [(full name, whole parameter with .grad)]
        return self.optimizer.gather_full(self.model.named())

    def forward_backward(self, batches):
        """All passes of a step. Returns the loss of this rank's tokens; 0 if it lacks the head."""
        with self.expert_rows:  # counts for the receipt
            losses = self.run_pipeline(self.schedule, batches, self.run.target_count)
        return sum(losses, self.run.zero())

    def forward_only(self, batches, target_count):
        schedule = forwards_of(self.schedule, len(batches))
        return self.run_pipeline(schedule, batches, target_count)

    def run_pipeline(self, schedule, batches, target_count):
        """Returns on the last stage's rank each batch's loss, or without targets logits (b, T, V);
        elsewhere []. target_count divides the sum of the losses."""
        run, args = self.run, self.run.args
        rows, length = batches[0][0].shape
        starts = [documents.starts_of(tokens, args) for tokens, _, _ in batches]
        if args.documents or length != run.config.context:  # they depend on the text; a sample
            held = [self.positions_of(length, of_batch) for of_batch in starts]
        else:
            held = [self.positions] * len(batches)

        def forward(stage, m, x):
            tokens, targets, samples = batches[m]  # of whole sequences, on every stage
            if x is None:  # the first stage. Others get activations of the stage before
                x = shard_sequence(tokens, held[m])
            if targets is not None:
                targets = shard_sequence(targets, held[m], IGNORE)
            positions = held[m].clamp(max=length - 1)  # padding must have some position
            return self.model[stage](x, positions, targets, target_count, samples, starts[m])

        tokens_held = len(held[0]) // args.tp if args.sp else len(held[0])  # in a message
        shape, dtype = (rows, tokens_held, run.config.width), harness.DTYPES[args.param_dtype]
        links = self.groups["down"] + self.groups["up"]
        make, options = zero_bubble.SplitPipeline, dict(around=self.around, make_store=FullStore)
        if isinstance(schedule, dualpipe.PairedSchedule):
            make = functools.partial(dualpipe.DualPipeV, turns=self.model.turns)
        return make(schedule, forward, shape, dtype, run.device, links, **options).run()

    def positions_of(self, length, starts=None):
        """The positions (T/cp,) that this rank holds of a sequence, padding at the end. starts: of
        its documents, if they are kept apart."""
        length, core = layout.padded(length, self.run.args), self.model.core
        documents = () if starts is None else (starts,)
        held = core.positions(length, *documents) if core else torch.arange(length)
        return held.to(self.run.device)

    @contextlib.contextmanager
    def around(self, action):
        """Around an action of the pipeline: a dry run times it, ZeRO must know its stage."""
        scope = getattr(self.optimizer, "around", contextlib.nullcontext)
        with self.run.watch(action), scope(action):
            yield


def forwards_of(schedule, microbatches=float("inf")):
    """The forwards of the first micro-batches of a schedule, for evaluation and sampling. Run it
    under torch.no_grad(): otherwise all graphs stay in memory."""
    rows = []
    for row in schedule.rows:
        rows.append([a for a in row if a.kind == "F" and a.microbatch < microbatches])
    return pipeline.Schedule(rows)
