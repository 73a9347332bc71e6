"""Two kinds of parallelism at once, in a grid of ranks: one in the rows, one in the columns.

              tp 0    tp 1
    dp 0        0       1      a row     tensor parallelism: shards of the same layers, same data
    dp 1        2       3      a column  data parallelism: the same shards, other data

Order     First a technique cuts the model: its tensors, its experts or its layers. Then data
          parallelism (DDP, ZeRO, FSDP, Muon) takes a rank's shards as the model of its column.
Sum       A gradient is summed over the ranks that have the same shard and saw other data: over a
          column. For some parameters the cutting technique says otherwise, by an attribute:

    p.placement = {
        "shape":   shape of the whole parameter
        "cuts":    {dimension: (group, start, length)}    the group's ranks have different shards
        "partial": [group]       after backward p.grad is a partial sum: add over this group, too
        "data":    group         sum over these ranks instead of the column: an expert's replicas
    }

          A parameter without it is whole on every rank of a row.
Norm      Every element counts once. A rank squares its part of each gradient and divides by the
          number of ranks that have the same part. The whole grid adds up.
Sent      What each technique sends alone, over its own groups. For the norm 8 bytes per group.
Use       docs/use/two-techniques.md has the loop for each pair, on a model of plain modules.
Copy      The tops of zero.py, fsdp.py and muon.py, too. Delete the classes that you don't use.

    torchrun --nproc_per_node=4 composition.py --tp 2           python train.py --tp 2 --zero 3

Narayanan et al. 2021, arXiv:2104.04473. Zhao et al. 2023 (hybrid sharding), arXiv:2304.11277.
"""

import contextlib
import math
from collections import Counter

import torch
import torch.distributed as dist

from fsdp import FSDP
from muon import Muon, PlainMuon, deal_to_owners, flops
from zero import ZeRO

# --- the plainest form: sum each gradient over the right ranks, and count each element once


def sum_in_grid(parameters, data_group):
    """After the last backward pass of a step: makes each p.grad that of the whole batch.

        parallelize(model, tp)                       # cuts parameters, writes p.placement
        for micro_batches, target_count in batches:  # of this row of ranks; targets of the batch
            optimizer.zero_grad()
            for x, y in micro_batches:
                loss = cross_entropy(model(x), y, reduction="sum") / target_count
                loss.backward()
            sum_in_grid(model.parameters(), dp)      # over a column
            norm = norm_in_grid(model.parameters(), [dp, tp])
            torch.nn.utils.clip_grads_with_norm_(model.parameters(), 1.0, norm)
            optimizer.step()

    All sums wait for the end of backward. DDP and the classes below overlap them."""
    for p in parameters:
        if p.requires_grad:
            check_data_group(p, placed(p, "data", data_group))
            if p.grad is None:  # this rank did not use p, but others wait for its part of the sum
                p.grad = torch.zeros_like(p)
            for group in [placed(p, "data", data_group), *placed(p, "partial", ())]:
                dist.all_reduce(p.grad, group=group)


def placed(p, key, default):
    """An entry of p.placement."""
    return getattr(p, "placement", {}).get(key) or default


def groups_cutting(p):
    """The groups whose ranks have different shards of p."""
    return [group for group, _, _ in placed(p, "cuts", {}).values()]


def norm_in_grid(parameters, groups, pipeline_group=None):
    """The norm of the whole model's gradient: a float64 scalar, the same on all ranks.

    groups          those of the grid, as [dp, tp]: their ranks together hold every parameter
    pipeline_group  the ranks with the other stages of a pipeline"""
    parts = [(p, p.grad, 1) for p in parameters if p.grad is not None]
    return norm_of_parts(parts, groups, pipeline_group)


def norm_of_parts(parts, groups, pipeline_group=None):
    """parts: [(parameter, what this rank has of its gradient, the number of shards into which its
    data-parallel ranks have split it)]."""
    gradients = {}  # {number of ranks that have the same part: gradients}
    for p, gradient, shards in parts:
        # All ranks' squares are added. 2 x 2 ranks, tp cuts a matrix and leaves its bias whole:
        # each half of the matrix is on 4 / 2 = 2 ranks, the bias on 4 / 1 = 4
        copies = count_ranks(groups) / count_ranks(groups_cutting(p)) / shards
        for group in placed(p, "partial", ()):
            if is_within(group, pipeline_group):  # a tied matrix: two stages have its sum
                copies *= dist.get_world_size(group)
        gradients.setdefault(copies, []).append(gradient)
    square = torch.zeros((), dtype=torch.float64, device=parts[0][1].device if parts else None)
    for copies, equal in gradients.items():
        norms = torch.stack(torch._foreach_norm(equal, dtype=torch.float64))
        square += norms.square().sum() / copies
    for group in groups if pipeline_group is None else [*groups, pipeline_group]:
        if dist.get_world_size(group) > 1:
            dist.all_reduce(square, group=group)
    return square.sqrt()


def count_ranks(groups):
    return math.prod(dist.get_world_size(group) for group in groups)


def is_within(inner, outer):
    """Whether the ranks of a group are among those of another one, which may be None."""
    if outer is None:
        return False
    ranks = set(dist.get_process_group_ranks(inner))
    return ranks.issubset(dist.get_process_group_ranks(outer))


# --- ZeRO and FSDP in a grid. Beside ZeRO alone this is new:
# kind_of, make_bucket   the parameters of a bucket are summed over the same groups
# finish                 then partial sums are added
# grad_norm              counts each element once in the grid


def grid_of(parameters, data_group):
    """The groups of the grid: the column, and those of the parameter that is cut over most ranks.
    Every other parameter must be cut within these, or whole on them."""
    cuts = []
    for p in parameters:
        if placed(p, "data", data_group) is data_group:  # experts' groups are parts of a column
            cuts.append(groups_cutting(p))
    return [data_group, *max(cuts, key=count_ranks, default=[])]


class Composed:
    """ZeRO and FSDP for a model that another technique has cut. The loop and the other arguments
    are theirs.

        zero = ComposedZeRO(model, dp, 1, torch.optim.AdamW, microbatches=2)

    hsdp             hybrid sharding: {group: (node, across)}. Each node holds a whole replica of
                     the states, split over the ranks of `node`. `across`: the ranks of all nodes
                     with the same shard; None if there is one node
    pipeline_stages  {stage: its module}, for a rank with several. ZeRO counts backward passes, so
                     it must know whose each is: Pipeline(..., around=zero.around) tells it"""

    takes_shards = True  # ZeRO alone refuses parameters with a placement

    def __init__(self, model, group, *arguments, hsdp=None, pipeline_stages=None, **options):
        self.hsdp = hsdp or {}
        self.pipeline_stages = pipeline_stages or {None: model}
        self.replica_sums = []  # HSDP's sums of shards over replicas, on their way
        self.action = None  # what a pipeline is running: see `around`
        self.stages_of = dict.fromkeys(model.parameters(), ())  # the pipeline stages that use it
        for stage, part in self.pipeline_stages.items():
            for p in part.parameters():
                self.stages_of[p] += (stage,)
        check_hsdp(self.hsdp)
        super().__init__(model, group, *arguments, **options)
        del self.stages_of  # ZeRO has put new parameters into the model

    # --- buckets: of parameters that are summed over the same ranks

    def kind_of(self, p):
        partial = tuple(placed(p, "partial", ()))
        check_data_group(p, placed(p, "data", self.group))
        return *super().kind_of(p), placed(p, "data", self.group), partial, self.stages_of[p]

    def make_bucket(self, parameters, **options):
        data_group = placed(parameters[0], "data", self.group)
        shard_group, replica_group = self.hsdp.get(data_group, (data_group, None))
        stages = self.stages_of[parameters[0]]  # each has backward passes of its own
        passes = self.microbatches * len(stages)
        bucket = super().make_bucket(parameters, group=shard_group, passes=passes, **options)
        bucket.replica_group = replica_group
        bucket.pipeline_stages = stages
        return bucket

    # --- in a pipeline: a backward pass is of one stage, and reduces that stage's buckets

    @contextlib.contextmanager
    def around(self, action):
        """For Pipeline(..., around=zero.around), which says what it is running."""
        self.action = action
        try:
            yield
        finally:
            self.action = None

    def buckets_of_pass(self):
        buckets = super().buckets_of_pass()
        if self.action is None:
            return buckets
        return [b for b in buckets if self.action.stage in b.pipeline_stages]

    def _reduce_ready(self, anyway=()):
        # zero_bubble.py has backward in two parts: in "I" few weights get a gradient. Wait for "W"
        if self.action is None or self.action.kind != "I":
            super()._reduce_ready(anyway)

    # --- after the sum over the column: over nodes (HSDP), of partial sums, for the norm

    def shard_is_summed(self, bucket):
        if bucket.replica_group is not None and bucket.passes_left == 0:
            options = dict(group=bucket.replica_group, async_op=True)
            self.replica_sums.append(dist.all_reduce(bucket.gradient_shard, **options))

    def finish(self):
        if self.last_call == "finish":  # called again: don't add partial sums twice
            return
        super().finish()
        while self.replica_sums:  # these first: partial sums are added up of complete shards
            self.replica_sums.pop().wait()
        for bucket in self.trained_buckets:
            for group in placed(bucket.parameters[0], "partial", ()):  # mostly none: not overlapped
                dist.all_reduce(bucket.gradient_shard, group=group)

    def grad_norm(self, pipeline_group=None):
        """pipeline_group: the ranks with the other stages of a pipeline."""
        self.finish()
        parts = []
        for bucket in self.trained_buckets:
            for i, p in enumerate(bucket.parameters):
                parts.append((p, bucket.part_of(i, bucket.gradient_shard), bucket.ranks))
        grid = grid_of(self.model.parameters(), self.group)
        return norm_of_parts(parts, grid, pipeline_group)


class ComposedZeRO(Composed, ZeRO):
    """ZeRO in a grid: see Composed."""


class ComposedFSDP(Composed, FSDP):
    """FSDP in a grid: see Composed. Each pipeline stage has units of its own."""

    def make_units(self, model, units):
        self.units_of_stage = {}
        for stage, part in self.pipeline_stages.items():
            inside = set(part.modules())
            own = None if units is None else [module for module in units if module in inside]
            self.units_of_stage[stage] = super().make_units(part, own)
        return sum(self.units_of_stage.values(), [])

    def running_units(self):
        # Another stage's unit may still be between its forward and its backward
        return self.units if self.action is None else self.units_of_stage[self.action.stage]


# --- Muon in a grid


class ShardedMuon(PlainMuon):
    """PlainMuon for shards of matrices. All ranks that share a matrix gather the direction, iterate
    on the whole, and keep their part."""

    def update_of(self, direction, p, dtype):
        cuts = self.cuts_within(p)
        if not cuts:
            return super().update_of(direction, p, dtype)
        [(dim, (group, start, length))] = cuts  # tensor parallelism cuts in one dimension
        shards = [torch.empty_like(direction) for _ in range(dist.get_world_size(group))]
        dist.all_gather(shards, direction, group=group)
        # Without the padding of the last shards, so that the scale is that of the true shape
        whole = torch.cat(shards, dim).narrow(dim, 0, p.placement["shape"][dim])
        update = super().update_of(whole, p, dtype).narrow(dim, start, length)
        padded = torch.zeros_like(p)
        padded.narrow(dim, 0, length).copy_(update)
        return padded

    def cuts_within(self, p):
        """[(dimension, cut)] of the cuts that go through p's matrices. A cut between matrices, such
        as heads or a stack's experts, leaves each whole. Dimension None cuts none: the other ranks
        have other matrices, such as experts that are modules."""
        first = 1 if hasattr(p, "matrix_rows") else p.dim() - 2
        cuts = placed(p, "cuts", {}).items()
        return [(dim, cut) for dim, cut in cuts if dim is not None and dim >= first]

    found_inf = None  # a tensor: where it is 1 a step changes nothing, as in torch's optimizers

    def step_on(self, p, settings):
        if self.found_inf is not None:
            # lr = 0 keeps the weights. A gradient that equals the average keeps the average
            average = self.state[p].get("average", 0.0)
            p.grad.copy_(torch.where(self.found_inf > 0, average, p.grad))
            settings = settings | {"lr": settings["lr"] * (1 - self.found_inf.double())}
        super().step_on(p, settings)


class ComposedMuon(Muon):
    """Muon in a grid. The loop and the other arguments are Muon's.

    pipeline_stages  {stage: its module}, of a rank with several"""

    optimizer_class = ShardedMuon
    takes_shards = True

    def __init__(self, model, group, *arguments, pipeline_stages=None, **options):
        modules = pipeline_stages.values() if pipeline_stages else [model]
        # A tied matrix gets a gradient from each stage that uses it
        self.uses = Counter(p for module in modules for p in module.parameters())
        super().__init__(model, group, *arguments, **options)

    def kind_of(self, p):
        partial = tuple(placed(p, "partial", ()))
        check_data_group(p, placed(p, "data", self.group))
        return *super().kind_of(p), placed(p, "data", self.group), partial, *groups_cutting(p)

    def owners_of(self, matrices):
        def work(p):  # of the whole matrix
            return flops(p, placed(p, "shape", p.shape))

        owners = {}  # experts are dealt to their own replicas, apart from the rest
        for group in {placed(p, "data", self.group): None for p in matrices}:
            own = [p for p in matrices if placed(p, "data", self.group) is group]
            owners |= deal_to_owners(own, dist.get_world_size(group), work)
        return owners

    def make_bucket(self, parameters, owner):
        data_group = placed(parameters[0], "data", self.group)
        bucket = super().make_bucket(parameters, owner, data_group)
        bucket.grads_per_step = self.microbatches * sum(self.uses[p] for p in parameters)
        return bucket

    def finish(self):
        if self.finished:
            return
        super().finish()
        for bucket in self.buckets:
            for group in placed(bucket.parameters[0], "partial", ()):  # mostly none: not overlapped
                if len(bucket.own_gradient):
                    dist.all_reduce(bucket.own_gradient, group=group)

    def grad_norm(self, pipeline_group=None):
        """pipeline_group: the ranks with the other stages of a pipeline."""
        self.finish()
        parts = []
        for bucket in self.buckets:  # of parameters that are cut alike
            shards = dist.get_world_size(bucket.group)
            parts.append((bucket.parameters[0], bucket.own_gradient, shards))
        grid = grid_of(self.model.parameters(), self.group)
        return norm_of_parts(parts, grid, pipeline_group)


# --- mistakes that would be silent: refused


def check_data_group(p, data_group):
    ranks = set(dist.get_process_group_ranks(data_group))
    for cut_over in groups_cutting(p):
        if len(ranks.intersection(dist.get_process_group_ranks(cut_over))) > 1:
            advice = "give shard_experts the data_group of the ranks with the same experts"
            raise ValueError(f"a sum would add gradients of different shards: {advice}")


def check_hsdp(hsdp):
    for shard_group, replica_group in hsdp.values():
        if replica_group is not None:  # ranks with different shards would be added
            positions = [None] * dist.get_world_size(replica_group)
            own = dist.get_rank(shard_group), dist.get_world_size(shard_group)
            dist.all_gather_object(positions, own, group=replica_group)
            if len(set(positions)) > 1:
                raise ValueError("hsdp needs one rank of each replica, with the same shard of each")


# --- demo ---

import harness
import proof
import receipts.ddp
import receipts.tensor_parallel
import tensor_parallel
from receipts.formulas import Group, add, sizes_of


def flags():
    parser = harness.parser(__doc__)
    why = "ranks of a row, for tensor parallelism (default: 2)"
    parser.add_argument("--tp", **harness.POSITIVE, help=why)
    return parser


def main():
    args = flags().parse_args()
    config = harness.configure(args)

    def check(world):
        args.tp = args.tp or min(2, world)
        if world % args.tp or config.kv_heads % args.tp:
            fits = f"the {world} ranks and the {config.kv_heads} key/value heads"
            raise harness.Refused(f"--tp {args.tp} does not divide {fits}: give a divisor of both")
        tensor_parallel.check_heads(config, args.tp)
        harness.check_batch(args, world // args.tp)

    proof.launch(demo, args, check=check)


def demo(run):
    args = run.args
    grid = torch.arange(run.world).view(-1, args.tp)
    tp, _ = dist.new_subgroups_by_enumeration(grid.tolist())  # rows
    dp, _ = dist.new_subgroups_by_enumeration(grid.T.tolist())  # columns
    run.groups(dp=dp, tp=tp)
    # First tensor parallelism cuts the model. Data parallelism then takes the shards as they are
    model = run.fill(tensor_parallel.parallelize_tensors(run.meta_model(), tp))
    parameters = list(model.parameters())
    optimizer = harness.make_optimizer(parameters, args)
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
        harness.clip(parameters, norm, args.grad_clip)
        optimizer.step()
        run.log(loss, norm)

    sizes = sizes_of(args, run.config, dp.size())
    tensors, held = receipts.tensor_parallel.expected(sizes, Group("tp", args.tp))
    data, _ = receipts.ddp.expected(sizes, Group("dp", dp.size()), scalars=2)
    return run.receipt({"dp": dp.size(), "tp": args.tp}, add(tensors, data), held)


if __name__ == "__main__":
    harness.script(main)
