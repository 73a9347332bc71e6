"""What this rank has called, and where it stands: the material for proof/hang.py.

Collectives come from PyTorch's flight recorder, which has those of C++ too, on gloo and nccl.
Sends and receives it lacks on gloo: every way to them passes ProcessGroup.send or recv.
"""

import collections
import os
import pickle
import sys
import sysconfig
import threading
import time
import weakref

import torch
import torch.distributed as dist

c10d = torch._C._distributed_c10d
HERE = os.path.dirname(os.path.abspath(__file__)) + os.sep
TORCH = os.path.dirname(os.path.abspath(torch.__file__))
LIBRARIES = (sysconfig.get_path("stdlib"), sysconfig.get_path("purelib"), TORCH, "<")
KEPT = 2000  # calls
SHOWN = 300  # of each group, when ranks tell each other


def record_from_now():
    """Before the first process group is made: have the flight recorder record."""
    os.environ.setdefault("TORCH_FR_BUFFER_SIZE", str(KEPT))


def groups():
    """{a process group's name: its global ranks} of the groups of this rank."""
    found = {}
    for group in list(getattr(dist.distributed_c10d._world, "pg_names", {})):
        found[group.group_name] = dist.get_process_group_ranks(group)
    return found


# --- collectives


def collectives(stacks=True):
    """{a group's name: [call]} in the order of calls. A call is a dict: number, operation, elements
    that go in, dtype, whether it is done, line."""
    found = {}
    for dump in ("_dump_fr_trace", "_dump_nccl_trace"):
        if not hasattr(c10d, dump):
            continue
        trace = pickle.loads(getattr(c10d, dump)(True, stacks, False))  # of this process
        for entry in trace.get("entries", ()):
            if entry["is_p2p"]:
                continue
            name, _ = entry["process_group"]
            found.setdefault(name, []).append(call_of(entry))
    for calls in found.values():
        calls.sort(key=lambda call: call["number"])
    return found


def call_of(entry):
    frames = entry.get("frames") or []
    operation = entry["profiling_name"].rpartition(":")[2]
    if frames and frames[0]["filename"].endswith("distributed_c10d.py"):
        # gloo makes a reduce-scatter of an all-reduce, and records that
        if frames[0]["name"].startswith(("reduce_scatter", "_reduce_scatter")):
            operation = "reduce_scatter"
    sizes = entry["input_sizes"]
    dtypes = entry["input_dtypes"]
    return {
        "number": entry["collective_seq_id"],
        "operation": operation.strip("_").removesuffix("_base"),
        "elements": sum(product(size) for size in sizes),
        "dtype": dtypes[0].lower() if dtypes else "",
        "done": entry["retired"] or entry["state"] == "completed",
        "line": first_line((frame["filename"], frame["line"]) for frame in frames),
    }


def product(size):
    total = 1
    for n in size:
        total *= n
    return total


# --- sends and receives


class Message:
    """A send or a receive of this rank. number: it is the rank's so many-th of its kind with this
    peer in this group."""

    def __init__(self, kind, group, peer, number, tensor, line):
        self.kind, self.group, self.peer, self.number = kind, group, peer, number
        self.elements, self.dtype = tensor.numel(), str(tensor.dtype).removeprefix("torch.")
        self.line, self.started, self.ended = line, time.perf_counter(), None
        self.work = lambda: None

    @property
    def done(self):
        return self.ended is not None or self.work() is None

    def as_dict(self):
        names = ("kind", "group", "peer", "number", "elements", "dtype", "line", "done")
        return {name: getattr(self, name) for name in names}


class Messages:
    """The latest sends and receives of this rank. `install` puts itself between torch and the
    process groups."""

    def __init__(self):
        self.recent = collections.deque(maxlen=KEPT)
        self.counts = collections.Counter()
        self.waited = weakref.WeakKeyDictionary()  # {work: its message}

    def install(self):
        for name, kind in (("send", "send"), ("recv", "recv"), ("recv_anysource", "recv")):
            self.wrap(name, kind)
        wait = c10d.Work.wait

        def wait_and_note(work, *args, **kwargs):
            result = wait(work, *args, **kwargs)
            if work in self.waited:
                self.waited[work].ended = time.perf_counter()
            return result

        c10d.Work.wait = wait_and_note

    def wrap(self, name, kind):
        right = getattr(dist.ProcessGroup, name)

        def call_and_note(group, tensors, *args):
            ranks = dist.get_process_group_ranks(group)
            peer = ranks[args[0]] if name != "recv_anysource" else None
            key = kind, group.group_name, peer
            self.counts[key] += 1
            line = script_line(sys._getframe(1))
            message = Message(*key, self.counts[key], tensors[0], line)
            self.recent.append(message)
            message.work = lambda: True  # under way, while this call lasts
            work = right(group, tensors, *args)
            message.work = weakref.ref(work) if work is not None else lambda: None
            if work is not None:
                self.waited[work] = message
            return work

        setattr(dist.ProcessGroup, name, call_and_note)


# --- lines


def is_library(path):
    return path.startswith(LIBRARIES) or path.startswith(HERE) or "site-packages" in path


def line_of(path, number):
    short = os.path.relpath(path) if path.startswith(os.sep) else path
    return f"{path if short.startswith('..') else short}:{number}"


def first_line(places):
    """The first (path, line) that is the script's own, as text."""
    for path, number in places:
        if not is_library(path):
            return line_of(path, number)
    return ""


def script_line(frame):
    return first_line(frames(frame))


def frames(frame):
    """(path, line) of a frame and those that called it."""
    while frame:
        if frame.f_lineno is not None:
            yield frame.f_code.co_filename, frame.f_lineno
        frame = frame.f_back


def standing():
    """(the script's line that the main thread is in, the library's, "" if it is in none)."""
    places = [*frames(sys._current_frames().get(threading.main_thread().ident))]
    places = [place for place in places if not place[0].startswith(HERE)]
    library = ""
    if places and is_library(places[0][0]):
        path, number = places[0]
        library = f"{path.partition('site-packages' + os.sep)[2] or path}:{number}"
    return first_line(places), library


def group_text(name, members):
    """A group by its ranks, and by its number among the groups of the same ranks."""
    ranks = members.get(name, [])
    same = [other for other in members if members[other] == ranks]
    which = f", group {same.index(name) + 1} of {len(same)} with these" if len(same) > 1 else ""
    return f"group {' '.join(map(str, ranks))} ({len(ranks)} ranks{which})"


def place(messages):
    """All of this as a dict, for the other ranks."""
    line, library = standing()
    members = groups()
    found = {}
    for name, calls in collectives().items():
        text = group_text(name, members)
        found[name] = {"ranks": members.get(name, []), "text": text, "calls": calls[-SHOWN:]}
    return {
        "line": line,
        "library": library,
        "groups": found,
        "messages": [message.as_dict() for message in [*messages.recent][-SHOWN:]],
    }
