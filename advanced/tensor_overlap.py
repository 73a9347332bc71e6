"""Tensor and sequence parallelism, faster: Enter's message travels while backward computes.

Read tensor_parallel.py first; "tokens split" is for sequence_parallel.py. A linear layer's backward
gets dy, the gradient of its output, and computes dx, that of its input, and dW and db, those of its
parameters. In those files autograd computes all three, and then calls Enter's backward, which sends
dx and waits. But dW and db don't need what it sends:

    tensor_parallel.py   compute   dx | dW, db |                  | next layer
                         network               | all-reduce of dx |
    here                 compute   dx | dW, db           | next layer
                         network      | all-reduce of dx |
    tokens split         a reduce-scatter in place of the all-reduce
    gather_again         compute   dx          | dW, db               | next layer
                         network   gather of x | reduce-scatter of dx |

So Enter and the layers behind it become one autograd function, because within one function we
choose the order. gather_again is the paper's own form (Korthikanti et al. 2022): hold this rank's
T/t tokens of x until backward, instead of all T, and gather them once more: (t-1)/t B T C e bytes
for each Enter. All else that is sent is as in those files.

When is it hidden? Let N be the outputs of all layers behind one Enter, before the cut. dW takes
2 B T C N/t operations, and the all-reduce sends 2 B T C e (t-1)/t bytes. At s operations and w
bytes a second it is hidden if N > (t-1) e s / w: for H100s (400 TFLOP/s, 450 GB/s), t = 8 and 16
bits 12,500, half of it with tokens split.
Leave's messages, and all in forward, are waited for. On GPUs set CUDA_DEVICE_MAX_CONNECTIONS=1, as
Megatron-LM asks for: else the message may start late. The results are the same.

    torchrun --nproc_per_node=4 -m advanced.tensor_overlap
    (needs model.py, tensor_parallel.py and sequence_parallel.py)

Megatron-LM's LinearWithGradAccumulationAndAsyncCommunication (the order). arXiv:2205.05198.
"""

import argparse

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.autograd.function import once_differentiable  # refuses a gradient of a gradient
from torch.overrides import has_torch_function
from torch.utils._python_dispatch import TorchDispatchMode

from sequence_parallel import (
    GatherTokens,
    all_gather_into_tensor,
    gather_tokens,
    reduce_scatter_tensor,
    shards_of_tokens,
)

# --- the plainest form: Enter and one layer


class OverlappedLinear(nn.Module):
    """In place of Enter and one ColumnParallelLinear. Leave no other Enter before it: the gradient
    of its input would be t times too large, on all ranks alike."""

    def __init__(self, layer, group):
        super().__init__()
        self.weight, self.bias, self.group = layer.weight, layer.bias, group

    def forward(self, x):
        return EnterLinear.apply(x, self.weight, self.bias, self.group)


class EnterLinear(torch.autograd.Function):
    """Enter, then F.linear with a shard of weight and bias: x (B, T, C) -> (B, T, out / t)."""

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
    output}, an Outputs. Put each of `layers` where its ColumnParallelLinear was: called with the
    Outputs, it returns its own. So a model's forward stays as it is, if between Enter and layers it
    reads no more than the shape. Parameters stay the same tensors, for optimizers and ties.

    gather_again: with GatherTokens only. Hold x (B, T/t, C) instead of what was gathered."""

    def __init__(self, enter, layers, gather_again=False):
        super().__init__()
        self.enter, self.gather_again = enter, gather_again
        # In a list, which registers nothing: else state_dict would have them twice
        self.layers = [ProjectedLinear(layer) for layer in layers]

    def forward(self, x):
        weights, biases = zip(*((layer.weight, layer.bias) for layer in self.layers))
        # Under torch.compile, which orders a block's backward itself, and where a mode or a tensor
        # subclass replaces F.linear (zero_bubble.py), Enter itself. Only EnterLinears gathers again
        plain = torch.compiler.is_compiling() or has_torch_function((x,))
        if plain and not self.gather_again:
            return Outputs(zip(self.layers, linears(self.enter(x), weights, biases)))
        if torch.is_autocast_enabled(x.device.type):  # else F.linear casts, after this is sent
            x = x.to(torch.get_autocast_dtype(x.device.type))
        gathers = issubclass(self.enter.function, GatherTokens)
        options = self.enter.group, gathers, self.gather_again
        return Outputs(zip(self.layers, EnterLinears.apply(x, *options, *weights, *biases)))


class Outputs(dict):
    """{layer: its output (B, T, out / t)}. Passed on as if it were their input."""

    @property
    def shape(self):  # transformers' attention asks for it, and uses all but the last dimension
        return next(iter(self.values())).shape


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

if __name__ == "__main__":  # importing this file needs no model.py
    from model import GPT, Config, OneProcess, Sent, join_ranks, leave, text_batch
    from sequence_parallel import parallelize_sequence, reduce_partial
    from tensor_parallel import grad_norm, parallelize_tensors, unshard


def main():
    parser = argparse.ArgumentParser(description="train a GPT in each form, and prove it")
    parser.add_argument("--steps", type=int, default=2)
    args = parser.parse_args()
    device, t = join_ranks(), dist.get_world_size()
    sizes = dict(layers=2, heads=2 * t, width=8 * t, context=8 * t)
    gpt2 = Config(**sizes)
    llama = Config(**sizes, positions="rope", norm="rmsnorm", mlp="swiglu", bias=False, tied=False)
    train("plain form", gpt2, args.steps, device)
    train("tensor parallelism", llama, args.steps, device)
    train("tokens split", llama, args.steps, device)
    train("gather_again", gpt2, args.steps, device)
    leave()


def overlap_plainly(model, group):
    """Of a GPT-2, in which one layer stands behind each Enter."""
    pairs = [(block.attn, "qkv") for block in model.blocks.values()]
    pairs += [(block.mlp, "up") for block in model.blocks.values()]
    for part, name in [*pairs, (model.head, "out")]:
        part.enter = nn.Identity()
        setattr(part, name, OverlappedLinear(getattr(part, name), group))


def train(form, config, steps, device):
    group, t = dist.group.WORLD, dist.get_world_size()
    split, again = form in ("tokens split", "gather_again"), form == "gather_again"
    torch.manual_seed(0)  # equal weights on all ranks
    model = GPT(config).to(device, torch.float64)
    one = OneProcess(model, torch.optim.AdamW)
    (parallelize_sequence if split else parallelize_tensors)(model, group)
    if form == "plain form":
        overlap_plainly(model, group)
    else:
        overlap(model, again)
    named = list(zip(model.named_parameters(), one.model.parameters()))
    parameters = list(model.parameters())
    optimizer = torch.optim.AdamW(parameters)
    for step in range(steps):
        tokens, targets, count = text_batch(step, 5, config.context, device)
        optimizer.zero_grad()
        with Sent() as sent:
            loss = model(tokens, targets=targets, target_count=count)
            with Order() as order:
                loss.backward()
            if split:
                reduce_partial(parameters)
        norm = grad_norm(parameters, group)
        torch.nn.utils.clip_grads_with_norm_(parameters, 0.5, norm)
        optimizer.step()
        if step == 0:
            order.check(form, again)
        alone = one.train_step(tokens, targets, count, 0.5)
        gradients = [(name, unshard(p.grad, q.shape, group), q.grad) for (name, p), q in named]
        weights = [(name, unshard(p.data, q.shape, group), q.data) for (name, p), q in named]
        one.compare(step, loss.detach(), alone, gradients, weights)
    r, layers, e = (t - 1) / t, config.layers, 8
    of_whole = 2 * r * sum(q.nbytes for (_, p), q in named if p.shape == q.shape)
    text, each = "2 r B T e ((4 L + 2) C + 3)", 2 * ((4 * layers + 2) * config.width + 3)
    if split:
        text = "r B T e ((8 L + 4) C + 6) + 2 r P e"
    if again:
        text, each = "r B T e ((10 L + 5) C + 6) + 2 r P e", each + (2 * layers + 1) * config.width
    one.prove(sent, text, r * tokens.numel() * e * each + (of_whole if split else 0))


class Order(TorchDispatchMode):
    """Lists matmuls and messages in the order in which they begin."""

    def __init__(self):
        super().__init__()
        self.began = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function.namespace == "c10d" or function.name().startswith(("aten::mm", "aten::addmm")):
            self.began.append("message" if function.namespace == "c10d" else "matmul")
        return function(*args, **(kwargs or {}))

    def check(self, form, again):
        """Backward begins with the head: dx, its message, then dW. Without overlap dW comes first,
        or the gather."""
        expected = ["message"] * again + ["matmul", "message", "matmul"]
        began = self.began[: len(expected)]
        if dist.get_rank() == 0:
            wrong = "" if began == expected else ": NOT proven, the order differs"
            print(
                f"{form}, {dist.get_world_size()} ranks: backward begins {', '.join(began)}{wrong}"
            )
        if began != expected:
            leave(1)


if __name__ == "__main__":
    main()
