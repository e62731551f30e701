"""The reference policy, and how the log-probs of sampled tokens are asked of a model and told apart."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from realign.api import MicroBatchSpec, Model, ModelInterface, ModelOutput, SequenceSample


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


def score_logprobs(model: Model, data: SequenceSample, mb_spec: MicroBatchSpec, temperature: float) -> SequenceSample:
    """A sample with `logprobs` [T] of the tokens of `loss_mask` under the model, at `temperature`."""

    def post_hook(output: ModelOutput, mb: SequenceSample) -> SequenceSample:
        return mb.with_tokens(logprobs=output.logprobs(temperature=temperature, where_T=mb["loss_mask"]))

    return model.machine.forward(data.select(["input_ids", "loss_mask"]), mb_spec, post_hook)


def old_logprobs(data: SequenceSample) -> Tensor:
    """[T] log-probs that ratios are taken against: the recomputed ones where the graph has them, else behaviour."""
    return data["prox_logprobs"] if "prox_logprobs" in data else data["logprobs"]


__all__ = ["ReferenceInterface", "old_logprobs", "score_logprobs"]
