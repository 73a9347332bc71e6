"""The meter of a dry run: what each operation would take on a described device, and each message on
its links. simulator/kernels.py and simulator/links.py have the times."""

import math
import weakref
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from proof import ledger
from simulator import kernels, links

# Seconds that the host takes to launch an operation: 4.2 microseconds from Python, measured beside
# an H100
LAUNCH = 4.2e-6


class Part(NamedTuple):
    """Seconds of computing, of messages beside it, and of messages that are waited for."""

    compute: float = 0.0
    beside: float = 0.0
    waited: float = 0.0

    @property
    def seconds(self):
        return links.both(self.compute, self.beside) + self.waited

    @property
    def slowed(self):
        """Seconds of computing, with what messages beside it cost it while it lasts."""
        return links.both(self.compute, min(self.beside, links.BESIDE * self.compute))


class Meter(TorchDispatchMode):
    """While it is on, gives every operation its time and counts FLOPs; whoever reads a value gets a
    1.

    names: {name of a group: what it is called}, as the ledger has them. attention: its kernel, see
    kernels.py. dropout: of plain attention's scores. `fused`: operations between products are one
    kernel, as torch.compile makes them. `parts`: a Part for each span between two calls of `clock`;
    `flops`; `message`: bytes of the largest message between stages."""

    def __init__(self, cluster, names, one_chunk=True, attention=None, dropout=False):
        super().__init__()
        self.cluster, self.names, self.one_chunk = cluster, names, one_chunk
        self.attention = attention or kernels.family(cluster.device).attention
        self.dropout = dropout
        self.fused, self.read, self.written = False, {}, {}
        self.known, self.links = {}, {}
        self.begin()

    def begin(self):
        # Seconds of computing, of messages beside and waited for, of the host's launches
        self.parts, self.part, self.now, self.flops, self.message = [], [0.0] * 4, 0.0, 0, 0

    def clock(self):
        """End the span since the last call. Returns the seconds so far."""
        self.end_kernel()
        compute, beside, waited, launching = self.part
        self.parts.append(Part(max(compute, launching), beside, waited))
        self.part = [0.0] * 4
        self.now += self.parts[-1].seconds
        return self.now

    def totals(self):
        """What was counted in this span, and FLOPs: numbers of which a block's are a difference."""
        self.end_kernel()
        return [*self.part, self.flops]

    def add(self, spent):
        """Count what a block took that is not played again: differences of totals()."""
        self.end_kernel()
        self.part = [now + more for now, more in zip(self.part, spent)]
        self.flops += spent[-1]

    def fuse(self, fused):
        """From now on operations are fused, or they are not."""
        self.end_kernel()
        self.fused = fused

    def end_kernel(self):
        """Of operations that are fused only what came from before them is read, and only what
        outlives them is written."""
        if self.read or self.written:
            alive = sum(size for storage, size in self.written.values() if storage() is not None)
            self.count_bytes(sum(self.read.values()) + alive)
            self.read, self.written = {}, {}

    def count_bytes(self, moved):
        self.part[0] += kernels.moving_seconds(self.cluster.device, moved)
        self.part[3] += LAUNCH

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
                SECONDS.get(name),
            )
        free, lookup, flops, seconds = self.known[func]
        if free:
            return
        if flops:
            self.end_kernel()
            self.flops += flops(args, out)
            self.part[0] += seconds(self, args, out)
            self.part[3] += LAUNCH
            return
        given, made = ([t for t in ledger.tensors_in(x)] for x in (args, out))
        if lookup:  # it reads no more than it gives
            self.count_bytes(2 * sum(t.nbytes for t in made))
        elif self.fused and made:
            for t in given:
                key = t.untyped_storage()._cdata
                if key not in self.written:
                    self.read[key] = max(self.read.get(key, 0), t.nbytes)
            for t in made:
                storage = t.untyped_storage()
                self.written[storage._cdata] = weakref.ref(storage), t.nbytes
        else:
            # A fused optimizer returns nothing, and writes what it is given
            read = sum(t.nbytes for t in given)
            self.count_bytes(read + (sum(t.nbytes for t in made) or read))

    def send(self, func, args):
        name = func.name().removeprefix("c10d::")
        if name not in ledger.OPERATIONS:
            return
        self.end_kernel()
        operation, group, payload, wire = ledger.message(name, args)
        axis = self.names.get(group.group_name)
        if axis in ("down", "up"):  # between stages: the simulator's
            self.message = max(self.message, payload * (operation == "send"))
            return
        if group not in self.links:
            ranks = dist.get_process_group_ranks(group)
            self.links[group] = links.link_of(self.cluster, ranks)
        if operation == "recv" or group.size() == 1:
            return  # the other side's send
        if func not in self.known:
            names = [a.name for a in func._schema.arguments]
            self.known[func] = names.index("async_op") if "async_op" in names else len(names)
        index = self.known[func]
        # Sent, and waited for at once
        waited = len(args) > index and not args[index] or axis == "ep" and self.one_chunk
        self.part[2 if waited else 1] += self.links[group].seconds(operation, wire)
        self.part[3] += LAUNCH


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


def seconds_of_product(meter, args, out):
    a, b = [t for t in args if isinstance(t, torch.Tensor) and t.dim() > 1][-2:]
    batch = a.shape[0] if a.dim() == 3 else 1
    m, k, n = *a.shape[-2:], b.shape[-1]
    return kernels.product_seconds(meter.cluster.device, m, n, k, batch, out.element_size())


def seconds_of_grouped_product(meter, args, out):
    """Experts' products: as many as there are groups, each with its share of the rows."""
    a, b = args[:2]
    device, size = meter.cluster.device, out.element_size()
    if b.dim() == 3:
        groups, k, n = b.shape
        return kernels.product_seconds(device, -(-len(a) // groups), n, k, groups, size)
    groups, m, n = out.shape
    return kernels.product_seconds(device, m, n, -(-a.shape[1] // groups), groups, size)


def seconds_of_attention(backward, meter, args):
    q, k, causal = args[0], args[1], args[-1] is True
    options = causal, backward, q.element_size(), meter.dropout
    shape = tuple(q.shape)
    return kernels.attention_seconds(
        meter.cluster.device, meter.attention, shape, k.shape[2], *options
    )


FLASH = "_scaled_dot_product_flash_attention_for_cpu"
PRODUCTS = ("mm", "addmm", "bmm", "baddbmm")
# Operation -> FLOPs, of its arguments and results
FLOPS = {name: counted(getattr(torch.ops.aten, name)) for name in PRODUCTS}
FLOPS["_grouped_mm"] = lambda args, out: 2 * args[0].numel() * args[1].shape[-1]
FLOPS[FLASH] = lambda args, out: attention(2, *args)
FLOPS[f"{FLASH}_backward"] = lambda args, out: attention(5, *args[1:])
# Operation -> seconds
SECONDS = dict.fromkeys(PRODUCTS, seconds_of_product)
SECONDS["_grouped_mm"] = seconds_of_grouped_product
SECONDS[FLASH] = lambda meter, args, out: seconds_of_attention(False, meter, args)
SECONDS[f"{FLASH}_backward"] = lambda meter, args, out: seconds_of_attention(True, meter, args[1:])
LOOKUPS = ("embedding", "index_select", "index", "gather")  # they read no more than they give
FREE = ("_unsafe_view", "_reshape_alias", "lift_fresh")  # views in all but name
