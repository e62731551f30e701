"""Help for config keys: type, default, valid values and meaning, collected from the classes of the components.

`section` describes one key for the command line. `reference` describes every key of the schema and of the shipped
components, for the documentation.
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import pkgutil
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

from realign.config import words
from realign.config.errors import ConfigError, suggest, unknown_key
from realign.config.folders import list_experiments
from realign.config.places import ROOTS, Place, place_of
from realign.config.schema import COMPONENTS, REPORT, ExperimentConfig
from realign.config.source import class_at, described_names, fields_of, first_sentence, members_of
from realign.config.targets import PACKAGES, import_target, misfit
from realign.config.trees import MISSING, get
from realign.settings import Range, choices_of

FIRST = ("grpo", "ppo", "sft", "dpo", "reward_model")
"""Experiments in which a key is looked up first, if the command line names no experiment."""
DEPTH = 5
"""Levels of keys in which a single name is searched."""


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


@dataclass(frozen=True)
class Section:
    """A key and the keys below it."""

    key: str
    """Full key; empty for the root. In `reference`, the import path of the class."""
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
    if path and path[0] not in _root_fields():
        names = find_keys(path[-1]) if len(path) == 1 else []
        raise ConfigError(f"unknown key {key!r}{_meant(names) or suggest(path[0], _root_fields())}")
    if overrides:
        return _section(path, _raw(overrides, config_dir), _name_of(overrides))
    if not path or path[0] not in COMPONENTS:
        return _section(path, {}, None)
    first: ConfigError | None = None
    for name in dict.fromkeys([*FIRST, *list_experiments(config_dir)]):
        try:
            return _section(path, _raw([f"experiment={name}"], config_dir), name)
        except ConfigError as error:
            first = first or error
    assert first is not None
    raise first


def find_keys(name: str, most: int = 5) -> list[str]:
    """Return keys whose last name is `name`, in the first experiments that have one."""
    for experiment in FIRST:
        config = _raw([f"experiment={experiment}"], None)
        roots: list[tuple[str, ...]] = [
            (root, role) for root in COMPONENTS if ROOTS[root].per_role for role in config.get(root) or {}
        ]
        roots += [(root,) for root in COMPONENTS if not ROOTS[root].per_role]
        found = [key for path in roots for key in _keys_below(path, config, DEPTH) if key.rpartition(".")[2] == name]
        if found:
            return sorted(found, key=lambda key: key.count("."))[:most]
    return []


def reference() -> list[Section]:
    """Describe the root keys, and the fields of every shipped component, each class once.

    The sections of classes have the import path of the class as key, and names of fields as keys of their entries.
    """
    sections = [_section((), {}, None)]
    sections += [_section((name,), {}, None) for name in ("microbatch", "checkpoint")]
    return sections + [_class_section(cls) for cls in shipped_components()]


def shipped_components() -> list[type]:
    """Return the classes of realign that a config can select, directly or as a field of another component."""
    kinds = [import_target(root.kind, name) for name, root in ROOTS.items() if name != "graph"]
    found = {cls: None for cls in _defined_classes() if any(_is_choice(cls, kind) for kind in kinds)}
    waiting = list(found)
    while waiting:
        cls = waiting.pop()
        for hint in get_type_hints(cls).values() if dataclasses.is_dataclass(cls) else ():
            for inner in _component_classes(hint):
                if inner not in found:
                    found[inner] = None
                    waiting.append(inner)
    return sorted(found, key=words.import_path)


# --- the parts of a section ---


def _section(path: tuple[str, ...], config: Mapping[str, Any], experiment: str | None) -> Section:
    if not path:
        whole = tuple(_schema_entry(ExperimentConfig, name, name, config) for name in _root_fields())
        return Section("", "", _first_paragraph(ExperimentConfig), whole, None, experiment)
    if path[0] not in COMPONENTS:
        return _schema_section(path, config)
    own = _schema_entry(ExperimentConfig, path[0], path[0], config)
    if ROOTS[path[0]].per_role and len(path) == 1:
        roles = config.get(path[0]) or {}
        named = tuple(_role_entry((path[0], role), config) for role in roles)
        return Section(path[0], "", own.text, named, own, experiment)
    start = 2 if ROOTS[path[0]].per_role else 1
    _check_role(path, config)
    place, target = _walked(path[:start], config)
    entry: Entry | None = own if start == 1 else None
    for depth in range(start, len(path)):
        known = place.fields(target)
        if known is None or path[depth] not in known:
            raise ConfigError(unknown_key(".".join(path[: depth + 1]), known or ()))
        entry = _field_entry(place, target, path[depth], config)
        place, target = _stepped(place, target, path[: depth + 1], config)
    cls = place.chosen(target)
    names = place.fields(target) or {} if cls is not None else {}
    entries = tuple(_field_entry(place, target, name, config) for name in names if name != "interfaces")
    name = cls.__name__ if cls is not None and entries else ""
    # A key that also accepts text is described by its own text.
    alone = entry is not None and (not entries or "text" in entry.type.split(" | "))
    text = entry.text if entry is not None and alone else (_first_paragraph(cls) if cls is not None else "")
    return Section(".".join(path), name, text or own.text, entries, entry, experiment)


def _schema_section(path: tuple[str, ...], config: Mapping[str, Any]) -> Section:
    """Describe a root key that is no component, or a key below it."""
    cls: Any = ExperimentConfig
    entry: Entry | None = None
    for depth, name in enumerate(path):
        fields = _root_fields() if depth == 0 else _field_names(cls)
        if name not in fields:
            raise ConfigError(unknown_key(".".join(path[: depth + 1]), fields))
        entry = _schema_entry(cls, name, ".".join(path[: depth + 1]), config)
        cls = next(filter(dataclasses.is_dataclass, words.members(get_type_hints(cls)[name])), None)
    assert entry is not None
    if cls is None:
        return Section(entry.key, "", entry.text, (), entry)
    inner = tuple(_schema_entry(cls, name, f"{entry.key}.{name}", config) for name in _field_names(cls))
    return Section(entry.key, "", entry.text, inner, entry)


def _role_entry(path: tuple[str, str], config: Mapping[str, Any]) -> Entry:
    place, target = _walked(path, config)
    cls = place.chosen(target)
    name = "component" if cls is None else cls.__name__
    text = "" if cls is None else first_sentence(inspect.getdoc(cls) or "")
    return Entry(".".join(path), name, None, "", text, component=True)


def _walked(path: tuple[str, ...], config: Mapping[str, Any]) -> tuple[Place, Any]:
    """Return the place of a root component, and its `_target_`."""
    place = place_of(path)
    return place, _target_of(place, get(config, path))


def _stepped(place: Place, target: Any, path: tuple[str, ...], config: Mapping[str, Any]) -> tuple[Place, Any]:
    """Return the place of a field, and its `_target_`."""
    child = place.child(path[-1], target)
    return child, _target_of(child, get(config, path))


def _target_of(place: Place, node: Any) -> Any:
    if isinstance(node, Mapping):
        return node.get(words.TARGET)
    if words.is_word(node):
        try:
            return place.of_word(node)
        except ConfigError:
            return None
    return None


def _field_entry(place: Place, target: Any, name: str, config: Mapping[str, Any]) -> Entry:
    """Describe a field of the component at a place."""
    cls = place.chosen(target)
    child = place.child(name, target)
    default = child.declared[1]
    annotation = _hints(cls).get(name, Any)
    required = default is None and _is_required(cls, name) and not words.is_optional(annotation)
    given = get(config, tuple(child.key.split(".")), MISSING)
    return _entry(child.key, annotation, None if required else _shown(default), _text(cls, name), given)


def _schema_entry(cls: type, name: str, key: str, config: Mapping[str, Any]) -> Entry:
    """Describe a field of the schema. Its valid range is that of the same field of the run."""
    field = next(field for field in dataclasses.fields(cls) if field.name == name)
    default: Any = field.default
    if field.default_factory is not dataclasses.MISSING:
        default = field.default_factory()
    required = default is dataclasses.MISSING or default == "???"
    given = get(config, tuple(key.split(".")), MISSING)
    given = MISSING if given == default or isinstance(given, Mapping) else given
    annotation = get_type_hints(cls)[name]
    ranged = _ranged(cls).get(name, annotation)
    component = key in COMPONENTS or any(map(dataclasses.is_dataclass, words.members(annotation)))
    kind = ("mapping of names to components" if ROOTS[key].per_role else "component") if key in COMPONENTS else None
    shown = None if required else ("none" if component and default is None else _shown(default))
    entry = _entry(key, annotation if _range(ranged) == "" else ranged, shown, _text(cls, name), given)
    if kind is not None:
        return dataclasses.replace(entry, type=kind, component=True, default=shown if default else "none")
    if component:
        return dataclasses.replace(entry, component=True, type="settings", default="the settings below")
    return entry


def _class_section(cls: type) -> Section:
    hints = _hints(cls)
    entries = []
    for field in dataclasses.fields(cls) if dataclasses.is_dataclass(cls) else ():
        if not field.init or field.name.startswith("_"):
            continue
        required = _is_required(cls, field.name)
        default = field.default_factory() if field.default_factory is not dataclasses.MISSING else field.default
        shown = None if required else _shown(default)
        entries.append(_entry(field.name, hints[field.name], shown, _text(cls, field.name), MISSING))
    return Section(words.import_path(cls), cls.__name__, inspect.getdoc(cls) or "", tuple(entries))


def _entry(key: str, annotation: Any, default: str | None, text: str, given: Any) -> Entry:
    shown = None if given is MISSING or given == "???" or isinstance(given, Mapping) else _plain(given)
    if isinstance(given, Mapping) and words.TARGET in given:
        shown = words.snake_case(str(given[words.TARGET]).rpartition(".")[2])
    component = any(map(_is_component, words.members(annotation)))
    return Entry(key, type_text(annotation), default, _range(annotation), text, _choices(annotation), shown, component)


# --- types, ranges, defaults and texts ---


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


def _range(annotation: Any) -> str:
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


def _shown(value: Any) -> str:
    """Return a default as written in a config. A component is shown as its word and the fields that differ."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        changed = [
            f"{field.name}={_shown(mine)}"
            for field in dataclasses.fields(value)
            if field.init and (mine := vars(value).get(field.name)) != _default(field)
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
        return f"[{', '.join(map(_shown, value))}]"
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{key}: {_shown(item)}' for key, item in value.items())}}}"
    return '""' if value == "" else str(value)


def _default(field: dataclasses.Field[Any]) -> Any:
    return field.default_factory() if field.default_factory is not dataclasses.MISSING else field.default


def _text(cls: Any, name: str) -> str:
    """Return the text of a field of a dataclass, or of a parameter of a function."""
    if inspect.isclass(cls):
        for one in cls.__mro__:
            source = class_at(words.import_path(one))
            found = fields_of(source).get(name) if source is not None else None
            if found is not None and found.text:
                return found.text
        return ""
    return described_names(inspect.getdoc(cls) or "").get(name, "")


def _hints(cls: Any) -> dict[str, Any]:
    return get_type_hints(cls, include_extras=True)


def _ranged(cls: type) -> dict[str, Any]:
    """Return the annotations of the class of the run that a class of the schema mirrors."""
    from realign.api import MicroBatchSpec
    from realign.runtime import CheckpointSpec, Experiment

    mirrored = {"ExperimentConfig": Experiment, "MicroBatchConfig": MicroBatchSpec, "CheckpointConfig": CheckpointSpec}
    return _hints(mirrored[cls.__name__])


def _is_required(cls: Any, name: str) -> bool:
    if inspect.isclass(cls):
        field = next((field for field in dataclasses.fields(cls) if field.name == name), None)  # type: ignore[arg-type]
        missing = dataclasses.MISSING
        return field is not None and field.default is missing and field.default_factory is missing
    return inspect.signature(cls).parameters[name].default is inspect.Parameter.empty


def _first_paragraph(cls: Any) -> str:
    return " ".join((inspect.getdoc(cls) or "").split("\n\n")[0].split())


# --- classes and keys ---


def _root_fields() -> list[str]:
    return [name for name in _field_names(ExperimentConfig) if name not in REPORT]


def _field_names(cls: Any) -> list[str]:
    return [field.name for field in dataclasses.fields(cls)] if dataclasses.is_dataclass(cls) else []


def _is_component(member: Any) -> bool:
    if not inspect.isclass(member) or issubclass(member, Enum) or member in (type(None), Path):
        return False
    return dataclasses.is_dataclass(member) or bool(words.component_bases(member))


def _component_classes(hint: Any) -> Iterator[type]:
    """Yield the component classes that an annotation accepts, also inside of lists and mappings."""
    for member in words.members(hint):
        if get_origin(member) is not None:
            for argument in get_args(member):
                yield from _component_classes(argument)
        elif inspect.isclass(member) and member.__module__.startswith("realign.") and _is_component(member):
            found = [*words.component_bases(member), member]
            for base in found:
                yield from filter(dataclasses.is_dataclass, words.words_of(base).values())


def _defined_classes() -> Iterator[type]:
    """Yield the dataclasses that the modules of components define."""
    for package in PACKAGES:
        root = importlib.import_module(f"realign.{package}")
        for info in pkgutil.walk_packages(root.__path__, f"{root.__name__}."):
            if ".ray" in info.name:  # needs an extra, and has no components
                continue
            importlib.import_module(info.name)
    for name in sorted(name for name in sys.modules if name.startswith("realign.")):
        for cls in list(vars(sys.modules[name]).values()):
            if inspect.isclass(cls) and cls.__module__ == name and not cls.__name__.startswith("_"):
                yield cls


def _is_choice(cls: type, kind: Any) -> bool:
    ours = not cls.__module__.startswith(("realign.demo", "realign.testing"))
    fits = cls is kind or misfit(cls, kind) is None
    return ours and fits and dataclasses.is_dataclass(cls) and not inspect.isabstract(cls)


def _check_role(path: tuple[str, ...], config: Mapping[str, Any]) -> None:
    if not ROOTS[path[0]].per_role:
        return
    roles = config.get(path[0]) or {}
    if path[1] not in roles:
        have = f"the experiment has {path[0]}: {', '.join(roles) or 'none'}"
        raise ConfigError(f"unknown key '{path[0]}.{path[1]}': {have}")


def _keys_below(path: tuple[str, ...], config: Mapping[str, Any], depth: int) -> Iterator[str]:
    """Yield the keys below a component, to the given number of levels."""
    place, target = _walked(path, config)
    waiting: list[tuple[Place, Any, int]] = [(place, target, depth)]
    while waiting:
        place, target, left = waiting.pop()
        for name in place.fields(target) or ():
            child, below = _stepped(place, target, (*place.key.split("."), name), config)
            yield child.key
            if left > 1 and dataclasses.is_dataclass(child.chosen(below)):
                waiting.append((child, below, left - 1))


def _raw(overrides: Sequence[str], config_dir: Path | None) -> dict[str, Any]:
    from realign.config.composition import compose_raw

    return compose_raw(overrides, config_dir)


def _name_of(overrides: Iterable[str]) -> str | None:
    return next((word.partition("=")[2] for word in overrides if word.startswith("experiment=")), None)


def _meant(keys: Sequence[str]) -> str:
    return f"; did you mean {' or '.join(keys)}?" if keys else ""


__all__ = ["Choice", "Entry", "Section", "find_keys", "reference", "section", "shipped_components", "type_text"]
