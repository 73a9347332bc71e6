"""What is counted of a mixture of experts, from outside: rows that travel, the load of experts and
ranks. For the demo of expert_parallel.py and for train.py."""

import math
from functools import partial

import torch
import torch.distributed as dist

from harness.flags import real
from harness.refusal import Refused
from proof.receipt import Count
from receipts import ddp
from receipts.formulas import SCALAR, Group, add, held, sizes_of, summed

# --- flags


def flags(group):
    """What changes the load of experts. `check` has the rules."""
    why = "how far a bias on the router's choice moves towards even load after each step (0 = off)"
    group.add_argument("--bias-rate", type=real(0), default=0.0, metavar="X", help=why)
    why = "an expert takes at most X times its even share of a rank's tokens, and drops others; "
    why += "no layout equals another then: --prove is off (default: nothing is dropped)"
    group.add_argument("--capacity", type=real(0), metavar="X", help=why)


def check(args, config):
    """Refuse a capacity that drops every token, or none, and more pieces than tokens. With
    --capacity --prove is off, unless it is given."""
    if args.capacity == 0:
        raise Refused("--capacity 0 drops every token: 1 is an even share, or leave it out")
    if args.capacity is not None:
        most = config.experts / config.top_k  # if every token chooses the expert
        if args.capacity > most:
            why = f"an expert gets at most {most:g} times its even share"
            raise Refused(f"--capacity {args.capacity:g} drops no token, as {why}: leave it out")
        if args.prove is None:
            args.prove = 0
    check_chunks("--chunks", args.chunks, args, config)


def check_chunks(flag, chunks, args, config):
    """Refuse more pieces, each a message, than a micro-batch has tokens on all ranks together."""
    tokens = args.batch // args.microbatches * config.context
    if chunks > tokens:
        raise Refused(f"{flag} {chunks}, but a micro-batch has {tokens:,} tokens: use fewer")


# --- what a rank sends and holds


def ranks_of(args):
    """How many of train.py's ranks the experts, and their copies, are dealt out over."""
    return args.dp * args.cp * (args.tp if args.fold_experts else 1)


def experts_here(config, group):
    """How many experts a rank has. Where they don't divide, the first ranks have one more."""
    each, more = divmod(config.experts, group.ranks)
    return each + 1 if group.rank < more else each


def expected(sizes, group, travelled, chunks, scalars=0):
    """(sent, held). travelled: rows that went to other ranks' experts and came back from them, in
    all forwards. scalars: how many numbers are summed beside: the norm."""
    config, passes = sizes.config, sizes.forwards + 1
    forwards = sizes.forwards * sizes.blocks * sizes.microbatches
    counts = forwards * chunks * (config.experts - experts_here(config, group)) * 8
    rows = passes * travelled // sizes.forwards
    text = f"{passes} (rows out + rows in) C e, and the counts"
    sent = {("all_to_all", group.name): (rows * config.width * sizes.e + counts, text)}
    if scalars:
        sent |= summed(group, scalars * SCALAR, "the norm")
    return sent, held(sizes, "(P_common + experts here) e", "the blocks', if routing were even")


# --- what is counted


class RowCounter:
    """Counts the rows of mixtures' dispatches, in every forward since `clear`, a recomputation's
    too: stands in for ExpertDispatch.exchange_counts. An assignment is one of a token's k choices.

    assignments: of this rank. sent: those that were not dropped. received: rows for this rank's
    experts. travelled: rows that left for another rank or came from one."""

    def __init__(self, mixtures):
        self.clear()
        for dispatch in (mixture.dispatch for mixture in mixtures):
            rank, exchange = dist.get_rank(dispatch.group), dispatch.exchange_counts
            dispatch.exchange_counts = partial(self.count, rank, exchange)

    def clear(self):
        self.assignments = self.sent = self.received = self.travelled = 0

    def count(self, rank, exchange, chunks):
        """Calls `exchange`, which tells how many rows go to, and come from, each rank."""
        send, receive, incoming = exchange(chunks)
        self.assignments += sum(map(len, chunks))
        for chunk in send:
            self.sent += sum(chunk)
            self.travelled += sum(chunk) - chunk[rank]
        for chunk in receive:
            self.received += sum(chunk)
            self.travelled += sum(chunk) - chunk[rank]
        return send, receive, incoming


class Report:
    """What the demo of expert_parallel.py says of its run.

    Call after(step) at the end of each step, before gpt.rebalance clears the routers' loads."""

    def __init__(self, run, model):
        self.run = run
        self.mixtures = [block.mlp for block in model.blocks.values()]
        self.rows, self.load = RowCounter(self.mixtures), 0.0
        self.assignments = self.dropped = self.too_many = 0
        for mixture in self.mixtures if run.args.capacity is not None else []:
            mixture.router.register_forward_hook(self.count_too_many)

    def count_too_many(self, router, inputs, outputs):
        """How many of this rank's assignments are more than the experts have room for."""
        chosen, experts = outputs[1].flatten(0, 1), self.run.config.experts
        n, k = chosen.shape
        load = chosen.flatten().bincount(minlength=experts)
        room = math.ceil(self.run.args.capacity * k * n / experts)
        self.too_many += (load - room).clamp(min=0).sum().item()

    def after(self, step):
        rows = self.rows
        if step == self.run.measured:
            self.travelled, self.received = rows.travelled, rows.received
        self.assignments += rows.assignments
        self.dropped += rows.assignments - rows.sent
        rows.clear()
        self.load += torch.stack([mixture.router.load for mixture in self.mixtures])

    def show_load(self):
        """Print how often experts were chosen."""
        dist.all_reduce(self.load)
        self.run.print("\n" + load_table(self.load.cpu()))

    def of_demo(self):
        """(sent, held, notes) of the receipt. Other gradients are summed as by ddp.py."""
        run, args = self.run, self.run.args
        group = Group("ep", run.world, run.rank)
        sizes = sizes_of(args, run.config, run.world, experts=experts_here(run.config, group))
        sent, held = expected(sizes, group, self.travelled, args.chunks)
        alone = Group("copies", 1)  # an expert has no other copy
        sums, _ = ddp.expected(sizes, group, alone, scalars=2)
        own = self.received, self.assignments, self.dropped, self.too_many
        received, *totals = zip(*run.gather(own))
        assignments, dropped, too_many = map(sum, totals)
        share, step = max(received) / sum(received) * run.world, run.measured + 1
        notes = [f"in step {step} the fullest rank had {share:.0%} of an even share of rows"]
        if args.capacity is not None:
            text = f"capacity {args.capacity:g}: {dropped:,} assignments "
            text += f"({dropped / assignments:.1%}) dropped in {args.steps} steps"
            notes.append(Count(text, dropped, too_many))
        return add(sums, sent), held, notes


def load_table(load):
    """The load (layers, E) over the run as text: a row a layer, in percent of an even share."""
    # A router without a gradient has counted nothing: shares of 0
    shares = load / load.sum(1, keepdim=True).clamp(min=1) * load.shape[1]
    lines = ["load of experts over the run, percent of an even share"]
    for i, row in enumerate(shares.tolist()):
        lines.append(f"  layer {i:3d}  " + "".join(f"{100 * share:5.0f}" for share in row))
    return "\n".join(lines)
