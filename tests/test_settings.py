"""Test that each enum and range declared by a settings class is enforced, for values from text and from Python."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import itertools
import math
import pkgutil
import re
from collections.abc import Mapping
from enum import Enum
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import pytest
from pydantic import Field, StringConstraints

import realign
from realign.config import ExperimentConfig
from realign.data import PromptData
from realign.engines import OptimizerSpec, TransformersModel
from realign.errors import RealignError, SettingsError
from realign.interfaces.environment import EnvironmentInterface
from realign.settings import Auto, Count, Fraction, Range, Settings, check_value, choices_of, hints_of, members_of


def settings_classes() -> list[type[Settings]]:
    """Return all concrete dataclasses of the package that inherit from `Settings`."""
    for module in pkgutil.walk_packages(realign.__path__, "realign."):
        if not module.name.endswith("__main__"):
            importlib.import_module(module.name)
    waiting, classes = [Settings], []
    while waiting:
        cls = waiting.pop()
        waiting += cls.__subclasses__()
        ours = cls.__module__.startswith("realign.") and not inspect.isabstract(cls)
        ours = ours and cls is not ExperimentConfig  # its values may be `???` still; `Experiment` checks them
        if ours and "__dataclass_fields__" in vars(cls):
            classes.append(cls)
    return sorted(classes, key=lambda cls: (cls.__module__, cls.__qualname__))


CLASSES = settings_classes()
FIELDS = [
    (cls, field.name, hints_of(cls, extras=True)[field.name]) for cls in CLASSES for field in dataclasses.fields(cls)
]


def enums_of(annotation: Any) -> list[type[Enum]]:
    kinds = [member.type for member in members_of(annotation)]
    return [kind for kind in kinds if isinstance(kind, type) and issubclass(kind, Enum)]


def ranges_of(annotation: Any) -> list[Range]:
    """Return the ranges of the value itself; those of the items of a list or mapping are no part of it."""
    return [extra for member in members_of(annotation) for extra in member.extras if isinstance(extra, Range)]


def items_of(annotation: Any) -> list[tuple[type, Any]]:
    """Return each list or mapping whose items have a range, with the annotation of an item."""
    kinds = [(get_origin(member.type), get_args(member.type)) for member in members_of(annotation)]
    return [(origin, inside[-1]) for origin, inside in kinds if origin and inside and ranges_of(inside[-1])]


def label(value: Any) -> str:
    return value.__qualname__ if isinstance(value, type) else str(value) if isinstance(value, str) else ""


PLACEHOLDERS = {
    "name": "x",
    "path": "folder",
    "of": "actor",
    "model": TransformersModel("folder"),
    "environment": "module:Class",
    "episodes": EnvironmentInterface("module:Class"),
    "data": PromptData("prompts.jsonl"),
    "prompts": PromptData("prompts.jsonl"),
    "pretraining": PromptData("prompts.jsonl"),
}
"""Values of fields without a default. Other unchecked fields get None."""


def made(cls: type[Settings], name: str, value: Any) -> Any:
    """Build the settings with this value of one field."""
    required = {
        field.name: 1
        if ranges_of(get_type_hints(cls, include_extras=True)[field.name])
        else PLACEHOLDERS.get(field.name)
        for field in dataclasses.fields(cls)
        if field.init and field.default is field.default_factory is dataclasses.MISSING
    }
    return cls(**(required | {name: value}))


def outcome(cls: type[Settings], name: str, value: Any) -> Any:
    """Return the settings, or the error message about a conflict of this value with other fields."""
    try:
        return made(cls, name, value)
    except RealignError as error:
        return str(error)


@pytest.mark.parametrize(("cls", "name", "annotation"), [f for f in FIELDS if enums_of(f[2])], ids=label)
def test_every_enum_is_the_same_from_text_and_from_its_member(cls, name, annotation):
    for kind in enums_of(annotation):
        for text, member in choices_of(kind).items():
            built = outcome(cls, name, text)
            assert built == outcome(cls, name, member)
            assert isinstance(built, str) or getattr(built, name) is member
    with pytest.raises(SettingsError, match=rf"^{name}='nonsense': unknown choice \(valid: "):
        made(cls, name, "nonsense")


def outside(limits: Range) -> list[float]:
    """Return numbers just beyond the bounds of a range."""
    below = [limits.ge - 1 if limits.ge is not None else limits.gt] if (limits.ge, limits.gt) != (None, None) else []
    above = [limits.le + 1 if limits.le is not None else limits.lt] if (limits.le, limits.lt) != (None, None) else []
    return [x for x in (*below, *above) if x is not None]


@pytest.mark.parametrize(("cls", "name", "annotation"), [f for f in FIELDS if ranges_of(f[2])], ids=label)
def test_every_range_refuses_what_is_outside_and_names_the_field(cls, name, annotation):
    whole = any(member.type is int for member in members_of(annotation))
    for limits in ranges_of(annotation):
        for value in [*outside(limits), *([] if whole else [math.nan])]:
            given = int(value) if whole else value
            with pytest.raises(SettingsError, match=rf"^{name}={given!r}: must be "):
                made(cls, name, given)


@pytest.mark.parametrize(("cls", "name", "annotation"), [f for f in FIELDS if items_of(f[2])], ids=label)
def test_every_range_of_an_item_refuses_what_is_outside_and_names_the_item(cls, name, annotation):
    for (origin, inside), item in itertools.product(items_of(annotation), (0, 1)):
        place = f".{item}" if issubclass(origin, Mapping) else f"[{item}]"
        for limits in ranges_of(inside):
            valid = next(x for x in (0, 1, 0.5) if x in limits)
            for value in outside(limits):
                values = [value if i == item else valid for i in range(2)]
                given = {str(i): x for i, x in enumerate(values)} if issubclass(origin, Mapping) else values
                with pytest.raises(SettingsError, match=rf"^{name}{re.escape(place)}={value!r}: must be "):
                    made(cls, name, given)


def test_items_are_found_in_nested_lists_and_their_enums_are_read():
    nested = dict[str, list[Count]] | None
    assert check_value("n", {"a": [1, 2]}, nested) == {"a": [1, 2]}
    with pytest.raises(SettingsError, match=r"^n\.a\[1\]=0: must be at least 1$"):
        check_value("n", {"a": [1, 0]}, nested)
    assert check_value("n", ["auto"], list[Auto]) == [Auto.auto]
    with pytest.raises(SettingsError, match=r"^betas=\[0\.9\]: must have 2 values$"):
        OptimizerSpec(betas=(0.9,))


def test_none_passes_only_if_the_annotation_allows_it():
    assert check_value("n", None, Count | None) is None
    with pytest.raises(SettingsError, match=r"^n must not be null; valid: a whole number at least 1$"):
        check_value("n", None, Count)


@pytest.mark.parametrize(
    ("annotation", "value", "message"),
    [
        (Annotated[str, StringConstraints(pattern="^[a-z]+$")], "A1", "should match pattern"),
        (Annotated[float | int, Range(gt=0)], -1, "must be above 0"),
        (Annotated[int, Field(multiple_of=4)] | None, 6, "multiple of 4, or null"),
    ],
)
def test_metadata_of_pydantic_is_enforced_too(annotation, value, message):
    with pytest.raises(SettingsError, match=rf"^size={value!r}: .*{message}"):
        check_value("size", value, annotation)


def test_python_converts_no_number():
    assert isinstance(check_value("low", 1, Fraction), int)
    for value in (True, "1", [1]):
        with pytest.raises(SettingsError, match="must be a whole number at least 1"):
            check_value("n", value, Count)
