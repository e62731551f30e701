"""Models and data that several runs read."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.checkpoint_runs import save_files


@pytest.fixture(scope="session")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the models and data of `tests.checkpoint_runs`. Tests only read it."""
    return save_files(tmp_path_factory.mktemp("files"))
