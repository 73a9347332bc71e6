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
        self.parts = row_losses, write_softmax
        if compiled:  # each is one kernel then: a GPU moves 6 bytes for a 16-bit logit, not 18
            self.parts = [torch.compile(part) for part in self.parts]

    def forward(self, logits, targets, target_count):
        losses = RowwiseCrossEntropy.apply(logits.flatten(0, 1), targets.flatten(), *self.parts)
        return losses.sum() / target_count


def row_losses(logits, column):
    """logits (n, V), the targets' columns (n, 1) -> -log softmax(logits)[target], (n, 1), in at
    least float32: a GPU converts in the kernel that reads the logits."""
    wide = torch.promote_types(logits.dtype, torch.float32)
    return -logits.log_softmax(1, dtype=wide).gather(1, column)


def write_softmax(result, logits, factor):
    """result = softmax(logits) * factor, which is (n, 1)."""
    torch.mul(logits.softmax(1, dtype=factor.dtype), factor, out=result)


class RowwiseCrossEntropy(torch.autograd.Function):
    """logits (n, V), targets (n,) -> -log softmax(logits)[target], (n, 1) in at least float32. A
    target equal to IGNORE has loss 0.

    Keeps the logits as they are, and the losses. Backward is softmax - onehot."""

    @staticmethod
    def forward(ctx, logits, targets, row_losses, write_softmax):
        rows = max(1, CHUNK // logits.shape[1])
        valid = (targets != IGNORE).unsqueeze(1)  # (n, 1)
        column = targets.unsqueeze(1).masked_fill(~valid, 0)
        pieces = zip(logits.split(rows), column.split(rows))
        loss = torch.cat([row_losses(*piece) for piece in pieces])
        ctx.rows, ctx.write_softmax = rows, write_softmax
        ctx.save_for_backward(logits, column, valid, loss)
        return loss.masked_fill(~valid, 0.0)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        logits, column, valid, loss = ctx.saved_tensors
        grad = grad.masked_fill(~valid, 0.0)
        result = torch.empty_like(logits)
        for pieces in zip(*(t.split(ctx.rows) for t in (result, logits, grad))):
            ctx.write_softmax(*pieces)
        at_target = (-loss).exp().sub(1).mul(grad)  # rounded once, as all others are
        result.scatter_(1, column, at_target.to(result.dtype))
        return result, None, None, None
