"""A picture of what a script prints at a terminal, as an SVG:

    python -m benchmarks.terminal docs/first-run.svg train.py --dp 2 --tp 2 --pp 2

The script runs in a pseudo-terminal. Needs rich (pip install rich), which draws the picture.
"""

import argparse
import io
import os
import pty
import re
import shlex
import sys
import time

import harness
from benchmarks import ROOT
from harness import Refused


def main():
    p = harness.Parser(__doc__)
    p.add_argument("picture", metavar="NAME.svg")
    p.add_argument("script", nargs=argparse.REMAINDER, help="a script and its flags")
    args = p.parse_args()
    if not args.script or not args.picture.endswith(".svg"):
        raise Refused("give a file, NAME.svg, and a script with its flags")
    try:
        from rich.console import Console
    except ImportError:
        raise Refused("needs a package: pip install rich") from None
    command = ["python", *args.script]
    said, seconds = run([sys.executable, *args.script])
    console = Console(record=True, width=132, file=io.StringIO())
    console.print(f"$ {shlex.join(command)}", markup=False, highlight=False, style="bold")
    console.print(said.strip(), markup=False, highlight=False)
    console.print(f"\n{seconds:.0f} seconds", style="dim")
    svg = console.export_svg(title=shlex.join(command))
    # Without the web's font: the picture needs no network
    svg = re.sub(r"@font-face \{.*?\}\s*", "", svg, flags=re.DOTALL)
    with open(args.picture, "w") as file:
        file.write(svg)


def run(command):
    """(what a command prints at a terminal, the seconds that it takes)."""
    said, start = [], time.perf_counter()

    def read(terminal):
        data = os.read(terminal, 1024)
        said.append(data)
        return data

    os.chdir(ROOT)
    code = os.waitstatus_to_exitcode(pty.spawn(command, read))
    if code:
        raise Refused(f"the script ended with exit code {code}: see above", code=1)
    return b"".join(said).decode().replace("\r\n", "\n"), time.perf_counter() - start


if __name__ == "__main__":
    harness.script(main)
