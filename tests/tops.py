"""A technique's file as somebody has it who copied it: the part above `# --- demo ---`, alone in an
empty folder."""

import contextlib
import os
import py_compile
import sys

from conftest import ROOT, on_ranks

DEMO = "\n# --- demo ---\n"


def cut_out(folder, names):
    """Write the tops of the named files into `folder`, and files of harness/ whole."""
    for name in names:
        path = ROOT / f"{name}.py"
        top, line, _ = path.read_text().partition(DEMO)
        assert line or path.parent != ROOT, f"{name}.py has no line {DEMO.strip()!r}"
        (folder / path.name).write_text(top)
        py_compile.compile(folder / path.name, doraise=True)  # once, and not at every import


@contextlib.contextmanager
def without_project(folder):
    """This process can import the files in `folder`, as if for the first time, and none of the
    project's own."""
    own = {path.stem for path in [*ROOT.glob("*.py"), *folder.glob("*.py")]}
    own |= {path.parent.name for path in ROOT.glob("*/__init__.py")}

    def forget():
        names = [name for name in sys.modules if name.partition(".")[0] in own]
        return {name: sys.modules.pop(name) for name in names}

    modules, paths, here = forget(), list(sys.path), os.getcwd()
    elsewhere = [p for p in paths if os.path.abspath(p) not in (str(ROOT), str(ROOT / "tests"))]
    sys.path[:] = [str(folder), *elsewhere]
    os.chdir(folder)
    try:
        yield
    finally:
        forget()
        sys.modules.update(modules)
        sys.path[:] = paths
        os.chdir(here)


def alone(rank, folder, work, args):
    with without_project(folder):
        return work(rank, *args)


def on_copied(folder, names, world, work, *args):
    """[work(rank, *args) for each of `world` ranks], where `import ddp` and the like find the
    cut-out tops alone, as if for the first time.

    names: of the files, with spaces between. work imports them itself, inside the function."""
    folder = folder / names.replace("/", " ").replace(" ", "_")
    if not folder.exists():
        folder.mkdir()
        cut_out(folder, names.split())
    return on_ranks(world, alone, folder, work, args)
