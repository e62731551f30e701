"""DPO: direct preference optimisation (arXiv:2305.18290), with IPO's loss (arXiv:2310.12036) by a flag.

Reads `input_ids`, `loss_mask` (the responses), `labels` (of two neighbours the larger one is preferred) and
`ref_logprobs`. Writes nothing. The loss is the mean over the pairs of the whole batch; a pair with an empty response,
or with equal labels, does not count. A prompt may have several pairs, and each weighs the same. As in the papers the
log-probs of a response are summed; `length_normalized` takes their mean instead (arXiv:2405.14734 does, without the
reference).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from realign.api import (
    RPC,
    DataflowGraph,
    MicroBatchSpec,
    Model,
    ModelInterface,
    ModelOutput,
    SequenceSample,
    Stats,
    masked_mean,
    part_sizes,
)
from realign.functional import DPOLoss, dpo_loss, nll_loss, segment_sum
from realign.interfaces.pairs import check_pairs, pairs_of, train_on_groups


@dataclass
class DPOInterface(ModelInterface):
    """The policy of DPO, trained on pairs of responses."""

    n_minibatches: int = 1
    """Optimizer steps per batch of prompts."""
    kind: DPOLoss = DPOLoss.sigmoid
    """sigmoid (DPO) | ipo."""
    beta: float = 0.1
    """Pull to the reference: the smaller, the further the policy may go."""
    label_smoothing: float = 0.0
    """Probability that a label is wrong, below 0.5 (conservative DPO; kind=sigmoid)."""
    length_normalized: bool = False
    """Divide the log-ratio of a response by its number of tokens."""
    temperature: float = 1.0
    """Of every log-prob; must be the reference's, which the launch compares."""
    sft_coef: float = 0.0
    """Weight of the negative log-likelihood of the chosen response, mean over its tokens (arXiv:2404.19733)."""

    def __post_init__(self) -> None:
        checks = {
            "n_minibatches": (self.n_minibatches >= 1, "at least 1"),
            "beta": (self.beta > 0, "positive"),
            "temperature": (self.temperature >= 0.01, "at least 0.01"),
            "label_smoothing": (0 <= self.label_smoothing < 0.5, "in [0, 0.5)"),
            "sft_coef": (self.sft_coef >= 0, "at least 0"),
        }
        for name, (ok, valid) in checks.items():
            if not ok:
                raise ValueError(f"{name} must be {valid}, found {getattr(self, name)}")
        if self.label_smoothing and self.kind is DPOLoss.ipo:
            raise ValueError(f"label_smoothing={self.label_smoothing:g} belongs to kind=sigmoid, but kind is ipo")

    def needed_outputs(self) -> frozenset[str]:
        """Log-probs."""
        return frozenset({"logprobs"})

    def train_step(self, model: Model, data: SequenceSample, mb_spec: MicroBatchSpec) -> Stats:
        """Take `n_minibatches` optimizer steps over the batch, in a fresh order; pairs are never parted.

        Raises:
            ValueError: a prompt has an odd number of responses.
        """
        check_pairs(data)
        return train_on_groups(model, data, mb_spec, self.n_minibatches, self.loss, self.loss_weight)

    def loss(self, output: ModelOutput, minibatch: SequenceSample) -> tuple[Tensor, Stats]:
        """The sum over pairs of the preference loss, plus that of the chosen responses' likelihood where asked for."""
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
        """The number of pairs that count."""
        return pairs_of(data).counts_P.sum()

    def describe(self, batch_prompts: int) -> dict[str, str]:
        """Rows of the table that is shown at launch."""
        smoothed = f", labels smoothed by {self.label_smoothing:g}" if self.label_smoothing else ""
        sft = f" + {self.sft_coef:g} x likelihood of the chosen" if self.sft_coef else ""
        ratio = "mean over tokens" if self.length_normalized else "sum over tokens"
        return {
            "optimizer steps per step": str(self.n_minibatches),
            "prompts per optimizer step": part_sizes(batch_prompts, self.n_minibatches),
            "loss": f"{self.kind.value}, beta {self.beta:g}{smoothed}, log-ratio: {ratio}{sft}; mean over pairs",
        }


def dataflow() -> DataflowGraph:
    """The frozen reference scores the responses, then the actor trains on the pairs."""
    scored = ("input_ids", "loss_mask")
    return DataflowGraph(
        (
            RPC("ref_inf", "ref", "inference", scored, outputs=("ref_logprobs",), rename={"logprobs": "ref_logprobs"}),
            RPC("actor_train", "actor", "train_step", inputs=(*scored, "labels", "ref_logprobs")),
        ),
        dataset_keys=("input_ids", "prompt_mask", "loss_mask", "labels", "margins"),
    )
