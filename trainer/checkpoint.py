"""Checkpoints that any layout writes and any other reads. Each rank writes and reads its own part.

A checkpoint is a folder. Its contents go by the parameters' full names and by the place in the
whole parameter, never by rank. So a run may go on with other numbers of ranks, stages, shards or
experts a rank, with or without ZeRO:

    OUT/step-00000200/index.json             what was trained, how far, and where each piece is
                      rank00000.safetensors  this rank's pieces of weights and optimizer states
    OUT/step-00000400.tmp/                   one that is being written, or whose writer died

    . . . . . . . .     Every piece is a box of the whole: a start and a size for each dimension.
    . . . a a a a a     ZeRO's flat shard of a matrix is up to three boxes: the end of a row, whole
    b b b b b b b b     rows, the start of a row. A rank that reads wants other boxes. It intersects
    c c . . . . . .     them with those in the index, and reads the intersections only.

Of several ranks with the same piece the first one writes it. Optimizer states lie where their
parameter lies, or are one number ("step"). With mixed precision the master weights are saved.

A checkpoint is whole or absent. The ranks write into a folder with another name. When all have
succeeded, rank 0 adds the index and renames the folder, which is atomic. The index has the crc32 of
every file and its own: a truncated file or a flipped bit is seen, and the checkpoint before it is
taken. A file that can't be read is not broken: it ends the run, and nothing is touched. A run
removes and replaces only checkpoints that it has written or read itself: `owned`, a set of names.
"""

import contextlib
import errno
import functools
import json
import math
import os
import pathlib
import re
import shutil
import time
import zlib
from typing import NamedTuple

import safetensors.torch
import torch
import torch.distributed as dist

from harness import Refused
from harness.files import read
from harness.placement import placement_of
from harness.presets import parameter_shapes
from proof.ledger import states_of

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
            first = max(bucket.own_slice.start - place.start, 0)
            yield names[p], p, piece.data.view(-1), first, piece, states.get(piece, {})


def pieces_of(named, optimizer, index=None, beside=lambda stepped: {}):
    """This rank's pieces, as a list of Piece.

    named       (full name, parameter), whose `placement` says what it is a piece of
    optimizer   torch's, ZeRO or Muon
    index       of a checkpoint: its optimizer states are made, zeros, where there are none yet
    beside      beside(stepped) is {kind: flat tensor} of what else lies where the optimizer steps
    """
    found = []
    for name, p, flat, first, stepped, state in holdings(named, optimizer):
        where = placement_of(p)
        shape = tuple(where["shape"])
        base, sizes = [0] * len(shape), list(shape)  # of the piece, without its padding
        for dim, (_, start, size) in where["cuts"].items():
            base[dim], sizes[dim] = start, size
        for kind, saved in index["tensors"].get(name, {}).items() if index else ():
            if p.requires_grad and not kind.startswith(("weight", OUTER, ISLAND)):
                one = torch.zeros((), device=flat.device)  # float32: 16 bits can't count steps
                state.setdefault(kind, torch.zeros_like(stepped.data) if saved["shape"] else one)
        tensors = {"weight": flat} | beside(stepped)
        for kind, t in state.items():
            if torch.is_tensor(t) and t.dim():
                tensors[kind] = t
            elif torch.is_tensor(t):  # one number for the whole parameter
                found.append(Piece(name, kind, t, (), (), ()))
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
                found.append(Piece(name, kind, view, shape, place, inside))
    return found


def share_out(pieces):
    """Have each piece written by the first rank that holds it. Returns this rank's own pieces, and
    what an index says of all: {name: {kind: shape, dtype and pieces}}. Called by all ranks.

    Where earlier ranks hold all of a tensor, no other piece of it is written: the last stage of a
    pipeline may have cut a tied matrix in another way than the first."""
    own, tensors, covered = [], {}, {}  # covered: {(name, kind): elements}
    facts = [p._replace(tensor=str(p.tensor.dtype).removeprefix("torch.")) for p in pieces]
    for rank, of_rank in enumerate(gather(facts)):
        for number, p in enumerate(of_rank):
            new = {"shape": p.shape, "dtype": p.tensor, "pieces": {}}
            t = tensors.setdefault(p.name, {}).setdefault(p.kind, new)
            elements = covered.setdefault((p.name, p.kind), 0)
            if p.start in t["pieces"] or elements == math.prod(p.shape):
                continue
            covered[p.name, p.kind] += math.prod(p.size)
            box = {"file": file_of(rank), "key": key_of(p), "start": p.start, "size": p.size}
            t["pieces"][p.start] = box
            if rank == dist.get_rank():
                own.append(pieces[number])
    for name, kinds in tensors.items():
        for kind, t in kinds.items():
            t["pieces"] = list(t["pieces"].values())
            assert covered[name, kind] == math.prod(t["shape"]), f"{name}, {kind}, is not whole"
    return own, tensors


@torch.no_grad()
def whole_weights(run, model, optimizer, island=None):
    """Yield (name, whole weight) of all parameters, on all ranks. Of the ranks that hold the same
    piece one puts it into a tensor of zeros, and the sum over all ranks is the whole. island: the
    ranks that hold the model together, or None for all."""
    own, _ = share_out([p for p in pieces_of(model.named(), optimizer) if p.kind == "weight"])
    for name, shape in parameter_shapes(run.config).items():
        whole = torch.zeros(shape, dtype=run.dtype, device=run.device)
        for piece in own:
            if piece.name == name:
                place = tuple(slice(a, a + n) for a, n in zip(piece.start, piece.size))
                whole[place] = piece.tensor.to(whole)
        dist.all_reduce(whole, group=island)
        yield name, whole


# --- writing


def write_checkpoint(folder, step, header, pieces, keep=0, owned=None, left=()):
    """Write a checkpoint of all ranks' pieces. Called by all ranks. Raises Refused, on every rank,
    where it can't write; then nothing of it stays.

    header  plain data that goes into the index, and that a run must share to go on (see `newest`)
    keep    how many of `owned` stay, 0 = all
    left    names of checkpoints after the one to which the run went back: they get other names"""
    owned = set() if owned is None else owned
    temporary, file = os.path.join(folder, f"{name_of(step)}.tmp"), file_of(dist.get_rank())
    own, tensors = share_out(pieces)
    files = {}

    def write_own():
        os.makedirs(temporary, exist_ok=True)
        if own:
            path = os.path.join(temporary, file)
            write_tensors(path, {key_of(p): p.tensor.cpu().contiguous() for p in own})
            files[file] = {"crc32": crc_of_file(path)}
        sync(temporary)

    problem = first_problem(write_own)
    for of_rank in gather(files):
        files |= of_rank
    index = {"step": step} | header | {"files": files, "tensors": tensors}
    problem = problem or first_problem(publish, folder, temporary, index, keep, owned, left)
    if problem:
        if dist.get_rank() == 0:
            shutil.rmtree(temporary, ignore_errors=True)
        raise Refused(f"the checkpoint of step {step} can't be written to {folder} ({problem})")


def publish(folder, temporary, index, keep, owned, left):
    """On rank 0: add the index, give the checkpoint its name, remove what is old."""
    if dist.get_rank() > 0:
        return
    for file in index["files"]:
        if not os.path.exists(os.path.join(temporary, file)):
            raise ValueError(f"{file} is not there: all nodes must see this folder")
    index["crc32"] = crc_of(index)
    write(os.path.join(temporary, "index.json"), json.dumps(index).encode())
    sync(temporary)
    name = name_of(index["step"])
    final = os.path.join(folder, name)
    for each in left:
        path = os.path.join(folder, each)
        if os.path.exists(path):
            os.rename(path, f"{path}.left-{time.time():.0f}")
    if os.path.exists(final):
        if name not in owned:
            raise ValueError(f"this run has neither written nor read the {name} that is there")
        shutil.rmtree(final)  # a broken one, or it would not be written again
    os.rename(temporary, final)
    sync(folder)
    owned.add(name)
    names = [each for each in checkpoints_in(folder) if each in owned]
    older = [each for each in names if step_of(each) is not None and each < name]
    died = [each for each in names if step_of(each) is None]  # their writers
    for each in died + (older[keep - 1 :] if keep else []):
        shutil.rmtree(os.path.join(folder, each), ignore_errors=True)


def write(path, content):
    """Write a file, and wait until it is on the disk."""
    pathlib.Path(path).write_bytes(content)
    sync(path)


def write_tensors(path, tensors, metadata=None):
    """The same for {name: tensor}."""
    open(path, "wb").close()  # the umask gives it its mode, and safetensors' own would be 0600
    mode = os.stat(path).st_mode
    try:
        safetensors.torch.save_file(tensors, path, metadata)
    except safetensors.SafetensorError as e:
        raise OSError(str(e)) from e
    os.chmod(path, mode)
    sync(path)


def sync(path):
    """Wait until a file is on the disk; or the names in a folder, which are data of its own."""
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)


def crc_of_file(path):
    """Not by mmap: there a disk that fails ends the process, by SIGBUS."""
    crc = 0
    with open(path, "rb") as f:
        for block in iter(functools.partial(f.read, 2**24), b""):
            crc = zlib.crc32(block, crc)
    return crc


def gather(value):
    """Every rank's value, on every rank."""
    everyone = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, value)
    return everyone


def first_problem(work, *args):
    """Call work(*args) on all ranks. Returns, on all of them, the exception of the first rank that
    raised one; else None."""
    problem = None
    try:
        work(*args)
    except (OSError, ValueError, LookupError, TypeError) as e:
        problem = e
    return next(filter(None, gather(problem)), None)


def is_unreadable(problem):
    """Whether an exception does not speak of a file's content, but of a permission, a disk or a
    server that fails."""
    of_content = None, errno.ENOENT, errno.ENOTDIR, errno.EISDIR
    return isinstance(problem, OSError) and problem.errno not in of_content


def crc_of(index):
    """The checksum of an index's contents."""
    rest = {key: value for key, value in index.items() if key != "crc32"}
    return zlib.crc32(json.dumps(rest).encode())


def file_of(rank):
    return f"rank{rank:05d}.safetensors"


def key_of(piece):
    """Its name in a file."""
    return f"{piece.name}:{piece.kind}:{','.join(map(str, piece.start))}"


def name_of(step):
    return f"step-{step:08d}"


def step_of(name):
    """The step of a checkpoint's folder; None for another name."""
    return int(name[5:]) if re.fullmatch(r"step-\d{8,}", name) else None


def checkpoints_in(folder):
    """The names of the checkpoints in a folder, unfinished ones too, the newest first. Raises
    OSError for a folder that can't be listed."""
    names = []
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        names = os.listdir(folder)
    found = [name for name in names if re.fullmatch(r"step-\d{8,}(\.tmp)?", name)]
    return sorted(found, reverse=True)


# --- reading


def newest(folder, header, free=(), owned=None, step=None):
    """(path, index, lines of what was passed over and why) of the newest whole checkpoint in a
    folder, or of that of a step; (None, None, lines) where there is none. Called by all ranks. Adds
    to `owned` the names of what was read: older ones too, if they are of the same run.

    Raises Refused where it is of another run (see check_header), or where one can't be read."""
    names, passed, owned = [], [], set() if owned is None else owned
    problem = first_problem(lambda: names.extend(checkpoints_in(folder)))
    if problem:
        raise Refused(f"{folder} can't be listed ({problem}): nothing was changed")
    names = gather(names)[0]
    for number, name in enumerate(names):
        if step is not None and name != name_of(step):
            continue
        path = os.path.join(folder, name)
        problem = first_problem(check_files, path)
        if is_unreadable(problem):
            advice = "nothing was changed; make it readable, or go on from another by --from-step"
            raise Refused(f"{path} can't be read ({problem}): {advice}")
        owned.add(name)
        if problem is None:
            index = read_index(path)
            check_header(path, index, header, free)
            for older in names[number + 1 :]:
                with contextlib.suppress(OSError, ValueError, LookupError, Refused):
                    check_opens(os.path.join(folder, older), header, free)
                    owned.add(older)
            return path, index, passed
        passed.append(f"{name}: {problem}")
    return None, None, passed


def check_opens(path, header, free):
    """Raise an exception unless a checkpoint is of this run, and its files can be opened."""
    index = read_index(path)
    check_header(path, index, header, free)
    for file in index["files"]:
        open(os.path.join(path, file), "rb").close()


def check_files(path):
    """Raise ValueError or OSError for a broken checkpoint. The ranks share out its files."""
    if not os.path.exists(path):
        raise OSError(errno.ESTALE, "not every node sees it")
    files = read_index(path)["files"]
    for file in sorted(files)[dist.get_rank() :: dist.get_world_size()]:
        if crc_of_file(os.path.join(path, file)) != files[file]["crc32"]:
            raise ValueError(f"{file} was changed, its crc32 differs")


def read_index(path):
    """The index of a checkpoint. Raises ValueError where it is missing, or was changed. Indices of
    the second edition have no checksum of their own."""
    step = step_of(os.path.basename(path))
    if step is None:
        raise ValueError("its writer did not finish")
    try:
        index = json.loads(read(os.path.join(path, "index.json")))
        intact = index["step"] == step and index.get("crc32") in (None, crc_of(index))
    except (OSError, ValueError, LookupError, TypeError) as e:
        if is_unreadable(e):
            raise
        raise ValueError(f"its index.json is broken ({e})") from e
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
    """Fill the pieces from a checkpoint, reading only what they need. All ranks call it."""
    open_file = functools.cache(lambda file: safetensors.safe_open(os.path.join(path, file), "pt"))

    def fill_all():
        for piece in pieces:
            fill(piece, index["tensors"], open_file)

    problem = first_problem(fill_all)
    if problem:
        raise Refused(f"{path} does not fit this run: {problem}")


def fill(piece, tensors, open_file):
    """Fill a piece's tensor. tensors: of an index. Raises ValueError where they don't fit."""
    what = f"{piece.name}, {piece.kind},"
    found = tensors.get(piece.name, {}).get(piece.kind, {"shape": "missing"})
    if found["shape"] != list(piece.shape):
        raise ValueError(f"{what} is {found['shape']} there and {list(piece.shape)} here")
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
        raise ValueError(f"{what} has {filled} of {math.prod(piece.size)} elements there")
