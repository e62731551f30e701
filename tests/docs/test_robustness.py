"""Test docs/robustness.md: its tests exist, its defaults are correct, and it lists every tested failure."""

from __future__ import annotations

import ast
import dataclasses
import re
from pathlib import Path

import pytest

from benchmarks.torture.faults import series_of
from realign.data import PromptData
from realign.engines import OptimizerSpec
from realign.interfaces.environment import EnvironmentInterface
from realign.interfaces.rule_reward import RuleRewardInterface
from realign.run_settings import CheckpointSpec

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "robustness.md").read_text(encoding="utf-8")
FAILURES, _, ATTACKS = PAGE.partition("\n## Attacks\n")


def cells(text: str) -> list[list[str]]:
    """Return the cells of all tables in a text."""
    return [
        [cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line.startswith("| ")
    ]


ROWS = cells(FAILURES)
FAULTS = [row for row in ROWS if len(row) == 4 and row[0] != "failure"]
SETTINGS = [row for row in ROWS if len(row) == 3 and row[0] != "setting"]
PLACES = {
    "interfaces.agent": EnvironmentInterface,
    "interfaces.reward": RuleRewardInterface,
    "models.actor.optimizer": OptimizerSpec,
    "data": PromptData,
    "checkpoint": CheckpointSpec,
}


def names_of(file: str) -> set[str]:
    """Return the names of the tests of a file, without `test_`."""
    tree = ast.parse((ROOT / "tests" / file).read_text(encoding="utf-8"))
    names = [node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    return {name.removeprefix("test_") for name in names if name.startswith("test_")}


def named(cell: str) -> list[tuple[str, str]]:
    """Return the (file, test) pairs of a cell."""
    return [(file, name) for file, name in re.findall(r"`([\w/]+\.py)::(\w+)`", cell)]


def test_the_page_has_its_tables():
    assert len(FAULTS) > 40
    assert len(SETTINGS) == 9
    assert all(len(row) in (3, 4) for row in ROWS)


@pytest.mark.parametrize("row", FAULTS, ids=[row[0] for row in FAULTS])
def test_every_fault_has_an_outcome_a_loss_and_tests_that_exist(row):
    fault, happens, lost, tests = row
    assert fault
    assert happens
    assert lost
    assert named(tests)
    assert re.sub(r"`[\w/]+\.py::\w+`", "", tests).strip() == ""
    for file, name in named(tests):
        assert name in names_of(file), f"no tests/{file}::test_{name}"


@pytest.mark.parametrize("file", ["test_failures.py"])
def test_every_fault_that_is_tested_is_on_the_page(file):
    there = {name for row in FAULTS for found, name in named(row[3]) if found == file}
    assert names_of(file) == there


@pytest.mark.parametrize("row", SETTINGS, ids=[row[0] for row in SETTINGS])
def test_defaults_are_those_of_the_code(row):
    place, _, name = row[0].strip("`").rpartition(".")
    field = next(f for f in dataclasses.fields(PLACES[place]) if f.name == name)
    assert row[1] == (f"{field.default:g}" if isinstance(field.default, int | float) else field.default)


def test_the_page_lists_every_group_of_attacks():
    groups = [row[0].strip("`") for row in cells(ATTACKS) if len(row) == 3 and row[0] != "group"]
    assert groups == list(series_of(seed=0, crafted=1))
