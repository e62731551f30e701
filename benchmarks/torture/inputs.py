"""Attacks by files of others: rows of data, checkpoints and model folders."""

from __future__ import annotations

import json
import os
import random
import shutil
from collections.abc import Sequence
from pathlib import Path

from benchmarks.torture.attacks import Act, Attack, Scene, Series, keep_copy, restore_copy
from benchmarks.torture.crafted import (
    BAD_ROWS,
    MODEL_FILES,
    MODEL_VALUES,
    NO_OBJECTS,
    ODD_VALUES,
    craft,
    replaced,
    sample,
)
from realign.records.checkpoint.folder import STATE, list_checkpoints

LEFT = 3
"""Step of the checkpoint that is crafted."""


def with_row(line: bytes) -> Act:
    """Return the act that adds a line to the training data of the attacked process."""

    def act(scene: Scene) -> None:
        crafted = scene.folder / "rows.jsonl"
        crafted.write_bytes(scene.task.prompts.read_bytes() + line + b"\n")
        scene.more = [f"data.path={crafted}"]

    return act


def long_prompt(scene: Scene) -> None:
    """Add a prompt of 10 MB, which exceeds the length limit."""
    with_row(json.dumps({"prompt": "1" * 10_000_000, "answer": "1"}).encode())(scene)
    scene.more.append("data.max_prompt_tokens=32")


def odd_columns(scene: Scene) -> None:
    """Add `ODD_VALUES` to the first rows."""
    crafted, lines = scene.folder / "rows.jsonl", scene.task.prompts.read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    for number, (name, value) in enumerate(ODD_VALUES.items()):
        rows[number][name] = value
    crafted.write_text("".join(json.dumps(row) + "\n" for row in rows))
    scene.more = [f"data.path={crafted}"]


def pipe_of_rows(scene: Scene) -> None:
    """Put a pipe in place of the data."""
    path = scene.folder / "pipe.jsonl"
    os.mkfifo(path)
    scene.more = [f"data.path={path}"]


def rows() -> Sequence[Series]:
    """Return the attacks by rows of data."""
    bad = [Attack(f"data: {name}", (2,), "rows.jsonl, line", with_row(line)) for name, line in BAD_ROWS.items()]
    pipe = Attack("data: a pipe", (2,), "neither a file nor a folder", pipe_of_rows)
    return [
        Series("rows", [*bad, pipe]),
        Series("long prompt", [Attack("data: a prompt of 10 MB", before=long_prompt, says="1 dropped")]),
        Series("odd columns", [Attack("data: 10 MB, nested, infinite, NUL in other columns", before=odd_columns)]),
    ]


def _stopped_at(scene: Scene) -> None:
    """Copy the undisturbed run into the run folder, as it was after the step `LEFT`."""
    shutil.copytree(scene.reference.folder, scene.run.folder)
    for checkpoint in list_checkpoints(scene.run.checkpoints):
        if checkpoint.step > LEFT:
            shutil.rmtree(checkpoint.path)
    shutil.rmtree(scene.run.folder / "final")
    keep_copy(scene)


def _checkpoint(scene: Scene) -> Path:
    return scene.run.checkpoints / f"step_{LEFT:06d}"


def with_state(seed: int) -> Act:
    """Return the act that replaces a random value in the checkpoint."""

    def act(scene: Scene) -> None:
        state = json.loads((_checkpoint(scene) / STATE).read_text())
        chooser = random.Random(seed)
        group = chooser.choice(sorted(set(state["tree"]) - {"config"}))  # most values are in the config
        places = [case for case in sample(state, 0, seed) if case[0][:2] == ("tree", group)]
        place, value = chooser.choice(places)
        craft(_checkpoint(scene), json.dumps(replaced(state, place, value)))

    return act


def nested_state(scene: Scene) -> None:
    """Nest a value of the checkpoint 5,000 levels deep."""
    text = json.dumps(replaced(json.loads((_checkpoint(scene) / STATE).read_text()), ("tree", "counters"), "HERE"))
    craft(_checkpoint(scene), text.replace('"HERE"', "[" * 5000 + "]" * 5000))


def other_folder(scene: Scene) -> None:
    """Let the checkpoint name a folder outside the run as one of its saved models."""
    state = json.loads((_checkpoint(scene) / STATE).read_text())
    craft(_checkpoint(scene), json.dumps(replaced(state, ("tree", "saves", "made"), ["../../task"])))


def pipe_of_state(scene: Scene) -> None:
    """Put a pipe in place of a file of the checkpoint."""
    path = _checkpoint(scene) / STATE
    path.unlink()
    os.mkfifo(path)


def checkpoints(seed: int, number: int) -> Sequence[Series]:
    """Return the attacks by checkpoints whose hashes are right."""
    acts = {f"checkpoint: random value, seed {seed + i}": with_state(seed + i) for i in range(number)}
    acts |= {"checkpoint: 5,000 levels": nested_state, "checkpoint: folder outside the run": other_folder}
    crafted = [Attack(name, (0, 2), before=act, after=restore_copy) for name, act in acts.items()]
    pipe = Attack("checkpoint: a pipe", (0, 2), before=pipe_of_state, after=restore_copy)
    return [Series("checkpoints", [*crafted, pipe], before=_stopped_at)]


def with_model(file: str, content: Act | bytes) -> Act:
    """Return the act that changes a file in a copy of the model folder, which the attacked process loads."""

    def act(scene: Scene) -> None:
        model = scene.folder / "model"
        shutil.rmtree(model, ignore_errors=True)
        shutil.copytree(scene.task.model, model)
        scene.more = [f"models.actor.path={model}"]
        if isinstance(content, bytes):
            (model / file).write_bytes(content)
        else:
            (model / file).unlink(missing_ok=True)
            content(scene)

    return act


def random_value(seed: int) -> Act:
    """Return the act that replaces a random value in a JSON file of a model."""
    chooser = random.Random(seed)

    def act(scene: Scene) -> None:
        file = chooser.choice(MODEL_FILES)
        content = json.loads((scene.task.model / file).read_text()) if (scene.task.model / file).is_file() else {}
        key = chooser.choice(sorted(content) or ["eos_token_id"])
        with_model(file, json.dumps(content | {key: chooser.choice(MODEL_VALUES)}).encode())(scene)

    return act


def clear_run(scene: Scene) -> None:
    """Remove the run that an attacked process made with another model."""
    shutil.rmtree(scene.run.folder, ignore_errors=True)


def models(seed: int, number: int) -> Sequence[Series]:
    """Return the attacks by model folders."""
    acts = {f"model: random value, seed {seed + i}": random_value(seed + i) for i in range(number)}
    for i, content in enumerate(random.Random(seed).sample(NO_OBJECTS, min(number, 3))):
        name = MODEL_FILES[i % len(MODEL_FILES)]
        acts[f"model: {name} is {content[:8]!r}"] = with_model(name, content)
    acts["model: a pipe"] = with_model("config.json", lambda scene: os.mkfifo(scene.folder / "model" / "config.json"))
    return [Series("models", [Attack(name, (0, 2), before=act, after=clear_run) for name, act in acts.items()])]
