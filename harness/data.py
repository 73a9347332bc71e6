"""--data -> tokens -> the batch of step i.

    load("stdlib" | path, tokenizer)  ->  Corpus      tokenizers: tokens.py
    corpus.batch(step, rows, ...)     ->  tokens, targets, samples

The default corpus needs no download: the source of Python's own standard library without its
tests, about 10 MB. It differs a little between Python versions, so its losses compare on one
machine only. The last tenth of the tokens is the validation split.

A text is read into memory at each start: a file, a folder of them, or a pattern. Ready-made tokens
are not: ready_made.py. Nothing is dropped in silence: `note` says what was passed over, and what
looks like a text in another encoding or like another kind of data is refused.

A batch is a pure function of (seed, step): a hash of (seed, step, j) says where row j starts. So
there is no loader to resume: every rank computes its own rows of the same global batch.
"""

import hashlib
import os
import pathlib
import sysconfig
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from harness.files import check_regular, memory, short
from harness.ready_made import SAMPLE, find_tokens, matches, open_shards
from harness.refusal import Refused
from harness.tokens import of

# Data in a form that is not read here, by the ends of names
DATA = ".parquet .arrow .feather .jsonl .gz .bz2 .xz .zst .zip .tar .tgz .h5 .hdf5 .npz .pkl .pt "
DATA += ".pth .safetensors .tfrecord .mds .bin .npy .idx"
PARQUET = """python -c "import glob, numpy, pyarrow.parquet, tiktoken; gpt2 = \
tiktoken.get_encoding('gpt2'); out = open('train.bin', 'wb'); \
[numpy.array(gpt2.encode_ordinary(t) + [gpt2.eot_token], 'u2').tofile(out) \
for f in sorted(glob.glob('*.parquet')) \
for t in pyarrow.parquet.read_table(f, columns=['text'])['text'].to_pylist()]" """.strip()


@dataclass
class Corpus:
    """The tokens of a text."""

    name: str
    tokens: np.ndarray  # (N,)
    encoding: Any  # turns text into these tokens: see tokens.py
    digest: str  # sha256 of the tokens' bytes; of ready-made tokens, of the first
    held_out: np.ndarray | None = None  # the validation split, if it has files of its own
    note: str = ""  # of how many files they are, and what was passed over

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
    try:
        found = find_tokens(source)
        if found:
            files, validation, passed = found
            vocab = vocab or encoding.n_vocab
            tokens, held_out = open_shards(files, vocab), open_shards(validation, vocab)
            files += validation
        else:
            tokens, files, passed = encode(source, encoding, mark)
    except (OSError, ValueError) as e:  # numpy says what is cut off
        problem = f"--data {short(str(source))} can't be used ({short(str(e), 400)})"
        raise Refused(f"{problem}: give a text file, a folder of them, or stdlib") from e
    checksum = hashlib.sha256()
    if found:
        checksum.update(f"{tokens.dtype} {len(tokens)}".encode())
    checksum.update(np.ascontiguousarray(tokens[:SAMPLE] if found else tokens))
    note = f"{len(files):,} files" if len(files) > 1 and source != "stdlib" else ""
    if passed and source != "stdlib":
        names = short(", ".join(passed))
        note += f"{', ' if note else ''}passed over, as no {'tokens' if found else 'text'}: {names}"
    return Corpus(str(source), tokens, encoding, checksum.hexdigest(), held_out, note)


# --- text


def find(source):
    """(A text's files in the order of their paths, names of what else is there). Hidden ones do not
    count."""
    root, suffix, skip = pathlib.Path(source), "", set()
    if source == "stdlib":
        root, suffix = pathlib.Path(sysconfig.get_paths()["stdlib"]), ".py"
        skip = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}
    elif not root.is_dir():
        files = matches(source) or [root]
        for file in files:
            check_regular(file)
        return files, []
    files, passed = [], []

    def fail(error):
        raise error

    for folder, subfolders, names in os.walk(root, onerror=fail):
        subfolders[:] = [f for f in subfolders if f not in skip and not f.startswith(".")]
        links = [f for f in subfolders if os.path.islink(os.path.join(folder, f))]
        for name in sorted(names + links):
            file = pathlib.Path(folder, name)
            if name.endswith(suffix) and not name.startswith("."):
                (files if file.is_file() else passed).append(file)
    return sorted(files), [str(file.relative_to(root)) for file in passed]


def encode(source, encoding, mark):
    """(the tokens of all documents, the files that have them, names of what else is there). A
    document is a text file, or what lies between two marks of such a file."""
    (files, passed), pieces, used, foreign = find(source), [], [], []
    size = sum(file.stat().st_size for file in files)
    if size > memory() / 16:  # the bytes, the characters, and up to 8 bytes for each token
        advice = "give ready-made tokens (docs/use/run.md)"
        raise Refused(f"--data {source} has {size / 1e9:,.0f} GB, too much for memory: {advice}")
    for file in files:
        if file.suffix.lower() in DATA.split():
            advice = "unpack it, or turn it into text or tokens (docs/use/run.md)"
            if file.suffix == ".parquet":
                advice = f"turn it into tokens, in its folder by {PARQUET}"
            raise Refused(f"--data {source} has {file.name}, which is not read here: {advice}")
        content = file.read_bytes()
        try:
            text = content.decode("utf-8-sig")  # a byte-order mark is no text
        except UnicodeDecodeError:
            is_text = b"\0" not in content or content[:2] in (b"\xff\xfe", b"\xfe\xff")  # UTF-16
            (foreign if is_text else passed).append(file.name)
            continue
        if "\0" in text:
            passed.append(file.name)
            continue
        used.append(file)
        documents = text.split(mark) if mark else [text]
        pieces += [encoding.document(part) for part in documents if part]
    if foreign and source != "stdlib":
        problem = f"{len(foreign)} of {len(files)} files are text, but not UTF-8 ({foreign[0]})"
        advice = "convert them (iconv -f LATIN1 -t UTF-8), or give a pattern of the others"
        raise Refused(f"--data {source}: {problem}: {advice}")
    if not pieces:
        raise Refused(f"--data {source} has no text (UTF-8): give a text file or a folder of them")
    dtype = np.uint16 if encoding.n_vocab <= 2**16 else np.uint32
    return np.concatenate(pieces).astype(dtype), used, passed
