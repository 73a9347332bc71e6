"""What a ZeRO rank sends and holds by the paper (Rajbhandari et al. 2020, sections 3 and 7).

r = (N-1)/N, for the N ranks that split a copy; P parameters, with padding, of e bytes.
"""

from dataclasses import dataclass
from typing import NamedTuple

from harness.presets import ceil
from receipts.formulas import (
    SCALAR,
    Group,
    add,
    held,
    parameters_of,
    summed,
)


def model_states(stage, n, weights=2, gradients=2, states=12):
    """Bytes a parameter that each of n ranks holds, as (weights, gradients, optimizer states), in a
    stage of ZeRO: the table of the paper's section 3."""
    if stage >= 1:
        states /= n
    if stage >= 2:
        gradients /= n
    if stage >= 3:
        weights /= n
    return weights, gradients, states


class Split(NamedTuple):
    """The ranks that hold the same weights."""

    inside: Group  # those that split a copy
    across: Group | None = None  # those with the same shards, of other copies


def expected(sizes, group, stage, flags, scatter, passes, splits, partial=(), scalars=2):
    """(sent, held).

    group     the data-parallel ranks, which sum the `scalars`: the loss and the norm
    flags     bucket_mb, reduce_once, keep_gathered and offload, as of zero.py and train.py
    scatter   the operation that a reduce-scatter is counted as
    passes    [(kind, stage)] of the rank's forwards ("F") and backwards ("B"; in two parts: "I",
              then "W", which completes the gradients) in their order
    splits    the Split of all weights; or that of most, and that of the experts
    partial   Groups over which gradients are partial sums after backward"""
    text = "the loss and the norm, 8 bytes each" if scalars == 2 else "the loss, 8 bytes"
    sent = summed(group, scalars * SCALAR, text)
    buckets = buckets_of(sizes, stage, flags, splits)
    each = stage >= 2 and not flags.reduce_once
    gathers = [1] * len(buckets)
    text = "r P e"
    if stage == 3:
        gathers, _ = gathered(sizes, buckets, passes, not flags.keep_gathered)
        action = "micro-batch" if flags.keep_gathered else "forward and a backward"
        text = f"r P e a {action}, less a unit that stays; a tied matrix twice"
    for split in splits:
        gradients = weights = shards = 0
        for bucket, times in zip(buckets, gathers):
            if bucket.split is split:
                completed = [1 for kind, at in passes if kind in "BW" and at in bucket.stages]
                gradients += bucket.size * (len(completed) if each else 1)
                weights += bucket.size * times
                shards += bucket.length
        if stage == 0:
            sent = add(sent, summed(split.inside, gradients * sizes.reduced, "2 r P e"))
            continue
        name, r = split.inside.name, 1 - 1 / split.inside.ranks
        reduced = "r P e a micro-batch" if each else "r P e"
        sent[scatter, name] = r * gradients * sizes.reduced, reduced
        sent["all_gather", name] = r * weights * sizes.e, text
        if split.across:
            sent |= summed(split.across, shards * sizes.reduced, "2 r P/N e, r of the copies")
    for group in partial:
        shards = sum(bucket.length for bucket in buckets if bucket.partial == group.name)
        sent |= summed(group, shards * sizes.reduced, "2 r P/N e of partial sums")
    return sent, held(sizes) | states_held(sizes, stage, flags, buckets)


def states_held(sizes, stage, flags, buckets):
    """{kind: (bytes, formula)} of weights, gradients and the optimizer's states."""
    copies, states = sizes.moments + sizes.masters, [0, 0, 0]
    for bucket in buckets:
        elements = sizes.e, sizes.reduced, copies * sizes.master
        each = model_states(stage, bucket.ranks, *elements)
        states = [total + bucket.size * size for total, size in zip(states, each)]
        states[2] -= bucket.padding * sizes.moments * sizes.master  # padding has no moments
    texts = ["P e / N" if stage >= first else "P e" for first in (3, 2, 1)]
    texts[2] = f"{copies} {texts[2]}" + (", on the host" if getattr(flags, "offload", 0) else "")
    return dict(zip(("parameters", "gradients", "optimizer"), zip(states, texts)))


# --- buckets


@dataclass
class Bucket:
    """Parameters that are split as one flat tensor."""

    split: Split
    ranks: int  # that split it
    stages: tuple  # of this rank's pipeline stages, those whose backward fills it
    units: tuple  # that gather it in stage 3
    partial: str | None  # the group over which its gradient is a partial sum
    elements: int = 0

    @property
    def length(self):
        """Elements of a shard."""
        return ceil(self.elements, self.ranks)

    @property
    def size(self):
        """Elements, with the padding that makes all shards equal."""
        return self.length * self.ranks

    @property
    def padding(self):
        """Elements of this rank's shard that belong to no parameter."""
        before = self.split.inside.rank * self.length if self.ranks > 1 else 0
        return self.length - min(max(self.elements - before, 0), self.length)


def buckets_of(sizes, stage, flags, splits):
    """The Buckets of a rank: parameters of one kind, from the last to the first, of at most
    --bucket-mb, in stage 3 of any size."""
    most = float("inf") if stage == 3 else int(flags.bucket_mb * 2**20) // sizes.master
    buckets, latest, room = [], {}, {}
    of_stages = [set(units) for units in units_of(sizes)]
    for parameter in reversed(parameters_of(sizes)):
        split = splits[-1] if parameter.expert else splits[0]
        units = parameter.users
        stages = tuple(i for i, own in enumerate(of_stages) if not own.isdisjoint(units))
        tied = sizes.config.tied and parameter.name == "embed.token.weight"
        partial = None
        if tied and sizes.embedding != sizes.head:
            partial = "tied"  # another stage has the same matrix, at the other end of the model
        elif sizes.sp and not parameter.cut:
            partial = "tp"
        kind = splits.index(split), stages, units if stage == 3 else (), partial
        if parameter.elements > room.get(kind, -1):
            latest[kind] = Bucket(split, split.inside.ranks if stage else 1, *kind[1:])
            room[kind] = most
            buckets.append(latest[kind])
        latest[kind].elements += parameter.elements
        room[kind] -= parameter.elements
    return buckets


def units_of(sizes):
    """The units of each stage, in the order of forward."""
    units = [[f"blocks.{i}" for i in layers] for layers in sizes.stages]
    if sizes.embedding:
        units[0].insert(0, "embed")
    if sizes.head:
        units[-1].append("head")
    return units


def gathered(sizes, buckets, passes, reshard):
    """(how often each bucket is gathered in a step of stage 3, the most elements that are there at
    one time). Each use of a unit gathers its buckets that are not there. A forward leaves its last
    unit for the action that follows (without `reshard` all units, for their backward)."""
    times, peak = [0] * len(buckets), 0
    there = set()  # units whose buckets are gathered
    last_of_forward = None

    def needed(bucket):
        return not there.isdisjoint(bucket.units)

    for kind, stage in passes:
        units = units_of(sizes)[stage]
        if kind != "F":
            units = units[::-1]
        if last_of_forward not in units[:1] or kind == "W":
            there.discard(last_of_forward)
        last_of_forward = None
        if kind == "W":  # the weights' gradients are made without the weights
            continue
        before = None
        for unit in units:
            for i, bucket in enumerate(buckets):
                times[i] += unit in bucket.units and not needed(bucket)
            there.add(unit)
            peak = max(peak, sum(bucket.size for bucket in buckets if needed(bucket)))
            if reshard or kind != "F":
                there.discard(before)  # only now: the next unit is gathered before it is freed
                before = unit
        if kind != "F":
            there.discard(before)
        elif reshard:
            last_of_forward = before
    return times, peak
