"""`Worlds`: the environments of a batch of episodes, asked all at once from plain code."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from types import TracebackType
from typing import Any, TypeVar

from realign.api.environment import Environment, Response
from realign.environments.answers import Step, begun, five_values
from realign.environments.asking import Answer, Asker, DaemonThreads, Limits
from realign.environments.loading import takes_seed, waits
from realign.environments.turns import TurnWriter

logger = logging.getLogger(__name__)

T = TypeVar("T")


class Worlds:
    """One environment per episode, in an event loop of their own, for one `with` block.

    Use it from one thread; where an event loop runs there (a notebook's), a thread is started for this one.

    Args:
        name: of the environment, for messages.
        make: makes one.
        writer: writes what they say as tokens.
        limits: of their calls.
    """

    def __init__(self, name: str, make: Callable[[], Environment], writer: TurnWriter, limits: Limits) -> None:
        self.make = make
        self.writer = writer
        self._asker = Asker(name, limits)
        self._runner = asyncio.Runner()
        self._thread = ThreadPoolExecutor(1) if _in_a_loop() else None
        self._run(lambda: self._runner.get_loop().set_default_executor(DaemonThreads()))
        self._made: dict[int, Any] = {}
        self._told = False

    def __enter__(self) -> Worlds:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with ExitStack() as stack:
            if self._thread is not None:
                stack.callback(self._thread.shutdown)
            stack.callback(self._run, self._runner.close)
            self._all([self._close(episode) for episode in list(self._made)])

    def reset(self, starts: Sequence[tuple[Mapping[str, Any], int]]) -> list[Answer]:
        """Begin the episodes 0, 1, ..., given the row and the seed of each."""
        return self._all([self._reset(episode, *start) for episode, start in enumerate(starts)])

    def step(self, turns: Mapping[int, Response]) -> list[Answer]:
        """Tell these episodes what the policy said; the answers are in their order."""
        return self._all([self._step(*turn) for turn in turns.items()])

    def _all(self, questions: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
        async def gathered() -> list[T]:
            return list(await asyncio.gather(*questions))

        return self._run(lambda: self._runner.run(gathered())) if questions else []

    def _run(self, work: Callable[[], T]) -> T:
        return work() if self._thread is None else self._thread.submit(work).result()

    async def _reset(self, episode: int, row: Mapping[str, Any], seed: int) -> Answer:
        def begin() -> Any:
            world = self._made[episode] = self.make()
            return world.reset(row, **({"seed": seed} if takes_seed(world.reset) else {}))

        async def begin_here() -> Any:
            return await begin()

        # a plain one is made in the thread of its reset: what takes long there holds nobody up
        how = begin_here if waits(self.make) else begin
        answer = await self._asker.ask(how, partial(begun, tokens=self.writer.opening))
        if answer.step is None:
            await self._close(episode)
        return answer

    async def _step(self, episode: int, response: Response) -> Answer:
        # a turn that was cut off has no end token, whatever its last token looks like
        tokens = partial(self.writer.between, sampled=() if response.truncated else response.token_ids)
        answer = await self._asker.ask(partial(self._made[episode].step, response), partial(five_values, tokens=tokens))
        if answer.step is None or answer.step.over:
            await self._close(episode)
        return answer

    async def _close(self, episode: int) -> None:
        """Once for each that was made; what goes wrong here takes no reward back."""
        close = getattr(self._made.pop(episode, None), "close", None)
        if close is None:
            return
        answer = await self._asker.ask(close, lambda _: Step())
        if answer.failure and not self._told:
            self._told = True
            logger.warning("closing an environment failed (shown once for a batch):\n%s", answer.failure)


def _in_a_loop() -> bool:
    """Whether an event loop runs in this thread: another cannot run in it then."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True
