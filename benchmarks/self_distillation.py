"""Self-distillation of SmolLM2-135M-Instruct on sums (docs/algorithms/distillation.md).

    python -m benchmarks.self_distillation                       # all runs, on a CPU
    python -m benchmarks.self_distillation device=cuda jobs=12   # on a GPU, all at the same time
    python -m benchmarks.self_distillation runs=                 # only the table and the picture

The student answers a question. The teacher, an average of its weights, reads the same answer after an example of a
question with a hint and its answer, and after the question with a hint. Questions, held-out questions and scores are
those of `sums` in `benchmarks.real_curves`. The hint is

answer    the right answer,
form      nothing: what is learned from the example alone?
shuffled  the answer to another question.

Runs whose record is in `results` are kept.
"""

from __future__ import annotations

import random
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.real_curves.__main__ import append, read
from benchmarks.real_curves.report import Share, share
from benchmarks.real_curves.tasks import TASKS, prepare
from benchmarks.report import arguments, facts
from realign.demo.smollm2 import smollm2
from realign.demo.tiny import write_rows

Record = dict[str, Any]

HINTS = ("answer", "form", "shuffled")


class Kind(NamedTuple):
    """What the seeds of a run have in common."""

    title: str
    hint: str
    divergence: str = "reverse_kl"


KINDS: Mapping[str, Kind] = {
    "answer": Kind("the answer", "answer"),
    "answer_forward": Kind("the answer, forward KL", "answer", "forward_kl"),
    "form": Kind("control: example only", "form"),
    "shuffled": Kind("control: another question's answer", "shuffled"),
}
DEFAULTS = {
    "runs": ",".join(KINDS),
    "seeds": "3",
    "steps": "40",
    "batch": "16",
    "held_out": "200",
    "device": "cpu",
    "jobs": "1",
    "model": "",
    "folder": "runs/self_distillation",
    "results": "benchmarks/self_distillation.jsonl",
    "picture": "docs/images/self_distillation.png",
}


def write_hints(folder: Path, held_out: int) -> None:
    """Write the questions; for each hint the teacher's prompts to train on, and held-out questions with the hint."""
    prepare("sums", folder, held_out=held_out)
    train, asked = read(folder / "train.jsonl"), read(folder / "held_out.jsonl")
    draw = random.Random(0)
    for rows, name, column in ((train, "train", "teacher_prompt"), (asked, "held_out", "prompt")):
        others = draw.sample(rows, len(rows))
        examples = draw.choices(train, k=len(rows))
        for kind in HINTS:
            hinted = []
            for row, other, example in zip(rows, others, examples, strict=True):
                answer = {"answer": row["answer"], "form": None, "shuffled": other["answer"]}[kind]
                hinted.append({**row, column: conversation(row["prompt"], answer, example)})
            write_rows(folder / f"{name}_{kind}.jsonl", hinted)


def conversation(question: str, answer: str | None, example: Mapping[str, Any]) -> list[dict[str, str]]:
    """Return an answered question with a hint, and another question, with a hint unless `answer` is None."""
    hint = "\nHint: the answer is {}."
    return [
        {"role": "user", "content": example["prompt"] + hint.format(example["answer"])},
        {"role": "assistant", "content": f"The answer is {example['answer']}."},
        {"role": "user", "content": question + (hint.format(answer) if answer is not None else "")},
    ]


def overrides(kind: str, seed: int, model: str, words: Mapping[str, str]) -> list[str]:
    """Return the overrides of a run."""
    folder, task, steps, device = Path(words["folder"]), TASKS["sums"], int(words["steps"]), f"device={words['device']}"
    reward = f"{{_target_: rule_reward, function: '{task.reward_path}', workers: 0}}"
    asked = f"reward: {reward}, batch_prompts: 200, generation: {{n: 2}}"
    return [
        "experiment=self_distillation",
        f"seed={seed}",
        f"steps={steps}",
        f"batch_prompts={words['batch']}",
        f"output_dir={folder / f'{kind}_{seed}'}",
        "overwrite=true",
        "save_every_steps=null",
        "checkpoint=null",
        "threads=1",
        f"interfaces.actor.divergence={KINDS[kind].divergence}",
        f"models.actor.path={model}",
        "models.actor.optimizer={lr: 2.0e-5, schedule: {kind: constant, warmup: 5}}",
        *(f"+models.{role}.{key}" for role in ("actor", "teacher") for key in (device, "dtype=bfloat16")),
        f"interfaces.actor.generation.max_new_tokens={task.max_new_tokens}",
        "ratio_tolerance=1",
        "data.template=chat",
        f"data.path={folder / f'train_{KINDS[kind].hint}.jsonl'}",
        f"evaluation={{{asked}, every_steps: {max(1, steps // 4)}, "
        f"data: {{_target_: prompts, template: chat, path: {folder / 'held_out.jsonl'}}}}}",
        f"evaluations={{hinted: {{{asked}, every_steps: {steps}, "
        f"data: {{_target_: prompts, path: {folder / f'held_out_{KINDS[kind].hint}.jsonl'}}}}}}}",
    ]


def execute(kind: str, seed: int, model: str, words: Mapping[str, str]) -> Record:
    """Train, and return the curves. The models are deleted.

    Raises:
        CalledProcessError: the run failed.
    """
    output = Path(words["folder"]) / f"{kind}_{seed}"
    subprocess.run([sys.executable, "-m", "realign", *overrides(kind, seed, model, words)], check=True)
    shutil.rmtree(output / "final")
    lines = read(output / "metrics.jsonl")
    return {
        "run": f"{kind}_{seed}",
        "kind": kind,
        "seed": seed,
        "device": words["device"],
        "questions": int(words["held_out"]),
        **{
            name: {line["step"]: round(line[metric], 4) for line in lines if metric in line}
            for name, metric in (("held_out", "eval/reward"), ("hinted", "eval/hinted/reward"))
        },
        **{
            name: [float(f"{line[name]:.4g}") for line in lines if name in line]
            for name in ("divergence", "response_tokens", "step_s")
        },
        **facts(),
    }


def by_kind(records: Sequence[Record]) -> dict[str, list[Record]]:
    """Return the records of each kind of run that has some."""
    found = {kind: [record for record in records if record["kind"] == kind] for kind in KINDS}
    return {kind: members for kind, members in found.items() if members}


def shares(members: Sequence[Record], key: str) -> dict[int, Share]:
    """Return the share of right answers at each evaluation, and its standard error."""
    steps = list(members[0][key])
    return {int(step): share([record[key][step] for record in members], members[0]["questions"]) for step in steps}


def table(records: Sequence[Record]) -> str:
    """Return the shares of right answers before and after training in Markdown."""
    lines = ["| hint of the teacher | seeds | student before | student after | hinted before | hinted after |"]
    lines.append("|---|---|---|---|---|---|")
    for kind, members in by_kind(records).items():
        cells = [list(shares(members, key).values()) for key in ("held_out", "hinted")]
        texts = (str(values[at]) for values in cells for at in (0, -1))
        lines.append(f"| {KINDS[kind].title} | {len(members)} | {' | '.join(texts)} |")
    return "\n".join(lines)


def draw(records: Sequence[Record], path: Path) -> None:
    """Draw held-out answers with standard errors over the steps, and the divergence of each run."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    from realign.records.metrics.curves import FURTHER, GRAY, HELD_OUT, SETTINGS, TRAINING

    with mpl.rc_context(SETTINGS):
        figure = Figure(figsize=(8, 3.4), layout="constrained")
        left, right = figure.subplots(1, 2)
        for (kind, members), color in zip(
            by_kind(records).items(), (TRAINING, HELD_OUT, FURTHER[0], GRAY), strict=False
        ):
            points = shares(members, "held_out")
            means, errors = ([getattr(x, name) for x in points.values()] for name in ("mean", "error"))
            style = "--" if KINDS[kind].title.startswith("control") else "-"
            left.errorbar(list(points), means, errors, color=color, linestyle=style, marker="o", capsize=2)
            for i, record in enumerate(members):
                label = f"{KINDS[kind].title} ({len(members)})" if i == 0 else None
                right.plot(record["divergence"], color=color, linestyle=style, linewidth=1, label=label)
        left.set_title("Correct answers to held-out sums")
        left.set_ylim(bottom=0)
        right.set_title("Divergence from the teacher (nats per token)")
        right.set_ylim(bottom=0)
        for ax in (left, right):
            ax.set_xlabel("step")
        figure.legend(*right.get_legend_handles_labels(), loc="outside lower center", ncols=4)
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path)


def main(given: Sequence[str] | None = None) -> int:
    """Execute what is missing; print the table and draw the picture."""
    words = arguments(DEFAULTS, given)
    results = Path(words["results"])
    kinds = [kind for kind in words["runs"].split(",") if kind]
    if wrong := [kind for kind in kinds if kind not in KINDS]:
        sys.exit(f"unknown run {wrong[0]!r}; valid: {', '.join(KINDS)}")
    finished = {record["run"] for record in read(results)}
    planned = [(kind, seed) for seed in range(int(words["seeds"])) for kind in kinds]
    if missing := [(kind, seed) for kind, seed in planned if f"{kind}_{seed}" not in finished]:
        write_hints(Path(words["folder"]), int(words["held_out"]))
        model = words["model"] or str(smollm2())
        with ThreadPoolExecutor(int(words["jobs"])) as pool:
            list(pool.map(lambda run: append(results, execute(*run, model, words)), missing))
    records = read(results)
    print(table(records))
    if records:
        draw(records, Path(words["picture"]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
