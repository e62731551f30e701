"""Test the coverage page: it has every row, and all names in it exist."""

from __future__ import annotations

import ast
import dataclasses
import functools
import importlib
import importlib.util
import re
import shlex
import types
from pathlib import Path
from typing import Any, Union, get_args, get_origin, get_type_hints

import pytest

from realign.cli.chat import chat_of
from realign.config import compose
from realign.config.files import list_experiments
from tests.docs.pages import compositions

ROOT = Path(__file__).parents[2]
spec = importlib.util.spec_from_file_location("coverage", ROOT / "docs" / "coverage.py")
coverage = importlib.util.module_from_spec(spec)
spec.loader.exec_module(coverage)
DATA = coverage.read()
ROWS = DATA["rows"]
LAST = {"A": 44, "B": 24, "C": 32, "D": 7, "E": 11, "F": 10}
IDS = [f"{letter}{number}" for letter, last in LAST.items() for number in range(1, last + 1)]


def imported(path: str) -> Any:
    """Return the object at an import path."""
    parts = path.split(".")
    for cut in range(len(parts), 0, -1):
        try:
            found: Any = importlib.import_module(".".join(parts[:cut]))
        except ModuleNotFoundError:
            continue
        return functools.reduce(getattr, parts[cut:], found)
    raise AssertionError(f"nothing at {path}")


def dataclass_in(annotation: Any) -> Any:
    """Return the dataclass in an annotation, or None. Unions are searched."""
    if get_origin(annotation) in (Union, types.UnionType):
        return next((found for a in get_args(annotation) if (found := dataclass_in(a))), None)
    return annotation if dataclasses.is_dataclass(annotation) else None


def check_option(option: str) -> None:
    """Resolve `root.field.field` through annotated classes, or an import path that starts with `realign.`."""
    name, *fields = option.split(".")
    if name == "realign":
        imported(option)
        return
    place = imported(DATA["roots"][name])
    for field in fields:
        assert place is not None, f"{option}: {field} is no field of a dataclass"
        assert field in {f.name for f in dataclasses.fields(place)}, f"{option}: {place.__name__} has no {field}"
        place = dataclass_in(get_type_hints(place)[field])


@functools.cache
def names_in(file: str) -> set[str]:
    tree = ast.parse((ROOT / "tests" / file).read_text(encoding="utf-8"))
    return {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}


def test_every_row_is_there_once_and_in_order():
    assert list(ROWS) == IDS
    text = (ROOT / "docs" / "coverage.yaml").read_text(encoding="utf-8")
    assert re.findall(r"^  ([A-F]\d+):", text, re.MULTILINE) == IDS  # YAML silently keeps the last of two equal keys


def test_the_page_is_that_of_the_data():
    assert coverage.PAGE.read_text(encoding="utf-8") == coverage.render(DATA), "run python docs/coverage.py"


@pytest.mark.parametrize("row", ROWS)
def test_what_a_row_names_exists(row):
    entry = ROWS[row]
    assert entry.keys() <= {"does", "options", "use", "tests", "note", "missing"}
    assert entry["does"].endswith(".")
    assert entry.get("tests") or "missing" in entry, "a row that works has a test"
    for option in entry.get("options", []):
        check_option(option)
    for test in entry.get("tests", []):
        file, _, name = test.partition("::")
        assert name in names_in(file), f"no {test}"


COMMANDS = [(row, use) for row, entry in ROWS.items() for use in entry.get("use", [])]


@pytest.mark.parametrize(("row", "use"), COMMANDS, ids=[f"{row}: {use}" for row, use in COMMANDS])
def test_experiments_and_commands_exist(row, use):
    program, *words = shlex.split(use)
    if program == "make":
        assert re.search(rf"^{words[0]}:", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    elif program == "realign" and words[0] == "chat":
        chat_of(words[1:])
    elif program == "realign":
        for overrides in compositions(words):
            compose(overrides)
    elif program == "python":
        assert (ROOT / words[0]).is_file()
    else:
        assert use.removeprefix("experiment=") in list_experiments(None)


def test_names_that_do_not_exist_are_found():
    for option in ("actor.nothing", "actor.epochs.more", "actor.advantage.gamma"):
        with pytest.raises(AssertionError):
            check_option(option)
    with pytest.raises(AttributeError):
        check_option("realign.interfaces.ppo.Nothing")
