"""Tensors without values: torch's FakeTensorMode, with a short way for the commonest operations.

torch's own way asks of every operation whether it makes constants, has symbolic sizes, or needs a
kernel of another device, and looks its result up by all of its arguments. That takes about 100
microseconds, and a dry run does tens of thousands of views, copies and zeros. For these the rule
is simple: run the operation on meta tensors, and call the result a tensor on the CPU.
"""

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, in_kernel_invocation_manager

from proof import ledger

CPU = torch.device("cpu")
META = torch.device("meta")
DEVICE = torch.ops.prim.device.default
aten = torch.ops.aten


# Operations that are told on which device their result is. Without values zeros are as good empty
MAKERS = {
    aten.empty.memory_format: aten.empty.memory_format,
    aten.empty_strided.default: aten.empty_strided.default,
    aten.zeros.default: aten.empty.memory_format,
    aten.empty_like.default: aten.empty_like.default,
    aten.zeros_like.default: aten.empty_like.default,
    aten.new_empty.default: aten.new_empty.default,
    aten.new_zeros.default: aten.new_empty.default,
    aten._to_copy.default: aten._to_copy.default,
}
# Others that have a kernel for meta tensors
SHORT = {
    aten.slice.Tensor,
    aten.view.default,
    aten._unsafe_view.default,
    aten.detach.default,
    aten.split_with_sizes.default,
    aten.unsqueeze.default,
    aten.as_strided.default,
    aten.transpose.int,
    aten.t.default,
    aten.add_.Tensor,
    aten.copy_.default,
    aten.clone.default,
    aten.add.Tensor,
    aten.mul.Tensor,
    aten.mul_.Tensor,
    aten.zero_.default,
    aten.mm.default,
    aten._fused_adamw_.default,
}


class Fakes(FakeTensorMode):
    """FakeTensorMode, but operations on CPU tensors without constants may take the short way."""

    def dispatch(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func in MAKERS and kwargs.get("device") in (CPU, None) and self.are_plain(args, kwargs):
            return self.on_meta(MAKERS[func], args, {**kwargs, "device": META})
        if (func in SHORT or func.namespace == "c10d") and self.are_plain(args, kwargs):
            return self.on_meta(func, args, kwargs)
        return super().dispatch(func, types, args, kwargs)

    def are_plain(self, args, kwargs):
        """Whether all tensors among the arguments are this mode's, on the CPU, without values."""
        for t in ledger.tensors_in([*args, *kwargs.values()]):
            if type(t) is not FakeTensor or t.fake_mode is not self:
                return False
            if t.constant is not None or t.fake_device != CPU:
                return False
        return True

    def on_meta(self, func, args, kwargs):
        with in_kernel_invocation_manager(self):
            out = func(*args, **kwargs)
        return self.wrap(out)

    def wrap(self, out):
        """Results on meta as this mode's tensors. An argument that was written to is one already"""
        if isinstance(out, (list, tuple)):
            return type(out)(self.wrap(x) for x in out)
        if not isinstance(out, torch.Tensor) or isinstance(out, FakeTensor):
            return out
        return FakeTensor(self, out, CPU)


class KnowsDevices:
    """Comes before the class of a mode that lies above Fakes. torch asks for a tensor's device more
    often than it does anything else: the answer need not go through all modes."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is DEVICE and isinstance(args[0], FakeTensor):
            return args[0].fake_device
        return super().__torch_dispatch__(func, types, args, kwargs)
