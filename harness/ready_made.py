"""Ready-made tokens: files that another program wrote, memory-mapped and never read whole.

    x.npy                  one row of whole numbers, as numpy saves it: it knows its own dtype
    x.bin                  bare uint16 or uint32, as nanoGPT writes them
    x.bin with a header    of 1,024 bytes, as llm.c and modded-nanogpt write them: recognised
    a folder               with train.bin (or .npy), and val.bin if there is one

A bare .bin does not say what it holds. --data-dtype does; without it, a model of at most 65,536
tokens takes uint16 and a larger one uint32, the smallest that fits, which is what these programs
write. The first tokens of a file must be below the model's vocabulary: a file of the other dtype,
or of another tokenizer, does not pass.
"""

import hashlib
import os
import pathlib

import numpy as np

from harness.refusal import Refused

SUFFIXES = (".bin", ".npy")
# A header has three numbers: one of these, its version, and how many tokens follow
HEADERS = {20240520: (1, "<u2"), 20240801: (7, "<u4")}  # GPT-2's tokens, Llama 3's
HEADER_BYTES = 1024
SAMPLE = 2**18  # tokens that are looked at when a file is opened


def is_ready_made(source):
    """Whether --data is a file of tokens, or a folder with one."""
    path = pathlib.Path(source)
    if os.path.isdir(source):
        return file_of(path, "train") is not None
    return path.suffix in SUFFIXES


def file_of(folder, split):
    """The folder's file of a split, or None."""
    paths = [folder / f"{split}{suffix}" for suffix in SUFFIXES]
    return next((path for path in paths if path.is_file()), None)


def read(source, vocab, dtype=None):
    """(tokens, validation tokens or None) of a source, memory-mapped. Raises Refused."""
    path = pathlib.Path(source)
    if not path.is_dir():
        return open_file(path, vocab, dtype), None
    held_out = file_of(path, "val")
    train = open_file(file_of(path, "train"), vocab, dtype)
    return train, held_out and open_file(held_out, vocab, dtype)


def open_file(path, vocab, dtype):
    """One file's tokens (N,), memory-mapped, the first of them checked."""
    try:
        if path.suffix == ".npy":
            tokens = np.lib.format.open_memmap(path, mode="r")
        else:
            tokens = open_bin(path, vocab, dtype)
    except (OSError, ValueError) as e:  # numpy says what is cut off
        reason = getattr(e, "strerror", None) or e
        raise Refused(f"--data {path} can't be read as tokens ({reason}): give another file") from e
    if tokens.ndim != 1 or not len(tokens) or not np.issubdtype(tokens.dtype, np.integer):
        problem = f"holds {tokens.dtype} of shape {tokens.shape}"
        raise Refused(f"--data {path} {problem}: tokens are one row of whole numbers")
    first = tokens[:SAMPLE]
    # Small numbers of four bytes, read as two each
    if tokens.dtype == np.uint16 and first.any() and not first[1::2].any():
        problem = "holds uint32, not uint16: every other number is zero"
        raise Refused(f"--data {path} {problem}; give --data-dtype uint32")
    wrong = first[(first < 0) | (first >= vocab)]
    if len(wrong):
        found = f"has token {wrong[0]} (read as {tokens.dtype})"
        advice = f"--vocab {wrong[0] + 1} or more, another --data-dtype, or the model's own tokens"
        raise Refused(f"--data {path} {found}, but the vocabulary is {vocab}: give {advice}")
    return tokens


def open_bin(path, vocab, dtype):
    """A .bin file's tokens. Raises ValueError for one that was cut off, as numpy does."""
    with open(path, "rb") as file:
        start = file.read(12).ljust(12, b"\0")
    magic, version, count = np.frombuffer(start, "<i4").tolist()
    if magic not in HEADERS:
        return np.memmap(path, dtype or ("<u2" if vocab <= 2**16 else "<u4"), "r")
    known, dtype = HEADERS[magic]
    if version != known:
        raise ValueError(f"its header is of version {version}, where {known} is known")
    return np.memmap(path, dtype, "r", HEADER_BYTES, count)


def digest(tokens):
    """A checksum of the first tokens and of how many there are."""
    content = hashlib.sha256(f"{tokens.dtype} {len(tokens)}".encode())
    content.update(np.ascontiguousarray(tokens[:SAMPLE]))
    return content.hexdigest()
