"""What the demos of tensor and sequence parallelism should send and hold: their receipts' formulas.

Letters: B sequences of T tokens, C wide, V tokens in the vocabulary, t ranks, r = (t-1)/t, P
parameters of e bytes.
"""

import torch.distributed as dist

from harness import presets
from harness.start import Refused
from proof.saved import saved_bytes
from receipts import formulas

NORM = 8  # bytes: the squared gradient norm is one float64


def check_padding(config, t):
    """Refuse tokens that do not divide by t ranks, with experts: routers would count the padding,
    and choose experts for it."""
    if config.experts and config.context % t:
        raise Refused(
            f"experts take no padding: --context {config.context} must be a multiple of {t}"
        )


def tensor_parallel(run):
    """(sent, held) for the receipt of a `run` whose whole world is tensor-parallel."""
    t, config, e = run.world, run.config, run.dtype.itemsize
    tokens = run.args.batch * config.context
    size = formulas.tensor_parallel_sent(config, t, tokens, e, config.layers)
    size += formulas.all_reduce_sent(NORM, t)
    text = f"8 r B T C e a block, 4 r B T C e + 6 r B T max(e, 4) for both ends; r = {t - 1}/{t}"
    sent = {("all_reduce", "tp"): (size, text)}
    block = formulas.activation_bytes(config, run.args.batch // run.args.microbatches, e, t)
    text = "norms' values of the blocks, and 1/t of heads' and hidden ones"
    return sent, states(run) | {"activations_peak": (config.layers * block, text)}


def sequence_parallel(run, model, keep):
    """(sent, held, notes) for the receipt. keep: whether what f gathers is kept until backward."""
    t, config, e = run.world, run.config, run.dtype.itemsize
    shape = run.args.batch, config.context, e, config.layers
    size = formulas.sequence_parallel_sent(config, t, *shape, keep=keep)
    partial = formulas.partial_parameters(config, config.layers)
    reduced = size["all_reduce"] + formulas.all_reduce_sent(partial * e + NORM, t)
    scatter = "all_to_all" if dist.get_backend() == "gloo" else "reduce_scatter"
    once = "4 r B T C e a block, 2 r B T C e for both ends"
    again = "6 r B T C e a block, 3 r B T C e for both ends"
    sent = {
        ("all_gather", "tp"): (size["all_gather"], once if keep else again),
        (scatter, "tp"): (size["reduce_scatter"], once),
        ("all_reduce", "tp"): (reduced, f"6 r B T max(e, 4): the loss; 2 r P e: P = {partial:,}"),
    }
    rows = run.args.batch // run.args.microbatches
    block = formulas.activation_bytes(config, rows, e) / t
    text = "1/t of one process's of all blocks"
    if keep:
        block += 2 * rows * config.context * config.width * e * (t - 1) / t
        text += ", and what f gathered"
    held = states(run) | {"activations_peak": (config.layers * block, text)}
    return sent, held, [kept_by_a_block(run, model, block)]


def states(run):
    """Rows of the receipt for parameters, gradients and optimizer: the layers are cut, whatever
    sees the residual stream is whole."""
    size = presets.parameters_held(run.config, run.world, run.config.layers) * run.dtype.itemsize
    return run.states(size, "(P_whole + P_split / t) e, padded")


def kept_by_a_block(run, model, expected):
    """A line for the receipt: what the first block of this rank's model keeps, beside the formula's
    `expected` bytes, and beside tensor parallelism and one process."""
    tokens, _, samples = run.microbatches(0)[0]
    block, element = next(iter(model.blocks.values())), run.dtype.itemsize
    tensor = tokens.numel() * run.config.width * element  # bytes of one (B, T, C)
    kept = saved_bytes(model, block, tokens, samples=samples) / tensor
    tensor_parallel, one = (
        formulas.activation_bytes(run.config, len(tokens), element, ranks) / tensor
        for ranks in (run.world, 1)
    )
    return (
        f"a block keeps {kept:.2f} B T C e for backward, counted; formula {expected / tensor:.2f}, "
        f"tensor parallelism {tensor_parallel:.2f}, one process {one:.2f}"
    )
