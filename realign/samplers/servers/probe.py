"""Compare servers with the trainer: their weights by the log-probs of a fixed text, and what they sample.

The text shows whether a server has the weights that it was given. The response shows whether it returns the tokens that
it sampled, with their log-probs. It is sampled for this comparison, at temperature 1 from the whole vocabulary:
responses of the run may be older than the weights of the trainer, and have the log-probs of other settings.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from realign.api import GenerationConfig, MicroBatchSpec, ModelOutput
from realign.api.engine import Scores
from realign.api.sample import SequenceSample
from realign.errors import ConfigError

_LARGEST_FIRST = 0.5
"""Largest valid mean difference of the first weights, in nats. bfloat16 differs by some hundredths."""
_GROWTH = 4.0
"""How much larger the mean difference of later weights may be than that of the first ones."""

_LARGEST_SAMPLED = 1.0
"""Largest valid mean difference over a sampled response, in nats. Other kernels, bfloat16, quantized weights and other
choices of experts stay far below it; wrong tokens or log-probs of the wrong distribution differ by several nats."""
PROMPT_TOKENS = 8
"""Number of tokens of the fixed text that the response continues."""
SAMPLED = GenerationConfig(max_new_tokens=40, fixed_length=True)
"""How the response is sampled. With its prompt it is as long as the fixed text, so every server has room for it."""


@dataclass(frozen=True)
class Sampled:
    """A response that a server sampled for the comparison."""

    where: str
    """The server, for messages."""
    ids: list[int]
    """Prompt and response."""
    logprobs: list[float]
    """Log-probs of the response, as the server reported them."""
    update: int
    """Number of the update whose weights it was sampled with."""


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
        return _score(source, [self.ids])[0]

    def expect(self, logprobs: list[float]) -> None:
        """Use the log-probs of new weights, as `measure` returned them."""
        self._expected = logprobs

    def check(self, logprobs: Sequence[float], *, first: bool, where: str) -> float:
        """Compare the log-probs of a server, and return the mean difference in nats.

        Args:
            logprobs: log-probs of the server.
            first: whether the weights are the first ones, which determine the later limit.
            where: the server, for messages.

        Raises:
            ConfigError: they differ too much.
        """
        gap = sum(abs(a - b) for a, b in zip(logprobs, self._expected, strict=True)) / len(self._expected)
        if first:
            # Servers round differently. The largest difference sets the limit of all.
            self._first = max(self._first, gap)
            if not gap <= _LARGEST_FIRST:  # also if it is NaN
                raise ConfigError(
                    f"{where} computes other log-probs than the trainer: the mean difference is {gap:.2g} nats. Check "
                    "that it runs the same model and dtype."
                )
        limit = self._tolerance + _GROWTH * self._first
        if not gap <= limit:
            raise ConfigError(
                f"{where} does not have the weights that it was given: its log-probs differ from those of the trainer "
                f"by {gap:.2g} nats on average, at most {limit:.2g} are expected. vLLM on a CPU does not update tied "
                "output embeddings: set untie=true. If the difference is due to rounding, increase probe_tolerance."
            )
        return gap

    def check_sampled(self, source: object, sampled: Sequence[Sampled]) -> None:
        """Compare responses of servers with the trainer, which must have the weights that they were sampled with.

        Raises:
            ConfigError: a server reported other log-probs, or other tokens than it sampled.
        """
        if not sampled:
            return
        assert isinstance(source, Scores)  # there are no responses otherwise
        for out, logprobs in zip(sampled, _score(source, [out.ids for out in sampled]), strict=True):
            own = logprobs[-len(out.logprobs) :]
            gap = sum(abs(a - b) for a, b in zip(own, out.logprobs, strict=True)) / len(own)
            if not gap <= _LARGEST_SAMPLED:
                raise ConfigError(
                    f"{out.where} does not return what it samples: the log-probs that it reported for a response "
                    f"differ from those of the trainer by {gap:.2g} nats on average, at most {_LARGEST_SAMPLED:g} is "
                    "valid. Its token ids or log-probs are wrong. Use another version of the server, or set "
                    "probe_tolerance=null to train without this check."
                )


def _score(source: Scores, texts: Sequence[list[int]]) -> list[list[float]]:
    """Return the log-probs of texts without their first token, at temperature 1."""
    names = [f"probe {i}" for i in range(len(texts))]
    sample = SequenceSample.from_sequences(names, {"input_ids": [[text] for text in texts]})
    mask_T = torch.ones(len(sample["input_ids"]), dtype=torch.bool)
    mask_T[sample.cu_seqlens()[:-1].long()] = False

    def hook(output: ModelOutput, mb: SequenceSample) -> SequenceSample:
        return mb.with_tokens(logprobs=output.logprobs(temperature=1.0, where_T=mb["loss_mask"]))

    scored = source.forward(sample.with_tokens(loss_mask=mask_T), MicroBatchSpec(), hook)
    return [[float(x) for x in logprobs.cpu()[1:]] for logprobs in scored.sequences("logprobs")]
