"""`Staleness`: which prompts may begin, and which are trained on next. No threads, no clocks, no tensors.

A prompt is begun at a version of the policy (training steps made so far), is ready some time later, and is trained on
once. Two rules bound how old its policy is by then:

- Admission (realhf; AReaL, arXiv:2505.24298, section 5.1): a prompt may begin only while
  `(trained + running) // batch_prompts <= max_staleness + version`, where running prompts are those that have begun,
  ready or not, and are not trained on yet. So no more of them exist than the next `max_staleness + 1` steps take.
- Choice: a step takes the prompts that began first among those that are ready. It waits for one that is not where the
  steps after it could not take all others in time. AReaL has no such rule: there a response that takes longer than the
  others may be trained on at any age.

Together: what a step trains on was begun at most `max_staleness` versions ago. A prompt that a filter drops counts as
never begun, and another takes its place.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Any


class Staleness:
    """The counters of a run whose responses are sampled ahead. A prompt is known by its place in the stream."""

    def __init__(self, batch_prompts: int, max_staleness: int, steps: int) -> None:
        """Of a run of `steps` steps, each of which trains on `batch_prompts` prompts."""
        self.batch_prompts = batch_prompts
        self.max_staleness = max_staleness
        self.steps = steps
        self.version = 0
        """Training steps made."""
        self.next_place = 0
        """The first place of the stream that has not begun."""
        self.again: deque[int] = deque()
        """Places before it that have to begin once more, since a run ended before they were trained on."""
        self.begun: dict[int, int] = {}
        """Places that have begun and are not trained on, in their order, with the version at which they began."""
        self.ready: set[int] = set()
        """Those of them that can be trained on."""

    @property
    def trained(self) -> int:
        """Prompts trained on (places of the batches of all steps)."""
        return self.version * self.batch_prompts

    def may_begin(self) -> bool:
        """Whether one more prompt may begin, and any step is left to train on it."""
        within = (self.trained + len(self.begun)) // self.batch_prompts <= self.max_staleness + self.version
        return within and self.trained + len(self.begun) < self.steps * self.batch_prompts

    def begin(self) -> int:
        """The place of the prompt that begins now."""
        if self.again:
            place = self.again.popleft()
        else:
            place, self.next_place = self.next_place, self.next_place + 1
        self.begun[place] = self.version
        return place

    def finish(self, place: int) -> None:
        """This prompt can be trained on."""
        self.ready.add(place)

    def drop(self, place: int) -> None:
        """This prompt will not be trained on."""
        del self.begun[place]

    def choose(self) -> list[int] | None:
        """The places of the next batch, those that began first in front; None as long as it has to wait."""
        batch = [place for place in self.begun if place in self.ready][: self.batch_prompts]
        if len(batch) < self.batch_prompts:
            return None
        taken = set(batch)
        left = [version for place, version in self.begun.items() if place not in taken]
        for later in range(self.max_staleness):  # the steps up to `version + later` must take what is too old after it
            due = sum(version + self.max_staleness <= self.version + later for version in left)
            if due > later * self.batch_prompts:
                return None
        return batch

    def train(self, batch: list[int]) -> None:
        """A step has trained on these: the policy is a version further."""
        for place in batch:
            del self.begun[place]
            self.ready.discard(place)
        self.version += 1

    def state_dict(self) -> dict[str, Any]:
        """Between two steps. What has begun is only named: it will begin once more, with the weights of then."""
        untrained = sorted([*self.begun, *self.again])
        counts = {"version": self.version, "trained": self.trained, "next_place": self.next_place}
        return {**counts, "untrained": untrained}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where `state_dict` was taken, also with another `batch_prompts` or `max_staleness`."""
        self.version, self.next_place = state["version"], state["next_place"]
        self.again = deque(state["untrained"])
        self.begun.clear()
        self.ready.clear()
