"""Scopes of reward functions: one call scores a response, a group of responses, or the batch."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from enum import StrEnum
from itertools import groupby
from types import MappingProxyType
from typing import Any

from realign.errors import ConfigError
from realign.rewards.pool.answers import Expected
from realign.rewards.pool.items import Item


class Scope(StrEnum):
    """How many responses a reward function scores in one call; the names of its arguments declare it."""

    response = "response"
    """One response: `(prompt, response, row) -> float | None`."""
    group = "group"
    """All responses to one prompt: `(prompt, responses, row) -> list[float | None]`."""
    batch = "batch"
    """All responses of the batch: `(prompts, responses, rows) -> list[float | None]`, one element per response."""


ARGUMENTS: Mapping[Scope, tuple[str, ...]] = MappingProxyType(
    {
        Scope.response: ("prompt", "response", "row"),
        Scope.group: ("prompt", "responses", "row"),
        Scope.batch: ("prompts", "responses", "rows"),
    }
)
"""Positional arguments of a reward function of each scope."""
_PLURALS = {"prompts", "responses", "rows"}


def scope_of(function: Any, name: str) -> Scope:
    """Return the scope that the names of the function's arguments declare; other names mean one response.

    Raises:
        ConfigError: singular and plural names are mixed.
    """
    try:
        names = tuple(inspect.signature(function).parameters)
    except (TypeError, ValueError):
        return Scope.response  # some functions written in C have no signature
    declared = next((s for s in (Scope.group, Scope.batch) if names[:3] == ARGUMENTS[s]), None)
    if declared is None and _PLURALS & set(names[:3]):
        forms = ", ".join(f"({', '.join(arguments)}) for one {scope}" for scope, arguments in ARGUMENTS.items())
        raise ConfigError(
            f"reward function {name!r} takes ({', '.join(names)}). The names of the first three arguments declare what "
            f"it scores: {forms}."
        )
    return declared or Scope.response


def members_of(scope: Scope, n: int, groups: Sequence[int] | None) -> list[list[int]]:
    """Return the indices of the responses that each call scores.

    Args:
        scope: scope of the function.
        n: number of responses.
        groups: number of the prompt of each response; None: each response has its own prompt.
    """
    if scope is Scope.batch:
        return [list(range(n))] if n else []
    if scope is Scope.group and groups is not None:
        return [list(places) for _, places in groupby(range(n), key=groups.__getitem__)]
    return [[i] for i in range(n)]


def item_of(
    scope: Scope,
    places: Sequence[int],
    prompts: Sequence[str],
    responses: Sequence[str],
    rows: Sequence[Mapping[str, Any]],
) -> Item:
    """Return the call that scores the responses at these indices."""
    first = places[0]
    if scope is Scope.response:
        return Item((prompts[first], responses[first], dict(rows[first])))
    texts, expected = [responses[i] for i in places], Expected(len(places), "response", gaps=True)
    if scope is Scope.group:
        return Item((prompts[first], texts, dict(rows[first])), expected)
    return Item(([prompts[i] for i in places], texts, [dict(rows[i]) for i in places]), expected)
