"""Test that the defaults in the tables of docs/algorithms and docs/security.md are those of the settings."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from functools import reduce
from pathlib import Path
from typing import Any

import pytest

from realign.config.words import snake_case
from realign.interfaces.components import GAE, Clip, ImportanceCorrection
from realign.interfaces.dpo import DPOInterface
from realign.interfaces.grpo import GRPOActorInterface
from realign.interfaces.ilql import ILQLInterface
from realign.interfaces.kto import KTOInterface
from realign.interfaces.ppo import PPOActorInterface
from realign.interfaces.raft import RAFTActorInterface
from realign.interfaces.reward_model import RewardModelInterface
from realign.interfaces.rft import RFTActorInterface
from realign.interfaces.rule_reward import RuleRewardInterface

DOCS = Path(__file__).parents[2] / "docs"
VARIANTS = {"clip": Clip, "gae": GAE}
# The settings of each table with a column of defaults, in the order of the page.
TABLES: dict[str, list[Any]] = {
    "ppo": [PPOActorInterface()],
    "grpo": [GRPOActorInterface()],
    "decoupled_ppo": [ImportanceCorrection()],
    "dpo": [DPOInterface()],
    "ilql": [ILQLInterface()],
    "kto": [KTOInterface()],
    "raft": [RAFTActorInterface(), RFTActorInterface()],
    "reward_model": [RewardModelInterface()],
}


@dataclass(frozen=True)
class Default:
    """A default that a table states."""

    page: str
    owner: Any
    path: str
    want: str

    def __str__(self) -> str:
        return f"{self.page}-{type(self.owner).__name__}-{self.path}"

    @property
    def settings(self) -> Any:
        """The settings that have the field."""
        return reduce(getattr, self.path.split(".")[:-1], self.owner)

    @property
    def found(self) -> Any:
        """The default of the field."""
        return getattr(self.settings, self.path.rpartition(".")[2])


def tables(text: str) -> Iterator[list[list[str]]]:
    """Yield the rows of each table with a column of defaults, the header first."""
    for table in re.findall(r"(?:^\|.*\n)+", text, re.MULTILINE):
        rows = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in table.splitlines()]
        if "default" in rows[0]:
            yield [rows[0], *rows[2:]]


def defaults() -> Iterator[Default]:
    for page, owners in TABLES.items():
        page_tables = list(tables((DOCS / "algorithms" / f"{page}.md").read_text(encoding="utf-8")))
        for owner, (header, *rows) in zip(owners, page_tables, strict=False):  # later tables are not about an interface
            for row in rows:
                names = re.findall(r"`([\w.]+)`", row[0])
                variants = re.search(r" \(([\w, ]+)\)$", row[0])  # not the address of a link
                values = row[header.index("default")].split(", ")
                assert len(names) == len(values), row
                for name, value in zip(names, values, strict=True):
                    for variant in variants[1].split(", ") if variants else [""]:
                        yield of(page, owner, name, variant, value)
    for name, value in re.findall(r"^\|[^|]*\| `(\w+): (\w+)`", (DOCS / "security.md").read_text(), re.MULTILINE):
        yield Default("security", RuleRewardInterface("module:function"), name, value)


def of(page: str, owner: Any, name: str, variant: str, value: str) -> Default:
    if variant in VARIANTS:
        return Default(page, VARIANTS[variant](), name.partition(".")[2], value)
    return Default(page, owner, name, value)


def same(value: Any, want: str) -> bool:
    """Return whether a setting has the value of a table: a number, a word, or `n: 8` for a field of the setting."""
    field, colon, rest = want.strip("`").partition(": ")
    if colon:
        return same(getattr(value, field), rest)
    if value is None or isinstance(value, bool | Enum | str):
        return want == {None: "null", True: "true", False: "false"}.get(value, value)
    return float(want) == value if isinstance(value, int | float) else want == snake_case(type(value).__name__)


STATED = [each for each in defaults() if each.want != "required"]


@pytest.mark.parametrize("stated", STATED, ids=str)
def test_a_default_in_a_table_is_that_of_the_setting(stated):
    assert same(stated.found, stated.want), f"{stated}: the table states {stated.want}, found {stated.found}"


def test_the_tables_of_every_algorithm_are_compared():
    assert {each.page for each in STATED} == {*TABLES, "security"}
    assert {type(each.settings) for each in STATED} >= {*VARIANTS.values(), RFTActorInterface, RuleRewardInterface}
