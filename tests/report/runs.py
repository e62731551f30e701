"""Runs whose folders the tests of the report read."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

from realign.interfaces.components import KLPenalty
from realign.interfaces.grpo import GRPOActorInterface
from realign.interfaces.reference import ReferenceInterface
from realign.run_settings import RecordSpec
from realign.runtime import run
from tests.toys import GENERATION, BigramModel, CountToken, experiment

HOSTILE = [
    "</script><script>window.hacked = 1</script>",
    '<img src=x onerror="window.hacked = 1">',
    "{{ 7 * 7 }} {% raw %}",
    "\u202etxet desrever\u202c \u2066isolate\u2069 zero\u200bwidth",
    "a\x00b\x1b[31mred\ud800",
]


HOSTILE_VALUES: dict[str, Any] = {
    "null": None,
    "text": "x",
    "map": {"a": {}},
    "list": [[1], {"name": {}}, None, "x"],
    "true": True,
    "large integer": 10**400,
    "pid beyond the system": 2**80,
    "not finite": float("inf"),
    "lone surrogate": "\ud800",
    "control characters": "[/]\x1b]0;pwn\x07\x1b[31m\u202e|\n```",
    "deep": [[[[[[]]]]]],
}


def put(node: Any, path: tuple[str | int, ...], value: Any) -> Any:
    """Return a JSON value with another value at a path."""
    if not path:
        return value
    node = dict(node) if isinstance(path[0], str) else list(node)
    node[path[0]] = put(node[path[0]], path[1:], value)
    return node


def paths(node: Any, path: tuple[str | int, ...] = ()) -> list[tuple[str | int, ...]]:
    """Return the paths of a JSON value and of the values inside it; of a list only the first item's."""
    items = node.items() if isinstance(node, dict) else enumerate(node[:1]) if isinstance(node, list) else ()
    return [path, *(below for key, value in items for below in paths(value, (*path, key)))]


def hostile_files(run: Path, value: Any) -> dict[str, str]:
    """Return the record files of a run with one value at every place of their last record, by name."""
    files = {}
    for file in sorted(run.glob("*.json*")):
        line = file.read_text() if file.suffix == ".json" else (file.read_text().splitlines() or ["{}"])[-1]
        record = json.loads(line)
        changed = [put(record, path, value) for path in paths(record) if path or file.suffix == ".jsonl"]
        files[file.name] = "".join(json.dumps(one) + "\n" for one in [record, *changed])
    return files


RECORDS = RecordSpec(every_steps=2, token_prompts=2, token_responses=3, system_seconds=0.05)


def make_run(folder: Path, **changes) -> Path:
    """Run GRPO with a KL penalty on bigrams, and return the folder of the run."""
    actor = GRPOActorInterface(generation=GENERATION, kl=KLPenalty("loss", 0.1))
    settings = {
        "interfaces": {"actor": actor, "ref": ReferenceInterface(), "reward": CountToken()},
        "models": {"actor": BigramModel(), "ref": BigramModel()},
        "records": RECORDS,
        "steps": 4,
        "sample_prompts": 2,
        "output_dir": folder,
    }
    return run(experiment(folder.parent, **settings | changes)).output_dir


def write_run(folder: Path, last: float, **config) -> Path:
    folder.mkdir(parents=True)
    records = [{"step": step, "seconds": step, "eval/reward": last * step / 4, "reward": 0.5} for step in (1, 4)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    summary = {"metrics": [{"name": "eval/reward", "best": last, "best_step": 4}]}
    (folder / "summary.json").write_text(json.dumps(summary))
    (folder / "config.yaml").write_text(json.dumps({"output_dir": str(folder), "steps": 4, **config}))
    return folder


def write_sweep(root: Path) -> list[Path]:
    """Write three settings with two seeds each, and return the folders 0 to 5."""
    folders = []
    for i, (std, seed) in enumerate(itertools.product(("group", "batch", "none"), (0, 1))):
        actor = {"adv_norm": {"std": std, "mean": "group"}, "generation": {"max_new_tokens": 16}}
        folders.append(write_run(root / str(i), 0.25 * (i + 1), seed=seed, interfaces={"actor": actor}))
    return folders
