"""Fixtures of several test files."""

import json

import pytest


@pytest.fixture
def write(tmp_path):
    """Return a function that writes rows to a JSONL file and returns its path."""

    def write(*rows):
        file = tmp_path / "rows.jsonl"
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return str(file)

    return write
