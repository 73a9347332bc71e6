"""Ready-made tokens: files that another program wrote, memory-mapped and never read whole.

    x.npy                  one row of whole numbers, as numpy saves it: it knows its own dtype
    x.bin                  bare uint16 or uint32, as nanoGPT writes them
    x.bin with a header    of 1,024 bytes, as llm.c and modded-nanogpt write them: recognised
    a folder               with train.bin (or .npy), and val.bin if there is one

A bare .bin does not say what it holds. --data-dtype does; without it, a model of at most 65,536
tokens takes uint16 and a larger one uint32, the smallest that fits, which is what these programs
write. A sample of the tokens at the start, and the tokens of each batch, must be below the model's
vocabulary: a file of the other dtype, or of another tokenizer, does not pass for long.
"""

import hashlib
import pathlib

import numpy as np

from harness.tokens import DataError

SUFFIXES = (".bin", ".npy")
# The first number of a header, and the dtype behind it: GPT-2's tokens, Llama 3's
MAGIC = {20240520: np.uint16, 20240801: np.uint32}
HEADER_BYTES = 1024
SPOTS, SPOT = 64, 4096  # the sample: 64 places, and 4,096 tokens at each


def is_ready_made(source):
    """Whether --data is a file of tokens, or a folder with one."""
    path = pathlib.Path(source)
    return path.suffix in SUFFIXES and not path.is_dir() or file_of(path, "train") is not None


def file_of(folder, split):
    """The folder's file of a split, or None."""
    for suffix in SUFFIXES:
        path = folder / f"{split}{suffix}"
        if path.is_file():
            return path
    return None


def read(source, vocab, dtype=None):
    """(tokens, validation tokens or None) of a source, memory-mapped. Raises DataError."""
    path = pathlib.Path(source)
    if not path.is_dir():
        return open_file(path, vocab, dtype), None
    held_out = file_of(path, "val")
    train = open_file(file_of(path, "train"), vocab, dtype)
    return train, held_out and open_file(held_out, vocab, dtype)


def open_file(path, vocab, dtype):
    """One file's tokens (N,), memory-mapped, a sample of them checked."""
    try:
        tokens = open_npy(path, dtype) if path.suffix == ".npy" else open_bin(path, vocab, dtype)
    except OSError as e:
        raise DataError(f"--data {path} can't be read ({e.strerror}): give another file") from e
    if len(tokens) == 0:
        raise DataError(f"--data {path} is empty: give a file of tokens")
    picked = sample(tokens)
    if path.suffix == ".bin" and tokens.dtype == np.uint16 and picked.size >= 64:
        # Small numbers in four bytes each: every other pair of bytes is zero
        if not picked[:, 1::2].any() and picked[:, ::2].any():
            raise DataError(
                f"--data {path} holds uint32, not uint16: every other number is zero; "
                "give --data-dtype uint32"
            )
    check_tokens(picked, vocab, str(path), tokens.dtype if path.suffix == ".bin" else None)
    return tokens


def open_npy(path, dtype):
    if dtype:
        raise DataError(f"--data {path} says its dtype itself: leave --data-dtype out")
    try:
        tokens = np.load(path, mmap_mode="r", allow_pickle=False)
    except (ValueError, EOFError) as e:
        raise DataError(f"--data {path} is no whole .npy file: write it again") from e
    if getattr(tokens, "ndim", None) != 1 or not np.issubdtype(tokens.dtype, np.integer):
        raise DataError(
            f"--data {path} holds {tokens.dtype} of shape {tokens.shape}: tokens are one row of "
            "whole numbers"
        )
    return tokens


def open_bin(path, vocab, dtype):
    size, offset = path.stat().st_size, 0
    found = np.dtype(dtype or (np.uint16 if vocab <= 2**16 else np.uint32))
    with open(path, "rb") as file:
        magic = int.from_bytes(file.read(4), "little")
    if magic in MAGIC and size >= HEADER_BYTES:
        found, offset = np.dtype(MAGIC[magic]), HEADER_BYTES
    if dtype and np.dtype(dtype) != found:
        raise DataError(f"--data {path} has a header that says {found}: leave --data-dtype out")
    if (size - offset) % found.itemsize:
        raise DataError(
            f"--data {path} has {size:,} bytes, which are not whole {found} numbers: it was cut "
            "off, or --data-dtype is another"
        )
    if size == offset:
        return np.empty(0, found)
    return np.memmap(path, dtype=found.newbyteorder("<"), mode="r", offset=offset)


def sample(tokens):
    """Tokens at SPOTS places from the first to the last (places, length), or all of a short file.
    The length is even, and so are the places."""
    if len(tokens) <= SPOTS * SPOT:
        return np.asarray(tokens[: len(tokens) // 2 * 2 or 1])[None]
    starts = np.linspace(0, len(tokens) - SPOT, SPOTS).astype(np.int64) // 2 * 2
    return np.stack([tokens[s : s + SPOT] for s in starts])


def digest(tokens):
    """A checksum of the sample and of how many tokens there are."""
    content = hashlib.sha256(f"{tokens.dtype} {len(tokens)}".encode())
    content.update(np.ascontiguousarray(sample(tokens)))
    return content.hexdigest()


def check_tokens(tokens, vocab, where, dtype=None):
    """Raise DataError for a token that the vocabulary has not. dtype: what a .bin was read as."""
    low, high = int(tokens.min()), int(tokens.max())
    if 0 <= low and high < vocab:
        return
    wrong = high if high >= vocab else low
    read_as = ""
    if dtype is not None:
        read_as = f" (read as {dtype}; --data-dtype may be wrong)"
    raise DataError(
        f"--data {where} has token {wrong}, but the model's vocabulary is {vocab}{read_as}: give "
        f"--vocab {wrong + 1} or more, or tokens of the model's own tokenizer"
    )
