"""Keys of earlier versions, with the keys that replaced them."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

RENAMED: Mapping[str, str] = MappingProxyType(
    {
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
        "interfaces.*.adv_norm.level": "for level=token set interfaces.*.advantage.length_weighted=true",
        "interfaces.*.behaviour_weight": "interfaces.*.correction.weight",
        "interfaces.*.rejection": "interfaces.*.correction.rejection",
        "interfaces.*.denominator": "for denominator=all set interfaces.*.correction.keep_in_divisor=true",
    }
)
"""Old key -> its new key, or, if that has a space, what to do instead. `*` stands for one name, the same on both sides.
Keys below an old key move with it."""


def renamed(key: str) -> str | None:
    """The message about a key that an earlier version had; None for any other key."""
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
