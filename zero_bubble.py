"""Zero bubble: backward in two parts. The one that another rank waits for comes first.

    3 ranks, 4 micro-batches. "0" is the forward F of micro-batch 0, "[0 ]" its backward. "(0" and
    "{0" are the two parts I and W. F, I and W take one unit each. A dot is a wait.

        1F1B, 18 units                          ZB-H1, 14 units
        0 1 2 . . . .[0 ] 3[1 ] .[2 ] .[3 ]     0 1 2 . .(0{0 3(1{1(2{2(3{3
        . 0 1 . .[0 ] 2[1 ] 3[2 ] .[3 ] . .     . 0 1 .(0 2(1{0 3(2{1(3{2{3
        . . 0[0 ] 1[1 ] 2[2 ] 3[3 ] . . . .     . . 0(0 1(1 2(2{0 3(3{1{2{3

Split: backward of y = x A^T is two matmuls. dy is the gradient of y.

    I   dx = dy A      The stage before waits for it. I also has the gradients of biases, norms and
                       embeddings. The papers call this part B
    W   dA = dy^T x    Nobody waits for it before the optimizer's step, so a rank computes it where
                       it would wait. Until then it keeps the pair (x, dy)

Sent: what pipeline.py sends, and with two stages per rank twice as many messages. The schedules:
    zb-h1       1F1B's memory, a third of its bubble
    zb-h2       no bubble where F = I = W, nearly twice the memory
    zb-v        no bubble where F = I = W, 1F1B's memory, two stages per rank
    dualpipev   DeepSeek's order, here one by one: dualpipe.py overlaps. Two stages per rank

Limits: the pairs take memory. "No bubble" ends with a rank's last action: to clip it waits for all.
Under torch.autocast nothing is put off: cast weights instead. docs/learn/pipelines.md compares.

    torchrun --nproc_per_node=4 zero_bubble.py --layers 8 --schedule zb-v

Qi et al.: zero bubble arXiv:2401.10241; ZB-V arXiv:2405.15362. DualPipe arXiv:2412.19437, 3.2.1.
"""

import collections
import contextlib
import functools

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

from pipeline import Pipeline, Row, Schedule, StageRunner, gpipe, interleaved, one_f_one_b

# --- the plainest form: a linear layer whose backward is cut in two


class SplitLinear(nn.Linear):
    """A linear layer that computes its weight's gradient when asked. x must require a gradient.

        layer = SplitLinear(4, 3)
        loss = layer(x).square().sum()
        loss.backward()            # I: x.grad is there, and goes to the stage before
        layer.backward_weight()    # W: layer.weight.grad is there

    Each call takes the oldest pair: a stage's W come in the order of its I."""

    def __init__(self, *sizes, **options):
        super().__init__(*sizes, **options)
        self.pairs = collections.deque()  # (x, gradient of y) of each backward, oldest first

    def forward(self, x):
        # As the weight is detached, autograd computes the gradients of x and of the bias only
        y = F.linear(x, self.weight.detach(), self.bias)
        y.register_hook(lambda gradient: self.pairs.append((x.detach(), gradient)))
        return y

    def backward_weight(self):
        gradient = weight_gradient(*self.pairs.popleft())
        self.weight.grad = gradient if self.weight.grad is None else self.weight.grad + gradient


def weight_gradient(x, gradient):
    return gradient.flatten(0, -2).T @ x.flatten(0, -2)  # (out, in)


# --- what it is for: 1F1B with weight gradients in its gaps
#     F    y = stage(x), sent on                   as in pipeline.plain_gpipe
#     I    y.backward(gradient), x.grad sent       of all layers, before any weight's gradient
#     W    layer.backward_weight() of each layer   nothing is sent


def zb_h1(rank, ranks, microbatches, reach=1):
    """1F1B with backward in two parts. Rank r has r fewer forwards in flight than rank 0. So it can
    put off r weight gradients in rank 0's memory. They fill its gaps at the end.

        rank 0 of 3:  F0 F1 F2 I0 W0 F3 I1 W1 I2 W2 I3 W3
        rank 1 of 3:  F0 F1 I0 F2 I1 W0 F3 I2 W1 I3 W2 W3
        rank 2 of 3:  F0 I0 F1 I1 F2 I2 W0 F3 I3 W1 W2 W3

    reach: how many forwards a rank is ahead of the next. 2 (zb-h2): no gap before backward."""
    ahead = min(reach * (ranks - 1 - rank), microbatches)
    put_off = min(reach * rank, microbatches)
    row = Row("F" * ahead, rank)
    for i in range(microbatches):
        if i < microbatches - ahead:
            row.add("F", rank)
        row.add("I", rank)
        if i >= put_off:
            row.add("W", rank)
    row.add("W" * put_off, rank)
    return row


# --- the executor: a Pipeline for F, I and W


class SplitPipeline(Pipeline):
    """A Pipeline that runs I and W as well. Use it as in Pipeline's example, with

        schedule = find_schedule("zb-v", ranks, microbatches)
        pipeline = SplitPipeline(schedule, forward, (b, T, C), dtype, device)

    Beside ZeRO or FSDP: docs/use/two-techniques.md."""

    def make_runner(self):
        return SplitRunner(self.forward, self.row)


class SplitRunner(StageRunner):
    """Where backward has two parts, the forward runs under a Deferred (below). That does for every
    linear layer what SplitLinear does, so I is an ordinary backward."""

    def __init__(self, stage_forward, row):
        super().__init__(stage_forward, row)
        self.deferred_of = {(a.microbatch, a.stage): Deferred() for a in row if a.kind == "W"}

    def run(self, action, received):
        kind, m, stage = action
        if kind == "W":
            return self.deferred_of.pop((m, stage)).accumulate()
        if kind == "I":
            action = action._replace(kind="B")
        # In I, too: checkpointed layers run their forward again
        with self.deferred_of.get((m, stage), contextlib.nullcontext()):
            return super().run(action, received)


# --- any model: each F.linear and F.grouped_mm does what SplitLinear does


class Deferred(TorchFunctionMode):
    """While it is on, each F.linear and F.grouped_mm leaves its weight's gradient for later.

        deferred = Deferred()
        with deferred:
            loss = F.cross_entropy(model(x), targets, reduction="sum") / target_count
            loss.backward()    # I: gradients of inputs, biases, norms and embeddings
        deferred.accumulate()  # W: gradients of weights. Without this line they are missing

    Deferred: weights that are parameters or views of them. With I come the gradients of computed
    weights, of all weights under autocast, and of addmm, matmul, bmm and nn.MultiheadAttention.

    Set weight.used_twice = True if the stage also uses the weight outside F.linear, as a tied
    embedding. Else its gradient comes in two parts, and the hooks of DDP and ZeRO expect one."""

    def __init__(self):
        super().__init__()
        self.entries = []  # (weight, x, gradient of y, offsets of F.grouped_mm), as in backward

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if function in (F.linear, torch._grouped_mm):  # the latter is what F.grouped_mm calls
            return self.defer(function, *args, **kwargs)
        if function is torch.Tensor.backward:
            # It turns the mode off, which checkpointed layers need: they run their forward again
            with self:
                edge = torch.autograd.graph.get_gradient_edge(args[0])
                return torch.autograd.backward([edge], [kwargs.pop("gradient")], **kwargs)
        return function(*args, **kwargs)

    def defer(self, function, input, weight, *rest, **options):  # input: F.linear's own name
        """As SplitLinear.forward, but SaveInput holds the input: then checkpointing can drop it."""
        if not can_defer(input, weight):
            return function(input, weight, *rest, **options)
        input = SaveInput.apply(input)
        node = input.grad_fn

        def keep_pair(gradient):
            [x] = node.saved_tensors
            self.entries.append((weight, x.detach(), gradient, options.get("offs")))

        y = function(input, weight.detach(), *rest, **options)
        # F.linear of a 3-D x returns a view. An in-place ReLU would give it a new node, not hooked
        if y._is_view():
            y = torch.ops.aten._unsafe_view(y, y.shape)
        y.register_hook(keep_pair)
        return y

    def accumulate(self):
        """Add the deferred gradients to their weights, in one pass of autograd: DDP and ZeRO take
        the end of a pass for the end of backward."""
        # In the order of backward: autograd runs the newest node first
        roots = [WeightGradient.apply(*entry) for entry in reversed(self.entries)]
        self.entries.clear()
        if roots:
            torch.autograd.backward(roots)


def can_defer(x, weight):
    base = weight if weight._base is None else weight._base
    if not isinstance(base, nn.Parameter) or getattr(base, "used_twice", False):
        return False
    if torch.is_autocast_enabled(x.device.type):  # W would not be cast
        return False
    return torch.is_grad_enabled() and x.requires_grad and weight.requires_grad


class SaveInput(torch.autograd.Function):
    """Identity. Saves x in the graph: there activation checkpointing drops it after forward. When
    the hook asks for it, recomputation stops at x, the last saved tensor: before the matmul."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        return gradient


class WeightGradient(torch.autograd.Function):
    """A node whose backward computes a weight's gradient. Autograd adds it to .grad before it runs
    the next node, so one at a time is in memory."""

    @staticmethod
    def forward(ctx, weight, x, gradient, offsets):
        ctx.save_for_backward(x, gradient, offsets)
        return weight.new_zeros(())  # a root for backward: its value is not used

    @staticmethod
    def backward(ctx, _):
        x, gradient, offsets = ctx.saved_tensors
        if offsets is None:
            result = weight_gradient(x, gradient)
        else:
            result = F.grouped_mm(x.T, gradient, offs=offsets)  # (E, in, out)
        return result, None, None, None


# --- schedules with two stages per rank


def zb_v(rank, ranks, microbatches):
    """Rank r holds the stages r (near the input) and 2 p - 1 - r (far): of 3 ranks 0 and 5, 1 and
    4, 2 and 3. The way through the ranks is a V with both ends on rank 0. With 5 micro-batches,
    where a quote marks the forward of a far stage:

        0 1 2 3 4'0(0{0'1(1{1'2(2{2(0{0'3(3{3(1{1'4(4{4(2{2(3{3(4{4
        . 0 1 2'0 3'1(0{0'2(1{1 4(0{0'3(2{2(1{1'4(3{3(2(4(3{2(4{3{4{4
        . . 0'0 1'1 2'2(0{0 3(0{0'3(1{1 4(1{1'4(2{2(2(3(3(4(4{2{3{4{3{4"""
    near, far, row = rank, 2 * ranks - 1 - rank, Row()
    # The plan needs 2 p - 1 micro-batches. Extra ones are dropped at the end, on all ranks: what is
    # left is still a valid order
    padded = max(microbatches, 2 * ranks - 1)
    # Fill, in row 0 up to "{2": forwards, until the first micro-batch is back from the last rank
    row.add("F" * (2 * (ranks - rank) - 1), near)
    row.add("F", *[far, near] * rank)
    row.add("FIW" * (ranks - rank), far)
    # Steady, in row 0 up to the first "{4": F I W of each side in turn
    while row.counts["F", far] < padded:
        if row.counts["F", near] < padded:
            row.add("F", near)
        row.add("IW", near)
        row.add("FIW", far)
    # Drain: input gradients first, weights' where the rank would wait
    row.add("I", *[near, far] * rank)
    row.add("IW" * (ranks - rank), near)
    for stage in (far, near):
        row.add("W" * (padded - row.counts["W", stage]), stage)
    return [action for action in row if action.microbatch < microbatches]


def dualpipev(rank, ranks, microbatches):
    """DualPipe's actions, with the stages of zb_v. The phases are those of DeepSeek's code. In 4, 5
    dualpipe.py overlaps each forward with the backward that follows."""
    if microbatches < 2 * ranks:
        count = f"at least {2 * ranks} micro-batches, twice as many as ranks"
        raise ValueError(f"dualpipev needs {count}, not {microbatches}")
    near, far, row = rank, 2 * ranks - 1 - rank, Row()
    later_ranks = ranks - 1 - rank
    # 1: forwards, until the first micro-batch is back on the far side
    row.add("F" * (2 * later_ranks), near)
    row.add("F", *[near, far] * (rank + 1))  # 2: the V is full: forwards of both sides in turn
    row.add("IWF" * later_ranks, far)  # 3: the far side's first backwards, in two parts
    row.counts["B", far] = later_ranks  # the next micro-batch's backward is whole
    for _ in range(microbatches - 2 * ranks + rank + 1):  # 4: forward and backward of both sides
        row.add("F", near)
        row.add("BF", far)
        row.add("B", near)
    for _ in range(later_ranks):  # 5: no forwards of the near side are left
        row.add("BF", far)
        row.add("B", near)
    sides = [far, near] * (rank + 1)  # 6: backwards only, the first half of them whole
    row.add("B", *sides[: rank + 1])
    for stage in (near, far):  # the next ones are in two parts
        row.counts["I", stage] = row.counts["W", stage] = row.counts["B", stage]
    row.add("I", *sides[rank + 1 :])
    waiting_w = sides[rank + 1 :] + [near] * later_ranks  # stages whose W is to come, in order
    for stage in waiting_w[:later_ranks]:  # 7: the last I of the near side, with W in between
        row.add("W", stage)
        row.add("I", near)
    row.add("W", *waiting_w[later_ranks:])  # 8: the W that are left
    return row


zb_h2 = functools.partial(zb_h1, reach=2)
WHOLE = {"gpipe": gpipe, "1f1b": one_f_one_b, "interleaved": interleaved}
SPLIT = {"zb-h1": zb_h1, "zb-h2": zb_h2, "zb-v": zb_v, "dualpipev": dualpipev}
ALL_SCHEDULES = WHOLE | SPLIT


@functools.cache
def find_schedule(name, ranks, microbatches, chunks=None):
    """The schedule of that name. chunks: stages per rank of interleaved; others have their own
    number. Raises ValueError where none exists for these numbers."""
    row, options = ALL_SCHEDULES[name], {}
    if chunks and name == "interleaved":
        options["chunks"] = chunks
    return Schedule(row(rank, ranks, microbatches, **options) for rank in range(ranks))


# --- demo ---

import harness
import pipeline  # its demo has the training loop


def main():
    """pipeline.py's demo, with zb-h1 where it has 1f1b."""
    pipeline.main(__doc__, default="zb-h1")


if __name__ == "__main__":
    harness.script(main)
