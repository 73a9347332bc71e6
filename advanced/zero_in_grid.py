"""ZeRO and FSDP in a grid of ranks: beside tensor parallelism, experts or a pipeline.

    512 rows, a bucket of their own             tp 0              tp 1
    tensor parallelism: a rank's shard          rows   0 to 255   rows 256 to 511
    ZeRO: what a rank steps on           dp 0   rows   0 to 127   rows 256 to 383
                                         dp 1   rows 128 to 255   rows 384 to 511

ZeRO splits what data-parallel ranks would all hold. In a grid those are the ranks of a column, and
the shards that they hold are the whole model to it. Three things change.

Norm      As in composition.py: each square is divided by the number of ranks that have it. The N
          ranks of a column now have different parts of a gradient, so that number is N times less.
Partial   Gradients that are partial sums over tp are completed after backward, a shard at a time.
Buckets   All of a bucket is summed over the same ranks. Most parameters are summed over a column;
          experts over the ranks with a replica of them, so they get buckets of their own.

Sent      Over a column what zero.py and fsdp.py send, for a rank's shards only: of a model cut over
          t ranks nearly 1/t of the bytes.
HSDP      Where links between nodes are slow: each node has a whole replica, which its ranks split.
          Such a rank sends what ZeRO sends inside its node, and once a step 2 (G-1)/G P/n e bytes
          across, for G nodes of n ranks of a column, and P parameters of e bytes on a rank.
Copy      The tops of zero.py, fsdp.py and composition.py, too.

    torchrun --nproc_per_node=4 -m advanced.zero_in_grid --tp 2
    python -m advanced.zero_in_grid --tp 1 --stage 3 --shard-ranks 2                        (HSDP)

Rajbhandari et al. 2020, arXiv:1910.02054. Zhao et al. 2023 (hybrid sharding), arXiv:2304.11277.
"""

import contextlib

import torch.distributed as dist

from composition import check_data_group, is_within, norm_of_parts, placed
from fsdp import FSDP
from zero import PlainZeRO, ZeRO

# --- the plainest form: PlainZeRO over a column, and the norm


class PlainZeROInGrid(PlainZeRO):
    """The whole idea, with one bucket:

        dp, tp = groups_along(-1, t)    # this rank's column, and its row of t ranks
        split(model, tp)                # yours. It writes p.placement: see composition.py
        zero = PlainZeROInGrid(model, dp, torch.optim.SGD)
        for x, y in batches:            # of this row; target_count counts all rows' targets
            zero.zero_grad()
            (cross_entropy(model(x), y, reduction="sum") / target_count).backward()
            zero.reduce()
            zero.clip(zero.grad_norm([tp]), 1.0)
            zero.step()

    A shard that has no placement counts as whole: no error, but a wrong norm. Call grad_norm once a
    step, because it completes partial sums. Experts need buckets of their own: ComposedZeRO."""

    def grad_norm(self, groups):
        rank, ranks = dist.get_rank(self.group), dist.get_world_size(self.group)
        parts, end = [], -rank * len(self.shard)
        for p in self.parameters:
            start, end = end, end + p.numel()
            part = self.shard.grad[max(start, 0) : max(end, 0)]  # all of p's, a part or nothing
            parts.append((p, part, ranks))
            for group in placed(p, "partial", ()):
                if len(part):  # so it is on all ranks of the group, or on none
                    dist.all_reduce(part, group=group)
        return norm_of_parts(parts, [self.group, *groups], self.shard.device)

    def clip(self, norm, limit):
        self.shard.grad.mul_((limit / (norm + 1e-6)).clamp(max=1.0).to(self.shard.dtype))


# --- the same for ZeRO's buckets, and for FSDP


class InGrid:
    """Added to ZeRO or FSDP, it reads p.placement. ComposedZeRO, below, is ZeRO with it:

    zero = ComposedZeRO(model, dp, 1, torch.optim.AdamW, microbatches=2)
    norm = zero.grad_norm([tp])     # the rest of the loop as with ZeRO"""

    takes_shards = True  # ZeRO alone refuses parameters with a placement

    def kind_of(self, p):  # a bucket's parameters are all summed over the same groups
        data_group = placed(p, "data", self.group)
        check_data_group(p, data_group)
        return *super().kind_of(p), data_group, tuple(placed(p, "partial", ()))

    def make_bucket(self, parameters, **options):
        data_group = placed(parameters[0], "data", self.group)
        return super().make_bucket(parameters, group=data_group, **options)

    def finish(self):
        were_summed = self.state == "summed"
        super().finish()
        if were_summed:  # called again, as by step() after grad_norm()
            return
        # After backward: in it two stages that share a tied matrix would wait for each other
        for bucket in self.trained_buckets:
            for group in placed(bucket.parameters[0], "partial", ()):
                dist.all_reduce(bucket.gradient_shard, group=group)

    def grad_norm(self, groups=(), pipeline_group=None):
        """groups: those of the grid beside ZeRO's own, as [tp]. pipeline_group: the ranks with the
        other stages of a pipeline. Nothing notices if you leave it out, or put it in groups."""
        self.finish()
        parts = []
        for bucket in self.trained_buckets:
            for i, p in enumerate(bucket.parameters):
                parts.append((p, bucket.part_of(i, bucket.gradient_shard), bucket.ranks))
        device = next(self.model.parameters()).device  # a frozen stage has no part
        return norm_of_parts(parts, [self.group, *groups], device, pipeline_group)


# --- HSDP: a whole replica in each node


class HybridSharding:
    """HSDP: each node holds a whole replica of the states, split over its own ranks. So weights are
    gathered inside nodes only. Gradients are summed twice: reduce-scattered inside a node, then
    each shard all-reduced with its replicas on the other nodes. It needs InGrid, whose norm counts
    replicas once.

        node 0    rank 0: shard 0    rank 1: shard 1      node    0 1 | 2 3    (rows of a grid)
        node 1    rank 2: shard 0    rank 3: shard 1      across  0 2 | 1 3    (columns)

    across, node = groups_along(-1, n)          # n ranks in a node
    everyone = dist.group.WORLD
    fsdp = ComposedFSDP(model, everyone, torch.optim.AdamW, hsdp={everyone: (node, across)})

    # with tensor parallelism a node has n t ranks, n of each column
    across, node, _ = groups_along(-1, n, t)
    fsdp = ComposedFSDP(model, dp, torch.optim.AdamW, hsdp={dp: (node, across)})

    hsdp    {group: (node, across)}, for the data-parallel group, and for that of experts, if they
            are to be split inside nodes, too"""

    def __init__(self, model, group, *arguments, hsdp=None, **options):
        self.hsdp = hsdp or {}
        self.replica_sums = []  # on their way
        check_hsdp(self.hsdp, group)
        super().__init__(model, group, *arguments, **options)

    def make_bucket(self, parameters, group, **options):
        node, across = self.hsdp.get(group, (group, None))
        bucket = super().make_bucket(parameters, group=node, **options)
        bucket.replica_group = across
        return bucket

    def shard_is_summed(self, bucket):  # over the node
        if bucket.replica_group is not None and bucket.passes_left == 0:
            options = dict(group=bucket.replica_group, async_op=True)
            self.replica_sums.append(dist.all_reduce(bucket.gradient_shard, **options))

    def finish(self):
        super().finish()
        while self.replica_sums:
            self.replica_sums.pop().wait()


class ComposedZeRO(InGrid, HybridSharding, ZeRO):
    """ZeRO in a grid, with HSDP or without: super() goes from InGrid to HybridSharding to ZeRO.
    With a pipeline the norm is grad_norm([tp], pp). For several stages on a rank see
    ZeROInPipeline."""


class ComposedFSDP(InGrid, HybridSharding, FSDP):
    """FSDP in a grid, as ComposedZeRO."""


# --- only where a rank has several stages of a pipeline, or a backward in two parts


class InPipeline:
    """ZeRO's backward pass fills all buckets. Here it is one stage's, and fills the buckets of that
    stage: SplitPipeline(around=zero.around) says which. pipeline_stages: {stage: its module}."""

    def __init__(self, model, group, *arguments, pipeline_stages=None, **options):
        self.pipeline_stages = pipeline_stages or {None: model}
        self.action = None  # what the pipeline is running
        self.stages_of = dict.fromkeys(model.parameters(), ())  # a tied matrix may have two
        for stage, part in self.pipeline_stages.items():
            for p in part.parameters():
                self.stages_of[p] += (stage,)
        super().__init__(model, group, *arguments, **options)

    @contextlib.contextmanager
    def around(self, action):
        """The pipeline enters it for each action that it runs."""
        self.action = action
        yield
        self.action = None

    def kind_of(self, p):
        return *super().kind_of(p), self.stages_of[p]

    def make_bucket(self, parameters, **options):
        stages = self.stages_of[parameters[0]]  # each has backward passes of its own
        passes = self.microbatches * len(stages)
        bucket = super().make_bucket(parameters, passes=passes, **options)
        bucket.pipeline_stages = stages
        return bucket

    def buckets_of_pass(self):
        buckets = super().buckets_of_pass()
        if self.action is None:
            return buckets
        return [b for b in buckets if self.action.stage in b.pipeline_stages]

    def _reduce_ready(self, anyway=()):
        # zero_bubble.py has backward in two parts: in "I" few weights get a gradient. Wait for "W"
        if self.action is None or self.action.kind != "I":
            super()._reduce_ready(anyway)

    # FSDP only: the next unit is one of the same stage

    def make_units(self, model, units):
        self.units_of_stage = {}
        for stage, part in self.pipeline_stages.items():
            own = None if units is None else [m for m in units if m in set(part.modules())]
            self.units_of_stage[stage] = super().make_units(part, own)
        return sum(self.units_of_stage.values(), [])

    def running_units(self):
        # Another stage's unit may still be between its forward and its backward
        return self.units if self.action is None else self.units_of_stage[self.action.stage]


class ZeROInPipeline(InPipeline, ComposedZeRO):
    """For ranks with several stages, or a backward in two parts:

    stages = {stage: its module}    # this rank's
    model, options = nn.ModuleList(stages.values()), dict(pipeline_stages=stages, microbatches=m)
    zero = ZeROInPipeline(model, dp, 1, torch.optim.AdamW, **options)
    SplitPipeline(..., around=zero.around)    # of zero_bubble.py, for any schedule
    norm = zero.grad_norm([tp], pp)"""


class FSDPInPipeline(InPipeline, ComposedFSDP):
    """FSDP, as ZeROInPipeline."""


# --- mistakes that would be silent: refused


def check_hsdp(hsdp, data_group):
    """Else some gradients are not summed, or those of different shards are; or nodes split nothing,
    because another object for the same ranks is not found."""
    if hsdp and data_group not in hsdp:
        raise ValueError("hsdp needs the data-parallel group itself as a key, the same object")
    for group, (node, across) in hsdp.items():
        here = dist.get_rank(node), dist.get_world_size(node), is_within(node, group)
        found = [here]
        if across is not None:
            found = [None] * dist.get_world_size(across)
            dist.all_gather_object(found, here, group=across)
        nodes = dist.get_world_size(group) // dist.get_world_size(node)
        if len(found) != nodes or len(set(found)) > 1 or not is_within(node, group):
            advice = "node, and across: one rank of each node, with the same shard"
            raise ValueError(f"hsdp needs {advice}, all of the group")


# --- demo ---

import functools

import composition
import harness
import receipts.tensor_parallel
import receipts.zero
import tensor_parallel
from harness import zero_flags
from receipts.formulas import Group, add, sizes_of


def flags():
    parser = harness.parser(__doc__)
    g = parser.add_argument_group("ZeRO in a grid")
    why = "ranks of a row, for tensor parallelism (default: 2)"
    g.add_argument("--tp", **harness.POSITIVE, help=why)
    why = "split: 1 optimizer states, 2 gradients too, 3 weights too (FSDP)"
    g.add_argument("--stage", type=int, choices=(1, 2, 3), default=2, help=why)
    zero_flags.add_flags(g, bucket_mb=0.5, ranks_flag="--shard-ranks")
    return parser


def main():
    args = flags().parse_args()
    check = functools.partial(zero_flags.check_world, args)
    composition.launch(args, demo, check)


def demo(run):
    args = run.args
    dp, tp = composition.groups_along(-1, args.tp)
    groups, hsdp = {"dp": dp, "tp": tp}, {}
    if args.shard_ranks:
        across, node, _ = composition.groups_along(-1, args.shard_ranks, args.tp)
        groups |= {"inside": node, "across": across}
        hsdp[dp] = node, across if across.size() > 1 else None
    run.groups(**groups)  # names for the receipt
    # First tensor parallelism cuts the model. ZeRO then takes the shards as they are
    model = tensor_parallel.parallelize_tensors(run.meta_model(), tp)
    options = zero_flags.options(run, model, args.stage)  # ZeRO fills the model with weights
    options["make_optimizer"] = functools.partial(harness.make_optimizer, args=args)
    options["microbatches"] = args.microbatches
    if args.stage == 3:
        zero = ComposedFSDP(model, dp, hsdp=hsdp, **options)
    else:
        zero = ComposedZeRO(model, dp, args.stage, hsdp=hsdp, **options)
    train(run, model, zero, tp, dp)

    layout, sent, held = receipts.zero.of_demo(run, dp, args.shard_ranks)
    sizes = sizes_of(args, run.config, dp.size())
    tensors, _ = receipts.tensor_parallel.expected(sizes, Group("tp", args.tp))
    return run.receipt(layout | {"tp": args.tp}, add(tensors, sent), held)


def train(run, model, composed, tp, dp):
    """The loop, for muon_in_grid.py's ComposedMuon too."""
    for step in run.steps(composed):
        composed.zero_grad()
        loss = run.zero()
        # The ranks of a row (tp) get the same sequences
        for tokens, targets, samples in run.microbatches(step, dp.rank(), dp.size()):
            # target_count: the tokens of the global batch
            part = model(tokens, targets=targets, target_count=run.target_count, sample_ids=samples)
            part.backward()
            loss += part.detach()
        dist.all_reduce(loss, group=dp)
        norm = composed.grad_norm([tp])
        run.check(loss, norm, lambda: composed.gather_full(model.named()))
        composed.clip(norm, run.args.grad_clip)
        composed.step()
        run.log()


if __name__ == "__main__":
    harness.script(main)
