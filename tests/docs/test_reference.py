"""Test that the configuration reference is current."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
spec = importlib.util.spec_from_file_location("reference_pages", ROOT / "docs" / "reference.py")
pages = importlib.util.module_from_spec(spec)
spec.loader.exec_module(pages)

HAND_WRITTEN = {"api.md", "environment-variables.md"}


@pytest.fixture(scope="module")
def written():
    return pages.pages()


def test_pages_are_what_the_classes_say(written):
    found = {path.name: path.read_text(encoding="utf-8") for path in pages.FOLDER.glob("*.md")}
    assert set(found) == set(written) | HAND_WRITTEN
    stale = [name for name, text in written.items() if found[name] != text]
    assert not stale, f"run `python docs/reference.py`: {stale}"


def test_every_shipped_component_is_on_one_page(written):
    text = "".join(written.values())
    for section in pages.reference():
        if "." in section.key:
            assert text.count(f"`_target_: {section.key}`") == 1, section.key


def test_a_field_names_the_experiments_that_set_it(written):
    page = written["components.md"]
    entry = page[page.index("GAE.whiten_rewards") :].split("\n- ")[0]
    assert "Set by lm_human_preferences, lm_human_preferences_cnndm, lm_human_preferences_tldr." in entry
