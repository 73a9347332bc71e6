"""ZeRO: data-parallel ranks split the optimizer's states, and then the gradients.

    stage                  weights   gradients  optimizer  held per parameter  a rank sends per step
      0   nothing (DDP)    ########  ########   ########   2 + 2 + 12          2 r P e
      1   optimizer state  ########  ########   ##         2 + 2 + 12/N        2 r P e
      2   gradients too    ########  ##         ##         2 + 2/N + 12/N      (1+m) r P e
      3   weights: FSDP    ##        ##         ##         2/N + 2/N + 12/N    3 m r P e

P parameters of e bytes on N ranks (drawn: 4), m micro-batches, r = (N-1)/N. Held, in bytes: weights
and gradients in 16 bits; in 32 a master copy and Adam's two moments. Stage 3: fsdp.py.

    parameters   | up           | bias | wk     | wq      |//|    a bucket: one flat tensor
    shards       | rank 0   | rank 1   | rank 2   | rank 3   |    equal: padded with //

Split     An optimizer treats each element separately, so each rank can update 1/N of the
          elements: its shard.
Sent      Gradients are reduce-scattered: a rank gets its shard of their sum. The new weights are
          all-gathered. Both together are an all-reduce, so stage 1 sends what DDP sends.
Backward  Autograd runs as usual. Hooks copy each gradient into its bucket, the last layer's first.
          A full bucket is reduce-scattered while backward continues. Stage 1 reduces in the last
          micro-batch only, stage 2 in each, and frees the bucket. step() waits, and updates shards.
Use       Stage 1 costs nothing over DDP; never with Muon, which needs whole matrices. With one
          micro-batch stage 2 costs nothing either; with more take it where gradients don't fit.

    torchrun --nproc_per_node=4 zero.py --stage 2               python zero.py --fit

Rajbhandari et al. 2020, ZeRO, arXiv:1910.02054.
"""

import contextlib
import functools
from itertools import accumulate, chain
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.nn as nn

# torch 2.13 renamed them; older versions know only the second name
all_gather_into_tensor = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_tensor = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


# --- stage 1 in its plainest form, and what stage 2 adds


class PlainZeRO1:
    """The whole idea: one bucket, reduced after backward.

        zero = PlainZeRO1(model, group, torch.optim.SGD)
        for x, y in batches:                       # this rank's rows; target_count: all ranks'
            (cross_entropy(model(x), y, reduction="sum") / target_count).backward()
            zero.step()

    With several micro-batches call step() after the last. For stage 2 call zero.reduce() after each
    of the others: then no p.grad outlives its backward pass. (At the end of the pass all are there.
    ZeRO, below, reduces and frees them while it runs.)

    All ranks start with equal weights, of one dtype, on one device, none frozen. Not checked:
    clip_grad_norm_ (before step() it sees this rank's gradients, not their sum); an optimizer that
    tells matrices from vectors by p.dim(): the shard is flat."""

    def __init__(self, model, group, make_optimizer):
        self.group, self.parameters = group, list(model.parameters())
        rank, ranks = dist.get_rank(group), dist.get_world_size(group)
        size = sum(p.numel() for p in self.parameters)
        length = -(-size // ranks)  # of a shard, rounded up
        self.padding = self.parameters[0].new_zeros(ranks * length - size)
        self.weights = self.flatten(p.detach() for p in self.parameters)
        end = 0
        for p in self.parameters:  # from now on a view of the flat tensor
            start, end = end, end + p.numel()
            p.data = self.weights[start:end].view_as(p)
        self.shard = nn.Parameter(self.weights[rank * length : (rank + 1) * length])
        self.shard.grad = torch.zeros_like(self.shard)
        self.optimizer = make_optimizer([self.shard])  # its states are 1/N as large

    def flatten(self, tensors):
        return torch.cat([*(t.flatten() for t in tensors), self.padding])

    def reduce(self):
        """After backward: add the ranks' sum of this shard's gradients to its own, free p.grad."""
        gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in self.parameters]
        gradient = torch.empty_like(self.shard)
        reduce_scatter_tensor(gradient, self.flatten(gradients), group=self.group)
        self.shard.grad += gradient
        for p in self.parameters:
            p.grad = None

    def step(self):
        """After the last backward: reduce, step on this shard, send it to all."""
        self.reduce()
        self.optimizer.step()
        # In place: this rank's shard is a part of `weights`
        all_gather_into_tensor(self.weights, self.shard.detach(), group=self.group)
        self.shard.grad.zero_()


# --- stages 0 to 2 in full: many buckets, reduced while backward goes on


class ZeRO:
    """Trains `model` over `group` in stage 0, 1 or 2.

        zero = ZeRO(model, group, 1, torch.optim.AdamW, microbatches=2)
        for micro_batches, target_count in batches:    # this rank's rows; all ranks' targets
            zero.zero_grad()
            for x, y in micro_batches:                 # here 2
                loss = cross_entropy(model(x), y, reduction="sum") / target_count
                loss.backward()
            zero.clip(zero.grad_norm(), 1.0)           # clip_grad_norm_ finds no p.grad
            zero.step()                                # a scheduler goes on zero.optimizer

    Before: all ranks have equal weights, loaded, tied and frozen in their final form. Not checked:
    equal weights. (torch's DDP broadcasts rank 0's weights and buffers.) ZeRO puts new parameters
    into the modules: make optimizers, hooks and references after it. Activation checkpointing needs
    use_reentrant=False."""

    valid_stages = 0, 1, 2  # fsdp.py's is 3

    def __init__(
        self,
        model,
        group,
        stage,
        make_optimizer,  # of a list of parameters: one that works element by element
        microbatches=1,  # the backward passes of a step
        bucket_bytes=25 << 20,  # of the largest bucket; a larger parameter has one of its own
        splits=None,  # HSDP: see find_places
        scopes=None,  # a pipeline's stages: see find_places
        **options,  # of ShardedBucket
    ):
        self.model, self.group, self.stage, self.microbatches = model, group, stage, microbatches
        self.splits, self.scopes = splits or {}, scopes or {None: model}
        self.scope, self.inputs_only = None, False  # of the running backward pass, see `around`
        self.queue = []  # buckets that wait for gradients of the running backward pass
        self.reductions = []  # (bucket, wait) of those on their way
        self.replica_sums = []  # HSDP's sums of shards over replicas on their way
        self.last_call = None  # "zero_grad", "unfinished backward", "backward" or "finish"
        # 1  The parameters are dealt out to buckets, and become views of them
        self.buckets, view_of, places = [], {}, self.find_places()

        def kind_of(p):  # all parameters of a bucket are of one kind
            return p.requires_grad, p.dtype, p.device, places[p]

        for parameters in group_parameters(model.parameters(), bucket_bytes, kind_of):
            bucket = self.make_bucket(parameters, places[parameters[0]], **options)
            self.buckets.append(bucket)
            view_of.update(zip(parameters, bucket.parameters))
        for module in model.modules():
            for name, p in module.named_parameters(recurse=False, remove_duplicate=False):
                setattr(module, name, view_of[p])
            module.register_load_state_dict_pre_hook(lambda *_: check_load_state_dict(self))
        # 2  The optimizer steps on this rank's piece of each. Hooks take the gradients
        self.trainable = [bucket for bucket in self.buckets if bucket.trainable]
        pieces = []
        for bucket in self.trainable:
            pieces += bucket.pieces
            for i, p in enumerate(bucket.parameters):
                p.register_post_accumulate_grad_hook(functools.partial(self._arrived, bucket, i))
        self.optimizer = make_optimizer(pieces)
        check_zero_arguments(self)

    def find_places(self):
        return find_places(self.model, self.group, self.splits, self.scopes)

    def make_bucket(self, parameters, place, **options):
        return ShardedBucket(parameters, place, self.stage, self.microbatches, **options)

    # --- a step
    #
    # zero_grad()  All gradients are 0.
    # backward     _arrived moves each gradient to its bucket. Full buckets are reduced: in stage 2
    #              in each backward pass, in stages 0 and 1 in the last one of the step.
    # finish()     Waits for the reductions.
    # step()       Steps on this rank's shards, and all-gathers the new weights.

    def zero_grad(self, give_up=False):
        """Start a step. After an exception on any rank all ranks call it with give_up=True."""
        # By itself if an exception ended its own backward: other ranks may wait in finish()
        give_up = give_up or self.last_call == "unfinished backward"
        if not give_up:
            check_zero_call(self, "zero_grad")
        check_zero_parameters(self)
        if give_up and self.last_call != "finish":
            self._reduce_all(given_up=True)
        self.last_call = "zero_grad"
        for bucket in self.trainable:
            bucket.zero_grad()

    def _arrived(self, bucket, i, p):
        """The hook of each parameter: move its gradient into the bucket. p.grad stays None, or
        somebody would take one rank's gradient for the sum."""
        gradient, p.grad = p.grad, None
        if self.last_call != "unfinished backward":  # the first gradient of a backward pass
            self.last_call = "unfinished backward"
            self.queue = self._new_queue()
            # Called when backward is over, but not if an exception ends it
            torch.autograd.Variable._execution_engine.queue_callback(self._backward_ends)
        check_zero_gradient(self, bucket)
        bucket.add(i, gradient)
        self._reduce_full()

    def _backward_ends(self):
        self._reduce_full(also=list(self.queue))  # a parameter may have got no gradient
        self.last_call, self.queue = "backward", []
        if self.stage >= 2:
            self._wait()

    def finish(self):
        """Complete the gradients, after the last backward of a step. grad_norm(), clip() and step()
        call it too."""
        check_zero_call(self, "finish")
        if self.last_call != "finish":
            self._reduce_all()
            self.last_call = "finish"

    def step(self):
        """Step on this rank's shards, and send the new weights to all. Called again without
        zero_grad() it steps with the same gradients, as torch's optimizers do."""
        check_zero_call(self, "step")
        self.finish()
        for bucket in self.trainable:
            # Copied only if the master has another dtype, or is on another device, by offload
            gradient = bucket.gradient_shard.to(bucket.master, non_blocking=True)
            for i, piece in enumerate(bucket.pieces):
                piece.grad = bucket.part_of(i, gradient).view(piece.shape)
        if any(bucket.is_offloaded for bucket in self.trainable):
            torch.cuda.synchronize()  # gradients have arrived, the last step's weights have left
        # Gathers of the step before may still read the shards, if no forward has waited for them
        wait_for_weights(self.buckets)
        self.optimizer.step()  # once for all buckets: some optimizers count their steps
        self.optimizer.zero_grad()
        self.update_weights(self.trainable)

    def update_weights(self, buckets=None):
        """The masters have new values, by a step or from a checkpoint: bring them to all ranks."""
        for bucket in reversed(buckets or self.buckets):  # forward needs the last bucket first
            bucket.start_update()
        wait_for_weights(b for b in self.buckets if not b.waits_in_forward)

    # --- the queue of a backward pass
    #
    # It has the buckets that the pass fills. All ranks must reduce them in the same order: swapped
    # ones would add up the wrong buckets, silently. So a bucket that is full early waits for those
    # before it.

    def _new_queue(self):
        queue = [bucket for bucket in self.trainable if bucket.passes_left > 0]
        return [b for b in queue if self.scope in (None, *b.place.scopes)]

    def _reduce_full(self, also=()):
        """Start to reduce the next buckets of the queue, as long as they are full or in `also`."""
        if self.inputs_only:  # I of a split backward: W brings the weights' gradients later
            return
        while self.queue and (not self.queue[0].missing or self.queue[0] in also):
            bucket = self.queue.pop(0)
            bucket.passes_left -= 1
            bucket.missing = set(range(len(bucket.parameters)))
            if bucket.reduce_each or bucket.passes_left == 0:
                self.reductions.append((bucket, bucket.start_reduction()))
            if self.stage >= 2:
                self._wait(leave=1)  # at most two buckets are whole: one is on its way, one fills

    def _wait(self, leave=0):
        """Wait for the reductions on their way, but for the last `leave` of them."""
        while len(self.reductions) > leave:
            bucket, wait = self.reductions.pop(0)
            wait()
            bucket.keep_shard()
            if bucket.place.across is not None and bucket.passes_left == 0:  # HSDP's second sum
                options = {"group": bucket.place.across, "async_op": True}
                self.replica_sums.append(dist.all_reduce(bucket.gradient_shard, **options))

    def _reduce_all(self, given_up=False):
        """Reduce what backward has not, and wait for all. That is nothing, unless this rank ran
        fewer backward passes than others, or an exception ended one: it must still join their
        reductions."""
        self._wait()  # an exception may leave a bucket that the next queue has again
        while any(bucket.passes_left for bucket in self.trainable):
            self.queue = self.queue or self._new_queue()  # an exception leaves a part of one
            if given_up:
                for bucket in self.queue:
                    bucket.allocate_gradients()
                    bucket.gradients.fill_(torch.nan)  # incomplete: nobody may train on it
            self._reduce_full(also=list(self.queue))
            self._wait()  # a bucket has one reduction at a time
        for work in self.replica_sums:
            work.wait()
        self.replica_sums.clear()
        for bucket in self.trainable:
            for group in bucket.place.partial:  # rarely any: not overlapped
                dist.all_reduce(bucket.gradient_shard, group=group)

    # --- beside a step: the norm, clipping, whole copies

    def grad_norm(self, pipeline_group=None):
        """The norm of the whole gradient: a float64 scalar, the same on all ranks. pipeline_group:
        the ranks with the other stages of a pipeline."""
        self.finish()
        parts = {}  # {groups: the parts of gradients whose squares are summed over them}
        for groups, part in counted_parts(self, pipeline_group):
            parts.setdefault(groups, []).append(part)
        total = self.buckets[0].weights.new_zeros((), dtype=torch.float64)
        for groups, of_groups in parts.items():
            dtype = torch.promote_types(of_groups[0].dtype, torch.float32)
            norms = torch.stack(torch._foreach_norm(of_groups, dtype=dtype))
            total += sum_over(groups, norms.double().square().sum())
        return sum_over([pipeline_group], total).sqrt()

    def clip(self, norm, limit):
        """Scale the gradients so that their global norm is at most `limit` (0: leave them)."""
        self.finish()
        if limit > 0:
            scale = (limit / (norm + 1e-6)).clamp(max=1.0)
            for bucket in self.trainable:
                bucket.gradient_shard.mul_(scale.to(bucket.gradient_shard.dtype))

    @torch.no_grad()
    def gather_full(self, named):
        """For (name, parameter) pairs of the model: (name, unsplit copy in the masters' dtype).
        After finish() its .grad is the global gradient. For checks and checkpoints; every rank must
        call it."""
        copies = {}
        for bucket in self.buckets:
            weights = bucket.gather_full(bucket.master)
            gradients = bucket.gather_full(bucket.gradient_shard) if bucket.trainable else None
            for i, p in enumerate(bucket.parameters):
                copies[p] = copy = nn.Parameter(bucket.view(i, weights).clone())
                copy.__dict__.update(p.__dict__)
                if bucket.trainable:
                    copy.grad = bucket.view(i, gradients).to(copy, copy=True)
        return [(name, copies[p]) for name, p in named]

    @property
    def param_groups(self):
        """The optimizer's, for learning rates."""
        return self.optimizer.param_groups

    @contextlib.contextmanager
    def around(self, action):
        """For Pipeline(..., around=zero.around), which says whose backward pass is running."""
        self.scope, self.inputs_only = action.stage, action.kind == "I"
        try:
            yield
        finally:
            self.scope, self.inputs_only = None, False


class ShardedBucket:
    """Some parameters as one flat tensor of S elements: N equal shards, one of them this rank's.

    weights         (S,)    in `param_dtype`; the model's parameters are views of it
    shard           (S/N,)  this rank's shard of the weights
    master          (S/N,)  for the optimizer: the shard, or its copy in another dtype or place
    pieces                  what the master has of each parameter, maybe nothing
    gradients       (S,)    of this rank, in `reduce_dtype`; in stage 2 None until one arrives
    gradient_shard  (S/N,)  this rank's shard of their sum over all ranks"""

    keeps_weights = True  # fsdp.py frees them
    waits_in_forward = False  # for new weights: see the function of this name

    def __init__(
        self,
        parameters,
        place,  # a Place
        stage,
        microbatches,
        value=lambda p: p,  # p's initial value, on the device to use, in the masters' dtype
        param_dtype=None,  # of weights and backward; None: the masters'
        reduce_dtype=None,  # in which gradients are summed; None: param_dtype
        offload=False,  # masters and optimizer states are in the host's memory
        reduce_each=True,  # stage 2 in each backward pass; False: sends less, holds all gradients
    ):
        self.place, self.group, self.stage = place, place.inside, stage
        self.trainable = parameters[0].requires_grad
        self.ranks, rank = 1, 0
        if stage > 0:
            self.ranks, rank = dist.get_world_size(self.group), dist.get_rank(self.group)
        # 1  Where the parameters are in the flat tensor, and where the shard is
        ends = list(accumulate(p.numel() for p in parameters))
        self.slices = [slice(end - p.numel(), end) for p, end in zip(parameters, ends)]
        length = max(-(-ends[-1] // self.ranks), 1)  # rounded up; gloo refuses empty messages
        self.own_slice = slice(rank * length, (rank + 1) * length)
        # 2  The weights, a bucket at a time: a large model is never whole on any rank
        values = [value(p).detach().flatten() for p in parameters]
        padding = values[0].new_zeros(self.ranks * length - ends[-1])
        full = torch.cat([*values, padding])  # (S,)
        self.weights = full.to(param_dtype or full.dtype)
        self.shard = self.weights[self.own_slice]
        if not self.keeps_weights:
            self.shard = self.shard.clone()
        self.master = self.shard
        if self.trainable and (offload or full.dtype != self.weights.dtype):
            self.master = full[self.own_slice].to("cpu" if offload else full.device, copy=True)
        self.is_offloaded = self.master.device != self.shard.device  # False if there is no GPU
        if self.is_offloaded:
            self.master = self.master.pin_memory()  # so that the host need not wait for copies
        self.gathering = None  # the all-gather of new weights that is on its way
        self.parameters, self.pieces = [], []
        for i, p in enumerate(parameters):
            # New, because p.data can't leave the meta device. `weights` and .data have two version
            # counters: autograd must not take a gather for a change of the weights that it saved
            view = nn.Parameter(self.weights[self.slices[i]].data.view(p.shape), self.trainable)
            view.__dict__.update(p.__dict__, stepped_on_in_pieces=True)  # diloco.py refuses it
            self.parameters.append(view)
            piece = self.part_of(i, self.master)
            if p.dim() > 1:
                piece = piece.unsqueeze(0)  # 2-D, so that weight decay still sees a matrix
            self.pieces.append(nn.Parameter(piece, self.trainable))
        # 3  The gradients
        self.gradients = self.gradient_shard = None
        self.reduce_dtype = reduce_dtype or self.weights.dtype
        if self.trainable and stage < 2:
            self.allocate_gradients()
            self.gradient_shard = self.gradients[self.own_slice]
        elif self.trainable:
            self.gradient_shard = self.weights.new_zeros(length, dtype=self.reduce_dtype)
        # 4  The backward passes of a step, and which parameters have no gradient in this one yet
        self.reduce_each = reduce_each and stage >= 2  # else in the last pass only
        self.passes = self.passes_left = microbatches * len(place.scopes)
        self.missing = set(range(len(parameters)))

    def view(self, i, flat):
        """Parameter i's part of a tensor like `weights`."""
        return flat[self.slices[i]].view(self.parameters[i].shape)

    def part_of(self, i, shard):
        """What a tensor like `shard` has of parameter i: all, a part or nothing."""
        start = self.slices[i].start - self.own_slice.start
        stop = self.slices[i].stop - self.own_slice.start
        return shard[max(start, 0) : max(stop, 0)]

    def allocate_gradients(self):
        if self.gradients is None:
            self.gradients = torch.zeros_like(self.weights, dtype=self.reduce_dtype)

    def zero_grad(self):
        self.passes_left = self.passes
        self.gradient_shard.zero_()
        if self.gradients is not None:
            self.gradients.zero_()

    def add(self, i, gradient):
        self.allocate_gradients()
        self.view(i, self.gradients).add_(gradient)
        self.missing.discard(i)

    def start_reduction(self):
        """Start to sum the gradients over the ranks: whole in stage 0, else a shard on each.
        Returns a function that waits for the sum."""
        self.allocate_gradients()  # if no parameter of it got a gradient
        if dist.get_world_size(self.group) == 1:
            return lambda: None
        if self.stage == 0:
            return dist.all_reduce(self.gradients, group=self.group, async_op=True).wait
        return start_shard_sum(self.gradients[self.own_slice], self.gradients, self.group)

    def keep_shard(self):
        """The sum is there. Stage 2 frees all but this rank's shard."""
        if self.stage >= 2:
            self.gradient_shard += self.gradients[self.own_slice]
            self.gradients = None

    def start_update(self):
        """The master has new values: start to bring them to all ranks."""
        # Does nothing if they are one tensor
        self.shard.copy_(self.master.to(self.shard.device, non_blocking=True))
        if self.keeps_weights and self.ranks > 1:
            self.start_gather()

    def start_gather(self):
        """All ranks' shards into `weights`. This rank's stays in its place."""
        options = {"group": self.group, "async_op": True}
        self.gathering = all_gather_into_tensor(self.weights, self.shard, **options)

    def wait_for_weights(self):
        if self.gathering is not None:
            self.gathering.wait()
            self.gathering = None

    def gather_full(self, shard):
        """All ranks' shards together, on the device of the weights."""
        shard = shard.to(self.weights.device)
        if self.ranks == 1:
            return shard
        full = shard.new_empty(self.ranks * len(shard))
        all_gather_into_tensor(full, shard, group=self.group)
        return full


def wait_for_weights(buckets):
    for bucket in buckets:
        bucket.wait_for_weights()


def start_shard_sum(shard, full, group):
    """Start to sum all ranks' `full`, each rank's part of it into `shard`. Returns a function that
    waits for it."""
    options = {"group": group, "async_op": True}
    if dist.get_backend(group) != "gloo":
        return reduce_scatter_tensor(shard, full, **options).wait
    # gloo's own sends twice as much: send each rank its shard, and add up what arrives
    received = torch.empty_like(full)
    work = dist.all_to_all_single(received, full, **options)

    def wait():
        work.wait()
        torch.sum(received.view(-1, len(shard)), 0, out=shard)

    return wait


def group_parameters(parameters, bucket_bytes, kind_of):
    """Lists of parameters of one kind, at most bucket_bytes each (a larger parameter gets its own),
    from the last parameter to the first: backward begins with the last layers. Lists of several
    kinds interleave: they are sorted by their last member, which completes them."""
    order = {p: i for i, p in enumerate(reversed(list(parameters)))}
    lists, newest = [], {}  # newest: {kind: its last list}
    for p in order:
        kind = kind_of(p)
        members = newest.get(kind)
        if members is None or sum(q.nbytes for q in members) + p.nbytes > bucket_bytes:
            members = newest[kind] = []
            lists.append(members)
        members.append(p)
    return sorted(lists, key=lambda members: order[members[-1]])


# --- new weights that arrive during the next forward


def wait_in_forward(zero, modules):
    """Have each of these modules, such as fsdp.default_units(model), wait for its new weights when
    its forward begins, so that step() does not. Before that nobody else may read these weights, or
    write the masters. For stages 1 and 2."""
    waiting = {p for module in modules for p in module.parameters()}
    for bucket in zero.buckets:
        # A weight outside of the modules is read without a wait: step() waits for its bucket
        bucket.waits_in_forward = waiting.issuperset(bucket.parameters)
    for module in modules:
        parameters = set(module.parameters())
        used = [b for b in zero.buckets if not parameters.isdisjoint(b.parameters)]
        module.register_forward_pre_hook(lambda *_, used=used: wait_for_weights(used))
    for module in zero.model.modules():
        module.register_state_dict_pre_hook(lambda *_: wait_for_weights(zero.buckets))


# --- together with another kind of parallelism (docs/use/two-techniques.md)


class Place(NamedTuple):
    """Which ranks share a parameter, and which backward passes bring its gradients."""

    data: dist.ProcessGroup  # the ranks over which its gradient is summed
    inside: dist.ProcessGroup  # those of them that split one replica: without HSDP all
    across: dist.ProcessGroup | None  # HSDP: those with the same shard of other replicas
    partial: tuple  # further groups over which its gradient is a partial sum
    scopes: tuple  # the pipeline stages that use it: each has a backward pass per micro-batch
    units: tuple = ()  # fsdp.py's, which gather it


def find_places(model, group, splits, scopes):
    """{parameter: its Place}, from p.placement, which other kinds of parallelism write.

    scopes  a pipeline's rank with several stages: {stage: its module}. Each has a backward pass per
            micro-batch, and the pipeline says which one is running: ZeRO.around
    splits  HSDP, ZeRO within a node and replicas across nodes: {data group: (the ranks that split
            this replica, the ranks with the same shards, one of each replica)}"""
    used = {scope: set(module.parameters()) for scope, module in scopes.items()}
    places = {}
    for p in model.parameters():
        data_group = placed(p, "data", group)
        inside, across = splits.get(data_group, (data_group, None))
        of_scopes = tuple(scope for scope, parameters in used.items() if p in parameters)
        partial = tuple(placed(p, "partial", ()))
        places[p] = Place(data_group, inside, across, partial, of_scopes)
    return places


def placed(p, key, default):
    """An entry of p.placement, in which techniques say what a rank has of a parameter."""
    return getattr(p, "placement", {}).get(key) or default


def groups_cutting(p):
    return [group for group, _, _ in placed(p, "cuts", {}).values()]


def counted_parts(zero, pipeline_group):
    """Of each parameter: (the groups over which the norm adds up its parts, this rank's part of the
    gradient). Of ranks with the same part the first counts it, the others get an empty one."""
    # Where some parameters are cut, whole ones are replicated. (Experts have their own data group)
    usual = (b.parameters for b in zero.buckets if b.place.data is zero.group)
    cut_groups = next(filter(None, map(groups_cutting, chain.from_iterable(usual))), [])
    for bucket in zero.trainable:
        place = bucket.place
        # Ranks that have added up their gradients have the same part
        summed = [*place.partial] if place.across is None else [place.across, *place.partial]
        for i, p in enumerate(bucket.parameters):
            cuts = groups_cutting(p)
            groups = cuts or cut_groups
            if zero.stage > 0:
                groups = [place.data, *groups]
            outers = groups if pipeline_group is None else [*groups, pipeline_group]
            copies = [group for group in summed if is_within(group, outers)]
            if not cuts:
                copies += cut_groups
            is_first = all(dist.get_rank(group) == 0 for group in copies)
            part = bucket.part_of(i, bucket.gradient_shard)
            yield tuple(groups), part if is_first else part[:0]


def is_within(inner, outers):
    """Whether the ranks of a group are among those of one of the others."""
    ranks = set(dist.get_process_group_ranks(inner))
    return any(ranks.issubset(dist.get_process_group_ranks(outer)) for outer in outers)


def sum_over(groups, tensor):
    for group in groups:
        if group is not None and dist.get_world_size(group) > 1:
            dist.all_reduce(tensor, group=group)
    return tensor


# --- mistakes that would be silent: refused

# Optimizers of torch's, or widely used ones, that don't work element by element
NOT_ELEMENTWISE = "Adafactor", "LAMB", "Lamb", "LARS", "LBFGS", "Muon", "SOAP", "Shampoo"


def check_zero_arguments(zero):
    if zero.stage not in zero.valid_stages:
        raise ValueError(f"there is no stage {zero.stage!r} of ZeRO: 0, 1 or 2; 3 is fsdp.FSDP")
    kind = type(zero.optimizer).__name__
    if kind in NOT_ELEMENTWISE:
        advice = "take AdamW or SGD; for Muon muon.py"
        raise ValueError(f"{kind} needs whole matrices, ZeRO has pieces of them: {advice}")
    for group, across in zero.splits.values():
        if across is not None:  # ranks with different shards would be added
            places = [None] * dist.get_world_size(across)
            own = dist.get_rank(group), dist.get_world_size(group)
            dist.all_gather_object(places, own, group=across)
            if len(set(places)) > 1:
                raise ValueError("splits need one rank of each replica, at the same place of each")


def check_zero_call(zero, call):
    if call == "finish" and zero.last_call == "unfinished backward":
        advice = "call zero_grad(give_up=True) on all ranks"
        raise RuntimeError(f"an exception ended a backward pass: {advice}")
    if call == "step" and zero.last_call == "zero_grad":
        advice = "a rank that ran no backward pass calls finish() before"
        raise RuntimeError(f"step() after zero_grad(): all gradients are zero; {advice}")
    if call == "zero_grad" and zero.last_call == "backward":
        raise RuntimeError("there was no finish(): call it, or zero_grad(give_up=True)")


def check_zero_parameters(zero):
    storages = {bucket.weights.untyped_storage()._cdata for bucket in zero.buckets}
    for name, p in zero.model.named_parameters():
        if p.untyped_storage()._cdata not in storages:
            raise RuntimeError(
                f"parameter {name!r} is no longer the one that ZeRO put there: convert, move"
                " and tie it before ZeRO(model, ...), and make one ZeRO per model"
            )


def check_load_state_dict(zero):
    if any(b.master is not b.shard or not b.keeps_weights for b in zero.buckets):
        raise RuntimeError(
            "load_state_dict() after ZeRO(...) would not change the masters, which step() sends:"
            " load before ZeRO(...), or fill the masters and call update_weights()"
        )


def check_zero_gradient(zero, bucket):
    if bucket not in zero.queue:
        raise RuntimeError(
            f"a gradient came after its bucket was reduced: there were more backward passes than"
            f" microbatches={zero.microbatches}, or no zero_grad(). For several stages or a split"
            " backward write ZeRO(..., scopes={stage: module}), Pipeline(..., around=zero.around)"
            "; for a weight with two gradients per micro-batch weight.used_twice = True (see"
            " zero_bubble.py); a unit of fsdp.py runs once per forward"
        )


# --- demo ---

import fsdp
import harness
import proof
import receipts.zero
from harness import zero_flags


def flags():
    parser = harness.parser(__doc__)
    g = parser.add_argument_group("ZeRO")
    why = "split: 0 nothing, 1 optimizer states, 2 gradients too, 3 weights too: fsdp.py"
    g.add_argument("--stage", type=int, choices=range(4), default=2, help=why)
    zero_flags.add_flags(g, bucket_mb=0.5, ranks_flag="--shard-ranks")
    why = "train nothing: the largest model that fits 80 GB on 64 ranks, in each stage"
    g.add_argument("--fit", action="store_true", help=why)
    return parser


def main():
    args = flags().parse_args()
    if args.fit:
        return receipts.zero.fit()
    harness.configure(args)
    proof.launch(demo, args, check=functools.partial(zero_flags.check_world, args))


def demo(run):
    args = run.args
    group, splits = zero_flags.make_groups(run)
    model = run.meta_model()
    options = zero_flags.options(run, model, args.stage)
    options |= dict(microbatches=args.microbatches, splits=splits)
    options["make_optimizer"] = functools.partial(harness.make_optimizer, args=args)
    if args.stage == 3:
        zero = fsdp.FSDP(model, group, **options)
    else:
        zero = ZeRO(model, group, args.stage, **options)
    for step in run.steps(zero):
        zero.zero_grad()
        loss = run.zero()
        for tokens, targets, samples in run.microbatches(step, run.rank, run.world):
            # target_count: the tokens of the global batch
            part = model(tokens, targets=targets, target_count=run.target_count, sample_ids=samples)
            part.backward()
            loss += part.detach()
        dist.all_reduce(loss)
        norm = zero.grad_norm()
        run.check(loss, norm, lambda: zero.gather_full(model.named()))
        zero.clip(norm, args.grad_clip)
        zero.step()
        run.log(loss, norm)
    return run.receipt(*receipts.zero.of_demo(run))


if __name__ == "__main__":
    harness.script(main)
