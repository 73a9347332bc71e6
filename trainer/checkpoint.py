"""Checkpoints that any layout writes and any other reads. Each rank writes and reads its own part.

A checkpoint is a folder. Its contents go by the parameters' full names and by the place in the
whole parameter, never by rank. So a run may go on with other numbers of ranks, stages, shards or
experts a rank, with or without ZeRO:

    OUT/step-00000200/index.json                 what was trained, how far, and where each piece is
                      rank00000-000.safetensors  this rank's pieces of weights and optimizer states
    OUT/step-00000400.tmp/                       one that is being written, or whose writer died

    . . . . . . . .     Every piece is a box of the whole: a start and a size for each dimension.
    . . . a a a a a     ZeRO's flat shard of a matrix is up to three boxes: the end of a row, whole
    b b b b b b b b     rows, the start of a row. A rank that reads wants other boxes. It intersects
    c c . . . . . .     them with those in the index, and reads the intersections only.

Of several ranks with the same piece one writes it. Optimizer states lie where their parameter lies,
or are one number ("step"). With mixed precision the master weights are saved.

A checkpoint is whole or absent. A thread of each rank writes into a folder with another name, and
training waits only for a copy to the host's memory. When all have succeeded, rank 0 adds the index
and renames the folder, which is atomic. The index has the crc32 of every file and its own: a
truncated file or a flipped bit is seen, and the checkpoint before it is taken.
"""

import contextlib
import functools
import json
import math
import mmap
import os
import re
import shutil
import threading
import zlib
from typing import NamedTuple

import safetensors.torch
import torch
import torch.distributed as dist

from harness import Refused, inputs
from harness.placement import placement
from proof.ledger import states_of

FILE_BYTES = 256 << 20  # a file is made in memory first: so much of it at a time
# Begin the kinds that trainer/islands.py adds: of all islands, and of islands after the first
OUTER, ISLAND = "outer ", "island "


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
    if not shape:
        return [((), ())] if a < b else []
    row, found = math.prod(shape[1:]), []
    while a < b:
        number, first = divmod(a, row)
        whole_rows = (b - a) // row
        if first == 0 and whole_rows:
            start = number, *(0 for _ in shape[1:])
            found.append((start, (whole_rows, *shape[1:])))
            a += whole_rows * row
            continue
        last = min(first + b - a, row)
        for start, size in boxes(shape[1:], first, last):
            found.append(((number, *start), (1, *size)))
        a += last - first
    return found


def holdings(named, optimizer):
    """For each (name, parameter): (name, parameter, the elements of it that this rank steps on,
    flat; which element of the flattened parameter is their first; what the optimizer has in their
    place; its state). ZeRO and Muon have parts, torch's all."""
    names, states = {p: name for name, p in named}, states_of(optimizer)
    if not hasattr(optimizer, "buckets"):
        for p, name in names.items():
            yield name, p, p.data.view(-1), 0, p, states.get(p, {})
        return
    for bucket in optimizer.buckets:
        for p, place, piece in zip(bucket.parameters, bucket.slices, bucket.pieces):
            first = max(bucket.own.start - place.start, 0)
            yield names[p], p, piece.data.view(-1), first, piece, states.get(piece, {})


def pieces_of(named, optimizer, data_group, index=None, beside=lambda stepped: {}):
    """This rank's pieces, as a list of Piece.

    named       (full name, parameter), whose `placement` says what it is a piece of
    optimizer   torch's, or ZeRO
    data_group  the ranks that hold copies for other data
    index       of a checkpoint: its optimizer states are made, zeros, where there are none yet
    beside      beside(stepped) is {kind: flat tensor} of what else lies where the optimizer steps
    """
    found = []
    for name, p, flat, first, stepped, state in holdings(named, optimizer):
        where, writes = placement(p), speaks(p, data_group, optimizer)
        shape = tuple(where["shape"])
        base, sizes = [0] * len(shape), list(shape)  # of the piece, without its padding
        for dim, (_, start, size) in where["cuts"].items():
            base[dim], sizes[dim] = start, size
        for kind, saved in index["tensors"].get(name, {}).items() if index else ():
            if p.requires_grad and not kind.startswith(("weight", OUTER, ISLAND)):
                one = torch.zeros((), device=flat.device)
                state.setdefault(kind, torch.zeros_like(stepped.data) if saved["shape"] else one)
        # One number for the whole parameter: who has its first element writes it
        has_first = first == 0 and len(flat) > 0 and not any(base)
        tensors = {"weight": flat} | beside(stepped)
        for kind, t in state.items():
            if torch.is_tensor(t) and t.dim():
                tensors[kind] = t
            elif torch.is_tensor(t):
                found.append(Piece(name, kind, t, (), (), (), writes and has_first))
        at = 0
        for start, size in boxes(tuple(p.shape), first, first + len(flat)):
            span = slice(at, at + math.prod(size))
            at = span.stop
            inside = tuple(min(s + n, end) - s for s, n, end in zip(start, size, sizes))
            if min(inside, default=1) <= 0:  # padding alone
                continue
            place = tuple(b + s for b, s in zip(base, start))
            for kind, t in tensors.items():
                view = t.view(-1)[span].view(size)[tuple(map(slice, inside))]
                found.append(Piece(name, kind, view, shape, place, inside, writes))
    return found


def speaks(parameter, data_group, optimizer):
    """Whether this rank is the one, of all that hold the same piece of a parameter, to write it:
    the first of each group that holds copies. Under ZeRO and Muon the data-parallel group holds
    shards."""
    where = placement(parameter)
    data_group = where["data"] or data_group
    groups = where["copies"] + where["partial"] + [data_group]
    if hasattr(optimizer, "buckets") and getattr(optimizer, "stage", 1) > 0:
        ranks, sharing = dist.get_process_group_ranks, set(dist.get_process_group_ranks(data_group))
        groups = [group for group in groups if not sharing.issuperset(ranks(group))]
        _, across = getattr(optimizer, "splits", {}).get(data_group, (data_group, None))
        if across is not None:
            groups.append(across)
    return all(dist.get_rank(group) == 0 for group in groups)


# --- writing


class Checkpoints:
    """Writes checkpoints into `folder`: save() between two steps, poll() between any two, finish()
    at the end; all of them by all ranks. header: plain data that goes into the index, and that a
    run must share to go on (see `newest`). keep: how many stay, 0 = all. Raises Refused, on
    every rank, where it can't write; then nothing of the failed one stays."""

    def __init__(self, folder, header, keep=0):
        self.folder, self.header, self.keep, self.thread = folder, header, keep, None

    def save(self, step, pieces):
        self.finish()
        self.step, self.problem, self.files, self.records = step, None, {}, []
        self.temporary = os.path.join(self.folder, f"{name_of(step)}.tmp")
        copies = [p._replace(tensor=p.tensor.to("cpu", copy=True)) for p in pieces if p.writes]
        self.thread = threading.Thread(target=self.write_pieces, args=(copies,), daemon=True)
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
        self.thread, problem = None, of_any_rank(self.problem)
        written = gather((self.files, self.records))
        if not problem and dist.get_rank() == 0:
            try:
                problem = self.publish(written)
            except OSError as e:
                problem = e.strerror or str(e)
        problem = of_any_rank(problem)
        if problem:
            if dist.get_rank() == 0:
                shutil.rmtree(self.temporary, ignore_errors=True)
            where = f"{self.folder} ({problem})"
            raise Refused(f"the checkpoint of step {self.step} can't be written to {where}")

    def write_pieces(self, copies):
        """In the thread: write this rank's pieces, some to a file."""
        pieces = {f"{p.name}:{p.kind}:{','.join(map(str, p.start))}": p for p in copies}
        tensors = ((key, piece.tensor) for key, piece in pieces.items())
        try:
            os.makedirs(self.temporary, exist_ok=True)
            for number, shard in enumerate(shards(tensors, FILE_BYTES)):
                file = f"rank{dist.get_rank():05d}-{number:03d}.safetensors"
                content = safetensors.torch.save(shard)
                write(os.path.join(self.temporary, file), content)
                self.files[file] = {"bytes": len(content), "crc32": zlib.crc32(content)}
                for key in shard:
                    p = pieces[key]
                    box = {"file": file, "key": key, "start": p.start, "size": p.size}
                    dtype = str(p.tensor.dtype).removeprefix("torch.")
                    self.records.append((p.name, p.kind, p.shape, dtype, box))
            sync(self.temporary)
        except Exception as e:
            self.problem = getattr(e, "strerror", None) or repr(e)

    def publish(self, written):
        """On rank 0: the index, the name, and what is old goes. Returns a problem or None."""
        files, tensors = {}, {}
        for of_rank, records in written:
            files |= of_rank
            for name, kind, shape, dtype, box in records:
                kinds = tensors.setdefault(name, {})
                tensor = kinds.setdefault(kind, {"shape": shape, "dtype": dtype, "pieces": []})
                tensor["pieces"].append(box)
        for name, kinds in tensors.items():
            for kind, t in kinds.items():
                if sum(math.prod(box["size"]) for box in t["pieces"]) != math.prod(t["shape"]):
                    return f"the ranks' pieces of {name}, {kind}, are not the whole of it"
        index = {"step": self.step} | self.header | {"files": files, "tensors": tensors}
        index["crc32"] = crc_of(index)
        write(os.path.join(self.temporary, "index.json"), json.dumps(index).encode())
        sync(self.temporary)
        final = os.path.join(self.folder, name_of(self.step))
        if os.path.exists(final):  # a broken one, or it would not be written again
            shutil.rmtree(final)
        os.rename(self.temporary, final)
        sync(self.folder)
        older = 0
        for name in checkpoints_in(self.folder):
            step = step_of(name)  # None: its writer died
            older += step is not None and step < self.step
            if step is None or 0 < self.keep <= older:
                shutil.rmtree(os.path.join(self.folder, name), ignore_errors=True)


def shards(tensors, limit):
    """Group (name, tensor) pairs into dicts of at most `limit` bytes, or of one tensor."""
    shard, size = {}, 0
    for name, tensor in tensors:
        if shard and size + tensor.nbytes > limit:
            yield shard
            shard, size = {}, 0
        shard[name] = tensor.contiguous()
        size += tensor.nbytes
    if shard:
        yield shard


def write(path, content):
    """Write a file, and wait until it is on the disk."""
    with open(path, "wb") as f:
        f.write(content)
        f.flush()
        os.fsync(f.fileno())


def sync(folder):
    """The names in a folder are data of the folder's own."""
    descriptor = os.open(folder, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)


def gather(value):
    """Every rank's value, on every rank."""
    everyone = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, value)
    return everyone


def of_any_rank(problem):
    """The first rank's problem that has one, on every rank; else None."""
    return next(filter(None, gather(problem)), None)


def crc_of(index):
    """The checksum of an index's contents."""
    rest = {key: value for key, value in index.items() if key != "crc32"}
    return zlib.crc32(json.dumps(rest).encode())


def name_of(step):
    return f"step-{step:08d}"


def step_of(name):
    """The step of a checkpoint's folder; None for another name."""
    return int(name[5:]) if re.fullmatch(r"step-\d{8,}", name) else None


def checkpoints_in(folder):
    """The names of the checkpoints in a folder, unfinished ones too, the newest first."""
    names = os.listdir(folder) if os.path.isdir(folder) else []
    found = [name for name in names if re.fullmatch(r"step-\d{8,}(\.tmp)?", name)]
    return sorted(found, reverse=True)


# --- reading


def newest(folder, header, free=()):
    """(path, index, lines of what was passed over and why) of the newest whole checkpoint in a
    folder; (None, None, lines) where there is none. Called by all ranks, who share out the files.

    Raises Refused where it is of another run: see check_header."""
    passed = []
    for name in gather(checkpoints_in(folder))[0]:
        path, index, problem = os.path.join(folder, name), None, None
        try:
            index = read_index(path)
            for file in sorted(index["files"])[dist.get_rank() :: dist.get_world_size()]:
                with open(os.path.join(path, file), "rb") as f:
                    content = mmap.mmap(f.fileno(), 0, access=mmap.ACCESS_READ)
                if zlib.crc32(content) != index["files"][file]["crc32"]:
                    problem = f"{file} was changed, its crc32 differs"
        except (OSError, ValueError, LookupError, TypeError) as e:
            problem = str(e)
        problem = of_any_rank(problem)
        if problem is None:
            check_header(path, index, header, free)
            return path, index, passed
        passed.append(f"{name}: {problem}")
    return None, None, passed


def newest_index(folder):
    """The index of the newest checkpoint that has one, {} where there is none. For what must be
    known before there are ranks. Not checked: the files."""
    for name in checkpoints_in(folder):
        with contextlib.suppress(ValueError, OSError):
            return read_index(os.path.join(folder, name))
    return {}


def read_index(path):
    """The index of a checkpoint. Raises ValueError where it is missing, or was changed. Indices of
    the second edition have no checksum of their own."""
    step = step_of(os.path.basename(path))
    if step is None:
        raise ValueError("its writer did not finish")
    try:
        index = json.loads(inputs.read(os.path.join(path, "index.json")))
        intact = index["step"] == step and index.get("crc32") in (None, crc_of(index))
    except (OSError, ValueError, LookupError, TypeError) as e:
        raise ValueError(f"its index.json can't be read ({e})") from e
    if not intact:
        raise ValueError("its index.json was changed, its crc32 or step differs")
    return index


def check_header(path, index, header, free):
    """Raise Refused where a value of `header`, or of its dict "config", is another than in
    the index. free: keys that may differ."""
    here, there = header | header.get("config", {}), index | index["config"]
    for key in here:
        if key not in ("config", *free) and here[key] != there.get(key):
            values = f"is {there.get(key)!r} there and {here[key]!r} here"
            what = f"{key} {values}" if key != "text" else "text is another"
            raise Refused(f"{path} is of another run, its {what}: change the flags, or --out")


@torch.no_grad()
def load(path, index, pieces):
    """Fill the pieces' tensors from a checkpoint, one at a time, reading only what they need.
    Called by all ranks."""
    open_file = functools.cache(lambda file: safetensors.safe_open(os.path.join(path, file), "pt"))
    problem = None
    for piece in pieces:
        problem = problem or fill(piece, index["tensors"], open_file)
    problem = of_any_rank(problem)
    if problem:
        raise Refused(f"{path} does not fit this run: {problem}")


def fill(piece, tensors, open_file):
    """Fill a piece's tensor. Returns what is wrong, or None. tensors: of an index."""
    what = f"{piece.name}, {piece.kind},"
    found = tensors.get(piece.name, {}).get(piece.kind, {"shape": "missing"})
    if found["shape"] != list(piece.shape):
        return f"{what} is {found['shape']} there and {list(piece.shape)} here"
    filled = 0
    for box in found["pieces"]:
        source, to = [], []  # the intersection, within the box and within the piece
        for a, length, b, size in zip(box["start"], box["size"], piece.start, piece.size):
            low, high = max(a, b), min(a + length, b + size)
            source.append(slice(low - a, high - a))
            to.append(slice(low - b, high - b))
        if any(part.stop <= part.start for part in to):
            continue
        file = open_file(box["file"])
        part = file.get_slice(box["key"])[tuple(source)] if source else file.get_tensor(box["key"])
        piece.tensor[tuple(to)].copy_(part)
        filled += part.numel()
    if filled != math.prod(piece.size):
        return f"{what} has {filled} of {math.prod(piece.size)} elements there"
    return None
