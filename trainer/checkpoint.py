"""Checkpoints that any layout writes and any other reads. Each rank writes and reads its own part.

A checkpoint is a folder. Its contents go by the parameters' full names and by the place in the
whole parameter, never by rank. So a run may go on with other numbers of ranks, stages, shards or
experts a rank, with or without ZeRO:

    OUT/step-00000200/index.json                 what was trained, how far, and where each piece is
                      rank00000-000.safetensors  this rank's pieces of weights and optimizer states
                      rank00001-000.safetensors  of several ranks with the same piece, one writes it
    OUT/step-00000400.tmp/                       one that is being written, or whose writer died

Every piece is a box of the whole: a start and a size for each dimension. A piece of tensor
parallelism, without its zero padding, is one box; so is a rank's part of the experts. What ZeRO's
flat shard holds of a matrix is up to three boxes: the end of a row, whole rows, the start of a row.

    . . . . . . . .     A rank that reads wants other boxes. It intersects each of them with the
    . . . a a a a a     boxes in the index, and reads the intersections alone. So no rank ever holds
    b b b b b b b b     more than its own pieces. A tied matrix, the copies of data and context
    b b b b b b b b     parallelism and both stages of a V have the same name: they are written
    c c . . . . . .     once.

Optimizer states lie where their parameter lies, or are one number ("step"). With mixed precision
the master weights are saved. Learning rate and batch are functions of the step, so a run goes on
from its step's number as if it had never stopped, to rounding.

A checkpoint is whole or absent. The ranks write into a folder with another name and fsync it. When
all ranks have succeeded, rank 0 adds the index and renames the folder, which is atomic. The index
has every file's size and crc32: a truncated file or a flipped bit is seen, and the checkpoint
before it is taken. The files are JSON and safetensors: nothing is unpickled, and memory is taken
for what the model needs, whatever a file claims.

Training waits only for a copy to the host's memory. A thread writes the copy to disk. Collectives
stay in the main thread, between two steps.

Cost: a copy of the rank's part in the host's memory while it is written; (1 + states) P e bytes on
disk in every layout; reading all of it once for the checksums, split over the ranks. All ranks must
see the folder.

    python train.py --dp 2 --tp 2 --out runs/a --save-every 50
    python train.py --pp 4 --out runs/a --resume
"""

import contextlib
import itertools
import json
import math
import os
import re
import shutil
import stat
import threading
import zlib
from typing import NamedTuple

import safetensors
import safetensors.torch
import torch
import torch.distributed as dist

from harness.placement import placement

FILE_BYTES = 256 << 20  # a file is made in memory first: so much of it at a time
DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "I64": torch.int64,
}


# Begin the kinds that trainer/islands.py adds: of all islands, and of islands after the first
OUTER, ISLAND = "outer ", "island "


class CheckpointError(ValueError):
    """What is wrong, in one sentence that says what to change. Every rank raises the same."""


class Piece(NamedTuple):
    """A box of a whole tensor that this rank holds."""

    name: str  # of the parameter
    kind: str  # "weight", or the name of an optimizer's state
    tensor: torch.Tensor  # of shape `size`: a view of the rank's own, to be read or filled
    shape: tuple  # of the whole
    start: tuple
    size: tuple
    writes: bool  # of the ranks that hold this box, this one writes it

    @property
    def place(self):
        """Where it lies in the whole, as an index."""
        return tuple(slice(a, a + n) for a, n in zip(self.start, self.size))


# --- what a rank holds


def boxes(shape, a, b):
    """Elements a to b of a tensor of that shape, flattened, as boxes: [(start, size)], in order."""
    if a >= b:
        return []
    if not shape:
        return [((), ())]
    row = math.prod(shape[1:])
    first, last = -(-a // row), b // row  # the whole rows
    if first > last:  # not even one row's end
        return [((last, *s), (1, *n)) for s, n in boxes(shape[1:], a - last * row, b - last * row)]
    head = [
        ((first - 1, *s), (1, *n))
        for s, n in boxes(shape[1:], a - (first - 1) * row, row)
        if a < first * row
    ]
    rows = [((first, *(0 for _ in shape[1:])), (last - first, *shape[1:]))] if first < last else []
    return head + rows + [((last, *s), (1, *n)) for s, n in boxes(shape[1:], 0, b - last * row)]


def holdings(named, optimizer):
    """For each (name, parameter): (name, parameter, the elements of it that this rank steps on,
    flat; which element of the flattened parameter is their first; what the optimizer has in their
    place; its state). ZeRO has parts, torch's all."""
    if not hasattr(optimizer, "buckets"):
        for name, p in named:
            yield name, p, p.data.view(-1), 0, p, optimizer.state[p]
        return
    names = {p: name for name, p in named}
    for bucket in optimizer.buckets:
        starts = itertools.accumulate(bucket.sizes, initial=0)
        for p, at, span, piece in zip(bucket.parameters, starts, bucket.spans, bucket.pieces):
            first = max(bucket.own.start - at, 0)
            yield names[p], p, bucket.master[span], first, piece, optimizer.optimizer.state[piece]


def pieces_of(named, optimizer, data_group, states=None, beside=lambda stepped: {}):
    """This rank's pieces, as a list of Piece.

    named: (full name, parameter). A parameter's `placement`, if any, says what it is a piece of
    (see harness/placement.py).
    optimizer: torch's, or trainer/composed_zero.py's. data_group: the ranks that hold copies for
    other data.
    states(name): {kind: shape of the whole} of optimizer states to make, zeros, where an optimizer
    has none yet.
    beside(stepped): {kind: flat tensor} of what else lies where the optimizer steps.
    """
    found = []
    for name, p, flat, first, stepped, state in holdings(named, optimizer):
        where = placement(p)
        shape = tuple(where["shape"])
        base, limit = [0] * len(shape), list(shape)
        for dim, (_, start, size) in where["cuts"].items():
            base[dim], limit[dim] = start, size
        writes = speaks(p, data_group, optimizer)
        for kind, whole in (states(name) if states and p.requires_grad else {}).items():
            zero = (
                torch.zeros((), device=flat.device)
                if whole == ()
                else torch.zeros_like(stepped.data)
            )
            state.setdefault(kind, zero)
        tensors = {"weight": flat} | {k: t for k, t in state.items() if torch.is_tensor(t)}
        tensors |= beside(stepped)
        origin = False
        for start, size in boxes(tuple(p.shape), first, first + len(flat)):
            at = sum(s * math.prod(p.shape[d + 1 :]) for d, s in enumerate(start)) - first
            # Less the padding
            inside = [min(s + n, end) - s for s, n, end in zip(start, size, limit)]
            if any(n <= 0 for n in inside):
                continue
            place = tuple(b + s for b, s in zip(base, start))
            origin |= not any(place)
            for kind, t in tensors.items():
                if t.dim():
                    view = t.view(-1)[at : at + math.prod(size)].view(size)[
                        tuple(slice(n) for n in inside)
                    ]
                    found.append(Piece(name, kind, view, shape, place, tuple(inside), writes))
        # One number for the whole parameter: who has its first element writes it
        found += [
            Piece(name, kind, t, (), (), (), writes and origin)
            for kind, t in tensors.items()
            if not t.dim()
        ]
    return found


def speaks(parameter, data_group, optimizer):
    """Whether this rank is the one, of all that hold the same piece of a parameter, to write it.

    ZeRO's shards differ between the ranks of the data-parallel group, or of each part of it that
    splits a copy; without ZeRO these ranks hold copies."""
    where = placement(parameter)
    data_group = where["data"] or data_group
    groups = where["copies"] + where["partial"] + [data_group]
    if getattr(optimizer, "stage", 0) > 0:
        sharing = set(dist.get_process_group_ranks(data_group))
        groups = [
            group for group in groups if not sharing.issuperset(dist.get_process_group_ranks(group))
        ]
        _, across = optimizer.split(data_group)
        if across is not None:
            groups.append(across)
    return all(dist.get_rank(group) == 0 for group in groups)


# --- writing


def copy_to_host(tensor):
    """A contiguous copy in the host's memory. From a GPU it is under way when this returns: pinned
    memory takes it without waiting."""
    tensor = tensor.detach()
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
    return host.copy_(tensor, non_blocking=True)


class Checkpoints:
    """Writes checkpoints into `folder`: save() between two steps, poll() between any two, finish()
    at the end; all of them by all ranks. header: plain data that goes into the index, and that a
    run must share to go on (see `newest`). keep: how many stay, 0 = all. Raises CheckpointError, on
    every rank, where it can't write; then nothing of the failed one stays."""

    def __init__(self, folder, header, keep=0):
        self.folder, self.header, self.keep, self.thread = folder, header, keep, None

    def save(self, step, pieces):
        self.finish()
        self.step, self.written, self.problem = step, ({}, []), None
        self.temporary = os.path.join(self.folder, name_of(step) + ".tmp")
        self.attempt(self.prepare if dist.get_rank() == 0 else None)
        copies = [p._replace(tensor=copy_to_host(p.tensor)) for p in pieces if p.writes]
        if any(p.tensor.is_cuda for p in pieces):
            torch.cuda.synchronize()  # once, for all copies
        self.thread = threading.Thread(target=self.work, args=(copies,), daemon=True)
        self.thread.start()

    def poll(self):
        """Finish what all ranks have written; never waits for a disk."""
        if self.thread and all(gather(not self.thread.is_alive())):
            self.finish()

    def finish(self):
        """Wait for the writing, and give the checkpoint its name."""
        if self.thread is None:
            return
        self.thread.join()
        self.thread = None
        self.attempt(lambda: self.problem)
        everyone = gather(self.written)
        self.attempt((lambda: self.publish(everyone)) if dist.get_rank() == 0 else None)

    def attempt(self, work):
        """Do `work`, which may return a problem or raise an OSError; go on only if no rank has
        one."""
        try:
            problem = work() if work else None
        except OSError as e:
            problem = e.strerror or str(e)
        problem = next(filter(None, gather(problem)), None)
        if problem:
            if dist.get_rank() == 0:
                shutil.rmtree(self.temporary, ignore_errors=True)
            raise CheckpointError(
                f"the checkpoint of step {self.step} can't be written to {self.folder} ({problem})"
            )

    def prepare(self):
        shutil.rmtree(self.temporary, ignore_errors=True)
        os.mkdir(self.temporary)

    def work(self, copies):
        """In the thread: write this rank's pieces, some to a file."""
        try:
            files, records = self.written
            while copies:
                file, tensors, size = (
                    f"rank{dist.get_rank():05d}-{len(files):03d}.safetensors",
                    {},
                    0,
                )
                while copies and (not tensors or size + copies[0].tensor.nbytes <= FILE_BYTES):
                    name, kind, tensor, shape, start, extent, _ = copies.pop(0)
                    key = f"{name}:{kind}:{','.join(map(str, start))}"
                    tensors[key], size = tensor, size + tensor.nbytes
                    records.append(
                        (
                            name,
                            kind,
                            str(tensor.dtype).removeprefix("torch."),
                            shape,
                            file,
                            key,
                            start,
                            extent,
                        )
                    )
                content = safetensors.torch.save(tensors)
                write(os.path.join(self.temporary, file), content)
                files[file] = {"bytes": len(content), "crc32": zlib.crc32(content)}
            sync(self.temporary)
        except Exception as e:
            self.problem = getattr(e, "strerror", None) or repr(e)

    def publish(self, everyone):
        """On rank 0: the index, the name, and what is old goes. Returns a problem or None."""
        files, tensors = {}, {}
        for some, records in everyone:
            files |= some
            for name, kind, dtype, shape, file, key, start, size in records:
                kinds = tensors.setdefault(name, {})
                tensor = kinds.setdefault(kind, {"shape": shape, "dtype": dtype, "pieces": []})
                tensor["pieces"].append({"file": file, "key": key, "start": start, "size": size})
        for name, kinds in tensors.items():
            for kind, t in kinds.items():
                if sum(math.prod(piece["size"]) for piece in t["pieces"]) != math.prod(t["shape"]):
                    return f"the ranks' pieces of {name}, {kind}, are not the whole of it"
        index = {"step": self.step} | self.header | {"files": files, "tensors": tensors}
        write(os.path.join(self.temporary, "index.json"), json.dumps(index).encode())
        sync(self.temporary)
        final = os.path.join(self.folder, name_of(self.step))
        if os.path.exists(final):  # one that was passed over, or it would not be written again
            shutil.rmtree(final + ".old.tmp", ignore_errors=True)
            os.rename(final, final + ".old.tmp")
        os.rename(self.temporary, final)
        sync(self.folder)
        steps = [
            step
            for step in map(step_of, os.listdir(self.folder))
            if step is not None and step <= self.step
        ]
        gone = [name_of(step) for step in sorted(steps)[: -self.keep]] if self.keep else []
        gone += [
            name
            for name in os.listdir(self.folder)
            if re.fullmatch(r"step-\d{8,}(\.old)?\.tmp", name)
        ]
        for name in gone:
            shutil.rmtree(os.path.join(self.folder, name), ignore_errors=True)


def write(path, content):
    with open(path, "wb") as f:
        f.write(content)
        f.flush()
        os.fsync(f.fileno())


def sync(folder):
    """The names in a folder are data of the folder's own."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def gather(value):
    """Every rank's value, on every rank."""
    everyone = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, value)
    return everyone


def name_of(step):
    return f"step-{step:08d}"


def step_of(name):
    """The step of a checkpoint's folder; None for another name."""
    return int(name[5:]) if re.fullmatch(r"step-\d{8,}", name) else None


# --- reading


def newest(folder, header, free=()):
    """(path, index, lines of what was passed over and why) of the newest whole checkpoint in a
    folder; (None, None, lines) where there is none. Called by all ranks, who share out the work of
    reading every file for its checksum.

    Raises CheckpointError where it is of another run: where a value of `header`, or of a dict in
    it, is another than in the index. free: keys that may differ."""
    path, index, passed = None, None, []
    names = os.listdir(folder) if dist.get_rank() == 0 and os.path.isdir(folder) else []
    names = gather(
        sorted((n for n in names if re.fullmatch(r"step-\d{8,}(\.old)?(\.tmp)?", n)), reverse=True)
    )[0]
    for name in names:
        path, index, problem = os.path.join(folder, name), None, None
        try:
            if step_of(name) is None:
                raise ValueError("its writer did not finish")
            index = read_index(path, step_of(name))
            for file in sorted(index["files"])[dist.get_rank() :: dist.get_world_size()]:
                check_file(path, file, index)
        except (ValueError, OSError) as e:
            problem = e.strerror if isinstance(e, OSError) and e.strerror else str(e)
        problem = next(filter(None, gather(problem)), None)
        if problem is None:
            break
        passed.append(f"{name}: {problem}")
        path = None
    if path is None:
        return None, None, passed
    for key, value in header.items():
        here, there = (v if isinstance(v, dict) else {key: v} for v in (value, index.get(key)))
        for k in here if key not in free else ():
            if k not in free and here[k] != there.get(k):
                what = (
                    "text is another"
                    if k == "text"
                    else f"{k} is {there.get(k)!r} there and {here[k]!r} here"
                )
                raise CheckpointError(
                    f"{path} is of another run, its {what}: change the flags, or --out"
                )
    return path, index, passed


def newest_index(folder):
    """The index of the newest checkpoint that has one, {} where there is none. For what must be
    known before there are ranks: whether the checkpoint is whole is not looked at."""
    names = []
    with contextlib.suppress(OSError):
        names = os.listdir(folder)
    for name in sorted((n for n in names if step_of(n) is not None), reverse=True):
        with contextlib.suppress(ValueError, OSError):
            return read_index(os.path.join(folder, name), step_of(name))
    return {}


def read_index(path, step):
    """The index of a checkpoint. Raises ValueError where it is missing, or not as `publish` writes
    it."""
    file = os.path.join(path, "index.json")
    if not os.path.isfile(file):
        raise ValueError("it has no index.json")
    try:
        with open(file, "rb") as f:
            index = json.load(f)
        if index["step"] != step or not natural([index["step"]]):
            raise ValueError(f"its index is of step {index['step']}")
        for name, entry in index["files"].items():
            if (
                name in ("", ".", "..")
                or os.path.basename(name) != name
                or "\\" in name
                or "\0" in name
            ):
                raise ValueError(f"its index names {name!r}, which is no file of the folder")
            if not natural([entry["bytes"], entry["crc32"]]):
                raise ValueError(f"its index has no size of {name}")
        for name, kinds in index["tensors"].items():
            for kind, t in kinds.items():
                for piece in t["pieces"]:
                    start, size = piece["start"], piece["size"]
                    if not isinstance(piece["key"], str) or not isinstance(t["dtype"], str):
                        raise ValueError(f"its index does not say what {name} is")
                    fits = len(start) == len(size) == len(t["shape"]) and natural(
                        [*start, *size, *t["shape"]]
                    )
                    if not fits or any(
                        s + n > whole for s, n, whole in zip(start, size, t["shape"])
                    ):
                        raise ValueError(f"its index has a piece of {name} that lies outside of it")
                    if piece["file"] not in index["files"]:
                        raise ValueError(
                            f"its index names {piece['file']!r}, which is no file of it"
                        )
    except (
        KeyError,
        TypeError,
        AttributeError,
        json.JSONDecodeError,
        UnicodeDecodeError,
        RecursionError,
    ) as e:
        raise ValueError("its index.json can't be read") from e
    return index


def natural(numbers):
    return all(type(n) is int and n >= 0 for n in numbers)


def check_file(path, file, index):
    """Raise ValueError where a file is not the one that the index tells of."""
    full, entry = os.path.join(path, file), index["files"][file]
    if not os.path.lexists(full):
        raise ValueError(f"{file} is missing")
    info = os.lstat(full)
    if not stat.S_ISREG(info.st_mode) or info.st_size != entry["bytes"]:
        raise ValueError(f"{file} has {info.st_size:,} bytes, not {entry['bytes']:,}")
    crc = 0
    with open(full, "rb") as f:
        while chunk := f.read(16 << 20):
            crc = zlib.crc32(chunk, crc)
    if crc != entry["crc32"]:
        raise ValueError(f"{file} was changed, its crc32 differs")
    try:
        with safetensors.safe_open(full, "pt") as f:
            keys = set(f.keys())
            for kinds in index["tensors"].values():
                for t, piece in (
                    (t, piece)
                    for t in kinds.values()
                    for piece in t["pieces"]
                    if piece["file"] == file
                ):
                    there = f.get_slice(piece["key"]) if piece["key"] in keys else None
                    if (
                        there is None
                        or there.get_shape() != piece["size"]
                        or dtype_of(there) != t["dtype"]
                    ):
                        raise ValueError(f"{file} has another {piece['key']} than its index says")
    except safetensors.SafetensorError as e:
        raise ValueError(f"{file} is no safetensors file") from e


def dtype_of(piece):
    return str(DTYPES.get(piece.get_dtype())).removeprefix("torch.")


@torch.no_grad()
def load(path, index, pieces):
    """Fill the pieces' tensors from a checkpoint, one at a time, reading only what they need.
    Called by all ranks."""
    files, problem = {}, None
    for name, kind, tensor, shape, start, size, _ in pieces:
        there = index["tensors"].get(name, {}).get(kind)
        if there is None or tuple(there["shape"]) != tuple(shape):
            problem = (
                problem
                or f"{name}, {kind}, is {there['shape'] if there else 'missing'} there and "
                f"{list(shape)} here"
            )
            continue
        filled = 0
        for piece in there["pieces"]:
            # Where both boxes are: from `low` to `high`, in the whole's numbers
            low = [max(pair) for pair in zip(start, piece["start"])]
            high = [
                min(a + n, b + m) for a, n, b, m in zip(start, size, piece["start"], piece["size"])
            ]
            if any(a >= b for a, b in zip(low, high)):
                continue
            if piece["file"] not in files:
                files[piece["file"]] = safetensors.safe_open(
                    os.path.join(path, piece["file"]), "pt"
                )
            source, to = (
                tuple(slice(a - o, b - o) for a, b, o in zip(low, high, at))
                for at in (piece["start"], start)
            )
            file = files[piece["file"]]
            part = file.get_slice(piece["key"])[source] if source else file.get_tensor(piece["key"])
            tensor[to].copy_(part)
            filled += part.numel()
        if filled != math.prod(size):
            problem = problem or f"{name}, {kind}, has {filled} of {math.prod(size)} elements there"
    problem = next(filter(None, gather(problem)), None)
    if problem:
        raise CheckpointError(f"{path} does not fit this run: {problem}")


def states_in(index):
    """A function for pieces_of: the optimizer states that an index has of a parameter."""
    kinds = index["tensors"]
    return lambda name: {
        kind: tuple(t["shape"])
        for kind, t in kinds.get(name, {}).items()
        if kind != "weight" and not kind.startswith((OUTER, ISLAND))
    }
