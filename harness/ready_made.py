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

from harness.refusal import Refused

SUFFIXES = (".bin", ".npy")
# A header has three numbers: one of these, its version, and how many tokens follow
HEADERS = {
    20240520: (1, np.dtype("<u2")),  # GPT-2's tokens
    20240801: (7, np.dtype("<u4")),  # Llama 3's
}
HEADER_BYTES = 1024
SPOTS, SPOT = 64, 4096  # the sample: 64 places, and 4,096 tokens at each


def is_ready_made(source):
    """Whether --data is a file of tokens, or a folder with one."""
    path = pathlib.Path(source)
    if path.is_dir():
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
    """One file's tokens (N,), memory-mapped, a sample of them checked."""
    try:
        tokens = open_npy(path, dtype) if path.suffix == ".npy" else open_bin(path, vocab, dtype)
    except OSError as e:
        raise Refused(f"--data {path} can't be read ({e.strerror}): give another file") from e
    if len(tokens) == 0:
        raise Refused(f"--data {path} is empty: give a file of tokens")
    picked = sample(tokens)
    if path.suffix == ".bin" and tokens.dtype == np.uint16 and picked.size >= 64:
        # Small numbers in four bytes each: every other pair of bytes is zero
        if not picked[:, 1::2].any() and picked[:, ::2].any():
            raise Refused(
                f"--data {path} holds uint32, not uint16: every other number is zero; "
                "give --data-dtype uint32"
            )
    check_tokens(picked, vocab, str(path), tokens.dtype if path.suffix == ".bin" else None)
    return tokens


def open_npy(path, dtype):
    if dtype:
        raise Refused(f"--data {path} says its dtype itself: leave --data-dtype out")
    try:
        tokens = np.load(path, mmap_mode="r", allow_pickle=False)
    except (ValueError, EOFError) as e:
        raise Refused(f"--data {path} is no whole .npy file: write it again") from e
    if getattr(tokens, "ndim", None) != 1 or not np.issubdtype(tokens.dtype, np.integer):
        raise Refused(
            f"--data {path} holds {tokens.dtype} of shape {tokens.shape}: tokens are one row of "
            "whole numbers"
        )
    return tokens


def open_bin(path, vocab, dtype):
    size = path.stat().st_size
    found = np.dtype(dtype or ("uint16" if vocab <= 2**16 else "uint32")).newbyteorder("<")
    with open(path, "rb") as file:
        start = file.read(12).ljust(12, b"\0")
    magic, version, count = np.frombuffer(start, "<i4").tolist()
    if magic not in HEADERS:
        if size % found.itemsize:
            raise Refused(
                f"--data {path} has {size:,} bytes, which are not whole {found} numbers: it was "
                "cut off, or --data-dtype is another"
            )
        return np.memmap(path, found, "r") if size else np.empty(0, found)
    expected, found = HEADERS[magic]
    if version != expected:
        raise Refused(
            f"--data {path} has a header of version {version}, where {expected} is known: "
            "give it without a header, with --data-dtype"
        )
    follow = max(0, size - HEADER_BYTES) // found.itemsize
    if not 0 <= count <= follow:
        raise Refused(
            f"--data {path} has a header that says {count:,} tokens, but {follow:,} follow: "
            "it was cut off, or is damaged"
        )
    if dtype and np.dtype(dtype) != found:
        raise Refused(f"--data {path} has a header that says {found}: leave --data-dtype out")
    return np.memmap(path, found, "r", HEADER_BYTES, count) if count else np.empty(0, found)


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
    """Raise Refused for a token that the vocabulary has not. dtype: what a .bin was read as."""
    low, high = int(tokens.min()), int(tokens.max())
    if 0 <= low and high < vocab:
        return
    wrong = high if high >= vocab else low
    read_as = ""
    if dtype is not None:
        read_as = f" (read as {dtype}; --data-dtype may be wrong)"
    raise Refused(
        f"--data {where} has token {wrong}, but the model's vocabulary is {vocab}{read_as}: give "
        f"--vocab {wrong + 1} or more, or tokens of the model's own tokenizer"
    )
