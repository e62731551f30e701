"""SFT: supervised fine-tuning, the maximum likelihood of dataset responses.

Reads `input_ids` and `loss_mask` (the tokens to learn, set by the dataset). Writes nothing. The loss is the mean
negative log-likelihood of those tokens over the whole batch, independent of the micro-batch size.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np
from torch import Tensor
from typing_extensions import override

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
    SequenceSample,
    Stats,
    masked_mean,
    merge_stats,
)
from realign.functional import nll_loss
from realign.interfaces.components.aggregation import Aggregation, TokenMean
from realign.settings import Count


@dataclass
class SFTInterface(ModelInterface):
    """Supervised fine-tuning on packed sequences."""

    KEYS: ClassVar = {"train_step": Keys({"input_ids": "", "loss_mask": ""})}
    OUTPUTS = frozenset({"logprobs"})
    PANELS = (Panel("negative log-likelihood (nats per token)", {"nll": "training batch"}),)
    reads_images: ClassVar[bool] = True

    n_minibatches: Count = 1
    """Optimizer steps per batch."""
    aggregation: Aggregation = field(default_factory=TokenMean)
    """How to average the loss over tokens and sequences: token_mean, seq_mean_token_mean, seq_mean_token_sum or
    constant."""

    @override
    def plan(self) -> Plan:
        return Plan(n_minibatches=self.n_minibatches)

    @override
    def headline(self) -> tuple[str, ...]:
        return ("nll",) if isinstance(self.aggregation, TokenMean) else ("loss", "nll")  # equal with token means

    def train_step(self, model: Model, data: SequenceSample, mb_spec: MicroBatchSpec) -> Stats:
        """Take `n_minibatches` optimizer steps over the batch, in a new random order."""
        parts = data.minibatches(self.n_minibatches, np.random.default_rng(model.call_seed("minibatches")))
        return merge_stats(model.engine.train_batch(part, mb_spec, self.loss, self.loss_weight) for part in parts)

    def loss(self, output: ModelOutput, minibatch: SequenceSample) -> tuple[Tensor, Stats]:
        """Return the aggregated sum of negative log-likelihoods (nats), and metrics."""
        mask_T = minibatch["loss_mask"]
        nll_T = nll_loss(output.logprobs(where_T=mask_T), mask_T)
        return self.aggregation.total(nll_T, mask_T, minibatch.cu_seqlens()), {"nll": masked_mean(nll_T, mask_T)}

    def loss_weight(self, data: SequenceSample) -> Tensor:
        """Return the divisor of the loss."""
        return self.aggregation.weight(data["loss_mask"], data.cu_seqlens())

    @override
    def describe(self, batch_prompts: int) -> dict[str, str]:
        return {"loss": f"negative log-likelihood, {self.aggregation.describe()}"}


def dataflow() -> DataflowGraph:
    """Build the graph: one call that trains on the dataset."""
    train = RPC("actor_train", "actor", "train_step", inputs=("input_ids", "loss_mask"))
    return DataflowGraph((train,), dataset_keys=("input_ids", "prompt_mask", "loss_mask"))
