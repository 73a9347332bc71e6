"""Data parallelism: every rank holds the whole model and a part of the batch; gradients are summed
over the ranks.

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

The gradient buffers *are* the buckets: `p.grad` is a view of its bucket, and autograd adds in place
to a gradient that is there, so nothing is copied in or out. With gradient accumulation a bucket
starts only when the last micro-batch's gradients are in: one synchronisation a step.

Backward: it is the model's own, and only its results are added up. The loss is a sum over tokens
divided by the *global* number of tokens, so the gradients of the parts simply add up: nothing is
averaged, and unequal parts are right. (PyTorch's DDP averages over the ranks, which is right if all
parts have as many tokens.)

What it costs, per rank and step, P parameters of e bytes, r = (N-1)/N: an all-reduce by a ring
sends 2 r P e, whatever the number of buckets; each message also costs its latency, so few large
ones win. The server alone sends (N-1) P e and receives as
much: it is the bottleneck. Held: parameters, gradients and AdamW's two moments, 4 P e, on every
rank (the moments on the server only, in that way), and the activations of the rank's own rows.
Backward, 4 flops a weight and token at f flop/s, hides the all-reduce at w bytes/s if a rank has
more than r e f / (2 w) tokens: 8,000 for 2 bytes, 400 TFLOP/s and 50 GB/s.

When it is the wrong choice: where 4 P e and the activations don't fit (zero.py is the next step),
and where so many ranks share the batch that backward is over before the gradients are through.

    torchrun --nproc_per_node=4 ddp.py            python ddp.py --sync naive --optimizer sgd --microbatches 4

Papers: Li et al. 2020, PyTorch Distributed, arXiv:2006.15704, section 3.2 (buckets, overlap); Li et
al. 2014, Scaling distributed machine learning with the parameter server, section 3; Patarasuk and
Yuan 2009 (the ring).
"""

from collections import Counter

import torch
import torch.distributed as dist


def trained_and_frozen(parameters):
    """Two lists: the parameters that need a gradient, and the others.

    Raises ValueError if something else than parameters is given, or if none needs a gradient."""
    if isinstance(parameters, torch.nn.Module) and not isinstance(
        parameters, torch.nn.ParameterList
    ):
        raise ValueError(
            f"give model.parameters() instead of the model, a {type(parameters).__name__}"
        )
    parameters = list(parameters)
    for p in parameters:
        if not isinstance(p, torch.Tensor) or not p.is_leaf:
            kind = "computed tensor" if isinstance(p, torch.Tensor) else type(p).__name__
            raise ValueError(
                f"give model.parameters(): there is a {kind} where a parameter should be"
            )
    trained = [p for p in parameters if p.requires_grad]
    if not trained:
        raise ValueError(
            "no parameter needs a gradient: all are frozen, or parameters() was used up before"
        )
    return trained, [p for p in parameters if not p.requires_grad]


REPLACED = """p.grad was replaced and is not summed over the ranks. The causes: \
zero_grad() of the model or the optimizer (call this object's), a second DDP on the model, \
create_graph=True, a model moved or cast after DDP(...)"""


class Bucket:
    """A flat buffer for the gradients of some parameters: `p.grad` becomes a view of it."""

    def __init__(self, parameters):
        self.parameters = parameters
        first = parameters[0]
        if any((p.dtype, p.device) != (first.dtype, first.device) for p in parameters):
            raise ValueError(
                "parameters that share a buffer must be of one dtype and on one device"
            )
        placement = getattr(first, "placement", {})
        self.partial, self.data = placement.get("partial", []), placement.get("data")
        self.flat = torch.zeros(
            sum(p.numel() for p in parameters), dtype=first.dtype, device=first.device
        )
        for p, piece in zip(parameters, self.flat.split([p.numel() for p in parameters])):
            p.grad = piece.view_as(p)
        self.missing = 0  # gradients still to come before the bucket is full

    def check(self, p):
        """Raise RuntimeError where p.grad is no view of this bucket: it would not be reduced."""
        if p.grad is None or p.grad._base is not self.flat:
            raise RuntimeError(REPLACED)

    def check_storages(self):
        """The same for all parameters. model.double() only swaps the storage under p.grad."""
        storage = self.flat.untyped_storage()._cdata
        for p in self.parameters:
            if p.grad is None or p.grad.untyped_storage()._cdata != storage:
                raise RuntimeError(REPLACED)


class Step:
    """The order of a step: zero_grad(), backward passes, finish(). DDP and its rivals share it.

    A step whose backward passes all came must be finished, also one that you skip: otherwise
    zero_grad() raises RuntimeError, because the optimizer has probably stepped with gradients that
    were never summed. A step that an exception broke off before that starts again with zero_grad().

    finish() raises RuntimeError the second time, after a backward pass that broke off, after
    optimizer.step() (a fused optimizer's is not noticed), and if a parameter was unfrozen.
    """

    def __init__(self, buckets, frozen, microbatches):
        self.buckets, self.frozen, self.microbatches = buckets, frozen, microbatches
        self.finished = True
        self._begin()
        for bucket in buckets:
            for p in bucket.parameters:
                p.register_post_accumulate_grad_hook(
                    lambda p, bucket=bucket: self._arrived(bucket, p)
                )

    def _arrived(self, bucket, p):
        """Called with every gradient."""
        if not self.in_backward:
            self._backward_began()

    def _check_summed(self):
        if not self.finished and not self.in_backward and self.passes >= self.microbatches:
            raise RuntimeError(
                "the last step's gradients were never summed: call finish() after the backward passes of every step, also of "
                "one that you skip"
            )

    def _begin(self):
        """Zero the gradients, in place: None would tear them out of their buckets."""
        for bucket in self.buckets:
            bucket.flat.zero_()
        self.finished = False
        self.passes, self.in_backward = 0, False
        self.versions = None  # of the weights, at the first gradient

    def _backward_began(self):
        if self.finished:
            raise RuntimeError(
                f"a gradient came after finish(): more backward passes than the {self.microbatches} that "
                f"{type(self).__name__} was told of, or no zero_grad() before them"
            )
        self.in_backward = True
        torch.autograd.Variable._execution_engine.queue_callback(self._backward_ended)
        if self.versions is None:
            self.versions = self._weight_versions()

    def _backward_ended(self):  # not called if backward raises
        self.in_backward = False
        self.passes += 1

    def _weight_versions(self):
        return [p._version for bucket in self.buckets for p in bucket.parameters]

    def _end(self):
        """Raise RuntimeError where summing now would be wrong."""
        if self.finished:
            raise RuntimeError("finish() a second time would sum the sums: call zero_grad() first")
        if self.in_backward:
            raise RuntimeError(
                "a backward pass broke off: start the step again with zero_grad(), on every rank"
            )
        if self.versions not in (None, self._weight_versions()):
            raise RuntimeError(
                "the weights changed before finish(): call optimizer.step() after it"
            )
        if any(p.requires_grad for p in self.frozen):
            raise RuntimeError(
                "a parameter was unfrozen and its gradient is not summed: give it unfrozen, and freeze it afterwards"
            )
        for bucket in self.buckets:
            bucket.check_storages()
        self.finished = True


def make_buckets(parameters, bucket_bytes):
    """Fill buckets of at most `bucket_bytes` (a larger parameter gets its own) from the last
    parameter to the first, the order in which backward produces gradients. The parameters of a
    bucket are of one dtype, on one device, partial over the same groups, and of the same
    data-parallel group."""
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


class DDP(Step):
    """Sums the gradients of `parameters` over `group`, in buckets.

        for p in model.parameters():
            dist.broadcast(p.data, group=group, group_src=0)     # the replicas start equal
        ddp = DDP(model.parameters(), group, microbatches=2)
        for step in ...:
            ddp.zero_grad()                                      # not the model's or optimizer's
            for x, y in this rank's 2 micro-batches:             # tokens: of the global batch
                loss = cross_entropy(model(x), y, reduction="sum") / tokens
                loss.backward()
            ddp.finish()                                         # p.grad is the global gradient
            optimizer.step()                                     # clip between these two

    Nobody checks that the replicas start equal. They stay equal because they take equal steps.
    `microbatches` is the number of backward passes a step. With `overlap` a bucket is reduced as
    soon as it is full, else all of them in finish(). `all_reduce(tensor, group=..., async_op=True)`
    returns a work handle; any implementation will do. After finish(), `early` is the number of
    buckets whose all-reduce had started before backward was over.

    A parameter without a gradient gets zeros, not None, so weight decay moves it. Buffers
    (BatchNorm's statistics) are not synchronised. Parameters that are added or replaced after
    DDP(...) are not seen (load_state_dict(assign=True), a new head): complete the model first.
    Gradients that autograd.grad returns are not seen either.

    Raises ValueError for anything but parameters, and if none needs a gradient. Raises RuntimeError
    for more backward passes than `microbatches`, where something else has replaced p.grad, and for
    a step in the wrong order (see Step).

    All ranks together should give up a step that an exception broke off: each calls zero_grad() and
    starts again. If one rank alone starts again, the others wait for it in finish(). But if some of
    its all-reduces had already started, the others find NaN in the rest: they must give up too.

    Beside other kinds of parallelism (to be skipped at first): a parameter that gets its gradient
    in two passes each (a pipeline rank's two stages share it) is listed twice. One may be partial
    over further groups (`parameter.placement`, as tensor_parallel.shard writes it; a matrix tied
    across pipeline stages): finish() sums its gradient over them too. `placement["data"]` is
    another group than `group` that holds copies of it (an expert, of which there are fewer).
    """

    def __init__(
        self,
        parameters,
        group,
        microbatches=1,
        bucket_bytes=25 << 20,
        overlap=True,
        all_reduce=dist.all_reduce,
    ):
        self.group, self.overlap, self.all_reduce = group, overlap, all_reduce
        trained, frozen = trained_and_frozen(parameters)
        uses = Counter(trained)
        self.early, self.next, self.works = 0, 0, []
        buckets = make_buckets(uses, bucket_bytes)
        self.due = [microbatches * sum(uses[p] for p in bucket.parameters) for bucket in buckets]
        super().__init__(buckets, frozen, microbatches)

    def zero_grad(self):
        """Start a step. If one was given up with all-reduces on their way, join them all first."""
        self._check_summed()
        if self.works:
            # Other ranks may have started more of them, or fewer. NaN: these gradients are
            # incomplete
            for bucket in self.buckets[self.next :]:
                bucket.flat.fill_(float("nan"))
            self._join()
        self._begin()

    def _begin(self):
        super()._begin()
        self.next = 0
        for bucket, due in zip(self.buckets, self.due):
            bucket.missing = due

    def _arrived(self, bucket, p):
        if not self.in_backward:
            self._backward_began()
        bucket.check(p)
        bucket.missing -= 1
        if bucket.missing < 0:
            raise RuntimeError(
                f"more backward passes than the {self.microbatches} that DDP was told of"
            )
        if self.overlap:
            self._start_full_buckets()

    def _start_full_buckets(self, rest=False):
        # In the same order on every rank: all-reduces swapped between ranks would add up the wrong
        # buckets, silently. So one that is full early waits for those before it
        while self.next < len(self.buckets) and (rest or self.buckets[self.next].missing == 0):
            bucket = self.buckets[self.next]
            self.works.append(
                self.all_reduce(bucket.flat, group=bucket.data or self.group, async_op=True)
            )
            self.next += 1

    def _join(self):
        """Start the all-reduces that have not started, and wait for all."""
        self._start_full_buckets(rest=True)
        for work in self.works:
            work.wait()
        self.works = []

    def finish(self):
        """Reduce the buckets that are not on their way (all of them without overlap; with it those
        that never filled, since a parameter may get no gradient), and wait for all."""
        self._end()
        self.early = self.next
        self._join()
        for bucket in self.buckets:
            for group in bucket.partial:
                dist.all_reduce(bucket.flat, group=group)


class Naive(Step):
    """One blocking all-reduce per parameter after backward: what DDP improves on.

    Its use, what it does not see, and its refusals are DDP's. It takes any number of backward
    passes: `microbatches` only tells a forgotten finish() from a step given up between two passes.
    It does not read `parameter.placement`: beside other kinds of parallelism take DDP.
    """

    def __init__(self, parameters, group, microbatches=1):
        self.group = group
        trained, frozen = trained_and_frozen(parameters)
        super().__init__([Bucket([p]) for p in dict.fromkeys(trained)], frozen, microbatches)

    def zero_grad(self):
        self._check_summed()
        self._begin()

    def finish(self):
        self._end()
        for bucket in self.buckets:
            dist.all_reduce(bucket.flat, group=self.group)


class ParameterServer(Step):
    """Rank 0 of `group` is the server (and a worker too): it alone has the global gradient and
    takes the step.

        server = ParameterServer(model.parameters(), group)     # the replicas may start different
        for step in ...:
            server.zero_grad()                                  # the server's weights, on every rank
            for x, y in this rank's micro-batches:              # tokens: of all ranks and micro-batches
                loss = cross_entropy(model(x), y, reduction="sum") / tokens
                loss.backward()
            server.finish()                                     # now p.grad is the global gradient, on rank 0
            if dist.get_rank(group) == 0:
                optimizer.step()

    zero_grad() also pulls: every worker receives the server's weights. finish() pushes: the server
    receives every worker's gradient and adds them up in the order of the ranks. Weights and
    gradients each travel as one flat buffer, so all parameters are of one dtype, on one device.
    Between steps the workers' weights are old: pull() before you use them. The rest is as in Naive,
    but if one rank alone gives up a step, all wait until the group's timeout.
    """

    def __init__(self, parameters, group, microbatches=1):
        self.group, self.rank, self.size = group, dist.get_rank(group), dist.get_world_size(group)
        trained, frozen = trained_and_frozen(parameters)
        parameters = list(dict.fromkeys(trained))
        self.bucket = Bucket(parameters)
        self.gradients = self.bucket.flat
        self.weights = torch.cat([p.detach().flatten() for p in parameters])
        for p, piece in zip(parameters, self.weights.split([p.numel() for p in parameters])):
            p.data = piece.view_as(p)
        self.received = torch.empty_like(self.gradients) if self.rank == 0 else None
        super().__init__([self.bucket], frozen, microbatches)

    def pull(self):
        """The server's weights to every worker."""
        storage = self.weights.untyped_storage()._cdata
        if any(p.untyped_storage()._cdata != storage for p in self.bucket.parameters):
            raise RuntimeError(
                "p.data was replaced: move or cast the model before ParameterServer(...), and fill it in place"
            )
        if self.rank == 0:
            works = [
                dist.isend(self.weights, group=self.group, group_dst=r) for r in range(1, self.size)
            ]
            for work in works:
                work.wait()
        else:
            dist.recv(self.weights, group=self.group, group_src=0)

    def zero_grad(self):
        self._check_summed()
        self.pull()
        self._begin()

    def finish(self):
        """Every worker's gradient to the server."""
        self._end()
        if self.rank == 0:
            for r in range(1, self.size):
                dist.recv(self.received, group=self.group, group_src=r)
                self.gradients += self.received
        else:
            dist.send(self.gradients, group=self.group, group_dst=0)


# --- demo ---

import collectives
import harness
from harness import network


def main():
    parser = harness.parser(__doc__)
    why = "how gradients are added up, as above: the first three show what overlapped gains"
    parser.add_argument(
        "--sync",
        choices=["server", "naive", "bucketed", "overlapped"],
        default="overlapped",
        help=why,
    )
    why = "of a bucket: large ones send faster, small ones start earlier. The model is small; for large ones take 25"
    parser.add_argument("--bucket-mb", type=harness.real(0), default=0.5, metavar="MB", help=why)
    why = "who adds up a bucket: torch.distributed, or one of collectives.py's algorithms (bucketed and overlapped only)"
    parser.add_argument(
        "--all-reduce", choices=["torch", *collectives.ALL_REDUCE], default="torch", help=why
    )
    args = parser.parse_args()
    if args.all_reduce != "torch" and args.sync in ("server", "naive"):
        raise harness.Refused(
            f"--all-reduce {args.all_reduce} needs buckets: use --sync bucketed or overlapped"
        )
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
            # Count: the global batch's tokens
            part = model(tokens, targets=targets, count=run.count, samples=samples)
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
        sent = {
            ("send", "dp"): ((n - 1) * size if run.rank == 0 else size, "(N-1) P e, the server")
        }
    elif args.all_reduce == "torch":
        sent = {
            ("all_reduce", "dp"): (
                harness.formulas.all_reduce_sent(size + 8, n),
                "2 r P e, and the loss, 8 bytes",
            )
        }
    activations = c.layers * harness.activation_bytes(
        c, args.batch // n // args.microbatches, run.dtype.itemsize
    )
    held = run.states(size, "P e", leader)
    held["activations_peak"] = activations, "norms', heads' and hidden values of the blocks"
    notes = []
    if args.all_reduce != "torch":
        sent = {("all_reduce", "dp"): (harness.formulas.all_reduce_sent(8, n), "the loss, 8 bytes")}
        cost = network.formulas(n, size)[args.all_reduce]
        notes = [
            f"by its formula, the rank that sends most in a {args.all_reduce} all-reduce sends {cost.sent:,.0f} bytes"
        ]
    if args.sync == "overlapped":
        notes += [
            f"{sync.early} of {len(sync.buckets)} buckets were on their way before backward was over"
        ]
    return run.receipt({"dp": n, "sync": args.sync}, sent, held, notes)


if __name__ == "__main__":
    harness.script(main)
