"""What the papers say that a rank sends and holds: one file per lesson, of the lesson's name. Each
has a function expected(sizes, group, ...) -> (sent, held); train.py adds them up, formulas.py has
what several need."""
