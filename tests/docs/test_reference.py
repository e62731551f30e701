"""Test that the configuration reference is current."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest

from tests.processes import python

ROOT = Path(__file__).parents[2]
spec = importlib.util.spec_from_file_location("reference_pages", ROOT / "docs" / "reference.py")
pages = importlib.util.module_from_spec(spec)
spec.loader.exec_module(pages)

HAND_WRITTEN = {"environment-variables.md"}


@pytest.fixture(scope="module")
def written():
    # In a process of its own: classes of other tests would be choices too.
    code = f"import json, runpy; print(json.dumps(runpy.run_path({pages.__file__!r})['pages']()))"
    return json.loads(python(code, ROOT).stdout)


def test_pages_are_what_the_classes_say(written):
    present = {path.name: path.read_text(encoding="utf-8") for path in pages.FOLDER.glob("*.md")}
    assert set(present) == set(written) | HAND_WRITTEN
    stale = [name for name, text in written.items() if present[name] != text]
    assert not stale, f"run `python docs/reference.py`: {stale}"


def test_every_shipped_component_is_on_one_page(written):
    text = "".join(written.values())
    for section in pages.reference():
        if "." in section.key:
            assert text.count(f"`_target_: {section.key}`") == 1, section.key


def test_every_field_of_every_component_has_a_text_a_type_and_a_default_or_must_be_set():
    sections = pages.reference()
    assert len({one.key for one in sections}) == len(sections)
    assert sum(len(one.entries) for one in sections) > 350
    for one in sections:
        assert one.text, one.key
        for field in one.entries:
            assert field.text, f"{one.key}.{field.key} has no text: write a string below the field"
            assert field.type, f"{one.key}.{field.key}"
