"""Help for config keys: type, default, valid values and meaning, collected from the classes of the components."""

from __future__ import annotations

import ast
import dataclasses
import inspect
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, get_type_hints

from realign import settings
from realign.config import words
from realign.config.errors import ConfigError, suggest, unknown_key
from realign.config.files import list_experiments
from realign.config.help_entries import (
    Entry,
    default_of,
    entry_of,
    field_text,
    first_paragraph,
    hints_of,
    is_required,
    valid_range,
    value_text,
)
from realign.config.inspection import class_at, fields_of, first_sentence
from realign.config.places import ROOTS, Place, place_of
from realign.config.schema import COMPONENTS, REPORT, ExperimentConfig
from realign.config.trees import MISSING, get

FIRST = ("grpo", "ppo", "sft", "dpo", "reward_model")
"""Experiments in which a key is looked up first, if the command line names no experiment."""
MIRRORED: Mapping[str, str] = MappingProxyType(
    {
        "ExperimentConfig": "realign.runtime.experiment.Experiment",
        "MicroBatchConfig": "realign.api.microbatch.MicroBatchSpec",
        "CheckpointConfig": "realign.runtime.checkpoint.background_writer.CheckpointSpec",
        "RecordsConfig": "realign.runtime.metrics.details.RecordSpec",
    }
)
"""Class of the run that a class of the schema mirrors."""
NUMBERS: Mapping[str, Any] = MappingProxyType(
    {
        "int": int,
        "float": float,
        "bool": bool,
        "str": str,
        "Count": settings.Count,
        "NonNegativeInt": settings.NonNegativeInt,
        "NonNegative": settings.NonNegative,
        "Positive": settings.Positive,
        "Finite": settings.Finite,
        "Fraction": settings.Fraction,
    }
)
"""Names in the annotations of fields with ranges."""
DEPTH = 5
"""Levels of keys in which a single name is searched."""


@dataclass(frozen=True)
class Section:
    """A key and the keys below it."""

    key: str
    """Full key; empty for the root. In `config.reference`, the import path of the class."""
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
    if path and not is_root(path[0]):
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


def is_root(name: str) -> bool:
    """Return whether a name is a root key of the config."""
    return name in _root_fields()


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


def _section(path: tuple[str, ...], config: Mapping[str, Any], experiment: str | None) -> Section:
    if not path:
        whole = tuple(_schema_entry(ExperimentConfig, name, name, config) for name in _root_fields())
        return Section("", "", first_paragraph(ExperimentConfig), whole, None, experiment)
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
        known = place.settings(target)
        if known is None or path[depth] not in known:
            raise ConfigError(unknown_key(".".join(path[: depth + 1]), known or ()))
        entry = _field_entry(place, target, path[depth], config)
        place, target = _stepped(place, target, path[: depth + 1], config)
    cls = place.chosen(target)
    names = place.settings(target) or {} if cls is not None else {}
    entries = tuple(_field_entry(place, target, name, config) for name in names if name != "interfaces")
    name = cls.__name__ if cls is not None and entries else ""
    # A key that also accepts text is described by its own text.
    alone = entry is not None and (not entries or "text" in entry.type.split(" | "))
    text = entry.text if entry is not None and alone else (first_paragraph(cls) if cls is not None else "")
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
    annotation = hints_of(cls).get(name, Any)
    required = default is None and is_required(cls, name) and not words.is_optional(annotation)
    given = get(config, tuple(child.key.split(".")), MISSING)
    return entry_of(child.key, annotation, None if required else value_text(default), field_text(cls, name), given)


def _schema_entry(cls: type, name: str, key: str, config: Mapping[str, Any]) -> Entry:
    """Describe a field of the schema. Its valid range is that of the same field of the run."""
    field = next(field for field in dataclasses.fields(cls) if field.name == name)
    default = default_of(field)
    required = default is dataclasses.MISSING or default == "???"
    given = get(config, tuple(key.split(".")), MISSING)
    given = MISSING if given == default or isinstance(given, Mapping) else given
    annotation = get_type_hints(cls)[name]
    ranged = _ranged(cls).get(name, annotation)
    component = key in COMPONENTS or any(map(dataclasses.is_dataclass, words.members(annotation)))
    kind = ("mapping of names to components" if ROOTS[key].per_role else "component") if key in COMPONENTS else None
    written = None if required else ("none" if component and default is None else value_text(default))
    entry = entry_of(key, annotation if valid_range(ranged) == "" else ranged, written, field_text(cls, name), given)
    if kind is not None:
        return dataclasses.replace(entry, type=kind, component=True, default=written if default else "none")
    if component:
        return dataclasses.replace(entry, component=True, type="settings", default="the settings below")
    return entry


def _ranged(cls: type) -> dict[str, Any]:
    """Return the annotations with ranges of the class of the run that a class of the schema mirrors.

    Reads them from the source, since importing the class would import torch.
    """
    source = class_at(MIRRORED[cls.__name__])
    assert source is not None
    found = {}
    for name, field in fields_of(source).items():
        if field.annotation is not None:
            with suppress(KeyError):  # a class of the run, which has no range
                found[name] = _annotation(field.annotation)
    return found


def _annotation(node: ast.expr) -> Any:
    """Return an annotation of numbers and ranges from its source.

    Raises:
        KeyError: it contains something else.
    """
    match node:
        case ast.Name(id=name):
            return NUMBERS[name]
        case ast.Constant(value=None):
            return None
        case ast.BinOp(left=left, op=ast.BitOr(), right=right):
            return _annotation(left) | _annotation(right)
        case ast.Subscript(
            value=ast.Name(id="Annotated"),
            slice=ast.Tuple(elts=[kind, ast.Call(func=ast.Name(id="Range"), keywords=bounds)]),
        ):
            limits = {bound.arg: ast.literal_eval(bound.value) for bound in bounds if bound.arg is not None}
            return Annotated[_annotation(kind), settings.Range(**limits)]
    raise KeyError(ast.unparse(node))


def _root_fields() -> list[str]:
    return [name for name in _field_names(ExperimentConfig) if name not in REPORT]


def _field_names(cls: Any) -> list[str]:
    return [field.name for field in dataclasses.fields(cls)] if dataclasses.is_dataclass(cls) else []


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
        for name in place.settings(target) or ():
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


__all__ = ["Section", "find_keys", "is_root", "section"]
