"""Greedy responses for the baseline of ReMax (arXiv:2310.10505): the reward of the policy's greedy response.

Reads `prompt_ids`; writes `input_ids` and `prompt_mask` with one sequence per prompt. The graph renames them to
`greedy_input_ids` and `greedy_prompt_mask` (`reward.baseline=greedy` of the actor). The role shares the actor's model
(`realign.engines.SharedModel`), so the greedy response comes from the weights that sampled the batch.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import ClassVar

from typing_extensions import override

from realign.api import (
    GenerationConfig,
    Keys,
    MicroBatchSpec,
    Model,
    ModelInterface,
    Plan,
    SequenceSample,
    Weights,
)


@dataclass
class GreedyInterface(ModelInterface):
    """A policy that samples greedily: the most likely token at every position."""

    KEYS: ClassVar = {"generate": Keys({"prompt_ids": ""}, writes=frozenset({"input_ids", "prompt_mask"}))}
    OUTPUTS = frozenset({"logprobs"})

    generation: GenerationConfig = field(default_factory=GenerationConfig)
    """Sampling settings of the actor (`${interfaces.actor.generation}`); the greedy response stops by the same rules.
    `n` is set to 1 and `greedy` to true. The temperature does not change greedy responses."""

    @override
    def plan(self) -> Plan:
        return Plan(
            responses_per_prompt=1,
            longest_response=self.generation.max_new_tokens,
            sampler="greedy",
            exact_sampling=False,
            weights=Weights.live,
        )

    def generate(self, model: Model, data: SequenceSample, mb_spec: MicroBatchSpec) -> SequenceSample:
        """Sample one greedy response per prompt: `input_ids`, `prompt_mask`."""
        # Nothing trains on the response, so nobody would replay its experts or sampling masks.
        generation = replace(self.generation, n=1, greedy=True, router_replay=False, sampling_replay=False)
        out = model.sampler.generate(data.select(["prompt_ids"]), generation, seed=model.call_seed("greedy"))
        return out.select(["input_ids", "prompt_mask"])
