"""`SleepingSamplers`: external samplers that free their memory while models train."""

from __future__ import annotations

import threading
from collections.abc import Sequence

from realign.api.sampler import Sampler


class SleepingSamplers:
    """Lets samplers sleep in training calls, if this frees memory; callable from any thread."""

    def __init__(self, samplers: Sequence[Sampler]) -> None:
        """Keep the samplers that free memory, all of which are awake."""
        self._samplers = [sampler for sampler in samplers if sampler.capabilities().frees_memory]
        self._asleep = False
        self._lock = threading.Lock()

    def sleep(self) -> None:
        """Let the samplers sleep until `wake`."""
        with self._lock:
            if not self._asleep:
                self._asleep = True
                for sampler in self._samplers:
                    sampler.sleep()

    def wake(self) -> None:
        """Wake the samplers, so that the next call can sample."""
        with self._lock:
            if self._asleep:
                self._asleep = False
                for sampler in self._samplers:
                    sampler.wake()
