"""Tokenizers: text to numbers and back.

    of("bytes" | "gpt2" | "none" | folder)  ->  an encoding

    bytes     each byte is a token; needs no download
    gpt2      GPT-2's byte-pair encoding, by tiktoken
    a folder  its tokenizer.json, as Hugging Face models have, by the library `tokenizers`
    none      for ready-made tokens, if nobody asks for a sample

All encodings have tiktoken's n_vocab, encode_ordinary and decode; and besides

    document(text)  the tokens of a whole document, with those that mark its start and its end
    start           the token that begins a sample without a prompt, or None
    end             the token that ends a document, or None
    stops           the tokens at which a sample ends
    name            what checkpoints remember: two encodings of one name give the same tokens
"""

import functools
import hashlib
import pathlib

import numpy as np
import tiktoken

from harness import inputs
from harness.refusal import Refused, refusing

VOCAB = {"bytes": 257, "gpt2": 50257, "none": 1}
# Two encodings that agree on this text are taken for the same
PROBE = "It is 1,234 o'clock;\n\n\tdef f(x): return  x + 12\n  Ähnlich, naïve — 語 🙂 THE END"


def of(tokenizer):
    """An encoding. Raises Refused."""
    makers = {"bytes": bytes_encoding, "gpt2": gpt2_encoding, "none": NoEncoding}
    return makers[tokenizer]() if tokenizer in makers else FolderEncoding(tokenizer)


def vocabulary(tokenizer):
    """How many tokens an encoding has. Downloads nothing."""
    return VOCAB[tokenizer] if tokenizer in VOCAB else of(tokenizer).n_vocab


def same(a, b):
    """Whether two encodings make the same tokens, as far as one text of many kinds shows."""
    return list(a.encode_ordinary(PROBE)) == list(b.encode_ordinary(PROBE))


class NoEncoding:
    """Of ready-made tokens: text has no tokens, and tokens no text."""

    name, n_vocab, start, end = "none", None, None, None

    def document(self, text):
        advice = "give the --tokenizer to use for this text"
        raise Refused(f"--tokenizer none is for ready-made tokens (.bin, .npy): {advice}")


class Tiktoken:
    """An encoding of tiktoken's. <|endoftext|> ends a document."""

    def __init__(self, encoding):
        self.name, self.n_vocab = encoding.name, encoding.n_vocab
        self.start = self.end = encoding.eot_token
        self.stops = {self.end}
        self.encoding, self.encode_ordinary = encoding, encoding.encode_ordinary
        self.decode = encoding.decode

    def document(self, text):
        tokens = self.encoding.encode_to_numpy(text, disallowed_special=())
        return np.append(tokens, np.uint32(self.end))


@functools.cache
def bytes_encoding():
    """Each byte is a token, and <|endoftext|> is token 256. Needs no download."""
    tokens = {bytes([i]): i for i in range(256)}
    # The pattern cuts the text into short pieces: the encoder is slow on long ones
    pieces, end = r"[\s\S]{1,64}", {"<|endoftext|>": 256}
    given = {"pat_str": pieces, "mergeable_ranks": tokens, "special_tokens": end}
    return Tiktoken(tiktoken.Encoding("bytes", **given))


def gpt2_encoding():
    """GPT-2's byte-pair encoding. tiktoken reads its two files from its cache or downloads them."""
    try:
        return Tiktoken(tiktoken.get_encoding("gpt2"))
    except OSError as e:
        problem = "--tokenizer gpt2 needs two files that tiktoken downloads once, and can't get"
        advice = "use --tokenizer bytes, or set TIKTOKEN_CACHE_DIR to a folder with both"
        raise Refused(f"{problem}: {advice}") from e


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
        marked = self.tokenizer.encode("a").ids
        self.head = marked[: marked.index(self.plain("a")[0])]  # what stands before a text
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

        content = inputs.read(file)
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
    for name in ("tokenizer_config.json", "config.json", "generation_config.json"):
        file = folder / name
        settings = inputs.read_json(file) if file.is_file() else {}
        named, eos = settings.get("eos_token"), settings.get("eos_token_id")
        if isinstance(named, dict):
            named = named.get("content")
        found += [ids.get(str(named)), *(eos if isinstance(eos, list) else [eos])]
    return [i for i in found if i in ids.values()]
