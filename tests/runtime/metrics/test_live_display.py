from __future__ import annotations

import errno
import io
import json
import math
import os
import shutil
import warnings
from typing import ClassVar

import pytest
from rich.console import Console

from realign.runtime.metrics import live_display as tracking
from realign.runtime.metrics.live_display import Forgiving, JsonLines, LiveDisplay


def test_lines_are_json_and_written_at_once(tmp_path):
    path = tmp_path / "m.jsonl"
    lines = JsonLines(path)
    lines.log(1, {"a": 1.5, "b": math.nan})
    record = json.loads(path.read_text())  # before close, so a killed run keeps its metrics
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
    assert "0.25" in last  # first and latest values are in the same row


def test_without_a_terminal_an_evaluation_is_shown_when_it_is_made_and_never_again():
    out = io.StringIO()
    with LiveDisplay(Console(file=out, width=200), "toy", 100, ("reward", "eval/reward")) as display:
        display.log(5, {"reward": 1.0, "eval/reward": 0.5})
        display.log(10, {"reward": 2.0})
    assert out.getvalue().splitlines() == ["toy step 5/100  reward 1  eval/reward 0.5", "toy step 10/100  reward 2"]


@pytest.fixture
def full(monkeypatch):
    """Simulate a disk with `room` more bytes. `room` is a list of one number; None means unlimited."""
    room: list[int | None] = [None]

    class Disk(io.FileIO):
        def write(self, data):
            if room[0] is None:
                return super().write(data)
            if room[0] == 0:
                raise OSError(errno.ENOSPC, "No space left on device")
            written = super().write(bytes(data)[: room[0]])
            room[0] -= written
            return written

    plain = os.fdopen

    def opened(number, mode="r", *arguments, **more):
        return Disk(number, mode) if mode == "ab" else plain(number, mode, *arguments, **more)

    monkeypatch.setattr(os, "fdopen", opened)
    return room


def test_a_full_disk_ends_no_run_tears_no_line_and_loses_none_once_there_is_space(tmp_path, full):
    lines = JsonLines(tmp_path / "m.jsonl")
    lines.write({"step": 1})
    full[0] = 5  # half a line
    with pytest.warns(UserWarning, match=r"m\.jsonl cannot be written after byte 12 \(No space left on device\)"):
        lines.write({"step": 2})
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # warned only once
        full[0] = 3
        lines.write({"step": 3})
    assert (tmp_path / "m.jsonl").read_text() == '{"step": 1}\n'
    assert lines.size == len('{"step": 1}\n')
    full[0] = None
    with pytest.warns(UserWarning, match=r"can be written again\. No line is missing"):
        lines.write({"step": 4})
    lines.close()
    assert [json.loads(line)["step"] for line in (tmp_path / "m.jsonl").read_text().splitlines()] == [1, 2, 3, 4]


def test_lines_that_wait_are_written_when_a_checkpoint_asks_for_the_size(tmp_path, full):
    lines = JsonLines(tmp_path / "m.jsonl")
    full[0] = 0
    with pytest.warns(UserWarning, match="cannot be written"):
        lines.write({"step": 1})
    assert lines.sync() == 0
    full[0] = None
    with pytest.warns(UserWarning, match="can be written again"):
        assert lines.sync() == len('{"step": 1}\n')
    assert (tmp_path / "m.jsonl").read_text() == '{"step": 1}\n'
    lines.close()


def test_lines_that_never_found_space_are_counted_at_the_end(tmp_path, full, monkeypatch):
    monkeypatch.setattr(tracking, "_MOST_WAITING", 2)
    lines = JsonLines(tmp_path / "m.jsonl")
    full[0] = 0
    with pytest.warns(UserWarning, match=r"cannot be written"):
        lines.write({"step": 0})
    for step in range(1, 5):
        lines.write({"step": step})
    with pytest.warns(UserWarning, match=r"m\.jsonl: 5 lines could not be written\. They are lost"):
        lines.close()
    assert (tmp_path / "m.jsonl").read_bytes() == b""


def test_a_torn_line_that_could_not_be_taken_back_at_once_is_taken_back_later(tmp_path, full, monkeypatch):
    lines = JsonLines(tmp_path / "m.jsonl")
    lines.write({"step": 1})
    full[0] = 5
    with monkeypatch.context() as patch:
        patch.setattr(type(lines._file), "truncate", lambda self, size: (_ for _ in ()).throw(OSError("busy")))
        with pytest.warns(UserWarning, match="cannot be written"):
            lines.write({"step": 2})
    assert (tmp_path / "m.jsonl").read_text() == '{"step": 1}\n{"ste'
    assert lines.size == len('{"step": 1}\n')
    full[0] = None
    with pytest.warns(UserWarning, match="can be written again"):
        lines.write({"step": 3})
    lines.close()
    assert [json.loads(line)["step"] for line in (tmp_path / "m.jsonl").read_text().splitlines()] == [1, 2, 3]


@pytest.mark.parametrize("how", ["removed", "moved"])
def test_a_file_that_vanishes_is_begun_anew_at_its_path(tmp_path, how):
    folder = tmp_path / "run"
    folder.mkdir()
    lines = JsonLines(folder / "m.jsonl")
    lines.write({"step": 1})
    if how == "moved":
        folder.rename(tmp_path / "elsewhere")
    else:
        shutil.rmtree(folder)
    with pytest.warns(UserWarning, match=r"m\.jsonl was removed or moved during the run\. A new file starts"):
        lines.write({"step": 2})
    lines.write({"step": 3})
    lines.close()
    assert (folder / "m.jsonl").read_text() == '{"step": 2}\n{"step": 3}\n'
    if how == "moved":
        assert (tmp_path / "elsewhere" / "m.jsonl").read_text() == '{"step": 1}\n'


def test_an_earlier_file_is_kept_as_far_as_asked(tmp_path):
    path = tmp_path / "m.jsonl"
    path.write_bytes(b'{"step": 1}\n{"step": 2}\n')
    lines = JsonLines(path, keep_bytes=12)
    lines.write({"step": 9})
    lines.close()
    assert path.read_text() == '{"step": 1}\n{"step": 9}\n'
    JsonLines(path, keep_bytes=10**6).close()
    assert path.read_text() == '{"step": 1}\n{"step": 9}\n'
    JsonLines(path).close()
    assert path.read_bytes() == b""


def test_half_a_surrogate_pair_is_written_as_json_escapes_it(tmp_path):
    lines = JsonLines(tmp_path / "m.jsonl")
    lines.write({"response": "a\ud800b"})
    lines.close()
    assert json.loads((tmp_path / "m.jsonl").read_text()) == {"response": "a\ud800b"}


def test_a_tracker_that_fails_ends_no_run_and_what_it_missed_is_told():
    class Flaky:
        heard: ClassVar[list[int]] = []

        def log(self, step, metrics):
            if step in (2, 4):
                raise ConnectionError("no network")
            self.heard.append(step)

        def close(self):
            raise OSError("gone")

    tracker = Forgiving("mine", Flaky())
    tracker.log(1, {})
    with pytest.warns(
        UserWarning, match=r"Tracker 'mine' failed at step 2 \(ConnectionError: no network\)\. Training continues"
    ):
        tracker.log(2, {})
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # warned only once
        for step in (3, 4, 5):
            tracker.log(step, {})
    assert Flaky.heard == [1, 3, 5]
    with pytest.warns(UserWarning, match="Tracker 'mine'") as told:
        tracker.close()
    assert [str(w.message) for w in told] == [
        "Tracker 'mine' could not be closed (OSError: gone).",
        "Tracker 'mine' missed 2 steps, from 2 to 4.",
    ]


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


def test_without_a_terminal_the_header_is_printed_once():
    out = io.StringIO()
    with LiveDisplay(Console(file=out, width=200), "toy", 1, ("reward",), header=["runs/toy"]) as display:
        display.log(1, {"reward": 1.0})
    assert out.getvalue().splitlines() == ["runs/toy", "toy step 1/1  reward 1"]


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


def test_held_out_metrics_do_not_displace_metrics_of_training():
    out, shown = io.StringIO(), ("a", "eval/a", "b", "eval/b", "c", "d", "e", "f", "g")
    with LiveDisplay(Console(file=out, width=200), "toy", 1, shown) as display:
        display.log(1, dict.fromkeys(shown, 1.0))
    assert out.getvalue() == "toy step 1/1  a 1  eval/a 1  b 1  eval/b 1  c 1  d 1  e 1  f 1\n"
