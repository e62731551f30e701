from __future__ import annotations

import pytest

from benchmarks import why


@pytest.mark.slow
def test_a_planted_fault_is_named_first(tmp_path, capsys):
    why.main([str(tmp_path), "only=limit below the answer", "seeds=1"])
    assert "1 of 1 first, 1 among three; 0 of 0 healthy runs accused" in capsys.readouterr().out
