from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from realign.api import GenerationConfig, MicroBatchSpec, Model, SequenceSample, stat_values
from realign.api.interface import is_component_key
from realign.errors import SettingsError
from realign.functional import KLEstimator, Scope, kl_estimate
from realign.interfaces.components import (
    GAE,
    Clip,
    EntropyBonus,
    GroupRelative,
    KLPenalty,
    KLPlace,
    Normalization,
    SeqMeanTokenMean,
    TokenMean,
    ValueObjective,
    select_trained,
)
from realign.interfaces.ppo import PPOActorInterface
from realign.interfaces.reference import ReferenceInterface
from realign.testing import BigramEngine, random_batch, train_once

RAW = Normalization(Scope.none, Scope.none)


def prompts(n: int = 4) -> SequenceSample:
    return SequenceSample.from_sequences(range(n), {"prompt_ids": [[[1, 2 + i]] for i in range(n)]})


def rollout(interface: PPOActorInterface, model: Model, reward) -> SequenceSample:
    data = interface.generate(model, prompts(), MicroBatchSpec())
    rewards = torch.tensor(
        [
            float(reward(ids[~given]))
            for ids, given in zip(data.sequences("input_ids"), data.sequences("prompt_mask"), strict=True)
        ]
    )
    return data.with_sequences(rewards=rewards)


def test_generation_says_who_sampled_what():
    interface = PPOActorInterface(generation=GenerationConfig(n=2, max_new_tokens=3))
    data = interface.generate(Model("actor", BigramEngine(), version=7), prompts(), MicroBatchSpec())
    assert data.keys == {"input_ids", "prompt_mask", "loss_mask", "logprobs", "versions", "truncated", "response_index"}
    assert data.keys - {"response_index"} == interface.keys("generate").writes
    assert torch.equal(data["versions"] == 7, data["loss_mask"])
    assert torch.equal(data["versions"] == -1, data["prompt_mask"])


def test_trap_a4_everything_about_token_t_stands_at_index_t():
    """Use five tokens, of which the last three are sampled. Check log-prob, value, mask, reward and advantage of
    each."""
    data = (
        SequenceSample.from_sequences(["q"], {"input_ids": [[[1, 2, 3, 4, 5]]]})
        .with_tokens(
            loss_mask=torch.tensor([False, False, True, True, True]),
            logprobs=torch.zeros(5),
            values=torch.tensor([0.0, 0.0, 0.5, 0.25, 0.125], dtype=torch.float64),
        )
        .with_sequences(rewards=torch.tensor([1.0], dtype=torch.float64))
    )
    engine = BigramEngine()
    interface = PPOActorInterface(advantage=GAE(gamma=1.0, lam=1.0), adv_norm=RAW)
    out = interface.estimate_advantages(Model("actor", engine), data)
    assert out["returns"].tolist() == [0, 0, 1, 1, 1]
    assert out["advantages"].tolist() == [0, 0, 0.5, 0.75, 0.875]
    scored = interface.inference(Model("actor", engine), data, MicroBatchSpec())
    table = engine.logits_VV.log_softmax(-1)
    assert scored["logprobs"].tolist() == pytest.approx([0, 0, *(float(table[t, t + 1]) for t in (2, 3, 4))])


def test_trap_a10_credit_adds_up_to_score_minus_kl_and_stands_on_trained_tokens_only():
    data = random_batch(1).select(["input_ids", "loss_mask", "logprobs", "ref_logprobs", "rewards"])
    interface = PPOActorInterface(advantage=GAE(gamma=1.0, lam=1.0), adv_norm=RAW, kl=KLPenalty(KLPlace.reward, 0.3))
    out = interface.estimate_advantages(Model("actor", BigramEngine()), data)
    for x, mask, logp, ref, score in zip(
        *(out.sequences(k) for k in ("returns", "loss_mask", "logprobs", "ref_logprobs")), out["rewards"], strict=True
    ):
        if mask.any() and score.isfinite():
            assert float(x[mask][0]) == pytest.approx(float(score - 0.3 * (logp - ref)[mask].sum()), abs=1e-5)
    assert not out["advantages"][~out["loss_mask"]].any()


def reference_step(data: SequenceSample, table: np.ndarray, *, low: float, high: float, lam: float) -> np.ndarray:
    """Compute the gradient step of PPO without critic, token by token, with advantages whitened over the batch."""
    rows = []
    for ids, mask, old, reward in zip(
        *(data.sequences(k) for k in ("input_ids", "loss_mask", "logprobs")), data["rewards"].tolist(), strict=True
    ):
        where = np.flatnonzero(mask.numpy())
        if math.isnan(reward) or not len(where):
            continue
        for distance, t in enumerate(reversed(where)):
            rows.append((int(ids[t - 1]), int(ids[t]), float(old[t]), reward * lam**distance))
    advantage = np.array([r[3] for r in rows])
    advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
    gradient = np.zeros_like(table)
    for (before, token, old, _), a in zip(rows, advantage, strict=True):
        logp = table[before] - np.log(np.exp(table[before]).sum())
        ratio = math.exp(logp[token] - old)
        if ratio * a <= np.clip(ratio, 1 - low, 1 + high) * a:  # the unclipped branch has the gradient
            onehot = np.eye(len(table))[token]
            gradient[before] -= a * ratio * (onehot - np.exp(logp)) / len(rows)
    return gradient


def test_the_step_equals_a_plain_reference():
    data = random_batch(3).select(["input_ids", "loss_mask", "logprobs", "rewards"])
    engine = BigramEngine(seed=5, lr=1.0)
    before = engine.logits_VV.clone().numpy()
    interface = PPOActorInterface(objective=Clip(0.1, 0.3), advantage=GAE(lam=0.8))
    interface.train_step(Model("actor", engine), data, MicroBatchSpec(n_microbatches=3))
    want = reference_step(data, before, low=0.1, high=0.3, lam=0.8)
    np.testing.assert_allclose(before - engine.logits_VV.numpy(), want, rtol=0, atol=1e-9)


def test_trap_a11_tool_tokens_are_read_but_neither_credited_nor_trained():
    """Two consecutive tool messages (tokens 4 to 7) are between two sampled spans. The last sampled token gets the
    reward."""
    ids = [1, 2, 3, 4, 5, 6, 7, 8, 9]
    sampled = torch.tensor([False, False, True, False, False, False, False, True, True])
    data = SequenceSample.from_sequences(["q"], {"input_ids": [[ids]]})
    data = data.with_tokens(loss_mask=sampled, logprobs=torch.zeros(9)).with_sequences(rewards=torch.tensor([1.0]))
    engine = BigramEngine()
    interface = PPOActorInterface(advantage=GAE(gamma=0.5, lam=1.0), adv_norm=RAW)
    out = interface.estimate_advantages(Model("actor", engine), data)
    assert out["returns"].tolist() == [0, 0, 0.25, 0, 0, 0, 0, 0.5, 1]
    before = engine.logits_VV.clone()
    interface.train_step(Model("actor", engine), data, MicroBatchSpec())
    changed = (engine.logits_VV != before).any(1).nonzero().flatten().tolist()
    assert changed == [2, 7, 8]  # the tokens before each sampled token; tokens 4, 5, 6 and 7 are not learned


def test_trap_d8_statistics_of_the_batch_are_taken_before_it_is_cut():
    data = random_batch(1).select(["input_ids", "loss_mask", "logprobs", "rewards"])
    seen: dict[int, dict[str, list[float]]] = {}
    for n in (1, 2, 6):

        class Watching(PPOActorInterface):
            def loss(self, output, minibatch):
                for i, x in zip(minibatch.ids, minibatch.unpack(), strict=True):
                    seen.setdefault(n, {})[i] = x["advantages"].tolist()  # noqa: B023
                return super().loss(output, minibatch)

        Watching().train_step(Model("actor", BigramEngine()), data, MicroBatchSpec(n_microbatches=n))
    assert seen[1] == seen[2] == seen[6]


def test_trap_d15_every_term_of_the_loss_is_weighed_alike():
    data = random_batch(2)
    output = BigramEngine().output(data)
    for weighing in (TokenMean(), SeqMeanTokenMean()):
        mask, cu = data["loss_mask"], data.cu_seqlens()
        plain = PPOActorInterface(aggregation=weighing).loss(output, data)[0]
        with_entropy = PPOActorInterface(aggregation=weighing, entropy=EntropyBonus(0.3)).loss(output, data)[0]
        _, entropy = output.logprobs_and_entropy(where_T=mask)
        assert float(plain - with_entropy) == pytest.approx(0.3 * float(weighing.total(entropy, mask, cu)))
        kl = KLPenalty(KLPlace.loss, 0.7, KLEstimator.k3)
        with_kl = PPOActorInterface(aggregation=weighing, kl=kl).loss(output, data)[0]
        values = kl_estimate(output.logprobs(where_T=mask), data["ref_logprobs"], mask, KLEstimator.k3)
        assert float(with_kl - plain) == pytest.approx(0.7 * float(weighing.total(values, mask, cu)))


def test_metrics_of_a_step_are_the_plain_means_they_are_named_after():
    """Use one unclipped step. `logprobs` of the batch are noise, so ratios differ from 1."""
    data = random_batch(3).select(["input_ids", "loss_mask", "logprobs", "rewards"])
    engine = BigramEngine()
    metrics = train_once(PPOActorInterface(), data, MicroBatchSpec(n_microbatches=2)).metrics
    model, interface = Model("actor", engine), PPOActorInterface()
    credited = interface.estimate_advantages(model, interface.score(model, data))
    mask = credited["loss_mask"]
    now = engine.output(data).logprobs(where_T=mask)[mask]
    old, gain = credited["logprobs"][mask], credited["advantages"][mask]
    ratio = (now - old).exp()
    trained = [bool(x.any()) for x in credited.sequences("loss_mask")]
    want = {
        "ratio_mean": ratio.mean(),
        "ratio_min": ratio.min(),
        "ratio_max": ratio.max(),
        "ratio_var": ratio.var(correction=0),
        "logprob_diff_mean": (now - old).mean(),
        "logprob_diff_var": (now - old).var(correction=0),
        "logprob_diff_min": (now - old).min(),
        "logprob_diff_max": (now - old).abs().max(),
        "first_logprob_diff_max": (now - old).abs().max(),
        "approx_kl": (ratio - 1 - (now - old)).mean(),
        "clip_fraction": (torch.where(gain > 0, ratio > 1.2, ratio < 0.8) & (gain != 0)).double().mean(),
        "advantage_mean": gain.mean(),
        "advantage_min": gain.min(),
        "advantage_max": gain.max(),
        "trained_fraction": np.mean(trained),
    }
    assert 0 < want["trained_fraction"] < 1
    assert {k: metrics[k] for k in want} == pytest.approx({k: float(v) for k, v in want.items()}, rel=1e-5, abs=1e-7)


def test_trap_b1_the_difference_to_the_sampler_is_that_before_the_first_update():
    """Later optimizer steps change the policy, which is not a difference to the sampler."""
    interface = PPOActorInterface(generation=GenerationConfig(n=4, max_new_tokens=5), epochs=3)
    model = Model("actor", BigramEngine(lr=5.0))
    data = rollout(interface, model, lambda ids: (ids == 3).sum())
    stats = stat_values(interface.train_step(model, data, MicroBatchSpec()))
    assert stats["first_logprob_diff_max"] < 1e-6
    assert stats["logprob_diff_max"] > 0.01


class Likelihood(PPOActorInterface):
    """Interface that overrides the whole loss and returns no metrics."""

    def loss(self, output, minibatch):
        mask_T = minibatch["loss_mask"]
        logprobs_T = output.logprobs(temperature=self.generation.temperature, where_T=mask_T)
        return self.aggregation.total(-logprobs_T, mask_T, minibatch.cu_seqlens()), {}


@pytest.mark.parametrize("recomputed", [False, True])
def test_trap_b1_an_overridden_loss_reports_the_same_first_difference(recomputed):
    keys = ["input_ids", "loss_mask", "logprobs", "rewards", *(["prox_logprobs"] if recomputed else [])]
    data, spec = random_batch(3).select(keys), MicroBatchSpec(n_microbatches=3)
    own = train_once(Likelihood(epochs=2, n_minibatches=2), data, spec).metrics
    plain = train_once(PPOActorInterface(epochs=2, n_minibatches=2), data, spec).metrics
    assert own["first_logprob_diff_max"] == plain["first_logprob_diff_max"] > 0
    assert "logprob_diff_max" not in own


def test_trap_b1_an_overridden_loss_has_ratio_one_before_the_first_update():
    interface = Likelihood(generation=GenerationConfig(n=4, max_new_tokens=5, temperature=0.7), epochs=2)
    model = Model("actor", BigramEngine(lr=0.0))
    data = rollout(interface, model, lambda ids: (ids == 3).sum())
    assert stat_values(interface.train_step(model, data, MicroBatchSpec()))["first_logprob_diff_max"] < 1e-6


def test_recomputed_log_probs_are_what_ratios_and_kl_are_taken_against():
    data = random_batch(4).select(["input_ids", "loss_mask", "logprobs", "prox_logprobs", "ref_logprobs", "rewards"])
    replaced = data.with_tokens(logprobs=data["prox_logprobs"]).select(data.keys - {"prox_logprobs"})
    interface = PPOActorInterface(kl=KLPenalty(KLPlace.reward, 0.3))
    with_both, with_one, without = (
        train_once(interface, x, MicroBatchSpec()).metrics for x in (data, replaced, data.select(replaced.keys))
    )
    of_the_sampler = "entropy_per_sequence"
    assert with_both.pop(of_the_sampler) == without.pop(of_the_sampler) != with_one.pop(of_the_sampler)
    assert with_both == with_one != without


def test_trap_c2_a_cut_response_takes_the_value_of_the_state_where_it_was_cut():
    data = SequenceSample.from_sequences(["a"], {"input_ids": [[[1, 2, 3], [1, 2, 3]]]}).with_tokens(
        loss_mask=torch.tensor([False, True, True] * 2), values=torch.zeros(6)
    )
    data = data.with_sequences(
        rewards=torch.ones(2), truncated=torch.tensor([False, True]), bootstrap_values=torch.tensor([0.4, 0.6])
    )
    model = Model("actor", BigramEngine())
    on = PPOActorInterface(advantage=GAE(0.5, 1.0, bootstrap=True), adv_norm=RAW).estimate_advantages(model, data)
    assert on["returns"].tolist() == pytest.approx([0, 0.5, 1, 0, 0.65, 1.3])
    off = PPOActorInterface(advantage=GAE(0.5, 1.0), adv_norm=RAW).estimate_advantages(model, data)
    assert off["returns"].tolist() == pytest.approx([0, 0.5, 1, 0, 0.5, 1])


def test_trap_b2_temperature_reaches_policy_reference_and_entropy():
    data = random_batch(0)
    engine = BigramEngine()
    model = Model("actor", engine)
    policy = PPOActorInterface(generation=GenerationConfig(temperature=0.6)).inference(model, data, MicroBatchSpec())
    reference = ReferenceInterface(temperature=0.6).inference(model, data, MicroBatchSpec())
    assert torch.equal(policy["logprobs"], reference["logprobs"])
    table = (engine.logits_VV / 0.6).log_softmax(-1)
    t = int(data["loss_mask"].nonzero()[0])
    assert float(policy["logprobs"][t]) == pytest.approx(float(table[data["input_ids"][t - 1], data["input_ids"][t]]))


def test_trap_b4_settings_that_distort_the_sampler_are_refused():
    for setting, text in (({"min_new_tokens": 3}, "min_new_tokens=3"), ({"greedy": True}, "greedy=True")):
        with pytest.raises(ValueError, match=text):
            PPOActorInterface(generation=GenerationConfig(**setting))
    with pytest.raises(ValueError, match="advantage_scale=2"):
        PPOActorInterface(generation=GenerationConfig(top_p=0.9, advantage_scale=2.0))


@pytest.mark.parametrize("setting", [{"top_p": 0.9}, {"top_k": 5}, {"min_p": 0.1}, {"top_k": 9, "min_new_tokens": 2}])
def test_trap_b4_sampling_from_a_part_of_the_vocabulary_is_recorded_and_replayed(setting):
    actor = PPOActorInterface(generation=GenerationConfig(**setting))
    assert actor.generation == GenerationConfig(**setting, sampling_replay=True)
    assert "sampling_mask" in actor.keys("generate").writes
    assert actor.keys("train_step").needs["sampling_mask"].startswith(f"generation.{next(iter(setting))}=")
    assert actor.plan().exact_sampling
    (greedy,) = (role for name, role in actor.roles().items() if name == "baseline")
    assert greedy.interface.generation.sampling_replay  # which `GreedyInterface` turns off


def component_needs(interface: PPOActorInterface, method: str = "train_step") -> dict[str, str]:
    """Return the needed keys that exist only for a component, with the settings that require them."""
    return {key: setting for key, setting in interface.keys(method).needs.items() if is_component_key(key)}


def test_trap_c7_kl_is_applied_in_one_place_and_needs_its_reference():
    for place in (KLPlace.reward, KLPlace.loss):
        interface = PPOActorInterface(kl=KLPenalty(place, estimator=KLEstimator.k2))
        assert component_needs(interface) == {"ref_logprobs": f"kl.place={place.value}"}
        assert component_needs(interface, "generate") == {}
    assert component_needs(PPOActorInterface()) == {}


def penalty(place: KLPlace, coef: float) -> KLPenalty:
    """Return a penalty with k2. Without a place, neither setting has an effect."""
    return KLPenalty() if place is KLPlace.none else KLPenalty(place, coef, KLEstimator.k2)


def test_trap_c7_the_penalty_moves_the_credit_or_the_loss_and_never_both():
    data = random_batch(2).select(["input_ids", "loss_mask", "logprobs", "ref_logprobs", "rewards"])
    other = data.with_tokens(ref_logprobs=torch.where(data["loss_mask"], data["ref_logprobs"] - 0.5, 0))
    moved = {}
    for place in KLPlace:
        interface = PPOActorInterface(adv_norm=RAW, kl=penalty(place, 0.5))
        model = Model("actor", BigramEngine())
        credits = [interface.credit(model, x, MicroBatchSpec()) for x in (data, other)]
        # Test the loss alone, with the same given advantages.
        given = {"advantages": credits[0]["advantages"], "loss_mask": credits[0]["loss_mask"]}
        trained_ = [train_once(interface, x.with_tokens(**given), MicroBatchSpec()) for x in (data, other)]
        moved[place] = (
            not torch.equal(credits[0]["advantages"], credits[1]["advantages"]),
            not torch.equal(trained_[0].parameters[0], trained_[1].parameters[0]),
        )
    assert moved == {KLPlace.none: (False, False), KLPlace.reward: (True, False), KLPlace.loss: (False, True)}


@pytest.mark.parametrize(
    ("setting", "text"),
    [
        ({"n_minibatches": 1.5}, "n_minibatches=1.5: must be a whole number at least 1"),
        ({"keep_best": 2}, "keep_best=2: must be at most generation.n=1"),
        ({"min_response_tokens": 300}, "min_response_tokens=300: must be at most generation.max_new_tokens=256"),
        (
            {"train_end_token": False, "generation": GenerationConfig(fixed_length=True)},
            "train_end_token=false: has no effect with generation.fixed_length=true",
        ),
        ({"critic_warmup_steps": 5}, "critic_warmup_steps=5: has no effect with critic=none. Set critic=own"),
        ({"critic_warmup_steps": 5, "critic": "shared"}, "critic_warmup_steps=5: has no effect with critic=shared"),
        ({"critic": "theirs"}, r"critic='theirs': unknown choice \(valid: none, own, shared\)"),
        ({"value": ValueObjective()}, "value: has no effect with critic=none. Set critic=shared"),
        *(
            (
                {"critic": critic, "advantage": GroupRelative(), "generation": GenerationConfig(n=4)},
                f"critic={critic}: GroupRelative computes no returns to train a critic. Set advantage=gae",
            )
            for critic in ("own", "shared")
        ),
        ({"value": ValueObjective(), "critic": "own"}, "value: has no effect with critic=own"),
        (
            {"credit_per_minibatch": True, "critic": "own"},
            "credit_per_minibatch=true: cannot be combined with critic=own",
        ),
    ],
)
def test_settings_that_cannot_work_raise_before_anything_is_sampled(setting, text):
    with pytest.raises(SettingsError, match=text):
        PPOActorInterface(**setting)


def test_trap_c8_the_logged_kl_is_the_trained_one():
    data = random_batch(2).select(["input_ids", "loss_mask", "logprobs", "ref_logprobs", "rewards"])
    off = train_once(PPOActorInterface(adv_norm=RAW), data, MicroBatchSpec())
    on = train_once(
        PPOActorInterface(adv_norm=RAW, kl=KLPenalty(KLPlace.loss, 0.5, KLEstimator.k2)), data, MicroBatchSpec()
    )
    assert on.metrics["loss"] - off.metrics["loss"] == pytest.approx(0.5 * on.metrics["ref_kl"], rel=1e-5)
    in_reward = PPOActorInterface(adv_norm=RAW, advantage=GAE(lam=1.0), kl=KLPenalty(KLPlace.reward, 0.5))
    logged = train_once(in_reward, data, MicroBatchSpec()).metrics
    credit = in_reward.credit(Model("actor", BigramEngine()), data, MicroBatchSpec())
    rows = zip(credit.sequences("returns"), credit.sequences("loss_mask"), data["rewards"].tolist(), strict=True)
    taken = [score - float(returns[mask][0]) for returns, mask, score in rows if mask.any()]
    assert np.mean(taken) == pytest.approx(0.5 * logged["ref_kl_per_sequence"], rel=1e-5)


def test_trap_c9_the_adaptive_coefficient_follows_trained_rows_once_per_batch():
    data = random_batch(2).select(["input_ids", "loss_mask", "logprobs", "ref_logprobs", "rewards"])
    kl = KLPenalty(KLPlace.reward, 0.1, target=1.0, horizon=100)
    interface = PPOActorInterface(kl=kl, epochs=2, n_minibatches=2)
    stats = stat_values(interface.train_step(Model("actor", BigramEngine()), data, MicroBatchSpec()))
    per_sequence = [
        float((a - b)[m].sum())
        for a, b, m, r in zip(
            *(data.sequences(k) for k in ("logprobs", "ref_logprobs", "loss_mask")), data["rewards"], strict=True
        )
        if m.any() and r.isfinite()
    ]
    error = np.clip(np.mean(per_sequence) / 1.0 - 1, -0.2, 0.2)
    want = 0.1 * (1 + error * len(per_sequence) / 100)
    assert stats["kl_coef"] == pytest.approx(0.1)
    assert interface.kl_control.controller.value == pytest.approx(want, rel=1e-5)
    resumed = PPOActorInterface(kl=kl)
    resumed.load_state_dict(interface.state_dict())
    assert resumed.kl_control.controller.value == interface.kl_control.controller.value


def test_trap_d6_rejected_rows_leave_the_denominator():
    data = SequenceSample.from_sequences(["a"], {"input_ids": [[[1, 2, 3, 4, 5], [1, 2]]]})
    data = data.with_tokens(
        loss_mask=torch.tensor([False, True, True, True, True, False, True]), logprobs=torch.zeros(7)
    ).with_sequences(rewards=torch.tensor([1.0, math.nan]))
    interface = PPOActorInterface()
    model = Model("actor", BigramEngine())
    out = interface.estimate_advantages(model, interface.score(model, data))
    assert interface.loss_weight(out) == 4


def test_trap_d11_every_prompt_is_used_once_per_epoch():
    data = random_batch(0, n_prompts=7).select(["input_ids", "loss_mask", "logprobs", "rewards"])
    seen: list[str] = []
    steps: list[int] = []

    class Watching(BigramEngine):
        def train_batch(self, data, *rest):
            seen.extend(data.ids)
            steps.append(len(data))
            return super().train_batch(data, *rest)

    PPOActorInterface(epochs=2, n_minibatches=3).train_step(Model("actor", Watching()), data, MicroBatchSpec())
    teaching = sorted(select_trained(PPOActorInterface().score(Model("actor", BigramEngine()), data)).ids)
    assert len(steps) == 2 * 3
    half = len(seen) // 2
    assert 5 <= len(teaching) < len(data)  # one prompt has no trained tokens
    assert sorted(seen[:half]) == sorted(seen[half:]) == teaching
    assert seen[:half] != seen[half:]
