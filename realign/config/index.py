"""The index: what all classes of realign tell a config, in one file that is read without importing them.

So `realign help` and completion import no torch, and the words of a field don't depend on what was imported before.
The build writes the file into the wheel. In a checkout, the first use writes it into the user's cache folder, and again
after a source file has changed. Without a folder to write to, each process that needs the index builds it.
"""

from __future__ import annotations

import hashlib
import importlib
import inspect
import json
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from functools import cache
from itertools import chain
from pathlib import Path
from types import ModuleType
from typing import Any, TypeAlias

from realign.cache_folder import Cache
from realign.config.classes import PACKAGE, Class, Field, Type, described, import_path

_GRAPH = "realign.api.dataflow.DataflowGraph"
"""Class of a graph, which functions make."""
SETTINGS = "realign.settings.Settings"
"""Base class of what a config sets."""
ROOT = Path(__file__).resolve().parent.parent
FILE = Path(__file__).with_name("index.json")
"""The index of a wheel."""
_WITHOUT = ("realign.demo", "realign.runtime.ray", "realign.testing", "realign.time_machine")
"""Packages without classes that a config names."""
LARGEST = 64 << 20
"""Size in bytes above which the cache gets no more indexes of other installations."""

Find: TypeAlias = Callable[[str], Class | None]
"""Returns the class at an import path."""


def class_at(path: str) -> Class | None:
    """Return the class, or the function of a graph, at an import path. Classes of realign come from the index.

    Returns:
        None if there is none, or its module cannot be imported, which building the component reports.
    """
    if (cls := indexed(path)) is not None:
        return cls
    with suppress(Exception, SystemExit):
        return described(object_at(path))
    return None


@cache
def indexed(path: str) -> Class | None:
    """Return the class at an import path, without importing a module; None unless realign ships it."""
    if not path.startswith(f"{PACKAGE}."):
        return None
    index = _shipped()
    values = index["classes"].get(index["exported"].get(path, path))
    return None if values is None else _decoded(**values)


def variants_of(base: Class) -> Iterator[Class]:
    """Yield the classes that inherit from a class: first those of realign, then those that others have imported."""
    yield from filter(None, map(indexed, _variants().get(base.path, ())))
    cls = _here(base.path)
    for derived in _subclasses(cls) if inspect.isclass(cls) else ():
        path = import_path(derived)
        # A class inside of a function, or that a later one of its name has replaced, has no import path.
        if not path.startswith(f"{PACKAGE}.") and _here(path) is derived and (own := described(derived)) is not None:
            yield own


def object_at(path: str) -> Any:
    """Return the object at an import path; None if its module has none of the name, or is of the standard library."""
    if path.partition(".")[0] in sys.stdlib_module_names:  # it has no components, and importing some of it acts
        return None
    module, _, name = path.rpartition(".")
    return getattr(importlib.import_module(module), name, None)


def _here(path: str) -> Any:
    """Return the object at an import path; None if its module is not imported."""
    module, _, name = path.rpartition(".")
    return getattr(sys.modules.get(module), name, None)


def _subclasses(cls: type) -> Iterator[type]:
    level: list[type] = cls.__subclasses__()
    while level:
        yield from level
        level = list(chain.from_iterable(above.__subclasses__() for above in level))


@cache
def _variants() -> Mapping[str, list[str]]:
    """Return the paths of the shipped variants of each class, in the order of their definition within a module."""
    variants: dict[str, list[str]] = {}
    for path, values in _shipped()["classes"].items():
        for base in values["bases"]:
            variants.setdefault(base, []).append(path)
    return variants


# --- the file ---


# Cached for good, since the files of realign do not change while it runs. A user's files can, as in a notebook.
@cache
def _shipped() -> Mapping[str, Mapping[str, Any]]:
    """Return the index: `classes` by import path, and `exported`, their other import paths in packages."""
    sources, name = _digest(), f"{hashlib.sha256(str(ROOT).encode()).hexdigest()[:16]}.json"
    cached = Cache("index", limit=LARGEST, quiet=True)
    for content in (FILE.read_bytes() if FILE.exists() else None, cached.read(name)):
        with suppress(ValueError, AttributeError):  # a damaged file
            if content is not None and (index := json.loads(content)).get("sources") == sources:
                return index
    content = build()
    cached.write(name, content)
    return json.loads(content)


def build() -> bytes:
    """Import the modules of realign, and return what their classes tell a config, as the content of the file."""
    classes: dict[str, Class] = {}
    exported: dict[str, str] = {}
    for module in _modules():
        for thing in vars(module).values():
            if getattr(thing, "__module__", None) == module.__name__ and (cls := described(thing)) is not None:
                classes[cls.path] = cls
        for name in getattr(module, "__all__", ()):
            thing = getattr(module, name)
            path = f"{getattr(thing, '__module__', '')}.{getattr(thing, '__qualname__', '')}"
            exported |= {f"{module.__name__}.{name}": path} if path.startswith(f"{PACKAGE}.") else {}
    settings = (cls for cls in classes.values() if SETTINGS in (cls.path, *cls.bases))
    in_fields = {path for cls in settings for field in cls.fields.values() for path in _types_of_name(field.types)}
    kept = {
        path: vars(cls)
        for path, cls in classes.items()
        if cls.returns == _GRAPH or (cls.returns is None and {SETTINGS, *in_fields} & {path, *cls.bases})
    }
    exported = {name: path for name, path in exported.items() if path in kept}
    index = {"sources": _digest(), "classes": kept, "exported": exported}
    return json.dumps(index, separators=(",", ":")).encode()


def _types_of_name(types: tuple[Type, ...]) -> Iterator[str]:
    for member in types:
        yield member.path
        for inside in member.arguments:
            yield from _types_of_name(inside)


def _decoded(fields: Mapping[str, Any], bases: list[str], algorithm: list[str], **values: Any) -> Class:
    read = {name: Field(name, _types(types), *rest) for name, (_, types, *rest) in fields.items()}
    return Class(fields=read, bases=tuple(bases), algorithm=tuple(algorithm), **values)


def _types(written: list[Any]) -> tuple[Type, ...]:
    return tuple(Type(name, path, tuple(map(_types, inside)), *rest) for name, path, inside, *rest in written)


def _modules() -> Iterator[ModuleType]:
    for path in sorted(ROOT.rglob("*.py")):
        name = ".".join([ROOT.name, *path.relative_to(ROOT).with_suffix("").parts]).removesuffix(".__init__")
        if not name.startswith(_WITHOUT) and path.stem != "__main__":
            with suppress(ImportError):  # of an optional package: a config that needs the module says so
                yield importlib.import_module(name)


def _digest() -> str:
    """Return the digest of the source files of realign."""
    digest = hashlib.blake2b(digest_size=16)
    for path in sorted(ROOT.rglob("*.py")):
        digest.update(f"\0{path.relative_to(ROOT)}\0".encode() + path.read_bytes())
    return digest.hexdigest()
