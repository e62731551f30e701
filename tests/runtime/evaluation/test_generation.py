from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest
import torch

from realign.api import GenerationConfig, ModelInterface
from realign.errors import SettingsError
from realign.runtime import Evaluation
from tests.config_parts import Bigram, CountThrees, Prompts

LONG = GenerationConfig(n=2, max_new_tokens=6, fixed_length=True)


@dataclass
class Length(ModelInterface):
    """Reward that counts the tokens of each response. The first response has no reward."""

    closed: list[bool] = field(default_factory=list)

    def inference(self, model, data, mb_spec):
        lengths = [float((~given).sum()) for given in data.sequences("prompt_mask")]
        lengths[0] = float("nan")
        return data.select(["input_ids"]).with_sequences(rewards=torch.tensor(lengths)).select(["rewards"])


def run(**settings):
    evaluation = Evaluation(Prompts(5), CountThrees(), LONG, batch_prompts=2, **settings)
    return evaluation.measure(SimpleNamespace(models={"actor": Bigram().load("actor", seed=0)}), Prompts(5))


def test_a_further_judge_has_a_metric_of_its_own_over_the_responses_it_judged():
    values, judged = run(metrics={"length": Length()})
    plain, _ = run()
    assert values == plain | {"eval/length": 6.0}
    assert len(judged) == 2


@pytest.mark.parametrize(("success", "expected"), [(7.0, 1.0), (7.5, 0.0)])
def test_a_response_is_correct_from_the_success_reward_on(success, expected):
    """Each of the two responses has 6 tokens and the reward 7."""

    @dataclass
    class Seven(ModelInterface):
        def inference(self, model, data, mb_spec):
            sequences = len(list(data.sequences("prompt_mask")))
            return data.select(["input_ids"]).with_sequences(rewards=torch.full((sequences,), 7.0)).select(["rewards"])

    evaluation = Evaluation(Prompts(3), Seven(), LONG, batch_prompts=2, pass_at=[1, 2], success=success)
    values, _ = evaluation.measure(SimpleNamespace(models={"actor": Bigram().load("actor", seed=0)}), Prompts(3))
    assert (values["eval/pass@1"], values["eval/pass@2"]) == (expected, expected)


def test_a_sweep_adds_the_metrics_of_each_value():
    values, judged = run(sweep={"max_new_tokens": [1, 3]}, metrics={"length": Length()})
    plain, _ = run()
    assert {name: values[name] for name in plain} == plain
    assert [values[f"eval/response_tokens{end}"] for end in ("", "@max_new_tokens=1", "@max_new_tokens=3")] == [6, 1, 3]
    assert values["eval/length@max_new_tokens=3"] == 3.0
    assert "eval/reward@max_new_tokens=1" in values
    assert judged["prompt_mask"].numel() == 2 * 2 * (2 + 6)  # the recorded samples use the settings of `generation`


def test_the_launch_table_says_what_is_swept():
    evaluation = Evaluation(Prompts(5), CountThrees(), LONG, sweep={"max_new_tokens": [1, 3]})
    assert evaluation.describe() == f"{LONG.describe()}, 2 responses per prompt; also max_new_tokens=1, 3"


def test_all_judges_are_opened_and_closed_with_the_run():
    reward, length = CountThrees(), Length()
    assert Evaluation(Prompts(5), reward, metrics={"length": length}).judges == {
        "reward": reward,
        "metrics.length": length,
    }


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"sweep": {"n": [1], "top_k": [1]}}, r"^sweep: it accepts one setting, found n, top_k"),
        ({"sweep": {"temprature": [1]}}, r"^sweep\.temprature: unknown field of generation \(valid: n, "),
        ({"sweep": {"temperature": [1.0]}}, r"^sweep=.*temperature.*: has no effect with generation\.greedy=true"),
        ({"sweep": {"n": [0]}}, r"^sweep\.n=0: must be at least 1"),
        ({"sweep": {"n": []}}, r"^sweep\.n=\[\]: it has no values"),
        ({"sweep": {"n": ["many"]}}, r"^sweep\.n='many': must be a whole number at least 1"),
        ({"metrics": {"reward": Length()}}, r"^metrics\.reward: the evaluation already has this metric"),
    ],
)
def test_what_has_no_meaning_is_refused(settings, message):
    with pytest.raises(SettingsError, match=message):
        Evaluation(Prompts(5), CountThrees(), **settings)
