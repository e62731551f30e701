"""Roles that share the model of another role, so that its weights are in memory once."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import Any

from torch import Tensor
from typing_extensions import override

from realign.api.engine import (
    EngineCapabilities,
    Forward,
    LossFn,
    LossWeightFn,
    PipelinableEngine,
    PostHook,
    StepIf,
    copy_head,
    run_loss,
)
from realign.api.generation import GenerationConfig
from realign.api.microbatch import MicroBatchSpec
from realign.api.model import Model, ModelFacts, ModelSpec
from realign.api.sample import SequenceSample
from realign.api.stats import Stats
from realign.errors import ConfigError, SettingsError
from realign.functional import LMHead
from realign.settings import Count, Settings


class Share(StrEnum):
    """Which policy a role uses from the model that it shares."""

    whole = "whole"
    """The current model: its log-probs, its samples and the values of its value head."""
    reference = "reference"
    """The language model at the start of the run. It is a frozen copy of the top layers over the shared trunk, or the
    base model without its LoRA adapters. It computes log-probs only."""


@dataclass
class SharedModel(Settings, ModelSpec):
    """A role that uses the model of another role. The model is never trained or saved as this role.

    Attributes:
        of: Role whose model is shared.
        branch: whole | reference. A reference requires trains=lora or trains=top_layers in the role `of`, since the
            weights below the frozen copy must not change.
        layers: Number of top layers in the frozen copy; null copies as many as the role trains. It raises an error
            with trains=lora, where the reference is the base model.
    """

    of: str
    branch: Share = Share.whole
    layers: Count | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.layers is not None and self.branch is not Share.reference:
            raise SettingsError(f"layers={self.layers}: requires branch=reference. Remove layers, or set branch.")

    def load(self, name: str, *, seed: int, loaded: Mapping[str, Model] | None = None) -> Model:
        """Return a view of the model of role `of`; both have the same policy version.

        Args:
            name: the role.
            seed: the run's root seed.
            loaded: the models of other roles.

        Raises:
            ConfigError: `loaded` does not contain the role `of`, or its model does not support this branch.
        """
        owner = (loaded or {}).get(self.of)
        if owner is None:
            raise ConfigError(f"models.{name}.of={self.of!r}: no RPC uses this role, so its model is not loaded")
        engine = SharedEngine(name, self.of, owner.engine)
        if self.branch is Share.reference:
            try:
                engine = ReferenceEngine(name, self.of, owner.engine, owner.engine.reference(self.layers))
            except (ConfigError, ValueError) as error:  # ValueError: an engine without reference branches
                raise ConfigError(f"models.{name}: {error}") from error
        view = Model(name, engine, owner.tokenizer, seed, owner.version, owner.saved_views.get(name, {}))
        if self.branch is Share.whole:
            view.external_sampler = owner.external_sampler
        owner.views.append(view)
        return view

    @override
    def facts(self) -> ModelFacts:
        """Return facts of a frozen role, since a shared model is trained only as the role that owns it."""
        if self.branch is Share.reference:
            return ModelFacts(outputs=frozenset({"logprobs"}), trainable=False)
        return ModelFacts(trainable=False)

    def describe(self) -> str:
        """Return a readable description of what is shared."""
        if self.branch is Share.whole:
            return f"the model of {self.of}"
        return f"the frozen start of {self.of}" + (f", top {self.layers} layers" if self.layers else "")


def shared_roles(models: Mapping[str, object]) -> dict[str, str]:
    """Return, for each role that shares a model, a readable description of what it shares."""
    return {role: spec.describe() for role, spec in models.items() if isinstance(spec, SharedModel)}


def check_shared(models: Mapping[str, object]) -> None:
    """Check that every shared model belongs to a role that does not share one itself.

    Raises:
        ConfigError: a role shares the model of a role without one. The message names the valid roles.
    """
    own = [role for role, spec in models.items() if not isinstance(spec, SharedModel)]
    for role, spec in models.items():
        if isinstance(spec, SharedModel) and spec.of not in own:
            valid = f"Valid roles: {', '.join(own)}." if own else "No role has one."
            raise ConfigError(f"models.{role}.of={spec.of!r}: must be a role with its own model. {valid}")


class SharedEngine(PipelinableEngine):
    """An engine that forwards its calls to the engine of another role, and does not train."""

    def __init__(self, name: str, of: str, engine: PipelinableEngine) -> None:
        """Share `engine`, the engine of role `of`, with the role `name`."""
        self.name = name
        self.of = of
        self.engine = engine

    @override
    def capabilities(self) -> EngineCapabilities:
        return replace(self.engine.capabilities(), trainable=False, size="")

    @override
    def forward(self, data: SequenceSample, mb_spec: MicroBatchSpec, post_hook: PostHook) -> SequenceSample:
        return self.engine.forward(data, mb_spec, post_hook)

    @override
    def train_batch(
        self,
        data: SequenceSample,
        mb_spec: MicroBatchSpec,
        loss_fn: LossFn,
        loss_weight_fn: LossWeightFn,
        step_if: StepIf | None = None,
    ) -> Stats:
        """Raise ValueError, since a shared model is trained only as the role that owns it."""
        raise ValueError(f"models.{self.name} shares the model of role {self.of!r} and cannot train")

    @override
    def generate(self, data: SequenceSample, config: GenerationConfig, *, seed: int) -> SequenceSample:
        return self.engine.generate(data, config, seed=seed)

    @override
    def lm_head(self) -> LMHead:
        return self.engine.lm_head()

    @override
    def measure(self, data: SequenceSample, mb_spec: MicroBatchSpec, loss_fn: LossFn) -> Stats:
        return self.engine.measure(data, mb_spec, loss_fn)

    @override
    def reduce(self, x: Tensor) -> Tensor:
        return self.engine.reduce(x)

    @override
    def save(self, path: Path) -> None:
        """Write the whole model of the other role."""
        self.engine.save(path)

    @override
    def state_dict(self) -> dict[str, Any]:
        """Return an empty dict, since the role that owns the model saves the state."""
        return {}

    @override
    def load_state_dict(self, state: Mapping[str, Any], *, weights_only: bool = False) -> None:
        """Raise ValueError for a state that is not empty."""
        if state:
            raise ValueError(f"models.{self.name} shares the model of role {self.of!r}, which saves the state of both")

    @override
    def weights(self) -> dict[str, Tensor]:
        """Return the weights of the other role."""
        return self.engine.weights()

    @override
    def load_weights(self, weights: Mapping[str, Tensor], mix: float = 1.0) -> None:
        """Raise ValueError, since the weights change only through the role that owns the model."""
        raise ValueError(f"models.{self.name} shares the model of role {self.of!r}. Load the weights into {self.of!r}.")


class ReferenceEngine(SharedEngine):
    """A frozen policy inside the model of another role. It computes log-probs only."""

    def __init__(self, name: str, of: str, engine: PipelinableEngine, forward: Forward) -> None:
        """Compute log-probs with `forward`, returned by `PipelinableEngine.reference` of the role `of`."""
        super().__init__(name, of, engine)
        self._score = forward

    @override
    def measure(self, data: SequenceSample, mb_spec: MicroBatchSpec, loss_fn: LossFn) -> Stats:
        """Measure the frozen policy."""
        return run_loss(self.forward, data, mb_spec, loss_fn)

    @override
    def capabilities(self) -> EngineCapabilities:
        return replace(super().capabilities(), outputs=frozenset({"logprobs"}), live_head=False)

    @override
    def forward(self, data: SequenceSample, mb_spec: MicroBatchSpec, post_hook: PostHook) -> SequenceSample:
        return self._score(data, mb_spec, post_hook)

    @override
    def lm_head(self) -> LMHead:
        """Return a copy of the frozen policy's head, which may differ from the head of the trained model."""
        return copy_head(self.forward)

    @override
    def generate(self, data: SequenceSample, config: GenerationConfig, *, seed: int) -> SequenceSample:
        """Raise ValueError, since the branch has no KV cache."""
        raise ValueError(f"models.{self.name} is the reference branch of role {self.of!r}, which cannot generate")

    @override
    def save(self, path: Path) -> None:
        """Raise ValueError, since the folder that the run started from contains these weights."""
        raise ValueError(f"models.{self.name} is the reference branch of role {self.of!r}, which cannot be saved")

    @override
    def weights(self) -> dict[str, Tensor]:
        """Raise ValueError, since the weights are part of another network."""
        raise ValueError(f"models.{self.name} is the reference branch of role {self.of!r} without separate weights")
