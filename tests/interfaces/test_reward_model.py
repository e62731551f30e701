from __future__ import annotations

import json
import math
import shutil
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from transformers import AutoModelForSequenceClassification

from realign.api import MicroBatchSpec, Model, SequenceSample, stat_values
from realign.config import build_experiment, compose
from realign.engines import TransformersModel
from realign.interfaces.components.response_cut import ResponseCut
from realign.interfaces.critic import PPOCriticInterface, ValueNormalization, ValueScale
from realign.interfaces.ppo import PPOActorInterface
from realign.interfaces.reward_model import RewardLoss, RewardModelInterface, ScoreAt
from realign.models import Score
from realign.runtime import run
from realign.testing import BigramEngine, random_preferences
from tests.tiny import random_sample, save_tiny

ONE = MicroBatchSpec()
VARIANTS = [
    RewardModelInterface(),
    RewardModelInterface(use_margin=True, per_prompt_weighting=True),
    RewardModelInterface(from_divergence=True),
    RewardModelInterface(kind=RewardLoss.best_of_n),
    RewardModelInterface(kind=RewardLoss.scalar_rating),
    RewardModelInterface(center_coef=0.3, use_margin=True),
    RewardModelInterface(center_coef=0.3, per_prompt_weighting=True),
    RewardModelInterface(center_coef=0.3, from_divergence=True),
    RewardModelInterface(kind=RewardLoss.scalar_rating, per_prompt_weighting=True),
    RewardModelInterface(kind=RewardLoss.scalar_compare, per_prompt_weighting=True),
]


def pair_loss(interface, table, chosen, rejected, margin):
    """Compute the loss of one pair of responses from their ids and labels."""
    if not interface.from_divergence:
        return -torch.sigmoid(table[chosen[-1]] - table[rejected[-1]] - margin).log()
    end = max(len(chosen), len(rejected))
    start = next((i for i in range(end) if chosen[i : i + 1] != rejected[i : i + 1]), end - 1)
    terms = [
        -torch.sigmoid(table[chosen[min(i, len(chosen) - 1)]] - table[rejected[min(i, len(rejected) - 1)]]).log()
        for i in range(start, end)
    ]
    return sum(terms) / len(terms)


def reference(interface: RewardModelInterface, table: torch.Tensor, data: SequenceSample) -> torch.Tensor:
    """Compute the loss in plain Python, prompt by prompt."""
    prompts = []
    for prompt in data.unpack():
        rows = [
            (ids.tolist(), label, margin, bool(mask.any()))
            for ids, mask, label, margin in zip(
                prompt.sequences(),
                prompt.sequences("loss_mask"),
                prompt["labels"].tolist(),
                prompt["margins"].tolist(),
                strict=True,
            )
        ]
        pairs = [(a, b) for a, b in zip(rows[::2], rows[1::2], strict=True) if a[3] and b[3]]
        present = [row for row in rows if row[3]]
        if interface.kind is RewardLoss.scalar_rating:
            losses = [(table[ids[-1]] - label) ** 2 for ids, label, *_ in present]
        elif interface.kind is RewardLoss.scalar_compare:
            losses = [(table[a[0][-1]] - table[b[0][-1]] - (a[1] - b[1])) ** 2 for a, b in pairs]
        elif interface.kind is RewardLoss.best_of_n:
            total = sum(table[ids[-1]].exp() for ids, *_ in present)
            picked = [total.log() - table[ids[-1]] for ids, label, *_ in present if label == 1]
            losses = [sum(picked)] if picked and len(present) > 1 else []
        else:
            losses = []
            for a, b in pairs:
                chosen, rejected = (a, b) if a[1] > b[1] else (b, a)
                margin = a[2] if interface.use_margin else 0.0
                center = (table[chosen[0][-1]] + table[rejected[0][-1]]) ** 2
                losses.append(
                    pair_loss(interface, table, chosen[0], rejected[0], margin) + interface.center_coef * center
                )
        prompts.append(losses)
    if interface.per_prompt_weighting:
        means = [sum(losses) / len(losses) for losses in prompts if losses]
        return sum(means) / len(means)
    return sum(x for losses in prompts for x in losses) / sum(map(len, prompts))


@pytest.mark.parametrize("interface", VARIANTS, ids=str)
@pytest.mark.parametrize("seed", [0, 3])
def test_loss_and_gradient_equal_a_loop_over_prompts(interface, seed):
    engine, data = BigramEngine(lr=0.5), random_preferences(seed)
    before = engine.values_V.clone()
    table = before.clone().requires_grad_()
    loss = reference(interface, table, data)
    loss.backward()
    stats = stat_values(interface.train_step(Model("reward", engine), data, MicroBatchSpec(n_microbatches=3)))
    assert stats["loss"] == pytest.approx(loss.item(), rel=1e-7)
    torch.testing.assert_close(engine.values_V, before - 0.5 * table.grad, rtol=0, atol=1e-7)


def pairs_by_hand() -> SequenceSample:
    data = SequenceSample.from_sequences(["a", "b"], {"input_ids": [[[0, 1], [0, 2]], [[0, 3], [0, 4]]]})
    data = data.with_tokens(loss_mask=torch.arange(8) % 2 == 1)
    return data.with_sequences(labels=torch.tensor([1.0, 0.0, 0.0, 1.0]), margins=torch.zeros(4))


def scoring(*values: float) -> BigramEngine:
    engine = BigramEngine()
    engine.values_V[: len(values)] = torch.tensor(values, dtype=torch.float64)
    return engine


def test_metrics_by_hand():
    engine = scoring(0.0, 2.0, 1.0, 5.0, 3.0)  # chosen 2 against 1, and 3 against 5
    stats = stat_values(RewardModelInterface().train_step(Model("reward", engine), pairs_by_hand(), ONE))
    assert stats["accuracy"] == 0.5
    assert stats["margin"] == pytest.approx((1 - 2) / 2)
    assert [stats["score_chosen"], stats["score_rejected"]] == [2.5, 3.0]
    assert stats["loss"] == pytest.approx((math.log1p(math.exp(-1)) + math.log1p(math.exp(2))) / 2)


@pytest.mark.parametrize("empty", [0, 1])
@pytest.mark.parametrize("kind", ["pairwise", "scalar_compare", "best_of_n"])
def test_a_comparison_with_an_empty_response_does_not_count(kind, empty):
    data = pairs_by_hand()
    mask_T = data["loss_mask"].clone()
    mask_T[2 * empty : 2 * empty + 2] = False
    interface, engine = RewardModelInterface(kind=RewardLoss(kind)), scoring(0.0, 2.0, 1.0, 5.0, 3.0)
    alone = interface.train_step(Model("reward", scoring(0.0, 2.0, 1.0, 5.0, 3.0)), data.take([1]), ONE)
    stats = interface.train_step(Model("reward", engine), data.with_tokens(loss_mask=mask_T), ONE)
    assert stat_values(stats) == pytest.approx(stat_values(alone))
    assert engine.values_V[1:3].tolist() == [2.0, 1.0]


def test_rewards_are_gain_times_the_score_of_the_last_token_plus_bias():
    model, interface = Model("reward", scoring(0.0, 2.0, 1.0, 5.0, 3.0)), RewardModelInterface()
    assert interface.inference(model, pairs_by_hand(), ONE)["rewards"].tolist() == [2.0, 1.0, 5.0, 3.0]
    interface.load_state_dict({"gain": 2.0, "bias": -3.0})
    assert interface.inference(model, pairs_by_hand(), ONE)["rewards"].tolist() == [1.0, -1.0, 7.0, 3.0]
    clipped = RewardModelInterface(clip=1.5)
    clipped.load_state_dict(interface.state_dict())
    assert clipped.inference(model, pairs_by_hand(), ONE)["rewards"].tolist() == [1.0, -1.0, 1.5, 1.5]


def test_normalize_gives_the_mean_and_population_deviation_that_were_asked_for_and_can_be_repeated():
    model, interface = Model("reward", scoring(0.0, 2.0, 1.0, 5.0, 4.0)), RewardModelInterface()
    interface.normalize(interface.inference(model, pairs_by_hand(), ONE)["rewards"])
    assert interface.gain == pytest.approx(1 / math.sqrt(2.5))  # scores 1, 2, 4, 5
    assert interface.bias == pytest.approx(-3 / math.sqrt(2.5))
    for mean, std in ((0.0, 1.0), (2.0, 0.5)):
        interface.normalize(interface.inference(model, pairs_by_hand(), ONE)["rewards"], mean=mean, std=std)
        rewards = interface.inference(model, pairs_by_hand(), ONE)["rewards"]
        assert rewards.mean().item() == pytest.approx(mean, abs=1e-12)
        assert rewards.std(correction=0).item() == pytest.approx(std)


def test_the_scale_of_labels_by_hand():
    """Ratings: mean 3, variance (4 + 1 + 1 + 4) / 4. Differences -1 and 3: mean square (1 + 9) / 2."""
    labels_S = torch.tensor([1.0, 2.0, 4.0, 5.0])
    assert RewardModelInterface(kind=RewardLoss.scalar_rating).label_scale(labels_S) == (3.0, math.sqrt(2.5))
    differences = torch.tensor([1.0, 2.0, 4.0, 1.0])
    scale = RewardModelInterface(kind=RewardLoss.scalar_compare).label_scale(differences)
    assert scale == (0.0, pytest.approx(math.sqrt(5) / 2))
    for kind in (RewardLoss.pairwise, RewardLoss.best_of_n):
        assert RewardModelInterface(kind=kind).label_scale(labels_S) == (0.0, 1.0)


def test_gain_and_bias_come_with_the_weights_they_were_saved_with():
    first, second = RewardModelInterface(), RewardModelInterface()
    first.normalize(torch.tensor([1.0, 3.0]))
    second.load_saved_state({})
    assert (second.gain, second.bias) == (1.0, 0.0)
    second.load_saved_state(first.state_dict())
    assert (second.gain, second.bias) == (1.0, -2.0)


@pytest.mark.parametrize(
    "other", [PPOActorInterface(), PPOCriticInterface(normalization=ValueNormalization(ValueScale.cumulative))]
)
def test_a_reward_model_starts_from_the_folder_of_a_policy_or_a_critic(other):
    reward = RewardModelInterface()
    reward.load_saved_state(other.state_dict())
    assert (reward.gain, reward.bias) == (1.0, 0.0)


def answered_by_hand() -> SequenceSample:
    """Return the responses 1 2 4, 3 and an empty one, each after the prompt 0."""
    data = SequenceSample.from_sequences(["a", "b"], {"input_ids": [[[0, 1, 2, 4], [0, 3]], [[0]]]})
    return data.with_tokens(prompt_mask=data["input_ids"] == 0)


def test_trap_c11_a_cut_response_is_scored_at_its_mark_and_the_penalty_replaces_the_score_of_one_without():
    model = Model("reward", scoring(7.0, 2.0, 1.0, 5.0, 3.0))
    interface = RewardModelInterface(cut=ResponseCut([2], penalty=-9.0), clip=1.5)
    out = interface.inference(model, answered_by_hand(), ONE)
    assert out.keys == {"rewards"}
    # the penalty is not a score, so it is neither scaled nor clipped
    assert out["rewards"].tolist() == [1.0, -9.0, -9.0]
    assert interface.scores(model, answered_by_hand(), ONE).tolist() == [1.0, 5.0, 7.0]
    interface = RewardModelInterface(cut=ResponseCut([2], penalty=-9.0), dense=True)
    out = interface.inference(model, answered_by_hand(), ONE)
    assert out["rewards"].tolist() == [0.0, -9.0, -9.0]
    assert out["dense_rewards"].tolist() == [0.0, 2.0, 1.0, 0.0, 0.0, 0.0, 0.0]


def test_the_last_token_is_found_by_lengths_not_by_an_end_token():
    """Responses that contain the end token twice, or never, are scored at their last tokens."""
    data = SequenceSample.from_sequences(["a"], {"input_ids": [[[0, 2, 1, 2], [0, 2, 4]]]})
    rewards = RewardModelInterface().inference(Model("reward", scoring(7.0, 2.0, 1.0, 5.0, 3.0)), data, ONE)["rewards"]
    assert rewards.tolist() == [1.0, 3.0]


def ending(*scores: float) -> Model:
    """Return a reward model with these scores of tokens; token 0 is the end token."""
    return Model("reward", scoring(*scores), SimpleNamespace(eos_token_id=0))


def packed_ends() -> SequenceSample:
    """Return sequences with prompt 3: ended, truncated, the end token alone, two end tokens, and only one token."""
    ids = [[[3, 1, 2, 0], [3, 1, 2], [3, 0]], [[3, 2, 0, 0], [0]]]
    return SequenceSample.from_sequences(["a", "b"], {"input_ids": ids})


@pytest.mark.parametrize("parts", [1, 2])
def test_the_score_before_the_end_token_by_hand(parts):
    model, spec = ending(7.0, 2.0, 1.0, 5.0), MicroBatchSpec(n_microbatches=parts)
    last = RewardModelInterface().inference(model, packed_ends(), spec)["rewards"]
    assert last.tolist() == [7.0, 1.0, 7.0, 7.0, 7.0]
    interface = RewardModelInterface(score_at=ScoreAt.before_end)
    scored = interface.inference(model, packed_ends(), spec)
    assert scored.keys == {"rewards"}
    # an ended response, a truncated one, the last prompt token, the first of two end tokens, and the only token
    assert scored["rewards"].tolist() == [1.0, 1.0, 5.0, 7.0, 7.0]
    assert interface.scores(model, packed_ends(), spec).tolist() == scored["rewards"].tolist()


def test_the_score_is_read_before_any_end_token_of_the_sampler():
    data = SequenceSample.from_sequences(["a"], {"input_ids": [[[3, 1, 0], [3, 1, 2], [3, 1, 4]]]})
    engine, scores = (
        BigramEngine(vocabulary=5, eos_token_ids=(0, 2)),
        torch.tensor([7.0, 2, 1, 5, 3], dtype=torch.float64),
    )
    engine.values_V = scores
    model = Model("reward", engine, SimpleNamespace(eos_token_id=0))

    def read(**settings) -> list[float]:
        interface = RewardModelInterface(score_at=ScoreAt.before_end, **settings)
        return interface.inference(model, data, ONE)["rewards"].tolist()

    assert read() == [2.0, 2.0, 3.0]  # before both end tokens of the model; the third response is truncated
    assert read(stop_token_ids=[4]) == [7.0, 1.0, 2.0]
    assert read(stop_token_ids=[]) == [7.0, 1.0, 3.0]


@pytest.mark.parametrize("score_at_reward_folder", [False, True])
def test_a_reward_model_knows_the_end_tokens_of_the_folder_of_its_tokenizer(tmp_path, score_at_reward_folder):
    policy, reward = save_tiny(tmp_path / "policy"), save_tiny(tmp_path / "reward", head="score")
    ends = {"eos_token_id": [2, 9]}
    (reward if score_at_reward_folder else policy).joinpath("generation_config.json").write_text(json.dumps(ends))
    tokenizer = None if score_at_reward_folder else str(policy)
    model = TransformersModel(str(reward), head=Score(), tokenizer=tokenizer).load("reward", seed=0)
    assert model.engine.capabilities().eos_token_ids == (2, 9)
    shutil.rmtree(policy)
    shutil.rmtree(reward)
    assert model.engine.capabilities().eos_token_ids == (2,)


def toy(seed: int, n: int = 96) -> SequenceSample:
    """Return random responses. The label prefers the one that ends with the larger token."""
    pairs = np.random.default_rng(seed).integers(0, 6, (2 * n, 2, 4))
    pairs = pairs[pairs[:, 0, -1] != pairs[:, 1, -1]][:n]
    data = SequenceSample.from_sequences(
        [f"{seed}-{i}" for i in range(len(pairs))], {"input_ids": [list(torch.from_numpy(p)) for p in pairs]}
    )
    labels = (pairs[:, :, -1] == pairs[:, :, -1].max(1, keepdims=True)).astype(np.float32)
    data = data.with_tokens(loss_mask=torch.arange(len(data["input_ids"])) % 4 > 0)
    return data.with_sequences(labels=torch.from_numpy(labels.reshape(-1)), margins=torch.zeros(2 * len(pairs)))


def held_out_accuracy(train: SequenceSample) -> float:
    model, interface = Model("reward", BigramEngine()), RewardModelInterface(n_minibatches=4)
    for _ in range(20):
        interface.train_step(model, train, ONE)
        model.publish_weights()
    model.engine.lr = 0.0
    return stat_values(RewardModelInterface().train_step(model, toy(1), ONE))["accuracy"]


def test_trap_g9_shuffled_labels_teach_nothing():
    data, accuracies = toy(0), []
    for seed in range(4):
        first = torch.from_numpy(np.random.default_rng(seed).random(len(data)) < 0.5).float()
        accuracies.append(held_out_accuracy(data.with_sequences(labels=torch.stack([first, 1 - first], 1).reshape(-1))))
    assert 0.25 < sum(accuracies) / len(accuracies) < 0.75


def own_scores(folder, data: SequenceSample) -> torch.Tensor:
    """Return the scores that transformers computes for each single sequence."""
    model = AutoModelForSequenceClassification.from_pretrained(folder).eval()
    with torch.no_grad():
        return torch.cat([model(input_ids=ids[None]).logits[0] for ids in data.sequences()])


@pytest.mark.parametrize("family", ["gpt2", "llama", "qwen3", "gpt_neox"])
def test_any_model_with_one_label_loads_as_a_reward_model(tmp_path, family):
    folder, data = save_tiny(tmp_path / "public", family, head="score"), random_sample([[7, 4], [9]])
    model = TransformersModel(str(folder), head=Score()).load("reward", seed=0)
    rewards = RewardModelInterface().inference(model, data, ONE)["rewards"]
    torch.testing.assert_close(rewards, own_scores(folder, data), atol=1e-5, rtol=1e-5)


def test_the_shipped_experiment_trains_and_what_it_saves_is_a_model_with_one_label(tmp_path):
    rows = [{"prompt": f"{i}+1=", "chosen": f"{i + 1}", "rejected": [f"{i}?", "?"][i % 2]} for i in range(8)]
    pairs = tmp_path / "pairs.jsonl"
    pairs.write_text("".join(json.dumps(row) + "\n" for row in rows))
    settings = [f"models.reward.path={save_tiny(tmp_path / 'model')}", f"data.path={pairs}", "steps=12"]
    settings += [f"output_dir={tmp_path / 'run'}", "batch_prompts=8", "models.reward.optimizer.lr=3e-3"]
    history = run(build_experiment(compose(["experiment=reward_model", *settings]))).history
    losses = [record[key] for record in history for key in record if key.rpartition("/")[2] == "loss"]
    assert losses[-1] < losses[0] - 0.1
    saved, data = tmp_path / "run" / "final" / "reward", random_sample([[6, 5], [8]])
    model = TransformersModel(str(saved), head=Score()).load("reward", seed=1)
    rewards = RewardModelInterface().inference(model, data, ONE)["rewards"]
    torch.testing.assert_close(rewards, own_scores(saved, data), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("kind", [RewardLoss.pairwise, RewardLoss.scalar_compare])
def test_the_score_of_an_excluded_pair_may_be_nan(kind):
    data, interface = pairs_by_hand(), RewardModelInterface(kind=kind)
    mask_T = data["loss_mask"].clone()
    mask_T[:2] = False
    loss, _ = interface.loss(scoring(0.0, math.nan, 1.0, 5.0, 3.0).output(data), data.with_tokens(loss_mask=mask_T))
    alone, _ = interface.loss(scoring(0.0, 0.0, 0.0, 5.0, 3.0).output(data.take([1])), data.take([1]))
    assert float(loss) == pytest.approx(float(alone))
