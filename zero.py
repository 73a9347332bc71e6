"""ZeRO: data parallelism that shares out the optimizer's states, the gradients and the weights.
Stage 3 is PyTorch's FSDP.

What is split: the batch, as in ddp.py; and, stage by stage, more of what DDP holds N times. Bytes a
parameter and rank, with 16-bit weights and gradients (2 + 2) and the optimizer's master weight and
two moments in 32 bits (12):

    stage                     weights        gradients      optimizer      together       sent a step, in units of r P e
      0   nothing (DDP)       ########       ########       #########      16             2       all-reduce
      1   optimizer states    ########       ########       ###            4 + 12/N       2       reduce-scatter, all-gather
      2   gradients too       ########       ##             ###            2 + 14/N       1 + m    with m micro-batches
      3   weights too         ##             ##             ###            16/N           3 m              r = (N-1)/N

A bucket is one flat tensor, padded to N equal shards: parameters of any shape fall where they may,
cut across ranks. So stage 1 differs from DDP in one call, reduce-scatter for all-reduce; stage 2 in
freeing a buffer; stage 3 in resizing a storage.

    parameters   | wq        | wk   | bias | up           |//      // padding
    shards       | rank 0      | rank 1      | rank 2      |

What is sent, and when. Stage 1: an optimizer works element by element, so each rank takes the step
for 1/N of the elements. It needs the summed gradient of these alone: a reduce-scatter, half of an
all-reduce. The other half, an all-gather, brings the new weights to all. Stage 2: as soon as a
bucket of gradients is full it is reduce-scattered, and freed: no rank ever has all gradients. With
m micro-batches that is m reduce-scatters; `reduce_each=False` keeps one, and the memory of stage 1.
Take it where the network is slow and memory is not short. Stage 3: the weights of a unit (a block,
the embedding, the head) are gathered just before it runs, forward and backward, and freed after;
the next unit's gather is under way meanwhile. So at most two units are whole at a time:

    forward    gather 0 | run 0, gather 1 | free 0, run 1, gather 2 | free 1, run 2 ...
    backward   ... run 2, gather 1 | free 2, run 1, gather 0 | free 1, run 0 | free 0      gradients leave as they come

Two gathers and a reduce-scatter, 3 r P e a micro-batch, less the unit that ends a forward: it stays
for the backward that begins with it. `reshard=False` keeps all units gathered until their backward:
one gather less, and the weights of stage 2. Every micro-batch gathers anew, also in a pipeline.

Backward: the gradient of a layer's input is made with its weights, so backward needs them again.
Autograd keeps the views that it saved; only the memory under them goes (its storage is resized to
0) and is back before backward reads it. They are views of `.data`, with version counters of their
own, so that to gather does not count as a change. The loss is divided by the global number of
tokens, so gradients are summed over the ranks, never averaged. Mixed precision: parameters in
`param_dtype`, gradients summed in `reduce_dtype`, master weights as they were given.

What it costs: bytes held and sent as in the table; for a moment two gathered units (stage 3), two
whole buckets of gradients (stages 2 and 3; on gloo as much again, received), and all activations of
the rank's own rows. During the optimizer's step, where masters have another dtype than gradients,
also the gradients in theirs: 4/N bytes a parameter, in stage 0 4 bytes. A gather or reduce-scatter
takes r P e / w at w bytes/s, beside 2 flops a weight and token at f flop/s: hidden if a rank has
more than r e f / (2 w) tokens a micro-batch, the same as in ddp.py, 8,000 for 2 bytes, 400 TFLOP/s
and 50 GB/s.

When it is the wrong choice: never stage 1, which sends what stage 0 does. Stage 3, and stage 2 with
micro-batches, where the model states fit without, and where tokens a rank are few: then they wait
for the network.

    torchrun --nproc_per_node=4 zero.py --stage 3            python zero.py --stage 2 --param-dtype bfloat16
    python zero.py --fit             the largest models whose states fit 80 GB on 64 ranks, played on tensors without memory

Papers: Rajbhandari et al. 2020, ZeRO, arXiv:1910.02054, sections 3 (memory), 5 and 7 (what is
sent); Zhao et al. 2023, PyTorch FSDP, arXiv:2304.11277, section 3 (units, prefetching).
"""

import contextlib

import torch
import torch.distributed as dist
import torch.nn as nn

# torch 2.13 renamed them; older versions know only the second name
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
native_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class DirectReduceScatter:
    """Reduce-scatter in one round: every rank sends each other rank its piece, and adds up what it
    gets.

    input (S,) -> output (S / N,). Sends (N-1)/N of the input as a ring does; gloo's own sends twice
    that. 16-bit terms are added in 32 bits. To be called like torch's: DirectReduceScatter(output,
    input, group=..., async_op=True).wait().
    """

    def __init__(self, output, input, group=None, async_op=False):
        self.output, self.received, self.ranks = (
            output,
            torch.empty_like(input),
            dist.get_world_size(group),
        )
        self.work = dist.all_to_all_single(self.received, input, group=group, async_op=True)
        if not async_op:
            self.wait()

    def wait(self):
        self.work.wait()
        torch.sum(self.received.view(self.ranks, len(self.output)), 0, out=self.output)
        self.received = None


class Freed(nn.Parameter):
    """The class of a parameter while stage 3 has freed its memory. Its shape can be read. Its
    values can not: without this error torch would read freed memory, and the process would die."""

    ALLOWED = set(
        "shape size dim ndim numel nelement stride dtype itemsize element_size is_floating_point is_complex device is_cuda"
        " layout untyped_storage requires_grad requires_grad_ grad grad_fn is_leaf register_hook"
        " register_post_accumulate_grad_hook new_empty new_zeros new_ones new_full empty_like zeros_like ones_like".split()
    )

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        of_property = function.__name__ in ("__get__", "__set__")
        name = function.__self__.__name__ if of_property else function.__name__
        if name not in cls.ALLOWED:
            raise RuntimeError(
                f"{name} of a weight that is not here: stage 3 has it only while a unit that contains it runs."
                " To read weights (state_dict, deepcopy), call zero.whole(model.named_parameters());"
                " to use one, do so within its unit's forward"
            )
        with torch._C.DisableTorchFunctionSubclass():
            return function(*args, **kwargs or {})


class Bucket:
    """Some parameters as one flat tensor of S elements, with padding; this rank owns part `part` of
    `parts`, S / parts long.

    flat      (S,)      weights in `param_dtype`; the parameters are views of it. In stage 3 without memory unless gathered
    shard     (S/N,)    this rank's part of it
    master    (S/N,)    what the optimizer steps on: the shard itself, or its copy in another dtype or place
    pieces              master cut at the parameters' borders, one a parameter, maybe empty. A piece of a matrix is (1, n),
                        so that whoever tells matrices from vectors by dim() (weight decay) still
                        can
    full      (S,)      this rank's gradients, in `reduce_dtype`
    gradient  (S/N,)    this rank's part of their sum over all ranks
    """

    def __init__(self, parameters, value, group, stage, device, dtypes, offload):
        master_dtype, param_dtype, self.reduce_dtype = dtypes
        self.group = group
        part, parts = (dist.get_rank(group), dist.get_world_size(group)) if stage > 0 else (0, 1)
        self.stage, self.trained = stage, parameters[0].requires_grad
        self.partial = getattr(parameters[0], "placement", {}).get("partial", [])
        sizes = [p.numel() for p in parameters]
        self.starts = [sum(sizes[:i]) for i in range(len(sizes))]
        self.length = -(-sum(sizes) // parts)
        self.size = self.length * parts
        self.own = slice(part * self.length, (part + 1) * self.length)
        # Of the parameters, then within this rank's part
        borders = [(at, at + n) for at, n in zip(self.starts, sizes)]
        ends = [[min(max(x, self.own.start), self.own.stop) for x in pair] for pair in borders]
        # Of pieces in a shard
        self.spans = [slice(first - self.own.start, last - self.own.start) for first, last in ends]

        self.flat = torch.zeros(self.size, dtype=param_dtype, device=device)
        # .data: views with version counters of their own. Autograd must not mind that a gather
        # writes what it has saved
        views = [
            self.flat.data[at : at + p.numel()].view(p.shape)
            for p, at in zip(parameters, self.starts)
        ]
        self.shard = (
            self.flat[self.own]
            if stage < 3
            else torch.zeros(self.length, dtype=param_dtype, device=device)
        )
        self.master, self.pieces = self.shard, []
        if self.trained and (offload or master_dtype != param_dtype):
            self.master = torch.zeros(
                self.length, dtype=master_dtype, device="cpu" if offload else device
            )
        for p, view, at, (first, last), span in zip(
            parameters, views, self.starts, ends, self.spans
        ):
            mine, weights = self.master[span], value(p).detach()
            mine.copy_(weights.flatten()[first - at : last - at])
            if stage < 3:
                view.copy_(weights)
            self.pieces.append(
                nn.Parameter(
                    mine.unsqueeze(0) if p.dim() > 1 else mine, requires_grad=p.requires_grad
                )
            )
        if stage == 3:
            self.shard.copy_(self.master)
        self.parameters = [
            nn.Parameter(view, requires_grad=p.requires_grad) for p, view in zip(parameters, views)
        ]
        for p, given in zip(self.parameters, parameters):
            p.__dict__.update(given.__dict__)
        self.users, self.gathering = set(), None
        self.full = self.gradient = None
        if self.trained:
            if stage < 2:  # for good
                self.full = torch.zeros(self.size, dtype=self.reduce_dtype, device=device)
                self.gradient = self.full[self.own]
            else:
                self.gradient = torch.zeros(self.length, dtype=self.reduce_dtype, device=device)
        self.filled, self.reduced = set(), False
        self.begin_pass()
        self.resize(0 if stage == 3 else self.size)

    def resize(self, elements):
        self.flat.untyped_storage().resize_(elements * self.flat.element_size())
        if elements == 0:
            self.turn_parameters(nn.Parameter, Freed)

    def turn_parameters(self, before, after):
        for p in self.parameters:
            if type(p) is before:  # a dry run's are of a class of torch's
                p.__class__ = after

    def wait(self):
        """Until the gathered weights are here."""
        if self.gathering is not None:
            self.gathering.wait()
            self.gathering = None
            self.turn_parameters(Freed, nn.Parameter)

    def begin_pass(self):
        self.missing = set(range(len(self.parameters)))

    def add(self, i, gradient):
        """Take the gradient of parameter i into the flat one. (In ddp.py it is a view of that; this
        one comes and goes, and may have another dtype.)"""
        self.have_full()
        slot = self.full[self.starts[i] :][: gradient.numel()].view(gradient.shape)
        slot.add_(gradient) if i in self.filled else slot.copy_(gradient)
        self.filled.add(i)
        self.missing.discard(i)

    def have_full(self):
        if self.full is None:
            self.full = torch.empty(self.size, dtype=self.reduce_dtype, device=self.flat.device)

    def fill_gaps(self):
        """Zeros for the parameters that got no gradient, and for the padding."""
        self.have_full()
        for i in set(range(len(self.parameters))) - self.filled:
            self.full[self.starts[i] :][: self.parameters[i].numel()].zero_()
        self.full[sum(p.numel() for p in self.parameters) :].zero_()
        self.filled.clear()

    def take(self):
        """Stage 2: keep this rank's part of the sum, free the rest."""
        mine = self.full[self.own]
        self.gradient.add_(mine) if self.reduced else self.gradient.copy_(mine)
        self.full, self.reduced = None, True

    def hand_over(self):
        """The gradient to the optimizer's pieces, in the master's dtype and place. Where it has
        these already it is no copy."""
        gradient = self.gradient.to(self.master)
        for piece, span in zip(self.pieces, self.spans):
            piece.grad = gradient[span].view(piece.shape)


CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)


def default_units(module):
    """What stage 3 gathers at a time: each item of the outermost containers (the blocks of a list
    of blocks), and each other module beside them (embedding, head)."""
    if isinstance(module, CONTAINERS):
        return [unit for unit in module.children() if any(True for _ in unit.parameters())]
    if not any(isinstance(m, CONTAINERS) for m in module.modules()):
        return [module] if any(True for _ in module.parameters()) else []
    return [unit for child in module.children() for unit in default_units(child)]


def tensors_in(x):
    """All tensors in nested lists, tuples and dicts."""
    if isinstance(x, torch.Tensor):
        yield x
    elif isinstance(x, (list, tuple, dict)):
        for y in x.values() if isinstance(x, dict) else x:
            yield from tensors_in(y)


# Optimizers of torch's, or widely used ones, that don't work element by element
NOT_ELEMENTWISE = "Adafactor", "LAMB", "Lamb", "LARS", "LBFGS", "Muon", "SOAP", "Shampoo"


class ZeRO:
    """Trains `model` over `group` with model states split as `stage` (0 to 3) says.

        zero = ZeRO(model, group, stage=2, optimizer=torch.optim.AdamW, microbatches=2)
        scheduler = CosineAnnealingLR(zero.optimizer, 1000)       # on zero.optimizer, not on zero
        for step in ...:
            zero.zero_grad()
            for x, y in my_2_microbatches:
                loss = cross_entropy(model(x), y, reduction="sum") /
                tokens_of_all_ranks_and_microbatches loss.backward()
            zero.finish()                                         # the global gradient is complete, each rank has its part
            zero.clip(zero.grad_norm(), 1.0)                      # torch's clip_grad_norm_ sees no gradients here
            zero.step()
            scheduler.step()

    The model's parameters are replaced in place, by views of the buckets; p.grad is None after
    backward.
    optimizer(pieces): makes an optimizer that works element by element, of this rank's pieces of
    the parameters. They come in
        the order of the buckets, not of model.parameters().
    microbatches: the backward passes a step. They may come in any order between forwards, as in a
    pipeline.
    units: modules that stage 3 gathers whole, in the order of forward; a parameter belongs to those
    that contain it, and must
        be used within their forward. Two units may share one. Default: default_units(model), and
        the model for what is left.
    bucket_bytes: the largest bucket of stages 0 to 2. A unit is a bucket in stage 3, whatever its
    size.
    param_dtype, reduce_dtype: of weights, activations and backward; of the sum over the ranks.
    master_dtype: of the weights
        that the optimizer steps on. Defaults: reduce as param, param as master, master as the
        parameters are.
    reduce_each, reshard: see the top of the file. offload: master weights and optimizer states in
    the host's memory. reduce_scatter(output, input, group=..., async_op=True) returns a work
    handle. Default: torch's, on gloo the direct one.
    reduce_group: another group of the same ranks for the gradients, for stage 3 where ranks may
    differ in which parameters get
        one: then gathers and reductions come in orders of their own.
    value(parameter): its whole initial value. So the model may be on the meta device, and `device`
    says where it goes.

    A step that an exception in backward ended begins again with zero_grad(). One given up
    elsewhere, after a backward and before finish(), needs zero_grad(give_up=True). All ranks must
    give up at the same place. Before ZeRO(...): all ranks have equal weights, in their dtype, on
    their device, tied and loaded. Whether a parameter is trained (requires_grad) is read then.
    Frozen ones are split in stage 3 and otherwise left whole. A parameter without gradient gets a
    zero one, so weight decay and momentum move it. Buffers (BatchNorm) are not synchronised. The
    optimizer gets all gradients at once. Where their dtype or place is not the masters', that is a
    copy of this rank's part, for a moment: where it does not fit, choose reduce_dtype=master_dtype.
    Activation checkpointing: use_reentrant=False. In stage 3 all ranks must run the same units in
    the same order: one that skips a layer waits for ever. A weight can be read only while its unit
    runs; zero.whole() has it at other times.
    Raises ValueError for an unknown stage, for what is no module, and for optimizers known to need
    whole matrices.
    Raises RuntimeError for calls out of order, create_graph=True, parameters that were replaced,
    and the values of a weight that is not here.

    Beside other kinds of parallelism (to be skipped at first):
    scopes: parts of the model that have backward passes of their own (a pipeline rank's stages),
    `microbatches` each, within
        `with zero.backward(index of the scope)`. They may share parameters. Default: the model is
        the only one.
    A parameter may be partial over further groups (`parameter.placement`, as tensor_parallel.shard
    writes it; a matrix tied across pipeline stages): finish() sums this rank's part of its gradient
    over them. placement["data"]: it is shared out over that group instead of `group` (an expert, of
    which there are fewer copies).
    """

    def __init__(
        self,
        model,
        group,
        stage,
        optimizer,
        microbatches=1,
        units=None,
        scopes=None,
        bucket_bytes=25 << 20,
        param_dtype=None,
        reduce_dtype=None,
        master_dtype=None,
        reduce_each=True,
        reshard=True,
        offload=False,
        reduce_scatter=None,
        reduce_group=None,
        value=lambda parameter: parameter,
        device=None,
    ):
        if stage not in (0, 1, 2, 3):
            raise ValueError(f"there is no stage {stage!r} of ZeRO: choose 0, 1, 2 or 3")
        if not isinstance(model, nn.Module):
            raise ValueError(
                f"ZeRO replaces a model's parameters: give it the model, not a {type(model).__name__}"
            )
        if isinstance(optimizer, torch.optim.Optimizer):
            raise ValueError(
                "give ZeRO a function that makes the optimizer (optimizer=torch.optim.AdamW), not an optimizer"
            )
        self.model, self.group, self.stage, self.microbatches = model, group, stage, microbatches
        self.reduce_each, self.reshard, self.reduce_group = (
            reduce_each and stage >= 2,
            reshard,
            reduce_group or group,
        )
        direct = dist.get_backend(group) == "gloo"
        self.reduce_scatter = reduce_scatter or (
            DirectReduceScatter if direct else native_reduce_scatter
        )
        self.scopes = [model] if scopes is None else list(scopes)
        self.scope, self.complete = 0, True
        self.units, self.rest = [[] for _ in self.scopes], None
        for scope, own in zip(self.scopes, self.units) if stage == 3 else ():
            inside = set(scope.modules())
            modules = default_units(scope) if units is None else [m for m in units if m in inside]
            # Each knows the list of its neighbours
            own += [Unit(self, module, own, i) for i, module in enumerate(modules)]
        self.buckets, made = [], {}
        for parameters, users, scopes in self._sort(bucket_bytes if stage < 3 else float("inf")):
            dtypes = [master_dtype or parameters[0].dtype]
            dtypes += [param_dtype or dtypes[0]]
            dtypes += [reduce_dtype or dtypes[1]]
            where = device or parameters[0].device
            data = getattr(parameters[0], "placement", {}).get("data") or group
            bucket = Bucket(parameters, value, data, stage, where, dtypes, offload)
            bucket.scopes = scopes
            self.buckets.append(bucket)
            for unit in users:
                unit.buckets.append(bucket)
            made |= zip(parameters, bucket.parameters)
        self.trained = [bucket for bucket in self.buckets if bucket.trained]
        # By a scope's backward
        self.reached = [[b for b in self.trained if i in b.scopes] for i in range(len(self.scopes))]
        self._install(made)
        pieces = [piece for bucket in self.trained for piece in bucket.pieces]
        self.optimizer = optimizer(pieces)
        if type(self.optimizer).__name__ in NOT_ELEMENTWISE:
            name = type(self.optimizer).__name__
            raise ValueError(
                f"{name} needs whole matrices, ZeRO has flat pieces of them: take one like AdamW or SGD"
            )
        # The unit gathered in advance; the one whose backward is on
        self.ahead = self.active = None
        # Whether a backward is on, or was ended by an exception; reductions on their way
        self.running, self.flying = False, []
        # Done of each scope; of this one's buckets the first not reduced
        self.passes, self.next = [0] * len(self.scopes), 0
        # False: a step is on. True: its gradients are complete. None: no step yet
        self.finished = None

    def _sort(self, bucket_bytes):
        """(parameters, the units that use them, the indices of their scopes) of each bucket, from
        the last parameter to the first, the order in which backward produces gradients. A bucket's
        have the same users, scopes, dtype, device, and groups over which they are partial."""
        users, scopes, lists, latest, size = {}, {}, [], {}, {}
        for unit in sum(self.units, []):
            for p in unit.module.parameters():
                users[p] = (*users.get(p, ()), unit)
        for i, scope in enumerate(self.scopes):
            for p in scope.parameters():
                scopes[p] = (*scopes.get(p, ()), i)
        if self.stage == 3 and any(p not in users for p in self.model.parameters()):
            if self.scopes != [self.model]:
                raise ValueError("with several scopes each parameter must belong to a unit")
            self.rest = Unit(self, self.model, [], None)
        for p in reversed(list(self.model.parameters())):
            placement = getattr(p, "placement", {})
            partial, data = placement.get("partial", []), placement.get("data")
            using = users.get(p, (self.rest,) if self.rest else ())
            key = (
                using,
                scopes[p],
                p.requires_grad,
                p.dtype,
                p.device,
                id(data),
                tuple(id(g) for g in partial),
            )
            size[key] = size.get(key, 0) + p.numel() * p.element_size()
            if key not in latest or size[key] > bucket_bytes:
                latest[key], size[key] = [], p.numel() * p.element_size()
                lists.append((latest[key], using, scopes[p]))
            latest[key].append(p)
        return lists

    def _install(self, made):
        """Put the views of the buckets where the parameters were, with the hooks that take their
        gradients."""
        self.places = []  # where each parameter stands, and on which storage
        storages = {
            p: bucket.flat.untyped_storage()._cdata
            for bucket in self.buckets
            for p in bucket.parameters
        }
        for bucket in self.trained:
            for i, p in enumerate(bucket.parameters):
                p.register_post_accumulate_grad_hook(
                    lambda _, bucket=bucket, i=i: self._arrived(bucket, i)
                )
        for module in self.model.modules():
            for name, p in module.named_parameters(recurse=False):
                setattr(module, name, made[p])
                self.places.append((module._parameters, name, made[p], storages[made[p]]))

    # --- gradients

    def zero_grad(self, give_up=False):
        """Start a step. give_up: the last one was not finished, and is to be forgotten. (One that
        an exception in backward ended is always forgotten.) All ranks must give up at the same
        place."""
        if self.finished is False and any(self.passes) and not (self.running or give_up):
            raise RuntimeError(
                "backward passes came, and no finish(): call zero_grad() once a step, and finish() after its last backward;"
                " to give a step up, call zero_grad(give_up=True)"
            )
        for owner, name, p, storage in self.places:
            if owner.get(name) is not p or p.untyped_storage()._cdata != storage:
                raise RuntimeError(
                    f"parameter {name!r} is no longer the one that ZeRO put there: convert, move and tie"
                    " (.double(), .to()) before ZeRO(model, ...), and make one ZeRO a model"
                )
        if self.running or give_up:
            self._forget()
        self.passes, self.next, self.finished = [0] * len(self.scopes), 0, False
        for bucket in self.trained:
            bucket.filled.clear()
            bucket.reduced = False

    def _forget(self):
        """Drop all that a step has left that was given up."""
        for _, work in self.flying:
            work.wait()  # or it would land in the gradients of the next step
        self.flying, self.running = [], False
        self._release_all()
        for bucket in self.trained:
            bucket.begin_pass()
            if self.stage >= 2:
                bucket.full = None

    @contextlib.contextmanager
    def backward(self, scope=0, complete=True):
        """Around a backward pass of one scope of several; complete=False: one that leaves some
        gradients for a later one."""
        self.scope, self.complete = scope, complete
        try:
            yield
        finally:
            self.scope, self.complete = 0, True

    def _arrived(self, bucket, i):
        p = bucket.parameters[i]
        gradient, p.grad = p.grad, None
        self._in_backward()
        if self.passes[self.scope] == self.microbatches:
            raise RuntimeError(
                f"more backward passes than the {self.microbatches} that ZeRO was told of: call zero_grad() before each step,"
                " or give ZeRO another microbatches="
            )
        self.finished = False
        bucket.add(i, gradient)
        self._launch()

    def _in_backward(self):
        if self.running:
            return
        self.running = True
        # Not where an exception ends it
        torch.autograd.Variable._execution_engine.queue_callback(self._backward_over)
        if torch.is_grad_enabled():
            raise RuntimeError(
                "create_graph=True: ZeRO has no gradients of gradients; take ddp.py's DDP, or leave it out"
            )

    def _launch(self, rest=False):
        # In the same order on every rank and in every pass: swapped between ranks they would add up
        # the wrong buckets, silently
        if not self.complete:
            return
        buckets = self.reached[self.scope]
        while self.next < len(buckets) and (rest or not buckets[self.next].missing):
            bucket = buckets[self.next]
            self.next += 1
            last = sum(self.passes[s] for s in bucket.scopes) + 1 == self.microbatches * len(
                bucket.scopes
            )
            if not (last or self.reduce_each):
                continue
            bucket.fill_gaps()
            group = self.reduce_group if bucket.group is self.group else bucket.group
            if self.stage == 0:
                work = dist.all_reduce(bucket.full, group=group, async_op=True)
            else:
                work = self.reduce_scatter(
                    bucket.full[bucket.own], bucket.full, group=group, async_op=True
                )
            self.flying.append((bucket, work))
            if self.stage >= 2:
                self._land(1)  # no more than one on its way and one that fills

    def _land(self, leave=0):
        while len(self.flying) > leave:
            bucket, work = self.flying.pop(0)
            work.wait()
            if self.stage >= 2:
                bucket.take()

    def _backward_over(self):
        if any(len(bucket.missing) < len(bucket.parameters) for bucket in self.reached[self.scope]):
            self._end_pass()
        else:  # no parameter got a gradient (autograd.grad): this was none of the step's passes
            self._release_all()
            self.running = False

    def _end_pass(self):
        """After each backward pass: reduce what never filled up (a parameter may get no gradient),
        free what is gathered."""
        self._launch(rest=True)
        self._land()
        self._leave(None)
        for unit in (self.rest, self.ahead):
            self._release(unit)
        self.ahead = None
        if self.complete:
            for bucket in self.reached[self.scope]:
                bucket.begin_pass()
            self.passes[self.scope] += 1
        self.running, self.next = False, 0

    def finish(self):
        """Complete the gradients, after the last backward of a step."""
        if self.running:
            raise RuntimeError(
                "an exception ended a backward pass: call zero_grad(), and begin the step again"
            )
        if self.finished:
            raise RuntimeError(
                "finish() was called already: call it once a step, and zero_grad() before the next"
            )
        for scope in range(len(self.scopes)):
            # A rank without some of the passes takes part in their reductions
            while self.passes[scope] < self.microbatches:
                with self.backward(scope):
                    self._end_pass()
        for bucket in self.trained:
            for group in bucket.partial:
                dist.all_reduce(bucket.gradient, group=group)
        self.finished = True

    def _must_be_finished(self):
        if self.finished is False:
            raise RuntimeError(
                "the gradients are not complete: call finish() after the last backward of the step"
            )

    def grad_norm(self, groups=()):
        """The norm of the whole model's gradient, each element counted once; a float64 scalar
        tensor, the same on all ranks.

        groups: further ones over which parameters are split or dealt out (tensor parallel,
        pipeline). A parameter that all ranks of such a group hold (`placement["copies"]`), or hold
        a partial sum of, counts on the group's first rank.
        """
        self._must_be_finished()
        total, mine = torch.zeros((), dtype=torch.float64), []
        for bucket in self.trained:
            total = total.to(bucket.gradient.device)
            for p, span in zip(bucket.parameters, bucket.spans):
                copies = [g for g in getattr(p, "placement", {}).get("copies", []) if g in groups]
                if all(dist.get_rank(g) == 0 for g in (*copies, *bucket.partial)):
                    mine.append(bucket.gradient[span])
        if mine:
            dtype = torch.promote_types(mine[0].dtype, torch.float32)
            total += torch.stack(torch._foreach_norm(mine, dtype=dtype)).double().square().sum()
        for group in (*[self.group] * (self.stage > 0), *groups):
            dist.all_reduce(total, group=group)
        return total.sqrt()

    def clip(self, norm, limit):
        """Scale the gradients so that their global norm is at most `limit` (0: leave them)."""
        self._must_be_finished()
        if limit > 0:
            scale = (limit / (norm + 1e-6)).clamp(max=1.0)
            for bucket in self.trained:
                bucket.gradient.mul_(scale.to(bucket.gradient.dtype))

    def step(self):
        """The optimizer's step on this rank's part of all buckets, then (stages 1 and 2) the new
        weights to all."""
        self._must_be_finished()
        self._release_all()  # what was gathered for a backward that never came
        for bucket in self.trained:
            bucket.hand_over()
        self.optimizer.step()  # once for all buckets: some optimizers count their steps
        for bucket in self.trained:
            for piece in bucket.pieces:
                piece.grad = None
        self._spread(self.trained)

    def reload(self):
        """After someone filled the masters (a checkpoint): the weights of all ranks follow."""
        self._release_all()
        self._spread(self.buckets)

    def _spread(self, buckets):
        """From the masters to the weights of all ranks."""
        works = []
        for bucket in buckets:
            if bucket.master is not bucket.shard:
                bucket.shard.copy_(bucket.master)
            if self.stage in (1, 2):
                works.append(
                    all_gather(bucket.flat, bucket.shard, group=bucket.group, async_op=True)
                )
        for work in works:
            work.wait()

    # --- stage 3: weights come and go

    def _gather(self, unit, wait=False):
        for bucket in unit.buckets if unit else ():
            if not bucket.users:
                bucket.resize(bucket.size)
                bucket.gathering = all_gather(
                    bucket.flat, bucket.shard, group=bucket.group, async_op=True
                )
            bucket.users.add(unit)
            if wait:
                bucket.wait()

    def _release(self, unit):
        for bucket in unit.buckets if unit else ():
            if unit in bucket.users:
                bucket.users.discard(unit)
                if not bucket.users:
                    bucket.wait()
                    bucket.resize(0)

    def _release_all(self):
        for unit in [*sum(self.units, []), self.rest]:
            self._release(unit)
        self.ahead = self.active = None

    def _enter(self, unit, following):
        """`unit` runs now, and `following` is likely to be next: have the one, start to gather the
        other."""
        if self.ahead is not unit:
            self._release(self.ahead)  # a wrong guess
        self._gather(unit, wait=True)
        self._gather(following)
        self.ahead = following

    def _leave(self, unit):
        """Backward goes on in `unit`: all that ran after it in forward is done. (Autograd runs what
        is ready in the reverse order of forward.)"""
        if self.active is not unit:
            self._release(self.active)
            self.active = unit

    # --- for others to look at

    @property
    def param_groups(self):
        """The optimizer's, for learning rates."""
        return self.optimizer.param_groups

    @torch.no_grad()
    def whole(self, named):
        """For (name, parameter) pairs of the model: (name, whole copy), a parameter in the masters'
        dtype whose .grad is the global gradient. For checks and checkpoints: every rank must call
        it, and gets all of it."""
        known = {}
        for bucket in self.buckets:
            both = []
            for part in (bucket.master, bucket.gradient):
                if part is not None and self.stage > 0:
                    part = part.to(bucket.flat.device)
                    both.append(part.new_empty(bucket.size))
                    all_gather(both[-1], part, group=bucket.group)
                else:
                    both.append(part)
            for p, at in zip(bucket.parameters, bucket.starts):
                known[p] = nn.Parameter(both[0][at : at + p.numel()].clone().view(p.shape))
                known[p].__dict__.update(p.__dict__)
                if bucket.trained:
                    known[p].grad = (
                        both[1][at : at + p.numel()].to(known[p], copy=True).view(p.shape)
                    )
        return [(name, known[p]) for name, p in named]


class Unit:
    """A module that stage 3 gathers and frees, by hooks on its forward and on the gradients of its
    results."""

    def __init__(self, zero, module, mates, index):
        self.zero, self.module, self.mates, self.index, self.buckets = (
            zero,
            module,
            mates,
            index,
            [],
        )
        module.register_forward_pre_hook(self.before_forward)
        module.register_forward_hook(self.after_forward)

    def neighbour(self, offset):
        """The unit before or after this one in its scope."""
        index = self.index + offset
        return self.mates[index] if 0 <= index < len(self.mates) else None

    def before_forward(self, module, inputs):
        if self.index is None:  # the model: around all others
            self.zero._gather(self, wait=True)
        # Else activation checkpointing runs it again, amid its backward
        elif self.zero.active is not self:
            self.zero._enter(self, self.neighbour(1))

    def after_forward(self, module, inputs, result):
        if self.zero.active is self:
            return
        given = {id(t) for t in tensors_in(inputs)}
        results = [t for t in tensors_in(result) if t.requires_grad and id(t) not in given]
        for t in results:
            t.register_hook(self.before_backward)
        if results and self.index == len(self.mates) - 1 and self.zero.reshard:
            self.zero.ahead = self  # its backward is likely to be next
        elif self.zero.reshard or not results:
            self.zero._release(self)

    def before_backward(self, _):
        self.zero._in_backward()
        if self.index is None:
            self.zero._gather(self, wait=True)
        elif self.zero.active is not self:
            self.zero._leave(self)
            self.zero._enter(self, self.neighbour(-1))


# --- demo ---

import harness
from harness import zero_bytes


def flags():
    parser = harness.parser(__doc__)
    g = parser.add_argument_group("ZeRO")
    why = (
        "what is split: 0 nothing (DDP), 1 optimizer states, 2 gradients too, 3 weights too (FSDP)"
    )
    g.add_argument("--stage", type=int, choices=range(4), default=3, help=why)
    harness.precision_flags(g)
    why = "stages 2, 3: reduce gradients once a step, not each micro-batch. Less is sent, all of them are held"
    g.add_argument("--reduce-once", action="store_true", help=why)
    why = "stage 3: keep gathered weights from forward until backward. A third less is sent, all of them are held"
    g.add_argument("--keep-gathered", action="store_true", help=why)
    why = "master weights and optimizer states in the host's memory: 12/N bytes a parameter less here, but copies each step"
    g.add_argument("--offload", action="store_true", help=why)
    why = "of a bucket, stages 0 to 2: large ones send faster, small ones start earlier"
    g.add_argument("--bucket-mb", type=harness.real(0), default=0.5, metavar="MB", help=why)
    why = "run nothing: the largest models whose states fit 80 GB on 64 ranks, each played on tensors without memory"
    g.add_argument("--fit", action="store_true", help=why)
    return parser


def main():
    args = flags().parse_args()
    if args.fit:
        return zero_bytes.fit(ZeRO)
    for flag, there, least in (
        ("reduce-once", args.reduce_once, 2),
        ("keep-gathered", args.keep_gathered, 3),
    ):
        if there and args.stage < least:
            raise harness.Refused(
                f"--{flag} means nothing in stage {args.stage}: use --stage {least}, or leave it out"
            )
    harness.configure(args)
    harness.launch(demo, args, check=lambda world: harness.check_batch(args, world))


def demo(run):
    args, group, n = run.args, dist.group.WORLD, run.world
    run.groups(dp=group)
    model = run.meta_model()
    weights = harness.DTYPES[args.param_dtype or args.dtype]
    gradients = harness.DTYPES[args.reduce_dtype or args.param_dtype or args.dtype]
    zero = ZeRO(
        model,
        group,
        args.stage,
        lambda pieces: harness.make_optimizer(pieces, args),
        args.microbatches,
        bucket_bytes=int(args.bucket_mb * 2**20),
        master_dtype=run.dtype,
        param_dtype=weights,
        reduce_dtype=gradients,
        reduce_each=not args.reduce_once,
        reshard=not args.keep_gathered,
        offload=args.offload,
        value=run.initial(model),
        device=run.device,
    )
    for step in run.steps(zero):
        zero.zero_grad()
        loss = run.zero()
        for tokens, targets, samples in run.microbatches(step, run.rank, n):
            # Count: the global batch's tokens
            part = model(tokens, targets=targets, count=run.count, samples=samples)
            part.backward()
            loss += part.detach()
        zero.finish()
        dist.all_reduce(loss, group=group)
        norm = zero.grad_norm()
        run.check(loss, norm, lambda: zero.whole(model.named()))
        zero.clip(norm, args.grad_clip)
        zero.step()
        run.log(loss, norm)

    sent, held, notes = zero_bytes.receipt(run, zero)
    return run.receipt({"dp": n, "zero": args.stage}, sent, held, notes)


if __name__ == "__main__":
    harness.script(main)
