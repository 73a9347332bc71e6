"""Packed documents: a sequence holds several texts, and attention stays within each.

    tokens     the cat sat | one two | to be or not to be      a token sees its own document, up to
    starts      0   0   0     3   3     5  5  5  5  5  5       itself

Ring attention sends every key to every rank, although a rank needs only the keys of documents that
it holds a part of. And its zigzag balances one long document, but not several of different lengths.

Split     8 N equal chunks for N ranks, 8 for each. The chunk with the most work, pairs of a query
          and a key, goes first, to the rank that has the least so far. All rows are cut alike. One
          run of tokens per rank (even=False) sends much less, but the work is uneven.
Sent      Per block, K and V of the G tokens that a rank lends to others (one lent to two ranks
          counts twice), and dK and dV of the A tokens that it borrows. The plain form sends
          2 (G + A) e C_kv bytes, and keeps borrowed keys for backward. DocumentRing borrows again
          in backward: (4 G e + 2 A a) C_kv. C_kv is the width of K, e bytes per element of it,
          a = max(e, 4) of dK. G and A are small if documents are short beside a chunk, T / 8N.
Backward  As in the ring, tile by tile. A key's gradient goes straight to the rank that holds it.
Cost      A kernel per tile, dozens in each layer: worth it from some hundred tokens a document. A
          plan for each batch, on the host: some milliseconds, 0.1 s for 64 thousand tokens.

    torchrun --nproc_per_node=4 -m advanced.packed_documents
    (needs model.py, and context_parallel.py, whose Ring it extends)

Llama Team 2024, The Llama 3 herd of models, arXiv:2407.21783, sections 3.2 and 3.3.2 (the mask).
MagiAttention, github.com/SandAI-org/MagiAttention: work dealt out, only used keys travel.
"""

import argparse
import math
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.autograd.function import once_differentiable

from context_parallel import Ring, Tile, attend_to_all, tile_gradients

# --- the plainest form: which keys a rank needs, and the mask of its attention


def plain_document_attention(q, k, v, starts, held, group):
    """q, k, v (B, H, T', D) of this rank's tokens -> attention within documents (B, H, T', D).

    starts (B, T): where each token's document starts. held (n, T'): the positions of each rank's
    tokens, consecutive ones, or those of deal_tokens below. Both on q's device. If one row needs
    the key of a position, that position's keys of all rows are sent."""
    check_documents(starts)
    rank, ranks = dist.get_rank(group), range(dist.get_world_size(group))

    def used(user, owner):  # (T',): which of the owner's keys the user needs, in any row
        return visible(starts, held[user], held[owner]).any(dim=1).any(dim=0)

    kv = torch.cat((k, v), dim=-1).movedim(2, 0)  # (T', B, H, 2 D)
    sent = [kv[used(user, rank)] for user in ranks]
    keys = [held[owner][used(rank, owner)] for owner in ranks]  # their positions
    counts = [len(part) for part in sent], [len(part) for part in keys]
    received = ExchangeKeys.apply(torch.cat(sent), *counts, group)
    k, v = received.movedim(0, 2).chunk(2, dim=-1)
    mask = visible(starts, held[rank], torch.cat(keys)).unsqueeze(1)  # the same for all heads
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)


def visible(starts, queries, keys):
    """Whether query i of row b sees key j, a key of the same document and not later: (B, Tq, Tk).
    queries, keys: positions."""
    same_document = starts[:, queries].unsqueeze(2) == starts[:, keys].unsqueeze(1)
    return same_document & (keys <= queries.unsqueeze(1))


class ExchangeKeys(torch.autograd.Function):
    """sent (sum(send_counts), ...): send_counts[r] keys go to rank r, and receive_counts[r] come
    from it. In backward their gradients go back; autograd adds up those of a key sent to several
    ranks."""

    @staticmethod
    def forward(ctx, sent, send_counts, receive_counts, group):
        ctx.way_back = receive_counts, send_counts, group
        received = sent.new_empty(sum(receive_counts), *sent.shape[1:])
        sent = sent.contiguous()
        dist.all_to_all_single(received, sent, receive_counts, send_counts, group=group)
        return received

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient):
        return ExchangeKeys.apply(gradient, *ctx.way_back), None, None, None


# --- in a model of yours: even work, keys travel while a rank computes, and tiles need no mask


class DocumentRing(Ring):
    """In place of attention's core, used as Ring: ring(q, k, v, starts). starts (B, T), on the
    host, of whole sequences: where each token's document starts, as 0 0 0 3 3. positions() depend
    on them, and so differ from batch to batch. In its document a token is at position - its start.

    even  False: a rank holds one run of tokens, and its work is not balanced"""

    chunks = 8  # per rank. More of them: more even, but more tiles, and more keys of others

    def __init__(self, group, even=True):
        super().__init__(group, zigzag=even)  # for Ring.check: whether T' is cut into chunks
        self.even = even
        dist.barrier(group)  # nccl connects all ranks in a first message. Later some send nothing

    def positions(self, length, starts, multiple=1):
        return deal_tokens(length, self.n, starts, self.even, multiple)[self.rank]

    def forward(self, q, k, v, starts):
        self.check(q, k, v, self.chunks)
        check_starts(starts, q, self.n)
        plan = plan_of_batch(self.rank, self.n, q.shape[2], self.even, starts, q.device)
        # All rows as one, (1, H, B T', D): so a tile of one row is a run of tokens
        q, k, v = (t.transpose(0, 1).flatten(1, 2).unsqueeze(0) for t in (q, k, v))
        y = DocumentRingAttention.apply(q, k, v, self.group, plan)
        return y.squeeze(0).unflatten(1, (len(starts), -1)).transpose(0, 1)


class DocumentRingAttention(torch.autograd.Function):
    """As RingAttention. But keys are not handed on around the ring: in step s they go straight to
    the rank s after this one, and their gradients straight home."""

    @staticmethod
    def forward(ctx, q, k, v, group, plan):
        kv_by_rank = bring_used_keys(torch.stack((k, v)), group, plan)
        out, lse = attend_to_all(q, kv_by_rank, plan.tiles)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.group, ctx.plan = group, plan
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        q, k, v, out, lse = ctx.saved_tensors
        group, plan = ctx.group, ctx.plan
        rank, n = dist.get_rank(group), dist.get_world_size(group)
        kv = torch.stack((k, v))
        dq, dkv = torch.zeros_like(q, dtype=lse.dtype), torch.zeros_like(kv, dtype=lse.dtype)
        # Gradients of lent keys come home during the next tiles: receive() waits for them
        receive = lent = None
        for step, (owner, owner_kv) in enumerate(bring_used_keys(kv, group, plan)):
            part = dkv if step == 0 else torch.zeros_like(dkv)  # gradients of the owner's keys
            for tile in plan.tiles[owner]:
                dq_tile, *dkv_tile = tile_gradients(grad, q, owner_kv, out, lse, tile)
                dq[:, :, tile.queries] += dq_tile
                part[:, :, :, tile.keys] += torch.stack(dkv_tile)
            if receive:
                dkv[:, :, :, lent] += receive()
            if step > 0:  # give back gradients of borrowed keys, and get those of lent ones
                user = (rank + step) % n
                sent, lent = part[:, :, :, plan.borrowed[owner]], plan.lent[user]
                receive = start_messages(sent, owner, len(lent), user, group)
            del part  # before the next one is made
        if receive:
            dkv[:, :, :, lent] += receive()
        return dq.to(q.dtype), *dkv.to(k.dtype), None, None


def bring_used_keys(kv, group, plan):
    """Yield (rank, its keys and values) for all ranks, beginning with this one. Of another rank
    only the keys that tiles use are there; other places hold anything. While the caller computes,
    the next ones travel."""
    rank, n = dist.get_rank(group), dist.get_world_size(group)
    owner, owner_kv = rank, kv
    arrived = torch.zeros_like(kv)  # one buffer for all other ranks, one after the other
    for step in range(1, n):
        user, next_owner = (rank + step) % n, (rank - step) % n
        sent, places = kv[:, :, :, plan.lent[user]], plan.borrowed[next_owner]
        receive = start_messages(sent, user, len(places), next_owner, group)
        yield owner, owner_kv
        arrived[:, :, :, places] = receive()
        owner, owner_kv = next_owner, arrived
    yield owner, owner_kv


def start_messages(sent, target, count, source, group):
    """Start to send keys and values, or their gradients, to `target`: sent (2, 1, H_kv, any number,
    D). Start to receive those of `count` keys from `source`. Returns a function that waits, and
    returns what was received. Empty messages don't travel."""
    received = sent.new_empty(*sent.shape[:3], count, sent.shape[-1])
    send = dist.P2POp(dist.isend, sent, group=group, group_peer=target)
    receive = dist.P2POp(dist.irecv, received, group=group, group_peer=source)
    not_empty = [message for message in (send, receive) if message.tensor.numel()]
    messages = dist.batch_isend_irecv(not_empty) if not_empty else []

    def wait():
        while messages:
            messages.pop().wait()
        return received

    return wait


# --- who computes what: tokens dealt out, tiles, and the keys that these need


def deal_tokens(length, n, starts, even=True, multiple=1):
    """(n, T'): the positions that each rank of a ring of n holds. even=False: consecutive ones.
    length, multiple: as in context_parallel.held_positions."""
    per_rank = DocumentRing.chunks if even else 1
    size = math.ceil(length / (n * per_rank * multiple)) * multiple  # tokens per chunk
    chunks = torch.arange(n * per_rank * size).view(-1, size)
    if not even:
        return chunks
    pairs = (torch.arange(starts.shape[1]) + 1 - starts).sum(0)  # of each query, in all rows
    work = F.pad(pairs, (0, chunks.numel() - len(pairs))).view(-1, size).sum(1)
    held, load = [[] for _ in range(n)], [0] * n
    for chunk in work.argsort(descending=True, stable=True).tolist():
        with_room = [rank for rank in range(n) if len(held[rank]) < per_rank]
        rank = min(with_room, key=load.__getitem__)
        held[rank].append(chunk)
        load[rank] += work[chunk].item()
    return torch.stack([chunks[sorted(numbers)].flatten() for numbers in held])


# A tile is a run of queries with a run of keys. Say two documents of 4 tokens are on two ranks:
# this one has tokens 2 3 6 7, the other 0 1 4 5. The tiles of this rank's queries, by positions:
#
#     starts         0 0 0 0 4 4 4 4
#     own_tiles      2 3 with 2 3, causal        6 7 with 6 7, causal
#     other_tiles    2 3 with 0 1                6 7 with 4 5
#
# A Tile has places instead: here queries 0 1 and 2 3. They count a rank's tokens through all rows,
# from 0 to B T'


def own_tiles(held, starts):
    """Of a rank's queries with its own keys, both at the positions `held`: a tile per document."""
    tiles, real = [], held[held < starts.shape[1]]  # without padding
    for row, start in enumerate(starts[:, real]):
        _, sizes = start.unique_consecutive(return_counts=True)  # of documents here
        end = row * len(held)
        for size in sizes.tolist():
            begin, end = end, end + size
            tiles.append(Tile(slice(begin, end), slice(begin, end), causal=True))
    return tiles


def other_tiles(queries, keys, starts):
    """Of a rank's queries with another rank's keys, both given by their positions, in order. No key
    of the other rank lies within a run of this rank's tokens. So all queries of one run and one
    document see the same of those keys: a tile without a mask."""
    tiles, real = [], queries[queries < starts.shape[1]]
    for row, start in enumerate(starts[:, real]):
        # Query i sees keys[first[i] : stop[i]], from its document's start up to itself
        first, stop = torch.searchsorted(keys, start), torch.searchsorted(keys, real)
        seen, sizes = torch.stack((first, stop)).unique_consecutive(dim=1, return_counts=True)
        offset = end = row * len(queries)
        for (first_key, stop_key), size in zip(seen.T.tolist(), sizes.tolist()):
            begin, end = end, end + size
            if first_key < stop_key:
                tile_keys = slice(offset + first_key, offset + stop_key)
                tiles.append(Tile(slice(begin, end), tile_keys, causal=False))
    return tiles


class Plan(NamedTuple):
    tiles: list  # tiles[r]: of this rank's queries with rank r's keys
    lent: list  # lent[r]: the keys here that rank r uses, counted through all rows
    borrowed: list  # borrowed[r]: the keys of rank r that are used here


def plan_of_batch(rank, n, tokens, even, starts, device):
    """find_plan, once for all layers. The plan is an attribute of `starts`: a layer that runs again
    in backward finds it there, although other batches came between."""
    where = rank, n, tokens, even
    known_where, known_starts, plan = getattr(starts, "known_plan", (None, starts, None))
    unchanged = torch.equal(starts, known_starts)  # starts may be changed in place
    if where != known_where or not unchanged:
        plan = find_plan(*where, starts, device)
        starts.known_plan = where, starts.clone(), plan
    return plan


def find_plan(rank, n, tokens, even, starts, device="cpu"):
    """This rank's Plan. tokens: T'."""
    check_documents(starts)
    held, count = deal_tokens(n * tokens, n, starts, even), len(starts) * tokens
    plan = Plan([], [], [])
    for other in range(n):
        if other == rank:  # its own keys don't travel
            tiles, used_here, used_there = own_tiles(held[rank], starts), [], []
        else:
            tiles = used_here = other_tiles(held[rank], held[other], starts)
            used_there = other_tiles(held[other], held[rank], starts)  # of the keys here
        plan.tiles.append(tiles)
        plan.borrowed.append(used_keys(used_here, count).to(device))
        plan.lent.append(used_keys(used_there, count).to(device))
    return plan


def used_keys(tiles, count):
    used = torch.zeros(count, dtype=torch.bool)
    for tile in tiles:
        used[tile.keys] = True
    return used.nonzero().flatten()


# --- mistakes that would be silent: refused


def check_starts(starts, q, n):
    if len(starts) != len(q) or starts.shape[1] > n * q.shape[2]:
        found = f"starts {tuple(starts.shape)} with q {tuple(q.shape)} on {n} ranks"
        raise ValueError(f"{found}: give starts (B, T) of the whole batch, as to positions()")


def check_documents(starts):
    """Refuses documents' numbers (0 0 0 1 1), or positions in documents (0 1 2 0 1), as starts."""
    at = torch.arange(starts.shape[1], device=starts.device)
    if not torch.equal(starts, torch.where(starts == at, at, 0).cummax(dim=1).values):
        raise ValueError("starts must hold, for each token, the position of its document's first")


# --- demo ---

if __name__ == "__main__":  # importing this file needs no model.py
    from context_parallel import parallelize_context, shard_sequence
    from model import GPT, IGNORE, Config, OneProcess, Sent, join_ranks, leave, text_batch


def main():
    parser = argparse.ArgumentParser(description="train a GPT with each form, and prove it")
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--context", type=int, default=91, help="tokens of a sequence")
    args = parser.parse_args()
    device = join_ranks()
    n, group = dist.get_world_size(), dist.group.WORLD
    whole_chunks = 8 * n * math.ceil(args.context / 8 / n)  # the plain form pads nothing
    for even in (False, True):
        train(PlainDocuments(group, even), 4, whole_chunks, args.steps, device)
    for even in (False, True):
        train(DocumentRing(group, even), 2, args.context, args.steps, device)
    leave()


class PlainDocuments(DocumentRing):
    def forward(self, q, k, v, starts):
        held = deal_tokens(starts.shape[1], self.n, starts, self.even).to(q.device)
        return plain_document_attention(q, k, v, starts.to(q.device), held, self.group)


def train(core, kv_heads, context, steps, device):
    rank, n = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    config = Config(layers=2, heads=4, kv_heads=kv_heads, width=32, context=context)
    model = GPT(config).to(device, torch.float64)
    one = OneProcess(model, torch.optim.AdamW)
    one.model.register_forward_pre_hook(  # by model.py's own mask
        lambda _, x, options: (x, options | {"starts": starts}), with_kwargs=True
    )
    parallelize_context(model, core)
    optimizer = torch.optim.AdamW(model.parameters())
    for step in range(steps):
        tokens, targets, count = text_batch(step, 5, context, device)
        first = (tokens == ord("\n")).cpu()  # a line is a document
        starts = torch.where(first, torch.arange(context), 0).cummax(dim=1).values
        held = core.positions(context, starts=starts)
        x, y = shard_sequence(tokens, held), shard_sequence(targets, held, fill=IGNORE)
        positions = held.clamp(max=context - 1).to(device)  # padding must have some position
        optimizer.zero_grad()
        with Sent() as sent:
            loss = model(x, positions, y, count, starts=starts)
            loss.backward()
            for p in model.parameters():
                dist.all_reduce(p.grad)  # each rank has the part of its tokens
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        loss = loss.detach()
        dist.all_reduce(loss)
        alone = one.train_step(tokens, targets, count, 0.5)
        if step == 0 and rank == 0:
            print(f"{type(core).__name__}, even: {core.even}, {n} ranks, {context} tokens")
        one.compare(step, loss, alone, model.named_parameters())
    text, of_layer = keys_sent(core, starts, kv_heads)
    gradients = 2 * (n - 1) / n * sum(p.nbytes for p in model.parameters())
    one.prove(sent, f"L {text} + 2 r P e", 2 * of_layer + gradients)


def keys_sent(core, starts, kv_heads):
    """What this rank sends of a layer's keys, values and their gradients, as text and in bytes, by
    what each query sees."""
    rank, context, plain = core.rank, starts.shape[1], isinstance(core, PlainDocuments)
    held = [part[part < context] for part in deal_tokens(context, core.n, starts, core.even)]

    def used(user, owner):  # how many of the owner's keys, in all rows
        seen = visible(starts, held[user], held[owner]).any(dim=1)  # (B, Tk)
        # The plain form sends a key of all rows if one row needs it
        return len(starts) * seen.any(dim=0).sum().item() if plain else seen.sum().item()

    others = [other for other in range(core.n) if other != rank]
    lent = sum(used(other, rank) for other in others)  # G
    borrowed = sum(used(rank, other) for other in others)  # A
    width = 8 * kv_heads  # C_kv, for heads of 8. e and a are 8 bytes, too
    if plain:  # which keeps the keys for backward
        return "2 (G + A) e C_kv", 2 * (lent + borrowed) * 8 * width
    return "(4 G e + 2 A a) C_kv", (4 * lent + 2 * borrowed) * 8 * width


if __name__ == "__main__":
    main()
