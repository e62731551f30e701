"""verl's losses: `core_algos`, called as `workers/utils/losses.py` and `trainer/ppo/ray_trainer.py` call them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
from torch import Tensor

PACKAGES = ("verl",)
STUBS = ("tensordict", "codetiming", "orjson", "ray")
DECORATORS: tuple[str, ...] = ()


def run(kind: str, batch: dict[str, Tensor], new: Tensor, settings: dict[str, Any]) -> Tensor:
    """Return the loss, or the advantages [S, R]."""
    from verl.trainer.ppo import core_algos
    from verl.workers.config import ActorConfig

    settings = {name.removeprefix("actor_rollout_ref.actor."): value for name, value in settings.items()}
    mask = batch["mask"].float()
    # the trainer passes the number of all responses of a mini-batch, whether or not they train
    divisors = {"dp_size": 1, "batch_num_tokens": mask.sum(), "global_batch_size": len(mask)}
    if kind == "value":
        mode, clip = settings.get("loss_agg_mode", "token-mean"), settings["critic.cliprange_value"]
        return core_algos.compute_value_loss(new, batch["returns"], batch["old_values"], mask, clip, mode, **divisors)[
            0
        ]
    advantages = advantages_of(batch, mask, settings)
    if kind == "advantages":
        return advantages
    config = object.__new__(ActorConfig)  # its checks need a model and an optimizer
    values = {"clip_ratio": 0.2, "clip_ratio_low": 0.2, "clip_ratio_high": 0.2, "clip_ratio_c": 3.0}
    values |= {key: settings[key] for key in values if key in settings}
    for key, value in values.items():
        object.__setattr__(config, key, value)
    divisors["loss_scale_factor"] = settings.get("loss_scale_factor")
    object.__setattr__(config, "global_batch_info", divisors)
    mode = settings.get("loss_agg_mode", "token-mean")
    loss_fn = core_algos.get_policy_loss_fn(settings.get("policy_loss.loss_mode", "vanilla"))
    loss = loss_fn(batch["old"], new, advantages, mask, mode, config, None)[0]
    if settings.get("use_kl_loss"):
        kl = core_algos.kl_penalty(new, batch["ref"], settings["kl_loss_type"])
        loss = loss + settings["kl_loss_coef"] * core_algos.agg_loss(kl, mask, mode, **divisors)
    return loss


def advantages_of(batch: dict[str, Tensor], mask: Tensor, settings: dict[str, Any]) -> Tensor:
    """Return advantages [S, R] from scores at the last token, and a KL in the reward if set."""
    from verl.trainer.ppo import core_algos

    last = batch["exists"].sum(-1, keepdim=True) - 1
    rewards = mask.new_zeros(mask.shape).scatter_(1, last, batch["rewards"][:, None])
    if settings.get("algorithm.use_kl_in_reward"):
        kl = core_algos.kl_penalty(batch["old"], batch["ref"], settings["algorithm.kl_penalty"]) * mask
        rewards = rewards - settings["algorithm.kl_ctrl.kl_coef"] * kl
    if settings["algorithm.adv_estimator"] == "gae":
        rates = settings["algorithm.gamma"], settings["algorithm.lam"]
        return core_algos.compute_gae_advantage_return(rewards, batch["values"], mask, *rates)[0]
    if settings["algorithm.adv_estimator"] == "gdpo":
        config = {name.removeprefix("algorithm."): value for name, value in settings.items()}
        return core_algos.compute_gdpo_outcome_advantage(
            rewards,
            mask,
            np.array(batch["group"]),
            config=config,
            non_tensor_batch={name: batch["named"][:, k].numpy() for k, name in enumerate("ab")},
            batch={"prompts": mask.new_zeros(len(mask), 0), "attention_mask": batch["exists"]},
        )[0]
    return core_algos.compute_grpo_outcome_advantage(
        rewards,
        mask,
        np.array(batch["group"]),
        norm_adv_by_std_in_grpo=settings.get("algorithm.norm_adv_by_std_in_grpo", True),
        config=SimpleNamespace(),
    )[0]
