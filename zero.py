"""ZeRO: data-parallel ranks split the optimizer's states, and then the gradients.

    stage  split                 weights   gradients  optimizer  bytes per parameter  a rank sends
      0    nothing, as DDP       ########  ########   ########   2 + 2 + 12           2 r P e
      1    optimizer states      ########  ########   ##         2 + 2 + 12/N         2 r P e
      2    gradients too         ########  ##         ##         2 + 2/N + 12/N       (1+m) r P e
      3    weights too: fsdp.py  ##        ##         ##         2/N + 2/N + 12/N     3 m r P e

A bar is what one of 4 ranks holds. P parameters of e bytes, N ranks, m micro-batches, r = (N-1)/N.
Bytes: 2 for a 16-bit weight, 2 for its gradient, and 12 for the optimizer: a 32-bit master copy of
the weight, and Adam's two moments.

    parameters   | up           | bias | wk     | wq      |//|    all in one flat tensor
    shards       | rank 0   | rank 1   | rank 2   | rank 3   |    N equal shards; // is padding

Split     Adam and SGD treat each element separately, so each rank can update 1/N of the
          elements: its shard.
Sent      Gradients are reduce-scattered: a rank gets its shard of their sum. New weights are
          all-gathered: a rank gets all shards. Each sends r P e bytes, half of DDP's all-reduce.
          Stage 2 reduce-scatters after each micro-batch, because it keeps no whole gradients. The
          norm adds an all-reduce of 8 bytes.
Backward  The model's own. Each rank's loss is the sum over its targets, divided by the number of
          targets of all ranks (ddp.py's count_targets). So the gradients add up to that of the
          batch.
Use       Stage 1 instead of DDP: it sends the same bytes, and holds 1/N of the optimizer. (The
          gather comes after the step, and here nothing hides it.) Stage 2 if m = 1 (it sends the
          same, and holds less), or where gradients don't fit. Not with an optimizer that needs
          whole matrices. For more: docs/learn/memory.md.

    torchrun --nproc_per_node=4 zero.py                (needs model.py, to train and prove itself)

Rajbhandari et al. 2020, ZeRO, arXiv:1910.02054.
"""

import argparse
import contextlib
import functools
from itertools import accumulate

import torch
import torch.distributed as dist
import torch.nn as nn

# torch 2.13 renamed them; older versions know only the second name
all_gather_into_tensor = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_tensor = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

# --- stages 1 and 2 in their plainest form


class PlainZeRO:
    """One flat tensor, reduced after backward. The optimizer steps on this rank's `shard` of it.

    zero_grad()  begins a step. Then backward for each micro-batch
    reduce()     stage 1: after the last backward. Stage 2: after each. Then this rank's shard of
                 the gradients stays
    step()       ends it. To clip before it: norm_of_shards([shard.grad], group) is the norm over
                 all ranks

    All ranks start with equal weights. The optimizer sees one flat shard: it can't leave vectors
    out of weight decay, for example. Its states are 1/N of DDP's. Gradients take more than DDP's
    while reduce() runs: they are there twice, in p.grad and in the flat tensor that it sends. So
    here stage 2 saves memory between passes only. In stage 2 of ZeRO, below, about two buckets are
    whole at a time, if gradients come in the reverse order of the parameters."""

    def __init__(self, model, group, make_optimizer):
        self.group, self.parameters = group, list(model.parameters())
        if len({(p.dtype, p.requires_grad) for p in self.parameters}) > 1:
            raise ValueError("one flat tensor can't hold two dtypes, or frozen weights: take ZeRO")
        if any(hasattr(p, "placement") for p in self.parameters):
            raise ValueError("another technique has cut the model: take ZeRO, with groups_of")
        rank, ranks = dist.get_rank(group), dist.get_world_size(group)
        size = sum(p.numel() for p in self.parameters)
        length = -(-size // ranks)  # of a shard, rounded up
        self.padding = self.parameters[0].new_zeros(ranks * length - size)
        self.weights = self.flatten(p.detach() for p in self.parameters)
        end = 0
        for p in self.parameters:  # from now on a view of the flat tensor
            start, end = end, end + p.numel()
            p.data = self.weights[start:end].view_as(p)
        # A view, too: the optimizer's step on it changes this part of `weights`
        self.shard = nn.Parameter(self.weights[rank * length : (rank + 1) * length])
        self.optimizer = make_optimizer([self.shard])  # its states are 1/N as large

    def zero_grad(self):
        self.shard.grad = torch.zeros_like(self.shard)

    def flatten(self, tensors):
        return torch.cat([*(t.flatten() for t in tensors), self.padding])

    def reduce(self):
        """After backward: add this shard of the ranks' summed gradients to shard.grad."""
        # Zeros, because every rank must send something for every parameter
        gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in self.parameters]
        gradient = torch.empty_like(self.shard)
        reduce_scatter_tensor(gradient, self.flatten(gradients), group=self.group)
        self.shard.grad += gradient
        for p in self.parameters:
            p.grad = None  # freed: only the shard stays

    def step(self):
        """After the last reduce: step on this shard, and send it to all."""
        self.optimizer.step()
        # In place: every rank has changed its own part
        all_gather_into_tensor(self.weights, self.shard.detach(), group=self.group)


def norm_of_shards(gradients, group):
    """The norm of the whole gradient, of which this rank has `gradients`: a float64 scalar, the
    same on all ranks."""
    square = sum(torch.linalg.vector_norm(g, dtype=torch.float64).square() for g in gradients)
    dist.all_reduce(square, group=group)  # each rank has other elements: their squares add up
    return square.sqrt()


# --- many buckets, reduced while backward goes on

OTHER_LOSS = "or another network's loss reached this one (a GAN): freeze it in that pass"


class ZeRO:
    """Trains `model` over `group`, its data-parallel ranks, in stage 0, 1 or 2.

    A step is zero_grad(), `microbatches` backward passes, step(). A learning-rate scheduler takes
    zero.optimizer. To clip before step(): clip(grad_norm(), limit). Not torch's clip_grad_norm_: it
    finds no p.grad, and does nothing, silently.

    make_optimizer  called with a list of this rank's pieces of parameters, to be treated element by
                    element. piece.param_name is the parameter's name: for weight decay by name
    microbatches    backward passes of a step
    bucket_bytes    of the largest bucket; a larger parameter has one of its own
    reduce_scatter  in place of torch's: (shard, full, group=group) -> a handle with wait()
    groups_of       beside another technique (advanced/composition.py): a function p -> (group,
                    *partial). p's gradient is summed and sharded over `group`; then its shards are
                    summed over each group of `partial`
    options         of ShardedBucket, such as param_dtype=torch.bfloat16

    In place of `group` a pair (node, across) is HSDP: each node holds a whole copy of the states,
    split over its own ranks; `across` are the ranks of all nodes with the same shard. In place of
    the model {stage: module}: the stages of a pipeline that this rank has. Each stage has backward
    passes of its own. With several stages give the pipeline around=zero.around.

    Before ZeRO(...), on all ranks alike: load, tie and freeze the weights, move and cast the model.
    (torch's DDP broadcasts rank 0's; ZeRO doesn't.) Activation checkpointing needs
    use_reentrant=False. If backward raises, end the run on all ranks: others may wait. For a loss
    that reaches another network's weights too (GAN), freeze those in its pass. A model that is all
    frozen, such as a reference model in FSDP, gets no optimizer, and takes no step."""

    def __init__(
        self,
        model,
        group,
        stage,
        make_optimizer,
        microbatches=1,
        bucket_bytes=25 << 20,
        reduce_scatter=functools.partial(reduce_scatter_tensor, async_op=True),
        groups_of=None,
        **options,
    ):
        if stage not in (0, 1, 2):
            raise ValueError(f"there is no stage {stage!r} of ZeRO: 0, 1 or 2; 3 is fsdp.FSDP")
        stages = model if isinstance(model, dict) else {None: model}
        self.stages_of, names = {}, {}  # of each parameter: the stages whose backward fills it
        for number, module in stages.items():
            for name, p in module.named_parameters():
                self.stages_of[p] = (*self.stages_of.get(p, ()), number)
                names[p] = name
        if groups_of is None and any(hasattr(p, "placement") for p in self.stages_of):
            raise ValueError("another technique has cut the model: give groups_of")
        self.in_grid, self.groups_of = groups_of is not None, groups_of or (lambda p: (group,))
        self.model = nn.ModuleList(stages.values()) if isinstance(model, dict) else model
        self.group = group[0] if isinstance(group, tuple) else group
        self.stage, self.microbatches = stage, microbatches
        self.reduce_scatter = reduce_scatter
        self.action = None  # the pipeline's action that runs now; None without a pipeline
        # Of the gradients. "zero": after zero_grad(). "arriving": in a backward pass. "local":
        # after it, not all summed over the ranks. "summed": after finish()
        self.state = "summed"
        self.queue = []  # buckets that the running backward pass has yet to reduce, in this order
        self.reductions = []  # (bucket, handle) of the reductions on their way
        self.sums_across = []  # handles of HSDP's sums over nodes
        self.buckets = []
        for parameters in group_parameters(self.model.parameters(), bucket_bytes, self.kind_of):
            self.buckets.append(self.make_bucket(parameters, **options))
        self.trained_buckets = [bucket for bucket in self.buckets if bucket.trainable]
        pieces = []
        for bucket in self.trained_buckets:
            pieces += bucket.pieces
            for i, p in enumerate(bucket.parameters):
                bucket.pieces[i].param_name = names[p]
                p.register_post_accumulate_grad_hook(functools.partial(self._arrived, bucket, i))
        self.optimizer, self.param_groups = None, []
        if pieces:  # else all is frozen
            self.optimizer = make_optimizer(pieces)
            self.param_groups = self.optimizer.param_groups  # for learning rates
        if type(self.optimizer).__name__ in ("Adafactor", "LAMB", "LBFGS", "Muon", "SOAP"):
            raise ValueError("this optimizer needs whole matrices, and ZeRO has pieces of them")

    def zero_grad(self):
        if self.state in ("arriving", "local"):
            why = f"without finish(); or backward raised; {OTHER_LOSS}"
            raise RuntimeError(f"zero_grad() after backward(), {why}")
        # Each p must still be a view of a bucket, and trainable or frozen as it was then
        storages = {b.weights.untyped_storage()._cdata: b.trainable for b in self.buckets}
        for p in self.model.parameters():
            if storages.get(p.untyped_storage()._cdata) != p.requires_grad:
                what = "replaced, moved or cast, frozen or unfrozen"
                raise RuntimeError(f"a parameter was {what} after ZeRO: do it before")
        self.state = "zero"
        for bucket in self.trained_buckets:
            bucket.zero_grad()

    def _arrived(self, bucket, i, p):  # the hook of each p, after autograd has added to p.grad
        gradient, p.grad = p.grad, None  # left in p.grad, it would look like the sum
        if self.state != "arriving":  # the first gradient of a backward pass
            self.state, self.queue = "arriving", self.buckets_of_pass()
            # Called when backward is over, but not if an exception ends it
            torch.autograd.Variable._execution_engine.queue_callback(self._backward_ends)
        if bucket not in self.queue:
            count = f"microbatches={self.microbatches}, or no zero_grad(); {OTHER_LOSS}"
            twice = "or FSDP's model ran twice before backward: units=[model]"
            raise RuntimeError(f"more backward passes than {count}; {twice}")
        bucket.add(i, gradient)
        self._reduce_ready()

    def _reduce_ready(self, anyway=()):
        """Start to reduce the queue's next buckets, as long as they are full or in `anyway`."""
        if self.action and self.action.kind == "I":  # zero_bubble.py: weights' gradients come in W
            return
        # All ranks start reductions in one order, or they would add up different buckets, silently.
        # So a bucket that is full early waits for those before it
        while self.queue and (all(self.queue[0].waiting) or self.queue[0] in anyway):
            bucket = self.queue.pop(0)
            bucket.end_pass()
            if bucket.reduce_each or bucket.passes_left == 0:
                self.reductions.append((bucket, bucket.start_reduction(self.reduce_scatter)))
            if self.stage >= 2:
                self._wait(leave=1)  # two buckets are whole: one is on its way, one fills

    def _backward_ends(self):
        self._reduce_ready(anyway=list(self.queue))  # a parameter may have got no gradient
        self.state, self.queue = "local", []
        if self.stage >= 2:
            self._wait()  # and free the last buckets' gradients

    def _wait(self, leave=0):
        """Wait for the reductions on their way, but for the last `leave` of them."""
        while len(self.reductions) > leave:
            bucket, reduction = self.reductions.pop(0)
            if reduction is not None:
                reduction.wait()
            bucket.keep_shard()
            if bucket.across is not None and bucket.passes_left == 0:  # HSDP: sum over nodes, too
                options = dict(group=bucket.across, async_op=True)
                self.sums_across.append(dist.all_reduce(bucket.gradient_shard, **options))

    def finish(self):
        """Wait until all gradients are summed. grad_norm(), clip() and step() call it."""
        if self.state == "summed":
            return
        self._wait()
        # A rank that ran fewer backward passes must still join the others' reductions, with zeros
        while any(bucket.passes_left for bucket in self.trained_buckets):
            self.queue = self.buckets_of_pass()
            self._reduce_ready(anyway=list(self.queue))
            self._wait()  # a bucket has one reduction at a time
        while self.sums_across:
            self.sums_across.pop().wait()
        # Not in backward: two stages of a pipeline that share a matrix would wait for each other
        for bucket in self.trained_buckets:
            for group in bucket.partial:
                dist.all_reduce(bucket.gradient_shard, group=group)
        self.state = "summed"

    def step(self):
        """Step on this rank's shards, and send the new weights to all. Called again without
        zero_grad() it steps with the same gradients, as torch's optimizers do."""
        self.finish()
        for bucket in self.trained_buckets:
            bucket.give_gradients()
        self.optimizer.step()  # once for all buckets: some optimizers count their steps
        self.optimizer.zero_grad()  # gradient_shard keeps the gradients
        self.update_weights(self.trained_buckets)

    def update_weights(self, buckets=None):
        """The masters have new values, from a step or a checkpoint: bring them to all ranks."""
        for bucket in reversed(buckets or self.buckets):  # forward needs the last bucket first
            bucket.start_update()
        await_weights(self.buckets)

    def grad_norm(self):
        """The norm of the whole gradient: a float64 scalar, the same on all ranks."""
        self.finish()
        if self.in_grid:
            raise RuntimeError("other ranks have other parts: take norm_in_grid(gradient_parts())")
        shards = [bucket.gradient_shard for bucket in self.trained_buckets]
        if self.stage == 0:  # each rank has the whole gradient
            return torch.stack(torch._foreach_norm(shards, dtype=torch.float64)).norm()
        return norm_of_shards(shards, self.group)

    def clip(self, norm, limit):
        """Scale the gradients so that their global norm is at most `limit` (0: leave them)."""
        self.finish()
        if limit > 0:
            scale = (limit / (norm + 1e-6)).clamp(max=1.0)
            for bucket in self.trained_buckets:
                bucket.gradient_shard.mul_(scale.to(bucket.gradient_shard.dtype))

    @torch.no_grad()
    def gather_full(self, named):
        """For (name, parameter) pairs, as of model.named_parameters(): (name, unsplit copy in the
        masters' dtype). After finish() its .grad is the whole gradient. All ranks call it, and each
        gets the whole model and its gradients on its device, whatever pairs it names."""
        copies = {}
        for bucket in self.buckets:
            weights = gather_shards(bucket, bucket.master)
            gradients = gather_shards(bucket, bucket.gradient_shard) if bucket.trainable else None
            for p, place in zip(bucket.parameters, bucket.slices):
                copies[p] = copy = nn.Parameter(
                    weights[place].view(p.shape).clone(), bucket.trainable
                )
                copy.__dict__.update(p.__dict__)  # attributes that others have set
                if bucket.trainable:
                    copy.grad = gradients[place].view(p.shape).to(copy, copy=True)
        return [(name, copies[p]) for name, p in named]

    # --- what FSDP overrides

    def kind_of(self, p):  # equal for all parameters of a bucket
        return p.requires_grad, p.dtype, p.device, self.groups_of(p), self.stages_of[p]

    def make_bucket(self, parameters, stage=None, bucket_class=None, **options):
        group, *partial = self.groups_of(parameters[0])
        node, across = group if isinstance(group, tuple) else (group, None)
        ranks_of = dist.get_process_group_ranks
        if across and len(set(ranks_of(node)).intersection(ranks_of(across))) > 1:
            raise ValueError("HSDP: give (node, across), which have only this rank in common")
        stages = self.stages_of[parameters[0]]
        options |= dict(stage=stage or self.stage, passes=self.microbatches * len(stages))
        bucket = (bucket_class or ShardedBucket)(parameters, node, **options)
        bucket.across, bucket.partial, bucket.pipeline_stages = across, partial, stages
        return bucket

    # --- beside another technique: advanced/composition.py

    def gradient_parts(self):
        """For the norm: [(parameter, this rank's part of its gradient, split over how many)]."""
        self.finish()
        parts = []
        for bucket in self.buckets:
            for i, p in enumerate(bucket.parameters):
                part = bucket.part_of(i, bucket.gradient_shard) if bucket.trainable else None
                parts.append((p, part, bucket.ranks))
        return parts

    @contextlib.contextmanager
    def around(self, action):
        """A pipeline enters it around each action that it runs."""
        self.action = action
        yield
        self.action = None

    def buckets_of_pass(self):
        """Those that the running backward pass fills: its stage's."""
        buckets = [bucket for bucket in self.trained_buckets if bucket.passes_left > 0]
        if self.action is None:
            return buckets
        return [b for b in buckets if self.action.stage in b.pipeline_stages]


class ShardedBucket:
    """Some parameters as one flat tensor of S elements, with padding: a shard of S/N for each rank.

    weights         (S,)    the model's parameters are views of it
    shard           (S/N,)  this rank's shard of the weights
    master          (S/N,)  what the optimizer steps on: the shard, or a copy with more bits
    pieces                  the master, cut at the parameters' borders, one of each parameter, some
                            empty: so the optimizer can treat matrices and vectors differently
    gradients       (S,)    of this rank. Each p.grad is added to it. (Not a view of it, as in
                            ddp.py, because stage 2 frees `gradients` after each reduction)
    gradient_shard  (S/N,)  this rank's shard of their sum over all ranks

    passes        backward passes of a step
    param_dtype   of weights and backward. Masters then have the parameters' dtype, or float32 if
                  that has fewer bits. None: all have the parameters' dtype. Integers, such as
                  packed 4-bit weights, keep theirs
    reduce_dtype  in which gradients are summed over ranks and over micro-batches. None: as the
                  weights, so with bfloat16 weights a small gradient is lost beside a large sum
    reduce_each   False: stage 2 reduces, and so frees, in the last pass only: it sends less, and
                  holds more
    value         a function: value(p) is p's initial value. So p itself may be without memory, such
                  as torch.empty(()).expand(shape)"""

    def __init__(
        self,
        parameters,
        group,
        stage,
        passes,
        param_dtype=None,
        reduce_dtype=None,
        reduce_each=True,
        value=lambda p: p,
    ):
        self.parameters, self.group, self.stage, self.passes = parameters, group, stage, passes
        self.reduce_each = reduce_each and stage >= 2  # else in the last pass only
        self.trainable = parameters[0].requires_grad
        rank, self.ranks = dist.get_rank(group), dist.get_world_size(group)
        if stage == 0:  # one shard, the whole
            rank, self.ranks = 0, 1
        # Where the parameters are in the flat tensor, and where the shard is
        ends = list(accumulate(p.numel() for p in parameters))
        self.slices = [slice(end - p.numel(), end) for p, end in zip(parameters, ends)]
        length = max(-(-ends[-1] // self.ranks), 1)  # rounded up; gloo refuses empty messages
        self.own_slice = slice(rank * length, (rank + 1) * length)
        # The weights
        values = [value(p).detach().flatten() for p in parameters]
        padding = values[0].new_zeros(self.ranks * length - ends[-1])
        full = torch.cat([*values, padding])
        if param_dtype is not None and full.is_floating_point():
            full = full.to(torch.promote_types(full.dtype, torch.float32))
            self.weights = full.to(param_dtype)
        else:
            self.weights = full
        self.shard = self.weights[self.own_slice]
        if stage == 3:  # FSDP frees the weights; the shard stays
            self.shard = self.shard.clone()
        self.master = self.make_master(full[self.own_slice])
        self.gathering = None  # the all-gather of new weights that is on its way
        # The parameters
        self.pieces = []
        for i, p in enumerate(parameters):
            p.data = self.weights[self.slices[i]].view(p.shape)
            p.grad = None
            p.stepped_on_in_pieces = True  # diloco.py refuses such p, and wants the pieces
            piece = self.part_of(i, self.master)
            if p.dim() > 1:
                piece = piece.unsqueeze(0)  # 2-D, so that weight decay still sees a matrix
            self.pieces.append(nn.Parameter(piece, self.trainable))
        # The gradients
        self.passes_left = passes
        # How many gradients of each parameter wait for a reduction: 0 or 1. (2 if backward runs in
        # two parts, as in advanced/zero_bubble.py, and the next pass's gradient comes early)
        self.waiting = [0] * len(parameters)
        self.reduce_dtype = reduce_dtype or self.weights.dtype
        self.gradients = self.gradient_shard = None
        if self.trainable and stage < 2:
            self.allocate_gradients()
            self.gradient_shard = self.gradients[self.own_slice]
        elif self.trainable:
            self.gradient_shard = torch.zeros_like(self.shard, dtype=self.reduce_dtype)

    def make_master(self, values):
        if self.trainable and values.dtype != self.shard.dtype:
            return values.clone()
        return self.shard

    def part_of(self, i, shard):
        """What a tensor like `shard` has of parameter i: all, a part or nothing."""
        start = self.slices[i].start - self.own_slice.start
        stop = self.slices[i].stop - self.own_slice.start
        return shard[max(start, 0) : max(stop, 0)]

    def zero_grad(self):
        self.passes_left = self.passes
        gradients = self.gradient_shard if self.stage >= 2 else self.gradients
        gradients.zero_()

    def allocate_gradients(self):
        if self.gradients is None:
            self.gradients = torch.zeros_like(self.weights, dtype=self.reduce_dtype)

    def add(self, i, gradient):
        self.allocate_gradients()
        self.gradients[self.slices[i]].add_(gradient.flatten())
        self.waiting[i] += 1

    def end_pass(self):
        self.passes_left -= 1
        self.waiting = [max(n - 1, 0) for n in self.waiting]

    def start_reduction(self, reduce_scatter):
        """Start to sum the gradients over the ranks. Returns a handle with wait(), or None."""
        self.allocate_gradients()  # if no parameter of it got a gradient
        if dist.get_world_size(self.group) == 1:
            return None
        if self.stage == 0:
            return dist.all_reduce(self.gradients, group=self.group, async_op=True)
        return reduce_scatter(self.gradients[self.own_slice], self.gradients, group=self.group)

    def keep_shard(self):
        """The sum is there. Stage 2 frees all but this rank's shard."""
        if self.stage >= 2:
            self.gradient_shard += self.gradients[self.own_slice]
            self.gradients = None

    def give_gradients(self):
        """To the pieces, for the optimizer."""
        gradient = self.gradient_shard.to(self.master.dtype)  # itself, or a copy
        for i, piece in enumerate(self.pieces):
            piece.grad = self.part_of(i, gradient).view(piece.shape)

    def start_update(self):
        """The master has new values: start to bring them to all ranks. (FSDP gathers later.)"""
        if self.master is not self.shard:
            self.shard.copy_(self.master, non_blocking=True)
        if self.ranks > 1 and self.stage < 3:
            self.start_gather()

    def start_gather(self):
        self.gathering = all_gather_into_tensor(self.weights, self.shard, self.group, async_op=True)


def await_weights(buckets):
    for bucket in buckets:
        if bucket.gathering is not None:
            bucket.gathering.wait()
            bucket.gathering = None


def gather_shards(bucket, shard):
    """All ranks' shards together, on the device of the weights."""
    full = shard = shard.to(bucket.weights.device)
    if bucket.ranks > 1:
        full = shard.new_empty(bucket.ranks * len(shard))
        all_gather_into_tensor(full, shard, group=bucket.group)
    return full


def group_parameters(parameters, bucket_bytes, kind_of):
    """Lists of at most bucket_bytes, one per bucket, from the last parameter to the first, as
    backward reaches them. A larger parameter has a list of its own. Parameters share a list only if
    kind_of(p), such as dtype and group, is equal. Backward completes the first list first."""
    position = {p: i for i, p in enumerate(reversed(list(parameters)))}
    lists, newest = [], {}  # newest: {kind: its last list}
    for p in position:
        kind = kind_of(p)
        members = newest.get(kind)
        if members is None or sum(q.nbytes for q in members) + p.nbytes > bucket_bytes:
            members = newest[kind] = []
            lists.append(members)
        members.append(p)
    # Lists of different kinds interleave. Sort them by the parameter that backward reaches last
    return sorted(lists, key=lambda members: position[members[-1]])


# --- demo ---

if __name__ == "__main__":  # importing this file needs no model.py
    from model import GPT, Config, OneProcess, Sent, join_ranks, leave, text_batch


def main():
    parser = argparse.ArgumentParser(description="train a GPT in each stage, and prove it")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--microbatches", type=int, default=2, help="of each rank, a step")
    parser.add_argument("--bucket-kb", type=float, default=50, help="the largest bucket")
    args = parser.parse_args()
    device = join_ranks()
    for form, stage in ("plain", 1), ("plain", 2), ("full", 0), ("full", 1), ("full", 2):
        train(form, stage, args, device)
    leave()


def train(form, stage, args, device):
    group, m = dist.group.WORLD, args.microbatches
    rank, ranks = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)  # all ranks draw equal weights
    model = GPT(Config(layers=2, width=32, context=32)).to(device, torch.float64)
    one = OneProcess(model, torch.optim.AdamW)
    if form == "plain":
        zero = PlainZeRO(model, group, torch.optim.AdamW)
        size = zero.weights.nbytes
    else:
        zero = ZeRO(model, group, stage, torch.optim.AdamW, m, args.bucket_kb * 1024)
        size = sum(bucket.weights.nbytes for bucket in zero.buckets)
    if rank == 0:
        print(f"{form}, stage {stage}, {ranks} ranks, {m} micro-batches")
    for step in range(args.steps):
        tokens, targets, count = text_batch(step, 2 * m * ranks + 1, 32, device)
        rows = torch.arange(len(tokens)).tensor_split(ranks)[rank]  # unequally many
        loss = torch.zeros_like(count, dtype=torch.float64)
        with Sent() as sent:
            zero.zero_grad()
            for i, micro_batch in enumerate(rows.tensor_split(m)):
                x, y = tokens[micro_batch], targets[micro_batch]
                part = model(x, targets=y, target_count=count)  # the sum over y, divided by count
                part.backward()
                loss += part.detach()
                if form == "plain" and (stage == 2 or i == m - 1):
                    zero.reduce()
            if form == "plain":
                norm = norm_of_shards([zero.shard.grad], group)
                nn.utils.clip_grads_with_norm_([zero.shard], 0.5, norm)
            else:
                zero.clip(zero.grad_norm(), 0.5)
            zero.step()
        dist.all_reduce(loss)  # a rank has its part of the loss, as of the gradients
        alone = one.train_step(tokens, targets, count, 0.5)
        one.compare(step, loss, alone, gather_full(zero, model))
    r = (ranks - 1) / ranks
    text, times = ("(1+m) r P e", 1 + m) if stage == 2 else ("2 r P e", 2)
    norm_bytes = 2 * r * 8 if stage > 0 else 0  # in stage 0 each rank has the whole gradient
    one.prove(sent, f"{text}, and the norm", times * r * size + norm_bytes)


def gather_full(zero, model):
    """(name, unsplit copy, with its whole gradient) of each parameter."""
    if isinstance(zero, ZeRO):
        return zero.gather_full(model.named_parameters())
    gradients = torch.empty_like(zero.weights)
    all_gather_into_tensor(gradients, zero.shard.grad, group=zero.group)
    copies = [(name, p.detach().clone()) for name, p in model.named_parameters()]
    sizes = [copy.numel() for _, copy in copies]
    for (_, copy), gradient in zip(copies, gradients[: sum(sizes)].split(sizes)):
        copy.grad = gradient.view_as(copy)
    return copies


if __name__ == "__main__":
    main()
