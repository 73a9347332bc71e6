"""Messages from rank to rank through the host's memory, for gloo ranks on GPUs.

gloo's collectives take CUDA tensors, its send and recv do not. So this replaces the two functions
of torch.distributed that all others call. It is slow, but one GPU can prove every layout.
"""

import torch.distributed as dist
from torch.distributed import distributed_c10d


def on_host(tensor):
    """A copy of a CUDA tensor in the host's memory; any other tensor itself."""
    return tensor.detach().cpu() if tensor.is_cuda else tensor


class Received:
    """The work handle of a message that is received on the host, for a tensor on the device."""

    def __init__(self, work, host, target):
        self.work, self.host, self.target = work, host, target

    def wait(self):
        self.work.wait()
        self.target.copy_(self.host)

    def _source_rank(self):
        return self.work._source_rank()


def install():
    """Replace isend and irecv in this process."""
    isend, irecv = dist.isend, dist.irecv

    def staged_isend(tensor, *args, **kwargs):
        return isend(on_host(tensor), *args, **kwargs)

    def staged_irecv(tensor, *args, **kwargs):
        host = on_host(tensor)
        work = irecv(host, *args, **kwargs)
        return work if host is tensor else Received(work, host, tensor)

    for module in (dist, distributed_c10d):
        module.isend, module.irecv = staged_isend, staged_irecv
