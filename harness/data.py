"""--data -> tokens -> the batch of step i.

    load("stdlib" | path, tokenizer)  ->  Corpus      tokenizers: tokens.py
    corpus.batch(step, rows, ...)     ->  tokens, targets, samples

The default corpus needs no download: the source of Python's own standard library without its
tests, about 10 MB. It differs a little between Python versions, so its losses compare on one
machine only. The last tenth of the tokens is the validation split.

A text is read into memory at each start. Ready-made tokens are files that another program wrote,
memory-mapped and never read whole:

    x.npy                  one row of whole numbers, as numpy saves it
    x.bin                  bare uint16, as nanoGPT writes; uint32 for a vocabulary above 65,536
    x.bin with a header    of 1,024 bytes, as llm.c and modded-nanogpt write it: recognised
    a folder               with train.bin (or .npy), and val.bin if there is one

A batch is a pure function of (seed, step): a hash of (seed, step, j) says where row j starts. So
there is no loader to resume: every rank computes its own rows of the same global batch.
"""

import contextlib
import hashlib
import os
import pathlib
import sysconfig
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from harness.files import check_regular, short
from harness.refusal import Refused
from harness.tokens import of

SAMPLE = 2**18  # ready-made tokens that are looked at when a file is opened
# A header has three numbers: one of these, its version, and how many tokens follow
HEADERS = {20240520: (1, "<u2"), 20240801: (7, "<u4")}  # GPT-2's tokens, Llama 3's


@dataclass
class Corpus:
    """The tokens of a text."""

    name: str
    tokens: np.ndarray  # (N,)
    encoding: Any  # turns text into these tokens: see tokens.py
    digest: str  # sha256 of the tokens' bytes; of ready-made tokens, of the first
    held_out: np.ndarray | None = None  # the validation split, if it is a file of its own

    def split(self, which, context):
        """Tokens of the split "train" or "val". Refuses a split that is too short."""
        splits = {"train": self.tokens, "val": self.held_out}
        if self.held_out is None:
            last = max(len(self.tokens) // 10, context + 1)
            splits = {"train": self.tokens[:-last], "val": self.tokens[-last:]}
        tokens = splits[which]
        if len(tokens) <= context:
            problem = f"has {len(tokens):,} tokens, but --context {context} needs {context + 1}"
            raise Refused(f"the {which} split of {self.name} {problem}: give more text")
        return tokens

    def batch(self, step, rows, context, seed, split="train"):
        """The rows `rows` (a range) of the global batch of `step`, all int64:

        tokens   (B, T), with B = len(rows) and T = context
        targets  (B, T), the tokens one place later
        samples  (B,), an id for each row; no other (seed, step, row) has it"""
        tokens = self.split(split, context)
        step_hash = hash64(hash64(seed, split == "val"), step)
        samples = np.array([hash64(step_hash, row) for row in rows], dtype=np.uint64)
        starts = samples % np.uint64(len(tokens) - context)
        windows = np.stack([tokens[int(s) : int(s) + context + 1] for s in starts])
        windows = torch.from_numpy(windows.astype(np.int64))  # (B, T + 1)
        return windows[:, :-1], windows[:, 1:], torch.from_numpy(samples.view(np.int64))


def hash64(a, b):
    """A 64-bit hash of two integers: output b + 1 of splitmix64 with the seed a."""
    x = (a + (b + 1) * 0x9E3779B97F4A7C15) % 2**64
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 % 2**64
    x = (x ^ x >> 27) * 0x94D049BB133111EB % 2**64
    return x ^ x >> 31


def load(source="stdlib", tokenizer="bytes", vocab=None, mark=None):
    """The Corpus of --data. Raises Refused if there is no such text, or no such tokenizer.

    vocab   ready-made tokens must be below it (default: the tokenizer's)
    mark    what stands between two documents of a text file"""
    encoding, held_out = of(tokenizer), None
    files = ready_made(source)
    try:
        if files:
            vocab = vocab or encoding.n_vocab
            tokens, held_out = (file and open_tokens(file, vocab) for file in files)
        else:
            tokens = encode(source, encoding, mark)
    except (OSError, ValueError) as e:  # numpy says what is cut off
        problem = f"--data {short(str(source))} can't be used ({short(str(e))})"
        raise Refused(f"{problem}: give a text file, a folder of them, or stdlib") from e
    checksum = hashlib.sha256()
    if files:
        checksum.update(f"{tokens.dtype} {len(tokens)}".encode())
    checksum.update(np.ascontiguousarray(tokens[:SAMPLE] if files else tokens))
    return Corpus(str(source), tokens, encoding, checksum.hexdigest(), held_out)


# --- ready-made tokens


def ready_made(source):
    """(file of tokens, file of the validation split or None) of --data; None if it is text."""
    path, found = pathlib.Path(source), []
    if not os.path.isdir(path):
        return (path, None) if path.suffix in (".bin", ".npy") else None
    for split in ("train", "val"):
        files = [path / f"{split}.bin", path / f"{split}.npy"]
        found.append(next((file for file in files if file.is_file()), None))
    return found if found[0] else None


def open_tokens(path, vocab):
    """One file's tokens (N,), memory-mapped. The first of them must be below the vocabulary: a file
    of another tokenizer does not pass."""
    check_regular(path)
    if path.suffix == ".npy":
        tokens = np.lib.format.open_memmap(path, mode="r")
    else:
        tokens = open_bin(path, vocab)
    if tokens.ndim != 1 or not np.issubdtype(tokens.dtype, np.integer):
        raise ValueError(f"{tokens.dtype} of shape {tokens.shape}, not one row of tokens")
    first = tokens[:SAMPLE]
    wrong = first[(first < 0) | (first >= vocab)]
    if len(wrong):
        found = f"has token {wrong[0]} (read as {tokens.dtype})"
        advice = f"--vocab {wrong[0] + 1} or more, or the model's own tokens"
        raise Refused(f"--data {path} {found}, but the vocabulary is {vocab}: give {advice}")
    return tokens


def open_bin(path, vocab):
    """A .bin file's tokens. Raises ValueError if it was cut off, as numpy does."""
    magic, version, count = [*np.fromfile(path, "<i4", 3).tolist(), 0, 0, 0][:3]
    if magic in HEADERS:
        known, dtype = HEADERS[magic]
        if version != known or count < 0:
            raise ValueError(f"its header has version {version} and {count} tokens")
        return np.memmap(path, dtype, "r", 1024, count)
    tokens = np.memmap(path, "<u2" if vocab <= 2**16 else "<u4", "r")
    if not tokens[1:SAMPLE:2].any():
        raise ValueError("every other number is 0, as if each took four bytes: write uint16")
    return tokens


# --- text


def find(source):
    """A source's files, in the order of their paths, without hidden ones."""
    root, suffix, skip = pathlib.Path(source), "", set()
    if source == "stdlib":
        root, suffix = pathlib.Path(sysconfig.get_paths()["stdlib"]), ".py"
        skip = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}
    elif not root.is_dir():
        check_regular(root)
        return [root]
    files = []
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = [f for f in subfolders if f not in skip and not f.startswith(".")]
        for name in names:
            if name.endswith(suffix) and not name.startswith("."):
                files.append(pathlib.Path(folder, name))
    return sorted(file for file in files if file.is_file())


def encode(source, encoding, mark):
    """The tokens of all documents: text files, or what lies between two marks of such a file."""
    files, pieces = find(source), []
    size = sum(file.stat().st_size for file in files)
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if size > memory / 16:  # the bytes, the characters, and up to 8 bytes for each token
        advice = "give ready-made tokens (docs/use/run.md)"
        raise Refused(f"--data {source} has {size / 1e9:,.0f} GB, too much for memory: {advice}")
    for file in files:
        with contextlib.suppress(UnicodeDecodeError):
            text = file.read_bytes().decode("utf-8")
            if "\0" not in text:
                documents = text.split(mark) if mark else [text]
                pieces += [encoding.document(part) for part in documents if part]
    if not pieces:
        raise Refused(f"--data {source} has no text (UTF-8): give a text file or a folder of them")
    return np.concatenate(pieces).astype(np.uint16 if encoding.n_vocab <= 2**16 else np.uint32)
