"""Access to nested mappings of plain values by path."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

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
    """Merge nested mappings into `lower`, in place. Values of `upper` have precedence, unless they are missing."""
    for key, value in upper.items():
        if value == "???" and key in lower:
            continue
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
