from __future__ import annotations

import warnings
from typing import ClassVar

import pytest

from realign.runtime.metrics.tracker import Forgiving


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
