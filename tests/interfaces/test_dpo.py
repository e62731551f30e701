from __future__ import annotations

import json
import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from realign.api import MicroBatchSpec, Model, SequenceSample, stat_values
from realign.config import build_experiment, compose
from realign.interfaces.dpo import DPOInterface, DPOLoss
from realign.interfaces.reference import ReferenceInterface
from realign.runtime import run
from realign.testing import BigramEngine, check_train_step, random_preferences
from tests.interfaces.preferences import PRESETS
from tests.tiny import save_tiny

VARIANTS = [
    DPOInterface(beta=0.3),
    DPOInterface(kind=DPOLoss.ipo, beta=0.5),
    DPOInterface(label_smoothing=0.2),
    DPOInterface(length_normalized=True, beta=2.0),
    DPOInterface(sft_coef=0.7, temperature=0.6),
    DPOInterface(kind=DPOLoss.robust, label_smoothing=0.2, beta=0.4),
    DPOInterface(reference_free=True, length_normalized=True, beta=2.0, target_margin=0.8),
    DPOInterface(reference_free=True, sft_coef=1.0, label_smoothing=0.1),
    DPOInterface(kind=DPOLoss.odds_ratio, reference_free=True, length_normalized=True, beta=0.3, sft_coef=1.0),
    DPOInterface(kind=DPOLoss.odds_ratio, reference_free=True),
]


def reference(interface: DPOInterface, table: torch.Tensor, data: SequenceSample) -> tuple[torch.Tensor, int]:
    """Compute the mean loss over pairs, one pair and one token at a time."""
    sequences = [data.sequences(key) for key in ("input_ids", "loss_mask", "ref_logprobs")]
    rows = list(zip(*sequences, data["labels"].tolist(), strict=True))
    losses = []
    for first, second in zip(rows[::2], rows[1::2], strict=True):
        if not (first[1].any() and second[1].any()):
            continue
        h, nll = [], []
        for ids, mask, ref, _ in sorted((first, second), key=lambda row: -row[3]):
            trained = [t for t in range(len(ids)) if mask[t]]
            logps = [(table[ids[t - 1]] / interface.temperature).log_softmax(-1)[ids[t]] for t in trained]
            ratio = sum(logp - (not interface.reference_free) * ref[t] for logp, t in zip(logps, trained, strict=True))
            h.append(ratio / len(trained) if interface.length_normalized else ratio)
            nll.append(-sum(logps) / len(trained))
        x = h[0] - h[1]
        rate = interface.label_smoothing
        right, wrong = (torch.sigmoid(sign * (interface.beta * x - interface.target_margin)) for sign in (1, -1))
        if interface.kind is DPOLoss.ipo:
            loss = (x - 0.5 / interface.beta) ** 2
        elif interface.kind is DPOLoss.robust:
            loss = (rate * wrong.log() - (1 - rate) * right.log()) / (1 - 2 * rate)
        elif interface.kind is DPOLoss.odds_ratio:
            odds = [logp.exp() / (1 - logp.exp()) for logp in h]
            loss = -interface.beta * torch.sigmoid((odds[0] / odds[1]).log()).log()
        else:
            loss = -(1 - rate) * right.log() - rate * wrong.log()
        losses.append(loss + interface.sft_coef * nll[0])
    return sum(losses) / len(losses), len(losses)


@pytest.mark.parametrize("interface", VARIANTS, ids=str)
def test_loss_and_gradient_equal_a_loop_over_pairs(interface):
    engine, data = BigramEngine(lr=0.5), random_preferences(3)
    before = engine.logits_VV.clone()
    table = before.clone().requires_grad_()
    loss, n_pairs = reference(interface, table, data)
    loss.backward()
    assert n_pairs == data.n_sequences // 2 - 1  # one pair has an empty response
    stats = stat_values(interface.train_step(Model("actor", engine), data, MicroBatchSpec(n_microbatches=3)))
    assert stats["loss"] == pytest.approx(loss.item(), rel=1e-10)
    torch.testing.assert_close(engine.logits_VV, before - 0.5 * table.grad, rtol=0, atol=1e-10)


def one_pair(labels=(1.0, 0.0)) -> SequenceSample:
    data = SequenceSample.from_sequences(["a"], {"input_ids": [[[1, 2, 3], [1, 4]]]})
    data = data.with_tokens(loss_mask=torch.tensor([False, True, True, False, True]))
    data = data.with_tokens(ref_logprobs=torch.tensor([0.0, -1.0, -2.0, 0.0, -4.0]))
    return data.with_sequences(labels=torch.tensor(labels))


@pytest.mark.parametrize(("labels", "sign"), [((1.0, 0.0), 1), ((0.0, 1.0), -1)])
def test_metrics_by_hand(labels, sign):
    engine = BigramEngine()
    engine.logits_VV.zero_()  # each token has log-prob -log 11
    log_v = math.log(11)
    stats = stat_values(DPOInterface(beta=0.5).train_step(Model("actor", engine), one_pair(labels), MicroBatchSpec()))
    first, second = -2 * log_v + 3, -log_v + 4
    chosen, rejected = (first, second) if sign == 1 else (second, first)
    assert stats["rewards/chosen"] == pytest.approx(chosen / 2, rel=1e-5)
    assert stats["rewards/rejected"] == pytest.approx(rejected / 2, rel=1e-5)
    assert stats["rewards/margin"] == pytest.approx((chosen - rejected) / 2, rel=1e-5)
    assert stats["rewards/accuracy"] == (chosen > rejected)
    assert stats["logprobs/chosen"] == pytest.approx(-log_v * (2 if sign == 1 else 1), rel=1e-6)
    assert stats["logprobs/rejected"] == pytest.approx(-log_v * (1 if sign == 1 else 2), rel=1e-6)
    assert stats["loss"] == pytest.approx(math.log1p(math.exp(-(chosen - rejected) / 2)), rel=1e-6)


def toy(seed: int, n: int = 96) -> SequenceSample:
    """Return random responses of five tokens. The label prefers the one with more tokens 3."""
    rng, rows, labels = np.random.default_rng(seed), [], []
    while len(rows) < n:
        pair = rng.integers(0, 6, (2, 6))
        liked = (pair[:, 1:] == 3).sum(1)
        if liked[0] != liked[1]:
            rows.append(list(torch.from_numpy(pair)))
            labels.append([[float(liked[0] > liked[1])], [float(liked[1] > liked[0])]])
    data = SequenceSample.from_sequences([f"{seed}-{i}" for i in range(n)], {"input_ids": rows})
    data = data.with_tokens(loss_mask=torch.arange(len(data["input_ids"])) % 6 > 0).with_sequences(labels=labels)
    model = Model("ref", BigramEngine())
    return data.with_tokens(ref_logprobs=ReferenceInterface().inference(model, data, MicroBatchSpec())["logprobs"])


def held_out_accuracy(train: SequenceSample) -> float:
    model, interface = Model("actor", BigramEngine(lr=5.0)), DPOInterface(beta=0.3, n_minibatches=4)
    for _ in range(20):
        interface.train_step(model, train, MicroBatchSpec())
        model.publish_weights()
    frozen = Model("actor", BigramEngine(lr=0.0))
    frozen.engine.logits_VV = model.engine.logits_VV
    return stat_values(replace(interface, n_minibatches=1).train_step(frozen, toy(1), MicroBatchSpec()))[
        "rewards/accuracy"
    ]


def test_trap_g9_shuffled_labels_teach_nothing():
    data, accuracies = toy(0), []
    for seed in range(3):
        first = torch.from_numpy(np.random.default_rng(seed).random(len(data)) < 0.5).float()
        accuracies.append(held_out_accuracy(data.with_sequences(labels=torch.stack([first, 1 - first], 1).reshape(-1))))
    assert 0.3 < sum(accuracies) / len(accuracies) < 0.7


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_has_the_settings_of_its_paper_and_calls_a_reference_only_if_the_loss_reads_it(name):
    config = compose(["experiment=dpo", f"algorithm={name}", "models.actor.path=m", "data.path=pairs.jsonl"])
    made = build_experiment(config)
    assert made.interfaces["actor"] == PRESETS[name]
    free = name in ("simpo", "cpo", "orpo")
    assert [rpc.name for rpc in made.graph.order] == ([] if free else ["ref_inf"]) + ["actor_train"]
    assert ("ref" in made.models) == ("ref" in made.interfaces) == (not free)
    keys = made.interfaces["actor"].keys("train_step").needs
    data = random_preferences(3).select(keys)
    assert ("ref_logprobs" in data) == (not free)
    assert "loss" in stat_values(made.interfaces["actor"].train_step(model_of(0), data, MicroBatchSpec()))


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_does_not_depend_on_micro_batches_order_or_masked_values(name):
    """The presets are found by `test_every_preset_for_pairs_is_compared`."""
    keys = PRESETS[name].keys("train_step").needs
    check_train_step(PRESETS[name], keys, data=random_preferences(5), whole_groups=True)


def model_of(seed: int) -> Model:
    return Model("actor", BigramEngine(seed=seed))


def test_the_shipped_experiment_runs_on_a_tiny_model(tmp_path):
    rows = [{"prompt": f"{i}+1=", "chosen": f"{i + 1}", "rejected": [f"{i}", "?"][i % 2]} for i in range(8)]
    data = tmp_path / "pairs.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    model = save_tiny(tmp_path / "model")
    settings = [f"models.actor.path={model}", f"data.path={data}", f"output_dir={tmp_path / 'run'}", "steps=4"]
    settings += ["batch_prompts=8", "models.actor.optimizer.lr=1e-3", "models.actor.optimizer.schedule.warmup=0"]
    history = run(build_experiment(compose(["experiment=dpo", *settings]))).history
    losses = [record[key] for record in history for key in record if key.endswith("preference_loss")]
    assert losses[0] == pytest.approx(math.log(2), abs=1e-5)
    assert losses[-1] < losses[0] - 0.01
    assert (tmp_path / "run" / "final" / "actor" / "model.safetensors").is_file()
