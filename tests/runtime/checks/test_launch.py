"""Test launch checks outside of tests/test_config_mistakes.py: substitute models, nested data nodes and folders."""

from __future__ import annotations

import pytest

from realign.api import MicroBatchSpec
from realign.data import PromptData, SupervisedData, TextData, WithPretraining
from realign.errors import ConfigError, DataError
from realign.runtime import Evaluation, Experiment, LocalRuntime
from realign.runtime.checks.launch import check_ready, open_interfaces, used_interfaces, writable
from tests.runtime.test_step import BigramModel, CountToken, Prompts, experiment


def test_stand_ins_that_cannot_tell_are_taken_as_they_are(tmp_path):
    check_ready(experiment(tmp_path))
    assert not (tmp_path / "run").exists()


def test_the_folder_of_a_run_is_made_by_the_run_and_looked_at_before(tmp_path):
    assert writable(tmp_path / "a" / "b") == tmp_path
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "file").write_text("x")
    with pytest.raises(NotADirectoryError, match=r"output_dir=.*file/run.*: .*file' is not a folder\. Choose"):
        writable(tmp_path / "file" / "run")


@pytest.mark.parametrize("where", ["prompts", "pretraining"])
def test_a_data_node_inside_another_is_named_by_its_whole_key(tmp_path, where):
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"prompt": "1", "text": "2"}\n')
    nodes = {"prompts": PromptData(str(rows)), "pretraining": TextData(str(rows), block_tokens=2)}
    WithPretraining(**nodes).check("data")
    wrong = {"prompts": PromptData(str(rows), prompt_column="prmpt"), "pretraining": TextData("missing.jsonl")}
    with pytest.raises(DataError, match=rf"^data\.{where}\.(prompt_column: .*did you mean 'prompt'|path: no file)"):
        WithPretraining(**{**nodes, where: wrong[where]}).check("data")


def test_held_out_data_is_looked_at_as_training_data_is(tmp_path):
    held_out = SupervisedData(str(tmp_path / "missing.jsonl"))
    with pytest.raises(DataError, match=r"^evaluation\.data\.path: no file or folder"):
        check_ready(experiment(tmp_path, evaluation=Evaluation(held_out, CountToken())))


class Unopened(CountToken):
    """Interface whose `open` raises this error."""

    def __init__(self, error: Exception) -> None:
        super().__init__()
        self.error = error

    def open(self) -> None:
        raise self.error


def judged_by(judge: CountToken, tmp_path) -> Experiment:
    evaluation = Evaluation(Prompts(4), judge, metrics={"other": CountToken()})
    return experiment(tmp_path, evaluation=evaluation)


def test_an_interface_that_cannot_be_opened_is_named_by_its_key(tmp_path):
    made = judged_by(Unopened(ConfigError("url=x: no server")), tmp_path)
    assert list(used_interfaces(made)) == [
        "interfaces.actor",
        "interfaces.reward",
        "evaluation.reward",
        "evaluation.metrics.other",
    ]
    with pytest.raises(ConfigError, match=r"^evaluation\.reward: url=x: no server$"):
        open_interfaces(made)
    with pytest.raises(ConfigError, match=r"^evaluation\.reward: "):
        LocalRuntime(judged_by(Unopened(ConfigError("url=x: no server")), tmp_path))


def test_an_error_in_the_open_of_user_code_keeps_its_class_and_gets_the_key_as_a_note(tmp_path):
    with pytest.raises(ZeroDivisionError) as raised:
        open_interfaces(judged_by(Unopened(ZeroDivisionError("by zero")), tmp_path))
    assert (str(raised.value), raised.value.__notes__) == ("by zero", ["while calling evaluation.reward"])


def test_a_response_alone_may_not_fill_the_budget(tmp_path):
    match = r"^microbatch\.max_tokens_per_microbatch=4: this budget is too small .* up to 6 tokens \(.*max_new_tokens\)"
    with pytest.raises(ConfigError, match=match):
        check_ready(experiment(tmp_path, microbatch=MicroBatchSpec(max_tokens_per_microbatch=4)))
    check_ready(experiment(tmp_path, models={"actor": BigramModel()}, microbatch=MicroBatchSpec(None)))
