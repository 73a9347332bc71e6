"""Expert parallelism: each rank has some of the experts, and tokens travel to them and back.

A mixture replaces the one MLP of a block by E MLPs, the experts. A router, a linear layer, scores
the experts for each token. The token goes to the k best. y is the sum of their results, weighted by
the router's scores. Here E = 4, k = 2, and N = 2 ranks have 4 tokens each. Each digit is a row: a
copy of a token, on its way to the expert with that number. | separates the ranks.

             rows to send,        all-to-all:                sorted again,          all-to-all back:
             sorted by expert     from rank 0  from rank 1   for its experts        weigh, add up
    rank 0   0 0 1 | 2 2 2 3 3    0 0 1        0 1 1         0 0 0 1 1 1            y of 4 tokens
    rank 1   0 1 1 | 2 3 3 3 3    2 2 2 3 3    2 3 3 3 3     2 2 2 2 3 3 3 3 3 3    y of 4 tokens

Split: the experts, and the batch (each rank has its own tokens). A rank's experts are consecutive,
so rows that are sorted by expert are sorted by rank. How many rows go where depends on the routing:
ranks first exchange these counts, and the host (the CPU) waits for them. If routing is uneven, all
ranks wait for the fullest. A balance loss (mixture.py) or `capacity` makes it more even.

Sent: rows (dispatch), their results (combine), and in backward the gradients of both. A rank's n
tokens make k n rows of C elements; an element has e bytes. r = (N-1)/N of the rows leave the rank,
if routing is even: 4 r k n C e bytes per layer and micro-batch, and 8 r E bytes of counts.
Once a step: 2 r P e, to all-reduce the P other parameters.

Backward: each row's gradient goes back the way the row came. An expert sees all rows that chose it,
so its gradient needs no all-reduce. A rank divides its loss by the number of all ranks' tokens.
When not: with all experts on every rank data parallelism sends 4 r E H C e a step and layer for
them (two matrices of hidden width H), and no rows. That is less if a rank has more than E H / k
tokens a step (docs/learn/experts.md).

    torchrun --nproc_per_node=4 expert_parallel.py      python expert_parallel.py --experts 5

GShard (arXiv:2006.16668, section 2.2); Switch (2101.03961, 2.2); MegaBlocks (2211.15841).
"""

import math

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.autograd.function import once_differentiable

# --- the plain mixture: sort, send, compute, send back, add up


def plain_dispatch(x, router_weights, chosen, experts, expert_count, group):
    """Send each token of x (n, C) to its k experts. Returns the weighted sums of their results,
    (n, C). router_weights, chosen: (n, k). Each of N ranks has expert_count / N experts, a whole
    number: experts(rows, rows_per_expert) computes those of this rank. rows (m, C) come sorted by
    expert, and the results (m, C) keep that order."""
    world = dist.get_world_size(group)
    if torch.is_grad_enabled() and not x.requires_grad:  # x comes from frozen layers
        # Else a rank whose experts get no rows would not join the all-to-alls of backward
        x = x.detach().requires_grad_()
    # Sort by expert, and so by rank. Each token makes k rows: choice i is of token i // k
    order = chosen.flatten().argsort(stable=True)  # (n k,)
    token_of_row = order // chosen.shape[1]
    # Send: first how many rows there are for each expert, then the rows
    outgoing = chosen.flatten().bincount(minlength=expert_count)
    outgoing = outgoing.view(world, expert_count // world)  # to each rank, for each of its experts
    incoming = torch.empty_like(outgoing)  # from each rank, for each expert here
    dist.all_to_all_single(incoming, outgoing, group=group)
    send_counts = outgoing.sum(1).tolist()  # rows to each rank. The host waits
    receive_counts = incoming.sum(1).tolist()  # rows from each rank
    rows = AllToAll.apply(x[token_of_row], send_counts, receive_counts, group)  # (m, C)
    # Compute: sort again, by expert, and run this rank's experts
    results = run_experts(experts, rows, incoming)
    # Send back
    results = AllToAll.apply(results, receive_counts, send_counts, group)  # (n k, C), as sent
    # Weigh and add up
    results = results * router_weights.flatten()[order].unsqueeze(1)  # these may be float32
    return torch.zeros_like(x).index_add(0, token_of_row, results.to(x.dtype))


class AllToAll(torch.autograd.Function):
    """Rows (sum(send_counts), C) -> (sum(receive_counts), C): send_counts[r] rows go to rank r. It
    only moves rows, so backward moves their gradients back."""

    @staticmethod
    def forward(ctx, rows, send_counts, receive_counts, group):
        ctx.way_back = receive_counts, send_counts, group  # the same, with the counts swapped
        arrived = rows.new_empty(sum(receive_counts), rows.shape[1])
        dist.all_to_all_single(arrived, rows.contiguous(), receive_counts, send_counts, group=group)
        return arrived

    @staticmethod
    def backward(ctx, gradient):
        return AllToAll.apply(gradient, *ctx.way_back), None, None, None


def run_experts(experts, rows, incoming):
    """rows (m, C) arrived sorted by rank. Sorts them by expert, runs the experts, and returns the
    results in the order of arrival. incoming (N, local_experts): how many rows each rank sent to
    each expert, such as [[2, 1], [1, 2]] for rows of the experts 0 0 1 0 1 1."""
    world, local_experts = incoming.shape
    local_number = torch.arange(local_experts, device=rows.device).repeat(world)
    # output_size is known: without it the host would wait for the device
    expert_of_row = local_number.repeat_interleave(incoming.flatten(), output_size=len(rows))
    by_expert = expert_of_row.argsort(stable=True)
    rows = rows.index_select(0, by_expert)
    results = experts(rows, incoming.sum(0))
    if len(rows) == 0:
        # Experts may skip an empty batch. The sum keeps results connected to rows in autograd's
        # graph: else this rank would not join the all-to-alls of backward
        results = results + rows.to(results.dtype)
    return results.index_select(0, by_expert.argsort())  # the inverse permutation


# --- whose parameters: experts are split, the rest is replicated


def experts_of_ranks(expert_count, world):
    """How many experts each rank has. If they don't divide, the first ranks have one more."""
    if expert_count < world:
        raise ValueError(f"{expert_count} experts are too few for {world} ranks: each needs one")
    each, extra = divmod(expert_count, world)
    return [each + 1] * extra + [each] * (world - extra)


def shard_experts(parameter, group, data_group=None):
    """Cut a parameter (E, ...) to this rank's experts. Returns a new parameter: put it in the old
    one's place, and then make the optimizer. Its `placement` tells sums, norms and checkpoints
    which part it is, by dimension: {"cuts": {0: (group, 4, 2)}} is two experts from number 4 on. Of
    experts that are modules write it yourself: docs/use/two-techniques.md.

    data_group: the ranks that hold the same experts, if data parallelism has more ranks than
    `group`. Their gradients must be summed over it: "data" tells DDP and ZeRO. (These need a group
    of this rank alone where there are no replicas.)"""
    group = group or dist.group.WORLD
    rank = dist.get_rank(group)
    sizes = experts_of_ranks(len(parameter), dist.get_world_size(group))
    part = parameter.detach().split(sizes)[rank].clone()
    part = nn.Parameter(part, requires_grad=parameter.requires_grad)
    part.__dict__.update(parameter.__dict__)  # keep attributes of other techniques
    placement = {"shape": tuple(parameter.shape), "cuts": {}} | getattr(parameter, "placement", {})
    cuts = placement["cuts"] | {0: (group, sum(sizes[:rank]), sizes[rank])}
    part.placement = placement | {"cuts": cuts, "data": data_group}
    return part


def groups_splitting(parameter):
    """The groups whose ranks have different parts of a parameter."""
    cuts = getattr(parameter, "placement", {}).get("cuts", {})
    return [group for group, _, _ in cuts.values()]


def sum_replicated_gradients(parameters, group):
    """Sum the gradients of all parameters that are not split over the group, in one all-reduce.
    Call it once a step, after the last backward pass. With a data_group call it a second time, over
    that: it has replicas of experts and of all else."""
    group = group or dist.group.WORLD
    replicated = [p for p in parameters if p.requires_grad and group not in groups_splitting(p)]
    if not replicated:
        return
    for p in replicated:
        if p.grad is None:  # zeros: if it were skipped on one rank only, replicas would drift apart
            p.grad = torch.zeros_like(p)
        check_sum(p, group)
    flat = torch.cat([p.grad.flatten() for p in replicated])
    dist.all_reduce(flat, group=group)
    for p, total in zip(replicated, flat.split([p.numel() for p in replicated])):
        p.grad.data.copy_(total.view_as(p))  # .data leaves _version as it is, for check_sum


# --- a model of yours: each of N ranks has some tokens x (n, C), and E / N of the experts
#
#     for p in model.parameters():  # all ranks start alike, with all experts
#         dist.broadcast(p.data, group_src=0, group=group)
#     model.up = shard_experts(model.up, group)  # (E, H, C) -> this rank's experts
#     model.down = shard_experts(model.down, group)  # (E, C, H). Now make the optimizer
#
#     def mlps(rows, rows_per_expert):
#         parts = zip(rows.split(rows_per_expert.tolist()), model.up, model.down)
#         return torch.cat([F.gelu(part @ up.T) @ down.T for part, up, down in parts])
#
#     for x, targets in microbatches:
#         weights, chosen = model.router(x).softmax(-1).topk(k)  # router: nn.Linear(C, E)
#         y = plain_dispatch(x, weights, chosen, mlps, E, group)
#         loss = F.cross_entropy(model.head(y), targets, reduction="sum")
#         loss = loss / target_count  # the targets of all ranks and micro-batches
#         # An even load needs a balance loss, added here: mixture.py
#         loss.backward()
#     sum_replicated_gradients(model.parameters(), group)  # then step
#
# Faster, and for an E that N does not divide, as in the demo: dispatch = ExpertDispatch(E, group),
# then y = dispatch(x, weights, chosen, mlps). A norm to clip by must count all ranks' experts:
# composition.py's norm_in_grid does. docs/fix/not-checked.md lists mistakes that nothing catches.

# --- the all-to-all in two halves: computation fits in between


class Transfer:
    """Rows on their way: an AllToAll in two halves, each a node of autograd's graph.

                Start                        Wait
    forward     sends rows            -->    waits for rows
    backward    waits for gradients   <--    sends gradients

    Autograd runs nodes in the reverse of forward's order, which is the same on all ranks. So in
    backward, too, the n-th message of a rank meets the n-th of the others."""

    def __init__(self, send_counts, receive_counts, group, before_wait):
        self.counts = send_counts, receive_counts
        self.group, self.before_wait = group, before_wait

    def start(self, rows, send_counts, receive_counts):
        self.rows = rows.contiguous()  # must live until it is sent
        self.arriving = rows.new_empty(sum(receive_counts), rows.shape[1])
        self.work = dist.all_to_all_single(
            self.arriving, self.rows, receive_counts, send_counts, group=self.group, async_op=True
        )
        return rows.new_empty(0)  # in autograd's graph it leads from Start to Wait

    def wait(self):
        self.before_wait()
        self.work.wait()
        arrived = self.arriving
        self.arriving = self.rows = self.work = None  # frees the memory
        return arrived


class Start(torch.autograd.Function):
    @staticmethod
    def forward(ctx, rows, transfer):
        ctx.transfer = transfer
        return transfer.start(rows, *transfer.counts)

    @staticmethod
    @once_differentiable  # a gradient of a gradient is refused: these messages have no backward
    def backward(ctx, empty):
        return ctx.transfer.wait(), None


class Wait(torch.autograd.Function):
    @staticmethod
    def forward(ctx, empty, transfer):
        ctx.transfer = transfer
        return transfer.wait()

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient):
        return ctx.transfer.start(gradient, *reversed(ctx.transfer.counts)), None


# --- overlap: one chunk of the tokens is computed while others travel


class ExpertDispatch(nn.Module):
    """plain_dispatch, overlapped: y = dispatch(x, router_weights, chosen, experts). Call send() and
    combine() in its place where something else can be computed between them, such as an MLP that
    every token passes. With 2 chunks:

        computed   that MLP       experts of chunk 0   experts of chunk 1   sums of 0    sums of 1
        travels    rows of 0, 1   rows of 1            results of 0         results of 1

    expert_count  E, any number from N on
    capacity      an expert takes at most capacity k n / E of a rank's rows (drop_late). None: all
    chunks        how many parts the tokens are cut into
    before_wait   called before each wait: dualpipe.py runs another micro-batch there

    All ranks must run as many forwards and backwards, with the same numbers of experts and chunks:
    otherwise they wait for ever. A rank without tokens gives x (0, C). Experts that get no rows
    return an empty result of the usual dtype."""

    def __init__(self, expert_count, group, capacity=None, chunks=1, before_wait=lambda: None):
        super().__init__()
        self.expert_count, self.group = expert_count, group
        self.experts_per_rank = experts_of_ranks(expert_count, dist.get_world_size(group))
        self.capacity, self.chunks, self.before_wait = capacity, chunks, before_wait

    def forward(self, x, router_weights, chosen, experts):
        return self.combine(self.send(x, router_weights, chosen), experts)

    def send(self, x, router_weights, chosen):
        """Sort the rows of each chunk, and send them."""
        if self.capacity is not None:
            chosen = drop_late(chosen, self.expert_count, self.capacity)
        # Every rank must have all all-to-alls in its graph: x may come from frozen layers
        if torch.is_grad_enabled() and not x.requires_grad:
            x = x.detach().requires_grad_()
        choices = chosen.tensor_split(self.chunks)
        counts = self.exchange_counts([part.flatten() for part in choices])
        parts = x.tensor_split(self.chunks), router_weights.tensor_split(self.chunks), choices
        return [Chunk(self, *arguments) for arguments in zip(*parts, *counts)]

    def combine(self, sent, experts):
        for chunk in sent:
            chunk.compute(experts)
        return torch.cat([chunk.add_up() for chunk in sent])

    def exchange_counts(self, choices):
        """Tell every rank how many rows it gets. choices: each chunk's (n k,). Returns, for each
        chunk, how many rows go to each rank, how many come from it (two lists), and how many come
        from each rank for each expert here, (N, local_experts)."""
        sizes = self.experts_per_rank
        world, local_experts = len(sizes), sizes[dist.get_rank(self.group)]
        # A dropped choice has the number E. If none can be dropped, a chosen E is out of bounds
        slots = self.expert_count if self.capacity is None else self.expert_count + 1
        outgoing = choices[0].new_zeros(slots, len(choices))
        for i, chosen in enumerate(choices):  # not bincount, for which the host would wait
            outgoing[:, i].scatter_add_(0, chosen, torch.ones_like(chosen))
        outgoing = outgoing[: self.expert_count]  # (E, chunks): a rank gets those of its experts
        incoming = outgoing.new_empty(world * local_experts, len(choices))
        dist.all_to_all_single(incoming, outgoing, [local_experts] * world, sizes, group=self.group)
        incoming = incoming.view(world, local_experts, -1)  # (N, local_experts, chunks)
        to_ranks = torch.stack([part.sum(0) for part in outgoing.split(sizes)])  # (N, chunks)
        counts = torch.stack((to_ranks.T, incoming.sum(1).T))  # (2, chunks, N)
        send_counts, receive_counts = counts.tolist()  # the host waits for the device, once
        return send_counts, receive_counts, incoming.unbind(2)


class Chunk:
    """Part of the tokens: plain_dispatch in three steps. Between them rows travel."""

    def __init__(self, dispatch, x, router_weights, chosen, send_counts, receive_counts, incoming):
        self.x, self.router_weights, self.incoming = x, router_weights, incoming
        # Dropped choices come last, and are cut off
        self.order = chosen.flatten().argsort(stable=True)[: sum(send_counts)]
        self.token_of_row = self.order // chosen.shape[1]
        options = dispatch.group, dispatch.before_wait
        self.to_experts = Transfer(send_counts, receive_counts, *options)
        self.from_experts = Transfer(receive_counts, send_counts, *options)
        self.started = Start.apply(x.index_select(0, self.token_of_row), self.to_experts)

    def compute(self, experts):
        rows = Wait.apply(self.started, self.to_experts)
        self.started = Start.apply(run_experts(experts, rows, self.incoming), self.from_experts)

    def add_up(self):
        results = Wait.apply(self.started, self.from_experts)
        results = results * self.router_weights.flatten()[self.order].unsqueeze(1)
        y = torch.zeros_like(self.x)
        return y.index_add(0, self.token_of_row, results.to(y.dtype))


# --- capacity: an expert refuses rows beyond its share


def drop_late(chosen, expert_count, capacity):
    """chosen (n, k), with E in place of each choice that is dropped. An expert takes at most
    ceil(capacity k n / E) of this rank's rows: first choices before second ones, then earlier
    tokens before later ones."""
    n, k = chosen.shape
    choices = chosen.t().flatten()  # (k n,): all first choices, all second ones, ...
    one_hot = choices.unsqueeze(1) == torch.arange(expert_count, device=choices.device)  # (k n, E)
    place_in_queue = one_hot.cumsum(0).gather(1, choices.unsqueeze(1))  # (k n, 1), from 1
    late = place_in_queue.view(k, n).t() > math.ceil(capacity * k * n / expert_count)
    return chosen.masked_fill(late, expert_count)


# --- mistakes that would be silent: refused


def check_sum(parameter, group):
    """Refuse a group whose ranks hold different experts: the sum would mix their gradients. Refuse
    a second sum over the group. And have autograd refuse a backward pass after the sum, which would
    add an unsummed gradient."""
    ranks = set(dist.get_process_group_ranks(group))
    for other in groups_splitting(parameter):
        if len(ranks.intersection(dist.get_process_group_ranks(other))) > 1:
            advice = "sum over the group that they are split over, then over data_group"
            raise ValueError(f"ranks of this group hold different experts: {advice}")
    refuse_summed(parameter, group.group_name)
    gradient = parameter.grad
    # The sum will leave this version as it is. None: of the last sum, over whatever group
    versions = {None: gradient._version, group.group_name: gradient._version}
    gradient.versions_summed = getattr(gradient, "versions_summed", {}) | versions
    if not hasattr(parameter, "watched_for_sums"):
        # The hook runs before backward adds to the gradient
        parameter.register_hook(lambda _: refuse_summed(parameter, None))
        parameter.watched_for_sums = True


def refuse_summed(parameter, group_name):
    """torch raises a tensor's _version with every change in place (zeroing, clipping): an equal one
    says that nothing has happened since the sum."""
    version = getattr(parameter.grad, "versions_summed", {}).get(group_name)
    unchanged = version is not None and version == parameter.grad._version
    # any(): under a FLOP counter zero_grad() leaves _version as it is
    if unchanged and parameter.grad.any():
        raise RuntimeError(
            "this gradient is summed over the ranks already: sum once a step, after the last "
            "backward pass, and call zero_grad() before the next one"
        )


# --- for model.py's GPT ---


def parallelize_experts(model, group, data_group=None, **options):
    """Give each rank of the group some experts of a GPT, in place, with weights or on the meta
    device. Call it before you make the optimizer; with tensor parallelism after
    parallelize_tensors."""
    for mixture in [block.mlp for block in model.blocks.values()]:
        for name, p in list(mixture.experts.named_parameters()):
            setattr(mixture.experts, name, shard_experts(p, group, data_group))
        mixture.dispatch = ExpertDispatch(model.config.experts, group, **options)
    return model


# --- demo ---

import harness
import proof
import receipts.expert_parallel
from mixture import rebalance


def main():
    parser = harness.parser(__doc__, experts=8, balance_loss=0.01)
    g = parser.add_argument_group("expert parallelism")
    why = "parts of a rank's tokens: one is computed while others travel"
    g.add_argument("--chunks", **harness.POSITIVE, default=2, help=why)
    receipts.expert_parallel.flags(g)  # --capacity, --bias-rate
    args = parser.parse_args()
    config = harness.configure(args)
    receipts.expert_parallel.check(args, config)

    def check(world):  # before the ranks start
        harness.check_batch(args, world)
        experts_of_ranks(config.experts, world)

    proof.launch(demo, args, check=check)


def demo(run):
    args, group = run.args, dist.group.WORLD
    run.groups(ep=group)  # its name in the receipt
    options = dict(capacity=args.capacity, chunks=args.chunks)
    model = run.fill(parallelize_experts(run.meta_model(), group, **options))
    parameters = list(model.parameters())
    optimizer = harness.make_optimizer(parameters, args)
    report = receipts.expert_parallel.Report(run, model)
    for step in run.steps(optimizer):
        optimizer.zero_grad(set_to_none=False)  # gradients stay in memory: the receipt counts them
        loss = run.zero()
        for tokens, targets, samples in run.microbatches(step, run.rank, run.world):
            # target_count: the tokens of the global batch
            part = model(tokens, targets=targets, target_count=run.target_count, sample_ids=samples)
            part.backward()
            loss += part.detach()
        sum_replicated_gradients(parameters, group)
        dist.all_reduce(loss, group=group)
        norm = harness.grad_norm(parameters)  # over the experts of all ranks
        run.check(loss, norm, model.named)  # kept, to compare with one process at the end
        harness.clip(parameters, norm, args.grad_clip)
        optimizer.step()
        run.log()
        report.after(step)
        # Zeroes the routers' loads; with --bias-rate moves their biases towards an even one
        rebalance(model, lambda load: dist.all_reduce(load, group=group))
    report.show_load()
    return run.receipt({"ep": run.world, "chunks": args.chunks}, *report.of_demo())


if __name__ == "__main__":
    harness.script(main)
