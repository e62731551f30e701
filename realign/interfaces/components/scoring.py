"""Compute log-probs of sampled tokens, and select the old log-probs of probability ratios."""

from __future__ import annotations

from torch import Tensor

from realign.api import Keys, MicroBatchSpec, Model, ModelOutput, SequenceSample


def score_logprobs(model: Model, data: SequenceSample, mb_spec: MicroBatchSpec, temperature: float) -> SequenceSample:
    """Return a sample with `logprobs` [T] of the tokens of `loss_mask` under the model, at `temperature`."""

    def post_hook(output: ModelOutput, mb: SequenceSample) -> SequenceSample:
        return mb.with_tokens(logprobs=output.logprobs(temperature=temperature, where_T=mb["loss_mask"]))

    return model.machine.forward(data.select(["input_ids", "loss_mask"]), mb_spec, post_hook)


def scoring_keys() -> Keys:
    """Return the keys of a method that calls `score_logprobs`."""
    return Keys(needs={"input_ids": "", "loss_mask": ""}, writes=frozenset({"logprobs"}))


def old_logprobs(data: SequenceSample) -> Tensor:
    """Return [T] old log-probs of ratios: recomputed ones if the graph provides them, else the sampler's."""
    return data["prox_logprobs"] if "prox_logprobs" in data else data["logprobs"]


__all__ = ["old_logprobs", "score_logprobs", "scoring_keys"]
