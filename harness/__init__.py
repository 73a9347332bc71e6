"""What every demo shares: start-up of ranks, flags, text, bookkeeping of steps, proof, receipt."""

from harness.blocks import RECOMPUTATIONS, compile_blocks, recompute
from harness.flags import (
    DTYPES,
    MEGABYTES,
    NATURAL,
    POSITIVE,
    SIZE,
    SPEED,
    TIME,
    Parser,
    check_batch,
    configure,
    count,
    parser,
    precision_flags,
    quantity,
    real,
)
from harness.large_vocabulary import lean_head
from harness.optimizer import all_reduce, clip, grad_norm, learning_rate, make_optimizer, sum_over
from harness.placement import placement, take
from harness.plots import check_picture, check_plot, plot_flag, pyplot, save
from harness.presets import parameter_count
from harness.proof import larger
from harness.refusal import Refused, refusing, say
from harness.run import Rank, Run, launch
from harness.stages import Stages, split
from harness.start import script
from harness.tolerance import FLOOR, TOLERANCE
