"""What parameter_server.py refuses, what its ranks send and hold, and the replay of asynchronous
training in one process."""

from collections import Counter

import torch.distributed as dist

from harness.flags import check_batch
from harness.refusal import Refused
from proof.ledger import Ledger
from proof.one_process import OneProcess, Trainee
from proof.receipt import Count
from receipts.formulas import SCALAR, Group, held, sizes_of, summed


def check(args, world):
    """Refuse what does not fit so many ranks."""
    if args.staleness is None:
        return check_batch(args, world)
    if world == 1:
        raise Refused("--staleness needs a server and a worker: use --nproc 2 or more")
    if args.backend == "nccl":
        raise Refused("nccl can't receive from any worker: use --staleness with --backend gloo")
    check_batch(args, 1)


# --- what is sent and held


def expected(sizes, group, served):
    """(sent, held) of the server, which serves all parameters, or of a worker: it serves 0."""
    row = sizes.parameters() * sizes.e, "P e of gradients"
    if served:
        row = (group.ranks - 1) * served * sizes.e, "(N-1) P e of weights"
    sent = {("send", group.name): row}
    sent |= summed(group, 2 * SCALAR, "the loss and the norm, 8 bytes each")
    return sent, held_by(sizes, served)


def held_by(sizes, served):
    """Gradients that a rank does not serve have left at the end of a step."""
    rows = held(sizes)
    size, text = rows["activations_peak"]
    leaving = (sizes.parameters() - served) * sizes.e
    return rows | {
        "gradients": (served * sizes.e, "of what it serves"),
        "optimizer": (served * sizes.moments * sizes.master, f"{sizes.moments} x what it serves"),
        "activations_peak": (size + leaving, f"{text}, and gradients until they leave"),
    }


def synchronous(run):
    """What Run.receipt takes."""
    group, sizes = Group("dp", run.world), sizes_of(run.args, run.config, run.world)
    served = sizes.parameters() if run.rank == 0 else 0
    layout = {"dp": run.world, "sync": "server"}
    return layout, *expected(sizes, group, served), [], "the server" if served else "a worker"


def asynchronous(run, replay):
    """The same, where what is sent is the mean of all steps."""
    steps, workers, bound = run.args.steps, run.world - 1, run.args.staleness
    sizes = sizes_of(run.args, run.config)
    parameters, role, text = sizes.parameters(), "the server", "P e"
    size = parameters * sizes.e
    if run.rank > 0:
        own = len(range(run.rank - 1, steps, workers)) / steps
        size, text = own * (size + SCALAR), "P e and the loss, 8 bytes, of its share of the steps"
        parameters, role = 0, "a worker"
    counted = [number / steps for number in replay.ledger.sent["send", "dp"]]
    counted[:2] = map(round, counted[:2])
    sent = {("send", "dp"): (size, text, counted)}
    counts = Counter(staleness for _, staleness in run.gather(replay.history)[0])
    found = ", ".join(f"{staleness} in {counts[staleness]}" for staleness in sorted(counts))
    too_stale = sum(staleness > bound for staleness in counts)
    note = Count(f"staleness {found} steps; at most {bound}", too_stale, 0)
    layout = {"workers": workers, "staleness": bound}
    return layout, sent, held_by(sizes, parameters), [note], role


# --- asynchronous training, replayed in one process


class Replay(OneProcess):
    """One process that pushes and pulls in the order of a server's history: each gradient is one of
    the weights that the worker had pulled, and moves those that the server had by then.

    history: of each step, the worker whose gradient it took, and the gradient's staleness. ledger:
    counts what is sent in all steps."""

    has_diagnosis = False

    def __init__(self, run):
        self.history, self.ledger = [], Ledger({"dp": dist.group.WORLD})
        if run.proven < run.args.steps:
            run.args.prove = 0  # all steps are replayed or none: between two, workers are at work

    def train(self, run, steps):
        if run.rank > 0:
            return [None]
        alone, before = Trainee(run), []  # the weights before each step
        for step, (worker, staleness) in enumerate(self.history[:steps]):
            before.append({name: weight.clone() for name, weight in alone.weights.items()})
            turn = [worker for worker, _ in self.history[:step]].count(worker)
            [rows] = run.microbatches(worker - 1 + turn * (run.world - 1), pieces=1)
            load(alone, before[step - staleness])
            alone.backward(rows, run.target_count)
            load(alone, before[step])
            alone.update(step)
        return [alone]


def load(alone, weights):
    for name, weight in weights.items():
        alone.weights[name].copy_(weight)
