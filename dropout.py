"""Dropout that masks a piece of a batch as the whole is masked.

nn.Dropout draws its mask from a stream of random numbers: ranks with other tokens, or other layers,
would draw other masks than one process. Here an element's mask depends on its own coordinates
alone: sample, position, layer, channel. So every layout trains alike, and can be compared. There is
no seed: sample_ids must be new in every epoch. Without a key there is no dropout, in train() too.

    key = drop_key(sample_ids, positions)    # (B, T), for all layers
    y = Dropout(0.1, site=3)(x, key)         # x (B, T, C)

Salmon et al. 2011, Parallel random numbers: as easy as 1, 2, 3 (the idea).
"""

import torch
import torch.nn as nn


class Dropout(nn.Module):
    """Zero each element of x (B, T, C) with probability p, scale the others by 1 / (1 - p). A hash
    decides: of `key` (B, T), itself a hash of sample and position; of `site`, the number of this
    dropout in the model; and of the channel. Without a key x stays as it is."""

    def __init__(self, p, site):
        super().__init__()
        self.p, self.site = p, site

    def forward(self, x, key):
        if key is None or self.p == 0:
            return x
        channel = torch.arange(x.shape[-1], device=x.device)
        channel = hash64(channel + (self.site << 32)).int()  # (C,)
        hashed = hash32_(key.unsqueeze(-1) ^ channel)  # (B, T, C)
        keep = hashed < int((1 - self.p) * 2**32) - 2**31  # uniform in -2^31 .. 2^31 - 1
        return x * keep / (1 - self.p)


def drop_key(sample_ids, positions):
    """A hash of each token's sample and position, (B, T). sample_ids (B,), positions (T,)."""
    return hash64(sample_ids.unsqueeze(1) + hash64(positions)).int()


# Two hashes, element by element, of signed numbers. Products wrap. `>>` copies the sign bit: each
# mask clears copies


def hash32_(h):
    """MurmurHash3's finaliser of an int32 tensor (Appleby 2011), in place: of B T C elements."""
    h ^= (h >> 16).bitwise_and_(0xFFFF)
    h *= 0x85EBCA6B - 2**32
    h ^= (h >> 13).bitwise_and_(0x7FFFF)
    h *= 0xC2B2AE35 - 2**32
    h ^= (h >> 16).bitwise_and_(0xFFFF)
    return h


def hash64(x):
    """splitmix64 of an int64 tensor (Steele et al. 2014)."""
    x = x + (0x9E3779B97F4A7C15 - 2**64)
    x = (x ^ ((x >> 30) & ((1 << 34) - 1))) * (0xBF58476D1CE4E5B9 - 2**64)
    x = (x ^ ((x >> 27) & ((1 << 37) - 1))) * (0x94D049BB133111EB - 2**64)
    return x ^ ((x >> 31) & ((1 << 33) - 1))
