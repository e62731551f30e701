"""The index: what all classes of realign tell a config, in one file that is read without importing them.

So `realign help` and completion import no torch, and the words of a field don't depend on what was imported before.
The build writes the file into the wheel. In a checkout, the first use writes it into the user's cache folder. After an
edit, only the classes of the changed modules are read again, and those of modules that import them. Without a folder to
write to, each process that needs the index builds it.
"""

from __future__ import annotations

import hashlib
import importlib
import inspect
import json
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from functools import cache
from importlib.util import resolve_name
from itertools import chain
from pathlib import Path
from types import ModuleType
from typing import Any, TypeAlias

from realign.cache_folder import Cache
from realign.config.classes import PACKAGE, Class, Field, Type, described, import_path, read_source

_GRAPH = "DataflowGraph"
"""Return annotation of a function that makes a graph."""
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


def class_of_source(path: str) -> Class | None:
    """Return the class at an import path, without running a user's file: of it, only its source is read."""
    return indexed(path) or (None if path.startswith(f"{PACKAGE}.") else read_source(path, indexed))


def variants_of(base: Class) -> Iterator[Class]:
    """Yield the classes that inherit from a class: first those of realign, then those that others have imported."""
    yield from filter(None, map(indexed, _variants().get(base.path, ())))
    cls = loaded(base.path)
    for derived in _subclasses(cls) if inspect.isclass(cls) else ():
        path = import_path(derived)
        # A class inside of a function, or that a later one of its name has replaced, has no import path.
        if not path.startswith(f"{PACKAGE}.") and loaded(path) is derived and (own := described(derived)) is not None:
            yield own


def object_at(path: str) -> Any:
    """Return the object at an import path; None if its module has none of the name, or is of the standard library."""
    if path.partition(".")[0] in sys.stdlib_module_names:  # it has no components, and importing some of it acts
        return None
    module, _, name = path.rpartition(".")
    return getattr(importlib.import_module(module), name, None)


def loaded(path: str) -> Any:
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

_READER = "realign.config.classes"
_Index: TypeAlias = dict[str, dict[str, Any]]
"""`files`: size, time and digest of each source file by its module. `classes`: by import path. `exported`: their other
import paths, in packages."""


# Cached for good, since the files of realign do not change while it runs. A user's files can, as in a notebook.
@cache
def _shipped() -> _Index:
    cached, name = Cache("index", limit=LARGEST, quiet=True), f"{_digest(str(ROOT).encode())}.json"
    if _is_current(index := _parse(cached.read(name))):
        return index
    with cached.alone():  # of processes that start together, such as the workers of pytest, one reads the classes
        if not _is_current(index := _parse(cached.read(name))):
            content = build(_parse(FILE.read_bytes()) if FILE.exists() else index)
            cached.write(name, content)
            index = _parse(content)
    return index


def _parse(content: bytes | None) -> _Index:
    """Return the index in a file; an empty one if it is damaged."""
    with suppress(ValueError, LookupError, TypeError, AttributeError):
        index = json.loads(content or b"")
        files = {module: (size, mtime_ns, digest) for module, (size, mtime_ns, digest) in index["files"].items()}
        return {"files": files, "classes": dict(index["classes"]), "exported": dict(index["exported"])}
    return {"files": {}, "classes": {}, "exported": {}}


def _is_current(index: _Index) -> bool:
    """Return whether all source files have the sizes and times that the index knows."""
    known = {module: facts[:2] for module, facts in index["files"].items()}
    return known == {module: _facts(path) for module, path in _sources().items()}


def _sources() -> dict[str, str]:
    """Return the source file of each module that can have classes for a config."""
    paths = {}
    for folder, _, names in os.walk(ROOT):
        package = folder.replace(str(ROOT), ROOT.name, 1).replace(os.sep, ".")
        for name in names:
            module = package if name == "__init__.py" else f"{package}.{name.removesuffix('.py')}"
            if name.endswith(".py") and name != "__main__.py" and not module.startswith(_WITHOUT):
                paths[module] = os.path.join(folder, name)
    return paths


def _facts(path: str) -> tuple[int, int]:
    status = os.stat(path)
    return status.st_size, status.st_mtime_ns


def _digest(content: bytes) -> str:
    return hashlib.blake2b(content, digest_size=8).hexdigest()


def build(earlier: _Index | None = None) -> bytes:
    """Return what the classes of realign tell a config, as the content of the file.

    Args:
        earlier: An index. Only modules whose content differs from it are imported, and those that import them.
    """
    old, sources = earlier or _parse(None), _sources()
    texts = {module: Path(path).read_bytes() for module, path in sources.items()}
    files = {module: (*_facts(path), _digest(texts[module])) for module, path in sources.items()}
    # A time alone differs after `git checkout`, or in another installation.
    before, now = ({(module, facts[-1]) for module, facts in part.items()} for part in (old["files"], files))
    stale = {module for module, _ in before ^ now}
    while more := {m for m in files.keys() - stale if stale.intersection(_imports(m, sources[m], texts[m]))}:
        stale |= more
    if _READER in stale:
        stale |= files.keys()
    modules = [module for name in sorted(stale & files.keys()) if (module := _import(name)) is not None]
    own = [thing for m in modules for thing in vars(m).values() if getattr(thing, "__module__", None) == m.__name__]
    classes = {path: told for path, told in old["classes"].items() if path.rpartition(".")[0] not in stale}
    settings = [thing for thing in own if SETTINGS in _lineage(thing)]
    in_fields = _in_fields(classes | _describe(settings))
    if stale < files.keys() and in_fields - _in_fields(old["classes"]):
        return build()  # a class that no field had may be in a module that was not imported
    in_fields.add(SETTINGS)
    classes |= _describe(thing for thing in own if _makes_graph(thing) or in_fields.intersection(_lineage(thing)))
    exported = {name: path for name, path in old["exported"].items() if name.rpartition(".")[0] not in stale}
    for module in modules:
        named = {f"{module.__name__}.{name}": getattr(module, name) for name in getattr(module, "__all__", ())}
        exported |= {name: path for name, thing in named.items() if (path := _path(thing)) in classes}
    ordered = sorted(classes, key=lambda path: path.split(".")[:-1])  # those of one module as defined
    index = {"files": files, "classes": {path: classes[path] for path in ordered}, "exported": exported}
    return json.dumps(index, separators=(",", ":")).encode()


def _imports(module: str, path: str, text: bytes) -> list[str]:
    """Return the modules of realign that a module imports when it is imported."""
    package = module if path.endswith("__init__.py") else module.rpartition(".")[0]
    names = re.findall(rf"^from (\.[\w.]*|{ROOT.name}[\w.]*) import", text.decode(), re.MULTILINE)
    return [resolve_name(name, package) for name in names]


def _import(module: str) -> ModuleType | None:
    with suppress(ImportError):  # of an optional package: a config that needs the module says so
        return importlib.import_module(module)
    return None


def _describe(things: Iterable[Any]) -> dict[str, dict[str, Any]]:
    return {cls.path: vars(cls) for cls in map(described, things) if cls is not None}


def _path(thing: Any) -> str:
    return f"{getattr(thing, '__module__', '')}.{getattr(thing, '__qualname__', '')}"


def _lineage(thing: Any) -> list[str]:
    """Return the import paths of a class and of its base classes; none for other objects."""
    return list(map(_path, thing.__mro__)) if inspect.isclass(thing) else []


def _makes_graph(thing: Any) -> bool:
    return inspect.isfunction(thing) and thing.__annotations__.get("return") == _GRAPH


def _in_fields(classes: Mapping[str, Mapping[str, Any]]) -> set[str]:
    """Return the import paths in the types of the fields of settings."""
    settings = (told for path, told in classes.items() if SETTINGS in (path, *told["bases"]))
    return {path for told in settings for _, types, *_ in told["fields"].values() for path in _paths(types)}


def _paths(types: Iterable[Any]) -> Iterator[str]:
    for _, path, inside, *_ in types:
        yield path
        for below in inside:
            yield from _paths(below)


def _decoded(fields: Mapping[str, Any], bases: list[str], algorithm: list[str], **values: Any) -> Class:
    read = {name: Field(name, _types(types), *rest) for name, (_, types, *rest) in fields.items()}
    return Class(fields=read, bases=tuple(bases), algorithm=tuple(algorithm), **values)


def _types(written: list[Any]) -> tuple[Type, ...]:
    return tuple(Type(name, path, tuple(map(_types, inside)), *rest) for name, path, inside, *rest in written)
