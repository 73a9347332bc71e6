"""Tokenizers: text to numbers and back.

    of("bytes" | "gpt2" | "none" | folder)  ->  an encoding

The folder has a tokenizer.json, as Hugging Face models have; "none" is for ready-made tokens.
All encodings have tiktoken's n_vocab, encode_ordinary and decode; and besides

    document(text)  the tokens of a whole document, with those that mark its start and its end
    start           the token that begins a sample without a prompt, or None
    end             the token that ends a document, or None
    stops           the tokens at which a sample ends
    name            what checkpoints remember: two encodings of one name give the same tokens

As in transformers, the name of a mark in a text, such as <|endoftext|>, is that one token.
"""

import functools
import hashlib
import os
import pathlib

import numpy as np
import tiktoken

from harness.files import read, read_json
from harness.refusal import Refused, refusing

os.environ["TOKENIZERS_PARALLELISM"] = "false"  # else the library warns of each fork


class Bytes:
    """Each byte is a token, and 256 ends a document. Needs no download."""

    name, n_vocab, start, end, stops = "bytes", 257, 256, 256, {256}

    def encode_ordinary(self, text):
        return list(text.encode(errors="surrogateescape"))  # as a prompt's bytes came

    def document(self, text):
        return np.append(np.frombuffer(text.encode(), np.uint8), np.uint16(self.end))

    def decode(self, tokens):
        return bytes(token for token in tokens if token < self.end).decode(errors="replace")


class GPT2:
    """GPT-2's byte-pair encoding. tiktoken reads its two files from its cache or downloads them."""

    name, n_vocab, start, end, stops = "gpt2", 50257, 50256, 50256, {50256}

    def __init__(self):
        try:
            self.encoding = tiktoken.get_encoding("gpt2")
        except OSError as e:
            problem = "--tokenizer gpt2 needs two files that tiktoken downloads once, and can't get"
            advice = "use --tokenizer bytes, or set TIKTOKEN_CACHE_DIR to a folder with both"
            raise Refused(f"{problem}: {advice}") from e
        self.decode = self.encoding.decode

    def encode_ordinary(self, text):
        return self.encoding.encode(text, allowed_special="all")

    def document(self, text):
        tokens = self.encoding.encode_to_numpy(text, allowed_special="all")
        return np.append(tokens, np.uint32(self.end))


class NoEncoding:
    """Of ready-made tokens: text has no tokens, and tokens no text."""

    name, n_vocab, start, end = "none", 1, None, None

    def document(self, text):
        advice = "give the --tokenizer to use for this text"
        raise Refused(f"--tokenizer none is for ready-made tokens (.bin, .npy): {advice}")


NAMED = {"bytes": Bytes, "gpt2": GPT2, "none": NoEncoding}


def of(tokenizer):
    """An encoding. Raises Refused."""
    return NAMED[tokenizer]() if tokenizer in NAMED else FolderEncoding(tokenizer)


def vocabulary(tokenizer):
    """How many tokens an encoding has. Downloads nothing."""
    return (NAMED.get(tokenizer) or of(tokenizer)).n_vocab


class FolderEncoding:
    """The tokenizer.json of a Hugging Face folder. What marks a document's start, such as Llama's
    <s>, is added as the file says; what ends it is the eos token of the folder's other files."""

    def __init__(self, folder):
        self.folder = pathlib.Path(folder)
        self.tokenizer, self.name = read_tokenizer(self.folder / "tokenizer.json")
        ids = self.tokenizer.get_vocab()
        self.n_vocab = max(ids.values()) + 1
        with refusing():
            ends = eos_ids(self.folder, ids)
        self.stops, self.end = set(ends), ends[0] if ends else None
        self.head = []  # what stands before a text, here before one that has a token
        marks = {token.content for token in self.tokenizer.get_added_tokens_decoder().values()}
        for text in ["a", *sorted(ids.keys() - marks)]:
            if plain := self.plain(text):
                marked = self.tokenizer.encode(text).ids
                self.head = marked[: marked.index(plain[0])]
                break
        self.start = self.head[0] if self.head else self.end

    def plain(self, text):
        """The tokens of a text without marks, in a quarter of the time of `encode`."""
        return self.tokenizer.encode_batch_fast([text], add_special_tokens=False)[0].ids

    def encode_ordinary(self, text):
        """The tokens of a prompt, which go on: with those that begin a text, without an end."""
        return self.head + self.plain(text) if text else []

    def document(self, text):
        tail = [] if self.end is None else [self.end]
        return np.array(self.head + self.plain(text) + tail, np.uint32)

    def decode(self, tokens):
        return self.tokenizer.decode(tokens, skip_special_tokens=True)


@functools.lru_cache(maxsize=4)
def read_tokenizer(file):
    """(the tokenizer of a tokenizer.json, a name with its checksum). Raises Refused."""
    try:
        from tokenizers import Tokenizer

        content = read(file)
        tokenizer = Tokenizer.from_str(content.decode())
    except ImportError as e:
        raise Refused(f"--tokenizer {file.parent} needs a library: pip install tokenizers") from e
    except Exception as e:  # the library raises plain Exceptions
        advice = "give bytes, gpt2, or a folder with a tokenizer.json"
        raise Refused(f"--tokenizer: {file} can't be read ({e}): {advice}") from e
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer, f"tokenizer.json {hashlib.sha256(content).hexdigest()[:12]}"


def eos_ids(folder, ids):
    """The ids that a folder's files call eos, the tokenizer's own first. ids: {token: its id}."""
    found = []
    names = "tokenizer_config special_tokens_map config generation_config"
    for name in names.split():
        file = folder / f"{name}.json"
        settings = read_json(file) if file.is_file() else {}
        named, eos = settings.get("eos_token"), settings.get("eos_token_id")
        if isinstance(named, dict):
            named = named.get("content")
        found += [ids.get(str(named)), *(eos if isinstance(eos, list) else [eos])]
    return [i for i in found if i in ids.values()]
