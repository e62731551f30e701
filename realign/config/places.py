"""Places of the config: keys that can contain a component, and the class of this component.

The class follows from the classes of the parent keys. Classes are imported only when needed.
"""

from __future__ import annotations

import collections.abc
import dataclasses
import inspect
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import cached_property
from types import MappingProxyType
from typing import Any, NamedTuple, get_args, get_origin, get_type_hints

from realign.config.errors import ConfigError
from realign.config.targets import import_target, misfit
from realign.config.words import class_of_word, import_path, members
from realign.settings import SETTING_OF


class Root(NamedTuple):
    """A root key of the config that contains components."""

    kind: str
    """Import path of the class, protocol or return type of its components."""
    default: str | None = None
    """Import path of the class to use without `_target_`."""
    per_role: bool = False
    """Whether the root key maps names to components."""


ROOTS: Mapping[str, Root] = MappingProxyType(
    {
        "models": Root("realign.runtime.experiment.ModelSpec", "realign.engines.TransformersModel", per_role=True),
        "interfaces": Root("realign.api.ModelInterface", per_role=True),
        "graph": Root("realign.api.DataflowGraph"),
        "sync": Root("realign.api.Sync", "realign.api.Sync", per_role=True),
        "data": Root("realign.data.DataSpec"),
        "dynamic_sampling": Root("realign.runtime.DynamicSampling", "realign.runtime.DynamicSampling"),
        "evaluation": Root("realign.runtime.evaluation.base.Evaluator", "realign.runtime.Evaluation"),
        "evaluations": Root("realign.runtime.evaluation.base.Evaluator", "realign.runtime.Evaluation", per_role=True),
        "calibration": Root("realign.runtime.RewardCalibration", "realign.runtime.RewardCalibration"),
        "trackers": Root("realign.runtime.metrics.trackers.TrackerSpec", per_role=True),
        "callbacks": Root("realign.api.callback.Callback", per_role=True),
        "runtime": Root("realign.runtime.RuntimeSpec", "realign.runtime.RuntimeSpec"),
        "rollout": Root("realign.runtime.RolloutSpec", "realign.runtime.RolloutSpec"),
    }
)


class Field(NamedTuple):
    """Annotation and default of a field."""

    annotation: Any
    default: Callable[[], Any]
    setting_of: str | None = None
    """Import path of the class that has this setting, if the class with the field accepts only its default."""


class Place:
    """A config key that can contain a component. Imports classes only when needed."""

    def __init__(self, key: str, declared: Callable[[], tuple[Any, Any]], is_root: bool = False) -> None:
        """Store the full key, a function that returns annotation and default value, and whether this is a root key."""
        self.key = key
        self.is_root = is_root
        self._declared = declared

    @cached_property
    def declared(self) -> tuple[Any, Any]:
        """The annotation and the default value; both are None if they are unknown."""
        with suppress(Exception):  # building the component reports its errors
            return self._declared()
        return None, None

    def chosen(self, target: Any) -> Any:
        """Return the class (or graph function) that a `_target_` selects here; None as target selects the default.

        Returns:
            The class; None if it is unknown or of the wrong kind, which building reports.
        """
        annotation, default = self.declared
        if annotation is None:
            return None
        if target is None and isinstance(default, str):
            target = default
        if target is not None:
            with suppress(ConfigError):
                found = import_target(target, self.key)
                return found if any(_is_a(found, kind) for kind in members(annotation)) else None
            return None
        if dataclasses.is_dataclass(default) and not isinstance(default, type):
            return type(default)
        kinds = [kind for kind in members(annotation) if inspect.isclass(kind) and dataclasses.is_dataclass(kind)]
        return kinds[0] if len(kinds) == 1 else None

    def fields(self, target: Any) -> dict[str, Field] | None:
        """Return the fields of the class that a `_target_` selects here; None if they cannot be read."""
        cls = self.chosen(target)
        with suppress(Exception):  # building reports errors, as in `declared`
            return None if cls is None else fields_of(cls)
        return None

    def settings(self, target: Any) -> dict[str, Field] | None:
        """Return `fields` without those that are settings of another class."""
        fields = self.fields(target)
        return fields and {name: field for name, field in fields.items() if field.setting_of is None}

    def of_word(self, word: str) -> str | None:
        """Return the import path of the class that a word selects here; None if this place accepts no words.

        Raises:
            ConfigError: the place accepts words, and this word is not one of them.
        """
        cls = class_of_word(word, self.declared[0], self.key)
        return None if cls is None else import_path(cls)

    def child(self, name: str, target: Any) -> Place:
        """Return the place of a field.

        Args:
            name: Name of the field.
            target: `_target_` of the component at this place; None selects the default.
        """
        return Place(f"{self.key}.{name}", lambda: self._field(name, target))

    def _field(self, name: str, target: Any) -> tuple[Any, Any]:
        annotation, default = self.declared
        if get_origin(annotation) in (dict, collections.abc.Mapping):
            return get_args(annotation)[1], (default or {}).get(name)
        cls = self.chosen(target)
        field = fields_of(cls).get(name)
        if field is None:
            return None, None
        inherits = target is None and type(default) is cls  # fields override those of the default value
        return field.annotation, getattr(default, name, None) if inherits else field.default()


def place_of(path: tuple[str, ...]) -> Place:
    """Return the root place at a path, such as `("data",)` or `("models", "actor")`."""
    root = ROOTS[path[0]]
    return Place(".".join(path), lambda: (import_target(root.kind, path[0]), root.default), is_root=True)


def fields_of(cls: Any) -> dict[str, Field]:
    """Return the fields of a dataclass, or the parameters of a graph function, by name."""
    if inspect.isclass(cls) and dataclasses.is_dataclass(cls):
        hints = get_type_hints(cls)
        return {
            f.name: Field(hints[f.name], _default_of(f), f.metadata.get(SETTING_OF))
            for f in dataclasses.fields(cls)
            if f.init
        }
    if inspect.isfunction(cls):
        hints = get_type_hints(cls)
        parameters = inspect.signature(cls).parameters.values()
        return {
            p.name: Field(hints.get(p.name, Any), lambda p=p: None if p.default is p.empty else p.default)  # type: ignore[misc]
            for p in parameters
        }
    return {}


def _default_of(field: dataclasses.Field[Any]) -> Callable[[], Any]:
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory
    return lambda: None if field.default is dataclasses.MISSING else field.default


def _is_a(found: Any, kind: Any) -> bool:
    if inspect.isfunction(found):
        return get_type_hints(found).get("return") is kind
    if kind is Any:
        return inspect.isclass(found) and dataclasses.is_dataclass(found)
    return inspect.isclass(found) and kind is not type(None) and misfit(found, kind) is None
