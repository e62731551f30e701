"""Values for data files, checkpoints and model folders that no run and no model has."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TypeAlias

from realign.records.checkpoint.folder import MANIFEST, STATE, facts_of, render_manifest

Place: TypeAlias = tuple[Any, ...]

REPLACEMENTS: list[Any] = [
    *(None, True, False, 0, 7, -1, 2**40, 10**30, 1.5, -2.5, 1e308, "", "x", "7", "\x1b[2J\n", "../x", "$tensor"),
    *([], [1], ["x"], [[]], {}, {"a": 1}, {"$float": "nan"}, {"$float": "-inf"}, {"$tuple": [1, "x"]}),
    *({"$dict": [[1, 2], ["a", 3]]}, {"$dict": [[1, 2]]}, {"$text": "eda080"}, {"$tensor": "nowhere"}),
]
"""Values for the state of a checkpoint."""

MODEL_FILES = ("config.json", "generation_config.json", "tokenizer_config.json", "tokenizer.json")
MODEL_VALUES: list[Any] = [None, True, 0, -1, 10**7, 2.5, "", "x", [], ["x"], {}, {"a": 1}, [[[]]], 10**30]
"""Values for the JSON files of a model folder."""

NO_OBJECTS = (b"", b"{", b"[]", b"3", b"\xff\xfe", b"[" * 100_000, b'{"a":' * 100_000)
"""Content of a file that is not a JSON object."""

BAD_ROWS: Mapping[str, bytes] = {
    "NUL bytes": b"\x00" * 100,
    "a NUL byte in a text": b'{"prompt": "1\x002"}',
    "invalid UTF-8": b'{"prompt": "\xff\xfe"}',
    "an unpaired surrogate": b'{"prompt": "\\ud800"}',
    "100,000 brackets": b'{"prompt": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    "100,000 open objects": b'{"prompt":' * 100_000,
    "an integer of 10,000 digits": b'{"prompt": "1+1=", "answer": ' + b"9" * 10_000 + b"}",
    "a 10 MB row without an end": b'{"prompt": "' + b"1" * 10_000_000,
}
"""Lines of a JSONL file that must end in one line of error."""

ODD_VALUES: Mapping[str, Any] = {
    "nul": "\x00\x1b[2J\u202e\u2028",
    "text of 10 MB": "x" * 10_000_000,
    "infinite": float("inf"),
    "nan": float("nan"),
    "long": 10**4000,
    "tiny": 5e-324,
    "": "",
    "__class__": {"__init__": {"$tensor": "0"}, "_target_": "os.system"},
    "nested": json.loads("[" * 300 + "]" * 300),
}
"""Columns that no setting names; a run ignores them."""


def paths(node: Any, path: Place = ()) -> Iterator[Place]:
    """Yield the path of every value; of long lists, only the first two items and the last one."""
    if path:
        yield path
    if isinstance(node, dict):
        for key, value in node.items():
            yield from paths(value, (*path, key))
    elif isinstance(node, list):
        for index in sorted({0, 1, len(node) - 1} & set(range(len(node)))):
            yield from paths(node[index], (*path, index))


def replaced(tree: Any, path: Place, value: Any) -> Any:
    """Return a copy of a tree with another value at a path."""
    tree = copy.deepcopy(tree)
    node = tree
    for key in path[:-1]:
        node = node[key]
    node[path[-1]] = value
    return tree


def sample(state: Any, n: int, seed: int = 0) -> list[tuple[Place, Any]]:
    """Return every path once, then more of them, each with a random replacement of another type or value."""
    chooser = random.Random(seed)
    places = list(paths(state))
    chosen = [*places, *chooser.choices(places, k=max(0, n - len(places)))]
    return [(path, chooser.choice(REPLACEMENTS)) for path in chosen]


def craft(checkpoint: Path, state: str) -> None:
    """Write the state of a checkpoint, with the right hashes."""
    (checkpoint / STATE).write_text(state)
    manifest = json.loads((checkpoint / MANIFEST).read_bytes())
    del manifest["sha256"]
    manifest["files"][STATE] = facts_of(checkpoint / STATE)
    (checkpoint / MANIFEST).write_bytes(render_manifest(manifest))
