"""Taskset of verifiers with a tool, for `test_verifiers_agent.py`. It runs in the environment of verifiers."""

from __future__ import annotations

from collections.abc import Iterator

import verifiers.v1 as vf

__all__ = ["Products"]


class Calculator(vf.Toolset[vf.ToolsetConfig, vf.State]):
    """Multiplies."""

    TOOL_PREFIX = "calc"

    @vf.tool
    async def multiply(self, a: int, b: int) -> str:
        """Multiply two integers."""
        return str(a * b)


class ProductTask(vf.Task[vf.TaskData, vf.State, vf.TaskConfig]):
    """A product to compute with the tool."""

    @classmethod
    def toolsets(cls, config: vf.TaskConfig) -> list[vf.Toolset]:
        return [Calculator(vf.ToolsetConfig())]

    @vf.reward
    async def right(self, trace: vf.Trace) -> float:
        return float("12" in trace.last_reply)


class Products(vf.Taskset[ProductTask, vf.TasksetConfig]):
    """One product."""

    def load(self) -> Iterator[ProductTask]:
        yield ProductTask(vf.TaskData(prompt="What is 3 times 4?"), self.config.task)


if __name__ == "__main__":
    Calculator.run()
