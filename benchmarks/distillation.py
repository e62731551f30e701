"""Learning curves of distillation on the additions of the demo: docs/images/distillation.png.

    python benchmarks/distillation.py [OVERRIDES]

The teacher has 300,000 parameters and learns correct additions. The student has 75,000 and starts from demonstrations
of which three quarters omit the carry. It then learns from the teacher, without rewards and without correct answers,
in four ways that share prompts, learning rate and batch size. The control is a teacher that is itself trained on the
wrong demonstrations. Existing runs in runs/distillation/NAME are reused.
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

from realign.config import build_experiment, compose
from realign.demo import arithmetic
from realign.runtime import run

OUT = Path("runs/distillation")
EVALUATION = [
    "evaluation.every_steps=10",
    f"evaluation.data={{_target_: realign.data.PromptData, path: {OUT}/right/held_out.jsonl}}",
    "evaluation.batch_prompts=512",
    "evaluation.generation={greedy: true, max_new_tokens: 5}",
    "evaluation.reward={_target_: realign.interfaces.rule_reward.RuleRewardInterface, "
    "function: realign.rewards.arithmetic:exact_answer}",
]
STUDENT = [
    f"models.actor.path={OUT}/start/final/actor",
    "models.actor.optimizer={lr: 3.0e-3, schedule: {kind: constant, warmup: 10}}",
    "steps=120",
    "batch_prompts=128",
    "interfaces.actor.generation={n: 1, max_new_tokens: 5}",
]
PROMPTS = f"data={{_target_: realign.data.PromptData, path: {OUT}/right/prompts.jsonl}}"
GIVEN = (
    "data={_target_: realign.data.PromptsWithResponses, responses: "
    f"{{_target_: realign.data.SupervisedData, path: {OUT}/wrong/demonstrations.jsonl}}}}"
)
COMPONENTS = "realign.interfaces.components.divergence"
RUNS = {
    "GKD, reverse KL": ["experiment=gkd", PROMPTS],
    "GKD, JSD, half of the sequences from the dataset": [
        "experiment=gkd",
        GIVEN,
        "interfaces.actor.on_policy_fraction=0.5",
        f"interfaces.actor.divergence={{_target_: {COMPONENTS}.JSD}}",
    ],
    "policy gradient, sampled reverse KL": ["experiment=on_policy_distillation", PROMPTS],
    "supervised distillation, forward KL": [
        "experiment=gkd",
        GIVEN,
        "interfaces.actor.on_policy_fraction=0",
        f"interfaces.actor.divergence={{_target_: {COMPONENTS}.ForwardKL}}",
    ],
    "control: GKD, teacher of wrong additions": ["experiment=gkd", PROMPTS],
}
COLORS = ("#0072B2", "#009E73", "#D55E00", "#CC79A7", "#8C8C8C")

Points = list[tuple[float, float]]


def make_student(teacher: Path, folder: Path) -> None:
    """Write a randomly initialized model of half the width of `teacher`, with its tokenizer."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(teacher)
    for name in ("hidden_size", "intermediate_size"):
        setattr(config, name, getattr(config, name) // 2)
    config.head_dim = config.hidden_size // config.num_attention_heads
    torch.manual_seed(1)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    for path in teacher.glob("*token*"):
        shutil.copy(path, folder)


def finished(name: str, overrides: list[str]) -> list[dict[str, float]]:
    """Return the metrics of an existing run, or of a new one."""
    folder = OUT / name
    if not (folder / "final").exists():
        run(build_experiment(compose([*overrides, f"output_dir={folder}", "overwrite=true", *EVALUATION])))
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]


def supervised(name: str, model: Path, demonstrations: Path, steps: int) -> list[dict[str, float]]:
    """Train a model on demonstrations."""
    given = [f"models.actor.path={model}", f"data.path={demonstrations}", f"steps={steps}", f"name={name}"]
    return finished(name, ["experiment=sft_arithmetic", *given])


def draw(curves: dict[str, Points], levels: dict[str, float], path: Path) -> None:
    """Draw all curves over the accuracy of the teacher and of the student's start."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.6), layout="constrained")
    ax = figure.subplots()
    for (name, points), color in zip(curves.items(), COLORS, strict=True):
        ax.plot(*zip(*points, strict=True), color=color, marker="o", markersize=3, linewidth=1.6, label=name)
    for name, level in levels.items():
        ax.axhline(level, color="black", linestyle=":", linewidth=1)
        ax.annotate(name, (0, level), xytext=(2, -10), textcoords="offset points", fontsize=8)
    ax.set_title("Held-out accuracy (greedy) of the student on additions", fontsize=11)
    ax.set_xlabel("steps of 128 prompts")
    ax.set_ylim(0, 1.04)
    ax.grid(alpha=0.25)
    ax.legend(fontsize=8, loc="lower center", ncols=2)
    figure.savefig(path, dpi=110)


def main(overrides: list[str]) -> None:
    right = arithmetic.prepare(OUT / "right", seed=0, mistakes=0.0)
    wrong = arithmetic.prepare(OUT / "wrong", seed=0)
    make_student(right.model, OUT / "student")
    teacher = supervised("teacher", right.model, right.demonstrations, 800)
    supervised("wrong_teacher", wrong.model, wrong.demonstrations, 400)
    supervised("start", OUT / "student", wrong.demonstrations, 400)
    curves = {}
    for name, own in RUNS.items():
        source = "wrong_teacher" if name.startswith("control") else "teacher"
        folder = name.lower().replace(",", "").replace(":", "").replace(" ", "_")
        given = [*own, *STUDENT, f"models.teacher.path={OUT}/{source}/final/actor", *overrides]
        curves[name] = [(r["step"], r["eval/reward"]) for r in finished(folder, given) if "eval/reward" in r]
    levels = {"teacher": next(r["eval/reward"] for r in reversed(teacher) if "eval/reward" in r)}
    draw(curves, levels, Path("docs/images/distillation.png"))
    for name, points in {**curves, "teacher": [(0, levels["teacher"])]}.items():
        print(
            f"{name}: " + ", ".join(f"step {step:g}: {value:.3f}" for step, value in points[:: len(points) // 2 or 1])
        )


if __name__ == "__main__":
    main(sys.argv[1:])
