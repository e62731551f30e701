"""The schema of a checkpoint: every key of the tree, with its type and range.

`check_tree` compares a loaded tree with the schema before any part of it is used. The hashes of a checkpoint detect
damage, but a checkpoint from an untrusted source can contain any value with correct hashes.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from realign.errors import CheckpointError
from realign.runtime.checkpoint.checks import (
    Mismatch,
    Record,
    flag,
    items,
    mapping,
    number,
    one_of,
    optional,
    plain,
    record,
    row,
    tensor,
    text,
    whole,
)

RECORDS = ("metrics", "samples", "eval_samples")
"""Record files of a run, without `.jsonl`."""

DETAILS = ("tokens", "spans", "warnings", "system")
"""Record files with details for the report, without `.jsonl`. Checkpoints of earlier versions do not count them."""

SAVED = re.compile(r"step_[0-9]{6,}")
"""Names of the folders of models that a run writes every `every_steps` steps."""


COUNT = whole()
TENSORS = mapping(tensor)
HASH = text("[0-9a-f]{64}", "a sha256")
PATH = text(r"(?!/)(?!.*(^|/)\.\.?(/|$))[^\0]+", "the path of a file inside the folder")
FILES = mapping(record({"bytes": COUNT, "sha256": HASH}), PATH)
WORD = whole(0, 2**32 - 1)

_LEAF = optional(one_of(tensor, number(), expected="a tensor or a number"))
MOMENT = one_of(_LEAF, mapping(_LEAF), expected="a tensor, a number, or a mapping of those")
"""Part of an optimizer's state for one weight; bitsandbytes nests the tensors of 8-bit states."""

OPTIMIZER = record(
    {
        "optimizer": record(
            {
                "state": mapping(mapping(MOMENT), COUNT),
                "param_groups": items(record({"params": items(COUNT)}, known_only=False)),
            }
        ),
        "optimizer_steps": COUNT,
        "train_steps": COUNT,
        "nonfinite_in_a_row": COUNT,
    },
    known_only=False,
)

DECODE = text("modules|fused|compiled", "what computed the decode steps")

ENGINES = {
    "module": TENSORS,
    "value_head": optional(TENSORS),
    "optimizer": optional(OPTIMIZER),
    "ema": optional(record({"average": items(tensor)})),
    "fused": flag,
}
"""Keys of the state of `TransformersEngine`. Other engines may have other keys, which contain any plain values."""


def _state(value: Any, path: str) -> None:
    if not isinstance(value, Mapping):
        raise Mismatch(path, value, "a mapping")
    plain(tensors=True)(value, path)


def _engine(value: Any, path: str) -> None:
    _state(value, path)
    if ENGINES.keys() <= value.keys():
        record(ENGINES, known_only=False, decode=optional(DECODE))(value, path)


RANDOM = record(
    {
        "python": row(whole(3, 3), items(WORD, 625), optional(number())),
        "numpy": record(
            {
                "bit_generator": text("MT19937", "MT19937"),
                "key": items(WORD, 624),
                "pos": whole(0, 624),
                "has_gauss": whole(0, 1),
                "gauss": number(),
            }
        ),
        "torch": tensor,
        "cuda": items(tensor),
    }
)


def _position(value: Any, path: str, depth: int = 0) -> None:
    """Expect a position in a file: null, an offset, text, or a list of up to three positions."""
    if isinstance(value, list | tuple) and len(value) <= 3 and depth < 4:
        for part in value:
            _position(part, path, depth + 1)
    else:
        optional(one_of(whole(0, 2**62), text(), expected="a position in a file"))(value, path)


_STREAM = record(
    {
        **dict.fromkeys(("epoch", "block", "file", "index", "kept", "read", "truncated"), COUNT),
        "per_epoch": optional(COUNT),
        "start": _position,
        "dropped": mapping(COUNT),
    }
)
_ANCHOR = record({"place": COUNT, "sources": items(_STREAM)})


def _anchors(value: Any, path: str) -> None:
    items(_ANCHOR)(value, path)
    places = [anchor["place"] for anchor in value]
    if places != sorted(places) or places[:1] != [0]:
        raise Mismatch(path, places, "positions in order, of which the first one is the start")


ORDER = record({"anchors": _anchors})
"""Positions in streamed data."""

_DATA = record(
    {
        "drawn": COUNT,
        "batch_prompts": whole(1, 10**6),
        "epoch": COUNT,
        "index": COUNT,
        "seed": whole(-(2**63), 2**64),
        "rows": COUNT,
        "sha256": optional(text()),
    },
    order=ORDER,
)


def _data(value: Any, path: str) -> None:
    """Expect a position in the data. A wrong one would train on other prompts, or read streamed data without end."""
    _DATA(value, path)
    place, rows = value["drawn"] * value["batch_prompts"], value["rows"]
    epoch, index = divmod(place, rows) if rows else (0, place)
    if (value["epoch"], value["index"]) != (epoch, index):
        expected = f"the batches before epoch {value['epoch']}, index {value['index']} of {rows or 'streamed'} rows"
        raise Mismatch(f"{path}.drawn", value["drawn"], expected)


_ROLLOUT = record({"version": COUNT, "trained": COUNT, "next_place": COUNT, "untrained": items(COUNT)})


def _rollout(value: Any, path: str) -> None:
    _ROLLOUT(value, path)
    places = value["untrained"]
    if len(set(places)) < len(places) or any(place >= value["next_place"] for place in places):
        raise Mismatch(f"{path}.untrained", places, f"distinct places below next_place={value['next_place']}")


COUNTERS = record(
    {
        "optimizer_steps": number(0),
        "rewards_seen": COUNT,
        "reward_ema": optional(number(finite=False)),
        "ratio_checked": items(text()),
    }
)

SAVES = record(
    {
        "made": items(text(SAVED.pattern, "a list of folder names such as step_000050")),
        "known": items(text()),
        "best": optional(text()),
        "record": number(finite=False),
        "best_step": optional(COUNT),
    },
    final=FILES,
)

CALLBACKS = record(
    {
        "states": mapping(_state),
        "metrics": mapping(text()),
        "stop": optional(record({"callback": text(), "reason": text(), "settings": text()})),
    }
)

TREE = record(
    {
        "config": plain(tensors=False),
        "counters": COUNTERS,
        "data": _data,
        "environment": mapping(one_of(text(), number(), expected="text or a number")),
        "frozen": mapping(record({"path": optional(text()), "sha256": text()})),
        "interfaces": mapping(_state),
        "models": mapping(record({"version": COUNT, "engine": optional(_engine)}, weights=TENSORS)),
        "random": RANDOM,
        "records": record(
            {
                "seconds": number(0),
                "sizes": Record(dict.fromkeys(RECORDS, COUNT), dict.fromkeys(DETAILS, COUNT)),
            },
            sha256=Record(dict.fromkeys(RECORDS, HASH), dict.fromkeys(DETAILS, HASH)),
        ),
        "saves": SAVES,
    },
    callbacks=CALLBACKS,
    realign=text(),
    rollout=optional(_rollout),
)
"""The tree of a checkpoint of a run."""


def check_config_tree(tree: Mapping[str, Any]) -> None:
    """Check that the config in a tree, if any, contains only plain values.

    Raises:
        CheckpointError: It contains something else.
    """
    plain(tensors=False)(tree.get("config"), "config")


def check_tree(path: str, step: int, tree: Mapping[str, Any]) -> None:
    """Check that a tree has the keys, types and ranges that a run writes.

    Args:
        path: Path of the checkpoint, for the message.
        step: Step of the checkpoint.
        tree: Content of the checkpoint.

    Raises:
        CheckpointError: A value does not fit the schema. The message names its path and the value.
    """
    if missing := TREE.required.keys() - tree.keys():
        lacking = ", ".join(sorted(missing))
        raise CheckpointError(f"{path} is not a checkpoint of a run: it lacks {lacking}. Use another one.")
    TREE(tree, "")
    rollout = tree.get("rollout")
    if rollout is not None:
        whole(0, step)(rollout["version"], "rollout.version")
