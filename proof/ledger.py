"""The ledger counts what a step sends, by operation and process group, and its peak memory.

It counts at torch's dispatcher, below all code that calls torch.
"""

import weakref

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode


def all_but_one(n):
    return (n - 1) / n


# c10d operation: (its name in the receipt,
#                  position of the argument that holds the whole payload,
#                  bytes that a rank sends per byte of payload on a ring of n ranks)
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
    "gather_": ("gather", 1, all_but_one),
    "scatter_": ("scatter", 1, all_but_one),
    "send": ("send", 0, lambda n: 1.0),
    "recv_": ("recv", 0, lambda n: 0.0),
    "recv_any_source_": ("recv", 0, lambda n: 0.0),
    "allreduce_coalesced_": ("all_reduce", 0, lambda n: 2 * all_but_one(n)),
    "allgather_coalesced_": ("all_gather", 0, all_but_one),
    "allgather_into_tensor_coalesced_": ("all_gather", 0, all_but_one),
    "reduce_scatter_tensor_coalesced_": ("reduce_scatter", 1, all_but_one),
}
# _c10d_functional operation: (name, bytes sent per byte of payload). FSDP2, DTensor and compiled
# code call them. The first argument is the payload, or this rank's part of what is gathered
FUNCTIONAL = {
    "all_reduce": ("all_reduce", lambda n: 2 * all_but_one(n)),
    "all_gather_into_tensor": ("all_gather", all_but_one),
    "reduce_scatter_tensor": ("reduce_scatter", all_but_one),
    "all_to_all_single": ("all_to_all", all_but_one),
    "broadcast": ("broadcast", all_but_one),
    "isend": ("send", lambda n: 1.0),
    "irecv": ("recv", lambda n: 0.0),
}


def tensors_in(x):
    """All tensors in nested lists and tuples."""
    if isinstance(x, torch.Tensor):
        yield x
    elif isinstance(x, (list, tuple)):
        for y in x:
            yield from tensors_in(y)


def storage_bytes(tensors):
    """Bytes of the storages behind the tensors. A storage that tensors share counts once."""
    storages = [t.untyped_storage() for t in tensors]
    return sum({storage._cdata: storage.nbytes() for storage in storages}.values())


def lasting(optimizer):
    """{kind: tensors} of what outlives a step: parameters, gradients, optimizer states. ZeRO keeps
    them in buckets; what its stage 3 has freed is among them, without memory."""
    states = [t for state in states_of(optimizer).values() for t in state.values()]
    states = [t for t in states if torch.is_tensor(t) and t.dim()]
    buckets = getattr(optimizer, "buckets", None)
    if hasattr(optimizer, "stage"):
        parameters = [t for bucket in buckets for t in (bucket.weights, bucket.shard)]
        kind = "gradients" if optimizer.stage < 2 else "gradient_shard"
        gradients = [getattr(bucket, kind) for bucket in optimizer.trained_buckets]
        states += [bucket.master for bucket in buckets if bucket.master is not bucket.shard]
    elif buckets:  # muon.py's: what other ranks own is not in param_groups
        parameters = [bucket.weights for bucket in buckets]
        gradients = [bucket.gradients for bucket in buckets]
    else:
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        gradients = [p.grad for p in parameters if p.grad is not None]
    return {"parameters": parameters, "gradients": gradients, "optimizer": states}


def states_of(optimizer):
    """{what an optimizer steps on: its state}, of an optimizer of torch's, ZeRO's or muon.py's."""
    found = {}
    for each in optimizers_of(optimizer):
        for group in each.param_groups:
            found |= {p: each.state[p] for p in group["params"]}
    return found


def optimizers_of(optimizer):
    """torch's own, in ZeRO, Muon or alone."""
    inner = getattr(optimizer, "optimizer", optimizer)
    return getattr(inner, "optimizers", [inner])


def message(func, args):
    """What an operation of c10d or _c10d_functional sends: (name in the receipt, process group,
    payload bytes, bytes on a ring), or None for one that has no payload, such as a barrier."""
    name = func.name().partition("::")[2].partition(".")[0]
    group = group_in(args)
    if func.namespace == "c10d" and name in OPERATIONS:
        operation, position, wire = OPERATIONS[name]
        payload = bytes_of(args[position])
        splits = args[4] if name == "alltoall_base_" else ()
    else:
        plain = name.removesuffix("_").removesuffix("_out").removesuffix("_coalesced")
        if func.namespace == "c10d" or plain not in FUNCTIONAL:
            return None
        operation, wire = FUNCTIONAL[plain]
        payload = bytes_of(args[0]) * (group.size() if operation == "all_gather" else 1)
        splits = args[2] if operation == "all_to_all" else ()
    sent_part = wire(group.size())
    if sum(splits):  # uneven: a rank does not send the part that is for itself
        sent_part = 1 - splits[group.rank()] / sum(splits)
    return operation, group, payload, payload * sent_part


def bytes_of(tensors):
    return sum(t.numel() * t.element_size() for t in tensors_in(tensors))


def group_in(args):
    """The process group among an operation's arguments, or the one whose name is the last."""
    for argument in args:
        if isinstance(argument, dist.ProcessGroup):
            return argument
        if isinstance(argument, torch.ScriptObject):
            try:
                return dist.ProcessGroup.unbox(argument)
            except RuntimeError:
                continue  # the operator of a reduction
    for argument in reversed(args):
        if isinstance(argument, str):
            return torch._C._distributed_c10d._resolve_process_group(argument)


class Ledger(TorchDispatchMode):
    """Within `with ledger:` it counts every c10d operation by group, and the bytes of live memory.

    groups  {name: process group, or a list of them}, to report by
    sent    {(operation, name): [calls, payload bytes, wire bytes]}
    peak    the most bytes that were alive at one time, without the `lasting` tensors of `watch`
    gathered_peak    the most bytes at one time of those `lasting` tensors that had no memory when
            watching started: ZeRO's weights in stage 3 are gathered and freed again
    """

    def __init__(self, groups):
        super().__init__()
        self.names = {}
        for name, members in groups.items():
            for group in members if isinstance(members, list) else [members]:
                # A rank that is not a member gets something else from new_group
                if isinstance(group, dist.ProcessGroup):
                    self.names.setdefault(group.group_name, name)
        self.watch([])

    def watch(self, lasting):
        """Start anew. The memory of the `lasting` tensors, which outlive a step, is not counted."""
        self.sent, self.live, self.bytes, self.peak = {}, {}, 0, 0
        lasting = list(lasting)
        storages = [t.untyped_storage() for t in lasting]
        self.lasting = {storage._cdata for storage in storages}
        # A tensor without elements has no memory either, but never gets any
        pairs = zip(lasting, storages)
        self.freed = [storage for t, storage in pairs if t.numel() > 0 and storage.nbytes() == 0]
        self.gathered_peak = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        self.note(func, args, out)
        return out

    def note(self, func, args, out):
        """Count an operation that has been run."""
        if func.namespace in ("c10d", "_c10d_functional"):
            self._count(func, args)
        if func.namespace != "c10d":
            for t in tensors_in(out):
                self._see(t.untyped_storage())

    def _count(self, func, args):
        found = message(func, args)
        if found is None:
            return
        operation, group, payload, wire = found
        if operation == "all_gather":
            gathered = sum(storage.nbytes() for storage in self.freed)
            self.gathered_peak = max(self.gathered_peak, gathered)
        key = operation, self.names.get(group.group_name, group.group_name)
        row = self.sent.setdefault(key, [0, 0, 0.0])
        row[0] += 1
        row[1] += payload
        row[2] += wire

    def _see(self, storage):
        key, size = storage._cdata, storage.nbytes()
        if key in self.lasting or key in self.live:
            return
        self.live[key] = size
        self.bytes += size
        self.peak = max(self.peak, self.bytes)
        weakref.finalize(storage, self._forget, key)

    def _forget(self, key):
        self.bytes -= self.live.pop(key, 0)


def human(size):
    """A number of bytes in a column of 12 characters."""
    for unit in ("B ", "KB", "MB", "GB"):
        if size < 1000 or unit == "GB":
            return f"{size:9.{0 if unit == 'B ' else 2}f} {unit}"
        size /= 1000
