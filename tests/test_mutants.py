"""benchmarks/mutants.py: the bugs that it plants are bugs, and the demos' exit codes tell."""

import ast
import pathlib

import pytest
from test_house import TECHNIQUES

from benchmarks import mutants
from benchmarks.mutations import DEMO, mutations

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
    constant   7   3                     4
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
    found = [f"{m.kind} {m.line} {m.before} {m.after}" for m in mutations(SOURCE)]
    assert found == [" ".join(line.split()) for line in BUGS.strip().splitlines()]


def test_each_is_another_program():
    source = (ROOT / "ddp.py").read_text()
    found = mutations(source)
    assert len({mutation.apply(source) for mutation in found} - {source}) == len(found) > 50
    before = ast.dump(ast.parse(source))
    for mutation in mutants.choose(found, 12, 1, "ddp"):  # all 56 take seconds
        changed = mutation.apply(source)
        assert ast.dump(ast.parse(changed)) != before
        assert changed.partition(DEMO)[2] == source.partition(DEMO)[2]


def test_a_seed_draws_the_same():
    found = mutations(SOURCE)
    drawn = mutants.choose(found, 4, 1, "f")
    assert drawn == mutants.choose(mutations(SOURCE), 4, 1, "f") and len(set(drawn)) == 4
    assert drawn == sorted(drawn, key=found.index)
    assert any(mutants.choose(found, 4, seed, "f") != drawn for seed in (2, 3, 4))
    assert mutants.choose(found, 99, 1, "f") == found


def test_all_techniques_have_demos():
    assert list(mutants.COMMANDS) == TECHNIQUES
    assert all(mutants.COMMANDS.values())


@pytest.mark.parametrize(
    "code, said, expected",
    [
        (0, "", "survived"),
        (1, "", "receipt"),
        (2, "ddp.py: give more", "error"),
        (1, "Traceback (most recent call last)", "error"),
        (1, "rank 1 was ended by SIGSEGV", "error"),
        (1, f"no progress for {mutants.PATIENCE} s, though all ranks answer", "hung"),
        (None, "", "hung"),
    ],
)
def test_verdicts(code, said, expected):
    assert mutants.verdict(mutants.Result(code, said, set())) == expected


def test_a_script_that_hangs_is_stopped(tmp_path):
    (tmp_path / "stuck.py").write_text("import time\n\ndef main():\n    time.sleep(99)\n")
    attempt = mutants.Attempt(tmp_path, "stuck", "", tmp_path / "text.txt")
    assert mutants.wait(attempt, 0.3).code is None
    with pytest.raises(ChildProcessError):
        mutants.os.waitpid(attempt.pid, 0)


def test_a_bug_is_caught_and_a_harmless_change_is_not(tmp_path):
    """Real demos, because their exit code is what counts: three of 2 ranks, forked from here."""
    target = mutants.Target("ddp", tmp_path, mutants.write_text(tmp_path))
    target.learn("--nproc 2 --bucket-mb 0.01 --layers 1 --context 4")
    found = {(m.kind, m.before): m for m in target.mutations}
    bug = found["dropped", "bucket.flat.zero_()"]
    harmless = found["swapped", "placement.get('partial', ())"]._replace(
        after="placement.get('partial', ()) or ()"
    )
    ended = {t.mutation: t.outcome for t in mutants.try_all(target, [bug, harmless], 2)}
    assert ended == {bug: "receipt", harmless: "survived"}
    # sum_gradients is the plainest form, which the demo does not use
    [unused] = [m for m in target.mutations if m.before == "dist.all_reduce(p.grad, group=group)"]
    assert target.demos_of(unused) == []
