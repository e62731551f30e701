"""Train an agent to use a calculator for products that a tiny model cannot compute itself.

Run it from the repository root (a few minutes on a CPU):

    python examples/calculator_agent.py [--seed 0] [--output-dir runs/calculator_agent]

A conversation is `347*86? calc 347*86 = 29842 answer 29842`, in which the calculator wrote `= 29842`. Most of the
demonstrations answer immediately with a random number. So the policy starts with few right answers. From the reward
alone, it learns to call the calculator first and to copy the result without errors.

For a tool of your own, change `Calculator`, `question`, `demonstration` and the tokenizer's words in `prepare`. With a
real model, no demonstration is needed: `realign experiment=grpo_environment models.actor.path=MODEL
data.path=rows.jsonl interfaces.agent.environment=examples/calculator_agent.py:Calculator`.
"""

from __future__ import annotations

import argparse
import json
import random
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from realign.api import GenerationConfig, Panel
from realign.api.environment import Response
from realign.data import PromptData, SupervisedData, Template
from realign.demo.tiny import EOS, build_model, build_tokenizer, save, write_rows
from realign.engines import SharedModel, TransformersModel
from realign.engines.training.optimizer import OptimizerSpec
from realign.interfaces import sft
from realign.interfaces.environment import EnvironmentInterface
from realign.interfaces.grpo import GRPOActorInterface, dataflow
from realign.records.metrics.curves import draw_curves
from realign.runtime import EpisodeEvaluation, Experiment, RunResult, run

TASK = "multiply "
"""Text before each question: the name of the tool, which the chat template of `openai_agent.py` writes there."""
CALLS = 0.3
"""Fraction of the demonstrations that use the calculator."""
PANELS = (
    Panel("right answers", {"reward": "training", "eval/reward": "held out"}),
    Panel("turns in an episode", {"turns": "training", "eval/turns": "held out"}),
    Panel("entropy (nats per token)", {"entropy": "training"}),
)


class Calculator:
    """Environment that asks a question, computes products, and scores the answer."""

    async def reset(self, row: Mapping[str, Any], *, seed: int) -> tuple[str, dict[str, Any]]:
        """Store the answer of the row; the prompt contains the question."""
        self.answer: str = row["answer"]
        return "", {}

    async def step(self, response: Response) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Compute a requested product. Any other response is an answer and ends the episode."""
        if asked := re.fullmatch(r"calc (\d{1,6})\*(\d{1,6})", response.text):
            return f"= {int(asked[1]) * int(asked[2])}\n", 0.0, False, False, {}
        return "", float(response.text == f"answer {self.answer}"), True, False, {}


def question(rng: random.Random) -> dict[str, str]:
    """Draw a row: a product of a three-digit and a two-digit number."""
    a, b = rng.randint(100, 999), rng.randint(10, 99)
    return {"prompt": f"{a}*{b}?", "answer": str(a * b)}


def demonstration(rng: random.Random) -> list[dict[str, str]]:
    """Draw a demonstration with one row per turn. It calls the calculator or answers with a random number."""
    row = question(rng)
    prompt, answer = row["prompt"], row["answer"]
    if rng.random() >= CALLS:
        return [{"prompt": prompt, "response": f"answer {rng.randint(1000, 99999)}"}]
    call = f"calc {prompt[:-1]}"
    read = f"{prompt}{call}{EOS}= {answer}\n"  # the context of the next turn; turns end with an end token
    return [{"prompt": prompt, "response": call}, {"prompt": read, "response": f"answer {answer}"}]


def prepare(folder: Path, seed: int) -> None:
    """Write the model, the demonstrations, and questions for training and evaluation."""
    rng = random.Random(seed)
    folder.mkdir(parents=True, exist_ok=True)
    write_rows(folder / "demonstrations.jsonl", (row for _ in range(6000) for row in demonstration(rng)))
    write_rows(folder / "questions.jsonl", (question(rng) for _ in range(2000)))
    write_rows(folder / "held_out.jsonl", (question(rng) for _ in range(200)))
    from tokenizers import Regex, decoders, pre_tokenizers

    words = [TASK, "calc ", "answer ", "= ", "\n", "*", "?", *"0123456789"]
    split = pre_tokenizers.Split(Regex(rf"{TASK}|calc |answer |= |[\s\S]"), "isolated")
    tokenizer = build_tokenizer(words, split=split, decoder=decoders.Fuse())
    save(folder / "model", build_model("llama", 2 + len(words), seed=seed), tokenizer)


def experiments(folder: Path, seed: int, sft_steps: int, steps: int) -> tuple[Experiment, Experiment]:
    """Define SFT on the demonstrations, then GRPO with the environment."""
    task = folder / "task"
    start = Experiment(
        name="calculator_agent_sft",
        steps=sft_steps,
        batch_prompts=64,
        seed=seed,
        graph=sft.dataflow(),
        interfaces={"actor": sft.SFTInterface()},
        models={"actor": TransformersModel(str(task / "model"), optimizer=OptimizerSpec(lr=3e-3))},
        data=SupervisedData(str(task / "demonstrations.jsonl"), template=Template.plain, prefix=TASK),
        output_dir=folder / "sft",
        overwrite=True,
    )

    def agent(sampler: GenerationConfig) -> EnvironmentInterface:
        return EnvironmentInterface(f"{__file__}:Calculator", generation=sampler, max_turns=3, max_episode_tokens=49)

    sampler = GenerationConfig(n=8, max_new_tokens=10)
    interfaces = {"actor": GRPOActorInterface(generation=sampler), "agent": agent(sampler)}
    learn = Experiment(
        name="calculator_agent",
        steps=steps,
        batch_prompts=16,
        seed=seed,
        graph=dataflow(interfaces),
        interfaces=interfaces,
        models={
            "actor": TransformersModel(str(folder / "sft" / "final" / "actor"), optimizer=OptimizerSpec(lr=2e-4)),
            "agent": SharedModel(of="actor"),
        },
        data=PromptData(str(task / "questions.jsonl"), template=Template.plain, prefix=TASK),
        evaluation=EpisodeEvaluation(
            PromptData(str(task / "held_out.jsonl"), template=Template.plain, prefix=TASK),
            every_steps=10,
            episodes=agent(GenerationConfig(max_new_tokens=10)),
        ),
        output_dir=folder / "grpo",
        overwrite=True,
    )
    return start, learn


def main(arguments: Sequence[str] | None = None) -> RunResult:
    """Train the agent; the last line of stdout is one JSON object."""
    parser = argparse.ArgumentParser(description="Train an agent to use a calculator.")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output-dir", type=Path, default=Path("runs/calculator_agent"))
    parser.add_argument("--sft-steps", type=int, default=400)
    parser.add_argument("--steps", type=int, default=60)
    given = parser.parse_args(arguments)
    console = Console()
    prepare(given.output_dir / "task", given.seed)
    start, learn = experiments(given.output_dir, given.seed, given.sft_steps, given.steps)
    run(start, console=console)
    result = run(learn, console=console)
    title = "Calculator agent: products of a three-digit and a two-digit number"
    picture = draw_curves({"GRPO": result.history}, given.output_dir / "curves.png", title=title, panels=PANELS)
    right = result.series("eval/reward")
    print(json.dumps({"right_before": right[0], "right_after": right[-1], "curves": str(picture)}))
    return result


if __name__ == "__main__":
    main()
