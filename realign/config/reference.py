"""Describe every config key of the schema and of the shipped components, for the documentation."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from realign.config.composition import compose_raw
from realign.config.files import list_experiments
from realign.config.help import Section, entries_of, section
from realign.config.inspection import (
    ROOT,
    Definition,
    Type,
    docstring,
    fields_of,
    is_abstract,
    is_dataclass,
    read_module,
    types_of,
)
from realign.config.keys import component_paths
from realign.config.places import ROOTS, Place, fits, place_of
from realign.config.trees import get
from realign.config.words import TARGET, component_bases, is_component, words_of

PLAIN = ("microbatch", "checkpoint", "records")
"""Root keys that contain settings and are no component."""
WITHOUT = (
    "realign.cli",
    "realign.config",
    "realign.demo",
    "realign.runtime.ray",
    "realign.testing",
    "realign.time_machine",
)
"""Modules that contain no shipped components."""


def reference() -> list[Section]:
    """Describe the root keys, and the fields of every shipped component, each class once.

    The sections of classes have the import path of the class as key, and names of fields as keys of their entries.
    """
    return [section(key) for key in ("", *PLAIN)] + [
        Section(cls.path, cls.name, docstring(cls), entries_of(cls)) for cls in shipped_components()
    ]


def shipped_components() -> list[Definition]:
    """Return the classes of realign that a config can select, directly or as a field of another component."""
    kinds = [place_of((name,)).declared[0][0] for name in ROOTS if name != "graph"]
    defined = list(_defined_classes())
    shipped = {cls.path: cls for cls in defined if any(fits(cls, kind) for kind in kinds)}
    waiting = list(shipped.values())
    while waiting:
        for field in fields_of(waiting.pop()).values():
            for inner in _component_classes(types_of(field.annotation, field.module), defined):
                if inner.path not in shipped:
                    shipped[inner.path] = inner
                    waiting.append(inner)
    return [shipped[path] for path in sorted(shipped)]


def _component_classes(types: tuple[Type, ...], defined: Sequence[Definition]) -> Iterator[Definition]:
    """Yield the component classes that an annotation accepts, also inside of lists and mappings."""
    for member in types:
        for argument in member.arguments:
            yield from _component_classes(argument, defined)
        if member.definition is not None and member.definition.module.startswith("realign.") and is_component(member):
            for base in [*component_bases((member,)), member.definition]:
                yield from filter(is_dataclass, words_of(base).values())
            if is_abstract(member.definition):  # subclasses elsewhere have no words: `realign.rewards.judge.Judge`
                yield from (cls for cls in defined if fits(cls, member))


def _defined_classes() -> Iterator[Definition]:
    """Yield the public dataclasses of realign."""
    for path in sorted(ROOT.rglob("*.py")):
        name = ".".join([ROOT.name, *path.relative_to(ROOT).with_suffix("").parts]).removesuffix(".__init__")
        module = read_module(name) if not name.startswith(WITHOUT) else None
        for definition in module.definitions.values() if module is not None else ():
            public = definition.returns is None and not definition.name.startswith("_")
            if public and is_dataclass(definition) and not is_abstract(definition):
                yield definition


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
    definition = place.chosen(target)
    fields = fields_of(definition) if definition is not None and definition.returns is None else {}
    for name, value in node.items():
        if definition is not None and name in fields:
            yield definition.path, name
        yield from _used(place.child(name, target), value)


__all__ = ["PLAIN", "reference", "set_by", "shipped_components"]
