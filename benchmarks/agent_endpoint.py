"""Compare an agent over HTTP with the environment class of the same task, over several seeds.

Trains `examples/openai_agent.py` and the in-process environment of `examples/calculator_agent.py` from the same
demonstrations and seeds, and compares the fraction of right answers on held-out questions.

    python benchmarks/agent_endpoint.py [--seeds 0 1 2] [--steps 60] [--output-dir runs/agent_endpoint]
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples"))

from calculator_agent import experiments, prepare
from openai_agent import with_agent, write_templates

from realign.runtime import RunResult, run


def pair(folder: Path, seed: int, sft_steps: int, steps: int) -> dict[str, RunResult]:
    """Train with the environment class and with the agent, from the same start."""
    prepare(folder / "task", seed)
    start, learn = experiments(folder, seed, sft_steps, steps)
    run(start)
    in_process = run(learn)
    write_templates(folder / "sft" / "final" / "actor")
    return {"in_process": in_process, "over_http": run(with_agent(learn, folder))}


def result_of(found: dict[str, RunResult]) -> dict[str, dict[str, float]]:
    """Return mean training reward, held-out reward after training, and rollout seconds per step of both runs."""
    return {
        name: {
            "mean_training_reward": statistics.mean(run.series("reward")),
            "held_out_before": run.series("eval/reward")[0],
            "held_out_after": run.series("eval/reward")[-1],
            "rollout_seconds_per_step": statistics.mean(run.series("time/agent_gen_s")),
        }
        for name, run in found.items()
    }


def summary(found: Sequence[dict[str, dict[str, float]]]) -> dict[str, object]:
    """Return the results of all seeds, and the mean differences (HTTP minus in process) with their standard errors."""
    out: dict[str, object] = {"seeds": list(found)}
    for metric in ("mean_training_reward", "held_out_after"):
        differences = [one["over_http"][metric] - one["in_process"][metric] for one in found]
        several = len(differences) > 1
        out[f"{metric}_difference"] = statistics.mean(differences)
        out[f"{metric}_standard_error"] = statistics.stdev(differences) / len(differences) ** 0.5 if several else None
    return out


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the comparison. Prints one line per seed; the last line of stdout is one JSON object."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--sft-steps", type=int, default=400)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--output-dir", type=Path, default=Path("runs/agent_endpoint"))
    given = parser.parse_args(arguments)
    found = []
    for seed in given.seeds:
        found.append(result_of(pair(given.output_dir / f"seed{seed}", seed, given.sft_steps, given.steps)))
        print(f"seed {seed}: {json.dumps(found[-1])}", flush=True)
    print(json.dumps(summary(found)))


if __name__ == "__main__":
    main()
