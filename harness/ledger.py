"""The ledger: what a step sends, by operation and process group, and the most memory it holds,
counted below all code that calls torch.
"""

import weakref

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode


def all_but_one(n):
    return (n - 1) / n


# c10d operation -> name, the argument that holds the whole payload, bytes a ring algorithm sends
# per rank and payload byte
OPERATIONS = {
    "allreduce_": ("all_reduce", 0, lambda n: 2 * all_but_one(n)),
    "_allgather_base_": ("all_gather", 0, all_but_one),
    "allgather_": ("all_gather", 0, all_but_one),
    "_reduce_scatter_base_": ("reduce_scatter", 1, all_but_one),
    "reduce_scatter_": ("reduce_scatter", 1, all_but_one),
    "alltoall_base_": ("all_to_all", 1, all_but_one),
    "alltoall_": ("all_to_all", 1, all_but_one),
    "broadcast_": ("broadcast", 0, all_but_one),
    "reduce_": ("reduce", 0, all_but_one),
    "send": ("send", 0, lambda n: 1.0),
    "recv_": ("recv", 0, lambda n: 0.0),
}


def tensors_in(x):
    """All tensors in nested lists and tuples."""
    if isinstance(x, torch.Tensor):
        yield x
    elif isinstance(x, (list, tuple)):
        for y in x:
            yield from tensors_in(y)


def storage_bytes(tensors):
    """Bytes of the memory behind some tensors, each piece of it counted once."""
    return sum({s._cdata: s.nbytes() for s in (t.untyped_storage() for t in tensors)}.values())


def message(name, args):
    """What a c10d operation of that name sends: (operation, process group, payload bytes, bytes on
    a ring)."""

    def group_in(argument):
        try:
            return dist.ProcessGroup.unbox(argument)
        except RuntimeError:
            return None  # a reduction's operator

    operation, position, wire = OPERATIONS[name]
    group = next(group_in(a) for a in args if isinstance(a, torch.ScriptObject) and group_in(a))
    payload = sum(t.numel() * t.element_size() for t in tensors_in(args[position]))
    part = wire(group.size())
    if name == "alltoall_base_" and sum(args[4]):  # uneven: what a rank has for itself stays
        part = 1 - args[4][group.rank()] / sum(args[4])
    return operation, group, payload, payload * part


class Ledger(TorchDispatchMode):
    """While it is on (`with ledger:`), counts every c10d operation by group, and the bytes of
    memory alive.

    groups: {name: process group, or a list of them} to report by. `sent` is {(operation, name):
    [calls, payload bytes, wire bytes]}, `peak` the most bytes that were alive at a time beyond
    `known`, the tensors that outlive a step. Of these some may have no memory when watching starts,
    and be gathered and freed again (ZeRO's weights in stage 3): `gathered_peak` is the most bytes
    that they have at a time. It sits at the dispatcher, below everything that calls torch: the code
    it watches does not know of it.
    """

    def __init__(self, groups):
        super().__init__()
        self.names = {}
        for name, members in groups.items():
            for group in members if isinstance(members, list) else [members]:
                # New_group gives non-members something else
                if isinstance(group, dist.ProcessGroup):
                    self.names.setdefault(group.group_name, name)
        self.watch([])

    def watch(self, known):
        """Start anew; memory of the tensors in `known` is not counted."""
        self.sent, self.live, self.bytes, self.peak = {}, {}, 0, 0
        storages = [t.untyped_storage() for t in known]
        self.known = {storage._cdata for storage in storages}
        self.freed = [storage for storage in storages if storage.nbytes() == 0]
        self.gathered_peak = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if func.namespace == "c10d":
            self._count(func, args)
        else:
            for t in tensors_in(out):
                self._see(t.untyped_storage())
        return out

    def _count(self, func, args):
        name = func.name().removeprefix("c10d::")
        if name not in OPERATIONS:
            return  # a barrier and the like: no payload
        operation, group, payload, wire = message(name, args)
        if operation == "all_gather":
            size = sum(storage.nbytes() for storage in self.freed)
            self.gathered_peak = max(self.gathered_peak, size)
        row = self.sent.setdefault(
            (operation, self.names.get(group.group_name, group.group_name)), [0, 0, 0.0]
        )
        row[0] += 1
        row[1] += payload
        row[2] += wire

    def _see(self, storage):
        key, size = storage._cdata, storage.nbytes()
        if key in self.known or key in self.live:
            return
        self.live[key] = size
        self.bytes += size
        self.peak = max(self.peak, self.bytes)
        weakref.finalize(storage, self._forget, key)

    def _forget(self, key):
        self.bytes -= self.live.pop(key, 0)


def human(size):
    for unit in ("B ", "KB", "MB", "GB"):
        if size < 1000 or unit == "GB":
            return f"{size:9.{0 if unit == 'B ' else 2}f} {unit}"
        size /= 1000
