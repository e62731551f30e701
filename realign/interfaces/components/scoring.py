"""Compute log-probs of sampled tokens, and select the old log-probs of probability ratios."""

from __future__ import annotations

import torch
from torch import Tensor

from realign.api import Keys, LossStats, MicroBatchSpec, Model, ModelOutput, SequenceSample, masked_max
from realign.api.router_experts import ROUTER_EXPERTS
from realign.api.sampling_mask import SAMPLING_MASK


def forward_inputs(data: SequenceSample) -> SequenceSample:
    """Return the keys of a forward pass over sampled tokens: `input_ids`, `loss_mask`, and what it replays if present.

    A model replays the recorded experts and sampling masks wherever the keys reach it, as it does in the loss.
    """
    replayed = [key for key in (ROUTER_EXPERTS, SAMPLING_MASK) if key in data]
    return data.select(["input_ids", "loss_mask", *replayed])


def score_logprobs(model: Model, data: SequenceSample, mb_spec: MicroBatchSpec, temperature: float) -> SequenceSample:
    """Return a sample with `logprobs` [T] of the tokens of `loss_mask` under the model, at `temperature`."""

    def post_hook(output: ModelOutput, mb: SequenceSample) -> SequenceSample:
        return mb.with_tokens(logprobs=output.logprobs(temperature=temperature, where_T=mb["loss_mask"]))

    return model.engine.forward(forward_inputs(data), mb_spec, post_hook)


def score_distributions(
    model: Model, data: SequenceSample, mb_spec: MicroBatchSpec, temperature: float
) -> SequenceSample:
    """Return `score_logprobs`, and `hidden` [T, H]: the hidden states from which the model predicts these tokens."""

    def post_hook(output: ModelOutput, mb: SequenceSample) -> SequenceSample:
        mask_T = mb["loss_mask"]
        logprobs_T = output.logprobs(temperature=temperature, where_T=mask_T)
        return mb.with_tokens(logprobs=logprobs_T, hidden=output.hidden_states(where_T=mask_T))

    return model.engine.forward(forward_inputs(data), mb_spec, post_hook)


def scoring_keys(*, hidden: bool = False) -> Keys:
    """Return the keys of a method that calls `score_logprobs`, or `score_distributions` with `hidden`."""
    writes = {"logprobs", "hidden"} if hidden else {"logprobs"}
    return Keys({"input_ids": "", "loss_mask": ""}, frozenset({SAMPLING_MASK}), frozenset(writes))


def old_logprobs(data: SequenceSample) -> Tensor:
    """Return [T] old log-probs of ratios: recomputed ones if the graph provides them, else the sampler's."""
    return data["prox_logprobs"] if "prox_logprobs" in data else data["logprobs"]


def first_logprob_diff(
    stats: LossStats, output: ModelOutput, minibatch: SequenceSample, temperature: float
) -> LossStats:
    """Return `first_logprob_diff_max`: the largest |log-prob - old log-prob| of the first mini-batch of a step.

    Before the first update, the current policy is the behavior policy, so the metric must be 0 up to rounding. It is
    computed here if the loss does not report `logprob_diff_max`, such as an overridden loss of a user.
    """
    difference = stats.get("logprob_diff_max")
    if difference is None:
        mask_T = minibatch["loss_mask"]
        with torch.no_grad():
            logprobs_T = output.logprobs(temperature=temperature, where_T=mask_T)
        difference = masked_max((logprobs_T - old_logprobs(minibatch)).abs(), mask_T)
    return {"first_logprob_diff_max": difference}
