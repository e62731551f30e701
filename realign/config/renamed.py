"""Config keys of earlier versions, and the keys that replaced them."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

RENAMED: Mapping[str, str] = MappingProxyType(
    {
        "graph.kl": "a KL penalty brings its reference: set interfaces.actor.kl.place=loss or reward",
        "graph.recompute": "interfaces.actor.recompute",
        "graph.critic": "interfaces.actor.critic",
        "graph.greedy_baseline": "set interfaces.actor.reward.baseline=greedy",
        "graph.ptx": "pretraining text follows from interfaces.actor.ptx_coef above 0",
        "graph.dense": "rewards of tokens follow from interfaces.reward.dense (or interfaces.agent.dense)",
        "graph.algorithm": "the graph follows from interfaces.actor; remove it",
        "interfaces.*.clip_high": "interfaces.*.objective.high",
        "interfaces.*.clip_low": "interfaces.*.objective.low",
        "interfaces.*.dual_clip": "interfaces.*.objective.dual",
        "interfaces.*.gamma": "interfaces.*.advantage.gamma",
        "interfaces.*.lam": "interfaces.*.advantage.lam",
        "interfaces.*.reward_norm": "interfaces.*.advantage.reward_norm",
        "interfaces.*.reward.whiten": "interfaces.*.advantage.whiten_rewards",
        "interfaces.*.truncation.bootstrap": "interfaces.*.advantage.bootstrap",
        "interfaces.*.min_group_size": "interfaces.*.advantage.min_group_size",
        "interfaces.*.rescale_degenerate": "interfaces.*.advantage.rescale_degenerate",
        "interfaces.*.tau_pos": "interfaces.*.objective.tau_pos",
        "interfaces.*.tau_neg": "interfaces.*.objective.tau_neg",
        "interfaces.*.aggregation_constant": "interfaces.*.aggregation.tokens",
        "interfaces.*.generation.max_slots": "models.*.sampler.max_slots",
        "interfaces.*.adv_norm.level": "for level=token set interfaces.*.advantage.length_weighted=true",
        "interfaces.*.behaviour_weight": "interfaces.*.correction.weight",
        "interfaces.*.rejection": "interfaces.*.correction.rejection",
        "interfaces.*.denominator": "for denominator=all set interfaces.*.correction.keep_in_divisor=true",
        "models.*.lora": "models.*.trains",
        "models.*.trained_layers": "set models.*.trains=top_layers and its field layers",
        "models.*.head_init": "models.*.head.init",
        "models.*.value_head": "models.*.head.value_head",
        "models.*.vocabulary": "models.*.head.vocabulary",
        "models.*.ema_decay": "models.*.optimizer.ema_decay",
        "models.*.max_nonfinite_in_a_row": "models.*.optimizer.max_nonfinite_in_a_row",
        "runtime.kind": "runtime",
        "rollout.mode": "rollout",
    }
)
"""Old key -> new key. A value that contains a space is an instruction instead of a key. `*` matches one name, which is
the same in both keys. Nested keys are renamed too."""


def renamed(key: str) -> str | None:
    """Return the message about a key of an earlier version; None for any other key."""
    parts = key.split(".")
    for old, new in RENAMED.items():
        pattern = old.split(".")
        pairs = list(zip(pattern, parts, strict=False))
        if len(parts) < len(pattern) or any(name not in ("*", part) for name, part in pairs):
            continue
        for name in (part for name, part in pairs if name == "*"):
            new = new.replace("*", name, 1)
        if " " in new:
            return f"{key} no longer exists: {new}"
        return f"{key} was renamed to {'.'.join([new, *parts[len(pattern) :]])}"
    return None
