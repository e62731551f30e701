"""Help for config keys: type, default, valid values and meaning, and its text for `realign help [overrides] [KEY]`."""

from __future__ import annotations

import math
import re
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from realign.config.aliases import describe, index
from realign.config.classes import Class, Field, Type, first_paragraph, first_sentence
from realign.config.errors import ConfigError, suggest, unknown_key
from realign.config.experiment import REPORT
from realign.config.files import GROUPS, about_files, file_values, list_experiments
from realign.config.index import Find, class_at, indexed
from realign.config.keys import FIRST, component_at, component_paths, find_keys, step_into, suggest_keys
from realign.config.places import ROOTS, Place, place_of, schema
from realign.config.trees import MISSING, get
from realign.config.words import TARGET, choices, is_component, is_word, snake_case
from realign.run_settings import is_free

_OUTER: Mapping[str, str] = {"Mapping": "dict", "Sequence": "list", "Iterable": "list"}
_INDENT = "  "


@dataclass(frozen=True)
class Entry:
    """A config key."""

    key: str
    """Full key. In the section of a class, the name of the field."""
    type: str
    """Type of the value."""
    default: str | None
    """Default as written in a config; None if the key must be set."""
    valid: str
    """Valid range of a number; empty if every value of the type is valid."""
    text: str
    """Meaning, with the unit."""
    choices: Mapping[str, str] = field(default_factory=dict)
    """Valid words and their meaning; empty for other values."""
    given: str | None = None
    """Value that the experiment, its algorithm or the overrides set; None if they set none."""
    component: bool = False
    """Whether the value is a component, whose fields are keys below this one."""


@dataclass(frozen=True)
class Section:
    """A key and the keys below it."""

    key: str
    """Full key; empty for the root. Of a class, its import path."""
    name: str
    """Class of the component; empty if the key is none."""
    text: str
    """Docstring of the class, or the meaning of the key."""
    entries: tuple[Entry, ...] = ()
    """Keys directly below."""
    own: Entry | None = None
    """The key itself; None for the root, and for the keys of roles."""
    experiment: str | None = None
    """Experiment whose classes and values are described; None for keys that every experiment has."""


def section(key: str, overrides: Sequence[str] = (), config_dir: Path | None = None) -> Section:
    """Describe a key and the keys below it.

    Args:
        key: Full key, such as `interfaces.actor.kl`; empty for the root.
        overrides: Overrides of the command line, which select the experiment. Without any, the key is looked up in the
            shipped experiments.
        config_dir: As for `compose`.

    Raises:
        ConfigError: there is no such key.
    """
    path = tuple(filter(None, key.split(".")))
    if path and path[0] not in _root_keys():
        raise ConfigError(f"unknown key {key!r}{_suggest(suggest_keys(key)) or suggest(path[0], _root_keys())}")
    if overrides:
        from realign.config.composition import compose_raw  # imports Hydra, which checks the overrides

        return section_of(path, compose_raw(overrides, config_dir), _name_of(overrides))
    if not path or path[0] not in ROOTS:
        return section_of(path, {}, None)
    first: ConfigError | None = None
    for name in dict.fromkeys([*FIRST, *list_experiments(config_dir)]):
        try:
            # `file_values` needs no Hydra, so help does not wait for its import.
            return section_of(path, file_values([f"experiment={name}"], config_dir), name)
        except ConfigError as error:
            first = first or error  # of the most common experiment
    assert first is not None
    raise first


def _root_keys() -> list[str]:
    """Return the root keys of the config."""
    return [name for name in schema().fields if name not in REPORT]


def section_of(
    path: tuple[str, ...], config: Mapping[str, Any], experiment: str | None, find: Find = class_at
) -> Section:
    """Describe a key in a config.

    Args:
        path: Names of the key; none for the root.
        config: Values by root key.
        experiment: Name of the experiment that has these values.
        find: As for `Place`.

    Raises:
        ConfigError: there is no such key.
    """
    if not path:
        entries = tuple(_root_entry(name, config) for name in _root_keys())
        return Section("", "", first_paragraph(schema().text), entries, None, experiment)
    if path[0] not in _root_keys():
        raise ConfigError(unknown_key(path[0], _root_keys()))
    own, is_component = _root_entry(path[0], config), path[0] in ROOTS
    per_role = is_component and ROOTS[path[0]].per_role
    if per_role and len(path) == 1:
        roles = config.get(path[0]) or {}
        named = tuple(_role_entry((path[0], role), config, find) for role in roles)
        return Section(path[0], "", own.text, named, own, experiment)
    start = 2 if per_role else 1
    if per_role and path[1] not in (roles := config.get(path[0]) or {}):
        have = f"the experiment has {path[0]}: {', '.join(roles) or 'none'}"
        raise ConfigError(f"unknown key '{path[0]}.{path[1]}': {have}")
    place, target = component_at(path[:start], config, find)
    entry: Entry | None = own if start == 1 else None
    for depth in range(start, len(path)):
        known = place.fields(target)
        if known is None or path[depth] not in known:
            raise ConfigError(unknown_key(".".join(path[: depth + 1]), known or ()))
        entry = _field_entry(place, target, path[depth], config)
        place, target = step_into(place, target, path[depth], config)
    cls = place.class_of(target)
    entries = tuple(_field_entry(place, target, name, config) for name in (cls.fields if cls is not None else ()))
    name = cls.name if cls is not None and entries else ""
    # A key that also accepts text is described by its own text.
    alone = entry is not None and (not entries or "text" in entry.type.split(" | "))
    text = entry.text if entry is not None and alone else (first_paragraph(cls.text) if cls else "")
    return Section(".".join(path), name, text or own.text, entries, entry, experiment)


def _role_entry(path: tuple[str, str], config: Mapping[str, Any], find: Find) -> Entry:
    place, target = component_at(path, config, find)
    cls = place.class_of(target)
    name, text = ("component", "") if cls is None else (cls.name, first_sentence(cls.text))
    return Entry(".".join(path), name, None, "", text, component=True)


def _field_entry(place: Place, target: Any, name: str, config: Mapping[str, Any]) -> Entry:
    """Describe a field of the component at a place."""
    child = place.child(name, target)
    return _entry(child.key, child.field, config)


def _entry(key: str, field: Field, config: Mapping[str, Any]) -> Entry:
    given = get(config, tuple(key.split(".")), MISSING)
    return entry_of(key, field, MISSING if given == field.default and not field.required else given)


def _root_entry(name: str, config: Mapping[str, Any]) -> Entry:
    """Describe a root key."""
    entry = _entry(name, schema().fields[name], config)
    if name in ROOTS:
        kind = "mapping of names to components" if ROOTS[name].per_role else "component"
        return replace(entry, type=kind, component=True, default="none")
    return replace(entry, type="settings", default="the settings below") if entry.component else entry


def _name_of(overrides: Iterable[str]) -> str | None:
    return next((word.partition("=")[2] for word in overrides if word.startswith("experiment=")), None)


def _suggest(keys: Sequence[str]) -> str:
    return f"; did you mean {' or '.join(keys)}?" if keys else ""


# --- one key ---


def entries_of(cls: Class) -> tuple[Entry, ...]:
    """Describe the fields of a class, with their names as keys."""
    return tuple(entry_of(field.name, field) for field in cls.fields.values())


def entry_of(key: str, field: Field, given: Any = MISSING) -> Entry:
    """Describe a key from its field.

    Args:
        key: Full key, or the name of a field.
        field: The field.
        given: Value in the config of a run; `MISSING` if there is none.
    """
    value = None if given is MISSING or given == "???" or isinstance(given, Mapping) else _value_text(given)
    if isinstance(given, Mapping) and TARGET in given:
        value = snake_case(str(given[TARGET]).rpartition(".")[2])
    optional = "None" in [member.name for member in field.types]
    return Entry(
        key,
        _type_text(field.types),
        None if field.required and not optional else _value_text(field.default),
        " or ".join(member.range for member in field.types if member.range),
        field.text,
        choices(field.types),
        value,
        any(map(is_component, field.types)),
    )


def _type_text(types: tuple[Type, ...]) -> str:
    """Return an annotation in the terms of a config: `null` instead of None, and no module names."""
    return " | ".join(dict.fromkeys(map(_member_text, types)))


def _member_text(member: Type) -> str:
    if member.members is not None:
        return " | ".join(member.members) if member.name == "Literal" else "word"
    if member.arguments:
        outer = _OUTER.get(member.name, member.name)
        return f"{outer}[{', '.join(map(_type_text, member.arguments))}]"
    plain = {"None": "null", "Any": "any value", "object": "any value", "Path": "path", "str": "text"}
    return plain.get(member.name, member.name)


def _value_text(value: Any) -> str:
    """Return a default as written in a config. A component is written as its word and the fields that differ."""
    if isinstance(value, Mapping) and TARGET in value:
        changed = [f"{name}={_value_text(given)}" for name, given in value.items() if name != TARGET]
        return snake_case(value[TARGET].rpartition(".")[2]) + (f"({', '.join(changed)})" if changed else "")
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float):
        return f"{value:g}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_value_text, value))}]"
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{key}: {_value_text(item)}' for key, item in value.items())}}}"
    return '""' if value == "" else str(value)


# --- what a run changed ---


def changed_settings(config: Mapping[str, Any], command: Sequence[str]) -> list[str]:
    """Return the settings that affect training and differ from their defaults, as `key=value (default value)`.

    The numbers furthest from their default come first, by their ratio. Classes of a user are not imported.

    Args:
        config: The resolved config of a run.
        command: Words of its command line. Of the shipped files that it chooses, the values are the defaults.
    """
    words = [word for word in command if word.partition("=")[0] in GROUPS and word.partition("=")[2].isidentifier()]
    files: dict[str, Any] = {}
    with suppress(ConfigError):  # a file of the user, or of another version
        files = file_values(words)
    changes = list[tuple[float, str]]()
    for path in (*component_paths(config), *((name,) for name in _root_keys() if name not in ROOTS)):
        learning = not is_free(path[0]) and not path[0].startswith("evaluation") and path != ("seed",)
        if learning and (node := get(config, path)) is not None:
            changes += _changed(place_of(path, indexed), node, get(files, path, MISSING))
    return [text for _, text in sorted(changes, key=lambda item: -item[0])]


def _changed(place: Place, node: Any, usual: Any) -> Iterator[tuple[float, str]]:
    """Yield how far each setting of a node is from its default, with its text; `usual` is what files set."""
    field = place.field
    default = field.default if usual is MISSING else usual
    if isinstance(node, Mapping):
        below = {**_mapping(field.default), **_mapping(usual)}
        target = node.get(TARGET)
        cls, expected = place.class_of(target), place.class_of(below.get(TARGET))
        if cls != expected:
            below = {}
        if cls not in (None, expected) and not place.is_root:
            yield -1.0, f"{place.key}={snake_case(cls.name)} (default {_value_text(default)})"
        for name, value in node.items():
            if name != TARGET:
                yield from _changed(place.child(str(name), target), value, below.get(name, MISSING))
    # a value that must be set, or that follows from another one, has no default
    elif field.types and node != default and not _is_open(field, usual):
        yield _distance(node, default), f"{place.key}={_value_text(node)} (default {_value_text(default)})"


def _is_open(field: Field, usual: Any) -> bool:
    return field.required if usual is MISSING else usual == "???" or "${" in str(usual)


def _distance(value: Any, default: Any) -> float:
    """Return how far a value is from its default: by their ratio, 0 without one, and -1 for a value that is none."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return -1.0
    with suppress(ArithmeticError, TypeError, ValueError):
        return abs(math.log(value / default)) if value * default else math.inf
    return 0.0


def _mapping(node: Any) -> Mapping[str, Any]:
    """Return a component that may be given by its word, as a mapping; empty for another value."""
    return node if isinstance(node, Mapping) else {TARGET: node} if is_word(node) else {}


# --- the text of `realign help` ---


def key_help(words: Sequence[str], config_dir: Path | None = None, width: int = 100) -> str:
    """Return the help for the keys among `words`; the other words are overrides, which select the experiment.

    A key may also be a name of another tool, or the last name of keys such as `kl`: then the text names the full keys.
    A preset or an experiment is described by its file.

    Raises:
        ConfigError: a key does not exist, or an override is invalid.
    """
    overrides = [word for word in words if "=" in word or word.startswith("~")]
    keys = [word for word in words if word not in overrides] or [""]
    if bad := [key for key in keys if key.startswith("-")]:
        raise ConfigError(f"{bad[0]!r} is no config key. Write realign help KEY, such as interfaces.actor.kl.")
    return "\n\n".join("\n".join(_of_key(key.strip("."), overrides, config_dir, width)) for key in keys)


def _of_key(key: str, overrides: Sequence[str], config_dir: Path | None, width: int) -> Iterator[str]:
    if key and (key in index() or key.partition(".")[0] not in _root_keys()) and (rows := describe(key)):
        yield f"{key}  (a name of other tools)"
        for row in rows:
            yield from textwrap.wrap(row, width, initial_indent=_INDENT, subsequent_indent=_INDENT * 3)
        yield ""
        yield "`realign help KEY` describes one of these keys."
    elif key and "." not in key and key not in _root_keys() and (full := find_keys(key)):
        yield f"{key}  (the last name of a key)"
        yield from (f"{_INDENT}{full_key}" for full_key in full)
        yield ""
        yield f"`realign help {full[0]}` describes the first one."
    elif key and key not in _root_keys() and (files := [*about_files(key, config_dir)]):
        for about in files:
            yield from [*_of_file(about, width), ""]
        yield f"`realign help {' '.join(about[0] for about in files)} KEY` describes a key with these values."
    else:
        yield from _lines(section(key, overrides, config_dir), width)


def _of_file(about: tuple[str, list[str], str], width: int) -> Iterator[str]:
    override, header, settings = about
    yield override
    for paragraph in re.split(r"\n(?![a-z0-9(])", "\n".join(header)):  # a line that begins small continues one
        yield from textwrap.wrap(paragraph, width, initial_indent=_INDENT, subsequent_indent=_INDENT * 2)
    yield ""
    yield textwrap.indent(settings.rstrip(), _INDENT)


def settings_help(path: str, prefix: str, width: int) -> list[str]:
    """Return a line for each setting of a command, with its meaning below.

    Args:
        path: Import path of the class of the settings.
        prefix: First name of their keys, such as `report`.
        width: Number of columns.
    """
    settings = class_at(path)
    assert settings is not None
    lines: list[str] = []
    for entry in entries_of(settings):
        lines += ["", _INDENT + "   ".join([f"{prefix}.{entry.key}", *_short_facts(entry)])]
        lines += _wrap(entry.text, width, _INDENT * 3)
    return lines


def _lines(section: Section, width: int) -> Iterator[str]:
    about = [section.name] if section.name else []
    about += [f"experiment={section.experiment}"] if section.experiment else []
    yield (section.key or "Config keys") + (f"  ({', '.join(about)})" if about else "")
    if section.text:
        yield from _wrap(section.text, width, _INDENT)
    if section.own is not None:
        yield ""
        yield from _facts(section.own, width)
    for entry in section.entries:
        yield ""
        name = entry.key.removeprefix(f"{section.key}.")
        yield _INDENT + "   ".join([name, *_short_facts(entry)])
        yield from _wrap(entry.text, width, _INDENT * 3)
    yield ""
    yield from _wrap(_next_step(section), width, "")


def _facts(entry: Entry, width: int) -> Iterator[str]:
    """Yield type, default, range, value and choices of the key on the command line."""
    default = "none; the key must be set" if entry.default is None else entry.default
    rows = {"type": entry.type, "default": default, "valid": entry.valid, "set to": entry.given or ""}
    for name, value in rows.items():
        if value:
            yield f"{_INDENT}{name:<9}{value}"
    if entry.choices:
        yield f"{_INDENT}choices"
        longest = max(map(len, entry.choices))
        for word, text in entry.choices.items():
            head = f"{_INDENT * 2}{word:<{longest}}  "
            yield from textwrap.wrap(text, width, initial_indent=head, subsequent_indent=" " * len(head)) or [
                head.rstrip()
            ]


def _short_facts(entry: Entry) -> Iterator[str]:
    kind = entry.type
    if entry.choices:
        words = list(entry.choices)
        kind = " | ".join(words if len(words) <= 8 else [*words[:7], "..."])
        kind += " | null" if entry.type.endswith("| null") else ""
    yield f"{kind}, {entry.valid}" if entry.valid else kind
    if entry.default is None:
        if entry.given is None and not (entry.component and entry.key.count(".") == 1):
            yield "must be set"
    else:
        yield f"default {entry.default}"
    if entry.given is not None:
        yield f"set to {entry.given}"


def _next_step(section: Section) -> str:
    if not section.entries:
        return f"Set it with {section.key}=VALUE, or in a YAML file."
    below = next((entry.key for entry in section.entries if entry.component), None)
    more = f"`realign help {below}` describes the keys below one of them. " if below else ""
    other = "Add experiment=NAME for the classes and values of another experiment." if section.experiment else ""
    return f"{more}{other}".strip() or f"Set one with {section.entries[0].key}=VALUE, or in a YAML file."


def _wrap(text: str, width: int, indent: str) -> list[str]:
    return textwrap.wrap(text, width, initial_indent=indent, subsequent_indent=indent)
