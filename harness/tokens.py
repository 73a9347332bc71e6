"""Tokenizers: text to numbers and back.

    of("bytes" | "gpt2" | "none" | folder)  ->  an encoding

    bytes     each byte is a token; needs no download
    gpt2      GPT-2's byte-pair encoding, by tiktoken
    a folder  its tokenizer.json, as Hugging Face models have, by the library `tokenizers`
    none      for ready-made tokens: text is written as their numbers

All encodings have what tiktoken's have and this project uses: n_vocab, encode_ordinary, decode; and
besides

    document(text)  the tokens of a whole document, with those that mark its start and its end
    start           the token that begins a sample without a prompt, or None
    end             the token that ends a document, or None
    stops           the tokens at which a sample ends
    name            what checkpoints remember: two encodings of one name give the same tokens
"""

import contextlib
import functools
import hashlib
import json
import os
import pathlib
import re
import socket
import tempfile
import urllib.request

import numpy as np
import tiktoken

from harness.outputs import read
from harness.refusal import Refused

GPT2_FILES = ("vocab.bpe", "encoder.json")
GPT2_HOST = "openaipublic.blob.core.windows.net"
NAMES = ("bytes", "gpt2", "none")
VOCAB = {"bytes": 257, "gpt2": 50257, "none": 1}
# A long text is cut into pieces of about so many characters: `tokenizers` takes 170 bytes for each
PIECE = 1_000_000
# Two encodings that agree on this text are taken for the same
PROBE = "It is 1,234 o'clock;\n\n\tdef f(x): return  x + 12\n  Ähnlich, naïve — 語 🙂 THE END"


def of(tokenizer):
    """The encoding of that name, or of a folder with a tokenizer.json. Raises Refused."""
    if tokenizer == "bytes":
        return bytes_encoding()
    if tokenizer == "gpt2":
        return gpt2_encoding()
    if tokenizer == "none":
        return Numbers()
    return FolderEncoding(tokenizer)


def vocabulary(tokenizer):
    """How many tokens an encoding has. Downloads nothing."""
    return VOCAB[tokenizer] if tokenizer in VOCAB else of(tokenizer).n_vocab


# --- tiktoken's


class Tiktoken:
    """An encoding of tiktoken's. <|endoftext|> ends a document."""

    def __init__(self, name, encoding):
        self.name, self.n_vocab = name, encoding.n_vocab
        self.start = self.end = encoding.eot_token
        self.stops = {self.end}
        self.encoding, self.encode_ordinary = encoding, encoding.encode_ordinary

    def document(self, text):
        tokens = self.encoding.encode_to_numpy(text, disallowed_special=())
        return np.append(tokens, np.uint32(self.end))

    def decode(self, tokens):
        return self.encoding.decode(tokens)


@functools.cache
def bytes_encoding():
    """Each byte is a token, and <|endoftext|> is token 256. Needs no download."""
    tokens = {bytes([i]): i for i in range(256)}
    end = {"<|endoftext|>": 256}
    # The pattern cuts the text into short pieces: the encoder is slow on long ones
    pattern = r"[\s\S]{1,64}"
    encoding = tiktoken.Encoding(
        "bytes", pat_str=pattern, mergeable_ranks=tokens, special_tokens=end
    )
    return Tiktoken("bytes", encoding)


def gpt2_encoding():
    """GPT-2's byte-pair encoding. tiktoken reads its two files from its cache or downloads them."""
    cache = os.environ.get("TIKTOKEN_CACHE_DIR") or os.environ.get("DATA_GYM_CACHE_DIR")
    cache = cache or os.path.join(tempfile.gettempdir(), "data-gym-cache")
    urls = [f"https://{GPT2_HOST}/gpt-2/encodings/main/{f}" for f in GPT2_FILES]
    names = [hashlib.sha1(url.encode()).hexdigest() for url in urls]
    cached = all(os.path.exists(os.path.join(cache, name)) for name in names)
    try:
        if not cached and not urllib.request.getproxies():
            # tiktoken waits for minutes where a firewall drops what is sent
            socket.create_connection((GPT2_HOST, 443), timeout=3).close()
        return Tiktoken("gpt2", tiktoken.get_encoding("gpt2"))
    except OSError as e:
        raise Refused(
            "--tokenizer gpt2 needs two files that tiktoken downloads once, and can't get: use "
            "--tokenizer bytes, or set TIKTOKEN_CACHE_DIR to a folder with both"
        ) from e


# --- a Hugging Face folder's


class FolderEncoding:
    """The tokenizer.json of a folder. What marks a document's start, such as Llama's <s>, is added
    as the file says; what ends it is the eos token that the folder's other files name."""

    def __init__(self, folder):
        self.folder = pathlib.Path(folder)
        self.file = self.folder / "tokenizer.json"
        self.tokenizer, self.name = read_tokenizer(self.file)
        ids = self.tokenizer.get_vocab(with_added_tokens=True)
        self.n_vocab = max(ids.values()) + 1
        ends = self.eos_ids(ids)
        self.stops, self.end = set(ends), next(iter(ends), None)
        self.head = self.added_before("a")
        self.start = self.head[0] if self.head else self.end

    def eos_ids(self, ids):
        """The ids that the folder's files call eos, the tokenizer's own first."""
        named = settings(self.folder / "tokenizer_config.json").get("eos_token")
        if isinstance(named, dict):
            named = named.get("content")
        found = [ids[named]] if named in ids else []
        for name in ("config.json", "generation_config.json"):
            eos = settings(self.folder / name).get("eos_token_id")
            found += eos if isinstance(eos, list) else [eos]
        return [i for i in found if isinstance(i, int) and i < self.n_vocab]

    def added_before(self, text):
        """The tokens that the file puts before a text, such as Llama's <s>."""
        plain = self.tokenizer.encode(text, add_special_tokens=False).ids
        marked = self.tokenizer.encode(text).ids
        starts = range(len(marked) - len(plain) + 1)
        return next((marked[:i] for i in starts if marked[i : i + len(plain)] == plain), [])

    def encode_ordinary(self, text):
        """The tokens of a prompt, which go on: with those that begin a text, without an end."""
        if not text:
            return []
        return self.head + self.tokenizer.encode(text, add_special_tokens=False).ids

    def document(self, text):
        pieces = [np.array(self.head, dtype=np.uint32)]
        for piece in cut(text):
            [encoding] = self.tokenizer.encode_batch_fast([piece], add_special_tokens=False)
            pieces.append(np.array(encoding.ids, dtype=np.uint32))
        tail = [] if self.end is None else [self.end]
        return np.concatenate([*pieces, np.array(tail, dtype=np.uint32)])

    def decode(self, tokens):
        return self.tokenizer.decode(tokens, skip_special_tokens=True)


@functools.lru_cache(maxsize=4)
def read_tokenizer(file):
    """(the tokenizer of a tokenizer.json, a name with its checksum). Raises Refused."""
    try:
        content = read(file)
    except OSError as e:
        raise Refused(
            f"--tokenizer {file.parent}: {file} can't be read ({e.strerror}): give bytes, gpt2, or "
            "a folder with a tokenizer.json"
        ) from e
    try:
        from tokenizers import Tokenizer
    except ImportError as e:
        raise Refused(
            f"--tokenizer {file.parent} needs the library tokenizers: pip install tokenizers"
        ) from e
    try:
        tokenizer = Tokenizer.from_str(content.decode())
    except Exception as e:  # the library raises plain Exceptions
        raise Refused(f"{file} is not a tokenizer ({e}): fetch it again") from e
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer, f"tokenizer.json {hashlib.sha256(content).hexdigest()[:12]}"


def settings(path):
    """A JSON file's content; {} if there is none, or none that is a dict."""
    with contextlib.suppress(OSError, ValueError):
        content = json.loads(read(path))
        return content if isinstance(content, dict) else {}
    return {}


def cut(text):
    """A text in pieces of about PIECE characters, so that a long one needs no more memory than a
    short one. It is cut behind a line and before another: there byte-level tokenizers begin a new
    word anyway. (Those that put a mark before a text put one before each piece.)"""
    border = re.compile(r"(?<=\S\n)(?=\S)")
    start = 0
    while start < len(text):
        found = border.search(text, start + PIECE)
        end = found.start() if found else len(text)
        yield text[start:end]
        start = end


# --- none


class Numbers:
    """No tokenizer: a text is its tokens' numbers. A sample without a prompt begins with 0."""

    name, n_vocab = "none", None
    start, end, stops = 0, None, frozenset()

    def encode_ordinary(self, text):
        if not re.fullmatch(r"[\d\s]*", text):
            raise Refused(
                f"without a tokenizer --prompt is numbers such as '5 17', not {text!r}: give "
                "numbers, or the --tokenizer of these tokens"
            )
        return [int(word) for word in text.split()]

    def document(self, text):
        raise Refused(
            "--tokenizer none is for ready-made tokens (.bin, .npy): give the --tokenizer to use "
            "for this text"
        )

    def decode(self, tokens):
        return " ".join(map(str, tokens))


def same(a, b):
    """Whether two encodings make the same tokens, as far as one text of many kinds shows."""
    if a.name == b.name:
        return True
    if "none" in (a.name, b.name):
        return False
    return list(a.encode_ordinary(PROBE)) == list(b.encode_ordinary(PROBE))
