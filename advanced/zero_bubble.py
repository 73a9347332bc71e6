"""Zero bubble: backward in two parts. The one that another rank waits for comes first.

    3 ranks, 4 micro-batches. "0" is the forward F of micro-batch 0, "[0 ]" its backward. "(0" and
    "{0" are the two parts I and W. F, I and W take one unit each. A dot is a wait.

        1F1B, 18 units                          ZB-H1, 14 units
        0 1 2 . . . .[0 ] 3[1 ] .[2 ] .[3 ]     0 1 2 . .(0{0 3(1{1(2{2(3{3
        . 0 1 . .[0 ] 2[1 ] 3[2 ] .[3 ] . .     . 0 1 .(0 2(1{0 3(2{1(3{2{3
        . . 0[0 ] 1[1 ] 2[2 ] 3[3 ] . . . .     . . 0(0 1(1 2(2{0 3(3{1{2{3

Split     Backward of a linear layer y = x A^T is two matmuls. dy is the gradient of y.
          I  dx = dy A     The stage before waits for it. (The papers call it B.)
          W  dA = dy^T x   Nobody waits for it before the optimizer's step. So a rank computes it
                           where it would wait, and keeps the pair (x, dy) until then.
Schedules zb-h1  1F1B's memory, and a third of its bubble
          zb-h2  no bubble, nearly twice the memory
          zb-v   no bubble, 1F1B's memory; two stages per rank, so twice as many messages
Sent      As in pipeline.py: b T C e bytes per micro-batch, boundary and direction.
Limits    "No bubble" needs F = I = W and at least 2 p - 1 micro-batches on p ranks. It means no
          wait between a rank's first action and its last. Those before and after stay, because
          clipping's norm waits for all ranks. So a step with zb-h2 is no faster than with zb-h1,
          and slower with few micro-batches (p = m = 8: 34 units, zb-h1 31). More:
          docs/learn/pipelines.md.

    torchrun --nproc_per_node=4 -m advanced.zero_bubble    (needs model.py and pipeline.py)

Qi et al. 2023, Zero bubble, arXiv:2401.10241. Qi et al. 2024, ZB-V, arXiv:2405.15362.
"""

import argparse
import collections
import contextlib

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

from pipeline import Pipeline, Row, plain_pipeline

# --- the plainest form: weight gradients wait in a store until the row says "W"


class InputGradient(torch.autograd.Function):
    """y = x A^T, with I as its backward. It calls keep(x, dy): what W needs."""

    @staticmethod
    def forward(ctx, x, weight, keep):
        # x twice, so that torch refuses a checkpointed layer. Its second run is outside the store:
        # F.linear saves x and the transpose of A, which could be taken for A. Torch compares only
        # how many tensors the two runs save, and their shapes
        ctx.save_for_backward(x, weight, x)
        ctx.keep = keep
        return F.linear(x, weight)

    @staticmethod
    def backward(ctx, dy):
        x, weight, _ = ctx.saved_tensors
        ctx.keep(x.detach(), dy)
        return dy @ weight, None, None


class WeightGradient(torch.autograd.Function):
    """A node whose backward is W. Autograd adds the result to .grad before it runs the next node:
    one at a time is in memory."""

    @staticmethod
    def forward(ctx, weight, x, dy):
        ctx.save_for_backward(x, dy)
        return weight.new_zeros(())  # a root for backward: its value is not used

    @staticmethod
    def backward(ctx, _):
        x, dy = ctx.saved_tensors
        return dy.flatten(0, -2).T @ x.flatten(0, -2), None, None


class WeightGradStore(TorchFunctionMode):
    """While it is on, each F.linear leaves its weight's gradient for later.

        store = WeightGradStore()
        with store:
            loss = F.cross_entropy(model(x), targets, reduction="sum") / target_count
        loss.backward()  # I: gradients of inputs, biases, norms and embeddings
        store.accumulate()  # W: gradients of weights. Without this line they are missing

    All other weight gradients are part of I: those of other functions, of a weight that is computed
    from parameters, and of all weights under autocast. A checkpointed layer is refused by torch
    (CheckpointError): trainer/split_backward.py has a store for it, and for experts."""

    def __init__(self):
        super().__init__()
        self.waiting = []  # (WeightGradient, weight, x, dy), in the order of backward
        self.instead = {F.linear: self.linear}

    def __torch_function__(self, function, types, args=(), kwargs=None):
        return self.instead.get(function, function)(*args, **kwargs or {})

    def linear(self, input, weight, bias=None):  # named as F.linear's arguments
        if not self.can_defer(input, weight):
            return F.linear(input, weight, bias)

        def keep(x, dy):
            self.waiting.append((WeightGradient, weight, x, dy))

        y = InputGradient.apply(input, weight.detach(), keep)
        return y if bias is None else y + bias

    def can_defer(self, x, weight):
        """Whether autograd would compute this weight's gradient, the weight is a parameter or a
        view of one, and x needs a gradient: else backward would not come to keep()."""
        base = weight if weight._base is None else weight._base
        if not isinstance(base, nn.Parameter) or torch.is_autocast_enabled(x.device.type):
            return False  # under autocast W would not be cast
        return torch.is_grad_enabled() and x.requires_grad and weight.requires_grad

    def accumulate(self):
        """Add the gradients to their weights, in one pass of autograd: DDP and ZeRO take the end of
        a pass for the end of backward."""
        # Autograd runs the newest root first. Reversed, gradients come in backward's order
        roots = [node.apply(*saved) for node, *saved in reversed(self.waiting)]
        self.waiting.clear()
        if roots:
            torch.autograd.backward(roots)


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


def plain_zero_bubble(stage, row, inputs, targets, loss_fn, like, down, up):
    """plain_pipeline with a row of F, I and W, such as the kinds of zb_h1's actions."""
    stores = collections.deque()  # of each micro-batch, from F to W

    def forward(x):
        stores.append(WeightGradStore())
        with stores[-1]:
            return stage(x)

    def forwards_and_backwards():
        """The letters for plain_pipeline. It asks for the next one when I's x.grad is on its way:
        so W runs meanwhile."""
        for kind in row:
            if kind == "W":
                stores.popleft().accumulate()
            else:
                yield kind  # plain_pipeline takes I for a backward

    return plain_pipeline(
        forward, forwards_and_backwards(), inputs, targets, loss_fn, like, down, up
    )


# --- any schedule


class SplitPipeline(Pipeline):
    """A Pipeline that runs I and W as well.

    around      a context manager, entered as around(action) while an action computes: for ZeRO or
                FSDP (docs/use/two-techniques.md)
    make_store  in place of WeightGradStore, one that defers more"""

    def __init__(self, *args, around=contextlib.nullcontext, make_store=WeightGradStore, **options):
        super().__init__(*args, **options)
        self.around, self.make_store = around, make_store
        # Whose backward is in two parts. A row may have whole ones as well (dualpipe.py)
        self.split = {(a.stage, a.microbatch) for a in self.row if a.kind == "W"}
        self.stores = {}  # {(stage, micro-batch): its WeightGradStore, from F to W}

    def run_action(self, action):
        received = self.receive(action)
        with self.around(action):
            result = self.compute(action, received)
        self.send(action, result)

    def compute(self, action, received):
        kind, stage, m = action
        if (stage, m) not in self.split:
            return super().compute(action, received)
        if kind == "F":
            self.stores[stage, m] = self.make_store()
        if kind == "W":
            return self.stores.pop((stage, m)).accumulate()
        with self.stores[stage, m]:  # in I too: trainer/split_backward.py's acts in backward
            return super().compute(action, received)


def zb_h2(rank, ranks, microbatches):
    return zb_h1(rank, ranks, microbatches, reach=2)


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

if __name__ == "__main__":  # importing this file needs no model.py
    from model import join_ranks, leave
    from pipeline import Schedule, one_f_one_b, train


def main():
    parser = argparse.ArgumentParser(description="train a GPT with each schedule, and prove it")
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--microbatches", type=int, help="of a step (default: 2 per rank)")
    args = parser.parse_args()
    device = join_ranks()
    train(plain_zero_bubble, zb_h1_row, args, device)  # pipeline.py's training loop
    for make_row in one_f_one_b, zb_h1, zb_h2, zb_v:
        check_bubble(make_row, args.microbatches)
        train(SplitPipeline, make_row, args, device)
    leave()


def zb_h1_row(rank, ranks, microbatches):
    return "".join(action.kind for action in zb_h1(rank, ranks, microbatches))


def check_bubble(make_row, microbatches):
    """Print how long a rank waits between its first action and its last, beside the papers."""
    p = dist.get_world_size()
    m = microbatches or 2 * p
    waited = longest_wait(Schedule(make_row(rank, p, m) for rank in range(p)))
    text, formula, least = {  # least: the formula holds from so many micro-batches
        "one_f_one_b": ("(p-1) (F+I+W)", 3 * (p - 1), 1),
        "zb_h1": ("(p-1) (F+I-W)", p - 1, p),
        "zb_h2": ("(p-1) (F+I-2W)", 0, 2 * p - 1),
        "zb_v": ("0", 0, 2 * p - 1),
    }[make_row.__name__]
    wrong = m >= least and waited != formula
    if dist.get_rank() == 0:
        verdict = ": NOT proven, the bubble differs" if wrong else ""
        since = f"from {least} micro-batches on {text} = {formula}"
        print(f"with {m} micro-batches a rank waits {waited} units at most, {since}{verdict}")
    if wrong:
        leave(1)


def longest_wait(schedule):
    """Of a rank, between its first action and its last. F, I and W take one unit each."""
    left = [collections.deque(row) for row in schedule.rows]
    now, waited, sent_at = [0] * len(left), [0] * len(left), {None: 0}  # None: no message
    while any(left):
        for rank, row in enumerate(left):
            while row and schedule.incoming(row[0]) in sent_at:
                action = row.popleft()
                start = max(now[rank], sent_at[schedule.incoming(action)])
                if now[rank] > 0:
                    waited[rank] += start - now[rank]
                now[rank] = start + (2 if action.kind == "B" else 1)
                sent_at.setdefault(schedule.outgoing(action), now[rank])
    return max(waited)


if __name__ == "__main__":
    main()
