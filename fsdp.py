"""Fully sharded data parallelism (FSDP), ZeRO's stage 3: a rank keeps 1/N of every weight.

    embed     ~##              ~~##rr        ~  all-gather of the unit's weights
    block 0    ~~##          ~~##rr          #  they are whole, and the unit computes: forward,
    block 1      ~~##      ~~##rr               then backward
    block 2        ~~##  ~~##rr              r  reduce-scatter of its gradients
    head             ~~####rr                   blank: a rank holds 1/N of the unit

Split     A unit is by default a block, the embedding or the head. Its parameters are one flat
          tensor, of which a rank holds 1/N: its shard. So it is with gradients and Adam's states.
Sent      Per micro-batch a unit's weights are gathered twice, for forward and backward, and its
          gradients reduce-scattered once: each r P e bytes for P parameters of e bytes,
          r = (N-1)/N. About 3 m r P e in m micro-batches. DDP sends 2 r P e. (In FSDP, below, the
          last unit's weights stay from forward to backward.)
Backward  Autograd's, unchanged. It saves views of the weights. The memory under them is freed (the
          storage is resized to 0), and filled again before backward reads it.
Use       Where the weights don't fit, and a micro-batch has thousands of tokens: a gather hides
          behind long matmuls only (docs/learn/fsdp.md).
Limits    A unit runs once per forward, or it is an error. Ranks run the same units in one order, or
          they hang or gather the wrong weights.
Copy      PlainFSDP alone, with zero.py's two names of collectives, or all with the top of zero.py.
          zero_in_grid.py has HSDP.

    torchrun --nproc_per_node=4 fsdp.py                         python fsdp.py --keep-gathered

Rajbhandari et al. 2020, ZeRO, arXiv:1910.02054. Zhao et al. 2023, PyTorch FSDP, arXiv:2304.11277.
"""

from functools import partial
from itertools import pairwise

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.utils._pytree import tree_leaves

from zero import MasterBucket, ZeRO, all_gather_into_tensor, await_weights, reduce_scatter_tensor

# --- FSDP in its plainest form


class PlainFSDP:
    """The whole idea for one unit: four hooks, and computation waits for every message.

        modules = model.embed, *model.blocks, model.head    # of a ModuleDict: blocks.values()
        units = [PlainFSDP(module, group) for module in modules]
        optimizer = torch.optim.AdamW([unit.shard for unit in units])
        for x, y in batches:          # this rank's rows; target_count counts all ranks' targets
            (cross_entropy(model(x), y, reduction="sum") / target_count).backward()
            optimizer.step()
            optimizer.zero_grad()

    Before: all ranks have equal weights, in one dtype, on their device. Each parameter is in
    exactly one unit (untie the head): in none it gets no sum and no step. A unit returns one
    tensor, and each of its parameters gets a gradient in every backward pass; several passes before
    a step add up. Save the shards, not model.state_dict(): its weights have no memory. Don't call
    clip_grad_norm_: it sees one rank's shards, and each rank would scale by another factor."""

    def __init__(self, module, group):
        self.group, self.parameters = group, list(module.parameters())
        rank, ranks = dist.get_rank(group), dist.get_world_size(group)
        size = sum(p.numel() for p in self.parameters)
        length = -(-size // ranks)  # of a shard, rounded up
        self.padding = self.parameters[0].new_zeros(ranks * length - size)
        self.weights = self.flatten(p.detach() for p in self.parameters)
        self.shard = nn.Parameter(self.weights[rank * length : (rank + 1) * length].clone())
        end = 0
        for p in self.parameters:
            start, end = end, end + p.numel()
            # p and `weights` share memory, but have two version counters: autograd must not take a
            # gather for a change of the weights that it saved
            p.data = self.weights[start:end].view_as(p)
            p.register_post_accumulate_grad_hook(self.after_gradient)
        module.register_forward_pre_hook(self.gather)
        module.register_forward_hook(self.after_forward)
        self.free()  # the shard is a copy, and stays

    def flatten(self, tensors):
        return torch.cat([*(t.flatten() for t in tensors), self.padding])

    def gather(self, *_):
        self.weights.untyped_storage().resize_(self.weights.nbytes)
        all_gather_into_tensor(self.weights, self.shard.detach(), group=self.group)

    def free(self):
        self.weights.untyped_storage().resize_(0)

    def after_forward(self, module, inputs, output):
        self.free()
        if output.requires_grad:
            self.grads_left = len(self.parameters)  # counts down in after_gradient
            output.register_hook(self.gather)  # called when the output's gradient is there

    def after_gradient(self, p):
        self.grads_left -= 1
        if self.grads_left > 0:
            return
        gradient = torch.empty_like(self.shard)
        full = self.flatten(p.grad for p in self.parameters)
        reduce_scatter_tensor(gradient, full, group=self.group)
        self.shard.grad = gradient if self.shard.grad is None else self.shard.grad + gradient
        for p in self.parameters:
            p.grad = None
        self.free()  # what has given these gradients was the last to read the weights


# --- FSDP in full: stage 2, but weights come and go. The next unit's arrive while one computes


class Unit:
    """A module whose weights are gathered before it runs, forward or backward, and freed after. It
    has a bucket for each kind of parameter (dtype, frozen or not). A tied matrix, of embedding and
    head, has a bucket with two units: the second one in backward completes its gradient.

    Activation checkpointing runs a unit's forward again inside its backward: its weights are there
    then, and its hooks do nothing."""

    def __init__(self, module):
        self.module, self.buckets = module, []
        self.previous = self.next = None  # its neighbours in the order of forward

    def gather(self):
        for bucket in self.buckets:
            if not bucket.users:
                bucket.gather()
            bucket.users.add(self)

    def release(self):
        for bucket in self.buckets:
            bucket.users.discard(self)
            if not bucket.users:
                bucket.free()


class UnitBucket(MasterBucket):
    """`weights` has memory while it has `users`, units that need it now.

    The host runs ahead of a GPU, but memory is taken and freed in the order of the compute stream:
    a gather waits for what is queued there, and free() makes the stream wait for the gather. So
    nothing can write memory that a matmul still reads."""

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.users = set()
        self.free()

    def set_weights(self, full):
        super().set_weights(full)
        shard, self.shard = self.shard, self.shard.clone()  # it stays when the weights are freed
        if self.master is shard:  # MasterBucket has not made a copy
            self.master = self.shard

    def start_update(self):
        self.copy_master()  # the next forward gathers it

    def gather(self):
        self.weights.untyped_storage().resize_(self.weights.nbytes)
        self.start_gather()

    def free(self):
        await_weights([self])
        self.weights.untyped_storage().resize_(0)


class FSDP(ZeRO):
    """Trains `model` over `group`: a rank holds its shards, and the weights of two units in turn.

        fsdp = FSDP(model, group, torch.optim.AdamW, microbatches=2)
        for micro_batches, target_count in batches:    # the number of targets of all ranks
            fsdp.zero_grad()
            for x, y in micro_batches:                 # this rank's two
                loss = cross_entropy(model(x), y, reduction="sum") / target_count
                loss.backward()
            fsdp.clip(fsdp.grad_norm(), 1.0)           # clip_grad_norm_ finds no p.grad
            fsdp.step()                                # a scheduler goes on fsdp.optimizer

    A unit's parameters have memory inside its forward and backward only: reading them elsewhere
    ends the process with a segmentation fault (gather_full has copies). Those in no unit: as in
    stage 2. On a rank a unit may get no gradient where another rank's does. But not the last unit,
    nor two in a row whose outputs get none: all would wait for ever."""

    def __init__(
        self,
        model,
        group,
        make_optimizer,
        units=None,  # modules, in the order of forward; None: default_units(model)
        reshard=True,  # False: weights stay until backward. It sends a third less, holds all
        **options,  # of ZeRO and its buckets
    ):
        self.reshard = reshard
        self.unit_in_backward = None  # the one whose backward is running
        self.done = set()  # units whose backward is over, in this pass
        self.held = ()  # the one that runs or ran last, and the one that is likely to be next
        self.units = self.make_units(model, units)
        self.units_of = dict.fromkeys(model.parameters(), ())
        for unit in self.units:
            for p in unit.module.parameters():
                self.units_of[p] += (unit,)
        # Stage 2 with a bucket per unit, of any size. It calls kind_of and make_bucket, below
        super().__init__(model, group, 2, make_optimizer, bucket_bytes=float("inf"), **options)
        del self.units_of  # it would keep the unsplit parameters alive
        for unit in self.units:
            unit.module.register_forward_pre_hook(partial(self._before_forward, unit))
            unit.module.register_forward_hook(partial(self._after_forward, unit), with_kwargs=True)
        for module in model.modules():
            module.register_state_dict_pre_hook(check_state_dict)

    def make_units(self, model, modules):
        units = [Unit(module) for module in (default_units(model) if modules is None else modules)]
        for unit, next_unit in pairwise(units):
            unit.next, next_unit.previous = next_unit, unit
        return units

    def kind_of(self, p):
        return *super().kind_of(p), self.units_of[p]

    def make_bucket(self, parameters, **options):
        units = self.units_of[parameters[0]]
        bucket_class = UnitBucket if units else MasterBucket
        bucket = super().make_bucket(parameters, bucket_class, **options)
        bucket.units = units
        for unit in units:
            unit.buckets.append(bucket)
        return bucket

    def _before_forward(self, unit, module, inputs):
        if self.unit_in_backward is not unit:
            self._enter(unit, unit.next)

    def _after_forward(self, unit, module, inputs, keyword_inputs, output):
        if self.unit_in_backward is unit:
            return
        outputs = outputs_with_gradient(module, inputs, keyword_inputs, output)
        for t in outputs:
            t.register_hook(partial(self._before_backward, unit))
        if not outputs:  # no backward will follow. Else its weights stay until the next unit enters
            unit.release()

    def _before_backward(self, unit, gradient):  # the hook of each output: its gradient is there
        if self.unit_in_backward is unit:  # another output's hook came first
            return
        if self.unit_in_backward is None:  # free the last unit when backward is over
            torch.autograd.Variable._execution_engine.queue_callback(self.release_all)
        else:
            # Backward is in the reverse order of forward: the unit that ran before is done
            self.unit_in_backward.release()
            self.done.add(self.unit_in_backward)
            # Reduce what is done even without a gradient here: on another rank it may have got one
            done = [b for b in self.queue if b.units and self.done.issuperset(b.units)]
            self._reduce_ready(anyway=done)
        self.unit_in_backward = unit
        self._enter(unit, unit.previous)

    def _enter(self, unit, likely_next):
        """`unit` runs now, forward or backward. Start to gather the one that is likely next. What
        ran before is freed here, not when its forward ends: backward begins with the last unit."""
        if self.reshard:
            for other in self.held:
                # A checkpoint over several units runs their forwards again inside one's backward
                if other not in (unit, self.unit_in_backward):
                    other.release()
        unit.gather()
        await_weights(unit.buckets)
        if likely_next is not None:
            likely_next.gather()  # before this unit's matmuls are queued: it travels beside them
        self.held = [u for u in (unit, likely_next) if u]

    def release_all(self):
        for unit in self.running_units():
            unit.release()
        self.held, self.unit_in_backward = (), None
        self.done.clear()

    def running_units(self):  # zero_in_grid.py: those of one pipeline stage
        return self.units

    def update_weights(self, buckets=None):
        self.release_all()  # a unit left by a forward without backward has the old weights
        super().update_weights(buckets)


def outputs_with_gradient(module, inputs, keyword_inputs, output):
    """The tensors of `output` whose gradients show that the module's backward begins. Not an input
    that is returned unchanged: its gradient is complete only after this backward."""
    tensors = [t for t in tree_leaves(output) if isinstance(t, torch.Tensor)]
    check_output(module, output, tensors)
    unchanged = {id(t) for t in tree_leaves((inputs, keyword_inputs))}
    return [t for t in tensors if t.requires_grad and id(t) not in unchanged]


def default_units(module):
    """The items of the outermost containers (such as a list of blocks), and the modules beside them
    (embedding, head). An item without a forward, such as a list in a dict, is opened."""
    containers = nn.ModuleList, nn.ModuleDict, nn.Sequential
    if has_forward(module) and not any(isinstance(m, containers) for m in module.modules()):
        units = [module]  # such as the embedding
    else:
        units = []
        for child in module.children():
            is_item = isinstance(module, containers) and has_forward(child)  # such as a block
            units += [child] if is_item else default_units(child)
    return [unit for unit in units if next(unit.parameters(), None) is not None]


def has_forward(module):
    """A ModuleList has none: nobody calls it, so its hooks would never run."""
    return type(module).forward is not nn.Module.forward


# --- mistakes that would be silent: refused


def check_output(module, output, tensors):
    if torch.is_grad_enabled() and not tensors:
        found = f"{type(module).__name__} returned a {type(output).__name__}"
        raise TypeError(f"{found}. FSDP finds no tensor in it: return tensors, or lists of them")


def check_state_dict(*_):
    raise RuntimeError("state_dict() would read weights that are not here: use gather_full(...)")


# --- demo ---

import harness
import proof
import zero
from harness import zero_flags


def main():
    parser = harness.parser(__doc__)
    g = parser.add_argument_group("FSDP")
    zero_flags.add_flags(g, bucket_mb=None)
    parser.set_defaults(stage=3)
    args = parser.parse_args()
    harness.configure(args)
    proof.launch(demo, args, check=partial(zero_flags.check_world, args))


def demo(run):
    args = run.args
    run.groups(dp=dist.group.WORLD)  # its name in the receipt
    model = run.meta_model()  # FSDP fills it with weights, a unit at a time
    options = zero_flags.options(run, model, stage=3)
    options["make_optimizer"] = partial(harness.make_optimizer, args=args)
    options["microbatches"] = args.microbatches
    fsdp = FSDP(model, dist.group.WORLD, **options)
    return zero.train(run, model, fsdp)  # the loop in FSDP's docstring


if __name__ == "__main__":
    harness.script(main)
