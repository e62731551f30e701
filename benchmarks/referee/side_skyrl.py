"""SkyRL's losses: `ppo_utils`, called as its trainer and its policy worker call them."""

from __future__ import annotations

import typing
from types import SimpleNamespace
from typing import Any

import numpy as np
import typing_extensions
from torch import Tensor

PACKAGES = ("skyrl", "jaxtyping", "wadler_lindig", "loguru")
STUBS = ("skyrl_gym", "torchdata", "httpx", "aiohttp")
DECORATORS: tuple[str, ...] = ()
typing.TypedDict = typing_extensions.TypedDict  # type: ignore[misc,assignment]  # for pydantic on Python 3.11


def run(kind: str, batch: dict[str, Tensor], new: Tensor, settings: dict[str, Any]) -> Tensor:
    """Return the loss, or the advantages [S, R]."""
    from skyrl.backends.skyrl_train.utils import ppo_utils
    from skyrl.backends.skyrl_train.utils.torch_utils import masked_mean
    from skyrl.train.config import AlgorithmConfig

    known = {key: value for key, value in settings.items() if "." not in key}
    config = AlgorithmConfig(**known)
    for key, value in settings.items():
        if "." in key:
            part, _, name = key.partition(".")
            setattr(getattr(config, part), name, value)
    mask = batch["mask"].float()
    if kind == "value":
        return ppo_utils.ppo_critic_loss(new, batch["old_values"], batch["returns"], config, mask)[0]
    advantages = advantages_of(batch, mask, config)
    if kind == "advantages":
        return advantages * mask
    scaled = ppo_utils.apply_loss_reduction_to_advantages_minibatch(
        advantages, mask, config.loss_reduction, len(mask), config.max_seq_len
    )
    loss = ppo_utils.PolicyLossRegistry.get(config.policy_loss_type)(new, batch["old"], scaled, config, mask)[0]
    if config.use_kl_loss:  # as in workers/worker.py
        kl = ppo_utils.compute_approx_kl(new, batch["ref"], mask, config.kl_estimator_type)
        loss = loss + config.kl_loss_coef * masked_mean(kl, mask, dim=-1).mean()
    return loss


def advantages_of(batch: dict[str, Tensor], mask: Tensor, config: Any) -> Tensor:
    """Return advantages [S, R] from scores at the last token, as `trainer.py` does."""
    from skyrl.backends.skyrl_train.utils import ppo_utils

    last = batch["exists"].sum(-1, keepdim=True) - 1
    rewards = mask.new_zeros(mask.shape).scatter_(1, last, batch["rewards"][:, None])
    exists = batch["exists"].float()
    if config.use_kl_in_reward:
        kl = ppo_utils.compute_approx_kl(batch["old"], batch["ref"], mask, config.kl_estimator_type)
        rewards = rewards - kl * config.kl_loss_coef
    advantages = ppo_utils.compute_advantages_and_returns(
        token_level_rewards=rewards,
        response_mask=exists,
        index=np.array(batch["group"]),
        adv_estimator=config.advantage_estimator,
        config=config,
        values=batch["values"],
        gamma=config.gamma,
        lambd=config.lambd,
        grpo_norm_by_std=config.grpo_norm_by_std,
    )[0]
    if config.advantage_batch_normalize:
        from skyrl.train.trainer import RayPPOTrainer

        config.loss_reduction, reduction = "token_mean", config.loss_reduction
        stub = SimpleNamespace(
            cfg=SimpleNamespace(trainer=SimpleNamespace(algorithm=config, micro_train_batch_size_per_gpu=1))
        )
        data = Rows({"advantages": advantages, "response_mask": exists, "loss_mask": mask})
        advantages = RayPPOTrainer._normalize_advantages(stub, data, [(0, len(mask))])["advantages"] * mask.sum()
        config.loss_reduction = reduction
    return advantages


class Rows(dict[str, Tensor]):
    """A batch whose slices are slices of its tensors."""

    def __getitem__(self, key: Any) -> Any:
        return Rows({k: x[key] for k, x in self.items()}) if isinstance(key, slice) else super().__getitem__(key)
