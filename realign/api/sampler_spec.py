"""`SamplerSpec`: the sampler settings of a role, and the model specs that construct samplers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Protocol, runtime_checkable

from realign.api.sampler import Capabilities, Sampler, WeightSource
from realign.settings import Settings


@dataclass
class SamplerSpec(Settings):
    """Sampler of a role (config node `models.ROLE.sampler`). Subclasses construct samplers outside the engine.

    An external sampler serves synchronous and asynchronous rollout, evaluation, calibration and chat. The model calls
    its `update` after every change of the weights.
    """

    external: ClassVar[bool] = True
    """Whether `open` returns a sampler. If False, the role's engine samples."""

    torchrun: ClassVar[bool] = False
    """Whether the external sampler works under torchrun, where all ranks call `open` and the methods of the sampler."""

    def check(self, where: str) -> None:
        """Check the configuration before any weights are loaded.

        Args:
            where: the key of this node, for messages.

        Raises:
            ValueError: the configuration is invalid. The message names the key.
        """

    def capabilities(self) -> Capabilities:
        """Return the guarantees of the sampler, for the launch table."""
        raise NotImplementedError(f"{type(self).__name__} does not implement capabilities")

    def open(self, name: str, source: WeightSource, tokenizer: object) -> Sampler:
        """Construct the sampler with the weights of `source` as version 0.

        Args:
            name: name of the role, for messages.
            source: engine of the role.
            tokenizer: tokenizer of the role.

        Raises:
            ValueError: the sampler cannot be constructed. The message names the key.
        """
        raise NotImplementedError(f"{type(self).__name__} does not implement open")


@runtime_checkable
class ConfiguresSampler(Protocol):
    """A model spec with a node `sampler`."""

    @property
    def sampler(self) -> SamplerSpec:
        """Sampler settings of the role."""
        ...


@runtime_checkable
class SamplesInBackground(Protocol):
    """A model spec that can construct a sampler for asynchronous rollout (rollout=async)."""

    def background_sampler(self, name: str, *, seed: int, recompute: bool) -> Sampler:
        """Load a second copy of the model and return its sampler, which samples while the role's engine trains.

        Args:
            name: name of the role, for messages.
            seed: root seed of the run.
            recompute: whether to recompute the KV cache of unfinished responses when the weights change.

        Raises:
            ValueError: the model cannot be loaded or cannot sample.
        """
        ...


def samples_externally(spec: object) -> bool:
    """Return whether an external sampler samples for the role of this model spec."""
    return isinstance(spec, ConfiguresSampler) and spec.sampler.external


__all__ = ["ConfiguresSampler", "SamplerSpec", "SamplesInBackground", "samples_externally"]
