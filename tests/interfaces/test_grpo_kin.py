"""Compare complete updates of GRPO and its shipped variants (`algorithm=NAME`) with references in plain numpy.

A reference applies the formula of its algorithm one response at a time, in float64. It returns the loss as a function
of
the policy. Its gradient is computed by central differences, so the reference shares only the formula with the
package.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import pytest
import torch

from realign.api import MicroBatchSpec, Model, SequenceSample, stat_values
from realign.config import build_experiment, compose
from realign.config.files import list_algorithms
from realign.engines import SharedModel
from realign.interfaces.greedy import GreedyInterface
from realign.interfaces.reference import ReferenceInterface
from realign.runtime.local import LocalRuntime
from realign.testing import BigramEngine, random_batch
from realign.testing.batches import with_own_keys
from tests.config_parts import PREFERENCE
from tests.toys import BigramModel, CountToken, Prompts, experiment

LIMIT, BUFFER, VOCABULARY = 8, 3, 5
NEEDS = {
    "dapo": [f"interfaces.actor.truncation.overlong_buffer={BUFFER}"],
    "gdpo": [
        "interfaces.reward.function=null",
        "interfaces.reward.functions={a: 'own.py:a', b: 'own.py:b'}",
        "interfaces.actor.advantage.weights={a: 1, b: 0.5}",
    ],
}


@functools.cache
def shipped(name: str, *overrides: str):
    return build_experiment(
        compose(["experiment=grpo_arithmetic", f"algorithm={name}", *NEEDS.get(name, []), *overrides])
    )


@dataclass
class Response:
    """One response: its sampled tokens, the token before each of them, and the inputs of advantage estimation."""

    group: int
    before: np.ndarray
    tokens: np.ndarray
    old: np.ndarray
    ref: np.ndarray
    reward: float
    baseline: float
    named: dict[str, float]
    """Rewards by name, with the factor of each."""

    def __len__(self) -> int:
        return len(self.tokens)

    def logprobs(self, table: np.ndarray) -> np.ndarray:
        logp = table - np.log(np.exp(table).sum(1, keepdims=True))
        return logp[self.before, self.tokens]


def responses(data: SequenceSample) -> list[Response]:
    """Return the responses with a reward and at least one trained token."""
    keys = ("input_ids", "loss_mask", "logprobs", "ref_logprobs")
    named = [{"a": a, "b": b} for a, b in zip(*(data[f"rewards/{name}"].tolist() for name in "ab"), strict=True)]
    rows = zip(data.group_index().tolist(), data["rewards"].tolist(), named, *map(data.sequences, keys), strict=True)
    made = []
    for group, reward, several, ids, mask, old, ref in rows:
        at = np.flatnonzero(mask)
        baseline = float(data["baseline_rewards"][group])
        arrays = (np.asarray(x) for x in (ids[at - 1], ids[at], old[at], ref[at]))
        made.append(Response(group, *arrays, reward, baseline, several))
    return [r for r in made if len(r) and np.isfinite(r.reward)]


Credit = list[np.ndarray]


def compared(formula: Callable[[np.ndarray, np.ndarray], np.ndarray]):
    """Return an estimator that applies `formula(rewards, lengths)` to each group, for all tokens of a response."""

    def credit(batch: list[Response], scores: list[float] | None = None) -> Credit:
        scores = [r.reward for r in batch] if scores is None else scores
        out: list[np.ndarray] = [np.zeros(0)] * len(batch)
        for group in {r.group for r in batch}:
            members = [i for i, r in enumerate(batch) if r.group == group]
            advantages = formula(np.array([scores[i] for i in members]), np.array([len(batch[i]) for i in members]))
            for i, advantage in zip(members, advantages, strict=True):
                out[i] = np.full(len(batch[i]), advantage)
        return out

    return credit


def over_deviation(r: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    return np.zeros(len(r)) if np.ptp(r) == 0 else (r - r.mean()) / (r.std(ddof=1) + 1e-6)


less_mean = compared(lambda r, lengths: r - r.mean())
standardized = compared(over_deviation)


def less_the_others(batch):
    scores = [r.reward - 0.05 * (r.old - r.ref).sum() for r in batch]
    return compared(lambda s, lengths: np.array([s[i] - np.delete(s, i).mean() for i in range(len(s))]))(batch, scores)


def less_mean_over_batch_deviation(batch):
    deviation = np.std([r.reward for r in batch], ddof=1) + 1e-4
    return [a / deviation for a in less_mean(batch)]


def less_mean_by_length(batch):
    return compared(lambda r, lengths: r - (lengths * r).sum() / lengths.sum())(batch)


def less_mean_rescaled(batch):
    groups = [[r.reward for r in batch if r.group == g] for g in {r.group for r in batch}]
    constant = sum(len(rewards) for rewards in groups if np.ptp(rewards) == 0)
    return [a * len(batch) / (len(batch) - constant) for a in less_mean(batch)]


def with_penalty_on_length(batch):
    past = [max(0, len(r) - (LIMIT - BUFFER)) for r in batch]
    return standardized(batch, [r.reward - p / BUFFER for r, p in zip(batch, past, strict=True)])


def sum_of_standardized(batch):
    parts = [(weight, standardized(batch, [r.named[name] for r in batch])) for name, weight in (("a", 1), ("b", 0.5))]
    x = np.array([sum(weight * credit[i][0] for weight, credit in parts) for i in range(len(batch))])
    return [np.full(len(r), a) for r, a in zip(batch, (x - x.mean()) / (x.std(ddof=1) + 1e-6), strict=True)]


def relative_to_mean(batch):
    return compared(lambda r, lengths: (r - r.mean()) / r.mean() if r.any() else 0 * r)(batch)


def whitened(credit: Credit) -> Credit:
    x = np.concatenate(credit)
    return [(a - x.mean()) / np.sqrt(x.var(ddof=1) + 1e-8) for a in credit]


def returns(batch, coef: float, baseline: bool = False) -> Credit:
    """Return the remaining reward at each token, minus `coef` times the KL at this and all later tokens."""
    kl = [np.cumsum((r.old - r.ref)[::-1])[::-1] for r in batch]
    return [r.reward - baseline * r.baseline - coef * k for r, k in zip(batch, kl, strict=True)]


def clipped(low: float, high: float):
    return lambda a, logp, r, _: -np.minimum(a * r, a * np.clip(r, 1 - low, 1 + high))


def policy_gradient(a, logp, r, start):
    return -a * logp


def weighted(a, logp, r, start):
    return -np.minimum(start, 5.0) * a * logp  # the weight is a constant for the gradient


def sequence_clipped(a, logp, r, start):
    s = np.exp(np.log(r).mean())
    return -np.minimum(a * s, a * np.clip(s, 1 - 3e-4, 1 + 4e-4))


def gated(a, logp, r, start):
    tau = np.where(a > 0, 1.0, 1.05)
    return -a * 4 / tau / (1 + np.exp(-tau * (r - 1)))


def geometric(a, logp, r, start):
    log = np.where(a > 0, np.minimum(np.log(r), 0.4), np.maximum(np.log(r), -0.4))
    return -a * np.exp(log.mean())


def within_the_region(a, logp, r, start):
    moved = np.exp(logp) - np.exp(logp) / r
    return np.where((a > 0) & (moved > 0.15) | (a < 0) & (moved < -0.15), 0, -a * r)


def over_tokens(losses):
    return np.concatenate(losses).mean()


def over_sequences(losses):
    return np.mean([x.mean() for x in losses])


def sums(losses):
    return np.mean([x.sum() for x in losses])


def constant(losses):
    return sums(losses) / LIMIT


class Formula(NamedTuple):
    credit: Callable[[list[Response]], Credit]
    objective: Callable[..., np.ndarray]
    aggregate: Callable[[list[np.ndarray]], float]
    penalty: Callable[[np.ndarray, np.ndarray], np.ndarray] | None = None
    groups: bool = True
    """Whether responses without a sibling are excluded."""


PPO = clipped(0.2, 0.2)
FORMULAS = {
    "grpo": Formula(standardized, PPO, over_sequences, lambda x, ref: 0.04 * (np.exp(ref - x) - (ref - x) - 1)),
    "dr_grpo": Formula(less_mean, PPO, constant),
    "rloo": Formula(less_the_others, policy_gradient, sums),
    "reinforce_plus_plus": Formula(lambda b: whitened(returns(b, 0.01)), PPO, over_tokens, groups=False),
    "reinforce_plus_plus_baseline": Formula(
        lambda b: whitened(less_mean(b)), PPO, over_tokens, lambda x, ref: 1e-5 / 2 * (x - ref) ** 2, groups=False
    ),
    "remax": Formula(lambda b: returns(b, 0.05, baseline=True), policy_gradient, sums, groups=False),
    "lite_ppo": Formula(less_mean_over_batch_deviation, PPO, over_tokens),
    "opo": Formula(less_mean_by_length, policy_gradient, sums),
    "gpg": Formula(less_mean_rescaled, policy_gradient, over_tokens),
    "dapo": Formula(with_penalty_on_length, clipped(0.2, 0.28), over_tokens),
    "cispo": Formula(standardized, weighted, over_tokens),
    "gspo": Formula(standardized, sequence_clipped, over_sequences),
    "sapo": Formula(standardized, gated, over_sequences),
    "gmpo": Formula(standardized, geometric, over_sequences),
    "gdpo": Formula(sum_of_standardized, PPO, over_sequences),
    "dppo": Formula(less_mean, within_the_region, constant),
    "maxrl": Formula(relative_to_mean, policy_gradient, sums),
}


def reference(formula: Formula, data: SequenceSample, table: np.ndarray) -> tuple[float, np.ndarray]:
    """Return the loss at `table`, and its gradient."""
    batch = responses(data)
    groups = [r.group for r in batch]
    batch = [r for r in batch if groups.count(r.group) > 1 or not formula.groups]
    credit = formula.credit(batch)
    starts = [np.exp(r.logprobs(table) - r.old) for r in batch]

    def loss(at: np.ndarray) -> float:
        losses = []
        for r, a, start in zip(batch, credit, starts, strict=True):
            logp = r.logprobs(at)
            losses.append(formula.objective(a, logp, np.exp(logp - r.old), start))
            if formula.penalty is not None:
                losses[-1] = losses[-1] + formula.penalty(logp, r.ref)
        return float(formula.aggregate(losses))

    gradient = np.zeros_like(table)
    for at in np.ndindex(table.shape):
        step = np.zeros_like(table)
        step[at] = 1e-5
        gradient[at] = (loss(table + step) - loss(table - step)) / 2e-5
    return loss(table), gradient


def batch_and_engine(seed: int) -> tuple[SequenceSample, BigramEngine]:
    """Return a ragged batch that was sampled near the engine's policy, with ratios around the bounds of all clips."""
    engine = BigramEngine(vocabulary=VOCABULARY, seed=seed, lr=1.0)
    data = with_own_keys(random_batch(seed, n_prompts=24, vocabulary=VOCABULARY), ["rewards/a", "rewards/b"], {}, seed)
    rng = np.random.default_rng(seed)
    off = np.repeat(rng.choice([6e-4, 0.2, 0.3, 0.6], data.n_sequences), data.lengths["input_ids"].flat)
    logp = engine.output(data).logprobs().numpy() + off * rng.normal(size=len(off))
    ref = logp + 0.3 * rng.normal(size=len(off))
    return data.with_tokens(logprobs=torch.tensor(logp), ref_logprobs=torch.tensor(ref)), engine


def test_every_shipped_algorithm_has_a_reference():
    assert FORMULAS.keys() == list_algorithms().keys() - {*PREFERENCE}


@functools.cache
def expected(name: str) -> tuple[float, np.ndarray]:
    """Return loss and gradient of an algorithm on the batch of seed 0. Differences take a second."""
    data, engine = batch_and_engine(0)
    return reference(FORMULAS[name], data, engine.logits_VV.numpy())


@pytest.mark.parametrize("name", FORMULAS)
def test_loss_and_gradient_are_those_of_the_formula(name):
    made = shipped(name, f"interfaces.actor.generation={{n: 4, max_new_tokens: {LIMIT}}}")
    data, engine = batch_and_engine(0)
    (inputs,) = (rpc.inputs for rpc in made.graph.rpcs if rpc.name == "actor_train")
    start = engine.logits_VV.clone()
    actor, two = made.interfaces["actor"], MicroBatchSpec(n_microbatches=2)
    stats = actor.train_step(Model("actor", engine), data.select(inputs), two)
    loss, gradient = expected(name)
    assert stat_values(stats)["loss"] == pytest.approx(loss, abs=1e-6)
    np.testing.assert_allclose((start - engine.logits_VV).numpy(), gradient, atol=1e-9)
    assert np.abs(gradient).max() > 1e-3


ON_POLICY = {"gpg": 60.0, "maxrl": 10.0, "opo": 10.0, "remax": 10.0, "rloo": 10.0}
"""Learning rates of algorithms with one step per batch. With SGD they depend on the scale of
advantages, and on sums."""
OTHERS = {"dppo": 30.0, "dr_grpo": 30.0, "gspo": 20.0}
"""Learning rates of algorithms with a ratio, which differs from 1 in the second step per batch. The default is 10."""


class CountTokens(CountToken):
    """Reward with two names."""

    def inference(self, model, data, mb_spec):
        out = super().inference(model, data, mb_spec)
        return (
            data.select(["input_ids"])
            .with_sequences(
                **{"rewards": out["rewards"], "rewards/a": out["rewards"], "rewards/b": (out["rewards"] > 1).float()}
            )
            .select(["rewards", "rewards/a", "rewards/b"])
        )


class Start(BigramModel):
    """Model spec that gives actor and reference the same initial policy."""

    def load(self, name, *, seed):
        return super().load(name, seed=1)


@pytest.mark.parametrize(
    ("name", "shuffle"), [*((name, False) for name in FORMULAS), ("grpo", True), ("gspo", True), ("remax", True)]
)
def test_trap_g9_reward_rises_and_does_not_when_rewards_are_shuffled(tmp_path, name, shuffle):
    steps = [] if name in ON_POLICY else ["interfaces.actor.n_minibatches=2"]
    made = shipped(name, "interfaces.actor.generation={n: 8, max_new_tokens: 4, fixed_length: true}", *steps)
    actor = made.interfaces["actor"]
    parts = {
        "actor": actor,
        "reward": CountTokens() if name == "gdpo" else CountToken(shuffle=shuffle),
        "ref": ReferenceInterface(),
        "baseline": GreedyInterface(actor.generation),
    }
    models = {"actor": Start((ON_POLICY | OTHERS).get(name, 10.0)), "ref": Start(), "baseline": SharedModel("actor")}
    toy = experiment(
        tmp_path,
        steps=14,
        graph=made.graph,
        interfaces=parts,
        models=models,
        data=Prompts(64),
        evaluation=None,
        dynamic_sampling=made.dynamic_sampling,
    )
    runtime = LocalRuntime(toy)
    rewards = [runtime.step(step)[0]["reward"] for step in range(1, 15)]
    start, end = sum(rewards[:3]) / 3, sum(rewards[-3:]) / 3
    assert (end < start + 0.5) if shuffle else (end > start + 1.0), rewards
