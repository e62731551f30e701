"""`EnvironmentPool`: the environments of a batch of episodes, called concurrently; `Failures` counts failed ones."""

from __future__ import annotations

import asyncio
import logging
import math
from collections import Counter
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import suppress
from copy import deepcopy
from functools import partial
from types import TracebackType
from typing import Any, TypeAlias

from realign.api.environment import Environment, EpisodeFailure, Response
from realign.environments.calls import Answer, Step, call_in_time, read_reset, read_step
from realign.environments.event_loops import EnvironmentFailure, LoopBlocked, LoopThread, SharedLoop
from realign.environments.loading import takes_seed, waits
from realign.environments.turns import TurnWriter
from realign.rewards.pool.pool import present_tally
from realign.text import headline, log_file

logger = logging.getLogger(__name__)

Keep: TypeAlias = Callable[[Answer], None]
_Question: TypeAlias = Callable[[Keep], Coroutine[Any, Any, Answer]]

_INTERRUPTED_S = 1.0
"""Seconds that `close` of all environments together may take when a signal ends the run."""


class EnvironmentPool:
    """The environments of a batch, one per episode, for one `with` block. Their event loop runs in a separate thread.

    Every wait of the calling thread has a time limit, and a signal can interrupt it. An event loop that is blocked by
    a call is abandoned. Its unanswered calls then fail, and so does every later `step` of an environment created on it.

    Args:
        name: name of the environment, for messages.
        make: constructs one environment.
        writer: encodes observations as tokens.
        shared: the loop of all batches of the environment.
        read: checks the return value of `step`, given a function that encodes observations.
    """

    def __init__(
        self,
        name: str,
        make: Callable[[], Environment],
        writer: TurnWriter,
        shared: SharedLoop,
        read: Callable[[Any, Callable[[Any], Sequence[int]]], Step] = read_step,
    ) -> None:
        self.make, self._read = make, read
        self.writer = writer
        self._name, self._shared = name, shared
        self._made: dict[int, Any] = {}
        self._lost: set[int] = set()  # episodes whose loop was abandoned
        self._close_logged = False
        self._thread: LoopThread  # the loop of the environments that are not lost

    def __enter__(self) -> EnvironmentPool:
        self._thread = self._shared.__enter__().thread
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        interrupted = error is not None and not isinstance(error, Exception)
        try:
            if self._made:
                with suppress(TimeoutError):
                    self._run(self._close_all, _INTERRUPTED_S if interrupted else math.inf)
        finally:
            self._shared.__exit__(kind)

    def reset(self, starts: Sequence[tuple[Mapping[str, Any], int]]) -> list[Answer]:
        """Call `reset` for the episodes 0, 1, ...; `starts` has the dataset row and the seed of each episode.

        Each episode gets a copy of its row, which it may change.
        """
        own = enumerate((deepcopy(row), seed) for row, seed in starts)
        return self._ask({episode: partial(self._reset, episode, *start) for episode, start in own})

    def step(self, turns: Mapping[int, Response]) -> list[Answer]:
        """Call `step` with the policy's turn for each of these episodes; returns the answers in the same order."""
        return self._ask({episode: partial(self._step, episode, reply) for episode, reply in turns.items()})

    def _ask(self, questions: Mapping[int, _Question]) -> list[Answer]:
        """Return the answers in order; a question that a blocked loop did not answer gets a failure."""
        self._follow_loop()
        lost = Answer(None, "its event loop was abandoned because a call blocked it", EpisodeFailure.blocked)
        answers = dict.fromkeys(self._lost, lost)
        asked = {e: question for e, question in questions.items() if e not in self._lost}

        async def ask_one(episode: int, question: _Question) -> None:
            keep = partial(answers.__setitem__, episode)
            answer = await question(keep)
            keep(answer)  # includes the failure of a call that timed out
            if answer.step is None or answer.step.over:
                await self._close(episode)  # the answer is stored already, so a failing `close` cannot change it

        async def gather() -> None:
            await asyncio.gather(*(ask_one(*item) for item in asked.items()))

        if not asked or self._run(gather):
            return [answers[episode] for episode in questions]
        limit = f"timeout_s={self._shared.limits.timeout_s:g}"
        why = f"no answer within {limit}: a call blocked the event loop, which was abandoned"
        missing = Answer(None, why, EpisodeFailure.blocked)
        given = dict(answers)  # a copy: the abandoned loop may continue and still write to `answers`
        return [given.get(episode, missing) for episode in questions]

    def _follow_loop(self) -> None:
        """Use another loop if this one was abandoned, maybe by another batch."""
        if (thread := self._shared.thread) is not self._thread:
            # a copy, since the abandoned loop may still change the dict
            self._thread, self._lost = thread, self._lost | {*list(self._made)}

    def _run(self, work: Callable[[], Coroutine[Any, Any, None]], most_s: float = math.inf) -> bool:
        """Run a coroutine on the loop. Returns False if a call blocked the loop, which is then abandoned."""
        self._follow_loop()
        try:
            self._thread.run(work(), most_s)
        except LoopBlocked:
            self._shared.abandon(self._thread)
            self._follow_loop()
            return False
        return True

    async def _reset(self, episode: int, row: Mapping[str, Any], seed: int, keep: Keep) -> Answer:
        def begin() -> Any:
            world = self._made[episode] = self.make()
            return world.reset(row, **({"seed": seed} if takes_seed(world.reset) else {}))

        async def begin_here() -> Any:
            return await begin()

        # construct sync environments in the thread of `reset`, so that slow constructors do not block the event loop
        how = begin_here if waits(self.make) else begin
        return await call_in_time(self._thread, self._name, how, partial(read_reset, tokens=self.writer.opening), keep)

    async def _step(self, episode: int, response: Response, keep: Keep) -> Answer:
        # a truncated turn has no end token, even if its last token id equals one
        tokens = partial(self.writer.between, sampled=() if response.truncated else response.token_ids)
        step = partial(self._made[episode].step, response)
        return await call_in_time(self._thread, self._name, step, lambda returned: self._read(returned, tokens), keep)

    async def _close_all(self) -> None:
        await asyncio.gather(*map(self._close, list(self._made)))

    async def _close(self, episode: int) -> None:
        """Close the environment of an episode, at most once. A failure is logged and does not change the reward."""
        close = getattr(self._made.pop(episode, None), "close", None)
        if close is None:
            return
        answer = await call_in_time(self._thread, self._name, close, lambda _: Step())
        if answer.failure and not self._close_logged:
            self._close_logged = True
            logger.warning(
                "closing an environment failed; its rewards stay valid. Logged once per batch.\n%s",
                answer.failure,
            )


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
