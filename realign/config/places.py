"""Places of the config: keys that can contain a component, and the class of this component.

The class follows from the classes of the parent keys, which are read from source code. Only classes whose source is not
found are imported. Words at the root of a component, such as `interfaces.actor=grpo`, become import paths here.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import cached_property
from types import MappingProxyType
from typing import Any, NamedTuple, TypeAlias

from realign.config.construct import import_target
from realign.config.errors import ConfigError, nearest
from realign.config.inspection import (
    Component,
    Definition,
    Field,
    Type,
    ancestry,
    class_at,
    default_of,
    fields_of,
    is_abstract,
    is_dataclass,
    is_protocol,
    takes_calls_of,
    types_of,
)
from realign.config.words import PACKAGES, TARGET, class_of_word, is_word, words_of

Find: TypeAlias = Callable[[str], Definition | None]
"""Returns the class at an import path."""


class Root(NamedTuple):
    """A root key of the config that contains components."""

    kind: str
    """Import path of the class, protocol or return type of its components."""
    default: str | None = None
    """Import path of the class to use without `_target_`."""
    per_role: bool = False
    """Whether the root key maps names to components."""
    by_word: bool = False
    """Whether a word at the root key chooses a class beside its kind."""


ROOTS: Mapping[str, Root] = MappingProxyType(
    {
        "models": Root("realign.runtime.experiment.ModelSpec", "realign.engines.TransformersModel", per_role=True),
        "interfaces": Root("realign.api.ModelInterface", per_role=True),
        "graph": Root("realign.api.DataflowGraph"),
        "sync": Root("realign.api.Sync", "realign.api.Sync", per_role=True),
        "data": Root("realign.data.DataSpec"),
        "curriculum": Root("realign.data.curriculum.Curriculum", "realign.data.curriculum.PassRate", by_word=True),
        "dynamic_sampling": Root("realign.runtime.DynamicSampling", "realign.runtime.DynamicSampling"),
        "evaluation": Root("realign.runtime.evaluation.base.Evaluator", "realign.runtime.Evaluation"),
        "evaluations": Root("realign.runtime.evaluation.base.Evaluator", "realign.runtime.Evaluation", per_role=True),
        "calibration": Root("realign.runtime.RewardCalibration", "realign.runtime.RewardCalibration"),
        "runtime": Root("realign.runtime.RuntimeSpec", "realign.runtime.RuntimeSpec"),
        "rollout": Root("realign.runtime.RolloutSpec", "realign.runtime.RolloutSpec"),
        "trackers": Root("realign.records.metrics.trackers.TrackerSpec", per_role=True),
        "callbacks": Root("realign.api.callback.Callback", per_role=True),
    }
)


class Place:
    """A config key that can contain a component. Reads source code; only `find` may import."""

    def __init__(
        self,
        key: str,
        declared: Callable[[], tuple[tuple[Type, ...], Any]],
        find: Find = class_at,
        is_root: bool = False,
    ) -> None:
        """Store the full key, and a function that returns types and default value.

        Args:
            key: Full key.
            declared: Function that returns the members of the annotation, and the default.
            find: Function that returns the class at an import path.
            is_root: Whether this is a root key, whose default is an import path.
        """
        self.key = key
        self.is_root = is_root
        self._declared = declared
        self._find = find

    @cached_property
    def declared(self) -> tuple[tuple[Type, ...], Any]:
        """The members of the annotation and the default value; empty and None if they are unknown."""
        return self._declared()

    def chosen(self, target: Any) -> Definition | None:
        """Return the class (or graph function) that a `_target_` selects here; None as target selects the default.

        Returns:
            The class; None if it is unknown or of the wrong kind, which building reports.
        """
        types, default = self.declared
        if target is None and self.key == "graph":  # then it follows from the interfaces
            return None
        target = default if target is None and self.is_root else target
        if target is not None:
            if is_word(target):
                with suppress(ConfigError):  # building the component reports it
                    target = self.of_word(target) or target
            definition = self._find(target) if isinstance(target, str) else None
            return definition if definition is not None and any(fits(definition, kind) for kind in types) else None
        if isinstance(default, Component):
            return default.definition
        kinds = [kind.definition for kind in types if is_dataclass(kind.definition)]
        return kinds[0] if len(kinds) == 1 else None

    def fields(self, target: Any) -> dict[str, Field] | None:
        """Return the fields of the class that a `_target_` selects here; None if it is unknown."""
        definition = self.chosen(target)
        return None if definition is None else fields_of(definition)

    def of_related(self, name: str, target: Any) -> str:
        """Return the message about an unknown field that choices with a common base class have; empty if none has."""
        chosen, kinds = self.chosen(target), [kind.definition for kind in self.declared[0] if kind.definition]
        common = {*ancestry(chosen)[1:]}.difference(*map(ancestry, kinds)) if chosen is not None else set()
        choices = (choice for kind in kinds for choice in words_of(kind).values()) if common else ()
        having = [c.name for c in choices if common & {*ancestry(c)} and name in fields_of(c)]
        key, what = f"{self.key}.{name}", " and ".join(having)
        return f"unknown key {key!r}: it is a setting of {what}, not of {chosen.name}" if chosen and having else ""

    def of_word(self, word: str) -> str | None:
        """Return the import path of the class that a word selects here; None if this place accepts no words.

        Raises:
            ConfigError: the place accepts words, and this word is not one of them.
        """
        definition = class_of_word(word, self.declared[0], self.key)
        return None if definition is None else definition.path

    def child(self, name: str, target: Any) -> Place:
        """Return the place of a field.

        Args:
            name: Name of the field.
            target: `_target_` of the component at this place; None selects the default.
        """
        # Lazily: most places of a tree are only passed through, and reading the types reads modules.
        return Place(f"{self.key}.{name}", lambda: self._field(name, target), self._find)

    def _field(self, name: str, target: Any) -> tuple[tuple[Type, ...], Any]:
        types, default = self.declared
        if len(types) == 1 and types[0].name in ("dict", "Mapping") and len(types[0].arguments) == 2:
            return types[0].arguments[1], default.get(name) if isinstance(default, Mapping) else None
        field = (self.fields(target) or {}).get(name)
        if field is None:
            return (), None
        # fields override those of the default value
        overrides = default.values if target is None and isinstance(default, Component) else {}
        types, default = declared_by(field)
        return types, overrides.get(name, default)


def schema() -> Definition:
    """Return the class of the root keys."""
    definition = class_at("realign.config.experiment.ExperimentConfig")
    assert definition is not None
    return definition


def declared_by(field: Field) -> tuple[tuple[Type, ...], Any]:
    """Return the members of the annotation of a field, and its default."""
    return types_of(field.annotation, field.module), default_of(field)


def place_of(path: tuple[str, ...], find: Find = class_at) -> Place:
    """Return the root place at a path, such as `("data",)` or `("models", "actor")`.

    Args:
        path: Names of the key.
        find: As for `Place`.
    """
    if path[0] not in ROOTS:
        return Place(path[0], lambda: declared_by(fields_of(schema())[path[0]]), find)
    root = ROOTS[path[0]]
    module, _, name = root.kind.rpartition(".")
    return Place(".".join(path), lambda: (types_of(name, module), root.default), find, is_root=True)


_IN_MAPPING = re.compile(rf"(\{{(?:[^{{}}]*,)?\s*{TARGET}:\s*)(\w+)(\s*[,}}].*)", re.DOTALL)
"""A mapping of the command line whose `_target_` is a word."""


def spell_out(values: Mapping[str, Any]) -> None:
    """Replace the words of a file for root components, alone or as a `_target_`, by import paths."""
    for root in ROOTS:
        node = values.get(root)
        below = node if ROOTS[root].per_role else {root: node}
        owner: Any = node if ROOTS[root].per_role else values
        for name, component in list(below.items()) if isinstance(below, Mapping) else ():
            given = component if isinstance(component, Mapping) else {TARGET: component}
            path = (root, str(name)) if ROOTS[root].per_role else (root,)
            if (target := _of_word(path, given.get(TARGET))) is not None:
                owner[name] = {**given, TARGET: target}


def with_target(override: str) -> str:
    """Return an override in which a word for a root component is an import path; others stay as they are.

    A sweep has several words: `interfaces.actor=ppo,grpo`.

    Raises:
        ConfigError: a word resembles one of the key. The message names that one.
    """
    key, _, value = override.partition("=")
    at = key.lstrip("+").removesuffix(f".{TARGET}")
    path = tuple(at.split("."))
    match = _IN_MAPPING.fullmatch(value)
    if match is not None and (target := _of_word(path, match[2])) is not None:
        return f"{key}={match[1]}{target}{match[3]}"
    targets = [_of_word(path, word.strip()) for word in value.split(",")]
    if None not in targets:
        sign = key[: len(key) - len(key.lstrip("+"))]
        return f"{sign}{at}.{TARGET}={','.join(filter(None, targets))}"
    if is_word(value) and (base := _base(path)) is not None and (near := nearest(value, words_of(base))):
        raise ConfigError(f"{at}: unknown choice {value!r}; did you mean {near!r}?")
    return override


def _base(path: tuple[str, ...]) -> Definition | None:
    """Return the base class of a root component that a word chooses; None for other keys."""
    if path[0] not in ROOTS or len(path) != 1 + ROOTS[path[0]].per_role:
        return None
    base = place_of(path).declared[0][0].definition
    if base is None or ROOTS[path[0]].by_word:
        return base
    return base if base.path in PACKAGES and PACKAGES[base.path].ending else None


def _of_word(path: tuple[str, ...], word: Any) -> str | None:
    if _base(path) is None or not is_word(word):
        return None
    with suppress(ConfigError):
        return place_of(path).of_word(word)
    return None


def imported_class_at(path: str) -> Definition | None:
    """Return the class at an import path. Import its module if the class is not found in its source."""
    if (definition := class_at(path)) is None:
        with suppress(ConfigError):  # building the component reports it
            import_target(path, path)
            return class_at(path)
    return definition


def fits(definition: Definition, kind: Type) -> bool:
    """Return whether a class, or what a function returns, is of a kind."""
    if definition.returns is not None:
        returned = types_of(definition.returns, definition.module)[0].definition
        return returned is not None and kind.definition is not None and returned.path == kind.definition.path
    if kind.name == "Any":
        return is_dataclass(definition)
    if kind.definition is None:
        return False
    if is_protocol(kind.definition):
        return takes_calls_of(definition, kind.definition)
    return kind.definition in ancestry(definition) and not is_abstract(definition)
