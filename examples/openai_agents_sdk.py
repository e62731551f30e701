"""Train an agent built with the OpenAI Agents SDK, without any change of the SDK.

Run it from the repository root (a few minutes on a CPU; needs the extras `serve` and `judge`, and the package
`openai-agents`):

    python examples/openai_agents_sdk.py [--seed 0] [--output-dir runs/openai_agents_sdk]

The task, the model and the demonstrations are those of `calculator_agent.py`, and the templates of the tokenizer those
of `openai_agent.py`. The SDK calls the tool and sends its result to the policy, until the policy answers.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import openai_agent  # the example beside this file
from agents import Agent, MaxTurnsExceeded, OpenAIChatCompletionsModel, Runner, function_tool, set_tracing_disabled
from openai import AsyncOpenAI, DefaultAsyncHttpxClient

from realign.runtime import RunResult

set_tracing_disabled(True)  # otherwise the SDK sends traces to its vendor


@function_tool
def multiply(expression: str) -> str:
    """Compute a product, such as 12*34."""
    product = re.fullmatch(r"(\d{1,6})\*(\d{1,6})", expression)
    return str(int(product[1]) * int(product[2])) if product else "invalid"


async def agent(base_url: str, api_key: str, row: Mapping[str, Any]) -> float:
    """Answer the question of a row. Returns 1 for the right answer."""
    http = DefaultAsyncHttpxClient(verify=False)  # loads no certificates, since the endpoint is on this machine
    async with AsyncOpenAI(base_url=base_url, api_key=api_key, http_client=http, max_retries=0) as client:
        calculator = Agent("calculator", model=OpenAIChatCompletionsModel("policy", client), tools=[multiply])
        try:
            result = await Runner.run(calculator, row["prompt"], max_turns=openai_agent.MAX_CALLS)
        except MaxTurnsExceeded:
            return 0.0
    return float(result.final_output == f"answer {row['answer']}")


def main(arguments: Sequence[str] | None = None) -> RunResult:
    """Train the agent; the last line of stdout is one JSON object."""
    return openai_agent.main(arguments, agent=f"{__file__}:agent", title="Agent of the OpenAI Agents SDK")


if __name__ == "__main__":
    main()
