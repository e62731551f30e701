from __future__ import annotations

import io
import json
import math

from rich.console import Console

from realign.runtime.tracking import JsonLines, LiveDisplay


def test_lines_are_json_and_written_at_once(tmp_path):
    path = tmp_path / "m.jsonl"
    lines = JsonLines(path)
    lines.log(1, {"a": 1.5, "b": math.nan})
    record = json.loads(path.read_text())  # before close: a killed run keeps what it had
    assert record.pop("seconds") >= 0
    assert record == {"step": 1, "a": 1.5, "b": None}
    lines.close()


def test_without_a_terminal_there_are_plain_lines_now_and_then():
    out = io.StringIO()
    with LiveDisplay(Console(file=out, width=200), "toy", 100, ("reward",)) as display:
        for step in range(101):
            display.log(step, {"reward": step / 10, "other": 1.0})
    lines = out.getvalue().splitlines()
    assert len(lines) == 11
    assert lines[-1] == "toy step 100/100  reward 10"


def test_a_terminal_shows_the_first_and_the_latest_value():
    out = io.StringIO()
    console = Console(file=out, width=100, force_terminal=True)
    with LiveDisplay(console, "toy", 2, ("reward",)) as display:
        display.log(1, {"reward": 0.25})
        display.log(2, {"reward": 12345.0})
    last = [line for line in out.getvalue().splitlines() if "12,345" in line][-1]
    assert "0.25" in last  # first and latest stand side by side


def test_without_a_terminal_an_evaluation_is_shown_when_it_is_made_and_never_again():
    out = io.StringIO()
    with LiveDisplay(Console(file=out, width=200), "toy", 100, ("reward", "eval/reward")) as display:
        display.log(5, {"reward": 1.0, "eval/reward": 0.5})
        display.log(10, {"reward": 2.0})
    assert out.getvalue().splitlines() == ["toy step 5/100  reward 1  eval/reward 0.5", "toy step 10/100  reward 2"]
