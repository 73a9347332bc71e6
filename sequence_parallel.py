"""Sequence parallelism: tensor parallelism (tensor_parallel.py, read that first) whose ranks also
share the tokens wherever it has them do the same work t times. Megatron-LM's --sequence-parallel.

What is split, on t ranks: matrices as in tensor parallelism; and between them, where each token is
worked on alone (norms, dropouts, biases, the residual stream), the sequence. Each rank has T/t
consecutive tokens there:

           split tokens      |          all tokens, split matrices          |          split tokens
    x ------> norm --------- f --> up (rows cut) -> gelu -> down (cols) --- g --> + bias -> dropout --> + --> y
    |  (B,T/t,C)             (B,T,C)        (B,T,H/t)         (B,T,C) partial     (B,T/t,C)             |
    +---------------------------------------------------------------------------------------------------+

(Papers on ring attention and Ulysses call their way sequence parallelism, too. Here attention sees
all tokens; for sequences too long for that, see context_parallel.py.)

What is sent:

                  here                                     in tensor parallelism
    f   forward   all-gather of the tokens                 nothing
        backward  reduce-scatter of their gradients        all-reduce
    g   forward   reduce-scatter of the partial sums       all-reduce
        backward  all-gather of the gradients              nothing

That is all there is to it: these two operators are replaced, the layers stay as they are. (The
paper calls this f g, and this g g-bar.) An all-reduce is a reduce-scatter and then an all-gather;
here the norm and the residual stream move in between. The embedding's g starts the split stream,
the head's f ends it; the loss does not change. Positions and dropout's key stay whole on every
rank; what lives on the split stream takes its slice. Where T does not divide by t, zeros fill up
the last pieces on their way into the split stream, and are cut off on their way out: they reach no
loss and no gradient.

Backward: an all-gather copies, so its backward sums the copies' gradients, and each rank needs
those of its own tokens: a reduce-scatter. g sums, so each term gets the sum's gradient, for all
tokens: an all-gather. Parameters of the split stream (norms, row-parallel biases, learned
positions) are whole on every rank, but each rank's gradient comes from its own tokens
alone: a partial sum, completed after the last backward (`reduce_partial`).

What it costs, per rank, e bytes an element, r = (t-1)/t: each block 4 all-gathers and 4
reduce-scatters of (B, T, C), r B T C e
each: 8 r B T C e, what tensor parallelism sends (T padded); and 2 r P e a step for the P parameters
of the split stream. It takes as long, too. Held of a block for backward (16 bit, hidden 4C, dropout
masks, no flash attention; a heads):

    tensor parallel                T B C (10 + 24/t + 5 a T / (C t))
    sequence parallel              T B C (34 + 5 a T / C) / t

The second is reached by `keep=False` alone: what f gathered, an input of the projections, is not
kept but gathered again in backward for their weights' gradient (2 all-gathers more: 10 r B T C e;
Megatron's choice, which hides them behind products). With `keep=True` these two inputs stay whole:
4 T B C (1 - 1/t) more is held, nothing more is sent.

When it is the wrong choice: hardly ever where tensor parallelism is right. It is where a message's
start costs more than its bytes (2 messages for each one), or the activations don't matter (short
sequences; every block recomputed anyway).

On a model of yours, cut as the usage block of tensor_parallel.py says (its notes hold here too):

    stream = Stream(group)
    embed.leave, mlp.down.leave = Leave(stream), Leave(stream)  # every g
    mlp.norm = nn.Sequential(mlp.norm, Enter(stream))  # every f, before q, k, v and the head too
    mark_partial(model.parameters(), group)  # after the cuts: what is whole sees this rank's tokens
    for tokens, targets in microbatches:  # loss: sum over these tokens / valid tokens of the batch
        stream.length = tokens.shape[1]  # T, before each forward pass
        criterion(model(tokens), targets, count).backward()
    reduce_partial(model.parameters())  # once a step
    tensor_parallel.clip_grad_norm(model.parameters(), 1.0, group)

With VocabParallelCrossEntropy every rank has the whole loss. A model that ends on the split stream
has a part of it on each rank: the sum over this rank's tokens / the count of the whole batch.

These mistakes make no error here:
- `mark_partial` or `reduce_partial` forgotten: the copies drift apart (`grad_norm` notices).
- Padding that counts as tokens in a loss on the split stream: the last pieces end with it.
- Dropout with equal seeds: on the split stream each rank has other tokens and draws its own mask.

    torchrun --nproc_per_node=4 sequence_parallel.py       python sequence_parallel.py --family llama --nproc 2 --gather-again

Papers: Korthikanti et al. 2022, Reducing activation recomputation, arXiv:2205.05198, section 4.2.2
and table 2.
"""

import functools

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

import tensor_parallel

# All-gather and reduce-scatter of one tensor. torch 2.13 renamed them; older versions know only the
# second name
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
native_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def gather(x, length, group):
    """All ranks' tokens in order: x (B, ceil(T / t), C) -> (B, T, C). length: T. Raises ValueError
    where x is no piece of that many tokens."""
    t = dist.get_world_size(group)
    if length is None or x.shape[1] != -(-length // t):
        raise ValueError(
            f"stream.length is {length}, but each of {t} ranks has {x.shape[1]} tokens: "
            "set stream.length to the tokens of the whole sequence before each forward pass"
        )
    mine = x.transpose(0, 1).contiguous()  # (T/t, B, C): collectives cut the first dimension
    whole = mine.new_empty(len(mine) * t, *mine.shape[1:])
    all_gather(whole, mine, group=group)
    # In one piece: else each matrix product would copy it, and keep that
    return whole[:length].transpose(0, 1).contiguous()


def reduce_scatter(x, group):
    """The sum of all ranks' x (B, T, C), of which each rank gets its tokens (B, ceil(T / t), C). On
    gloo by an all-to-all and a sum, as the receipt shows: the same bytes."""
    t = dist.get_world_size(group)
    size = -(-x.shape[1] // t)
    whole = x.new_zeros(size * t, x.shape[0], x.shape[2])
    whole[: x.shape[1]] = x.transpose(0, 1)  # (T, B, C), then padding
    if dist.get_backend(group) == "gloo":  # its own sends twice the bytes
        pieces = torch.empty_like(whole)
        dist.all_to_all_single(pieces, whole, group=group)
        mine = pieces.unflatten(0, (t, size)).sum(0)
    else:
        mine = whole.new_empty(size, *whole.shape[1:])
        native_reduce_scatter(mine, whole, group=group)
    return mine.transpose(0, 1).contiguous()


class GatherTokens(torch.autograd.Function):
    """f: all tokens from each rank's; in backward the gradients of all ranks' uses of them are
    summed, and cut again."""

    @staticmethod
    def forward(ctx, x, length, group):
        ctx.group = group
        return gather(x, length, group)

    @staticmethod
    def backward(ctx, grad):
        return reduce_scatter(grad, ctx.group), None, None


class ReduceScatterTokens(torch.autograd.Function):
    """g: this rank's tokens of the sum of all ranks' partial x; every rank's term gets the whole
    sum's gradient."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.length, ctx.group = x.shape[1], group
        return reduce_scatter(x, group)

    @staticmethod
    def backward(ctx, grad):
        return gather(grad, ctx.length, ctx.group), None


class GatherAndProject(torch.autograd.Function):
    """f and the projections behind it in one: x (B, T/t, C) -> the gathered x times each weight's
    transpose, (B, T, out / t).

    It keeps this rank's tokens only, and gathers the others' again for the weights' gradients: 1/t
    of the memory, for one more all-gather."""

    @staticmethod
    def forward(ctx, x, length, group, *weights):
        ctx.length, ctx.group = length, group
        ctx.save_for_backward(x, *weights)
        whole = gather(x, length, group)
        return tuple(F.linear(whole, w) for w in weights)

    @staticmethod
    def backward(ctx, *grads):
        x, *weights = ctx.saved_tensors
        whole = gather(x, ctx.length, ctx.group).flatten(0, 1)  # (B T, C)
        of_weights = [grad.flatten(0, 1).T @ whole for grad in grads]
        del whole
        # (B, T, C): one reduce-scatter for all
        of_x = sum(grad @ w for grad, w in zip(grads, weights))
        return reduce_scatter(of_x, ctx.group), None, None, *of_weights


class Stream:
    """What the operators of one model share: the group, and `length`, the tokens T of the forward
    pass under way. A piece of the sequence does not tell how much of it is padding: set `length`
    before each forward pass. (A GPT that `parallelize` has cut does so itself.)"""

    def __init__(self, group):
        self.group, self.length = group, None

    def shard(self, whole):
        """This rank's piece of something (..., T): (..., ceil(T / t)), padded with zeros. For
        targets, where 0 is a class: stream.shard(targets + 1) - 1 is padded with -1."""
        return tensor_parallel.shard_tensor(
            whole, -1, dist.get_rank(self.group), dist.get_world_size(self.group)
        )


class Enter(nn.Module):
    """f as a module, in place of tensor_parallel.Enter: what it gathers is kept for backward by the
    layers it enters."""

    def __init__(self, stream):
        super().__init__()
        self.stream = stream

    def forward(self, x):
        return GatherTokens.apply(x, self.stream.length, self.stream.group)


class Leave(nn.Module):
    """g as a module, in place of tensor_parallel.Leave."""

    def __init__(self, stream):
        super().__init__()
        self.stream = stream

    def forward(self, x):
        if x.shape[1] != self.stream.length:
            raise ValueError(
                f"stream.length is {self.stream.length}, but {x.shape[1]} tokens arrive: "
                "set stream.length to the tokens of the whole sequence before each forward pass"
            )
        return ReduceScatterTokens.apply(x, self.stream.group)


class EnterAndProject(nn.Module):
    """f that keeps nothing whole. The model calls up(enter(x)), gate(enter(x)): so this computes
    what the layers it enters would, as a list, and each of them (Projection) picks its product."""

    def __init__(self, stream, projections):
        super().__init__()
        # A list, no submodules: parameters keep their names
        self.stream, self.projections = stream, projections

    def forward(self, x):
        return GatherAndProject.apply(
            x, self.stream.length, self.stream.group, *(p.weight for p in self.projections)
        )


class Projection(nn.Module):
    """A column-parallel layer whose product EnterAndProject has computed; here its bias is
    added."""

    def __init__(self, index, weight, bias):
        super().__init__()
        self.index, self.weight, self.bias = index, weight, bias

    def forward(self, products):
        if isinstance(products, torch.Tensor):
            raise ValueError("a Projection takes enter(x), the products of EnterAndProject, not x")
        y = products[self.index]
        return y if self.bias is None else y + self.bias


class PositionEmbedding(nn.Module):
    """Learned positions of this rank's tokens: positions (T,) -> (T/t, C)."""

    def __init__(self, weight, stream):
        super().__init__()
        self.weight, self.stream = weight, stream

    def forward(self, positions):
        return F.embedding(self.stream.shard(positions), self.weight)


def enter(module, names, stream, keep):
    """Replace the operator f of `module`, behind which its projections `names` stand."""
    if keep:
        module.enter = Enter(stream)
        return
    layers = [getattr(module, name) for name in names]
    projections = [Projection(i, layer.weight, layer.bias) for i, layer in enumerate(layers)]
    module.enter = EnterAndProject(stream, projections)
    for name, projection in zip(names, projections):
        setattr(module, name, projection)


def mark_partial(parameters, group):
    """Say of whole parameters that they work on the split stream: each rank's gradient is a part of
    a sum over the group, which `reduce_partial` completes. Leaves split parameters alone."""
    group = group or dist.group.WORLD
    for p in parameters:
        where = tensor_parallel.placement(p)
        if group not in where["partial"] and not tensor_parallel.split_over(p, group):
            p.placement = where | {"partial": [*where["partial"], group]}


def refuse_complete(parameter):
    """Raise RuntimeError where the gradient is a complete sum, and nobody has touched it since."""
    grad = parameter.grad
    if grad is not None and getattr(grad, "complete_at", None) == grad._version:
        raise RuntimeError(
            "reduce_partial has completed these gradients already: call it once a step, "
            "after the last backward pass, and zero_grad() before the next one"
        )


def watch_next_backward(parameter):
    """Have the next backward pass refuse to add to the parameter's complete gradient."""

    def look(grad):
        handle.remove()
        refuse_complete(parameter)

    handle = parameter.register_hook(look)  # runs before the gradient is added


def reduce_partial(parameters):
    """Complete the gradients that are partial sums: one all-reduce a group, after the last backward
    of a step. Leaves out parameters without a gradient.

    Raises RuntimeError when called twice in a step. A backward pass before the next zero_grad()
    raises it too. Not noticed: gradients that were changed in between, by clipping say."""
    partial = {}
    for p in dict.fromkeys(parameters):  # each once
        if p.grad is not None and p.requires_grad:
            for group in getattr(p, "placement", {}).get("partial", ()):
                refuse_complete(p)
                partial.setdefault(group, []).append(p)
    for group, members in partial.items():
        grads = [p.grad for p in members]
        flat = torch.cat([grad.flatten() for grad in grads])
        dist.all_reduce(flat, group=group)
        for grad, total in zip(grads, flat.split([grad.numel() for grad in grads])):
            grad.copy_(total.view_as(grad))
    for members in partial.values():
        for p in members:
            p.grad.complete_at = p.grad._version
        watch_next_backward(members[0])


# --- for model.py's GPT ---


class Dropout(nn.Module):
    """The model's dropout on this rank's tokens: x (B, T/t, C), key (B, T) or None -> (B, T/t,
    C)."""

    def __init__(self, whole, stream):
        super().__init__()
        self.whole, self.stream = whole, stream

    def forward(self, x, key):
        return x if key is None else self.whole(x, self.stream.shard(key))


def begin(stream, model, args, kwargs):
    """Tells the stream T. Runs before the model's forward(x, positions, ...)."""
    x = args[0] if args else kwargs["x"]
    positions = kwargs.get("positions", args[1] if len(args) > 1 else None)
    if positions is None and model.embed is None:
        raise ValueError(
            "pass the positions (T,) of the whole sequence: x (B, T/t, C) does not tell T"
        )
    stream.length = x.shape[1] if positions is None else len(positions)


def parallelize(model, group, keep=True):
    """Cut a GPT across `group`, in place, and return it: tensor_parallel.parallelize, then the
    operators replaced. Works on the meta device and on real weights alike. Any of embedding, blocks
    and head may be missing.

    keep: whether inputs of projections stay whole from forward to backward, or are gathered again
    there. The model is called as before: tokens, targets, positions (T,) and samples are whole on
    every rank. Without an embedding (a later pipeline stage) x is (B, ceil(T / t), C), what the
    stage before returned, and positions must be given. After the last backward of a step the
    gradients in whose parameter's `placement` "partial" names the group must be summed over it:
    reduce_partial, or what else a layout completes partial gradients with.
    Raises ValueError as tensor_parallel.parallelize does, for other models say.
    """
    tensor_parallel.parallelize(model, group)
    stream = Stream(group)
    model.register_forward_pre_hook(functools.partial(begin, stream), with_kwargs=True)
    if model.embed is not None:
        model.embed.token.leave, model.embed.drop = Leave(stream), Dropout(model.embed.drop, stream)
        if model.embed.position is not None:
            model.embed.position = PositionEmbedding(model.embed.position.weight, stream)
    for block in model.blocks.values():
        enter(block.attn, ["qkv"], stream, keep)
        block.attn.proj.leave, mlp = Leave(stream), block.mlp
        # The router works on the split stream, what it chooses is gathered with the tokens
        if model.config.experts:
            mlp.enter, mlp.leave = Enter(stream), Leave(stream)
            # Sums over a sequence, for the balance loss, are partial
            mlp.router.over_sequence = tensor_parallel.Leave(group)
            mlp = mlp.shared
        if mlp is not None:
            enter(mlp, ["up"] if mlp.gate is None else ["gate", "up"], stream, keep)
            mlp.down.leave = Leave(stream)
        block.attn_drop, block.mlp_drop = (
            Dropout(block.attn_drop, stream),
            Dropout(block.mlp_drop, stream),
        )
    if model.head is not None:
        enter(model.head, ["out"], stream, keep)
    mark_partial(model.parameters(), group)
    return model


# Formulas, which the receipt holds against what was counted


# --- demo ---

import harness
from harness import formulas
from harness.saved import saved_bytes


def main():
    parser = harness.parser(__doc__)
    why = "gather inputs of projections again in backward, in place of keeping them: 1/t of them is held, a quarter more sent"
    parser.add_argument_group("sequence parallelism").add_argument(
        "--gather-again", action="store_true", help=why
    )
    args = parser.parse_args()
    config = harness.configure(args)
    harness.check_batch(args, 1)

    def check(world):
        with harness.refusing():
            tensor_parallel.check_heads(config, world)

    harness.launch(demo, args, check=check)


def demo(run):
    args, group, t, c, e = run.args, dist.group.WORLD, run.world, run.config, run.dtype.itemsize
    run.groups(tp=group)
    keep = not args.gather_again
    model = run.fill(parallelize(run.meta_model(), group, keep))
    parameters = list(model.parameters())
    optimizer = harness.make_optimizer(parameters, args)
    for step in run.steps(optimizer):
        optimizer.zero_grad(set_to_none=False)  # gradients stay in memory: the receipt counts them
        loss = run.zero()
        for tokens, targets, samples in run.microbatches(step):  # the whole batch, on every rank
            # Count: the global batch's tokens
            part = model(tokens, targets=targets, count=run.count, samples=samples)
            part.backward()
            loss += part.detach()
        reduce_partial(parameters)
        # Over the pieces of all ranks; the loss is already everyone's
        norm = harness.grad_norm(parameters, [group])
        run.check(loss, norm, model.named)
        harness.clip(parameters, norm, args.grad_clip)
        optimizer.step()
        run.log(loss, norm)

    size = formulas.sequence_parallel_sent(c, t, args.batch, c.context, e, c.layers, keep=keep)
    scatter = "all_to_all" if dist.get_backend(group) == "gloo" else "reduce_scatter"
    partial, ring = formulas.partial_parameters(c, c.layers), 2 * (t - 1) / t
    text = "{} r B T C e a block, {} r B T C e for both ends".format
    sent = {
        ("all_gather", "tp"): (size["all_gather"], text(4, 2) if keep else text(6, 3)),
        (scatter, "tp"): (size["reduce_scatter"], text(4, 2)),
        # 8: the squared gradient norm, one float64
        ("all_reduce", "tp"): (
            size["all_reduce"] + ring * (partial * e + 8),
            f"6 r B T e: the loss; 2 r P e: P = {partial:,}",
        ),
    }
    sequences = args.batch // args.microbatches
    one, gathered = (
        harness.activation_bytes(c, sequences, e),
        2 * sequences * c.context * c.width * e,
    )
    block = (one + keep * (t - 1) * gathered) / t  # what a rank keeps of a block
    held = run.states(
        formulas.parameters_held(c, t, c.layers) * e, "(P_whole + P_split / t) e, padded"
    )
    held["activations_peak"] = (
        c.layers * block,
        "1/t of one process's of all blocks" + keep * ", and what f gathered",
    )
    tokens, _, samples = run.microbatches(0)[0]
    counted = saved_bytes(model, next(iter(model.blocks.values())), tokens, samples=samples)
    each = sequences * c.context * c.width * e
    plain, width = harness.activation_bytes(c, sequences, e, t), -(-c.context // t)
    notes = [
        f"r = {t - 1}/{t}; in all {8 if keep else 10} r B T C e a block; tensor parallelism sends 8 r B T C e",
        f"{c.context} tokens in {t} pieces of {width}, {width * t - c.context} of them padding",
        f"kept of a block for backward, counted: {counted:,} bytes, {counted / each:.2f} B T C e a rank",
        f"  formula: {block / each:.2f}; tensor parallelism {plain / each:.2f}, one process {one / each:.2f}",
        "  (the paper's, in elements; without dropout masks, 2 of its 34 bytes, and 5 a T / C, which flash attention spares)",
    ]
    if c.norm == "rmsnorm":
        notes.append(
            "  counted too: q and k before rotation, in one memory with v; on a CPU, RMSNorm's intermediate result"
        )
    return run.receipt({"tp": t, "sp": t}, sent, held, notes)


if __name__ == "__main__":
    harness.script(main)
