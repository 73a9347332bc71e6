"""One step of one rank, measured: what it sends, what it holds, and what waits.

A Measurement is a dispatch mode that is on for one step. It counts messages as the ledger does, and
follows each one: from its call until it is complete. Meanwhile the host may compute, and that part
is hidden.
"""

import gc
import sys
import time
import weakref

import torch
from torch.utils import _python_dispatch as modes

from proof import calls
from proof.ledger import Ledger, storage_bytes

Work = getattr(torch._C._distributed_c10d, "Work", None)


class Measurement(Ledger):
    """From `begin` to `end` it counts; then `figures` has the step as a dict."""

    def __init__(self, lasting):
        super().__init__({})
        self.watch(lasting)
        self.ranks = {}  # {a group's name: its global ranks}
        self.computed = []  # (start, end) of each operation on the host
        self.travelled = []  # [start, end] of each message; end is None while it is under way
        self.changes = []  # (storage, bytes) in their order; bytes < 0: it was freed
        self.numbers = {}  # {id of a live storage: its number in `changes`}

    def begin(self):
        """Enter below all dispatch modes that the script has entered: it leaves its own first."""
        above = [modes._pop_mode() for _ in modes._get_current_dispatch_mode_stack()]
        self.__enter__()
        for mode in reversed(above):
            modes._push_mode(mode)
        self.eager(True)
        self.started = time.perf_counter()

    def end(self):
        """Leave, although the script may have entered other modes since."""
        self.ended = time.perf_counter()
        self.eager(False)
        above = []
        if self not in modes._get_current_dispatch_mode_stack():
            return
        while modes._get_current_dispatch_mode() is not self:
            above.append(modes._pop_mode())
        self.__exit__(None, None, None)
        for mode in reversed(above):
            modes._push_mode(mode)

    def eager(self, on):
        """What torch.compile meets inside of a dispatch mode is never compiled again."""
        if "torch._dynamo" in sys.modules:
            torch.compiler.set_stance("force_eager" if on else "default")

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(t.__torch_dispatch__ is not torch.Tensor.__torch_dispatch__ for t in types):
            return NotImplemented  # a DTensor first calls its operations on local tensors
        start = time.perf_counter()
        out = func(*args, **(kwargs or {}))
        self.note(func, (*args, *(kwargs or {}).values()), out)
        if func.namespace == "c10d":
            self.follow(start, out)
        elif func.namespace != "_c10d_functional":
            self.computed.append((start, time.perf_counter()))
        elif "wait_tensor" in func.name():
            self.travelled.append([start, time.perf_counter()])
        return out

    def follow(self, start, out):
        """Note when a message is complete. (nccl's future says when it was queued.)"""
        last = out[-1] if isinstance(out, (tuple, list)) else out
        span = [start, None]
        try:
            work = Work.unbox(last)
            work.get_future().add_done_callback(lambda _: arrived(span))
        except (RuntimeError, TypeError):  # a send or receive has no future: see waited()
            pass
        self.travelled.append(span)

    def _count(self, func, args):
        super()._count(func, args)
        if any(name not in self.ranks for _, name in self.sent):
            self.ranks = calls.groups()

    def _see(self, storage):
        key = storage._cdata
        if key not in self.live and key not in self.lasting:
            super()._see(storage)
            self.numbers[key] = len(self.changes)
            self.changes.append((self.numbers[key], storage.nbytes()))

    def _forget(self, key):
        super()._forget(key)
        if key in self.numbers:
            number = self.numbers.pop(key)
            self.changes.append((number, -self.changes[number][1]))

    def figures(self, held, messages):
        """The step, for the report. held: {kind: tensors} of what outlives it. messages: the
        calls.Message of sends and receives."""
        keys = {t.untyped_storage()._cdata for tensors in held.values() for t in tensors}
        lasting = {number for key, number in self.numbers.items() if key in keys}
        peak = now = 0
        for number, size in self.changes:
            if number not in lasting:
                now += size
                peak = max(peak, now)
        messages = [[m.started, m.ended] for m in messages if m.started > self.started]
        spans = [span for span in self.travelled + messages if span[1] is not None]
        # A message's callback waits for Python's lock, perhaps until after the step
        under_way = merged([start, min(end, self.ended)] for start, end in spans)
        hidden = overlap(under_way, merged(self.computed))
        sent = []
        for (operation, name), row in self.sent.items():  # calls, payload, bytes on a ring
            sent.append([operation, self.ranks.get(name, []), name, *row])
        figures = {
            "sent": sent,
            "held": {kind: storage_bytes(tensors) for kind, tensors in held.items()},
            "seconds": self.ended - self.started,
            "under_way": sum(end - start for start, end in under_way),
            "hidden": hidden,
        }
        figures["held"]["activations and buffers, peak"] = peak
        if torch.cuda.is_available() and torch.cuda.is_initialized():
            figures["held"]["all on the GPU, peak"] = torch.cuda.max_memory_allocated()
        return figures


def arrived(span):
    span[1] = time.perf_counter()


def merged(spans):
    """The union of some (start, end), as spans in order that do not overlap."""
    union = []
    for start, end in sorted(spans):
        if union and start <= union[-1][1]:
            union[-1][1] = max(union[-1][1], end)
        else:
            union.append([start, end])
    return union


def overlap(these, others):
    """The length that two unions of spans have in common."""
    total, i, j = 0.0, 0, 0
    while i < len(these) and j < len(others):
        start = max(these[i][0], others[j][0])
        end = min(these[i][1], others[j][1])
        total += max(end - start, 0.0)
        if these[i][1] < others[j][1]:
            i += 1
        else:
            j += 1
    return total


# --- what a rank holds


class Models:
    """The modules and optimizers of this process, found without the script's help.

    roots  {name: module} of those that no other module has"""

    def __init__(self):
        self.roots = weakref.WeakValueDictionary()

    def find(self):
        """Look for modules that were made since. Names stay what they are."""
        modules = [x for x in gc.get_objects() if issubclass(type(x), torch.nn.Module)]
        inner = {id(child) for module in modules for child in module.children()}
        old = {id(module) for module in self.roots.values()}
        for module in modules:
            if id(module) in inner | old or next(module.parameters(), None) is None:
                continue
            kind, number = type(module).__name__, 0
            while (name := f"{kind} {number}" if number else kind) in self.roots:
                number += 1
            self.roots[name] = module

    def parameters(self):
        """{full name: parameter}. Of one model alone without the model's name."""
        found = {}
        for name, module in self.roots.items():
            for parameter_name, p in module.named_parameters():
                whole = parameter_name if len(self.roots) == 1 else f"{name}.{parameter_name}"
                found[whole.replace("module.", "")] = p
        return found

    def held(self, optimizers):
        """{kind: local tensors} of what outlives a step. An optimizer may step on tensors that no
        module has: shards of parameters, or copies in another precision."""
        parameters = [local(p) for p in self.parameters().values() if not p.is_meta]
        storages = {t.untyped_storage()._cdata for t in parameters}
        stepped_on, states = [], []
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                stepped_on += group["params"]
            for state in optimizer.state.values():
                values = state.values() if isinstance(state, dict) else ()
                states += [local(t) for t in values if torch.is_tensor(t) and t.dim()]
        own = [local(p) for p in stepped_on]
        own = [t for t in own if t.untyped_storage()._cdata not in storages]
        everything = [*self.parameters().values(), *stepped_on]
        gradients = [local(p.grad) for p in everything if p.grad is not None]
        return {
            "parameters": parameters,
            "the optimizer's own parameters": own,
            "gradients": gradients,
            "optimizer states": states,
        }


def local(t):
    """This rank's part of a DTensor, or the tensor itself."""
    t = t.detach()
    return t.to_local() if hasattr(t, "to_local") else t
