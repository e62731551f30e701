"""`build`: construct the object of a config node with `_target_`, or raise a one-line error.

The target must be a class of the kind that the config key requires; it is never called before this check. Its arguments
are the fields of its dataclass, each converted to its annotation. So classes in a user's files need no registration.
"""

from __future__ import annotations

import collections.abc
import dataclasses
import difflib
import importlib
import inspect
import pkgutil
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import MISSING
from enum import Enum
from functools import cache, partial
from pathlib import Path
from types import MappingProxyType, ModuleType
from typing import Any, Literal, NamedTuple, TypeAlias, TypeVar, get_args, get_origin

from realign.config.classes import described, types_of
from realign.config.errors import ConfigError, how_to_disable, join_messages, list_names, one_line, suggest, unknown_key
from realign.config.words import (
    NONE,
    TARGET,
    choices,
    class_of_word,
    component_bases,
    is_word,
    of_sibling,
    words_of,
)
from realign.errors import GraphError, NoEffectError, SettingsError
from realign.settings import AcceptsForeign, StandIn, choices_of, default_of, hints_of, members_of

NEAR = 0.75
"""Minimum similarity (0 to 1) of two names to suggest one for the other."""
EXTRAS: Mapping[str, str] = MappingProxyType({"bitsandbytes": "realign-rl[quantization]"})
"""Extra of realign that installs an optional package with components."""
_EXAMPLE_TARGETS: Mapping[str, str] = MappingProxyType(
    {
        "ModelInterface": "realign.interfaces.grpo.GRPOActorInterface",
        "reward": "realign.interfaces.rule_reward.RuleRewardInterface",
        "ModelSpec": "realign.engines.TransformersModel",
        "DataSpec": "realign.data.PromptData",
        "DataflowGraph": "realign.interfaces.grpo.dataflow",
        "Evaluator": "realign.runtime.Evaluation",
        "TrackerSpec": "tensorboard",
    }
)
"""Example component of realign for each kind of component, or for each name of a role."""
_Fits: TypeAlias = Callable[[Any], bool]
"""Predicate for the objects that a config key accepts."""


def import_target(path: Any, where: str, known: Iterable[str] = (), fits: _Fits = callable) -> Any:
    """Import the object at a dotted path. Errors suggest the nearest existing object.

    Args:
        path: Import path of the object.
        where: Config key, for messages.
        known: Import paths of shipped objects that would fit, for messages.
        fits: Predicate for the objects of a module to suggest.

    Raises:
        ConfigError: the module or attribute does not exist, or the module lacks a package or has invalid syntax.
        Exception: any other exception that the module raises, with the key as a note.
    """
    if not isinstance(path, str) or not all(part.isidentifier() for part in path.split(".")):
        raise ConfigError(f"{where} must be an import path such as package.module.Class, found {path!r}")
    if path.split(".")[0] in sys.stdlib_module_names:
        raise ConfigError(
            f"{where}: {path} is part of Python's standard library, which has no components. Nothing was imported."
        )
    named: Any = None
    done = ""
    for part in path.split("."):
        name = f"{done}.{part}" if done else part
        # A submodule that nobody has imported yet is no attribute of its package.
        step = getattr(named, part, None) if named is not None else None
        if step is None and (named is None or isinstance(named, ModuleType)):
            step = _import(name, where)
        if step is None:
            if name in EXTRAS:
                raise ConfigError(f"{where}={path}: {name} is not installed. Run pip install {EXTRAS[name]!r}.")
            place = done or "the current directory and the installed packages"
            raise ConfigError(f"{where}: there is no {part!r} in {place}{_hint(path, part, named, known, fits)}")
        named, done = step, name
    return named


def _import(name: str, where: str) -> ModuleType | None:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name == name:  # else the module exists, and one that it imports does not
            return None
        raise ConfigError(f"{where}: importing {name} failed: {one_line(error)}") from error
    except SyntaxError as error:
        raise ConfigError(f"{where}: importing {name} failed: {one_line(error)}") from error
    except SystemExit as error:  # a script without `if __name__ == "__main__"`; no Exception would catch it
        raise ConfigError(f"{where}: importing {name} failed: the module calls sys.exit({error})") from error
    except Exception as error:  # a bug in the module: its traceback is printed
        error.add_note(f"while importing {name} for {where}")
        raise


def _list_accepted(module: ModuleType, fits: _Fits) -> list[str]:
    """Return the names of the accepted classes and functions that a module defines or lists in `__all__`."""
    offered = getattr(module, "__all__", ())
    return [
        name
        for name, value in vars(module).items()
        if not name.startswith("_")
        and (inspect.isclass(value) or inspect.isfunction(value))
        and (value.__module__ == module.__name__ or name in offered)
        and fits(value)
    ]


def beside(path: str, fits: _Fits, kind: str) -> str:
    """Return the end of a message about an object of the wrong kind: accepted objects of the same module.

    If the module has none, the message ends with an example from realign.

    Args:
        path: Import path of the object.
        fits: Predicate for the accepted objects.
        kind: Name of the required kind.
    """
    module = sys.modules.get(path.rpartition(".")[0])
    names = sorted(_list_accepted(module, fits)) if module is not None else []
    if module is not None and names:
        return f" ({', '.join(names)} of {module.__name__} would fit)"
    return _such_as(kind)


def _such_as(kind: str, where: str = "") -> str:
    """Return the end of a message about a required kind of component at the key `where`: an example from realign."""
    example = _EXAMPLE_TARGETS.get(where.rpartition(".")[2]) or _EXAMPLE_TARGETS.get(kind)
    return f", such as {example}" if example and kind in _EXAMPLE_TARGETS else ""


def _hint(path: str, part: str, owner: Any, known: Iterable[str], fits: _Fits) -> str:
    """Return the end of a message about an import path whose name `part` does not exist in `owner`."""
    if owner is None:
        names = [module.name for module in pkgutil.iter_modules()]
    elif isinstance(owner, ModuleType):
        modules = (module.name for module in pkgutil.iter_modules(getattr(owner, "__path__", [])))
        names = [*_list_accepted(owner, fits), *(name for name in modules if not name.startswith("_"))]
    else:
        names = [name for name in vars(owner) if not name.startswith("_")]
    here = difflib.get_close_matches(part, names, n=1, cutoff=NEAR)
    shipped = {name.rpartition(".")[2]: name for name in known}
    elsewhere = difflib.get_close_matches(path.rpartition(".")[2], shipped, n=1, cutoff=NEAR)
    if elsewhere and (not here or elsewhere[0] == part):
        return f"; did you mean {shipped[elsewhere[0]]}?"
    return suggest(part, names) if names else ""


@cache
def _abstract_members(cls: Any) -> tuple[str, ...]:
    """Return the names of the abstract members of a class."""
    members = inspect.getmembers_static(cls)
    return tuple(name for name, member in members if getattr(member, "__isabstractmethod__", False))


def misfit(cls: type, kind: Any) -> str | None:
    """Return why a class is not of the required kind, as the end of a message; None if it is."""
    if not getattr(kind, "_is_protocol", False):
        missing = _abstract_members(cls)
        if not (inspect.isclass(kind) and issubclass(cls, kind)):
            return ""
        return f": it does not implement {', '.join(missing)}" if missing else None
    # `issubclass` would compare only the names of a protocol's methods. One with other arguments would then fail in the
    # middle of a run, so the calls are compared too; here the names stand for the values.
    for name, method in inspect.getmembers(kind, inspect.isfunction):
        if name.startswith("_") and name != "__call__":
            continue
        wanted = inspect.signature(method)
        positional = [p.name for p in wanted.parameters.values() if p.kind is p.POSITIONAL_OR_KEYWORD]
        keywords = {p.name: None for p in wanted.parameters.values() if p.kind is p.KEYWORD_ONLY}
        try:
            inspect.signature(getattr(cls, name)).bind(*positional, **keywords)
        except (AttributeError, TypeError, ValueError):
            call = ", ".join([*positional[1:], *(f"{keyword}=" for keyword in keywords)])
            return f": it needs a method {name}({call})"
    return None


# --- values ---

_BOOLS: Mapping[str, bool] = MappingProxyType(
    dict.fromkeys(("true", "yes", "y", "on", "1"), True) | dict.fromkeys(("false", "no", "n", "off", "0"), False)
)
"""Texts of a bool."""
# pydantic's lax mode would take 1.0 and `true` for the integer 1, and refuse 1 as a text (ADR 40).
_LEAVES: Mapping[Any, tuple[Callable[[Any], Any], tuple[type, ...]]] = MappingProxyType(
    {
        bool: (lambda raw: _BOOLS[str(raw).lower()], (bool, int, str)),
        int: (int, (int, str)),
        float: (float, (float, int, str)),
        str: (lambda raw: raw if isinstance(raw, str) else str(raw), (str, int, float, Path)),
        Path: (Path, (str, Path)),
    }
)
"""How a value of YAML or a text becomes one of each type, and from which types. A bool is no number."""
_SCALES: Mapping[str, Mapping[str, float]] = MappingProxyType(
    {
        "s": {"ms": 0.001, "s": 1, "sec": 1, "m": 60, "min": 60, "h": 3600},
        "minutes": {"s": 1 / 60, "m": 1, "min": 1, "h": 60},
        "mb": {"m": 1, "mb": 1, "mib": 1, "g": 1024, "gb": 1024, "gib": 1024},
        "": {"k": 1e3, "m": 1e6, "%": 0.01},
    }
)
"""Factor of each unit suffix of a value, by the unit suffix of the key ("" for keys without one)."""
_LISTS = (list, tuple, collections.abc.Sequence, collections.abc.Iterable)
_MAPPINGS = (dict, collections.abc.Mapping)


def convert(raw: Any, annotation: Any, where: str, default: Any = None) -> Any:
    """Check and convert one value. Scalars follow OmegaConf's rules; enum members are selected by name.

    Args:
        raw: Scalar, list or mapping from YAML.
        annotation: Annotation of the field. A mapping with `_target_` is built as a component of this kind, and of
            any kind if the annotation is `Any`. `dict[str, Any]` and `list[Any]` accept plain values only.
        where: Key, for messages.
        default: Default of the field. If it is a dataclass, a mapping without `_target_` overrides its fields.

    Raises:
        ConfigError: the value is invalid; names the key, the value and the valid choices.
    """
    if raw == "???":
        raise ConfigError(f"{where} is missing: give it a value ({_type_name(annotation)})")
    origin, arguments = get_origin(annotation), get_args(annotation)
    members = [member.type for member in members_of(annotation)]
    # Words come before unions, since all members of a union share them: the class of a word decides which one is meant.
    if isinstance(raw, str) and annotation not in _LEAVES and component_bases(accepted := types_of(annotation)):
        if raw == NONE and type(None) in members:
            return None
        if raw.isidentifier() and (cls := class_of_word(raw, accepted, where)) is not None:
            raw = {TARGET: cls.path}
    if len(members) > 1:
        return _one_of(raw, members, where, default)
    if isinstance(raw, Mapping):
        component = _component(raw, annotation, where, default)
        if component is not None:
            return component
    if annotation is Any or annotation is object:
        return _plain(raw, where)
    if raw is None and annotation is not type(None):
        valid = list_names(words) if len(words := choices(types_of(annotation))) > 1 else ""
        raise ConfigError(f"{where} must not be null; expected {_type_name(annotation)}{valid}{how_to_disable(where)}")
    if origin is Literal:
        return _choice(raw, {str(a): a for a in arguments}, where)
    if inspect.isclass(annotation) and issubclass(annotation, Enum):
        if isinstance(raw, annotation):
            return raw
        return _choice(raw, choices_of(annotation), where, annotation.__doc__)
    if (origin or annotation) in _LISTS:
        return _list(raw, origin or annotation, arguments, where)
    if (origin or annotation) in _MAPPINGS and isinstance(raw, Mapping):
        kind = arguments[1] if arguments else Any
        return {key: _member(value, kind, f"{where}.{key}") for key, value in raw.items()}
    if annotation in _LEAVES:
        return _leaf(raw, annotation, where)
    if _is_plain_class(annotation) and isinstance(raw, annotation):
        return raw
    raise _wrong_type(raw, annotation, where)


def _one_of(raw: Any, members: list[Any], where: str, default: Any) -> Any:
    if raw is None and type(None) in members:
        return None
    members = [member for member in members if member is not type(None)]
    if len(members) == 1:
        return convert(raw, members[0], where, default)
    # Without this, `int | str` would make the integer 1 of the text "1": the first member that can convert it wins.
    if type(raw) in members:
        return raw
    if isinstance(raw, Mapping):  # fields of the first class, or `_target_` of a class that is the last one
        classes = [member for member in members if dataclasses.is_dataclass(member)]
        if classes:
            return convert(raw, classes[-1 if TARGET in raw else 0], where, default)
    lists = [member for member in members if (get_origin(member) or member) in _LISTS]
    if isinstance(raw, list) and len(lists) == 1:
        return convert(raw, lists[0], where, default)
    for member in members:
        try:
            return convert(raw, member, where, default)
        except ConfigError:
            continue
    expected = [
        " or ".join(choices_of(m) if inspect.isclass(m) and issubclass(m, Enum) else [_type_name(m)]) for m in members
    ]
    raise ConfigError(f"{where}: expected {' or '.join(expected)}, found {raw!r}")


def _member(raw: Any, annotation: Any, where: str) -> Any:
    return _values(raw, where) if annotation is Any else convert(raw, annotation, where)


def _plain(raw: Any, where: str) -> Any:
    """Return a value of a field without a specific annotation, with nested components built."""
    if isinstance(raw, Mapping):
        return {key: convert(value, Any, f"{where}.{key}") for key, value in raw.items()}
    if isinstance(raw, list):
        return [convert(value, Any, f"{where}[{i}]") for i, value in enumerate(raw)]
    return raw


def _list(raw: Any, kind: Any, arguments: tuple[Any, ...], where: str) -> Any:
    if not isinstance(raw, list | tuple):
        raise ConfigError(f"{where}: expected a list, found {raw!r}; write it in brackets, such as {where}=[{raw}]")
    fixed = kind is tuple and bool(arguments) and arguments[-1] is not Ellipsis
    if fixed and len(raw) != len(arguments):
        raise ConfigError(f"{where}: expected {len(arguments)} values, found {len(raw)}")
    kinds = arguments if fixed else (arguments[:1] or (Any,)) * len(raw)
    values = [_member(value, kinds[i], f"{where}[{i}]") for i, value in enumerate(raw)]
    return tuple(values) if kind is tuple else values


def _type_name(annotation: Any) -> str:
    """Return an annotation as written in source code."""
    if inspect.isclass(annotation) and not get_args(annotation):
        return annotation.__name__
    return str(annotation).replace("typing.", "").replace("NoneType", "None")


def _is_plain_class(annotation: Any) -> bool:
    """Return whether `isinstance` supports the annotation: a class that is not a protocol."""
    return inspect.isclass(annotation) and not getattr(annotation, "_is_protocol", False)


def _wrong_type(raw: Any, annotation: Any, where: str) -> ConfigError:
    """Return the error about a value of the wrong type, with a suggestion."""
    return ConfigError(f"{where}: expected {_type_name(annotation)}, found {raw!r}{_suggest(raw, annotation, where)}")


def _suggest(raw: Any, annotation: Any, where: str) -> str:
    """Return the suggestion at the end of a message about a value of the wrong type."""
    is_path = isinstance(raw, str) and "." in raw and all(part.isidentifier() for part in raw.split("."))
    if is_path and inspect.isclass(annotation) and annotation not in _LEAVES:
        return f"; to choose your own class, set {where}.{TARGET}={raw}"
    if annotation is bool:
        return "; give true or false"
    if annotation is str and isinstance(raw, bool):  # true, yes and on are the same to YAML
        return f"; for the text, quote the word: \"{where}='{str(raw).lower()}'\""
    if annotation in (int, float):
        return _suggest_number(raw, annotation, where)
    if dataclasses.is_dataclass(annotation):
        names = [field.name for field in dataclasses.fields(annotation) if field.init]
        return (
            f"; it has fields: set them one by one, such as {where}.{names[0]}=VALUE{list_names(names)}"
            if names
            else ""
        )
    if getattr(annotation, "_is_protocol", False) or inspect.isabstract(annotation):
        return f"; give a component, that is {where}._target_ and its fields"
    return ""


def _suggest_number(raw: Any, annotation: type, where: str) -> str:
    kind = "a whole number" if annotation is int else "a number"
    if raw == "":
        return f"; give {kind} directly after =, without a space"
    match = re.fullmatch(r"\s*([-+]?\d[\d_]*(?:\.\d*)?(?:e[-+]?\d+)?)\s*([a-z%]*)\s*", str(raw), re.IGNORECASE)
    if match is None:
        return f"; give {kind}"
    number, unit = float(match[1]), match[2].lower()
    scales = _SCALES.get(where.rpartition("_")[2], _SCALES[""])
    if unit and unit not in scales:
        return "; give the number alone, without a unit"
    number *= scales[unit] if unit else 1
    if annotation is int and not number.is_integer():
        return f"; give {kind}"
    return f"; did you mean {int(number) if number.is_integer() else round(number, 9)}?"


def _values(raw: Any, where: str) -> Any:
    """Return plain values; raise an error if they contain a component."""
    if isinstance(raw, Mapping):
        if TARGET in raw:
            raise ConfigError(f"{where}: expected plain values, found a component: {raw!r}")
        return {key: _values(value, f"{where}.{key}") for key, value in raw.items()}
    return [_values(value, f"{where}[{i}]") for i, value in enumerate(raw)] if isinstance(raw, list) else raw


def _choice(raw: Any, choices: Mapping[str, Any], where: str, purpose: str | None = None) -> Any:
    name = raw.name if isinstance(raw, Enum) else str(raw)
    if name not in choices:
        why = f": {one_line(purpose).split('. ')[0].rstrip('.')}" if purpose else ""
        if isinstance(raw, list):
            raise ConfigError(f"{where} takes one choice, found {raw}{list_names(sorted(choices))}{why}")
        raise ConfigError(f"{where}: unknown choice {name!r}{suggest(name, choices)}{why}")
    return choices[name]


def _leaf(raw: Any, annotation: Any, where: str) -> Any:
    read, accepted = _LEAVES[annotation]
    if isinstance(raw, accepted) and (bool in accepted or not isinstance(raw, bool)):
        with suppress(ValueError, KeyError, OverflowError):
            value = read(raw)
            if value == value:  # not NaN
                return value
    raise _wrong_type(raw, annotation, where)


INTERFACES = "interfaces"
"""Parameter of a graph function that receives the built interfaces. No config value can set it."""
T = TypeVar("T")


class _Parameter(NamedTuple):
    name: str
    annotation: Any
    default: Any  # MISSING: required


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

    def fits(cls: Any) -> bool:
        if not inspect.isclass(cls) or cls is kind or inspect.isabstract(cls):
            return False
        return dataclasses.is_dataclass(cls) if kind is Any else misfit(cls, kind) is None

    name = _type_name(kind)
    node = with_import_path(node, kind, where)
    cls = _target(node, where, f"a class that is {name}{_such_as(name)}", _iter_shipped(kind), fits)
    key = f"{where}.{TARGET}"
    if _is_foreign(cls, kind):
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


def _iter_shipped(kind: Any) -> Iterator[str]:
    """Yield the import paths of the shipped components of a kind. Nothing is read until a message needs one."""
    for base in component_bases(types_of(kind)):
        yield from (cls.path for classes in words_of(base).values() for cls in classes)


def with_import_path(node: Any, kind: Any, where: str) -> Any:
    """Return a node whose `_target_` is a word with the import path of the class; others stay as they are."""
    word = node.get(TARGET) if isinstance(node, Mapping) else None
    if not is_word(word) or not word.islower():  # a name such as Gspo is a class without its module
        return node
    cls = class_of_word(word, types_of(kind), where)
    return node if cls is None else {**node, TARGET: cls.path}


def _is_foreign(cls: Any, kind: Any) -> bool:
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

    def fits(function: Any) -> bool:
        # All annotations are evaluated, also those that nobody needs here.
        with suppress(NameError):  # unresolvable annotation of a third-party function
            return inspect.isfunction(function) and hints_of(function).get("return") is returns
        return False

    name = _type_name(returns)
    function = _target(node, where, f"a function annotated -> {name}{_such_as(name)}", (), fits)
    if not fits(function):
        wrong = f"{node[TARGET]} is not a function annotated -> {name}; nothing was called"
        raise ConfigError(f"{where}.{TARGET}: {wrong}{beside(node[TARGET], fits, name)}")
    hints = _hints(function, where)
    parameters = [
        _Parameter(p.name, hints.get(p.name, Any), MISSING if p.default is p.empty else p.default)
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
            default = default_of(cls, field.name) if base is None else getattr(base, field.name)
            required = base is None and isinstance(default, str) and default == "???"
            parameters.append(_Parameter(field.name, hints[field.name], MISSING if required else default))
    return _construct(cls, parameters, raw, where)


def _component(raw: Mapping[Any, Any], annotation: Any, where: str, default: Any) -> Any:
    """Return the component that a mapping describes; None if it is a plain mapping."""
    if TARGET in raw:
        return build(raw, annotation, where)
    fits = annotation is Any or (_is_plain_class(annotation) and isinstance(default, annotation))
    if dataclasses.is_dataclass(default) and not isinstance(default, type) and fits:
        return fill(type(default), raw, where, default)
    if dataclasses.is_dataclass(annotation) and isinstance(annotation, type) and not inspect.isabstract(annotation):
        return fill(annotation, raw, where)
    return None


def _target(node: Any, where: str, expected: str, known: Iterable[str], fits: _Fits) -> Any:
    if not isinstance(node, Mapping):
        raise ConfigError(
            f"{where}: expected a component (a mapping with {TARGET}), found {node!r}; set its fields one by one, such "
            f"as {where}.FIELD=VALUE"
        )
    if TARGET not in node:
        raise ConfigError(f"{where}.{TARGET} is missing: give the import path of {expected}")
    return import_target(node[TARGET], f"{where}.{TARGET}", known, fits)


def _check_constructible(cls: type, where: str) -> None:
    """Raise an error if a class is not a dataclass, whose fields are its schema.

    A class without fields does not need the decorator.
    """
    fields = {name: hint for name, hint in inspect.get_annotations(cls).items() if "ClassVar" not in str(hint)}
    # `is_dataclass` is also true of a class that only inherits from a dataclass, whose own fields would be ignored.
    decorated = "__dataclass_fields__" in vars(cls)
    if fields and not decorated:
        raise ConfigError(f"{where}: {cls.__qualname__} declares {', '.join(fields)}, but is not a @dataclass")
    constructors = [(inspect.getattr_static(cls, name), getattr(object, name)) for name in ("__init__", "__new__")]
    if not dataclasses.is_dataclass(cls) and any(own is not plain for own, plain in constructors):
        raise ConfigError(f"{where}: {cls.__qualname__} is not a dataclass, so its fields cannot be checked")


def _hints(thing: Any, where: str) -> Mapping[str, Any]:
    try:
        return hints_of(thing)
    except NameError as error:
        raise ConfigError(
            f"{where}: cannot read the annotations of {thing.__qualname__}: {error}. Import the name outside "
            "TYPE_CHECKING."
        ) from error


def _construct(make: Callable[..., T], parameters: list[_Parameter], raw: Mapping[str, Any], where: str) -> T:
    prefix = f"{where}." if where else ""
    known = [p.name for p in parameters]
    unknown = [f"{prefix}{name}" for name in raw if name not in known]
    if unknown:
        cls = described(make)
        raise ConfigError(join_messages((cls and of_sibling(cls, key)) or unknown_key(key, known) for key in unknown))
    values = {}
    for p in parameters:
        if p.name in raw:
            # A mapping without `_target_` changes fields of the default.
            default = None if p.default is MISSING else p.default
            values[p.name] = convert(raw[p.name], p.annotation, prefix + p.name, default)
        elif p.default is MISSING:
            kind = _type_name(p.annotation)
            value = f"a component, that is {prefix}{p.name}.{TARGET}" if _such_as(kind) else "a value"
            raise ConfigError(f"{prefix}{p.name} is missing: give it {value} ({kind}{_such_as(kind, p.name)})")
        else:
            values[p.name] = p.default
    try:
        # The order of the handlers matters: each class of errors is a subclass of the next one.
        return _make(make, values, raw)
    except NoEffectError as error:
        raise NoEffectError(error.owner, f"{prefix}{error.key}", error.value, error.reason) from error
    except (SettingsError, GraphError) as error:
        raise ConfigError(_prefix_key(where, one_line(error), known)) from error
    except ConfigError:
        raise
    except Exception as error:  # a bug in the constructor of a component: its traceback is printed
        error.add_note(f"while building {where or 'the config'}")
        raise


def _make(make: Callable[..., T], values: dict[str, Any], raw: Mapping[str, Any]) -> T:
    """Call `make`. Without effect, a default of the component around this one becomes that of the class itself."""
    while True:
        try:
            return make(**values)
        except NoEffectError as error:
            if error.owner is not make or error.key in raw:
                raise
            values[error.key] = default_of(error.owner, error.key)


def _prefix_key(where: str, message: str, fields: Iterable[str]) -> str:
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
