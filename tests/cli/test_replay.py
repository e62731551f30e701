"""`realign replay`, `fork` and `bisect`, on a run of five steps."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file

from realign.cli import main
from realign.cli.replay import _of_machine


def weights(run):
    return load_file(run / "final" / "actor" / "model.safetensors")


def test_a_fork_without_changes_is_the_run_and_one_with_changes_shares_its_steps(finished, monkeypatch, capsys):
    monkeypatch.chdir(finished)
    assert main(["fork", "runs/a", "3", "output_dir=runs/same"]) == 0
    assert all(
        torch.equal(x, weights(finished / "runs/same")[name]) for name, x in weights(finished / "runs/a").items()
    )
    info = json.loads((finished / "runs/same/run.json").read_text())
    assert info["parent"] == {"run": str(finished / "runs/a"), "step": 3}
    assert main(["fork", "runs/a", "2", "interfaces.actor.adv_norm.std=none"]) == 0
    lines = {
        name: [json.loads(line) for line in (finished / "runs" / name / "metrics.jsonl").read_text().splitlines()]
        for name in ("a", "a-fork2-std-none")
    }
    for one, other in zip(*lines.values(), strict=True):
        assert (one.get("grad_norm") == other.get("grad_norm")) == (one["step"] <= 2)
    capsys.readouterr()
    assert main(["bisect", "runs/a", "runs/a-fork2-std-none"]) == 0
    out = capsys.readouterr().out
    assert "setting interfaces.actor.adv_norm.std: group and none" in out
    assert "first step that differs: 3" in out
    assert out.index("advantage in the loss of actor at prompt") < out.index("gradient norm of actor")
    assert main(["bisect", "runs/a", "runs/same"]) == 0
    assert "the metrics of all 5 common steps are equal" in capsys.readouterr().out
    assert main(["replay", "runs/a-fork2-std-none", "1"]) == 2
    assert "is a fork" in capsys.readouterr().err


def test_a_replay_says_whether_the_run_recorded_the_same(finished, monkeypatch, capsys):
    monkeypatch.chdir(finished.parent)  # the paths of the config are relative to the folder of its start
    assert main(["replay", str(finished / "runs/a"), "4"]) == 0
    assert "metrics equal to the recorded ones" in capsys.readouterr().out
    assert (finished / "runs/a/replay/step_000004/batch.safetensors").exists()


def test_a_changed_record_is_noticed(finished, monkeypatch, capsys, tmp_path):
    monkeypatch.chdir(finished)
    path = finished / "runs/a/metrics.jsonl"
    text = path.read_text()
    lines = [json.loads(line) for line in text.splitlines()]
    lines[-1]["reward"] += 0.25
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    try:
        assert main(["replay", "runs/a", "5", "--out", str(tmp_path / "out")]) == 0
    finally:
        path.write_text(text)
    assert "1 of" in (out := capsys.readouterr().out)
    assert "metrics differ from the recorded ones: reward is" in out


def test_a_command_bisects_the_steps_of_a_run(finished, monkeypatch, capsys):
    monkeypatch.chdir(finished)
    test = "import json, sys; sys.exit(json.load(open('step.json'))['step'] >= 3)"
    assert main(["bisect", "runs/a", "--run", f'python3 -c "{test}"']) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "first bad step: 3"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["replay", "runs/a"], "realign replay expects a run and a step"),
        (["fork", "runs/a", "x"], "realign fork expects a run and a step"),
        (["bisect", "runs/a"], "realign bisect expects two runs"),
        (["replay", "nowhere", "1"], "this folder does not exist"),
        (["replay", "runs/a", "9"], "step 9: the run has steps 1 to 5"),
        (["replay", "runs/a", "2", "--break", "interfaces.reward"], "Roles that do: actor"),
        (["bisect", "runs/a", "runs/a", "--break", "actor"], "--break does not apply to realign bisect"),
        (["fork", "runs/a", "2", "interfaces.actor.adv_nrm.std=none"], "adv_norm"),
    ],
)
def test_mistakes_are_one_line(words, message, finished, monkeypatch, capsys):
    monkeypatch.chdir(finished)
    assert main(words) == 2
    assert message in capsys.readouterr().err


def test_loads_of_experts_are_compared_and_durations_are_not():
    of_training = ("expert_load_max", "idle_experts", "load_balancing_loss", "reward")
    of_machine = ("step_s", "time/actor_gen_s", "rollout/ready_prompts", "train_tokens_per_s", "seconds")
    assert not any(map(_of_machine, of_training))
    assert all(map(_of_machine, of_machine))
