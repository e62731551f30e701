"""Grids of parameters: few cases in most selections of tests, all combinations in the slowest one."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pytest

REST = (pytest.mark.slow, pytest.mark.very_slow)
"""Marks of the cases of a grid that repeat what its other cases test."""


def pairwise(*axes: Sequence[Any]) -> list[Any]:
    """Return all combinations of the values. They are very slow, except for some with which any two values of two
    axes occur together.

    Most errors depend on one or two settings, so these combinations detect nearly all that the whole grid detects.
    """
    sizes = [range(len(axis)) for axis in axes]
    pairs = {cell: {*itertools.combinations(enumerate(cell), 2)} for cell in itertools.product(*sizes)}
    missing, chosen = set().union(*pairs.values()), set()
    while missing:
        best = max(pairs, key=lambda cell: len(pairs[cell] & missing))
        missing -= pairs[best]
        chosen.add(best)
    return [
        pytest.param(*(axis[i] for axis, i in zip(axes, cell, strict=True)), marks=() if cell in chosen else REST)
        for cell in pairs
    ]


def each_once(cases: Iterable[tuple[Any, ...]], shared: Callable[..., str | None]) -> list[Any]:
    """Return all cases, with numbered ids. Of those whose value of `shared` is equal, one is not very slow: the
    first, the second, and so on in turn. Cases whose value is None never are.
    """
    listed = list(cases)
    groups: dict[str, list[int]] = {}
    for i, case in enumerate(listed):
        if (key := shared(*case)) is not None:
            groups.setdefault(key, []).append(i)
    rest = {i for turn, members in enumerate(groups.values()) for i in members if i != members[turn % len(members)]}
    return [
        pytest.param(*case, id=f"{case[0].__name__}-{i}", marks=REST if i in rest else ())
        for i, case in enumerate(listed)
    ]


def rotating(first: Iterable[Any], second: Iterable[Any]) -> list[Any]:
    """Return all combinations of two axes. They are very slow, except for as few as contain every value of both."""
    ours, theirs = list(first), list(second)
    longer, shorter = len(max(ours, theirs, key=len)), len(min(ours, theirs, key=len))
    chosen = {(k, k % shorter) if len(ours) >= len(theirs) else (k % shorter, k) for k in range(longer)}
    return [
        pytest.param(a, b, marks=() if (i, j) in chosen else REST)
        for i, a in enumerate(ours)
        for j, b in enumerate(theirs)
    ]


def in_turn(places: Sequence[str], names: Sequence[str]) -> list[Any]:
    """Return cases of a place and some names, all of them slow: the first name in every place, and each other name in
    one place, or more if there are more places. What each place leaves out is a case of its own that is very slow.
    """
    first, *others = names
    cases = []
    for i, place in enumerate(places):
        own = others[i % len(others) :: len(places)]
        left = tuple(name for name in others if name not in own)
        cases.append(pytest.param(place, (first, *own), id=place, marks=pytest.mark.slow))
        if left:
            cases.append(pytest.param(place, left, id=f"{place}, all others", marks=REST))
    return cases
