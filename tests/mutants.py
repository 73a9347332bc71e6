"""How many small bugs the receipts catch: python -m tests.mutants --limit 50

Plants bugs into the techniques, one at a time, in a copy of the file: another operator, another
constant, a statement dropped, two arguments swapped, a condition negated. Runs the file's demo at
tiny sizes, with the flags of COMMANDS in turn, and looks at its exit code. A bug is caught if one
is not 0. Lines that no demo here runs are found first, and counted apart.

    caught by the receipt: a number out of tolerance, or sent bytes that are not the formula's
    caught by an error: an exception, or a refusal
    hung: stopped after a while. It counts as caught
    survived: every demo ended with exit code 0

Only the top of a file is changed, above its demo. Left out is what changes no number: refusals (a
`raise`, an `if` that ends with one, functions named check, refuse, agree or warn), messages,
docstrings, annotations, decorators, default values.
"""

import ast
import collections
import pathlib
import random
import re
import sys
import tempfile
import time
from typing import NamedTuple

import pytest

import harness
from harness import data
from tests import conftest

DEMO = "# --- demo ---"
PATIENCE = 10  # seconds after which a rank that waits for another gives up
OUTCOMES = ["receipt", "error", "hung", "survived"]
# Sizes that do not divide by the ranks: 257 tokens, 10 positions. sgd shows a gradient's scale
TINY = "--layers 2 --heads 4 --width 24 --context 10 --batch 12 --steps 2 --dtype float64 --quiet "
TINY += f"--lr 0.1 --timeout {PATIENCE} --device cpu"
LLAMA = "--family llama --kv-heads 2"
EXPERTS = "--family llama --experts 4 --shared 1 --balance-loss 0.1"
COMMANDS = {
    "collectives": [
        "--nproc 4 --size 1KB",
        "--nproc 3 --size 1KB",
        "--nproc 6 --size 1KB --nodes-of 3",
    ],
    "ddp": [
        "--nproc 3 --bucket-mb 0.005",
        "--nproc 2 --bucket-mb 0.01 --sync bucketed --microbatches 3",
        "--nproc 2 --sync naive",
        "--nproc 2 --bucket-mb 0 --all-reduce ring --optimizer adamw",
    ],
    "parameter_server": ["--nproc 3", "--nproc 3 --staleness 1 --optimizer adamw"],
    "zero": [
        "--nproc 3 --stage 2 --bucket-mb 0.005",
        "--nproc 3 --stage 1 --bucket-mb 0.005",
        "--nproc 2 --stage 0 --bucket-mb 0.01",
        "--nproc 2 --stage 2 --reduce-once --offload --optimizer adamw",
        "--nproc 2 --stage 1 --param-dtype float32 --reduce-dtype float64 --bucket-mb 0",
        "--nproc 1 --stage 2",
        "--nproc 4 --stage 2 --shard-ranks 2 --microbatches 3 --bucket-mb 0.005",
    ],
    "fsdp": [
        "--nproc 3",
        "--nproc 2 --keep-gathered --microbatches 3 --optimizer adamw",
        "--nproc 2 --reduce-once --offload --optimizer adamw",
    ],
    "tensor_parallel": [
        "--nproc 2",
        "--nproc 3 --heads 3 --hidden 40",
        f"--nproc 2 {LLAMA} --hidden 33",
        f"--nproc 2 {EXPERTS} --hidden 17",
        "--nproc 4 --vocab 321 --optimizer adamw",
    ],
    "sequence_parallel": [
        "--nproc 3 --heads 3 --hidden 40",
        f"--nproc 2 {LLAMA} --dropout 0.1 --gather-again",
        f"--nproc 2 {EXPERTS}",
        "--nproc 4 --dropout 0.1 --optimizer adamw",
        "--nproc 2 --gather-again",
    ],
    "pipeline": [
        "--nproc 3 --schedule 1f1b --layers 3 --microbatches 4",
        "--nproc 2 --schedule interleaved --chunks 3 --layers 6 --microbatches 4",
        "--nproc 2 --schedule interleaved --layers 4 --microbatches 2",
        "--nproc 3 --schedule gpipe --layers 3 --microbatches 3",
        "--nproc 2 --schedule naive --microbatches 2",
    ],
    "zero_bubble": [
        "--nproc 2 --schedule zb-v --layers 4 --microbatches 4",
        "--nproc 2 --schedule dualpipev --layers 4 --microbatches 6",
        "--nproc 3 --schedule dualpipev --layers 6 --microbatches 6",
        "--nproc 3 --schedule zb-v --layers 6 --microbatches 6",
        "--nproc 3 --schedule zb-h1 --layers 3 --microbatches 4",
        "--nproc 3 --schedule zb-h2 --layers 3 --microbatches 6",
        f"--nproc 2 --schedule zb-h1 {EXPERTS} --microbatches 3",
        "--nproc 1 --schedule zb-v --microbatches 2",
    ],
    "context_parallel": [
        "--nproc 3",
        "--nproc 3 --contiguous",
        "--nproc 3 --kind gather",
        f"--nproc 2 --kind ulysses {LLAMA}",
        "--nproc 4 --kind ring-ulysses --rings 2",
        f"--nproc 3 {LLAMA} --optimizer adamw",
        "--nproc 2 --kind gather --contiguous",
        f"--nproc 2 {EXPERTS} --context 12",
        "--nproc 3 --dtype float32",
        "--nproc 1",
    ],
    "expert_parallel": [
        "--nproc 3 --experts 4 --chunks 2",
        "--nproc 2 --experts 5 --chunks 1 --shared 1 --bias-rate 0.01",
        "--nproc 3 --experts 7 --top-k 3 --chunks 3 --optimizer adamw",
        "--nproc 2 --experts 4 --capacity 2 --prove 2",
        "--nproc 2 --experts 4 --capacity 1",
    ],
    "muon": [
        "--nproc 3",
        "--nproc 2 --microbatches 3 --family llama --kv-heads 2",
        "--nproc 1",
    ],
    "diloco": [
        "--nproc 3 --sync-every 3 --stream 2 --stream-delay 1 --outer-bits 4 --steps 8",
        "--nproc 2 --sync-every 2 --outer-bits 8 --steps 5 --optimizer adamw",
        "--nproc 2 --sync-every 2 --outer-bits 16 --outer-momentum 0 --steps 4",
        "--nproc 2 --sync-every 1 --outer-lr 1 --outer-momentum 0 --grad-clip 0",
        "--nproc 1 --sync-every 2 --steps 4",
    ],
}


# --- which bugs there are

REFUSING = re.compile(r"_?(check|refuse|agree|warn)")
PAIRS = [(ast.Add, ast.Sub), (ast.LShift, ast.RShift), (ast.BitAnd, ast.BitOr), (ast.And, ast.Or)]
PAIRS += [(ast.Lt, ast.LtE), (ast.Gt, ast.GtE), (ast.Eq, ast.NotEq), (ast.Is, ast.IsNot)]
PAIRS += [(ast.In, ast.NotIn)]
OPERATORS = {ast.Mult: ast.FloorDiv, ast.Div: ast.Mult, ast.FloorDiv: ast.Mult}
OPERATORS |= {ast.Mod: ast.FloorDiv, ast.BitXor: ast.BitAnd}
for one, another in PAIRS:
    OPERATORS |= {one: another, another: one}
# The order of their arguments changes nothing, or is a type error at once
UNORDERED = {"max", "min", "isinstance", "hasattr", "getattr", "setattr"}


class Mutation(NamedTuple):
    kind: str  # "operator", "constant", "dropped", "swapped" or "negated"
    line: int
    before: str  # the changed piece of source
    after: str
    start: int  # where it lies, in bytes of the source
    end: int
    lines: range  # the lines of its statement, without the statements inside that

    def apply(self, text):
        """The source with this bug."""
        source = text.encode()
        return (source[: self.start] + self.after.encode() + source[self.end :]).decode()


def mutations(text):
    """All mutations of a file's top, in the order of its lines."""
    top, found, line_starts = text.partition(f"\n{DEMO}\n")[0], [], [0]
    for line in top.encode().splitlines(keepends=True):
        line_starts.append(line_starts[-1] + len(line))
    for function, statement in statements(ast.parse(top).body, ""):
        children = [node for node in ast.iter_child_nodes(statement) if isinstance(node, ast.stmt)]
        last = min((child.lineno - 1 for child in children), default=statement.end_lineno)
        lines = range(statement.lineno, max(last, statement.lineno) + 1)
        changed = [("dropped", statement, "pass")] if can_drop(statement, function) else []
        for node in expressions(statement):
            changed += [(kind, old, ast.unparse(new)) for kind, old, new in changes(node)]
        for kind, node, after in changed:
            start = line_starts[node.lineno - 1] + node.col_offset
            end = line_starts[node.end_lineno - 1] + node.end_col_offset
            if isinstance(node, ast.expr):
                after = f"({after})"  # still one operand
            found.append(Mutation(kind, node.lineno, ast.unparse(node), after, start, end, lines))
    return sorted(found, key=lambda mutation: mutation.start)


def statements(body, function):
    """(name of its function, statement) of each that does not only refuse."""
    for node in body:
        if refuses(node):
            continue
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            yield from statements(node.body, node.name)
            continue
        raising = isinstance(node, ast.If) and refuses(node.body[-1])
        if not raising and not isinstance(node, ast.ClassDef):
            yield function, node
        inside = [[] if raising else getattr(node, "body", []), getattr(node, "orelse", [])]
        inside += [handler.body for handler in getattr(node, "handlers", [])]
        for block in [*inside, getattr(node, "finalbody", [])]:
            yield from statements(block, function)


def refuses(node):
    """Whether a statement can only raise, or does nothing."""
    if isinstance(node, (ast.Raise, ast.Assert, ast.Pass, ast.Import, ast.ImportFrom)):
        return True
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
        return bool(REFUSING.match(node.name))
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
        return bool(REFUSING.match(name_of(node.value)))
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)  # a docstring


def name_of(call):
    """The last part of what is called: refuse, of wire.refuse(...)."""
    return getattr(call.func, "attr", getattr(call.func, "id", ""))


def can_drop(node, function):
    """Whether the file still runs without this statement, to do something else."""
    if isinstance(node, ast.Expr):
        return not isinstance(node.value, ast.Call) or name_of(node.value) != "__init__"
    if not isinstance(node, ast.Assign):
        return isinstance(node, (ast.AugAssign, ast.Continue, ast.Break, ast.Delete))
    parts = [part for target in node.targets for part in ast.walk(target)]
    names = {part.id for part in parts if isinstance(part, ast.Name)}
    if any(isinstance(part, ast.Subscript) for part in parts):
        return True
    if any(isinstance(part, ast.Attribute) for part in parts):
        return function != "__init__" and names != {"ctx"}
    # A name that had a value before, as its new value shows
    return names <= {part.id for part in ast.walk(node.value) if isinstance(part, ast.Name)}


def expressions(statement):
    """A statement and the expressions in it, without messages, annotations and default values."""
    waiting = [statement]
    while waiting:
        node = waiting.pop()
        yield node
        for child in ast.iter_child_nodes(node):
            left_out = isinstance(
                child, (ast.stmt, ast.ExceptHandler, ast.JoinedStr, ast.arguments)
            )
            if not left_out and child is not getattr(node, "annotation", None):
                waiting.append(child)


def changes(node):
    """(kind, what to change, to what) of each small bug that a node can have."""
    if isinstance(node, (ast.If, ast.While, ast.IfExp)) and can_negate(node.test):
        yield "negated", node.test, ast.UnaryOp(ast.Not(), node.test)
    if isinstance(node, ast.AugAssign):
        yield "operator", node, ast.AugAssign(node.target, other(node.op), node.value)
    elif isinstance(node, ast.BinOp) and not (is_text(node.left) or is_text(node.right)):
        if type(node.op) in OPERATORS:
            yield "operator", node, ast.BinOp(node.left, other(node.op), node.right)
    elif isinstance(node, ast.BoolOp):
        yield "operator", node, ast.BoolOp(other(node.op), node.values)
    elif isinstance(node, ast.UnaryOp):
        yield "negated" if isinstance(node.op, ast.Not) else "operator", node, node.operand
    elif isinstance(node, ast.Compare):
        for i, operator in enumerate(node.ops):
            operators = [*node.ops[:i], other(operator), *node.ops[i + 1 :]]
            yield "operator", node, ast.Compare(node.left, operators, node.comparators)
    elif isinstance(node, ast.Constant) and isinstance(node.value, bool):
        yield "constant", node, ast.Constant(not node.value)
    elif isinstance(node, ast.Constant) and isinstance(node.value, int):
        yield "constant", node, ast.Constant(node.value + 1)
    elif isinstance(node, ast.Constant) and isinstance(node.value, float):
        yield "constant", node, ast.Constant(2 * node.value or 1.0)
    elif isinstance(node, ast.Call) and name_of(node) not in UNORDERED:
        for i, pair in enumerate(zip(node.args, node.args[1:])):
            starred = any(isinstance(argument, ast.Starred) for argument in pair)
            if not starred and ast.dump(pair[0]) != ast.dump(pair[1]):
                arguments = [*node.args[:i], pair[1], pair[0], *node.args[i + 2 :]]
                yield "swapped", node, ast.Call(node.func, arguments, node.keywords)


def other(operator):
    return OPERATORS[type(operator)]()


def can_negate(test):
    """Comparisons for equality and `not` are changed as expressions."""
    if isinstance(test, ast.Compare):
        return isinstance(test.ops[0], (ast.Lt, ast.LtE, ast.Gt, ast.GtE))
    return not isinstance(test, ast.UnaryOp)


def is_text(node):
    constant = isinstance(node, ast.Constant) and isinstance(node.value, str)
    return constant or isinstance(node, ast.JoinedStr)


# --- one run of a demo


def write_text(folder):
    """A text in which each byte of UTF-8 is about as likely as any other: ids of tokens near all
    cuts of the vocabulary. Returns its path."""
    letters = random.Random(1)
    ranges = [(32, 127), (128, 2048), (2048, 55296), (65536, 131072)]
    path = folder / "text.txt"
    path.write_text("".join(chr(letters.randrange(*letters.choice(ranges))) for _ in range(3000)))
    return path


def run_demo(folder, name, source, flags, seconds, trace=False):
    """Run a technique whose file has this source, at the latest for so many seconds. Returns (its
    exit code, or None where it was stopped, what it said, the lines that its ranks ran)."""
    ran, text = folder / "lines", folder / "text.txt"
    (folder / f"{name}.py").write_text(source)
    ran.write_text("")
    words = f"{flags} --quiet --device cpu".split()
    if name != "collectives":
        sgd = [] if name == "muon" else ["--optimizer", "sgd"]
        words = [*TINY.split(), *sgd, *words, "--data", str(text)]  # the later flag counts

    def before():
        data.cache_folder = lambda: folder
        sys.dont_write_bytecode = True
        sys.path.insert(0, str(folder))
        sys.modules.pop(name, None)
        if trace:
            sys.settrace(tracer(str(folder / f"{name}.py"), ran))

    script = conftest.Script(folder, name, words, before)
    try:
        code = script.end(seconds)
    except pytest.fail.Exception:
        code = None
    return code, script.output(), {int(line) for line in ran.read_text().split()}


def tracer(path, file):
    """A function for sys.settrace that writes each line of `path` once to a file. Forked ranks go
    on with it, each for itself."""
    seen, output = set(), open(file, "a", buffering=1)

    def in_frame(frame, event, argument):
        if frame.f_lineno not in seen:
            seen.add(frame.f_lineno)
            output.write(f"{frame.f_lineno}\n")
        return in_frame

    return lambda frame, *_: in_frame if frame.f_code.co_filename == path else None


def verdict(code, said):
    """What a run says of a bug: "survived", or how it was caught."""
    if code == 0:
        return "survived"
    if code is None or re.search(f"(within|no progress for) {PATIENCE} s", said):
        return "hung"
    told = "Traceback" in said or "ended by SIG" in said
    return "error" if told or code != 1 else "receipt"


class Target:
    """A technique's file, and the lines that each of its demos runs."""

    def __init__(self, name, folder):
        self.name, self.folder = name, folder
        self.source = pathlib.Path(conftest.ROOT, f"{name}.py").read_text()
        self.demos = {}  # {flags: (seconds, lines)}

    def learn(self, flags):
        """Run a demo without a bug. It must end with exit code 0."""
        began = time.monotonic()
        code, said, lines = run_demo(self.folder, self.name, self.source, flags, 300, trace=True)
        if code != 0:
            raise harness.Refused(f"{self.name}.py {flags} fails without a bug: {said}", code=1)
        self.demos[flags] = time.monotonic() - began, lines

    def demos_of(self, mutation):
        """The demos that run a bug, the quickest first."""
        found = [flags for flags, (_, lines) in self.demos.items() if lines & {*mutation.lines}]
        return sorted(found, key=lambda flags: self.demos[flags][0])

    def try_out(self, mutation):
        """Run a bug's demos until one catches it. Returns (outcome, flags)."""
        source = mutation.apply(self.source)
        for flags in self.demos_of(mutation):
            limit = PATIENCE + 8 * self.demos[flags][0]
            code, said, _ = run_demo(self.folder, self.name, source, flags, limit)
            outcome = verdict(code, said)
            if outcome != "survived":
                break
        return outcome, flags


# --- the report


def choose(found, limit, seed, name):
    """At most `limit` mutations of a file, in the order of its lines: the same for a seed."""
    if limit is None or limit >= len(found):
        return list(found)
    return sorted(random.Random(f"{seed} {name}").sample(found, limit), key=lambda m: m.start)


def score(name, args, folder):
    """Try a file's bugs, and print those that survive or hang. Returns its row of the table."""
    target = Target(name, folder)
    for flags in COMMANDS[name]:
        target.learn(flags)
    found = mutations(target.source)
    executed = [mutation for mutation in found if target.demos_of(mutation)]
    counts = collections.Counter()
    sample = choose(executed, args.limit, args.seed, name)
    for change in sample:
        outcome, flags = target.try_out(change)
        counts[outcome] += 1
        if outcome in ("survived", "hung"):
            before = change.before.splitlines()[0][:100]
            where = f"{name}.py:{change.line}"
            line = f"{outcome:9s}{where:28s}{change.kind:9s} {before}  ->  {change.after[:110]}"
            print(f"{line}  [{flags}]", flush=True)
    numbers = [len(found), len(found) - len(executed), len(sample)]
    numbers += [len(sample) - counts["survived"], *(counts[outcome] for outcome in OUTCOMES)]
    return f"| `{name}.py` | {' | '.join(map(str, numbers))} |"


def main():
    parser = harness.Parser(__doc__)
    why = "files to plant bugs in (default: all)"
    parser.add_argument("--only", nargs="+", choices=list(COMMANDS), metavar="FILE", help=why)
    why = "bugs of each file, drawn at random (default: all)"
    parser.add_argument("--limit", **harness.POSITIVE, help=why)
    parser.add_argument("--seed", type=int, default=1, metavar="N", help="of the drawing")
    args = parser.parse_args()
    conftest.pytest_collectstart()  # imports once what each demo needs
    with tempfile.TemporaryDirectory() as folder:
        write_text(pathlib.Path(folder))
        rows = [score(name, args, pathlib.Path(folder)) for name in args.only or COMMANDS]
    print("\n| | bugs | not run | tried | caught | by receipt | by error | hung | survived |")
    print("|---" * 9 + "|")
    print("\n".join(rows))


if __name__ == "__main__":
    harness.script(main)
