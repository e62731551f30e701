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


def summary(found: Sequence[dict[str, RunResult]]) -> dict[str, object]:
    """Return the mean rewards of both, and the difference in standard errors."""
    means = {
        name: [statistics.mean(results[name].series("reward")) for results in found]
        for name in ("in_process", "over_http")
    }
    last = {name: [results[name].series("eval/reward")[-1] for results in found] for name in means}
    differences = [b - a for a, b in zip(means["in_process"], means["over_http"], strict=True)]
    error = statistics.stdev(differences) / len(differences) ** 0.5 if len(differences) > 1 else float("nan")
    seconds = {name: [statistics.mean(r[name].series("time/agent_gen_s")) for r in found] for name in means}
    return {
        "mean_training_reward": means,
        "held_out_after": last,
        "mean_difference": statistics.mean(differences),
        "standard_error": error,
        "rollout_seconds_per_step": seconds,
    }


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the comparison; the last line of stdout is one JSON object."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--sft-steps", type=int, default=400)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--output-dir", type=Path, default=Path("runs/agent_endpoint"))
    given = parser.parse_args(arguments)
    found = [pair(given.output_dir / f"seed{seed}", seed, given.sft_steps, given.steps) for seed in given.seeds]
    print(json.dumps(summary(found)))


if __name__ == "__main__":
    main()
