"""The reference policy: log-probs of sampled tokens under frozen weights."""

from __future__ import annotations

from dataclasses import dataclass

from realign.api import MicroBatchSpec, Model, ModelInterface, SequenceSample
from realign.interfaces.components.scoring import score_logprobs


@dataclass
class ReferenceInterface(ModelInterface):
    """A frozen policy that only scores: `logprobs` of sampled tokens, at the sampler's temperature."""

    temperature: float = 1.0
    """Must be the sampler's; the launch compares them."""

    def needed_outputs(self) -> frozenset[str]:
        """Log-probs."""
        return frozenset({"logprobs"})

    def inference(self, model: Model, data: SequenceSample, mb_spec: MicroBatchSpec) -> SequenceSample:
        """`logprobs` [T] of the sampled tokens."""
        return score_logprobs(model, data, mb_spec, self.temperature)


__all__ = ["ReferenceInterface"]
