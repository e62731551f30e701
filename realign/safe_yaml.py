"""Read YAML of other people: an alias (`*name`) repeats a node, so a few lines can stand for 10^9 values."""

from __future__ import annotations

from itertools import chain
from typing import Any

import yaml

MOST_NODES = 100_000
"""Limit of the values in one text, where an alias counts as all values it repeats."""
LONGEST = 1_000_000
"""Limit of the characters of one text."""


def load_yaml(text: str) -> Any:
    """Return the value of a YAML text, as `yaml.safe_load` does.

    Raises:
        yaml.YAMLError: the text is too large (see `check_yaml`), or no valid YAML; also for dates and numbers that
            Python cannot represent.
    """
    check_yaml(text)
    try:
        return yaml.safe_load(text)
    except (ValueError, OverflowError, RecursionError) as error:
        raise yaml.YAMLError(f"a value cannot be read: {error}") from error


def check_yaml(text: str) -> None:
    """Check the size of a YAML text, before a reader repeats the nodes of its aliases.

    Raises:
        yaml.YAMLError: the text is longer than `LONGEST`, has more values than `MOST_NODES`, or an alias contains
            itself; or it is no valid YAML.
    """
    if len(text) > LONGEST:
        raise yaml.YAMLError(f"the text has {len(text):,} characters; at most {LONGEST:,} are allowed")
    if "*" not in text:
        return
    try:
        # Composing is safe: an alias is a reference to its node. Only making values of the nodes repeats them.
        root = yaml.compose(text, Loader=yaml.SafeLoader)
        count = 0 if root is None else _count(root, {})
    except RecursionError as error:
        raise yaml.YAMLError("the values are nested too deeply") from error
    if count > MOST_NODES:
        raise yaml.YAMLError(f"the aliases (*name) repeat too many values; at most {MOST_NODES:,} are allowed")


def _count(node: yaml.Node, counts: dict[int, int]) -> int:
    """Return the number of values below a node, without visiting a repeated node twice."""
    if (known := counts.get(id(node))) is not None:
        if known == 0:
            raise yaml.YAMLError("an alias (*name) contains itself")
        return known
    counts[id(node)] = 0  # being counted
    below = () if isinstance(node, yaml.ScalarNode) else node.value
    parts = chain.from_iterable(below) if isinstance(node, yaml.MappingNode) else below
    counts[id(node)] = count = 1 + sum(_count(part, counts) for part in parts)
    return count


__all__ = ["check_yaml", "load_yaml"]
