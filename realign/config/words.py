"""Words for components: `objective=gspo` is the class `Gspo`, and `interfaces.actor=grpo` the interface in `grpo.py`.

A word selects a variant of the class that the field is annotated with. Text, enums and paths take no words. Classes are
read from source code, since composing a config must not import torch.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple, TypeGuard

from realign.config.errors import ConfigError, suggest
from realign.config.inspection import (
    ROOT,
    Definition,
    Type,
    ancestry,
    docstring,
    fields_of,
    find,
    first_sentence,
    is_abstract,
    is_dataclass,
    is_enum,
    is_protocol,
    members_of,
    read_module,
)

TARGET = "_target_"
"""Key of a component's class: its import path, or its word."""
NONE = "none"
"""Word for `None`, if the annotation allows it."""
ONE_WORD = {
    **{"QLoRA": "Qlora", "LoRA": "Lora", "DoRA": "Dora", "ReMax": "Remax"},
    **{"WandB": "Wandb", "TensorBoard": "Tensorboard", "MLflow": "Mlflow", "SwanLab": "Swanlab"},
}
"""Names that count as one word although their capitals suggest two."""
TEXT = frozenset({"Any", "object", "str", "Path", "Literal"})
"""Members of an annotation that accept text, so that a word is ambiguous."""


class Package(NamedTuple):
    """A package with the variants of a base class."""

    name: str
    ending: str = ""
    """If it is set, the name of each module is the word of the first class in it whose name ends so. The words of the
    other classes lack this ending."""


PACKAGES: Mapping[str, Package] = MappingProxyType(
    {
        "realign.api.sampler.SamplerSpec": Package("realign.samplers"),
        "realign.api.callback.Callback": Package("realign.runtime.callbacks"),
        "realign.runtime.evaluation.base.Evaluator": Package("realign.runtime"),
        "realign.api.interface.ModelInterface": Package("realign.interfaces", "Interface"),
        "realign.api.model.ModelSpec": Package("realign.engines", "Model"),
        "realign.data.dataset.DataSpec": Package("realign.data", "Data"),
    }
)
"""Package of the variants of a base class, if they are outside its module. A new algorithm needs no entry."""


def snake_case(name: str) -> str:
    """Return the word of a class: `GroupRelative` -> group_relative, `KLPenalty` -> kl_penalty, `LoRA` -> lora."""
    for written, word in ONE_WORD.items():
        name = name.replace(written, word)
    name = re.sub(r"([A-Z]+)([A-Z][a-z])", r"\1_\2", name)
    return re.sub(r"([a-z0-9])([A-Z])", r"\1_\2", name).lower()


def is_word(value: Any) -> TypeGuard[str]:
    """Return whether a value is text that can select a component: an identifier other than `none` and `null`."""
    return isinstance(value, str) and value.isidentifier() and value.lower() not in (NONE, "null")


def words_of(base: Definition) -> dict[str, Definition]:
    """Return the class of each word of a component base class.

    The variants of a base class are the dataclasses that inherit from it, in its module or its package in `PACKAGES`.
    The base class itself is one of them unless it is abstract, or has no fields while it has variants.

    Raises:
        ConfigError: two variants have the same word.
    """
    words: dict[str, Definition] = {}
    package = PACKAGES.get(base.path, Package(""))
    for definition in _candidates(base, package):
        lineage = {ancestor.path for ancestor in ancestry(definition)}
        if base.path not in lineage or not _is_constructible(definition) or definition.name.startswith("_"):
            continue
        module = definition.module.removeprefix(f"{package.name}.")
        word = (
            module
            if of_module(package, module) == definition
            else snake_case(definition.name.removesuffix(package.ending))
        )
        if words.setdefault(word, definition).path != definition.path:
            raise ConfigError(f"{words[word].name} and {definition.name} of {base.module} are both called {word!r}")
    if len(words) > 1 and not fields_of(base):
        words.pop(snake_case(base.name), None)
    return words


def _candidates(base: Definition, package: Package) -> Iterator[Definition]:
    names = [base.module]
    if package.ending:
        folder = ROOT / package.name.partition(".")[2]
        names += [f"{package.name}.{path.stem}" for path in sorted(folder.glob("*.py"))]
    for name in names:
        module = read_module(name)  # without a source, as in a notebook, the imported module has the classes
        declared = module.definitions if module is not None else vars(sys.modules.get(name, object))
        yield from filter(None, (find(name, word) for word in list(declared)))
    if package.name and not package.ending and (exports := read_module(package.name)) is not None:
        yield from filter(None, (find(package.name, name) for name in exports.imported))


def _is_constructible(definition: Definition) -> bool:
    if definition.returns is not None or is_enum(definition) or is_protocol(definition) or is_abstract(definition):
        return False
    return is_dataclass(definition) or not any("__init__" in ancestor.methods for ancestor in ancestry(definition))


def of_module(package: Package, word: str) -> Definition | None:
    """Return the class that the name of a module selects in a package; None if it selects none."""
    module = read_module(f"{package.name}.{word}") if package.ending else None
    classes = () if module is None else module.definitions.values()
    return next((cls for cls in classes if cls.dataclass and cls.name.endswith(package.ending)), None)


def component_bases(types: tuple[Type, ...]) -> list[Definition]:
    """Return the component classes of an annotation; none if it also accepts text, because a word is ambiguous then."""
    if any(member.name in TEXT or (member.definition is not None and is_enum(member.definition)) for member in types):
        return []
    classes = [member.definition for member in types if member.definition is not None and not member.arguments]
    classes = [cls for cls in classes if cls.returns is None]
    return [cls for cls in classes if cls.path in PACKAGES or words_of(cls)]


def is_component(member: Type) -> bool:
    """Return whether a member of an annotation is a dataclass, or the base class of components."""
    if member.definition is None or member.arguments or is_enum(member.definition):
        return False
    return is_dataclass(member.definition) or bool(component_bases((member,)))


def choices(types: tuple[Type, ...]) -> dict[str, str]:
    """Return the words that are valid for an annotation, with their meaning, without `null`."""
    texts: dict[str, str] = {}
    for member in types:
        if member.definition is not None and is_enum(member.definition):
            texts |= members_of(member.definition)
    for base in component_bases(types):
        words = words_of(base)
        if len(words) > 1 or any(cls.path != base.path for cls in words.values()):
            texts |= {word: first_sentence(docstring(cls)) for word, cls in words.items()}
    return texts


def class_of_word(word: str, types: tuple[Type, ...], where: str) -> Definition | None:
    """Return the class that a word selects in a field with these types.

    Args:
        word: An identifier.
        types: Members of the annotation of the field.
        where: Config key, for messages.

    Returns:
        The class; None if the annotation has no component class, or a single one without variants and with another
        name. In these cases, the word is an ordinary value of the wrong type.

    Raises:
        ConfigError: the annotation has variants, and this word is not one of them.
    """
    bases = component_bases(types)
    packages = (PACKAGES[base.path] for base in bases if base.path in PACKAGES)
    if (definition := next(filter(None, (of_module(package, word) for package in packages)), None)) is not None:
        return definition  # without reading the other modules
    known = {name: definition for base in bases for name, definition in words_of(base).items()}
    if word in known:
        return known[word]
    if len(known) < 2 and {definition.path for definition in known.values()} <= {base.path for base in bases}:
        return None
    valid = [*known, *([NONE] if known and "None" in [member.name for member in types] else [])]
    own = f"{where}.{TARGET}=MODULE.CLASS selects your own class"
    raise ConfigError(f"{where}: unknown choice {word!r}{suggest(word, valid)}; {own}")
