"""Small bugs, planted one at a time into the source of a file: which there are, and how each reads.

    for mutation in mutations(text):
        changed = mutation.apply(text)

Only the top of a file is changed, above its demo. Left out is what changes no number: refusals (a
`raise`, an `if` that only raises, what is computed for it alone), messages, docstrings,
annotations, decorators, default values, names of strings.
"""

import ast
import re
from typing import NamedTuple

DEMO = "# --- demo ---"

# Statements with one of these names only notice a wrong order of calls, and then raise
BOOKKEEPING = {"latest", "versions", "storages", "places", "running", "unfinished"}
BOOKKEEPING |= {"summed", "summed_at", "complete_at", "watched", "compared", "of_experts"}
# Classes and functions that do nothing else
REFUSING = {"Step", "Freed", "Checked", "__del__"}
REFUSING_NAME = re.compile(r"_?(check|refuse|agree|warn|_?assert)")

OPERATORS = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.FloorDiv,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.FloorDiv,
    ast.LShift: ast.RShift,
    ast.RShift: ast.LShift,
    ast.BitAnd: ast.BitOr,
    ast.BitOr: ast.BitAnd,
    ast.BitXor: ast.BitAnd,
}
COMPARISONS = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}
# The order of their arguments changes nothing, or is a type error at once
UNORDERED = {"max", "min", "isinstance", "hasattr", "getattr", "setattr"}


class Mutation(NamedTuple):
    kind: str  # "operator", "constant", "dropped", "swapped" or "negated"
    line: int
    before: str  # the changed piece of source, on one line
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
    top = text.partition(f"\n{DEMO}\n")[0]
    finder = Finder(top)
    finder.statements(ast.parse(top).body)
    return finder.found


# --- what only refuses


def name_of(call):
    """The last part of what is called: refuse, of wire.refuse(...)."""
    return getattr(call.func, "attr", getattr(call.func, "id", ""))


def raises(body):
    """Whether a block ends with a raise, or with the call of a function that raises."""
    last = body[-1]
    calls = isinstance(last, ast.Expr) and isinstance(last.value, ast.Call)
    return isinstance(last, ast.Raise) or (calls and name_of(last.value) == "refuse")


def only_refuses(node, used):
    """Whether a statement can only raise. used: names that statements of other kinds read."""
    if isinstance(node, (ast.Raise, ast.Assert, ast.Pass, ast.Import, ast.ImportFrom)):
        return True
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
        return node.name in REFUSING or bool(REFUSING_NAME.match(node.name))
    if isinstance(node, ast.If) and not node.orelse and raises(node.body):
        return True
    if isinstance(node, ast.For) and all(only_refuses(child, used) for child in node.body):
        return True
    if isinstance(node, ast.ExceptHandler):
        return raises(node.body)
    if isinstance(node, ast.Expr):
        if isinstance(node.value, ast.Constant):
            return True  # a docstring
        if isinstance(node.value, ast.Call) and REFUSING_NAME.match(name_of(node.value)):
            return True
    if isinstance(node, ast.Assign) and all(isinstance(t, ast.Name) for t in node.targets):
        if not {target.id for target in node.targets} & used:
            return True
    keeps_books = [part for part in header(node) if isinstance(part, ast.Attribute)]
    return any(part.attr in BOOKKEEPING for part in keeps_books)


def header(node):
    """All nodes of a statement without those of the statements inside it."""
    found, waiting = [], [node]
    while waiting:
        part = waiting.pop()
        found.append(part)
        waiting += [c for c in ast.iter_child_nodes(part) if not isinstance(c, ast.stmt)]
    return found


def names_used(tree):
    """The names that anything but refusals reads in a function or module. Repeated, because a name
    may only serve another that only serves a refusal."""
    used = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    while True:
        reads, waiting = set(), [tree]
        while waiting:
            node = waiting.pop()
            if isinstance(node, (ast.stmt, ast.ExceptHandler)) and node is not tree:
                if only_refuses(node, used):
                    continue
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load):
                reads.add(node.id)
            waiting += ast.iter_child_nodes(node)
        if reads == used:
            return used
        used = reads


# --- what can be changed


class Finder:
    """Walks through statements and expressions, and notes each possible change."""

    def __init__(self, text):
        self.found = []
        self.line_starts = [0]
        for line in text.encode().splitlines(keepends=True):
            self.line_starts.append(self.line_starts[-1] + len(line))
        self.used = names_used(ast.parse(text))
        self.seen = set()  # names assigned so far in the function: dropping the first is no bug
        self.function = ""
        self.lines = range(0)

    def note(self, kind, node, after):
        """A change of a node to the source `after`."""
        start = self.line_starts[node.lineno - 1] + node.col_offset
        end = self.line_starts[node.end_lineno - 1] + node.end_col_offset
        before = ast.unparse(node)
        self.found.append(Mutation(kind, node.lineno, before, after, start, end, self.lines))

    def change(self, kind, node, new):
        """A change of an expression to another one. The brackets keep it one operand."""
        self.note(kind, node, f"({ast.unparse(new)})")

    def statements(self, body):
        for node in body:
            if not only_refuses(node, self.used):
                self.statement(node)

    def statement(self, node):
        outside = self.function, self.seen, self.used
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            self.function, self.used = node.name, names_used(node)
            self.seen = {a.arg for a in [*node.args.args, *node.args.kwonlyargs]}
            self.statements(node.body)
            self.function, self.seen, self.used = outside
            return
        if isinstance(node, ast.ClassDef):
            self.statements(node.body)
            return
        blocks = [getattr(node, name, []) for name in ("body", "orelse", "finalbody")]
        inside = [child for block in blocks for child in block]
        last = min((child.lineno - 1 for child in inside), default=node.end_lineno)
        self.lines = range(node.lineno, max(last, node.lineno) + 1)
        if isinstance(node, ast.If) and raises(node.body):
            self.statements(node.orelse)  # one of its arms raises: the others are left
            return
        if self.can_drop(node):
            self.note("dropped", node, "pass")
        if isinstance(node, (ast.If, ast.While)):
            self.negate(node.test)
        if isinstance(node, ast.AugAssign) and type(node.op) in OPERATORS:
            new = ast.AugAssign(node.target, OPERATORS[type(node.op)](), node.value)
            self.note("operator", node, ast.unparse(new))
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.expr) and child is not getattr(node, "annotation", None):
                self.expression(child)
            elif isinstance(child, ast.withitem):
                self.expression(child.context_expr)
        for target in getattr(node, "targets", [getattr(node, "target", None)]):
            names = ast.walk(target) if target else []
            self.seen |= {name.id for name in names if isinstance(name, ast.Name)}
        for block in blocks:
            self.statements(block)
        for handler in getattr(node, "handlers", []):
            if not only_refuses(handler, self.used):
                self.statements(handler.body)

    def can_drop(self, node):
        """Whether the file still runs without this statement, to do something else."""
        if isinstance(node, (ast.AugAssign, ast.Continue, ast.Break, ast.Delete)):
            return True
        if isinstance(node, ast.Expr):
            begins = isinstance(node.value, ast.Call) and name_of(node.value) == "__init__"
            return isinstance(node.value, (ast.Call, ast.Await)) and not begins
        if not isinstance(node, ast.Assign):
            return False
        names = [name for target in node.targets for name in ast.walk(target)]
        if any(isinstance(name, ast.Subscript) for name in names):
            return True
        if any(isinstance(name, ast.Attribute) for name in names):
            owner = [name.id for name in names if isinstance(name, ast.Name)]
            return self.function != "__init__" and owner != ["ctx"]
        targets = {name.id for name in names if isinstance(name, ast.Name)}
        return targets <= self.seen

    def negate(self, test):
        """A condition that is a comparison or a `not` is changed as an expression."""
        if isinstance(test, ast.Compare) and type(test.ops[0]) in (
            ast.Lt,
            ast.LtE,
            ast.Gt,
            ast.GtE,
        ):
            self.change("negated", test, ast.UnaryOp(ast.Not(), test))
        elif not isinstance(test, (ast.Compare, ast.UnaryOp)):
            self.change("negated", test, ast.UnaryOp(ast.Not(), test))

    def expression(self, node):
        if isinstance(node, ast.JoinedStr):
            return  # a message
        if isinstance(node, ast.BinOp) and type(node.op) in OPERATORS and not is_text(node):
            new = OPERATORS[type(node.op)]()
            self.change("operator", node, ast.BinOp(node.left, new, node.right))
        elif isinstance(node, ast.BoolOp):
            new = ast.Or() if isinstance(node.op, ast.And) else ast.And()
            self.change("operator", node, ast.BoolOp(new, node.values))
        elif isinstance(node, ast.UnaryOp):
            kind = "negated" if isinstance(node.op, ast.Not) else "operator"
            self.change(kind, node, node.operand)
        elif isinstance(node, ast.Compare):
            for i, operator in enumerate(node.ops):
                operators = list(node.ops)
                operators[i] = COMPARISONS[type(operator)]()
                new = ast.Compare(node.left, operators, node.comparators)
                self.change("operator", node, new)
        elif isinstance(node, ast.Constant):
            self.constant(node)
        elif isinstance(node, ast.Call):
            self.swap(node)
        elif isinstance(node, ast.IfExp):
            self.negate(node.test)
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.comprehension):
                self.expression(child.iter)
                for test in child.ifs:
                    self.negate(test)
                    self.expression(test)
            elif isinstance(child, ast.keyword):
                self.expression(child.value)
            elif isinstance(child, ast.expr):
                self.expression(child)

    def constant(self, node):
        if isinstance(node.value, bool):
            self.note("constant", node, str(not node.value))
        elif isinstance(node.value, int):
            self.note("constant", node, str(node.value + 1))
        elif isinstance(node.value, float):
            self.note("constant", node, repr(2 * node.value or 1.0))

    def swap(self, node):
        """Neighbouring arguments, exchanged."""
        if name_of(node) in UNORDERED:
            return
        for i, (first, second) in enumerate(zip(node.args, node.args[1:])):
            starred = isinstance(first, ast.Starred) or isinstance(second, ast.Starred)
            if starred or ast.unparse(first) == ast.unparse(second):
                continue
            arguments = [*node.args[:i], second, first, *node.args[i + 2 :]]
            self.change("swapped", node, ast.Call(node.func, arguments, node.keywords))


def is_text(node):
    """Whether a sum is one of strings."""
    sides = (node.left, node.right)
    return any(
        isinstance(side, ast.JoinedStr)
        or (isinstance(side, ast.Constant) and isinstance(side.value, str))
        for side in sides
    )
