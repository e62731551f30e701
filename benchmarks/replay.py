"""Replay random steps of runs and compare all metrics of training: `python -m benchmarks.replay [RUN ...] [steps=20]`.

Without runs, it trains three small ones first: asynchronous rollout, LoRA, and an environment. Their rewards and
observations are random, so that only recorded ones can be replayed.
"""

from __future__ import annotations

import json
import math
import os
import random
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory

from realign.config import build_experiment, compose
from realign.demo.arithmetic import prepare
from realign.runtime import run
from realign.time_machine.replay import last_checkpoint, replay_steps

STEPS = 40
OF_MACHINE = ("time/", "rollout/", "eval", "calibration")
REWARD = "import os\n\n\ndef score(prompt, response, row):\n    return os.urandom(1)[0] / 256\n"
ENVIRONMENT = """
import os


class Mood:
    def reset(self, row, *, seed):
        return row["prompt"] + "?" * (os.urandom(1)[0] % 3), {}

    def step(self, response):
        return "again", os.urandom(1)[0] / 256, response.turn >= 1, False, {}
"""


def trained(folder: Path) -> Iterator[Path]:
    """Train the three small runs, and yield their folders."""
    task = prepare(folder / "task", seed=0, demonstrations=64, held_out=16)
    (folder / "mood.py").write_text(ENVIRONMENT)
    (folder / "reward.py").write_text(REWARD)
    scored = [
        "experiment=grpo_arithmetic",
        "evaluation=null",
        f"interfaces.reward.function={folder / 'reward.py'}:score",
        "interfaces.reward.workers=0",
    ]
    shared = [
        f"models.actor.path={task.model}",
        f"data.path={task.prompts}",
        "interfaces.actor.generation={n: 4, max_new_tokens: 6, temperature: 1.0}",
        *("batch_prompts=8", f"steps={STEPS}", "checkpoint.every_steps=8", "checkpoint.keep=9"),
    ]
    runs = {
        "async": [*scored, "rollout=async", "rollout.max_staleness=2"],
        "lora": [*scored, "models.actor.trains=lora"],
        "agent": [
            "experiment=grpo_environment",
            f"interfaces.agent.environment={folder / 'mood.py'}:Mood",
            "interfaces.agent.max_episode_tokens=24",
        ],
    }
    for name, words in runs.items():
        run(build_experiment(compose([*words, *shared, f"output_dir={folder / name}"])))
        yield folder / name


def compared(folder: Path, steps: int) -> str:
    """Replay random steps of a run, and return a line with the number of metrics that agree bit for bit."""
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    recorded = {line["step"]: line for line in lines if line["step"] > 0}
    chosen = sorted(random.Random(0).sample(sorted(recorded), min(steps, len(recorded))))
    origins = [0 if (point := last_checkpoint(folder, step - 1)) is None else point.step for step in chosen]
    equal, different, started = 0, list[str](), time.perf_counter()
    for origin in sorted({*origins}):
        group = [step for step, o in zip(chosen, origins, strict=True) if o == origin]
        for replayed in replay_steps(build_experiment(compose([str(folder / "config.yaml")])), folder, group):
            for name, then, now in _pairs(recorded[replayed.step], replayed.metrics):
                if then == now:
                    equal += 1
                else:
                    different.append(f"step {replayed.step}: {name} was {then}, is {now}")
    seconds = time.perf_counter() - started
    told = "all equal" if not different else f"{len(different)} differ, first: {different[0]}"
    return f"{folder.name}: {len(chosen)} steps of {len(recorded)}, {equal} metrics, {told} ({seconds:.1f} s)"


def _pairs(recorded: Mapping[str, float | None], now: Mapping[str, float]) -> Iterator[tuple[str, object, object]]:
    for name, value in now.items():
        if name in recorded and not name.startswith(OF_MACHINE) and not name.endswith("_s"):
            yield name, recorded[name], value if math.isfinite(value) else None


def main(words: list[str]) -> int:
    """Print a line for each run; return 1 if a metric differs."""
    steps = next((int(word.partition("=")[2]) for word in words if word.startswith("steps=")), 20)
    folders = [Path(word) for word in words if not word.startswith("steps=")]
    with TemporaryDirectory() as scratch:
        lines = []
        for folder in folders or trained(Path(scratch)):
            before = Path.cwd()
            # the paths of a config are relative to the folder in which its run was started
            started_in = json.loads((folder / "run.json").read_text()).get("folder")
            absolute = folder.absolute()
            os.chdir(started_in if isinstance(started_in, str) and Path(started_in).is_dir() else before)
            lines.append(compared(absolute, steps))
            os.chdir(before)
            print(lines[-1], flush=True)
    return int(any("all equal" not in line for line in lines))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
