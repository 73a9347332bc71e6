"""Pipeline parallelism: each rank holds some consecutive layers (a stage); micro-batches flow through the stages.

What is split: the layers. What is sent: activations (b, T, C) to the next stage, their gradients to the one before.

Backward is the chain rule, cut at the boundary: a stage's input x is a leaf of its own graph, so `backward(y, dL/dy)` with
the gradient that the next stage sends leaves dL/dx in x.grad, to be sent to the stage before. The gradients of micro-batches
add up, because each loss is divided by the token count of the whole batch.

    GPipe, 4 stages, 4 micro-batches (digits: forward, [digits]: backward, twice as long; each row is a stage)

        0 1 2 3 . . . . . . . . .[0 ][1 ][2 ][3 ]
        . 0 1 2 3 . . . . . .[0 ][1 ][2 ][3 ]. .
        ...

A schedule is data: for each rank the list of its actions, `[[Action("F", 0), Action("F", 1), ...], ...]`. A pure function
makes it, one executor (`play`) plays any of them, and the same lists give the picture, the bubble and the number of
micro-batches in flight (`simulate`, `timeline`).

    naive   forward and backward of one micro-batch after the other: one stage works at a time, utilisation 1/p
    gpipe   all forwards, then all backwards: m micro-batches in flight (Huang et al. 2018, arXiv:1811.06965)
    1f1b    backward as early as possible, one forward one backward in the steady state: at most p - rank micro-batches in
            flight, the same bubble (PipeDream-flush: Narayanan et al. 2021, arXiv:2006.09503 and 2104.04473, section 2.2)

What it costs: stages wait for each other while the pipeline fills and drains, the bubble: (p-1)/(m+p-1) of the time for
gpipe and 1f1b, a fifth with m = 4 p. Sent per boundary, direction and micro-batch: b T C e bytes, point to point: little, so
it suits the slowest links; and once a step the gradient of a tied matrix, between the two ends. Held: 1/p of the layers, with
the activations of the micro-batches in flight: m for gpipe; for 1f1b p on the first stage, so about those of one micro-batch
of the whole model. Where the batch does not give m of at least 2 p or 3 p, the bubble makes this the wrong choice.

Sends never block (each is kept until done), receives are posted one action ahead, and the two directions have a group each:
on nccl the messages of one pair of ranks in one group stand in one queue, where a gradient could wait for an activation that
waits for that gradient. On gloo both may be the same group.

    torchrun --nproc_per_node=4 pipeline.py                 python pipeline.py --schedule gpipe --microbatches 8
"""

from typing import NamedTuple

import torch
import torch.distributed as dist


class Action(NamedTuple):
    """One step of a rank: kind "F" (forward) or "B" (backward) of a micro-batch."""

    kind: str
    microbatch: int


def naive(stages, microbatches):
    """One micro-batch at a time through all stages and back: what everything else improves on."""
    return [[Action(kind, m) for m in range(microbatches) for kind in "FB"] for _ in range(stages)]


def gpipe(stages, microbatches):
    """All forwards, then all backwards."""
    return [[Action(kind, m) for kind in "FB" for m in range(microbatches)] for _ in range(stages)]


def one_f_one_b(stages, microbatches):
    """Rank r does p - 1 - r forwards to fill the pipeline, then one forward and one backward in turn, then the rest."""
    schedule = []
    for rank in range(stages):
        ahead = min(stages - 1 - rank, microbatches)
        forwards = [Action("F", m) for m in range(microbatches)]
        backwards = [Action("B", m) for m in range(microbatches)]
        steady = [a for pair in zip(forwards[ahead:], backwards) for a in pair]
        schedule.append(forwards[:ahead] + steady + backwards[microbatches - ahead :])
    return schedule


SCHEDULES = {"naive": naive, "gpipe": gpipe, "1f1b": one_f_one_b}


def forward_only(stages, microbatches):
    """For evaluation and sampling."""
    return [[Action("F", m) for m in range(microbatches)] for _ in range(stages)]


def play(schedule, forward, shape, dtype, device, down, up):
    """Play this rank's part of a schedule; the rank's place in group `down` is its stage. Messages are matched by their
    order: neighbours must have their forwards, and their backwards, in the same order (`simulate` checks that).

    forward(microbatch, x): runs the stage on x, the activations of the stage before (`shape`, `dtype`), or None on the first
        stage, which has the micro-batch's input itself; returns activations, or on the last stage the loss (or anything, in
        a schedule without backward).
    down, up: process groups of the pipeline's ranks; activations go by the one, gradients by the other.
    Gradients accumulate in the parameters. Returns the results of the last stage, detached, in the order of the schedule;
    an empty list on the others. A micro-batch's activations are freed as soon as its backward is done.
    """
    rank, stages = dist.get_rank(down), dist.get_world_size(down)
    first, last = rank == 0, rank == stages - 1
    actions = schedule[rank]
    incoming, alive, sends, results = {}, {}, [], []

    def post(action):
        """Offer a buffer for what `action` needs from a neighbour."""
        if action.kind == "F" and not first:
            buffer = torch.empty(shape, dtype=dtype, device=device)
            incoming[action] = buffer, dist.irecv(buffer, group=down, group_src=rank - 1)
        if action.kind == "B" and not last:
            buffer = torch.empty(shape, dtype=dtype, device=device)
            incoming[action] = buffer, dist.irecv(buffer, group=up, group_src=rank + 1)

    def receive(action):
        if action not in incoming:
            return None
        buffer, work = incoming.pop(action)
        work.wait()
        return buffer

    def send(tensor, group, to):
        sends[:] = [(t, w) for t, w in sends if not w.is_completed()]
        tensor = tensor.contiguous()
        sends.append((tensor, dist.isend(tensor, group=group, group_dst=to)))  # tensor and work live until it is done

    for action in actions[:1]:
        post(action)
    for i, action in enumerate(actions):
        for following in actions[i + 1 : i + 2]:
            post(following)
        received = receive(action)
        if action.kind == "F":
            x = received
            if x is not None and torch.is_grad_enabled():
                x.requires_grad_()
            y = forward(action.microbatch, x)
            if last:
                results.append(y.detach())
            else:
                send(y.detach(), down, rank + 1)
            if y.requires_grad:
                alive[action.microbatch] = x, y
        else:
            x, y = alive.pop(action.microbatch)
            torch.autograd.backward(y, received)
            if not first:
                send(x.grad, up, rank - 1)
        x = y = received = None  # nothing of a finished micro-batch stays
    for _, work in sends:
        work.wait()
    return results


def balance(costs, stages):
    """Cut a list of costs into `stages` non-empty runs of neighbours so that the dearest run is as cheap as can be, and
    among those cuts the most even one. Returns the index range of each stage. Raises ValueError for too few items."""
    if len(costs) < stages:
        raise ValueError(f"{len(costs)} layers are too few for {stages} pipeline stages: each needs at least one")
    best = [{0: ((0, 0), [])}]  # best[s][n]: how to put the first n items on s stages: (dearest, squares), cuts
    for s in range(1, stages + 1):
        row = {}
        for n in range(s, len(costs) - (stages - s) + 1):
            options = []
            for start, ((dearest, squares), cuts) in best[-1].items():
                if start < n:
                    cost = sum(costs[start:n])
                    options.append(((max(dearest, cost), squares + cost * cost), [*cuts, range(start, n)]))
            row[n] = min(options, key=lambda option: option[0])
        best.append(row)
    return best[-1][len(costs)][1]


def stage_layers(config, stages):
    """Which layers each stage gets, as ranges: balanced by the work of a token, the output projection counted with the last
    layer. (The embedding is a look-up: no work beside a layer's.)"""
    head_size = config.width // config.heads
    attention = config.width * head_size * (2 * config.heads + 2 * config.kv_heads)
    layer = attention + config.width * config.hidden * (3 if config.mlp == "swiglu" else 2)
    costs = [layer] * config.layers
    costs[-1] += config.width * config.vocab
    return balance(costs, stages)


def split(model, stages, rank, tied_group=None):
    """Keep of a GPT what stage `rank` of `stages` runs, in place, and return it. Layers keep their names.

    Where embedding and output projection are one matrix and there are several stages, the first and the last each hold a
    copy. `tied_group` holds those two ranks: each copy's gradient is a partial sum over it, which `reduce_tied` completes.
    Raises ValueError for more stages than layers, and for a tied matrix without that group.
    """
    layers = stage_layers(model.config, stages)[rank]
    for name in list(model.blocks):
        if int(name) not in layers:
            del model.blocks[name]
    if model.config.tied and stages > 1:
        if tied_group is None:
            raise ValueError("a tied matrix on several stages needs tied_group, or its two copies drift apart")
        matrix = model.embed.token.weight
        matrix.placement = {"shape": matrix.shape, "split": {}, "partial": [tied_group]}
    if rank > 0:
        model.embed = None
    if rank < stages - 1:
        model.head = None
    return model


def reduce_tied(parameters):
    """Sum the tied matrix's gradients of the first and the last stage: call it after the last backward of a step."""
    for p in parameters:
        for group in getattr(p, "placement", {}).get("partial", ()):
            dist.all_reduce(p.grad, group=group)


def simulate(schedule, forward=1.0, backward=2.0):
    """Play a schedule without ranks: each action starts when its rank is free and what it needs is there.

    Returns for each rank a list of (start, end, action). Raises ValueError where the actions wait for each other for ever, or
    where neighbours do not take the micro-batches in the same order.
    """
    stages = len(schedule)
    for kind in "FB":
        orders = [[a.microbatch for a in actions if a.kind == kind] for actions in schedule]
        if any(order != orders[0] for order in orders):
            raise ValueError("stages take the micro-batches in different orders: their messages would be mixed up")
    done, clock, place, spans = {}, [0.0] * stages, [0] * stages, [[] for _ in range(stages)]
    while any(place[r] < len(schedule[r]) for r in range(stages)):
        moved = False
        for r in range(stages):
            while place[r] < len(schedule[r]):
                action = schedule[r][place[r]]
                needs = [(r, "F", action.microbatch)] if action.kind == "B" else []
                neighbour = r - 1 if action.kind == "F" else r + 1
                if 0 <= neighbour < stages:
                    needs.append((neighbour, *action))
                if any(need not in done for need in needs):
                    break
                start = max([clock[r], *(done[need] for need in needs)])
                clock[r] = start + (forward if action.kind == "F" else backward)
                done[(r, *action)] = clock[r]
                spans[r].append((start, clock[r], action))
                place[r], moved = place[r] + 1, True
        if not moved:
            raise ValueError("the schedule is stuck: " + ", ".join(f"rank {r} at {place[r]}" for r in range(stages)))
    return spans


def utilisation(spans):
    """The part of the time in which ranks work, from simulate's result; 1 minus it is the bubble."""
    makespan = max(end for row in spans for _, end, _ in row)
    return sum(end - start for row in spans for start, end, _ in row) / (len(spans) * makespan)


def in_flight(actions):
    """The largest number of micro-batches whose activations a rank holds at a time."""
    count = peak = 0
    for action in actions:
        count += 1 if action.kind == "F" else -1
        peak = max(peak, count)
    return peak


def timeline(spans):
    """The schedule as text, a row a stage: forward as its micro-batch's number, backward in brackets, idle as dots. A column
    is one unit of time: for whole durations."""
    cell = 1 + max(len(str(action.microbatch)) for row in spans for _, _, action in row)
    lines = []
    for row in spans:
        line = ""
        for start, end, action in row:
            line += ".".rjust(cell) * round(start - len(line) / cell)
            width = cell * round(end - start)
            text = str(action.microbatch)
            line += text.rjust(width) if action.kind == "F" else "[" + text.center(width - 2) + "]"
        lines.append(line)
    return "\n".join(lines)


# --- demo ---

import harness


def main():
    parser = harness.parser(__doc__, microbatches=8)
    parser.add_argument("--schedule", choices=list(SCHEDULES), default="1f1b", help="see above")
    args = parser.parse_args()
    config = harness.configure(args)
    harness.check_batch(args, 1)
    harness.launch(demo, args, check=lambda world: check(config, world))


def check(config, stages):
    """Refuse more stages than layers."""
    if config.layers < stages:
        raise harness.Refused(
            f"{config.layers} layers are too few for {stages} pipeline stages: use at most {config.layers}, or more --layers"
        )


def demo(run):
    args, config, rank, stages = run.args, run.config, run.rank, run.world
    down, up, ends = dist.group.WORLD, dist.new_group(), dist.new_group(sorted({0, stages - 1}))
    run.groups(down=down, up=up, tied=ends)
    schedule = SCHEDULES[args.schedule](stages, args.microbatches)
    model = run.fill(split(run.meta_model(), stages, rank, ends))
    parameters = list(model.parameters())
    optimizer = harness.make_optimizer(parameters, args)
    shape = (args.batch // args.microbatches, config.context, config.width)
    for step in run.steps(optimizer):
        optimizer.zero_grad(set_to_none=False)
        batches = run.microbatches(step)

        def forward(m, x):
            tokens, targets, samples = batches[m]
            return model(tokens if x is None else x, targets=targets, count=run.count, samples=samples)

        losses = play(schedule, forward, shape, run.dtype, run.device, down, up)
        reduce_tied(parameters)
        loss = torch.stack(losses).double().sum() if losses else torch.zeros((), dtype=torch.float64, device=run.device)
        run.update(step, model, optimizer, loss, over=[down], dealt=[down])

    one = shape[0] * shape[1] * shape[2] * run.dtype.itemsize
    sent = {
        ("send", "down"): ((rank < stages - 1) * args.microbatches * one, "m b T C e"),
        ("send", "up"): ((rank > 0) * args.microbatches * one, "m b T C e"),
    }
    if stages > 1 and config.tied and rank in (0, stages - 1):
        sent["all_reduce", "tied"] = (config.vocab * config.width * run.dtype.itemsize, "V C e, first and last stage")
    states = 2 if args.optimizer == "adamw" else 0
    whole = run.meta_model()
    block = sum(p.numel() for p in whole.blocks["0"].parameters())
    size = len(model.blocks) * block
    size += (rank == 0) * sum(p.numel() for p in whole.embed.parameters())
    if rank == stages - 1:
        alone = stages > 1 or not config.tied  # else the embedding has counted the tied matrix
        size += sum(p.numel() for p in whole.head.norm.parameters()) + alone * config.vocab * config.width
    size *= run.dtype.itemsize
    activations = harness.activation_bytes(config, shape[0], run.dtype.itemsize)
    held = {
        "parameters": (size, "blocks of the stage, and its end's matrix"),
        "gradients": (size, "the same"),
        "optimizer": (states * size, f"{states} x the same"),
        "activations_peak": (in_flight(schedule[rank]) * len(model.blocks) * activations, "in flight x blocks"),
    }
    spans, p, m = simulate(schedule), stages, args.microbatches
    busy, ideal = utilisation(spans), 1 / p if args.schedule == "naive" else m / (m + p - 1)
    formula = "1/p" if args.schedule == "naive" else "m / (m + p - 1)"
    layers = " ".join(f"{r.start}-{r.stop - 1}" for r in stage_layers(config, stages))
    notes = [
        f"layers of the stages: {layers}",
        f"micro-batches in flight, by stage: {' '.join(str(in_flight(actions)) for actions in schedule)}",
        f"utilisation {busy:.1%}, bubble {1 - busy:.1%}   {formula} = {ideal:.1%}   if backward takes two forwards:",
        *(f"    {line}" for line in timeline(spans).splitlines()),
    ]
    return run.receipt({"pp": stages, "schedule": args.schedule, "microbatches": m}, sent, held, notes)


if __name__ == "__main__":
    harness.script(main)
