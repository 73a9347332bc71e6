"""Tensor and sequence parallelism, faster: Enter's message travels while backward computes.

Read tensor_parallel.py first. "tokens split", gather_again: for sequence_parallel.py. A linear
layer's backward gets dy, the gradient of its output, and computes dx, that of its input, and dW and
db, those of its parameters. In those files autograd computes all three, and then calls Enter's
backward, which sends dx and waits. But dW and db don't need what it sends:

    tensor_parallel.py   compute   dx | dW, db |                  | next layer
                         network               | all-reduce of dx |
    here                 compute   dx | dW, db           | next layer
                         network      | all-reduce of dx |
    tokens split         a reduce-scatter in place of the all-reduce
    gather_again         compute   dx          | dW, db               | next layer
                         network   gather of x | reduce-scatter of dx |

So Enter and the layers behind it become one autograd function: within it we choose the order.
gather_again is the paper's own form (Korthikanti et al. 2022): hold this rank's T/t tokens of x
until backward, instead of all T, and gather them once more.

Sent      As in those files. gather_again sends (t-1)/t B T C e bytes more for each Enter.
Limits    Leave's messages, and all in forward, are waited for. A message is hidden if dW takes as
          long: if the layers behind one Enter have, on all t ranks together, (t-1) e s / w outputs
          or more, at s operations and w bytes a second. On H100s (400 TFLOP/s, 450 GB/s) with t = 8
          and 16 bits that is 12,500 outputs, and half of it with tokens split. On GPUs set
          CUDA_DEVICE_MAX_CONNECTIONS=1, as Megatron-LM asks for: else the message may start late.

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

# --- the plainest form: Enter, and the layers that read its result, as gate and up do


class EnterLinears(torch.autograd.Function):
    """Enter, then F.linear with each weight and bias: x (B, T, C) -> a (B, T, out / t) each.
    parameters: a weight and a bias, or None, for each layer."""

    @staticmethod
    def forward(ctx, x, group, *parameters):
        ctx.group = group
        ctx.save_for_backward(x, *parameters[::2])
        return linears(x, parameters)

    @staticmethod
    @once_differentiable
    def backward(ctx, *dys):
        x, *weights = ctx.saved_tensors
        dx = gradient_of_input(dys, weights)
        message = dist.all_reduce(dx, group=ctx.group, async_op=True)
        of_parameters = gradients_of_parameters(dys, x, ctx.needs_input_grad[2:])
        message.wait()
        return dx, None, *of_parameters


def linears(x, parameters):
    return tuple(F.linear(x, *pair) for pair in zip(parameters[::2], parameters[1::2]))


def gradient_of_input(dys, weights):
    """dy (B, T, out / t) of each layer -> dx (B, T, C): the sum of dy W over the layers."""
    dx = None
    for dy, weight in zip(dys, weights):
        rows, weight = dy.flatten(0, -2), weight.to(dy.dtype)  # F.linear's cast, under autocast
        dx = rows @ weight if dx is None else torch.addmm(dx, rows, weight)
    return dx.view(*dys[0].shape[:-1], -1)


def gradients_of_parameters(dys, x, needed):
    """dW = dy^T x and db of each layer, or None where `needed` is False."""
    x, gradients = x.flatten(0, -2), []
    for dy, of_weight, of_bias in zip(dys, needed[::2], needed[1::2]):
        rows = dy.flatten(0, -2)
        gradients.append(rows.T @ x if of_weight else None)
        gradients.append(rows.sum(0) if of_bias else None)
    return gradients


# --- as modules, so that a model's forward stays as it is


class EnterAndProject(nn.Module):
    """In place of Boundary(Enter, group) or Boundary(GatherTokens, group). It computes the layers
    behind it too: x -> Outputs, {layer: its output}. Put each of self.layers where its
    ColumnParallelLinear was: called with the Outputs, it returns its own entry. In between a model
    may read the shape, and nothing else. Parameters stay the same tensors, for optimizers and ties.

    With GatherTokens only:
    gather_again    hold x (B, T/t, C) instead of what was gathered
    reduce_scatter  in place of torch's: (shard, full, group=group) -> a handle with wait()"""

    def __init__(self, enter, layers, gather_again=False, reduce_scatter=None):
        super().__init__()
        self.enter, self.gather_again, self.reduce_scatter = enter, gather_again, reduce_scatter
        # In a list, which registers nothing: else state_dict would have them twice
        self.layers = [ProjectedLinear(layer) for layer in layers]

    def forward(self, x):
        parameters = [p for layer in self.layers for p in (layer.weight, layer.bias)]
        # Enter and F.linear by themselves: under torch.compile, which orders a block's backward
        # itself, and where a mode or a tensor subclass replaces F.linear (zero_bubble.py)
        plain = torch.compiler.is_compiling() or has_torch_function((x,))
        # Only GatherLinears gathers again, in backward
        if plain and not (self.gather_again and torch.is_grad_enabled()):
            return Outputs(zip(self.layers, linears(self.enter(x), parameters)))
        if torch.is_autocast_enabled(x.device.type):  # F.linear's cast, but before x is sent
            x = x.to(torch.get_autocast_dtype(x.device.type))
        if issubclass(self.enter.function, GatherTokens):
            options = self.enter.group, self.gather_again, self.reduce_scatter
            results = GatherLinears.apply(x, *options, *parameters)
        else:
            results = EnterLinears.apply(x, self.enter.group, *parameters)
        return Outputs(zip(self.layers, results))


class ProjectedLinear(nn.Module):
    """Takes the place of a layer that EnterAndProject computes."""

    def __init__(self, layer):
        super().__init__()
        self.weight, self.bias = layer.weight, layer.bias

    def forward(self, outputs):
        return outputs[self]


class Outputs(dict):
    """{layer: its output (B, T, out / t)}. Passed on as if it were their input."""

    @property
    def shape(self):  # transformers' attention asks for it, and uses all but the last dimension
        return next(iter(self.values())).shape


# --- where tokens are split: gather them, and reduce-scatter their gradients


class GatherLinears(torch.autograd.Function):
    """GatherTokens, then the layers: x (B, T/t, C) -> (B, T, out / t) each."""

    @staticmethod
    def forward(ctx, x, group, gather_again, reduce_scatter, *parameters):
        ctx.group, ctx.gather_again, ctx.reduce_scatter = group, gather_again, reduce_scatter
        full = gather_tokens(x, group)  # (B, T, C)
        ctx.save_for_backward(x if gather_again else full, *parameters[::2])
        return linears(full, parameters)

    @staticmethod
    @once_differentiable
    def backward(ctx, *dys):
        x, *weights = ctx.saved_tensors
        if ctx.gather_again:
            parts = x.new_empty(dist.get_world_size(ctx.group), *x.shape)  # (t, B, T/t, C)
            flat = parts.flatten(0, 1)  # a view, through which the message fills `parts`
            gather = all_gather_into_tensor(flat, x.contiguous(), group=ctx.group, async_op=True)
        shards = shards_of_tokens(gradient_of_input(dys, weights), ctx.group)  # (t, B, T/t, C)
        dx = torch.empty_like(shards[0])
        reduce_scatter = ctx.reduce_scatter or start_reduce_scatter
        message = reduce_scatter(dx, shards.flatten(0, 1), group=ctx.group)
        if ctx.gather_again:
            gather.wait()
            x = parts.transpose(0, 1).flatten(1, 2)  # (B, T, C)
            del gather, parts, flat  # as large as x
        of_parameters = gradients_of_parameters(dys, x, ctx.needs_input_grad[4:])
        message.wait()
        return dx, None, None, None, *of_parameters


def start_reduce_scatter(shard, full, group):
    return reduce_scatter_tensor(shard, full, group=group, async_op=True)


# --- for model.py's GPT ---


def overlap(model, gather_again=False, reduce_scatter=None):
    """After parallelize_tensors or parallelize_sequence: replace each Enter that has linear layers
    behind it, in place, and return the model. A mixture's has experts behind it, and stays."""

    def project(module, *names):
        layers = [getattr(module, name) for name in names]
        module.enter = EnterAndProject(module.enter, layers, gather_again, reduce_scatter)
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
    from tensor_parallel import grad_norm, parallelize_tensors, placement_of


def main():
    parser = argparse.ArgumentParser(description="train a GPT in each form, and prove it")
    parser.add_argument("--steps", type=int, default=2)
    args = parser.parse_args()
    device, t = join_ranks(), dist.get_world_size()
    sizes = dict(layers=2, heads=2 * t, width=8 * t, context=8 * t)
    gpt2 = Config(**sizes)
    llama = Config(**sizes, positions="rope", norm="rmsnorm", mlp="swiglu", bias=False, tied=False)
    train("gpt2", gpt2, args.steps, device)
    train("llama", llama, args.steps, device)
    train("tokens split", llama, args.steps, device)
    train("gather_again", gpt2, args.steps, device)
    leave()


def train(form, config, steps, device):
    group, t = dist.group.WORLD, dist.get_world_size()
    split, again = form in ("tokens split", "gather_again"), form == "gather_again"
    torch.manual_seed(0)  # equal weights on all ranks
    model = GPT(config).to(device, torch.float64)
    one = OneProcess(model, torch.optim.AdamW)
    (parallelize_sequence if split else parallelize_tensors)(model, group)
    overlap(model, again)
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
            check_order(order.began, form, again)
        alone = one.train_step(tokens, targets, count, 0.5)
        one.compare(step, loss.detach(), alone, model.named_parameters())
    r, layers, e = (t - 1) / t, config.layers, 8
    of_whole = 2 * r * sum(p.nbytes for p in parameters if not placement_of(p)["cuts"])
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
        if function.namespace == "c10d":
            self.began.append("message")
        elif function.name().startswith(("aten::mm", "aten::addmm")):
            self.began.append("matmul")
        return function(*args, **(kwargs or {}))


def check_order(began, form, again):
    """Backward begins with the head: dx, its message, then dW, and before all of them the gather of
    gather_again. Without overlap dW would come before the message."""
    expected = ["message"] * again + ["matmul", "message", "matmul"]
    began = began[: len(expected)]
    wrong = "" if began == expected else ": NOT proven, the order differs"
    if dist.get_rank() == 0:
        print(f"{form}, {dist.get_world_size()} ranks: backward begins {', '.join(began)}{wrong}")
    if wrong:
        leave(1)


if __name__ == "__main__":
    main()
