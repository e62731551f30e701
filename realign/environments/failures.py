"""Count failed episodes, log the first one in full, and stop the run if too many fail."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence

from realign.errors import RewardError
from realign.rewards.pool.pool import present_tally
from realign.text import headline, log_file

logger = logging.getLogger(__name__)


class EnvironmentFailure(RewardError):
    """Raised when environments fail too often for the run to continue."""


class Failures:
    """Counts failed episodes, logs the first one of a run, and stops the run when there are too many.

    Args:
        name: name of the environment.
        max_failed_fraction: highest fraction of a batch's episodes that may fail.
    """

    def __init__(self, name: str, max_failed_fraction: float) -> None:
        self.name = name
        self.max_failed_fraction = max_failed_fraction
        self._shown = False

    def check(self, failures: Sequence[str], episodes: int) -> None:
        """Check the failures of a call with `episodes` episodes: a whole batch, or one part of it (`Tally`).

        Raises:
            EnvironmentFailure: the fraction of failed episodes is above `max_failed_fraction`.
        """
        tally = present_tally()
        before, batch = tally.failures(), tally.parts * episodes
        tally.add(len(failures))
        if failures and not self._shown:
            self._shown = True
            logger.warning(
                "environment %s failed in an episode, which gets no reward. Later failures are only counted.\n%s",
                self.name,
                failures[0],
            )
        if failures and before + len(failures) > self.max_failed_fraction * batch:
            kinds = Counter(map(headline, failures))
            raise EnvironmentFailure(
                f"environment {self.name} failed in {before + len(failures)} of {batch} episodes "
                f"({'; '.join(f'{n} times {kind}' for kind, n in kinds.most_common(3))}), which exceeds "
                f"max_failed_fraction={self.max_failed_fraction} (details: see {log_file(logger)})."
            )
