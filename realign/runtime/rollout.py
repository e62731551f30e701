"""When a step's responses are sampled: within it, or ahead of it (config node `rollout`)."""

from __future__ import annotations

from dataclasses import dataclass, fields
from enum import StrEnum

from realign.settings import NonNegativeInt, Settings


class RolloutMode(StrEnum):
    """When responses are sampled."""

    sync = "sync"
    """Within the step that trains on them, by the present policy."""
    async_ = "async"
    """Ahead of it, while earlier ones are trained on, by a copy of the policy that may be some versions older."""


class OnUpdate(StrEnum):
    """What becomes of the keys and values of responses that are being sampled when the weights change."""

    recompute = "recompute"
    """They are computed anew under the new weights."""
    keep = "keep"
    """They stay: what was read under the old weights is not read again."""


@dataclass
class RolloutSpec(Settings):
    """How far sampling may run ahead of training."""

    mode: RolloutMode = RolloutMode.sync
    """sync | async."""
    max_staleness: NonNegativeInt = 1
    """With mode=async: training steps that may lie between the beginning of a response and the step that trains on it;
    0 computes what mode=sync computes. See `realign.runtime.staleness`."""
    on_update: OnUpdate = OnUpdate.recompute
    """With mode=async: recompute | keep, for responses under way when the weights change."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.mode is RolloutMode.sync:
            for setting in fields(self):
                value = getattr(self, setting.name)
                if setting.name != "mode" and value != setting.default:
                    raise ValueError(
                        f"{setting.name}={value} has no effect with mode=sync; choose rollout=async, or leave it out"
                    )

    def describe(self) -> str:
        """When responses are sampled, for people."""
        if self.mode is RolloutMode.sync:
            return "in the step that trains on them"
        if not self.max_staleness:
            return "by a copy of the policy, in the step that trains on them"
        then = {OnUpdate.recompute: "are computed anew", OnUpdate.keep: "stay"}[self.on_update]
        return (
            f"ahead of training, begun at most {self.max_staleness} versions before the step; keys and values {then} "
            "when the weights change"
        )
