"""packed_documents.py against attention in each document alone, and what it sends."""

import itertools
import math
import random
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from reference import case
from test_context_parallel import attention, inputs, plain, whole

import context_parallel as cp
import packed_documents as pd
from receipts import context_parallel as long_context
from trainer.document_core import DocumentCore
from ulysses import Ulysses

# Lengths of documents, a row each: of one token, over all ranks, ending where a rank's tokens end
LENGTHS = [[1, 15, 1, 1, 30, 16], [64], [16, 47, 1]]
DOCUMENTS = [
    (slice(row, row + 1), end - length, end)
    for row, lengths in enumerate(LENGTHS)
    for length, end in zip(lengths, itertools.accumulate(lengths))
]


def starts_of(rows):
    rows = [zip(lengths, itertools.accumulate(lengths)) for lengths in rows]
    return torch.tensor([[end - n for n, end in row for _ in range(n)] for row in rows])


def test_documents_are_each_alone(ranks):
    """And each of two planted bugs is seen: a document that sees a token too much or too little."""
    size, starts = (3, 4, 2, 8), starts_of(LENGTHS)
    ways = ("ring", "ulysses", "ring-ulysses", "contiguous", "plain tiles", "efficient")

    def work(rank):
        found, changed, rest = [], torch.zeros_like(starts), (4, size, 64, 7, torch.float64)
        for way in ways:  # in one tensor, which held one document a row before
            with case(way):
                attention(rank, way, *rest, changed.zero_())
                found.append(attention(rank, way, *rest, changed.copy_(starts)))
        for off in ((starts - 1).clamp(min=0), torch.where(starts > 0, starts + 1, 0)):
            with mock.patch.multiple(pd, **off_by_one(off)):
                found.append(attention(rank, "ring", 4, size, 64, 7, torch.float64, starts))
        return found

    expected = plain(size, 64, 7, documents=DOCUMENTS)
    *right, late, early = zip(*ranks(4, work), strict=True)
    for way, parts in zip(ways, right, strict=True):
        with case(way):
            for ours, theirs in zip(whole(parts, 64), expected):
                torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-12)
    for parts in (late, early):
        assert all((a - b).abs().max() > 1e-3 for a, b in zip(whole(parts, 64), expected))


def off_by_one(starts):
    """The functions that make tiles, with other borders between documents."""
    own, other = pd.own_tiles, pd.other_tiles
    return {
        "own_tiles": lambda held, _: own(held, starts),
        "other_tiles": lambda queries, keys, _: other(queries, keys, starts),
    }


def test_documents_send_the_keys_that_tiles_use(ranks):
    """No others, in any batch. Planted: one key too few."""
    rng = random.Random(5)
    for ring in (1, 2, 3, 8):
        for rows, total in ((1, 9), (3, 100), (2, 256)):
            starts, tokens = starts_of(random_documents(rng, rows, total)), 8
            tokens *= math.ceil(total / (tokens * ring))
            plans = [pd.find_plan(rank, ring, tokens, True, starts) for rank in range(ring)]
            for rank, plan in enumerate(plans):
                for other in range(ring):
                    used = torch.zeros(rows * tokens, dtype=torch.bool)
                    for tile in plan.tiles[other] if other != rank else ():
                        used[tile.keys] = True
                    assert torch.equal(plan.borrowed[other], used.nonzero().flatten())
                    assert torch.equal(plan.borrowed[other], plans[other].lent[rank])

    page = starts_of([long_context.LENGTHS])  # docs/learn/long-sequences.md has the figure
    plans = [pd.find_plan(rank, 4, 64, True, page) for rank in range(4)]
    sent = sum(len(keys) for plan in plans for keys in plan.lent)
    assert sent / (3 * 256) == pytest.approx(0.52, abs=0.005)

    size, starts, find_plan = (3, 4, 2, 8), starts_of(LENGTHS), pd.find_plan

    def one_less(*where):
        plan = find_plan(*where)

        lent, borrowed = ([keys[1:] for keys in of] for of in (plan.lent, plan.borrowed))
        return plan._replace(lent=lent, borrowed=borrowed)

    def work(rank):
        with mock.patch.object(pd, "find_plan", one_less):
            return attention(rank, "ring", 4, size, 64, 7, torch.float64, starts)

    expected = plain(size, 64, 7, documents=DOCUMENTS)
    assert all((a - b).abs().max() > 1e-3 for a, b in zip(whole(ranks(4, work), 64), expected))


def test_one_rank_and_an_evaluation(ranks):
    """Also on one rank tokens are cut by positions(). Starts may be made in inference_mode."""

    def work(rank):
        ring, starts = pd.DocumentRing(dist.new_subgroups(1)[0]), torch.zeros(1, 10).long()
        q = torch.ones(1, 2, 10, 8)
        pytest.raises(ValueError, ring, q, q, q, starts)
        with torch.inference_mode():
            q = torch.ones(1, 2, len(ring.positions(10, starts=starts)), 8)
            return ring(q, q, q, starts.clone())[0, 0, :10, 0].tolist()

    assert ranks(1, work) == [[1.0] * 10]


def test_the_plain_form_is_attention_within_documents(ranks):
    """Of any cut; its gradients, too."""
    size, starts = (3, 4, 4, 8), starts_of(LENGTHS)
    held = torch.randperm(64, generator=torch.Generator().manual_seed(1)).view(4, 16)

    def work(rank):
        q, k, v, grad = (t[:, :, held[rank]] for t in inputs(size, 64, 7))
        parts = [t.clone().requires_grad_() for t in (q, k, v)]
        out = pd.plain_document_attention(*parts, starts, held, dist.group.WORLD)
        out.backward(grad)
        return held[rank], [out.detach(), *(t.grad for t in parts)]

    expected = plain(size, 64, 7, documents=DOCUMENTS)
    for ours, theirs in zip(whole(ranks(4, work), 64), expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-12)


def test_what_is_no_start_is_refused_in_every_kind(ranks):
    """Documents' numbers, positions in them, a document that goes on after another."""

    def work(rank):
        group, q = dist.group.WORLD, torch.ones(1, 2, 8, 8)
        held = torch.arange(8).view(1, -1)
        kinds = pd.DocumentRing(group), DocumentCore(), Ulysses(group, DocumentCore())
        for wrong in ("00011111", "01201012", "01033333"):
            starts = torch.tensor([[int(start) for start in wrong]])
            for attend in kinds:
                with pytest.raises(ValueError, match="position of its document's first"):
                    attend(q, q, q, starts)
            with pytest.raises(ValueError, match="position of its document's first"):
                pd.plain_document_attention(q, q, q, starts, held, group)

    ranks(1, work)


def random_documents(rng, rows, total):
    """Lengths of documents that fill rows of `total` tokens."""
    found = []
    for _ in range(rows):
        lengths = []
        while sum(lengths) < total:
            lengths.append(min(int(rng.lognormvariate(2, 1.5)) + 1, total - sum(lengths)))
        found.append(lengths)
    return found


def test_documents_compute_their_own_pairs_only_and_evenly():
    """A zigzag's two chunks fail, where one document is long."""
    rng = random.Random(3)
    for _ in range(20):
        lengths, total = [rng.randrange(600, 900)], 1024
        while sum(lengths) < total:
            lengths.append(min(int(rng.lognormvariate(3, 1.5)) + 1, total - sum(lengths)))
        rng.shuffle(lengths)
        starts = starts_of([lengths])
        for ring in (2, 4, 8):
            plans = [pd.find_plan(rank, ring, total // ring, True, starts) for rank in range(ring)]
            tiles = [plan.tiles for plan in plans]
            assert sum(map(long_context.work, tiles)) == sum(n * (n + 1) // 2 for n in lengths)
            assert max(long_context.shares(tiles)) < 1.1
    starts = starts_of([[600, *[8] * 53]])
    zigzag = [cp.held_positions(total, rank, 8) for rank in range(8)]
    pairs = [(where + 1 - starts[0, where]).sum().item() for where in zigzag]
    assert max(pairs) > 2 * sum(pairs) / 8


def test_dealing_two_chunks_of_one_document_makes_a_zigzag(monkeypatch):
    monkeypatch.setattr(pd.DocumentRing, "chunks", 2)
    for ring in (1, 2, 5, 8):
        dealt = pd.deal_tokens(16 * ring, ring, starts_of([[16 * ring]]))
        zigzag = [cp.held_positions(16 * ring, rank, ring) for rank in range(ring)]
        assert torch.equal(dealt, torch.stack(zigzag))
