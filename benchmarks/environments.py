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

import harness

ROOT = pathlib.Path(__file__).parent.parent
TRAIN = "train.py --dp 2 --tp 2 --pp 2 --steps 20 --sample 0"
AS_SET_UP = ", as pip is set up here"  # which may find a CPU build; else from the index alone

# {name: (Python, torch)}
BUILDS = {f"Python 3.11, torch 2.13.0{AS_SET_UP}": ("3.11", "2.13.0")}
for build in [("3.11", "2.13.0"), ("3.11", "2.12.0"), ("3.11", "2.11.0"), ("3.12", "2.13.0")]:
    BUILDS["Python {}, torch {}".format(*build)] = build

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


class NotHere(Exception):
    """Why this machine can't make a row."""


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


def interpreter(name, folder):
    """The python of a virtual environment with this build, which is made where it is missing."""
    version, torch = BUILDS[name]
    home = folder / re.sub(r"\W+", "-", name)
    python = home / "bin" / "python"
    if (home / "complete").exists():
        return python
    found = shutil.which(f"python{version}")
    if found is None or run([found, "-c", "import venv"], folder)[0]:
        raise NotHere(f"there is no python{version}")
    must([found, "-m", "venv", "--clear", home], folder)
    install = [python, "-m", "pip", "install", "-q"]
    the_index = ["env", "--unset=PIP_FIND_LINKS", "PIP_CONFIG_FILE=/dev/null"]
    source = [] if name.endswith(AS_SET_UP) else the_index
    must([*source, *install, f"torch=={torch}"], folder)
    for file in ("requirements.txt", "requirements-dev.txt"):
        lines = (ROOT / file).read_text().splitlines()
        wanted = [line.partition("#")[0].strip() for line in lines]
        must([*install, *(w for w in wanted if w and not w.startswith(("-r", "torch")))], folder)
    (home / "complete").touch()
    return python


def clone(folder):
    must(["git", "clone", "-q", ROOT, folder], ROOT)
    must(["chmod", "-R", "a+rwX", folder], ROOT)  # for "not root"
    return folder


def measure(name, python, folder, around='"$@"', tests=()):
    """The cells of a row, and whether all is well: the README's first command, then the tests."""
    started = time.monotonic()
    code, said = run([python, *TRAIN.split()], folder, around)
    trained = "proven" if code == 0 else f"exit code {code}"
    problems = [said[-2000:]] if code else []
    words = [python, "-m", "pytest", "-q", "-n", "3", "--dist", "load", "--maxschedchunk", "1"]
    code, said = run([*words, *tests], folder, around)
    last = said.strip().splitlines()[-1] if said.strip() else ""
    counts = {kind: int(n) for n, kind in re.findall(r"(\d+) (passed|failed|skipped|error)", last)}
    failed = counts.get("failed", 0) + counts.get("error", 0)
    named = [line for line in said.splitlines() if line.startswith(("FAILED", "ERROR"))]
    if code:
        problems += named or [said[-2000:]]
    for problem in problems:
        print(f"{name}: {problem}", file=sys.stderr, flush=True)
    cells = [trained, counts.get("passed", 0), failed, counts.get("skipped", 0)]
    return [*cells, f"{time.monotonic() - started:.0f}"], not problems


def row(name, folder, temporary):
    """(title, cells, whether all is well) of a build or a situation."""
    if name in BUILDS:
        python = interpreter(name, folder)
        build = must([python, "-c", "import torch; print(torch.__version__)"], ROOT).strip()
        title = f"Python {BUILDS[name][0]}, torch {build}"
        return title, *measure(title, python, clone(temporary / "clone"))
    program, around = SITUATIONS[name]
    if program and not shutil.which(program):
        raise NotHere(f"needs the command {program}")
    if program in ("unshare", "setpriv") and os.geteuid() != 0:
        raise NotHere("needs root")
    place = clone(temporary / ("a path with spaces" if "spaces" in name else "clone"))
    return name, *measure(name, sys.executable, place, around, ["-m", "quick"])


def main():
    parser = harness.Parser(__doc__)
    names = [*BUILDS, *SITUATIONS]
    parser.add_argument("--only", nargs="+", choices=names, default=names, help="these rows")
    parser.add_argument("--list", action="store_true", help="the rows' names")
    place = pathlib.Path("environments")
    parser.add_argument("--folder", type=pathlib.Path, default=place, help="for environments")
    args = parser.parse_args()
    if args.list:
        print("\n".join(names))
        return
    args.folder.mkdir(parents=True, exist_ok=True)
    columns = ["where", "first command", "passed", "failed", "skipped", "seconds"]
    print(f"| {' | '.join(columns)} |\n|{'---|' * len(columns)}", flush=True)
    ok = True
    for name in args.only:
        with tempfile.TemporaryDirectory() as temporary:
            os.chmod(temporary, 0o755)
            try:
                title, cells, well = row(name, args.folder.resolve(), pathlib.Path(temporary))
            except NotHere as e:
                title, cells, well = name, [f"not run: {e}", "", "", "", ""], True
        print(f"| {' | '.join(map(str, [title, *cells]))} |", flush=True)
        ok = ok and well
    sys.exit(0 if ok else 1)


if __name__ == "__main__":
    harness.script(main)
