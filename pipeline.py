"""Pipeline parallelism: each rank holds some consecutive layers, micro-batches flow through them.

    1F1B on 4 ranks with 8 micro-batches. A row is a rank, and time goes right. A digit is that
    micro-batch's forward, [digit] its backward, twice as long. A dot is a wait.

        0 1 2 3 . . . . . .[0 ] 4[1 ] 5[2 ] 6[3 ] 7[4 ] .[5 ] .[6 ] .[7 ]
        . 0 1 2 . . . .[0 ] 3[1 ] 4[2 ] 5[3 ] 6[4 ] 7[5 ] .[6 ] .[7 ] . .
        . . 0 1 . .[0 ] 2[1 ] 3[2 ] 4[3 ] 5[4 ] 6[5 ] 7[6 ] .[7 ] . . . .
        . . . 0[0 ] 1[1 ] 2[2 ] 3[3 ] 4[4 ] 5[5 ] 6[6 ] 7[7 ] . . . . . .

The layers are cut into p stages for p ranks, the batch into m micro-batches. A schedule lists each
rank's actions, in order. `play` plays any schedule.

Sent: each forward's result to the next stage, each backward's gradient to the stage before. That is
b T C e bytes a micro-batch, boundary and direction: b sequences of T tokens, width C, e bytes an
element. It is little, so pipelines suit the slowest links.

The backward is the chain rule, cut at the boundaries. A stage's input x is a leaf of its own graph.
So y.backward(gradient of y, from the next stage) leaves the gradient of x in x.grad, and that goes
to the stage before. Gradients of micro-batches add up to those of the batch.

Not worth it for few micro-batches: ranks wait at both ends of a step (the bubble). With 1F1B they
work m / (m + p - 1) of the time, 24 cells of 33 above. docs/pipelines.md has the other schedules,
and the mistakes that `play` can't see.

    torchrun --nproc_per_node=4 pipeline.py --layers 8 --schedule zb-v
    python pipeline.py --compare                    # all schedules beside their formulas

GPipe arXiv:1811.06965; 1F1B arXiv:2006.09503; interleaved arXiv:2104.04473; zero bubble
arXiv:2401.10241; ZB-V arXiv:2405.15362; DualPipe arXiv:2412.19437, section 3.2.1.
"""

import collections
import contextlib
import functools
import itertools
import weakref
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

# --- a schedule: for each rank the list of its actions


class Action(NamedTuple):
    """One micro-batch on one stage. Kind "F" is forward, "B" backward. Or backward in two parts:
    first "I", the gradients of the stage's input and all but matrices, then "W", of matrices."""

    kind: str
    microbatch: int
    stage: int


class Row(list):
    """A rank's actions. add("FFB", stage) appends the stage's next two forwards and next backward:
    each stage takes its micro-batches in order."""

    def __init__(self, kinds="", *stages):
        super().__init__()
        self.counts = collections.Counter()  # {(kind, stage): how many}
        self.add(kinds, *stages)

    def add(self, kinds, *stages):
        for stage in stages:
            for kind in kinds:
                parts = "IW" if kind == "B" else kind
                self.append(Action(kind, self.counts[parts[0], stage], stage))
                for part in parts:
                    self.counts[part, stage] += 1


def naive(rank, ranks, microbatches):
    """One micro-batch at a time through all stages and back: F0 B0 F1 B1 F2 B2. Rank r runs
    stage r."""
    return Row("FB" * microbatches, rank)


def gpipe(rank, ranks, microbatches):
    """All forwards, then all backwards: F0 F1 F2 B0 B1 B2."""
    return Row("F" * microbatches + "B" * microbatches, rank)


def one_f_one_b(rank, ranks, microbatches):
    """A few forwards ahead, then one forward and one backward in turn. Rank r holds activations of
    at most p - r micro-batches. With gpipe it holds those of all m.

        rank 0 of 3:  F0 F1 F2 B0 F3 B1 F4 B2 B3 B4
        rank 1 of 3:  F0 F1 B0 F2 B1 F3 B2 F4 B3 B4
        rank 2 of 3:  F0 B0 F1 B1 F2 B2 F3 B3 F4 B4
    """
    ahead = min(ranks - 1 - rank, microbatches)
    return Row("F" * ahead + "FB" * (microbatches - ahead) + "B" * ahead, rank)


# --- the executor: Passes computes, Mailbox sends and receives, a Schedule says in which order


def play(schedule, forward, shape, dtype, device, links, around=contextlib.nullcontext):
    """Play this rank's row of a schedule. Gradients add up in the parameters' .grad.

        schedule, links = make("1f1b", ranks, microbatches), make_links()    # on all ranks, once
        open_links(schedule, links, device)                                  # or nccl hangs
        stages = {s: build_stage(s).to(device) for s in schedule.stages(rank)}    # your modules
        parameters = [p for stage in stages.values() for p in stage.parameters()]
        optimizer = torch.optim.AdamW(parameters)

        def forward(s, m, x):                # stage, micro-batch, result of the stage before
            y = stages[s](inputs[m] if x is None else x)     # x is None on stage 0
            if s < schedule.last:
                return y                                     # (b, T, C); below logits (b, T, V)
            return F.cross_entropy(y.mT, targets[m], reduction="sum") / count

        for i, (inputs, targets, count) in enumerate(batches):    # lists of (b, T); all tokens
            if i == 0:
                warm_up(schedule, forward, (b, T, C), dtype, device, links)     # or nccl hangs
            optimizer.zero_grad()
            losses = play(schedule, forward, (b, T, C), dtype, device, links)
            reduce_tied(parameters)                 # for a matrix on two ranks
            optimizer.step()

    The loss rule: the sum over a micro-batch's tokens, divided by count, the tokens of the whole
    batch (all micro-batches, all data-parallel ranks). A mean in each micro-batch is wrong.

    shape, dtype: of the activations between stages, the same for every micro-batch and rank.
    around(action): a context around the work of each action, without its messages.
    Returns the last stage's results, detached, on its rank, and [] on the others.
    """
    rank = check_links(schedule, links)
    row = schedule[rank]
    passes = Passes(forward, row, schedule.last)
    mailbox = Mailbox(schedule, rank, shape, dtype, device, links)
    results = []

    for action in row:
        received = mailbox.receive(action)  # None on stage 0, and for the backward of the loss
        with around(action):
            result = passes.run(action, received)
        mailbox.send(action, result)
        if action.kind == "F" and action.stage == schedule.last:
            results.append(result)
        del received, result  # nothing of a finished micro-batch stays while this rank waits
    mailbox.close()
    return results


class Passes:
    """The forward and backward passes of a rank's stages."""

    def __init__(self, forward, row, last):
        self.function, self.last = forward, last
        self.alive = {}  # {(micro-batch, stage): input and output, from forward to backward}
        self.deferred = {action[1:]: Deferred() for action in row if action.kind == "W"}
        self.trains = any(action.kind != "F" for action in row)
        if self.trains and not torch.is_grad_enabled():
            raise ValueError("gradients are off: play forward_only(schedule), or turn them on")

    def run(self, action, received):
        """From the message that an action waits for to the message that it sends."""
        kind, m, stage = action
        if kind == "W":
            return self.deferred.pop((m, stage)).accumulate()
        if kind == "I" and self.deferred[m, stage].entries:
            reason = f"stage {stage}'s forward runs a backward pass of its own (autograd.grad?)"
            raise RuntimeError(f"{reason}: a split backward would count it too, use 1f1b")
        work = self.forward if kind == "F" else self.backward
        # Where a W follows, the gradients of matrices are put off: see Deferred
        with self.deferred.get((m, stage), contextlib.nullcontext()):
            return work(m, stage, received)

    def forward(self, m, stage, x):
        if x is not None and torch.is_grad_enabled():
            x.requires_grad_()  # a leaf: backward leaves its gradient in x.grad
        y = self.function(stage, m, x)
        if stage == self.last and self.trains and y.numel() != 1:
            raise ValueError(f"the last stage returned {list(y.shape)}, not one number, its loss")
        if self.trains and y.requires_grad:
            self.alive[m, stage] = x, y
        return y.detach()

    def backward(self, m, stage, gradient):
        x, y = self.alive.pop((m, stage), (None, None))
        if y is None and stage == 0 and self.last > 0:
            return None  # its parameters are frozen; the gradient from stage 1 is dropped
        if y is not None:
            y.backward(gradient)  # the loss, one number, has None
        if y is None or stage > 0 and x.grad is None:
            advice = "let its result depend on x, without detach or no_grad"
            raise RuntimeError(f"stage {stage} has no gradient to send: {advice}")
        return None if stage == 0 else x.grad


# --- what an action waits for, and what it sends


class Message(NamedTuple):
    """Activations (kind "F") or their gradient (kind "B") on their way to a stage."""

    kind: str
    microbatch: int
    stage: int
    source: int  # rank
    target: int  # rank

    @property
    def queue(self):
        """Its queue's key. Messages of one queue arrive in the order in which they are sent. One
        that stays on its rank is a queue of its own."""
        if self.source == self.target:
            return self
        return self.kind, self.source, self.target


class Schedule(tuple):
    """A row of actions for each rank. Raises ValueError if it is unsound.

    owner: {stage: the rank that holds it}. last: the last stage. It is a tuple, so that nobody
    changes it after the check."""

    def __new__(cls, rows):
        return super().__new__(cls, [tuple(row) for row in rows])

    def __init__(self, rows):
        self.owner = {}
        for rank, row in enumerate(self):
            self.owner |= {action.stage: rank for action in row}
        self.last = len(self.owner) - 1
        check_actions(self)
        check_order(self)

    def stages(self, rank):
        return sorted(stage for stage, owner in self.owner.items() if owner == rank)

    def outgoing(self, action):
        """The message that an action sends: a forward's to the next stage, a backward's to the
        stage before. None at the ends of the pipeline, and for W."""
        kind, m, stage = action
        receiver = stage + 1 if kind == "F" else stage - 1
        if kind == "W" or receiver not in self.owner:
            return None
        kind = "F" if kind == "F" else "B"  # I sends what B would send
        return Message(kind, m, receiver, self.owner[stage], self.owner[receiver])

    def incoming(self, action):
        """The message that an action waits for: what the neighbour's action sends, or None."""
        sender = action.stage - 1 if action.kind == "F" else action.stage + 1
        return self.outgoing(action._replace(stage=sender)) if sender in self.owner else None


# --- messages between ranks


class Mailbox:
    """This rank's messages of one play. Sends return at once. Of each queue one receive is posted
    ahead, so that its message may arrive while an action runs."""

    unfinished = weakref.WeakSet()  # links[0] of each play that runs, or ended in an exception

    def __init__(self, schedule, rank, shape, dtype, device, links):
        self.schedule, self.rank, self.links = schedule, rank, links
        self.shape, self.dtype, self.device = torch.Size(shape), dtype, device
        self.arriving = {}  # {message: (tensor, handle of its receive)}
        self.sends = []  # (tensor, handle): both must live until the send is done
        self.expected = collections.defaultdict(collections.deque)  # {queue: messages, in order}
        for action in schedule[rank]:
            message = schedule.incoming(action)
            if message is not None and message.source != rank:
                self.expected[message.queue].append(message)
        self.unfinished.add(links[0])
        for queue in self.expected:
            self.post(queue)

    def post(self, queue):
        """Offer a buffer for the next message of a queue."""
        if self.expected[queue]:
            message = self.expected[queue].popleft()
            buffer = torch.empty(self.shape, dtype=self.dtype, device=self.device)
            work = dist.irecv(buffer, group=link(self.links, queue), group_src=message.source)
            self.arriving[message] = buffer, work

    def receive(self, action):
        message = self.schedule.incoming(action)
        if message is None:
            return None
        tensor, work = self.arriving.pop(message)
        if work is not None:
            work.wait()
            self.post(message.queue)
        return tensor

    def send(self, action, tensor):
        message = self.schedule.outgoing(action)
        if message is None:
            return
        if message.target == self.rank:  # both stages are on this rank
            self.arriving[message] = tensor, None
            return
        if tensor.shape != self.shape or tensor.dtype != self.dtype:
            found = f"stage {action.stage} has {list(tensor.shape)} of {tensor.dtype} to send"
            told = f"play was told {list(self.shape)} of {self.dtype}"
            raise ValueError(f"{found} for micro-batch {action.microbatch}, but {told} for all")
        tensor = tensor.contiguous()
        self.sends = [(t, work) for t, work in self.sends if not work.is_completed()]
        group = link(self.links, message.queue)
        self.sends.append((tensor, dist.isend(tensor, group=group, group_dst=message.target)))

    def close(self):
        for _, work in self.sends:
            work.wait()
        self.unfinished.discard(self.links[0])


def make_links(ranks=None):
    """The four groups of `play`: [activations to later ranks, activations to earlier ranks,
    gradients to later ranks, gradients to earlier ranks]. Four, because nccl passes a group's
    messages between two ranks one by one, in order: in fewer groups two could block each other.
    Every process must call it, as dist.new_group: once for each pipeline, in the same order."""
    return [dist.new_group(ranks) for _ in range(4)]


def link(links, queue):
    kind, source, target = queue
    to_later, to_earlier = links[:2] if kind == "F" else links[2:]
    return to_later if source < target else to_earlier


def open_links(schedule, links, device):
    """Send a first message through each queue, in an order that all ranks share. On nccl the first
    message blocks until both ranks are there."""
    rank = dist.get_rank(links[0])
    number = torch.zeros(1, device=device)
    messages = {schedule.outgoing(action) for row in schedule for action in row} - {None}
    for queue in sorted({m.queue for m in messages if m.source != m.target}):
        _, source, target = queue
        group = link(links, queue)
        if rank == source:
            dist.send(number, group=group, group_dst=target)
        elif rank == target:
            dist.recv(number, group=group, group_src=source)


def warm_up(schedule, forward, shape, dtype, device, links, around=contextlib.nullcontext):
    """Run this rank's actions of the first two micro-batches on zeros, without messages. Arguments
    as for `play`. Call it on all ranks, before the first play; zero_grad() clears its gradients.

    On nccl a posted receive is a kernel that spins until its message is there. When CUDA loads a
    kernel, at its first launch, it may wait until the device is idle: the two wait for ever."""
    row = [action for action in schedule[dist.get_rank(links[0])] if action.microbatch < 2]
    passes = Passes(forward, row, schedule.last)
    for action in row:
        received = None
        if schedule.incoming(action) is not None:
            received = torch.zeros(shape, dtype=dtype, device=device)
        with around(action):
            passes.run(action, received)


# --- several stages a rank: a smaller bubble for more messages


def interleaved(rank, ranks, microbatches, chunks=2):
    """Rank r holds the stages r, p + r, 2 p + r, ... Micro-batches pass in groups of p. A group
    passes the rank's first stage, then its second, and so on; in backward its last stage first."""
    if microbatches % ranks:
        count = f"a multiple of {ranks} micro-batches, as many as ranks"
        raise ValueError(f"interleaved needs {count}, not {microbatches}")
    stages = list(range(rank, chunks * ranks, ranks))
    groups = microbatches // ranks
    forwards = sorted(ranks * stages) * groups  # for 2 ranks: 0 0 2 2 0 0 2 2 ...
    backwards = sorted(ranks * stages, reverse=True) * groups  # 2 2 0 0 2 2 0 0 ...
    # A group through each stage here but the last; then two for each later rank: there and back
    ahead = (chunks - 1) * ranks + 2 * (ranks - 1 - rank)
    ahead = min(ahead, len(forwards))
    row = Row("F", *forwards[:ahead])
    for forward, backward in zip(forwards[ahead:], backwards):
        row.add("F", forward)
        row.add("B", backward)
    row.add("B", *backwards[len(backwards) - ahead :])
    return row


# --- backward in two parts: the gradient that another stage waits for first, the weights' later


class Deferred(TorchFunctionMode):
    """While it is on, each F.linear and F.grouped_mm leaves its weight's gradient for later.

        deferred = Deferred()
        with deferred:    # play does this for a schedule with I and W
            loss = F.cross_entropy(model(x), targets, reduction="sum") / count
            loss.backward()    # I: gradients of inputs, biases, norms and embeddings
        deferred.accumulate()  # W: gradients of weights. Without this line they are missing

    It defers gradients of parameters and their views. Other weights get theirs at once: those that
    are computed, all under autocast, those in addmm, matmul, bmm and nn.MultiheadAttention.

    Set weight.used_twice = True where a stage uses a weight elsewhere too, as a tied embedding. Its
    gradient then comes at once, in one piece: DDP and ZeRO count the pieces."""

    def __init__(self):
        super().__init__()
        self.entries = []  # (weight, x, gradient of the product, offsets), last layers first

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if function is torch.Tensor.backward:
            return self.backward(*args, **kwargs)
        if function in (F.linear, torch._grouped_mm):  # F.grouped_mm calls the latter
            return self.product(function, *args, **kwargs)
        return function(*args, **kwargs)

    def backward(self, y, gradient, retain_graph, create_graph, inputs):
        """y.backward(...), with this mode on, for checkpointed layers run forward again. A mode is
        off in a function that it intercepts; so this calls what y.backward calls in the end."""
        gradient = torch.ones_like(y) if gradient is None else gradient
        keep, inputs = bool(retain_graph), inputs or ()
        engine = torch.autograd.Variable._execution_engine
        flags = {"allow_unreachable": True, "accumulate_grad": True}
        with self:
            engine.run_backward((y,), (gradient,), keep, create_graph, inputs, **flags)

    def can_defer(self, input, weight):
        whole = weight if weight._base is None else weight._base
        if not isinstance(whole, nn.Parameter) or getattr(whole, "used_twice", False):
            return False
        if torch.is_autocast_enabled(input.device.type):  # W would not be cast
            return False
        return torch.is_grad_enabled() and input.requires_grad and weight.requires_grad

    def product(self, function, input, weight, *rest, **options):
        """function(input, weight). In its backward a hook notes the gradient of y, the product
        passes on that of x, and KeepInput, which has x, puts the weight's gradient off."""
        offsets = options.get("offs")  # where the groups of a grouped product end
        matrix_dims = 2 if offsets is None else 3
        if weight.dim() != matrix_dims or not self.can_defer(input, weight):
            return function(input, weight, *rest, **options)
        gradients = []

        def put_off(x):
            self.entries.append((weight, x, gradients.pop(), offsets))

        # Detached: or the product's backward would compute the weight's gradient as well.
        y = function(KeepInput.apply(input, put_off), weight.detach(), *rest, **options)
        if y._is_view():  # an in-place ReLU gives a view a new node, without the hook
            y = torch.ops.aten._unsafe_view(y, y.shape)
        y.register_hook(gradients.append)
        return y

    def accumulate(self):
        """Add the deferred gradients to their weights, in one pass of autograd: hooks of DDP and
        ZeRO see them like any others."""
        # Autograd runs the newest node first: last layers first, in the order of the buckets
        roots = [LateGradient.apply(*entry) for entry in reversed(self.entries)]
        self.entries.clear()
        if roots:
            torch.autograd.backward(roots, [torch.ones_like(root) for root in roots])


class KeepInput(torch.autograd.Function):
    """Identity. Saves x, and in backward puts the weight's gradient off. A node of its own, before
    the product: recomputation ends with what is saved last, so it spares the product."""

    @staticmethod
    def forward(ctx, x, put_off):
        ctx.save_for_backward(x)
        ctx.put_off = put_off
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        ctx.put_off(ctx.saved_tensors[0].detach())
        return gradient, None


class LateGradient(torch.autograd.Function):
    """A node whose backward computes a weight's gradient. So only one exists at a time."""

    @staticmethod
    def forward(ctx, weight, x, gradient, offsets):
        ctx.save_for_backward(x, gradient, offsets)
        return weight.new_zeros(())

    @staticmethod
    def backward(ctx, _):
        return weight_gradient(*ctx.saved_tensors), None, None, None


def weight_gradient(x, gradient, offsets=None):
    if offsets is not None:
        return F.grouped_mm(x.T, gradient, offs=offsets)  # (E, in, out)
    return gradient.flatten(0, -2).T @ x.flatten(0, -2)  # (out, in)


# --- zero-bubble schedules: weight gradients fill the gaps


def zb_h1(rank, ranks, microbatches, reach=1):
    """1F1B with backward in two parts. Rank r has r forwards less in flight than the first rank, so
    it may put off r weight gradients for as much memory. They fill its gaps at the end.

    reach: how many forwards a rank is ahead of the next. With 2 (zb-h2) no gap is left before the
    first backward."""
    ahead = min(reach * (ranks - 1 - rank), microbatches)
    deferred = min(reach * rank, microbatches)
    row = Row("F" * ahead, rank)
    for i in range(microbatches):
        if i < microbatches - ahead:
            row.add("F", rank)
        row.add("I", rank)
        if i >= deferred:
            row.add("W", rank)
    row.add("W" * deferred, rank)
    return row


def zb_v(rank, ranks, microbatches):
    """Rank r holds the stages r (near) and 2 p - 1 - r (far). So the way through the ranks is a V,
    with both its ends on rank 0. docs/pipelines.md draws it."""
    near, far, row = rank, 2 * ranks - 1 - rank, Row()
    padded = max(microbatches, 2 * ranks - 1)  # plan so many; the last line drops extras
    # Fill: forwards, until the first micro-batch is back from the far end.
    row.add("F" * (2 * (ranks - rank) - 1), near)
    for _ in range(rank):
        row.add("F", far, near)
    row.add("FIW" * (ranks - rank), far)
    # Steady: F I W of each side in turn.
    while row.counts["F", far] < padded:
        if row.counts["F", near] < padded:
            row.add("F", near)
        row.add("IW", near)
        row.add("FIW", far)
    # Drain: input gradients first, weights' where the rank would wait.
    for _ in range(rank):
        row.add("I", near, far)
    row.add("IW" * (ranks - rank), near)
    for stage in (far, near):
        row.add("W" * (padded - row.counts["W", stage]), stage)
    return [action for action in row if action.microbatch < microbatches]


def dualpipev(rank, ranks, microbatches):
    """DualPipe folded at its middle: stages as in zb_v. In the main phase a forward of one side
    stands beside a backward of the other. DeepSeek overlaps the two; here they take turns. Weight
    gradients are put off only while it fills and drains. Phases 1 to 8 are those of its code."""
    if microbatches < 2 * ranks:
        count = f"at least {2 * ranks} micro-batches, twice as many as ranks"
        raise ValueError(f"dualpipev needs {count}, not {microbatches}")
    near, far, row = rank, 2 * ranks - 1 - rank, Row()
    rest = ranks - 1 - rank
    # 1: forwards, until the first micro-batch is back on the far side
    row.add("F" * (2 * rest), near)
    for _ in range(rank + 1):  # 2: the V is full: a forward of each side
        row.add("F", near, far)
    row.add("IWF" * rest, far)  # 3: the first backwards, of the far side, in two parts
    for _ in range(microbatches - 2 * ranks + rank + 1):  # 4: forward and backward of both sides
        row.add("F", near)
        row.add("BF", far)
        row.add("B", near)
    for _ in range(rest):  # 5: no forwards of the near side are left
        row.add("BF", far)
        row.add("B", near)
    backwards = [far, near] * (rank + 1)  # 6: backwards alone, the second half in two parts
    row.add("B", *backwards[: rank + 1])
    row.add("I", *backwards[rank + 1 :])
    deferred = backwards[rank + 1 :] + [near] * rest  # stages whose weights wait, oldest first
    for stage in deferred[:rest]:  # 7: the last backwards of the near side, with weights in between
        row.add("W", stage)
        row.add("I", near)
    row.add("W", *deferred[rest:])  # 8: the weights that are left
    return row


SCHEDULES = {
    "naive": naive,
    "gpipe": gpipe,
    "1f1b": one_f_one_b,
    "interleaved": interleaved,
    "zb-h1": zb_h1,
    "zb-h2": functools.partial(zb_h1, reach=2),
    "zb-v": zb_v,
    "dualpipev": dualpipev,
}


@functools.cache
def make(name, ranks, microbatches, chunks=None):
    """The Schedule of that name. chunks: stages a rank, for interleaved. Raises ValueError where
    none exists for these numbers."""
    if name not in SCHEDULES:
        raise ValueError(f"there is no schedule {name!r}, but {', '.join(SCHEDULES)}")
    options = {"chunks": chunks} if chunks and name == "interleaved" else {}
    rows = [SCHEDULES[name](rank, ranks, microbatches, **options) for rank in range(ranks)]
    schedule = Schedule(rows)
    held = len(schedule.stages(0))
    if chunks not in (None, held):
        raise ValueError(f"stages a rank of {name}: {held}, not {chunks}: leave out --chunks")
    return schedule


def forward_only(schedule, microbatches=float("inf")):
    """The forwards of the first micro-batches of a schedule: for evaluation and sampling."""
    rows = []
    for row in schedule:
        rows.append([a for a in row if a.kind == "F" and a.microbatch < microbatches])
    return Schedule(rows)


# --- a weight on two stages


def reduce_tied(parameters):
    """Sum the gradient of a weight that several ranks hold, such as a tied matrix on the first and
    the last stage. Copies that start equal then stay equal. A copy without gradient counts as zero.

        weight.placement = {"partial": [group]}    # group: the ranks with a copy; before training
        reduce_tied(model.parameters())            # once a step, after its last play

    The finish() of ddp.py and of trainer/composed_zero.py does the same: use one of them."""
    for p in parameters:
        if not isinstance(p, torch.Tensor):
            kind = type(p).__name__
            raise ValueError(f"reduce_tied needs parameters, as model.parameters(), not a {kind}")
        groups = getattr(p, "placement", {}).get("partial", ())
        if not groups or not p.requires_grad:
            continue
        if p.grad is None:
            p.grad = torch.zeros_like(p)
        if getattr(p.grad, "summed_at", None) == p.grad._version:
            raise RuntimeError("this gradient is summed already: call reduce_tied once a step")
        for group in groups:
            dist.all_reduce(p.grad, group=group)
        p.grad.summed_at = p.grad._version


# --- what play refuses


def check_actions(schedule):
    """Raise ValueError if an action is missing, there twice, or on the wrong rank."""
    stages, kinds = sorted(schedule.owner), collections.defaultdict(str)
    if not stages:
        raise ValueError("the schedule is empty: give it at least one micro-batch")
    if stages != list(range(len(stages))):
        raise ValueError(f"the schedule's stages are {stages}: number them from 0, leave none out")
    for rank, row in enumerate(schedule):
        for kind, m, stage in row:
            if schedule.owner[stage] != rank:
                raise ValueError(f"rank {rank} runs another rank's stage, {stage}")
            kinds[m, stage] += kind
    trains = set(kinds.values()) != {"F"}
    complete = ["FB", "FIW"] if trains else ["F"]
    microbatches = sorted({m for m, _ in kinds})
    for m, stage in itertools.product(microbatches, stages):
        if kinds[m, stage] not in complete:
            found = " ".join(kinds[m, stage]) or "nothing"
            raise ValueError(f"stage {stage} runs micro-batch {m} as {found}")


def check_order(schedule):
    """Raise ValueError if ranks would wait for each other for ever. It plays the messages as the
    strictest backend does: a send blocks until its receive is posted, and so until the message
    before it in its queue is taken."""
    rows = [collections.deque(row) for row in schedule]
    under_way = collections.defaultdict(list)  # {queue: messages, sent and not yet taken}
    sent_to = [None for _ in rows]  # for each rank the queue of its last message

    def is_ready(rank):
        message = schedule.incoming(rows[rank][0])
        arrived = message is None or under_way[message.queue][:1] == [message]
        return arrived and len(under_way[sent_to[rank]]) < 2

    ready = True
    while ready:
        ready = [rank for rank, row in enumerate(rows) if row and is_ready(rank)]
        for rank in ready:
            action = rows[rank].popleft()
            taken, sent = schedule.incoming(action), schedule.outgoing(action)
            if taken is not None:
                under_way[taken.queue].pop(0)
            if sent is not None:
                under_way[sent.queue].append(sent)
                sent_to[rank] = sent.queue
    heads = [row[0] for row in rows if row]
    if heads:
        waiting = ", ".join(f"{kind}{m} of stage {stage}" for kind, m, stage in heads)
        reason = "these wait for each other, or await messages in another order than they are sent"
        raise ValueError(f"the schedule is stuck: {reason}: {waiting}")


def check_links(schedule, links):
    """This rank among the links. Raises an error where they do not fit the schedule."""
    if not isinstance(schedule, Schedule):
        raise ValueError("play needs a Schedule: Schedule(rows) looks whether it is sound")
    rank = dist.get_rank(links[0])
    if rank < 0:
        raise ValueError("this process is not one of the links' ranks: play only where it is")
    members = [dist.get_process_group_ranks(group) for group in links]
    if len(set(links)) != 4 or any(ranks != members[0] for ranks in members):
        raise ValueError("links must be four different groups of the same ranks: use make_links()")
    size = len(members[0])
    if len(schedule) != size:
        raise ValueError(f"the schedule is for {len(schedule)} ranks, but the links join {size}")
    if links[0] in Mailbox.unfinished:
        reason = "the last play on these links ended in an exception, with messages under way"
        raise RuntimeError(f"{reason}: make new links on all ranks, and zero the gradients")
    return rank


# --- demo ---

import harness
import proof
import receipts.pipeline


def main():
    parser = harness.parser(__doc__, microbatches=8)
    g = parser.add_argument_group("pipeline")
    why = "1f1b (the default) sends and holds least; interleaved, zb-* and dualpipev wait less"
    g.add_argument("--schedule", choices=list(SCHEDULES), help=why)
    why = "stages a rank of interleaved: they divide the bubble, multiply messages (default: 2)"
    g.add_argument("--chunks", **harness.POSITIVE, help=why)
    receipts.pipeline.flags(g)
    args = parser.parse_args()
    harness.check_plot(args)
    if args.compare:
        return receipts.pipeline.compare(make, args, list(SCHEDULES))
    args.schedule = args.schedule or "1f1b"
    config = harness.configure(args)
    harness.check_batch(args, 1)
    of_flags = receipts.pipeline.of_flags
    proof.launch(demo, args, check=lambda world: of_flags(make, args, config, world))


def demo(run):
    args, config, rank, ranks = run.args, run.config, run.rank, run.world
    schedule = receipts.pipeline.of_flags(make, args, config, ranks)
    stages, last, links = schedule.stages(rank), schedule.last, make_links()
    ends = dist.new_group(sorted({schedule.owner[0], schedule.owner[last]}))
    open_links(schedule, links, run.device)
    run.groups(down=links[:2], up=links[2:], tied=ends)  # down: activations, up: gradients
    layers = receipts.pipeline.stage_layers(config, last + 1)
    parts = harness.split(run.meta_model, layers, stages, ends)
    model = run.fill(harness.Stages(parts))
    parameters = list(model.parameters())
    optimizer = harness.make_optimizer(parameters, args)
    shape = (args.batch // args.microbatches, config.context, config.width)
    stopwatch = receipts.pipeline.Stopwatch(run.device, parameters)

    for step in run.steps(optimizer):
        batches = run.microbatches(step)

        def forward(stage, m, x):
            tokens, targets, samples = batches[m]
            x = tokens if x is None else x
            return model[stage](x, targets=targets, count=run.count, samples=samples)

        if step == 0:
            warm_up(schedule, forward, shape, run.dtype, run.device, links)
        optimizer.zero_grad(set_to_none=False)
        around = stopwatch if step + 1 == args.steps else contextlib.nullcontext
        losses = play(schedule, forward, shape, run.dtype, run.device, links, around)
        reduce_tied(parameters)
        loss = sum(losses, run.zero())  # the last stage has them all, the other ranks none
        dist.all_reduce(loss)
        norm = harness.grad_norm(parameters, [dist.group.WORLD])  # over the stages of all ranks
        run.check(loss, norm, model.named)
        harness.clip(parameters, norm, args.grad_clip)
        optimizer.step()
        run.log(loss, norm)

    return receipts.pipeline.receipt(run, schedule, layers, stopwatch)


if __name__ == "__main__":
    harness.script(main)
