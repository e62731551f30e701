"""`CachedEngine`: a frozen model that scores each row of a run once, and is loaded only while log-probs are missing."""

from __future__ import annotations

import gc
import hashlib
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor
from typing_extensions import override

from realign.api.engine import (
    EngineCapabilities,
    LossFn,
    LossWeightFn,
    ModelOutput,
    PipelinableEngine,
    PostHook,
    StepIf,
)
from realign.api.generation import GenerationConfig
from realign.api.microbatch import MicroBatchSpec
from realign.api.model import Model, ModelSpec
from realign.api.sample import INDEX_KEYS, TOKENS, SequenceSample
from realign.api.stats import Stats
from realign.errors import ConfigError, DataError
from realign.ranks import current

_WHERE = "cached_where"


class CachedEngine(PipelinableEngine):
    """A frozen model that answers with log-probs that it has computed. It loads its network when one is missing."""

    def __init__(self, name: str, spec: ModelSpec, load: Callable[[], Model]) -> None:
        """Make the engine of a role.

        Args:
            name: the role.
            spec: the settings of its model.
            load: loads the model.
        """
        self.name = name
        self.entries: dict[str, Tensor] = {}
        """Log-probs by the address of a sequence, on rank 0, so that all ranks agree on what is missing."""
        self.cached = 0
        """Number of sequences whose log-probs were known."""
        self.computed = 0
        """Number of sequences that the network scored."""
        self._outputs, self._load = spec.facts().outputs or frozenset({"logprobs"}), load
        self._model: Model | None = None
        sha256 = current().lead(partial(spec.hash_of_weights, name))
        if sha256 is None:
            weights = self._network().weights()  # this may also download the files
            sha256 = current().lead(partial(spec.hash_of_weights, name)) or _hash_of_tensors(weights)
        self.sha256 = sha256
        """Hash of the weights, or of the files with them."""

    def _network(self) -> PipelinableEngine:
        if self._model is None:
            self._model = self._load()
        return self._model.engine

    def release(self) -> None:
        """Free the network."""
        if self._model is not None:
            self._model = None
            gc.collect()
            if torch.cuda.is_available():
                torch.cuda.empty_cache()

    @override
    def capabilities(self) -> EngineCapabilities:
        return EngineCapabilities(outputs=self._outputs, trainable=False)

    @override
    def forward(self, data: SequenceSample, mb_spec: MicroBatchSpec, post_hook: PostHook) -> SequenceSample:
        """Call `post_hook` once on all of `data`, with an output that has log-probs only."""
        hooked = post_hook(cast("ModelOutput", _CachedOutput(self, data, mb_spec)), data)
        return hooked.select(hooked.keys - data.keys)

    def logprobs(self, data: SequenceSample, mb_spec: MicroBatchSpec, temperature: float, where_T: Tensor) -> Tensor:
        """Return the log-probs of a batch, and 0 outside of `where_T`: [T] fp32.

        Raises:
            DataError: a sequence is longer than the context window of the model.
        """
        lengths = data.lengths[TOKENS]
        keys = _addresses(data, temperature, where_T)
        entries = current().lead(partial(self._read, keys))
        missing = [s for s, entry in enumerate(entries) if entry is None]
        if missing:
            # whole prompts, since their sequences are scored together
            prompts = sorted({int(lengths.prompt_of_sequence[s]) for s in missing})
            scored = self._score(data.with_tokens(**{_WHERE: where_T}).take(prompts), mb_spec, temperature)
            chosen = set(prompts)
            sequences = [s for s, p in enumerate(lengths.prompt_of_sequence.tolist()) if p in chosen]
            for s, entry in zip(sequences, scored, strict=True):
                entries[s] = entry
            current().lead(partial(self.entries.update, {keys[s]: entries[s] for s in missing}))
        self.computed += len(missing)
        self.cached += len(keys) - len(missing)
        scored_N = torch.cat([torch.zeros(0), *entries])
        logprobs_T = torch.zeros(len(where_T), dtype=scored_N.dtype)  # fp64 of an exact engine stays
        logprobs_T[where_T] = scored_N
        return logprobs_T

    def _read(self, keys: Sequence[str]) -> list[Any]:
        return [self.entries.get(key) for key in keys]

    def _score(self, data: SequenceSample, mb_spec: MicroBatchSpec, temperature: float) -> list[Tensor]:
        """Return the log-probs of the marked tokens of each sequence."""
        network, longest = self._network(), int(data.lengths[TOKENS].flat.max())
        limit = network.capabilities().positions
        if limit is not None and longest > limit:
            raise DataError(
                f"models.{self.name}: a row has {longest} tokens, but the model reads at most {limit}. Set a lower "
                "data.max_tokens."
            )

        def post_hook(output: ModelOutput, mb: SequenceSample) -> SequenceSample:
            return mb.with_tokens(logprobs=output.logprobs(temperature=temperature, where_T=mb[_WHERE]))

        scored = data.merge(network.forward(data, mb_spec, post_hook))
        pairs = zip(scored.sequences("logprobs"), scored.sequences(_WHERE), strict=True)
        return [logprobs_N[where_N].clone() for logprobs_N, where_N in pairs]

    @override
    def train_batch(
        self,
        data: SequenceSample,
        mb_spec: MicroBatchSpec,
        loss_fn: LossFn,
        loss_weight_fn: LossWeightFn,
        step_if: StepIf | None = None,
    ) -> Stats:
        """Raise ValueError, since the model is frozen."""
        raise self._refusal("cannot train")

    @override
    def generate(self, data: SequenceSample, config: GenerationConfig, *, seed: int) -> SequenceSample:
        """Raise ValueError, since samples are not cached."""
        raise self._refusal("cannot sample")

    @override
    def weights(self) -> dict[str, Tensor]:
        """Return the weights of the network, which is loaded if necessary."""
        return self._network().weights()

    @override
    def load_weights(self, weights: Mapping[str, Tensor], mix: float = 1.0) -> None:
        """Raise ValueError, since the log-probs are those of other weights."""
        raise self._refusal("cannot change its weights")

    @override
    def fixed_weights(self) -> dict[str, Any]:
        """Return the hash of the weights, so that a resumed run notices others."""
        return {"files": torch.tensor(list(bytes.fromhex(self.sha256)), dtype=torch.uint8)}

    @override
    def state_dict(self) -> dict[str, Any]:
        """Return an empty dict, since the model does not change."""
        return {}

    @override
    def load_state_dict(self, state: Mapping[str, Any], *, weights_only: bool = False) -> None:
        """Raise ValueError for a state that is not empty."""
        if state:
            raise self._refusal("has no state")

    @override
    def save(self, path: Path) -> None:
        """Write the model, which is loaded if necessary."""
        self._network().save(path)

    def _refusal(self, what: str) -> ValueError:
        return ValueError(f"models.{self.name} {what}, since cache_reference=true")


class _CachedOutput:
    """The part of `ModelOutput` that `CachedEngine` has."""

    def __init__(self, engine: CachedEngine, data: SequenceSample, mb_spec: MicroBatchSpec) -> None:
        self._engine, self._data, self._mb_spec = engine, data, mb_spec

    def logprobs(self, *, temperature: float = 1.0, where_T: Tensor | None = None) -> Tensor:
        """See `ModelOutput.logprobs`."""
        where_T = torch.ones(len(self._data[TOKENS]), dtype=torch.bool) if where_T is None else where_T
        return self._engine.logprobs(self._data, self._mb_spec, temperature, where_T)

    def __getattr__(self, name: str) -> Any:
        # an interface of a user, since those of the package that need more are not cached
        raise ConfigError(
            f"cache_reference=true: interfaces.{self._engine.name} reads {name!r} of its model, but only log-probs are "
            "cached. Set cache_reference=false."
        )


def _hash_of_tensors(weights: Mapping[str, Tensor]) -> str:
    digest = hashlib.sha256()
    for name, x in sorted(weights.items()):
        digest.update(f"{name}\0{x.dtype}\0{tuple(x.shape)}\0".encode())
        digest.update(x.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def _addresses(data: SequenceSample, temperature: float, where_T: Tensor) -> list[str]:
    """Return the address of each sequence: a hash of its tokens, of the scored ones, and of the temperature."""
    cut = data.lengths[TOKENS].flat.tolist()
    keys = sorted(data.data.keys() - {*INDEX_KEYS})  # equal sequences share an entry, whichever of a prompt they are
    packed = [data[key].split(cut) for key in keys] + [where_T.split(cut)]
    start = repr((keys, float(temperature))).encode()
    addresses = []
    for tensors in zip(*packed, strict=True):
        digest = hashlib.sha256(start)
        for x_N in tensors:
            digest.update(f"{x_N.dtype}{tuple(x_N.shape)}".encode() + x_N.contiguous().numpy().tobytes())
        addresses.append(digest.hexdigest())
    return addresses
