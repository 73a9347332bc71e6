"""The meter of a dry run: what each operation would take on a described device, and each message on
its links."""

import math
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from harness import ledger
from trainer.devices import EFFICIENCY


class Part(NamedTuple):
    """Seconds of computing, of messages beside it, and of messages that are waited for."""

    compute: float = 0.0
    beside: float = 0.0
    waited: float = 0.0

    @property
    def seconds(self):
        return max(self.compute, self.beside) + self.waited


class Meter(TorchDispatchMode):
    """While it is on, gives every operation its time and counts FLOPs; whoever reads a value gets a
    1.

    names: {name of a group: what it is called}, as the ledger has them. `parts`: a Part for each
    span between two calls of `clock`; `flops`; `message`: bytes of the largest message between
    stages."""

    def __init__(self, cluster, names, one_chunk=True):
        super().__init__()
        self.cluster, self.names, self.one_chunk = cluster, names, one_chunk
        self.known, self.links = {}, {}
        self.begin()

    def begin(self):
        self.parts, self.part, self.now, self.flops, self.message = [], [0.0, 0.0, 0.0], 0.0, 0, 0

    def clock(self):
        """End the span since the last call. Returns the seconds so far."""
        self.parts.append(Part(*self.part))
        self.part = [0.0, 0.0, 0.0]
        self.now += self.parts[-1].seconds
        return self.now

    def totals(self):
        """What was counted in this span, and FLOPs: numbers of which a block's are a difference."""
        return [*self.part, self.flops]

    def add(self, spent):
        """Count what a block took that is not played again: differences of totals()."""
        self.part = [now + more for now, more in zip(self.part, spent)]
        self.flops += spent[-1]

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten._local_scalar_dense.default:
            return 1.0 if args[0].is_floating_point() else 1
        if func is torch.ops.aten._grouped_mm.default:
            out = grouped_mm_result(*args, **(kwargs or {}))
        else:
            out = func(*args, **(kwargs or {}))
        if func.namespace == "c10d":
            self.send(func, args)
        elif func.namespace == "aten":
            self.compute(func, args, out)
        return out

    def compute(self, func, args, out):
        if func not in self.known:
            name = func.overloadpacket.__name__
            self.known[func] = (
                func.is_view or name in FREE or name.startswith(("empty", "new_empty")),
                name in LOOKUPS,
                FLOPS.get(name),
            )
        free, lookup, flops = self.known[func]
        if free:
            return
        given, made = (sum(t.nbytes for t in ledger.tensors_in(x)) for x in (args, out))
        moved = (
            2 * made if lookup else given + (made or given)
        )  # a fused optimizer returns nothing, and writes what it is given
        seconds = moved / (self.cluster.device.bandwidth * EFFICIENCY)
        if flops:
            count, result = flops(args, out), next(ledger.tensors_in(out))
            self.flops += count
            # 32 bits at half the rate of 16, as TF32
            rate = self.cluster.device.flops * 2 / result.element_size()
            seconds = max(seconds, count / (rate * EFFICIENCY))
        self.part[0] += seconds

    def send(self, func, args):
        name = func.name().removeprefix("c10d::")
        if name not in ledger.OPERATIONS:
            return
        operation, group, payload, wire = ledger.message(name, args)
        axis = self.names.get(group.group_name)
        if axis in ("down", "up"):  # between stages: the simulator's
            self.message = max(self.message, payload * (operation == "send"))
            return
        if group not in self.links:
            self.links[group] = self.cluster.link(dist.get_process_group_ranks(group))
        alpha, speed = self.links[group]
        rounds = 1 if operation in ("send", "recv") else math.ceil(math.log2(group.size()))
        rounds *= 2 if operation == "all_reduce" else operation != "recv"
        if func not in self.known:
            names = [a.name for a in func._schema.arguments]
            self.known[func] = names.index("async_op") if "async_op" in names else len(names)
        index = self.known[func]
        # Sent, and waited for at once
        waited = len(args) > index and not args[index] or axis == "ep" and self.one_chunk
        self.part[2 if waited else 1] += rounds * alpha + wire / speed


def grouped_mm_result(a, b, offs=None, *rest, **options):
    """What torch._grouped_mm gives, without values: torch's own rule for it knows bfloat16 alone.
    If b has two dimensions, the groups are along what a and b share: a product for each."""
    shape = [len(a), b.shape[-1]]
    if b.dim() == 2:
        shape = [len(offs), *shape]
    return a.new_empty(shape)


def attention(products, *args):
    """FLOPs of so many products of queries (B, H, n, D) with keys (B, H_kv, m, D), half of them
    where causal."""
    q, k, causal = args[0], args[1], args[-1] is True
    return products * 2 * math.prod(q.shape) * k.shape[2] // (2 if causal else 1)


def counted(packet):
    return lambda args, out: flop_registry[packet](*args, out_val=out)


# Operation -> FLOPs, of its arguments and results
FLOPS = {name: counted(getattr(torch.ops.aten, name)) for name in ("mm", "addmm", "bmm", "baddbmm")}
FLOPS["_grouped_mm"] = lambda args, out: 2 * args[0].numel() * args[1].shape[-1]
FLOPS["_scaled_dot_product_flash_attention_for_cpu"] = lambda args, out: attention(2, *args)
FLOPS["_scaled_dot_product_flash_attention_for_cpu_backward"] = lambda args, out: attention(
    5, *args[1:]
)
LOOKUPS = ("embedding", "index_select", "index", "gather")  # they read no more than they give
FREE = ("_unsafe_view", "_reshape_alias", "lift_fresh")  # views in all but name
