"""A technique's file as somebody has it who copied it: the part above `# --- demo ---`, alone in an
empty folder, or in one file with all others."""

import ast
import contextlib
import importlib
import inspect
import itertools
import os
import pathlib
import py_compile
import re
import sys
import types

import pytest
from conftest import ROOT, on_ranks

DEMO = "\n# --- demo ---\n"


def lesson_file(name):
    """The path of a lesson, or of another file of the top level."""
    paths = [ROOT / f"{name}.py", ROOT / "advanced" / f"{name}.py"]
    return next(path for path in paths if path.exists())


def cut_out(folder, names):
    """Write the tops of the named files into `folder`."""
    for name in names:
        path = lesson_file(name)
        top, line, _ = path.read_text().partition(DEMO)
        assert line, f"{name}.py has no line {DEMO.strip()!r}"
        (folder / path.name).write_text(top)
        py_compile.compile(folder / path.name, doraise=True)  # once, and not at every import


@contextlib.contextmanager
def without_project(folder):
    """This process can import the files in `folder`, as if for the first time, and none of the
    project's own."""
    lessons = [*ROOT.glob("*.py"), *ROOT.glob("advanced/*.py"), *folder.glob("*.py")]
    own = {path.stem for path in lessons}
    own |= {path.parent.name for path in ROOT.glob("*/__init__.py")}

    def forget():
        names = [name for name in sys.modules if name.partition(".")[0] in own]
        return {name: sys.modules.pop(name) for name in names}

    hidden = [str(ROOT / folder) for folder in ("", "tests", "advanced")]
    modules, paths, here = forget(), list(sys.path), os.getcwd()
    elsewhere = [p for p in paths if os.path.abspath(p) not in hidden]
    sys.path[:] = [str(folder), *elsewhere]
    os.chdir(folder)
    try:
        yield
    finally:
        forget()
        sys.modules.update(modules)
        sys.path[:] = paths
        os.chdir(here)


def in_one_file(names):
    """A module of all these tops. Raises AssertionError where a name means two things."""
    module, meanings = types.ModuleType("all_tops"), {}
    for name in names:
        top = lesson_file(name).read_text().partition(DEMO)[0]
        for node in ast.parse(top).body:
            if isinstance(node, ast.ImportFrom) and node.module in names:
                continue  # they stand in the same file
            for bound, meaning in bindings(node):
                same = meanings.setdefault(bound, meaning) == meaning
                assert same, f"{name}.py: another file has another {bound}"
            exec(ast.unparse(node), vars(module))
    return module


def bindings(node):
    """(name, its meaning) of all names that a statement of a module binds."""
    if isinstance(node, (ast.Import, ast.ImportFrom)):
        origin = getattr(node, "module", None)
        return [(alias.asname or alias.name, (origin, alias.name)) for alias in node.names]
    if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
        return [(node.name, ast.unparse(node))]
    names = [
        n.id for n in ast.walk(node) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)
    ]
    return [(name, ast.unparse(node)) for name in names]


def alone(rank, folder, work, args):
    with without_project(folder):
        return work(rank, *args)


def on_copied(folder, names, world, work, *args):
    """[work(rank, *args) for each of `world` ranks], where `import ddp` and the like find the
    cut-out tops alone, as if for the first time.

    names: of the files, with spaces between. work imports them itself, inside the function."""
    folder = folder / names.replace(" ", "_")
    if not folder.exists():
        folder.mkdir()
        cut_out(folder, names.split())
    return on_ranks(world, alone, folder, work, args)


def usage(of, marker="\n# --- a model of yours"):
    """The code that a docstring shows, or a comment of the file of that name."""
    if not isinstance(of, str):
        lines = inspect.getdoc(of).splitlines()
        return "\n".join(line[4:] for line in lines if line.startswith("    "))
    _, found, text = pathlib.Path(f"{of}.py").read_text().partition(marker)
    assert found, f"{of}.py has no line {marker.strip()!r}"
    lines = text.partition("\n# --- ")[0].splitlines()
    return "\n".join(line[6:] for line in lines if line.startswith("#     "))


def run_usage(of, **names):
    """Run it as it is printed. Returns all names that it leaves."""
    exec(usage(of).replace("dist.init_process_group()", "pass"), names)  # the tests have done it
    return names


def on_top_of(files, ranks):
    """Make a test of work(*modules, ...): `ranks` ranks run it, with the tops of `files` as the
    modules. What else it takes, parametrize gives."""

    def decorate(work):
        def on_rank(rank, given):
            modules = [importlib.import_module(name) for name in files.split()]
            return work(*modules, **given)

        def test(copied, **given):
            copied(files, ranks, on_rank, given)

        others = list(inspect.signature(work).parameters)[len(files.split()) :]
        kind = inspect.Parameter.KEYWORD_ONLY
        parameters = [inspect.Parameter(name, kind) for name in ("copied", *others)]
        test.__signature__ = inspect.Signature(parameters)
        test.__name__, test.__module__, test.__doc__ = work.__name__, work.__module__, work.__doc__
        return test

    return decorate


def choices(line):
    """The line, once for each choice: {a|b} stands for both."""
    parts = re.split(r"\{([^{}]*\|[^{}]*)\}", line)
    alternatives = [part.split("|") if i % 2 else [part] for i, part in enumerate(parts)]
    return map("".join, itertools.product(*alternatives))


def refused(words, error=(ValueError, RuntimeError, TypeError)):
    """A context in which an error comes that says so."""
    return pytest.raises(error, match=words)
