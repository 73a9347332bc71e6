"""Data parallelism: every rank holds the whole model and works on its own rows of the batch.

    rank 0   rows 0..3    forward  backward --+
    rank 1   rows 4..7    forward  backward --+-- sum of the gradients -> the same step everywhere
    rank 2   rows 8..11   forward  backward --+

Backward is the model's own, because the gradient of a sum is the sum of the gradients. A rank's
loss is the sum over its tokens, divided by the number of tokens in the whole batch. So the ranks'
gradients add up to the batch's. Nothing is averaged, and a rank may have more rows than another.

Sent: the gradients, once a step. An all-reduce over a ring of N ranks sends 2 r P e bytes a rank:
P parameters of e bytes, r = (N-1)/N. There are four ways to add the gradients up, `--sync`:

    naive        after backward, one all-reduce a parameter
    bucketed     after backward, one all-reduce a bucket of parameters: fewer, larger messages
    overlapped   one all-reduce a bucket, as soon as backward has filled it: backward goes on
    server       workers send gradients to rank 0, which takes the step and sends the weights back:
                 (N-1) P e bytes out of rank 0, and as many into it

Not enough where parameters, gradients and AdamW's two moments, 4 P e bytes, do not fit on one rank:
zero.py is the next step. docs/data-parallelism.md has the rest.

    torchrun --nproc_per_node=4 ddp.py
    python ddp.py --sync naive --optimizer sgd

Li et al. 2020, PyTorch Distributed, arXiv:2006.15704, section 3.2 (buckets, overlap). Li et al.
2014, Scaling distributed machine learning with the parameter server. Patarasuk and Yuan 2009, ring.
"""

import functools
import math
from collections import Counter
from collections.abc import Iterable

import torch
import torch.distributed as dist

# --- the plainest form: after backward, one all-reduce a parameter


class Naive:
    """Sums the gradients of `parameters` over the ranks of `group`.

        for p in model.parameters():
            dist.broadcast(p.data, group=group, group_src=0)   # nobody checks that you do this
        sync = Naive(model.parameters(), group, microbatches=2)
        for micro_batches, tokens in batches:                  # this rank's rows; all ranks' tokens
            sync.zero_grad()                                   # not the model's or the optimizer's
            for x, y in micro_batches:                         # here 2
                loss = cross_entropy(model(x), y, reduction="sum") / tokens
                loss.backward()                                # adds to p.grad
            sync.finish()                                      # p.grad is the batch's gradient
            optimizer.step()                                   # the same step on every rank

    Clip after finish(). A parameter without a gradient gets zeros, so weight decay moves it.
    Buffers are not summed. For parameters that another kind of parallelism has cut, take DDP."""

    def __init__(self, parameters, group, microbatches=1):
        parameters = counted(parameters)
        self.group = group
        self.parameters = [p for p in parameters if p.requires_grad]
        for p in self.parameters:
            p.grad = torch.zeros_like(p, memory_format=torch.contiguous_format)
        self.step = Step(parameters, microbatches)  # refuses calls in a wrong order, see below

    def zero_grad(self, give_up=False):
        """give_up=True: also where backward passes came, and no finish()."""
        self.step.begin(give_up)
        for p in self.parameters:
            p.grad.zero_()

    def finish(self):
        self.step.end()
        for p in self.parameters:
            dist.all_reduce(p.grad, group=self.group)


# --- buckets: fewer, larger messages


class Bucket:
    """One flat buffer for the gradients of several parameters: each p.grad is a view of it.

    Autograd adds in place to a p.grad that exists, so nothing is copied in or out."""

    def __init__(self, parameters):
        first, size = parameters[0], sum(p.numel() for p in parameters)
        self.parameters = parameters
        self.flat = torch.zeros(size, dtype=first.dtype, device=first.device)
        self.copies_group, self.partial_groups = reduction_groups(first)
        for p, gradient in self.pieces(self.flat):
            p.grad = gradient

    def pieces(self, flat):
        """[(parameter, its piece of `flat`, in the parameter's shape)]"""
        pieces = flat.split([p.numel() for p in self.parameters])
        return [(p, piece.view_as(p)) for p, piece in zip(self.parameters, pieces)]


def make_buckets(parameters, bucket_bytes):
    """Buckets of at most `bucket_bytes` (a larger parameter gets its own), from the last parameter
    to the first, because backward begins with the last layers. A bucket is of one kind."""
    lists = []
    latest = {}  # kind: its list that is being filled
    room = {}  # kind: the bytes left in that list
    for p in reversed(parameters):
        kind = p.dtype, p.device, reduction_groups(p)
        if p.nbytes > room.get(kind, -1):
            latest[kind], room[kind] = [], bucket_bytes
            lists.append(latest[kind])
        latest[kind].append(p)
        room[kind] -= p.nbytes
    return [Bucket(parameters) for parameters in lists]


# --- overlap: a bucket is reduced while backward goes on


class DDP:
    """Sums gradients in buckets, each as soon as backward has filled it. Used like Naive.

    overlap=False reduces all buckets in finish(). `microbatches` is the number of backward passes a
    step: a bucket is full after the last. all_reduce(tensor, group=..., async_op=True) returns a
    work handle. After an exception in backward all ranks call zero_grad() and start the step again.
    If one rank alone does so, the others get NaN. Not covered: a rank that raised before its first
    gradient of the step cannot know that another has started a bucket."""

    def __init__(
        self, parameters, group, microbatches=1, bucket_bytes=25e6, overlap=True, all_reduce=None
    ):
        parameters = counted(parameters)
        self.group, self.all_reduce = group, all_reduce or dist.all_reduce
        self.buckets = make_buckets([p for p in parameters if p.requires_grad], bucket_bytes)
        self.step = Step(parameters, microbatches)
        self.overlap = overlap
        self.works = []  # handles of the all-reduces that have started
        self.next = 0  # the first bucket that has not started
        for bucket in self.buckets:
            bucket.due = microbatches * sum(parameters[p] for p in bucket.parameters)  # a step's
            bucket.missing = bucket.due  # gradients still to come in this step
            for p in bucket.parameters if overlap else []:
                p.register_post_accumulate_grad_hook(functools.partial(self._arrived, bucket))

    def zero_grad(self, give_up=False):
        unfinished = self.step.latest not in ["zero_grad()", "finish()"]
        self.step.begin(give_up)
        if unfinished and self.overlap:  # What one rank has started, all must start.
            for bucket in self.buckets[self.next :]:
                bucket.flat.fill_(torch.nan)  # incomplete: nobody may train on it
            self._reduce_rest()
        self.next = 0
        for bucket in self.buckets:
            bucket.flat.zero_()
            bucket.missing = bucket.due

    def _arrived(self, bucket, p):  # autograd has added to p.grad
        bucket.missing -= 1
        if bucket.missing < 0:
            raise RuntimeError(f"more backward passes than microbatches={self.step.microbatches}")
        self._start_full_buckets()

    def _start_full_buckets(self, rest=False):
        # All ranks start the buckets in one order, or all-reduces would add up the wrong buckets,
        # silently. So a bucket that is full early waits for those before it.
        while self.next < len(self.buckets) and (rest or self.buckets[self.next].missing == 0):
            bucket = self.buckets[self.next]
            group = bucket.copies_group or self.group
            self.works.append(self.all_reduce(bucket.flat, group=group, async_op=True))
            self.next += 1

    def _reduce_rest(self):
        self._start_full_buckets(rest=True)
        for work in self.works:
            work.wait()
        self.works = []

    def finish(self):
        self.step.end()
        self.early = self.next  # buckets that started during backward
        self._reduce_rest()  # without overlap all; else those with a parameter without a gradient
        for bucket in self.buckets:
            for group in bucket.partial_groups:
                dist.all_reduce(bucket.flat, group=group)


def reduction_groups(p):
    """For parameters that another kind of parallelism has cut: the group that holds copies of p
    (None: DDP's own), and further groups over which p.grad must be summed."""
    placement = getattr(p, "placement", {})
    return placement.get("data"), tuple(placement.get("partial", ()))


# --- mistakes that would be silent: refused


def counted(parameters):
    """{parameter: how often it is listed}. A parameter that two stages of a pipeline share on one
    rank is listed twice: it gets two gradients a micro-batch."""
    parameters = list(parameters) if isinstance(parameters, Iterable) else [parameters]
    for p in parameters:
        if not isinstance(p, torch.Tensor) or not p.is_leaf:
            raise ValueError(f"give model.parameters(): a {type(p).__name__} is no parameter")
    if not any(p.requires_grad for p in parameters):
        raise ValueError("no parameter needs a gradient: all are frozen, or an iterator is used up")
    return Counter(parameters)


class Step:
    """Follows zero_grad(), each backward pass and finish(). Raises RuntimeError in a wrong order,
    and where a p.grad is no longer the memory that finish() sums. finish() sees by the weights'
    versions that optimizer.step() came too early. A fused optimizer does not count them up."""

    def __init__(self, parameters, microbatches):
        self.parameters, self.microbatches = parameters, microbatches
        self.storages = {p: p.grad.untyped_storage() for p in parameters if p.requires_grad}
        self.latest = "zero_grad()"  # what came last
        self.passes = 0  # complete backward passes of this step
        for p in self.storages:
            p.register_post_accumulate_grad_hook(self._gradient_arrived)

    def begin(self, give_up):
        forgotten = ["too few backward()", "backward()", "optimizer.step()"]  # before finish()
        self._enter("zero_grad()", refused_after=[] if give_up else forgotten)
        self.passes = 0

    def _gradient_arrived(self, p):
        if self.latest != "half a backward()":
            self._enter("backward()", refused_after=["finish()"])
            self.latest = "half a backward()"
            torch.autograd.Variable._execution_engine.queue_callback(self._backward_ended)
            if self.passes == 0:
                self.versions = [p._version for p in self.storages]

    def _backward_ended(self):  # never called if backward raises: it stays half a backward()
        self.passes += 1
        self.latest = "backward()" if self.passes >= self.microbatches else "too few backward()"

    def end(self):
        if self.passes > 0 and self.versions != [p._version for p in self.storages]:
            self.latest = "optimizer.step()"  # it has changed the weights
        self._enter("finish()", ["finish()", "half a backward()", "optimizer.step()"])

    def _enter(self, call, refused_after):
        if self.latest in refused_after:
            raise RuntimeError(
                f"{call} after {self.latest}: a step is zero_grad(), the backward passes, "
                "finish(), optimizer.step(). Where backward raised, all ranks start again with "
                "zero_grad(); a step given up elsewhere, with zero_grad(give_up=True)."
            )
        for p in self.parameters:
            moved = p.grad is None or p.grad.untyped_storage() is not self.storages.get(p)
            if p.requires_grad and moved:
                raise RuntimeError(
                    "p.grad was replaced, and the new one would not be summed. The causes: "
                    "zero_grad() of the model or the optimizer, a second DDP on the model, "
                    "create_graph=True, a parameter unfrozen, a model moved or cast after DDP(...)"
                )
        self.latest = call


# --- the parameter server: rank 0 adds up and takes the step


class ParameterServer(DDP):
    """Used like Naive, but trained weights may start different: zero_grad() also fetches the
    server's. After finish() rank 0 of `group` alone has the batch's gradient:

        if dist.get_rank(group) == 0:
            optimizer.step()

    Between steps the workers' weights are old: pull() before you use them."""

    def __init__(self, parameters, group, microbatches=1):
        super().__init__(parameters, group, microbatches, bucket_bytes=math.inf, overlap=False)
        self.rank = dist.get_rank(group)
        self.workers = range(1, dist.get_world_size(group)) if self.rank == 0 else []
        for bucket in self.buckets:
            bucket.received = torch.empty_like(bucket.flat)
            bucket.weights = torch.cat([p.detach().flatten() for p in bucket.parameters])
            for p, weight in bucket.pieces(bucket.weights):
                p.data = weight

    def zero_grad(self, give_up=False):
        super().zero_grad(give_up)
        self.pull()

    def pull(self):
        for bucket in self.buckets:
            storage = bucket.weights.untyped_storage()
            if any(p.untyped_storage() is not storage for p in bucket.parameters):
                raise RuntimeError("p.data was replaced: fill it in place instead")
            if self.rank > 0:
                dist.recv(bucket.weights, group=self.group, group_src=0)
            works = [
                dist.isend(bucket.weights, group=self.group, group_dst=r) for r in self.workers
            ]
            for work in works:
                work.wait()

    def finish(self):
        self.step.end()
        for bucket in self.buckets:
            if self.rank > 0:
                dist.send(bucket.flat, group=self.group, group_dst=0)
            for worker in self.workers:
                dist.recv(bucket.received, group=self.group, group_src=worker)
                bucket.flat += bucket.received


# --- demo ---

import collectives
import harness
from harness import network


def main():
    parser = harness.parser(__doc__)
    ways = ["naive", "bucketed", "overlapped", "server"]
    parser.add_argument("--sync", choices=ways, default="overlapped", help="how to add up")
    why = "of a bucket: large ones send faster, small ones start earlier. For large models take 25"
    parser.add_argument("--bucket-mb", type=harness.real(0), default=0.5, metavar="MB", help=why)
    sums = ["torch", *collectives.ALL_REDUCE]
    why = "who adds up a bucket: torch.distributed, or an algorithm of collectives.py"
    parser.add_argument("--all-reduce", choices=sums, default="torch", help=why)
    args = parser.parse_args()
    if args.all_reduce != "torch" and args.sync in ("server", "naive"):
        raise harness.Refused("--all-reduce needs buckets: use --sync bucketed or overlapped")
    harness.configure(args)
    harness.launch(demo, args, check=lambda world: harness.check_batch(args, world))


def demo(run):
    args, group = run.args, dist.group.WORLD
    server = args.sync == "server"
    run.groups(dp=group)
    model = run.fill(run.meta_model())  # the same seed everywhere: the replicas start equal
    parameters = list(model.parameters())
    if server:
        sync = ParameterServer(parameters, group, args.microbatches)
    elif args.sync == "naive":
        sync = Naive(parameters, group, args.microbatches)
    else:
        all_reduce = collectives.ALL_REDUCE.get(args.all_reduce, dist.all_reduce)
        overlap = args.sync == "overlapped"
        bucket_bytes = int(args.bucket_mb * 2**20)
        sync = DDP(parameters, group, args.microbatches, bucket_bytes, overlap, all_reduce)
    takes_step = run.rank == 0 or not server
    optimizer = harness.make_optimizer(parameters, args)
    for step in run.steps(optimizer):
        sync.zero_grad()
        loss = run.zero()
        for tokens, targets, samples in run.microbatches(step, run.rank, run.world):
            # count: the number of tokens in the whole batch
            part = model(tokens, targets=targets, count=run.count, samples=samples)
            part.backward()
            loss += part.detach()
        sync.finish()
        dist.all_reduce(loss, group=group)
        norm = harness.grad_norm(parameters)
        if server:  # a worker's own gradient is not the batch's
            dist.broadcast(norm, group=group, group_src=0)
        run.check(loss, norm, model.named, takes_step)
        if takes_step:
            harness.clip(parameters, norm, args.grad_clip)
            optimizer.step()
        run.log(loss, norm)

    n, size = run.world, sum(p.numel() * p.element_size() for p in parameters)
    sent = harness.formulas.data_parallel_sent(args.sync, args.all_reduce, size, n, run.rank)
    held = run.states(size, "P e", takes_step)
    sequences = args.batch // n // args.microbatches
    block = harness.activation_bytes(run.config, sequences, run.dtype.itemsize)
    held["activations_peak"] = (run.config.layers * block, "what backward needs of the blocks")
    notes = []
    if args.all_reduce != "torch":
        most = network.formulas(n, size)[args.all_reduce].sent
        notes.append(f"a {args.all_reduce} all-reduce sends at most {most:,.0f} bytes a rank")
    if args.sync == "overlapped":
        notes.append(f"{sync.early} of {len(sync.buckets)} buckets started during backward")
    return run.receipt({"dp": n, "sync": args.sync}, sent, held, notes)


if __name__ == "__main__":
    harness.script(main)
