"""What islands send in fewer bits (--outer-bits), and how it is read."""

import torch
import torch.nn as nn

BLOCK = 128  # elements that share a scale


class Codec:
    """For diloco.DiLoCo: messages of 16, 8 or 4 bits an element."""

    def __init__(self, bits):
        self.bits = bits

    def encode(self, x):
        return encode(x, self.bits)

    def decode(self, message, like):
        return decode(message, self.bits, like)


def encode(x, bits):
    """The flat tensor x as bytes: in bfloat16 (16), or in integers of 8 or 4 bits, and in front of
    them a float32 scale per block: its largest element / 127 or 7."""
    if bits == 16:
        return x.bfloat16().view(torch.uint8)
    largest = 2 ** (bits - 1) - 1  # 127 or 7
    blocks = nn.functional.pad(x, (0, -len(x) % BLOCK)).view(-1, BLOCK)
    scales = (blocks.abs().amax(1, keepdim=True) / largest).float()
    divisors = torch.where(scales == 0, 1, scales)  # no 0 / 0. A NaN survives in the scale
    integers = (blocks / divisors).round().clamp(-largest, largest).to(torch.int8).flatten()
    if bits == 4:  # two in a byte, -7..7 as 1..15
        low, high = (integers + 8).to(torch.uint8).view(-1, 2).unbind(1)
        integers = low + 16 * high
    return torch.cat([scales.flatten().view(torch.uint8), integers.view(torch.uint8)])


def decode(message, bits, like):
    """The elements of a message in float64. like: any tensor like the one that encode was given."""
    if bits == 16:
        return message.view(torch.bfloat16).double()
    blocks = (len(like) + BLOCK - 1) // BLOCK
    scales, integers = message.tensor_split([4 * blocks])
    if bits == 4:
        integers = torch.stack([integers % 16, integers // 16], 1).to(torch.int8) - 8
    integers = integers.view(torch.int8).view(-1, BLOCK)
    scales = scales.view(torch.float32).unsqueeze(1)
    return (integers.double() * scales).flatten()[: len(like)]
