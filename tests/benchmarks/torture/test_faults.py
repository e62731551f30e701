from __future__ import annotations

import json

import pytest

from benchmarks.torture import __main__ as torture
from benchmarks.torture import faults, sizes
from benchmarks.torture.attacks import Result
from benchmarks.torture.disks import NotPossible, command, private
from benchmarks.torture.faults import counts, series_of


def test_every_series_and_every_attack_has_its_own_name_and_documented_exit_codes():
    every = [series for group in series_of(seed=0, crafted=3).values() for series in group]
    names = [attack.name for series in every for attack in series.attacks]
    assert len({series.name for series in every}) == len(every)
    assert len(set(names)) == len(names) > 40
    assert {code for series in every for attack in series.attacks for code in attack.codes} <= {0, 2, 75, 143}


def test_counts_add_attacks_and_count_the_samples_of_a_series_once():
    tried = [Result("a", "1", 2, "", lost=3), Result("a", "2", 2, "wrong", lost=3), Result("b", "3", 0, lost=1)]
    assert counts([*tried, Result("c", "4", not_possible="no mounts")]) == {
        "attacks": 3,
        "attacks_survived": 2,
        "attacks_not_possible_here": 1,
        "attack_samples_lost": 4,
    }


def test_an_unknown_group_is_named(tmp_path):
    with pytest.raises(SystemExit, match="unknown group 'disks'; valid: all, none, disk, read_only, pipes, clock"):
        faults.faults(tmp_path, {"seed": "0", "crafted": "1", "faults": "disks"})


@pytest.mark.parametrize(
    ("found", "code"),
    [
        ({"attacks": 3, "attacks_survived": 3, "attack_samples_lost": 0}, 0),
        ({"attacks": 3, "attacks_survived": 2, "attack_samples_lost": 0}, 1),
        ({"attacks": 3, "attacks_survived": 3, "attack_samples_lost": 1}, 1),
    ],
)
def test_the_last_line_has_the_counts_and_the_exit_code_says_whether_all_was_survived(
    monkeypatch, capsys, tmp_path, found, code
):
    monkeypatch.setattr(faults, "section", lambda words: found)
    assert torture.main(["kills=0", f"folder={tmp_path}"]) == code
    line = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert found.items() <= line.items()
    assert line["good"] is (code == 0)


def test_mounts_of_the_section_are_its_own(tmp_path):
    prefix = private()
    if not prefix:
        with pytest.raises(NotPossible):
            command("unshare", "--mount", "--map-root-user", "mount", "-t", "tmpfs", "tmpfs", "/mnt")
        return
    command(*prefix, "sh", "-c", f"mount -t tmpfs -o size=4k tmpfs {tmp_path} && touch {tmp_path}/x")
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_a_large_run_reports_what_it_needs_and_how_far_it_came(tmp_path, capsys):
    found = sizes.sizes(tmp_path, {**sizes.DEFAULTS, "sizes": "prompts", "prompts": "300"})["sizes"]["prompts"]
    assert found["last_step"] == 2
    assert found["step 1"]["rss_mb"] > 100
    assert found["step 1"]["descriptors"] > 3
    assert "rss_mb" in capsys.readouterr().out
