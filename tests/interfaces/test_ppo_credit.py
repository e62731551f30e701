"""PPO's credit against a reference in plain Python, and what decides which mini-batches are learned from."""

from __future__ import annotations

import math
from copy import deepcopy
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from realign.interfaces.shaping import RewardScale, RewardShaping, TruncatedReward, Truncation

from realign.api import GenerationConfig, MicroBatchSpec, Model, ModelInterface, SequenceSample, stat_values
from realign.functional import KLEstimator, Level, Normalization, PolicyObjective, Scope
from realign.interfaces.critic import ValueObjective
from realign.interfaces.grpo import GRPOActorInterface
from realign.interfaces.ppo import EarlyStop, KLPenalty, KLPlace, PPOActorInterface, dataflow
from realign.runtime.contract import check_keys
from realign.testing import BigramEngine, random_batch
from tests.functional.test_normalization import over_ranks

RAW = Normalization(Scope.none, Scope.none)
CREDIT = ["input_ids", "loss_mask", "logprobs", "rewards", "truncated"]


def model(**engine) -> Model:
    return Model("actor", BigramEngine(**engine))


def credit_in_plain_python(data: SequenceSample, p: PPOActorInterface) -> list[dict]:
    """Advantages and returns of every sequence that trains, from the definitions, for one process."""
    kept = []
    columns = [data.sequences(k) for k in ("loss_mask", "logprobs", "ref_logprobs", "values", "dense_rewards")]
    columns += [data[k].tolist() for k in ("rewards", "truncated", "bootstrap_values")]
    for s, (mask, logp, ref, value, dense, score, cut, boot) in enumerate(zip(*columns, strict=True)):
        where = np.flatnonzero(mask.numpy()).tolist()
        if math.isnan(score) or len(where) < max(1, p.min_response_tokens):
            continue
        score = (score + p.reward.bias) * p.reward.gain
        if p.reward.clip is not None:
            score = min(max(score, -p.reward.clip), p.reward.clip)
        row = {"s": s, "where": where, "score": score, "cut": cut, "boot": boot}
        row["kl"] = [float(logp[t] - ref[t]) for t in where]
        row["values"], row["dense"] = [float(value[t]) for t in where], [float(dense[t]) for t in where]
        kept.append(row)
    if p.reward.scale is not RewardScale.none:
        std = np.std([r["score"] for r in kept], ddof=1)
        for r in kept:
            r["score"] /= std if std > 0 else 1
    for r in kept:
        if r["cut"] and p.truncation.reward is TruncatedReward.zero:
            r["score"] = 0.0
        if r["cut"] and p.truncation.reward is TruncatedReward.add:
            r["score"] += p.truncation.penalty
    kept = [r for r in kept if not (r["cut"] and p.truncation.mask)]
    for r in kept:
        coef = p.kl.coef if p.kl.place is KLPlace.reward else 0.0
        r["rewards"] = [d - coef * k for d, k in zip(r["dense"], r["kl"], strict=True)]
        r["rewards"][-1] += r["score"]
    if p.reward.whiten:
        pooled = np.array([x for r in kept for x in r["rewards"]])
        for r in kept:
            r["rewards"] = [(x - pooled.mean()) / math.sqrt(pooled.var() + 1e-8) + pooled.mean() for x in r["rewards"]]
    for r in kept:
        advantage, following = 0.0, r["boot"] if p.truncation.bootstrap and r["cut"] else 0.0
        r["adv"] = []
        for reward, value in zip(reversed(r["rewards"]), reversed(r["values"]), strict=True):
            advantage = reward + p.gamma * following - value + p.gamma * p.lam * advantage
            following = value
            r["adv"].insert(0, advantage)
        r["returns"] = [a + v for a, v in zip(r["adv"], r["values"], strict=True)]
    pooled = np.array([x for r in kept for x in r["adv"]])
    for r in kept:
        r["adv"] = [(x - pooled.mean()) / (pooled.std() + p.adv_norm.eps) for x in r["adv"]]
    return kept


@settings(deadline=None, max_examples=60)
@given(
    seed=st.integers(0, 10_000),
    reward=st.builds(
        RewardShaping,
        bias=st.sampled_from([0.0, -0.5]),
        gain=st.sampled_from([1.0, 3.0]),
        clip=st.sampled_from([None, 1.2]),
        scale=st.sampled_from([RewardScale.none, RewardScale.running]),
        whiten=st.booleans(),
    ),
    truncation=st.sampled_from(
        [
            Truncation(),
            Truncation(reward=TruncatedReward.zero, bootstrap=True),
            Truncation(reward=TruncatedReward.add, penalty=-1.0),
            Truncation(mask=True),
        ]
    ),
    kl=st.sampled_from([KLPenalty(), KLPenalty(KLPlace.reward, 0.3)]),
    gamma=st.sampled_from([1.0, 0.9]),
    lam=st.sampled_from([1.0, 0.95, 0.0]),
    shortest=st.sampled_from([0, 2]),
)
def test_credit_agrees_with_a_plain_reference(seed, reward, truncation, kl, gamma, lam, shortest):
    data = random_batch(seed)
    keys = [*CREDIT, "ref_logprobs", "values", "dense_rewards", "bootstrap_values"]
    interface = PPOActorInterface(
        reward=replace(reward), truncation=truncation, kl=kl, gamma=gamma, lam=lam, min_response_tokens=shortest
    )
    out = interface.credit(model(), data.select(keys), MicroBatchSpec())
    kept = credit_in_plain_python(data, interface)
    n_tokens = sum(len(r["where"]) for r in kept)
    assert int(out["loss_mask"].sum()) == n_tokens
    starts = data.lengths["input_ids"].starts
    for r in kept:
        at = [int(starts[r["s"]]) + t for t in r["where"]]
        np.testing.assert_allclose(out["returns"][at], r["returns"], rtol=0, atol=2e-5)
        if n_tokens > 1:
            np.testing.assert_allclose(out["advantages"][at], r["adv"], rtol=0, atol=1e-4)


def test_credit_by_a_call_of_the_graph_and_by_the_train_step_are_one():
    data = random_batch(3).select([*CREDIT, "ref_logprobs", "values", "bootstrap_values"])
    settings = {"kl": KLPenalty(KLPlace.reward, 0.2), "reward": RewardShaping(whiten=True), "epochs": 2}
    inside, outside = model(seed=1), model(seed=1)
    PPOActorInterface(**settings).train_step(inside, data, MicroBatchSpec())
    interface = PPOActorInterface(**settings)
    credited = data.merge(interface.credit(outside, data, MicroBatchSpec()).rename({"loss_mask": "train_mask"}))
    credited = credited.select([k for k in credited.keys if k != "loss_mask"]).rename({"train_mask": "loss_mask"})
    interface.train_step(outside, credited, MicroBatchSpec())
    assert torch.equal(inside.machine.logits_VV, outside.machine.logits_VV)


def test_trap_c4_returns_are_made_of_raw_advantages():
    data = random_batch(5).select([*CREDIT, "values"])
    whitened = PPOActorInterface().credit(model(), data, MicroBatchSpec())
    raw = PPOActorInterface(adv_norm=RAW).credit(model(), data, MicroBatchSpec())
    assert torch.equal(whitened["returns"], raw["returns"])
    mask = raw["loss_mask"]
    back = (raw["advantages"] + data["values"])[mask]
    torch.testing.assert_close(raw["returns"][mask], back.to(raw["returns"].dtype))


def test_trap_c10_the_kl_of_tokens_that_do_not_train_is_in_no_return():
    data = random_batch(5).select([*CREDIT, "ref_logprobs"])
    other = data.with_tokens(ref_logprobs=torch.where(data["loss_mask"], data["ref_logprobs"], -50.0))
    interface = PPOActorInterface(kl=KLPenalty(KLPlace.reward, 0.5))
    first, second = (interface.credit(model(), x, MicroBatchSpec()) for x in (data, other))
    assert torch.equal(first["returns"], second["returns"])


@pytest.mark.parametrize(
    ("dtype", "shaping", "want"),
    [
        (torch.bfloat16, {}, [1, 1, 1, 1.0078125]),
        (torch.bfloat16, {"bias": 100.0}, [101, 101, 101, 101.0078125]),
        (torch.bfloat16, {"scale": RewardScale.running, "center": True}, [-0.5, -0.5, -0.5, 1.5]),
        (torch.int64, {"gain": 0.5, "clip": 0.75}, [0.5, 0.5, 0.5, 0.5]),
    ],
)
def test_trap_c13_scores_of_low_precision_are_shaped_in_fp32(dtype, shaping, want):
    data = SequenceSample.from_sequences(["a"], {"input_ids": [[[1, 2]] * 4]})
    data = data.with_tokens(loss_mask=torch.tensor([False, True] * 4), logprobs=torch.zeros(8))
    data = data.with_sequences(rewards=torch.tensor([1, 1, 1, 1.0078125]).to(dtype))
    interface = PPOActorInterface(adv_norm=RAW, reward=RewardShaping(**shaping))
    credit = interface.credit(model(), data, MicroBatchSpec())
    assert credit["advantages"].dtype == torch.float32
    assert credit["advantages"][credit["loss_mask"]].tolist() == pytest.approx(want, abs=1e-5)


GROUP = Normalization(Scope.group, Scope.group)


@pytest.mark.parametrize(
    "interface",
    [
        GRPOActorInterface(),
        GRPOActorInterface(adv_norm=Normalization(Scope.group, Scope.batch, leave_one_out=True)),
        GRPOActorInterface(adv_norm=replace(GROUP, level=Level.token)),
        PPOActorInterface(generation=GenerationConfig(n=4), reward_norm=Normalization(Scope.group, Scope.none)),
        PPOActorInterface(reward_norm=GROUP, adv_norm=RAW, keep_best=2, generation=GenerationConfig(n=4)),
        PPOActorInterface(reward=RewardShaping(scale=RewardScale.running, center=True, whiten=True)),
    ],
    ids=range(6),
)
@pytest.mark.parametrize("seed", range(2))
def test_trap_e7_an_answer_has_the_same_advantages_on_whatever_rank_and_in_whatever_order(interface, seed):
    data = random_batch(seed, n_prompts=7).select(CREDIT)
    order = np.random.default_rng(seed).permutation(len(data)).tolist()

    def advantages(rows, reduce=lambda x: x):
        engine = BigramEngine()
        engine.reduce = reduce
        one, own = Model("actor", engine), deepcopy(interface)  # it may keep moments
        return own.compute_advantages(one, own.prepare(one, data.take(rows)))["advantages"]

    ranks = over_ranks([order[:3], order[3:]], advantages)
    torch.testing.assert_close(ranks, advantages(order), rtol=0, atol=1e-6)
    alone = dict(zip(data.ids, per_prompt(data, advantages(range(len(data)))), strict=True))
    for i, moved in zip(data.take(order).ids, per_prompt(data.take(order), ranks), strict=True):
        torch.testing.assert_close(moved, alone[i], rtol=0, atol=1e-6)
    for part in data.minibatches(3, np.random.default_rng(seed)):  # a group is never dealt out
        for i, ids in zip(part.ids, per_prompt(part, part["input_ids"]), strict=True):
            assert torch.equal(ids, data.take([data.ids.index(i)])["input_ids"])


def per_prompt(data: SequenceSample, x_T: torch.Tensor) -> list[torch.Tensor]:
    """The values of `x_T` [T], prompt by prompt."""
    return list(x_T.split(data.lengths["input_ids"].per_prompt.tolist()))


def two_prompts(**sequence_keys) -> SequenceSample:
    """One prompt token each, and responses of 1, 2 and 3 tokens to the first prompt, of 2 and 2 to the second."""
    ids = [[[1, 2], [1, 2, 3], [1, 2, 3, 4]], [[1, 5, 6], [1, 6, 5]]]
    data = SequenceSample.from_sequences(["a", "b"], {"input_ids": ids})
    mask = torch.cat([torch.arange(len(x)) > 0 for x in data.sequences("input_ids")])
    data = data.with_tokens(loss_mask=mask, logprobs=torch.full((len(mask),), -2.0))
    return data.with_sequences(**{k: torch.tensor(v) for k, v in sequence_keys.items()})


def training(interface: PPOActorInterface, data: SequenceSample) -> list[bool]:
    return [bool(m.any()) for m in interface.prepare(model(), data).sequences("loss_mask")]


def test_too_short_answers_leave_the_loss():
    data = two_prompts(rewards=[1.0, 2, 3, 4, 5], truncated=[False] * 5)
    assert training(PPOActorInterface(min_response_tokens=2), data) == [False, True, True, True, True]
    assert training(PPOActorInterface(min_response_tokens=3), data) == [False, False, True, False, False]


def test_of_several_responses_only_the_best_train():
    data = two_prompts(rewards=[1.0, 3, 2, math.nan, 5], truncated=[False] * 5)
    interface = PPOActorInterface(keep_best=1, generation=GenerationConfig(n=3))
    assert training(interface, data) == [False, True, False, False, True]


def test_masked_truncation_leaves_loss_and_divisor():
    data = two_prompts(rewards=[1.0, 2, 3, 4, 5], truncated=[True, False, False, True, False])
    interface = PPOActorInterface(truncation=Truncation(mask=True))
    assert training(interface, data) == [False, True, True, False, True]
    assert float(interface.loss_weight(interface.prepare(model(), data))) == 2 + 3 + 2


def test_the_reward_of_a_greedy_answer_is_the_baseline():
    data = two_prompts(rewards=[1.0, 3, 2, 4, 5], truncated=[False] * 5)
    baseline = SequenceSample.from_sequences(["a", "b"], {"greedy": [[[1]], [[1]]]})
    baseline = baseline.with_data({"baseline_rewards": torch.tensor([2.0, math.nan])}, like="greedy")
    data = data.merge(baseline.select(["baseline_rewards"]))
    interface = PPOActorInterface(lam=1.0, adv_norm=RAW, reward=RewardShaping(gain=10.0))
    out = interface.credit(model(), data, MicroBatchSpec())
    assert out["advantages"].tolist() == [0, -10, 0, 10, 10, 0, 0, 0, 0, *[0] * 6]
    assert not out["loss_mask"][9:].any()  # without a baseline there is nothing to be better than


def test_reinforce_plus_plus_baseline_is_a_group_mean_and_then_whitening_over_all_tokens():
    data = two_prompts(rewards=[1.0, 3, 2, 4, 5], truncated=[False] * 5)
    interface = PPOActorInterface(
        generation=GenerationConfig(n=4),
        lam=1.0,
        reward_norm=Normalization(Scope.group, Scope.none),
        adv_norm=Normalization(level=Level.token, eps=0.0),
    )
    out = interface.credit(model(), data, MicroBatchSpec())
    centred = np.repeat([-1.0, 1, 0, -0.5, 0.5], [1, 2, 3, 2, 2])
    want = (centred - centred.mean()) / centred.std()
    np.testing.assert_allclose(out["advantages"][out["loss_mask"]], want, rtol=0, atol=1e-6)


def test_whitening_by_minibatch_uses_its_statistics():
    data = random_batch(7).select(CREDIT)
    seen: list[SequenceSample] = []

    class Watching(BigramEngine):
        def train_batch(self, data, *rest):
            seen.append(data)
            return super().train_batch(data, *rest)

    interface = PPOActorInterface(n_minibatches=2, credit_per_minibatch=True)
    interface.train_step(Model("actor", Watching()), data, MicroBatchSpec())
    for part in seen:
        values = part["advantages"][part["loss_mask"]]
        assert float(values.mean()) == pytest.approx(0, abs=1e-6)
        assert float(values.std(correction=0)) == pytest.approx(1, abs=1e-5)
    one, whole = model(), model()
    PPOActorInterface(credit_per_minibatch=True).train_step(one, data, MicroBatchSpec())
    PPOActorInterface().train_step(whole, data, MicroBatchSpec())
    torch.testing.assert_close(one.machine.logits_VV, whole.machine.logits_VV, rtol=0, atol=1e-7)


def test_early_stop_takes_back_the_step_that_went_too_far_and_ends_the_batch():
    data = random_batch(3).select(CREDIT)
    scored = PPOActorInterface().inference(model(lr=3.0), data.select(["input_ids", "loss_mask"]), MicroBatchSpec())
    data = data.with_tokens(logprobs=scored["logprobs"])  # on-policy: the first mini-batch has no KL at all
    bounded, once = model(lr=3.0), model(lr=3.0)
    stats = stat_values(
        PPOActorInterface(epochs=4, early_stop=EarlyStop(kl=1e-3)).train_step(bounded, data, MicroBatchSpec())
    )
    PPOActorInterface().train_step(once, data, MicroBatchSpec())
    assert stats["early_stopped"] == 1
    assert stats["optimizer_steps"] == 1
    assert torch.equal(bounded.machine.logits_VV, once.machine.logits_VV)
    loose = stat_values(
        PPOActorInterface(epochs=2, early_stop=EarlyStop(kl=1e3, ratio=1e3)).train_step(
            model(lr=3.0), data, MicroBatchSpec()
        )
    )
    assert loose["early_stopped"] == 0
    assert loose["optimizer_steps"] == 2


def test_during_the_warm_up_of_the_critic_the_actor_stays_as_it_is():
    data = random_batch(3).select([*CREDIT, "ref_logprobs"])
    interface = PPOActorInterface(critic_warmup_steps=2, kl=KLPenalty(KLPlace.reward, 0.2, target=0.1, horizon=10))
    actor = model()
    before = actor.machine.logits_VV.clone()
    for version in range(3):
        actor.version = version
        stats = stat_values(interface.train_step(actor, data, MicroBatchSpec()))
        assert torch.equal(before, actor.machine.logits_VV) == (version < 2)
        assert (interface.kl_controller.value == 0.2) == (version < 2)
        assert "advantage_mean" in stats


def test_the_loss_of_values_is_added_with_its_weight():
    data = random_batch(3).select([*CREDIT, "values", "bootstrap_values"])
    plain, joint = model(seed=5, lr=1.0), model(seed=5, lr=1.0)
    PPOActorInterface().train_step(plain, data, MicroBatchSpec())
    interface = PPOActorInterface(value=ValueObjective(clip=None, coef=0.1))
    interface.train_step(joint, data, MicroBatchSpec(n_microbatches=3))
    torch.testing.assert_close(plain.machine.logits_VV, joint.machine.logits_VV, rtol=0, atol=1e-12)
    credited = PPOActorInterface().credit(model(), data, MicroBatchSpec())
    table = BigramEngine(seed=5).values_V.numpy()
    want, n = np.zeros_like(table), 0
    rows = zip(data.sequences("input_ids"), *(credited.sequences(k) for k in ("loss_mask", "returns")), strict=True)
    for ids, mask, returns in rows:
        for t in np.flatnonzero(mask.numpy()):
            want[ids[t - 1]] += table[ids[t - 1]] - float(returns[t])
            n += 1
    np.testing.assert_allclose(table - joint.machine.values_V.numpy(), 0.1 * want / n, rtol=0, atol=1e-7)


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"keep_best": 2}, "keep_best must be from 1 to generation.n=1"),
        ({"min_response_tokens": 300}, "min_response_tokens must be from 0 to generation.max_new_tokens=256"),
        ({"tau_pos": 0.0}, "tau_pos must be positive"),
        ({"critic_warmup_steps": -1}, "critic_warmup_steps must be at least 0"),
        ({"critic_warmup_steps": 5, "value": ValueObjective()}, "critic_warmup_steps=5 .* would wait too"),
        ({"ptx_coef": -1.0}, "ptx_coef must be at least 0"),
        ({"truncation": Truncation(overlong_buffer=300)}, "is longer than a response can be"),
        ({"objective": PolicyObjective.sapo, "dual_clip": 3.0}, "dual_clip"),
    ],
)
def test_settings_that_cannot_work_are_refused(kwargs, message):
    with pytest.raises(ValueError, match=message):
        PPOActorInterface(**kwargs)


def test_bounds_are_checked():
    with pytest.raises(ValueError, match=r"early_stop\.kl must be positive"):
        EarlyStop(kl=0)
    with pytest.raises(ValueError, match=r"early_stop\.ratio must be above 1"):
        EarlyStop(ratio=0.5)


def check(interface: PPOActorInterface, **flags) -> None:
    """What the launch does: compare the keys of the actor with the graph."""
    roles = ("actor", "reward", "ref", "critic", "baseline")
    check_keys(dataflow(**flags), {role: ModelInterface() for role in roles} | {"actor": interface})


@pytest.mark.parametrize(
    ("setting", "flags", "message"),
    [
        ({"credit_per_minibatch": True}, {"critic": "own"}, "credit_per_minibatch assigns credit in train_step"),
        ({"value": ValueObjective()}, {"critic": "own"}, "with graph.critic=own the critic learns them"),
        ({}, {"critic": "shared"}, "input 'values', .* no component"),
        ({"critic_warmup_steps": 1}, {}, "critic_warmup_steps needs key 'advantages'"),
        ({"critic_warmup_steps": 1, "value": None}, {"critic": "shared"}, "critic_warmup_steps needs key 'advantages'"),
        ({}, {"ptx": True}, "input 'ptx_input_ids', .* no component"),
        ({"reward": RewardShaping(clip=1.0)}, {"dense": True}, "input 'dense_rewards', .* no component"),
        ({"reward_norm": Normalization(Scope.batch, Scope.none)}, {"dense": True}, "input 'dense_rewards'"),
        (
            {"truncation": Truncation(reward=TruncatedReward.zero)},
            {"greedy_baseline": True},
            "input 'baseline_rewards'",
        ),
    ],
)
def test_settings_that_do_no_good_in_a_graph_are_refused(setting, flags, message):
    with pytest.raises(ValueError, match=message):
        check(PPOActorInterface(**setting), **flags)


def test_settings_that_do_good_in_a_graph_pass():
    check(PPOActorInterface(critic_warmup_steps=1, keep_best=1), critic="own", dense=True, kl=True, recompute=True)
    check(PPOActorInterface(value=ValueObjective(), credit_per_minibatch=True), critic="shared")
    check(PPOActorInterface(ptx_coef=1.0, truncation=Truncation(mask=True)), ptx=True, greedy_baseline=True)


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"adv_norm": Normalization(Scope.batch, Scope.batch)}, "adv_norm.level=sequence"),
        ({"reward_norm": Normalization(Scope.group, Scope.none, level=Level.token)}, "reward_norm.level=token"),
    ],
)
def test_a_level_at_which_nothing_is_normalised_is_refused(setting, message):
    with pytest.raises(ValueError, match=message):
        PPOActorInterface(**setting)


def test_the_best_of_dense_rewards_are_those_with_the_largest_sums():
    data = two_prompts(rewards=[0.0] * 5, truncated=[False] * 5)
    dense = torch.tensor([9.0, 1, 9, 1, 1, 9, 1, 1, 1, 9, 3, 0, 9, 2, 2])  # those of prompts do not count
    data = data.with_tokens(dense_rewards=dense)
    interface = PPOActorInterface(keep_best=1, generation=GenerationConfig(n=3))
    assert training(interface, data) == [False, False, True, False, True]


def test_what_a_setting_needs_of_the_graph():
    interface = PPOActorInterface(
        kl=KLPenalty(KLPlace.loss, estimator=KLEstimator.k2),
        truncation=Truncation(bootstrap=True),
        value=ValueObjective(),
        ptx_coef=1.0,
    )
    needed = {"ref_logprobs", "truncated", "bootstrap_values", "values"}
    always = {"input_ids", "loss_mask"}
    assert replace(interface, value=None).keys("credit").needs.keys() == always | needed - {"values"}
    assert interface.keys("train_step").needs.keys() == always | needed | {"ptx_input_ids"}
    assert interface.keys("inference").needs.keys() == always


def test_the_launch_table_says_what_is_done_beside_plain_ppo():
    plain = PPOActorInterface().describe(8)
    assert plain["credit"] == "GAE, gamma 1, lambda 0.95"
    assert plain["KL to reference"] == "not applied"
    table = PPOActorInterface(
        generation=GenerationConfig(n=4),
        kl=KLPenalty(KLPlace.reward, 0.15, target=6.0),
        reward=RewardShaping(bias=-1.0, gain=2.0, clip=5.0, scale=RewardScale.running, center=True, whiten=True),
        truncation=Truncation(TruncatedReward.add, penalty=-1.0, bootstrap=True, overlong_buffer=16),
        reward_norm=Normalization(Scope.group, Scope.none),
        credit_per_minibatch=True,
        min_response_tokens=2,
        keep_best=1,
        entropy_coef=0.01,
        ptx_coef=27.8,
        early_stop=EarlyStop(kl=0.1, ratio=5.0),
        critic_warmup_steps=50,
    ).describe(8)
    assert {name: value for name, value in table.items() if plain.get(name) != value} == {
        "KL to reference": "in the reward, k1, coefficient 0.15 at first, steered to 6 nats per sequence over 10,000 "
        "sequences",
        "advantage normalisation": plain["advantage normalisation"] + " of each mini-batch",
        "scores": "2 (R - 1), clipped at 5, centred and divided by the std of all scores so far, rewards of tokens "
        "divided by their std",
        "truncated responses": "score lowered by 1, followed by the critic's value, up to 1 less over the last 16 "
        "tokens",
        "score normalisation": "R - mean(group) per sequence",
        "responses in the loss": "the 1 of 4 per prompt with the highest scores, those of at least 2 tokens",
        "entropy bonus": "coefficient 0.01",
        "pretraining loss": "coefficient 27.8",
        "early stop": "approx_kl above 0.1 or ratio_mean above 5",
    }
    assert PPOActorInterface(value=ValueObjective(coef=0.1)).describe(8)["value loss"] == (
        "mse, clipped at 0.2 from the old value, coefficient 0.1"
    )
    assert Truncation(TruncatedReward.set, penalty=-1.0).describe() == "score set to -1"
    assert Truncation(mask=True).describe() == "not in the loss"
    assert GRPOActorInterface().describe(8)["credit"] == "each token that of its response"
