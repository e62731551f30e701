"""Measure the kernel launches and synchronizations of decoding and training on the virtual device.

`python -m benchmarks.gpu_budget` prints them, and `test_budgets.py` bounds them. Numbers per layer come from models of
2 and 4 layers, and numbers per token or micro-batch from runs of two lengths, so that whatever happens once cancels.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from realign.api import GenerationConfig, Lengths, MicroBatchSpec, Model, SequenceSample
from realign.engines import OptimizerSpec
from realign.engines.distributed.sharded_engine import ShardedEngine
from realign.engines.distributed.sharding import Sharding
from realign.engines.training.transformers_engine import TransformersEngine
from realign.interfaces.grpo import GRPOActorInterface
from realign.models.network.settings import NetworkSettings
from tests.tiny import VOCAB, random_sample, tiny_model, tiny_tokenizer
from tests.virtual_cuda.counts import Counts, counting

PROMPTS, RESPONSES = 4, 2


@dataclass(frozen=True)
class Cost:
    """What one more of something costs: a token of a rollout, a micro-batch, or an optimizer step."""

    launches: float
    synchronizations: Counter[tuple[str, str]]
    """Times that the host waits, by reason and line."""

    @property
    def waits(self) -> float:
        """Total number of synchronizations."""
        return self.synchronizations.total()


@dataclass(frozen=True)
class LayerCost:
    """A cost at 2 and 4 layers."""

    two: Cost
    four: Cost

    @property
    def per_layer(self) -> float:
        """Launches of one layer."""
        return (self.four.launches - self.two.launches) / 2

    @property
    def rest(self) -> float:
        """Launches that do not depend on the number of layers."""
        return self.two.launches - 2 * self.per_layer


def engine_of(
    *, dtype: torch.dtype = torch.bfloat16, settings: dict[str, Any] | None = None, **model: Any
) -> TransformersEngine:
    """Return an engine of a small Qwen2 on the device; `model` are values of its config."""
    settings = dict(settings or {})
    checkpointing = settings.pop("gradient_checkpointing", False)
    module = tiny_model("qwen2", use_sliding_window=False, **model).to("cuda")
    network = NetworkSettings(dtype=dtype, **settings)
    return TransformersEngine(
        "actor",
        module,
        tiny_tokenizer(),
        network,
        seed=0,
        optimizer=OptimizerSpec(lr=1e-3),
        gradient_checkpointing=checkpointing,
    )


def counted(work: Callable[[], Any]) -> Counts:
    """Return the counts of the second call, which finds every cache filled."""
    work()
    with counting() as counts:
        work()
    return Counts(Counter(counts.launches), Counter(counts.synchronizations), Counter(counts.copies))


def difference(more: Counts, less: Counts, units: int) -> Cost:
    """Return what each of `units` additional units costs."""
    waits = Counter(
        {
            key: n / units
            for key in more.synchronizations
            if (n := more.synchronizations[key] - less.synchronizations[key])
        }
    )
    return Cost((more.launches.total() - less.launches.total()) / units, waits)


def tiny(layers: int, dtype: torch.dtype = torch.bfloat16, **settings: Any) -> TransformersEngine:
    """Return such an engine with a number of layers."""
    return engine_of(dtype=dtype, settings=settings, num_hidden_layers=layers)


def prompts_of() -> SequenceSample:
    """Return prompts of 6 tokens."""
    lengths = Lengths.of([[6]] * PROMPTS)
    return SequenceSample(tuple(range(PROMPTS))).with_data(
        {"prompt_ids": torch.randint(3, VOCAB, (PROMPTS * 6,))}, lengths=lengths
    )


def decode(layers: int, **settings: Any) -> Cost:
    """Return the cost of one decode step (one token of every row), of a model that trains unless it is `frozen`."""
    frozen = settings.pop("frozen", False)
    engine, prompts = tiny(layers, **settings), prompts_of()
    if frozen:
        engine.module.requires_grad_(False)

    def rollout(tokens: int) -> Callable[[], Any]:
        config = GenerationConfig(n=RESPONSES, max_new_tokens=tokens, fixed_length=True)
        return lambda: engine.generate(prompts, config, seed=0)

    return difference(counted(rollout(33)), counted(rollout(17)), 16)


def batch(prompts: int = 8) -> SequenceSample:
    """Return a rollout batch with two responses to each prompt."""
    sample = random_sample([[20] * 2] * prompts, prompt=6)
    sample = sample.with_tokens(logprobs=torch.where(sample["loss_mask"], -4.0, 0.0))
    return sample.with_sequences(rewards=torch.rand(2 * prompts))


def train(layers: int, **settings: Any) -> tuple[Cost, Cost]:
    """Return the costs of one micro-batch, and of the rest of a training step with one optimizer step."""
    return step_costs(tiny(layers, **settings), batch())


def step_costs(engine: TransformersEngine, data: SequenceSample) -> tuple[Cost, Cost]:
    """Return the costs of one micro-batch, and of the rest of a training step of GRPO with one optimizer step."""
    model = Model("actor", engine, engine.tokenizer)
    actor = GRPOActorInterface(generation=GenerationConfig(n=2, max_new_tokens=14))

    def step(microbatches: int) -> Callable[[], Any]:
        return lambda: actor.train_step(model, data, MicroBatchSpec(n_microbatches=microbatches))

    one, three = counted(step(1)), counted(step(3))
    per_microbatch = difference(three, one, 2)
    rest = Counter(one.synchronizations)
    rest.subtract(per_microbatch.synchronizations)
    return per_microbatch, Cost(one.launches.total() - per_microbatch.launches, +rest)


@contextmanager
def fake_ranks(ranks: int) -> Iterator[None]:
    """Be rank 0 of `ranks` processes inside, whose collectives return this rank's own data."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    torch.distributed.init_process_group("fake", rank=0, world_size=ranks, store=FakeStore())
    try:
        yield
    finally:
        torch.distributed.destroy_process_group()


def train_sharded(layers: int, ranks: int) -> tuple[Cost, Cost]:
    """Return the costs of one micro-batch and of the rest of a training step, on rank 0 of an FSDP engine."""
    module = tiny_model("qwen2", num_hidden_layers=layers, use_sliding_window=False, num_attention_heads=8).to("cuda")
    with fake_ranks(ranks):
        engine = ShardedEngine(
            "actor",
            module,
            tiny_tokenizer(),
            NetworkSettings(dtype=torch.bfloat16),
            sharding=Sharding(),
            seed=0,
            optimizer=OptimizerSpec(lr=1e-3),
        )
        return step_costs(engine, batch(prompts=4 * ranks))


def of_layers(cost: Callable[[int], Cost]) -> LayerCost:
    """Return a cost at 2 and 4 layers."""
    return LayerCost(cost(2), cost(4))
