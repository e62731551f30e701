"""OpenRLHF's losses: `PolicyLoss`, `ValueLoss`, `DPOLoss`, `compute_approx_kl` and its experience maker."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from torch import Tensor

PACKAGES = ("openrlhf",)
STUBS = ("deepspeed", "flash_attn", "vllm", "pylatexenc", "aiohttp", "torchdata")
DECORATORS: tuple[str, ...] = ()


def run(kind: str, batch: dict[str, Tensor], new: Tensor, settings: dict[str, Any]) -> Tensor:
    """Return the loss, or the advantages [S, R]."""
    from openrlhf.models.loss import DPOLoss, PolicyLoss, ValueLoss, aggregate_loss
    from openrlhf.models.utils import compute_approx_kl

    mask = batch["mask"].float()
    token_level = settings.get("actor.loss_agg_mode", "token-mean") == "token-mean"
    if kind == "value":
        clip = settings["critic.value_clip"]
        return ValueLoss(clip)(new, batch["old_values"], batch["returns"], action_mask=mask)
    if kind == "dpo":
        sums = [(x * mask).sum(-1) for x in (new, batch["ref"])]
        chosen, rejected = (slice(0, None, 2), slice(1, None, 2))
        return DPOLoss(settings["beta"], settings.get("label_smoothing", 0.0), settings.get("ipo", False))(
            sums[0][chosen], sums[0][rejected], sums[1][chosen], sums[1][rejected]
        )[0]
    advantages = advantages_of(batch, mask, settings)
    if kind == "advantages":
        return advantages * mask
    low, high = settings.get("actor.eps_clip_low_high") or [settings.get("actor.eps_clip", 0.2)] * 2
    policy = PolicyLoss(
        low,
        high,
        settings.get("actor.dual_clip"),
        token_level,
        policy_loss_type=settings.get("actor.policy_loss_type", "ppo"),
    )
    loss = policy(new, batch["old"], advantages, action_mask=mask)[0]
    if settings.get("algo.kl.use_loss"):  # as in trainer/ray/ppo_actor.py
        kl = compute_approx_kl(
            new, batch["ref"], log_probs_old=batch["old"], kl_estimator=settings["algo.kl.estimator"]
        )
        loss = loss + settings["algo.kl.init_coef"] * aggregate_loss(kl, mask, token_level_loss=token_level)
    return loss


def advantages_of(batch: dict[str, Tensor], mask: Tensor, settings: dict[str, Any]) -> Tensor:
    """Run the experience maker on one experience: shaping, advantages, normalization."""
    from openrlhf.models.utils import compute_approx_kl
    from openrlhf.trainer.ppo_utils.experience import Experience
    from openrlhf.trainer.ppo_utils.experience_maker import RemoteExperienceMaker

    if settings["algo.advantage.estimator"] != "gae":
        assert len(set(batch["group"].bincount().tolist())) == 1, "OpenRLHF needs groups of one size"
    args = SimpleNamespace(
        algo=SimpleNamespace(
            advantage=SimpleNamespace(
                estimator=settings["algo.advantage.estimator"],
                gamma=settings.get("algo.advantage.gamma", 1.0),
                lambd=settings.get("algo.advantage.lambd", 1.0),
                no_std_norm=settings.get("algo.advantage.no_std_norm", False),
            ),
        ),
        rollout=SimpleNamespace(
            n_samples_per_prompt=1
            if settings["algo.advantage.estimator"] == "gae"
            else int(batch["group"].bincount()[0])
        ),
        reward=SimpleNamespace(clip_range=None, overlong_buffer_len=None, stop_properly_penalty_coef=None),
    )
    maker = object.__new__(RemoteExperienceMaker)
    maker.strategy, maker.args, maker.advantage_estimator = (
        SimpleNamespace(args=args),
        args,
        settings["algo.advantage.estimator"],
    )
    maker.kl_ctl = SimpleNamespace(value=0.0 if settings.get("algo.kl.use_loss") else settings["algo.kl.init_coef"])
    kl = compute_approx_kl(batch["old"], batch["ref"], kl_estimator=settings.get("algo.kl.estimator", "k1"))
    experience = Experience(
        index=list(range(len(mask))),
        rewards=batch["rewards"].clone(),
        kl=kl * mask,
        action_mask=mask,
        values=batch.get("values"),
        info={},
    )
    return maker.compute_advantages_and_returns([experience])[0].advantages
