"""The model of a role (`Model`), and the spec that loads it (`ModelSpec`)."""

from __future__ import annotations

import copy
import operator
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from realign.api.engine import PipelinableEngine
from realign.api.in_process_sampler import CopySampler, InProcessSampler
from realign.api.memory import MemoryChoice
from realign.api.sampler import Sampler
from realign.api.seeds import derive_seed


class Model:
    """A role of the graph ("actor", "ref", ...): its engine, tokenizer and policy version.

    Attributes:
        name: name of the role.
        tokenizer: converts between text and token ids.
        seed: root seed of the run. `call_seed` derives other seeds from it.
        version: number of completed training steps (calls of `train_step`), see `publish_weights`. For a role
            synced from another role (`Sync`): the version of the latest weights that its own weights include.
        saved: interface state that an earlier run saved with these weights (`ModelInterface.load_saved_state`).
        saved_views: saved interface state of the roles that share this model, by role.
        views: roles that share this model instead of having separate weights. They have the same version.
        lead: runs a call on rank 0 only, such as one with external side effects, and broadcasts its result to all
            ranks. With one process, it just runs the call.
        external_sampler: sampler that replaces the engine's, such as a client of a server; None: the engine samples.
        background_sampler: sampler with a copy of the weights, which samples while the engine trains; None without
            rollout=async, and if the external sampler does that.
        pass_heads: by name of an RPC that writes hidden states of changing weights: gives the head of the same weights
            to the engines that read the hidden states.
    """

    def __init__(
        self,
        name: str,
        engine: PipelinableEngine | None,
        tokenizer: Any = None,
        seed: int = 0,
        version: int = 0,
        saved: Mapping[str, Any] | None = None,
        *,
        saved_views: Mapping[str, Mapping[str, Any]] | None = None,
        lead: Callable[[Callable[[], Any]], Any] = operator.call,
        external_sampler: Sampler | None = None,
    ) -> None:
        """Create the model of a role; `engine` is None for a role without a network, such as a reward rule."""
        self.name = name
        self._engine = engine
        self.tokenizer = tokenizer
        self.seed = seed
        self.version = version
        self.saved = saved or {}
        self.saved_views = saved_views or {}
        self.views: list[Model] = []
        self.lead = lead
        self.external_sampler = external_sampler
        self.background_sampler: Sampler | None = None
        self.pass_heads: dict[str, list[Callable[[], None]]] = {}
        self._in_process: InProcessSampler | None = None

    @property
    def has_engine(self) -> bool:
        """Whether the role has a network."""
        return self._engine is not None

    @property
    def engine(self) -> PipelinableEngine:
        """The engine of the role's network.

        Raises:
            ValueError: the role has none.
        """
        if self._engine is None:
            raise ValueError(f"role {self.name!r} has no model. Set models.{self.name}")
        return self._engine

    @engine.setter
    def engine(self, engine: PipelinableEngine | None) -> None:
        self._engine = engine

    def replaced(
        self,
        *,
        engine: PipelinableEngine | None = None,
        seed: int | None = None,
        version: int | None = None,
        external_sampler: Sampler | None = None,
        lead: Callable[[Callable[[], Any]], Any] | None = None,
    ) -> Model:
        """Return a copy for some calls, with another engine, seed, version, sampler or `lead`."""
        model = copy.copy(self)
        model._engine = self._engine if engine is None else engine
        model.seed = self.seed if seed is None else seed
        model.version = self.version if version is None else version
        model.external_sampler = self.external_sampler if external_sampler is None else external_sampler
        model.lead = self.lead if lead is None else lead
        model._in_process = None  # it samples with the other engine and version
        return model

    @property
    def sampler(self) -> Sampler:
        """Sampler of this role: the external sampler, or else the engine's.

        Raises:
            ValueError: the role has neither.
        """
        if self.external_sampler is not None:
            return self.external_sampler
        if self._in_process is None or self._in_process.engine is not self.engine:
            self._in_process = InProcessSampler(self.engine, version=self.version)
        if self._in_process.version != self.version:
            self._in_process.update(self.engine, self.version)
        return self._in_process

    def publish_weights(self, version: int | None = None) -> None:
        """Give the engine's weights to all samplers that have a copy of them. Call it after every change.

        The only way of new weights to samplers: `external_sampler` and `background_sampler` sample with them when this
        returns. It also numbers the weights, and lets the engine's schedules follow.

        Args:
            version: the version of the weights, also of the views; None is the next one, after a training step.
        """
        self.version = self.version + 1 if version is None else version
        for view in self.views:
            view.version = self.version
        self.engine.start_step(self.version)
        for sampler in (self.external_sampler, self.background_sampler):
            if sampler is not None:
                sampler.update(self.engine, self.version)

    def call_seed(self, purpose: str) -> int:
        """Derive a seed from the run's seed, the role, `purpose` and the version."""
        # The version instead of a counter of calls: a resumed run draws the numbers that it would have drawn.
        return derive_seed(self.seed, self.name, purpose, self.version)


@dataclass(frozen=True)
class Compute:
    """How this machine computes a model."""

    device: str
    """Type of the device, such as "cpu" or "cuda"."""
    precision: str
    """Data type of matrix products, such as "bfloat16"."""
    attention: str
    """Preferred kernel of packed attention."""
    rounded: str = ""
    """What else is computed in a lower precision; empty if nothing."""

    def __str__(self) -> str:
        """Return a readable description."""
        rounded = f" ({self.rounded})" if self.rounded else ""
        return f"{self.device}, {self.precision} products{rounded}, attention: {self.attention}"


@dataclass(frozen=True)
class ModelFacts:
    """Facts about a model that are available before it is loaded. None means unknown."""

    path: str | None = None
    """Folder or hub name of the weights."""
    device: str | None = None
    """Device in the config, such as "cuda:0" or "auto"."""
    outputs: frozenset[str] | None = None
    """See `EngineCapabilities.outputs`."""
    trainable: bool | None = None
    """Whether an optimizer is configured."""
    branches: bool | None = None
    """Whether the trained model can also keep its initial weights (it trains only adapters or its top layers)."""
    rate_ends: int | None = None
    """Number of steps after which the learning rate is 0; None if it never reaches 0."""
    rate_unit: str = "optimizer_step"
    """Unit of `rate_ends`: optimizer_step or train_step."""
    compute: Compute | None = None
    """How the machine that reads the config would compute the model."""


@dataclass(frozen=True)
class TokenizerSource:
    """Where the tokenizer of a role is read from."""

    path: str
    """Folder or hub name."""
    key: str
    """Config key that contains the path, for messages."""
    role: str
    """Role of this key."""
    trust_remote_code: bool = False
    """Whether to run code in the folder or hub repository."""


class ModelSpec(ABC):
    """Loads the model of a role, such as `realign.engines.TransformersModel`. Subclasses implement `load`."""

    @abstractmethod
    def load(self, name: str, *, seed: int) -> Model:
        """Load the model of the role `name`; `seed` is the run's root seed."""

    def check(self, name: str) -> None:  # noqa: B027 (optional)
        """Check the spec of the role `name` before any weights are read.

        Raises:
            ValueError: the spec is invalid. The message names the key, its value and the valid values.
        """

    def facts(self) -> ModelFacts:
        """Return facts for checks, placement and the launch table, without loading the model."""
        return ModelFacts()

    def frozen_start(self, role: str) -> ModelSpec:
        """Return the spec of a frozen copy of the weights that this spec of `role` loads, such as a reference policy.

        The default implementation returns the spec itself, for specs that configure no training.
        """
        return self

    def for_sampling(self) -> ModelSpec:
        """Return the spec of a copy that only samples, for asynchronous rollout."""
        return self

    def background_sampler(self, name: str, *, seed: int, recompute: bool) -> Sampler:
        """Load a second copy of the model and return its sampler, which samples while the role's engine trains.

        The default implementation samples one call after another, and new weights wait for the running call.

        Args:
            name: name of the role, for messages.
            seed: root seed of the run.
            recompute: whether to recompute the KV cache of unfinished responses when the weights change.

        Raises:
            ValueError: the model cannot be loaded or cannot sample.
        """
        return CopySampler(self.for_sampling().load(name, seed=seed).engine)

    def for_evaluation(self) -> ModelSpec:
        """Return the spec of the same model without its optimizer, for `realign eval`."""
        return self

    def memory_choices(self) -> frozenset[MemoryChoice]:
        """Return the settings that are `auto`, which the runtime decides by the free memory of the device."""
        return frozenset()

    def with_memory_choice(self, choice: MemoryChoice, on: bool) -> ModelSpec:
        """Return a spec with the value of one of its `memory_choices`."""
        raise ValueError(f"{type(self).__name__} has no choice of {choice}")

    def rate_by_size(self, name: str) -> tuple[float, int] | None:
        """Return the learning rate that the size of the model decides, and its number of weights.

        None if the rate is set, or if the size isn't known yet: a model of the hub that is still to be downloaded.
        """
        return None

    def describe_ranks(self, name: str, ranks: int) -> str | None:
        """Return how several processes divide the model of the role `name`; None if each of them has all of it."""
        return None

    def check_ranks(self, name: str, ranks: int, *, replays: bool, referenced: bool) -> None:  # noqa: B027 (optional)
        """Check that several processes can run the model of the role `name`, before any weights are read.

        Args:
            name: the role, for messages.
            ranks: number of processes.
            replays: whether the role records or replays choices of experts.
            referenced: whether another role is a `reference` of this model.

        Raises:
            ValueError: they cannot. The message has the setting and the reason.
        """

    def hash_of_weights(self, name: str) -> str | None:
        """Return a hash of the weights that `load` reads, without loading them; None if only `load` can tell."""
        return None

    def tokenizer_source(self, role: str) -> TokenizerSource | None:
        """Return where the tokenizer of `role` is read from, so that other roles can use it; None if unknown."""
        return None

    def with_tokenizer(self, source: TokenizerSource) -> ModelSpec:
        """Return a spec that uses this tokenizer, unless the spec itself names one.

        The default implementation returns the spec itself, for specs that load their own tokenizer.
        """
        return self
