from __future__ import annotations

import pytest

from benchmarks import why
from realign.records.diagnosis import _words_of_causes


def test_each_fault_expects_causes_that_exist_and_has_a_name_of_its_own():
    cases = [*why.FAULTS, *why.HEALTHY]
    assert len({case.name for case in cases}) == len(cases)
    assert all(case.causes and set(case.causes) <= _words_of_causes().keys() for case in why.FAULTS)
    assert len(why.FAULTS) >= 30
    assert len(why.HEALTHY) >= 10


@pytest.mark.slow
def test_a_planted_fault_is_named_first(tmp_path, capsys):
    why.main([str(tmp_path), "only=limit below the answer", "seeds=1"])
    assert "1 of 1 first, 1 among three; 0 of 0 healthy runs accused" in capsys.readouterr().out
