"""Ready-made tokens: files that another program wrote, memory-mapped and never read whole.

    x.npy                  one row of whole numbers, as numpy saves it: it knows its own dtype
    x.bin                  bare uint16 or uint32, as nanoGPT writes them
    x.bin with a header    of 1,024 bytes, as llm.c and modded-nanogpt write them: recognised
    a folder               with train.bin (or .npy), and val.bin if there is one

A bare .bin does not say what it holds. It is uint32 for a model of more than 65,536 tokens, or if
every other uint16 is zero; else uint16, as these programs write. The first tokens of a file must be
below the model's vocabulary: a file of another tokenizer does not pass.
"""

import hashlib
import os
import pathlib

import numpy as np

from harness import inputs
from harness.refusal import Refused

SUFFIXES = (".bin", ".npy")
# A header has three numbers: one of these, its version, and how many tokens follow
HEADERS = {20240520: (1, "<u2"), 20240801: (7, "<u4")}  # GPT-2's tokens, Llama 3's
HEADER_BYTES = 1024
SAMPLE = 2**18  # tokens that are looked at when a file is opened


def files_of(source):
    """(file of tokens, file of the validation split or None) of --data; None if it is text."""
    path, found = pathlib.Path(source), []
    if not os.path.isdir(source):
        return (path, None) if path.suffix in SUFFIXES else None
    for split in ("train", "val"):
        files = [path / f"{split}{suffix}" for suffix in SUFFIXES]
        found.append(next((file for file in files if file.is_file()), None))
    return found if found[0] else None


def open_file(path, vocab):
    """One file's tokens (N,), memory-mapped, the first of them checked."""
    try:
        inputs.check(path)
        if path.suffix == ".npy":
            tokens = np.lib.format.open_memmap(path, mode="r")
        else:
            tokens = open_bin(path, vocab)
        if tokens.ndim != 1 or not len(tokens) or not np.issubdtype(tokens.dtype, np.integer):
            raise ValueError(f"{tokens.dtype} of shape {tokens.shape}, not one row of tokens")
    except (OSError, ValueError) as e:  # numpy says what is cut off
        reason = getattr(e, "strerror", None) or e
        raise Refused(f"--data {path} can't be read as tokens ({reason}): give another file") from e
    first = tokens[:SAMPLE]
    wrong = first[(first < 0) | (first >= vocab)]
    if len(wrong):
        found = f"has token {wrong[0]} (read as {tokens.dtype})"
        advice = f"--vocab {wrong[0] + 1} or more, or the model's own tokens"
        raise Refused(f"--data {path} {found}, but the vocabulary is {vocab}: give {advice}")
    return tokens


def open_bin(path, vocab):
    """A .bin file's tokens. Raises ValueError for one that was cut off, as numpy does."""
    with open(path, "rb") as file:
        start = file.read(12).ljust(12, b"\0")
    magic, version, count = np.frombuffer(start, "<i4").tolist()
    if magic in HEADERS:
        known, dtype = HEADERS[magic]
        if version != known or count < 0:
            raise ValueError(f"its header has version {version} and {count} tokens")
        return np.memmap(path, dtype, "r", HEADER_BYTES, count)
    tokens = np.memmap(path, "<u2", "r")
    # Small numbers of four bytes, read as two each
    padded = tokens[:SAMPLE].any() and not tokens[1:SAMPLE:2].any()
    return np.memmap(path, "<u4", "r") if padded or vocab > 2**16 else tokens


def digest(tokens):
    """A checksum of the first tokens and of how many there are."""
    content = hashlib.sha256(f"{tokens.dtype} {len(tokens)}".encode())
    content.update(np.ascontiguousarray(tokens[:SAMPLE]))
    return content.hexdigest()
