"""Objects that a malicious config might name. Importing this file is harmless. Tests count the calls of its objects."""

from __future__ import annotations

import pathlib
from dataclasses import dataclass
from typing import Any

IMPORTED = [True]
MADE: list[str] = []


class Made:
    """Records that it was created."""

    def __init__(self, **_: Any) -> None:
        MADE.append(type(self).__name__)


class MadeBeforeInit:
    """Records its creation in `__new__` instead of `__init__`, like `pathlib.Path`."""

    def __new__(cls) -> MadeBeforeInit:
        MADE.append(cls.__name__)
        return super().__new__(cls)

    def open(self, name: str, output_dir: pathlib.Path) -> None:
        """Match the signature of a tracker."""


@dataclass
class Component:
    """Dataclass that is not a component of an experiment."""

    def __post_init__(self) -> None:
        MADE.append(type(self).__name__)


@dataclass
class Tracker:
    """Valid tracker."""

    folder: str | None = None

    def open(self, name: str, output_dir: pathlib.Path) -> None:
        """Match the signature of a tracker."""


def function(**_: Any) -> None:
    """Record that it was called."""
    MADE.append("function")
