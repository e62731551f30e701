"""`Evaluation`: held-out prompts answered by a role and judged by a reward function; no part of the training graph."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from realign.api import (
    GenerationConfig,
    Mean,
    MicroBatchSpec,
    Model,
    ModelInterface,
    SequenceSample,
    Stats,
    masked_mean,
    merge_stats,
    stat_values,
)
from realign.api.rewards import total_rewards
from realign.engines.distributed.ranks import current
from realign.errors import SettingsError
from realign.functional import segment_sum
from realign.runtime.evaluation.base import Evaluator, LoadedRun

SEQUENCE_METRICS = frozenset({"reward", "missing_rewards", "response_tokens", "truncated_fraction"})


@dataclass
class Evaluation(Evaluator):
    """What to ask, how to sample, how to judge."""

    reward: ModelInterface
    """Judges each response: an interface whose `inference` writes `rewards`."""
    generation: GenerationConfig = field(default_factory=lambda: GenerationConfig(greedy=True))
    """How responses are sampled; any settings, since nothing trains on them."""
    metrics: dict[str, ModelInterface] = field(default_factory=dict)
    """Further judges, by the name of their metric: `eval/<name>` is the mean of what they write as `rewards`."""
    sweep: dict[str, list[Any]] = field(default_factory=dict)
    """One field of `generation` and values to try besides its own, such as `{max_new_tokens: [16, 64]}`; their metrics
    are called `eval/reward@max_new_tokens=16`."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if taken := sorted(self.metrics.keys() & SEQUENCE_METRICS):
            raise ValueError(
                f"evaluation.metrics.{taken[0]}: eval/{taken[0]} has a meaning already; choose another name"
            )
        self._variants = self._checked_sweep()

    @property
    def judges(self) -> dict[str, ModelInterface]:
        """See `Evaluator`."""
        return {"reward": self.reward} | {f"metrics.{name}": judge for name, judge in self.metrics.items()}

    @property
    def longest_response(self) -> int:
        """See `Evaluator`."""
        return max(generation.max_new_tokens for generation in self._variants.values())

    def _checked_sweep(self) -> dict[str, GenerationConfig]:
        """The sampler behind each ending of a metric's name."""
        if len(self.sweep) > 1:
            raise ValueError(f"evaluation.sweep takes one setting, found {', '.join(self.sweep)}")
        variants = {"": self.generation}
        for name, values in self.sweep.items():
            known = [field.name for field in dataclasses.fields(GenerationConfig)]
            if name not in known:
                raise ValueError(f"evaluation.sweep.{name} is no field of generation; there are {', '.join(known)}")
            if self.generation.greedy and name in ("temperature", "top_k", "top_p"):
                raise ValueError(f"evaluation.sweep.{name} has no effect on evaluation.generation.greedy=true")
            if not values:
                raise ValueError(f"evaluation.sweep.{name} has no value to try")
            for value in values:
                try:
                    variants[f"@{name}={value}"] = dataclasses.replace(self.generation, **{name: value})
                except SettingsError as error:
                    raise SettingsError(f"evaluation.sweep.{error}") from error
                except TypeError as error:
                    raise ValueError(f"evaluation.sweep.{name} cannot be {value!r}: {error}") from error
        return variants

    def metric_names(self) -> frozenset[str] | None:
        """See `Evaluator`."""
        names = [*SEQUENCE_METRICS, *self.metrics]
        return frozenset(f"eval/{name}{ending}" for name in names for ending in self._variants)

    def describe(self) -> str:
        """See `Evaluator`."""
        swept = "".join(f"; also {name}={', '.join(map(str, values))}" for name, values in self.sweep.items())
        return self.generation.describe() + swept

    def measure(self, runtime: LoadedRun, dataset: Any) -> tuple[dict[str, float], SequenceSample]:
        """See `Evaluator`."""
        return self.run(runtime.models[self.role], dataset)

    def run(self, model: Model, dataset: Any) -> tuple[dict[str, float], SequenceSample]:
        """Answer and judge every prompt of `dataset` once.

        Returns:
            The metrics `eval/...`, and the judged responses of the first batch.
        """
        values: dict[str, float] = {}
        shown: SequenceSample | None = None
        for ending, generation in self._variants.items():
            stats: list[Stats] = []
            for number, prompts in enumerate(self.batches(dataset)):
                judged, found = self._judge(model, prompts, generation, number)
                shown = shown or judged
                stats.append(sequence_stats(judged) | found)
            values |= {f"eval/{name}{ending}": value for name, value in stat_values(merge_stats(stats)).items()}
        assert shown is not None
        return values, shown

    def _judge(
        self, model: Model, prompts: SequenceSample, generation: GenerationConfig, number: int
    ) -> tuple[SequenceSample, Stats]:
        """The responses with their rewards, and what the further judges say."""
        seed = model.call_seed(f"evaluation/{number}")
        answered = model.sampler.generate(prompts.select(["prompt_ids"]), generation, seed=seed)
        answered = answered.merge(prompts.select(["row"]))
        judge = Model("evaluation", None, model.tokenizer, model.seed, model.version)

        def verdicts() -> tuple[SequenceSample, Stats]:
            stats: Stats = {}
            for name, interface in self.metrics.items():
                found_S = interface.inference(judge, answered, MicroBatchSpec())["rewards"]
                stats[name] = masked_mean(found_S, found_S.isfinite())
            return self.reward.inference(judge, answered, MicroBatchSpec()), stats

        rewards, stats = current().lead(verdicts)
        return answered.merge(rewards), stats


def sequence_stats(batch: SequenceSample) -> Stats:
    """Metrics of sampled sequences, as far as their keys are there; each a mean over the sequences of the batch.

    `reward` (of those that have one; dense ones add up), `missing_rewards` (fraction), `response_tokens` (all that
    were not given, also those of responses without reward), `truncated_fraction` and, of conversations, `turns` of the
    policy.
    """
    stats: Stats = {}
    if "rewards" in batch:
        rewards_S = total_rewards(batch)
        present_S = rewards_S.isfinite()
        stats["reward"] = masked_mean(rewards_S, present_S)
        stats["missing_rewards"] = _mean((~present_S).float())
    if "prompt_mask" in batch:
        tokens_S = segment_sum((~batch["prompt_mask"]).float(), batch.cu_seqlens())
        stats["response_tokens"] = _mean(tokens_S)
    if "truncated" in batch:
        stats["truncated_fraction"] = _mean(batch["truncated"].float())
    if "turns" in batch:
        stats["turns"] = _mean(batch["turns"].float())
    return stats


def _mean(x_S: Tensor) -> Mean:
    return masked_mean(x_S, torch.ones_like(x_S, dtype=torch.bool))
