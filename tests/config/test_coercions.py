"""Test which values a setting accepts, and what it makes of them: from YAML, from the command line and from Python.

coercions.txt is the table of what happens for each kind of annotation. This file compares it with the present code.
Write it again with `python -m tests.config.test_coercions`, and read the difference: each changed line is a change for
users.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
import sys
import tempfile
import textwrap
import warnings
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum, StrEnum
from pathlib import Path
from typing import Annotated, Any, Literal, Protocol

import pytest

from realign.api import ModelInterface
from realign.config import ExperimentConfig, build_experiment, compose
from realign.settings import Count, Finite, Fraction, NonNegative, NonNegativeInt, Positive, Range, Settings
from tests.config.components import BASE

HERE = "tests.config.test_coercions"
TABLE = Path(__file__).with_name("coercions.txt")
REFUSED = "refused: "


# --- annotations -----------------------------------------------------------------------------------------------------


class Mode(Enum):
    """An enum with a member that is a keyword in Python, and one that is called none."""

    low = "low value"
    async_ = "async value"
    none = "none value"


class Word(StrEnum):
    low = "low"
    high = "high value"


@dataclass
class Part(Settings):
    """A component without variants."""

    size: Count = 1
    name: str = "x"


@dataclass(frozen=True)
class Frozen:
    size: int = 1


@dataclass
class Shape(Settings):
    """A base class without fields, which is no choice."""


@dataclass
class Round(Shape):
    radius: Positive = 1.0


@dataclass
class Flat(Shape):
    width: float = 1.0


class Rule(Settings, ABC):
    @abstractmethod
    def value(self) -> float: ...


@dataclass
class Fixed(Rule):
    size: float = 0.0

    def value(self) -> float:
        return self.size


class Scale(Protocol):
    def scaled(self, x: float) -> float: ...


@dataclass
class Twice(Settings):
    factor: float = 2.0

    def scaled(self, x: float) -> float:
        return self.factor * x


@dataclass
class Every(ModelInterface):
    """An interface with a field for each kind of annotation. The defaults are none of the inputs."""

    an_int: int = 77
    an_int_or_null: int | None = 77
    a_float: float = 77.5
    a_float_or_null: float | None = 77.5
    a_bool: bool = False
    a_bool_or_null: bool | None = None
    a_text: str = "default"
    a_text_or_null: str | None = "default"
    a_path: Path = Path("default")
    a_path_or_null: Path | None = Path("default")
    an_enum: Mode = Mode.low
    an_enum_or_null: Mode | None = Mode.low
    a_str_enum: Word = Word.low
    a_literal: Literal["low", "high"] = "low"
    a_literal_or_null: Literal["low", "high"] | None = "low"
    a_literal_number: Literal[1, 2] = 2
    a_count: Count = 77
    a_count_or_null: Count | None = 77
    a_non_negative_int: NonNegativeInt = 77
    a_fraction: Fraction = 0.5
    a_fraction_or_null: Fraction | None = 0.5
    a_positive: Positive = 77.5
    a_positive_or_null: Positive | None = 77.5
    a_non_negative: NonNegative = 77.5
    a_finite: Finite = 77.5
    a_range: Annotated[float, Range(gt=1)] = 77.5
    an_int_or_text: int | str = 77
    a_float_or_text: float | str = 77.5
    an_int_or_bool: int | bool = 77
    a_text_or_list: str | list[str] = "default"
    a_text_or_part_or_list: str | Part | list[str | Part] = "default"
    ints: list[int] = field(default_factory=lambda: [77])
    ints_or_null: list[int] | None = None
    floats: list[float] = field(default_factory=lambda: [77.5])
    texts: list[str] = field(default_factory=lambda: ["default"])
    enums: list[Mode] = field(default_factory=lambda: [Mode.low])
    a_sequence: Sequence[str] = ("default",)
    any_list: list[Any] = field(default_factory=lambda: [77])
    two_floats: tuple[float, float] = (77.5, 77.5)
    some_texts: tuple[str, ...] = ("default",)
    numbers_by_name: dict[str, float] = field(default_factory=dict)
    texts_by_name: dict[str, str] = field(default_factory=dict)
    values_by_name: dict[str, Any] = field(default_factory=dict)
    values_by_name_or_null: dict[str, Any] | None = None
    shapes_by_name: dict[str, Shape] = field(default_factory=dict)
    a_part: Part = field(default_factory=lambda: Part(size=77))
    a_part_or_null: Part | None = field(default_factory=lambda: Part(size=77))
    a_frozen: Frozen = Frozen(size=77)
    a_shape: Shape = field(default_factory=lambda: Round(radius=77.5))
    a_shape_or_null: Shape | None = field(default_factory=lambda: Round(radius=77.5))
    a_shape_or_enum: Shape | Mode = field(default_factory=lambda: Round(radius=77.5))
    shapes: list[Shape] = field(default_factory=list)
    a_rule: Rule = field(default_factory=lambda: Fixed(size=77.5))
    a_rule_or_null: Rule | None = None
    a_protocol: Scale = field(default_factory=lambda: Twice(factor=77.5))
    a_protocol_or_null: Scale | None = None
    a_part_or_mapping: Part | Mapping[str, Any] = field(default_factory=lambda: Part(size=77))
    anything: Any = "default"

    def train_step(self, model: Any, data: Any, mb_spec: Any) -> dict[str, Any]:
        return {}


FIELDS = {f.name: f for f in dataclasses.fields(Every)}
ROOT_FIELDS = (
    "steps",
    "ratio_tolerance",
    "strict_ratio",
    "name",
    "save_best",
    "resume_allow",
    "microbatch",
    "checkpoint",
)
"""Keys of the experiment itself. Hydra checks their types while it merges."""


# --- inputs ----------------------------------------------------------------------------------------------------------

SCALARS: dict[str, Any] = {
    "1": 1,
    "'1'": "1",
    "0": 0,
    "-1": -1,
    "1.0": 1.0,
    "0.5": 0.5,
    "1e3": 1e3,
    "'1e3'": "1e3",
    "1_000": 1000,
    "0x10": 16,
    "inf": float("inf"),
    "nan": float("nan"),
    "true": True,
    "'true'": "true",
    "false": False,
    "yes": "yes",
    "null": None,
    "'null'": "null",
    "none": "none",
    "''": "",
    "10s": "10s",
    "4k": "4k",
    "5%": "5%",
    "low": "low",
    "async": "async",
    "a/b.c": "a/b.c",
    "[]": [],
    "[1]": [1],
    "[1, 2.5]": [1, 2.5],
    "['1', low]": ["1", "low"],
    "[null]": [None],
    "{}": {},
    "{a: 1}": {"a": 1},
}
"""Inputs for all annotations: as text of YAML and of the command line, and as a value of Python."""
PARTS: dict[str, Any] = {
    "part": "part",
    "round": "round",
    "fixed": "fixed",
    "twice": "twice",
    "{size: 2}": {"size": 2},
    "{size: '2'}": {"size": "2"},
    "{size: 0}": {"size": 0},
    "{radius: 2}": {"radius": 2},
    "{a: round}": {"a": "round"},
    "[round, flat]": ["round", "flat"],
    f"{{_target_: {HERE}.Part, size: 2}}": Part(size=2),
    f"{{_target_: {HERE}.Flat, width: 2}}": Flat(width=2),
    f"{{_target_: {HERE}.Fixed}}": Fixed(),
    f"{{_target_: {HERE}.Twice}}": Twice(),
    f"{{_target_: {HERE}.Rule}}": "",
}
"""Inputs for components. In Python, a component is its object."""


def inputs_value(text: str) -> Any:
    """Return the object that is passed in Python for a text."""
    return (SCALARS | PARTS)[text]


def inputs_of(name: str) -> dict[str, Any]:
    annotation = str(FIELDS[name].type) if name in FIELDS else name
    parts = any(kind in annotation for kind in ("Part", "Frozen", "Shape", "Rule", "Scale", "Any"))
    return SCALARS | PARTS if parts else SCALARS


# --- what happens ----------------------------------------------------------------------------------------------------


def shown(value: Any) -> str:
    """Return type and value. An enum member is its name, and a mapping or list shows those of its items."""
    if isinstance(value, Enum):
        return f"{type(value).__name__}.{value.name}"
    if isinstance(value, Path):
        return f"Path({str(value)!r})"
    if dataclasses.is_dataclass(value):
        fields = (f"{f.name}={shown(getattr(value, f.name))}" for f in dataclasses.fields(value))
        return f"{type(value).__name__}({', '.join(fields)})"
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key!r}: {shown(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list | tuple):
        text = ", ".join(map(shown, value))
        return f"[{text}]" if isinstance(value, list) else f"({text},)" if len(value) == 1 else f"({text})"
    return repr(value)


def refused(error: Exception) -> str:
    return REFUSED + type(error).__name__


def with_role(config: ExperimentConfig, role: str) -> ExperimentConfig:
    """Return a config with one of the interfaces that are not the actor, so that many cases share a composition."""
    return dataclasses.replace(config, interfaces={name: config.interfaces[name] for name in ("actor", role)})


class Bench:
    """Composes and builds the cases of one field, all together where possible, since each composition takes time."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "experiment").mkdir(parents=True, exist_ok=True)

    def compose(self, name: str, texts: Mapping[str, str], by: str) -> ExperimentConfig:
        """Compose an experiment with one role per text, set by the YAML file or by the command line."""
        head = {role: f"  {role}: {{_target_: {HERE}.Every" for role in texts}
        if by == "YAML":
            roles = "".join(f"{head[role]}, {name}: {text}}}\n" for role, text in texts.items())
            words = []
        else:
            roles = "".join(f"{line}}}\n" for line in head.values())
            words = [f"interfaces.{role}.{name}={text}" for role, text in texts.items()]
        (self.folder / "experiment" / "every.yaml").write_text(
            BASE.replace("graph:", f"{roles}graph:"), encoding="utf-8"
        )
        return compose(["experiment=every", *words], self.folder)

    def outcomes(self, name: str, by: str) -> dict[str, str]:
        """Return what each input of a field becomes."""
        texts = {f"c{i}": text for i, text in enumerate(inputs_of(name))}
        try:
            together = self.compose(name, texts, by)
        except Exception:  # each alone
            together = None
        return {text: self.outcome(name, role, text, by, together) for role, text in texts.items()}

    def outcome(self, name: str, role: str, text: str, by: str, together: ExperimentConfig | None) -> str:
        try:
            config = together if together is not None else self.compose(name, {role: text}, by)
            return shown(getattr(build_experiment(with_role(config, role)).interfaces[role], name))
        except Exception as error:
            return refused(error)

    def root(self, name: str, text: str, by: str) -> str:
        """Return what an input of a key of the experiment becomes."""
        lines = [line for line in BASE.splitlines(keepends=True) if not line.startswith(f"{name}:")]
        if by == "YAML":
            lines.append(f"{name}: {text}\n")
        (self.folder / "experiment" / "every.yaml").write_text("".join(lines), encoding="utf-8")
        words = [] if by == "YAML" else [f"{name}={text}"]
        try:
            return shown(getattr(build_experiment(compose(["experiment=every", *words], self.folder)), name))
        except Exception as error:
            return refused(error)


def in_python(name: str, value: Any) -> str:
    try:
        return shown(getattr(Every(**{name: value}), name))
    except Exception as error:
        return refused(error)


def section(name: str, folder: Path) -> str:
    """Return the part of the table about one field."""
    bench = Bench(folder)
    if name in FIELDS:
        columns = [
            bench.outcomes(name, "YAML"),
            bench.outcomes(name, "command line"),
            {text: in_python(name, value) for text, value in inputs_of(name).items()},
        ]
        title = f"{name}: {FIELDS[name].type} = {shown(getattr(Every(), name))}"
    else:
        columns = [{text: bench.root(name, text, by) for text in inputs_of(name)} for by in ("YAML", "command line")]
        title = f"{name} of the experiment"
    return "\n".join([title, *described(*columns)]) + "\n"


def described(yaml: dict[str, str], line: dict[str, str], python: dict[str, str] | None = None) -> Iterator[str]:
    """Yield the lines about one field."""
    groups: dict[str, list[str]] = {}
    for text in yaml:
        name = text.replace(f"{HERE}.", "")
        if yaml[text] != line[text]:
            yield f"    {name} -> YAML: {yaml[text]}; command line: {line[text]}"
        elif yaml[text].startswith(REFUSED):
            groups.setdefault(yaml[text], []).append(name)
        else:
            yield f"    {name} -> {yaml[text]}"
        if python is not None:
            what = python[text]
            if not what.startswith(REFUSED):
                what = "unchanged" if what == shown(inputs_value(text)) else f"-> {what}"
            groups.setdefault(f"Python {what}", []).append(name)
    for what in sorted(groups, key=lambda group: group.startswith("Python")):
        names = "all" if len(groups[what]) == len(yaml) else "  ".join(groups[what])
        yield from textwrap.wrap(f"{what}: {names}", 118, **WRAPPING)


WRAPPING: dict[str, Any] = {
    "initial_indent": "    ",
    "subsequent_indent": "        ",
    "break_long_words": False,
    "break_on_hyphens": False,
}
HEAD = """\
What a setting makes of a value, for each kind of annotation. Written by `python -m tests.config.test_coercions`.

`text -> value`: what the text becomes in YAML and on the command line. `refused: Error` lists the texts that raise this
error there. Lines with Python are about the argument of the class in a script, whose value is the object that the text
means: 1, '1', True, None.

"""


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def sections() -> dict[str, str]:
    """Return the parts of the stored table by the name of the field."""
    parts = TABLE.read_text(encoding="utf-8").removeprefix(HEAD).split("\n\n")
    return {re.split("[: ]", part)[0]: part.rstrip("\n") + "\n" for part in parts}


QUICK = {
    *("an_int", "a_float_or_null", "a_bool", "a_text", "an_enum_or_null", "a_literal", "a_count", "a_range"),
    *("a_text_or_list", "ints", "two_floats", "numbers_by_name", "a_part_or_null", "steps", "checkpoint"),
}
"""A field of each kind of annotation; `make test-slow` has all fields."""


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in QUICK else pytest.mark.slow) for name in (*FIELDS, *ROOT_FIELDS)]
)
def test_a_value_becomes_what_the_table_says(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with quiet():
        assert section(name, tmp_path).splitlines() == sections()[name].splitlines()


def test_the_table_has_every_field():
    assert list(sections()) == [*FIELDS, *ROOT_FIELDS]


def main() -> None:
    """Write the table."""
    with tempfile.TemporaryDirectory() as folder, quiet():
        parts = []
        for name in sys.argv[1:] or [*FIELDS, *ROOT_FIELDS]:
            print(name, file=sys.stderr)
            parts.append(section(name, Path(folder)))
    if sys.argv[1:]:
        print("\n".join(parts))
    else:
        TABLE.write_text(HEAD + "\n".join(parts), encoding="utf-8")


if __name__ == "__main__":
    sys.path.insert(0, os.getcwd())
    sys.modules[HERE] = sys.modules["__main__"]  # so that the classes of the config are those of this file
    main()
