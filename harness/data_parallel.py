"""What the receipt of ddp.py's demo is held against."""

from harness import network
from harness.formulas import activation_bytes, data_parallel_sent
from harness.receipt import Count


def expected(run, parameters, sync, takes_step):
    """(sent, held, notes) of a training step. sync: the demo's DDP."""
    args, n = run.args, run.world
    size = sum(p.nbytes for p in parameters)
    held = run.states(size, "P e", takes_step)
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
    sent = data_parallel_sent(args.sync, args.all_reduce, size, n, run.rank)
    return sent, held, notes


def bucket_count(parameters, bucket_bytes):
    """How many buckets of at most so many bytes hold the parameters, from the last to the first. A
    larger parameter has its own."""
    count, filled = 0, bucket_bytes
    for p in reversed(parameters):
        filled += p.nbytes
        if filled > bucket_bytes or count == 0:
            count, filled = count + 1, p.nbytes
    return count
