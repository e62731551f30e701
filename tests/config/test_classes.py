"""Test what a class tells a config: fields, types, defaults as a config writes them, and texts."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import pytest

from realign.api import DataflowGraph
from realign.config.classes import Type, described, types_of
from realign.settings import Count, Fraction, Range, Settings
from tests.config.components import HERE, Clip, Gspo, Objective, Style, flow_of_interfaces


@dataclass
class Base(Settings):
    """Has fields.

    Args:
        listed: text
            of two lines.
        other (int): no field.
    """

    listed: int
    ratio: Fraction = 0.5
    """Share of
    rows."""
    style: Style = Style.none
    objective: Objective = field(default_factory=lambda: Clip(high=0.25))
    constant: ClassVar[int] = 1
    made: int = field(default=0, init=False)
    _hidden: int = 0


@dataclass
class Below(Base):
    ratio: Fraction = 0.25
    listed: int = 1
    """Own text."""


def test_fields_are_those_that_a_config_can_set_with_defaults_as_it_writes_them():
    cls = described(Base)
    assert list(cls.fields) == ["listed", "ratio", "style", "objective"]
    assert [f.required for f in cls.fields.values()] == [True, False, False, False]
    expected = [None, 0.5, "none", {"_target_": f"{HERE}.Clip", "high": 0.25}]
    assert [f.default for f in cls.fields.values()] == expected
    assert described(Below).fields["ratio"].default == 0.25


def test_a_text_is_the_string_after_a_field_its_line_in_the_docstring_or_that_of_the_base_class():
    fields = described(Base).fields
    assert (fields["listed"].text, fields["ratio"].text, fields["style"].text) == (
        "text of two lines.",
        "Share of rows.",
        "",
    )
    below = described(Below)
    assert (below.fields["listed"].text, below.fields["ratio"].text) == ("Own text.", "Share of rows.")
    assert below.text.startswith("Has fields.")  # not the signature that `dataclass` makes a docstring of


@pytest.mark.parametrize(
    ("annotation", "expected"),
    [
        (int | None, [Type("int"), Type("None")]),
        (Count | None, [Type("int", range="at least 1"), Type("None")]),
        (Annotated[float | int, Range(gt=0)], [Type("float", range="above 0"), Type("int", range="above 0")]),
        (Literal["a", "b"], [Type("Literal", members={"a": "", "b": ""})]),
        (Style, [Type("Style", f"{HERE}.Style", members={"gspo": "", "none": ""})]),
        (dict[str, Gspo], [Type("dict", "", ((Type("str"),), (Type("Gspo", f"{HERE}.Gspo"),)))]),
        (Path, [Type("Path")]),
        (Any, [Type("Any")]),
    ],
)
def test_an_annotation_is_the_types_of_its_members(annotation, expected):
    assert list(types_of(annotation)) == expected


def test_a_function_of_a_graph_has_the_parameters_that_a_config_sets():
    cls = described(flow_of_interfaces)
    assert cls.returns == f"{DataflowGraph.__module__}.DataflowGraph"
    assert [(f.name, f.default, f.required) for f in cls.fields.values()] == [("twice", False, False)]
