"""Test the live display of a run."""

from __future__ import annotations

import io

import hypothesis.strategies as st
from hypothesis import given
from rich.console import Console

from realign.records.metrics.live_display import BLOCKS, LiveDisplay, sparkline


def test_the_lowest_value_has_the_lowest_block_and_the_highest_value_the_highest():
    assert sparkline([0, 1, 2, 3, 4, 5, 6, 7], 8) == BLOCKS
    assert sparkline([5.0, 5.0], 8) == "▄▄"
    assert sparkline([], 8) == ""


@given(st.lists(st.floats(), max_size=200), st.integers(1, 60))
def test_every_series_has_at_most_width_characters(values, width):
    assert len(sparkline(values, width)) == min(width, len(values))


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
    assert "0.25" in last  # first and latest values are in the same row


def rendered(display: LiveDisplay, width: int = 100) -> str:
    out = io.StringIO()
    Console(file=out, width=width).print(display._render())
    return out.getvalue()


def test_a_terminal_shows_the_folder_the_models_and_what_is_awaited_before_the_first_step():
    console = Console(file=io.StringIO(), width=100, force_terminal=True)
    header = ["runs/größe   actor: 135M parameters on cpu"]
    with LiveDisplay(console, "toy", 2, header=header, activity=lambda: "running call 'rewards', 3 s") as display:
        text = rendered(display)
        assert text.splitlines()[0].rstrip() == header[0]
        assert "running call 'rewards', 3 s" in text
        assert "metric" not in text  # no metric is known
        display.log(1, {"reward": 1.0})
        assert "metric" in rendered(display)
    assert "running call" not in rendered(display)


def test_evaluations_and_metrics_of_callbacks_are_shown_besides_the_headline():
    out, added = io.StringIO(), dict[str, str]()
    shown = tuple("abcdefgh")
    with LiveDisplay(Console(file=out, width=200), "toy", 2, shown, added=added) as display:
        added["mine"] = "callback"
        values = dict.fromkeys(shown, 1.0) | {
            "other": 1.0,
            "eval/reward": 0.5,
            "eval/missing_rewards": 0.0,
            "eval/easy/missing_rewards": 0.0,
            "eval/rewards/form/std": 0.0,
            "mine": 2.0,
        }
        display.log(1, values)
    assert out.getvalue() == "toy step 1/2  a 1  b 1  c 1  d 1  e 1  f 1  eval/reward 0.5  mine 2\n"


def test_a_terminal_shows_curves_the_best_evaluation_and_targets():
    console = Console(file=io.StringIO(), width=120, force_terminal=True)
    with LiveDisplay(console, "toy", 4, ("reward", "eval/reward"), targets={"kl": 6.0}) as display:
        for step, reward in enumerate((0.0, 1.0, 2.0, 1.0, 0.0)):
            display.log(step, {"reward": reward, "eval/reward": reward / 4, "kl": 3.5})
        columns = [line.split() for line in rendered(display, 120).splitlines()]
    table = {line[0]: line[1:] for line in columns if line and line[0] in ("metric", "reward", "eval/reward", "kl")}
    assert table["metric"] == ["first", "best", "latest", "target", "curve"]
    assert table["reward"] == ["0", "0", "▁▅█▅▁"]  # a single training batch has no best value
    assert table["eval/reward"] == ["0", "0.5", "(step", "2)", "0", "▁▅█▅▁"]
    assert table["kl"] == ["3.5", "3.5", "6", "▄▄▄▄▄"]


def test_a_terminal_shows_the_latest_warnings_and_their_number():
    messages = [f"warning number {i} {'x' * 200}" for i in range(5)]
    console = Console(file=io.StringIO(), width=80, force_terminal=True)
    with LiveDisplay(console, "toy", 1, warned=lambda: (messages, 9)) as display:
        lines = rendered(display, 80).rstrip().splitlines()[-4:]
    assert lines[0].strip() == "9 warnings"
    assert [line.split()[:3] for line in lines[1:]] == [["warning", "number", str(i)] for i in (2, 3, 4)]
    assert all(len(line) <= 80 for line in lines)
