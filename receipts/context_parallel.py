"""What context parallelism sends, by its formulas, and each rank's share of the work: for train.py.
The technique's functions come in as arguments."""

import itertools
import math

from harness import documents
from receipts.formulas import held, summed

LENGTHS = (9, 3, 120, 1, 30, 6, 2, 14, 5, 40, 4, 22)  # tokens of documents, for pictures and tests


# --- groups


def grid(kind, n, rings=None, heads=0):
    """n ranks as (R, U): rings of R ranks, all-to-alls of U. rings: R for kind ring-ulysses, the
    length of a ring; by default the largest divisor of n up to its square root.

    Raises ValueError for rings that do not divide n, and for heads that U does not divide."""
    if kind == "ring-ulysses":
        ring = rings or max(r for r in range(1, math.isqrt(n) + 1) if n % r == 0)
    else:
        ring = 1 if kind == "ulysses" else n
    ulysses = n // ring
    if ring * ulysses != n:
        raise ValueError(f"rings of {ring} do not divide {n} ranks: choose another number")
    if heads % ulysses:
        what = f"{heads} heads do not divide by {ulysses} ranks"
        raise ValueError(f"Ulysses deals heads out, and {what}: change one of them")
    return ring, ulysses


# --- the receipt


def expected(sizes, group, kind, rings, used=None):
    """(sent, held). used: of tokens_used, with documents."""
    config, e = sizes.config, sizes.e
    ring, ulysses = grid(kind, group.ranks, rings)
    names = ("ring", "ulysses") if kind == "ring-ulysses" else (group.name, group.name)
    tokens, kv_heads = sizes.sequences * sizes.length, max(config.kv_heads // sizes.tp, 1)
    head_size, forwards = config.head_dim, sizes.forwards
    sent = {}
    if ulysses > 1:
        copies = ulysses // math.gcd(kv_heads, ulysses)
        heads = 2 * config.heads // sizes.tp + 2 * kv_heads * copies  # q and the result, k and v
        size = (1 - 1 / ulysses) * tokens * heads * head_size * e
        text = f"4 r (B T / N) (C + C_kv) e a block; U = {ulysses}, r = (U-1)/U"
        sent["all_to_all", names[1]] = (forwards + 1) * size, text
        kv_heads = kv_heads * copies // ulysses
        tokens *= ulysses
    width = 2 * kv_heads * head_size  # of keys and values
    kv, c_kv = tokens * width, "C_kv / U" if ulysses > 1 else "C_kv"
    if used:
        given, taken = used
        text = f"(4 G e + 2 A a) {c_kv} a block: K, V of G tokens that others use, dK, dV of A"
        size = (forwards + 1) * given * e + taken * sizes.exact
        sent["send", names[0]] = size * width, text
    elif kind in ("ring", "ring-ulysses") and ring > 1:
        text = f"(4 r e + 2 a) B T {c_kv} a block: K, V twice, dK, dV; R = {ring}, r = (R-1)/R"
        keys_and_values = (forwards + 1) * (ring - 1) * kv * e
        sent["send", names[0]] = keys_and_values + ring * kv * sizes.exact, text
    elif kind == "gather":
        sent["all_gather", names[0]] = forwards * (ring - 1) * kv * e, "2 r B T C_kv e a block"
        sums = (ring - 1) * kv * sizes.exact
        sent["reduce_scatter", names[0]] = sums, "2 r B T C_kv a a block"
    sent = {key: (sizes.blocks * size, text) for key, (size, text) in sent.items()}
    if config.experts and config.balance_loss:
        layers = forwards * sizes.blocks * sizes.sequences
        sums = layers * 2 * config.experts * sizes.exact
        sent |= summed(group, sums, "the routers' sums over sequences")
    return sent, held(sizes, activations="1/N of one process's")


def tokens_used(find_plan, batches, args, *where):
    """Of how many of this rank's tokens others use the keys, and of how many of theirs this rank,
    in micro-batches with --documents. find_plan: packed_documents.py's, with its arguments."""
    lent = borrowed = 0
    for tokens, *_ in batches:
        plan = find_plan(*where, documents.starts_of(tokens, args))
        lent += sum(map(len, plan.lent))
        borrowed += sum(map(len, plan.borrowed))
    return lent, borrowed


def work(tiles):
    """How many pairs of a query and a key a rank computes. tiles: with each rank's keys."""
    pairs = 0
    for queries, keys, causal in itertools.chain(*tiles):
        height, width = queries.stop - queries.start, keys.stop - keys.start
        pairs += height * (height + 1) // 2 if causal else height * width
    return pairs


def shares(tiles):
    """Each rank's work, relative to an even share. tiles: of each rank."""
    pairs = [work(of_rank) for of_rank in tiles]
    return [p * len(pairs) / sum(pairs) for p in pairs]
