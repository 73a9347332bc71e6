"""context_parallel.py against one process, against PyTorch's attention, and its bytes against the
formulas."""

import copy
import dataclasses
import inspect
import json
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from reference import (
    CONFIGS,
    batch,
    case,
)

import context_parallel as cp
import model as gpt
from harness import initialize
from proof.ledger import Ledger
from receipts import context_parallel as long_context

ODD = dataclasses.replace(CONFIGS["gpt2"], context=13)


def groups_of(way, world):
    """(ranks in a ring, ranks that swap heads, their groups where there are both)."""
    ring, ulysses = long_context.grid(way, world)
    both = way == "ring-ulysses"
    return ring, ulysses, *(long_context.subgroups(ring, ulysses) if both else (None, None))


def test_the_usage_block_of_parallelize_runs_as_printed(ranks):
    def run(rank, kind):
        tokens, targets, _, count = batch(0, context=13)
        group, whole = dist.group.WORLD, initialize.build(ODD, 7, dtype=torch.float64)
        names = dict(vars(cp), group=group, kind=kind, T=13, rank=rank, n=4, count=count)
        names |= dict(tokens=tokens, targets=targets, model=copy.deepcopy(whole))
        lines = inspect.getdoc(cp.parallelize_context).splitlines()
        exec("\n".join(line[4:] for line in lines if line.startswith("    ")), names)
        loss = whole(tokens, torch.arange(13), targets=targets, target_count=count)
        loss.backward()
        for ours, theirs in zip(names["model"].parameters(), whole.parameters()):
            dist.all_reduce(ours.grad)
            torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-10, atol=1e-12)

    def work(rank):
        for kind in ("ring", "ulysses"):
            with case(kind):
                run(rank, kind)

    ranks(4, work)


def test_every_token_is_somewhere_once():
    for length in (1, 2, 5, 16, 37):
        for ring, ulysses in ((1, 1), (3, 1), (1, 4), (2, 3), (8, 1)):
            for zigzag in (True, False):
                parts = [
                    cp.positions(length, rank, ring, ulysses, zigzag)
                    for rank in range(ring * ulysses)
                ]
                assert len({len(part) for part in parts}) == 1
                real = torch.cat(parts)
                assert sorted(real[real < length].tolist()) == list(range(length))
                assert len(real) - length < 2 * ring * ulysses
    x = torch.arange(10).view(2, 5)
    assert cp.shard_sequence(x, torch.tensor([4, 5, 0]), -1).tolist() == [[4, -1, 0], [9, -1, 5]]


def attention(rank, way, world, size, length, seed, dtype, zigzag=True):
    """Our attention of random tensors: result, gradients of q, k, v, and the positions that they
    belong to. "plain tiles" is a ring where no fused kernel runs."""
    if way == "plain tiles":
        with mock.patch.object(cp, "fused_kernel", lambda q: None):
            return attention(rank, "ring", world, size, length, seed, dtype)
    ring, ulysses, rings, heads = groups_of(way, world)
    zigzag = zigzag and way != "ulysses"
    b, h, kv, d = size
    where = cp.positions(length, rank, ring, ulysses, zigzag)
    full = inputs(size, length, seed)
    padded = [
        torch.cat((t, t.new_zeros(b, t.shape[1], world * len(where), d)), dim=2) for t in full
    ]
    q, k, v, grad = (t[:, :, where].to(dtype).contiguous() for t in padded)
    core = {
        "ring": lambda: cp.Ring(dist.group.WORLD, zigzag),
        "gather": lambda: cp.Gather(dist.group.WORLD, zigzag),
        "ulysses": lambda: cp.Ulysses(dist.group.WORLD, gpt.AttentionCore()),
        "ring-ulysses": lambda: cp.Ulysses(heads, cp.Ring(rings, zigzag)),
    }[way]()
    for t in (q, k, v):
        t.requires_grad_()
    out = core(q, k, v)
    out.backward(grad)
    return where, [t.detach() for t in (out, q.grad, k.grad, v.grad)]


def inputs(size, length, seed):
    b, h, kv, d = size
    g = torch.Generator().manual_seed(seed)
    return [torch.randn(b, n, length, d, generator=g, dtype=torch.float64) for n in (h, kv, kv, h)]


def plain(size, length, seed, dtype=torch.float64):
    q, k, v, grad = (t.to(dtype) for t in inputs(size, length, seed))
    for t in (q, k, v):
        t.requires_grad_()
    out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    out.backward(grad)
    return [t.detach() for t in (out, q.grad, k.grad, v.grad)]


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
    cases = [(way, *size) for way in (*cp.KINDS, "plain tiles") for size in SIZES[world]]

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


def work(rank, ring, length, zigzag=True):
    return long_context.work(cp.visible_tile, rank, ring, length, zigzag)


def test_work_is_even_in_a_zigzag_only():
    for ring in (2, 3, 4, 8):
        even = [work(r, ring, 12) for r in range(ring)]
        assert len(set(even)) == 1 and sum(even) == 12 * ring * (12 * ring + 1) // 2
        lopsided = [work(r, ring, 12, zigzag=False) for r in range(ring)]
        assert sum(lopsided) == sum(even) and lopsided[-1] > lopsided[0] * ring


def test_blocks_that_are_masked_are_skipped(ranks):
    def pairs(rank):
        calls, attend = [], cp.attend

        def counted(q, kv, tile):
            n, m = q[:, :, tile.queries].shape[2], kv[:, :, :, tile.keys].shape[3]
            calls.append(n * (n + 1) // 2 if tile.causal else n * m)
            return attend(q, kv, tile)

        cp.attend = counted
        attention(rank, "ring", 4, (1, 2, 2, 4), 32, 0, torch.float32, rank >= 0)
        zigzag, calls[:] = sum(calls), []
        attention(rank, "ring", 4, (1, 2, 2, 4), 32, 0, torch.float32, False)
        return zigzag, sum(calls)

    assert ranks(4, pairs) == [(work(r, 4, 8), work(r, 4, 8, False)) for r in range(4)]


def test_the_plainest_ring_is_the_ring(ranks):
    """Bit for bit where both use the same kernel, and as PyTorch's attention."""
    size, length = (2, 4, 4, 8), 24

    def work(rank):
        q, k, v, grad = (t.chunk(3, dim=2)[rank] for t in inputs(size, length, 0))
        cp.fused_kernel = lambda q: None
        with Ledger({}) as ledger:
            plainest = cp.ring_attention(q, k, v, dist.group.WORLD)
        assert sum(wire for _, _, wire in ledger.sent.values()) == 2 * 2 * k.nbytes  # N - 1 hops
        assert torch.equal(plainest, cp.Ring(dist.group.WORLD, zigzag=False)(q, k, v))
        half = [t.bfloat16() for t in (q, k, v)]
        assert cp.ring_attention(*half, dist.group.WORLD).dtype == torch.bfloat16
        return plainest

    ours = torch.cat(ranks(3, work), dim=2)
    torch.testing.assert_close(ours, plain(size, length, 0)[0], rtol=1e-12, atol=1e-12)


def test_the_flash_kernel_is_for_what_it_takes(monkeypatch):
    capability = (8, 0)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)

    def kernel(device="cuda", dtype=torch.bfloat16, width=64):
        device = torch.device(device)
        return cp.fused_kernel(SimpleNamespace(device=device, dtype=dtype, shape=(1, 4, 8, width)))

    assert kernel() == kernel(dtype=torch.float16) == kernel(width=256) == "cuda"
    assert kernel("cpu") == kernel("cpu", torch.float64, 5) == "cpu"
    for other in (dict(device="meta"), dict(dtype=torch.float32), dict(width=12), dict(width=264)):
        assert kernel(**other) is None
    capability = (7, 5)
    assert kernel() is None


@pytest.mark.parametrize(
    "flags", ["--context 13", "--context 12 --experts 4 --balance-loss 0.1 --dtype bfloat16"]
)
def test_the_script_proves_itself(script, tmp_path, flags):
    out = tmp_path / "receipt.json"
    code, said = script(
        "context_parallel",
        f"--nproc 3 --steps 2 --dtype float64 --layers 2 --json {out} --quiet {flags}",
    )
    assert code == 0 and json.loads(out.read_text())["ok"], said


@pytest.mark.parametrize(
    "flags, words",
    [
        ("--nproc 3 --kind ulysses", "4 heads do not divide by 3 ranks"),
        ("--prefill 61", "--prefill is gone: train.py --cp 4 --sample N --prompt TEXT"),
        ("--rings 2", "--rings means nothing with --kind ring: use --kind ring-ulysses"),
        (
            "--kind ulysses --contiguous",
            "--contiguous means nothing with --kind ulysses: use --kind ring or gather",
        ),
        (
            "--nproc 2 --layers 1 --context 14 --experts 4 --balance-loss 0.1 --quiet",
            "a router's losses take no padding: --context 14 has 16 positions on 2 ranks",
        ),
    ],
)
def test_refusals(script, flags, words):
    code, said = script("context_parallel", flags)
    assert code == 2 and words in said and len(said.splitlines()) <= 2


def test_plot(script, tmp_path):
    pytest.importorskip("matplotlib")
    assert script("context_parallel", f"--plot {tmp_path / 'zigzag'} --nproc 3")[0] == 0
    assert (tmp_path / "zigzag.png").stat().st_size > 1000
