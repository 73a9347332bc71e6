"""ZeRO: data-parallel ranks split the optimizer's states, and then the gradients.

    stage  split                 weights   gradients  optimizer  held per parameter  a rank sends
      0    nothing, as DDP       ########  ########   ########   2 + 2 + 12          2 r P e
      1    optimizer states      ########  ########   ##         2 + 2 + 12/N        2 r P e
      2    gradients too         ########  ##         ##         2 + 2/N + 12/N      (1+m) r P e
      3    weights too: fsdp.py  ##        ##         ##         2/N + 2/N + 12/N    3 m r P e

P parameters of e bytes on N ranks (drawn: 4), m micro-batches, r = (N-1)/N. Bytes held: 2 for a
16-bit weight, 2 for its gradient, 12 for its 32-bit master copy and Adam's two moments.

    parameters   | up           | bias | wk     | wq      |//|    a bucket is one flat tensor
    shards       | rank 0   | rank 1   | rank 2   | rank 3   |    N equal shards; // is padding

Split     Adam and SGD treat each element separately, so each rank can update 1/N of the
          elements: its shard.
Sent      Gradients are reduce-scattered: a rank gets its shard of their sum. New weights are
          all-gathered: a rank gets all shards. Each sends r P e bytes, half of DDP's all-reduce.
Backward  Hooks copy each gradient into its bucket, the last layer's first. A full bucket is
          reduce-scattered while backward continues: in stage 1 in the last micro-batch only, in
          stage 2 in each, which frees it. step() waits, steps on shards, and gathers weights.
Use       Stage 1 instead of DDP: it sends the same bytes, and holds 1/N of the optimizer. Stage 2
          if m = 1 (it sends the same, and holds less), or where gradients don't fit. Neither goes
          with Muon, which needs whole matrices. Stage 0 is DDP, with master weights if wanted.

    torchrun --nproc_per_node=4 zero.py --stage 2               python zero.py --fit

Rajbhandari et al. 2020, ZeRO, arXiv:1910.02054.
"""

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
    """The whole idea: one bucket, reduced after backward.

        zero = PlainZeRO(model, group, torch.optim.SGD)
        for x, y in batches:          # this rank's rows; target_count counts all ranks' targets
            (cross_entropy(model(x), y, reduction="sum") / target_count).backward()
            zero.step()

    With several micro-batches call step() after the last one's backward. For stage 2 call reduce()
    after each of the others: between them only this rank's shard of the gradients stays.

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
        # A view, too: the optimizer's step on it changes this part of `weights`
        self.shard = nn.Parameter(self.weights[rank * length : (rank + 1) * length])
        self.shard.grad = torch.zeros_like(self.shard)
        self.optimizer = make_optimizer([self.shard])  # its states are 1/N as large

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
        """After the last backward: reduce, step on this shard, send it to all."""
        self.reduce()
        self.optimizer.step()
        # In place: every rank has changed its own part
        all_gather_into_tensor(self.weights, self.shard.detach(), group=self.group)
        self.shard.grad.zero_()


# --- stages 0 to 2 in full. First a bucket: its weights, gradients and shards


class ShardedBucket:
    """Some parameters as one flat tensor of S elements, with padding: a shard of S/N for each rank.

    weights         (S,)    the model's parameters are views of it
    shard           (S/N,)  this rank's shard of the weights
    master          (S/N,)  what the optimizer steps on: the shard, or a copy of it (MasterBucket)
    pieces                  the master, cut at the parameters' borders; some are empty. So the
                            optimizer can treat matrices and vectors apart
    gradients       (S,)    of this rank; stage 2 frees it after each reduction
    gradient_shard  (S/N,)  this rank's shard of their sum over all ranks"""

    reduce_dtype = None  # of gradients; None: that of the weights

    def __init__(
        self,
        parameters,
        group,  # the ranks that split them
        stage,
        passes,  # the backward passes of a step
        value=lambda p: p,  # gives p's initial value, on the device to use
        reduce_each=True,  # False: stage 2 reduces, and so frees, in the last pass only: sends less
    ):
        self.group, self.stage = group, stage
        rank, self.ranks = dist.get_rank(group), dist.get_world_size(group)
        if stage == 0:  # one shard, the whole
            rank, self.ranks = 0, 1
        self.trainable = parameters[0].requires_grad
        self.reduce_each = reduce_each and stage >= 2  # else in the last pass only
        self.passes = self.passes_left = passes
        # Gradients of each parameter that have come, for the running pass and for later ones: a
        # backward in two parts (zero_bubble.py) brings some of the next micro-batch's early
        self.arrived = [0] * len(parameters)
        self.gathering = None  # the all-gather of new weights that is on its way
        # Where the parameters are in the flat tensor, and where the shard is
        ends = list(accumulate(p.numel() for p in parameters))
        self.slices = [slice(end - p.numel(), end) for p, end in zip(parameters, ends)]
        length = max(-(-ends[-1] // self.ranks), 1)  # rounded up; gloo refuses empty messages
        self.own_slice = slice(rank * length, (rank + 1) * length)
        # A bucket at a time: no rank needs memory for all weights (fsdp.py, from the meta device)
        values = [value(p).detach().flatten() for p in parameters]
        padding = values[0].new_zeros(self.ranks * length - ends[-1])
        self.set_weights(torch.cat([*values, padding]))
        self.make_parameters(parameters)
        self.gradients = self.gradient_shard = None
        if self.trainable and stage < 2:
            self.allocate_gradients()
            self.gradient_shard = self.gradients[self.own_slice]
        elif self.trainable:
            self.gradient_shard = torch.zeros_like(self.shard, dtype=self.reduce_dtype)

    def set_weights(self, full):
        self.weights = full
        self.shard = self.master = full[self.own_slice]

    def make_parameters(self, parameters):
        self.parameters, self.pieces = [], []
        for i, p in enumerate(parameters):
            # New, as p may be on the meta device. By .data it has its own version counter: else
            # autograd would take a gather for a change of the weights that it saved, and raise
            view = nn.Parameter(self.weights[self.slices[i]].data.view(p.shape), self.trainable)
            view.__dict__.update(p.__dict__, stepped_on_in_pieces=True)  # diloco.py asks for this
            self.parameters.append(view)
            piece = self.part_of(i, self.master)
            if p.dim() > 1:
                piece = piece.unsqueeze(0)  # 2-D, so that weight decay still sees a matrix
            self.pieces.append(nn.Parameter(piece, self.trainable))

    def part_of(self, i, shard):
        """What a tensor like `shard` has of parameter i: all, a part or nothing."""
        start = self.slices[i].start - self.own_slice.start
        stop = self.slices[i].stop - self.own_slice.start
        return shard[max(start, 0) : max(stop, 0)]

    # --- a step: gradients in, new weights out

    def allocate_gradients(self):
        if self.gradients is None:
            self.gradients = torch.zeros_like(self.weights, dtype=self.reduce_dtype)

    def zero_grad(self):
        self.passes_left = self.passes
        gradients = self.gradient_shard if self.stage >= 2 else self.gradients
        gradients.zero_()

    def add(self, i, gradient):
        self.allocate_gradients()
        self.gradients[self.slices[i]].add_(gradient.flatten())
        self.arrived[i] += 1

    def end_pass(self):
        self.passes_left -= 1
        self.arrived = [max(n - 1, 0) for n in self.arrived]

    def start_reduction(self):
        """Start to sum the gradients over the ranks. Returns a function that waits for the sum."""
        self.allocate_gradients()  # if no parameter of it got a gradient
        if dist.get_world_size(self.group) == 1:
            return lambda: None
        if self.stage == 0:
            return dist.all_reduce(self.gradients, group=self.group, async_op=True).wait
        return async_reduce_scatter(self.gradients[self.own_slice], self.gradients, self.group)

    def keep_shard(self):
        """The sum is there. Stage 2 frees all but this rank's shard."""
        if self.stage >= 2:
            self.gradient_shard += self.gradients[self.own_slice]
            self.gradients = None

    def give_gradients(self):
        """To the pieces, for the optimizer."""
        gradient = self.gradient_shard.to(self.master, non_blocking=True)  # itself, or a copy
        for i, piece in enumerate(self.pieces):
            piece.grad = self.part_of(i, gradient).view(piece.shape)

    def start_update(self):
        """The shard has new values: start to bring them to all ranks."""
        if self.ranks > 1:
            self.start_gather()

    def start_gather(self):
        self.gathering = all_gather_into_tensor(self.weights, self.shard, self.group, async_op=True)


def async_reduce_scatter(shard, full, group):
    """Start to sum `full` over the ranks, on each only its shard, which may be a part of `full`.
    The rest of `full` is of no use afterwards. Returns a function that waits."""
    if dist.get_backend(group) != "gloo":
        return reduce_scatter_tensor(shard, full, group=group, async_op=True).wait
    # gloo's own sends twice as much: send each rank its shard, and add up what arrives
    received = torch.empty_like(full)
    work = dist.all_to_all_single(received, full, group=group, async_op=True)

    def wait():
        work.wait()
        torch.sum(received.view(-1, len(shard)), 0, out=shard)

    return wait


# --- many buckets, reduced while backward goes on


class ZeRO:
    """Trains `model` over `group`, its data-parallel ranks, in stage 0, 1 or 2.

        zero = ZeRO(model, group, 1, torch.optim.AdamW, microbatches=2)
        for micro_batches, target_count in batches:    # the number of targets of all ranks
            zero.zero_grad()
            for x, y in micro_batches:                 # this rank's two
                loss = cross_entropy(model(x), y, reduction="sum") / target_count
                loss.backward()
            zero.clip(zero.grad_norm(), 1.0)           # clip_grad_norm_ finds no p.grad
            zero.step()                                # a scheduler goes on zero.optimizer

    Before ZeRO(...), on all ranks alike: load, tie and freeze the weights, move and cast the model.
    (torch's DDP broadcasts rank 0's; ZeRO doesn't.) It puts new parameters into the modules: make
    optimizers, hooks and references after it. Activation checkpointing needs use_reentrant=False.
    After an exception in a backward pass end the run on all ranks."""

    def __init__(
        self,
        model,
        group,
        stage,
        make_optimizer,  # called with a list of this rank's pieces; must work element by element
        microbatches=1,  # the backward passes of a step
        bucket_bytes=25 << 20,  # of the largest bucket; a larger parameter has one of its own
        **options,  # of ShardedBucket and MasterBucket, as param_dtype=torch.bfloat16
    ):
        self.model, self.group, self.stage, self.microbatches = model, group, stage, microbatches
        self.queue = []  # buckets that the running backward pass has yet to reduce, in this order
        self.reductions = []  # (bucket, wait): reductions on their way
        # Of the gradients: "zero", "arriving" in a backward pass, "local", "summed" by finish()
        self.state = "summed"
        # 1  The parameters are dealt out to buckets, and get new ones, which are views of these
        self.buckets = []
        replacement = {}
        for parameters in group_parameters(model.parameters(), bucket_bytes, self.kind_of):
            bucket = self.make_bucket(parameters, **options)
            self.buckets.append(bucket)
            replacement.update(zip(parameters, bucket.parameters))
        self.awaited = self.buckets  # step() waits for their new weights, but see wait_in_forward
        # 2  The optimizer steps on this rank's pieces of parameters. Hooks take the gradients
        self.trained_buckets = [bucket for bucket in self.buckets if bucket.trainable]
        pieces = []
        for bucket in self.trained_buckets:
            pieces += bucket.pieces
            for i, p in enumerate(bucket.parameters):
                p.register_post_accumulate_grad_hook(functools.partial(self._arrived, bucket, i))
        self.optimizer = make_optimizer(pieces)
        check_zero_arguments(self)
        # 3  The new parameters take their places in the modules
        for module in model.modules():
            for name, p in module.named_parameters(recurse=False, remove_duplicate=False):
                setattr(module, name, replacement[p])
            module.register_load_state_dict_pre_hook(lambda *_: check_load_state_dict(self))

    # --- a step
    #
    # zero_grad()  All gradients are 0.
    # backward     _arrived moves each gradient to its bucket. Full buckets are reduced: in stage 2
    #              in each backward pass, in stages 0 and 1 in the last one of the step.
    # finish()     Waits for the reductions.
    # step()       Steps on this rank's shards, and all-gathers the new weights.

    def zero_grad(self):
        check_zero_parameters(self)
        check_zero_call(self, "zero_grad")
        self.state = "zero"
        for bucket in self.trained_buckets:
            bucket.zero_grad()

    def _arrived(self, bucket, i, p):
        """A hook: move p's gradient into its bucket. Left in p.grad, it would look like the sum."""
        gradient, p.grad = p.grad, None
        if self.state != "arriving":  # the first gradient of a backward pass
            self.state, self.queue = "arriving", self.buckets_of_pass()
            # Called when backward is over, but not if an exception ends it
            torch.autograd.Variable._execution_engine.queue_callback(self._backward_ends)
        check_zero_gradient(self, bucket)
        bucket.add(i, gradient)
        self._reduce_ready()

    def _backward_ends(self):
        self._reduce_ready(anyway=list(self.queue))  # a parameter may have got no gradient
        self.state, self.queue = "local", []
        if self.stage >= 2:
            self._wait()

    def finish(self):
        """Wait until all gradients are summed. grad_norm(), clip() and step() call it."""
        check_zero_call(self, "finish")
        if self.state == "summed":
            return
        self._wait()
        # A rank that ran fewer backward passes must still join the others' reductions, with zeros
        while any(bucket.passes_left for bucket in self.trained_buckets):
            self.queue = self.buckets_of_pass()
            self._reduce_ready(anyway=list(self.queue))
            self._wait()  # a bucket has one reduction at a time
        self.state = "summed"

    def step(self):
        """Step on this rank's shards, and send the new weights to all. Called again without
        zero_grad() it steps with the same gradients, as torch's optimizers do."""
        check_zero_call(self, "step")
        self.finish()
        for bucket in self.trained_buckets:
            bucket.give_gradients()
        await_copies(self.trained_buckets)  # with offload
        self.optimizer.step()  # once for all buckets: some optimizers count their steps
        self.optimizer.zero_grad()  # gradient_shard keeps the gradients
        self.update_weights(self.trained_buckets)

    def update_weights(self, buckets=None):
        """The masters have new values, from a step or a checkpoint: bring them to all ranks."""
        for bucket in reversed(buckets or self.buckets):  # forward needs the last bucket first
            bucket.start_update()
        await_weights(self.awaited)

    def _reduce_ready(self, anyway=()):
        """Start to reduce the queue's next buckets, as long as they are full or in `anyway`."""
        # All ranks start them in one order, or they would add up the wrong buckets, silently. So a
        # bucket that is full early waits for those before it
        while self.queue and (all(self.queue[0].arrived) or self.queue[0] in anyway):
            bucket = self.queue.pop(0)
            bucket.end_pass()
            if bucket.reduce_each or bucket.passes_left == 0:
                self.reductions.append((bucket, bucket.start_reduction()))
            if self.stage >= 2:
                self._wait(leave=1)  # two buckets are whole: one is on its way, one fills

    def _wait(self, leave=0):
        """Wait for the reductions on their way, but for the last `leave` of them."""
        while len(self.reductions) > leave:
            bucket, wait = self.reductions.pop(0)
            wait()
            bucket.keep_shard()
            self.shard_is_summed(bucket)

    # --- beside a step: the norm, clipping, whole copies

    def grad_norm(self):
        """The norm of the whole gradient: a float64 scalar, the same on all ranks."""
        self.finish()
        shards = [bucket.gradient_shard for bucket in self.trained_buckets]
        square = sum(torch.linalg.vector_norm(s, dtype=torch.float64).square() for s in shards)
        if self.stage > 0:  # shards are disjoint: their squares add up
            dist.all_reduce(square, group=self.group)
        return square.sqrt()

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
        masters' dtype). After finish() its .grad is the whole gradient. All ranks call it."""
        copies = {}
        for bucket in self.buckets:
            weights = gather_shards(bucket, bucket.master)
            gradients = gather_shards(bucket, bucket.gradient_shard) if bucket.trainable else None
            for p, place in zip(bucket.parameters, bucket.slices):
                copies[p] = copy = nn.Parameter(weights[place].view(p.shape).clone())
                copy.__dict__.update(p.__dict__)  # placement, and other attributes
                if bucket.trainable:
                    copy.grad = gradients[place].view(p.shape).to(copy, copy=True)
        return [(name, copies[p]) for name, p in named]

    @property
    def param_groups(self):
        return self.optimizer.param_groups  # for learning rates

    # --- what fsdp.py and zero_in_grid.py override

    takes_shards = False  # whether another technique may have cut the model

    def kind_of(self, p):  # equal for all parameters of a bucket
        return p.requires_grad, p.dtype, p.device

    def make_bucket(self, parameters, bucket_class=None, **options):
        options = dict(group=self.group, passes=self.microbatches) | options
        return (bucket_class or MasterBucket)(parameters, stage=self.stage, **options)

    def buckets_of_pass(self):  # those that a backward pass fills
        return [bucket for bucket in self.trained_buckets if bucket.passes_left > 0]

    def shard_is_summed(self, bucket):  # over the group
        pass


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
    # Lists of different kinds overlap: in the order of their last parameters
    return sorted(lists, key=lambda members: position[members[-1]])


# --- mixed precision, and offload to the host's memory: the optimizer steps on a copy of the shard


class MasterBucket(ShardedBucket):
    """Its master may have more bits than its weights, or be in the host's memory.

    param_dtype     of weights and backward; None: the dtype that `value` gives, the masters'
    reduce_dtype    in which gradients are summed; None: param_dtype
    offload         masters, and so the optimizer's states, are in the host's memory"""

    def __init__(self, *args, param_dtype=None, reduce_dtype=None, offload=False, **options):
        self.param_dtype, self.reduce_dtype, self.offload = param_dtype, reduce_dtype, offload
        super().__init__(*args, **options)

    def set_weights(self, full):
        super().set_weights(full.to(self.param_dtype or full.dtype))
        if self.trainable and (self.offload or self.weights.dtype != full.dtype):
            device = "cpu" if self.offload else full.device
            self.master = full[self.own_slice].to(device, copy=True)
        if self.master.device != self.shard.device:  # not if there is no GPU
            self.master = self.master.pin_memory()  # so that the host need not wait for copies

    def start_update(self):
        self.copy_master()
        super().start_update()

    def copy_master(self):
        if self.master is not self.shard:
            self.shard.copy_(self.master.to(self.shard.device, non_blocking=True))


def await_copies(buckets):
    """Wait until gradients are on the host, and the last step's weights have left it."""
    if any(bucket.master.device != bucket.shard.device for bucket in buckets):
        torch.cuda.synchronize()


# --- overlap of the all-gathers with the next forward


def wait_in_forward(zero, modules):
    """For stages 1 and 2: step() no longer waits for the gathers of new weights. Each module, such
    as those of fsdp.default_units(model), waits for its own when its forward begins. Before that
    nobody else may read these weights, or write the masters."""
    waiting = {p for module in modules for p in module.parameters()}
    # A weight outside of the modules is read without a wait: step() waits for its bucket
    zero.awaited = [b for b in zero.buckets if not waiting.issuperset(b.parameters)]
    for module in modules:
        parameters = set(module.parameters())
        used = [b for b in zero.buckets if not parameters.isdisjoint(b.parameters)]
        module.register_forward_pre_hook(lambda *_, used=used: await_weights(used))

    def await_all(*_):
        await_weights(zero.buckets)

    # What else reads or writes weights
    zero.optimizer.register_step_pre_hook(await_all)
    for module in zero.model.modules():
        module.register_state_dict_pre_hook(await_all)
        module.register_load_state_dict_pre_hook(await_all)


# --- mistakes that would be silent: refused


def check_zero_arguments(zero):
    if zero.stage not in (0, 1, 2):
        raise ValueError(f"there is no stage {zero.stage!r} of ZeRO: 0, 1 or 2; 3 is fsdp.FSDP")
    kind = type(zero.optimizer).__name__
    if kind in ("Adafactor", "LAMB", "Lamb", "LARS", "LBFGS", "Muon", "SOAP", "Shampoo"):
        advice = "take AdamW or SGD; for Muon muon.py"
        raise ValueError(f"{kind} needs whole matrices, ZeRO has pieces of them: {advice}")
    if not zero.takes_shards and any(hasattr(p, "placement") for p in zero.model.parameters()):
        advice = "take ComposedZeRO or ComposedFSDP, of zero_in_grid.py"
        raise ValueError(f"another technique has cut the model, which the norm must know: {advice}")


def check_zero_call(zero, call):
    if zero.state == "arriving":
        raise RuntimeError("an exception ended a backward pass: end the run, other ranks may wait")
    if call == "step" and zero.state == "zero":
        raise RuntimeError("all gradients are zero: without backward call finish() before step()")
    if call == "zero_grad" and zero.state == "local":
        raise RuntimeError("there was no finish(): call it before zero_grad(), on all ranks")


def check_zero_parameters(zero):
    storages = {bucket.weights.untyped_storage()._cdata for bucket in zero.buckets}
    for name, p in zero.model.named_parameters():
        if p.untyped_storage()._cdata not in storages:
            advice = "convert, move and tie it before ZeRO(...), and make one ZeRO per model"
            raise RuntimeError(f"{name!r} is no longer the one that ZeRO put there: {advice}")


def check_load_state_dict(zero):
    # The default's masters are views of the weights
    if any(bucket.master._base is not bucket.weights for bucket in zero.buckets):
        advice = "load before ZeRO(...), or fill the masters and call update_weights()"
        raise RuntimeError(f"load_state_dict() would not change the masters of ZeRO: {advice}")


def check_zero_gradient(zero, bucket):
    if bucket not in zero.queue:
        raise RuntimeError(
            f"a gradient came late: more backward passes than microbatches={zero.microbatches}, or"
            " no zero_grad()? FSDP: a unit that ran twice in a forward? In a pipeline take"
            " ZeROInPipeline(pipeline_stages={stage: module}), SplitPipeline(around=zero.around)"
        )


# --- demo ---

import harness
import proof
import receipts.zero
from harness import zero_flags


def flags():
    parser = harness.parser(__doc__)
    g = parser.add_argument_group("ZeRO")
    why = "split: 0 nothing, 1 optimizer states, 2 gradients too, 3 weights too: fsdp.py"
    g.add_argument("--stage", type=int, choices=range(4), default=2, help=why)
    zero_flags.add_flags(g, bucket_mb=0.5)
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
    import fsdp  # it imports this file: not above

    args = run.args
    if args.stage == 3:
        return fsdp.demo(run)
    run.groups(dp=dist.group.WORLD)  # its name in the receipt
    model = run.meta_model()  # ZeRO fills it with weights, a bucket at a time
    options = zero_flags.options(run, model, args.stage)
    options["make_optimizer"] = functools.partial(harness.make_optimizer, args=args)
    options["microbatches"] = args.microbatches
    zero = ZeRO(model, dist.group.WORLD, args.stage, **options)
    return train(run, model, zero)


def train(run, model, zero):
    """The loop in ZeRO's docstring, for FSDP too."""
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
        zero.clip(norm, run.args.grad_clip)
        zero.step()
        run.log()
    return run.receipt(*receipts.zero.of_demo(run))


if __name__ == "__main__":
    harness.script(main)
