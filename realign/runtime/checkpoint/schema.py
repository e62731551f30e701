"""The schema of a checkpoint: every key of the tree, with its type and range.

`check_tree` compares a loaded tree with the schema before any part of it is used. The hashes of a checkpoint detect
damage, but a checkpoint from an untrusted source can contain any value with correct hashes.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Annotated, Any, Literal, Protocol, TypeAlias, get_args

import torch
from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Discriminator,
    Field,
    InstanceOf,
    PlainValidator,
    Strict,
    Tag,
    TypeAdapter,
    ValidationError,
    ValidationInfo,
    field_validator,
)
from torch import Tensor

from realign.engines.distributed.shard_files import Saved
from realign.errors import CheckpointError
from realign.text import shortened

RecordName: TypeAlias = Literal["metrics", "samples", "eval_samples", "tokens", "spans", "warnings", "system"]
RECORDS: tuple[RecordName, ...] = get_args(RecordName)
"""Record files of a run, without `.jsonl`."""

SAVED = re.compile(r"step_[0-9]{6,}")
"""Names of the folders of models that a run writes every `every_steps` steps."""

DEPTH = 50
"""Maximum number of nested levels in a checkpoint, so that no recursive function meets the limit of Python."""


def _plain(value: Any, *, tensors: bool, depth: int = 0) -> Any:
    """Expect nested flags, numbers, text, lists and mappings, and tensors if `tensors` is true."""
    if depth > DEPTH:
        raise ValueError(f"expected at most {DEPTH} nested levels")
    if isinstance(value, Mapping) and len({type(key) for key in value}) > 1:
        raise ValueError("expected keys of one type")
    if isinstance(value, Tensor | Saved) and not tensors:
        raise ValueError("expected plain values")
    inner = value.values() if isinstance(value, Mapping) else value if isinstance(value, list | tuple) else ()
    for item in inner:
        _plain(item, tensors=tensors, depth=depth + 1)
    return value


Count: TypeAlias = Annotated[int, Field(ge=0, le=10**12)]
Word: TypeAlias = Annotated[int, Field(ge=0, lt=2**32)]
Number: TypeAlias = Annotated[float, Field(allow_inf_nan=False)]
NonNegative: TypeAlias = Annotated[Number, Field(ge=0)]
Text: TypeAlias = InstanceOf[str]
"""Any text; pydantic's own type rejects lone surrogates, which file names can contain."""
# `\Z` in these patterns, because `$` also matches before a newline at the end
Hash: TypeAlias = Annotated[str, Field(pattern=r"^[0-9a-f]{64}\Z")]
SavedName: TypeAlias = Annotated[str, Field(pattern=rf"^{SAVED.pattern}\Z")]
FilePath: TypeAlias = Annotated[str, Field(pattern=r"^(?!/)(?!.*(^|/)\.\.?(/|$))[^\0]+\Z")]
"""Path of a file inside a folder."""
AnyTensor: TypeAlias = Tensor | Saved
"""A tensor; a sharded one is a reference to files."""
Tensors: TypeAlias = dict[Text, AnyTensor]
Moment: TypeAlias = AnyTensor | Number | None
State: TypeAlias = Annotated[dict[Any, Any], AfterValidator(partial(_plain, tensors=True))]
"""State of a class, which may be a user's."""
Config: TypeAlias = Annotated[Any, PlainValidator(partial(_plain, tensors=False))]


class _Record(BaseModel):
    """A mapping with exactly these keys. No value is converted."""

    model_config = ConfigDict(
        extra="forbid",
        strict=True,
        arbitrary_types_allowed=True,
        regex_engine="python-re",  # the other one has no lookahead
        defer_build=True,  # most launches resume nothing
    )


class _Open(_Record, extra="ignore"):
    """A mapping that may have further keys."""


# --- models ----------------------------------------------------------------------------------------------------------


class _ParamGroup(_Open):
    params: list[Count]


class _TorchState(_Record):
    state: dict[Count, dict[Text, Moment | dict[Text, Moment]]]
    """For each weight; bitsandbytes nests the tensors of 8-bit states."""
    param_groups: list[_ParamGroup]


class OptimizerState(_Open):
    """State of `TorchOptimizer`."""

    optimizer: _TorchState
    optimizer_steps: Count
    train_steps: Count
    nonfinite_in_a_row: Count


class _Average(_Record):
    average: list[AnyTensor]


DecodeName: TypeAlias = Literal["modules", "fused", "compiled", "graphs"]
"""The values of `DecodePath`."""


class _EngineState(_Open):
    """State of `TransformersEngine`."""

    module: Tensors
    value_head: Tensors | None
    optimizer: OptimizerState | None
    ema: _Average | None
    fused: bool
    decode: DecodeName | None


def _kind_of_engine(value: Any) -> str:
    """Tell the state of `TransformersEngine` from that of another engine, which contains any plain values."""
    own = isinstance(value, Mapping) and _EngineState.model_fields.keys() <= value.keys()
    return "transformers" if own else "other"


class _ModelState(_Record):
    version: Count
    engine: (
        Annotated[
            Annotated[_EngineState, Tag("transformers")] | Annotated[State, Tag("other")],
            Discriminator(_kind_of_engine),
        ]
        | None
    )
    weights: Tensors = {}
    """Of a role that is synced from a trained one."""


class _Frozen(_Record):
    path: Text | None
    sha256: Text
    of_files: bool = False
    """Whether the hash is that of the files with the weights."""


# --- position in the data --------------------------------------------------------------------------------------------


def _position(value: Any, depth: int = 0) -> Any:
    """Expect a position in a file: null, an offset, text, or a list of up to three positions."""
    if isinstance(value, list | tuple) and len(value) <= 3 and depth < 4:
        for part in value:
            _position(part, depth + 1)
    elif not (value is None or isinstance(value, str) or (type(value) is int and 0 <= value <= 2**62)):
        raise ValueError("expected a position in a file")
    return value


class _Stream(_Record):
    """Position in a streamed source."""

    epoch: Count
    block: Count
    file: Count
    index: Count
    kept: Count
    read: Count
    truncated: Count
    per_epoch: Count | None
    start: Annotated[Any, PlainValidator(_position)]
    dropped: dict[Text, Count]


class _Anchor(_Record):
    place: Count
    sources: list[_Stream]


class OrderState(_Record):
    """Positions in streamed data."""

    anchors: list[_Anchor]

    @field_validator("anchors")
    @classmethod
    def _in_order(cls, anchors: list[_Anchor]) -> list[_Anchor]:
        places = [anchor.place for anchor in anchors]
        if places != sorted(places) or places[:1] != [0]:
            raise ValueError("expected positions in order, of which the first one is the start")
        return anchors


class _Curriculum(_Record):
    """The choices of a curriculum that wait for their rewards, and the pass rates of the rows."""

    next: Count
    cursor: Count
    waiting: list[Annotated[list[Count], Field(min_length=2, max_length=2)]]
    """Place of the stream, and place of the usual order."""
    outcomes: Tensor
    visits: Tensor

    @field_validator("waiting")
    @classmethod
    def _chosen_once(cls, waiting: list[list[int]], info: ValidationInfo) -> list[list[int]]:
        ends = info.data.get("next", 0), info.data.get("cursor", 0)
        if any(value >= end for pair in waiting for value, end in zip(pair, ends, strict=True)):
            raise ValueError(f"expected places below next={ends[0]} and cursor={ends[1]}")
        if any(len(set(column)) < len(waiting) for column in zip(*waiting, strict=True)):
            raise ValueError("expected distinct places")
        return waiting

    @field_validator("outcomes", "visits")
    @classmethod
    def _rates(cls, x: Tensor, info: ValidationInfo) -> Tensor:
        kind = torch.float64 if info.field_name == "outcomes" else torch.int64
        if x.dtype != kind or x.ndim != (2 if kind.is_floating_point else 1) or x.layout != torch.strided:
            raise ValueError(f"expected numbers of type {kind}")
        if ((x < 0) | ((x > 1) if kind.is_floating_point else (x > 10**12))).any():  # NaN: no visit
            raise ValueError("expected rates from 0 to 1, and counts")
        return x


class _Data(_Record):
    """A position in the data. A wrong one would train on other prompts, or read streamed data without end."""

    drawn: Count
    batch_prompts: Annotated[int, Field(ge=1, le=10**6)]
    rows: Count
    epoch: Count
    index: Count
    seed: Annotated[int, Field(ge=-(2**63), le=2**64)]
    sha256: Text | None
    order: OrderState | None = None
    curriculum: _Curriculum | None = None

    @field_validator("index")
    @classmethod
    def _at_drawn(cls, index: int, info: ValidationInfo) -> int:
        at = info.data
        if {"drawn", "batch_prompts", "rows", "epoch"} <= at.keys():
            place, rows = at["drawn"] * at["batch_prompts"], at["rows"]
            if (at["epoch"], index) != (divmod(place, rows) if rows else (0, place)):
                raise ValueError(
                    f"expected the place after drawn={at['drawn']} batches of {at['batch_prompts']} of "
                    f"{rows or 'streamed'} rows, not epoch {at['epoch']}, index {index}"
                )
        return index


class _Rollout(_Record):
    version: Count
    trained: Count
    next_place: Count
    untrained: list[Count]

    @field_validator("untrained")
    @classmethod
    def _begun_once(cls, places: list[int], info: ValidationInfo) -> list[int]:
        end = info.data.get("next_place", 0)
        if len(set(places)) < len(places) or any(place >= end for place in places):
            raise ValueError(f"expected distinct places below next_place={end}")
        return places


# --- the run ---------------------------------------------------------------------------------------------------------


class _Numpy(_Record):
    bit_generator: Literal["MT19937"]
    key: Annotated[list[Word], Field(min_length=624, max_length=624)]
    pos: Annotated[int, Field(ge=0, le=624)]
    has_gauss: Annotated[int, Field(ge=0, le=1)]
    gauss: Number


# Mersenne Twister: 624 words of state, and the index of the next one
_Words: TypeAlias = Annotated[list[Word], Field(min_length=625, max_length=625)]


class _Random(_Record):
    python: Annotated[tuple[Literal[3], _Words, Number | None], Strict(False)]  # JSON has no tuples
    numpy: _Numpy
    torch: AnyTensor
    cuda: list[AnyTensor]


class _Counters(_Record):
    optimizer_steps: NonNegative
    rewards_seen: Count
    reward_ema: float | None
    best_reward: float | None
    ratio_checked: list[Text]


class _Records(_Record):
    seconds: NonNegative
    sizes: Annotated[dict[RecordName, Count], Field(min_length=len(RECORDS))]
    sha256: Annotated[dict[RecordName, Hash], Field(min_length=len(RECORDS))]


class _File(_Record):
    bytes: Count
    sha256: Hash


class _Saves(_Record):
    made: list[SavedName]
    known: list[Text]
    best: Text | None
    record: float
    best_step: Count | None
    final: dict[FilePath, _File] = {}
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

    config: Config
    counters: _Counters
    data: _Data
    environment: dict[Text, Text | Number]
    frozen: dict[Text, _Frozen]
    interfaces: dict[Text, State]
    models: dict[Text, _ModelState]
    random: _Random
    records: _Records
    saves: _Saves
    callbacks: _Callbacks
    realign: Text
    rollout: _Rollout | None


def check_tree(path: str, step: int, tree: Mapping[str, Any]) -> None:
    """Check that a tree has the keys, types and ranges that a run writes.

    Args:
        path: Path of the checkpoint, for the message.
        step: Step of the checkpoint.
        tree: Content of the checkpoint.

    Raises:
        CheckpointError: A value does not fit the schema. The message names its path and the value.
    """
    if missing := _Tree.model_fields.keys() - tree.keys():
        lacking = ", ".join(sorted(missing))
        raise CheckpointError(f"{path} is not a checkpoint of a run: it lacks {lacking}. Use another one.")
    check(_Tree, tree)
    if tree["rollout"] is not None and (version := tree["rollout"]["version"]) > step:
        raise _mismatch("rollout.version", version, f"Input should be at most the step of the checkpoint, {step}")


def check(kind: Any, value: Any, path: str = "") -> None:
    """Check a value without converting it.

    Args:
        kind: Model or annotation.
        value: Part of a tree.
        path: Path of the value, for the message.

    Raises:
        CheckpointError: The value does not fit. The message names the path and the value.
    """
    try:
        TypeAdapter(kind).validate_python(value)
    except ValidationError as error:
        first, *others = error.errors(include_url=False, include_context=False)
        place = _place(path, first["loc"], value)
        # a value that fits no member of a union has an error for each member
        alike = [first, *(other for other in others if _place(path, other["loc"], value) == place)]
        problems = dict.fromkeys(entry["msg"].removeprefix("Value error, ") for entry in alike)
        missing = f" ({first['loc'][-1]})" if first["type"] == "missing" else ""
        raise _mismatch(place, first["input"], " or ".join(problems) + missing) from None


def _place(path: str, loc: Sequence[Any], value: Any) -> str:
    """Return the path of a value from the location in an error, which also contains the tags of unions."""
    names = [path] if path else []
    for name in loc:
        # a place can also be that of an element which a tuple lacks
        indexed = isinstance(value, list | tuple) and isinstance(name, int) and name < len(value)
        if indexed or (isinstance(value, Mapping) and name in value):
            value = value[name]
            names.append(str(name))
    return ".".join(names)


def _mismatch(path: str, value: Any, problem: str) -> CheckpointError:
    """Describe a value that no run writes."""
    shown = shortened("a tensor" if isinstance(value, Tensor) else " ".join(repr(value).split()), 80)
    return CheckpointError(
        f"{shortened(path, 300)}={shown} in the checkpoint: {problem}. The checkpoint was changed. Resume from another "
        "one."
    )


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
    remedy = f"Set resume_skip=[{skip}] to resume without it."
    try:
        component.load_state_dict(state)
    except Exception as error:
        if type(component).load_state_dict.__module__.startswith("realign."):
            reason = f"{type(error).__name__}: {error}"
            raise CheckpointError(f"{where}: the state in the checkpoint does not fit ({reason}). {remedy}") from error
        error.add_note(f"{where}: the state in the checkpoint was not restored. {remedy}")
        raise
