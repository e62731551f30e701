"""The reference policy, and how the log-probs of sampled tokens are asked of a model and told apart."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated

from torch import Tensor

from realign.api import (
    Keys,
    MicroBatchSpec,
    Model,
    ModelInterface,
    ModelOutput,
    Plan,
    SequenceSample,
    Weights,
)
from realign.settings import Range


@dataclass
class ReferenceInterface(ModelInterface):
    """A frozen policy that only scores: `logprobs` of sampled tokens, at the sampler's temperature."""

    temperature: Annotated[float, Range(ge=0.01, lt=math.inf)] = 1.0
    """Must be the sampler's; the launch compares them."""

    def keys(self, method: str) -> Keys:
        """See `ModelInterface.keys`."""
        return scoring_keys() if method == "inference" else Keys()

    def outputs(self) -> frozenset[str]:
        """See `ModelInterface.outputs`."""
        return frozenset({"logprobs"})

    def plan(self) -> Plan:
        """See `ModelInterface.plan`."""
        return Plan(temperature=self.temperature, temperature_setting="temperature", weights=Weights.frozen)

    def inference(self, model: Model, data: SequenceSample, mb_spec: MicroBatchSpec) -> SequenceSample:
        """`logprobs` [T] of the sampled tokens."""
        return score_logprobs(model, data, mb_spec, self.temperature)


def scoring_keys() -> Keys:
    """Return the keys of a method that calls `score_logprobs`."""
    return Keys(needs={"input_ids": "", "loss_mask": ""}, writes=frozenset({"logprobs"}))


def score_logprobs(model: Model, data: SequenceSample, mb_spec: MicroBatchSpec, temperature: float) -> SequenceSample:
    """A sample with `logprobs` [T] of the tokens of `loss_mask` under the model, at `temperature`."""

    def post_hook(output: ModelOutput, mb: SequenceSample) -> SequenceSample:
        return mb.with_tokens(logprobs=output.logprobs(temperature=temperature, where_T=mb["loss_mask"]))

    return model.machine.forward(data.select(["input_ids", "loss_mask"]), mb_spec, post_hook)


def old_logprobs(data: SequenceSample) -> Tensor:
    """[T] log-probs that ratios are taken against: the recomputed ones where the graph has them, else behaviour."""
    return data["prox_logprobs"] if "prox_logprobs" in data else data["logprobs"]


__all__ = ["ReferenceInterface", "old_logprobs", "score_logprobs", "scoring_keys"]
