"""Fixtures of several test files."""

import json

import pytest

from tests.data import chat_templates


@pytest.fixture
def write(tmp_path):
    """Return a function that writes rows to a JSONL file and returns its path."""

    def write(*rows):
        file = tmp_path / "rows.jsonl"
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return str(file)

    return write


@pytest.fixture(params=chat_templates.KINDS)
def each_kind(request, monkeypatch):
    """Let a test use each kind of tokenizer."""
    monkeypatch.setattr(chat_templates, "KIND", request.param)
