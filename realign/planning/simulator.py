"""Discrete-event simulation of the runtime with measured or assumed costs.

Prompts are admitted in the order of the data. Each has a group of responses, on the engine with the fewest rows. An
engine decodes its rows together (continuous batching). The time of a decoding step is affine in the number of rows and
in the tokens of context. A prompt is scored when its responses have ended, and is then ready. A training step
increments the version, and every engine waits while it receives the weights. Engines that share their devices with
training also wait during the training step.

The code of the runtime (`realign.runtime.rollout.staleness`) decides which prompts are admitted and which are trained
on. Without a staleness bound (None), generation, rewards and training of a batch run in sequence, as in the synchronous
runtime. The simulation has no failures and no RPC overhead.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from realign.planning.costs import Costs
from realign.planning.plans import Plan, Report, Trained, Work
from realign.runtime.rollout.staleness import Staleness


@dataclass
class _Prompt:
    left: int
    """Number of responses that have not ended, or, afterwards, that have no reward."""
    tokens: int = 0
    """Tokens of its responses."""
    head: int = 0
    tail: int = 0


class _Engine:
    """Rows of an engine and the responses that wait for a slot. The clock counts decoding steps."""

    def __init__(self, costs: Costs, slots: int) -> None:
        self.costs, self.slots = costs, slots
        self.rows: list[tuple[float, int, int]] = []  # heap of (clock at the end, prompt, tokens)
        self.waiting: deque[tuple[int, int, bool]] = deque()  # (prompt, tokens, first of its prompt)
        self.clock = self.context = self.now = 0.0
        self.stands_until = 0.0
        self.busy_s = 0.0
        self.booked = 0  # number of the valid event; earlier events are ignored

    @property
    def load(self) -> int:
        """Return the number of unfinished responses."""
        return len(self.rows) + len(self.waiting)

    def _pace(self) -> tuple[float, float]:
        """Return the seconds of the next decoding step, and the increase of each later step."""
        c, n = self.costs, len(self.rows)
        return c.decode_step_s + n * c.decode_row_s + self.context * c.decode_context_s, n * c.decode_context_s

    def advance(self, now: float) -> None:
        """Decode until `now`."""
        seconds = now - max(self.now, min(self.stands_until, now))
        if self.rows and seconds > 0:
            first, growth = self._pace()
            root = math.sqrt(first * first + 2 * growth * seconds)
            steps = 2 * seconds / (first + root)  # solves first * steps + growth * steps**2 / 2 = seconds
            self.clock += steps
            self.context += steps * len(self.rows)
            self.busy_s += seconds
        self.now = now

    def next_end(self) -> float | None:
        """Return the time at which the first row ends if no other event changes the rows."""
        if not self.rows:
            return None
        first, growth = self._pace()
        steps = max(0.0, self.rows[0][0] - self.clock)
        return max(self.now, self.stands_until) + steps * first + growth * steps * steps / 2

    def block(self, seconds: float) -> None:
        """Stop decoding for some seconds, from now or from the end of the current stop."""
        self.stands_until = max(self.now, self.stands_until) + seconds


class Simulation:
    """Simulation of one run. `run` returns the report."""

    def __init__(self, costs: Costs, work: Work, plan: Plan) -> None:
        self.costs, self.work, self.plan = costs, work, plan
        self.now = 0.0
        self.report = Report(plan)
        self._policy = Staleness(work.batch_prompts, plan.max_staleness or 0, work.steps)
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._count = 0
        self._engines = [_Engine(costs, plan.slots) for _ in range(plan.engines)]
        self._prompts: dict[int, _Prompt] = {}
        self._training = False
        self._waits_for_before: int | None = None  # no step begins until a prompt before this one is ready
        self._to_judge: deque[tuple[int, float]] = deque()
        self._judging = 0
        self._generated: list[int] = []  # prompts of the batch, if rewards wait for the whole batch

    def run(self) -> Report:
        """Simulate all steps."""
        self._admit()
        while self._events:
            self.now, _, event = heapq.heappop(self._events)
            event()
        assert len(self.report.ends) == self.work.steps, "the simulation ended before all steps"
        self.report.generating_s = sum(engine.busy_s for engine in self._engines)
        return self.report

    def _at(self, seconds: float, event: Callable[[], None]) -> int:
        self._count += 1
        heapq.heappush(self._events, (seconds, self._count, event))
        return self._count

    def _admit(self) -> None:
        for engine in self._engines:
            engine.advance(self.now)
        while self._policy.may_begin():
            prompt = self._policy.begin()
            self._prompts[prompt] = _Prompt(self.work.group)
            engine = min(self._engines, key=lambda e: e.load)
            engine.waiting.extend((prompt, n, i == 0) for i, n in enumerate(self.work.tokens_of(prompt)))
        for engine in self._engines:
            self._fill(engine)

    def _fill(self, engine: _Engine) -> None:
        """Assign free slots to waiting responses, after their prefill, and schedule the next end of a row."""
        c, tokens = self.costs, self.work.prompt_tokens
        while engine.waiting and len(engine.rows) < engine.slots:
            prompt, length, first = engine.waiting.popleft()
            if first:
                engine.block(tokens * c.prefill_token_s)
                self._prompts[prompt].head = self._policy.version
            heapq.heappush(engine.rows, (engine.clock + length, prompt, length))
            engine.context += tokens
        end = engine.next_end()
        if end is not None:
            number = self._at(end, lambda: self._ended(engine, number))
            engine.booked = number

    def _ended(self, engine: _Engine, number: int) -> None:
        if number != engine.booked:
            return
        engine.advance(self.now)
        engine.clock = max(engine.clock, engine.rows[0][0])  # removes rounding errors
        while engine.rows and engine.rows[0][0] <= engine.clock + 1e-6:
            _, prompt, length = heapq.heappop(engine.rows)
            engine.context -= self.work.prompt_tokens + length
            found = self._prompts[prompt]
            found.left -= 1
            found.tokens += length
            if not found.left:
                found.tail = self._policy.version
                self._judge(prompt)
        if not engine.rows:
            engine.context = 0.0
        self._fill(engine)

    def _judge(self, prompt: int) -> None:
        """Send the responses to the reward workers, immediately or together with the whole batch."""
        self._generated.append(prompt)
        if self.plan.max_staleness is None and len(self._generated) < self.work.batch_prompts:
            return
        for done in self._generated:
            self._prompts[done].left = self.work.group
            self._to_judge.extend((done, seconds) for seconds in self.work.seconds_of(done))
        self._generated.clear()
        self._start_judging()

    def _start_judging(self) -> None:
        while self._to_judge and (self.work.reward_workers is None or self._judging < self.work.reward_workers):
            prompt, seconds = self._to_judge.popleft()
            self._judging += 1
            self._at(self.now + seconds, lambda prompt=prompt: self._judged(prompt))  # type: ignore[misc]

    def _judged(self, prompt: int) -> None:
        self._judging -= 1
        self._prompts[prompt].left -= 1
        if not self._prompts[prompt].left:
            self._policy.finish(prompt)
            if self._waits_for_before is None or prompt < self._waits_for_before:
                self._train()
        self._start_judging()

    def _train(self) -> None:
        size = self.work.batch_prompts
        if self._training or len(self._policy.ready) < size:
            return
        if (batch := self._policy.choose()) is None:
            self._waits_for_before = heapq.nsmallest(size, self._policy.ready)[-1]
            return
        self._training, self._waits_for_before = True, None
        tokens = sum(self._prompts[i].tokens for i in batch)
        packed = tokens + size * self.work.group * self.work.prompt_tokens
        seconds = self.costs.train_step_s + packed * self.costs.train_token_s + 2 * self.plan.switch_s
        self.report.training_s += seconds
        self.report.response_tokens.append(tokens)
        self._at(self.now + seconds, lambda: self._trained(batch))
        if self.plan.shared:
            self._stop_engines(seconds)

    def _stop_engines(self, seconds: float) -> None:
        """Stop decoding while a training step uses the devices of the engines."""
        for engine in self._engines:
            engine.advance(self.now)
            engine.block(seconds)
            self._fill(engine)

    def _trained(self, batch: list[int]) -> None:
        self._training = False
        self._policy.train(batch)
        for prompt in batch:
            found = self._prompts.pop(prompt)
            self.report.trained.append(Trained(prompt, self._policy.version, found.head, found.tail))
        for engine in self._engines:
            engine.advance(self.now)
            again = engine.context * self.costs.prefill_token_s if self.plan.recompute else 0.0
            engine.block(self.costs.sync_s + again)
        self.report.ends.append(self.now + (self.costs.sync_s if self.plan.max_staleness is None else 0.0))
        self._admit()
        self._train()


def simulate(costs: Costs, work: Work, plan: Plan) -> Report:
    """Simulate a run and return its report."""
    return Simulation(costs, work, plan).run()
