"""Text -> tokens -> the batch of step i.

    load("stdlib" | path, tokenizer)  ->  Corpus      tokenizers: tokens.py
    corpus.batch(step, rows, ...)     ->  tokens, targets, samples

The default corpus needs no download: the source of Python's own standard library without its
tests, about 10 MB. It differs a little between Python versions, so its losses compare on one
machine only. The last tenth of the tokens is the validation split. The tokens lie in a .npy file in
`data/`, which is memory-mapped: all processes share one copy.

A batch is a pure function of (seed, step): a hash of (seed, step, j) says where row j starts. So
there is no loader to resume: every rank computes its own rows of the same global batch.
"""

import contextlib
import fcntl
import hashlib
import os
import pathlib
import secrets
import sysconfig
import tempfile
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from harness import inputs, ready_made
from harness.outputs import short
from harness.refusal import Refused
from harness.tokens import of


@dataclass
class Corpus:
    """The tokens of a text."""

    name: str
    tokens: np.ndarray  # (N,), memory-mapped
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


def load(source="stdlib", tokenizer="bytes", folder=None, vocab=None, mark=None):
    """The Corpus of a source: "stdlib", or the path of a text file, of a folder of text files, or
    of ready-made tokens, which must be below `vocab` (default: the tokenizer's).

    folder: of the cache, by default data/ in the project's folder, or a temporary folder if that
    can't be written. mark: what stands between two documents of a file. Raises Refused if there is
    no such text, or no such tokenizer."""
    encoding = of(tokenizer)
    files = ready_made.files_of(source)
    if files:
        vocab = vocab or encoding.n_vocab
        tokens, held_out = (file and ready_made.open_file(file, vocab) for file in files)
        return Corpus(str(source), tokens, encoding, ready_made.digest(tokens), held_out)
    try:
        tokens = cached(source, encoding, pathlib.Path(folder or cache_folder()), mark)
    except OSError as e:
        reason = short(": ".join(str(part) for part in (e.strerror, e.filename) if part))
        problem = f"--data {short(str(source))} can't be used ({reason})"
        raise Refused(f"{problem}: give a text file, a folder of them, or stdlib") from e
    return Corpus(str(source), tokens, encoding, hashlib.sha256(tokens).hexdigest())


def cached(source, encoding, folder, mark):
    """A text's tokens, memory-mapped. The first call makes the file, while other processes wait."""
    files = find(source)
    name = pathlib.Path(source).resolve().name
    stamp = [(str(f), f.stat().st_size, f.stat().st_mtime_ns) for f in files]
    key = hashlib.sha256(repr((encoding.name, mark, stamp)).encode()).hexdigest()[:16]
    cache = folder / f"{name[:40]}-{key}.npy"  # a file's name has at most 255 bytes
    with open(f"{cache}.lock", "w") as lock:
        with contextlib.suppress(OSError):  # a disk without locks: each process makes the file
            fcntl.flock(lock, fcntl.LOCK_EX)
        try:
            return np.load(cache, mmap_mode="r")
        except (OSError, ValueError, EOFError):  # there is none yet, or it was cut off
            whole = folder / f"{secrets.token_hex(4)}-{cache.name}"  # no reader sees half of it
            with open(whole, "wb") as file:
                np.save(file, encode(files, encoding, source, mark))
            os.replace(whole, cache)
        return np.load(cache, mmap_mode="r")


def find(source):
    """A source's files, in the order of their paths, without hidden ones."""
    root, suffix, skip = pathlib.Path(source), "", set()
    if source == "stdlib":
        root, suffix = pathlib.Path(sysconfig.get_paths()["stdlib"]), ".py"
        skip = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}
    elif not root.is_dir():
        inputs.check(source)
        return [root]
    files = []
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = [f for f in subfolders if f not in skip and not f.startswith(".")]
        for name in names:
            if name.endswith(suffix) and not name.startswith("."):
                files.append(pathlib.Path(folder, name))
    return sorted(file for file in files if file.is_file())


def encode(files, encoding, source, mark):
    """The tokens of all documents: text files, or what lies between two marks of such a file."""
    size = sum(file.stat().st_size for file in files)
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if size > memory / 16:  # the bytes, the characters, and 8 bytes for each token
        advice = "give ready-made tokens (docs/use/run.md)"
        raise Refused(f"--data {source} has {size / 1e9:,.0f} GB, too much for memory: {advice}")
    pieces = []
    for file in files:
        with contextlib.suppress(UnicodeDecodeError):
            text = file.read_bytes().decode("utf-8")
            if "\0" not in text:
                documents = text.split(mark) if mark else [text]
                pieces += [encoding.document(part) for part in documents if part]
    if not pieces:
        raise Refused(f"--data {source} has no text (UTF-8): give a text file or a folder of them")
    return np.concatenate(pieces).astype(np.uint16 if encoding.n_vocab <= 2**16 else np.uint32)


def cache_folder():
    """data/ in the project's folder; where that can't be written, one for temporary files."""
    folder = pathlib.Path(__file__).parent.parent / "data"
    with contextlib.suppress(OSError):
        folder.mkdir(exist_ok=True)
        if os.access(folder, os.W_OK):
            return folder
    folder = pathlib.Path(tempfile.gettempdir(), f"tokens-{os.getuid()}")
    folder.mkdir(mode=0o700, exist_ok=True)
    return folder
