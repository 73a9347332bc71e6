"""The README and the pages of docs/: every command parses, every link leads somewhere.

`pytest -m commands` also runs every command that takes less than half a minute. It must print the
figures that the pages give beside it: so these are one on all pages."""

import argparse
import os
import pathlib
import re
import shlex
import subprocess
import sys
import textwrap

import pytest
from conftest import ROOT
from tops import lesson_file

import harness
from docs import pictures

PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
STARTS = ("python ", "torchrun ", "python3 ", ".venv/", ".ci/", "pytest ")
FOLDERS = ("advanced.", "benchmarks", "proof.", "exercises", "tests.", "docs.")  # run with -m
# What takes longer than half a minute, needs a cluster, or needs a folder that the reader has
LONG = ["--nproc_per_node=8", "--nnodes", "train.py", "benchmarks", "--plot", ".venv/bin"]
LONG += ["tests.", "pytest", ".ci/run", "FOLDER", "--check", "proof compare", "planted_hangs"]


def commands():
    """(page, command) of every command in a code block, one or two a line, and in a sentence."""
    found = []
    for page in PAGES:
        for line in page.read_text().splitlines():
            parts = re.findall("`([^`]+)`", line)
            if line.startswith("    "):
                parts = re.split(r" {2,}", line.strip())
            found += [(page.name, part) for part in parts if part.startswith(STARTS)]
    return found


def figures(text):
    """(command, figure) for each figure with a unit that a page gives for one command: in a row or
    sentence that names it, in what is quoted below it, and in what is said of that."""
    below = []  # the commands of the last block that has any
    for block in re.split(r"\n\s*\n", re.sub(r"^```.*?^```$", "", text, flags=re.M | re.S)):
        parts = [block]
        if block.startswith("    "):
            cells = [cell for line in block.splitlines() for cell in re.split(r" {2,}", line)]
            below = [cell for cell in cells if cell.startswith(STARTS)] or below
        elif block.startswith("#"):
            below = []
        else:
            parts = re.split(r"\n(?=\|)|(?<=[.:])\s", block)  # rows, or sentences
        for part in parts:
            named = re.findall(r"`((?:python|torchrun) [^`]+)`", part)
            if not named and "`-" in part or len(named or below) != 1:  # other flags, or several
                continue
            for figure in re.findall(r"(?<![\w.])(\d[\d,]*\.\d+) ?(?:[KMGT]B|s|%)(?![\w/])", part):
                yield (named or below)[0], figure


def test_figures_beside_a_command():
    text = "    python a\n\n    sent 1.50 MB\n\nThat is 2.5%. With `--x` 9.5%.\n\n"
    text += "`python b` takes 3.0 s.\n\n# Title\n\n4.0%\n"
    assert [*figures(text)] == [("python a", "1.50"), ("python a", "2.5"), ("python b", "3.0")]


class Parsed(Exception):
    """Raised where a script has read its flags and would start to work."""


def parse(command, monkeypatch):
    """Have a script of ours read the command's flags, and nothing more."""
    words = shlex.split(command)
    names = [word for word in words if re.fullmatch(r"\w+\.py", word)]
    if "-m" in words and words[words.index("-m") + 1].startswith(FOLDERS):
        module = words[words.index("-m") + 1].replace("exercises", "exercises.__main__")
        flags = words[words.index("-m") + 2 :]
    elif names:
        module, flags = names[0][:-3], words[words.index(names[0]) + 1 :]
    else:
        return

    of_ours, of_argparse = harness.Parser.parse_args, argparse.ArgumentParser.parse_args

    def parse_ours(parser, *_):
        of_ours(parser, flags)
        raise Parsed

    def parse_plain(parser, *given):
        if isinstance(parser, harness.Parser):  # called by its own parse_args
            return of_argparse(parser, *given)
        of_argparse(parser, flags)
        raise Parsed

    monkeypatch.setattr(harness.Parser, "parse_args", parse_ours)
    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", parse_plain)
    monkeypatch.setattr(sys, "argv", [module, *flags])
    with pytest.raises(Parsed):
        __import__(module, fromlist=["main"]).main()


@pytest.mark.parametrize("page, command", commands())
def test_every_command_parses(page, command, monkeypatch):
    parse(command, monkeypatch)


def sections(text):
    """{anchor: what stands below that title, up to the next one}, and "" for all of a page."""
    _, *parts = re.split(r"^#+ (.*)$", text, flags=re.M)
    anchors = [re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in parts[::2]]
    return {"": text} | dict(zip(anchors, map("".join, zip(parts[::2], parts[1::2]))))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    """A figure in a link's words stands where it leads; so do formulas in a row that begins with a
    link."""
    link = re.compile(r"(^\| )?\[([^]]*)\]\(([^)\s]+)\)(.*)", re.M)
    for first, words, target, rest in link.findall(page.read_text()):
        if "://" in target:
            continue
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        assert file.exists(), f"{page.name} links to {target}"
        if file.suffix == ".md":
            there = sections(file.read_text())
            assert anchor in there, f"{page.name} links to {target}"
            formulas = re.findall("`([^`]+)`", rest) if first else []
            for quoted in [*re.findall(r"\d[\d,.]*\d", words), *formulas]:
                assert quoted in there[anchor], f"{page.name}: {quoted} is not in {target}"


def test_code_is_that_of_the_lessons():
    """A block with a file's name has lines of this file, at any depth."""
    block = re.compile(r'^```python title="(.*?)"\n(.*?)^```$', re.M | re.S)
    quoted = [(page, *found) for page in PAGES for found in block.findall(page.read_text())]
    assert len(quoted) > 10
    for page, name, code in quoted:
        source = lesson_file(name[:-3]).read_text()
        depths = [textwrap.indent(code, " " * depth) for depth in (0, 4, 8, 12)]
        assert any(lines in source for lines in depths), f"{page.name} shows an older {name}"


@pytest.mark.commands
@pytest.mark.parametrize("command", sorted({command for _, command in commands()}))
def test_short_commands_run(command):
    if any(word in command for word in LONG) and "--dry-run" not in command:
        pytest.skip("it takes longer than half a minute, or needs more than this machine")
    path = f"{pathlib.Path(sys.executable).parent}:{os.environ['PATH']}"
    options = dict(shell=True, cwd=ROOT, env=os.environ | {"PATH": path}, text=True)
    done = subprocess.run(command, capture_output=True, **options)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "too much for" not in done.stdout  # a dry run's device
    numbers = [float(number) for number in re.findall(r"\d+\.\d+", done.stdout.replace(",", ""))]
    for page in PAGES:
        for named, figure in figures(page.read_text()):
            places = len(figure.partition(".")[2])
            rounded = {f"{number:,.{places}f}" for number in numbers}
            assert named != command or figure in rounded, f"{page.name}: {figure}"


def test_the_readme_says_how_many_lines_a_file_has():
    """To the nearest ten or so, and where its plainest form ends."""
    row = r"^\| \[`\w+\.py`\]\((.*?)\).*\|(?: to line (\d+))? \| (\d+) \|$"
    rows = re.findall(row, (ROOT / "README.md").read_text(), re.M)
    assert len(rows) >= 18
    for name, plain, said in rows:
        lines = (ROOT / name).read_text().splitlines()
        assert abs(len(lines) - int(said)) <= 15, name
        ends = [i for i, line in enumerate([*lines, "# --- "]) if line.startswith("# --- ")]
        assert not plain or min(abs(i - int(plain)) for i in ends) <= 4, name


def test_pictures_are_up_to_date():
    """Each is drawn by the code of today, and stands on a page."""
    linked = {
        name for page in PAGES for name in re.findall(r"pictures/(.*)\.svg", page.read_text())
    }
    there = {path.stem for path in pictures.FOLDER.glob("*.svg")}
    assert linked == there == {*pictures.PICTURES}
    for name, draw in pictures.PICTURES.items():
        drawn = (pictures.FOLDER / f"{name}.svg").read_text()
        assert draw().written() == drawn, f"{name}: python -m docs.pictures --only {name}"


def test_who_holds_what_leaves_nothing_out():
    for technique in pictures.TECHNIQUES:
        for kind in pictures.KINDS:
            held = [box for rank in range(4) for box in pictures.holdings(technique, rank)[kind][0]]
            area = sum((below - top) * (right - left) for top, below, left, right in held)
            assert area > 31.99, (technique, kind)
