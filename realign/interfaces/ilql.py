"""ILQL: implicit language Q-learning, offline RL on responses with rewards (arXiv:2206.11871).

Reads `input_ids`, `loss_mask` (the responses) and `rewards` [S], and writes nothing. The action at token t is the
token, and the state is everything before it. Q heads, a value head and the policy share one trunk and one loss:

- Q(s_t, a_t) learns r_t + gamma * V(s_{t+1}). The reward is at the last token of the response, after which V is 0;
- V(s_t) learns the `tau` expectile of the smaller target value min_k Q_target_k(s_t, a_t);
- the conservative (CQL) term is the negative log-likelihood of the token under softmax(Q_k);
- the policy learns the tokens, each with weight exp(awac_beta * (min_k Q_target_k - V)) (AWAC).

The target heads follow the Q heads after each optimizer step (`head.value_head.q_heads.target_rate` of the model).
`GenerationConfig.advantage_scale` samples from log pi + beta * (min_k Q_target_k - V). Responses without a reward (NaN)
are excluded. A response that was cut at a length limit counts as finished.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Annotated, ClassVar

import numpy as np
import torch
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
from realign.functional import broadcast_to_tokens, gae, nll_loss, token_rewards
from realign.functional.packed import at_least_fp32, check_shapes
from realign.interfaces.components.aggregation import Aggregation, TokenMean
from realign.settings import Count, Fraction, NonNegative, Positive, Range

_TRAINED = ("input_ids", "loss_mask", "rewards")


def expectile_loss(values_T: Tensor, returns_T: Tensor, mask_T: Tensor, *, tau: float) -> Tensor:
    """Compute |tau - 1(return < value)| * (return - value)^2, minimal at the `tau` expectile of the returns: [T].

    Source: implicit Q-learning, arXiv:2110.06169 (eq. 5).

    Args:
        values_T: [T] values, differentiable.
        returns_T: [T] regression targets.
        mask_T: [T] bool.
        tau: the expectile, in (0, 1): 0.5 is the mean, and values tend to the maximum as tau tends to 1.

    Raises:
        ValueError: a shape differs from the mask's, or `tau` is out of range.
    """
    check_shapes(mask_T, values_T=values_T, returns_T=returns_T, mask_T=mask_T)
    if not 0 < tau < 1:
        raise ValueError(f"tau must be in (0, 1), found {tau}")
    error_T = torch.where(mask_T, at_least_fp32(returns_T.detach()) - at_least_fp32(values_T), 0)
    return torch.full_like(error_T, tau).masked_fill(error_T < 0, 1 - tau) * error_T.square()


@dataclass
class ILQLInterface(ModelInterface):
    """The policy and action values of ILQL, trained on responses with rewards."""

    KEYS: ClassVar = {"train_step": Keys(dict.fromkeys(_TRAINED, ""))}
    OUTPUTS = frozenset({"logprobs", "values", "q_values"})
    HEADLINE = ("loss", "q_loss", "v_loss", "nll")
    PANELS = (
        Panel("losses of action values and values (squared reward)", {"q_loss": "Q", "v_loss": "V"}),
        Panel("values (reward)", {"q": "Q of the tokens", "value": "V"}),
        Panel("negative log-likelihood (nats per token)", {"nll": "policy", "cql_loss": "softmax of Q"}),
    )

    epochs: Count = 1
    """How often to train on each batch."""
    n_minibatches: Count = 1
    """Optimizer steps per pass. Each pass shuffles the prompts."""
    gamma: Fraction = 0.99
    """Discount per response token."""
    tau: Annotated[float, Range(gt=0, lt=1)] = 0.7
    """How optimistic V is: the expectile of the action values that it learns. 0.5 is their mean; toward 1, the value of
    the best action in the data."""
    cql_coef: NonNegative = 0.1
    """Weight of the conservative term (CQL), which lowers the values of tokens that the data doesn't contain."""
    awac_coef: NonNegative = 1.0
    """Weight of the policy's loss, which imitates the data."""
    awac_beta: NonNegative = 0.0
    """How much more the policy learns from tokens with a large advantage: each has the weight exp(awac_beta *
    advantage). 0 imitates all tokens alike."""
    awac_max_weight: Positive = 100.0
    """Upper bound on these weights."""
    aggregation: Aggregation = field(default_factory=TokenMean)
    """How to average the loss over tokens and sequences: token_mean, seq_mean_token_mean, seq_mean_token_sum or
    constant."""

    @override
    def plan(self) -> Plan:
        return Plan(epochs=self.epochs, n_minibatches=self.n_minibatches)

    def train_step(self, model: Model, data: SequenceSample, mb_spec: MicroBatchSpec) -> Stats:
        """Take `epochs * n_minibatches` optimizer steps over the batch, in a new random order in each epoch."""
        rng = np.random.default_rng(model.call_seed("minibatches"))
        parts = (part for _ in range(self.epochs) for part in data.minibatches(self.n_minibatches, rng))
        return merge_stats(model.engine.train_batch(part, mb_spec, self.loss, self.loss_weight) for part in parts)

    def loss(self, output: ModelOutput, minibatch: SequenceSample) -> tuple[Tensor, Stats]:
        """Return the aggregated sum of the four losses, and metrics."""
        mask_T, cu_seqlens = _mask_rewarded(minibatch), minibatch.cu_seqlens()
        values_T, q = output.values(), output.q_values(where_T=mask_T)
        nll_T = nll_loss(output.logprobs(where_T=mask_T), mask_T)
        rewards_T = token_rewards(minibatch["rewards"], mask_T, cu_seqlens)
        # With lam=0, the returns of GAE are r + gamma * V of the next state.
        _, goal_T = gae(rewards_T, values_T.detach(), mask_T, cu_seqlens, gamma=self.gamma, lam=0.0)
        q_loss_T = torch.where(mask_T, (q.online_KT - goal_T).square().sum(0), 0)
        v_loss_T = expectile_loss(values_T, q.target_T, mask_T, tau=self.tau)
        cql_T = torch.where(mask_T, -q.logprobs_KT.sum(0), 0)
        advantages_T = torch.where(mask_T, q.target_T - values_T.detach(), 0)
        # The bound is applied to the exponent, since exp could overflow before a bound on the weight.
        weight_T = (self.awac_beta * advantages_T).clamp(max=math.log(self.awac_max_weight)).exp()
        loss_T = q_loss_T + v_loss_T + self.cql_coef * cql_T + self.awac_coef * weight_T * nll_T
        stats: Stats = {
            "q_loss": masked_mean(q_loss_T, mask_T),
            "v_loss": masked_mean(v_loss_T, mask_T),
            "cql_loss": masked_mean(cql_T, mask_T),
            "nll": masked_mean(nll_T, mask_T),
            "awac_weight": masked_mean(weight_T, mask_T),
            "q": masked_mean(q.online_KT.detach().mean(0), mask_T),
            "value": masked_mean(values_T.detach(), mask_T),
            "advantage": masked_mean(advantages_T, mask_T),
        }
        return self.aggregation.total(loss_T, mask_T, cu_seqlens), stats

    def loss_weight(self, data: SequenceSample) -> Tensor:
        """Return the divisor of the loss."""
        return self.aggregation.weight(_mask_rewarded(data), data.cu_seqlens())

    @override
    def describe(self, batch_prompts: int) -> dict[str, str]:
        awac = f"{self.awac_coef:g} x likelihood with advantage factor {self.awac_beta:g}"
        terms = f"Q (gamma {self.gamma:g}) + V (expectile {self.tau:g}) + {self.cql_coef:g} x CQL + {awac}"
        return {"loss": f"{terms}, {self.aggregation.describe()}"}


def _mask_rewarded(data: SequenceSample) -> Tensor:
    """Return [T] bool: the tokens of responses that have a reward."""
    return data["loss_mask"] & broadcast_to_tokens(data["rewards"].isfinite(), data.cu_seqlens())


def dataflow() -> DataflowGraph:
    """Build the graph: one call that trains on the dataset."""
    train = RPC("actor_train", "actor", "train_step", inputs=_TRAINED)
    return DataflowGraph((train,), dataset_keys=(*_TRAINED, "prompt_mask"))
