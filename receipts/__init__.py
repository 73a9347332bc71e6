"""What the papers say that a rank sends and holds: a file per technique of train.py, with a
function expected(sizes, group, ...) -> (sent, held). formulas.py has what several need."""

import advanced  # its lessons have plain names
