"""Pipeline parallelism: each rank holds some consecutive layers (a stage); micro-batches flow
through the stages.

What is split: the layers, over p ranks; and the batch, into m micro-batches that follow each other.
A rank holds one stage, or
several: stages r, p + r, ... (interleaved), or r and 2 p - 1 - r, there and back (a V), so that the
first rank has both ends.

    1F1B, 4 stages, 8 micro-batches (a row a rank; digits: forward, [digits]: backward, twice as
    long; dots: idle)

        0 1 2 3 . . . . . .[0 ] 4[1 ] 5[2 ] 6[3 ] 7[4 ] .[5 ] .[6 ] .[7 ]
        . 0 1 2 . . . .[0 ] 3[1 ] 4[2 ] 5[3 ] 6[4 ] 7[5 ] .[6 ] .[7 ]
        . . 0 1 . .[0 ] 2[1 ] 3[2 ] 4[3 ] 5[4 ] 6[5 ] 7[6 ] .[7 ]
        . . . 0[0 ] 1[1 ] 2[2 ] 3[3 ] 4[4 ] 5[5 ] 6[6 ] 7[7 ]

What is sent: activations (b, T, C) to the next stage as soon as they are there, their gradients to
the one before; once a step the gradient of a tied matrix, between its two ends. A schedule says in
which order a rank works. It is data: for each rank the list of its actions, each with its
micro-batch and its stage, so the lists also say which rank holds which stage. A pure function makes
them, one executor (`play`) plays any of them, `check` plays them without ranks to see that they are
sound, and the same lists give the picture, the bubble and the activations held (`timeline`,
`simulate`, `in_flight`).

Backward is the chain rule, cut at the boundary: a stage's input x is a leaf of its own graph, so
`backward(y, dL/dy)` with the gradient that the next stage sends leaves dL/dx in x.grad, to be sent
to the stage before. The gradients of micro-batches add up, because each loss is divided by the
token count of the whole batch. The zero-bubble schedules split backward: what another stage waits
for, the input's gradient (I; the papers' B), comes at once, and the weights' gradients (W) fill the
gaps. What is deferred, exactly: the weights of F.linear and F.grouped_mm where a module calls them
(`Deferred`). Biases, norms and embeddings are a sliver of the work and come with the input's
gradient. So does a weight that torch multiplies out of sight: inside nn.MultiheadAttention, or by
addmm as in Hugging Face's GPT-2. There a zero-bubble schedule gains nothing, and its gradients are
right all the same. Nothing is computed twice: what is kept is a linear layer's input and its
output's gradient. Each weight's gradient is accumulated once a micro-batch, when it is complete:
hooks on it (DDP, ZeRO) fire then.

What it costs: the bubble, the time that a rank waits between its first and its last action, beside
its work m (F + I + W). F, I, W: forward, gradient of the input, gradient of the weights, of all
that a rank holds, each 1 in the numbers below. Held: the micro-batches whose activations (in 1/p of
the layers) the worst rank has at a time.

    name         stages a rank   bubble of a rank                     held
    naive        1               (p-1) m 3                            1
    gpipe        1               (p-1) 3                              m
    1f1b         1               (p-1) 3                              p    (of 1/p of the layers: together one of all of them)
    interleaved  v, in rounds    (p-1) 3 / v                          p + (p-1)/v
    zb-h1        1               (p-1) (F + I - W) = p-1              p
    zb-h2        1               (p-1) (F + I - 2 W) = 0              2 p - 1                              for m >= 2 p - 1
    zb-v         2, in a V       0                                    p                                    for m >= 2 p - 1
    dualpipev    2, in a V       (p-1) / 2                            p + 1/2                              for m >= 2 p

So gpipe and 1f1b use m / (m+p-1) of the time: with p = 4, 57% for m = p, 73% for 2 p, 91% for 8 p.
Waits at the ends do not count in the table: where ranks wait for each other at the end of a step
(for the norm of all gradients), zb-h2 gains nothing over zb-h1. Sent per boundary, direction and
micro-batch: b T C e bytes, point to point: little, so it suits the slowest links; v times that with
v stages a rank. Held: 1/p of the layers, and the activations above.

When it is the wrong choice: where the batch gives few micro-batches, so that the bubble is a large
part of the step, and where one device, or a node with tensor parallelism, holds the model.

    torchrun --nproc_per_node=4 pipeline.py                 python pipeline.py --layers 8 --schedule zb-v --plot zbv
    python pipeline.py --compare                            all schedules beside their formulas, without any rank

Papers: Huang et al. 2018, GPipe, arXiv:1811.06965, section 2; Narayanan et al. 2021,
Memory-efficient pipeline-parallel training (PipeDream-flush, 1F1B), arXiv:2006.09503, section 3.2;
Narayanan et al. 2021, Megatron-LM (interleaved), arXiv:2104.04473, section 2.2; Qi et al. 2023,
Zero bubble (H1, H2), arXiv:2401.10241, section 2; Qi et al. 2024, Controllable memory (ZB-V),
arXiv:2405.15362; DeepSeek-AI 2024, DeepSeek-V3 (DualPipe), arXiv:2412.19437, section 3.2.1;
DualPipeV is its "cut-in-half" form.
"""

import contextlib
import functools
import time
import weakref
from collections import deque
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

# --- schedules


class Action(NamedTuple):
    """One step of a rank, for one micro-batch and one of its stages: kind "F" forward; "B"
    backward; or backward in two parts, "I" the gradient of the stage's input and "W" those of its
    weights."""

    kind: str
    microbatch: int
    stage: int


class Tape:
    """Writes a rank's list. Each call takes the next micro-batch of that kind and stage."""

    def __init__(self):
        self.actions, self.counts = [], {}

    def add(self, kind, stage):
        microbatch = self.counts[kind, stage] = self.counts.get((kind, stage), -1) + 1
        self.actions.append(Action(kind, microbatch, stage))

    def done(self, kind, stage):
        return self.counts.get((kind, stage), -1) + 1


def naive(ranks, microbatches, chunks=1):
    """One micro-batch at a time through all stages and back: what everything else improves on."""
    return [
        [Action(kind, m, rank) for m in range(microbatches) for kind in "FB"]
        for rank in range(ranks)
    ]


def gpipe(ranks, microbatches, chunks=1):
    """All forwards, then all backwards."""
    return [
        [Action(kind, m, rank) for kind in "FB" for m in range(microbatches)]
        for rank in range(ranks)
    ]


def one_f_one_b(ranks, microbatches, chunks=1):
    """Rank r does p - 1 - r forwards to fill the pipeline, then one forward and one backward in
    turn, then the rest. It is the interleaved schedule of one stage a rank, for any number of
    micro-batches."""
    schedule = []
    for rank in range(ranks):
        ahead = min(ranks - 1 - rank, microbatches)
        forwards = [Action("F", m, rank) for m in range(microbatches)]
        backwards = [Action("B", m, rank) for m in range(microbatches)]
        steady = [a for pair in zip(forwards[ahead:], backwards) for a in pair]
        schedule.append(forwards[:ahead] + steady + backwards[microbatches - ahead :])
    return schedule


def interleaved(ranks, microbatches, chunks=2):
    """Rank r holds the stages r, p + r, 2 p + r, ... The micro-batches pass in groups of p: a group
    goes through the rank's first stage, then its second, ...; backward alike from the last. Enough
    forwards ahead to reach the last stage and back."""
    if microbatches % ranks:
        raise ValueError(
            f"interleaved needs a multiple of {ranks} micro-batches, as many as ranks, not {microbatches}"
        )
    schedule, total = [], microbatches * chunks
    for rank in range(ranks):

        def nth(kind, i):
            group, chunk, place = i // (ranks * chunks), i // ranks % chunks, i % ranks
            chunk = chunk if kind == "F" else chunks - 1 - chunk
            return Action(kind, group * ranks + place, chunk * ranks + rank)

        ahead = min(2 * (ranks - 1 - rank) + (chunks - 1) * ranks, total)
        actions = [nth("F", i) for i in range(ahead)]
        for i in range(total):
            actions += [nth("F", ahead + i)] if ahead + i < total else []
            actions += [nth("B", i)]
        schedule.append(actions)
    return schedule


def zb_h1(ranks, microbatches, chunks=1, reach=1):
    """1F1B with backward in two parts. Rank r has r forwards less in flight than the first, so it
    may put off r weight gradients for as much memory: they fill its gaps while the pipeline
    drains."""
    schedule = []
    for rank in range(ranks):
        ahead, tape = reach * (ranks - 1 - rank), Tape()
        for _ in range(min(ahead, microbatches)):
            tape.add("F", rank)
        for i in range(microbatches):
            if ahead + i < microbatches:
                tape.add("F", rank)
            tape.add("I", rank)
            if i >= reach * rank:
                tape.add("W", rank)
        while tape.done("W", rank) < microbatches:
            tape.add("W", rank)
        schedule.append(tape.actions)
    return schedule


def zb_h2(ranks, microbatches, chunks=1):
    """The same with twice as many forwards ahead, and twice as many weight gradients put off: the
    gap before the first backward is filled too."""
    return zb_h1(ranks, microbatches, reach=2)


def zb_v(ranks, microbatches, chunks=2):
    """Rank r holds stages r and 2 p - 1 - r. A stable phase of F I W for each of the two in turn;
    before it forwards until the V's far end has come back, after it the input gradients first, and
    the weights' where a rank would wait."""
    schedule = []
    for rank in range(ranks):
        near, far, tape = rank, 2 * ranks - 1 - rank, Tape()
        whole = max(microbatches, 2 * ranks - 1)  # fewer fill the same pattern, with holes

        def add(kinds, stage):
            for kind in kinds:
                tape.add(kind, stage)

        add("F" * (2 * (ranks - rank) - 1), near)
        for _ in range(rank):
            add("F", far), add("F", near)
        for _ in range(ranks - rank):
            add("FIW", far)
        while tape.done("F", far) < whole:
            add("F" if tape.done("F", near) < whole else "", near)
            add("IW", near), add("FIW", far)
        for _ in range(rank):
            add("I", near), add("I", far)
        for _ in range(ranks - rank):
            add("IW", near)
        for stage in (far, near):
            add("W" * (whole - tape.done("W", stage)), stage)
        schedule.append([action for action in tape.actions if action.microbatch < microbatches])
    return schedule


def dualpipev(ranks, microbatches, chunks=2):
    """DualPipe folded at its middle: stages as in zb_v, and in the main phase a forward of one
    beside a backward of the other (DeepSeek overlaps their messages; here they take turns). Weight
    gradients are put off only while it fills and drains. The numbers are those of DeepSeek's own
    steps."""
    if microbatches < 2 * ranks:
        raise ValueError(
            f"dualpipev needs at least {2 * ranks} micro-batches, twice as many as ranks, not {microbatches}"
        )
    schedule = []
    for rank in range(ranks):
        near, far, tape, owed = rank, 2 * ranks - 1 - rank, Tape(), deque()
        rest = ranks - rank - 1

        def backward(stage, whole=True):
            tape.add("B", stage)
            if not whole:  # the same counter: a stage's backwards come in order, whole or in part
                owed.append(tape.actions[-1]._replace(kind="W"))
                tape.actions[-1] = tape.actions[-1]._replace(kind="I")

        def weights():
            tape.actions.append(owed.popleft())

        # 1: until the first of these comes back to this rank, at the V's other side
        for _ in range(2 * rest):
            tape.add("F", near)
        for _ in range(rank + 1):  # 2: the V is full: a forward of each side
            tape.add("F", near), tape.add("F", far)
        for _ in range(rest):  # 3: the first backwards, of the far side, in two parts
            backward(far, whole=False), weights(), tape.add("F", far)
        # 4: the main phase: forward and backward of both sides
        for _ in range(microbatches - 2 * ranks + rank + 1):
            tape.add("F", near), backward(far), tape.add("F", far), backward(near)
        for _ in range(rest):  # 5: no more forwards of the near side
            backward(far), tape.add("F", far), backward(near)
        for i in range(2 * (rank + 1)):  # 6: backwards alone, the second half in two parts
            backward(near if i % 2 else far, whole=i < rank + 1)
        for _ in range(rest):  # 7: the last backwards of the near side, and weights in between
            weights(), backward(near, whole=False)
        while owed:  # 8
            weights()
        schedule.append(tape.actions)
    return schedule


SCHEDULES = {
    "naive": naive,
    "gpipe": gpipe,
    "1f1b": one_f_one_b,
    "interleaved": interleaved,
    "zb-h1": zb_h1,
    "zb-h2": zb_h2,
    "zb-v": zb_v,
    "dualpipev": dualpipev,
}
# Stages a rank, where it is not one; others are interleaved's choice
CHUNKS = {"interleaved": 2, "zb-v": 2, "dualpipev": 2}


def make(name, ranks, microbatches, chunks=None):
    """The schedule of that name: for each rank the list of its actions. `chunks`: stages a rank,
    for interleaved.
    Raises ValueError, in one sentence, where the schedule does not exist for these numbers."""
    fixed = CHUNKS.get(name, 1)
    chunks = chunks or fixed
    if chunks != fixed and name != "interleaved":
        raise ValueError(
            f"{name} has {fixed} stage{'s' * (fixed > 1)} a rank, not {chunks}: leave out --chunks"
        )
    return SCHEDULES[name](ranks, microbatches, chunks)


def owners(schedule):
    """Which rank holds each stage: {stage: rank}."""
    return {action.stage: rank for rank, actions in enumerate(schedule) for action in actions}


def forward_only(schedule, microbatches=None):
    """The forwards of a schedule, of the first so many micro-batches: for evaluation and
    sampling."""
    limit = float("inf") if microbatches is None else microbatches
    return [[a for a in actions if a.kind == "F" and a.microbatch < limit] for actions in schedule]


def awaited(action):
    """The name of the message that a forward or backward takes: a whole backward and its first part
    take the same."""
    return action._replace(kind="F" if action.kind == "F" else "B")


def sender(action, last):
    """The stage that an action's input comes from, or None. last: the last stage."""
    if action.kind == "W" or action.stage == (0 if action.kind == "F" else last):
        return None
    return action.stage + (-1 if action.kind == "F" else 1)


def receiver(action, last):
    """The stage that an action's result goes to, or None."""
    if action.kind == "W" or action.stage == (last if action.kind == "F" else 0):
        return None
    return action.stage + (1 if action.kind == "F" else -1)


def needs(action, last):
    """What must be done before an action: of its own stage and micro-batch, and of the sender's."""
    of_neighbour = [
        awaited(action)._replace(stage=stage)
        for stage in [sender(action, last)]
        if stage is not None
    ]
    own = {"F": [], "W": ["B"]}.get(action.kind, ["F"])
    return [action._replace(kind=kind) for kind in own] + of_neighbour


# --- the split backward


class Deferred(TorchFunctionMode):
    """While it is on, every F.linear and F.grouped_mm leaves its weight's gradient for later: its
    backward puts (weight, function, what the function needs) into the list `queue`, and
    accumulate(queue) does the rest. play does all of this; by hand it is

        queue = []
        with Deferred(queue):
            loss = F.cross_entropy(model(x), targets, reduction="sum") / count
        loss.backward()      # gradients of inputs, biases, norms and embeddings
        accumulate(queue)    # gradients of weights: without this line they are missing

    Only a parameter, or a view of one, has its gradient later. A computed weight may depend on x,
    whose gradient would be incomplete. So its own comes at once, as do those that the mode does not
    see: inside nn.MultiheadAttention, of addmm, matmul and bmm, and all under autocast.

    A backward pass inside the `with` (autograd.grad for a penalty) fills the queue too: use none.
    """

    def __init__(self, queue):
        super().__init__()
        self.queue = queue

    def __torch_function__(self, function, types, args=(), kwargs=None):
        # torch._grouped_mm is what a mode sees of F.grouped_mm
        replaced = {F.linear: self.linear, getattr(torch, "_grouped_mm", None): self.grouped}.get(
            function, function
        )
        return (replaced if torch.is_grad_enabled() else function)(*args, **(kwargs or {}))

    def may_wait(self, input, weight):
        """Whether this weight's gradient may come after the input's."""
        whole = weight if weight._base is None else weight._base
        return input.requires_grad and weight.requires_grad and isinstance(whole, nn.Parameter)

    def linear(self, input, weight, bias=None):
        cast = torch.is_autocast_enabled(input.device.type)  # it would cast forward alone
        if cast or input.dim() < 2 or not self.may_wait(input, weight):
            return F.linear(input, weight, bias)
        return self.put_off(lambda x, w: F.linear(x, w, bias), input, weight, weight_gradient)

    def grouped(self, input, weight, *, offs, bias=None, out_dtype=None):
        if bias is not None or out_dtype is not None or not self.may_wait(input, weight):
            return torch._grouped_mm(input, weight, offs=offs, bias=bias, out_dtype=out_dtype)
        return self.put_off(
            lambda x, w: torch._grouped_mm(x, w, offs=offs),
            input,
            weight,
            grouped_weight_gradient,
            offs,
        )

    def put_off(self, product, input, weight, function, *more):
        """product(input, weight), whose weight gets function(input, gradient of the product, *more)
        later."""
        gradients = []
        later = lambda x, gradient: self.queue.append((weight, function, x, gradient, *more))  # noqa: E731
        # Autograd must not see the weight: it would run its hooks, with nothing to add. So it is
        # detached, and the queue's entry holds it
        y = product(Keep.apply(input, gradients, later), weight.detach())
        if y._is_view():  # of addmm's result: an in-place ReLU on a view would lose the hook
            y = torch.ops.aten._unsafe_view(y, y.shape)
        y.register_hook(gradients.append)
        return y


class Keep(torch.autograd.Function):
    """x as it is, kept for backward. There, `gradients` has that of what was made of x: later(x,
    that gradient).

    A node of its own before the product, so that recomputation of what comes before, which ends
    with what is kept last, need not make the product again."""

    @staticmethod
    def forward(ctx, x, gradients, later):
        ctx.save_for_backward(x)
        ctx.gradients, ctx.later = gradients, later
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        ctx.later(ctx.saved_tensors[0].detach(), ctx.gradients.pop())
        return grad, None, None


def weight_gradient(x, grad):
    return grad.flatten(0, -2).T @ x.flatten(0, -2)  # (out, in)


def grouped_weight_gradient(x, grad, ends):
    return F.grouped_mm(x.T, grad, offs=ends)  # (E, in, out)


class Postponed(torch.autograd.Function):
    """A node whose backward is a weight's gradient, made only then: no more than one exists at a
    time."""

    @staticmethod
    def forward(ctx, weight, function, *tensors):
        ctx.save_for_backward(*tensors)
        ctx.function = function
        return weight.new_zeros(())

    @staticmethod
    def backward(ctx, _):
        return ctx.function(*ctx.saved_tensors), None, *[None for _ in ctx.saved_tensors]


def accumulate(queue):
    """Add the postponed gradients to their weights, in one pass of autograd, so that hooks see them
    as any others."""
    roots = [Postponed.apply(*entry) for entry in queue]
    queue.clear()
    if roots:
        torch.autograd.backward(roots, [torch.ones_like(root) for root in roots])


# --- the executor


def play(schedule, forward, shape, dtype, device, links, scope=None, record=None):
    """Play this rank's part of a schedule. Gradients add up in the parameters' .grad.

        links, schedule = make_links(), make("1f1b", ranks, microbatches)    # on all ranks, once
        owner = owners(schedule)
        last = len(owner) - 1
        stages = {s: build_stage(s).to(device) for s in owner if owner[s] == rank}  # your modules

        def forward(s, m, x):
            y = stages[s](inputs[m] if x is None else x)                     # x is None on stage 0
            if s < last:
                return y
            return F.cross_entropy(y, targets[m], reduction="sum") / count

        losses = play(schedule, forward, (b, T, C), dtype, device, links)

    The loss rule: the sum over a micro-batch's tokens / count, the tokens of the whole batch: of
    all micro-batches and all data-parallel ranks. play adds gradients and never averages, so a
    mean in each micro-batch is wrong. sum(losses) is the loss of the batch.

    forward(stage, microbatch, x): runs a stage on x, the activations of the stage before, or None
        on the first stage, which has the micro-batch's input itself; returns activations, or on
        the last stage the loss (or anything, in a schedule without backward).
    shape, dtype: of the activations between stages, the same for every micro-batch and rank.
    links: four process groups of the pipeline's ranks, for activations to a later rank and to an
        earlier one, gradients to a later rank and to an earlier one: make_links makes them.
    scope(stage, complete): a context for each backward pass; complete=False where the weights'
        gradients are left for later.
    record: a list that gets (start, end, action) in seconds, without the time spent waiting for
        messages. An accelerator is waited for at each: slower.
    Returns the results of the last stage, detached, in the order of the schedule; an empty list on
    the others. A micro-batch's activations are freed as soon as its backward is done.

    Sends return at once, and each is kept until done (some backends do so only when the receive is
    posted: `check` asks for that case too). Activations and gradients have a queue each, for each
    direction between two ranks, and of each queue one receive is posted ahead: at most four
    buffers. Messages are matched by their order, which `check` looks at, once a schedule.

    An exception leaves messages under way, so the same links are refused afterwards. The other
    ranks wait for this one until it ends, or until their links' timeout.

    play can't see these mistakes:
    - shape, dtype or schedule differ between ranks; the batch has more micro-batches than the
      schedule; a rank holds a stage that the schedule gives to another, and never trains it.
    - A stage writes to an output that it has returned: it may not be sent yet.
    - torch's clip_grad_norm_ knows the stages of one rank: add up the squares over the ranks.
    - Copies of a weight on two ranks drift apart without `reduce_tied`.
    """
    rank, owner = begin(schedule, links)
    last, actions = len(owner) - 1, schedule[rank]
    # Of backwards in two parts
    halved = {(a.microbatch, a.stage) for a in actions if a.kind == "W"}
    awaiting = {}  # (kind, source): the actions that still await a message of that queue
    for action in actions:
        source = owner.get(sender(action, last), rank)
        if source != rank:
            awaiting.setdefault((awaited(action).kind, source), deque()).append(action)
    incoming, alive, postponed, sends, results = {}, {}, {}, [], []
    trains = any(action.kind != "F" for action in actions)

    def post():
        """Offer a buffer for the next message of each queue, which may come while an action
        runs."""
        for (kind, source), queue in awaiting.items():
            if queue and awaited(queue[0]) not in incoming:
                buffer = torch.empty(shape, dtype=dtype, device=device)
                work = dist.irecv(buffer, group=link(links, kind, source, rank), group_src=source)
                incoming[awaited(queue[0])] = buffer, work

    def receive(action):
        if sender(action, last) is None:
            return None
        tensor, work = incoming.pop(awaited(action))
        if work is not None:
            work.wait()
            awaiting[awaited(action).kind, owner[sender(action, last)]].popleft()
        return tensor

    def send(action, tensor):
        """An action's result to the rank that needs it."""
        stage = receiver(action, last)
        sent, target = awaited(action)._replace(stage=stage), owner[stage]
        if target == rank:
            incoming[sent] = tensor, None
            return
        sends[:] = [(t, w) for t, w in sends if not w.is_completed()]
        if tensor.shape != torch.Size(shape) or tensor.dtype != dtype:
            raise ValueError(
                f"stage {action.stage} has {list(tensor.shape)} of {tensor.dtype} to send for "
                f"micro-batch {action.microbatch}, but play was told {list(shape)} of {dtype}: give "
                "every micro-batch as many rows, and each stage the same dtype"
            )
        tensor = tensor.contiguous()
        work = dist.isend(tensor, group=link(links, sent.kind, rank, target), group_dst=target)
        sends.append((tensor, work))  # both live until it is done

    def deferred(m, stage):
        return Deferred(postponed[m, stage]) if (m, stage) in halved else contextlib.nullcontext()

    def backward(action, gradient):
        """The pass of autograd for an action, given the gradient of its stage's output. Returns the
        stage's input."""
        kind, m, stage = action
        with scope(stage, kind != "I") if scope else contextlib.nullcontext():
            if kind == "W":
                return accumulate(postponed.pop((m, stage)))
            x, y = alive.pop((m, stage), (None, None))
            # Its parameters are all frozen: no gradient goes anywhere
            if y is None and stage == 0 < last:
                return None
            if y is not None:
                gradient = torch.ones_like(y) if gradient is None else gradient
                with deferred(m, stage):  # also here: checkpointed layers run again
                    # torch.autograd.backward's own call: a mode sees that function, and is off in
                    # it
                    run = torch.autograd.Variable._execution_engine.run_backward
                    run(
                        (y,),
                        (gradient,),
                        False,
                        False,
                        (),
                        allow_unreachable=True,
                        accumulate_grad=True,
                    )
            if y is None or stage > 0 and x.grad is None:
                raise RuntimeError(
                    f"stage {stage} has no gradient to go on with: let its result depend on x, without detach or no_grad"
                )
        return x

    unfinished.add(links[0])
    post()
    for action in actions:
        kind, m, stage = action
        received = receive(action)
        post()
        start = clock(device) if record is not None else 0.0
        if kind == "F":
            x = received
            if x is not None and torch.is_grad_enabled():
                x.requires_grad_()
            if (m, stage) in halved:
                postponed[m, stage] = []
            with deferred(m, stage):
                y = forward(stage, m, x)
            if postponed.get((m, stage)):
                raise RuntimeError(
                    f"stage {stage}'s forward runs a backward pass of its own (autograd.grad?). The "
                    "split backward would add its gradients to the step's: use a schedule without "
                    "it, such as 1f1b"
                )
            if stage == last:
                if trains and y.numel() != 1:
                    raise ValueError(
                        f"the last stage returned {list(y.shape)}: let it return one number, the loss of its micro-batch"
                    )
                results.append(y.detach())
            if y.requires_grad:
                alive[m, stage] = x, y
        else:
            x = backward(action, received)
        if record is not None:
            record.append((start, clock(device), action))
        if receiver(action, last) is not None:
            send(action, y.detach() if kind == "F" else x.grad)
        x = y = received = None  # nothing of a finished micro-batch stays
    for _, work in sends:
        work.wait()
    unfinished.discard(links[0])
    return results


unfinished = weakref.WeakSet()  # first links of plays that run, or ended in an exception


def begin(schedule, links):
    """This rank, and the rank of each stage, once links and schedule are what `play` needs."""
    rank = dist.get_rank(links[0])
    if rank < 0:
        raise ValueError("this process is not one of the links' ranks: play only where it is")
    members = [dist.get_process_group_ranks(group) for group in links]
    size = len(members[0])
    if len(set(links)) != 4 or members != 4 * members[:1]:
        raise ValueError("links must be four different groups of the same ranks: use make_links()")
    if len(schedule) != size:
        raise ValueError(
            f"the schedule is for {len(schedule)} ranks, but the links join {size}: make it for {size}"
        )
    if links[0] in unfinished:
        raise RuntimeError(
            "the last play on these links did not end, so its messages are still under way: after "
            "an exception make new links on all ranks, and zero the gradients"
        )
    owner = checked_owners(tuple(map(tuple, schedule)))
    if not torch.is_grad_enabled() and any(action.kind != "F" for action in schedule[rank]):
        raise ValueError(
            "the schedule has backwards, but gradients are off: play forward_only(schedule)"
        )
    return rank, owner


@functools.lru_cache(maxsize=16)
def checked_owners(schedule):
    """`owners` of a schedule (in tuples) that `check` finds sound."""
    check(schedule)
    return owners(schedule)


def clock(device):
    """Seconds, once all that was launched has run: kernels of an accelerator run behind Python's
    back."""
    if torch.device(device).type != "cpu":
        # Not the device: a receive that is posted ahead waits there too
        torch.accelerator.current_stream().synchronize()
    return time.perf_counter()


def make_links(ranks=None):
    """The four groups of `play`. Like dist.new_group: every process must call it, whether among
    `ranks` or not. With several pipelines (data parallelism) it makes the links of each in turn:

        links = [make_links(ranks) for ranks in pipelines][index_of_mine]

    On nccl messages of one pair of ranks in one group stand in line, where a gradient could wait
    for an activation that waits for it: so a queue's kind and direction have a group. (Groups must
    be made without device_id=, which would put all pairs of a group in one line.)"""
    return [dist.new_group(ranks) for _ in range(4)]


def link(links, kind, source, target):
    """The group of the queue of that kind ("F" or "B") from one rank to another."""
    return links[2 * (kind == "B") + (source > target)]


def open_links(schedule, links, device):
    """A first message through each queue that a schedule needs, in an order that all ranks share:
    on nccl the first one blocks until both sides are there."""
    rank = dist.get_rank(links[0])
    for kind, source, target in sorted(queues(schedule)):
        group, one = link(links, kind, source, target), torch.zeros(1, device=device)
        if rank == source:
            dist.send(one, group=group, group_dst=target)
        elif rank == target:
            dist.recv(one, group=group, group_src=source)


# --- stages: where to cut a list of layers, and a weight on two of them


def balance(costs, stages):
    """Cut a list of costs into `stages` non-empty runs of neighbours so that the dearest run is as
    cheap as can be, and among those cuts the most even one. Returns the index range of each stage.
    Raises ValueError for too few items."""
    if len(costs) < stages:
        raise ValueError(
            f"{len(costs)} layers are too few for {stages} pipeline stages: each needs at least one"
        )
    # Best[s][n]: how to put the first n items on s stages: (dearest, squares), cuts
    best = [{0: ((0, 0), [])}]
    for s in range(1, stages + 1):
        row = {}
        for n in range(s, len(costs) - (stages - s) + 1):
            options = []
            for start, ((dearest, squares), cuts) in best[-1].items():
                if start < n:
                    cost = sum(costs[start:n])
                    options.append(
                        ((max(dearest, cost), squares + cost * cost), [*cuts, range(start, n)])
                    )
            row[n] = min(options, key=lambda option: option[0])
        best.append(row)
    return best[-1][len(costs)][1]


def reduce_tied(parameters):
    """Sum the gradient of a weight that several ranks hold, such as a tied matrix on the first and
    the last stage, over its copies. Copies that start equal then stay equal.

        weight.placement = {"partial": [group]}    # on each rank with a copy, before training
        reduce_tied(model.parameters())            # once a step: after its last play, before the norm

    group: dist.new_group of the ranks with a copy. A copy without a gradient counts as zero.
    Two mistakes go unnoticed: a copy without `placement`, and a call after each of several plays
    of one step, which counts the first one's gradient twice. The finish() of ddp.py and zero.py
    does the same: use one of the two."""
    for p in parameters:
        if not isinstance(p, torch.Tensor):
            kind = type(p).__name__
            raise ValueError(f"reduce_tied needs parameters, as model.parameters(), not a {kind}")
        groups = getattr(p, "placement", {}).get("partial", ()) if p.requires_grad else ()
        if groups and p.grad is None:
            p.grad = torch.zeros_like(p)
        if groups and getattr(p.grad, "summed_at", None) == p.grad._version:
            raise RuntimeError("this gradient is summed already: call reduce_tied once a step")
        for group in groups:
            dist.all_reduce(p.grad, group=group)
            p.grad.summed_at = p.grad._version


# --- what a schedule is worth, without ranks


def queues(schedule):
    """{(kind, source, target): (what is sent, what is awaited), in order} of the messages between
    ranks."""
    owner, last = owners(schedule), len(owners(schedule)) - 1
    found = {}
    for rank, actions in enumerate(schedule):
        for a in actions:
            source, target = owner.get(sender(a, last), rank), owner.get(receiver(a, last), rank)
            if source != rank:
                found.setdefault((awaited(a).kind, source, rank), ([], []))[1].append(awaited(a))
            if target != rank:
                sent = awaited(a)._replace(stage=receiver(a, last))
                found.setdefault((awaited(a).kind, rank, target), ([], []))[0].append(sent)
    return found


def check(schedule, microbatches=None):
    """Raise ValueError where a schedule is unsound: an action missing or twice, a rank that waits
    for ever, even if every send blocked until its receive is posted, or messages of a queue awaited
    in another order than they are sent.

    microbatches: of a training step. Left out, as in `play`: those that the schedule has, and it
    may have forwards alone."""
    owner, kinds, ways = owners(schedule), {}, (["F", "B"], ["F", "I", "W"])
    if sorted(owner) != list(range(len(owner))):
        raise ValueError(
            f"the schedule's stages are {sorted(owner)}: number them from 0, and leave none out"
        )
    for rank, actions in enumerate(schedule):
        for kind, m, stage in actions:
            if owner[stage] != rank or microbatches is not None and not 0 <= m < microbatches:
                raise ValueError(
                    f"rank {rank} runs a micro-batch that does not exist, or another rank's stage"
                )
            kinds.setdefault((stage, m), []).append(kind)
    if microbatches is None and {kind for found in kinds.values() for kind in found} == {"F"}:
        ways = (["F"],)
    for m in sorted({m for _, m in kinds}) if microbatches is None else range(microbatches):
        for stage in owner:
            found = kinds.get((stage, m), [])
            if found not in ways:
                raise ValueError(
                    f"stage {stage} runs micro-batch {m} as {' '.join(found) or 'nothing'}"
                )
    for (kind, source, target), (sent, expected) in queues(schedule).items():
        if sent != expected:
            raise ValueError(
                f"rank {target} awaits {kind} messages of rank {source} in another order than they are sent"
            )
    simulate(schedule)
    simulate_blocking(schedule, {key: expected for key, (_, expected) in queues(schedule).items()})


def simulate_blocking(schedule, awaiting):
    """Raise ValueError where a schedule never ends if a send waits until its receive is posted, one
    ahead in each queue."""
    owner, last = owners(schedule), len(owners(schedule)) - 1
    place, done, arrived, moved = [0] * len(schedule), set(), set(), True
    sending, waiting = (
        [None] * len(schedule),
        {key: deque(expected) for key, expected in awaiting.items()},
    )
    while moved:
        moved = False
        for rank, actions in enumerate(schedule):
            if sending[rank] is not None:
                queue, sent = sending[rank]
                if waiting[queue][0] != sent:
                    continue
                arrived.add(sent)
                sending[rank], moved = None, True
            if place[rank] == len(actions):
                continue
            action = actions[place[rank]]
            source, target = (
                owner.get(sender(action, last), rank),
                owner.get(receiver(action, last), rank),
            )
            if source != rank and awaited(action) not in arrived:
                continue
            if source == rank and any(need not in done for need in needs(action, last)):
                continue
            if source != rank:
                waiting[awaited(action).kind, source, rank].popleft()
            if action.kind != "W":
                done.add(awaited(action))
            if target != rank:
                sending[rank] = (
                    (awaited(action).kind, rank, target),
                    awaited(action)._replace(stage=receiver(action, last)),
                )
            place[rank], moved = place[rank] + 1, True
    if any(place[r] < len(row) for r, row in enumerate(schedule)):
        where = ", ".join(f"rank {r} at {at}" for r, at in enumerate(place))
        raise ValueError(f"the schedule is stuck if sends block: {where}")


def simulate(schedule, forward=1.0, input=1.0, weight=1.0, transfer=0.0, time=None):
    """Play a schedule without ranks: each action starts when its rank is free and what it needs is
    there.

    forward, input, weight: times of one stage's F, I and W (B takes input + weight); transfer: of a
    message between ranks. time(action), where given, takes the place of these three.
    Returns for each rank a list of (start, end, action). Raises ValueError where the actions wait
    for each other for ever.
    """
    times = {"F": forward, "B": input + weight, "I": input, "W": weight}
    owner, last = owners(schedule), len(owners(schedule)) - 1
    done, clock, place = {}, [0.0] * len(schedule), [0] * len(schedule)
    spans, moved = [[] for _ in schedule], True
    while moved:
        moved = False
        for r, actions in enumerate(schedule):
            while place[r] < len(actions):
                action = actions[place[r]]
                before = needs(action, last)
                if any(need not in done for need in before):
                    break
                start = max(
                    [
                        clock[r],
                        *(done[need] + transfer * (owner[need.stage] != r) for need in before),
                    ]
                )
                clock[r] = start + (time(action) if time else times[action.kind])
                if action.kind != "W":
                    done[awaited(action)] = clock[r]
                spans[r].append((start, clock[r], action))
                place[r], moved = place[r] + 1, True
    if any(place[r] < len(actions) for r, actions in enumerate(schedule)):
        raise ValueError(
            "the schedule is stuck: " + ", ".join(f"rank {r} at {at}" for r, at in enumerate(place))
        )
    return spans


def utilisation(spans):
    """The part of the time in which ranks work, from the first action of all to the last; 1 minus
    it is the idle part of the step, waits at the ends included."""
    makespan = max(row[-1][1] for row in spans) - min(row[0][0] for row in spans)
    return sum(end - start for row in spans for start, end, _ in row) / (len(spans) * makespan)


def waiting(spans):
    """The longest that a rank waits between its own first and last action: the bubble of the
    zero-bubble papers. It is what is lost if ranks go on to the next step without waiting for each
    other."""
    return max(row[-1][1] - row[0][0] - sum(end - start for start, end, _ in row) for row in spans)


def in_flight(actions, size=lambda stage: 1):
    """The most activations that a rank holds at a time: the number of micro-batches and stages
    between forward and the end of backward, or the sum of their sizes."""
    held = peak = 0
    for action in actions:
        held += {"F": 1, "I": 0, "W": -1, "B": -1}[action.kind] * size(action.stage)
        peak = max(peak, held)
    return peak


# Time that a rank waits, by the papers: p ranks, m micro-batches, v stages a rank, times F, I, W of
# all that a rank holds
BUBBLES = {
    "naive": ("(p-1) m (F+I+W)", lambda p, m, v, f, i, w: (p - 1) * m * (f + i + w)),
    "gpipe": ("(p-1) (F+I+W)", lambda p, m, v, f, i, w: (p - 1) * (f + i + w)),
    "1f1b": ("(p-1) (F+I+W)", lambda p, m, v, f, i, w: (p - 1) * (f + i + w)),
    "interleaved": ("(p-1) (F+I+W) / v", lambda p, m, v, f, i, w: (p - 1) * (f + i + w) / v),
    "zb-h1": ("(p-1) (F+I-W)", lambda p, m, v, f, i, w: (p - 1) * (f + i - w)),
    "zb-h2": ("(p-1) (F+I-2W)", lambda p, m, v, f, i, w: (p - 1) * (f + i - 2 * w)),
    "zb-v": ("0 if F = I = W", lambda p, m, v, f, i, w: 0.0),
    "dualpipev": ("(p-1) (F+I-W) / 2", lambda p, m, v, f, i, w: (p - 1) * (f + i - w) / v),
}


def timeline(spans, unit=1.0):
    """The schedule as text, a row a rank, `unit` of time a cell: forward as its micro-batch's
    number, backward as [1 ], the input's gradient as (1, the weights' as {1, idle as dots. A quote
    marks a rank's later stages."""
    cell, begin = (
        1 + max(len(str(a.microbatch)) for row in spans for *_, a in row),
        min(row[0][0] for row in spans),
    )
    firsts, lines = [min(a.stage for *_, a in row) for row in spans], []
    for first, row in zip(firsts, spans):
        line = ""
        for start, end, (kind, m, stage) in row:
            line += ".".rjust(cell) * (round((start - begin) / unit) - len(line) // cell)
            width, text = cell * max(1, round((end - start) / unit)), str(m)
            later = "'" if stage > first else " "
            if kind == "B" and width > cell:
                line += "[" + (text + later.strip()).center(width - 2) + "]"
            else:
                line += ({"F": later, "B": "[", "I": "(", "W": "{"}[kind] + text).rjust(width)
        lines.append(line)
    return "\n".join(lines)


def trace(spans):
    """The spans of all ranks in the Trace Event Format, as a dict to write as JSON: open it in
    Perfetto or chrome://tracing."""
    begin = min(row[0][0] for row in spans)
    names, events = (
        {"F": "forward", "B": "backward", "I": "input gradient", "W": "weight gradient"},
        [],
    )
    for rank, row in enumerate(spans):
        events.append(
            {"name": "process_name", "ph": "M", "pid": rank, "args": {"name": f"rank {rank}"}}
        )
        for start, end, (kind, m, stage) in row:
            event = {"name": f"{kind}{m}", "cat": names[kind], "ph": "X", "pid": rank, "tid": stage}
            times = {"ts": (start - begin) * 1e6, "dur": (end - start) * 1e6}  # microseconds
            events.append(
                event | times | {"args": {"micro-batch": m, "stage": stage, "kind": names[kind]}}
            )
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def clock_offset(group, device, rounds=8):
    """Seconds to add to this rank's clock to get that of the group's first rank: from the quickest
    of a few pings, in whose middle the answer was given (Mills 1991, NTP)."""
    rank, best = dist.get_rank(group), (float("inf"), 0.0)
    for other in range(1, dist.get_world_size(group)):
        for _ in range(rounds * (rank in (0, other))):
            tick, sent = torch.zeros(1, dtype=torch.float64, device=device), time.perf_counter()
            if rank == 0:
                dist.recv(tick, group=group, group_src=other)
                dist.send(torch.full_like(tick, time.perf_counter()), group=group, group_dst=other)
            else:
                dist.send(tick, group=group, group_dst=0)
                dist.recv(tick, group=group, group_src=0)
                took = time.perf_counter() - sent
                best = min(best, (took, tick.item() - sent - took / 2))
    return best[1]


# --- for model.py's GPT ---


def check_gpt(thing, *names):
    """Raise ValueError for a model, or a config, that is not model.py's."""
    missing = [name for name in names if not hasattr(thing, name)]
    if missing:
        raise ValueError(
            f"this function knows model.py's GPT alone, and a {type(thing).__name__} has no "
            f"{missing[0]}: cut your model into modules, one a stage (balance(costs, stages) says "
            "where), and give play a forward that calls them"
        )


def stage_layers(config, stages):
    """Which layers each stage gets, as ranges: balanced by the work of a token, the output
    projection counted with the last layer. (The embedding is a look-up: no work beside a
    layer's.)"""
    check_gpt(config, "layers", "width", "heads", "kv_heads", "hidden", "mlp", "vocab")
    head_size = config.width // config.heads
    attention = config.width * head_size * (2 * config.heads + 2 * config.kv_heads)
    layer = attention + config.width * config.hidden * (3 if config.mlp == "swiglu" else 2)
    costs = [layer] * config.layers
    costs[-1] += config.width * config.vocab
    return balance(costs, stages)


def split(make_model, stages, mine, tied_group=None):
    """The stages in `mine` of `stages`: {stage: what is left of a GPT}. Layers keep their names.

    make_model(): the whole GPT, on the meta device; called once a stage. Where embedding and output
    projection are one matrix and on different ranks, each holds a copy. `tied_group` holds those
    two ranks: each copy's gradient is a partial sum over it, which `reduce_tied` completes. Raises
    ValueError for more stages than layers, and for such a matrix without that group.
    """
    parts = {}
    for stage in mine:
        if stage not in range(stages):
            raise ValueError(
                f"there is no stage {stage} among {stages}: `mine` numbers the stages from 0"
            )
        model = parts[stage] = make_model()
        check_gpt(model, "config", "embed", "blocks", "head")
        layers = stage_layers(model.config, stages)[stage]
        for name in list(model.blocks):
            if int(name) not in layers:
                del model.blocks[name]
        if model.config.tied and stage in (0, stages - 1) and not {0, stages - 1} <= set(mine):
            if tied_group is None:
                raise ValueError(
                    "a tied matrix on several stages needs tied_group, or its two copies drift apart"
                )
            matrix = model.embed.token.weight
            matrix.placement = {"partial": [tied_group]}
        if stage > 0:
            model.embed = None
        if stage < stages - 1:
            model.head = None
    return parts


class Stages(nn.Module):
    """The stages of a rank as one module. Where it holds both ends of a model with a tied matrix,
    they share it."""

    def __init__(self, parts):
        super().__init__()
        for part in parts.values():
            check_gpt(part, "config", "embed", "blocks", "head")
        self.parts = nn.ModuleDict({str(stage): part for stage, part in parts.items()})
        first = [part for part in parts.values() if part.embed is not None]
        final = [part for part in parts.values() if part.head is not None]
        if first and final and first[0].config.tied:
            final[0].head.out.weight = first[0].embed.token.weight

    def __getitem__(self, stage):
        if str(stage) not in self.parts:
            here = ", ".join(self.parts)
            raise ValueError(
                f"stage {stage} is not here, but {here}: split by this schedule's owners"
            )
        return self.parts[str(stage)]

    def uses(self):
        """Every parameter as often as a micro-batch has backward passes that reach it: the shared
        one twice."""
        return [p for part in self.parts.values() for p in part.parameters()]

    def named(self):
        """(full name, parameter), each once."""
        known = {p: name for part in self.parts.values() for name, p in part.named()}
        return [(name, p) for p, name in known.items()]


# --- demo ---

import json

import harness


def main():
    parser = harness.parser(__doc__, microbatches=8)
    g = parser.add_argument_group("pipeline")
    why = "order of the micro-batches: 1f1b sends and holds least; interleaved, zb-* and dualpipev wait less"
    g.add_argument("--schedule", choices=list(SCHEDULES), default="1f1b", help=why)
    why = "stages a rank holds, for interleaved: the bubble is divided by it, messages multiplied (default: 2)"
    g.add_argument("--chunks", **harness.POSITIVE, help=why)
    harness.plot_flag(g, "draw plan and run, one above the other")
    g.add_argument(
        "--trace", metavar="FILE", help="write the run's last step for Perfetto (ui.perfetto.dev)"
    )
    why = "run nothing: bubble, memory and messages of all schedules, from the simulator, for --nproc ranks"
    g.add_argument("--compare", action="store_true", help=why)
    args = parser.parse_args()
    harness.check_plot(args)
    if args.compare:
        return compare(args.nproc or 4, args.microbatches, args.chunks, args.plot)
    config = harness.configure(args)
    harness.check_batch(args, 1)
    harness.launch(demo, args, check=lambda world: check_layout(args, config, world))


def check_layout(args, config, ranks):
    """Refuse what has no schedule, or more stages than layers. Returns the schedule."""
    try:
        schedule = make(args.schedule, ranks, args.microbatches, args.chunks)
    except ValueError as e:
        raise harness.Refused(str(e))
    stages = len(owners(schedule))
    if config.layers < stages:
        most = config.layers // (stages // ranks)
        hint = f"use at most {most} ranks, " * (most > 0) + "fewer stages a rank, or more --layers"
        raise harness.Refused(
            f"{config.layers} layers are too few for {stages} pipeline stages: {hint}"
        )
    return schedule


def demo(run):
    args, config, rank, ranks = run.args, run.config, run.rank, run.world
    schedule = check_layout(args, config, ranks)
    owner, links = owners(schedule), make_links()
    last, mine = len(owner) - 1, sorted(stage for stage, r in owners(schedule).items() if r == rank)
    ends = dist.new_group(sorted({owner[0], owner[last]}))
    open_links(schedule, links, run.device)
    # Activations go down the stages, gradients up
    run.groups(down=links[:2], up=links[2:], tied=ends)
    model = run.fill(Stages(split(run.meta_model, len(owner), mine, ends)))
    parameters = list(model.parameters())
    optimizer = harness.make_optimizer(parameters, args)
    shape = (args.batch // args.microbatches, config.context, config.width)
    for step in run.steps(optimizer):
        optimizer.zero_grad(set_to_none=False)
        batches, spans = run.microbatches(step), []

        def forward(stage, m, x):
            tokens, targets, samples = batches[m]
            return model[stage](
                tokens if x is None else x, targets=targets, count=run.count, samples=samples
            )

        record = spans if step + 1 == args.steps else None
        losses = play(schedule, forward, shape, run.dtype, run.device, links, record=record)
        reduce_tied(parameters)
        loss = sum(losses, run.zero())  # the last stage has them all, the others none
        dist.all_reduce(loss)
        norm = harness.grad_norm(parameters, [dist.group.WORLD])  # over the stages of all ranks
        run.check(loss, norm, model.named)
        harness.clip(parameters, norm, args.grad_clip)
        optimizer.step()
        run.log(loss, norm)

    one = shape[0] * shape[1] * shape[2] * run.dtype.itemsize
    away = {step: sum(owner.get(stage + step, rank) != rank for stage in mine) for step in (1, -1)}
    sent = {
        ("send", "down"): (
            away[1] * args.microbatches * one,
            "m b T C e, each boundary to another rank",
        ),
        ("send", "up"): (
            away[-1] * args.microbatches * one,
            "m b T C e, each boundary to another rank",
        ),
    }
    sent["all_reduce", "world"] = 2 * (ranks - 1) / ranks * 16, "loss and norm, 8 bytes each"
    if config.tied and last and len({0, last} & set(mine)) == 1:
        sent["all_reduce", "tied"] = (
            config.vocab * config.width * run.dtype.itemsize,
            "V C e, first and last stage",
        )
    whole, layers = run.meta_model(), stage_layers(config, len(owner))
    size = sum(len(layers[stage]) for stage in mine) * sum(
        p.numel() for p in whole.blocks["0"].parameters()
    )
    size += (0 in mine) * sum(p.numel() for p in whole.embed.parameters())
    if last in mine:
        # Counted with the embedding
        matrix = 0 if config.tied and 0 in mine else config.vocab * config.width
        size += sum(p.numel() for p in whole.head.norm.parameters()) + matrix
    size *= run.dtype.itemsize
    held = run.states(size, "blocks of the stages, and the ends' matrices")
    flying = in_flight(schedule[rank], lambda stage: len(layers[stage]))
    held["activations_peak"] = (
        flying * harness.activation_bytes(config, shape[0], run.dtype.itemsize),
        "in flight x blocks",
    )
    offset = clock_offset(dist.group.WORLD, run.device)
    rows = [None] * ranks
    dist.all_gather_object(
        rows, [(start + offset, end + offset, tuple(action)) for start, end, action in spans]
    )
    real = [[(start, end, Action(*action)) for start, end, action in row] for row in rows]
    plan, p, m, v = simulate(schedule), ranks, args.microbatches, len(mine)
    text, formula = BUBBLES[args.schedule]
    # A stage's F is one unit of the plan, so a rank's is v
    ideal, wait = formula(p, m, v, v, v, v), waiting(plan)
    unit = (max(row[-1][1] for row in real) - min(row[0][0] for row in real)) / max(
        row[-1][1] for row in plan
    )
    notes = [
        f"layers of the stages: {' '.join(f'{r.start}-{r.stop - 1}' for r in layers)}",
        f"activations held at most, in stages x micro-batches, by rank: {' '.join(str(in_flight(a)) for a in schedule)}",
        f"a rank waits {wait:g} units of {3 * m * v}, by the formula {ideal:g}: {text}",
        f"utilisation of the step {utilisation(plan):.1%}",
        "plan, if forward and each half of backward take as long; 1 forward, [1 ] backward or (1 of inputs, {1 of weights:",
        *(f"    {line}" for line in timeline(plan).splitlines()),
        f"run, the last step ({unit * 1000:.1f} ms a cell), utilisation {utilisation(real):.1%} (ranks may share cores):",
        *(f"    {line}" for line in timeline(real, unit).splitlines()),
    ]
    if rank == 0 and args.trace:
        with open(args.trace, "w") as f:
            json.dump(trace(real), f)
    if rank == 0 and args.plot:
        title = f"{args.schedule}, {p} ranks, {m} micro-batches"
        plot(
            args.plot,
            [(f"{title}: plan", plan, "units of time"), ("run, last step", real, "seconds")],
        )
    return run.receipt({"pp": p, "schedule": args.schedule, "microbatches": m}, sent, held, notes)


def plot(name, pictures):
    """Timelines one above the other, each (title, spans, unit): a row a rank, a bar an action,
    later stages darker."""
    plt = harness.pyplot()
    height = sum(len(spans) for _, spans, _ in pictures)
    size = (12, 1.5 + (0.5 if len(pictures) < 3 else 0.3) * height)
    figure, axes = plt.subplots(
        len(pictures), figsize=size, squeeze=False, sharex=len(pictures) > 2, layout="constrained"
    )
    colors = {"F": ("#9ecae1", "#3182bd"), "B": ("#fdae6b", "#e6550d"), "W": ("#a1d99b", "#31a354")}
    colors["I"] = colors["B"]
    for ax, (title, spans, unit) in zip(axes[:, 0], pictures):
        begin = min(row[0][0] for row in spans)
        for rank, row in enumerate(spans):
            first = min(action.stage for *_, action in row)
            for start, end, (kind, m, stage) in row:
                color = colors[kind][stage > first]
                ax.barh(
                    rank,
                    end - start,
                    0.9,
                    start - begin,
                    color=color,
                    edgecolor="white",
                    linewidth=0.4,
                )
                ax.text(
                    (start + end) / 2 - begin, rank, str(m), ha="center", va="center", fontsize=6
                )
        ax.set_yticks(range(len(spans)), [f"rank {rank}" for rank in range(len(spans))])
        ax.invert_yaxis()
        ax.set_xlabel(unit)
        ax.set_title(f"{title}   (utilisation {utilisation(spans):.1%})", fontsize=10, loc="left")
        ax.spines[["top", "right", "left"]].set_visible(False)
    legend = {
        "forward (dark: a rank's later stages)": "#9ecae1",
        "backward, or its input's gradient": "#fdae6b",
    }
    legend |= {"weights' gradient": "#a1d99b"}
    handles = [plt.Rectangle((0, 0), 1, 1, color=color) for color in legend.values()]
    axes[0, 0].legend(
        handles,
        legend,
        ncols=3,
        frameon=False,
        fontsize=8,
        loc="lower right",
        bbox_to_anchor=(1, 1),
    )
    harness.save(figure, name)


def compare(p, m, chunks=None, picture=None):
    """Every schedule that exists for p ranks and m micro-batches: the papers' table, and a picture,
    from the simulator."""
    pictures = []
    print(
        f"{p} ranks, {m} micro-batches; a rank's forward, input gradient and weight gradient of all its layers take 1 each"
    )
    print(
        "  schedule      stages   a rank waits: simulated, by the paper   utilisation   activations held    sends a rank"
    )
    for name in SCHEDULES:
        try:
            schedule = make(name, p, m, chunks if name == "interleaved" else None)
        except ValueError as e:
            print(f"  {name:12s}  {e}")
            continue
        check(schedule, m)
        v = len(owners(schedule)) // p
        spans = simulate(schedule, 1 / v, 1 / v, 1 / v)
        pictures += [(name, spans, "")] * (name != "naive")  # which is three times as long
        text, formula = BUBBLES[name]
        held = max(in_flight(actions) for actions in schedule) / v
        owner, sends = owners(schedule), [0] * p
        for rank, actions in enumerate(schedule):
            sends[rank] = sum(owner.get(receiver(a, len(owner) - 1), rank) != rank for a in actions)
        wait = f"{waiting(spans):6.2f}  {formula(p, m, v, 1, 1, 1):6.2f} = {text}"
        used = utilisation(spans)
        print(f"  {name:12s}{v:6d}   {wait:42s}{used:9.1%}{held:15.2f}{max(sends):18}")
    print(
        "  held: in activations of one micro-batch in all of a rank's layers. Utilisation: of the step, from the first"
    )
    print(
        "  action to the last; a rank that waits little between its own actions may still wait for the others at its end."
    )
    if picture:
        plot(picture, pictures)


if __name__ == "__main__":
    harness.script(main)
