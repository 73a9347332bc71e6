"""Blocks of a dry run that are alike are played once, and repeated from a tape.

A block that is played writes a tape of its forward and one of its backward: each storage that is
born and freed, each message, each gradient of a parameter, and what it took. A block with equal
shapes at the same kind of place (first, inner or last of its stage) then plays the tape. The ledger
gets the same bytes in the same order, without operations. What joins a block with the rest is real
all the same: its input and output, the gradients of its parameters with their hooks (DDP's and
ZeRO's), and the hooks of ZeRO's units. So buckets fill, and are reduced, as in a run.

    played      x -- Border -- operations -- Border -- y    each Border marks the end of a tape
    repeated    x -------------- Repeat ------------- y        backward runs the tape too

Where a tape does not hold all that a block did, such as a storage that outlives its backward, all
blocks are played (CannotRepeat). Tests hold repeated runs against played ones, to the byte.
"""

import collections
import math
import weakref
from functools import partial
from typing import NamedTuple

import torch
from torch.overrides import _get_current_function_mode_stack

import pipeline
from expert_parallel import ExpertDispatch
from proof import ledger
from simulator.fakes import KnowsDevices


class Ledger(KnowsDevices, ledger.Ledger):
    """A ledger that tells a tape of storages and messages, and that counts storages of a tape."""

    tape = None  # the Tape that is being written

    def _see(self, storage):
        new = storage._cdata not in self.live and storage._cdata not in self.lasting
        super()._see(storage)
        if new and self.tape and not self.tape.paused:
            self.tape.born(storage)

    def _forget(self, key):
        if self.tape and key in self.live:
            self.tape.gone(key)
        super()._forget(key)

    def _add(self, key, payload, wire):
        super()._add(key, payload, wire)
        if self.tape and not self.tape.paused:
            self.tape.events.append(("sent", key, payload, wire))

    def rise(self, most, net):
        """Bytes that rise by `most` for a while and by `net` in the end."""
        self.peak = max(self.peak, self.bytes + most)
        self.bytes += net


class Layout(NamedTuple):
    """What it takes to make a tensor again: its memory, and which part of that it is."""

    size: int  # bytes of its storage
    dtype: torch.dtype
    shape: tuple
    stride: tuple
    offset: int

    @classmethod
    def of(cls, t):
        size = t.untyped_storage().nbytes()
        return cls(size, t.dtype, tuple(t.shape), t.stride(), t.storage_offset())

    def memory(self, device):
        return torch.empty(self.size // self.dtype.itemsize, dtype=self.dtype, device=device)

    def make(self, device, memory=None):
        """The tensor, in memory of its own or in what it shares with others."""
        whole = math.prod(self.shape) * self.dtype.itemsize == self.size
        if memory is None and whole:
            return torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=device)
        memory = self.memory(device) if memory is None else memory
        return memory.as_strided(self.shape, self.stride, self.offset)


class Tape:
    """What a block did, forward or backward.

    events  ("born", key, bytes), ("gone", key, bytes), ("sent", ...), ("outer gone", name),
            ("gradient", parameter, key, layout), ("drop", key): nobody needs that gradient any more
            ("buffer", number), ("read", dispatch, arguments)
    outer   {key: name} of storages from outside the block whose end is of interest
    spent   what the meter counted meanwhile
    Nothing is written while it is paused: DDP and ZeRO take a gradient then."""

    def __init__(self, ledger, meter, block, outer=()):
        self.ledger, self.meter, self.outer = ledger, meter, dict(outer)
        self.buffers = {storage_key(buffer): i for i, buffer in enumerate(block.buffers())}
        self.events, self.sizes, self.handed_over = [], {}, set()
        self.spent = [0] * len(meter.totals())
        self.resume()

    def resume(self):
        self.paused, self.ledger.tape, self.begun = False, self, self.meter.totals()

    def stop(self):
        self.pause()
        self.ledger.tape = None

    def pause(self):
        self.paused = True
        pairs = zip(self.spent, self.meter.totals(), self.begun)
        self.spent = [spent + now - begun for spent, now, begun in pairs]

    def born(self, storage):
        if storage._cdata in self.buffers:  # a router's load, written for the first time
            self.events.append(("buffer", self.buffers[storage._cdata]))
            return
        self.sizes[storage._cdata] = storage.nbytes()
        self.events.append(("born", storage._cdata, storage.nbytes()))

    def gone(self, key):
        if key in self.handed_over:
            self.handed_over.remove(key)
            self.events.append(("drop", key))
        elif key in self.sizes:
            self.events.append(("gone", key, self.sizes.pop(key)))
        elif key in self.outer:
            self.events.append(("outer gone", self.outer.pop(key)))

    def hand_over(self, tensor):
        """A tensor that was born on this tape goes on outside of it. Returns its Layout."""
        key = storage_key(tensor)
        if key in self.sizes:
            self.events.append(("gone", key, self.sizes.pop(key)))
            self.handed_over.add(key)
        elif key not in self.handed_over:
            raise CannotRepeat("a tensor from elsewhere leaves a block")
        return Layout.of(tensor)

    def summed(self):
        """The tape with births and ends between two other events as one ("bytes", most, net)."""
        takers = collections.Counter(event[2] for event in self.events if event[0] == "gradient")
        events, most, net = [], 0, 0
        for event in [*self.events, ("end",)]:
            if event[0] in ("born", "gone"):
                net += event[2] if event[0] == "born" else -event[2]
                most = max(most, net)
                continue
            if most or net:
                events.append(("bytes", most, net))
            most = net = 0
            if event[0] == "drop" and takers[event[1]] == 1 and events[-1][0] == "gradient":
                events[-1] = events[-1][:2] + (None, events[-1][3])  # nobody shares its memory
                continue
            events.append(event)
        return events[:-1]


class Border(torch.autograd.Function):
    """Identity before or after a block's operations. Its backward calls arrived(gradient), which
    ends or begins the tape of the block's backward."""

    @staticmethod
    def forward(ctx, x, arrived):
        ctx.arrived = arrived
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        ctx.arrived(gradient)
        return gradient, None


def storage_key(tensor):
    return tensor.untyped_storage()._cdata


class CannotRepeat(Exception):
    """A block did something that a tape does not hold: play all blocks instead."""


class Record:
    """The tapes of a block that is played, forward and backward."""

    def __init__(self, block, ledger, meter):
        self.block, self.ledger, self.meter = block, ledger, meter
        self.parameters = list(block.parameters())
        self.forward_events = self.backward_events = None  # until they are complete
        self.kept_shared = self.kept_input = None

    def play(self, run, x, *rest):
        """run(block, x, *rest), while the tapes are written."""
        self.deferred = deferred_mode()
        operations = self.block.forward
        self.reads = []
        for i, dispatch in enumerate(dispatches_of(self.block)):
            self.reads.append((dispatch, dispatch.read))
            dispatch.read = partial(self.read, i, dispatch.read)

        def forward(x, *rest):
            # Within what `run` does, so that hooks of the block stay outside
            tape = self.tape = Tape(self.ledger, self.meter, self.block)
            try:
                x = Border.apply(x, self.end_backward)
                y = Border.apply(operations(x, *rest), self.begin_backward)
            finally:
                tape.stop()
            self.result = tape.hand_over(y)
            return y

        self.outer = {storage_key(t): i for i, t in enumerate(tensors_of(x, rest))}
        self.shared = [weakref.ref(t.untyped_storage()) for t in tensors_of(None, rest)]
        self.input = weakref.ref(x.untyped_storage())
        self.block.forward = forward
        try:
            y = run(self.block, x, *rest)
        finally:
            del self.block.forward
        self.kept = dict(self.tape.sizes)
        self.forward_events, self.forward_spent = self.tape.summed(), self.tape.spent
        return y

    def read(self, i, read, *given):
        """In place of the `read` of the block's dispatch number i, which counts rows."""
        if self.ledger.tape is self.tape:
            given_again = [None if isinstance(x, torch.Tensor) else x for x in given]
            self.tape.events.append(("read", i, given_again))
        return read(*given)

    def begin_backward(self, gradient):
        self.kept_shared = [shared() is not None for shared in self.shared]
        self.kept_input = self.input() is not None
        outer = self.outer | {storage_key(gradient): "gradient"}
        tape = self.tape = Tape(self.ledger, self.meter, self.block, outer)
        tape.sizes = dict(self.kept)
        self.replaced = []
        for i, p in enumerate(self.parameters):
            hooks = p._post_accumulate_grad_hooks or {}
            if p.requires_grad and len(hooks) != 1:
                raise CannotRepeat("it is not known who takes a gradient")
            for key, hook in list(hooks.items()):
                self.replaced.append((hooks, key, hook))
                hooks[key] = partial(self.take, i, hook)
        self.entries = len(self.deferred.entries) if self.deferred else 0

    def take(self, i, hook, p):
        """In place of the hook of parameter i."""
        key, layout = storage_key(p.grad), None
        if key in self.tape.sizes or key in self.tape.handed_over:
            layout = self.tape.hand_over(p.grad)
        self.tape.events.append(("gradient", i, key, layout))
        self.tape.pause()
        hook(p)
        self.tape.resume()

    def end_backward(self, gradient):
        tape = self.tape
        for hooks, key, hook in self.replaced:
            hooks[key] = hook
        for dispatch, read in self.reads:
            dispatch.read = read
        self.input_gradient = None  # the gradient's own memory
        if tape.outer.get(storage_key(gradient)) != "gradient":
            self.input_gradient = tape.hand_over(gradient)
        self.put_off = self.put_off_products() if self.deferred else []
        # What an autograd node has as an attribute lives until the graph is dropped
        self.until_graph_ends = sum(tape.sizes.values())
        for key in list(tape.sizes):
            tape.gone(key)
        tape.stop()
        self.backward_events, self.backward_spent = tape.summed(), tape.spent
        # They hold the block's tensors
        self.tape = self.block = self.deferred = self.parameters = self.replaced = None
        self.reads = None

    def keeps(self, rest):
        """Of the tensors in `rest`, which all blocks share, those that a block keeps for backward.
        This is the record of a stage's first block, which is the last to free them. In the same
        micro-batch nobody else need keep them."""
        kept = self.kept_shared
        if kept is None:  # Backward has not begun: forward, which has them too, is over
            kept = [shared() is not None for shared in self.shared]
        pairs = zip(tensors_of(None, rest), self.shared, kept)
        return [t for t, shared, keep in pairs if keep and shared() is not t.untyped_storage()]

    def keeps_input(self):
        """Whether the block keeps its input for backward. RMSNorm of 16 bits keeps a copy."""
        if self.kept_input is None:  # Backward has not begun, but forward is over
            return self.input() is not None
        return self.kept_input

    def put_off_products(self):
        """(parameter's number, (key, layout) of its input and of its gradient) of each product
        whose weight's gradient comes later."""
        found, layouts = [], {}
        for weight, x, gradient, offsets in self.deferred.entries[self.entries :]:
            numbers = [i for i, p in enumerate(self.parameters) if p is weight]
            if not numbers or offsets is not None:
                raise CannotRepeat("groups of experts' rows are on no tape")
            for t in (x, gradient):
                key = storage_key(t)
                if key not in layouts:
                    layouts[key] = self.tape.hand_over(t)
                elif Layout.of(t) != layouts[key]:
                    raise CannotRepeat("two products put off share memory in an unknown way")
            keys = storage_key(x), storage_key(gradient)
            found.append((numbers[0], *((key, layouts[key]) for key in keys)))
        return found

    def follow(self, events, block, outer=()):
        """Do what a tape says, for another block."""
        parameters, dispatches = list(block.parameters()), dispatches_of(block)
        memory = {}  # {key: of gradients that nobody has taken yet}
        for kind, *what in events:
            if kind == "bytes":
                self.ledger.rise(*what)
            elif kind == "sent":
                self.ledger._add(*what)
            elif kind == "outer gone":
                self.ledger._forget(outer[what[0]])
            elif kind == "read":
                number, given = what
                dispatches[number].read(*given)
            elif kind == "gradient":
                give_gradient(parameters[what[0]], *what[1:], memory)
            elif kind == "buffer":
                self.ledger._see(list(block.buffers())[what[0]].untyped_storage())
            elif kind == "drop":
                memory.pop(what[0], None)

    def put_off_again(self, deferred, parameters, device):
        """Leave the products whose weights' gradients come later, as pipeline.Deferred does."""
        tensors = {}
        for number, *pair in self.put_off:
            for key, layout in pair:
                if key not in tensors:
                    tensors[key] = layout.make(device)
            x, gradient = (tensors[key] for key, _ in pair)
            deferred.entries.append((parameters[number], x, gradient, None))


def give_gradient(p, key, layout, memory):
    """Have the hooks of p take a gradient, as autograd does. layout: None where it was added to
    p.grad. memory: {key: what several gradients share}."""
    if layout is not None:
        if key is not None and key not in memory:
            memory[key] = layout.memory(p.device)
        p.grad = layout.make(p.device, memory.get(key))
    for hook in list(p._post_accumulate_grad_hooks.values()):
        hook(p)


class Repeat(torch.autograd.Function):
    """A block that is not played: the tapes of its place are followed. ahead: of a block that was
    played before, where the place's own has no forward tape yet."""

    @staticmethod
    def forward(ctx, x, place, block, kept, *rest):
        ctx.place, ctx.block, ctx.kept, ctx.deferred = place, block, kept, deferred_mode()
        ctx.outer = [storage_key(t) for t in tensors_of(x, rest)]
        record = place.for_forward()
        if record.keeps_input():
            ctx.save_for_backward(x)
        record.follow(record.forward_events, block)
        record.meter.add(record.forward_spent)
        return record.result.make(x.device)

    @staticmethod
    def backward(ctx, gradient):
        record, block = ctx.place.for_backward(), ctx.block
        outer = dict(enumerate(ctx.outer))
        outer["gradient"] = storage_key(gradient)
        record.follow(record.backward_events, block, outer)
        record.meter.add(record.backward_spent)
        if record.put_off:
            record.put_off_again(ctx.deferred, list(block.parameters()), gradient.device)
        if record.until_graph_ends:
            ctx.late = gradient.new_empty(record.until_graph_ends, dtype=torch.uint8)
        if record.input_gradient is not None:
            gradient = record.input_gradient.make(gradient.device)
        return gradient, *[None for _ in ctx.needs_input_grad[1:]]


def dispatches_of(block):
    return [module for module in block.modules() if isinstance(module, ExpertDispatch)]


def deferred_mode():
    """The pipeline.Deferred that is on, or None."""
    modes = _get_current_function_mode_stack()
    return next((mode for mode in modes if isinstance(mode, pipeline.Deferred)), None)


def tensors_of(x, rest):
    """The tensors among a block's inputs: x, cos and sin, the key of its dropout."""
    return list(ledger.tensors_in([x, *rest]))


class Place:
    """Blocks that are alike: the first, the inner ones, or the last of a stage. Backward runs from
    the last to the first, so of the inner ones the last one writes both tapes. The first writes a
    forward tape for those between them."""

    def __init__(self):
        self.early = self.record = None  # the Records

    def for_forward(self):
        return self.record or self.early

    def for_backward(self):
        if not self.record or self.record.backward_events is None:
            raise CannotRepeat("backward does not come in the reverse order of forward")
        if self.early and (
            self.early.forward_events != self.record.forward_events
            or self.early.result != self.record.result
        ):
            raise CannotRepeat("two blocks of a stage are not alike")
        return self.record


class Repeater:
    """Takes the place of `run` of a stage: run(block, *inputs) plays a block or repeats it."""

    def __init__(self, part, ledger, meter):
        self.run, self.ledger, self.meter = part.run, ledger, meter
        self.order = {id(block): i for i, block in enumerate(part.blocks.values())}
        self.shapes = {}  # {id of a block: what its parameters look like}
        self.places = {}  # {what is equal of alike blocks: Place}

    def __call__(self, block, x, *rest):
        if id(block) not in self.shapes:
            named = block.named_parameters()
            shapes = tuple((name, p.shape, p.dtype, p.requires_grad) for name, p in named)
            self.shapes[id(block)] = shapes
        number, last = self.order[id(block)], len(self.order) - 1
        where = {0: "first", last: "last"}.get(number, "inner")
        inputs = tuple((t.shape, t.stride(), t.dtype) for t in tensors_of(x, rest))
        key = where, self.shapes[id(block)], inputs, deferred_mode() is not None
        if not torch.is_grad_enabled() or not x.requires_grad:
            return self.run(block, x, *rest)
        place = self.places.setdefault(key, Place())
        if place.record is None and (where != "inner" or number == last - 1):
            place.record = Record(block, self.ledger, self.meter)
            if number == 0:
                self.first = place.record
            return place.record.play(self.run, x, *rest)
        if place.for_forward() is None:
            place.early = Record(block, self.ledger, self.meter)
            return place.early.play(self.run, x, *rest)
        kept = self.first.keeps(rest)
        block.forward = lambda x, *rest: Repeat.apply(x, place, block, kept, *rest)
        try:
            return block(x, *rest)
        finally:
            del block.forward
