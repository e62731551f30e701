"""`Evaluation`: sample responses to held-out prompts and score them, outside the training graph."""

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
from realign.api.rewards import named_rewards, total_rewards
from realign.api.stats import masked_std
from realign.engines.distributed.ranks import current
from realign.errors import SettingsError
from realign.functional import segment_sum
from realign.runtime.evaluation.base import Evaluator, LoadedRun

SEQUENCE_METRICS = frozenset({"reward", "missing_rewards", "response_tokens", "truncated_fraction"})


@dataclass
class Evaluation(Evaluator):
    """Evaluation of sampled responses: prompts, sampling settings and reward functions."""

    reward: ModelInterface
    """Interface that scores each response; its `inference` must write `rewards`."""
    generation: GenerationConfig = field(default_factory=lambda: GenerationConfig(greedy=True))
    """Sampling settings. Any are allowed, because the samples are not trained on."""
    metrics: dict[str, ModelInterface] = field(default_factory=dict)
    """Additional scoring interfaces by metric name; `eval/<name>` is the mean of the `rewards` that the interface
    writes."""
    sweep: dict[str, list[Any]] = field(default_factory=dict)
    """One field of `generation` with additional values to evaluate, such as `{max_new_tokens: [16, 64]}`. The metric
    names contain the value: `eval/reward@max_new_tokens=16`."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if taken := sorted(self.metrics.keys() & SEQUENCE_METRICS):
            raise SettingsError(f"metrics.{taken[0]}: the evaluation already has this metric. Choose another name.")
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
        """Return the generation settings for each suffix of the metric names."""
        if len(self.sweep) > 1:
            raise SettingsError(f"sweep: it accepts one setting, found {', '.join(self.sweep)}. Remove the others.")
        variants = {"": self.generation}
        for name, values in self.sweep.items():
            known = [field.name for field in dataclasses.fields(GenerationConfig)]
            if name not in known:
                raise SettingsError(f"sweep.{name}: unknown field of generation (valid: {', '.join(known)})")
            if self.generation.greedy and name in ("temperature", "top_k", "top_p"):
                raise SettingsError(
                    f"sweep.{name}: it has no effect with generation.greedy=true. Set generation.greedy=false."
                )
            if not values:
                raise SettingsError(f"sweep.{name}=[]: it has no values. Add at least one.")
            for value in values:
                try:
                    variants[f"@{name}={value}"] = dataclasses.replace(self.generation, **{name: value})
                except SettingsError as error:
                    raise SettingsError(f"sweep.{error}") from error
                except TypeError as error:
                    raise SettingsError(f"sweep.{name}: {value!r} is not a valid value ({error})") from error
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
        """Sample and score responses to every prompt of `dataset` once.

        Returns:
            The metrics `eval/...`, and the scored responses of the first batch.
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
        """Return the responses with their rewards, and the statistics of the additional metrics."""
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
    """Return metrics of sampled sequences, for the keys that the batch contains; each is a mean over its sequences.

    - `reward`: total reward, over the responses with a reward
    - `rewards/<name>/mean`, `rewards/<name>/std`: mean and population standard deviation of a named reward
    - `missing_rewards`: fraction of responses without a reward
    - `response_tokens`: tokens outside the prompt mask, also of responses without a reward
    - `truncated_fraction`: fraction of truncated responses
    - `turns`: policy turns of a multi-turn episode
    """
    stats: Stats = {}
    if "rewards" in batch:
        rewards_S = total_rewards(batch)
        present_S = rewards_S.isfinite()
        stats["reward"] = masked_mean(rewards_S, present_S)
        stats["missing_rewards"] = _mean((~present_S).float())
    if "input_ids" in batch:
        for key, named_S in named_rewards(batch).items():
            stats[f"{key}/mean"] = masked_mean(named_S, named_S.isfinite())
            stats[f"{key}/std"] = masked_std(named_S, named_S.isfinite())
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
