"""Run the first command of the README and the tests where others will run them: with other builds
of torch, other Pythons, and on machines that are set up in another way.

    python -m benchmarks.environments --list
    python -m benchmarks.environments                      every row: two hours on 2 cores
    python -m benchmarks.environments --only "LANG=C" "no network"

A row is a new clone of the last commit. For a build of torch it runs all tests, in a virtual
environment of its own, which is kept in --folder (6 GB with CUDA). The other rows use the Python
that runs this, and the quick tests. A row that this machine can't make is skipped and says why.
Prints a Markdown table; the exit code is 1 if anything failed.
"""

import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
import time
from typing import NamedTuple

import harness

ROOT = pathlib.Path(__file__).parent.parent
TRAIN = "train.py --dp 2 --tp 2 --pp 2 --steps 20 --sample 0"
# The last commit of the second edition, whose checkpoints and caches must still be read
SECOND_EDITION = "040375d"


class Build(NamedTuple):
    """A Python and a torch. as_set_up: from where pip looks on this machine, which may hold a CPU
    build; otherwise from the package index alone, as on everybody's machine."""

    python: str
    torch: str
    as_set_up: bool = False

    @property
    def name(self):
        where = ", as pip is set up here" if self.as_set_up else ""
        return f"Python {self.python}, torch {self.torch}{where}"


BUILDS = [
    Build("3.11", "2.13.0", as_set_up=True),
    Build("3.11", "2.13.0"),
    Build("3.11", "2.12.0"),
    Build("3.11", "2.11.0"),
    Build("3.12", "2.13.0"),
]

# {name: (the program that it needs, a line of bash around "$@")}. The clone is the current folder
SITUATIONS = {
    "not root": ("setpriv", 'setpriv --reuid 65534 --regid 65534 --clear-groups "$@"'),
    "a path with spaces": (None, '"$@"'),
    "the clone is read-only": (
        "unshare",
        'unshare --mount bash -c \'mount --bind "$PWD" "$PWD" && '
        'mount -o remount,bind,ro "$PWD" && cd "$PWD" && "$@"\' - "$@"',
    ),
    "one core": ("taskset", 'taskset --cpu-list 0 "$@"'),
    "no network": ("unshare", 'unshare --net bash -c \'ip link set lo up && "$@"\' - "$@"'),
    "the host's name is unknown": (
        "unshare",
        'unshare --uts bash -c \'hostname nowhere.invalid && "$@"\' - "$@"',
    ),
    "LANG=C": (None, 'env --unset=LC_ALL --unset=PYTHONUTF8 LANG=C "$@"'),
    "standard input is closed": (None, '"$@" <&-'),
    "files of the second edition": (None, '"$@"'),
}


class Row(NamedTuple):
    """A line of the table. trained: whether the first command was proven."""

    name: str
    trained: str
    passed: int
    failed: int
    skipped: int
    seconds: float


def run(words, folder, around='"$@"', **variables):
    """Run a command within a line of bash. Returns (exit code, all that it printed)."""
    done = subprocess.run(
        ["bash", "-c", around, "-", *map(str, words)],
        cwd=folder,
        env=os.environ | variables,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    )
    return done.returncode, done.stdout


def must(words, folder, **variables):
    """As run(), of what is no test. Refuses to go on where it fails."""
    code, said = run(words, folder, **variables)
    if code:
        raise harness.Refused(f"`{' '.join(map(str, words))}` failed: {said.strip()[-300:]}")
    return said


def interpreter(build, folder):
    """The python of a virtual environment with this build, which is made where it is missing.
    Returns None if there is no such Python."""
    name = f"python{build.python}-torch{build.torch}{'-as-set-up' if build.as_set_up else ''}"
    python = folder / name / "bin" / "python"
    if (folder / name / "complete").exists():
        return python
    found = shutil.which(f"python{build.python}")
    if found is None or run([found, "-c", "import venv"], folder)[0]:
        return None
    must([found, "-m", "venv", "--clear", folder / name], folder)
    install = [python, "-m", "pip", "install", "-q"]
    if build.as_set_up:
        must([*install, f"torch=={build.torch}"], folder)
    else:
        only_the_index = ["env", "--unset=PIP_FIND_LINKS", "PIP_CONFIG_FILE=/dev/null"]
        must([*only_the_index, *install, f"torch=={build.torch}"], folder)
    for file in ("requirements.txt", "requirements-dev.txt"):
        lines = (ROOT / file).read_text().splitlines()
        wanted = [line.partition("#")[0].strip() for line in lines]
        must([*install, *(w for w in wanted if w and not w.startswith(("-r", "torch")))], folder)
    (folder / name / "complete").touch()
    return python


def clone(folder):
    must(["git", "clone", "-q", ROOT, folder], ROOT)
    must(["chmod", "-R", "a+rwX", folder], ROOT)  # for "not root"
    return folder


def measure(name, python, folder, around='"$@"', quick=True):
    """A row: the first command of the README, then the tests."""
    started = time.monotonic()
    trained, train_said = run([python, *TRAIN.split()], folder, around)
    words = [python, "-m", "pytest", "-q", "-n", "3", "--dist", "load", "--maxschedchunk", "1"]
    code, said = run([*words, *(["-m", "quick"] if quick else [])], folder, around)
    last = said.strip().splitlines()[-1] if said.strip() else ""
    counts = {kind: int(n) for n, kind in re.findall(r"(\d+) (passed|failed|skipped|error)", last)}
    failed = counts.get("failed", 0) + counts.get("error", 0)
    for line in said.splitlines():
        if line.startswith(("FAILED", "ERROR")):
            print(f"{name}: {line}", file=sys.stderr, flush=True)
    if trained:
        print(f"{name}: {TRAIN}: {train_said[-2000:]}", file=sys.stderr, flush=True)
    if code and not failed:
        print(f"{name}: {said[-2000:]}", file=sys.stderr, flush=True)
        failed = 1
    return Row(
        name,
        "proven" if trained == 0 else f"exit code {trained}",
        counts.get("passed", 0),
        failed,
        counts.get("skipped", 0),
        time.monotonic() - started,
    )


def resume_second_edition(folder):
    """Put a checkpoint and a cache of the second edition into the clone, and go on from them.
    Returns what is printed. Refuses to go on where it fails."""
    old = folder.parent / "second-edition"
    must(["git", "worktree", "add", "-q", "--detach", old, SECOND_EDITION], folder)
    flags = (
        "--layers 2 --width 32 --heads 2 --context 32 --sample 0 --prove 0 --out runs/old".split()
    )
    must([sys.executable, "train.py", "--dp", 2, "--tp", 2, "--steps", 4, *flags], old)
    shutil.copytree(old / "runs", folder / "runs")
    shutil.copytree(old / "data", folder / "data")
    return must([sys.executable, "train.py", "--pp", 2, "--steps", 8, *flags, "--resume"], folder)


def measure_situation(name, folder):
    """The row of a situation, or why there is none."""
    program, around = SITUATIONS[name]
    if program and not shutil.which(program):
        return f"needs the command {program}"
    if program in ("unshare", "setpriv") and os.geteuid() != 0:
        return "needs root, to take it away" if name == "not root" else "needs root"
    place = clone(folder / ("a path with spaces" if "spaces" in name else "clone"))
    if name == "files of the second edition":
        said = resume_second_edition(place)
        if "resumed from" not in said:
            raise harness.Refused(
                f"a checkpoint of the second edition was not resumed: {said[-500:]}"
            )
    return measure(name, sys.executable, place, around)


def main():
    parser = harness.Parser(__doc__)
    names = [build.name for build in BUILDS] + list(SITUATIONS)
    parser.add_argument("--only", nargs="+", choices=names, default=names, help="these rows")
    parser.add_argument("--list", action="store_true", help="the rows' names")
    parser.add_argument(
        "--folder", type=pathlib.Path, default=pathlib.Path("environments"), help="for environments"
    )
    args = parser.parse_args()
    if args.list:
        print("\n".join(names))
        return
    args.folder.mkdir(parents=True, exist_ok=True)
    args.folder = args.folder.resolve()
    print(
        "| where | first command | passed | failed | skipped | seconds |\n|---|---|---|---|---|---|"
    )
    failed = False
    for name in args.only:
        with tempfile.TemporaryDirectory() as temporary:
            os.chmod(temporary, 0o755)
            if name in SITUATIONS:
                row = measure_situation(name, pathlib.Path(temporary))
            else:
                build = BUILDS[names.index(name)]
                python = interpreter(build, args.folder)
                row = f"there is no python{build.python}"
                if python:
                    version = must([python, "-c", "import torch; print(torch.__version__)"], ROOT)
                    place = clone(pathlib.Path(temporary, "clone"))
                    title = f"Python {build.python}, torch {version.strip()}"
                    row = measure(title, python, place, quick=False)
        if isinstance(row, str):
            print(f"| {name} | not run: {row} | | | | |", flush=True)
            continue
        print(
            f"| {row.name} | {row.trained} | {row.passed} | {row.failed} | {row.skipped} | "
            f"{row.seconds:.0f} |",
            flush=True,
        )
        failed |= bool(row.failed) or row.trained != "proven"
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    harness.script(main)
