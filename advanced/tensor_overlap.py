"""Tensor and sequence parallelism, faster: Enter's message travels while backward computes.

Read tensor_parallel.py first; what has --sp is for sequence_parallel.py. A linear layer's backward
gets dy, the gradient of its output, and computes dx, that of its input, and dW and db, those of its
parameters. In those files autograd computes all three, and then calls Enter's backward, which sends
dx and waits. But dW and db don't need what it sends:

    tensor_parallel.py   compute   dx | dW, db |                  | next layer
                         network               | all-reduce of dx |
    here                 compute   dx | dW, db           | next layer
                         network      | all-reduce of dx |
    --sp                 a reduce-scatter in place of the all-reduce
    --gather-again       compute   dx          | dW, db               | next layer
                         network   gather of x | reduce-scatter of dx |

So Enter and the layers behind it become one autograd function, because within one function we
choose the order. --gather-again is the paper's own form (Korthikanti et al. 2022): hold this rank's
T/t tokens of x until backward, instead of all T, and gather them once more.

When is it hidden? Let N be the outputs of all layers behind one Enter, before the cut. dW takes
2 B T C N/t operations, and the all-reduce sends 2 B T C e (t-1)/t bytes. At s operations and w
bytes a second it is hidden if N > (t-1) e s / w: for H100s (400 TFLOP/s, 450 GB/s), t = 8 and 16
bits 12,500, with --sp half of it. Llama 2 70B has 10,240 in q, k and v, and 57,344 in gate and up.
Leave's messages, and all in forward, are waited for. On GPUs set CUDA_DEVICE_MAX_CONNECTIONS=1, as
Megatron-LM asks for: else the message may start late. The results are the same.

    torchrun --nproc_per_node=4 -m advanced.tensor_overlap
    python -m advanced.tensor_overlap --sp --gather-again --nproc 2

Shoeybi et al. 2019, arXiv:1909.08053. The order: Megatron-LM's
LinearWithGradAccumulationAndAsyncCommunication. Korthikanti et al. 2022, arXiv:2205.05198.
"""

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.autograd.function import once_differentiable  # refuses a gradient of a gradient
from torch.overrides import has_torch_function

from sequence_parallel import (
    GatherTokens,
    all_gather_into_tensor,
    gather_tokens,
    reduce_scatter_tensor,
    shards_of_tokens,
)

# --- the plainest form: Enter and one layer


class EnterLinear(torch.autograd.Function):
    """Enter, then F.linear with a shard of weight and bias: x (B, T, C) -> (B, T, out / t).

    class OverlappedLinear(ColumnParallelLinear):    # put no Enter before it
        def __init__(self, linear, group):
            super().__init__(linear, group)
            self.group = group

        def forward(self, x):
            return EnterLinear.apply(x, self.weight, self.bias, self.group)"""

    @staticmethod
    def forward(ctx, x, weight, bias, group):
        ctx.group = group
        ctx.save_for_backward(x, weight)
        return F.linear(x, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        x, weight = ctx.saved_tensors
        x, weight = x.to(dy.dtype), weight.to(dy.dtype)  # under autocast F.linear cast them too
        dx = dy @ weight  # this rank's part of the sum
        message = dist.all_reduce(dx, group=ctx.group, async_op=True)
        rows = dy.flatten(0, -2)  # (B T, out / t)
        dw = rows.T @ x.flatten(0, -2)
        db = rows.sum(0) if ctx.needs_input_grad[2] else None  # None also without a bias
        message.wait()
        return dx, dw, db, None


# --- Enter and all layers that read its result, such as gate and up. They share one message


class EnterAndProject(nn.Module):
    """Boundary(Enter, group) and the ColumnParallelLinears behind it in one: x -> {layer: its
    output}. Put each of `layers` where its ColumnParallelLinear was: called with that dict, it
    returns its own output. So a model's forward stays as it is. Nothing else may read the dict.

    gather_again: with GatherTokens only. Hold x (B, T/t, C) instead of what was gathered."""

    def __init__(self, enter, layers, gather_again=False):
        super().__init__()
        self.enter, self.gather_again = enter, gather_again
        # In a list, which registers nothing: else state_dict would have them twice
        self.layers = [ProjectedLinear(layer) for layer in layers]

    def forward(self, x):
        weights, biases = zip(*((layer.weight, layer.bias) for layer in self.layers))
        # Under torch.compile, which orders a block's backward itself, and where a tensor subclass
        # replaces F.linear (zero_bubble.py), Enter itself. Only EnterLinears can gather again
        plain = torch.compiler.is_compiling() or has_torch_function((x,))
        if plain and not self.gather_again:
            return dict(zip(self.layers, linears(self.enter(x), weights, biases)))
        if torch.is_autocast_enabled(x.device.type):  # else F.linear casts, after this is sent
            x = x.to(torch.get_autocast_dtype(x.device.type))
        gathers = issubclass(self.enter.function, GatherTokens)
        options = self.enter.group, gathers, self.gather_again
        return dict(zip(self.layers, EnterLinears.apply(x, *options, *weights, *biases)))


class ProjectedLinear(nn.Module):
    """Takes the place of a layer that EnterAndProject computes."""

    def __init__(self, layer):
        super().__init__()
        self.weight, self.bias = layer.weight, layer.bias

    def forward(self, outputs):
        return outputs[self]


class EnterLinears(torch.autograd.Function):
    """EnterLinear for several layers. parameters: all weights, then all biases or Nones. gathers:
    GatherTokens is in the place of Enter."""

    @staticmethod
    def forward(ctx, x, group, gathers, gather_again, *parameters):
        ctx.group, ctx.gathers, ctx.gather_again = group, gathers, gather_again
        full = gather_tokens(x, group) if gathers else x  # (B, T, C)
        n = len(parameters) // 2
        ctx.save_for_backward(x if gather_again else full, *parameters[:n])
        return linears(full, parameters[:n], parameters[n:])

    @staticmethod
    @once_differentiable
    def backward(ctx, *dys):
        x, *weights = ctx.saved_tensors
        if ctx.gather_again:
            finish_gather = start_gather(x, ctx.group)
        dx = gradient_of_input(dys, weights)
        if ctx.gathers:
            finish_sum = start_reduce_scatter(dx, ctx.group)
            del dx  # (B, T, C): the message has a copy of its own
        else:
            message = dist.all_reduce(dx, group=ctx.group, async_op=True)
        if ctx.gather_again:
            x = finish_gather()
            del finish_gather  # it holds what it received, as large
        of_parameters = gradients_of_parameters(dys, x, ctx.needs_input_grad[4:])
        if ctx.gathers:
            dx = finish_sum()
        else:
            message.wait()
        return dx, None, None, None, *of_parameters


def linears(x, weights, biases):
    """x (B, T, C) -> (B, T, out / t) of each layer."""
    return tuple(F.linear(x, *pair) for pair in zip(weights, biases))


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


# --- sequence parallelism's messages, started: both return a function that waits for the tokens


def start_gather(x, group):
    """All ranks' tokens in order: x (B, T/t, C) -> (B, T, C)."""
    shards = x.new_empty(dist.get_world_size(group), *x.shape)  # (t, B, T/t, C)
    flat = shards.flatten(0, 1)  # a view, through which the message fills `shards`
    work = all_gather_into_tensor(flat, x.contiguous(), group=group, async_op=True)

    def finish():
        work.wait()
        return shards.transpose(0, 1).flatten(1, 2)

    return finish


def start_reduce_scatter(x, group):
    """This rank's tokens of the sum of all ranks' x: (B, T, C) -> (B, T/t, C)."""
    shards = shards_of_tokens(x, group)  # (t, B, T/t, C)
    if dist.get_backend(group) == "gloo":  # for CPUs: its reduce-scatter sends twice the bytes
        received = torch.empty_like(shards)
        work = dist.all_to_all_single(received, shards, group=group, async_op=True)
    else:
        received = torch.empty_like(shards[:1])
        work = reduce_scatter_tensor(received, shards, group=group, async_op=True)

    def finish(sent=shards):  # the message reads them until the wait
        work.wait()
        return received[0] if len(received) == 1 else received.sum(0)

    return finish


# --- a model of yours. First cut it, as docs/learn/tensor-parallelism.md shows. Then
#
#     again = False  # True: hold x (B, T/t, C). Only with sequence parallelism
#     pairs = [model.head]  # each is Sequential(Enter, the layer)
#     for block in model.blocks:
#         pairs += [block.attn.qkv, block.mlp.up]
#     for pair in pairs:
#         enter, layer = pair
#         pair[0] = EnterAndProject(enter, [layer], again)
#         pair[1] = pair[0].layers[0]
#
# Where gate and up share one Enter, in norm = nn.Sequential(the norm, Boundary(Enter, group)):
#
#   norm[1] = EnterAndProject(norm[1], [mlp.gate, mlp.up], again)
#   mlp.gate, mlp.up = norm[1].layers
#
# Parameters stay the same tensors, so optimizers and ties stay valid. Leave no other Enter before
# them: the gradient of its input would be t times too large, on all ranks alike, so nothing sees it
# but grad_norm, which must be the same before and after this.

# --- for model.py's GPT ---


def overlap(model, gather_again=False):
    """After parallelize_tensors or parallelize_sequence: replace each Enter that has linear layers
    behind it, in place, and return the model. A mixture's has experts behind it, and stays."""

    def project(module, *names):
        layers = [getattr(module, name) for name in names]
        module.enter = EnterAndProject(module.enter, layers, gather_again)
        for name, layer in zip(names, module.enter.layers):
            setattr(module, name, layer)

    for block in model.blocks.values():
        project(block.attn, "qkv")
        mlp = block.mlp.shared if model.config.experts else block.mlp
        if mlp is not None and mlp.gate is not None:
            project(mlp, "gate", "up")
        elif mlp is not None:
            project(mlp, "up")
    if model.head is not None:
        project(model.head, "out")
    return model


# --- demo ---

from torch.utils._python_dispatch import TorchDispatchMode

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
        if args.sp and config.context % world:
            longer = -(-config.context // world) * world
            why = f"--context {config.context} does not divide over {world} ranks"
            raise harness.Refused(f"{why}: use --context {longer}")

    proof.launch(demo, args, check=check)


class Order(TorchDispatchMode):
    """Lists matmuls and messages in the order in which they begin."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        namespace, name = function._schema.name.split("::")
        if namespace == "c10d" or name in ("mm", "addmm"):
            self.names.append(name.strip("_"))
        return function(*args, **(kwargs or {}))


def show_order(run, model):
    """Print how backward begins: with the head, the last layer."""
    tokens, targets, samples = next(iter(run.microbatches(0)))
    loss = model(tokens, targets=targets, target_count=run.target_count, sample_ids=samples)
    with Order() as order:
        torch.autograd.grad(loss, list(model.parameters()))
    began = order.names[: 4 if run.args.gather_again else 3]
    plain = "sequence_parallel.py" if run.args.sp else "tensor_parallel.py"
    run.print(f"backward of the head starts {', '.join(began)} ({plain}: mm, mm, the message)")


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
    show_order(run, model)
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
