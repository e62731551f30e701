"""`Staleness`: decides which prompts may start and which are trained on next. Uses no threads, clocks or tensors.

A prompt starts at a policy version (number of training steps made), becomes ready later, and is trained on once. Two
rules bound its staleness:

- Admission (realhf; AReaL, arXiv:2505.24298, section 5.1): a prompt may start only while
  `(trained + running) // batch_prompts <= max_staleness + version`. Running prompts are those that have started,
  ready or not, and are not trained on. So the next `max_staleness + 1` steps can train on all of them.
- Choice: a step takes the ready prompts that started first. It waits for an unfinished prompt if the later steps
  could not train on all remaining prompts in time. AReaL has no such rule: a response that takes longer than the
  others may have any staleness.

Together the rules guarantee that a step trains on prompts that started at most `max_staleness` versions ago. A prompt
that a filter drops does not count as started, and a new prompt replaces it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Any


class Staleness:
    """Counters of asynchronous rollout. A prompt is identified by its place in the prompt stream."""

    def __init__(self, batch_prompts: int, max_staleness: int, steps: int) -> None:
        """Initialize the counters of a run with `steps` steps, each of which trains on `batch_prompts` prompts."""
        self.batch_prompts = batch_prompts
        self.max_staleness = max_staleness
        self.steps = steps
        self.version = 0
        """Training steps made."""
        self.next_place = 0
        """First place of the stream that has not started."""
        self.again: deque[int] = deque()
        """Earlier places that must restart, because a run ended before training on them."""
        self.started: dict[int, int] = {}
        """Started places that are not trained on, in order of their start, with the policy version at their start."""
        self.ready: set[int] = set()
        """Started places that are ready for training."""

    @property
    def trained(self) -> int:
        """Number of prompts trained on: places in the batches of all steps."""
        return self.version * self.batch_prompts

    def may_begin(self) -> bool:
        """Return whether one more prompt may start and a step is left to train on it."""
        within = (self.trained + len(self.started)) // self.batch_prompts <= self.max_staleness + self.version
        return within and self.trained + len(self.started) < self.steps * self.batch_prompts

    def begin(self) -> int:
        """Start the next prompt and return its place."""
        if self.again:
            place = self.again.popleft()
        else:
            place, self.next_place = self.next_place, self.next_place + 1
        self.started[place] = self.version
        return place

    def finish(self, place: int) -> None:
        """Mark a prompt as ready for training."""
        self.ready.add(place)

    def drop(self, place: int) -> None:
        """Remove a prompt that will not be trained on."""
        del self.started[place]

    def choose(self) -> list[int] | None:
        """Return the places of the next batch, in order of their start; None if the step has to wait."""
        batch = [place for place in self.started if place in self.ready][: self.batch_prompts]
        if len(batch) < self.batch_prompts:
            return None
        taken = set(batch)
        left = [version for place, version in self.started.items() if place not in taken]
        for later in range(self.max_staleness):  # the next `later` steps must fit all prompts that are due by then
            due = sum(version + self.max_staleness <= self.version + later for version in left)
            if due > later * self.batch_prompts:
                return None
        return batch

    def train(self, batch: list[int]) -> None:
        """Remove a batch after a step has trained on it, and increment the policy version."""
        for place in batch:
            del self.started[place]
            self.ready.discard(place)
        self.version += 1

    def state_dict(self) -> dict[str, Any]:
        """Return the state between two steps. Of running prompts it stores only places; resuming restarts them."""
        # places that have started, and places of an earlier attempt that have yet to restart
        untrained = sorted([*self.started, *self.again])
        counts = {"version": self.version, "trained": self.trained, "next_place": self.next_place}
        return {**counts, "untrained": untrained}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a `state_dict`, also with a different `batch_prompts` or `max_staleness`."""
        self.version, self.next_place = state["version"], state["next_place"]
        # scored prompts are sampled again too: keeping them would prefer prompts that finish fast (ADR 17)
        self.again = deque(state["untrained"])
        self.started.clear()
        self.ready.clear()
