"""Curves of the preset `lm_human_preferences` and of an independent padded implementation (docs/studies/curves.md).

    make curves
    python -m benchmarks.curves parts=match seeds=2 steps=10 folder=runs/curves_small
    python -m benchmarks.curves parts=match rewards=descriptiveness seeds=10 first_seed=11
    python -m benchmarks.curves parts=smollm2 steps=20 batch=16 seeds=1
    python -m benchmarks.curves parts=smollm2 steps=20 batch=128 seeds=1 device=cuda

match        Both implementations on two reward functions: agreement of the curves, and the ten metrics.
adam         TensorFlow's Adam and PyTorch's: the ten metrics of the first update, and curves.
temperature  Log-probs with and without division of the logits by the sampling temperature.
size         The effect of the Adam variant on the first update of models of several widths.
smollm2      Both implementations on SmolLM2-135M and identical samples (see replay.py); model=FOLDER for another model.

Existing records in `folder` are reused. Figures are written to `images`. The last line is one JSON object.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.curves import picture
from benchmarks.curves.comparison import compare, table
from benchmarks.curves.replay import DIFFERENCES, language_model_records
from benchmarks.curves.runs import CURVES, NAMES, TABLE, Record, Run, seeds_of, series
from benchmarks.report import arguments, facts
from benchmarks.report import table as text_table
from realign.demo.smollm2 import smollm2 as pretrained

Seeds = list[list[Record]]

DEFAULTS = {
    "parts": "match,adam,temperature,size",
    "seeds": "5",
    "first_seed": "1",
    "steps": str(Run.steps),
    "rewards": "sentiment,descriptiveness",
    "widths": "32,64,128",
    "folder": "runs/curves",
    "images": "runs/curves",
    "model": "",
    "batch": "64",
    "lr": "1e-5",
    "device": "cpu",
}


@dataclass(frozen=True)
class Study:
    """Settings of all parts."""

    folder: Path
    images: Path
    run: Run
    seeds: range
    rewards: tuple[str, ...]
    """Reward functions of `match`."""
    widths: tuple[int, ...]
    """Model sizes of `size`."""
    given: Mapping[str, str]
    """Words of the command line, for `smollm2`."""

    def records(self, **changes: Any) -> Seeds:
        """Return the records of every seed of a run."""
        run = replace(self.run, **changes)
        print(f"  {run.name}", file=sys.stderr, flush=True)
        return seeds_of(run, self.folder, self.seeds)


def panels(sets: Mapping[str, Seeds], titles: Mapping[str, str] = CURVES) -> dict[str, dict[str, Any]]:
    """Return the panels of some metrics, by default of score, KL and KL coefficient."""
    return {title: {label: series(records, name) for label, records in sets.items()} for name, title in titles.items()}


def agreement(a: Seeds, b: Seeds) -> dict[str, dict[str, float]]:
    """Print and return the agreement of the three curves."""
    comparisons = {name: compare(series(a, name), series(b, name)) for name in CURVES}
    head = ["curve", "steps within 2 SE", "expected", "p", "largest difference / range"]
    cells = [
        [name, f"{x.fraction:.0%}", f"{x.expected:.0%}", f"{x.p:.2f}", f"{x.largest:.1%}"]
        for name, x in comparisons.items()
    ]
    print(text_table(head, cells), "\n", flush=True)
    return {name: asdict(x) for name, x in comparisons.items()}


def metrics(columns: Mapping[str, Seeds], names: Sequence[str] = TABLE) -> list[list[str]]:
    """Print and return a table of metrics with one column per set of runs."""
    rows = table(columns, names)
    print(text_table(["metric", *columns], rows), "\n", flush=True)
    return rows


def match(study: Study) -> dict[str, Any]:
    """Compare both implementations on each reward function."""
    results: dict[str, Any] = {}
    rows = []
    for reward in study.rewards:
        sets = {label: study.records(implementation=name, reward=reward) for name, label in NAMES.items()}
        print(f"{reward}: both implementations, {len(study.seeds)} seeds, {study.run.steps} steps")
        results[reward] = {"agreement": agreement(*sets.values()), "all updates": metrics(sets)}
        rows.append((reward, panels(sets)))
    title = f"Score, KL and KL coefficient: mean and standard deviation over {len(study.seeds)} seeds"
    picture.draw(rows, study.images / "curves_match.png", title=title)
    return results


VARIANTS = ("tensorflow", "pytorch")


def updated_once(study: Study, adam: str, width: int) -> Seeds:
    """Return the first update of the independent implementation: a run of one step has the full learning rate."""
    return study.records(implementation="padded", adam=adam, width=width, steps=1)


def adam(study: Study) -> dict[str, Any]:
    """Compare both variants of Adam: the first update in both implementations, and curves of realign."""
    shown = {variant: study.records(adam=variant) for variant in VARIANTS}
    once = {f"independent, {variant}": updated_once(study, variant, study.run.width) for variant in VARIANTS}
    print("first update, by implementation and variant of Adam")
    firsts = {f"realign, {variant}": [records[:1] for records in seeds] for variant, seeds in shown.items()}
    results: dict[str, Any] = {"first update": metrics({**once, **firsts})}
    print("realign: TensorFlow's Adam against PyTorch's")
    results["curves"] = agreement(*shown.values())
    title = f"realign with both variants of Adam: mean and standard deviation over {len(study.seeds)} seeds"
    others = panels(shown, {name: name for name in ("approxkl", "clipfrac", "entropy")})
    picture.draw([("", panels(shown)), ("", others)], study.images / "curves_adam.png", title=title)
    return results


def temperature(study: Study) -> dict[str, Any]:
    """Compare log-probs with and without temperature in the independent implementation."""
    sets = {
        "logits / temperature": study.records(implementation="padded"),
        "logits unscaled": study.records(implementation="padded", scaled_logprobs=False),
    }
    print("log-probs of the independent implementation with and without temperature")
    results = {"curves": agreement(*sets.values()), "all updates": metrics(sets, ("score", "kl", "sampler_kl", *TABLE))}
    title = f"Temperature in log-probs (independent): mean and standard deviation over {len(study.seeds)} seeds"
    titles = {"score": "score", "kl": "KL of these log-probs (nats)", "sampler_kl": "KL of the sampler (nats)"}
    picture.draw([("", panels(sets, titles))], study.images / "curves_temperature.png", title=title)
    return results


def size(study: Study) -> dict[str, Any]:
    """Compare the first update of both variants of Adam on models of several widths (independent implementation)."""
    by_width: dict[str, Any] = {}
    for width in study.widths:
        print(f"width {width}, first update")
        by_width[str(width)] = metrics({variant: updated_once(study, variant, width) for variant in VARIANTS})
    return by_width


def smollm2(study: Study) -> dict[str, Any]:
    """Compare both implementations on SmolLM2-135M, step by step, on identical samples."""
    words, by_seed = study.given, {}
    for seed in study.seeds:
        run = Run(seed=seed, steps=study.run.steps, batch=int(words["batch"]), lr=float(words["lr"]), horizon=10_000)
        path = study.folder / "records" / f"smollm2_{seed}_{run.steps}_{run.batch}_{run.lr}.jsonl"
        if not path.exists():
            model = Path(words["model"]) if words["model"] else pretrained()
            path.parent.mkdir(parents=True, exist_ok=True)
            unfinished = path.with_suffix(".part")
            with unfinished.open("w", encoding="utf-8") as file:
                for record in language_model_records(run, study.folder / path.stem, model, words["device"]):
                    print(json.dumps({"seed": seed, **record, **facts()}), file=file, flush=True)
            unfinished.rename(path)
        records = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        rows = [
            [str(step), *(f"{records[step - 1][name]:.1e}" for name in DIFFERENCES)]
            for step in sorted({1, 2, 5, 10, run.steps} & set(range(1, run.steps + 1)))
        ]
        print(f"SmolLM2-135M, seed {seed}, {run.batch} responses per step: after a step")
        print(text_table(["step", *DIFFERENCES.values()], rows), "\n", flush=True)
        picture.draw_replay(records, study.images / f"curves_smollm2_{seed}.png")
        by_seed[str(seed)] = {name: max(record[name] for record in records) for name in DIFFERENCES}
        by_seed[str(seed)]["scores_that_differ"] = sum(record["scores_that_differ"] for record in records)
    return by_seed


PARTS: Mapping[str, Callable[[Study], dict[str, Any]]] = {
    "match": match,
    "adam": adam,
    "temperature": temperature,
    "size": size,
    "smollm2": smollm2,
}


def main(given: Sequence[str] | None = None) -> None:
    """Run the requested parts."""
    words = arguments(DEFAULTS, given)
    if wrong := [name for name in words["parts"].split(",") if name not in PARTS]:
        sys.exit(f"unknown part {wrong[0]!r}; valid: {', '.join(PARTS)}")
    study = Study(
        folder=Path(words["folder"]),
        images=Path(words["images"]),
        run=Run(steps=int(words["steps"])),
        seeds=range(first := int(words["first_seed"]), first + int(words["seeds"])),
        rewards=tuple(words["rewards"].split(",")),
        widths=tuple(int(width) for width in words["widths"].split(",")),
        given=words,
    )
    results = {name: PARTS[name](study) for name in words["parts"].split(",")}
    print(json.dumps({"benchmark": "curves", **asdict(study.run), **facts(), **results}))


if __name__ == "__main__":
    main()
