"""Nested mappings by path, as plain values and as the nodes of a file that OmegaConf loaded."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from omegaconf import DictConfig, flag_override

Path = tuple[str, ...]
"""The names of a dotted key."""
MISSING = object()
"""A default that no config holds."""


def get(node: Any, path: Path, default: Any = None) -> Any:
    """The value at a path of nested mappings, or the default."""
    for name in path:
        if not isinstance(node, dict) or name not in node:
            return default
        node = node[name]
    return node


def has(node: Any, path: Path) -> bool:
    """Whether nested mappings have a path."""
    return get(node, path, MISSING) is not MISSING


def remove(node: Any, path: Path) -> None:
    """Remove a path of nested mappings, if it is there."""
    if isinstance(parent := get(node, path[:-1]), dict):
        parent.pop(path[-1], None)


def merge(lower: dict[str, Any], upper: Mapping[str, Any]) -> None:
    """Lay nested mappings over others, in place."""
    for key, value in upper.items():
        if isinstance(value, dict):
            below = lower.get(key)
            lower[key] = dict(below) if isinstance(below, dict) else {}
            merge(lower[key], value)
        else:
            lower[key] = value


def leaves(node: Any, path: Path) -> Iterator[tuple[Path, Any]]:
    """Path and value of everything below a node that is no mapping with entries."""
    if isinstance(node, dict) and node:
        for key, value in node.items():
            yield from leaves(value, (*path, str(key)))
    else:
        yield path, node


def node_at(config: Any, path: Path) -> Any:
    """The node at a path of a file, not followed through interpolations; None where there is none."""
    for name in path:
        if (
            not isinstance(config, DictConfig)
            or config._is_none()
            or config._is_interpolation()
            or config._is_missing()
        ):
            return None
        config = config._get_node(name)
    return config


def delete_leaf(config: DictConfig, path: Path, top: int) -> None:
    """Remove a leaf of a file, and the mappings above it, down to the depth `top`, that it leaves empty."""
    with flag_override(config, ["struct", "readonly"], False):
        for depth in range(len(path), top - 1, -1):
            parent = node_at(config, path[: depth - 1])
            if depth < len(path) and len(parent[path[depth - 1]]):
                return
            del parent[path[depth - 1]]
