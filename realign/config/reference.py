"""Describe every config key of the schema and of the shipped components, for the documentation."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from realign.config import words
from realign.config.component_classes import shipped_components
from realign.config.composition import compose_raw
from realign.config.files import list_experiments
from realign.config.help import Section, section
from realign.config.help_entries import default_of, entry_of, field_text, hints_of, is_required, value_text
from realign.config.places import ROOTS, Place, place_of
from realign.config.schema import COMPONENTS
from realign.config.trees import MISSING
from realign.settings import own_settings

PLAIN = ("microbatch", "checkpoint", "records")
"""Root keys that contain settings and are no component."""


def reference() -> list[Section]:
    """Describe the root keys, and the fields of every shipped component, each class once.

    The sections of classes have the import path of the class as key, and names of fields as keys of their entries.
    """
    return [section(key) for key in ("", *PLAIN)] + [_class_section(cls) for cls in shipped_components()]


def set_by(config_dir: Path | None = None) -> dict[tuple[str, str], list[str]]:
    """Return which experiments set which field: (import path of the class, field) -> names of experiments.

    Args:
        config_dir: As for `compose`.
    """
    found: dict[tuple[str, str], list[str]] = {}
    for name in list_experiments(config_dir):
        config = compose_raw([f"experiment={name}"], config_dir)
        for path in _roots(config):
            place, node = place_of(path), config
            for key in path:
                node = node[key]
            for used in _used(place, node):
                experiments = found.setdefault(used, [])
                if name not in experiments:
                    experiments.append(name)
    return found


def _roots(config: Mapping[str, Any]) -> Iterator[tuple[str, ...]]:
    """Yield the paths of the root components of a config."""
    for root in COMPONENTS:
        if ROOTS[root].per_role:
            yield from ((root, role) for role in config.get(root) or {})
        elif config.get(root) is not None:
            yield (root,)


def _used(place: Place, node: Any) -> Iterator[tuple[str, str]]:
    """Yield the class and the name of each field that a node sets, and of those below it."""
    if not isinstance(node, Mapping):
        return
    target = node.get(words.TARGET)
    cls, known = place.chosen(target), place.fields(target) or {}
    for name, value in node.items():
        if inspect.isclass(cls) and name in known:
            yield words.import_path(cls), name
        yield from _used(place.child(name, target), value)


def _class_section(cls: type) -> Section:
    hints = hints_of(cls)
    entries = []
    for field in own_settings(cls) if dataclasses.is_dataclass(cls) else ():
        if field.name.startswith("_"):
            continue
        default = None if is_required(cls, field.name) else value_text(default_of(field))
        entries.append(entry_of(field.name, hints[field.name], default, field_text(cls, field.name), MISSING))
    return Section(words.import_path(cls), cls.__name__, inspect.getdoc(cls) or "", tuple(entries))


__all__ = ["PLAIN", "reference", "set_by"]
