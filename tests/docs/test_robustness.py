"""Test docs/robustness.md: its tests exist, its defaults are correct, and it lists every tested failure."""

from __future__ import annotations

import ast
import dataclasses
from pathlib import Path

import pytest

from benchmarks.torture.faults import series_of
from realign.config.aliases import read_own_yaml
from realign.engines import OptimizerSpec
from realign.interfaces.rule_reward import RuleRewardInterface
from realign.run_settings import CheckpointSpec

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "robustness.md").read_text(encoding="utf-8")
FAILURES, _, ATTACKS = PAGE.partition("\n## Attacks\n")
TESTS: dict[str, dict[str, list[str]]] = read_own_yaml(Path(__file__).with_name("robustness.yaml"))
"""The tests of each failure on the page, by file."""


def cells(text: str) -> list[list[str]]:
    """Return the cells of all tables in a text."""
    return [
        [cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line.startswith("| ")
    ]


ROWS = cells(FAILURES)
FAULTS = [row for row in ROWS if len(row) == 2 and row[0] != "failure"]
SETTINGS = [row for row in ROWS if len(row) == 3 and row[0] != "setting"]
PLACES = {
    "interfaces.reward": RuleRewardInterface,
    "models.actor.optimizer": OptimizerSpec,
    "checkpoint": CheckpointSpec,
}


def names_of(file: str) -> set[str]:
    """Return the names of the tests of a file, without `test_`."""
    tree = ast.parse((ROOT / "tests" / file).read_text(encoding="utf-8"))
    names = [node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    return {name.removeprefix("test_") for name in names if name.startswith("test_")}


def test_the_page_has_its_tables():
    assert len(FAULTS) > 40
    assert len(SETTINGS) == 6
    assert all(len(row) in (2, 3) for row in ROWS)


def test_every_failure_on_the_page_has_tests_and_every_tested_one_is_on_the_page():
    assert [row[0] for row in FAULTS] == list(TESTS)


def test_every_fault_has_an_outcome_and_tests_that_exist():
    assert all(fault and outcome for fault, outcome in FAULTS)
    named: dict[str, set[str]] = {}
    for tests in TESTS.values():
        assert tests
        for file, names in tests.items():
            assert names
            named.setdefault(file, set()).update(names)
    assert {file: sorted(names - names_of(file)) for file, names in named.items() if not names <= names_of(file)} == {}


@pytest.mark.parametrize("row", SETTINGS, ids=[row[0] for row in SETTINGS])
def test_defaults_are_those_of_the_code(row):
    place, _, name = row[0].partition("]")[0].strip("[`").rpartition(".")
    field = next(f for f in dataclasses.fields(PLACES[place]) if f.name == name)
    assert row[1] == (f"{field.default:g}" if isinstance(field.default, int | float) else field.default)


def test_the_page_lists_every_group_of_attacks():
    groups = [row[0].strip("`") for row in cells(ATTACKS) if row[0] != "group"]
    assert groups == list(series_of(seed=0, crafted=1))
