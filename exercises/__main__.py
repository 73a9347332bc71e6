"""Exercises: find the bug that a failing receipt shows, and work out numbers.

    python -m exercises                                  lists them
    python -m exercises 7                                plants bug 7 in a copy, runs its receipt
    python -m exercises 7 --hint                         a clue; --solve says what is wrong
    python -m exercises 7 --check                        runs the copy's receipt again
    python -m exercises question                         lists the questions
    python -m exercises question 3 --answer 3.5GB        checks an answer; --solve works it out

A bug is planted in a copy of the project's files, runs/exercise-7: edit that. The answers and
more: docs/learn/exercises.md.
"""

import pathlib
import re
import subprocess
import sys
from typing import NamedTuple

from exercises.questions import QUESTIONS, is_right
from harness.flags import Parser
from harness.refusal import Refused
from harness.start import script

ROOT = pathlib.Path(__file__).parent.parent
COPIES = ROOT / "runs"
# Of train.py: a model that trains in a second. SGD, as AdamW hides a gradient of the wrong scale
SMALL = "--layers 2 --heads 2 --width 32 --context 16 --batch 8 --steps 2 --dtype float64"
SMALL += " --optimizer sgd --lr 0.3 --data LICENSE --device cpu --timeout 60"


class Exercise(NamedTuple):
    level: str
    run: str  # the script and its flags; SMALL is added for train.py and the like
    clue: str
    diff: str

    @property
    def file(self):
        return re.search(r"^--- a/(.*)$", self.diff, re.M)[1]

    @property
    def name(self):
        return pathlib.Path(self.file).stem

    def planted(self):
        """The text of the file with the bug. Line numbers don't count: the lines of a hunk must
        stand in the file exactly once."""
        text = "\n" + (ROOT / self.file).read_text()
        for hunk in re.split(r"^@@.*\n", self.diff, flags=re.M)[1:]:
            lines = hunk.splitlines(keepends=True)
            old = "".join(line[1:] for line in lines if line[0] in " -")
            new = "".join(line[1:] for line in lines if line[0] in " +")
            if text.count("\n" + old) != 1:
                raise Refused(f"{self.file} has changed: this bug's place is not in it once")
            text = text.replace("\n" + old, "\n" + new)
        return text[1:]


def load():
    """All exercises. A patch begins with its level, command and clue, one a line."""
    found = []
    for path in sorted(pathlib.Path(__file__).parent.glob("*.patch")):
        head, mark, diff = path.read_text().partition("--- a/")
        fields = dict(line.split(": ", 1) for line in head.splitlines())
        found.append(Exercise(**fields, diff=mark + diff))
    return found


def main():
    parser = Parser(__doc__)
    g = parser.add_argument_group("exercises")
    why = "an exercise's number; or the word question, and its number"
    g.add_argument("which", nargs="*", metavar="N", help=why)
    g.add_argument("--hint", action="store_true", help="print a clue")
    why = "print what is wrong, and the patch; of a question, how its answer is worked out"
    g.add_argument("--solve", action="store_true", help=why)
    why = "run the copy's receipt again: exit code 0 if it holds"
    g.add_argument("--check", action="store_true", help=why)
    why = "your answer to a question, with its unit: exit code 0 if it is right"
    g.add_argument("--answer", metavar="X", help=why)
    args = parser.parse_args()
    if args.which[:1] == ["question"]:
        sys.exit(question(args.which[1:], args))
    if args.answer is not None:
        raise Refused("--answer is for a question: write question and its number first")
    sys.exit(exercise(args.which, args))


def pick(words, things, kind):
    """The number in the command line, and the thing with that number."""
    number = int(words[0]) if words[0].isdecimal() and len(words[0]) < 9 else 0
    if len(words) > 1 or not 1 <= number <= len(things):
        given = " ".join(words)
        raise Refused(f"{given!r} is no {kind}: give one number from 1 to {len(things)}")
    return number, things[number - 1]


def answer(title):
    """An answer in docs/learn/exercises.md, as plain text."""
    page = (ROOT / "docs" / "learn" / "exercises.md").read_text()
    html = re.search(f"<summary>{title}</summary>(.*?)</details>", page, re.S)[1]
    return re.sub(r"<.*?>", "", re.sub(r'<a href="(.*?)">(.*?)</a>', r"\2 \1", html)).strip()


def exercise(words, args):
    """List the exercises, or do with one of them what the flags say. Returns the exit code."""
    exercises = load()
    if not words:
        print("number  level   the bug is in             its receipt")
        for number, bug in enumerate(exercises, 1):
            print(f"{number:6d}  {bug.level:6s}  {bug.file:24s}  {bug.run}")
        print(f"\nand {len(QUESTIONS)} questions: python -m exercises question")
        return 0
    number, bug = pick(words, exercises, "exercise")
    if args.hint:
        print(bug.clue)
        return 0
    if args.solve:
        print(answer(f"Bug {number}"))
        print(f"\nThis patch planted it:\n\n{bug.diff}", end="")
        return 0
    folder = COPIES / f"exercise-{number}"
    if args.check and not folder.exists():
        raise Refused("nothing is planted yet: leave out --check, it is for after your edits")
    if not folder.exists():
        plant(bug, folder)
    print(f"exercise {number}, {bug.level}. The receipt of python {bug.run}:\n", flush=True)
    if receipt(bug.run, folder) == 0:
        print(f"\nexercise {number} is solved: the receipt holds")
        return 0
    print(f"\nEdit {folder / bug.file} until the receipt holds:")
    print(f"python -m exercises {number} --check")
    return 1 if args.check else 0


def plant(bug, folder):
    """Copy the project's files, with the bug in them."""
    text = bug.planted()
    unfinished = folder.with_name(folder.name + ".unfinished")
    try:
        for source in [ROOT / "LICENSE", *ROOT.glob("*.py"), *ROOT.glob("*/*.py")]:
            target = unfinished / source.relative_to(ROOT)
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(source.read_bytes())
        (unfinished / bug.file).write_text(text)
        unfinished.rename(folder)
    except OSError as e:
        raise Refused(f"{folder} can't be written: {e}") from e


def receipt(run, folder):
    """Run a script in a folder. Returns its exit code."""
    name, *flags = run.split()
    if "import harness" in (folder / name).read_text():
        flags = [*SMALL.split(), *flags]
    start = ["-m", name[:-3].replace("/", ".")] if "/" in name else [name]
    return subprocess.run([sys.executable, *start, *flags], cwd=folder).returncode


def question(words, args):
    """List the questions, or ask, check or solve one. Returns the exit code."""
    if not words:
        for number, asked in enumerate(QUESTIONS, 1):
            print(f"{number:3d}  {asked.text}")
        return 0
    number, asked = pick(words, QUESTIONS, "question")
    if args.answer is not None:
        right = is_right(asked, args.answer)
        print("right" if right else f"no: question {number} --solve shows how to work it out")
        return 0 if right else 1
    print(asked.text)
    if args.solve:
        print(answer(f"Question {number}"))
    else:
        print(f"python -m exercises question {number} --answer 3.5{asked.unit}")
    return 0


if __name__ == "__main__":
    script(main)
