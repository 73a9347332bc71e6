"""The meter of a dry run. It runs operations on tensors without memory. It gives each the time that
it would take on a described device, and each message its time on the links: those of
simulator/kernels.py and simulator/links.py."""

import functools
import math
import weakref
from typing import NamedTuple

import torch
import torch.distributed as dist

from proof import ledger
from simulator import kernels, links

aten = torch.ops.aten
CPU, META = torch.device("cpu"), torch.device("meta")
# Seconds that the host takes to launch an operation from Python, measured beside an H100
LAUNCH = 4.2e-6


class Part(NamedTuple):
    """A span of a step: seconds of computing, of messages beside it, of messages that are waited
    for, and of those that are experts' rows; bytes that it leaves, and those that it has at most,
    beside what was there."""

    compute: float = 0.0
    beside: float = 0.0
    waited: float = 0.0
    rows: float = 0.0
    left: float = 0.0
    most: float = 0.0

    @property
    def seconds(self):
        return links.both(self.compute, self.beside) + self.waited

    @property
    def slowed(self):
        """Seconds of computing, with what messages beside it cost it while it lasts."""
        return links.both(self.compute, min(self.beside, links.BESIDE * self.compute))

    def scaled(self, factor):
        return Part(*(number * factor for number in self))


class Meter(ledger.Ledger):
    """A ledger that runs every operation on meta tensors, which have shapes and storages but no
    memory. It gives each its time, and counts FLOPs; whoever reads a value gets a 1.

    attention: its kernel, see kernels.py. dropout: of plain attention's scores. hides: the
    values of `fused` with which tensor parallelism's messages travel beside computing. `counting`:
    whether the ledger counts. `fused`: operations between products are one kernel, as torch.compile
    makes them. `parts`: a Part for each span between two calls of `clock`; `flops`; `message`:
    bytes of the largest message between stages."""

    fused = False

    def __init__(self, groups, cluster, attention=None, dropout=False, hides=(False,)):
        super().__init__(groups)
        self.cluster, self.dropout, self.hides = cluster, dropout, hides
        self.attention = attention or kernels.family(cluster.device).attention
        self.read, self.written = {}, {}
        self.links, self.in_flight = {}, {}
        self.begin()
        self.stop()

    def begin(self):
        """Count from now on."""
        # Seconds of computing, of messages beside and waited for, of the host's launches, of rows
        self.parts, self.part, self.flops, self.message = [], [0.0] * 5, 0, 0
        self.before = self.most = self.bytes  # of memory, at the span's begin and at most
        self.counting = True

    def stop(self):
        """The ledger counts no more."""
        self.counting = False

    def clock(self):
        """End the span since the last call."""
        self.end_kernel()
        self.wait(*self.in_flight)
        compute, beside, waited, launching, rows = self.part
        memory = self.bytes - self.before, self.most - self.before
        self.parts.append(Part(max(compute, launching), beside, waited, rows, *memory))
        self.part = [0.0] * 5
        self.before = self.most = self.bytes

    def _see(self, storage):
        super()._see(storage)
        self.most = max(self.most, self.bytes)

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
        kwargs = kwargs or {}
        if func is aten._local_scalar_dense.default:
            return 1.0 if args[0].is_floating_point() else 1
        if func is aten.lift_fresh.default:  # torch.tensor(...)
            return args[0].to(META)
        if kwargs.get("device") == CPU:
            kwargs = {**kwargs, "device": META}
        if func is aten._grouped_mm.default:
            out = grouped_mm_result(*args, **kwargs)
        else:
            out = without_values(func, args, kwargs)
        if func is aten.native_layer_norm.default:  # its statistics have its type, as on a CPU
            y, *rows = out
            out = y, *(torch.empty_like(row, dtype=y.dtype) for row in rows)
        if self.counting:
            self.note(func, args, out)
        if func.namespace == "c10d":
            self.send(func, args)
        elif func.namespace == "aten":
            self.compute(func, args, out)
        return out

    def compute(self, func, args, out):
        name = func.overloadpacket.__name__
        if func.is_view or name in FREE or name.startswith(("empty", "new_empty")):
            return
        given, made = (list(ledger.tensors_in(x)) for x in (args, out))
        self.wait(*(t.untyped_storage()._cdata for t in given))
        if name in COSTS:
            self.end_kernel()
            flops, seconds = COSTS[name](self, args, out)
            self.flops += flops
            self.part[0] += seconds
            self.part[3] += LAUNCH
            return
        if name in LOOKUPS:
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
        found = ledger.message(func, args)
        if found is None:
            return
        self.end_kernel()
        operation, group, payload, wire = found
        axis = self.names.get(group.group_name)
        if axis in ("down", "up"):  # between stages: the simulator's
            self.message = max(self.message, payload * (operation == "send"))
            return
        if group not in self.links:
            ranks = dist.get_process_group_ranks(group)
            self.links[group] = links.link_of(self.cluster, ranks)
        if operation == "recv" or group.size() == 1:
            return  # the other side's send
        names = [argument.name for argument in func._schema.arguments]
        is_async = "async_op" not in names[: len(args)] or args[names.index("async_op")]
        seconds = self.links[group].seconds(operation, wire)
        self.part[3] += LAUNCH
        if not is_async or axis == "tp" and self.fused not in self.hides:
            self.part[2] += seconds
        elif axis in ("tp", "ep"):
            storage = next(ledger.tensors_in(args[0])).untyped_storage()
            self.in_flight[storage._cdata] = seconds, self.part[0], axis
        else:
            self.part[1] += seconds

    def wait(self, *storages):
        """Before these are used: messages that fill them have travelled beside computing."""
        for storage in self.in_flight.keys() & storages:
            seconds, start, axis = self.in_flight.pop(storage)
            meanwhile = self.part[0] - start
            waited = links.both(meanwhile, seconds) - meanwhile
            self.part[2] += waited
            self.part[4] += waited if axis == "ep" else 0.0


@functools.cache
def makes_new_tensors(func):
    """Whether all that an operation gives is new: it is no view, and writes to no argument."""
    schema = func._schema
    # _unsafe_view gives a view, and its schema does not say so
    alone = func.overloadpacket.__name__ not in FREE
    alone &= not any(argument.alias_info for argument in schema.arguments)
    kinds = {str(value.type) for value in schema.returns}
    return func.namespace == "aten" and alone and kinds == {"Tensor"}


SHAPES = {}  # what is given: what comes back


def without_values(func, args, kwargs):
    """What an operation gives. Torch's rules for it take most of a dry run's time, so shapes that
    came back once are kept."""
    if not makes_new_tensors(func):
        return func(*args, **kwargs)
    key = func, *map(shape_of, args), *kwargs, *map(shape_of, kwargs.values())
    if key not in SHAPES:
        out = func(*args, **kwargs)
        SHAPES[key] = shape_of(list(out)) if isinstance(out, tuple) else shape_of(out)
        return out

    def like(shape):
        if shape is None:  # such as the gradient of a bias that is not there
            return None
        return torch.empty_strided(*shape[:2], dtype=shape[2], device=META)

    one = isinstance(SHAPES[key][-1], torch.dtype)
    return like(SHAPES[key]) if one else tuple(map(like, SHAPES[key]))


def shape_of(x):
    """What of an argument its operation's result depends on."""
    if isinstance(x, torch.Tensor):
        return x.shape, x.stride(), x.dtype
    if isinstance(x, (list, tuple)):
        return tuple(map(shape_of, x))
    return x if x is None else (type(x), x)  # 1, 1.0 and True are equal, and give other types


def grouped_mm_result(a, b, offs=None, *rest, **options):
    """What torch._grouped_mm gives, without values: torch's own rule for it knows bfloat16 alone.
    If b has two dimensions, the groups are along what a and b share: a product for each."""
    shape = [len(a), b.shape[-1]]
    if b.dim() == 2:
        shape = [len(offs), *shape]
    return a.new_empty(shape)


def product(meter, args, out):
    """(FLOPs, seconds) of a matrix product, or of a batch of them."""
    a, b = [t for t in args if isinstance(t, torch.Tensor) and t.dim() > 1][-2:]
    batch = a.shape[0] if a.dim() == 3 else 1
    m, k, n = *a.shape[-2:], b.shape[-1]
    device, size = meter.cluster.device, out.element_size()
    return 2 * batch * m * n * k, kernels.product_seconds(device, m, n, k, batch, size)


def grouped_product(meter, args, out):
    """Experts' products: as many as there are groups, each with its share of the rows."""
    a, b = args[:2]
    if b.dim() == 3:
        groups, k, n = b.shape
        m = -(-len(a) // groups)
    else:
        groups, m, n = out.shape
        k = -(-a.shape[1] // groups)
    seconds = kernels.product_seconds(meter.cluster.device, m, n, k, groups, out.element_size())
    return 2 * a.numel() * b.shape[-1], seconds


def attention(meter, products, q, k, *rest):
    """Of so many products of queries (B, H, n, D) with keys (B, H_kv, m, D), half if causal."""
    causal = rest[-1] is True
    flops = products * 2 * math.prod(q.shape) * k.shape[2] // (2 if causal else 1)
    options = causal, products == 5, q.element_size(), meter.dropout
    device, keys = meter.cluster.device, k.shape[2]
    return flops, kernels.attention_seconds(device, meter.attention, q.shape, keys, *options)


FLASH = "_scaled_dot_product_flash_attention_for_cpu"
# Operation -> its FLOPs and seconds
COSTS = dict.fromkeys(("mm", "addmm", "bmm", "baddbmm"), product)
COSTS["_grouped_mm"] = grouped_product
COSTS[FLASH] = lambda meter, args, out: attention(meter, 2, *args)
COSTS[f"{FLASH}_backward"] = lambda meter, args, out: attention(meter, 5, *args[1:])
LOOKUPS = ("embedding", "index_select", "index", "gather")  # they read no more than they give
# Views in all but name; and a number that is written to a part of a tensor
FREE = ("_unsafe_view", "_reshape_alias", "scalar_tensor")
