"""Run the first command of the README and the tests where others will run them: with other builds
of torch, other Pythons, and on machines that are set up in another way.

    python -m benchmarks.environments --list
    python -m benchmarks.environments                      every row: two hours on 2 cores
    python -m benchmarks.environments --only "LANG=C" "no network"

A row is a new clone of the last commit. For a build of torch it runs all tests, in a new virtual
environment (6 GB with CUDA), for which pip takes what it is set up to take. The other rows use the
Python that runs this, and the quick tests. A row that this machine can't make is skipped and says
why. Prints a Markdown table; the exit code is 1 if anything failed.
"""

import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
import time

import harness
from benchmarks import ROOT

TRAIN = "train.py --dp 2 --tp 2 --pp 2 --steps 20 --sample 0"
# {name: (Python, torch)}
BUILDS = {
    f"Python {python}, torch {torch}": (python, torch)
    for python, torch in [
        ("3.11", "2.13.0"),
        ("3.11", "2.12.0"),
        ("3.11", "2.11.0"),
        ("3.12", "2.13.0"),
    ]
}

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
}


def run(words, folder, around='"$@"'):
    """Run a command within a line of bash. Returns (exit code, all that it printed)."""
    command = ["bash", "-c", around, "-", *map(str, words)]
    output = dict(stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace")
    done = subprocess.run(command, cwd=folder, **output)
    return done.returncode, done.stdout


def must(words, folder):
    """As run(), of what is no test. Refuses to go on where it fails."""
    code, said = run(words, folder)
    if code:
        raise harness.Refused(f"`{' '.join(map(str, words))}` failed: {said.strip()[-300:]}")
    return said


def missing(name):
    """Why this machine can't make a row, or None."""
    if name in BUILDS:
        python = f"python{BUILDS[name][0]}"
        return None if shutil.which(python) else f"there is no {python}"
    program = SITUATIONS[name][0]
    if program and not shutil.which(program):
        return f"needs the command {program}"
    if program in ("unshare", "setpriv") and os.geteuid() != 0:
        return "needs root"
    return None


def interpreter(name, home):
    """The python of a new virtual environment with this build of torch."""
    version, torch = BUILDS[name]
    must([f"python{version}", "-m", "venv", home], ROOT)
    wanted = [f"torch=={torch}"]
    for file in ("requirements.txt", "requirements-dev.txt"):
        lines = pathlib.Path(ROOT, file).read_text().splitlines()
        names = [line.partition("#")[0].strip() for line in lines]
        wanted += [name for name in names if name and not name.startswith(("-r", "torch"))]
    must([home / "bin" / "python", "-m", "pip", "install", "-q", *wanted], ROOT)
    return home / "bin" / "python"


def row(name, folder):
    """(title, cells, problems) of a build or a situation."""
    if name in BUILDS:
        python, around, tests = interpreter(name, folder / "environment"), '"$@"', ()
        build = must([python, "-c", "import torch; print(torch.__version__)"], ROOT).strip()
        name = f"Python {BUILDS[name][0]}, torch {build}"
    else:
        python, around, tests = sys.executable, SITUATIONS[name][1], ("-m", "quick")
    clone = folder / ("a path with spaces" if "spaces" in name else "clone")
    must(["git", "clone", "-q", ROOT, clone], ROOT)
    must(["chmod", "-R", "a+rwX", clone], ROOT)  # for "not root"
    return name, *measure(python, clone, around, tests)


def measure(python, folder, around, tests):
    """The cells of a row, and its problems: the README's first command, then the tests."""
    started, problems = time.monotonic(), []
    code, said = run([python, *TRAIN.split()], folder, around)
    cells = ["proven" if code == 0 else f"exit code {code}"]
    if code:
        problems.append(said[-2000:])
    words = [python, "-m", "pytest", "-q", "-n", "3", "--dist", "load", "--maxschedchunk", "1"]
    code, said = run([*words, *tests], folder, around)
    last = said.strip().rpartition("\n")[2]
    counts = {kind: int(n) for n, kind in re.findall(r"(\d+) (passed|failed|skipped|error)", last)}
    if code:
        named = [line for line in said.splitlines() if line.startswith(("FAILED", "ERROR"))]
        problems += named or [said[-2000:]]
    failed = counts.get("failed", 0) + counts.get("error", 0)
    cells += [counts.get("passed", 0), failed, counts.get("skipped", 0)]
    return [*cells, f"{time.monotonic() - started:.0f}"], problems


def main():
    parser = harness.Parser(__doc__)
    names = [*BUILDS, *SITUATIONS]
    parser.add_argument("--only", nargs="+", choices=names, default=names, help="these rows")
    parser.add_argument("--list", action="store_true", help="the rows' names")
    args = parser.parse_args()
    if args.list:
        print("\n".join(names))
        return
    columns = ["where", "first command", "passed", "failed", "skipped", "seconds"]
    print(f"| {' | '.join(columns)} |\n|{'---|' * len(columns)}", flush=True)
    ok = True
    for name in args.only:
        title, cells, problems = name, [f"not run: {missing(name)}", "", "", "", ""], []
        if not missing(name):
            with tempfile.TemporaryDirectory() as temporary:
                os.chmod(temporary, 0o755)
                title, cells, problems = row(name, pathlib.Path(temporary))
        print(f"| {' | '.join(map(str, [title, *cells]))} |", flush=True)
        for problem in problems:
            print(f"{title}: {problem}", file=sys.stderr, flush=True)
        ok = ok and not problems
    sys.exit(0 if ok else 1)


if __name__ == "__main__":
    harness.script(main)
