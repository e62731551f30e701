"""Compare the weights of servers with those of the trainer, by the log-probs of a fixed text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import torch

from realign.api import MicroBatchSpec, ModelOutput
from realign.api.engine import PostHook
from realign.api.sample import SequenceSample
from realign.errors import ConfigError

LARGEST_FIRST = 0.5
"""Largest valid mean difference of the first weights, in nats. bfloat16 differs by some hundredths."""
GROWTH = 4.0
"""How much larger the mean difference of later weights may be than that of the first ones."""


@runtime_checkable
class Scores(Protocol):
    """A source of weights that is also an engine, which can score texts; see `PipelinableEngine.forward`."""

    def forward(self, data: SequenceSample, mb_spec: MicroBatchSpec, post_hook: PostHook) -> SequenceSample:
        """Run without gradients, and return the keys that `post_hook` added."""
        ...


class Probe:
    """Decides whether the log-probs of a server are those of the trainer's weights."""

    def __init__(self, ids: Sequence[int], tolerance: float | None) -> None:
        """Create the probe.

        Args:
            ids: the text. No text disables the probe.
            tolerance: see `ServerSettings.probe_tolerance`.
        """
        self.ids = list(ids) if tolerance is not None else []
        self._tolerance = tolerance or 0.0
        self._first = 0.0
        self._expected: list[float] = []

    @property
    def active(self) -> bool:
        """Whether there is something to compare with."""
        return bool(self._expected)

    def measure(self, source: object) -> list[float]:
        """Return the log-probs of the text under the weights of the trainer; none if it cannot score."""
        if not self.ids or not isinstance(source, Scores):
            return []
        ids_T = torch.tensor(self.ids)
        mask_T = torch.ones(len(ids_T), dtype=torch.bool)
        mask_T[0] = False
        sample = SequenceSample.from_sequences(["probe"], {"input_ids": [[self.ids]]}).with_tokens(loss_mask=mask_T)

        def hook(output: ModelOutput, mb: SequenceSample) -> SequenceSample:
            return mb.with_tokens(logprobs=output.logprobs(temperature=1.0, where_T=mb["loss_mask"]))

        found_T: torch.Tensor = source.forward(sample, MicroBatchSpec(), hook)["logprobs"]
        return [float(x) for x in found_T.cpu()[1:]]

    def expect(self, logprobs: list[float]) -> None:
        """Use the log-probs of new weights, as `measure` returned them."""
        self._expected = logprobs

    def check(self, found: Sequence[float], *, first: bool, where: str) -> float:
        """Compare the log-probs of a server, and return the mean difference in nats.

        Args:
            found: log-probs of the server.
            first: whether the weights are the first ones, which determine the later limit.
            where: the server, for messages.

        Raises:
            ConfigError: they differ too much.
        """
        gap = sum(abs(a - b) for a, b in zip(found, self._expected, strict=True)) / len(self._expected)
        if first:
            self._first = max(self._first, gap)
            if gap > LARGEST_FIRST:
                raise ConfigError(
                    f"{where} computes other log-probs than the trainer: the mean difference is {gap:.2g} nats. Check "
                    "that it runs the same model and dtype."
                )
        limit = self._tolerance + GROWTH * self._first
        if gap > limit:
            raise ConfigError(
                f"{where} does not have the weights that it was given: its log-probs differ from those of the trainer "
                f"by {gap:.2g} nats on average, at most {limit:.2g} are expected. vLLM on a CPU does not update tied "
                "output embeddings: set untie=true. If the difference is due to rounding, increase probe_tolerance."
            )
        return gap
