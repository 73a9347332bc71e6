"""Play scripts of the project on a CUDA device that does not exist.

    python tests/fake_cuda.py LIBRARY < cases        LIBRARY: the compiled fakecuda.cpp

A case is a line of JSON, [script, flags, rank, world]. A case plays one training step of that rank,
the second, and with --eval-every 2 train.py's validation, under FakeTensorMode on `cuda:0`, with a
process group of torch's fake backend. It prints what it sees of planted mistakes, and for each case
a line of JSON:

    misplaced   what nccl would refuse: a collective with a tensor that is on the CPU, that is not
                contiguous, or that has a dtype without a nccl type; and, in train.py, a message in
                a group of one rank, for which nccl would hold a communicator. Also scores of
                attention, (B, H, T, T), which the kernels of a tile never hold
    waits       {operation and line: how often} of what makes the host wait until the device is
                done: .item(), nonzero, an index that is a mask, blocking copies between both
    queued      the fewest kernels that the device still has when the host waits for an event
    kernels     operations that would launch a kernel, as autograd's threads launch them
    collectives {operation: calls}
    error       null, or what ended it

A fake tensor has no values. So .item() gives 1, and routing to experts is even.
"""

import collections
import contextlib
import ctypes
import importlib
import json
import os
import sys
import traceback
from unittest import mock

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
if __name__ == "__main__":
    library = ctypes.CDLL(sys.argv[1])  # before torch: what it registers must be there at once

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

sys.path.insert(0, ROOT)
import expert_parallel
import proof
from proof.ledger import group_in, tensors_in
from simulator import dryrun
from simulator.meter import grouped_mm_result
from trainer import saving, validation

FOLDERS = ("", "harness", "proof", "receipts", "trainer", "simulator", "tests")
OWN = [os.path.join(ROOT, folder).rstrip("/") for folder in FOLDERS]
# They launch nothing
NOT_KERNELS = {"_unsafe_view", "_reshape_alias", "lift_fresh", "detach", "empty_like", "new_empty"}
# They pass operations on
NOT_THE_CAUSE = "fake_cuda.py", "ledger.py"
CUDA = torch.device("cuda", 0)
NCCL_DTYPES = {
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.bool),
    *(torch.int64, torch.int32, torch.int8, torch.uint8),
}
MASKS = torch.bool, torch.uint8
LONG = 256  # a tensor of four dimensions, of which the last two are as long as this, is scores
# Their results' shapes are values, which the host must wait for
VALUE_SHAPED = {"nonzero", "masked_select", "unique", "_unique2", "unique_dim", "is_nonzero"}


def here():
    """The line of the project that runs, as file:line."""
    frame = sys._getframe()
    while frame:
        file = frame.f_code.co_filename
        if os.path.dirname(file) in OWN and os.path.basename(file) not in NOT_THE_CAUSE:
            return f"{os.path.relpath(file, ROOT)}:{frame.f_lineno}"
        frame = frame.f_back
    return "autograd"


class Watch(TorchDispatchMode):
    """Notes every operation. The attributes are those of the module's docstring."""

    def __init__(self, groups_must_have_two=False):
        super().__init__()
        self.groups_must_have_two = groups_must_have_two
        self.pinned = set()  # storages
        self.begin()

    def begin(self):
        self.misplaced, self.waits = collections.Counter(), collections.Counter()
        self.collectives, self.kernels = collections.Counter(), 0
        self.queued = []  # kernels

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        given = [*tensors_in(list(args)), *tensors_in(list(kwargs.values()))]
        on_cuda = [t for t in given if t.device.type == "cuda"]
        name = func.overloadpacket.__name__
        if func.namespace == "c10d":
            self.check_collective(name, given)
            if self.groups_must_have_two and group_in(args).size() == 1:
                self.misplaced[f"{name} in a group of one rank at {here()}"] += 1
        if func is torch.ops.aten._local_scalar_dense.default:
            if on_cuda:
                self.waits[f"item at {here()}"] += 1
            return 1.0 if args[0].is_floating_point() else 1
        if name == "_pin_memory":
            if args[0].is_contiguous():  # a strided tensor is copied once more on its way
                self.pinned.add(args[0].untyped_storage()._cdata)
            return args[0]
        if on_cuda and self.waits_for_value(name, args, kwargs):
            self.waits[f"{name} at {here()}"] += 1
        self.check_copy(name, args, kwargs)
        nothing = func.is_view or name in NOT_KERNELS or (name == "copy_" and args[0] is args[1])
        if func.namespace == "aten" and on_cuda and not nothing:
            self.kernels += 1
        if name == "_grouped_mm" and args[0].dtype != torch.bfloat16:
            return grouped_mm_result(*args, **kwargs)
        result = func(*args, **kwargs)
        for t in tensors_in([result]):
            if t.dim() == 4 and min(t.shape[2:]) >= LONG:
                self.misplaced[f"scores {list(t.shape)} of {name} at {here()}"] += 1
        return result

    def check_collective(self, name, given):
        self.collectives[name] += 1
        for t in given:
            what = f"{name} of {t.dtype} {list(t.shape)} on {t.device} at {here()}"
            if t.device.type != "cuda" or t.dtype not in NCCL_DTYPES:
                self.misplaced[what] += 1
            elif not t.is_contiguous():
                self.misplaced[f"not contiguous: {what}"] += 1

    def waits_for_value(self, name, args, kwargs):
        if name == "repeat_interleave":
            return kwargs.get("output_size") is None and isinstance(args[-1], torch.Tensor)
        by_index = name in ("index", "index_put_", "_index_put_impl_")
        by_mask = by_index and any(t.dtype in MASKS for t in tensors_in(args[1]))
        return name in VALUE_SHAPED or by_mask

    def check_copy(self, name, args, kwargs):
        """A copy to or from the host's memory blocks the host unless the memory is pinned and
        non_blocking is given."""
        if name == "_to_copy" and kwargs.get("device") is not None:
            source, target = args[0], torch.device(kwargs["device"]).type
            free = kwargs.get("non_blocking")
            if free and target == "cpu":  # into pinned memory
                return
        elif name == "copy_":
            source, target = args[1], args[0].device.type
            free = len(args) > 2 and args[2]
        else:
            return
        on_host = args[0] if name == "copy_" and target == "cpu" else source
        free = free and on_host.untyped_storage()._cdata in self.pinned
        if {source.device.type, target} == {"cpu", "cuda"} and not free:
            self.waits[f"copy {source.device.type} to {target} at {here()}"] += 1

    # A stream, and an event on it

    def record_event(self):
        self.launched = self.kernels
        return self

    def synchronize(self):
        self.queued.append(self.kernels - self.launched)


class FakeRun(dryrun.DryRun):
    """A dry run on the fake device, with a Watch in place of the meter."""

    make_ledger = proof.Run.make_ledger

    def __init__(self, args, rank, world, modes, script):
        self.seen, self.modes = Watch(groups_must_have_two=script == "train"), modes
        proof.Run.__init__(self, args, rank, world, CUDA, dryrun.NoText())

    def same(self, value, what, advice):
        """Outside of FakeTensorMode the device makes no tensors."""

    def watch(self, action):
        return contextlib.nullcontext()

    def agree(self, problem):
        """All .item() are 1."""

    any = bool

    def leave_values(self, model):
        self.modes.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        self.modes.enter_context(self.seen)
        self.modes.enter_context(self.watching)

    def steps(self, optimizer, first=0, reference=None):
        """The step that counts is the second: what happens once has happened."""
        self.restart_clock()
        self.lr = 0.0
        for self.step in range(2):
            self.seen.begin()
            yield self.step
        self.note()
        raise Played

    def note(self):
        """Keep what the Watch saw of a step."""
        seen = self.seen
        self.result = {
            "misplaced": dict(seen.misplaced),
            "waits": dict(seen.waits),
            "queued": min(seen.queued, default=None),
            "kernels": seen.kernels,
            "collectives": dict(seen.collectives),
        }

    def after_the_step(self, validate, runner):
        """train.py's validation, in which the host may wait."""
        self.note()
        self.seen.begin()
        validate(runner)
        self.result["misplaced"] |= self.seen.misplaced
        raise Played


class Played(Exception):
    """The step is over. What a script does afterwards needs values."""


def zero_each(tensors):
    """In place of torch._foreach_zero_, which does not raise the version of a fake tensor."""
    for t in tensors:
        t.zero_()


def gather_copies(objects, own, group=None):
    """In place of dist.all_gather_object, as if all ranks had given the same."""
    objects[:] = [own] * len(objects)


def play(script, flags, rank, world):
    """One case: its line as a dict."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    runs = []

    def launch(demo, args, needed=None, check=lambda world: None):
        size = needed or world
        check(size)
        args.device = "cuda"
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)
        with contextlib.ExitStack() as modes:
            runs.append(FakeRun(args, rank, size, modes, script))
            demo(runs[0])

    def exchange_counts(dispatch, chunks):
        runs[0].seen.waits[f"the experts' sizes at {here()}"] += 1
        with mock.patch.object(FakeTensor, "tolist", lambda _: (None, None)):
            return dryrun.even(dispatch, chunks)

    def synchronize():
        runs[0].seen.waits[f"synchronize at {here()}"] += 1

    def under_fake_tensors(function):
        def call(*args, **kwargs):
            with FakeTensorMode():
                return function(*args, **kwargs)

        return call

    module = importlib.import_module(script)
    words = f"{flags} --backend nccl --device cuda --prove 0 --quiet".split()
    with contextlib.ExitStack() as patches:

        def patch(*what):
            patches.enter_context(mock.patch.object(*what))

        patch(sys, "argv", [f"{script}.py", *words])
        patch(proof, "launch", launch)
        patch(dist, "get_backend", lambda group=None: "nccl")
        patch(torch.cuda, "get_device_name", lambda *_: "NVIDIA H200")
        patch(torch.cuda, "get_device_capability", lambda *_: (9, 0))
        patch(torch.cuda, "current_device", lambda: 0)
        patch(torch.cuda, "synchronize", synchronize)
        patch(expert_parallel.ExpertDispatch, "exchange_counts", exchange_counts)
        import pipeline

        patch(pipeline, "open_links", under_fake_tensors(pipeline.open_links))
        if script == "train":
            patch(module, "open_groups", under_fake_tensors(module.open_groups))
        patch(torch, "_foreach_zero_", zero_each)
        patch(FakeTensor, "__format__", lambda *_: "")
        patch(dist, "all_gather_object", gather_copies)
        patch(torch.cuda, "current_stream", lambda: runs[0].seen)
        patch(saving.Saver, "save_if_due", lambda *_: False)
        validate = validation.validate
        patch(validation, "validate", lambda runner: runner.run.after_the_step(validate, runner))
        patch(proof.run, "_disable_current_modes", contextlib.nullcontext)
        try:
            module.main()
            return {"error": "no step was played"}
        except Played:
            return runs[0].result | {"error": None}
        except BaseException:
            return {"error": traceback.format_exc()}
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()


def planted():
    """What is seen of planted mistakes: numbers of waits and of misplaced tensors."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    watch = Watch()
    with FakeTensorMode(), watch:
        x = torch.ones(4, 6, device="cuda")
        x.sum().item()
        x.masked_fill(x > 0, 0).index_put_((x > 0,), x.sum())
        torch.ones(3).to("cuda")
        dist.all_reduce(torch.ones(3))
        dist.all_reduce(x.t())
        torch.ones(1, 1, LONG, LONG, device="cuda")
    dist.destroy_process_group()
    return len(watch.waits), len(watch.misplaced)


if __name__ == "__main__":
    library.install()
    print(json.dumps(planted()), flush=True)
    for line in sys.stdin:
        print(json.dumps(play(*json.loads(line))), flush=True)
