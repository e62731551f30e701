"""Read classes from source code, without importing them: fields, defaults, texts, bases, and their words.

Help and completion use this module, so that neither imports torch. A field is documented by the string after it, which
Python discards. What a file declares is cached in the user's cache folder, since parsing takes longer than reading.
"""

from __future__ import annotations

import ast
import dataclasses
import hashlib
import inspect
import json
import operator
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from realign.cache_folder import Cache
from realign.settings import Range

PACKAGE = "realign"
ROOT = Path(__file__).resolve().parent.parent
MISSING = object()
"""Default of a field that must be set."""
SET_BY_RUN = "interfaces"
"""Parameter of a graph function that no config sets."""
ALGORITHM_SETTINGS = "ALGORITHM_SETTINGS"
"""Class attribute of an interface, see `ModelInterface`."""
ENUMS = frozenset({"Enum", "StrEnum", "IntEnum"})
OPERATORS: Mapping[type[ast.operator], Callable[[Any, Any], Any]] = MappingProxyType(
    {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Pow: operator.pow}
)
"""Operators of defaults such as `16 * 1024`."""


@dataclass(frozen=True)
class Field:
    """A field of a class, or a parameter of a function."""

    name: str
    annotation: str
    """Annotation, as written; empty if there is none."""
    default: str | None
    """Expression of the default; None if the field must be set."""
    text: str
    """The string after the field, or its line in the docstring; empty if there is none."""
    module: str
    """Module in which the names of annotation and default are resolved."""


@dataclass(frozen=True, eq=False)
class Definition:
    """A class, or a function that makes a graph."""

    module: str
    name: str
    text: str
    """Docstring; empty if there is none."""
    bases: tuple[str, ...] = ()
    """Base classes, as written."""
    fields: Mapping[str, Field] = dataclasses.field(default_factory=dict)
    """Annotated fields that the class itself declares, or the parameters of the function."""
    constants: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Other names that the class itself assigns, with their texts; of an enum, its members."""
    methods: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Methods that the class itself defines, with their parameters as written."""
    abstract: tuple[str, ...] = ()
    """Names of the abstract ones."""
    dataclass: bool = False
    """Whether the class itself has the decorator `dataclass`."""
    algorithm: tuple[str, ...] = ()
    """Names that the class itself writes in `ALGORITHM_SETTINGS`; it has those of its base classes too."""
    returns: str | None = None
    """Return annotation of a function; None for a class."""

    @property
    def path(self) -> str:
        """Import path."""
        return f"{self.module}.{self.name}"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Definition) and self.path == other.path

    def __hash__(self) -> int:
        return hash(self.path)


@dataclass(frozen=True)
class Module:
    """What a module declares."""

    definitions: Mapping[str, Definition]
    imported: Mapping[str, tuple[str, str]]
    """Imported name -> module and name there; the name is empty for an imported module."""
    constants: Mapping[str, str]
    """Other names -> the expression that the module assigns, such as a type alias."""


class Type(NamedTuple):
    """One member of an annotation that is a union."""

    name: str
    """Name without its module, such as int, None, dict, or that of a class."""
    definition: Definition | None = None
    """The class; None if its source is not found."""
    arguments: tuple[tuple[Type, ...], ...] = ()
    """Types in brackets."""
    range: Range | None = None
    """Valid range of a number."""
    literals: tuple[str, ...] = ()
    """Values of a `Literal`."""


class Component(NamedTuple):
    """A component as a default: its class, and the fields that differ from the defaults of the class."""

    definition: Definition
    values: Mapping[str, Any]


class Member(NamedTuple):
    """A member of an enum."""

    path: str
    """Import path of the enum."""
    name: str


class Unknown(NamedTuple):
    """A default that only running the code tells."""

    source: str


# --- modules ---


def read_module(name: str) -> Module | None:
    """Return what a module declares; None if its file is not found or has invalid syntax."""
    top = name.partition(".")[0]
    if top in sys.stdlib_module_names:
        return None
    return _of_package(name) if top == PACKAGE else _in_folders(name, sys.path)


# Cached for good, since the files of realign do not change while it runs. A user's files can, as in a notebook.
@cache
def _of_package(name: str) -> Module | None:
    return _in_folders(name, [str(ROOT.parent)])


def _in_folders(name: str, folders: Iterable[str]) -> Module | None:
    """Return what a module in the first of the folders that has it declares. An edited file is read again."""
    inner = name.replace(".", os.sep)
    for folder in folders:
        for path in (os.path.join(folder, f"{inner}.py"), os.path.join(folder, inner, "__init__.py")):
            with suppress(OSError):
                status = os.stat(path)
                # sys.path may have "" for the current folder, and the cache outlives the process.
                return _read(name, os.path.abspath(path), status.st_mtime_ns, status.st_size)
    return None


@lru_cache(maxsize=1024)
def _read(name: str, path: str, mtime_ns: int, size: int) -> Module | None:
    key = [_reader(), name, path, mtime_ns, size]
    cached = _cache_file(key)
    if (module := _from_cache(cached, key)) is not None:
        return module
    try:
        tree = ast.parse(Path(path).read_text(encoding="utf-8"))
    except (SyntaxError, ValueError, OSError):
        return None
    module = _declared(tree, name, name if path.endswith("__init__.py") else name.rpartition(".")[0])
    _to_cache(cached, key, module)
    return module


def _declared(tree: ast.Module, name: str, package: str) -> Module:
    definitions: dict[str, Definition] = {}
    imported: dict[str, tuple[str, str]] = {}
    constants: dict[str, str] = {}
    module = Module(definitions, imported, constants)
    for node in _statements(tree.body):
        if isinstance(node, ast.ClassDef):
            definitions[node.name] = _class(node, name)
        elif isinstance(node, ast.FunctionDef) and node.returns is not None:
            definitions[node.name] = _function(node, name)
        elif isinstance(node, ast.ImportFrom):
            base = _absolute(node, package)
            imported.update({alias.asname or alias.name: (base, alias.name) for alias in node.names})
        elif isinstance(node, ast.Import):
            imported.update({alias.asname or alias.name: (alias.name, "") for alias in node.names})
        elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            constants[node.targets[0].id] = ast.unparse(node.value)
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.value is not None:
            constants[node.target.id] = ast.unparse(node.value)
    return module


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


def _class(node: ast.ClassDef, module: str) -> Definition:
    text = ast.get_docstring(node) or ""
    described = described_names(text)
    fields: dict[str, Field] = {}
    constants: dict[str, str] = {}
    methods: dict[str, str] = {}
    abstract: list[str] = []
    for place, statement in enumerate(node.body):
        after = _text_after(node.body, place)
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
            name, default = statement.target.id, _default(statement.value)
            annotation = ast.unparse(statement.annotation)
            if "ClassVar" in annotation or "InitVar" in annotation or default is NotImplemented:
                constants |= {name: after} if statement.value is not None else {}
            elif not name.startswith("_"):
                fields[name] = Field(name, annotation, default, after or described.get(name, ""), module)
        elif isinstance(statement, ast.Assign) and isinstance(statement.targets[0], ast.Name):
            constants[statement.targets[0].id] = after
        elif isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef):
            methods[statement.name] = ast.unparse(statement.args)
            if any("abstract" in ast.unparse(decorator) for decorator in statement.decorator_list):
                abstract.append(statement.name)
    decorators = [ast.unparse(decorator).partition("(")[0].rpartition(".")[2] for decorator in node.decorator_list]
    bases = tuple(ast.unparse(base).partition("[")[0] for base in node.bases)
    is_decorated = "dataclass" in decorators
    algorithm = _algorithm(node)
    return Definition(
        module, node.name, text, bases, fields, constants, methods, tuple(abstract), is_decorated, algorithm
    )


def _algorithm(node: ast.ClassDef) -> tuple[str, ...]:
    """Return the texts in the value of `ALGORITHM_SETTINGS`."""
    for statement in node.body:
        if isinstance(statement, ast.Assign | ast.AnnAssign) and statement.value is not None:
            target = statement.target if isinstance(statement, ast.AnnAssign) else statement.targets[0]
            if ast.unparse(target) == ALGORITHM_SETTINGS:
                below = (node.value for node in ast.walk(statement.value) if isinstance(node, ast.Constant))
                return tuple(text for text in below if isinstance(text, str))
    return ()


def _default(value: ast.expr | None) -> Any:
    """Return the expression of a field's default; None if it must be set, NotImplemented if it is no parameter."""
    if not isinstance(value, ast.Call) or ast.unparse(value.func).rpartition(".")[2] != "field":
        return None if value is None else ast.unparse(value)
    given = {keyword.arg: keyword.value for keyword in value.keywords}
    if isinstance(no := given.get("init"), ast.Constant) and no.value is False:
        return NotImplemented
    if (factory := given.get("default_factory")) is not None:
        return ast.unparse(factory.body) if isinstance(factory, ast.Lambda) else f"{ast.unparse(factory)}()"
    return ast.unparse(given["default"]) if "default" in given else None


def _function(node: ast.FunctionDef, module: str) -> Definition:
    text = ast.get_docstring(node) or ""
    described = described_names(text)
    positional = [*node.args.posonlyargs, *node.args.args]
    defaults = [*[None] * (len(positional) - len(node.args.defaults)), *node.args.defaults, *node.args.kw_defaults]
    fields = {
        argument.arg: Field(
            argument.arg,
            "" if argument.annotation is None else ast.unparse(argument.annotation),
            None if default is None else ast.unparse(default),
            described.get(argument.arg, ""),
            module,
        )
        for argument, default in zip([*positional, *node.args.kwonlyargs], defaults, strict=True)
    }
    return Definition(module, node.name, text, fields=fields, returns=ast.unparse(node.returns))  # type: ignore[arg-type]


def described_names(docstring: str) -> dict[str, str]:
    """Return the texts of the names that a docstring lists under `Attributes:` or `Args:`, in one line each."""
    texts: dict[str, list[str]] = {}
    section: bool = False
    current: list[str] = []
    for line in docstring.splitlines():
        if re.match(r"\S.*:$", line):
            section = line.strip() in ("Attributes:", "Args:")
        elif section and (match := re.match(r" {4}(\w+)(?: \([^)]*\))?: (.*)", line)):
            current = texts.setdefault(match[1], [match[2]])
        elif section and line.startswith(" " * 8):
            current.append(line.strip())
    return {name: " ".join(lines) for name, lines in texts.items()}


def _text_after(body: list[ast.stmt], place: int) -> str:
    after = body[place + 1] if place + 1 < len(body) else None
    if isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant) and isinstance(after.value.value, str):
        return " ".join(after.value.value.split())
    return ""


def first_sentence(text: str) -> str:
    """Return the first sentence of a text in one line, without the final period."""
    flat = " ".join(text.split())
    end = flat.find(". ")
    return (flat if end < 0 else flat[:end]).rstrip(".")


# --- the cache ---

_LARGEST = 64 << 20
"""Size in bytes above which the cache of this module gets no more files."""


@cache
def _reader() -> list[int]:
    """Return what identifies this version of the reader: another one may declare other facts."""
    status = Path(__file__).stat()
    return [status.st_mtime_ns, status.st_size, *sys.version_info[:2]]


def _facts() -> Cache:
    return Cache("inspection", limit=_LARGEST, quiet=True)


def _cache_file(key: list[Any]) -> str:
    """Return the cache file of a module: one per file, so that an edit replaces the facts of the earlier version."""
    return f"{hashlib.sha256(json.dumps(key[1:3]).encode()).hexdigest()[:24]}.json"


def _from_cache(name: str, key: list[Any]) -> Module | None:
    """Return the facts of a cache file; None if there are none of this version, or another user could write them."""
    with suppress(ValueError, KeyError, TypeError, AttributeError, RecursionError):
        head, _, body = (_facts().read(name) or b"").decode().partition("\n")
        if head == _head(key, body):
            facts = json.loads(body)
            definitions = {name: _definition(**values) for name, values in facts["definitions"].items()}
            return Module(definitions, facts["imported"], facts["constants"])
    return None


def _definition(*, fields: Mapping[str, Any], **values: Any) -> Definition:
    declared = {name: Field(**field) for name, field in fields.items()}
    # JSON has lists in place of tuples.
    plain: dict[str, Any] = {name: tuple(value) if isinstance(value, list) else value for name, value in values.items()}
    return Definition(fields=declared, **plain)


def _to_cache(name: str, key: list[Any], module: Module) -> None:
    """Write the facts of a module. A process that reads meanwhile sees the earlier file or this one, no part of it."""
    body = json.dumps(dataclasses.asdict(module), separators=(",", ":"))
    _facts().write(name, f"{_head(key, body)}\n{body}".encode())


def _head(key: list[Any], body: str) -> str:
    """Return the first line of a cache file: what the facts were read from and by, and their digest."""
    return json.dumps([*key, hashlib.sha256(body.encode()).hexdigest()])


# --- names ---


def class_at(path: str) -> Definition | None:
    """Return the class or function at an import path; None if it is not found."""
    module, _, name = path.rpartition(".")
    return find(module, name) if module else None


def find(module: str, name: str) -> Definition | None:
    """Return the class or function that a name means in a module, following imports; None if it is not found.

    Reads no source of a class that was made while the program ran, such as by `make_dataclass`. If its module is
    imported already, the class itself is described.
    """
    origin, rest = _origin(module, name)
    source = read_module(origin)
    if source is not None and rest in source.definitions:
        return source.definitions[rest]
    return None if origin.partition(".")[0] in sys.stdlib_module_names else _living(origin, rest)


def _origin(module: str, name: str) -> tuple[str, str]:
    """Return the module that declares a name, and its name there, as far as imports can be followed."""
    for _ in range(10):  # re-exports, which can be circular
        source = read_module(module)
        first, dot, rest = name.partition(".")
        if source is None or first in source.definitions or first not in source.imported:
            break
        module, inner = source.imported[first]
        if dot and inner and read_module(f"{module}.{inner}") is not None:
            module, inner = f"{module}.{inner}", ""  # `from realign import settings`
        # What was imported is a package: the name goes on through its submodules, as far as they have files.
        while dot and not inner and "." in rest and read_module(f"{module}.{rest.partition('.')[0]}") is not None:
            inner, _, rest = rest.partition(".")
            module, inner = f"{module}.{inner}", ""
        name = ".".join(filter(None, (inner, rest)))
    return module, name


def _living(module: str, name: str) -> Definition | None:
    thing = getattr(sys.modules.get(module), name, None)
    if not inspect.isclass(thing) or thing.__module__ in ("builtins", "typing"):
        return None
    if thing.__module__ != module and read_module(thing.__module__) is not None:
        return find(thing.__module__, thing.__qualname__)
    fields: dict[str, Field] = {}
    own = [field for field in getattr(thing, "__dataclass_fields__", {}).values() if field.init]
    # The fields of base classes follow from `bases`, as for a class that is read from source.
    for declared in (field for field in own if field.name in inspect.get_annotations(thing)):
        annotation = declared.type if isinstance(declared.type, str) else inspect.formatannotation(declared.type)
        default = declared.default if declared.default_factory is dataclasses.MISSING else declared.default_factory()
        written = None if default is dataclasses.MISSING else repr(default)
        fields[declared.name] = Field(declared.name, annotation, written, "", module)
    bases = tuple(f"{base.__module__}.{base.__qualname__}" for base in thing.__bases__)
    methods = {name: _parameters(value) for name, value in vars(thing).items() if inspect.isroutine(value)}
    abstract = tuple(name for name in methods if getattr(vars(thing)[name], "__isabstractmethod__", False))
    text = "" if thing.__doc__ is None else inspect.cleandoc(thing.__doc__)
    decorated = dataclasses.is_dataclass(thing)
    algorithm = tuple(vars(thing).get(ALGORITHM_SETTINGS, ()))
    return Definition(module, thing.__name__, text, bases, fields, {}, methods, abstract, decorated, algorithm)


def _parameters(method: Any) -> str:
    with suppress(TypeError, ValueError):
        names = inspect.signature(getattr(method, "__func__", method)).parameters.values()
        return ", ".join(str(parameter.replace(annotation=parameter.empty)) for parameter in names)
    return "*args, **kwargs"


def ancestry(definition: Definition) -> list[Definition]:
    """Return a class and its base classes whose source is found, nearest first."""
    lineage: dict[str, Definition] = {}
    waiting = [definition]
    while waiting:
        nearest = waiting.pop(0)
        if nearest.path not in lineage:
            lineage[nearest.path] = nearest
            bases = (find(nearest.module, base) or class_at(base) for base in nearest.bases)
            waiting += [base for base in bases if base is not None]
    return list(lineage.values())


def fields_of(definition: Definition) -> dict[str, Field]:
    """Return the fields of a dataclass with those of its base classes, or the parameters of a function.

    A field without a text has that of the base class.
    """
    if definition.returns is not None:
        return {name: field for name, field in definition.fields.items() if name != SET_BY_RUN}
    fields: dict[str, Field] = {}
    for lower in reversed(ancestry(definition)):
        for name, own in lower.fields.items():
            text = own.text or (fields[name].text if name in fields else "")
            # As in Python: a class without the decorator adds no fields.
            if lower.dataclass:
                fields[name] = dataclasses.replace(own, text=text)
    return fields


def algorithm_settings(definition: Definition) -> list[str]:
    """Return the settings of an interface that `algorithm=NAME` resets."""
    return [name for ancestor in ancestry(definition) for name in ancestor.algorithm]


def docstring(definition: Definition) -> str:
    """Return the docstring of a class, or that of its nearest base class that has one."""
    return next((ancestor.text for ancestor in ancestry(definition) if ancestor.text), "")


def is_dataclass(definition: Definition | None) -> bool:
    """Return whether a class is a dataclass."""
    return definition is not None and any(ancestor.dataclass for ancestor in ancestry(definition))


def is_enum(definition: Definition) -> bool:
    """Return whether a class is an enum."""
    return any(base.rpartition(".")[2] in ENUMS for ancestor in ancestry(definition) for base in ancestor.bases)


def is_protocol(definition: Definition) -> bool:
    """Return whether a class is a protocol."""
    return "Protocol" in (base.rpartition(".")[2] for base in definition.bases)


def is_abstract(definition: Definition) -> bool:
    """Return whether a class has abstract methods that none of its base classes implements."""
    decided: set[str] = set()
    for ancestor in ancestry(definition):
        # A class attribute with a value implements an abstract property: `keys: ClassVar[...] = (...)`.
        given = {
            name for name, field in ancestor.fields.items() if field.default is not None
        } | ancestor.constants.keys()
        if not set(ancestor.abstract) <= decided | given:
            return True
        decided |= ancestor.methods.keys() | given
    return False


def takes_calls_of(definition: Definition, protocol: Definition) -> bool:
    """Return whether a class has the methods of a protocol, for as many arguments. Building compares their names."""
    methods: dict[str, str] = {}
    for base in reversed(ancestry(definition)):
        methods |= base.methods
    called = (name for name in protocol.methods if not name.startswith("_") or name == "__call__")
    return all(name in methods and _accepts(methods[name], protocol.methods[name]) for name in called)


def _accepts(written: str, wanted: str) -> bool:
    given, call = (_parsed(parameters).args for parameters in (written, wanted))
    required = len(given.args) - len(given.defaults)
    return required <= len(call.args) and (given.vararg is not None or len(call.args) <= len(given.args))


def _parsed(parameters: str) -> ast.FunctionDef:
    (function,) = ast.parse(f"def f({parameters}): ...").body
    assert isinstance(function, ast.FunctionDef)
    return function


def members_of(definition: Definition) -> dict[str, str]:
    """Return the members of an enum as written in a config, with their texts."""
    public = ((name, text) for name, text in definition.constants.items() if not name.startswith("_"))
    return {name.rstrip("_"): text for name, text in public}


# --- types and values ---


def types_of(annotation: str, module: str) -> tuple[Type, ...]:
    """Return the members of an annotation: one type, or those of a union."""
    return tuple(dict.fromkeys(_types(ast.parse(annotation or "Any", mode="eval").body, module)))


def _types(node: ast.expr, module: str) -> Iterator[Type]:
    if isinstance(node, ast.BinOp):
        yield from _types(node.left, module)
        yield from _types(node.right, module)
    elif isinstance(node, ast.Constant) and isinstance(node.value, str):
        yield from types_of(node.value, module)
    elif isinstance(node, ast.Subscript):
        outer = ast.unparse(node.value).rpartition(".")[2]
        inner = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
        if outer == "Annotated":
            limits = next((limit for extra in inner[1:] if (limit := _range(extra, module)) is not None), None)
            yield from (member._replace(range=limits or member.range) for member in _types(inner[0], module))
        elif outer == "Literal":
            yield Type(outer, literals=tuple(str(ast.literal_eval(value)) for value in inner))
        elif outer in ("Optional", "Union"):
            for member in inner:
                yield from _types(member, module)
            yield from [Type("None")] if outer == "Optional" else []
        else:
            arguments = tuple(tuple(_types(argument, module)) for argument in inner)
            (named, *_) = _named(ast.unparse(node.value), module)
            yield Type(outer, named.definition, arguments)
    else:
        yield from _named(ast.unparse(node), module)


def _named(name: str, module: str) -> tuple[Type, ...]:
    if (definition := find(module, name)) is not None:
        return (Type(definition.name, definition),)
    module, name = _origin(module, name)
    source = read_module(module)
    if source is not None and name in source.constants:
        return types_of(source.constants[name], module)
    return (Type(name.rpartition(".")[2]),)


def _range(node: ast.expr, module: str) -> Range | None:
    if isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2] == "Range":
        return Range(**{word.arg: value_of(ast.unparse(word.value), module) for word in node.keywords if word.arg})
    return None


def default_of(field: Field) -> Any:
    """Return the default of a field; `MISSING` if it must be set, and `Unknown` if only running the code tells."""
    value = MISSING if field.default is None else value_of(field.default, field.module)
    return MISSING if value == "???" else value  # OmegaConf's word for a value that must be set


def value_of(expression: str, module: str) -> Any:
    """Return the value of an expression of constants, enums and components; `Unknown` for other expressions."""
    try:
        return _value(ast.parse(expression, mode="eval").body, module)
    except (SyntaxError, ValueError, TypeError, ArithmeticError):
        return Unknown(expression)


def _value(node: ast.expr, module: str) -> Any:
    # Not `eval`: describing a default must neither run code of the module nor import what it names.
    match node:
        case ast.Constant(value=value):
            return value
        case ast.List(elts=items):
            return [_value(item, module) for item in items]
        case ast.Tuple(elts=items):
            return tuple(_value(item, module) for item in items)
        case ast.Dict(keys=keys, values=values):
            return {_value(k, module): _value(v, module) for k, v in zip(keys, values, strict=True) if k is not None}
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_value(operand, module)
        case ast.BinOp(left=left, op=op, right=right) if type(op) in OPERATORS:
            return OPERATORS[type(op)](_value(left, module), _value(right, module))
        case ast.Call():
            return _called(node, module)
        case ast.Name() | ast.Attribute():
            return _constant(ast.unparse(node), module)
    raise ValueError(ast.unparse(node))


def _called(node: ast.Call, module: str) -> Any:
    name = ast.unparse(node.func)
    arguments = [_value(argument, module) for argument in node.args]
    given = {word.arg: _value(word.value, module) for word in node.keywords if word.arg is not None}
    definition = find(module, name)
    if definition is not None and definition.returns is None:
        fields = fields_of(definition)
        given |= dict(zip(fields, arguments, strict=False))
        differing = {n: given[n] for n in fields if n in given and given[n] != default_of(fields[n])}
        return Component(definition, differing)
    # Harmless calls, which are made. All others stay `Unknown`.
    plain: Mapping[str, Callable[..., Any]] = {"dict": dict, "list": list, "tuple": tuple, "float": float}
    if name in plain:
        return plain[name](*arguments, **given)
    if name in ("Path", "MappingProxyType") and len(arguments) == 1:
        return arguments[0]
    raise ValueError(ast.unparse(node))


def _constant(name: str, module: str) -> Any:
    owner, dot, member = name.rpartition(".")
    if dot and (definition := find(module, owner)) is not None and is_enum(definition):
        return Member(definition.path, member)
    origin, inner = _origin(module, name)
    if (origin, inner) in (("math", "inf"), ("math", "pi")):
        return {"inf": float("inf"), "pi": 3.141592653589793}[inner]
    source = read_module(origin)
    if source is None or inner not in source.constants:
        raise ValueError(name)
    return _value(ast.parse(source.constants[inner], mode="eval").body, origin)
