"""What ddp.py refuses, and what its ranks send and hold: 2 r P e, however it is summed."""

from harness.flags import check_batch
from harness.refusal import Refused
from proof.receipt import Count
from receipts import collectives
from receipts.formulas import SCALAR, Group, add, held, parameters_of, sizes_of, summed


def check(args, world):
    """Refuse flags that do not go together on `world` ranks."""
    if args.all_reduce != "torch" and args.sync in ("server", "naive"):
        raise Refused("--all-reduce needs buckets: use --sync bucketed or overlapped")
    check_batch(args, world)


def expected(sizes, group, copies=None, scalars=1, by_torch=True):
    """(sent, held). copies: the ranks with the same experts as this one, if experts have fewer
    copies than the rest. scalars: how many numbers are summed beside: the loss. by_torch: whether
    torch.distributed sums the gradients; the messages of another all-reduce have no formula."""
    own = sizes.parameters()
    common = own if copies is None else sizes.parameters(experts=0)
    text = "the loss and the norm, 8 bytes each" if scalars == 2 else "the loss, 8 bytes"
    sent = summed(group, scalars * SCALAR, text)
    if by_torch:
        sent = add(summed(group, common * sizes.reduced, "2 r P e"), sent)
    else:
        sent["send", group.name] = None, ""
    if copies is not None:
        sent |= summed(copies, (own - common) * sizes.reduced, "2 r P e of experts")
    return sent, held(sizes)


def of_demo(run, ddp, early):
    """(layout, sent, held, notes). ddp: the DDP, or None if the demo does without. early: how many
    buckets started during backward."""
    args, group, notes = run.args, Group("dp", run.world), []
    sizes = sizes_of(args, run.config, run.world)
    parameters = [p.elements * sizes.e for p in parameters_of(sizes)]
    by_torch = args.all_reduce == "torch"
    if not by_torch:
        cost = collectives.formulas(group.ranks, sum(parameters))[args.all_reduce]
        notes.append(f"a {args.all_reduce} all-reduce sends at most {cost.sent:,.0f} bytes a rank")
    due = bucket_count(parameters, args.bucket_mb * 2**20)
    if args.sync == "bucketed":
        notes.append(Count(f"{len(ddp.buckets)} buckets", len(ddp.buckets), due))
    if args.sync == "overlapped":
        text = f"{early} of {len(ddp.buckets)} buckets started during backward"
        # Backward fills all of them, but for an expert's without tokens
        notes.append(Count(text, early, None if sizes.config.experts else due))
    return {"dp": run.world, "sync": args.sync}, *expected(sizes, group, by_torch=by_torch), notes


def bucket_count(parameters, bucket_bytes):
    """How many buckets hold parameters of so many bytes, from the last to the first."""
    count, room = 0, -1
    for size in reversed(parameters):
        if size > room:
            count, room = count + 1, bucket_bytes
        room -= size
    return count
