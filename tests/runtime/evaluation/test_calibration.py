from __future__ import annotations

import json
import math
from dataclasses import dataclass

import numpy as np
import pytest
import torch

from realign.api import GenerationConfig, MicroBatchSpec, Model, SequenceSample
from realign.cli.launch_table import derived_rows
from realign.config import build_experiment, compose
from realign.data import Dataset, DataSpec
from realign.errors import ConfigError, RunError
from realign.interfaces import ppo
from realign.interfaces.components.response_cut import ResponseCut
from realign.interfaces.reward_model import RewardLoss, RewardModelInterface, dataflow
from realign.runtime import Experiment, RewardCalibration, run
from realign.runtime.checks.parts import check_parts
from realign.testing import BigramEngine
from tests.config_parts import Bigram, Prompts
from tests.tiny import save_tiny

ONE = MicroBatchSpec()
SAMPLED = GenerationConfig(n=2, max_new_tokens=5, temperature=0.7)
LABELS = [1.0, 2.0, 2.5, 4.5]  # mean 2.5, variance (2.25 + 0.25 + 0 + 4) / 4


@dataclass
class Frozen(Bigram):
    """Policy that is not trained."""

    def load(self, name: str, *, seed: int) -> Model:
        model = super().load(name, seed=seed + 7)
        model.engine.trainable = False
        return model


@dataclass
class Ratings(DataSpec, Dataset):
    """Four prompts with one rated response each."""

    keys = ("input_ids", "prompt_mask", "loss_mask", "labels", "margins")

    def load(self, tokenizer):
        return self

    def __len__(self) -> int:
        return len(LABELS)

    def sample(self, rows) -> SequenceSample:
        data = SequenceSample.from_sequences(
            [f"{row}@{epoch}" for epoch, row in rows], {"input_ids": [[[1, 2 + row]] for _, row in rows]}
        )
        data = data.with_tokens(prompt_mask=torch.arange(2 * len(rows)) % 2 == 0)
        labels = torch.tensor([LABELS[row] for _, row in rows])
        return data.with_tokens(loss_mask=~data["prompt_mask"]).with_sequences(
            labels=labels, margins=torch.zeros(len(rows))
        )


def scored(calibration: RewardCalibration, reward: Model, policy: Model, when: str, draw: int) -> np.ndarray:
    """Return the raw scores of the calibration samples: the value table at each last token."""
    answers = calibration._answers(policy, Prompts(5), f"calibration/{when}/{draw}", draw)
    last = [int(ids[-1]) for batch in answers for ids in batch.sequences()]
    return reward.engine.values_V[last].numpy()


def test_gain_and_bias_by_hand_and_a_check_on_other_responses():
    reward, policy = Model("reward", BigramEngine(), seed=0), Model("policy", BigramEngine(seed=7), seed=0)
    interface = RewardModelInterface(clip=0.1)  # clip only affects inference, so calibration ignores it
    calibration = RewardCalibration(
        Prompts(5), after=True, samples=30, generation=SAMPLED, batch_prompts=4, verify=True
    )
    measured = calibration.run(interface, reward, policy, Prompts(5), ONE, when="after", target=(2.0, 0.5))
    raw, other = (scored(calibration, reward, policy, "after", draw) for draw in (0, 1))
    gain = 0.5 / raw.std()
    assert len(raw) == len(other) == 30
    assert measured == {
        "calibration/mean": pytest.approx(raw.mean()),
        "calibration/std": pytest.approx(raw.std()),
        "calibration/gain": pytest.approx(gain),
        "calibration/bias": pytest.approx(2.0 - gain * raw.mean()),
        "calibration/verified_mean": pytest.approx((gain * (other - raw.mean()) + 2.0).mean()),
        "calibration/verified_std": pytest.approx(gain * other.std()),
    }
    assert list(raw) != list(other)
    again = calibration.run(interface, reward, policy, Prompts(5), ONE, when="after", target=(2.0, 0.5))
    assert again["calibration/mean"] == pytest.approx(2.0)
    assert again["calibration/gain"] == pytest.approx(gain)


def test_responses_are_cut_but_not_penalized_before_they_are_measured():
    reward, policy = Model("reward", BigramEngine(), seed=0), Model("policy", BigramEngine(seed=7), seed=0)
    interface = RewardModelInterface(cut=ResponseCut([3, 4], penalty=-100.0))
    calibration = RewardCalibration(Prompts(5), after=True, samples=20, generation=SAMPLED)
    measured = calibration.run(interface, reward, policy, Prompts(5), ONE, when="after")
    scores = []
    for batch in calibration._answers(policy, Prompts(5), "calibration/after/0", 0):
        for ids, given in zip(batch.sequences(), batch.sequences("prompt_mask"), strict=True):
            response = ids[~given].tolist()
            marks = [i for i, token in enumerate(response) if token in (3, 4)]
            scores.append(float(reward.engine.values_V[response[marks[0]] if marks else response[-1]]))
    assert measured["calibration/mean"] == pytest.approx(np.mean(scores))
    assert measured["calibration/std"] == pytest.approx(np.std(scores))


class Same(Prompts):
    """Dataset that repeats one prompt."""

    def sample(self, rows) -> SequenceSample:
        return SequenceSample.from_sequences([str(r) for r in rows], {"prompt_ids": [[[1]] for _ in rows]})


def test_batches_and_checks_are_drawn_with_random_numbers_and_prompts_of_their_own():
    policy = Model("policy", BigramEngine(seed=7), seed=0)
    calibration = RewardCalibration(Same(40), after=True, samples=20, generation=SAMPLED, batch_prompts=5)
    first, second = ([ids.tolist() for ids in b.sequences()] for b in calibration._answers(policy, Same(40), "a", 0))
    assert len(first) == len(second) == 10
    assert first != second
    asked = [
        {i for batch in calibration._answers(policy, Prompts(40), "a", draw) for i in batch.ids} for draw in (0, 1)
    ]
    assert [len(ids) for ids in asked] == [10, 10]
    assert not asked[0] & asked[1]


def test_labels_are_looked_at_only_where_they_say_how_large_rewards_should_be():
    class Unread(Ratings):
        def sample(self, rows):
            raise AssertionError("read")

    calibration = RewardCalibration(Prompts(5), before=True)
    assert calibration.target(RewardModelInterface(), Unread()) == (0.0, 1.0)
    assert calibration.target(RewardModelInterface(kind=RewardLoss.scalar_rating), Prompts(5)) == (0.0, 1.0)
    assert calibration.target(RewardModelInterface(kind=RewardLoss.scalar_rating), Ratings())[0] == 2.5


def experiment(tmp_path, **changes) -> Experiment:
    settings = {
        "name": "ratings",
        "steps": 2,
        "batch_prompts": 4,
        "graph": dataflow(),
        "interfaces": {"reward": RewardModelInterface(kind=RewardLoss.scalar_rating)},
        "models": {"reward": Bigram(lr=0.05), "policy": Frozen()},
        "data": Ratings(),
        "output_dir": tmp_path / "run",
        "calibration": RewardCalibration(Prompts(5), before=True, after=True, samples=64, generation=SAMPLED),
    }
    return Experiment(**(settings | changes))


def test_before_training_rewards_get_the_scale_of_the_ratings_and_afterwards_mean_0_and_deviation_1(tmp_path):
    e = experiment(tmp_path)
    history = run(e).history
    before, after = history[0], history[-1]
    assert [record["step"] for record in history if "calibration/gain" in record] == [0, 2]
    assert before["calibration/gain"] == pytest.approx(math.sqrt(6.5 / 4) / before["calibration/std"])
    mean = before["calibration/gain"] * before["calibration/mean"] + before["calibration/bias"]
    assert mean == pytest.approx(2.5)
    # The calibration after training uses scores with the previous gain and bias, so the new values include them.
    assert after["calibration/gain"] == pytest.approx(before["calibration/gain"] / after["calibration/std"])
    interface = e.interfaces["reward"]
    assert (interface.gain, interface.bias) == (after["calibration/gain"], after["calibration/bias"])
    states = [json.loads(path.read_text()) for path in (tmp_path / "run" / "final").rglob("interface_state.json")]
    assert states == [{"reward": {"gain": interface.gain, "bias": interface.bias}}] or states == [
        {"gain": interface.gain, "bias": interface.bias}
    ]


def test_a_calibration_that_fails_after_training_costs_no_training(tmp_path):
    flat = RewardCalibration(Prompts(5), after=True, samples=4, generation=GenerationConfig(greedy=True))

    flat.data = Same(5)
    with pytest.raises(RunError, match="at least two finite scores that differ"):
        run(experiment(tmp_path, calibration=flat))
    assert (tmp_path / "run" / "final" / "reward" / "bigram.npz").exists()
    assert len((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()) == 3


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"samples": 3}, r"samples=3: must be a multiple of generation\.n=2"),
        ({"batch_prompts": 0}, r"batch_prompts=0: must be at least 1"),
        ({"after": False}, r"before=false and after=false: the calibration never runs"),
        ({"policy": "ref"}, r"calibration\.policy=ref: this role has no model\. Roles with one: reward, policy"),
        ({"role": "policy"}, r"calibration\.role=policy: it must be a role of the graph"),
    ],
)
def test_settings_that_do_not_fit_are_refused_before_anything_is_loaded(tmp_path, changes, message):
    settings = {"data": Prompts(5), "after": True, "samples": 64, "generation": SAMPLED} | changes
    with pytest.raises(ConfigError, match=message):
        check_parts(experiment(tmp_path, calibration=RewardCalibration(**settings)))


def test_a_reward_model_that_nothing_trains_is_calibrated_before_the_run_only(tmp_path):
    settings = {"data": Prompts(8), "models": {"actor": Bigram(), "reward": Frozen()}}
    settings["interfaces"] = {"actor": ppo.PPOActorInterface(generation=SAMPLED), "reward": RewardModelInterface()}
    settings["graph"] = ppo.dataflow(settings["interfaces"])
    by_actor = {"data": Prompts(5), "policy": "actor", "samples": 64, "generation": SAMPLED}
    with pytest.raises(ConfigError, match=r"calibration\.after=true: no RPC trains role 'reward'"):
        check_parts(experiment(tmp_path, **settings, calibration=RewardCalibration(**by_actor, after=True)))
    e = experiment(tmp_path, **settings, calibration=RewardCalibration(**by_actor, before=True))
    history = run(e).history
    assert [record["step"] for record in history if "calibration/gain" in record] == [0]
    assert e.interfaces["reward"].gain == history[0]["calibration/gain"]


def test_prompts_that_no_micro_batch_can_hold_are_refused_before_training(tmp_path):
    class Long(Prompts):
        longest_row = 30

    calibration = RewardCalibration(Long(5), after=True, samples=64, generation=SAMPLED)
    with pytest.raises(
        ConfigError, match=r"=34: the longest row has 30 tokens and its response up to 5\. Set it to at least 35"
    ):
        run(experiment(tmp_path, calibration=calibration, microbatch=MicroBatchSpec(34)))


def test_the_shipped_reward_model_can_be_calibrated_by_config_and_the_gain_comes_back(tmp_path):
    rows = [{"prompt": f"{i}+1=", "chosen": f"{i + 1}", "rejected": "?"} for i in range(8)]
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    model = save_tiny(tmp_path / "model")
    calibration = "{policy: policy, after: true, samples: 8, generation: {max_new_tokens: 4}, data: "
    calibration += f"{{_target_: realign.data.PromptData, path: {tmp_path / 'pairs.jsonl'}}}}}"
    settings = [f"models.reward.path={model}", f"+models.policy.path={model}", f"data.path={tmp_path / 'pairs.jsonl'}"]
    settings += [f"output_dir={tmp_path / 'run'}", "batch_prompts=8", "steps=1", f"calibration={calibration}"]
    first = build_experiment(compose(["experiment=reward_model", *settings]))
    history = run(first).history
    assert history[-1]["calibration/gain"] == first.interfaces["reward"].gain != 1.0
    saved = [f"models.reward.path={tmp_path / 'run' / 'final' / 'reward'}", f"output_dir={tmp_path / 'again'}"]
    second = build_experiment(compose(["experiment=reward_model", *settings, *saved, "calibration=null"]))
    run(second)
    assert second.interfaces["reward"].state_dict() == first.interfaces["reward"].state_dict()


def test_the_launch_table_says_what_is_calibrated_and_a_policy_outside_the_graph_is_read(tmp_path):
    rows = dict(derived_rows(experiment(tmp_path)))
    assert rows["reward calibration"] == (
        "gain and bias of reward before and after training, by 64 responses of policy (neutral, temperature 0.7)"
    )
    assert "config keys never read" not in rows
