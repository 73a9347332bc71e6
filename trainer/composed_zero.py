"""ZeRO beside other kinds of parallelism: for models that these have cut.

A parameter's `placement` (see harness/placement.py) may say

    partial   groups over which finish() sums its gradient too
    data      its data-parallel group in place of ZeRO's own: an expert has fewer copies
    copies    groups that hold the same piece: the norm counts it once

With `splits`, a data-parallel group is several copies, each split over some of its ranks (HSDP).

A pipeline's rank has several stages, each with backward passes of its own: the scopes. While a pass
of one scope is on, `trainable` and `units` are those of this scope only.

    with zero.backward(scope):                      # the number of the stage on this rank
        y.backward(gradient)
    with zero.backward(scope, complete=False):      # a later pass brings the rest: a split backward
        ...
"""

import contextlib

import torch.distributed as dist

import fsdp
import zero
from harness.optimizer import norm_of
from harness.placement import is_first, placement


class ComposedZeRO:
    """Comes before zero.ZeRO or fsdp.FSDP. scopes: modules (default: the model). splits:
    {data-parallel group: (ranks inside it that split a copy, ranks across with the same shards)}"""

    knows_placement = True

    def __init__(self, model, *args, scopes=None, splits=None, **options):
        self.scopes, self.splits = list(scopes or [model]), splits or {}
        self.complete = True
        self.scopes_of = {p: () for p in model.parameters()}
        for i, scope in enumerate(self.scopes):
            for p in scope.parameters():
                self.scopes_of[p] += (i,)
        if any(p.requires_grad and not scopes for p, scopes in self.scopes_of.items()):
            raise ValueError("a trained parameter of the model is in none of the scopes")
        super().__init__(model, *args, **options)
        del self.scopes_of  # it holds the parameters as they were, and their memory
        for bucket in self.buckets:
            bucket.passes = bucket.passes_left = self.microbatches * len(bucket.scopes)

    def _kind(self, p):
        groups = [placement(p)["data"], *placement(p)["partial"]]
        return self.scopes_of[p], *map(id, groups), super()._kind(p)

    def _make_bucket(self, parameters, group, **options):
        place = placement(parameters[0])
        inside, across = self.split(place["data"] or group)
        bucket = super()._make_bucket(parameters, inside, **options)
        bucket.copies_group = across
        bucket.partial = list(place["partial"])
        bucket.scopes = self.scopes_of[parameters[0]]
        return bucket

    def split(self, data_group):
        """(the ranks of a data-parallel group that split a copy with this one, those that hold the
        same shards; None without copies)"""
        return self.splits.get(data_group, (data_group, None))

    @contextlib.contextmanager
    def backward(self, scope, complete=True):
        """Around each backward pass of a scope. complete=False: a later pass brings the rest."""
        trainable = self.trainable
        self.trainable = [bucket for bucket in trainable if scope in bucket.scopes]
        self.complete = complete
        try:
            yield
        finally:
            self.trainable, self.complete = trainable, True

    def _reduce_full(self, rest=False):
        if self.complete:
            super()._reduce_full(rest)

    def finish(self):
        if self.last_call == "finish":
            return
        super().finish()
        for bucket in self.trainable:
            for group in bucket.partial:
                dist.all_reduce(bucket.gradient, group=group)

    def grad_norm(self, groups=()):
        """groups: others over which parameters are split (tensor parallel, pipeline)."""
        self.finish()
        counted = []
        for bucket in self.trainable:
            across = bucket.copies_group
            if across is not None and dist.get_rank(across) > 0:
                continue
            for p, span in zip(bucket.parameters, bucket.spans):
                if is_first(p, groups):
                    counted.append(bucket.gradient[span])
        own = [self.group] if self.stage > 0 else []
        return norm_of(counted, [*own, *groups], self.buckets[0].weights.device)


class ComposedZeRO0To2(ComposedZeRO, zero.ZeRO):
    pass


class ComposedFSDP(ComposedZeRO, fsdp.FSDP):
    """Gathers no unit of another scope in advance, and frees none."""

    def __init__(self, model, *args, scopes=None, units=None, **options):
        scopes = list(scopes or [model])
        if units is None:
            units = sum((fsdp.default_units(scope) for scope in scopes), [])
        super().__init__(model, *args, scopes=scopes, units=units, **options)
        self.units_of_scopes = []
        for scope in scopes:
            inside = set(scope.modules())
            units = [unit for unit in self.units if unit.module in inside]
            if units:
                units[0].previous = units[-1].following = None
            self.units_of_scopes.append(units)

    @contextlib.contextmanager
    def backward(self, scope, complete=True):
        units, self.units = self.units, self.units_of_scopes[scope]
        try:
            with super().backward(scope, complete):
                yield
        finally:
            self.units = units

    def release(self):
        if self.prefetched:  # of another scope
            self.prefetched.release()
        super().release()


def ZeRO(model, group, stage, *args, **options):
    """zero.ZeRO, or fsdp.FSDP for stage 3, with the options `scopes` and `splits`."""
    if stage == 3:
        return ComposedFSDP(model, group, *args, **options)
    return ComposedZeRO0To2(model, group, stage, *args, **options)
