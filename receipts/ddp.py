"""The flags of ddp.py's demo, and what its receipt is held against."""

from harness.flags import POSITIVE, check_batch
from harness.start import Refused
from proof.receipt import Count
from receipts import collectives as network
from receipts.formulas import activation_bytes, data_parallel_sent


def flags(parser):
    why = (
        "--sync server: deal the parameters out over so many servers, the first ranks (default: 1)"
    )
    parser.add_argument("--servers", **POSITIVE, help=why)


def check(args, world):
    """Refuse flags that do not go together on `world` ranks."""
    if args.all_reduce != "torch" and args.sync in ("server", "naive"):
        raise Refused("--all-reduce needs buckets: use --sync bucketed or overlapped")
    if args.servers and args.sync != "server":
        raise Refused("--servers is for parameter servers: add --sync server, or leave it out")
    if args.servers and args.servers > world:
        raise Refused(f"--servers {args.servers} needs as many ranks, and there are {world}")
    check_batch(args, world)


def expected(run, parameters, sync, servers):
    """(sent, held, notes, role) of a training step: see Run.receipt. sync: the demo's DDP. servers:
    its parameter servers, or None."""
    args, n = run.args, run.world
    size = sum(p.nbytes for p in parameters)
    held = run.states(size, "P e")
    share, role = None, None  # share: bytes that this rank serves
    if servers:
        role = "a server" if servers.mine else "a worker"
        share = sum(p.nbytes for p in servers.mine)
        moments = 2 if args.optimizer == "adamw" else 0
        held["optimizer"] = moments * share, f"{moments} x what it serves"
    sequences = args.batch // n // args.microbatches
    blocks = run.config.layers * activation_bytes(run.config, sequences, run.dtype.itemsize)
    held["activations_peak"] = blocks, "what backward needs of the blocks"
    notes = []
    if args.all_reduce != "torch":
        most = network.formulas(n, size)[args.all_reduce].sent
        notes.append(f"a {args.all_reduce} all-reduce sends at most {most:,.0f} bytes a rank")
    buckets = bucket_count(parameters, args.bucket_mb * 2**20)
    if args.sync == "bucketed":
        notes.append(Count(f"{len(sync.buckets)} buckets", len(sync.buckets), buckets))
    if args.sync == "overlapped":
        text = f"{sync.early} of {len(sync.buckets)} buckets started during backward"
        # Backward fills all of them, but for an expert's without tokens
        notes.append(Count(text, sync.early, None if run.config.experts else buckets))
    sent = data_parallel_sent(args.all_reduce, size, n, share)
    return sent, held, notes, role


def bucket_count(parameters, bucket_bytes):
    """How many buckets of at most so many bytes hold the parameters, from the last to the first. A
    larger parameter has its own."""
    count, filled = 0, bucket_bytes
    for p in reversed(parameters):
        filled += p.nbytes
        if filled > bucket_bytes or count == 0:
            count, filled = count + 1, p.nbytes
    return count
