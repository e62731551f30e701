"""`build`: construct the object of a config node with `_target_`, or raise a one-line error.

The target must be a class of the kind that the config key requires; it is never called before this check. Its arguments
are the fields of its dataclass, each converted to its annotation. So classes in a user's files need no registration.
"""

from __future__ import annotations

import dataclasses
import inspect
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple, TypeVar, get_type_hints

from realign.config.convert import Converter, is_plain_class, type_name
from realign.config.errors import ConfigError, one_line, unknown_key
from realign.config.places import ROOTS, Place, place_of
from realign.config.targets import Fits, beside, import_target, misfit, such_as
from realign.config.words import TARGET
from realign.errors import GraphError, NoEffectError, SettingsError
from realign.settings import AcceptsForeign, StandIn, default_of

INTERFACES = "interfaces"
"""Parameter of a graph function that receives the built interfaces. No config value can set it."""
T = TypeVar("T")


class _Parameter(NamedTuple):
    name: str
    annotation: Any
    default: Callable[[], Any] | None  # None: required


def build(node: Any, kind: Any, where: str) -> Any:
    """Import the class that `node` names, check it and its fields, and construct it.

    Args:
        node: `_target_` (import path of a dataclass) and values of its fields. Nested components are built too.
        kind: Required base class, or a Protocol whose methods the class must have with the same arguments. `Any`
            accepts every dataclass.
        where: Key of the node, for messages.

    Raises:
        ConfigError: the class or a field is invalid; names the full key, the value and the nearest valid choice.
    """

    def fits(found: Any) -> bool:
        if not inspect.isclass(found) or found is kind or inspect.isabstract(found):
            return False
        return dataclasses.is_dataclass(found) if kind is Any else misfit(found, kind) is None

    name = type_name(kind)
    cls = _target(node, where, f"a class that is {name}{such_as(name)}", fits)
    key = f"{where}.{TARGET}"
    if is_foreign(cls, kind):
        stand_in: type[StandIn] = import_target(kind.stand_in, key)
        given = {name: value for name, value in node.items() if name != TARGET}
        cls, node = stand_in, stand_in.fields_for(node[TARGET], given)
    if not inspect.isclass(cls):
        wrong = f"{node[TARGET]} is not a class; expected a class that is {name}"
        raise ConfigError(f"{key}: {wrong}{beside(node[TARGET], fits, name)}")
    if inspect.isabstract(cls) and kind in (cls, Any):
        raise ConfigError(f"{key}: {cls.__qualname__} is a base class{beside(node[TARGET], fits, name)}")
    if kind is not Any and (why := misfit(cls, kind)) is not None:
        raise ConfigError(f"{key}: {cls.__qualname__} is not a {name}{why}{beside(node[TARGET], fits, name)}")
    _check_constructible(cls, key)
    return fill(cls, {name: value for name, value in node.items() if name != TARGET}, where)


def is_foreign(cls: Any, kind: Any) -> bool:
    """Return whether `cls` is a class of another library that a component of this kind wraps."""
    accepts = inspect.isclass(kind) and issubclass(kind, AcceptsForeign)
    return accepts and inspect.isclass(cls) and not issubclass(cls, kind) and issubclass(cls, kind.foreign_base())


def build_graph(node: Any, returns: type[T], where: str, interfaces: Mapping[str, Any] | None = None) -> T:
    """Call the function that `node` names, if its return annotation is `returns`.

    Args:
        node: `_target_` (import path of the function) and values of its arguments.
        returns: Required return annotation of the function.
        where: Key of the node, for messages.
        interfaces: Built interfaces by role, for a function with a parameter `interfaces`.

    Raises:
        ConfigError: the target has another kind, or an argument is unknown, missing or of the wrong type.
    """

    def fits(found: Any) -> bool:
        with suppress(NameError):  # unresolvable annotation of a third-party function
            return inspect.isfunction(found) and get_type_hints(found).get("return") is returns
        return False

    name = type_name(returns)
    function = _target(node, where, f"a function annotated -> {name}{such_as(name)}", fits)
    if not fits(function):
        wrong = f"{node[TARGET]} is not a function annotated -> {name}; nothing was called"
        raise ConfigError(f"{where}.{TARGET}: {wrong}{beside(node[TARGET], fits, name)}")
    hints = _hints(function, where)
    parameters = [
        _Parameter(p.name, hints.get(p.name, Any), None if p.default is p.empty else lambda p=p: p.default)  # type: ignore[misc]
        for p in inspect.signature(function).parameters.values()
        if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)
    ]
    make = function
    if any(p.name == INTERFACES for p in parameters):
        make = partial(function, **{INTERFACES: {} if interfaces is None else interfaces})
        parameters = [p for p in parameters if p.name != INTERFACES]
    given = {name: value for name, value in node.items() if name != TARGET}
    return _construct(make, parameters, given, where)


def fill(cls: type[T], raw: Mapping[str, Any], where: str, base: T | None = None) -> T:
    """Construct a dataclass from plain values. Other fields have their defaults, or the values of `base`."""
    hints = _hints(cls, where)
    parameters = []
    for field in dataclasses.fields(cls) if dataclasses.is_dataclass(cls) else ():
        if field.init:
            parameters.append(_Parameter(field.name, hints[field.name], _default(field, base)))
    return _construct(cls, parameters, raw, where)


def _component(raw: Mapping[Any, Any], annotation: Any, where: str, default: Any) -> Any:
    """Return the component that a mapping describes; None if it is a plain mapping."""
    if TARGET in raw:
        return build(raw, annotation, where)
    fits = annotation is Any or (is_plain_class(annotation) and isinstance(default, annotation))
    if dataclasses.is_dataclass(default) and not isinstance(default, type) and fits:
        return fill(type(default), raw, where, default)
    if dataclasses.is_dataclass(annotation) and isinstance(annotation, type):
        return fill(annotation, raw, where)
    return None


convert = Converter(_component).convert


def _of_sibling(made: Any, key: str) -> str:
    """Return the message about an unknown key that other choices for the same component have; empty if none has."""
    name = key.rpartition(".")[2]
    bases = [base for base in made.__mro__[1:] if inspect.isabstract(base)] if inspect.isclass(made) else []
    having = {
        choice.__qualname__: None
        for base in bases
        for choice in _choices(base)
        if choice.__module__ == base.__module__ and name in getattr(choice, "__dataclass_fields__", {})
    }
    if not having:
        return ""
    return f"unknown key {key!r}: it is a setting of {' and '.join(having)}, not of {made.__qualname__}"


def unknown_keys(config: Mapping[str, Any], roots: Iterable[str] = ROOTS) -> list[str]:
    """Return a message for each key of the components that their classes do not have.

    Skips components whose class is unknown, such as one that cannot be imported; building them reports their keys. The
    class of an evaluation depends on the graph.

    Args:
        config: Values by root key.
        roots: Root keys to check.
    """
    found: list[str] = []
    for root in roots:
        node = config.get(root)
        if not isinstance(node, Mapping) or root.startswith("evaluation"):
            continue
        if ROOTS[root].per_role:
            for role, below in node.items():
                found += _unknown_below(place_of((root, str(role))), below)
        else:
            found += _unknown_below(place_of((root,)), node)
    return found


def _unknown_below(place: Place, node: Any) -> Iterator[str]:
    if not isinstance(node, Mapping):
        return
    target = node.get(TARGET)
    known = place.fields(target)
    if known is None:
        return
    for name, value in node.items():
        if name in known:
            yield from _unknown_below(place.child(name, target), value)
        elif name != TARGET:
            key = f"{place.key}.{name}"
            yield _of_sibling(place.chosen(target), key) or unknown_key(key, known)


def _choices(base: type) -> Iterator[type]:
    """Yield the classes derived from `base` that can be constructed."""
    derived: list[type] = base.__subclasses__()
    for cls in derived:
        if not inspect.isabstract(cls):
            yield cls
        yield from _choices(cls)


def _target(node: Any, where: str, expected: str, fits: Fits) -> Any:
    if not isinstance(node, Mapping):
        raise ConfigError(
            f"{where}: expected a component (a mapping with {TARGET}), found {node!r}; set its fields one by one, such "
            f"as {where}.FIELD=VALUE"
        )
    if TARGET not in node:
        raise ConfigError(f"{where}.{TARGET} is missing: give the import path of {expected}")
    return import_target(node[TARGET], f"{where}.{TARGET}", fits)


def _check_constructible(cls: type, where: str) -> None:
    """Raise an error if a class is not a dataclass, whose fields are its schema.

    A class without fields does not need the decorator.
    """
    fields = {name: hint for name, hint in inspect.get_annotations(cls).items() if "ClassVar" not in str(hint)}
    decorated = "__dataclass_fields__" in vars(cls)
    if fields and not decorated:
        raise ConfigError(f"{where}: {cls.__qualname__} declares {', '.join(fields)}, but is not a @dataclass")
    made = [(inspect.getattr_static(cls, name), getattr(object, name)) for name in ("__init__", "__new__")]
    if not dataclasses.is_dataclass(cls) and any(own is not plain for own, plain in made):
        raise ConfigError(f"{where}: {cls.__qualname__} is not a dataclass, so its fields cannot be checked")


def _hints(thing: Any, where: str) -> dict[str, Any]:
    try:
        return get_type_hints(thing)
    except NameError as error:
        raise ConfigError(
            f"{where}: cannot read the annotations of {thing.__qualname__}: {error}. Import the name outside "
            "TYPE_CHECKING."
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
            raise ConfigError(_of_sibling(make, f"{prefix}{name}") or unknown_key(f"{prefix}{name}", known))
    values = {}
    for p in parameters:
        default = p.default() if p.default is not None else None
        if p.name in raw:
            values[p.name] = convert(raw[p.name], p.annotation, prefix + p.name, default)
        elif p.default is None:
            kind = type_name(p.annotation)
            value = f"a component, that is {prefix}{p.name}.{TARGET}" if such_as(kind) else "a value"
            raise ConfigError(f"{prefix}{p.name} is missing: give it {value} ({kind}{such_as(kind, p.name)})")
        else:
            values[p.name] = default
    try:
        return _made(make, values, raw)
    except NoEffectError as error:
        raise NoEffectError(error.owner, f"{prefix}{error.key}", error.value, error.reason) from error
    except (SettingsError, GraphError) as error:
        raise ConfigError(located(where, one_line(error), known)) from error
    except ConfigError:
        raise
    except Exception as error:  # a bug in the constructor of a component: its traceback is printed
        error.add_note(f"while building {where or 'the config'}")
        raise


def _made(make: Callable[..., T], values: dict[str, Any], raw: Mapping[str, Any]) -> T:
    """Call `make`. Without effect, a default of the component around this one becomes that of the class itself."""
    while True:
        try:
            return make(**values)
        except NoEffectError as error:
            if error.owner is not make or error.key in raw:
                raise
            values[error.key] = default_of(error.owner, error.key)


def located(where: str, message: str, fields: Iterable[str]) -> str:
    """Prefix the message of a component with the full key of the field that it begins with, or of the component.

    Args:
        where: Key of the component; empty for the root.
        message: Message such as "eps must be positive", or "adv_norm.eps must be positive" for a component whose key
            ends in `adv_norm`.
        fields: Names of the component's fields.
    """
    if not where:
        return message
    path = (match[0] if (match := re.match(r"[\w.]+", message)) else "").split(".")
    if path[0] == where.rpartition(".")[2] and len(path) > 1:
        return where + message[len(path[0]) :]
    return f"{where}.{message}" if path[0] in fields else f"{where}: {message}"
