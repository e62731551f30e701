"""`Item`: one call of a reward function."""

from __future__ import annotations

from typing import Any, NamedTuple

from realign.rewards.pool.answers import ONE, Expected


class Item(NamedTuple):
    """One call of a reward function: its positional arguments, and what it must return."""

    arguments: tuple[Any, ...]
    expected: Expected = ONE
