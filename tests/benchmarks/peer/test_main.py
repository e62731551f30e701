from __future__ import annotations

import pytest

from benchmarks.peer import __main__ as peer
from benchmarks.peer.work import SCENARIOS


@pytest.mark.parametrize(
    ("bf16", "name", "measured"),
    [(True, "real", "real"), (False, "real", "real32"), (False, "real32", "real32"), (False, "tiny", "tiny")],
)
def test_a_cpu_without_bf16_measures_the_scenario_in_fp32(monkeypatch, bf16, name, measured):
    monkeypatch.setattr(peer, "multiplies_bf16", lambda: bf16)
    assert peer.possible(name) is SCENARIOS[measured]
