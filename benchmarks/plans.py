"""What the simulator is given, and what it gives: the work of a run, a plan of the runtime, a report."""

from __future__ import annotations

import math
import random
import statistics
from dataclasses import dataclass, field
from typing import NamedTuple


@dataclass(frozen=True)
class Tail:
    """A log-normal: its mean, and the deviation of its logarithm; no value is above `most`."""

    mean: float
    sigma: float = 0.0
    most: float = math.inf

    def draw(self, n: int, *what: object) -> list[float]:
        """Values that are a function of `what` alone."""
        if not self.sigma:
            return [min(self.mean, self.most)] * n
        gauss, middle = random.Random("/".join(map(str, what))).gauss, self.mean * math.exp(-(self.sigma**2) / 2)
        return [min(middle * math.exp(gauss(0.0, self.sigma)), self.most) for _ in range(n)]


@dataclass(frozen=True)
class Work:
    """What a run has to do."""

    batch_prompts: int
    group: int
    """Responses per prompt."""
    steps: int
    prompt_tokens: float
    lengths: Tail
    """Tokens of a response."""
    reward_s: Tail | tuple[float, ...] = Tail(0.0)
    """Seconds of a judgement, of each response; a tuple: of all responses of prompt i."""
    reward_workers: int | None = None
    """Judgements at a time; None: all."""
    seed: int = 0

    def tokens_of(self, prompt: int) -> list[int]:
        """Tokens of each response of a prompt, at least one."""
        return [max(1, round(x)) for x in self.lengths.draw(self.group, self.seed, "length", prompt)]

    def seconds_of(self, prompt: int) -> list[float]:
        """Of the judgement of each response."""
        if isinstance(self.reward_s, tuple):
            return [self.reward_s[prompt % len(self.reward_s)]] * self.group
        return self.reward_s.draw(self.group, self.seed, "reward", prompt)


@dataclass(frozen=True)
class Plan:
    """How the runtime does it."""

    max_staleness: int | None = None
    """None: generation, rewards and training one after the other."""
    engines: int = 1
    """That generate, each with rows of its own."""
    slots: int = 256
    """Rows of an engine."""
    recompute: bool = True
    """Read running responses anew when the weights change."""
    switch_s: float = 0.0
    """Before and after training, where the same devices generate: weights and optimizer state change places."""


def full_steps(steps: int, bound: int | None) -> slice:
    """Of so many steps, those in which the pipeline is full; at least one, and never the first."""
    first = min(1 + (bound or 0), steps - 1)
    return slice(first, max(first + 1, steps - (bound or 0)))


class Trained(NamedTuple):
    """A prompt in a training step."""

    prompt: int
    step: int
    head: int
    """Version of the policy when the prompt was read."""
    tail: int
    """Version when its last response ended."""


@dataclass
class Report:
    """What happened."""

    plan: Plan
    ends: list[float] = field(default_factory=list)
    """When each training step, and what belongs to it, was over (seconds)."""
    trained: list[Trained] = field(default_factory=list)
    response_tokens: list[int] = field(default_factory=list)
    """Of each step."""
    generating_s: float = 0.0
    """Seconds in which engines had rows, of all engines together."""
    training_s: float = 0.0

    @property
    def full(self) -> slice:
        """The steps in which the pipeline is full: not the first ones, nor the last, for which nothing is admitted."""
        return full_steps(len(self.ends), self.plan.max_staleness)

    @property
    def step_s(self) -> float:
        """Seconds of such a step."""
        return (self.ends[self.full.stop - 1] - self.ends[self.full.start - 1]) / (self.full.stop - self.full.start)

    @property
    def tokens_per_s(self) -> float:
        """Response tokens that are trained on in such a step, per second."""
        return statistics.fmean(self.response_tokens[self.full]) / self.step_s

    def staleness(self) -> dict[str, float]:
        """Versions between the reading of a prompt, or its last token, and its training: means, and the largest."""
        counted = [t for t in self.trained if self.full.start < t.step <= self.full.stop]
        head = [t.step - 1 - t.head for t in counted]
        tail = [t.step - 1 - t.tail for t in counted]
        return {"head": statistics.fmean(head), "tail": statistics.fmean(tail), "max": float(max(head))}
