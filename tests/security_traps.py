"""What a config from somebody else might name; importing this file is harmless, which the tests count."""

from __future__ import annotations

import pathlib
from dataclasses import dataclass
from typing import Any

IMPORTED = [True]
MADE: list[str] = []


class Made:
    """Says when it is made."""

    def __init__(self, **_: Any) -> None:
        MADE.append(type(self).__name__)


class MadeBeforeInit:
    """As `pathlib.Path`: what happens when it is made does not happen in `__init__`."""

    def __new__(cls) -> MadeBeforeInit:
        MADE.append(cls.__name__)
        return super().__new__(cls)

    def open(self, name: str, output_dir: pathlib.Path) -> None:
        """As a tracker has it."""


@dataclass
class Component:
    """A dataclass, but of no kind that an experiment has."""

    def __post_init__(self) -> None:
        MADE.append(type(self).__name__)


@dataclass
class Tracker:
    """What may stand under trackers."""

    folder: str | None = None

    def open(self, name: str, output_dir: pathlib.Path) -> None:
        """Start a record."""


def function(**_: Any) -> None:
    """Says when it is called."""
    MADE.append("function")
