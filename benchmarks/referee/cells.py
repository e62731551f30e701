"""What the referee compares: for each algorithm and peer, the peer's settings and the settings of realign.

A cell says which overrides reproduce the peer's loss and gradient, and in words how the peer differs from realign's
preset of that name. The referee measures both: the distance without the overrides, and with them. Where no settings
exist, `formula` turns realign's result into the peer's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from benchmarks.referee import ours

Result = tuple[Tensor, Tensor]
"""A loss and its gradient [S, R]."""
Formula = Callable[[dict[str, Tensor], tuple[str, ...]], Result]

PEERS = {"trl": "TRL", "verl": "verl", "openrlhf": "OpenRLHF", "areal": "AReaL", "skyrl": "SkyRL", "slime": "slime"}
WHEELS = [peer for peer in PEERS if peer != "slime"]
"""Those that are installed from PyPI."""
ACTOR = "interfaces.actor."
GROUP = {"mean_level": "group", "std_level": "group", "std_unbiased": True, "eps": 1e-5, "group_size": 4}
"""AReaL's normalization within groups."""
BATCH = {"mean_level": "batch", "std_level": "batch", "std_unbiased": True, "eps": 1e-5}


@dataclass(frozen=True)
class Row:
    """An algorithm."""

    title: str
    preset: tuple[str, ...]
    """realign's own version of it."""
    kind: str = "policy"
    batch: str = "groups"
    note: str = ""


@dataclass(frozen=True)
class Cell:
    """A peer's version of an algorithm."""

    settings: Mapping[str, Any]
    """Of the peer, by its names."""
    changes: tuple[str, ...] = ()
    """Overrides after the preset."""
    differs: str = ""
    """How the peer differs from realign's preset, in words."""
    where: str = ""
    """File and line of the peer that says so."""
    instead: tuple[str, ...] | None = None
    """All overrides, where those of the preset contradict the peer."""
    formula: Formula | None = None
    """realign's result, turned into the peer's, where no settings exist."""
    batch: str = ""


@dataclass(frozen=True)
class Absent:
    """A peer that does not have the algorithm."""

    why: str = ""


def overrides_of(row: Row, cell: Cell) -> tuple[str, ...]:
    """Return all overrides of a cell."""
    return cell.instead or (*row.preset, *cell.changes)


def actor(*changes: str) -> tuple[str, ...]:
    """Return overrides of the actor."""
    return tuple(f"{ACTOR}{change}" for change in changes)


TOKEN_MEAN = ("experiment=grpo", *actor("kl.place=none", "adv_norm.unbiased=true"))
DUAL = "objective.dual=3.0"

ROWS: dict[str, Row] = {
    "grpo": Row("GRPO", ("experiment=grpo", "algorithm=grpo")),
    "dr_grpo": Row("Dr. GRPO", ("experiment=grpo", "algorithm=dr_grpo"), note="The length limit is 512."),
    "dapo": Row(
        "DAPO",
        ("experiment=grpo", "algorithm=dapo", *actor("truncation.overlong_buffer=64", "truncation.overlong_penalty=0")),
        note="Without the length penalty, which belongs to the reward.",
    ),
    "gspo": Row("GSPO", ("experiment=grpo", "algorithm=gspo")),
    "cispo": Row("CISPO", ("experiment=grpo", "algorithm=cispo")),
    "dppo": Row("DPPO", ("experiment=grpo", "algorithm=dppo"), note="The length limit is 512."),
    "gdpo": Row(
        "GDPO",
        ("experiment=grpo", "algorithm=gdpo", *actor("advantage.weights={a: 1, b: 0.5}")),
        "advantages",
        "with several rewards",
    ),
    "maxrl": Row("MaxRL", ("experiment=grpo", "algorithm=maxrl"), "advantages", "without negative rewards"),
    "group_advantage": Row("Group advantages", ("experiment=grpo", "algorithm=grpo"), "advantages"),
    "ppo": Row(
        "PPO, actor",
        ("experiment=ppo", *actor("n_minibatches=1")),
        batch="single",
        note="GAE, whitening, clip, and k1 in the reward with 0.05; lambda 0.95.",
    ),
    "value": Row("PPO, value loss", ("experiment=ppo", *actor("n_minibatches=1")), "value", "single"),
    "kl_k3": Row(
        "KL in the loss, k3",
        ("experiment=grpo", *actor("kl.estimator=k3", "kl.coef=0.1", "adv_norm.unbiased=true", "adv_norm.eps=1e-6")),
        note="With a mean over tokens.",
    ),
    "kl_k2": Row(
        "KL in the loss, k2",
        ("experiment=grpo", *actor("kl.estimator=k2", "kl.coef=0.1", "adv_norm.unbiased=true", "adv_norm.eps=1e-6")),
        note="With a mean over tokens.",
    ),
    "dpo": Row("DPO", ("experiment=dpo",), "dpo", "pairs"),
    "ipo": Row("IPO", ("experiment=dpo", "algorithm=ipo"), "dpo", "pairs"),
    "kto": Row("KTO", ("experiment=kto",), "kto", "pairs", "With the same responses of other prompts in the baseline."),
}

EDGES: dict[str, Row] = {
    "equal": Row(
        "7 responses with a reward of 0.1 each",
        ("experiment=grpo", "algorithm=grpo"),
        "advantages",
        "groups of 7 equal rewards",
        "realign: an advantage of 0.",
    ),
    "one": Row(
        "a group of one response",
        ("experiment=grpo", "algorithm=grpo"),
        "advantages",
        "with a group of one",
        "realign: an advantage of 0.",
    ),
    "truncated": Row(
        "truncated responses are masked",
        ("experiment=grpo", "algorithm=grpo", *actor("truncation.mask=true")),
        batch="truncated",
        note="realign takes them out of the group's mean and standard deviation, and the divisor.",
    ),
    "tools": Row(
        "tool output in a response, with GAE",
        ("experiment=ppo", *actor("n_minibatches=1")),
        batch="single with tools",
        note="realign skips tokens that the policy didn't sample.",
    ),
    "longest": Row(
        "the longest response of a batch, with GAE",
        ("experiment=ppo", *actor("n_minibatches=1")),
        batch="single",
        note="realign asks the sampler which responses were truncated.",
    ),
    "far": Row(
        "a token that the reference finds over 13 times likelier",
        ROWS["kl_k3"].preset,
        batch="far from the reference",
        note="realign bounds the log-ratio by 20 nats, and k3 not at all.",
    ),
    "dual": Row(
        "a dual clip at 3",
        ("experiment=grpo", "algorithm=grpo", *actor("kl.place=none", DUAL)),
        note="realign bounds the ratio by 3 where the advantage is negative.",
    ),
    "sizes": Row(
        "groups of different sizes",
        ("experiment=grpo", "algorithm=grpo"),
        "advantages",
        "ragged",
        "realign compares the responses of one prompt.",
    ),
    "whiten": Row(
        "advantages whitened over the batch",
        ("experiment=grpo", *actor("advantage=gae", "adv_norm={mean: batch, std: batch}", "kl.place=none")),
        "advantages",
        note="realign takes mean and deviation over the trained tokens.",
    ),
}


def truncated_count(batch: dict[str, Tensor], overrides: tuple[str, ...]) -> Result:
    """Truncated responses keep their place in the statistics of the group and in the divisor; in plain torch."""
    everything = {**batch, "mask": batch["exists"], "truncated": torch.zeros_like(batch["truncated"])}
    _, advantages = ours.run("advantages", everything, overrides)
    leaf, mask = batch["new"].clone().requires_grad_(), batch["mask"]
    ratio, d = (leaf - batch["old"]).exp(), leaf - batch["ref"]
    clipped = torch.maximum(-advantages * ratio, -advantages * ratio.clamp(0.8, 1.2))
    if f"{ACTOR}{DUAL}" in overrides:
        clipped = torch.where(advantages < 0, torch.minimum(clipped, -3 * advantages), clipped)
    token = torch.where(mask, clipped + 0.04 * (torch.expm1(-d) + d), 0)
    loss = (token.sum(-1) / mask.sum(-1).clamp(min=1)).mean()
    loss.backward()
    assert leaf.grad is not None
    return loss.detach(), leaf.grad


def without_kl(overrides: tuple[str, ...]) -> tuple[str, ...]:
    """Return the overrides without those of the KL penalty, which have no effect once it is off."""
    return (*(word for word in overrides if not word.startswith(f"{ACTOR}kl.")), f"{ACTOR}kl.place=none")


def kl_by_sequence(batch: dict[str, Tensor], overrides: tuple[str, ...]) -> Result:
    """A mean over tokens for the policy's term, and a mean over sequences for the KL."""
    without = ours.run("policy", batch, without_kl(overrides))
    same = actor("aggregation=seq_mean_token_mean")
    both = ours.run("policy", batch, (*overrides, *same))
    policy = ours.run("policy", batch, without_kl((*overrides, *same)))
    return without[0] + both[0] - policy[0], without[1] + both[1] - policy[1]


def of_logprobs(batch: dict[str, Tensor], overrides: tuple[str, ...]) -> Result:
    """The same gradient, from a loss with the log-prob in place of the ratio."""
    _, gradient = ours.run("policy", batch, overrides)
    return (gradient * batch["new"]).sum(), gradient


def above_zero(batch: dict[str, Tensor], overrides: tuple[str, ...]) -> Result:
    """The mean that divides is 1e-6 larger."""
    _, found = ours.run("advantages", batch, overrides)
    count = batch["group"].bincount().float()
    mean = torch.zeros_like(count).index_add(0, batch["group"], batch["rewards"]) / count
    return torch.zeros(()), found * (mean / (mean + 1e-6))[batch["group"]][:, None]


def k3(most: float | None, by_sequence: bool = False) -> Formula:
    """k3 of at most `most`, without a gradient beyond; in plain torch."""

    def formula(batch: dict[str, Tensor], overrides: tuple[str, ...]) -> Result:
        loss, gradient = ours.run("policy", batch, without_kl(overrides))
        leaf, mask = batch["new"].clone().requires_grad_(), batch["mask"]
        d = leaf - batch["ref"]
        kl = torch.where(mask, (torch.expm1(-d.clamp(min=-20)) + d).clamp(max=most or 1e30), 0)
        penalty = 0.1 * ((kl.sum(-1) / mask.sum(-1)).mean() if by_sequence else kl.sum() / mask.sum())
        penalty.backward()
        assert leaf.grad is not None
        return loss + penalty.detach(), gradient + leaf.grad

    return formula


def longest_bootstraps(batch: dict[str, Tensor], overrides: tuple[str, ...]) -> Result:
    """The longest response counts as truncated, so the value after it enters its advantages."""
    longest = batch["exists"].all(-1)
    return ours.run("policy", {**batch, "truncated": longest, "bootstrap": longest.float()}, overrides)


def rewards_alone(batch: dict[str, Tensor], overrides: tuple[str, ...]) -> Result:
    """The advantage of the only response of a group is its reward, over 1 + eps."""
    _, advantages = ours.run("advantages", batch, overrides)
    sizes = batch["group"].bincount()[batch["group"]]
    alone = (batch["rewards"] / (1 + 1e-6))[:, None] * batch["mask"]
    return torch.zeros(()), torch.where((sizes == 1)[:, None], alone, advantages)


def gae_over_tools(
    batch: dict[str, Tensor], values_of_tools: bool, eps: float, unbiased: bool, whitened: str, kl_of: str = "mask"
) -> Tensor:
    """GAE in which each tool token is a step, then whitening over some tokens; in plain torch."""
    mask = batch["mask"].float()
    last = batch["exists"].sum(-1, keepdim=True) - 1
    rewards = -0.05 * (batch["old"] - batch["ref"]) * batch[kl_of]
    rewards = rewards.scatter_add(1, last, batch["rewards"][:, None])
    values = batch["values"] * (batch["exists"] if values_of_tools else mask)
    advantages, later, following = torch.zeros_like(values), torch.zeros(len(values)), torch.zeros(len(values))
    for t in reversed(range(values.shape[1])):
        later = rewards[:, t] + following - values[:, t] + 0.95 * later
        advantages[:, t], following = later, values[:, t]
    x = advantages[batch[whitened]].double()
    return (advantages - x.mean()) / (x.var(correction=int(unbiased)) + eps).sqrt()


def with_advantages(batch: dict[str, Tensor], advantages: Tensor, low: float = 0.2, high: float = 0.2) -> Result:
    """PPO's clipped loss, a mean over tokens."""
    leaf = batch["new"].clone().requires_grad_()
    ratio = (leaf - batch["old"]).exp()
    token = torch.maximum(-advantages * ratio, -advantages * ratio.clamp(1 - low, 1 + high))
    loss = torch.where(batch["mask"], token, 0).sum() / batch["mask"].sum()
    loss.backward()
    assert leaf.grad is not None
    return loss.detach(), leaf.grad


def openrlhf_tools(batch: dict[str, Tensor], overrides: tuple[str, ...]) -> Result:
    """A tool token is a step of GAE with a value of 0."""
    return with_advantages(batch, gae_over_tools(batch, False, 0.0, False, "mask"))


def skyrl_tools(batch: dict[str, Tensor], overrides: tuple[str, ...]) -> Result:
    """A tool token is a step of GAE with its own value, and counts in the whitening."""
    return with_advantages(batch, gae_over_tools(batch, True, 1e-8, True, "exists"))


def slime_tools(batch: dict[str, Tensor], overrides: tuple[str, ...]) -> Result:
    """A tool token is a step of GAE with its own value and its own KL penalty."""
    return with_advantages(batch, gae_over_tools(batch, True, 1e-8, True, "mask", "exists"))


def doubled(batch: dict[str, Tensor], overrides: tuple[str, ...]) -> Result:
    """Twice realign's value loss."""
    loss, gradient = ours.run("value", batch, overrides)
    return 2 * loss, 2 * gradient


def one_group(batch: dict[str, Tensor], overrides: tuple[str, ...]) -> Result:
    """All responses of the batch are one group."""
    return ours.run("advantages", {**batch, "group": torch.zeros_like(batch["group"])}, overrides)


def mean_over_padding(batch: dict[str, Tensor], overrides: tuple[str, ...]) -> Result:
    """The mean is over the padded matrix, the deviation over tokens."""
    x = group_scores(batch)[:, None] * batch["exists"]
    mean = x.mean()
    exists = batch["exists"]
    scale = (((x - mean) ** 2 * exists).sum() / exists.sum()).rsqrt()
    return torch.zeros(()), (x - mean) * scale * batch["mask"]


def group_scores(batch: dict[str, Tensor]) -> Tensor:
    """Rewards normalized within groups, with the sample deviation and 1e-6."""
    _, advantages = ours.run("advantages", batch, ROWS["grpo"].preset)
    return advantages.abs().amax(1) * advantages.sum(1).sign()


VERL = "actor_rollout_ref.actor."
VERL_KL = {f"{VERL}use_kl_loss": True, f"{VERL}kl_loss_coef": 0.1}
VERL_GRPO = {"algorithm.adv_estimator": "grpo"}
VERL_GAE = {
    "algorithm.adv_estimator": "gae",
    "algorithm.gamma": 1.0,
    "algorithm.lam": 0.95,
    "algorithm.use_kl_in_reward": True,
    "algorithm.kl_penalty": "kl",
    "algorithm.kl_ctrl.kl_coef": 0.05,
}
RLHF_GRPO = {"algo.advantage.estimator": "group_norm", "algo.kl.init_coef": 0.0}
RLHF_KL = {"algo.kl.use_loss": True, "algo.kl.init_coef": 0.1}
RLHF_GAE = {
    "algo.advantage.estimator": "gae",
    "algo.advantage.lambd": 0.95,
    "algo.kl.init_coef": 0.05,
    "algo.kl.estimator": "k1",
}
AREAL_GAE = {"adv_norm": BATCH, "kl_ctl": 0.05, "kl_estimator": "k1", "gae_lambda": 0.95}
SKY_GRPO = {"advantage_estimator": "grpo"}
SKY_ALONE = {**SKY_GRPO, "use_kl_loss": False}
SKY_GAE = {
    "advantage_estimator": "gae",
    "lambd": 0.95,
    "use_kl_loss": False,
    "use_kl_in_reward": True,
    "kl_loss_coef": 0.05,
    "kl_estimator_type": "k1",
}
SLIME_TOKENS = {"calculate_per_token_loss": True}
SLIME_KL = {**SLIME_TOKENS, "use_kl_loss": True, "kl_loss_coef": 0.1}
SLIME_GAE = {
    **SLIME_TOKENS,
    "advantage_estimator": "ppo",
    "lambd": 0.95,
    "kl_coef": 0.05,
    "kl_loss_type": "k1",
    "normalize_advantages": True,
}
TRL_LINE = "trl/trainer/grpo_trainer.py:2787"
RLHF_LINE = "openrlhf/trainer/ppo_utils/experience_maker.py:274"
SLIME_LOSS = "slime/backends/megatron_utils/loss.py"
NOT_TRL = Absent("which removed its PPO trainer")

CELLS: dict[tuple[str, str], Cell | Absent] = {
    ("grpo", "trl"): Cell(
        {"loss_type": "grpo", "scale_rewards": "group", "beta": 0.04},
        actor("adv_norm.eps=1e-4", "kl.importance_weighted=true"),
    ),
    ("grpo", "verl"): Cell(
        {
            **VERL_GRPO,
            f"{VERL}loss_agg_mode": "seq-mean-token-mean",
            f"{VERL}use_kl_loss": True,
            f"{VERL}kl_loss_type": "low_var_kl",
            f"{VERL}kl_loss_coef": 0.04,
        },
        actor(DUAL),
        batch="ragged",
    ),
    ("grpo", "openrlhf"): Cell(
        {
            **RLHF_GRPO,
            "actor.loss_agg_mode": "seq-mean-token-mean",
            "algo.kl.use_loss": True,
            "algo.kl.init_coef": 0.04,
            "algo.kl.estimator": "k3",
        },
        actor("adv_norm.eps=1e-9"),
    ),
    ("grpo", "areal"): Cell(
        {"reward_norm": GROUP, "kl_ctl": 0.0},
        differs="it takes the mean over tokens, without a KL in the loss",
        where="areal/utils/functional/functional.py:542",
        instead=(*TOKEN_MEAN, *actor("adv_norm.eps=1e-5")),
    ),
    ("grpo", "skyrl"): Cell(
        {**SKY_GRPO, "loss_reduction": "sequence_mean", "kl_loss_coef": 0.04, "kl_estimator_type": "k3"}, batch="ragged"
    ),
    ("grpo", "slime"): Cell({"use_kl_loss": True, "kl_loss_coef": 0.04, "kl_loss_type": "k3"}),
    ("dr_grpo", "trl"): Cell(
        {"loss_type": "dr_grpo", "scale_rewards": "none", "beta": 0.0, "max_completion_length": 512}
    ),
    ("dr_grpo", "verl"): Cell(
        {
            **VERL_GRPO,
            "algorithm.norm_adv_by_std_in_grpo": False,
            f"{VERL}loss_agg_mode": "seq-mean-token-sum-norm",
            f"{VERL}loss_scale_factor": 512,
        },
        actor(DUAL),
        "without `loss_scale_factor`, it divides by the longest response of the batch",
        "verl/trainer/ppo/core_algos.py:1191",
        batch="ragged",
    ),
    ("dr_grpo", "openrlhf"): Cell(
        {"algo.advantage.estimator": "dr_grpo", "algo.kl.init_coef": 0.0},
        differs="it only leaves out the standard deviation, and takes the mean over tokens",
        where=RLHF_LINE,
        instead=("experiment=grpo", *actor("kl.place=none", "adv_norm.std=none")),
    ),
    ("dr_grpo", "areal"): Cell(
        {"reward_norm": {**GROUP, "std_level": None}, "kl_ctl": 0.0},
        differs="it takes the mean over tokens",
        where="areal/utils/functional/functional.py:542",
        instead=("experiment=grpo", *actor("kl.place=none", "adv_norm.std=none")),
    ),
    ("dr_grpo", "skyrl"): Cell(
        {
            **SKY_ALONE,
            "grpo_norm_by_std": False,
            "loss_reduction": "seq_mean_token_sum_norm",
            "max_seq_len": 512,
        },
        batch="ragged",
    ),
    ("dr_grpo", "slime"): Cell(
        {"grpo_std_normalization": False},
        differs="it only leaves out the standard deviation, and takes the mean within each response",
        where="slime/ray/rollout.py",
        instead=(
            "experiment=grpo",
            *actor("kl.place=none", "adv_norm.std=none", "aggregation=seq_mean_token_mean"),
        ),
    ),
    ("dapo", "trl"): Cell(
        {"loss_type": "dapo", "scale_rewards": "group", "beta": 0.0, "epsilon_high": 0.28},
        actor("adv_norm.eps=1e-4"),
    ),
    ("dapo", "verl"): Cell(
        {**VERL_GRPO, f"{VERL}loss_agg_mode": "token-mean", f"{VERL}clip_ratio_high": 0.28},
        actor(DUAL),
        batch="ragged",
    ),
    ("dapo", "openrlhf"): Cell({**RLHF_GRPO, "actor.eps_clip_low_high": [0.2, 0.28]}, actor("adv_norm.eps=1e-9")),
    ("dapo", "areal"): Cell(
        {"reward_norm": GROUP, "kl_ctl": 0.0, "eps_clip_higher": 0.28},
        actor("adv_norm.eps=1e-5"),
    ),
    ("dapo", "skyrl"): Cell({**SKY_ALONE, "eps_clip_high": 0.28}, batch="ragged"),
    ("dapo", "slime"): Cell({**SLIME_TOKENS, "eps_clip_high": 0.28}),
    ("gspo", "trl"): Cell(
        {
            "loss_type": "grpo",
            "importance_sampling_level": "sequence",
            "beta": 0.0,
            "epsilon": 3e-4,
            "epsilon_high": 4e-4,
        },
        actor("adv_norm.eps=1e-4"),
    ),
    ("gspo", "verl"): Cell(
        {
            **VERL_GRPO,
            f"{VERL}policy_loss.loss_mode": "gspo",
            f"{VERL}loss_agg_mode": "seq-mean-token-mean",
            f"{VERL}clip_ratio_low": 3e-4,
            f"{VERL}clip_ratio_high": 4e-4,
        },
        batch="ragged",
    ),
    ("gspo", "openrlhf"): Cell(
        {
            **RLHF_GRPO,
            "actor.policy_loss_type": "gspo",
            "actor.loss_agg_mode": "seq-mean-token-mean",
            "actor.eps_clip_low_high": [3e-4, 4e-4],
        },
        actor("adv_norm.eps=1e-9"),
    ),
    ("gspo", "areal"): Cell(
        {
            "reward_norm": GROUP,
            "kl_ctl": 0.0,
            "importance_sampling_level": "sequence",
            "eps_clip": 3e-4,
            "eps_clip_higher": 4e-4,
        },
        differs="it weights a sequence by its length",
        where="areal/utils/functional/functional.py:542",
        instead=(*TOKEN_MEAN, *actor("objective=gspo", "adv_norm.eps=1e-5")),
    ),
    ("gspo", "skyrl"): Cell(
        {
            **SKY_ALONE,
            "policy_loss_type": "gspo",
            "loss_reduction": "sequence_mean",
            "eps_clip_low": 3e-4,
            "eps_clip_high": 4e-4,
        },
        batch="ragged",
    ),
    ("gspo", "slime"): Cell({"advantage_estimator": "gspo", "eps_clip": 3e-4, "eps_clip_high": 4e-4}),
    ("cispo", "trl"): Cell(
        {"loss_type": "cispo", "beta": 0.0, "epsilon_high": 5.0},
        actor("adv_norm.eps=1e-4"),
        "`epsilon_high=5` is the bound itself, realign's `high=4` the distance from 1",
        "trl/trainer/grpo_trainer.py:3110",
    ),
    ("cispo", "verl"): Cell(
        {
            **VERL_GRPO,
            f"{VERL}policy_loss.loss_mode": "cispo",
            f"{VERL}clip_ratio_low": 0.2,
            f"{VERL}clip_ratio_high": 0.2,
        },
        actor("objective.low=0.2", "objective.high=0.2"),
        "it bounds the weight from both sides, by PPO's 0.2",
        "verl/trainer/ppo/core_algos.py:2079",
        batch="ragged",
    ),
    ("cispo", "openrlhf"): Absent(),
    ("cispo", "areal"): Absent(),
    ("cispo", "skyrl"): Cell(
        {
            **SKY_ALONE,
            "policy_loss_type": "cispo",
            "cispo.cispo_eps_clip_low": 0.0,
            "cispo.cispo_eps_clip_high": 5.0,
        },
        actor("objective.low=0.0", "objective.high=5.0"),
        "no weight is below 1 or above 6",
        "skyrl/train/config/config.py:543",
        batch="ragged",
    ),
    ("cispo", "slime"): Cell(
        {**SLIME_TOKENS, "advantage_estimator": "cispo"},
        actor("objective.low=0.2", "objective.high=0.2"),
        "it bounds the weight from both sides, by PPO's 0.2",
        f"{SLIME_LOSS}:1036",
    ),
    ("dppo", "trl"): Absent("whose trainer of it isn't in the release"),
    ("dppo", "verl"): Cell(
        {
            **VERL_GRPO,
            "algorithm.norm_adv_by_std_in_grpo": False,
            f"{VERL}policy_loss.loss_mode": "dppo_tv",
            f"{VERL}loss_agg_mode": "seq-mean-token-sum-norm",
            f"{VERL}loss_scale_factor": 512,
            f"{VERL}clip_ratio_low": 0.15,
            f"{VERL}clip_ratio_high": 0.15,
            f"{VERL}clip_ratio_c": 1e9,
        },
        differs="its loss is that of the log-prob, with the same gradient",
        where="verl/trainer/ppo/core_algos.py:1439",
        formula=of_logprobs,
        batch="ragged",
    ),
    ("dppo", "openrlhf"): Absent(),
    ("dppo", "areal"): Absent(),
    ("dppo", "skyrl"): Cell(
        {
            **SKY_ALONE,
            "policy_loss_type": "dppo",
            "dppo.delta_low": 0.15,
            "dppo.delta_high": 0.15,
            "grpo_norm_by_std": False,
            "loss_reduction": "seq_mean_token_sum_norm",
            "max_seq_len": 512,
        },
        batch="ragged",
    ),
    ("dppo", "slime"): Absent(),
    ("gdpo", "trl"): Cell(
        {"multi_objective_aggregation": "normalize_then_sum", "reward_weights": [1.0, 0.5]},
        actor("advantage.reward_norm.eps=1e-4", "adv_norm.eps=1e-4"),
        batch="with several rewards, some missing",
    ),
    ("gdpo", "verl"): Cell(
        {
            "algorithm.adv_estimator": "gdpo",
            "algorithm.gdpo_reward_keys": ["a", "b"],
            "algorithm.gdpo_reward_weights": [1.0, 0.5],
        },
        actor("advantage.length_weighted=true", "adv_norm.eps=1e-8", "adv_norm.eps_inside_sqrt=true"),
        "it normalizes the sum over the tokens of the batch",
        "verl/trainer/ppo/core_algos.py:466",
    ),
    ("gdpo", "openrlhf"): Absent(),
    ("gdpo", "areal"): Absent(),
    ("gdpo", "skyrl"): Absent(),
    ("gdpo", "slime"): Absent(),
    ("maxrl", "trl"): Absent(),
    ("maxrl", "verl"): Absent(),
    ("maxrl", "openrlhf"): Absent(),
    ("maxrl", "areal"): Absent(),
    ("maxrl", "skyrl"): Cell(
        {"advantage_estimator": "maxrl"},
        differs="it adds 1e-6 to the mean",
        where="skyrl/backends/skyrl_train/utils/ppo_utils.py:1366",
        formula=above_zero,
    ),
    ("maxrl", "slime"): Absent(),
    ("group_advantage", "trl"): Cell({"scale_rewards": "group"}, actor("adv_norm.eps=1e-4")),
    ("group_advantage", "verl"): Cell(VERL_GRPO, batch="ragged"),
    ("group_advantage", "openrlhf"): Cell(RLHF_GRPO, actor("adv_norm.eps=1e-9")),
    ("group_advantage", "areal"): Cell({"reward_norm": GROUP, "kl_ctl": 0.0}, actor("adv_norm.eps=1e-5")),
    ("group_advantage", "skyrl"): Cell(SKY_GRPO, batch="ragged"),
    ("group_advantage", "slime"): Cell({"advantage_estimator": "grpo"}),
    ("ppo", "trl"): NOT_TRL,
    ("ppo", "verl"): Cell(
        VERL_GAE,
        actor("adv_norm.unbiased=true", "adv_norm.eps_inside_sqrt=true", DUAL),
    ),
    ("ppo", "openrlhf"): Cell(RLHF_GAE),
    ("ppo", "areal"): Cell(
        AREAL_GAE,
        actor("adv_norm.unbiased=true", "adv_norm.eps=1e-5"),
    ),
    ("ppo", "skyrl"): Cell(
        SKY_GAE,
        actor("adv_norm.unbiased=true", "adv_norm.eps_inside_sqrt=true"),
    ),
    ("ppo", "slime"): Cell(
        SLIME_GAE,
        actor("adv_norm.unbiased=true", "adv_norm.eps_inside_sqrt=true"),
    ),
    ("value", "trl"): NOT_TRL,
    ("value", "verl"): Cell({"critic.cliprange_value": 0.2}),
    ("value", "openrlhf"): Cell({"critic.value_clip": 0.2}),
    ("value", "areal"): Cell({"eps_clip": 0.2}),
    ("value", "skyrl"): Cell(
        {"value_clip": 0.2},
        ("interfaces.critic.aggregation=seq_mean_token_mean",),
        "it takes the mean over sequences, whatever `loss_reduction` is",
        "skyrl/backends/skyrl_train/utils/ppo_utils.py:172",
    ),
    ("value", "slime"): Cell(
        {**SLIME_TOKENS, "value_clip": 0.2},
        differs="it doesn't halve the squared error: loss and gradient are twice as large",
        where=f"{SLIME_LOSS}:1216",
        formula=doubled,
    ),
    ("kl_k3", "trl"): Cell(
        {"loss_type": "dapo", "beta": 0.1},
        actor("adv_norm.eps=1e-4", "kl.importance_weighted=true"),
    ),
    ("kl_k3", "verl"): Cell({**VERL_GRPO, **VERL_KL, f"{VERL}kl_loss_type": "low_var_kl"}, actor(DUAL), batch="ragged"),
    ("kl_k3", "openrlhf"): Cell({**RLHF_GRPO, **RLHF_KL, "algo.kl.estimator": "k3"}, actor("adv_norm.eps=1e-9")),
    ("kl_k3", "areal"): Absent("which has the KL only in the reward"),
    ("kl_k3", "skyrl"): Cell(
        {**SKY_GRPO, "kl_loss_coef": 0.1, "kl_estimator_type": "k3"},
        differs="it averages the KL over sequences, the policy's term over tokens",
        where="skyrl/backends/skyrl_train/workers/worker.py:977",
        formula=kl_by_sequence,
        batch="ragged",
    ),
    ("kl_k3", "slime"): Cell({**SLIME_KL, "kl_loss_type": "k3"}),
    ("kl_k2", "trl"): Absent("which has only k3"),
    ("kl_k2", "verl"): Cell({**VERL_GRPO, **VERL_KL, f"{VERL}kl_loss_type": "mse"}, actor(DUAL), batch="ragged"),
    ("kl_k2", "openrlhf"): Cell({**RLHF_GRPO, **RLHF_KL, "algo.kl.estimator": "k2"}, actor("adv_norm.eps=1e-9")),
    ("kl_k2", "areal"): Absent("which has the KL only in the reward"),
    ("kl_k2", "skyrl"): Cell(
        {**SKY_GRPO, "kl_loss_coef": 0.1, "kl_estimator_type": "k2"},
        differs="it averages the KL over sequences, the policy's term over tokens",
        where="skyrl/backends/skyrl_train/workers/worker.py:977",
        formula=kl_by_sequence,
        batch="ragged",
    ),
    ("kl_k2", "slime"): Cell({**SLIME_KL, "kl_loss_type": "k2"}),
    ("dpo", "trl"): Cell({"beta": 0.1, "loss_type": ["sigmoid"]}),
    ("dpo", "openrlhf"): Cell({"beta": 0.1}),
    ("dpo", "areal"): Cell({"beta": 0.1}),
    ("ipo", "trl"): Cell({"beta": 0.1, "loss_type": ["ipo"]}),
    ("ipo", "openrlhf"): Cell(
        {"beta": 0.1, "ipo": True},
        differs="it compares sums of log-ratios, the others means over tokens",
        where="openrlhf/models/loss.py:351",
        instead=("experiment=dpo", f"{ACTOR}kind=ipo"),
    ),
    ("ipo", "areal"): Cell({"beta": 0.1, "loss_type": "ipo"}),
    ("kto", "trl"): Cell({"beta": 0.1, "desirable_weight": 1.0, "undesirable_weight": 1.0}),
    **{(row, peer): Absent() for row in ("dpo", "ipo", "kto") for peer in ("verl", "skyrl", "slime")},
    ("kto", "openrlhf"): Absent(),
    ("kto", "areal"): Absent(),
}

EQUAL_WORDS = "the rounding of their mean, divided by {eps}"
BOUND_WORDS = "k3 is at most 10, without a gradient beyond"
COUNT_WORDS = "they stay in all three"

EDGE_CELLS: dict[tuple[str, str], Cell] = {
    ("equal", "trl"): Cell({"scale_rewards": "group"}, differs=EQUAL_WORDS.format(eps="1e-4"), where=TRL_LINE),
    ("equal", "verl"): Cell(
        VERL_GRPO, differs=EQUAL_WORDS.format(eps="1e-6"), where="verl/trainer/ppo/core_algos.py:326"
    ),
    ("equal", "openrlhf"): Cell(RLHF_GRPO, differs=EQUAL_WORDS.format(eps="1e-9"), where=RLHF_LINE),
    ("equal", "areal"): Cell({"reward_norm": {**GROUP, "group_size": 7}, "kl_ctl": 0.0}),
    ("equal", "skyrl"): Cell(
        SKY_GRPO,
        differs=EQUAL_WORDS.format(eps="1e-6"),
        where="skyrl/backends/skyrl_train/utils/ppo_utils.py:1331",
    ),
    ("equal", "slime"): Cell(
        {"advantage_estimator": "grpo"}, differs=EQUAL_WORDS.format(eps="1e-6"), where="slime/ray/rollout.py"
    ),
    ("one", "verl"): Cell(
        VERL_GRPO,
        differs="its advantage is the raw reward",
        where="verl/trainer/ppo/core_algos.py:315",
        formula=rewards_alone,
    ),
    ("one", "skyrl"): Cell(
        SKY_GRPO,
        differs="its advantage is the raw reward",
        where="skyrl/backends/skyrl_train/utils/ppo_utils.py:1321",
        formula=rewards_alone,
    ),
    ("truncated", "trl"): Cell(
        {"loss_type": "grpo", "beta": 0.04, "mask_truncated_completions": True, "use_bias_correction_kl": False},
        actor("adv_norm.eps=1e-4"),
        COUNT_WORDS,
        "trl/trainer/grpo_trainer.py:3154",
        formula=truncated_count,
    ),
    ("truncated", "verl"): Cell(
        {
            **VERL_GRPO,
            f"{VERL}loss_agg_mode": "seq-mean-token-mean",
            f"{VERL}use_kl_loss": True,
            f"{VERL}kl_loss_type": "low_var_kl",
            f"{VERL}kl_loss_coef": 0.04,
        },
        actor(DUAL),
        COUNT_WORDS,
        "verl/trainer/ppo/ray_trainer.py:1362",
        formula=truncated_count,
    ),
    ("truncated", "skyrl"): Cell(
        {**SKY_GRPO, "loss_reduction": "sequence_mean", "kl_loss_coef": 0.04, "kl_estimator_type": "k3"},
        differs=COUNT_WORDS,
        where="skyrl/backends/skyrl_train/utils/ppo_utils.py:1137",
        formula=truncated_count,
    ),
    ("truncated", "slime"): Cell(
        {"use_kl_loss": True, "kl_loss_coef": 0.04, "kl_loss_type": "k3"},
        differs=f"{COUNT_WORDS}, if your filter sets `remove_sample`",
        where="slime/ray/rollout.py",
        formula=truncated_count,
    ),
    ("tools", "verl"): Cell(VERL_GAE, actor("adv_norm.unbiased=true", "adv_norm.eps_inside_sqrt=true", DUAL)),
    ("tools", "openrlhf"): Cell(
        RLHF_GAE,
        differs="each of its tokens is a step with a value of 0",
        where="openrlhf/trainer/ppo_utils/experience_maker.py:381",
        formula=openrlhf_tools,
    ),
    ("tools", "areal"): Cell(AREAL_GAE, actor("adv_norm.unbiased=true", "adv_norm.eps=1e-5")),
    ("tools", "skyrl"): Cell(
        SKY_GAE,
        differs="each of its tokens is a step with its own value, and counts in the whitening",
        where="skyrl/backends/skyrl_train/utils/ppo_utils.py:1275",
        formula=skyrl_tools,
    ),
    ("tools", "slime"): Cell(
        SLIME_GAE,
        differs="each of its tokens is a step with its own value and KL penalty",
        where=f"{SLIME_LOSS}:775",
        formula=slime_tools,
    ),
    ("longest", "areal"): Cell(
        {**AREAL_GAE, "longest counts as truncated": True},
        actor("adv_norm.unbiased=true", "adv_norm.eps=1e-5", "advantage.bootstrap=true"),
        "it always counts as truncated: a value follows its last token",
        "areal/trainer/ppo/actor.py:201",
        formula=longest_bootstraps,
    ),
    ("far", "trl"): Cell(
        {"loss_type": "dapo", "beta": 0.1, "use_bias_correction_kl": False},
        actor("adv_norm.eps=1e-4"),
        "it doesn't bound the log-ratio",
        "trl/trainer/grpo_trainer.py:3100",
        formula=k3(None),
    ),
    ("far", "verl"): Cell(
        {**VERL_GRPO, **VERL_KL, f"{VERL}kl_loss_type": "low_var_kl"},
        actor(DUAL),
        BOUND_WORDS,
        "verl/trainer/ppo/core_algos.py:2245",
        formula=k3(10),
    ),
    ("far", "openrlhf"): Cell(
        {**RLHF_GRPO, **RLHF_KL, "algo.kl.estimator": "k3"},
        actor("adv_norm.eps=1e-9"),
        BOUND_WORDS,
        "openrlhf/models/utils.py:113",
        formula=k3(10),
    ),
    ("far", "skyrl"): Cell(
        {**SKY_GRPO, "kl_loss_coef": 0.1, "kl_estimator_type": "k3"},
        differs=f"{BOUND_WORDS}, and a mean over sequences",
        where="skyrl/backends/skyrl_train/utils/ppo_utils.py:117",
        formula=k3(10, by_sequence=True),
    ),
    ("far", "slime"): Cell(
        {**SLIME_KL, "kl_loss_type": "low_var_kl"},
        differs=f"{BOUND_WORDS}, with `kl_loss_type=low_var_kl`",
        where="slime/utils/ppo_utils.py:49",
        formula=k3(10),
    ),
    ("sizes", "slime"): Cell(
        {"advantage_estimator": "grpo"},
        differs="the whole batch is one group, once the number of responses isn't prompts times samples",
        where="slime/ray/rollout.py",
        formula=one_group,
    ),
    ("whiten", "skyrl"): Cell(
        {**SKY_GRPO, "advantage_batch_normalize": True},
        differs="the mean that it subtracts is over the padded matrix",
        where="skyrl/train/trainer.py:1451",
        formula=mean_over_padding,
    ),
}
