"""context_parallel.py against one process, PyTorch's attention and the formulas of its bytes."""

import contextlib
import math
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from reference import case

import context_parallel as cp
from receipts import context_parallel as long_context
from trainer import context
from ulysses import make_groups


def test_every_token_is_somewhere_once():
    for length in (1, 2, 5, 16, 37):
        for ring, ulysses in ((1, 1), (3, 1), (1, 4), (2, 3), (8, 1)):
            for zigzag in (True, False):
                held = [cp.held_positions(length, r, ring, zigzag, ulysses) for r in range(ring)]
                parts = [part for of_ring in held for part in of_ring.chunk(ulysses)]
                assert len({len(part) for part in parts}) == 1
                real = torch.cat(parts)
                assert sorted(real[real < length].tolist()) == list(range(length))
                assert len(real) - length < 2 * ring * ulysses
    x = torch.arange(10).view(2, 5)
    assert cp.shard_sequence(x, torch.tensor([4, 5, 0]), -1).tolist() == [[4, -1, 0], [9, -1, 5]]


def attention(rank, way, world, size, length, seed, dtype, starts=None):
    """Our attention of random tensors: result, gradients of q, k, v, and the positions that they
    belong to. "plain tiles" is a ring where no fused kernel runs, "efficient" one that takes the
    memory-efficient kernel of CUDA, as it is played below."""
    if way in ("plain tiles", "efficient"):
        name = None if way == "plain tiles" else way
        with mock.patch.object(cp, "fused_kernel", lambda q: name), efficient_kernels():
            return attention(rank, "ring", world, size, length, seed, dtype, starts)
    core = make_core(way, world, documents=starts is not None)
    documents = () if starts is None else (starts,)
    where = core.positions(length, *documents)
    padded = [F.pad(t, (0, 0, 0, world * len(where) - length)) for t in inputs(size, length, seed)]
    q, k, v, grad = (t[:, :, where].to(dtype).contiguous() for t in padded)
    for t in (q, k, v):
        t.requires_grad_()
    out = core(q, k, v, *documents)
    out.backward(grad)
    return where, [t.detach() for t in (out, q.grad, k.grad, v.grad)]


@contextlib.contextmanager
def efficient_kernels():
    """aten's memory-efficient attention, in plain operations. By its sources it takes as many
    kv-heads as heads, and pads lse with inf to whole blocks of 32 queries."""

    def forward(q, k, v, mask, with_lse, dropout, causal):
        assert q.shape[1] == k.shape[1] and with_lse
        scores = cp.masked_scores(q, k, causal)
        lse = F.pad(scores.logsumexp(-1), (0, -q.shape[2] % 32), value=math.inf)
        return scores.softmax(-1) @ v, lse, None, None

    def backward(grad, q, k, v, mask, out, lse, seed, offset, dropout, wanted, causal):
        assert lse.shape[-1] % 32 == 0 and lse.is_contiguous()
        with mock.patch.object(cp, "fused_kernel", lambda q: None):
            n, m = q.shape[2], k.shape[2]
            assert (lse[:, :, n:] == math.inf).all()
            tile = cp.Tile(slice(n), slice(m), causal)
            kv = torch.stack((k, v))
            return *cp.tile_gradients(grad, q, kv, out, lse[:, :, :n], tile), None

    name = "_scaled_dot_product_efficient_attention"
    aten = torch.ops.aten
    with (
        mock.patch.object(aten, name, forward),
        mock.patch.object(aten, f"{name}_backward", backward),
    ):
        yield


def make_core(way, world, documents=False):
    groups = {"cp": dist.group.WORLD}
    if way == "ring-ulysses":
        rings, _ = long_context.grid(way, world)
        groups["ulysses"], groups["ring"] = make_groups(rings)
    core = context.make_core(way if way in context.KINDS else "ring", groups, documents)
    if way == "contiguous":
        core.zigzag = core.even = False
    return core


def inputs(size, length, seed):
    b, h, kv, d = size
    g = torch.Generator().manual_seed(seed)
    return [torch.randn(b, n, length, d, generator=g, dtype=torch.float64) for n in (h, kv, kv, h)]


def plain(size, length, seed, dtype=torch.float64, documents=None):
    """Attention of one process, of each document (row, start, end) alone."""
    q, k, v, grad = (t.to(dtype) for t in inputs(size, length, seed))
    for t in (q, k, v):
        t.requires_grad_()
    result = torch.zeros_like(q)
    for row, start, end in documents or [(slice(None), 0, length)]:
        part = [t[row, :, start:end] for t in (q, k, v, grad)]
        out = F.scaled_dot_product_attention(*part[:3], is_causal=True, enable_gqa=True)
        out.backward(part[3])
        result[row, :, start:end] = out
    return [t.detach() for t in (result, q.grad, k.grad, v.grad)]


def whole(parts, length):
    """Tensors (B, H, T, D) of all ranks' parts."""
    result = []
    for i in range(4):
        b, h, _, d = parts[0][1][i].shape
        full = torch.zeros(b, h, length, d, dtype=parts[0][1][i].dtype)
        for where, tensors in parts:
            full[:, :, where[where < length]] = tensors[i][:, :, where < length]
        result.append(full)
    return result


SIZES = {  # batch, heads, kv-heads, width; tokens. Also one token a rank, and fewer
    2: [((2, 4, 2, 8), 24), ((3, 6, 3, 5), 1)],
    4: [
        ((1, 4, 4, 4), 4),
        ((2, 8, 2, 6), 31),
        ((1, 4, 1, 16), 8),
        ((1, 24, 6, 4), 16),  # the ranks do not divide the kv-heads
    ],
}


@pytest.mark.parametrize("world", SIZES)
def test_equals_scaled_dot_product_attention(ranks, world):
    cases = [
        (way, *size)
        for way in (*context.KINDS, "contiguous", "plain tiles", "efficient")
        for size in SIZES[world]
    ]

    def work(rank):
        found = []
        for seed, (way, size, length) in enumerate(cases):
            with case(way, size, length):
                found.append(attention(rank, way, world, size, length, seed, torch.float64))
        return found

    of_cases = zip(*ranks(world, work), strict=True)
    for seed, ((way, size, length), parts) in enumerate(zip(cases, of_cases, strict=True)):
        with case(way, size, length):
            for ours, theirs in zip(whole(parts, length), plain(size, length, seed)):
                torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-12)


def test_half_precision_is_as_exact_as_flash_attention(ranks):
    """Plain tiles sum in float32, too."""
    size, length = (1, 4, 2, 32), 256
    cases = [("ring", torch.bfloat16), ("gather", torch.bfloat16)]
    cases += [("plain tiles", torch.bfloat16), ("plain tiles", torch.float16)]

    def work(rank):
        return [attention(rank, way, 4, size, length, 5, dtype) for way, dtype in cases]

    exact = [t.double() for t in plain(size, length, 5)]
    for (way, dtype), parts in zip(cases, zip(*ranks(4, work)), strict=True):
        with case(way, dtype):
            flash = plain(size, length, 5, dtype)
            for a, b, e in zip(whole(parts, length), flash, exact):
                assert a.dtype == dtype
                assert (a.double() - e).norm() <= 1.5 * (b.double() - e).norm()


def test_work_is_even_in_a_zigzag_only(ranks):
    """By the tiles, and by the calls of the kernel: tiles that are masked are skipped."""

    def work(zigzag, ring):
        tiles = [cp.ring_tiles(rank, ring, 8, zigzag) for rank in range(ring)]
        return [long_context.work(of_rank) for of_rank in tiles]

    for ring in (2, 3, 4, 8):
        even, lopsided = work(True, ring), work(False, ring)
        assert len(set(even)) == 1 and sum(even) == sum(lopsided) == 4 * ring * (8 * ring + 1)
        assert lopsided[-1] > lopsided[0] * ring

    def pairs(rank):
        calls, tile_attention = [], cp.tile_attention

        def counted(q, kv, tile):
            n, m = q[:, :, tile.queries].shape[2], kv[:, :, :, tile.keys].shape[3]
            calls[-1] += n * (n + 1) // 2 if tile.causal else n * m
            return tile_attention(q, kv, tile)

        cp.tile_attention = counted
        for way in ("ring", "contiguous"):
            calls.append(0)
            attention(rank, way, 4, (1, 2, 2, 4), 32, 0, torch.float32)
        return tuple(calls)

    assert ranks(4, pairs) == list(zip(work(True, 4), work(False, 4)))


def test_a_kernel_is_for_what_it_takes():
    def kernel(device="cuda", dtype=torch.bfloat16, width=64):
        device = torch.device(device)
        return cp.fused_kernel(SimpleNamespace(device=device, dtype=dtype, shape=(1, 4, 8, width)))

    assert kernel() == kernel(dtype=torch.float16) == "flash"
    assert kernel(dtype=torch.float32) == "efficient"
    assert kernel("cpu") == kernel("cpu", torch.float64, 5) == "cpu"
    for other in (dict(device="meta"), dict(dtype=torch.float64), dict(width=12)):
        assert kernel(**other) is None
