"""What the papers say that a rank sends and holds: one file per lesson, of its name. Each has a
function expected(sizes, group, ...) -> (sent, held). formulas.py has what several need."""

import advanced  # its lessons have plain names
