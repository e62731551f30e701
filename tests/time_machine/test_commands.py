"""`realign replay`, `fork` and `bisect`, on a run of five steps."""

from __future__ import annotations

import json
import shutil
import warnings
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from realign.cli import main
from realign.time_machine.earlier_run import run_folder
from realign.time_machine.replay import RecordedAnswers


def weights(run):
    return load_file(run / "final" / "actor" / "model.safetensors")


@pytest.fixture(scope="module")
def forked(finished):
    """Return the folder of `finished`, in which runs/fork is a fork of runs/a at step 2, a checkpoint of runs/a."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(finished)
        assert main(["fork", "runs/a", "2", "interfaces.actor.adv_norm.std=none", "output_dir=runs/fork"]) == 0
    return finished


def test_a_fork_without_changes_is_the_run_and_one_with_changes_shares_its_steps(forked, monkeypatch, capsys):
    monkeypatch.chdir(forked)
    assert main(["fork", "runs/a", "3", "output_dir=runs/same"]) == 0
    assert all(torch.equal(x, weights(forked / "runs/same")[name]) for name, x in weights(forked / "runs/a").items())
    info = json.loads((forked / "runs/same/run.json").read_text())
    a = json.loads((forked / "runs/a/run.json").read_text())
    assert info["parent"] == {"run": str(forked / "runs/a"), "id": a["id"], "step": 3}
    assert info["id"] != a["id"]
    lines = {
        name: [json.loads(line) for line in (forked / "runs" / name / "metrics.jsonl").read_text().splitlines()]
        for name in ("a", "fork")
    }
    for one, other in zip(*lines.values(), strict=True):
        assert (one.get("grad_norm") == other.get("grad_norm")) == (one["step"] <= 2)
    capsys.readouterr()
    assert main(["bisect", "runs/a", "runs/fork"]) == 0
    out = capsys.readouterr().out
    assert "setting interfaces.actor.adv_norm.std: group and none" in out
    assert "first step that differs: 3" in out
    assert out.index("advantage in the loss of actor at prompt") < out.index("gradient norm of actor")
    assert main(["bisect", "runs/a", "runs/same"]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "the metrics of all 5 common steps are equal"


def test_bisect_says_which_of_two_runs_goes_on_after_their_common_steps(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for name, steps in {"short": 3, "long": 5}.items():
        (tmp_path / name).mkdir()
        lines = [{"step": step, "reward": step / 10, "step_s": steps} for step in range(1, steps + 1)]
        (tmp_path / name / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        (tmp_path / name / "config.yaml").write_text(f"steps: {steps}\n")
    expected = "the metrics of all 3 common steps are equal. long goes on after step 3, to step 5"
    for words in (["short", "long"], ["long", "short"]):
        assert main(["bisect", *words]) == 0
        assert capsys.readouterr().out.splitlines()[-1] == expected


def test_a_fork_of_a_fork_has_the_steps_and_settings_of_both(forked, monkeypatch, capsys):
    monkeypatch.chdir(forked)
    # at 2, there is only the checkpoint of runs/a, which has other settings
    assert main(["fork", "runs/fork", "2", "models.actor.optimizer.lr=1e-3", "output_dir=runs/second-2"]) == 0
    capsys.readouterr()
    assert main(["replay", "runs/second-2", "3"]) == 0
    assert "metrics equal to the recorded ones" in capsys.readouterr().out
    assert main(["bisect", "runs/fork", "runs/second-2"]) == 0
    shown = capsys.readouterr().out
    assert "first step that differs: 3 (lr: " in shown  # the same gradients, and another learning rate
    assert shown.splitlines()[-1].startswith("  weights of actor after the step: ")
    assert main(["fork", "runs/fork", "3", "models.actor.optimizer.lr=1e-3", "output_dir=runs/second-3"]) == 0
    capsys.readouterr()
    assert main(["bisect", "runs/a", "runs/second-3"]) == 0  # step 3 is one of runs/fork
    shown = capsys.readouterr().out
    assert "first step that differs: 3 (" in shown
    assert "advantage in the loss of actor at prompt" in shown


def test_a_step_of_the_parent_is_not_replayed_or_forked_in_a_fork(forked, monkeypatch, capsys):
    monkeypatch.chdir(forked)
    for words in (["replay", "runs/fork", "2"], ["fork", "runs/fork", "1", "output_dir=runs/none"]):
        assert main(words) == 2
        assert "fork is a fork at step 2, and its steps up to there are those of " in capsys.readouterr().err
    assert not (forked / "runs/none").exists()
    assert main(["bisect", "runs/fork", "--run", "false"]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "first bad step: 3"


def test_steps_that_a_fork_takes_again_have_the_recorded_rewards(work, train, monkeypatch):
    (work / "noisy.py").write_text(
        "import os\n\ndef score(prompt, response, row):\n    return os.urandom(1)[0] / 256\n"
    )
    train("noisy", "experiment=grpo_arithmetic", "steps=4", "interfaces.reward.function=noisy.py:score")
    monkeypatch.chdir(work)
    assert main(["fork", "runs/noisy", "3", "output_dir=runs/again"]) == 0
    rewards = {
        name: [json.loads(line)["reward"] for line in Path("runs", name, "metrics.jsonl").read_text().splitlines()[1:]]
        for name in ("noisy", "again")
    }
    assert rewards["again"][:3] == rewards["noisy"][:3]
    assert rewards["again"][3] != rewards["noisy"][3]


def test_a_fork_with_weights_of_another_shape_names_the_setting(work, train, monkeypatch, capsys):
    lora = ("models.actor.trains=lora", "models.actor.trains.rank=4", "models.actor.gradient_checkpointing=false")
    train("lora", "experiment=grpo_arithmetic", "steps=3", *lora)
    monkeypatch.chdir(work)
    assert main(["fork", "runs/lora", "2", "models.actor.trains.rank=8"]) == 2
    error = capsys.readouterr().err
    assert "models.actor does not match the checkpoint (models.actor.trains.rank was 4, is 8; " in error


def test_a_fork_takes_steps_again_from_data_that_was_moved(work, train, monkeypatch, capsys):
    shutil.copy(work / "task/prompts.jsonl", work / "rows.jsonl")
    train("moved", "experiment=grpo_arithmetic", "steps=4", "data.path=rows.jsonl")
    monkeypatch.chdir(work)
    Path("rows.jsonl").rename("elsewhere.jsonl")
    assert main(["fork", "runs/moved", "3", "data.path=elsewhere.jsonl", "output_dir=runs/on"]) == 0
    assert "no checkpoint at step 3" in capsys.readouterr().out
    assert torch.equal(*(next(iter(weights(work / "runs" / name).values())) for name in ("moved", "on")))


def test_a_fork_that_is_interrupted_while_it_takes_steps_again_leaves_no_folder(finished, monkeypatch):
    monkeypatch.chdir(finished)

    def interrupt(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(RecordedAnswers, "begin", interrupt)
        assert main(["fork", "runs/a", "3", "output_dir=runs/later"]) == 130
    assert not Path("runs/later").exists()
    assert main(["fork", "runs/a", "3", "output_dir=runs/later"]) == 0


def test_a_run_and_its_fork_can_be_moved(forked, tmp_path, monkeypatch, capsys):
    shutil.copytree(forked / "task", tmp_path / "task")
    shutil.copy(forked / "reward.py", tmp_path)
    for name in ("a", "fork"):
        run = shutil.copytree(forked / "runs" / name, tmp_path / "runs" / name)
        info = (run / "run.json").read_text().replace(str(forked), "/gone")
        (run / "run.json").write_text(info)
    monkeypatch.chdir(tmp_path.parent)
    assert main(["replay", str(tmp_path / "runs/fork"), "3", "--out", f"{tmp_path.name}/replayed"]) == 0
    assert "metrics equal to the recorded ones" in capsys.readouterr().out
    assert Path.cwd() == tmp_path
    assert (tmp_path / "replayed/step.json").is_file()


def test_a_run_from_elsewhere_says_where_the_paths_in_its_config_lead(forked, tmp_path, monkeypatch):
    """Its run.json names any folder of this machine, whose files the config then names."""
    run = shutil.copytree(forked / "runs" / "a", tmp_path / "a")
    monkeypatch.chdir(tmp_path)
    with pytest.warns(UserWarning, match=rf"comes from somebody else. Paths in its config are read from {forked}"):
        run_folder(run)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run_folder(forked / "runs" / "a")


def test_steps_before_a_setting_was_changed_are_not_replayed_with_it(train, work, monkeypatch, capsys):
    train("changed", "experiment=grpo_arithmetic", "steps=3")
    words = ["steps=5", "models.actor.optimizer.lr=1e-3", "resume=auto", "resume_allow=[models.actor.optimizer.lr]"]
    train("changed", "experiment=grpo_arithmetic", *words)
    monkeypatch.chdir(work)
    capsys.readouterr()
    assert main(["replay", "runs/changed", "4"]) == 0
    assert "metrics equal to the recorded ones" in capsys.readouterr().out
    for words in (["replay", "runs/changed", "3"], ["fork", "runs/changed", "1", "output_dir=runs/none"]):
        assert main(words) == 2
        assert (
            "other settings, which resume_allow or another version of realign changed after step 3"
            in capsys.readouterr().err
        )


def test_several_processes_are_named_as_the_reason_for_other_numbers(finished, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(finished)
    run = shutil.copytree("runs/a", tmp_path / "a")
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    for line in lines:
        if line["step"] == 4:
            line["grad_norm"] *= 1 + 1e-6  # as if each rank had summed its part
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    said = "Several processes of torchrun ran it, and one process recomputes it: sums round differently"
    assert main(["replay", str(run), "4"]) == 0
    assert said not in capsys.readouterr().out
    info = json.loads((run / "run.json").read_text())
    info["attempts"][0]["command"] = ["torchrun", "--nproc-per-node", "2", "-m", "realign"]
    (run / "run.json").write_text(json.dumps(info))
    for words, names in (([], True), (["--tolerance", "1e-4"], False)):
        assert main(["replay", str(run), "4", *words]) == 0
        assert (said in capsys.readouterr().out) == names


def test_a_run_from_the_weights_of_another_is_replayed_from_them(finished, train, monkeypatch, capsys):
    words = ["steps=4", "resume=runs/a", "resume_skip=[counters,data,optimizer]"]
    train("warm", "experiment=grpo_arithmetic", *words)
    monkeypatch.chdir(finished)
    for step in ("1", "3"):
        capsys.readouterr()
        assert main(["replay", "runs/warm", step]) == 0
        assert "metrics equal to the recorded ones" in capsys.readouterr().out


def test_a_damaged_checkpoint_says_how_to_go_on(finished, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(finished)
    run = shutil.copytree("runs/a", tmp_path / "a")
    (run / "checkpoints/step_000004/state.json").write_text("")
    assert main(["replay", str(run), "5"]) == 2
    assert "Remove this checkpoint to start from an earlier one." in capsys.readouterr().err
    shutil.rmtree(run / "checkpoints/step_000004")
    assert main(["replay", str(run), "5"]) == 0
    assert "metrics equal to the recorded ones" in capsys.readouterr().out


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
        (["fork", "runs/a", "5"], "the fork would end at step 5. Set a larger steps."),
        (["fork", "runs/a", "7", "steps=9"], "step 7: the run has steps 1 to 5"),
        (["fork", "runs/a", "2", "output_dir=./runs/../runs/a"], "runs/a: this is the run itself. Choose another"),
        (["bisect", "runs/a", "--run", " "], "--run ' ': expected a command"),
        (["bisect", "runs/a", "runs/a", "--tolerance", "-1"], "--tolerance: expected a number of at least 0"),
        (["replay", "runs/a", "2", "--tolerance", "nan"], "such as 1e-4, found 'nan'"),
        (["replay", "reward.py", "1"], "this is a file. Name the folder of a run"),
        (["replay", "runs/a", "2", "--out", "reward.py"], "reward.py is a file. Choose another folder"),
    ],
)
def test_mistakes_are_one_line(words, message, finished, monkeypatch, capsys):
    monkeypatch.chdir(finished)
    assert main(words) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("step.json", ["replay", "runs/a", "2"]),
        ("batch.safetensors", ["replay", "runs/a", "2"]),
        ("run.json", ["bisect", "runs/a", "--run", "false"]),
    ],
)
def test_a_replay_writes_through_no_link_in_the_run(finished, tmp_path, monkeypatch, capsys, name, words):
    shutil.copytree(finished / "runs/a", tmp_path / "runs/a", ignore=shutil.ignore_patterns("replay"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "precious").write_text("mine")
    for step in range(1, 6):
        out = tmp_path / f"runs/a/replay/step_{step:06d}"
        out.mkdir(parents=True)
        (out / name).symlink_to(tmp_path / "precious")
    assert main(words) == 2
    assert "is not a file that realign wrote" in capsys.readouterr().err
    assert (tmp_path / "precious").read_text() == "mine"
    shutil.rmtree(tmp_path / "runs/a/replay")
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "runs/a/replay").symlink_to(tmp_path / "elsewhere")
    monkeypatch.chdir(tmp_path)  # the command went where the run was started
    assert main(words) == 2
    assert "is a link to" in capsys.readouterr().err
    assert list((tmp_path / "elsewhere").iterdir()) == []
