"""Describe every config key of the schema and of the shipped components, for the documentation."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from realign.config.classes import Class, Type
from realign.config.composition import compose_raw
from realign.config.files import list_experiments
from realign.config.help import Section, entries_of, section
from realign.config.index import indexed
from realign.config.keys import component_paths
from realign.config.places import ROOTS, Place, place_of
from realign.config.trees import get
from realign.config.words import TARGET, is_component, words_of

PLAIN = ("microbatch", "checkpoint", "records")
"""Root keys that contain settings and are no component."""


def reference() -> list[Section]:
    """Describe the root keys, and the fields of every shipped component, each class once.

    The sections of classes have the import path of the class as key, and names of fields as keys of their entries.
    """
    return [section(key) for key in ("", *PLAIN)] + [
        Section(cls.path, cls.name, cls.text, entries_of(cls)) for cls in shipped_components()
    ]


def shipped_components() -> list[Class]:
    """Return the classes of realign that a config can select, directly or as a field of another component."""
    kinds = tuple(place_of((name,)).field.types[0] for name in ROOTS if name != "graph")
    shipped = {cls.path: cls for cls in _component_classes(kinds)}
    waiting = list(shipped.values())
    while waiting:
        for field in waiting.pop().fields.values():
            for inner in _component_classes(field.types):
                if inner.path not in shipped:
                    shipped[inner.path] = inner
                    waiting.append(inner)
    return [shipped[path] for path in sorted(shipped)]


def _component_classes(types: tuple[Type, ...]) -> Iterator[Class]:
    """Yield the component classes that an annotation accepts, also inside of lists and mappings."""
    for member in types:
        for argument in member.arguments:
            yield from _component_classes(argument)
        base = indexed(member.path) if is_component(member) else None
        for classes in words_of(base).values() if base is not None else ():
            yield from (cls for cls in classes if cls.is_dataclass and indexed(cls.path))


def set_by(config_dir: Path | None = None) -> dict[tuple[str, str], list[str]]:
    """Return which experiments set which field: (import path of the class, field) -> names of experiments.

    Args:
        config_dir: As for `compose`.
    """
    experiments_of: dict[tuple[str, str], list[str]] = {}
    for name in list_experiments(config_dir):
        config = compose_raw([f"experiment={name}"], config_dir)
        for path in component_paths(config):
            for used in _used(place_of(path), get(config, path)):
                experiments = experiments_of.setdefault(used, [])
                if name not in experiments:
                    experiments.append(name)
    return experiments_of


def _used(place: Place, node: Any) -> Iterator[tuple[str, str]]:
    """Yield the class and the name of each field that a node sets, and of those below it."""
    if not isinstance(node, Mapping):
        return
    target = node.get(TARGET)
    cls = place.chosen(target)
    for name, value in node.items():
        if cls is not None and cls.returns is None and name in cls.fields:
            yield cls.path, name
        yield from _used(place.child(name, target), value)


__all__ = ["PLAIN", "reference", "set_by", "shipped_components"]
