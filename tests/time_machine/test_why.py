"""`realign why RUN --test`: which change moves a run."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from realign.cli import main
from realign.config.index import class_at
from realign.interfaces.components import Clip, Gspo
from realign.interfaces.grpo import GRPOActorInterface
from realign.records.diagnosis import RunRecords
from realign.time_machine import why
from realign.time_machine.earlier_run import experiment_of

RATE = "models.actor.optimizer.lr"


def contents(folder):
    return {path: path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


@pytest.fixture(scope="module")
def slow(work, train):
    """Return the folder with a run of four steps in runs/slow, whose learning rate is far too low."""
    train("slow", "experiment=grpo_arithmetic", "steps=4", f"{RATE}=1e-9", "models.actor.optimizer.schedule.warmup=0")
    return work


def test_records_are_judged_without_torch(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "nonfinite_steps": 1.0}\n')
    (tmp_path / "config.yaml").write_text("models: {actor: {optimizer: {eps: 1.0}}}\n")
    assert class_at("realign.api.ModelSpec")  # writes the index after an edit
    code = f"import sys\nfrom realign.cli import main\nprint(main(['why', {str(tmp_path)!r}]), 'torch' in sys.modules)"
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert said.startswith("The loss or the gradient is not finite, for the first time in step 1.")
    assert said.endswith("models.actor.optimizer.eps=1 (default 1e-08)\n0 False\n")


def test_a_planted_learning_rate_is_found_by_forks_that_are_made_once(slow, monkeypatch, capsys):
    monkeypatch.chdir(slow)
    before = contents(slow / "runs/slow")
    command = ["why", "runs/slow", "--test", f"{RATE}=3e-3", "why.step=2", "why.steps=6"]
    assert main(command) == 0
    shown = capsys.readouterr().out
    assert "About " in shown
    assert "Add --yes" in shown
    assert not Path("runs/slow-why").exists()
    assert main([*command, "--yes"]) == 0
    shown = capsys.readouterr().out
    assert f"{RATE}=3e-3 helps most: reward moves by +" in shown
    assert contents(slow / "runs/slow") == before
    assert not list(Path("runs/slow-why").rglob("model.safetensors"))
    monkeypatch.setattr("subprocess.run", None)  # what is done isn't run again
    assert main([*command, "--yes"]) == 0
    assert capsys.readouterr().out.partition("helps most")[2] == shown.partition("helps most")[2]


def test_only_changes_that_the_run_can_take_are_tested(slow, monkeypatch):
    monkeypatch.chdir(slow)
    run = Path("runs/slow").absolute()
    records = RunRecords([{"step": 1, "truncated_fraction": 0.5}], experiment_of(run).resolved or {})
    actor = GRPOActorInterface(objective=Gspo(), epochs=2)
    optimizer = experiment_of(run).models["actor"].optimizer
    found = {name: words for name, words in why.candidates(records, actor, optimizer).items() if words}
    assert found["default objective"] == ["interfaces.actor.objective=clip"]
    assert found["default epochs"] == ["interfaces.actor.epochs=1"]
    assert found["2 x answer length"] == ["interfaces.actor.generation.max_new_tokens=12"]
    assert "temperature 1" not in found
    assert why.resets("key", Clip(low=0.1), Clip()) == ["key.low=0.2"]
    applicable = why._applicable(run, records, [])
    assert next(iter(applicable)) == why.UNCHANGED
    assert applicable["learning rate x 10"] == [f"{RATE}=1e-08"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["a=1"], "a=1 belongs to realign why RUN --test"),
        (["--yes"], "--yes belongs to realign why RUN --test"),
        (["--test", "why.step=3"], "why.step=3: the run has no checkpoint there, only ['step_000002', 'step_000004']"),
        (["--test", "interfaces.actor.objectiv=clip"], "objectiv"),
    ],
)
def test_what_cannot_be_tested_is_refused_before_anything_runs(slow, monkeypatch, capsys, words, message):
    monkeypatch.chdir(slow)
    assert main(["why", "runs/slow", *words]) == 2
    assert message in capsys.readouterr().err


def test_several_seeds_are_compared_and_other_runs_are_not(tmp_path, capsys):
    for name, last in {"1": 0.9, "2": 0.1, "other": 0.9}.items():
        (tmp_path / name).mkdir()
        values = [0.1 + (last - 0.1) * step / 20 for step in range(21)]
        lines = [{"step": step, "eval/reward": value} for step, value in enumerate(values)]
        (tmp_path / name / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        (tmp_path / name / "config.yaml").write_text(f"seed: {name}\nsteps: {len(name)}\n")
    assert main(["why", str(tmp_path / "1"), str(tmp_path / "2")]) == 0
    assert capsys.readouterr().out.startswith("Seeds disagree: 1 of 2 runs learn, and eval/reward ends between 0.1 and")
    assert main(["why", str(tmp_path / "1"), str(tmp_path / "other")]) == 2
    assert "differ only in their seeds" in capsys.readouterr().err


def test_the_effect_is_paired_by_prompt_and_the_control_is_no_remedy(tmp_path):
    rewards = {why.UNCHANGED: (0.0, 0.5), "better": (0.4, 0.8), why.CONTROL: (1.0, 1.5)}
    forks = {name: tmp_path / str(i) for i, name in enumerate(rewards)}
    for name, values in rewards.items():
        forks[name].mkdir()
        samples = [{"step": 2, "id": str(i), "reward": x} for i, x in enumerate(values)]
        samples.append({"step": 1, "id": "early", "reward": 9.0})
        lines = {"metrics": [{"step": 1, "reward": 9.0}, {"step": 2, "reward": 0.1}], "samples": samples}
        for file, records in lines.items():
            (forks[name] / f"{file}.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))
        (forks[name] / "summary.json").write_text("{}")
    forks["lost"] = tmp_path / "lost"
    shown = why.effects(forks, 2)
    # differences 0.4 and 0.3: mean 0.35, standard deviation 0.0707, error 0.05
    assert shown[0] == "better helps most: reward moves by +0.350 (+0.221 to +0.479)."
    assert shown[3].split() == ["unchanged", "0.250"]
    assert shown[6] == f"{'lost':<28}failed"
