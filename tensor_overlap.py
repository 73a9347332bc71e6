"""Tensor and sequence parallelism, faster: f's message travels while backward computes.

Read tensor_parallel.py first, and sequence_parallel.py for the half of this file with --sp.

A linear layer's backward gets dy, the gradient of its output, and computes dx, that of its input,
and dW and db, those of its parameters. In those files autograd computes all three, and then calls
f's backward, which sends dx and waits. But dW and db don't need what f sends:

    tensor_parallel.py     dx, dW, db, all-reduce of dx
    here                   dx, its all-reduce starts, dW, db, wait

So f and the layers behind it become one autograd function, because within one function we choose
the order. With H outputs of all layers behind f, before the cut:

    dW         2 B T C H/t operations
    message    2 r B T C e bytes, half with --sp
    hidden if  H > t r e x (operations a second) / (bytes a second). H100s with 400 TFLOP/s and
               450 GB/s, t = 8, 16 bits: H > 12,500

g's messages, and all in forward, are still waited for. The demo shows that the gradients are right;
that a message is hidden only a profiler on GPUs shows.

With sequence parallelism f is an all-gather, and its backward a reduce-scatter:

    --sp              dx, its reduce-scatter starts, dW, db, wait
    --gather-again    x's all-gather starts, dx, its reduce-scatter starts, wait for x, dW, db, wait

--gather-again is the paper's own form (Korthikanti et al. 2022): hold this rank's T/t tokens of x
until backward, instead of all T. A block sends 10 r B T C e bytes, not 8.

    torchrun --nproc_per_node=4 tensor_overlap.py
    python tensor_overlap.py --sp --gather-again --nproc 2

Shoeybi et al. 2019, arXiv:1909.08053. The order: Megatron-LM's
LinearWithGradAccumulationAndAsyncCommunication. Korthikanti et al. 2022, arXiv:2205.05198.
"""

from functools import partial

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.autograd.function import once_differentiable  # refuses a gradient of a gradient
from torch.overrides import has_torch_function

from sequence_parallel import GatherTokens, gather_tokens, start_gather, start_reduce_scatter
from tensor_parallel import Enter

# --- the plainest form: f and one layer


class EnterLinear(torch.autograd.Function):
    """F.linear(f(x), weight, bias), with weight and bias a shard: x (B, T, C) -> (B, T, out / t).

    # in a ColumnParallelLinear's forward, without an Enter before it:
    return EnterLinear.apply(x, self.weight, self.bias, group)"""

    @staticmethod
    def forward(ctx, x, weight, bias, group):
        ctx.group = group
        ctx.save_for_backward(x, weight)
        return F.linear(x, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        x, weight = ctx.saved_tensors
        dx = dy @ weight.to(dy.dtype)  # this rank's part of the sum. (F.linear's cast, in autocast)
        message = dist.all_reduce(dx, group=ctx.group, async_op=True)
        x, dy = x.flatten(0, -2).to(dy.dtype), dy.flatten(0, -2)  # (B T, ...)
        dw = dy.T @ x
        db = dy.sum(0) if ctx.needs_input_grad[2] else None  # without a bias
        message.wait()
        return dx, dw, db, None


# --- f and all layers that read its result, such as q, k and v. They share one message


class EnterAndProject(Enter):
    """Takes the place of an Enter, of tensor or of sequence parallelism, and computes the layers
    behind it. It returns {layer: its output}, from which each ColumnParallelLinear takes its own.

        qkv = ColumnParallelLinear(attn.qkv, group)
        attn.qkv = nn.Sequential(EnterAndProject(Enter(group), [qkv]), qkv)
        mlp.gate, mlp.up = (ColumnParallelLinear(m, group) for m in (mlp.gate, mlp.up))
        project = EnterAndProject(Enter(group, GatherTokens), [mlp.gate, mlp.up])
        mlp.norm = nn.Sequential(mlp.norm, project)    # both get what it returns

    gather_again: with GatherTokens only. Hold x (B, T/t, C) instead of what f gathered."""

    def __init__(self, enter, layers, gather_again=False):
        super().__init__(enter.group, enter.function)
        self.layers = list(layers)  # a plain list: else state_dict would have them twice
        for layer in layers:
            layer.forward = partial(own_output, layer, layer.forward)
        self.gather_again = gather_again

    def forward(self, x):
        # Two cases take plain f: torch.compile, which orders a block's backward itself, and
        # zero_bubble.py, which replaces F.linear to put off the weights' gradients
        plain = torch.compiler.is_compiling() or has_torch_function((x,))
        if plain and not self.gather_again:
            return super().forward(x)
        if torch.is_autocast_enabled(x.device.type):  # else F.linear casts, after this is sent
            x = x.to(torch.get_autocast_dtype(x.device.type))
        weights, biases = zip(*((layer.weight, layer.bias) for layer in self.layers))
        kept = x.detach()
        gathers = self.function is GatherTokens
        if gathers and not self.gather_again:
            kept = gather_tokens(kept, self.group)
        x = SaveFirst.apply(x, kept, *weights)
        if gathers:
            options = kept, self.group, self.gather_again
            outputs = GatherLinears.apply(x, *options, *weights, *biases)
        else:
            outputs = EnterLinears.apply(x, self.group, *weights, *biases)
        return dict(zip(self.layers, outputs))


def own_output(layer, forward, x):
    """A layer's forward behind EnterAndProject, which has computed the output, or has not."""
    return x[layer] if isinstance(x, dict) else forward(x)


class SaveFirst(torch.autograd.Function):
    """Identity, which saves x and the weights for the function after it.

    It would save them after its matmuls. But activation checkpointing stops its second forward as
    soon as all is saved. So if a checkpointed region ends with these layers (train.py --recompute
    selective), their matmuls don't run twice. Without checkpointing save in the function itself."""

    @staticmethod
    def forward(ctx, x, *saved):
        ctx.save_for_backward(*saved)
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        return grad, *[None] * (len(ctx.needs_input_grad) - 1)


class EnterLinears(torch.autograd.Function):
    """Tensor parallelism's f and the layers. parameters: all weights, then all biases or Nones."""

    @staticmethod
    def forward(ctx, x, group, *parameters):
        ctx.group = group
        ctx.saver = x.grad_fn  # SaveFirst's node: its saved_tensors are x and the weights
        return linears(x, parameters)

    @staticmethod
    @once_differentiable
    def backward(ctx, *dys):
        x, *weights = ctx.saver.saved_tensors
        dx = gradient_of_input(dys, weights)
        message = dist.all_reduce(dx, group=ctx.group, async_op=True)
        of_parameters = gradients_of_parameters(dys, x, ctx.needs_input_grad[2:])
        message.wait()
        return dx, None, *of_parameters


class GatherLinears(torch.autograd.Function):
    """Sequence parallelism's f and the layers. kept: all tokens, or this rank's to gather again."""

    @staticmethod
    def forward(ctx, x, kept, group, gather_again, *parameters):
        ctx.group, ctx.gather_again = group, gather_again
        ctx.saver = x.grad_fn  # SaveFirst's node: its saved_tensors are `kept` and the weights
        return linears(gather_tokens(kept, group) if gather_again else kept, parameters)

    @staticmethod
    @once_differentiable
    def backward(ctx, *dys):
        x, *weights = ctx.saver.saved_tensors
        if ctx.gather_again:
            finish_gather = start_gather(x, ctx.group)
        dx = gradient_of_input(dys, weights)
        finish_sum = start_reduce_scatter(dx, ctx.group)
        del dx  # (B, T, C): the message has a copy of its own
        if ctx.gather_again:
            x = finish_gather()
            del finish_gather  # it holds what it received, as large
        of_parameters = gradients_of_parameters(dys, x, ctx.needs_input_grad[4:])
        return finish_sum(), None, None, None, *of_parameters


def linears(x, parameters):
    """x (B, T, C) -> (B, T, out / t) of each layer. parameters: all weights, then all biases."""
    n = len(parameters) // 2
    return tuple(F.linear(x, *pair) for pair in zip(parameters[:n], parameters[n:]))


def gradient_of_input(dys, weights):
    """dy (B, T, out / t) of each layer -> dx (B, T, C), their sum of dy W."""
    dx = None
    for dy, weight in zip(dys, weights):
        rows, weight = dy.flatten(0, -2), weight.to(dy.dtype)  # F.linear's cast, under autocast
        dx = rows @ weight if dx is None else torch.addmm(dx, rows, weight)
    return dx.view(*dys[0].shape[:-1], -1)


def gradients_of_parameters(dys, x, needed):
    """dW = dy^T x of each layer, then db of each. needed: for each weight, then each bias, whether
    it is trained."""
    x, dys = x.flatten(0, -2), [dy.flatten(0, -2) for dy in dys]
    of_weights = [dy.T @ x if needs else None for dy, needs in zip(dys, needed)]
    of_biases = [dy.sum(0) if needs else None for dy, needs in zip(dys, needed[len(dys) :])]
    return *of_weights, *of_biases


# --- for model.py's GPT ---


def overlap(model, gather_again=False):
    """After parallelize_tensors or parallelize_sequence: replace each f that has linear layers
    behind it, in place, and return the model. A mixture's f has experts behind it, and stays."""

    def project(module, *layers):
        module.enter = EnterAndProject(module.enter, layers, gather_again)

    for block in model.blocks.values():
        project(block.attn, block.attn.qkv)
        mlp = block.mlp.shared if model.config.experts else block.mlp
        if mlp is not None and mlp.gate is not None:
            project(mlp, mlp.gate, mlp.up)
        elif mlp is not None:
            project(mlp, mlp.up)
    if model.head is not None:
        project(model.head, model.head.out)
    return model


# --- demo ---

import harness
import proof
import receipts.sequence_parallel
import receipts.tensor_parallel
import sequence_parallel
import tensor_parallel
from receipts.formulas import Group, scatter_operation, sizes_of


def main():
    parser = harness.parser(__doc__)
    parser.add_argument("--sp", action="store_true", help="sequence parallelism")
    why = "with --sp: hold 1/t of the layers' inputs, and send a quarter more"
    parser.add_argument("--gather-again", action="store_true", help=why)
    args = parser.parse_args()
    if args.gather_again and not args.sp:
        parser.error("--gather-again needs --sp: without it nothing is gathered")
    config = harness.configure(args)
    harness.check_batch(args, 1)

    def check(world):
        tensor_parallel.check_heads(config, world)
        if args.sp:
            sequence_parallel.check_tokens(config, world)

    proof.launch(demo, args, check=check)


def demo(run):
    args, group = run.args, dist.group.WORLD
    run.groups(tp=group)
    parallelize = tensor_parallel.parallelize_tensors
    if args.sp:
        parallelize = sequence_parallel.parallelize_sequence
    model = parallelize(run.meta_model(), group)
    model = run.fill(overlap(model, args.gather_again))
    parameters = list(model.parameters())
    optimizer = harness.make_optimizer(parameters, args)
    for step in run.steps(optimizer):
        optimizer.zero_grad(set_to_none=False)  # gradients stay in memory: the receipt counts them
        loss = run.zero()
        for tokens, targets, samples in run.microbatches(step):  # the whole batch, on every rank
            part = model(tokens, targets=targets, target_count=run.target_count, sample_ids=samples)
            part.backward()
            loss += part.detach()  # the same on every rank
        if args.sp:
            sequence_parallel.reduce_partial(parameters)
        norm = tensor_parallel.grad_norm(parameters, group)
        run.check(loss, norm, model.named)
        harness.clip(parameters, norm, args.grad_clip)
        optimizer.step()
        run.log()

    ranks, layout = Group("tp", run.world), {"tp": run.world}
    if not args.sp:
        sent, held = receipts.tensor_parallel.expected(sizes_of(args, run.config, **layout), ranks)
        return run.receipt(layout, sent, held)
    sizes = sizes_of(args, run.config, sp=True, gather_again=args.gather_again, **layout)
    scatter = scatter_operation(group)
    sent, held = receipts.sequence_parallel.expected(sizes, ranks, scatter)
    return run.receipt(layout | {"sp": run.world}, sent, held)


if __name__ == "__main__":
    harness.script(main)
