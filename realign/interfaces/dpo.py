"""DPO: direct preference optimization (arXiv:2305.18290), with IPO's loss (arXiv:2310.12036) as an option.

Reads `input_ids`, `loss_mask` (the responses), `labels` and `ref_logprobs`. Writes nothing. Consecutive responses are
pairs; the response with the larger label is preferred. The loss is the mean over the pairs of the whole batch. Pairs
with an empty response or equal labels are excluded. A prompt may have several pairs, and all pairs have the same
weight. As in the papers, the log-probs of a response are summed. With `length_normalized` they are averaged, as in
arXiv:2405.14734 (which has no reference).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated

import torch
from torch import Tensor

from realign.api import (
    RPC,
    DataflowGraph,
    Keys,
    MicroBatchSpec,
    Model,
    ModelInterface,
    ModelOutput,
    Panel,
    Plan,
    Role,
    SequenceSample,
    Stats,
    masked_mean,
)
from realign.errors import SettingsError
from realign.functional import DPOLoss, dpo_loss, nll_loss, segment_sum
from realign.interfaces.components.pairs import check_pairs, pairs_of, train_on_groups
from realign.interfaces.reference import ReferenceInterface
from realign.settings import Count, NonNegative, Positive, Range


@dataclass
class DPOInterface(ModelInterface):
    """The policy of DPO, trained on pairs of responses."""

    n_minibatches: Count = 1
    """Optimizer steps per batch of prompts."""
    kind: DPOLoss = DPOLoss.sigmoid
    """Loss function: sigmoid (DPO) or ipo."""
    beta: Positive = 0.1
    """Strength of the regularization toward the reference; smaller values allow larger deviations."""
    label_smoothing: Annotated[float, Range(ge=0, lt=0.5)] = 0.0
    """Assumed probability that a label is wrong, below 0.5 (conservative DPO; kind=sigmoid)."""
    length_normalized: bool = False
    """Divide the log-ratio of a response by its length in tokens."""
    temperature: Annotated[float, Range(ge=0.01, lt=math.inf)] = 1.0
    """Temperature of all log-probs, which divides the logits. Must equal the reference's; this is checked at launch."""
    sft_coef: NonNegative = 0.0
    """Weight of the negative log-likelihood of the chosen response, averaged over its tokens (arXiv:2404.19733)."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.label_smoothing and self.kind is DPOLoss.ipo:
            raise SettingsError(
                f"label_smoothing={self.label_smoothing:g}: has no effect with kind=ipo. Set kind=sigmoid"
            )

    def keys(self, method: str) -> Keys:
        """See `ModelInterface.keys`."""
        needs = dict.fromkeys(("input_ids", "loss_mask", "labels", "ref_logprobs"), "")
        return Keys(needs=needs) if method == "train_step" else Keys()

    def outputs(self) -> frozenset[str]:
        """See `ModelInterface.outputs`."""
        return frozenset({"logprobs"})

    def roles(self) -> Mapping[str, Role]:
        """See `ModelInterface.roles`: the reference policy."""
        return {"ref": Role(ReferenceInterface(temperature=self.temperature))}

    def plan(self) -> Plan:
        """See `ModelInterface.plan`."""
        return Plan(n_minibatches=self.n_minibatches, temperature=self.temperature, temperature_setting="temperature")

    def headline(self) -> tuple[str, ...]:
        """See `ModelInterface.headline`."""
        return ("loss", "rewards/accuracy", "rewards/margin")

    def panels(self) -> tuple[Panel, ...]:
        """See `ModelInterface.panels`."""
        return (
            Panel("accuracy on preferences", {"rewards/accuracy": "DPO, training batch"}),
            Panel("margin of implicit rewards", {"rewards/margin": "training batch"}),
        )

    def train_step(self, model: Model, data: SequenceSample, mb_spec: MicroBatchSpec) -> Stats:
        """Take `n_minibatches` optimizer steps over the batch, in a new random order; pairs stay together.

        Raises:
            ValueError: a prompt has an odd number of responses.
        """
        check_pairs(data)
        return train_on_groups(model, data, mb_spec, self.n_minibatches, self.loss, self.loss_weight)

    def loss(self, output: ModelOutput, minibatch: SequenceSample) -> tuple[Tensor, Stats]:
        """Sum the preference loss over pairs, plus the weighted SFT loss of the chosen responses if `sft_coef` > 0."""
        mask_T, cu_seqlens = minibatch["loss_mask"], minibatch.cu_seqlens()
        pairs = pairs_of(minibatch)
        logprobs_T = output.logprobs(temperature=self.temperature, where_T=mask_T)
        tokens_S = segment_sum(mask_T, cu_seqlens).clamp(min=1)
        policy_S = segment_sum(torch.where(mask_T, logprobs_T, 0), cu_seqlens)
        log_ratio_S = policy_S - segment_sum(torch.where(mask_T, minibatch["ref_logprobs"], 0), cu_seqlens)
        if self.length_normalized:
            log_ratio_S = log_ratio_S / tokens_S
        chosen_P, rejected_P = log_ratio_S[pairs.chosen_P], log_ratio_S[pairs.rejected_P]
        loss_P = dpo_loss(chosen_P, rejected_P, beta=self.beta, kind=self.kind, label_smoothing=self.label_smoothing)
        counts_P = pairs.counts_P
        stats: Stats = {
            "preference_loss": masked_mean(loss_P, counts_P),
            "rewards/chosen": masked_mean(self.beta * chosen_P, counts_P),
            "rewards/rejected": masked_mean(self.beta * rejected_P, counts_P),
            "rewards/margin": masked_mean(self.beta * (chosen_P - rejected_P), counts_P),
            "rewards/accuracy": masked_mean(chosen_P > rejected_P, counts_P),
            "logprobs/chosen": masked_mean(policy_S[pairs.chosen_P], counts_P),
            "logprobs/rejected": masked_mean(policy_S[pairs.rejected_P], counts_P),
        }
        if self.sft_coef:
            nll_P = (segment_sum(nll_loss(logprobs_T, mask_T), cu_seqlens) / tokens_S)[pairs.chosen_P]
            loss_P = loss_P + self.sft_coef * nll_P
            stats["nll"] = masked_mean(nll_P, counts_P)
        return torch.where(counts_P, loss_P, 0).sum(), stats

    def loss_weight(self, data: SequenceSample) -> Tensor:
        """Return the number of pairs in the loss."""
        return pairs_of(data).counts_P.sum()

    def describe(self, batch_prompts: int) -> dict[str, str]:
        """See `ModelInterface.describe`."""
        smoothed = f", labels smoothed by {self.label_smoothing:g}" if self.label_smoothing else ""
        sft = f" + {self.sft_coef:g} x likelihood of the chosen" if self.sft_coef else ""
        ratio = "mean over tokens" if self.length_normalized else "sum over tokens"
        return {
            "loss": f"{self.kind.value}, beta {self.beta:g}{smoothed}, log-ratio: {ratio}{sft}; mean over pairs",
        }


def dataflow() -> DataflowGraph:
    """Build the graph: the frozen reference scores the responses, then the actor trains on the pairs."""
    scored = ("input_ids", "loss_mask")
    return DataflowGraph(
        (
            RPC("ref_inf", "ref", "inference", scored, outputs=("ref_logprobs",), rename={"logprobs": "ref_logprobs"}),
            RPC("actor_train", "actor", "train_step", inputs=(*scored, "labels", "ref_logprobs")),
        ),
        dataset_keys=("input_ids", "prompt_mask", "loss_mask", "labels", "margins"),
    )
