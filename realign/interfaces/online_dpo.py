"""Online DPO: sample responses, and train on the best against the worst response to each prompt (arXiv:2402.04792).

Each step samples `generation.n` responses per prompt. The role `reward` scores them: a reward function, a reward model
or a judge. The response with the highest reward of a prompt is preferred to the one with the lowest. All settings of
`DPOInterface` apply, so online IPO or SimPO are settings too. Training needs no importance ratio, so any sampling
settings are valid. A response without a reward (NaN) or without a sampled token is never selected. A prompt whose
rewards are all equal is skipped in training.

Generation writes the keys of `PPOActorInterface`; training reads `input_ids`, `loss_mask`, `rewards` and, unless
`reference_free`, `ref_logprobs`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor
from typing_extensions import override

from realign.api import (
    SAMPLED,
    DataflowGraph,
    GenerationConfig,
    Keys,
    Mean,
    MicroBatchSpec,
    Model,
    ModelInterface,
    Panel,
    Plan,
    SequenceSample,
    Stats,
    masked_mean,
    merge_stats,
    rl_graph,
)
from realign.errors import SettingsError
from realign.functional import keep_best
from realign.interfaces.components.advantages import Rewards
from realign.interfaces.components.pairs import has_answer
from realign.interfaces.dpo import DPOInterface


@dataclass
class OnlineDPOInterface(DPOInterface):
    """The policy of online DPO: it samples responses, and trains on pairs of them."""

    HEADLINE = ("reward", *DPOInterface.HEADLINE)
    PANELS = (Panel("reward", {"reward": "sampled responses"}), *DPOInterface.PANELS)

    generation: GenerationConfig = field(default_factory=lambda: GenerationConfig(n=2))
    """How to sample responses; all settings are allowed, with `generation.n` of at least 2. `temperature` is the loss's
    own."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.generation.n < 2:
            raise SettingsError(f"generation.n={self.generation.n}: a pair needs two responses. Set it to 2 or more")

    @override
    def keys(self, method: str) -> Keys:
        if method == "generate":
            return Keys(needs={"prompt_ids": ""}, writes=frozenset(SAMPLED))
        if method != "train_step":
            return Keys()
        needs = dict.fromkeys(("input_ids", "loss_mask", "rewards"), "") | self.reference_keys()
        return Keys(needs=needs, uses=frozenset({"dense_rewards"}))

    @override
    def plan(self) -> Plan:
        return Plan(
            n_minibatches=self.n_minibatches,
            at_most=True,
            responses_per_prompt=self.generation.n,
            longest_response=self.generation.max_new_tokens,
            temperature=self.temperature,
            temperature_setting="temperature",
            generation=self.generation,
            sampler=self.generation.describe(),
            exact_sampling=self.generation.exact,
        )

    def generate(self, model: Model, data: SequenceSample, mb_spec: MicroBatchSpec) -> SequenceSample:
        """Sample `generation.n` responses per prompt."""
        return model.sampler.generate(data, self.generation, seed=model.call_seed("generate"))

    def train_step(self, model: Model, data: SequenceSample, mb_spec: MicroBatchSpec) -> Stats:
        """Select a pair of each prompt, then take at most `n_minibatches` optimizer steps over the pairs."""
        rewards_S = Rewards.of(data).per_sequence
        best_S, worst_S = best_and_worst(rewards_S, data)
        chosen_S = best_S | worst_S
        pairs = data.with_sequences(labels=rewards_S).take_sequences(np.flatnonzero(chosen_S.cpu().numpy()))
        stats: Stats = {
            "selected_reward": masked_mean(rewards_S, best_S),
            "selected_prompts": Mean(best_S.sum().float(), torch.tensor(len(data))),
        }
        return merge_stats([stats, super().train_step(model, pairs, mb_spec)] if len(pairs) else [stats])

    @override
    def describe(self, batch_prompts: int) -> dict[str, str]:
        pairs = f"the best against the worst of {self.generation.n} responses, if their rewards differ"
        return {"pairs": pairs, **super().describe(batch_prompts)}


def best_and_worst(rewards_S: Tensor, data: SequenceSample) -> tuple[Tensor, Tensor]:
    """Return [S] bool twice: the responses with the highest and the lowest reward of each prompt whose rewards differ.

    Ties go to the first response. Responses without a finite reward or without a sampled token are ignored.
    """
    group_S, valid_S = data.group_index(), rewards_S.isfinite() & has_answer(data)
    best_S, worst_S = (keep_best(sign * rewards_S, group_S, valid_S, 1) for sign in (1, -1))
    differ_G = torch.ones(len(data), dtype=torch.bool, device=group_S.device)
    # Ties go to the first response on both sides, so one response is best and worst only if none differs from it.
    differ_G[group_S[best_S & worst_S]] = False
    return best_S & differ_G[group_S], worst_S & differ_G[group_S]


def dataflow(interfaces: Mapping[str, ModelInterface]) -> DataflowGraph:
    """Build the graph: sample, reward, score with the reference unless it is unused, train."""
    return rl_graph(interfaces)
