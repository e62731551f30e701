"""`Servers`: the config node of a sampler over inference servers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, Protocol, runtime_checkable

from realign.api.sampler import Sampler, WeightSource
from realign.engines.distributed.ranks import current
from realign.engines.servers.probe import Probe
from realign.engines.servers.ranked import RankedSampler
from realign.engines.servers.sampler import ServerSampler, check_adapter
from realign.engines.servers.settings import ServerSettings
from realign.errors import ConfigError

_PROBE_TOKENS = 48


@runtime_checkable
class HasEndTokens(Protocol):
    """An engine that knows the end tokens of its model."""

    @property
    def eos_token_ids(self) -> Sequence[int]:
        """End tokens."""
        ...


@dataclass
class Servers(ServerSettings):
    """Samples with inference servers over HTTP. Each request goes to the server with the fewest requests."""

    torchrun: ClassVar[bool] = True

    def open(self, name: str, source: WeightSource, tokenizer: object) -> Sampler:
        """See `SamplerSpec`: starts servers if no `urls` are set, and sends the weights to all servers.

        Under torchrun, rank 0 does.
        """
        ids, stop_ids = probe_ids(tokenizer), end_tokens(name, source, tokenizer)
        check_adapter(f"models.{name}.sampler", self, source)
        ranks = current()
        open_own = partial(ServerSampler, name, self, source, stop_ids, ids, alone=ranks.size == 1)
        if ranks.size == 1:
            return open_own()
        return RankedSampler(ranks, self, source, Probe(ids, self.probe_tolerance), open_own)


def end_tokens(name: str, source: WeightSource, tokenizer: Any) -> tuple[int, ...]:
    """Return the end tokens of the engine, or else of the tokenizer.

    Raises:
        ConfigError: neither has any.
    """
    if isinstance(source, HasEndTokens) and (ids := tuple(source.eos_token_ids)):
        return ids
    if (end := getattr(tokenizer, "eos_token_id", None)) is None:
        raise ConfigError(f"models.{name}: neither the engine nor the tokenizer has an end token, which servers need.")
    return (int(end),)


def probe_ids(tokenizer: Any) -> list[int]:
    """Return the text by which weights are compared: tokens spread over the vocabulary; empty without a tokenizer."""
    words = 0 if tokenizer is None else len(tokenizer)
    return [(i * 7919 + 11) % words for i in range(_PROBE_TOKENS)] if words else []
