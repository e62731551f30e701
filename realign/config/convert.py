"""`Converter`: convert a plain YAML value to the annotation of a field, or raise a one-line error."""

from __future__ import annotations

import collections.abc
import dataclasses
import inspect
import math
import re
import types
from collections.abc import Callable, Mapping
from enum import Enum
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin

from omegaconf import BooleanNode, FloatNode, IntegerNode, PathNode, StringNode
from omegaconf.errors import ValidationError

from realign.config import words
from realign.config.errors import ConfigError, listed, one_line, suggest, switched_off
from realign.settings import choices_of

LEAVES: Mapping[Any, Callable[..., Any]] = types.MappingProxyType(
    {bool: BooleanNode, int: IntegerNode, float: FloatNode, str: StringNode, Path: PathNode}
)
SCALES: Mapping[str, Mapping[str, float]] = types.MappingProxyType(
    {
        "s": {"ms": 0.001, "s": 1, "sec": 1, "m": 60, "min": 60, "h": 3600},
        "minutes": {"s": 1 / 60, "m": 1, "min": 1, "h": 60},
        "mb": {"m": 1, "mb": 1, "mib": 1, "g": 1024, "gb": 1024, "gib": 1024},
        "": {"k": 1e3, "m": 1e6, "%": 0.01},
    }
)
"""Factor of each unit suffix of a value, by the unit suffix of the key ("" for keys without one)."""
LISTS = (list, tuple, collections.abc.Sequence, collections.abc.Iterable)
MAPPINGS = (dict, collections.abc.Mapping)


class Converter:
    """Converts config values to the annotations of fields.

    Args:
        component: Function that constructs the component that a mapping describes, from the mapping, the annotation,
            the key and the default of the field. It returns None for a plain mapping.
    """

    def __init__(self, component: Callable[[Mapping[Any, Any], Any, str, Any], Any]) -> None:
        self._component = component

    def convert(self, raw: Any, annotation: Any, where: str, default: Any = None) -> Any:
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
            raise ConfigError(f"{where} is missing: give it a value ({type_name(annotation)})")
        if isinstance(raw, str) and annotation not in LEAVES and words.component_bases(annotation):
            if raw == words.NONE and words.is_optional(annotation):
                return None
            if raw.isidentifier() and (cls := words.class_of_word(raw, annotation, where)) is not None:
                raw = {words.TARGET: words.import_path(cls)}
        origin, arguments = get_origin(annotation), get_args(annotation)
        if origin in (Union, types.UnionType):
            return self._one_of(raw, arguments, where, default)
        if isinstance(raw, Mapping):
            made = self._component(raw, annotation, where, default)
            if made is not None:
                return made
        if annotation is Any or annotation is object:
            return self._plain(raw, where)
        if raw is None and annotation is not type(None):
            valid = listed(found) if len(found := words.choices(annotation)) > 1 else ""
            raise ConfigError(f"{where} must not be null; expected {type_name(annotation)}{valid}{switched_off(where)}")
        if origin is Literal:
            return _choice(raw, {str(a): a for a in arguments}, where)
        if inspect.isclass(annotation) and issubclass(annotation, Enum):
            if isinstance(raw, annotation):
                return raw
            return _choice(raw, choices_of(annotation), where, annotation.__doc__)
        if (origin or annotation) in LISTS:
            return self._list(raw, origin or annotation, arguments, where)
        if (origin or annotation) in MAPPINGS and isinstance(raw, Mapping):
            kind = arguments[1] if arguments else Any
            return {key: self._member(value, kind, f"{where}.{key}") for key, value in raw.items()}
        if annotation in LEAVES:
            return _leaf(raw, annotation, where)
        if is_plain_class(annotation) and isinstance(raw, annotation):
            return raw
        raise wrong_type(raw, annotation, where)

    def _one_of(self, raw: Any, members: tuple[Any, ...], where: str, default: Any) -> Any:
        if raw is None and type(None) in members:
            return None
        members = tuple(m for m in members if m is not type(None))
        if len(members) == 1:
            return self.convert(raw, members[0], where, default)
        if type(raw) in members:
            return raw
        if isinstance(raw, Mapping):  # fields of the first class, or `_target_` of a class that is the last one
            classes = [member for member in members if dataclasses.is_dataclass(member)]
            if classes:
                return self.convert(raw, classes[-1 if words.TARGET in raw else 0], where, default)
        lists = [member for member in members if (get_origin(member) or member) in LISTS]
        if isinstance(raw, list) and len(lists) == 1:
            return self.convert(raw, lists[0], where, default)
        for member in members:
            try:
                return self.convert(raw, member, where, default)
            except ConfigError:
                continue
        raise ConfigError(f"{where}: expected {' or '.join(map(type_name, members))}, found {raw!r}")

    def _member(self, raw: Any, annotation: Any, where: str) -> Any:
        return _values(raw, where) if annotation is Any else self.convert(raw, annotation, where)

    def _plain(self, raw: Any, where: str) -> Any:
        """Return a value of a field without a specific annotation, with nested components built."""
        if isinstance(raw, Mapping):
            return {key: self.convert(value, Any, f"{where}.{key}") for key, value in raw.items()}
        if isinstance(raw, list):
            return [self.convert(value, Any, f"{where}[{i}]") for i, value in enumerate(raw)]
        return raw

    def _list(self, raw: Any, kind: Any, arguments: tuple[Any, ...], where: str) -> Any:
        if not isinstance(raw, list | tuple):
            raise ConfigError(f"{where}: expected a list, found {raw!r}; write it in brackets, such as {where}=[{raw}]")
        fixed = kind is tuple and bool(arguments) and arguments[-1] is not Ellipsis
        if fixed and len(raw) != len(arguments):
            raise ConfigError(f"{where}: expected {len(arguments)} values, found {len(raw)}")
        kinds = arguments if fixed else (arguments[:1] or (Any,)) * len(raw)
        values = [self._member(value, kinds[i], f"{where}[{i}]") for i, value in enumerate(raw)]
        return tuple(values) if kind is tuple else values


def type_name(annotation: Any) -> str:
    """Return an annotation as written in source code."""
    if inspect.isclass(annotation) and not get_args(annotation):
        return annotation.__name__
    return str(annotation).replace("typing.", "").replace("NoneType", "None")


def is_plain_class(annotation: Any) -> bool:
    """Return whether `isinstance` supports the annotation: a class that is not a protocol."""
    return inspect.isclass(annotation) and not getattr(annotation, "_is_protocol", False)


def wrong_type(raw: Any, annotation: Any, where: str) -> ConfigError:
    """Return the error about a value of the wrong type, with a suggestion."""
    return ConfigError(f"{where}: expected {type_name(annotation)}, found {raw!r}{_meant(raw, annotation, where)}")


def _meant(raw: Any, annotation: Any, where: str) -> str:
    """Return the suggestion at the end of a message about a value of the wrong type."""
    if words.is_import_path(raw) and inspect.isclass(annotation) and annotation not in LEAVES:
        return f"; to choose your own class, set {where}.{words.TARGET}={raw}"
    if annotation is bool:
        return "; give true or false"
    if annotation in (int, float):
        return _meant_number(raw, annotation, where)
    if dataclasses.is_dataclass(annotation):
        names = [field.name for field in dataclasses.fields(annotation) if field.init]
        return f"; it has fields: set them one by one, such as {where}.{names[0]}=VALUE{listed(names)}" if names else ""
    if getattr(annotation, "_is_protocol", False) or inspect.isabstract(annotation):
        return f"; give a component, that is {where}._target_ and its fields"
    return ""


def _meant_number(raw: Any, annotation: type, where: str) -> str:
    kind = "a whole number" if annotation is int else "a number"
    if raw == "":
        return f"; give {kind} directly after =, without a space"
    match = re.fullmatch(r"\s*([-+]?\d[\d_]*(?:\.\d*)?(?:e[-+]?\d+)?)\s*([a-z%]*)\s*", str(raw), re.IGNORECASE)
    if match is None:
        return f"; give {kind}"
    number, unit = float(match[1]), match[2].lower()
    scales = SCALES.get(where.rpartition("_")[2], SCALES[""])
    if unit and unit not in scales:
        return "; give the number alone, without a unit"
    number *= scales[unit] if unit else 1
    if annotation is int and not number.is_integer():
        return f"; give {kind}"
    return f"; did you mean {int(number) if number.is_integer() else round(number, 9)}?"


def _values(raw: Any, where: str) -> Any:
    """Return plain values; raise an error if they contain a component."""
    if isinstance(raw, Mapping):
        if "_target_" in raw:
            raise ConfigError(f"{where}: expected plain values, found a component: {raw!r}")
        return {key: _values(value, f"{where}.{key}") for key, value in raw.items()}
    return [_values(value, f"{where}[{i}]") for i, value in enumerate(raw)] if isinstance(raw, list) else raw


def _choice(raw: Any, choices: Mapping[str, Any], where: str, purpose: str | None = None) -> Any:
    name = raw.name if isinstance(raw, Enum) else str(raw)
    if name not in choices:
        why = f": {one_line(purpose).split('. ')[0].rstrip('.')}" if purpose else ""
        if isinstance(raw, list):
            raise ConfigError(f"{where} takes one choice, found {raw}{listed(sorted(choices))}{why}")
        raise ConfigError(f"{where}: unknown choice {name!r}{suggest(name, choices)}{why}")
    return choices[name]


def _leaf(raw: Any, annotation: Any, where: str) -> Any:
    try:
        value = LEAVES[annotation](value=raw)._value()
    except ValidationError:
        raise wrong_type(raw, annotation, where) from None
    odd = annotation is bool and isinstance(raw, int | float) and raw not in (0, 1)
    if odd or (isinstance(value, float) and math.isnan(value)):
        raise wrong_type(raw, annotation, where)
    return value
