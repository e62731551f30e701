"""RAFT: fine-tune on the best of n samples (arXiv:2304.06767).

Sample, judge, choose, and maximise the likelihood of what was chosen, over its sampled tokens. There is no ratio, so
sampling may use any settings; the loss is at temperature 1 whatever the sampler's. A response whose reward is missing
(NaN), or that has no sampled token, is never chosen, and a prompt without a chosen response takes no part in training,
nor in its forward passes.

Generation writes `input_ids`, `prompt_mask`, `loss_mask` and `truncated`; training reads them with `rewards`. Differs
from the paper in that no KL penalty enters the ranking, and from LMFlow also in that prompts are not learned.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Annotated

import numpy as np
import torch
from torch import Tensor

from realign.api import (
    RPC,
    DataflowGraph,
    GenerationConfig,
    Keys,
    Mean,
    MicroBatchSpec,
    Model,
    Plan,
    SequenceSample,
    Stats,
    derive_seed,
    masked_mean,
    merge_stats,
)
from realign.errors import SettingsError
from realign.functional import degenerate_groups, keep_best, segment_sum
from realign.interfaces.sft import SFTInterface
from realign.settings import Count, Finite, Range

SAMPLED = ("input_ids", "prompt_mask", "loss_mask", "truncated")


@dataclass
class RAFTActorInterface(SFTInterface):
    """The policy of RAFT: likelihood of the best responses of a batch."""

    generation: GenerationConfig = field(default_factory=lambda: GenerationConfig(n=8))
    """How responses are sampled, with any settings; `generation.n` is the K of best-of-K."""
    epochs: Count = 1
    """Passes over the chosen responses."""
    keep_best: Count | None = 1
    """Responses kept per prompt, those with the highest rewards (of equal ones the first); null with `keep_share`."""
    keep_share: Annotated[float, Range(gt=0, le=1)] | None = None
    """Share of all rewarded responses of the batch that is kept instead, whatever their prompts, rounded up; of equal
    ones at random (LMFlow's `top_reward_percentage`)."""
    min_reward: Finite | None = None
    """Responses with a lower reward are not kept, even if they are the best; null: no limit."""
    skip_equal_rewards: bool = False
    """Leave out prompts without two rewarded responses of different rewards: none of them is better than another."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if (self.keep_best is None) == (self.keep_share is None):
            raise ValueError(
                f"keep_best={self.keep_best} with keep_share={self.keep_share}: give one, and set the other to null"
            )
        if self.keep_best is not None and self.keep_best > self.generation.n:
            raise SettingsError(f"keep_best={self.keep_best}: must be at most generation.n={self.generation.n}")
        if self.skip_equal_rewards and self.generation.n == 1:
            raise SettingsError("skip_equal_rewards=True: needs a generation.n of 2 or more")

    def keys(self, method: str) -> Keys:
        """See `ModelInterface.keys`."""
        return selection_keys(method)

    def plan(self) -> Plan:
        """See `ModelInterface.plan`."""
        return selection_plan(self.generation, self.epochs, self.n_minibatches)

    def headline(self) -> tuple[str, ...]:
        """See `ModelInterface.headline`."""
        return ("reward", "selected_reward", "loss", "nll")

    def generate(self, model: Model, data: SequenceSample, mb_spec: MicroBatchSpec) -> SequenceSample:
        """Sample `generation.n` responses per prompt."""
        return sample_responses(model, data, self.generation)

    def train_step(self, model: Model, data: SequenceSample, mb_spec: MicroBatchSpec) -> Stats:
        """Choose once, then take `epochs * n_minibatches` optimizer steps, shuffled anew in each pass."""
        chosen_S = self.choose(model, data)
        rng = np.random.default_rng(model.call_seed("minibatches"))
        chosen = data.take_sequences(np.flatnonzero(chosen_S.cpu().numpy()))
        stats: Stats = {
            "selected_reward": masked_mean(data["rewards"], chosen_S),
            "selected_fraction": masked_mean(chosen_S, torch.ones_like(chosen_S)),
            "selected_prompts": Mean(torch.tensor(float(len(chosen))), torch.tensor(len(data))),
        }
        return merge_stats([stats, *fit(self, model, chosen, mb_spec, self.epochs, rng)])

    def choose(self, model: Model, data: SequenceSample) -> Tensor:
        """[S] bool: the responses that train."""
        rewards_S, group_S = data["rewards"], data.group_index()
        valid_S = trainable(data)
        if self.skip_equal_rewards:
            _, group_N = group_S[valid_S].unique(return_inverse=True)
            valid_S = valid_S.index_put((valid_S,), ~degenerate_groups(rewards_S, group_S, valid_S)[group_N])
        if self.keep_best is not None:
            chosen_S = keep_best(rewards_S, group_S, valid_S, self.keep_best)
        else:
            chosen_S = self._best_of_batch(model, data, valid_S)
        return chosen_S if self.min_reward is None else chosen_S & (rewards_S >= self.min_reward)

    def _best_of_batch(self, model: Model, data: SequenceSample, valid_S: Tensor) -> Tensor:
        """[S] bool: the highest rewards of the batch, equal ones in an order that is drawn anew for each prompt."""
        assert self.keep_share is not None
        group_S, seed = data.group_index(), model.call_seed("ties")
        drawn = [derive_seed(seed, str(i)) for i in data.ids]
        # Stable: the responses to one prompt stay in their order, so that no prompt's place in the batch matters.
        order_S = torch.tensor(drawn, device=group_S.device)[group_S].argsort(stable=True)
        # 0.28 * 100 is a little more than 28, and would be rounded up to 29.
        n_kept = math.ceil(self.keep_share * int(valid_S.sum()) - 1e-9)
        best_S = keep_best(data["rewards"][order_S], torch.zeros_like(order_S), valid_S[order_S], max(n_kept, 1))
        return torch.zeros_like(valid_S).index_put((order_S,), best_S)

    def describe(self, batch_prompts: int) -> dict[str, str]:
        """Rows of the table that is shown at launch."""
        n = self.generation.n
        kept = f"the best {self.keep_best} of {n} of each prompt"
        if self.keep_share is not None:
            kept = f"the best {self.keep_share:g} of the batch's {batch_prompts * n} responses"
        kept += "" if self.min_reward is None else f", with a reward of at least {self.min_reward:g}"
        kept += ", of prompts whose rewards differ" if self.skip_equal_rewards else ""
        return describe_selection(self, kept)


def trainable(data: SequenceSample) -> Tensor:
    """[S] bool: the response has a reward and a sampled token."""
    return data["rewards"].isfinite() & (segment_sum(data["loss_mask"], data.cu_seqlens()) > 0)


def sample_responses(model: Model, data: SequenceSample, generation: GenerationConfig) -> SequenceSample:
    """Responses to the prompts of `data`, without what a ratio would need."""
    out = model.sampler.generate(data, generation, seed=model.call_seed("generate"))
    return out.select(SAMPLED)


def fit(
    interface: SFTInterface,
    model: Model,
    chosen: SequenceSample,
    mb_spec: MicroBatchSpec,
    epochs: int,
    rng: np.random.Generator,
) -> Iterator[Stats]:
    """Metrics of each optimizer step of `epochs` passes; as many mini-batches as asked for, or as there are prompts."""
    n_minibatches = min(interface.n_minibatches, len(chosen))
    for _ in range(epochs if n_minibatches else 0):
        for part in chosen.minibatches(n_minibatches, rng):
            yield model.machine.train_batch(part, mb_spec, interface.loss, interface.loss_weight)


def dataflow() -> DataflowGraph:
    """Sample, judge, train on what is chosen."""
    read = ("input_ids", "prompt_mask")
    return DataflowGraph(
        (
            RPC("actor_gen", "actor", "generate", inputs=("prompt_ids",), outputs=SAMPLED),
            RPC("reward_inf", "reward", "inference", inputs=(*read, "row"), outputs=("rewards",)),
            RPC("actor_train", "actor", "train_step", inputs=(*read, "loss_mask", "rewards")),
        ),
        dataset_keys=("prompt_ids", "row"),
        results=("truncated",),
    )


def selection_keys(method: str) -> Keys:
    """Return the keys of a policy that samples, and trains on some of the rewarded responses."""
    if method == "generate":
        return Keys(needs={"prompt_ids": ""}, writes=frozenset(SAMPLED))
    return Keys(needs=dict.fromkeys(("input_ids", "prompt_mask", "loss_mask", "rewards"), ""))


def selection_plan(generation: GenerationConfig, epochs: int, n_minibatches: int) -> Plan:
    """Return the plan of such a policy; it takes fewer optimizer steps if few responses are chosen."""
    return Plan(
        epochs=epochs,
        n_minibatches=n_minibatches,
        at_most=True,
        responses_per_prompt=generation.n,
        longest_response=generation.max_new_tokens,
        sampler=generation.describe(),
        exact_sampling=not generation.distorted(),
    )


def describe_selection(interface: SFTInterface, kept: str) -> dict[str, str]:
    """Return rows of the launch table; `kept` names the chosen responses."""
    return {
        "responses that train": kept,
        "loss": f"negative log-likelihood of sampled tokens, {interface.aggregation.describe()}",
    }
