"""Mutants of a module: small changes of its source that a test should notice, and a sample of them.

Each operator is a function of an AST node that yields replacements of text. Annotations, docstrings, imports, asserts,
decorators (except `torch.no_grad`), f-strings, raised exceptions, `describe`, `__all__` and panels are not mutated.
Some changes are left out because no test on a CPU could notice them, see `NEUTRAL_KEYWORDS`.
"""

from __future__ import annotations

import ast
import itertools
import math
import random
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

from benchmarks.mutation.source import Source

Scope = tuple[str, ...]
Required = Mapping[str, frozenset[str]]
"""Parameters without a default, by the name of the function or class."""

ARITHMETIC = {
    ast.Add: ("+", "-"),
    ast.Sub: ("-", "+"),
    ast.Mult: ("*", "/"),
    ast.Div: ("/", "*"),
    ast.FloorDiv: ("//", "*"),
    ast.Mod: ("%", "*"),
    ast.Pow: ("**", "*"),
    ast.BitAnd: ("&", "|"),
}
COMPARISONS = {
    ast.Lt: ("<", "<="),
    ast.LtE: ("<=", "<"),
    ast.Gt: (">", ">="),
    ast.GtE: (">=", ">"),
    ast.Eq: ("==", "!="),
    ast.NotEq: ("!=", "=="),
    ast.Is: ("is", "is not"),
    ast.IsNot: ("is not", "is"),
    ast.In: ("in", "not in"),
    ast.NotIn: ("not in", "in"),
}
OPPOSITES = (
    ("min", "max"),
    ("minimum", "maximum"),
    ("amin", "amax"),
    ("argmin", "argmax"),
    ("any", "all"),
    ("zeros_like", "ones_like"),
    ("ceil", "floor"),
)
FUNCTIONS = {a: b for pair in OPPOSITES for a, b in (pair, pair[::-1])}
METHODS = {**FUNCTIONS, "sum": "mean", "mean": "sum", "clamp_min": "clamp_max", "clamp_max": "clamp_min"}
UNWRAPPED = ("abs", "detach", "exp", "log", "neg", "sqrt", "square")
"""Methods without arguments whose call is replaced by its object."""
COMMUTATIVE = ("add", "allclose", "equal", "isclose", "logaddexp", "max", "maximum", "min", "minimum", "where")
"""Functions whose arguments are not swapped. `check_...` is another one: order changes only its message."""
NEUTRAL_KEYWORDS = ("device", "encoding", "non_blocking", "stacklevel", "strict")
"""Arguments that change no result on a CPU, or only where another error follows."""
MESSAGES = ("warn", "warning", "info", "debug", "cast", "TypeVar", "Panel")
"""Calls whose arguments are not mutated."""
NOT_MUTATED = ("describe", "__repr__", "__str__")
"""Functions that only produce text."""
SHAPE = re.compile(r"_([A-Z]+)$")
BOOL = re.compile(r"mask|keep|kept|valid|clipped|clamped|truncated|degenerate")
"""Names of bool tensors, which are not swapped with numbers."""


class Mutant(NamedTuple):
    """A change of one module."""

    file: str
    """Path from the root of the project, with slashes."""
    line: int
    column: int
    operator: str
    where: str
    """Qualified name of the class or function around it; empty at the top of the module."""
    change: str
    """The changed lines before and after."""
    mutated: str
    """The whole source after the change."""

    @property
    def id(self) -> str:
        """Name that is unique in the project."""
        return f"{self.file}:{self.line}:{self.column}:{self.operator}"


class Edit(NamedTuple):
    """A replacement of text; offsets are in characters."""

    operator: str
    at: int
    """Offset of the token that names the mutant."""
    start: int
    end: int
    text: str


def mutants(file: str, text: str, required: Required) -> list[Mutant]:
    """Return all mutants of a module, in the order of the source."""
    source = Source(text)
    found = []
    for edit, scope in sorted(_edits(source, source.tree, (), required), key=lambda pair: (pair[0].at, pair[0])):
        change = source.change(edit.start, edit.end, edit.text)
        mutated = source.replaced(edit.start, edit.end, edit.text)
        found.append(Mutant(file, *source.position(edit.at), edit.operator, ".".join(scope), change, mutated))
    return found


def required_parameters(texts: Iterable[str]) -> dict[str, frozenset[str]]:
    """Collect parameters without a default, by the name of the function or class, over several modules."""
    found: dict[str, set[str]] = {}
    for node in (node for text in texts for node in ast.walk(ast.parse(text))):
        if isinstance(node, ast.FunctionDef):
            positional = [*node.args.posonlyargs, *node.args.args]
            names = {each.arg for each in positional[: len(positional) - len(node.args.defaults)]}
            keywords = zip(node.args.kwonlyargs, node.args.kw_defaults, strict=True)
            names |= {each.arg for each, default in keywords if default is None}
        elif isinstance(node, ast.ClassDef):
            fields = [each for each in node.body if isinstance(each, ast.AnnAssign) and each.value is None]
            names = {each.target.id for each in fields if isinstance(each.target, ast.Name)}
        else:
            continue
        found.setdefault(node.name, set()).update(names)
    return {name: frozenset(names) for name, names in found.items()}


def sample(found: Mapping[str, list[Mutant]], size: int, seed: int, at_least: int = 3) -> list[Mutant]:
    """Draw mutants without replacement, stratified by file, in random order.

    Args:
        found: all mutants of each file.
        size: number of mutants; all are returned if there are fewer.
        seed: determines the sample and its order.
        at_least: mutants of each file, if there are as many and `size` suffices. The rest is proportional.
    """
    groups = {file: each for file, each in sorted(found.items()) if each}
    total = sum(map(len, groups.values()))
    size, floor = min(size, total), min(at_least, size // max(len(groups), 1))
    quota = {file: min(floor, len(each)) for file, each in groups.items()}
    free = {file: len(each) - quota[file] for file, each in groups.items()}
    rest, places = size - sum(quota.values()), sum(free.values())
    exact = {file: rest * each / max(places, 1) for file, each in free.items()}
    rounded = {file: math.floor(each) for file, each in exact.items()}
    by_remainder = sorted(exact, key=lambda file: rounded[file] - exact[file])
    for file in by_remainder[: rest - sum(rounded.values())]:
        rounded[file] += 1
    drawn = [
        mutant
        for file, each in groups.items()
        for mutant in random.Random(f"{seed} {file}").sample(each, quota[file] + rounded[file])
    ]
    random.Random(seed).shuffle(drawn)
    return drawn


def _edits(source: Source, node: ast.AST, scope: Scope, required: Required) -> Iterator[tuple[Edit, Scope]]:
    """Yield the replacements in a node and below it, each with its scope."""
    inner = (*scope, node.name) if isinstance(node, ast.ClassDef | ast.FunctionDef) else scope
    for edit in _own_edits(source, node, required):
        yield edit, inner
    for child in _children(node):
        yield from _edits(source, child, inner, required)


def _children(node: ast.AST) -> Iterator[ast.AST]:
    """Yield the children that are mutated."""
    match node:
        case ast.FunctionDef():
            defaults = [*node.args.defaults, *(each for each in node.args.kw_defaults if each is not None)]
            yield from [] if node.name in NOT_MUTATED else [*defaults, *node.body]
        case ast.ClassDef():
            yield from node.body
        case ast.AnnAssign():
            yield from [] if node.value is None else [node.value]
        case ast.Raise() | ast.Assert() | ast.JoinedStr() | ast.Import() | ast.ImportFrom():
            pass
        case ast.Assign(targets=[ast.Name(id=name)]) if name == "__all__" or name.endswith("_PANELS"):
            pass
        case ast.If(test=ast.Name(id="TYPE_CHECKING")):
            pass
        case ast.Call() if _name(node.func) in MESSAGES or _name(node.func).endswith("Error"):
            pass
        case ast.keyword(arg=str() as name) if name in NEUTRAL_KEYWORDS:
            pass
        case _:
            yield from ast.iter_child_nodes(node)


def _own_edits(source: Source, node: ast.AST, required: Required) -> Iterator[Edit]:
    """Yield the replacements of a node itself."""
    match node:
        case ast.BinOp():
            yield from _binary(source, node)
        case ast.UnaryOp():
            yield from _unary(source, node)
        case ast.Compare():
            yield from _comparisons(source, node)
        case ast.BoolOp():
            yield from _boolean(source, node)
        case ast.Constant():
            yield from _constant(source, node)
        case ast.If():
            yield from _condition(source, node.test, (True, False), [*node.body])
            yield from _return_none(source, node.body)
        case ast.IfExp():
            yield from _condition(source, node.test, (True, False), [])
        case ast.While():
            yield from _condition(source, node.test, (False,), [])
        case ast.comprehension():
            for test in node.ifs:
                yield from _condition(source, test, (True,), [])
        case ast.AugAssign():
            yield from _augmented(source, node)
        case ast.Expr(value=ast.Call()):
            start, end = source.span(node)
            yield Edit("delete_call", start, start, end, "pass")
        case ast.Call():
            yield from _call(source, node, required)
        case ast.FunctionDef() if node.name not in NOT_MUTATED:
            yield from _grad(source, node)
            yield from _keys(source, node)


def _binary(source: Source, node: ast.BinOp) -> Iterator[Edit]:
    """Swap an arithmetic operator; keep only the left side of `|`, which also unites dictionaries."""
    if any(
        isinstance(side, ast.JoinedStr | ast.List | ast.Tuple) or _is_text(side) for side in (node.left, node.right)
    ):
        return
    start, end = source.span(node)
    gap = source.span(node.left)[1], source.span(node.right)[0]
    if isinstance(node.op, ast.BitOr):
        yield Edit("drop_right", source.find("|", *gap).start, start, end, f"({ast.unparse(node.left)})")
    elif type(node.op) in ARITHMETIC:
        old, new = ARITHMETIC[type(node.op)]
        token = source.find(old, *gap)
        yield Edit("arithmetic", token.start, token.start, token.end, new)


def _unary(source: Source, node: ast.UnaryOp) -> Iterator[Edit]:
    """Remove `-`, `~` or `not`."""
    names = {ast.USub: "remove_minus", ast.Invert: "remove_invert", ast.Not: "remove_not"}
    if type(node.op) in names:
        start, _ = source.span(node)
        end = source.around(start, start + 1)[1].start
        yield Edit(names[type(node.op)], start, start, end, "")


def _comparisons(source: Source, node: ast.Compare) -> Iterator[Edit]:
    """Replace each operator of a chain by its neighbor or its opposite."""
    sides = [node.left, *node.comparators]
    for i, op in enumerate(node.ops):
        old, new = COMPARISONS[type(op)]
        gap = source.span(sides[i])[1], source.span(sides[i + 1])[0]
        words = old.split()
        first, last = source.find(words[0], *gap), source.find(words[-1], *gap)
        yield Edit("comparison", first.start, first.start, last.end, new)


def _boolean(source: Source, node: ast.BoolOp) -> Iterator[Edit]:
    """Swap each `and` and `or`."""
    old, new = ("and", "or") if isinstance(node.op, ast.And) else ("or", "and")
    for left, right in itertools.pairwise(node.values):
        token = source.find(old, source.span(left)[1], source.span(right)[0])
        yield Edit("boolean", token.start, token.start, token.end, new)


def _constant(source: Source, node: ast.Constant) -> Iterator[Edit]:
    """Change 0 to 1, 1 to 0, other integers to the next one, other floats to their double, and a bool to the other."""
    start, end = source.span(node)
    value = node.value
    if isinstance(value, bool):
        new = repr(not value)
    elif isinstance(value, int | float):
        new = repr(type(value)(1 - value if value in (0, 1) else value + 1 if isinstance(value, int) else 2 * value))
    else:
        return
    yield Edit("constant", start, start, end, new)


def _condition(source: Source, test: ast.expr, values: tuple[bool, ...], body: list[ast.stmt]) -> Iterator[Edit]:
    """Replace a condition by a constant; not by True if it guards only a `raise`, which any test would notice."""
    if isinstance(test, ast.Constant) or any(isinstance(each, ast.NamedExpr) for each in ast.walk(test)):
        return
    if isinstance(test, ast.Name) and test.id == "TYPE_CHECKING":
        return
    start, end = source.span(test)
    guard = bool(body) and all(isinstance(each, ast.Raise) for each in body)
    for value in values:
        if not (guard and value):
            yield Edit(f"condition_{str(value).lower()}", start, start, end, str(value))


def _return_none(source: Source, body: list[ast.stmt]) -> Iterator[Edit]:
    """Return None from an early return."""
    for each in body:
        if isinstance(each, ast.Return) and each.value is not None and ast.unparse(each.value) != "None":
            start, end = source.span(each)
            yield Edit("return_none", start, start, end, "return None")


def _augmented(source: Source, node: ast.AugAssign) -> Iterator[Edit]:
    """Delete an augmented assignment, or swap its operator."""
    start, end = source.span(node)
    yield Edit("delete_assignment", start, start, end, "pass")
    if type(node.op) in ARITHMETIC and not isinstance(node.value, ast.List | ast.Tuple | ast.ListComp):
        old, new = ARITHMETIC[type(node.op)]
        token = source.find(f"{old}=", source.span(node.target)[1], source.span(node.value)[0])
        yield Edit("arithmetic", token.start, token.start, token.end, f"{new}=")


def _call(source: Source, node: ast.Call, required: Required) -> Iterator[Edit]:
    """Change the function of a call or its arguments."""
    name, (start, end), after = _name(node.func), source.span(node), source.span(node.func)[1]
    method = isinstance(node.func, ast.Attribute)
    if name in MESSAGES or name.endswith("Error"):
        return
    if name in (METHODS if method else FUNCTIONS):
        yield Edit("function", after - len(name), after - len(name), after, METHODS[name])
    if method and name in UNWRAPPED and not node.args and not node.keywords:
        yield Edit("unwrap", after - len(name), start, end, _object(source, node))
    if method and name == "clamp":
        yield from _clamp(source, node)
    if name == "where" and len(node.args) == 3:
        condition, a, b = map(ast.unparse, node.args)
        yield Edit("where_swap", after - len(name), start, end, f"{source.segment(node.func)}({condition}, {b}, {a})")
        kept = b if isinstance(node.args[1], ast.Constant) else a
        yield Edit("where_drop", after - len(name), start, end, f"({kept})")
    yield from _keywords(source, node, required.get(name, frozenset()))
    if name not in COMMUTATIVE and not name.lstrip("_").startswith("check"):
        yield from _swapped_arguments(source, node)


def _clamp(source: Source, node: ast.Call) -> Iterator[Edit]:
    """Remove a bound of `clamp`; a single one with the whole call."""
    bounds = [*node.args, *(each.value for each in node.keywords)]
    if len(bounds) == 1:
        start, end = source.span(node)
        yield Edit("clamp", source.span(bounds[0])[0], start, end, _object(source, node))
    else:
        for bound in bounds:
            start, end = source.span(bound)
            yield Edit("clamp", start, start, end, "None")


def _keywords(source: Source, node: ast.Call, required: frozenset[str]) -> Iterator[Edit]:
    """Remove a keyword argument that is known or likely to have a default."""
    for each in node.keywords:
        if each.arg is None or each.arg in required or each.arg in NEUTRAL_KEYWORDS or _name(node.func) == "clamp":
            continue
        start, end = source.span(each)
        before, after = source.around(start, end)
        first = start if before.text == "(" else before.start
        last = after.end if before.text == "(" and after.text == "," else end
        yield Edit("remove_keyword", start, first, last, "")


def _swapped_arguments(source: Source, node: ast.Call) -> Iterator[Edit]:
    """Swap neighbors that are variables of the same shape, such as `logprobs_T` and `old_logprobs_T`."""
    values = [*node.args, *(each.value for each in node.keywords)]
    for a, b in itertools.pairwise(values):
        if not (isinstance(a, ast.Name) and isinstance(b, ast.Name)) or a.id == b.id:
            continue
        shapes = SHAPE.search(a.id), SHAPE.search(b.id)
        same_kind = bool(BOOL.search(a.id)) == bool(BOOL.search(b.id))
        if shapes[0] and shapes[1] and shapes[0][1] == shapes[1][1] and same_kind:
            (start, first), (second, end) = source.span(a), source.span(b)
            yield Edit("swap_arguments", start, start, end, b.id + source.text[first:second] + a.id)


def _grad(source: Source, node: ast.FunctionDef) -> Iterator[Edit]:
    """Remove the decorator `torch.no_grad()`."""
    for each in node.decorator_list:
        if ast.unparse(each) == "torch.no_grad()":
            start, end = source.span(each)
            first, last = (
                source.find("@", source.text.rfind("\n", 0, start) + 1, end).start,
                source.text.find("\n", end),
            )
            yield Edit("no_grad", start, first, source.around(last, last)[1].start, "")


def _keys(source: Source, node: ast.FunctionDef) -> Iterator[Edit]:
    """Read the next key of the same mapping in the same function: `data["returns"]` for `data["advantages"]`."""
    reads: dict[str, list[ast.Constant]] = {}
    for each in _inside(node):
        match each:
            case ast.Subscript(value=ast.Name(id=name), slice=ast.Constant(value=str()) as key, ctx=ast.Load()):
                reads.setdefault(name, []).append(key)
    for found in reads.values():
        keys = list(dict.fromkeys(key.value for key in found))
        for key in found if len(keys) > 1 else []:
            start, end = source.span(key)
            yield Edit("key", start, start, end, f'"{keys[(keys.index(key.value) + 1) % len(keys)]}"')


def _inside(node: ast.AST) -> Iterator[ast.AST]:
    """Yield the mutated nodes below a function, without those of functions inside it."""
    for child in _children(node):
        if not isinstance(child, ast.FunctionDef):
            yield child
            yield from _inside(child)


def _object(source: Source, node: ast.Call) -> str:
    """Return the text of the object of a method call."""
    start, after = source.span(node)[0], source.span(node.func)[1]
    text = source.text[start : after - len(_name(node.func))]
    return f"({text.rstrip()[:-1]})"


def _name(function: ast.expr) -> str:
    """Return the last part of the name of a function."""
    match function:
        case ast.Name(id=name) | ast.Attribute(attr=name):
            return name
    return ""


def _is_text(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str)
