from __future__ import annotations

import json
import random

import pytest
import torch

from benchmarks.torture import __main__ as torture
from benchmarks.torture import kills
from benchmarks.torture.kills import Outcome
from benchmarks.torture.runs import Run, contents
from realign.runtime.checkpoint.folder import CorruptCheckpoint, write_checkpoint


@pytest.mark.slow
def test_a_kill_before_the_first_checkpoint_and_one_with_damage_later_change_nothing(tmp_path, capsys):
    code = torture.main(["kills=2", "damages=1", "steps=6", "faults=none", f"folder={tmp_path}"])
    lines = capsys.readouterr().out.splitlines()
    result = json.loads(lines[-1])
    assert code == 0, (result, [log.read_text()[-3000:] for log in tmp_path.glob("*.log")])
    assert result["good"]
    expected = {"kills": 2, "kills_survived": 2, "resumes": 1, "resumes_exact": 1, "samples_lost": 0}
    expected |= {"checkpoints_damaged": 1, "checkpoints_skipped": 1, "samples_doubled": 0}
    assert expected.items() <= result.items()
    assert result["metrics_equal"]
    assert result["weights_equal"]
    assert result["samples"] == 6 * 32 + 2 * 8  # responses of all steps, and the recorded held-out responses
    assert lines[-2].startswith("2 ")


def run(folder, name, metrics, samples, weights):
    made = Run(folder / name, [], folder / f"{name}.mark")
    (made.folder / "final").mkdir(parents=True)
    (made.folder / "final" / "model.safetensors").write_bytes(weights)
    (made.folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in metrics))
    (made.folder / "samples.jsonl").write_text("".join(f"{sample}\n" for sample in samples))
    return made


METRICS = [{"step": 1, "seconds": 1.0, "loss": 0.5, "step_s": 2.0}, {"step": 2, "seconds": 2.0, "loss": 0.25}]
LATER = [{**row, "seconds": 9.0, "step_s": 9.0} for row in METRICS]


@pytest.mark.parametrize(
    ("metrics", "samples", "weights", "found"),
    [
        (LATER, "abc", b"w", {}),
        (LATER, "ab", b"w", {"samples_lost": 1}),
        (LATER, "abcc", b"w", {"samples_doubled": 1}),
        (LATER, "abx", b"w", {"samples_lost": 1, "samples_doubled": 1}),
        (LATER[:1], "abc", b"w", {"metrics_equal": False}),
        ([LATER[0], *LATER], "abc", b"w", {"metrics_equal": False}),
        ([LATER[0], {**LATER[1], "loss": 0.250001}], "abc", b"w", {"metrics_equal": False}),
        (LATER, "abc", b"x", {"weights_equal": False}),
    ],
)
def test_whatever_differs_is_found(tmp_path, metrics, samples, weights, found):
    reference, tormented = run(tmp_path, "a", METRICS, "abc", b"w"), run(tmp_path, "b", metrics, samples, weights)
    result = kills.report(tormented, reference, Outcome())
    good = {"samples_lost": 0, "samples_doubled": 0, "metrics_equal": True, "weights_equal": True}
    assert {name: result[name] for name in good} == good | found
    assert kills.is_good(result) == (not found)


@pytest.mark.parametrize(
    "outcome", [Outcome(resumes=2, exact=1), Outcome(damaged=1), Outcome(killed=[{"where": "start", "write": False}])]
)
def test_what_did_not_go_well_is_not_good(tmp_path, outcome):
    both = run(tmp_path, "a", METRICS, "abc", b"w")
    assert not kills.is_good(kills.report(both, both, outcome))


@pytest.mark.parametrize("kind", kills.DAMAGES)
@pytest.mark.parametrize("seed", range(5))
def test_damage_is_damage(tmp_path, kind, seed):
    checkpoint = write_checkpoint(tmp_path, 3, {"x": torch.zeros(5)})
    assert kills.damage(checkpoint, kind, random.Random(seed)).startswith(kind)
    with pytest.raises(CorruptCheckpoint):
        checkpoint.read()


def test_checkpoints_are_compared_but_for_what_must_differ(tmp_path):
    state = {"config": "a", "records": 1, "interfaces": {"kl": 0.1}, "x": torch.zeros(3)}
    folders = [
        write_checkpoint(tmp_path / str(i), 1, {**state, **changes}).path
        for i, changes in enumerate(
            [{}, {"config": "b", "records": 2}, {"interfaces": {"kl": 0.2}}, {"x": -torch.zeros(3)}]
        )
    ]
    first, *others = [contents(folder) for folder in folders]
    assert [first == other for other in others] == [True, False, False]
