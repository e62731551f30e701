"""Test reading the folders of runs that are incomplete or damaged."""

from __future__ import annotations

import pytest

from realign.errors import ConfigError
from realign.records.record_files import json_lines
from realign.report.files import check_run, find_runs, flat_config
from tests.config_parts import bomb


def test_a_torn_last_line_and_damaged_lines_are_skipped(tmp_path):
    path = tmp_path / "lines.jsonl"
    path.write_bytes(b'{"step": 1}\nnonsense\n[1]\n\xff\xfe\n{"step": 2}\n{"step": 3, "x')
    assert json_lines(path) == [{"step": 1}, {"step": 2}]
    assert json_lines(tmp_path / "missing.jsonl") == []


def test_runs_are_found_in_nested_folders_and_a_run_is_its_own_list(tmp_path):
    for name in ("b", "a/one", "a/two"):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "metrics.jsonl").write_text("")
    assert find_runs(tmp_path) == [tmp_path / name for name in ("a/one", "a/two", "b")]
    assert find_runs(tmp_path / "b") == [tmp_path / "b"]


def test_links_in_a_folder_of_runs_are_not_followed(tmp_path):
    outside, root = tmp_path / "outside", tmp_path / "runs"
    for folder in (outside / "run", root / "group" / "own"):
        folder.mkdir(parents=True)
        (folder / "metrics.jsonl").write_text("")
    (root / "linked").symlink_to(outside / "run")
    (root / "group" / "all").symlink_to(outside)
    assert find_runs(root) == [root / "group" / "own"]
    assert find_runs(root / "linked") == [root / "linked"]  # named by the user


def test_a_folder_without_a_run_is_an_error_that_names_it(tmp_path):
    with pytest.raises(ConfigError, match="contains no run"):
        check_run(tmp_path)
    with pytest.raises(ConfigError, match="does not exist"):
        check_run(tmp_path / "nope")


def test_a_config_becomes_values_by_dotted_key(tmp_path):
    path = tmp_path / "config.yaml"
    path.write_text("a: {b: 1, c: [1, 2]}\nd: null\n")
    assert flat_config(path) == {"a.b": 1, "a.c": "[1, 2]", "d": None}
    for text in ("a: [unclosed", "- 1", "a: 9999-99-99", f"a: {'9' * 5000}", "a: &a [*a]", bomb(9)):
        path.write_text(text)
        assert flat_config(path) == {}
    path.write_text("a: .inf\nb: [{2020-01-01: .nan, null: 1}]\n2020-01-01: x\n")
    assert flat_config(path) == {"a": "inf", "b": '[{"2020-01-01": NaN, "None": 1}]', "2020-01-01": "x"}
