"""Discrete-event simulation of the runtime with measured or assumed costs.

Prompts are admitted in the order of the data. Each has a group of responses, on the engine with the fewest rows. An
engine decodes its rows together (continuous batching). The time of a decoding step is affine in the number of rows and
in the tokens of context. A prompt is scored when its responses have ended, and is then ready. A training step
increments the version, and every engine waits while it receives the weights. Engines that share their devices with
training also wait during the training step.

The code of the runtime (`realign.runtime.rollout.staleness`) decides which prompts are admitted and which are trained
on. Without a staleness bound (None), generation, rewards and training of a batch run in sequence, as in the synchronous
runtime. The simulation has no failures and no RPC overhead.

Costs are measured, or follow from the sizes of a network and the rates of a device (roofline model).
"""

from __future__ import annotations

import heapq
import math
import random
import statistics
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from realign_planner.internals import Staleness
from realign_planner.options import Accelerator, Assumed


@dataclass(frozen=True)
class Costs:
    """Costs in seconds."""

    decode_step_s: float
    """Fixed cost of a decoding step: reading the weights and launching every operator once."""
    decode_row_s: float = 0.0
    """Additional cost per row."""
    decode_context_s: float = 0.0
    """Additional cost per token of context over all rows: reading its keys and values."""
    prefill_token_s: float = 0.0
    """Cost per token of prefill. Decoding waits meanwhile."""
    train_step_s: float = 0.0
    """Fixed cost of a training step."""
    train_token_s: float = 0.0
    """Additional cost per packed token, over all passes on the training devices."""
    sync_s: float = 0.0
    """Duration of a weight update, during which rollout engines do not decode."""


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
        # The median that gives a log-normal distribution this mean, before `most` cuts it.
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
class RuntimeSchedule:
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
    # The pipeline fills in the first `bound` steps, and empties in the last ones, which admit no prompt.
    first = min(1 + (bound or 0), steps - 1)
    return slice(first, max(first + 1, steps - (bound or 0)))


class TrainedPrompt(NamedTuple):
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

    plan: RuntimeSchedule
    ends: list[float] = field(default_factory=list)
    """End of each training step, including its weight update (seconds)."""
    trained: list[TrainedPrompt] = field(default_factory=list)
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


@dataclass(frozen=True)
class NetworkSizes:
    """Sizes of a model. Defaults: bf16, 7 billion weights and the shape of Qwen2.5-7B (from its config.json)."""

    weights: float = 7.6e9
    idle_experts: float = 0.0
    """Weights of the experts that do not compute a token; 0 for a dense model."""
    layers: int = 28
    kv_heads: int = 4
    head_size: int = 128
    hidden: int = 3584
    number_bytes: int = 2
    """Bytes of a number in matrix products and in the KV cache."""

    @property
    def active(self) -> float:
        """Return the number of weights that compute a token."""
        return self.weights - self.idle_experts

    @property
    def bytes_per_token(self) -> float:
        """Return the bytes of the KV cache per token of context."""
        return 2 * self.number_bytes * self.layers * self.kv_heads * self.head_size


def decoding(network: NetworkSizes, device: Accelerator, assumed: Assumed, devices: int = 1) -> Costs:
    """Return the costs of an engine that decodes on `devices` devices with tensor parallelism."""
    read = device.bandwidth * assumed.bandwidth_used * devices
    compute = device.flops * assumed.flops_used * devices
    together_s = assumed.tensor_parallel_layer_s * network.layers if devices > 1 else 0.0
    return Costs(
        decode_step_s=assumed.decode_call_s + together_s + network.number_bytes * network.weights / read,
        decode_row_s=2 * network.active / compute,
        decode_context_s=network.bytes_per_token / read,
        prefill_token_s=2 * network.active / compute,
    )


def rows_that_fit(free: float, network: NetworkSizes, assumed: Assumed, work: Work) -> int:
    """Return the number of rows of an engine whose KV cache fits `free` bytes at twice the mean length."""
    length = work.prompt_tokens + 2 * min(work.lengths.mean, work.lengths.most / 2)
    return max(1, min(assumed.slots, int(free / (network.bytes_per_token * length))))


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
        # The engine stood still until `stands_until`, so only the rest of the time counts.
        seconds = now - max(self.now, min(self.stands_until, now))
        if self.rows and seconds > 0:
            first, growth = self._pace()
            root = math.sqrt(first * first + 2 * growth * seconds)
            # The usual form of the root divides by the growth, which is 0 without a cost of context.
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

    def __init__(self, costs: Costs, work: Work, plan: RuntimeSchedule) -> None:
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
            # Events can't be removed from the heap: earlier ones of this engine are ignored when they come.
            engine.booked = number

    def _ended(self, engine: _Engine, number: int) -> None:
        if number != engine.booked:
            return
        engine.advance(self.now)
        engine.clock = max(engine.clock, engine.rows[0][0])  # removes rounding errors
        # Rows of equal length end together, up to rounding.
        while engine.rows and engine.rows[0][0] <= engine.clock + 1e-6:
            _, prompt, length = heapq.heappop(engine.rows)
            engine.context -= self.work.prompt_tokens + length
            state = self._prompts[prompt]
            state.left -= 1
            state.tokens += length
            if not state.left:
                state.tail = self._policy.version
                self._judge(prompt)
        # Removes the rounding errors of all additions before.
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
            # Another attempt makes sense only when a prompt before these is ready: a later one doesn't change the
            # choice.
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
            state = self._prompts.pop(prompt)
            self.report.trained.append(TrainedPrompt(prompt, self._policy.version, state.head, state.tail))
        for engine in self._engines:
            engine.advance(self.now)
            # The cache of unfinished responses belongs to the old weights.
            again = engine.context * self.costs.prefill_token_s if self.plan.recompute else 0.0
            engine.block(self.costs.sync_s + again)
        # In sequence, the next step waits for the update. With asynchronous rollout, only the engines do.
        self.report.ends.append(self.now + (self.costs.sync_s if self.plan.max_staleness is None else 0.0))
        self._admit()
        self._train()


def simulate(costs: Costs, work: Work, plan: RuntimeSchedule) -> Report:
    """Simulate a run and return its report."""
    return Simulation(costs, work, plan).run()
