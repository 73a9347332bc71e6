"""Expert parallelism: each rank has some of the experts, and tokens travel to them and back.

A mixture replaces the one MLP of a block by E MLPs, the experts. A router, a linear layer, scores
the experts for each token. The token goes to the k best. y is the sum of their results, weighted by
the router's scores. Here E = 4, k = 2, and N = 2 ranks have 4 tokens each. Each digit is a row: a
copy of a token, on its way to the expert with that number. | separates the ranks.

             rows to send,        all-to-all:                sorted again,          all-to-all back:
             sorted by expert     from rank 0  from rank 1   for its experts        weigh, add up
    rank 0   0 0 1 | 2 2 2 3 3    0 0 1        0 1 1         0 0 0 1 1 1            y of 4 tokens
    rank 1   0 1 1 | 2 3 3 3 3    2 2 2 3 3    2 3 3 3 3     2 2 2 2 3 3 3 3 3 3    y of 4 tokens

Split     The experts, and the batch: each rank has its own tokens. A rank's experts are neighbours,
          so rows that are sorted by expert are sorted by rank. How many rows go where depends on
          the routing. So ranks first exchange these counts, and the host (the CPU) waits for them.
          All ranks wait for the one that gets the most rows: mixture.py makes routing even, by a
          loss, and by a bias that needs rebalance(model, dist.all_reduce) here.
Sent      Rows, their results, and in backward the gradients of both: per layer and micro-batch
          4 r k n C e bytes, and 8 r E of counts. A rank's n tokens make k n rows of C elements of
          e bytes. r = (N-1)/N of the rows leave the rank, if routing is even. Once a step: 2 r P e,
          to all-reduce the gradients of the P other parameters.
Backward  Each row's gradient goes back the way the row came. An expert sees all rows that chose it,
          so its gradient needs no all-reduce, if a rank divides its loss by all ranks' targets.
Limits    Plain data parallelism, with all experts on every rank, sends 4 r E H C e a step and layer
          for them (two matrices of hidden width H), and no rows. That is less once a rank has more
          than E H / k tokens a step (docs/learn/experts.md).

    torchrun --nproc_per_node=4 expert_parallel.py           (needs model.py and mixture.py)

GShard (arXiv:2006.16668, section 2.2); Switch (2101.03961, 2.2); MegaBlocks (2211.15841).
"""

import argparse

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.autograd.function import once_differentiable

# --- the plain form: sort, send, compute, send back, add up


def plain_dispatch(x, router_weights, chosen, experts, expert_count, group, all_to_all=None):
    """Send each token of x (n, C) to its k experts. Returns the weighted sums of their results,
    (n, C).

    router_weights, chosen  (n, k)
    experts                 experts(rows, rows_per_expert) -> results, of this rank's experts. rows
                            (m, C) come sorted by expert, and results (m, C) keep that order
    expert_count            E, which N must divide: each of N ranks has E / N experts
    all_to_all              in place of AllToAll.apply, as in dualpipe.py

    Backward hangs unless x requires a gradient on every rank, and experts(rows (0, C), ...) returns
    a result that is connected to rows (F.linear's is, torch.zeros is not)."""
    all_to_all = all_to_all or AllToAll.apply
    world = dist.get_world_size(group)
    # Sort by expert, and so by rank. Each token makes k rows: choice i is of token i // k
    order = chosen.flatten().argsort(stable=True)  # (k n,)
    token_of_row = order // chosen.shape[1]
    # Send: first how many rows there are for each expert, then the rows
    counts_out = chosen.flatten().bincount(minlength=expert_count).view(world, -1)
    counts_in = torch.empty_like(counts_out)  # from each rank, for each expert here
    dist.all_to_all_single(counts_in, counts_out, group=group)
    send_counts = counts_out.sum(1).tolist()  # rows to each rank
    receive_counts = counts_in.sum(1).tolist()  # rows from each rank
    rows = x.index_select(0, token_of_row)  # (k n, C)
    rows = all_to_all(rows, send_counts, receive_counts, group)  # (m, C)
    # Compute: sort again, by expert, and run this rank's experts
    results = run_experts(experts, rows, counts_in)
    # Send back
    results = all_to_all(results, receive_counts, send_counts, group)  # (k n, C), as sent
    # Weigh and add up
    results = results * router_weights.flatten()[order].unsqueeze(1)
    return torch.zeros_like(x).index_add(0, token_of_row, results)


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


def run_experts(experts, rows, counts_in):
    """rows (m, C) arrived sorted by rank. Sorts them by expert, runs the experts, and returns the
    results in the order of arrival. counts_in (N, local_experts): how many rows each rank sent to
    each expert, such as [[2, 1], [1, 2]] for rows of the experts 0 0 1 0 1 1."""
    world, local_experts = counts_in.shape
    local_number = torch.arange(local_experts, device=rows.device).repeat(world)
    # output_size is known: without it the host would wait for the device
    expert_of_row = local_number.repeat_interleave(counts_in.flatten(), output_size=len(rows))
    by_expert = expert_of_row.argsort(stable=True)
    results = experts(rows.index_select(0, by_expert), counts_in.sum(0))
    return results.index_select(0, by_expert.argsort())  # the inverse permutation


# --- whose parameters: experts are split, the rest is replicated


def experts_of_ranks(expert_count, world):
    """How many experts each rank has. If N doesn't divide E, the first ranks have one more."""
    if expert_count < world:
        raise ValueError(f"{expert_count} experts are too few for {world} ranks: each needs one")
    each, extra = divmod(expert_count, world)
    return [each + 1] * extra + [each] * (world - extra)


def shard_experts(parameter, group, data_group=None):
    """Cut a parameter (E, ...) to this rank's experts. Returns a new parameter: put it in the old
    one's place, and then make the optimizer. Its `placement` tells sums, norms and checkpoints
    which part it is, by dimension: {"cuts": {0: (group, 4, 2)}} is two experts from number 4 on.
    Where each expert is a module of its own, write it yourself: docs/use/two-techniques.md.

    data_group: the ranks that hold the same experts, if data parallelism has more ranks than
    `group`. DDP and ZeRO read it in the placement ("data"), and sum the experts' gradients over it.
    If no other rank holds these experts, give DDP and ZeRO a group of this rank alone,
    dist.new_subgroups(1)[0]: otherwise they would add up different experts."""
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
    that: it has replicas of experts and of everything else. Clip by norm_with_experts, because
    clip_grad_norm_ would count only this rank's experts, and ranks would scale differently."""
    group = group or dist.group.WORLD
    replicated = [p for p in parameters if p.requires_grad and group not in groups_splitting(p)]
    if not replicated:
        return
    for p in replicated:
        if p.grad is None:  # zeros: if it were skipped on one rank only, replicas would drift apart
            p.grad = torch.zeros_like(p)
    flat = torch.cat([p.grad.flatten() for p in replicated])
    dist.all_reduce(flat, group=group)
    for p, total in zip(replicated, flat.split([p.numel() for p in replicated])):
        p.grad.copy_(total.view_as(p))


def norm_with_experts(parameters, group):
    """The norm of the whole gradient, after sum_replicated_gradients, the same on every rank: give
    it to torch.nn.utils.clip_grads_with_norm_."""
    group, parameters = group or dist.group.WORLD, list(parameters)
    device = parameters[0].device
    experts, others = torch.zeros(2, dtype=torch.float64, device=device)  # sums of squares
    for p in parameters:
        if p.grad is not None:
            square = torch.linalg.vector_norm(p.grad, dtype=torch.float64).square()
            total = experts if group in groups_splitting(p) else others
            total += square
    dist.all_reduce(experts, group=group)  # each expert is on one rank of the group
    return (experts + others).sqrt()


# --- overlap: one chunk of the tokens is computed while others travel


class ExpertDispatch(nn.Module):
    """plain_dispatch, overlapped: y = dispatch(x, router_weights, chosen, experts). Or call send()
    and combine(), and between them compute something else: here the shared MLP, which every token
    goes through. With 2 chunks:

        computed   shared MLP     experts of chunk 0   experts of chunk 1   sums of 0    sums of 1
        travels    rows of 0, 1   rows of 1            results of 0         results of 1

    expert_count  E, any number from N on
    chunks        how many parts the tokens are cut into
    before_wait   called before each wait: dualpipe.py runs another micro-batch there

    All ranks must run the same number of forwards and backwards, with the same numbers of experts
    and chunks: otherwise they wait for ever. A rank without tokens gives x (0, C). Experts that get
    no rows must return an empty result of the usual dtype."""

    def __init__(self, expert_count, group, chunks=1, before_wait=lambda: None):
        super().__init__()
        self.expert_count, self.group = expert_count, group
        self.experts_per_rank = experts_of_ranks(expert_count, dist.get_world_size(group))
        self.chunks, self.before_wait = chunks, before_wait

    def forward(self, x, router_weights, chosen, experts):
        return self.combine(self.send(x, router_weights, chosen), experts)

    def send(self, x, router_weights, chosen):
        """Sort the rows of each chunk, and send them."""
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
        """Tell every rank how many rows it gets. choices: (k n,) of each chunk. Returns three
        lists, with one entry for each chunk:

        send_counts     [N]: how many rows go to each rank
        receive_counts  [N]: how many come from each rank
        counts_in       (N, local_experts): how many come from each rank for each expert here"""
        sizes = self.experts_per_rank
        world, local_experts = len(sizes), sizes[dist.get_rank(self.group)]
        counts_out = choices[0].new_zeros(self.expert_count, len(choices))  # (E, chunks)
        for i, chosen in enumerate(choices):  # not bincount, for which the host would wait
            counts_out[:, i].scatter_add_(0, chosen, torch.ones_like(chosen))
        counts_in = counts_out.new_empty(world * local_experts, len(choices))
        dist.all_to_all_single(
            counts_in, counts_out, [local_experts] * world, sizes, group=self.group
        )
        counts_in = counts_in.view(world, local_experts, -1)  # (N, local_experts, chunks)
        to_ranks = torch.stack([part.sum(0) for part in counts_out.split(sizes)])  # (N, chunks)
        counts = torch.stack((to_ranks.T, counts_in.sum(1).T))  # (2, chunks, N)
        send_counts, receive_counts = counts.tolist()  # the host waits for the device, once
        return send_counts, receive_counts, counts_in.unbind(2)


class Chunk:
    """Part of the tokens: plain_dispatch in three steps. Between them rows travel."""

    def __init__(self, dispatch, x, router_weights, chosen, send_counts, receive_counts, counts_in):
        self.x, self.router_weights, self.counts_in = x, router_weights, counts_in
        self.order = chosen.flatten().argsort(stable=True)
        self.token_of_row = self.order // chosen.shape[1]
        options = dispatch.group, dispatch.before_wait
        self.to_experts = Transfer(send_counts, receive_counts, *options)
        self.from_experts = Transfer(receive_counts, send_counts, *options)
        self.started = Start.apply(x.index_select(0, self.token_of_row), self.to_experts)

    def compute(self, experts):
        rows = Wait.apply(self.started, self.to_experts)
        results = run_experts(experts, rows, self.counts_in)
        if len(rows) == 0:
            # Experts may skip an empty batch. The sum keeps results connected to rows in autograd's
            # graph: otherwise this rank would not join the all-to-alls of backward
            results = results + rows.to(results.dtype)
        self.started = Start.apply(results, self.from_experts)

    def add_up(self):
        results = Wait.apply(self.started, self.from_experts)
        self.started = None  # frees the memory, when the results are weighed
        results = results * self.router_weights.flatten()[self.order].unsqueeze(1)
        y = torch.zeros_like(self.x)
        return y.index_add(0, self.token_of_row, results.to(y.dtype))


class Transfer:
    """Rows on their way: an AllToAll in two halves, each a node of autograd's graph.

                Start                        Wait
    forward     sends rows            -->    waits for rows
    backward    waits for gradients   <--    sends gradients

    Between Start and Wait autograd passes one tensor: in forward the buffer that rows arrive in, in
    backward the gradients that are being sent. Nobody may read it there. Autograd runs nodes in the
    reverse of forward's order, which is the same on all ranks. So in backward as in forward the
    n-th message of a rank meets the n-th of the others."""

    def __init__(self, send_counts, receive_counts, group, before_wait):
        self.counts = send_counts, receive_counts
        self.group, self.before_wait = group, before_wait

    def start(self, rows, send_counts, receive_counts):
        self.rows = rows.contiguous()  # must live until it is sent
        self.arriving = rows.new_empty(sum(receive_counts), rows.shape[1])
        self.work = dist.all_to_all_single(
            self.arriving, self.rows, receive_counts, send_counts, group=self.group, async_op=True
        )
        return self.arriving

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
        return transfer.start(rows, *transfer.counts)  # not to be read yet

    @staticmethod
    @once_differentiable  # a gradient of a gradient is refused: these messages have no backward
    def backward(ctx, being_sent):
        return ctx.transfer.wait(), None


class Wait(torch.autograd.Function):
    @staticmethod
    def forward(ctx, arriving, transfer):
        ctx.transfer = transfer
        return transfer.wait()

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient):
        ctx.transfer.start(gradient, *reversed(ctx.transfer.counts))
        return gradient, None


# --- for model.py's GPT ---


class PlainDispatch(nn.Module):
    """plain_dispatch for mixture.py, which calls send(), then combine()."""

    def __init__(self, expert_count, group, all_to_all=None):
        super().__init__()
        self.options = expert_count, group, all_to_all

    def send(self, x, router_weights, chosen):
        return x, router_weights, chosen

    def combine(self, sent, experts):
        return plain_dispatch(*sent, experts, *self.options)


def parallelize_experts(model, group, data_group=None, dispatch=ExpertDispatch, **options):
    """Give each rank of the group some experts of a GPT, in place, with weights or on the meta
    device. Call it before you make the optimizer; with tensor parallelism after
    parallelize_tensors. options: of the dispatch, such as chunks=2."""
    for mixture in [block.mlp for block in model.blocks.values()]:
        for name, p in list(mixture.experts.named_parameters()):
            setattr(mixture.experts, name, shard_experts(p, group, data_group))
        mixture.dispatch = dispatch(model.config.experts, group, **options)
    return model


# --- demo ---

if __name__ == "__main__":  # importing this file needs no model.py
    from mixture import rebalance
    from model import GPT, Config, OneProcess, Sent, join_ranks, leave, text_batch


def main():
    parser = argparse.ArgumentParser(description="train a GPT with each dispatch, and prove it")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--experts", type=int, help="any number from N on (default: 2 N + 1)")
    parser.add_argument("--chunks", type=int, default=3, help="parts of a rank's tokens")
    parser.add_argument("--balance-loss", type=float, default=0.01, help="factor of this loss")
    args = parser.parse_args()
    device = join_ranks()
    ranks = dist.get_world_size()
    even, uneven = 2 * ranks, args.experts or 2 * ranks + 1
    train("the plain form", even, 0, args, device, dispatch=PlainDispatch)
    train("in one part", uneven, 0, args, device)
    train(
        f"in {args.chunks} chunks, with a shared MLP", uneven, 1, args, device, chunks=args.chunks
    )
    leave()


def train(name, expert_count, shared, args, device, **options):
    group, rank, ranks = dist.group.WORLD, dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    sizes = dict(layers=2, width=32, hidden=32, context=32, experts=expert_count, shared=shared)
    config = Config(**sizes, balance_loss=args.balance_loss, bias_rate=0.01)
    model = GPT(config).to(device, torch.float64)
    one, chosen = OneProcess(model, torch.optim.AdamW), []
    for block in one.model.blocks.values():
        block.mlp.router.register_forward_hook(
            lambda router, inputs, output: chosen.append(output[1])
        )
    parallelize_experts(model, group, **options)
    optimizer = torch.optim.AdamW(model.parameters())
    if rank == 0:
        print(f"{name}, {ranks} ranks, {expert_count} experts")
    for step in range(args.steps):
        tokens, targets, count = text_batch(step, 4 * ranks + 1, 32, device)
        sequences = torch.arange(len(tokens)).tensor_split(ranks)  # of each rank, unequally many
        loss = torch.zeros_like(count, dtype=torch.float64)
        optimizer.zero_grad()
        with Sent() as sent:
            for micro_batch in sequences[rank].tensor_split(2):
                x, y = tokens[micro_batch], targets[micro_batch]
                part = model(x, targets=y, target_count=count)  # the sum over y, divided by count
                part.backward()
                loss += part.detach()
            sum_replicated_gradients(model.parameters(), group)
        norm = norm_with_experts(model.parameters(), group)
        torch.nn.utils.clip_grads_with_norm_(model.parameters(), 0.5, norm)
        optimizer.step()
        rebalance(model, dist.all_reduce)  # the load of all ranks' tokens
        dist.all_reduce(loss)
        chosen.clear()
        alone = one.train_step(tokens, targets, count, 0.5)
        rebalance(one.model)
        one.compare(step, loss, alone, model.named_parameters())
    size = sum(p.nbytes for p in model.parameters() if not groups_splitting(p))
    chunks = options.get("chunks", 1)
    one.prove(sent, *formula(torch.stack(chosen), sequences, expert_count, chunks, size))


def formula(chosen, sequences, expert_count, chunks, size):
    """What this rank sends in a step, as text and in bytes. chosen (layers, B, T, k): by the
    routers of one process. sequences: the numbers of each rank's. size: bytes of the others."""
    rank, ranks, layers = dist.get_rank(), len(sequences), len(chosen)
    sizes = torch.tensor(experts_of_ranks(expert_count, ranks))
    ranks_of_experts = torch.arange(ranks).repeat_interleave(sizes).to(chosen.device)
    to_here = ranks_of_experts[chosen] == rank
    from_here = torch.zeros_like(to_here)
    from_here[:, sequences[rank]] = True
    travelled = (to_here != from_here).sum().item()  # rows that leave this rank, or come to it
    counts = 2 * layers * chunks * (expert_count - sizes[rank].item()) * 8  # of 2 micro-batches
    r = (ranks - 1) / ranks
    text = "2 (rows out + rows in) C e, and counts, + 2 r P e"
    return text, 2 * travelled * 32 * 8 + counts + 2 * r * size  # C is 32, e is 8


if __name__ == "__main__":
    main()
