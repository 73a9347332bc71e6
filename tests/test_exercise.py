"""harness/exercise.py: the bugs have their places, the answers are computed, the copy is safe.

`pytest -m commands` also runs all exercises, with and without their bug's repair."""

import ast
import contextlib
import io
import subprocess
import sys
import time

import pytest

from harness import exercise, formulas, questions
from harness.bugs import BUGS, LEVELS
from harness.start import Refused

NUMBERS = range(1, len(BUGS) + 1)
FILES = "collectives ddp zero tensor_parallel sequence_parallel pipeline context_parallel".split()
FILES += ["expert_parallel", "diloco"]


@pytest.fixture
def run(monkeypatch):
    """run("7 --hint") -> (exit code, what it printed), in this process."""

    class Ended(Exception):
        pass

    def finish(code):
        raise Ended(code)

    def call(words):
        monkeypatch.setattr(exercise, "finish", finish)
        monkeypatch.setattr(sys, "argv", ["exercise", *words.split()])
        said = io.StringIO()
        with contextlib.redirect_stdout(said), pytest.raises((Ended, Refused)) as ended:
            exercise.main()
        if isinstance(ended.value, Refused):
            return 2, str(ended.value)
        return ended.value.args[0], said.getvalue()

    return call


# --- the bugs


@pytest.mark.parametrize("number", NUMBERS)
def test_each_bug_has_one_place(number):
    bug = BUGS[number - 1]
    text = (exercise.ROOT / bug.file).read_text()
    assert text.count(bug.old) == 1
    planted = exercise.planted_text(bug)
    # It compiles, and is another program: not a comment or a docstring alone
    assert ast.dump(ast.parse(planted)) != ast.dump(ast.parse(text))
    assert bug.level in LEVELS and bug.hint and bug.why
    assert bug.seen.startswith("https://github.com/")
    assert (exercise.ROOT / bug.run.split()[0]).exists()
    diff = exercise.difference(bug)
    assert "\n+" in diff and "\n@@" in diff


def test_there_are_enough_of_each():
    assert len(BUGS) >= 20 and {bug.level for bug in BUGS} == set(LEVELS)
    for name in FILES:
        assert sum(bug.file == f"{name}.py" for bug in BUGS) >= 2, name
    assert len({(bug.file, bug.old) for bug in BUGS}) == len(BUGS)


def test_the_list_and_the_hints_do_not_give_bugs_away(run):
    start = time.monotonic()
    code, said = run("")
    assert time.monotonic() - start < 3
    assert code == 0
    lines = said.splitlines()
    for number, bug in enumerate(BUGS, 1):
        assert lines[number].split()[:3] == [str(number), bug.level, bug.file]
    for bug in BUGS:
        for line in (bug.old + bug.new).splitlines():
            assert len(line.strip()) < 12 or line.strip() not in said + bug.hint
    for number in NUMBERS:
        assert run(f"{number} --hint") == (0, BUGS[number - 1].hint + "\n")
        code, said = run(f"{number} --solve")
        assert code == 0 and BUGS[number - 1].seen in said


# --- the copy


def test_the_copy_is_whole_and_the_project_is_not_touched(run, tmp_path):
    before = {path: path.read_bytes() for path in exercise.ROOT.glob("**/*.py")}
    bug, folder = BUGS[6], tmp_path / "copy"
    exercise.plant(bug, 7, folder)
    assert run(f"7 --folder {folder} --show") == (0, f"{folder}\n")
    for pattern in exercise.COPIED:
        for path in exercise.ROOT.glob(pattern):
            copied = (folder / path.relative_to(exercise.ROOT)).read_text()
            is_planted = path == exercise.ROOT / bug.file
            assert copied == (exercise.planted_text(bug) if is_planted else path.read_text())
    assert before == {path: path.read_bytes() for path in exercise.ROOT.glob("**/*.py")}


def test_edits_are_kept_until_reset(run, tmp_path, monkeypatch):
    monkeypatch.setattr(exercise, "receipt", lambda bug, folder: (1, "FAILED"))
    file = tmp_path / "copy" / BUGS[6].file
    code, said = run(f"7 --folder {tmp_path}/copy")
    assert code == 0 and "FAILED" in said and str(file) in said
    file.write_text("# edited\n")
    assert run(f"7 --folder {tmp_path}/copy --check")[0] == 1
    assert run(f"7 --folder {tmp_path}/copy")[0] == 0 and file.read_text() == "# edited\n"
    run(f"7 --folder {tmp_path}/copy --reset")
    assert file.read_text() == exercise.planted_text(BUGS[6])
    monkeypatch.setattr(exercise, "receipt", lambda bug, folder: (0, "proven"))
    code, said = run(f"7 --folder {tmp_path}/copy --check")
    assert code == 0 and "solved" in said


def test_the_default_folder_is_this_users(monkeypatch, tmp_path, run):
    monkeypatch.setattr(exercise.tempfile, "gettempdir", lambda: str(tmp_path))
    code, said = run("7 --show")
    assert code == 2 and "nothing is planted" in said
    exercise.plant(BUGS[6], 7, exercise.folder_of(7))
    code, said = run("7 --show")
    assert code == 0 and said.startswith(str(tmp_path))
    assert (exercise.folder_of(7).parent.stat().st_mode & 0o777) == 0o700


@pytest.mark.parametrize(
    "words, sentence",
    [
        ("99", "give one number from 1 to"),
        ("seven", "give one number from 1 to"),
        ("7 8", "give one number from 1 to"),
        ("question 99", "give one number from 1 to"),
        ("7 --answer 3GB", "write question and its number first"),
        ("question 1 --answer much", "write it as 3.5GB"),
        ("question 7 --answer 3GB", "write it as 3.5%"),
        (f"7 --folder {exercise.ROOT}/copy", "must lie outside of it"),
        ("7 --folder {other} --reset", "give another --folder"),
        ("7 --folder {other}", "give another --folder"),
        ("8 --folder {copy} --reset", "give another --folder"),
        ("7 --folder {new} --check", "nothing is planted yet"),
        ("7 --folder /proc/nowhere", "give a --folder"),
    ],
)
def test_misuse_is_refused_and_nothing_is_lost(run, tmp_path, words, sentence):
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "thesis.txt").write_text("the only copy")
    exercise.plant(BUGS[6], 7, tmp_path / "copy")
    places = {name: tmp_path / name for name in ("other", "copy", "new")}
    code, said = run(words.format(**places))
    assert code == 2 and sentence in said
    assert (tmp_path / "other" / "thesis.txt").read_text() == "the only copy"
    assert (tmp_path / "copy" / exercise.MARK).read_text() == "7"


def test_a_bug_without_a_place_is_refused(run, monkeypatch, tmp_path):
    monkeypatch.setattr(exercise, "BUGS", [BUGS[6]._replace(old="no such line")])
    code, said = run(f"1 --folder {tmp_path}/new")
    assert code == 2 and "has changed" in said and not (tmp_path / "new").exists()


# --- its receipt


def test_a_run_that_hangs_is_ended(tmp_path):
    """One process, of Python alone."""
    (tmp_path / "ddp.py").write_text("import time\nprint('begun', flush=True)\ntime.sleep(60)\n")
    bug = BUGS[0]._replace(run="ddp.py")
    start = time.monotonic()
    code, said = exercise.receipt(bug, tmp_path, limit=3)
    assert code is None and "begun" in said and "still running after 3 seconds" in said
    assert time.monotonic() - start < 30


def test_one_exercise_from_beginning_to_end(run, tmp_path):
    """As a reader does it: the ranks of a real launch must run the copy's files, and no others. Two
    launches of 2 ranks."""
    number = next(n for n, bug in enumerate(BUGS, 1) if bug.file == "ddp.py" and "/=" in bug.new)
    bug, folder = BUGS[number - 1], tmp_path / "copy"
    words = [str(number), "--folder", str(folder)]
    command = [sys.executable, "-m", "harness.exercise", *words]
    done = subprocess.run(command, cwd=exercise.ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "step 1, backward: the loss is right" in done.stdout
    assert "as if averaged" in done.stdout and "FAILED" in done.stdout
    file = folder / bug.file
    file.write_text(file.read_text().replace(bug.new, bug.old))
    code, said = run(" ".join([*words, "--check"]))
    assert code == 0 and "proven" in said and f"exercise {number} is solved" in said


@pytest.mark.commands
@pytest.mark.parametrize("number", NUMBERS)
def test_the_receipt_catches_each_bug(number, tmp_path):
    bug = BUGS[number - 1]
    exercise.plant(bug, number, tmp_path / "copy")
    code, said = exercise.receipt(bug, tmp_path / "copy")
    assert code not in (0, None), said


@pytest.mark.commands
@pytest.mark.parametrize("run", sorted({bug.run for bug in BUGS}))
def test_the_receipts_hold_without_bugs(run, tmp_path):
    harmless = BUGS[0]._replace(new=BUGS[0].old, run=run)
    exercise.plant(harmless, 1, tmp_path / "copy")
    code, said = exercise.receipt(harmless, tmp_path / "copy")
    assert code == 0, said


# --- questions

# Worked out by hand, from the papers' formulas
BY_HAND = {
    1: 7e9 * (2 + 14 / 32),
    2: 80e9 * 64 / 16,
    3: 2 * 7 / 8 * 1e9,
    4: 2046 * 5e-6 + 2 * 1023 / 1024 * 1e6 / 50e9,
    5: 8 * 7 / 8 * 8192 * 4096 * 2 * 32,
    6: 48 * 16 * 1600 * 1024 * 2,
    7: 3 / 11,
    8: 1.5 / 9.5,
    9: 0.25 * 2 * 400e12 / 50e9,
    10: 2 * 16384 * 1024 * (14 * 2 + 8 * 4),
    11: 0.4 * 989e12 / (6 * 7504658432 + 12 * 32 * 8192 * 4096),
    12: 12.879e9 / 46.703e9,
}


def test_answers_are_those_worked_out_by_hand():
    assert len(questions.QUESTIONS) >= 10 and set(BY_HAND) == {
        *range(1, len(questions.QUESTIONS) + 1)
    }
    for number, expected in BY_HAND.items():
        answer, lines = questions.QUESTIONS[number - 1].work()
        assert answer == pytest.approx(expected, rel=1e-3), number
        assert lines and all(len(line) < 140 for line in lines)


def test_answers_are_computed(monkeypatch):
    """They follow the project's formulas, and are no constants."""
    monkeypatch.setattr(formulas, "all_reduce_sent", lambda size, n: 3 * size)
    assert questions.QUESTIONS[2].work()[0] == 3e9


@pytest.mark.parametrize("number", BY_HAND)
def test_questions_can_be_asked_checked_and_solved(run, number):
    asked = questions.QUESTIONS[number - 1]
    assert asked.text in run("question")[1] and asked.text in run(f"question {number}")[1]
    answer, _ = asked.work()
    units, usual = questions.UNITS[asked.kind]
    right = f"{answer / units[usual]:.4g}{usual}"
    assert run(f"question {number} --answer {right}") == (0, "right\n")
    assert questions.is_right(asked, asked.example) is False
    wrong = f"{1.1 * answer / units[usual]:.4g}{usual}"
    assert run(f"question {number} --answer {wrong}")[0] == 1
    code, said = run(f"question {number} --solve")
    assert code == 0 and "answer: " in said
    # The text alone does not tell
    assert f"{answer / units[usual]:.3g}" not in run(f"question {number}")[1]


def test_answers_may_have_any_unit():
    zero, fits = questions.QUESTIONS[0], questions.QUESTIONS[1]
    assert questions.parse(zero, "17000MB") == questions.parse(zero, "17GB") == 17e9
    assert questions.parse(fits, "320B") == questions.parse(fits, "320e9") == 320e9
    assert questions.parse(questions.QUESTIONS[6], "27%") == pytest.approx(0.27)
