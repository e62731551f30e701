from __future__ import annotations

import pytest

from benchmarks.torture import sizes


@pytest.mark.slow
def test_a_large_run_reports_what_it_needs_and_how_far_it_came(tmp_path, capsys):
    usage = sizes.sizes(tmp_path, {**sizes.DEFAULTS, "sizes": "prompts", "prompts": "300"})["sizes"]["prompts"]
    assert usage["last_step"] == 2
    assert usage["step 1"]["rss_mb"] > 100
    assert usage["step 1"]["descriptors"] > 3
    assert "rss_mb" in capsys.readouterr().out
