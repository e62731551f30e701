from __future__ import annotations

import json
import math
from itertools import pairwise

import pytest
import torch

from realign.api import MicroBatchSpec, Model, SequenceSample, derive_seed, stat_values
from realign.config import build_experiment, compose
from realign.interfaces.kto import KTOInterface, mismatch_responses
from realign.runtime import run
from realign.testing import BigramEngine, random_preferences
from tests.tiny import save_tiny

VARIANTS = [
    KTOInterface(),
    KTOInterface(beta=0.5, desirable_weight=1.3, undesirable_weight=0.4),
    KTOInterface(beta=2.0, temperature=0.6),
]


def logprob(table: torch.Tensor, ids: list[int], mask: list[bool]) -> torch.Tensor:
    """Return the sum of the log-probs of the trained tokens of a sequence."""
    rows = table.log_softmax(-1)
    return sum((rows[a, b] for (a, b), m in zip(pairwise(ids), mask[1:], strict=True) if m), table.new_zeros(()))


def pairs_of_prompts(data: SequenceSample) -> list[tuple[list[int], list[bool]]]:
    """Return the tokens and masks of mismatched sequences, one sequence at a time."""
    prompts = data.unpack()
    cycle = sorted(prompts, key=lambda x: derive_seed(0, "mismatched", str(x.ids[0])))
    following = {a.ids: b for a, b in pairwise([*cycle, cycle[0]])}
    longest = max(len(ids) for ids in data.sequences())
    pairs = []
    for prompt in prompts:
        other = following[prompt.ids]
        for j, ids in enumerate(prompt.sequences()):
            given = ids[prompt.sequences("prompt_mask")[j]].tolist()
            k = j % len(other.sequences())
            answer = ~other.sequences("prompt_mask")[k]
            tokens = [*given, *other.sequences()[k][answer].tolist()]
            mask = [False] * len(given) + other.sequences("loss_mask")[k][answer].tolist()
            pairs.append((tokens[:longest], mask[:longest]))
    return pairs


def reference(interface: KTOInterface, table: torch.Tensor, data: SequenceSample) -> tuple[torch.Tensor, float]:
    """Compute the mean loss and the baseline, one sequence at a time, from eq. 8 of arXiv:2402.01306."""
    table = table / interface.temperature
    ratios = []
    for (ids, mask), ref in zip(pairs_of_prompts(data), data["mismatched_ref_logprobs"].tolist(), strict=True):
        if any(mask):
            ratios.append(logprob(table, ids, mask).item() - ref)
    z0 = max(0.0, sum(ratios) / len(ratios))
    losses = []
    keys = [data.sequences(key) for key in ("input_ids", "loss_mask", "ref_logprobs")]
    for ids, mask, ref, label in zip(*keys, data["labels"].tolist(), strict=True):
        if not mask.any():
            continue
        r = logprob(table, ids.tolist(), mask.tolist()) - ref[mask].sum()
        weight = interface.desirable_weight if label else interface.undesirable_weight
        losses.append(weight * (1 - torch.sigmoid(interface.beta * (r - z0 if label else z0 - r))))
    return sum(losses) / len(losses), z0


@pytest.mark.parametrize("interface", VARIANTS, ids=str)
def test_loss_gradient_and_baseline_equal_a_loop_over_sequences(interface):
    engine, data = BigramEngine(lr=0.5), random_preferences(3)
    before = engine.logits_VV.clone()
    table = before.clone().requires_grad_()
    loss, z0 = reference(interface, table, data)
    loss.backward()
    assert z0 > 0
    stats = stat_values(interface.train_step(Model("actor", engine), data, MicroBatchSpec(n_microbatches=3)))
    assert stats["loss"] == pytest.approx(loss.item(), rel=1e-10)
    assert stats["kl_baseline"] == pytest.approx(z0, rel=1e-6)
    torch.testing.assert_close(engine.logits_VV, before - 0.5 * table.grad, rtol=0, atol=1e-10)


def test_each_mini_batch_has_the_baseline_of_its_prompts_under_the_current_weights(monkeypatch):
    """The pairs are formed over the whole batch, before it is divided."""
    seen, engine, data = [], BigramEngine(lr=0.5), random_preferences(3)
    weights = []
    train_batch = engine.train_batch

    def record(part, *rest):
        seen.append(part)
        weights.append(engine.logits_VV.clone())
        return train_batch(part, *rest)

    monkeypatch.setattr(engine, "train_batch", record)
    KTOInterface(n_minibatches=2).train_step(Model("actor", engine), data, MicroBatchSpec())
    others = dict(zip(data.ids, [[] for _ in data.ids], strict=True))
    owners = data.group_index().tolist()
    rows = zip(owners, pairs_of_prompts(data), data["mismatched_ref_logprobs"].tolist(), strict=True)
    for owner, pair, ref in rows:
        others[data.ids[owner]].append((*pair, ref))
    assert len(seen) == 2
    for part, table in zip(seen, weights, strict=True):
        ratios = [logprob(table, ids, m).item() - ref for i in part.ids for ids, m, ref in others[i] if any(m)]
        assert part["kl_baseline"].unique().tolist() == pytest.approx([max(0.0, sum(ratios) / len(ratios))], rel=1e-9)
    assert not torch.equal(*weights)


def labeled() -> SequenceSample:
    data = SequenceSample.from_sequences("ab", {"input_ids": [[[1, 2, 3]], [[1, 4]]]})
    mask = torch.tensor([False, True, True, False, True])
    data = data.with_tokens(prompt_mask=~mask, loss_mask=mask)
    data = data.with_tokens(ref_logprobs=torch.tensor([0.0, -3.0, -2.0, 0.0, -4.0]))
    return data.with_sequences(labels=torch.tensor([1.0, 0.0]), mismatched_ref_logprobs=torch.tensor([-3.0, -6.0]))


def test_metrics_by_hand():
    engine = BigramEngine()
    engine.logits_VV.zero_()  # each token has log-prob -log 11
    log_v = math.log(11)
    stats = stat_values(KTOInterface(beta=0.5).train_step(Model("actor", engine), labeled(), MicroBatchSpec()))
    good, bad = -2 * log_v + 5, -log_v + 4
    z0 = ((-log_v + 3) + (-2 * log_v + 6)) / 2  # a's prompt with b's response of one token, and the reverse
    assert stats["kl_baseline"] == pytest.approx(z0, rel=1e-5)
    assert stats["rewards/chosen"] == pytest.approx(good / 2, rel=1e-5)
    assert stats["rewards/rejected"] == pytest.approx(bad / 2, rel=1e-5)
    assert stats["rewards/margin"] == pytest.approx((good - bad) / 2, rel=1e-5)
    assert stats["rewards/accuracy"] == ((good > z0) + (bad < z0)) / 2
    assert stats["logprobs/chosen"] == pytest.approx(-2 * log_v, rel=1e-6)
    assert stats["logprobs/rejected"] == pytest.approx(-log_v, rel=1e-6)
    expected = (1 / (1 + math.exp((good - z0) / 2)) + 1 / (1 + math.exp((z0 - bad) / 2))) / 2
    assert stats["loss"] == pytest.approx(expected, rel=1e-6)
    assert stats["preference_loss"] == pytest.approx(expected, rel=1e-6)


def test_the_shipped_experiment_runs_on_a_tiny_model(tmp_path):
    rows = [{"prompt": f"{i}+1=", "completion": f"{i + 1}" if i % 2 else "?", "label": bool(i % 2)} for i in range(8)]
    data = tmp_path / "labeled.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    model = save_tiny(tmp_path / "model")
    settings = [f"models.actor.path={model}", f"data.path={data}", f"output_dir={tmp_path / 'run'}", "steps=4"]
    settings += ["batch_prompts=8", "models.actor.optimizer.lr=1e-3", "models.actor.optimizer.schedule.warmup=0"]
    settings += ["evaluation={_target_: realign.runtime.LossEvaluation, batch_prompts: 7, every_steps: 2}"]
    settings += [f"evaluation.data={{_target_: realign.data.UnpairedData, path: {data}}}"]
    history = run(build_experiment(compose(["experiment=kto", *settings]))).history
    losses = [record["preference_loss"] for record in history if "preference_loss" in record]
    assert losses[0] == pytest.approx(0.5, abs=1e-5)
    assert losses[-1] < losses[0] - 0.001
    assert "eval/loss" in history[-1]
    assert (tmp_path / "run" / "final" / "actor" / "model.safetensors").is_file()


def test_every_prompt_gets_the_response_of_another_prompt_and_every_response_is_used_once():
    ids = [[[10 * i + 1, 10 * i + 2, 10 * i + 3]] for i in range(6)]
    data = SequenceSample.from_sequences("abcdef", {"input_ids": ids})
    first = torch.tensor([True, False, False] * 6)
    data = data.with_tokens(prompt_mask=first, loss_mask=torch.tensor([False, False, True] * 6))
    other = mismatch_responses(data)
    assert other.ids == data.ids
    mismatched = other.sequences("input_ids")
    assert [int(x[0]) for x in mismatched] == [1, 11, 21, 31, 41, 51]
    answers = [x[1:].tolist() for x in mismatched]
    assert sorted(answers) == [[10 * i + 2, 10 * i + 3] for i in range(6)]
    assert all(answer[0] // 10 != i for i, answer in enumerate(answers))
    assert other["loss_mask"].tolist() == data["loss_mask"].tolist()
