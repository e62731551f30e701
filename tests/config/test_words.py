"""Test words: `objective=gspo` selects `Gspo`, a subclass of the class that the field is annotated with."""

from __future__ import annotations

import re
import shutil
import sys
import types
from pathlib import Path

import pytest

import realign
from realign.api import ModelInterface, SamplerSpec
from realign.config import ConfigError, build, build_experiment, compose, words
from realign.config.classes import import_path, types_of
from realign.config.construct import import_target
from realign.config.files import experiments_dir
from realign.config.index import class_at
from realign.config.words import class_of_word, component_bases, snake_case
from realign.interfaces.components import objectives as shipped
from realign.samplers import InProcessSampling
from tests.config.components import (
    HERE,
    Clip,
    Gspo,
    ImportanceCorrection,
    Objective,
    Style,
    Zero,
)
from tests.processes import python
from tests.table_sampler import TableSampling


def words_of(base: type) -> dict[str, type]:
    """Return the imported class of each word."""
    read = class_at(import_path(base))
    assert read is not None
    return {word: import_target(variant.path, word) for word, (variant,) in words.words_of(read).items()}


def actor(**values):
    return build({"_target_": f"{HERE}.Actor", **values}, ModelInterface, "interfaces.actor")


@pytest.mark.parametrize(
    ("name", "word"),
    [
        ("GAE", "gae"),
        ("Clip", "clip"),
        ("GroupRelative", "group_relative"),
        ("SeqMeanTokenMean", "seq_mean_token_mean"),
        ("KLPenalty", "kl_penalty"),
        ("LoRA", "lora"),
        ("QLoRA", "qlora"),
        ("LoRAConfig", "lora_config"),
        ("ReMax", "remax"),
        ("DrGRPO", "dr_grpo"),
        ("K3Estimator", "k3_estimator"),
        ("Adam8bit", "adam8bit"),
        ("REINFORCEPlusPlus", "reinforce_plus_plus"),
    ],
)
def test_the_word_of_a_class_is_its_name_in_snake_case(name, word):
    assert snake_case(name) == word


@pytest.fixture
def module(monkeypatch):
    """Return a function that makes a module from source."""

    def make(name: str, source: str) -> types.ModuleType:
        made = types.ModuleType(name)
        monkeypatch.setitem(sys.modules, name, made)
        exec(f"from dataclasses import dataclass\nfrom {HERE} import *\n{source}", vars(made))
        return made

    return make


@pytest.mark.parametrize("order", [("mine", "yours"), ("yours", "mine")])
def test_two_classes_of_one_word_are_an_error_with_both_paths_once_it_is_typed(module, order):
    made = [module(name, "@dataclass\nclass Square(Objective):\n    power: int = 2\n") for name in order]
    assert actor(objective="clip").objective == Clip()
    with pytest.raises(ConfigError) as caught:
        actor(objective="square")
    key = "interfaces.actor.objective"
    assert str(caught.value) == (
        f"{key}: 'square' is the word of mine.Square and yours.Square; choose by {key}._target_=MODULE.CLASS"
    )
    assert actor(objective={"_target_": "mine.Square"}).objective == made[order.index("mine")].Square()


def test_a_shipped_class_wins_over_one_of_a_user_with_its_word(module):
    base = "from realign.interfaces.components.objectives import Objective\n"
    made = module("mine", f"{base}@dataclass\nclass Gspo(Objective):\n    pass\n")
    built = build_experiment(compose(["experiment=grpo_arithmetic", "interfaces.actor.objective=gspo"]))
    assert type(built.interfaces["actor"].objective) is shipped.Gspo is not made.Gspo


def test_abstract_private_local_and_replaced_classes_are_no_words(module):
    made = module(
        "mine",
        "from abc import ABC, abstractmethod\n"
        "@dataclass\nclass _Hidden(Objective):\n    pass\n"
        "@dataclass\nclass Open(Objective, ABC):\n    @abstractmethod\n    def x(self): ...\n"
        "def make():\n    @dataclass\n    class Local(Objective):\n        pass\n    return Local\n"
        "local = make()\n"
        "@dataclass\nclass Twice(Objective):\n    low: int = 1\n"
        "first = Twice\n"  # as a cell of a notebook that runs again
        "@dataclass\nclass Twice(Objective):\n    low: int = 2\n",
    )
    assert {*words_of(Objective)} == {"clip", "gspo", "tight_clip", "twice"}
    assert actor(objective="twice").objective == made.Twice(low=2)


IMPORTED = (
    *("_DualClip", "Fraction", "NonNegative", "PolicyLoss", "PolicyTokens", "_Clipped", "_basic", "_dual_text"),
    *("dataclass", "gspo_loss", "override"),
)
"""What the source of `Gspo` takes from its page."""


@pytest.mark.slow
def test_a_class_moves_to_another_file_without_a_change_for_the_command_line(tmp_path):
    copy = tmp_path / "realign"
    shutil.copytree(Path(realign.__file__).parent, copy, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copytree(experiments_dir(), copy / "experiments")
    page = copy / "interfaces" / "components" / "objectives.py"
    text = page.read_text()
    start = text.index("@dataclass\nclass Gspo(")
    end = text.index("def cispo_loss", start)
    names = f"from {shipped.__name__} import {', '.join(IMPORTED)}"
    (page.parent / "gspo.py").write_text(f"from __future__ import annotations\n{names}\n\n\n{text[start:end]}")
    page.write_text(f"{text[:start]}{text[end:]}\n\nfrom realign.interfaces.components.gspo import Gspo\n")
    words = ["graph", "experiment=grpo_arithmetic", "algorithm=gspo", "interfaces.actor.objective.low=0.1"]
    code = f"import sys; from realign.cli.commands import main; sys.exit(main({words!r}))"
    done = python(code, tmp_path, PYTHONPATH=str(tmp_path), XDG_CACHE_HOME=str(tmp_path / "cache"))
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("annotation", [str, Objective | str, Style, Style | None, object, int, dict[str, Objective]])
def test_fields_that_accept_text_take_no_words(annotation):
    assert component_bases(types_of(annotation)) == []
    assert class_of_word("gspo", types_of(annotation), "key") is None


def test_a_word_builds_the_class_with_its_own_defaults_in_fields_lists_and_mappings():
    made = actor(objective="clip", correction="importance_correction", terms={"a": "gspo"}, several=["gspo", "clip"])
    assert made.objective == Clip()  # the defaults of the class, instead of the default of the field (high=0.25)
    assert made.correction == ImportanceCorrection()
    assert (made.terms, made.several) == ({"a": Gspo()}, [Gspo(), Clip()])
    assert actor(advantage={"_target_": f"{HERE}.GroupRelative", "baseline": "zero"}).advantage.baseline == Zero()


def test_none_means_none_exactly_where_the_annotation_allows_it():
    for nothing in ("none", None):
        assert actor(correction=nothing).correction is None
    with pytest.raises(ConfigError, match=r"^interfaces\.actor\.objective must not be null; .*clip, gspo, tight_clip"):
        actor(objective=None)
    with pytest.raises(ConfigError, match=r"^interfaces\.actor\.objective: unknown choice 'none'.*\(valid: clip, gspo"):
        actor(objective="none")


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (
            {"objective": "gsop"},
            "interfaces.actor.objective: unknown choice 'gsop'; did you mean 'gspo'? (valid: clip, gspo, tight_clip); "
            "interfaces.actor.objective._target_=MODULE.CLASS selects your own class",
        ),
        ({"objective": "objective"}, "interfaces.actor.objective: unknown choice 'objective'"),
        ({"objective": "Gspo"}, "interfaces.actor.objective: unknown choice 'Gspo'; did you mean 'gspo'?"),
        (
            {"correction": "importance"},
            "interfaces.actor.correction: expected ImportanceCorrection, found 'importance'",
        ),
        ({"several": ["gsop"]}, "interfaces.actor.several[0]: unknown choice 'gsop'"),
    ],
)
def test_an_unknown_word_is_an_error_that_lists_the_valid_ones(values, message):
    with pytest.raises(ConfigError, match=f"^{re.escape(message)}"):
        actor(**values)


def sampler(*overrides: str) -> SamplerSpec:
    """Return the sampler of the actor in a run with these overrides."""
    return build_experiment(compose(["experiment=grpo_arithmetic", *overrides])).models["actor"].sampler


WORD, SLOTS = "models.actor.sampler=in_process_sampling", "models.actor.sampler.max_slots=4"
TARGET, BITWISE = "models.actor.sampler._target_=tests.table_sampler.TableSampling", "models.actor.sampler.bitwise=true"


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ([WORD], InProcessSampling()),
        ([WORD, SLOTS], InProcessSampling(max_slots=4)),
        ([SLOTS, WORD], InProcessSampling(max_slots=4)),
        ([SLOTS], InProcessSampling(max_slots=4)),
        ([TARGET, BITWISE], TableSampling(bitwise=True)),
        ([BITWISE, TARGET], TableSampling(bitwise=True)),
    ],
)
def test_a_sampler_is_chosen_by_word_or_target_with_fields_in_either_order(overrides, expected):
    assert sampler(*overrides) == expected
