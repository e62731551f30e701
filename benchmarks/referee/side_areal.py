"""AReaL's losses: `PPOActor._compute_advantages`, `ppo_actor_loss_fn`, `ppo_critic_loss_fn` and the DPO loss."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

PACKAGES = ("areal", "colorlog", "tenacity", "uvloop", "tabulate")
STUBS = (
    "aiofiles",
    "aiohttp",
    "einops",
    "flask",
    "httpx",
    "lark",
    "numba",
    "orjson",
    "pybase64",
    "swanlab",
    "tensorboardX",
    "torchdata",
    "trackio",
    "wandb",
    "werkzeug",
)
DECORATORS = ("numba.njit",)


def run(kind: str, batch: dict[str, Tensor], new: Tensor, settings: dict[str, Any]) -> Tensor:
    """Return the loss, or the advantages [S, R]."""
    from areal.utils.functional import ppo_actor_loss_fn, ppo_critic_loss_fn

    mask = batch["mask"]
    if "actor.kl_ctl" in settings:  # a whole config
        settings = of_config(settings, kind)
    if kind == "value":
        return ppo_critic_loss_fn(new, batch["old_values"], batch["returns"], settings["eps_clip"], mask)[0]
    if kind == "dpo":
        return dpo(batch, new, settings)
    advantages = advantages_of(batch, settings)
    if kind == "advantages":
        return advantages * mask
    return ppo_actor_loss_fn(
        new,
        batch["old"],
        batch["old"],
        advantages,
        settings.get("eps_clip", 0.2),
        mask,
        eps_clip_higher=settings.get("eps_clip_higher"),
        c_clip=settings.get("c_clip"),
        importance_sampling_level=settings.get("importance_sampling_level", "token"),
    )[0]


def of_config(settings: dict[str, Any], kind: str) -> dict[str, Any]:
    """Return the settings of a whole config, whose names have dots."""
    others = ("actor.rejection_sampling.upper", "actor.use_sapo_loss", "actor.use_cispo_loss", "actor.m2_threshold")
    if left_out := [name for name in others if settings[name]]:
        raise ValueError(f"{left_out[0]} is not compared")
    chosen: dict[str, Any] = {}
    for name, value in settings.items():
        section, _, rest = name.removeprefix("actor.").rpartition(".")
        if name.startswith("actor."):
            chosen = chosen | ({section: {**chosen.get(section, {}), rest: value}} if section else {rest: value})
    for norm in ("reward_norm", "adv_norm"):
        if chosen[norm]["mean_level"] == "group" or chosen[norm]["std_level"] == "group":
            chosen[norm]["group_size"] = 4
    with_critic = settings["critic.path"] is not None
    return (
        chosen | {"with_critic": with_critic} | ({"eps_clip": settings["critic.eps_clip"]} if kind == "value" else {})
    )


def advantages_of(batch: dict[str, Tensor], settings: dict[str, Any]) -> Tensor:
    """Run the actor's advantages. AReaL's values at t belong to the state after token t, as its rolled masks do."""
    from areal.api.cli_args import NormConfig, PPOActorConfig
    from areal.trainer.ppo.actor import PPOActor

    names = ("kl_ctl", "kl_estimator", "discount", "gae_lambda", "mask_no_eos_with_zero")
    names += ("reward_scaling", "reward_bias", "reward_clip")
    chosen = {key: settings[key] for key in names if key in settings}
    norms = {key: NormConfig(**settings[key]) for key in ("reward_norm", "adv_norm") if key in settings}
    config = PPOActorConfig(**chosen, **norms)
    # a prompt of one token; and a column after the longest response, unless it is to count as truncated
    room = 0 if settings.get("longest counts as truncated") else 1

    def around(x: Tensor) -> Tensor:
        return torch.nn.functional.pad(x, (1, room))

    data = {
        "input_ids": around(batch["old"]).long(),
        "attention_mask": torch.nn.functional.pad(batch["exists"].long(), (1, room)).index_fill(
            1, torch.tensor([0]), 1
        ),
        "loss_mask": around(batch["mask"].long()),
        "logprobs": around(batch["old"]),
        "ref_logp": torch.nn.functional.pad(batch["ref"], (0, 1 + room)),
        "rewards": batch["rewards"].clone(),
    }
    if settings.get("with_critic", "gae_lambda" in settings):
        data["values"] = torch.nn.functional.pad(batch["values"], (0, 1 + room), value=1.0)
    advantages = PPOActor(config, None)._compute_advantages(data)["advantages"]
    return advantages[:, : batch["mask"].shape[1]]


def dpo(batch: dict[str, Tensor], new: Tensor, settings: dict[str, Any]) -> Tensor:
    """Return the DPO loss of packed pairs; AReaL's log-prob at t belongs to token t + 1."""
    from areal.trainer.dpo.dpo_engine import compute_dpo_loss

    lengths = batch["exists"].sum(-1)
    rows = {"logprobs": new, "ref_logprobs": batch["ref"]}
    packed = {
        key: torch.cat([torch.nn.functional.pad(x[s, : lengths[s]], (0, 1)) for s in range(len(x))])
        for key, x in rows.items()
    }
    masks = [torch.nn.functional.pad(batch["mask"][s, : lengths[s]], (1, 0)) for s in range(len(new))]
    inputs = {
        "cu_seqlens": torch.nn.functional.pad((lengths + 1).cumsum(0), (1, 0)).int(),
        "loss_mask": torch.cat(masks),
        "ref_logprobs": packed["ref_logprobs"],
    }
    kind = settings.get("loss_type", "sigmoid")
    return compute_dpo_loss(packed["logprobs"], None, inputs, beta=settings["beta"], loss_type=kind)
