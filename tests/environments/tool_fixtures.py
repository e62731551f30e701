"""Tools for tests."""

from __future__ import annotations

import asyncio
from typing import ClassVar

from realign.environments import Toolbox


def multiply(a: int, b: int) -> int:
    """Multiply two integers.

    Args:
        a: First factor.
        b: Second factor.
    """
    return a * b


async def lookup(word: str, language: str = "en") -> dict:
    """Look a word up.

    Args:
        word: The word.
        language: Language of the answer. (choices: ["en", "fr"])
    """
    await asyncio.sleep(0)
    return {"word": word, "language": language}


def broken() -> str:
    """Fail."""
    raise RuntimeError("the tool broke")


def undocumented(a):
    return a


NUMBER = 3


def score(prompt: str, response: str, row: dict) -> float:
    return float(row["answer"] in response)


def no_score(prompt: str, response: str, row: dict) -> None:
    return None


def group_score(prompt: str, responses: list[str], row: dict) -> list[float]:
    return [0.0] * len(responses)


async def with_tools(base_url, api_key, row, *, tools):
    return float(len(tools.schemas))


def plain_with_tools(base_url, api_key, row, *, tools):
    return 0.0


class Calling:
    """Environment that serves tool calls. The reward is 1 for an answer after reasoning."""

    seen: ClassVar[list] = []
    """Turns of the current test; the test clears the list."""

    def reset(self, row):
        self.tools = Toolbox([multiply])
        return "", {}

    async def step(self, response):
        self.seen.append(response)
        results = [await self.tools.call(call.name, call.arguments) for call in response.tool_calls]
        if results:
            return [{"role": "tool", "content": text} for text in results], 0.0, False, False, {}
        return "", float(response.content == "It is 12." and response.reasoning is not None), True, False, {}


class Given:
    """Environment that gets its tools from the config. Its reward is 1 if the last answer is a result of a tool."""

    closed = 0

    async def reset(self, row, *, tools, seed):
        self.tools, self.results = tools, []
        return "", {"seed": seed}

    async def step(self, response):
        results = [await self.tools.call(call.name, call.arguments) for call in response.tool_calls]
        self.results += results
        if results:
            return "\n".join(results), 0.0, False, False, {}
        return "", float(response.content in self.results), True, False, {}

    async def close(self):
        type(self).closed += 1


class PlainReset(Given):
    """Environment whose `reset` and `close` are plain functions, which run in threads."""

    def reset(self, row, *, tools):
        self.tools, self.results = tools, []
        return row["start"], {}

    def close(self):
        type(self).closed += 1


class PlainStep(Given):
    """Environment that cannot await tools."""

    def step(self, response):
        return "", 0.0, True, False, {}
