"""Sequence parallelism: between the split layers of tensor parallelism, the tokens are split too.

Read tensor_parallel.py first. There each of t ranks holds all tokens between the layers, and all do
the same work on them: norms, dropout, biases, additions. Each of these works on every token by
itself. So here a rank does it for T/t consecutive tokens, and stores those only:

          split tokens   |      all tokens, split matrices      |   split tokens
    x --+----> norm ---- f ---> up ---> gelu ---> down -------- g --> + bias -> dropout -> + --> y
        | (B,T/t,C)     (B,T,C)     (B,T,H/t)      (B,T,C) partial   (B,T/t,C)             |
        +----------------------------------------------------------------------------------+

Sent        in forward                            in backward
    f       all-gather of the tokens              reduce-scatter of their gradients
    g       reduce-scatter of the partial sums    all-gather of the gradients

An all-reduce is a reduce-scatter and then an all-gather. In each a rank sends r = (t-1)/t of the
tensor. So a block sends as much as in tensor parallelism: 8 r B T C e, at e bytes an element. The
activations between the split layers shrink to 1/t. f's result (B, T, C) is still held, for the
gradients of weights. With --gather-again backward gathers it again, and sends a quarter more.

Norms, positions and the biases after g see this rank's tokens only. So the gradients of these P
parameters are partial sums, which `reduce_partial` all-reduces once a step (2 r P e bytes).

There are twice as many messages, so it is slower where latency dominates. t must divide T.

    torchrun --nproc_per_node=4 sequence_parallel.py
    python sequence_parallel.py --family llama --nproc 2 --gather-again

Korthikanti et al. 2022, Reducing activation recomputation, arXiv:2205.05198, section 4.2.2.
"""

import functools

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.autograd.function import once_differentiable  # refuses a gradient of a gradient

from tensor_parallel import (
    Enter,
    EnterAndProject,
    Leave,
    after,
    parallelize_tensors,
    placement,
    split_over,
)

# --- f and g, in place of tensor parallelism's. In the paper they are g and g-bar

# torch 2.13 renamed these two; older versions know only the second name
all_gather_into_tensor = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_tensor = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def gather_tokens(x, group):
    """All ranks' tokens in order: x (B, T/t, C) -> (B, T, C)."""
    shards = x.new_empty(dist.get_world_size(group), *x.shape)  # (t, B, T/t, C)
    all_gather_into_tensor(shards.flatten(0, 1), x.contiguous(), group=group)  # into `shards`
    return shards.transpose(0, 1).flatten(1, 2)


def reduce_scatter_tokens(x, group, async_op=False):
    """This rank's tokens of the sum of all ranks' x: (B, T, C) -> (B, T/t, C). async_op: start the
    message, and return a function that waits for it and returns the tokens."""
    t = dist.get_world_size(group)
    shards = x.unflatten(1, (t, -1)).transpose(0, 1).contiguous()  # (t, B, T/t, C)
    options = dict(group=group, async_op=async_op)
    if dist.get_backend(group) == "gloo":  # for CPUs: its reduce-scatter sends twice the bytes
        received = torch.empty_like(shards)
        message = dist.all_to_all_single(received, shards, **options)
        finish = after(message, lambda: received.sum(0))
    else:
        received = torch.empty_like(shards[0])
        message = reduce_scatter_tensor(received, shards.flatten(0, 1), **options)
        finish = after(message, lambda: received)
    finish.sent = shards  # a reference: it must live until the wait
    return finish if async_op else finish()


class GatherTokens(torch.autograd.Function):
    """f: every rank gets all tokens, so in backward each has a gradient for every token. Backward
    sums these over the ranks, and keeps the sums of this rank's tokens."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return gather_tokens(x, group)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        return reduce_scatter_tokens(grad, ctx.group), None


class ReduceScatterTokens(torch.autograd.Function):
    """g: this rank's tokens of the sum. Backward gives every x the whole sum's gradient."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return reduce_scatter_tokens(x, group)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        return gather_tokens(grad, ctx.group), None


def plain_sequence_mlp(x, norm, up, down, bias, group):
    """The picture without dropout: x (B, T/t, C) -> (B, T/t, C). up (H/t, C) and down (C, H/t) are
    shards. norm and bias are whole, but see this rank's tokens only: all-reduce their gradients."""
    full = GatherTokens.apply(norm(x), group)  # f: (B, T, C)
    hidden = F.gelu(F.linear(full, up))  # (B, T, H/t)
    partial = F.linear(hidden, down)  # (B, T, C)
    return x + ReduceScatterTokens.apply(partial, group) + bias  # g: (B, T/t, C)


class SequenceEnter(Enter):
    """f as a module."""

    function = GatherTokens


class SequenceLeave(Leave):
    """g as a module."""

    function = ReduceScatterTokens


def shard_positions(full, group):
    """This rank's shard of numbers per token, such as positions: (..., T) -> (..., T/t)."""
    shards = full.unflatten(-1, (dist.get_world_size(group), -1))  # (..., t, T/t)
    return shards[..., dist.get_rank(group), :]


# --- a model of yours. First tensor_parallel.py's block, up to its optimizer; then:
#
#     model.embed.leave = SequenceLeave(group)
#     for block in model.blocks:
#         block.attn.norm[1] = SequenceEnter(group)  # every f; norm is Sequential(norm, Enter)
#         block.mlp.norm[1] = SequenceEnter(group)
#         block.attn.proj.leave = SequenceLeave(group)  # every g
#         block.mlp.down.leave = SequenceLeave(group)
#     model.head[0] = SequenceEnter(group)
#     mark_partial(model.parameters(), group)
#
#     for tokens, targets in microbatches:
#         criterion(model(tokens), targets, target_count).backward()
#     reduce_partial(model.parameters())  # once a step; next grad_norm, clip and step, as there
#
# tokens and targets are whole. Where t does not divide T, pad them at the end, and have the loss
# ignore the padding. Add the learned positions of this rank's tokens only:
# embed(tokens) + position(shard_positions(positions, group)). Rotary positions stay whole, because
# attention sees all tokens. Dropout masks must differ between ranks.

# --- parameters that see split tokens: their gradients are partial sums


def mark_partial(parameters, group):
    """Mark each unsplit parameter: backward leaves its gradient a partial sum over `group`, because
    it saw only this rank's tokens. Call it after all cuts (docs/use/two-techniques.md)."""
    group = group or dist.group.WORLD
    for p in parameters:
        where = placement(p)
        if group not in where["partial"] and not split_over(p, group):
            p.placement = where | {"partial": [*where["partial"], group]}


def reduce_partial(parameters):
    """Complete the gradients that are partial sums, in one all-reduce per group. Call it once a
    step, after the last backward pass; all ranks give the same parameters."""
    partial = {}  # {group: parameters}
    for p in dict.fromkeys(parameters):  # each once
        if p.requires_grad:
            for group in placement(p)["partial"]:
                partial.setdefault(group, []).append(p)
    for group, members in partial.items():
        all_reduce_gradients(members, group)


def all_reduce_gradients(parameters, group):
    """Sum gradients over the group, in one message. A rank without one adds zeros and gets the sum:
    if an optimizer skipped a parameter on one rank only, its replicas would drift apart."""
    for p in parameters:
        refuse_summed(p, group)
        if p.grad is None:
            p.grad = torch.zeros_like(p)
    flat = torch.cat([p.grad.flatten() for p in parameters])
    dist.all_reduce(flat, group=group)
    for p, total in zip(parameters, flat.split([p.numel() for p in parameters])):
        # By .data, which leaves _version as it is: refuse_summed, below, compares it
        p.grad.data.copy_(total.view_as(p))
        note_sum(p, group)


# --- faster: backward sends while it computes, as in tensor parallelism


class SequenceEnterAndProject(EnterAndProject):
    """Takes the place of a SequenceEnter. Holds all tokens until backward."""

    function = GatherTokens  # where forward takes plain f

    def keep(self, x):
        return gather_tokens(x, self.group)

    def start_sum(self, dx):
        return reduce_scatter_tokens(dx, self.group, async_op=True)


class GatherAgain(SequenceEnterAndProject):
    """Holds this rank's tokens until backward, which gathers all tokens again while it computes
    their gradients."""

    def forward(self, x):  # always, because plain f would hold all tokens
        return self.project(x)

    def keep(self, x):
        return x

    def start_gather(self, kept):  # as gather_tokens, which waits
        shards = kept.new_empty(dist.get_world_size(self.group), *kept.shape)
        options = dict(group=self.group, async_op=True)
        message = all_gather_into_tensor(shards.flatten(0, 1), kept.contiguous(), **options)
        return after(message, lambda: shards.transpose(0, 1).flatten(1, 2))


# --- a mistake that would be silent: refused


def refuse_summed(parameter, group=None):
    """Refuse a gradient that was summed over the group (None: over any group) and has not changed
    since. torch counts a tensor's changes in its _version."""
    summed_at = getattr(parameter.grad, "summed_at", {})  # {group's name: _version at its sum}
    versions = summed_at.values() if group is None else [summed_at.get(group.group_name)]
    if parameter.grad is not None and parameter.grad._version in versions:
        raise RuntimeError(
            "this gradient is summed over the ranks already: sum once a step, after the last "
            "backward pass, and call zero_grad() before the next one"
        )


def note_sum(parameter, group):
    """Remember that the gradient is summed: now another sum over this group is refused, and another
    backward pass, which would add an unsummed gradient to the sum."""
    grad = parameter.grad
    grad.summed_at = getattr(grad, "summed_at", {}) | {group.group_name: grad._version}
    if not hasattr(parameter, "watched"):  # the hook runs before backward adds to the gradient
        parameter.register_hook(lambda _: refuse_summed(parameter))
        parameter.watched = True


# --- for model.py's GPT ---


def check_tokens(config, t):
    """Raise ValueError where t ranks do not divide the sequence."""
    if config.context % t:
        longer = -(-config.context // t) * t
        raise ValueError(
            f"--context {config.context} does not divide over {t} ranks: use --context {longer}"
        )


def shard_last(group, module, args):
    """A forward pre-hook of modules that see split tokens. Their last argument, positions (T,) or
    dropout's key (B, T), is of all tokens: pass on this rank's shard."""
    *others, last = args
    return (*others, None if last is None else shard_positions(last, group))


def parallelize_sequence(model, group, keep_gathered=True, kv_group=None, whole_experts=False):
    """parallelize_tensors, then f and g replaced. Raises ValueError as that does.
    Give every rank the whole tokens, targets, positions and sample_ids. A pipeline stage without an
    embedding takes x (B, T/t, C) from the stage before it, and needs positions (T,). After backward
    call `reduce_partial`.

    keep_gathered: hold what f gathered until backward. False: gather it again in backward.
    whole_experts: leave the experts as they are. Each rank sends its own tokens to them, so
    expert_parallel.py must deal them out over all tensor-parallel ranks, before or after."""
    parallelize_tensors(model, group, kv_group, whole_experts)
    enter_and_project = SequenceEnterAndProject if keep_gathered else GatherAgain
    if model.embed is not None:
        model.embed.token.leave = SequenceLeave(group)
    for block in model.blocks.values():
        block.attn.enter = enter_and_project(group, block.attn.enter.layers)
        block.attn.proj.leave = SequenceLeave(group)
        mlp = block.mlp
        if model.config.experts and not whole_experts:  # enter gathers the router's choice, too
            mlp.enter = SequenceEnter(group)
            mlp.leave = SequenceLeave(group)
        if model.config.experts:
            mlp.router.sum_over_sequence = Leave(group)  # each rank's router saw T/t tokens
            mlp = mlp.shared
        if mlp is not None:
            mlp.enter = enter_and_project(group, mlp.enter.layers)
            mlp.down.leave = SequenceLeave(group)
    if model.head is not None:
        model.head.enter = enter_and_project(group, model.head.enter.layers)
    for name, module in model.named_modules():
        if name.endswith(("drop", "position")):  # embed's position and drop, attn_drop, mlp_drop
            module.register_forward_pre_hook(functools.partial(shard_last, group))
    others = [p for name, p in model.named_parameters() if ".experts." not in name]
    mark_partial(others, group)  # experts see all tokens
    return model


# --- demo ---

import harness
import proof
import receipts.sequence_parallel
import tensor_parallel
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
        check_tokens(config, world)

    proof.launch(demo, args, check=check)


def demo(run):
    args, group = run.args, dist.group.WORLD
    kv_group = tensor_parallel.kv_group_of(run.config)
    run.groups(tp=group, kv=kv_group)
    model = parallelize_sequence(run.meta_model(), group, not args.gather_again, kv_group)
    model = run.fill(model)
    parameters = list(model.parameters())
    optimizer = harness.make_optimizer(parameters, args)
    for step in run.steps(optimizer):
        optimizer.zero_grad(set_to_none=False)  # gradients stay in memory: the receipt counts them
        loss = run.zero()
        for tokens, targets, samples in run.microbatches(step):  # the whole batch, on every rank
            part = model(tokens, targets=targets, target_count=run.target_count, sample_ids=samples)
            part.backward()
            loss += part.detach()  # the same on every rank
        reduce_partial(parameters)
        norm = harness.grad_norm(parameters)
        run.check(loss, norm, model.named)
        harness.clip(parameters, norm, args.grad_clip)
        optimizer.step()
        run.log(loss, norm)
    sizes = sizes_of(args, run.config, tp=run.world, sp=True, gather_again=args.gather_again)
    ranks, scatter = Group("tp", run.world), scatter_operation(group)
    sent, held = receipts.sequence_parallel.expected(sizes, ranks, scatter)
    return run.receipt({"tp": run.world, "sp": run.world}, sent, held)


if __name__ == "__main__":
    harness.script(main)
