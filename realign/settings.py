"""Validation of settings: ranges and choices, for YAML, the command line and Python alike.

Every component and interface is a dataclass that inherits from `Settings`. Ranges are annotations:

    @dataclass
    class Clip(Settings):
        low: Fraction = 0.2
        dual: Annotated[float, Range(gt=1)] | None = None

`Clip(low=3)` raises `SettingsError`. An enum field accepts a member or its name. `None` is valid only where the
annotation allows it. The items of a list, tuple or mapping are values with an annotation, too: `list[Count]`. pydantic
validates the values, so its own metadata may stand beside `Range`, such as
`Annotated[str, StringConstraints(pattern="[a-z]+")]`. It is imported with the first value that is validated: processes
that only import settings do not wait for it.
"""

from __future__ import annotations

import math
import operator
import types
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, fields, is_dataclass
from enum import Enum, StrEnum
from functools import cache, partial
from pathlib import Path
from typing import (
    TYPE_CHECKING,
    Annotated,
    Any,
    ClassVar,
    NamedTuple,
    Protocol,
    Union,
    get_args,
    get_origin,
    get_type_hints,
)

from realign.errors import NoEffectError, SettingsError

if TYPE_CHECKING:
    from pydantic import GetCoreSchemaHandler
    from pydantic_core.core_schema import CoreSchema


@dataclass(frozen=True)
class Range:
    """An interval of numbers. A bound of None does not apply. No range contains NaN."""

    ge: float | None = None
    gt: float | None = None
    le: float | None = None
    lt: float | None = None

    def __contains__(self, x: float) -> bool:
        above = (self.ge is None or x >= self.ge) and (self.gt is None or x > self.gt)
        below = (self.le is None or x <= self.le) and (self.lt is None or x < self.lt)
        return above and below and x == x  # NaN differs from itself; an integer may exceed the floats

    def __str__(self) -> str:
        bounds = {"at least": self.ge, "above": self.gt, "at most": self.le, "below": self.lt}
        given = {word: bound for word, bound in bounds.items() if bound is not None}
        texts = [f"{word} {bound:g}" for word, bound in given.items() if math.isfinite(bound)]
        return " and ".join([*texts, "finite"] if len(texts) < len(given) else texts)

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        from pydantic_core.core_schema import no_info_after_validator_function

        return no_info_after_validator_function(self._inside, handler(source))

    def _inside(self, x: float) -> float:
        from pydantic_core import PydanticCustomError

        if x not in self:
            raise PydanticCustomError("range", "must be {limits}", {"limits": str(self)})
        return x


class Auto(StrEnum):
    """A value that the run chooses for its device."""

    auto = "auto"


_LEAVES = (bool, int, float, str, Path)
Count = Annotated[int, Range(ge=1)]
"""An integer of at least 1."""
NonNegativeInt = Annotated[int, Range(ge=0)]
NonNegative = Annotated[float, Range(ge=0, lt=math.inf)]
Positive = Annotated[float, Range(gt=0, lt=math.inf)]
Finite = Annotated[float, Range(gt=-math.inf, lt=math.inf)]
Fraction = Annotated[float, Range(ge=0, le=1)]


class Settings:
    """Base class of dataclasses that validate their enums and ranges on construction.

    A subclass with its own `__post_init__` calls `super().__post_init__()` first.

    Raises:
        SettingsError: a field has a value outside its range or choices, or has no effect. The message names the field,
            its value and the valid values.
    """

    by_word: ClassVar[bool] = True
    """Whether a config may choose the class by its name, where a field takes its base class."""

    def __post_init__(self) -> None:
        if not is_dataclass(self):
            return
        hints = hints_of(type(self), extras=True)
        for field in fields(self):
            given = getattr(self, field.name)
            value = check_value(field.name, given, hints[field.name])
            if value is not given:
                object.__setattr__(self, field.name, value)  # also of a frozen dataclass
        for name, reason in self.ineffective().items():
            if (value := getattr(self, name)) != default_of(type(self), name):
                raise NoEffectError(type(self), name, _format(value), reason)

    def ineffective(self) -> Mapping[str, str]:
        """Return the fields that change nothing beside the values of the others, each with the reason and a cure.

        Such a field is an error if it was set in Python or on the command line, and a line of the launch table if it
        comes from a file. A default is neither, so this method need not look at the value of the field itself.
        """
        return {}


def default_of(kind: type, name: str) -> Any:
    """Return the default of a field of a dataclass; `MISSING` if it has none."""
    field: Field[Any] = kind.__dataclass_fields__[name]  # type: ignore[attr-defined]
    return field.default if field.default_factory is MISSING else field.default_factory()


def _format(value: Any) -> str:
    """Return a value as it is written on the command line; empty for a component."""
    if is_dataclass(value):
        return ""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, Enum):
        return value.name.rstrip("_")
    if isinstance(value, list):
        return f"[{', '.join(map(str, value))}]"
    return f"{value:g}" if isinstance(value, float) else str(value)


@cache
def hints_of(thing: Any, *, extras: bool = False) -> Mapping[str, Any]:
    """Return the evaluated annotations of a class or function, with metadata such as a `Range` if `extras`.

    Evaluating them takes longer than building an object and checking its values.

    Raises:
        NameError: a name is imported under TYPE_CHECKING only.
    """
    return get_type_hints(thing, include_extras=extras)


class Member(NamedTuple):
    """One member of an annotation, which is a union or that member alone."""

    type: Any
    """The type without metadata, such as int, list[str], None's type, or a class."""
    extras: tuple[Any, ...] = ()
    """Metadata, such as a `Range`."""


@cache
def members_of(annotation: Any) -> tuple[Member, ...]:
    """Return the members of an evaluated annotation. Metadata of a union is that of each member."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return tuple(Member(member.type, (*member.extras, *arguments[1:])) for member in members_of(arguments[0]))
    if origin in (Union, types.UnionType):
        return tuple(dict.fromkeys(member for argument in arguments for member in members_of(argument)))
    return (Member(type(None) if annotation is None else annotation),)


class AcceptsForeign(ABC):
    """A component whose `_target_` may also name a class of another library, which is no dataclass.

    The keys beside `_target_` are arguments of that class, or settings of the component that wraps it.
    """

    stand_in: ClassVar[str]
    """Import path of the component that wraps such a class; it implements `StandIn`."""

    @classmethod
    @abstractmethod
    def foreign_base(cls) -> type:
        """Return the base class of the accepted classes."""


class StandIn(Protocol):
    """A component that wraps a class of another library."""

    @classmethod
    def fields_for(cls, path: str, values: Mapping[str, Any]) -> dict[str, Any]:
        """Return the fields of the component for a class.

        Args:
            path: import path of the class.
            values: keys of the config beside `_target_`.
        """


def check_value(name: str, value: Any, annotation: Any) -> Any:
    """Validate the value of a field and return it, with the name of an enum member replaced by the member.

    Values of other types are returned unchanged, since a type checker (in Python) or `realign.config` (in YAML)
    checks them.

    Args:
        name: name of the field, for messages.
        value: value of the field.
        annotation: annotation of the field, with its extras.

    Raises:
        SettingsError: a number is outside its range, or a text is not the name of a member. An item of a list or
            mapping is named `name[i]` or `name.key`.
    """
    members = members_of(annotation)
    for member in members:
        if (checked := _check_items(name, value, member.type)) is not value:
            return checked
    null = Member(type(None)) in members
    if not any(map(_is_checked, members)) or (value is None and null):
        return value
    mistakes = []
    # One member at a time, since pydantic would list an error for each member of a union (ADR 40).
    for member in members:
        kind = get_origin(member.type) or member.type
        # pydantic would select a member of an enum by its value, and check the fields of a dataclass once more
        if isinstance(kind, type) and kind not in _LEAVES:
            given = choices_of(kind).get(value, value) if _is_enum(kind) and isinstance(value, str) else value
            if getattr(kind, "_is_protocol", False) or isinstance(given, kind):
                return given
            continue
        try:
            _validator(member)(value)
        except ValueError as error:  # pydantic's ValidationError, without importing pydantic
            mistakes += error.errors()  # type: ignore[attr-defined]
        else:
            return value  # an int stays one in a float field
    if value is None:
        raise SettingsError(f"{name} must not be null; valid: {_valid(members)}")
    or_null = ", or null" if null else ""
    choices = [choice for member in members if _is_enum(member.type) for choice in choices_of(member.type)]
    if choices and isinstance(value, str):
        raise SettingsError(f"{name}={value!r}: unknown choice (valid: {', '.join(choices)}{or_null})")
    # Messages about the value, such as multiple_of, say more than those about a type, such as int_type.
    of_values = (mistake["msg"] for mistake in mistakes if not mistake["type"].endswith("_type"))
    raise SettingsError(f"{name}={value!r}: {next(of_values, f'must be {_valid(members)}')}{or_null}")


def _check_items(name: str, value: Any, kind: Any) -> Any:
    """Validate the items of a list, tuple or mapping, and return it, or a changed copy of it.

    Args:
        name: name of the field, for messages.
        value: value of the field.
        kind: one member of its annotation, such as `list[Count]`. A value of another type is returned.
    """
    origin, arguments = get_origin(kind), get_args(kind)
    if not isinstance(origin, type) or not arguments:
        return value
    if issubclass(origin, Mapping) and isinstance(value, Mapping):
        checked: Any = {key: check_value(f"{name}.{key}", item, arguments[1]) for key, item in value.items()}
        return checked if any(checked[key] is not item for key, item in value.items()) else value
    if issubclass(origin, Sequence) and isinstance(value, list | tuple):
        fixed = origin is tuple and arguments[-1] is not Ellipsis
        if fixed and len(value) != len(arguments):
            raise SettingsError(f"{name}={list(value)}: must have {len(arguments)} values")
        kinds = arguments if fixed else arguments[:1] * len(value)
        checked = [check_value(f"{name}[{i}]", *pair) for i, pair in enumerate(zip(value, kinds, strict=True))]
        return type(value)(checked) if any(map(operator.is_not, checked, value)) else value
    return value


def choices_of(kind: type[Enum]) -> dict[str, Enum]:
    """Return the members of an enum by their names in a config. The member `async_` is written `async`."""
    return {name.rstrip("_"): member for name, member in kind.__members__.items()}


@cache
def _validator(member: Member) -> Callable[..., Any]:
    """Return pydantic's validation of one member of a union, which converts nothing."""
    from pydantic import TypeAdapter

    written: Any = Annotated[member.type, *member.extras] if member.extras else member.type
    return partial(TypeAdapter(written).validate_python, strict=True)


def _is_enum(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, Enum)


def _is_checked(member: Member) -> bool:
    """Return whether values of other types are invalid: for enums, components, and leaves with metadata."""
    kind = member.type
    return (member.extras and kind in _LEAVES) or (isinstance(kind, type) and issubclass(kind, Enum | Settings))


def _valid(members: tuple[Member, ...]) -> str:
    texts = []
    for kind, extras in filter(_is_checked, members):
        if _is_enum(kind):
            texts.append(f"one of {', '.join(choices_of(kind))}")
        elif kind in _LEAVES:
            number = {int: "a whole number", float: "a number"}.get(kind, kind.__name__)
            texts.append(" ".join([number, *(str(extra) for extra in extras if isinstance(extra, Range))]))
        else:
            texts.append(f"an object of {kind.__name__}")
    return " or ".join(texts)
