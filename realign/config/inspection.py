"""Read classes from source code, without importing them: fields, texts of fields, bases and enum members.

A field is documented by the string after it, which Python discards. Shell completion uses this module because it must
not import torch. Only modules that can be found without importing their parents' code are read.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

PACKAGE = "realign"
ROOT = Path(__file__).resolve().parent.parent


@dataclass(frozen=True)
class FieldSource:
    """A field of a class, or a member of an enum."""

    name: str
    """Name of the field."""
    annotation: ast.expr | None
    """Annotation; None for a member of an enum."""
    text: str
    """The string after the field, in one line; empty if there is none."""
    module: str
    """Module that defines the field, in which the names of its annotation are resolved."""


@dataclass(frozen=True)
class ClassSource:
    """A class."""

    module: str
    """Module that defines the class."""
    name: str
    """Name of the class."""
    text: str
    """Docstring; empty if there is none."""
    bases: tuple[str, ...]
    """Names of the base classes, as written."""
    own: dict[str, FieldSource] = field(default_factory=dict)
    """Fields that the class itself declares, or members of the enum."""
    dataclass: bool = False
    """Whether the class has the decorator `dataclass`."""
    abstract: bool = False
    """Whether the class itself declares an abstract method."""

    @property
    def path(self) -> str:
        """Import path of the class."""
        return f"{self.module}.{self.name}"

    @property
    def summary(self) -> str:
        """First sentence of the docstring, without the final period."""
        return first_sentence(self.text)


@dataclass(frozen=True)
class ModuleSource:
    """A module."""

    classes: dict[str, ClassSource]
    """Classes defined in the module."""
    imported: dict[str, tuple[str, str]]
    """Imported name -> module and name there; the name is empty for an imported module."""
    aliases: dict[str, ast.expr]
    """Names that the module assigns an expression to, such as a type alias."""


def first_sentence(text: str) -> str:
    """Return the first sentence of a text in one line, without the final period."""
    flat = " ".join(text.split())
    end = flat.find(". ")
    return (flat if end < 0 else flat[:end]).rstrip(".")


@cache
def read_module(name: str) -> ModuleSource | None:
    """Parse a module; None if its file is not found or has invalid syntax."""
    path = file_of(name)
    if path is None:
        return None
    try:
        tree = ast.parse(path.read_text(encoding="utf-8"))
    except (SyntaxError, OSError, UnicodeDecodeError):
        return None
    package = name if path.name == "__init__.py" else name.rpartition(".")[0]
    found = ModuleSource({}, {}, {})
    for node in _statements(tree.body):
        if isinstance(node, ast.ClassDef):
            found.classes[node.name] = _class(node, name)
        elif isinstance(node, ast.ImportFrom):
            base = _absolute(node, package)
            found.imported.update({alias.asname or alias.name: (base, alias.name) for alias in node.names})
        elif isinstance(node, ast.Import):
            found.imported.update({alias.asname or alias.name: (alias.name, "") for alias in node.names})
        elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            found.aliases[node.targets[0].id] = node.value
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.value is not None:
            found.aliases[node.target.id] = node.value
    return found


def file_of(name: str) -> Path | None:
    """Return the file of a module in realign, or in a folder of the import path; None if there is none."""
    top, _, rest = name.partition(".")
    folders = [ROOT.parent] if top == PACKAGE else [Path(folder or ".") for folder in sys.path]
    inner = Path(top, *filter(None, rest.split(".")))
    for folder in folders:
        for path in (folder / inner.with_suffix(".py"), folder / inner / "__init__.py"):
            if path.is_file():
                return path
    return None


@cache
def find_class(module: str, name: str) -> ClassSource | None:
    """Return a class by the module in which its name is used, following imports; None if it is not found."""
    for _ in range(10):  # re-exports
        source = read_module(module)
        if source is None:
            return None
        if name in source.classes:
            return source.classes[name]
        if name not in source.imported:
            return None
        module, inner = source.imported[name]
        name = inner or name
    return None


def class_at(path: str) -> ClassSource | None:
    """Return the class at an import path; None if it is not found."""
    module, _, name = path.rpartition(".")
    return find_class(module, name) if module else None


def ancestry(cls: ClassSource) -> list[ClassSource]:
    """Return a class and its base classes whose source is found, nearest first."""
    found, waiting = [], [cls]
    while waiting:
        one = waiting.pop(0)
        if one in found:
            continue
        found.append(one)
        bases = (find_class(one.module, base) for base in one.bases)
        waiting += [base for base in bases if base is not None]
    return found


def fields_of(cls: ClassSource) -> dict[str, FieldSource]:
    """Return the fields of a class by name, with those of its base classes. The text of a base class is kept."""
    found: dict[str, FieldSource] = {}
    for one in reversed(ancestry(cls)):
        for name, own in one.own.items():
            text = own.text or (found[name].text if name in found else "")
            found[name] = FieldSource(name, own.annotation, text, own.module)
    return found


def is_enum(cls: ClassSource) -> bool:
    """Return whether a class is an enum."""
    return any(base in ("Enum", "StrEnum", "IntEnum") for one in ancestry(cls) for base in one.bases)


def members_of(cls: ClassSource) -> dict[str, str]:
    """Return the members of an enum as written in a config, with their texts."""
    return {name.rstrip("_"): own.text for name, own in cls.own.items() if own.annotation is None}


def annotated(expression: ast.expr, module: str) -> Iterator[ClassSource | str]:
    """Yield the members of the union that an annotation is: classes, and names that are no class of a known file."""
    if isinstance(expression, ast.BinOp):
        yield from annotated(expression.left, module)
        yield from annotated(expression.right, module)
    elif isinstance(expression, ast.Constant):
        if isinstance(expression.value, str):
            yield from annotated(ast.parse(expression.value, mode="eval").body, module)
        else:
            yield str(expression.value)
    elif isinstance(expression, ast.Subscript):
        outer = ast.unparse(expression.value).rpartition(".")[2]
        if outer in ("Annotated", "Optional"):
            inner = expression.slice.elts[0] if isinstance(expression.slice, ast.Tuple) else expression.slice
            yield from annotated(inner, module)
            if outer == "Optional":
                yield "None"
        else:
            yield outer
    elif isinstance(expression, ast.Name):
        yield from _named(expression.id, module)
    else:
        yield ast.unparse(expression)


def _named(name: str, module: str) -> Iterator[ClassSource | str]:
    cls = find_class(module, name)
    if cls is not None:
        yield cls
        return
    for _ in range(10):
        source = read_module(module)
        if source is None:
            break
        if name in source.aliases:
            yield from annotated(source.aliases[name], module)
            return
        if name not in source.imported:
            break
        module, name = source.imported[name]
    yield name


def _statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Yield the statements of a module, including those under `if` (such as TYPE_CHECKING)."""
    for node in body:
        yield node
        if isinstance(node, ast.If):
            yield from _statements(node.body)


def _absolute(node: ast.ImportFrom, package: str) -> str:
    if not node.level:
        return node.module or ""
    parts = package.split(".")
    return ".".join([*parts[: len(parts) - node.level + 1], *([node.module] if node.module else [])])


def _class(node: ast.ClassDef, module: str) -> ClassSource:
    bases = tuple(ast.unparse(base).partition("[")[0].rpartition(".")[2] for base in node.bases)
    decorators = {ast.unparse(decorator).partition("(")[0].rpartition(".")[2] for decorator in node.decorator_list}
    methods = (one for one in node.body if isinstance(one, ast.FunctionDef | ast.AsyncFunctionDef))
    abstract = any("abstractmethod" in ast.unparse(name) for method in methods for name in method.decorator_list)
    found = ClassSource(
        module, node.name, ast.get_docstring(node) or "", bases, {}, "dataclass" in decorators, abstract
    )
    described = described_names(found.text)
    for place, one in enumerate(node.body):
        if isinstance(one, ast.AnnAssign) and isinstance(one.target, ast.Name):
            name, annotation = one.target.id, one.annotation
            default = ast.unparse(one.value or annotation)
            if "ClassVar" in ast.unparse(annotation) or "init=False" in default or "SETTING_OF" in default:
                continue
        elif isinstance(one, ast.Assign) and isinstance(one.targets[0], ast.Name) and not one.targets[0].id.isupper():
            name, annotation = one.targets[0].id, None
        else:
            continue
        if not name.startswith("_"):
            text = _text_after(node.body, place) or described.get(name, "")
            found.own[name] = FieldSource(name, annotation, text, module)
    return found


def described_names(docstring: str) -> dict[str, str]:
    """Return the texts of the names that a docstring lists under `Attributes:` or `Args:`, in one line each."""
    found: dict[str, list[str]] = {}
    section: bool = False
    current: list[str] = []
    for line in docstring.splitlines():
        if re.match(r"\S.*:$", line):
            section = line.strip() in ("Attributes:", "Args:")
        elif section and (match := re.match(r" {4}(\w+)(?: \([^)]*\))?: (.*)", line)):
            current = found.setdefault(match[1], [match[2]])
        elif section and line.startswith(" " * 8):
            current.append(line.strip())
    return {name: " ".join(lines) for name, lines in found.items()}


def _text_after(body: list[ast.stmt], place: int) -> str:
    after = body[place + 1] if place + 1 < len(body) else None
    if isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant) and isinstance(after.value.value, str):
        return " ".join(after.value.value.split())
    return ""


__all__ = [
    "ClassSource",
    "FieldSource",
    "ancestry",
    "annotated",
    "class_at",
    "described_names",
    "fields_of",
    "find_class",
    "first_sentence",
    "is_enum",
    "members_of",
    "read_module",
]
