"""An output projection and a loss for large vocabularies: aligned rows, and no copy of the logits.

GPT-2's 50,257 logits of 16 bits are no multiple of 16 bytes, so that a GPU's matrix products take
slow kernels. And 16 sequences of 1,024 tokens have 1.6 GB of them: F.cross_entropy of a float32
copy would hold 3.3 GB for the copy, as much for its logarithms and as much for their gradient.
"""

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.autograd.function import once_differentiable

from model import IGNORE

ALIGNED = 64  # outputs; nanoGPT pads its vocabulary to a multiple of as many
CHUNK = 2**26  # logits that the loss takes at a time: 256 MB in float32


def lean_head(model, compiled=False):
    """Replace the output projection and the loss of a GPT, if it has a head. No result changes.
    compiled: the loss by torch.compile."""
    if model.head is not None:
        model.head.out = PaddedLinear(model.head.out)
        model.loss = LeanCrossEntropy(compiled)


class PaddedLinear(nn.Module):
    """A linear layer without bias. In 16 bits its outputs are padded to a multiple of 64. The
    additional logits are -inf: no softmax and no gradient sees them."""

    def __init__(self, linear):
        super().__init__()
        self.weight = linear.weight  # (V, C)

    def forward(self, x):
        padding = -len(self.weight) % ALIGNED
        if x.element_size() > 2 or padding == 0:
            return F.linear(x, self.weight)
        bias = F.pad(x.new_zeros(len(self.weight)), (0, padding), value=float("-inf"))
        return F.linear(x, F.pad(self.weight, (0, 0, 0, padding)), bias)


class LeanCrossEntropy(nn.Module):
    """model.py's CrossEntropy, which computes in float32 on some rows at a time."""

    def __init__(self, compiled=False):
        super().__init__()
        self.parts = log_sums, write_softmax
        if compiled:  # each is one kernel then: 6 bytes are moved for a 16-bit logit, not 46
            self.parts = [torch.compile(part) for part in self.parts]

    def forward(self, logits, targets, target_count):
        losses = RowwiseCrossEntropy.apply(logits.flatten(0, 1), targets.flatten(), *self.parts)
        return losses.sum() / target_count


def log_sums(logits):
    """logits (n, V) -> log(sum of exp) of each row, (n,) in at least float32."""
    return logits.to(torch.promote_types(logits.dtype, torch.float32)).logsumexp(1)


def write_softmax(result, logits, log_sum, factor):
    """result = softmax(logits) * factor. log_sum, factor: (n, 1)."""
    result.copy_(logits.to(log_sum.dtype).sub(log_sum).exp_().mul_(factor))


class RowwiseCrossEntropy(torch.autograd.Function):
    """logits (n, V), targets (n,) -> -log softmax(logits)[target], (n,) in at least float32. A
    target equal to IGNORE has loss 0.

    Keeps the logits as they are, and log(sum of exp) of each row. Backward is softmax - onehot."""

    @staticmethod
    def forward(ctx, logits, targets, log_sums, write_softmax):
        rows = max(1, CHUNK // logits.shape[1])
        log_sum = torch.cat([log_sums(part) for part in logits.split(rows)])  # (n,)
        valid = targets != IGNORE
        column = targets.masked_fill(~valid, 0).unsqueeze(1)  # (n, 1)
        of_target = logits.gather(1, column).squeeze(1).to(log_sum.dtype)
        loss = (log_sum - of_target).masked_fill(~valid, 0.0)
        ctx.rows, ctx.write_softmax = rows, write_softmax
        ctx.save_for_backward(logits, column, valid, log_sum, of_target)
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        logits, column, valid, log_sum, of_target = ctx.saved_tensors
        grad = grad.masked_fill(~valid, 0.0)  # (n,)
        result = torch.empty_like(logits)
        columns = (t.unsqueeze(1) for t in (log_sum, grad))
        parts = (t.split(ctx.rows) for t in (result, logits, *columns))
        for pieces in zip(*parts):
            ctx.write_softmax(*pieces)
        at_target = (of_target - log_sum).exp().sub(1).mul(grad)  # rounded once, as all others are
        result.scatter_(1, column, at_target.to(result.dtype).unsqueeze(1))
        return result, None, None, None
