"""KTO: Kahneman-Tversky optimization, from responses that are labeled desirable or undesirable (arXiv:2402.01306).

Training reads `input_ids`, `prompt_mask`, `loss_mask` (the responses), `labels` (positive: desirable), `ref_logprobs`
and `mismatched_ref_logprobs` [S], and writes nothing. Labels need no pairs: a prompt may have any number of responses.

The reward of a response, beta times its log-ratio to the reference, is compared with a baseline: beta times an
estimate of the KL divergence from the reference. The estimate is the mean log-ratio of mismatched pairs, prompts with
responses to other prompts of the batch. It is computed before each optimizer step, over all prompts of the step, so it
does not depend on micro-batches or ranks. It is 0 for a batch of one prompt. Responses without tokens are excluded.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, ClassVar

import numpy as np
import torch
from torch import Tensor
from typing_extensions import override

from realign.api import (
    RPC,
    DataflowGraph,
    Keys,
    Mean,
    MicroBatchSpec,
    Model,
    ModelInterface,
    ModelOutput,
    Panel,
    Plan,
    Role,
    SequenceSample,
    Stats,
    derive_seed,
    masked_mean,
    merge_stats,
)
from realign.functional import segment_sum
from realign.functional.packed import at_least_fp32, check_shapes
from realign.interfaces.components.pairs import has_answer
from realign.interfaces.components.scoring import score_logprobs
from realign.interfaces.reference import ReferenceInterface
from realign.settings import Count, NonNegative, Positive, Range

_RESPONSES = ("input_ids", "prompt_mask", "loss_mask")
_TRAINED = ("input_ids", "loss_mask", "labels", "ref_logprobs")


def kto_baseline(policy_S: Tensor, reference_S: Tensor, valid_S: Tensor) -> Tensor:
    """Estimate the KL divergence from the reference that KTO compares rewards with: a 0-d tensor, at least 0.

    Source: arXiv:2402.01306 (section 4.1). The mean log-ratio of responses to other prompts; without gradient.

    Args:
        policy_S: [S] log-prob of the response to another prompt under the policy (nats).
        reference_S: [S] its log-prob under the reference.
        valid_S: [S] bool, the responses that count. The result is 0 if there are none.
    """
    check_shapes(policy_S, reference_S=reference_S, valid_S=valid_S)
    log_ratio_S = at_least_fp32(policy_S.detach()) - at_least_fp32(reference_S.detach())
    return (torch.where(valid_S, log_ratio_S, 0).sum() / valid_S.sum().clamp(min=1)).clamp(min=0)


def kto_loss(
    log_ratio_S: Tensor,
    desirable_S: Tensor,
    baseline_S: Tensor,
    *,
    beta: float,
    desirable_weight: float,
    undesirable_weight: float,
) -> Tensor:
    """Compute the loss of Kahneman-Tversky optimization: [S].

    Source: arXiv:2402.01306 (eq. 8). With log-ratio h and baseline z, the loss of a desirable response is
    w (1 - sigmoid(beta (h - z))). For an undesirable one, h and z are exchanged.

    Args:
        log_ratio_S: [S] log policy(y) - log reference(y) (nats), differentiable.
        desirable_S: [S] bool.
        baseline_S: [S] result of `kto_baseline`, the same for all responses of an optimizer step.
        beta: coefficient of the implicit KL penalty towards the reference, > 0.
        desirable_weight: weight of desirable responses.
        undesirable_weight: weight of undesirable responses.

    Raises:
        ValueError: `beta` is not positive, or the shapes differ.
    """
    check_shapes(log_ratio_S, desirable_S=desirable_S, baseline_S=baseline_S)
    if not beta > 0:
        raise ValueError(f"beta must be positive, found {beta:g}")
    above_S = beta * (at_least_fp32(log_ratio_S) - baseline_S.detach())
    desirable_S = desirable_S.bool()
    weights = above_S.new_tensor([undesirable_weight, desirable_weight])
    return weights[desirable_S.long()] * torch.sigmoid(torch.where(desirable_S, -above_S, above_S))


def mismatch_responses(data: SequenceSample) -> SequenceSample:
    """Replace each response by a response to another prompt of the batch.

    The prompts form one cycle in an order drawn from their ids, so the result does not depend on their order in the
    batch. Response j of a prompt becomes response j of the next prompt in the cycle, counted modulo its number of
    responses. It is cut where the sequence would be longer than the longest sequence of the batch.

    Args:
        data: a batch with `input_ids`, `prompt_mask` and `loss_mask`.

    Returns:
        A sample of the same ids and numbers of responses, with `input_ids` and `loss_mask`. `loss_mask` is False
        everywhere if the batch has only one prompt.
    """
    if len(data) < 2:
        masked = torch.zeros_like(data["loss_mask"])
        return data.select(["input_ids"]).with_tokens(loss_mask=masked)
    counts, longest = data.lengths["input_ids"].counts.tolist(), int(data.lengths["input_ids"].flat.max())
    starts = [sum(counts[:i]) for i in range(len(data))]
    order = sorted(range(len(data)), key=lambda i: derive_seed(0, "mismatched", str(data.ids[i])))
    following = dict(zip(order, [*order[1:], order[0]], strict=True))
    ids, prompts, trained = (data.sequences(key) for key in ("input_ids", "prompt_mask", "loss_mask"))

    def join(own: int, other: int) -> tuple[Tensor, Tensor]:
        prompt = ids[own][prompts[own]]
        response = (~prompts[other]).nonzero()[: longest - len(prompt), 0]
        return (
            torch.cat([prompt, ids[other][response]]),
            torch.cat([torch.zeros_like(prompt, dtype=torch.bool), trained[other][response]]),
        )

    rows = []
    for i, n in enumerate(counts):
        other = following[i]
        rows.append([join(starts[i] + j, starts[other] + j % counts[other]) for j in range(n)])
    nested = {key: [[pair[k] for pair in row] for row in rows] for k, key in enumerate(("input_ids", "loss_mask"))}
    return SequenceSample.from_sequences(data.ids, nested)


def _response_logprobs(model: Model, data: SequenceSample, mb_spec: MicroBatchSpec, temperature: float) -> Tensor:
    """Return [S] the log-prob of each response under the model, summed over its tokens in `loss_mask`."""
    scored = score_logprobs(model, data, mb_spec, temperature)["logprobs"]
    return segment_sum(torch.where(data["loss_mask"], scored, 0), data.cu_seqlens())


@dataclass
class KTOInterface(ModelInterface):
    """The policy of KTO, trained on labeled responses."""

    KEYS: ClassVar = {"train_step": Keys(dict.fromkeys((*_TRAINED, "prompt_mask", "mismatched_ref_logprobs"), ""))}
    OUTPUTS = frozenset({"logprobs"})
    HEADLINE = ("loss", "rewards/accuracy", "rewards/margin", "kl_baseline")
    PANELS = (
        Panel("accuracy on labels", {"rewards/accuracy": "training batch"}),
        Panel("margin of implicit rewards", {"rewards/margin": "training batch"}),
        Panel("KL to the reference (nats)", {"kl_baseline": "mismatched pairs"}),
    )

    n_minibatches: Count = 1
    """Optimizer steps per batch of prompts."""
    beta: Positive = 0.1
    """How strongly the policy is held to the reference: smaller lets it move farther."""
    desirable_weight: NonNegative = 1.0
    """Weight of desirable responses in the loss."""
    undesirable_weight: NonNegative = 1.0
    """Weight of undesirable responses in the loss. The paper recommends that (weight x number) of desirable responses
    is 1 to 1.5 times that of undesirable ones."""
    temperature: Annotated[float, Range(ge=0.01, lt=math.inf)] = 1.0
    """Divide all logits by this temperature. Must equal the reference's, which the launch checks."""

    @override
    def roles(self) -> Mapping[str, Role]:
        """Return the reference policy."""
        return {"ref": Role(KTOReferenceInterface(temperature=self.temperature))}

    @override
    def plan(self) -> Plan:
        return Plan(n_minibatches=self.n_minibatches, temperature=self.temperature, temperature_setting="temperature")

    def train_step(self, model: Model, data: SequenceSample, mb_spec: MicroBatchSpec) -> Stats:
        """Take `n_minibatches` optimizer steps over the batch, in a new random order."""
        # The same pairs that the reference scored, since `mismatch_responses` depends on the batch alone.
        other = mismatch_responses(data.select(_RESPONSES)).rename(_OTHER)
        data = data.with_data({key: other[key] for key in _OTHER.values()}, lengths=other.lengths[_OTHER["input_ids"]])
        rng = np.random.default_rng(model.call_seed("minibatches"))
        steps = [self._step(model, part, mb_spec) for part in data.minibatches(self.n_minibatches, rng)]
        stats = merge_stats(steps)
        # From merged means: mini-batches contain the two labels in different numbers.
        return stats | _margin(stats)

    def _step(self, model: Model, part: SequenceSample, mb_spec: MicroBatchSpec) -> Stats:
        """Compute the baseline of a mini-batch under the current weights, and take an optimizer step."""
        other = part.select(_OTHER.values()).rename({new: old for old, new in _OTHER.items()})
        policy_S = _response_logprobs(model, other, mb_spec, self.temperature)
        baseline = kto_baseline(policy_S, part["mismatched_ref_logprobs"], has_answer(other))
        # As a key, so that each micro-batch compares with the baseline of the whole step.
        data = part.select(_TRAINED).with_sequences(kl_baseline=baseline.expand(part.n_sequences).contiguous())
        stats = model.engine.train_batch(data, mb_spec, self.loss, self.loss_weight)
        return {**stats, "kl_baseline": Mean(baseline, torch.ones_like(baseline))}

    def loss(self, output: ModelOutput, minibatch: SequenceSample) -> tuple[Tensor, Stats]:
        """Sum the loss over the responses."""
        mask_T, cu_seqlens = minibatch["loss_mask"], minibatch.cu_seqlens()
        counts_S, desirable_S = has_answer(minibatch), minibatch["labels"] > 0
        logprobs_T = output.logprobs(temperature=self.temperature, where_T=mask_T)
        policy_S = segment_sum(torch.where(mask_T, logprobs_T, 0), cu_seqlens)
        log_ratio_S = policy_S - segment_sum(torch.where(mask_T, minibatch["ref_logprobs"], 0), cu_seqlens)
        baseline_S = minibatch["kl_baseline"]
        loss_S = kto_loss(
            log_ratio_S,
            desirable_S,
            baseline_S,
            beta=self.beta,
            desirable_weight=self.desirable_weight,
            undesirable_weight=self.undesirable_weight,
        )
        chosen_S, rejected_S = counts_S & desirable_S, counts_S & ~desirable_S
        right_S = torch.where(desirable_S, log_ratio_S > baseline_S, log_ratio_S < baseline_S)
        stats: Stats = {
            "preference_loss": masked_mean(loss_S, counts_S),
            "rewards/chosen": masked_mean(self.beta * log_ratio_S, chosen_S),
            "rewards/rejected": masked_mean(self.beta * log_ratio_S, rejected_S),
            "rewards/accuracy": masked_mean(right_S, counts_S),
            "logprobs/chosen": masked_mean(policy_S, chosen_S),
            "logprobs/rejected": masked_mean(policy_S, rejected_S),
        }
        return torch.where(counts_S, loss_S, 0).sum(), stats

    def loss_weight(self, data: SequenceSample) -> Tensor:
        """Return the number of responses in the loss."""
        return has_answer(data).sum()

    @override
    def describe(self, batch_prompts: int) -> dict[str, str]:
        weights = f"weights {self.desirable_weight:g} (desirable) and {self.undesirable_weight:g} (undesirable)"
        return {"loss": f"kto, beta {self.beta:g}, {weights}; mean over responses"}


@dataclass
class KTOReferenceInterface(ReferenceInterface):
    """The reference of KTO: it also scores mismatched pairs of prompts and responses."""

    @override
    def keys(self, method: str) -> Keys:
        if method != "inference":
            return Keys()
        return Keys(needs=dict.fromkeys(_RESPONSES, ""), writes=frozenset({"logprobs", "mismatched_ref_logprobs"}))

    def inference(self, model: Model, data: SequenceSample, mb_spec: MicroBatchSpec) -> SequenceSample:
        """Compute `logprobs` [T] of the responses, and `mismatched_ref_logprobs` [S] of responses to other prompts."""
        other_S = _response_logprobs(model, mismatch_responses(data), mb_spec, self.temperature)
        scored = super().inference(model, data, mb_spec)
        return (
            data.with_tokens(logprobs=scored["logprobs"])
            .with_sequences(mismatched_ref_logprobs=other_S)
            .select(("logprobs", "mismatched_ref_logprobs"))
        )


_OTHER = {"input_ids": "mismatched_input_ids", "loss_mask": "mismatched_loss_mask"}
"""Names of the keys of mismatched pairs, which have their own lengths, in a batch."""


def _margin(stats: Stats) -> Stats:
    """Return `rewards/margin`: the difference of the mean rewards of desirable and undesirable responses, if any."""
    means = [stats.get(f"rewards/{name}") for name in ("chosen", "rejected")]
    rewards = [mean.total / mean.weight for mean in means if isinstance(mean, Mean) and mean.weight > 0]
    return {"rewards/margin": Mean(rewards[0] - rewards[1], torch.ones_like(rewards[0]))} if len(rewards) == 2 else {}


def dataflow() -> DataflowGraph:
    """Build the graph: the frozen reference scores the responses and mismatched pairs, then the actor trains."""
    outputs = ("ref_logprobs", "mismatched_ref_logprobs")
    return DataflowGraph(
        (
            RPC("ref_inf", "ref", "inference", _RESPONSES, outputs=outputs, rename={"logprobs": "ref_logprobs"}),
            RPC("actor_train", "actor", "train_step", inputs=(*_RESPONSES, "labels", *outputs)),
        ),
        dataset_keys=(*_RESPONSES, "labels"),
    )
