"""Tokens that another program wrote: one file, or the shards in a folder or of a pattern.

    x.npy                  one row of whole numbers, as numpy saves it
    x.bin                  bare uint16, as nanoGPT writes; uint32 for a vocabulary above 65,536
    x.bin with a header    of 1,024 bytes, as llm.c and modded-nanogpt write it: recognised
    x.bin with x.idx       as Megatron writes them: the second file has the dtype
    a folder, 'x*.bin'     all of these, in the order of their names, as one text. A name with the
                           word val or test is of the validation split, unless all have one

Files are memory-mapped, and never read whole."""

import glob
import os
import pathlib
import re

import numpy as np

from harness.files import check_regular, short
from harness.refusal import Refused

SAMPLE = 2**18  # tokens of a file that are looked at when it is opened
# llm.c's header has three numbers: one of these, its version, and how many tokens follow
HEADERS = {20240520: (1, "<u2"), 20240801: (7, "<u4")}  # GPT-2's tokens, Llama 3's
OTHER_HEADERS = (20240326, 20240328, 20240522)  # llm.c's models, tokenizers and multiple choices
MEGATRON = {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}  # its numbers for dtypes
HELD_OUT = re.compile(r"(^|[^a-z])(val|valid|validation|test)([^a-z]|$)", re.IGNORECASE)


class Shards:
    """Several arrays of tokens as one. A slice copies nothing; numpy.asarray does."""

    def __init__(self, parts):
        self.parts, self.dtype = parts, parts[0].dtype
        self.ends = np.cumsum([len(part) for part in parts])

    def __len__(self):
        return int(self.ends[-1])

    def __getitem__(self, where):  # a slice
        begin, end, _ = where.indices(len(self))
        found = []
        for i in range(np.searchsorted(self.ends, begin, side="right"), len(self.parts)):
            first = int(self.ends[i]) - len(self.parts[i])
            if first >= end:
                break
            found.append(self.parts[i][max(begin - first, 0) : end - first])
        return Shards(found or [self.parts[0][:0]])

    def __array__(self, dtype=None, copy=None):
        return np.concatenate(self.parts).astype(dtype or self.dtype)


def matches(source):
    """The files that --data names by a pattern, such as 'x_*.bin'; None where it is no pattern."""
    if not glob.has_magic(str(source)) or os.path.exists(source):
        return None
    files = sorted(pathlib.Path(name) for name in glob.glob(str(source)) if os.path.isfile(name))
    if not files:
        raise Refused(f"--data {short(str(source))} matches no file: give another pattern")
    return files


def find_tokens(source):
    """(files of tokens, those of the validation split, names of what else is there) of --data;
    None if it is text."""
    there = matches(source) or [pathlib.Path(source)]
    if os.path.isdir(source):
        try:
            there = sorted(pathlib.Path(source).iterdir())
        except OSError as e:
            problem = f"--data {source} can't be listed ({e.strerror})"
            raise Refused(f"{problem}: give another folder") from e
    there = [path for path in there if not path.name.startswith(".") or len(there) == 1]
    files = [path for path in there if path.suffix in (".bin", ".npy") and not os.path.isdir(path)]
    if not files:
        return None
    stems = {path.with_suffix("") for path in files}
    if len(stems) < len(files):
        raise Refused(f"--data {source} has tokens as .bin and as .npy: give one, or a pattern")
    others = [path.name for path in there if path.with_suffix("") not in stems]
    held_out = [path for path in files if HELD_OUT.search(path.stem)]
    if len(held_out) == len(files):
        held_out = []
    return [path for path in files if path not in held_out], held_out, others


def open_shards(files, vocab):
    """All tokens of some files, which must be of one vocabulary; None for no file."""
    parts = [open_tokens(path, vocab) for path in files]
    return Shards(parts) if len(parts) > 1 else next(iter(parts), None)


def open_tokens(path, vocab):
    """One file's tokens (N,). The first of them must be below the vocabulary: a file of another
    tokenizer does not pass."""
    check_regular(path)
    if path.suffix == ".npy":
        tokens = np.lib.format.open_memmap(path, mode="r")
    elif path.with_suffix(".idx").exists():
        tokens = open_megatron(path)
    else:
        tokens = open_bin(path, vocab)
    if tokens.ndim != 1 or not np.issubdtype(tokens.dtype, np.integer):
        raise ValueError(f"{tokens.dtype} of shape {tokens.shape}, not one row of tokens")
    first = tokens[:SAMPLE]
    wrong = first[(first < 0) | (first >= vocab)]
    if len(wrong):
        found = f"has token {wrong[0]} (read as {tokens.dtype})"
        advice = "the model's own tokens"
        if wrong.min() >= 0 and wrong.max() < 2**21:  # no tokenizer has more
            advice = f"--vocab {wrong.max() + 1} or more, or {advice}"
        raise Refused(f"--data {path} {found}, but the vocabulary is {vocab}: give {advice}")
    return tokens


def open_bin(path, vocab):
    """A .bin file's tokens. Raises ValueError if it was cut off, or is of another kind."""
    magic, version, count = [*np.fromfile(path, "<i4", 3).tolist(), 0, 0, 0][:3]
    if magic in OTHER_HEADERS:
        raise ValueError(f"its header begins with {magic}: it has no tokens")
    if magic in HEADERS:
        known, dtype = HEADERS[magic]
        if version != known or count < 0:
            raise ValueError(f"its header has version {version} and {count} tokens")
        size = (path.stat().st_size - 1024) / np.dtype(dtype).itemsize
        if size != count:
            advice = "several files are a folder or a pattern, not joined by cat"
            raise ValueError(f"its header says {count:,} tokens, its size {size:,.0f}: {advice}")
        return np.memmap(path, dtype, "r", 1024, count)
    words = np.fromfile(path, "<u2", SAMPLE)
    if len(words) > 8 and not words.any():
        raise ValueError("its first numbers are all 0")
    width, wanted = width_of(words), 2 if vocab <= 2**16 else 4
    if width and width != wanted:
        fits = f"a vocabulary of {vocab:,} takes uint{8 * wanted}"
        if width > 2 and wanted == 2:
            fits += ", one above 65,536 uint32"
        raise ValueError(f"every token has {width} bytes, as if of uint{8 * width}: {fits}")
    return np.memmap(path, f"<u{wanted}", "r")


def width_of(words):
    """How many bytes each token takes, by a file's first words of 16 bits; 0 if they don't tell. In
    tokens of four bytes each second word is small, in those of eight the last two are 0."""
    words = words[: len(words) // 4 * 4].reshape(-1, 4)
    if len(words) == 0 or not words[:, 0].any():
        return 0
    low, high, third, last = words.max(0)
    if max(third, last) == 0:
        return 8
    if max(high, last) == 0:
        return 4
    if len(words) < 250:
        return 0
    return 4 if max(high, last) < 32 <= min(low, third) else 2


def open_megatron(path):
    """The tokens of a .bin file, by the .idx file beside it."""
    index = path.with_suffix(".idx")
    check_regular(index)
    head = np.fromfile(index, "u1", 34).tobytes()
    if len(head) < 34 or head[:9] != b"MMIDIDX\0\0" or head[17] not in MEGATRON:
        raise ValueError(f"{index.name} is no index as Megatron writes it")
    dtype = np.dtype(MEGATRON[head[17]])
    sequences, documents = np.frombuffer(head, "<i8", 2, 18).tolist()
    if index.stat().st_size != 34 + 12 * sequences + 8 * documents:
        raise ValueError(f"{index.name} does not have the size that its header says")
    count = int(np.fromfile(index, "<i4", sequences, offset=34).sum(dtype=np.int64))
    if path.stat().st_size != count * dtype.itemsize:
        raise ValueError(f"{index.name} has {count:,} tokens of {dtype}, and the file another size")
    return np.memmap(path, dtype, "r")
