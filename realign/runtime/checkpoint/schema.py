"""The schema of a checkpoint: every key of the tree, with its type and range.

`check_tree` compares a loaded tree with the schema before any part of it is used. The hashes of a checkpoint detect
damage, but a checkpoint from an untrusted source can contain any value with correct hashes.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from torch import Tensor

from realign.engines.distributed.shards import Saved
from realign.errors import CheckpointError

Check: TypeAlias = Callable[[Any, str], None]
"""Raises `Mismatch` if a value does not fit; the second argument is the path of the value."""

LARGEST = 10**12
"""Upper bound of every count in a checkpoint."""

DEPTH = 50
"""Levels of nested values in a checkpoint."""

RECORDS = ("metrics", "samples", "eval_samples")
"""Record files of a run, without `.jsonl`."""

DETAILS = ("tokens", "spans", "warnings", "system")
"""Record files with details for the report, without `.jsonl`. Checkpoints of earlier versions do not count them."""

SAVED = re.compile(r"step_[0-9]{6,}")
"""Names of the folders of models that a run writes every `every_steps` steps."""


class Mismatch(CheckpointError):
    """A value of a checkpoint that no run writes. The message names its path."""

    def __init__(self, path: str, value: Any, expected: str) -> None:
        """Describe a value at `path` that is not what the schema expects."""
        super().__init__(
            f"{path}={_shown(value)} in the checkpoint: expected {expected}. The checkpoint was changed. Resume from "
            "another one."
        )


def _shown(value: Any) -> str:
    shown = "a tensor" if isinstance(value, Tensor) else " ".join(repr(value).split())
    return shown if len(shown) <= 80 else f"{shown[:80]}..."


def whole(lowest: int = 0, highest: int = LARGEST) -> Check:
    """Expect an integer in a range."""

    def check(value: Any, path: str) -> None:
        if isinstance(value, bool) or not isinstance(value, int) or not lowest <= value <= highest:
            raise Mismatch(path, value, f"an integer from {lowest} to {highest}")

    return check


def number(lowest: float = -math.inf, *, finite: bool = True) -> Check:
    """Expect a number of at least `lowest`. NaN and infinities are valid only without `finite`."""

    def check(value: Any, path: str) -> None:
        fits = isinstance(value, int | float) and not isinstance(value, bool)
        if not fits or (isinstance(value, int) and abs(value) > LARGEST):
            raise Mismatch(path, value, "a number")
        if finite and not (math.isfinite(value) and value >= lowest):
            raise Mismatch(path, value, "a finite number" + (f" of at least {lowest:g}" if lowest > -math.inf else ""))

    return check


def text(pattern: str | None = None, expected: str = "text") -> Check:
    """Expect text that matches a pattern as a whole."""

    def check(value: Any, path: str) -> None:
        if not isinstance(value, str) or (pattern is not None and not re.fullmatch(pattern, value)):
            raise Mismatch(path, value, expected)

    return check


def flag(value: Any, path: str) -> None:
    """Expect true or false."""
    if not isinstance(value, bool):
        raise Mismatch(path, value, "true or false")


def tensor(value: Any, path: str) -> None:
    """Expect a tensor, which may be sharded across ranks."""
    if not isinstance(value, Tensor | Saved):
        raise Mismatch(path, value, "a tensor")


def optional(inner: Check) -> Check:
    """Expect null or a value that fits `inner`."""

    def check(value: Any, path: str) -> None:
        if value is not None:
            inner(value, path)

    return check


def one_of(*choices: Check, expected: str) -> Check:
    """Expect a value that fits one of several checks."""

    def check(value: Any, path: str) -> None:
        for choice in choices:
            try:
                return choice(value, path)
            except Mismatch:
                continue
        raise Mismatch(path, value, expected)

    return check


def items(inner: Check, length: int | None = None) -> Check:
    """Expect a list or tuple of values that fit `inner`. The messages use the path of the list."""

    def check(value: Any, path: str) -> None:
        if not isinstance(value, list | tuple) or (length is not None and len(value) != length):
            raise Mismatch(path, value, "a list" + ("" if length is None else f" of {length} values"))
        for item in value:
            inner(item, path)

    return check


def row(*columns: Check) -> Check:
    """Expect a list or tuple with one value for each check."""

    def check(value: Any, path: str) -> None:
        if not isinstance(value, list | tuple) or len(value) != len(columns):
            raise Mismatch(path, value, f"a list of {len(columns)} values")
        for column, item in zip(columns, value, strict=True):
            column(item, path)

    return check


def mapping(inner: Check, keys: Check | None = None) -> Check:
    """Expect a mapping whose values fit `inner` and whose keys fit `keys` (text)."""
    of_key = keys or text()

    def check(value: Any, path: str) -> None:
        if not isinstance(value, Mapping):
            raise Mismatch(path, value, "a mapping")
        for key, item in value.items():
            of_key(key, f"a key of {path}")
            inner(item, f"{path}.{key}")

    return check


@dataclass(frozen=True)
class Record:
    """Expect a mapping with fixed keys. Calling it checks a value."""

    required: Mapping[str, Check]
    """Check of each key that must exist."""
    optional: Mapping[str, Check]
    """Check of each key that earlier versions, or some kinds of runs, do not write."""
    known_only: bool = True
    """Whether other keys are an error."""

    def __call__(self, value: Any, path: str) -> None:
        """Raise `Mismatch` if a value does not fit."""
        if not isinstance(value, Mapping):
            raise Mismatch(path, value, "a mapping")
        known = {**self.required, **self.optional}
        missing = self.required.keys() - value.keys()
        if missing or (self.known_only and value.keys() - known.keys()):
            wanted = ", ".join(known)
            raise Mismatch(path, sorted(map(str, value)), f"only {wanted}" if not missing else f"the keys {wanted}")
        for key, item in value.items():
            if key in known:
                known[key](item, f"{path}.{key}" if path else str(key))


def record(
    required: Mapping[str, Check] | None = None, /, *, known_only: bool = True, **optional_keys: Check
) -> Record:
    """Expect a mapping with required and optional keys."""
    return Record(required or {}, optional_keys, known_only)


def plain(*, tensors: bool) -> Check:
    """Expect nested plain values: null, flags, numbers, text, lists and mappings, and tensors if `tensors` is true."""

    def check(value: Any, path: str, depth: int = 0) -> None:
        if depth > DEPTH:
            raise CheckpointError(f"{path[:80]}... in the checkpoint: more than {DEPTH} nested levels.")
        if isinstance(value, Mapping):
            if len({type(key) for key in value}) > 1:
                raise Mismatch(path, sorted(map(str, value)), "keys of one type")
            for key, item in value.items():
                check(item, f"{path}.{key}", depth + 1)
        elif isinstance(value, list | tuple):
            for item in value:
                check(item, path, depth + 1)
        elif isinstance(value, Tensor | Saved) and not tensors:
            raise Mismatch(path, value, "plain values")

    return check


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

DATA = record(
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
        "data": DATA,
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
