"""`realign eval`: the evaluations of an experiment on saved weights."""

from __future__ import annotations

import json
import math
import re
import shutil
from pathlib import Path

import pytest

from realign.cli import commands as cli
from realign.cli.arguments import read_arguments
from realign.cli.evaluate import read_request
from realign.config import build_experiment, compose
from realign.runtime.local import LocalRuntime
from tests.tiny import save_tiny

REWARD = """\
def score(prompt, response, row):
    return float(row['digit'] in response)
"""
SHORT = ["evaluation.generation.max_new_tokens=6", "evaluation.generation.fixed_length=true"]


@pytest.fixture(scope="module")
def task(tmp_path_factory) -> Path:
    """Return a folder with a model, two files of rows, and a reward function; names are outside ASCII."""
    folder = tmp_path_factory.mktemp("tâche 日本")
    save_tiny(folder / "modèle")
    for name, digits in (("a", "0123"), ("b", "89")):
        rows = [json.dumps({"prompt": f"{digit}+{digit}=", "digit": digit}) for digit in digits]
        (folder / f"{name}.jsonl").write_text("\n".join(rows))
    (folder / "reward.py").write_text(REWARD)
    return folder


@pytest.fixture(autouse=True)
def here(task, tmp_path, monkeypatch):
    """Run in a folder with links to the task."""
    for path in task.iterdir():
        (tmp_path / path.name).symlink_to(path)
    monkeypatch.chdir(tmp_path)


def request_of(*words: str):
    args = read_arguments(["eval", *words])
    return read_request(args, args.words[1:])


def results(folder: str) -> dict:
    return json.loads((Path(folder) / "results.json").read_text(encoding="utf-8"))["evaluations"]


def test_metrics_samples_and_standard_errors_are_those_of_the_same_evaluation_in_a_run(capsys):
    sampled = [
        *("evaluation.data.path=a.jsonl", "interfaces.reward.function=reward.py:score", "interfaces.reward.workers=0"),
        *("evaluation.generation.n=4", "evaluation.pass_at=[1,4]", *SHORT),
    ]
    assert cli.main(["eval", "modèle", *sampled, "--out", "ergebnis ü"]) == 0
    shown = capsys.readouterr().out
    evaluation = results("ergebnis ü")["evaluation"]
    assert re.search(r"evaluation: 4 rows in .* 4 responses per prompt; pass@1, pass@4", shown)
    assert str(Path("ergebnis ü/results.json").absolute()) in shown

    run = ["experiment=grpo", "models.actor.path=modèle", "data.path=a.jsonl", "batch_prompts=4", *sampled]
    run += ["interfaces.actor.generation.max_new_tokens=6"]
    runtime = LocalRuntime(build_experiment(compose(run)))
    values, _ = runtime.evaluate()
    runtime.close()
    del values["time/evaluation_s"]
    assert {f"eval/{name}": value for name, value in evaluation["metrics"].items()} == values

    samples = [json.loads(line) for line in Path("ergebnis ü/samples.jsonl").read_text(encoding="utf-8").splitlines()]
    assert len(samples) == 16
    assert sum(sample["reward"] for sample in samples) / 16 == pytest.approx(values["eval/reward"])
    means = [sum(s["reward"] for s in samples if s["id"] == i) / 4 for i in dict.fromkeys(s["id"] for s in samples)]
    center = sum(means) / 4
    error = math.sqrt(sum((mean - center) ** 2 for mean in means) / 3 / 4)
    assert evaluation["standard_errors"]["mean@4"] == pytest.approx(error)
    assert evaluation["standard_errors"]["reward"] == pytest.approx(error)


def test_a_file_of_sets_is_evaluated_whole_or_by_names():
    Path("sets.yaml").write_text(
        "evaluations:\n"
        "  small: {data: {path: a.jsonl}, reward: {function: 'reward.py:score', workers: 0}}\n"
        "  other: {data: {path: b.jsonl}, reward: {function: 'reward.py:score', workers: 0}, sweep: {n: [2]}}\n"
        "interfaces: {actor: {generation: {max_new_tokens: 5}}}\n"
    )
    assert cli.main(["eval", "modèle", "sets.yaml", "eval.samples=1"]) == 0
    evaluations = results("evals/modèle")
    assert {name: one["prompts"] for name, one in evaluations.items()} == {"small": 4, "other": 2}
    assert "mean@2@n=2" in evaluations["other"]["metrics"]
    lines = [json.loads(line) for line in Path("evals/modèle/samples.jsonl").read_text().splitlines()]
    assert [(s["evaluation"], s.get("sweep")) for s in lines] == [
        ("small", None),
        ("other", None),
        *[("other", "n=2")] * 2,
    ]
    assert cli.main(["eval", "modèle", "sets.yaml", "eval.sets=[other]", "overwrite=true"]) == 0
    assert list(results("evals/modèle")) == ["other"]


def test_the_weights_are_loaded_without_optimizer_and_training_data_is_not_read():
    words = ["evaluation.data.path=a.jsonl", "evaluation.reward.function=reward.py:score"]
    request = request_of("modèle", *words)
    assert request.experiment.models["actor"].for_evaluation().optimizer is None
    assert request.experiment.models["actor"].path == "modèle"
    assert request.keys == {"evaluation": "evaluation"}
    assert str(request.out) == "evals/modèle"
    assert str(request_of("runs/grpo/final/actor", *words).out) == "evals/grpo_final_actor"


def test_the_folder_of_a_run_means_its_final_model():
    Path("runs/grpo/final").mkdir(parents=True)
    shutil.copytree("modèle", "runs/grpo/final/actor")
    words = ["evaluation.data.path=a.jsonl", "evaluation.reward.function=reward.py:score"]
    request = request_of("runs/grpo", *words)
    assert request.model == request.experiment.models["actor"].path == "runs/grpo/final/actor"
    assert str(request.out) == "evals/grpo_final_actor"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["./nowhere/actor", "evaluation.data.path=a.jsonl"], "models.actor.path='./nowhere/actor'"),
        (["a.jsonl", "evaluation.data.path=a.jsonl"], "models.actor.path='a.jsonl'"),
        (["modèle", "evaluation.data.path=missing.jsonl"], "evaluation.data.path: no file or folder 'missing.jsonl'"),
        (["modèle", "evaluation.data.path=broken.jsonl"], "broken.jsonl"),
        (["modèle", "evaluation.data.path=empty.jsonl"], "empty.jsonl"),
        (["modèle", "evaluation.data.path=a.jsonl", "eval.sets=[math]"], "no evaluation has the name 'math'"),
    ],
)
def test_bad_folders_data_and_names_end_with_exit_code_2_and_one_line(words, message, capsys):
    Path("broken.jsonl").write_text('{"prompt": "a"}\n{"prompt": \n')
    Path("empty.jsonl").write_text("")
    reward = ["evaluation.reward.function=reward.py:score", "evaluation.reward.workers=0"]
    assert cli.main(["eval", *words, *reward]) == 2
    shown = capsys.readouterr().err.strip()
    assert message in shown
    assert "\n" not in shown
    assert not Path("evals/modèle/results.json").exists()
