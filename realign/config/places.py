"""Places of the config: which class a key holds, found from the classes above it and imported only when asked."""

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


class Root(NamedTuple):
    """A root key of the config that holds components."""

    kind: str
    """Import path of the class, protocol or return type that its components have."""
    default: str | None = None
    """Import path of the class where no `_target_` is given."""
    per_role: bool = False
    """Whether it maps names to components."""


ROOTS: Mapping[str, Root] = MappingProxyType(
    {
        "models": Root("realign.runtime.experiment.ModelSpec", "realign.engines.TransformersModel", per_role=True),
        "interfaces": Root("realign.api.ModelInterface", per_role=True),
        "graph": Root("realign.api.DataflowGraph"),
        "sync": Root("realign.api.Sync", "realign.api.Sync", per_role=True),
        "data": Root("realign.data.DataSpec"),
        "dynamic_sampling": Root("realign.runtime.DynamicSampling", "realign.runtime.DynamicSampling"),
        "evaluation": Root("realign.runtime.evaluation.base.Evaluator", "realign.runtime.Evaluation"),
        "calibration": Root("realign.runtime.RewardCalibration", "realign.runtime.RewardCalibration"),
        "trackers": Root("realign.runtime.metrics.trackers.TrackerSpec", per_role=True),
        "runtime": Root("realign.runtime.RuntimeSpec", "realign.runtime.RuntimeSpec"),
        "rollout": Root("realign.runtime.RolloutSpec", "realign.runtime.RolloutSpec"),
    }
)


class Field(NamedTuple):
    """What a class says about one of its fields."""

    annotation: Any
    default: Callable[[], Any]


class Place:
    """A key that can hold a component; reads classes only when a question needs them."""

    def __init__(self, key: str, declared: Callable[[], tuple[Any, Any]], is_root: bool = False) -> None:
        """Args: the full key; gives the annotation and the default value (None: none); whether it is a root place."""
        self.key = key
        self.is_root = is_root
        self._declared = declared

    @cached_property
    def declared(self) -> tuple[Any, Any]:
        """The annotation and the default value; two `None`s where they cannot be known."""
        with suppress(Exception):  # building the component reports whatever is wrong with it
            return self._declared()
        return None, None

    def chosen(self, target: Any) -> Any:
        """The class (or graph function) that stands here under a `_target_`, or by default under None.

        Returns:
            None if it cannot be known, or is not of the kind that the place asks for: building reports that.
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
        """The fields of the class that stands here under a `_target_`; None if they cannot be read."""
        cls = self.chosen(target)
        with suppress(Exception):  # as above
            return None if cls is None else fields_of(cls)
        return None

    def of_word(self, word: str) -> str | None:
        """The import path that a word means here; None where no component can be chosen by word.

        Raises:
            ConfigError: the place takes words, and this is none of them.
        """
        cls = class_of_word(word, self.declared[0], self.key)
        return None if cls is None else import_path(cls)

    def child(self, name: str, target: Any) -> Place:
        """The place of a field.

        Args:
            name: of the field.
            target: the `_target_` that stands at this place; None: the default.
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
        inherits = target is None and type(default) is cls  # fields are laid over the value that stands there
        return field.annotation, getattr(default, name, None) if inherits else field.default()


def place_of(path: tuple[str, ...]) -> Place:
    """The root place at a path: `("data",)`, `("models", "actor")`."""
    root = ROOTS[path[0]]
    return Place(".".join(path), lambda: (import_target(root.kind, path[0]), root.default), is_root=True)


def fields_of(cls: Any) -> dict[str, Field]:
    """The fields of a dataclass, or the parameters of a graph function, by name."""
    if inspect.isclass(cls) and dataclasses.is_dataclass(cls):
        hints = get_type_hints(cls)
        return {f.name: Field(hints[f.name], _default_of(f)) for f in dataclasses.fields(cls) if f.init}
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
