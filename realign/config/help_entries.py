"""Describe one config key from its annotation and class: type, default, valid values and meaning."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

from realign.config import words
from realign.config.component_classes import is_component
from realign.config.inspection import class_at, described_names, fields_of, first_sentence, members_of
from realign.config.trees import MISSING
from realign.settings import Range, choices_of


@dataclass(frozen=True)
class Choice:
    """A valid word of a key."""

    word: str
    """The word, as written in a config."""
    text: str
    """Meaning, in one line; empty if unknown."""


@dataclass(frozen=True)
class Entry:
    """A config key."""

    key: str
    """Full key. In a section of `reference`, the name of the field."""
    type: str
    """Type of the value."""
    default: str | None
    """Default as written in a config; None if the key must be set."""
    valid: str
    """Valid range of a number; empty if every value of the type is valid."""
    text: str
    """Meaning, with the unit."""
    choices: tuple[Choice, ...] = ()
    """Valid words; empty for other values."""
    given: str | None = None
    """Value that the experiment, its algorithm or the overrides set; None if they set none."""
    component: bool = False
    """Whether the value is a component, whose fields are keys below this one."""


def entry_of(key: str, annotation: Any, default: str | None, text: str, given: Any) -> Entry:
    """Describe a key from the annotation of its field.

    Args:
        key: Full key, or the name of a field.
        annotation: Annotation of the field.
        default: Default as written in a config; None if the key must be set.
        text: Meaning.
        given: Value in the config of a run; `MISSING` if there is none.
    """
    value = None if given is MISSING or given == "???" or isinstance(given, Mapping) else _plain(given)
    if isinstance(given, Mapping) and words.TARGET in given:
        value = words.snake_case(str(given[words.TARGET]).rpartition(".")[2])
    component = any(map(is_component, words.members(annotation)))
    return Entry(
        key, type_text(annotation), default, valid_range(annotation), text, _choices(annotation), value, component
    )


def type_text(annotation: Any) -> str:
    """Return an annotation in the terms of a config: `null` instead of None, and no module names."""
    members = words.members(annotation)
    if len(members) > 1:
        return " | ".join(dict.fromkeys(type_text(member) for member in members))
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return type_text(arguments[0])
    if annotation is type(None):
        return "null"
    if annotation is Any or annotation is object:
        return "any value"
    if origin is Literal:
        return " | ".join(map(str, arguments))
    if inspect.isclass(annotation) and issubclass(annotation, Enum):
        return "word"
    if origin is not None and arguments:
        outer = {"Mapping": "dict", "Sequence": "list", "Iterable": "list"}.get(origin.__name__, origin.__name__)
        return f"{outer}[{', '.join('...' if one is Ellipsis else type_text(one) for one in arguments)}]"
    name = annotation.__name__ if inspect.isclass(annotation) else str(annotation)
    return {"Path": "path", "str": "text", "NoneType": "null"}.get(name, name)


def valid_range(annotation: Any) -> str:
    """Return the range of an annotated number, such as `> 0`; empty if there is none."""
    found = [str(extra) for member in words.members(annotation) for extra in _extras(member)]
    return " or ".join(found)


def _extras(member: Any) -> Iterator[Range]:
    if get_origin(member) is Annotated:
        yield from (extra for extra in get_args(member)[1:] if isinstance(extra, Range))


def _choices(annotation: Any) -> tuple[Choice, ...]:
    found: list[Choice] = []
    for member in words.members(annotation):
        member = get_args(member)[0] if get_origin(member) is Annotated else member
        if inspect.isclass(member) and issubclass(member, Enum):
            source = class_at(words.import_path(member))
            texts = {} if source is None else members_of(source)
            found += [Choice(name, texts.get(name, "")) for name in choices_of(member)]
    for base in words.component_bases(_without_extras(annotation)):
        of_base = words.words_of(base)
        if len(of_base) > 1 or any(cls is not base for cls in of_base.values()):
            found += [Choice(word, first_sentence(inspect.getdoc(cls) or "")) for word, cls in of_base.items()]
    return tuple(found)


def _without_extras(annotation: Any) -> Any:
    members = [get_args(m)[0] if get_origin(m) is Annotated else m for m in words.members(annotation)]
    found = members[0]
    for member in members[1:]:
        found = found | member
    return found


def value_text(value: Any) -> str:
    """Return a default as written in a config. A component is written as its word and the fields that differ."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        changed = [
            f"{field.name}={value_text(mine)}"
            for field in dataclasses.fields(value)
            if field.init and (mine := vars(value).get(field.name)) != default_of(field)
        ]
        return words.snake_case(type(value).__name__) + (f"({', '.join(changed)})" if changed else "")
    return _plain(value)


def _plain(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, Enum):
        return value.name.rstrip("_")
    if isinstance(value, float):
        return f"{value:g}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(value_text, value))}]"
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{key}: {value_text(item)}' for key, item in value.items())}}}"
    return '""' if value == "" else str(value)


def default_of(field: dataclasses.Field[Any]) -> Any:
    """Return the default of a field of a dataclass; `dataclasses.MISSING` if it is required."""
    return field.default_factory() if field.default_factory is not dataclasses.MISSING else field.default


def field_text(cls: Any, name: str) -> str:
    """Return the text of a field of a dataclass, or of a parameter of a function."""
    if inspect.isclass(cls):
        for one in cls.__mro__:
            source = class_at(words.import_path(one))
            found = fields_of(source).get(name) if source is not None else None
            if found is not None and found.text:
                return found.text
        return ""
    return described_names(inspect.getdoc(cls) or "").get(name, "")


def hints_of(cls: Any) -> dict[str, Any]:
    """Return the annotations of a class or function, with their `Range`."""
    return get_type_hints(cls, include_extras=True)


def is_required(cls: Any, name: str) -> bool:
    """Return whether a field of a dataclass, or a parameter of a function, has no default."""
    if inspect.isclass(cls):
        field = next((field for field in dataclasses.fields(cls) if field.name == name), None)  # type: ignore[arg-type]
        return field is not None and default_of(field) is dataclasses.MISSING
    return inspect.signature(cls).parameters[name].default is inspect.Parameter.empty


def first_paragraph(cls: Any) -> str:
    """Return the first paragraph of a docstring, in one line; empty without a docstring."""
    return " ".join((inspect.getdoc(cls) or "").split("\n\n")[0].split())


__all__ = [
    "Choice",
    "Entry",
    "default_of",
    "entry_of",
    "field_text",
    "first_paragraph",
    "hints_of",
    "is_required",
    "type_text",
    "valid_range",
    "value_text",
]
