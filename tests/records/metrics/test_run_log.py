"""Test realign.log: it has settings, warnings, log records, metrics and the end of a run, and never stops it."""

from __future__ import annotations

import io
import logging
import warnings

import pytest

from realign.api import Callback
from realign.records.metrics.run_log import RunLog
from realign.runtime import run
from tests.toys import experiment


class Warns(Callback):
    def on_step(self, event):
        warnings.warn(f"warned in step {event.step}", stacklevel=2)
        logging.getLogger("realign.test").warning("logged in step %s", event.step)


def test_the_log_of_a_run_has_description_warnings_metrics_and_summary(tmp_path):
    before = warnings.showwarning
    with pytest.warns(UserWarning, match="warned in step 1"):
        out = run(experiment(tmp_path, callbacks={"w": Warns()}), begin=lambda: "the launch table").output_dir
    text = (out / "realign.log").read_text(encoding="utf-8")
    assert text.index("the launch table") < text.index("step 0  eval/reward") < text.index("step 3  ")
    assert text.count("WARNING warned in step 1\n") == 1
    assert "WARNING realign.test: logged in step 2\n" in text
    assert "toy: 3 of 3 steps in " in text
    assert "warnings  " in text  # a row of the summary
    assert warnings.showwarning is before
    assert logging.getLogger("realign").handlers == []


def test_a_resumed_run_continues_the_log_and_a_new_one_replaces_it(tmp_path):
    run(experiment(tmp_path), begin=lambda: "table one")
    out = run(experiment(tmp_path, steps=4, resume="auto"), begin=lambda: "table two").output_dir
    text = (out / "realign.log").read_text(encoding="utf-8")
    assert text.index("table one") < text.index("table two") < text.index("Resumed from ")
    run(experiment(tmp_path, overwrite=True), begin=lambda: "table three")
    assert "table one" not in (out / "realign.log").read_text(encoding="utf-8")


def test_an_error_is_logged_with_its_traceback(tmp_path):
    class Buggy(Callback):
        def on_step(self, event):
            raise KeyError("a bug")

    with pytest.raises(KeyError):
        run(experiment(tmp_path), callbacks={"buggy": Buggy()})
    text = (tmp_path / "run" / "realign.log").read_text(encoding="utf-8")
    assert "ENDED BY Traceback" in text
    assert 'raise KeyError("a bug")' in text


def test_a_full_disk_and_a_missing_folder_do_not_matter(tmp_path):
    log = RunLog()
    with log.capturing():
        log.write("kept")
        log.open(tmp_path / "missing", fresh=True)
        log.open(tmp_path, fresh=True)

        class Full(io.BytesIO):
            def write(self, data):
                raise OSError(28, "No space left on device")

        assert log._file is not None
        log._file.close()
        log._file = Full()
        log.write("lost")
    assert "kept" in (tmp_path / "realign.log").read_text()
