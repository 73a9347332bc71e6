"""Initial weights: each parameter from a generator of its own, so that no cut changes a value.

    with torch.device("meta"):
        model = families.build(config)       # shapes only
    parallelize_tensors(model, group)        # cut: this rank's shapes
    initialize.fill(model, seed, take=...)   # this rank's pieces of the values

The values are drawn on the CPU in float32: every device and dtype starts from the same ones.
"""

import hashlib
import itertools
from concurrent.futures import ThreadPoolExecutor

import torch
import torch.nn as nn

from harness import families
from harness.placement import placement_of, take

DRAW_CHUNK = 1 << 22  # elements of a weight that are drawn on one core


def draw(name, shape, init, seed):
    """The initial value of the parameter `name` in float32. It depends on the arguments alone."""
    mean, std = init
    if std == 0:
        return torch.full(shape, mean)
    whole = torch.empty(shape)

    def draw_chunk(chunk, number):
        source = f"{seed} {name} {number}" if number else f"{seed} {name}"
        digest = hashlib.sha256(source.encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
        chunk.normal_(mean, std, generator=generator)

    # A generator works on one core. Chunks of a large matrix have one each, and so all cores
    first, *others = whole.view(-1).split(DRAW_CHUNK)
    draw_chunk(first, 0)
    if others:
        with ThreadPoolExecutor(torch.get_num_threads()) as pool:
            list(pool.map(draw_chunk, others, itertools.count(1)))
    return whole


def initial(model, seed, device="cpu", dtype=torch.float32, take=take, draw=draw):
    """A function from a parameter of a model on the meta device to its initial value. Buffers (a
    router's bias and load) get their zeros at once. Parameters get a place on the device, but no
    memory: p.data = value(p).

    Each parameter is drawn whole, one at a time, and take(whole, p) returns this device's piece.
    Another `draw` may know other values, such as those of a trained model."""
    names, placed = {}, {}
    for name, p in model.named():
        one = torch.empty((), device=device, dtype=dtype)  # seen in the shape of p
        placed[p] = nn.Parameter(one.expand(p.shape), requires_grad=p.requires_grad)
        placed[p].__dict__.update(p.__dict__)  # init and placement
        names[placed[p]] = name
    for module in model.modules():
        for name, p in list(module.named_parameters(recurse=False)):
            setattr(module, name, placed[p])  # a tied matrix in two modules
        for name, buffer in list(module.named_buffers(recurse=False)):
            setattr(module, name, torch.zeros_like(buffer, device=device))

    def value(p):
        whole = draw(names[p], placement_of(p)["shape"], p.init, seed)
        return take(whole, p).to(device, dtype, copy=True)

    return value


@torch.no_grad()
def fill(model, *options, **others):
    """Give each parameter of a model on the meta device its memory and value. Returns the model.
    The arguments are those of `initial`."""
    value = initial(model, *options, **others)
    for _, p in model.named():
        p.data = value(p)
    return model


def build(config, seed=0, device="cpu", dtype=torch.float32, draw=draw):
    """The whole GPT of a FamilyConfig with its initial weights, on one device."""
    with torch.device("meta"):
        model = families.build(config)
    return fill(model, seed, device, dtype, draw=draw)
