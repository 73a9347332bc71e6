"""Fully sharded data parallelism (FSDP), ZeRO's stage 3: a rank keeps 1/N of every weight.
Builds on zero.py: PlainFSDP on three functions of it, FSDP on its class ZeRO.

    embed     ~##                  ~##rr     ~  all-gather of the unit's weights
    block 0      ~##            ~##rr        #  they are whole, and the unit computes: forward,
    block 1         ~##      ~##rr              then backward
    head               ~##~##rr              r  reduce-scatter of its gradients
                                             blank: a rank holds 1/N of the unit

Split     A unit is a block, the embedding or the head. Its parameters are one flat tensor, of
          which a rank holds 1/N: its shard. So it is with gradients and Adam's states.
Sent      Per micro-batch a unit's weights are gathered twice, for forward and backward, and its
          gradients reduce-scattered once. Each sends r P e bytes for P parameters of e bytes,
          r = (N-1)/N: 3 m r P e in m micro-batches. DDP sends 2 r P e. In FSDP, below, the last
          unit's weights, P' elements, stay from forward to backward: m r (3 P - P') e.
Backward  Autograd's, unchanged. It saves views of the weights. The memory under them is freed (the
          storage is resized to 0), and filled again before backward reads it.
Use       Where the weights don't fit, and a micro-batch has enough tokens for matmuls to hide the
          gathers. Per 16-bit parameter a gather sends 2 r bytes, and forward does 2 flop per token.
          At 400 TFLOP/s the two take equally long with about 8,000 tokens on 50 GB/s, and with 900
          on 450 GB/s (docs/learn/fsdp.md).
Limits    A unit runs once per forward, and the model once before each backward. Units are called
          as modules: unit(x), not unit.forward(x), which runs no hooks. Ranks run the same units
          in one order, or they hang or gather the wrong weights.

    torchrun --nproc_per_node=4 fsdp.py        (needs zero.py; model.py, to train and prove itself)

Rajbhandari et al. 2020, ZeRO, arXiv:1910.02054. Zhao et al. 2023, PyTorch FSDP, arXiv:2304.11277.
"""

import argparse
import sys
from functools import partial
from itertools import pairwise

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.utils._pytree import tree_leaves

from zero import ZeRO, all_gather_into_tensor, await_weights, norm_of_shards, reduce_scatter_tensor

# --- FSDP in its plainest form


class PlainFSDP:
    """One unit: four hooks, and computation waits for every message. An optimizer steps on the
    shards of all units.

    To clip: norm_of_shards([unit.shard.grad for unit in units], group) is the norm over all ranks,
    for clip_grads_with_norm_. torch's clip_grad_norm_(model.parameters()) finds no gradient, and
    clips nothing, silently.

    Before: all ranks have equal weights, in one dtype, on their device. Each parameter is in
    exactly one unit: one in no unit gets no sum and no step. A unit returns one tensor. In every
    backward pass each of its parameters gets a gradient; several passes before a step add up. No
    checkpoint around a unit (inside it is fine): FSDP, below, allows it. Between its unit's runs a
    weight has no memory: reading it, as by model.state_dict(), .to() or deepcopy, ends the process
    with a segmentation fault. Save the shards."""

    def __init__(self, module, group):
        self.group, self.parameters = group, list(module.parameters())
        if any(p.untyped_storage().nbytes() == 0 for p in self.parameters):
            raise ValueError("a parameter is in two units: untie it, or take FSDP")
        rank, ranks = dist.get_rank(group), dist.get_world_size(group)
        size = sum(p.numel() for p in self.parameters)
        length = -(-size // ranks)  # of a shard, rounded up
        self.padding = self.parameters[0].new_zeros(ranks * length - size)
        self.weights = self.flatten(p.detach() for p in self.parameters)
        self.shard = nn.Parameter(self.weights[rank * length : (rank + 1) * length].clone())
        end = 0
        for p in self.parameters:
            start, end = end, end + p.numel()
            # Through .data p keeps a version counter of its own. Otherwise the gather in backward
            # would look to autograd like an in-place change of a saved tensor, and it would raise
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
        self.free()  # safe: each op that reads a weight has run when all gradients are there


# --- the next unit's weights arrive while one computes


class FSDP(ZeRO):
    """Trains `model` over `group`: a rank holds its shards, and the weights of two units at a time.

        embed     ~##              ~~##rr    drawn as above: a gather travels while the unit before
        block 0    ~~##          ~~##rr      it computes, a reduce-scatter while the unit after it
        block 1      ~~##      ~~##rr        does. The last unit's weights stay from forward to
        head           ~~####rr              backward

    As ZeRO's stage 2, but weights come and go. A step is zero_grad(), backward passes, step(), as
    there. Two more options:

    units    modules, in the order of forward; None: default_units(model)
    reshard  False: weights stay from forward to backward: about a third less is sent, all is held

    A unit's parameters have memory inside its forward and backward only. Elsewhere state_dict(),
    .to() and deepcopy of a module raise; reading a parameter itself, as p.detach().clone() does,
    ends the process with a segmentation fault. gather_full has copies. Parameters in no unit stay
    whole on every rank, as in stage 2.

    A unit may get no gradient on some ranks (an unused expert): they join in its gather, which the
    unit after it starts, and add zeros to its reduction. If it is the last unit, or if two
    neighbours get none on the same rank, all ranks hang.

    A model that runs twice before one backward (DPO's chosen and rejected answers): concatenate the
    two batches, or give units=[model]."""

    def __init__(self, model, group, make_optimizer, units=None, reshard=True, **options):
        self.reshard = reshard
        self.unit_in_backward = None  # the one whose backward is running
        self.done = set()  # units whose backward is over, in this pass
        self.held = ()  # the one that runs or ran last, and the one that is likely to be next
        self.units = []
        for stage, module in model.items() if isinstance(model, dict) else [(None, model)]:
            self.units += make_units(module, units, stage)
        self.units_of = {}
        for unit in self.units:
            for p in unit.module.parameters():
                self.units_of[p] = (*self.units_of.get(p, ()), unit)
        # Stage 2 with a bucket per unit, of any size. It calls kind_of and make_bucket, below: the
        # units' buckets are of stage 3, those of other parameters of stage 2
        super().__init__(model, group, 2, make_optimizer, bucket_bytes=float("inf"), **options)
        for unit in self.units:
            unit.module.register_forward_pre_hook(partial(self._before_forward, unit))
            unit.module.register_forward_hook(partial(self._after_forward, unit), with_kwargs=True)
        for module in self.model.modules():
            module.register_state_dict_pre_hook(refuse)
            module.register_load_state_dict_pre_hook(refuse)
            module._apply = module.__deepcopy__ = refuse  # .to() and the like call _apply
        if "torch._dynamo" in sys.modules:
            torch.compiler.reset()  # what was compiled before would not call these hooks

    def kind_of(self, p):
        return *super().kind_of(p), self.units_of.get(p)

    def make_bucket(self, parameters, **options):
        units = self.units_of.get(parameters[0], ())
        bucket = super().make_bucket(parameters, stage=3 if units else 2, **options)
        bucket.units = units
        if units:
            bucket.users = set()  # the units that need its weights now
        for unit in units:
            unit.buckets.append(bucket)
            unit.release()
        return bucket

    def _before_forward(self, unit, module, inputs):
        if self.unit_in_backward is not unit:  # else a checkpoint inside it runs its forward again
            self._enter(unit, unit.next)

    def _after_forward(self, unit, module, inputs, keyword_inputs, output):
        if self.unit_in_backward is unit:
            return
        outputs = outputs_with_gradient(module, inputs, keyword_inputs, output)
        for t in outputs:
            t.register_hook(partial(self._before_backward, unit))
        if not outputs:  # no backward will follow
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
        """`unit` runs now, forward or backward. Start to gather the one that is likely next. The
        unit before is freed here, when the next one enters, not at the end of its own forward. So
        the last unit stays, which backward needs first."""
        if self.reshard:
            for other in self.held:
                # Not the one in backward: a checkpoint in it may rerun other units' forwards
                if other not in (unit, self.unit_in_backward):
                    other.release()
        unit.gather()
        await_weights(unit.buckets)
        if likely_next is not None:
            likely_next.gather()  # before this unit's matmuls are queued: it travels beside them
        self.held = [u for u in (unit, likely_next) if u]

    def release_all(self):
        for unit in self.units:
            # Another stage's may be between its forward and its backward
            if self.action is None or self.action.stage == unit.stage:
                unit.release()
        self.held, self.unit_in_backward = (), None
        self.done.clear()

    def update_weights(self, buckets=None):
        self.release_all()  # a unit left by a forward without backward has the old weights
        super().update_weights(buckets)


class Unit:
    """A module whose weights are gathered before it runs, forward or backward, and freed after. It
    has a bucket for each kind of parameter (dtype, frozen or not). A tied matrix, of embedding and
    head, has a bucket with two units: the second one in backward completes its gradient.

    The host runs ahead of a GPU, but memory is taken and freed in the order of the compute stream.
    An async gather starts after all kernels queued so far, hence after those that read this memory
    before. release() makes the compute stream wait for a gather still on its way. So nothing can
    write memory that a matmul still reads."""

    def __init__(self, module, stage=None):
        self.module, self.stage, self.buckets = module, stage, []  # stage: of a pipeline
        self.previous = self.next = None  # its neighbours in the order of forward

    def gather(self):
        for bucket in self.buckets:
            if not bucket.users:
                bucket.weights.untyped_storage().resize_(bucket.weights.nbytes)
                bucket.start_gather()
            bucket.users.add(self)

    def release(self):
        for bucket in self.buckets:
            bucket.users.discard(self)
            if not bucket.users:
                await_weights([bucket])
                bucket.weights.untyped_storage().resize_(0)


def make_units(model, modules, stage):
    """The Units of a model, or of a stage of a pipeline. modules: None, or those of all stages."""
    if modules is None:
        modules = default_units(model)
    own = set(model.modules())
    units = [Unit(module, stage) for module in modules if module in own]
    for unit, next_unit in pairwise(units):
        unit.next, next_unit.previous = next_unit, unit
    return units


def outputs_with_gradient(module, inputs, keyword_inputs, output):
    """The tensors of `output` whose gradients show that the module's backward begins. Not an input
    that is returned unchanged: its gradient is complete only after this backward."""
    tensors = [t for t in tree_leaves(output) if isinstance(t, torch.Tensor)]
    if torch.is_grad_enabled() and not tensors:
        found = f"{type(module).__name__} returned a {type(output).__name__}"
        raise TypeError(f"{found}, in which FSDP finds no tensor: return tensors, or lists of them")
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


def refuse(*_, **__):
    before = "cast, move, copy and load before FSDP(...)"
    raise RuntimeError(f"this is of weights that are not here: use gather_full(...); {before}")


# --- demo ---

if __name__ == "__main__":  # importing this file needs no model.py
    from model import GPT, Config, OneProcess, Sent, join_ranks, leave, text_batch


def main():
    parser = argparse.ArgumentParser(description="train a GPT in each form, and prove it")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--microbatches", type=int, default=2, help="of each rank, a step")
    args = parser.parse_args()
    device = join_ranks()
    for form in ("plain", "reshard", "keep gathered"):
        train(form, args, device)
    leave()


def train(form, args, device):
    group, m = dist.group.WORLD, args.microbatches
    rank, ranks = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)  # all ranks draw equal weights
    model = GPT(Config(layers=2, width=32, context=32, tied=False)).to(device, torch.float64)
    one = OneProcess(model, torch.optim.AdamW)
    modules = [model.embed, *model.blocks.values(), model.head]
    if form == "plain":
        units = [PlainFSDP(module, group) for module in modules]
        shards = [unit.shard for unit in units]
        sharded = torch.optim.AdamW(shards)
        size = sum(unit.weights.nbytes for unit in units)
        text, times_r = "3 m r P e", 3 * m * size
    else:
        options = dict(units=modules, reshard=form == "reshard", microbatches=m)
        sharded = FSDP(model, group, torch.optim.AdamW, **options)
        size = sum(bucket.weights.nbytes for bucket in sharded.buckets)
        last = sum(bucket.weights.nbytes for bucket in sharded.units[-1].buckets)
        text, times_r = "m r (3 P - P') e", m * (3 * size - last)
        if form == "keep gathered":
            text, times_r = "2 m r P e", 2 * m * size
    if rank == 0:
        print(f"{form}, {ranks} ranks, {m} micro-batches")
    for step in range(args.steps):
        tokens, targets, count = text_batch(step, 2 * m * ranks + 1, 32, device)
        rows = torch.arange(len(tokens)).tensor_split(ranks)[rank]  # unequally many
        loss = torch.zeros_like(count, dtype=torch.float64)
        with Sent() as sent:
            sharded.zero_grad()
            for micro_batch in rows.tensor_split(m):
                x, y = tokens[micro_batch], targets[micro_batch]
                part = model(x, targets=y, target_count=count)  # the sum over y, divided by count
                part.backward()
                loss += part.detach()
            if form == "plain":
                norm = norm_of_shards([shard.grad for shard in shards], group)
                nn.utils.clip_grads_with_norm_(shards, 0.5, norm)
            else:
                sharded.clip(sharded.grad_norm(), 0.5)
            sharded.step()
        dist.all_reduce(loss)  # a rank has its part of the loss, as of the gradients
        alone = one.train_step(tokens, targets, count, 0.5)
        named = list(model.named_parameters())
        full = gather_units(units, named) if form == "plain" else sharded.gather_full(named)
        one.compare(step, loss, alone, full)
    r = (ranks - 1) / ranks
    one.prove(sent, f"{text}, and the norm", r * times_r + 2 * r * 8)


def gather_units(units, named):
    """(name, unsplit copy, with its whole gradient) of each parameter of PlainFSDP's units."""
    names, copies = {p: name for name, p in named}, []
    for unit in units:
        weights, gradients = torch.empty_like(unit.weights), torch.empty_like(unit.weights)
        all_gather_into_tensor(weights, unit.shard.detach(), group=unit.group)
        all_gather_into_tensor(gradients, unit.shard.grad, group=unit.group)
        end = 0
        for p in unit.parameters:
            start, end = end, end + p.numel()
            copy = weights[start:end].view_as(p)
            copy.grad = gradients[start:end].view_as(p)
            copies.append((names[p], copy))
    return copies


if __name__ == "__main__":
    main()
