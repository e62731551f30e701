"""Samplers of asynchronous rollout, which sample with a copy of the policy while its engine trains."""

from __future__ import annotations

from realign.api import GenerationConfig, MicroBatchSpec, PipelinableEngine, SequenceSample
from realign.api.engine import PostHook
from realign.api.sampler import Sampler
from realign.api.sampler_spec import SamplesInBackground
from realign.engines.shared_model import SharedEngine
from realign.errors import ConfigError


class SamplingEngine(SharedEngine):
    """Engine of a policy in training for calls of asynchronous rollout, which may only sample."""

    def __init__(self, name: str, of: str, engine: PipelinableEngine, sampler: Sampler) -> None:
        super().__init__(name, of, engine)
        self._sampler = sampler

    def forward(self, data: SequenceSample, mb_spec: MicroBatchSpec, post_hook: PostHook) -> SequenceSample:
        """Raise an error, because the engine is in use by training.

        Raises:
            ConfigError: always.
        """
        raise ConfigError(
            f"models.{self.name}: with rollout=async, {type(self._sampler).__name__} can sample but not score. Set "
            "rollout=sync."
        )

    def generate(self, data: SequenceSample, config: GenerationConfig, *, seed: int) -> SequenceSample:
        """See `PipelinableEngine.generate`: the sampler samples, not the engine."""
        return self._sampler.generate(data, config, seed=seed)


def load_background_sampler(role: str, spec: object, seed: int, *, recompute: bool) -> Sampler:
    """Return a sampler with a copy of the model of `spec`; see `SamplesInBackground`.

    Raises:
        ConfigError: the spec cannot construct a background sampler.
    """
    if not isinstance(spec, SamplesInBackground):
        raise ConfigError(
            f"models.{role}: {type(spec).__name__} has no background_sampler, which rollout=async needs. Set "
            "rollout=sync, or use a model such as realign.engines.TransformersModel."
        )
    return spec.background_sampler(role, seed=seed, recompute=recompute)
