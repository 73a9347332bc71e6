"""Pipeline parallelism: each rank (process) has some layers, and micro-batches flow through them.

    1F1B on 4 ranks with 8 micro-batches. A row is a rank, and time goes right. A digit is that
    micro-batch's forward, [digit] its backward, twice as long. A dot is a wait. optimizer.step()
    follows when all rows have ended.

        0 1 2 3 . . . . . .[0 ] 4[1 ] 5[2 ] 6[3 ] 7[4 ] .[5 ] .[6 ] .[7 ]
        . 0 1 2 . . . .[0 ] 3[1 ] 4[2 ] 5[3 ] 6[4 ] 7[5 ] .[6 ] .[7 ] . .
        . . 0 1 . .[0 ] 2[1 ] 3[2 ] 4[3 ] 5[4 ] 6[5 ] 7[6 ] .[7 ] . . . .
        . . . 0[0 ] 1[1 ] 2[2 ] 3[3 ] 4[4 ] 5[5 ] 6[6 ] 7[7 ] . . . . . .

Split     The layers into p stages, one per rank, and the batch into m micro-batches. A schedule
          lists each rank's actions in order.
Sent      Each forward's result to the next stage, and the gradient of each stage's input to the
          stage before: b T C e bytes per micro-batch, boundary and direction, for b sequences of T
          tokens, width C, e bytes per element. That is little: pipelines suit the slowest links.
Backward  The chain rule, cut at the boundaries. A stage's input x is a leaf of its own graph. So
          y.backward(gradient of y, from the next stage) leaves the gradient of x in x.grad, which
          goes to the stage before. The gradients of all micro-batches add up in .grad.
Limits    Ranks wait while the pipeline fills and drains (the bubble). They work m / (m + p - 1) of
          the time: 24 of the 33 cells of a row above. GPipe's bubble is as long, so 1F1B saves
          memory, not time. With few micro-batches take something else: docs/learn/pipelines.md.

    torchrun --nproc_per_node=4 pipeline.py            (needs model.py, to train and prove itself)

GPipe arXiv:1811.06965; 1F1B arXiv:2006.09503; interleaved arXiv:2104.04473.
"""

import argparse
import collections
import copy
import itertools
from typing import NamedTuple

import torch
import torch.distributed as dist

# --- the plainest form: any row of the picture, with receives that block


def gpipe_row(rank, ranks, microbatches):
    """A rank's row of the picture: all forwards ("F"), then all backwards ("B")."""
    return "F" * microbatches + "B" * microbatches


def one_f_one_b_row(rank, ranks, microbatches):
    """Rank r of p runs p - 1 - r forwards ahead, then a forward and a backward in turn. So the last
    rank starts each backward at once, and rank r holds the activations of at most p - r
    micro-batches, where GPipe holds those of all m."""
    ahead = min(ranks - 1 - rank, microbatches)
    return "F" * ahead + "FB" * (microbatches - ahead) + "B" * ahead


def plain_pipeline(module, row, inputs, targets, loss_fn, like, down, up):
    """One step of this rank. Leaves gradients in .grad, and returns the last rank's losses.

    module           this rank's layers
    row              "F" and "B" in this rank's order, as from one_f_one_b_row
    inputs, targets  of each micro-batch. The first rank reads the inputs, the last the targets
    loss_fn          (the last rank's result, targets) -> the micro-batch's part of the loss: a sum,
                     divided by the whole batch's number of targets, not by the micro-batch's
    like             a tensor with the shape, dtype and device of what ranks send each other. All
                     micro-batches have this shape
    down, up         groups of all ranks, for activations and for gradients. In one group nccl runs
                     the messages between two ranks one by one, so an activation could block a
                     gradient"""
    rank, last = dist.get_rank(down), dist.get_world_size(down) - 1
    batches = zip(inputs, targets)
    saved, losses, sends = collections.deque(), [], []
    for kind in row:
        if kind == "F":
            x, target = next(batches)
            if rank > 0:
                x = torch.empty_like(like)
                dist.recv(x, group=down, group_src=rank - 1)
                x.requires_grad_()  # a leaf: backward leaves its gradient in x.grad
            y = module(x).contiguous()
            if rank < last:
                sends.append(dist.isend(y.detach(), group=down, group_dst=rank + 1))
            else:
                y = loss_fn(y, target)
                losses.append(y.detach())
            saved.append((x, y))
        else:
            x, y = saved.popleft()  # the oldest micro-batch
            gradient = None  # y is the loss: backward starts here
            if rank < last:
                gradient = torch.empty_like(y)
                dist.recv(gradient, group=up, group_src=rank + 1)
            y.backward(gradient)
            if rank > 0:
                sends.append(dist.isend(x.grad.contiguous(), group=up, group_dst=rank - 1))
    for send in sends:  # a handle, and what it sends, must live until the message has left
        send.wait()
    return losses


def cut(layers, stage_count, owner=None):
    """Cut a list of modules into one list of consecutive layers per stage. The first ones may get
    one more. owner: {stage: its rank}, if stage r is not on rank r. Raises ValueError for a stage
    without parameters, and for a parameter on two ranks: neither would get its whole gradient."""
    size, extra = divmod(len(layers), stage_count)
    borders = [stage * size + min(stage, extra) for stage in range(stage_count + 1)]
    parts = [layers[start:end] for start, end in itertools.pairwise(borders)]
    first_rank = {}  # {parameter: the first rank that has it}
    for stage, part in enumerate(parts):
        rank = stage if owner is None else owner[stage]
        named = dict(torch.nn.ModuleList(part).named_parameters())
        if not named:
            raise ValueError(f"stage {stage} has no parameters for an optimizer: use fewer stages")
        for name, p in named.items():
            if first_rank.setdefault(p, rank) != rank:
                how = "give one of them a copy, and call reduce_tied on both after all backwards"
                place = f"{name} of stage {stage} is on rank {first_rank[p]}"
                raise ValueError(f"{place} already: {how}")
    return parts


def reduce_tied(weight, group):
    """Sum the gradients of a weight of which several ranks have a copy, such as a matrix that is
    both embedding and output. Call it once a step, after all backwards. The copies stay equal."""
    dist.all_reduce(weight.grad, group=group)


@torch.no_grad()
def pipeline_norm(parameters, group):
    """The norm of the gradients of all ranks' stages, a float64 scalar, the same on every rank. A
    tied weight counts once: leave it out on one of its ranks."""
    parameters = list(parameters)
    square = torch.zeros((), dtype=torch.float64, device=parameters[0].device)
    for p in parameters:
        if p.grad is not None:
            square += torch.linalg.vector_norm(p.grad, dtype=torch.float64).square()
    dist.all_reduce(square, group=group)
    return square.sqrt()


# --- schedules as data: a row may have several stages, and each action says which


class Action(NamedTuple):
    """A micro-batch on a stage. "F": forward, "B": backward. zero_bubble.py adds "I" and "W"."""

    kind: str
    stage: int
    microbatch: int


class Row(list):
    """A row as a list of actions. add() numbers the micro-batches, which each stage takes in order.

    row.add("FB", 0, 2)    # F0 and B0 of stage 0, then F0 and B0 of stage 2"""

    def __init__(self, kinds="", *stages):
        super().__init__()
        self.counts = collections.Counter()  # {(kind, stage): how many}
        self.add(kinds, *stages)

    def add(self, kinds, *stages):
        for stage in stages:
            for kind in kinds:
                self.append(Action(kind, stage, self.counts[kind, stage]))
                self.counts[kind, stage] += 1


def gpipe(rank, ranks, microbatches):
    """A stage per rank, all with the same row: F0 F1 F2 B0 B1 B2"""
    return Row(gpipe_row(rank, ranks, microbatches), rank)


def one_f_one_b(rank, ranks, microbatches):
    """A stage per rank. Rank 0 of 3:  F0 F1 F2 B0 F3 B1 F4 B2 B3 B4"""
    return Row(one_f_one_b_row(rank, ranks, microbatches), rank)


def interleaved(rank, ranks, microbatches, chunks=2):
    """Several stages per rank, which plain_pipeline can't run: rank r has stages r, p + r, 2 p + r,
    ... Ranks work m / (m + (p - 1) / chunks) of the time. The price: they send `chunks` times what
    they send in 1F1B, or a little more, and hold more activations. A rank runs p micro-batches
    forward on its first stage, then the same p on its next stage, and so on, and then the next p
    micro-batches. Backwards go from its last stage to its first.

        rank 0 of 2:  F0 F1 F0' F1' F2 B0' F3 B1' F2' B0 F3' B1 B2' B3' B2 B3    ' is on stage 2"""
    if microbatches % ranks:
        count = f"a multiple of {ranks} micro-batches, the number of ranks"
        raise ValueError(f"interleaved needs {count}, not {microbatches}")
    held, rounds = range(rank, chunks * ranks, ranks), microbatches // ranks
    # The stages in order. On rank 0 of 2: forwards 0 0 2 2 0 0 ..., backwards 2 2 0 0 2 2 ...
    forwards = [stage for stage in held for _ in range(ranks)] * rounds
    backwards = [stage for stage in reversed(held) for _ in range(ranks)] * rounds
    # Warm-up: p forwards for every stage here but the last, plus two for each later rank, the
    # round trip of the first micro-batch
    ahead = min((chunks - 1) * ranks + 2 * (ranks - 1 - rank), len(forwards))
    row = Row("F", *forwards[:ahead])
    for forward, backward in zip(forwards[ahead:], backwards):
        row.add("F", forward)
        row.add("B", backward)
    row.add("B", *backwards[len(backwards) - ahead :])
    return row


class Message(NamedTuple):
    """Activations (kind "F") or their gradient (kind "B") on their way to a stage."""

    kind: str
    stage: int
    microbatch: int
    source: int  # rank
    target: int  # rank


class Schedule:
    """The rows of all ranks, schedule[rank], and the messages between them.

        schedule = Schedule(one_f_one_b(r, ranks, microbatches) for r in range(ranks))

    owner  {stage: the rank that holds it}
    last   the last stage

    Raises ValueError if ranks would wait for each other."""

    def __init__(self, rows):
        self.rows = [tuple(row) for row in rows]
        self.owner = {}
        for rank, row in enumerate(self.rows):
            self.owner |= {action.stage: rank for action in row}
        self.last = len(self.owner) - 1
        self.receives_before = plan_receives(self)

    def __getitem__(self, rank):
        return self.rows[rank]

    def stages(self, rank):
        return sorted(stage for stage, owner in self.owner.items() if owner == rank)

    def incoming(self, action):
        """The message that an action waits for: F from the stage before, B from the next one."""
        before = action.stage - 1 if action.kind == "F" else action.stage + 1
        return self.message(action, before, action.stage)

    def outgoing(self, action):
        """The message that an action sends: F to the next stage, B to the stage before."""
        following = action.stage + 1 if action.kind == "F" else action.stage - 1
        return self.message(action, action.stage, following)

    def message(self, action, sender, receiver):
        """None at the ends of the pipeline. (zero_bubble.py: I sends what B would, W nothing.)"""
        if action.kind == "W" or sender not in self.owner or receiver not in self.owner:
            return None
        kind = "F" if action.kind == "F" else "B"
        return Message(kind, receiver, action.microbatch, self.owner[sender], self.owner[receiver])


# --- the executor of any schedule: messages travel while ranks compute


class Pipeline:
    """This rank's part of a pipeline. run() does all actions of its row: gradients add up in the
    parameters' .grad.

    forward  (stage, micro-batch, x) -> the stage's result, on the last stage the micro-batch's part
             of the loss, as plain_pipeline's loss_fn. x: what the stage before has sent, None on
             stage 0
    shape, dtype, device  of what stages send each other, the same for all micro-batches
    links    groups from open_links(make_links(), ...). None: they are made here, for all ranks

    After an exception make new links: messages may be on their way."""

    def __init__(self, schedule, forward, shape, dtype, device, links=None):
        self.schedule, self.forward = schedule, forward
        self.shape, self.dtype, self.device = tuple(shape), dtype, device
        self.links = links or open_links(make_links(), schedule, device)
        self.row = schedule[dist.get_rank(self.links[0])]

    def run(self):
        """One step. Returns the last stage's results, detached, on its rank; [] on the others."""
        self.saved = {}  # {(stage, micro-batch): input and output, from forward to backward}
        self.arriving = {}  # {message: (tensor, handle of its receive)}
        self.sends = []  # (tensor, handle) of those on their way
        self.results = []
        for action in self.row:
            self.run_action(action)
        for _, work in self.sends:
            work.wait()
        if self.saved:  # a gradient is missing
            raise RuntimeError(f"no backward of {[*self.saved]}. An evaluation needs no_grad()")
        return self.results

    def run_action(self, action):
        received = self.receive(action)  # None on stage 0, and for the backward of the loss
        self.send(action, self.compute(action, received))

    def compute(self, action, received):
        """Turn the message that an action waits for into the message that it sends."""
        run = self.run_forward if action.kind == "F" else self.run_backward
        return run(action.stage, action.microbatch, received)

    def run_forward(self, stage, m, x):
        if x is not None and torch.is_grad_enabled():
            x.requires_grad_()  # a leaf: backward leaves its gradient in x.grad
        y = self.forward(stage, m, x)
        if torch.is_grad_enabled():
            self.saved[stage, m] = x, y
        if stage == self.schedule.last:
            self.results.append(y.detach())
        return y.detach()

    def run_backward(self, stage, m, gradient):
        x, y = self.saved.pop((stage, m))
        if y.requires_grad:  # not if all of stage 0 is frozen
            y.backward(gradient)  # None, if y is the loss
        return None if x is None else x.grad

    # Messages have no names: in each group the n-th receive from a rank gets its n-th send. Sends
    # return at once

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
        found, expected = (tuple(tensor.shape), tensor.dtype), (self.shape, self.dtype)
        if found != expected:  # a smaller tensor would leave a part of the receiver's buffer unset
            raise ValueError(f"stage {action.stage} sends {found}, not {expected}")
        tensor = tensor.contiguous()
        # Drop the tensors that have left. (gloo says so only after wait())
        self.sends = [(t, work) for t, work in self.sends if not work.is_completed()]
        group = group_for(self.links, message)
        self.sends.append((tensor, dist.isend(tensor, group=group, group_dst=message.target)))


# --- what nccl needs: a time for each receive, and groups that do not block each other


def plan_receives(schedule, steps=None):
    """{action: the messages whose receives a rank posts before it}.

    On nccl a receive is a kernel that spins until its message is there. Posted too early it can
    hang, because CUDA may wait for it before it loads a kernel or frees memory. Posted too late it
    hides nothing. So this simulates the schedule in rounds: in each, a rank runs its next action if
    the message for it was sent in an earlier round. A receive is posted in the round in which its
    message is sent: if the sender is a later rank, before the receiver's own action of that round,
    during which the message travels; if it is an earlier rank, after that action.

        1F1B on rank 1 of 3. <F1 posts the receive of F1's input, <B1 that of B1's gradient
        <F0 F0 <F1 F1 <F2 <B0 B0 <B1 F2 B1 <F3 <B2 F3 B2 <F4 <B3 F4 B3 <B4 B4

    steps: each rank's actions, in tuples of those that start together (dualpipe.py). Raises
    ValueError if ranks would wait for each other."""
    plan, sent = collections.defaultdict(list), {None}  # None: what waits for no message
    steps = steps or [[(action,) for action in row] for row in schedule.rows]
    left = [collections.deque(of_rank) for of_rank in steps]
    while any(left):
        # Chosen before any of them sends: what is sent in a round is there in the next one
        ready = [rest for rest in left if rest and sent.issuperset(map(schedule.incoming, rest[0]))]
        if not ready:
            raise ValueError("each rank waits for another one")
        # Last rank first: when rank r's messages are planned, later ranks have popped this round's
        # action, and earlier ranks have not
        for rest in reversed(ready):
            for message in map(schedule.outgoing, rest.popleft()):
                sent.add(message)
                if message is not None and message.source != message.target:
                    next_step = left[message.target][0]
                    plan[next_step[0]].append(message)
    return plan


def make_links(ranks=None):
    """A pipeline's four groups: activations and gradients each have one to later ranks, and one to
    earlier ranks. (In one group nccl runs the messages between two ranks one by one, so two could
    block each other.) Call it as dist.new_group: every process for every pipeline, in one order."""
    return [dist.new_group(ranks) for _ in range(4)]


def group_for(links, message):
    activations, gradients = links[:2], links[2:]
    to_later, to_earlier = activations if message.kind == "F" else gradients
    return to_later if message.target > message.source else to_earlier


def open_links(links, schedule, device):
    """Send a first message on each way between two ranks, in an order that all share, and return
    the links. On nccl a first message blocks until both ranks are there: two ranks that first send
    to each other would wait for ever."""
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


# --- for model.py's GPT


def gpt_stages(model, stage_count, held):
    """{stage: a copy of the GPT with this stage's blocks alone} of the stages in `held`. The first
    stage keeps the embedding, the last the head: a GPT leaves out what is missing.

    If the first and the last stage are on two ranks, a tied matrix has two copies: reduce_tied."""
    blocks = cut(list(model.blocks.values()), stage_count)
    parts, last = {}, stage_count - 1
    for stage in held:
        part = parts[stage] = copy.deepcopy(model)
        for name, block in model.blocks.items():
            if block not in blocks[stage]:
                del part.blocks[name]
        if stage > 0:
            part.embed = None
        if stage < last:
            part.head = None
    if model.config.tied and {0, last} <= set(held):
        parts[last].head.out.weight = parts[0].embed.token.weight
    return parts


# --- demo ---

if __name__ == "__main__":  # importing this file needs no model.py
    from model import join_ranks, leave


def main():
    parser = argparse.ArgumentParser(description="train a GPT with each schedule, and prove it")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--microbatches", type=int, help="of a step (default: 2 per rank)")
    args = parser.parse_args()
    device = join_ranks()
    for make_row in gpipe_row, one_f_one_b_row:
        train(plain_pipeline, make_row, args, device)
    for make_row in gpipe, one_f_one_b, interleaved:
        train(Pipeline, make_row, args, device)
    leave()


def train(executor, make_row, args, device):  # zero_bubble.py's demo calls it, too
    from model import GPT, Config, OneProcess, Sent, text_batch

    rank, ranks = dist.get_rank(), dist.get_world_size()
    m = args.microbatches or 2 * ranks
    rows = [make_row(r, ranks, m) for r in range(ranks)]
    plain = isinstance(rows[0], str)
    if plain:  # stage r is on rank r
        held, ends, last = [rank], {0, ranks - 1}, ranks - 1
        links = [dist.new_group(), dist.new_group()]
    else:
        schedule = Schedule(rows)
        held, last = schedule.stages(rank), schedule.last
        ends = {schedule.owner[0], schedule.owner[last]}  # the ranks of the first and last stage
        links = open_links(make_links(), schedule, device)
    torch.manual_seed(0)  # every rank draws all weights, and keeps those of its stages
    model = GPT(Config(layers=args.layers, width=32, context=32)).to(device, torch.float64)
    one = OneProcess(model, torch.optim.AdamW)
    modules = gpt_stages(model, last + 1, held)
    named = {name: p for module in modules.values() for name, p in module.named()}
    tied, ends_group = named.get("embed.token.weight"), dist.new_group(sorted(ends))
    optimizer = torch.optim.AdamW(named.values())
    like = torch.zeros(2, 32, 32, dtype=torch.float64, device=device)  # (b, T, C)
    if rank == 0:
        row = "".join(action[0] for action in rows[0])
        print(f"{executor.__name__}, {make_row.__name__}: {ranks} ranks, rank 0 runs {row}")
    for step in range(args.steps):
        tokens, targets, count = text_batch(step, m * len(like), 32, device)
        inputs, answers = tokens.chunk(m), targets.chunk(m)

        def forward(stage, i, x):  # the last stage has the head, and returns the loss
            x = inputs[i] if x is None else x
            return modules[stage](x, targets=answers[i], target_count=count)

        def loss_fn(logits, y):  # the sum over y, divided by the number of the batch's targets
            return model.loss(logits, y, count)

        optimizer.zero_grad()
        with Sent() as sent:
            if plain:
                batch = inputs, answers, loss_fn, like
                losses = executor(modules[rank], rows[rank], *batch, *links)
            else:
                losses = executor(schedule, forward, like.shape, like.dtype, device, links).run()
            if tied is not None:
                reduce_tied(tied, ends_group)
        loss = sum(losses, like.new_zeros(()))  # the last rank's
        dist.all_reduce(loss)
        counted = [p for p in named.values() if p is not tied or rank == 0]
        norm = pipeline_norm(counted, dist.group.WORLD)
        torch.nn.utils.clip_grads_with_norm_(named.values(), 0.5, norm)
        optimizer.step()
        alone = one.train_step(tokens, targets, count, 0.5)
        one.compare(step, loss, alone, named.items())
    neighbours = [n for stage in held for n in (stage - 1, stage + 1) if 0 <= n <= last]
    borders = sum(n not in held for n in neighbours)  # two stages of a rank send each other nothing
    formula = borders * m * like.nbytes
    if tied is not None:
        formula += (len(ends) - 1) * tied.nbytes  # an all-reduce over two ranks
    one.prove(sent, "m b T C e each way over a border, V C e if tied", formula)


if __name__ == "__main__":
    main()
