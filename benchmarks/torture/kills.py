"""SIGKILL at random times and damaged checkpoints, compared with an undisturbed run.

The run is PPO on additions with all kinds of state: two optimizers, averaged weights, an adaptive KL coefficient, and
running moments of rewards and values. It writes a checkpoint after every step. Each process is the command line with
`resume=auto`. Some kills have a target (startup, a rollout, a write); the others occur at any time in a step. After
some kills, the newest checkpoint is truncated, or has a bit flipped or a file deleted.
"""

from __future__ import annotations

import json
import random
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from benchmarks.report import table
from benchmarks.torture.runs import REWARD, Launch, Run, are_equal, differences, is_exact
from realign.demo.arithmetic import prepare
from realign.records.checkpoint.folder import Checkpoint, list_checkpoints

DAMAGES = ("truncate", "flip", "delete")
AIMS = ("start", "anywhere", "rollout", "write", "anywhere", "rollout", "write", "anywhere")
SETTINGS = (
    "experiment=ppo_arithmetic",
    "batch_prompts=32",
    "sample_prompts=32",
    "evaluation.every_steps=10",
    "evaluation.batch_prompts=64",
    "checkpoint.every_steps=1",
    "interfaces.actor.kl={place: reward, target: 0.1, horizon: 1000}",
    "interfaces.actor.reward.scale=running",
    "interfaces.critic.normalization.scale=exponential",
    "models.actor.optimizer.ema_decay=0.9",
    "interfaces.reward.workers=0",
    "resume=auto",
)


@dataclass
class Times:
    """Durations of the parts of a run on this machine (seconds)."""

    start: float
    rollout: float
    step: float


@dataclass
class Outcome:
    """Results of the kills."""

    killed: list[dict[str, Any]] = field(default_factory=list)
    survived: int = 0
    resumes: int = 0
    exact: int = 0
    damaged: int = 0
    skipped: int = 0


def kill(launch: Launch, aim: str, step: int, times: Times, chance: random.Random) -> None:
    """Kill a process at a time of the kind `aim`; except for "start", not before `step` is recorded.

    Raises:
        RuntimeError: The process had already ended.
    """
    run = launch.run

    def far_enough() -> bool:
        return launch.judged() and run.steps() >= step and len(list_checkpoints(run.checkpoints)) > 1

    def wait(seconds: float, over: Callable[[], bool]) -> None:
        """Wait for a random fraction of the seconds, or until `over`: the machine may be faster than before."""
        moment = time.time() + chance.uniform(0, seconds)
        launch.wait_until(lambda: time.time() >= moment or over(), 0.002)

    if aim == "start":
        wait(times.start, launch.judged)
    elif launch.wait_until(far_enough, 0.005):
        reached = run.steps()
        if aim == "write":
            launch.wait_until(run.writes, 0.0002)
            wait(0.005, lambda: False)
        else:
            wait(times.step if aim == "anywhere" else times.rollout, lambda: run.steps() > reached)
    launch.process.kill()
    if launch.process.wait() >= 0:
        raise RuntimeError(f"the run ended before it was killed. Set more steps, or see the log:\n{launch.said()}")


def damage(checkpoint: Checkpoint, kind: str, chance: random.Random) -> str:
    """Damage a file of a checkpoint; return a description."""
    path = chance.choice(sorted(checkpoint.path.iterdir()))
    data = bytearray(path.read_bytes())
    place = chance.randrange(len(data))
    if kind == "delete":
        path.unlink()
    elif kind == "truncate":
        path.write_bytes(data[:place])
    else:
        data[place] ^= 1 << chance.randrange(8)
        path.write_bytes(data)
    return f"{kind} {path.name}"


def undisturbed(reference: Run, shown: Console) -> Times:
    """Execute the reference run and measure its durations."""
    shown.print("undisturbed run ...")
    with Launch(reference) as launch:
        launch.wait_until(launch.judged, 0.01)
        start = time.time() - launch.started
        launch.finish()
    rows = [json.loads(record) for record in reference.records()]
    rollout = median(row["time/actor_gen_s"] for row in rows if "time/actor_gen_s" in row)
    return Times(start, rollout, median(row["step_s"] for row in rows if "step_s" in row))


def torment(run: Run, reference: Run, steps: int, kills: int, damages: int, times: Times, seed: int) -> Outcome:
    """Kill a run and damage its checkpoints the requested number of times, then let it finish."""
    outcome, chance = Outcome(), random.Random(seed)
    aims = [AIMS[i % len(AIMS)] for i in range(kills)]
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True)) as progress:
        bar = progress.add_task("kills", total=kills)
        good: list[Checkpoint] = []
        spoilt: Checkpoint | None = None
        for number, aim in enumerate([*aims, None]):
            before = good[-1] if good else None
            with Launch(run) as launch:
                if aim is None:
                    launch.finish()
                else:
                    target = max((number + 1) * (steps - 2) // (kills + 1), before.step + 1 if before else 0)
                    kill(launch, aim, target, times, chance)
            good = run.good()
            note(outcome, launch, reference, before, good[-1] if good else None, spoilt)
            if aim is None:
                break
            record = {"aim": aim, "where": launch.where(), "write": run.writes(), "step": run.steps()}
            outcome.killed.append(record)
            due = (number + 1) * damages // kills > outcome.damaged and aims[number + 1 :][:1] != ["start"]
            spoilt = good.pop() if due and len(good) > 1 else None
            if spoilt is not None:
                record["damage"] = damage(spoilt, DAMAGES[outcome.damaged % len(DAMAGES)], chance)
                outcome.damaged += 1
            progress.update(bar, advance=1, description=f"kills (step {run.steps()}, {outcome.damaged} damaged)")
    return outcome


def note(
    outcome: Outcome,
    launch: Launch,
    reference: Run,
    before: Checkpoint | None,
    after: Checkpoint | None,
    spoilt: Checkpoint | None,
) -> None:
    """Record the outcome of a launch: whether it resumed exactly, and whether it reported the damaged checkpoint."""
    outcome.survived += bool(outcome.killed)
    if before is not None and after is not None and after.step > before.step:
        outcome.resumes += 1
        outcome.exact += is_exact(reference, launch.run, after)
    if spoilt is not None:
        text = "".join(launch.log.read_text().split())  # however it was wrapped
        outcome.skipped += f"Checkpointatstep{spoilt.step}cannotberead" in text and f"{spoilt.path.name}/" in text


def report(run: Run, reference: Run, outcome: Outcome) -> dict[str, Any]:
    """Return the results for the JSON line."""
    return {
        "kills": len(outcome.killed),
        "kills_survived": outcome.survived,
        "killed_in": dict(Counter(record["where"] for record in outcome.killed)),
        "killed_during_a_write": sum(record["write"] for record in outcome.killed),
        "resumes": outcome.resumes,
        "resumes_exact": outcome.exact,
        "checkpoints_damaged": outcome.damaged,
        "checkpoints_skipped": outcome.skipped,
        **differences(run, reference),
    }


def is_good(result: Mapping[str, Any]) -> bool:
    """Return whether no data was lost."""
    pairs = [("kills", "kills_survived"), ("resumes", "resumes_exact"), ("checkpoints_damaged", "checkpoints_skipped")]
    return all(result[a] == result[b] for a, b in pairs) and are_equal(result)


def kills_of(folder: Path, words: Mapping[str, str]) -> dict[str, Any]:
    """Execute both runs and compare them."""
    console = Console(stderr=True)
    steps, kills, damages = (int(words[name]) for name in ("steps", "kills", "damages"))
    task = prepare(folder / "task", seed=0, demonstrations=64, held_out=64)
    reward = folder / "reward.py"
    reward.write_text(REWARD)
    settings = [
        *SETTINGS,
        f"steps={steps}",
        f"threads={words['threads']}",
        f"models.actor.path={task.model}",
        f"data.path={task.prompts}",
        f"evaluation.data.path={task.held_out}",
        f"interfaces.reward.function={reward}:score",
    ]

    def run(name: str, keep: int) -> Run:
        own = [f"output_dir={folder / name}", f"checkpoint.keep={keep}"]
        return Run(folder / name, [sys.executable, "-m", "realign", *settings, *own], folder / f"{name}.mark")

    reference, tormented = run("alone", steps), run("tormented", 3)
    times = undisturbed(reference, console)
    outcome = torment(tormented, reference, steps, kills, damages, times, int(words["seed"]))
    head = ("kill", "target", "phase", "writing", "last step", "damage")
    rows = [
        (str(i), r["aim"], r["where"], "yes" if r["write"] else "", str(r["step"]), r.get("damage", ""))
        for i, r in enumerate(outcome.killed, 1)
    ]
    print(table(head, rows))
    return report(tormented, reference, outcome)
