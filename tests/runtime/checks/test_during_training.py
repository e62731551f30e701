"""Test the checks while a run trains."""

from __future__ import annotations

import json
import warnings
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch

from realign.api import RPC, GenerationConfig, ModelInterface, SequenceSample
from realign.engines import TransformersModel
from realign.errors import RunError
from realign.interfaces.grpo import GRPOActorInterface
from realign.interfaces.rule_reward import RuleRewardInterface
from realign.models import DType
from realign.runtime import Evaluation, run
from realign.runtime.checks.during_training import check_ratio, default_tolerance
from realign.runtime.evaluation.scores import Repeats, Scored, merge_scored
from tests.config_parts import Bigram
from tests.flash_stand_in import compute_as_on_a_gpu
from tests.toys import BigramModel, Prompts, experiment

TRAIN = RPC("actor_train", "actor", "train_step", inputs=("input_ids",))


def test_a_difference_within_the_tolerance_is_silent():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_ratio(TRAIN, 1e-3, 1e-3, strict=True)


def test_a_larger_difference_warns_and_is_an_error_under_strict_ratio():
    message = r"^ratio_tolerance=0\.001: in actor_train, .* differ by up to 0\.5 .*actor\.recompute=true .*mismatch\.md"
    with pytest.warns(UserWarning, match=rf"{message}.* Training continues\.$"):
        check_ratio(TRAIN, 0.5, 1e-3, strict=False)
    with pytest.raises(RunError, match=message):
        check_ratio(TRAIN, 0.5, 1e-3, strict=True)


def test_the_tolerance_of_the_ratio_check_follows_the_precision(monkeypatch):
    assert default_tolerance(TransformersModel("a", dtype=DType.float32)) == 1e-3
    assert default_tolerance(TransformersModel("a", dtype=DType.bfloat16)) == 1e-3  # rounds weights only
    compute_as_on_a_gpu(monkeypatch)
    assert default_tolerance(TransformersModel("a", dtype=DType.bfloat16)) == 0.1
    assert default_tolerance(Bigram()) == 1e-3


GREEDY = GenerationConfig(max_new_tokens=2, fixed_length=True, greedy=True)


def responses(*texts: list[int]) -> SequenceSample:
    ids = [[1, 9, *text] for text in texts]
    made = SequenceSample.from_sequences([f"p{i}" for i in range(len(ids))], {"input_ids": [[row] for row in ids]})
    given = [place < 2 for row in ids for place in range(len(row))]
    return made.with_tokens(prompt_mask=torch.tensor(given)).with_sequences(rewards=torch.zeros(len(ids)))


def test_equal_responses_are_counted_over_all_batches():
    parts = [Scored(responses([3, 3], [3], [])), Scored(responses([3, 3], [3, 3], [4])), Scored(responses([3]), "@n=1")]
    values, _ = merge_scored(parts)
    assert values["eval/distinct_fraction"] == 4 / 6  # [3, 3], [3], nothing and [4]
    assert values["eval/most_common_fraction"] == 3 / 6
    assert (values["eval/distinct_fraction@n=1"], values["eval/most_common_fraction@n=1"]) == (1.0, 1.0)
    assert "eval/constant_reward" not in values


def test_the_collapsed_response_is_the_most_common_one():
    repeats = Repeats()
    repeats.add(responses(*[[3, 4]] * 9, *[[5]] * 7))
    assert repeats.collapsed.tolist() == [3, 4]
    repeats.add(responses(*[[6]] * 3))  # less than half
    assert repeats.collapsed is None


FUNCTIONS = """
CALLS = []

def parity(prompt, response, row):
    CALLS.append(response)
    return float(response.strip() == "7 7") if row["n"] % 2 else 0.25

async def slow(prompt, response, row):
    return parity(prompt, response, row)

def compared(prompt, responses, row):
    return [parity(prompt, response, row) for response in responses]
"""


@dataclass
class Sampled(BigramModel):
    """Model whose greedy response is `7 7`, and `6 7` for prompts that end with 2 (a fifth of them)."""

    def load(self, name, *, seed):
        model = super().load(name, seed=seed)
        with torch.no_grad():
            model.engine.logits_VV.zero_()
            model.engine.logits_VV[:, 7] = 9.0
            model.engine.logits_VV[2] = model.engine.logits_VV[2].roll(-1)
        return model


def evaluated(tmp_path, reward: ModelInterface, n: int = 20) -> dict[str, float]:
    evaluation = Evaluation(Prompts(n), reward, GREEDY, batch_prompts=8)
    return evaluation.measure(SimpleNamespace(models={"actor": Sampled().load("actor", seed=0)}), Prompts(n))[0]


@pytest.mark.parametrize(("name", "known"), [("parity", True), ("slow", False), ("compared", False)])
def test_a_cheap_function_scores_the_most_common_answer_on_all_rows(tmp_path, name, known):
    (tmp_path / "reward.py").write_text(FUNCTIONS)
    reward = RuleRewardInterface(function=f"{tmp_path}/reward.py:{name}", workers=0)
    values = evaluated(tmp_path, reward)
    reward.close()
    assert values["eval/distinct_fraction"] == 2 / 20
    assert values["eval/most_common_fraction"] == 16 / 20
    assert values["eval/reward"] == (8 + 0.25 * 10) / 20  # rows 5 and 15 are odd and end with 2
    assert values.get("eval/constant_reward") == ((10 + 0.25 * 10) / 20 if known else None)


def test_the_reward_of_one_answer_to_every_prompt_needs_no_call(tmp_path):
    (tmp_path / "reward.py").write_text(FUNCTIONS)
    reward = RuleRewardInterface(function=f"{tmp_path}/reward.py:parity", workers=0)

    class OneLast(Prompts):
        def sample(self, rows):
            data = SequenceSample.from_sequences([f"{r}@{e}" for e, r in rows], {"prompt_ids": [[[1, 3]]] * len(rows)})
            return data.with_metadata(row=[{"n": row} for _, row in rows])

    loaded = SimpleNamespace(models={"actor": Sampled().load("actor", seed=0)})
    values, _ = Evaluation(OneLast(20), reward, GREEDY).measure(loaded, OneLast(20))
    assert values["eval/constant_reward"] == values["eval/reward"]
    assert len(reward._open_pool("")._function.__globals__["CALLS"]) == 20
    reward.close()


def test_a_collapsed_run_says_so_in_its_warnings_summary_log_and_records(tmp_path):
    (tmp_path / "reward.py").write_text(FUNCTIONS)

    def reward() -> RuleRewardInterface:
        return RuleRewardInterface(function=f"{tmp_path}/reward.py:parity", workers=0)

    actor = GRPOActorInterface(generation=GenerationConfig(n=4, max_new_tokens=2, fixed_length=True))
    changes = {
        "models": {"actor": Sampled(lr=1e-9)},
        "interfaces": {"actor": actor, "reward": reward()},
        "evaluation": Evaluation(Prompts(20), reward(), GREEDY, every_steps=5),
        "steps": 10,
    }
    with pytest.warns(UserWarning, match="gives one answer to everything") as caught:
        result = run(experiment(tmp_path, **changes), command=["experiment=x"])
    texts = [str(warning.message) for warning in caught]
    (sign,) = [text for text in texts if text.startswith("The policy gives one answer to everything")]
    assert "80% of the held-out responses are the same one" in sign
    summary = json.loads((result.output_dir / "summary.json").read_text())
    assert summary["diagnosis"].startswith("The policy gives one answer to everything")
    assert "train for more steps" not in summary["next_commands"]
    assert summary["next_commands"]["see why"] == f"realign why {result.output_dir}"
    assert sign in (result.output_dir / "realign.log").read_text()
    recorded = [json.loads(line) for line in (result.output_dir / "warnings.jsonl").read_text().splitlines()]
    assert sum(record["message"] == sign for record in recorded) == 1


def test_a_run_that_learns_says_nothing(tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        result = run(experiment(tmp_path, steps=12))
    assert json.loads((result.output_dir / "summary.json").read_text())["diagnosis"] == ""
