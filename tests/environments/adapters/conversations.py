"""Conversations with environments of adapters, for tests."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Mapping
from typing import Any

from realign.api.environment import Response


async def _value(x: Any) -> Any:
    return await x if inspect.isawaitable(x) else x


def talk(environment: Any, *texts: str, row: Mapping[str, Any] | None = None, seed: int = 0) -> list[Any]:
    """Return the first observation, and (observation, reward, terminated, truncated) for each text."""

    async def conversation() -> list[Any]:
        opening, _ = await _value(environment.reset(row or {}, seed=seed))
        answers = [(await _value(environment.step(Response(text, (), i, False))))[:4] for i, text in enumerate(texts)]
        if hasattr(environment, "close"):
            await _value(environment.close())
        return [opening, *answers]

    return asyncio.run(conversation())
