"""Attacks by the surroundings of a run: the wall clock, reward functions, and environments."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from benchmarks.torture.attacks import PROMPTS, RESPONSES, REWARDED, Act, Attack, Scene, Series

DAYS = "REALIGN_TORTURE_DAYS"
"""Variable with the numbers of days by which the clock is shifted in turn."""
YEARS = 3650
WORKERS = (*REWARDED, "interfaces.reward.workers=1", "interfaces.reward.timeout_s=2", "interfaces.reward.memory_mb=512")
EPISODES = (
    "experiment=grpo_environment",
    "models.actor.gradient_checkpointing=false",
    "models.actor.optimizer.lr=1e-4",
    "save_every_steps=null",
    "interfaces.actor.generation.max_new_tokens=5",
    "interfaces.agent.environment=CODE/episodes.py:Episode",
    "interfaces.agent.max_episode_tokens=16",
    "interfaces.agent.timeout_s=1",
    "interfaces.agent.max_failed_fraction=1.0",
)


def shifted(days: str) -> Act:
    """Return the act that shifts the clock of the next process by the next of some numbers of days in turn."""

    def act(scene: Scene) -> None:
        source = str(Path(__file__).parents[2])
        scene.environment |= {DAYS: days, "PYTHONPATH": os.pathsep.join([str(scene.code / "jumps"), source])}

    return act


def stop(scene: Scene) -> None:
    """Send SIGTERM to the attacked process."""
    assert scene.launch is not None
    scene.launch.process.terminate()


def clocks() -> Sequence[Series]:
    """Return the attacks by a wall clock that jumps."""
    often = Attack("clock jumps by days, 20 times a second", before=shifted("0 3 -5 400 -400"))
    name = "SIGTERM at step 3 ten years ahead, resumed ten years back"
    ahead = Attack(name, (143,), before=shifted(f"{YEARS}"), at={3: stop})
    return [Series("clock jumps", [often]), Series("clock set back", [ahead], last=shifted(f"-{YEARS}"))]


def rewards() -> Sequence[Series]:
    """Return the attacks by reward functions: the same responses lose their rewards as with an exception."""
    twin = (*WORKERS, "interfaces.reward.function=CODE/faulty.py:raises")
    how = {"hangs": "for ever", "exits": "by os._exit", "fills_memory": "until the limit"}
    return [
        Series(
            f"reward {name}",
            [Attack(f"reward function {name} {how_} for some prompts", tracebacks=True)],
            settings=(*WORKERS, f"interfaces.reward.function=CODE/faulty.py:{name}"),
            twin=twin,
        )
        for name, how_ in how.items()
    ]


def environments() -> Sequence[Series]:
    """Return the attacks by environments: the same episodes fail as with an exception."""
    first, last = PROMPTS * RESPONSES + 1, 2 * PROMPTS * RESPONSES

    def settings(fault: str, begin: int = 0, end: int = 0) -> tuple[str, ...]:
        return (*EPISODES, f"+interfaces.agent.arguments={{fault: {fault}, first: {begin}, last: {end}}}")

    return [
        Series(
            "environment hangs",
            [Attack("step of an environment never returns", tracebacks=True)],
            settings=settings("hang"),
            twin=settings("raise"),
        ),
        Series(
            "environment swallows",
            [Attack("step of an environment swallows its cancellation", tracebacks=True)],
            settings=settings("swallow"),
            twin=settings("raise"),
        ),
        Series(
            "environment blocks",
            [Attack("reset of an environment blocks the event loop in step 2", tracebacks=True)],
            settings=settings("block", first, first),
            twin=settings("raise", first, last),
        ),
    ]
