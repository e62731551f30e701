from __future__ import annotations

import pytest

from realign.runtime.curves import draw_curves


def test_two_phases_make_one_picture(tmp_path):
    sft = [{"step": i, "nll": 2.0 / (i + 1)} for i in range(5)]
    grpo = [{"step": i, "reward": i / 10, "eval/reward": i / 9} for i in range(60)]
    path = draw_curves({"SFT": sft, "GRPO": grpo}, tmp_path / "deep" / "c.png", title="both")
    assert path.read_bytes()[:4] == b"\x89PNG"


def test_nothing_to_draw_is_an_error(tmp_path):
    with pytest.raises(ValueError, match="no metric to draw"):
        draw_curves({"x": [{"step": 1, "unknown": 1.0}]}, tmp_path / "c.png", title="x")
