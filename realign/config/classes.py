"""What a class tells a config: its fields with types, defaults and texts, its base classes, and its docstring.

Everything is read from the imported class, except one thing: the string after a field, which Python discards, comes
from the source of its module. `realign.config.index` keeps what the classes of realign tell, so that neither help nor
completion imports them. A user's class is not imported at every press of the tab key: its source tells its fields.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import re
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from enum import Enum
from functools import cache, lru_cache
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args, get_origin

from realign.settings import Member, Range, default_of, hints_of, members_of

PACKAGE = "realign"
TARGET = "_target_"
"""Key of a component's class: its import path, or its word."""
_SET_BY_RUN = "interfaces"
"""Parameter of a graph function that no config sets."""
ALGORITHM_SETTINGS = "ALGORITHM_SETTINGS"
"""Class attribute of an interface, see `ModelInterface`."""


class Type(NamedTuple):
    """One member of an annotation that is a union."""

    name: str
    """Name without its module, such as int, None, dict, or that of a class."""
    path: str = ""
    """Import path of a class; empty for a built-in one."""
    arguments: tuple[tuple[Type, ...], ...] = ()
    """Types in brackets."""
    range: str = ""
    """Valid range of a number, as text."""
    members: Mapping[str, str] | None = None
    """Members of an enum as written in a config, with their texts; values of a `Literal`; None for another type."""


class Field(NamedTuple):
    """A field of a class, or a parameter of a function."""

    name: str
    types: tuple[Type, ...]
    """Members of the annotation; none if it cannot be evaluated."""
    default: Any
    """Default as written in a config: a component is a mapping of `_target_` and of the fields that differ from the
    defaults of its class."""
    required: bool
    """Whether it must be set."""
    text: str
    """The string after the field, or its line in the docstring; empty if there is none."""


@dataclass(frozen=True)
class Class:
    """A class, or a function that makes a graph. Two with the same import path are equal."""

    path: str
    """Import path of the definition."""
    text: str = field(default="", compare=False)
    """Docstring, or that of the nearest base class that has one."""
    bases: tuple[str, ...] = field(default=(), compare=False)
    """Import paths of the base classes, nearest first."""
    fields: Mapping[str, Field] = field(default_factory=dict, compare=False)
    """Fields that a config can set, with those of the base classes."""
    is_dataclass: bool = field(default=False, compare=False)
    is_protocol: bool = field(default=False, compare=False)
    is_abstract: bool = field(default=False, compare=False)
    """Whether a method is left to subclasses."""
    has_word: bool = field(default=False, compare=False)
    """Whether a word can select it: a public class that a config can construct, unless it sets `Settings.by_word`."""
    algorithm: tuple[str, ...] = field(default=(), compare=False)
    """Settings of an interface that `algorithm=NAME` resets."""
    returns: str | None = field(default=None, compare=False)
    """Import path of what a function returns; None for a class."""

    @property
    def module(self) -> str:
        """Module of the definition."""
        return self.path.rpartition(".")[0]

    @property
    def name(self) -> str:
        """Name without its module."""
        return self.path.rpartition(".")[2]

    @property
    def is_shipped(self) -> bool:
        """Whether realign ships it."""
        return self.path.startswith(f"{PACKAGE}.")


def described(thing: Any) -> Class | None:
    """Return what a class, or a function with a return annotation, tells a config; None for other objects."""
    if inspect.isclass(thing):
        return _of_class(thing)  # type: ignore[arg-type]
    returns = _hints(thing).get("return") if inspect.isfunction(thing) else None
    return _of_function(thing, returns) if inspect.isclass(returns) else None


def read_source(path: str, find: Callable[[str], Class | None]) -> Class | None:
    """Return what the source of a class tells without running it: its fields, and those of its base classes.

    Args:
        path: Import path of the class.
        find: Returns a class of realign at its import path. Other types of fields are only names.

    Returns:
        The class; None if no file in `sys.path` has it at the top level.
    """
    module, _, name = path.rpartition(".")
    files = (Path(folder, *module.split(".")).with_suffix(".py") for folder in sys.path)
    with suppress(OSError, SyntaxError, ValueError, RecursionError, StopIteration):
        body = ast.parse(next(filter(Path.is_file, files)).read_text(encoding="utf-8")).body
        node = next(node for node in body if isinstance(node, ast.ClassDef) and node.name == name)
        froms = [statement for statement in body if isinstance(statement, ast.ImportFrom)]
        known = {alias.asname or alias.name: f"{f.module}.{alias.name}" for f in froms for alias in f.names}
        at = [known.get(base, f"{module}.{base}") for base in map(ast.unparse, node.bases)]
        bases = [base for base in (find(base) or read_source(base, find) for base in at) if base is not None]
        fields = {name: field for base in reversed(bases) for name, field in base.fields.items()}
        for line in (line for line in node.body if isinstance(line, ast.AnnAssign)):
            field, written = ast.unparse(line.target), ast.unparse(line.annotation)
            if "ClassVar" not in written:
                types = (Type(kind, known[kind] if find(known.get(kind, "")) else "") for kind in written.split(" | "))
                fields[field] = Field(field, tuple(types), None, line.value is None, "")
        lineage = [path for base in bases for path in (base.path, *base.bases)]
        return Class(path, bases=tuple(lineage), fields=fields, is_dataclass=True)
    return None


def import_path(cls: Any) -> str:
    """Return the `_target_` of a class; empty for another type."""
    return f"{cls.__module__}.{cls.__qualname__}" if inspect.isclass(cls) else ""


@lru_cache(maxsize=1024)
def _of_class(cls: type) -> Class:
    hints, texts = _hints(cls), _field_texts(cls)
    declared = dataclasses.fields(cls) if dataclasses.is_dataclass(cls) else ()
    fields = {
        f.name: _field(f.name, hints.get(f.name), default_of(cls, f.name), dataclasses.MISSING, texts.get(f.name, ""))
        for f in declared
        if f.init and not f.name.startswith("_")
    }
    is_dataclass, is_protocol = dataclasses.is_dataclass(cls), bool(getattr(cls, "_is_protocol", False))
    is_abstract = inspect.isabstract(cls)
    constructors = [inspect.getattr_static(cls, name) is getattr(object, name) for name in ("__init__", "__new__")]
    is_public = not (cls.__name__.startswith("_") or is_abstract or is_protocol)
    return Class(
        import_path(cls),
        _docstring(cls),
        tuple(import_path(base) for base in cls.__mro__[1:] if _root(base) not in sys.stdlib_module_names),
        fields,
        is_dataclass=is_dataclass,
        is_protocol=is_protocol,
        is_abstract=is_abstract,
        has_word=is_public and (is_dataclass or all(constructors)) and getattr(cls, "by_word", True),
        algorithm=tuple(name for base in cls.__mro__ for name in vars(base).get(ALGORITHM_SETTINGS, ())),
    )


def _root(cls: type) -> str:
    return cls.__module__.partition(".")[0]


def _of_function(function: Any, returns: type) -> Class:
    hints, texts = _hints(function), _listed_names(function.__doc__ or "")
    fields = {
        name: _field(name, hints.get(name), parameter.default, parameter.empty, texts.get(name, ""))
        for name, parameter in inspect.signature(function).parameters.items()
        if name != _SET_BY_RUN
    }
    path = f"{function.__module__}.{function.__qualname__}"
    return Class(path, inspect.getdoc(function) or "", fields=fields, returns=import_path(returns))


def _field(name: str, annotation: Any, default: Any, missing: Any, text: str) -> Field:
    required = default is missing or (isinstance(default, str) and default == "???")  # OmegaConf's "must be set"
    types = () if annotation is None else types_of(annotation)
    return Field(name, types, None if required else _as_written(default), required, text)


def _hints(thing: Any) -> Mapping[str, Any]:
    with suppress(NameError, TypeError):  # a name that is imported under TYPE_CHECKING only: building reports it
        return hints_of(thing, extras=True)
    return {}


# --- types and values ---


@lru_cache(maxsize=4096)
def types_of(annotation: Any) -> tuple[Type, ...]:
    """Return the members of an evaluated annotation: one type, or those of a union."""
    return tuple(map(_type, members_of(annotation)))


def _type(member: Member) -> Type:
    annotation, origin, arguments = member.type, get_origin(member.type), get_args(member.type)
    if origin is Literal:
        return Type("Literal", members={str(value): "" for value in arguments})
    if annotation is type(None):
        return Type("None")
    if inspect.isclass(annotation) and issubclass(annotation, Enum):
        texts = _strings_after(annotation)
        members = {name.rstrip("_"): texts.get(name, "") for name in annotation.__members__}
        return Type(annotation.__name__, import_path(annotation), members=members)
    named = origin or annotation
    name = getattr(named, "__name__", str(named).rpartition(".")[2])
    path = import_path(named) if getattr(named, "__module__", "builtins") not in _BUILT_IN else ""
    inside = () if origin is None else tuple(map(types_of, arguments))
    return Type(name, path, inside, next((str(extra) for extra in member.extras if isinstance(extra, Range)), ""))


_BUILT_IN = ("builtins", "typing", "collections.abc", "pathlib")


def _as_written(value: Any) -> Any:
    """Return a default as a config writes it, in values that JSON has too."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        cls = type(value)
        names = [f.name for f in dataclasses.fields(cls) if f.init]
        given = {name: getattr(value, name) for name in names if getattr(value, name) != default_of(cls, name)}
        return {TARGET: import_path(cls), **{name: _as_written(inner) for name, inner in given.items()}}
    if isinstance(value, Enum):
        return value.name.rstrip("_")
    if isinstance(value, Mapping):
        return {str(key): _as_written(item) for key, item in value.items()}
    if isinstance(value, list | tuple | frozenset):
        return [_as_written(item) for item in value]
    return value if value is None or isinstance(value, bool | int | float | str) else str(value)


# --- texts ---


def first_sentence(text: str) -> str:
    """Return the first sentence of a text in one line, without the final period."""
    flat = " ".join(text.split())
    end = flat.find(". ")
    return (flat if end < 0 else flat[:end]).rstrip(".")


def first_paragraph(text: str) -> str:
    """Return the first paragraph of a text in one line."""
    return " ".join(text.split("\n\n")[0].split())


def _docstring(cls: type) -> str:
    """Return the docstring, or that of the nearest base class that has one."""
    for base in cls.__mro__[:-1]:
        text = vars(base).get("__doc__")
        if text and not text.startswith(f"{base.__name__}("):  # a dataclass without one gets its signature
            return inspect.cleandoc(text)
    return ""


def _field_texts(cls: type) -> dict[str, str]:
    """Return the text of each field: the string after it, its line in the docstring, or the text in a base class."""
    texts: dict[str, str] = {}
    for base in reversed(cls.__mro__[:-1]):
        own = _listed_names(vars(base).get("__doc__") or "") | _strings_after(base)
        texts |= {name: own[name] for name in inspect.get_annotations(base) if own.get(name)}
    return texts


def _listed_names(docstring: str) -> dict[str, str]:
    """Return the texts of the names that a docstring lists under `Attributes:` or `Args:`, in one line each."""
    texts: dict[str, list[str]] = {}
    in_list = False
    current: list[str] = []
    for line in inspect.cleandoc(docstring).splitlines():
        if re.match(r"\S.*:$", line):
            in_list = line.strip() in ("Attributes:", "Args:")
        elif in_list and (match := re.match(r" {4}(\w+)(?: \([^)]*\))?: (.*)", line)):
            current = texts.setdefault(match[1], [match[2]])
        elif in_list and line.startswith(" " * 8):
            current.append(line.strip())
    return {name: " ".join(lines) for name, lines in texts.items()}


def _strings_after(cls: type) -> dict[str, str]:
    """Return the string after each assignment in the body of a class, in one line; none without its source."""
    node = _class_bodies(cls.__module__).get(cls.__qualname__)
    texts = {}
    for statement, after in zip(node.body, node.body[1:], strict=False) if node is not None else ():
        target = statement.target if isinstance(statement, ast.AnnAssign) else getattr(statement, "targets", [None])[0]
        value = after.value if isinstance(after, ast.Expr) else None
        if isinstance(target, ast.Name) and isinstance(value, ast.Constant) and isinstance(value.value, str):
            texts[target.id] = " ".join(value.value.split())
    return texts


@cache
def _class_bodies(module: str) -> Mapping[str, ast.ClassDef]:
    """Return the classes at the top level of a module as source code."""
    with suppress(OSError, TypeError, SyntaxError, ValueError):
        path = inspect.getsourcefile(sys.modules[module])
        body = ast.parse(Path(path or "").read_text(encoding="utf-8")).body
        return {node.name: node for node in body if isinstance(node, ast.ClassDef)}
    return {}
