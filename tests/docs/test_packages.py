"""Test the table of packages: it is generated from the import contracts."""

from __future__ import annotations

import importlib.util
from pathlib import Path

DOCS = Path(__file__).parents[2] / "docs"
spec = importlib.util.spec_from_file_location("packages", DOCS / "packages.py")
packages = importlib.util.module_from_spec(spec)
spec.loader.exec_module(packages)


def test_the_page_has_the_table_of_todays_contracts():
    page = packages.PAGE.read_text(encoding="utf-8")
    assert packages.render(page) == page, "Run `python docs/packages.py`."


def test_every_package_is_in_the_table():
    root = packages.ROOT / "realign"
    names = {path.stem for path in root.iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()}
    listed = {line.split("|")[2].strip(" `").removeprefix("realign.") for line in packages.table().splitlines()[2:]}
    assert names - {"__init__", "__main__"} == listed
