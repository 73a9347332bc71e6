"""ZeRO: data-parallel ranks split the optimizer's states, and then the gradients.

    stage                  weights   gradients  optimizer  held per parameter  a rank sends per step
      0   nothing (DDP)    ########  ########   ########   2 + 2 + 12          2 r P e
      1   optimizer state  ########  ########   ##         2 + 2 + 12/N        2 r P e
      2   gradients too    ########  ##         ##         2 + 2/N + 12/N      (1+m) r P e
      3   weights: fsdp.py ##        ##         ##         2/N + 2/N + 12/N    3 m r P e

P parameters of e bytes on N ranks (drawn: 4), m micro-batches, r = (N-1)/N. Bytes held: 2 for a
16-bit weight, 2 for its gradient, 12 for its 32-bit master copy and Adam's two moments.

    parameters   | up           | bias | wk     | wq      |//|    a bucket: one flat tensor
    shards       | rank 0   | rank 1   | rank 2   | rank 3   |    equal: padded with //

Split     Adam and SGD treat each element separately, so each rank can update 1/N of the
          elements: its shard.
Sent      Gradients are reduce-scattered: a rank gets its shard of their sum. New weights are
          all-gathered: a rank gets all shards. Each sends r P e, as each half of DDP's all-reduce.
Backward  Autograd runs as usual. Hooks copy each gradient into its bucket, the last layer's first.
          A full bucket is reduce-scattered while backward continues. Stage 1 reduces in the last
          micro-batch only, stage 2 in each, and frees the bucket. step() waits, and updates shards.
Use       Stage 1 rather than 0: it sends no more. Stage 2 with one micro-batch, or where gradients
          don't fit. Neither goes with Muon, which needs whole matrices.

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
        for x, y in batches:                       # this rank's. target_count: all ranks' targets
            (cross_entropy(model(x), y, reduction="sum") / target_count).backward()
            zero.step()

    With several micro-batches call step() after the last one's backward. For stage 2 call reduce()
    after each of the others: it frees the whole gradients, and keeps this rank's shard.

    All ranks start with equal weights, of one dtype, on one device, none frozen. Don't call
    clip_grad_norm_: before step() it sees this rank's gradients, not their sum. The optimizer sees
    one flat shard: it can't leave vectors out of weight decay, for example."""

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
        """After backward: add this shard of the ranks' summed gradients to shard.grad."""
        gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in self.parameters]
        gradient = torch.empty_like(self.shard)
        reduce_scatter_tensor(gradient, self.flatten(gradients), group=self.group)
        self.shard.grad += gradient
        for p in self.parameters:
            p.grad = None  # freed: only the shard stays

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
        for micro_batches, target_count in batches:    # the number of targets of all ranks
            zero.zero_grad()
            for x, y in micro_batches:                 # this rank's 2
                loss = cross_entropy(model(x), y, reduction="sum") / target_count
                loss.backward()
            zero.clip(zero.grad_norm(), 1.0)           # clip_grad_norm_ finds no p.grad
            zero.step()                                # a scheduler goes on zero.optimizer

    Before: all ranks have equal weights, loaded, tied and frozen in their final form. (torch's DDP
    broadcasts rank 0's; ZeRO doesn't.) ZeRO puts new parameters into the modules: make optimizers,
    hooks and references after it. Activation checkpointing needs use_reentrant=False."""

    def __init__(
        self,
        model,
        group,
        stage,
        make_optimizer,  # gets a list of parameters, and must work element by element
        microbatches=1,  # the backward passes of a step
        bucket_bytes=25 << 20,  # of the largest bucket; a larger parameter has one of its own
        hsdp=None,  # hybrid sharding, replicas of the shards: see find_places
        pipeline_stages=None,  # see find_places
        **options,  # dtypes, offload and more: see ShardedBucket
    ):
        self.model, self.group, self.stage, self.microbatches = model, group, stage, microbatches
        self.hsdp, self.pipeline_stages = hsdp or {}, pipeline_stages or {None: model}
        self.queue = []  # buckets that wait for gradients of the running backward pass
        self.reductions = []  # (bucket, wait): reductions on their way
        self.replica_sums = []  # HSDP's sums of shards over replicas on their way
        self.action = None  # what a pipeline is running: see `around`
        self.last_call = None  # "zero_grad", "unfinished backward", "backward" or "finish"
        # 1  The parameters are dealt out to buckets, and become views of them
        places = find_places(self)  # {parameter: which ranks share it, and more}
        self.buckets, view_of = [], {}

        def kind_of(p):  # equal for all parameters of a bucket
            return p.requires_grad, p.dtype, p.device, places[p]

        for parameters in group_parameters(model.parameters(), bucket_bytes, kind_of):
            bucket = self.make_bucket(parameters, places[parameters[0]], **options)
            self.buckets.append(bucket)
            view_of.update(zip(parameters, bucket.parameters))
        for module in model.modules():
            for name, p in module.named_parameters(recurse=False, remove_duplicate=False):
                setattr(module, name, view_of[p])
            module.register_load_state_dict_pre_hook(lambda *_: check_load_state_dict(self))
        # 2  The optimizer steps on this rank's pieces of parameters. Hooks take the gradients
        self.trained_buckets = [bucket for bucket in self.buckets if bucket.trainable]
        pieces = []
        for bucket in self.trained_buckets:
            pieces += bucket.pieces
            for i, p in enumerate(bucket.parameters):
                p.register_post_accumulate_grad_hook(functools.partial(self._arrived, bucket, i))
        self.optimizer = make_optimizer(pieces)
        check_zero_arguments(self)

    # For fsdp.py, which has units, and buckets of another class
    valid_stages = 0, 1, 2
    units = ()  # modules that gather their weights

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
        check_zero_parameters(self)
        if give_up or self.last_call == "unfinished backward":  # an exception ended it on this rank
            self._give_up()
        check_zero_call(self, "zero_grad")
        self.last_call = "zero_grad"
        for bucket in self.trained_buckets:
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
        self._reduce_full(complete=self.queue)  # a parameter may have got no gradient
        self.last_call, self.queue = "backward", []
        if self.stage >= 2:
            self._wait()

    def finish(self):
        """After the last backward: complete the gradients, as grad_norm(), clip() and step() do."""
        check_zero_call(self, "finish")
        if self.last_call == "finish":
            return
        self._wait()
        # A rank that ran fewer passes, or gave up, must still join the reductions of the others
        while any(bucket.passes_left for bucket in self.trained_buckets):
            self.queue = self.queue or self._new_queue()  # giving up leaves the rest of a queue
            self._reduce_full(complete=self.queue)
            self._wait()  # a bucket has one reduction at a time
        while self.replica_sums:
            self.replica_sums.pop().wait()
        for bucket in self.trained_buckets:
            for group in bucket.place.partial:  # rarely any: not overlapped
                dist.all_reduce(bucket.gradient_shard, group=group)
        self.last_call = "finish"

    def step(self):
        """Step on this rank's shards, and send the new weights to all. Called again without
        zero_grad() it steps with the same gradients, as torch's optimizers do."""
        check_zero_call(self, "step")
        self.finish()
        for bucket in self.trained_buckets:
            # A copy only if the master has another dtype or, by offload, another device
            gradient = bucket.gradient_shard.to(bucket.master, non_blocking=True)
            for i, piece in enumerate(bucket.pieces):
                piece.grad = bucket.part_of(i, gradient).view(piece.shape)
        if any(bucket.is_offloaded for bucket in self.trained_buckets):
            torch.cuda.synchronize()  # gradients have arrived, the last step's weights have left
        # If there was no forward, gathers of the step before may still read the shards
        wait_for_weights(self.buckets)
        self.optimizer.step()  # once for all buckets: some optimizers count their steps
        self.optimizer.zero_grad()
        self.update_weights(self.trained_buckets)

    def update_weights(self, buckets=None):
        """The masters have new values, by a step or from a checkpoint: bring them to all ranks."""
        for bucket in reversed(buckets or self.buckets):  # forward needs the last bucket first
            bucket.start_update()
        wait_for_weights(b for b in self.buckets if not b.waits_in_forward)

    # --- the queue of a backward pass
    #
    # The buckets that the pass fills. Ranks must reduce them in one order: swapped ones would add
    # up the wrong buckets, silently. So a bucket that is full early waits for those before it.

    def _new_queue(self):
        queue = [bucket for bucket in self.trained_buckets if bucket.passes_left > 0]
        if self.action is not None:  # the backward pass of one pipeline stage
            queue = [b for b in queue if self.action.stage in b.place.pipeline_stages]
        return queue

    def _reduce_full(self, complete=()):
        """Start to reduce the queue's next buckets, as long as they are full or in `complete`."""
        if self.action is not None and self.action.kind == "I":
            return  # a split backward: its part W brings the weights' gradients later
        while self.queue and (not self.queue[0].missing or self.queue[0] in complete):
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
            replicas = bucket.place.replica_group
            if replicas is not None and bucket.passes_left == 0:  # HSDP's second sum
                work = dist.all_reduce(bucket.gradient_shard, group=replicas, async_op=True)
                self.replica_sums.append(work)

    def _give_up(self):
        """Join the reductions in which other ranks may wait."""
        self._wait()
        for bucket in self.trained_buckets:
            if bucket.passes_left > 0:
                bucket.allocate_gradients()
                bucket.gradients.fill_(torch.nan)  # incomplete: nobody may train on it
        if self.last_call == "unfinished backward":
            self.last_call = "backward"
        self.finish()

    # --- beside a step: the norm, clipping, whole copies

    def grad_norm(self, pipeline_group=None):
        """The norm of the whole gradient: a float64 scalar, the same on all ranks. pipeline_group:
        the ranks with the other stages of a pipeline."""
        self.finish()
        parts_of = {}  # {groups: the parts of gradients whose squares are summed over them}
        for groups, part in counted_parts(self, pipeline_group):
            parts_of.setdefault(groups, []).append(part)
        total = self.buckets[0].weights.new_zeros((), dtype=torch.float64)
        for groups, parts in parts_of.items():
            dtype = torch.promote_types(parts[0].dtype, torch.float32)
            norms = torch.stack(torch._foreach_norm(parts, dtype=dtype))  # of all parts at once
            total += sum_over(groups, norms.double().square().sum())
        return sum_over([pipeline_group], total).sqrt()

    def clip(self, norm, limit):
        """Scale the gradients so that their global norm is at most `limit` (0: leave them)."""
        self.finish()
        if limit > 0:
            scale = (limit / (norm + 1e-6)).clamp(max=1.0)
            for bucket in self.trained_buckets:
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
        return self.optimizer.param_groups  # for learning rates

    @contextlib.contextmanager
    def around(self, action):
        """For Pipeline(..., around=zero.around), which says what it is running."""
        self.action = action
        try:
            yield
        finally:
            self.action = None


class ShardedBucket:
    """Some parameters as one flat tensor of S elements: N equal shards, one of them this rank's.

    weights         (S,)    in `param_dtype`; the model's parameters are views of it
    shard           (S/N,)  this rank's shard of the weights
    master          (S/N,)  for the optimizer: the shard, or its copy in another dtype or place
    pieces                  the master's part of each parameter, maybe empty: for the optimizer
    gradients       (S,)    of this rank, in `reduce_dtype`; in stage 2 None until one arrives
    gradient_shard  (S/N,)  this rank's shard of their sum over all ranks"""

    keeps_weights = True  # fsdp.py frees them
    waits_in_forward = False  # for new weights: see wait_in_forward

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
        self.place, self.group, self.stage = place, place.shard_group, stage
        self.trainable = parameters[0].requires_grad
        self.ranks, rank = 1, 0
        if stage > 0:
            self.ranks, rank = dist.get_world_size(self.group), dist.get_rank(self.group)
        # 1  Where the parameters are in the flat tensor, and where the shard is
        ends = list(accumulate(p.numel() for p in parameters))
        self.slices = [slice(end - p.numel(), end) for p, end in zip(parameters, ends)]
        length = max(-(-ends[-1] // self.ranks), 1)  # rounded up; gloo refuses empty messages
        self.own_slice = slice(rank * length, (rank + 1) * length)
        # 2  The weights, a bucket at a time: fsdp.py never has a large model whole on any rank
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
            # A new one, as p may be on the meta device. By .data it has its own version counter:
            # autograd must not take a gather for a change of the weights that it saved
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
        self.passes = self.passes_left = microbatches * len(place.pipeline_stages)
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
        """The master has new values: start to bring them to the shard, if it is another tensor, and
        to all ranks."""
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
    """Lists of parameters of one kind, at most bucket_bytes each (a larger parameter has a list of
    its own), from the last parameter to the first, as in backward. With several kinds some lists
    fill at the same time: they are sorted by their last member, which completes them."""
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
    """For stages 1 and 2: step() no longer waits for the gathers of new weights. Each module, such
    as those of fsdp.default_units(model), waits for its own when its forward begins. Before that
    nobody else may read these weights, or write the masters."""
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

    data_group: dist.ProcessGroup  # the ranks over which its gradient is summed
    shard_group: dist.ProcessGroup  # those of them that split one replica: without HSDP all
    replica_group: dist.ProcessGroup | None  # HSDP: those with the same shard of other replicas
    partial: tuple  # further groups over which its gradient is a partial sum
    pipeline_stages: tuple  # that use it: each has a backward pass per micro-batch
    units: tuple  # those of fsdp.py that use it: two for a tied matrix


def find_places(zero):
    """{parameter: its Place}, from p.placement, which other kinds of parallelism write.

    hsdp: ZeRO within a node and replicas across nodes. {data group: (the ranks that split this
    replica, the ranks with the same shards, one of each replica)}
    pipeline_stages: {stage: its module}, of a rank with several. Each has a backward pass per
    micro-batch. The pipeline says which one is running: ZeRO.around"""
    in_stage = {stage: set(part.parameters()) for stage, part in zero.pipeline_stages.items()}
    in_unit = {unit: set(unit.module.parameters()) for unit in zero.units}
    places = {}
    for p in zero.model.parameters():
        data_group = placed(p, "data", zero.group)
        shard_group, replica_group = zero.hsdp.get(data_group, (data_group, None))
        partial = tuple(placed(p, "partial", ()))
        stages = tuple(stage for stage in in_stage if p in in_stage[stage])
        units = tuple(unit for unit in in_unit if p in in_unit[unit])
        places[p] = Place(data_group, shard_group, replica_group, partial, stages, units)
    return places


def placed(p, key, default):
    """An entry of p.placement, in which techniques say what a rank has of a parameter."""
    return getattr(p, "placement", {}).get(key) or default


def groups_cutting(p):
    return [group for group, _, _ in placed(p, "cuts", {}).values()]


def counted_parts(zero, pipeline_group):
    """For each parameter: (the groups over which the norm sums, this rank's part of the gradient).
    In stages 1 to 3 alone: (the data group, what its shard has), for shards are disjoint. With HSDP
    or another technique ranks may have the same part: the first counts it, the others nothing."""
    # Groups that cut some parameters replicate the others. (Experts have a data group of their own)
    not_experts = (b.parameters for b in zero.buckets if b.place.data_group is zero.group)
    cut_groups = next(filter(None, map(groups_cutting, chain.from_iterable(not_experts))), [])
    for bucket in zero.trained_buckets:
        place = bucket.place
        # Ranks that have added up their gradients have the same part
        same_part = [g for g in (place.replica_group, *place.partial) if g is not None]
        for i, p in enumerate(bucket.parameters):
            cuts = groups_cutting(p)
            groups = cuts or cut_groups
            if zero.stage > 0:  # shards add up
                groups = [place.data_group, *groups]
            norm_groups = groups if pipeline_group is None else [*groups, pipeline_group]
            replicated_over = [group for group in same_part if is_within(group, norm_groups)]
            if not cuts:
                replicated_over += cut_groups
            is_first = all(dist.get_rank(group) == 0 for group in replicated_over)
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
    for shard_group, replica_group in zero.hsdp.values():
        if replica_group is not None:  # ranks with different shards would be added
            places = [None] * dist.get_world_size(replica_group)
            own = dist.get_rank(shard_group), dist.get_world_size(shard_group)
            dist.all_gather_object(places, own, group=replica_group)
            if len(set(places)) > 1:
                raise ValueError("hsdp needs one rank of each replica, at the same place of each")


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
            " backward write ZeRO(..., pipeline_stages={stage: module}) and Pipeline(...,"
            " around=zero.around); for a weight with two gradients per micro-batch"
            " weight.used_twice = True (zero_bubble.py); a unit of fsdp.py runs once per forward"
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
    group, hsdp = zero_flags.make_groups(run)
    model = run.meta_model()
    options = zero_flags.options(run, model, args.stage)
    options |= dict(microbatches=args.microbatches, hsdp=hsdp)
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
