"""Train the demo's task by GRPO, GDPO, DPPO and MaxRL, and by controls with shuffled rewards: `algorithms.png`.

python docs/images/algorithms.py [FOLDER]     # about 30 minutes of processor time; repeats only what is missing
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

HERE = Path(__file__).parent
SEEDS, STEPS = (1, 2, 3), 120
BRIEF = 'def brief(prompt, response, row):\n    return float(len(response) <= len(str(row["answer"])))\n'
REWARDS = "{right: realign.rewards.arithmetic:exact_answer, brief: brief.py:brief}"
RUNS: Mapping[str, Sequence[str]] = {
    "grpo": (),
    "maxrl": ("algorithm=maxrl",),
    "dppo": ("algorithm=dppo", "interfaces.actor.n_minibatches=4"),
    "gdpo": (
        "algorithm=gdpo",
        "interfaces.reward.function=null",
        f"interfaces.reward.functions={REWARDS}",
        "interfaces.actor.advantage.weights={right: 1, brief: 0.5}",
    ),
}
SHUFFLED = "interfaces.reward.shuffle=true"
STYLES = {
    "grpo": ("GRPO", "tab:gray"),
    "maxrl": ("MaxRL", "tab:blue"),
    "dppo": ("DPPO", "tab:orange"),
    "gdpo": ("GDPO", "tab:green"),
}


def train(folder: Path) -> dict[str, list[dict[int, float]]]:
    """Run what `folder` lacks, and return the held-out accuracies by step, of each run of each algorithm."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "brief.py").write_text(BRIEF, encoding="utf-8")

    def call(*words: str) -> None:
        subprocess.run([sys.executable, "-m", *words], cwd=folder, check=True, stdout=subprocess.DEVNULL)

    if not (folder / "runs" / "sft_arithmetic" / "final").exists():
        call("realign.demo.arithmetic")
        call("realign", "experiment=sft_arithmetic", "overwrite=true")

    def run(name: str, *words: str) -> dict[int, float]:
        if not (folder / "runs" / name / "final").exists():
            call("realign", "experiment=grpo_arithmetic", f"output_dir=runs/{name}", "overwrite=true", *words)
        lines = (folder / "runs" / name / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
        steps = map(json.loads, lines)
        return {step["step"]: step["eval/reward"] for step in steps if "eval/reward" in step}

    curves = {name: [run(f"{name}-{seed}", f"seed={seed}", *words) for seed in SEEDS] for name, words in RUNS.items()}
    controls = [name for name in RUNS if name != "grpo"]
    return curves | {
        f"{name}-shuffled": [run(f"{name}-shuffled-1", "seed=1", SHUFFLED, *RUNS[name])] for name in controls
    }


def main(arguments: Sequence[str]) -> None:
    """Draw a line for each run, and print the mean and the standard error of the last step."""
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(6.4, 4), layout="constrained")
    for name, runs in train(Path(arguments[0] if arguments else "runs/algorithms")).items():
        algorithm, _, control = name.partition("-")
        label, color = STYLES[algorithm]
        for i, run in enumerate(runs):
            title = f"{label}, shuffled rewards" if control else label
            style = {"color": color, "linestyle": "--" if control else "-", "label": None if i else title}
            axes.plot(list(run), list(run.values()), **style)
        last = [run[STEPS] for run in runs]
        error = statistics.stdev(last) / len(last) ** 0.5 if len(last) > 1 else float("nan")
        sys.stdout.write(f"{name}: {100 * statistics.mean(last):.1f}% ± {100 * error:.1f}%\n")
    axes.set(xlabel="step", ylabel="held-out sums that are right", ylim=(0, 1))
    axes.grid(alpha=0.3)
    axes.legend(loc="center", bbox_to_anchor=(0.6, 0.59))
    figure.savefig(HERE / "algorithms.png", dpi=150)


if __name__ == "__main__":
    main(sys.argv[1:])
