"""Models and rollout batches built in memory, to benchmark training steps without a rollout."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from benchmarks.peer.work import CHARACTERS, EOS, Scenario
from realign.api import GenerationConfig, MicroBatchSpec, Model, SequenceSample
from realign.engines import OptimizerSpec
from realign.engines.training.transformers_engine import TransformersEngine
from realign.interfaces.grpo import GRPOActorInterface
from realign.models.network.attention import ATTENTION
from realign.models.network.settings import NetworkSettings

WORDS = len(CHARACTERS)
"""Size of the tokenizer's alphabet. Texts contain only these first tokens of the vocabulary."""


def make_actor(
    scenario: Scenario,
    *,
    device: str = "cpu",
    dtype: torch.dtype = torch.float32,
    config: Mapping[str, Any] | None = None,
    model: Any = None,
    network: NetworkSettings | None = None,
    **engine: Any,
) -> Model:
    """Build an engine that trains a randomly initialized model with the scenario's shape.

    Args:
        scenario: Shape of the model.
        device: Device of the model.
        dtype: Data type of matrix products.
        config: Values that override the config of the shape.
        model: Config of a model to use instead of the shape.
        network: Settings of the network other than `dtype`.
        engine: Further settings of the engine.
    """
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    with torch.device(device):
        module = AutoModelForCausalLM.from_config(
            model or scenario.config(**config or {}), attn_implementation=ATTENTION, dtype=torch.float32
        )
    engine = TransformersEngine(
        "actor",
        module.eval(),
        scenario.tokenizer(),
        replace(network or NetworkSettings(), dtype=dtype),
        seed=0,
        optimizer=OptimizerSpec(lr=1e-6),
        **engine,
    )
    return Model("actor", engine, engine.tokenizer)


def prompts(scenario: Scenario, step: int = 1) -> list[Tensor]:
    """Draw random tokens for each prompt of the scenario."""
    r, generator = random.Random(step), torch.Generator().manual_seed(step)
    words = min(scenario.vocabulary, WORDS)
    lengths = [r.randint(scenario.prompt_low, scenario.prompt_high) for _ in range(scenario.prompts)]
    return [torch.randint(EOS + 1, words, (n,), generator=generator) for n in lengths]


def make_rollout(scenario: Scenario, *, copies: int = 1, step: int = 1) -> SequenceSample:
    """Build a rollout batch: prompts, responses, log-probs of a uniform policy, and random rewards.

    Args:
        scenario: Sizes and lengths of the batch.
        copies: Number of copies of the prompts. Copies repeat lengths and texts, which multiplies the work exactly.
        step: Step whose lengths are used.
    """
    generator = torch.Generator().manual_seed(step)
    given, lengths, group = prompts(scenario, step), scenario.lengths(step), scenario.group
    words = min(scenario.vocabulary, WORDS)
    responses = [torch.randint(EOS + 1, words, (n,), generator=generator) for n in lengths]
    ids = [[torch.cat([p, r]) for r in responses[i * group : (i + 1) * group]] for i, p in enumerate(given)]
    masks = [[torch.arange(len(x)) < len(given[i]) for x in texts] for i, texts in enumerate(ids)]
    names = [f"{copy}-{i}" for copy in range(copies) for i in range(len(given))]
    sample = SequenceSample.from_sequences(names, {"input_ids": ids * copies, "prompt_mask": masks * copies})
    sample = sample.with_tokens(loss_mask=~sample["prompt_mask"])
    logprobs_T = torch.where(sample["loss_mask"], -math.log(scenario.vocabulary), 0.0)
    rewards_S = torch.rand(scenario.sequences, generator=generator).repeat(copies)
    return sample.with_tokens(logprobs=logprobs_T).with_sequences(rewards=rewards_S)


class TrainStep:
    """GRPO training steps on one model."""

    def __init__(self, actor: Model, scenario: Scenario) -> None:
        self.actor = actor
        generation = GenerationConfig(n=scenario.group, max_new_tokens=scenario.max_new)
        self.interface = GRPOActorInterface(generation=generation)

    def __call__(self, batch: SequenceSample, budget: int) -> None:
        """Execute one step: advantage estimation, loss, gradient and one optimizer step.

        Raises:
            RuntimeError: The step did not include an optimizer step.
        """
        stats = self.interface.train_step(self.actor, batch, MicroBatchSpec(max_tokens_per_microbatch=budget))
        if float(stats["optimizer_steps"].value) != 1:
            raise RuntimeError("the training step did not change the weights")
