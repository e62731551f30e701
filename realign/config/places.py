"""Places of the config: keys that can contain a component, and the class of this component.

The class follows from the classes of the parent keys. Words at the root of a component, such as
`interfaces.actor=grpo`, become import paths here, in files and on the command line alike.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import cached_property
from types import MappingProxyType
from typing import Any, NamedTuple

from realign.config.classes import Class, Field, Type
from realign.config.construct import misfit
from realign.config.errors import ConfigError, nearest
from realign.config.index import Find, class_at, loaded, object_at
from realign.config.words import ENDINGS, TARGET, class_of_word, is_word, not_of, words_of


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
        "models": Root("realign.api.ModelSpec", "realign.engines.TransformersModel", per_role=True),
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
    """A config key that can contain a component."""

    def __init__(self, key: str, declared: Callable[[], Field], find: Find = class_at, is_root: bool = False) -> None:
        """Store the full key, and what declares it.

        Args:
            key: Full key.
            declared: Function that returns the field. Most places of a tree are only passed through.
            find: Function that returns the class at an import path.
            is_root: Whether this is a root key, or the role of one.
        """
        self.key = key
        self.is_root = is_root
        self._declared = declared
        self._find = find

    @cached_property
    def field(self) -> Field:
        """The field that the key sets; without types if it is unknown."""
        return self._declared()

    def class_of(self, target: Any) -> Class | None:
        """Return the class (or graph function) that a `_target_` selects here; None as target selects the default.

        Returns:
            The class; None if it is unknown or of the wrong kind, which building reports.
        """
        _, types, default, *_ = self.field
        if target is None and self.key == "graph":  # then it follows from the interfaces
            return None
        if target is None and isinstance(default, Mapping):
            target = default.get(TARGET)
        if target is not None:
            if is_word(target):
                with suppress(ConfigError):  # building the component reports it
                    target = self.of_word(target) or target
            cls = self._find(target) if isinstance(target, str) else None
            return cls if cls is not None and any(fits(cls, kind) for kind in types) else None
        kinds = [cls for kind in types if (cls := class_at(kind.path)) is not None and cls.is_dataclass]
        return kinds[0] if len(kinds) == 1 else None

    def fields(self, target: Any) -> Mapping[str, Field] | None:
        """Return the fields of the class that a `_target_` selects here; None if it is unknown."""
        cls = self.class_of(target)
        return None if cls is None else cls.fields

    def of_related(self, name: str, target: Any) -> str:
        """Return the message about an unknown field that choices with a common base class have; empty if none has."""
        cls = self.class_of(target)
        kinds = [kind for member in self.field.types if (kind := class_at(member.path)) is not None]
        common = {*cls.bases}.difference(*((kind.path, *kind.bases) for kind in kinds)) if cls is not None else set()
        choices = (choice for kind in kinds for found in words_of(kind).values() for choice in found)
        return not_of(cls, f"{self.key}.{name}", (c for c in choices if common & {c.path, *c.bases})) if cls else ""

    def of_word(self, word: str) -> str | None:
        """Return the import path of the class that a word selects here; None if this place accepts no words.

        Raises:
            ConfigError: the place accepts words, and this word is not one of them.
        """
        cls = class_of_word(word, self.field.types, self.key)
        return None if cls is None else cls.path

    def child(self, name: str, target: Any) -> Place:
        """Return the place of a field.

        Args:
            name: Name of the field.
            target: `_target_` of the component at this place; None selects the default.
        """
        return Place(f"{self.key}.{name}", lambda: self._field(name, target), self._find)

    def _field(self, name: str, target: Any) -> Field:
        _, types, default, *_ = self.field
        given = default if isinstance(default, Mapping) else {}
        if len(types) == 1 and types[0].name in ("dict", "Mapping") and len(types[0].arguments) == 2:
            return Field(name, types[0].arguments[1], given.get(name), False, "")
        own = (self.fields(target) or {}).get(name)
        if own is None:
            return Field(name, (), None, False, "")
        # What the default of the component sets precedes the default of its class.
        return own._replace(default=given[name], required=False) if target is None and name in given else own


def schema() -> Class:
    """Return the class of the root keys."""
    cls = class_at("realign.config.experiment.ExperimentConfig")
    assert cls is not None
    return cls


def place_of(path: tuple[str, ...], find: Find = class_at) -> Place:
    """Return the root place at a path, such as `("data",)` or `("models", "actor")`.

    Args:
        path: Names of the key.
        find: As for `Place`.
    """
    if path[0] not in ROOTS:
        return Place(path[0], lambda: schema().fields[path[0]])
    root = ROOTS[path[0]]
    kind = class_at(root.kind)
    assert kind is not None
    default = None if root.default is None else {TARGET: root.default}
    field = Field(path[-1], (Type(kind.name, kind.path),), default, False, "")
    return Place(".".join(path), lambda: field, find, is_root=True)


def spell_out(values: Mapping[str, Any]) -> None:
    """Replace the words of a layer for root components, alone or as a `_target_`, by import paths.

    Raises:
        ConfigError: a word resembles one of the key. The message names that one.
    """
    for root in ROOTS:
        node = values.get(root)
        below = node if ROOTS[root].per_role else {root: node}
        owner: Any = node if ROOTS[root].per_role else values
        for name, component in list(below.items()) if isinstance(below, Mapping) else ():
            given = component if isinstance(component, Mapping) else {TARGET: component}
            path = (root, str(name)) if ROOTS[root].per_role else (root,)
            if (target := _of_word(path, given.get(TARGET))) is not None:
                owner[name] = {**given, TARGET: target}


def _of_word(path: tuple[str, ...], word: Any) -> str | None:
    """Return the import path for a word of a root component; None for another value, or a key without such words."""
    base = class_at(ROOTS[path[0]].kind)
    if base is None or not is_word(word) or not (ROOTS[path[0]].by_word or base.path in ENDINGS):
        return None
    with suppress(ConfigError):
        return place_of(path).of_word(word)
    if near := nearest(word, words_of(base)):
        raise ConfigError(f"{'.'.join(path)}: unknown choice {word!r}; did you mean {near!r}?")
    return None


def fits(cls: Class, kind: Type) -> bool:
    """Return whether a class, or what a function returns, is of a kind."""
    if cls.returns is not None:
        return cls.returns == kind.path
    if kind.name == "Any":
        return cls.is_dataclass
    base = class_at(kind.path)
    if base is None or base in (cls, *map(Class, cls.bases)):
        return base is not None and not cls.is_abstract
    # A user's class of which only the source was read stays unimported, so a protocol accepts it if it is imported.
    own = object_at(cls.path) if cls.is_shipped else loaded(cls.path)
    return base.is_protocol and misfit(own, object_at(base.path)) is None
