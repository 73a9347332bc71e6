"""Zero bubble: backward in two parts. The one that another rank waits for comes first.

    3 ranks, 4 micro-batches. "0" is the forward F of micro-batch 0, "[0 ]" its backward. "(0" and
    "{0" are the two parts I and W. F, I and W take one unit each. A dot is a wait.

        1F1B, 18 units                          ZB-H1, 14 units
        0 1 2 . . . .[0 ] 3[1 ] .[2 ] .[3 ]     0 1 2 . .(0{0 3(1{1(2{2(3{3
        . 0 1 . .[0 ] 2[1 ] 3[2 ] .[3 ] . .     . 0 1 .(0 2(1{0 3(2{1(3{2{3
        . . 0[0 ] 1[1 ] 2[2 ] 3[3 ] . . . .     . . 0(0 1(1 2(2{0 3(3{1{2{3

Split: backward of y = x A^T is two matmuls. dy is the gradient of y.

    I   dx = dy A      The stage before waits for it. I also computes the gradients of biases, norms
                       and embeddings. The papers call it B; here B is I and W together
    W   dA = dy^T x    Nobody waits for it before the optimizer's step, so a rank computes it where
                       it would wait. Until then it keeps the pair (x, dy)

Sent: what pipeline.py sends. The schedules (docs/learn/pipelines.md compares them):
    zb-h1   1F1B's memory, a third of its bubble
    zb-h2   no bubble, nearly twice the memory
    zb-v    no bubble, 1F1B's memory; two stages per rank, so twice as many messages

Limits: a micro-batch whose W is put off holds its pairs, which takes memory, too. "No bubble" (with
F = I = W and at least 2 p - 1 micro-batches) is between a rank's first action and its last. The
waits before and after are gone, and zb-h2 pays, only if a rank begins the next step while others
work: not with clipping, whose norm waits for all. Not for a compiled stage. Under torch.autocast
nothing is deferred: cast the weights instead.

    torchrun --nproc_per_node=4 -m advanced.zero_bubble --layers 8
    python -m receipts.pipeline

Qi et al. 2023, Zero bubble, arXiv:2401.10241. Qi et al. 2024, ZB-V, arXiv:2405.15362.
"""

import collections
import contextlib
import functools

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

from pipeline import Pipeline, Row, plain_pipeline

# --- the plainest form: a linear layer whose backward is cut in two


class SplitLinear(nn.Linear):
    """A linear layer that computes its weight's gradient when asked. For a trained weight that is
    used once per micro-batch, an x that requires a gradient, and no in-place activation behind it.

        layer, x = SplitLinear(4, 3), torch.randn(5, 4, requires_grad=True)
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
        if y.requires_grad:  # not in an evaluation
            y.register_hook(lambda gradient: self.pairs.append((x.detach(), gradient)))
        return y

    def backward_weight(self):
        if self.weight.grad is None:
            self.weight.grad = torch.zeros_like(self.weight)
        self.weight.grad += weight_gradient(*self.pairs.popleft())


def weight_gradient(x, gradient):
    return gradient.flatten(0, -2).T @ x.flatten(0, -2)  # (out, in)


# --- what it is for: 1F1B with weight gradients where a rank would wait
#     F    y = stage(x), sent on
#     I    y.backward(gradient), x.grad sent       of all layers, but not of their weights
#     W    layer.backward_weight() of each layer   nothing is sent


def zb_h1(rank, ranks, microbatches, reach=1):
    """1F1B with backward in two parts. Rank r holds r micro-batches fewer than rank 0. So it can
    defer r weight gradients without more memory than rank 0 needs. They fill the wait at its end.

        rank 0 of 3:  F0 F1 F2 I0 W0 F3 I1 W1 I2 W2 I3 W3
        rank 1 of 3:  F0 F1 I0 F2 I1 W0 F3 I2 W1 I3 W2 W3
        rank 2 of 3:  F0 I0 F1 I1 F2 I2 W0 F3 I3 W1 W2 W3

    reach=2 is zb-h2: twice as many forwards ahead, and no wait before the first backward."""
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


zb_h2 = functools.partial(zb_h1, reach=2)


def plain_zb_h1(stage, inputs, targets, loss_fn, like, down, up):
    """plain_pipeline with this row, for a stage whose linear layers are SplitLinears."""
    rank, ranks = dist.get_rank(down), dist.get_world_size(down)
    split = [layer for layer in stage.modules() if isinstance(layer, SplitLinear)]

    # A generator: what stands between two yields runs between two actions of plain_pipeline. That
    # takes I for a backward, and has sent x.grad when it asks for the next: so W runs meanwhile
    def row():
        for kind, _, _ in zb_h1(rank, ranks, len(inputs)):
            if kind != "W":
                yield kind
            else:
                for layer in split:
                    layer.backward_weight()

    return plain_pipeline(stage, row(), inputs, targets, loss_fn, like, down, up)


# --- any model: a Pipeline for F, I and W, in which each F.linear does what SplitLinear does


class SplitPipeline(Pipeline):
    """A Pipeline that runs I and W as well. Use it as pipeline.py's demo does, with

        schedule = Schedule(zb_v(rank, ranks, microbatches) for rank in range(ranks))
        pipeline = SplitPipeline(schedule, forward, (b, T, C), dtype, device)

    F and I of a micro-batch run inside a Deferred (below): I is an ordinary backward, and W adds
    the weight gradients that the Deferred has put off.

    around: a context manager, entered as around(action) while an action computes: for ZeRO or FSDP
    (docs/use/two-techniques.md), or to count."""

    def __init__(self, *args, around=contextlib.nullcontext, **options):
        super().__init__(*args, **options)
        self.around = around
        self.split = {(a.microbatch, a.stage) for a in self.row if a.kind == "W"}
        self.deferred = {}  # {(micro-batch, stage): its Deferred, from F to W}

    def run_action(self, action):
        received = self.receive(action)
        with self.around(action):
            result = self.compute(action, received)
        self.send(action, result)

    def compute(self, action, received):
        kind, m, stage = action
        if (m, stage) not in self.split:
            return super().compute(action, received)
        if kind == "F":
            self.deferred[m, stage] = Deferred()
        if kind == "W":
            return self.deferred.pop((m, stage)).accumulate()
        with self.deferred[m, stage]:
            return super().compute(action, received)


class Deferred(TorchFunctionMode):
    """While it is on, each F.linear and F.grouped_mm leaves its weight's gradient for later.

        deferred = Deferred()
        with deferred:
            loss = F.cross_entropy(model(x), targets, reduction="sum") / target_count
            loss.backward()    # I: gradients of inputs, biases, norms and embeddings
        deferred.accumulate()  # W: gradients of weights. Without this line they are missing

    The weights are parameters, or views of them. All other weight gradients are part of I: of a
    weight that is computed, of all weights under autocast, and in addmm, matmul, bmm and
    nn.MultiheadAttention.

    weight.used_twice = True leaves all of a weight's gradient to I: for a tied embedding under DDP
    or ZeRO, whose hooks expect one gradient."""

    def __init__(self):
        super().__init__()
        # (weight, x, gradient of y, offsets of F.grouped_mm), in the order of backward
        self.entries = []

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if function in (F.linear, torch._grouped_mm):  # F.grouped_mm calls torch._grouped_mm
            return self.defer(function, *args, **kwargs)
        if function is torch.Tensor.backward:
            return self.backward(*args, **kwargs)
        return function(*args, **kwargs)

    def defer(self, function, input, weight, *rest, **options):  # named as F.linear's arguments
        """As SplitLinear.forward, but autograd's graph holds x: checkpointing may drop it there."""
        if not can_defer(input, weight):
            return function(input, weight, *rest, **options)
        input = SaveInput.apply(input)
        graph_node = input.grad_fn

        def keep_pair(gradient):
            [x] = graph_node.saved_tensors
            self.entries.append((weight, x.detach(), gradient, options.get("offs")))

        y = function(input, weight.detach(), *rest, **options)
        # F.linear of a 3-D x returns a view. An in-place ReLU gives a view a new node, without the
        # hook. _unsafe_view makes it a tensor of its own, without a copy
        if y._is_view():
            y = torch.ops.aten._unsafe_view(y, y.shape)
        y.register_hook(keep_pair)
        return y

    def backward(self, y, gradient=None, **options):
        """y.backward(gradient) with this mode on. torch switches a mode off while it runs the
        mode's own methods. But a checkpointed layer runs its forward again in here, and must save
        what it saved at first."""
        with self:
            # The edge: for the tensor y torch would switch the mode off again
            edge = torch.autograd.graph.get_gradient_edge(y)
            torch.autograd.backward([edge], [gradient], **options)

    def accumulate(self):
        """Add the deferred gradients to their weights, in one pass of autograd: DDP and ZeRO take
        the end of a pass for the end of backward."""
        # Autograd runs the newest root first. Reversed, gradients come in backward's order
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
    """Identity that saves x in autograd's graph, from which activation checkpointing drops it and
    makes it again. Before the product, not with it: the second run of a region stops as soon as all
    is saved, so a product at its end does not run again."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        return gradient


class WeightGradient(torch.autograd.Function):
    """A node whose backward computes a weight's gradient. Autograd adds it to .grad before it runs
    the next node: one at a time is in memory. (torch.autograd.backward(weights, gradients) would
    need all of a stage's at once.)"""

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
    """Rank r holds two stages: r, near the input, and 2 p - 1 - r, far from it. Of 3 ranks rank 0
    holds 0 and 5, rank 1 holds 1 and 4, rank 2 holds 2 and 3. The way through the ranks is a V with
    both ends on rank 0. Rank 1's row with 5 micro-batches; a quote marks the far stage:

        F0 F1 F2 F0' F3 F1' I0' W0' F2' I1' W1'
        F4 I0 W0 F3' I2' W2' I1 W1 F4' I3' W3'
        I2 I4' I3 W2 I4 W3 W4' W4"""
    near, far, row = rank, 2 * ranks - 1 - rank, Row()
    # The plan needs 2 p - 1 micro-batches, as rank 0 runs so many forwards first. With fewer, plan
    # for that many, and drop the actions of the extra ones at the end, on every rank
    padded = max(microbatches, 2 * ranks - 1)
    # Fill, the first line: forwards, until the first micro-batch is back from the last rank
    row.add("F" * (2 * (ranks - rank) - 1), near)
    row.add("F", *[far, near] * rank)
    row.add("FIW" * (ranks - rank), far)
    # Steady, the second line: both sides in turn
    while row.counts["F", far] < padded:
        if row.counts["F", near] < padded:
            row.add("F", near)
        row.add("IW", near)
        row.add("FIW", far)
    # Drain, the third line: input gradients first, weights' where the rank would wait
    row.add("I", *[near, far] * rank)
    row.add("IW" * (ranks - rank), near)
    for stage in (far, near):
        row.add("W" * (padded - row.counts["W", stage]), stage)
    return [action for action in row if action.microbatch < microbatches]


# --- demo ---

import harness
import proof
from pipeline import make_links, open_links, reduce_tied
from receipts import pipeline as schedules  # its tables and formulas


def main():
    parser = harness.parser(__doc__, microbatches=8)
    g = parser.add_argument_group("pipeline")
    g.add_argument("--schedule", choices=schedules.SCHEDULES, default="zb-h1")
    g.add_argument("--chunks", **harness.POSITIVE, help="stages a rank of interleaved (default: 2)")
    args = parser.parse_args()
    config = harness.configure(args)
    harness.check_batch(args, 1)  # refuses one that does not divide into micro-batches
    proof.launch(demo, args, check=lambda world: schedules.check_schedule(args, config, world))


def demo(run):
    """run: this process's flags, device, data and receipt (proof/run.py)."""
    args, config, rank, ranks = run.args, run.config, run.rank, run.world
    # By name; "zb-h1" is Schedule(zb_h1(rank, ranks, microbatches) for rank in range(ranks))
    schedule = schedules.find_schedule(args.schedule, ranks, args.microbatches, args.chunks)
    stages, last = schedule.stages(rank), schedule.last
    links = open_links(make_links(), schedule, run.device)
    ends = dist.new_group(sorted({schedule.owner[0], schedule.owner[last]}))
    run.groups(down=links[:2], up=links[2:], tied=ends)  # names in the receipt
    # The range of layers of each stage, balanced by FLOPs. `cut` balances their number
    layers = schedules.stage_layers(config, last + 1)
    parts = harness.split(run.meta_model, layers, stages, ends)
    model = run.fill(harness.Stages(parts))
    parameters = list(model.parameters())
    # harness.split has marked a matrix that the first and the last stage share, on two ranks
    tied = [p for p in parameters if "partial" in getattr(p, "placement", {})]
    optimizer = harness.make_optimizer(parameters, args)
    in_w = schedules.GradientsInW(parameters)  # of zb-*: counts for the receipt

    def forward(stage, m, x):
        tokens, targets, samples = batches[m]  # of the step: set by the loop below
        x = tokens if x is None else x
        return model[stage](x, targets=targets, target_count=run.target_count, sample_ids=samples)

    shape = (args.batch // args.microbatches, config.context, config.width)
    given = schedule, forward, shape, run.dtype, run.device, links
    pipeline = SplitPipeline(*given, around=in_w)
    for step in run.steps(optimizer):
        batches = run.microbatches(step)
        optimizer.zero_grad(set_to_none=False)  # gradients stay in memory: the receipt counts them
        losses = pipeline.run()
        for weight in tied:
            reduce_tied(weight, ends)
        loss = sum(losses, start=run.zero())  # zero on ranks without the last stage
        dist.all_reduce(loss)
        norm = harness.grad_norm(parameters, [dist.group.WORLD])  # over the stages of all ranks
        run.check(loss, norm, model.named)
        harness.clip(parameters, norm, args.grad_clip)
        optimizer.step()
        run.log()
    return schedules.receipt(run, schedule, layers, in_w)


if __name__ == "__main__":
    harness.script(main)
