"""Pipeline parallelism: each rank (process) has some layers, and micro-batches flow through them.

    1F1B on 4 ranks with 8 micro-batches. A row is a rank, and time goes right. A digit is that
    micro-batch's forward, [digit] its backward, twice as long. A dot is a wait.

        0 1 2 3 . . . . . .[0 ] 4[1 ] 5[2 ] 6[3 ] 7[4 ] .[5 ] .[6 ] .[7 ]
        . 0 1 2 . . . .[0 ] 3[1 ] 4[2 ] 5[3 ] 6[4 ] 7[5 ] .[6 ] .[7 ] . .
        . . 0 1 . .[0 ] 2[1 ] 3[2 ] 4[3 ] 5[4 ] 6[5 ] 7[6 ] .[7 ] . . . .
        . . . 0[0 ] 1[1 ] 2[2 ] 3[3 ] 4[4 ] 5[5 ] 6[6 ] 7[7 ] . . . . . .
        |- fill -|    one forward, one backward, in turn     |- drain -|, then optimizer.step()

Split: the layers into p stages, one per rank, and the batch into m micro-batches. A schedule lists
each rank's actions in order.

Sent: each forward's result to the next stage, and the gradient of each stage's input to the stage
before. A micro-batch sends b T C e bytes each way over each boundary between ranks: b sequences of
T tokens, width C, e bytes per element. That is little, so pipelines suit the slowest links.

Backward: the chain rule, cut at the boundaries. A stage's input x is a leaf of its own graph. So
y.backward(gradient of y, from the next stage) leaves the gradient of x in x.grad, which goes to the
stage before. The gradients of all micro-batches add up in .grad.

Limits: ranks wait while the pipeline fills and drains (the bubble). They work m / (m + p - 1) of
the time, 24 of the 33 cells of a row above, with 1F1B as with GPipe: 1F1B saves memory, not time.
zero_bubble.py fills the waits; docs/learn/pipelines.md compares the schedules.

    torchrun --nproc_per_node=4 pipeline.py --layers 8        python pipeline.py --compare

GPipe arXiv:1811.06965; 1F1B arXiv:2006.09503; interleaved arXiv:2104.04473.
"""

import collections
import contextlib
import itertools
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.nn as nn

# --- the plainest form: any row of the picture, with receives that block


def cut(layers, stages):
    """Cut a list into runs of consecutive layers. If they don't divide, the first get one more."""
    size, extra = divmod(len(layers), stages)
    borders = [stage * size + min(stage, extra) for stage in range(stages + 1)]
    return [nn.Sequential(*layers[start:end]) for start, end in itertools.pairwise(borders)]


def gpipe_row(rank, ranks, microbatches):
    """A rank's line of such a picture: "F" a forward, "B" a backward. First all forwards."""
    return "F" * microbatches + "B" * microbatches


def one_f_one_b_row(rank, ranks, microbatches):
    """Rank r of p runs p - 1 - r forwards ahead, then a forward and a backward in turn. So the last
    rank starts each backward at once, and rank r holds activations of at most p - r micro-batches.
    GPipe holds those of all."""
    ahead = min(ranks - 1 - rank, microbatches)
    return "F" * ahead + "FB" * (microbatches - ahead) + "B" * ahead


def plain_pipeline(stage, row, inputs, targets, loss_fn, like, down, up):
    """One step of this rank. Leaves gradients in .grad, and returns the last rank's losses. For
    rank r of p, with m micro-batches:

        down, up = dist.new_group(), dist.new_group()    # of activations, and of their gradients
        # A matrix that embedding and head share is two now. Sum their gradients: reduce_tied
        stage, row = cut([embedding, *blocks, head], p)[r], one_f_one_b_row(r, p, m)
        optimizer = torch.optim.SGD(stage.parameters())

        def loss_fn(y, target):    # on the last rank. y: (b, T, V)
            # The batch's number of targets. A mean of its pieces' means would be wrong
            return F.cross_entropy(y.mT, target, reduction="sum") / target_count

        like = torch.empty(b, T, C)    # shape, dtype and device of what stages send each other
        for inputs, targets, target_count in batches:    # lists of m tensors, on all ranks
            optimizer.zero_grad()
            losses = plain_pipeline(stage, row, inputs, targets, loss_fn, like, down, up)
            optimizer.step()

    nccl passes a group's messages between two ranks in order: in one group a send down could block
    one up."""
    rank, last = dist.get_rank(down), dist.get_world_size(down) - 1
    microbatches = zip(inputs, targets)  # rank 0 reads the inputs, the last rank the targets
    saved, losses, gradient_send = collections.deque(), [], None
    for kind in row:
        if kind == "F":
            x, target = next(microbatches)
            if rank > 0:
                x = torch.empty_like(like)
                dist.recv(x, group=down, group_src=rank - 1)
                x.requires_grad_()  # a leaf: backward leaves its gradient in x.grad
            y = stage(x).contiguous()
            if rank < last:
                send = dist.isend(y.detach(), group=down, group_dst=rank + 1)
            else:
                y, send = loss_fn(y, target), None
                losses.append(y.detach())
            saved.append((x, y, send))
        else:
            x, y, send = saved.popleft()  # the oldest micro-batch
            gradient = None  # y is the loss: backward starts here
            if rank < last:
                gradient = torch.empty_like(y)
                dist.recv(gradient, group=up, group_src=rank + 1)
                send.wait()  # y has arrived: its gradient is here
            y.backward(gradient)
            if rank > 0:
                if gradient_send:
                    gradient_send.wait()  # a handle may not be dropped before its message has left
                gradient_send = dist.isend(x.grad.contiguous(), group=up, group_dst=rank - 1)
    if gradient_send:
        gradient_send.wait()
    return losses


# --- the same for any schedule: with several stages on a rank, stages without gradients, and
#     gradients that arrive while a rank computes


class Action(NamedTuple):
    """A micro-batch on a stage. "F": forward, "B": backward. zero_bubble.py adds "I" and "W"."""

    kind: str
    microbatch: int
    stage: int


class Pipeline:
    """This rank's part of a pipeline. run() does all forwards and backwards of a step: gradients
    add up in the parameters' .grad.

        schedule = Schedule(one_f_one_b(r, ranks, microbatches) for r in range(ranks))
        stages = cut(layers, schedule.last + 1)
        held = nn.ModuleList(stages[s] for s in schedule.stages(rank)).to(device)    # only these
        optimizer = torch.optim.AdamW(held.parameters())

        def forward(s, m, x):    # stage, micro-batch; x: from the stage before, None on stage 0
            y = stages[s](inputs[m] if x is None else x)
            if s < schedule.last:
                return y
            return F.cross_entropy(y.mT, targets[m], reduction="sum") / target_count

        pipeline = Pipeline(schedule, forward, (b, T, C), dtype, device)
        for inputs, targets, target_count in batches:    # lists, of a tensor per micro-batch
            optimizer.zero_grad()
            losses = pipeline.run()
            # reduce_tied(head.weight, ends), if the embedding's matrix is on another rank of `ends`
            # To clip: all-reduce the squared norm. clip_grad_norm_ sees this rank's stages only
            optimizer.step()

    target_count: the number of targets of the whole batch, all micro-batches and all data-parallel
    ranks. (b, T, C) and dtype: of the activations between stages, the same for all micro-batches.
    links: its four groups. With a pipeline in each data-parallel replica they are
    open_links(make_links(ranks), schedule, device), below. around: a context manager, entered as
    around(action) while an action computes: for ZeRO, or to count. After an exception make a new
    Pipeline: messages may be on their way."""

    def __init__(
        self, schedule, forward, shape, dtype, device, links=None, around=contextlib.nullcontext
    ):
        self.schedule, self.stage_forward, self.around = schedule, forward, around
        self.shape, self.dtype, self.device = tuple(shape), dtype, device
        self.links = links or open_links(make_links(), schedule, device)
        self.row = schedule[dist.get_rank(self.links[0])]

    def run(self):
        """All actions of this rank's row. Returns the last stage's results, detached, on its rank,
        and [] on the others."""
        self.saved = {}  # {(micro-batch, stage): input and output, from forward to backward}
        self.arriving = {}  # {message: (tensor, handle of its receive)}
        self.sends = []  # (tensor, handle) of those on their way
        self.results = []
        for action in self.row:
            self.run_action(action)
        for _, work in self.sends:
            work.wait()
        return self.results

    def run_action(self, action):
        received = self.receive(action)  # None on stage 0, and for the backward of the loss
        with self.around(action):
            result = self.compute(action, received)
        self.send(action, result)

    def compute(self, action, received):
        """Turn the message that an action waits for into the message that it sends."""
        run = self.forward if action.kind == "F" else self.backward
        return run(action.microbatch, action.stage, received)

    def forward(self, m, stage, x):
        if x is not None and torch.is_grad_enabled():
            x.requires_grad_()  # a leaf: backward leaves its gradient in x.grad
        y = self.stage_forward(stage, m, x)
        if y.requires_grad:
            self.saved[m, stage] = x, y
        if stage == self.schedule.last:
            self.results.append(y.detach())
        return y.detach()

    def backward(self, m, stage, gradient):
        if (m, stage) not in self.saved:
            return None  # stage 0, if all of it is frozen
        x, y = self.saved.pop((m, stage))
        y.backward(gradient)  # None, if y is the loss
        return None if x is None else x.grad

    # Messages have no names: the n-th receive from a rank, of one kind, gets what the n-th send has
    # sent. Sends return at once

    def receive(self, action):
        """Post the receives planned before an action. Return the message that it waits for."""
        for message in self.schedule.receives_before[action]:
            buffer = torch.empty(self.shape, dtype=self.dtype, device=self.device)
            group = group_for(self.links, message)
            work = dist.irecv(buffer, group=group, group_src=message.source)
            self.arriving[message] = buffer, work
        message = self.schedule.incoming(action)
        if message is None:
            return None
        tensor, work = self.arriving.pop(message)
        if work is not None:
            work.wait()
        return tensor

    def send(self, action, tensor):
        message = self.schedule.outgoing(action)
        if message is None:
            return
        if message.target == message.source:  # both stages are on this rank
            self.arriving[message] = tensor, None
            return
        check_message(self, action, tensor)
        tensor = tensor.contiguous()
        # Drop the tensors that have left. (gloo says so only after wait())
        self.sends = [(t, work) for t, work in self.sends if not work.is_completed()]
        group = group_for(self.links, message)
        self.sends.append((tensor, dist.isend(tensor, group=group, group_dst=message.target)))


# --- rows: a rank's actions in order


class Row(list):
    """A rank's actions. It numbers the micro-batches: each stage takes them in order.

    row.add("FB", 0, 2)    # F0 and B0 of stage 0, then F0 and B0 of stage 2"""

    def __init__(self, kinds="", *stages):
        super().__init__()
        self.counts = collections.Counter()  # {(kind, stage): how many}
        self.add(kinds, *stages)

    def add(self, kinds, *stages):
        for stage in stages:
            for kind in kinds:
                self.append(Action(kind, self.counts[kind, stage], stage))
                self.counts[kind, stage] += 1


def gpipe(rank, ranks, microbatches):
    """A stage per rank, all with the same row: F0 F1 F2 B0 B1 B2"""
    return Row(gpipe_row(rank, ranks, microbatches), rank)


def one_f_one_b(rank, ranks, microbatches):
    """A stage per rank. Rank 0 of 3:  F0 F1 F2 B0 F3 B1 F4 B2 B3 B4"""
    return Row(one_f_one_b_row(rank, ranks, microbatches), rank)


def interleaved(rank, ranks, microbatches, chunks=2):
    """Several stages per rank, which plain_pipeline can't run: rank r holds r, p + r, 2 p + r, ...
    Ranks work m / (m + (p - 1) / chunks) of the time, for about `chunks` times as many messages and
    more activations in memory. A rank runs p forwards on its first stage, then the same p on the
    next, and so on, then the next p. Backwards go from its last stage to its first.

        rank 0 of 2:  F0 F1 F0' F1' F2 B0' F3 B1' F2' B0 F3' B1 B2' B3' B2 B3    ' is on stage 2"""
    if microbatches % ranks:
        count = f"a multiple of {ranks} micro-batches, as many as ranks"
        raise ValueError(f"interleaved needs {count}, not {microbatches}")
    stages, rounds = range(rank, chunks * ranks, ranks), microbatches // ranks
    # On rank 0 of 2 0 0 2 2 0 0 ..., and 2 2 0 0 2 2 ...
    forwards = [stage for stage in stages for _ in range(ranks)] * rounds
    backwards = [stage for stage in reversed(stages) for _ in range(ranks)] * rounds
    # Warm-up: p forwards for every local stage but the last, plus two for each later rank, the
    # round trip of the first micro-batch
    ahead = min((chunks - 1) * ranks + 2 * (ranks - 1 - rank), len(forwards))
    row = Row("F", *forwards[:ahead])
    for forward, backward in zip(forwards[ahead:], backwards):
        row.add("F", forward)
        row.add("B", backward)
    row.add("B", *backwards[len(backwards) - ahead :])
    return row


# --- a schedule: the rows of all ranks, and the messages between them


class Message(NamedTuple):
    """Activations (kind "F") or their gradient (kind "B") on their way to a stage."""

    kind: str
    microbatch: int
    stage: int
    source: int  # rank
    target: int  # rank


class Schedule:
    """A row of actions for each rank: schedule[rank]. owner: {stage: the rank that holds it}. last:
    the last stage. Raises ValueError if an action is missing or there twice, if two ranks hold a
    stage, or if ranks would wait for each other."""

    def __init__(self, rows):
        self.rows = [tuple(row) for row in rows]
        self.owner = {}
        for rank, row in enumerate(self.rows):
            self.owner |= {action.stage: rank for action in row}
        self.last = len(self.owner) - 1
        check_actions(self)
        self.receives_before = plan_receives(self)

    def __getitem__(self, rank):
        return self.rows[rank]

    def stages(self, rank):
        return sorted(stage for stage, owner in self.owner.items() if owner == rank)

    def steps(self, rank):
        """A rank's actions, in tuples of those that start together. dualpipe.py pairs some."""
        return [(action,) for action in self[rank]]

    def incoming(self, action):
        """The message that an action waits for: F from the stage before, B from the next one."""
        before = action.stage - 1 if action.kind == "F" else action.stage + 1
        return self.message(action, before, action.stage)

    def outgoing(self, action):
        """The message that an action sends: F to the next stage, B to the stage before."""
        following = action.stage + 1 if action.kind == "F" else action.stage - 1
        return self.message(action, action.stage, following)

    def message(self, action, sender, receiver):
        """None at the ends of the pipeline. I sends what B would, W nothing."""
        if action.kind == "W" or sender not in self.owner or receiver not in self.owner:
            return None
        kind = "F" if action.kind == "F" else "B"
        return Message(kind, action.microbatch, receiver, self.owner[sender], self.owner[receiver])


# --- what nccl needs: a time for each receive, and groups that do not block each other


def plan_receives(schedule):
    """{action: the messages whose receives a rank posts before it}. All ranks act in rounds. A
    message to an earlier rank is received before the action that this rank does in the same round,
    so it travels meanwhile; one to a later rank after it.

        1F1B on rank 1 of 3. <F1 posts the receive of F1's input, <B1 that of B1's gradient
        <F0 F0 <F1 F1 <F2 <B0 B0 <B1 F2 B1 <F3 <B2 F3 B2 <F4 <B3 F4 B3 <B4 B4

    So a gradient travels during a forward (<B1 F2 B1); most activations are received just before
    they are needed (<F1 F1). Posted earlier, a receive could hang on nccl: it is a kernel that
    spins until its message is there, and CUDA may wait for it before it loads a kernel or frees
    memory. If the sender then waits for this rank, neither goes on."""
    plan = collections.defaultdict(list)
    rows = [collections.deque(schedule.steps(rank)) for rank in range(len(schedule.rows))]
    sent = {None}  # None: the message of an action that waits for nothing
    while any(rows):
        # A round: each rank whose message was sent in an earlier one runs a step, the last first
        ready = [row for row in rows if row and sent.issuperset(map(schedule.incoming, row[0]))]
        if not ready:
            raise ValueError("each rank waits for another one")
        for row in reversed(ready):
            for message in map(schedule.outgoing, row.popleft()):
                sent.add(message)
                if message is not None and message.source != message.target:
                    next_step = rows[message.target][0]  # what the receiver has not begun
                    plan[next_step[0]].append(message)
    return plan


def make_links(ranks=None):
    """A pipeline's four groups: activations and gradients have one each, to later ranks and to
    earlier ones. nccl passes a group's messages between two ranks one by one, in order: in one
    group two could block each other. As dist.new_group: every process calls this, for every
    pipeline, in one order."""
    return [dist.new_group(ranks) for _ in range(4)]


def group_for(links, message):
    return links[2 * (message.kind == "B") + (message.source > message.target)]


def open_links(links, schedule, device):
    """Send a first message on each way between two ranks, in an order that all share. On nccl it
    blocks until both ranks are there: two that first send to each other would wait for ever.
    Returns the links."""
    rank, number = dist.get_rank(links[0]), torch.zeros(1, device=device)
    messages = itertools.chain(*schedule.receives_before.values())
    one_of_each = {(m.kind, m.source, m.target): m for m in messages}
    for message in one_of_each.values():
        group = group_for(links, message)
        if rank == message.source:
            dist.send(number, group=group, group_dst=message.target)
        elif rank == message.target:
            dist.recv(number, group=group, group_src=message.source)
    return links


# --- a weight on two stages


def reduce_tied(weight, group):
    """Sum the gradient of a weight that the ranks of a group share, such as a tied matrix on the
    first and the last stage: once a step, after pipeline.run(). Both copies get the same gradient,
    so they stay equal. In a norm over all stages count it once. With DDP or ZeRO:
    docs/use/two-techniques.md."""
    dist.all_reduce(weight.grad, group=group)


# --- mistakes that would be silent: refused


def check_actions(schedule):
    """An action that is missing, or there twice, is a gradient that is missing, or there twice. A
    backward on another rank than its forward would find nothing saved."""
    kinds = collections.defaultdict(str)  # {(micro-batch, stage): its actions, as "FB"}
    for rank, row in enumerate(schedule.rows):
        for kind, m, stage in row:
            if schedule.owner[stage] != rank:
                raise ValueError(f"stage {stage} is on rank {rank} and {schedule.owner[stage]}")
            kinds[m, stage] += kind
    passes = ["F"] if set(kinds.values()) == {"F"} else ["FB", "FIW"]  # "F": an evaluation
    for m, stage in itertools.product(sorted({m for m, _ in kinds}), range(schedule.last + 1)):
        if kinds[m, stage] not in passes:
            found = " ".join(kinds[m, stage]) or "nothing"
            raise ValueError(f"stage {stage} runs micro-batch {m} as {found}")


def check_message(pipeline, action, tensor):
    """A message that is smaller than its buffer would fill a part of it."""
    if tensor.shape != pipeline.shape or tensor.dtype != pipeline.dtype:
        found = f"stage {action.stage} has {list(tensor.shape)} of {tensor.dtype} to send"
        told = f"the pipeline was told {list(pipeline.shape)} of {pipeline.dtype}"
        raise ValueError(f"{found} for micro-batch {action.microbatch}, but {told} for all")


# --- demo ---

import harness
import proof
from receipts import pipeline as schedules  # its tables and formulas


def main(doc=__doc__, default="1f1b"):
    """zero_bubble.py calls it with a docstring and a schedule of its own."""
    parser = harness.parser(doc, microbatches=8)
    g = parser.add_argument_group("pipeline")
    g.add_argument("--schedule", choices=schedules.SCHEDULES, help=f"(default: {default})")
    g.add_argument("--chunks", **harness.POSITIVE, help="stages a rank of interleaved (default: 2)")
    schedules.flags(g)
    args = parser.parse_args()
    if args.compare:
        return schedules.compare(args)
    args.schedule = args.schedule or default
    config = harness.configure(args)
    harness.check_batch(args, 1)  # refuses one that does not divide into micro-batches
    proof.launch(demo, args, check=lambda world: schedules.check_schedule(args, config, world))


def demo(run):
    """run: this process's flags, device, data and receipt (proof/run.py)."""
    args, config, rank, ranks = run.args, run.config, run.rank, run.world
    # By name; "1f1b" is Schedule(one_f_one_b(rank, ranks, microbatches) for rank in range(ranks))
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
    # Pipeline, or for a backward in two parts zero_bubble.SplitPipeline
    executor = schedules.executor(args.schedule, Pipeline)
    pipeline = executor(schedule, forward, shape, run.dtype, run.device, links, around=in_w)
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
