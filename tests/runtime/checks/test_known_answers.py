"""Test that rewards of known answers are compared before the first step."""

from __future__ import annotations

import io
import json
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from realign.errors import ConfigError, RewardError, SettingsError
from realign.interfaces.environment import EnvironmentInterface
from realign.interfaces.grpo import GRPOActorInterface
from realign.interfaces.rule_reward import RuleRewardInterface
from realign.rewards.terms import FunctionTerm
from realign.runtime import Evaluation, run
from realign.runtime.local import LocalRuntime
from tests.toys import GENERATION, Prompts, experiment

FUNCTIONS = """
from realign.cells import answers_of

CALLS = []

def right(prompt, response, row):
    CALLS.append((prompt, response, row["answer"]))
    return float(response == str(row["answer"]))

def inverted(prompt, response, row):
    return float(response != str(row["answer"]))

def constant(prompt, response, row):
    return 0.5

def absent(prompt, response, row):
    return None

def failing(prompt, response, row):
    raise ValueError("no verifier")

def broken(prompt, response, row):
    return float(response == str(row["answer"]) and row["answer"] != 12)

def ranked(prompt, responses, row):
    return [float(response == f"<{row['answer']}>") for response in responses]

def long(prompt, response, row):
    return float(len(response))

def nested(response, answer):
    return float(response in answers_of(answer["gold"]))

def wanting(completion, solution):
    return 1.0
"""


@dataclass
class Sums(Prompts):
    """Rows with answers 10, 11, 12 and so on; `answers` replaces them."""

    answers: tuple[Any, ...] | None = None

    def sample(self, rows):
        data = super().sample(rows)
        answers = [10 + row if self.answers is None else self.answers[row] for _, row in rows]
        return data.with_metadata(row=[{"n": row, "answer": a} for (_, row), a in zip(rows, answers, strict=True)])


@pytest.fixture
def verifier(tmp_path):
    """Return a function that builds a reward with `known_answer`."""
    (tmp_path / "verifiers.py").write_text(FUNCTIONS)

    def made(name: str, **settings) -> RuleRewardInterface:
        settings = {
            "known_answer": "answer",
            "workers": 0,
            "function": f"{tmp_path / 'verifiers.py'}:{name}",
        } | settings
        return RuleRewardInterface(**settings)

    return made


def runtime(tmp_path: Path, reward: RuleRewardInterface, data: Prompts | None = None, **changes) -> LocalRuntime:
    actor = GRPOActorInterface(generation=GENERATION)
    changes = {"evaluation": None} | changes
    return LocalRuntime(
        experiment(tmp_path, interfaces={"actor": actor, "reward": reward}, data=data or Sums(), **changes)
    )


def test_right_answers_that_score_higher_pass_with_a_line_of_both_means(tmp_path, verifier):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        lines = runtime(tmp_path, verifier("right")).known_answers
    assert lines == ["interfaces.reward: mean reward 1 of right answers, 0 of wrong answers (8 rows)"]


def test_the_wrong_answer_is_that_of_the_next_row_with_another_answer(tmp_path, verifier):
    reward = verifier("right")
    answers = ("7", " 7", None, "8", 9)
    runtime(tmp_path, reward, Sums(5, answers=answers), shuffle=False)
    calls = reward._open_pool("")._function.__globals__["CALLS"]
    assert [(prompt, response) for prompt, response, _ in calls] == [
        *(("1 2", "7"), ("1 2", "8")),
        *(("1 3", " 7"), ("1 3", "8")),
        *(("1 5", "8"), ("1 5", "9")),
        *(("1 6", "9"), ("1 6", "7")),
    ]


@pytest.mark.parametrize(
    ("name", "means", "example"),
    [
        ("inverted", "0 and wrong answers 1", "has reward 0, and the wrong answer '11' has reward 1"),
        ("constant", "0.5 and wrong answers 0.5", "has reward 0.5, and the wrong answer '11' has reward 0.5"),
        ("absent", "none and wrong answers none", "has reward none, and the wrong answer '11' has reward none"),
    ],
)
def test_a_verifier_that_does_not_prefer_right_answers_stops_the_run(tmp_path, verifier, name, means, example):
    with pytest.raises(RewardError) as caught:
        runtime(tmp_path, verifier(name), shuffle=False)
    message = str(caught.value)
    assert message.startswith(
        f"interfaces.reward.known_answer=answer: right answers have a mean reward of {means} (8 rows). Row '0@0': the "
        f"right answer '10' {example}."
    )
    assert "Set interfaces.reward.known_answer=null to skip this check" in message


def test_a_verifier_that_fails_stops_the_run_with_its_key(tmp_path, verifier):
    with pytest.raises(RewardError, match=r"^interfaces\.reward: reward function .*failed on 9 of 9 scored items"):
        runtime(tmp_path, verifier("failing"))


def test_a_single_row_whose_right_answer_is_rejected_is_a_warning(tmp_path, verifier):
    with pytest.warns(UserWarning, match=r"in 1 of 8 rows\. Row '2@0': the right answer '12' has reward 0, and"):
        lines = runtime(tmp_path, verifier("broken"), shuffle=False).known_answers
    assert lines == ["interfaces.reward: mean reward 0.875 of right answers, 0 of wrong answers (8 rows)"]


def test_the_template_forms_responses_and_functions_of_groups_compare_both(tmp_path, verifier):
    lines = runtime(tmp_path, verifier("ranked", known_answer_template="<{answer}>")).known_answers
    assert "mean reward 1 of right answers, 0 of wrong" in lines[0]
    with pytest.raises(RewardError, match=r"known_answer_template='\{answer\}'"):
        runtime(tmp_path, verifier("ranked"))


def test_the_weighted_sum_of_several_functions_is_compared(tmp_path, verifier):
    path = verifier("right").function
    functions = {"right": FunctionTerm(path, weight=2), "half": path.replace(":right", ":constant")}
    lines = runtime(tmp_path, verifier("right", function=None, functions=functions)).known_answers
    assert "mean reward 2.5 of right answers, 0.5 of wrong" in lines[0]


def test_answers_are_found_in_nested_columns_and_read_as_texts(tmp_path, verifier):
    answers = ({"gold": 10.0}, {"gold": ["11", "eleven"]}, {"gold": None}, {"other": "x"})
    reward = verifier("nested", known_answer="answer.gold")
    lines = runtime(tmp_path, reward, Sums(4, answers=answers), shuffle=False).known_answers
    assert lines == ["interfaces.reward: mean reward 1 of right answers, 0 of wrong answers (2 rows)"]


def test_rows_with_one_answer_are_a_warning(tmp_path, verifier):
    with pytest.warns(UserWarning, match="the first 2 rows have the same answer"):
        lines = runtime(tmp_path, verifier("right"), Sums(2, answers=(4, "4"))).known_answers
    assert lines == ["interfaces.reward: not checked, because all rows have the same answer"]


def test_without_the_setting_nothing_is_scored(tmp_path, verifier):
    reward = verifier("right", known_answer=None)
    assert runtime(tmp_path, reward).known_answers == []
    assert reward._open_pool("")._function.__globals__["CALLS"] == []


def test_the_reward_of_an_evaluation_is_checked_on_its_own_rows(tmp_path, verifier):
    evaluation = Evaluation(Sums(4), verifier("right"), GENERATION)
    lines = runtime(tmp_path, verifier("long", known_answer=None), evaluation=evaluation).known_answers
    assert lines == ["evaluation.reward: mean reward 1 of right answers, 0 of wrong answers (4 rows)"]


def test_the_launch_shows_the_line(tmp_path, verifier):
    console = Console(file=io.StringIO(), width=200)
    actor = GRPOActorInterface(generation=GENERATION)
    run_ = experiment(
        tmp_path, steps=1, interfaces={"actor": actor, "reward": verifier("right")}, data=Sums(), evaluation=None
    )
    run(run_, console=console)
    assert "Known answers: interfaces.reward: mean reward 1 of right answers, 0" in console.file.getvalue()
    assert json.loads((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[-1])["step"] == 1


def test_an_environment_refuses_a_reward_with_known_answers(verifier):
    with pytest.raises(SettingsError, match=r"^reward\.known_answer=answer: cannot be checked on episodes"):
        EnvironmentInterface(environment="x:Y", reward=verifier("right"))


def test_a_function_of_a_column_that_no_row_has_stops_the_run_before_the_first_step(tmp_path, verifier):
    expected = r"^interfaces\.reward: reward function .* asks for 'solution', which is no column\. Columns: answer, n\."
    with pytest.raises(ConfigError, match=expected):
        runtime(tmp_path, verifier("wanting", known_answer=None))
    with pytest.raises(ConfigError, match=r"^evaluation\.reward: .*asks for 'solution'"):
        runtime(
            tmp_path,
            verifier("right", known_answer=None),
            evaluation=Evaluation(data=Sums(), reward=verifier("wanting", known_answer=None)),
        )
