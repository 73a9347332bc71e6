"""tests/mutants.py: the bugs that it plants are bugs, and the demos' exit codes tell."""

import pathlib

from test_house import TECHNIQUES

from tests import mutants

ROOT = pathlib.Path(__file__).parent.parent

SOURCE = '''"""Doc + string."""

import torch

def f(x, y, n=1 + 2):
    """Doc of f."""
    total = x + 3
    if not total > 4:
        raise ValueError(f"{x + 1} is too small, {5 + y}")
    why = "a" + "b"
    if x and y:
        problem = 6 + 7
        raise ValueError(why, problem)
    if n == 8:
        wire.refuse(9)
    check_sizes(x, y)
    total += y
    x.copy_(y)
    for name in x:
        if name is y:
            raise ValueError(10 * 11)
    while x and total < n:
        total: int = g(x, y)
    return total if flag else -y

def check_sizes(x, y):
    assert x + 12 < y

# --- demo ---

print(13 + 14)
'''
BUGS = """
    operator   7   x + 3                 (x - 3)
    constant   7   3                     (4)
    dropped    17  total += y            pass
    operator   17  total += y            total -= y
    dropped    18  x.copy_(y)            pass
    negated    22  x and total < n       (not (x and total < n))
    operator   22  x and total < n       (x or total < n)
    operator   22  total < n             (total <= n)
    swapped    23  g(x, y)               (g(y, x))
    negated    24  flag                  (not flag)
    operator   24  -y                    (y)
"""


def test_only_what_changes_a_number_is_changed():
    found = [f"{m.kind} {m.line} {m.before} {m.after}" for m in mutants.mutations(SOURCE)]
    assert sorted(found) == sorted(" ".join(line.split()) for line in BUGS.strip().splitlines())


def test_all_techniques_have_demos():
    assert list(mutants.COMMANDS) == TECHNIQUES


def test_verdicts():
    assert mutants.verdict(0, "") == "survived" and mutants.verdict(1, "") == "receipt"
    assert mutants.verdict(2, "ddp.py: give more") == "error"
    assert mutants.verdict(1, "Traceback (most recent call last)") == "error"
    stalled = f"no progress for {mutants.PATIENCE} s, though all ranks answer"
    assert mutants.verdict(1, stalled) == mutants.verdict(None, "") == "hung"


def test_a_bug_is_caught_and_a_harmless_change_is_not(tmp_path):
    """Real demos, because their exit code is what counts: three of 2 ranks, forked from here."""
    mutants.write_text(tmp_path)
    target = mutants.Target("ddp", tmp_path)
    flags = "--nproc 2 --bucket-mb 0.01 --layers 1 --context 4"
    target.learn(flags)
    found = {(m.kind, m.before): m for m in mutants.mutations(target.source)}
    bug = found["dropped", "bucket.flat.zero_()"]
    harmless = found["swapped", "placement.get('partial', ())"]._replace(
        after="(placement.get('partial', ()) or ())"
    )
    assert target.try_out(bug) == ("receipt", flags)
    assert target.try_out(harmless) == ("survived", flags)
    # sum_gradients is the plainest form, which the demo does not use
    assert target.demos_of(found["dropped", "dist.all_reduce(p.grad, group=group)"]) == []
