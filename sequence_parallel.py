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
    SaveFirst,
    gradient_of_input,
    gradients_of_parameters,
    linears,
    parallelize_tensors,
    placement,
    split_over,
)

# --- f and g, in place of tensor parallelism's. The paper calls f g, and g g-bar. Their messages:
#
#     gather_tokens            (B, T/t, C) -> (B, T, C)    all ranks' tokens, in order
#     reduce_scatter_tokens    (B, T, C) -> (B, T/t, C)    this rank's tokens of the sum


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
    """The picture without dropout: x (B, T/t, C) -> (B, T/t, C). up (H/t, C) and down (C, H/t) are
    shards. norm and bias are whole, but this rank's tokens are all that they see: their gradients
    are partial sums (mark_partial, below)."""
    full = GatherTokens.apply(norm(x), group)  # f: (B, T, C)
    hidden = F.gelu(F.linear(full, up))  # (B, T, H/t)
    partial = F.linear(hidden, down)  # (B, T, C)
    return x + ReduceScatterTokens.apply(partial, group) + bias  # g: (B, T/t, C)


# --- the two messages. async_op: start, and return a function that waits for the tokens

# torch 2.13 renamed these two; older versions know only the second name
all_gather_into_tensor = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_tensor = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def gather_tokens(x, group, async_op=False):
    """All ranks' tokens in order: x (B, T/t, C) -> (B, T, C)."""
    x = x.contiguous()
    shards = x.new_empty(dist.get_world_size(group), *x.shape)  # (t, B, T/t, C)
    # flatten(0, 1) is a view: this fills `shards`
    work = all_gather_into_tensor(shards.flatten(0, 1), x, group=group, async_op=True)

    def finish(sent=x):  # which must live until the wait
        work.wait()
        return shards.transpose(0, 1).flatten(1, 2)

    return finish if async_op else finish()


def reduce_scatter_tokens(x, group, async_op=False):
    """This rank's tokens of the sum of all ranks' x: (B, T, C) -> (B, T/t, C)."""
    shards = x.unflatten(1, (dist.get_world_size(group), -1))
    shards = shards.transpose(0, 1).contiguous()  # (t, B, T/t, C)
    options = dict(group=group, async_op=True)
    if dist.get_backend(group) == "gloo":  # for CPUs: its reduce-scatter sends twice the bytes
        received = torch.empty_like(shards)
        work = dist.all_to_all_single(received, shards, **options)
    else:
        received = torch.empty_like(shards[:1])
        work = reduce_scatter_tensor(received[0], shards.flatten(0, 1), **options)

    def finish(sent=shards):  # which must live until the wait
        work.wait()
        return received[0] if len(received) == 1 else received.sum(0)

    return finish if async_op else finish()


# --- f and g as modules, and the positions of a rank's tokens


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
    step, after the last backward pass; all ranks give the same parameters. A rank without a
    gradient adds zeros and gets the sum: if an optimizer skipped a parameter on one rank only, its
    replicas would drift apart."""
    partial = {}  # {group: parameters}
    for p in dict.fromkeys(parameters):  # each once
        if p.requires_grad and placement(p)["partial"]:
            refuse_summed(p)
            if p.grad is None:
                p.grad = torch.zeros_like(p)
            for group in placement(p)["partial"]:
                partial.setdefault(group, []).append(p)
    for group, members in partial.items():
        flat = torch.cat([p.grad.flatten() for p in members])
        dist.all_reduce(flat, group=group)
        for p, total in zip(members, flat.split([p.numel() for p in members])):
            p.grad.copy_(total.view_as(p))
    for members in partial.values():
        note_sum(members)


# --- faster: backward sends while it computes
#
#     keep_gathered    dx, its reduce-scatter starts, dW, db, wait
#     else             all-gather of x starts, then the same; dW waits for x


class SequenceEnterAndProject(EnterAndProject):
    """Takes the place of a SequenceEnter. keep_gathered: hold all tokens until backward. Else hold
    this rank's: backward gathers all again while it computes their gradients."""

    function = GatherTokens  # where forward takes plain f

    def __init__(self, group, layers, keep_gathered=True):
        super().__init__(group, layers)
        self.keep_gathered = keep_gathered

    def forward(self, x):  # under torch.compile too: plain f would hold all tokens
        return super().forward(x) if self.keep_gathered else self.project(x)

    def products(self, x, weights, biases):
        kept = gather_tokens(x.detach(), self.group) if self.keep_gathered else x.detach()
        x = SaveFirst.apply(x, kept, *weights)
        return GatherLinears.apply(x, kept, self.group, self.keep_gathered, *weights, *biases)


class GatherLinears(torch.autograd.Function):
    """f, then F.linear with each layer's weight and bias. kept: all tokens, or this rank's."""

    @staticmethod
    def forward(ctx, x, kept, group, keep_gathered, *parameters):
        ctx.group, ctx.keep_gathered = group, keep_gathered
        ctx.saver = x.grad_fn  # SaveFirst's node, which holds kept and the weights
        return linears(kept if keep_gathered else gather_tokens(kept, group), parameters)

    @staticmethod
    @once_differentiable
    def backward(ctx, *dys):
        x, *weights = ctx.saver.saved_tensors
        if not ctx.keep_gathered:
            finish_gather = gather_tokens(x, ctx.group, async_op=True)
        dx = gradient_of_input(dys, weights)
        finish_sum = reduce_scatter_tokens(dx, ctx.group, async_op=True)
        del dx  # of all tokens; its copy is on its way
        if not ctx.keep_gathered:
            x = finish_gather()
            del finish_gather  # it holds a copy of all tokens
        of_parameters = gradients_of_parameters(dys, x, ctx.needs_input_grad[4:])
        return finish_sum(), None, None, None, *of_parameters


# --- a mistake that would be silent: refused


def refuse_summed(parameter):
    """Refuse a gradient that reduce_partial has completed and nothing has changed since: torch
    counts a tensor's changes in its _version, and zero_grad() makes one."""
    grad = parameter.grad
    if grad is not None and getattr(grad, "completed_at", None) == grad._version:
        raise RuntimeError(
            "this gradient is summed over the ranks already: sum once a step, after the last "
            "backward pass, and call zero_grad() before the next one"
        )


def note_sum(parameters):
    """From now on refuse another sum, and another backward pass, which would add an unsummed
    gradient to the sum."""
    for p in parameters:
        p.grad.completed_at = p.grad._version
        if not hasattr(p, "watched_for_partial"):
            p.register_hook(lambda _, p=p: refuse_summed(p))  # before backward adds to p.grad
            p.watched_for_partial = True


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
    enter_and_project = functools.partial(SequenceEnterAndProject, keep_gathered=keep_gathered)
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
        norm = tensor_parallel.grad_norm(parameters)
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
