"""`RecordSpec`: how much detail a run records for its report (`realign report`, `realign view`)."""

from __future__ import annotations

from dataclasses import dataclass

from realign.settings import Count, NonNegativeInt, Positive, Settings


@dataclass
class RecordSpec(Settings):
    """Detail of the records for the report: tokens, spans and the load of the machine."""

    every_steps: Count = 10
    """Interval in steps at which tokens and spans are recorded. The first step of the run is recorded too."""
    token_prompts: NonNegativeInt = 1
    """Number of prompts whose tokens are recorded in such a step; 0 records none."""
    token_responses: Count = 4
    """Maximum number of recorded responses of each of these prompts."""
    token_limit: Count = 1024
    """Maximum number of recorded tokens of a response, with the last 128 tokens of its prompt."""
    system_seconds: Positive | None = 10.0
    """Interval in seconds at which CPU, memory and GPU use are recorded; null records none."""

    def due(self, step: int) -> bool:
        """Return whether tokens and spans of this step are recorded."""
        return step == 1 or step % self.every_steps == 0


__all__ = ["RecordSpec"]
