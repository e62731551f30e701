"""Test that the tables of names of other tools are generated from `realign/config/names.yaml`."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from realign.config.aliases import tables

spec = importlib.util.spec_from_file_location("names", Path(__file__).parents[2] / "docs" / "names.py")
names = importlib.util.module_from_spec(spec)
spec.loader.exec_module(names)


@pytest.mark.parametrize("page", names.PAGES, ids=lambda page: page.stem)
def test_the_tables_of_a_page_are_generated(page):
    text = page.read_text(encoding="utf-8")
    assert text == names.render(text), "run python docs/names.py"


def test_every_table_is_on_a_page():
    shown = [block[2] for page in names.PAGES for block in names.BLOCK.finditer(page.read_text(encoding="utf-8"))]
    assert sorted(shown) == sorted(tables())
