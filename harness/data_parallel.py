"""What the receipt of ddp.py's demo is held against."""

from harness import network
from harness.formulas import activation_bytes, data_parallel_sent


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
    if args.sync == "overlapped":
        notes.append(f"{sync.early} of {len(sync.buckets)} buckets started during backward")
    sent = data_parallel_sent(args.sync, args.all_reduce, size, n, run.rank)
    return sent, held, notes
