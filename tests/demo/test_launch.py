"""Test the shared command line of the demos."""

from __future__ import annotations

import pytest

from realign.demo import __main__ as arithmetic
from realign.demo import rlhf


@pytest.mark.parametrize("demo", [arithmetic, rlhf])
@pytest.mark.parametrize("flag", ["--help", "-h"])
def test_help_prints_the_usage_and_starts_nothing(demo, flag, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert demo.main(["seed=1", flag]) == 0
    out = capsys.readouterr().out
    assert "python -m realign.demo" in out
    assert "[seed=0]" in out
    assert list(tmp_path.iterdir()) == []
