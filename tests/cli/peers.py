"""What the settings of other tools mean, read from their sources: a second opinion on the rules of `realign import`.

`peer_defaults.yaml` has the defaults that their own config classes declare, by version. Nothing here reads
`realign/config/imports`. `meaning` says what a config of a tool does, and `meaning_of_experiment` what an experiment of
realign does, in the same words, so that a test can compare the two.
"""

from __future__ import annotations

import math
from collections import ChainMap
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from realign.config.aliases import read_own_yaml
from realign.interfaces.components import GroupRelative, Normalization
from realign.runtime import Experiment

DEFAULTS = read_own_yaml(Path(__file__).with_name("peer_defaults.yaml"))
Meaning = dict[str, Any]
_AGGREGATIONS = {"token-mean": "TokenMean", "seq-mean-token-mean": "SeqMeanTokenMean"}
_AGGREGATIONS |= {"seq-mean-token-sum": "SeqMeanTokenSum"}


def norm(mean: str | None, std: str | None, leave_one_out: bool, unbiased: bool, eps: float) -> tuple[Any, ...] | None:
    """Describe a normalization by what has an effect."""
    if {mean, std} <= {None, "none"}:
        return None
    scale = (std, unbiased, eps) if std not in (None, "none") else None
    return (mean or "none", leave_one_out, scale)


def meaning_of_experiment(experiment: Experiment) -> Meaning:
    """Return what an experiment does."""
    actor = experiment.interfaces.get("actor") or experiment.interfaces["reward"]
    spec = experiment.models.get("actor") or experiment.models["reward"]
    optimizer = spec.optimizer
    found: Meaning = {
        "lr": optimizer.lr,
        "weight_decay": optimizer.weight_decay,
        "betas": tuple(optimizer.betas),
        "grad_clip": optimizer.grad_clip,
        "batch": experiment.batch_prompts,
    }
    if not hasattr(actor, "objective"):
        kind = {"beta": actor.beta, "loss": actor.kind.name} if hasattr(actor, "beta") else {}
        return found | kind

    def of(value: Normalization) -> tuple[Any, ...] | None:
        return norm(value.mean.name, value.std.name, value.leave_one_out, value.unbiased, value.eps)

    objective, kl, grouped = actor.objective, actor.kl, isinstance(actor.advantage, GroupRelative)
    loss = {name: getattr(objective, name, None) for name in ("low", "high", "dual", "tau_pos", "tau_neg")}
    found |= {
        "objective": (type(objective).__name__, {name: x for name, x in loss.items() if x is not None}),
        "kl": None if kl.place.name == "none" else (kl.place.name, kl.coef, kl.estimator and kl.estimator.name),
        "aggregation": type(actor.aggregation).__name__,
        "rewards": of(actor.adv_norm if grouped else actor.advantage.reward_norm),
        "tokens": None if grouped else of(actor.adv_norm),
        "returns": (1.0, 1.0) if grouped else (actor.advantage.gamma, actor.advantage.lam),
        "minibatches": actor.n_minibatches,
        "epochs": actor.epochs,
        "n": actor.generation.n,
        "temperature": actor.generation.temperature,
        "entropy": actor.entropy.coef,
        "correction": None,
    }
    if (correction := actor.correction) is not None:
        weight, rejects = correction.weight, correction.rejection
        rejected = rejects and (rejects.level.name, rejects.floor, rejects.cap, correction.keep_in_divisor)
        found["correction"] = (weight.level.name, weight.floor, weight.cap, rejected)
    found["ratio to"] = "rollout" if correction is None and not actor.recompute else "recomputed"
    if "critic" in experiment.interfaces:
        critic, optimizer = experiment.interfaces["critic"], experiment.models["critic"].optimizer
        found["critic"] = (critic.objective.clip, optimizer.lr, optimizer.weight_decay, tuple(optimizer.betas))
        found["critic"] += (optimizer.grad_clip, critic.n_minibatches, critic.epochs)
    return found


def rejecting(level: str, low: float | None, high: float | None, weight: str = "token") -> tuple[Any, ...]:
    """Describe a correction with ratios as weights, that drops tokens or responses outside a range of ratios, and
    counts them in the divisor."""
    return (weight, None, None, (level, low, high, True))


def meaning(tool: str, kind: str, settings: Mapping[str, Any]) -> Meaning:
    """Return what a config of a tool does.

    Args:
        tool: trl, verl, openrlhf or areal.
        kind: rl, or sft, dpo, orpo or reward, which differ in less.
        settings: the config, without the tool's defaults.
    """
    return _TOOLS[tool](kind, ChainMap(dict(settings), DEFAULTS[tool].get(kind, DEFAULTS[tool]["sft"])), settings)


def _verl(kind: str, s: Mapping[str, Any], _: Mapping[str, Any]) -> Meaning:
    prefix = "" if kind == "sft" else "actor_rollout_ref.actor."
    names = {"lr": "lr", "weight_decay": "weight_decay", "betas": "betas", "grad_clip": "clip_grad"}
    found: Meaning = {ours: s[f"{prefix}optim.{theirs}"] for ours, theirs in names.items()}
    found |= {"betas": tuple(found["betas"]), "batch": s["data.train_batch_size"]}
    if kind == "sft":
        return found
    actor = {name.removeprefix(prefix): s[name] for name in s if name.startswith(prefix)}
    estimator, mode = s["algorithm.adv_estimator"], actor["policy_loss.loss_mode"]
    # trainer/ppo/core_algos.py, compute_*_advantage: torch.std, and masked_whiten with 1e-8 under the root
    whitened = norm("batch", "batch", False, True, 1e-8)
    scaled = "group" if s["algorithm.norm_adv_by_std_in_grpo"] else "none"
    rewards, tokens, returns = {
        "grpo": (norm("group", scaled, False, True, 1e-6), None, (1, 1)),
        "rloo": (norm("group", "none", True, True, 0), None, (1, 1)),
        "gpg": (norm("group", "none", False, True, 0), None, (1, 1)),
        "remax": (None, None, (1, 1)),
        "reinforce_plus_plus": (None, whitened, (s["algorithm.gamma"], 1)),
        "gae": (None, whitened, (s["algorithm.gamma"], s["algorithm.lam"])),
    }[estimator]
    clip = {"low": actor["clip_ratio_low"], "high": actor["clip_ratio_high"]}
    objective = {
        "vanilla": ("Clip", clip | {"dual": actor["clip_ratio_c"]}),
        "gspo": ("Gspo", clip),
        # clamp(ratio, 1 - low, 1 + high): a low above 1 is no bound
        "cispo": ("Cispo", {"high": clip["high"]} if clip["low"] > 1 else clip),
        "geo_mean": ("Gmpo", clip),
        "sapo": ("Sapo", {"tau_pos": actor["tau_pos"], "tau_neg": actor["tau_neg"]}),
        "gpg": ("Reinforce", {}),
    }[mode]
    estimators = {"low_var_kl": "k3", "k3": "k3", "kl": "k1", "k1": "k1", "mse": "k2", "k2": "k2"}
    kl = None
    if actor["use_kl_loss"]:
        kl = ("loss", actor["kl_loss_coef"], estimators[actor["kl_loss_type"]])
    elif s["algorithm.use_kl_in_reward"]:
        kl = ("reward", s["algorithm.kl_ctrl.kl_coef"], estimators[s["algorithm.kl_penalty"]])
    found |= {
        "objective": objective,
        "kl": kl,
        # SAPO names this mode itself, and GMPO has one ratio per sequence
        "aggregation": "SeqMeanTokenMean" if mode in ("sapo", "geo_mean") else _AGGREGATIONS[actor["loss_agg_mode"]],
        "rewards": rewards,
        "tokens": tokens,
        "returns": returns,
        # of prompts: ray_trainer.py multiplies the size by rollout.n
        "minibatches": math.ceil(found["batch"] / actor["ppo_mini_batch_size"]),
        "epochs": actor["ppo_epochs"],
        "n": s["actor_rollout_ref.rollout.n"],
        "temperature": s["actor_rollout_ref.rollout.temperature"],
        "entropy": actor["entropy_coeff"],
        "ratio to": "recomputed",  # trainer/ppo/ray_trainer.py: old_log_prob of the actor, unless bypass_mode
    }
    assert not s.get("algorithm.rollout_correction.rollout_is")
    optimizer = tuple(s[f"critic.optim.{name}"] for name in ("lr", "weight_decay", "betas", "clip_grad"))
    steps = (found["minibatches"], found["epochs"])  # critic.yaml takes them from the actor
    assert not {"critic.ppo_mini_batch_size", "critic.ppo_epochs"} & {*s}
    critic = {"critic": (s["critic.cliprange_value"], *_tupled(optimizer), *steps)}
    return found | (critic if estimator == "gae" else {})


def _tupled(values: Iterable[Any]) -> tuple[Any, ...]:
    return tuple(tuple(x) if isinstance(x, list) else x for x in values)


def _openrlhf(kind: str, s: Mapping[str, Any], _: Mapping[str, Any]) -> Meaning:
    prefix = "actor." if kind == "rl" else ""
    found: Meaning = {
        "lr": s[f"{prefix}adam.lr"],
        "weight_decay": s[f"{prefix}adam.weight_decay"],
        "betas": tuple(s[f"{prefix}adam.betas"]),
        "grad_clip": s[f"{prefix}max_norm"],
        "batch": s["rollout.batch_size" if kind == "rl" else "train.batch_size"],
    }
    if kind != "rl":
        return found | ({"beta": s["model.beta"], "loss": "sigmoid"} if kind == "dpo" else {})
    estimator, coef = s["algo.advantage.estimator"], s["algo.kl.init_coef"]
    # trainer/ppo_utils/experience_maker.py: rewards per group, then advantages of tokens over all experiences
    rewards = {
        "rloo": norm("group", "none", True, True, 0),
        "reinforce_baseline": norm("group", "none", False, True, 0),
        "dr_grpo": norm("group", "none", False, True, 0),
        "group_norm": norm("group", "group", False, True, 1e-9),
    }.get(estimator)
    whitened = norm("batch", "none" if s["algo.advantage.no_std_norm"] else "batch", False, False, 1e-8)
    low, high = s["actor.eps_clip_low_high"] or (s["actor.eps_clip"], s["actor.eps_clip"])
    dual = {} if s["actor.dual_clip"] is None else {"dual": s["actor.dual_clip"]}
    gspo = s["actor.policy_loss_type"] == "gspo"
    gamma = s["algo.advantage.gamma"] if estimator in ("gae", "reinforce") else 1
    found |= {
        "objective": ("Gspo" if gspo else "Clip", {"low": low, "high": high} | dual),
        "kl": ("loss" if s["algo.kl.use_loss"] else "reward", coef, s["algo.kl.estimator"]) if coef else None,
        "aggregation": _AGGREGATIONS["seq-mean-token-mean" if gspo else s["actor.loss_agg_mode"]],
        "rewards": rewards,
        "tokens": whitened if estimator in ("gae", "reinforce", "reinforce_baseline") else None,
        "returns": (gamma, s["algo.advantage.lambd"] if estimator == "gae" else 1),
        # train.batch_size counts responses
        "minibatches": math.ceil(found["batch"] * s["rollout.n_samples_per_prompt"] / s["train.batch_size"]),
        "epochs": s["train.max_epochs"],
        "n": s["rollout.n_samples_per_prompt"],
        "temperature": s["rollout.temperature"],
        "entropy": s["actor.entropy_coef"] or 0,
        "correction": None if gspo else _openrlhf_correction(s),
        # models/loss.py, PolicyLoss: with a correction, GSPO takes the log-probs of vLLM as the old ones
        "ratio to": "rollout" if gspo and _openrlhf_correction(s) else "recomputed",
    }
    optimizer = (*(s[f"critic.adam.{name}"] for name in ("lr", "weight_decay", "betas")), s["critic.max_norm"])
    critic = {"critic": (s["critic.value_clip"], *_tupled(optimizer), found["minibatches"], found["epochs"])}
    return found | (critic if estimator == "gae" else {})


def _openrlhf_correction(s: Mapping[str, Any]) -> tuple[Any, ...] | None:
    """Return what PolicyLoss of models/loss.py does with log-probs of vLLM.

    `is_correction_enable` and `is_correction_type` are those of 0.11.0, which the published scripts have, the level,
    mode and gating those of 0.11.2. Both weigh the loss of a token by the ratio of the actor to vLLM, without gradient.
    """
    limits = s["algo.advantage.is_correction_threshold"]
    low, high = limits if len(limits) == 2 else (0, *limits)
    low = low or None  # a ratio is above 0
    level, mode = s["algo.advantage.is_correction_level"], s["algo.advantage.is_correction_mode"]
    if s["algo.advantage.is_correction_enable"]:
        kind = s["algo.advantage.is_correction_type"]
        level, mode = {"tis": ("token", "clip"), "icepop": ("token", "mask"), "seq-mask-tis": ("seq", "mask")}[kind]
    if level == "off":
        return None
    assert s["algo.advantage.is_correction_gating"] == "ratio"
    if mode == "clip":
        return ("token", low, high, None)
    return rejecting("token" if level == "token" else "geometric", low, high)  # exp of the mean log-ratio


def _areal(kind: str, s: Mapping[str, Any], given: Mapping[str, Any]) -> Meaning:
    optimizer = "actor.optimizer."
    found: Meaning = {
        "lr": s[f"{optimizer}lr"],
        "weight_decay": s[f"{optimizer}weight_decay"],
        "betas": (s[f"{optimizer}beta1"], s[f"{optimizer}beta2"]),
        "grad_clip": s[f"{optimizer}gradient_clipping"],
        "batch": s["train_dataset.batch_size"],
    }
    if kind != "rl":
        return found | ({"beta": s["actor.beta"], "loss": "sigmoid"} if kind == "dpo" else {})

    def of(section: str) -> tuple[Any, ...] | None:
        if not any(name.startswith(f"{section}.") for name in given):  # the section is null
            return None
        names = ("mean_level", "std_level", "mean_leave1out", "std_unbiased", "eps")
        return norm(*(s[f"{section}.{name}"] for name in names))

    high = s["actor.eps_clip"] if s["actor.eps_clip_higher"] is None else s["actor.eps_clip_higher"]
    clip = {"low": s["actor.eps_clip"], "high": high}
    clip |= {} if s["actor.c_clip"] is None else {"dual": s["actor.c_clip"]}
    objective = ("Gspo" if s["actor.importance_sampling_level"] == "sequence" else "Clip", clip)
    section = "actor.rejection_sampling"
    rejects = s["actor.use_decoupled_loss"] and any(name.startswith(section) for name in given)
    assert not rejects or s[f"{section}.action"] == "mask"  # which drops tokens, and weighs the others by their ratio
    level = s[f"{section}.level"]
    limits = (s[f"{section}.lower"], s[f"{section}.upper"])
    if s["actor.use_sapo_loss"]:
        objective = ("Sapo", {"tau_pos": s["actor.sapo_tau_pos"], "tau_neg": s["actor.sapo_tau_neg"]})
    found |= {
        "objective": objective,
        "kl": ("reward", s["actor.kl_ctl"], s["actor.kl_estimator"]) if s["actor.kl_ctl"] else None,
        "aggregation": "TokenMean",  # trainer/ppo/actor.py weighs micro-batches by their tokens of the loss
        "rewards": of("actor.reward_norm"),
        "tokens": of("actor.adv_norm"),
        "returns": (s["actor.discount"], s["actor.gae_lambda"]),
        "minibatches": s["actor.ppo_n_minibatches"],
        "epochs": 1,
        "n": s["gconfig.n_samples"],
        "temperature": s["gconfig.temperature"],
        "entropy": 0,
        "correction": rejecting(level, *limits, weight=level) if rejects else None,
        # trainer/ppo/actor.py: prox_logp if it is recomputed, else the log-probs of the servers
        "ratio to": "recomputed" if s["actor.use_decoupled_loss"] or s["actor.recompute_logprob"] else "rollout",
    }
    names = ("lr", "weight_decay", "beta1", "beta2", "gradient_clipping")
    lr, decay, beta1, beta2, norm_limit = (s[f"critic.optimizer.{name}"] for name in names)
    critic = (s["critic.eps_clip"], lr, decay, (beta1, beta2), norm_limit, s["critic.ppo_n_minibatches"], 1)
    return found | ({"critic": critic} if given.get("critic.path") else {})


def _trl(kind: str, s: Mapping[str, Any], _: Mapping[str, Any]) -> Meaning:
    sequences = s["per_device_train_batch_size"] * s["gradient_accumulation_steps"]  # of one process
    found: Meaning = {
        "lr": s["learning_rate"],
        "weight_decay": s["weight_decay"],
        "betas": (s["adam_beta1"], s["adam_beta2"]),
        "grad_clip": s["max_grad_norm"],
        "batch": sequences,
    }
    if kind != "rl":
        loss = {"dpo": "sigmoid", "orpo": "odds_ratio"}.get(kind)
        return found | ({"beta": s["beta"], "loss": loss} if loss else {})
    steps = s["steps_per_generation"] or s["gradient_accumulation_steps"]
    generated = s["generation_batch_size"] or s["per_device_train_batch_size"] * steps
    high = s["epsilon"] if s["epsilon_high"] is None else s["epsilon_high"]
    corrects = s["use_vllm"] and s["vllm_importance_sampling_correction"]
    limits = (s["vllm_importance_sampling_clip_min"], s["vllm_importance_sampling_clip_max"])
    level, _, how = s["vllm_importance_sampling_mode"].partition("_")
    assert not corrects or how == "mask"
    return found | {
        "batch": generated // s["num_generations"],
        "objective": ("Clip", {"low": s["epsilon"], "high": high}),
        "kl": ("loss", s["beta"], "k3") if s["beta"] else None,
        "aggregation": {"dapo": "TokenMean", "grpo": "SeqMeanTokenMean"}[s["loss_type"]],
        "rewards": norm("group", s["scale_rewards"], False, True, 1e-4),
        "tokens": None,
        "returns": (1, 1),
        "minibatches": math.ceil(generated / sequences),
        "epochs": s["num_iterations"],
        "n": s["num_generations"],
        "temperature": s["temperature"],
        "entropy": s["entropy_coef"],
        "correction": rejecting(level, *limits, weight=level) if corrects else None,
    }


_TOOLS = {"verl": _verl, "openrlhf": _openrlhf, "areal": _areal, "trl": _trl}
