"""Data parallelism: every rank holds the whole model and a part of the batch; gradients are summed over the ranks.

What is split: the batch. Rank i of N computes the gradient of its B/N samples.

    rank 0   batch rows 0..3     forward  backward --+
    rank 1   batch rows 4..7     forward  backward --+-- sum of gradients -> the same step on every rank
    rank 2   batch rows 8..11    forward  backward --+

What is sent: the gradient of every parameter, once a step. Four ways to add them up, `--sync`:

    server       rank 0 keeps the weights and the optimizer; workers pull weights, compute, push gradients (Li et al. 2014)
    naive        one all-reduce per parameter, after backward
    bucketed     one all-reduce per bucket of parameters, after backward: fewer, larger messages
    overlapped   buckets fill in the order in which backward produces gradients, the last layers first; the all-reduce of a
                 full bucket runs while backward goes on (Li et al. 2020)

The gradient buffers *are* the buckets: `p.grad` is a view of its bucket, and autograd adds in place to a gradient that is
there, so nothing is copied in or out. With gradient accumulation a bucket starts only when the last micro-batch's gradients
are in: one synchronisation a step.

Backward: it is the model's own, and only its results are added up. The loss is a sum over tokens divided by the *global* number
of tokens, so the gradients of the parts simply add up: nothing is averaged, and unequal parts are right. (PyTorch's DDP
averages over the ranks, which is right if all parts have as many tokens.)

What it costs, per rank and step, P parameters of e bytes, r = (N-1)/N: an all-reduce by a ring sends 2 r P e, whatever the
number of buckets; each message also costs its latency, so few large ones win. The server alone sends (N-1) P e and receives as
much: it is the bottleneck. Held: parameters, gradients and AdamW's two moments, 4 P e, on every rank (the moments on the server
only, in that way), and the activations of the rank's own rows. Backward, 4 flops a weight and token at f flop/s, hides the
all-reduce at w bytes/s if a rank has more than r e f / (2 w) tokens: 8,000 for 2 bytes, 400 TFLOP/s and 50 GB/s.

When it is the wrong choice: where 4 P e and the activations don't fit (zero.py is the next step), and where so many ranks share
the batch that backward is over before the gradients are through.

    torchrun --nproc_per_node=4 ddp.py            python ddp.py --sync naive --optimizer sgd --microbatches 4

Papers: Li et al. 2020, PyTorch Distributed, arXiv:2006.15704, section 3.2 (buckets, overlap); Li et al. 2014, Scaling
distributed machine learning with the parameter server, section 3; Patarasuk and Yuan 2009 (the ring).
"""

from collections import Counter

import torch
import torch.distributed as dist


class Bucket:
    """A flat buffer for the gradients of some parameters: `p.grad` becomes a view of it."""

    def __init__(self, parameters):
        self.parameters = parameters
        first = parameters[0]
        placement = getattr(first, "placement", {})
        self.partial, self.data = placement.get("partial", []), placement.get("data")
        self.flat = torch.zeros(sum(p.numel() for p in parameters), dtype=first.dtype, device=first.device)
        for p, piece in zip(parameters, self.flat.split([p.numel() for p in parameters])):
            p.grad = piece.view_as(p)
        self.missing = 0  # gradients still to come before the bucket is full

    def check(self, p):
        """Raise RuntimeError where p.grad is no longer a view of this bucket: its gradient would not be reduced."""
        if p.grad is None or p.grad._base is not self.flat:
            raise RuntimeError("p.grad was replaced: call zero_grad() of this class, not the model's or the optimizer's")


def make_buckets(parameters, bucket_bytes):
    """Fill buckets of at most `bucket_bytes` (a larger parameter gets its own) from the last parameter to the first, the
    order in which backward produces gradients. The parameters of a bucket are of one dtype, on one device, partial over the
    same groups, and of the same data-parallel group."""
    lists, latest, size = [], {}, {}
    for p in reversed([p for p in parameters if p.requires_grad]):
        placement = getattr(p, "placement", {})
        kind = p.dtype, p.device, id(placement.get("data")), *map(id, placement.get("partial", []))
        here = p.numel() * p.element_size()
        if kind not in latest or size[kind] + here > bucket_bytes:
            latest[kind], size[kind] = [], 0
            lists.append(latest[kind])
        latest[kind].append(p)
        size[kind] += here
    return [Bucket(parameters) for parameters in lists]


class DDP:
    """Sums the gradients of `parameters` over `group`, in buckets.

        ddp = DDP(model.parameters(), group, microbatches=2)
        for step in ...:
            ddp.zero_grad()
            for each of the 2 micro-batches: loss.backward()
            ddp.finish()                                       # now p.grad is the global gradient, on every rank
            optimizer.step()

    The replicas must start equal; they stay equal because they take equal steps. `microbatches` is the number of backward
    passes a step. With `overlap` a bucket is reduced as soon as it is full, else all of them in finish().
    `all_reduce(tensor, group=..., async_op=True)` returns a work handle; any implementation will do.
    After finish(), `early` is the number of buckets whose all-reduce had started before backward was over.
    Raises RuntimeError for more backward passes than `microbatches`, and where something else has replaced p.grad.

    Beside other kinds of parallelism (to be skipped at first): a parameter that gets its gradient in two passes each (a
    pipeline rank's two stages share it) is listed twice. One may be partial over further groups (`parameter.placement`, as
    tensor_parallel.shard writes it; a matrix tied across pipeline stages): finish() sums its gradient over them too.
    `placement["data"]` is another group than `group` that holds copies of it (an expert, of which there are fewer).
    """

    def __init__(self, parameters, group, microbatches=1, bucket_bytes=25 << 20, overlap=True, all_reduce=dist.all_reduce):
        self.group, self.microbatches, self.overlap, self.all_reduce = group, microbatches, overlap, all_reduce
        parameters = list(parameters)
        self.uses = Counter(parameters)
        self.buckets = make_buckets(dict.fromkeys(parameters), bucket_bytes)
        self.early, self.next, self.works = 0, 0, []
        for bucket in self.buckets:
            for p in bucket.parameters:
                p.register_post_accumulate_grad_hook(lambda p, bucket=bucket: self._arrived(bucket, p))
        self.zero_grad()

    def zero_grad(self):
        """Start a step: gradients to zero, in place (setting them to None would tear them out of their buckets)."""
        self.next, self.works = 0, []
        for bucket in self.buckets:
            bucket.flat.zero_()
            bucket.missing = sum(self.uses[p] for p in bucket.parameters) * self.microbatches

    def _arrived(self, bucket, p):
        bucket.check(p)
        bucket.missing -= 1
        if bucket.missing < 0:
            raise RuntimeError(f"more backward passes than the {self.microbatches} that DDP was told of")
        if self.overlap:
            self._start_full_buckets()

    def _start_full_buckets(self, rest=False):
        # In the same order on every rank: all-reduces swapped between ranks would add up the wrong buckets, silently. So one
        # that is full early waits for those before it
        while self.next < len(self.buckets) and (rest or self.buckets[self.next].missing == 0):
            bucket = self.buckets[self.next]
            self.works.append(self.all_reduce(bucket.flat, group=bucket.data or self.group, async_op=True))
            self.next += 1

    def finish(self):
        """Reduce the buckets that are not on their way (all of them without overlap; with it those that never filled, since a
        parameter may get no gradient), and wait for all."""
        self.early = self.next
        self._start_full_buckets(rest=True)
        for work in self.works:
            work.wait()
        for bucket in self.buckets:
            for group in bucket.partial:
                dist.all_reduce(bucket.flat, group=group)


class Naive:
    """One blocking all-reduce per parameter after backward: what DDP improves on. Same use as DDP."""

    def __init__(self, parameters, group):
        self.parameters, self.group = [p for p in parameters if p.requires_grad], group
        for p in self.parameters:
            p.grad = torch.zeros_like(p)

    def zero_grad(self):
        for p in self.parameters:
            p.grad.zero_()

    def finish(self):
        for p in self.parameters:
            dist.all_reduce(p.grad, group=self.group)


class ParameterServer:
    """Rank 0 of `group` is the server (and a worker too): it alone has the global gradient and takes the step.

    zero_grad() also pulls: every worker receives the server's weights. finish() pushes: the server receives every worker's
    gradient and adds them up in the order of the ranks. Weights and gradients each travel as one flat buffer.
    Between steps the workers' weights are old: pull() before you use them.
    """

    def __init__(self, parameters, group):
        self.group, self.rank, self.size = group, dist.get_rank(group), dist.get_world_size(group)
        parameters = [p for p in parameters if p.requires_grad]
        self.bucket = Bucket(parameters)
        self.gradients = self.bucket.flat
        self.weights = torch.cat([p.detach().flatten() for p in parameters])
        for p, piece in zip(parameters, self.weights.split([p.numel() for p in parameters])):
            p.data = piece.view_as(p)
        self.received = torch.empty_like(self.gradients) if self.rank == 0 else None

    def pull(self):
        """The server's weights to every worker."""
        if self.rank == 0:
            works = [dist.isend(self.weights, group=self.group, group_dst=r) for r in range(1, self.size)]
            for work in works:
                work.wait()
        else:
            dist.recv(self.weights, group=self.group, group_src=0)

    def zero_grad(self):
        self.pull()
        self.gradients.zero_()

    def finish(self):
        """Every worker's gradient to the server."""
        for p in self.bucket.parameters:
            self.bucket.check(p)
        if self.rank == 0:
            for r in range(1, self.size):
                dist.recv(self.received, group=self.group, group_src=r)
                self.gradients += self.received
        else:
            dist.send(self.gradients, group=self.group, group_dst=0)


def bytes_sent(size, n):
    """Bytes that each of n ranks sends in a ring all-reduce of `size` bytes: reduce-scatter, then all-gather."""
    return 2 * (n - 1) / n * size


# --- demo ---

import collectives
import harness


def main():
    parser = harness.parser(__doc__)
    why = "how gradients are added up, as above: the first three show what overlapped gains"
    parser.add_argument("--sync", choices=["server", "naive", "bucketed", "overlapped"], default="overlapped", help=why)
    why = "of a bucket: large ones send faster, small ones start earlier. The model is small; for large ones take 25"
    parser.add_argument("--bucket-mb", type=harness.real(0), default=0.5, metavar="MB", help=why)
    why = "who adds up a bucket: torch.distributed, or one of collectives.py's algorithms (bucketed and overlapped only)"
    parser.add_argument("--all-reduce", choices=["torch", *collectives.ALL_REDUCE], default="torch", help=why)
    args = parser.parse_args()
    if args.all_reduce != "torch" and args.sync in ("server", "naive"):
        raise harness.Refused(f"--all-reduce {args.all_reduce} needs buckets: use --sync bucketed or overlapped")
    harness.configure(args)
    harness.launch(demo, args, check=lambda world: harness.check_batch(args, world))


def demo(run):
    args, group = run.args, dist.group.WORLD
    run.groups(dp=group)
    model = run.fill(run.meta_model())  # the same seed everywhere: the replicas start equal
    parameters = list(model.parameters())
    if args.sync == "server":
        sync = ParameterServer(parameters, group)
    elif args.sync == "naive":
        sync = Naive(parameters, group)
    else:
        overlap, size = args.sync == "overlapped", int(args.bucket_mb * 2**20)
        all_reduce = collectives.ALL_REDUCE.get(args.all_reduce, dist.all_reduce)
        sync = DDP(parameters, group, args.microbatches, size, overlap, all_reduce)
    leader = args.sync != "server" or run.rank == 0
    optimizer = harness.make_optimizer(parameters, args)
    for step in run.steps(optimizer):
        sync.zero_grad()
        loss = run.zero()
        for tokens, targets, samples in run.microbatches(step, run.rank, run.world):
            part = model(tokens, targets=targets, count=run.count, samples=samples)  # count: the global batch's tokens
            part.backward()
            loss += part.detach()
        sync.finish()
        dist.all_reduce(loss, group=group)
        norm = harness.grad_norm(parameters)
        run.check(loss, norm, model.named, leader)
        if leader:
            harness.clip(parameters, norm, args.grad_clip)
            optimizer.step()
        run.log(loss, norm)

    n, c, size = run.world, run.config, sum(p.numel() * p.element_size() for p in parameters)
    if args.sync == "server":
        sent = {("send", "dp"): ((n - 1) * size if run.rank == 0 else size, "(N-1) P e, the server")}
    elif args.all_reduce == "torch":
        sent = {("all_reduce", "dp"): (bytes_sent(size + 8, n), "2 r P e, and the loss, 8 bytes")}
    activations = c.layers * harness.activation_bytes(c, args.batch // n // args.microbatches, run.dtype.itemsize)
    held = run.states(size, "P e", leader)
    held["activations_peak"] = activations, "norms', heads' and hidden values of the blocks"
    notes = []
    if args.all_reduce != "torch":
        sent = {("all_reduce", "dp"): (bytes_sent(8, n), "the loss, 8 bytes")}
        cost = collectives.formulas(n, size)[args.all_reduce]
        notes = [f"by its formula, the rank that sends most in a {args.all_reduce} all-reduce sends {cost.sent:,.0f} bytes"]
    if args.sync == "overlapped":
        notes += [f"{sync.early} of {len(sync.buckets)} buckets were on their way before backward was over"]
    return run.receipt({"dp": n, "sync": args.sync}, sent, held, notes)


if __name__ == "__main__":
    harness.script(main)
