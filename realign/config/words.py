"""Words for components: `objective=gspo` is the class `Gspo`, and `interfaces.actor=grpo` the interface in `grpo.py`.

A word selects a subclass of the class that the field is annotated with, in whichever file it stands. Those of realign
come first. Others count once their file is imported, as by a `_target_`. Text, enums and paths take no words.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from functools import cache
from types import MappingProxyType
from typing import Any, TypeGuard

from realign.config.classes import TARGET as TARGET  # re-export
from realign.config.classes import Class, Type, first_sentence
from realign.config.errors import ConfigError, suggest
from realign.config.index import class_at, variants_of

NONE = "none"
"""Word for `None`, if the annotation allows it."""
_ONE_WORD = {
    **{"QLoRA": "Qlora", "LoRA": "Lora", "DoRA": "Dora", "ReMax": "Remax"},
    **{"WandB": "Wandb", "TensorBoard": "Tensorboard", "MLflow": "Mlflow", "SwanLab": "Swanlab"},
}
"""Names that count as one word although their capitals suggest two."""
TEXT = frozenset({"Any", "object", "str", "Path", "Literal"})
"""Members of an annotation that accept text, so that a word is ambiguous."""
ENDINGS: Mapping[str, str] = MappingProxyType(
    {
        "realign.api.interface.ModelInterface": "Interface",
        "realign.api.model.ModelSpec": "Model",
        "realign.data.dataset.DataSpec": "Data",
    }
)
"""Ending of the names of a base class's variants. Of the first one in each file of realign, the word is the name of the
file: an algorithm is called like its file. The words of the others lack this ending."""


@cache
def snake_case(name: str) -> str:
    """Return the word of a class: `GroupRelative` -> group_relative, `KLPenalty` -> kl_penalty, `LoRA` -> lora."""
    for written, word in _ONE_WORD.items():
        name = name.replace(written, word)
    name = re.sub(r"([A-Z]+)([A-Z][a-z])", r"\1_\2", name)
    return re.sub(r"([a-z0-9])([A-Z])", r"\1_\2", name).lower()


def is_word(value: Any) -> TypeGuard[str]:
    """Return whether a value is text that can select a component: an identifier other than `none` and `null`."""
    return isinstance(value, str) and value.isidentifier() and value.lower() not in (NONE, "null")


def words_of(base: Class) -> dict[str, list[Class]]:
    """Return the classes of each word of a component base class; several only if none of them is realign's.

    They are the base class and the classes that inherit from it, without abstract and private ones. A base class
    without fields is left out while it has variants.
    """
    words: dict[str, list[Class]] = {}
    variants = [cls for cls in (base, *variants_of(base)) if cls.has_word]
    files = set[str]()
    for cls in variants:
        ending = ENDINGS.get(base.path, "")
        word = snake_case(cls.name.removesuffix(ending))
        if ending and cls.is_shipped and cls.name.endswith(ending) and cls.module not in files:
            files.add(cls.module)
            word = cls.module.rpartition(".")[2]
        if cls.is_shipped or not any(other.is_shipped for other in words.get(word, ())):
            words.setdefault(word, []).append(cls)
    if len(variants) > 1 and not base.fields:
        words = {word: classes for word, classes in words.items() if base not in classes}
    return words


def component_bases(types: tuple[Type, ...]) -> list[Class]:
    """Return the component classes of an annotation; none if it also accepts text, because a word is ambiguous then."""
    if any(member.name in TEXT or member.members is not None for member in types):
        return []
    classes = (class_at(member.path) for member in types if member.path and not member.arguments)
    return [cls for cls in classes if cls is not None and words_of(cls)]


def is_component(member: Type) -> bool:
    """Return whether a member of an annotation is a dataclass, or the base class of components."""
    if not member.path or member.arguments or member.members is not None:
        return False
    cls = class_at(member.path)
    return cls is not None and (cls.is_dataclass or bool(words_of(cls)))


def choices(types: tuple[Type, ...]) -> dict[str, str]:
    """Return the words that are valid for an annotation, with their meaning, without `null`."""
    texts: dict[str, str] = {}
    for member in types:
        texts |= {} if member.members is None or member.name == "Literal" else member.members
    for base in component_bases(types):
        words = words_of(base)
        if len(words) > 1 or [base] not in words.values():
            texts |= {word: first_sentence(classes[0].text) for word, classes in words.items()}
    return texts


def class_of_word(word: str, types: tuple[Type, ...], where: str) -> Class | None:
    """Return the class that a word selects in a field with these types.

    Args:
        word: An identifier.
        types: Members of the annotation of the field.
        where: Config key, for messages.

    Returns:
        The class; None if the annotation has no component class, or a single one without variants and with another
        name. In these cases, the word is an ordinary value of the wrong type.

    Raises:
        ConfigError: the annotation has variants, and this word is not one of them, or the word of several.
    """
    bases = component_bases(types)
    known = {name: classes for base in bases for name, classes in words_of(base).items()}
    if len(found := known.get(word, [])) > 1:
        paths = " and ".join(sorted(cls.path for cls in found))
        raise ConfigError(f"{where}: {word!r} is the word of {paths}; choose by {where}.{TARGET}=MODULE.CLASS")
    if found:
        return found[0]
    if len(known) < 2 and all(classes[0] in bases for classes in known.values()):
        return None
    valid = [*known, *([NONE] if known and "None" in [member.name for member in types] else [])]
    own = f"{where}.{TARGET}=MODULE.CLASS selects your own class"
    raise ConfigError(f"{where}: unknown choice {word!r}{suggest(word, valid)}; {own}")


def of_sibling(cls: Class, key: str) -> str:
    """Return the message about an unknown key that other choices for the same component have; empty if none has."""
    bases = [base for base in map(class_at, cls.bases) if base is not None and base.is_abstract]
    return not_of(cls, key, (choice for base in bases for choice in variants_of(base) if not choice.is_abstract))


def not_of(cls: Class, key: str, others: Iterable[Class]) -> str:
    """Return the message about a key that `cls` does not have, but some of the others; empty if none of them has it."""
    having = [other for other in others if key.rpartition(".")[2] in other.fields]
    named = dict.fromkeys(other.name for other in [other for other in having if other.is_shipped] or having)
    return f"unknown key {key!r}: it is a setting of {' and '.join(named)}, not of {cls.name}" if named else ""
