"""Train a policy on a game of several turns: find a number from 1 to 7 in three guesses, with hints.

Run it from the repository root (two minutes on a CPU):

    python examples/guessing_game.py [--seed 0] [--output-dir runs/guessing_game]

After each wrong guess the game answers higher or lower. The policy starts by imitating players who guess at random, and
wins one game in three. It learns to search from the result of its games. Always guessing the middle of the remaining
numbers wins every game.

For a game of your own, change `GuessingGame`, and in `prepare` the words of the tokenizer and the players. With a real
model, no player is needed: `realign experiment=grpo_environment models.actor.path=MODEL data.path=rows.jsonl
interfaces.agent.environment=examples/guessing_game.py:GuessingGame`.
"""

from __future__ import annotations

import argparse
import json
import random
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
from realign.functional import Scope
from realign.interfaces import sft
from realign.interfaces.components import EntropyBonus, Normalization
from realign.interfaces.environment import EnvironmentInterface
from realign.interfaces.grpo import GRPOActorInterface, dataflow
from realign.records.metrics.curves import draw_curves
from realign.runtime import EpisodeEvaluation, Experiment, RunResult, run

NUMBERS, GUESSES = 7, 3
PROMPT = "guess"
PANELS = (
    Panel("games won", {"reward": "training", "eval/reward": "evaluation"}),
    Panel("guesses in a game", {"turns": "training", "eval/turns": "evaluation"}),
    Panel("entropy (nats per token)", {"entropy": "training"}),
)


def hint(secret: int, guess: int) -> str:
    """Return the answer to a wrong guess."""
    return "higher" if secret > guess else "lower"


class GuessingGame:
    """Environment of one game. `max_turns` of the conversation limits the guesses."""

    async def reset(self, row: Mapping[str, Any], *, seed: int) -> tuple[str, dict[str, Any]]:
        """Store the secret of the row; the prompt is complete without an observation."""
        self.secret: int = row["secret"]
        return "", {}

    async def step(self, response: Response) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Return reward 1 and the end for the secret, the end for text that is not a number, else a hint."""
        if not response.text.isdecimal():
            return "", 0.0, True, False, {}
        guess = int(response.text)
        if guess == self.secret:
            return "", 1.0, True, False, {}
        return hint(self.secret, guess), 0.0, False, False, {}


def prepare(folder: Path, seed: int) -> None:
    """Write the model, and games of players who guess at random, with one row per guess."""
    rng = random.Random(seed)
    rows = []
    for _ in range(2000):
        secret, text = rng.randint(1, NUMBERS), PROMPT
        for _ in range(GUESSES):
            guess = rng.randint(1, NUMBERS)
            rows.append({"prompt": text, "response": str(guess)})
            if guess == secret:
                break
            text += f" {guess}{EOS} {hint(secret, guess)}"  # the context of the next turn; turns end with an end token
    folder.mkdir(parents=True, exist_ok=True)
    write_rows(folder / "demonstrations.jsonl", rows)
    write_rows(folder / "games.jsonl", ({"prompt": PROMPT, "secret": secret} for secret in range(1, NUMBERS + 1)))
    from tokenizers import pre_tokenizers

    words = [PROMPT, "higher", "lower", *map(str, range(1, NUMBERS + 1))]
    tokenizer = build_tokenizer(words, split=pre_tokenizers.WhitespaceSplit())
    save(folder / "model", build_model("llama", 2 + len(words), seed=seed), tokenizer)


def experiments(folder: Path, seed: int, sft_steps: int, steps: int) -> tuple[Experiment, Experiment]:
    """Define SFT on the demonstrations, then GRPO with the environment."""
    start = Experiment(
        name="guessing_game_sft",
        steps=sft_steps,
        batch_prompts=64,
        seed=seed,
        graph=sft.dataflow(),
        interfaces={"actor": sft.SFTInterface()},
        models={"actor": TransformersModel(str(folder / "task" / "model"), optimizer=OptimizerSpec(lr=2e-3))},
        data=SupervisedData(str(folder / "task" / "demonstrations.jsonl"), template=Template.plain),
        output_dir=folder / "sft",
        overwrite=True,
    )
    sampler = GenerationConfig(n=32, max_new_tokens=2)
    # Normalized within a group, games for a secret that is never found would all have an advantage of 0.
    over_batch = Normalization(mean=Scope.batch, std=Scope.batch)
    games = PromptData(str(folder / "task" / "games.jsonl"), template=Template.plain)

    def player(n: int) -> EnvironmentInterface:
        one_turn = GenerationConfig(n=n, max_new_tokens=sampler.max_new_tokens)
        return EnvironmentInterface(
            f"{__file__}:GuessingGame", generation=one_turn, max_turns=GUESSES, max_episode_tokens=3 * GUESSES
        )

    interfaces = {
        "actor": GRPOActorInterface(generation=sampler, adv_norm=over_batch, entropy=EntropyBonus(0.04)),
        "agent": player(sampler.n),
    }
    learn = Experiment(
        name="guessing_game",
        steps=steps,
        batch_prompts=NUMBERS,
        seed=seed,
        graph=dataflow(interfaces),
        interfaces=interfaces,
        models={
            "actor": TransformersModel(str(folder / "sft" / "final" / "actor"), optimizer=OptimizerSpec(lr=7e-4)),
            "agent": SharedModel(of="actor"),
        },
        data=games,
        evaluation=EpisodeEvaluation(games, every_steps=20, episodes=player(16)),
        output_dir=folder / "grpo",
        overwrite=True,
    )
    return start, learn


def main(arguments: Sequence[str] | None = None) -> RunResult:
    """Train the policy; the last line of stdout is one JSON object."""
    parser = argparse.ArgumentParser(description="Train a policy to search for a number by playing.")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output-dir", type=Path, default=Path("runs/guessing_game"))
    parser.add_argument("--sft-steps", type=int, default=100)
    parser.add_argument("--steps", type=int, default=140)
    given = parser.parse_args(arguments)
    console = Console()
    prepare(given.output_dir / "task", given.seed)
    start, learn = experiments(given.output_dir, given.seed, given.sft_steps, given.steps)
    run(start, console=console)
    result = run(learn, console=console)
    title = f"Guessing game: {GUESSES} guesses for a number from 1 to {NUMBERS}, with hints"
    picture = draw_curves({"GRPO": result.history}, given.output_dir / "curves.png", title=title, panels=PANELS)
    won = result.series("eval/reward")
    print(json.dumps({"won_before": won[0], "won_after": won[-1], "curves": str(picture)}))
    return result


if __name__ == "__main__":
    main()
