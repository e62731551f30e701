"""Train an agent that is a plain program: it calls the policy with the `openai` client, and a calculator as a tool.

Run it from the repository root (a few minutes on a CPU; needs the extras `serve` and `judge`):

    python examples/openai_agent.py [--seed 0] [--output-dir runs/openai_agent]

The task, the model and the demonstrations are those of `calculator_agent.py`, in which an environment class calls the
calculator. Here the function `agent` knows no class of realign. The tokenizer has a chat template, and a response
template that finds tool calls (see `tokenizer.parse_response` of transformers). With equal seeds, both examples sample
the same tokens in their first step.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from calculator_agent import PANELS, TASK, experiments, prepare  # the example beside this file
from openai import AsyncOpenAI, DefaultAsyncHttpxClient
from rich.console import Console
from transformers import AutoTokenizer

from realign.api import GenerationConfig
from realign.data import PromptData, Template
from realign.interfaces.agent import AgentInterface
from realign.interfaces.grpo import GRPOActorInterface, dataflow
from realign.records.metrics.curves import draw_curves
from realign.runtime import EpisodeEvaluation, Experiment, RunResult, run

AGENT = f"{__file__}:agent"
MAX_CALLS = 3
TOOL = {
    "type": "function",
    "function": {
        "name": "multiply",
        "description": "Compute a product, such as 12*34.",
        "parameters": {
            "type": "object",
            "properties": {"expression": {"type": "string"}},
            "required": ["expression"],
        },
    },
}
CHAT_TEMPLATE = """\
{%- for m in messages %}
    {%- if m.tool_calls %}
        {{- 'calc ' + m.tool_calls[0].function.arguments.expression + eos_token }}
    {%- elif m.role == 'assistant' %}
        {{- m.content + eos_token }}
    {%- elif m.role == 'tool' %}
        {{- '= ' + m.content + '\\n' }}
    {%- else %}
        {{- (tools[0].function.name + ' ' if tools and loop.first else '') + m.content }}
    {%- endif %}
{%- endfor %}"""
RESPONSE_TEMPLATE = {
    "defaults": {"role": "assistant"},
    "start_anchor_pattern": r"[?\n]",
    "fields": {
        "tool_calls": {
            "open_pattern": r"^calc (?=\d{1,6}\*\d{1,6}<\|endoftext\|>$)",
            "close": "<|endoftext|>",
            "repeats": True,
            "content": "text",
            "transform": {
                "type": "function",
                "function": {"name": "multiply", "arguments": {"expression": "{content}"}},
            },
        },
        "content": {"close": "<|endoftext|>", "content": "text"},
    },
}


async def agent(base_url: str, api_key: str, row: Mapping[str, Any]) -> float:
    """Answer the question of a row, with the calculator if the policy calls it. Returns 1 for the right answer."""
    http = DefaultAsyncHttpxClient(verify=False)  # loads no certificates, since the endpoint is on this machine
    # the client's default of 5 s for connecting is too short for hundreds of episodes on a busy machine
    async with AsyncOpenAI(base_url=base_url, api_key=api_key, http_client=http, timeout=600) as client:
        messages: list[Any] = [{"role": "user", "content": row["prompt"]}]
        for _ in range(MAX_CALLS):
            answer = await client.chat.completions.create(model="policy", messages=messages, tools=[TOOL])
            said = answer.choices[0].message
            if not said.tool_calls:
                return float(said.content == f"answer {row['answer']}")
            messages.append(said.model_dump(exclude_none=True))
            for call in said.tool_calls:
                a, b = json.loads(call.function.arguments)["expression"].split("*")
                messages.append({"role": "tool", "tool_call_id": call.id, "content": str(int(a) * int(b))})
    return 0.0


def write_templates(folder: Path) -> None:
    """Add the chat template and the response template to the tokenizer of a model folder."""
    tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    tokenizer.chat_template, tokenizer.response_template = CHAT_TEMPLATE, RESPONSE_TEMPLATE
    tokenizer.save_pretrained(folder)


def with_agent(learn: Experiment, folder: Path, agent: str = AGENT) -> Experiment:
    """Return the experiment with an agent in place of the environment class."""

    def player(sampler: GenerationConfig) -> AgentInterface:
        return AgentInterface(agent, generation=sampler, max_calls=MAX_CALLS, max_sequence_tokens=56)

    sampler = learn.interfaces["actor"].plan().generation
    assert sampler is not None
    interfaces = {"actor": GRPOActorInterface(generation=sampler), "agent": player(sampler)}
    return Experiment(
        name="openai_agent",
        steps=learn.steps,
        batch_prompts=learn.batch_prompts,
        seed=learn.seed,
        graph=dataflow(interfaces),
        interfaces=interfaces,
        models=learn.models,
        data=learn.data,
        evaluation=EpisodeEvaluation(
            PromptData(str(folder / "task" / "held_out.jsonl"), template=Template.plain, prefix=TASK),
            every_steps=10,
            episodes=player(GenerationConfig(max_new_tokens=10)),
        ),
        output_dir=folder / "agent",
        overwrite=True,
    )


def main(
    arguments: Sequence[str] | None = None,
    agent: str = AGENT,
    title: str = "Agent on the openai client",
) -> RunResult:
    """Train an agent, this one by default; the last line of stdout is one JSON object."""
    parser = argparse.ArgumentParser(description="Train an agent that calls the policy over HTTP.")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output-dir", type=Path, default=Path("runs") / Path(agent.rpartition(":")[0]).stem)
    parser.add_argument("--sft-steps", type=int, default=400)
    parser.add_argument("--steps", type=int, default=60)
    given = parser.parse_args(arguments)
    console = Console()
    prepare(given.output_dir / "task", given.seed)
    start, learn = experiments(given.output_dir, given.seed, given.sft_steps, given.steps)
    run(start, console=console)
    write_templates(given.output_dir / "sft" / "final" / "actor")
    result = run(with_agent(learn, given.output_dir, agent), console=console)
    title += ": products of a three-digit and a two-digit number"
    picture = draw_curves({"GRPO": result.history}, given.output_dir / "curves.png", title=title, panels=PANELS)
    right = result.series("eval/reward")
    print(json.dumps({"right_before": right[0], "right_after": right[-1], "curves": str(picture)}))
    return result


if __name__ == "__main__":
    main()
