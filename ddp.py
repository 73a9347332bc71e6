"""Data parallelism: every rank holds the whole model and works on its own rows of the batch.

    rank 0   rows 0..3    forward  backward --+
    rank 1   rows 4..7    forward  backward --+-- sum of the gradients -> the same step everywhere
    rank 2   rows 8..11   forward  backward --+

Sent      The gradients, once a step. In a ring all-reduce each of N ranks sends 2 r P e bytes, with
          P parameters of e bytes and r = (N-1)/N. There are four ways to add them up, `--sync`:

          naive       after backward, one all-reduce per parameter
          bucketed    after backward, one per bucket of parameters: fewer, larger messages
          overlapped  one per bucket, as soon as backward has filled it, while backward goes on
          server      one rank adds up, takes the step, sends the weights: parameter_server.py

Backward  The gradient of a sum is the sum of the gradients. A rank's loss is the sum over its own
          tokens, divided by the number of tokens in the whole batch. So the gradients of all ranks
          add up to that of the batch, even if some ranks have more rows. (torch's DDP divides the
          sum by N, so there each rank gives its mean loss.)
Limits    Parameters, gradients and AdamW's two moments, 4 P e bytes, must fit on one rank. If they
          don't: zero.py. For more: docs/learn/data-parallelism.md.

    torchrun --nproc_per_node=4 ddp.py              python ddp.py --sync naive  (starts 4 itself)

Li et al. 2020, PyTorch Distributed, arXiv:2006.15704, section 3.2 (buckets, overlap).
"""

import functools
from collections import Counter

import torch
import torch.distributed as dist

# --- the plainest form: after backward, one all-reduce per parameter


def sum_gradients(parameters, group):
    """After backward on this rank's rows: adds up each gradient over the ranks of `group`.

        for p in model.parameters():
            dist.broadcast(p.data, group=group, group_src=0)   # equal weights on all ranks
        for micro_batches, target_count in batches:            # count: of all ranks' targets
            optimizer.zero_grad()
            for x, y in micro_batches:                         # this rank's micro-batches
                loss = cross_entropy(model(x), y, reduction="sum") / target_count
                loss.backward()                                # adds to p.grad
            sum_gradients(model.parameters(), group)           # p.grad is the batch's gradient
            optimizer.step()                                   # the same step on every rank

    target_count: over all micro-batches of all ranks. If all have the same size, it is y.numel() x
    a rank's micro-batches x N; else all-reduce each rank's count. Nothing checks that you keep to
    this order: DDP does. Buffers, such as BatchNorm's, are not synchronized. If another kind of
    parallelism has split parameters, use DDP, which sums each gradient over the right ranks."""
    for p in parameters:
        if p.requires_grad:
            if p.grad is None:  # this rank's rows did not use p, but other ranks wait for its part
                p.grad = torch.zeros_like(p)
            dist.all_reduce(p.grad, group=group)


# --- buckets: fewer, larger messages


class Bucket:
    """One flat buffer for the gradients of several parameters: each p.grad is a view of it.
    Autograd adds in place to a p.grad that exists, so nothing is copied."""

    def __init__(self, parameters, groups, grads_per_step):
        self.groups = groups  # mostly one. The sum goes over one after the other: see groups_of
        self.grads_per_step = grads_per_step  # after so many gradients the bucket is full
        sizes = [p.numel() for p in parameters]
        self.flat = parameters[0].new_zeros(sum(sizes))
        for p, piece in zip(parameters, self.flat.split(sizes)):
            p.grad = piece.view_as(p)

    def zero(self):
        self.flat.zero_()
        self.grads_left = self.grads_per_step


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


# --- overlap: a bucket is reduced while backward goes on


class DDP:
    """Sums gradients in buckets, each as soon as backward has filled it.

        for p in model.parameters():
            dist.broadcast(p.data, group=group, group_src=0)   # equal weights: not checked
        sync = DDP(model.parameters(), group, microbatches=2)
        for micro_batches, target_count in batches:   # the targets of the whole batch
            sync.zero_grad()                          # the optimizer's would drop p.grad
            for x, y in micro_batches:                # this rank's two
                loss = cross_entropy(model(x), y, reduction="sum") / target_count
                loss.backward()                       # the last one starts all-reduces of buckets
            sync.finish()                             # starts the others, waits for all
            optimizer.step()                          # p.grad is the batch's gradient

    microbatches  the backward passes of a step. Buckets become full in the last one
    overlap       False: nothing is sent before finish()
    all_reduce    in place of torch's: (flat, group=group) -> a handle with wait(), or None if done

    A parameter that got no gradient has zeros, not None, so weight decay moves it. If backward
    raises, end the run on all ranks: others may wait."""

    def __init__(
        self, parameters, group, microbatches=1, bucket_bytes=25e6, overlap=True, all_reduce=None
    ):
        # How many gradients a pass adds to p: as many as p is listed times. A matrix that two
        # pipeline stages of this rank share is listed twice
        grads_per_pass = Counter(parameters)
        trained = [p for p in grads_per_pass if p.requires_grad]
        if not trained:
            raise ValueError("no parameter needs a gradient: all frozen, or an iterator used up")
        self.microbatches, self.overlap = microbatches, overlap
        self.all_reduce = all_reduce or functools.partial(dist.all_reduce, async_op=True)

        self.buckets = []
        kinds = {p: (p.dtype, p.device, groups_of(p, group)) for p in trained}
        for members in group_parameters(trained, bucket_bytes, kinds.get):
            grads_per_step = microbatches * sum(grads_per_pass[p] for p in members)
            bucket = Bucket(members, groups_of(members[0], group), grads_per_step)
            for p in members:
                p.register_post_accumulate_grad_hook(functools.partial(self._arrived, bucket))
            self.buckets.append(bucket)

        # For the refusals below
        self.parameters = list(grads_per_pass)  # frozen ones, too: they may be unfrozen later
        self.addresses = {p: p.grad.data_ptr() for p in trained}
        self.last_call = None  # zero_grad() -> unfinished backward() -> backward() -> finish()
        self.zero_grad()

    def zero_grad(self):
        record_call(self, "zero_grad()", not_after=["backward()", "unfinished backward()"])
        self.works = []  # this step's all-reduces: works[i] belongs to buckets[i]
        for bucket in self.buckets:
            bucket.zero()

    def _arrived(self, bucket, p):  # the hook of each p, after autograd has added to p.grad
        check_gradient(self, bucket)
        bucket.grads_left -= 1
        if self.overlap:
            self._start_buckets(only_full=True)

    def _start_buckets(self, only_full):
        # All ranks start the buckets in one order, or all-reduces would add up the wrong buckets,
        # silently. So a bucket that is full early waits for those before it.
        for bucket in self.buckets[len(self.works) :]:
            if only_full and bucket.grads_left > 0:
                break
            self.works.append(self.all_reduce(bucket.flat, group=bucket.groups[0]))

    def finish(self):
        record_call(self, "finish()", not_after=["finish()", "unfinished backward()"])
        self._start_buckets(only_full=False)
        for work in self.works:
            if work is not None:
                work.wait()
        for bucket in self.buckets:
            for group in bucket.groups[1:]:  # rarely any, so not overlapped
                dist.all_reduce(bucket.flat, group=group)


# --- together with another kind of parallelism: docs/use/two-techniques.md


def groups_of(p, group):
    """The groups over which p.grad is summed, one after the other. That is `group`, unless another
    technique has set p.placement: "data" is the group that has replicas of p (fewer ranks for an
    expert), "partial" lists groups over which a sum is still open (a tied matrix's two stages)."""
    placement = getattr(p, "placement", {})
    return (placement.get("data") or group, *placement.get("partial", ()))


# --- mistakes that would be silent: refused


def record_call(sync, call, not_after):
    """Remember this call. Refuse it out of order, or if a p.grad is no view of its bucket."""
    if sync.last_call in not_after:
        raise RuntimeError(
            f"{call} after {sync.last_call}: a step is zero_grad(), the backward passes, finish(). "
            "If an exception ended a backward pass, end the run: other ranks may wait for this one"
        )
    for p in sync.parameters:
        in_bucket = p.grad is not None and p.grad.data_ptr() == sync.addresses.get(p)
        if p.requires_grad and not in_bucket:
            raise RuntimeError(
                "p.grad was replaced, and would not be summed: by the optimizer's zero_grad(), a "
                "second DDP, create_graph=True, a p unfrozen, a model moved or cast after DDP(...)"
            )
    sync.last_call = call


def check_gradient(sync, bucket):
    """Refuse a backward pass after finish(), and a gradient for a bucket that was sent."""
    if sync.last_call != "unfinished backward()":  # the first gradient of a pass
        record_call(sync, "unfinished backward()", not_after=["finish()"])
        # At the end of this pass, unless an exception ends it. Private, but torch's DDP uses it too
        ended = functools.partial(setattr, sync, "last_call", "backward()")
        torch.autograd.Variable._execution_engine.queue_callback(ended)
    if sync.overlap and bucket.grads_left == 0:  # without overlap nothing was sent
        cause = "or a parameter listed once got two gradients in one"
        raise RuntimeError(f"more backward passes than microbatches={sync.microbatches}, {cause}")


# --- demo ---

import collectives
import harness
import parameter_server
import proof
import receipts.ddp as receipt


def main():
    parser = harness.parser(__doc__)
    ways = ["naive", "bucketed", "overlapped", "server"]
    parser.add_argument("--sync", choices=ways, default="overlapped", help="how to add up")
    why = "size of a bucket: large ones cost fewer latencies, small ones start earlier"
    parser.add_argument("--bucket-mb", **harness.MEGABYTES, default=0.5, help=why)
    why = "who adds up a bucket: torch.distributed, or an algorithm of collectives.py"
    algorithms = ["torch", *collectives.ALGORITHMS]
    parser.add_argument("--all-reduce", choices=algorithms, default="torch", help=why)
    parser.set_defaults(staleness=None)  # of the parameter server: it is synchronous here
    args = parser.parse_args()
    harness.configure(args)
    train = parameter_server.demo if args.sync == "server" else demo
    proof.launch(train, args, check=functools.partial(receipt.check, args))


def demo(run):  # run: the harness's data, receipt and checks
    args, group = run.args, dist.group.WORLD
    run.groups(dp=group)
    model = run.fill(run.meta_model())  # the same seed everywhere: the replicas start equal
    parameters = list(model.parameters())
    optimizer = harness.make_optimizer(parameters, args)
    if args.sync == "naive":
        sync = None
        # Gradients stay in memory: the receipt counts them
        zero_grad = functools.partial(optimizer.zero_grad, set_to_none=False)
        finish = functools.partial(sum_gradients, parameters, group)
    else:
        all_reduce = None
        if args.all_reduce != "torch":
            all_reduce = functools.partial(collectives.all_reduce, algorithm=args.all_reduce)
        bucket_bytes, overlap = args.bucket_mb * 2**20, args.sync == "overlapped"
        sync = DDP(parameters, group, args.microbatches, bucket_bytes, overlap, all_reduce)
        zero_grad, finish = sync.zero_grad, sync.finish
    for step in run.steps(optimizer):
        zero_grad()
        loss = run.zero()  # in float64
        for tokens, targets, samples in run.microbatches(step, run.rank, run.world):
            part = model(tokens, targets=targets, target_count=run.target_count, sample_ids=samples)
            part.backward()
            loss += part.detach()
        started = len(sync.works) if sync else 0  # buckets that backward hides
        finish()
        dist.all_reduce(loss, group=group)  # a rank has its part of the loss, as of the gradients
        norm = harness.grad_norm(parameters)
        run.check(loss, norm, model.named)  # ends the run if they are not finite
        harness.clip(parameters, norm, args.grad_clip)
        optimizer.step()
        run.log()
    return run.receipt(*receipt.of_demo(run, sync, started))


if __name__ == "__main__":
    harness.script(main)
