"""A model from its shape and rollout batches for it, in memory: training steps without a rollout before them."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from benchmarks.peer.work import CHARACTERS, EOS, Scenario
from realign.api import GenerationConfig, MicroBatchSpec, Model, SequenceSample
from realign.engines import OptimizerSpec
from realign.engines.network.attention import ATTENTION
from realign.engines.training.engine import TransformersEngine
from realign.interfaces.grpo import GRPOActorInterface

WORDS = len(CHARACTERS)
"""A text may be of these first tokens only, since the tokenizer has no others."""


def make_actor(
    scenario: Scenario,
    *,
    device: str = "cpu",
    dtype: torch.dtype = torch.float32,
    config: Mapping[str, Any] | None = None,
    **engine: Any,
) -> Model:
    """A random model of the scenario's shape in an engine that trains it.

    Args:
        scenario: of which the shape is.
        device: of the model.
        dtype: of matrix products.
        config: values that go over the shape.
        engine: further settings of the engine.
    """
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    with torch.device(device):
        module = AutoModelForCausalLM.from_config(
            scenario.config(**config or {}), attn_implementation=ATTENTION, dtype=torch.float32
        )
    engine = TransformersEngine(
        "actor",
        module.eval(),
        scenario.tokenizer(),
        seed=0,
        dtype=dtype,
        optimizer=OptimizerSpec(lr=1e-6),
        **engine,
    )
    return Model("actor", engine, engine.tokenizer)


def prompts(scenario: Scenario, step: int = 1) -> list[Tensor]:
    """One prompt of random tokens for each of the scenario's."""
    r, generator = random.Random(step), torch.Generator().manual_seed(step)
    words = min(scenario.vocabulary, WORDS)
    lengths = [r.randint(scenario.prompt_low, scenario.prompt_high) for _ in range(scenario.prompts)]
    return [torch.randint(EOS + 1, words, (n,), generator=generator) for n in lengths]


def make_rollout(scenario: Scenario, *, copies: int = 1, step: int = 1) -> SequenceSample:
    """What a rollout of the scenario leaves: prompts with their responses, log-probs as at random weights, rewards.

    Args:
        scenario: of which sizes and lengths are.
        copies: so many times the prompts; lengths and texts repeat, so that the work is exactly so many times as much.
        step: whose lengths.
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
    """Training steps of GRPO on one model."""

    def __init__(self, actor: Model, scenario: Scenario) -> None:
        self.actor = actor
        generation = GenerationConfig(n=scenario.group, max_new_tokens=scenario.max_new)
        self.interface = GRPOActorInterface(generation=generation)

    def __call__(self, batch: SequenceSample, budget: int) -> None:
        """One step: credit, loss, gradient, one optimizer step.

        Raises:
            RuntimeError: no optimizer step was made.
        """
        stats = self.interface.train_step(self.actor, batch, MicroBatchSpec(max_tokens_per_microbatch=budget))
        if float(stats["optimizer_steps"].value) != 1:
            raise RuntimeError("the training step changed no weight")
