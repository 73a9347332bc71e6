"""Backward in two parts in train.py: what zero_bubble.py's store leaves to I."""

import torch
import torch.nn.functional as F

from zero_bubble import WeightGradStore


class GroupedInputGradient(torch.autograd.Function):
    """x (R, in), weight (E, in, out), offsets (E,) -> (R, out): the rows up to an offset times the
    matrix of that expert. Calls keep(x, dy, offsets) in backward."""

    @staticmethod
    def forward(ctx, x, weight, offsets, keep):
        ctx.save_for_backward(x, weight, offsets)
        ctx.keep = keep
        return F.grouped_mm(x, weight, offs=offsets)

    @staticmethod
    def backward(ctx, dy):
        x, weight, offsets = ctx.saved_tensors
        ctx.keep(x.detach(), dy, offsets)
        return F.grouped_mm(dy, weight.mT, offs=offsets), None, None, None


class GroupedWeightGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, weight, x, dy, offsets):
        ctx.save_for_backward(x, dy, offsets)
        return weight.new_zeros(())

    @staticmethod
    def backward(ctx, _):
        x, dy, offsets = ctx.saved_tensors
        return F.grouped_mm(x.T, dy, offs=offsets), None, None, None


class FullStore(WeightGradStore):
    """Also defers what experts' F.grouped_mm compute, and what runs again in backward.

    weight.used_twice = True leaves all of a weight's gradient to I: for a tied embedding under DDP
    or ZeRO, whose hooks expect one."""

    def __init__(self):
        super().__init__()
        self.instead[torch._grouped_mm] = self.grouped_mm  # which F.grouped_mm calls
        self.instead[torch.Tensor.backward] = self.backward

    def can_defer(self, x, weight):
        base = weight if weight._base is None else weight._base
        if getattr(base, "used_twice", False):
            return False
        return WeightGradStore.can_defer(self, x, weight)

    def grouped_mm(self, x, weight, *, offs=None, **options):
        if not self.can_defer(x, weight):
            return torch._grouped_mm(x, weight, offs=offs, **options)

        def keep(*saved):
            self.waiting.append((GroupedWeightGradient, weight, *saved))

        return GroupedInputGradient.apply(x, weight.detach(), offs, keep)

    def backward(self, y, gradient=None, **options):
        """y.backward(gradient) with this mode on, for a checkpointed layer, which runs its forward
        again in here. Of y's edge: for the tensor y torch would switch the mode off."""
        with self:
            edge = torch.autograd.graph.get_gradient_edge(y)
            torch.autograd.backward([edge], [gradient], **options)
