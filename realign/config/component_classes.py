"""Find the classes of realign that a config can select."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import pkgutil
import sys
from collections.abc import Iterator
from enum import Enum
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints

from realign.config import words
from realign.config.places import ROOTS
from realign.config.targets import PACKAGES, import_target, misfit


def shipped_components() -> list[type]:
    """Return the classes of realign that a config can select, directly or as a field of another component."""
    kinds = [import_target(root.kind, name) for name, root in ROOTS.items() if name != "graph"]
    found = {cls: None for cls in _defined_classes() if any(_is_choice(cls, kind) for kind in kinds)}
    waiting = list(found)
    while waiting:
        cls = waiting.pop()
        hints = get_type_hints(cls)
        for field in dataclasses.fields(cls) if dataclasses.is_dataclass(cls) else ():
            for inner in _component_classes(hints[field.name]):
                if inner not in found:
                    found[inner] = None
                    waiting.append(inner)
    return sorted(found, key=words.import_path)


def is_component(member: Any) -> bool:
    """Return whether a member of an annotation is a dataclass, or the base class of components."""
    if not inspect.isclass(member) or issubclass(member, Enum) or member in (type(None), Path):
        return False
    return dataclasses.is_dataclass(member) or bool(words.component_bases(member))


def _component_classes(hint: Any) -> Iterator[type]:
    """Yield the component classes that an annotation accepts, also inside of lists and mappings."""
    for member in words.members(hint):
        if get_origin(member) is not None:
            for argument in get_args(member):
                yield from _component_classes(argument)
        elif inspect.isclass(member) and member.__module__.startswith("realign.") and is_component(member):
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


__all__ = ["is_component", "shipped_components"]
