"""`build`: a config node with `_target_` becomes an object of the kind that its place asks for, or one clear line.

A target is imported, never called blindly: it must be a class of the kind asked for, and it gets exactly the fields of
its dataclass, each converted to its annotation. So a class in a user's own file works like ours, without registration.
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import pkgutil
from collections.abc import Callable, Iterable, Mapping
from types import ModuleType
from typing import Any, NamedTuple, TypeVar, get_type_hints

from realign.config.convert import convert, type_name
from realign.config.errors import ConfigError, one_line, suggest

TARGET = "_target_"
T = TypeVar("T")


class _Parameter(NamedTuple):
    name: str
    annotation: Any
    default: Callable[[], Any] | None  # None: must be given


def build(node: Any, kind: Any, where: str) -> Any:
    """Import the class that `node` names, check it and its fields, and construct it.

    Args:
        node: `_target_` (import path of a dataclass) and values of its fields; nested components are built too.
        kind: what the class must be: a base class, or a Protocol whose methods it must have with those arguments.
            `Any` takes every dataclass.
        where: the key of the node, for messages.

    Raises:
        ConfigError: names the full key, what was found and the nearest valid choice.
    """
    cls = _target(node, where, f"a class that is {type_name(kind)}")
    key = f"{where}.{TARGET}"
    if not inspect.isclass(cls):
        raise ConfigError(f"{key}: {node[TARGET]} is not a class; here stands a class that is {type_name(kind)}")
    _check_kind(cls, kind, key)
    _check_constructible(cls, key)
    return fill(cls, {name: value for name, value in node.items() if name != TARGET}, where)


def build_graph(node: Any, returns: type[T], where: str) -> T:
    """Call the function that `node` names, if its annotation says that it returns `returns`.

    Raises:
        ConfigError: another kind of target, an unknown, missing or ill-typed argument, or a ValueError of the function.
    """
    function = _target(node, where, f"a function annotated -> {type_name(returns)}")
    if not inspect.isfunction(function) or _hints(function, where).get("return") is not returns:
        raise ConfigError(
            f"{where}.{TARGET}: {node[TARGET]} is not a function annotated -> {type_name(returns)}; nothing was called"
        )
    hints = _hints(function, where)
    parameters = [
        _Parameter(p.name, hints.get(p.name, Any), None if p.default is p.empty else lambda p=p: p.default)  # type: ignore[misc]
        for p in inspect.signature(function).parameters.values()
        if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)
    ]
    given = {name: value for name, value in node.items() if name != TARGET}
    return _construct(function, parameters, given, where)


def fill(cls: type[T], raw: Mapping[str, Any], where: str, base: T | None = None) -> T:
    """Construct a dataclass from plain values, over its defaults or over the values of `base`."""
    hints = _hints(cls, where)
    parameters = []
    for field in dataclasses.fields(cls) if dataclasses.is_dataclass(cls) else ():
        if field.init:
            parameters.append(_Parameter(field.name, hints[field.name], _default(field, base)))
    return _construct(cls, parameters, raw, where)


def import_target(path: Any, where: str) -> Any:
    """The object at a dotted import path; the error names the nearest thing that exists.

    Raises:
        ConfigError: no such module or attribute, or the module cannot be imported.
    """
    if not isinstance(path, str) or not all(part.isidentifier() for part in path.split(".")):
        raise ConfigError(f"{where} must be an import path such as package.module.Class, found {path!r}")
    found: Any = None
    done = ""
    for part in path.split("."):
        name = f"{done}.{part}" if done else part
        step = getattr(found, part, None) if found is not None else None
        if step is None and (found is None or isinstance(found, ModuleType)):
            step = _import(name, where)
        if step is None:
            place = done or "the current directory and the installed packages"
            raise ConfigError(f"{where}: there is no {part!r} in {place}{suggest(part, _contents(found))}")
        found, done = step, name
    return found


def _target(node: Any, where: str, expected: str) -> Any:
    if not isinstance(node, Mapping):
        raise ConfigError(f"{where}: expected a component (a mapping with {TARGET}), found {node!r}")
    if TARGET not in node:
        raise ConfigError(f"{where}.{TARGET} is missing: give the import path of {expected}")
    return import_target(node[TARGET], f"{where}.{TARGET}")


def _import(name: str, where: str) -> ModuleType | None:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name == name:
            return None
        raise ConfigError(one_line(f"{where}: importing {name} failed: {error}")) from error
    except (ImportError, SyntaxError) as error:
        raise ConfigError(one_line(f"{where}: importing {name} failed: {error}")) from error


def _contents(found: Any) -> Iterable[str]:
    """Names that could have come next in an import path."""
    if found is None:
        return (module.name for module in pkgutil.iter_modules())
    own = getattr(found, "__all__", None) or [name for name in dir(found) if not name.startswith("_")]
    return [*own, *(module.name for module in pkgutil.iter_modules(getattr(found, "__path__", [])))]


def _check_kind(cls: type, kind: Any, where: str) -> None:
    if kind is Any:
        return
    if not getattr(kind, "_is_protocol", False):
        if not (inspect.isclass(kind) and issubclass(cls, kind)):
            raise ConfigError(f"{where}: {cls.__qualname__} is not a {type_name(kind)}")
        return
    for name, method in inspect.getmembers(kind, inspect.isfunction):
        if name.startswith("_") and name != "__call__":
            continue
        wanted = inspect.signature(method)
        positional = [p.name for p in wanted.parameters.values() if p.kind is p.POSITIONAL_OR_KEYWORD]
        keywords = {p.name: None for p in wanted.parameters.values() if p.kind is p.KEYWORD_ONLY}
        try:
            inspect.signature(getattr(cls, name)).bind(*positional, **keywords)
        except (AttributeError, TypeError):
            call = ", ".join([*positional[1:], *(f"{keyword}=" for keyword in keywords)])
            raise ConfigError(
                f"{where}: {cls.__qualname__} is not a {type_name(kind)}: it needs a method {name}({call})"
            ) from None


def _check_constructible(cls: type, where: str) -> None:
    """A component is a dataclass: its fields are its schema. A class without any field may do without the decorator."""
    fields = {name: hint for name, hint in inspect.get_annotations(cls).items() if "ClassVar" not in str(hint)}
    decorated = "__dataclass_fields__" in vars(cls)
    if fields and not decorated:
        raise ConfigError(f"{where}: {cls.__qualname__} declares {', '.join(fields)}, but is not a @dataclass")
    if not dataclasses.is_dataclass(cls) and inspect.getattr_static(cls, "__init__") is not object.__init__:
        raise ConfigError(f"{where}: {cls.__qualname__} is not a dataclass, so its fields cannot be checked")


def _hints(thing: Any, where: str) -> dict[str, Any]:
    try:
        return get_type_hints(thing)
    except NameError as error:
        raise ConfigError(
            f"{where}: the annotations of {thing.__qualname__} cannot be read: {error}; import it outside TYPE_CHECKING"
        ) from error


def _default(field: dataclasses.Field[Any], base: Any) -> Callable[[], Any] | None:
    if base is not None:
        return lambda: getattr(base, field.name)
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory
    if field.default is dataclasses.MISSING or field.default == "???":
        return None
    return lambda: field.default


def _construct(make: Callable[..., T], parameters: list[_Parameter], raw: Mapping[str, Any], where: str) -> T:
    prefix = f"{where}." if where else ""
    known = [p.name for p in parameters]
    for name in raw:
        if name not in known:
            raise ConfigError(f"unknown key '{prefix}{name}'{suggest(str(name), known)}")
    values = {}
    for p in parameters:
        default = p.default() if p.default is not None else None
        if p.name in raw:
            values[p.name] = convert(raw[p.name], p.annotation, prefix + p.name, default)
        elif p.default is None:
            raise ConfigError(f"{prefix}{p.name} is missing: give it a value ({type_name(p.annotation)})")
        else:
            values[p.name] = default
    try:
        return make(**values)
    except ConfigError:
        raise
    except ValueError as error:
        raise ConfigError(one_line(f"{where}: {error}" if where else error)) from error
