"""The reference policy or the teacher: log-probs of sampled tokens, and hidden states, under frozen weights."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, ClassVar

from typing_extensions import override

from realign.api import Keys, MicroBatchSpec, Model, ModelInterface, Plan, SequenceSample, Weights
from realign.interfaces.components.scoring import score_distributions, score_logprobs, scoring_keys
from realign.settings import Range


@dataclass
class ReferenceInterface(ModelInterface):
    """A frozen policy that computes `logprobs` of sampled tokens at the sampler's temperature."""

    OUTPUTS = frozenset({"logprobs"})

    reads_images: ClassVar[bool] = True

    temperature: Annotated[float, Range(ge=0.01, lt=math.inf)] = 1.0
    """Sampling temperature, which divides the logits. Must equal the sampler's; this is checked at launch."""
    hidden_states: bool = False
    """Also return the last hidden states, from which a loss computes the distributions over the whole vocabulary
    (kl.full_vocabulary, distillation). They take one number per hidden unit and token of the batch."""

    @override
    def keys(self, method: str) -> Keys:
        return scoring_keys(hidden=self.hidden_states) if method == "inference" else Keys()

    @override
    def plan(self) -> Plan:
        return Plan(temperature=self.temperature, temperature_setting="temperature", weights=Weights.frozen)

    def inference(self, model: Model, data: SequenceSample, mb_spec: MicroBatchSpec) -> SequenceSample:
        """Compute `logprobs` [T] of the sampled tokens, and `hidden` [T, H] with `hidden_states`."""
        if self.hidden_states:
            return score_distributions(model, data, mb_spec, self.temperature)
        return score_logprobs(model, data, mb_spec, self.temperature)


__all__ = ["ReferenceInterface"]
