"""What is counted of a mixture of experts, from outside: rows that travel. For train.py."""

from functools import partial

import torch.distributed as dist

from harness.refusal import Refused
from receipts.formulas import SCALAR, held, summed


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
