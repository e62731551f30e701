"""Test that a recorded graph is drawn again, and that a damaged record is no error."""

from __future__ import annotations

import pytest

from realign.draw import to_svg
from realign.report.graph import graph_svg
from realign.runtime.run_report import graph_record
from tests.toys import experiment


def test_a_recorded_graph_is_drawn_like_the_graph_of_the_run(tmp_path):
    graph = experiment(tmp_path).graph
    assert graph_svg(graph_record(graph)) == to_svg(graph)


@pytest.mark.parametrize("record", [None, {}, [], {"rpcs": 3}, {"rpcs": [{"name": "x"}]}])
def test_a_damaged_record_draws_nothing(record):
    assert graph_svg(record) == ""
