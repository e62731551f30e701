"""Only one file of the planner may use what realign doesn't promise, and all that it names exists."""

from __future__ import annotations

import re
from importlib import import_module
from pathlib import Path

from realign_planner import internals

PACKAGE = Path(internals.__file__).parent
PUBLIC = {f"realign.{name}" for name in ("engines", "errors", "models", "runtime", "samplers", "settings")}


def test_every_internal_exists():
    assert {name for name in internals.__all__ if not hasattr(internals, name)} == set()


def test_no_other_file_imports_internals_of_realign():
    lines = re.compile(r"^ *(?:from (realign\.[\w.]+) import (.+)|import realign\b)", re.MULTILINE)
    imports = [
        match
        for path in PACKAGE.glob("*.py")
        if path.name != "internals.py"
        for match in lines.findall(path.read_text(encoding="utf-8"))
    ]
    assert {module for module, _ in imports} == PUBLIC
    for module, names in imports:
        exported = getattr(import_module(module), "__all__", None)
        assert exported is None or set(names.split(", ")) <= set(exported), module
