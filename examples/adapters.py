"""Train a tiny policy on an environment of another package.

Run it from the repository root (one to three minutes on a CPU each):

    python examples/adapters.py gymnasium        # extra gymnasium: FrozenLake with 3 by 3 fields
    python examples/adapters.py textarena        # package textarena: GuessTheNumber from 1 to 7, three guesses
    python examples/adapters.py reasoning_gym    # extra tasks: sums and differences of two digits
    python examples/adapters.py openenv --python ENVIRONMENT/bin/python    # package websockets: a server with openenv
    python examples/adapters.py verifiers --python ENVIRONMENT/bin/python  # extras serve and judge: a taskset

Each policy starts by imitating random play, or wrong and right answers, and is then trained with GRPO. `--python` is
the interpreter of another Python environment that has the package openenv or verifiers.
"""

from __future__ import annotations

import argparse
import asyncio
import inspect
import json
import random
import re
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from stages import imitation, parsed  # the file beside this one

from realign.api import GenerationConfig, ModelInterface
from realign.api.environment import Response
from realign.data import PromptData, Template
from realign.demo.tiny import EOS, build_model, build_tokenizer, save, write_rows
from realign.engines import SharedModel, TransformersModel
from realign.engines.training.optimizer import OptimizerSpec
from realign.environments import load_environment
from realign.environments.adapters import reasoning_gym_rows
from realign.interfaces.agent import AgentInterface
from realign.interfaces.components import EntropyBonus
from realign.interfaces.environment import EnvironmentInterface
from realign.interfaces.grpo import GRPOActorInterface, dataflow
from realign.interfaces.rule_reward import RuleRewardInterface
from realign.runtime import EpisodeEvaluation, Evaluation, Experiment, RunResult, run

ADAPTERS = "realign.environments.adapters"
FOLDER = Path(__file__).parent
TEMPLATE = "{% for m in messages %}{{ m.content }}{% if m.role == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}"
WORD = re.compile(r" ?\w+|[\s\S]")
POSITIONS = 128
"""Context window of the model in tokens."""


@dataclass
class Task:
    """What differs between the adapters."""

    scorer: Callable[[GenerationConfig], ModelInterface]
    """Returns the interface that plays or scores, given the sampling settings."""
    rows: list[dict[str, Any]]
    """Rows of the dataset."""
    demonstrations: list[dict[str, str]]
    """Prompts and responses to imitate."""
    max_new_tokens: int
    """Maximum number of tokens of one turn."""
    role: str = "agent"
    """Role of the interface: `agent` if it samples, `reward` if it scores responses."""
    batch_prompts: int = 16
    """Rows of a step, with 8 episodes each."""


@dataclass
class Play:
    """A task with an environment, whose demonstrations are random play."""

    name: str
    """Class of the environment, as in `EnvironmentInterface`."""
    arguments: dict[str, Any]
    act: Callable[[random.Random], str]
    """Draws an action."""
    prompt: str
    turns: int
    max_new_tokens: int
    seeds: random.Random = field(default_factory=lambda: random.Random(0))

    def task(self) -> Task:
        """Return the task."""

        def player(sampler: GenerationConfig) -> ModelInterface:
            return EnvironmentInterface(
                self.name,
                self.arguments,
                generation=sampler,
                max_turns=self.turns,
                max_episode_tokens=POSITIONS - 8,
                same_seed=True,
            )

        rows = [{"prompt": self.prompt}] * 64
        return Task(player, rows, asyncio.run(self.random_play(300)), self.max_new_tokens)

    async def random_play(self, games: int) -> list[dict[str, str]]:
        """Return the turns of games with random actions."""
        make, turns = load_environment(self.name, self.arguments), []
        for _ in range(games):
            world: Any = make()
            observation, _ = await value(world.reset({}, seed=self.seeds.getrandbits(31)))
            text = self.prompt + observation
            for turn in range(self.turns):
                action = self.act(self.seeds)
                turns.append({"prompt": text, "response": action})
                observation, _, over, cut, _ = await value(world.step(Response(action, (), turn, False)))
                if over or cut:
                    break
                text += action + EOS + observation
            if hasattr(world, "close"):
                await value(world.close())
        return turns


async def value(x: Any) -> Any:
    """Return the result of a method, which may be a coroutine."""
    return await x if inspect.isawaitable(x) else x


def gymnasium(python: str) -> Task:
    """Play FrozenLake: from the first to the last field, without the hole in the middle."""
    moves = ["left", "down", "right", "up"]
    arguments = {
        "id": "FrozenLake-v1",
        "arguments": {"desc": ["SFF", "FHF", "FFG"], "is_slippery": False},
        "actions": moves,
    }
    name = f"{ADAPTERS}.gymnasium_text:GymnasiumText"
    return Play(name, arguments, lambda rng: rng.choice(moves), "lake\n", 8, 2).task()


def textarena(python: str) -> Task:
    """Play GuessTheNumber: the reward is 1 for the number, in at most three guesses."""
    arguments = {
        "id": "GuessTheNumber-v0",
        "arguments": {"min_number": 1, "max_number": 7, "max_turns": 3},
        "rules": False,
    }
    name = f"{FOLDER}/textarena_game.py:TextArenaGame"
    return Play(name, arguments, lambda rng: f"[{rng.randint(1, 7)}]", "guess\n", 3, 4).task()


def openenv(url: str) -> Task:
    """Find a number from 1 to 7 in three guesses, on a server."""
    name, arguments = f"{FOLDER}/openenv_session.py:OpenEnvSession", {"base_url": url}
    return Play(name, arguments, lambda rng: str(rng.randint(1, 7)), "guess\n", 3, 2).task()


def reasoning_gym(python: str) -> Task:
    """Use sums and differences; half of the answers in the demonstrations are wrong."""
    settings = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}
    rows, rng = list(reasoning_gym_rows.rows("chain_sum", size=64, **settings)), random.Random(0)
    wrong = [{"prompt": row["prompt"], "response": str(rng.randint(-9, 18))} for row in rows]
    right = [{"prompt": row["prompt"], "response": row["answer"]} for row in rows]
    reward = RuleRewardInterface("realign.rewards.reasoning:verified")
    return Task(lambda sampler: reward, rows, wrong + right, 3, role="reward")


def verifiers(python: str) -> Task:
    """Use sums, as a taskset of verifiers; half of the answers in the demonstrations are wrong."""
    config = {"taskset": {"id": "verifiers_sums"}, "path": str(FOLDER)}
    sums, rng = [(a, b) for a in range(5) for b in range(5)], random.Random(0)
    right = [{"prompt": f"{a}+{b}=", "response": str(a + b)} for a, b in sums]
    wrong = [row | {"response": str(rng.randint(0, 18))} for row in right]

    def agent(sampler: GenerationConfig) -> ModelInterface:
        arguments = {"python": python, "config": config}
        name = f"{ADAPTERS}.verifiers_agent:episode"
        return AgentInterface(name, arguments, generation=sampler, max_sequence_tokens=32)

    rows = [{"prompt": row["prompt"], "idx": idx} for idx, row in enumerate(right)]
    return Task(agent, rows, right + wrong, 2, batch_prompts=8)


def prepare(folder: Path, task: Task, seed: int) -> None:
    """Write the data, and a model whose words are those of the demonstrations."""
    from tokenizers import Regex, decoders, pre_tokenizers

    folder.mkdir(parents=True, exist_ok=True)
    write_rows(folder / "rows.jsonl", task.rows)
    write_rows(folder / "demonstrations.jsonl", task.demonstrations)
    texts = [text for row in task.demonstrations for text in f"{row['prompt']}{EOS}{row['response']}".split(EOS)]
    words = sorted({word for text in texts for word in WORD.findall(text)})
    split = pre_tokenizers.Split(Regex(WORD.pattern), "isolated")
    tokenizer = build_tokenizer(words, split=split, decoder=decoders.Fuse())
    tokenizer.chat_template = TEMPLATE
    save(folder / "model", build_model("llama", len(tokenizer), seed=seed, positions=POSITIONS), tokenizer)


def experiments(folder: Path, task: Task, seed: int, sft_steps: int, steps: int) -> tuple[Experiment, Experiment]:
    """Define SFT on the demonstrations, then GRPO with the adapter."""
    start = imitation("adapters", folder, seed, sft_steps)
    sampler, single = (GenerationConfig(n=n, max_new_tokens=task.max_new_tokens) for n in (8, 1))
    scorer, rows = task.scorer(sampler), PromptData(str(folder / "task" / "rows.jsonl"), template=Template.plain)
    interfaces: dict[str, ModelInterface] = {
        "actor": GRPOActorInterface(generation=sampler, entropy=EntropyBonus(0.01)),
        task.role: scorer,
    }
    models: dict[str, Any] = {
        "actor": TransformersModel(str(folder / "sft" / "final" / "actor"), optimizer=OptimizerSpec(lr=7e-4))
    }
    if task.role == "agent":
        models["agent"] = SharedModel(of="actor")
    every = max(1, steps // 2)
    learn = Experiment(
        name="adapters",
        steps=steps,
        batch_prompts=task.batch_prompts,
        seed=seed,
        graph=dataflow(interfaces),
        interfaces=interfaces,
        models=models,
        data=rows,
        evaluation=EpisodeEvaluation(rows, every_steps=every, episodes=task.scorer(single))
        if task.role == "agent"
        else Evaluation(rows, every_steps=every, generation=single),
        output_dir=folder / "grpo",
        overwrite=True,
    )
    return start, learn


@contextmanager
def server(python: str) -> Iterator[str]:
    """Start the OpenEnv server, and return its address."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    process = subprocess.Popen([python, str(FOLDER / "openenv_guess.py"), str(port)])
    try:
        while True:
            try:
                socket.create_connection(("127.0.0.1", port), timeout=1).close()
                break
            except OSError:
                if process.poll() is not None:
                    raise SystemExit(f"{python}: the server ended with exit code {process.returncode}") from None
                time.sleep(0.2)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait()


TASKS: Mapping[str, Callable[[str], Task]] = {
    function.__name__: function for function in (gymnasium, textarena, reasoning_gym, openenv, verifiers)
}


def train(task: Task, folder: Path, seed: int, sft_steps: int, steps: int) -> RunResult:
    """Run both experiments; the last line of stdout is one JSON object."""
    console = Console()
    prepare(folder / "task", task, seed)
    start, learn = experiments(folder, task, seed, sft_steps, steps)
    run(start, console=console)
    result = run(learn, console=console)
    print(json.dumps({f"reward_{when}": result.series("eval/reward")[i] for when, i in (("before", 0), ("after", -1))}))
    return result


def main(arguments: Sequence[str] | None = None) -> RunResult:
    """Train on the environment that the command line names."""
    parser = argparse.ArgumentParser(description="Train on an environment of another package.")
    parser.add_argument("adapter", choices=list(TASKS))
    parser.add_argument("--python", default="", help="interpreter with openenv or verifiers")
    given = parsed(parser, arguments, folder=Path("runs/adapters"), steps=40)
    folder = given.output_dir / given.adapter
    settings = (folder, given.seed, given.sft_steps, given.steps)
    if given.adapter == "openenv":
        with server(given.python) as url:
            return train(openenv(url), *settings)
    return train(TASKS[given.adapter](given.python), *settings)


if __name__ == "__main__":
    main()
