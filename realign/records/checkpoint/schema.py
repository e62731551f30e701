"""The schema of a checkpoint: the keys of the tree and the types of their values.

`check_tree` compares a loaded tree with the schema before any part of it is used. The states of models, interfaces,
callbacks and the data are checked by the classes that load them; `refuse_misfit` makes one line of what they raise.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Annotated, Any, Literal, Protocol, TypeAlias, get_args

from pydantic import BaseModel, ConfigDict, Field, InstanceOf, ValidationError
from torch import Tensor

from realign.errors import CheckpointError
from realign.text import shorten

_RecordName: TypeAlias = Literal["metrics", "samples", "eval_samples", "tokens", "spans", "warnings", "system"]
RECORDS: tuple[_RecordName, ...] = get_args(_RecordName)
"""Record files of a run, without `.jsonl`."""

Count: TypeAlias = Annotated[int, Field(ge=0)]
Text: TypeAlias = InstanceOf[str]
"""Any text; pydantic's own type rejects lone surrogates, which file names can contain."""
State: TypeAlias = dict[Any, Any]
"""State of a class, which may be a user's."""

MISFIT = (ValueError, TypeError, LookupError, AttributeError, ArithmeticError, RuntimeError)
"""Errors of a class whose state in a checkpoint is that of something else."""


class _Record(BaseModel):
    """A mapping with exactly these keys. No value is converted."""

    # built on first use: most launches resume nothing
    model_config = ConfigDict(extra="forbid", strict=True, defer_build=True)


class _Model(_Record):
    version: Count
    engine: State | None
    weights: State = {}
    """Of a role that is synced from a trained one."""


class _Frozen(_Record):
    path: Text | None
    sha256: str
    of_files: bool = False
    """Whether the hash is that of the files with the weights."""


class _Data(_Record):
    drawn: Count
    batch_prompts: Count
    rows: Count
    epoch: Count
    index: Count
    seed: int
    sha256: str | None
    order: State | None = None
    curriculum: State | None = None


class _Rollout(_Record):
    version: Count
    trained: Count
    next_place: Count
    untrained: list[Count]


class _Counters(_Record):
    optimizer_steps: float
    rewards_seen: Count
    reward_ema: float | None
    best_reward: float | None
    ratio_checked: list[Text]


class _Records(_Record):
    seconds: float
    sizes: dict[_RecordName, Count]
    sha256: dict[_RecordName, str]


class _File(_Record):
    bytes: Count
    sha256: str


class _Saves(_Record):
    made: list[Text]
    known: list[Text]
    best: Text | None
    record: float
    best_step: Count | None
    final: dict[Text, _File] = {}
    """Files in `final`, in the last checkpoint of a run."""


class _Stop(_Record):
    key: Text
    reason: Text
    settings: Text


class _Callbacks(_Record):
    states: dict[Text, State]
    metrics: dict[Text, Text]
    stop: _Stop | None


class _Tree(_Record):
    """The tree of a checkpoint of a run."""

    config: dict[Text, Any]
    counters: _Counters
    data: _Data
    environment: dict[Text, Any]
    frozen: dict[Text, _Frozen]
    interfaces: dict[Text, State]
    models: dict[Text, _Model]
    random: State
    records: _Records
    saves: _Saves
    callbacks: _Callbacks
    realign: Text
    rollout: _Rollout | None


def check_tree(path: str, tree: Mapping[str, Any]) -> None:
    """Check that a tree has the keys and types that a run writes.

    Args:
        path: Path of the checkpoint, for the message.
        tree: Content of the checkpoint.

    Raises:
        CheckpointError: A key or value does not fit the schema. The message names both.
    """
    if missing := _Tree.model_fields.keys() - tree.keys():
        lacking = ", ".join(sorted(missing))
        raise CheckpointError(f"{path} is not a checkpoint of a run: it lacks {lacking}. Use another one.")
    try:
        _Tree.model_validate(tree)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False)[0]
        key = shorten(".".join(map(str, first["loc"])), 300)
        value = "a tensor" if isinstance(first["input"], Tensor) else " ".join(repr(first["input"]).split())
        shown = "" if first["type"] == "missing" else f"={shorten(value, 80)}"
        raise CheckpointError(
            f"{key}{shown} in the checkpoint: {first['msg']}. The checkpoint was changed. Resume from another one."
        ) from None


@contextmanager
def refuse_misfit(where: str, skip: str) -> Iterator[None]:
    """Make one line of an error of a class that loads its state from a checkpoint.

    Args:
        where: Key of the state.
        skip: Part of `resume_skip` to resume without it.

    Raises:
        CheckpointError: The class does not accept the state.
    """
    try:
        yield
    except MISFIT as error:
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:300]
        raise CheckpointError(
            f"{where}: the state in the checkpoint does not fit ({reason}). Set resume_skip=[{skip}] to resume without "
            "it."
        ) from error


class _Stateful(Protocol):
    def load_state_dict(self, state: Any) -> Any: ...


def load_state(where: str, component: _Stateful, state: Any, *, skip: str) -> None:
    """Restore the state of an interface or a callback, which may be of a user's class.

    Args:
        where: Config key of the component.
        component: The component.
        state: Its state in the checkpoint.
        skip: Part of `resume_skip` to resume without it.

    Raises:
        CheckpointError: A class of realign does not accept the state. An error of a user's class keeps its traceback.
    """
    if type(component).load_state_dict.__module__.startswith("realign."):
        with refuse_misfit(where, skip):
            component.load_state_dict(state)
        return
    try:
        component.load_state_dict(state)
    except Exception as error:
        error.add_note(
            f"{where}: the state in the checkpoint was not restored. Set resume_skip=[{skip}] to resume without it."
        )
        raise
