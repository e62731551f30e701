"""Access to nested mappings by path, for plain values and for OmegaConf nodes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from omegaconf import DictConfig, flag_override

Path = tuple[str, ...]
"""Names of a dotted key."""
MISSING = object()
"""Default that differs from every config value."""


def get(node: Any, path: Path, default: Any = None) -> Any:
    """Return the value at a path of nested mappings, or the default."""
    for name in path:
        if not isinstance(node, dict) or name not in node:
            return default
        node = node[name]
    return node


def has(node: Any, path: Path) -> bool:
    """Return whether nested mappings contain a path."""
    return get(node, path, MISSING) is not MISSING


def remove(node: Any, path: Path) -> None:
    """Remove a path of nested mappings, if it exists."""
    if isinstance(parent := get(node, path[:-1]), dict):
        parent.pop(path[-1], None)


def merge(lower: dict[str, Any], upper: Mapping[str, Any]) -> None:
    """Merge nested mappings into `lower`, in place. Values of `upper` have precedence."""
    for key, value in upper.items():
        if isinstance(value, dict):
            below = lower.get(key)
            lower[key] = dict(below) if isinstance(below, dict) else {}
            merge(lower[key], value)
        else:
            lower[key] = value


def leaves(node: Any, path: Path) -> Iterator[tuple[Path, Any]]:
    """Yield path and value of every leaf below a node. An empty mapping is a leaf."""
    if isinstance(node, dict) and node:
        for key, value in node.items():
            yield from leaves(value, (*path, str(key)))
    else:
        yield path, node


def node_at(config: Any, path: Path) -> Any:
    """Return the node at a path of a file, without resolving interpolations; None if there is none."""
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
    """Remove a leaf of a file, and its parent mappings of at least depth `top` that become empty."""
    with flag_override(config, ["struct", "readonly"], False):
        for depth in range(len(path), top - 1, -1):
            parent = node_at(config, path[: depth - 1])
            if depth < len(path) and len(parent[path[depth - 1]]):
                return
            del parent[path[depth - 1]]
