"""Samplers of asynchronous rollout, which sample with a copy of the policy while its engine trains."""

from __future__ import annotations

from realign.api import GenerationConfig, MicroBatchSpec, PipelinableEngine, SequenceSample
from realign.api.engine import PostHook
from realign.api.sampler import Sampler
from realign.api.sampler_spec import SamplesInBackground
from realign.engines.shared_model import SharedEngine, SharedModel
from realign.errors import ConfigError
from realign.runtime.experiment import Experiment
from realign.runtime.rollout.spec import Async


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


def background_sampler(experiment: Experiment, rollout: Async, role: str) -> Sampler:
    """Return a sampler with a copy of the role's model, in this process."""
    return load_background_sampler(role, experiment.models[role], experiment.seed, recompute=rollout.recompute)


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


def owner_of(experiment: Experiment, role: str) -> str:
    """Return the role that owns the weights of `role`: itself, or the role whose model it shares."""
    spec = experiment.models.get(role)
    return spec.of if isinstance(spec, SharedModel) else role


def sampled_roles(experiment: Experiment) -> tuple[str, ...]:
    """Return the trained roles that are called on the way to rewards; each needs a background sampler."""
    trained = {rpc.model for rpc in experiment.graph.rpcs if rpc.method == "train_step"}
    owners = (owner_of(experiment, rpc.model) for rpc in experiment.graph.leading_to("rewards"))
    return tuple(dict.fromkeys(owner for owner in owners if owner in trained))
