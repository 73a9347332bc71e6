"""Muon in a grid of ranks: beside tensor parallelism, experts or a pipeline.

    Each rank holds half of A and of B: tp 0 the left halves, tp 1 the right ones. The owners:

                tp 0                       tp 1
    dp 0   rank 0: A's left half  <--->  rank 1: A's right half    each gathers A's direction,
    dp 1   rank 2: B's left half  <--->  rank 3: B's right half    iterates on it, keeps its half

As in muon.py each shard has one owner in its column: gradients are reduced to it, and it broadcasts
the new weights. All columns deal out their shards alike, so the owners of a matrix are in one row.
Momentum and weight decay work element by element: they stay with the shards. Only the iteration
needs the whole matrix. So the row gathers the direction, which is the momentum a step ahead.

Sent      Beside what muon.py sends, with t tp ranks: t-1 shards of each cut matrix by each owner.
          On average (t-1)/N times the bytes of a rank's cut shards, with N ranks in a column.
Computed  All t owners iterate on the same matrix: 2 t % of the model's work in muon.py's example,
          not 2%. Instead an all-to-all could deal t matrices out to the t ranks, and a second one
          bring the shards back.
Cuts      Only a cut through matrices needs the all-gather. With p.matrix_rows (muon.py) a rank's
          heads of q, k and v are whole matrices. So are whole experts. AdamW takes any shard.
Norm      As in composition.py. A column's ranks own different elements, so they are no copies.
Copy      The tops of muon.py and composition.py, and tensor_parallel.py's, which cuts.

    torchrun --nproc_per_node=4 -m advanced.muon_in_grid --tp 2
    python train.py --dp 2 --tp 2 --optimizer muon

Liu et al. 2025, arXiv:2502.16982, section 2.3 (gathering the shards of a matrix).
"""

from collections import Counter

import torch
import torch.distributed as dist

from composition import check_data_group, groups_cutting, norm_of_parts, placed
from muon import Muon, OwnedBucket, PlainMuon, deal_to_owners, flops

# --- the plainest form: gather the shards, iterate on the whole, keep your part


class ShardedMuon(PlainMuon):
    """PlainMuon for shards of matrices. All ranks that share a matrix gather the direction, iterate
    on the whole, and keep their part.

        dp, tp = groups_along(-1, t)                # of composition.py: this rank's column and row
        split(model, tp)                            # yours: see docs/use/two-techniques.md
        # Lists, not sets: all ranks must send in the same order
        matrices = [p for p in model.blocks.parameters() if p.dim() > 1]    # after the split
        optimizer = ShardedMuon(matrices, lr=1e-3)  # and adamw, with all other parameters
        # After backward, as in step_by_owner of muon.py. Without dp call both optimizers' step()
        step_by_owner(optimizer, adamw, dp)

    A shard without p.placement (composition.py) counts as a whole matrix: no error, but a wrong
    update, and a wrong norm below. Experts and sequence parallelism sum some gradients over other
    groups: ComposedMuon, below, knows them."""

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
        part = torch.zeros_like(p)  # padded again
        part.narrow(dim, 0, length).copy_(update)
        return part

    def cuts_within(self, p):
        """The cuts that leave no rank a whole matrix, as [(dimension, cut)]. The last two
        dimensions are a matrix's. A cut of an earlier one only deals out whole experts."""
        rows, columns = p.dim() - 2, p.dim() - 1
        within = [rows, columns]
        if hasattr(p, "matrix_rows"):
            within = [columns]  # each head's rows are a matrix: a cut of rows lies between heads
        return [(dim, cut) for dim, cut in placed(p, "cuts", {}).items() if dim in within]


# --- in a grid: each shard has an owner in its column


class ComposedMuon(Muon):
    """Muon in a grid. The other arguments are Muon's.

        dp, tp = groups_along(-1, t)                 # this rank's column, and its row of t ranks
        split(model, tp)                             # yours: see docs/use/two-techniques.md
        matrices = [p for p in model.blocks.parameters() if p.dim() > 1]    # after the split
        muon = ComposedMuon(model, dp, matrices, lr=1e-3, microbatches=2)
        for micro_batches, target_count in batches:  # of this row; the targets of all rows
            muon.zero_grad()
            for x, y in micro_batches:
                loss = cross_entropy(model(x), y, reduction="sum") / target_count
                loss.backward()
            muon.clip(muon.grad_norm([tp]), 1.0)
            muon.step()

    With a pipeline the norm is grad_norm([tp], pp); a rank with several stages needs
    pipeline_stages={stage: its module}. docs/use/two-techniques.md has the loop: put ComposedMuon
    in ZeRO's place."""

    optimizer_class = ShardedMuon

    def __init__(self, model, group, *arguments, pipeline_stages=None, **options):
        modules = pipeline_stages.values() if pipeline_stages else [model]
        # A tied matrix gets a gradient from each stage that uses it
        self.uses = Counter(p for module in modules for p in module.parameters())
        super().__init__(model, group, *arguments, **options)

    def kind_of(self, p):
        # Vectors share a bucket if they are summed over the same ranks, and cut alike: for the norm
        # one of them stands for all
        partial = tuple(placed(p, "partial", ()))
        return *super().kind_of(p), placed(p, "data", self.group), partial, *groups_cutting(p)

    def owners_of(self, matrices):
        def work(p):  # of the whole matrix
            return flops(p, placed(p, "shape", p.shape))

        owners, alike = {}, {}  # alike: {data group: matrices}. Experts have their own replicas
        for p in matrices:
            alike.setdefault(placed(p, "data", self.group), []).append(p)
        for group, members in alike.items():
            owners |= deal_to_owners(members, dist.get_world_size(group), work)
        return owners

    def make_bucket(self, parameters, owner):
        data_group = placed(parameters[0], "data", self.group)
        check_data_group(parameters[0], data_group)
        grads_per_step = self.microbatches * sum(self.uses[p] for p in parameters)
        return OwnedBucket(parameters, owner, data_group, grads_per_step)

    def finish(self):
        if self.finished:
            return
        super().finish()
        for bucket in self.buckets:
            # Few gradients are partial sums: these messages wait for the end of backward. The same
            # rank of each column owns a bucket, so all ranks of the group have a part, or none
            for group in placed(bucket.parameters[0], "partial", ()):
                if len(bucket.own_gradient):
                    dist.all_reduce(bucket.own_gradient, group=group)

    def grad_norm(self, groups=(), pipeline_group=None):
        """groups: those of the grid beside Muon's own, as [tp]. pipeline_group: the ranks with the
        other stages of a pipeline. Nothing notices if you leave it out, or put it in groups."""
        self.finish()
        parts = []
        for bucket in self.buckets:
            # Its parameters are cut alike, so one stands for all. Each element has one owner in a
            # column: as with ZeRO's shards the number of copies is divided by the ranks of a column
            shards = dist.get_world_size(bucket.group)
            parts.append((bucket.parameters[0], bucket.own_gradient, shards))
        device = next(self.model.parameters()).device
        return norm_of_parts(parts, [self.group, *groups], device, pipeline_group)


# --- demo ---

import composition
import harness
import receipts.muon
import receipts.tensor_parallel
import tensor_parallel
import zero_in_grid
from receipts.formulas import Group, add, sizes_of


def flags():
    parser = harness.parser(__doc__)
    why = "ranks of a row, for tensor parallelism (default: 2)"
    parser.add_argument("--tp", **harness.POSITIVE, help=why)
    why = "of embedding, head and vectors"  # no other
    parser.add_argument("--optimizer", choices=["adamw"], default="adamw", help=why)
    return parser


def main():
    composition.launch(flags().parse_args(), demo)


def demo(run):
    args = run.args
    dp, tp = composition.groups_along(-1, args.tp)
    run.groups(dp=dp, tp=tp)
    model = run.fill(tensor_parallel.parallelize_tensors(run.meta_model(), tp))
    matrices = [p for p in model.blocks.parameters() if p.dim() > 1]  # not embedding and head
    options = dict(lr=args.lr, weight_decay=args.weight_decay, microbatches=args.microbatches)
    muon = ComposedMuon(model, dp, matrices, **options)
    # --prove repeats the run on one process: PlainMuon for the matrices, AdamW for the rest
    run.make_optimizer = receipts.muon.one_process(PlainMuon)
    zero_in_grid.train(run, model, muon, tp, dp)  # the loop of ComposedMuon's docstring

    sizes = sizes_of(args, run.config, dp.size())
    groups = {"dp": Group("dp", dp.size()), "tp": Group("tp", args.tp)}
    tensors, _ = receipts.tensor_parallel.expected(sizes, groups["tp"])
    owned = receipts.muon.owned_by(muon, {"tp": tp})
    sent, held = receipts.muon.expected(sizes, groups, owned)
    layout = {"dp": dp.size(), "tp": args.tp, "optimizer": "muon"}
    return run.receipt(layout, add(tensors, sent), held)


if __name__ == "__main__":
    harness.script(main)
