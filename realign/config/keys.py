"""Find config keys by the end of their name, in the shipped experiments."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from realign.config.errors import ConfigError, nearest
from realign.config.files import file_values
from realign.config.index import Find, class_at
from realign.config.places import ROOTS, Place, place_of
from realign.config.trees import get
from realign.config.words import TARGET, is_word

FIRST = ("grpo", "ppo", "sft", "dpo", "reward_model")
"""Experiments in which a key is looked up first, if the command line names no experiment."""
DEPTH = 5
"""Levels of keys in which a single name is searched."""


def find_keys(name: str, most: int = 5) -> list[str]:
    """Return keys that end with `name`, such as `lr` or `generation.n`, in the first experiments that have one."""
    for experiment in FIRST:
        if named := [key for key in _all_keys(experiment) if f".{key}".endswith(f".{name}")]:
            return sorted(named, key=lambda key: key.count("."))[:most]
    return []


def suggest_keys(name: str, most: int = 3) -> list[str]:
    """Return the keys that a name without its beginning most likely means; empty if there are none.

    It can be an end of a key, also misspelt, or begin with a name inside of one, such as `kl.coef`.
    """
    keys = find_keys(name, most)
    first, _, last = name.rpartition(".")
    if not keys and first:
        keys = find_keys(first, 1) and [f"{key}.{last}" for key in find_keys(first, 1)]
    ends = {key.rpartition(".")[2] for experiment in FIRST for key in _all_keys(experiment)}
    near = None if keys or first else nearest(name, ends)
    return keys if near is None else find_keys(near, most)


def _all_keys(experiment: str) -> list[str]:
    config = file_values([f"experiment={experiment}"])
    return [key for path in component_paths(config) for key in (".".join(path), *_keys_below(path, config))]


def component_paths(config: Mapping[str, Any]) -> Iterator[tuple[str, ...]]:
    """Yield the paths of the root components: those of roles first."""
    for root in ROOTS:
        if ROOTS[root].per_role:
            yield from ((root, role) for role in config.get(root) or {})
    yield from ((root,) for root in ROOTS if not ROOTS[root].per_role)


def _keys_below(path: tuple[str, ...], config: Mapping[str, Any], depth: int = DEPTH) -> Iterator[str]:
    """Yield the keys below a component, to the given number of levels."""
    waiting: list[tuple[Place, Any, int]] = [(*component_at(path, config), depth)]
    while waiting:
        place, target, left = waiting.pop()
        for name in place.fields(target) or ():
            child, below = step_into(place, target, name, config)
            yield child.key
            if left > 1 and (cls := child.class_of(below)) is not None and cls.is_dataclass:
                waiting.append((child, below, left - 1))


def component_at(path: tuple[str, ...], config: Mapping[str, Any], find: Find = class_at) -> tuple[Place, Any]:
    """Return the place of a root component, and its `_target_`."""
    place = place_of(path, find)
    return place, _target_of(place, get(config, path))


def step_into(place: Place, target: Any, name: str, config: Mapping[str, Any]) -> tuple[Place, Any]:
    """Return the place of a field, and its `_target_`."""
    child = place.child(name, target)
    return child, _target_of(child, get(config, tuple(child.key.split("."))))


def _target_of(place: Place, node: Any) -> Any:
    if isinstance(node, Mapping):
        return node.get(TARGET)
    if is_word(node):
        try:
            return place.of_word(node)
        except ConfigError:
            return None
    return None
