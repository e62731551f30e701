"""RAFT: fine-tune on the best of n samples (arXiv:2304.06767).

Each step samples responses, scores them, selects the best, and maximizes the likelihood of their sampled tokens. There
is no importance ratio, so any sampling settings are valid. The loss always uses temperature 1. A response without a
reward (NaN) or without a sampled token is never selected. A prompt without a selected response is skipped in training.

Generation writes `input_ids`, `prompt_mask`, `loss_mask` and `truncated`; training reads these keys and `rewards`.
Differences: unlike the paper, the ranking has no KL penalty. Unlike LMFlow, prompts are not learned.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Annotated, ClassVar

import numpy as np
import torch
from torch import Tensor
from typing_extensions import override

from realign.api import (
    RPC,
    DataflowGraph,
    GenerationConfig,
    Keys,
    Mean,
    MicroBatchSpec,
    Model,
    ModelInterface,
    Plan,
    SequenceSample,
    Stats,
    derive_seed,
    masked_mean,
    merge_stats,
)
from realign.api.dataflow import named_reward_outputs
from realign.errors import SettingsError
from realign.functional import degenerate_groups, keep_best, segment_sum
from realign.interfaces.sft import SFTInterface
from realign.settings import Count, Finite, Range

SAMPLED = ("input_ids", "prompt_mask", "loss_mask", "truncated")


@dataclass
class RAFTActorInterface(SFTInterface):
    """The policy of RAFT: likelihood of the best responses of a batch."""

    reads_images: ClassVar[bool] = False

    generation: GenerationConfig = field(default_factory=lambda: GenerationConfig(n=8))
    """How to sample responses; all settings are allowed. `generation.n` is the K of best-of-K."""
    epochs: Count = 1
    """How often to train on the selected responses."""
    keep_best: Count | None = 1
    """Train on this many responses per prompt, those with the highest rewards; of equal ones, on the first. null uses
    `keep_share` instead."""
    keep_share: Annotated[float, Range(gt=0, le=1)] | None = None
    """Train on this fraction of the batch's rewarded responses, whatever their prompts, rounded up (LMFlow's
    `top_reward_percentage`). Ties are broken at random. null uses `keep_best` instead."""
    min_reward: Finite | None = None
    """Never train on responses with a smaller reward; null sets no limit."""
    skip_equal_rewards: bool = False
    """Skip prompts whose responses all have the same reward: none is better than another."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if (self.keep_best is None) == (self.keep_share is None):
            raise SettingsError(
                f"keep_best={self.keep_best}: exactly one of keep_best and keep_share must be set "
                f"(keep_share={self.keep_share}). Set the other to null"
            )
        if self.keep_best is not None and self.keep_best > self.generation.n:
            raise SettingsError(f"keep_best={self.keep_best}: must be at most generation.n={self.generation.n}")
        if self.skip_equal_rewards and self.generation.n == 1:
            raise SettingsError(
                "skip_equal_rewards=true: one response per prompt has no other to differ from. Set generation.n to 2 "
                "or more"
            )

    @override
    def keys(self, method: str) -> Keys:
        return selection_keys(method)

    @override
    def plan(self) -> Plan:
        return selection_plan(self.generation, self.epochs, self.n_minibatches)

    @override
    def headline(self) -> tuple[str, ...]:
        return ("reward", "selected_reward", *super().headline())

    def generate(self, model: Model, data: SequenceSample, mb_spec: MicroBatchSpec) -> SequenceSample:
        """Sample `generation.n` responses per prompt."""
        return sample_responses(model, data, self.generation)

    def train_step(self, model: Model, data: SequenceSample, mb_spec: MicroBatchSpec) -> Stats:
        """Select responses, then take `epochs * n_minibatches` optimizer steps, in a new random order in each epoch."""
        chosen_S = self.choose(model, data)
        rng = np.random.default_rng(model.call_seed("minibatches"))
        chosen = data.take_sequences(np.flatnonzero(chosen_S.cpu().numpy()))
        stats: Stats = {
            "selected_reward": masked_mean(data["rewards"], data.once_per_episode(chosen_S)),
            "selected_fraction": masked_mean(chosen_S, data.once_per_episode(torch.ones_like(chosen_S))),
            "selected_prompts": Mean(torch.tensor(float(len(chosen))), torch.tensor(len(data))),
        }
        return merge_stats([stats, *fit(self, model, chosen, mb_spec, self.epochs, rng)])

    def choose(self, model: Model, data: SequenceSample) -> Tensor:
        """Return [S] bool: the responses that train."""
        rewards_S, group_S = data["rewards"], data.group_index()
        valid_S = data.once_per_episode(trainable(data))
        if self.skip_equal_rewards:
            # `degenerate_groups` has one entry per group with a valid response, in the order of `unique`.
            _, group_N = group_S[valid_S].unique(return_inverse=True)
            valid_S = valid_S.index_put((valid_S,), ~degenerate_groups(rewards_S, group_S, valid_S)[group_N])
        if self.keep_best is not None:
            chosen_S = keep_best(rewards_S, group_S, valid_S, self.keep_best)
        else:
            chosen_S = self._best_of_batch(model, data, valid_S)
        chosen_S = chosen_S if self.min_reward is None else chosen_S & (rewards_S >= self.min_reward)
        return trainable(data) & data.of_whole_episodes(chosen_S)

    def _best_of_batch(self, model: Model, data: SequenceSample, valid_S: Tensor) -> Tensor:
        """Return [S] bool: the responses with the highest rewards of the batch; ties use a random order of prompts."""
        assert self.keep_share is not None
        group_S, seed = data.group_index(), model.call_seed("ties")
        drawn = [derive_seed(seed, str(i)) for i in data.ids]
        # A stable sort keeps the order within a prompt, so a prompt's position in the batch does not matter.
        order_S = torch.tensor(drawn, device=group_S.device)[group_S].argsort(stable=True)
        # In floating point, 0.28 * 100 is slightly above 28 and would be rounded up to 29.
        n_kept = math.ceil(self.keep_share * int(valid_S.sum()) - 1e-9)
        best_S = keep_best(data["rewards"][order_S], torch.zeros_like(order_S), valid_S[order_S], max(n_kept, 1))
        return torch.zeros_like(valid_S).index_put((order_S,), best_S)

    def describe(self, batch_prompts: int) -> dict[str, str]:
        """Return the rows of the launch table."""
        n = self.generation.n
        kept = f"the best {self.keep_best} of {n} of each prompt"
        if self.keep_share is not None:
            kept = f"the best {self.keep_share:g} of the batch's {batch_prompts * n} responses"
        kept += "" if self.min_reward is None else f", with a reward of at least {self.min_reward:g}"
        kept += ", of prompts whose rewards differ" if self.skip_equal_rewards else ""
        return describe_selection(self, kept)


def trainable(data: SequenceSample) -> Tensor:
    """Return [S] bool: whether the response has a reward and a sampled token."""
    return data["rewards"].isfinite() & (segment_sum(data["loss_mask"], data.cu_seqlens()) > 0)


def sample_responses(model: Model, data: SequenceSample, generation: GenerationConfig) -> SequenceSample:
    """Sample responses to the prompts of `data`, without the keys that only importance ratios need."""
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
    """Take the optimizer steps of `epochs` passes and yield their metrics; at most one mini-batch per prompt."""
    n_minibatches = min(interface.n_minibatches, len(chosen))
    for _ in range(epochs if n_minibatches else 0):
        for part in chosen.minibatches(n_minibatches, rng):
            yield model.engine.train_batch(part, mb_spec, interface.loss, interface.loss_weight)


def dataflow(interfaces: Mapping[str, ModelInterface] | None = None) -> DataflowGraph:
    """Build the graph: sample, score, train on the selected responses."""
    read = ("input_ids", "prompt_mask")
    named = named_reward_outputs(interfaces["reward"], "inference") if interfaces and "reward" in interfaces else ()
    return DataflowGraph(
        (
            RPC("actor_gen", "actor", "generate", inputs=("prompt_ids",), outputs=SAMPLED),
            RPC("reward_inf", "reward", "inference", inputs=(*read, "row"), outputs=("rewards", *named)),
            RPC("actor_train", "actor", "train_step", inputs=(*read, "loss_mask", "rewards")),
        ),
        dataset_keys=("prompt_ids", "row"),
        results=("truncated", *named),
    )


def selection_keys(method: str) -> Keys:
    """Return the keys of a policy that samples and trains on selected responses."""
    if method == "generate":
        return Keys(needs={"prompt_ids": ""}, writes=frozenset(SAMPLED))
    return Keys(needs=dict.fromkeys(("input_ids", "prompt_mask", "loss_mask", "rewards"), ""))


def selection_plan(generation: GenerationConfig, epochs: int, n_minibatches: int) -> Plan:
    """Return the plan of such a policy; it takes fewer optimizer steps if few responses are selected."""
    return Plan(
        epochs=epochs,
        n_minibatches=n_minibatches,
        at_most=True,
        responses_per_prompt=generation.n,
        longest_response=generation.max_new_tokens,
        generation=generation,
        sampler=generation.describe(),
        exact_sampling=generation.exact,
    )


def describe_selection(interface: SFTInterface, kept: str) -> dict[str, str]:
    """Return rows of the launch table; `kept` describes the selected responses."""
    return {
        "responses that train": kept,
        "loss": f"negative log-likelihood of sampled tokens, {interface.aggregation.describe()}",
    }
