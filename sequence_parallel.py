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
embedding's g leaves the split tokens, the head's f gathers them. t must divide T.

In tensor parallelism a GPT-2 block holds 4 + 12/t times B T C elements: two norms' inputs and
results, and its part of q, k, v, attention's result and the hidden units. Here it is 2 + 14/t: the
2 are f's results, which the layers behind f hold for their weights' gradients. The paper gathers
them again in backward, 16/t: tensor_overlap.py can, too.

Norms, positions and the biases after g (P numbers in all) see this rank's tokens only, so their
gradients are partial sums: one all-reduce a step, 2 r P e bytes.

    torchrun --nproc_per_node=4 sequence_parallel.py
    python sequence_parallel.py --family llama --nproc 2

Korthikanti et al. 2022, Reducing activation recomputation, arXiv:2205.05198, section 4.2.2.
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.autograd.function import once_differentiable  # refuses a gradient of a gradient

from tensor_parallel import Enter, Leave, parallelize_tensors, placement

# --- f and g, in place of tensor parallelism's. Their messages:
#
#     gather_tokens            (B, T/t, C) -> (B, T, C)    all ranks' tokens, in order
#     reduce_scatter_tokens    (B, T, C) -> (B, T/t, C)    this rank's tokens of the sum
#
# The paper has other names: its g is our f, and its g-bar is our g.


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
    """g: the sum of all ranks' x, of which each rank keeps its tokens. Backward gathers, so that
    each x gets the gradient of all tokens."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return reduce_scatter_tokens(x, group)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        return gather_tokens(grad, ctx.group), None


def plain_sequence_mlp(x, norm, up, down, bias, group):
    """The picture without dropout: x (B, T/t, C) -> (B, T/t, C). Rank r of t has the tokens
    x.chunk(t, dim=1)[r] of the whole x. up (H/t, C) and down (C, H/t) are shards. norm and bias are
    whole, but they see this rank's tokens only, so their gradients are partial sums. Once a step,
    after its last backward pass:

        for p in (*norm.parameters(), bias):
            dist.all_reduce(p.grad, group=group)"""
    full = GatherTokens.apply(norm(x), group)  # f: (B, T, C)
    hidden = F.gelu(F.linear(full, up))  # (B, T, H/t)
    partial = F.linear(hidden, down)  # (B, T, C)
    return x + ReduceScatterTokens.apply(partial, group) + bias  # g: (B, T/t, C)


# --- the two messages. async_op=True: they return a function that waits, and returns the tokens.
#     (With tokens first, (T, B, C), as in Megatron, nothing would be transposed)

# torch 2.13 renamed these two; older versions know only the second name
all_gather_into_tensor = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_tensor = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def gather_tokens(x, group, async_op=False):
    """All ranks' tokens in order: x (B, T/t, C) -> (B, T, C)."""
    shards = x.new_empty(dist.get_world_size(group), *x.shape)  # (t, B, T/t, C)
    flat = shards.flatten(0, 1)  # a view, through which the message fills `shards`
    work = all_gather_into_tensor(flat, x.contiguous(), group=group, async_op=True)

    def finish():
        work.wait()
        return shards.transpose(0, 1).flatten(1, 2)

    return finish if async_op else finish()


def reduce_scatter_tokens(x, group, async_op=False):
    """This rank's tokens of the sum of all ranks' x: (B, T, C) -> (B, T/t, C)."""
    shards = x.unflatten(1, (dist.get_world_size(group), -1))
    shards = shards.transpose(0, 1).contiguous()  # (t, B, T/t, C)
    if dist.get_backend(group) == "gloo":  # for CPUs: its reduce-scatter sends twice the bytes
        message, received = dist.all_to_all_single, torch.empty_like(shards)
    else:
        message, received = reduce_scatter_tensor, torch.empty_like(shards[:1])
    work = message(received, shards, group=group, async_op=True)

    def finish(sent=shards):  # the message reads them until the wait
        work.wait()
        return received[0] if len(received) == 1 else received.sum(0)

    return finish if async_op else finish()


def shard_tokens(full, group):
    """This rank's shard of numbers per token, such as positions: (..., T) -> (..., T/t)."""
    shards = full.unflatten(-1, (dist.get_world_size(group), -1))  # (..., t, T/t)
    return shards[..., dist.get_rank(group), :]


# --- a model of yours. First tensor_parallel.py's recipe, down to its optimizer. Then new f and g:
#
#     model.embed.leave = Leave(group, ReduceScatterTokens)
#     for block in model.blocks:
#         attn, mlp = block.attn, block.mlp
#         for first, last in (attn.qkv, attn.proj), (mlp.up, mlp.down):
#             first[0] = Enter(group, GatherTokens)  # it is Sequential(Enter, the layer)
#             last.leave = Leave(group, ReduceScatterTokens)
#     model.head[0] = Enter(group, GatherTokens)
#     mark_partial(model.parameters(), group)
#
#     optimizer.zero_grad()  # from here on in place of its loop
#     for tokens, targets in microbatches:
#         criterion(model(tokens), targets, target_count).backward()
#     reduce_partial(model.parameters())  # once a step
#     check_replicas_agree(model.parameters(), group)  # in the first: finds a sum that is missing
#     # next grad_norm, clip and step, as there
#
# tokens and targets are whole. Where t does not divide T, pad them at the end, and have the loss
# ignore the padding. Add the learned positions of this rank's tokens only:
# embed(tokens) + position(shard_tokens(positions, group)). Rotary positions stay whole, because
# attention sees all tokens. Dropout masks must differ between ranks: torch.manual_seed(seed + rank)
# when the weights are made. Under autocast cast what a norm returns, or f sends float32.

# --- the same sum of partial gradients for a whole model, in one message


def mark_partial(parameters, group):
    """Note in the placement of each unsplit parameter that backward leaves a partial sum of its
    gradient, because it saw this rank's tokens only. Call it after all cuts."""
    group = group or dist.group.WORLD
    for p in parameters:
        where = placement(p)
        split = any(share_ranks(other, group) for other, _, _ in where["cuts"].values())
        if not split and group not in where["partial"]:
            p.placement = where | {"partial": [*where["partial"], group]}


def share_ranks(group, other):
    """Whether two groups have more ranks in common than this one."""
    ranks = set(dist.get_process_group_ranks(group))
    return len(ranks.intersection(dist.get_process_group_ranks(other))) > 1


def reduce_partial(parameters):
    """Complete the gradients that are partial sums, in one all-reduce per group. Call it once a
    step, after the last backward pass, on all ranks with the same parameters. A rank without a
    gradient adds zeros and gets the sum, so that all replicas take the same step."""
    members_of = {}  # {group: parameters}
    for p in dict.fromkeys(parameters):  # each once
        if p.requires_grad and placement(p)["partial"]:
            if p.grad is None:
                p.grad = torch.zeros_like(p)
            refuse_second_sum(p)
            for group in placement(p)["partial"]:
                members_of.setdefault(group, []).append(p)
    for group, members in members_of.items():
        flat = torch.cat([p.grad.flatten() for p in members])
        dist.all_reduce(flat, group=group)
        sums = flat.split([p.numel() for p in members])
        for p, total in zip(members, sums):
            p.grad.data.copy_(total.view_as(p))  # .data leaves _version as it is
            p.grad.completed_at = p.grad._version  # for refuse_second_sum


# --- a mistake that would be silent: refused


def refuse_second_sum(parameter):
    """Refuse a second sum, and a backward pass after a sum, which would add an unsummed gradient:
    reduce_partial inside the micro-batch loop. torch raises a tensor's _version with every change
    in place, so one equal to that of the sum says that nothing has happened since. (Clipping is a
    change, too: after it nothing is noticed.)"""
    gradient = parameter.grad
    completed_at = getattr(gradient, "completed_at", None)
    # any(): under a FLOP counter zero_grad() leaves _version as it is
    if completed_at is not None and completed_at == gradient._version and gradient.any():
        raise RuntimeError(
            "this gradient is summed over the ranks already: sum once a step, after the last "
            "backward pass, and call zero_grad() before the next one"
        )
    if not hasattr(parameter, "guarded"):  # the hook runs before backward adds to the gradient
        parameter.register_hook(lambda _: refuse_second_sum(parameter))
        parameter.guarded = True


# --- for model.py's GPT ---


def parallelize_sequence(model, group, whole_experts=False):
    """parallelize_tensors, then f and g replaced. Raises ValueError like that. Give every rank the
    whole tokens, targets, positions and sample_ids. After backward call `reduce_partial`.
    A pipeline stage without an embedding takes x (B, T/t, C) of the stage before, and needs
    positions (T,).

    whole_experts: leave the experts as they are. Each rank sends its own tokens to them, so cut
    them with expert_parallel.py over all tensor-parallel ranks, before or after this."""
    parallelize_tensors(model, group, whole_experts)
    if model.embed is not None:
        model.embed.token.leave = Leave(group, ReduceScatterTokens)
        shard_last_argument(model.embed.drop, group)  # see below
        if model.embed.position is not None:
            shard_last_argument(model.embed.position, group)
    for block in model.blocks.values():
        block.attn.enter = Enter(group, GatherTokens)
        block.attn.proj.leave = Leave(group, ReduceScatterTokens)
        shard_last_argument(block.attn_drop, group)
        shard_last_argument(block.mlp_drop, group)
        mlp = block.mlp
        if model.config.experts:
            split_mixture(mlp, group, whole_experts)
            mlp = mlp.shared  # None, or an ordinary MLP beside the experts
        if mlp is not None:
            mlp.enter = Enter(group, GatherTokens)
            mlp.down.leave = Leave(group, ReduceScatterTokens)
    if model.head is not None:
        model.head.enter = Enter(group, GatherTokens)
    # Experts' gradients are complete: an expert sees all tokens that chose it
    others = [p for name, p in model.named_parameters() if ".experts." not in name]
    mark_partial(others, group)
    return model


def split_mixture(mixture, group, whole_experts):
    # The balance loss needs sums over all tokens, and each rank's router saw T/t
    mixture.router.sum_over_sequence = Leave(group)
    if not whole_experts:
        mixture.enter = Enter(group, GatherTokens)  # of the router's weights and choice, too
        mixture.leave = Leave(group, ReduceScatterTokens)


def shard_last_argument(module, group):
    """For modules that see this rank's tokens. Their last argument, positions (T,) or dropout's key
    (B, T), is of all tokens: hand them this rank's shard."""

    def hook(module, args):
        *others, last = args
        return *others, None if last is None else shard_tokens(last, group)

    module.register_forward_pre_hook(hook)


# --- demo ---

import harness
import proof
import receipts.sequence_parallel
import tensor_parallel
from receipts.formulas import Group, scatter_operation, sizes_of


def main():
    args = harness.parser(__doc__).parse_args()
    config = harness.configure(args)
    harness.check_batch(args, 1)

    def check(world):
        tensor_parallel.check_heads(config, world)
        check_tokens(config, world)

    proof.launch(demo, args, check=check)


def check_tokens(config, t):
    """Raise ValueError where t ranks do not divide the sequence."""
    if config.context % t:
        longer = -(-config.context // t) * t
        raise ValueError(
            f"--context {config.context} does not divide over {t} ranks: use --context {longer}"
        )


def demo(run):
    args, group = run.args, dist.group.WORLD
    run.groups(tp=group)
    model = run.fill(parallelize_sequence(run.meta_model(), group))
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
        norm = tensor_parallel.grad_norm(parameters, group)
        run.check(loss, norm, model.named)
        harness.clip(parameters, norm, args.grad_clip)
        optimizer.step()
        run.log()
    sizes = sizes_of(args, run.config, tp=run.world, sp=True)
    ranks, scatter = Group("tp", run.world), scatter_operation(group)
    sent, held = receipts.sequence_parallel.expected(sizes, ranks, scatter)
    return run.receipt({"tp": run.world, "sp": run.world}, sent, held)


if __name__ == "__main__":
    harness.script(main)
