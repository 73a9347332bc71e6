"""Sequence parallelism: between the split layers of tensor parallelism, the tokens are split too.

Read tensor_parallel.py first. There each of t ranks holds all tokens between the layers, and all do
the same work on them: norms, dropout, biases, additions. Each of these works on every token by
itself. So here a rank does it for T/t consecutive tokens, rounded up and padded, and holds no more:

          split tokens   |      all tokens, split matrices      |   split tokens
    x --+----> norm ---- f ---> up ---> gelu ---> down -------- g --> + bias -> dropout -> + --> y
        | (B,T/t,C)     (B,T,C)     (B,T,H/t)      (B,T,C) partial   (B,T/t,C)             |
        +----------------------------------------------------------------------------------+

Sent        in forward                            in backward
    f       all-gather of the tokens              reduce-scatter of their gradients
    g       reduce-scatter of the partial sums    all-gather of the gradients

An all-reduce is a reduce-scatter and then an all-gather, and each sends r = (t-1)/t of the tensor.
So as many bytes are sent: 8 r B T C e a block, at e bytes an element. The activations that tensor
parallelism holds whole shrink to 1/t. Only what f gathers, (B, T, C), is held whole for backward:
with --gather-again not even that, because backward gathers it a second time.

Norms, positions and the biases after g see this rank's tokens alone: the gradients of their P
parameters are partial sums, which `reduce_partial` all-reduces once a step (2 r P e bytes).

It loses only where messages are so short that their number counts: there are twice as many.
docs/tensor-parallelism.md has the rest. For attention over split tokens see context_parallel.py.

    torchrun --nproc_per_node=4 sequence_parallel.py
    python sequence_parallel.py --family llama --nproc 2 --gather-again

Korthikanti et al. 2022, Reducing activation recomputation, arXiv:2205.05198, section 4.2.2.
"""

import functools

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.autograd.function import once_differentiable  # refuses a gradient of a gradient
from torch.utils.checkpoint import checkpoint

import tensor_parallel

# --- one tensor of tokens: gathered from all ranks, or added up and scattered over them

# torch 2.13 renamed both functions, older versions know only the second name
all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def all_gather(x, length, group):
    """All ranks' tokens in order: x (B, T/t, C) -> (B, T, C). `length` is T, without padding."""
    t = dist.get_world_size(group)
    if length is None or x.shape[1] != -(-length // t):
        raise ValueError(
            f"stream.length is {length}, but each of {t} ranks has {x.shape[1]} tokens: "
            "set stream.length to the tokens of the whole sequence before each forward pass"
        )
    shard = x.transpose(0, 1).contiguous()  # (T/t, B, C): collectives cut the first dimension
    full = shard.new_empty(len(shard) * t, *shard.shape[1:])
    all_gather_single(full, shard, group=group)
    # Contiguous: otherwise each matrix product would make a copy of its own, and keep it
    return full[:length].transpose(0, 1).contiguous()


def reduce_scatter(x, group):
    """This rank's tokens of the sum of all ranks' x: (B, T, C) -> (B, T/t, C)."""
    t = dist.get_world_size(group)
    size = -(-x.shape[1] // t)
    full = x.new_empty(size * t, x.shape[0], x.shape[2])
    full[: x.shape[1]] = x.transpose(0, 1)  # (T, B, C)
    full[x.shape[1] :] = 0  # padding
    if dist.get_backend(group) == "gloo":  # its reduce-scatter sends twice the bytes
        received = torch.empty_like(full)
        dist.all_to_all_single(received, full, group=group)
        shard = received.unflatten(0, (t, size)).sum(0)
    else:
        shard = full.new_empty(size, *full.shape[1:])
        reduce_scatter_single(shard, full, group=group)
    return shard.transpose(0, 1).contiguous()


# --- f and g, in place of tensor parallelism's


class GatherTokens(torch.autograd.Function):
    """f: every rank uses all tokens. Backward adds up all gradients of this rank's."""

    @staticmethod
    def forward(ctx, x, length, group):
        ctx.group = group
        return all_gather(x, length, group)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        return reduce_scatter(grad, ctx.group), None, None


class ReduceScatterTokens(torch.autograd.Function):
    """g: this rank's tokens of the sum. Backward gives every x the whole sum's gradient."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.length, ctx.group = x.shape[1], group
        return reduce_scatter(x, group)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        return all_gather(grad, ctx.length, ctx.group), None


class Stream:
    """What the modules of one model share: the group, and `length`, the number of tokens T. Enter
    can't tell T from a rank's shard, which may be padded. So each Leave, which sees all T, sets it.
    Set it yourself, before each forward pass, where a model begins with split tokens."""

    def __init__(self, group):
        self.group, self.length = group, None

    def shard(self, full, fill=0):
        """This rank's shard of something (..., T), padded with `fill`: of targets with -1."""
        rank, t = dist.get_rank(self.group), dist.get_world_size(self.group)
        return tensor_parallel.shard_tensor(full, -1, rank, t, fill)


class Enter(nn.Module):
    """f as a module, in place of tensor_parallel.Enter. It takes the stream, not the group."""

    def __init__(self, stream):
        super().__init__()
        self.stream = stream

    def forward(self, x):
        return GatherTokens.apply(x, self.stream.length, self.stream.group)


class Leave(nn.Module):
    """g as a module, in place of tensor_parallel.Leave. It takes the stream, not the group."""

    def __init__(self, stream):
        super().__init__()
        self.stream = stream

    def forward(self, x):
        self.stream.length = x.shape[1]
        return ReduceScatterTokens.apply(x, self.stream.group)


# --- parameters that see split tokens: their gradients are partial sums


def mark_partial(parameters, group):
    """Note in the placement of each whole parameter that its gradient is partial over `group`. Each
    must work on split tokens, between a g and the next f. Call it after all cuts."""
    group = group or dist.group.WORLD
    for p in parameters:
        whole = tensor_parallel.placement(p)
        if group not in whole["partial"] and not tensor_parallel.split_over(p, group):
            p.placement = whole | {"partial": [*whole["partial"], group]}


def refuse_complete(parameter, *_):
    """Raise RuntimeError where nothing has changed the gradient since reduce_partial."""
    grad = parameter.grad
    if grad is not None and getattr(grad, "complete_at", None) == grad._version:
        raise RuntimeError(
            "reduce_partial has completed these gradients already: call it once a step, "
            "after the last backward pass, and zero_grad() before the next one"
        )


def reduce_partial(parameters):
    """Complete the gradients that are partial sums, after the last backward pass of a step: one
    all-reduce a group. All ranks give the same parameters. A rank without a gradient adds zeros.

    Raises RuntimeError when called twice in a step, and so does a backward pass before the next
    zero_grad(). Neither is noticed once something else, such as clipping, has changed gradients."""
    partial = {}  # {group: parameters}
    for p in dict.fromkeys(parameters):  # each once
        if p.requires_grad:
            for group in tensor_parallel.placement(p)["partial"]:
                refuse_complete(p)
                partial.setdefault(group, []).append(p)
    for group, members in partial.items():
        grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in members]
        flat = torch.cat([grad.flatten() for grad in grads])
        dist.all_reduce(flat, group=group)
        for p, grad, total in zip(members, grads, flat.split([p.numel() for p in members])):
            grad.copy_(total.view_as(p))
            grad.complete_at = grad._version
            if p.grad is None and grad.any():  # another rank had a gradient
                p.grad = grad
            if not hasattr(p, "watched"):  # the hook runs before backward adds to the gradient
                p.watched = p.register_hook(functools.partial(refuse_complete, p))


# --- f that holds less: backward gathers the tokens a second time


class EnterAndProject(nn.Module):
    """f and the matrices after it, in place of Enter, before layers such as gate and up. Returns a
    tuple of their products. Each of `projections`, in its layer's place, picks its own. Activation
    checkpointing keeps this rank's tokens alone, and runs f again."""

    def __init__(self, stream, projections):
        super().__init__()
        self.stream, self.projections = stream, projections  # a list, no submodules: names stay

    def forward(self, x):
        length = self.stream.length  # may be another one at the time of backward
        return checkpoint(self.project, x, length, use_reentrant=False, preserve_rng_state=False)

    def project(self, x, length):
        full = GatherTokens.apply(x, length, self.stream.group)  # (B, T, C)
        weights = [projection.weight for projection in self.projections]
        # One product of all weights: recomputation skips the last product alone
        products = F.linear(full, torch.cat(weights))
        return products.split([len(weight) for weight in weights], dim=-1)


class Projection(nn.Module):
    """In place of a column-parallel layer: takes product number `index`, and adds the bias."""

    def __init__(self, index, layer):
        super().__init__()
        self.index, self.weight, self.bias = index, layer.weight, layer.bias

    def forward(self, products):
        if isinstance(products, torch.Tensor):
            raise ValueError("a Projection takes enter(x), the products of EnterAndProject, not x")
        y = products[self.index]
        return y if self.bias is None else y + self.bias


# --- a model of yours, split as tensor_parallel.py says above its GPT section; then:
#
#     stream = Stream(group)
#     model.embed.leave = Leave(stream)  # runs first in forward: sets stream.length
#     for block in model.blocks:
#         block.attn.norm[1] = block.mlp.norm[1] = Enter(stream)  # every f ...
#         block.attn.proj.leave = block.mlp.down.leave = Leave(stream)  # ... and every g
#     model.head[0] = Enter(stream)
#     mark_partial(model.parameters(), group)
#
#     for tokens, targets in microbatches:
#         criterion(model(tokens), targets, count).backward()
#     reduce_partial(model.parameters())  # once a step; next grad_norm, clip and step, as there
#
# Add this rank's learned positions alone: embed(tokens) + position(stream.shard(positions)). Draw
# another dropout mask on each rank. A loss on split tokens is the sum over this rank's tokens
# without padding / the count of the batch.

# --- for model.py's GPT ---


def set_length(stream, model, args, kwargs):
    """A hook before forward(x, positions, ...) of a piece that begins with split tokens."""
    positions = kwargs.get("positions", args[1] if len(args) > 1 else None)
    if positions is None:
        raise ValueError("pass the whole sequence's positions (T,): x (B, T/t, C) does not tell T")
    stream.length = len(positions)


def shard_last(stream, module, args):
    """A hook before a module that sees split tokens. Its last argument, positions (T,) or dropout's
    key (B, T), is whole: this rank's shard takes its place."""
    *others, last = args
    return (*others, None if last is None else stream.shard(last))


def replace_enter(module, names, stream, keep):
    """Replace f of `module`, which comes before the layers called `names`."""
    if keep:
        module.enter = Enter(stream)
        return
    projections = [Projection(i, getattr(module, name)) for i, name in enumerate(names)]
    module.enter = EnterAndProject(stream, projections)
    for name, projection in zip(names, projections):
        setattr(module, name, projection)


def parallelize(model, group, keep=True):
    """tensor_parallel.parallelize, then f and g replaced. Raises ValueError as that does.

    keep: hold the gathered inputs of projections until backward, or gather them again there.
    tokens, targets, positions and samples stay whole on every rank. A piece without an embedding
    takes x (B, ceil(T / t), C), as the piece before it returned it, and needs positions. Gradients
    are partial sums after backward: see `reduce_partial`."""
    tensor_parallel.parallelize(model, group)
    stream = Stream(group)
    if model.embed is None:
        hook = functools.partial(set_length, stream)
        model.register_forward_pre_hook(hook, with_kwargs=True)
    else:
        model.embed.token.leave = Leave(stream)
    for block in model.blocks.values():
        replace_enter(block.attn, ["qkv"], stream, keep)
        block.attn.proj.leave = Leave(stream)
        mlp = block.mlp
        if model.config.experts:  # the router sees split tokens; its choice is gathered with them
            mlp.enter = Enter(stream)
            mlp.leave = Leave(stream)
            mlp.router.over_sequence = tensor_parallel.Leave(group)  # sums of the balance loss
            mlp = mlp.shared
        if mlp is not None:
            replace_enter(mlp, ["up"] if mlp.gate is None else ["gate", "up"], stream, keep)
            mlp.down.leave = Leave(stream)
    if model.head is not None:
        replace_enter(model.head, ["out"], stream, keep)
    for name, module in model.named_modules():  # what is called with all tokens' positions or keys
        if name.endswith(("drop", "position")):
            module.register_forward_pre_hook(functools.partial(shard_last, stream))
    mark_partial(model.parameters(), group)
    return model


# --- demo ---

import harness
import proof
import receipts.sequence_parallel
from receipts.formulas import Group, scatter_operation, sizes_of


def main():
    parser = harness.parser(__doc__)
    group = parser.add_argument_group("sequence parallelism")
    why = "gather projections' inputs again in backward: holds 1/t of them, sends a quarter more"
    group.add_argument("--gather-again", action="store_true", help=why)
    args = parser.parse_args()
    harness.check_batch(args, 1)
    config = harness.configure(args)

    def check(world):
        tensor_parallel.check_heads(config, world)
        receipts.sequence_parallel.check_padding(config, world)

    proof.launch(demo, args, check=check)


def demo(run):
    args, group, keep = run.args, dist.group.WORLD, not run.args.gather_again
    run.groups(tp=group)
    model = run.fill(parallelize(run.meta_model(), group, keep))
    parameters = list(model.parameters())
    optimizer = harness.make_optimizer(parameters, args)
    for step in run.steps(optimizer):
        optimizer.zero_grad(set_to_none=False)  # gradients stay in memory: the receipt counts them
        loss = run.zero()
        for tokens, targets, samples in run.microbatches(step):  # the whole batch, on every rank
            part = model(tokens, targets=targets, count=run.count, samples=samples)
            part.backward()
            loss += part.detach()  # the same on every rank
        reduce_partial(parameters)
        norm = harness.grad_norm(parameters, [group])
        run.check(loss, norm, model.named)
        harness.clip(parameters, norm, args.grad_clip)
        optimizer.step()
        run.log(loss, norm)
    sizes = sizes_of(args, run.config, tp=run.world, sp=True, gather_again=not keep)
    ranks, scatter = Group("tp", run.world), scatter_operation(group)
    sent, held = receipts.sequence_parallel.expected(sizes, ranks, scatter)
    notes = [receipts.sequence_parallel.kept_by_a_block(run, model, sizes)]
    return run.receipt({"tp": run.world, "sp": run.world}, sent, held, notes)


if __name__ == "__main__":
    harness.script(main)
