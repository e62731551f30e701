"""Inputs and output of the simulator: the work of a run, a plan of the runtime, and a report."""

from __future__ import annotations

import math
import random
import statistics
from dataclasses import dataclass, field
from typing import NamedTuple


@dataclass(frozen=True)
class Tail:
    """Log-normal distribution: its mean, the std of its logarithm, and its maximum `most`."""

    mean: float
    sigma: float = 0.0
    most: float = math.inf

    def draw(self, n: int, *what: object) -> list[float]:
        """Draw values that depend on `what` only."""
        if not self.sigma:
            return [min(self.mean, self.most)] * n
        gauss, middle = random.Random("/".join(map(str, what))).gauss, self.mean * math.exp(-(self.sigma**2) / 2)
        return [min(middle * math.exp(gauss(0.0, self.sigma)), self.most) for _ in range(n)]


@dataclass(frozen=True)
class Work:
    """Work of a run."""

    batch_prompts: int
    group: int
    """Responses per prompt."""
    steps: int
    prompt_tokens: float
    lengths: Tail
    """Distribution of the tokens of a response."""
    reward_s: Tail | tuple[float, ...] = Tail(0.0)
    """Seconds to score each response. A tuple has the seconds for every response of prompt i."""
    reward_workers: int | None = None
    """Number of responses that are scored concurrently; None: all."""
    seed: int = 0

    def tokens_of(self, prompt: int) -> list[int]:
        """Return the tokens of each response to a prompt, at least one."""
        return [max(1, round(x)) for x in self.lengths.draw(self.group, self.seed, "length", prompt)]

    def seconds_of(self, prompt: int) -> list[float]:
        """Return the seconds to score each response to a prompt."""
        if isinstance(self.reward_s, tuple):
            return [self.reward_s[prompt % len(self.reward_s)]] * self.group
        return self.reward_s.draw(self.group, self.seed, "reward", prompt)


@dataclass(frozen=True)
class Plan:
    """Schedule of the runtime."""

    max_staleness: int | None = None
    """Staleness bound; None if generation, rewards and training run in sequence."""
    engines: int = 1
    """Number of engines that generate, each with its own rows."""
    slots: int = 256
    """Number of rows of an engine."""
    recompute: bool = True
    """Whether the KV cache of running responses is recomputed after a weight update."""
    switch_s: float = 0.0
    """Seconds before and after training to move weights and optimizer state, if the same devices also generate."""
    shared: bool = False
    """Whether asynchronous rollout uses the devices of training, so that engines wait during a training step."""


def full_steps(steps: int, bound: int | None) -> slice:
    """Return the slice of steps with a full pipeline: at least one step, and never the first."""
    first = min(1 + (bound or 0), steps - 1)
    return slice(first, max(first + 1, steps - (bound or 0)))


class Trained(NamedTuple):
    """A prompt that a training step uses."""

    prompt: int
    step: int
    head: int
    """Version of the policy at the prefill of the prompt."""
    tail: int
    """Version of the policy at the end of its last response."""


@dataclass
class Report:
    """Result of a simulation."""

    plan: Plan
    ends: list[float] = field(default_factory=list)
    """End of each training step, including its weight update (seconds)."""
    trained: list[Trained] = field(default_factory=list)
    response_tokens: list[int] = field(default_factory=list)
    """Response tokens of each step."""
    generating_s: float = 0.0
    """Seconds in which engines had rows, summed over engines."""
    training_s: float = 0.0

    @property
    def full(self) -> slice:
        """Return the steps with a full pipeline: without the first ones, and the last ones, which admit no prompt."""
        return full_steps(len(self.ends), self.plan.max_staleness)

    @property
    def step_s(self) -> float:
        """Return the mean seconds of a step with a full pipeline."""
        return (self.ends[self.full.stop - 1] - self.ends[self.full.start - 1]) / (self.full.stop - self.full.start)

    @property
    def tokens_per_s(self) -> float:
        """Return the trained response tokens per second with a full pipeline."""
        return statistics.fmean(self.response_tokens[self.full]) / self.step_s

    def staleness(self) -> dict[str, float]:
        """Return mean staleness at the prefill (head) and at the last token (tail), and the maximum at the prefill."""
        counted = [t for t in self.trained if self.full.start < t.step <= self.full.stop]
        head = [t.step - 1 - t.head for t in counted]
        tail = [t.step - 1 - t.tail for t in counted]
        return {"head": statistics.fmean(head), "tail": statistics.fmean(tail), "max": float(max(head))}
