"""Several kinds of parallelism at once, each along one dimension of a grid of ranks.

                                tp 0: half of W        tp 1: the other half
    dp 0: half of the batch     rank 0                 rank 1                  a row has all of W
    dp 1: the other half        rank 2                 rank 3
                                a column has one half of W: its ranks add up their gradients

Order     First a technique cuts the model: its tensors, its experts or its layers. Then DDP, ZeRO,
          FSDP or Muon train what is left on a rank as if it were a whole model, with its column as
          the data-parallel ranks. All that they need to know of the cut is the groups.
Groups    Over which ranks is a parameter's gradient summed? Over a column: its ranks have the same
          shard and saw other data. Not over a row: backward has completed the gradients there, also
          those of parameters that are not cut, such as LayerNorm's (tensor_parallel.py's Enter).
          There are three exceptions: experts, parameters that saw a part of the tokens, and a
          matrix on two stages of a pipeline. groups_in_grid() below answers for each parameter.
Norm      Every element counts once. A rank squares its part of each gradient and divides by the
          number of ranks that have the same part. All ranks of the grid add these up, and then
          the stages of a pipeline do.
Sent      As by each alone, but data parallelism sends only a rank's shards. For the norm
          2 r 8 bytes per group, r = (n-1)/n of its n ranks. What sends most goes into the rows, on
          neighbours in a node: here tp.

    torchrun --nproc_per_node=4 -m advanced.composition

The demo runs seven recipes on a grid of 2 columns. Copied flat it needs model, mixture and what it
combines: context_parallel, ddp, expert_parallel, fsdp, pipeline, tensor_parallel, zero and
zero_bubble. docs/use/two-techniques.md has loops for your own model.

Narayanan et al. 2021, arXiv:2104.04473, section 3. Zhao et al. 2023 (HSDP), arXiv:2304.11277.
"""

import argparse
import math
from functools import partial
from typing import NamedTuple

import torch
import torch.distributed as dist

# --- the grid


def groups_along(*sizes):
    """This rank's group along each dimension of the grid. One size may be -1, for the rest. In the
    last dimension ranks are neighbours. With a pipeline: dp, pp, tp = groups_along(-1, 2, 2)."""
    grid = torch.arange(dist.get_world_size()).view(sizes)
    groups = []
    for d, size in enumerate(grid.shape):
        lines = grid.movedim(d, -1).reshape(-1, size)  # along d. In the picture for dp: 0 2, 1 3
        own, _ = dist.new_subgroups_by_enumeration(lines.tolist())  # all ranks make all groups
        groups.append(own)
    return groups


# --- the plainest form: tensor parallelism along the rows, data parallelism along the columns


def sum_and_clip(parameters, column, row, limit):
    """After the last backward: complete each p.grad, and scale all of them so that their norm is at
    most `limit`. Returns the norm.

    parameters    of a model that parallelize_tensors(model, row) has cut. Each p.grad is of a loss
                  that is a sum over the row's part of the batch, divided by the number of all
                  ranks' targets
    column, row   this rank's groups: column, row = groups_along(-1, 2)"""
    parameters, square = list(parameters), 0.0
    for p in parameters:
        dist.all_reduce(p.grad, group=column)  # the column has the same shard, and saw other data
        copies = 1 if groups_cutting(p) else row.size()  # ranks of the row with the same part
        square += p.grad.double().square().sum() / copies
    dist.all_reduce(square, group=row)  # the row has all shards
    norm = square.sqrt()
    torch.nn.utils.clip_grads_with_norm_(parameters, limit, norm)
    return norm


# --- over which ranks each gradient is summed, by any technique
#
# p.placement is a dict: what a technique did to p. Without it, as for a row-parallel layer's bias,
# p is whole on every rank of a row.
#
#     "cuts"     {dimension: (group, start, length)}: this rank has [start : start + length] of that
#                dimension, the group's other ranks the rest. up.weight (512, 128) on tp rank 1 of
#                2: {0: (tp, 256, 256)}, rows 256 to 511. The dimension None: p is whole, but the
#                group's other ranks have other parameters in its place, such as other experts
#     "data"     of an expert: the ranks with a replica of it that saw other tokens. Sum over them,
#                not over a column. Without replicas: this rank alone, groups_along(-1, 1)[1]
#     "partial"  [tp]: sum over tp, too. With sequence parallelism LayerNorm's weight is whole, but
#                each tp rank's saw a part of the tokens. Or [ends], of a tied matrix: the first and
#                the last stage have a copy each, with a part of its gradient. ends: a group of only
#                these two ranks, because the pipeline's others do not join the sum
#     "shape"    of the whole parameter


def groups_in_grid(parameters, data_group):
    """The groups_of that DDP, ZeRO, FSDP and Muon take: a function p -> (data group, *partial), the
    groups over which p's gradient is summed. ZeRO and FSDP shard over the first one.

    data_group    this rank's column, or for HSDP a pair of groups: see ZeRO

    Before the split all ranks have equal weights. Call it on all ranks, because those of a
    "partial" group compare their parameters: they must hold the same ones in the same order. Raises
    ValueError if they don't, and if p is cut over data_group: a sum would add different shards."""
    parameters = [p for p in parameters if p.requires_grad]
    for p in parameters:
        check_data_group(p, placed(p, "data", data_group))
    check_order(parameters)

    def groups_of(p):
        return (placed(p, "data", data_group), *placed(p, "partial", ()))

    return groups_of


def placed(p, key, default):
    """An entry of p.placement."""
    return getattr(p, "placement", {}).get(key) or default


def groups_cutting(p):
    """The groups whose ranks have different shards of p."""
    return [group for group, _, _ in placed(p, "cuts", {}).values()]


# --- the norm, in which each element counts once


def norm_in_grid(parts, groups, pipeline_group=None):
    """The norm of the whole gradient: a float64 scalar, the same on all ranks.

    parts             gradient_parts() of ZeRO, FSDP or Muon; with DDP whole_gradients(parameters)
    groups            of the dimensions of the grid whose ranks have shards or copies of the same
                      parameters: [dp, tp]. dp, too: ZeRO's shards and cut experts lie along it
    pipeline_group    pp, if there is one. Its ranks have other parameters: don't put it into groups
                      (not checked). A tied matrix, on two of its ranks, counts once"""
    device = parts[0][0].device
    parts = [part for part in parts if part[1] is not None]
    check_grid([p for p, _, _ in parts], groups)
    gradients = {}  # {number of ranks that have the same part: gradients}
    for p, gradient, shards in parts:
        # All ranks' squares are added, so divide by the number of ranks that have the same part. On
        # 2 x 2 ranks tp cuts a matrix, but not its bias: each half of the matrix is on 4 / 2 = 2
        # ranks, the bias on 4. If ZeRO splits them over the 2 ranks of dp: on half as many
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
            dist.all_reduce(square, group=group)  # dimension by dimension: the whole grid
    return square.sqrt()


def whole_gradients(parameters):
    """The parts of a rank whose gradients no data-parallel rank shards."""
    return [(p, p.grad, 1) for p in parameters]


def count_ranks(groups):
    return math.prod(dist.get_world_size(group) for group in groups)


# --- Muon's iteration, which needs whole matrices


def on_whole_matrices(update_of):
    """Muon(..., update=on_whole_matrices(update_of)), beside a technique that cuts matrices.

    Momentum and weight decay work element by element: they stay with the shards. All columns deal
    out their shards alike, so the owners of a matrix's shards are in one row of the grid. They
    gather the direction (what is to be orthogonalised). Each orthogonalises the whole, and keeps
    its own part."""

    def update(direction, p, dtype=None):
        # The matrix is p's last two dimensions: a cut of an earlier one deals out whole experts. If
        # p has matrix_rows, each head is a matrix of its own, and a cut of rows lies between heads
        within = [p.dim() - 1] if hasattr(p, "matrix_rows") else [p.dim() - 2, p.dim() - 1]
        cuts = [(dim, cut) for dim, cut in placed(p, "cuts", {}).items() if dim in within]
        if not cuts:
            return update_of(direction, p, dtype)
        [(dim, (group, start, length))] = cuts  # tensor parallelism cuts in one dimension
        shards = [torch.empty_like(direction) for _ in range(dist.get_world_size(group))]
        dist.all_gather(shards, direction, group=group)
        # Without the padding of the last shards, so that the scale is that of the true shape
        whole = torch.cat(shards, dim).narrow(dim, 0, p.placement["shape"][dim])
        own = update_of(whole, p, dtype).narrow(dim, start, length)
        part = torch.zeros_like(p)  # padded again
        part.narrow(dim, 0, length).copy_(own)
        return part

    return update


# --- mistakes that would be silent: refused


def check_data_group(p, data_group):
    ranks = set()
    for group in data_group if isinstance(data_group, tuple) else [data_group]:
        ranks.update(dist.get_process_group_ranks(group))
    for cut_over in groups_cutting(p):
        if len(ranks.intersection(dist.get_process_group_ranks(cut_over))) > 1:
            advice = "give a column; for experts data_group, their replicas or this rank alone"
            raise ValueError(f"a sum over {sorted(ranks)} would add different shards: {advice}")


def check_order(parameters):
    """Partial sums are added bucket by bucket, so a group's ranks must list the same parameters in
    the same order. Before the first step parameters with equal values are taken for the same."""
    held = {}  # {group: of each parameter its shape and first elements}
    for p in parameters:
        for group in placed(p, "partial", ()):
            first = p.detach().flatten()[:16].tolist() if has_memory(p) else None
            held.setdefault(group, []).append((tuple(p.shape), first))
    for group in sorted(held, key=dist.get_process_group_ranks):  # on all ranks in one order
        found = [None] * dist.get_world_size(group)
        dist.all_gather_object(found, held[group], group=group)
        if any(other != held[group] for other in found):
            ranks = dist.get_process_group_ranks(group)
            advice = "list them alike, with equal weights"
            raise ValueError(f"ranks {ranks} share parameters in another order: {advice}")


def has_memory(p):  # not on the meta device, nor expanded from one element
    return not p.is_meta and p.untyped_storage().nbytes() >= p.nbytes


def check_grid(parameters, groups):
    cut_over = set()
    for p in parameters:
        # In a grid of several dimensions experts may be cut over a group that is none of them
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

if __name__ == "__main__":  # importing this file needs no other
    from context_parallel import Ring, parallelize_context, shard_sequence
    from ddp import DDP
    from expert_parallel import experts_of_ranks, parallelize_experts
    from fsdp import FSDP
    from model import GPT, IGNORE, Config, OneProcess, Sent, join_ranks, leave, text_batch
    from pipeline import Schedule, gpt_stages, make_links, one_f_one_b, open_links
    from tensor_parallel import parallelize_tensors
    from zero import ZeRO
    from zero_bubble import SplitPipeline, zb_v

AdamW = torch.optim.AdamW
M, L, T, C, EXPERTS = 4, 4, 32, 32, 5  # micro-batches; layers, context, width of the model


class Recipe(NamedTuple):
    sums: object  # DDP, ZeRO or FSDP; None for the plain form
    run: object  # (tokens, targets, count) -> the loss of this rank's tokens, after all backwards
    data: object  # the group whose ranks have other rows of the batch
    grid: list  # of norm_in_grid
    formula: object  # number of this rank's rows -> the bytes that it sends, but for the norm
    pp: object = None  # this rank's pipeline
    stages: object = None  # {stage: module}: its part of the model


def plain(model, one, dp, tp):
    parallelize_tensors(model, tp)
    formula = partial(tensor_bytes, tp, 2 * r(dp) * size_of(model.parameters()))
    return Recipe(None, micro_batches(model), dp, [tp], formula)


def tensor_zero(model, one, dp, tp):
    parallelize_tensors(model, tp)
    groups_of = groups_in_grid(model.parameters(), dp)
    zero = ZeRO(model, dp, 1, AdamW, M, groups_of=groups_of)
    formula = partial(tensor_bytes, tp, 2 * r(dp) * zero_size(zero))
    return Recipe(zero, micro_batches(model), dp, [dp, tp], formula)


def fsdp_context(model, one, dp, cp):
    everyone, ring = dist.group.WORLD, Ring(cp)  # all have the same weights, and other tokens
    parallelize_context(model, ring)
    fsdp = FSDP(model, everyone, AdamW, microbatches=M)
    held = ring.positions(T).to(fsdp.buckets[0].shard.device)

    def shard(x, y):  # padding must have some position
        return shard_sequence(x, held), held.clamp(max=T - 1), shard_sequence(y, held, IGNORE)

    def formula(rows):
        keys = rows * cp.size() * len(held) * C * 8
        hops = 4 * r(cp) + 2 if cp.size() > 1 else 0  # with one rank dK and dV are at home
        return L * hops * keys + r(everyone) * gathered(fsdp)

    return Recipe(fsdp, micro_batches(model, shard), dp, [everyone], formula)


def hsdp(model, one, across, node):
    fsdp = FSDP(model, (node, across), AdamW, microbatches=M)
    sent = r(node) * gathered(fsdp) + 2 * r(across) * zero_size(fsdp) / node.size()
    run, everyone = micro_batches(model), dist.group.WORLD
    return Recipe(fsdp, run, everyone, [node, across], lambda rows: sent)


def experts_ddp(model, one, copies, ep):
    everyone, chosen = dist.group.WORLD, []  # by the routers of one process: (B, T, k) each
    for block in one.model.blocks.values():
        block.mlp.router.register_forward_hook(
            lambda router, inputs, output: chosen.append(output[1])
        )
    parallelize_experts(model, ep, copies)
    parameters = list(model.parameters())
    sync = DDP(parameters, everyone, M, groups_of=groups_in_grid(parameters, everyone))

    def formula(rows):
        sizes = experts_of_ranks(EXPERTS, ep.size())
        owners = torch.arange(ep.size()).repeat_interleave(torch.tensor(sizes))
        owner = owners[torch.stack(chosen[-L:]).cpu()].tensor_split(everyone.size(), dim=1)
        sent = (owner[everyone.rank()] != ep.rank()).sum().item()  # rows; each comes back
        for rank in set(dist.get_process_group_ranks(ep)) - {everyone.rank()}:
            sent += (owner[rank] == ep.rank()).sum().item()
        sent = 2 * sent * C * 8 + L * M * (EXPERTS - sizes[ep.rank()]) * 8
        experts = size_of(p for p in parameters if groups_cutting(p))
        others = size_of(parameters) - experts
        return sent + 2 * r(copies) * experts + 2 * r(everyone) * others

    return Recipe(sync, micro_batches(model), everyone, [everyone], formula)


def pipeline_zero(model, one, dp, pp, split=False):
    ranks, m, make_row = pp.size(), 2 * pp.size(), zb_v if split else one_f_one_b
    schedule = Schedule(make_row(rank, ranks, m) for rank in range(ranks))
    held, last = schedule.stages(pp.rank()), schedule.last
    stages = gpt_stages(model, last + 1, held)
    # The groups of a pipeline. All ranks make those of all pipelines
    pipelines = torch.arange(dist.get_world_size()).view(-1, ranks)
    links = [make_links(row) for row in pipelines.tolist()][dp.rank()]
    ends = sorted({schedule.owner[0], schedule.owner[last]})
    both_ends, _ = dist.new_subgroups_by_enumeration(pipelines[:, ends].tolist())
    for part in stages.values() if len(ends) > 1 else ():
        for name, p in part.named():
            if name == "embed.token.weight":  # tied: each end has a copy, and a part of the sum
                p.placement = {"partial": [both_ends]}
    parameters = [p for part in stages.values() for p in part.parameters()]
    zero = ZeRO(stages, dp, 1, AdamW, m, groups_of=groups_in_grid(parameters, dp))
    dtype, device = torch.float64, parameters[0].device
    open_links(links, schedule, device)

    def run(tokens, targets, count):
        inputs, answers = tokens.chunk(m), targets.chunk(m)

        def forward(stage, i, x):  # the last stage has the head, and returns the loss
            x = inputs[i] if x is None else x
            return stages[stage](x, targets=answers[i], target_count=count)

        given = schedule, forward, (2, T, C), dtype, device, links
        losses = SplitPipeline(*given, around=zero.around).run()
        return sum(losses, torch.zeros((), dtype=dtype, device=device))

    def formula(rows):
        neighbours = [n for stage in held for n in (stage - 1, stage + 1) if 0 <= n <= last]
        borders = sum(n not in held for n in neighbours)  # a rank may have both sides of one
        tied = sum(bucket.gradient_shard.nbytes for bucket in zero.buckets if bucket.partial)
        return borders * rows * T * C * 8 + 2 * r(dp) * zero_size(zero) + tied

    return Recipe(zero, run, dp, [dp], formula, pp, stages)


RECIPES = {  # {name: (recipe, fields of the model's Config)}
    "plain": (plain, {}),
    "tensor x ZeRO": (tensor_zero, {}),
    "FSDP x context": (fsdp_context, dict(tied=False)),
    "HSDP": (hsdp, dict(tied=False)),
    "experts x DDP": (experts_ddp, dict(experts=EXPERTS, hidden=C)),
    "1F1B x ZeRO": (pipeline_zero, {}),
    "zero bubble x ZeRO": (partial(pipeline_zero, split=True), {}),
}


def micro_batches(model, shard=lambda x, y: (x, None, y)):
    def run(tokens, targets, count):
        total = torch.zeros_like(count, dtype=torch.float64)
        for x, y in zip(tokens.tensor_split(M), targets.tensor_split(M)):
            x, positions, y = shard(x, y)
            loss = model(x, positions, y, count)  # the sum over y, divided by count
            loss.backward()
            total += loss.detach()
        return total

    return run


# What each sends alone, as its own file says


def r(group):
    return (group.size() - 1) / group.size()


def size_of(parameters):
    return sum(p.nbytes for p in parameters)


def zero_size(zero):
    return sum(bucket.weights.nbytes for bucket in zero.buckets)  # with padding


def gathered(fsdp):  # m (3 P - P') e
    last = sum(bucket.weights.nbytes for bucket in fsdp.units[-1].buckets)
    return M * (3 * zero_size(fsdp) - last)


def tensor_bytes(tp, of_data, rows):
    return of_data + 2 * r(tp) * rows * T * 8 * ((4 * L + 2) * C + 3)


def main():
    parser = argparse.ArgumentParser(description="train a GPT with each recipe, and prove it")
    parser.add_argument("--steps", type=int, default=3)
    why = "ranks of a row of the grid: 1 or 2, as four layers make four stages of zb-v"
    parser.add_argument("--row", type=int, default=2, choices=(1, 2), help=why)
    args = parser.parse_args()
    device = join_ranks()
    for name in RECIPES:
        train(name, args, device)
    leave()


def train(name, args, device):
    recipe, fields = RECIPES[name]
    torch.manual_seed(0)  # all ranks draw equal weights
    model = GPT(Config(layers=L, width=C, context=T, **fields)).to(device, torch.float64)
    one, (column, row) = OneProcess(model, AdamW), groups_along(-1, args.row)
    sums, run, data, grid, formula, pp, stages = recipe(model, one, column, row)
    parts = [model] if stages is None else stages.values()
    named = {p: (name, p) for part in parts for name, p in part.named()}  # each once
    sharded = not (sums is None or isinstance(sums, DDP))
    optimizer = sums if sharded else AdamW(named)
    if dist.get_rank() == 0:
        print(f"{name}, {dist.get_world_size()} ranks, {args.row} in a row")
    for step in range(args.steps):
        rows = 4 * dist.get_world_size() + (0 if pp else 1)  # unequally many, but in a pipeline
        batch = text_batch(step, rows, T, device)
        tokens, targets = (whole.tensor_split(data.size())[data.rank()] for whole in batch[:2])
        with Sent() as sent:
            (sums or optimizer).zero_grad()
            loss = run(tokens, targets, batch[2])
            if sums is None:
                sum_and_clip(named, column, row, 0.5)
            elif sharded:
                sums.clip(norm_in_grid(sums.gradient_parts(), grid, pp), 0.5)
            else:
                sums.finish()
                norm = norm_in_grid(whole_gradients(named), grid, pp)
                torch.nn.utils.clip_grads_with_norm_(named, 0.5, norm)
            optimizer.step()
        dist.all_reduce(loss, group=data)
        if pp or name == "FSDP x context":  # a rank has its part of the row's loss, too
            dist.all_reduce(loss, group=row)
        alone = one.train_step(*batch, 0.5)
        full = sums.gather_full(named.values()) if sharded else named.values()
        one.compare(step, loss, alone, full)
    norm_bytes = sum(2 * r(group) * 8 for group in [*grid, *([pp] if pp else [])])
    one.prove(sent, "the formulas", formula(len(tokens)) + norm_bytes)


if __name__ == "__main__":
    main()
