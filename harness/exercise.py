"""Exercises: find the bug that a failing receipt shows, and work out numbers.

    python -m harness.exercise                                  lists them
    python -m harness.exercise 7                                plants bug 7 and runs its receipt
    python -m harness.exercise 7 --hint                         a hint; --solve shows the bug
    python -m harness.exercise 7 --check                        runs the receipt again
    python -m harness.exercise question                         lists the questions
    python -m harness.exercise question 3                       asks one
    python -m harness.exercise question 3 --answer 3.5GB        checks the answer

A bug is planted into a copy of the project's files, in a folder for temporary files or in --folder.
Edit the copy. The project's own files are never changed. docs/exercises.md has more.
"""

import contextlib
import difflib
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import tempfile

from harness import questions
from harness.bugs import BUGS, SMALL
from harness.flags import Parser
from harness.start import Refused, finish, script

ROOT = pathlib.Path(__file__).parent.parent
COPIED = ["*.py", "harness/*.py", "trainer/*.py", "simulator/*.py"]
MARK = ".exercise"  # a file in each copy, with the exercise's number
LIMIT = 300  # seconds for a receipt; a run that hangs ends by itself after --timeout


def main():
    parser = Parser(__doc__)
    g = parser.add_argument_group("exercises")
    why = "an exercise's number; or the word question, and its number"
    g.add_argument("which", nargs="*", metavar="N", help=why)
    why = "print where the copy is, and do nothing else"
    g.add_argument("--show", action="store_true", help=why)
    g.add_argument("--hint", action="store_true", help="print a hint")
    why = "print what is wrong; of a question, how its answer is worked out"
    g.add_argument("--solve", action="store_true", help=why)
    why = "run the copy's receipt again: exit code 0 if it holds"
    g.add_argument("--check", action="store_true", help=why)
    g.add_argument("--reset", action="store_true", help="plant anew; your edits of the copy go")
    g.add_argument("--folder", metavar="FOLDER", help="for the copy: a new one")
    why = "your answer to a question, with its unit: exit code 0 if it is right"
    g.add_argument("--answer", metavar="X", help=why)
    args = parser.parse_args()
    words = args.which
    if words[:1] == ["question"]:
        finish(question(words[1:], args))
    if args.answer is not None:
        raise Refused("--answer is for a question: write question and its number first")
    if not words:
        finish(print_list())
    number = pick(words, len(BUGS), "exercise")
    finish(exercise(number, args))


def pick(words, count, kind):
    """The number in the command line, 1 to count."""
    valid = len(words) == 1 and words[0].isdecimal() and 1 <= int(words[0]) <= count
    if not valid:
        raise Refused(f"{' '.join(words)!r} is no {kind}: give one number from 1 to {count}")
    return int(words[0])


def print_list():
    print("number  level   the bug is in             its receipt")
    for number, bug in enumerate(BUGS, 1):
        print(f"{number:6d}  {bug.level:6s}  {bug.file:24s}  {bug.run}")
    print(f"\nand {len(questions.QUESTIONS)} questions: python -m harness.exercise question")
    return 0


def exercise(number, args):
    """Do what the flags say with one exercise. Returns the exit code."""
    bug = BUGS[number - 1]
    folder = folder_of(number, args.folder)
    if args.hint:
        print(bug.hint)
        return 0
    if args.solve:
        print(bug.why)
        print(f"It happened here: {bug.seen}\n")
        print(difference(bug), end="")
        return 0
    if args.show:
        if not is_copy(folder, number):
            raise Refused(f"nothing is planted: python -m harness.exercise {number} does it")
        print(folder)
        return 0
    if args.check and not is_copy(folder, number):
        raise Refused("nothing is planted yet: leave out --check, it is for after your edits")
    if args.reset:
        remove(folder, number)
    planted = is_copy(folder, number)
    if not planted:
        plant(bug, number, folder)
    print(f"exercise {number}, {bug.level}. The bug is in {folder / bug.file}")
    print(f"the receipt of python {bug.run}:\n", flush=True)
    code, output = receipt(bug, folder)
    print(output)
    again = f"python -m harness.exercise {number} --check"
    if code == 0:
        print(f"exercise {number} is solved: the receipt holds")
    elif args.check:
        print(f"exercise {number} is not solved yet: the receipt still fails")
    else:
        print(f"edit {folder / bug.file} until the receipt holds, then {again}")
    return 1 if args.check and code != 0 else 0


# --- the copy


def folder_of(number, given=None):
    """Where the copy of an exercise lies: the folder `given`, or one for temporary files, which is
    this user's alone."""
    if given:
        folder = pathlib.Path(given).resolve()
        if folder.is_relative_to(ROOT.resolve()):
            raise Refused(f"--folder {given} is in the project: the copy must lie outside of it")
        return folder
    mine = pathlib.Path(tempfile.gettempdir()).resolve() / f"exercises-{os.getuid()}"
    return mine / f"exercise-{number}"


def is_copy(folder, number):
    """Whether `folder` is the copy of this exercise. Refuses a folder that is something else."""
    if not folder.exists():
        return False
    mark = folder / MARK
    own = folder.is_dir() and folder.stat().st_uid == os.getuid()
    if own and mark.is_file() and mark.read_text() == str(number):
        return True
    if own and not any(folder.iterdir()):
        return False
    raise Refused(f"{folder} is not the copy of exercise {number}: give another --folder")


def remove(folder, number):
    if is_copy(folder, number):
        shutil.rmtree(folder)


def plant(bug, number, folder):
    """Copy the project's files, with the bug in them."""
    text = planted_text(bug)
    try:
        folder.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        if folder.parent.stat().st_uid != os.getuid() and folder == folder_of(number):
            raise PermissionError("it belongs to somebody else")
        folder.mkdir(exist_ok=True, mode=0o700)
        for pattern in COPIED:
            for source in sorted(ROOT.glob(pattern)):
                target = folder / source.relative_to(ROOT)
                target.parent.mkdir(exist_ok=True)
                shutil.copyfile(source, target)
        (folder / bug.file).write_text(text)
        (folder / MARK).write_text(str(number))
    except OSError as e:
        raise Refused(f"{folder} can't be written ({e}): give a --folder") from e


def planted_text(bug):
    """The text of the bug's file, with the bug."""
    text = (ROOT / bug.file).read_text()
    if text.count(bug.old) != 1:
        raise Refused(f"{bug.file} has changed, and this bug has no place in it: take another")
    return text.replace(bug.old, bug.new)


def difference(bug):
    """What would mend the bug, as a diff."""
    lines = [text.splitlines(keepends=True) for text in (planted_text(bug), right_text(bug))]
    names = f"{bug.file}, planted", f"{bug.file}, right"
    return "".join(difflib.unified_diff(*lines, *names, n=2))


def right_text(bug):
    return (ROOT / bug.file).read_text()


# --- its receipt


def receipt(bug, folder, limit=LIMIT):
    """Run the script of a bug in a folder. Returns (exit code, all that it printed); the exit code
    is None if it was still running after `limit` seconds."""
    name, *flags = bug.run.split()
    if name != "collectives.py":  # it trains nothing
        flags = [*SMALL.split(), *flags]
    # Neither a launcher's variables nor this project's own modules: the copy's
    inherited = {"RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "PYTHONPATH"}
    environment = {key: value for key, value in os.environ.items() if key not in inherited}
    environment["PYTHONDONTWRITEBYTECODE"] = "1"
    process = subprocess.Popen(
        [sys.executable, name, *flags],
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,  # a group of its own: its ranks end with it
    )
    try:
        output, _ = process.communicate(timeout=limit)
        return process.returncode, output
    except subprocess.TimeoutExpired:
        end(process)
        output, _ = process.communicate()
        return None, f"{output}\nit was still running after {limit} seconds"
    except BaseException:
        end(process)
        raise


def end(process):
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


# --- questions


def question(words, args):
    """Ask, check or solve one of the questions, or list them. Returns the exit code."""
    if not words:
        for number, each in enumerate(questions.QUESTIONS, 1):
            print(f"{number:3d}  {each.text}")
        return 0
    number = pick(words, len(questions.QUESTIONS), "question")
    asked = questions.QUESTIONS[number - 1]
    if args.answer is not None:
        right = questions.is_right(asked, args.answer)
        print("right" if right else f"no: question {number} --solve shows how to work it out")
        return 0 if right else 1
    if args.solve:
        print(asked.text)
        print(questions.working(asked))
        return 0
    print(asked.text)
    print(f"answer with a number {asked.unit_text}:")
    print(f"python -m harness.exercise question {number} --answer {asked.example}")
    return 0


if __name__ == "__main__":
    script(main)
