"""Components selected by a word: `objective=gspo` selects the class `Gspo` in the module of the field's base class.

If that module contains only the contract, a package exports the classes, see `EXPORTERS`. Only fields annotated with a
component class accept words. Words do not apply to text, enums and paths.
"""

from __future__ import annotations

import dataclasses
import inspect
import re
import sys
import types
from collections.abc import Iterator, Mapping
from enum import Enum
from importlib import import_module
from pathlib import Path
from typing import Any, Literal, TypeGuard, Union, get_args, get_origin

from realign.config.errors import ConfigError, suggest

TARGET = "_target_"
"""Key of a component's import path."""
NONE = "none"
"""Word for `None`, if the annotation allows it."""
ONE_WORD = {"QLoRA": "Qlora", "LoRA": "Lora", "DoRA": "Dora", "ReMax": "Remax"}
"""Names that count as one word although their capitals suggest two."""
EXPORTERS: Mapping[str, str] = types.MappingProxyType(
    {
        "realign.api.sampler.SamplerSpec": "realign.engines",
        "realign.api.callback.Callback": "realign.runtime.callbacks",
    }
)
"""Package that exports the variants of a base class, if they are outside the module of the base class."""
_LEAVES = (str, int, float, bool, complex, bytes, object, type(None), Path, list, tuple, dict, set)


def snake_case(name: str) -> str:
    """Return the word of a class: `GroupRelative` -> group_relative, `KLPenalty` -> kl_penalty, `LoRA` -> lora."""
    for written, word in ONE_WORD.items():
        name = name.replace(written, word)
    name = re.sub(r"([A-Z]+)([A-Z][a-z])", r"\1_\2", name)
    return re.sub(r"([a-z0-9])([A-Z])", r"\1_\2", name).lower()


def is_word(value: Any) -> TypeGuard[str]:
    """Return whether a value is text that can select a component: an identifier other than `none` and `null`."""
    return isinstance(value, str) and value.isidentifier() and value.lower() not in (NONE, "null")


def is_import_path(value: Any) -> bool:
    """Return whether a value is text such as `package.module.Class`."""
    return isinstance(value, str) and "." in value and all(part.isidentifier() for part in value.split("."))


def members(annotation: Any) -> tuple[Any, ...]:
    """Return the members of a union, or the annotation itself."""
    return get_args(annotation) if get_origin(annotation) in (Union, types.UnionType) else (annotation,)


def is_optional(annotation: Any) -> bool:
    """Return whether an annotation allows `None`."""
    return type(None) in members(annotation)


def component_bases(annotation: Any) -> tuple[type, ...]:
    """Return the component classes of an annotation; none if it also accepts text, because a word is ambiguous then."""
    found = [member for member in members(annotation) if member is not type(None)]
    if any(map(_takes_text, found)):
        return ()
    return tuple(member for member in found if _is_class(member) and words_of(member))


def words_of(base: type) -> dict[str, type]:
    """Return the class of each word of a component base class.

    The variants of a base class are the dataclasses that inherit from it, in its module or exported by its package in
    `EXPORTERS`. The base class itself is one of them unless it is abstract, or has no fields while it has variants.

    Raises:
        ConfigError: two variants have the same word.
    """
    found: dict[str, type] = {}
    for cls in _candidates(base):
        if not issubclass(cls, base) or not _is_constructible(cls) or cls.__name__.startswith("_"):
            continue
        word = snake_case(cls.__name__)
        if found.setdefault(word, cls) is not cls:
            where = base.__module__
            raise ConfigError(f"{found[word].__qualname__} and {cls.__name__} of {where} are both called {word!r}")
    if len(found) > 1 and base in found.values() and not _has_fields(base):
        del found[snake_case(base.__qualname__)]
    return found


def _candidates(base: type) -> Iterator[type]:
    """Yield the classes defined in the module of `base`, and those that its package in `EXPORTERS` exports."""
    module = sys.modules.get(base.__module__)
    for name, cls in vars(module).items() if module is not None else ():
        if inspect.isclass(cls) and cls.__module__ == base.__module__ and name == cls.__qualname__:
            yield cls
    exporter = EXPORTERS.get(import_path(base))
    if exporter is not None:
        yield from filter(inspect.isclass, vars(import_module(exporter)).values())


def choices(annotation: Any) -> list[str]:
    """Return every word that is valid for an annotation, including `none` if it allows `None`."""
    words = [word for base in component_bases(annotation) for word in words_of(base)]
    return [*words, NONE] if words and is_optional(annotation) else words


def class_of_word(word: str, annotation: Any, where: str) -> type | None:
    """Return the class that a word selects in a field with this annotation.

    Args:
        word: An identifier.
        annotation: Annotation of the field.
        where: Config key, for messages.

    Returns:
        The class; None if the annotation has no component class, or a single one without variants and with another
        name. In these cases, the word is an ordinary value of the wrong type.

    Raises:
        ConfigError: the annotation has variants, and this word is not one of them.
    """
    bases = component_bases(annotation)
    known = {name: cls for base in bases for name, cls in words_of(base).items()}
    if word in known:
        return known[word]
    if len(known) < 2 and all(cls in bases for cls in known.values()):
        return None
    own = f"{where}.{TARGET}=MODULE.CLASS selects your own class"
    raise ConfigError(f"{where}: unknown choice {word!r}{suggest(word, choices(annotation))}; {own}")


def import_path(cls: type) -> str:
    """Return the `_target_` of a class."""
    return f"{cls.__module__}.{cls.__qualname__}"


def _is_class(member: Any) -> bool:
    return inspect.isclass(member) and member not in _LEAVES and not getattr(member, "_is_protocol", False)


def _takes_text(member: Any) -> bool:
    if member is Any or member in (str, object, Path) or get_origin(member) is Literal:
        return True
    return inspect.isclass(member) and issubclass(member, Enum)


def _is_constructible(cls: type) -> bool:
    if inspect.isabstract(cls):
        return False
    return dataclasses.is_dataclass(cls) or inspect.getattr_static(cls, "__init__") is object.__init__


def _has_fields(cls: type) -> bool:
    return dataclasses.is_dataclass(cls) and bool(dataclasses.fields(cls))
