"""What islands send in fewer bits (--outer-bits), and how it is read.

Karimireddy et al. 2019, Error feedback, arXiv:1901.09847."""

import torch
import torch.distributed as dist
import torch.nn as nn

BLOCK = 128  # elements that share a scale
# torch 2.13 renamed it; older versions know only the second name
all_gather_into_tensor = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


def start_mean(part, bits, group, device):
    """As diloco.py's, of a Part's outer gradient in 16, 8 or 4 bits an element. An all-gather: so a
    number is rounded once, and all islands add the same numbers in the same order, in float64."""
    gradient = part.outer_gradient()
    gradient += part.rounding_error  # error feedback: what the last message left out
    message = encode(gradient, bits)
    part.rounding_error = gradient - decode(message, bits, part.old).to(part.old)
    message, islands = message.to(device), dist.get_world_size(group)
    received = message.new_empty(islands * len(message))
    work = all_gather_into_tensor(received, message, group=group, async_op=True)

    def mean():
        work.wait()
        total = torch.zeros_like(part.old, dtype=torch.float64)
        for said in received.to(total.device).split(len(message)):
            total += decode(said, bits, part.old)
        return (total / islands).to(part.old)

    return mean


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
