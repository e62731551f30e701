"""Roles that share the model of another role: its weights are in memory once."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from torch import Tensor

from realign.api.microbatch import MicroBatchSpec
from realign.api.model import (
    Forward,
    GenerationConfig,
    LossFn,
    LossWeightFn,
    Model,
    ModelFacts,
    ModelSpec,
    PipelinableEngine,
    PostHook,
    StepIf,
    measured,
)
from realign.api.sample import SequenceSample
from realign.api.stats import Stats
from realign.settings import Count, Settings


class Share(StrEnum):
    """What a role sees of the model that it shares."""

    whole = "whole"
    """The model as it is at the time: its log-probs, its samples, the values of its value head."""
    reference = "reference"
    """The language model as it was when the run started: a frozen copy of the top layers over the shared trunk, or the
    base model under the adapters of LoRA. It only scores."""


@dataclass
class SharedModel(Settings, ModelSpec):
    """The model of another role, as a role of its own. It is never trained or saved as this role.

    Attributes:
        of: the role whose model is shared.
        branch: whole | reference. A reference needs a role with trains=lora, or with trains=top_layers: the weights
            below its frozen copy must not change.
        layers: of that copy; null takes as many as the role trains. It raises an error with trains=lora, where the
            reference is the base model.
    """

    of: str
    branch: Share = Share.whole
    layers: Count | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.layers is not None and self.branch is not Share.reference:
            raise ValueError(f"layers={self.layers} belongs to branch=reference, but branch is {self.branch.value}")

    def load(self, name: str, *, seed: int, loaded: Mapping[str, Model] | None = None) -> Model:
        """A view of the model of role `of`; it counts that model's versions.

        Args:
            name: the role.
            seed: the run's root seed.
            loaded: the models of other roles.

        Raises:
            ValueError: the model of role `of` is not among them, or cannot be seen in this way.
        """
        owner = (loaded or {}).get(self.of)
        if owner is None:
            raise ValueError(f"models.{name} shares the model of role {self.of!r}, which takes no part in the graph")
        engine = SharedEngine(name, self.of, owner.machine)
        if self.branch is Share.reference:
            try:
                engine = ReferenceEngine(name, self.of, owner.machine, owner.machine.reference(self.layers))
            except ValueError as error:
                raise ValueError(f"models.{name}: {error}") from error
        view = Model(name, engine, owner.tokenizer, seed, owner.version, owner.saved_views.get(name, {}))
        if self.branch is Share.whole:
            view.external_sampler = owner.external_sampler
        owner.views.append(view)
        return view

    def facts(self) -> ModelFacts:
        """See `ModelSpec.facts`; a shared model is trained as the role that it belongs to."""
        if self.branch is Share.reference:
            return ModelFacts(outputs=frozenset({"logprobs"}), trainable=False)
        return ModelFacts(trainable=False)

    def describe(self) -> str:
        """What is shared, for people."""
        if self.branch is Share.whole:
            return f"the model of {self.of}"
        return f"the frozen start of {self.of}" + (f", top {self.layers} layers" if self.layers else "")


def shared_roles(models: Mapping[str, object]) -> dict[str, str]:
    """What each role that has no model of its own shares, for people."""
    return {role: spec.describe() for role, spec in models.items() if isinstance(spec, SharedModel)}


def check_shared(models: Mapping[str, object]) -> None:
    """Check that every shared model is that of a role which has one of its own.

    Raises:
        ValueError: names the key and the roles that could be meant.
    """
    own = [role for role, spec in models.items() if not isinstance(spec, SharedModel)]
    for role, spec in models.items():
        if isinstance(spec, SharedModel) and spec.of not in own:
            raise ValueError(
                f"models.{role}.of must be a role with a model of its own ({', '.join(own) or 'there is none'}), "
                f"found {spec.of!r}"
            )


class SharedEngine(PipelinableEngine):
    """An engine that does what another one does, but does not train."""

    trainable = False

    def __init__(self, name: str, of: str, engine: PipelinableEngine) -> None:
        """Share `engine`, which is that of role `of`, with the role `name`."""
        self.name = name
        self.of = of
        self.engine = engine

    @property
    def outputs(self) -> frozenset[str]:
        """See `PipelinableEngine.outputs`."""
        return self.engine.outputs

    def forward(self, data: SequenceSample, mb_spec: MicroBatchSpec, post_hook: PostHook) -> SequenceSample:
        """See `PipelinableEngine.forward`."""
        return self.engine.forward(data, mb_spec, post_hook)

    def train_batch(
        self,
        data: SequenceSample,
        mb_spec: MicroBatchSpec,
        loss_fn: LossFn,
        loss_weight_fn: LossWeightFn,
        step_if: StepIf | None = None,
    ) -> Stats:
        """Refuse: what is shared is trained as the role that it belongs to."""
        raise ValueError(f"model {self.name!r} shares the model of role {self.of!r} and does not train; train that one")

    def generate(self, data: SequenceSample, config: GenerationConfig, *, seed: int) -> SequenceSample:
        """See `PipelinableEngine.generate`."""
        return self.engine.generate(data, config, seed=seed)

    @property
    def positions(self) -> int | None:
        """See `PipelinableEngine.positions`."""
        return self.engine.positions

    def measure(self, data: SequenceSample, mb_spec: MicroBatchSpec, loss_fn: LossFn) -> Stats:
        """See `PipelinableEngine.measure`."""
        return self.engine.measure(data, mb_spec, loss_fn)

    def reduce(self, x: Tensor) -> Tensor:
        """See `PipelinableEngine.reduce`."""
        return self.engine.reduce(x)

    def start_step(self, version: int) -> None:
        """Nothing: schedules follow the role that trains."""

    def save(self, path: Path) -> None:
        """See `PipelinableEngine.save`: the whole model of the other role."""
        self.engine.save(path)

    def state_dict(self) -> dict[str, Any]:
        """Nothing: the state is that of the role whose model is shared."""
        return {}

    def fixed_weights(self) -> dict[str, Any]:
        """Nothing, as `state_dict`."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any], *, weights_only: bool = False) -> None:
        """Refuse anything but what `state_dict` gives."""
        if state:
            raise ValueError(f"model {self.name!r} shares the model of role {self.of!r} and has no state of its own")

    def weights(self) -> dict[str, Tensor]:
        """See `PipelinableEngine.weights`: those of the other role."""
        return self.engine.weights()

    def load_weights(self, weights: Mapping[str, Tensor], mix: float = 1.0) -> None:
        """Refuse: what is shared changes as the role that it belongs to."""
        raise ValueError(f"model {self.name!r} shares the model of role {self.of!r}; give the weights to that one")


class ReferenceEngine(SharedEngine):
    """A frozen policy inside the model of another role: it scores, and nothing else."""

    def __init__(self, name: str, of: str, engine: PipelinableEngine, forward: Forward) -> None:
        """Score with `forward`, which the engine of role `of` gave."""
        super().__init__(name, of, engine)
        self._score = forward

    def measure(self, data: SequenceSample, mb_spec: MicroBatchSpec, loss_fn: LossFn) -> Stats:
        """See `PipelinableEngine.measure`; of the frozen start."""
        return measured(self.forward, data, mb_spec, loss_fn)

    @property
    def outputs(self) -> frozenset[str]:
        """See `PipelinableEngine.outputs`."""
        return frozenset({"logprobs"})

    def forward(self, data: SequenceSample, mb_spec: MicroBatchSpec, post_hook: PostHook) -> SequenceSample:
        """See `PipelinableEngine.forward`."""
        return self._score(data, mb_spec, post_hook)

    def generate(self, data: SequenceSample, config: GenerationConfig, *, seed: int) -> SequenceSample:
        """Refuse: the branch has no cache of its own."""
        raise ValueError(f"model {self.name!r} is the frozen start of role {self.of!r}: it scores and cannot generate")

    def save(self, path: Path) -> None:
        """Refuse: the folder that the run started from holds these weights."""
        raise ValueError(f"model {self.name!r} is the frozen start of role {self.of!r} and has no weights to save")

    def weights(self) -> dict[str, Tensor]:
        """Refuse: they are a part of another network."""
        raise ValueError(f"model {self.name!r} is the frozen start of role {self.of!r} and has no weights of its own")
