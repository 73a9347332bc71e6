"""What any script needs before its first step: ranks, flags, text."""

from harness import signals

# isort: split
from harness.blocks import RECOMPUTATIONS, compile_blocks, recompute
from harness.files import check_folder, read_json, short
from harness.flags import (
    DTYPES,
    MEGABYTES,
    NATURAL,
    POSITIVE,
    SPEED,
    Parser,
    check_batch,
    configure,
    count,
    parser,
    quantity,
    real,
)
from harness.optimizer import (
    all_reduce,
    clip,
    grad_norm,
    learning_rate,
    make_optimizer,
    reduce_scatter,
    sum_over,
)
from harness.placement import placement_of, take
from harness.plots import check_plot, plot_flag, pyplot, save
from harness.presets import parameter_count
from harness.refusal import Refused, refusing, say
from harness.stages import Stages, split
from harness.start import script
