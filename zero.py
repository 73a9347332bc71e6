"""ZeRO: data-parallel ranks share out the optimizer's states, the gradients and the weights.

    stage                    weights    gradients  optimizer  bytes held a parameter   sent a step
      0   nothing (DDP)      ########   ########   ########   2 + 2 + 12               2 r P e
      1   optimizer states   ########   ########   ##         2 + 2 + 12/N             2 r P e
      2   gradients too      ########   ##         ##         2 + 2/N + 12/N           (1 + m) r P e
      3   weights too        ##         ##         ##         2/N + 2/N + 12/N         3 m r P e

P parameters of e bytes on N ranks, m micro-batches, r = (N-1)/N. Bytes held: weights and gradients
in 16 bits; in 32 bits a master copy of the weights and Adam's two moments. Stage 3 is FSDP.

    parameters   | up           | bias | wk     | wq      |//|    a bucket: one flat tensor
    shards       | rank 0   | rank 1   | rank 2   | rank 3   |    equal: padded with //

An optimizer works element by element, so each rank can step on 1/N of the elements: its shard.
Stage 1 reduce-scatters the gradients (a rank gets its shard of the sum) and all-gathers the new
weights. Both together are an all-reduce. Stage 2 reduces a bucket of gradients as soon as it is
full, in every micro-batch, and frees it. Stage 3 gathers the weights of a unit (a block, the
embedding, the head) before it runs, forward and backward, while its neighbour computes.
Backward is the model's own. Autograd saves views of the weights. Stage 3 frees the memory under
them (it resizes their storage to 0) and fills it again before backward reads it.

Stage 1 costs nothing: it sends no more than DDP. Stages 2 and 3 send more with each micro-batch:
take them where memory is short. docs/memory.md has costs, thresholds and measured figures.

    torchrun --nproc_per_node=4 zero.py --stage 3
    python zero.py --fit

Rajbhandari et al. 2020, ZeRO, arXiv:1910.02054. Zhao et al. 2023, PyTorch FSDP, arXiv:2304.11277.
"""

import functools
from itertools import accumulate, pairwise

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.utils._pytree import tree_leaves

# torch 2.13 renamed them; older versions know only the second name
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
native_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


# --- stage 1 in its plainest form


class PlainZeRO1:
    """The whole idea: one bucket, reduced after backward.

        zero = PlainZeRO1(model, group, torch.optim.SGD)
        for x, y in batches:                       # this rank's rows; tokens: those of all ranks
            (cross_entropy(model(x), y, reduction="sum") / tokens).backward()
            zero.step()

    Before it the model is on its device, in one dtype, with equal weights on all ranks. Nobody
    checks that it stays there, and that no other zero_grad() replaces the views."""

    def __init__(self, model, group, optimizer):
        parameters = list(model.parameters())
        rank, ranks = dist.get_rank(group), dist.get_world_size(group)
        length = -(-sum(p.numel() for p in parameters) // ranks)  # of a shard, rounded up
        self.group = group
        self.weights = parameters[0].new_zeros(ranks * length)
        self.gradients = torch.zeros_like(self.weights)
        end = 0
        for p in parameters:  # from now on a view of both flat tensors
            start, end = end, end + p.numel()
            self.weights[start:end] = p.detach().flatten()
            p.data = self.weights[start:end].view_as(p)
            p.grad = self.gradients[start:end].view_as(p)
        own = slice(rank * length, (rank + 1) * length)
        self.shard = nn.Parameter(self.weights[own])
        self.shard.grad = self.gradients[own]
        self.optimizer = optimizer([self.shard])  # its states are 1/N as large

    def step(self):
        """After backward: sum this shard's gradients (in place), step on it, send it to all."""
        native_reduce_scatter(self.shard.grad, self.gradients, group=self.group)
        self.optimizer.step()
        all_gather(self.weights, self.shard.detach(), group=self.group)
        self.gradients.zero_()


# --- stage 1 in full: many buckets, reduced while backward goes on


class Bucket:
    """Some parameters as one flat tensor of S elements: N equal shards, one of them this rank's.

    flat      (S,)     weights, in `param_dtype`; the parameters are views of it
    shard     (S/N,)   this rank's shard of flat
    master    (S/N,)   what the optimizer steps on: the shard, or its copy in another dtype or place
    pieces             master cut at the parameters' borders, `spans`: one a parameter, maybe empty
    full      (S,)     this rank's gradients, in `reduce_dtype`; `views`: one a parameter
    gradient  (S/N,)   this rank's shard of their sum over all ranks
    """

    keeps_weights = True  # stage 3 frees them

    def __init__(
        self, parameters, value, group, ranks, param_dtype=None, reduce_dtype=None, offload=False
    ):
        self.group, self.ranks, self.trained = group, ranks, parameters[0].requires_grad
        sizes = [p.numel() for p in parameters]
        *starts, end = accumulate(sizes, initial=0)
        self.length = -(-end // ranks)  # of a shard, rounded up
        self.size = ranks * self.length
        self.sizes = [*sizes, self.size - end]  # the last is padding
        first = dist.get_rank(group) * self.length if ranks > 1 else 0
        self.own = slice(first, first + self.length)
        # Where each parameter lies within the shard
        borders = [min(max(x - first, 0), self.length) for x in (*starts, end)]
        self.spans = [slice(*pair) for pair in pairwise(borders)]

        # One at a time, so that a large model is never whole on any rank
        values = (value(p).detach() for p in parameters)
        weights = next(values)
        self.flat = weights.new_zeros(self.size, dtype=param_dtype)
        self.shard = self.flat[self.own]
        if not self.keeps_weights:
            self.shard = self.shard.clone()
        self.master = self.shard
        if self.trained and (offload or weights.dtype != self.flat.dtype):
            place = "cpu" if offload else weights.device
            self.master = torch.zeros(self.length, dtype=weights.dtype, device=place)

        self.parameters, self.pieces = [], []
        parts = self.flat.split(self.sizes)
        for p, part, start, span in zip(parameters, parts, starts, self.spans):
            before = first - start  # how many elements of p lie before the shard, if any
            self.master[span] = weights.flatten()[before + span.start : before + span.stop]
            piece = self.master[span]
            if p.dim() > 1:
                piece = piece.unsqueeze(0)  # 2-D, so that weight decay still sees a matrix
            self.pieces.append(nn.Parameter(piece, requires_grad=self.trained))
            # Autograd refuses a saved tensor that was written since: its version counter is higher.
            # A view of .data has a counter of its own, which a gather into flat does not raise
            part = part.data.view(p.shape)
            self.parameters.append(nn.Parameter(part, requires_grad=self.trained))
            self.parameters[-1].__dict__.update(p.__dict__)
            weights = next(values, None)

        self.arrived = set()  # the numbers of the parameters whose gradients have come
        self.full = self.views = self.gradient = None
        self.reduce_dtype = reduce_dtype or self.flat.dtype
        if self.trained:
            self.make_full()
            self.gradient = self.full[self.own]

    def cut(self, flat):
        """The parameters' parts of a tensor like `flat`."""
        pieces = flat.split(self.sizes)
        return [piece.view(p.shape) for piece, p in zip(pieces, self.parameters)]

    def make_full(self):
        if self.full is None:
            self.full = self.flat.new_zeros(self.size, dtype=self.reduce_dtype)
            self.views = self.cut(self.full)

    def zero_grad(self):
        self.full.zero_()

    def add(self, i, gradient):
        self.make_full()  # stage 2 has freed it
        self.views[i].add_(gradient)
        self.arrived.add(i)

    def is_full(self):
        return len(self.arrived) == len(self.parameters)

    def keep_shard(self):
        """`gradient` is complete. Stage 2 frees the rest."""

    def publish(self):
        """Start to bring the masters' values to the weights of all ranks."""
        self.shard.copy_(self.master)  # does nothing where these are the same tensor
        if self.ranks > 1:
            return all_gather(self.flat, self.shard, group=self.group, async_op=True)

    def whole(self, shard):
        """All ranks' shards together, on the device of the weights."""
        shard = shard.to(self.flat.device)
        if self.ranks == 1:
            return shard
        whole = shard.new_empty(self.size)
        all_gather(whole, shard, group=self.group)
        return whole


def group_parameters(parameters, bucket_bytes, kind_of):
    """Lists of parameters of one kind, at most bucket_bytes each (a larger parameter gets its own),
    from the last parameter to the first: backward begins with the last layers. They are in the
    order in which they are full."""
    order = {p: i for i, p in enumerate(reversed(list(parameters)))}
    lists = []
    latest = {}  # kind: its list that is being filled
    room = {}  # kind: the bytes left in that list
    for p in order:
        kind = kind_of(p)
        if p.nbytes > room.get(kind, -1):
            latest[kind], room[kind] = [], bucket_bytes
            lists.append(latest[kind])
        latest[kind].append(p)
        room[kind] -= p.nbytes
    return sorted(lists, key=lambda members: order[members[-1]])


class ZeRO1:
    """Stage 1: each rank steps on its shards, and has 1/N of the optimizer's states.

        zero = ZeRO(model, group, 1, torch.optim.AdamW, microbatches=2)
        for micro_batches, tokens in batches:          # this rank's rows; all ranks' tokens
            zero.zero_grad()
            for x, y in micro_batches:                 # here 2
                loss = cross_entropy(model(x), y, reduction="sum") / tokens
                loss.backward()
            zero.finish()                              # the shards of the gradient are complete
            zero.clip(zero.grad_norm(), 1.0)           # clip_grad_norm_ finds no p.grad
            zero.step()                                # a scheduler goes on zero.optimizer

    Arguments, and what nobody checks: see ZeRO, below."""

    stage = 1
    bucket_type = Bucket
    reduce_each = False  # reduce in every backward pass, or only in a step's last one

    def __init__(self, model, group, optimizer, microbatches=1, bucket_bytes=25 << 20, **options):
        self.model, self.group, self.microbatches = model, group, microbatches
        gloo = dist.get_backend(group) == "gloo"
        self.reduce_scatter = DirectReduceScatter if gloo else native_reduce_scatter
        self.buckets, views = [], {}
        for parameters in group_parameters(model.parameters(), bucket_bytes, self._kind):
            bucket = self._make_bucket(parameters, group, **options)
            bucket.passes = bucket.passes_left = microbatches  # backward passes that fill it
            self.buckets.append(bucket)
            views |= zip(parameters, bucket.parameters)
        self.trained = [bucket for bucket in self.buckets if bucket.trained]
        self._install(views)
        self.optimizer = optimizer(sum((bucket.pieces for bucket in self.trained), []))
        self.works = []  # (bucket, work): reductions on their way
        self.sums = []  # works: sums of shards over copies_group
        self.queue = None  # the buckets that a backward pass has still to reduce, in their order
        self.running = False  # a backward pass is on, or an exception ended it
        self.latest = "finish()"  # the call that came last: as if, since a step may begin
        self.reduce_group = None  # another group of the same ranks, for reductions alone
        self.reload()

    def _kind(self, p):
        """What the parameters of a bucket have in common."""
        return p.requires_grad, p.dtype, p.device

    def _make_bucket(self, parameters, group, value=lambda p: p, copies_group=None, **options):
        ranks = dist.get_world_size(group) if self.stage > 0 else 1
        bucket = self.bucket_type(parameters, value, group, ranks, **options)
        bucket.copies_group = copies_group
        return bucket

    def _install(self, views):
        """Put the views where the parameters stood, with hooks that take their gradients."""
        for bucket in self.trained:
            for i, p in enumerate(bucket.parameters):
                p.register_post_accumulate_grad_hook(functools.partial(self._take, bucket, i))
        self.places = []
        for module in self.model.modules():
            for name, p in list(module.named_parameters(recurse=False, remove_duplicate=False)):
                setattr(module, name, views[p])
                self.places.append((module, name, views[p], views[p].untyped_storage()._cdata))

    # --- a step: zero_grad, backward passes, finish, step

    def zero_grad(self, give_up=False):
        """Start a step. After an exception on any rank all ranks call it with give_up=True. Not
        covered: stage 3, where ranks raised in different units."""
        if self.running or give_up:
            self._run_missing_passes(given_up=True)
        elif self.latest == "backward()":
            raise RuntimeError("there was no finish(): call it, or zero_grad(give_up=True)")
        for module, name, p, storage in self.places:
            if module._parameters.get(name) is not p or p.untyped_storage()._cdata != storage:
                raise RuntimeError(
                    f"parameter {name!r} is no longer the one that ZeRO put there: convert, move"
                    " and tie it before ZeRO(model, ...), and make one ZeRO a model"
                )
        self.running, self.latest = False, "zero_grad()"
        for bucket in self.trained:
            bucket.zero_grad()
            bucket.passes_left = bucket.passes

    def _take(self, bucket, i, p):
        """The hook of each parameter: move its gradient into the bucket. p.grad stays None, or
        somebody would take one rank's gradient for the sum."""
        gradient, p.grad = p.grad, None
        self.latest = "backward()"
        self._backward_begins()
        if self.queue is None:
            self._begin_pass()
        if bucket not in self.queue:
            raise RuntimeError(
                "a gradient came after its bucket was reduced: a weight that gets two gradients in"
                " one micro-batch needs used_twice = True (see pipeline.py)"
            )
        bucket.add(i, gradient)
        self._reduce_full()

    def _backward_begins(self):
        if not self.running:
            self.running = True
            # Called when backward is over, but not if an exception ends it
            torch.autograd.Variable._execution_engine.queue_callback(self._backward_ends)
            if torch.is_grad_enabled():
                raise RuntimeError("create_graph=True: ZeRO has no gradients of gradients")

    def _backward_ends(self):
        self.running = False
        if self.queue is not None:  # else autograd.grad in stage 3: no pass of the step
            self._end_pass()

    def _begin_pass(self):
        self.queue = [bucket for bucket in self.trained if bucket.passes_left > 0]
        if not self.queue:
            limit = f"the {self.microbatches} of microbatches="
            raise RuntimeError(f"more backward passes than {limit}: call zero_grad() each step")

    def _end_pass(self):
        self._reduce_full(rest=True)  # a parameter may have got no gradient
        self._wait()
        self.queue = None

    def _reduce_full(self, rest=False):
        # In the same order on all ranks: swapped reductions would add up the wrong buckets,
        # silently. So a bucket that is full early waits for those before it
        while self.queue and (rest or self.queue[0].is_full()):
            bucket = self.queue.pop(0)
            bucket.arrived.clear()
            bucket.passes_left -= 1
            if self.reduce_each or bucket.passes_left == 0:
                self._reduce(bucket)

    def _reduce(self, bucket):
        if bucket.ranks == 1:
            return self._keep_shard(bucket)
        shard, group = bucket.full[bucket.own], self.reduce_group or bucket.group
        work = self.reduce_scatter(shard, bucket.full, group=group, async_op=True)
        self.works.append((bucket, work))

    def _wait(self, leave=0):
        while len(self.works) > leave:
            bucket, work = self.works.pop(0)
            work.wait()
            self._keep_shard(bucket)

    def _keep_shard(self, bucket):
        bucket.keep_shard()
        if bucket.copies_group is not None and bucket.passes_left == 0:
            gradient, group = bucket.gradient, bucket.copies_group
            self.sums.append(dist.all_reduce(gradient, group=group, async_op=True))

    def finish(self):
        """Complete the gradients, after the last backward of a step."""
        if self.running:
            raise RuntimeError("an exception ended a backward pass: call zero_grad(), begin anew")
        if self.latest == "finish()":
            raise RuntimeError("finish() was called already: call zero_grad() before the next step")
        self._run_missing_passes()
        self.latest = "finish()"

    def _run_missing_passes(self, given_up=False):
        # A rank that ran fewer backward passes must still join the reductions
        while self.queue is not None or any(bucket.passes_left for bucket in self.trained):
            if self.queue is None:  # else an exception ended this pass half way
                self._begin_pass()
            if given_up:
                for bucket in self.queue:
                    bucket.make_full()
                    bucket.full.fill_(torch.nan)  # incomplete: nobody may train on it
            self._end_pass()
        for work in self.sums:
            work.wait()
        self.sums.clear()

    def step(self):
        """Step on this rank's shards, and send the new weights to all."""
        self._check_finished()
        for bucket in self.trained:
            # A copy only if the master has another dtype or place
            gradient = bucket.gradient.to(bucket.master)
            for piece, span in zip(bucket.pieces, bucket.spans):
                piece.grad = gradient[span].view(piece.shape)
        self.optimizer.step()  # once for all buckets: some optimizers count their steps
        self.optimizer.zero_grad()
        self.reload(self.trained)

    def reload(self, buckets=None):
        """The masters were filled, by a step or from a checkpoint: bring them to all ranks."""
        works = [bucket.publish() for bucket in buckets or self.buckets]
        for work in filter(None, works):
            work.wait()

    # --- beside a step: norm, clipping, whole copies

    def grad_norm(self):
        """The norm of the whole gradient: a float64 scalar, the same on all ranks."""
        self._check_finished()
        total = torch.zeros((), dtype=torch.float64, device=self.buckets[0].flat.device)
        for bucket in self.trained:
            dtype = torch.promote_types(bucket.gradient.dtype, torch.float32)
            total += torch.linalg.vector_norm(bucket.gradient, dtype=dtype).double().square()
        if self.stage > 0:
            dist.all_reduce(total, group=self.group)
        return total.sqrt()

    def clip(self, norm, limit):
        """Scale the gradients so that their global norm is at most `limit` (0: leave them)."""
        self._check_finished()
        if limit > 0:
            scale = (limit / (norm + 1e-6)).clamp(max=1.0)
            for bucket in self.trained:
                bucket.gradient.mul_(scale.to(bucket.gradient.dtype))

    @torch.no_grad()
    def whole(self, named):
        """For (name, parameter) pairs of the model: (name, whole copy in the masters' dtype), with
        the global gradient in .grad. For checks and checkpoints; every rank must call it."""
        copies = {}
        for bucket in self.buckets:
            weights = bucket.whole(bucket.master)
            for p, part in zip(bucket.parameters, bucket.cut(weights)):
                copies[p] = nn.Parameter(part.clone())
                copies[p].__dict__.update(p.__dict__)
            if bucket.trained:
                gradient = bucket.whole(bucket.gradient)
                for p, part in zip(bucket.parameters, bucket.cut(gradient)):
                    copies[p].grad = part.to(copies[p], copy=True)
        return [(name, copies[p]) for name, p in named]

    @property
    def param_groups(self):
        """The optimizer's, for learning rates."""
        return self.optimizer.param_groups

    def _check_finished(self):
        if self.latest != "finish()":
            raise RuntimeError("gradients are incomplete: call finish() after the last backward")


class DirectReduceScatter:
    """Reduce-scatter in one round: send each rank its shard, add up what arrives. A rank sends
    (N-1)/N of the input, as in a ring; gloo's own sends twice that. It is its own work handle."""

    def __init__(self, output, input, group=None, async_op=True):
        self.output, self.received = output, torch.empty_like(input)
        self.work = dist.all_to_all_single(self.received, input, group=group, async_op=True)

    def wait(self):
        self.work.wait()
        torch.sum(self.received.view(-1, len(self.output)), 0, out=self.output)
        self.received = None


class ZeRO0(ZeRO1):
    """Nothing is split, a bucket is one whole shard: DDP, with mixed precision."""

    stage = 0

    def _reduce(self, bucket):
        work = dist.all_reduce(bucket.full, group=bucket.group, async_op=True)
        self.works.append((bucket, work))


# --- stage 2: gradients too


class Bucket2(Bucket):
    """`full` has memory from the first gradient until it is reduced."""

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        if self.trained:
            self.gradient = self.gradient.clone()
            self.full = self.views = None

    def zero_grad(self):
        self.full = self.views = None
        self.gradient.zero_()

    def keep_shard(self):
        self.gradient += self.full[self.own]
        self.full = self.views = None


class ZeRO2(ZeRO1):
    """Stage 2: no rank has all gradients at once. With reduce_each=False they are reduced in the
    last micro-batch alone: less is sent, and until then all of them are held."""

    stage = 2
    bucket_type = Bucket2

    def __init__(self, *args, reduce_each=True, **options):
        self.reduce_each = reduce_each
        super().__init__(*args, **options)

    def _reduce(self, bucket):
        bucket.make_full()  # if no parameter of it got a gradient
        super()._reduce(bucket)
        self._wait(leave=1)  # at most two buckets are whole: one is on its way, one fills


# --- stage 3: weights too


class Bucket3(Bucket2):
    """`flat` has memory while any unit needs it: those are its `users`, at this moment."""

    keeps_weights = False

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.users, self.gathering = set(), None
        self.free()

    def publish(self):
        self.shard.copy_(self.master)  # the others get it when they gather

    def gather(self):
        self.flat.untyped_storage().resize_(self.flat.nbytes)
        self.gathering = all_gather(self.flat, self.shard, group=self.group, async_op=True)

    def wait(self):
        if self.gathering is not None:
            self.gathering.wait()
            self.gathering = None
            self._become(nn.Parameter)

    def free(self):
        self.wait()
        self.flat.untyped_storage().resize_(0)
        self._become(Freed)

    def _become(self, kind):
        for p in self.parameters:
            if type(p) in (nn.Parameter, Freed):  # a dry run's are of a class of torch's
                p.__class__ = kind


class Unit:
    """A module whose weights are gathered before it runs, forward or backward, and freed after."""

    def __init__(self, zero, module):
        self.zero, self.module, self.buckets = zero, module, []
        self.previous = self.following = None  # its neighbours in the order of forward
        module.register_forward_pre_hook(self.before_forward)
        module.register_forward_hook(self.after_forward)

    def gather(self):
        for bucket in self.buckets:
            if not bucket.users:
                bucket.gather()
            bucket.users.add(self)

    def release(self):
        for bucket in self.buckets:
            if bucket.users == {self}:
                bucket.free()
            bucket.users.discard(self)

    def before_forward(self, module, inputs):
        # Activation checkpointing may run it again amid its backward: then nothing is to be done
        if self.zero.in_backward is not self:
            self.zero.enter(self, self.following)

    def after_forward(self, module, inputs, result):
        if self.zero.in_backward is self:
            return
        passed_on = {id(t) for t in tree_leaves(inputs)}
        results = [t for t in tree_leaves(result) if isinstance(t, torch.Tensor)]
        results = [t for t in results if t.requires_grad and id(t) not in passed_on]
        for t in results:
            t.register_hook(self.before_backward)
        if results and self.following is None and self.zero.reshard:
            self.zero.prefetched = self  # the last unit: its backward is likely to be next
        elif self.zero.reshard or not results:
            self.release()

    def before_backward(self, gradient):
        zero = self.zero
        zero._backward_begins()
        if zero.in_backward is self:
            return
        # Autograd runs in the reverse order of forward: all that ran after this unit is done
        if zero.in_backward:
            zero.in_backward.release()
        zero.in_backward = self
        zero.enter(self, self.previous)


class ZeRO3(ZeRO2):
    """Stage 3: a rank has its shards of all weights, and the whole weights of two units at most.
    Its weights are a bucket, or several. reshard=False: whole from forward until its backward."""

    stage = 3

    def __init__(self, model, *args, units=None, reshard=True, **options):
        self.reshard = reshard
        self.in_backward = None  # the unit whose backward is on
        self.prefetched = None  # the unit that is gathered in advance
        modules = default_units(model) if units is None else units
        self.units = [Unit(self, module) for module in modules]  # in the order of forward
        for unit, following in pairwise(self.units):
            unit.following, following.previous = following, unit
        self.units_of = {p: () for p in model.parameters()}
        for unit in self.units:
            for p in unit.module.parameters():
                self.units_of[p] += (unit,)
        super().__init__(model, *args, **options | {"bucket_bytes": float("inf")})
        del self.units_of  # it holds the parameters as they were, and their memory

    def _kind(self, p):
        return self.units_of[p], super()._kind(p)

    def _make_bucket(self, parameters, *args, **options):
        users = self.units_of[parameters[0]]
        self.bucket_type = Bucket3 if users else Bucket2  # outside of units: whole, as in stage 2
        bucket = super()._make_bucket(parameters, *args, **options)
        for unit in users:
            unit.buckets.append(bucket)
        return bucket

    def enter(self, unit, following):
        """`unit` runs now, and `following` is likely to be next: gather it meanwhile."""
        if self.prefetched not in (unit, None):
            self.prefetched.release()  # a wrong guess
        unit.gather()
        for bucket in unit.buckets:
            bucket.wait()
        if following:
            following.gather()
        self.prefetched = following

    def release(self):
        for unit in self.units:
            unit.release()
        self.prefetched = self.in_backward = None

    def _backward_ends(self):
        super()._backward_ends()
        self.release()

    def _run_missing_passes(self, given_up=False):
        super()._run_missing_passes(given_up)
        self.release()

    def reload(self, buckets=None):
        self.release()  # what a forward without backward has left
        super().reload(buckets)


def default_units(module):
    """The items of the outermost containers (the blocks of a list of blocks), and the modules
    beside them (embedding, head)."""
    containers = nn.ModuleList, nn.ModuleDict, nn.Sequential
    units = [module]
    if isinstance(module, containers):
        units = module.children()
    elif any(isinstance(m, containers) for m in module.modules()):
        units = sum((default_units(child) for child in module.children()), [])
    return [unit for unit in units if next(unit.parameters(), None) is not None]


class Freed(nn.Parameter):
    """The class of a parameter while its memory is freed. Its shape can be read. Its values can
    not: torch would read memory that is not its own, and the process would die."""

    ALLOWED = set(
        "shape size dim ndim numel nelement stride dtype itemsize element_size is_floating_point"
        " is_complex device is_cuda layout untyped_storage requires_grad requires_grad_ grad"
        " grad_fn is_leaf register_hook register_post_accumulate_grad_hook new_empty new_zeros"
        " new_ones new_full empty_like zeros_like ones_like".split()
    )

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        is_property = function.__name__ in ("__get__", "__set__")
        name = function.__self__.__name__ if is_property else function.__name__
        if name not in cls.ALLOWED:
            raise RuntimeError(
                f"{name} of a weight that is not here: stage 3 has it while a unit that contains it"
                " runs. Use it within its unit's forward, or read a copy from zero.whole(...)"
            )
        with torch._C.DisableTorchFunctionSubclass():
            return function(*args, **kwargs or {})


# --- which stage

# Optimizers of torch's, or widely used ones, that don't work element by element
NOT_ELEMENTWISE = "Adafactor", "LAMB", "Lamb", "LARS", "LBFGS", "Muon", "SOAP", "Shampoo"


def has_same_shards(group, copies_group):
    """Whether all ranks of copies_group do. If not, other shards would be added, silently."""
    ranks = dist.get_process_group_ranks(copies_group)
    groups = [None] * len(ranks)
    dist.all_gather_object(groups, dist.get_process_group_ranks(group), group=copies_group)
    return len({(its.index(rank), len(its)) for its, rank in zip(groups, ranks)}) == 1


def ZeRO(model, group, stage, optimizer, microbatches=1, **options):
    """Trains `model` over `group` as `stage` (0 to 3) says. Its use: see ZeRO1.

    optimizer(pieces): makes an optimizer that works element by element.
    microbatches: the backward passes of a step.
    value(parameter): its whole initial value, on the device to use, in the masters' dtype. Default:
        the parameter itself. The model may be on the meta device.
    param_dtype, reduce_dtype: of weights and activations, and of the sum of gradients.
    offload: masters and optimizer states in the host's memory.
    bucket_bytes: the largest bucket of stages 0 to 2. reduce_each, in 2 and 3: see ZeRO2.
    copies_group: for HSDP, where several groups split a copy each: the ranks that hold the same
        shards, one of each group. Once a step the gradient's shards are summed over them too.
    units, in stage 3: modules, in the order of forward (see default_units). reshard: see ZeRO3.

    Before: all ranks have equal weights, loaded, tied and frozen as they shall be. The parameters
    are replaced in place. Activation checkpointing needs use_reentrant=False. Nobody checks: in
    stage 3 all ranks must run the same units in the same order. docs/memory.md has the rest."""
    if stage not in (0, 1, 2, 3):
        raise ValueError(f"there is no stage {stage!r} of ZeRO: choose 0, 1, 2 or 3")
    if not isinstance(model, nn.Module):
        kind = type(model).__name__
        raise ValueError(f"ZeRO replaces a model's parameters: give it the model, not a {kind}")
    copies_group = options.get("copies_group")
    if stage == 0 and copies_group:
        raise ValueError("stage 0 splits nothing: leave copies_group out")
    if copies_group and not has_same_shards(group, copies_group):
        raise ValueError("copies_group must have one rank of each group, at the same place of each")
    if any(hasattr(p, "placement") for p in model.parameters()):
        raise ValueError("another kind of parallelism cut the model: see trainer/composed_zero.py")
    if isinstance(optimizer, torch.optim.Optimizer):
        raise ValueError("give ZeRO a function that makes the optimizer: torch.optim.AdamW")
    zero = (ZeRO0, ZeRO1, ZeRO2, ZeRO3)[stage](model, group, optimizer, microbatches, **options)
    kind = type(zero.optimizer).__name__
    if kind in NOT_ELEMENTWISE:
        raise ValueError(f"{kind} needs whole matrices, ZeRO has pieces of them: take AdamW or SGD")
    return zero


# --- demo ---

import harness
import proof
import receipts.zero
from harness import zero_flags


def flags():
    parser = harness.parser(__doc__)
    g = parser.add_argument_group("ZeRO")
    why = "split: 0 nothing, 1 optimizer states, 2 gradients too, 3 weights too (default: 3)"
    g.add_argument("--stage", type=int, choices=range(4), help=why)
    zero_flags.add_flags(g, bucket_mb=0.5, ranks_flag="--shard-ranks")
    why = "train nothing: the largest model that fits 80 GB on 64 ranks, for --stage or for all"
    g.add_argument("--fit", action="store_true", help=why)
    return parser


def main():
    args = flags().parse_args()
    if args.fit:
        return receipts.zero.fit(ZeRO, range(4) if args.stage is None else [args.stage])
    args.stage = 3 if args.stage is None else args.stage
    zero_flags.check(args, args.stage)
    harness.configure(args)
    proof.launch(demo, args, check=functools.partial(zero_flags.check_world, args))


def demo(run):
    args = run.args
    group, copies_group = zero_flags.make_groups(run)
    model = run.meta_model()
    options = zero_flags.options(run, model, args.stage) | {"copies_group": copies_group}
    optimizer = functools.partial(harness.make_optimizer, args=args)
    zero = ZeRO(model, group, args.stage, optimizer, args.microbatches, **options)
    for step in run.steps(zero):
        zero.zero_grad()
        loss = run.zero()
        for tokens, targets, samples in run.microbatches(step, run.rank, run.world):
            # count: the tokens of the global batch
            part = model(tokens, targets=targets, count=run.count, samples=samples)
            part.backward()
            loss += part.detach()
        zero.finish()
        dist.all_reduce(loss)
        norm = zero.grad_norm()
        run.check(loss, norm, lambda: zero.whole(model.named()))
        zero.clip(norm, args.grad_clip)
        zero.step()
        run.log(loss, norm)
    return run.receipt(*receipts.zero.of_demo(run))


if __name__ == "__main__":
    harness.script(main)
