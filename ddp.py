"""Data parallelism: every rank holds the whole model and works on its own rows of the batch.

    rank 0   rows 0..3    forward  backward --+
    rank 1   rows 4..7    forward  backward --+-- sum of the gradients -> the same step everywhere
    rank 2   rows 8..11   forward  backward --+

Sent      The gradients, once a step. Each of N ranks in a ring all-reduce sends 2 r P e bytes, with
          P parameters of e bytes and r = (N-1)/N. There are four ways to add them up, `--sync`:

          naive       after backward, one all-reduce per parameter
          bucketed    after backward, one per bucket of parameters: fewer, larger messages
          overlapped  one per bucket, as soon as backward has filled it: backward goes on
          server      one rank adds up, takes the step, sends the weights: parameter_server.py

Backward  The model's own: the gradient of a sum is the sum of the gradients. A rank's loss is the
          sum over its tokens, divided by the number of tokens in the whole batch, so the ranks'
          gradients add up to the batch's. A rank may have more rows than another. torch's DDP
          averages instead: a loss for it, the mean over a rank's rows, is N times too large here.
Limits    Parameters, gradients and AdamW's two moments, 4 P e bytes, must fit on one rank. Else
          zero.py is the next step. docs/learn/data-parallelism.md has the rest.

    torchrun --nproc_per_node=4 ddp.py              python ddp.py --sync naive --optimizer sgd

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
        for micro_batches, target_count in batches:            # the number of targets of all ranks
            optimizer.zero_grad()
            for x, y in micro_batches:
                loss = cross_entropy(model(x), y, reduction="sum") / target_count
                loss.backward()                                # adds to p.grad
            sum_gradients(model.parameters(), group)           # p.grad is the batch's gradient
            optimizer.step()                                   # the same step on every rank

    Not checked: the order of these lines. The model's buffers are not summed. For parameters that
    another kind of parallelism has cut, take DDP."""
    for p in parameters:
        if p.requires_grad:
            if p.grad is None:  # this rank's rows did not need p
                p.grad = torch.zeros_like(p)
            dist.all_reduce(p.grad, group=group)


# --- buckets: fewer, larger messages


class Bucket:
    """One flat buffer for the gradients of several parameters: each p.grad is a view of it.
    Autograd adds in place to a p.grad that exists, so nothing is copied."""

    def __init__(self, parameters, groups, grads_per_step):
        self.group, *self.further_groups = groups  # mostly one: see groups_of
        self.grads_per_step = grads_per_step  # each backward pass adds one per parameter
        sizes = [p.numel() for p in parameters]
        self.flat = parameters[0].new_zeros(sum(sizes))
        for p, piece in zip(parameters, self.flat.split(sizes)):
            p.grad = piece.view_as(p)


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


# --- overlap: a bucket is reduced while backward goes on


class DDP:
    """Sums gradients in buckets, each as soon as backward has filled it. In sum_gradients' loop:

        sync = DDP(model.parameters(), group, microbatches=2)   # before the loop
        sync.zero_grad()            # in place of the optimizer's, which would replace p.grad
        sync.finish()               # in place of sum_gradients(...)

    microbatches  the backward passes of a step: a bucket is full after the last of them
    overlap       False: nothing is sent before finish()
    all_reduce    in place of torch's. Returns a handle with wait(), or None if the sum is complete

    A parameter without a gradient gets zeros, so weight decay moves it. After an exception all
    ranks call zero_grad(give_up=True) and start the step again."""

    def __init__(
        self, parameters, group, microbatches=1, bucket_bytes=25e6, overlap=True, all_reduce=None
    ):
        # How often each is listed. In a pipeline a tied matrix may be twice: it gets two gradients
        listed = Counter(parameters)
        trained = [p for p in listed if p.requires_grad]
        if not trained:
            raise ValueError("no parameter needs a gradient: all frozen, or an iterator used up")
        self.parameters = list(listed)
        self.microbatches, self.overlap = microbatches, overlap
        self.all_reduce = all_reduce or functools.partial(dist.all_reduce, async_op=True)

        self.buckets = []  # of parameters of one kind each
        kinds = {p: (p.dtype, p.device, groups_of(p, group)) for p in trained}
        for members in group_parameters(trained, bucket_bytes, kinds.get):
            grads_per_step = microbatches * sum(listed[p] for p in members)
            bucket = Bucket(members, groups_of(members[0], group), grads_per_step)
            for p in members:
                p.register_post_accumulate_grad_hook(functools.partial(self._arrived, bucket))
            self.buckets.append(bucket)
        self.addresses = {p: p.grad.data_ptr() for p in trained}  # for record_call
        self.works = []  # this step's all-reduces: works[i] belongs to buckets[i]
        self.last_call = None  # zero_grad() -> unfinished backward() -> backward() -> finish()
        self.zero_grad()

    def _arrived(self, bucket, p):  # autograd has added to p.grad
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
            self.works.append(self.all_reduce(bucket.flat, group=bucket.group))

    def finish(self):
        """After the last backward of a step: p.grad becomes the gradient of the whole batch."""
        record_call(self, "finish()", not_after=["finish()", "unfinished backward()"])
        self.started_in_backward = len(self.works)  # how many buckets: only reported
        self._reduce_rest()
        for bucket in self.buckets:
            for group in bucket.further_groups:  # rarely any: not overlapped
                dist.all_reduce(bucket.flat, group=group)

    def _reduce_rest(self):
        """Start what backward has not started, and wait for all."""
        self._start_buckets(only_full=False)
        for work in self.works:
            if work is not None:
                work.wait()

    def zero_grad(self, give_up=False):
        """Before the first backward of a step."""
        give_up = give_up or self.last_call == "unfinished backward()"  # an exception ended it
        record_call(self, "zero_grad()", not_after=[] if give_up else ["backward()"])
        if give_up:
            join_after_exception(self)
        self.works = []
        for bucket in self.buckets:
            bucket.flat.zero_()
            bucket.grads_left = bucket.grads_per_step  # gradients still to come in this step


# --- together with another kind of parallelism: docs/use/two-techniques.md


def groups_of(p, group):
    """The groups over which p.grad is summed, one after the other: `group` alone, unless another
    kind of parallelism has set p.placement. Its "data", the ranks with copies of p, takes the place
    of `group`. Its "partial" lists further groups: each of their ranks has a part of the sum."""
    placement = getattr(p, "placement", {})
    return (placement.get("data") or group, *placement.get("partial", ()))


# --- mistakes that would be silent: refused


def record_call(sync, call, not_after):
    """Remember this call. Refuse it out of order, or if a p.grad is no view of its bucket."""
    if sync.last_call in not_after:
        raise RuntimeError(
            f"{call} after {sync.last_call}: a step is zero_grad(), the backward passes, finish(), "
            "optimizer.step(). To give a step up, after an exception or otherwise, all ranks call "
            "zero_grad(give_up=True)."
        )
    for p in sync.parameters:
        in_bucket = p.grad is not None and p.grad.data_ptr() == sync.addresses.get(p)
        if p.requires_grad and not in_bucket:
            raise RuntimeError(
                "p.grad was replaced, and the new one would not be summed. The causes: "
                "zero_grad() of the model or the optimizer, a second DDP on the model, "
                "create_graph=True, a parameter unfrozen, a model moved or cast after DDP(...)"
            )
    sync.last_call = call


def check_gradient(sync, bucket):
    """Refuse a backward pass that may not follow the last call, and one too many."""
    if sync.last_call != "unfinished backward()":
        record_call(sync, "unfinished backward()", not_after=["finish()"])

        def ended():  # autograd calls it at the end of this backward pass, unless that raises
            sync.last_call = "backward()"

        # Private, but torch's own DDP uses it too
        torch.autograd.Variable._execution_engine.queue_callback(ended)
    if sync.overlap and bucket.grads_left == 0:
        raise RuntimeError(f"more backward passes than microbatches={sync.microbatches}")


def join_after_exception(sync):
    """Other ranks may have started more buckets in backward (with overlap=False none), and wait for
    this rank. It joins with NaN, so no rank that goes on can train on incomplete sums."""
    if sync.overlap:
        for bucket in sync.buckets[len(sync.works) :]:
            bucket.flat.fill_(torch.nan)
        sync._reduce_rest()


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
    why = "of a bucket: large ones send faster, small ones start earlier. For large models take 25"
    parser.add_argument("--bucket-mb", **harness.MEGABYTES, default=0.5, help=why)
    why = "who adds up a bucket: torch.distributed, or an algorithm of collectives.py"
    sums = ["torch", *collectives.ALGORITHMS]
    parser.add_argument("--all-reduce", choices=sums, default="torch", help=why)
    args = parser.parse_args()
    harness.configure(args)
    args.staleness = None  # of the parameter server: all workers wait for each step
    train = parameter_server.demo if args.sync == "server" else demo
    proof.launch(train, args, check=functools.partial(receipt.check, args))


def demo(run):  # run: the harness's data, receipt and checks
    args, group, sync = run.args, dist.group.WORLD, None
    run.groups(dp=group)
    model = run.fill(run.meta_model())  # the same seed everywhere: the replicas start equal
    parameters = list(model.parameters())
    optimizer = harness.make_optimizer(parameters, args)
    if args.sync == "naive":
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
        loss = run.zero()
        for tokens, targets, samples in run.microbatches(step, run.rank, run.world):
            part = model(tokens, targets=targets, target_count=run.target_count, sample_ids=samples)
            part.backward()
            loss += part.detach()
        finish()
        dist.all_reduce(loss, group=group)
        norm = harness.grad_norm(parameters)
        run.check(loss, norm, model.named)
        harness.clip(parameters, norm, args.grad_clip)
        optimizer.step()
        run.log(loss, norm)
    return run.receipt(*receipt.of_demo(run, sync))


if __name__ == "__main__":
    harness.script(main)
