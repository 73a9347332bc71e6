"""What ddp.py's ranks send and hold: 2 r P e, however it is summed."""

from harness import flags
from proof.receipt import Count
from receipts import parameter_server
from receipts.formulas import SCALAR, Group, add, held, parameters_of, sizes_of, summed


def gone(parser):
    parameter_server.gone(parser)
    instead = "collectives.py compares the algorithms; your own code has DDP(..., all_reduce=f)"
    flags.gone(parser, "--all-reduce", instead)


def expected(sizes, group, copies=None, scalars=1):
    """(sent, held). copies: the ranks with the same experts as this one, if experts have fewer
    copies than the rest. scalars: how many numbers are summed beside: the loss."""
    own = sizes.parameters()
    common = own if copies is None else sizes.parameters(experts=0)
    sent = summed(group, common * sizes.reduced, "2 r P e")
    sent = add(sent, summed(group, scalars * SCALAR, "the loss, 8 bytes"))
    if copies is not None:
        sent |= summed(copies, (own - common) * sizes.reduced, "2 r P e of experts")
    return sent, held(sizes)


def of_demo(run, buckets=0, early=0):
    """(layout, sent, held, notes). early: how many of the buckets started during backward."""
    args, group, notes = run.args, Group("dp", run.world), []
    sizes = sizes_of(args, run.config, run.world)
    parameters = [p.elements * sizes.e for p in parameters_of(sizes)]
    due = bucket_count(parameters, args.bucket_mb * 2**20)
    if args.sync == "bucketed":
        notes.append(Count(f"{buckets} buckets", buckets, due))
    if args.sync == "overlapped":
        text = f"{early} of {buckets} buckets started during backward"
        # Backward fills all of them, but for an expert's without tokens
        notes.append(Count(text, early, None if sizes.config.experts else due))
    return {"dp": run.world, "sync": args.sync}, *expected(sizes, group), notes


def bucket_count(parameters, bucket_bytes):
    """How many buckets hold parameters of so many bytes, from the last to the first."""
    count, room = 0, -1
    for size in reversed(parameters):
        if size > room:
            count, room = count + 1, bucket_bytes
        room -= size
    return count
