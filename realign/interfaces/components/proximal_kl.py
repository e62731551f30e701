"""`ProximalKLControl`: the adaptive coefficient of the KL to the policy before the update (arXiv:1707.06347)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch

from realign.api import Max, Mean, MicroBatchSpec, Model, SequenceSample, Stats, masked_mean
from realign.errors import RunError
from realign.functional import KLEstimator, ThresholdKLController, kl_estimate
from realign.interfaces.components.scoring import old_logprobs, score_logprobs


class ProximalKLControl:
    """The coefficient of a KL penalty to the old policy, adapted after the optimizer steps of a rollout batch."""

    def __init__(self, beta: float, target: float) -> None:
        self.controller = ThresholdKLController(beta, target)

    @property
    def coef(self) -> float:
        """The current coefficient."""
        return self.controller.value

    def update(self, model: Model, data: SequenceSample, mb_spec: MicroBatchSpec, temperature: float) -> Stats:
        """Adapt the coefficient to the KL of the updated policy, which one forward pass over the batch measures.

        Args:
            model: the policy after the optimizer steps.
            data: the rollout batch of this rank.
            mb_spec: micro-batches of the forward pass.
            temperature: temperature of the policy.

        Returns:
            Metrics: the KL, and the coefficient before it changes.

        Raises:
            RunError: the KL is not finite.
        """
        mask_T, old_T = data["loss_mask"], old_logprobs(data)
        new_T = score_logprobs(model, data, mb_spec, temperature)["logprobs"]
        found = masked_mean(kl_estimate(old_T, new_T, mask_T, KLEstimator.k3), mask_T)
        stats: Stats = {"proximal_kl": found, "proximal_kl_coef": Max(torch.tensor(self.coef))}
        self._adapt(found, model)
        return stats

    def _adapt(self, found: Mean, model: Model) -> None:
        total, weight = model.machine.reduce(torch.stack([found.total.double(), found.weight.double()])).tolist()
        if not weight:
            return
        if not math.isfinite(kl := total / weight):
            raise RunError(
                f"The KL to the policy before the update is {kl} per token, so the coefficient cannot follow "
                "objective.target. Lower the learning rate, or set objective.target=null"
            )
        self.controller.update(kl)

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the controller."""
        return dict(self.controller.state_dict())

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        self.controller.load_state_dict(state)


__all__ = ["ProximalKLControl"]
