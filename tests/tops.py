"""A technique's file as somebody has it who copied it: the part above `# --- demo ---`, alone in an
empty folder."""

import os
import py_compile
import sys

from conftest import ROOT

DEMO = "\n# --- demo ---\n"


def cut_out(folder, names):
    """Write the tops of the named files into `folder`, and files of harness/ whole."""
    for name in names:
        path = ROOT / f"{name}.py"
        top, line, _ = path.read_text().partition(DEMO)
        assert line or path.parent != ROOT, f"{name}.py has no line {DEMO.strip()!r}"
        (folder / path.name).write_text(top)
        py_compile.compile(folder / path.name, doraise=True)  # once, and not at every import


def forget_project(folder):
    """From now on this process can import the files in `folder`, and none of the project's own."""
    own = {path.stem for path in [*ROOT.glob("*.py"), *folder.parent.glob("*/*.py")]}
    own |= {path.parent.name for path in ROOT.glob("*/__init__.py")}
    for name in list(sys.modules):
        if name.partition(".")[0] in own:
            del sys.modules[name]
    others = {str(ROOT), str(ROOT / "tests"), *map(str, folder.parent.iterdir())}
    elsewhere = [path for path in sys.path if os.path.abspath(path) not in others]
    sys.path[:] = [str(folder), *elsewhere]
    os.chdir(folder)


def alone(rank, folder, work, args):
    forget_project(folder)
    return work(rank, *args)


def on_copied(folder, kept, names, world, work, *args):
    """[work(rank, *args) for each of `world` ranks], where `import ddp` and the like find the
    cut-out tops alone, as if for the first time.

    names: of the files, with spaces between. work imports them itself, inside the function. kept:
    runs it, as conftest.KeptRanks do."""
    folder = folder / names.replace("/", " ").replace(" ", "_")
    if not folder.exists():
        folder.mkdir()
        cut_out(folder, names.split())
    return kept(world, alone, folder, work, args)
