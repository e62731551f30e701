"""The contract of a machine, `PipelinableEngine`, and what an algorithm exchanges with it.

Letters of shapes: T packed tokens, S sequences, V vocabulary. An interface knows no device, process, file or config;
an engine knows no algorithm.
"""

from __future__ import annotations

import hashlib
import json
import math
import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, TypeAlias

from torch import Tensor

from realign.api.data import SequenceSample
from realign.api.microbatch import MicroBatchSpec
from realign.api.stats import Stat, Stats, TokenValues
from realign.errors import SettingsError


@dataclass
class GenerationConfig:
    """How responses are sampled. These values are the whole truth: no `generation_config.json` of a model leaks in.

    Attributes:
        n: responses per prompt (the group size G).
        max_new_tokens: tokens per response, the stop token included.
        min_new_tokens: no stop token can be sampled before this many tokens (changes the distribution).
        temperature: divides the logits; applies to the reported log-probs too. At least 0.01.
        top_k: keep the k most likely tokens; 0 keeps all (changes the distribution).
        top_p: keep the smallest set of tokens with this mass; 1 keeps all (changes the distribution).
        greedy: take the most likely token; log-probs are those of the plain softmax at `temperature`.
        fixed_length: sample exactly `max_new_tokens`; stop tokens are ordinary tokens.
        stop_token_ids: tokens that end a response and belong to it; None means the model's own end tokens.
        stop_strings: texts that end a response as soon as its decoded text contains one.
        max_slots: sequences decoded at once; None lets the engine choose.
    """

    n: int = 1
    max_new_tokens: int = 256
    min_new_tokens: int = 0
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    greedy: bool = False
    fixed_length: bool = False
    stop_token_ids: list[int] | None = None
    stop_strings: list[str] = field(default_factory=list)
    max_slots: int | None = None

    def __post_init__(self) -> None:
        checks = {
            "n": (self.n >= 1, "at least 1"),
            "max_new_tokens": (self.max_new_tokens >= 1, "at least 1"),
            "min_new_tokens": (0 <= self.min_new_tokens <= self.max_new_tokens, "from 0 to max_new_tokens"),
            "temperature": (
                0.01 <= self.temperature < math.inf,
                "finite and at least 0.01 (for the most likely token use greedy=true)",
            ),
            "top_k": (self.top_k >= 0, "at least 0 (0 keeps all tokens)"),
            "top_p": (0 < self.top_p <= 1, "in (0, 1]"),
            "stop_token_ids": (min(self.stop_token_ids or [0]) >= 0, "token ids, from 0 on"),
            "max_slots": (self.max_slots is None or self.max_slots >= 1, "at least 1, or null"),
        }
        for name, (ok, valid) in checks.items():
            if not ok:
                raise ValueError(f"generation.{name} must be {valid}, found {getattr(self, name)}")
        if "" in self.stop_strings:
            raise ValueError("generation.stop_strings holds an empty string, which would end every response at once")

    def distorted(self) -> list[str]:
        """Settings under which the sampled distribution is not the model's softmax at `temperature`.

        A probability ratio against log-probs of the whole softmax would be wrong under any of them.
        """
        found = [("greedy", self.greedy), ("top_k", self.top_k > 0), ("top_p", self.top_p < 1)]
        found.append(("min_new_tokens", self.min_new_tokens > 0 and not self.fixed_length))
        return [f"{name}={getattr(self, name)}" for name, on in found if on]

    def check_ratios(self) -> None:
        """Reject settings under which probability ratios of a training loss would be wrong.

        Raises:
            SettingsError: names the setting.
        """
        if distorted := self.distorted():
            raise SettingsError(
                f"generation.{distorted[0]}: changes the sampled distribution, so ratios in the loss would be wrong. "
                "Use neutral settings for training (evaluation may use any)"
            )

    def describe(self) -> str:
        """What is not neutral, and the temperature, for people."""
        return f"{', '.join(self.distorted()) or 'neutral'}, temperature {self.temperature:g}"


class ModelOutput(Protocol):
    """What one packed forward pass can give. Nothing of shape [T, V] is made unless `logits` is asked for."""

    def logprobs(self, *, temperature: float = 1.0, where_T: Tensor | None = None) -> Tensor:
        """[T] fp32: log p(token t | tokens before t) at `temperature`; 0 at first tokens and off `where_T`."""
        ...

    def logprobs_and_entropy(self, *, temperature: float = 1.0, where_T: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """([T], [T]) fp32: log-probs, and the entropy (nats) of the distribution that token t was drawn from."""
        ...

    @property
    def logits(self) -> Tensor:
        """[T, V] fp32: logits after reading token t (they predict t + 1). Costs T x V memory."""
        ...

    def values(self) -> Tensor:
        """[T] fp32, of a model with a scalar head: value of the state before token t; 0 at first tokens."""
        ...

    def scores(self) -> Tensor:
        """[S] fp32, of a model with a scalar head: its output at the last token of each sequence; 0 if empty."""
        ...


PostHook: TypeAlias = Callable[[ModelOutput, SequenceSample], SequenceSample]
LossFn: TypeAlias = Callable[
    [ModelOutput, SequenceSample], tuple[Tensor, Mapping[str, Stat | TokenValues | tuple[Tensor, Tensor]]]
]
LossWeightFn: TypeAlias = Callable[[SequenceSample], Tensor]
StepIf: TypeAlias = Callable[[Stats], bool]


class PipelinableEngine(Protocol):
    """A machine for one network. It cuts, packs, moves and shards; it knows no algorithm."""

    @property
    def trainable(self) -> bool:
        """Whether `train_batch` may be called (an optimizer was configured)."""
        ...

    @property
    def outputs(self) -> frozenset[str]:
        """What its `ModelOutput` can give: "logprobs" of a language model, "values" and "scores" of a scalar head."""
        ...

    def forward(self, data: SequenceSample, mb_spec: MicroBatchSpec, post_hook: PostHook) -> SequenceSample:
        """Run without gradient; return the keys that `post_hook` added to each micro-batch, in the order of `data`."""
        ...

    def train_batch(
        self,
        data: SequenceSample,
        mb_spec: MicroBatchSpec,
        loss_fn: LossFn,
        loss_weight_fn: LossWeightFn,
        step_if: StepIf | None = None,
    ) -> Stats:
        """One optimizer step on the whole of `data`.

        `loss_fn` returns a sum; the engine divides it by `loss_weight_fn(data)` summed over data-parallel ranks, before
        the first backward pass. It may be called for several micro-batches at a time, in threads, and so must not write
        what its calls share. A weight of 0, a zero gradient or a non-finite loss or gradient makes no step; nor does
        `step_if`, asked with the metrics of the whole batch over all ranks, when it says False (`vetoed_steps`): no
        weight, moment or schedule moves then.

        Returns:
            The metrics of `loss_fn`, merged, and the engine's own: `loss`, `grad_norm`, `lr`, `skipped_steps`, ...
        """
        ...

    def generate(self, data: SequenceSample, config: GenerationConfig, *, seed: int) -> SequenceSample:
        """Sample `config.n` responses for each prompt of key `prompt_ids`.

        Returns:
            A sample of the same ids: `input_ids`, `prompt_mask`, `loss_mask`, `logprobs` [T] and `truncated` [S] bool.
        """
        ...

    def reduce(self, x: Tensor) -> Tensor:
        """Sum over data-parallel ranks; the identity in one process."""
        ...

    def start_step(self, version: int) -> None:
        """Tell the engine how many training steps (rollout batches) lie behind; schedules counted in them follow."""
        ...

    def save(self, path: Path) -> None:
        """Write an ordinary Hugging Face folder: safetensors, config and tokenizer."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """What training changes (weights, moments, counts), as plain values and tensors."""
        ...

    def fixed_weights(self) -> dict[str, Any]:
        """The weights that it does not change, which `state_dict` leaves out; empty where all of them train."""
        ...

    def load_state_dict(self, state: Mapping[str, Any], *, weights_only: bool = False) -> None:
        """Take back what `state_dict` gave; with `weights_only`, the optimizer stays as it is."""
        ...

    def weights(self) -> dict[str, Tensor]:
        """All weights of the network by name, each whole and once, a value head's after "value_head.".

        They may be views: what trains the network changes them.
        """
        ...

    def load_weights(self, weights: Mapping[str, Tensor], mix: float = 1.0) -> None:
        """Make each weight (1 - mix) of itself plus `mix` of the one given; 1, the default, copies bit by bit.

        Raises:
            ValueError: other names or shapes than `weights()` has, or `mix` is not in (0, 1].
        """
        ...


@dataclass
class Model:
    """A role of the graph ("actor", "ref", ...): an engine, its tokenizer, and how often it was trained.

    Attributes:
        name: the role.
        engine: the machine; None for a role that needs no network (a rule that computes rewards).
        tokenizer: turns ids into text and back.
        seed: the run's root seed; derive others with `call_seed`.
        version: training steps (calls of `train_step`) done so far; advanced by the runtime. Of a role that takes its
            weights from another (`Sync`): the version of the latest ones that are in them, wholly or in part.
        saved: what the interface of an earlier run kept with these weights (`ModelInterface.adopt`).
        views: roles that share this model and have no weights of their own; their version follows.
        saved_views: what the interfaces of such roles kept with these weights, by role.
        lead: makes a call that one process alone may make, such as of a world outside, and gives what came of it to
            every process of the run; where there is one process, just makes it.
    """

    name: str
    engine: PipelinableEngine | None
    tokenizer: Any = None
    seed: int = 0
    version: int = 0
    saved: Mapping[str, Any] = field(default_factory=dict)
    views: list[Model] = field(default_factory=list)
    saved_views: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    lead: Callable[[Callable[[], Any]], Any] = operator.call

    @property
    def machine(self) -> PipelinableEngine:
        """The engine, or a clear error for a role that has none."""
        if self.engine is None:
            raise ValueError(f"role {self.name!r} has no model: give it one under models.{self.name}")
        return self.engine

    def advance(self) -> None:
        """Count one training step, and let the engine's schedules follow."""
        self.move_to(self.version + 1)

    def move_to(self, version: int) -> None:
        """Have this version, with all views, and let the engine's schedules follow."""
        self.version = version
        for view in self.views:
            view.version = version
        self.machine.start_step(version)

    def call_seed(self, purpose: str) -> int:
        """A seed that is a pure function of the run's seed, the role, `purpose` and the version."""
        return derive_seed(self.seed, self.name, purpose, self.version)


def derive_seed(seed: int, *what: str | int) -> int:
    """A 63-bit seed for one use, independent between uses: the hash of the root seed and the names of the use.

    The JSON list keeps the names apart: ("a", "b") is another use than ("a/b",), and 1 another than "1".
    """
    text = json.dumps([part if isinstance(part, str) else int(part) for part in (seed, *what)])
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1


__all__ = [
    "GenerationConfig",
    "LossFn",
    "LossWeightFn",
    "Model",
    "ModelOutput",
    "PipelinableEngine",
    "PostHook",
    "StepIf",
    "derive_seed",
]
