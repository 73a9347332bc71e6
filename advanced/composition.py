"""Several kinds of parallelism at once, each along one dimension of a grid of ranks.

    a matrix of 512 rows        tp 0: rows 0 to 255    tp 1: rows 256 to 511
    dp 0: half of the batch     rank 0                 rank 1                  a row has all shards
    dp 1: the other half        rank 2                 rank 3
                                a column has the same shard, so its ranks add up their gradients

Order     First a technique cuts the model: its tensors, its experts or its layers. Then data
          parallelism takes a rank's shards as the model of its column.
Sum       Over a column: its ranks have the same shard and saw other data. Not over a row: backward
          has completed the gradients there, a whole LayerNorm's too (by f, in tensor_parallel.py).
          There are three exceptions, which the attribute p.placement names: experts, parameters
          that saw a part of the tokens, and a matrix that two stages of a pipeline share.
Norm      Every element counts once. A rank squares its part of each gradient and divides by the
          number of ranks that have the same part. All ranks of the grid add these up, and then
          the stages of a pipeline do.
Sent      As by each alone, but data parallelism sends only a rank's shards. For the norm 8 bytes
          per group. What sends most goes into the rows, on neighbours in a node: here tp.
Use       docs/use/two-techniques.md has loops for the usual pairs, and one for three techniques;
          train.py composes all from flags. Here all sums wait for the end of backward: ddp.py,
          zero_in_grid.py and muon_in_grid.py hide them.

    torchrun --nproc_per_node=4 -m advanced.composition --tp 2
    python -m advanced.composition --nproc 8 --tp 4

Narayanan et al. 2021, arXiv:2104.04473, section 3.
"""

import math

import torch
import torch.distributed as dist

# --- the plainest form: sum each gradient over the right ranks, and count each element once.
#     placed() reads p.placement, listed below. check_...(), at the end, refuse mistakes


def groups_along(*sizes):
    """This rank's group along each dimension of the grid; the last one's ranks are neighbours. With
    a pipeline the grid is a box: dp, pp, tp = groups_along(-1, 2, 2), with -1 for the rest."""
    grid = torch.arange(dist.get_world_size()).view(sizes)
    groups = []
    for d, size in enumerate(grid.shape):
        lines = grid.movedim(d, -1).reshape(-1, size)  # along d. In the picture for dp: 0 2, 1 3
        own, _ = dist.new_subgroups_by_enumeration(lines.tolist())  # all ranks make all groups
        groups.append(own)
    return groups


def sum_in_grid(parameters, data_group):
    """After the last backward pass of a step: makes each p.grad that of the whole batch.

        dp, tp = groups_along(-1, t)                 # this rank's column, and its row of t ranks
        split(model, tp)                             # yours: see docs/use/two-techniques.md
        # A row's ranks draw the same micro-batches, by dp.rank(). target_count: the valid targets
        # of all rows' micro-batches together
        for micro_batches, target_count in batches:
            optimizer.zero_grad()
            for x, y in micro_batches:
                loss = cross_entropy(model(x), y, reduction="sum") / target_count
                loss.backward()
            sum_in_grid(model.parameters(), dp)      # over a column
            norm = norm_in_grid(model.parameters(), [dp, tp])
            torch.nn.utils.clip_grads_with_norm_(model.parameters(), 1.0, norm)
            optimizer.step()

    Before the split all ranks have equal weights. If the head is split too, take
    VocabParallelCrossEntropy, of tensor_parallel.py. A parameter that no rank used gets zeros, so
    weight decay moves it."""
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
#                2: {0: (tp, 256, 256)}, rows 256 to 511. The dimension None: p is whole, but the
#                group's other ranks have other parameters in its place, such as other experts
#     "data"     of an expert: the ranks with a replica of it that saw other tokens. Sum over them,
#                not over a column. Often this rank only: groups_along(-1, 1)[1]
#     "partial"  [tp]: sum over tp, too. With sequence parallelism LayerNorm's weight is whole, but
#                each tp rank's saw a part of the tokens. Or [ends], of a tied matrix: the first and
#                the last stage have a copy each, with a part of its gradient. ends: a group of only
#                these two ranks, because the pipeline's others do not join the sum
#     "shape"    of the whole parameter


def placed(p, key, default):
    """An entry of p.placement."""
    return getattr(p, "placement", {}).get(key) or default


def groups_cutting(p):
    """The groups whose ranks have different shards of p."""
    return [group for group, _, _ in placed(p, "cuts", {}).values()]


def norm_in_grid(parameters, groups, pipeline_group=None):
    """The norm of the whole gradient, a float64 scalar, the same on all ranks.

    groups            the dimensions of the grid in which ranks have shards or copies of the same
                      parameters: [dp, tp]. dp, too: it has copies, and experts may be cut over it
    pipeline_group    pp, if there is one. It is not in groups (not checked), because its ranks have
                      other parameters. Leave a tied matrix out of `parameters` on one end"""
    parameters = list(parameters)
    trained = [p for p in parameters if p.grad is not None]
    check_grid(trained, groups)
    square = torch.zeros((), dtype=torch.float64, device=parameters[0].device)
    for p in trained:
        # All ranks' squares are added. 2 x 2 ranks, tp cuts a matrix and leaves its bias whole:
        # each half of the matrix is on 4 / 2 = 2 ranks, the bias on 4 / 1 = 4
        copies = count_ranks(groups) / count_ranks(groups_cutting(p))
        square += torch.linalg.vector_norm(p.grad, dtype=torch.float64).square() / copies
    for group in groups if pipeline_group is None else [*groups, pipeline_group]:
        dist.all_reduce(square, group=group)  # one dimension after the other: the whole grid
    return square.sqrt()


def count_ranks(groups):
    return math.prod(dist.get_world_size(group) for group in groups)


# --- the same norm, of parts of gradients: for zero_in_grid.py, muon_in_grid.py and train.py


def norm_of_parts(parts, groups, device, pipeline_group=None):
    """norm_in_grid with three changes. ZeRO leaves a rank a shard of each gradient. A tied matrix
    counts once. Gradients with equally many copies are squared together, in few kernels.

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


# --- mistakes that would be silent: refused


def check_data_group(p, data_group):
    ranks = set(dist.get_process_group_ranks(data_group))
    for cut_over in groups_cutting(p):
        if len(ranks.intersection(dist.get_process_group_ranks(cut_over))) > 1:
            advice = "give a column; for experts data_group, their replicas or this rank alone"
            raise ValueError(f"a sum over {sorted(ranks)} would add different shards: {advice}")


def check_grid(parameters, groups):
    cut_over = set()
    for p in parameters:
        # Experts' groups need not be those of a grid of several: they are checked with one only
        if placed(p, "data", None) is None or len(groups) == 1:
            cut_over.update(groups_cutting(p))
    for group in cut_over:
        if not any(is_within(group, of_grid) for of_grid in groups):
            ranks = dist.get_process_group_ranks(group)
            raise ValueError(f"the norm lacks ranks of {ranks}: give all of the grid, [dp, tp]")


def is_within(inner, outer):
    ranks = set(dist.get_process_group_ranks(inner))
    return ranks.issubset(dist.get_process_group_ranks(outer))


# --- demo ---

import harness
import proof
import receipts.ddp
import receipts.tensor_parallel
import tensor_parallel
from receipts.formulas import Group, add, sizes_of


def flags():
    parser = harness.parser(__doc__)
    g = parser.add_argument_group("the grid")
    why = "ranks of a row, for tensor parallelism (default: 2)"
    g.add_argument("--tp", **harness.POSITIVE, help=why)
    return parser


def main():
    launch(flags().parse_args(), demo)


def launch(args, demo, check_column=lambda ranks: None):  # zero_in_grid.py has a check of its own
    config = harness.configure(args)

    def check(world):
        args.tp = args.tp or min(2, world)
        if world % args.tp:
            raise harness.Refused(f"--tp {args.tp} does not divide {world} ranks: give a divisor")
        tensor_parallel.check_heads(config, args.tp)
        harness.check_batch(args, world // args.tp)
        check_column(world // args.tp)

    proof.launch(demo, args, check=check)


def demo(run):
    args = run.args
    dp, tp = groups_along(-1, args.tp)
    run.groups(dp=dp, tp=tp)  # names for the receipt
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
        run.log()
    sizes, group = sizes_of(args, run.config, dp.size()), Group("dp", dp.size(), dp.rank())
    tensors, held = receipts.tensor_parallel.expected(sizes, Group("tp", args.tp))
    data, _ = receipts.ddp.expected(sizes, group, scalars=2)
    return run.receipt({"dp": dp.size(), "tp": args.tp}, add(tensors, data), held)


if __name__ == "__main__":
    harness.script(main)
