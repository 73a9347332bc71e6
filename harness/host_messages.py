"""Messages from rank to rank through the host's memory, for gloo ranks on GPUs.

gloo's collectives take CUDA tensors. Its send and recv do not ("writev: Bad address"): they hand
the device's address to the network. So `--backend gloo --device cuda` puts these four functions in
the place of torch.distributed's. A message is copied to the host, sent, and copied to the device
when its receiver waits for it. This is slow; it is there so that a machine with one GPU can prove
every layout. On nccl, and with CPU tensors, nothing changes.
"""

import torch.distributed as dist
from torch.distributed import distributed_c10d


def needs_host(tensor):
    """Whether gloo can't send this tensor as it is."""
    return tensor.is_cuda


class Message:
    """A work handle. It keeps the host's copy until wait(), which brings a received one to the
    tensor that it is for."""

    def __init__(self, work, host, target):
        self.work, self.host, self.target = work, host, target
        self.arrived = False

    def wait(self):
        if not self.arrived:  # gloo would wait for one more message
            self.work.wait()
            self.arrived = True
            if self.target is not None:
                self.target.copy_(self.host)
        return True

    def is_completed(self):
        """A message that has arrived on the host is complete after wait() alone."""
        return self.arrived or self.target is None and self.work.is_completed()

    def _source_rank(self):
        return self.work._source_rank()


def staged(post, receives):
    """isend or irecv, by way of the host's memory where that is needed."""

    def function(tensor, *args, **kwargs):
        if not needs_host(tensor):
            return post(tensor, *args, **kwargs)
        host = tensor.detach().to("cpu", copy=True)
        return Message(post(host, *args, **kwargs), host, tensor if receives else None)

    return function


def install():
    """Replace isend, irecv, send and recv in this process. batch_isend_irecv uses the first two."""
    isend, irecv = staged(dist.isend, False), staged(dist.irecv, True)

    def send(tensor, *args, **kwargs):
        isend(tensor, *args, **kwargs).wait()

    def recv(tensor, src=None, group=None, tag=0, group_src=None):
        message = irecv(tensor, src, group, tag, group_src)
        message.wait()
        if src is None and group_src is None:  # from whichever rank came first: say which
            return dist.get_global_rank(group or dist.group.WORLD, message._source_rank())

    for name, function in dict(isend=isend, irecv=irecv, send=send, recv=recv).items():
        setattr(dist, name, function)
        # P2POp compares its operation with this module's functions
        setattr(distributed_c10d, name, function)
