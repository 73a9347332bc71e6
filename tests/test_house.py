"""The house stands as CONTRIBUTING.md says: what lies where, and who may import whom."""

import ast
import graphlib
import subprocess
import sys

import pytest
from conftest import ROOT
from tops import in_one_file, lesson_file

TECHNIQUES = ["collectives", "double_tree", "ddp", "parameter_server", "zero", "fsdp"]
TECHNIQUES += ["tensor_parallel", "sequence_parallel", "tensor_overlap"]
TECHNIQUES += ["pipeline", "zero_bubble", "dualpipe", "context_parallel", "packed_documents"]
TECHNIQUES += ["ulysses", "gather_context", "expert_parallel", "muon", "diloco"]
TECHNIQUES += ["composition"]
# Lessons whose tops build on others
BUILDS_ON = {"zero_bubble": ["pipeline"], "sequence_parallel": ["tensor_parallel"]}
BUILDS_ON |= {"tensor_overlap": ["sequence_parallel", "tensor_parallel"], "fsdp": ["zero"]}
BUILDS_ON |= {"dualpipe": ["zero_bubble", "pipeline"], "packed_documents": ["context_parallel"]}
BUILDS_ON |= {"ulysses": ["context_parallel"], "gather_context": ["context_parallel"]}
BUILDS_ON |= {"double_tree": ["collectives"]}
OTHERS = ["README.md", "LICENSE", "CHANGELOG.md", "CONTRIBUTING.md", "CITATION.cff"]
OTHERS += ["pyproject.toml", "requirements.txt", "requirements-dev.txt", ".gitignore", "mkdocs.yml"]
CODE = [
    "advanced",
    "harness",
    "proof",
    "receipts",
    "trainer",
    "simulator",
    "exercises",
    "benchmarks",
]
FOLDERS = [*CODE, "tests", "docs", ".ci", ".github"]
# A module may import those of a lower floor and of its own folder; a demo also another lesson
LESSONS = 4
FLOORS = {
    "advanced": -1,  # its own file only makes the plain names known
    "mixture": -1,
    "model": 0,
    "harness": 1,
    "proof": 2,
    "receipts": 3,
    **dict.fromkeys(TECHNIQUES, LESSONS),
    "trainer": 5,
    "simulator": 6,
    "exercises": 7,
    "train": 7,
    "benchmarks": 8,
}
# The most lines of Python in a folder, or in folders that share a duty
CEILINGS = {
    "harness trainer": 5600,
    "receipts proof": 5400,  # 3,800 once no lesson needs a receipt
    "simulator": 2000,
    "exercises": 310,
    "tests": 14350,
    "benchmarks": 2525,
}
DEMO = "# --- demo ---"
# Demos that a lesson runs for another one, and parts of demos
HANDED_OVER = {"sequence_parallel.check_tokens", "pipeline.train", "context_parallel.train"}


def files():
    """The paths of all code that is not a test."""
    found = list(ROOT.glob("*.py"))
    for folder in CODE:
        found += ROOT.glob(f"{folder}/*.py")
    return found


def sources():
    """{module's dotted name: its tree} of all that is not a test."""
    names = {
        ".".join(path.relative_to(ROOT).with_suffix("").parts)
        .removesuffix(".__init__")
        .removeprefix("advanced."): path
        for path in files()
    }
    return {name: ast.parse(path.read_text()) for name, path in names.items()}


def imports(tree, modules):
    """The project's modules that a tree imports, anywhere in it."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            inner = {f"{node.module}.{alias.name}" for alias in node.names} & set(modules)
            found |= inner or {node.module}
    return found & set(modules)


def arrows():
    modules = sources()
    return {name: imports(tree, modules) - {name} for name, tree in modules.items()}


def floor(module):
    return FLOORS[module.partition(".")[0]]


def test_the_top_level_is_what_the_readme_lists():
    listed = subprocess.run(
        ["git", "-c", f"safe.directory={ROOT}", "ls-files"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.split()
    there = {name.partition("/")[0] for name in listed if (ROOT / name).exists()}
    ground = [name for name in TECHNIQUES if lesson_file(name).parent == ROOT]
    lessons = {f"{name}.py" for name in ["model", "mixture", "train", *ground]}
    assert there - {"data"} == lessons.union(OTHERS, FOLDERS)


def test_arrows_go_down():
    """Else a folder needs what is built on it."""
    for name, targets in arrows().items():
        for target in targets:
            # ddp.py's demo uses the all-reduces of collectives.py, and so on
            same = name.partition(".")[0] == target.partition(".")[0]
            lessons = floor(name) == floor(target) == LESSONS
            # The schedules are the lessons' own. Else a receipt stands below the demos that show it
            schedules = name == "receipts.pipeline" and floor(target) == LESSONS
            fine = floor(target) < floor(name) or same or lessons or schedules
            assert fine, f"{name} imports {target}"


@pytest.mark.parametrize("folders", CEILINGS)
def test_no_folder_grows(folders):
    lines = 0
    for folder in folders.split():
        for path in ROOT.glob(f"{folder}/**/*.py"):
            lines += len(path.read_text().splitlines())
    assert lines <= CEILINGS[folders]


def test_there_is_no_circle():
    """Else some file can't be imported first. A demo that shows a later lesson imports it within a
    function, as zero.py's does."""
    modules, graph = sources(), {}
    for name, tree in modules.items():
        tree.body = [node for node in tree.body if isinstance(node, (ast.Import, ast.ImportFrom))]
        graph[name] = imports(tree, modules) - {name}
    graphlib.TopologicalSorter(graph).prepare()  # a CycleError names the circle


@pytest.mark.parametrize("name", TECHNIQUES)
def test_the_top_stands_alone(name):
    """Above the demo: torch and the standard library, no globals, no environment; and the lesson
    that it builds on."""
    text = lesson_file(name).read_text()
    top = ast.parse(text.partition(f"\n{DEMO}\n")[0])
    allowed = {"torch", *sys.stdlib_module_names, *BUILDS_ON.get(name, ())}
    for node in ast.walk(top):
        imported = []
        if isinstance(node, ast.Import):
            imported = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            imported = [node.module]
        foreign = {module.partition(".")[0] for module in imported} - allowed
        assert not foreign, f"{name}.py:{node.lineno} imports {foreign}"
        assert not isinstance(node, ast.Global), f"{name}.py:{node.lineno} is a global"
        attribute = getattr(node, "attr", "")
        assert attribute not in ("environ", "getenv"), f"{name}.py:{node.lineno} reads {attribute}"


def test_all_tops_fit_into_one_file():
    """Else whoever copies two of them gets one name with two meanings."""
    assert in_one_file(TECHNIQUES).ZeRO.__name__ == "ZeRO"


def below_the_line(name):
    """The names that a technique's demo defines."""
    lines = lesson_file(name).read_text().splitlines()
    line = lines.index(DEMO) + 1
    defined = set()
    for node in ast.parse("\n".join(lines)).body:
        if node.lineno > line and isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            defined.add(node.name)
        elif node.lineno > line and isinstance(node, ast.Assign):
            defined |= {target.id for target in node.targets if isinstance(target, ast.Name)}
    return defined


def test_nobody_calls_what_stands_below_another_files_demo_line():
    """Else a lesson without its demo is not enough for somebody."""
    hidden = {name: below_the_line(name) for name in TECHNIQUES}
    for path in files():
        nodes, lesson_of, uses = list(ast.walk(ast.parse(path.read_text()))), {}, []
        for node in nodes:
            if isinstance(node, ast.Import):
                lesson_of |= {alias.asname or alias.name: alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                uses += [(node.module, alias.name) for alias in node.names]
        for node in nodes:
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                uses.append((lesson_of.get(node.value.id), node.attr))
        for lesson, name in uses:
            if lesson != path.stem and name in hidden.get(lesson, ()):
                assert f"{lesson}.{name}" in HANDED_OVER, f"{path} uses {lesson}.{name}"
