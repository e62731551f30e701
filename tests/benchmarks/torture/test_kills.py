from __future__ import annotations

import json

import pytest

from benchmarks.torture import __main__ as torture


@pytest.mark.slow
def test_a_kill_before_the_first_checkpoint_and_one_with_damage_later_change_nothing(tmp_path, capsys):
    code = torture.main(["kills=2", "damages=1", "steps=6", "faults=none", f"folder={tmp_path}"])
    lines = capsys.readouterr().out.splitlines()
    result = json.loads(lines[-1])
    assert code == 0, (result, [log.read_text()[-3000:] for log in tmp_path.glob("*.log")])
    assert result["good"]
    expected = {"kills": 2, "kills_survived": 2, "resumes": 1, "resumes_exact": 1, "samples_lost": 0}
    expected |= {"checkpoints_damaged": 1, "checkpoints_skipped": 1, "samples_doubled": 0}
    assert expected.items() <= result.items()
    assert result["metrics_equal"]
    assert result["weights_equal"]
    assert result["samples"] == 6 * 32 + 2 * 63  # of all steps, and of two evaluations with all prompts
    assert lines[-2].startswith("2 ")
