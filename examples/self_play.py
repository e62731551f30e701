"""Train a policy by self-play: it has both roles of a game, and each role learns from its own reward.

Run it from the repository root (a few minutes on a CPU; needs the extras `serve` and `judge`):

    python examples/self_play.py [--seed 0] [--output-dir runs/self_play]

The game is Nim: two players take 1 to 3 sticks in turn, and whoever takes the last stick wins. Each role has its
own conversation with the policy, which becomes a separate sequence. The winner's sequence has reward 1, the
loser's -1. The policy starts with random moves. It is evaluated against an opponent who makes no mistake.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from openai import AsyncOpenAI, DefaultAsyncHttpxClient
from rich.console import Console
from stages import imitation, parsed  # the file beside this one

from realign.api import GenerationConfig, Panel
from realign.data import PromptData, Template
from realign.demo.tiny import EOS, build_model, build_tokenizer, save, write_rows
from realign.engines import SharedModel, TransformersModel
from realign.engines.training.optimizer import OptimizerSpec
from realign.interfaces.agent import AgentInterface
from realign.interfaces.components import EntropyBonus
from realign.interfaces.grpo import GRPOActorInterface, dataflow
from realign.records.metrics.curves import draw_curves
from realign.runtime import EpisodeEvaluation, Experiment, RunResult, run

LARGEST, MOST = 7, 3
"""Largest number of sticks at the start, and of sticks that a player may take."""
ROLES = ("first", "second")
TEMPLATE = "{% for m in messages %}{{ m.content }}{% if m.role == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}"
PANELS = (
    Panel("games won against perfect play", {"eval/reward": "evaluation"}),
    Panel("reward in self-play", {"rewards/first/mean": "first", "rewards/second/mean": "second"}),
    Panel("entropy (nats per token)", {"entropy": "training"}),
)

Player = Callable[[int], Awaitable[str]]


def observation(sticks: int) -> str:
    """Return what a player reads before a move."""
    return f"sticks {sticks}\n"


async def play(sticks: int, players: Sequence[Player]) -> int:
    """Play a game, and return the index of the winner. An invalid move loses."""
    turn = 0
    while True:
        move = await players[turn](sticks)
        if not move.isdecimal() or not 1 <= int(move) <= min(MOST, sticks):
            return 1 - turn
        sticks -= int(move)
        if not sticks:
            return turn
        turn = 1 - turn


def policy(client: AsyncOpenAI, role: str) -> Player:
    """Return the policy in a role, with a separate conversation."""
    messages: list[Any] = []

    async def move(sticks: int) -> str:
        messages.append({"role": "user", "content": observation(sticks)})
        answer = await client.chat.completions.create(model=role, messages=messages)
        text = answer.choices[0].message.content or ""
        messages.append({"role": "assistant", "content": text})
        return text

    return move


async def perfect(sticks: int) -> str:
    """Leave a multiple of 4 sticks if possible."""
    return str(sticks % (MOST + 1) or 1)


def connect(base_url: str, api_key: str) -> AsyncOpenAI:
    """Return a client of the endpoint."""
    return AsyncOpenAI(base_url=base_url, api_key=api_key, http_client=DefaultAsyncHttpxClient(verify=False))


async def self_play(base_url: str, api_key: str, row: Mapping[str, Any]) -> dict[str, Any]:
    """Play a game of the policy against itself."""
    async with connect(base_url, api_key) as client:
        winner = await play(row["sticks"], [policy(client, role) for role in ROLES])
    return {"rewards": {role: 1.0 if index == winner else -1.0 for index, role in enumerate(ROLES)}}


async def against_perfect(base_url: str, api_key: str, row: Mapping[str, Any]) -> float:
    """Play a game of the policy, which begins, against perfect play. Returns 1 if the policy wins."""
    async with connect(base_url, api_key) as client:
        return float(await play(row["sticks"], [policy(client, "policy"), perfect]) == 0)


def prepare(folder: Path, seed: int) -> None:
    """Write the model, random moves to imitate, and games for training and evaluation."""
    rng = random.Random(seed)
    moves = []
    for _ in range(1500):
        sticks, text = rng.randint(1, LARGEST), ""
        while sticks > 0:
            text += observation(sticks)
            move = rng.randint(1, min(MOST, sticks))
            moves.append({"prompt": text, "response": str(move)})
            sticks -= move + rng.randint(1, MOST)  # the other player moves
            text += f"{move}{EOS}"
    folder.mkdir(parents=True, exist_ok=True)
    write_rows(folder / "demonstrations.jsonl", moves)
    games = [{"prompt": observation(n), "sticks": n} for n in range(1, LARGEST + 1)]
    write_rows(folder / "games.jsonl", games)
    write_rows(folder / "winnable.jsonl", (game for game in games if game["sticks"] % (MOST + 1)))
    from tokenizers import Regex, decoders, pre_tokenizers

    words = ["sticks ", "\n", *map(str, range(1, LARGEST + 1))]
    split = pre_tokenizers.Split(Regex(r"sticks |\d+|[\s\S]"), "isolated")
    tokenizer = build_tokenizer(words, split=split, decoder=decoders.Fuse())
    tokenizer.chat_template = TEMPLATE
    save(folder / "model", build_model("llama", 2 + len(words), seed=seed), tokenizer)


def experiments(folder: Path, seed: int, sft_steps: int, steps: int) -> tuple[Experiment, Experiment]:
    """Define SFT on random moves, then GRPO by self-play."""
    start = imitation("self_play", folder, seed, sft_steps)
    sampler = GenerationConfig(n=16, max_new_tokens=2)

    def agent(name: str, n: int, roles: Sequence[str] = ()) -> AgentInterface:
        one_move = GenerationConfig(n=n, max_new_tokens=sampler.max_new_tokens)
        return AgentInterface(f"{__file__}:{name}", role_names=list(roles), generation=one_move, max_sequence_tokens=60)

    interfaces = {
        "actor": GRPOActorInterface(generation=sampler, entropy=EntropyBonus(0.1)),
        "agent": agent("self_play", sampler.n, ROLES),
    }
    learn = Experiment(
        name="self_play",
        steps=steps,
        batch_prompts=LARGEST,
        seed=seed,
        graph=dataflow(interfaces),
        interfaces=interfaces,
        models={
            "actor": TransformersModel(str(folder / "sft" / "final" / "actor"), optimizer=OptimizerSpec(lr=5e-4)),
            "agent": SharedModel(of="actor"),
        },
        data=PromptData(str(folder / "task" / "games.jsonl"), template=Template.plain),
        evaluation=EpisodeEvaluation(
            PromptData(str(folder / "task" / "winnable.jsonl"), template=Template.plain),
            every_steps=20,
            episodes=agent("against_perfect", 4),
        ),
        output_dir=folder / "grpo",
        overwrite=True,
    )
    return start, learn


def main(arguments: Sequence[str] | None = None) -> RunResult:
    """Train the policy; the last line of stdout is one JSON object."""
    parser = argparse.ArgumentParser(description="Train a policy by self-play.")
    given = parsed(parser, arguments, folder=Path("runs/self_play"), steps=40)
    console = Console()
    prepare(given.output_dir / "task", given.seed)
    start, learn = experiments(given.output_dir, given.seed, given.sft_steps, given.steps)
    run(start, console=console)
    result = run(learn, console=console)
    title = f"Self-play of Nim with up to {LARGEST} sticks"
    picture = draw_curves({"GRPO": result.history}, given.output_dir / "curves.png", title=title, panels=PANELS)
    won = result.series("eval/reward")
    print(json.dumps({"won_before": won[0], "won_after": won[-1], "curves": str(picture)}))
    return result


if __name__ == "__main__":
    main()
