"""`realign.train` and its siblings: the same runs as on the command line, with objects of Python."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import datasets
import numpy
import pandas
import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

import realign
from realign.config import ConfigError, build_experiment, compose
from realign.data import PromptData
from realign.engines import OptimizerSpec, TransformersModel
from realign.errors import CheckpointError, DataError
from realign.interfaces.components.objectives import Clip
from realign.python_api import Run
from realign.runtime import Experiment
from tests.tiny import save_tiny

SMALL = {"steps": 2, "batch_prompts": 4, "interfaces.actor.generation": {"n": 4, "max_new_tokens": 6}}
WORDS = [
    *("experiment=grpo", "steps=2", "batch_prompts=4", "interfaces.actor.generation.n=4"),
    *("interfaces.actor.generation.max_new_tokens=6", "models.actor.path=model", "data.path=rows.jsonl"),
]
ROWS = [{"prompt": f"say {i}", "answer": str(i)} for i in range(8)]


def score(prompt, response, row):
    return float(response.count(row["answer"]))


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with a model and rows."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    save_tiny(tmp_path / "model")
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS), encoding="utf-8")
    (tmp_path / "reward.py").write_text("def score(prompt, response, row):\n    return 0.5\n", encoding="utf-8")
    return tmp_path


def in_session():
    """Return a function that no other process can import."""
    return lambda prompt, response, row: float(len(response))


def python(code: str, folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run code in a fresh process, from stdin without arguments."""
    done = subprocess.run(
        [sys.executable, *(arguments or ["-"])], input=code, cwd=folder, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done


def test_importing_the_package_imports_nothing_else(tmp_path):
    heavy = "{'torch', 'hydra', 'rich', 'realign.config'}"
    code = f"import sys, realign\nprint(sorted({heavy} & {{*sys.modules}}), dir(realign))"
    out = python(code, tmp_path).stdout
    assert out.startswith("[] ")
    assert all(f"'{name}'" in out for name in realign.__all__)


def test_all_public_names_exist_and_others_are_an_attribute_error():
    assert realign.Experiment is Experiment
    assert all(getattr(realign, name) is not None for name in realign.__all__)
    with pytest.raises(AttributeError, match="no attribute 'trian'"):
        _ = realign.trian


def test_the_experiment_is_that_of_the_command_line(folder):
    ours = realign.load_experiment("grpo", model="model", data="rows.jsonl", reward="reward.py:score", **SMALL)
    theirs = build_experiment(compose([*WORDS, "interfaces.reward.function=reward.py:score"]))
    assert ours.resolved == theirs.resolved


@pytest.mark.parametrize(
    ("given", "word"),
    [
        ({"algorithm": "dr_grpo"}, "algorithm=dr_grpo"),
        ({"lr": 1e-3}, "lr=1e-3"),
        ({"save_every_steps": None}, "save_every_steps=null"),
        ({"seed": numpy.int64(7)}, "seed=7"),
        ({"shuffle": False}, "shuffle=false"),
        ({"output_dir": Path("runs/a b")}, "output_dir='runs/a b'"),
        ({"name": "null"}, "name='null'"),
        ({"interfaces.actor.objective": "gspo"}, "interfaces.actor.objective=gspo"),
        ({"interfaces.actor.objective": Clip(high=0.3)}, "interfaces.actor.objective={_target_: clip, high: 0.3}"),
        ({"interfaces": {"actor": {"objective": {"high": 0.3}}}}, "interfaces.actor.objective.high=0.3"),
        ({"interfaces.reward.keep_environment": ["A", "B"]}, "interfaces.reward.keep_environment=[A,B]"),
        ({"callbacks.stop": "early_stopping", "evaluation.data": "rows.jsonl"}, None),
    ],
    ids=str,
)
def test_values_of_python_mean_what_they_mean_on_the_command_line(folder, given, word, capsys):
    ours = realign.load_experiment("grpo", model="model", data="rows.jsonl", reward="reward.py:score", **SMALL, **given)
    words = [word] if word else ["callbacks.stop=early_stopping", "evaluation.data.path=rows.jsonl"]
    words = ["models.actor.optimizer.lr=1e-3" if word == "lr=1e-3" else word for word in words]
    theirs = build_experiment(compose([*WORDS, "interfaces.reward.function=reward.py:score", *words]))
    assert ours.resolved == theirs.resolved
    assert capsys.readouterr().err == ("note: lr=0.001 was read as models.actor.optimizer.lr=0.001\n" * ("lr" in given))


def test_components_are_passed_as_objects(folder):
    model = TransformersModel("model", optimizer=OptimizerSpec(lr=0.25))
    data = PromptData("rows.jsonl", limit=3)
    experiment = realign.load_experiment("grpo", model=model, data=data, reward="reward.py:score", **SMALL)
    assert (experiment.models["actor"].optimizer.lr, experiment.data.limit) == (0.25, 3)
    pairs = [{"prompt": "a", "chosen": "b", "rejected": "c"}]
    head = {"_target_": "realign.models.network.heads.Score"}
    reward = realign.load_experiment("reward_model", model="model", data=pairs, steps=1)
    assert reward.models["reward"].path == "model"
    assert head["_target_"].endswith(type(reward.models["reward"].head).__name__)


def test_objects_of_a_model_and_tokenizer_give_the_run_of_their_folder_and_stay_as_they_are(folder):
    model = AutoModelForCausalLM.from_pretrained("model")
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    given = {"data": "rows.jsonl", "reward": in_session(), "quiet": True, **SMALL}
    tokenizer = AutoTokenizer.from_pretrained("model")
    ours = realign.train("grpo", model=model, tokenizer=tokenizer, output_dir="runs/ours", **given)
    theirs = realign.train("grpo", model="model", output_dir="runs/theirs", **given)
    final = [load_file(done.folder / "final/actor/model.safetensors") for done in (ours, theirs)]
    assert all(torch.equal(weight, final[1][name]) for name, weight in final[0].items())
    assert [step["reward"] for step in ours.history[1:]] == [step["reward"] for step in theirs.history[1:]]
    assert any(not torch.equal(weight, before[name]) for name, weight in final[0].items())
    assert all(torch.equal(weight, before[name]) for name, weight in model.state_dict().items())


def test_a_run_resumes_with_an_equal_model_object_only(folder):
    model = AutoModelForCausalLM.from_pretrained("model")
    given = {"data": "rows.jsonl", "reward": in_session(), "quiet": True, **SMALL}
    realign.train("grpo", model=model, **given)
    again = realign.train("grpo", model=model, resume="auto", **{**given, "steps": 3})
    assert [step["step"] for step in again.history] == [0, 1, 2, 3]
    next(iter(model.parameters())).data.mul_(2)
    with pytest.raises(CheckpointError, match=r"models.actor.path was"):
        realign.train("grpo", model=model, resume="auto", **{**given, "steps": 4})
    new = realign.train("grpo", model=model, overwrite=True, **{**given, "steps": 1})
    assert sum(path.is_dir() for path in (new.folder / "start").iterdir()) == 1


@pytest.mark.parametrize("kind", [list, datasets.Dataset.from_list, pandas.DataFrame, iter], ids=lambda k: k.__name__)
def test_rows_in_memory_are_stored_under_a_name_of_their_content(folder, kind):
    paths = [realign.load_experiment("sft", model="model", data=kind(ROWS), steps=1).data.path for _ in range(2)]
    assert paths[0] == paths[1]
    assert Path(paths[0]).parent == folder / "cache" / "realign" / "rows"
    other = realign.load_experiment("sft", model="model", data=kind(ROWS[1:]), steps=1).data.path
    assert other != paths[0]
    assert [
        row["prompt"]
        for row in datasets.load_dataset(
            Path(other).suffix[1:].replace("jsonl", "json"),
            data_files=other,
            split="train",
            cache_dir=str(folder / "hf"),
        )
    ] == [row["prompt"] for row in ROWS[1:]]


def test_errors_are_those_of_the_command_line(folder):
    cases = {
        "unknown key 'stepps'; did you mean 'steps'": {"stepps": 1},
        "unknown key 'interfaces.actor.klo'": {"interfaces.actor.klo": 1},
        "data: row 1 is no JSON": {"data": [{"prompt": {1, 2}}]},
        "data: row 2 has \\\\ud83d alone, half of a character": {"data": [{"prompt": "a"}, {"prompt": "\ud83d"}]},
        "data: the table cannot be written: .*column x .* astype": {"data": pandas.DataFrame({"x": [1, "a"]})},
        "data: the table cannot be written: .*surrogates": {"data": pandas.DataFrame({"x": ["\ud83d"]}, dtype=object)},
        "data: a dataset with the splits 'train', 'test'. Give one of them": {
            "data": datasets.DatasetDict({name: datasets.Dataset.from_list(ROWS) for name in ("train", "test")})
        },
        "models.actor: an object of set is no setting": {"model": {1}},
        "no 'scor'; found score": {"reward": "reward.py:scor"},
    }
    for message, given in cases.items():
        arguments = {"model": "model", "data": "rows.jsonl", "reward": "reward.py:score", **SMALL, **given}
        with pytest.raises((ConfigError, DataError), match=message) as caught:
            realign.train("grpo", quiet=True, **arguments)
        assert caught.value._render_traceback_() == [f"error: {caught.value}"]


def test_a_run_shows_what_it_learned(folder, capsys, drawn_curves, monkeypatch):
    opened = []
    monkeypatch.setattr("realign.python_api.webbrowser.open", opened.append)
    reward = {"count": in_session(), "half": {"function": "reward.py:score", "weight": 0.5}}
    trained = realign.train("grpo", model="model", data=ROWS, reward=reward, quiet=True, **SMALL)
    assert capsys.readouterr().out == ""
    assert (trained.folder / ".hydra" / "overrides.yaml").is_file()
    assert len(trained.series("rewards/count/mean")) == len(trained.series("reward")) == 2
    assert trained.plot() == trained.folder / "curves.png"
    best = trained.samples(best=2, worst=1)
    assert [record["reward"] for record in best] == sorted((r["reward"] for r in best), reverse=True)
    assert repr(best) == "3 samples"
    assert [line.split(":")[0][:4] for line in capsys.readouterr().out.splitlines()] == ["step"] * 3
    assert {record["step"] for record in trained.samples()} == {2}
    assert len(trained.samples(best=10_000)) == len(trained.samples(worst=10_000)) == len(trained.samples(10_000, 5))
    assert trained.report().is_file()
    assert opened == [(folder / "runs/grpo/report.html").as_uri()]
    assert (trained.save("my-model") / "README.md").is_file()
    assert len(trained.chat("a", "b", **{"generation.max_new_tokens": 3})) == 2
    assert realign.chat("my-model", "a", seed=3, generation={"max_new_tokens": 3}) == realign.chat(
        trained, "a", seed=3, generation={"max_new_tokens": 3}
    )
    assert Run("runs/grpo") == trained


def test_a_folder_without_a_run_or_its_files_is_an_error(folder):
    with pytest.raises(ConfigError, match="contains no run"):
        Run("model")
    (folder / "empty").mkdir()
    (folder / "empty" / "run.json").write_text("{}", encoding="utf-8")
    with pytest.raises(ConfigError, match="no curves yet"):
        Run("empty").plot()
    with pytest.raises(ConfigError, match="recorded no responses"):
        Run("empty").samples()


def failing_from(call: int):
    """Return a reward function that fails for all responses from its call of this number on."""
    calls = []

    def reward(prompt, response, row):
        calls.append(1)
        if len(calls) > 16 * (call - 1):
            raise RuntimeError("no quota")
        return float(len(response))

    return reward


def test_any_run_can_be_opened_compared_and_used_as_a_model(folder, monkeypatch, capsys):
    first = realign.train("grpo", model="model", data=ROWS, reward=in_session(), quiet=True, **SMALL)
    second = realign.train(
        "grpo", model=first, data=ROWS, reward=in_session(), quiet=True, output_dir="runs/second", seed=2, **SMALL
    )
    config = (second.folder / "config.yaml").read_text()
    assert f"path: {first.folder / 'final' / 'actor'}" in config
    assert repr(realign.Run("runs/grpo")) == f"Run('{folder}/runs/grpo': completed, step 2 of 2)"
    monkeypatch.chdir(folder / "model")  # an opened run stays where it is
    assert first.series("reward") == realign.Run(folder / "runs" / "grpo").series("reward")
    realign.compare(first, folder / "runs" / "second")
    shown = capsys.readouterr().out
    assert "seed" in shown
    assert "reward" in shown
    for unknown, near in (("rewrad", "reward"), ("grad_nrm", "grad_norm")):
        with pytest.raises(realign.RealignError, match=f"no step has a metric '{unknown}'; did you mean '{near}'"):
            first.series(unknown)


def test_a_run_that_an_error_ended_is_attached_to_the_error_and_one_before_it_is_not(folder):
    settings = {**SMALL, "steps": 4, "interfaces.reward.max_failed_fraction": 0.5}
    with pytest.raises(realign.RealignError, match="no quota") as caught:
        realign.train("grpo", model="model", data=ROWS, reward=failing_from(3), quiet=True, **settings)
    failed = caught.value.run
    assert failed == realign.Run("runs/grpo")
    assert repr(failed).endswith("failed, step 2 of 4)")
    assert len(failed.series("reward")) == 2
    with pytest.raises(ConfigError, match="earlier run") as again:
        realign.train("grpo", model="model", data=ROWS, reward=failing_from(3), quiet=True, **settings)
    assert again.value.run is None


def test_arguments_of_trl_and_lists_of_functions_mean_ours(folder):
    def short(prompt, response, row):
        return 0.0

    def load(**arguments):
        return realign.load_experiment("grpo", model="model", **SMALL, **arguments)

    ours = load(data=ROWS, reward={"short": short, "score": "reward.py:score", "short_3": short})
    theirs = load(train_dataset=ROWS, reward_funcs=[short, "reward.py:score", short])
    assert theirs.data == ours.data
    assert list(theirs.interfaces["reward"].functions) == list(ours.interfaces["reward"].functions)
    assert load(data=ROWS, reward=["reward.py:score"]).interfaces["reward"].function == "reward.py:score"
    assert list(load(data=ROWS, reward=[short, in_session()]).interfaces["reward"].functions) == ["short", "reward_2"]
    held_out = datasets.Dataset.from_list(ROWS[:2])
    expected = load(data=ROWS, reward=short, **{"evaluation.data": held_out}).evaluation.data
    assert load(data=ROWS, reward=short, eval_dataset=held_out).evaluation.data == expected
    assert load(data=ROWS, reward=short, evaluation=held_out).evaluation.data == expected
    several = load(data=ROWS, reward=short, eval_dataset={"a": ROWS[:2], "b": ROWS[2:4]})
    assert list(several.evaluations) == ["a", "b"]
    tokenizer = load(data=ROWS, reward=short, processing_class="model").models["actor"].tokenizer
    assert tokenizer == "model"
    for wrong, message in (
        ({"train_dataset": ROWS, "data": ROWS}, "train_dataset: data is given too"),
        ({"data": ROWS, "reward": []}, "reward: the list is empty"),
        ({"data": ROWS, "args": object()}, "args: settings are arguments of realign.train itself"),
    ):
        with pytest.raises(ConfigError, match=message):
            load(**wrong)


SETTING_UP = """
import realign

def score(prompt, response, row):
    return float(response.count(row["answer"]))

rows = [{"prompt": f"say {i}", "answer": str(i)} for i in range(8)]
settings = {"batch_prompts": 4, "interfaces.actor.generation": {"n": 4, "max_new_tokens": 6}}
settings["models.actor.sampler.compiled_decode"] = "off"  # which would be compiled for each test
"""
TRAINING = """
run = realign.train("grpo", model="model", data=rows, reward=score, steps=2, **settings)
run.plot(); run.samples(best=3); run.save("my-model")
"""
CONTINUING = 'realign.train("grpo", model="model", data=rows, reward=score, steps=3, resume="auto", **settings)'
REFUSED = f"""
from realign.errors import CheckpointError
try:
    {CONTINUING}
except CheckpointError as error:
    print("refused:", error)
"""


@pytest.mark.slow
@pytest.mark.parametrize("script", [False, True], ids=["typed in", "script without a guard"])
def test_five_lines_train_a_model_in_a_fresh_process(folder, script):
    """No worker may import `__main__`. The source of the function is in run.json, and a changed one is refused."""

    def start(code: str) -> str:
        (folder / "five.py").write_text(code, encoding="utf-8")
        return python(code, folder, *(["five.py"] if script else [])).stdout

    out = start(SETTING_UP + TRAINING)
    assert "functions of this session" in out
    assert "score: in a thread of the run" in out.replace("\n", " ")
    assert out.count("reward ") >= 3
    assert (folder / "my-model" / "model.safetensors").is_file()
    recorded = json.loads((folder / "runs/grpo/run.json").read_text(encoding="utf-8"))
    source = recorded["functions"]["interfaces.reward.function"]
    assert source == (
        'def score(prompt, response, row):\n    return float(response.count(row["answer"]))\n' if script else ""
    )
    out = start(SETTING_UP.replace("float(", "2.0 * float(") + REFUSED + SETTING_UP + CONTINUING)
    assert "refused: The config differs from that of the checkpoint: interfaces.reward.function was" in out
    assert "Resumed from" in out


def test_a_notebook_shows_progress_below_its_cell(monkeypatch):
    from realign.records.metrics.live_display import LiveDisplay

    shown = []

    class Handle:
        def update(self, table):
            shown.append(table)

    class IPython:
        @staticmethod
        def display(table, display_id):
            shown.append(table)
            return Handle()

    monkeypatch.setitem(sys.modules, "IPython", IPython)
    monkeypatch.setitem(sys.modules, "IPython.display", IPython)
    console = Console(force_jupyter=True)
    with LiveDisplay(console, "toy", 2, ["reward"]) as display:
        display.log(1, {"reward": 0.5})
    assert len(shown) == 2
    html = shown[-1]._repr_mimebundle_([], [])["text/html"]
    assert "reward" in html
    assert "0.5" in html
