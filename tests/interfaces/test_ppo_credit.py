"""Compare PPO's advantage estimation with a reference in plain Python, and test which mini-batches are trained."""

from __future__ import annotations

import math
from copy import deepcopy

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from realign.api import GenerationConfig, MicroBatchSpec, Model, SequenceSample, stat_values
from realign.functional import Scope
from realign.interfaces.components import (
    GAE,
    EarlyStop,
    GroupRelative,
    KLPenalty,
    KLPlace,
    Normalization,
    Reinforce,
    RewardScale,
    RewardShaping,
    TruncatedReward,
    Truncation,
)
from realign.interfaces.grpo import GRPOActorInterface
from realign.interfaces.ppo import PPOActorInterface
from realign.testing import BigramEngine, random_batch
from tests.formulas import over_ranks

RAW = Normalization(Scope.none, Scope.none)
CREDIT = ["input_ids", "loss_mask", "logprobs", "rewards", "truncated"]


def model(**engine) -> Model:
    return Model("actor", BigramEngine(**engine))


def credit_in_plain_python(data: SequenceSample, p: PPOActorInterface) -> list[dict]:
    """Compute advantages and returns of each trained sequence from the definitions, for a single process."""
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
    if p.advantage.whiten_rewards:
        pooled = np.array([x for r in kept for x in r["rewards"]])
        for r in kept:
            r["rewards"] = [(x - pooled.mean()) / math.sqrt(pooled.var() + 1e-8) + pooled.mean() for x in r["rewards"]]
    for r in kept:
        advantage, following = 0.0, r["boot"] if p.advantage.bootstrap and r["cut"] else 0.0
        r["adv"] = []
        for reward, value in zip(reversed(r["rewards"]), reversed(r["values"]), strict=True):
            advantage = reward + p.advantage.gamma * following - value + p.advantage.gamma * p.advantage.lam * advantage
            following = value
            r["adv"].insert(0, advantage)
        r["returns"] = [a + v for a, v in zip(r["adv"], r["values"], strict=True)]
    pooled = np.array([x for r in kept for x in r["adv"]])
    for r in kept:
        r["adv"] = [(x - pooled.mean()) / (pooled.std() + p.adv_norm.eps) for x in r["adv"]]
    return kept


@given(
    seed=st.integers(0, 10_000),
    reward=st.builds(
        RewardShaping,
        bias=st.sampled_from([0.0, -0.5]),
        gain=st.sampled_from([1.0, 3.0]),
        clip=st.sampled_from([None, 1.2]),
        scale=st.sampled_from([RewardScale.none, RewardScale.running]),
    ),
    truncation=st.sampled_from(
        [
            Truncation(),
            Truncation(reward=TruncatedReward.zero),
            Truncation(reward=TruncatedReward.add, penalty=-1.0),
            Truncation(mask=True),
        ]
    ),
    kl=st.sampled_from([KLPenalty(), KLPenalty(KLPlace.reward, 0.3)]),
    advantage=st.builds(
        GAE,
        gamma=st.sampled_from([1.0, 0.9]),
        lam=st.sampled_from([1.0, 0.95, 0.0]),
        whiten_rewards=st.booleans(),
        bootstrap=st.booleans(),
    ),
    shortest=st.sampled_from([0, 2]),
)
def test_credit_agrees_with_a_plain_reference(seed, reward, truncation, kl, advantage, shortest):
    data = random_batch(seed)
    keys = [*CREDIT, "ref_logprobs", "values", "dense_rewards", "bootstrap_values"]
    interface = PPOActorInterface(
        reward=reward, truncation=truncation, kl=kl, advantage=advantage, min_response_tokens=shortest
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
    settings = {"kl": KLPenalty(KLPlace.reward, 0.2), "advantage": GAE(whiten_rewards=True), "epochs": 2}
    inside, outside = model(seed=1), model(seed=1)
    PPOActorInterface(**settings).train_step(inside, data, MicroBatchSpec())
    interface = PPOActorInterface(**settings)
    credited = data.merge(interface.credit(outside, data, MicroBatchSpec()).rename({"loss_mask": "train_mask"}))
    credited = credited.select([k for k in credited.keys if k != "loss_mask"]).rename({"train_mask": "loss_mask"})
    interface.train_step(outside, credited, MicroBatchSpec())
    assert torch.equal(inside.engine.logits_VV, outside.engine.logits_VV)


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
CENTERED = Normalization(Scope.group, Scope.none)


@pytest.mark.parametrize(
    "interface",
    [
        GRPOActorInterface(),
        GRPOActorInterface(adv_norm=Normalization(Scope.group, Scope.batch, leave_one_out=True)),
        GRPOActorInterface(advantage=GroupRelative(length_weighted=True)),
        PPOActorInterface(generation=GenerationConfig(n=4), advantage=GAE(reward_norm=CENTERED)),
        PPOActorInterface(
            advantage=GAE(reward_norm=GROUP), adv_norm=RAW, keep_best=2, generation=GenerationConfig(n=4)
        ),
        PPOActorInterface(
            reward=RewardShaping(scale=RewardScale.running, center=True), advantage=GAE(whiten_rewards=True)
        ),
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
        one, own = Model("actor", engine), deepcopy(interface)  # the interface may store moments
        return own.estimate_advantages(one, own.score(one, data.take(rows)))["advantages"]

    ranks = over_ranks([order[:3], order[3:]], advantages)
    torch.testing.assert_close(ranks, advantages(order), rtol=0, atol=1e-6)
    alone = dict(zip(data.ids, per_prompt(data, advantages(range(len(data)))), strict=True))
    for i, moved in zip(data.take(order).ids, per_prompt(data.take(order), ranks), strict=True):
        torch.testing.assert_close(moved, alone[i], rtol=0, atol=1e-6)
    for part in data.minibatches(3, np.random.default_rng(seed)):  # mini-batches never split a group
        for i, ids in zip(part.ids, per_prompt(part, part["input_ids"]), strict=True):
            assert torch.equal(ids, data.take([data.ids.index(i)])["input_ids"])


def per_prompt(data: SequenceSample, x_T: torch.Tensor) -> list[torch.Tensor]:
    """Return the values of `x_T` [T] by prompt."""
    return list(x_T.split(data.lengths["input_ids"].per_prompt.tolist()))


def two_prompts(**sequence_keys) -> SequenceSample:
    """Return two prompts of one token, with responses of 1, 2 and 3 tokens to the first, and of 2 and 2 to the
    second."""
    ids = [[[1, 2], [1, 2, 3], [1, 2, 3, 4]], [[1, 5, 6], [1, 6, 5]]]
    data = SequenceSample.from_sequences(["a", "b"], {"input_ids": ids})
    mask = torch.cat([torch.arange(len(x)) > 0 for x in data.sequences("input_ids")])
    data = data.with_tokens(loss_mask=mask, logprobs=torch.full((len(mask),), -2.0))
    return data.with_sequences(**{k: torch.tensor(v) for k, v in sequence_keys.items()})


def test_end_tokens_that_do_not_train_get_credit_but_no_loss():
    """Token 6 ends the last response of `two_prompts` but one, and stands inside the last one."""
    data = two_prompts(rewards=[1.0, 2, 3, 4, 5], truncated=[True, True, True, False, True])
    stops = GenerationConfig(stop_token_ids=[6])
    settings = {"generation": stops, "advantage": GAE(lam=0.9), "adv_norm": RAW, "objective": Reinforce()}
    plain, without = (PPOActorInterface(train_end_token=trained, **settings) for trained in (True, False))
    credit, expected = (p.credit(model(), data, MicroBatchSpec()) for p in (without, plain))
    torch.testing.assert_close(credit["advantages"], expected["advantages"])
    torch.testing.assert_close(credit["returns"], expected["returns"])
    assert torch.equal(credit["loss_mask"], expected["loss_mask"] & (data["input_ids"] != 6))
    assert credit["advantages"][data["input_ids"] == 6].all()
    kept = []
    for interface in (plain, without):
        actor = model()
        before = actor.engine.logits_VV.clone()
        interface.train_step(actor, data, MicroBatchSpec())
        kept.append(torch.equal(actor.engine.logits_VV[5], before[5]))  # 5 -> 6, which only the fourth response has
    assert kept == [False, True]


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
    torch.testing.assert_close(one.engine.logits_VV, whole.engine.logits_VV, rtol=0, atol=1e-7)


def scopes_in_plain_python(raw: list[np.ndarray], groups: list[int], norm: Normalization) -> list[list[float]]:
    """Advantages of tokens, response by response, after `norm`; the tokens of a group are those of its responses."""

    def pool(scope: Scope, s: int) -> np.ndarray:
        return np.concatenate([x for x, g in zip(raw, groups, strict=True) if scope is Scope.batch or g == groups[s]])

    normalized = []
    for s, mine in enumerate(raw):
        centered = mine - (0.0 if norm.mean is Scope.none else pool(norm.mean, s).mean())
        std = 1.0 if norm.std is Scope.none else pool(norm.std, s).std() + norm.eps
        normalized.append((centered / std).tolist())
    return normalized


@pytest.mark.parametrize("std", Scope)
@pytest.mark.parametrize("mean", Scope)
@pytest.mark.parametrize("per_minibatch", [False, True])
def test_advantages_of_tokens_are_normalized_within_their_groups_or_over_the_batch(mean, std, per_minibatch):
    data = two_prompts(rewards=[1.0, -3, 2, 7, 5], truncated=[False] * 5)
    data = data.with_tokens(values=torch.linspace(-1, 1, int(data.cu_seqlens()[-1])))
    groups, norm = [0, 0, 0, 1, 1], Normalization(mean, std, eps=1e-3)

    def credited(norm):
        actor = PPOActorInterface(
            generation=GenerationConfig(n=3),
            advantage=GAE(gamma=0.9, lam=0.7),
            adv_norm=norm,
            credit_per_minibatch=per_minibatch,
        )
        out = actor.estimate_advantages(model(), actor.score(model(), data))
        rows = zip(*(out.sequences(k) for k in ("advantages", "loss_mask")), strict=True)
        return [advantages[mask].double().numpy() for advantages, mask in rows]

    raw = credited(RAW)
    assert all(len(set(x.tolist())) == len(x) for x in raw)  # every token of a response has its own advantage
    want = scopes_in_plain_python(raw, groups, norm)
    for advantages_T, expected in zip(credited(norm), want, strict=True):
        np.testing.assert_allclose(advantages_T, expected, rtol=0, atol=1e-5)
    if Scope.group in (mean, std):  # one group for all would be another result
        assert want != scopes_in_plain_python(raw, [0] * 5, norm)


def test_early_stop_takes_back_the_step_that_went_too_far_and_ends_the_batch():
    data = random_batch(3).select(CREDIT)
    scored = PPOActorInterface().inference(model(lr=3.0), data.select(["input_ids", "loss_mask"]), MicroBatchSpec())
    data = data.with_tokens(logprobs=scored["logprobs"])  # on-policy: the first mini-batch has a KL of 0
    bounded, once = model(lr=3.0), model(lr=3.0)
    stats = stat_values(
        PPOActorInterface(epochs=4, early_stop=EarlyStop(kl=1e-3)).train_step(bounded, data, MicroBatchSpec())
    )
    PPOActorInterface().train_step(once, data, MicroBatchSpec())
    assert stats["early_stopped"] == 1
    assert stats["optimizer_steps"] == 1
    assert torch.equal(bounded.engine.logits_VV, once.engine.logits_VV)
    loose = stat_values(
        PPOActorInterface(epochs=2, early_stop=EarlyStop(kl=1e3, ratio=1e3)).train_step(
            model(lr=3.0), data, MicroBatchSpec()
        )
    )
    assert loose["early_stopped"] == 0
    assert loose["optimizer_steps"] == 2


def test_during_the_warm_up_of_the_critic_the_actor_stays_as_it_is():
    data = random_batch(3).select([*CREDIT, "ref_logprobs"])
    interface = PPOActorInterface(
        critic="own", critic_warmup_steps=2, kl=KLPenalty(KLPlace.reward, 0.2, target=0.1, horizon=10)
    )
    actor = model()
    before = actor.engine.logits_VV.clone()
    for version in range(3):
        actor.version = version
        stats = stat_values(interface.train_step(actor, data, MicroBatchSpec()))
        assert torch.equal(before, actor.engine.logits_VV) == (version < 2)
        assert (interface.kl_control.controller.value == 0.2) == (version < 2)
        assert "advantage_mean" in stats


def test_with_a_critic_of_its_own_the_actor_trains_on_advantages_of_the_graph():
    train = PPOActorInterface(critic="own").keys("train_step")
    assert {key for key, why in train.needs.items() if why == "critic=own"} == {
        "values",
        "advantages",
        "returns",
        "loss_mask",
    }
