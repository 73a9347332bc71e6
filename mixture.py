"""A mixture of experts: each token goes through k of E MLPs, and the model learns which.

    x (B, T, C) --> Router --> weights, chosen (B, T, k)
        |                          |
        +----------------> Dispatch: rows sorted by expert --> Experts --> weighted sums (B, T, C)

It has the weights of E MLPs and does the work of k, in the place of the MLP in a Transformer block.
The router scores the experts, and sends each token to the k best. The model's loss does not stop it
from sending all tokens to the same few. Three remedies, each a field of the config:

balance_loss  factor of a loss whose gradient lowers the scores of experts that are chosen often
              (Fedus et al. 2021, arXiv:2101.03961; per sequence: DeepSeek-V3, arXiv:2412.19437)
z_loss        factor of logsumexp(logits)^2, of all tokens, which keeps logits small (Zoph et al.
              2022, arXiv:2202.08906). Both losses are divided by target_count
bias_rate     step of a bias, added to the scores for the choice only. After each step it goes up
              where the load was low (Wang et al. 2024, arXiv:2408.15664)

    model = GPT(Config(experts=8, balance_loss=0.01, bias_rate=0.001))
    model(x, targets=y).backward()
    optimizer.step()
    rebalance(model)  # once a step, for the bias. With ranks: rebalance(model, dist.all_reduce)

Without targets or a target_count all three are off, with a warning. With gradient accumulation
pass the whole batch's target_count with each piece: see AddLoss.

    python mixture.py        compares the plain form with the sorted one, with a balance loss

Shazeer et al. 2017, Sparsely-gated mixture of experts, arXiv:1701.06538.
"""

import warnings
from types import SimpleNamespace

import torch
import torch.nn as nn
import torch.nn.functional as F

# --- the plain form: one expert after the other


class PlainMoE(nn.Module):
    """x (n, C) -> y (n, C), and a balance loss: add it to the model's loss, times 0.01 or so.

    experts: E modules, such as MLPs, (any number of tokens, C) -> the same."""

    def __init__(self, width, experts, k):
        super().__init__()
        self.router = nn.Linear(width, len(experts), bias=False)
        self.experts, self.k = nn.ModuleList(experts), k

    def forward(self, x):
        scores = self.router(x).softmax(-1)  # (n, E)
        weights, chosen = scores.topk(self.k)  # (n, k) each
        weights = weights / weights.sum(-1, keepdim=True)
        y = torch.zeros_like(x)
        for e, expert in enumerate(self.experts):
            token, choice = (chosen == e).nonzero(as_tuple=True)
            y[token] += weights[token, choice].unsqueeze(1) * expert(x[token])
        # f_e: expert e's share of all choices. P_e: its mean score. E sum_e f_e P_e is 1 if f is
        # even, and up to E / k if all tokens choose the same k experts. (It can be less than 1.) f
        # has no gradient: a step lowers most the P_e of a large f_e
        counts = chosen.flatten().bincount(minlength=len(self.experts))
        share = counts.to(scores.dtype) / chosen.numel()
        return y, len(self.experts) * (share * scores.mean(0)).sum()


# --- the sorted form: an expert's rows are one block, and all experts are one parameter


class MoE(nn.Module):
    """x (B, T, C) -> (B, T, C).

    config  model.py's Config, or its fields width, hidden, mlp, and those from experts on
    shared  an MLP that every token goes through as well, or None (DeepSeekMoE, arXiv:2401.06066)
    batch   its target_count is the number of targets of the whole batch"""

    def __init__(self, config, shared=None):
        super().__init__()
        self.enter = nn.Identity()
        self.router = Router(config)
        self.dispatch = Dispatch()
        self.experts = Experts(config)
        self.leave = nn.Identity()  # experts that are cut add their partial results here
        self.shared = shared

    def forward(self, x, batch=None):
        weights, chosen = self.router(x, batch.target_count if batch else None)  # (B, T, k) each
        # enter may gather tokens from other ranks: then it gathers their weights and choices, too
        rows, weights, chosen = (self.enter(t).flatten(0, 1) for t in (x, weights, chosen))
        # In two calls, because expert_parallel.py's tokens travel between them
        sent = self.dispatch.send(rows, weights, chosen)  # (B T, C or k) each
        shared = None if self.shared is None else self.shared(x)
        y = self.dispatch.combine(sent, self.experts)
        y = self.leave(y.unflatten(0, (len(x), -1)))  # (B, T, C)
        return y if shared is None else y + shared


class Router(nn.Linear):
    """Chooses experts: x (B, T, C) -> weights (B, T, k), the experts' numbers (B, T, k). Among
    equal scores the lower number wins. `with_losses` and `rebalance`, below, make the load even."""

    def __init__(self, config):
        super().__init__(config.width, config.experts, bias=False)
        self.config = config
        self.sum_over_sequence = nn.Identity()  # a sum over ranks, where they share a sequence
        self.register_buffer("choice_bias", torch.zeros(config.experts))
        self.register_buffer("load", torch.zeros(config.experts, dtype=torch.int64))

    def forward(self, x, target_count=None):
        config = self.config
        logits = super().forward(x)  # (B, T, E)
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))  # at least float32
        scores = logits.softmax(-1) if config.scores == "softmax" else logits.sigmoid()
        # Not topk, which promises no order among equals
        best = (scores.detach() + self.choice_bias).sort(dim=-1, descending=True, stable=True)
        chosen = best.indices[..., : config.top_k]  # (B, T, k)
        weights = scores.gather(-1, chosen)
        if config.renormalize:
            weights = weights / weights.sum(-1, keepdim=True)
        if weights.requires_grad and target_count is not None:
            weights = with_losses(self, weights, chosen, scores, logits, target_count)
        elif weights.requires_grad and (config.balance_loss or config.z_loss or config.bias_rate):
            warnings.warn("without a target_count the experts' load is not balanced")
        return weights.to(x.dtype), chosen


class Dispatch(nn.Module):
    """Brings N tokens to their experts and back: x (N, C), weights and chosen (N, k) -> y (N, C).
    No token is dropped, nothing is padded."""

    def send(self, x, weights, chosen):
        return x, weights, chosen  # all experts are here

    def combine(self, sent, experts):
        x, weights, chosen = sent
        order = chosen.flatten().argsort(stable=True)  # (N k,): by expert, then by token
        # Not bincount, for which the host waits, to learn the size of the result
        counts = order.new_zeros(len(experts.up))  # (E,)
        counts.scatter_add_(0, chosen.flatten(), torch.ones_like(order))
        token = order // chosen.shape[1]  # choice i is of token i // k
        rows = experts(x.index_select(0, token), counts)
        rows = rows * weights.flatten()[order].unsqueeze(1)
        return torch.zeros_like(x).index_add(0, token, rows)


class Experts(nn.Module):
    """E MLPs without biases: rows (R, C) sorted by expert, counts (E,) of each one's rows ->
    (R, C). A projection is one parameter (E, out, in): a slice of dimension 0 is whole experts."""

    def __init__(self, config):
        super().__init__()
        experts, hidden, width = config.experts, config.hidden, config.width
        self.gate = None
        if config.mlp == "swiglu":
            self.gate = nn.Parameter(torch.empty(experts, hidden, width))
        self.up = nn.Parameter(torch.empty(experts, hidden, width))
        self.down = nn.Parameter(torch.empty(experts, width, hidden))
        for p in self.parameters():
            nn.init.normal_(p, std=0.02)

    def forward(self, rows, counts):
        ends = counts.cumsum(0).to(torch.int32)
        gate = None if self.gate is None else grouped_linear(rows, self.gate, ends)
        up = grouped_linear(rows, self.up, ends)
        return self.finish(up, gate, ends)

    def finish(self, up, gate, ends):  # as in MLP
        hidden = F.gelu(up, approximate="tanh") if gate is None else F.silu(gate) * up
        return grouped_linear(hidden, self.down, ends)


def grouped_linear(x, weight, ends):
    """x (R, in), weight (E, out, in) -> (R, out): x[ends[e-1] : ends[e]] @ weight[e].T."""
    if can_group(x, weight):
        return F.grouped_mm(x, weight.transpose(1, 2), offs=ends)  # one kernel; torch 2.11 to 2.13
    parts = x.tensor_split(ends[:-1].tolist())
    return torch.cat([F.linear(part, matrix) for part, matrix in zip(parts, weight)])


def can_group(x, weight):
    fits = len(x) > 0 and x.dtype in (torch.float32, torch.bfloat16, torch.float16)
    aligned = all(size * x.element_size() % 16 == 0 for size in weight.shape[1:])
    # From sm_80. Not on Blackwell: experts without rows get a nonzero gradient (pytorch #172439)
    device_fits = not x.is_cuda or (8, 0) <= torch.cuda.get_device_capability(x.device) < (10, 0)
    return fits and aligned and device_fits


# --- an even load


def with_losses(router, weights, chosen, scores, logits, target_count):
    """Returns `weights` (B, T, k), unchanged in value. Their backward counts the load and adds the
    losses' gradients, so the loss that the model reports is the cross-entropy alone.

    Each loss is a sum over all tokens, those without a target included, divided by target_count. So
    those of a batch's pieces add up; and where few tokens have targets, as behind long prompts, it
    weighs more than its factor says. chosen (B, T, k). scores, logits (B, T, E)."""
    config = router.config
    assigned = scores.new_zeros(len(scores), config.experts)  # (B, E)
    assigned.scatter_add_(1, chosen.flatten(1), torch.ones_like(weights).flatten(1))
    loss = scores.new_zeros(())
    if config.balance_loss:
        loss = loss + config.balance_loss * imbalance(router, scores, assigned)
    if config.z_loss:
        loss = loss + config.z_loss * logits.logsumexp(-1).square().sum()
    return AddLoss.apply(weights, loss / target_count, router.load, assigned.sum(0).long())


def imbalance(router, scores, assigned):
    """The sum over sequences of T E sum_e f_e P_e. (PlainMoE's f and P are of all tokens: here each
    sequence, of T tokens, has its own.)"""
    if router.config.scores == "sigmoid":
        scores = scores / scores.sum(-1, keepdim=True)
    # One tensor: where a sequence is cut, that is one message
    sums = router.sum_over_sequence(torch.cat((assigned, scores.sum(1)), dim=1))
    assigned, scores = sums.chunk(2, dim=1)  # (B, E) each, of the whole sequence
    share = assigned / assigned.sum(-1, keepdim=True)  # f
    return router.config.experts * (share.detach() * scores).sum()  # tokens x P = the summed scores


class AddLoss(torch.autograd.Function):
    """Returns x. In backward `loss` gets the gradient 1, as if it had been added to the model's
    loss, even on a pipeline stage without the head (Megatron-LM's MoEAuxLossAutoScaler). And `load`
    is counted: with recomputation a forward runs twice, a backward once.

    Scaling the model's loss before backward does not scale this one. Scale target_count instead: to
    n x target_count in place of loss / n, to target_count / get_scale() in place of a GradScaler's
    scale(loss)."""

    @staticmethod
    def forward(ctx, x, loss, total_load, load):
        ctx.save_for_backward(loss)
        ctx.total_load, ctx.load = total_load, load
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        ctx.total_load += ctx.load
        return grad, torch.ones_like(ctx.saved_tensors[0]), None, None


@torch.no_grad()
def rebalance(model, sum_over_devices=lambda load: None, step_taken=True):
    """After each step: move every router's bias by `bias_rate` towards an even load. On several
    devices with other tokens each: rebalance(model, dist.all_reduce), which sums the load in place.
    Without it their biases drift apart. step_taken=False only zeroes the loads, where the optimizer
    has skipped a step. Keep choice_bias in float32: in bfloat16 it stops at 0.5 with steps of
    0.001."""
    for router in [module for module in model.modules() if isinstance(module, Router)]:
        if router.config.bias_rate and step_taken:
            sum_over_devices(router.load)
            load, bias = router.load, router.choice_bias
            step = (load.sum() - load * len(load)).sign()  # 1 below the mean, -1 above it, else 0
            bias += router.config.bias_rate * step.to(bias.dtype)
        router.load.zero_()


# --- demo ---
# both forms have the same results and gradients


def main():
    compare(torch.float64, 1e-10)
    compare(torch.float32, 1e-4)  # by F.grouped_mm, which takes no float64


def compare(dtype, tolerance):
    torch.manual_seed(0)
    mlps = []
    for _ in range(8):
        up, down = nn.Linear(16, 32, bias=False), nn.Linear(32, 16, bias=False)
        mlps.append(nn.Sequential(up, nn.GELU("tanh"), down))
    plain = PlainMoE(16, mlps, k=2).to(dtype)
    config = SimpleNamespace(width=16, hidden=32, mlp="gelu", experts=8, top_k=2, scores="softmax")
    vars(config).update(renormalize=True, balance_loss=0.1, z_loss=0.0, bias_rate=0.0)
    moe = MoE(config).to(dtype)
    moe.router.weight.data.copy_(plain.router.weight)
    moe.experts.up.data.copy_(torch.stack([mlp[0].weight for mlp in mlps]))
    moe.experts.down.data.copy_(torch.stack([mlp[2].weight for mlp in mlps]))
    x = torch.randn(2, 50, 16, dtype=dtype)
    y, balance_losses = zip(*map(plain, x))  # of each sequence
    y = torch.stack(y)
    (y.square().sum() + 0.1 * sum(balance_losses) / 2).backward()
    y_sorted = moe(x, SimpleNamespace(target_count=100))  # as model.py's Batch
    y_sorted.square().sum().backward()  # with AddLoss, the balance loss's gradient as well
    found = y_sorted, moe.router.weight.grad, moe.experts.up.grad, moe.experts.down.grad
    ups, downs = ([mlp[i].weight.grad for mlp in mlps] for i in (0, 2))
    expected = y, plain.router.weight.grad, torch.stack(ups), torch.stack(downs)
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance / 100)
    load = moe.router.load.tolist()
    print(f"{dtype}, load {load}: results and gradients are equal to {tolerance}: proven")


if __name__ == "__main__":
    main()
