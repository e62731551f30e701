"""A real run on bigrams, whose folder the tests of the report read."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.report.runs import make_run


@pytest.fixture(scope="session")
def run_folder(tmp_path_factory) -> Path:
    return make_run(tmp_path_factory.mktemp("report") / "toy")
