"""exercises/: each patch applies to the present files, the answers are computed, edits are kept.

`pytest -m commands` also runs all exercises: the receipt fails with the bug, and holds without."""

import ast
import re

import pytest

import exercises.__main__ as exercises
from exercises import questions
from exercises.questions import QUESTIONS
from harness.refusal import Refused

BUGS = exercises.load()
NUMBERS = range(1, len(BUGS) + 1)


@pytest.fixture
def run(monkeypatch, tmp_path, capfd):
    """run("7 --hint") -> (exit code, what it and its receipt printed). Copies go to tmp_path."""
    monkeypatch.setattr(exercises, "COPIES", tmp_path)

    def call(words):
        monkeypatch.setattr(exercises.sys, "argv", ["exercises", *words.split()])
        with pytest.raises((SystemExit, Refused)) as ended:
            exercises.main()
        if isinstance(ended.value, Refused):
            return 2, str(ended.value)
        return ended.value.code, "".join(capfd.readouterr())

    return call


@pytest.mark.parametrize("number", NUMBERS)
def test_each_patch_applies_and_makes_another_program(number, run):
    bug = BUGS[number - 1]
    text, planted = (exercises.ROOT / bug.file).read_text(), bug.planted()
    assert ast.dump(ast.parse(planted)) != ast.dump(ast.parse(text))
    assert bug.level in ("easy", "medium", "hard")
    assert (exercises.ROOT / bug.run.split()[0]).exists()
    assert run(f"{number} --hint") == (0, bug.clue + "\n")
    code, said = run(f"{number} --solve")
    assert code == 0 and "It happened here. https://github.com/" in said and bug.diff in said


def test_the_list_and_the_clues_do_not_give_bugs_away(run):
    code, said = run("")
    assert code == 0
    for number, bug in enumerate(BUGS, 1):
        assert said.splitlines()[number].split()[:3] == [str(number), bug.level, bug.file]
        for line in re.findall(r"^[+-] +(.*)$", bug.diff, re.M):
            assert len(line) < 12 or line not in said + bug.clue


def test_a_patch_without_its_place_is_refused(run, monkeypatch, tmp_path):
    bug = BUGS[6]
    twice = bug.diff.partition("@@")[0] + "@@ -1 +1 @@\n-\n+# a line that is empty\n"
    for diff in (bug.diff.replace("self.gradient_shard", "no.such.line"), twice):
        monkeypatch.setattr(exercises, "load", lambda diff=diff: [bug._replace(diff=diff)])
        code, said = run("1")
        assert code == 2 and "has changed" in said and not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "words, sentence",
    [
        ("99", "give one number from 1 to"),
        ("seven", "give one number from 1 to"),
        ("question 99", "give one number from 1 to"),
        ("7 --answer 3GB", "write question and its number first"),
        ("question 1 --answer much", "write it as 3.5GB"),
        ("question 7 --answer 3GB", "write it as 3.5%"),
        ("7 --check", "nothing is planted yet"),
    ],
)
def test_misuse_is_refused(run, words, sentence):
    code, said = run(words)
    assert code == 2 and sentence in said


def test_one_exercise_from_beginning_to_end(run, tmp_path):
    """As a reader does it: the ranks of a real launch must run the copy's files, and no others."""
    number = next(n for n, bug in enumerate(BUGS, 1) if "bucket.flat /=" in bug.diff)
    bug, folder = BUGS[number - 1], tmp_path / f"exercise-{number}"
    code, said = run(str(number))
    assert code == 0 and "NOT proven: the gradient " in said and str(folder / bug.file) in said
    for source in [*exercises.ROOT.glob("*.py"), *exercises.ROOT.glob("advanced/*.py")]:
        copied = (folder / source.relative_to(exercises.ROOT)).read_text()
        assert copied == (bug.planted() if source.stem == bug.name else source.read_text())
    right = (exercises.ROOT / bug.file).read_text()
    (folder / bug.file).write_text(right)
    code, said = run(f"{number} --check")
    assert code == 0 and "proven" in said and f"exercise {number} is solved" in said
    assert (folder / bug.file).read_text() == right


@pytest.mark.parametrize("result, code", [(0, 0), (1, 1)])
def test_check_tells_by_its_exit_code(run, monkeypatch, tmp_path, result, code):
    (tmp_path / "exercise-7").mkdir()
    monkeypatch.setattr(exercises, "receipt", lambda *_: result)
    assert run("7 --check")[0] == code and run("7")[0] == 0
    assert not list((tmp_path / "exercise-7").iterdir())  # it is the learner's


@pytest.mark.commands
@pytest.mark.parametrize("number", NUMBERS)
def test_the_receipt_catches_each_bug(number, tmp_path):
    exercises.plant(BUGS[number - 1], tmp_path / "copy")
    assert exercises.receipt(BUGS[number - 1].run, tmp_path / "copy") == 1


@pytest.mark.commands
@pytest.mark.parametrize("command", sorted({bug.run for bug in BUGS}))
def test_the_receipts_hold_without_bugs(command):
    assert exercises.receipt(command, exercises.ROOT) == 0


# --- questions

# Worked out by hand, from the papers' formulas
BY_HAND = [
    7e9 * (2 + 14 / 32),
    80e9 * 64 / 16,
    2 * 7 / 8 * 1e9,
    2046 * 5e-6 + 2 * 1023 / 1024 * 1e6 / 50e9,
    8 * 7 / 8 * 8192 * 4096 * 2 * 32,
    48 * 16 * 1600 * 1024 * 2,
    3 / 11,
    1.5 / 9.5,
    0.25 * 2 * 400e12 / 50e9,
    2 * 16384 * 1024 * (14 * 2 + 8 * 4),
    0.4 * 989e12 / (6 * 7504658432 + 12 * 32 * 8192 * 4096),
    12.879e9 / 46.703e9,
]


def test_questions_can_be_asked_checked_and_solved(run):
    assert len(QUESTIONS) == len(BY_HAND)
    listed = run("question")[1]
    for number, (asked, expected) in enumerate(zip(QUESTIONS, BY_HAND), 1):
        assert asked.work() == pytest.approx(expected, rel=1e-3), number
        assert asked.text in listed and asked.text in run(f"question {number}")[1]
        code, said = run(f"question {number} --solve")
        shown = said.split(". ")[-1].strip()  # the page's answer is its last words
        assert questions.parse(asked, shown) == pytest.approx(expected, rel=1e-3), number
        right = shown.replace(" ", "")
        assert run(f"question {number} --answer {right}") == (0, "right\n")
        assert run(f"question {number} --answer 3.5{asked.unit}")[0] == 1
