"""Runs with each way to name a teacher or reference whose distribution over the whole vocabulary a loss compares."""

from __future__ import annotations

import json
from pathlib import Path

from realign.config import build_experiment, compose
from realign.runtime.local import LocalRuntime
from tests.tiny import save_tiny

_DISTILL = ("experiment=self_distillation",)
_SHARED = (*_DISTILL, "~models.teacher", "sync.teacher=null")
_KL = ("experiment=grpo", "interfaces.actor.kl={estimator: null, full_vocabulary: true, coef: 0.1}")
TEACHERS: dict[str, tuple[str, ...]] = {
    "separate": (*_DISTILL, "sync.teacher=null"),
    "average": (*_DISTILL, "sync.teacher.weight=0.3"),
    "copied": (*_DISTILL, "sync.teacher.weight=1"),
    "shared": (*_SHARED, "+models.teacher={_target_: shared_model, of: actor}"),
    "base of adapters": (
        *_SHARED,
        "models.actor.trains=lora",
        "+models.teacher={_target_: shared_model, of: actor, branch: reference}",
    ),
    "reference": _KL,
    "averaged reference": (*_KL, "+sync={ref: {of: actor, weight: 0.3}}"),
    "reference of adapters": (*_KL, "models.actor.trains=lora"),
}


def prepare(folder: Path) -> None:
    """Write a model, rows with prompts for a student and a teacher, and a reward function."""
    save_tiny(folder / "model", num_hidden_layers=1)
    rows = [{"prompt": f"{a}+{b}=", "teacher_prompt": f"{a + b}! {a}+{b}="} for a in range(4) for b in range(4)]
    (folder / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (folder / "score.py").write_text("def score(prompt, response, row):\n    return float(len(set(response)))\n")


def divergences(folder: Path) -> dict[str, list[float]]:
    """Return the divergence from each kind of teacher or reference in two steps of a run."""
    results = {}
    for kind, words in TEACHERS.items():
        words = (
            *words,
            f"models.actor.path={folder / 'model'}",
            f"data.path={folder / 'rows.jsonl'}",
            "batch_prompts=8",
        )
        words += ("models.actor.optimizer={lr: 0.01, schedule: {kind: constant}}", "models.actor.device=cpu")
        words += ("interfaces.actor.generation.max_new_tokens=6", "interfaces.actor.n_minibatches=4")
        if words[0] == "experiment=grpo":
            words += (f"interfaces.reward.function={folder / 'score.py'}:score", "interfaces.actor.generation.n=2")
        runtime = LocalRuntime(build_experiment(compose([*words, "steps=2", f"output_dir={folder / 'run'}"])))
        try:
            steps = [runtime.step(step)[0] for step in (1, 2)]
        finally:
            runtime.close()
        results[kind] = [step.get("divergence", step.get("ref_kl", 0.0)) for step in steps]
    return results
