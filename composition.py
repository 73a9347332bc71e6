"""Several kinds of parallelism at once, each along one dimension of a grid of ranks.

              tp 0    tp 1
    dp 0        0       1      a row     tensor parallelism: shards of the same layers, same data
    dp 1        2       3      a column  data parallelism: the same shards, other data

Order     First a technique cuts the model: its tensors, its experts or its layers. Then data
          parallelism (DDP, ZeRO, FSDP) takes a rank's shards as the model of its column.
Sum       A gradient is summed over the ranks that have the same shard and saw other data: over a
          column. There are two exceptions, which a parameter's p.placement names: experts, and
          parameters that saw a part of the tokens.
Norm      Every element counts once. A rank squares its part of each gradient and divides by the
          number of ranks that have the same part. The whole grid adds up; so do the stages of a
          pipeline.
Sent      As by each alone, but data parallelism sends only a rank's shards. For the norm 8 bytes
          per group. What sends most goes into the rows, on neighbours in a node: here tp.
Use       docs/use/two-techniques.md has the loop for each pair, and one for three techniques.
Copy      The plain form with its checks stands alone, up to the classes. These need the tops of
          zero.py and fsdp.py, too.

    torchrun --nproc_per_node=4 composition.py --tp 2        python composition.py --tp 2 --zero 2

Narayanan et al. 2021, arXiv:2104.04473. Zhao et al. 2023 (hybrid sharding), arXiv:2304.11277.
"""

import contextlib
import math

import torch
import torch.distributed as dist

# --- the plainest form: sum each gradient over the right ranks, and count each element once


def groups_along(*sizes):
    """This rank's group along each dimension of the grid; the last one's ranks are neighbours. With
    a pipeline the grid is a box: dp, pp, tp = groups_along(-1, 2, 2), with -1 for the rest."""
    grid = torch.arange(dist.get_world_size()).view(sizes)
    # lines[d]: all lines of the grid along dimension d
    lines = [grid.movedim(d, -1).reshape(-1, size) for d, size in enumerate(grid.shape)]
    return [dist.new_subgroups_by_enumeration(rows.tolist())[0] for rows in lines]


def sum_in_grid(parameters, data_group):
    """After the last backward pass of a step: makes each p.grad that of the whole batch.

        dp, tp = groups_along(-1, t)                 # this rank's column, and its row of t ranks
        split(model, tp)                             # yours: see docs/use/two-techniques.md
        for micro_batches, target_count in batches:  # this row's own; the targets of all rows
            optimizer.zero_grad()
            for x, y in micro_batches:
                loss = cross_entropy(model(x), y, reduction="sum") / target_count
                loss.backward()
            sum_in_grid(model.parameters(), dp)      # over a column
            norm = norm_in_grid(model.parameters(), [dp, tp])
            torch.nn.utils.clip_grads_with_norm_(model.parameters(), 1.0, norm)
            optimizer.step()

    If the head is split too, take VocabParallelCrossEntropy, of tensor_parallel.py. A parameter
    that no rank used gets zeros, so weight decay moves it. All sums wait for the end of backward:
    DDP and the classes below overlap them."""
    for p in parameters:
        if p.requires_grad:
            replicas = placed(p, "data", data_group)
            check_data_group(p, replicas)
            if p.grad is None:  # this rank did not use p, but others wait for its part of the sum
                p.grad = torch.zeros_like(p)
            for group in [replicas, *placed(p, "partial", ())]:
                dist.all_reduce(p.grad, group=group)


# p.placement is a dict: what a technique did to p. Without it, as for a row-parallel layer's bias,
# p is whole on every rank of a row.
#
#     "cuts"     {dimension: (group, start, length)}: this rank has [start : start + length] of that
#                dimension, the group's other ranks the rest. up.weight (512, 128) on tp rank 1 of
#                2: {0: (tp, 256, 256)}, rows 256 to 511
#     "data"     of an expert: the ranks with a replica of it. Sum over them, not over a column
#     "partial"  [tp]: sum over tp, too. With sequence parallelism LayerNorm's weight is whole, but
#                each tp rank's saw a part of the tokens. Or [pp], of a tied matrix: the first and
#                the last stage have a copy each, with a part of its gradient
#     "shape"    of the whole parameter


def placed(p, key, default):
    """An entry of p.placement."""
    return getattr(p, "placement", {}).get(key) or default


def groups_cutting(p):
    """The groups whose ranks have different shards of p."""
    return [group for group, _, _ in placed(p, "cuts", {}).values()]


def norm_in_grid(parameters, groups):
    """The norm of the whole gradient, a float64 scalar, the same on all ranks. groups: all
    dimensions of the grid in which ranks have shards or copies of the same parameters, [dp, tp]:
    dp, too, because experts may be cut over it. Not a pipeline's, whose ranks have other parameters
    (not checked). Add up their squares:

        # parameters: of this stage. Leave a tied matrix out on one of its two stages
        square = norm_in_grid(parameters, [dp, tp]).square()
        dist.all_reduce(square, group=pp)                       # then .sqrt()"""
    parameters = list(parameters)
    trained = [p for p in parameters if p.grad is not None]
    check_grid(trained, groups)
    square = torch.zeros((), dtype=torch.float64, device=parameters[0].device)
    for p in trained:
        # All ranks' squares are added. 2 x 2 ranks, tp cuts a matrix and leaves its bias whole:
        # each half of the matrix is on 4 / 2 = 2 ranks, the bias on 4 / 1 = 4
        copies = count_ranks(groups) / count_ranks(groups_cutting(p))
        square += torch.linalg.vector_norm(p.grad, dtype=torch.float64).square() / copies
    for group in groups:
        dist.all_reduce(square, group=group)
    return square.sqrt()


def count_ranks(groups):
    return math.prod(dist.get_world_size(group) for group in groups)


# --- the plain form's mistakes that would be silent: refused


def check_data_group(p, data_group):
    ranks = set(dist.get_process_group_ranks(data_group))
    for cut_over in groups_cutting(p):
        if len(ranks.intersection(dist.get_process_group_ranks(cut_over))) > 1:
            advice = "give a column; for experts data_group, their replicas or this rank alone"
            raise ValueError(f"a sum over {sorted(ranks)} would add different shards: {advice}")


def check_grid(parameters, groups):
    cut_over = set()
    for p in parameters:
        if placed(p, "data", None) is None:  # experts' groups need not be rows of this grid
            cut_over.update(groups_cutting(p))
    for group in cut_over:
        if not any(is_within(group, of_grid) for of_grid in groups):
            ranks = dist.get_process_group_ranks(group)
            raise ValueError(f"the norm lacks ranks of {ranks}: give all of the grid, [dp, tp]")


def is_within(inner, outer):
    ranks = set(dist.get_process_group_ranks(inner))
    return ranks.issubset(dist.get_process_group_ranks(outer))


# --- ZeRO and FSDP in a grid. First the norm


def norm_of_parts(parts, groups, device, pipeline_group=None):
    """norm_in_grid with three changes. ZeRO leaves a rank a shard of each gradient. The stages of a
    pipeline add up. Gradients with equally many copies are squared together, in few kernels.

    parts    [(parameter, what this rank has of its gradient, into how many shards it is split)]"""
    check_grid([p for p, _, _ in parts], groups)
    gradients = {}  # {number of ranks that have the same part: gradients}
    for p, gradient, shards in parts:
        copies = count_ranks(groups) / count_ranks(groups_cutting(p)) / shards
        for group in placed(p, "partial", ()):
            if pipeline_group is not None and is_within(group, pipeline_group):
                copies *= dist.get_world_size(group)  # a tied matrix: two stages have its sum
        gradients.setdefault(copies, []).append(gradient)
    square = torch.zeros((), dtype=torch.float64, device=device)
    for copies, equal in gradients.items():
        norms = torch.stack(torch._foreach_norm(equal, dtype=torch.float64))
        square += norms.square().sum() / copies
    for group in groups if pipeline_group is None else [*groups, pipeline_group]:
        if dist.get_world_size(group) > 1:
            dist.all_reduce(square, group=group)
    return square.sqrt()


# Then three classes. Each adds one thing to ZeRO's methods. super() goes from InGrid on to
# HybridSharding, then to ZeRO:
#
#                        InGrid              HybridSharding        InPipeline, at the end
#     kind_of            groups that sum p                         stages that use p
#     make_bucket        over its group      over its node only    passes of its stages
#     buckets_of_pass                                              of the running stage
#     shard_is_summed                        then over replicas
#     finish             then partial sums   waits for replicas

from fsdp import FSDP
from zero import ZeRO


class InGrid:
    """ZeRO for a model that another technique has cut: it reads p.placement."""

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
        for bucket in self.trained_buckets:  # not in backward: stages would wait for each other
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


class HybridSharding:
    """HSDP: each node holds a whole replica of the states, split over its own ranks. So the weights
    are gathered inside nodes only. Gradients are summed twice: reduce-scattered inside a node, then
    each shard all-reduced with its replicas on the other nodes. It needs InGrid, whose norm counts
    replicas once.

        node 0    rank 0: shard 0    rank 1: shard 1      node    0 1 | 2 3    (rows of a grid)
        node 1    rank 2: shard 0    rank 3: shard 1      across  0 2 | 1 3    (columns)

    dp, tp = groups_along(-1, t)
    across, node, _ = groups_along(-1, n, t)    # each node has n ranks of a column
    zero = ComposedZeRO(model, dp, 1, torch.optim.AdamW, hsdp={dp: (node, across)})

    hsdp    {group: (node, across)}, for the data-parallel group, and for that of experts. across:
            None if there is one node. A group that is missing here is split as a whole. zero.py
            --shard-ranks 2 shows it"""

    def __init__(self, model, group, *arguments, hsdp=None, **options):
        self.hsdp = hsdp or {}
        self.replica_sums = []  # on their way
        check_hsdp(self.hsdp)
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
    """ZeRO in a grid. The loop and the other arguments are ZeRO's, but for the norm:

        zero = ComposedZeRO(model, dp, 1, torch.optim.AdamW, microbatches=2)
        norm = zero.grad_norm([tp])    # with a pipeline: ([tp], pp)

    For several stages on a rank see ZeROInPipeline."""


class ComposedFSDP(InGrid, HybridSharding, FSDP):
    """FSDP in a grid, as ComposedZeRO."""


# --- only where a rank has several stages of a pipeline, or a backward in two parts


class InPipeline:
    """ZeRO's backward pass fills all buckets. Here it is one stage's, and fills the buckets of that
    stage. Pipeline(..., around=zero.around) says which. pipeline_stages: {stage: its module}."""

    def __init__(self, model, group, *arguments, pipeline_stages=None, **options):
        self.pipeline_stages = pipeline_stages or {None: model}
        self.action = None  # what the pipeline is running
        self.stages_of = dict.fromkeys(model.parameters(), ())  # a tied matrix may have two
        for stage, part in self.pipeline_stages.items():
            for p in part.parameters():
                self.stages_of[p] += (stage,)
        super().__init__(model, group, *arguments, **options)
        del self.stages_of  # ZeRO has put new parameters into the model

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
    """The arguments of both."""


class FSDPInPipeline(InPipeline, ComposedFSDP):
    """The same for FSDP."""


# --- mistakes that would be silent: refused


def check_hsdp(hsdp):
    """Else some gradients are not summed, or those of different shards are."""
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

import harness
import proof
import receipts.ddp
import receipts.tensor_parallel
import receipts.zero
import tensor_parallel
from harness import zero_flags
from receipts.formulas import Group, add, scatter_operation, sizes_of


def flags():
    parser = harness.parser(__doc__)
    g = parser.add_argument_group("the grid")
    why = "ranks of a row, for tensor parallelism (default: 2)"
    g.add_argument("--tp", **harness.POSITIVE, help=why)
    why = "stage of ZeRO in the columns, 3: FSDP (default: the plain form)"
    g.add_argument("--zero", type=int, choices=range(4), help=why)
    parser.set_defaults(bucket_mb=0.5, reduce_once=False, keep_gathered=False, offload=False)
    parser.set_defaults(param_dtype=None, reduce_dtype=None)
    return parser


def main():
    launch(flags().parse_args(), demo)


def launch(args, demo):
    config = harness.configure(args)

    def check(world):
        args.tp = args.tp or min(2, world)
        if world % args.tp:
            raise harness.Refused(f"--tp {args.tp} does not divide {world} ranks: give a divisor")
        tensor_parallel.check_heads(config, args.tp)
        harness.check_batch(args, world // args.tp)

    proof.launch(demo, args, check=check)


def demo(run):
    args = run.args
    dp, tp = groups_along(-1, args.tp)
    run.groups(dp=dp, tp=tp)  # names for the receipt
    # First tensor parallelism cuts the model. Data parallelism then takes the shards as they are
    model = tensor_parallel.parallelize_tensors(run.meta_model(), tp)
    layout, group = {"dp": dp.size(), "tp": args.tp}, Group("dp", dp.size(), dp.rank())
    sizes = sizes_of(args, run.config, dp.size())
    tensors, held = receipts.tensor_parallel.expected(sizes, Group("tp", args.tp))
    if args.zero is None:
        train_plainly(run, run.fill(model), tp, dp)
        data, _ = receipts.ddp.expected(sizes, group, scalars=2)
    else:
        layout["zero"] = args.zero
        train(run, model, make_zero(run, model, dp), tp, dp)
        passes = [("F", 0), ("B", 0)] * args.microbatches
        how = scatter_operation(dp), passes, [receipts.zero.Split(group)]
        data, held = receipts.zero.expected(sizes, group, args.zero, args, *how)
    return run.receipt(layout, add(tensors, data), held)


def train_plainly(run, model, tp, dp):
    parameters = list(model.parameters())
    optimizer = harness.make_optimizer(parameters, run.args)
    for step in run.steps(optimizer):
        optimizer.zero_grad(set_to_none=False)  # gradients stay in memory: the receipt counts them
        loss = run.zero()
        # The ranks of a row (tp) get the same sequences
        for tokens, targets, samples in run.microbatches(step, dp.rank(), dp.size()):
            # target_count: the tokens of the global batch
            part = model(tokens, targets=targets, target_count=run.target_count, sample_ids=samples)
            part.backward()
            loss += part.detach()
        dist.all_reduce(loss, group=dp)
        sum_in_grid(parameters, dp)
        norm = norm_in_grid(parameters, [dp, tp])
        run.check(loss, norm, model.named)
        harness.clip(parameters, norm, run.args.grad_clip)
        optimizer.step()
        run.log()


def make_zero(run, model, dp):
    """ComposedZeRO or ComposedFSDP in the columns. It fills the model with weights."""
    args = run.args
    options = zero_flags.options(run, model, args.zero)
    options["microbatches"] = args.microbatches
    options["make_optimizer"] = functools.partial(harness.make_optimizer, args=args)
    if args.zero == 3:
        return ComposedFSDP(model, dp, **options)
    return ComposedZeRO(model, dp, args.zero, **options)


def train(run, model, composed, tp, dp):
    """The loop above for ComposedZeRO and ComposedFSDP, and for muon_in_grid.py's ComposedMuon."""
    for step in run.steps(composed):
        composed.zero_grad()
        loss = run.zero()
        for tokens, targets, samples in run.microbatches(step, dp.rank(), dp.size()):
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
