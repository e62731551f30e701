from __future__ import annotations

import pytest

from benchmarks import levers
from benchmarks.peer.side_realign import LEVERS
from realign.engines import TransformersModel


def test_each_lever_changes_a_setting_of_the_model():
    plain = TransformersModel("model")
    for changed in LEVERS.values():
        assert all(getattr(plain, name) != value for name, value in changed.items())


def test_a_lever_is_measured_on_the_same_work(capsys):
    levers.main(["scenario=tiny", "levers=shared_prompts", "steps=1", "threads=1"])
    table, _ = capsys.readouterr().out.split("\n{")
    assert table.splitlines()[1].startswith("shared_prompts ")


def test_an_unknown_lever_is_named_with_the_valid_ones():
    with pytest.raises(SystemExit, match="unknown lever 'none'; valid: dtype, compiled_decode"):
        levers.main(["levers=none"])
