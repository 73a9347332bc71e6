"""Expert parallelism: the experts of every mixture are dealt out over the ranks, and tokens travel
to them and back.

A mixture has E MLPs, the experts, where a block has one. A router, a linear layer, scores them for
each token; the k best take it, and their results are added up, times the router's weights.

What is split, on N ranks (here 2), with E experts (here 4): the experts, each of them whole on one
rank; and the batch, as in data parallelism: each rank has tokens of its own. Weights stay at home.

             router      sort by expert        dispatch: all-to-all       experts       combine: all-to-all, add up
    rank 0   x (n,C) --> 0 0 1   2 2 2 3 3 --> 0 0 1 (mine) 0 1 1     --> 0 and 1 --> the results go back the same way,
    rank 1   x (n,C) --> 0 1 1   2 3 3 3 3 --> 2 2 2 3 3    2 3 3 3 3 --> 2 and 3 --> times the router's weight: y (n,C)
                         ----- to rank 0       from rank 0  from rank 1
                                 --------- to rank 1

What is sent: a rank's experts are a contiguous run, so tokens sorted by expert are sorted by rank
too: what a rank gets is one piece of the sorted rows. How long each piece is depends on the
routing, so first the counts travel (one number for each expert), and are read, once a layer: the
only time that the device has to be waited for.

    counts      all-to-all of E integers               in backward: nothing
    dispatch    all-to-all of the rows, uneven         in backward: the same, the other way round
    combine     all-to-all of the results, back home   in backward: the same, the other way round

Overlap: tokens are cut into chunks. All chunks' dispatches start at once; while the first chunk is
computed the second travels, and what is computed travels home meanwhile. The shared expert, which
needs no other rank, runs during the dispatch.

Backward: an all-to-all moves rows and adds nothing, so a row's gradient goes back where the row
came from. Backward is forward's mirror image: an operation's start is its wait's backward, and the
other way round. Autograd runs it in the reverse order, the same on every rank, so all-to-alls meet
their partners. Weights and rows meet on the token's own rank, so the router's gradient needs no
message. An expert sees its tokens of the whole batch, and every rank's loss is divided by the
tokens of the whole batch: so its gradient is complete as it is. All else is summed over the ranks,
in one all-reduce; nothing is averaged. Which expert a token goes to is a step function of its
scores: two that differ by less than rounding may swap, and then one token goes elsewhere than in
one process. In float64 that is as good as never: --dtype float64 proves it to 1e-10.

What it costs, per rank and layer, r = (N-1)/N, n tokens here, e bytes an element: with even routing
4 r k n C e in forward and backward together (dispatch and combine, twice), and 8 r E a chunk for
the counts. At w bytes/s that is 2 r e f / (9 H w) of the experts' own time, 18 k n C H flops
(SwiGLU with H hidden units) at f flop/s; chunks hide it as far as that is below 1. Held: E/N of the
experts, of their gradients and optimizer states. Nothing is dropped, however uneven the routing:
the fullest rank keeps the others waiting, and holds as many rows as come. Even load is trained for,
by a loss on the router (`--balance-loss`) or a bias on its choice (`--bias-rate`). A capacity F
bounds it: of the n tokens of a rank no expert takes more than F k n / E, first choices before
second; the others pass by in the residual stream. What is dropped depends on how the batch is cut:
then no layout equals another.

When it is the wrong choice: over slow links, since it sends in every layer and much of it can't be
hidden. And where all experts fit on every rank: data parallelism sends 2 r e for each of their
weights instead, once a step: less, if a step's n is more than 1.5 E H / k (SwiGLU; E H / k with
GELU).

    torchrun --nproc_per_node=4 expert_parallel.py          python expert_parallel.py --experts 5 --shared 1 --chunks 4

Papers: Lepikhin et al. 2020, GShard, arXiv:2006.16668, section 2.2 (dispatch, capacity); Fedus et
al. 2021, Switch, arXiv:2101.03961, section 2.2; Gale et al. 2022, MegaBlocks, arXiv:2211.15841
(dropless); Wang et al. 2024, arXiv:2408.15664 (the bias).
"""

import math
import time

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.autograd.function import once_differentiable  # refuses a gradient of a gradient


class Transfer:
    """An all-to-all of rows (N, C): send[r] of them go to rank r, receive[r] come from it. In
    backward the other way round.

    times: a list to which each passage adds [started, done, wait began, wait ended]; or None."""

    def __init__(self, send, receive, group, times=None):
        self.send, self.receive, self.group, self.times = send, receive, group, times

    def start(self, rows, back=False):
        """Sends rows (N, C) on their way; returns where the others' will be after `wait`."""
        send, receive = (self.receive, self.send) if back else (self.send, self.receive)
        self.rows = rows.contiguous()  # must live until it is sent
        self.out = rows.new_empty(sum(receive), rows.shape[1])
        self.clock = [time.perf_counter(), None, None, None]
        self.work = dist.all_to_all_single(
            self.out, self.rows, receive, send, group=self.group, async_op=True
        )
        if self.times is not None:
            clock = self.clock
            self.work.get_future().add_done_callback(
                lambda _: clock.__setitem__(1, time.perf_counter())
            )
        return self.out

    def wait(self):
        """The rows that have arrived."""
        self.clock[2] = time.perf_counter()
        self.work.wait()
        self.clock[3] = time.perf_counter()
        if self.times is not None:
            self.times.append(self.clock)
        out, self.out, self.rows, self.work = self.out, None, None, None
        return out


class Start(torch.autograd.Function):
    """Sends rows on their way. In backward: waits for the gradients, which Wait's backward sent."""

    @staticmethod
    def forward(ctx, rows, transfer):
        ctx.transfer = transfer
        return transfer.start(rows)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        return ctx.transfer.wait(), None


class Wait(torch.autograd.Function):
    """Waits for rows that Start sent. In backward: sends their gradients on the way back, for
    Start's backward to wait for."""

    @staticmethod
    def forward(ctx, rows, transfer):
        ctx.transfer = transfer
        return transfer.wait().view_as(rows)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        ctx.transfer.start(grad, back=True)
        # Stands in for what Start's backward will have: autograd wants the shape of `rows`
        return grad, None


def all_to_all(rows, send, receive, group):
    """rows (sum(send), C) -> (sum(receive), C), differentiable."""
    transfer = Transfer(send, receive, group)
    return Wait.apply(Start.apply(rows, transfer), transfer)


class ExpertDispatch(nn.Module):
    """Tokens to their experts on all ranks and back: x (n, C), weights and chosen (n, k) -> (n, C).
    An assignment is one of a token's k choices: number i is of token i // k.

        sizes = expert_counts(E, N)                        # N ranks; here are `sizes[rank]` experts
        dispatch = ExpertDispatch(sizes, group)
        mlp.up, mlp.down = shard(mlp.up, group), shard(mlp.down, group)    # stacked (E, ...)
        y = dispatch(x, weights, chosen, mlp)              # chosen: int64, 0..E-1
        loss = F.cross_entropy(head(y), targets, reduction="sum") / count
        loss.backward()                                    # count: the global batch's tokens
        sum_gradients(model.parameters(), group)           # once a step, after all micro-batches

    experts(rows, counts): the MLPs of this rank. rows (m, C) are sorted by expert; counts says how
    many rows each expert here has, int64. Returns (m, C), row for row. m may be 0; the result's
    dtype must not depend on it.
    meanwhile(): called once, while rows travel. Compute there what needs no expert (a shared MLP).

    sum_gradients leaves a parameter alone if its `placement` says that it is split. `shard` gives
    it one. Where each expert is a module of its own, write it: p.placement = {"cuts":
    {0: (group, start, size)}}, or {} if all experts share the parameter.
    All ranks call this equally often, and backward too, or the others wait for ever. A rank without
    tokens gives x (0, C). All ranks have the same `sizes` and `chunks`.

    sizes: how many experts each rank has. `rows` (E,) adds up how many assignments of this rank
    each expert got, `dropped` how many none got, `travelled` how many rows left for another rank or
    came from one; all in every forward, recomputation's too.

    Raises ValueError for `sizes` that are not one number a rank, for inputs and results of other
    shapes, and for a chosen expert that `sizes` do not have."""

    def __init__(self, sizes, group, capacity=None, chunks=1):
        super().__init__()
        if len(sizes) != dist.get_world_size(group):
            have = f"{list(sizes)} for {dist.get_world_size(group)} ranks"
            raise ValueError(f"sizes must be one number of experts a rank of the group, not {have}")
        self.sizes, self.group, self.capacity, self.chunks = sizes, group, capacity, chunks
        self.rows = self.dropped = self.travelled = 0
        self.times = None
        self.noted = False

    def drop(self, chosen):
        """`chosen` with the number E where an expert is beyond its capacity. All first choices go
        before all second ones."""
        (n, k), experts = chosen.shape, sum(self.sizes)
        line = chosen.t().flatten()  # (k n,)
        # (k n, E)
        place = (line.unsqueeze(1) == torch.arange(experts, device=line.device)).cumsum(0)
        # (n, k): 1 for the first in the expert's line
        place = place.gather(1, line.unsqueeze(1)).view(k, n).t()
        late = place > math.ceil(self.capacity * k * n / experts)
        self.dropped = self.dropped + late.sum()
        return chosen.masked_fill(late, experts)

    def read(self, sizes, assignments):
        """A tensor's values as lists: the one wait for the device. Replace it where tensors have no
        values (meta, fake): by (rows to send, rows to receive), chunks x N each, of a chunk's
        number of `assignments`."""
        return sizes.tolist()

    def announce(self, parts):
        """How many rows go where, and what comes from where. parts: each chunk's assignments, as
        numbers of experts.

        Returns the rows to send and to receive, chunks x N each; and those that come for each
        expert here, (N, experts here, chunks), on the device."""
        me, world = dist.get_rank(self.group), len(self.sizes)
        counts = torch.stack(
            [
                p.new_zeros(sum(self.sizes) + 1).scatter_add_(0, p, torch.ones_like(p))
                for p in parts
            ],
            dim=1,
        )
        counts = counts[:-1].contiguous()  # (E, chunks), without the dropped
        self.rows = self.rows + counts.sum(1)
        coming = counts.new_empty(world * self.sizes[me], self.chunks)
        began = time.perf_counter()
        dist.all_to_all_single(
            coming, counts, [self.sizes[me]] * world, self.sizes, group=self.group
        )
        if self.times is not None:
            self.times.append([began, None, began, time.perf_counter()])
        coming = coming.view(world, self.sizes[me], self.chunks)
        going = torch.stack([of_rank.sum(0) for of_rank in counts.split(self.sizes)])  # (N, chunks)
        both = torch.stack((going, coming.sum(1))).transpose(1, 2)
        send, receive = self.read(both, [len(part) for part in parts])
        self.travelled += sum(sum(n) - n[me] for n in (*send, *receive))
        return send, receive, coming

    def note(self, experts):
        """Mark the parameters of `experts`: without a placement, sum_gradients refuses them."""
        self.noted = True
        if isinstance(experts, nn.Module):
            for p in experts.parameters():
                p.of_experts = True

    def forward(self, x, weights, chosen, experts, meanwhile=lambda: None):
        if x.dim() != 2 or weights.shape != chosen.shape or chosen.shape[:-1] != x.shape[:1]:
            shapes = (
                f"{tuple(x.shape)}, {tuple(weights.shape)} and {tuple(chosen.shape)}: flatten them"
            )
            raise ValueError(f"x must be (n, C), weights and chosen (n, k), not {shapes}")
        if not self.noted:
            self.note(experts)
        if self.capacity is not None:
            chosen = self.drop(chosen)
        k, world, mine = chosen.shape[1], len(self.sizes), self.sizes[dist.get_rank(self.group)]
        parts = [part.flatten() for part in chosen.tensor_split(self.chunks)]
        # Assignments by expert, then by token; the dropped last
        by_expert = [part.argsort(stable=True) for part in parts]
        send, receive, coming = self.announce(parts)
        if self.capacity is None and sum(map(sum, send)) != chosen.numel():
            have = f"the {sum(self.sizes)} of sizes {list(self.sizes)}"
            raise ValueError(f"a token chose an expert beyond {have}: give other sizes or choices")

        # 1. All chunks' rows leave; the shared expert, in `meanwhile`, needs none of them
        journeys = []
        for part, order, s, r in zip(x.tensor_split(self.chunks), by_expert, send, receive):
            there = Transfer(s, r, self.group, self.times)
            tokens = order[: sum(s)] // k
            journeys.append((tokens, there, Start.apply(part.index_select(0, tokens), there)))
        meanwhile()

        # 2. Each chunk, as it arrives: from (source, expert, token) order into (expert, source,
        # token), computed, sent home
        expert = torch.arange(mine, device=x.device).repeat(world)
        for c, (tokens, there, rows) in enumerate(journeys):
            rows = Wait.apply(rows, there)
            # output_size: else repeat_interleave would wait for the device, to learn what is known
            # here
            order = expert.repeat_interleave(
                coming[..., c].flatten(), output_size=len(rows)
            ).argsort(stable=True)
            rows = self.compute(experts, rows.index_select(0, order), coming[..., c].sum(0))
            rows = rows.index_select(0, order.argsort())
            home = Transfer(receive[c], send[c], self.group, self.times)
            journeys[c] = tokens, home, Start.apply(rows, home)

        # 3. Each chunk, as it comes home: added up, times the router's weights
        zeros, weights, added = (
            torch.zeros_like(x).tensor_split(self.chunks),
            weights.tensor_split(self.chunks),
            [],
        )
        for (tokens, home, rows), order, weight, y in zip(journeys, by_expert, weights, zeros):
            rows = Wait.apply(rows, home) * weight.flatten()[order[: len(tokens)]].unsqueeze(1)
            added.append(y.index_add(0, tokens, rows))
        return torch.cat(added)

    def compute(self, experts, rows, counts):
        """experts(rows, counts), of the right shape, and part of the graph even where no row
        came."""
        result = experts(rows, counts)
        if result.shape != rows.shape:
            shapes = f"the shape of its rows {tuple(rows.shape)}, not {tuple(result.shape)}"
            raise ValueError(f"experts(rows, counts) must return {shapes}")
        # Experts may skip an empty batch. Then this adds no value, but a path from the result to
        # `rows`: without it this rank would not join the all-to-alls of backward.
        return result if len(rows) else result + rows.to(result.dtype)


def placement(parameter):
    """What a parameter is a piece of: {"shape": of the whole, "cuts": {dimension: (group, start,
    size)}, "copies": the groups whose ranks hold the same piece}."""
    default = {"shape": tuple(parameter.shape), "cuts": {}, "copies": []}
    return default | getattr(parameter, "placement", {})


def split_over(parameter, group):
    """Whether each rank of the group holds another piece of the parameter."""
    return any(group is other for other, _, _ in placement(parameter)["cuts"].values())


def shard(parameter, group, copies=None):
    """This rank's experts of a parameter (E, ...). Its `placement` says what they are a piece of.

    copies: where data parallelism has more ranks than `group`, the group of those that hold the
    same experts for other tokens (Megatron's expert data parallel group). Data parallelism must sum
    their gradients over it: it is the placement's "data". Where E does not divide, the first ranks
    have one more: expert_counts says how many.

    The result is a new parameter: put it in the old one's place, then make the optimizer. deepcopy
    loses its `placement`. Raises ValueError for a parameter whose experts are dealt out already."""
    group, whole = group or dist.group.WORLD, placement(parameter)
    if 0 in whole["cuts"]:
        raise ValueError("the experts of this parameter are dealt out already: shard it once")
    rank, sizes = dist.get_rank(group), expert_counts(len(parameter), dist.get_world_size(group))
    start = sum(sizes[:rank])
    part = parameter.detach()[start : start + sizes[rank]].clone()
    part = nn.Parameter(part, requires_grad=parameter.requires_grad)
    part.__dict__.update(parameter.__dict__)
    cuts = whole["cuts"] | {0: (group, start, sizes[rank])}
    part.placement = whole | {"cuts": cuts, "data": copies}
    return part


def expert_counts(experts, world):
    """How many experts each rank has."""
    return [experts // world + (r < experts % world) for r in range(world)]


SUMMED = (
    "these gradients have been summed already: call sum_gradients once a step, after the last "
    "micro-batch, and zero_grad() before the next backward"
)


def sum_gradients(parameters, group):
    """After a step's last backward: sums the gradients of replicated parameters over the group, in
    one all-reduce. Experts are split over it, as their `placement` says: theirs are complete.

    Where `copies` hold the same experts, call it with `group`, then with `copies`.
    A parameter without a gradient here counts as zeros. One without a gradient on any rank gets
    zeros, so weight decay moves it. Frozen parameters are left out.
    A parameter without a placement counts as replicated. The first call compares sums of weights
    between ranks: experts that no module holds and that start alike (from zeros, say) pass.

    Raises RuntimeError if gradients were summed over the group before. The next backward raises it
    too, unless zero_grad() comes first; it does not see that after a clip of the sums.
    Raises ValueError for experts without a placement, and for weights that differ between ranks."""
    group = group or dist.group.WORLD
    parameters = replicated(parameters, group)
    check_replicas(parameters, group)
    for p in parameters:
        if hasattr(p, "of_experts") and not hasattr(p, "placement"):
            raise ValueError(
                f"experts' parameter {tuple(p.shape)} has no placement, so gradients of different "
                "experts would be added up: cut it by shard(), or see ExpertDispatch"
            )
        if p.grad is None:
            p.grad = torch.zeros_like(p)
        elif group.group_name in getattr(p.grad, "summed", ()) and p.grad.any():
            raise RuntimeError(SUMMED)
    flat = torch.cat([p.grad.flatten() for p in parameters])
    dist.all_reduce(flat, group=group)
    for p, total in zip(parameters, flat.split([p.numel() for p in parameters])):
        p.grad.copy_(total.view_as(p))
        p.grad.summed = [*getattr(p.grad, "summed", ()), group.group_name]  # can be pickled
        p.grad.summed_version = p.grad._version


def replicated(parameters, group):
    """Those that are trained and not split over the group."""
    return [p for p in parameters if p.requires_grad and not split_over(p, group)]


def refuse_summed(parameter):
    """A hook, after backward has added to a gradient: raises RuntimeError if nothing else (such as
    zeroing it) has changed the gradient since sum_gradients."""
    grad = parameter.grad
    if hasattr(grad, "summed"):
        if grad._version == grad.summed_version + 1:
            raise RuntimeError(SUMMED)
        del grad.summed


def check_replicas(parameters, group):
    """Raises ValueError unless parameters are the same on all ranks. Looks at each only once."""
    new = [p for p in parameters if group.group_name not in getattr(p, "compared", ())]
    if not new:
        return
    weights = [(tuple(p.shape), p.detach().sum(dtype=torch.float64).item()) for p in new]
    everyone = [None] * dist.get_world_size(group)
    dist.all_gather_object(everyone, weights, group=group)
    for other in everyone:
        if other != weights:
            differ = sorted({shape for shape, _ in set(weights) ^ set(other)})
            raise ValueError(
                f"parameters of shapes {differ} differ between ranks, so their gradients can't be "
                "added up: start from the same weights, and cut experts by shard()"
            )
    for p in new:
        if not hasattr(p, "compared"):
            p.register_post_accumulate_grad_hook(refuse_summed)
        p.compared = [*getattr(p, "compared", ()), group.group_name]


# --- for model.py's GPT ---


def parallelize(model, group, capacity=None, chunks=1, copies=None):
    """Deal the experts of a GPT out over `group`, in place, and return it. Works on the meta device
    and on real weights alike. Parameters are replaced by their pieces: make the optimizer
    afterwards. After tensor_parallel.parallelize, if that too. copies: where data parallelism has
    more ranks than `group`, the group of those that hold the same experts; see shard.

    Raises ValueError for another model, where there is no expert for every rank, and for experts
    that are dealt out already."""
    try:
        experts, mixtures = model.config.experts, [block.mlp for block in model.blocks.values()]
    except AttributeError:
        raise ValueError(
            "parallelize knows the GPT of model.py alone: in another model put an ExpertDispatch "
            "where tokens go to their experts, and cut these by shard()"
        ) from None
    world = dist.get_world_size(group)
    if experts < world:
        raise ValueError(f"{experts} experts are too few for {world} ranks: each needs one")
    for mixture in mixtures:
        for name, p in list(mixture.experts.named_parameters()):
            setattr(mixture.experts, name, shard(p, group, copies))
        mixture.dispatch = ExpertDispatch(expert_counts(experts, world), group, capacity, chunks)
    for p in model.parameters():
        if not split_over(p, group):
            where = placement(p)
            p.placement = where | {"copies": [*where["copies"], group]}
    return model


# --- demo ---

import harness
import model as gpt
from harness.experts import heat_map, plot, timing
from harness.ledger import human


def main():
    parser = harness.parser(__doc__, experts=8, balance_loss=0.01)
    g = parser.add_argument_group("expert parallelism")
    why = "how far a bias on the router's choice moves towards even load after each step: balance without a loss; 0 = off"
    g.add_argument("--bias-rate", type=harness.real(0), default=0.0, metavar="X", help=why)
    why = "an expert takes at most X times its even share of a rank's tokens, others are dropped: bounds the fullest rank's time "
    why += "and memory, but changes the result, so that --prove is off unless given (default: nothing is dropped)"
    g.add_argument("--capacity", type=harness.real(0), metavar="X", help=why)
    why = "pieces of a rank's tokens, one travels while another is computed: 1 hides nothing, many cost messages"
    g.add_argument("--chunks", **harness.POSITIVE, default=2, help=why)
    harness.plot_flag(g, "draw the load of experts and ranks")
    args = parser.parse_args()
    config = harness.configure(args)
    harness.check_plot(args)
    if args.capacity is not None and args.prove is None:
        args.prove = 0
    harness.launch(demo, args, check=lambda world: check(args, config, world))


def check(args, config, world):
    harness.check_batch(args, world)
    if config.experts < world:
        raise harness.Refused(
            f"{config.experts} experts are too few for {world} ranks: --experts could be {world}"
        )


def demo(run):
    args, group, c, e = run.args, dist.group.WORLD, run.config, run.dtype.itemsize
    run.groups(ep=group)
    model = run.fill(parallelize(run.meta_model(), group, args.capacity, args.chunks))
    check_replicas(replicated(model.parameters(), group), group)  # now, not in a measured step
    mixtures = [block.mlp for block in model.blocks.values()]
    parameters = list(model.parameters())
    optimizer, times, loads = harness.make_optimizer(parameters, args), [], []
    for step in run.steps(optimizer):
        optimizer.zero_grad(set_to_none=False)  # gradients stay in memory: the receipt counts them
        loss = run.zero()
        for moe in mixtures:
            moe.dispatch.rows = 0
            # The first step warms up
            moe.dispatch.times = times if step and run.device.type == "cpu" else None
        for tokens, targets, samples in run.microbatches(step, run.rank, run.world):
            # Count: the global batch's tokens
            part = model(tokens, targets=targets, count=run.count, samples=samples)
            part.backward()
            loss += part.detach()
        sum_gradients(parameters, group)
        dist.all_reduce(loss, group=group)
        norm = harness.grad_norm(parameters, [group])  # over the experts of all ranks
        run.check(loss, norm, model.named)
        harness.clip(parameters, norm, args.grad_clip)
        optimizer.step()
        run.log(loss, norm)
        loads.append(
            torch.stack([torch.stack((moe.router.load, moe.dispatch.rows)) for moe in mixtures])
        )
        gpt.rebalance(model, lambda load: dist.all_reduce(load, group=group))

    # What each expert was chosen for, and what it got: (N, steps, layers, 2, E)
    loads = torch.stack(loads)
    everyone = [torch.empty_like(loads) for _ in range(run.world)]
    dist.all_gather(everyone, loads)
    everyone = torch.stack(everyone).cpu()
    sizes = expert_counts(c.experts, run.world)
    run.print("\n" + heat_map(everyone[:, :, :, 0].sum(0), sizes))
    if args.plot and run.rank == 0:
        plot(args.plot, everyone[:, :, :, 0].sum(0), sizes)

    # Rows sent in the step that the ledger watched: to others' experts, and from others to the
    # experts here, each twice
    got = everyone[:, min(1, args.steps - 1), :, 1]  # (N, layers, E)
    here = slice(sum(sizes[: run.rank]), sum(sizes[: run.rank + 1]))
    out, back = (
        got[run.rank].sum() - got[run.rank][:, here].sum(),
        got[:, :, here].sum() - got[run.rank][:, here].sum(),
    )
    counts = c.layers * args.microbatches * (c.experts - sizes[run.rank]) * args.chunks * 8
    expert = (3 if c.mlp == "swiglu" else 2) * c.width * c.hidden
    common = c.parameters() - c.layers * c.experts * expert
    n, r = run.world, (run.world - 1) / run.world
    sent = {
        ("all_to_all", "ep"): (
            2 * (out + back).item() * c.width * e + counts,
            "2 (rows out + rows in) C e, and the counts",
        ),
        ("all_reduce", "ep"): (
            2 * r * (common * e + 16),
            "2 r P_common e; loss and norm, 8 bytes each",
        ),
    }
    activations = c.layers * harness.activation_bytes(c, args.batch // n // args.microbatches, e)
    held = run.states(
        (common + c.layers * sizes[run.rank] * expert) * e, "(P_common + experts here) e"
    )
    held["activations_peak"] = activations, "the blocks', if routing were even"
    even = 4 * r * c.layers * args.batch // n * c.context * c.top_k * c.width * e
    fullest = max(
        got[:, :, a : a + s].sum().item() for a, s in zip([sum(sizes[:i]) for i in range(n)], sizes)
    )
    notes = [
        f"with even routing a rank would send {human(round(even)).strip()}: 4 r k n C e a layer; in step "
        f"{min(2, args.steps)} the fullest rank had {fullest / got.sum().item() * n:.0%} of an even share",
        timing(run, times, group),
    ]
    if args.capacity is not None:
        dropped = torch.as_tensor(sum(moe.dispatch.dropped for moe in mixtures)).clone()
        dist.all_reduce(dropped, group=group)
        part = dropped.item() / everyone[..., 0, :].sum().item()
        notes += [
            f"capacity {args.capacity:g}: {dropped.item():,} assignments ({part:.1%}) dropped in {args.steps} steps"
        ]
    return run.receipt(
        {"ep": n, "chunks": args.chunks}, sent, held, [note for note in notes if note]
    )


if __name__ == "__main__":
    harness.script(main)
