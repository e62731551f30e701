"""Weighted, named reward functions: sums, metrics, samples, failures, scopes, runs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from realign.api import GenerationConfig, MicroBatchSpec, stat_values
from realign.config import build
from realign.engines import TransformersModel
from realign.engines.training.optimizer import OptimizerSpec
from realign.errors import RewardError, SettingsError
from realign.interfaces import grpo
from realign.interfaces.rule_reward import RuleRewardInterface
from realign.records.metrics.samples import readable
from realign.rewards.terms import FunctionTerm, Openrlhf
from realign.runtime import Experiment, run
from realign.runtime.evaluation.scores import sequence_stats
from tests.config_parts import Bigram, Prompts
from tests.interfaces.rule_rewards import MODEL, batch, columns
from tests.tiny import save_tiny

FUNCTIONS = """\
def length(prompt, response, row):
    return len(response)

def has_c(prompt, response, row):
    return 'c' in response

def price(prompt, response, row):
    return row['price'] / 10

def fails_on_d(prompt, response, row):
    if 'd' in response:
        raise ValueError('d')
    return 1.0

def none_on_d(prompt, response, row):
    return None if 'd' in response else 1.0

def best_of_group(prompt, responses, row):
    longest = max(map(len, responses))
    return [float(len(response) == longest) for response in responses]

async def rank_in_batch(prompts, responses, rows):
    order = sorted(range(len(responses)), key=lambda i: len(responses[i]))
    return [order.index(i) for i in range(len(responses))]
"""


@pytest.fixture
def file(tmp_path) -> Path:
    path = tmp_path / "functions.py"
    path.write_text(FUNCTIONS)
    return path


def interface(file: Path, names: dict[str, float], workers: int = 0, **settings) -> RuleRewardInterface:
    functions = {name: FunctionTerm(f"{file}:{name}", weight=weight) for name, weight in names.items()}
    return RuleRewardInterface(functions=functions, workers=workers, **settings)


# the responses are "c", "cd", "" to the first prompt, and "de" to the second one
DATA = ([[3], [3, 4], []], [[4, 5]])


@pytest.mark.parametrize("workers", [0, 1])
def test_the_reward_is_the_weighted_sum_and_each_function_keeps_its_own(file, workers):
    rewards = columns(interface(file, {"length": 0.5, "has_c": 2.0, "price": -1.0}, workers), batch(*DATA))
    assert rewards == {
        "rewards": pytest.approx([0.5 + 2 - 0.1, 1 + 2 - 0.1, -0.1, 1 - 1]),
        "rewards/has_c": [1.0, 1.0, 0.0, 0.0],
        "rewards/length": [1.0, 2.0, 0.0, 2.0],
        "rewards/price": pytest.approx([0.1, 0.1, 0.1, 1.0]),
    }


@pytest.mark.parametrize("workers", [0, 1])
def test_functions_of_a_group_and_of_the_batch_are_summed_with_those_of_a_response(file, workers):
    rewards = columns(
        interface(file, {"best_of_group": 1.0, "rank_in_batch": 10.0, "length": 100.0}, workers), batch(*DATA)
    )
    assert rewards["rewards/best_of_group"] == [0.0, 1.0, 0.0, 1.0]
    assert rewards["rewards/rank_in_batch"] == [1.0, 2.0, 0.0, 3.0]
    assert rewards["rewards"] == [110.0, 221.0, 0.0, 231.0]


@pytest.mark.parametrize("name", ["fails_on_d", "none_on_d"])
def test_a_response_without_a_reward_of_one_function_has_no_reward(file, name):
    rewards = columns(interface(file, {"length": 1.0, name: 1.0}), batch(*DATA))
    assert rewards[f"rewards/{name}"] == [1.0, None, 1.0, None]
    assert rewards["rewards/length"] == [1.0, 2.0, 0.0, 2.0]
    assert rewards["rewards"] == [2.0, None, 1.0, None]


@pytest.mark.parametrize("workers", [0, 1])
def test_one_function_that_fails_too_often_stops_the_run(file, workers):
    reward = interface(file, {"length": 1.0, "fails_on_d": 0.0}, workers, max_failed_fraction=0.4)
    with pytest.raises(RewardError, match=r"functions\.py:fails_on_d failed on 2 of 4 scored items"):
        columns(reward, batch(*DATA))


def test_metrics_are_mean_and_standard_deviation_over_the_responses_with_that_reward(file):
    data = batch(*DATA)
    reward = interface(file, {"length": 1.0, "none_on_d": 1.0})
    data = data.merge(reward.inference(MODEL, data, MicroBatchSpec()))
    values = stat_values(sequence_stats(data))
    lengths = torch.tensor([1.0, 2.0, 0.0, 2.0])
    assert values["rewards/length/mean"] == pytest.approx(1.25)
    assert values["rewards/length/std"] == pytest.approx(lengths.std(correction=0).item())
    assert (values["rewards/none_on_d/mean"], values["rewards/none_on_d/std"]) == (1.0, 0.0)
    assert values["missing_rewards"] == 0.5
    records = readable(data, 2, lambda ids, skip_special_tokens: "")
    assert [r["rewards"] for r in records] == [
        {"length": 1.0, "none_on_d": 1.0},
        {"length": 2.0, "none_on_d": None},
        {"length": 0.0, "none_on_d": 1.0},
        {"length": 2.0, "none_on_d": None},
    ]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({}, "function: function and functions are both empty"),
        ({"function": "a:b", "functions": {"c": "d:e"}}, "function: function and functions are both set"),
        ({"functions": {"a": "b:c"}, "dense": True}, "functions: dense=true supports one function"),
        ({"functions": {"a/b": "b:c"}}, "functions.a/b: the name is part of the name of a metric"),
    ],
)
def test_settings_that_contradict_each_other_are_errors(settings, message):
    with pytest.raises(SettingsError, match=message):
        RuleRewardInterface(**settings)


def node(**fields):
    return {"_target_": "realign.interfaces.rule_reward.RuleRewardInterface", **fields}


def test_a_config_gives_functions_as_text_with_a_weight_or_as_a_component(file):
    functions = {
        "a": f"{file}:length",
        "b": {"function": f"{file}:has_c", "weight": 0.25},
        "c": {"_target_": "realign.rewards.terms.FunctionTerm", "function": f"{file}:price", "weight": 2},
        "d": {"function": "http://127.0.0.1:1/", "protocol": "openrlhf"},
        "e": {"function": "http://127.0.0.1:1/", "protocol": {"_target_": "realign.rewards.terms.Openrlhf"}},
    }
    made = build(node(functions=functions), RuleRewardInterface, "interfaces.reward")
    assert made.functions["a"] == f"{file}:length"
    assert made.functions["b"] == FunctionTerm(f"{file}:has_c", weight=0.25)
    assert made.functions["c"] == FunctionTerm(f"{file}:price", weight=2.0)
    assert made.functions["d"].protocol == made.functions["e"].protocol == Openrlhf()
    terms = "1 x a + 0.25 x b + 2 x c + 1 x d + 1 x e"
    assert made.describe(1) == {"reward": terms, "reward calls": "", "programs of responses": ""}


RUN_FUNCTIONS = """\
def threes(prompt, response, row):
    return response.count('3')

def first_differs(prompt, responses, row):
    return [float(response[:1] not in [other[:1] for j, other in enumerate(responses) if j != i])
            for i, response in enumerate(responses)]

def above_median(prompts, responses, rows):
    median = sorted(response.count('3') for response in responses)[len(responses) // 2]
    return [float(response.count('3') > median) for response in responses]
"""


def experiment(tmp_path: Path, names: dict[str, float], **changes) -> Experiment:
    file = tmp_path / "run_functions.py"
    file.write_text(RUN_FUNCTIONS)
    interfaces = {
        "actor": grpo.GRPOActorInterface(generation=GenerationConfig(n=4, max_new_tokens=4, fixed_length=True)),
        "reward": interface(file, names),
    }
    settings = {
        "name": "named",
        "steps": 4,
        "batch_prompts": 4,
        "graph": grpo.dataflow(interfaces),
        "interfaces": interfaces,
        "models": {"actor": Bigram()},
        "data": Prompts(16),
        "output_dir": tmp_path / "run",
        "sample_prompts": 2,
    }
    return Experiment(**(settings | changes))


NAMES = {"threes": 1.0, "first_differs": 0.5, "above_median": 0.25}


def tiny(tmp_path: Path) -> dict[str, TransformersModel]:
    return {"actor": TransformersModel(str(save_tiny(tmp_path / "model")), optimizer=OptimizerSpec(lr=1e-3))}


def logged(folder: Path, file: str = "metrics.jsonl") -> list[dict]:
    return [json.loads(line) for line in (folder / file).read_text().splitlines()]


def test_a_run_reports_each_function_in_metrics_curves_and_samples(tmp_path):
    run(experiment(tmp_path, NAMES))
    records = [record for record in logged(tmp_path / "run") if record["step"] > 0]
    for record in records:
        total = sum(weight * record[f"rewards/{name}/mean"] for name, weight in NAMES.items())
        assert record["reward"] == pytest.approx(total, abs=1e-6)
        assert all(record[f"rewards/{name}/std"] >= 0 for name in NAMES)
    for sample in logged(tmp_path / "run", "samples.jsonl"):
        assert sample["reward"] == pytest.approx(sum(NAMES[n] * x for n, x in sample["rewards"].items()))
        assert sample["rewards"]["threes"] == sample["response"].count("3")
