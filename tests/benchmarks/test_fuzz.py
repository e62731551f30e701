import json
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks import fuzz


def test_every_module_of_targets_is_searched():
    names = list(fuzz.all_targets())
    assert {name.partition(".")[0] for name in names} == set(fuzz.MODULES)
    assert len(names) >= 20


@given(st.integers())
def fails_on_negatives(x):
    assert x >= 0, f"found {x}"


@given(st.integers())
def never_fails(x):
    assert isinstance(x, int)


def test_a_failing_input_is_kept_and_fails_again(tmp_path, monkeypatch):
    tests = {"m.fails": fails_on_negatives, "m.passes": never_fails}
    monkeypatch.setattr(fuzz, "all_targets", lambda: tests)
    monkeypatch.setattr(fuzz.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(SystemExit) as stop:
        fuzz.search(tmp_path, list(tests), 30, seed=0)
    assert stop.value.code == fuzz.FAILED
    assert json.loads((tmp_path / "failure.json").read_text())["target"] == "m.fails"
    file = (tmp_path / "crash-random").rename(tmp_path / "m.fails-crash-random")
    with pytest.raises(AssertionError, match="found -"):
        fuzz.replay(file)


@pytest.mark.slow
def test_the_command_counts_inputs_and_ends_with_json(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["fuzz", "seconds=1", "targets=test_any_text_as_a_path"])
    assert fuzz.main() == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert found["targets"] == 1
    assert found["failures"] == {}
