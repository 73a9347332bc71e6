"""Documents packed into a sequence (--documents): which token separates them, where each starts.

    tokens    7 1 | 9 4 4 2 | 9 5           9 is the separator
    starts    0 0 | 2 2 2 2 | 6 6
    targets   1 9   4 4 2 9   5 ...

A separator is the first token of its document, and the last target of the one before, where it says
that the document ends. So every token has a target, and a sample begins as a document does. A
document longer than a row begins anew in the next row that has a part of it.
"""

import functools

import numpy as np
import torch

from harness import tokens
from harness.refusal import Refused

SEARCHED = 10**7  # tokens in which there must be a separator


def add_flag(group):
    why = "keep attention and positions within documents. MARK: what stands between two in a text; "
    why += "with --tokenizer none the number of the token that separates them"
    mark = dict(nargs="?", const="<|endoftext|>", metavar="MARK")
    group.add_argument("--documents", **mark, help=f"{why} (without MARK: %(const)r)")


@functools.cache
def separator(mark, tokenizer):
    """The token that separates documents: a tokenizer's own, or a number. Raises Refused."""
    if tokenizer == "none" and mark.isdecimal():
        return int(mark)
    token = tokens.of(tokenizer).start
    if token is None:
        advice = "give the separator's number, as in --documents 50256"
        raise Refused(f"--tokenizer {tokenizer} does not say which token begins a text: {advice}")
    return token


def starts_of(rows, args):
    """The position at which each token's document starts, (B, T) on the host; None without
    --documents. rows: tokens (B, T)."""
    if not getattr(args, "documents", None):
        return None
    rows = rows.cpu()
    first = rows == separator(args.documents, args.tokenizer)
    return torch.where(first, torch.arange(rows.shape[1]), 0).cummax(dim=1).values


def check(args, corpus):
    """Refuse a text that has no separator: it would be one document, silently."""
    if getattr(args, "documents", None):
        token = separator(args.documents, args.tokenizer)
        if token not in np.asarray(corpus.tokens[:SEARCHED]):
            missing = f"--data {corpus.name} has no token {token}, which separates documents"
            raise Refused(f"{missing}: give --documents the mark between them, or leave it out")
