"""Failed episodes: counted, the first one shown, and too many of them the end of the run, as with reward functions."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence

from realign.rewards.pool.failure_count import present_tally

logger = logging.getLogger(__name__)


class EnvironmentFailure(RuntimeError):
    """Environments failed too often to go on."""


class Failures:
    """Counts calls that failed, shows the first of a run, and ends the run when there are too many.

    Args:
        name: of the environment.
        max_failed_fraction: of the episodes of a batch.
    """

    def __init__(self, name: str, max_failed_fraction: float) -> None:
        self.name = name
        self.max_failed_fraction = max_failed_fraction
        self._shown = False

    def check(self, failures: Sequence[str], episodes: int) -> None:
        """Take the failures of a batch of so many episodes, or of one of several parts of a batch (`Tally`).

        Raises:
            EnvironmentFailure: there are too many.
        """
        tally = present_tally()
        before, whole = tally.failures, tally.parts * episodes
        tally.add(len(failures))
        if failures and before + len(failures) > self.max_failed_fraction * whole:
            kinds = Counter(failure.rsplit("\n", 1)[-1] for failure in failures)
            raise EnvironmentFailure(
                f"environment {self.name} failed in {before + len(failures)} of {whole} episodes "
                f"({'; '.join(f'{n} times {kind}' for kind, n in kinds.most_common(3))}): above "
                f"max_failed_fraction={self.max_failed_fraction}. The first failure was:\n{failures[0]}"
            )
        if failures and not self._shown:
            self._shown = True
            logger.warning(
                "environment %s failed in an episode (shown once, later ones are only counted):\n%s",
                self.name,
                failures[0],
            )
