"""`RankedSampler`: inference servers of a run that torchrun started.

Rank 0 has the servers, and broadcasts the responses to the other ranks. Each rank gets the whole batch, of which its
engine takes its part. All ranks gather the weights of an update, and rank 0 writes them.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from realign.api.generation import GenerationConfig
from realign.api.requests import Handle, Request
from realign.api.sample import SequenceSample
from realign.api.sampler import PROMPTS, Capabilities, WeightSource
from realign.engines.distributed.ranks import Ranks
from realign.engines.servers.probe import Probe
from realign.engines.servers.sampler import ServerSampler, saved
from realign.engines.servers.settings import ServerSettings

_NOWHERE = Path("of-rank-0")
"""Folder that ranks other than 0 pass to `save`, which do not write."""


class RankedSampler:
    """Implements `realign.api.Sampler` on several ranks. All ranks call `generate` and `update`, in the same order."""

    def __init__(
        self,
        ranks: Ranks,
        settings: ServerSettings,
        source: WeightSource,
        probe: Probe,
        open: Callable[[], ServerSampler],
    ) -> None:
        """Open the sampler on rank 0, while the other ranks help it to gather the weights of `source`.

        Args:
            ranks: the processes of the run.
            settings: settings of the sampler.
            source: the weights.
            probe: measures what the sampler of rank 0 measures.
            open: constructs the sampler.
        """
        self._ranks, self._settings, self._probe = ranks, settings, probe
        self._source, self._version = source, 0
        self._own: ServerSampler | None = ranks.together(
            lambda: open() if ranks.leader else self._follow_opening(source)
        )
        try:
            self._check_sampled()
        except BaseException:
            self.close()
            raise

    def _follow_opening(self, source: WeightSource) -> None:
        """Take part in what `ServerSampler.__init__` does with the weights."""
        self._probe.measure(source)
        for save in saved(self._settings, source, first=True):
            save(_NOWHERE)

    @property
    def version(self) -> int:
        """See `Sampler.version`."""
        return self._version

    def capabilities(self) -> Capabilities:
        """See `Sampler.capabilities`."""
        return self._settings.capabilities()

    def submit(self, request: Request) -> Handle:
        """Raise an error, since requests of single ranks would not be answered in the same order on all ranks."""
        raise RuntimeError("servers under torchrun answer calls of all ranks only: call generate.")

    def generate(self, data: SequenceSample, config: GenerationConfig, *, seed: int) -> SequenceSample:
        """See `Sampler.generate`. Returns the whole batch on each rank."""
        found = self._ranks.lead(lambda: self._leader().generate(data.to("cpu"), config, seed=seed))
        return found.to(data[PROMPTS].device)

    def update(self, source: WeightSource, version: int) -> None:
        """See `Sampler.update`."""
        self._ranks.together(lambda: self._update(source, version))
        self._source, self._version = source, version
        self._check_sampled()

    def _update(self, source: WeightSource, version: int) -> None:
        if self._own is not None:
            self._own.update(source, version)
            return
        for save in saved(self._settings, source, first=False):
            save(_NOWHERE)
        self._probe.measure(source)

    def pause(self) -> None:
        """See `Sampler.pause`; all ranks call it."""
        self._ranks.lead(lambda: self._leader().pause())

    def resume(self) -> None:
        """See `Sampler.resume`; all ranks call it."""
        self._ranks.lead(lambda: self._leader().resume())

    def sleep(self) -> None:
        """See `Sampler.sleep`; all ranks call it."""
        self._ranks.lead(lambda: self._leader().sleep())

    def wake(self) -> None:
        """See `Sampler.wake`; all ranks call it."""
        self._ranks.lead(lambda: self._leader().wake())
        self._check_sampled()

    def _check_sampled(self) -> None:
        """Compare responses of servers with the trainer, of which each rank may have a part."""
        sampled = self._ranks.lead(lambda: self._leader().sampled())
        self._ranks.together(lambda: self._probe.check_sampled(self._source, sampled))

    def close(self) -> None:
        """See `Sampler.close`. Ranks may call it alone, since it also ends runs that failed."""
        if self._own is not None:
            self._own.close()

    def _leader(self) -> ServerSampler:
        assert self._own is not None
        return self._own
