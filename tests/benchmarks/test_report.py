from __future__ import annotations

import gc
import json

import pytest

from benchmarks.report import alternate, arguments, facts, table


def test_calls_take_turns_and_the_first_round_does_not_count():
    order = []
    found = alternate({"a": lambda: order.append("a"), "b": lambda: order.append("b")}, 2)
    assert order == ["a", "b", "b", "a", "a", "b"]
    assert set(found) == {"a", "b"}
    assert all(seconds.wall >= 0 and seconds.cpu >= 0 for seconds in found.values())
    assert gc.isenabled()


def test_the_collector_runs_again_after_a_failure():
    with pytest.raises(ZeroDivisionError):
        alternate({"a": lambda: 1 / 0}, 1)
    assert gc.isenabled()


def test_arguments_go_over_defaults_and_unknown_ones_are_refused():
    assert arguments({"a": "1", "b": "2"}, ["b=x=y"]) == {"a": "1", "b": "x=y"}
    with pytest.raises(SystemExit, match="unknown argument 'c'; valid: a, b"):
        arguments({"a": "1", "b": "2"}, ["c=3"])


def test_columns_are_aligned():
    assert table(["name", "s"], [["a", "10.5"], ["longer", "1"]]) == "name       s\na       10.5\nlonger     1"


def test_facts_are_json():
    assert json.loads(json.dumps(facts()))["threads"] >= 1
