"""PPO with three critics, on the task of `make rlhf` (docs/studies/critics.md).

Run: `python -m benchmarks.critics [seeds=0,1,2] [output_dir=runs/critics] [overrides of every PPO run]`

- own, from the reward model: a model of its own that starts as the reward model (InstructGPT, DeepSpeed-Chat).
- own, from the SFT model: a model of its own that starts as the SFT model, with a new head.
- shared: a value head on the policy, whose loss is a term of the policy's (openai/lm-human-preferences, trlX).

Each seed has its own pairs, SFT model and reward model, which its three PPO runs share. The same command continues a
study that was interrupted. Prints a table, and as the last line the numbers of all runs as one JSON object.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from statistics import fmean, stdev

from rich.console import Console
from rich.table import Table

from realign.demo.launch import Demo
from realign.demo.rlhf import NAME, RUNS, TASK, experiments
from realign.demo.sentiment import prepare
from realign.errors import RunComplete
from realign.runtime import Experiment, run

ARMS: Mapping[str, Sequence[str]] = {
    "own, from the reward model": (),
    "own, from the SFT model": ("models.critic.path=${models.actor.path}",),
    "shared": (
        "models.actor.head.value_head.layers=0",
        "interfaces.actor.critic=shared",
        "~models.critic",
        "+models.critic={_target_: shared_model, of: actor}",
    ),
}
FEW = 10
"""Number of first and last PPO steps over which metrics are averaged."""


def study(demo: Demo, console: Console) -> dict[str, dict[str, float]]:
    """Run a seed, or what is left of it, and return the numbers of its arms."""
    if not (demo.output_dir / TASK).is_dir():
        prepare(demo.output_dir / TASK, seed=demo.seed, shuffle=False)
    shared = {name: [*demo.overrides[name], "resume=auto"] for name in RUNS}
    for experiment in experiments(Demo(demo.seed, False, demo.output_dir, {**shared, "": []}))[: len(RUNS)]:
        finish(experiment, console)
    found = {}
    for number, (arm, overrides) in enumerate(ARMS.items()):
        own = [*overrides, *demo.overrides[""], f"output_dir={demo.output_dir / f'ppo_{number}'}", "resume=auto"]
        ppo = experiments(Demo(demo.seed, False, demo.output_dir, {**shared, "": own}))[-1]
        finish(ppo, console)
        found[arm] = numbers(ppo.output_dir / "metrics.jsonl")
    return found


def finish(experiment: Experiment, console: Console) -> None:
    """Run what is left of an experiment."""
    with suppress(RunComplete):
        run(experiment, console=console)


def numbers(metrics: Path) -> dict[str, float]:
    """Return the numbers of a PPO run."""
    records = [json.loads(line) for line in metrics.read_text(encoding="utf-8").splitlines()]

    def series(*names: str) -> list[float]:
        return [record[name] for record in records for name in names if name in record]

    explained = series("explained_variance", "critic/explained_variance")
    gold = series("eval/reward")
    return {
        "gold_before": gold[0],
        "gold_after": gold[-1],
        "learned_reward": fmean(series("reward")[-FEW:]),
        "kl": fmean(series("ref_kl_per_sequence")[-FEW:]),
        "explained_first": fmean(explained[:FEW]),
        "explained_last": fmean(explained[-FEW:]),
    }


def report(found: Mapping[int, Mapping[str, Mapping[str, float]]]) -> Table:
    """Return the means over the seeds, with the standard deviation of one seed."""
    names = {
        "gold_before": "gold score before",
        "gold_after": "gold score after",
        "learned_reward": f"learned reward, last {FEW} steps",
        "kl": f"KL (nats per response), last {FEW}",
        "explained_first": f"explained variance, first {FEW}",
        "explained_last": f"explained variance, last {FEW}",
    }
    table = Table(title=f"PPO with three critics, {len(found)} seeds: mean ± standard deviation")
    for column in ("", *ARMS):
        table.add_column(column, justify="right" if column else "left")
    for key, name in names.items():
        of_arms = [[seed[arm][key] for seed in found.values()] for arm in ARMS]
        table.add_row(name, *(f"{fmean(x):.3f}" + (f" ± {stdev(x):.3f}" if len(x) > 1 else "") for x in of_arms))
    return table


def main(arguments: Sequence[str]) -> int:
    """Run the study from the command line."""
    own = {"seeds": "0,1,2", "output_dir": "runs/critics"}
    own |= {key: value for key, _, value in (word.partition("=") for word in arguments) if key in own}
    rest = [word for word in arguments if word.partition("=")[0] not in own]
    console, found = Console(stderr=True), {}
    for seed in map(int, own["seeds"].split(",")):
        words = [*rest, f"seed={seed}", f"output_dir={Path(own['output_dir']) / f'seed_{seed}'}"]
        found[seed] = study(Demo.parse(words, name=NAME, runs=RUNS), console)
    Console().print(report(found))
    print(json.dumps({str(seed): arms for seed, arms in found.items()}))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
